/* test_client_wire.c: libbackcast against a daemon of the test's own: what goes over the socket and
 * the rings, and what events and errors come of it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>
#include "backcast.h"
#include "fake_daemon.h"

static int open_fds(void)
{
    DIR *d = opendir("/proc/self/fd");
    int n = 0;
    while (readdir(d) != NULL)
        n++;
    closedir(d);
    return n;
}

static bool readable(backcast *c)
{
    struct pollfd p = {.fd = backcast_fd(c), .events = POLLIN};
    return poll(&p, 1, 0) == 1;
}

static void accepted(struct fake *f)
{
    Backcast__Accepted a = BACKCAST__ACCEPTED__INIT;
    fake_request(f, FRAME_GENERATE);
    fake_reply(f, FRAME_ACCEPTED, &a.base);
}

/* ---- a connection */

static void connects_nowhere(void **state)
{
    (void)state;
    backcast *c = NULL;
    char path[300];

    assert_int_equal(backcast_connect(&c, "/tmp/bc-there-is-no-such-socket"), BACKCAST_ENOTFOUND);
    assert_null(c);
    assert_non_null(strstr(backcast_last_error(NULL), "/tmp/bc-there-is-no-such-socket"));
    assert_string_equal(backcast_last_error_field(NULL), "socket_path");
    memset(path, 'x', sizeof(path));
    path[0] = '/';
    path[sizeof(path) - 1] = '\0';
    assert_int_equal(backcast_connect(&c, path), BACKCAST_EINVALID);
    assert_null(c);
}

static void script_hello(struct fake *f, void *arg)
{
    (void)arg;
    fake_hello(f);
    fake_wait(f, 1);
}

static void hello_brings_version_and_models(void **state)
{
    (void)state;
    backcast *c = NULL;
    struct fake *f = fake_start(script_hello, NULL);

    assert_int_equal(backcast_connect(&c, fake_path(f)), 0);
    assert_string_equal(backcast_daemon_version(c), "fake 1");
    assert_string_equal(backcast_model_name(c, 0), "first"); /* the default one comes first, once */
    assert_string_equal(backcast_model_name(c, 1), "second");
    assert_null(backcast_model_name(c, 2));
    fake_say(f, 1);
    backcast_disconnect(&c);
    assert_null(c);
    fake_stop(&f);
}

static void script_refuse(struct fake *f, void *arg)
{
    (void)arg;
    fake_accept(f);
    fake_request(f, FRAME_HELLO);
    fake_error(f, -BACKCAST_EVERSION, "min_version", "versions 7 to 9 only");
}

static void refusal_keeps_sentence_and_field(void **state)
{
    (void)state;
    backcast *c = NULL;
    uint64_t needed, available;
    struct fake *f = fake_start(script_refuse, NULL);

    assert_int_equal(backcast_connect(&c, fake_path(f)), BACKCAST_EVERSION);
    assert_null(c);
    assert_string_equal(backcast_last_error(NULL), "versions 7 to 9 only");
    assert_string_equal(backcast_last_error_field(NULL), "min_version");
    backcast_last_error_amounts(NULL, &needed, &available);
    assert_int_equal(needed, 7);
    assert_int_equal(available, 5);
    fake_stop(&f);
}

/* ---- a session's stream */

static void script_stream(struct fake *f, void *arg)
{
    struct fake_session s;
    struct record_progress progress = {30, 70};
    struct {
        struct record_logprob l;
        struct backcast_top top[2];
    } lp = {{77, 5, -0.5f, 2, 1}, {{5, -0.5f}, {6, -1.5f}}};
    struct record_pruned p = {.tokens_before = 64,
                              .tokens_after = 48,
                              .live_before = 6400,
                              .live_after = 4800,
                              .held_before = 8192,
                              .held_after = 8192,
                              .micros = 1234,
                              .policy = "counter_causal_fast",
                              .reason = 3};
    struct backcast_range ranges[6] = {{2, 3}, {9, 1}, {20, 4}, {30, 2}, {40, 5}, {50, 1}};
    struct record_rerotated turned = {.stream = 9000, .tokens = 48, .position = 8192, .micros = 77};

    (void)arg;
    fake_hello(f);
    fake_opened(f, &s, 3);
    accepted(f);
    fake_record(&s, RECORD_PROGRESS, 0, &progress, sizeof(progress));
    fake_record(&s, RECORD_LOGPROBS, 0, &lp, sizeof(lp));
    fake_text(&s, "h\xc3\xa9llo");
    p.n_ranges = 3;
    fake_record_2(&s, RECORD_PRUNED, RECORD_FLAG_MORE, &p, sizeof(p), ranges, 3 * sizeof(*ranges));
    p.n_ranges = 2;
    fake_record_2(&s, RECORD_PRUNED, RECORD_FLAG_MORE, &p, sizeof(p), ranges + 3,
                  2 * sizeof(*ranges));
    p.n_ranges = 1;
    fake_record_2(&s, RECORD_PRUNED, 0, &p, sizeof(p), ranges + 5, sizeof(*ranges));
    fake_record_2(&s, RECORD_PRUNED, 0, &p, sizeof(p), ranges, sizeof(*ranges));
    fake_record(&s, RECORD_REROTATED, 0, &turned, sizeof(turned));
    fake_record(&s, 63, 0, "of a later version", 18);
    fake_text(&s, "");
    fake_end(&s, END_LENGTH);
    fake_wait(f, 1);
    fake_session_free(&s);
}

static void check_first_events(backcast *c, backcast_session *s)
{
    struct backcast_event ev;

    assert_int_equal(backcast_next(c, &ev, 5000), 1);
    assert_int_equal(ev.type, BACKCAST_PROGRESS);
    assert_ptr_equal(ev.session, s);
    assert_int_equal(ev.progress.done, 30);
    assert_int_equal(ev.progress.total, 70);
    assert_int_equal(backcast_next(c, &ev, 5000), 1);
    assert_int_equal(ev.type, BACKCAST_LOGPROB);
    assert_int_equal(ev.logprob.stream, 77);
    assert_int_equal(ev.logprob.n_top, 2);
    assert_int_equal(ev.logprob.top[1].id, 6);
    assert_true(ev.logprob.top[1].logprob == -1.5f && ev.logprob.prompt == 1);
    assert_int_equal(backcast_next(c, &ev, 5000), 1);
    assert_int_equal(ev.type, BACKCAST_TEXT);
    assert_int_equal(ev.text.len, 6);
    assert_memory_equal(ev.text.text, "h\xc3\xa9llo", 6);
    assert_int_equal(ev.text.n_ids, 2);
    assert_int_equal(ev.text.ids[1], 12);
    assert_int_equal(ev.text.first_stream, 40);
    assert_int_equal(ev.seq, 3);
}

static void script_hello_only(struct fake *f, void *arg)
{
    (void)arg;
    fake_hello(f);
    fake_wait(f, 1);
}

/* A daemon of before would ignore the field, and the session would end where it was not to. */
static void what_the_daemon_does_not_know_is_refused(void **state)
{
    (void)state;
    backcast *c = NULL;
    backcast_session *s = NULL;
    struct backcast_session_options so;
    struct fake *f = fake_start(script_hello_only, NULL);

    assert_int_equal(backcast_connect(&c, fake_path(f)), 0);
    backcast_session_options_init(&so);
    so.positions = "rerotate";
    assert_int_equal(backcast_session_open(c, &so, &s), BACKCAST_EUNSUPPORTED);
    assert_string_equal(backcast_last_error_field(c), "positions");
    assert_null(s);
    fake_say(f, 1);
    backcast_disconnect(&c);
    fake_stop(&f);
}

static void records_become_events(void **state)
{
    (void)state;
    backcast *c = NULL;
    backcast_session *s = NULL;
    struct backcast_event ev;
    int before = open_fds();
    struct fake *f = fake_start(script_stream, NULL);

    assert_int_equal(backcast_connect(&c, fake_path(f)), 0);
    assert_int_equal(backcast_session_open(c, NULL, &s), 0);
    assert_int_equal(backcast_chat(s, "user", "hi", 2, NULL), 0);
    assert_int_equal(backcast_chat(s, "user", "hi", 2, NULL), BACKCAST_EBUSY);
    check_first_events(c, s);
    assert_int_equal(backcast_next(c, &ev, 5000), 1); /* three records, one event */
    assert_int_equal(ev.type, BACKCAST_PRUNED);
    assert_int_equal(ev.pruned.n_dropped, 6);
    assert_int_equal(ev.pruned.dropped[0].first, 2);
    assert_int_equal(ev.pruned.dropped[5].first, 50);
    assert_int_equal(ev.pruned.tokens_after, 48);
    assert_int_equal(ev.pruned.held_before, 8192);
    assert_string_equal(ev.pruned.policy, "counter_causal_fast");
    assert_string_equal(ev.pruned.reason, "shrunk");
    assert_int_equal(backcast_next(c, &ev, 5000), 1); /* and a whole one after it */
    assert_int_equal(ev.pruned.n_dropped, 1);
    assert_int_equal(ev.pruned.dropped[0].count, 3);
    assert_int_equal(backcast_next(c, &ev, 5000), 1);
    assert_int_equal(ev.type, BACKCAST_REROTATED);
    assert_int_equal(ev.rerotated.stream, 9000);
    assert_int_equal(ev.rerotated.tokens, 48);
    assert_int_equal(ev.rerotated.position, 8192);
    assert_int_equal(ev.rerotated.micros, 77);
    assert_int_equal(backcast_next(c, &ev, 5000), 1);
    assert_int_equal(ev.type, BACKCAST_TEXT);
    assert_int_equal(ev.text.len, 0);
    assert_int_equal(backcast_next(c, &ev, 5000), 1);
    assert_int_equal(ev.type, BACKCAST_END);
    assert_string_equal(ev.end.reason, "length");
    assert_int_equal(ev.end.tokens_cached, 5);
    assert_int_equal(ev.end.end_id, -1);
    assert_int_equal(backcast_next(c, &ev, 0), 0);
    fake_say(f, 1);
    backcast_disconnect(&c);
    fake_stop(&f);
    assert_int_equal(open_fds(), before);
}

static void script_poll(struct fake *f, void *arg)
{
    struct fake_session s;
    (void)arg;
    fake_hello(f);
    fake_opened(f, &s, 3);
    fake_wait(f, 1);
    fake_text(&s, "a");
    fake_text(&s, "b");
    fake_say(f, 2);
    fake_wait(f, 3);
    fake_text(&s, "c");
    fake_hang_up(f);
    fake_say(f, 4);
    fake_wait(f, 5);
    fake_session_free(&s);
}

static void fd_is_readable_exactly_when_there_is_something(void **state)
{
    (void)state;
    backcast *c = NULL;
    backcast_session *s = NULL;
    struct backcast_event ev;
    struct fake *f = fake_start(script_poll, NULL);

    assert_int_equal(backcast_connect(&c, fake_path(f)), 0);
    assert_int_equal(backcast_session_open(c, NULL, &s), 0);
    assert_false(readable(c));
    fake_say(f, 1);
    fake_wait(f, 2);
    assert_true(readable(c));
    assert_int_equal(backcast_next(c, &ev, 0), 1);
    assert_int_equal(backcast_next(c, &ev, 0), 1);
    assert_int_equal(ev.text.text[0], 'b');
    assert_int_equal(backcast_next(c, &ev, 0), 0);
    assert_false(readable(c));
    fake_say(f, 3);
    fake_wait(f, 4);
    assert_true(readable(c));
    assert_int_equal(backcast_next(c, &ev, 0), 1); /* what came before the end comes first */
    assert_int_equal(ev.text.text[0], 'c');
    assert_int_equal(backcast_next(c, &ev, 0), BACKCAST_ECLOSED);
    assert_int_equal(backcast_session_prune(s, 0), BACKCAST_ECLOSED);
    assert_int_equal(backcast_next(c, &ev, -1), BACKCAST_ECLOSED); /* does not wait for ever */
    fake_say(f, 5);
    backcast_session_close(&s);
    backcast_disconnect(&c);
    fake_stop(&f);
}

/* ---- long prompts */

#define LONG_BYTES 300001u

static char *long_text(void)
{
    char *t = malloc(LONG_BYTES);
    for (size_t i = 0; i < LONG_BYTES; i++)
        t[i] = (char)(i * 7 + i / 251);
    return t;
}

static void script_upload(struct fake *f, void *arg)
{
    struct fake_session s;
    Backcast__Accepted a = BACKCAST__ACCEPTED__INIT;
    static unsigned char buf[RING_BYTES_DEFAULT];
    struct record_head h;
    char *want = long_text();
    size_t at = 0;

    (void)arg;
    fake_hello(f);
    fake_opened(f, &s, 1);
    const Backcast__Generate *g = (const Backcast__Generate *)fake_request(f, FRAME_GENERATE);
    FAKE_REQUIRE(g->ring_bytes == LONG_BYTES && g->has_ring_seq && g->ring_seq == 1);
    FAKE_REQUIRE(!g->has_text);
    while (at < LONG_BYTES) {
        struct record_prompt p;
        int rc = ring_reader_take(&s.in, &h, buf, sizeof(buf));
        FAKE_REQUIRE(rc >= 0);
        if (rc == 0) {
            struct pollfd bell = {.fd = s.c2d_bell, .events = POLLIN};
            uint64_t n;
            if (ring_reader_release(&s.in))
                FAKE_REQUIRE(send(s.bell, "!", 1, MSG_NOSIGNAL) == 1);
            if (ring_reader_sleep(&s.in) == 0)
                FAKE_REQUIRE(poll(&bell, 1, 5000) == 1);
            if (read(s.c2d_bell, &n, sizeof(n)) < 0)
                n = 0;
            continue;
        }
        FAKE_REQUIRE(h.type == RECORD_PROMPT);
        memcpy(&p, buf, sizeof(p));
        FAKE_REQUIRE(p.offset == at);
        FAKE_REQUIRE(p.total == LONG_BYTES);
        FAKE_REQUIRE(memcmp(buf + sizeof(p), want + at, h.len - sizeof(p)) == 0);
        at += h.len - sizeof(p);
    }
    fake_reply(f, FRAME_ACCEPTED, &a.base);
    fake_end(&s, END_STOP);
    uint64_t seq = h.seq;
    g = (const Backcast__Generate *)fake_request(f, FRAME_GENERATE);
    FAKE_REQUIRE(g->ring_seq == seq + 1);
    /* this one is refused while it is being written */
    fake_error(f, -BACKCAST_EBUDGET, "text", "longer than the budget");
    fake_wait(f, 1);
    fake_session_free(&s);
    free(want);
}

static void long_prompts_go_by_ring(void **state)
{
    (void)state;
    backcast *c = NULL;
    backcast_session *s = NULL;
    struct backcast_event ev;
    char *text = long_text();
    struct fake *f = fake_start(script_upload, NULL);

    assert_int_equal(backcast_connect(&c, fake_path(f)), 0);
    assert_int_equal(backcast_session_open(c, NULL, &s), 0);
    assert_int_equal(backcast_prompt(s, text, LONG_BYTES, NULL), 0);
    assert_int_equal(backcast_next(c, &ev, 5000), 1);
    assert_int_equal(ev.type, BACKCAST_END);
    assert_int_equal(backcast_prompt(s, text, LONG_BYTES, NULL), BACKCAST_EBUDGET);
    assert_string_equal(backcast_last_error_field(c), "text");
    fake_say(f, 1);
    backcast_disconnect(&c);
    fake_stop(&f);
    free(text);
}

/* ---- replies, scores, reconnect */

static void script_cancel(struct fake *f, void *arg)
{
    struct fake_session s;
    Backcast__Done done = BACKCAST__DONE__INIT;
    Backcast__Pruned pruned = BACKCAST__PRUNED__INIT;
    Backcast__Accepted a = BACKCAST__ACCEPTED__INIT;
    struct record_scores r = {.offset = 0, .total = 2, .n_rows = 1};
    struct record_score rows[2] = {{1, 10, 1, -0.25f, 1}, {4, 11, 4, 2.5f, 2}};

    (void)arg;
    fake_hello(f);
    fake_opened(f, &s, 1);
    accepted(f);
    fake_request(f, FRAME_CANCEL);
    fake_reply(f, FRAME_DONE, &done.base); /* nobody waits for this one */
    fake_request(f, FRAME_PRUNE);
    fake_reply(f, FRAME_PRUNED, &pruned.base);
    fake_end(&s, END_CANCELLED);
    fake_wait(f, 1);
    fake_request(f, FRAME_SCORES);
    fake_reply(f, FRAME_ACCEPTED, &a.base);
    fake_text(&s, "not a score");
    fake_record_2(&s, RECORD_SCORES, RECORD_FLAG_MORE, &r, sizeof(r), &rows[0], sizeof(*rows));
    r.offset = 1;
    fake_record_2(&s, RECORD_SCORES, 0, &r, sizeof(r), &rows[1], sizeof(*rows));
    fake_end(&s, END_SCORES);
    fake_wait(f, 2);
    fake_session_free(&s);
}

static void late_replies_are_dropped_and_scores_leave_events_alone(void **state)
{
    (void)state;
    backcast *c = NULL;
    backcast_session *s = NULL;
    struct backcast_event ev;
    struct backcast_score *rows = NULL;
    size_t n = 0;
    struct fake *f = fake_start(script_cancel, NULL);

    assert_int_equal(backcast_connect(&c, fake_path(f)), 0);
    assert_int_equal(backcast_session_open(c, NULL, &s), 0);
    assert_int_equal(backcast_chat(s, NULL, "x", 1, NULL), 0);
    assert_int_equal(backcast_session_scores(s, &rows, &n), BACKCAST_EBUSY);
    assert_int_equal(backcast_cancel(s), 0);
    assert_int_equal(backcast_session_prune(s, 0), 0);
    assert_int_equal(backcast_next(c, &ev, 5000), 1);
    assert_string_equal(ev.end.reason, "cancelled");
    fake_say(f, 1);
    assert_int_equal(backcast_session_scores(s, &rows, &n), 0);
    assert_int_equal(n, 2);
    assert_int_equal(rows[0].id, 10);
    assert_true(rows[1].score == 2.5f && rows[1].flags == 2 && rows[1].stream == 4);
    free(rows);
    assert_true(readable(c)); /* an event waits that no bell will announce again */
    assert_int_equal(backcast_next(c, &ev, 0), 1);
    assert_int_equal(ev.type, BACKCAST_TEXT);
    assert_memory_equal(ev.text.text, "not a score", 11);
    assert_int_equal(backcast_next(c, &ev, 0), 0);
    fake_say(f, 2);
    backcast_disconnect(&c);
    fake_stop(&f);
}

static void script_reconnect(struct fake *f, void *arg)
{
    struct fake_session s[3];
    (void)arg;
    fake_hello(f);
    fake_opened(f, &s[0], 8);
    fake_opened(f, &s[1], 9); /* "nine" has a name */
    fake_text(&s[1], "one");
    fake_wait(f, 1);
    fake_hang_up(f);
    fake_session_free(&s[0]);
    fake_session_free(&s[1]);
    fake_hello(f);
    const Backcast__Attach *a = (const Backcast__Attach *)fake_request(f, FRAME_ATTACH);
    FAKE_REQUIRE(a->session == 9);
    FAKE_REQUIRE(a->token.len == 16);
    FAKE_REQUIRE(a->last_seq == 1);
    fake_session_make(&s[2], 9, RING_BYTES_DEFAULT);
    s[2].generation = 200;
    atomic_store(&s[2].d2c->generation, 200);
    fake_session_reply(f, &s[2]);
    struct record_lost lost = {2, 5};
    fake_record(&s[2], RECORD_LOST, 0, &lost, sizeof(lost));
    s[2].out.seq = 6;
    fake_text(&s[2], "after the gap");
    fake_wait(f, 2);
    fake_session_free(&s[2]);
}

static void reconnect_attaches_named_sessions(void **state)
{
    (void)state;
    backcast *c = NULL;
    backcast_session *s[2] = {NULL, NULL};
    struct backcast_event ev;
    int before = open_fds();
    struct fake *f = fake_start(script_reconnect, NULL);

    assert_int_equal(backcast_connect(&c, fake_path(f)), 0);
    for (int i = 0; i < 2; i++)
        assert_int_equal(backcast_session_open(c, NULL, &s[i]), 0);
    assert_int_equal(backcast_next(c, &ev, 5000), 1);
    fake_say(f, 1);
    assert_int_equal(backcast_next(c, &ev, 5000), BACKCAST_ECLOSED);
    int fd = backcast_fd(c);
    assert_int_equal(backcast_reconnect(c), 1);
    assert_int_equal(backcast_fd(c), fd); /* an event loop need not change a thing */
    assert_int_equal(backcast_chat(s[0], NULL, "x", 1, NULL), BACKCAST_ECLOSED);
    assert_int_equal(backcast_next(c, &ev, 5000), 1);
    assert_int_equal(ev.type, BACKCAST_LOST);
    assert_int_equal(ev.lost.count, 5);
    assert_int_equal(backcast_next(c, &ev, 5000), 1);
    assert_int_equal(ev.type, BACKCAST_TEXT);
    assert_ptr_equal(ev.session, s[1]);
    assert_int_equal(ev.seq, 7);
    fake_say(f, 2);
    backcast_disconnect(&c);
    fake_stop(&f);
    assert_int_equal(open_fds(), before);
}

static void script_attach(struct fake *f, void *arg)
{
    struct fake_session s;
    (void)arg;
    fake_hello(f);
    const Backcast__Attach *a = (const Backcast__Attach *)fake_request(f, FRAME_ATTACH);
    FAKE_REQUIRE(a->name.len == 4 && memcmp(a->name.data, "nine", 4) == 0 && a->last_seq == 0);
    fake_session_make(&s, 9, RING_BYTES_DEFAULT);
    s.last_seq = 2;
    fake_session_reply(f, &s);
    accepted(f);
    fake_text(&s, "of another client");
    fake_end(&s, END_CANCELLED); /* the end of its request, not of ours */
    fake_wait(f, 1);
    fake_text(&s, "ours");
    fake_end(&s, END_STOP);
    fake_wait(f, 2);
    fake_session_free(&s);
}

static void ends_of_an_earlier_client_are_not_ours(void **state)
{
    (void)state;
    backcast *c = NULL;
    backcast_session *s = NULL;
    struct backcast_session_info info;
    struct backcast_event ev;
    struct fake *f = fake_start(script_attach, NULL);

    assert_int_equal(backcast_connect(&c, fake_path(f)), 0);
    assert_int_equal(backcast_session_attach(c, "nine", &s), 0);
    assert_int_equal(backcast_session_info(s, &info), 0);
    assert_int_equal(info.replay_seq, 2);
    assert_string_equal(info.name, "nine");
    assert_int_equal(backcast_chat(s, NULL, "x", 1, NULL), 0);
    for (int i = 0; i < 2; i++)
        assert_int_equal(backcast_next(c, &ev, 5000), 1);
    assert_int_equal(ev.type, BACKCAST_END);
    assert_int_equal(backcast_chat(s, NULL, "x", 1, NULL), BACKCAST_EBUSY);
    fake_say(f, 1);
    for (int i = 0; i < 2; i++)
        assert_int_equal(backcast_next(c, &ev, 5000), 1);
    assert_string_equal(ev.end.reason, "stop");
    fake_say(f, 2);
    backcast_disconnect(&c);
    fake_stop(&f);
}

static void script_cloexec(struct fake *f, void *arg)
{
    struct fake_session s;
    (void)arg;
    fake_hello(f);
    fake_opened(f, &s, 1);
    fake_wait(f, 1);
    fake_session_free(&s);
}

static void every_descriptor_closes_on_exec(void **state)
{
    (void)state;
    backcast *c = NULL;
    backcast_session *s = NULL;
    bool known[1024] = {false};
    for (int fd = 0; fd < 1024; fd++)
        known[fd] = fcntl(fd, F_GETFD) >= 0;
    struct fake *f = fake_start(script_cloexec, NULL);

    assert_int_equal(backcast_connect(&c, fake_path(f)), 0);
    assert_int_equal(backcast_session_open(c, NULL, &s), 0);
    for (int fd = 0; fd < 1024; fd++) {
        int flags = fcntl(fd, F_GETFD);
        char link[64], name[128] = "";
        snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
        if (flags < 0 || known[fd] || readlink(link, name, sizeof(name) - 1) < 0)
            continue;
        if (!(flags & FD_CLOEXEC) && strstr(name, "eventfd") == NULL) /* the fake's dup of a bell */
            fail_msg("descriptor %d (%s) would survive exec", fd, name);
    }
    fake_say(f, 1);
    backcast_disconnect(&c);
    fake_stop(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(connects_nowhere),
        cmocka_unit_test(hello_brings_version_and_models),
        cmocka_unit_test(refusal_keeps_sentence_and_field),
        cmocka_unit_test(what_the_daemon_does_not_know_is_refused),
        cmocka_unit_test(records_become_events),
        cmocka_unit_test(fd_is_readable_exactly_when_there_is_something),
        cmocka_unit_test(long_prompts_go_by_ring),
        cmocka_unit_test(late_replies_are_dropped_and_scores_leave_events_alone),
        cmocka_unit_test(reconnect_attaches_named_sessions),
        cmocka_unit_test(ends_of_an_earlier_client_are_not_ours),
        cmocka_unit_test(every_descriptor_closes_on_exec),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
