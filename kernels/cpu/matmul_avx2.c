/* matmul_avx2.c: products over packed weights with AVX2, F16C and FMA. A group of 16 outputs is two
 * registers ("half": outputs 0..7, 8..15), taken together or one after the other.
 *
 * VPMADDUBSW multiplies unsigned by signed bytes and adds neighbours into 16 bits, saturating:
 *
 *   4-bit codes   15 * 127 * 2 = 3810 a step, 8 steps a block: 30480 < 32768. So the whole block (or half block) is added
 *                 in 16 bits, and one VPMADDWD makes int32 of it. The zero point is taken off afterwards:
 *                 sum - zero * asum.
 *   8-bit codes   are two 4-bit ones: the same with low and with high nibbles, and 16 times the second sum. (Signed codes,
 *                 |w| and sign(a, w), take three instructions of the multipliers' pipes a step, this takes two.)
 *   table codes   are signed: |w| takes the unsigned side and sign(a, w) the signed one, 127 * 127 * 2 < 32768, and VPMADDWD
 *                 follows every step.
 *
 * All are exact, so the result is the one of kn_int8.h. High and low bytes of 16-bit activations are as small as those
 * of 8 bits: the same is done with both, sum = low + 255 * high. */
#include "matmul_x86.h"
#include <immintrin.h>

#define PASS_ROWS 4 /* rows of a pass at most */

/* Constants of one call. */
struct consts {
    __m256i table;
    __m128i shift;
};

INLINE __m256i load256(const void *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}

/* Chunk c of a block for one half of the outputs: signed for TABLE, unsigned otherwise. */
INLINE __m256i chunk_load(enum codes codes, const uint8_t *half, unsigned c, const struct consts *k)
{
    const __m256i low = _mm256_set1_epi8(15);
    if (codes == BYTE)
        return load256(half + c * 64);
    __m256i v = load256(half + c % 4 * 64);
    v = _mm256_and_si256(c < 4 ? v : _mm256_srli_epi16(v, 4), low);
    return codes == TABLE ? _mm256_shuffle_epi8(k->table, v) : v;
}

/* Keeps the compiler from gathering all products of a block before the first sum: there are 16 registers. */
#define KEEP(v) __asm__("" : "+x"(v))

/* What one pass over the weights makes: n rows, halves half .. half + n_h of the outputs. */
struct pass {
    uint32_t n;
    unsigned n_h;
};

/* Chunks first .. first + 3 with these bytes of the rows: 16-bit sums for NIB and for both nibbles of BYTE, 32-bit ones
 * for TABLE. codes: of the first half. */
INLINE void dots4(const struct kind k, const struct pass p, const uint8_t *codes,
                  const struct act_at *x, const size_t bytes, const unsigned first,
                  const struct consts *c, __m256i sum[2][PASS_ROWS], __m256i high[2][PASS_ROWS])
{
    const __m256i ones = _mm256_set1_epi16(1), low4 = _mm256_set1_epi8(15);
#pragma GCC unroll 4
    for (unsigned i = first; i < first + 4; i++) {
        __m256i w[2], other[2];
#pragma GCC unroll 2
        for (unsigned h = 0; h < p.n_h; h++) {
            w[h] = chunk_load(k.codes, codes + h * 32, i, c);
            other[h] = k.codes == BYTE ? _mm256_and_si256(_mm256_srli_epi16(w[h], 4), low4)
                                       : _mm256_abs_epi8(w[h]);
            if (k.codes == BYTE)
                w[h] = _mm256_and_si256(w[h], low4);
        }
#pragma GCC unroll 4
        for (uint32_t r = 0; r < p.n; r++) {
            __m256i a = _mm256_set1_epi32(act_codes(x, bytes, r, i));
#pragma GCC unroll 2
            for (unsigned h = 0; h < p.n_h; h++) {
                __m256i *to = &sum[h][r];
                if (k.codes == TABLE)
                    *to = _mm256_add_epi32(
                        *to,
                        _mm256_madd_epi16(_mm256_maddubs_epi16(other[h], _mm256_sign_epi8(a, w[h])),
                                          ones));
                else
                    *to = _mm256_add_epi16(*to, _mm256_maddubs_epi16(w[h], a));
                KEEP(*to);
                if (k.codes == BYTE) {
                    high[h][r] = _mm256_add_epi16(high[h][r], _mm256_maddubs_epi16(other[h], a));
                    KEEP(high[h][r]);
                }
            }
        }
    }
}

/* int32 dot products of these bytes of the rows with sub-block s of one block. */
INLINE void dots_bytes(const struct kind k, const struct pass p, const uint8_t *codes,
                       const struct act_at *x, const size_t bytes, const unsigned s,
                       const struct consts *c, __m256i sum[2][PASS_ROWS])
{
    __m256i high[2][PASS_ROWS];
#pragma GCC unroll 8
    for (uint32_t i = 0; i < p.n * p.n_h; i++)
        sum[i / p.n][i % p.n] = high[i / p.n][i % p.n] = _mm256_setzero_si256();
    dots4(k, p, codes, x, bytes, s * 4, c, sum, high);
    if (k.n_sub == 1)
        dots4(k, p, codes, x, bytes, 4, c, sum, high);
    if (k.codes == TABLE)
        return;
#pragma GCC unroll 8
    for (uint32_t i = 0; i < p.n * p.n_h; i++) {
        __m256i *to = &sum[i / p.n][i % p.n];
        *to = _mm256_madd_epi16(*to, _mm256_set1_epi16(1));
        if (k.codes == BYTE)
            *to = _mm256_add_epi32(*to, _mm256_madd_epi16(high[i / p.n][i % p.n],
                                                          _mm256_set1_epi16(16)));
    }
}

INLINE void dots(const struct kind k, const struct pass p, const uint8_t *codes,
                 const struct act_at *x, const unsigned s, const struct consts *c,
                 __m256i sum[2][PASS_ROWS])
{
    __m256i high[2][PASS_ROWS];
    dots_bytes(k, p, codes, x, ACT_HIGH, s, c, k.wide ? high : sum);
    if (!k.wide)
        return;
    dots_bytes(k, p, codes, x, ACT_LOW, s, c, sum);
#pragma GCC unroll 8
    for (uint32_t i = 0; i < p.n * p.n_h; i++) {
        __m256i v = high[i / p.n][i % p.n], *to = &sum[i / p.n][i % p.n];
        *to = _mm256_add_epi32(*to, _mm256_sub_epi32(_mm256_slli_epi32(v, 8), v));
    }
}

/* acc += sub-block s. d, m: of the first half's outputs. */
INLINE void sub_add(const struct kind k, const struct pass p, const struct act_at *x, unsigned s,
                    __m256i sum[2][PASS_ROWS], const float *d, const float *m,
                    const struct consts *c, __m256 acc[2][PASS_ROWS])
{
#pragma GCC unroll 4
    for (uint32_t r = 0; r < p.n; r++) {
        const __m256 da = _mm256_set1_ps(act_da(x, r));
        const __m256 sa = k.has_min ? _mm256_set1_ps(act_sa(k, x, s, r)) : da;
        __m256i from = _mm256_setzero_si256();
        if (k.codes != TABLE && !k.has_min)
            from = _mm256_sll_epi32(_mm256_set1_epi32(act_asum_neg(k, x, s, r)), c->shift);
#pragma GCC unroll 2
        for (unsigned h = 0; h < p.n_h; h++) {
            __m256i v = sum[h][r];
            if (k.codes != TABLE && !k.has_min)
                v = _mm256_add_epi32(v, from);
            __m256 scale = _mm256_mul_ps(_mm256_loadu_ps(d + h * 8), da);
            acc[h][r] = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(v), acc[h][r]);
            if (k.has_min)
                acc[h][r] = _mm256_fmadd_ps(_mm256_loadu_ps(m + h * 8), sa, acc[h][r]);
        }
    }
}

INLINE void acc_load(const struct pass p, const float *at, const size_t stride,
                     __m256 acc[2][PASS_ROWS])
{
#pragma GCC unroll 8
    for (uint32_t i = 0; i < p.n * p.n_h; i++)
        acc[i / p.n][i % p.n] = _mm256_loadu_ps(at + i % p.n * stride + i / p.n * 8);
}

INLINE void acc_store(const struct pass p, float *at, const size_t stride, __m256 acc[2][PASS_ROWS])
{
#pragma GCC unroll 8
    for (uint32_t i = 0; i < p.n * p.n_h; i++)
        _mm256_storeu_ps(at + i % p.n * stride + i / p.n * 8, acc[i / p.n][i % p.n]);
}

/* The rows of p from row `first` of the tile on, halves from `half` on. Eight sums leave no registers for acc: then the
 * compiler keeps it in memory, where it costs least. */
INLINE void rows_run(const struct kind k, const struct q8_tile *t, uint32_t first, unsigned half,
                     const struct pass p, const struct consts *c)
{
    const size_t bytes = k.codes == BYTE ? 512 : 256;
    const uint8_t *codes = t->codes + half * 32;
    const float *d = t->d + half * 8, *m = k.has_min ? t->m + half * 8 : d;
    float *at = t->acc + first * t->acc_stride + half * 8;
    struct act_at x = act_first(t->x, t->row + first);
    __m256 acc[2][PASS_ROWS];
    acc_load(p, at, t->acc_stride, acc);
    for (uint32_t b = 0; b < t->n_blocks; b++, codes += bytes) {
        __m256i sum[2][PASS_ROWS];
#pragma GCC unroll 2
        for (unsigned s = 0; s < k.n_sub; s++, d += CPU_LANES, m += CPU_LANES) {
            dots(k, p, codes, &x, s, c, sum);
            sub_add(k, p, &x, s, sum, d, m, c, acc);
        }
        act_next(k, &x);
    }
    acc_store(p, at, t->acc_stride, acc);
}

/* The same for n rows, a multiple of p.n, block by block: all of them meet a block before the next one is read, so memory is
 * asked for evenly, and later ones are asked for meanwhile. */
INLINE void blocks_run(const struct kind k, const struct q8_tile *t, const uint32_t n,
                       const struct pass p, const struct consts *c)
{
    const size_t bytes = k.codes == BYTE ? 512 : 256, stride = t->acc_stride;
    const uint8_t *codes = t->codes;
    const float *d = t->d, *m = k.has_min ? t->m : d;
    struct act_at x = act_first(t->x, t->row);
    for (uint32_t b = 0; b < t->n_blocks; b++, codes += bytes) {
        struct act_at at = x;
        ahead_ask(t, b);
        for (uint32_t r = 0; r < n; r += p.n, at = act_down(at, p.n))
            for (unsigned half = 0; half < 2; half += p.n_h) {
                float *to = t->acc + r * stride + half * 8;
#pragma GCC unroll 2
                for (unsigned s = 0; s < k.n_sub; s++) {
                    const size_t scale = s * CPU_LANES + half * 8;
                    __m256i sum[2][PASS_ROWS];
                    __m256 acc[2][PASS_ROWS];
                    dots(k, p, codes + half * 32, &at, s, c, sum);
                    acc_load(p, to, stride, acc);
                    sub_add(k, p, &at, s, sum, d + scale, m + scale, c, acc);
                    acc_store(p, to, stride, acc);
                }
            }
        d += k.n_sub * CPU_LANES;
        m += k.n_sub * CPU_LANES;
        act_next(k, &x);
    }
}

INLINE void tile_run(const struct kind k, const struct q8_tile *t)
{
    struct consts c = {.shift = _mm_cvtsi32_si128(t->zero ? __builtin_ctz(t->zero) : 0),
                       .table = _mm256_setzero_si256()};
    if (k.codes == TABLE)
        c.table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)t->table));
    uint32_t r = 0;
    /* 4-bit codes have few instructions between two sums: there a spread activation pays for both halves. */
    const unsigned n_h = k.codes == NIB && !k.wide ? 2 : 1;
    if (t->ahead_step && t->n_rows > CPU_AHEAD_ROWS) {
        r = t->n_rows / PASS_ROWS * PASS_ROWS;
        blocks_run(k, t, r, (struct pass){PASS_ROWS, n_h}, &c);
    }
    for (; r + PASS_ROWS <= t->n_rows; r += PASS_ROWS)
        for (unsigned half = 0; half < 2; half += n_h)
            rows_run(k, t, r, half, (struct pass){PASS_ROWS, n_h}, &c);
    for (; r + 2 <= t->n_rows; r += 2)
        rows_run(k, t, r, 0, (struct pass){2, 2}, &c);
    for (; r < t->n_rows; r++)
        rows_run(k, t, r, 0, (struct pass){1, 2}, &c);
}

EACH_FORM(FORM_FUNCTIONS)

static void q8_avx2(const struct q8_tile *t)
{
    switch (t->form) {
        EACH_FORM(FORM_CASE)
    }
}

/* ---- float weights
 * ------------------------------------------------------------------------------- */

INLINE __m256 weights8(enum kn_type type, const uint8_t *p)
{
    if (type == KN_F32)
        return _mm256_loadu_ps((const float *)p);
    __m128i h = _mm_loadu_si128((const __m128i *)p);
    if (type == KN_F16)
        return _mm256_cvtph_ps(h);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

/* n rows and g groups, both halves: 2 n g chains. */
INLINE void floats_run(enum kn_type type, const struct float_tile *t, uint32_t first,
                       const uint32_t n, const uint32_t g)
{
    const size_t line = type == KN_F32 ? 64 : 32;
    const uint8_t *w = t->w;
    __m256 acc[12][2];
#pragma GCC unroll 12
    for (uint32_t i = 0; i < n * g; i++) {
        const float *at = t->acc + i / n * t->acc_group + (first + i % n) * t->acc_stride;
        acc[i][0] = _mm256_loadu_ps(at);
        acc[i][1] = _mm256_loadu_ps(at + 8);
    }
    for (uint32_t k = 0; k < t->n_k; k++, w += t->step) {
        const float *x = t->x + (size_t)k * CPU_ROWS + first;
#pragma GCC unroll 4
        for (uint32_t j = 0; j < g; j++) {
            __m256 w0 = weights8(type, w + j * line);
            __m256 w1 = weights8(type, w + j * line + line / 2);
#pragma GCC unroll 4
            for (uint32_t r = 0; r < n; r++) {
                __m256 v = _mm256_set1_ps(x[r]);
                acc[j * n + r][0] = _mm256_fmadd_ps(w0, v, acc[j * n + r][0]);
                acc[j * n + r][1] = _mm256_fmadd_ps(w1, v, acc[j * n + r][1]);
            }
        }
    }
#pragma GCC unroll 12
    for (uint32_t i = 0; i < n * g; i++) {
        float *at = t->acc + i / n * t->acc_group + (first + i % n) * t->acc_stride;
        _mm256_storeu_ps(at, acc[i][0]);
        _mm256_storeu_ps(at + 8, acc[i][1]);
    }
}

INLINE void floats_type(enum kn_type type, const struct float_tile *t)
{
    if (t->n_groups == CPU_FLOAT_GROUPS && t->n_rows == 1) {
        floats_run(type, t, 0, 1, CPU_FLOAT_GROUPS);
        return;
    }
    for (uint32_t g = 0; g < t->n_groups; g++) {
        struct float_tile one = *t;
        uint32_t r = 0;
        one.w = (const uint8_t *)t->w + g * t->group_bytes;
        one.acc = t->acc + g * t->acc_group;
        for (; r + 4 <= t->n_rows; r += 4)
            floats_run(type, &one, r, 4, 1);
        for (; r < t->n_rows; r++)
            floats_run(type, &one, r, 1, 1);
    }
}

static void floats_avx2(const struct float_tile *t)
{
    if (t->type == KN_F32)
        floats_type(KN_F32, t);
    else if (t->type == KN_F16)
        floats_type(KN_F16, t);
    else
        floats_type(KN_BF16, t);
}

/* ---- scales and activations
 * -------------------------------------------------------------------------- */

INLINE __m256 halves8(const uint8_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

static void scales_super(const struct scale_src *s, float *d, float *m)
{
    unsigned row = s->n_sub * CPU_LANES, mins = s->has_min ? row : 0;
    unsigned halves = (1u + s->has_min) * CPU_LANES * 2;
    const __m256 sign = _mm256_set1_ps(-0.0f);
    for (uint32_t b = s->first; b < s->first + s->n_blocks; b++) {
        const uint8_t *p = s->p + (size_t)(b / 8) * (halves + 8 * (row + mins));
        const uint8_t *small = p + halves + (size_t)(b % 8) * (row + mins);
        for (unsigned i = 0; i < row; i += 8, d += 8) {
            __m256i v = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(small + i)));
            _mm256_storeu_ps(d,
                             _mm256_mul_ps(halves8(p + i % CPU_LANES * 2), _mm256_cvtepi32_ps(v)));
        }
        for (unsigned i = 0; i < mins; i += 8, m += 8) {
            __m256i v = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(small + row + i)));
            __m256 h = halves8(p + CPU_LANES * 2 + i % CPU_LANES * 2);
            _mm256_storeu_ps(m, _mm256_xor_ps(_mm256_mul_ps(h, _mm256_cvtepi32_ps(v)), sign));
        }
    }
}

static void scales_avx2(const struct scale_src *s, float *d, float *m)
{
    if (s->super) {
        scales_super(s, d, m);
        return;
    }
    unsigned step = (1u + s->has_min) * CPU_LANES * 2;
    const uint8_t *p = s->p + (size_t)s->first * step;
    for (uint32_t i = 0; i < s->n_blocks; i++, p += step)
        for (unsigned h = 0; h < 2; h++) {
            _mm256_storeu_ps(d + (size_t)i * CPU_LANES + h * 8, halves8(p + h * 16));
            if (s->has_min)
                _mm256_storeu_ps(m + (size_t)i * CPU_LANES + h * 8,
                                 halves8(p + CPU_LANES * 2 + h * 16));
        }
}

INLINE float max8(__m256 v)
{
    __m128 a = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    a = _mm_max_ps(a, _mm_movehl_ps(a, a));
    a = _mm_max_ss(a, _mm_movehdup_ps(a));
    return _mm_cvtss_f32(a);
}

/* 16 values in q0, q1 to bytes in order. */
INLINE __m128i bytes16(__m256i q0, __m256i q1)
{
    __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(q0, q1), 0xd8);
    return _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
}

INLINE int sum16(__m128i a)
{
    __m128i s = _mm_maddubs_epi16(_mm_set1_epi8(1), a);
    s = _mm_madd_epi16(s, _mm_set1_epi16(1));
    s = _mm_add_epi32(s, _mm_srli_si128(s, 8));
    s = _mm_add_epi32(s, _mm_srli_si128(s, 4));
    return _mm_cvtsi128_si32(s);
}

static void quantise_avx2(const float *x, uint32_t n_blocks, struct act_block *blocks, uint32_t row,
                          bool halves)
{
    const __m256 sign = _mm256_set1_ps(-0.0f);
    for (uint32_t b = 0; b < n_blocks; b++, x += KN_INT8_BLOCK) {
        struct act_block *t = &blocks[b];
        __m256 v[4], top = _mm256_setzero_ps();
        __m256i q[4];
        for (int i = 0; i < 4; i++) {
            v[i] = _mm256_loadu_ps(x + i * 8);
            top = _mm256_max_ps(top, _mm256_andnot_ps(sign, v[i]));
        }
        float amax = max8(top);
        bool zeros = amax < KN_INT8_AMAX_MIN;
        __m256 inverse = _mm256_set1_ps(zeros ? 0.0f : 127.0f / amax);
        for (int i = 0; i < 4; i++)
            q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
        __m128i a0 = bytes16(q[0], q[1]), a1 = bytes16(q[2], q[3]);
        _mm_storeu_si128((__m128i *)t->a[row], a0);
        _mm_storeu_si128((__m128i *)(t->a[row] + 16), a1);
        const int32_t sum[2] = {sum16(a0), sum16(a1)};
        act_row_set(t, row, zeros ? 0.0f : amax / 127.0f, sum, halves);
    }
}

/* 8 codes of rule 4 to whole numbers of their high and low bytes. */
INLINE void bytes_split(__m256i a, __m256i *high, __m256i *low)
{
    /* a / 255 is never half way between two whole numbers, nor nearer to it than 1 / 510 */
    *high = _mm256_cvtps_epi32(
        _mm256_mul_ps(_mm256_cvtepi32_ps(a), _mm256_set1_ps(1.0f / KN_INT16_BASE)));
    *low = _mm256_sub_epi32(a, _mm256_sub_epi32(_mm256_slli_epi32(*high, 8), *high));
}

static void quantise_wide_avx2(const float *x, uint32_t n_blocks, struct act_wide *blocks,
                               uint32_t row, bool halves)
{
    const __m256 sign = _mm256_set1_ps(-0.0f);
    for (uint32_t b = 0; b < n_blocks; b++, x += KN_INT8_BLOCK) {
        struct act_wide *t = &blocks[b];
        __m256 v[4], top = _mm256_setzero_ps();
        __m256i high[4], low[4];
        int32_t sum[2];
        for (int i = 0; i < 4; i++) {
            v[i] = _mm256_loadu_ps(x + i * 8);
            top = _mm256_max_ps(top, _mm256_andnot_ps(sign, v[i]));
        }
        float amax = max8(top);
        bool zeros = amax < KN_INT8_AMAX_MIN;
        __m256 inverse = _mm256_set1_ps(zeros ? 0.0f : (float)KN_INT16_MAX / amax);
        for (int i = 0; i < 4; i++)
            bytes_split(_mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse)), &high[i], &low[i]);
        for (int i = 0; i < 2; i++) {
            __m128i h = bytes16(high[2 * i], high[2 * i + 1]);
            __m128i l = bytes16(low[2 * i], low[2 * i + 1]);
            _mm_storeu_si128((__m128i *)(t->high.a[row] + i * 16), h);
            _mm_storeu_si128((__m128i *)(t->low[row] + i * 16), l);
            sum[i] = KN_INT16_BASE * sum16(h) + sum16(l);
        }
        act_row_set(&t->high, row, zeros ? 0.0f : amax / (float)KN_INT16_MAX, sum, halves);
    }
}

const struct matmul_kernels matmul_avx2 = {.name = "avx2",
                                           .q8 = q8_avx2,
                                           .floats = floats_avx2,
                                           .scales = scales_avx2,
                                           .quantise = quantise_avx2,
                                           .quantise_wide = quantise_wide_avx2};
