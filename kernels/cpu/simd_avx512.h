/* simd_avx512.h: the few vector operations that attn_body.h and vec_body.h are written in, 16
 * lanes. vf_max and vf_min give their second argument if one is NaN. */
#ifndef BACKCAST_SIMD_AVX512_H
#define BACKCAST_SIMD_AVX512_H
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define VF_N 16
#define SIMD_QUERIES 6            /* x 4 registers of accumulators, of 32 */
#if defined(__SANITIZE_ADDRESS__) /* every load is a call there: compilers take minutes */
#define SIMD_TURN_MAX 2
#else
#define SIMD_TURN_MAX 8
#endif
#define SIMD_KEYS 4 /* of a 128-bit lane: see dots_turning of attn_body.h */
typedef __m512 vf;

static inline vf vf_load(const float *p)
{
    return _mm512_loadu_ps(p);
}
static inline void vf_store(float *p, vf v)
{
    _mm512_storeu_ps(p, v);
}
static inline vf vf_set1(float f)
{
    return _mm512_set1_ps(f);
}
static inline vf vf_add(vf a, vf b)
{
    return _mm512_add_ps(a, b);
}
static inline vf vf_sub(vf a, vf b)
{
    return _mm512_sub_ps(a, b);
}
static inline vf vf_mul(vf a, vf b)
{
    return _mm512_mul_ps(a, b);
}
static inline vf vf_div(vf a, vf b)
{
    return _mm512_div_ps(a, b);
}
static inline vf vf_fma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}
static inline vf vf_max(vf a, vf b)
{
    return _mm512_max_ps(a, b);
}
static inline vf vf_min(vf a, vf b)
{
    return _mm512_min_ps(a, b);
}
static inline vf vf_abs(vf a)
{
    return _mm512_abs_ps(a);
}
static inline vf vf_round(vf a)
{
    return _mm512_roundscale_ps(a, 0);
}
/* a * 2^n, n integral */
static inline vf vf_scale2(vf a, vf n)
{
    return _mm512_scalef_ps(a, n);
}
static inline vf vf_load_half(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
static inline void vf_store_half(uint16_t *p, vf v)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
static inline vf vf_set1_half(const void *p)
{
    uint16_t h;
    memcpy(&h, p, sizeof h);
    return _mm512_set1_ps(_cvtsh_ss(h));
}
static inline vf vf_load_bf16(const uint16_t *p)
{
    __m512i u = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(u, 16));
}
/* nearest even, as kn_f32_to_bf16; a NaN's payload is cut and made quiet */
static inline void vf_store_bf16(uint16_t *p, vf v)
{
    __m512i u = _mm512_castps_si512(v), top = _mm512_srli_epi32(u, 16);
    __m512i odd = _mm512_and_si512(top, _mm512_set1_epi32(1));
    __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    r = _mm512_mask_or_epi32(_mm512_srli_epi32(r, 16), nan, top, _mm512_set1_epi32(0x40));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(r));
}
static inline vf vf_load_bytes(const int8_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
/* codes of 4 bits, the low halves of bytes (shift 0) or the high ones (4), less 8: the permutation looks at 4 bits alone */
static inline vf vf_load_codes(const uint8_t *p, uint32_t shift)
{
    const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm512_permutexvar_ps(_mm512_srl_epi32(b, _mm_cvtsi32_si128((int)shift)), values);
}
/* v integral, -128 .. 127 */
static inline void vf_store_bytes(int8_t *p, vf v)
{
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
}
static inline float vf_sum(vf v)
{
    return _mm512_reduce_add_ps(v);
}
static inline float vf_top(vf v)
{
    return _mm512_reduce_max_ps(v);
}

/* r[i] lane j <-> r[j] lane i: pairs, quads, then 128-bit quarters. */
static inline void vf_transpose(vf r[16])
{
    vf t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    /* r[4a + c]: quarter q has rows 4a..4a+3 of column 4q + c */
#pragma GCC unroll 16
    for (int c = 0; c < 4; c++) {
        vf lo01 = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x44);
        vf hi01 = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xee);
        vf lo23 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x44);
        vf hi23 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xee);
        t[c] = _mm512_shuffle_f32x4(lo01, lo23, 0x88);
        t[4 + c] = _mm512_shuffle_f32x4(lo01, lo23, 0xdd);
        t[8 + c] = _mm512_shuffle_f32x4(hi01, hi23, 0x88);
        t[12 + c] = _mm512_shuffle_f32x4(hi01, hi23, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        r[i] = t[i];
}

/* The same within 128 bits: r[i] lane 4 q + k <-> r[k] lane 4 q + i. */
static inline void vf_turn(vf r[4])
{
    vf a = _mm512_unpacklo_ps(r[0], r[1]), b = _mm512_unpackhi_ps(r[0], r[1]);
    vf c = _mm512_unpacklo_ps(r[2], r[3]), d = _mm512_unpackhi_ps(r[2], r[3]);
    r[0] = _mm512_shuffle_ps(a, c, 0x44);
    r[1] = _mm512_shuffle_ps(a, c, 0xee);
    r[2] = _mm512_shuffle_ps(b, d, 0x44);
    r[3] = _mm512_shuffle_ps(b, d, 0xee);
}
/* Lane 4 q + i of v in all four lanes of quarter q; i is 0 .. 3. */
static inline vf vf_spread(vf v, int i)
{
    return _mm512_permutevar_ps(v, _mm512_set1_epi32(i));
}
/* Lanes 2 i and 2 i + 1 change places. */
static inline vf vf_swap(vf v)
{
    return _mm512_permute_ps(v, 0xb1);
}
/* Lane 4 g + k: the sum over q, ascending, of lane 4 q + k of r[g]. */
static inline vf vf_fold(const vf r[4])
{
    vf lo01 = _mm512_shuffle_f32x4(r[0], r[1], 0x44), hi01 = _mm512_shuffle_f32x4(r[0], r[1], 0xee);
    vf lo23 = _mm512_shuffle_f32x4(r[2], r[3], 0x44), hi23 = _mm512_shuffle_f32x4(r[2], r[3], 0xee);
    vf sum = _mm512_add_ps(_mm512_shuffle_f32x4(lo01, lo23, 0x88),
                           _mm512_shuffle_f32x4(lo01, lo23, 0xdd));
    sum = _mm512_add_ps(sum, _mm512_shuffle_f32x4(hi01, hi23, 0x88));
    return _mm512_add_ps(sum, _mm512_shuffle_f32x4(hi01, hi23, 0xdd));
}

#include "simd_math.h"
#endif
