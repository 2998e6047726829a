/* test_client_lies.c: libbackcast against a daemon that lies: on the socket, about memory, and in the
 * rings. Every lie ends the session or the connection with a sentence, and no descriptor is left. */
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

static void accepted(struct fake *f)
{
    Backcast__Accepted a = BACKCAST__ACCEPTED__INIT;
    fake_request(f, FRAME_GENERATE);
    fake_reply(f, FRAME_ACCEPTED, &a.base);
}

/* What answers Hello; each must end in BACKCAST_EPROTOCOL (closed: _ECLOSED) without a leak. */
enum bad_hello {
    BAD_MAGIC,
    BAD_FLAGS,
    BAD_LENGTH,
    BAD_FDS_UNSAID,
    BAD_FDS_MANY,
    BAD_FDS_MISSING,
    BAD_FDS_INSIDE,
    BAD_TYPE,
    BAD_PAYLOAD,
    BAD_CLOSED,
    N_BAD_HELLO
};

static void script_bad_hello(struct fake *f, void *arg)
{
    enum bad_hello kind = *(enum bad_hello *)arg;
    uint8_t b[FRAME_HEAD_BYTES + 8] = {0};
    struct frame_head h = {.len = 8, .type = FRAME_HELLO_REPLY, .flags = FRAME_REPLY};
    int fds[16], n = 0;

    fake_accept(f);
    fake_request(f, FRAME_HELLO);
    h.request_id = fake_request_id(f);
    if (kind == BAD_TYPE)
        h.type = FRAME_CLOSED;
    if (kind == BAD_FDS_MISSING || kind == BAD_FDS_MANY)
        h.flags |= FRAME_HAS_FDS;
    frame_put(&h, b);
    memset(b + FRAME_HEAD_BYTES, 0xff, 8); /* no protobuf */
    if (kind == BAD_MAGIC)
        b[6] = 99;
    if (kind == BAD_FLAGS)
        b[7] |= 0x80;
    if (kind == BAD_LENGTH)
        b[2] = b[3] = 0xff;
    if (kind == BAD_FDS_UNSAID)
        n = 1;
    if (kind == BAD_FDS_MANY)
        n = 16;
    for (int i = 0; i < n; i++)
        fds[i] = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (kind == BAD_FDS_INSIDE) {
        fds[0] = open("/dev/null", O_RDONLY | O_CLOEXEC);
        fake_send(f, b, FRAME_HEAD_BYTES, NULL, 0);
        fake_send(f, b + FRAME_HEAD_BYTES, 8, fds, 1);
        n = 1;
    } else if (kind == BAD_CLOSED) {
        fake_send(f, b, 7, NULL, 0); /* half a header */
    } else {
        fake_send(f, b, sizeof(b), fds, n);
    }
    for (int i = 0; i < n; i++)
        close(fds[i]);
    fake_hang_up(f);
}

static void malformed_answers_end_the_connection(void **state)
{
    (void)state;
    for (enum bad_hello kind = 0; kind < N_BAD_HELLO; kind++) {
        backcast *c = NULL;
        int before = open_fds();
        struct fake *f = fake_start(script_bad_hello, &kind);
        int rc = backcast_connect(&c, fake_path(f));
        if (rc != (kind == BAD_CLOSED ? BACKCAST_ECLOSED : BACKCAST_EPROTOCOL))
            fail_msg("case %d: %d (%s)", kind, rc, backcast_last_error(NULL));
        assert_null(c);
        assert_true(strlen(backcast_last_error(NULL)) > 10);
        fake_stop(&f);
        if (open_fds() != before)
            fail_msg("case %d leaves %d descriptors", kind, open_fds() - before);
    }
}

/* ---- lies in a ring */

enum lie {
    LIE_TOKENS_SHORT,
    LIE_TOKENS_IDS,
    LIE_TOKENS_TEXT,
    LIE_LOGPROB_TOP,
    LIE_PROGRESS,
    LIE_PRUNED_COUNT,
    LIE_PRUNED_BROKEN,
    LIE_SCORES_ROWS,
    LIE_SCORES_TOTAL,
    LIE_END_SHORT,
    LIE_END_TEXT,
    LIE_LOST,
    LIE_SEQ,
    LIE_TAIL_BACK,
    LIE_TAIL_FAR,
    LIE_TAIL_ODD,
    LIE_HEADER,
    LIE_CLOSED,
    N_LIES
};

/* Words of shared memory that no honest daemon stores. */
static void cursor_lie(struct fake_session *s, enum lie lie)
{
    struct record_head h = {.len = 60000, .type = RECORD_TOKENS, .seq = 1};

    switch (lie) {
    case LIE_TAIL_BACK:
        atomic_store(&s->d2c->tail, UINT64_MAX - 15);
        break;
    case LIE_TAIL_FAR:
        atomic_store(&s->d2c->tail, s->size + 16);
        break;
    case LIE_TAIL_ODD:
        atomic_store(&s->d2c->tail, 24);
        break;
    case LIE_HEADER:
        memcpy(s->d2c->data, &h, sizeof(h));
        atomic_store(&s->d2c->tail, 64);
        break;
    default:
        fake_give_up(__FILE__, __LINE__, "a lie of that name");
    }
}

static void tell_lie(struct fake_session *s, enum lie lie)
{
    struct record_tokens t = {0, 1u << 30, 4};
    struct record_logprob l = {.n_top = 0xffffffff};
    struct record_pruned p = {.n_ranges = 5};
    struct record_scores r = {.offset = 0, .total = 4, .n_rows = 4};
    struct record_end e = {.text_len = 9};
    struct record_lost lost = {.first_seq = 900, .count = 1};
    char zeroes[96] = {0};

    switch (lie) {
    case LIE_TOKENS_SHORT:
        fake_record(s, RECORD_TOKENS, 0, &t, 9);
        return;
    case LIE_TOKENS_IDS:
        fake_record_2(s, RECORD_TOKENS, 0, &t, sizeof(t), zeroes, 8);
        return;
    case LIE_TOKENS_TEXT:
        t.n_ids = 1;
        fake_record_2(s, RECORD_TOKENS, 0, &t, sizeof(t), zeroes, 7);
        return;
    case LIE_LOGPROB_TOP:
        fake_record_2(s, RECORD_LOGPROBS, 0, &l, sizeof(l), zeroes, 8);
        return;
    case LIE_PROGRESS:
        fake_record(s, RECORD_PROGRESS, 0, zeroes, 12);
        return;
    case LIE_PRUNED_COUNT:
        fake_record_2(s, RECORD_PRUNED, 0, &p, sizeof(p), zeroes, 64);
        return;
    case LIE_PRUNED_BROKEN:
        p.n_ranges = 1;
        fake_record_2(s, RECORD_PRUNED, RECORD_FLAG_MORE, &p, sizeof(p), zeroes, 16);
        fake_text(s, "not the rest of it");
        return;
    case LIE_SCORES_ROWS:
        fake_record_2(s, RECORD_SCORES, 0, &r, sizeof(r), zeroes, 72);
        return;
    case LIE_SCORES_TOTAL:
        r.offset = 1;
        fake_record_2(s, RECORD_SCORES, 0, &r, sizeof(r), zeroes, 96);
        return;
    case LIE_END_SHORT:
        fake_record(s, RECORD_END, 0, &e, 20);
        return;
    case LIE_END_TEXT:
        fake_record_2(s, RECORD_END, 0, &e, sizeof(e), zeroes, 8);
        return;
    case LIE_LOST:
        fake_record(s, RECORD_LOST, 0, &lost, sizeof(lost));
        return;
    case LIE_SEQ:
        s->out.seq = 41;
        fake_text(s, "x");
        return;
    case LIE_CLOSED:
        atomic_store(&s->d2c->error, -BACKCAST_EPROTOCOL);
        atomic_store(&s->d2c->state, RING_CLOSED);
        break;
    default:
        cursor_lie(s, lie);
        break;
    }
    send(s->bell, "!", 1, MSG_NOSIGNAL);
}

static void script_lies(struct fake *f, void *arg)
{
    struct fake_session s[2];

    fake_hello(f);
    fake_opened(f, &s[0], 1);
    fake_opened(f, &s[1], 2);
    accepted(f);
    accepted(f);
    tell_lie(&s[0], *(enum lie *)arg);
    fake_text(&s[1], "still here");
    fake_end(&s[1], END_STOP);
    fake_wait(f, 1);
    fake_session_free(&s[0]);
    fake_session_free(&s[1]);
}

/* The lying session ends with one END "error"; its neighbour gets all of its own. */
static void check_lie(enum lie lie)
{
    backcast *c = NULL;
    backcast_session *s[2] = {NULL, NULL};
    struct backcast_event ev;
    int ends[2] = {0, 0}, texts = 0;
    struct fake *f = fake_start(script_lies, &lie);

    assert_int_equal(backcast_connect(&c, fake_path(f)), 0);
    for (int i = 0; i < 2; i++)
        assert_int_equal(backcast_session_open(c, NULL, &s[i]), 0);
    for (int i = 0; i < 2; i++)
        assert_int_equal(backcast_chat(s[i], NULL, "x", 1, NULL), 0);
    while (ends[0] + ends[1] < 2) {
        int rc = backcast_next(c, &ev, 5000);
        if (rc != 1)
            fail_msg("lie %d: next gave %d (%s)", lie, rc, backcast_last_error(c));
        texts += ev.type == BACKCAST_TEXT && ev.session == s[1];
        if (ev.type != BACKCAST_END)
            continue;
        ends[ev.session == s[1]]++;
        if (ev.session == s[0]) {
            assert_string_equal(ev.end.reason, "error");
            assert_int_equal(ev.end.code, BACKCAST_EPROTOCOL);
            assert_true(strlen(ev.end.text) > 5);
        } else {
            assert_string_equal(ev.end.reason, "stop");
        }
    }
    assert_true(ends[0] == 1 && ends[1] == 1 && texts == 1);
    assert_int_equal(backcast_chat(s[0], NULL, "x", 1, NULL), BACKCAST_EPROTOCOL);
    assert_string_equal(backcast_last_error_field(c), "session");
    assert_int_equal(backcast_next(c, &ev, 0), 0);
    fake_say(f, 1);
    backcast_disconnect(&c);
    fake_stop(&f);
}

static void lies_in_a_ring_end_that_session_alone(void **state)
{
    (void)state;
    for (enum lie lie = 0; lie < N_LIES; lie++) {
        int before = open_fds();
        check_lie(lie);
        if (open_fds() != before)
            fail_msg("lie %d leaves descriptors", lie);
    }
}

/* ---- memory that is not as it should be */

enum bad_open {
    OPEN_UNSEALED,
    OPEN_SMALL,
    OPEN_SIZES,
    OPEN_GENERATION,
    OPEN_THREE_FDS,
    N_BAD_OPENS
};

static void script_bad_open(struct fake *f, void *arg)
{
    struct fake_session s;
    enum bad_open kind = *(enum bad_open *)arg;

    fake_hello(f);
    fake_request(f, FRAME_OPEN_SESSION);
    fake_session_make(&s, 1, RING_BYTES_DEFAULT);
    if (kind == OPEN_GENERATION)
        atomic_store(&s.d2c->generation, 7);
    if (kind == OPEN_UNSEALED || kind == OPEN_SMALL || kind == OPEN_SIZES) {
        int fd = memfd_create("bad", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        size_t n = kind == OPEN_SMALL ? 8192 - 4096 : RING_REGION_BYTES(RING_BYTES_DEFAULT * 2u);
        FAKE_REQUIRE(ftruncate(fd, (off_t)n) == 0);
        if (kind != OPEN_UNSEALED)
            fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
        close(s.fds[1]);
        s.fds[1] = fd;
    }
    if (kind == OPEN_THREE_FDS) {
        Backcast__SessionOpened m = BACKCAST__SESSION_OPENED__INIT;
        uint8_t token[16] = {0};
        m.has_session = m.has_token = true;
        m.session = 1;
        m.token = (ProtobufCBinaryData){16, token};
        fake_reply_fds(f, FRAME_SESSION_OPENED, &m.base, s.fds, 3);
        for (int i = 0; i < 4; i++)
            close(s.fds[i]);
    } else {
        fake_session_reply(f, &s);
    }
    Backcast__Closed closed = BACKCAST__CLOSED__INIT;
    fake_request(f, FRAME_CLOSE); /* the library gives back what it could not use */
    fake_reply(f, FRAME_CLOSED, &closed.base);
    fake_wait(f, 1);
    fake_session_free(&s);
}

static void unsafe_memory_is_not_mapped(void **state)
{
    (void)state;
    for (enum bad_open kind = 0; kind < N_BAD_OPENS; kind++) {
        backcast *c = NULL;
        backcast_session *s = NULL;
        int before = open_fds();
        struct fake *f = fake_start(script_bad_open, &kind);

        assert_int_equal(backcast_connect(&c, fake_path(f)), 0);
        int rc = backcast_session_open(c, NULL, &s);
        if (rc != BACKCAST_EPROTOCOL || s != NULL || strlen(backcast_last_error(c)) < 10)
            fail_msg("case %d: %d (%s)", kind, rc, backcast_last_error(c));
        fake_say(f, 1);
        backcast_disconnect(&c);
        fake_stop(&f);
        if (open_fds() != before)
            fail_msg("case %d leaves %d descriptors", kind, open_fds() - before);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(malformed_answers_end_the_connection),
        cmocka_unit_test(lies_in_a_ring_end_that_session_alone),
        cmocka_unit_test(unsafe_memory_is_not_mapped),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
