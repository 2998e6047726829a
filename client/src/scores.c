/* scores.c: the policy's value of every cached token: of a session of ours through its ring, of
 * another connection's through a sealed memfd. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "lib.h"

struct rows {
    struct backcast_score *at;
    size_t n, total;
    bool done;
    int code; /* < 0: the daemon could not */
};

static int rows_take(backcast_session *s, const struct backcast_event *ev, struct rows *r)
{
    if (ev->type == BACKCAST_END) {
        r->done = true;
        if (strcmp(ev->end.reason, "scores") != 0)
            r->code = fail(&s->c->fail, ev->end.code < 0 ? ev->end.code : BACKCAST_ECANCELLED, "",
                           "scores ended with %s: %s", ev->end.reason, ev->end.text);
        else if (r->n != r->total)
            r->code = fail(&s->c->fail, BACKCAST_EPROTOCOL, "", "%zu of %zu score rows came", r->n,
                           r->total);
        return 0;
    }
    if (r->at == NULL) {
        if (ev->scores.total > SCORE_ROWS_MAX)
            return fail(&s->c->fail, BACKCAST_EPROTOCOL, "", "%u score rows: too many",
                        ev->scores.total);
        r->total = ev->scores.total;
        r->at = malloc((r->total + 1) * sizeof(*r->at));
        if (r->at == NULL)
            return fail(&s->c->fail, BACKCAST_ENOMEM, "", "out of memory");
    }
    if (ev->scores.offset != r->n || ev->scores.total != r->total)
        return fail(&s->c->fail, BACKCAST_EPROTOCOL, "", "score rows out of order");
    if (ev->scores.n_rows > 0)
        memcpy(r->at + r->n, ev->scores.rows, ev->scores.n_rows * sizeof(*r->at));
    r->n += ev->scores.n_rows;
    return 0;
}

/* Sleeps until the session's bell or the socket has something, RING_RECHECK_MS at most. */
static int rows_wait(backcast_session *s, uint64_t deadline)
{
    backcast *c = s->c;
    int rc = ring_reader_sleep(&s->in);

    if (rc != 0)
        return 0; /* data, or a lie that the take will name */
    if (now_ms() >= deadline)
        return fail(&c->fail, BACKCAST_ETIMEOUT, "", "no score rows for %d s", CALL_MS / 1000);
    struct pollfd p[2] = {{.fd = s->bell_in, .events = POLLIN}, {.fd = c->sock, .events = POLLIN}};
    if (poll(p, 2, RING_RECHECK_MS) < 0 && errno != EINTR)
        return fail(&c->fail, BACKCAST_EIO, "", "poll: %s", strerror(errno));
    session_drain_bell(s);
    conn_look(c);
    return 0;
}

/* Reads s's ring until the END of the scores. Records of anything else are kept for backcast_next. */
static int rows_read(backcast_session *s, struct rows *r)
{
    uint64_t deadline = now_ms() + CALL_MS;
    struct record_head h;
    struct backcast_event ev;
    int rc = 0;

    while (rc == 0 && !r->done) {
        rc = stream_take(s, &h);
        if (rc == 0 && (s->c->lost != 0 || s->dead != 0)) {
            rc = session_check(s);
        } else if (rc == 0) {
            rc = rows_wait(s, deadline);
        } else if (rc > 0 && h.type != RECORD_SCORES && h.type != RECORD_END) {
            rc = stream_keep(s, &h);
        } else if (rc > 0) {
            deadline = now_ms() + CALL_MS;
            rc = stream_event(s, &h, &ev);
            if (rc > 0)
                rc = rows_take(s, &ev, r);
        }
    }
    return rc < 0 ? rc : r->code;
}

/* A daemon of before would send rows of what is cached, as if that were all. */
static int dropped_check(backcast *c, bool dropped)
{
    if (dropped && !(c->features & FEATURE_DROPPED))
        return fail(&c->fail, BACKCAST_EUNSUPPORTED, "",
                    "this daemon does not tell dropped tokens");
    return 0;
}

static int own_rows(backcast_session *s, bool dropped, struct backcast_score **ret, size_t *ret_n)
{
    Backcast__Scores m = BACKCAST__SCORES__INIT;
    struct call call = {FRAME_SCORES, &m.base, FRAME_ACCEPTED, CALL_MS, NULL, NULL, NULL};
    struct rows r = {0};
    int rc = session_check(s);

    if (rc == 0 && s->busy)
        rc = fail(&s->c->fail, BACKCAST_EBUSY, "session",
                  "session %llu is busy with a request: read until its END, or cancel it",
                  (unsigned long long)s->id);
    if (rc < 0)
        return rc;
    if ((rc = dropped_check(s->c, dropped)) < 0)
        return rc;
    m.has_session = true;
    m.session = s->id;
    m.has_dropped = m.dropped = dropped;
    rc = conn_call(s->c, &call);
    if (rc < 0)
        return rc;
    s->busy = true;
    rc = rows_read(s, &r);
    s->end_owed = false; /* the failure is told right here */
    stream_kick(s->c);   /* bells were drained */
    if (rc == 0 && r.at == NULL && (r.at = malloc(sizeof(*r.at))) == NULL)
        rc = fail(&s->c->fail, BACKCAST_ENOMEM, "", "out of memory");
    if (rc < 0) {
        free(r.at);
        return rc;
    }
    *ret = r.at;
    *ret_n = r.n;
    return 0;
}

/* Copies n rows out of the daemon's memfd. */
static int rows_copy(backcast *c, int fd, size_t n, struct backcast_score **ret)
{
    struct stat st;
    size_t bytes = n * sizeof(struct backcast_score);
    int seals = fcntl(fd, F_GET_SEALS);

    if (n > SCORE_ROWS_MAX || seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fd, &st) < 0 ||
        (uint64_t)st.st_size < bytes)
        return fail(&c->fail, BACKCAST_EPROTOCOL, "", "score rows: the memory is not as announced");
    struct backcast_score *rows = malloc(bytes + 1);
    if (rows == NULL)
        return fail(&c->fail, BACKCAST_ENOMEM, "", "out of memory");
    if (n > 0) {
        void *p = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
        if (p == MAP_FAILED) {
            free(rows);
            return fail(&c->fail, BACKCAST_ENOMEM, "", "mmap of score rows: %s", strerror(errno));
        }
        memcpy(rows, p, bytes);
        munmap(p, bytes);
    }
    *ret = rows;
    return 0;
}

static int rows_by_id(backcast *c, uint64_t id, bool dropped, struct backcast_score **ret,
                      size_t *ret_n)
{
    Backcast__Scores m = BACKCAST__SCORES__INIT;
    ProtobufCMessage *reply = NULL;
    int fds[FRAME_FDS_MAX], n_fds = 0;
    struct call call = {FRAME_SCORES, &m.base, FRAME_SCORES_REPLY, CALL_MS, &reply, fds, &n_fds};

    fail_clear(c);
    for (backcast_session *s = c->sessions; s != NULL; s = s->next)
        if (s->id == id && s->dead == 0)
            return own_rows(s, dropped, ret, ret_n);
    int rc = dropped_check(c, dropped);
    if (rc < 0)
        return rc;
    m.has_session = true;
    m.session = id;
    m.has_dropped = m.dropped = dropped;
    rc = conn_call(c, &call);
    if (rc < 0)
        return rc;
    size_t n = ((const Backcast__ScoresReply *)reply)->n_rows;
    if (n_fds != 1)
        rc = fail(&c->fail, BACKCAST_EPROTOCOL, "", "score rows came with %d descriptors", n_fds);
    else
        rc = rows_copy(c, fds[0], n, ret);
    fds_close(fds, &n_fds);
    if (rc == 0)
        *ret_n = n;
    return rc;
}

int backcast_session_scores(backcast_session *s, struct backcast_score **ret, size_t *ret_n)
{
    return own_rows(s, false, ret, ret_n);
}

int backcast_session_map(backcast_session *s, struct backcast_score **ret, size_t *ret_n)
{
    return own_rows(s, true, ret, ret_n);
}

int backcast_scores_by_id(backcast *c, uint64_t id, struct backcast_score **ret, size_t *ret_n)
{
    return rows_by_id(c, id, false, ret, ret_n);
}

int backcast_map_by_id(backcast *c, uint64_t id, struct backcast_score **ret, size_t *ret_n)
{
    return rows_by_id(c, id, true, ret, ret_n);
}
