/* matmul_bf16.h: the bf16 dot product of AVX512_BF16, and what the tables that use it need. VDPBF16PS takes no notice of MXCSR:
 *
 *     acc  = fma(w[2k + 1], x[2k + 1], acc)       the odd column first; nearest even
 *     acc  = fma(w[2k],     x[2k],     acc)       subnormal inputs and results are zeros
 *
 * A product of two bf16 is exact, so each of the two steps rounds once. pair_model is the same in plain C, to the bit. */
#ifndef BACKCAST_MATMUL_BF16_H
#define BACKCAST_MATMUL_BF16_H
#include <math.h>
#include "kernels.h"

void floats_bf16(const struct float_tile *t);
void pairs_bf16(const float *x, uint32_t cols, uint32_t *to);

static inline float pair_flush(float f)
{
    return fpclassify(f) == FP_SUBNORMAL ? copysignf(0.0f, f) : f;
}

/* One column: both numbers are bf16 in f32. */
static inline float pair_model_step(float acc, float w, float x)
{
    return pair_flush(fmaf(pair_flush(w), pair_flush(x), pair_flush(acc)));
}

static inline float pair_model(float acc, const float w[2], const float x[2])
{
    return pair_model_step(pair_model_step(acc, w[1], x[1]), w[0], x[0]);
}
#endif
