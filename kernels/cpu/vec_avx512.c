/* vec_avx512.c: row by row operations, compiled for avx512. */
#define CPU_ISA avx512
#include "simd_avx512.h"
#include "vec_body.h"
