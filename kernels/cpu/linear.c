/* linear.c: x . w^T over packed weights. Rows are staged once a call and shared by all weights of it:
 *
 *     x [rows][cols] --stage--> row blocks of 16, quantised and / or turned to [k][16]
 *                               |
 *     for a group of 16 outputs:  for 64 blocks of columns at a time:
 *          scales of the group -> floats;  every row block:  acc[row][16] += kernel
 *     acc -> + bias -> outs
 *
 * Items of the parallel loop are (part of the rows, group): an output's value is made by one thread
 * from start to end, by the same steps whatever the partition. */
#include "linear.h"
#include "ops.h"
#include <string.h>

struct stage_job {
    struct kn_cpu *c;
    const float *x;
    bool q8, halves, floats, pairs;
};

/* Items are rows. */
static void stage_rows(void *ctx, unsigned thread, uint32_t first, uint32_t end)
{
    (void)thread;
    const struct stage_job *j = ctx;
    const struct stage *s = &j->c->stage;
    for (uint32_t r = first; r < end; r++) {
        const float *x = j->x + (size_t)r * s->cols;
        uint32_t block = r / CPU_ROWS, row = r % CPU_ROWS;
        if (j->q8 && j->c->wide)
            j->c->mat->quantise_wide(x, s->n_blocks, cpu_staged(j->c, block, 0), row, j->halves);
        else if (j->q8)
            j->c->mat->quantise(x, s->n_blocks, cpu_staged(j->c, block, 0), row, j->halves);
        if (j->pairs)
            j->c->mat->pairs(x, s->cols,
                             s->pairs + (size_t)block * ((s->cols + 1) / 2) * CPU_ROWS + row);
        if (!j->floats)
            continue;
        float *to = s->floats + (size_t)block * s->cols * CPU_ROWS + row;
        for (uint32_t k = 0; k < s->cols; k++)
            to[(size_t)k * CPU_ROWS] = x[k];
    }
}

uint32_t stage_fit(uint32_t cols)
{
    uint32_t n_blocks = (cols + KN_INT8_BLOCK - 1) / KN_INT8_BLOCK;
    size_t q8 = STAGE_BLOCKS / n_blocks;
    size_t floats = STAGE_FLOAT_BYTES / ((size_t)cols * CPU_ROWS * sizeof(float));
    size_t blocks = KN_MIN(q8, floats);
    return (uint32_t)KN_MIN(blocks * CPU_ROWS, (size_t)STAGE_ROWS);
}

void stage_fill(struct kn_cpu *c, uint32_t n_w, const struct kn_weight *const *w, const float *x,
                uint32_t rows)
{
    struct stage_job j = {.c = c, .x = x};
    for (uint32_t i = 0; i < n_w; i++) {
        j.q8 |= w[i]->format != NULL;
        j.halves |= w[i]->format && w[i]->format->n_sub == 2;
        j.pairs |= w[i]->pairs;
        j.floats |= !w[i]->format && !w[i]->pairs;
    }
    c->stage.rows = rows;
    c->stage.cols = w[0]->cols;
    c->stage.n_blocks = w[0]->cols / KN_INT8_BLOCK;
    if ((size_t)rows * w[0]->cols <= 8192)
        stage_rows(&j, 0, 0, rows);
    else /* runs of whole cache lines: 16 rows share them */
        team_run(c->team, stage_rows, &j, rows, KN_MIN(rows, (uint32_t)CPU_ROWS));
}

void products_begin(struct kn_cpu *c, unsigned thread, uint32_t rows)
{
    if (c->tiles && rows >= CPU_TILE_ROWS_MIN)
        c->mat->begin(&c->tiles[thread]);
}

void products_end(struct kn_cpu *c, unsigned thread)
{
    if (c->tiles && c->tiles[thread].on)
        c->mat->end(&c->tiles[thread]);
}

/* Where the bytes lie that one row block asks for while it multiplies: AHEAD_BYTES behind those that it reads. One to three rows
 * read as fast as the hardware expects, and its own guess is better; several row blocks: see struct ahead. */
#define AHEAD_BYTES 8192

static size_t ahead_step(const struct kn_weight *w, const struct dot *d, uint32_t n_blocks)
{
    bool one_block = d->row % CPU_ROWS + d->n_rows <= CPU_ROWS;
    return one_block && d->n_rows >= CPU_AHEAD_ROWS ? w->group_bytes / n_blocks : 0;
}

/* The group behind one that many rows meet comes nearer meanwhile, a piece a row block: otherwise the first of those
 * rows waits for memory. */
struct ahead {
    const uint8_t *at, *end;
    size_t piece;
};

static struct ahead ahead_of(const struct kn_weight *w, const struct dot *d, uint32_t n_blocks)
{
    if (d->n_rows <= CPU_ROWS || d->group + 1 >= w->n_groups)
        return (struct ahead){0};
    uint32_t calls =
        (d->n_rows + CPU_ROWS - 1) / CPU_ROWS * ((n_blocks + CPU_K_BLOCKS - 1) / CPU_K_BLOCKS);
    const uint8_t *at = pack_group(w, d->group + 1);
    return (struct ahead){at, at + w->group_bytes, (w->group_bytes / calls + 63) / 64 * 64};
}

static void ahead_ask(struct ahead *a)
{
    const uint8_t *stop = a->at + KN_MIN(a->piece, (size_t)(a->end - a->at));
    for (; a->at < stop; a->at += 64)
        __builtin_prefetch(a->at, 0, 2);
}

static void dot_q8(struct kn_cpu *c, unsigned thread, const struct dot *d)
{
    const struct kn_weight *w = d->w;
    const struct stage *s = &c->stage;
    struct cpu_scratch *room = &c->scratch[thread];
    struct ahead ahead = ahead_of(w, d, s->n_blocks);
    struct q8_tile t = {.form = w->form,
                        .zero = w->format->zero,
                        .table = w->format->table,
                        .d = room->d,
                        .m = w->format->has_min ? room->m : NULL,
                        .wide = c->wide,
                        .acc_stride = d->acc_stride,
                        .ahead_step = ahead_step(w, d, s->n_blocks),
                        .tiles = c->tiles ? &c->tiles[thread] : NULL};
    for (uint32_t b = 0; b < s->n_blocks; b += CPU_K_BLOCKS) {
        t.n_blocks = KN_MIN((uint32_t)CPU_K_BLOCKS, s->n_blocks - b);
        t.codes = pack_codes(w, d->group, b);
        struct scale_src src = pack_scales(w, d->group, b, t.n_blocks);
        c->mat->scales(&src, room->d, room->m);
        t.ahead = pack_group(w, d->group) + AHEAD_BYTES + b * t.ahead_step;
        for (uint32_t r = d->row; r < d->row + d->n_rows; r += t.n_rows) {
            t.row = r % CPU_ROWS;
            t.n_rows = KN_MIN(CPU_ROWS - t.row, d->row + d->n_rows - r);
            t.x = cpu_staged(c, r / CPU_ROWS, b);
            t.acc = d->acc + (r - d->row) * d->acc_stride;
            ahead_ask(&ahead);
            c->mat->q8(&t);
        }
    }
}

static void dot_floats(struct kn_cpu *c, const struct dot *d)
{
    const struct kn_weight *w = d->w;
    const struct stage *s = &c->stage;
    size_t line = pack_line(w), step = CPU_FLOAT_GROUPS * line;
    uint32_t n_k = w->pairs ? (s->cols + 1) / 2 : s->cols, most = (uint32_t)(CPU_K_BYTES / step);
    struct float_tile t = {.type = w->type,
                           .step = step,
                           .group_bytes = line,
                           .n_groups = d->n_groups,
                           .acc_stride = d->acc_stride,
                           .acc_group = d->acc_group};
    for (uint32_t k = 0; k < n_k; k += most) {
        t.n_k = KN_MIN(most, n_k - k);
        t.w = pack_floats(w, d->group) + k * step;
        for (uint32_t r = d->row; r < d->row + d->n_rows; r += t.n_rows) {
            t.n_rows = KN_MIN(CPU_ROWS - r % CPU_ROWS, d->row + d->n_rows - r);
            size_t x = ((size_t)(r / CPU_ROWS) * n_k + k) * CPU_ROWS + r % CPU_ROWS;
            t.x = w->pairs ? NULL : s->floats + x;
            t.pairs = w->pairs ? s->pairs + x : NULL;
            t.acc = d->acc + (r - d->row) * d->acc_stride;
            c->mat->floats(&t);
        }
    }
}

void dot_run(struct kn_cpu *c, unsigned thread, const struct dot *d)
{
    struct dot one = *d;
    kn_assert(d->acc_group == CPU_LANES || d->n_groups == 1);
    for (uint32_t r = 0; r < d->n_rows; r++)
        memset(d->acc + r * d->acc_stride, 0, d->n_groups * CPU_LANES * sizeof(float));
    if (!d->w->format) {
        kn_assert(d->group % CPU_FLOAT_GROUPS + d->n_groups <= CPU_FLOAT_GROUPS); /* a bundle */
        dot_floats(c, d);
        return;
    }
    one.n_groups = 1;
    for (uint32_t g = 0; g < d->n_groups; g++, one.group++, one.acc += d->acc_group)
        dot_q8(c, thread, &one);
}

/* ---- the op ------------------------------------------------------------------------------------------ */

struct linear_job {
    struct kn_cpu *c;
    uint32_t n_w, n_groups; /* of all weights together */
    const struct kn_weight *const *w;
    const float *const *bias;
    float *outs[KN_LINEAR_MAX];
    uint32_t part_rows;
    bool add;
};

/* The lines of out that a tile of many rows will be put to: each is on another row of out, and a store waits for its line. */
static void out_ask(const float *out, size_t stride, const struct dot *d)
{
    for (uint32_t r = 0; r < d->n_rows; r++)
        for (uint32_t k = 0; k < d->n_groups * CPU_LANES; k += CPU_LANES)
            __builtin_prefetch(out + r * stride + k, 1, 2);
}

/* Groups group .. group + n_groups of weight i, rows row .. row + n. */
static void tile_run(const struct linear_job *j, unsigned thread, uint32_t i, struct dot *d)
{
    float *acc = j->c->scratch[thread].acc;
    uint32_t first = d->group * CPU_LANES, rows = d->w->rows;
    d->acc = acc;
    d->acc_stride = ACC_COLS;
    d->acc_group = CPU_LANES;
    float *out = j->outs[i] + (size_t)d->row * rows + first;
    if (d->n_rows > CPU_ROWS)
        out_ask(out, rows, d);
    dot_run(j->c, thread, d);
    struct put_job p = {.out = out,
                        .acc = acc,
                        .bias = j->bias && j->bias[i] ? j->bias[i] + first : NULL,
                        .out_stride = rows,
                        .acc_stride = ACC_COLS,
                        .n_rows = d->n_rows,
                        .n = KN_MIN(d->n_groups * CPU_LANES, rows - first),
                        .add = j->add};
    j->c->vec->put(&p);
}

/* Items: (part of the rows, group). Up to four neighbouring groups go together, ACC_ROWS rows at a time. */
static void linear_items(void *ctx, unsigned thread, uint32_t first, uint32_t end)
{
    const struct linear_job *j = ctx;
    products_begin(j->c, thread, KN_MIN(j->part_rows, j->c->stage.rows));
    for (uint32_t item = first; item < end;) {
        uint32_t part = item / j->n_groups, group = item % j->n_groups, i = 0;
        for (; group >= j->w[i]->n_groups; i++)
            group -= j->w[i]->n_groups;
        uint32_t row = part * j->part_rows, stop = KN_MIN(row + j->part_rows, j->c->stage.rows);
        struct dot d = {.w = j->w[i], .group = group};
        d.n_groups = KN_MIN(KN_MIN(end - item, d.w->n_groups - group),
                            CPU_FLOAT_GROUPS - group % CPU_FLOAT_GROUPS);
        for (; row < stop; row += d.n_rows) {
            d.row = row;
            d.n_rows = KN_MIN((uint32_t)ACC_ROWS, stop - row);
            tile_run(j, thread, i, &d);
        }
        item += d.n_groups;
    }
    products_end(j->c, thread);
}

/* Runs a thread begins with where one row block's products wait for memory: its runs are one stream, and short ones let
 * all threads end together. */
#define RUNS_SHORT 32

/* Many rows: runs of one tile's groups, so many a thread that nobody waits long for the last one, where there are as many. */
#define RUNS_MANY 16

static bool share_many(struct linear_job *j, uint32_t blocks, uint32_t threads)
{
    uint32_t most = blocks / (ACC_ROWS / CPU_ROWS);
    uint32_t runs = (j->n_groups + CPU_FLOAT_GROUPS - 1) / CPU_FLOAT_GROUPS;
    uint32_t parts = KN_MIN(most, (RUNS_MANY * threads + runs - 1) / runs);
    if (parts == 0 || parts * runs < RUNS_MANY / 2 * threads)
        return false;
    uint32_t part_blocks = (blocks + parts - 1) / parts, step = ACC_ROWS / CPU_ROWS;
    j->part_rows = (part_blocks + step - 1) / step * ACC_ROWS;
    return true;
}

/* Rows staged; shares them out. */
static void linear_staged(struct linear_job *j)
{
    uint32_t rows = j->c->stage.rows, threads = team_size(j->c->team);
    uint32_t blocks = (rows + CPU_ROWS - 1) / CPU_ROWS, want = 4 * threads;
    bool many = share_many(j, blocks, threads);
    uint32_t parts = KN_MAX(1u, KN_MIN(blocks, (want + j->n_groups - 1) / j->n_groups));
    if (!many)
        j->part_rows = (blocks + parts - 1) / parts * CPU_ROWS;
    parts = (rows + j->part_rows - 1) / j->part_rows;
    uint32_t items = parts * j->n_groups;
    uint32_t runs = rows <= CPU_ROWS ? RUNS_SHORT * threads : want;
    uint32_t run = many ? CPU_FLOAT_GROUPS : KN_MAX(1u, items / runs);
    if (!j->w[0]->format) /* bundles stay whole */
        run = (run + CPU_FLOAT_GROUPS - 1) / CPU_FLOAT_GROUPS * CPU_FLOAT_GROUPS;
    team_run(j->c->team, linear_items, j, items, run);
}

void cpu_linear(struct kn *kn, uint32_t n_w, const struct kn_weight *const *w,
                const float *const *bias, const float *x, uint32_t rows, float *const *outs,
                bool add)
{
    struct linear_job j = {.c = cpu_of(kn), .n_w = n_w, .w = w, .bias = bias, .add = add};
    kn_assert(n_w >= 1 && n_w <= KN_LINEAR_MAX);
    for (uint32_t i = 0; i < n_w; i++) {
        kn_assert(w[i]->magic == CPU_WEIGHT_MAGIC && w[i]->cols == w[0]->cols);
        j.n_groups += w[i]->n_groups;
    }
    uint32_t fit = stage_fit(w[0]->cols);
    for (uint32_t r = 0; r < rows; r += fit) {
        for (uint32_t i = 0; i < n_w; i++)
            j.outs[i] = outs[i] + (size_t)r * w[i]->rows;
        stage_fill(j.c, n_w, w, x + (size_t)r * w[0]->cols, KN_MIN(fit, rows - r));
        linear_staged(&j);
    }
}
