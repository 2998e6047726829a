/* What a user may take, and who may do what: each limit answers with its name and numbers, and gives
 * everything back. A daemon for each case, with limits small enough to be met. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>
#include "daemon_harness.h"
#include "raw_client.h"
#include "statpage.h"

#define NOBODY 65534
#ifdef __SANITIZE_ADDRESS__ /* it keeps what was freed for a while */
#define GROWTH_MAX (256u << 20)
#else
#define GROWTH_MAX (4u << 20)
#endif

static struct raw *client(const struct dh *d)
{
    struct raw *r = raw_connect(d->socket);
    raw_hello(r);
    return r;
}

struct fds {
    const struct dh *d;
    unsigned at_rest;
};

static bool fds_are(void *arg)
{
    const struct fds *f = arg;
    return dh_fds(f->d) <= f->at_rest;
}

/* All that clients brought is gone again, but for the stats page of a user who was here. */
static void fds_return(const struct dh *d, unsigned at_rest)
{
    struct fds f = {d, at_rest + 1};
    if (!dh_until(fds_are, &f, DH_PATIENCE_MS))
        fail_msg("the daemon has %u descriptors, not %u", dh_fds(d), at_rest);
}

static void connections_are_counted(void **state)
{
    (void)state;
    const char *const args[] = {"--max-connections=3", NULL};
    struct dh *d = dh_start("tiny-llama.gguf", args);
    struct raw *r[3];
    unsigned at_rest = dh_fds(d);
    for (unsigned round = 0; round < 3; round++) {
        for (unsigned i = 0; i < 3; i++)
            r[i] = client(d);
        struct raw *one_more = raw_connect(d->socket);
        assert_int_equal(raw_recv(one_more, RAW_TIMEOUT_MS), 1);
        raw_is_error(one_more, 5, "connections");
        raw_is_closed(one_more);
        raw_close(&one_more);
        for (unsigned i = 0; i < 3; i++)
            raw_close(&r[i]);
        fds_return(d, at_rest);
    }
    dh_stop(&d);
}

static void sessions_and_rings_are_counted(void **state)
{
    (void)state;
    const char *const args[] = {"--max-sessions=5", "--max-ring-bytes=1MiB", NULL};
    struct dh *d = dh_start("tiny-llama.gguf", args);
    struct raw *r = client(d), *other = client(d);
    struct raw_session *s[5];
    Backcast__OpenSession m = BACKCAST__OPEN_SESSION__INIT;
    for (unsigned i = 0; i < 5; i++)
        s[i] = raw_open(i % 2 ? r : other, NULL);
    raw_call_fails(r, FRAME_OPEN_SESSION, &m.base, 5, "sessions");
    const Backcast__Error *e = (const Backcast__Error *)r->m;
    assert_int_equal(e->needed, 1);
    assert_int_equal(e->available, 0);
    Backcast__Close c = BACKCAST__CLOSE__INIT;
    c.has_session = 1;
    c.session = s[0]->id; /* of the other connection: the same user may */
    raw_call(r, FRAME_CLOSE, &c.base, FRAME_CLOSED);
    m.has_ring_bytes = 1;
    m.ring_bytes = 4u << 20;
    raw_call_fails(r, FRAME_OPEN_SESSION, &m.base, 5, "ring_bytes");
    e = (const Backcast__Error *)r->m;
    assert_int_equal(e->needed, 2 * RING_REGION_BYTES(4u << 20));
    raw_session_free(&s[0]);
    s[0] = raw_open(r, NULL);
    for (unsigned i = 0; i < 5; i++)
        raw_session_free(&s[i]);
    raw_close(&r);
    raw_close(&other);
    dh_stop(&d); /* asserts inside that every charge came back */
}

static void requests_and_queued_bytes_are_counted(void **state)
{
    (void)state;
    const char *const args[] = {"--max-requests=2", "--max-queued-bytes=100KiB", NULL};
    struct dh *d = dh_start_long(args);
    struct raw *r = client(d);
    struct raw_session *s[3];
    Backcast__Generate g = BACKCAST__GENERATE__INIT;
    g.has_max_tokens = g.has_ignore_end = 1;
    g.max_tokens = 1000000;
    g.ignore_end = 1;
    for (unsigned i = 0; i < 3; i++)
        s[i] = raw_open(r, NULL);
    raw_generate(s[0], "a", 1, &g);
    raw_generate(s[1], "b", 1, &g);
    g.session = s[2]->id;
    raw_call_fails(r, FRAME_GENERATE, &g.base, 5, "requests");
    raw_session_free(&s[0]);
    raw_session_free(&s[1]);
    raw_session_free(&s[2]);
    raw_close(&r); /* takes both with it */
    r = client(d);
    assert_true(dh_until(raw_nothing_is_left, r, DH_PATIENCE_MS));
    s[0] = raw_open(r, NULL);
    g.session = s[0]->id;
    g.has_text = 0;
    g.has_ring_bytes = 1;
    g.ring_bytes = 200000;
    raw_call_fails(r, FRAME_GENERATE, &g.base, 5, "queued_bytes");
    g.ring_bytes = 1ull << 40;
    raw_call_fails(r, FRAME_GENERATE, &g.base, 1, "ring_bytes");
    raw_session_free(&s[0]);
    raw_close(&r);
    dh_stop(&d);
}

static void frames_are_rationed_not_refused(void **state)
{
    (void)state;
    const char *const args[] = {"--max-frames-per-second=50", NULL};
    struct dh *d = dh_start("tiny-llama.gguf", args);
    struct raw *r = client(d);
    uint64_t start = raw_now_ms();
    for (unsigned i = 0; i < 150; i++)
        raw_send_flags(r, FRAME_STAT, 0, NULL, 0);
    for (unsigned i = 0; i < 150; i++) {
        assert_int_equal(raw_recv(r, RAW_TIMEOUT_MS), 1);
        assert_int_equal(r->h.type, FRAME_STAT_REPLY);
    }
    uint64_t took = raw_now_ms() - start;
    if (took < 1500 || took > RAW_TIMEOUT_MS)
        fail_msg("150 frames at 50 a second took %llu ms", (unsigned long long)took);
    raw_close(&r);
    dh_stop(&d);
}

/* Asks and never reads: reading stops, memory stays, the others are served. */
static void a_client_that_takes_no_replies_is_left_alone(void **state)
{
    (void)state;
    const char *const args[] = {"--max-frames-per-second=100000", NULL};
    struct dh *d = dh_start("tiny-llama.gguf", args);
    struct raw *r = client(d), *other = client(d);
    for (unsigned i = 0; i < 40; i++) { /* to make listings long */
        struct raw_session *s = raw_open(r, NULL);
        raw_session_free(&s);
    }
    uint64_t rss = dh_rss(d);
    uint8_t bytes[16 * 64];
    uint32_t id = 1000;
    size_t sent = 0;
    for (unsigned i = 0; i < 4000 && sent < 16 * 64 * 400; i++) {
        for (unsigned k = 0; k < 64; k++) {
            struct frame_head h = {.type = FRAME_STAT, .request_id = id++};
            frame_put(&h, bytes + 16 * k);
        }
        ssize_t n = send(r->fd, bytes, sizeof bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < (ssize_t)sizeof bytes)
            break; /* the socket is full: the daemon has stopped reading */
        sent += (size_t)n;
    }
    Backcast__Stat m = BACKCAST__STAT__INIT;
    for (unsigned i = 0; i < 20; i++)
        raw_call(other, FRAME_STAT, &m.base, FRAME_STAT_REPLY);
    assert_true(dh_rss(d) < rss + 6 * (uint64_t)GROWTH_MAX);
    for (unsigned i = 0; i < 100; i++) { /* and it may go on when it reads */
        assert_int_equal(raw_recv(r, RAW_TIMEOUT_MS), 1);
        assert_true(r->h.type == FRAME_STAT_REPLY || r->h.type == FRAME_ERROR);
    }
    raw_close(&r);
    raw_close(&other);
    dh_stop(&d);
}

static void no_descriptors_left_is_answered(void **state)
{
    (void)state;
    struct dh *d = dh_start("tiny-llama.gguf", NULL);
    struct raw *r = client(d);
    struct rlimit all, few = {dh_fds(d) + 3, 4096};
    assert_int_equal(prlimit(d->pid, RLIMIT_NOFILE, NULL, &all), 0);
    few.rlim_max = all.rlim_max;
    assert_int_equal(prlimit(d->pid, RLIMIT_NOFILE, &few, NULL), 0);
    Backcast__OpenSession m = BACKCAST__OPEN_SESSION__INIT;
    raw_call_fails(r, FRAME_OPEN_SESSION, &m.base, 5, NULL); /* no room for its rings */
    struct raw *more[8];
    unsigned busy = 0;
    for (unsigned i = 0; i < 8; i++) {
        more[i] = raw_connect(d->socket);
        if (raw_recv(more[i], 300) == 1) {
            raw_is_error(more[i], 5, "connections");
            busy++;
        }
    }
    assert_true(busy >= 4);
    Backcast__Stat stat = BACKCAST__STAT__INIT;
    raw_call(r, FRAME_STAT, &stat.base, FRAME_STAT_REPLY); /* the old client is served */
    for (unsigned i = 0; i < 8; i++)
        raw_close(&more[i]);
    assert_int_equal(prlimit(d->pid, RLIMIT_NOFILE, &all, NULL), 0);
    struct raw *again = client(d);
    struct raw_session *s = raw_open(again, NULL);
    raw_session_free(&s);
    raw_close(&again);
    raw_close(&r);
    dh_stop(&d);
}

static void listings_come_in_pieces(void **state)
{
    (void)state;
    struct dh *d = dh_start("tiny-llama.gguf", NULL);
    struct raw *r = raw_connect(d->socket);
    Backcast__Hello h = BACKCAST__HELLO__INIT;
    h.has_min_version = h.has_max_version = h.has_max_frame = 1;
    h.min_version = h.max_version = 1;
    h.max_frame = FRAME_PAYLOAD_MIN_MAX;
    raw_call(r, FRAME_HELLO, &h.base, FRAME_HELLO_REPLY);
    Backcast__OpenSession m = BACKCAST__OPEN_SESSION__INIT;
    m.has_ring_bytes = 1;
    m.ring_bytes = 4096;
    uint64_t ids[60];
    struct raw_session *s;
    for (unsigned i = 0; i < 60; i++) {
        s = raw_open(r, &m);
        ids[i] = s->id;
        raw_session_free(&s);
    }
    raw_send_flags(r, FRAME_STAT, 0, NULL, 0);
    unsigned frames = 0, n = 0;
    bool more = true, seen[60] = {false};
    while (more) {
        assert_int_equal(raw_recv(r, RAW_TIMEOUT_MS), 1);
        assert_int_equal(r->h.type, FRAME_STAT_REPLY);
        assert_true(r->h.len <= FRAME_PAYLOAD_MIN_MAX);
        const Backcast__StatReply *reply = (const Backcast__StatReply *)r->m;
        assert_true((frames == 0) == (reply->daemon != NULL));
        for (size_t i = 0; i < reply->n_sessions; i++, n++)
            for (unsigned k = 0; k < 60; k++)
                if (ids[k] == reply->sessions[i]->session) {
                    assert_false(seen[k]);
                    seen[k] = true;
                }
        frames++;
        more = reply->more;
    }
    assert_int_equal(n, 60);
    assert_true(frames >= 2);
    raw_close(&r);
    dh_stop(&d);
}

/* 300 lives of a client: nothing grows. */
static void coming_and_going_leaves_nothing(void **state)
{
    (void)state;
    struct dh *d = dh_start("tiny-llama.gguf", NULL);
    unsigned at_rest = dh_fds(d);
    uint64_t rss = 0;
    for (unsigned i = 0; i < 300; i++) {
        struct raw *r = client(d);
        struct raw_session *s = raw_open(r, NULL);
        if (i % 10 == 0) {
            raw_generate(s, "hello", 5, NULL);
            raw_collect(s);
        }
        raw_session_free(&s);
        raw_close(&r);
        if (i == 99) {
            fds_return(d, at_rest);
            rss = dh_rss(d);
        }
    }
    fds_return(d, at_rest);
    if (dh_rss(d) > rss + GROWTH_MAX)
        fail_msg("memory grew from %llu to %llu", (unsigned long long)rss,
                 (unsigned long long)dh_rss(d));
    dh_stop(&d);
}

/* ---- another user */

static int as_nobody(const struct dh *d, uint64_t session, const char *model)
{
    Backcast__OpenSession m = BACKCAST__OPEN_SESSION__INIT;
    Backcast__Close c = BACKCAST__CLOSE__INIT;
    Backcast__Prune p = BACKCAST__PRUNE__INIT;
    Backcast__Scores sc = BACKCAST__SCORES__INIT;
    Backcast__Stat st = BACKCAST__STAT__INIT;
    Backcast__LoadModel l = BACKCAST__LOAD_MODEL__INIT;
    Backcast__Attach a = BACKCAST__ATTACH__INIT;
    if (setgid(NOBODY) < 0 || setuid(NOBODY) < 0)
        return 2;
    struct raw *r = client(d);
    assert_int_equal(r->hello.uid, NOBODY);
    assert_false(r->hello.admin);
    m.has_model = 1;
    m.model = (ProtobufCBinaryData){strlen(model), (uint8_t *)(uintptr_t)model};
    raw_call_fails(r, FRAME_OPEN_SESSION, &m.base, 9, "model"); /* paths are the daemon's user's */
    m.model = (ProtobufCBinaryData){7, (uint8_t *)"./x.bin"};
    raw_call_fails(r, FRAME_OPEN_SESSION, &m.base, 9, "model");
    c.has_session = p.has_session = sc.has_session = st.has_session = 1;
    c.session = p.session = sc.session = st.session = session;
    raw_call_fails(r, FRAME_CLOSE, &c.base, 9, "session");
    raw_call_fails(r, FRAME_PRUNE, &p.base, 9, "session");
    raw_call_fails(r, FRAME_SCORES, &sc.base, 9, "session");
    raw_call_fails(r, FRAME_STAT, &st.base, 9, "session");
    raw_call_fails(r, FRAME_LOAD_MODEL, &l.base, 9, NULL);
    a.has_name = 1;
    a.name = (ProtobufCBinaryData){6, (uint8_t *)"roots."};
    raw_call_fails(r, FRAME_ATTACH, &a.base, 2, "name");
    struct raw_session *s = raw_open(r, NULL);
    raw_generate(s, "hello", 5, NULL);
    raw_collect(s);
    st.has_session = 0;
    const Backcast__StatReply *reply = raw_call(r, FRAME_STAT, &st.base, FRAME_STAT_REPLY);
    assert_int_equal(reply->n_sessions, 1); /* its own, and no other */
    assert_int_equal(reply->sessions[0]->session, s->id);
    struct statpage *page = mmap(NULL, r->hello.stats_bytes, PROT_READ, MAP_SHARED, r->stats_fd, 0);
    struct statpage_copy copy = {0};
    struct stat_entry e[4];
    for (unsigned i = 0; i < 300 && copy.n_entries == 0; i++) {
        usleep(10000);
        assert_int_equal(statpage_read(page, r->hello.stats_bytes, &copy, e, 4, NULL), WIRE_OK);
    }
    assert_int_equal(copy.uid, NOBODY);
    assert_int_equal(copy.n_entries, 1);
    assert_int_equal(copy.counters[STAT_sessions], 1);
    assert_int_equal(copy.counters[STAT_connections], 1);
    return 0;
}

static void users_are_apart(void **state)
{
    (void)state;
    if (getuid() != 0)
        skip(); /* only root can be two users */
    const char *const args[] = {"--socket-mode=0666", NULL};
    struct dh *d = dh_start("tiny-llama.gguf", args);
    char path[80];
    snprintf(path, sizeof path, "%s/s", d->dir);
    assert_int_equal(chmod(d->dir, 0755) | chmod(path, 0755), 0);
    struct raw *r = client(d);
    struct raw_session *s = raw_open(r, NULL);
    pid_t child = fork();
    if (child == 0)
        _exit(as_nobody(d, s->id, TEST_VECTORS "/tiny-llama.gguf"));
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    raw_generate(s, "hello", 5, NULL);
    raw_collect(s);
    raw_session_free(&s);
    raw_close(&r);
    dh_stop(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(connections_are_counted),
        cmocka_unit_test(sessions_and_rings_are_counted),
        cmocka_unit_test(requests_and_queued_bytes_are_counted),
        cmocka_unit_test(frames_are_rationed_not_refused),
        cmocka_unit_test(a_client_that_takes_no_replies_is_left_alone),
        cmocka_unit_test(no_descriptors_left_is_answered),
        cmocka_unit_test(listings_come_in_pieces),
        cmocka_unit_test(coming_and_going_leaves_nothing),
        cmocka_unit_test(users_are_apart),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
