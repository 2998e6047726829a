/* matmul_amx_avx512.c: the AMX products on a processor that has it. */
#include "matmul_amx_body.h"
#include "matmul_bf16.h"

const struct matmul_kernels matmul_amx = {.name = "amx-int8",
                                          .q8 = q8_amx,
                                          .floats = floats_bf16,
                                          .scales = scales_avx512,
                                          .quantise = quantise_avx512,
                                          .quantise_wide = quantise_wide_avx512,
                                          .pairs = pairs_bf16,
                                          .begin = begin,
                                          .end = end};
