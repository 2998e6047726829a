/* keys.c: stored keys for the policies that look at them, and their dot product. */
#include "policy.h"
#include <stdlib.h>

int keys_open(struct keys *ret, const struct seqcache *s, struct err *e)
{
    const struct kn_kv *kv = pool_kv(seqcache_pool(s));
    size_t bytes = (size_t)KEYS_SLICE * kv->n_kv_heads * kv->head_dim * sizeof(float);
    float *slice = malloc(bytes);
    if (slice == NULL)
        return err_nomem(e, bytes);
    *ret = (struct keys){.kn = pool_kn(seqcache_pool(s)),
                         .seq = seqcache_view(s),
                         .n_layers = kv->n_layers,
                         .n_heads = kv->n_kv_heads,
                         .head_dim = kv->head_dim,
                         .slice = slice};
    return 0;
}

void keys_close(struct keys *k)
{
    free(k->slice);
    k->slice = NULL;
}

uint32_t keys_load(struct keys *k, uint32_t layer, uint32_t first)
{
    bc_assert(first < k->seq.n && layer < k->n_layers);
    uint32_t count = BC_MIN(k->seq.n - first, (uint32_t)KEYS_SLICE);
    k->kn->ops->keys_read(k->kn, &k->seq, layer, first, count, k->slice);
    return count;
}

const float *keys_at(const struct keys *k, uint32_t i, uint32_t head)
{
    return k->slice + ((size_t)i * k->n_heads + head) * k->head_dim;
}

/* Eight sums side by side, so that a compiler may use vector registers without changing the order
 * of any sum. */
float keys_dot(const float *a, const float *b, uint32_t n)
{
    float lane[8] = {0};
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (uint32_t j = 0; j < 8; j++)
            lane[j] += a[i + j] * b[i + j];
    for (; i < n; i++)
        lane[0] += a[i] * b[i];
    return ((lane[0] + lane[1]) + (lane[2] + lane[3])) +
           ((lane[4] + lane[5]) + (lane[6] + lane[7]));
}
