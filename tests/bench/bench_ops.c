/* bench_ops.c: how near the ops of the cpu backend come to what the machine can do. README.md explains the
 * output. Peaks: every thread reads its part of 256 MiB; every thread runs a chain-free loop of the
 * instruction that the products are made of (fma for floats, VPDPBUSD or VPMADDUBSW for 8 bits). */
#include "kernels_compare.h"
#include <pthread.h>
#include <time.h>

struct peaks {
    double read_gbs, fma_gops, int8_gops; /* an operation: a product or a sum */
};

struct bench {
    struct kn *kn;
    struct peaks peak;
    const char *filter;
    double seconds; /* of repetitions a line */
};

static clockid_t clock_used = CLOCK_MONOTONIC;

static double now(void)
{
    struct timespec t;
    clock_gettime(clock_used, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- peaks ------------------------------------------------------------------------------------------ */

#define READ_BYTES ((size_t)256 << 20)
#define LOOPS 2000000

struct lane {
    const uint64_t *from;
    size_t n; /* of 8 bytes */
    const char *isa;
    int what;
    double gops; /* of this thread, result */
};

enum { READ, FMA, INT8 };

static void *read_lane(void *arg)
{
    struct lane *l = arg;
    uint64_t sum[8] = {0};
    for (size_t i = 0; i + 64 <= l->n; i += 64) {
        __builtin_prefetch(l->from + i + 512);
        for (size_t k = 0; k < 64; k++)
            sum[k % 8] ^= l->from[i + k];
    }
    for (int k = 1; k < 8; k++)
        sum[0] ^= sum[k];
    __asm__ volatile("" : : "r"(sum[0]));
    return NULL;
}

#define TWELVE(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#define LOOP(body)                                                                                 \
    do {                                                                                           \
        long n = LOOPS;                                                                            \
        __asm__ volatile("1:\n" body "dec %0\njnz 1b\n"                                            \
                         : "+r"(n)                                                                 \
                         :                                                                         \
                         : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7",   \
                           "xmm8", "xmm9", "xmm10", "xmm11", "xmm14", "xmm15");                    \
    } while (0)
#define FMA_Z(i) "vfmadd231ps %%zmm14, %%zmm15, %%zmm" #i "\n"
#define FMA_Y(i) "vfmadd231ps %%ymm14, %%ymm15, %%ymm" #i "\n"
#define DOT_Z(i) "vpdpbusd %%zmm14, %%zmm15, %%zmm" #i "\n"
#define DOT_Y(i) "vpmaddubsw %%ymm14, %%ymm15, %%ymm" #i "\n"
#define MUL_X(i) "mulps %%xmm14, %%xmm" #i "\n"

static void *math_lane(void *arg)
{
    struct lane *l = arg;
    double per = 12.0 * LOOPS, t = now();
    bool wide = strncmp(l->isa, "avx512", 6) == 0, none = strcmp(l->isa, "scalar") == 0;
    if (none) {
        LOOP(TWELVE(MUL_X));
        per *= 4;
    } else if (l->what == FMA && wide) {
        LOOP(TWELVE(FMA_Z));
        per *= 32;
    } else if (l->what == FMA) {
        LOOP(TWELVE(FMA_Y));
        per *= 16;
    } else if (wide) {
        LOOP(TWELVE(DOT_Z));
        per *= 128;
    } else {
        LOOP(TWELVE(DOT_Y));
        per *= 64;
    }
    l->gops = per / (now() - t) * 1e-9;
    return NULL;
}

/* Seconds of the whole; lanes hold their own results. */
static double lanes_run(void *(*f)(void *), struct lane *lanes, uint32_t n)
{
    pthread_t threads[64];
    double t = now();
    for (uint32_t i = 1; i < n; i++)
        if (pthread_create(&threads[i], NULL, f, &lanes[i]) != 0)
            exit(1);
    f(&lanes[0]);
    for (uint32_t i = 1; i < n; i++)
        pthread_join(threads[i], NULL);
    return now() - t;
}

static struct peaks peaks_measure(const struct kn *kn)
{
    struct peaks p = {0};
    struct lane lanes[64];
    uint32_t n = kn->n_threads;
    uint64_t *room = aligned_alloc(4096, READ_BYTES);
    if (!room)
        exit(1);
    memset(room, 1, READ_BYTES);
    for (int repeat = 0; repeat < 5; repeat++)
        for (int what = READ; what <= INT8; what++) {
            double sum = 0;
            for (uint32_t i = 0; i < n; i++)
                lanes[i] = (struct lane){room + READ_BYTES / 8 / n * i, READ_BYTES / 8 / n, kn->isa,
                                         what, 0};
            double t = lanes_run(what == READ ? read_lane : math_lane, lanes, n);
            for (uint32_t i = 0; i < n; i++)
                sum += lanes[i].gops;
            if (what == READ)
                p.read_gbs = fmax(p.read_gbs, (double)READ_BYTES / t * 1e-9);
            else if (what == FMA)
                p.fma_gops = fmax(p.fma_gops, sum);
            else
                p.int8_gops = fmax(p.int8_gops, sum);
        }
    free(room);
    return p;
}

/* ---- a line ----------------------------------------------------------------------------------------------- */

struct line {
    char name[64];
    double bytes, ops; /* of one call */
    bool int8;
    void (*run)(void *arg);
    void *arg;
};

static bool wanted(const struct bench *b, const char *name)
{
    return !b->filter || strstr(name, b->filter);
}

static void line_run(const struct bench *b, const struct line *l)
{
    double best = 1e9, end = now() + b->seconds;
    l->run(l->arg);
    do {
        double t = now();
        l->run(l->arg);
        best = fmin(best, now() - t);
    } while (now() < end);
    double gbs = l->bytes / best * 1e-9, gops = l->ops / best * 1e-9;
    double peak = l->int8 ? b->peak.int8_gops : b->peak.fma_gops;
    printf("%-44s %10.1f us %8.1f GB/s %5.0f %% %9.1f Gop/s %5.0f %%\n", l->name, best * 1e6, gbs,
           100 * gbs / b->peak.read_gbs, gops, 100 * gops / peak);
    fflush(stdout);
}

/* ---- linear ------------------------------------------------------------------------------------------------- */

struct linear_arg {
    struct kn *kn;
    struct kn_weight **w; /* several copies, so that they do not all fit a cache */
    uint32_t n_copies, turn, rows;
    float *x, *out;
};

static void linear_run(void *p)
{
    struct linear_arg *a = p;
    const struct kn_weight *w = a->w[a->turn++ % a->n_copies];
    a->kn->ops->linear(a->kn, 1, &w, NULL, a->x, a->rows, &a->out, false);
}

static void linear_bench(const struct bench *b, enum kn_type type, uint32_t outs, uint32_t cols)
{
    static const uint32_t batches[] = {1, 4, 8, 16, 64, 512};
    struct line lines[KC_LEN(batches)];
    bool any = false;
    for (size_t i = 0; i < KC_LEN(batches); i++) {
        lines[i] = (struct line){.run = linear_run,
                                 .int8 = kn_int8_format(type) != NULL,
                                 .ops = 2.0 * batches[i] * outs * cols};
        snprintf(lines[i].name, sizeof lines[i].name, "linear %s %ux%u rows %u",
                 kn_type_find(type)->name, outs, cols, batches[i]);
        any |= wanted(b, lines[i].name);
    }
    if (!any)
        return;
    struct kn_tensor t = kc_tensor(type, outs, cols, 1);
    struct kn *kn = b->kn;
    struct kn_weight *copies[64];
    struct linear_arg a = {.kn = kn, .w = copies};
    size_t total = 0;
    while (a.n_copies < 64 && total < READ_BYTES / 2) {
        copies[a.n_copies] = kc_load(kn, &t);
        total += kn->ops->weight_bytes(copies[a.n_copies++]);
    }
    size_t x_bytes = (size_t)512 * cols * sizeof(float),
           out_bytes = (size_t)512 * outs * sizeof(float);
    float *x = kc_floats(2, (size_t)512 * cols, 1.0f);
    a.x = kc_up(kn, x, x_bytes);
    a.out = kc_up(kn, NULL, out_bytes);
    for (size_t i = 0; i < KC_LEN(batches); i++) {
        lines[i].arg = &a;
        lines[i].bytes = (double)total / a.n_copies;
        a.rows = batches[i];
        if (wanted(b, lines[i].name))
            line_run(b, &lines[i]);
    }
    for (uint32_t i = 0; i < a.n_copies; i++)
        kn->ops->weight_free(kn, &copies[i]);
    kc_drop(kn, a.x, x_bytes);
    kc_drop(kn, a.out, out_bytes);
    kc_tensor_free(&t);
    free(x);
}

/* Log-sum-exp over a vocabulary: the same product, and what becomes of it. */
static void lse_run(void *p)
{
    struct linear_arg *a = p;
    a->kn->ops->row_lse(a->kn, a->w[0], a->x, a->rows, a->out);
}

static void lse_bench(const struct bench *b, enum kn_type type, uint32_t vocab, uint32_t cols)
{
    static const uint32_t batches[] = {1, 64, 256, 512};
    struct kn_tensor t = kc_tensor(type, vocab, cols, 1);
    struct kn *kn = b->kn;
    struct kn_weight *w = kc_load(kn, &t);
    size_t x_bytes = (size_t)512 * cols * sizeof(float), out_bytes = 512 * sizeof(float);
    float *x = kc_floats(2, (size_t)512 * cols, 1.0f);
    struct linear_arg a = {.kn = kn, .w = &w, .n_copies = 1};
    a.x = kc_up(kn, x, x_bytes);
    a.out = kc_up(kn, NULL, out_bytes);
    for (size_t i = 0; i < KC_LEN(batches); i++) {
        struct line l = {.run = lse_run,
                         .arg = &a,
                         .int8 = kn_int8_format(type) != NULL,
                         .bytes = (double)kn->ops->weight_bytes(w),
                         .ops = 2.0 * batches[i] * vocab * cols};
        a.rows = batches[i];
        snprintf(l.name, sizeof l.name, "row_lse %s %ux%u rows %u", kn_type_find(type)->name, vocab,
                 cols, batches[i]);
        if (wanted(b, l.name))
            line_run(b, &l);
    }
    kn->ops->weight_free(kn, &w);
    kc_drop(kn, a.x, x_bytes);
    kc_drop(kn, a.out, out_bytes);
    kc_tensor_free(&t);
    free(x);
}

/* ---- attention ------------------------------------------------------------------------------------------------ */

struct attn_arg {
    struct kn *kn;
    struct kn_batch b;
    uint32_t n_heads, n_layers, layer;
    float *q, *out;
};

static void attn_run(void *p)
{
    struct attn_arg *a = p;
    a->kn->ops->attention(a->kn, &a->b, a->layer++ % a->n_layers, a->q, a->n_heads, 0.125f, a->out);
}

struct attn_shape {
    uint32_t n_heads, n_kv, d, rows, n;
    uint32_t n_layers; /* taken in turn: many are more than a cache holds */
};

/* The last `rows` tokens of a sequence of n look back. */
static void attn_bench(const struct bench *b, struct attn_shape f)
{
    uint32_t n_heads = f.n_heads, n_kv = f.n_kv, d = f.d, rows = f.rows, n = f.n;
    struct line l = {.run = attn_run};
    struct kc_pool pool;
    snprintf(l.name, sizeof l.name, "attention %u/%u of %u rows %u cache %u x%u", n_heads, n_kv, d,
             rows, n, f.n_layers);
    if (!wanted(b, l.name))
        return;
    uint32_t n_pages = (n + 63) / 64, *slots = kc_slots(KC_DENSE, n, n_pages, 1);
    kc_pool_open(
        &pool, b->kn,
        (struct kn_kv){.n_layers = f.n_layers, .n_kv_heads = n_kv, .head_dim = d, .type = KN_F16},
        n_pages);
    struct kn_seq s = {&pool.kv, slots, n};
    size_t kv = (size_t)n * n_kv * d, q_bytes = (size_t)rows * n_heads * d * sizeof(float);
    float *k = kc_floats(3, kv, 1.0f), *q = kc_floats(4, q_bytes / sizeof(float), 1.0f);
    for (uint32_t i = 0; i < f.n_layers; i++)
        kc_pool_write(&pool, &s, i, (struct kc_rows){0, n, k, k, NULL});
    uint32_t *lo = calloc(rows, sizeof *lo), *hi = malloc(rows * sizeof *hi),
             *seq = calloc(rows, sizeof *seq);
    for (uint32_t r = 0; r < rows; r++) {
        hi[r] = n - rows + r + 1;
        l.ops += 4.0 * n_heads * d * hi[r];
    }
    struct attn_arg a = {b->kn,
                         {.n_rows = rows, .n_seqs = 1, .seq = seq, .lo = lo, .hi = hi, .seqs = &s},
                         n_heads,
                         f.n_layers,
                         0,
                         kc_up(b->kn, q, q_bytes),
                         kc_up(b->kn, NULL, q_bytes)};
    l.arg = &a;
    l.bytes = 2.0 * (double)kv * 2;
    line_run(b, &l);
    kc_drop(b->kn, a.q, q_bytes);
    kc_drop(b->kn, a.out, q_bytes);
    kc_pool_close(&pool);
    free(slots);
    free(k);
    free(q);
    free(lo);
    free(hi);
    free(seq);
}

/* ---- row ops ------------------------------------------------------------------------------------------------- */

struct vec_arg {
    struct kn *kn;
    float *x, *y;
    uint32_t rows, d;
};

static void norm_run(void *p)
{
    struct vec_arg *a = p;
    a->kn->ops->rmsnorm(a->kn, a->y, a->x, a->x, a->rows, a->d, 1e-5f);
}

static void swiglu_run(void *p)
{
    struct vec_arg *a = p;
    a->kn->ops->swiglu(a->kn, a->y, a->x, a->x, (size_t)a->rows * a->d);
}

static void vec_bench(const struct bench *b, uint32_t rows, uint32_t d)
{
    size_t n = (size_t)rows * d;
    float *x = kc_floats(5, n, 1.0f);
    struct vec_arg a = {b->kn, kc_up(b->kn, x, n * sizeof *x), kc_up(b->kn, NULL, n * sizeof *x),
                        rows, d};
    struct line norm = {.bytes = 8.0 * (double)n,
                        .ops = 4.0 * (double)n,
                        .run = norm_run,
                        .arg = &a};
    struct line gate = {.bytes = 12.0 * (double)n,
                        .ops = 15.0 * (double)n,
                        .run = swiglu_run,
                        .arg = &a};
    snprintf(norm.name, sizeof norm.name, "rmsnorm %u rows %u", d, rows);
    snprintf(gate.name, sizeof gate.name, "swiglu %u rows %u", d, rows);
    if (wanted(b, norm.name))
        line_run(b, &norm);
    if (wanted(b, gate.name))
        line_run(b, &gate);
    kc_drop(b->kn, a.x, n * sizeof *x);
    kc_drop(b->kn, a.y, n * sizeof *x);
    free(x);
}

/* ---- main --------------------------------------------------------------------------------------------------- */

static void all(const struct bench *b)
{
    static const enum kn_type types[] = {KN_Q4_1, KN_Q4_0,   KN_Q8_0, KN_Q4_K,
                                         KN_Q6_K, KN_IQ4_XS, KN_F16,  KN_BF16};
    for (size_t i = 0; i < KC_LEN(types); i++) {
        if (kn_type_find(types[i])->block <= 32) {
            linear_bench(b, types[i], 1536, 576);
            linear_bench(b, types[i], 576, 1536);
        }
        linear_bench(b, types[i], 4096, 4096);
    }
    linear_bench(b, KN_Q8_0, 49152, 576);
    lse_bench(b, KN_Q8_0, 49152, 576);
    attn_bench(b, (struct attn_shape){9, 3, 64, 512, 512, 1});
    attn_bench(b, (struct attn_shape){9, 3, 64, 64, 2048, 60});
    attn_bench(b, (struct attn_shape){9, 3, 64, 1, 512, 1});
    attn_bench(b, (struct attn_shape){9, 3, 64, 1, 2048, 60});
    attn_bench(b, (struct attn_shape){9, 3, 64, 1, 8192, 1});
    attn_bench(b, (struct attn_shape){32, 8, 128, 128, 2048, 1});
    attn_bench(b, (struct attn_shape){32, 8, 128, 1, 8192, 1});
    vec_bench(b, 1, 576);
    vec_bench(b, 512, 1536);
}

int main(int argc, char **argv)
{
    struct bench b = {.seconds = 0.2};
    struct kn_options opt = {.backend = "cpu"};
    char why[256];
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--isa") == 0)
            opt.isa = argv[i + 1];
        else if (strcmp(argv[i], "--threads") == 0)
            opt.threads = (uint32_t)strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--activations") == 0)
            opt.activations = (uint32_t)strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--clock") == 0 && strcmp(argv[i + 1], "cpu") == 0)
            clock_used = CLOCK_PROCESS_CPUTIME_ID;
        else if (strcmp(argv[i], "--filter") == 0)
            b.filter = argv[i + 1];
        else if (strcmp(argv[i], "--ms") == 0)
            b.seconds = strtod(argv[i + 1], NULL) * 1e-3;
        else
            argc = 0;
    }
    if (argc % 2 != 1) {
        fprintf(stderr,
                "usage: bench_ops [--isa NAME] [--activations 8|16] [--threads N] [--filter TEXT] "
                "[--ms N] [--clock cpu]\n");
        return 2;
    }
    if (kn_open(&b.kn, &opt, why, sizeof why) != KN_OK) {
        fprintf(stderr, "bench_ops: %s\n", why);
        return 1;
    }
    b.peak = peaks_measure(b.kn);
    printf("%s: reads %.1f GB/s, fma %.0f Gop/s, 8-bit %.0f Gop/s\n", kc_name(b.kn),
           b.peak.read_gbs, b.peak.fma_gops, b.peak.int8_gops);
    all(&b);
    kn_close(&b.kn);
    return 0;
}
