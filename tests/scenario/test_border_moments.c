/* Clients at the worst moment, or far too often: nothing breaks, nothing stays, nobody else pays.
 */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>
#include "daemon_harness.h"
#include "raw_client.h"

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

static struct raw_session *open_small(struct raw *r, uint32_t ring_bytes)
{
    Backcast__OpenSession m = BACKCAST__OPEN_SESSION__INIT;
    m.has_budget_tokens = m.has_ring_bytes = 1;
    m.budget_tokens = 256;
    m.ring_bytes = ring_bytes;
    return raw_open(r, &m);
}

/* It dies in the very moment that its uploads have been silent for too long: the daemon, stopped
 * meanwhile, looks at the clock before it looks at the connection. */
static void death_of_a_silent_uploader(void **state)
{
    (void)state;
    struct raw *watch = client();
    assert_true(dh_until(raw_nothing_is_left, watch, DH_PATIENCE_MS));
    pid_t child = fork();
    if (child == 0) {
        struct raw *r = client();
        for (unsigned i = 0; i < 6; i++) {
            struct raw_session *s = open_small(r, 4096);
            Backcast__Generate g = tokens(5);
            g.has_session = g.has_kind = g.has_ring_bytes = 1;
            g.session = s->id;
            g.kind = 1;
            g.ring_bytes = 100;
            raw_send(r, FRAME_GENERATE, &g.base);
        }
        pause();
    }
    assert_true(child > 0);
    usleep(4600000);
    assert_int_equal(kill(d->pid, SIGSTOP), 0);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    usleep(1500000);
    assert_int_equal(kill(d->pid, SIGCONT), 0);
    assert_true(dh_until(raw_nothing_is_left, watch, DH_PATIENCE_MS));
    raw_close(&watch);
}

/* A ring full of CANCEL records is one cancel: others' requests find room in the engine. */
static void a_flood_of_cancels_is_one(void **state)
{
    (void)state;
    enum { FLOODERS = 4 };
    struct raw *r = client(), *other = client();
    struct raw_session *s[FLOODERS], *busy = open_small(other, 65536);
    static char text[12000];
    memset(text, 'z', sizeof text);
    for (unsigned i = 0; i < FLOODERS; i++)
        s[i] = open_small(r, RING_BYTES_MAX);
    Backcast__Generate g = tokens(0);
    raw_generate(busy, text, sizeof text, &g); /* the engine has long passes to make */
    for (unsigned i = 0; i < FLOODERS; i++) {
        while (ring_writer_put(&s[i]->w, RECORD_CANCEL, 0, NULL, 0) == 1)
            ;
        if (ring_writer_publish(&s[i]->w))
            raw_ring(s[i]);
    }
    for (unsigned i = 0; i < 300; i++) {
        Backcast__Stat m = BACKCAST__STAT__INIT;
        raw_call(other, FRAME_STAT, &m.base, FRAME_STAT_REPLY);
    }
    raw_collect(busy);
    assert_int_equal(busy->end.reason, END_LENGTH);
    g = tokens(1000000); /* and one works as ever */
    raw_generate(s[0], "go on", 5, &g);
    assert_int_equal(raw_next(s[0], RAW_TIMEOUT_MS), 1);
    while (ring_writer_put(&s[0]->w, RECORD_CANCEL, 0, NULL, 0) != 1)
        usleep(1000);
    if (ring_writer_publish(&s[0]->w))
        raw_ring(s[0]);
    raw_collect(s[0]);
    assert_int_equal(s[0]->end.reason, END_CANCELLED);
    for (unsigned i = 0; i < FLOODERS; i++)
        raw_session_free(&s[i]);
    raw_session_free(&busy);
    raw_close(&r);
    raw_close(&other);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(death_of_a_silent_uploader),
        cmocka_unit_test(a_flood_of_cancels_is_one),
    };
    return cmocka_run_group_tests(tests, start, dh_group_stop);
}
