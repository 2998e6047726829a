/* raw_client.c: see raw_client.h. */
#include <errno.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>
#include "raw_client.h"

static int64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

uint64_t raw_now_ms(void)
{
    return (uint64_t)now_ms();
}

struct raw *raw_connect(const char *path)
{
    struct raw *r = calloc(1, sizeof *r);
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    assert_non_null(r);
    assert_non_null(r->payload = malloc(FRAME_PAYLOAD_MAX));
    snprintf(sa.sun_path, sizeof sa.sun_path, "%s", path);
    r->stats_fd = -1;
    r->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(r->fd >= 0);
    int rc;
    for (int64_t end = now_ms() + RAW_TIMEOUT_MS;
         ;) { /* its file is there a moment before it listens */
        rc = connect(r->fd, (struct sockaddr *)&sa, sizeof sa);
        if (rc == 0 || errno != ECONNREFUSED || now_ms() > end)
            break;
        usleep(2000);
    }
    assert_int_equal(rc, 0);
    return r;
}

static void fds_drop(struct raw *r)
{
    for (unsigned i = 0; i < r->n_fds; i++)
        close(r->fds[i]);
    r->n_fds = 0;
}

void raw_close(struct raw **pr)
{
    struct raw *r = *pr;
    fds_drop(r);
    if (r->m != NULL)
        protobuf_c_message_free_unpacked(r->m, NULL);
    if (r->stats_fd >= 0)
        close(r->stats_fd);
    close(r->fd);
    free(r->payload);
    free(r);
    *pr = NULL;
}

void raw_bytes(struct raw *r, const void *bytes, size_t len)
{
    for (size_t done = 0; done < len;) {
        ssize_t n = send(r->fd, (const char *)bytes + done, len - done, MSG_NOSIGNAL);
        if (n < 0 && (errno == EPIPE || errno == ECONNRESET))
            return; /* the daemon closed: the test will see the end of file */
        assert_true(n > 0);
        done += (size_t)n;
    }
}

uint32_t raw_send_flags(struct raw *r, unsigned type, unsigned flags, const void *payload,
                        size_t len)
{
    uint8_t *bytes = malloc(FRAME_HEAD_BYTES + len);
    struct frame_head h = {.len = (uint32_t)len,
                           .type = (uint16_t)type,
                           .flags = (uint8_t)flags,
                           .request_id = ++r->last_id};
    frame_put(&h, bytes);
    if (len > 0)
        memcpy(bytes + FRAME_HEAD_BYTES, payload, len);
    raw_bytes(r, bytes, FRAME_HEAD_BYTES + len);
    free(bytes);
    return h.request_id;
}

uint32_t raw_send(struct raw *r, enum frame_type type, const ProtobufCMessage *m)
{
    size_t n = protobuf_c_message_get_packed_size(m);
    uint8_t *bytes = malloc(n + 1);
    protobuf_c_message_pack(m, bytes);
    uint32_t id = raw_send_flags(r, type, 0, bytes, n);
    free(bytes);
    return id;
}

/* Reads exactly len bytes; fds that come along go to r->fds. 1, 0, -1 as raw_recv. */
static int read_all(struct raw *r, uint8_t *to, size_t len, int64_t end)
{
    for (size_t done = 0; done < len;) {
        struct pollfd p = {.fd = r->fd, .events = POLLIN};
        int64_t left = end - now_ms();
        int n = poll(&p, 1, left > 0 ? (int)left : 0);
        if (n < 0 && errno == EINTR)
            continue;
        if (n == 0) {
            assert_int_equal(done, 0); /* a frame comes whole, or not at all */
            return 0;
        }
        union {
            struct cmsghdr align;
            char bytes[CMSG_SPACE(sizeof(int) * 8)];
        } control;
        struct iovec iov = {to + done, len - done};
        struct msghdr msg = {.msg_iov = &iov,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof control};
        ssize_t got = recvmsg(r->fd, &msg, MSG_CMSG_CLOEXEC);
        if (got == 0 || (got < 0 && errno == ECONNRESET))
            return -1;
        assert_true(got > 0);
        assert_int_equal(msg.msg_flags & MSG_CTRUNC, 0);
        for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c != NULL; c = CMSG_NXTHDR(&msg, c)) {
            size_t n_fds = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            assert_int_equal(done, 0); /* they ride on the header's first byte */
            assert_true(n_fds <= FRAME_FDS_MAX);
            memcpy(r->fds, CMSG_DATA(c), n_fds * sizeof(int));
            r->n_fds = (unsigned)n_fds;
        }
        done += (size_t)got;
    }
    return 1;
}

int raw_recv(struct raw *r, int timeout_ms)
{
    static const struct frame_limits limits = {FRAME_REPLY_FIELDS_MAX, FRAME_DEPTH_MAX};
    uint8_t head[FRAME_HEAD_BYTES];
    int64_t end = now_ms() + timeout_ms;
    fds_drop(r);
    int rc = read_all(r, head, sizeof head, end);
    if (rc <= 0)
        return rc;
    assert_int_equal(frame_get(head, FRAME_SIDE_DAEMON, FRAME_PAYLOAD_MAX, &r->h, NULL), WIRE_OK);
    if (r->h.len > 0)
        assert_int_equal(read_all(r, r->payload, r->h.len, now_ms() + RAW_TIMEOUT_MS), 1);
    assert_int_equal((r->h.flags & FRAME_HAS_FDS) != 0, r->n_fds > 0);
    assert_int_equal((r->h.flags & FRAME_REPLY) != 0, r->h.request_id != 0);
    const ProtobufCMessageDescriptor *desc = frame_descriptor(r->h.type);
    assert_non_null(desc);
    assert_int_equal(frame_scan(desc, r->payload, r->h.len, &limits, NULL), WIRE_OK);
    if (r->m != NULL)
        protobuf_c_message_free_unpacked(r->m, NULL);
    r->m = protobuf_c_message_unpack(desc, NULL, r->h.len, r->payload);
    assert_non_null(r->m);
    return 1;
}

void raw_is_error(struct raw *r, int code, const char *field)
{
    assert_int_equal(r->h.type, FRAME_ERROR);
    const Backcast__Error *e = (const Backcast__Error *)r->m;
    char got[80];
    snprintf(got, sizeof got, "%.*s", (int)e->field.len, (const char *)e->field.data);
    if (e->code != code || (field != NULL && strcmp(got, field) != 0))
        fail_msg("error %d field \"%s\" (%.*s); wanted %d field \"%s\"", e->code, got,
                 (int)e->text.len, (const char *)e->text.data, code, field != NULL ? field : "*");
    assert_true(e->text.len > 0);
}

void raw_is(struct raw *r, enum frame_type want)
{
    if (r->h.type != want && r->h.type == FRAME_ERROR) {
        const Backcast__Error *e = (const Backcast__Error *)r->m;
        fail_msg("wanted %s, got error %d: %.*s", frame_name(want), e->code, (int)e->text.len,
                 (const char *)e->text.data);
    }
    assert_int_equal(r->h.type, want);
}

void *raw_call(struct raw *r, enum frame_type type, const ProtobufCMessage *m, enum frame_type want)
{
    uint32_t id = raw_send(r, type, m);
    assert_int_equal(raw_recv(r, RAW_TIMEOUT_MS), 1);
    raw_is(r, want);
    assert_int_equal(r->h.request_id, id);
    return r->m;
}

void raw_call_fails(struct raw *r, enum frame_type type, const ProtobufCMessage *m, int code,
                    const char *field)
{
    uint32_t id = raw_send(r, type, m);
    assert_int_equal(raw_recv(r, RAW_TIMEOUT_MS), 1);
    raw_is_error(r, code, field);
    assert_int_equal(r->h.request_id, id);
}

void raw_hello(struct raw *r)
{
    Backcast__Hello m = BACKCAST__HELLO__INIT;
    m.has_min_version = m.has_max_version = m.has_features = m.has_client = 1;
    m.min_version = m.max_version = 1;
    m.features = FEATURES_ALL;
    m.client = (ProtobufCBinaryData){3, (uint8_t *)"raw"};
    Backcast__HelloReply *reply = raw_call(r, FRAME_HELLO, &m.base, FRAME_HELLO_REPLY);
    r->hello = *reply;
    if (r->n_fds == 1) {
        r->stats_fd = r->fds[0];
        r->n_fds = 0;
    }
}

static Backcast__StatReply *stat_all(struct raw *r)
{
    Backcast__Stat m = BACKCAST__STAT__INIT;
    return raw_call(r, FRAME_STAT, &m.base, FRAME_STAT_REPLY);
}

void raw_settle(struct raw *r)
{
    stat_all(r); /* in a turn replies come before rings: it is the second one that says it */
    stat_all(r);
}

bool raw_nothing_is_left(void *raw)
{
    const Backcast__StatReply *reply = stat_all(raw);
    return reply->n_sessions == 0 && reply->daemon->kv_held == 0 && reply->daemon->bytes_rings == 0;
}

void raw_is_closed(struct raw *r)
{
    int rc;
    while ((rc = raw_recv(r, RAW_TIMEOUT_MS)) == 1)
        assert_int_equal(r->h.type, FRAME_ERROR);
    assert_int_equal(rc, -1);
}

/* ---- sessions */

struct raw_session *raw_session_of(struct raw *r)
{
    const Backcast__SessionOpened *m = (const Backcast__SessionOpened *)r->m;
    struct raw_session *s = calloc(1, sizeof *s);
    struct stat st;
    const char *why = "";
    assert_non_null(s);
    assert_non_null(s->payload = malloc(RING_BYTES_MAX / 4));
    assert_int_equal(r->h.type, FRAME_SESSION_OPENED);
    assert_int_equal(r->n_fds, 4);
    assert_int_equal(m->token.len, 16);
    s->r = r;
    s->id = m->session;
    s->generation = m->generation;
    memcpy(s->token, m->token.data, 16);
    s->d2c_fd = r->fds[0];
    s->c2d_fd = r->fds[1];
    s->c2d_bell = r->fds[2];
    s->d2c_bell = r->fds[3];
    r->n_fds = 0;
    assert_int_equal(fstat(s->d2c_fd, &st), 0);
    size_t bytes = (size_t)st.st_size;
    s->d2c = mmap(NULL, bytes, PROT_READ, MAP_SHARED, s->d2c_fd, 0);
    s->c2d = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, s->c2d_fd, 0);
    assert_true(s->d2c != MAP_FAILED && s->c2d != MAP_FAILED);
    if (ring_region_check(s->d2c, bytes, s->id, s->generation, &s->size, &why) < 0)
        fail_msg("%s", why);
    ring_region_init(s->c2d, s->size, s->generation, s->id);
    ring_writer_init(&s->w, s->c2d, s->d2c, s->size);
    ring_reader_init(&s->reader, s->c2d, s->d2c, s->size);
    return s;
}

struct raw_session *raw_open(struct raw *r, const Backcast__OpenSession *m)
{
    Backcast__OpenSession none = BACKCAST__OPEN_SESSION__INIT;
    raw_call(r, FRAME_OPEN_SESSION, m != NULL ? &m->base : &none.base, FRAME_SESSION_OPENED);
    return raw_session_of(r);
}

void raw_forget(struct raw_session *s)
{
    free(s->ids);
    free(s->text);
    s->ids = NULL;
    s->text = NULL;
    s->n_ids = s->text_len = 0;
    s->n_prunes = s->n_lost = s->n_logprobs = s->n_scores = s->n_progress = 0;
}

void raw_session_free(struct raw_session **ps)
{
    struct raw_session *s = *ps;
    munmap((void *)(uintptr_t)s->d2c, RING_REGION_BYTES(s->size));
    munmap(s->c2d, RING_REGION_BYTES(s->size));
    close(s->d2c_fd);
    close(s->c2d_fd);
    close(s->c2d_bell);
    close(s->d2c_bell);
    raw_forget(s);
    free(s->payload);
    free(s);
    *ps = NULL;
}

void raw_ring(struct raw_session *s)
{
    uint64_t one = 1;
    assert_int_equal(write(s->c2d_bell, &one, sizeof one), sizeof one);
}

int raw_next(struct raw_session *s, int timeout_ms)
{
    int64_t end = now_ms() + timeout_ms;
    for (;;) {
        int rc = ring_reader_take(&s->reader, &s->h, s->payload, RING_BYTES_MAX / 4);
        assert_true(rc >= 0);
        if (ring_reader_release(&s->reader))
            raw_ring(s);
        if (rc == 1) {
            assert_true(s->h.type == RECORD_LOST ? s->h.seq > s->last_seq
                                                 : s->h.seq == s->last_seq + 1);
            s->last_seq = s->h.seq;
            return 1;
        }
        if (ring_reader_sleep(&s->reader) == 1)
            continue;
        int64_t left = end - now_ms();
        if (left <= 0)
            return 0;
        struct pollfd p = {.fd = s->d2c_bell, .events = POLLIN};
        poll(&p, 1, left < RING_RECHECK_MS ? (int)left : RING_RECHECK_MS);
        char drain[64];
        while (recv(s->d2c_bell, drain, sizeof drain, MSG_DONTWAIT) > 0)
            ;
    }
}

void raw_generate(struct raw_session *s, const char *text, size_t len, Backcast__Generate *m)
{
    Backcast__Generate own = BACKCAST__GENERATE__INIT;
    if (m == NULL)
        m = &own;
    m->has_session = m->has_kind = m->has_text = 1;
    m->session = s->id;
    m->kind = 1;
    m->text = (ProtobufCBinaryData){len, (uint8_t *)(uintptr_t)text};
    raw_call(s->r, FRAME_GENERATE, &m->base, FRAME_ACCEPTED);
}

static void collect_tokens(struct raw_session *s)
{
    struct record_tokens t;
    assert_true(s->h.len >= sizeof t);
    memcpy(&t, s->payload, sizeof t);
    assert_int_equal(s->h.len, sizeof t + t.n_ids * 4 + t.text_len);
    s->ids = realloc(s->ids, (s->n_ids + t.n_ids + 1) * 4);
    s->text = realloc(s->text, s->text_len + t.text_len + 1);
    memcpy(s->ids + s->n_ids, s->payload + sizeof t, t.n_ids * 4);
    memcpy(s->text + s->text_len, s->payload + sizeof t + t.n_ids * 4, t.text_len);
    s->n_ids += t.n_ids;
    s->text_len += t.text_len;
    s->text[s->text_len] = '\0';
}

void raw_collect(struct raw_session *s)
{
    for (;;) {
        if (raw_next(s, RAW_TIMEOUT_MS) != 1)
            fail_msg("session %llu: no record in %d ms; state %u error %u",
                     (unsigned long long)s->id, RAW_TIMEOUT_MS, atomic_load(&s->d2c->state),
                     atomic_load(&s->d2c->error));
        switch (s->h.type) {
        case RECORD_TOKENS:
            collect_tokens(s);
            break;
        case RECORD_END:
            assert_true(s->h.len >= sizeof s->end);
            memcpy(&s->end, s->payload, sizeof s->end);
            assert_int_equal(s->h.len, sizeof s->end + s->end.text_len);
            snprintf(s->end_text, sizeof s->end_text, "%.*s", (int)s->end.text_len,
                     (char *)s->payload + sizeof s->end);
            return;
        default:
            s->n_prunes += s->h.type == RECORD_PRUNED;
            s->n_lost += s->h.type == RECORD_LOST;
            s->n_logprobs += s->h.type == RECORD_LOGPROBS;
            s->n_scores += s->h.type == RECORD_SCORES;
            s->n_progress += s->h.type == RECORD_PROGRESS;
        }
    }
}

uint32_t raw_upload(struct raw_session *s, const char *text, size_t len, size_t piece,
                    Backcast__Generate *m)
{
    Backcast__Generate own = BACKCAST__GENERATE__INIT;
    if (m == NULL)
        m = &own;
    m->has_session = m->has_kind = m->has_ring_bytes = m->has_ring_seq = 1;
    m->session = s->id;
    m->kind = 1;
    m->ring_bytes = len;
    m->ring_seq = s->w.seq + 1;
    uint32_t id = raw_send(s->r, FRAME_GENERATE, &m->base);
    for (size_t done = 0; done < len;) {
        size_t n = len - done < piece ? len - done : piece;
        struct record_prompt rec = {done, len};
        struct ring_part parts[2] = {{&rec, sizeof rec}, {text + done, n}};
        int rc = ring_writer_put(&s->w, RECORD_PROMPT, 0, parts, 2);
        assert_true(rc >= 0);
        if (ring_writer_publish(&s->w))
            raw_ring(s);
        if (rc == 0) {
            int room = ring_writer_wait(&s->w, (uint32_t)(n + sizeof rec));
            assert_true(room >= 0);
            struct pollfd p = {.fd = s->d2c_bell, .events = POLLIN};
            char drain[64];
            if (room == 0 && poll(&p, 1, RAW_TIMEOUT_MS) == 1)
                assert_true(recv(s->d2c_bell, drain, sizeof drain, MSG_DONTWAIT) > 0);
        }
        done += rc == 1 ? n : 0;
    }
    return id;
}
