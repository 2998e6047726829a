/* kv.cuh: where a row lies in a page, and how a key or value is stored there: kn_kv_addr.h on the device, to the bit.
 *
 *   q8_0   | half d | 32 signed bytes | half d | ...     34 bytes a block: lines of less than 256 values begin at even
 *                                                        addresses only, runs of 64 of them at multiples of 16 */
#ifndef BACKCAST_KV_CUH
#define BACKCAST_KV_CUH
#include "backend.h"
#include "port.cuh"

#define Q8_VALUES 32u /* of a block, and its bytes */
#define Q8_BYTES 34u

/* Bytes of one key or value of d values. */
DEV uint32_t kv_line_bytes(uint32_t type, uint32_t d)
{
    return type == KN_F32 ? 4 * d : type == KN_Q8_0 ? d / Q8_VALUES * Q8_BYTES : 2 * d;
}

/* First byte of a page's run of 64 rows for (layer, part, head). part: 0 keys, 1 values. */
DEV uint8_t *kv_run(const struct dev_seq &s, uint32_t page, uint32_t layer, uint32_t part,
                    uint32_t head)
{
    size_t run = ((size_t)layer * 2 + part) * s.n_kv_heads + head;
    return s.base + page * s.stride + run * KN_PAGE_ROWS * kv_line_bytes(s.type, s.head_dim);
}

DEV uint8_t *kv_row(const struct dev_seq &s, uint32_t slot, uint32_t layer, uint32_t part,
                    uint32_t head)
{
    return kv_run(s, slot / KN_PAGE_ROWS, layer, part, head) +
           (size_t)(slot % KN_PAGE_ROWS) * kv_line_bytes(s.type, s.head_dim);
}

/* ---- values ---- */

/* Value i of a stored key or value. */
DEV float kv_value(uint32_t type, const uint8_t *line, uint32_t i)
{
    if (type == KN_F16)
        return h2f(((const half_t *)line)[i]);
    if (type == KN_F32)
        return ((const float *)line)[i];
    if (type == KN_BF16)
        return bf2f(((const uint16_t *)line)[i]);
    const uint8_t *block = line + i / Q8_VALUES * Q8_BYTES;
    return h2f(*(const half_t *)block) * (float)(int8_t)block[2 + i % Q8_VALUES];
}

/* One value to its place; not q8_0, whose values are stored by blocks. */
DEV void kv_value_put(uint32_t type, uint8_t *line, uint32_t i, float v)
{
    if (type == KN_F16)
        ((half_t *)line)[i] = f2h(v);
    else if (type == KN_F32)
        ((float *)line)[i] = v;
    else
        ((uint16_t *)line)[i] = f2bf(v);
}

/* Two neighbours as halves or bf16. */
DEV uint32_t kv_pair(uint32_t type, float lo, float hi)
{
    return type == KN_F16 ? pack2(lo, hi) : f2bf(lo) | (uint32_t)f2bf(hi) << 16;
}

/* A value as a signed byte of a block. */
DEV uint32_t q8_code(float x, float inverse)
{
    float q = rintf(x * inverse);
    q = q < 127.0f ? q : 127.0f;
    return (uint32_t)(int)(q > -127.0f ? q : -127.0f) & 255u;
}

/* d values to a line of q8_0, by a warp: four a lane, a block is eight lanes'. x: a multiple of 16 bytes. */
DEV void q8_line_put(const float *x, uint32_t d, uint8_t *line)
{
    for (uint32_t first = 0; first < d; first += 128) {
        uint32_t i = first + (uint32_t)lane_id() * 4;
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (i < d)
            v = *(const float4 *)(x + i);
        float top = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
#pragma unroll
        for (int o = 4; o; o >>= 1)
            top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, o));
        float quotient = top / 127.0f;
        half_t scale = f2h(quotient < 65504.0f ? quotient : 65504.0f);
        float inverse = (half_bits(scale) & 0x7fffu) == 0 ? 0.0f : 1.0f / h2f(scale);
        if (i >= d)
            continue;
        uint8_t *block = line + i / Q8_VALUES * Q8_BYTES;
        uint16_t *to = (uint16_t *)(block + 2 + i % Q8_VALUES);
        to[0] = (uint16_t)(q8_code(v.x, inverse) | q8_code(v.y, inverse) << 8);
        to[1] = (uint16_t)(q8_code(v.z, inverse) | q8_code(v.w, inverse) << 8);
        if (i % Q8_VALUES == 0)
            *(half_t *)block = scale;
    }
}

/* ---- hidden rows: f32 beside f32, else halves with a scale ---- */

DEV bool kv_hidden_is_half(const struct dev_seq &s)
{
    return s.type != KN_F32;
}

DEV uint8_t *kv_hidden(const struct dev_seq &s, uint32_t slot)
{
    return kv_run(s, slot / KN_PAGE_ROWS, s.n_layers, 0, 0) +
           (size_t)(slot % KN_PAGE_ROWS) * s.d_hidden * (kv_hidden_is_half(s) ? 2 : 4);
}

/* Four values of a stored hidden row (16 or 8 bytes, aligned where d_hidden is a multiple of 4). */
DEV float4 kv_hidden4(const struct dev_seq &s, const uint8_t *row, uint32_t i, float scale)
{
    if (!kv_hidden_is_half(s))
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

/* The power of two that brings a row's largest magnitude to [2^14, 2^15), and its inverse: kn_kv_scale_for. */
DEV float row_scale_for(float max_abs)
{
    uint32_t e = __float_as_uint(max_abs) >> 23 & 255u;
    uint32_t s = e == 255 ? 127 : e < 15 ? 1 : e - 14;
    return __uint_as_float(s << 23);
}
DEV float power_inverse(float power)
{
    return __uint_as_float((254u << 23) - __float_as_uint(power));
}
#endif
