/* narrow.cuh: f32 activations in the 16 bits that tensor cores multiply, and the gate, which several kernels apply. Halves overflow beyond 65504, so all of an input is
 * divided by one power of two and the products are multiplied by it; bf16 has f32's range. */
#ifndef BACKCAST_NARROW_CUH
#define BACKCAST_NARROW_CUH
#include "port.cuh"

#define HALF_SAFE 32768.0f /* magnitudes below it are not divided */

DEV float largest4(float4 v)
{
    return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}

/* The power of two for a largest magnitude (or a bound of it), given as its bits; 1 for what is not finite. */
DEV float half_scale(uint32_t largest_bits)
{
    uint32_t e = largest_bits >> 23;
    return e < 142 || e == 255 ? 1.0f : __uint_as_float((e - 141 + 127) << 23);
}

template <bool BF16> DEV uint32_t narrow2(float lo, float hi, float inverse)
{
    return BF16 ? (f2bf(lo) | (uint32_t)f2bf(hi) << 16) : pack2(lo * inverse, hi * inverse);
}

template <bool BF16> DEV uint2 narrow4(float4 v, float inverse)
{
    return make_uint2(narrow2<BF16>(v.x, v.y, inverse), narrow2<BF16>(v.z, v.w, inverse));
}

DEV float gated(float g, float u)
{
    return g / (1.0f + expf(-g)) * u;
}
DEV float4 gated4(float4 g, float4 u)
{
    return make_float4(gated(g.x, u.x), gated(g.y, u.y), gated(g.z, u.z), gated(g.w, u.w));
}
#endif
