/* isa.h: which instruction sets may be used: the processor has them and the system saves their
 * state. */
#ifndef BACKCAST_CPU_ISA_H
#define BACKCAST_CPU_ISA_H
#include <stdbool.h>

struct cpuid_features {
    bool avx2;        /* AVX2, FMA, F16C */
    bool avx512;      /* F, BW, VL, DQ and VNNI */
    bool avx512_bf16; /* avx512, and AVX512_BF16 */
    bool
        amx; /* avx512_bf16, and AMX tiles with 8-bit products; the system has yet to permit them: amx.h */
};

struct cpuid_features cpuid_read(void);
#endif
