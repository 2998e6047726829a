/* stream.c: the records of the rings become events.
 *
 *   ring -> c->record (a private copy) -> checked -> struct backcast_event that points into the copy
 *
 * Every count is checked against the payload's length before it is used; a record that lies, or
 * whose sequence number is not the next one, ends its session. Sessions take turns. PRUNED records
 * that are split are gathered into one event.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>
#include "lib.h"

_Static_assert(sizeof(struct backcast_score) == sizeof(struct record_score) &&
                   offsetof(struct backcast_score, flags) == offsetof(struct record_score, flags),
               "score rows are handed out in place");
_Static_assert(sizeof(struct backcast_range) == 16 && sizeof(struct backcast_top) == 8,
               "ranges and alternatives are handed out in place");
_Static_assert(sizeof(struct record_pruned) % 8 == 0 && sizeof(struct record_scores) % 8 == 0 &&
                   sizeof(struct record_tokens) % 4 == 0 && sizeof(struct record_logprob) % 4 == 0,
               "what follows a fixed part is aligned");

void stream_kick(backcast *c)
{
    uint64_t one = 1;
    if (c->kick >= 0 && write(c->kick, &one, sizeof(one)) < 0)
        return; /* it is readable already */
}

static void kick_clear(backcast *c)
{
    uint64_t n;
    if (read(c->kick, &n, sizeof(n)) < 0)
        return; /* it was clear */
}

static int lie(backcast_session *s, const char *what)
{
    char text[120];

    snprintf(text, sizeof(text), "the daemon sent %s", what);
    session_kill(s, BACKCAST_EPROTOCOL, text);
    return fail(&s->c->fail, BACKCAST_EPROTOCOL, "session", "session %llu: %s",
                (unsigned long long)s->id, text);
}

/* ---- taking and keeping */

/* Sequence numbers go up by one; LOST says how many are missing. */
static int seq_check(backcast_session *s, const struct record_head *h)
{
    struct record_lost lost;

    if (h->type == RECORD_LOST) {
        if (h->len != sizeof(lost))
            return lie(s, "a LOST record of the wrong length");
        memcpy(&lost, s->c->record, sizeof(lost));
        if (lost.first_seq != s->last_seq + 1 || lost.count == 0 ||
            lost.count > UINT64_MAX - lost.first_seq)
            return lie(s, "a LOST record with an impossible count");
        s->last_seq = lost.first_seq + lost.count - 1;
        return 1;
    }
    if (h->seq != s->last_seq + 1)
        return lie(s, "a record out of order");
    s->last_seq = h->seq;
    return 1;
}

int stream_take(backcast_session *s, struct record_head *ret)
{
    if (s->d2c == NULL)
        return 0;
    int rc = ring_reader_take(&s->in, ret, s->c->record, RING_PAYLOAD_MAX(s->ring_size));
    if (rc < 0)
        return lie(s, "a broken ring cursor or record header");
    if (rc == 0) {
        if (atomic_load(&s->d2c->state) != RING_CLOSED || ring_reader_ready(&s->in) != 0)
            return 0;
        int error = (int)atomic_load(&s->d2c->error);
        session_kill(s, error > 0 && error < 1000 ? -error : BACKCAST_ECLOSED,
                     "the daemon closed it");
        return 0;
    }
    if (ring_reader_release(&s->in))
        session_ring_bell(s);
    return seq_check(s, ret);
}

/* What was kept, before what is in the ring. */
static int pending_take(backcast_session *s, struct record_head *ret)
{
    struct pending *p = s->pending;

    if (p == NULL)
        return stream_take(s, ret);
    s->pending = p->next;
    if (s->pending == NULL)
        s->pending_tail = &s->pending;
    s->pending_bytes -= p->head.len;
    *ret = p->head;
    memcpy(s->c->record, p->payload, p->head.len); /* it came from there: it fits */
    free(p);
    return 1;
}

int stream_keep(backcast_session *s, const struct record_head *head)
{
    if (s->pending_bytes + head->len > PENDING_BYTES_MAX)
        return fail(&s->c->fail, BACKCAST_EBUSY, "session",
                    "too many events wait: read them with backcast_next first");
    struct pending *p = malloc(sizeof(*p) + head->len);
    if (p == NULL)
        return fail(&s->c->fail, BACKCAST_ENOMEM, "", "out of memory");
    p->next = NULL;
    p->head = *head;
    memcpy(p->payload, s->c->record, head->len);
    *s->pending_tail = p;
    s->pending_tail = &p->next;
    s->pending_bytes += head->len;
    stream_kick(s->c);
    return 0;
}

void stream_drop_pending(backcast_session *s)
{
    while (s->pending != NULL) {
        struct pending *p = s->pending;
        s->pending = p->next;
        free(p);
    }
    s->pending_tail = &s->pending;
    s->pending_bytes = 0;
}

/* ---- records to events, one function a type: 1 event, 0 none, < 0 a lie */

static int tokens_event(backcast_session *s, uint32_t len, struct backcast_event *ev)
{
    const unsigned char *p = s->c->record;
    struct record_tokens t;

    if (len < sizeof(t))
        return lie(s, "a TOKENS record that is too short");
    memcpy(&t, p, sizeof(t));
    if (t.n_ids > (len - sizeof(t)) / sizeof(int32_t) ||
        t.text_len != len - sizeof(t) - (size_t)t.n_ids * sizeof(int32_t))
        return lie(s, "a TOKENS record whose counts do not fit");
    ev->type = BACKCAST_TEXT;
    ev->text.ids = (const int32_t *)(p + sizeof(t));
    ev->text.n_ids = t.n_ids;
    ev->text.text = (const char *)(p + sizeof(t) + (size_t)t.n_ids * sizeof(int32_t));
    ev->text.len = t.text_len;
    ev->text.first_stream = t.first_stream;
    return 1;
}

static int logprob_event(backcast_session *s, uint32_t len, struct backcast_event *ev)
{
    struct record_logprob l;

    if (len < sizeof(l))
        return lie(s, "a LOGPROBS record that is too short");
    memcpy(&l, s->c->record, sizeof(l));
    if (l.n_top != (len - sizeof(l)) / sizeof(struct backcast_top) ||
        (len - sizeof(l)) % sizeof(struct backcast_top) != 0)
        return lie(s, "a LOGPROBS record whose count does not fit");
    ev->type = BACKCAST_LOGPROB;
    ev->logprob.stream = l.stream;
    ev->logprob.id = l.id;
    ev->logprob.logprob = l.logprob;
    ev->logprob.prompt = l.prompt != 0;
    ev->logprob.top = (const struct backcast_top *)(s->c->record + sizeof(l));
    ev->logprob.n_top = l.n_top;
    return 1;
}

static int progress_event(backcast_session *s, uint32_t len, struct backcast_event *ev)
{
    struct record_progress p;

    if (len != sizeof(p))
        return lie(s, "a PROGRESS record of the wrong length");
    memcpy(&p, s->c->record, sizeof(p));
    ev->type = BACKCAST_PROGRESS;
    ev->progress.done = p.done;
    ev->progress.total = p.total;
    return 1;
}

/* Appends the ranges of a split PRUNED record. */
static int ranges_gather(backcast_session *s, const struct backcast_range *r, size_t n)
{
    if (n > RANGES_MAX - s->n_ranges)
        return lie(s, "a PRUNED event of too many ranges");
    if (s->n_ranges + n > s->ranges_cap) {
        size_t cap = s->ranges_cap * 2 > s->n_ranges + n ? s->ranges_cap * 2 : s->n_ranges + n;
        struct backcast_range *more = realloc(s->ranges, cap * sizeof(*more));
        if (more == NULL)
            return fail(&s->c->fail, BACKCAST_ENOMEM, "", "out of memory");
        s->ranges = more;
        s->ranges_cap = cap;
    }
    if (n > 0)
        memcpy(s->ranges + s->n_ranges, r, n * sizeof(*r));
    s->n_ranges += n;
    return 0;
}

static const char *const prune_reasons[] = {"budget", "prefill_end", "asked", "shrunk", "pressure"};
#define N_PRUNE_REASONS (sizeof(prune_reasons) / sizeof(*prune_reasons))

static int pruned_event(backcast_session *s, const struct record_head *h, struct backcast_event *ev)
{
    backcast *c = s->c;
    struct record_pruned p;

    if (h->len < sizeof(p))
        return lie(s, "a PRUNED record that is too short");
    memcpy(&p, c->record, sizeof(p));
    if ((h->len - sizeof(p)) % sizeof(struct backcast_range) != 0 ||
        p.n_ranges != (h->len - sizeof(p)) / sizeof(struct backcast_range))
        return lie(s, "a PRUNED record whose count does not fit");
    const struct backcast_range *r = (const struct backcast_range *)(c->record + sizeof(p));
    bool whole = s->n_ranges == 0 && !(h->flags & RECORD_FLAG_MORE);
    if (!whole) {
        int rc = ranges_gather(s, r, p.n_ranges);
        if (rc < 0 || (h->flags & RECORD_FLAG_MORE))
            return rc;
    }
    memcpy(c->event_policy, p.policy, sizeof(p.policy));
    c->event_policy[sizeof(p.policy)] = '\0';
    ev->type = BACKCAST_PRUNED;
    ev->pruned.dropped = whole ? r : s->ranges;
    ev->pruned.n_dropped = whole ? p.n_ranges : s->n_ranges;
    ev->pruned.live_before = p.live_before;
    ev->pruned.live_after = p.live_after;
    ev->pruned.held_before = p.held_before;
    ev->pruned.held_after = p.held_after;
    ev->pruned.micros = p.micros;
    ev->pruned.tokens_before = p.tokens_before;
    ev->pruned.tokens_after = p.tokens_after;
    ev->pruned.policy = c->event_policy;
    ev->pruned.reason = p.reason < N_PRUNE_REASONS ? prune_reasons[p.reason] : "";
    s->n_ranges = 0; /* the array stays until the next split one */
    return 1;
}

static int scores_event(backcast_session *s, uint32_t len, struct backcast_event *ev)
{
    struct record_scores r;

    if (len < sizeof(r))
        return lie(s, "a SCORES record that is too short");
    memcpy(&r, s->c->record, sizeof(r));
    if ((len - sizeof(r)) % sizeof(struct record_score) != 0 ||
        r.n_rows != (len - sizeof(r)) / sizeof(struct record_score) || r.offset > r.total ||
        r.n_rows > r.total - r.offset)
        return lie(s, "a SCORES record whose counts do not fit");
    ev->type = BACKCAST_SCORES;
    ev->scores.rows = (const struct backcast_score *)(s->c->record + sizeof(r));
    ev->scores.n_rows = r.n_rows;
    ev->scores.offset = r.offset;
    ev->scores.total = r.total;
    return 1;
}

static int rerotated_event(backcast_session *s, uint32_t len, struct backcast_event *ev)
{
    struct record_rerotated r;

    if (len < sizeof(r))
        return lie(s, "a REROTATED record that is too short");
    memcpy(&r, s->c->record, sizeof(r));
    ev->type = BACKCAST_REROTATED;
    ev->rerotated.stream = r.stream;
    ev->rerotated.tokens = r.tokens;
    ev->rerotated.position = r.position;
    ev->rerotated.micros = r.micros;
    return 1;
}

/* Bits of a record's flags as words. */
static const char *why_text(backcast *c, uint16_t flags)
{
    size_t n = 0;

    c->event_why[0] = '\0';
    for (size_t i = 0; i < N_PRUNE_REASONS; i++)
        if (flags & 1u << (RECORD_FLAG_WHY_SHIFT + i))
            n += (size_t)snprintf(c->event_why + n, sizeof(c->event_why) - n, "%s%s",
                                  n > 0 ? ", " : "", prune_reasons[i]);
    return c->event_why;
}

static int end_event(backcast_session *s, const struct record_head *h, struct backcast_event *ev)
{
    uint32_t len = h->len;
    static const char *const reasons[] = {"stop",    "length", "cancelled", "stalled", "budget",
                                          "context", "error",  "scores",    "retry"};
    backcast *c = s->c;
    struct record_end e;

    if (len < sizeof(e))
        return lie(s, "an END record that is too short");
    memcpy(&e, c->record, sizeof(e));
    if (e.text_len != len - sizeof(e))
        return lie(s, "an END record whose text does not fit");
    ProtobufCBinaryData text = {e.text_len, c->record + sizeof(e)};
    bytes_copy(c->event_text, sizeof(c->event_text), &text);
    ev->type = BACKCAST_END;
    ev->end.reason = e.reason < sizeof(reasons) / sizeof(*reasons) ? reasons[e.reason] : "error";
    ev->end.text = c->event_text;
    ev->end.code = e.code > 0 && e.code < 1000 ? -(int)e.code : 0;
    ev->end.tokens_in = e.tokens_in;
    ev->end.tokens_out = e.tokens_out;
    ev->end.tokens_cached = e.tokens_cached;
    ev->end.tokens_adopted =
        e.tokens_adopted < e.tokens_in ? e.tokens_adopted : e.tokens_in; /* never more */
    ev->end.budget_tokens = e.budget_tokens;
    ev->end.prunes = e.prunes;
    ev->end.tokens_dropped = e.tokens_dropped;
    ev->end.dropped_why = why_text(c, h->flags);
    ev->end.prefill_micros = e.prefill_micros;
    ev->end.decode_micros = e.decode_micros;
    ev->end.end_id = e.end_id > INT32_MAX ? -1 : (int32_t)e.end_id;
    if (ev->seq > s->others_seq)
        s->busy = false;
    return 1;
}

int stream_event(backcast_session *s, const struct record_head *h, struct backcast_event *ev)
{
    struct record_lost lost;

    memset(ev, 0, sizeof(*ev));
    ev->session = s;
    ev->seq = h->seq;
    switch (h->type) {
    case RECORD_TOKENS:
        return tokens_event(s, h->len, ev);
    case RECORD_LOGPROBS:
        return logprob_event(s, h->len, ev);
    case RECORD_PROGRESS:
        return progress_event(s, h->len, ev);
    case RECORD_PRUNED:
        return pruned_event(s, h, ev);
    case RECORD_SCORES:
        return scores_event(s, h->len, ev);
    case RECORD_LOST:
        memcpy(&lost, s->c->record, sizeof(lost)); /* seq_check has seen its length */
        ev->type = BACKCAST_LOST;
        ev->lost.first_seq = lost.first_seq;
        ev->lost.count = lost.count;
        return 1;
    case RECORD_END:
        return end_event(s, h, ev);
    case RECORD_REROTATED:
        return rerotated_event(s, h->len, ev);
    default: /* of a later version: nothing that this one promises is in it */
        return 0;
    }
}

/* ---- backcast_next */

/* A session that died under its request still ends it. */
static void end_make(backcast_session *s, struct backcast_event *ev)
{
    memset(ev, 0, sizeof(*ev));
    snprintf(s->c->event_text, sizeof(s->c->event_text), "%s", s->dead_text);
    ev->type = BACKCAST_END;
    ev->session = s;
    ev->seq = s->last_seq;
    ev->end.reason = "error";
    ev->end.text = s->c->event_text;
    ev->end.dropped_why = "";
    ev->end.code = s->dead;
    ev->end.end_id = -1;
    s->busy = s->end_owed = false;
}

static int session_event(backcast_session *s, struct backcast_event *ev)
{
    struct record_head h;
    int rc;

    while ((rc = pending_take(s, &h)) > 0) {
        if (s->n_ranges > 0 && h.type != RECORD_PRUNED)
            rc = lie(s, "another record inside a split PRUNED one");
        else
            rc = stream_event(s, &h, ev);
        if (rc != 0)
            break;
    }
    if (rc <= 0 && s->end_owed) { /* a lie, too, is told as the end of the request */
        end_make(s, ev);
        return 1;
    }
    return rc;
}

static int any_event(backcast *c, struct backcast_event *ev)
{
    backcast_session *s = c->turn != NULL ? c->turn : c->sessions;

    for (unsigned i = 0; i < c->n_sessions; i++) {
        backcast_session *next = s->next != NULL ? s->next : c->sessions;
        int rc = session_event(s, ev);
        if (rc != 0) {
            c->turn = next;
            return rc;
        }
        s = next;
    }
    return 0;
}

/* Waits at most ms for the socket or a bell, and takes note of what came. Returns the number of
 * things that did; BACKCAST_ECANCELLED: a signal arrived; other < 0: an error. */
static int wait_wake(backcast *c, int ms)
{
    struct epoll_event e[32];
    int n = epoll_wait(c->epoll, e, sizeof(e) / sizeof(*e), ms);

    if (n < 0)
        return errno == EINTR ? BACKCAST_ECANCELLED
                              : fail(&c->fail, BACKCAST_EIO, "", "epoll_wait: %s", strerror(errno));
    for (int i = 0; i < n; i++) {
        if (e[i].data.ptr == c)
            conn_look(c);
        else if (e[i].data.ptr == &c->kick)
            kick_clear(c);
        else
            session_drain_bell(e[i].data.ptr);
    }
    return n;
}

/* Says to every ring that we sleep. 1: something came meanwhile. */
static int arm(backcast *c)
{
    for (backcast_session *s = c->sessions; s != NULL; s = s->next) {
        if (s->d2c == NULL)
            continue;
        int rc = ring_reader_sleep(&s->in);
        if (rc != 0 || atomic_load(&s->d2c->state) == RING_CLOSED)
            return 1; /* a lie will be seen by the take */
    }
    return 0;
}

/* How long the next sleep may be; 0: time is over, and a look is all that is left. */
static int wait_ms(int timeout_ms, uint64_t deadline)
{
    if (timeout_ms < 0)
        return RING_RECHECK_MS;
    uint64_t now = timeout_ms > 0 ? now_ms() : deadline;
    uint64_t left = now < deadline ? deadline - now : 0;
    return left < RING_RECHECK_MS ? (int)left : RING_RECHECK_MS;
}

int backcast_next(backcast *c, struct backcast_event *ret, int timeout_ms)
{
    uint64_t deadline = timeout_ms > 0 ? now_ms() + (uint64_t)timeout_ms : 0;
    struct backcast_event ev;

    for (;;) {
        int rc = any_event(c, &ev);
        if (rc > 0) {
            *ret = ev;
            return 1;
        }
        if (rc < 0)
            return rc;
        if (c->lost != 0) /* what came before the end has been handed out */
            return conn_check(c);
        if (arm(c) != 0)
            continue;
        int ms = wait_ms(timeout_ms, deadline);
        rc = wait_wake(c, ms);
        if (rc == BACKCAST_ECANCELLED || (rc == 0 && ms == 0))
            return 0;
        if (rc < 0)
            return rc;
    }
}
