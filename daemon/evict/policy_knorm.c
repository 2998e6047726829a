/* policy_knorm.c: keep the tokens whose keys are short (Devoto et al., "A Simple and Effective L2
 * Norm-Based Strategy for KV Cache Compression", arXiv 2406.11430): mean over layers and KV heads
 * of the norm of a token's key. */
#include "policy.h"
#include <math.h>

static size_t state_bytes(const struct evict_params *p, const struct kn_kv *kv, uint32_t n)
{
    (void)p, (void)kv, (void)n;
    return 0;
}

static int open(struct evict *ev, struct evict_walk *w, struct err *e)
{
    (void)ev, (void)e;
    for (uint32_t i = 0; i < w->keys.seq.n; i++)
        w->value[i] = 0;
    return 0;
}

static void slice(struct evict_walk *w, uint32_t count)
{
    const struct keys *k = &w->keys;
    float share = 1.0f / (float)(k->n_layers * k->n_heads);
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t h = 0; h < k->n_heads; h++) {
            const float *key = keys_at(k, i, h);
            w->value[w->first + i] += share * sqrtf(keys_dot(key, key, k->head_dim));
        }
}

static const struct evict_walker walker = {.rounds = 1,
                                           .state_bytes = state_bytes,
                                           .open = open,
                                           .slice = slice};

const struct evict_policy policy_knorm = {
    .name = "knorm",
    .summary = "Keeps tokens whose keys have a small norm, mean over layers and heads.",
    .walker = &walker,
};
