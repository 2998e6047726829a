/* bench_gap MODEL.gguf [--threads N] [--tokens 4096] [--policy NAME [--score NAME]] [--kv-type TYPE]
 *
 * What a neighbour feels of a refresh: one session decodes without end while the full cache of another is pruned, for every
 * policy in turn, in process. CSV: bench,case,figure,value
 *
 *     gap,POLICY SCORE,step_ms        between two tokens of the neighbour while the other cache is at rest: median
 *     gap,POLICY SCORE,median_ms      the same while it is refreshed
 *     gap,POLICY SCORE,worst_ms       the longest
 *     gap,POLICY SCORE,ratio          worst / step
 *     gap,POLICY SCORE,refresh_ms     from the first slice to the last, the neighbour's passes included */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "clock.h"
#include "engine.h"

#define REST 60u /* steps of the neighbour beside a cache at rest */
#define GAPS_MAX 65536u

struct bench {
    const char *model, *policy, *score, *kv_type, *backend;
    uint32_t threads, tokens;
    struct engine *en;
    uint32_t requests;
    uint64_t opened,
        last_us; /* the session of the last OPENED; when the neighbour had its last token */
    uint64_t neighbour, victim;
    struct session_port *ports[2];
    bool ended; /* the other session's request */
    uint32_t n_gaps;
    uint64_t gaps[GAPS_MAX];
};

static void die(const struct err *e)
{
    fprintf(stderr, "bench_gap: %s: %s\n", e->field, e->text);
    exit(1);
}

static void post(struct bench *b, struct command *c)
{
    struct err e = {0};
    if (engine_post(b->en, &c, &e) < 0)
        die(&e);
}

/* One step, and what came of it. */
static void step(struct bench *b)
{
    engine_step(b->en);
    for (struct report *r; (r = engine_take(b->en)) != NULL; report_free(&r)) {
        if (r->type == REP_ERROR)
            die(&r->u.error);
        if (r->type == REP_OPENED)
            b->opened = r->session;
        if (r->type < REP_TOKENS)
            continue;
        b->ports[r->session == b->victim]->queued--;
        if (r->session == b->victim && r->type == REP_END)
            b->ended = true;
        if (r->session != b->neighbour || r->type != REP_TOKENS)
            continue;
        uint64_t now = clock_us();
        if (b->last_us != 0 && b->n_gaps < GAPS_MAX)
            b->gaps[b->n_gaps++] = now - b->last_us;
        b->last_us = now;
    }
}

static struct command *command(struct bench *b, enum command_type type, uint64_t session)
{
    struct command *c = command_new(type, 1, ++b->requests);
    if (c == NULL)
        exit(1);
    c->session = session;
    return c;
}

static uint64_t session_open(struct bench *b, unsigned port, const char *policy, const char *score,
                             uint32_t budget)
{
    struct command *c = command(b, CMD_OPEN, 0);
    c->u.open.evict = (struct evict_request){.policy = policy,
                                             .score = score,
                                             .budget_tokens = budget,
                                             .recent = -1,
                                             .span_quantile = -1};
    c->u.open.kv_type = b->kv_type;
    c->u.open.port = b->ports[port] = port_new();
    if (c->u.open.port == NULL)
        exit(1);
    b->opened = 0;
    post(b, c);
    while (b->opened == 0)
        step(b);
    return b->opened;
}

static void prompt(struct bench *b, uint64_t session, uint32_t n, uint32_t n_new)
{
    struct command *c = command(b, CMD_GENERATE, session);
    generate_options_init(&c->u.generate.opt);
    c->u.generate.opt.max_tokens = n_new;
    c->u.generate.opt.ignore_end = true;
    c->u.generate.kind = PROMPT_IDS;
    c->u.generate.ids = malloc(n * sizeof(int32_t));
    if (c->u.generate.ids == NULL)
        exit(1);
    for (uint32_t k = 0; k < n; k++)
        c->u.generate.ids[k] = (int32_t)(3 + (k * 2654435761u >> 8) % 256);
    c->u.generate.n_ids = n;
    post(b, c);
}

static void session_close(struct bench *b, uint64_t session, unsigned port)
{
    post(b, command(b, CMD_CLOSE, session));
    while (engine_step(b->en) == ENGINE_RAN)
        step(b);
    step(b);
    port_drop(&b->ports[port]);
}

static int by_size(const void *x, const void *y)
{
    uint64_t a = *(const uint64_t *)x, c = *(const uint64_t *)y;
    return (a > c) - (a < c);
}

/* Sorts. Milliseconds. */
static double gap_at(struct bench *b, double q)
{
    if (b->n_gaps == 0)
        return 0;
    qsort(b->gaps, b->n_gaps, sizeof b->gaps[0], by_size);
    return (double)b->gaps[(uint32_t)(q * (b->n_gaps - 1))] * 1e-3;
}

static void run(struct bench *b, const char *policy, const char *score)
{
    char name[64];
    snprintf(name, sizeof name, "%s%s%s", policy, score ? " " : "", score ? score : "");
    b->ended = false;
    b->last_us = b->neighbour = 0;
    b->victim = session_open(b, 1, policy, score, b->tokens);
    prompt(b, b->victim, b->tokens, 0);
    while (!b->ended)
        step(b);
    b->neighbour = session_open(b, 0, "none", NULL, 0);
    prompt(b, b->neighbour, 32, 7000);
    b->n_gaps = 0;
    while (b->n_gaps < 10)
        step(b);
    for (b->n_gaps = 0; b->n_gaps < REST;)
        step(b);
    double rest = gap_at(b, 0.5);
    uint64_t start = clock_us();
    b->ended = false;
    prompt(b, b->victim, 1, 0); /* one token more than the cache holds */
    for (b->n_gaps = 0; !b->ended;)
        step(b);
    uint64_t took = clock_us() - start;
    double median = gap_at(b, 0.5), worst = gap_at(b, 1);
    printf("gap,%s,step_ms,%.3f\ngap,%s,median_ms,%.3f\ngap,%s,worst_ms,%.3f\n", name, rest, name,
           median, name, worst);
    printf("gap,%s,ratio,%.2f\ngap,%s,refresh_ms,%.3f\n", name, worst / rest, name,
           (double)took * 1e-3);
    fflush(stdout);
    session_close(b, b->neighbour, 0);
    session_close(b, b->victim, 1);
}

static bool parse(struct bench *b, int argc, char **argv)
{
    *b = (struct bench){.backend = "cpu", .tokens = 4096};
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i], *v = i + 1 < argc ? argv[i + 1] : NULL;
        if (a[0] != '-') {
            b->model = a;
            continue;
        }
        if (v == NULL)
            return false;
        i++;
        if (strcmp(a, "--threads") == 0)
            b->threads = (uint32_t)strtoul(v, NULL, 10);
        else if (strcmp(a, "--tokens") == 0)
            b->tokens = (uint32_t)strtoul(v, NULL, 10);
        else if (strcmp(a, "--policy") == 0)
            b->policy = v;
        else if (strcmp(a, "--score") == 0)
            b->score = v;
        else if (strcmp(a, "--kv-type") == 0)
            b->kv_type = v;
        else if (strcmp(a, "--backend") == 0)
            b->backend = v;
        else
            return false;
    }
    return b->model != NULL && b->tokens >= 64 && b->tokens <= 1u << 20;
}

int main(int argc, char **argv)
{
    static const char *const all[][2] = {{"counter_causal", "logit"},
                                         {"counter_causal", "logprob"},
                                         {"counter_causal_fast", "logit"},
                                         {"counter_causal_fast", "logprob"},
                                         {"h2o", NULL},
                                         {"keydiff", NULL},
                                         {"knorm", NULL},
                                         {"tova", NULL},
                                         {"key_similarity", NULL},
                                         {"sliding_window", NULL}};
    static struct bench b;
    struct err e = {0};
    if (!parse(&b, argc, argv)) {
        fprintf(stderr, "usage: bench_gap MODEL.gguf [--threads N] [--backend NAME] [--tokens N]\n"
                        "       [--policy NAME [--score NAME]] [--kv-type TYPE]\n");
        return 2;
    }
    struct engine_options o = {.backend = b.backend,
                               .threads = b.threads,
                               .default_model = b.model,
                               .kv_memory = 4ull << 30,
                               .session_budget = 1ull << 30};
    if (engine_open(&b.en, &o, &e) < 0)
        die(&e);
    printf("bench,case,figure,value\n");
    if (b.policy != NULL)
        run(&b, b.policy, b.score);
    for (size_t i = 0; b.policy == NULL && i < sizeof all / sizeof all[0]; i++)
        run(&b, all[i][0], all[i][1]);
    engine_close(&b.en);
    return 0;
}
