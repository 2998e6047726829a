/* stream.c: see stream.h: the life of a session's loop side; outflow.c and inflow.c move its data.
 * */
#include "stream.h"
#include "clock.h"
#include "log.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>

#define NO_BELL UINT32_MAX

struct stream *stream_find(struct server *s, uint64_t session)
{
    struct idnode *n = session != 0 ? idmap_get(&s->streams, session) : NULL;
    return n == NULL ? NULL : CONTAINER(n, struct stream, node);
}

struct stream *stream_named(struct server *s, uint32_t uid, const char *name)
{
    for (struct stream *st = s->stream_list; st != NULL; st = st->next)
        if (!st->dead && st->uid == uid && st->node.id != 0 && strcmp(st->name, name) == 0)
            return st;
    return NULL;
}

/* ---- who holds it */

static void conn_link(struct stream *st, struct conn *c)
{
    st->conn = c;
    st->conn_prev = NULL;
    st->conn_next = c->streams;
    if (st->conn_next != NULL)
        st->conn_next->conn_prev = st;
    c->streams = st;
}

static void conn_unlink(struct stream *st)
{
    if (st->conn == NULL)
        return;
    if (st->conn_prev != NULL)
        st->conn_prev->conn_next = st->conn_next;
    else
        st->conn->streams = st->conn_next;
    if (st->conn_next != NULL)
        st->conn_next->conn_prev = st->conn_prev;
    st->conn = NULL;
}

/* ---- rings and bells */

static int bell_watch(struct stream *st, struct err *e)
{
    struct server *s = st->server;
    uint32_t slot = 0;
    while (slot < ENGINE_SESSIONS_MAX && s->bells[slot].stream != NULL)
        slot++;
    if (slot == ENGINE_SESSIONS_MAX)
        return err_set(e, BC_EBUSY, "sessions", "%u sessions are attached: no more fit", slot);
    s->bells[slot].generation++;
    struct epoll_event ev = {.events = EPOLLIN | EPOLLET,
                             .data.u64 = (uint64_t)s->bells[slot].generation << 32 | slot};
    if (epoll_ctl(s->bells_fd, EPOLL_CTL_ADD, st->shm.c2d_bell, &ev) < 0)
        return err_set(e, BC_EIO, "", "epoll_ctl: %s", strerror(errno));
    s->bells[slot].stream = st;
    st->bell = slot;
    return BC_OK;
}

/* Only the daemon's end of the pair goes: the client may hold the eventfd for ever, so it is taken
 * out of the set by name, not by closing. */
static void rings_close(struct stream *st)
{
    struct server *s = st->server;
    if (st->bell != NO_BELL) {
        epoll_ctl(s->bells_fd, EPOLL_CTL_DEL, st->shm.c2d_bell, NULL);
        s->bells[st->bell].stream = NULL;
        st->bell = NO_BELL;
    }
    outflow_bell_forget(st);
    shm_close(&st->shm);
    st->blocked = st->replaying = false;
}

/* Starts on fresh regions: st->shm has just been made. */
static int rings_start(struct stream *st, int ret_fds[4], struct err *e)
{
    int rc = bell_watch(st, e);
    if (rc == BC_OK)
        rc = shm_client_fds(&st->shm, ret_fds, e);
    if (rc < 0)
        return rc;
    st->generation = ++st->server->last_generation;
    ring_region_init(st->shm.d2c, st->shm.size, st->generation, st->node.id);
    ring_writer_init(&st->w, st->shm.d2c, st->shm.c2d, st->shm.size);
    ring_reader_init(&st->r, st->shm.d2c, st->shm.c2d, st->shm.size);
    st->ring_size = st->shm.size;
    st->in_seq = st->last_head = 0;
    st->asleep = st->suspect = st->muted = st->stall_told = false;
    st->progress_us = clock_us();
    st->in_due = st->out_due = true;
    server_run(st->server, st);
    return BC_OK;
}

void stream_state(struct stream *st, enum ring_state state, int code)
{
    if (st->shm.d2c == NULL)
        return;
    atomic_store(&st->shm.d2c->error, (uint32_t)-code);
    atomic_store(&st->shm.d2c->state, (uint32_t)state);
    shm_ring_bell(&st->shm);
}

/* ---- opening */

static void stream_free(struct stream *st)
{
    MAGIC_OK(st, STREAM_MAGIC);
    bc_assert(st->dead && !st->queued && !st->running && st->conn == NULL);
    st->magic = 0;
    free(st);
}

static int charges_take(struct stream *st, uint64_t ring_size, struct err *e)
{
    const struct server_limits *l = &st->server->opt.limits;
    uint64_t rings = shm_charge(ring_size) + (st->name[0] != '\0' ? BACKLOG_BYTES : 0);
    int rc = quota_take(st->account, l, QUOTA_SESSIONS, 1, e);
    if (rc == BC_OK && (rc = quota_take(st->account, l, QUOTA_RINGS, rings, e)) < 0)
        quota_give(st->account, QUOTA_SESSIONS, 1);
    if (rc == BC_OK)
        st->charged_rings = rings;
    return rc;
}

/* As both kinds begin: no rings yet, nothing charged. NULL: no memory. */
static struct stream *stream_alloc(struct server *s, uint32_t uid)
{
    struct stream *st = calloc(1, sizeof *st);
    if (st == NULL)
        return NULL;
    st->magic = STREAM_MAGIC;
    st->server = s;
    st->uid = uid;
    st->bell = NO_BELL;
    st->shm = st->next_shm = SHM_NONE;
    st->out_tail = &st->out;
    return st;
}

int stream_new(struct conn *c, const char *name, uint64_t ring_size, struct stream **ret,
               struct err *e)
{
    struct stream *st = stream_alloc(c->server, c->uid);
    if (st == NULL)
        return err_nomem(e, sizeof *st);
    st->account = c->account;
    memcpy(st->name, name, strlen(name) + 1);
    int rc = charges_take(st, ring_size, e);
    if (rc < 0)
        goto fail_free;
    if (getrandom(st->token, sizeof st->token, 0) != sizeof st->token) {
        rc = err_set(e, BC_EIO, "", "getrandom: %s", strerror(errno));
        goto fail_charges;
    }
    if (name[0] != '\0' && (rc = backlog_open(&st->backlog, e)) < 0)
        goto fail_charges;
    if ((st->port = port_new()) == NULL) {
        rc = err_nomem(e, sizeof *st->port);
        goto fail_backlog;
    }
    if ((rc = shm_open_rings(&st->shm, ring_size, e)) < 0)
        goto fail_port;
    atomic_store(&st->port->room, (uint32_t)ring_size);
    st->next = st->server->stream_list;
    if (st->next != NULL)
        st->next->prev = st;
    st->server->stream_list = st;
    conn_link(st, c);
    *ret = st;
    return BC_OK;
fail_port:
    port_drop(&st->port);
fail_backlog:
    backlog_close(&st->backlog);
fail_charges:
    quota_give(st->account, QUOTA_SESSIONS, 1);
    quota_give(st->account, QUOTA_RINGS, st->charged_rings);
fail_free:
    st->magic = 0;
    free(st);
    return rc;
}

/* Nobody asked for it, so nobody can be refused: its charges count beyond any limit. */
int stream_recovered(struct server *s, struct report *r, struct err *e)
{
    struct stream *st = stream_alloc(s, r->u.recovered.info.uid);
    if (st == NULL)
        return err_nomem(e, sizeof *st);
    st->ring_size = RING_BYTES_DEFAULT;
    snprintf(st->name, sizeof st->name, "%s", r->u.recovered.info.name);
    memcpy(st->token, r->u.recovered.token, sizeof st->token);
    int rc = backlog_open(&st->backlog, e);
    if (rc == BC_OK && (st->account = account_get(&s->accounts, st->uid)) == NULL)
        rc = err_nomem(e, sizeof *st->account);
    if (rc < 0) {
        backlog_close(&st->backlog);
        free(st);
        return rc;
    }
    quota_add(st->account, QUOTA_SESSIONS, 1);
    quota_add(st->account, QUOTA_RINGS, BACKLOG_BYTES);
    st->charged_rings = BACKLOG_BYTES;
    st->busy = r->u.recovered.busy;
    if (st->busy)
        quota_add(st->account, QUOTA_REQUESTS, 1);
    st->port = r->u.recovered.port;
    r->u.recovered.port = NULL;
    st->seq = r->u.recovered.seq;
    st->next = s->stream_list;
    if (st->next != NULL)
        st->next->prev = st;
    s->stream_list = st;
    idmap_put(&s->streams, &st->node, r->session);
    return BC_OK;
}

int stream_opened(struct stream *st, uint64_t session, int ret_fds[4], struct err *e)
{
    MAGIC_OK(st, STREAM_MAGIC);
    idmap_put(&st->server->streams, &st->node, session);
    return rings_start(st, ret_fds, e);
}

/* ---- attaching */

int stream_attach_begin(struct stream *st, struct conn *c, uint64_t ring_size, uint64_t last_seq,
                        struct err *e)
{
    const struct server_limits *l = &st->server->opt.limits;
    uint64_t rings = shm_charge(ring_size);
    if (st->conn != NULL || st->attaching != 0)
        return err_set(e, BC_EBUSY, "session", "session %llu has a client",
                       (unsigned long long)st->node.id);
    outflow_keep(st); /* what an earlier daemon said may still wait to be numbered */
    if (last_seq > st->seq)
        return err_set(e, BC_EINVALID, "last_seq",
                       "record %llu is the last that was seen, but the session has made %llu",
                       (unsigned long long)last_seq, (unsigned long long)st->seq);
    int rc = quota_take(st->account, l, QUOTA_RINGS, rings, e);
    if (rc < 0)
        return rc;
    if ((rc = shm_open_rings(&st->next_shm, ring_size, e)) < 0) {
        quota_give(st->account, QUOTA_RINGS, rings);
        return rc;
    }
    st->charged_rings += rings;
    st->attach_seq = last_seq;
    st->attaching = c->node.id;
    return BC_OK;
}

static void rings_uncharge(struct stream *st, uint64_t size)
{
    quota_give(st->account, QUOTA_RINGS, shm_charge(size));
    st->charged_rings -= shm_charge(size);
}

void stream_attach_failed(struct stream *st)
{
    st->attaching = 0;
    if (st->next_shm.d2c != NULL) {
        rings_uncharge(st, st->next_shm.size);
        shm_close(&st->next_shm);
    }
}

int stream_attached(struct stream *st, struct conn *c, int ret_fds[4], struct err *e)
{
    MAGIC_OK(st, STREAM_MAGIC);
    bc_assert(st->conn == NULL && st->shm.d2c == NULL && st->attaching == c->node.id);
    st->shm = st->next_shm;
    st->next_shm = SHM_NONE;
    st->attaching = 0;
    conn_link(st, c);
    int rc = rings_start(st, ret_fds, e);
    if (rc < 0)
        return rc;
    st->replaying = st->attach_seq < st->seq;
    st->replay_seq = st->attach_seq + 1;
    return BC_OK;
}

/* ---- going */

void stream_not_busy(struct stream *st)
{
    if (st->busy)
        quota_give(st->account, QUOTA_REQUESTS, 1);
    st->busy = false;
    st->stall_told = false;
}

/* The client's half goes; a named session stays. */
static void stream_detach(struct stream *st)
{
    upload_fail(st, NULL);
    conn_unlink(st);
    uint64_t size = st->shm.size;
    bool had = st->shm.d2c != NULL;
    rings_close(st);
    if (had)
        rings_uncharge(st, size);
    st->out_due = true; /* what waited for room now only has to be kept */
    server_run(st->server, st);
}

void stream_orphan(struct stream *st)
{
    if (st->name[0] != '\0')
        stream_detach(st);
    else
        stream_drop(st, BC_ECLOSED);
}

static void stream_unlink(struct stream *st)
{
    struct server *s = st->server;
    conn_unlink(st);
    if (st->node.id != 0)
        idmap_drop(&s->streams, &st->node);
    if (st->prev != NULL)
        st->prev->next = st->next;
    else
        s->stream_list = st->next;
    if (st->next != NULL)
        st->next->prev = st->prev;
    for (struct pending *p = s->pending; p != NULL; p = p->next)
        if (p->stream == st)
            p->stream = NULL;
}

void stream_drop(struct stream *st, int code)
{
    MAGIC_OK(st, STREAM_MAGIC);
    if (st->dead)
        return;
    if (!st->running) /* freed in its turn: a walk over the list may stand on it */
        server_run(st->server, st);
    st->dead = true;
    upload_fail(st, NULL);
    stream_state(st, RING_CLOSED, code);
    stream_not_busy(st);
    outflow_clear(st);
    stream_attach_failed(st);
    rings_close(st);
    backlog_close(&st->backlog);
    stream_unlink(st);
    port_drop(&st->port);
    quota_give(st->account, QUOTA_SESSIONS, 1);
    quota_give(st->account, QUOTA_RINGS, st->charged_rings);
}

static void gone_post(struct server *s, uint64_t conn)
{
    struct command *cmd = s->en != NULL ? command_new(CMD_GONE, conn, 0) : NULL;
    struct err e;
    if (cmd != NULL && engine_post(s->en, &cmd, &e) < 0) {
        bc_assert(e.code == BC_ECLOSED); /* the engine is stopping and ends everything itself */
        command_free(&cmd);
    }
}

void streams_gone(struct conn *c)
{
    struct server *s = c->server;
    uint64_t id = c->node.id;
    while (c->streams != NULL) {
        struct stream *st = c->streams;
        if (st->node.id == 0)
            conn_unlink(st); /* OPENING: the engine's answer finds nobody */
        else if (st->name[0] != '\0' && !s->closed)
            stream_detach(st);
        else
            stream_drop(st, BC_ECLOSED);
    }
    gone_post(s, id);
}

void stream_violation(struct stream *st, const char *why)
{
    struct server *s = st->server;
    struct err e;
    if (st->dead)
        return;
    struct command *cmd = command_new(CMD_CLOSE, st->conn != NULL ? st->conn->node.id : 0, 0);
    log_info("ipc", "session %llu of uid %u: %s: closed", (unsigned long long)st->node.id, st->uid,
             why);
    server_count(s, st->account, STAT_violations, 1);
    if (cmd != NULL) {
        cmd->session = st->node.id;
        cmd->uid = st->uid;
        cmd->admin = true;
        if (engine_post(s->en, &cmd, &e) < 0) {
            /* The engine takes no more: the connection's end will free the session. */
            command_free(&cmd);
            if (st->conn != NULL) {
                conn_fail(st->conn, BC_EPROTOCOL, why);
                return;
            }
        }
    }
    stream_drop(st, BC_EPROTOCOL);
}

int stream_cancel(struct stream *st, uint32_t reason, struct err *e)
{
    struct command *cmd = command_new(CMD_CANCEL, st->conn != NULL ? st->conn->node.id : 0, 0);
    if (cmd == NULL)
        return err_nomem(e, sizeof *cmd);
    cmd->session = st->node.id;
    cmd->uid = st->uid;
    cmd->admin = true;
    cmd->u.cancel.reason = reason;
    int rc = engine_post(st->server->en, &cmd, e);
    if (rc < 0)
        command_free(&cmd);
    return rc;
}

void stream_asked(struct stream *st)
{
    st->cancellable = true;
    st->cancel_due = false; /* it meant the request before */
}

/* ---- turns */

void stream_run(struct stream *st)
{
    MAGIC_OK(st, STREAM_MAGIC);
    st->running = true;
    if (!st->dead && st->in_due)
        st->in_due = inflow_run(st);
    if (!st->dead && st->out_due)
        st->out_due = outflow_run(st);
    st->running = false;
    if (st->dead) {
        if (!st->queued) /* else its next turn is the last */
            stream_free(st);
    } else if (st->in_due || st->out_due)
        server_run(st->server, st);
}

/* Both directions: "data came" and "room came" are one bell. */
void stream_bell(struct stream *st)
{
    if (st->asleep && ring_reader_ready(&st->r) == 0 && !st->blocked && !st->parked &&
        ++st->empty_bells > BELLS_SECOND_MAX && !st->muted) {
        struct epoll_event ev = {.events = 0};
        epoll_ctl(st->server->bells_fd, EPOLL_CTL_MOD, st->shm.c2d_bell, &ev);
        st->muted = true; /* until the next sweep */
        return;
    }
    st->suspect = false;
    st->in_due = st->out_due = true;
    server_run(st->server, st);
}

static void bell_unmute(struct stream *st)
{
    struct epoll_event ev = {.events = EPOLLIN | EPOLLET,
                             .data.u64 =
                                 (uint64_t)st->server->bells[st->bell].generation << 32 | st->bell};
    if (st->muted)
        epoll_ctl(st->server->bells_fd, EPOLL_CTL_MOD, st->shm.c2d_bell, &ev);
    st->muted = false;
    st->empty_bells = 0;
}

/* A lost bell is healed at once and counted a sweep later: one that was only under way comes in
 * between and clears the suspicion. */
static void wakes_check(struct stream *st)
{
    if (st->suspect) {
        st->suspect = false;
        server_count(st->server, st->account, STAT_missed_wakes, 1);
        log_debug("ipc", "session %llu: a bell was missed", (unsigned long long)st->node.id);
    }
    bool data = st->asleep && ring_reader_ready(&st->r) != 0;
    uint64_t head = atomic_load(&st->shm.c2d->head);
    bool room = (st->blocked || st->parked) && head != st->w.head;
    if (data || room) {
        st->suspect = !st->muted;
        st->in_due = st->out_due = true;
        server_run(st->server, st);
    }
}

/* No room was made for 30 s while something waited for it. */
static void stall_check(struct stream *st, uint64_t now_us)
{
    struct err e;
    if (!st->busy || st->stall_told || !(st->blocked || st->parked))
        return;
    if (now_us - st->progress_us < STREAM_STALL_US)
        return;
    if (stream_cancel(st, END_STALLED, &e) < 0)
        return; /* the next sweep tries again */
    st->stall_told = true;
    server_count(st->server, st->account, STAT_stalled, 1);
    log_info("ipc", "session %llu of uid %u: the client reads nothing for %u s: cancelled",
             (unsigned long long)st->node.id, st->uid, STREAM_STALL_US / 1000000u);
}

void stream_sweep(struct stream *st, uint64_t now_us)
{
    if (st->dead || st->node.id == 0)
        return;
    struct err e;
    if (st->cancel_due)
        st->cancel_due = st->cancellable = stream_cancel(st, END_CANCELLED, &e) < 0;
    if (st->room_due) {
        st->out_due = true;
        server_run(st->server, st);
    }
    if (st->shm.d2c == NULL)
        return;
    bell_unmute(st);
    wakes_check(st);
    inflow_sweep(st, now_us);
    if (!st->dead)
        stall_check(st, now_us);
}
