/* matmul_scalar.c: the packed products in plain C, for machines without AVX2 and as the plain form
 * of what the vector files do. Bit for bit the same for quantised weights (kn_int8.h). */
#include "kernels.h"
#include <math.h>
#include <string.h>

/* Signed codes (u - zero) of one block, [column][lane]. */
static void codes_expand(const struct q8_tile *t, uint32_t block,
                         int16_t q[KN_INT8_BLOCK][CPU_LANES])
{
    const uint8_t *at = t->codes + (size_t)block * (t->form >= FORM_BYTE ? 512 : 256);
    for (unsigned k = 0; k < KN_INT8_BLOCK; k++)
        for (unsigned lane = 0; lane < CPU_LANES; lane++) {
            unsigned u, j = k % 16;
            if (t->form >= FORM_BYTE)
                u = at[k / 4 * 64 + lane * 4 + k % 4];
            else
                u = at[j / 4 * 64 + lane * 4 + j % 4] >> (k / 16 * 4) & 15;
            q[k][lane] = (int16_t)(t->form == FORM_TABLE ? t->table[u] : (int)u - t->zero);
        }
}

/* Codes of one row in its block; high and low bytes become whole numbers again. */
static void acts_expand(const struct q8_tile *t, const struct act_block *x, uint32_t row,
                        int a[KN_INT8_BLOCK])
{
    const int8_t *low = t->wide ? ((const struct act_wide *)(const void *)x)->low[row] : NULL;
    for (unsigned k = 0; k < KN_INT8_BLOCK; k++)
        a[k] = low ? KN_INT16_BASE * x->a[row][k] + low[k] : x->a[row][k];
}

static void block_add(const struct q8_tile *t, uint32_t block, unsigned n_sub, bool has_min,
                      int16_t q[KN_INT8_BLOCK][CPU_LANES])
{
    const struct act_block *x = t->wide ? &((const struct act_wide *)t->x + block)->high
                                        : (const struct act_block *)t->x + block;
    unsigned len = KN_INT8_BLOCK / n_sub;
    for (uint32_t r = t->row; r < t->row + t->n_rows; r++) {
        float *acc = t->acc + (r - t->row) * t->acc_stride;
        int a[KN_INT8_BLOCK];
        acts_expand(t, x, r, a);
        for (unsigned s = 0; s < n_sub; s++) {
            const float *d = t->d + ((size_t)block * n_sub + s) * CPU_LANES;
            int32_t sum[CPU_LANES] = {0};
            for (unsigned k = s * len; k < (s + 1) * len; k++)
                for (unsigned lane = 0; lane < CPU_LANES; lane++)
                    sum[lane] += q[k][lane] * a[k];
            for (unsigned lane = 0; lane < CPU_LANES; lane++)
                acc[lane] = fmaf(d[lane] * x->da[r], (float)sum[lane], acc[lane]);
            if (!has_min)
                continue;
            const float *m = t->m + ((size_t)block * n_sub + s) * CPU_LANES;
            float sa = n_sub == 2 ? x->sa_half[s][r] : x->sa[r];
            for (unsigned lane = 0; lane < CPU_LANES; lane++)
                acc[lane] = fmaf(m[lane], sa, acc[lane]);
        }
    }
}

static void q8_scalar(const struct q8_tile *t)
{
    bool two = t->form == FORM_NIB_2 || t->form == FORM_NIB_2_MIN || t->form == FORM_BYTE_2;
    int16_t q[KN_INT8_BLOCK][CPU_LANES];
    for (uint32_t b = 0; b < t->n_blocks; b++) {
        codes_expand(t, b, q);
        block_add(t, b, two ? 2 : 1, t->m != NULL, q);
    }
}

static void floats_scalar(const struct float_tile *t)
{
    size_t elem = t->type == KN_F32 ? 4 : 2;
    for (uint32_t g = 0; g < t->n_groups; g++)
        for (uint32_t k = 0; k < t->n_k; k++) {
            const uint8_t *at = (const uint8_t *)t->w + g * t->group_bytes + k * t->step;
            float w[CPU_LANES];
            for (unsigned lane = 0; lane < CPU_LANES; lane++) {
                uint16_t h;
                memcpy(&h, at + lane * elem, 2);
                if (t->type == KN_F32)
                    memcpy(&w[lane], at + lane * 4, 4);
                else
                    w[lane] = t->type == KN_F16 ? kn_f16_to_f32(h) : kn_bf16_to_f32(h);
            }
            for (uint32_t r = 0; r < t->n_rows; r++) {
                float *acc = t->acc + g * t->acc_group + r * t->acc_stride;
                for (unsigned lane = 0; lane < CPU_LANES; lane++)
                    acc[lane] = fmaf(w[lane], t->x[(size_t)k * CPU_ROWS + r], acc[lane]);
            }
        }
}

static void halves_widen(const uint8_t *p, float *out)
{
    uint16_t h[CPU_LANES];
    memcpy(h, p, sizeof h);
    for (unsigned lane = 0; lane < CPU_LANES; lane++)
        out[lane] = kn_f16_to_f32(h[lane]);
}

static void scales_super(const struct scale_src *s, float *d, float *m)
{
    unsigned row = s->n_sub * CPU_LANES, mins = s->has_min ? row : 0;
    unsigned halves = (1u + s->has_min) * CPU_LANES * 2;
    float fd[CPU_LANES], fm[CPU_LANES] = {0};
    for (uint32_t b = s->first; b < s->first + s->n_blocks; b++, d += row, m += mins) {
        const uint8_t *p = s->p + (size_t)(b / 8) * (halves + 8 * (row + mins));
        const uint8_t *small = p + halves + (size_t)(b % 8) * (row + mins);
        halves_widen(p, fd);
        for (unsigned i = 0; i < row; i++)
            d[i] = fd[i % CPU_LANES] * (float)(int8_t)small[i];
        if (!s->has_min)
            continue;
        halves_widen(p + CPU_LANES * 2, fm);
        for (unsigned i = 0; i < row; i++)
            m[i] = -(fm[i % CPU_LANES] * (float)small[row + i]);
    }
}

static void scales_scalar(const struct scale_src *s, float *d, float *m)
{
    if (s->super) {
        scales_super(s, d, m);
        return;
    }
    unsigned step = (1u + s->has_min) * CPU_LANES * 2;
    for (uint32_t i = 0; i < s->n_blocks; i++) {
        const uint8_t *p = s->p + (size_t)(s->first + i) * step;
        halves_widen(p, d + (size_t)i * CPU_LANES);
        if (s->has_min)
            halves_widen(p + CPU_LANES * 2, m + (size_t)i * CPU_LANES);
    }
}

static void quantise_scalar(const float *x, uint32_t n_blocks, struct act_block *blocks,
                            uint32_t row, bool halves)
{
    for (uint32_t b = 0; b < n_blocks; b++) {
        struct act_block *t = &blocks[b];
        float da;
        int16_t sum[2];
        kn_int8_quantise(x + (size_t)b * KN_INT8_BLOCK, KN_INT8_BLOCK, t->a[row], &da, sum);
        act_row_set(t, row, da, (const int32_t[2]){sum[0], sum[1]}, halves);
    }
}

static void quantise_wide_scalar(const float *x, uint32_t n_blocks, struct act_wide *blocks,
                                 uint32_t row, bool halves)
{
    for (uint32_t b = 0; b < n_blocks; b++) {
        struct act_wide *t = &blocks[b];
        int16_t a[KN_INT8_BLOCK];
        int32_t sum[2];
        float da;
        kn_int16_quantise(x + (size_t)b * KN_INT8_BLOCK, KN_INT8_BLOCK, a, &da, sum);
        for (unsigned k = 0; k < KN_INT8_BLOCK; k++) {
            t->high.a[row][k] = kn_int16_high(a[k]);
            t->low[row][k] = kn_int16_low(a[k]);
        }
        act_row_set(&t->high, row, da, sum, halves);
    }
}

const struct matmul_kernels matmul_scalar = {.name = "scalar",
                                             .q8 = q8_scalar,
                                             .floats = floats_scalar,
                                             .scales = scales_scalar,
                                             .quantise = quantise_scalar,
                                             .quantise_wide = quantise_wide_scalar};
