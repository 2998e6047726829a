/* bench_refresh MODEL.gguf [--threads N] [--backend NAME] [--isa NAME] [--kv-type TYPE] [--n 256,512,...] [--reps 5]
 *               [--block 256] [--score NAME] [--sessions 1,2,4,8,16]
 *
 * What a refresh of n cached tokens costs: the four counter-causal scores (all layers or the last one, logit or log-probability) of
 * every row, beside a prefill of the same n tokens and one decode step at depth n, all in the blocks of rows that the engine
 * takes. CSV, a line a variant; medians. --score "fast logit": that one alone, "fast": those two.
 *
 *   pages   dense: slot i of the sequence is slot i of the pool, as in a session that was never pruned
 *
 * --sessions: instead, so many sequences of n tokens each, as the engine refreshes them where nobody decodes (in calls of --block
 * rows): one after the other, and together. */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "bench.h"
#include "clock.h"
#include "number.h"

#define SIZES_MAX 16
#define SESSIONS_MAX 64u
#define REPS_MAX 50u
/* rows: the engine's prefill_chunk and score_rows, unless --block says another number */
#define BLOCK 256u
#define BLOCK_MAX 16384u
#define LONG_US 4000000 /* what takes longer is done once more, not `reps` times */

struct options {
    const char *model, *kv_type;
    struct kn_options kn;
    uint32_t n[SIZES_MAX], n_sizes, sessions[SIZES_MAX], n_sessions, reps, block;
    const char *score; /* only those that begin so: "fast", "fast logprob" */
};

/* A model and one sequence. */
struct bench {
    const struct options *o;
    struct kn *kn;
    struct model *m;
    const struct model_info *info;
    struct kn_kv kv;
    uint32_t max, n_pages;           /* tokens of all sequences */
    int32_t *ids, *positions;        /* [max] */
    uint32_t *slots, *seq, *lo, *hi; /* [max] */
    float *logits, *score;           /* [n_vocab], [max] */
    struct model_rest *rest;         /* [SESSIONS_MAX], --sessions alone */
};

static int usage(void)
{
    fprintf(stderr, "usage: bench_refresh MODEL.gguf [--threads N] [--backend NAME] [--isa NAME]\n"
                    "       [--kv-type TYPE] [--n 256,512,...] [--reps N] [--block N]\n"
                    "       [--score fast|full[\" logit\"|\" logprob\"]] [--sessions 1,2,4,...]\n");
    return 2;
}

/* ---- which scores: bit 0 of a work fast, bit 1 logprob ---- */

#define SCORES 4

static const char *score_of(int work)
{
    return work & 1 ? "fast" : "full";
}

static const char *value_of(int work)
{
    return work & 2 ? "logprob" : "logit";
}

/* Whether that score is to be measured. */
static bool asked(const struct options *o, int work)
{
    char name[32];
    snprintf(name, sizeof name, "%s %s", score_of(work), value_of(work));
    return !o->score || strncmp(name, o->score, strlen(o->score)) == 0;
}

static bool asked_any(const struct options *o)
{
    bool any = false;
    for (int work = 0; work < SCORES; work++)
        any |= asked(o, work);
    return any;
}

static bool parse(struct options *o, int argc, char **argv)
{
    *o = (struct options){.kn = {.backend = "cpu"},
                          .kv_type = "f16",
                          .n = {256, 512, 1024, 2048, 4096, 8192},
                          .n_sizes = 6,
                          .reps = 5,
                          .block = BLOCK};
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i];
        if (a[0] != '-') {
            o->model = a;
        } else if (i + 1 == argc) {
            return false;
        } else {
            char *v = argv[++i];
            if (strcmp(a, "--threads") == 0)
                o->kn.threads = number_take(a, v, 0, NUMBER_THREADS_MAX);
            else if (strcmp(a, "--backend") == 0)
                o->kn.backend = v;
            else if (strcmp(a, "--isa") == 0)
                o->kn.isa = v;
            else if (strcmp(a, "--kv-type") == 0)
                o->kv_type = v;
            else if (strcmp(a, "--reps") == 0)
                o->reps = number_take(a, v, 1, REPS_MAX);
            else if (strcmp(a, "--score") == 0)
                o->score = v;
            else if (strcmp(a, "--block") == 0)
                o->block = number_take(a, v, 1, BLOCK_MAX);
            else if (strcmp(a, "--sessions") == 0 &&
                     (o->n_sessions = list_parse(v, o->sessions, SIZES_MAX, 1, SESSIONS_MAX)) > 0)
                continue;
            else if (strcmp(a, "--n") != 0 ||
                     (o->n_sizes = list_parse(v, o->n, SIZES_MAX, 16, 1u << 20)) == 0)
                return false;
        }
    }
    return o->model && asked_any(o);
}

/* ---- the sequence ---- */

static void pages_open(struct bench *b)
{
    const struct kn_kv_type *type = kn_kv_type_named(b->o->kv_type);
    char why[160] = "unknown";
    if (!type || kn_kv_check(b->kn, type->type, b->info->head_dim, why, sizeof why) != KN_OK)
        die(b->o->kv_type, why);
    model_kv_shape(b->m, type->type, true, &b->kv);
    b->n_pages = b->max / KN_PAGE_ROWS + 1;
    pages_make(b->kn, &b->kv, b->n_pages);
}

static void bench_open(struct bench *b, const struct options *o)
{
    *b = (struct bench){.o = o};
    uint32_t sequences = 1;
    for (uint32_t i = 0; i < o->n_sessions; i++)
        sequences = BC_MAX(sequences, o->sessions[i]);
    for (uint32_t i = 0; i < o->n_sizes; i++)
        b->max = BC_MAX(b->max, (o->n[i] + 1) * sequences);
    struct model_options mo = {.max_rows = o->block, .max_out = 1};
    model_of_file(&b->kn, &b->m, &o->kn, o->model, &mo);
    b->info = model_info(b->m);
    pages_open(b);
    b->ids = take(b->max, sizeof *b->ids);
    b->positions = take(b->max, sizeof *b->positions);
    b->slots = take(b->max, sizeof *b->slots);
    b->seq = take(b->max, sizeof *b->seq);
    b->lo = take(b->max, sizeof *b->lo);
    b->hi = take(b->max, sizeof *b->hi);
    b->logits = take(b->info->n_vocab, sizeof *b->logits);
    b->score = take(b->max, sizeof *b->score);
    for (uint32_t i = 0; i < b->max; i++) {
        b->ids[i] =
            (int32_t)(300 + (i * 2654435761u >> 8) % BC_MIN(20000u, b->info->n_vocab - 300));
        b->positions[i] = (int32_t)i;
        b->slots[i] = i;
        b->hi[i] = i + 1;
    }
}

static void bench_close(struct bench *b)
{
    pages_drop(b->kn, &b->kv, b->n_pages);
    model_close(&b->m);
    kn_close(&b->kn);
    free(b->ids);
    free(b->positions);
    free(b->slots);
    free(b->seq);
    free(b->lo);
    free(b->hi);
    free(b->logits);
    free(b->score);
}

/* ---- what is measured ---- */

/* Rows first .. first + n - 1 go in; the last one's logits come out. */
static void extend(struct bench *b, uint32_t first, uint32_t n)
{
    uint32_t last = n - 1;
    struct err e = {0};
    struct kn_seq seq = {&b->kv, b->slots, first + n};
    struct kn_batch rows = {.n_rows = n,
                            .n_seqs = 1,
                            .ids = b->ids + first,
                            .positions = b->positions + first,
                            .seq = b->seq,
                            .lo = b->lo,
                            .hi = b->hi + first,
                            .slots = b->slots + first,
                            .seqs = &seq};
    struct model_out out = {.rows = &last, .n = 1, .logits = b->logits};
    check(model_forward(b->m, &rows, &out, &e), &e);
}

static void prefill(struct bench *b, uint32_t n)
{
    for (uint32_t at = 0; at < n; at += b->o->block)
        extend(b, at, BC_MIN(b->o->block, n - at));
}

static void decode(struct bench *b, uint32_t n)
{
    extend(b, n, 1);
}

static void refresh(struct bench *b, uint32_t n, bool fast, bool logprob)
{
    struct err e = {0};
    struct model_score job = {.seq = {&b->kv, b->slots, n},
                              .ids = b->ids,
                              .positions = b->positions,
                              .fast = fast,
                              .logprob = logprob};
    check(model_score_rows(b->m, &job, 0, n, b->score, &e), &e);
}

enum work { PREFILL = -2, DECODE = -1 }; /* else: bit 0 fast, bit 1 logprob */

/* Milliseconds: the median of the repetitions; the first one of each is for the caches. */
static double measure(struct bench *b, uint32_t n, int work, uint32_t *ret_reps)
{
    uint64_t us[REPS_MAX], sum = 0;
    uint32_t i = 0;
    for (int warm = 1; i < b->o->reps && (i < 3 || sum < LONG_US); warm = 0) {
        uint64_t start = clock_us();
        if (work == PREFILL)
            prefill(b, n);
        else if (work == DECODE)
            decode(b, n);
        else
            refresh(b, n, work & 1, work & 2);
        us[i] = clock_us() - start;
        sum += us[i];
        i += !warm || us[i] > LONG_US / 4;
    }
    *ret_reps = i;
    return (double)median(us, i) * 1e-3;
}

static void size_run(struct bench *b, uint32_t n)
{
    uint32_t reps;
    double pre = measure(b, n, PREFILL, &reps), step = measure(b, n, DECODE, &reps);
    for (int work = 0; work < SCORES; work++) {
        if (!asked(b->o, work))
            continue;
        double ms = measure(b, n, work, &reps);
        printf("%s,%u,%s,%s,%s,%s,%u,%u,%.3f,%.3f,%.3f,%.3f,%.2f\n", b->kn->isa, b->kn->n_threads,
               b->o->kv_type, b->info->name, score_of(work), value_of(work), n, reps, ms, pre, step,
               ms / pre, ms / step);
        fflush(stdout);
    }
}

/* ---- several sequences ---- */

/* Sequence k has rows k n .. k n + n - 1 of everything. */
static struct model_part part_of(struct bench *b, uint32_t k, uint32_t n, int work)
{
    size_t at = (size_t)k * n;
    return (struct model_part){.job = {.seq = {&b->kv, b->slots + at, n},
                                       .ids = b->ids + at,
                                       .positions = b->positions,
                                       .fast = work & 1,
                                       .logprob = work & 2},
                               .rest = &b->rest[k],
                               .end = n,
                               .scores = b->score + at};
}

static void prefill_all(struct bench *b, uint32_t sessions, uint32_t n)
{
    struct bench one = *b;
    for (uint32_t k = 0; k < sessions; k++) {
        one.ids = b->ids + (size_t)k * n;
        one.slots = b->slots + (size_t)k * n;
        prefill(&one, n);
    }
}

/* All of them, `most` at a time. */
static void refresh_all(struct bench *b, uint32_t sessions, uint32_t n, int work, uint32_t most)
{
    struct model_part parts[MODEL_PARTS_MAX];
    struct err e = {0};
    uint32_t n_parts = 0, next = 0;
    for (;;) {
        while (n_parts < most && next < sessions)
            parts[n_parts++] = part_of(b, next++, n, work);
        if (n_parts == 0)
            return;
        check(model_score_some(b->m, parts, n_parts, b->o->block, &e), &e);
        uint32_t left = 0;
        for (uint32_t i = 0; i < n_parts; i++)
            if (parts[i].next < parts[i].end)
                parts[left++] = parts[i];
        n_parts = left;
    }
}

static void sessions_run(struct bench *b, uint32_t n, uint32_t sessions)
{
    prefill_all(b, sessions, n);
    for (int work = 0; work < SCORES; work++) {
        uint64_t us[2][REPS_MAX];
        if (!asked(b->o, work))
            continue;
        for (uint32_t i = 0; i <= b->o->reps; i++) /* in turns; the first is for the caches */
            for (uint32_t how = 0; how < 2; how++) {
                uint64_t start = clock_us();
                refresh_all(b, sessions, n, work, how == 0 ? 1 : MODEL_PARTS_MAX);
                us[how][i > 0 ? i - 1 : 0] = clock_us() - start;
            }
        double one = (double)median(us[0], b->o->reps) * 1e-3;
        double all = (double)median(us[1], b->o->reps) * 1e-3;
        printf("%s,%u,%s,%s,%s,%s,%u,%u,%u,%.3f,%.3f,%.3f\n", b->kn->isa, b->kn->n_threads,
               b->o->kv_type, b->info->name, score_of(work), value_of(work), sessions, n,
               b->o->reps, one, all, one / all);
        fflush(stdout);
    }
}

static void run_sessions(struct bench *b)
{
    const struct options *o = b->o;
    printf("isa,threads,kv_type,model,score,value,sessions,n,reps,one_by_one_ms,together_ms,"
           "one_by_one_per_together\n");
    b->rest = take(SESSIONS_MAX, sizeof *b->rest);
    for (uint32_t k = 0; k < SESSIONS_MAX; k++)
        b->rest[k].x = take(b->info->rest_rows, b->info->d_model * sizeof(float));
    for (uint32_t i = 0; i < o->n_sizes; i++)
        for (uint32_t k = 0; k < o->n_sessions; k++)
            sessions_run(b, o->n[i], o->sessions[k]);
    for (uint32_t k = 0; k < SESSIONS_MAX; k++)
        free(b->rest[k].x);
    free(b->rest);
}

static void run_sizes(struct bench *b)
{
    printf("isa,threads,kv_type,model,score,value,n,reps,refresh_ms,prefill_ms,decode_ms,"
           "refresh_per_prefill,refresh_per_decode\n");
    for (uint32_t i = 0; i < b->o->n_sizes; i++)
        size_run(b, b->o->n[i]);
}

int main(int argc, char **argv)
{
    struct options o;
    struct bench b;
    if (!parse(&o, argc, argv))
        return usage();
    bench_open(&b, &o);
    if (o.n_sessions > 0)
        run_sessions(&b);
    else
        run_sizes(&b);
    bench_close(&b);
    return 0;
}
