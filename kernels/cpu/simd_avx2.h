/* simd_avx2.h: the few vector operations that attn_body.h and vec_body.h are written in, 8 lanes.
 * vf_max and vf_min give their second argument if one is NaN. */
#ifndef BACKCAST_SIMD_AVX2_H
#define BACKCAST_SIMD_AVX2_H
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define VF_N 8
#define SIMD_QUERIES 2            /* x 4 registers of accumulators, of 16 */
#if defined(__SANITIZE_ADDRESS__) /* every load is a call there: compilers take minutes */
#define SIMD_TURN_MAX 2
#else
#define SIMD_TURN_MAX 4 /* beside 8 of keys */
#endif
#define SIMD_KEYS 4 /* of a 128-bit lane: see dots_turning of attn_body.h */
typedef __m256 vf;

static inline vf vf_load(const float *p)
{
    return _mm256_loadu_ps(p);
}
static inline void vf_store(float *p, vf v)
{
    _mm256_storeu_ps(p, v);
}
static inline vf vf_set1(float f)
{
    return _mm256_set1_ps(f);
}
static inline vf vf_add(vf a, vf b)
{
    return _mm256_add_ps(a, b);
}
static inline vf vf_sub(vf a, vf b)
{
    return _mm256_sub_ps(a, b);
}
static inline vf vf_mul(vf a, vf b)
{
    return _mm256_mul_ps(a, b);
}
static inline vf vf_div(vf a, vf b)
{
    return _mm256_div_ps(a, b);
}
static inline vf vf_fma(vf a, vf b, vf c)
{
    return _mm256_fmadd_ps(a, b, c);
}
static inline vf vf_max(vf a, vf b)
{
    return _mm256_max_ps(a, b);
}
static inline vf vf_min(vf a, vf b)
{
    return _mm256_min_ps(a, b);
}
static inline vf vf_abs(vf a)
{
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a);
}
static inline vf vf_round(vf a)
{
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
/* a * 2^n, n integral, in two factors so that both are normal numbers for -252 <= n <= 254 */
static inline vf vf_scale2(vf a, vf n)
{
    __m256i i = _mm256_cvtps_epi32(n), h = _mm256_srai_epi32(i, 1), bias = _mm256_set1_epi32(127);
    __m256i f = _mm256_slli_epi32(_mm256_add_epi32(h, bias), 23);
    __m256i g = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(i, h), bias), 23);
    return _mm256_mul_ps(_mm256_mul_ps(a, _mm256_castsi256_ps(f)), _mm256_castsi256_ps(g));
}
static inline vf vf_load_half(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
static inline void vf_store_half(uint16_t *p, vf v)
{
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
static inline vf vf_set1_half(const void *p)
{
    uint16_t h;
    memcpy(&h, p, sizeof h);
    return _mm256_set1_ps(_cvtsh_ss(h));
}
static inline vf vf_load_bf16(const uint16_t *p)
{
    __m256i u = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(u, 16));
}
/* nearest even, as kn_f32_to_bf16; a NaN's payload is cut and made quiet */
static inline void vf_store_bf16(uint16_t *p, vf v)
{
    __m256i u = _mm256_castps_si256(v), top = _mm256_srli_epi32(u, 16);
    __m256i odd = _mm256_and_si256(top, _mm256_set1_epi32(1));
    __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    __m256i quiet = _mm256_or_si256(top, _mm256_set1_epi32(0x40));
    r = _mm256_blendv_epi8(_mm256_srli_epi32(r, 16), quiet, nan);
    _mm_storeu_si128((__m128i *)p,
                     _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1)));
}
static inline vf vf_load_bytes(const int8_t *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
/* codes of 4 bits, the low halves of bytes (shift 0) or the high ones (4), less 8 */
static inline vf vf_load_codes(const uint8_t *p, uint32_t shift)
{
    __m256i b = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
    b = _mm256_and_si256(_mm256_srl_epi32(b, _mm_cvtsi32_si128((int)shift)), _mm256_set1_epi32(15));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(b, _mm256_set1_epi32(8)));
}
/* v integral, -128 .. 127 */
static inline void vf_store_bytes(int8_t *p, vf v)
{
    __m256i i = _mm256_cvtps_epi32(v);
    __m128i h = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(h, h));
}
static inline float vf_sum(vf v)
{
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}
static inline float vf_top(vf v)
{
    __m128 a = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    a = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
}

/* r[i] lane j <-> r[j] lane i: pairs, quads, then 128-bit halves. */
static inline void vf_transpose(vf r[8])
{
    vf t[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
#pragma GCC unroll 8
    for (int c = 0; c < 4; c++) {
        t[c] = _mm256_permute2f128_ps(r[c], r[4 + c], 0x20);
        t[4 + c] = _mm256_permute2f128_ps(r[c], r[4 + c], 0x31);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        r[i] = t[i];
}

/* The same within 128 bits: r[i] lane 4 q + k <-> r[k] lane 4 q + i. */
static inline void vf_turn(vf r[4])
{
    vf a = _mm256_unpacklo_ps(r[0], r[1]), b = _mm256_unpackhi_ps(r[0], r[1]);
    vf c = _mm256_unpacklo_ps(r[2], r[3]), d = _mm256_unpackhi_ps(r[2], r[3]);
    r[0] = _mm256_shuffle_ps(a, c, 0x44);
    r[1] = _mm256_shuffle_ps(a, c, 0xee);
    r[2] = _mm256_shuffle_ps(b, d, 0x44);
    r[3] = _mm256_shuffle_ps(b, d, 0xee);
}
/* Lane 4 q + i of v in all four lanes of quarter q; i is 0 .. 3. */
static inline vf vf_spread(vf v, int i)
{
    return _mm256_permutevar_ps(v, _mm256_set1_epi32(i));
}
/* Lanes 2 i and 2 i + 1 change places. */
static inline vf vf_swap(vf v)
{
    return _mm256_permute_ps(v, 0xb1);
}
/* Lane 4 g + k: the sum over q, ascending, of lane 4 q + k of r[g]. */
static inline vf vf_fold(const vf r[2])
{
    return _mm256_add_ps(_mm256_permute2f128_ps(r[0], r[1], 0x20),
                         _mm256_permute2f128_ps(r[0], r[1], 0x31));
}

#include "simd_math.h"
#endif
