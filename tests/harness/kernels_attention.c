/* kernels_attention.c: see the header. */
#include "kernels_attention.h"

struct kca_world kca_make(struct kca_shape s)
{
    struct kca_world w = {.s = s, .n_pages = s.n / 64 + 3, .n_heads = s.n_kv * s.group};
    w.slots = kc_slots(s.slots, s.n, w.n_pages, s.n + s.d);
    w.n_rows = s.n;
    w.q = kc_floats(1, (size_t)s.n * w.n_heads * s.d, s.deviation);
    w.k = kc_floats(2, (size_t)s.n * s.n_kv * s.d, s.deviation);
    w.v = kc_floats(3, (size_t)s.n * s.n_kv * s.d, 1.0f);
    w.k_stored = kc_floats(2, (size_t)s.n * s.n_kv * s.d, 1.0f);
    w.v_stored = kc_floats(3, (size_t)s.n * s.n_kv * s.d, 1.0f);
    kc_stored(s.type, w.k, (size_t)s.n * s.n_kv * s.d, w.k_stored);
    kc_stored_values(s.type, s.d, w.v, (size_t)s.n * s.n_kv * s.d, w.v_stored);
    w.seq = calloc(s.n, sizeof *w.seq);
    w.lo = calloc(s.n, sizeof *w.lo);
    w.hi = calloc(s.n, sizeof *w.hi);
    w.zeros = calloc(s.n, sizeof *w.zeros);
    w.scale = 1.0f / sqrtf((float)s.d);
    assert_true(w.seq && w.lo && w.hi && w.zeros);
    return w;
}

void kca_free(struct kca_world *w)
{
    free(w->slots);
    free(w->q);
    free(w->k);
    free(w->v);
    free(w->k_stored);
    free(w->v_stored);
    free(w->seq);
    free(w->lo);
    free(w->hi);
    free(w->zeros);
}

void kca_look(struct kca_world *w, enum kca_view view)
{
    struct kc_rng r = {w->s.n};
    for (uint32_t i = 0; i < w->n_rows; i++) {
        uint32_t n = w->s.n;
        w->lo[i] = 0;
        w->hi[i] = i + 1;
        if (view == KCA_SCORE || view == KCA_SCORE_GAP) {
            w->hi[i] = n;
            w->lo[i] = i + 1 + (view == KCA_SCORE_GAP ? 4 : 0);
            w->lo[i] = w->lo[i] < n ? w->lo[i] : n;
        } else if (view == KCA_WINDOWS) {
            w->lo[i] = kc_below(&r, n + 1);
            w->hi[i] = w->lo[i] + kc_below(&r, n + 1 - w->lo[i]);
        }
    }
}

struct kn_batch kca_batch(const struct kca_world *w, const struct kn_seq *seq, uint32_t first,
                          uint32_t n)
{
    return (struct kn_batch){.n_rows = n,
                             .n_seqs = 1,
                             .ids = w->zeros,
                             .positions = w->zeros,
                             .seq = w->seq + first,
                             .lo = w->lo + first,
                             .hi = w->hi + first,
                             .slots = NULL,
                             .seqs = seq};
}

/* One row and head in doubles: p (scratch) [n], out [d]. */
void kca_attend(const struct kca_world *w, uint32_t row, uint32_t head, double *p, double *out)
{
    uint32_t d = w->s.d, kv = head / w->s.group;
    double max = -INFINITY, sum = 0;
    for (uint32_t j = w->lo[row]; j < w->hi[row]; j++) {
        p[j] = 0;
        for (uint32_t i = 0; i < d; i++)
            p[j] += (double)w->q[((size_t)row * w->n_heads + head) * d + i] *
                    (double)w->k_stored[((size_t)j * w->s.n_kv + kv) * d + i];
        p[j] *= (double)w->scale;
        max = fmax(max, p[j]);
    }
    memset(out, 0, d * sizeof *out);
    for (uint32_t j = w->lo[row]; j < w->hi[row]; j++)
        sum += p[j] = exp(p[j] - max);
    for (uint32_t j = w->lo[row]; j < w->hi[row]; j++)
        for (uint32_t i = 0; i < d; i++)
            out[i] += p[j] / sum * (double)w->v_stored[((size_t)j * w->s.n_kv + kv) * d + i];
}

void kca_pool(const struct kca_world *w, struct kc_pool *pool, struct kn *kn, struct kn_seq *seq)
{
    struct kn_kv kv = {.n_layers = 2,
                       .n_kv_heads = w->s.n_kv,
                       .head_dim = w->s.d,
                       .type = w->s.type};
    kc_pool_open(pool, kn, kv, w->n_pages);
    *seq = (struct kn_seq){&pool->kv, w->slots, w->s.n};
    kc_pool_write(pool, seq, 1, (struct kc_rows){0, w->s.n, w->k, w->v, NULL});
}
