/* matmul_avx512bf16.c: AVX-512 with VDPBF16PS for BF16 weights; all else is matmul_avx512.c's. Both sides are bf16, the sums
 * f32, in one order whatever the number of rows (matmul_bf16.h):
 *
 *     weight line   o0 (k, k + 1) | o1 (k, k + 1) | ... | o15        x row: (k, k + 1) in all lanes
 *     acc[row]     += line . x[row]
 *
 * Up to 4 rows of four groups go together: 16 chains of sums for 8 loads, and several for one row, too. */
#include "kn_assert.h"
#include "matmul_bf16.h"
#include "matmul_x86.h"
#include <immintrin.h>

/* n rows from row `first` on and g groups. */
INLINE void pairs_run(const struct float_tile *t, uint32_t first, const uint32_t n,
                      const uint32_t g)
{
    const uint8_t *w = t->w;
    const uint32_t *x = t->pairs + first;
    float *at = t->acc + first * t->acc_stride;
    __m512 acc[16];
#pragma GCC unroll 16
    for (uint32_t i = 0; i < n * g; i++)
        acc[i] = _mm512_loadu_ps(at + i / n * t->acc_group + i % n * t->acc_stride);
    for (uint32_t k = 0; k < t->n_k; k++, w += t->step, x += CPU_ROWS) {
        __m512bh v[4];
#pragma GCC unroll 4
        for (uint32_t j = 0; j < g; j++)
            v[j] = (__m512bh)_mm512_loadu_si512(w + j * 64);
#pragma GCC unroll 16
        for (uint32_t r = 0; r < n; r++) {
            __m512bh xr = (__m512bh)_mm512_set1_epi32((int)x[r]);
#pragma GCC unroll 4
            for (uint32_t j = 0; j < g; j++)
                acc[j * n + r] = _mm512_dpbf16_ps(acc[j * n + r], v[j], xr);
        }
    }
#pragma GCC unroll 16
    for (uint32_t i = 0; i < n * g; i++)
        _mm512_storeu_ps(at + i / n * t->acc_group + i % n * t->acc_stride, acc[i]);
}

INLINE void pairs_groups(const struct float_tile *t, const uint32_t g)
{
    uint32_t r = 0;
    for (; r + 4 <= t->n_rows; r += 4)
        pairs_run(t, r, 4, g);
    if (t->n_rows - r == 3)
        pairs_run(t, r, 3, g);
    else if (t->n_rows - r == 2)
        pairs_run(t, r, 2, g);
    else if (t->n_rows - r == 1)
        pairs_run(t, r, 1, g);
}

static void pairs_tile(const struct float_tile *t)
{
    if (t->n_groups == CPU_FLOAT_GROUPS) {
        pairs_groups(t, CPU_FLOAT_GROUPS);
        return;
    }
    for (uint32_t g = 0; g < t->n_groups; g++) { /* parts of bundles: seldom */
        struct float_tile one = *t;
        one.w = (const uint8_t *)t->w + g * t->group_bytes;
        one.acc = t->acc + g * t->acc_group;
        pairs_groups(&one, 1);
    }
}

void floats_bf16(const struct float_tile *t)
{
    if (t->pairs)
        pairs_tile(t);
    else
        floats_avx512(t);
}

/* VCVTNEPS2BF16 rounds to nearest even and flushes, too. */
void pairs_bf16(const float *x, uint32_t cols, uint32_t *to)
{
    uint32_t pairs[16];
    for (uint32_t k = 0; k < cols; k += 32) {
        uint32_t left = KN_MIN(cols - k, 32u), n = (left + 1) / 2;
        uint32_t some = (uint32_t)(((uint64_t)1 << left) - 1);
        __m512 x0 = _mm512_maskz_loadu_ps((__mmask16)some, x + k);
        __m512 x1 = _mm512_maskz_loadu_ps((__mmask16)(some >> 16), x + k + (left > 16 ? 16 : 0));
        _mm512_storeu_si512(pairs, (__m512i)_mm512_cvtne2ps_pbh(x1, x0));
        for (uint32_t i = 0; i < n; i++, to += CPU_ROWS)
            *to = pairs[i];
    }
}

const struct matmul_kernels matmul_avx512bf16 = {.name = "avx512-vnni-bf16",
                                                 .q8 = q8_avx512,
                                                 .floats = floats_bf16,
                                                 .scales = scales_avx512,
                                                 .quantise = quantise_avx512,
                                                 .quantise_wide = quantise_wide_avx512,
                                                 .pairs = pairs_bf16};
