/* policy_key_similarity.c: keep the tokens whose last-layer keys have the largest dot product with
 * the newest cached token's key, mean over KV heads: the "importance" baseline of arXiv 2607.27600.
 * Keys are as stored, rotary embedding in; the newest token takes part. */
#include "policy.h"
#include <stdlib.h>
#include <string.h>

static float similarity(const struct keys *k, uint32_t i, const float *newest)
{
    float sum = 0;
    for (uint32_t h = 0; h < k->n_heads; h++)
        sum += keys_dot(keys_at(k, i, h), newest + h * k->head_dim, k->head_dim);
    return sum / (float)k->n_heads;
}

static int score(struct evict *ev, struct model *m, const struct seqcache *s, float *ret_value,
                 struct err *e)
{
    (void)ev, (void)m;
    struct keys k;
    int rc = keys_open(&k, s, e);
    if (rc < 0)
        return rc;
    uint32_t n = k.seq.n, last = k.n_layers - 1;
    size_t key_bytes = (size_t)k.n_heads * k.head_dim * sizeof(float);
    float *newest = malloc(key_bytes);
    if (newest == NULL) {
        rc = err_nomem(e, key_bytes);
        goto out;
    }
    keys_load(&k, last, n - 1);
    memcpy(newest, k.slice, key_bytes);
    for (uint32_t first = 0, count; first < n; first += count) {
        count = keys_load(&k, last, first);
        for (uint32_t i = 0; i < count; i++)
            ret_value[first + i] = -similarity(&k, i, newest);
    }
out:
    free(newest);
    keys_close(&k);
    return rc;
}

const struct evict_policy policy_key_similarity = {
    .name = "key_similarity",
    .summary = "Keeps tokens whose last-layer keys resemble the newest token's key.",
    .score = score,
};
