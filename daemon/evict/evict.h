/* evict.h: budgets and policies: when a session's cache must be pruned, and which tokens stay.
 *
 *   budget_due   the cache is full AND something waits to be appended           budget.c
 *   policy       a value per cached token                                      policy_*.c, one
 * table each span, select values -> ascending list of kept cache indices                 select.c
 * (pure) evict_run    score, select, seqcache_evict, policy state, the record        evict.c: the
 * only driver
 *
 * A policy is one table in one file (struct evict_policy) and one line in policy_list.c. Owner: the
 * engine thread.
 */
#ifndef BACKCAST_EVICT_H
#define BACKCAST_EVICT_H
#include "model.h"
#include "seqcache.h"

enum evict_score { EVICT_LOGIT, EVICT_LOGPROB };
enum evict_trigger { EVICT_ON_BUDGET, EVICT_ON_PREFILL_END };

#define EVICT_FROZEN_AUTO UINT32_MAX
#define EVICT_SPAN_MAX 255

/* As the client asks (zero = default where 0 makes no sense; see evict_resolve). */
struct evict_params {
    const struct evict_policy *policy;
    uint32_t budget; /* tokens, hard ceiling; 0 only with policy none or trigger prefill_end: no
                        ceiling */
    uint32_t keep;   /* prune to this many tokens, frozen ones included */
    uint32_t frozen; /* leading tokens never evicted; EVICT_FROZEN_AUTO until the first chat call
                        fixes it */
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
    const char *policy; /* NULL: "counter_causal_fast" */
    uint64_t budget_bytes;
    uint32_t budget_tokens; /* one of the two; both 0: no ceiling asked (policy none) or
                               default_budget_bytes */
    uint32_t keep;          /* 0: 3/4 of the budget */
    uint32_t frozen;
    int64_t recent; /* -1: min(32, budget / 8) */
    uint32_t min_gap;
    const char *score;   /* NULL: "logit" */
    uint32_t span;       /* 0: 15 */
    float span_quantile; /* < 0: 0.25 */
    const char *trigger; /* NULL: "budget" */
    uint64_t seed;
};

struct evict; /* one session's policy state (h2o mass, last query, counters) */

struct evict_policy {
    const char *name;
    const char *summary; /* one sentence: docs and help are made from it */
    bool needs_hidden;   /* pages carry hidden rows */
    bool needs_query;    /* keep the newest token's last-layer query (tova) */
    bool counter_causal; /* span, score and min_gap apply */
    bool fast;
    size_t row_state_bytes; /* per cached token, follows evictions (h2o: 4); <= 4, in
                               POOL_INDEX_BYTES */
    /* required (none: NULL). value [n] (cache order): higher = goes first; ties keep the earlier.
     * -INFINITY: always kept. */
    int (*score)(struct evict *ev, struct model *m, const struct seqcache *s, float *ret_value,
                 struct err *e);
    /* optional: after a selection, keep[] ascending, of n before. */
    void (*kept)(struct evict *ev, const uint32_t *keep, uint32_t n_keep, uint32_t n);
};

const struct evict_policy *
evict_policy_find(const char *name); /* NULL: unknown; "streaming_llm" = sliding_window */
const struct evict_policy *evict_policy_at(unsigned i); /* NULL past the end */

/* Fills defaults, turns bytes into tokens with the pool's true costs (rulings 11: bytes round down
 * to whole pages, tokens up) and checks everything (rulings 13): the error names the field.
 * row/page costs from the pool that the policy's shape needs. */
int evict_resolve(const struct evict_request *r, size_t page_bytes, uint64_t default_budget_bytes,
                  struct evict_params *ret, struct err *e);
int evict_check(const struct evict_params *p,
                struct err *e); /* again when frozen=auto is fixed, or a budget changes */

int evict_open(struct evict **ret, const struct evict_params *p, struct err *e);
void evict_close(struct evict **ev);
const struct evict_params *evict_params(const struct evict *ev);
int evict_set_params(struct evict *ev, const struct evict_params *p,
                     struct err *e); /* budget, keep, frozen, recent change live */

/* Rows that may still be appended before a prune is due (UINT32_MAX: no ceiling); 0: full. */
uint32_t budget_room(const struct evict_params *p, uint32_t cached);
/* After a pass that appended rows of this session: remembers the newest token's last-layer query
 * (needs_query), [n_heads*head_dim]. */
void evict_note_query(struct evict *ev, const float *query, uint32_t len);

struct evict_range {
    uint64_t first, count;
}; /* stream indices */

/* One refresh + eviction. dropped: ascending ranges, owned by ev until its next run. */
struct evict_record {
    const struct evict_policy *policy;
    uint32_t tokens_before, tokens_after;
    uint64_t live_before, live_after, held_before, held_after; /* bytes */
    uint64_t micros;
    const struct evict_range *dropped;
    size_t n_dropped;
    const uint32_t *keep; /* kept cache indices, for tests and journals; n = tokens_after */
};
enum evict_answer { EVICT_DONE, EVICT_WORKING };
/* Prunes to `keep` tokens. Work is cut: at most max_rows score rows a call; EVICT_WORKING: call
 * again (nothing has changed yet; the cache must not change in between; evict_abort forgets the
 * unfinished run). max_rows 0: all at once. */
int evict_run(struct evict *ev, struct model *m, struct seqcache *s, uint32_t keep,
              uint32_t max_rows, enum evict_answer *ret, struct evict_record *ret_record,
              struct err *e);
void evict_abort(struct evict *ev);
/* The policy's value of each cached token (before span), for `backcast scores`. [count] */
int evict_scores(struct evict *ev, struct model *m, const struct seqcache *s, float *ret,
                 struct err *e);

/* select.c: pure. Pools values over spans (reference: low quantile at ascending index floor(q
 * (m-1)), double precision; windows clipped at the ends; -INFINITY rows, which are the last ones,
 * take no part). scratch: [span]. */
void select_span(const float *value, uint32_t n, uint32_t span, double quantile, float *ret);
/* keep[0..n_keep) ascending: all of the first `frozen`, the last max(recent, always) rows, and the
 * lowest values of the rest; ties keep the earlier. Returns n_keep (n if n <= keep). scratch [n] of
 * uint32_t. */
uint32_t select_keep(const float *value, uint32_t n, uint32_t keep, uint32_t frozen,
                     uint32_t recent, uint32_t *scratch, uint32_t *ret_keep);
#endif
