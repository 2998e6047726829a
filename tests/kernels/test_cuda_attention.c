/* Attention of the GPU backend in every way it can run: each length, head size, group and view at least once, in f16 and in
 * f32 pools, alone and several sequences in a batch, short and cut among blocks. Against doubles: 2e-3 of the largest value
 * (halves), 5e-6 (f32). Rows that see nothing are zeros. */
#include "cuda_attention.h"

/* Every value of each factor, the others drawn. */
static void each_factor_at_each_value(void **state)
{
    (void)state;
    static const uint32_t lengths[] = {1, 2, 63, 64, 65}, dims[] = {16, 32, 64, 80, 96, 128, 256};
    struct kc_rng r = {11};
    for (uint32_t i = 0; i < 8; i++) {
        struct kca_shape s = {dims[i % KC_LEN(dims)],
                              1 + kc_below(&r, 2),
                              i + 1,
                              lengths[i % KC_LEN(lengths)],
                              i % 4 == 3 ? KN_F32 : KN_F16,
                              (enum kc_slots)(i % 3),
                              1.0f};
        run(s, (enum kca_view)(i % 4), 0, 0);
        s.d = dims[kc_below(&r, KC_LEN(dims) - 1)];
        s.n = 40 + kc_below(&r, 60);
        s.type = i % 2 ? KN_F16 : KN_F32;
        s.slots = KC_SCATTERED;
        run(s, (enum kca_view)kc_below(&r, 4), 0, 0);
    }
    run((struct kca_shape){72, 1, 20, 66, KN_F16, KC_PRUNED, 1.0f}, KCA_WINDOWS, 0, 0);
    run((struct kca_shape){12, 2, 3, 66, KN_F16, KC_PRUNED, 1.0f}, KCA_SCORE_GAP, 0, 0);
}

/* Few rows over a long context: cut among blocks and put together, in both kernels and in halves' two sizes of tile. */
static void long_contexts_are_cut(void **state)
{
    (void)state;
    static const enum kca_view views[] = {KCA_PREFILL, KCA_SCORE, KCA_WINDOWS};
    for (size_t v = 0; v < KC_LEN(views); v++) {
        run((struct kca_shape){64, 1, 4, 700, KN_F16, KC_PRUNED, 1.0f}, views[v], 699, 1);
        run((struct kca_shape){32, 1, 2, 700, KN_F32, KC_PRUNED, 1.0f}, views[v], 340, 3);
        run((struct kca_shape){128, 1, 7, 700, KN_F16, KC_PRUNED, 1.0f}, views[v], 300, 5);
    }
    run((struct kca_shape){64, 1, 3, 700, KN_F16, KC_SCATTERED, 1.0f}, KCA_SCORE_GAP, 640, 60);
}

/* So many rows that blocks take twice the queries: a prompt and a piece of one, tiles that end in the middle of a group's. */
static void long_inputs_have_larger_tiles(void **state)
{
    (void)state;
    run((struct kca_shape){128, 1, 7, 150, KN_F16, KC_PRUNED, 1.0f}, KCA_PREFILL, 0, 0);
    run((struct kca_shape){64, 2, 4, 140, KN_F16, KC_SCATTERED, 1.0f}, KCA_WINDOWS, 7, 131);
}

/* Decode rows of several sequences, a piece of a prompt and a blind row in one batch; pools of both types. */
static void check_mixed(struct kn *kn)
{
    enum { SEQS = 4, D = 64, H = 6, N_KV = 2, ROWS = 13 };
    static const uint32_t lengths[SEQS] = {130, 1, 64, 300};
    static const uint32_t seq[ROWS] = {0, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 0, 3};
    uint32_t lo[ROWS], hi[ROWS], *slots[SEQS];
    int32_t zeros[ROWS] = {0};
    struct kc_pool pool[2];
    struct kn_seq seqs[SEQS];
    float *q = kc_floats(3, (size_t)ROWS * H * D, 1.0f), all[ROWS * H * D], one[H * D];
    float *k = kc_floats(1, (size_t)300 * N_KV * D, 1.0f);
    float *v = kc_floats(2, (size_t)300 * N_KV * D, 1.0f);
    for (int t = 0; t < 2; t++)
        kc_pool_open(&pool[t], kn,
                     (struct kn_kv){.n_layers = 1,
                                    .n_kv_heads = N_KV,
                                    .head_dim = D,
                                    .type = t ? KN_F32 : KN_F16},
                     9);
    for (uint32_t s = 0, at[2] = {0, 0}; s < SEQS; s++) {
        uint32_t *all_slots = kc_slots(KC_SCATTERED, 9 * 64, 9, 5);
        slots[s] = malloc(lengths[s] * sizeof(uint32_t));
        assert_non_null(slots[s]);
        memcpy(slots[s], all_slots + at[s % 2], lengths[s] * sizeof(uint32_t));
        at[s % 2] += lengths[s];
        free(all_slots);
        seqs[s] = (struct kn_seq){&pool[s % 2].kv, slots[s], lengths[s]};
        kc_pool_write(&pool[s % 2], &seqs[s], 0, (struct kc_rows){0, lengths[s], k, v, NULL});
    }
    for (uint32_t r = 0; r < ROWS; r++) {
        lo[r] = r % 5;
        hi[r] = lengths[seq[r]] - r % 3;
        if (lo[r] >= hi[r] || r == 11)
            lo[r] = hi[r] = 0;
    }
    struct kn_batch b = {ROWS, SEQS, zeros, zeros, seq, lo, hi, NULL, seqs};
    kc_attention(kn, &b, (struct kc_queries){0, H, 0.125f, q}, all);
    for (uint32_t r = 0; r < ROWS; r++) {
        uint32_t zero = 0;
        struct kn_batch alone = {1, 1, zeros, zeros, &zero, lo + r, hi + r, NULL, &seqs[seq[r]]};
        kc_attention(kn, &alone, (struct kc_queries){0, H, 0.125f, q + (size_t)r * H * D}, one);
        kc_near(kd_label(), all + (size_t)r * H * D, one, H * D, 1.0f,
                seqs[seq[r]].kv->type == KN_F16 ? KC_HALVES : 5e-6f);
        for (int i = 0; lo[r] == hi[r] && i < H * D; i++)
            assert_true(all[(size_t)r * H * D + (size_t)i] == 0.0f);
    }
    for (int i = 0; i < SEQS; i++)
        free(slots[i]);
    kc_pool_close(&pool[0]);
    kc_pool_close(&pool[1]);
    free(q);
    free(k);
    free(v);
}

static void sequences_of_all_kinds_share_a_batch(void **state)
{
    (void)state;
    kd_each(check_mixed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_factor_at_each_value),
        cmocka_unit_test(long_contexts_are_cut),
        cmocka_unit_test(long_inputs_have_larger_tiles),
        cmocka_unit_test(sequences_of_all_kinds_share_a_batch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
