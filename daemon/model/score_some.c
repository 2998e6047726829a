/* score_some.c: model_score_some: scores in pieces that fit between the passes of others.
 *
 *   fast          a pass of whole rows: as many as are asked for
 *   all layers    a block of rows, which goes on by layers, and at last by rows that meet the head; it may rest after any step
 *
 *       layer  0    1    2        L   head
 *              |====|====|== ... =|===|            "==": may end the call; the next one goes on from there
 *
 * A pass, or a block, is filled with rows of the parts in their order, so a long sequence has it to itself and the last rows of it
 * share it with the first ones of the next. The rows of a block that belong to one sequence are that one's model_rest: where the
 * rows of the first part stand, those of the parts behind it that stand there, too, go on with it. So a part may leave at any time,
 * and one that has fallen behind goes on alone when it is the first.
 *
 *   SCRATCH_REST  | rows of part 0 | of part 1 | of part 2 |  ...     one behind the other, as they are in the pass; if one in
 *                                                                      the middle leaves, the others come together by way of
 *                                                                      their own memory
 */
#include "state.h"
#include <math.h>

#define LAYER_UNITS 16u /* what a row takes in a layer */

/* A call: what it may take and what it took, in units. */
struct piece {
    struct model *m;
    struct model_part *parts; /* the first one that has rows due, and all behind it */
    uint32_t n;
    uint64_t may, took;
};

static uint32_t part_stop(const struct model_part *part)
{
    return BC_MIN(part->end, BC_MAX(score_rows_seeing(&part->job), part->next));
}

/* Passes over parts that are done. False: all are. */
static bool parts_due(struct piece *c)
{
    for (; c->n > 0; c->parts++, c->n--) {
        struct model_part *part = c->parts;
        if (part->next < part_stop(part))
            return true;
        for (; part->next < part->end; part->next++)
            part->scores[part->next] = -INFINITY;
    }
    return false;
}

/* A step that still fits, or the first one. */
static bool may_take(const struct piece *c, uint64_t cost)
{
    return c->took == 0 || c->took + cost <= c->may;
}

/* What n rows take, in rows: their products read a weight first. */
static uint64_t rows_worth(const struct piece *c, uint32_t n)
{
    return n + (uint64_t)c->m->kn->rows_read;
}

static uint64_t layer_units(const struct piece *c, uint32_t n)
{
    return rows_worth(c, n) * LAYER_UNITS;
}

static uint32_t runs_rows(const struct score_run *runs, uint32_t n)
{
    uint32_t rows = 0;

    for (uint32_t i = 0; i < n; i++)
        rows += runs[i].n;
    return rows;
}

/* The parts of a pass share what it took by their rows. */
static void spend(struct piece *c, const struct score_run *runs, uint32_t n, uint64_t units)
{
    double row = (double)units / runs_rows(runs, n) / (c->m->hp.n_layers * LAYER_UNITS);

    for (uint32_t i = 0; i < n; i++)
        c->parts[i].spent += row * runs[i].n;
}

/* ---- whole rows ---- */

static int fast_step(struct piece *c, bool *ret_more, struct err *e)
{
    struct score_run runs[MODEL_PARTS_MAX];
    uint64_t row = (uint64_t)c->m->hp.n_layers * LAYER_UNITS;
    uint32_t left = (uint32_t)BC_MIN((c->may - c->took) / row, (uint64_t)c->m->info.max_rows);
    uint32_t n = 0;

    *ret_more = left > 0;
    if (left == 0)
        return BC_OK;
    for (; n < c->n && left > 0; left -= runs[n++].n) {
        const struct model_part *part = &c->parts[n];
        uint32_t rows = BC_MIN(part_stop(part) - part->next, left);
        runs[n] = (struct score_run){&part->job, part->next, rows, part->scores + part->next};
    }
    int rc = score_pass(c->m, runs, n, e);
    if (rc)
        return rc;
    uint32_t rows = runs_rows(runs, n);
    c->took += rows * row;
    spend(c, runs, n, rows_worth(c, rows) * row);
    for (uint32_t i = 0; i < n; i++)
        c->parts[i].next += runs[i].n;
    return BC_OK;
}

/* ---- blocks ---- */

static void rest_unlink(struct model *m, struct model_rest *rest)
{
    struct model_rest **at = &m->resting;

    while (*at != rest) {
        bc_assert(*at != NULL);
        at = &(*at)->next;
    }
    *at = rest->next;
    rest->m = NULL;
    rest->next = NULL;
}

void model_rest_close(struct model_rest *rest)
{
    if (rest->m != NULL)
        rest_unlink(rest->m, rest);
    *rest = (struct model_rest){.x = rest->x};
}

/* Whether the rows of the first n parts lie on the device, one part's behind the other's. */
static bool in_place(const struct piece *c, uint32_t n)
{
    const struct model_rest *rest = c->parts[0].rest;
    uint32_t at = rest->at;

    for (uint32_t i = 0; i < n; at += rest->n, i++) {
        rest = c->parts[i].rest;
        if (rest->m != c->m || rest->at != at)
            return false;
    }
    return true;
}

/* Where the rows of the first n parts lie on the device: what lies there otherwise goes to its caller's memory. */
static float *rest_place(struct piece *c, uint32_t n)
{
    struct model *m = c->m;
    const struct kn_ops *ops = m->kn->ops;
    float *x = m->scratch[SCRATCH_REST].data;
    size_t d = m->hp.d_model, row = d * sizeof *x;
    uint32_t at = 0;

    if (in_place(c, n))
        return x + c->parts[0].rest->at * d;
    while (m->resting != NULL) {
        struct model_rest *other = m->resting;
        ops->download(m->kn, other->x, x + other->at * d, other->n * row);
        rest_unlink(m, other);
    }
    for (uint32_t i = 0; i < n; at += c->parts[i++].rest->n) {
        struct model_rest *rest = c->parts[i].rest;
        if (rest->layer > 0)
            ops->upload(m->kn, x + at * d, rest->x, rest->n * row);
        rest->m = m;
        rest->at = at;
        rest->next = m->resting;
        m->resting = rest;
    }
    return x;
}

/* A new block of at most `most` rows: of the first part, and where it does not fill it, of those behind it. */
static void block_new(struct piece *c, uint32_t most)
{
    uint64_t read = rows_worth(c, 0), fit = c->may / LAYER_UNITS;

    fit -= BC_MIN(fit, read);
    fit = BC_MAX(fit, BC_MAX(read / 2, (uint64_t)MODEL_REST_ROWS_MIN)); /* fewer are not faster */
    uint32_t left = (uint32_t)BC_MIN(fit, (uint64_t)most);
    for (uint32_t i = 0; i < c->n && left > 0 && c->parts[i].rest->n == 0; i++) {
        const struct model_part *part = &c->parts[i];
        part->rest->n = BC_MIN(part_stop(part) - part->next, left);
        left -= part->rest->n;
    }
}

/* The rows that go on with those of the first part: runs of the parts that stand where it does. */
static uint32_t block_runs(const struct piece *c, struct score_run *runs)
{
    const struct model_rest *first = c->parts[0].rest;
    uint32_t rows = 0, n = 0;

    for (; n < c->n; n++) {
        const struct model_part *part = &c->parts[n];
        const struct model_rest *rest = part->rest;
        uint32_t at = part->next + rest->headed;
        bool same = rest->n > 0 && rest->layer == first->layer && (n == 0 || rest->headed == 0);
        if (!same || (rows += rest->n) > c->m->info.rest_rows)
            break;
        runs[n] = (struct score_run){&part->job, at, rest->n - rest->headed, part->scores + at};
    }
    return n;
}

/* The block goes through layers as far as it may. */
static int block_layers(struct piece *c, const struct score_run *runs, uint32_t n, struct err *e)
{
    struct model *m = c->m;
    struct kn_batch b = score_batch(m, runs, n);
    struct pass p = model_pass(m, &b);
    uint32_t layer = c->parts[0].rest->layer;

    p.x = rest_place(c, n);
    m->kn->ops->batch_begin(m->kn, &b);
    if (layer == 0)
        m->kn->ops->embed(m->kn, m->w.embd, &b, p.x);
    do {
        m->arch->layer(&p, &m->w.layers[layer], layer, LAYER_Q | LAYER_MLP);
        layer++;
        c->took += layer_units(c, b.n_rows);
        spend(c, runs, n, layer_units(c, b.n_rows));
    } while (layer < m->hp.n_layers && may_take(c, layer_units(c, b.n_rows)));
    for (uint32_t i = 0; i < n; i++)
        c->parts[i].rest->layer = layer;
    return model_pass_end(m, &p, e);
}

/* What the head costs a row. 0: one of its rows alone. */
static uint32_t head_units(const struct piece *c)
{
    const struct hparams *hp = &c->m->hp;
    uint64_t layer = 2 * (uint64_t)hp->n_heads * hp->head_dim + 3 * (uint64_t)hp->n_ff;

    return c->parts->job.logprob ? 1 + (uint32_t)(hp->n_vocab * (uint64_t)LAYER_UNITS / layer) : 0;
}

/* Of n rows, those that may meet the head now: all of them where that is one row of it each. */
static uint32_t head_rows(const struct piece *c, uint32_t n)
{
    uint32_t cost = head_units(c);

    if (cost == 0)
        return n;
    uint64_t fit = (c->may - BC_MIN(c->may, c->took)) / cost;
    fit -= BC_MIN(fit, rows_worth(c, 0));
    return BC_MIN(n, (uint32_t)BC_MAX(fit, (uint64_t)(c->took == 0)));
}

/* The next rows of it meet the head. *ret_more: some did. */
static int block_head(struct piece *c, struct score_run *runs, uint32_t n, bool *ret_more,
                      struct err *e)
{
    struct model *m = c->m;
    uint32_t rows = head_rows(c, runs_rows(runs, n)), left = rows;

    *ret_more = rows > 0;
    if (rows == 0)
        return BC_OK;
    float *x = rest_place(c, n) + (size_t)c->parts[0].rest->headed * m->hp.d_model;
    for (n = 0; left > 0; left -= runs[n++].n)
        runs[n].n = BC_MIN(runs[n].n, left);
    struct kn_batch b = score_batch(m, runs, n);
    struct pass p = model_pass(m, &b);
    p.x = x;
    m->kn->ops->batch_begin(m->kn, &b);
    score_head(m, &p, runs, n);
    c->took += rows_worth(c, rows) * head_units(c);
    spend(c, runs, n, rows_worth(c, rows) * head_units(c));
    for (uint32_t i = 0; i < n; i++) {
        struct model_part *part = &c->parts[i];
        part->rest->headed += runs[i].n;
        if (part->rest->headed < part->rest->n)
            continue;
        part->next += part->rest->n;
        model_rest_close(part->rest);
    }
    return model_pass_end(m, &p, e);
}

/* A step of the block that rests, or of the next one. *ret_more: it was taken. */
static int block_step(struct piece *c, bool *ret_more, struct err *e)
{
    struct score_run runs[MODEL_PARTS_MAX];
    uint32_t most = c->m->info.rest_rows, n_layers = c->m->hp.n_layers;

    /* half a block where little is asked for at a time: a layer of a whole one may be more than that */
    if (c->may < (uint64_t)MODEL_REST_ROWS * n_layers * LAYER_UNITS)
        most = BC_MIN(most, BC_MAX(MODEL_REST_ROWS / 2, c->m->kn->rows_read / 2));
    if (c->parts[0].rest->n == 0)
        block_new(c, most);
    uint32_t n = block_runs(c, runs);
    if (c->parts[0].rest->layer == n_layers)
        return block_head(c, runs, n, ret_more, e);
    *ret_more = may_take(c, layer_units(c, runs_rows(runs, n)));
    return *ret_more ? block_layers(c, runs, n, e) : BC_OK;
}

/* ---- the call ---- */

/* A pass brings every sequence's slot list along: whether the device has room for all of them. */
static bool lists_fit(struct model *m, const struct model_part *parts, uint32_t n)
{
    uint64_t slots = 0;

    for (uint32_t i = 0; i < n; i++)
        slots += parts[i].job.seq.n;
    return m->kn->ops->batch_reserve == NULL ||
           m->kn->ops->batch_reserve(m->kn, m->info.max_rows, n, slots) == KN_OK;
}

int model_score_some(struct model *m, struct model_part *parts, uint32_t n_parts, uint32_t max_rows,
                     struct err *e)
{
    MAGIC_OK(m, MODEL_MAGIC);
    struct piece c = {m, parts, n_parts, (uint64_t)max_rows * m->hp.n_layers * LAYER_UNITS, 0};
    bool more = true, fast = parts->job.fast;

    bc_assert(n_parts >= 1 && n_parts <= MODEL_PARTS_MAX && max_rows > 0);
    for (uint32_t i = 0; i < n_parts; i++) {
        bc_assert(parts[i].job.fast == fast && parts[i].job.logprob == parts->job.logprob);
        bc_assert(parts[i].next <= parts[i].end && parts[i].end <= parts[i].job.seq.n);
        bc_assert(!fast || parts[i].job.seq.kv->d_hidden == m->hp.d_model);
        parts[i].spent = 0;
    }
    if (n_parts > 1 && !lists_fit(m, parts, n_parts))
        c.n = 1;
    while (parts_due(&c) && more) {
        int rc = fast ? fast_step(&c, &more, e) : block_step(&c, &more, e);
        if (rc)
            return rc;
    }
    m->kn->ops->sync(m->kn); /* whoever looks at the clock sees what the device did */
    return BC_OK;
}
