/* What the GPU backend promises of its products beyond the tolerances of test_kn_linear.c: the order of every sum of
 * quantised weights, to the bit, up to 64 rows; what they expand to beyond; few rows by weights in 16 bits; and inputs beyond the range of halves. */
#include "kernels_device.h"

/* ---- the documented orders, in plain C ---- */

/* One block's two (or four) fma, as kn_int8.h has them. */
static float block_add(const struct kn_int8_format *f, const struct kn_int8_block *w,
                       const int8_t *a, float da, float acc)
{
    int len = KN_INT8_BLOCK / f->n_sub;
    for (int s = 0; s < f->n_sub; s++) {
        int isum = 0, asum = 0;
        for (int i = s * len; i < (s + 1) * len; i++) {
            isum += (w->u[i] - f->zero) * a[i];
            asum += a[i];
        }
        float scale = w->d[s] * da;
        acc = fmaf(scale, (float)isum, acc);
        if (f->has_min) {
            float sa = da * (float)asum;
            acc = fmaf(w->m[s], sa, acc);
        }
    }
    return acc;
}

/* linear_gemv.cu: lanes, then halves, then warps. */
static float gemv_order(const struct kn_int8_format *f, const struct kn_int8_block *w,
                        const int8_t *a, const float *da, uint32_t kb)
{
    uint32_t kw = kb > 1024 ? 8 : (kb + 127) / 128;
    float total = 0.0f;
    for (uint32_t warp = 0; warp < kw; warp++) {
        float lane[32] = {0};
        for (uint32_t l = 0; l < 32; l++)
            for (uint32_t c = warp * 128; c < kb; c += kw * 128)
                for (uint32_t b = c + l; b < kb && b < c + 128; b += 32)
                    lane[l] = block_add(f, &w[b], a + b * 32, da[b], lane[l]);
        for (uint32_t o = 16; o; o >>= 1) {
            float next[32];
            for (uint32_t l = 0; l < 32; l++)
                next[l] = lane[l] + lane[l ^ o];
            memcpy(lane, next, sizeof lane);
        }
        total += lane[0];
    }
    return total;
}

struct problem {
    struct kn_tensor w;
    float *x, *ascending, *gemv; /* [rows][w.rows]: outputs in each order */
    uint32_t rows;
};

static struct problem problem_make(enum kn_type type, uint32_t outs, uint32_t cols, uint32_t rows)
{
    struct problem p = {.w = kc_tensor(type, outs, cols, outs + cols), .rows = rows};
    const struct kn_int8_format *f = kn_int8_format(type);
    uint32_t kb = cols / 32;
    struct kn_int8_block *blocks = malloc(kb * sizeof *blocks);
    int8_t *a = malloc(cols);
    float *da = malloc(kb * sizeof *da);
    int16_t *asum = malloc(2 * kb * sizeof *asum);
    p.x = kc_floats(rows, (size_t)rows * cols, 1.0f);
    for (uint32_t k = 0; k < cols; k++)
        p.x[k] *= k < 64 ? 0.0f : k % 37 ? 1.0f : 100.0f;
    p.ascending = malloc((size_t)rows * outs * sizeof(float));
    p.gemv = malloc((size_t)rows * outs * sizeof(float));
    assert_true(blocks && a && da && asum && p.ascending && p.gemv);
    kn_ref_linear_q8(&p.w, p.x, rows, p.ascending);
    for (uint32_t r = 0; r < rows; r++) {
        kn_int8_quantise(p.x + (size_t)r * cols, cols, a, da, asum);
        for (uint32_t o = 0; o < outs; o++) {
            kn_int8_unpack(type, (const uint8_t *)p.w.data + o * (p.w.bytes / outs), 0, kb, blocks);
            p.gemv[(size_t)r * outs + o] = gemv_order(f, blocks, a, da, kb);
        }
    }
    free(blocks);
    free(a);
    free(da);
    free(asum);
    return p;
}

static void problem_free(struct problem *p)
{
    kc_tensor_free(&p->w);
    free(p->x);
    free(p->ascending);
    free(p->gemv);
}

static struct problem *shared;
static bool split; /* rows are cut among blocks: near, not the same */

static void check_problem(struct kn *kn)
{
    static const uint32_t counts[] = {1, 2, 3, 4, 5, 8, 16, 17, 64};
    const struct problem *p = shared;
    char what[128];
    struct kn_weight *w = kc_load(kn, &p->w);
    float *got = malloc((size_t)p->rows * p->w.rows * sizeof *got);
    assert_non_null(got);
    for (size_t i = 0; i < KC_LEN(counts) && counts[i] <= p->rows; i++) {
        uint32_t n = counts[i];
        snprintf(what, sizeof what, "%s: %s [%u][%u], %u rows", kd_label(),
                 kn_type_find(p->w.type)->name, p->w.rows, p->w.cols, n);
        kc_linear(kn, w, &p->w, p->x, n, got);
        if (n <= 4)
            kc_same(what, got, p->gemv, (size_t)n * p->w.rows);
        else if (split)
            kc_near(what, got, p->ascending, (size_t)n * p->w.rows,
                    kc_max_abs(p->ascending, (size_t)n * p->w.rows), 2e-6f);
        else
            kc_same(what, got, p->ascending, (size_t)n * p->w.rows);
    }
    kn->ops->weight_free(kn, &w);
    free(got);
}

static void run_problem(enum kn_type type, uint32_t outs, uint32_t cols, uint32_t rows, bool cut)
{
    struct problem p = problem_make(type, outs, cols, rows);
    shared = &p;
    split = cut;
    kd_each(check_problem);
    problem_free(&p);
}

/* Enough rows of weights that no matrix is split on a small device: the rule of kn_int8.h itself. (A large device splits
 * these, too: there the sums are only near.) */
static void sums_of_quantised_weights_have_their_order(void **state)
{
    (void)state;
    for (size_t t = 0; t < kc_n_types; t++) {
        const struct kn_type_info *info = kn_type_find(kc_types[t]);
        if (info->block == 1)
            continue;
        /* 24 blocks of 32, or 5: fewer than a step's four at the end */
        run_problem(kc_types[t], 65, info->block == 256 ? 256 : 160, 17, false);
        run_problem(kc_types[t], 33, 768, 64, true);
    }
    run_problem(KN_Q4_1, 700, 576, 9, false);
    run_problem(KN_Q4_K, 9, 3584, 4, true);
    run_problem(KN_Q6_K, 7, 8448, 4, true);  /* three warps a row */
    run_problem(KN_Q4_0, 3, 33024, 2, true); /* eight, the first of them twice */
}

static void check_split(struct kn *kn)
{
    static const enum kn_type types[] = {KN_Q4_0, KN_Q6_K, KN_Q8_0};
    for (size_t t = 0; t < KC_LEN(types); t++)
        for (uint32_t rows = 5; rows <= 37; rows += 32) {
            struct kn_tensor w = kc_tensor(types[t], 20, 4096, 5);
            float *x = kc_floats(6, (size_t)rows * 4096, 1.0f), got[37 * 20], want[37 * 20];
            struct kn_weight *dev = kc_load(kn, &w);
            kn_ref_linear_q8(&w, x, rows, want);
            kc_linear(kn, dev, &w, x, rows, got);
            kc_near(kd_label(), got, want, (size_t)rows * 20, kc_max_abs(want, rows * 20), 2e-6f);
            kn->ops->weight_free(kn, &dev);
            kc_tensor_free(&w);
            free(x);
        }
}

static void long_rows_are_split_among_blocks(void **state)
{
    (void)state;
    kd_each(check_split);
}

/* More than 64 rows: weights are expanded to halves. Rows of the identity show every one of them; the smallest scratch cuts the
 * large matrix into slices. */
static void check_expanded(struct kn *kn)
{
    for (size_t t = 0; t < kc_n_types; t++) {
        const struct kn_type_info *info = kn_type_find(kc_types[t]);
        uint32_t c = info->block == 256 ? 256 : 160, o = t % 2 ? 67 : 64;
        if (info->block == 1)
            continue;
        if (kc_types[t] == KN_Q8_0 || kc_types[t] == KN_Q6_K)
            o = 2300; /* more than a MiB of halves */
        struct kn_tensor w = kc_tensor(kc_types[t], o, c, 4);
        float *values = kc_tensor_values(&w), *x = calloc((size_t)c * c, sizeof *x);
        float *got = malloc((size_t)c * o * sizeof *got);
        assert_true(x && got);
        for (uint32_t k = 0; k < c; k++)
            x[k * c + k] = 1.0f;
        struct kn_weight *dev = kc_load(kn, &w);
        kc_linear(kn, dev, &w, x, c, got);
        for (uint32_t k = 0; k < c; k++)
            for (uint32_t i = 0; i < o; i++) {
                float want = (float)(_Float16)values[(size_t)i * c + k];
                if (got[(size_t)k * o + i] != want)
                    fail_msg("%s: %s, row %u, column %u: %g, expected %g", kd_label(), info->name,
                             i, k, (double)got[(size_t)k * o + i], (double)want);
            }
        kn->ops->weight_free(kn, &dev);
        kc_tensor_free(&w);
        free(values);
        free(x);
        free(got);
    }
}

static void weights_expand_to_the_nearest_halves(void **state)
{
    (void)state;
    kd_each(check_expanded);
}

/* Values that no half can hold, in products that multiply halves: scaled by a power of two. */
static void check_large(struct kn *kn)
{
    enum { N = 70, C = 256, O = 40 };
    static const enum kn_type types[] = {KN_F16, KN_BF16, KN_Q4_0, KN_Q4_K};
    for (size_t t = 0; t < KC_LEN(types); t++)
        for (int size = 0; size < 3; size++) {
            static const float sizes[] = {1.0f, 3e5f, 1e30f};
            struct kn_tensor w = kc_tensor(types[t], O, C, 2);
            float *values = kc_tensor_values(&w), *x = kc_floats(3, N * C, sizes[size]);
            float got[N * O];
            struct kn_weight *dev = kc_load(kn, &w);
            kc_linear(kn, dev, &w, x, N, got);
            for (uint32_t r = 0; r < N; r++)
                for (uint32_t o = 0; o < O; o++) {
                    double sum = 0, scale = 0;
                    for (uint32_t k = 0; k < C; k++) {
                        double v = (double)values[o * C + k] * (double)x[r * C + k];
                        sum += v;
                        scale += fabs(v);
                    }
                    if (!(fabs((double)got[r * O + o] - sum) <= 4e-3 * scale))
                        fail_msg("%s: %s of size %g: %g, expected %g", kd_label(),
                                 kn_type_find(types[t])->name, (double)sizes[size],
                                 (double)got[r * O + o], sum);
                }
            kn->ops->weight_free(kn, &dev);
            kc_tensor_free(&w);
            free(values);
            free(x);
        }
}

static void values_beyond_halves_do_not_overflow(void **state)
{
    (void)state;
    kd_each(check_large);
}

/* ---- few rows by weights in 16 bits ---- */

static float in_16_bits(enum kn_type type, float x)
{
    if (type == KN_BF16) {
        uint32_t u;
        memcpy(&u, &x, 4);
        u = (u + 0x7fffu + (u >> 16 & 1u)) & 0xffff0000u;
        memcpy(&x, &u, 4);
        return x;
    }
    float ret;
    kc_stored(KN_F16, &x, 1, &ret);
    return ret;
}

struct few {
    enum kn_type type;
    uint32_t rows, cols, outs[2];
    bool add, bias;
};

/* Two matrices of one input: the exact products of what x is in 16 bits, but for sums in f32. */
static void check_few(struct kn *kn, struct few f)
{
    size_t n = (size_t)f.rows * f.cols;
    float *x = kc_floats(f.cols, n, 1.0f), *dev_x = kc_up(kn, x, n * sizeof *x);
    float *out[2], *got[2], *before[2], *bias[2], *dev_bias[2], *values[2];
    struct kn_tensor t[2];
    struct kn_weight *w[2];
    for (int i = 0; i < 2; i++) {
        size_t n_out = (size_t)f.rows * f.outs[i];
        t[i] = kc_tensor(f.type, f.outs[i], f.cols, 5 + (uint64_t)i);
        w[i] = kc_load(kn, &t[i]);
        values[i] = kc_tensor_values(&t[i]);
        before[i] = kc_floats(8 + (uint64_t)i, n_out, 1.0f);
        bias[i] = kc_floats(18 + (uint64_t)i, f.outs[i], 1.0f);
        out[i] = kc_up(kn, before[i], n_out * sizeof(float));
        dev_bias[i] = kc_up(kn, bias[i], f.outs[i] * sizeof(float));
        got[i] = malloc(n_out * sizeof(float));
        assert_non_null(got[i]);
    }
    kn->ops->linear(kn, 2, (const struct kn_weight *const *)w,
                    f.bias ? (const float *const *)dev_bias : NULL, dev_x, f.rows, out, f.add);
    for (int i = 0; i < 2; i++) {
        kc_down(kn, got[i], out[i], (size_t)f.rows * f.outs[i] * sizeof(float));
        for (uint32_t r = 0; r < f.rows; r++)
            for (uint32_t o = 0; o < f.outs[i]; o++) {
                size_t at = (size_t)r * f.outs[i] + o;
                double sum =
                    (f.add ? (double)before[i][at] : 0) + (f.bias ? (double)bias[i][o] : 0);
                double size = fabs(sum);
                for (uint32_t k = 0; k < f.cols; k++) {
                    double v = (double)values[i][(size_t)o * f.cols + k] *
                               (double)in_16_bits(f.type, x[(size_t)r * f.cols + k]);
                    sum += v;
                    size += fabs(v);
                }
                if (!(fabs((double)got[i][at] - sum) <= 1e-5 * size))
                    fail_msg("%s: %s, %u rows of %u: output %u of row %u is %g, expected %g",
                             kd_label(), kn_type_find(f.type)->name, f.rows, f.cols, o, r,
                             (double)got[i][at], sum);
            }
        kn->ops->weight_free(kn, &w[i]);
        kc_tensor_free(&t[i]);
        kc_drop(kn, dev_bias[i], f.outs[i] * sizeof(float));
        free(values[i]);
        free(before[i]);
        free(bias[i]);
        free(got[i]);
    }
    kc_drop(kn, dev_x, n * sizeof *x);
    free(x);
}

static void check_few_rows(struct kn *kn)
{
    for (int t = 0; t < 2; t++) {
        enum kn_type type = t ? KN_BF16 : KN_F16;
        check_few(kn, (struct few){type, 5, 8, {1, 65}, false, false});
        check_few(kn, (struct few){type, 8, 64, {64, 3}, true, false});
        check_few(kn, (struct few){type, 9, 75, {63, 130}, false, true}); /* half a chunk */
        check_few(kn, (struct few){type, 16, 392, {70, 8}, true, true});
        check_few(
            kn, (struct few){type, 17, 264, {66, 1}, false, true}); /* cut in parts from here on */
        check_few(kn, (struct few){type, 32, 968, {5, 67}, true, true});
        check_few(kn, (struct few){type, 7, 2056, {20, 65}, false, true});
        check_few(kn, (struct few){type, 33, 72, {9, 64}, true, true}); /* the library's */
    }
}

static void few_rows_by_weights_in_16_bits(void **state)
{
    (void)state;
    kd_each(check_few_rows);
}

/* ---- inputs that the op before makes in 16 bits ---- */

enum { IN_ROWS = 70, IN_COLS = 264, IN_OUTS = 24 };

/* got [rows][outs] against in . values^T. */
static void check_product(const char *what, const float *got, const double *in, const float *values)
{
    for (uint32_t r = 0; r < IN_ROWS; r++)
        for (uint32_t o = 0; o < IN_OUTS; o++) {
            double sum = 0, scale = 0;
            for (uint32_t k = 0; k < IN_COLS; k++) {
                double v = (double)values[o * IN_COLS + k] * in[r * IN_COLS + k];
                sum += v;
                scale += fabs(v);
            }
            if (!(fabs((double)got[r * IN_OUTS + o] - sum) <= 5e-3 * scale))
                fail_msg("%s, %s: output %u of row %u is %g, expected %g", kd_label(), what, o, r,
                         (double)got[r * IN_OUTS + o], sum);
        }
}

static double silu(double g)
{
    return g / (1 + exp(-g));
}

/* A norm (which: 0) or a gate of numbers of that size, then its product, as ops that follow each other. */
static void input_and_product(struct kn *kn, int which, float size, enum kn_type *types, uint32_t n)
{
    enum { N = IN_ROWS * IN_COLS };
    struct kn_tensor t[2];
    struct kn_weight *w[2];
    float *x = kc_floats(3, N, which ? size : 1.0f), *y = kc_floats(4, which ? N : IN_COLS, size);
    float *dev_x = kc_up(kn, x, N * sizeof *x), *dev_y = kc_up(kn, y, (which ? N : IN_COLS) * 4);
    float *out[2], got[2][IN_ROWS * IN_OUTS];
    double *in = malloc(N * sizeof *in);
    char what[80];
    assert_non_null(in);
    for (uint32_t r = 0; r < IN_ROWS; r++) {
        double sum = 0;
        for (uint32_t k = 0; k < IN_COLS; k++)
            sum += (double)x[r * IN_COLS + k] * (double)x[r * IN_COLS + k];
        for (uint32_t k = 0; k < IN_COLS; k++) {
            double v = (double)x[r * IN_COLS + k];
            in[r * IN_COLS + k] = which ? silu(v) * (double)y[r * IN_COLS + k]
                                        : v / sqrt(sum / IN_COLS + 1e-6) * (double)y[k];
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        t[i] = kc_tensor(types[i], IN_OUTS, IN_COLS, 7 + i);
        w[i] = kc_load(kn, &t[i]);
        out[i] = kc_up(kn, NULL, sizeof got[i]);
    }
    if (n == 2 && (out[0] > out[1]) != (which == 1)) { /* both orders in memory */
        struct kn_tensor tensor = t[0];
        struct kn_weight *weight = w[0];
        float *at = out[0];
        t[0] = t[1], w[0] = w[1], out[0] = out[1];
        t[1] = tensor, w[1] = weight, out[1] = at;
    }
    if (which)
        kn->ops->swiglu(kn, dev_x, dev_x, dev_y, N);
    else
        kn->ops->rmsnorm(kn, dev_x, dev_x, dev_y, IN_ROWS, IN_COLS, 1e-6f);
    kn->ops->linear(kn, n, (const struct kn_weight *const *)w, NULL, dev_x, IN_ROWS, out, false);
    for (uint32_t i = 0; i < n; i++) {
        float *values = kc_tensor_values(&t[i]);
        kc_down(kn, got[i], out[i], sizeof got[i]);
        snprintf(what, sizeof what, "%s of size %g by %s", which ? "gate" : "norm", (double)size,
                 kn_type_find(t[i].type)->name);
        check_product(what, got[i], in, values);
        kn->ops->weight_free(kn, &w[i]);
        kc_tensor_free(&t[i]);
        free(values);
    }
    kc_drop(kn, dev_x, N * sizeof *x);
    kc_drop(kn, dev_y, (which ? N : IN_COLS) * 4);
    free(x);
    free(y);
    free(in);
}

/* Small numbers after large ones: no scale is left over. */
static void check_inputs(struct kn *kn)
{
    enum kn_type f16[] = {KN_F16, KN_F16}, bf16[] = {KN_BF16}, mixed[] = {KN_F16, KN_F32};
    static const float norms[] = {1.0f, 3e6f, 0.02f}, gates[] = {1.0f, 3e12f, 300.0f, 0.1f};
    for (size_t i = 0; i < KC_LEN(norms); i++) {
        input_and_product(kn, 0, norms[i], f16, 2);
        input_and_product(kn, 0, norms[i], bf16, 1);
        input_and_product(kn, 0, norms[i], mixed, 2);
    }
    for (size_t i = 0; i < KC_LEN(gates); i++) {
        input_and_product(kn, 1, gates[i], f16, 2);
        input_and_product(kn, 1, gates[i], bf16, 1);
        input_and_product(kn, 1, gates[i], mixed, 2);
    }
}

/* A norm or a gate that writes int8 for a product with quantised weights at once, and one that does not (somebody waits in
 * between): the same bits. */
static void int8_and_product(struct kn *kn, int which, enum kn_type type, uint32_t rows,
                             uint32_t cols)
{
    size_t n = (size_t)rows * cols;
    struct kn_tensor t = kc_tensor(type, IN_OUTS, cols, 7);
    struct kn_weight *w = kc_load(kn, &t);
    float *x = kc_floats(8, n, 2.0f), *y = kc_floats(9, n, 1.0f);
    float *dev_x = kc_up(kn, x, n * sizeof *x), *dev_y = kc_up(kn, y, n * sizeof *y);
    float *dev_in = kc_up(kn, NULL, n * sizeof *x), *got[2];
    char what[100];
    for (int i = 0; i < 2; i++) {
        float *out = kc_up(kn, NULL, (size_t)rows * IN_OUTS * sizeof(float));
        got[i] = malloc((size_t)rows * IN_OUTS * sizeof(float));
        assert_non_null(got[i]);
        if (which)
            kn->ops->swiglu(kn, dev_in, dev_x, dev_y, n);
        else
            kn->ops->rmsnorm(kn, dev_in, dev_x, dev_y, rows, cols, 1e-6f);
        if (i == 1)
            kn->ops->sync(kn);
        kn->ops->linear(kn, 1, (const struct kn_weight *const *)&w, NULL, dev_in, rows, &out,
                        false);
        kc_down(kn, got[i], out, (size_t)rows * IN_OUTS * sizeof(float));
    }
    snprintf(what, sizeof what, "%s: %s, %u rows of %u to %s", kd_label(), which ? "gate" : "norm",
             rows, cols, kn_type_find(type)->name);
    kc_same(what, got[0], got[1], (size_t)rows * IN_OUTS);
    assert_true(kc_max_abs(got[0], rows * IN_OUTS) > 0.0f);
    kn->ops->weight_free(kn, &w);
    kc_tensor_free(&t);
    kc_drop(kn, dev_x, n * sizeof *x);
    kc_drop(kn, dev_y, n * sizeof *y);
    kc_drop(kn, dev_in, n * sizeof *x);
    free(x);
    free(y);
    free(got[0]);
    free(got[1]);
}

static void check_int8(struct kn *kn)
{
    for (int which = 0; which < 2; which++) {
        int8_and_product(kn, which, KN_Q4_0, 1, 96); /* three blocks of four */
        int8_and_product(kn, which, KN_Q6_K, 3, 768);
        int8_and_product(kn, which, KN_Q4_1, 9, 160);
        int8_and_product(kn, which, KN_Q8_0, 2, 8512); /* more than a block's registers hold */
    }
}

static void norms_and_gates_write_int8(void **state)
{
    (void)state;
    kd_each(check_int8);
}

static void norms_and_gates_write_what_products_read(void **state)
{
    (void)state;
    kd_each(check_inputs);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_of_quantised_weights_have_their_order),
        cmocka_unit_test(long_rows_are_split_among_blocks),
        cmocka_unit_test(weights_expand_to_the_nearest_halves),
        cmocka_unit_test(values_beyond_halves_do_not_overflow),
        cmocka_unit_test(few_rows_by_weights_in_16_bits),
        cmocka_unit_test(norms_and_gates_write_what_products_read),
        cmocka_unit_test(norms_and_gates_write_int8),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
