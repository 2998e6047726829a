/* policy_keydiff.c: keep the tokens whose keys differ from the rest (Park et al., "KeyDiff", arXiv
 * 2504.15364): mean over layers and KV heads of the cosine between a token's key and the mean of
 * that head's normalised keys; low ones stay. A cosine does not see the length of the mean, so the
 * sum of the normalised keys serves. Two walks over the keys of a layer: one for the sums, one for
 * the cosines. */
#include "policy.h"
#include <math.h>
#include <string.h>

static float inverse_norm(const float *v, uint32_t n)
{
    float norm = sqrtf(keys_dot(v, v, n));
    return norm > 0 ? 1.0f / norm : 0;
}

static size_t state_bytes(const struct evict_params *p, const struct kn_kv *kv, uint32_t n)
{
    (void)p, (void)n;
    return (size_t)kv->n_kv_heads * kv->head_dim * sizeof(float);
}

static int open(struct evict *ev, struct evict_walk *w, struct err *e)
{
    (void)ev, (void)e;
    for (uint32_t i = 0; i < w->keys.seq.n; i++)
        w->value[i] = 0;
    return 0;
}

/* The state, [n_heads][head_dim]: sums of the layer's normalised keys; from the second round on, unit vectors. */
static void start(struct evict_walk *w)
{
    const struct keys *k = &w->keys;
    float *sum = w->state;
    if (w->round == 0) {
        memset(sum, 0, (size_t)k->n_heads * k->head_dim * sizeof *sum);
        return;
    }
    for (uint32_t h = 0; h < k->n_heads; h++) {
        float *mean = sum + h * k->head_dim, scale = inverse_norm(mean, k->head_dim);
        for (uint32_t d = 0; d < k->head_dim; d++)
            mean[d] *= scale;
    }
}

static void directions_add(struct evict_walk *w, uint32_t count)
{
    const struct keys *k = &w->keys;
    float *sum = w->state;
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t h = 0; h < k->n_heads; h++) {
            const float *key = keys_at(k, i, h);
            float scale = inverse_norm(key, k->head_dim);
            for (uint32_t d = 0; d < k->head_dim; d++)
                sum[h * k->head_dim + d] += scale * key[d];
        }
}

/* value += share x cosine, for every token and head of the slice. */
static void cosines_add(struct evict_walk *w, uint32_t count)
{
    const struct keys *k = &w->keys;
    const float *mean = w->state;
    float share = 1.0f / (float)(k->n_layers * k->n_heads);
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t h = 0; h < k->n_heads; h++) {
            const float *key = keys_at(k, i, h);
            float dot = keys_dot(key, mean + h * k->head_dim, k->head_dim);
            w->value[w->first + i] += share * dot * inverse_norm(key, k->head_dim);
        }
}

static void slice(struct evict_walk *w, uint32_t count)
{
    if (w->round == 0)
        directions_add(w, count);
    else
        cosines_add(w, count);
}

static const struct evict_walker walker = {
    .rounds = 2, .state_bytes = state_bytes, .open = open, .start = start, .slice = slice};

const struct evict_policy policy_keydiff = {
    .name = "keydiff",
    .summary = "Keeps tokens whose keys point away from the mean key of their head.",
    .walker = &walker,
};
