/* bench_gap MODEL.gguf [--threads N] [--tokens 4096] [--rounds 5] [--policy NAME [--score NAME]] [--kv-type TYPE]
 *           [--longest N]
 *
 * What a neighbour feels of a refresh: one session decodes without end while the full cache of another is pruned by one
 * token, for every policy in turn, --rounds times each, in process.
 *
 *     | REST steps, the other cache at rest | gaps while it is refreshed | REST steps at rest |
 *
 * A gap's ratio is to the neighbour's own step at that moment, which grows with its cache: the line between the medians before
 * and after. CSV: bench,case,figure,value
 *
 *     gap,POLICY SCORE,step_ms        between two tokens of the neighbour at rest, median
 *     gap,POLICY SCORE,refresh_ms     from the first slice to the last, the neighbour's passes included: median of the rounds
 *     gap,POLICY SCORE,ratio_p50      gaps of a round while the other cache is refreshed: median of the rounds
 *     gap,POLICY SCORE,ratio_p99
 *     gap,POLICY SCORE,ratio_max      longest gap of a round: median of the rounds
 *     gap,POLICY SCORE,ratio_worst    of the worst round
 *     gap,POLICY SCORE,rest_max       longest gap at rest: median of the rounds; what the machine does without any refresh
 *     gap,POLICY SCORE,cpu_max, cpu_worst   as ratio_max, ratio_worst, in the process's processor time: without what others on
 *                                     the machine took from it
 *
 * --longest: the N longest gaps of every round, and what was in them, to standard error:
 *
 *     gap AT of ALL: us on the wall (processors: us), slices us, the pass us of what it took until then */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "clock.h"
#include "core.h"
#include "number.h"

#define REST 100u /* steps of the neighbour beside a cache at rest, a round */
#define ROUNDS_MAX 64u
#define GAPS_MAX 65536u

/* In microseconds: of the clock on the wall, of the process's processors; on the wall, the slices of the refresh in it; what a
 * pass took until then, about. */
struct gap {
    uint64_t wall, cpu, slices, pass;
};

struct bench {
    const char *model, *policy, *score, *kv_type, *backend;
    uint32_t threads, tokens, rounds, longest;
    struct engine *en;
    uint32_t requests;
    uint64_t opened; /* the session of the last OPENED */
    struct gap last; /* when the neighbour had its last token; wall 0: not yet */
    uint64_t neighbour, victim;
    struct session_port *ports[2];
    bool ended; /* the other session's request, or prune */
    uint32_t n_gaps;
    struct gap gaps[GAPS_MAX];
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

static uint64_t cpu_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000u;
}

/* One step, and what came of it. */
static void step(struct bench *b)
{
    uint64_t pass = b->en->decode_us;
    engine_step(b->en);
    for (struct report *r; (r = engine_take(b->en)) != NULL; report_free(&r)) {
        if (r->type == REP_ERROR)
            die(&r->u.error);
        if (r->type == REP_OPENED)
            b->opened = r->session;
        if (r->type == REP_PRUNED_REPLY)
            b->ended = true;
        if (r->type < REP_TOKENS)
            continue;
        b->ports[r->session == b->victim]->queued--;
        if (r->session == b->victim && r->type == REP_END)
            b->ended = true;
        if (r->session != b->neighbour || r->type != REP_TOKENS)
            continue;
        struct gap now = {.wall = clock_us(), .cpu = cpu_us()};
        if (b->last.wall != 0 && b->n_gaps < GAPS_MAX)
            b->gaps[b->n_gaps++] = (struct gap){now.wall - b->last.wall, now.cpu - b->last.cpu,
                                                b->en->slices_us, pass};
        b->last = now;
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

static int by_value(const void *x, const void *y)
{
    double a = *(const double *)x, c = *(const double *)y;
    return (a > c) - (a < c);
}

/* Sorts. */
static double quantile(double *v, uint32_t n, double q)
{
    qsort(v, n, sizeof *v, by_value);
    return n > 0 ? v[(uint32_t)(q * (n - 1))] : 0;
}

/* The neighbour at rest. */
struct rest {
    double wall, cpu, max; /* medians in us; longest / median */
};

static struct rest rest_run(struct bench *b)
{
    double wall[REST], cpu[REST];
    struct rest r;
    for (b->n_gaps = 0; b->n_gaps < REST;)
        step(b);
    for (uint32_t i = 0; i < REST; i++) {
        wall[i] = (double)b->gaps[i].wall;
        cpu[i] = (double)b->gaps[i].cpu;
    }
    r.wall = quantile(wall, REST, 0.5);
    r.cpu = quantile(cpu, REST, 0.5);
    r.max = quantile(wall, REST, 1) / r.wall;
    return r;
}

static int by_wall(const void *x, const void *y)
{
    const struct gap *a = *(const struct gap *const *)x, *c = *(const struct gap *const *)y;
    return (a->wall < c->wall) - (a->wall > c->wall);
}

static void longest_print(const struct bench *b)
{
    static const struct gap *order[GAPS_MAX];
    for (uint32_t i = 0; i < b->n_gaps; i++)
        order[i] = &b->gaps[i];
    qsort(order, b->n_gaps, sizeof *order, by_wall);
    for (uint32_t i = 0; i < b->longest && i < b->n_gaps; i++) {
        const struct gap *g = order[i];
        fprintf(stderr,
                "gap %u of %u: %llu us (processors: %llu), slices %llu, the pass %llu of %llu\n",
                (unsigned)(g - b->gaps), b->n_gaps, (unsigned long long)g->wall,
                (unsigned long long)g->cpu, (unsigned long long)g->slices,
                (unsigned long long)(g->wall - g->slices), (unsigned long long)g->pass);
    }
}

enum { STEP, REFRESH, P50, P99, MAX, REST_MAX, CPU_MAX, FIGURES };

static void round_run(struct bench *b, double ret[FIGURES])
{
    static double wall[GAPS_MAX], cpu[GAPS_MAX];
    b->last = (struct gap){0};
    b->neighbour = session_open(b, 0, "none", NULL, 0);
    prompt(b, b->neighbour, 32, 7000);
    b->n_gaps = 0;
    while (b->n_gaps < 10)
        step(b);
    struct rest before = rest_run(b);
    uint64_t start = clock_us();
    struct command *c = command(b, CMD_PRUNE, b->victim);
    c->u.budget.keep = b->tokens - 1;
    b->ended = false;
    post(b, c);
    for (b->n_gaps = 0; !b->ended;)
        step(b);
    ret[REFRESH] = (double)(clock_us() - start) * 1e-3;
    longest_print(b);
    uint32_t n = b->n_gaps;
    for (uint32_t i = 0; i < n; i++) {
        wall[i] = (double)b->gaps[i].wall;
        cpu[i] = (double)b->gaps[i].cpu;
    }
    step(b);
    struct rest after = rest_run(b);
    for (uint32_t i = 0; i < n; i++) {
        double at = (i + 0.5) / n;
        wall[i] /= before.wall + at * (after.wall - before.wall);
        cpu[i] /= before.cpu + at * (after.cpu - before.cpu);
    }
    ret[STEP] = before.wall * 1e-3;
    ret[P50] = quantile(wall, n, 0.5);
    ret[P99] = quantile(wall, n, 0.99);
    ret[MAX] = quantile(wall, n, 1);
    ret[REST_MAX] = before.max > after.max ? before.max : after.max;
    ret[CPU_MAX] = quantile(cpu, n, 1);
    session_close(b, b->neighbour, 0);
    b->neighbour = 0;
    b->ended = false;
    prompt(b, b->victim, 1, 0); /* full again */
    while (!b->ended)
        step(b);
}

static void run(struct bench *b, const char *policy, const char *score)
{
    static const char *const names[FIGURES] = {"step_ms",   "refresh_ms", "ratio_p50", "ratio_p99",
                                               "ratio_max", "rest_max",   "cpu_max"};
    double all[FIGURES][ROUNDS_MAX], of[FIGURES];
    char name[64];
    snprintf(name, sizeof name, "%s%s%s", policy, score ? " " : "", score ? score : "");
    b->ended = false;
    b->victim = session_open(b, 1, policy, score, b->tokens);
    prompt(b, b->victim, b->tokens, 0);
    while (!b->ended)
        step(b);
    for (uint32_t i = 0; i < b->rounds; i++) {
        round_run(b, of);
        for (int k = 0; k < FIGURES; k++)
            all[k][i] = of[k];
    }
    for (int k = 0; k < FIGURES; k++) {
        printf("gap,%s,%s,%.3f\n", name, names[k], quantile(all[k], b->rounds, 0.5));
        if (k == MAX || k == CPU_MAX)
            printf("gap,%s,%s_worst,%.3f\n", name, k == MAX ? "ratio" : "cpu",
                   quantile(all[k], b->rounds, 1));
    }
    fflush(stdout);
    session_close(b, b->victim, 1);
}

static bool parse(struct bench *b, int argc, char **argv)
{
    *b = (struct bench){.backend = "cpu", .tokens = 4096, .rounds = 5};
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
            b->threads = number_take(a, v, 0, NUMBER_THREADS_MAX);
        else if (strcmp(a, "--tokens") == 0)
            b->tokens = number_take(a, v, 0, UINT32_MAX);
        else if (strcmp(a, "--rounds") == 0)
            b->rounds = number_take(a, v, 0, UINT32_MAX);
        else if (strcmp(a, "--longest") == 0)
            b->longest = number_take(a, v, 0, UINT32_MAX);
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
    return b->model != NULL && b->tokens >= 64 && b->tokens <= 1u << 20 && b->rounds > 0 &&
           b->rounds <= ROUNDS_MAX;
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
                        "       [--rounds N] [--policy NAME [--score NAME]] [--kv-type TYPE]\n"
                        "       [--longest N]\n");
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
