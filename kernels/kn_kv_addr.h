/* kn_kv_addr.h: where a row lies in a page, for backends whose device memory is ordinary memory.
 * The layout is kn.h's; a GPU backend keeps the same one with its own code.
 *
 *   page    = base + (slot / 64) * stride                row = slot % 64
 *   +-----------------------------------------------+--------------------+-----------------+
 *   | [layer][K | V][kv head][64 rows][head_dim]    | [64][d_hidden]     | [64] f32 scales |
 *   +-----------------------------------------------+--------------------+-----------------+
 *     lines of kv->type                               f32 with f32 KV,     with f16 hidden
 *                                                     else f16             rows only
 *
 * A line is one key or value, [head_dim]. One of q8_0 or q4_0 is a block after the other, without padding:
 *
 *   | d: half | 32 signed bytes |                     value i = d * byte i             34 bytes
 *   | d: half | 16 bytes, two codes each |            value i = d * (code i - 8)       18 bytes
 *                 low halves: codes 0 .. 15, high halves: codes 16 .. 31
 *
 * A page of q8_q4 has a key's value right behind it, so that here, too, one number leads from any key to its value:
 *
 *   [layer][kv head][64 rows] of | key: q8_0 | value: q4_0, of dims turned by kn_hadamard.h |
 *
 * A hidden row stored as halves is x / scale with a power of two as scale, so that residual streams
 * beyond 65504 fit and the division loses nothing: the only rounding is that of the half. */
#ifndef BACKCAST_KN_KV_ADDR_H
#define BACKCAST_KN_KV_ADDR_H
#include <math.h>
#include <string.h>
#include "kn.h"

enum kn_kv_part { KN_KV_K = 0, KN_KV_V = 1 };

#define KN_KV_Q8 32       /* values of a q8_0 block, and of a q4_0 block */
#define KN_KV_Q8_BYTES 34 /* its bytes */
#define KN_KV_Q4_BYTES 18

/* What the lines of pages of that type are: q8_0 for the keys of q8_q4, q4_0 for its values. */
static inline enum kn_type kn_kv_line_type(enum kn_type type, enum kn_kv_part part)
{
    return type != KN_Q8_Q4 ? type : part == KN_KV_K ? KN_Q8_0 : KN_Q4_0;
}

/* Whether values are turned by kn_hadamard.h before they are stored. */
static inline bool kn_kv_hadamard(enum kn_type type)
{
    return type == KN_Q8_Q4;
}

/* n values of a line. */
static inline size_t kn_kv_values_bytes(enum kn_type line, size_t n)
{
    return line == KN_F32    ? 4 * n
           : line == KN_Q8_0 ? n / KN_KV_Q8 * KN_KV_Q8_BYTES
           : line == KN_Q4_0 ? n / KN_KV_Q8 * KN_KV_Q4_BYTES
                             : 2 * n;
}

/* Bytes of one key or value. */
static inline size_t kn_kv_line_bytes(const struct kn_kv *kv, enum kn_kv_part part)
{
    return kn_kv_values_bytes(kn_kv_line_type(kv->type, part), kv->head_dim);
}

/* Bytes from a row's key to the next row's, or from value to value. */
static inline size_t kn_kv_step(const struct kn_kv *kv)
{
    size_t key = kn_kv_line_bytes(kv, KN_KV_K);
    return kv->type == KN_Q8_Q4 ? key + kn_kv_line_bytes(kv, KN_KV_V) : key;
}

/* Hidden rows are f32 beside f32 keys and values; else halves with a scale. */
static inline bool kn_kv_hidden_scaled(const struct kn_kv *kv)
{
    return kv->type != KN_F32;
}

/* Bytes of one hidden row, without its scale. */
static inline size_t kn_kv_hidden_bytes(const struct kn_kv *kv)
{
    return (size_t)kv->d_hidden * (kn_kv_hidden_scaled(kv) ? 2 : 4);
}

/* First row of a page's run of 64 for (layer, part, head); row i is i steps further. */
static inline void *kn_kv_run(const struct kn_kv *kv, uint32_t page, uint32_t layer,
                              enum kn_kv_part part, uint32_t head)
{
    uint8_t *at = (uint8_t *)kv->base + page * kv->stride;
    if (kv->type == KN_Q8_Q4)
        return at + ((size_t)layer * kv->n_kv_heads + head) * KN_PAGE_ROWS * kn_kv_step(kv) +
               (part == KN_KV_V ? kn_kv_line_bytes(kv, KN_KV_K) : 0);
    size_t run = ((size_t)layer * 2 + part) * kv->n_kv_heads + head;
    return at + run * KN_PAGE_ROWS * kn_kv_step(kv);
}

/* The key or value of one slot: [head_dim] values. */
static inline void *kn_kv_row(const struct kn_kv *kv, uint32_t slot, uint32_t layer,
                              enum kn_kv_part part, uint32_t head)
{
    return (uint8_t *)kn_kv_run(kv, slot / KN_PAGE_ROWS, layer, part, head) +
           (size_t)(slot % KN_PAGE_ROWS) * kn_kv_step(kv);
}

/* The hidden row of one slot: [d_hidden] elements. */
static inline void *kn_kv_hidden(const struct kn_kv *kv, uint32_t slot)
{
    return (uint8_t *)kn_kv_run(kv, slot / KN_PAGE_ROWS, kv->n_layers, KN_KV_K, 0) +
           (size_t)(slot % KN_PAGE_ROWS) * kn_kv_hidden_bytes(kv);
}

/* Its scale (where kn_kv_hidden_scaled). */
static inline float *kn_kv_hidden_scale(const struct kn_kv *kv, uint32_t slot)
{
    uint8_t *rows = kn_kv_run(kv, slot / KN_PAGE_ROWS, kv->n_layers, KN_KV_K, 0);
    return (float *)(rows + KN_PAGE_ROWS * kn_kv_hidden_bytes(kv)) + slot % KN_PAGE_ROWS;
}

/* The half that scales a q8_0 block whose largest magnitude is max_abs; values beyond what a half
 * can scale are cut off. */
static inline uint16_t kn_kv_q8_scale(float max_abs)
{
    float d = max_abs / 127.0f;
    return kn_f32_to_f16(d < 65504.0f ? d : 65504.0f);
}

/* What x is multiplied by before it is rounded to nearest even and cut to -127 .. 127. */
static inline float kn_kv_q8_inverse(uint16_t scale)
{
    return (scale & 0x7fff) == 0 ? 0.0f : 1.0f / kn_f16_to_f32(scale);
}

/* One block. Every backend that quantises gives these bytes, for finite x. */
static inline void kn_kv_q8_put(const float *x, uint8_t *ret)
{
    float top = 0.0f;
    for (int i = 0; i < KN_KV_Q8; i++)
        top = fmaxf(top, fabsf(x[i]));
    uint16_t scale = kn_kv_q8_scale(top);
    float inverse = kn_kv_q8_inverse(scale);
    memcpy(ret, &scale, sizeof scale);
    for (int i = 0; i < KN_KV_Q8; i++) {
        float q = rintf(x[i] * inverse);
        q = q < 127.0f ? q : 127.0f;
        ret[2 + i] = (uint8_t)(int8_t)(q > -127.0f ? q : -127.0f);
    }
}

/* The half that scales a q4_0 block from least to most: whichever is farther from 0 becomes code 0, which is -8. */
static inline uint16_t kn_kv_q4_scale(float least, float most)
{
    float d = (most > -least ? most : least) / -8.0f;
    return kn_f32_to_f16(d > 65504.0f ? 65504.0f : d < -65504.0f ? -65504.0f : d);
}

/* One block: codes are rounded to nearest even and cut to 0 .. 15. What has been said of kn_kv_q8_put. */
static inline void kn_kv_q4_put(const float *x, uint8_t *ret)
{
    float least = 0.0f, most = 0.0f, code[KN_KV_Q8];
    for (int i = 0; i < KN_KV_Q8; i++) {
        least = fminf(least, x[i]);
        most = fmaxf(most, x[i]);
    }
    uint16_t scale = kn_kv_q4_scale(least, most);
    float inverse = kn_kv_q8_inverse(scale);
    memcpy(ret, &scale, sizeof scale);
    for (int i = 0; i < KN_KV_Q8; i++)
        code[i] = fminf(fmaxf(rintf(x[i] * inverse) + 8.0f, 0.0f), 15.0f);
    for (int i = 0; i < KN_KV_Q8 / 2; i++)
        ret[2 + i] = (uint8_t)((int)code[i] | (int)code[i + KN_KV_Q8 / 2] << 4);
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
