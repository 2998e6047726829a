/* kv.cuh: where a row lies in a page: kn_kv_addr.h on the device. */
#ifndef BACKCAST_KV_CUH
#define BACKCAST_KV_CUH
#include "backend.h"
#include "port.cuh"

DEV size_t kv_elem(const struct dev_seq &s)
{
    return s.is_half ? 2 : 4;
}

/* First byte of a page's run of 64 rows for (layer, part, head). part: 0 keys, 1 values. */
DEV uint8_t *kv_run(const struct dev_seq &s, uint32_t page, uint32_t layer, uint32_t part,
                    uint32_t head)
{
    size_t run = ((size_t)layer * 2 + part) * s.n_kv_heads + head;
    return s.base + page * s.stride + run * KN_PAGE_ROWS * s.head_dim * kv_elem(s);
}

DEV uint8_t *kv_row(const struct dev_seq &s, uint32_t slot, uint32_t layer, uint32_t part,
                    uint32_t head)
{
    return kv_run(s, slot / KN_PAGE_ROWS, layer, part, head) +
           (size_t)(slot % KN_PAGE_ROWS) * s.head_dim * kv_elem(s);
}

DEV uint8_t *kv_hidden(const struct dev_seq &s, uint32_t slot)
{
    return kv_run(s, slot / KN_PAGE_ROWS, s.n_layers, 0, 0) +
           (size_t)(slot % KN_PAGE_ROWS) * s.d_hidden * kv_elem(s);
}

/* Four values of a stored hidden row (16 or 8 bytes, aligned where d_hidden is a multiple of 4). */
DEV float4 kv_hidden4(const struct dev_seq &s, const uint8_t *row, uint32_t i, float scale)
{
    if (!s.is_half)
        return ((const float4 *)row)[i];
    uint2 w = ((const uint2 *)row)[i];
    float2 lo = unpack2(w.x), hi = unpack2(w.y);
    return make_float4(lo.x * scale, lo.y * scale, hi.x * scale, hi.y * scale);
}

/* Halves only. */
DEV float *kv_hidden_scale(const struct dev_seq &s, uint32_t slot)
{
    uint8_t *rows = kv_run(s, slot / KN_PAGE_ROWS, s.n_layers, 0, 0);
    return (float *)(rows + (size_t)KN_PAGE_ROWS * s.d_hidden * 2) + slot % KN_PAGE_ROWS;
}
#endif
