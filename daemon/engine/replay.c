/* replay.c: what a journal says, done again: the rows of a session go through the ordinary passes, in
 * fair turns with everybody's, between the evictions that stood between them.
 *
 *   s->req   | REPLAY: rows of the next APPEND |   EVICT, PARAMS: at once   | REPLAY: ...
 *                                                                   end: the state that the journal
 *                                                                   ends with; a request that was under
 *                                                                   way goes on where it was
 *
 * Meanwhile the session is on its way (PLACE_COMING): whoever wants its cache waits. If there are no pages for its rows, and
 * nobody gives any, it is put off: away with nothing but its journal (PLACE_AWAY without an image), like one whose snapshot
 * finds no room. It is done again at its next use, or when as many pages are free as it had and missed; one after the other,
 * so that two of them do not take them from each other. */
#include "core.h"
#include "log.h"
#include <stdlib.h>
#include <string.h>

/* ---- one thing after the other ---- */

static int bad(struct err *e, const char *what)
{
    return err_set(e, BC_ECORRUPT, "journal", "it cannot be done again: %s", what);
}

/* The cache keeps what none of the ranges has. */
static int drop_ranges(struct session *s, const struct evict_range *range, uint32_t n_ranges,
                       uint32_t after, struct err *e)
{
    uint32_t n = seqcache_count(s->cache), kept = 0, dropped = 0, at = 0;
    const uint64_t *stream = seqcache_stream(s->cache);
    uint32_t *keep = malloc((n + 1) * sizeof *keep);
    if (keep == NULL)
        return err_nomem(e, (n + 1) * sizeof *keep);
    for (uint32_t i = 0; i < n; i++) {
        while (at < n_ranges && stream[i] >= range[at].first + range[at].count)
            at++;
        if (at < n_ranges && stream[i] >= range[at].first)
            dropped++;
        else
            keep[kept++] = i;
    }
    uint64_t named = 0;
    for (uint32_t i = 0; i < n_ranges; i++)
        named += range[i].count;
    int rc = named != dropped || kept != after ? bad(e, "a dropped token was not cached") : BC_OK;
    if (rc == BC_OK)
        seqcache_evict(s->cache, keep, kept);
    free(keep);
    return rc;
}

static void ceiling_set(struct engine *en, struct session *s)
{
    sess_ceiling(en, s);
    share_update(en);
}

static int do_evict(struct engine *en, struct session *s, const struct replay_op *op, struct err *e)
{
    struct bytes_in in = {.at = s->replay->blob.at + op->at, .n = op->len};
    uint32_t reason = bytes_get_u32(&in);
    bytes_get_u32(&in);
    uint32_t after = bytes_get_u32(&in);
    bytes_take(&in, 5 * sizeof(uint64_t));
    uint32_t n_ranges = bytes_get_u32(&in);
    struct evict_range *ranges = malloc((n_ranges + 1) * sizeof *ranges);
    if (ranges == NULL)
        return err_nomem(e, n_ranges * sizeof *ranges);
    bytes_get(&in, ranges, n_ranges * sizeof *ranges);
    int rc = in.failed ? bad(e, "an eviction is not whole") : BC_OK;
    if (rc == BC_OK)
        rc = drop_ranges(s, ranges, n_ranges, after, e);
    free(ranges);
    if (rc == BC_OK && evict_params(s->ev)->policy->kept != NULL)
        rc = evict_state_get(s->ev, &in, seqcache_count(s->cache), e);
    if (rc == BC_OK && reason != PRUNE_BUDGET)
        seqcache_compact(s->cache);
    ceiling_set(en, s);
    return rc;
}

static int do_params(struct engine *en, struct session *s, const struct replay_op *op,
                     struct err *e)
{
    struct bytes_in in = {.at = s->replay->blob.at + op->at, .n = op->len};
    struct evict_params p;
    int rc = evict_request_get(&in, &s->ask, e);
    if (rc < 0 || (rc = evict_params_get(&in, &p, e)) < 0 ||
        (rc = positions_check(s->m, s->rerotate, &p, e)) < 0 ||
        (rc = evict_set_params(s->ev, &p, e)) < 0)
        return rc;
    s->frozen_auto = p.frozen == EVICT_FROZEN_AUTO;
    ceiling_set(en, s);
    return BC_OK;
}

/* The rows of an APPEND as a request that nobody hears of. */
static int append_begin(struct session *s, const struct replay_op *op, struct err *e)
{
    struct replay *r = s->replay;
    struct request *q = calloc(1, sizeof *q);
    if (q == NULL)
        return err_nomem(e, sizeof *q);
    q->kind = REQUEST_REPLAY;
    q->ids = r->ids + r->ids_done;
    q->n = op->n;
    q->end_id = -1;
    q->start_us = q->progress_us = engine_now(s->m->en);
    r->ids_done += op->n;
    s->req = q;
    return BC_OK;
}

static void append_free(struct session *s)
{
    free(s->req); /* its ids are the replay's */
    s->req = NULL;
}

/* ---- the end ---- */

static void replay_drop(struct session *s)
{
    if (s->replay == NULL)
        return;
    ledger_credit(&s->owner, LEDGER_prompts, s->replay->booked);
    replay_free(&s->replay);
}

/* A request that was under way goes on, or ends as it was about to. */
static void resume(struct engine *en, struct session *s, struct replay *r)
{
    struct request *q = r->resume;
    const struct evict_params *p = evict_params(s->ev);
    uint32_t context = s->m->info.context_train;
    r->resume = NULL;
    s->req = q;
    q->start_us = q->progress_us = engine_now(en);
    request_adopt(s, q);
    if (r->cancel != 0 || r->give_up.code < 0) {
        request_end(en, s, r->cancel != 0 ? (enum record_end_reason)(r->cancel - 1) : END_ERROR,
                    r->cancel != 0 ? NULL : &r->give_up);
        return;
    }
    if (q->done < q->n)
        return; /* in its prompt still */
    q->phase = REQUEST_DECODE;
    q->decode_us = engine_now(en);
    if (r->prune_owed)
        prune_start(en, s, PRUNE_PREFILL_END, p->keep);
    if (q->end_id >= 0 || q->stop_string)
        request_finish(en, s, END_STOP);
    else if (q->tokens_out >= q->max_tokens)
        request_finish(en, s, END_LENGTH);
    else if (!s->rerotate && context > 0 && s->stream >= context)
        request_finish(en, s, END_CONTEXT);
}

static void replay_done(struct engine *en, struct session *s)
{
    struct replay *r = s->replay;
    const struct sess_state *end = r->end;
    bc_assert(s->stream == end->stream && s->position_zero == end->position_zero);
    s->has_pending = end->has_pending;
    s->pending = end->pending;
    s->chat_state = end->chat;
    s->tokens_in = end->tokens_in;
    s->tokens_out = end->tokens_out;
    s->prunes = end->prunes;
    s->dropped = end->dropped;
    s->prune_micros = end->prune_micros;
    s->prunes_at_end = end->prunes_at_end;
    s->dropped_at_end = end->dropped_at_end;
    s->dropped_why = end->dropped_why;
    s->replay = NULL;
    s->lodging.place = PLACE_HERE;
    s->last_use_us = engine_now(en);
    ceiling_set(en, s);
    s->keeper->rows = r->n_ids;
    durable_note(s, DURABLE_READY);
    log_info("engine.durable", "session %llu (%s): %llu tokens done again, %u cached",
             (unsigned long long)s->id, s->name, (unsigned long long)r->n_ids,
             seqcache_count(s->cache));
    if (r->resume != NULL)
        resume(en, s, r);
    ledger_credit(&s->owner, LEDGER_prompts, r->booked);
    replay_free(&r);
    queue_face(en, s);
    en->worked = true;
    tier_waiting_run(en, s);
}

/* ---- what others call ---- */

void replay_next(struct engine *en, struct session *s)
{
    struct replay *r = s->replay;
    struct err e = {0};
    int rc = BC_OK;
    if (s->req != NULL)
        append_free(s);
    while (r->next < r->n_ops && rc == BC_OK && s->req == NULL) {
        const struct replay_op *op = &r->ops[r->next++];
        if (op->kind == REPLAY_APPEND)
            rc = append_begin(s, op, &e);
        else if (op->kind == REPLAY_EVICT)
            rc = do_evict(en, s, op, &e);
        else
            rc = do_params(en, s, op, &e);
    }
    en->worked = true;
    if (rc < 0)
        r->failed = e;
    else if (s->req == NULL)
        replay_done(en, s);
}

void replay_begin(struct engine *en, struct session *s, struct replay **pr)
{
    struct replay *r = *pr;
    *pr = NULL;
    bc_assert(s->req == NULL && s->replay == NULL);
    s->replay = r;
    r->booked = r->n_ops * sizeof *r->ops + r->n_ids * sizeof *r->ids + r->blob.cap;
    ledger_charge(&s->owner, LEDGER_prompts, r->booked);
    s->lodging.place = PLACE_COMING;
    queue_face(en, s);
    replay_next(en, s);
}

/* ---- no room for it ---- */

static bool put_off(const struct session *s)
{
    return s->lodging.place == PLACE_AWAY && s->lodging.image == NULL;
}

/* The memory is full: neither the journal's fault nor the session's. */
static bool no_room(const struct err *e)
{
    return e->code == BC_EBUDGET &&
           (strcmp(e->field, "kv_memory") == 0 || strcmp(e->field, "uid_share") == 0);
}

static void replay_put_off(struct engine *en, struct session *s, const struct err *e)
{
    struct replay *r = s->replay;
    if (s->req != NULL)
        append_free(s);
    r->room = seqcache_bytes_held(s->cache) + e->needed;
    ledger_credit(&s->owner, LEDGER_prompts, r->booked);
    free(r->ops); /* they will be read again */
    free(r->ids);
    free(r->blob.at);
    r->ops = NULL;
    r->ids = NULL;
    r->blob = (struct bytes_out){0};
    r->failed = (struct err){0};
    s->replay = NULL;
    s->replay_after = r;
    seqcache_clear(s->cache);
    evict_state_clear(s->ev);
    s->lodging.place = PLACE_AWAY;
    sess_state_take(s, r->end);
    s->budget_bytes = budget_bytes(&r->end->params, pool_page_bytes(s->pool));
    share_update(en);
    /* A larger budget on the way sets aside more for refreshes than the one in the end: what was not enough then looks
     * enough now. It would be tried for ever. */
    r->room = pressure_room_after(en, s, r->room);
    durable_note(s, DURABLE_READY); /* if it never comes to it: this daemon did not end of it */
    log_warn("engine.durable",
             "session %llu (%s): %s; it is done again when there is room, or when it is used",
             (unsigned long long)s->id, s->name, e->text);
    en->tier.freed = true;
    en->worked = true;
    queue_face(en, s);
    tier_waiting_refuse(en, s, e);
}

/* One of them, if it finds what it missed. */
static void put_off_again(struct engine *en)
{
    struct session *first = NULL;
    for (uint32_t i = 0; i < en->n_sessions; i++) {
        struct session *s = en->list[i];
        if (s->replay != NULL)
            return;
        if (put_off(s) && s->m->state == MODEL_READY && (first == NULL || s->id < first->id) &&
            pressure_room(en, s, s->replay_after->room))
            first = s;
    }
    struct err e = {0};
    if (first != NULL && tier_fetch(en, first, &e) < 0) {
        first->replay_after->room = UINT64_MAX; /* whoever uses it is told */
        log_warn("engine.durable", "session %llu (%s): %s", (unsigned long long)first->id,
                 first->name, e.text);
    }
}

void replays_run(struct engine *en)
{
    if (en->keeping.n == 0)
        return;
    for (uint32_t i = en->n_sessions; i-- > 0;) {
        struct session *s = en->list[i];
        if (s->replay == NULL || s->replay->failed.code == BC_OK)
            continue;
        struct err e = s->replay->failed;
        if (no_room(&e)) {
            replay_put_off(en, s, &e);
            continue;
        }
        log_error("engine.durable", "session %llu (%s): %s", (unsigned long long)s->id, s->name,
                  e.text);
        recover_give_up(en, s, &e);
        en->worked = true;
    }
    put_off_again(en);
}

void replay_stop(struct session *s)
{
    replay_free(&s->replay_after);
    if (s->replay == NULL)
        return;
    if (s->req != NULL)
        append_free(s);
    replay_drop(s);
}

bool replay_cancel(struct session *s, uint32_t reason)
{
    struct replay *r = s->replay != NULL ? s->replay : s->replay_after;
    if (r == NULL || r->resume == NULL)
        return false;
    if (r->cancel == 0)
        r->cancel = 1 + reason;
    return true;
}
