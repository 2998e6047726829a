/* story.c: a journal read from its beginning to its end: what is to be done again (struct replay),
 * what the session is afterwards, and the reports of its last request, numbered as they were, for a
 * client that missed some.
 *
 * A record is believed (its sum was right) but not trusted: whatever does not follow from the records
 * before it makes the journal a broken one. */
#include "core.h"
#include "log.h"
#include <stdlib.h>
#include <string.h>

static int broken(struct err *e, const struct journal_record *r, const char *what)
{
    return err_set(e, BC_ECORRUPT, "journal", "record %llu (type %u): %s",
                   (unsigned long long)r->seq, r->type, what);
}

/* ---- what is to be done again ---- */

static struct replay_op *op_add(struct story *st, enum replay_kind kind)
{
    struct replay *r = st->r;
    if (r->n_ops == st->ops_max) {
        uint32_t more = st->ops_max > 0 ? st->ops_max * 2 : 64;
        struct replay_op *ops = reallocarray(r->ops, more, sizeof *ops);
        if (ops == NULL)
            return NULL;
        r->ops = ops;
        st->ops_max = more;
    }
    struct replay_op *op = &r->ops[r->n_ops++];
    *op = (struct replay_op){.kind = kind, .at = r->blob.n};
    return op;
}

static bool ids_add(struct story *st, const int32_t *ids, uint32_t n)
{
    struct replay *r = st->r;
    if (r->n_ids + n > st->ids_max) {
        size_t more = BC_MAX(st->ids_max * 2, r->n_ids + n + 256);
        int32_t *to = reallocarray(r->ids, more, sizeof *to);
        if (to == NULL)
            return false;
        r->ids = to;
        st->ids_max = more;
    }
    memcpy(r->ids + r->n_ids, ids, n * sizeof *ids);
    r->n_ids += n;
    struct replay_op *last = r->n_ops > 0 ? &r->ops[r->n_ops - 1] : NULL;
    if (last == NULL || last->kind != REPLAY_APPEND)
        last = op_add(st, REPLAY_APPEND);
    if (last != NULL)
        last->n += n;
    return last != NULL;
}

static bool blob_add(struct story *st, enum replay_kind kind, const void *bytes, size_t n)
{
    struct replay_op *op = op_add(st, kind);
    if (op == NULL)
        return false;
    bytes_put(&st->r->blob, bytes, n);
    op->len = n;
    return !st->r->blob.failed;
}

/* All of it stands in the snapshot. */
static void ops_clear(struct story *st)
{
    st->r->n_ops = 0;
    st->r->n_ids = 0;
    st->r->blob.n = 0;
}

/* ---- reports ---- */

static void item_add(struct story *st, struct report *r)
{
    *st->item_tail = r;
    st->item_tail = &r->next;
}

static void list_free(struct report **list, struct report ***tail)
{
    while (*list != NULL) {
        struct report *r = *list;
        *list = r->next;
        report_free(&r);
    }
    *tail = list;
}

/* Numbers of records that were told and cannot be made again: log-probabilities are lost; else it was
 * a reminder of how far the prompt is. */
static void fill(struct story *st, uint64_t n)
{
    const struct request *q = st->q;
    bool reminders = q != NULL && q->opt.n_logprobs < 0 && !q->opt.prompt_logprobs && n < 64;
    for (uint64_t i = 0; i < (reminders ? n : 1); i++) {
        struct report *r = reminders ? report_of_progress(q) : report_new(REP_LOST, 0);
        if (!reminders)
            r->u.lost.count = n;
        *st->reports_tail = r;
        st->reports_tail = &r->next;
    }
}

/* The frames of an item are complete: its reports end with record number `seq`. */
static void item_close(struct story *st, uint64_t seq)
{
    uint64_t have = 0;
    for (const struct report *r = st->item; r != NULL; r = r->next)
        have += report_records(r);
    if (seq < st->seq + have) { /* reports were withheld: the numbers begin anew */
        list_free(&st->item, &st->item_tail);
        list_free(&st->reports, &st->reports_tail);
        st->seq = st->seq_first = seq;
        return;
    }
    if (seq > st->seq + have)
        fill(st, seq - st->seq - have);
    *st->reports_tail = st->item;
    if (st->item != NULL)
        st->reports_tail = st->item_tail;
    st->item = NULL;
    st->item_tail = &st->item;
    st->seq = seq;
}

/* ---- records ---- */

static const uint32_t nothing_learnt[2]; /* no mass, no query */

static int on_create(struct story *st, struct bytes_in *in, const struct journal_record *r,
                     struct err *e)
{
    st->arithmetic = bytes_get_u64(in);
    st->identity = bytes_get_u64(in);
    st->id = bytes_get_u64(in);
    bytes_get(in, st->token, sizeof st->token);
    if (in->failed || st->id == 0)
        return broken(e, r, "it does not say who the session is");
    const void *bytes = in->at;
    size_t n = in->n;
    int rc = sess_state_get(bytes, n, st->begin, e);
    if (rc == BC_OK && (st->begin->stream != 0 || st->begin->has_pending))
        return broken(e, r, "a session does not begin in the middle");
    st->begin->policy = nothing_learnt; /* what it points to goes with the record */
    st->begin->n_policy = sizeof nothing_learnt;
    *st->r->end = *st->begin;
    return rc;
}

static bool get_stops(struct bytes_in *in, struct generate_options *o)
{
    o->n_stop = bytes_get_u32(in);
    if (o->n_stop > GENERATE_STOPS_MAX)
        return false;
    for (uint32_t i = 0; i < o->n_stop; i++) {
        uint32_t len = bytes_get_u32(in);
        if (len > GENERATE_STOP_BYTES_MAX)
            return false;
        o->stop[i].len = (uint16_t)len;
        bytes_get(in, o->stop[i].bytes, len);
    }
    return true;
}

/* Options and ids of a request into q. */
static bool get_request(struct bytes_in *in, struct request *q, uint32_t *ret_frozen)
{
    struct generate_options *o = &q->opt;
    q->prompt = (enum prompt_kind)bytes_get_u32(in);
    q->chat_after = (enum chat_state)bytes_get_u32(in);
    q->frozen_was_auto = bytes_get_u32(in) != 0;
    *ret_frozen = bytes_get_u32(in);
    q->max_tokens = o->max_tokens = bytes_get_u32(in);
    o->temperature = bytes_get_f32(in);
    o->top_p = bytes_get_f32(in);
    o->min_p = bytes_get_f32(in);
    o->repeat_penalty = bytes_get_f32(in);
    o->top_k = bytes_get_u32(in);
    o->repeat_last = bytes_get_u32(in);
    o->seed = bytes_get_u64(in);
    o->n_logprobs = (int32_t)bytes_get_u32(in);
    o->prompt_logprobs = bytes_get_u32(in) != 0;
    o->ignore_end = bytes_get_u32(in) != 0;
    if (!get_stops(in, o))
        return false;
    q->lead = bytes_get_u32(in);
    q->n = bytes_get_u32(in);
    const void *ids = bytes_take(in, q->n * sizeof *q->ids);
    if (in->failed || in->n != 0 || q->lead > 1 || q->n < q->lead || q->prompt > PROMPT_IDS ||
        q->chat_after > CHAT_ENDED || generate_options_check(o, NULL) < 0)
        return false;
    if ((q->ids = malloc((q->n + 1) * sizeof *q->ids)) == NULL)
        return false;
    memcpy(q->ids, ids, q->n * sizeof *q->ids);
    return true;
}

static bool ids_known(const struct story *st, const int32_t *ids, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (ids[i] < 0 || (uint32_t)ids[i] >= tok_n_vocab(st->m->tok))
            return false;
    return true;
}

void story_request_free(struct request **pq)
{
    struct request *q = *pq;
    if (q == NULL)
        return;
    deliver_close(&q->out);
    free(q->ids);
    free(q);
    *pq = NULL;
}

static int on_request(struct story *st, struct bytes_in *in, const struct journal_record *r,
                      struct err *e)
{
    struct sess_state *end = st->r->end;
    uint32_t frozen = 0;
    if (st->q != NULL)
        return broken(e, r, "a request begins before the last one has ended");
    struct request *q = calloc(1, sizeof *q);
    if (q == NULL)
        return err_nomem(e, sizeof *q);
    st->q = q;
    q->kind = REQUEST_GENERATE;
    q->end_id = -1;
    if (!get_request(in, q, &frozen) || !ids_known(st, q->ids, q->n) ||
        q->lead != end->has_pending || (q->lead == 1 && q->ids[0] != end->pending) ||
        q->frozen_was_auto != end->frozen_auto)
        return broken(e, r, "the request does not follow from what was before");
    if (end->frozen_auto) {
        end->params.frozen = end->ask.frozen = frozen;
        end->frozen_auto = false;
        struct bytes_out o = {0};
        evict_request_put(&end->ask, &o);
        evict_params_put(&end->params, &o);
        bool ok = evict_check(&end->params, NULL) == BC_OK && !o.failed &&
                  blob_add(st, REPLAY_PARAMS, o.at, o.n);
        free(o.at);
        if (!ok)
            return broken(e, r, "its frozen tokens cannot be");
    }
    q->chat_before = end->chat;
    q->stream_start = end->stream;
    st->r->prune_owed = false;
    st->attempts_here = 0;
    /* what was told of the last request is told no more */
    list_free(&st->reports, &st->reports_tail);
    st->seq_first = st->seq;
    return deliver_open(&q->out, st->m->tok, &q->opt, q->prompt == PROMPT_CHAT, e);
}

/* A sampled token, as deliver_token has it. */
static void sampled(struct story *st, int32_t id)
{
    struct sess_state *end = st->r->end;
    struct request *q = st->q;
    const char *text;
    size_t len;
    end->pending = id;
    end->has_pending = true;
    if (!q->opt.ignore_end && tok_is_end(st->m->tok, id)) {
        q->end_id = id;
        return;
    }
    q->tokens_out++;
    end->tokens_out++;
    q->stop_string = deliver_push(&q->out, id, &text, &len);
    item_add(st, report_of_tokens(end->stream, &id, 1, text, len));
}

/* The cache was renumbered before these rows, if they would have left the trained context: positions.c does it where the tokens and
 * evictions so far say, so no record does. True: they leave it even so. */
static bool renumbered(struct story *st, uint32_t n)
{
    struct sess_state *end = st->r->end;
    uint32_t context = st->m->info.context_train;
    if (!end->rerotate)
        return false;
    if (end->stream - end->position_zero >= context) {
        struct report *p = report_new(REP_REROTATED, 0);
        item_add(st, p);
        p->u.rerotated.stream = end->stream;
        p->u.rerotated.tokens = st->cached;
        p->u.rerotated.position = context;
        end->position_zero = end->stream - st->cached;
    }
    return end->stream - end->position_zero + n > context;
}

static int on_step(struct story *st, struct bytes_in *in, const struct journal_record *r,
                   struct err *e)
{
    struct sess_state *end = st->r->end;
    struct request *q = st->q;
    uint32_t n = bytes_get_u32(in);
    int32_t id = (int32_t)bytes_get_u32(in);
    if (in->failed || q == NULL || n == 0 || (id >= 0 && !ids_known(st, &id, 1)))
        return broken(e, r, "rows of no request");
    bool decode = q->done == q->n;
    uint64_t *spent_us = decode ? &q->decode_spent_us : &q->prefill_spent_us;
    if (in->n >= sizeof *spent_us) /* journals of earlier daemons do not tell */
        *spent_us = bytes_get_u64(in);
    if (decode ? (n != 1 || !end->has_pending) : n > q->n - q->done)
        return broken(e, r, "more rows than the request has");
    if (renumbered(st, n))
        return broken(e, r, "rows beyond the trained context");
    if (!ids_add(st, decode ? &end->pending : q->ids + q->done, n))
        return err_nomem(e, n);
    end->stream += n;
    st->cached += n;
    if (decode || q->done == 0)
        end->has_pending = false;
    if (!decode) {
        uint32_t of_prompt = q->done == 0 ? n - q->lead : n;
        end->tokens_in += of_prompt;
        q->adopted += id == DURABLE_ADOPTED ? of_prompt : 0;
        q->done += n;
        st->r->prune_owed = q->done == q->n && q->n > q->lead &&
                            end->params.trigger == EVICT_ON_PREFILL_END &&
                            st->cached > end->params.keep;
        item_add(st, report_of_progress(q));
    }
    st->attempts_here = 0;
    if (id >= 0)
        sampled(st, id);
    return BC_OK;
}

static int on_evict(struct story *st, struct bytes_in *in, const struct journal_record *r,
                    struct err *e)
{
    struct sess_state *end = st->r->end;
    const void *bytes = in->at;
    size_t n = in->n;
    uint32_t reason = bytes_get_u32(in), before = bytes_get_u32(in), after = bytes_get_u32(in);
    uint64_t live_before = bytes_get_u64(in), live_after = bytes_get_u64(in);
    uint64_t held_before = bytes_get_u64(in), held_after = bytes_get_u64(in);
    uint64_t micros = bytes_get_u64(in);
    uint32_t n_ranges = bytes_get_u32(in);
    const void *ranges = bytes_take(in, n_ranges * sizeof(struct evict_range));
    if (in->failed || before != st->cached || after > before || n_ranges > before - after ||
        reason > PRUNE_PRESSURE)
        return broken(e, r, "an eviction that cannot be");
    if (!blob_add(st, REPLAY_EVICT, bytes, n))
        return err_nomem(e, n);
    struct report *p = report_new(REP_PRUNED, n_ranges * sizeof(struct evict_range));
    item_add(st, p);
    p->u.pruned.tokens_before = before;
    p->u.pruned.tokens_after = after;
    p->u.pruned.reason = reason;
    p->u.pruned.live_before = live_before;
    p->u.pruned.live_after = live_after;
    p->u.pruned.held_before = held_before;
    p->u.pruned.held_after = held_after;
    p->u.pruned.micros = micros;
    snprintf(p->u.pruned.policy, sizeof p->u.pruned.policy, "%s", end->params.policy->name);
    p->u.pruned.n_ranges = n_ranges;
    p->u.pruned.ranges = (struct evict_range *)(p + 1);
    if (n_ranges > 0)
        memcpy(p->u.pruned.ranges, ranges, n_ranges * sizeof(struct evict_range));
    end->prunes++;
    end->dropped += before - after;
    end->dropped_why |= 1u << reason;
    end->prune_micros += micros;
    st->cached = after;
    if (reason == PRUNE_PREFILL_END)
        st->r->prune_owed = false;
    return BC_OK;
}

static void get_end(struct bytes_in *in, struct report *p)
{
    p->u.end.reason = bytes_get_u32(in);
    p->u.end.code = bytes_get_u32(in);
    p->u.end.tokens_in = bytes_get_u32(in);
    p->u.end.tokens_out = bytes_get_u32(in);
    p->u.end.tokens_cached = bytes_get_u32(in);
    p->u.end.prunes = bytes_get_u32(in);
    p->u.end.tokens_dropped = bytes_get_u64(in);
    p->u.end.prefill_us = bytes_get_u64(in);
    p->u.end.decode_us = bytes_get_u64(in);
    p->u.end.end_id = bytes_get_u32(in);
    bytes_get_text(in, p->u.end.text, sizeof p->u.end.text);
}

static int on_end(struct story *st, struct bytes_in *in, const struct journal_record *r,
                  struct err *e)
{
    struct sess_state *end = st->r->end;
    struct request *q = st->q;
    uint64_t *counts[7] = {&end->tokens_in,     &end->tokens_out,   &end->prunes,
                           &end->dropped,       &end->prune_micros, &end->prunes_at_end,
                           &end->dropped_at_end};
    if (q != NULL && !q->stop_string) {
        const char *text;
        size_t len;
        deliver_flush(&q->out, &text, &len);
        if (len > 0)
            item_add(st, report_of_tokens(end->stream + end->has_pending, NULL, 0, text, len));
    }
    struct report *p = report_new(REP_END, 0);
    item_add(st, p);
    get_end(in, p);
    p->u.end.dropped_why = end->dropped_why;
    end->dropped_why = 0;
    uint32_t chat = bytes_get_u32(in);
    end->frozen_auto = bytes_get_u32(in) != 0;
    uint32_t frozen = bytes_get_u32(in);
    for (size_t i = 0; i < ARRAY_LEN(counts); i++)
        *counts[i] = bytes_get_u64(in);
    p->u.end.tokens_adopted = bytes_get_u32(in);
    p->u.end.budget = end->params.budget;
    if (in->failed || chat > CHAT_ENDED || end->frozen_auto != (frozen == EVICT_FROZEN_AUTO))
        return broken(e, r, "an end that cannot be");
    end->chat = (enum chat_state)chat;
    if (frozen != end->params.frozen) {
        end->params.frozen = end->ask.frozen = frozen;
        struct bytes_out o = {0};
        evict_request_put(&end->ask, &o);
        evict_params_put(&end->params, &o);
        bool ok = !o.failed && blob_add(st, REPLAY_PARAMS, o.at, o.n);
        free(o.at);
        if (!ok)
            return err_nomem(e, o.n);
    }
    story_request_free(&st->q);
    return BC_OK;
}

static int on_params(struct story *st, struct bytes_in *in, const struct journal_record *r,
                     struct err *e)
{
    struct sess_state *end = st->r->end;
    const void *bytes = in->at;
    size_t n = in->n;
    int rc = evict_request_get(in, &end->ask, e);
    if (rc < 0 || (rc = evict_params_get(in, &end->params, e)) < 0)
        return rc;
    if (strcmp(end->params.policy->name, st->begin->params.policy->name) != 0)
        return broken(e, r, "a policy is a session's for life");
    return blob_add(st, REPLAY_PARAMS, bytes, n) ? BC_OK : err_nomem(e, n);
}

static int on_record(void *arg, const struct journal_record *r, struct err *e)
{
    struct story *st = arg;
    struct bytes_in in = {.at = r->payload, .n = r->n};
    uint64_t seq = bytes_get_u64(&in);
    int rc = BC_OK;
    if (in.failed || (r->seq == 1) != (r->type == DURABLE_CREATE))
        return broken(e, r, "it does not stand where it should");
    st->records = r->seq;
    if (r->type == DURABLE_CREATE)
        rc = on_create(st, &in, r, e);
    else if (r->type == DURABLE_REQUEST)
        rc = on_request(st, &in, r, e);
    else if (r->type == DURABLE_STEP)
        rc = on_step(st, &in, r, e);
    else if (r->type == DURABLE_EVICT)
        rc = on_evict(st, &in, r, e);
    else if (r->type == DURABLE_END)
        rc = on_end(st, &in, r, e);
    else if (r->type == DURABLE_PARAMS)
        rc = on_params(st, &in, r, e);
    else if (r->type == DURABLE_SNAPSHOT && bytes_get_u64(&in) == st->snapshot_mark &&
             st->snapshot_mark != 0) {
        st->from_snapshot = true;
        ops_clear(st);
    } else if (r->type == DURABLE_ATTEMPT) {
        st->attempts++;
        st->attempts_here++;
    } else if (r->type == DURABLE_READY) {
        st->attempts = 0;
    } else if (r->type == DURABLE_CLEAN) { /* whatever ended that daemon, it was not this session */
        st->attempts -= st->attempts > 0;
        st->attempts_here -= st->attempts_here > 0;
    } else if (r->type > DURABLE_CLEAN) {
        return broken(e, r, "a type that this daemon does not know");
    }
    if (rc == BC_OK && seq != 0)
        item_close(st, seq);
    return rc;
}

/* The first record alone: whose session, which model. */
static int on_first(void *arg, const struct journal_record *r, struct err *e)
{
    struct story *st = arg;
    struct bytes_in in = {.at = r->payload, .n = r->n};
    bytes_get_u64(&in);
    if (r->type != DURABLE_CREATE)
        return broken(e, r, "it does not begin with the session");
    int rc = on_create(st, &in, r, e);
    st->records = 1;
    return rc < 0 ? rc : BC_ESTATE; /* enough */
}

/* ---- life ---- */

void replay_free(struct replay **pr)
{
    struct replay *r = *pr;
    if (r == NULL)
        return;
    free(r->ops);
    free(r->ids);
    free(r->blob.at);
    free(r->end);
    story_request_free(&r->resume);
    free(r);
    *pr = NULL;
}

int story_open(struct story *st, struct engine *en, struct err *e)
{
    *st = (struct story){.en = en};
    st->begin = calloc(1, sizeof *st->begin);
    st->r = calloc(1, sizeof *st->r);
    if (st->r != NULL)
        st->r->end = calloc(1, sizeof *st->r->end);
    st->reports_tail = &st->reports;
    st->item_tail = &st->item;
    if (st->begin != NULL && st->r != NULL && st->r->end != NULL)
        return BC_OK;
    story_close(st);
    return err_nomem(e, sizeof *st->begin * 2);
}

void story_close(struct story *st)
{
    story_request_free(&st->q);
    list_free(&st->reports, &st->reports_tail);
    list_free(&st->item, &st->item_tail);
    replay_free(&st->r);
    free(st->begin);
    st->begin = NULL;
}

int story_whose(struct story *st, const char *path, struct err *e)
{
    struct journal_scan scan;
    int rc = journal_read(st->en->opt.io, path, &scan, on_first, st, e);
    if (rc == BC_ESTATE && st->records == 1)
        return BC_OK;
    if (rc == BC_OK)
        rc = err_set(e, BC_ECORRUPT, "journal", "%s",
                     scan.state == JOURNAL_BROKEN ? scan.why : "it has no beginning");
    return rc;
}

int story_read(struct story *st, const char *path, struct journal_scan *ret, struct err *e)
{
    int rc = journal_read(st->en->opt.io, path, ret, on_record, st, e);
    if (rc == BC_OK && ret->state == JOURNAL_BROKEN)
        rc = err_set(e, BC_ECORRUPT, "journal", "%s", ret->why);
    if (rc == BC_OK && st->records == 0)
        rc = err_set(e, BC_ECORRUPT, "journal", "it has no beginning");
    if (rc < 0)
        return rc;
    uint64_t have = st->seq; /* frames whose item is not whole: nobody has seen what came of them */
    for (const struct report *r = st->item; r != NULL; r = r->next)
        have += report_records(r);
    item_close(st, have);
    st->r->resume = st->q;
    st->q = NULL;
    return BC_OK;
}
