/* policy_h2o.c: heavy hitters (Zhang et al., "H2O", arXiv 2306.14048): keep the tokens that have
 * drawn the most attention so far.
 *
 * No attention matrix is kept. At each refresh the stored keys of the last max(1, recent) tokens
 * stand in for queries: softmax of k_q.k_j / sqrt(D) over all cached j past the frozen ones (the
 * queries themselves included, no causal mask), summed over queries, mean over KV heads and layers,
 * added to the token's running mass. The mass starts at 0, follows evictions and grows for recent
 * tokens too.
 *
 *   walk 1 over a layer's keys     for each (query, head): max and sum of exp, online
 *   walk 2                         for each key: the sum over (query, head) of exp(x - max) / sum
 *
 * So the scratch is the queries and two numbers for each: never a row, let alone a matrix, of
 * weights. */
#include "policy.h"
#include <float.h>
#include <math.h>
#include <stdlib.h>

/* The queries of one layer and what walk 1 learns of them. Head h of query q stands at q * n_heads
 * + h. */
struct hitters {
    uint32_t n;     /* queries x heads */
    float *query;   /* [n][head_dim], scaled by 1 / sqrt(head_dim) */
    float *max;     /* [n] */
    float *inverse; /* [n] 1 / sum of exp(x - max); the sum itself during walk 1 */
    float room[];   /* of all three */
};

static uint32_t frozen_of(const struct evict_params *p, uint32_t n)
{
    return BC_MIN(evict_frozen(p), n - 1);
}

static uint32_t queries_of(const struct evict_params *p, uint32_t n)
{
    return BC_MIN(BC_MAX(p->recent, 1u), n - frozen_of(p, n));
}

static size_t state_bytes(const struct evict_params *p, const struct kn_kv *kv, uint32_t n)
{
    size_t count = n > 0 ? (size_t)queries_of(p, n) * kv->n_kv_heads : 0;
    return sizeof(struct hitters) + count * (kv->head_dim + 2) * sizeof(float);
}

/* The keys of the cache's last rows as queries. */
static void queries_load(struct hitters *t, struct keys *k, uint32_t layer)
{
    uint32_t n_rows = t->n / k->n_heads, first = k->seq.n - n_rows;
    float scale = 1.0f / sqrtf((float)k->head_dim);
    k->kn->ops->keys_read(k->kn, &k->seq, layer, first, n_rows, t->query);
    for (size_t i = 0; i < (size_t)t->n * k->head_dim; i++)
        t->query[i] *= scale;
}

static float logit(const struct hitters *t, const struct keys *k, uint32_t q, uint32_t i)
{
    return keys_dot(t->query + (size_t)q * k->head_dim, keys_at(k, i, q % k->n_heads), k->head_dim);
}

static void start(struct evict_walk *w)
{
    struct hitters *t = w->state;
    if (w->round == 0)
        queries_load(t, &w->keys, w->layer);
    for (uint32_t q = 0; q < t->n; q++)
        if (w->round == 0) {
            t->max[q] = -FLT_MAX;
            t->inverse[q] = 0;
        } else {
            t->inverse[q] = 1.0f / t->inverse[q];
        }
}

/* Walk 1. */
static void softmax_measure(struct hitters *t, const struct keys *k, uint32_t count)
{
    for (uint32_t q = 0; q < t->n; q++)
        for (uint32_t i = 0; i < count; i++) {
            float x = logit(t, k, q, i);
            if (x > t->max[q]) {
                t->inverse[q] *= expf(t->max[q] - x);
                t->max[q] = x;
            }
            t->inverse[q] += expf(x - t->max[q]);
        }
}

/* Walk 2: takes each key's share of attention off its value, for high mass stays. */
static void attention_take(const struct hitters *t, const struct keys *k, uint32_t count,
                           float *value)
{
    float share = 1.0f / (float)(k->n_layers * k->n_heads);
    for (uint32_t i = 0; i < count; i++) {
        float sum = 0;
        for (uint32_t q = 0; q < t->n; q++)
            sum += expf(logit(t, k, q, i) - t->max[q]) * t->inverse[q];
        value[i] -= share * sum;
    }
}

static void slice(struct evict_walk *w, uint32_t count)
{
    if (w->round == 0)
        softmax_measure(w->state, &w->keys, count);
    else
        attention_take(w->state, &w->keys, count, w->value + w->first);
}

/* Room for the mass of n tokens now, so that `kept` cannot fail. */
static int mass_reserve(struct evict *ev, uint32_t n, struct err *e)
{
    if (n <= ev->mass_max)
        return 0;
    float *mass = reallocarray(ev->mass, n, sizeof *mass);
    if (mass == NULL)
        return err_nomem(e, n * sizeof *mass);
    ev->mass = mass;
    ev->mass_max = n;
    return 0;
}

static int open(struct evict *ev, struct evict_walk *w, struct err *e)
{
    const struct keys *k = &w->keys;
    struct hitters *t = w->state;
    uint32_t n = k->seq.n;
    int rc = mass_reserve(ev, n, e);
    if (rc < 0)
        return rc;
    w->from = frozen_of(&ev->params, n);
    t->n = queries_of(&ev->params, n) * k->n_heads;
    t->query = t->room;
    t->max = t->room + (size_t)t->n * k->head_dim;
    t->inverse = t->max + t->n;
    for (uint32_t i = 0; i < n; i++)
        w->value[i] = i < ev->n_mass && i >= w->from ? -ev->mass[i] : 0;
    return 0;
}

static const struct evict_walker walker = {
    .rounds = 2, .state_bytes = state_bytes, .open = open, .start = start, .slice = slice};

/* The refresh counts only when something was evicted by it: to look at the scores changes nothing.
 */
static void kept(struct evict *ev, const float *value, const uint32_t *keep, uint32_t n_keep)
{
    bc_assert(n_keep <= ev->mass_max);
    for (uint32_t i = 0; i < n_keep; i++)
        ev->mass[i] = -value[keep[i]];
    ev->n_mass = n_keep;
}

const struct evict_policy policy_h2o = {
    .name = "h2o",
    .summary = "Keeps heavy hitters: tokens with the most attention mass so far.",
    .row_state_bytes = sizeof(float),
    .walker = &walker,
    .kept = kept,
};
