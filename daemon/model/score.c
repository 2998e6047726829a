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
    block_norm(&p, m->w.out_norm);
    m->kn->ops->row_logit(m->kn, m->w.head, p.h, n, b.ids, ret);
    if (job->logprob) {
        m->kn->ops->row_lse(m->kn, m->w.head, p.h, n, m->rows.lse);
        for (uint32_t i = 0; i < n; i++)
            ret[i] -= m->rows.lse[i];
    }
    return model_pass_end(m, &p, e);
}

int model_score_rows(struct model *m, const struct model_score *job, uint32_t first, uint32_t count,
                     float *ret_scores, struct err *e)
{
    MAGIC_OK(m, MODEL_MAGIC);
    uint32_t n = job->seq.n;
    bc_assert(first <= n && count <= n - first);
    bc_assert(!job->fast || job->seq.kv->d_hidden == m->hp.d_model);

    /* rows below `seeing` see something; the last min_gap + 1 do not, and cost nothing */
    uint32_t seeing = n > job->min_gap ? n - job->min_gap - 1 : 0;
    uint32_t end = BC_MIN(first + count, BC_MAX(seeing, first));
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
