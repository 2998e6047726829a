/* evict.h: budgets and policies: when a session's cache must be pruned, and which tokens stay.
 *
 *   evict_resolve  what a client asked -> checked parameters          params.c
 *   budget_room    0: the cache is full, and a prune is due before    budget.c
 *                  anything that waits is appended
 *   policy         a value per cached token                           policy_*.c, a table each
 *   select_*       values -> ascending list of kept cache indices     select.c (pure)
 *   evict_run      score, select, policy state, seqcache_evict,       evict.c, the only driver
 *                  and the record of it
 *
 * A policy is one table in one file (struct evict_policy) and one line in policy_list.c. The
 * method, every policy and every parameter: docs/EVICTION.md. Owner: the engine thread.
 */
#ifndef BACKCAST_EVICT_H
#define BACKCAST_EVICT_H
#include "model.h"
#include "seqcache.h"

enum evict_score { EVICT_LOGIT, EVICT_LOGPROB };
enum evict_trigger { EVICT_ON_BUDGET, EVICT_ON_PREFILL_END };

#define EVICT_FROZEN_AUTO UINT32_MAX
#define EVICT_SPAN_MAX 255

/* Checked parameters of one session. */
struct evict_params {
    const struct evict_policy *policy;
    uint32_t budget; /* tokens, hard ceiling; 0: none (policy none or trigger prefill_end only) */
    uint32_t keep;   /* prune to this many tokens, frozen ones included */
    uint32_t frozen; /* leading tokens never evicted; AUTO until the first chat call fixes it */
    uint32_t recent; /* trailing tokens never evicted */
    uint32_t min_gap;
    enum evict_score score;
    uint32_t span; /* odd; 1: the published method */
    float span_quantile;
    enum evict_trigger trigger;
    uint64_t seed; /* random */
};

/* What a client may leave open: fields are filled by evict_resolve. */
struct evict_request {
    const char *policy;     /* NULL: "counter_causal_fast" */
    uint64_t budget_bytes;  /* one of the two; both 0: no ceiling with policy none, */
    uint32_t budget_tokens; /* else default_budget_bytes */
    uint32_t keep;          /* 0: 3/4 of the budget */
    uint32_t frozen;        /* EVICT_FROZEN_AUTO: the system message */
    int64_t recent;         /* -1: min(32, budget / 8) */
    uint32_t min_gap;
    const char *score;   /* NULL: "logit" */
    uint32_t span;       /* 0: 15 */
    float span_quantile; /* < 0: 0.25 */
    const char *trigger; /* NULL: "budget" */
    uint64_t seed;
};

struct evict; /* one session's policy state: h2o's mass, tova's query, a run under way */

struct evict_rows {
    uint32_t first, end;
}; /* cache indices */

struct evict_walker; /* policy.h */
struct evict_part;

struct evict_policy {
    const char *name;
    const char *summary; /* one sentence: docs and help are made from it */
    bool needs_hidden;   /* pages carry hidden rows */
    bool needs_query;    /* keep the newest token's last-layer query (tova) */
    bool counter_causal; /* span, score and min_gap apply */
    bool fast;
    size_t row_state_bytes; /* per cached token, follows evictions; <= 4, in POOL_INDEX_BYTES */

    /* Exactly one of the three (none: none). A value: higher = goes first; ties keep the earlier.
     * -INFINITY: always kept.
     * score: the whole cache at once, ret_value [count]: for what costs less than a decode step.
     * score_rows: rows do not depend on each other, so that a refresh can be cut, and those of several caches go together: of
     * the first part, then of the next. At most max_rows in all; next moves on, rows_done says what it took.
     * walker: goes over the keys of all layers, and can be cut between any two slices of them. */
    int (*score)(struct evict *ev, struct model *m, const struct seqcache *s, float *ret_value,
                 struct err *e);
    int (*score_rows)(struct evict_part *parts, uint32_t n, struct model *m, uint32_t max_rows,
                      struct err *e);
    bool cuts_layers; /* score_rows cuts finer than a row: rows rest between two layers */
    const struct evict_walker *walker;
    /* optional: a selection was made, keep[] ascending, of n before; value [n] as scored. */
    void (*kept)(struct evict *ev, const float *value, const uint32_t *keep, uint32_t n_keep);
};

/* NULL: unknown. "streaming_llm" is sliding_window. */
#define EVICT_POLICY_DEFAULT "counter_causal_fast"
const struct evict_policy *evict_policy_find(const char *name);
const struct evict_policy *evict_policy_at(unsigned i); /* NULL past the end */
/* False: none, which scores nothing. */
bool evict_policy_prunes(const struct evict_policy *p);

/* Fills defaults, turns bytes into tokens and checks everything; the error names the field and the
 * numbers. A byte budget rounds down to whole pages; page_bytes is pool_page_bytes of the pool that
 * the policy's pages come from; 0: not known, and no budget is in bytes. */
int evict_resolve(const struct evict_request *r, size_t page_bytes, uint64_t default_budget_bytes,
                  struct evict_params *ret, struct err *e);
/* Again when frozen = auto is fixed, or a budget changes. */
int evict_check(const struct evict_params *p, struct err *e);
/* Behind a no of evict_check that a larger budget turns into a yes: the least keep and the least budget that r would do
 * with, as far as e->text has room. p: r as it was resolved. evict_resolve says it by itself. */
void evict_advise(const struct evict_request *r, const struct evict_params *p, size_t page_bytes,
                  struct err *e);

int evict_open(struct evict **ret, const struct evict_params *p, struct err *e);
void evict_close(struct evict **ev);
/* Books its memory, from now on: state, and the refresh under way. NULL (at open): nobody. */
void evict_owner(struct evict *ev, struct ledger_owner *o);
const struct evict_params *evict_params(const struct evict *ev);
/* Budget, keep, frozen and the like change live (an unfinished run is forgotten); the policy is the
 * session's for life: BC_EINVALID. */
int evict_set_params(struct evict *ev, const struct evict_params *p, struct err *e);

/* Rows that may still be appended before a prune is due (UINT32_MAX: no ceiling); 0: full. */
uint32_t budget_room(const struct evict_params *p, uint32_t cached);
/* The bytes that a full cache holds: the budget in whole pages. 0: no ceiling. */
uint64_t budget_bytes(const struct evict_params *p, size_t page_bytes);

/* After a pass that appended rows of this session: remembers the newest token's last-layer query
 * [n_heads * head_dim], if the policy needs it. */
void evict_note_query(struct evict *ev, const float *query, uint32_t len);
/* False: the policy looks at the newest token's query, and none was noted yet. */
bool evict_can_score(const struct evict *ev);

/* state.c: as bytes, and back. What is read is checked; on failure nothing has changed. */
struct bytes_out;
struct bytes_in;
void evict_params_put(const struct evict_params *p, struct bytes_out *o);
int evict_params_get(struct bytes_in *in, struct evict_params *ret, struct err *e);
/* policy, score and trigger of r are set; those of *ret live as long as the program. */
void evict_request_put(const struct evict_request *r, struct bytes_out *o);
int evict_request_get(struct bytes_in *in, struct evict_request *ret, struct err *e);
/* What the policy has learnt: h2o's mass, tova's query. n_rows: cached tokens that it belongs to. */
void evict_state_put(const struct evict *ev, struct bytes_out *o);
int evict_state_get(struct evict *ev, struct bytes_in *in, uint32_t n_rows, struct err *e);
void evict_state_clear(struct evict *ev); /* forgets it, and frees what it took */

struct evict_range {
    uint64_t first, count;
}; /* stream indices */

/* One refresh + eviction. The arrays are owned by ev until its next run. */
struct evict_record {
    const struct evict_policy *policy;
    uint32_t tokens_before, tokens_after;
    uint64_t live_before, live_after, held_before, held_after; /* bytes */
    uint64_t micros;
    const struct evict_range *dropped; /* ascending */
    size_t n_dropped;
    const uint32_t *keep; /* kept cache indices, [tokens_after] */
};
enum evict_answer { EVICT_DONE, EVICT_WORKING, EVICT_FAILED };

/* One session's prune to `keep` tokens (a cache that holds no more is left alone, and the record says so), in a call of evict_run. */
struct evict_run {
    struct evict *ev;
    struct seqcache *cache;
    uint32_t keep;
    enum evict_answer answer;   /* what came of it */
    struct evict_record record; /* DONE */
    struct err err;             /* FAILED: the run is forgotten, and nothing has changed */
};

/* Runs that share a pass over the weights, and the most that a cache holds that joins others: a longer one fills passes alone. */
#define EVICT_TOGETHER_MAX MODEL_PARTS_MAX
#define EVICT_TOGETHER_TOKENS 512u
/* Whether a run over so many tokens may join others at all. */
bool evict_may_join(const struct evict_params *p, uint32_t n);
/* Whether a run over s may go together with those of first: on the same model. */
bool evict_joins(const struct evict *ev, const struct seqcache *s, const struct evict *first);

/* Goes on with n runs, the first of which comes first; those behind it take what it leaves of a pass (evict_joins). Work is
 * cut: at most max_rows score rows a call in all (of a walk: as many slices of keys as so many rows have, at least one), 0: all
 * at once. WORKING: call again; nothing has changed yet, and the cache must not change in between. evict_abort forgets an
 * unfinished run; one that is forgotten, or fails for a reason of its own, changes nothing for the others. */
void evict_run(struct evict_run *runs, uint32_t n, struct model *m, uint32_t max_rows);
void evict_abort(struct evict *ev);
/* What the last call of evict_run or evict_scores_some did for this one, in rows that take the same time each, its part of
 * kn.rows_read for the reading of weights among them: of a block that rests between two layers its part of the way through the
 * model, of a walk its part of all slices. 0: nothing that can be cut. */
double evict_rows_done(const struct evict *ev);
/* Frees the arrays of the last record. */
void evict_forget(struct evict *ev);
/* Bytes that a run over n tokens in pages of that shape takes beside the cache, at most. */
uint64_t evict_run_bytes(const struct evict_params *p, const struct kn_kv *kv,
                         const struct model_info *mi, uint32_t n);
/* The policy's value of each cached token (before spans), for `backcast scores`. [count] */
int evict_scores(struct evict *ev, struct model *m, const struct seqcache *s, float *ret,
                 struct err *e);
/* The same in pieces, cut as evict_run is. *done: 0 before the first call; count: all is there. The cache must not change
 * in between, nor a run begin; evict_abort ends it early. */
int evict_scores_some(struct evict *ev, struct model *m, const struct seqcache *s,
                      uint32_t max_rows, uint32_t *done, float *ret, struct err *e);

/* select.c: pure.
 * ret[i] = a low quantile of the values within (span - 1) / 2 of i: the one at ascending index
 * floor(quantile * (m - 1)), in double precision, of the window's m; windows are clipped at the
 * ends. The rows of value -INFINITY at the end take no part and stay. value and ret are distinct.
 */
void select_span(const float *value, uint32_t n, uint32_t span, double quantile, float *ret);
/* ret_keep, ascending: the first `frozen` rows, the last `recent`, and the lowest values of the
 * rest until there are `keep`; ties keep the earlier, NaN counts as the highest. Returns their
 * number: keep, or n if that is no more. frozen + recent <= keep: asserted. scratch: [n]. */
uint32_t select_keep(const float *value, uint32_t n, uint32_t keep, uint32_t frozen,
                     uint32_t recent, uint32_t *scratch, uint32_t *ret_keep);
#endif
