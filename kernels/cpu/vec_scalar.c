/* vec_scalar.c: row by row operations, compiled for scalar. */
#define CPU_ISA scalar
#include "simd_scalar.h"
#include "vec_body.h"
