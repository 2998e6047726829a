/* One row over a long cache is shared out tile by tile when there are more threads than heads, and whole when
 * there are not: the bits are the same. The cache is so long that the parts do not all fit at once. */
#include "kernels_compare.h"

enum { N = 8300, N_HEADS = 64, N_KV = 8, D = 128, ROWS = 2, PAGES = (N + 63) / 64 };

struct cache {
    uint32_t *slots;
    float *k, *v, *q;
};

/* ROWS rows with these ranges: out [ROWS][N_HEADS][D]. */
static void attend(struct kn *kn, const struct cache *c, const uint32_t *lo, const uint32_t *hi,
                   uint32_t n_rows, float *out)
{
    static const uint32_t seq[ROWS] = {0, 0};
    static const int32_t zeros[ROWS] = {0, 0};
    struct kc_pool pool;
    kc_pool_open(&pool, kn,
                 (struct kn_kv){.n_layers = 1, .n_kv_heads = N_KV, .head_dim = D, .type = KN_F16},
                 PAGES);
    struct kn_seq s = {&pool.kv, c->slots, N};
    kc_pool_write(&pool, &s, 0, (struct kc_rows){0, N, c->k, c->v, NULL});
    struct kn_batch b = {.n_rows = n_rows,
                         .n_seqs = 1,
                         .ids = zeros,
                         .positions = zeros,
                         .seq = seq,
                         .lo = lo,
                         .hi = hi,
                         .seqs = &s};
    kc_attention(kn, &b, (struct kc_queries){0, N_HEADS, 0.05f, c->q}, out);
    kc_pool_close(&pool);
}

static void split_and_whole_give_the_same_bits(void **state)
{
    (void)state;
    static const uint32_t threads[] = {1, 7, 24};
    static const struct {
        uint32_t n_rows, lo[ROWS], hi[ROWS];
    } cases[] = {{1, {0}, {N}},
                 {1, {100}, {8200}},
                 {1, {64}, {64}},
                 {2, {0, 8000}, {8299, N}},
                 {2, {5, 70}, {5, N}}};
    static float first[KC_BACKENDS_MAX][KC_LEN(cases)][ROWS * N_HEADS * D], got[ROWS * N_HEADS * D];
    struct cache c = {kc_slots(KC_DENSE, N, PAGES, 1), kc_floats(1, (size_t)N * N_KV * D, 1.0f),
                      kc_floats(2, (size_t)N * N_KV * D, 1.0f),
                      kc_floats(3, (size_t)ROWS * N_HEADS * D, 1.0f)};
    for (size_t t = 0; t < KC_LEN(threads); t++) {
        struct kc_set set;
        kc_open(&set, threads[t]);
        for (unsigned i = 0; i < set.n; i++)
            for (size_t k = 0; k < KC_LEN(cases) && kc_is_int8(set.kn[i]); k++) {
                if (k > 0 && strcmp(set.kn[i]->isa, "scalar") == 0)
                    continue; /* it imitates vectors one lane at a time, and shares out the same way */
                float *to = t == 0 ? first[i][k] : got;
                attend(set.kn[i], &c, cases[k].lo, cases[k].hi, cases[k].n_rows, to);
                if (t > 0)
                    kc_same(kc_name(set.kn[i]), got, first[i][k],
                            (size_t)cases[k].n_rows * N_HEADS * D);
            }
        kc_close(&set);
    }
    free(c.slots);
    free(c.k);
    free(c.v);
    free(c.q);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(split_and_whole_give_the_same_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
