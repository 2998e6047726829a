/* One row over a long cache is shared out tile by tile when there are more threads than heads, and whole when
 * there are not: the bits are the same. The cache is so long that the parts do not all fit at once. */
#include "kernels_compare.h"
#include "sanitized.h"

enum { N = 8300, N_HEADS = 64, N_KV = 8, D = 128, ROWS = 2, PAGES = (N + 63) / 64 };

struct cache {
    uint32_t *slots;
    float *k, *v, *q;
};

/* Rows with these ranges of a sequence. */
static const struct range {
    uint32_t n_rows, lo[ROWS], hi[ROWS];
} cases[] = {{1, {0}, {N}},
             {1, {100}, {8200}},
             {1, {64}, {64}},
             {2, {0, 8000}, {8299, N}},
             {2, {5, 70}, {5, N}}};

/* out [ROWS][N_HEADS][D] */
static void attend(struct kn *kn, const struct kn_seq *s, const struct range *r, const float *q,
                   float *out)
{
    static const uint32_t seq[ROWS] = {0, 0};
    static const int32_t zeros[ROWS] = {0, 0};
    struct kn_batch b = {.n_rows = r->n_rows,
                         .n_seqs = 1,
                         .ids = zeros,
                         .positions = zeros,
                         .seq = seq,
                         .lo = r->lo,
                         .hi = r->hi,
                         .seqs = s};
    kc_attention(kn, &b, (struct kc_queries){0, N_HEADS, 0.05f, q}, out);
}

/* What every case gives: into first, or the same bits as there. */
static void every_case(struct kn *kn, const struct cache *c, float first[][ROWS * N_HEADS * D],
                       bool is_first)
{
    static float got[ROWS * N_HEADS * D];
    struct kc_pool pool;
    kc_pool_open(&pool, kn,
                 (struct kn_kv){.n_layers = 1, .n_kv_heads = N_KV, .head_dim = D, .type = KN_F16},
                 PAGES);
    struct kn_seq s = {&pool.kv, c->slots, N};
    kc_pool_write(&pool, &s, 0, (struct kc_rows){0, N, c->k, c->v, NULL});
    for (size_t k = 0; k < KC_LEN(cases); k++) {
        if (k > 0 && strcmp(kn->isa, "scalar") == 0)
            continue; /* it imitates vectors one lane at a time, and shares out the same way */
        attend(kn, &s, &cases[k], c->q, is_first ? first[k] : got);
        if (!is_first)
            kc_same(kc_name(kn), got, first[k], (size_t)cases[k].n_rows * N_HEADS * D);
    }
    kc_pool_close(&pool);
}

static void split_and_whole_give_the_same_bits(void **state)
{
    (void)state;
    static const uint32_t threads[] = {1, 7, 24};
    static float first[KC_BACKENDS_MAX][KC_LEN(cases)][ROWS * N_HEADS * D];
    struct cache c = {kc_slots(KC_DENSE, N, PAGES, 1), kc_floats(1, (size_t)N * N_KV * D, 1.0f),
                      kc_floats(2, (size_t)N * N_KV * D, 1.0f),
                      kc_floats(3, (size_t)ROWS * N_HEADS * D, 1.0f)};
    for (size_t t = 0; t < KC_LEN(threads); t += SANITIZED ? 2 : 1) {
        struct kc_set set;
        kc_open(&set, threads[t]);
        for (unsigned i = 0; i < set.n; i++)
            if (kc_is_int8(set.kn[i]))
                every_case(set.kn[i], &c, first[i], t == 0);
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
