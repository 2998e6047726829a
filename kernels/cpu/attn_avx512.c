/* attn_avx512.c: attention over tiles, compiled for avx512. */
#define CPU_ISA avx512
#include "simd_avx512.h"
#include "attn_body.h"
