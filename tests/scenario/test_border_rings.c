/* Rings against clients that are no library: seals, prompts by ring, lies, silence, slowness, death,
 * coming back. One daemon for all; a second client must come out of every case unharmed. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>
#include "daemon_harness.h"
#include "raw_client.h"
#include "sanitized.h"
#include "statpage.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

static struct dh *d;

static int start(void **state)
{
    const char *const args[] = {"--max-frames-per-second=100000", NULL};
    *state = d = dh_start_long(args);
    return 0;
}

static struct raw *client(void)
{
    struct raw *r = raw_connect(d->socket);
    raw_hello(r);
    return r;
}

static Backcast__Generate tokens(unsigned n)
{
    Backcast__Generate g = BACKCAST__GENERATE__INIT;
    g.has_max_tokens = g.has_ignore_end = 1;
    g.max_tokens = n;
    g.ignore_end = 1;
    return g;
}

static struct raw_session *open_small(struct raw *r, const char *name, uint32_t ring_bytes)
{
    Backcast__OpenSession m = BACKCAST__OPEN_SESSION__INIT;
    m.has_budget_tokens = m.has_ring_bytes = 1;
    m.budget_tokens = 256;
    m.ring_bytes = ring_bytes;
    m.has_name = name != NULL;
    if (name != NULL)
        m.name = (ProtobufCBinaryData){strlen(name), (uint8_t *)(uintptr_t)name};
    return raw_open(r, &m);
}

static uint64_t stat_of(struct raw *r, enum stat_id id)
{
    struct statpage *p = mmap(NULL, r->hello.stats_bytes, PROT_READ, MAP_SHARED, r->stats_fd, 0);
    struct statpage_copy c = {0};
    struct timespec now;
    assert_true(p != MAP_FAILED);
    clock_gettime(CLOCK_MONOTONIC, &now);
    uint64_t us = (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
    for (unsigned i = 0; i < 300 && c.now_micros < us; i++) { /* of this moment, not before */
        usleep(10000);
        assert_int_equal(statpage_read(p, r->hello.stats_bytes, &c, NULL, 0, NULL), WIRE_OK);
    }
    assert_true(c.now_micros >= us);
    munmap(p, r->hello.stats_bytes);
    return c.counters[id];
}

/* What one prompt says when nothing else goes on: the measure of "unharmed". */
static char *solo_text(void)
{
    struct raw *r = client();
    struct raw_session *s = open_small(r, NULL, 65536);
    Backcast__Generate g = tokens(60);
    raw_generate(s, "a story about ", 14, &g);
    raw_collect(s);
    char *text = strdup(s->text);
    raw_session_free(&s);
    raw_close(&r);
    return text;
}

static void others_are_unharmed(const char *solo)
{
    char *again = solo_text();
    assert_string_equal(again, solo);
    free(again);
}

/* ---- memory */

static void regions_are_sealed(void **state)
{
    (void)state;
    struct raw *r = client();
    struct raw_session *s = open_small(r, NULL, 65536);
    size_t bytes = RING_REGION_BYTES(s->size);
    int seals = fcntl(s->d2c_fd, F_GET_SEALS);
    int want = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW;
    assert_int_equal(seals & (want | F_SEAL_FUTURE_WRITE), want | F_SEAL_FUTURE_WRITE);
    assert_int_equal(fcntl(s->c2d_fd, F_GET_SEALS) & want, want);
    assert_int_equal(pwrite(s->d2c_fd, "x", 1, 4096), -1);
    assert_int_equal(errno, EPERM);
    assert_true(mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, s->d2c_fd, 0) == MAP_FAILED);
    assert_int_equal(mprotect((void *)(uintptr_t)s->d2c, bytes, PROT_READ | PROT_WRITE), -1);
    const int fds[2] = {s->d2c_fd, s->c2d_fd};
    for (unsigned i = 0; i < 2; i++) {
        assert_int_equal(ftruncate(fds[i], 0), -1);
        assert_int_equal(ftruncate(fds[i], (off_t)bytes * 2), -1);
        assert_int_equal(fcntl(fds[i], F_ADD_SEALS, F_SEAL_WRITE), -1);
    }
    assert_int_equal(fallocate(s->d2c_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                               (off_t)bytes),
                     -1);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", s->d2c_fd);
    int again = open(path, O_RDWR);
    if (again >= 0) {
        assert_int_equal(pwrite(again, "x", 1, 4096), -1);
        close(again);
    }
    raw_session_free(&s);
    raw_close(&r);
}

/* Only the client's own bytes can be punched away; that ends its session and no more. */
static void punched_holes_hurt_only_their_maker(void **state)
{
    (void)state;
    char *solo = solo_text();
    struct raw *r = client();
    struct raw_session *s = open_small(r, NULL, 65536);
    char prompt[20000];
    memset(prompt, 'a', sizeof prompt);
    Backcast__Generate g = tokens(0);
    g.has_session = g.has_kind = g.has_ring_bytes = 1;
    g.session = s->id;
    g.kind = 1;
    g.ring_bytes = sizeof prompt;
    raw_send(r, FRAME_GENERATE, &g.base);
    struct record_prompt rec = {0, sizeof prompt};
    struct ring_part parts[2] = {{&rec, sizeof rec}, {prompt, 8000}};
    assert_int_equal(ring_writer_put(&s->w, RECORD_PROMPT, 0, parts, 2), 1);
    assert_int_equal(fallocate(s->c2d_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 4096, 61440),
                     0);
    ring_writer_publish(&s->w);
    raw_ring(s);
    for (unsigned i = 0; i < 3000 && atomic_load(&s->d2c->state) != RING_CLOSED; i++)
        usleep(10000);
    assert_int_equal(atomic_load(&s->d2c->state), RING_CLOSED);
    assert_int_equal(atomic_load(&s->d2c->error), 7);
    others_are_unharmed(solo);
    raw_session_free(&s);
    raw_close(&r);
    free(solo);
}

/* ---- prompts by ring */

static void inline_and_ring_prompts_are_the_same(void **state)
{
    (void)state;
    static const size_t pieces[] = {16000, 1000, 17, 1};
    struct raw *r = client();
    char text[1200];
    for (unsigned i = 0; i < sizeof text; i++)
        text[i] = "the quick brown fox jumps. "[i % 27];
    struct raw_session *s = open_small(r, NULL, 65536);
    Backcast__Generate g = tokens(40);
    raw_generate(s, text, sizeof text, &g);
    raw_collect(s);
    char *want = strdup(s->text);
    raw_session_free(&s);
    for (unsigned i = 0; i < 4; i++) {
        s = open_small(r, NULL, i % 2 == 0 ? 65536 : 4096);
        size_t n = pieces[i] <= RING_PAYLOAD_MAX(s->size) - 16 ? pieces[i] : 900;
        g = tokens(40);
        uint32_t id = raw_upload(s, text, sizeof text, n, &g);
        assert_int_equal(raw_recv(r, RAW_TIMEOUT_MS), 1);
        raw_is(r, FRAME_ACCEPTED);
        assert_int_equal(r->h.request_id, id);
        raw_collect(s);
        assert_string_equal(s->text, want);
        assert_true(s->n_prunes > 0); /* 1,200 bytes of this vocabulary do not fit 256 tokens */
        raw_session_free(&s);
    }
    free(want);
    raw_close(&r);
}

static void long_prompt_far_beyond_the_ring(void **state)
{
    (void)state;
    struct raw *r = client();
    struct raw_session *s = open_small(r, NULL, 4096);
    size_t len = SANITIZED ? 20000 : 60000;
    char *text = malloc(len);
    for (size_t i = 0; i < len; i++)
        text[i] = (char)('a' + i % 26);
    Backcast__Generate g = tokens(3);
    raw_upload(s, text, len, 900, &g);
    assert_int_equal(raw_recv(r, RAW_TIMEOUT_MS), 1);
    raw_is(r, FRAME_ACCEPTED);
    raw_collect(s);
    assert_int_equal(s->n_ids, 3);
    assert_true(s->end.tokens_in > 1000 && s->end.prunes > 10);
    free(text);
    raw_session_free(&s);
    raw_close(&r);
}

static void records_of_a_refused_prompt_are_dropped(void **state)
{
    (void)state;
    struct raw *r = client();
    struct raw_session *s = open_small(r, NULL, 65536);
    Backcast__Generate bad = tokens(5);
    bad.has_temperature = 1;
    bad.temperature = -1;
    raw_upload(s, "this never comes in", 19, 4, &bad);
    assert_int_equal(raw_recv(r, RAW_TIMEOUT_MS), 1);
    raw_is_error(r, 1, "temperature");
    Backcast__Generate good = tokens(20);
    raw_upload(s, "the second prompt", 17, 3, &good);
    assert_int_equal(raw_recv(r, RAW_TIMEOUT_MS), 1);
    raw_is(r, FRAME_ACCEPTED);
    raw_collect(s);
    struct raw_session *fresh = open_small(r, NULL, 65536);
    good = tokens(20);
    raw_generate(fresh, "the second prompt", 17, &good);
    raw_collect(fresh);
    assert_int_equal(s->end.tokens_in, fresh->end.tokens_in);
    assert_string_equal(s->text, fresh->text);
    raw_session_free(&s);
    raw_session_free(&fresh);
    raw_close(&r);
}

static void half_a_prompt_times_out_and_can_be_cancelled(void **state)
{
    (void)state;
    struct raw *r = client();
    struct raw_session *s = open_small(r, NULL, 65536);
    Backcast__Generate g = tokens(5);
    g.has_session = g.has_kind = g.has_ring_bytes = g.has_ring_seq = 1;
    g.session = s->id;
    g.kind = 1;
    g.ring_bytes = 100;
    g.ring_seq = 1;
    uint64_t start = raw_now_ms();
    uint32_t id = raw_send(r, FRAME_GENERATE, &g.base);
    struct record_prompt rec = {0, 100};
    struct ring_part parts[2] = {{&rec, sizeof rec}, {"half", 4}};
    assert_int_equal(ring_writer_put(&s->w, RECORD_PROMPT, 0, parts, 2), 1);
    if (ring_writer_publish(&s->w))
        raw_ring(s);
    raw_call_fails(r, FRAME_GENERATE, &g.base, 5, "session"); /* one at a time */
    assert_int_equal(raw_recv(r, RAW_TIMEOUT_MS), 1);
    assert_true(raw_now_ms() - start >= 4900); /* silent for 5 s */
    assert_int_equal(r->h.request_id, id);
    raw_is_error(r, 15, "ring_bytes");
    /* the same by CANCEL, as a record and as a frame */
    for (unsigned by_frame = 0; by_frame < 2; by_frame++) {
        g.ring_seq = s->w.seq + 1;
        id = raw_send(r, FRAME_GENERATE, &g.base);
        if (by_frame) {
            Backcast__Cancel c = BACKCAST__CANCEL__INIT;
            c.has_session = 1;
            c.session = s->id;
            raw_send(r, FRAME_CANCEL, &c.base);
        } else {
            Backcast__Stat st = BACKCAST__STAT__INIT;
            raw_call(r, FRAME_STAT, &st.base, FRAME_STAT_REPLY); /* the frame was seen */
            assert_int_equal(ring_writer_put(&s->w, RECORD_CANCEL, 0, NULL, 0), 1);
            if (ring_writer_publish(&s->w))
                raw_ring(s);
        }
        assert_int_equal(raw_recv(r, RAW_TIMEOUT_MS), 1);
        assert_int_equal(r->h.request_id, id);
        raw_is_error(r, 10, NULL);
        if (by_frame) {
            assert_int_equal(raw_recv(r, RAW_TIMEOUT_MS), 1);
            raw_is(r, FRAME_DONE);
        }
    }
    g = tokens(5); /* and the session is as good as new */
    raw_generate(s, "hello", 5, &g);
    raw_collect(s);
    assert_int_equal(s->n_ids, 5);
    raw_session_free(&s);
    raw_close(&r);
}

/* ---- lies */

static void lie_tell(struct raw_session *s, unsigned lie)
{
    struct record_prompt rec = {5, 10};
    struct ring_part part = {&rec, sizeof rec};
    struct ring_part parts[2] = {{&rec, sizeof rec}, {"abc", 3}};
    switch (lie) {
    case 0:
        atomic_store(&s->c2d->tail, 8);
        break;
    case 1:
        atomic_store(&s->c2d->tail, UINT64_MAX - 15);
        break;
    case 2:
        atomic_store(&s->c2d->tail, s->size + 16);
        break;
    case 3: /* more taken than there ever was */
        atomic_store(&s->c2d->head, 1ull << 40);
        break;
    case 4:
        atomic_store(&s->c2d->head, 3);
        break;
    case 5: /* a record that says it is longer than the ring */
        ring_writer_put(&s->w, RECORD_PROMPT, 0, parts, 2);
        memset(s->c2d->data, 0xff, 4);
        atomic_store(&s->c2d->tail, 48);
        break;
    case 6: /* a prompt record without text */
        ring_writer_put(&s->w, RECORD_PROMPT, 0, &part, 1);
        ring_writer_publish(&s->w);
        break;
    case 7: /* a seq that jumps */
        s->w.seq = 41;
        ring_writer_put(&s->w, RECORD_CANCEL, 0, NULL, 0);
        ring_writer_publish(&s->w);
        break;
    case 8: /* backward */
        ring_writer_put(&s->w, 99, 0, parts, 2);
        ring_writer_publish(&s->w);
        raw_ring(s);
        usleep(100000);
        atomic_store(&s->c2d->tail, 0);
        break;
    case 9: /* both at random */
        atomic_store(&s->c2d->tail, 0x123456789abcdef0u);
        atomic_store(&s->c2d->head, 0xfedcba9876543210u);
        break;
    }
}

static void lies_close_the_session_and_nothing_else(void **state)
{
    (void)state;
    char *solo = solo_text();
    struct raw *r = client();
    for (unsigned lie = 0; lie < 10; lie++) {
        struct raw_session *s = open_small(r, NULL, 4096);
        struct raw_session *good = open_small(r, NULL, 65536);
        Backcast__Generate g = tokens(2000);
        raw_generate(s, "hello", 5, &g);
        lie_tell(s, lie);
        raw_ring(s);
        for (unsigned i = 0; i < 3000 && atomic_load(&s->d2c->state) != RING_CLOSED; i++)
            usleep(10000);
        if (atomic_load(&s->d2c->state) != RING_CLOSED)
            fail_msg("lie %u went through", lie);
        assert_int_equal(atomic_load(&s->d2c->error), 7);
        g = tokens(10);
        raw_generate(good, "hello", 5, &g);
        raw_collect(good);
        assert_int_equal(good->n_ids, 10);
        Backcast__Close c = BACKCAST__CLOSE__INIT;
        c.has_session = 1;
        c.session = s->id;
        raw_call_fails(r, FRAME_CLOSE, &c.base, 2, "session");
        c.session = good->id;
        raw_call(r, FRAME_CLOSE, &c.base, FRAME_CLOSED);
        raw_session_free(&s);
        raw_session_free(&good);
    }
    others_are_unharmed(solo);
    raw_close(&r);
    free(solo);
}

/* A process that rewrites everything it may write, all the time, while the daemon reads it. */
static void hammered_regions(void **state)
{
    (void)state;
    char *solo = solo_text();
    for (unsigned round = 0; round < (SANITIZED ? 3 : 6); round++) {
        pid_t child = fork();
        if (child == 0) {
            struct raw *r = client();
            struct raw_session *s = open_small(r, NULL, 4096);
            Backcast__Generate g = tokens(3000);
            raw_generate(s, "x", 1, &g);
            uint32_t x = round + 1;
            for (unsigned i = 0;; i++) {
                x = x * 1664525u + 1013904223u;
                uint64_t *data = (uint64_t *)(void *)s->c2d->data;
                data[x % 512] = x % 3 == 0 ? x : x % 256;
                if (i % 1000 == 0) {
                    atomic_store(&s->c2d->tail, i / 1000 * 16);
                    atomic_store(&s->c2d->need_data, x);
                    atomic_store(&s->c2d->need_room, x);
                    raw_ring(s);
                }
            }
        }
        assert_true(child > 0);
        others_are_unharmed(solo);
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
    }
    free(solo);
}

/* ---- bells */

static void a_bell_that_is_never_rung_is_healed_and_counted(void **state)
{
    (void)state;
    struct raw *r = client();
    struct raw_session *s = open_small(r, NULL, 65536);
    uint64_t missed = stat_of(r, STAT_missed_wakes);
    Backcast__Generate g = tokens(5);
    g.has_session = g.has_kind = g.has_ring_bytes = 1;
    g.session = s->id;
    g.kind = 1;
    g.ring_bytes = 5;
    raw_send(r, FRAME_GENERATE, &g.base);
    raw_settle(r);
    struct record_prompt rec = {0, 5};
    struct ring_part parts[2] = {{&rec, sizeof rec}, {"hello", 5}};
    assert_int_equal(ring_writer_put(&s->w, RECORD_PROMPT, 0, parts, 2), 1);
    assert_true(ring_writer_publish(&s->w)); /* it should be rung now */
    assert_int_equal(raw_recv(r, RAW_TIMEOUT_MS), 1);
    raw_is(r, FRAME_ACCEPTED); /* by the next sweep; else an error after 5 s */
    raw_collect(s);
    assert_int_equal(s->n_ids, 5);
    sleep(2);
    assert_int_equal(stat_of(r, STAT_missed_wakes), missed + 1);
    raw_session_free(&s);
    raw_close(&r);
}

/* A client that fills, drains and spams its bell: others do not notice. */
static void bell_abuse_is_cheap(void **state)
{
    (void)state;
    char *solo = solo_text();
    struct raw *r = client();
    struct raw_session *s = open_small(r, NULL, 65536);
    uint64_t missed = stat_of(r, STAT_missed_wakes);
    pid_t child = fork();
    if (child == 0) {
        int flags = fcntl(s->c2d_bell, F_GETFL);
        uint64_t v = UINT64_MAX - 2;
        fcntl(s->c2d_bell, F_SETFL, flags & ~O_NONBLOCK);
        for (unsigned i = 0;; i++) {
            v = i % 2 == 0 ? 1 : 3;
            if (write(s->c2d_bell, &v, sizeof v) < 0 ||
                (i % 64 == 0 && read(s->c2d_bell, &v, sizeof v) < 0))
                _exit(0);
        }
    }
    assert_true(child > 0);
    for (unsigned i = 0; i < 3; i++)
        others_are_unharmed(solo);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    usleep(1200000); /* the sweep listens again */
    Backcast__Generate g = tokens(5);
    raw_upload(s, "hello", 5, 2, &g);
    assert_int_equal(raw_recv(r, RAW_TIMEOUT_MS), 1);
    raw_is(r, FRAME_ACCEPTED);
    raw_collect(s);
    assert_int_equal(stat_of(r, STAT_missed_wakes), missed);
    raw_session_free(&s);
    raw_close(&r);
    free(solo);
}

/* ---- slow and absent clients */

static bool is_parked(void *arg)
{
    const struct raw_session *s = arg;
    Backcast__Stat m = BACKCAST__STAT__INIT;
    m.has_session = 1;
    m.session = s->id;
    Backcast__StatReply *reply = raw_call(s->r, FRAME_STAT, &m.base, FRAME_STAT_REPLY);
    assert_int_equal(reply->n_sessions, 1);
    assert_true(reply->sessions[0]->tokens_out < 1000);
    return strncmp((const char *)reply->sessions[0]->state.data, "parked", 6) == 0;
}

static void a_slow_reader_is_parked_and_loses_nothing(void **state)
{
    (void)state;
    char *solo = solo_text();
    struct raw *r = client();
    struct raw_session *slow = open_small(r, NULL, 4096), *fast = open_small(r, NULL, 65536);
    Backcast__Generate g = tokens(1500);
    raw_generate(slow, "once upon", 9, &g);
    assert_true(dh_until(is_parked, slow, DH_PATIENCE_MS));
    others_are_unharmed(solo);
    assert_true(is_parked(slow));       /* it stays so */
    for (unsigned i = 0; i < 30; i++) { /* then it reads a little now and then */
        assert_int_equal(raw_next(slow, RAW_TIMEOUT_MS), 1);
        usleep(3000);
    }
    raw_collect(slow); /* then all */
    assert_int_equal(slow->end.reason, END_LENGTH);
    assert_int_equal(slow->end.tokens_out, 1500);
    g = tokens(1500);
    raw_generate(fast, "once upon", 9, &g);
    raw_collect(fast);
    assert_int_equal(fast->n_ids, 1500);
    assert_true(slow->n_ids >= 1470);
    assert_memory_equal(fast->ids + (1500 - slow->n_ids), slow->ids, slow->n_ids * 4);
    assert_int_equal(stat_of(r, STAT_missed_wakes), stat_of(r, STAT_missed_wakes));
    raw_session_free(&slow);
    raw_session_free(&fast);
    raw_close(&r);
    free(solo);
}

/* Dies in prefill, in decode and while uploading; everything is given back at once. */
static void death_frees_everything(void **state)
{
    (void)state;
    char *solo = solo_text();
    struct raw *watch = client();
    assert_true(dh_until(raw_nothing_is_left, watch, DH_PATIENCE_MS));
    unsigned before = dh_fds(d);
    for (unsigned round = 0; round < 30; round += SANITIZED ? 2 : 1) { /* 0, 2, 1 of three */
        pid_t child = fork();
        if (child == 0) {
            struct raw *r = client();
            struct raw_session *s = open_small(r, NULL, 65536);
            size_t len = 15000;
            char *text = malloc(len);
            memset(text, 'z', len);
            Backcast__Generate g = tokens(100000);
            if (round % 3 == 0)
                raw_generate(s, text, len, &g); /* a long prefill */
            else if (round % 3 == 1)
                raw_generate(s, "go", 2, &g);
            else {
                g.has_session = g.has_kind = g.has_ring_bytes = 1;
                g.session = s->id;
                g.kind = 1;
                g.ring_bytes = 1000000;
                raw_send(r, FRAME_GENERATE, &g.base);
                struct record_prompt rec = {0, 1000000};
                struct ring_part parts[2] = {{&rec, sizeof rec}, {text, 9000}};
                ring_writer_put(&s->w, RECORD_PROMPT, 0, parts, 2);
                ring_writer_publish(&s->w);
                raw_ring(s);
            }
            usleep(round * 1500);
            kill(getpid(), SIGKILL);
        }
        assert_true(child > 0);
        waitpid(child, NULL, 0);
        if (!dh_until(raw_nothing_is_left, watch, DH_PATIENCE_MS))
            fail_msg("round %u left something behind", round);
    }
    assert_true(dh_fds(d) <= before);
    others_are_unharmed(solo);
    raw_close(&watch);
    free(solo);
}

static void cancel_by_record_and_by_frame(void **state)
{
    (void)state;
    struct raw *r = client();
    struct raw_session *s = open_small(r, NULL, 65536);
    for (unsigned by_frame = 0; by_frame < 2; by_frame++) {
        Backcast__Generate g = tokens(1000000);
        raw_generate(s, "go on", 5, &g);
        assert_int_equal(raw_next(s, RAW_TIMEOUT_MS), 1);
        if (by_frame) {
            Backcast__Cancel c = BACKCAST__CANCEL__INIT;
            c.has_session = 1;
            c.session = s->id;
            raw_call(r, FRAME_CANCEL, &c.base, FRAME_DONE);
        } else {
            assert_int_equal(ring_writer_put(&s->w, RECORD_CANCEL, 0, NULL, 0), 1);
            if (ring_writer_publish(&s->w))
                raw_ring(s);
        }
        raw_collect(s);
        assert_int_equal(s->end.reason, END_CANCELLED);
    }
    raw_session_free(&s);
    raw_close(&r);
}

/* ---- coming back */

static void attach(struct raw *r, const char *name, uint64_t last_seq)
{
    Backcast__Attach a = BACKCAST__ATTACH__INIT;
    a.has_name = a.has_last_seq = 1;
    a.name = (ProtobufCBinaryData){strlen(name), (uint8_t *)(uintptr_t)name};
    a.last_seq = last_seq;
    raw_call(r, FRAME_ATTACH, &a.base, FRAME_SESSION_OPENED);
}

static void a_named_session_can_be_come_back_to(void **state)
{
    (void)state;
    struct raw *r = client(), *other = client();
    struct raw_session *s = open_small(r, "work", 65536);
    uint64_t id = s->id, generation = s->generation;
    uint8_t token[16];
    memcpy(token, s->token, 16);
    Backcast__Generate g = tokens(1000000);
    raw_generate(s, "go on", 5, &g);
    for (unsigned i = 0; i < 20; i++)
        assert_int_equal(raw_next(s, RAW_TIMEOUT_MS), 1);
    Backcast__Attach a = BACKCAST__ATTACH__INIT;
    a.has_name = 1;
    a.name = (ProtobufCBinaryData){4, (uint8_t *)"work"};
    raw_call_fails(other, FRAME_ATTACH, &a.base, 5, "session"); /* it has a client */
    uint64_t seen = s->last_seq;
    raw_session_free(&s);
    raw_close(&r); /* in the middle of the answer */
    a.name = (ProtobufCBinaryData){4, (uint8_t *)"nope"};
    raw_call_fails(other, FRAME_ATTACH, &a.base, 2, "name");
    a.has_name = 0;
    a.has_session = a.has_token = 1;
    a.session = id;
    a.token = (ProtobufCBinaryData){16, token};
    token[3] ^= 1;
    raw_call_fails(other, FRAME_ATTACH, &a.base, 9, "token");
    token[3] ^= 1;
    a.has_last_seq = 1;
    a.last_seq = 1ull << 50;
    raw_call_fails(other, FRAME_ATTACH, &a.base, 1, "last_seq");
    a.last_seq = seen;
    raw_call(other, FRAME_ATTACH, &a.base, FRAME_SESSION_OPENED);
    s = raw_session_of(other);
    assert_int_equal(s->id, id);
    assert_true(s->generation > generation);
    s->last_seq = seen;
    raw_collect(s); /* no record is missing; the answer was cancelled when its client went */
    assert_int_equal(s->end.reason, END_CANCELLED);
    g = tokens(10);
    raw_forget(s);
    raw_generate(s, " and on", 7, &g);
    raw_collect(s);
    assert_int_equal(s->n_ids, 10);
    assert_int_equal(s->n_lost, 0);
    Backcast__Close c = BACKCAST__CLOSE__INIT;
    c.has_session = 1;
    c.session = id;
    raw_call(other, FRAME_CLOSE, &c.base, FRAME_CLOSED);
    assert_true(dh_until(raw_nothing_is_left, other, DH_PATIENCE_MS));
    raw_session_free(&s);
    raw_close(&other);
}

static void what_is_too_old_is_counted_as_lost(void **state)
{
    (void)state;
    struct raw *r = client();
    struct raw_session *s = open_small(r, "long", 4096);
    Backcast__Generate g = tokens(2000);
    g.has_n_logprobs = 1;
    g.n_logprobs = 20;
    raw_generate(s, "go on", 5, &g);
    raw_collect(s);
    assert_int_equal(s->n_logprobs, 2000);
    uint64_t last = s->last_seq;
    int32_t *ids = s->ids;
    s->ids = NULL;
    s->n_ids = 0;
    raw_session_free(&s);
    raw_close(&r);
    r = client();
    attach(r, "long", 0);
    s = raw_session_of(r);
    assert_int_equal(raw_next(s, RAW_TIMEOUT_MS), 1);
    assert_int_equal(s->h.type, RECORD_LOST);
    struct record_lost lost;
    memcpy(&lost, s->payload, sizeof lost);
    assert_int_equal(lost.first_seq, 1);
    assert_int_equal(lost.count, s->h.seq);
    assert_true(lost.count < last - 500);
    raw_collect(s);
    assert_int_equal(s->last_seq, last);
    assert_int_equal(s->n_lost, 0);
    assert_true(s->n_ids > 500 && s->n_ids < 2000);
    assert_memory_equal(s->ids, ids + 2000 - s->n_ids, s->n_ids * 4); /* the same, once more */
    free(ids);
    raw_session_free(&s);
    raw_close(&r);
    r = client(); /* nothing new: nothing comes */
    attach(r, "long", last);
    s = raw_session_of(r);
    s->last_seq = last;
    assert_int_equal(raw_next(s, 300), 0);
    Backcast__Close c = BACKCAST__CLOSE__INIT;
    c.has_session = 1;
    c.session = s->id;
    raw_call(r, FRAME_CLOSE, &c.base, FRAME_CLOSED);
    assert_int_equal(atomic_load(&s->d2c->state), RING_CLOSED);
    assert_int_equal(atomic_load(&s->d2c->error), 0);
    raw_session_free(&s);
    raw_close(&r);
}

/* ---- scores */

static void scores_by_ring_and_by_memfd(void **state)
{
    (void)state;
    struct raw *r = client(), *other = client();
    struct raw_session *s = open_small(r, NULL, 4096);
    Backcast__Generate g = tokens(200);
    raw_generate(s, "some words to score", 19, &g);
    raw_collect(s);
    Backcast__Scores m = BACKCAST__SCORES__INIT;
    m.has_session = 1;
    m.session = s->id;
    raw_call(r, FRAME_SCORES, &m.base, FRAME_ACCEPTED);
    struct record_score rows[256];
    uint32_t n = 0, total = 0;
    for (;;) {
        struct record_scores rec;
        assert_int_equal(raw_next(s, RAW_TIMEOUT_MS), 1);
        if (s->h.type == RECORD_END)
            break;
        assert_int_equal(s->h.type, RECORD_SCORES);
        memcpy(&rec, s->payload, sizeof rec);
        assert_int_equal(rec.offset, n);
        total = rec.total;
        assert_true(n + rec.n_rows <= 256);
        memcpy(rows + n, s->payload + sizeof rec, rec.n_rows * sizeof rows[0]);
        n += rec.n_rows;
        assert_int_equal((s->h.flags & RECORD_FLAG_MORE) != 0, n < total);
    }
    assert_int_equal(n, total);
    assert_true(n > 100);
    Backcast__ScoresReply *reply = raw_call(other, FRAME_SCORES, &m.base, FRAME_SCORES_REPLY);
    assert_int_equal(reply->n_rows, n);
    assert_int_equal(other->n_fds, 1);
    struct record_score same[256];
    assert_int_equal(pread(other->fds[0], same, sizeof same, 0), n * sizeof same[0]);
    assert_memory_equal(same, rows, n * sizeof rows[0]);
    assert_int_equal(pwrite(other->fds[0], "x", 1, 0), -1);
    assert_true(fcntl(other->fds[0], F_GET_SEALS) & F_SEAL_WRITE);
    raw_session_free(&s);
    raw_close(&r);
    raw_close(&other);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(regions_are_sealed),
        cmocka_unit_test(punched_holes_hurt_only_their_maker),
        cmocka_unit_test(inline_and_ring_prompts_are_the_same),
        cmocka_unit_test(long_prompt_far_beyond_the_ring),
        cmocka_unit_test(records_of_a_refused_prompt_are_dropped),
        cmocka_unit_test(half_a_prompt_times_out_and_can_be_cancelled),
        cmocka_unit_test(lies_close_the_session_and_nothing_else),
        cmocka_unit_test(hammered_regions),
        cmocka_unit_test(a_bell_that_is_never_rung_is_healed_and_counted),
        cmocka_unit_test(bell_abuse_is_cheap),
        cmocka_unit_test(a_slow_reader_is_parked_and_loses_nothing),
        cmocka_unit_test(death_frees_everything),
        cmocka_unit_test(cancel_by_record_and_by_frame),
        cmocka_unit_test(a_named_session_can_be_come_back_to),
        cmocka_unit_test(what_is_too_old_is_counted_as_lost),
        cmocka_unit_test(scores_by_ring_and_by_memfd),
    };
    return cmocka_run_group_tests(tests, start, dh_group_stop);
}
