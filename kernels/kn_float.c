/* kn_float.c: half and bfloat16 to and from f32, in integer arithmetic: the same bits on every
 * machine.
 *
 *   f16   s eeeee mmmmmmmmmm              bias 15
 *   bf16  s eeeeeeee mmmmmmm              the upper half of an f32
 *   f32   s eeeeeeee mmmmmmmmmmmmmmmmmmmmmmm  bias 127 */
#include "kn_quant.h"
#include <string.h>

static uint32_t bits_of(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

static float float_of(uint32_t u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}

float kn_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest >= 0x7c00) /* infinity; NaN keeps its payload and becomes quiet */
        return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13 | (rest > 0x7c00 ? 0x400000 : 0));
    if (rest < 0x400) /* zero and subnormals: m * 2^-24, exact */
        return float_of(sign | bits_of((float)rest * 0x1p-24f));
    return float_of(sign | ((rest << 13) + ((127 - 15) << 23)));
}

uint16_t kn_f32_to_f16(float f)
{
    uint32_t u = bits_of(f), sign = u >> 16 & 0x8000, rest = u & 0x7fffffff;
    if (rest > 0x7f800000) /* NaN: payload's upper bits, quiet */
        return (uint16_t)(sign | 0x7e00 | (rest >> 13 & 0x3ff));
    if (rest >= 0x477ff000) /* 65520 and above round to infinity */
        return (uint16_t)(sign | 0x7c00);
    if (rest <
        0x38800000) { /* below 2^-14: the f32 adder rounds to multiples of 2^-24, nearest even */
        uint32_t m = bits_of(float_of(rest) + 0.5f) - bits_of(0.5f);
        return (uint16_t)(sign | m);
    }
    uint32_t odd = rest >> 13 & 1;
    return (uint16_t)(sign | ((rest - ((127 - 15) << 23) + 0xfff + odd) >> 13));
}

float kn_bf16_to_f32(uint16_t h)
{
    return float_of((uint32_t)h << 16);
}

uint16_t kn_f32_to_bf16(float f)
{
    uint32_t u = bits_of(f);
    if ((u & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
