/* evict.c: the one driver of a prune.
 *
 *   job_begin       which rows need a value; all the memory that the run will want
 *   rows_score      a value per row, in blocks: WORKING until all are there
 *   select_span     a token is judged by its neighbourhood (counter-causal policies, span > 1)
 *   select_keep     frozen and recent rows, then the lowest values
 *   policy->kept    the policy's state follows the selection
 *   seqcache_evict  the slot list is edited; no K or V moves
 *   record          what was dropped, bytes and microseconds
 *
 * Which rows need a value: with half = (span - 1) / 2, a row farther than half from every
 * unprotected row is in no window that matters, so the model is not asked about it. Until the
 * selection nothing has changed: an error or an abort loses the run and nothing else.
 *
 *   cache  | frozen        |        unprotected        |        recent or blind |
 *   want            | half |                           | half |
 */
#include "policy.h"
#include "clock.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- life ------------------------------------------------------------------------------------ */

int evict_open(struct evict **ret, const struct evict_params *p, struct err *e)
{
    int rc = evict_check(p, e);
    if (rc < 0)
        return rc;
    struct evict *ev = calloc(1, sizeof *ev);
    if (ev == NULL)
        return err_nomem(e, sizeof *ev);
    ev->magic = EVICT_MAGIC;
    ev->params = *p;
    *ret = ev;
    return 0;
}

/* Sets what is booked of one kind of memory. */
static void rebook(struct evict *ev, enum ledger_kind kind, uint64_t *booked, uint64_t bytes)
{
    ledger_credit(ev->owner, kind, *booked);
    ledger_charge(ev->owner, kind, bytes);
    *booked = bytes;
}

void evict_owner(struct evict *ev, struct ledger_owner *o)
{
    MAGIC_OK(ev, EVICT_MAGIC);
    bc_assert(ev->owner == NULL && !ev->job.active);
    ev->owner = o;
}

void evict_close(struct evict **pev)
{
    struct evict *ev = *pev;
    if (ev == NULL)
        return;
    evict_abort(ev);
    evict_forget(ev);
    rebook(ev, LEDGER_state, &ev->booked_query, 0);
    ev->magic = 0;
    free(ev->mass);
    free(ev->query);
    free(ev);
    *pev = NULL;
}

const struct evict_params *evict_params(const struct evict *ev)
{
    MAGIC_OK(ev, EVICT_MAGIC);
    return &ev->params;
}

int evict_set_params(struct evict *ev, const struct evict_params *p, struct err *e)
{
    MAGIC_OK(ev, EVICT_MAGIC);
    if (p->policy != ev->params.policy)
        return err_set(e, BC_EINVALID, "policy", "policy %s cannot become %s while a session lives",
                       ev->params.policy->name, p->policy->name);
    int rc = evict_check(p, e);
    if (rc < 0)
        return rc;
    evict_abort(ev);
    ev->params = *p;
    return 0;
}

double evict_rows_done(const struct evict *ev)
{
    MAGIC_OK(ev, EVICT_MAGIC);
    return ev->rows_done;
}

bool evict_can_score(const struct evict *ev)
{
    MAGIC_OK(ev, EVICT_MAGIC);
    return !ev->params.policy->needs_query || ev->query != NULL;
}

void evict_note_query(struct evict *ev, const float *query, uint32_t len)
{
    MAGIC_OK(ev, EVICT_MAGIC);
    if (!ev->params.policy->needs_query)
        return;
    if (len != ev->query_len) {
        free(ev->query);
        ev->query = malloc(len * sizeof *query);
        ev->query_len = ev->query != NULL ? len : 0;
        rebook(ev, LEDGER_state, &ev->booked_query, ev->query_len * sizeof *query);
    }
    if (ev->query != NULL) /* without it, the next refresh says so */
        memcpy(ev->query, query, len * sizeof *query);
}

/* ---- a run ----------------------------------------------------------------------------------- */

/* Counter-causal rows that see nothing: the last min_gap + 1. */
static uint32_t rows_blind(const struct evict_params *p)
{
    return p->policy->counter_causal ? p->min_gap + 1 : 0;
}

static uint32_t rows_tail(const struct evict_params *p)
{
    return BC_MAX(p->recent, rows_blind(p));
}

/* Of n > keep >= frozen + tail rows, those whose value can matter. */
static struct evict_rows rows_wanted(const struct evict_params *p, uint32_t n)
{
    if (p->policy->score_rows == NULL)
        return (struct evict_rows){.first = 0, .end = n};
    uint32_t half = p->policy->counter_causal ? p->span / 2 : 0, frozen = evict_frozen(p);
    return (struct evict_rows){
        .first = frozen - BC_MIN(frozen, half),
        .end = BC_MIN(n - rows_tail(p) + half, n - rows_blind(p)),
    };
}

static uint64_t job_bytes(uint32_t n)
{
    const struct evict_job *job = NULL;
    return (n + (uint64_t)1) * (sizeof *job->value + sizeof *job->pooled + sizeof *job->order);
}

static uint64_t record_bytes(uint32_t n, uint32_t keep)
{
    return (n + (uint64_t)1) * sizeof(uint32_t) +
           (n - BC_MIN(n, keep) + (uint64_t)1) * sizeof(struct evict_range);
}

uint64_t rest_bytes(const struct evict_params *p, const struct model_info *mi)
{
    return p->policy->score_some != NULL ? (uint64_t)mi->rest_rows * mi->d_model * sizeof(float)
                                         : 0;
}

uint64_t evict_run_bytes(const struct evict_params *p, const struct kn_kv *kv,
                         const struct model_info *mi, uint32_t n)
{
    if (!evict_policy_prunes(p->policy))
        return 0;
    return job_bytes(n) + record_bytes(n, 0) + walk_bytes(p, kv, n) + rest_bytes(p, mi);
}

static int job_begin(struct evict *ev, const struct seqcache *s, uint32_t keep, struct err *e)
{
    const struct evict_params *p = &ev->params;
    struct evict_job *job = &ev->job;
    uint32_t n = seqcache_count(s);
    uint64_t held_back = (uint64_t)evict_frozen(p) + rows_tail(p);
    if (!evict_policy_prunes(p->policy))
        return err_set(e, BC_EINVALID, "policy", "policy %s never prunes", p->policy->name);
    if (keep == 0 || held_back > keep)
        return err_set(e, BC_EINVALID, "keep_tokens",
                       "keep_tokens %u: must be at least 1 and hold the %llu frozen and recent "
                       "tokens",
                       keep, (unsigned long long)held_back);
    bc_assert(!ev->walk.active && ev->rest.n == 0); /* scores under way: the caller waits */
    *job = (struct evict_job){.active = true, .keep = keep, .n = n};
    if (n > keep)
        job->want = rows_wanted(p, n);
    job->next = job->want.first;
    evict_forget(ev);
    ev->keep = calloc(n + 1, sizeof *ev->keep);
    ev->dropped = calloc(n - BC_MIN(n, keep) + 1, sizeof *ev->dropped);
    job->value = calloc(n + 1, sizeof *job->value);
    job->pooled = calloc(n + 1, sizeof *job->pooled);
    job->order = calloc(n + 1, sizeof *job->order);
    if (!ev->keep || !ev->dropped || !job->value || !job->pooled || !job->order)
        return err_nomem(e, job_bytes(n) + record_bytes(n, keep));
    rebook(ev, LEDGER_refresh, &ev->booked_job, job_bytes(n));
    rebook(ev, LEDGER_refresh, &ev->booked_record, record_bytes(n, keep));
    return 0;
}

/* What lies between two calls. */
static void pieces_close(struct evict *ev)
{
    walk_close(ev);
    model_rest_close(&ev->rest);
    free(ev->rest.x);
    ev->rest.x = NULL;
    rebook(ev, LEDGER_refresh, &ev->booked_rest, 0);
}

void evict_abort(struct evict *ev)
{
    MAGIC_OK(ev, EVICT_MAGIC);
    pieces_close(ev);
    free(ev->job.value);
    free(ev->job.pooled);
    free(ev->job.order);
    ev->job = (struct evict_job){.active = false};
    rebook(ev, LEDGER_refresh, &ev->booked_job, 0);
}

void evict_forget(struct evict *ev)
{
    MAGIC_OK(ev, EVICT_MAGIC);
    free(ev->keep);
    free(ev->dropped);
    ev->keep = NULL;
    ev->dropped = NULL;
    rebook(ev, LEDGER_refresh, &ev->booked_record, 0);
}

/* Values of rows from *next to `end`, at most max_rows of them (0: all); *next moves on. value [count]. A policy that is not cut
 * by rows gives all of them, in its last piece. */
static int rows_score(struct evict *ev, struct model *m, const struct seqcache *s,
                      uint32_t max_rows, uint32_t *next, uint32_t end, float *value, struct err *e)
{
    const struct evict_policy *policy = ev->params.policy;
    struct kn *kn = pool_kn(seqcache_pool(s));
    struct evict_rows rows = {.first = *next, .end = end};
    bool done = true;
    int rc;
    ev->rows_done = 0;
    if (rows.first == rows.end)
        return 0;
    if (policy->walker != NULL) {
        rc = walk_some(ev, s, max_rows, value, &done, e);
    } else if (policy->score != NULL) {
        rc = policy->score(ev, m, s, value, e);
    } else if (policy->score_some != NULL && max_rows > 0) {
        rc = policy->score_some(ev, m, s, max_rows, &rows, value, e);
        rows.end = rows.first;
    } else {
        if (max_rows > 0)
            rows.end = rows.first + BC_MIN(max_rows, rows.end - rows.first);
        ev->rows_done = (double)(rows.end - rows.first) + kn->rows_read;
        rc = policy->score_rows(ev, m, s, rows, value + rows.first, e);
    }
    if (rc == 0 && kn->ops->status(kn) != KN_OK)
        rc = err_set(e, BC_EDEVICE, "", "device %s failed while policy %s scored: %s", kn->name,
                     policy->name, kn->failed);
    if (rc == 0 && done)
        *next = rows.end;
    return rc;
}

/* The values that the selection ranks: no unprotected row's window reaches out of `want`. */
static const float *job_values(struct evict *ev)
{
    const struct evict_params *p = &ev->params;
    struct evict_job *job = &ev->job;
    if (!p->policy->counter_causal || p->span == 1)
        return job->value;
    /* The nearest decimal: 0.7f is less than 0.7, and would fall short of index 7 of 10. */
    double quantile = nearbyint((double)p->span_quantile * 1e6) / 1e6;
    uint32_t first = job->want.first, n = job->want.end - first;
    select_span(job->value + first, n, p->span, quantile, job->pooled + first);
    return job->pooled;
}

/* The rows that are about to go, as ranges of stream indices. */
static size_t ranges_dropped(const uint64_t *stream, uint32_t n, const uint32_t *keep,
                             uint32_t n_keep, struct evict_range *ret)
{
    size_t n_ranges = 0;
    uint32_t k = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (k < n_keep && keep[k] == i) {
            k++;
            continue;
        }
        struct evict_range *last = n_ranges > 0 ? &ret[n_ranges - 1] : NULL;
        if (last != NULL && last->first + last->count == stream[i])
            last->count++;
        else
            ret[n_ranges++] = (struct evict_range){.first = stream[i], .count = 1};
    }
    return n_ranges;
}

/* What the cache is now and what is about to go. */
static struct evict_record record_open(struct evict *ev, const struct seqcache *s, uint32_t n_keep)
{
    return (struct evict_record){
        .policy = ev->params.policy,
        .tokens_before = ev->job.n,
        .live_before = seqcache_bytes_live(s),
        .held_before = seqcache_bytes_held(s),
        .dropped = ev->dropped,
        .n_dropped = ranges_dropped(seqcache_stream(s), ev->job.n, ev->keep, n_keep, ev->dropped),
        .keep = ev->keep,
    };
}

static void record_close(struct evict_record *r, const struct seqcache *s, uint64_t micros)
{
    r->tokens_after = seqcache_count(s);
    r->live_after = seqcache_bytes_live(s);
    r->held_after = seqcache_bytes_held(s);
    r->micros = micros;
}

int evict_run(struct evict *ev, struct model *m, struct seqcache *s, uint32_t keep,
              uint32_t max_rows, enum evict_answer *ret, struct evict_record *ret_record,
              struct err *e)
{
    MAGIC_OK(ev, EVICT_MAGIC);
    const struct evict_params *p = &ev->params;
    struct evict_job *job = &ev->job;
    uint64_t started = clock_us();
    int rc = job->active ? 0 : job_begin(ev, s, keep, e);
    if (rc == 0)
        rc = rows_score(ev, m, s, max_rows, &job->next, job->want.end, job->value, e);
    if (rc < 0) {
        evict_abort(ev);
        return rc;
    }
    bc_assert(job->keep == keep && job->n == seqcache_count(s));
    if (job->next < job->want.end) {
        job->micros += clock_us() - started;
        *ret = EVICT_WORKING;
        return 0;
    }

    uint32_t n_keep = select_keep(job_values(ev), job->n, keep, evict_frozen(p), rows_tail(p),
                                  job->order, ev->keep);
    struct evict_record record = record_open(ev, s, n_keep);
    if (n_keep < job->n && p->policy->kept != NULL)
        p->policy->kept(ev, job->value, ev->keep, n_keep);
    seqcache_evict(s, ev->keep, n_keep);
    record_close(&record, s, job->micros + (clock_us() - started));
    evict_abort(ev); /* the job is done; the record's arrays stay */
    *ret_record = record;
    *ret = EVICT_DONE;
    return 0;
}

int evict_scores_some(struct evict *ev, struct model *m, const struct seqcache *s,
                      uint32_t max_rows, uint32_t *done, float *ret, struct err *e)
{
    MAGIC_OK(ev, EVICT_MAGIC);
    if (!evict_policy_prunes(ev->params.policy))
        return err_set(e, BC_EINVALID, "policy", "policy %s has no scores",
                       ev->params.policy->name);
    int rc = rows_score(ev, m, s, max_rows, done, seqcache_count(s), ret, e);
    if (!ev->job.active && (rc < 0 || *done == seqcache_count(s)))
        pieces_close(ev);
    return rc;
}

int evict_scores(struct evict *ev, struct model *m, const struct seqcache *s, float *ret,
                 struct err *e)
{
    uint32_t done = 0;
    return evict_scores_some(ev, m, s, 0, &done, ret, e);
}
