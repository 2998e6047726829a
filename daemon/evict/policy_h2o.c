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
};

static int hitters_open(struct hitters *ret, uint32_t n, uint32_t head_dim, struct err *e)
{
    size_t count = (size_t)n * (head_dim + 2);
    float *block = calloc(count, sizeof *block);
    if (block == NULL)
        return err_nomem(e, count * sizeof *block);
    *ret = (struct hitters){.n = n,
                            .query = block,
                            .max = block + (size_t)n * head_dim,
                            .inverse = block + (size_t)n * (head_dim + 1)};
    return 0;
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

/* Walk 1 over rows frozen.. of the layer. */
static void softmax_measure(struct hitters *t, struct keys *k, uint32_t layer, uint32_t frozen)
{
    for (uint32_t q = 0; q < t->n; q++) {
        t->max[q] = -FLT_MAX;
        t->inverse[q] = 0;
    }
    for (uint32_t first = frozen, count; first < k->seq.n; first += count) {
        count = keys_load(k, layer, first);
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
    for (uint32_t q = 0; q < t->n; q++)
        t->inverse[q] = 1.0f / t->inverse[q];
}

/* Walk 2: takes each key's share of attention off its value, for high mass stays. */
static void attention_take(const struct hitters *t, struct keys *k, uint32_t layer, uint32_t frozen,
                           float *value)
{
    float share = 1.0f / (float)(k->n_layers * k->n_heads);
    for (uint32_t first = frozen, count; first < k->seq.n; first += count) {
        count = keys_load(k, layer, first);
        for (uint32_t i = 0; i < count; i++) {
            float sum = 0;
            for (uint32_t q = 0; q < t->n; q++)
                sum += expf(logit(t, k, q, i) - t->max[q]) * t->inverse[q];
            value[first + i] -= share * sum;
        }
    }
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

static int score(struct evict *ev, struct model *m, const struct seqcache *s, float *ret_value,
                 struct err *e)
{
    (void)m;
    struct hitters t = {0};
    struct keys k;
    int rc = keys_open(&k, s, e);
    if (rc < 0)
        return rc;
    uint32_t n = k.seq.n, frozen = BC_MIN(evict_frozen(&ev->params), n - 1);
    uint32_t n_queries = BC_MIN(BC_MAX(ev->params.recent, 1u), n - frozen);
    if ((rc = mass_reserve(ev, n, e)) < 0 ||
        (rc = hitters_open(&t, n_queries * k.n_heads, k.head_dim, e)) < 0)
        goto out;
    for (uint32_t i = 0; i < n; i++)
        ret_value[i] = i < ev->n_mass && i >= frozen ? -ev->mass[i] : 0;
    for (uint32_t layer = 0; layer < k.n_layers; layer++) {
        queries_load(&t, &k, layer);
        softmax_measure(&t, &k, layer, frozen);
        attention_take(&t, &k, layer, frozen, ret_value);
    }
out:
    free(t.query);
    keys_close(&k);
    return rc;
}

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
    .score = score,
    .kept = kept,
};
