/* kv_rotate: stored keys turned from the positions that they were rotated to, to their cache indices, against keys that are
 * rotated there afresh by the formula of `rope` in double precision.
 *
 *   f32         3e-6 of the pair's length (two rotations instead of one, at positions up to 2^20)
 *   f16, bf16   half a unit in the last place of the value more than what was lost when the key was first stored: 2 roundings
 *   q8_0, q8_q4 2 roundings to 1/254 of the block's largest magnitude (a turn may make a value 1.42 times as large)
 *
 * What does not move keeps its bits: keys that are at their position already, dims beyond n_rot (f32), values, hidden rows, and
 * every row that is not of the sequence. */
#include "kernels_compare.h"
#include "kn_kv_addr.h"

enum { LAYERS = 2, HEADS = 2, N = 70, PAGES = 3, D_HIDDEN = 40 };

static const enum kn_type kv_types[] = {KN_F32, KN_F16, KN_BF16, KN_Q8_0, KN_Q8_Q4};

/* The error of one stored value, of one of that size in a block whose largest is `top`. */
static float rounding(enum kn_type type, float top)
{
    return type == KN_F32    ? 0.0f
           : type == KN_F16  ? top * 0x1p-11f
           : type == KN_BF16 ? top * 0x1p-8f
                             : top * (0.51f / 127.0f);
}

struct turn_case {
    enum kn_type type;
    enum kn_rope_style style;
    uint32_t head_dim, n_rot;
    const int32_t *from; /* [N] */
};

/* x [head_dim] rotated to position pos. */
static void rotated(const struct turn_case *c, const float *inv_freq, int32_t pos, const float *x,
                    float *ret)
{
    memcpy(ret, x, c->head_dim * sizeof *ret);
    for (uint32_t i = 0; i < c->n_rot / 2; i++) {
        uint32_t a = c->style == KN_ROPE_PAIRS ? 2 * i : i;
        uint32_t b = c->style == KN_ROPE_PAIRS ? 2 * i + 1 : i + c->n_rot / 2;
        float angle = (float)pos * inv_freq[i];
        double s = sin((double)angle), k = cos((double)angle);
        ret[a] = (float)((double)x[a] * k - (double)x[b] * s);
        ret[b] = (float)((double)x[a] * s + (double)x[b] * k);
    }
}

/* All bytes of the pool. */
static uint8_t *image(struct kc_pool *p)
{
    size_t bytes = PAGES * p->kv.stride;
    uint8_t *ret = malloc(bytes);
    assert_non_null(ret);
    p->kn->ops->download(p->kn, ret, p->kv.base, bytes);
    return ret;
}

/* Takes the keys of rows that moved out of both images, then nothing may differ. */
static void rest_is_untouched(struct kc_pool *p, const struct kn_seq *seq, const int32_t *from,
                              uint8_t *before, uint8_t *after)
{
    uint8_t *both[2] = {before, after};
    for (int k = 0; k < 2; k++) {
        struct kn_kv kv = p->kv;
        kv.base = both[k];
        for (uint32_t i = 0; i < N; i++)
            for (uint32_t lh = 0; lh < LAYERS * HEADS && from[i] != (int32_t)i; lh++)
                memset(kn_kv_row(&kv, seq->slots[i], lh / HEADS, KN_KV_K, lh % HEADS), 0,
                       kn_kv_line_bytes(&kv, KN_KV_K));
    }
    assert_memory_equal(before, after, PAGES * p->kv.stride);
    free(before);
    free(after);
}

static void check_on(struct kn *kn, const struct turn_case *c, const uint32_t *slots)
{
    uint32_t d = c->head_dim, width = HEADS * d;
    float inv_freq[KN_HEAD_DIM_MAX / 2], want[KN_HEAD_DIM_MAX];
    float *x = kc_floats(d + c->n_rot, (size_t)LAYERS * N * width, 1.0f);
    float *k = malloc((size_t)LAYERS * N * width * sizeof *k);
    float *hidden = kc_floats(9, N * D_HIDDEN, 1.0f), *got = malloc(N * width * sizeof *got);
    struct kc_pool pool;
    assert_true(k != NULL && got != NULL);
    kc_pool_open(&pool, kn,
                 (struct kn_kv){.n_layers = LAYERS,
                                .n_kv_heads = HEADS,
                                .head_dim = d,
                                .d_hidden = D_HIDDEN,
                                .type = c->type},
                 PAGES);
    struct kn_seq seq = {&pool.kv, slots, N};
    for (uint32_t i = 0; i < c->n_rot / 2; i++)
        inv_freq[i] = (float)(pow(10000.0, -2.0 * i / c->n_rot) / (i % 3 == 2 ? 8.0 : 1.0));
    for (size_t row = 0; row < (size_t)LAYERS * N * HEADS; row++)
        rotated(c, inv_freq, c->from[row / HEADS % N], x + row * d, k + row * d);
    for (uint32_t l = 0; l < LAYERS; l++)
        kc_pool_write(&pool, &seq, l,
                      (struct kc_rows){0, N, k + (size_t)l * N * width, x + (size_t)l * N * width,
                                       hidden});
    uint8_t *before = image(&pool);
    float *device = kc_up(kn, inv_freq, sizeof inv_freq);
    const struct kn_rope r = {c->style, HEADS, d, c->n_rot, device, NULL, 0};
    kn->ops->kv_rotate(kn, &seq, &r, c->from);
    uint8_t *after = image(&pool);
    for (uint32_t l = 0; l < LAYERS; l++) {
        kn->ops->keys_read(kn, &seq, l, 0, N, got);
        for (uint32_t row = 0; row < N * HEADS; row++) {
            const float *fresh = x + ((size_t)l * N * HEADS + row) * d;
            float top = 1.42f * kc_max_abs(fresh, d);
            rotated(c, inv_freq, (int32_t)(row / HEADS), fresh, want);
            kc_near(kc_name(kn), got + (size_t)row * d, want, d, 1.0f,
                    3e-6f * top + 2.5f * rounding(c->type, top));
        }
    }
    rest_is_untouched(&pool, &seq, c->from, before, after);
    kc_drop(kn, device, sizeof inv_freq);
    kc_pool_close(&pool);
    free(x);
    free(k);
    free(hidden);
    free(got);
}

static void check(const struct turn_case *c)
{
    uint32_t *slots = kc_slots(KC_SCATTERED, N, PAGES, c->head_dim + c->n_rot);
    for (unsigned i = 0; i < kc_all.n; i++)
        if (kc_has_kv(kc_all.kn[i], c->type, c->head_dim))
            check_on(kc_all.kn[i], c, slots);
    free(slots);
}

static void keys_are_as_if_rotated_afresh(void **state)
{
    (void)state;
    static const uint32_t dims[][2] = {{16, 16}, {32, 32}, {64, 64},
                                       {64, 32}, {96, 30}, {256, 256}};
    int32_t from[N];
    for (int i = 0; i < N; i++) /* a few in their place, then gaps, then close to 2^20 */
        from[i] = i < 5 ? i : i < 60 ? 7 * i + 300 : (1 << 20) - N + i;
    for (size_t t = 0; t < KC_LEN(kv_types); t++)
        for (size_t k = 0; k < KC_LEN(dims); k++)
            for (int style = 0; style < 2; style++)
                check(&(struct turn_case){kv_types[t], style ? KN_ROPE_HALVES : KN_ROPE_PAIRS,
                                          dims[k][0], dims[k][1], from});
}

/* Also to a later position, which no cache does. */
static void keys_turn_both_ways(void **state)
{
    (void)state;
    int32_t from[N];
    for (int i = 0; i < N; i++)
        from[i] = N - 1 - i;
    for (size_t t = 0; t < KC_LEN(kv_types); t++)
        check(&(struct turn_case){kv_types[t], KN_ROPE_PAIRS, 32, 32, from});
}

/* A row's bits are its own, whatever rows are beside it and however many threads there are. */
static void a_row_stands_alone(void **state)
{
    (void)state;
    enum { D = 32, W = HEADS * D };
    int32_t from[N];
    float *x = kc_floats(3, N * W, 1.0f), *got = malloc(N * W * sizeof *got), one[W];
    float inv_freq[D / 2];
    uint32_t *slots = kc_slots(KC_PRUNED, N, PAGES, 4);
    assert_non_null(got);
    for (int i = 0; i < D / 2; i++)
        inv_freq[i] = (float)pow(10000.0, -2.0 * i / D);
    for (int i = 0; i < N; i++)
        from[i] = 3 * i + 40;
    for (size_t t = 0; t < KC_LEN(kv_types); t++)
        for (unsigned i = 0; i < kc_all.n; i++) {
            struct kn *kn = kc_all.kn[i];
            struct kc_pool pool;
            if (!kc_has_kv(kn, kv_types[t], D))
                continue;
            float *device = kc_up(kn, inv_freq, sizeof inv_freq);
            const struct kn_rope r = {KN_ROPE_HALVES, HEADS, D, D, device, NULL, 0};
            for (uint32_t n = N; n > 0; n = n == N ? 1 : 0) {
                kc_pool_open(&pool, kn,
                             (struct kn_kv){.n_layers = 1,
                                            .n_kv_heads = HEADS,
                                            .head_dim = D,
                                            .type = kv_types[t]},
                             PAGES);
                struct kn_seq seq = {&pool.kv, slots, n};
                kc_pool_write(&pool, &seq, 0, (struct kc_rows){0, n, x, x, NULL});
                kn->ops->kv_rotate(kn, &seq, &r, from);
                kn->ops->keys_read(kn, &seq, 0, 0, n, n == N ? got : one);
                kc_pool_close(&pool);
            }
            kc_same(kc_name(kn), one, got, W);
            kc_drop(kn, device, sizeof inv_freq);
        }
    free(x);
    free(got);
    free(slots);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keys_are_as_if_rotated_afresh),
        cmocka_unit_test(keys_turn_both_ways),
        cmocka_unit_test(a_row_stands_alone),
    };
    return cmocka_run_group_tests(tests, kc_all_open, kc_all_close);
}
