/* math.cc: half conversions for machines without the instructions. */
#include "simt.h"

namespace simt
{

float half_to_float(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16, exponent = bits >> 10 & 31u;
    uint32_t fraction = bits & 1023u;
    if (exponent == 0) { /* zero or denormal: fraction * 2^-24 */
        float f = (float)fraction * 0x1p-24f;
        return sign ? -f : f;
    }
    uint32_t u = exponent == 31 ? sign | 0x7f800000u | fraction << 13
                                : sign | (exponent + 112) << 23 | fraction << 13;
    if (exponent == 31 && fraction)
        u |= 0x400000u; /* quiet */
    return simt_bits<float>(u);
}

uint16_t float_to_half(float f)
{
    uint32_t u = simt_bits<uint32_t>(f), sign = u >> 16 & 0x8000u, mag = u & 0x7fffffffu;
    if (mag > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | (mag >> 13 & 0x1ffu));
    if (mag >= 0x477ff000u) /* rounds to 65536 or more */
        return (uint16_t)(sign | 0x7c00u);
    if (mag < 0x38800000u) { /* below 2^-14: steps of 2^-24; the sum's last bit is worth that */
        float shifted = simt_bits<float>(mag) + 0.5f;
        return (uint16_t)(sign | (simt_bits<uint32_t>(shifted) - 0x3f000000u));
    }
    uint32_t rounded = mag + 0xfffu + (mag >> 13 & 1u);
    return (uint16_t)(sign | (rounded - 0x38000000u) >> 13);
}

} // namespace simt
