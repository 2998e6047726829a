/* Products with weights of every type, on every backend and instruction set.
 *
 *   quantised weights, 8-bit activations   bit for bit kn_ref_linear_q8 (the rule of kn_int8.h)
 *   BF16 weights where VDPBF16PS is used   bit for bit its documented rule, in plain C; and within 2^-8 + 2e-6 of
 *                                          sum |w_k x_k|: the nearest bf16 is within 2^-8 of a value, so each product is
 *   everything else                        within 2e-6 of sum |w_k x_k|, by a sum in double
 * precision
 *
 * and the row rule: a row alone, in any batch, gives the same bits. test_kn_linear_wide.c is this again with activations
 * of 16 bits and kn_ref_linear_q16. */
#include "kernels_compare.h"
#include "../../kernels/cpu/matmul_bf16.h"
#include "sanitized.h"

#ifndef OPEN_SET
#define OPEN_SET kc_open
#define REF_LINEAR kn_ref_linear_q8
#define OUTS 1, 2, 63, 64, 65, 700
#define VOCABS 1, 65, 384, 5003
#define QUANTISED_ONLY false
#endif

#define ROWS_ALL 73 /* 1 + 2 + ... + 9 < 73, and 64 + 9 */

static struct kc_set set;

static int open_set(void **state)
{
    (void)state;
    OPEN_SET(&set, 3);
    for (unsigned i = 0; i < set.n; i++)
        print_message("  %s\n", kc_name(set.kn[i]));
    return 0;
}

static int close_set(void **state)
{
    (void)state;
    kc_close(&set);
    return 0;
}

/* One matrix, its inputs and what must come out. */
struct problem {
    struct kn_tensor w;
    float *values, *x;
    /* [ROWS_ALL][rows]: by the integer rule, for BF16 by VDPBF16PS's; NULL for F32, F16 */
    float *exact;
    double *want; /* [ROWS_ALL][rows] */
    float *size;  /* the same shape: sum |w_k x_k| */
};

static void sums(struct problem *p)
{
    uint32_t rows = p->w.rows, cols = p->w.cols;
    for (uint32_t r = 0; r < ROWS_ALL; r++)
        for (uint32_t o = 0; o < rows; o++) {
            double sum = 0, size = 0;
            for (uint32_t k = 0; k < cols; k++) {
                double t =
                    (double)p->values[(size_t)o * cols + k] * (double)p->x[(size_t)r * cols + k];
                sum += t;
                size += fabs(t);
            }
            p->want[(size_t)r * rows + o] = sum;
            p->size[(size_t)r * rows + o] = (float)size;
        }
}

static float *exact_bf16(const struct problem *p)
{
    uint32_t rows = p->w.rows, cols = p->w.cols;
    float *ret = malloc((size_t)ROWS_ALL * rows * sizeof *ret);
    float *x = calloc(cols + 1, sizeof *x);
    assert_true(ret && x);
    for (uint32_t r = 0; r < ROWS_ALL; r++) {
        for (uint32_t k = 0; k < cols; k++)
            x[k] = kn_bf16_to_f32(kn_f32_to_bf16(pair_flush(p->x[(size_t)r * cols + k])));
        for (uint32_t o = 0; o < rows; o++) {
            const float *w = p->values + (size_t)o * cols;
            float acc = 0;
            for (uint32_t k = 0; k < cols; k += 2) {
                const float pair[2] = {w[k], k + 1 < cols ? w[k + 1] : 0.0f};
                acc = pair_model(acc, pair, x + k);
            }
            ret[(size_t)r * rows + o] = acc;
        }
    }
    free(x);
    return ret;
}

static struct problem problem_make(enum kn_type type, uint32_t rows, uint32_t cols, uint64_t seed)
{
    struct problem p = {.w = kc_tensor(type, rows, cols, seed)};
    size_t n_out = (size_t)ROWS_ALL * rows;
    p.values = kc_tensor_values(&p.w);
    p.x = kc_floats(seed + 1, (size_t)ROWS_ALL * cols, 1.0f);
    for (uint32_t k = 0; k < cols; k++) {
        p.x[(size_t)3 * cols + k] = k < 40 ? 0.0f : p.x[k] * 1e-3f;    /* a block of zeros */
        p.x[(size_t)5 * cols + k] *= k % 37 == 0 ? 300.0f : 1.0f;      /* outliers */
        p.x[(size_t)6 * cols + k] = (float)((int)(k % 255) - 127) / 2; /* many ties */
    }
    p.want = malloc(n_out * sizeof *p.want);
    p.size = malloc(n_out * sizeof *p.size);
    assert_true(p.want && p.size);
    sums(&p);
    if (kn_int8_format(type)) {
        p.exact = malloc(n_out * sizeof *p.exact);
        assert_non_null(p.exact);
        REF_LINEAR(&p.w, p.x, ROWS_ALL, p.exact);
    }
    if (type == KN_BF16)
        p.exact = exact_bf16(&p);
    return p;
}

static void problem_free(struct problem *p)
{
    kc_tensor_free(&p->w);
    free(p->values);
    free(p->x);
    free(p->exact);
    free(p->want);
    free(p->size);
}

/* got: rows first .. first + n of the problem's outputs. */
static void check_rows(const struct kn *kn, const struct problem *p, uint32_t first, uint32_t n,
                       const float *got)
{
    char what[128];
    size_t at = (size_t)first * p->w.rows;
    snprintf(what, sizeof what, "%s: %s [%u][%u], rows %u..%u", kc_name(kn),
             kn_type_find(p->w.type)->name, p->w.rows, p->w.cols, first, first + n);
    bool bf16 = p->w.type == KN_BF16;
    if (p->exact && (bf16 ? kc_is_bf16(kn) : kc_is_int8(kn))) {
        kc_same(what, got, p->exact + at, (size_t)n * p->w.rows);
        if (!bf16)
            return;
    }
    /* A device keeps the integer rule up to 64 rows, in an order of its own; with more rows, and float weights from 5
     * rows on, inputs are rounded to 16 bits. */
    bool device = kc_is_device(kn), exact = device && !bf16 && p->exact && n <= 64;
    double tol = bf16 && kc_is_bf16(kn) ? 0x1p-8 + 2e-6 : 2e-6;
    if (device && !exact && p->w.type != KN_F32 && n > 4)
        tol = bf16 ? 0x1p-8 : (double)KC_HALVES;
    for (size_t i = 0; i < (size_t)n * p->w.rows; i++) {
        double want = exact ? (double)p->exact[at + i] : p->want[at + i];
        if (!(fabs((double)got[i] - want) <= tol * (double)p->size[at + i]))
            fail_msg("%s: value %zu is %.9g, expected %.9g", what, i, (double)got[i], want);
    }
}

/* Rows first .. first + n of the problem alone: those of all 73 at once, to the bit. */
static void check_batch(struct kn *kn, const struct problem *p, const struct kn_weight *w,
                        uint32_t first, uint32_t n, const float *all, float *got)
{
    kc_linear(kn, w, &p->w, p->x + (size_t)first * p->w.cols, n, got);
    if (kc_is_device(kn))
        check_rows(kn, p, first, n, got);
    else
        kc_same(kc_name(kn), got, all + (size_t)first * p->w.rows, (size_t)n * p->w.rows);
}

/* All 73 rows at once are the backend's own truth for the bits of every smaller batch. */
static void run_problem(struct kn *kn, const struct problem *p)
{
    static const uint32_t batches[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 64};
    size_t n_out = (size_t)ROWS_ALL * p->w.rows;
    float *all = malloc(n_out * sizeof *all), *got = malloc(n_out * sizeof *got);
    struct kn_weight *w = kc_load(kn, &p->w);
    assert_true(all && got && kn->ops->weight_bytes(w) > 0);
    assert_int_equal(kn->bytes_weights, kn->ops->weight_bytes(w));
    kc_linear(kn, w, &p->w, p->x, ROWS_ALL, all);
    check_rows(kn, p, 0, ROWS_ALL, all);
    for (size_t i = 0; i < KC_LEN(batches); i++) {
        uint32_t n = batches[i], first = n == 64 ? 7 : n % 4;
        check_batch(kn, p, w, first, n, all, got);
    }
    kn->ops->weight_free(kn, &w);
    assert_null(w);
    free(all);
    free(got);
}

static void every_shape(enum kn_type type)
{
    static const uint32_t outs[] = {OUTS};
    static const uint32_t cols_any[] = {1, 7, 64, 65, 576};
    static const uint32_t cols_32[] = {32, 64, 96, 576};
    static const uint32_t cols_256[] = {256, 512, 768};
    uint32_t block = kn_type_find(type)->block;
    const uint32_t *cols = block == 1 ? cols_any : block == 32 ? cols_32 : cols_256;
    size_t n_cols = block == 1    ? KC_LEN(cols_any)
                    : block == 32 ? KC_LEN(cols_32)
                                  : KC_LEN(cols_256);
    for (size_t o = 0; o < KC_LEN(outs); o++)
        for (size_t c = 0; c < n_cols; c++) {
            if (outs[o] == 700 && (c + 1 < n_cols || SANITIZED))
                continue; /* the wide one once, at its longest, where it is fast */
            if (SANITIZED && (o + c + (size_t)type) % 2 != 0)
                continue; /* each width and each length, not each with each */
            struct problem p = problem_make(type, outs[o], cols[c], 10 * o + c);
            for (unsigned i = 0; i < set.n; i++)
                run_problem(set.kn[i], &p);
            problem_free(&p);
        }
}

static void float_weights(void **state)
{
    (void)state;
    every_shape(KN_F32);
    every_shape(KN_F16);
    every_shape(KN_BF16);
}

static void weights_in_blocks_of_32(void **state)
{
    (void)state;
    for (size_t i = 0; i < kc_n_types; i++)
        if (kn_type_find(kc_types[i])->block == 32)
            every_shape(kc_types[i]);
}

static void weights_in_blocks_of_256(void **state)
{
    (void)state;
    for (size_t i = 0; i < kc_n_types; i++)
        if (kn_type_find(kc_types[i])->block == 256)
            every_shape(kc_types[i]);
}

/* Every batch about the borders of the kernels: 4, 8 and 16 rows, and one more. */
static void batches_of_1_to_17(void **state)
{
    (void)state;
    static const enum kn_type types[] = {KN_F16, KN_BF16, KN_Q8_0, KN_Q4_1, KN_Q6_K, KN_IQ4_XS};
    for (size_t t = 0; t < KC_LEN(types); t++) {
        struct problem p = problem_make(types[t], 65, 256, 31);
        size_t n_out = (size_t)ROWS_ALL * p.w.rows;
        float *all = malloc(n_out * sizeof *all), *got = malloc(n_out * sizeof *got);
        assert_true(all && got);
        for (unsigned i = 0; i < set.n; i++) {
            struct kn_weight *w = kc_load(set.kn[i], &p.w);
            kc_linear(set.kn[i], w, &p.w, p.x, ROWS_ALL, all);
            for (uint32_t n = 1; n <= 17; n++)
                check_batch(set.kn[i], &p, w, n, n, all, got);
            set.kn[i]->ops->weight_free(set.kn[i], &w);
        }
        free(all);
        free(got);
        problem_free(&p);
    }
}

/* Rows as long as real models have them: 16-bit sums would overflow, long sums drift. A sanitizer, which watches memory, sees the
 * same steps in a few turns of 64 blocks. */
static void long_rows(void **state)
{
    (void)state;
    static const enum kn_type types[] = {KN_F32, KN_BF16, KN_Q8_0, KN_Q4_1, KN_Q6_K, KN_Q4_K};
    for (size_t t = QUANTISED_ONLY ? 2 : 0; t < KC_LEN(types); t++) {
        struct problem p = problem_make(types[t], 17, SANITIZED ? 2560 : 8960, 77);
        for (unsigned i = 0; i < set.n; i++)
            run_problem(set.kn[i], &p);
        problem_free(&p);
    }
}

/* The largest codes against the largest activations. */
static void extremes_do_not_saturate(void **state)
{
    (void)state;
    for (size_t t = 0; t < kc_n_types; t++) {
        if (!kn_int8_format(kc_types[t]))
            continue;
        for (int sign = 0; sign < 4; sign += SANITIZED ? 3 : 1) {
            struct problem p = problem_make(kc_types[t], 33, 256, 5);
            const struct kn_type_info *info = kn_type_find(kc_types[t]);
            uint8_t *data = (uint8_t *)p.w.data;
            uint8_t fill = sign & 1 ? 0xff : p.w.type == KN_Q8_0 ? 0x80 : 0x00;
            for (size_t b = 0; b < p.w.bytes;
                 b += info->bytes) /* all codes but the first halves' */
                for (uint32_t i = 4; i < info->bytes - 4; i++)
                    data[b + i] = fill;
            for (size_t i = 0; i < (size_t)ROWS_ALL * 256; i++)
                p.x[i] = sign & 2 ? -1.0f : 1.0f;
            REF_LINEAR(&p.w, p.x, ROWS_ALL, p.exact);
            for (unsigned i = 0; i < set.n; i++)
                if (kc_is_int8(set.kn[i]))
                    run_problem(set.kn[i], &p);
            problem_free(&p);
        }
    }
}

/* Three weights of different widths and types in one call, biases on some, added to what is there.
 */
struct joint {
    struct kn_tensor t[3];
    float *bias[3], *start[3], *x;
    uint32_t rows, cols;
};

static void joint_run(struct kn *kn, const struct joint *j, uint32_t n_w, bool add, bool with_bias)
{
    struct kn_weight *w[3];
    float *outs[3], *bias[3], *one[3], *got[3];
    size_t in_bytes = (size_t)j->rows * j->cols * sizeof(float);
    float *x = kc_up(kn, j->x, in_bytes);
    for (uint32_t i = 0; i < n_w; i++) {
        size_t n = (size_t)j->rows * j->t[i].rows;
        w[i] = kc_load(kn, &j->t[i]);
        outs[i] = kc_up(kn, j->start[i], n * sizeof(float));
        bias[i] = i == 1 ? NULL : kc_up(kn, j->bias[i], j->t[i].rows * sizeof(float));
        one[i] = malloc(n * sizeof(float));
        got[i] = malloc(n * sizeof(float));
        assert_true(one[i] && got[i]);
        kc_linear(kn, w[i], &j->t[i], j->x, j->rows, one[i]);
    }
    kn->ops->linear(kn, n_w, (const struct kn_weight *const *)w,
                    with_bias ? (const float *const *)bias : NULL, x, j->rows, outs, add);
    for (uint32_t i = 0; i < n_w; i++) {
        uint32_t width = j->t[i].rows;
        size_t n = (size_t)j->rows * width;
        kc_down(kn, got[i], outs[i], n * sizeof(float));
        for (size_t k = 0; k < n; k++) {
            if (with_bias && bias[i])
                one[i][k] = one[i][k] + j->bias[i][k % width];
            if (add)
                one[i][k] = j->start[i][k] + one[i][k];
        }
        kc_alike(kn, got[i], one[i], n, 1e-6f);
        if (bias[i])
            kc_drop(kn, bias[i], width * sizeof(float));
        kn->ops->weight_free(kn, &w[i]);
        free(one[i]);
        free(got[i]);
    }
    kc_drop(kn, x, in_bytes);
}

static void several_weights_bias_and_add(void **state)
{
    (void)state;
    static const enum kn_type mixes[][3] = {{KN_Q4_1, KN_Q4_1, KN_Q4_1},
                                            {KN_Q4_K, KN_Q4_K, KN_Q6_K},
                                            {KN_F32, KN_Q8_0, KN_F16},
                                            {KN_BF16, KN_BF16, KN_IQ4_XS}};
    static const uint32_t rows[] = {1, 2, 5, 70};
    for (size_t m = QUANTISED_ONLY; m < KC_LEN(mixes); m++)
        for (size_t r = 0; r < KC_LEN(rows); r++) {
            struct joint j = {.rows = rows[r], .cols = 256};
            static const uint32_t widths[] = {96, 33, 17};
            j.x = kc_floats(m, (size_t)j.rows * j.cols, 1.0f);
            for (uint32_t i = 0; i < 3; i++) {
                j.t[i] = kc_tensor(mixes[m][i], widths[i], j.cols, 40 + i);
                j.bias[i] = kc_floats(50 + i, widths[i], 1.0f);
                j.start[i] = kc_floats(60 + i, (size_t)j.rows * widths[i], 1.0f);
            }
            for (unsigned i = 0; i < set.n; i++)
                for (uint32_t n_w = 1; n_w <= 3; n_w++)
                    for (int how = 0; how < 4; how++)
                        joint_run(set.kn[i], &j, n_w, how & 1, how & 2);
            for (uint32_t i = 0; i < 3; i++) {
                kc_tensor_free(&j.t[i]);
                free(j.bias[i]);
                free(j.start[i]);
            }
            free(j.x);
        }
}

static void embed_expands_exactly(void **state)
{
    (void)state;
    enum { V = 131, C = 512, N = 9 };
    int32_t ids[N] = {0, 130, 64, 63, 64, 1, 15, 16, 129};
    uint32_t zeros[N] = {0};
    struct kn_kv kv = {NULL, 4096, 1, 1, 16, 0, KN_F32};
    struct kn_seq seq = {&kv, zeros, 0};
    struct kn_batch b = {.n_rows = N,
                         .n_seqs = 1,
                         .ids = ids,
                         .positions = (int32_t *)zeros,
                         .seq = zeros,
                         .lo = zeros,
                         .hi = zeros,
                         .slots = NULL,
                         .seqs = &seq};
    for (size_t t = 0; t < kc_n_types; t++) {
        struct kn_tensor w = kc_tensor(kc_types[t], V, C, 3);
        float *values = kc_tensor_values(&w), got[N * C];
        for (unsigned i = 0; i < set.n; i++) {
            struct kn *kn = set.kn[i];
            struct kn_weight *dev = kc_load(kn, &w);
            float *out = kc_up(kn, NULL, sizeof got);
            kn->ops->batch_begin(kn, &b);
            kn->ops->embed(kn, dev, &b, out);
            kn->ops->batch_end(kn, &b);
            kc_down(kn, got, out, sizeof got);
            for (int r = 0; r < N; r++) /* as numbers: a zero may have either sign */
                for (int c = 0; c < C; c++)
                    if (got[r * C + c] != values[(size_t)ids[r] * C + (size_t)c])
                        fail_msg("%s: %s row %d value %d", kc_name(kn), kn_type_find(w.type)->name,
                                 ids[r], c);
            kn->ops->weight_free(kn, &dev);
        }
        kc_tensor_free(&w);
        free(values);
    }
}

static double lse_of(const float *logits, uint32_t n)
{
    double max = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < n; i++)
        max = fmax(max, logits[i]);
    for (uint32_t i = 0; i < n; i++)
        sum += exp(logits[i] - max);
    return max + log(sum);
}

/* The vocabulary's two views give linear's numbers: row_logit to the bit, row_lse within 2e-6 of
 * the log-sum-exp of linear's logits (and its absolute value, as far as it exceeds 1), row by row
 * the same in any batch. */
static void scores_are_linears(void **state)
{
    (void)state;
    enum { C = 256, N = 67 };
    static const uint32_t vocabs[] = {VOCABS};
    static const enum kn_type types[] = {KN_F32, KN_BF16, KN_Q8_0, KN_Q4_1, KN_Q6_K, KN_IQ4_XS};
    for (size_t c = 0; c < KC_LEN(types) * KC_LEN(vocabs); c++) {
        uint32_t v = vocabs[c % KC_LEN(vocabs)];
        struct kn_tensor t = kc_tensor(types[c / KC_LEN(vocabs)], v, C, 9);
        float *x = kc_floats(c, (size_t)N * C, c % 2 ? 4.0f : 0.5f);
        float *logits = malloc((size_t)N * v * sizeof *logits), got[N], lse[N], one;
        int32_t ids[N];
        assert_non_null(logits);
        for (uint32_t r = 0; r < N; r++)
            ids[r] = (int32_t)((r * 2654435761u) % v);
        for (unsigned i = 0; i < set.n; i++) {
            struct kn *kn = set.kn[i];
            if (v > 1000 && strncmp(kn->name, "simt", 4) == 0 && t.type != KN_F32 &&
                t.type != KN_Q4_1)
                continue; /* threads one by one: a vocabulary of several slices with two types is enough */
            struct kn_weight *w = kc_load(kn, &t);
            float *dx = kc_up(kn, x, (size_t)N * C * sizeof *x);
            kc_linear(kn, w, &t, x, N, logits);
            kn->ops->row_logit(kn, w, dx, N, ids, got);
            kn->ops->row_lse(kn, w, dx, N, lse);
            /* a device's row_logit rounds nothing, its linear and row_lse here round to halves */
            double size = kc_is_device(kn) ? (double)kc_max_abs(logits, (size_t)N * v) : 0.0;
            double tol = kc_is_device(kn) && t.type != KN_F32 ? (double)KC_HALVES : 5e-6;
            for (uint32_t r = 0; r < N; r++) {
                double want = lse_of(logits + (size_t)r * v, v);
                if (kc_is_device(kn))
                    kc_near(kc_name(kn), &got[r], &logits[(size_t)r * v + (size_t)ids[r]], 1,
                            (float)size, 2 * KC_HALVES);
                else
                    kc_same(kc_name(kn), &got[r], &logits[(size_t)r * v + (size_t)ids[r]], 1);
                if (!(fabs(lse[r] - want) <= tol * fmax(fmax(1.0, size), fabs(want))))
                    fail_msg("%s: row %u of a vocabulary of %u: %.9g, expected %.9g", kc_name(kn),
                             r, v, (double)lse[r], want);
                if (r % 9 == 4) {
                    kn->ops->row_lse(kn, w, dx + (size_t)r * C, 1, &one);
                    kc_alike(kn, &one, &lse[r], 1, KC_HALVES);
                    kn->ops->row_logit(kn, w, dx + (size_t)r * C, 1, &ids[r], &one);
                    kc_same(kc_name(kn), &one, &got[r], 1);
                }
            }
            kc_drop(kn, dx, (size_t)N * C * sizeof *x);
            kn->ops->weight_free(kn, &w);
        }
        kc_tensor_free(&t);
        free(x);
        free(logits);
    }
}

static void refused(struct kn *kn, struct kn_tensor t, int code)
{
    struct kn_weight *w = (struct kn_weight *)(uintptr_t)0x5a;
    assert_int_equal(kn->ops->weight_load(kn, &t, &w), code);
    assert_ptr_equal(w, (void *)(uintptr_t)0x5a);
    assert_int_equal(kn->bytes_weights, 0);
}

static void misshapen_weights_are_refused(void **state)
{
    (void)state;
    struct kn_tensor t = kc_tensor(KN_Q4_0, 4, 64, 1);
    for (unsigned i = 0; i < set.n; i++) {
        struct kn *kn = set.kn[i];
        refused(kn, (struct kn_tensor){KN_I32, 4, 32, t.data, 4 * 32 * 4}, KN_EUNSUPPORTED);
        refused(kn, (struct kn_tensor){(enum kn_type)77, 4, 32, t.data, 128}, KN_EUNSUPPORTED);
        refused(kn, (struct kn_tensor){KN_Q4_0, 4, 63, t.data, t.bytes}, KN_EINVALID);
        refused(kn, (struct kn_tensor){KN_Q4_0, 0, 64, t.data, 0}, KN_EINVALID);
        refused(kn, (struct kn_tensor){KN_Q4_0, 4, 0, t.data, 0}, KN_EINVALID);
        refused(kn, (struct kn_tensor){KN_Q4_0, 4, 64, t.data, t.bytes - 1}, KN_EINVALID);
    }
    kc_tensor_free(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(weights_in_blocks_of_32),  cmocka_unit_test(weights_in_blocks_of_256),
        cmocka_unit_test(batches_of_1_to_17),       cmocka_unit_test(long_rows),
        cmocka_unit_test(extremes_do_not_saturate), cmocka_unit_test(several_weights_bias_and_add),
        cmocka_unit_test(scores_are_linears),
    };
    const struct CMUnitTest others[] = {
        cmocka_unit_test(float_weights),
        cmocka_unit_test(embed_expands_exactly),
        cmocka_unit_test(misshapen_weights_are_refused),
    };
    int failed = cmocka_run_group_tests(tests, open_set, close_set);
    if (!QUANTISED_ONLY)
        failed += cmocka_run_group_tests(others, open_set, close_set);
    return failed;
}
