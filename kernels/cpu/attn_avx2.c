/* attn_avx2.c: attention over tiles, compiled for avx2. */
#define CPU_ISA avx2
#include "simd_avx2.h"
#include "attn_body.h"
