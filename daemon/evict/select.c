/* select.c: from values to a list of kept rows. Pure functions: no state, no model, no cache.
 *
 *   value   0.3  0.9  0.1  0.9  0.5  0.2  -inf       higher = goes first
 *           ^^^ frozen = 1                 ^^^ recent = 1
 *   keep 4: 0         2              5      6        protected rows, then the lowest of the rest
 */
#include "evict.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A total order: NaN (a model that computes nonsense) above everything, equal to itself. */
static int value_compare(float a, float b)
{
    if (isnan(a) || isnan(b))
        return (int)isnan(a) - (int)isnan(b);
    return (a > b) - (a < b);
}

/* ---- spans ----------------------------------------------------------------------------------- */

/* The window slides; its values are kept sorted: one out and one in for every step. */
struct window {
    float sorted[EVICT_SPAN_MAX];
    uint32_t n;
};

static void window_add(struct window *w, float v)
{
    uint32_t at = w->n++;
    for (; at > 0 && value_compare(w->sorted[at - 1], v) > 0; at--)
        w->sorted[at] = w->sorted[at - 1];
    w->sorted[at] = v;
}

static void window_remove(struct window *w, float v)
{
    uint32_t at = 0;
    while (value_compare(w->sorted[at], v) != 0)
        at++;
    w->n--;
    memmove(w->sorted + at, w->sorted + at + 1, (w->n - at) * sizeof v);
}

void select_span(const float *value, uint32_t n, uint32_t span, double quantile, float *ret)
{
    bc_assert(span % 2 == 1 && span <= EVICT_SPAN_MAX);
    bc_assert(quantile >= 0 && quantile <= 1);
    uint32_t half = span / 2, scored = n, next = 0;
    struct window w = {.n = 0};
    while (scored > 0 && value[scored - 1] == -INFINITY)
        scored--;
    for (uint32_t i = 0; i < scored; i++) {
        if (i > half)
            window_remove(&w, value[i - half - 1]);
        for (; next < scored && next <= i + half; next++)
            window_add(&w, value[next]);
        ret[i] = w.sorted[(uint32_t)(quantile * (w.n - 1))];
    }
    for (uint32_t i = scored; i < n; i++)
        ret[i] = -INFINITY;
}

/* ---- the cut --------------------------------------------------------------------------------- */

static int by_value_then_index(const void *a, const void *b, void *value)
{
    uint32_t i = *(const uint32_t *)a, j = *(const uint32_t *)b;
    int c = value_compare(((const float *)value)[i], ((const float *)value)[j]);
    return c != 0 ? c : (i > j) - (i < j);
}

static int by_index(const void *a, const void *b)
{
    uint32_t i = *(const uint32_t *)a, j = *(const uint32_t *)b;
    return (i > j) - (i < j);
}

uint32_t select_keep(const float *value, uint32_t n, uint32_t keep, uint32_t frozen,
                     uint32_t recent, uint32_t *scratch, uint32_t *ret_keep)
{
    if (n <= keep) {
        for (uint32_t i = 0; i < n; i++)
            ret_keep[i] = i;
        return n;
    }
    bc_assert((uint64_t)frozen + recent <= keep);
    uint32_t n_middle = n - frozen - recent, n_chosen = keep - frozen - recent, k = 0;
    for (uint32_t i = 0; i < n_middle; i++)
        scratch[i] = frozen + i;
    qsort_r(scratch, n_middle, sizeof *scratch, by_value_then_index, (void *)(uintptr_t)value);
    qsort(scratch, n_chosen, sizeof *scratch, by_index);
    for (uint32_t i = 0; i < frozen; i++)
        ret_keep[k++] = i;
    for (uint32_t i = 0; i < n_chosen; i++)
        ret_keep[k++] = scratch[i];
    for (uint32_t i = n - recent; i < n; i++)
        ret_keep[k++] = i;
    return k;
}
