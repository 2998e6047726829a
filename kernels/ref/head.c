/* head.c: a row against one vocabulary row (its logit) or against all of them (log-sum-exp). Both
 * take the same products in the same order as linear, so row_logit gives exactly the number that
 * linear would. */
#include "ref.h"
#include <math.h>

#define CHUNK 256

void ref_row_logit(struct kn *kn, const struct kn_weight *w, const float *x, uint32_t rows,
                   const int32_t *ids, float *ret)
{
    (void)kn;
    kn_assert(w->magic == REF_WEIGHT_MAGIC);
    for (uint32_t r = 0; r < rows; r++, x += w->cols) {
        float acc = 0.0f, line[CHUNK];
        kn_assert(ids[r] >= 0 && (uint32_t)ids[r] < w->rows);
        for (uint32_t k = 0; k < w->cols; k += CHUNK) {
            uint32_t len = KN_MIN((uint32_t)CHUNK, w->cols - k);
            ref_weight_expand(w, (uint32_t)ids[r], k, len, line);
            for (uint32_t i = 0; i < len; i++)
                acc += line[i] * x[k + i];
        }
        ret[r] = acc;
    }
}

/* log(sum exp) of what was seen so far is max + log(sum). */
struct lse {
    float max;
    double sum;
};

static void lse_add(struct lse *s, const union ref_lanes *logits, uint32_t n)
{
    float max = s->max;
    for (uint32_t i = 0; i < n; i++)
        max = fmaxf(max, logits->f[i]);
    double sum = s->sum * exp((double)s->max - max);
    for (uint32_t i = 0; i < n; i++)
        sum += expf(logits->f[i] - max);
    *s = (struct lse){max, sum};
}

void ref_row_lse(struct kn *kn, const struct kn_weight *w, const float *x, uint32_t rows,
                 float *ret)
{
    (void)kn;
    kn_assert(w->magic == REF_WEIGHT_MAGIC);
    for (uint32_t r = 0; r < rows; r += REF_TILE_ROWS) {
        uint32_t n_rows = KN_MIN((uint32_t)REF_TILE_ROWS, rows - r);
        union ref_lanes acc[REF_TILE_ROWS];
        struct lse s[REF_TILE_ROWS];
        for (uint32_t i = 0; i < n_rows; i++)
            s[i] = (struct lse){-INFINITY, 0.0};
        for (uint32_t first = 0; first < w->rows; first += REF_LANES) {
            uint32_t n = KN_MIN((uint32_t)REF_LANES, w->rows - first);
            ref_linear_tile(w, first, n, x + (size_t)r * w->cols, n_rows, acc);
            for (uint32_t i = 0; i < n_rows; i++)
                lse_add(&s[i], &acc[i], n);
        }
        for (uint32_t i = 0; i < n_rows; i++)
            ret[r + i] = (float)(s[i].max + log(s[i].sum));
    }
}
