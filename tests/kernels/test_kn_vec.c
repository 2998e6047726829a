/* The ops that work row by row, against their formulas in double precision.
 *
 *   rmsnorm   2e-6 of the largest value of the row        swiglu   2e-6 of the value itself
 *   rope      2e-6 of the pair's length, and the angle is the f32 product position * inv_freq
 *   gather    exact */
#include "kernels_compare.h"

static void rmsnorm_case(uint32_t rows, uint32_t d, float deviation, bool in_place)
{
    const float eps = 1e-5f;
    size_t n = (size_t)rows * d, bytes = n * sizeof(float);
    float *x = kc_floats(rows * 31 + d, n, deviation), *gain = kc_floats(d, d, 1.0f);
    float *got = malloc(bytes), *one = malloc(d * sizeof *one), *want = malloc(bytes);
    assert_true(got && one && want);
    for (uint32_t r = 0; r < rows; r++) {
        double sum = 0;
        for (uint32_t i = 0; i < d; i++)
            sum += (double)x[(size_t)r * d + i] * (double)x[(size_t)r * d + i];
        double scale = 1.0 / sqrt(sum / d + (double)eps);
        for (uint32_t i = 0; i < d; i++)
            want[(size_t)r * d + i] =
                (float)((double)x[(size_t)r * d + i] * scale * (double)gain[i]);
    }
    for (unsigned i = 0; i < kc_all.n; i++) {
        struct kn *kn = kc_all.kn[i];
        float *dx = kc_up(kn, x, bytes), *dg = kc_up(kn, gain, d * sizeof *gain);
        float *out = in_place ? dx : kc_up(kn, NULL, bytes);
        kn->ops->rmsnorm(kn, out, dx, dg, rows, d, eps);
        kn->ops->download(kn, got, out, bytes);
        for (uint32_t r = 0; r < rows; r++) {
            size_t at = (size_t)r * d;
            kc_near(kc_name(kn), got + at, want + at, d, kc_max_abs(want + at, d), 2e-6f);
        }
        kn->ops->upload(kn, dx, x, bytes);
        kn->ops->rmsnorm(kn, out, dx + (size_t)(rows - 1) * d, dg, 1, d, eps);
        kn->ops->download(kn, one, out, d * sizeof *one);
        kc_same(kc_name(kn), one, got + (size_t)(rows - 1) * d, d);
        if (!in_place)
            kc_drop(kn, out, bytes);
        kc_drop(kn, dx, bytes);
        kc_drop(kn, dg, d * sizeof *gain);
    }
    free(x);
    free(gain);
    free(got);
    free(one);
    free(want);
}

static void rmsnorm_is_its_formula(void **state)
{
    (void)state;
    static const uint32_t widths[] = {1, 2, 15, 63, 64, 65, 576, 4099};
    static const uint32_t rows[] = {1, 2, 9, 64};
    for (size_t w = 0; w < KC_LEN(widths); w++)
        for (size_t r = 0; r < KC_LEN(rows); r++) {
            rmsnorm_case(rows[r], widths[w], 1.0f, r % 2);
            rmsnorm_case(rows[r], widths[w], w % 2 ? 1e4f : 1e-4f, w % 2);
        }
}

static void rmsnorm_of_zeros_is_zeros(void **state)
{
    (void)state;
    float zeros[64] = {0}, gain[64], got[64];
    for (int i = 0; i < 64; i++)
        gain[i] = 2.0f;
    for (unsigned i = 0; i < kc_all.n; i++) {
        struct kn *kn = kc_all.kn[i];
        float *x = kc_up(kn, NULL, sizeof got), *g = kc_up(kn, gain, sizeof gain);
        kn->ops->rmsnorm(kn, x, x, g, 1, 64, 1e-6f);
        kc_down(kn, got, x, sizeof got);
        kc_same(kc_name(kn), got, zeros, 64);
        kc_drop(kn, g, sizeof gain);
    }
}

static void swiglu_is_its_formula(void **state)
{
    (void)state;
    static const size_t sizes[] = {1, 2, 15, 63, 64, 65, 1536, 4099};
    for (size_t s = 0; s < KC_LEN(sizes); s++) {
        size_t n = sizes[s], bytes = n * sizeof(float);
        float *gate = kc_floats(s, n, 4.0f), *up = kc_floats(s + 20, n, 2.0f), *got = malloc(bytes);
        assert_non_null(got);
        static const float special[] = {0.0f,   -0.0f,  100.0f, -100.0f,
                                        -88.5f, 1e-20f, -3e38f, 3e38f};
        for (size_t k = 0; k < KC_LEN(special) && k + 50 < n; k++) {
            gate[k + 50] = special[k];
            up[k + 50] = 0.5f;
        }
        for (unsigned i = 0; i < kc_all.n; i++)
            for (int in_place = 0; in_place < 2; in_place++) {
                struct kn *kn = kc_all.kn[i];
                float *dg = kc_up(kn, gate, bytes), *du = kc_up(kn, up, bytes);
                float *out = in_place ? dg : kc_up(kn, NULL, bytes);
                kn->ops->swiglu(kn, out, dg, du, n);
                kn->ops->download(kn, got, out, bytes);
                for (size_t k = 0; k < n; k++) {
                    double g = (double)gate[k], want = g / (1.0 + exp(-g)) * (double)up[k];
                    if (!(fabs((double)got[k] - want) <= 2e-6 * fabs(want) + 1e-37))
                        fail_msg("%s: silu(%a) * %a is %a, expected %a", kc_name(kn), g,
                                 (double)up[k], (double)got[k], want);
                }
                if (!in_place)
                    kc_drop(kn, out, bytes);
                kc_drop(kn, dg, bytes);
                kc_drop(kn, du, bytes);
            }
        free(gate);
        free(up);
        free(got);
    }
}

static void gather_copies(void **state)
{
    (void)state;
    static const uint32_t widths[] = {1, 64, 577};
    uint32_t rows[] = {6, 0, 3, 3, 5};
    for (size_t w = 0; w < KC_LEN(widths); w++) {
        uint32_t d = widths[w];
        float *x = kc_floats(w, (size_t)7 * d, 1.0f);
        float *got = malloc(KC_LEN(rows) * d * sizeof *got);
        assert_non_null(got);
        for (unsigned i = 0; i < kc_all.n; i++) {
            struct kn *kn = kc_all.kn[i];
            float *dx = kc_up(kn, x, (size_t)7 * d * sizeof *x);
            float *out = kc_up(kn, NULL, KC_LEN(rows) * d * sizeof *got);
            kn->ops->gather_rows(kn, out, dx, rows, KC_LEN(rows), d);
            kc_down(kn, got, out, KC_LEN(rows) * d * sizeof *got);
            kc_drop(kn, dx, (size_t)7 * d * sizeof *x);
            for (size_t r = 0; r < KC_LEN(rows); r++)
                kc_same(kc_name(kn), got + r * d, x + (size_t)rows[r] * d, d);
        }
        free(x);
        free(got);
    }
}

/* ---- rope ---- */

enum { ROPE_ROWS = 11 };
static const int32_t rope_positions[ROPE_ROWS] = {0,    1,     2,     63,     64,     65,
                                                  4097, 32767, 99999, 500000, 1048575};

/* What one row must become, in doubles; the angle alone is a product of floats. */
static void rope_row(const struct kn_rope *r, const float *inv_freq, const float *norm, int32_t pos,
                     const float *x, double *want)
{
    for (uint32_t h = 0; h < r->n_heads; h++, x += r->head_dim, want += r->head_dim) {
        double sum = 0, scale = 1.0;
        for (uint32_t i = 0; i < r->head_dim; i++)
            sum += (double)x[i] * (double)x[i];
        if (norm)
            scale = 1.0 / sqrt(sum / r->head_dim + (double)r->norm_eps);
        for (uint32_t i = 0; i < r->head_dim; i++)
            want[i] = (double)x[i] * scale * (norm ? (double)norm[i] : 1.0);
        for (uint32_t i = 0; i < r->n_rot / 2; i++) {
            uint32_t a = r->style == KN_ROPE_PAIRS ? 2 * i : i;
            uint32_t b = r->style == KN_ROPE_PAIRS ? 2 * i + 1 : i + r->n_rot / 2;
            float angle = (float)pos * inv_freq[i];
            double s = sin((double)angle), c = cos((double)angle), x0 = want[a], x1 = want[b];
            want[a] = x0 * c - x1 * s;
            want[b] = x0 * s + x1 * c;
        }
    }
}

static void rope_case(uint32_t head_dim, uint32_t n_rot, uint32_t n_heads, enum kn_rope_style style,
                      bool with_norm)
{
    uint32_t width = n_heads * head_dim, zeros[ROPE_ROWS] = {0};
    size_t n = (size_t)ROPE_ROWS * width, bytes = n * sizeof(float);
    float *x = kc_floats(head_dim + n_rot, n, 1.0f), *norm = kc_floats(3, head_dim, 1.0f);
    float *got = malloc(bytes), inv_freq[KN_HEAD_DIM_MAX / 2];
    double *want = malloc(n * sizeof *want);
    assert_true(got && want);
    for (uint32_t i = 0; i < n_rot / 2; i++)
        inv_freq[i] = (float)pow(10000.0, -2.0 * i / n_rot);
    struct kn_rope r = {style, n_heads, head_dim, n_rot, NULL, NULL, 1e-6f};
    for (uint32_t row = 0; row < ROPE_ROWS; row++)
        rope_row(&r, inv_freq, with_norm ? norm : NULL, rope_positions[row], x + row * width,
                 want + row * width);
    struct kn_kv kv = {NULL, 4096, 1, 1, head_dim, 0, KN_F32};
    struct kn_seq seq = {&kv, zeros, 0};
    for (unsigned i = 0; i < kc_all.n; i++)
        for (uint32_t first = 0; first < 2; first++) { /* whole, and without its first row */
            struct kn *kn = kc_all.kn[i];
            struct kn_batch b = {.n_rows = ROPE_ROWS - first,
                                 .n_seqs = 1,
                                 .ids = (int32_t *)zeros,
                                 .positions = rope_positions + first,
                                 .seq = zeros,
                                 .lo = zeros,
                                 .hi = zeros,
                                 .slots = NULL,
                                 .seqs = &seq};
            float *dx = kc_up(kn, x, bytes);
            float *dn = kc_up(kn, norm, head_dim * sizeof *norm);
            float *df = kc_up(kn, inv_freq, sizeof inv_freq);
            r.inv_freq = df;
            r.norm = with_norm ? dn : NULL;
            kn->ops->batch_begin(kn, &b);
            kn->ops->rope(kn, &b, &r, dx + first * width);
            kn->ops->batch_end(kn, &b);
            kc_down(kn, got, dx, bytes);
            for (size_t k = first * width; k < n; k++) {
                double size = fmax(4.0, fabs(want[k]));
                if (!(fabs((double)got[k] - want[k]) <= 2e-6 * size))
                    fail_msg("%s: head %u rot %u: row at %d, dim %zu: %.9g, expected %.9g",
                             kc_name(kn), head_dim, n_rot, rope_positions[k / width], k % head_dim,
                             (double)got[k], want[k]);
            }
            kc_drop(kn, dn, head_dim * sizeof *norm);
            kc_drop(kn, df, sizeof inv_freq);
        }
    free(x);
    free(norm);
    free(got);
    free(want);
}

static void rope_is_its_formula(void **state)
{
    (void)state;
    static const uint32_t dims[] = {16, 32, 64, 80, 96, 128, 256};
    for (size_t d = 0; d < KC_LEN(dims); d++)
        for (int how = 0; how < 4; how++) {
            enum kn_rope_style style = how & 1 ? KN_ROPE_PAIRS : KN_ROPE_HALVES;
            rope_case(dims[d], dims[d], 1 + (uint32_t)d % 4, style, how & 2);
            rope_case(dims[d], dims[d] / 2 - 2, 3, style, how & 2);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rmsnorm_is_its_formula), cmocka_unit_test(rmsnorm_of_zeros_is_zeros),
        cmocka_unit_test(swiglu_is_its_formula),  cmocka_unit_test(gather_copies),
        cmocka_unit_test(rope_is_its_formula),
    };
    return cmocka_run_group_tests(tests, kc_all_open, kc_all_close);
}
