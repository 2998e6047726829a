/* prune.c: prunes under way: who waits for one, a block of rows at a time, and what follows.
 *
 *   prune_start --> [active] --evict_run, score_rows rows a step--> done: event, reply, counters
 *                      |                                            failed: as it was, and told
 *                      '--prune_abort: forgotten, nothing has changed
 *
 * Prunes run in the order in which they were started, between passes, so that neighbours keep decoding: rows of the oldest one,
 * and where it has fewer than a slice may have, of small caches behind it that are scored by the same policy on the same model.
 * Each is done, fails or is forgotten by itself. Scores for whoever asked run in what is left of a step.
 *
 *   slice | oldest | next one | next | ...
 *
 *   nobody decodes     slice of score_rows rows
 *   neighbours decode  | slice | pass | slice | pass | ...      a slice as long as SLICE_PASSES passes: the gap between two
 *                                                               tokens of a neighbour is what it was, and SLICE_PASSES more;
 *                                                               and no longer than a device wishes (kn.slice_us);
 *                                                               a short one is followed by others, of the same session or the
 *                                                               next one, until half of that time is over
 *
 * What a pass and what a row of the refresh take is measured while it runs, on a device that has nothing else to do; the first
 * slice of a refresh is SLICE_MIN rows: the rows that come first see most, so what the last ones of an earlier refresh took would
 * promise too much. On a CPU, where a refresh is cut changes no bit of its result: time decides nothing but time. On a GPU it may
 * move a score by what two products of different shapes differ.
 */
#include "core.h"
#include "log.h"
#include <stdio.h>
#include <string.h>

#define SLICE_MIN 2u /* they take about as long as one: weights are read once for both */
#define SLICE_PASSES 0.75
#define SLICE_MAX 65536u
/* a session whose prune for others failed is not asked again for so long */
#define DEAF_US 1000000u

void prune_start(struct engine *en, struct session *s, enum record_prune_reason reason,
                 uint32_t keep)
{
    bc_assert(!s->prune.active);
    s->prune = (struct prune){.active = true, .reason = reason, .keep = keep, .order = ++en->tick};
    s->row_us = 0;
}

void prune_abort(struct session *s)
{
    evict_abort(s->ev);
    evict_forget(s->ev); /* what it had begun to write down */
    s->prune = (struct prune){0};
}

void prune_take_back(struct session *s)
{
    struct prune job = s->prune;
    prune_abort(s);
    if (job.reason != PRUNE_SHRUNK)
        return;
    int rc = evict_set_params(s->ev, &job.before, NULL);
    bc_assert(rc == BC_OK);
    s->ask = job.ask_before;
}

static void report_pruned(struct engine *en, struct session *s, const struct evict_record *rec,
                          uint64_t held_after)
{
    struct report *r = report_new(REP_PRUNED, rec->n_dropped * sizeof(struct evict_range));
    r->u.pruned.tokens_before = rec->tokens_before;
    r->u.pruned.tokens_after = rec->tokens_after;
    r->u.pruned.reason = s->prune.reason;
    r->u.pruned.live_before = rec->live_before;
    r->u.pruned.live_after = rec->live_after;
    r->u.pruned.held_before = rec->held_before;
    r->u.pruned.held_after = held_after;
    r->u.pruned.micros = rec->micros;
    snprintf(r->u.pruned.policy, sizeof r->u.pruned.policy, "%s", rec->policy->name);
    r->u.pruned.n_ranges = (uint32_t)rec->n_dropped;
    r->u.pruned.ranges = (struct evict_range *)(r + 1);
    memcpy(r->u.pruned.ranges, rec->dropped, rec->n_dropped * sizeof(struct evict_range));
    report_stream(en, s, r);
}

static struct command prune_asker(const struct session *s)
{
    return (
        struct command){.conn = s->prune.conn, .request_id = s->prune.request_id, .session = s->id};
}

static void prune_reply(struct engine *en, struct session *s, const struct evict_record *rec)
{
    struct command who = prune_asker(s);
    struct report *r;
    if (s->prune.reason == PRUNE_SHRUNK) {
        r = report_new(REP_BUDGET, 0);
        sess_info(en, s, &r->u.info);
    } else {
        r = report_new(REP_PRUNED_REPLY, 0);
        r->u.pruned.tokens_before = rec->tokens_before;
        r->u.pruned.tokens_after = rec->tokens_after;
    }
    report_reply(en, &who, r);
}

static void prune_done(struct engine *en, struct session *s, const struct evict_record *rec)
{
    struct prune job = s->prune;
    uint32_t dropped = rec->tokens_before - rec->tokens_after;
    if (job.reason != PRUNE_BUDGET && !job.self) /* no refill is near: give whole pages back */
        seqcache_compact(s->cache);
    if (job.reason == PRUNE_SHRUNK)
        sess_ceiling(en, s);
    share_update(en);
    s->prunes++;
    s->dropped += dropped;
    s->dropped_why |= 1u << job.reason;
    s->prune_micros += rec->micros;
    log_debug("engine.prune", "session %llu: %s %u -> %u tokens, %llu us",
              (unsigned long long)s->id, rec->policy->name, rec->tokens_before, rec->tokens_after,
              (unsigned long long)rec->micros);
    if (job.reason == PRUNE_SHRUNK)
        durable_params(s);
    durable_evict(s, rec, job.reason, seqcache_bytes_held(s->cache));
    report_pruned(en, s, rec, seqcache_bytes_held(s->cache));
    if (job.reply)
        prune_reply(en, s, rec);
    evict_forget(s->ev);
    s->prune = (struct prune){0};
    if (s->req != NULL && s->req->phase == REQUEST_ENDING)
        request_end(en, s, s->req->end_reason, NULL);
}

static void prune_failed(struct engine *en, struct session *s, const struct err *e)
{
    struct prune job = s->prune;
    struct command who = prune_asker(s);
    prune_take_back(s);
    share_update(en);
    if (job.reply)
        report_error(en, &who, e);
    else if (job.reason == PRUNE_PRESSURE && !job.self)
        s->deaf_us = engine_now(en) + DEAF_US; /* it was for others: nothing happens to this one */
    else if (s->req != NULL)
        request_end(en, s, END_ERROR, e);
    if (e->code == BC_EDEVICE)
        engine_fail(en, e);
}

/* ---- slices ---- */

static bool can_be_cut(const struct session *s)
{
    const struct evict_policy *p = evict_params(s->ev)->policy;
    return p->score_rows != NULL || p->walker != NULL;
}

/* How long a pass may wait for the refreshes before it. */
static double slices_may_us(const struct engine *en, const struct session *s)
{
    double us = SLICE_PASSES * (double)en->decode_us;
    uint32_t most = s->m->kn->slice_us;
    return most > 0 ? BC_MIN(us, (double)most) : us;
}

static uint32_t slice_rows(const struct engine *en, const struct session *s)
{
    if (!en->neighbours || !can_be_cut(s))
        return en->score_rows_left;
    if (en->decode_us == 0 || s->row_us == 0)
        return BC_MIN(en->score_rows_left, SLICE_MIN);
    double left = slices_may_us(en, s) - (double)en->slices_us, fit = left / s->row_us;
    if (!evict_params(s->ev)->policy->cuts_layers) /* whole rows: see evict_rows_done */
        fit -= s->m->kn->rows_read;
    fit = BC_MIN(fit, s->slice_rows * left / s->slice_us); /* many may show what few have hidden */
    return (uint32_t)BC_MAX(BC_MIN(fit, (double)SLICE_MAX), (double)SLICE_MIN);
}

void slice_begin(struct engine *en, struct slice *sl)
{
    struct session *s = sl->who[0];
    uint64_t cached = 0;
    for (uint32_t i = 0; i < sl->n; i++)
        cached += seqcache_count(sl->who[i]->cache);
    sl->rows = slice_rows(en, s);
    sl->most = (uint32_t)BC_MIN((uint64_t)sl->rows, cached);
    s->m->kn->ops->sync(s->m->kn); /* what was asked for before is not this slice's */
    sl->start = engine_now(en);
}

/* Whether what is left of the time before the pass is too little to begin something, or nobody knows what. A block that rests
 * between two layers has used what it could: its next step may be as long as what is left. */
static bool slices_end(const struct engine *en, const struct session *s, bool whole)
{
    return s->row_us == 0 || (whole && evict_params(s->ev)->policy->cuts_layers) ||
           2 * (double)en->slices_us >= slices_may_us(en, s);
}

/* What a row takes, from a slice of so many: up at once, but a step that somebody else delayed is not believed; down slowly: rows
 * at the head may be cheaper than the next ones in a layer. */
static void slice_learn(struct session *s, double us, double rows, uint32_t most)
{
    double now = us / rows, old = s->row_us;
    s->row_us = old == 0 ? now : now > old ? BC_MIN(now, 2 * old) : (3 * old + now) / 4;
    s->slice_rows = most;
    s->slice_us = BC_MAX(us, 1.0);
}

void slice_done(struct engine *en, const struct slice *sl, bool whole)
{
    double us = (double)(engine_now(en) - sl->start), rows = 0;
    struct session *s = sl->who[0];
    en->slices_us += (uint64_t)us;
    for (uint32_t i = 0; i < sl->n; i++)
        rows += evict_rows_done(sl->who[i]->ev);
    for (uint32_t i = 0; i < sl->n && whole; i++)
        if (evict_rows_done(sl->who[i]->ev) > 0)
            slice_learn(sl->who[i], us, rows, sl->most);
    if (!en->neighbours || !can_be_cut(s))
        en->score_rows_left -= BC_MIN(sl->most, en->score_rows_left);
    else if (slices_end(en, s, whole))
        en->score_rows_left = 0;
}

/* The oldest prune, and those that go with it, oldest first. False: nobody is pruned. */
static bool slice_of_oldest(const struct engine *en, struct slice *ret)
{
    struct session *first = NULL;
    for (uint32_t i = 0; i < en->n_sessions; i++) {
        struct session *s = en->list[i];
        if (s->prune.active && (first == NULL || s->prune.order < first->prune.order))
            first = s;
    }
    *ret = (struct slice){.who = {first}, .n = 1};
    for (uint32_t i = 0; first != NULL && i < en->n_sessions; i++) {
        struct session *s = en->list[i];
        if (s == first || !s->prune.active || s->m != first->m ||
            !evict_joins(s->ev, s->cache, first->ev))
            continue;
        uint32_t at = ret->n;
        for (; at > 1 && ret->who[at - 1]->prune.order > s->prune.order; at--)
            if (at < EVICT_TOGETHER_MAX)
                ret->who[at] = ret->who[at - 1];
        if (at < EVICT_TOGETHER_MAX)
            ret->who[at] = s;
        ret->n += ret->n < EVICT_TOGETHER_MAX;
    }
    return first != NULL;
}

/* One slice. What comes of a session's prune is its own; but a device that fails ends all of them. */
static void prune_step(struct engine *en, struct slice *sl)
{
    struct evict_run runs[EVICT_TOGETHER_MAX];
    bool working = false;
    en->worked = true;
    slice_begin(en, sl);
    for (uint32_t i = 0; i < sl->n; i++) {
        struct session *s = sl->who[i];
        runs[i] = (struct evict_run){.ev = s->ev, .cache = s->cache, .keep = s->prune.keep};
    }
    evict_run(runs, sl->n, sl->who[0]->m->model, sl->rows);
    for (uint32_t i = 0; i < sl->n; i++)
        working = working || runs[i].answer == EVICT_WORKING;
    slice_done(en, sl, working);
    for (uint32_t i = 0; i < sl->n; i++) {
        struct session *s = sl->who[i];
        if (!s->prune.active) /* ended with the device */
            continue;
        if (runs[i].answer == EVICT_FAILED)
            prune_failed(en, s, &runs[i].err);
        else if (runs[i].answer == EVICT_DONE)
            prune_done(en, s, &runs[i].record);
    }
}

/* Refreshes and scores under way, oldest first. */
void prunes_run(struct engine *en)
{
    struct slice sl;
    while (en->score_rows_left > 0 && !en->failed && slice_of_oldest(en, &sl))
        prune_step(en, &sl);
    for (uint32_t i = en->n_sessions; i-- > 0 && !en->failed;)
        if (en->list[i]->scoring.active)
            scores_run(en, en->list[i]);
}
