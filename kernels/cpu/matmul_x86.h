/* matmul_x86.h: what matmul_avx2.c and matmul_avx512.c share: the kinds of inner loop, and staged rows seen
 * from one kernel's first row. */
#ifndef BACKCAST_MATMUL_X86_H
#define BACKCAST_MATMUL_X86_H
#include <string.h>
#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))

enum codes { NIB, TABLE, BYTE };

/* What the compiler may take as known in one copy of the inner loop. */
struct kind {
    enum codes codes;
    unsigned n_sub;
    bool has_min;
    bool wide; /* activations of 16 bits */
};

/* Asks for what will be read some blocks later. */
INLINE void ahead_ask(const struct q8_tile *t, uint32_t block)
{
    const uint8_t *p = t->ahead + block * t->ahead_step;
    for (size_t i = 0; i < t->ahead_step; i += 64)
        __builtin_prefetch(p + i, 0, 3);
}

/* Every form as (form, kind without `wide`). */
#define EACH_FORM(DO)                                                                              \
    DO(FORM_NIB, NIB, 1, false)                                                                    \
    DO(FORM_NIB_MIN, NIB, 1, true)                                                                 \
    DO(FORM_NIB_2, NIB, 2, false)                                                                  \
    DO(FORM_NIB_2_MIN, NIB, 2, true)                                                               \
    DO(FORM_TABLE, TABLE, 1, false)                                                                \
    DO(FORM_BYTE, BYTE, 1, false)                                                                  \
    DO(FORM_BYTE_MIN, BYTE, 1, true)                                                               \
    DO(FORM_BYTE_2, BYTE, 2, false)

/* The file's tile_run(kind, t), always inline, with kinds as constants: a function each, for one of all of them takes the
 * compiler minutes where memory is checked. */
#define FORM_FUNCTIONS(form, ...)                                                                  \
    static __attribute__((noinline)) void tile_##form##_8(const struct q8_tile *t)                 \
    {                                                                                              \
        tile_run((struct kind){__VA_ARGS__, false}, t);                                            \
    }                                                                                              \
    static __attribute__((noinline)) void tile_##form##_16(const struct q8_tile *t)                \
    {                                                                                              \
        tile_run((struct kind){__VA_ARGS__, true}, t);                                             \
    }

#define FORM_CASE(form, ...)                                                                       \
    case form:                                                                                     \
        t->wide ? tile_##form##_16(t) : tile_##form##_8(t);                                        \
        break;

/* Of matmul_avx512.c, for the AMX tables: what they do not do with tiles. */
void q8_avx512(const struct q8_tile *t);
void floats_avx512(const struct float_tile *t);
void scales_avx512(const struct scale_src *s, float *d, float *m);
void quantise_avx512(const float *x, uint32_t n_blocks, struct act_block *blocks, uint32_t row,
                     bool halves);
void quantise_wide_avx512(const float *x, uint32_t n_blocks, struct act_wide *blocks, uint32_t row,
                          bool halves);

/* The first of a kernel's rows in the present block: its codes, and act_block's arrays of one number a
 * row, shifted to it. Row r and every array are at constant distances. */
struct act_at {
    const int8_t *a;
    const char *rest;
};

INLINE struct act_at act_first(const void *blocks, uint32_t row)
{
    const struct act_block *x = blocks;
    return (struct act_at){x->a[row], (const char *)x + row * sizeof(float)};
}

/* n rows further on in the same block. */
INLINE struct act_at act_down(struct act_at x, uint32_t n)
{
    return (struct act_at){x.a + n * KN_INT8_BLOCK, x.rest + n * sizeof(float)};
}

INLINE void act_next(const struct kind k, struct act_at *x)
{
    const size_t step = k.wide ? sizeof(struct act_wide) : sizeof(struct act_block);
    x->a += step;
    x->rest += step;
}

/* Which bytes of the activations: all that there is with 8 bits, else the high or the low ones. */
#define ACT_HIGH offsetof(struct act_block, a)
#define ACT_LOW offsetof(struct act_wide, low)

/* Columns 4c .. 4c + 3 of row r. */
INLINE int32_t act_codes(const struct act_at *x, const size_t bytes, uint32_t r, unsigned c)
{
    int32_t v;
    memcpy(&v, x->a + bytes + r * KN_INT8_BLOCK + c * 4, sizeof v);
    return v;
}

INLINE float act_float(const struct act_at *x, size_t offset, uint32_t r)
{
    float f;
    memcpy(&f, x->rest + offset + r * sizeof f, sizeof f);
    return f;
}

INLINE float act_da(const struct act_at *x, uint32_t r)
{
    return act_float(x, offsetof(struct act_block, da), r);
}

/* sa and -asum of sub-block s. */
INLINE float act_sa(const struct kind k, const struct act_at *x, unsigned s, uint32_t r)
{
    size_t half = offsetof(struct act_block, sa_half) + s * CPU_ROWS * sizeof(float);
    return act_float(x, k.n_sub == 2 ? half : offsetof(struct act_block, sa), r);
}

INLINE int32_t act_asum_neg(const struct kind k, const struct act_at *x, unsigned s, uint32_t r)
{
    size_t half = offsetof(struct act_block, asum_neg_half) + s * CPU_ROWS * sizeof(int32_t);
    int32_t v;
    memcpy(&v,
           x->rest + (k.n_sub == 2 ? half : offsetof(struct act_block, asum_neg)) + r * sizeof v,
           sizeof v);
    return v;
}
#endif
