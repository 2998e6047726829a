/* matmul_avx512.c: products over packed weights with AVX-512 and VNNI: the 16 lanes of a register
 * are 16 outputs.
 *
 * One block (32 columns) of a group fills eight registers of codes, w[0..7], 4 columns of 16
 * outputs each. Every row then needs eight VPDPBUSD with 4 of its bytes broadcast:
 *
 *     w[c]:  o0 (k4c..k4c+3) | o1 | ... | o15        x row: (k4c..k4c+3) in all lanes
 *     sum   = -zero * asum                           int32, exact
 *     sum  += w[c] . x[c]      c = 0..7
 *     acc   = fma(D * da, float(sum), acc);  acc = fma(M, sa, acc)
 *
 * With 16-bit activations sixteen, on high and low bytes: sum = low + 255 * high = low + (high << 8) - high. (VPDPWSSD
 * on codes of 16 bits would take as many, and twice the registers of weights.)
 *
 * The codes stay in registers for up to 16 rows: 8 (codes) + 2 (D, M) + 16 (acc) of 32. */
#include "matmul_x86.h"
#include <immintrin.h>

INLINE __m512i load512(const void *p)
{
    return _mm512_loadu_si512(p);
}

INLINE void codes_load(enum codes codes, const uint8_t *p, __m512i table, __m512i w[8])
{
    const __m512i low = _mm512_set1_epi8(15);
    if (codes == BYTE) {
#pragma GCC unroll 8
        for (int c = 0; c < 8; c++)
            w[c] = load512(p + c * 64);
        return;
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        __m512i v = load512(p + j * 64);
        w[j] = _mm512_and_si512(v, low);
        w[j + 4] = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);
        if (codes == TABLE) {
            w[j] = _mm512_shuffle_epi8(table, w[j]);
            w[j + 4] = _mm512_shuffle_epi8(table, w[j + 4]);
        }
    }
}

/* Chunks first .. first + 3 with these bytes of row r, on two chains. */
INLINE void dots4(const __m512i *w, const struct act_at *x, const size_t bytes, uint32_t r,
                  const unsigned first, __m512i sum[2])
{
#pragma GCC unroll 4
    for (unsigned c = first; c < first + 4; c++)
        sum[c % 2] =
            _mm512_dpbusd_epi32(sum[c % 2], w[c], _mm512_set1_epi32(act_codes(x, bytes, r, c)));
}

/* start + all of sub-block s. */
INLINE __m512i dots_bytes(const struct kind k, const __m512i *w, const struct act_at *x,
                          const size_t bytes, const unsigned s, uint32_t r, __m512i start)
{
    __m512i sum[2] = {start, _mm512_setzero_si512()};
    dots4(w, x, bytes, r, s * 4, sum);
    if (k.n_sub == 1)
        dots4(w, x, bytes, r, 4, sum);
    return _mm512_add_epi32(sum[0], sum[1]);
}

/* act_asum_neg of all rows, of a whole row block. */
INLINE __m512i act_asums_neg(const struct kind k, const struct act_at *x, unsigned s)
{
    size_t half = offsetof(struct act_block, asum_neg_half) + s * CPU_ROWS * sizeof(int32_t);
    return load512(x->rest + (k.n_sub == 2 ? half : offsetof(struct act_block, asum_neg)));
}

/* The int32 dot products of row r and sub-block s. start: -zero * asum of every row, or NULL: not worth their while. */
INLINE __m512i dots(const struct kind k, const __m512i *w, const struct act_at *x, unsigned s,
                    uint32_t r, __m128i shift, const int32_t *start)
{
    __m512i from = _mm512_setzero_si512(), high;
    if (start)
        from = _mm512_set1_epi32(start[r]);
    else if (!k.has_min)
        from = _mm512_sll_epi32(_mm512_set1_epi32(act_asum_neg(k, x, s, r)), shift);
    if (!k.wide)
        return dots_bytes(k, w, x, ACT_HIGH, s, r, from);
    high = dots_bytes(k, w, x, ACT_HIGH, s, r, _mm512_setzero_si512());
    from = _mm512_sub_epi32(from, high);
    return _mm512_add_epi32(dots_bytes(k, w, x, ACT_LOW, s, r, from), _mm512_slli_epi32(high, 8));
}

/* n rows, from row `first` of the tile on; n is known to the compiler. */
INLINE void rows_run(const struct kind k, const struct q8_tile *t, uint32_t first, const uint32_t n)
{
    const size_t bytes = k.codes == BYTE ? 512 : 256;
    const uint8_t *codes = t->codes;
    float *at = t->acc + first * t->acc_stride;
    const __m128i shift = _mm_cvtsi32_si128(t->zero ? __builtin_ctz(t->zero) : 0);
    __m512i table = _mm512_setzero_si512();
    if (k.codes == TABLE)
        table = _mm512_xor_si512(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)t->table)),
                                 _mm512_set1_epi8(-128));
    struct act_at x = act_first(t->x, t->row + first);
    const bool shared = n == CPU_ROWS && !k.has_min;
    _Alignas(64) int32_t start[2][CPU_ROWS];
    __m512 acc[16];
#pragma GCC unroll 16
    for (uint32_t r = 0; r < n; r++)
        acc[r] = _mm512_loadu_ps(at + r * t->acc_stride);
    for (uint32_t b = 0; b < t->n_blocks; b++, codes += bytes) {
        __m512i w[8];
        __m512 d[2], m[2];
        if (n >= CPU_AHEAD_ROWS && first == 0)
            ahead_ask(t, b);
        codes_load(k.codes, codes, table, w);
#pragma GCC unroll 2
        for (unsigned s = 0; s < k.n_sub; s++) {
            d[s] = _mm512_loadu_ps(t->d + ((size_t)b * k.n_sub + s) * CPU_LANES);
            m[s] = k.has_min ? _mm512_loadu_ps(t->m + ((size_t)b * k.n_sub + s) * CPU_LANES) : d[s];
            if (shared)
                _mm512_store_si512(start[s], _mm512_sll_epi32(act_asums_neg(k, &x, s), shift));
        }
#pragma GCC unroll 16
        for (uint32_t r = 0; r < n; r++)
#pragma GCC unroll 2
            for (unsigned i = 0; i < k.n_sub; i++) {
                __m512 scale = _mm512_mul_ps(d[i], _mm512_set1_ps(act_da(&x, r)));
                __m512i sum = dots(k, w, &x, i, r, shift, shared ? start[i] : NULL);
                acc[r] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(sum), acc[r]);
                if (k.has_min)
                    acc[r] = _mm512_fmadd_ps(m[i], _mm512_set1_ps(act_sa(k, &x, i, r)), acc[r]);
            }
        act_next(k, &x);
    }
#pragma GCC unroll 16
    for (uint32_t r = 0; r < n; r++)
        _mm512_storeu_ps(at + r * t->acc_stride, acc[r]);
}

INLINE void tile_run(const struct kind k, const struct q8_tile *t)
{
    uint32_t r = 0;
    if (t->n_rows == 16) {
        rows_run(k, t, 0, 16);
        return;
    }
    if (t->n_rows & 8) {
        rows_run(k, t, r, 8);
        r += 8;
    }
    if (t->n_rows & 4) {
        rows_run(k, t, r, 4);
        r += 4;
    }
    if (t->n_rows & 2) {
        rows_run(k, t, r, 2);
        r += 2;
    }
    if (t->n_rows & 1)
        rows_run(k, t, r, 1);
}

EACH_FORM(FORM_FUNCTIONS)

void q8_avx512(const struct q8_tile *t)
{
    switch (t->form) {
        EACH_FORM(FORM_CASE)
    }
}

/* ---- float weights
 * ------------------------------------------------------------------------------- */

INLINE __m512 weights16(enum kn_type type, const uint8_t *p)
{
    if (type == KN_F32)
        return _mm512_loadu_ps(p);
    __m256i h = _mm256_loadu_si256((const __m256i *)p);
    if (type == KN_F16)
        return _mm512_cvtph_ps(h);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

/* n rows and g groups: n * g chains, so that a single row does not wait for each sum. */
INLINE void floats_run(enum kn_type type, const struct float_tile *t, uint32_t first,
                       const uint32_t n, const uint32_t g)
{
    const size_t line = type == KN_F32 ? 64 : 32;
    const uint8_t *w = t->w;
    __m512 acc[16];
#pragma GCC unroll 16
    for (uint32_t i = 0; i < n * g; i++)
        acc[i] = _mm512_loadu_ps(t->acc + i / n * t->acc_group + (first + i % n) * t->acc_stride);
    for (uint32_t k = 0; k < t->n_k; k++, w += t->step) {
        const float *x = t->x + (size_t)k * CPU_ROWS + first;
#pragma GCC unroll 4
        for (uint32_t j = 0; j < g; j++) {
            __m512 v = weights16(type, w + j * line);
#pragma GCC unroll 16
            for (uint32_t r = 0; r < n; r++)
                acc[j * n + r] = _mm512_fmadd_ps(v, _mm512_set1_ps(x[r]), acc[j * n + r]);
        }
    }
#pragma GCC unroll 16
    for (uint32_t i = 0; i < n * g; i++)
        _mm512_storeu_ps(t->acc + i / n * t->acc_group + (first + i % n) * t->acc_stride, acc[i]);
}

INLINE void floats_type(enum kn_type type, const struct float_tile *t)
{
    if (t->n_groups == CPU_FLOAT_GROUPS && (type == KN_F32 || t->n_rows <= 8)) {
        uint32_t r = 0;
        for (; r + 4 <= t->n_rows; r += 4)
            floats_run(type, t, r, 4, CPU_FLOAT_GROUPS);
        for (; r + 2 <= t->n_rows; r += 2)
            floats_run(type, t, r, 2, CPU_FLOAT_GROUPS);
        for (; r < t->n_rows; r++)
            floats_run(type, t, r, 1, CPU_FLOAT_GROUPS);
        return;
    }
    for (uint32_t g = 0; g < t->n_groups; g++) {
        struct float_tile one = *t;
        uint32_t r = 0;
        one.w = (const uint8_t *)t->w + g * t->group_bytes;
        one.acc = t->acc + g * t->acc_group;
        if (t->n_rows == 16)
            floats_run(type, &one, 0, r = 16, 1);
        for (; r + 8 <= t->n_rows; r += 8)
            floats_run(type, &one, r, 8, 1);
        for (; r + 4 <= t->n_rows; r += 4)
            floats_run(type, &one, r, 4, 1);
        for (; r < t->n_rows; r++)
            floats_run(type, &one, r, 1, 1);
    }
}

void floats_avx512(const struct float_tile *t)
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

INLINE __m512 halves16(const uint8_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

static void scales_super(const struct scale_src *s, float *d, float *m)
{
    unsigned row = s->n_sub * CPU_LANES, mins = s->has_min ? row : 0;
    unsigned halves = (1u + s->has_min) * CPU_LANES * 2;
    const __m512 sign = _mm512_set1_ps(-0.0f);
    for (uint32_t b = s->first; b < s->first + s->n_blocks; b++) {
        const uint8_t *p = s->p + (size_t)(b / 8) * (halves + 8 * (row + mins));
        const uint8_t *small = p + halves + (size_t)(b % 8) * (row + mins);
        for (unsigned i = 0; i < row; i += CPU_LANES, d += CPU_LANES) {
            __m512i v = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(small + i)));
            _mm512_storeu_ps(d, _mm512_mul_ps(halves16(p), _mm512_cvtepi32_ps(v)));
        }
        for (unsigned i = 0; i < mins; i += CPU_LANES, m += CPU_LANES) {
            __m512i v = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(small + row + i)));
            __m512 t = _mm512_mul_ps(halves16(p + CPU_LANES * 2), _mm512_cvtepi32_ps(v));
            _mm512_storeu_ps(m, _mm512_xor_ps(t, sign));
        }
    }
}

void scales_avx512(const struct scale_src *s, float *d, float *m)
{
    if (s->super) {
        scales_super(s, d, m);
        return;
    }
    unsigned step = (1u + s->has_min) * CPU_LANES * 2;
    const uint8_t *p = s->p + (size_t)s->first * step;
    for (uint32_t i = 0; i < s->n_blocks; i++, p += step) {
        _mm512_storeu_ps(d + (size_t)i * CPU_LANES, halves16(p));
        if (s->has_min)
            _mm512_storeu_ps(m + (size_t)i * CPU_LANES, halves16(p + CPU_LANES * 2));
    }
}

void quantise_avx512(const float *x, uint32_t n_blocks, struct act_block *blocks, uint32_t row,
                     bool halves)
{
    const __m512i ones = _mm512_set1_epi8(1);
    for (uint32_t b = 0; b < n_blocks; b++, x += KN_INT8_BLOCK) {
        struct act_block *t = &blocks[b];
        __m512 x0 = _mm512_loadu_ps(x), x1 = _mm512_loadu_ps(x + 16);
        float amax = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(x0), _mm512_abs_ps(x1)));
        bool zeros = amax < KN_INT8_AMAX_MIN;
        __m512 inverse = _mm512_set1_ps(zeros ? 0.0f : 127.0f / amax);
        __m128i a0 = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(x0, inverse)));
        __m128i a1 = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(x1, inverse)));
        _mm_storeu_si128((__m128i *)t->a[row], a0);
        _mm_storeu_si128((__m128i *)(t->a[row] + 16), a1);
        /* sums of fours, then of the two 16-halves: lanes 0..3 and 4..7 */
        __m256i a = _mm256_set_m128i(a1, a0);
        __m256i s = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm512_castsi512_si256(ones), a);
        s = _mm256_hadd_epi32(s, s);
        s = _mm256_hadd_epi32(s, s);
        const int32_t sum[2] = {_mm256_extract_epi32(s, 0), _mm256_extract_epi32(s, 4)};
        act_row_set(t, row, zeros ? 0.0f : amax / 127.0f, sum, halves);
    }
}

/* 16 codes of rule 4 to their high and low bytes. */
INLINE void bytes_split(__m512i a, int8_t *high, int8_t *low)
{
    /* a / 255 is never half way between two whole numbers, nor nearer to it than 1 / 510 */
    __m512i h = _mm512_cvtps_epi32(
        _mm512_mul_ps(_mm512_cvtepi32_ps(a), _mm512_set1_ps(1.0f / KN_INT16_BASE)));
    __m512i l = _mm512_sub_epi32(a, _mm512_sub_epi32(_mm512_slli_epi32(h, 8), h));
    _mm_storeu_si128((__m128i *)high, _mm512_cvtepi32_epi8(h));
    _mm_storeu_si128((__m128i *)low, _mm512_cvtepi32_epi8(l));
}

void quantise_wide_avx512(const float *x, uint32_t n_blocks, struct act_wide *blocks, uint32_t row,
                          bool halves)
{
    for (uint32_t b = 0; b < n_blocks; b++, x += KN_INT8_BLOCK) {
        struct act_wide *t = &blocks[b];
        __m512 x0 = _mm512_loadu_ps(x), x1 = _mm512_loadu_ps(x + 16);
        float amax = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(x0), _mm512_abs_ps(x1)));
        bool zeros = amax < KN_INT8_AMAX_MIN;
        __m512 inverse = _mm512_set1_ps(zeros ? 0.0f : (float)KN_INT16_MAX / amax);
        __m512i a0 = _mm512_cvtps_epi32(_mm512_mul_ps(x0, inverse));
        __m512i a1 = _mm512_cvtps_epi32(_mm512_mul_ps(x1, inverse));
        bytes_split(a0, t->high.a[row], t->low[row]);
        bytes_split(a1, t->high.a[row] + 16, t->low[row] + 16);
        const int32_t sum[2] = {_mm512_reduce_add_epi32(a0), _mm512_reduce_add_epi32(a1)};
        act_row_set(&t->high, row, zeros ? 0.0f : amax / (float)KN_INT16_MAX, sum, halves);
    }
}

const struct matmul_kernels matmul_avx512 = {.name = "avx512-vnni",
                                             .q8 = q8_avx512,
                                             .floats = floats_avx512,
                                             .scales = scales_avx512,
                                             .quantise = quantise_avx512,
                                             .quantise_wide = quantise_wide_avx512};
