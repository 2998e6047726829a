/* vec_avx2.c: row by row operations, compiled for avx2. */
#define CPU_ISA avx2
#include "simd_avx2.h"
#include "vec_body.h"
