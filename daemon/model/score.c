/* score.c: counter-causal scores: how well the model predicts a cached token from what came after
 * it.
 *
 *     cache index     0  1  2  3  4  5  6  7  8
 *     row 3, g = 1             3     x  x  x  x     sees j > i + g: [i + 1 + g, n)
 *
 * full: the token's embedding goes through all layers; fast: its stored hidden state through the
 * last layer's attention alone. Only queries are made: K and V are the stored ones, so rows are
 * independent of each other, and a pass takes any runs of them, of one sequence or of several: one
 * product over all its rows, attention of each over its own cache. The last norm's result meets one
 * row of the head, that of the token itself: a dot product, not a vocabulary. The log-probability
 * subtracts a log-sum-exp that the backend takes over slices of the vocabulary: no [rows][n_vocab]
 * exists. In pieces that fit between the passes of others: score_some.c.
 */
#include "state.h"
#include <math.h>
#include <string.h>

struct kn_batch score_batch(struct model *m, const struct score_run *runs, uint32_t n_runs)
{
    struct row_scratch *s = &m->rows;
    uint32_t n = 0;

    bc_assert(n_runs >= 1 && n_runs <= MODEL_PARTS_MAX);
    for (uint32_t k = 0; k < n_runs; k++) {
        const struct model_score *job = runs[k].job;
        bc_assert(runs[k].n <= m->info.max_rows - n);
        for (uint32_t i = runs[k].first; i < runs[k].first + runs[k].n; i++, n++) {
            s->ids[n] = job->ids[i];
            s->positions[n] = job->positions[i];
            bc_assert(s->ids[n] >= 0 && (uint32_t)s->ids[n] < m->hp.n_vocab);
            s->seq[n] = k;
            s->lo[n] = i + 1 + job->min_gap;
            s->hi[n] = job->seq.n;
        }
        m->seqs[k] = job->seq;
    }
    return (struct kn_batch){
        .n_rows = n,
        .n_seqs = n_runs,
        .ids = s->ids,
        .positions = s->positions,
        .seq = s->seq,
        .lo = s->lo,
        .hi = s->hi,
        .seqs = m->seqs,
    };
}

void score_head(struct model *m, struct pass *p, const struct score_run *runs, uint32_t n_runs)
{
    uint32_t n = p->b->n_rows;
    float *score = m->rows.score, *lse = m->rows.lse;

    block_norm(p, m->w.out_norm);
    m->kn->ops->row_logit(m->kn, m->w.head, p->h, n, p->b->ids, score);
    if (runs->job->logprob) {
        m->kn->ops->row_lse(m->kn, m->w.head, p->h, n, lse);
        for (uint32_t i = 0; i < n; i++)
            score[i] -= lse[i];
    }
    for (uint32_t k = 0; k < n_runs; score += runs[k++].n)
        memcpy(runs[k].ret, score, runs[k].n * sizeof *score);
}

/* The stored hidden rows. */
static void hidden_rows(struct model *m, struct pass *p, const struct score_run *runs,
                        uint32_t n_runs)
{
    uint32_t *slots = m->rows.pick;

    for (uint32_t k = 0; k < n_runs; slots += runs[k++].n)
        memcpy(slots, runs[k].job->seq.slots + runs[k].first, runs[k].n * sizeof *slots);
    m->kn->ops->hidden_read(m->kn, p->b, m->rows.pick, p->x);
}

int score_pass(struct model *m, const struct score_run *runs, uint32_t n_runs, struct err *e)
{
    struct kn_batch b = score_batch(m, runs, n_runs);
    struct pass p = model_pass(m, &b);
    uint32_t last = m->hp.n_layers - 1;

    m->kn->ops->batch_begin(m->kn, &b);
    if (runs->job->fast) {
        hidden_rows(m, &p, runs, n_runs);
        m->arch->layer(&p, &m->w.layers[last], last, LAYER_Q);
    } else {
        m->kn->ops->embed(m->kn, m->w.embd, &b, p.x);
        for (uint32_t l = 0; l <= last; l++)
            m->arch->layer(&p, &m->w.layers[l], l, LAYER_Q | LAYER_MLP);
    }
    score_head(m, &p, runs, n_runs);
    return model_pass_end(m, &p, e);
}

uint32_t score_rows_seeing(const struct model_score *job)
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

    uint32_t end = BC_MIN(first + count, BC_MAX(score_rows_seeing(job), first));
    for (uint32_t at = first; at < end;) {
        struct score_run run = {job, at, BC_MIN(end - at, m->info.max_rows),
                                ret_scores + (at - first)};
        int rc = score_pass(m, &run, 1, e);
        if (rc)
            return rc;
        at += run.n;
    }
    for (uint32_t i = end; i < first + count; i++)
        ret_scores[i - first] = -INFINITY;
    return BC_OK;
}
