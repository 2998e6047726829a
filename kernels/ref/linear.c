/* linear.c: x . w^T over expanded weights, one f32 accumulator an output, ascending k, a product
 * and a sum a step. Sixteen outputs at a time are expanded, 256 columns at a time, and turned so
 * that a column of them is one vector; up to 64 rows of x then use them:
 *
 *      w rows first..+16         turned [k][16]          acc[r] += x[r][k] * turned[k]
 *      o0 |k0 k1 k2 ...|         k0 |o0 o1 ... o15|
 *      o1 |k0 k1 k2 ...|   -->   k1 |o0 o1 ... o15|
 *
 * A row's sums do not see how many other rows there are. */
#include "ref.h"
#include <string.h>

#define CHUNK 256 /* columns expanded at a time: a multiple of every block length */

static void turn(const struct kn_weight *w, uint32_t first, uint32_t n, uint32_t k, uint32_t len,
                 ref_lanes *turned)
{
    float line[CHUNK];
    if (n < REF_LANES)
        memset(turned, 0, len * sizeof *turned);
    for (uint32_t i = 0; i < n; i++) {
        ref_weight_expand(w, first + i, k, len, line);
        for (uint32_t j = 0; j < len; j++)
            turned[j][i] = line[j];
    }
}

static void add_chunk(const ref_lanes *turned, const float *x, uint32_t len, ref_lanes *acc)
{
    ref_lanes a = *acc;
    for (uint32_t k = 0; k < len; k++)
        a += turned[k] * x[k];
    *acc = a;
}

/* Two rows at once: each column of weights is fetched once for both. */
static void add_chunk_pair(const ref_lanes *turned, const float *x0, const float *x1, uint32_t len,
                           ref_lanes *acc)
{
    ref_lanes a = acc[0], b = acc[1];
    for (uint32_t k = 0; k < len; k++) {
        a += turned[k] * x0[k];
        b += turned[k] * x1[k];
    }
    acc[0] = a;
    acc[1] = b;
}

void ref_linear_tile(const struct kn_weight *w, uint32_t first, uint32_t n, const float *x,
                     uint32_t rows, ref_lanes *acc)
{
    ref_lanes turned[CHUNK];
    memset(acc, 0, rows * sizeof *acc);
    for (uint32_t k = 0; k < w->cols; k += CHUNK) {
        uint32_t len = KN_MIN((uint32_t)CHUNK, w->cols - k), r = 0;
        turn(w, first, n, k, len, turned);
        for (; r + 2 <= rows; r += 2)
            add_chunk_pair(turned, x + (size_t)r * w->cols + k, x + (size_t)(r + 1) * w->cols + k,
                           len, acc + r);
        if (r < rows)
            add_chunk(turned, x + (size_t)r * w->cols + k, len, acc + r);
    }
}

static void linear_one(const struct kn_weight *w, const float *bias, const float *x, uint32_t rows,
                       float *out, bool add)
{
    ref_lanes acc[REF_TILE_ROWS];
    for (uint32_t first = 0; first < w->rows; first += REF_LANES) {
        uint32_t n = KN_MIN((uint32_t)REF_LANES, w->rows - first);
        ref_linear_tile(w, first, n, x, rows, acc);
        for (uint32_t r = 0; r < rows; r++)
            for (uint32_t i = 0; i < n; i++) {
                float t = acc[r][i], *at = out + (size_t)r * w->rows + first + i;
                if (bias)
                    t += bias[first + i];
                *at = add ? *at + t : t;
            }
    }
}

void ref_linear(struct kn *kn, uint32_t n_w, const struct kn_weight *const *w,
                const float *const *bias, const float *x, uint32_t rows, float *const *outs,
                bool add)
{
    (void)kn;
    kn_assert(n_w >= 1 && n_w <= KN_LINEAR_MAX);
    for (uint32_t i = 0; i < n_w; i++) {
        kn_assert(w[i]->magic == REF_WEIGHT_MAGIC && w[i]->cols == w[0]->cols);
        for (uint32_t r = 0; r < rows; r += REF_TILE_ROWS)
            linear_one(w[i], bias ? bias[i] : NULL, x + (size_t)r * w[i]->cols,
                       KN_MIN((uint32_t)REF_TILE_ROWS, rows - r), outs[i] + (size_t)r * w[i]->rows,
                       add);
    }
}
