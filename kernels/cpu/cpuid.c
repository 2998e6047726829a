/* cpuid.c: CPUID says what the processor can do, XGETBV (XCR0) which registers the system saves at
 * a context switch. Both are needed: a flag alone can be set under a kernel that does not save ZMM.
 *
 *   leaf 1       ecx  12 FMA  27 OSXSAVE  28 AVX  29 F16C
 *   leaf 7.0     ebx   5 AVX2  16 AVX512F  17 DQ  30 BW  31 VL      ecx  11 VNNI
 *                edx  24 AMX-TILE  25 AMX-INT8
 *   leaf 7.1     eax   5 AVX512_BF16
 *   XCR0         bits 1 XMM, 2 YMM, 5 mask registers, 6 upper halves of ZMM0-15, 7 ZMM16-31, 17 tile configuration,
 *                18 tiles */
#include "isa.h"
#include <cpuid.h>
#include <stdint.h>

#define XCR0_AVX 0x06u
#define XCR0_AVX512 0xe6u
#define XCR0_AMX 0x600e6u

static uint64_t xcr0_read(void)
{
    uint32_t lo, hi;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return (uint64_t)hi << 32 | lo;
}

static bool bits_set(unsigned reg, unsigned mask)
{
    return (reg & mask) == mask;
}

struct cpuid_features cpuid_read(void)
{
    struct cpuid_features f = {false, false, false, false};
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !bits_set(c, 1u << 12 | 1u << 27 | 1u << 28 | 1u << 29))
        return f;
    uint64_t xcr0 = xcr0_read();
    if ((xcr0 & XCR0_AVX) != XCR0_AVX || !__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return f;
    f.avx2 = bits_set(b, 1u << 5);
    f.avx512 = f.avx2 && (xcr0 & XCR0_AVX512) == XCR0_AVX512 &&
               bits_set(b, 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31) && bits_set(c, 1u << 11);
    bool amx = (xcr0 & XCR0_AMX) == XCR0_AMX && bits_set(d, 1u << 24 | 1u << 25);
    unsigned last = a; /* sub-leaf */
    f.avx512_bf16 =
        f.avx512 && last >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && bits_set(a, 1u << 5);
    f.amx = f.avx512_bf16 && amx; /* no processor has tiles alone */
    return f;
}
