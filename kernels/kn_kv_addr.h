/* kn_kv_addr.h: where a row lies in a page, for backends whose device memory is ordinary memory.
 * The layout is kn.h's; a GPU backend keeps the same one with its own code.
 *
 *   page    = base + (slot / 64) * stride                row = slot % 64
 *   +-----------------------------------------------+--------------------+-----------------+
 *   | [layer][K | V][kv head][64 rows][head_dim]    | [64][d_hidden]     | [64] f32 scales |
 *   +-----------------------------------------------+--------------------+-----------------+
 *     elements of kv->type (f32 or f16)               d_hidden > 0 only    and KV f16 only
 *
 * A hidden row stored as halves is x / scale with a power of two as scale, so that residual streams
 * beyond 65504 fit and the division loses nothing: the only rounding is that of the half. */
#ifndef BACKCAST_KN_KV_ADDR_H
#define BACKCAST_KN_KV_ADDR_H
#include <string.h>
#include "kn.h"

enum kn_kv_part { KN_KV_K = 0, KN_KV_V = 1 };

static inline size_t kn_kv_elem(const struct kn_kv *kv)
{
    return kv->type == KN_F32 ? 4 : 2;
}

/* First row of a page's run of 64 for (layer, part, head); row i is i * head_dim elements further.
 */
static inline void *kn_kv_run(const struct kn_kv *kv, uint32_t page, uint32_t layer,
                              enum kn_kv_part part, uint32_t head)
{
    size_t run = ((size_t)layer * 2 + part) * kv->n_kv_heads + head;
    return (uint8_t *)kv->base + page * kv->stride +
           run * KN_PAGE_ROWS * kv->head_dim * kn_kv_elem(kv);
}

/* The key or value of one slot: [head_dim] elements. */
static inline void *kn_kv_row(const struct kn_kv *kv, uint32_t slot, uint32_t layer,
                              enum kn_kv_part part, uint32_t head)
{
    return (uint8_t *)kn_kv_run(kv, slot / KN_PAGE_ROWS, layer, part, head) +
           (size_t)(slot % KN_PAGE_ROWS) * kv->head_dim * kn_kv_elem(kv);
}

/* The hidden row of one slot: [d_hidden] elements. */
static inline void *kn_kv_hidden(const struct kn_kv *kv, uint32_t slot)
{
    return (uint8_t *)kn_kv_run(kv, slot / KN_PAGE_ROWS, kv->n_layers, KN_KV_K, 0) +
           (size_t)(slot % KN_PAGE_ROWS) * kv->d_hidden * kn_kv_elem(kv);
}

/* Its scale (f16 KV only). */
static inline float *kn_kv_hidden_scale(const struct kn_kv *kv, uint32_t slot)
{
    uint8_t *rows = kn_kv_run(kv, slot / KN_PAGE_ROWS, kv->n_layers, KN_KV_K, 0);
    return (float *)(rows + (size_t)KN_PAGE_ROWS * kv->d_hidden * 2) + slot % KN_PAGE_ROWS;
}

/* The power of two that brings a row with this largest magnitude to [2^14, 2^15); the smallest
 * normal number for rows of zeros or near it (x / scale is then just smaller); 1 if the row is not
 * finite. Its inverse is exact. */
static inline float kn_kv_scale_for(float max_abs)
{
    uint32_t bits;
    memcpy(&bits, &max_abs, 4);
    uint32_t e = bits >> 23 & 255;
    uint32_t s = e == 255 ? 127 : e < 15 ? 1 : e - 14;
    bits = s << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return scale;
}
#endif
