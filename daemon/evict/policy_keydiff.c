/* policy_keydiff.c: keep the tokens whose keys differ from the rest (Park et al., "KeyDiff", arXiv
 * 2504.15364): mean over layers and KV heads of the cosine between a token's key and the mean of
 * that head's normalised keys; low ones stay. A cosine does not see the length of the mean, so the
 * sum of the normalised keys serves. Two walks over the keys of a layer: one for the sums, one for
 * the cosines. */
#include "policy.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static float inverse_norm(const float *v, uint32_t n)
{
    float norm = sqrtf(keys_dot(v, v, n));
    return norm > 0 ? 1.0f / norm : 0;
}

/* sum [n_heads][head_dim]: of the layer's normalised keys, then made unit vectors. */
static void layer_directions(struct keys *k, uint32_t layer, float *sum)
{
    memset(sum, 0, (size_t)k->n_heads * k->head_dim * sizeof *sum);
    for (uint32_t first = 0, count; first < k->seq.n; first += count) {
        count = keys_load(k, layer, first);
        for (uint32_t i = 0; i < count; i++)
            for (uint32_t h = 0; h < k->n_heads; h++) {
                const float *key = keys_at(k, i, h);
                float scale = inverse_norm(key, k->head_dim);
                for (uint32_t d = 0; d < k->head_dim; d++)
                    sum[h * k->head_dim + d] += scale * key[d];
            }
    }
    for (uint32_t h = 0; h < k->n_heads; h++) {
        float *mean = sum + h * k->head_dim, scale = inverse_norm(mean, k->head_dim);
        for (uint32_t d = 0; d < k->head_dim; d++)
            mean[d] *= scale;
    }
}

/* value += share x cosine, for every token and head of the layer. */
static void layer_cosines(struct keys *k, uint32_t layer, const float *mean, float *value)
{
    float share = 1.0f / (float)(k->n_layers * k->n_heads);
    for (uint32_t first = 0, count; first < k->seq.n; first += count) {
        count = keys_load(k, layer, first);
        for (uint32_t i = 0; i < count; i++)
            for (uint32_t h = 0; h < k->n_heads; h++) {
                const float *key = keys_at(k, i, h);
                float dot = keys_dot(key, mean + h * k->head_dim, k->head_dim);
                value[first + i] += share * dot * inverse_norm(key, k->head_dim);
            }
    }
}

static int score(struct evict *ev, struct model *m, const struct seqcache *s, float *ret_value,
                 struct err *e)
{
    (void)ev, (void)m;
    struct keys k;
    int rc = keys_open(&k, s, e);
    if (rc < 0)
        return rc;
    size_t bytes = (size_t)k.n_heads * k.head_dim * sizeof(float);
    float *mean = malloc(bytes);
    if (mean == NULL) {
        rc = err_nomem(e, bytes);
        goto out;
    }
    for (uint32_t i = 0; i < k.seq.n; i++)
        ret_value[i] = 0;
    for (uint32_t layer = 0; layer < k.n_layers; layer++) {
        layer_directions(&k, layer, mean);
        layer_cosines(&k, layer, mean, ret_value);
    }
out:
    free(mean);
    keys_close(&k);
    return rc;
}

const struct evict_policy policy_keydiff = {
    .name = "keydiff",
    .summary = "Keeps tokens whose keys point away from the mean key of their head.",
    .score = score,
};
