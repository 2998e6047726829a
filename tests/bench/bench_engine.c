/* bench_engine MODEL [--sessions N] [--prompt N] [--new N] [--policy NAME] [--budget N] [--threads N]
 *              [--backend NAME] [--isa NAME] [--activations 8|16] [--kv-type TYPE] [--text "a chat message"]
 *
 * Tokens per second of the engine without sockets: N sessions put a prompt of made-up tokens at
 * once and generate greedily. Prefill is counted until the last session has its first token, decode
 * from there. --text: one chat message instead, and its answer on the terminal. */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "clock.h"
#include "engine.h"
#include "number.h"

#define SESSIONS_MAX 64u
#define TOKENS_MAX (1u << 20)

struct bench {
    const char *model, *policy, *backend, *isa, *kv_type, *text;
    uint32_t sessions, prompt, n_new, budget, threads, activations;
};

struct client {
    uint64_t id, end_us;
    struct session_port *port;
    uint32_t n_ids, prunes;
    uint64_t first_us, prune_us;
    bool ended;
};

static int usage(void)
{
    fprintf(stderr, "usage: bench_engine MODEL.gguf [--sessions N] [--prompt N] [--new N]\n"
                    "       [--policy NAME] [--budget TOKENS] [--threads N] [--backend NAME]\n"
                    "       [--isa NAME] [--activations 8|16] [--kv-type TYPE] [--text MESSAGE]\n");
    return 2;
}

static bool parse(struct bench *b, int argc, char **argv)
{
    *b = (struct bench){.sessions = 1, .prompt = 512, .n_new = 128, .policy = "none"};
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i], *v = i + 1 < argc ? argv[i + 1] : NULL;
        if (a[0] != '-') {
            b->model = a;
            continue;
        }
        if (v == NULL)
            return false;
        i++;
        if (strcmp(a, "--sessions") == 0)
            b->sessions = number_take(a, v, 1, SESSIONS_MAX);
        else if (strcmp(a, "--prompt") == 0)
            b->prompt = number_take(a, v, 1, TOKENS_MAX);
        else if (strcmp(a, "--new") == 0)
            b->n_new = number_take(a, v, 1, TOKENS_MAX);
        else if (strcmp(a, "--budget") == 0)
            b->budget = number_take(a, v, 0, TOKENS_MAX);
        else if (strcmp(a, "--threads") == 0)
            b->threads = number_take(a, v, 0, NUMBER_THREADS_MAX);
        else if (strcmp(a, "--activations") == 0)
            b->activations = number_take(a, v, 0, 16);
        else if (strcmp(a, "--policy") == 0)
            b->policy = v;
        else if (strcmp(a, "--backend") == 0)
            b->backend = v;
        else if (strcmp(a, "--isa") == 0)
            b->isa = v;
        else if (strcmp(a, "--kv-type") == 0)
            b->kv_type = v;
        else if (strcmp(a, "--text") == 0)
            b->text = v;
        else
            return false;
    }
    return b->model != NULL;
}

static void die(const struct err *e)
{
    fprintf(stderr, "bench_engine: %s: %s\n", e->field, e->text);
    exit(1);
}

static void post(struct engine *en, struct command *c)
{
    struct err e = {0};
    if (engine_post(en, &c, &e) < 0)
        die(&e);
}

/* Takes what is there; text of the first client goes to the terminal if it was asked for. */
static void collect(struct engine *en, struct client *c, const struct bench *b)
{
    for (struct report *r; (r = engine_take(en)) != NULL; report_free(&r)) {
        struct client *k = NULL;
        for (uint32_t i = 0; i < b->sessions; i++)
            if (c[i].id != 0 && c[i].id == r->session)
                k = &c[i];
        if (r->type == REP_ERROR)
            die(&r->u.error);
        if (r->type == REP_OPENED)
            c[r->request_id - 1].id = r->session;
        if (k == NULL || r->type < REP_TOKENS)
            continue;
        k->port->queued--;
        if (r->type == REP_TOKENS) {
            if (k->n_ids == 0)
                k->first_us = clock_us();
            k->n_ids += r->u.tokens.n_ids;
            if (b->text != NULL)
                fwrite(r->u.tokens.text, 1, r->u.tokens.text_len, stdout);
        } else if (r->type == REP_PRUNED) {
            k->prunes++;
            k->prune_us += r->u.pruned.micros;
        } else if (r->type == REP_END) {
            k->ended = true;
            k->end_us = clock_us();
        }
    }
}

static void open_all(struct engine *en, struct client *c, const struct bench *b)
{
    for (uint32_t i = 0; i < b->sessions; i++) {
        struct command *o = command_new(CMD_OPEN, 1, i + 1);
        bc_assert(o != NULL);
        o->u.open.evict = (struct evict_request){.policy = b->policy,
                                                 .budget_tokens = b->budget,
                                                 .recent = -1,
                                                 .span_quantile = -1};
        o->u.open.kv_type = b->kv_type;
        o->u.open.port = c[i].port = port_new();
        bc_assert(o->u.open.port != NULL);
        post(en, o);
    }
    while (engine_step(en) == ENGINE_RAN)
        collect(en, c, b);
    collect(en, c, b);
}

static void prompt_all(struct engine *en, struct client *c, const struct bench *b)
{
    for (uint32_t i = 0; i < b->sessions; i++) {
        struct command *g = command_new(CMD_GENERATE, 1, 1000 + i);
        bc_assert(g != NULL);
        g->session = c[i].id;
        generate_options_init(&g->u.generate.opt);
        g->u.generate.opt.max_tokens = b->n_new;
        g->u.generate.opt.ignore_end = b->text == NULL;
        if (b->text != NULL) {
            g->u.generate.kind = PROMPT_CHAT;
            g->u.generate.text = strdup(b->text);
            g->u.generate.len = strlen(b->text);
        } else {
            g->u.generate.kind = PROMPT_IDS;
            g->u.generate.ids = malloc(b->prompt * sizeof(int32_t));
            bc_assert(g->u.generate.ids != NULL);
            for (uint32_t k = 0; k < b->prompt; k++)
                g->u.generate.ids[k] = (int32_t)(300 + (k * 2654435761u >> 8) % 20000);
            g->u.generate.n_ids = b->prompt;
        }
        post(en, g);
    }
}

static void print_result(const struct bench *b, const struct client *c, uint64_t start,
                         const struct engine_counts *n)
{
    uint64_t first = 0, end = 0, tokens = 0, prunes = 0, prune_us = 0;
    for (uint32_t i = 0; i < b->sessions; i++) {
        first = BC_MAX(first, c[i].first_us);
        end = BC_MAX(end, c[i].end_us);
        tokens += c[i].n_ids;
        prunes += c[i].prunes;
        prune_us += c[i].prune_us;
    }
    double prefill = (double)(first - start) * 1e-6, decode = (double)(end - first) * 1e-6;
    if (b->text == NULL)
        printf("prefill  %8.1f tokens/s  (%u x %u tokens in %.3f s)\n",
               b->sessions * (double)b->prompt / prefill, b->sessions, b->prompt, prefill);
    printf("decode   %8.1f tokens/s  (%llu tokens in %.3f s)\n",
           (double)(tokens - b->sessions) / decode, (unsigned long long)tokens, decode);
    if (prunes > 0)
        printf("prunes   %llu, %.2f ms each\n", (unsigned long long)prunes,
               (double)prune_us / (double)prunes * 1e-3);
    printf("memory   weights %.1f MiB, scratch %.1f MiB, cache %.1f MiB held\n",
           (double)n->bytes_weights / 1048576, (double)n->bytes_scratch / 1048576,
           (double)n->kv_held / 1048576);
}

int main(int argc, char **argv)
{
    struct bench b;
    struct client c[SESSIONS_MAX] = {{0}};
    struct engine *en;
    struct engine_counts counts;
    struct err e = {0};
    if (!parse(&b, argc, argv))
        return usage();
    struct engine_options o = {.backend = b.backend,
                               .isa = b.isa,
                               .activations = b.activations,
                               .threads = b.threads,
                               .default_model = b.model,
                               .kv_memory = 8ull << 30,
                               .session_budget = 1ull << 30};
    if (engine_open(&en, &o, &e) < 0)
        die(&e);
    open_all(en, c, &b);
    uint64_t start = clock_us();
    prompt_all(en, c, &b);
    for (bool all = false; !all;) {
        engine_step(en);
        collect(en, c, &b);
        all = true;
        for (uint32_t i = 0; i < b.sessions; i++)
            all = all && c[i].ended;
    }
    if (b.text != NULL)
        printf("\n\n");
    engine_counts(en, &counts);
    print_result(&b, c, start, &counts);
    engine_close(&en);
    for (uint32_t i = 0; i < b.sessions; i++)
        port_drop(&c[i].port);
    return 0;
}
