/* kn_int8.h: the one integer arithmetic of quantised weights. Every backend that multiplies
 * quantised weights with 8-bit activations gives these bits exactly: kn_ref_linear_q8 is the plain
 * form, and tests/kernels compares the fast ones with it bit for bit. With 16-bit activations it is
 * the same rule with finer codes (4., kn_ref_linear_q16).
 *
 * 1. Activations. A row x of `cols` finite floats is cut in 32-blocks. Per block, all in f32:
 *
 *      amax  = max |x_i|
 *      amax < 2^-100:  da = 0, a_i = 0          (a block of zeros; keeps 127 / amax finite)
 *      else:           da = amax / 127          (one division)
 *                      a_i = rne(x_i * (127 / amax))   (one division, one product each, nearest
 * even; lies in -127..127, never -128)
 *
 *    and for formats with a minimum, per SUB-block (below) the exact integer sum asum = sum of a_i
 * and sa = da * (float)asum                    (one product)
 *
 * 2. Weights. Every format is, per 32-block, 32 unsigned codes u_i, one constant `zero` of the
 * format, and per sub-block (one of 32 values, or two of 16: n_sub) a scale D and, with has_min, an
 * offset M:
 *
 *      w_i = D * (u_i - zero) + M
 *
 *      format       codes          zero  n_sub  D                    M
 *      Q8_0         byte + 128      128    1    d                    -
 *      Q4_0         4 bits            8    1    d                    -
 *      Q5_0         5 bits           16    1    d                    -
 *      IQ4_NL       table + 128     128    1    d                    -
 *      IQ4_XS       table + 128     128    1    d * (scale - 32)     -
 *      Q4_1, Q5_1   4, 5 bits         0    1    d                    m
 *      Q4_K, Q5_K   4, 5 bits         0    1    d * scale            -(dmin * min)
 *      Q2_K         2 bits            0    2    d * scale            -(dmin * min)
 *      Q3_K         3 bits            4    2    d * (scale - 32)     -
 *      Q6_K         6 bits           32    2    d * scale            -
 *
 *    d, dmin, m are halves of the file and the small integers have at most 8 bits: D and M are
 * exact in f32, so it does not matter when or how they are computed. Of -(0 * 0) only the value
 * matters: the accumulator below never is -0 (it starts as +0, and a sum that rounds to zero is +0
 * unless both terms are -0).
 *
 * 3. One output. acc starts as +0.0f; blocks ascending, sub-blocks ascending inside a block:
 *
 *      isum = sum over the sub-block of (u_i - zero) * a_i      (exact; |isum| < 2^20)
 *      s    = D * da                                            (f32 product, rounded)
 *      acc  = fma(s, (float)isum, acc)
 *      with has_min:
 *      acc  = fma(M, sa, acc)
 *
 *    Then t = acc; if there is a bias, t = t + bias; the output is t, or out + t when adding.
 *
 * How this maps to hardware: lanes are outputs; u_i are the unsigned operand of VPDPBUSD /
 * VPMADDUBSW / TDPBUSD and a_i the signed one; -zero * asum is the starting value of the int32
 * accumulator (a broadcast: it depends on the row and the block only). VPMADDUBSW saturates above
 * 15 bits: with |a| <= 127 it is exact for u <= 128; for the 128-biased formats use |w| and sign(a,
 * w) instead (isum is an exact integer: any way to it is fine).
 *
 * 4. Activations of 16 bits. 32512 = 256 * 127 takes the place of 127, and nothing else changes:
 *
 *      da   = amax / 32512
 *      a_i  = rne(x_i * (32512 / amax))     (lies in -32512..32512)
 *      isum = sum of (u_i - zero) * a_i     (exact in int32: |isum| < 2^27; (float)isum rounds to
 *                                            nearest even)
 *      asum = sum of a_i                    (|asum| < 2^21: exact as a float)
 *
 *    Every such a_i is 255 * hi + lo with hi and lo in -127..127, in one way only. So a product of
 * bytes computes it in two halves, isum = 255 * sum of (u_i - zero) * hi_i + sum of (u_i - zero) *
 * lo_i, each exact and each with the operands of rule 3: neither half is ever -128, so what is said
 * below of saturation holds for both. (With base 256, lo would have to be -128 at times.)
 *
 * linear, row_logit and row_lse of a quantised weight all take these values (so a logit is the same
 * number from each of them); embed expands exactly as kn_dequant does. F32, F16 and BF16 weights do
 * not come here: they are widened exactly and summed in f32, ascending k (fused where the ISA has
 * it), bias and add treated the same; only where VDPBF16PS is used (cpu/matmul_bf16.h) activations are
 * rounded to bf16 for BF16 weights. */
#ifndef BACKCAST_KN_INT8_H
#define BACKCAST_KN_INT8_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "kn.h"

#define KN_INT8_BLOCK 32
#define KN_INT8_AMAX_MIN 0x1p-100f
#define KN_INT8_MAX 127
#define KN_INT16_MAX 32512 /* KN_INT16_BASE * 127 + 127 */
#define KN_INT16_BASE 255

/* The constants of one format. */
struct kn_int8_format {
    enum kn_type type;
    uint8_t code_bits; /* of the file: what a packed layout needs (4 for IQ4_*, whose codes pass a
                          table) */
    uint8_t zero;
    uint8_t n_sub; /* 1 or 2 */
    bool has_min;
    const int8_t
        *table; /* [16] for IQ4_*: u = table[code] + 128; else NULL, u = code (Q8_0: byte + 128) */
};

/* One 32-block of weights, taken apart. d[1] and m[1] are 0 if n_sub is 1; m is 0 without has_min.
 * Behind D and M stand the file's own numbers, for packed layouts that keep them: D = half(half_d)
 * * scale, M = half(half_m) in formats of 32 values, -(half(half_m) * min) in those of 256. */
struct kn_int8_block {
    uint8_t u[KN_INT8_BLOCK];
    float d[2], m[2];
    uint16_t half_d, half_m;
    int8_t scale[2]; /* 1 in formats of 32 values */
    uint8_t min[2];
};

/* NULL for F32, F16, BF16 and I32. */
const struct kn_int8_format *kn_int8_format(enum kn_type type);

/* Takes apart the 32-blocks first .. first + n - 1 of one packed matrix row. */
void kn_int8_unpack(enum kn_type type, const void *row, uint32_t first, uint32_t n,
                    struct kn_int8_block *ret);

/* Rule 1 for one row: a [cols], da [cols / 32], asum [cols / 16] (exact sums of 16-halves). cols %
 * 32 == 0. */
void kn_int8_quantise(const float *x, uint32_t cols, int8_t *a, float *da, int16_t *asum);

/* The same by rule 4. */
void kn_int16_quantise(const float *x, uint32_t cols, int16_t *a, float *da, int32_t *asum);

/* A code of rule 4 as its two bytes. */
static inline int8_t kn_int16_high(int a)
{
    return (int8_t)((a + 127 + 255 * 128) / 255 - 128); /* floor((a + 127) / 255) */
}
static inline int8_t kn_int16_low(int a)
{
    return (int8_t)(a - KN_INT16_BASE * kn_int16_high(a));
}

/* The plain form of the whole rule: out [rows][w->rows] = x [rows][w->cols] . w^T, no bias, for the
 * formats of the table above; with activations of 8 bits, and of 16. In kernels/ref/linear_q8.c. */
void kn_ref_linear_q8(const struct kn_tensor *w, const float *x, uint32_t rows, float *out);
void kn_ref_linear_q16(const struct kn_tensor *w, const float *x, uint32_t rows, float *out);
#endif
