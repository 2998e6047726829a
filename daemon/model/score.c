/* score.c: counter-causal scores: how well the model predicts a cached token from what came after
 * it.
 *
 *     cache index     0  1  2  3  4  5  6  7  8
 *     row 3, g = 1             3     x  x  x  x     sees j > i + g: [i + 1 + g, n)
 *
 * full: the token's embedding goes through all layers; fast: its stored hidden state through the
 * last layer's attention alone. Only queries are made: K and V are the stored ones, so rows are
 * independent of each other and are taken in blocks of max_rows. The last norm's result meets one
 * row of the head, that of the token itself: a dot product, not a vocabulary. The log-probability
 * subtracts a log-sum-exp that the backend takes over slices of the vocabulary: no [rows][n_vocab]
 * exists.
 */
#include "state.h"
#include <math.h>

/* The batch of rows first .. first+n-1. */
static struct kn_batch score_batch(struct model *m, const struct model_score *job, uint32_t first,
                                   uint32_t n)
{
    struct row_scratch *s = &m->rows;

    for (uint32_t i = 0; i < n; i++) {
        s->ids[i] = job->ids[first + i];
        s->positions[i] = job->positions[first + i];
        bc_assert(s->ids[i] >= 0 && (uint32_t)s->ids[i] < m->hp.n_vocab);
        s->seq[i] = 0;
        s->lo[i] = first + i + 1 + job->min_gap;
        s->hi[i] = job->seq.n;
    }
    return (struct kn_batch){
        .n_rows = n,
        .n_seqs = 1,
        .ids = s->ids,
        .positions = s->positions,
        .seq = s->seq,
        .lo = s->lo,
        .hi = s->hi,
        .seqs = &job->seq,
    };
}

/* The last norm and the rows' own tokens at the head: ret [n]. */
static void score_head(struct model *m, const struct model_score *job, struct pass *p, float *ret)
{
    uint32_t n = p->b->n_rows;

    block_norm(p, m->w.out_norm);
    m->kn->ops->row_logit(m->kn, m->w.head, p->h, n, p->b->ids, ret);
    if (!job->logprob)
        return;
    m->kn->ops->row_lse(m->kn, m->w.head, p->h, n, m->rows.lse);
    for (uint32_t i = 0; i < n; i++)
        ret[i] -= m->rows.lse[i];
}

static int score_block(struct model *m, const struct model_score *job, uint32_t first, uint32_t n,
                       float *ret, struct err *e)
{
    struct kn_batch b = score_batch(m, job, first, n);
    struct pass p = model_pass(m, &b);
    uint32_t last = m->hp.n_layers - 1;

    m->kn->ops->batch_begin(m->kn, &b);
    if (job->fast) {
        m->kn->ops->hidden_read(m->kn, &b, job->seq.slots + first, p.x);
        m->arch->layer(&p, &m->w.layers[last], last, LAYER_Q);
    } else {
        m->kn->ops->embed(m->kn, m->w.embd, &b, p.x);
        for (uint32_t l = 0; l <= last; l++)
            m->arch->layer(&p, &m->w.layers[l], l, LAYER_Q | LAYER_MLP);
    }
    score_head(m, job, &p, ret);
    return model_pass_end(m, &p, e);
}

/* Rows below it see something; the last min_gap + 1 do not, and cost nothing. */
static uint32_t rows_seeing(const struct model_score *job)
{
    return job->seq.n > job->min_gap ? job->seq.n - job->min_gap - 1 : 0;
}

int model_score_rows(struct model *m, const struct model_score *job, uint32_t first, uint32_t count,
                     float *ret_scores, struct err *e)
{
    MAGIC_OK(m, MODEL_MAGIC);
    uint32_t n = job->seq.n;
    bc_assert(first <= n && count <= n - first);
    bc_assert(!job->fast || job->seq.kv->d_hidden == m->hp.d_model);

    uint32_t end = BC_MIN(first + count, BC_MAX(rows_seeing(job), first));
    for (uint32_t at = first; at < end;) {
        uint32_t block = BC_MIN(end - at, m->info.max_rows);
        int rc = score_block(m, job, at, block, ret_scores + (at - first), e);
        if (rc)
            return rc;
        at += block;
    }
    for (uint32_t i = end; i < first + count; i++)
        ret_scores[i - first] = -INFINITY;
    return BC_OK;
}

/* ---- in pieces ---- */

#define LAYER_UNITS 16u /* what a row takes in a layer */

/* What the head costs a row. 0: one of its rows alone. */
static uint32_t head_units(const struct model *m, const struct model_score *job)
{
    const struct hparams *hp = &m->hp;
    uint64_t layer = 2 * (uint64_t)hp->n_heads * hp->head_dim + 3 * (uint64_t)hp->n_ff;

    return job->logprob ? 1 + (uint32_t)(hp->n_vocab * (uint64_t)LAYER_UNITS / layer) : 0;
}

/* A call of model_score_some: what it may take and what it took, in units. */
struct piece {
    struct model *m;
    const struct model_score *job;
    struct model_rest *rest;
    float *ret;
    uint64_t may, took;
};

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

/* What the block's rows are, on the device: what another one has left there goes to its caller's memory. */
static float *rest_place(struct model *m, struct model_rest *rest)
{
    float *x = m->scratch[SCRATCH_REST].data;
    struct model_rest *other = m->resting;
    size_t row = m->hp.d_model * sizeof *x;

    if (other == rest)
        return x;
    if (other != NULL) {
        m->kn->ops->download(m->kn, other->x, x, other->n * row);
        other->m = NULL;
    }
    if (rest->layer > 0)
        m->kn->ops->upload(m->kn, x, rest->x, rest->n * row);
    m->resting = rest;
    rest->m = m;
    return x;
}

void model_rest_close(struct model_rest *rest)
{
    if (rest->m != NULL) {
        bc_assert(rest->m->resting == rest);
        rest->m->resting = NULL;
    }
    *rest = (struct model_rest){.x = rest->x};
}

/* The block goes through layers as far as it may. */
static int rest_layers(struct piece *c, uint32_t first, struct err *e)
{
    struct model *m = c->m;
    struct model_rest *rest = c->rest;
    struct kn_batch b = score_batch(m, c->job, first, rest->n);
    struct pass p = model_pass(m, &b);

    p.x = rest_place(m, rest);
    m->kn->ops->batch_begin(m->kn, &b);
    if (rest->layer == 0)
        m->kn->ops->embed(m->kn, m->w.embd, &b, p.x);
    do {
        m->arch->layer(&p, &m->w.layers[rest->layer], rest->layer, LAYER_Q | LAYER_MLP);
        rest->layer++;
        c->took += layer_units(c, rest->n);
    } while (rest->layer < m->hp.n_layers && may_take(c, layer_units(c, rest->n)));
    return model_pass_end(m, &p, e);
}

/* Rows that may meet the head now: all of them where that is one row of it each. */
static uint32_t head_rows(const struct piece *c)
{
    uint32_t cost = head_units(c->m, c->job), n = c->rest->n - c->rest->headed;
    if (cost == 0)
        return n;
    uint64_t fit = (c->may - BC_MIN(c->may, c->took)) / cost;
    fit -= BC_MIN(fit, rows_worth(c, 0));
    return BC_MIN(n, (uint32_t)BC_MAX(fit, (uint64_t)(c->took == 0)));
}

/* The next n of its rows meet the head. */
static int rest_head(struct piece *c, uint32_t first, uint32_t n, struct err *e)
{
    struct model *m = c->m;
    struct model_rest *rest = c->rest;
    uint32_t d = m->hp.d_model;
    struct kn_batch b = score_batch(m, c->job, first + rest->headed, n);
    struct pass p = model_pass(m, &b);

    p.x = rest_place(m, rest) + (size_t)rest->headed * d;
    m->kn->ops->batch_begin(m->kn, &b);
    score_head(m, c->job, &p, c->ret + first + rest->headed);
    rest->headed += n;
    c->took += rows_worth(c, n) * head_units(m, c->job);
    return model_pass_end(m, &p, e);
}

/* A step of the block that rests, or of the next one. *ret_more: it was taken. */
static int rest_step(struct piece *c, uint32_t first, uint32_t n_left, bool *ret_more,
                     struct err *e)
{
    struct model_rest *rest = c->rest;
    uint32_t most = c->m->info.rest_rows;

    /* half a block where little is asked for at a time: a layer of a whole one may be more than that */
    if (c->may < (uint64_t)MODEL_REST_ROWS * c->m->hp.n_layers * LAYER_UNITS)
        most = BC_MIN(most, BC_MAX(MODEL_REST_ROWS / 2, c->m->kn->rows_read / 2));
    most = BC_MIN(most, n_left);

    if (rest->n == 0) {
        uint64_t read = rows_worth(c, 0), fit = c->may / LAYER_UNITS;
        fit -= BC_MIN(fit, read);
        fit =
            BC_MAX(fit, BC_MAX(read / 2, (uint64_t)MODEL_REST_ROWS_MIN)); /* fewer are not faster */
        rest->n = (uint32_t)BC_MIN(fit, (uint64_t)most);
    }
    if (rest->layer < c->m->hp.n_layers) {
        *ret_more = may_take(c, layer_units(c, rest->n));
        return *ret_more ? rest_layers(c, first, e) : BC_OK;
    }
    uint32_t n = head_rows(c);
    *ret_more = n > 0;
    return *ret_more ? rest_head(c, first, n, e) : BC_OK;
}

int model_score_some(struct model *m, const struct model_score *job, struct model_rest *rest,
                     uint32_t *next, uint32_t end, uint32_t max_rows, float *ret_scores,
                     struct err *e)
{
    MAGIC_OK(m, MODEL_MAGIC);
    bc_assert(!job->fast && end <= job->seq.n && *next <= end && max_rows > 0);
    uint32_t stop = BC_MIN(end, BC_MAX(rows_seeing(job), *next));
    struct piece c = {m, job, rest, ret_scores, (uint64_t)max_rows * m->hp.n_layers * LAYER_UNITS,
                      0};
    bool more = true;

    while (*next < stop && more) {
        int rc = rest_step(&c, *next, stop - *next, &more, e);
        if (rc)
            return rc;
        if (rest->n > rest->headed)
            continue;
        *next += rest->n;
        model_rest_close(rest);
    }
    m->kn->ops->sync(m->kn); /* whoever looks at the clock sees what the device did */
    rest->spent = (double)c.took / (m->hp.n_layers * LAYER_UNITS);
    if (*next < stop)
        return BC_OK;
    for (uint32_t i = stop; i < end; i++)
        ret_scores[i] = -INFINITY;
    *next = end;
    return BC_OK;
}
