/* scores.c: the policy's value of every cached token, for whoever asks; on request with rows of the
 * dropped ones between them, as far back as their ids are known.
 *
 *   own connection:  ACCEPTED, then REP_SCORES reports, then END(scores): a request like any other
 *   another one:     REP_SCORES_REPLY with all rows
 *
 * The rows are computed in blocks between passes, like a refresh, so neighbours go on. The session
 * itself rests until the last block: its cache must not change under the scores.
 */
#include "core.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static uint64_t job_bytes(uint32_t n, uint32_t total)
{
    return (n + (uint64_t)1) * sizeof(float) + total * (uint64_t)sizeof(struct report_score);
}

void scores_abort(struct session *s)
{
    if (s->scoring.value != NULL)
        ledger_credit(&s->owner, LEDGER_refresh, job_bytes(s->scoring.n, s->scoring.total));
    if (s->scoring.active && s->ev != NULL)
        evict_abort(s->ev); /* a walk under way writes into value */
    free(s->scoring.value);
    free(s->scoring.row);
    s->scoring = (struct scoring){0};
}

/* Dropped tokens whose ids are known: those of the ring that are not cached. */
static uint64_t known_first(const struct session *s)
{
    uint64_t ring = s->stream - BC_MIN(s->stream, (uint64_t)s->n_recent);
    return BC_MAX(ring, s->recent_from);
}

static uint32_t dropped_count(const struct session *s)
{
    uint64_t first = known_first(s);
    const uint64_t *stream = seqcache_stream(s->cache);
    uint32_t n = seqcache_count(s->cache), before = 0;
    while (before < n && stream[before] < first)
        before++;
    return (uint32_t)(s->stream - first) - (n - before);
}

static int scores_start(struct engine *en, struct session *s, const struct command *c,
                        struct err *e)
{
    const struct evict_params *p = evict_params(s->ev);
    bool own = c->conn == s->conn, dropped = c->u.scores.dropped;
    if (!evict_policy_prunes(p->policy) && !dropped)
        return err_set(e, BC_EINVALID, "policy", "policy %s has no scores", p->policy->name);
    if (s->prune.active || s->scoring.active || (own && (s->req || queue_has_prompt(en, s))))
        return err_set(e, BC_EBUSY, "session", "session %llu has a request or a prune under way",
                       (unsigned long long)s->id);
    uint32_t n = seqcache_count(s->cache), total = n + (dropped ? dropped_count(s) : 0);
    float *value = calloc(n + (size_t)1, sizeof *value);
    struct report_score *row = malloc((total + (size_t)1) * sizeof *row);
    struct request *q = own ? calloc(1, sizeof *q) : NULL;
    if (value == NULL || row == NULL || (own && q == NULL)) {
        free(value);
        free(row);
        free(q);
        return err_nomem(e, job_bytes(n, total));
    }
    ledger_charge(&s->owner, LEDGER_refresh, job_bytes(n, total));
    if (own) {
        q->kind = REQUEST_SCORES;
        q->conn = c->conn;
        q->request_id = c->request_id;
        q->n = total;
        q->start_us = engine_now(en);
        q->end_id = -1;
        s->req = q;
    }
    s->scoring = (struct scoring){.active = true,
                                  .reply = !own,
                                  .conn = c->conn,
                                  .request_id = c->request_id,
                                  .value = value,
                                  .row = row,
                                  .n = n,
                                  .done = evict_policy_prunes(p->policy) ? 0 : n,
                                  .total = total};
    s->row_us = 0;
    return BC_OK;
}

void scores_command(struct engine *en, struct command *c)
{
    struct session *s;
    struct err e = {0};
    if (sess_for(en, c, &s, &e) < 0 || scores_start(en, s, c, &e) < 0) {
        report_error(en, c, &e);
        return;
    }
    if (!s->scoring.reply) {
        report_reply(en, c, report_new(REP_ACCEPTED, 0));
        queue_face(en, s);
    }
}

static struct report_score cached_row(const struct session *s, uint32_t at)
{
    const struct evict_params *p = evict_params(s->ev);
    bool frozen = p->frozen != EVICT_FROZEN_AUTO && at < p->frozen;
    bool recent = at + p->recent >= s->scoring.n;
    return (struct report_score){
        .stream = seqcache_stream(s->cache)[at],
        .id = seqcache_ids(s->cache)[at],
        .position = seqcache_positions(s->cache)[at],
        .score = s->scoring.value[at],
        .flags = (frozen ? SCORE_FROZEN : 0u) | (recent ? SCORE_RECENT : 0u),
    };
}

/* Where a token was that is not cached any more; -1: it may have been renumbered since. */
static int32_t dropped_position(const struct session *s, uint64_t stream)
{
    return s->position_zero == 0 ? (int32_t)stream : -1;
}

/* All rows, in the order of the stream. */
static void rows_make(struct session *s)
{
    struct scoring *job = &s->scoring;
    const uint64_t *stream = seqcache_stream(s->cache);
    uint64_t next = known_first(s); /* the next index that may be a dropped one */
    uint32_t at = 0;
    for (uint32_t i = 0; i < job->total; i++) {
        if (at < job->n && (job->total == job->n || stream[at] <= next)) {
            next = BC_MAX(next, stream[at] + 1);
            job->row[i] = cached_row(s, at++);
        } else {
            job->row[i] = (struct report_score){.stream = next,
                                                .id = s->recent[next % s->n_recent],
                                                .position = dropped_position(s, next),
                                                .flags = SCORE_DROPPED};
            next++;
        }
    }
    bc_assert(at == job->n);
}

/* The rows [first, first + n) into a report. */
static void rows_fill(const struct session *s, uint32_t first, uint32_t n, struct report *r)
{
    r->u.scores.n = n;
    r->u.scores.total = s->scoring.total;
    r->u.scores.offset = first;
    r->u.scores.rows = (struct report_score *)(r + 1);
    memcpy(r->u.scores.rows, s->scoring.row + first, n * sizeof *r->u.scores.rows);
}

static void scores_reply(struct engine *en, struct session *s)
{
    struct report *r = report_new(REP_SCORES_REPLY, s->scoring.total * sizeof(struct report_score));
    struct command who = {.conn = s->scoring.conn,
                          .request_id = s->scoring.request_id,
                          .session = s->id};
    rows_fill(s, 0, s->scoring.total, r);
    report_reply(en, &who, r);
    scores_abort(s);
}

/* The own client's stream: a few reports a step, none while it does not read. */
static void scores_stream(struct engine *en, struct session *s)
{
    struct request *q = s->req;
    for (int i = 0; i < SCORES_REPORTS_STEP && q->done < q->n && !sess_parked(s); i++) {
        uint32_t n = BC_MIN(SCORES_PER_REPORT, q->n - q->done);
        struct report *r = report_new(REP_SCORES, n * sizeof(struct report_score));
        rows_fill(s, q->done, n, r);
        report_stream(en, s, r);
        q->done += n;
        en->worked = true;
    }
    if (q->done == q->n) {
        request_end(en, s, END_SCORES, NULL);
        en->worked = true;
    }
}

static int score_block(struct engine *en, struct session *s, struct err *e)
{
    struct scoring *job = &s->scoring;
    struct slice sl = {.who = {s}, .n = 1};
    uint32_t before = job->done;
    slice_begin(en, &sl);
    int rc = evict_scores_some(s->ev, s->m->model, s->cache, sl.rows, &job->done, job->value, e);
    if (rc == BC_OK)
        slice_done(en, &sl, job->done < job->n);
    bc_assert(job->done >= before);
    return rc;
}

void scores_run(struct engine *en, struct session *s)
{
    struct err e = {0};
    if (s->scoring.done < s->scoring.n) {
        if (en->score_rows_left == 0)
            return;
        en->worked = true;
        int rc = score_block(en, s, &e);
        if (rc < 0 && s->scoring.reply) {
            struct command who = {.conn = s->scoring.conn,
                                  .request_id = s->scoring.request_id,
                                  .session = s->id};
            report_error(en, &who, &e);
            scores_abort(s);
        } else if (rc < 0) {
            request_end(en, s, END_ERROR, &e);
        }
        if (rc == BC_EDEVICE)
            engine_fail(en, &e);
        if (rc < 0 || s->scoring.done < s->scoring.n)
            return;
    }
    if (!s->scoring.made)
        rows_make(s);
    s->scoring.made = true;
    if (s->scoring.reply)
        scores_reply(en, s);
    else
        scores_stream(en, s);
}
