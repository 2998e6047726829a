/* head.c: loading weights, and what needs single rows of a matrix or all of the vocabulary. */
#include "linear.h"
#include "ops.h"
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- load --------------------------------------------------------------------------------------------- */

struct pack_job {
    const struct kn_weight *w;
    const struct kn_tensor *src;
};

static void pack_items(void *ctx, unsigned thread, uint32_t first, uint32_t end)
{
    (void)thread;
    const struct pack_job *j = ctx;
    pack_groups(j->w, j->src, first, end);
}

int cpu_weight_load(struct kn *kn, const struct kn_tensor *src, struct kn_weight **ret)
{
    struct kn_cpu *c = cpu_of(kn);
    struct kn_weight *w = malloc(sizeof *w);
    if (!w)
        return KN_ENOMEM;
    int code = pack_plan(w, src, c->stage.pairs != NULL);
    if (code != KN_OK)
        goto fail;
    code = KN_ENOMEM;
    void *data;
    if (slab_take(&c->slabs, w->bytes, &data, &w->slab) != 0)
        goto fail;
    w->data = data;
    struct pack_job j = {w, src};
    team_run(c->team, pack_items, &j, w->n_groups, 4);
    kn->bytes_weights += w->bytes;
    *ret = w;
    return KN_OK;
fail:
    free(w);
    return code;
}

void cpu_weight_free(struct kn *kn, struct kn_weight **w)
{
    if (!*w)
        return;
    kn_assert((*w)->magic == CPU_WEIGHT_MAGIC && kn->bytes_weights >= (*w)->bytes);
    kn->bytes_weights -= (*w)->bytes;
    (*w)->magic = 0;
    slab_drop(&cpu_of(kn)->slabs, (*w)->slab, (*w)->data);
    free(*w);
    *w = NULL;
}

size_t cpu_weight_bytes(const struct kn_weight *w)
{
    kn_assert(w->magic == CPU_WEIGHT_MAGIC);
    return w->bytes;
}

/* ---- embed ---------------------------------------------------------------------------------------------- */

struct embed_job {
    const struct kn_weight *w;
    const int32_t *ids;
    float *out;
};

static void embed_items(void *ctx, unsigned thread, uint32_t first, uint32_t end)
{
    (void)thread;
    const struct embed_job *j = ctx;
    for (uint32_t r = first; r < end; r++) {
        kn_assert(j->ids[r] >= 0 && (uint32_t)j->ids[r] < j->w->rows);
        pack_row(j->w, (uint32_t)j->ids[r], j->out + (size_t)r * j->w->cols);
    }
}

void cpu_embed(struct kn *kn, const struct kn_weight *w, const struct kn_batch *b, float *out)
{
    kn_assert(w->magic == CPU_WEIGHT_MAGIC);
    struct embed_job j = {w, b->ids, out};
    team_run(cpu_of(kn)->team, embed_items, &j, b->n_rows, 4);
}

/* ---- one logit a row -------------------------------------------------------------------------------------- */

struct logit_job {
    struct kn_cpu *c;
    const struct kn_weight *w;
    const int32_t *ids;
    float *ret;
};

/* No hardware foresees which group comes next. Of floats it soon sees the step from line to line in their bundle, and asking for
 * all of those costs more than it brings (tests/bench/NOTES.md). */
static void logit_ask(const struct kn_weight *w, uint32_t id)
{
    for (size_t b = 0; w->format && id < w->rows && b < w->group_bytes; b += 64)
        __builtin_prefetch(pack_group(w, id / CPU_LANES) + b, 0, 2);
}

static void logit_items(void *ctx, unsigned thread, uint32_t first, uint32_t end)
{
    const struct logit_job *j = ctx;
    for (uint32_t r = first; r < end; r++) {
        float acc[CPU_LANES];
        uint32_t id = (uint32_t)j->ids[r];
        kn_assert(j->ids[r] >= 0 && id < j->w->rows);
        if (r + 1 < end)
            logit_ask(j->w, (uint32_t)j->ids[r + 1]);
        struct dot d = {.w = j->w,
                        .group = id / CPU_LANES,
                        .n_groups = 1,
                        .row = r,
                        .n_rows = 1,
                        .acc = acc,
                        .acc_stride = CPU_LANES,
                        .acc_group = CPU_LANES};
        dot_run(j->c, thread, &d);
        j->ret[r] = acc[id % CPU_LANES];
    }
}

void cpu_row_logit(struct kn *kn, const struct kn_weight *w, const float *x, uint32_t rows,
                   const int32_t *ids, float *ret)
{
    struct kn_cpu *c = cpu_of(kn);
    kn_assert(w->magic == CPU_WEIGHT_MAGIC);
    uint32_t fit = stage_fit(w->cols);
    for (uint32_t r = 0; r < rows; r += fit) {
        uint32_t n = KN_MIN(fit, rows - r);
        struct logit_job j = {c, w, ids + r, ret + r};
        stage_fill(c, 1, &w, x + (size_t)r * w->cols, n);
        team_run(c->team, logit_items, &j, n, 4);
    }
}

/* ---- log-sum-exp over the vocabulary ------------------------------------------------------------------------ */

/* Slices of LSE_SLICE rows of w, whatever the threads: each gives (max, sum of exp) per row of x, merged
 * in ascending order. Inside a slice go tiles of LSE_TILE logits a row, small enough to stay near: a tile's sums are
 * made for all rows, and join their rows' (max, sum) at once. */
struct lse_job {
    struct kn_cpu *c;
    const struct kn_weight *w;
    uint32_t n_rows, first_slice;
    float *max, *sum; /* [slices][LSE_ROWS] */
};

/* Logits of all rows for n rows of w from `from` on: room->logits [n_rows][LSE_TILE]. */
static void lse_logits(const struct lse_job *j, unsigned thread, uint32_t from, uint32_t n)
{
    uint32_t n_groups = (n + CPU_LANES - 1) / CPU_LANES;
    struct dot d = {.w = j->w, .n_rows = j->n_rows, .acc_stride = LSE_TILE, .acc_group = CPU_LANES};
    for (uint32_t g = 0; g < n_groups; g += d.n_groups) {
        d.group = from / CPU_LANES + g;
        d.n_groups = KN_MIN((uint32_t)CPU_FLOAT_GROUPS, n_groups - g);
        d.acc = j->c->scratch[thread].logits + g * CPU_LANES;
        dot_run(j->c, thread, &d);
    }
}

static void lse_slice(const struct lse_job *j, unsigned thread, uint32_t slice, float *ret_max,
                      float *ret_sum)
{
    struct cpu_scratch *room = &j->c->scratch[thread];
    uint32_t from = slice * LSE_SLICE, end = from + KN_MIN((uint32_t)LSE_SLICE, j->w->rows - from);
    struct lse_tile t = {.x = room->logits,
                         .x_stride = LSE_TILE,
                         .n_rows = j->n_rows,
                         .max = room->lse_max,
                         .sum = room->lse_sum};
    for (uint32_t i = 0; i < j->n_rows * CPU_LANES; i++) {
        t.max[i] = -FLT_MAX;
        t.sum[i] = 0.0f;
    }
    for (; from < end; from += LSE_TILE) {
        t.n = KN_MIN((uint32_t)LSE_TILE, end - from);
        lse_logits(j, thread, from, t.n);
        j->c->vec->lse_add(&t);
    }
    for (uint32_t r = 0; r < j->n_rows; r++)
        j->c->vec->lse_row(t.max + (size_t)r * CPU_LANES, t.sum + (size_t)r * CPU_LANES,
                           &ret_max[r], &ret_sum[r]);
}

static void lse_items(void *ctx, unsigned thread, uint32_t first, uint32_t end)
{
    const struct lse_job *j = ctx;
    products_begin(j->c, thread, j->n_rows);
    for (uint32_t i = first; i < end; i++)
        lse_slice(j, thread, j->first_slice + i, &j->max[i * LSE_ROWS], &j->sum[i * LSE_ROWS]);
    products_end(j->c, thread);
}

static void lse_piece(struct kn_cpu *c, const struct kn_weight *w, uint32_t n_rows, float *ret)
{
    uint32_t n_slices = (w->rows + LSE_SLICE - 1) / LSE_SLICE;
    struct lse_job j = {
        .c = c, .w = w, .n_rows = n_rows, .max = c->lse, .sum = c->lse + LSE_SLICES * LSE_ROWS};
    double max[LSE_ROWS], sum[LSE_ROWS];
    for (uint32_t r = 0; r < n_rows; r++) {
        max[r] = -INFINITY;
        sum[r] = 0.0;
    }
    for (; j.first_slice < n_slices; j.first_slice += LSE_SLICES) {
        uint32_t n = KN_MIN((uint32_t)LSE_SLICES, n_slices - j.first_slice);
        team_run(c->team, lse_items, &j, n, 1);
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t r = 0; r < n_rows; r++) {
                double m = j.max[i * LSE_ROWS + r], s = j.sum[i * LSE_ROWS + r];
                if (m > max[r]) { /* seldom: so one exp at a time, of two */
                    sum[r] = sum[r] * exp(max[r] - m) + s;
                    max[r] = m;
                } else {
                    sum[r] += s * exp(m - max[r]);
                }
            }
    }
    for (uint32_t r = 0; r < n_rows; r++)
        ret[r] = (float)(max[r] + log(sum[r]));
}

void cpu_row_lse(struct kn *kn, const struct kn_weight *w, const float *x, uint32_t rows,
                 float *ret)
{
    struct kn_cpu *c = cpu_of(kn);
    kn_assert(w->magic == CPU_WEIGHT_MAGIC);
    uint32_t fit = KN_MIN(stage_fit(w->cols), (uint32_t)LSE_ROWS);
    for (uint32_t r = 0; r < rows; r += fit) {
        uint32_t n = KN_MIN(fit, rows - r);
        stage_fill(c, 1, &w, x + (size_t)r * w->cols, n);
        lse_piece(c, w, n, ret + r);
    }
}
