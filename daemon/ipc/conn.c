/* conn.c: see conn.h.
 *
 * Reading: one recvmsg a callback into the server's scratch block, behind the bytes that the last
 * one left over; never more than one full-sized frame in all. No control buffer is given: a client
 * that sends descriptors (MSG_CTRUNC) is dropped, and the kernel closes what it sent.
 *
 * Writing: straight to the socket while it takes bytes, else a queue and UV_WRITABLE. Descriptors
 * ride on the first byte of their frame's header, so such a frame starts a sendmsg of its own. */
#include "conn.h"
#include "backcast.pb-c.h"
#include "clock.h"
#include "log.h"
#include "stream.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define SEND_FRAMES_MAX 16 /* frames of one sendmsg */

static void conn_on_poll(uv_poll_t *handle, int status, int events);

struct conn *conn_find(struct server *s, uint64_t id)
{
    struct idnode *n = idmap_get(&s->conns, id);
    return n == NULL ? NULL : CONTAINER(n, struct conn, node);
}

/* What the loop should watch for, given pauses and queue. */
static void conn_watch(struct conn *c)
{
    int events = UV_DISCONNECT;
    if (c->state == CONN_CLOSING)
        return;
    if (c->paused == 0)
        events |= UV_READABLE;
    if (c->out != NULL)
        events |= UV_WRITABLE;
    int rc = uv_poll_start(&c->poll, events, conn_on_poll);
    bc_assert(rc == 0);
}

static void conn_pause(struct conn *c, enum conn_pause why)
{
    c->paused |= why;
    conn_watch(c);
}

void conn_unpause(struct conn *c, enum conn_pause why)
{
    if ((c->paused & why) == 0 || c->state == CONN_CLOSING)
        return;
    c->paused &= ~(unsigned)why;
    if (c->paused == 0) {
        c->resume = true;
        c->server->resume = true;
        server_work(c->server);
    }
    conn_watch(c);
}

/* ---- closing */

static void out_free(struct out_frame *f)
{
    for (unsigned i = 0; i < f->n_fds; i++)
        close(f->fds[i]);
    free(f);
}

static void conn_on_closed(uv_handle_t *handle)
{
    struct conn *c = handle->data;
    MAGIC_OK(c, CONN_MAGIC);
    close(c->fd); /* not before the handle has let go of it */
    c->magic = 0;
    free(c);
}

/* Replaces what is kept of a frame that is not whole yet; takes part. */
static void part_set(struct conn *c, uint8_t *part, size_t len)
{
    ledger_credit(c->account->owner, LEDGER_border, c->part_len);
    ledger_charge(c->account->owner, LEDGER_border, len);
    c->part = part;
    c->part_len = len;
}

void conn_close(struct conn *c)
{
    MAGIC_OK(c, CONN_MAGIC);
    struct server *s = c->server;
    if (c->state == CONN_CLOSING)
        return;
    c->state = CONN_CLOSING;
    log_debug("ipc", "connection %llu of uid %u closed", (unsigned long long)c->node.id, c->uid);
    streams_gone(c);
    idmap_drop(&s->conns, &c->node);
    if (c->prev != NULL)
        c->prev->next = c->next;
    else
        s->conn_list = c->next;
    if (c->next != NULL)
        c->next->prev = c->prev;
    quota_give(c->account, QUOTA_QUEUED, c->out_bytes);
    quota_give(c->account, QUOTA_CONNECTIONS, 1);
    while (c->out != NULL) {
        struct out_frame *f = c->out;
        c->out = f->next;
        out_free(f);
    }
    free(c->part);
    part_set(c, NULL, 0);
    ledger_credit(c->account->owner, LEDGER_border, sizeof *c);
    shutdown(c->fd, SHUT_RDWR); /* the peer learns it now, not when the handle is gone */
    uv_poll_stop(&c->poll);
    uv_close((uv_handle_t *)&c->poll, conn_on_closed);
}

/* ---- writing */

static struct out_frame *out_new(uint32_t request_id, enum frame_type type,
                                 const ProtobufCMessage *m, unsigned n_fds)
{
    size_t n = protobuf_c_message_get_packed_size(m);
    struct out_frame *f = malloc(sizeof *f + FRAME_HEAD_BYTES + n);
    if (f == NULL)
        return NULL;
    struct frame_head h = {.len = (uint32_t)n,
                           .type = (uint16_t)type,
                           .flags = (uint8_t)((request_id != 0 ? FRAME_REPLY : 0) |
                                              (n_fds > 0 ? FRAME_HAS_FDS : 0)),
                           .request_id = request_id};
    *f = (struct out_frame){.len = (uint32_t)(FRAME_HEAD_BYTES + n)};
    frame_put(&h, f->bytes);
    protobuf_c_message_pack(m, f->bytes + FRAME_HEAD_BYTES);
    return f;
}

/* Bytes gone to the socket, from the front of the queue. */
static void out_sent(struct conn *c, size_t n)
{
    while (n > 0) {
        struct out_frame *f = c->out;
        size_t take = BC_MIN(n, (size_t)(f->len - f->sent));
        for (unsigned i = 0; i < f->n_fds; i++) /* they went with the first byte */
            close(f->fds[i]);
        f->n_fds = 0;
        f->sent += (uint32_t)take;
        n -= take;
        c->out_bytes -= take;
        quota_give(c->account, QUOTA_QUEUED, take);
        if (f->sent == f->len) {
            if ((c->out = f->next) == NULL)
                c->out_tail = &c->out;
            free(f);
        }
    }
}

/* One sendmsg. 1: all of it went; 0: the socket is full; < 0: broken. */
static int out_send(struct conn *c)
{
    struct iovec iov[SEND_FRAMES_MAX];
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int) * FRAME_FDS_MAX)];
    } control;
    struct msghdr msg = {.msg_iov = iov};
    size_t total = 0;
    for (struct out_frame *f = c->out; f != NULL && msg.msg_iovlen < SEND_FRAMES_MAX; f = f->next) {
        if (f->n_fds > 0 && f != c->out)
            break;
        iov[msg.msg_iovlen++] = (struct iovec){f->bytes + f->sent, f->len - f->sent};
        total += f->len - f->sent;
    }
    if (c->out->n_fds > 0) {
        size_t n = sizeof(int) * c->out->n_fds;
        memset(&control, 0, sizeof control);
        msg.msg_control = control.bytes;
        msg.msg_controllen = CMSG_SPACE(n);
        struct cmsghdr *cm = CMSG_FIRSTHDR(&msg);
        cm->cmsg_level = SOL_SOCKET;
        cm->cmsg_type = SCM_RIGHTS;
        cm->cmsg_len = CMSG_LEN(n);
        memcpy(CMSG_DATA(cm), c->out->fds, n);
    }
    ssize_t n = sendmsg(c->fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0)
        return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -1;
    out_sent(c, (size_t)n);
    return (size_t)n == total;
}

static void conn_flush(struct conn *c)
{
    int rc = 1;
    while (c->out != NULL && rc == 1)
        rc = out_send(c);
    if (rc < 0) {
        conn_close(c);
        return;
    }
    if (c->out_bytes < CONN_OUT_PAUSE_BYTES / 2)
        conn_unpause(c, PAUSE_OUT);
    conn_watch(c);
}

void conn_reply(struct conn *c, uint32_t request_id, enum frame_type type,
                const ProtobufCMessage *m, const int *fds, unsigned n_fds)
{
    MAGIC_OK(c, CONN_MAGIC);
    bc_assert(n_fds <= FRAME_FDS_MAX);
    struct out_frame *f = c->state == CONN_CLOSING ? NULL : out_new(request_id, type, m, n_fds);
    if (f == NULL) {
        for (unsigned i = 0; i < n_fds; i++)
            close(fds[i]);
        conn_close(c); /* out of memory: a reply is never dropped silently */
        return;
    }
    for (unsigned i = 0; i < n_fds; i++)
        f->fds[f->n_fds++] = fds[i];
    f->next = NULL;
    bool idle = c->out == NULL;
    *c->out_tail = f;
    c->out_tail = &f->next;
    c->out_bytes += f->len;
    quota_add(c->account, QUOTA_QUEUED, f->len); /* counted, not refused: the request was */
    server_count(c->server, c->account, STAT_frames_out, 1);
    if (idle)
        conn_flush(c);
    if (c->state == CONN_CLOSING)
        return;
    if (c->out_bytes > CONN_OUT_MAX_BYTES) {
        log_warn("ipc", "connection %llu of uid %u does not take its replies: dropped",
                 (unsigned long long)c->node.id, c->uid);
        conn_close(c);
    } else if (c->out_bytes > CONN_OUT_PAUSE_BYTES) {
        conn_pause(c, PAUSE_OUT);
    }
}

static void error_fill(Backcast__Error *m, const struct err *e)
{
    m->has_code = 1;
    m->code = -e->code;
    m->has_field = e->field[0] != '\0';
    m->field = (ProtobufCBinaryData){strlen(e->field), (uint8_t *)(uintptr_t)e->field};
    m->has_text = 1;
    m->text = (ProtobufCBinaryData){strlen(e->text), (uint8_t *)(uintptr_t)e->text};
    m->has_needed = m->has_available = e->needed != 0 || e->available != 0;
    m->needed = e->needed;
    m->available = e->available;
}

void conn_error(struct conn *c, uint32_t request_id, const struct err *e)
{
    Backcast__Error m = BACKCAST__ERROR__INIT;
    error_fill(&m, e);
    conn_reply(c, request_id, FRAME_ERROR, &m.base, NULL, 0);
}

void conn_turn_away(int fd, const struct err *e)
{
    uint8_t bytes[FRAME_HEAD_BYTES + 512];
    Backcast__Error m = BACKCAST__ERROR__INIT;
    error_fill(&m, e);
    size_t n = backcast__error__get_packed_size(&m);
    if (n <= sizeof bytes - FRAME_HEAD_BYTES) {
        struct frame_head h = {.len = (uint32_t)n, .type = FRAME_ERROR};
        frame_put(&h, bytes);
        backcast__error__pack(&m, bytes + FRAME_HEAD_BYTES);
        (void)!send(fd, bytes, FRAME_HEAD_BYTES + n, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    close(fd);
}

void conn_fail(struct conn *c, int code, const char *why)
{
    struct err e;
    if (c->state == CONN_CLOSING)
        return;
    err_set(&e, code, "", "%s", why);
    log_info("ipc", "connection %llu of uid %u (pid %d): %s: closed",
             (unsigned long long)c->node.id, c->uid, (int)c->pid, why);
    server_count(c->server, c->account, STAT_violations, 1);
    conn_error(c, 0, &e);
    conn_close(c);
}

/* ---- reading */

/* Handles whole frames at the front of buf; returns how many bytes that were. */
static size_t conn_frames(struct conn *c, const uint8_t *buf, size_t len)
{
    struct server *s = c->server;
    size_t at = 0;
    while (c->state != CONN_CLOSING && c->paused == 0 && len - at >= FRAME_HEAD_BYTES) {
        struct frame_head h;
        const char *why;
        if (frame_get(buf + at, FRAME_SIDE_CLIENT, c->payload_in_max, &h, &why) < 0) {
            conn_fail(c, BC_EPROTOCOL, why);
            break;
        }
        if (len - at < FRAME_HEAD_BYTES + h.len)
            break;
        if (s->en == NULL && c->state == CONN_OPEN) {
            conn_pause(c, PAUSE_LOADING);
            break;
        }
        if (c->requests >= CONN_REQUESTS_MAX) {
            conn_pause(c, PAUSE_REQUESTS);
            break;
        }
        if (!quota_frame(c->account, &s->opt.limits, clock_us())) {
            server_count(s, c->account, STAT_throttled, 1);
            conn_pause(c, PAUSE_RATE);
            server_pause_rate(s);
            break;
        }
        server_count(s, c->account, STAT_frames_in, 1);
        dispatch_frame(c, &h, buf + at + FRAME_HEAD_BYTES);
        at += FRAME_HEAD_BYTES + h.len;
    }
    return at;
}

/* scratch[0..len) holds what there is: handles it and keeps the rest. */
static void conn_consume(struct conn *c, size_t len)
{
    uint8_t *buf = c->server->scratch;
    size_t used = conn_frames(c, buf, len);
    if (c->state == CONN_CLOSING)
        return;
    size_t rest = len - used;
    uint8_t *part = rest > 0 ? realloc(c->part, rest) : NULL;
    if (rest > 0 && part == NULL) {
        conn_fail(c, BC_ENOMEM, "out of memory for the connection's input");
        return;
    }
    if (rest == 0)
        free(c->part);
    else
        memcpy(part, buf + used, rest);
    part_set(c, part, rest);
}

/* True: more may be there. */
static bool conn_read(struct conn *c)
{
    uint8_t *buf = c->server->scratch;
    if (c->resume) { /* a pause has just ended: first what it held back */
        conn_resume(c);
        if (c->state == CONN_CLOSING || c->paused != 0)
            return false;
    }
    size_t have = c->part_len, cap = FRAME_HEAD_BYTES + FRAME_PAYLOAD_MAX;
    bc_assert(have < cap); /* else a whole frame lay there, or a lie about its length */
    if (have > 0)
        memcpy(buf, c->part, have);
    struct iovec iov = {buf + have, cap - have};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    ssize_t n = recvmsg(c->fd, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        return false;
    if (n < 0 && errno == EINTR)
        return true;
    if (n <= 0) {
        conn_close(c);
        return false;
    }
    if ((msg.msg_flags & MSG_CTRUNC) != 0) {
        conn_fail(c, BC_EPROTOCOL, "the client sent file descriptors");
        return false;
    }
    conn_consume(c, have + (size_t)n);
    return true;
}

bool conn_drain(struct conn *c)
{
    MAGIC_OK(c, CONN_MAGIC);
    while (c->state != CONN_CLOSING && c->paused == 0 && conn_read(c))
        ; /* ends: the ration of frames does */
    return c->state != CONN_CLOSING && c->paused == 0;
}

void conn_resume(struct conn *c)
{
    c->resume = false;
    if (c->state == CONN_CLOSING || c->paused != 0)
        return;
    for (struct stream *st = c->streams; st != NULL; st = st->conn_next)
        if (st->held) {
            st->in_due = true;
            server_run(c->server, st);
        }
    if (c->part_len == 0)
        return;
    size_t len = c->part_len;
    memcpy(c->server->scratch, c->part, len);
    conn_consume(c, len);
}

static void conn_on_poll(uv_poll_t *handle, int status, int events)
{
    struct conn *c = handle->data;
    MAGIC_OK(c, CONN_MAGIC);
    if (status < 0) {
        conn_close(c);
        return;
    }
    if ((events & UV_WRITABLE) != 0)
        conn_flush(c);
    if (c->state != CONN_CLOSING && (events & UV_READABLE) != 0 && c->paused == 0)
        conn_read(c); /* comes to EOF by itself, after what was sent before it */
    else if (c->state != CONN_CLOSING && (events & UV_DISCONNECT) != 0)
        conn_close(c);
}

/* ---- opening */

int conn_open(struct server *s, int fd, struct err *e)
{
    struct ucred cred;
    socklen_t n = sizeof cred;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &n) < 0) {
        int rc = err_set(e, BC_EIO, "", "SO_PEERCRED: %s", strerror(errno));
        close(fd);
        return rc;
    }
    struct account *a = account_get(&s->accounts, cred.uid);
    struct conn *c = a != NULL ? calloc(1, sizeof *c) : NULL;
    int rc = c == NULL ? err_set(e, BC_EBUSY, "connections", "no memory for another connection")
                       : quota_take(a, &s->opt.limits, QUOTA_CONNECTIONS, 1, e);
    if (rc < 0) {
        free(c);
        conn_turn_away(fd, e);
        return rc;
    }
    c->magic = CONN_MAGIC;
    c->server = s;
    c->fd = fd;
    c->uid = cred.uid;
    c->pid = cred.pid;
    c->admin = server_admin(s, cred.uid);
    c->account = a;
    ledger_charge(a->owner, LEDGER_border, sizeof *c);
    c->born_us = clock_us();
    c->payload_in_max = FRAME_PAYLOAD_HELLO_MAX;
    c->payload_out_max = FRAME_PAYLOAD_MIN_MAX;
    rc = uv_poll_init(s->opt.loop, &c->poll, fd);
    bc_assert(rc == 0); /* a fresh non-blocking socket that nobody else watches */
    c->poll.data = c;
    c->out_tail = &c->out;
    idmap_put(&s->conns, &c->node, ++s->last_conn);
    c->next = s->conn_list;
    if (c->next != NULL)
        c->next->prev = c;
    s->conn_list = c;
    server_count(s, a, STAT_connects, 1);
    log_debug("ipc", "connection %llu of uid %u, pid %d", (unsigned long long)c->node.id, c->uid,
              (int)c->pid);
    conn_watch(c);
    return BC_OK;
}

void conn_sweep(struct conn *c, uint64_t now_us)
{
    if (c->state == CONN_HELLO && now_us - c->born_us > HELLO_US)
        conn_fail(c, BC_ETIMEOUT, "no Hello within 5 s");
}
