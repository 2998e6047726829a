/* matmul_amx_model_avx512.c: the same kernel over the exact model of tiles: for tests on machines without AMX, and
 * taken only by name. */
#define TILES_MODEL
#include "matmul_amx_body.h"

const struct matmul_kernels matmul_amx_model = {
    "amx-model", q8_amx, floats_avx512, scales_avx512, quantise_avx512, begin, end};
