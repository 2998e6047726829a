/* tiles.h: the few tile operations that matmul_amx_body.h is written in, with two bodies.
 *
 *   processor   AMX instructions. Written as asm of our own: the compiler's intrinsics of gcc 12 do not say
 *               that they read and write memory.
 *   TILES_MODEL plain C, exact: the same registers in a struct. It also refuses what the processor would
 *               refuse (#UD, #GP): tiles used without a configuration, shapes that do not fit each other.
 *               With it the kernel runs, and is tested, on machines without AMX.
 *
 * Eight tiles of up to 16 rows of up to 64 bytes. Tile numbers are constants of the source text.
 *
 *     C [16 rows of x][16 outputs] int32  +=  A [16 rows of x][4 n bytes] . B [n][16 outputs][4 bytes]
 *
 *        A  m: x x x x | x x x x | ..         B  0: o0: k0 k1 k2 k3 | o1: k0 .. k3 | ... | o15
 *                                                1: o0: k4 .. k7    | ...
 *
 * B's rows are the chunks of pack.h, A's rows the staged codes of kernels.h: both lie in memory as tiles
 * want them. */
#ifndef BACKCAST_CPU_TILES_H
#define BACKCAST_CPU_TILES_H
#include "kernels.h"
#include "kn_assert.h"
#include <string.h>

#define TILE_STRIDE_WEIGHTS 64

#if !defined(TILES_MODEL)

#define TILE_CONFIG(room, c) __asm__ volatile("ldtilecfg %0" : : "m"(*(c)) : "memory")
#define TILE_RELEASE(room) __asm__ volatile("tilerelease" : : : "memory")
#define TILE_ZERO(room, t) __asm__ volatile("tilezero %%tmm" #t : : : "memory")
#define TILE_LOAD(room, t, p, stride)                                                              \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t : : "r"(p), "r"((size_t)(stride)) : "memory")
#define TILE_STORE(room, t, p, stride)                                                             \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)"                                           \
                     :                                                                             \
                     : "r"(p), "r"((size_t)(stride))                                               \
                     : "memory")
/* c += a (signed) . b (unsigned) */
#define TILE_DOT(room, c, a, b)                                                                    \
    __asm__ volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #c : : : "memory")

#else

#define TILE_CONFIG(room, c) model_config(&(room)->model, c)
#define TILE_RELEASE(room) model_release(&(room)->model)
#define TILE_ZERO(room, t) model_zero(&(room)->model, t)
#define TILE_LOAD(room, t, p, stride) model_load(&(room)->model, t, p, stride)
#define TILE_STORE(room, t, p, stride) model_store(&(room)->model, t, p, stride)
#define TILE_DOT(room, c, a, b) model_dot(&(room)->model, c, a, b)

/* Palette 1; a tile has rows and bytes a row, or neither. Loading a configuration clears the tiles. */
static inline void model_config(struct tile_model *m, const struct tile_config *c)
{
    static const uint8_t zeros[sizeof c->reserved];
    kn_assert(c->palette == 1 && c->start_row == 0);
    kn_assert(memcmp(c->reserved, zeros, sizeof zeros) == 0);
    for (int t = 0; t < 16; t++) {
        kn_assert(c->rows[t] <= TILE_ROWS && c->bytes[t] <= TILE_BYTES);
        kn_assert((c->rows[t] == 0) == (c->bytes[t] == 0));
        kn_assert(t < TILES || c->rows[t] == 0);
    }
    m->config = *c;
    memset(m->data, 0, sizeof m->data);
}

static inline void model_release(struct tile_model *m)
{
    memset(m, 0, sizeof *m);
}

static inline void model_check(const struct tile_model *m, int t)
{
    kn_assert(m->config.palette == 1 && t >= 0 && t < TILES && m->config.rows[t] > 0);
}

static inline void model_zero(struct tile_model *m, int t)
{
    model_check(m, t);
    memset(m->data[t], 0, sizeof m->data[t]);
}

static inline void model_load(struct tile_model *m, int t, const void *p, size_t stride)
{
    model_zero(m, t); /* what lies behind the configured rows and bytes */
    for (int r = 0; r < m->config.rows[t]; r++)
        memcpy(m->data[t][r], (const uint8_t *)p + (size_t)r * stride, m->config.bytes[t]);
}

static inline void model_store(const struct tile_model *m, int t, void *p, size_t stride)
{
    model_check(m, t);
    for (int r = 0; r < m->config.rows[t]; r++)
        memcpy((uint8_t *)p + (size_t)r * stride, m->data[t][r], m->config.bytes[t]);
}

static inline void model_dot(struct tile_model *m, int c, int a, int b)
{
    const struct tile_config *f = &m->config;
    model_check(m, c);
    model_check(m, a);
    model_check(m, b);
    kn_assert(c != a && c != b && a != b);
    kn_assert(f->bytes[a] % 4 == 0 && f->bytes[b] % 4 == 0 && f->bytes[c] % 4 == 0);
    kn_assert(f->rows[c] == f->rows[a] && f->bytes[c] == f->bytes[b] &&
              f->rows[b] * 4 == f->bytes[a]);
    m->n_dots++;
    for (int r = 0; r < f->rows[c]; r++) {
        uint32_t sum[TILE_BYTES / 4]; /* wraps, as the processor's does; behind the shape: zeros */
        memcpy(sum, m->data[c][r], sizeof sum);
        for (int k = 0; k < f->rows[b]; k++) {
            const uint8_t *x = m->data[a][r] + k * 4;
            uint32_t w[TILE_BYTES / 4]; /* an output's four bytes */
            memcpy(w, m->data[b][k], sizeof w);
            for (int o = 0; o < TILE_BYTES / 4; o++)
                sum[o] += (uint32_t)((int8_t)x[0] * (int)(w[o] & 255) +
                                     (int8_t)x[1] * (int)(w[o] >> 8 & 255) +
                                     (int8_t)x[2] * (int)(w[o] >> 16 & 255) +
                                     (int8_t)x[3] * (int)(w[o] >> 24));
        }
        memcpy(m->data[c][r], sum, sizeof sum);
    }
}

#endif
#endif
