/* server.c: see ipc.h and server.h: accepting, the turn, the sweep, the end.
 *
 *   loop iteration:  timers (sweep 1 s, ration 20 ms) | turn, while work is left | poll: listener,
 *                    connections, bells, wake-up from the engine
 */
#include "server.h"
#include "clock.h"
#include "conn.h"
#include "log.h"
#include "stream.h"
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#ifndef SO_PASSRIGHTS
#define SO_PASSRIGHTS 83 /* Linux 6.16: senders of descriptors get EPERM */
#endif
#define BELLS_TURN_MAX 256

/* ---- the turn */

static void on_turn(uv_idle_t *handle);

void server_work(struct server *s)
{
    if (!s->closed)
        uv_idle_start(&s->turn, on_turn);
}

void server_run(struct server *s, struct stream *st)
{
    if (st->queued || st->dead)
        return;
    st->queued = true;
    st->run_next = NULL;
    *s->run_tail = st;
    s->run_tail = &st->run_next;
    server_work(s);
}

static void resume_conns(struct server *s)
{
    s->resume = false;
    for (struct conn *c = s->conn_list, *next; c != NULL; c = next) {
        next = c->next; /* one may close itself; the next one not before its own turn */
        if (c->resume)
            conn_resume(c);
    }
}

/* True: reports are left. */
static bool take_reports(struct server *s)
{
    for (unsigned i = 0; i < REPORTS_TURN_MAX; i++) {
        struct report *r = engine_take(s->en);
        if (r == NULL)
            return false;
        reply_report(s, &r);
    }
    return true;
}

static void run_streams(struct server *s)
{
    struct stream *list = s->run_first;
    s->run_first = NULL;
    s->run_tail = &s->run_first;
    while (list != NULL) {
        struct stream *st = list;
        list = st->run_next;
        st->queued = false;
        stream_run(st); /* may queue itself again, for the next turn */
    }
    outflow_bells(s);
}

static void server_turn(struct server *s)
{
    bool more = s->en != NULL && take_reports(s);
    if (s->en != NULL && !more && engine_failed(s->en)) /* all who waited have been told */
        server_fatal(s, engine_failure(s->en));
    if (s->resume)
        resume_conns(s);
    run_streams(s);
    statsout_sweep(s, clock_us());
    if (!more && !s->resume && s->run_first == NULL)
        uv_idle_stop(&s->turn);
    else
        server_work(s);
}

static void on_turn(uv_idle_t *handle)
{
    server_turn(handle->data);
}

static void on_wake(uv_poll_t *handle, int status, int events)
{
    struct server *s = handle->data;
    eventfd_t n;
    (void)status;
    (void)events;
    (void)eventfd_read(s->wake_fd, &n);
    atomic_store(&s->woken,
                 false); /* what comes now rings again: before the look at what is there */
    server_turn(s);
}

void server_wake(void *server)
{
    struct server *s = server;
    if (!atomic_exchange(&s->woken, true))
        (void)eventfd_write(s->wake_fd, 1);
}

/* ---- bells */

static void on_bells(uv_poll_t *handle, int status, int events)
{
    struct server *s = handle->data;
    struct epoll_event ev[BELLS_TURN_MAX];
    (void)status;
    (void)events;
    int n = epoll_wait(s->bells_fd, ev, BELLS_TURN_MAX, 0);
    for (int i = 0; i < n; i++) {
        uint32_t slot = (uint32_t)ev[i].data.u64;
        struct bell_slot *b = slot < ENGINE_SESSIONS_MAX ? &s->bells[slot] : NULL;
        if (b != NULL && b->stream != NULL && b->generation == ev[i].data.u64 >> 32)
            stream_bell(b->stream);
    }
}

/* ---- accepting */

static void spare_open(struct server *s)
{
    s->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
}

/* No descriptor is left: the spare one is given up for an answer. False: not even that helped. */
static bool turn_one_away(struct server *s)
{
    struct err e;
    if (s->spare_fd < 0)
        spare_open(s);
    if (s->spare_fd < 0)
        return false;
    close(s->spare_fd);
    int fd = accept4(s->opt.listener->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) {
        err_set(&e, BC_EBUSY, "connections", "the daemon has no file descriptors left");
        conn_turn_away(fd, &e);
        server_count(s, NULL, STAT_connects_refused, 1);
    }
    spare_open(s);
    return fd >= 0;
}

static void on_accept(uv_poll_t *handle, int status, int events)
{
    struct server *s = handle->data;
    struct err e;
    (void)status;
    (void)events;
    for (unsigned i = 0; i < ACCEPTS_TURN_MAX; i++) {
        int fd = accept4(s->opt.listener->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0) {
            if (conn_open(s, fd, &e) < 0) {
                server_count(s, NULL, STAT_connects_refused, 1);
                log_debug("ipc", "connection refused: %s", e.text);
            }
            continue;
        }
        if (errno == ECONNABORTED || errno == EINTR)
            continue;
        if ((errno == EMFILE || errno == ENFILE) && turn_one_away(s))
            continue;
        if (errno != EAGAIN && errno != EWOULDBLOCK)
            log_debug("ipc", "accept: %s", strerror(errno));
        return;
    }
}

/* ---- timers */

static void on_sweep(uv_timer_t *handle)
{
    struct server *s = handle->data;
    uint64_t now = clock_us();
    for (struct conn *c = s->conn_list, *next; c != NULL; c = next) {
        next = c->next;
        conn_sweep(c, now);
    }
    for (struct stream *st = s->stream_list, *next; st != NULL; st = next) {
        next = st->next;
        stream_sweep(st, now);
    }
    statsout_sweep(s, now);
    if (s->spare_fd < 0)
        spare_open(s);
    if (s->en != NULL)
        server_work(s);
}

static void on_rate(uv_timer_t *handle)
{
    struct server *s = handle->data;
    s->rate_paused = false;
    for (struct conn *c = s->conn_list; c != NULL; c = c->next)
        conn_unpause(c, PAUSE_RATE); /* who gets no ration is paused again */
    if (!s->rate_paused)
        uv_timer_stop(&s->rate);
}

void server_pause_rate(struct server *s)
{
    s->rate_paused = true;
    if (!uv_is_active((uv_handle_t *)&s->rate))
        uv_timer_start(&s->rate, on_rate, RATE_MS, RATE_MS);
}

void server_fatal(struct server *s, const char *why)
{
    struct err e;
    if (s->fatal_told || s->opt.fatal == NULL)
        return;
    s->fatal_told = true;
    err_set(&e, BC_EDEVICE, "", "%s", why);
    s->opt.fatal(s->opt.arg, &e);
}

/* ---- opening and closing */

struct ledger_owner *server_owner(const struct server *s)
{
    return s->opt.ledger != NULL ? ledger_daemon(s->opt.ledger) : NULL;
}

static int blocks_alloc(struct server *s, struct err *e)
{
    size_t n = FRAME_HEAD_BYTES + FRAME_PAYLOAD_MAX;
    s->booked = sizeof *s + n + RECORD_COPY_BYTES + FRAME_ARENA_BYTES +
                ENGINE_SESSIONS_MAX * sizeof *s->bells;
    ledger_charge(server_owner(s), LEDGER_border, s->booked);
    s->scratch = malloc(n);
    s->record = malloc(RECORD_COPY_BYTES);
    s->arena.base = malloc(FRAME_ARENA_BYTES);
    s->arena.size = FRAME_ARENA_BYTES;
    s->bells = calloc(ENGINE_SESSIONS_MAX, sizeof *s->bells);
    if (s->scratch == NULL || s->record == NULL || s->arena.base == NULL || s->bells == NULL)
        return err_nomem(e, n + RECORD_COPY_BYTES + FRAME_ARENA_BYTES);
    return BC_OK;
}

static void blocks_free(struct server *s)
{
    free(s->scratch);
    free(s->record);
    free(s->arena.base);
    free(s->bells);
    ledger_credit(server_owner(s), LEDGER_border, s->booked);
}

static void handles_start(struct server *s)
{
    uv_loop_t *loop = s->opt.loop;
    int zero = 0;
    (void)setsockopt(s->opt.listener->fd, SOL_SOCKET, SO_PASSRIGHTS, &zero, sizeof zero);
    int rc = uv_poll_init(loop, &s->accept_poll, s->opt.listener->fd) |
             uv_poll_init(loop, &s->bells_poll, s->bells_fd) |
             uv_poll_init(loop, &s->wake_poll, s->wake_fd) | uv_timer_init(loop, &s->sweep) |
             uv_timer_init(loop, &s->rate) | uv_idle_init(loop, &s->turn);
    bc_assert(rc == 0);
    s->accept_poll.data = s->bells_poll.data = s->wake_poll.data = s->sweep.data = s->rate.data =
        s->turn.data = s;
    uv_poll_start(&s->accept_poll, UV_READABLE, on_accept);
    uv_poll_start(&s->bells_poll, UV_READABLE, on_bells);
    uv_poll_start(&s->wake_poll, UV_READABLE, on_wake);
    uv_timer_start(&s->sweep, on_sweep, SWEEP_MS, SWEEP_MS);
}

int server_open(struct server **ret, const struct server_options *opt, struct err *e)
{
    struct server *s = calloc(1, sizeof *s);
    if (s == NULL)
        return err_nomem(e, sizeof *s);
    s->magic = SERVER_MAGIC;
    s->opt = *opt;
    s->accounts.ledger = opt->ledger;
    s->run_tail = &s->run_first;
    s->start_us = clock_us();
    snprintf(s->default_model, sizeof s->default_model, "%s",
             opt->default_model != NULL ? opt->default_model : "");
    s->bells_fd = s->wake_fd = -1;
    spare_open(s);
    int rc = blocks_alloc(s, e);
    if (rc < 0)
        goto fail;
    if ((s->bells_fd = epoll_create1(EPOLL_CLOEXEC)) < 0) {
        rc = err_set(e, BC_EIO, "", "epoll_create1: %s", strerror(errno));
        goto fail;
    }
    if ((s->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) < 0) {
        rc = err_set(e, BC_EIO, "", "eventfd: %s", strerror(errno));
        goto fail;
    }
    handles_start(s);
    log_info("ipc", "listening on %s%s", opt->listener->path,
             opt->listener->inherited ? " (inherited)" : "");
    *ret = s;
    return BC_OK;
fail:
    if (s->bells_fd >= 0)
        close(s->bells_fd);
    blocks_free(s);
    if (s->spare_fd >= 0)
        close(s->spare_fd);
    s->magic = 0;
    free(s);
    return rc;
}

void server_engine(struct server *s, struct engine *en)
{
    MAGIC_OK(s, SERVER_MAGIC);
    s->en = en;
    while (take_reports(s)) /* sessions of an earlier daemon, before anybody asks for them */
        ;
    for (struct conn *c = s->conn_list; c != NULL; c = c->next)
        conn_unpause(c, PAUSE_LOADING);
}

void server_configure(struct server *s, const struct server_limits *l,
                      const struct server_defaults *d)
{
    MAGIC_OK(s, SERVER_MAGIC);
    s->opt.limits = *l;
    s->opt.defaults = *d;
}

unsigned server_connections(const struct server *s)
{
    return (unsigned)s->conns.n;
}

void server_drain(struct server *s)
{
    MAGIC_OK(s, SERVER_MAGIC);
    s->draining = true;
    uv_poll_stop(&s->accept_poll);
    for (struct stream *st = s->stream_list; st != NULL; st = st->next)
        stream_state(st, RING_DRAINING, 0);
}

void server_flush(struct server *s)
{
    MAGIC_OK(s, SERVER_MAGIC);
    while (s->en != NULL && take_reports(s))
        ;
    for (unsigned i = 0; i < SESSION_REPORTS_MAX / STREAM_TURN_RECORDS && s->run_first != NULL; i++)
        run_streams(s); /* what the rings take; the rest belongs to clients that do not read */
}

static void on_handle_closed(uv_handle_t *handle)
{
    (void)handle;
}

void server_close(struct server *s)
{
    MAGIC_OK(s, SERVER_MAGIC);
    s->closed = true;
    while (s->conn_list != NULL)
        conn_close(s->conn_list);
    while (s->stream_list != NULL)
        stream_drop(s->stream_list, BC_ECLOSED);
    run_streams(s); /* frees the dropped ones that were queued */
    while (s->pending != NULL) {
        struct pending *p = s->pending;
        pending_free(s, &p, false);
    }
    uv_handle_t *handles[] = {(uv_handle_t *)&s->accept_poll, (uv_handle_t *)&s->bells_poll,
                              (uv_handle_t *)&s->wake_poll,   (uv_handle_t *)&s->sweep,
                              (uv_handle_t *)&s->rate,        (uv_handle_t *)&s->turn};
    for (size_t i = 0; i < ARRAY_LEN(handles); i++)
        uv_close(handles[i], on_handle_closed);
}

void server_free(struct server **ps)
{
    struct server *s = *ps;
    MAGIC_OK(s, SERVER_MAGIC);
    bc_assert(s->closed && s->conns.n == 0 && s->streams.n == 0);
    statsout_close(s);
    accounts_free(&s->accounts); /* asserts that every charge came back */
    close(s->bells_fd);
    close(s->wake_fd);
    if (s->spare_fd >= 0)
        close(s->spare_fd);
    blocks_free(s);
    s->magic = 0;
    free(s);
    *ps = NULL;
}
