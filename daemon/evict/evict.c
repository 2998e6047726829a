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

/* What rows between two layers take. */
static uint64_t rest_bytes(const struct evict_params *p, const struct model_info *mi, uint32_t n)
{
    uint64_t rows = BC_MIN(mi->rest_rows, n);
    return p->policy->cuts_layers ? rows * mi->d_model * sizeof(float) : 0;
}

uint64_t evict_run_bytes(const struct evict_params *p, const struct kn_kv *kv,
                         const struct model_info *mi, uint32_t n)
{
    if (!evict_policy_prunes(p->policy))
        return 0;
    return job_bytes(n) + record_bytes(n, 0) + walk_bytes(p, kv, n) + rest_bytes(p, mi, n);
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

/* What lies between two calls beside the job. */
static int pieces_open(struct evict *ev, const struct model *m, const struct seqcache *s,
                       struct err *e)
{
    uint64_t bytes = rest_bytes(&ev->params, model_info(m), seqcache_count(s));
    if (bytes == 0 || ev->rest.x != NULL)
        return 0;
    if ((ev->rest.x = malloc(bytes)) == NULL)
        return err_nomem(e, bytes);
    rebook(ev, LEDGER_refresh, &ev->booked_rest, bytes);
    return 0;
}

/* Values of the rows that are due, at most max_rows in all (0: all of them); next moves on. Parts behind the first: see
 * evict_joins. A policy that is not cut by rows gives all of them, in its last piece. */
static int rows_score(struct evict_part *parts, uint32_t n, struct model *m, uint32_t max_rows,
                      struct err *e)
{
    struct evict *ev = parts->ev;
    const struct evict_policy *policy = ev->params.policy;
    struct kn *kn = model_kn(m);
    bool done = true;
    int rc;
    for (uint32_t i = 0; i < n; i++)
        parts[i].ev->rows_done = 0;
    if (n == 1 && parts->next == parts->end)
        return 0;
    if (policy->score_rows != NULL)
        rc = policy->score_rows(parts, n, m, max_rows > 0 ? max_rows : UINT32_MAX, e);
    else if (policy->walker != NULL)
        rc = walk_some(ev, parts->s, max_rows, parts->value, &done, e);
    else
        rc = policy->score(ev, m, parts->s, parts->value, e);
    if (rc == 0 && kn->ops->status(kn) != KN_OK)
        rc = err_set(e, BC_EDEVICE, "", "device %s failed while policy %s scored: %s", kn->name,
                     policy->name, kn->failed);
    if (rc == 0 && done && policy->score_rows == NULL)
        parts->next = parts->end;
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

/* All values are there: the selection and what follows from it. */
static void run_finish(struct evict_run *r)
{
    struct evict *ev = r->ev;
    struct evict_job *job = &ev->job;
    const struct evict_params *p = &ev->params;
    uint64_t started = clock_us();
    uint32_t n_keep = select_keep(job_values(ev), job->n, job->keep, evict_frozen(p), rows_tail(p),
                                  job->order, ev->keep);
    r->record = record_open(ev, r->cache, n_keep);
    if (n_keep < job->n && p->policy->kept != NULL)
        p->policy->kept(ev, job->value, ev->keep, n_keep);
    seqcache_evict(r->cache, ev->keep, n_keep);
    r->record.tokens_after = seqcache_count(r->cache);
    r->record.live_after = seqcache_bytes_live(r->cache);
    r->record.held_after = seqcache_bytes_held(r->cache);
    r->record.micros = (uint64_t)job->micros + (clock_us() - started);
    r->answer = EVICT_DONE;
    evict_abort(ev); /* the job is done; the record's arrays stay */
}

static void run_failed(struct evict_run *r, const struct err *e)
{
    evict_abort(r->ev);
    r->err = *e;
    r->answer = EVICT_FAILED;
}

/* It begins, or goes on. */
static int run_open(struct evict_run *r, const struct model *m, struct err *e)
{
    struct evict_job *job = &r->ev->job;
    MAGIC_OK(r->ev, EVICT_MAGIC);
    r->ev->rows_done = 0;
    r->answer = EVICT_WORKING;
    int rc = job->active ? 0 : job_begin(r->ev, r->cache, r->keep, e);
    if (rc == 0 && job->next < job->want.end)
        rc = pieces_open(r->ev, m, r->cache, e);
    bc_assert(rc < 0 || (job->keep == r->keep && job->n == seqcache_count(r->cache)));
    return rc;
}

/* Its values so far; us: what they took, all runs together; spent: the same, in rows. */
static void run_scored(struct evict_run *r, const struct evict_part *part, double us, double spent)
{
    struct evict_job *job = &r->ev->job;
    job->next = part->next;
    job->micros += spent > 0 ? us * r->ev->rows_done / spent : us;
    if (job->next == job->want.end)
        run_finish(r);
}

void evict_run(struct evict_run *runs, uint32_t n, struct model *m, uint32_t max_rows)
{
    struct evict_part parts[EVICT_TOGETHER_MAX];
    struct evict_run *of[EVICT_TOGETHER_MAX];
    uint32_t n_parts = 0;
    uint64_t started = clock_us();
    double spent = 0;
    struct err e;

    bc_assert(n >= 1 && n <= EVICT_TOGETHER_MAX);
    for (uint32_t i = 0; i < n; i++) {
        struct evict_job *job = &runs[i].ev->job;
        bc_assert(i == 0 || evict_joins(runs[i].ev, runs[i].cache, runs[0].ev));
        if (run_open(&runs[i], m, &e) < 0) {
            run_failed(&runs[i], &e);
            continue;
        }
        of[n_parts] = &runs[i];
        parts[n_parts++] =
            (struct evict_part){runs[i].ev, runs[i].cache, job->next, job->want.end, job->value};
    }
    int rc = n_parts > 0 ? rows_score(parts, n_parts, m, max_rows, &e) : 0;
    double us = (double)(clock_us() - started);
    for (uint32_t i = 0; i < n_parts; i++)
        spent += parts[i].ev->rows_done;
    for (uint32_t i = 0; i < n_parts; i++) {
        if (rc < 0)
            run_failed(of[i], &e);
        else
            run_scored(of[i], &parts[i], us, spent);
    }
}

bool evict_may_join(const struct evict_params *p, uint32_t n)
{
    return p->policy->score_rows != NULL && n <= EVICT_TOGETHER_TOKENS;
}

bool evict_joins(const struct evict *ev, const struct seqcache *s, const struct evict *first)
{
    const struct evict_params *a = &ev->params, *b = &first->params;
    return a->policy == b->policy && a->score == b->score && evict_may_join(a, seqcache_count(s));
}

int evict_scores_some(struct evict *ev, struct model *m, const struct seqcache *s,
                      uint32_t max_rows, uint32_t *done, float *ret, struct err *e)
{
    MAGIC_OK(ev, EVICT_MAGIC);
    struct evict_part part = {ev, s, *done, seqcache_count(s), ret};
    if (!evict_policy_prunes(ev->params.policy))
        return err_set(e, BC_EINVALID, "policy", "policy %s has no scores",
                       ev->params.policy->name);
    int rc = pieces_open(ev, m, s, e);
    if (rc == 0)
        rc = rows_score(&part, 1, m, max_rows, e);
    if (rc == 0)
        *done = part.next;
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
