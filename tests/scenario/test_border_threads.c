/* Many clients at once, each a thread with a connection and sessions of its own, through the library:
 * every text equals what the same prompt says alone. Also run under ThreadSanitizer. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cmocka.h>
#include "backcast.h"
#include "daemon_harness.h"
#include "raw_client.h"
#include "statpage.h"

#define CLIENTS 4
#define ROUNDS 3

static const char *const policies[CLIENTS] = {"counter_causal_fast", "h2o", "none", "tova"};

struct client {
    struct dh *d;
    unsigned i;
    char texts[ROUNDS][400];
    const char *failed;
};

static const char *one_round(backcast *c, struct client *me, unsigned round)
{
    backcast_session *s;
    struct backcast_session_options o;
    struct backcast_generate_options g;
    struct backcast_event ev;
    char prompt[64];
    size_t n = 0;
    backcast_session_options_init(&o);
    o.policy = policies[me->i];
    o.budget_tokens = 128;
    o.ring_bytes = 4096u << round;
    backcast_generate_options_init(&g);
    g.max_tokens = 100;
    g.ignore_end = 1;
    if (backcast_session_open(c, &o, &s) < 0)
        return "open";
    snprintf(prompt, sizeof prompt, "client %u says in round %u that ", me->i, round);
    if (backcast_prompt(s, prompt, strlen(prompt), &g) < 0)
        return "prompt";
    int rc;
    while ((rc = backcast_next(c, &ev, 30000)) > 0 && ev.type != BACKCAST_END)
        if (ev.type == BACKCAST_TEXT && n + ev.text.len < sizeof me->texts[round]) {
            memcpy(me->texts[round] + n, ev.text.text, ev.text.len);
            n += ev.text.len;
        }
    backcast_session_close(&s);
    return rc <= 0 ? "next" : NULL;
}

static void *client_main(void *arg)
{
    struct client *me = arg;
    backcast *c;
    if (backcast_connect(&c, me->d->socket) < 0) {
        me->failed = "connect";
        return NULL;
    }
    for (unsigned i = 0; i < ROUNDS && me->failed == NULL; i++)
        me->failed = one_round(c, me, i);
    backcast_disconnect(&c);
    return NULL;
}

/* With honest clients no bell is ever missed. */
static void no_wake_up_was_missed(const struct dh *d)
{
    struct raw *r = raw_connect(d->socket);
    struct statpage_copy c = {0};
    raw_hello(r);
    struct statpage *p = mmap(NULL, r->hello.stats_bytes, PROT_READ, MAP_SHARED, r->stats_fd, 0);
    assert_true(p != MAP_FAILED);
    sleep(2); /* two sweeps: a suspicion becomes a count */
    assert_int_equal(statpage_read(p, r->hello.stats_bytes, &c, NULL, 0, NULL), WIRE_OK);
    assert_true(c.counters[STAT_requests_done] >= 2 * CLIENTS * ROUNDS);
    assert_int_equal(c.counters[STAT_missed_wakes], 0);
    assert_int_equal(c.counters[STAT_violations], 0);
    assert_int_equal(c.counters[STAT_sessions], 0);
    assert_int_equal(c.counters[STAT_requests], 0);
    munmap(p, r->hello.stats_bytes);
    raw_close(&r);
}

static void all_at_once_as_each_alone(void **state)
{
    (void)state;
    static struct client alone[CLIENTS], together[CLIENTS];
    pthread_t threads[CLIENTS];
    const char *const args[] = {"--threads=2", NULL};
    struct dh *d = dh_start("tiny-llama.gguf", args);
    for (unsigned i = 0; i < CLIENTS; i++) {
        alone[i] = together[i] = (struct client){.d = d, .i = i};
        client_main(&alone[i]);
    }
    for (unsigned i = 0; i < CLIENTS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, client_main, &together[i]), 0);
    for (unsigned i = 0; i < CLIENTS; i++)
        pthread_join(threads[i], NULL);
    for (unsigned i = 0; i < CLIENTS; i++) {
        assert_null(alone[i].failed);
        assert_null(together[i].failed);
        for (unsigned k = 0; k < ROUNDS; k++) {
            assert_true(strlen(alone[i].texts[k]) > 0);
            assert_string_equal(alone[i].texts[k], together[i].texts[k]);
        }
    }
    no_wake_up_was_missed(d);
    dh_stop(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(all_at_once_as_each_alone)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
