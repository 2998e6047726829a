/* policy_counter_causal.c: evict what the later context predicts (Gould and van den Hengel, arXiv
 * 2607.27600).
 *
 * A token's value is how well the model predicts it from the cached tokens after it: its logit, or
 * log-probability, at its own row when that row sees only rows j > i + min_gap. High = predictable
 * = redundant. The last min_gap + 1 rows see nothing and are worth -INFINITY: they stay. The full
 * form runs all layers; the fast one only the last, from the stored hidden rows. The arithmetic is
 * the model's (model_score_some); rows do not depend on each other, so this may be asked for any
 * rows, of any caches, in any pieces. */
#include "policy.h"

static struct model_part part_of(const struct evict_part *p)
{
    struct evict *ev = p->ev;
    return (struct model_part){
        .job = {.seq = seqcache_view(p->s),
                .ids = seqcache_ids(p->s),
                .positions = seqcache_positions(p->s),
                .min_gap = ev->params.min_gap,
                .fast = ev->params.policy->fast,
                .logprob = ev->params.score == EVICT_LOGPROB},
        .rest = &ev->rest,
        .next = p->next,
        .end = p->end,
        .scores = p->value,
    };
}

static int score_rows(struct evict_part *parts, uint32_t n, struct model *m, uint32_t max_rows,
                      struct err *e)
{
    struct model_part rows[EVICT_TOGETHER_MAX];
    for (uint32_t i = 0; i < n; i++)
        rows[i] = part_of(&parts[i]);
    int rc = model_score_some(m, rows, n, max_rows, e);
    for (uint32_t i = 0; i < n; i++) {
        parts[i].next = rows[i].next;
        parts[i].ev->rows_done = rows[i].spent;
    }
    return rc;
}

const struct evict_policy policy_counter_causal = {
    .name = "counter_causal",
    .summary = "Evicts tokens that the later context predicts, judged by all layers.",
    .counter_causal = true,
    .score_rows = score_rows,
    .cuts_layers = true,
};

const struct evict_policy policy_counter_causal_fast = {
    .name = "counter_causal_fast",
    .summary = "Evicts tokens that the later context predicts, judged by the last layer alone.",
    .needs_hidden = true,
    .counter_causal = true,
    .fast = true,
    .score_rows = score_rows,
};
