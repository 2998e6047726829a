/* matmul_amx_model_avx512.c: the same kernel over the exact model of tiles: for tests on machines without AMX, and
 * taken only by name. */
#define TILES_MODEL
#include "matmul_amx_body.h"

const struct matmul_kernels matmul_amx_model = {.name = "amx-model",
                                                .q8 = q8_amx,
                                                .floats = floats_avx512,
                                                .scales = scales_avx512,
                                                .quantise = quantise_avx512,
                                                .quantise_wide = quantise_wide_avx512,
                                                .begin = begin,
                                                .end = end};
