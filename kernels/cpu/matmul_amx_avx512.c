/* matmul_amx_avx512.c: the AMX products on a processor that has it. */
#include "matmul_amx_body.h"

const struct matmul_kernels matmul_amx = {
    "amx-int8", q8_amx, floats_avx512, scales_avx512, quantise_avx512, begin, end};
