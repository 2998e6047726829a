/* policy_knorm.c: keep the tokens whose keys are short (Devoto et al., "A Simple and Effective L2
 * Norm-Based Strategy for KV Cache Compression", arXiv 2406.11430): mean over layers and KV heads
 * of the norm of a token's key. */
#include "policy.h"
#include <math.h>

static int score(struct evict *ev, struct model *m, const struct seqcache *s, float *ret_value,
                 struct err *e)
{
    (void)ev, (void)m;
    struct keys k;
    int rc = keys_open(&k, s, e);
    if (rc < 0)
        return rc;
    float share = 1.0f / (float)(k.n_layers * k.n_heads);
    for (uint32_t i = 0; i < k.seq.n; i++)
        ret_value[i] = 0;
    for (uint32_t layer = 0; layer < k.n_layers; layer++)
        for (uint32_t first = 0, count; first < k.seq.n; first += count) {
            count = keys_load(&k, layer, first);
            for (uint32_t i = 0; i < count; i++)
                for (uint32_t h = 0; h < k.n_heads; h++) {
                    const float *key = keys_at(&k, i, h);
                    ret_value[first + i] += share * sqrtf(keys_dot(key, key, k.head_dim));
                }
        }
    keys_close(&k);
    return 0;
}

const struct evict_policy policy_knorm = {
    .name = "knorm",
    .summary = "Keeps tokens whose keys have a small norm, mean over layers and heads.",
    .score = score,
};
