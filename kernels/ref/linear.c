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
                 union ref_lanes *turned)
{
    float line[CHUNK];
    if (n < REF_LANES)
        memset(turned, 0, len * sizeof *turned);
    for (uint32_t i = 0; i < n; i++) {
        ref_weight_expand(w, first + i, k, len, line);
        for (uint32_t j = 0; j < len; j++)
            turned[j].f[i] = line[j];
    }
}

static void add_chunk(const union ref_lanes *turned, const float *x, uint32_t len,
                      union ref_lanes *acc)
{
    ref_four a0 = acc->v[0], a1 = acc->v[1], a2 = acc->v[2], a3 = acc->v[3];
    for (uint32_t k = 0; k < len; k++) {
        const ref_four *w = turned[k].v;
        a0 += w[0] * x[k];
        a1 += w[1] * x[k];
        a2 += w[2] * x[k];
        a3 += w[3] * x[k];
    }
    *acc = (union ref_lanes){{a0, a1, a2, a3}};
}

/* Two rows at once: each column of weights is fetched once for both. */
static void add_chunk_pair(const union ref_lanes *turned, const float *x0, const float *x1,
                           uint32_t len, union ref_lanes *acc)
{
    ref_four a0 = acc[0].v[0], a1 = acc[0].v[1], a2 = acc[0].v[2], a3 = acc[0].v[3];
    ref_four b0 = acc[1].v[0], b1 = acc[1].v[1], b2 = acc[1].v[2], b3 = acc[1].v[3];
    for (uint32_t k = 0; k < len; k++) {
        const ref_four *w = turned[k].v;
        a0 += w[0] * x0[k];
        a1 += w[1] * x0[k];
        a2 += w[2] * x0[k];
        a3 += w[3] * x0[k];
        b0 += w[0] * x1[k];
        b1 += w[1] * x1[k];
        b2 += w[2] * x1[k];
        b3 += w[3] * x1[k];
    }
    acc[0] = (union ref_lanes){{a0, a1, a2, a3}};
    acc[1] = (union ref_lanes){{b0, b1, b2, b3}};
}

void ref_linear_tile(const struct kn_weight *w, uint32_t first, uint32_t n, const float *x,
                     uint32_t rows, union ref_lanes *acc)
{
    union ref_lanes turned[CHUNK];
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
    union ref_lanes acc[REF_TILE_ROWS];
    for (uint32_t first = 0; first < w->rows; first += REF_LANES) {
        uint32_t n = KN_MIN((uint32_t)REF_LANES, w->rows - first);
        ref_linear_tile(w, first, n, x, rows, acc);
        for (uint32_t r = 0; r < rows; r++)
            for (uint32_t i = 0; i < n; i++) {
                float t = acc[r].f[i], *at = out + (size_t)r * w->rows + first + i;
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
