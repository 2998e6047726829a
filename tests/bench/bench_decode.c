/* bench_decode MODEL.gguf [--backend NAME] [--threads N] [--batch 1,8,32] [--context 1024] [--steps 32]
 *
 * Decode steps of many sequences together, each at the same depth, as the engine runs them: a pass, and a greedy token for each
 * row. CSV, a line a batch: milliseconds a step (median), tokens a second, and the bytes of weights that a second's steps
 * read, which is what a batch of one is bound by.
 *
 * The caches are filled with the tokens of one prefill by row copies, so that filling takes no longer than measuring. */
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "bench.h"
#include "clock.h"
#include "number.h"

#define BATCH_MAX 64u
#define STEPS_MAX 256u
#define CHUNK 512u /* rows of a prefill's pass */
#define SIZES_MAX 8

struct options {
    const char *model;
    struct kn_options kn;
    uint32_t batch[SIZES_MAX], n_batch, context, steps;
};

struct bench {
    const struct options *o;
    struct kn *kn;
    struct model *m;
    const struct model_info *info;
    struct kn_kv kv;
    uint32_t rows, n_seqs, n_pages; /* rows: of a sequence */
    uint32_t *slots;                /* [n_seqs][rows] */
    int32_t *ids, *positions;       /* [max(CHUNK, BATCH_MAX)] */
    uint32_t *seq, *lo, *hi, *at, *out_rows;
    struct kn_seq seqs[BATCH_MAX];
    float *logits;
    int32_t token[BATCH_MAX];
    struct kn_sample how[BATCH_MAX]; /* greedy */
    bool samples;                    /* the backend picks */
    size_t bytes_step;               /* of weights that a step reads */
};

static int usage(void)
{
    fprintf(stderr,
            "usage: bench_decode MODEL.gguf [--backend NAME] [--threads N] [--batch 1,8,32]\n"
            "       [--context 1024] [--steps 32]\n");
    return 2;
}

static bool parse(struct options *o, int argc, char **argv)
{
    *o = (struct options){
        .kn = {.backend = "auto"}, .batch = {1, 8, 32}, .n_batch = 3, .context = 1024, .steps = 32};
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i];
        if (a[0] != '-') {
            o->model = a;
            continue;
        }
        if (i + 1 == argc)
            return false;
        char *v = argv[++i];
        if (strcmp(a, "--backend") == 0)
            o->kn.backend = v;
        else if (strcmp(a, "--threads") == 0)
            o->kn.threads = number_take(a, v, 0, NUMBER_THREADS_MAX);
        else if (strcmp(a, "--context") == 0)
            o->context = number_take(a, v, 1, UINT32_MAX);
        else if (strcmp(a, "--steps") == 0)
            o->steps = number_take(a, v, 1, UINT32_MAX);
        else if (strcmp(a, "--batch") != 0 ||
                 (o->n_batch = list_parse(v, o->batch, SIZES_MAX, 1, BATCH_MAX)) == 0)
            return false;
    }
    return o->model && o->context >= 1 && o->context <= 1u << 20 && o->steps >= 1 &&
           o->steps <= STEPS_MAX;
}

static void pages_open(struct bench *b)
{
    model_kv_shape(b->m, KN_F16, false, &b->kv);
    uint32_t per = (b->rows + KN_PAGE_ROWS - 1) / KN_PAGE_ROWS;
    b->n_pages = per * b->n_seqs;
    pages_make(b->kn, &b->kv, b->n_pages);
    for (uint32_t s = 0; s < b->n_seqs; s++)
        for (uint32_t i = 0; i < b->rows; i++)
            b->slots[s * b->rows + i] = s * per * KN_PAGE_ROWS + i;
}

/* All weights, but not a table of embeddings that is not the head as well: of that, a row a token. */
static size_t bytes_of_step(const struct bench *b)
{
    struct gguf *g;
    struct err e = {0};
    size_t bytes = b->info->bytes_weights;
    check(gguf_open(&g, b->o->model, &e), &e);
    if (gguf_tensor_find(g, "output.weight"))
        bytes -= gguf_tensor_find(g, "token_embd.weight")->bytes;
    gguf_close(&g);
    return bytes;
}

static void bench_open(struct bench *b, const struct options *o)
{
    *b = (struct bench){.o = o};
    for (uint32_t i = 0; i < o->n_batch; i++)
        b->n_seqs = BC_MAX(b->n_seqs, o->batch[i]);
    b->rows = o->context + (o->steps + 1) * o->n_batch;
    struct model_options mo = {.max_rows = CHUNK, .max_out = BATCH_MAX};
    model_of_file(&b->kn, &b->m, &o->kn, o->model, &mo);
    b->info = model_info(b->m);
    b->bytes_step = bytes_of_step(b);
    b->slots = take((size_t)b->n_seqs * b->rows, sizeof *b->slots);
    b->ids = take(CHUNK, sizeof *b->ids);
    b->positions = take(CHUNK, sizeof *b->positions);
    b->seq = take(CHUNK, sizeof *b->seq);
    b->lo = take(CHUNK, sizeof *b->lo);
    b->hi = take(CHUNK, sizeof *b->hi);
    b->at = take(CHUNK, sizeof *b->at);
    b->out_rows = take(BATCH_MAX, sizeof *b->out_rows);
    b->logits = take((size_t)BATCH_MAX * b->info->n_vocab, sizeof *b->logits);
    pages_open(b);
    b->samples = b->kn->ops->sample != NULL;
    for (uint32_t i = 0; i < BATCH_MAX; i++)
        b->how[i] = (struct kn_sample){.top_p = 1, .repeat_penalty = 1};
}

static void bench_close(struct bench *b)
{
    pages_drop(b->kn, &b->kv, b->n_pages);
    model_close(&b->m);
    kn_close(&b->kn);
    free(b->slots);
    free(b->ids);
    free(b->positions);
    free(b->seq);
    free(b->lo);
    free(b->hi);
    free(b->at);
    free(b->out_rows);
    free(b->logits);
}

static void forward(struct bench *b, uint32_t n_rows, uint32_t n_seqs, uint32_t n_out)
{
    struct err e = {0};
    struct kn_batch batch = {.n_rows = n_rows,
                             .n_seqs = n_seqs,
                             .ids = b->ids,
                             .positions = b->positions,
                             .seq = b->seq,
                             .lo = b->lo,
                             .hi = b->hi,
                             .slots = b->at,
                             .seqs = b->seqs};
    struct model_out out = {.rows = b->out_rows,
                            .n = n_out,
                            .logits = b->samples ? NULL : b->logits,
                            .how = b->samples ? b->how : NULL,
                            .tokens = b->token};
    check(model_forward(b->m, &batch, &out, &e), &e);
}

/* The context of sequence 0, then of the others. */
static void fill(struct bench *b)
{
    uint32_t n = b->o->context;
    for (uint32_t from = 0; from < n; from += CHUNK) {
        uint32_t rows = BC_MIN(CHUNK, n - from);
        for (uint32_t i = 0; i < rows; i++) {
            b->ids[i] = (int32_t)((from + i) * 2654435761u % b->info->n_vocab);
            b->positions[i] = (int32_t)(from + i);
            b->hi[i] = from + i + 1;
            b->at[i] = b->slots[from + i];
            b->seq[i] = 0;
        }
        b->seqs[0] = (struct kn_seq){&b->kv, b->slots, from + rows};
        forward(b, rows, 1, 0);
    }
    for (uint32_t s = 1; s < b->n_seqs; s++)
        for (uint32_t i = 0; i < n; i++)
            b->kn->ops->row_copy(b->kn, &b->kv, b->slots[s * b->rows + i], b->slots[i]);
    b->kn->ops->sync(b->kn);
}

static int32_t largest(const float *x, uint32_t n)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++)
        if (x[i] > x[best])
            best = i;
    return (int32_t)best;
}

/* One token for each of the first n sequences, whose caches hold `depth` rows. */
static void step(struct bench *b, uint32_t n, uint32_t depth)
{
    for (uint32_t s = 0; s < n; s++) {
        b->ids[s] = b->token[s];
        b->positions[s] = (int32_t)depth;
        b->seq[s] = s;
        b->hi[s] = depth + 1;
        b->at[s] = b->slots[s * b->rows + depth];
        b->out_rows[s] = s;
        b->seqs[s] = (struct kn_seq){&b->kv, b->slots + (size_t)s * b->rows, depth + 1};
    }
    forward(b, n, n, n);
    for (uint32_t s = 0; s < n && !b->samples; s++)
        b->token[s] = largest(b->logits + (size_t)s * b->info->n_vocab, b->info->n_vocab);
}

/* The first two steps make a graph where there are graphs, so they do not count. */
static void batch_run(struct bench *b, uint32_t n, uint32_t first)
{
    uint64_t us[STEPS_MAX];
    for (uint32_t i = 0; i < b->o->steps; i++) {
        uint64_t start = clock_us();
        step(b, n, first + i);
        us[i] = clock_us() - start;
    }
    uint32_t skip = b->o->steps > 4 ? 2 : 0, count = b->o->steps - skip;
    double ms = (double)median(us + skip, count) * 1e-3;
    printf("%s,%s,%s,%u,%u,%u,%.3f,%.1f,%.1f\n", b->kn->name, b->kn->isa, b->info->name, n, first,
           count, ms, n * 1e3 / ms, (double)b->bytes_step / ms * 1e-6);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    struct options o;
    struct bench b;
    if (!parse(&o, argc, argv))
        return usage();
    bench_open(&b, &o);
    fill(&b);
    printf("backend,isa,model,batch,context,steps,step_ms,tokens_per_s,weights_gb_per_s\n");
    for (uint32_t i = 0; i < o.n_batch; i++)
        batch_run(&b, o.batch[i], o.context + i * o.steps);
    bench_close(&b);
    return 0;
}
