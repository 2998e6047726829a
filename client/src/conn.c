/* conn.c: the socket: connect, Hello, frames, the file descriptors that ride on them, request and
 * reply.
 *
 * Frames are read exactly: 16 bytes of header, where alone file descriptors may come, then the
 * payload, where none may. So the fds of a frame are the fds of its header's read, and every other
 * one is a violation that ends the connection. An fd that was received is in c->in.fds or with the
 * caller, nowhere else, so every error path closes it through fds_close.
 *
 * A reply that comes after its call has given up (or nobody waits for: Cancel's) is dropped by its
 * id. The socket never blocks: waiting is poll(2) with a deadline.
 */
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#include "lib.h"

static const struct frame_limits reply_limits = {FRAME_REPLY_FIELDS_MAX, FRAME_DEPTH_MAX};

uint64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

void fds_close(int *fds, int *n)
{
    while (*n > 0)
        close(fds[--*n]);
}

void bytes_copy(char *to, size_t len, const ProtobufCBinaryData *from)
{
    size_t n = from->len < len - 1 ? from->len : len - 1;
    if (n > 0)
        memcpy(to, from->data, n);
    to[n] = '\0';
}

ProtobufCBinaryData bytes_of(const char *s)
{
    return (ProtobufCBinaryData){strlen(s), (uint8_t *)(uintptr_t)s};
}

int conn_lose(backcast *c, int code, const char *fmt, ...)
{
    va_list ap;
    char text[sizeof(c->fail.text)];

    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    conn_unwatch(c, &c->sock);
    fds_close(c->in.fds, &c->in.n_fds);
    c->in.have = 0;
    c->in.head_ok = false;
    c->lost = code;
    stream_kick(c);
    return fail(&c->fail, code, "", "%s", text);
}

int conn_check(backcast *c)
{
    if (c->lost == 0)
        return 0;
    if (c->fail.text[0] == '\0')
        fail(&c->fail, c->lost, "", "the connection is over: %s (backcast_reconnect)",
             backcast_strerror(c->lost));
    return c->lost;
}

/* ---- sending */

static int wait_writable(backcast *c, uint64_t deadline)
{
    for (;;) {
        uint64_t now = now_ms();
        struct pollfd p = {.fd = c->sock, .events = POLLOUT};
        if (now >= deadline)
            return conn_lose(c, BACKCAST_ETIMEOUT, "the daemon takes no request: %u s",
                             CALL_MS / 1000);
        int n = poll(&p, 1, (int)(deadline - now));
        if (n > 0)
            return 0;
        if (n < 0 && errno != EINTR)
            return conn_lose(c, BACKCAST_EIO, "poll: %s", strerror(errno));
    }
}

/* All of the bytes: half a frame would leave the stream useless. */
static int send_all(backcast *c, const uint8_t *bytes, size_t len)
{
    uint64_t deadline = now_ms() + CALL_MS;

    while (len > 0) {
        ssize_t n = send(c->sock, bytes, len, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n >= 0) {
            bytes += n;
            len -= (size_t)n;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            int rc = wait_writable(c, deadline);
            if (rc < 0)
                return rc;
        } else if (errno == EPIPE || errno == ECONNRESET) {
            conn_look(c); /* its last words may lie there */
            if (c->lost == 0)
                conn_lose(c, BACKCAST_ECLOSED, "the daemon closed the connection");
            return c->lost;
        } else if (errno != EINTR) {
            return conn_lose(c, BACKCAST_EIO, "send: %s", strerror(errno));
        }
    }
    return 0;
}

int conn_send(backcast *c, unsigned type, const ProtobufCMessage *m, uint32_t *ret_id)
{
    size_t len = protobuf_c_message_get_packed_size(m);
    struct frame_head h = {.len = (uint32_t)len, .type = (uint16_t)type, .flags = FRAME_CRITICAL};

    if (len > c->send_max)
        return fail(&c->fail, BACKCAST_EINVALID, "", "the request takes %zu bytes, %u at most", len,
                    c->send_max);
    uint8_t *bytes = malloc(FRAME_HEAD_BYTES + len);
    if (bytes == NULL)
        return fail(&c->fail, BACKCAST_ENOMEM, "", "no memory for a request of %zu bytes", len);
    h.request_id = ++c->last_request != 0 ? c->last_request : ++c->last_request;
    frame_put(&h, bytes);
    protobuf_c_message_pack(m, bytes + FRAME_HEAD_BYTES);
    int rc = send_all(c, bytes, FRAME_HEAD_BYTES + len);
    free(bytes);
    if (rc == 0 && ret_id != NULL)
        *ret_id = h.request_id;
    return rc;
}

/* ---- receiving */

/* Moves the fds of a message into c->in. */
static int fds_take(backcast *c, struct msghdr *m)
{
    bool bad = (m->msg_flags & MSG_CTRUNC) != 0;

    for (struct cmsghdr *k = CMSG_FIRSTHDR(m); k != NULL; k = CMSG_NXTHDR(m, k)) {
        if (k->cmsg_level != SOL_SOCKET || k->cmsg_type != SCM_RIGHTS)
            continue;
        size_t n = (k->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(k) + i * sizeof(fd), sizeof(fd));
            if (c->in.n_fds < (int)FRAME_FDS_MAX) {
                c->in.fds[c->in.n_fds++] = fd;
            } else {
                close(fd);
                bad = true;
            }
        }
    }
    if (bad) {
        fds_close(c->in.fds, &c->in.n_fds);
        return conn_lose(c, BACKCAST_EPROTOCOL,
                         "file descriptors of a reply were too many, or could not be received");
    }
    return 0;
}

/* Reads up to `want` bytes to `to`. > 0 bytes; 0: none now; < 0: lost. */
static ssize_t receive_some(backcast *c, uint8_t *to, size_t want, bool fds_may_come)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int) * FRAME_FDS_MAX)];
    } control;
    struct iovec v = {to, want};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1};

    if (fds_may_come) {
        m.msg_control = control.bytes;
        m.msg_controllen = sizeof(control.bytes);
    }
    ssize_t n = recvmsg(c->sock, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return 0;
    if (n < 0 && errno == ECONNRESET) /* it was killed with our request unread */
        return conn_lose(c, BACKCAST_ECLOSED, "the daemon closed the connection");
    if (n < 0)
        return conn_lose(c, BACKCAST_EIO, "receive: %s", strerror(errno));
    if (fds_may_come) {
        int rc = fds_take(c, &m);
        if (rc < 0)
            return rc;
    } else if (m.msg_flags & MSG_CTRUNC) {
        return conn_lose(c, BACKCAST_EPROTOCOL, "file descriptors inside a frame's payload");
    }
    if (n == 0)
        return conn_lose(c, BACKCAST_ECLOSED, "the daemon closed the connection");
    return n;
}

/* Goes on reading the present frame. 1: it is whole; 0: not yet; < 0: lost. */
static int frame_receive(backcast *c)
{
    struct frame_in *in = &c->in;
    const char *why = "";

    while (!in->head_ok) {
        ssize_t n = receive_some(c, in->head_bytes + in->have, FRAME_HEAD_BYTES - in->have, true);
        if (n <= 0)
            return (int)n;
        in->have += (uint32_t)n;
        if (in->have < FRAME_HEAD_BYTES)
            continue;
        if (frame_get(in->head_bytes, FRAME_SIDE_DAEMON, FRAME_PAYLOAD_MAX, &in->head, &why) < 0)
            return conn_lose(c, BACKCAST_EPROTOCOL, "%s", why);
        if ((in->n_fds > 0) != ((in->head.flags & FRAME_HAS_FDS) != 0))
            return conn_lose(c, BACKCAST_EPROTOCOL,
                             "a frame's file descriptors are not as its header says");
        in->head_ok = true;
    }
    while (in->have < FRAME_HEAD_BYTES + in->head.len) {
        uint32_t at = in->have - FRAME_HEAD_BYTES;
        ssize_t n = receive_some(c, in->payload + at, in->head.len - at, false);
        if (n <= 0)
            return (int)n;
        in->have += (uint32_t)n;
    }
    return 1;
}

/* Makes room for the next frame; fds nobody took are closed. */
static void frame_done(backcast *c)
{
    fds_close(c->in.fds, &c->in.n_fds);
    c->in.have = 0;
    c->in.head_ok = false;
}

/* An ERROR frame into c->fail; its code. */
static int error_take(backcast *c)
{
    ProtobufCMessage *m = NULL;
    const char *why = "";
    char text[sizeof(c->fail.text)], field[sizeof(c->fail.field)];

    if (frame_unpack(&c->in.head, c->in.payload, &reply_limits, &c->arena, &m, &why) < 0)
        return conn_lose(c, BACKCAST_EPROTOCOL, "ERROR: %s", why);
    const Backcast__Error *e = (const Backcast__Error *)m;
    int code = e->has_code && e->code > 0 && e->code < 1000 ? -e->code : BACKCAST_EINTERNAL;
    bytes_copy(text, sizeof(text), &e->text);
    bytes_copy(field, sizeof(field), &e->field);
    fail(&c->fail, code, field, "%s", text[0] != '\0' ? text : backcast_strerror(code));
    c->fail.needed = e->needed;
    c->fail.available = e->available;
    return code;
}

/* A frame that nobody asked for: an error about the connection, or a late reply. */
static void frame_stray(backcast *c)
{
    if (c->in.head.type == FRAME_ERROR && c->in.head.request_id == 0) {
        int code = error_take(c);
        struct failure f = c->fail;
        if (c->lost == 0)
            conn_lose(c, code, "%s", f.text);
        c->fail = f;
        return;
    }
    frame_done(c);
}

void conn_look(backcast *c)
{
    while (c->sock >= 0 && frame_receive(c) > 0)
        frame_stray(c);
}

/* The frame at hand is the awaited answer. */
static int answer_take(backcast *c, const struct call *call)
{
    ProtobufCMessage *m = NULL;
    const char *why = "";

    if (c->in.head.type == FRAME_ERROR) {
        int code = error_take(c);
        if (c->lost == 0)
            frame_done(c);
        return code;
    }
    if (c->in.head.type != call->reply || (c->in.n_fds > 0 && call->fds == NULL))
        return conn_lose(c, BACKCAST_EPROTOCOL, "an answer of the wrong kind (%s)",
                         frame_name(c->in.head.type) != NULL ? frame_name(c->in.head.type)
                                                             : "unknown");
    if (frame_unpack(&c->in.head, c->in.payload, &reply_limits, &c->arena, &m, &why) < 0)
        return conn_lose(c, BACKCAST_EPROTOCOL, "%s: %s", frame_name(call->reply), why);
    if (call->fds != NULL) {
        memcpy(call->fds, c->in.fds, sizeof(c->in.fds));
        *call->n_fds = c->in.n_fds;
        c->in.n_fds = 0;
    }
    if (call->ret != NULL)
        *call->ret = m;
    frame_done(c);
    return 0;
}

int conn_answer(backcast *c, uint32_t id, const struct call *call)
{
    uint64_t deadline = now_ms() + (uint64_t)call->timeout_ms;

    for (;;) {
        int rc = frame_receive(c);
        if (rc < 0)
            return rc;
        if (rc > 0) {
            if (c->in.head.request_id == id)
                return answer_take(c, call);
            frame_stray(c);
            if (c->lost != 0)
                return c->lost;
            continue;
        }
        uint64_t now = now_ms();
        if (now >= deadline)
            return call->timeout_ms == 0
                       ? BACKCAST_ETIMEOUT
                       : fail(&c->fail, BACKCAST_ETIMEOUT, "", "no answer to %s within %d s",
                              frame_name(call->type), call->timeout_ms / 1000);
        struct pollfd p = {.fd = c->sock, .events = POLLIN};
        if (poll(&p, 1, (int)(deadline - now)) < 0 && errno != EINTR)
            return conn_lose(c, BACKCAST_EIO, "poll: %s", strerror(errno));
    }
}

int conn_call(backcast *c, const struct call *call)
{
    uint32_t id = 0;
    int rc = conn_check(c);

    if (rc == 0)
        rc = conn_send(c, call->type, call->request, &id);
    return rc < 0 ? rc : conn_answer(c, id, call);
}
