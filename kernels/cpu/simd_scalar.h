/* simd_scalar.h: the operations that attn_body.h and vec_body.h are written in, one lane. */
#ifndef BACKCAST_SIMD_SCALAR_H
#define BACKCAST_SIMD_SCALAR_H
#include <math.h>
#include <stdint.h>
#include <string.h>
#include "kn_quant.h"

#define VF_N 1
#define SIMD_QUERIES 2
#define SIMD_TURN_MAX 2
#define SIMD_KEYS 1
typedef float vf;

static inline vf vf_load(const float *p)
{
    return *p;
}
static inline void vf_store(float *p, vf v)
{
    *p = v;
}
static inline vf vf_set1(float f)
{
    return f;
}
static inline vf vf_add(vf a, vf b)
{
    return a + b;
}
static inline vf vf_sub(vf a, vf b)
{
    return a - b;
}
static inline vf vf_mul(vf a, vf b)
{
    return a * b;
}
static inline vf vf_div(vf a, vf b)
{
    return a / b;
}
/* a product and a sum: fma() is a slow library call where the processor has none */
static inline vf vf_fma(vf a, vf b, vf c)
{
    return a * b + c;
}
static inline vf vf_max(vf a, vf b)
{
    return a > b ? a : b;
}
static inline vf vf_min(vf a, vf b)
{
    return a < b ? a : b;
}
static inline vf vf_abs(vf a)
{
    return fabsf(a);
}
static inline vf vf_round(vf a)
{
    return rintf(a);
}
static inline vf vf_scale2(vf a, vf n)
{
    return n == n ? ldexpf(a, (int)n) : n;
}
static inline vf vf_load_half(const uint16_t *p)
{
    return kn_f16_to_f32(*p);
}
static inline void vf_store_half(uint16_t *p, vf v)
{
    *p = kn_f32_to_f16(v);
}
static inline vf vf_set1_half(const void *p)
{
    uint16_t h;
    memcpy(&h, p, sizeof h);
    return kn_f16_to_f32(h);
}
static inline vf vf_load_bf16(const uint16_t *p)
{
    return kn_bf16_to_f32(*p);
}
static inline void vf_store_bf16(uint16_t *p, vf v)
{
    *p = kn_f32_to_bf16(v);
}
static inline vf vf_load_bytes(const int8_t *p)
{
    return *p;
}
/* codes of 4 bits, the low halves of bytes (shift 0) or the high ones (4), less 8 */
static inline vf vf_load_codes(const uint8_t *p, uint32_t shift)
{
    return (float)((int)(*p >> shift & 15) - 8);
}
/* v integral, -128 .. 127 */
static inline void vf_store_bytes(int8_t *p, vf v)
{
    *p = (int8_t)v;
}
static inline float vf_sum(vf v)
{
    return v;
}
static inline float vf_top(vf v)
{
    return v;
}
static inline void vf_transpose(vf r[1])
{
    (void)r;
}
static inline void vf_turn(vf r[1])
{
    (void)r;
}
static inline vf vf_spread(vf v, int i)
{
    (void)i;
    return v;
}
static inline vf vf_fold(const vf r[1])
{
    return r[0];
}

#include "simd_math.h"
#endif
