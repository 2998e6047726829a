/* attn_scalar.c: attention over tiles, compiled for scalar. */
#define CPU_ISA scalar
#include "simd_scalar.h"
#include "attn_body.h"
