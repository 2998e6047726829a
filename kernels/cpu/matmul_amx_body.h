/* matmul_amx_body.h: products of 8 and more rows with tiles: a block's 32 columns of 16 rows x 16 outputs are
 * one TDPBSUD. Written in the operations of tiles.h; matmul_amx_avx512.c and matmul_amx_model_avx512.c include it.
 *
 *     tiles   A 16 x 32 bytes (staged codes)   B 8 x 64 bytes (a block's chunks)   C 16 x 64 bytes (int32)
 *     C  = A . B                                     int32, exact
 *     sum = C - zero * asum                          the same integer as matmul_avx512.c's
 *     acc = fma(D * da, float(sum), acc);  acc = fma(M, sa, acc)        blocks ascending
 *
 * With 16-bit activations there are two A, high and low bytes, and sum = C_low + 255 * C_high - zero * asum.
 *
 * so every output has the bits of the integer rule, and it does not matter which rows come here and which go to
 * VPDPBUSD: few rows do, and formats with two sub-blocks of 16, for which a tile would be half empty. 4-bit codes
 * become bytes once for all row blocks that use them.
 *
 * A thread owns its tiles from begin to end; in between q8 may use them. */
#include "matmul_x86.h"
#include "tiles.h"
#include <immintrin.h>

/* Two of each, in turn: one block's product runs while the other's sums are scaled; of 16-bit activations, A and C of
 * high bytes and of low ones. */
static const struct tile_config shapes = {
    .palette = 1,
    .bytes = {TILE_BYTES, TILE_BYTES, KN_INT8_BLOCK, KN_INT8_BLOCK, TILE_BYTES, TILE_BYTES},
    .rows = {TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, 8, 8},
};

static void begin(struct tile_room *room)
{
    TILE_CONFIG(room, &shapes);
    room->codes_of = NULL;
    room->on = true;
}

static void end(struct tile_room *room)
{
    TILE_RELEASE(room);
    room->on = false;
}

/* ---- codes ------------------------------------------------------------------------------------------- */

static void expand(const struct q8_tile *t, uint8_t *to)
{
    const __m512i low = _mm512_set1_epi8(15);
    __m512i table = _mm512_setzero_si512();
    if (t->form == FORM_TABLE)
        table = _mm512_xor_si512(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)t->table)),
                                 _mm512_set1_epi8(-128));
    for (size_t b = 0; b < t->n_blocks; b++)
        for (size_t j = 0; j < 4; j++) {
            __m512i v = _mm512_loadu_si512(t->codes + b * 256 + j * 64);
            __m512i first = _mm512_and_si512(v, low);
            __m512i second = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);
            if (t->form == FORM_TABLE) {
                first = _mm512_shuffle_epi8(table, first);
                second = _mm512_shuffle_epi8(table, second);
            }
            _mm512_store_si512(to + b * 512 + j * 64, first);
            _mm512_store_si512(to + b * 512 + (j + 4) * 64, second);
        }
}

/* The tile's codes as bytes, 512 a block. */
static const uint8_t *codes_of(const struct q8_tile *t)
{
    struct tile_room *room = t->tiles;
    if (t->form >= FORM_BYTE)
        return t->codes;
    if (room->codes_of != t->codes || room->n_blocks != t->n_blocks) {
        expand(t, room->codes);
        room->codes_of = t->codes;
        room->n_blocks = t->n_blocks;
    }
    return room->codes;
}

/* ---- products ---------------------------------------------------------------------------------------- */

/* Block x's integer sums of 16 rows, by tiles tc, ta, tb, to room->sums[tc]. */
#define SUMS(room, x, codes, tc, ta, tb)                                                           \
    do {                                                                                           \
        TILE_LOAD(room, ta, (x)->a, KN_INT8_BLOCK);                                                \
        TILE_LOAD(room, tb, codes, TILE_STRIDE_WEIGHTS);                                           \
        TILE_ZERO(room, tc);                                                                       \
        TILE_DOT(room, tc, ta, tb);                                                                \
        TILE_STORE(room, tc, (room)->sums[tc], TILE_BYTES);                                        \
    } while (0)

/* Block x's integer sums of high and of low bytes, to room->sums[0] and [1]. */
#define SUMS_WIDE(room, x, codes)                                                                  \
    do {                                                                                           \
        TILE_LOAD(room, 4, codes, TILE_STRIDE_WEIGHTS);                                            \
        TILE_LOAD(room, 2, (x)->high.a, KN_INT8_BLOCK);                                            \
        TILE_LOAD(room, 3, (x)->low, KN_INT8_BLOCK);                                               \
        TILE_ZERO(room, 0);                                                                        \
        TILE_ZERO(room, 1);                                                                        \
        TILE_DOT(room, 0, 2, 4);                                                                   \
        TILE_DOT(room, 1, 3, 4);                                                                   \
        TILE_STORE(room, 0, (room)->sums[0], TILE_BYTES);                                          \
        TILE_STORE(room, 1, (room)->sums[1], TILE_BYTES);                                          \
    } while (0)

/* Sums of high and low bytes to those of the whole codes, in sums[0]. */
INLINE void sums_join(int32_t (*sums)[CPU_ROWS][CPU_LANES])
{
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) {
        __m512i high = _mm512_load_si512(sums[0][r]), low = _mm512_load_si512(sums[1][r]);
        high = _mm512_sub_epi32(_mm512_slli_epi32(high, 8), high);
        _mm512_store_si512(sums[0][r], _mm512_add_epi32(high, low));
    }
}

/* acc continues over one block whose sums are there. */
INLINE void scale(const bool has_min, const struct q8_tile *t, const struct act_block *x,
                  uint32_t b, int32_t (*sums)[CPU_LANES], __m512 acc[16])
{
    __m512 d = _mm512_loadu_ps(t->d + (size_t)b * CPU_LANES), m = d;
    int32_t start[CPU_ROWS];
    if (has_min) {
        m = _mm512_loadu_ps(t->m + (size_t)b * CPU_LANES);
    } else {
        __m128i shift = _mm_cvtsi32_si128(__builtin_ctz(t->zero));
        _mm512_storeu_si512(start, _mm512_sll_epi32(_mm512_loadu_si512(x->asum_neg), shift));
    }
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) {
        __m512i sum = _mm512_load_si512(sums[r]);
        if (!has_min)
            sum = _mm512_add_epi32(sum, _mm512_set1_epi32(start[r]));
        acc[r] = _mm512_fmadd_ps(_mm512_mul_ps(d, _mm512_set1_ps(x->da[r])),
                                 _mm512_cvtepi32_ps(sum), acc[r]);
        if (has_min)
            acc[r] = _mm512_fmadd_ps(m, _mm512_set1_ps(x->sa[r]), acc[r]);
    }
}

/* All 16 rows of the row block are computed (what is not asked for is whatever was staged before, and dropped). */
INLINE void rows_run(const bool has_min, const bool wide, const struct q8_tile *t)
{
    struct tile_room *room = t->tiles;
    const uint8_t *codes = codes_of(t);
    const struct act_block *x = t->x;
    const struct act_wide *xw = t->x;
    uint32_t b = 0, end_row = t->row + t->n_rows;
    __m512 acc[16];
#pragma GCC unroll 16
    for (uint32_t r = 0; r < 16; r++) {
        acc[r] = _mm512_setzero_ps();
        if (r >= t->row && r < end_row)
            acc[r] = _mm512_loadu_ps(t->acc + (r - t->row) * t->acc_stride);
    }
    for (; wide && b < t->n_blocks; b++) {
        SUMS_WIDE(room, &xw[b], codes + b * 512);
        sums_join(room->sums);
        scale(has_min, t, &xw[b].high, b, room->sums[0], acc);
    }
    for (; b + 2 <= t->n_blocks; b += 2) {
        SUMS(room, &x[b], codes + b * 512, 0, 2, 4);
        SUMS(room, &x[b + 1], codes + (b + 1) * 512, 1, 3, 5);
        scale(has_min, t, &x[b], b, room->sums[0], acc);
        scale(has_min, t, &x[b + 1], b + 1, room->sums[1], acc);
    }
    if (b < t->n_blocks) {
        SUMS(room, &x[b], codes + b * 512, 0, 2, 4);
        scale(has_min, t, &x[b], b, room->sums[0], acc);
    }
#pragma GCC unroll 16
    for (uint32_t r = 0; r < 16; r++)
        if (r >= t->row && r < end_row)
            _mm512_storeu_ps(t->acc + (r - t->row) * t->acc_stride, acc[r]);
}

static void q8_amx(const struct q8_tile *t)
{
    bool halves = t->form == FORM_NIB_2 || t->form == FORM_NIB_2_MIN || t->form == FORM_BYTE_2;
    if (halves || t->n_rows < CPU_TILE_ROWS_MIN || !t->tiles || !t->tiles->on)
        q8_avx512(t);
    else if (t->m)
        t->wide ? rows_run(true, true, t) : rows_run(true, false, t);
    else
        t->wide ? rows_run(false, true, t) : rows_run(false, false, t);
}
