/* Rotations of queries and keys and the rows' way into pages, which the GPU backend runs in one launch where they follow each
 * other: with every style, norm and order, head sizes with and without vectors. */
#include "kernels_device.h"

static struct turned_case {
    uint32_t d, n_rot;
    enum kn_type type;
    unsigned how; /* 1: pairs are neighbours, 2: heads are normed, 4: queries come first */
} turned_case;

/* Rows that see one cached token each: its value. */
static void check_values(struct kn *kn, const struct kn_seq *seq, const float *v, uint32_t n_kv)
{
    uint32_t lo[8], hi[8], zeros[8] = {0}, d = seq->kv->head_dim;
    float q[8 * 2 * 128] = {0}, got[8 * 2 * 128], want[8 * 2 * 128];
    for (uint32_t r = 0; r < seq->n; r++)
        hi[r] = (lo[r] = r) + 1;
    struct kn_batch b = {seq->n, 1, (int32_t *)zeros, (int32_t *)zeros, zeros, lo, hi, NULL, seq};
    kc_attention(kn, &b, (struct kc_queries){0, n_kv, 1.0f, q}, got);
    kc_stored(seq->kv->type, v, (size_t)seq->n * n_kv * d, want);
    kc_near(kd_label(), got, want, (size_t)seq->n * n_kv * d, 1.0f,
            seq->kv->type == KN_F32 ? 0.0f : KC_HALVES);
}

/* A layer's queries and keys turn and its rows go to their pages: in one pass, where these are one launch, to the bit what each
 * of them alone gives; and pages have what the buffer has, rounded once. */
static void check_turned(struct kn *kn)
{
    enum { ROWS = 5, HEADS = 5, N_KV = 2, D_MAX = 128 };
    static const int32_t positions[ROWS] = {0, 1, 77, 4096, 131071};
    const struct turned_case t = turned_case;
    uint32_t zeros[ROWS] = {0}, *slots = kc_slots(KC_SCATTERED, ROWS, 2, 6);
    size_t n_q = (size_t)ROWS * HEADS * t.d, n_k = (size_t)ROWS * N_KV * t.d;
    float *q = kc_floats(1, n_q, 1.0f), *k = kc_floats(2, n_k, 1.0f), *v = kc_floats(3, n_k, 1.0f);
    float *gain = kc_floats(4, t.d, 1.0f), inv_freq[D_MAX / 2];
    static float q_out[2][ROWS * HEADS * D_MAX], k_out[2][ROWS * N_KV * D_MAX],
        stored[ROWS * N_KV * D_MAX], rounded[ROWS * N_KV * D_MAX];
    for (uint32_t i = 0; i < t.n_rot / 2; i++)
        inv_freq[i] = (float)pow(10000.0, -2.0 * i / t.n_rot);
    float *d_inv = kc_up(kn, inv_freq, t.n_rot / 2 * sizeof(float));
    float *d_gain = kc_up(kn, gain, t.d * sizeof(float)), *dv = kc_up(kn, v, n_k * sizeof(float));
    struct kn_rope rk = {t.how & 1 ? KN_ROPE_PAIRS : KN_ROPE_HALVES,
                         N_KV,
                         t.d,
                         t.n_rot,
                         d_inv,
                         t.how & 2 ? d_gain : NULL,
                         1e-6f};
    struct kn_rope rq = rk;
    struct kc_pool pool;
    rq.n_heads = HEADS;
    kc_pool_open(&pool, kn,
                 (struct kn_kv){.n_layers = 1, .n_kv_heads = N_KV, .head_dim = t.d, .type = t.type},
                 2);
    struct kn_seq seq = {&pool.kv, slots, ROWS};
    struct kn_batch b = {ROWS, 1, positions, positions, zeros, zeros, zeros, slots, &seq};
    for (int together = 0; together < 2; together++) {
        float *dq = kc_up(kn, q, n_q * sizeof(float)), *dk = kc_up(kn, k, n_k * sizeof(float));
        for (unsigned step = 0; step < 3; step++) {
            if (step == 0 || !together)
                kn->ops->batch_begin(kn, &b);
            if (step == (t.how & 4 ? 0 : 2))
                kn->ops->rope(kn, &b, &rq, dq);
            else if (step == (t.how & 4 ? 1 : 0))
                kn->ops->rope(kn, &b, &rk, dk);
            else
                kn->ops->kv_write(kn, &b, 0, dk, dv);
            if (step == 2 || !together)
                kn->ops->batch_end(kn, &b);
        }
        kn->ops->download(kn, q_out[together], dq, n_q * sizeof(float));
        kn->ops->download(kn, k_out[together], dk, n_k * sizeof(float));
        kn->ops->keys_read(kn, &seq, 0, 0, ROWS, stored);
        kc_stored(t.type, k_out[together], n_k, rounded);
        kc_same(kd_label(), stored, rounded, n_k);
        check_values(kn, &seq, v, N_KV);
        kc_drop(kn, dq, n_q * sizeof(float));
        kc_drop(kn, dk, n_k * sizeof(float));
    }
    kc_same(kd_label(), q_out[1], q_out[0], n_q);
    kc_same(kd_label(), k_out[1], k_out[0], n_k);
    kc_drop(kn, d_inv, t.n_rot / 2 * sizeof(float));
    kc_drop(kn, d_gain, t.d * sizeof(float));
    kc_drop(kn, dv, n_k * sizeof(float));
    kc_pool_close(&pool);
    free(slots);
    free(q);
    free(k);
    free(v);
    free(gain);
}

static void rotations_and_writes_share_a_launch(void **state)
{
    (void)state;
    static const struct turned_case cases[] = {
        {128, 128, KN_F16, 0}, {64, 64, KN_F16, 1},    {128, 64, KN_F16, 6}, {96, 80, KN_F32, 3},
        {12, 10, KN_F32, 5},   {12, 10, KN_F16, 2},    {64, 64, KN_F32, 4},  {128, 96, KN_BF16, 1},
        {20, 14, KN_BF16, 2},  {128, 128, KN_Q8_0, 0}, {64, 64, KN_Q8_0, 5}, {96, 38, KN_Q8_0, 2},
    };
    for (size_t i = 0; i < KC_LEN(cases); i++) {
        turned_case = cases[i];
        kd_each(check_turned);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rotations_and_writes_share_a_launch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
