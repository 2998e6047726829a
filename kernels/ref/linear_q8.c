/* linear_q8.c: the integer rule of kn_int8.h in plain C: what every fast quantised product must
 * equal, bit for bit. The ref backend itself does not use it (its linear works on expanded floats):
 * it stands here as the thing to compare with. */
#include "kn_int8.h"
#include "kn_assert.h"
#include <math.h>
#include <stdlib.h>

/* A row of activations under rule 1 or 4: its codes and sums of 16-halves, widened. */
struct q_row {
    int16_t *a;
    float *da;
    int32_t *asum;
};

static float dot(const struct kn_int8_format *f, const struct kn_int8_block *w,
                 const struct q_row *x, uint32_t n_blocks)
{
    int len = KN_INT8_BLOCK / f->n_sub;
    float acc = 0.0f;
    for (uint32_t b = 0; b < n_blocks; b++)
        for (int s = 0; s < f->n_sub; s++) {
            const int16_t *a = x->a + (size_t)b * KN_INT8_BLOCK + s * len;
            const uint8_t *u = w[b].u + s * len;
            int32_t isum = 0;
            for (int i = 0; i < len; i++)
                isum += (u[i] - f->zero) * a[i];
            float scale = w[b].d[s] * x->da[b];
            acc = fmaf(scale, (float)isum, acc);
            if (f->has_min) {
                const int32_t *sums = x->asum + (size_t)2 * b;
                int asum = f->n_sub == 2 ? sums[s] : sums[0] + sums[1];
                acc = fmaf(w[b].m[s], x->da[b] * (float)asum, acc);
            }
        }
    return acc;
}

/* a8, asum8: room for one row. */
static void quantise8(const float *x, uint32_t cols, int8_t *a8, int16_t *asum8, struct q_row *ret)
{
    kn_int8_quantise(x, cols, a8, ret->da, asum8);
    for (uint32_t i = 0; i < cols; i++)
        ret->a[i] = a8[i];
    for (uint32_t i = 0; i < cols / 16; i++)
        ret->asum[i] = asum8[i];
}

static void linear_q(const struct kn_tensor *w, const float *x, uint32_t rows, bool wide,
                     float *out)
{
    const struct kn_int8_format *f = kn_int8_format(w->type);
    kn_assert(f && w->cols % KN_INT8_BLOCK == 0);
    uint32_t n_blocks = w->cols / KN_INT8_BLOCK;
    size_t row_bytes = w->bytes / w->rows, n_sums = (size_t)n_blocks * 2;
    struct kn_int8_block *blocks = malloc(n_blocks * sizeof *blocks);
    struct q_row *q = malloc(rows * sizeof *q);
    int16_t *a = malloc((size_t)rows * w->cols * sizeof *a),
            *asum8 = malloc(n_sums * sizeof *asum8);
    int8_t *a8 = malloc(w->cols);
    float *da = malloc((size_t)rows * n_blocks * sizeof *da);
    int32_t *asum = malloc((size_t)rows * n_sums * sizeof *asum);
    kn_assert(blocks && q && a && asum8 && a8 && da && asum);
    for (uint32_t r = 0; r < rows; r++) {
        const float *row = x + (size_t)r * w->cols;
        q[r] = (struct q_row){a + (size_t)r * w->cols, da + (size_t)r * n_blocks,
                              asum + (size_t)r * n_sums};
        if (wide)
            kn_int16_quantise(row, w->cols, q[r].a, q[r].da, q[r].asum);
        else
            quantise8(row, w->cols, a8, asum8, &q[r]);
    }
    for (uint32_t o = 0; o < w->rows; o++) {
        kn_int8_unpack(w->type, (const uint8_t *)w->data + o * row_bytes, 0, n_blocks, blocks);
        for (uint32_t r = 0; r < rows; r++)
            out[(size_t)r * w->rows + o] = dot(f, blocks, &q[r], n_blocks);
    }
    free(blocks);
    free(q);
    free(a);
    free(asum8);
    free(a8);
    free(da);
    free(asum);
}

void kn_ref_linear_q8(const struct kn_tensor *w, const float *x, uint32_t rows, float *out)
{
    linear_q(w, x, rows, false, out);
}

void kn_ref_linear_q16(const struct kn_tensor *w, const float *x, uint32_t rows, float *out)
{
    linear_q(w, x, rows, true, out);
}
