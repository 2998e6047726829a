/* cuda_fp16.h: halves as the shim's kernels see them: storage and conversions, all rounding to nearest even. */
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif
#include "vector_types.h"

struct __half {
    uint16_t bits;
};
struct alignas(4) __half2 {
    __half x, y;
};
typedef __half half;
typedef __half2 half2;

namespace simt
{
float half_to_float(uint16_t bits); /* for machines without the instruction: math.cc */
uint16_t float_to_half(float f);
} // namespace simt

static inline float __half2float(__half h)
{
#if defined(__F16C__)
    return _cvtsh_ss(h.bits);
#else
    return simt::half_to_float(h.bits);
#endif
}
static inline __half __float2half_rn(float f)
{
#if defined(__F16C__)
    return __half{(uint16_t)_cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT)};
#else
    return __half{simt::float_to_half(f)};
#endif
}
static inline __half __float2half(float f)
{
    return __float2half_rn(f);
}
static inline uint16_t __half_as_ushort(__half h)
{
    return h.bits;
}
static inline __half __ushort_as_half(uint16_t bits)
{
    return __half{bits};
}
static inline __half2 __floats2half2_rn(float x, float y)
{
    return __half2{__float2half_rn(x), __float2half_rn(y)};
}
static inline float2 __half22float2(__half2 h)
{
    return make_float2(__half2float(h.x), __half2float(h.y));
}
static inline float __low2float(__half2 h)
{
    return __half2float(h.x);
}
static inline float __high2float(__half2 h)
{
    return __half2float(h.y);
}
