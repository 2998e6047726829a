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

/* Halves only. */
DEV float *kv_hidden_scale(const struct dev_seq &s, uint32_t slot)
{
    uint8_t *rows = kv_run(s, slot / KN_PAGE_ROWS, s.n_layers, 0, 0);
    return (float *)(rows + (size_t)KN_PAGE_ROWS * s.d_hidden * 2) + slot % KN_PAGE_ROWS;
}
#endif
