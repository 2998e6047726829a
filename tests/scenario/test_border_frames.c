/* The control socket against clients that are no library: handshake, malformed and partial frames,
 * unknown types, descriptors, deadlines, death at any point. One daemon for all; after each case
 * another client must be served as before. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>
#include "daemon_harness.h"
#include "raw_client.h"
#include "statpage.h"

static struct dh *d;

static int start(void **state)
{
    *state = d = dh_start("tiny-llama.gguf", NULL);
    return 0;
}

/* A whole life of an honest client. */
static void others_are_served(void)
{
    struct raw *r = raw_connect(d->socket);
    raw_hello(r);
    struct raw_session *s = raw_open(r, NULL);
    Backcast__Generate g = BACKCAST__GENERATE__INIT;
    g.has_max_tokens = g.has_ignore_end = 1;
    g.max_tokens = 5;
    g.ignore_end = 1;
    raw_generate(s, "the cat", 7, &g);
    raw_collect(s);
    assert_int_equal(s->n_ids, 5);
    raw_session_free(&s);
    raw_close(&r);
}

static bool fds_are(void *arg)
{
    return dh_fds(d) <= *(unsigned *)arg;
}

/* How many there are once the clients of earlier tests are gone for good. */
static unsigned fds_at_rest(void)
{
    unsigned n, same = 0, last = 0;
    for (unsigned i = 0; i < 500 && same < 20; i++) {
        n = dh_fds(d);
        same = n == last ? same + 1 : 0;
        last = n;
        usleep(10000);
    }
    return last;
}

/* Everything that a client brought is gone again. */
static void fds_return_to(unsigned before)
{
    if (!dh_until(fds_are, &before, DH_PATIENCE_MS))
        fail_msg("the daemon has %u descriptors, not %u", dh_fds(d), before);
}

static void hello_negotiates(void **state)
{
    (void)state;
    struct raw *r = raw_connect(d->socket);
    Backcast__Hello m = BACKCAST__HELLO__INIT;
    m.has_min_version = m.has_max_version = m.has_features = m.has_max_frame = 1;
    m.min_version = 1;
    m.max_version = 9;
    m.features = FEATURE_STATS_PAGE | 1ull << 40;
    m.max_frame = 8192;
    Backcast__HelloReply *h = raw_call(r, FRAME_HELLO, &m.base, FRAME_HELLO_REPLY);
    assert_int_equal(h->version, 1);
    assert_true(h->features == FEATURE_STATS_PAGE);
    assert_int_equal(h->max_frame, 8192);
    assert_int_equal(h->uid, getuid());
    assert_true(h->admin);
    assert_true(h->default_model.len > 0);
    assert_int_equal(r->n_fds, 1);
    raw_call_fails(r, FRAME_HELLO, &m.base, 18, NULL); /* said already */
    raw_close(&r);
}

static void no_common_version_is_said_and_closed(void **state)
{
    (void)state;
    struct raw *r = raw_connect(d->socket);
    Backcast__Hello m = BACKCAST__HELLO__INIT;
    m.has_min_version = m.has_max_version = 1;
    m.min_version = 2;
    m.max_version = 7;
    raw_call_fails(r, FRAME_HELLO, &m.base, 8, "max_version");
    raw_is_closed(r);
    raw_close(&r);
    r = raw_connect(d->socket);
    m.min_version = 5;
    m.max_version = 3;
    raw_call_fails(r, FRAME_HELLO, &m.base, 1, "max_version");
    m.min_version = m.max_version = 1;
    m.has_max_frame = 1;
    m.max_frame = 100;
    raw_call_fails(r, FRAME_HELLO, &m.base, 1, "max_frame");
    m.has_max_frame = 0;
    raw_call(r, FRAME_HELLO, &m.base, FRAME_HELLO_REPLY); /* a mistake can be mended */
    raw_close(&r);
}

static void first_frame_must_be_hello(void **state)
{
    (void)state;
    struct raw *r = raw_connect(d->socket);
    Backcast__Stat m = BACKCAST__STAT__INIT;
    raw_send(r, FRAME_STAT, &m.base);
    assert_int_equal(raw_recv(r, RAW_TIMEOUT_MS), 1);
    raw_is_error(r, 7, NULL);
    assert_int_equal(r->h.request_id, 0);
    raw_is_closed(r);
    raw_close(&r);
}

static void stats_page_is_sealed_and_true(void **state)
{
    (void)state;
    struct raw *r = raw_connect(d->socket);
    raw_hello(r);
    int fd = r->stats_fd;
    size_t bytes = r->hello.stats_bytes;
    assert_true(fd >= 0 && bytes >= 8192);
    assert_int_equal(pwrite(fd, "x", 1, 0), -1);
    assert_int_equal(ftruncate(fd, 0), -1);
    assert_int_equal(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), -1);
    assert_true(mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED);
    struct statpage *p = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
    assert_true(p != MAP_FAILED);
    assert_int_equal(mprotect(p, bytes, PROT_READ | PROT_WRITE), -1);
    struct raw_session *s = raw_open(r, NULL);
    struct stat_entry e[4];
    struct statpage_copy c = {0};
    for (unsigned i = 0; i < 3000 && (c.n_entries != 1 || c.counters[STAT_sessions] != 1); i++) {
        usleep(10000);
        assert_int_equal(statpage_read(p, bytes, &c, e, 4, NULL), WIRE_OK);
    }
    assert_int_equal(c.n_entries, 1);
    assert_int_equal(e[0].session, s->id);
    assert_string_equal(e[0].client, "raw");
    assert_string_equal(e[0].policy, "counter_causal_fast");
    assert_true(c.counters[STAT_kv_memory] == 512ull << 20);
    assert_true(c.counters[STAT_weights] > 0);
    assert_true(c.counters[STAT_rings] >= 2 * RING_REGION_BYTES(s->size));
    assert_int_equal(c.counters[STAT_missed_wakes], 0);
    munmap(p, bytes);
    raw_session_free(&s);
    raw_close(&r);
}

/* A header that breaks one rule: an answer if possible, then the end. */
static void malformed_headers_close_the_connection(void **state)
{
    (void)state;
    static const struct {
        uint8_t at, value;
    } faults[] = {{2, 2},    {3, 1}, {6, 0},  {6, 2},  {7, 1},  {7, 4},    {7, 8},
                  {7, 0x80}, {8, 0}, {12, 1}, {13, 1}, {14, 1}, {15, 0x80}};
    unsigned before = fds_at_rest();
    for (unsigned i = 0; i < sizeof faults / sizeof faults[0]; i++) {
        struct raw *r = raw_connect(d->socket);
        raw_hello(r);
        struct frame_head h = {.len = 0, .type = FRAME_STAT, .request_id = 1};
        uint8_t bytes[16];
        frame_put(&h, bytes);
        bytes[faults[i].at] = faults[i].value;
        raw_bytes(r, bytes, sizeof bytes);
        assert_int_equal(raw_recv(r, RAW_TIMEOUT_MS), 1);
        raw_is_error(r, 7, NULL);
        assert_int_equal(r->h.request_id, 0);
        raw_is_closed(r);
        raw_close(&r);
    }
    fds_return_to(before);
    others_are_served();
}

static void long_frames_are_refused_before_they_are_read(void **state)
{
    (void)state;
    for (unsigned hello = 0; hello < 2; hello++) {
        struct raw *r = raw_connect(d->socket);
        if (hello)
            raw_hello(r);
        struct frame_head h = {.len = hello ? FRAME_PAYLOAD_MAX + 1 : FRAME_PAYLOAD_HELLO_MAX + 1,
                               .type = FRAME_HELLO,
                               .request_id = 9};
        uint8_t bytes[16];
        frame_put(&h, bytes);
        raw_bytes(r, bytes, sizeof bytes);
        raw_is_closed(r);
        raw_close(&r);
    }
    /* the longest allowed one is read, and found to be no message */
    struct raw *r = raw_connect(d->socket);
    raw_hello(r);
    uint8_t *big = calloc(1, FRAME_PAYLOAD_MAX);
    raw_send_flags(r, FRAME_STAT, 0, big, FRAME_PAYLOAD_MAX);
    assert_int_equal(raw_recv(r, RAW_TIMEOUT_MS), 1);
    raw_is_error(r, 1, NULL);
    free(big);
    raw_close(&r);
}

static void frames_may_come_in_any_pieces(void **state)
{
    (void)state;
    struct raw *r = raw_connect(d->socket);
    raw_hello(r);
    uint8_t bytes[16 * 40];
    for (unsigned i = 0; i < 40; i++) {
        struct frame_head h = {.type = FRAME_STAT, .request_id = 100 + i};
        frame_put(&h, bytes + 16 * i);
    }
    raw_bytes(r, bytes, sizeof bytes); /* all at once */
    for (unsigned i = 0; i < 40; i++) {
        assert_int_equal(raw_recv(r, RAW_TIMEOUT_MS), 1);
        assert_int_equal(r->h.type, FRAME_STAT_REPLY);
        assert_int_equal(r->h.request_id, 100 + i);
    }
    for (unsigned i = 0; i < 3 * 16; i++) { /* a byte at a time */
        raw_bytes(r, bytes + i, 1);
        usleep(200);
    }
    for (unsigned i = 0; i < 3; i++) {
        assert_int_equal(raw_recv(r, RAW_TIMEOUT_MS), 1);
        assert_int_equal(r->h.request_id, 100 + i);
    }
    raw_bytes(r, bytes, 16 + 7); /* a frame and a half, then the rest */
    assert_int_equal(raw_recv(r, RAW_TIMEOUT_MS), 1);
    assert_int_equal(raw_recv(r, 100), 0);
    raw_bytes(r, bytes + 16 + 7, 9);
    assert_int_equal(raw_recv(r, RAW_TIMEOUT_MS), 1);
    raw_close(&r);
}

static void unknown_types(void **state)
{
    (void)state;
    struct raw *r = raw_connect(d->socket);
    Backcast__Stat stat = BACKCAST__STAT__INIT;
    raw_hello(r);
    raw_send_flags(r, 9999, 0, "abc", 3); /* ignored */
    raw_call(r, FRAME_STAT, &stat.base, FRAME_STAT_REPLY);
    raw_send_flags(r, 9999, FRAME_CRITICAL, "abc", 3);
    assert_int_equal(raw_recv(r, RAW_TIMEOUT_MS), 1);
    raw_is_error(r, 2, "type");
    raw_send_flags(r, FRAME_STAT_REPLY, FRAME_CRITICAL, NULL, 0); /* the daemon's own */
    assert_int_equal(raw_recv(r, RAW_TIMEOUT_MS), 1);
    raw_is_error(r, 2, "type");
    raw_call(r, FRAME_STAT, &stat.base, FRAME_STAT_REPLY);
    raw_close(&r);
}

static void malformed_messages_leave_the_connection(void **state)
{
    (void)state;
    static const struct {
        const char *bytes;
        size_t len;
    } bad[] = {{"\x0b", 1}, {"\x08", 1}, {"\x0a\x7f", 2}, {"\x00\x00", 2}, {"\x0f\x0f", 2}};
    struct raw *r = raw_connect(d->socket);
    Backcast__Stat stat = BACKCAST__STAT__INIT;
    raw_hello(r);
    for (unsigned i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        raw_send_flags(r, FRAME_OPEN_SESSION, 0, bad[i].bytes, bad[i].len);
        assert_int_equal(raw_recv(r, RAW_TIMEOUT_MS), 1);
        raw_is_error(r, 1, NULL);
        assert_int_equal(r->h.request_id, r->last_id);
    }
    uint8_t many[600];
    for (unsigned i = 0; i < sizeof many; i += 2) {
        many[i] = 0x78; /* unknown field 15, varint */
        many[i + 1] = 1;
    }
    raw_send_flags(r, FRAME_STAT, 0, many, sizeof many);
    assert_int_equal(raw_recv(r, RAW_TIMEOUT_MS), 1);
    raw_is_error(r, 1, NULL);
    raw_send_flags(r, FRAME_STAT, 0, many, 20); /* a few unknown fields are a newer client's */
    assert_int_equal(raw_recv(r, RAW_TIMEOUT_MS), 1);
    assert_int_equal(r->h.type, FRAME_STAT_REPLY);
    raw_call(r, FRAME_STAT, &stat.base, FRAME_STAT_REPLY);
    raw_close(&r);
}

/* Newer kernels let the daemon forbid it (EPERM); else the connection ends. Nothing stays open. */
static void clients_cannot_send_descriptors(void **state)
{
    (void)state;
    unsigned before = fds_at_rest();
    for (unsigned n = 1; n <= 253; n += 84) {
        struct raw *r = raw_connect(d->socket);
        raw_hello(r);
        static union {
            struct cmsghdr align;
            char bytes[CMSG_SPACE(sizeof(int) * 253)];
        } control;
        struct frame_head h = {.type = FRAME_STAT, .request_id = 1};
        uint8_t bytes[16];
        frame_put(&h, bytes);
        struct iovec iov = {bytes, 7}; /* and half a frame */
        struct msghdr msg = {.msg_iov = &iov,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = CMSG_SPACE(sizeof(int) * n)};
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * n);
        int zero[253] = {0};
        memcpy(CMSG_DATA(c), zero, sizeof(int) * n);
        if (sendmsg(r->fd, &msg, MSG_NOSIGNAL) < 0)
            assert_int_equal(errno, EPERM);
        else
            raw_is_closed(r);
        raw_close(&r);
    }
    fds_return_to(before);
    others_are_served();
}

static void silence_before_hello_ends_in_time(void **state)
{
    (void)state;
    uint64_t start = raw_now_ms();
    struct raw *r = raw_connect(d->socket), *half = raw_connect(d->socket);
    raw_bytes(half, "\x04", 1);
    others_are_served();
    assert_int_equal(raw_recv(r, RAW_TIMEOUT_MS), 1);
    assert_true(raw_now_ms() - start >= 4900); /* 5 s after it was accepted */
    raw_is_error(r, 15, NULL);
    raw_is_closed(r);
    raw_is_closed(half);
    raw_close(&r);
    raw_close(&half);
}

/* A client process that dies after each number of bytes of a conversation. */
static void death_at_every_byte(void **state)
{
    (void)state;
    uint8_t talk[256];
    size_t len = 0;
    Backcast__Hello hello = BACKCAST__HELLO__INIT;
    Backcast__OpenSession open = BACKCAST__OPEN_SESSION__INIT;
    const ProtobufCMessage *m[2] = {&hello.base, &open.base};
    hello.has_client = 1;
    hello.client = (ProtobufCBinaryData){5, (uint8_t *)"dying"};
    open.has_budget_tokens = 1;
    open.budget_tokens = 128;
    for (unsigned i = 0; i < 2; i++) {
        struct frame_head h = {.len = (uint32_t)protobuf_c_message_get_packed_size(m[i]),
                               .type = i == 0 ? FRAME_HELLO : FRAME_OPEN_SESSION,
                               .request_id = 1 + i};
        frame_put(&h, talk + len);
        protobuf_c_message_pack(m[i], talk + len + 16);
        len += 16 + h.len;
    }
    unsigned before = fds_at_rest();
    for (size_t n = 0; n <= len; n++) {
        pid_t child = fork();
        if (child == 0) {
            struct raw *r = raw_connect(d->socket);
            raw_bytes(r, talk, n);
            if (n % 3 == 0)
                usleep(2000);
            kill(getpid(), SIGKILL);
        }
        assert_true(child > 0);
        waitpid(child, NULL, 0);
    }
    fds_return_to(before);
    others_are_served();
    fds_return_to(before);
    Backcast__Stat stat = BACKCAST__STAT__INIT;
    struct raw *r = raw_connect(d->socket);
    raw_hello(r);
    Backcast__StatReply *reply = raw_call(r, FRAME_STAT, &stat.base, FRAME_STAT_REPLY);
    assert_int_equal(reply->n_sessions, 0);
    assert_int_equal(reply->daemon->kv_held, 0);
    assert_int_equal(reply->daemon->bytes_rings, 0);
    raw_close(&r);
}

static void calls_of_later_parts_answer_unsupported(void **state)
{
    (void)state;
    struct raw *r = raw_connect(d->socket);
    raw_hello(r);
    Backcast__Fork f = BACKCAST__FORK__INIT;
    Backcast__Save sv = BACKCAST__SAVE__INIT;
    Backcast__Restore rs = BACKCAST__RESTORE__INIT;
    Backcast__OpenSession o = BACKCAST__OPEN_SESSION__INIT;
    raw_call_fails(r, FRAME_FORK, &f.base, 1, "session");
    f.has_session = f.has_name = 1;
    f.session = 77;
    f.name = (ProtobufCBinaryData){3, (uint8_t *)"a/b"};
    raw_call_fails(r, FRAME_FORK, &f.base, 2, "session");
    rs.has_name = 1; /* this daemon was told to keep nothing on disk */
    rs.name = (ProtobufCBinaryData){1, (uint8_t *)"x"};
    raw_call_fails(r, FRAME_RESTORE, &rs.base, 6, "state_dir");
    raw_call_fails(r, FRAME_SAVE, &sv.base, 1, "session");
    Backcast__ListSaved ls = BACKCAST__LIST_SAVED__INIT;
    Backcast__Unsave us = BACKCAST__UNSAVE__INIT;
    raw_call_fails(r, FRAME_LIST_SAVED, &ls.base, 6, "state_dir");
    raw_call_fails(r, FRAME_UNSAVE, &us.base, 1, "name");
    us.has_name = ls.has_after = 1;
    us.name = ls.after = (ProtobufCBinaryData){8, (uint8_t *)"../x/../"};
    raw_call_fails(r, FRAME_UNSAVE, &us.base, 1, "name");
    raw_call_fails(r, FRAME_LIST_SAVED, &ls.base, 1, "after");
    o.has_durable = o.durable = 1;
    raw_call_fails(r, FRAME_OPEN_SESSION, &o.base, 6, "state_dir");
    raw_close(&r);
}

static void request_ids_are_the_clients_own(void **state)
{
    (void)state;
    struct raw *r = raw_connect(d->socket);
    raw_hello(r);
    uint8_t bytes[32]; /* two requests in one piece: the second finds the first under way */
    struct frame_head h = {.type = FRAME_OPEN_SESSION, .request_id = 7};
    frame_put(&h, bytes);
    frame_put(&h, bytes + 16);
    raw_bytes(r, bytes, sizeof bytes);
    unsigned opened = 0, refused = 0;
    for (unsigned i = 0; i < 2; i++) {
        assert_int_equal(raw_recv(r, RAW_TIMEOUT_MS), 1);
        opened += r->h.type == FRAME_SESSION_OPENED;
        if (r->h.type == FRAME_ERROR) {
            raw_is_error(r, 1, "request_id");
            refused++;
        }
    }
    assert_int_equal(opened, 1);
    assert_int_equal(refused, 1);
    raw_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hello_negotiates),
        cmocka_unit_test(no_common_version_is_said_and_closed),
        cmocka_unit_test(first_frame_must_be_hello),
        cmocka_unit_test(stats_page_is_sealed_and_true),
        cmocka_unit_test(malformed_headers_close_the_connection),
        cmocka_unit_test(long_frames_are_refused_before_they_are_read),
        cmocka_unit_test(frames_may_come_in_any_pieces),
        cmocka_unit_test(unknown_types),
        cmocka_unit_test(malformed_messages_leave_the_connection),
        cmocka_unit_test(clients_cannot_send_descriptors),
        cmocka_unit_test(silence_before_hello_ends_in_time),
        cmocka_unit_test(death_at_every_byte),
        cmocka_unit_test(calls_of_later_parts_answer_unsupported),
        cmocka_unit_test(request_ids_are_the_clients_own),
    };
    return cmocka_run_group_tests(tests, start, dh_group_stop);
}
