/* Keys and values as bf16 and q8_0 on the GPU backend, in every way that it can run: pages with the bytes that `ref` writes, and
 * attention over them against doubles, 2e-3 of the largest value. More shapes: test_cuda_kv_long.c. */
#include "cuda_attention.h"
#include "kn_kv_addr.h"

static const enum kn_type types[] = {KN_BF16, KN_Q8_0};

/* ---- pages ---- */

enum { LAYERS = 2, N_KV = 3, PAGES = 3, N = 67, D_HIDDEN = 24 };

static struct page_case {
    enum kn_type type;
    uint32_t d;
    enum kn_rope_style style;
} page_case;

static struct page_data {
    float *k, *v, *hidden, *q; /* [N][N_KV][d], [N][D_HIDDEN] */
    float inv_freq[KN_HEAD_DIM_MAX / 2];
    uint32_t *slots;
    int32_t positions[N];
} data;

/* Values of many sizes: rows of zeros, tiny ones, ones beyond the largest half. */
static void data_make(uint32_t d)
{
    static const float sizes[] = {1.0f, 0.0f, 1e-7f, 3e5f, 40.0f, 1e-3f};
    data.k = kc_floats(1, (size_t)N * N_KV * d, 1.0f);
    data.v = kc_floats(2, (size_t)N * N_KV * d, 1.0f);
    data.hidden = kc_floats(3, (size_t)N * D_HIDDEN, 1.0f);
    data.q = kc_floats(4, (size_t)N * N_KV * d, 1.0f);
    for (size_t i = 0; i < (size_t)N * N_KV * d; i++) {
        float k = sizes[i / d % KC_LEN(sizes)], v = sizes[i / 32 % KC_LEN(sizes)];
        data.k[i] =
            k > 0.0f ? data.k[i] * k : 0.0f; /* no zeros with a sign, which a rotation takes */
        data.v[i] = v > 0.0f ? data.v[i] * v : 0.0f;
    }
    for (uint32_t i = 0; i < d / 2; i++)
        data.inv_freq[i] = (float)pow(10000.0, -2.0 * i / d);
    for (int i = 0; i < N; i++)
        data.positions[i] = 5 * i;
    data.slots = kc_slots(KC_SCATTERED, N, PAGES, d);
}

static void data_free(void)
{
    free(data.k);
    free(data.v);
    free(data.hidden);
    free(data.q);
    free(data.slots);
}

/* A pool whose layer 0 was written apart, layer 1 with the rotation of the keys (by 0, so that the bytes are the same), rows
 * moved; all its bytes. */
static uint8_t *pages_fill(struct kn *kn)
{
    const struct page_case t = page_case;
    size_t n = (size_t)N * N_KV * t.d, bytes;
    struct kc_pool pool;
    uint32_t zeros[N] = {0};
    kc_pool_open(&pool, kn,
                 (struct kn_kv){.n_layers = LAYERS,
                                .n_kv_heads = N_KV,
                                .head_dim = t.d,
                                .d_hidden = D_HIDDEN,
                                .type = t.type},
                 PAGES);
    struct kn_seq seq = {&pool.kv, data.slots, N};
    kc_pool_write(&pool, &seq, 0, (struct kc_rows){0, N, data.k, data.v, data.hidden});
    float *dk = kc_up(kn, data.k, n * sizeof(float)), *dv = kc_up(kn, data.v, n * sizeof(float));
    float *still = kc_up(kn, NULL, t.d / 2 * sizeof(float)); /* zeros: angles of 0 */
    struct kn_rope r = {t.style, N_KV, t.d, t.d, still, NULL, 0.0f};
    struct kn_batch b = {N,          1,   (int32_t *)zeros, data.positions, zeros, zeros, zeros,
                         data.slots, &seq};
    kn->ops->batch_begin(kn, &b);
    kn->ops->rope(kn, &b, &r, dk);
    kn->ops->kv_write(kn, &b, 1, dk, dv);
    kn->ops->batch_end(kn, &b);
    for (uint32_t i = 0; i + 1 < N; i += 9)
        kn->ops->row_copy(kn, &pool.kv, data.slots[i], data.slots[i + 1]);
    bytes = PAGES * pool.kv.stride;
    uint8_t *ret = malloc(bytes);
    assert_non_null(ret);
    kn->ops->download(kn, ret, pool.kv.base, bytes);
    kc_drop(kn, dk, n * sizeof(float));
    kc_drop(kn, dv, n * sizeof(float));
    kc_drop(kn, still, t.d / 2 * sizeof(float));
    kc_pool_close(&pool);
    return ret;
}

static uint8_t *ref_pages; /* of this case */

static void check_pages(struct kn *kn)
{
    uint8_t *got = pages_fill(kn);
    struct kn_kv kv = {.n_layers = LAYERS,
                       .n_kv_heads = N_KV,
                       .head_dim = page_case.d,
                       .d_hidden = D_HIDDEN,
                       .type = page_case.type};
    size_t stride = (kn_kv_page_bytes(&kv) + 4095) / 4096 * 4096;
    for (size_t i = 0; i < PAGES * stride; i++)
        if (got[i] != ref_pages[i])
            fail_msg("%s: %s, d %u: byte %zu of page %zu is %u, not %u", kd_label(),
                     kn_kv_type_find(kv.type)->name, kv.head_dim, i % stride, i / stride, got[i],
                     ref_pages[i]);
    free(got);
}

static void pages_have_the_bytes_of_ref(void **state)
{
    (void)state;
    static const struct page_case cases[] = {
        {KN_Q8_0, 32, KN_ROPE_HALVES}, {KN_Q8_0, 96, KN_ROPE_HALVES}, {KN_Q8_0, 256, KN_ROPE_PAIRS},
        {KN_BF16, 64, KN_ROPE_HALVES}, {KN_BF16, 20, KN_ROPE_PAIRS},  {KN_BF16, 6, KN_ROPE_HALVES}};
    struct kn_options opt = {.backend = "ref"};
    for (size_t i = 0; i < KC_LEN(cases); i++) {
        struct kn *ref = NULL;
        page_case = cases[i];
        data_make(page_case.d);
        assert_int_equal(kn_open(&ref, &opt, NULL, 0), KN_OK);
        ref_pages = pages_fill(ref);
        kn_close(&ref);
        kd_each(check_pages);
        free(ref_pages);
        data_free();
    }
}

/* ---- attention ---- */

/* Every value of each factor, the others drawn; decode rows of a long context, which is cut among blocks. */
static void attention_at_each_factor(void **state)
{
    (void)state;
    static const uint32_t lengths[] = {1, 2, 63, 64, 65};
    static const uint32_t dims[] = {16, 32, 64, 80, 96, 128, 256};
    struct kc_rng r = {5};
    for (uint32_t i = 0; i < 9; i++) {
        uint32_t d = dims[i % KC_LEN(dims)];
        enum kn_type type = d % 32 == 0 && i % 3 != 0 ? KN_Q8_0 : KN_BF16;
        struct kca_shape s = {d,         1 + i % 2,
                              1 + i % 8, lengths[kc_below(&r, KC_LEN(lengths))],
                              type,      (enum kc_slots)(i % 3),
                              1.0f};
        run(s, (enum kca_view)(i % 4), 0, 0);
    }
    run((struct kca_shape){72, 1, 20, 66, KN_BF16, KC_PRUNED, 1.0f}, KCA_WINDOWS, 40, 20);
    run((struct kca_shape){160, 1, 2, 66, KN_Q8_0, KC_PRUNED, 1.0f}, KCA_SCORE_GAP, 40, 20);
    run((struct kca_shape){12, 2, 3, 66, KN_BF16, KC_PRUNED, 1.0f}, KCA_SCORE_GAP, 40, 20);
    for (size_t t = 0; t < KC_LEN(types); t++) {
        run((struct kca_shape){64, 1, 4, 700, types[t], KC_PRUNED, 1.0f}, KCA_PREFILL, 699, 1);
        run((struct kca_shape){32, 1, 8, 700, types[t], KC_PRUNED, 1.0f}, KCA_WINDOWS, 300, 3);
    }
}

/* ---- magnitudes ---- */

/* Keys, values and queries beyond what halves hold, or below: the weights are those of ordinary ones, and so is the error. */
static void values_may_be_beyond_halves(void **state)
{
    (void)state;
    static const float sizes[] = {1e7f, 1e-9f};
    for (size_t i = 0; i < KC_LEN(sizes); i++)
        for (size_t t = 0; t < 3; t++) { /* q8_0's scales are halves: nothing as small as that */
            enum kn_type type = t < 2 ? KN_BF16 : KN_Q8_0;
            if (type == KN_Q8_0 && sizes[i] < 1.0f)
                continue;
            float size = type == KN_Q8_0 ? 1e6f : sizes[i];
            world = kca_make((struct kca_shape){64, 1, 2, 70, type, KC_SCATTERED, 1.0f});
            for (size_t k = 0; k < (size_t)world.s.n * world.s.d; k++) {
                world.k[k] *= size;
                world.v[k] *= size * (k / world.s.d % 5 == 3 ? 1e-3f : 1.0f);
            }
            for (size_t k = 0; k < (size_t)world.n_rows * world.n_heads * world.s.d; k++)
                world.q[k] *= size;
            kc_stored(type, world.k, (size_t)world.s.n * world.s.d, world.k_stored);
            kc_stored(type, world.v, (size_t)world.s.n * world.s.d, world.v_stored);
            world.scale = 1.0f / sqrtf((float)world.s.d) / (size * size);
            kca_look(&world, KCA_PREFILL);
            truth();
            first_row = t == 1 ? 60 : 0; /* few queries, many */
            n_of_rows = t == 1 ? 4 : 0;
            kd_each(check_world);
            free(want);
            kca_free(&world);
        }
}

/* ---- a batch of all types ---- */

/* One row of each of four sequences, whose pools differ, and a piece of a prompt in each: together as alone. */
static void check_mixed(struct kn *kn)
{
    enum { SEQS = 4, D = 32, H = 4, HEADS_KV = 2, LEN = 90, ROWS = 2 * SEQS + 12 };
    static const enum kn_type kinds[SEQS] = {KN_Q8_0, KN_F16, KN_BF16, KN_F32};
    uint32_t seq[ROWS], lo[ROWS] = {0}, hi[ROWS], *slots[SEQS];
    int32_t zeros[ROWS] = {0};
    struct kc_pool pool[SEQS];
    struct kn_seq seqs[SEQS];
    float *q = kc_floats(3, (size_t)ROWS * H * D, 1.0f), all[ROWS * H * D], one[H * D];
    float *k = kc_floats(1, (size_t)LEN * HEADS_KV * D, 1.0f);
    float *v = kc_floats(2, (size_t)LEN * HEADS_KV * D, 1.0f);
    for (uint32_t s = 0; s < SEQS; s++) {
        kc_pool_open(
            &pool[s], kn,
            (struct kn_kv){.n_layers = 1, .n_kv_heads = HEADS_KV, .head_dim = D, .type = kinds[s]},
            2);
        slots[s] = kc_slots(KC_SCATTERED, LEN, 2, s);
        seqs[s] = (struct kn_seq){&pool[s].kv, slots[s], LEN};
        kc_pool_write(&pool[s], &seqs[s], 0, (struct kc_rows){0, LEN, k, v, NULL});
    }
    for (uint32_t r = 0; r < ROWS; r++) { /* 0 1 2 3, then 9 of 0, 3 of 2, then 0 1 2 3 */
        seq[r] = r < SEQS ? r : r < SEQS + 9 ? 0 : r < SEQS + 12 ? 2 : (r - 12) % SEQS;
        hi[r] = LEN - r;
    }
    struct kn_batch b = {ROWS, SEQS, zeros, zeros, seq, lo, hi, NULL, seqs};
    kc_attention(kn, &b, (struct kc_queries){0, H, 0.2f, q}, all);
    for (uint32_t r = 0; r < ROWS; r++) {
        uint32_t zero = 0;
        struct kn_batch alone = {1, 1, zeros, zeros, &zero, lo + r, hi + r, NULL, &seqs[seq[r]]};
        kc_attention(kn, &alone, (struct kc_queries){0, H, 0.2f, q + (size_t)r * H * D}, one);
        kc_near(kd_label(), all + (size_t)r * H * D, one, H * D, 1.0f, KC_HALVES);
    }
    for (int s = 0; s < SEQS; s++) {
        free(slots[s]);
        kc_pool_close(&pool[s]);
    }
    free(q);
    free(k);
    free(v);
}

static void pools_of_all_types_share_a_batch(void **state)
{
    (void)state;
    kd_each(check_mixed);
}

/* What the CPU has beside these is refused in words. */
static void check_refused(struct kn *kn)
{
    char why[160] = "", says[160];
    snprintf(says, sizeof says, "backend \"%s\" has no keys and values of type q8_q4", kn->name);
    assert_int_equal(kn_kv_check(kn, KN_Q8_Q4, 64, why, sizeof why), KN_EUNSUPPORTED);
    assert_string_equal(why, says);
}

static void other_types_are_refused(void **state)
{
    (void)state;
    kd_each(check_refused);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(other_types_are_refused),
        cmocka_unit_test(pages_have_the_bytes_of_ref),
        cmocka_unit_test(attention_at_each_factor),
        cmocka_unit_test(values_may_be_beyond_halves),
        cmocka_unit_test(pools_of_all_types_share_a_batch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
