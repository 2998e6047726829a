/* outflow.c: the engine's reports become records of a session's ring, in order.
 *
 *   queue of reports --one or more records each--> ring (seq + 1 each) --> kept stream, if named
 *
 * A report longer than a record is cut: TOKENS between characters, PRUNED and SCORES between rows
 * (RECORD_FLAG_MORE: another follows). When the ring is full the rest waits, and nothing later
 * overtakes it. After every turn the session's port says how much room is left: that is all that
 * the engine's scheduler knows about the client.
 *
 * Bells ring when all sessions of a turn have published. A client with eight of them wakes up once and finds the
 * tokens of all, where a bell after each would wake it (and put a thread off its core) eight times a step. */
#include "clock.h"
#include "log.h"
#include "pieces.h"
#include "stream.h"
#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(struct report_top) == 8, "goes into LOGPROBS as it is");
_Static_assert(sizeof(struct report_score) == sizeof(struct record_score), "and into SCORES");
_Static_assert(sizeof(struct evict_range) == 16, "and into PRUNED");

#define ROOM_DETACHED (1u << 30) /* nobody can be slow: records are only kept */

struct turn {
    unsigned records;
    size_t bytes;
};

static uint32_t payload_max(const struct stream *st)
{
    return piece_payload_max(st->backlog.bytes != NULL, st->ring_size);
}

/* 1: the record is in the ring (or kept); 0: no room; < 0: the client lies. */
static int emit(struct stream *st, struct turn *t, enum record_type type, uint16_t flags,
                const struct ring_part *parts, unsigned n_parts)
{
    struct record_head h = {.type = (uint16_t)type, .flags = flags, .seq = st->seq + 1};
    for (unsigned i = 0; i < n_parts; i++)
        h.len += (uint32_t)parts[i].len;
    if (st->shm.d2c != NULL) {
        st->w.seq = st->seq;
        int rc = ring_writer_put(&st->w, type, flags, parts, n_parts);
        if (rc <= 0)
            return rc;
    }
    st->seq++;
    if (st->backlog.bytes != NULL)
        backlog_add(&st->backlog, &h, parts, n_parts);
    t->records++;
    t->bytes += sizeof h + h.len;
    return 1;
}

/* part: ids that have gone; part_more: bytes of text that have. */
static int emit_tokens(struct stream *st, struct turn *t, const struct report *r)
{
    uint32_t max = payload_max(st) - (uint32_t)sizeof(struct record_tokens);
    do {
        uint32_t n = BC_MIN(r->u.tokens.n_ids - st->part, max / 4);
        bool all_ids = st->part + n == r->u.tokens.n_ids;
        const char *text = r->u.tokens.text + st->part_more;
        uint32_t left = r->u.tokens.text_len - st->part_more;
        uint32_t len = all_ids ? piece_text(text, left, max - n * 4) : 0;
        struct record_tokens rec = {.first_stream = r->u.tokens.first_stream + st->part,
                                    .n_ids = n,
                                    .text_len = len};
        struct ring_part parts[3] = {{&rec, sizeof rec},
                                     {r->u.tokens.ids + st->part, n * 4},
                                     {text, len}};
        int rc = emit(st, t, RECORD_TOKENS, 0, parts, 3);
        if (rc <= 0)
            return rc;
        st->part += n;
        st->part_more += len;
    } while (st->part < r->u.tokens.n_ids || st->part_more < r->u.tokens.text_len);
    return 1;
}

static int emit_logprob(struct stream *st, struct turn *t, const struct report *r)
{
    struct record_logprob rec = {.stream = r->u.logprob.stream,
                                 .id = r->u.logprob.id,
                                 .logprob = r->u.logprob.logprob,
                                 .n_top = r->u.logprob.n_top,
                                 .prompt = r->u.logprob.prompt};
    struct ring_part parts[2] = {{&rec, sizeof rec},
                                 {r->u.logprob.top, rec.n_top * sizeof r->u.logprob.top[0]}};
    return emit(st, t, RECORD_LOGPROBS, 0, parts, 2);
}

static int emit_progress(struct stream *st, struct turn *t, const struct report *r)
{
    struct record_progress rec = {r->u.progress.done, r->u.progress.total};
    struct ring_part part = {&rec, sizeof rec};
    return emit(st, t, RECORD_PROGRESS, 0, &part, 1);
}

/* part: ranges that have gone. */
static int emit_pruned(struct stream *st, struct turn *t, const struct report *r)
{
    uint32_t max = (payload_max(st) - (uint32_t)sizeof(struct record_pruned)) / 16;
    do {
        uint32_t left = r->u.pruned.n_ranges - st->part, n = BC_MIN(left, max);
        struct record_pruned rec = {.tokens_before = r->u.pruned.tokens_before,
                                    .tokens_after = r->u.pruned.tokens_after,
                                    .live_before = r->u.pruned.live_before,
                                    .live_after = r->u.pruned.live_after,
                                    .held_before = r->u.pruned.held_before,
                                    .held_after = r->u.pruned.held_after,
                                    .micros = r->u.pruned.micros,
                                    .reason = r->u.pruned.reason,
                                    .n_ranges = n};
        memcpy(rec.policy, r->u.pruned.policy, sizeof rec.policy);
        struct ring_part parts[2] = {{&rec, sizeof rec}, {r->u.pruned.ranges + st->part, n * 16}};
        int rc = emit(st, t, RECORD_PRUNED, n < left ? RECORD_FLAG_MORE : 0, parts, 2);
        if (rc <= 0)
            return rc;
        st->part += n;
    } while (st->part < r->u.pruned.n_ranges);
    return 1;
}

static int emit_rerotated(struct stream *st, struct turn *t, const struct report *r)
{
    struct record_rerotated rec = {.stream = r->u.rerotated.stream,
                                   .tokens = r->u.rerotated.tokens,
                                   .position = r->u.rerotated.position,
                                   .micros = r->u.rerotated.micros};
    struct ring_part part = {&rec, sizeof rec};
    return emit(st, t, RECORD_REROTATED, 0, &part, 1);
}

/* part: rows of this report that have gone. The last row of all ends the series. */
static int emit_scores(struct stream *st, struct turn *t, const struct report *r)
{
    uint32_t max = (payload_max(st) - (uint32_t)sizeof(struct record_scores)) /
                   (uint32_t)sizeof(struct record_score);
    do {
        uint32_t n = BC_MIN(r->u.scores.n - st->part, max);
        struct record_scores rec = {.offset = r->u.scores.offset + st->part,
                                    .total = r->u.scores.total,
                                    .n_rows = n};
        bool more = rec.offset + n < rec.total;
        struct ring_part parts[2] = {{&rec, sizeof rec},
                                     {r->u.scores.rows + st->part, n * sizeof *r->u.scores.rows}};
        int rc = emit(st, t, RECORD_SCORES, more ? RECORD_FLAG_MORE : 0, parts, 2);
        if (rc <= 0)
            return rc;
        st->part += n;
    } while (st->part < r->u.scores.n);
    return 1;
}

static int emit_end(struct stream *st, struct turn *t, const struct report *r)
{
    struct record_end rec = {.reason = r->u.end.reason,
                             .code = r->u.end.code,
                             .tokens_in = r->u.end.tokens_in,
                             .tokens_out = r->u.end.tokens_out,
                             .tokens_cached = r->u.end.tokens_cached,
                             .prunes = r->u.end.prunes,
                             .tokens_dropped = r->u.end.tokens_dropped,
                             .prefill_micros = r->u.end.prefill_us,
                             .decode_micros = r->u.end.decode_us,
                             .end_id = r->u.end.end_id,
                             .tokens_adopted = r->u.end.tokens_adopted,
                             .budget_tokens = r->u.end.budget,
                             .text_len = (uint32_t)strlen(r->u.end.text)};
    struct ring_part parts[2] = {{&rec, sizeof rec}, {r->u.end.text, rec.text_len}};
    uint16_t why = (uint16_t)(r->u.end.dropped_why << RECORD_FLAG_WHY_SHIFT);
    return emit(st, t, RECORD_END, why, parts, 2);
}

/* Numbers of records that no daemon can make any more: a LOST record for each. */
static int emit_lost(struct stream *st, struct turn *t, const struct report *r)
{
    for (; st->part < r->u.lost.count; st->part++) {
        struct record_lost rec = {st->seq + 1, 1};
        struct ring_part part = {&rec, sizeof rec};
        int rc = emit(st, t, RECORD_LOST, 0, &part, 1);
        if (rc <= 0)
            return rc;
    }
    return 1;
}

static int emit_report(struct stream *st, struct turn *t, const struct report *r)
{
    switch (r->type) {
    case REP_TOKENS:
        return emit_tokens(st, t, r);
    case REP_LOGPROB:
        return emit_logprob(st, t, r);
    case REP_PROGRESS:
        return emit_progress(st, t, r);
    case REP_PRUNED:
        return emit_pruned(st, t, r);
    case REP_SCORES:
        return emit_scores(st, t, r);
    case REP_REROTATED:
        return emit_rerotated(st, t, r);
    case REP_LOST:
        return emit_lost(st, t, r);
    default:
        bc_assert(r->type == REP_END);
        return emit_end(st, t, r);
    }
}

/* ---- the queue */

void outflow_report(struct stream *st, struct report **pr)
{
    struct report *r = *pr;
    *pr = NULL;
    struct server *s = st->server;
    if (r->type == REP_END) {
        stream_not_busy(st);
        if (r->u.end.code == (uint32_t)-BC_EDEVICE)
            server_fatal(s, r->u.end.text);
        server_count(s, st->account, STAT_requests_done, 1);
        server_count(s, st->account, STAT_tokens_in, r->u.end.tokens_in);
        server_count(s, st->account, STAT_tokens_out, r->u.end.tokens_out);
    } else if (r->type == REP_PRUNED) {
        server_count(s, st->account, STAT_prunes, 1);
        server_count(s, st->account, STAT_prune_micros, r->u.pruned.micros);
        server_count(s, st->account, STAT_tokens_dropped,
                     r->u.pruned.tokens_before - r->u.pruned.tokens_after);
    }
    r->next = NULL;
    ledger_charge(st->account->owner, LEDGER_reports, r->bytes);
    *st->out_tail = r;
    st->out_tail = &r->next;
    st->out_due = true;
    server_run(s, st);
}

static void out_pop(struct stream *st)
{
    struct report *r = st->out;
    if ((st->out = r->next) == NULL)
        st->out_tail = &st->out;
    st->part = st->part_more = 0;
    ledger_credit(st->account->owner, LEDGER_reports, r->bytes);
    report_free(&r);
    atomic_fetch_sub(&st->port->queued, 1);
}

void outflow_clear(struct stream *st)
{
    while (st->out != NULL)
        out_pop(st);
}

/* ---- the kept stream, after an attach: LOST for what is no longer there, then the rest */

static int replay(struct stream *st, struct turn *t)
{
    struct backlog *b = &st->backlog;
    uint64_t first = b->n > 0 ? b->first_seq : st->seq + 1;
    if (st->replay_seq < first) {
        struct record_lost lost = {st->replay_seq, first - st->replay_seq};
        struct ring_part part = {&lost, sizeof lost};
        st->w.seq = first - 2; /* it stands for all of them: seq of the last one */
        int rc = ring_writer_put(&st->w, RECORD_LOST, 0, &part, 1);
        if (rc <= 0)
            return rc;
        t->records++;
        st->replay_seq = first;
    }
    while (st->replay_seq <= st->seq && t->records < STREAM_TURN_RECORDS) {
        struct record_head h;
        void *payload = st->server->record;
        bool kept = backlog_get(b, st->replay_seq, &h, payload, RECORD_COPY_BYTES);
        bc_assert(kept);
        struct ring_part part = {payload, h.len};
        st->w.seq = h.seq - 1;
        int rc = ring_writer_put(&st->w, (enum record_type)h.type, h.flags, &part, 1);
        if (rc <= 0)
            return rc;
        t->records++;
        t->bytes += sizeof h + h.len;
        st->replay_seq++;
    }
    if (st->replay_seq > st->seq)
        st->replaying = false;
    return 1;
}

/* ---- a turn */

/* As much as the turn allows. 1: nothing left, or the turn is over; 0: no room; < 0: a lie. */
static int push_out(struct stream *st, struct turn *t)
{
    while (t->records < STREAM_TURN_RECORDS && t->bytes < STREAM_TURN_BYTES) {
        int rc;
        if (st->replaying)
            rc = replay(st, t);
        else if (st->out == NULL)
            return 1;
        else if ((rc = emit_report(st, t, st->out)) == 1)
            out_pop(st);
        if (rc <= 0)
            return rc;
    }
    return 1;
}

static void room_tell(struct stream *st, uint32_t room)
{
    struct session_port *port = st->port;
    atomic_store(&port->room, room);
    bool was = st->parked;
    st->parked = room < PORT_ROOM_MIN || atomic_load(&port->queued) >= SESSION_REPORTS_MAX;
    if (was && !st->parked)
        st->room_due = true;
    if (!st->room_due || st->parked)
        return;
    struct command *cmd = command_new(CMD_ROOM, 0, 0);
    struct err e;
    if (cmd == NULL)
        return;
    cmd->session = st->node.id;
    if (engine_post(st->server->en, &cmd, &e) == BC_OK)
        st->room_due = false; /* else the sweep tries again */
    else
        command_free(&cmd);
}

static void note_progress(struct stream *st)
{
    if (st->w.head != st->last_head || !(st->blocked || st->parked)) {
        st->last_head = st->w.head;
        st->progress_us = clock_us();
        st->stall_told = st->stall_told && st->busy;
    }
}

/* ---- bells */

static void bell_later(struct stream *st)
{
    if (st->bell_due)
        return;
    st->bell_due = true;
    st->bell_next = st->server->bell_first;
    st->server->bell_first = st;
}

void outflow_bell_forget(struct stream *st)
{
    if (!st->bell_due)
        return;
    struct stream **at = &st->server->bell_first;
    while (*at != st)
        at = &(*at)->bell_next;
    *at = st->bell_next;
    st->bell_due = false;
    shm_ring_bell(&st->shm); /* what was published stays readable */
}

/* Who was woken by another's bell and has taken everything meanwhile does not sleep on this one: it says so anew
 * (ring.h, sleep) before it does. */
void outflow_bells(struct server *s)
{
    while (s->bell_first != NULL) {
        struct stream *st = s->bell_first;
        s->bell_first = st->bell_next;
        st->bell_due = false;
        if (atomic_load(&st->shm.c2d->head) != st->w.published)
            shm_ring_bell(&st->shm);
    }
}

void outflow_keep(struct stream *st)
{
    bc_assert(st->shm.d2c == NULL);
    while (outflow_run(st)) /* at most what one request made: a copy of 256 KiB and its reports */
        ;
}

bool outflow_run(struct stream *st)
{
    struct turn t = {0};
    if (st->node.id == 0)
        return false;
    if (st->shm.d2c == NULL) { /* detached: everything is kept at once */
        int rc = push_out(st, &t);
        bc_assert(rc == 1);
        room_tell(st, ROOM_DETACHED);
        return st->out != NULL;
    }
    uint64_t room = 0;
    int rc = push_out(st, &t);
    uint64_t seen = st->w.head; /* what "no room" was said of */
    if (ring_writer_publish(&st->w))
        bell_later(st);
    st->blocked = rc == 0;
    if (rc >= 0)
        rc = ring_writer_room(&st->w, &room);
    bool again = false;
    if (rc >= 0 && (st->blocked || room < PORT_ROOM_MIN)) {
        rc = ring_writer_wait(&st->w, 0);
        again = rc >= 0 && st->w.head != seen; /* room came meanwhile: look again, no bell will */
        if (rc >= 0)
            rc = ring_writer_room(&st->w, &room);
    }
    if (rc < 0) {
        stream_violation(st, "the client's ring cursor lies");
        return false;
    }
    note_progress(st);
    room_tell(st, st->blocked || st->replaying ? 0 : (uint32_t)room);
    return again || (!st->blocked && (st->out != NULL || st->replaying));
}
