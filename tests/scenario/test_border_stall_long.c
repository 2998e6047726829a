/* A client that reads nothing for 30 s: its request ends with STALLED, its session stays; one that
 * reads a little now and then goes on. Takes 40 s. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>
#include "daemon_harness.h"
#include "raw_client.h"

static struct raw_session *open_small(struct raw *r)
{
    Backcast__OpenSession m = BACKCAST__OPEN_SESSION__INIT;
    m.has_budget_tokens = m.has_ring_bytes = 1;
    m.budget_tokens = 128;
    m.ring_bytes = 8192;
    return raw_open(r, &m);
}

static void silence_stalls_and_slowness_does_not(void **state)
{
    (void)state;
    struct dh *d = dh_start_long(NULL);
    struct raw *r = raw_connect(d->socket);
    raw_hello(r);
    struct raw_session *silent = open_small(r), *slow = open_small(r);
    Backcast__Generate g = BACKCAST__GENERATE__INIT;
    g.has_max_tokens = g.has_ignore_end = 1;
    g.max_tokens = 3000;
    g.ignore_end = 1;
    raw_generate(silent, "go on", 5, &g);
    raw_generate(slow, "go on", 5, &g);
    usleep(500000);
    uint64_t rss = dh_rss(d);
    for (unsigned i = 0; i < 40; i++) {
        if (i % 8 == 7)
            assert_int_equal(raw_next(slow, RAW_TIMEOUT_MS), 1);
        sleep(1);
    }
    assert_true(dh_rss(d) < rss + (8u << 20));
    assert_true(dh_log_has(d, "reads nothing"));
    raw_collect(silent);
    assert_int_equal(silent->end.reason, END_STALLED);
    assert_true(silent->n_ids < 3000);
    raw_collect(slow);
    assert_int_equal(slow->end.reason, END_LENGTH);
    assert_int_equal(slow->end.tokens_out, 3000);
    g.max_tokens = 10; /* the stalled one is as good as before */
    raw_forget(silent);
    raw_generate(silent, " and on", 7, &g);
    raw_collect(silent);
    assert_int_equal(silent->n_ids, 10);
    assert_int_equal(silent->end.reason, END_LENGTH);
    raw_session_free(&silent);
    raw_session_free(&slow);
    raw_close(&r);
    dh_stop(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(silence_stalls_and_slowness_does_not)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
