/* policy_counter_causal.c: evict what the later context predicts (Gould and van den Hengel, arXiv
 * 2607.27600).
 *
 * A token's value is how well the model predicts it from the cached tokens after it: its logit, or
 * log-probability, at its own row when that row sees only rows j > i + min_gap. High = predictable
 * = redundant. The last min_gap + 1 rows see nothing and are worth -INFINITY: they stay. The full
 * form runs all layers; the fast one only the last, from the stored hidden rows. The arithmetic is
 * the model's (model_score_rows); rows do not depend on each other, so this may be asked for any
 * rows, in any pieces. */
#include "policy.h"
#include <stdlib.h>

static struct model_score job_of(const struct evict *ev, const struct seqcache *s)
{
    return (struct model_score){
        .seq = seqcache_view(s),
        .ids = seqcache_ids(s),
        .positions = seqcache_positions(s),
        .min_gap = ev->params.min_gap,
        .fast = ev->params.policy->fast,
        .logprob = ev->params.score == EVICT_LOGPROB,
    };
}

static int score_rows(struct evict *ev, struct model *m, const struct seqcache *s,
                      struct evict_rows rows, float *ret_value, struct err *e)
{
    struct model_score job = job_of(ev, s);
    return model_score_rows(m, &job, rows.first, rows.end - rows.first, ret_value, e);
}

/* A row's way through all layers is long: a block of them may rest between two. */
static int score_some(struct evict *ev, struct model *m, const struct seqcache *s,
                      uint32_t max_rows, struct evict_rows *rows, float *value, struct err *e)
{
    struct model_score job = job_of(ev, s);
    uint64_t bytes = rest_bytes(&ev->params, model_info(m));
    if (ev->rest.x == NULL) {
        if ((ev->rest.x = malloc(bytes)) == NULL)
            return err_nomem(e, bytes);
        ev->booked_rest = bytes;
        ledger_charge(ev->owner, LEDGER_refresh, bytes);
    }
    int rc = model_score_some(m, &job, &ev->rest, &rows->first, rows->end, max_rows, value, e);
    ev->rows_done = ev->rest.spent;
    return rc;
}

const struct evict_policy policy_counter_causal = {
    .name = "counter_causal",
    .summary = "Evicts tokens that the later context predicts, judged by all layers.",
    .counter_causal = true,
    .score_rows = score_rows,
    .score_some = score_some,
};

const struct evict_policy policy_counter_causal_fast = {
    .name = "counter_causal_fast",
    .summary = "Evicts tokens that the later context predicts, judged by the last layer alone.",
    .needs_hidden = true,
    .counter_causal = true,
    .fast = true,
    .score_rows = score_rows,
};
