/* Models that nobody uses give their weights back and come when they are called: sessions go on as if
 * nothing had been, and memory does not grow with the number of times. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <fcntl.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "core.h"
#include "engine_harness.h"
#include "records.h"

#define NEW 30

static int32_t prompt[500];

static int setup(void **state)
{
    (void)state;
    uint32_t x = 55;
    for (size_t i = 0; i < ARRAY_LEN(prompt); i++) {
        x = x * 1664525u + 1013904223u;
        prompt[i] = (int32_t)(3 + (x >> 8) % 280);
    }
    return 0;
}

static uint64_t keep_alive, host_tier;

static void tweak(struct engine_options *o, void *arg)
{
    (void)arg;
    o->host_tier = host_tier;
    o->keep_alive_us = keep_alive;
}

static struct eh *open_with(const char *model, uint64_t alive, uint64_t tier)
{
    keep_alive = alive;
    host_tier = tier;
    return eh_open(model, tweak, NULL);
}

static uint64_t weights(struct eh *h)
{
    struct engine_counts c;
    engine_counts(h->en, &c);
    return c.bytes_weights;
}

static void turn(struct eh *h, uint64_t s, int k)
{
    struct generate_options o = eh_greedy(NEW);
    eh_ids(h, s, prompt + k * 50, 50, &o);
    eh_run_to_end(h, s);
}

static void fall_asleep(struct eh *h)
{
    eh_pass(h, 1000);
    eh_run(h);
    assert_int_equal(weights(h), 0);
}

static void equal(struct eh *a, uint64_t s, struct eh *b, uint64_t t)
{
    struct eh_stream *x = eh_stream(a, s), *y = eh_stream(b, t);
    assert_int_equal(x->n_ids, y->n_ids);
    assert_memory_equal(x->ids, y->ids, x->n_ids * sizeof *x->ids);
    assert_int_equal(x->n_prunes, y->n_prunes);
}

static void a_model_sleeps_and_its_sessions_go_on(void **state)
{
    (void)state;
    static const char *const policies[] = {"counter_causal_fast", "h2o", "tova", "none"};
    struct eh *a = open_with("tiny-llama.gguf", 0, 0);
    struct eh *b = open_with("tiny-llama.gguf", 500, 64 << 20);
    uint64_t s[4], t[4];
    for (int i = 0; i < 4; i++) {
        struct eh_ask ask = {.policy = policies[i],
                             .budget_tokens = strcmp(policies[i], "none") != 0 ? 80 : 0};
        s[i] = eh_session(a, &ask);
        t[i] = eh_session(b, &ask);
    }
    for (int k = 0; k < 4; k++) {
        for (int i = 0; i < 4; i++) {
            turn(a, s[i], k);
            turn(b, t[i], k);
        }
        fall_asleep(b);
        const struct report *r = eh_expect(b, eh_post(b, eh_command(b, CMD_STAT, 0)), REP_STAT);
        assert_int_equal(r->u.stat.n_models, 1); /* it is known still */
        assert_int_equal(r->u.stat.models[0].bytes_weights, 0);
        assert_int_equal(r->u.stat.bytes_weights, 0);
        assert_true(r->u.stat.bytes_scratch > 0); /* the backend's stays, in the total as well */
        assert_int_equal(r->u.stat.bytes_scratch, r->u.stat.models[0].bytes_scratch);
        assert_int_equal(r->u.stat.models[0].sessions, 4);
        assert_int_equal(r->u.stat.kv_held, 0);
    }
    for (int i = 0; i < 4; i++)
        equal(a, s[i], b, t[i]);
    /* whatever needs it wakes it: a session to open, a prune; closing does not */
    eh_close_session(b, t[3]);
    assert_int_equal(weights(b), 0);
    uint64_t u = eh_session(b, &(struct eh_ask){.policy = "tova", .budget_tokens = 70});
    assert_true(weights(b) > 0);
    fall_asleep(b);
    struct command *c = eh_command(b, CMD_PRUNE, t[0]);
    c->u.budget.keep = 50;
    eh_expect(b, eh_post(b, c), REP_PRUNED_REPLY);
    fall_asleep(b);
    turn(b, u, 0);
    eh_close(&a);
    eh_close(&b);
}

/* Without a place for its sessions' caches it stays. */
static void a_model_with_nowhere_to_put_its_caches_stays(void **state)
{
    (void)state;
    struct eh *h = open_with("tiny-llama.gguf", 500, 100);
    uint64_t s = eh_session(h, &(struct eh_ask){.policy = "h2o", .budget_tokens = 80});
    turn(h, s, 0);
    eh_pass(h, 1000);
    eh_run(h);
    assert_true(weights(h) > 0);
    turn(h, s, 1);
    eh_close_session(h, s);
    fall_asleep(h);
    eh_close(&h);
}

static uint64_t resident(void)
{
    unsigned long long pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    assert_non_null(f);
    assert_int_equal(fscanf(f, "%*u %llu", &pages), 1);
    fclose(f);
    return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* Twenty times to sleep and back, with a session that is used each time. */
static void memory_stays_flat_over_twenty_times(void **state)
{
    (void)state;
    struct eh *h = open_with("tiny-llama.gguf", 500, 64 << 20);
    struct generate_options o = eh_greedy(3);
    uint64_t s = eh_session(h, &(struct eh_ask){.policy = "counter_causal", .budget_tokens = 80});
    uint64_t first = 0, booked = 0;
    for (int k = 0; k < 24; k++) {
        eh_ids(h, s, prompt, 20, &o);
        eh_run_to_end(h, s);
        eh_forget(h, s);
        fall_asleep(h);
        malloc_trim(0);
        if (k == 3) { /* the allocator has settled */
            first = resident();
            booked = ledger_sum(ledger_daemon(engine_ledger(h->en)));
        }
    }
    /* its newest tokens, up to 1,024, stand in the cache that is away: no more than that is more */
    assert_true(ledger_sum(ledger_daemon(engine_ledger(h->en))) <= booked + 4096);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    assert_true(resident() < first + (512 << 10));
#else
    assert_true(first > 0); /* sanitizers keep freed memory: only booked bytes can be compared */
#endif
    eh_close(&h);
}

static void file_copy(const char *from, const char *to)
{
    char bytes[65536];
    int in = open(from, O_RDONLY), out = open(to, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_true(in >= 0 && out >= 0);
    for (ssize_t n; (n = read(in, bytes, sizeof bytes)) > 0;)
        assert_int_equal(write(out, bytes, (size_t)n), n);
    close(in);
    close(out);
}

/* The file has gone, or is another one: its sessions are told so, and go on when it is back. */
static void the_file_must_be_what_it_was(void **state)
{
    (void)state;
    char path[] = "/tmp/backcast-model-XXXXXX.gguf";
    int fd = mkstemps(path, 5);
    assert_true(fd >= 0);
    close(fd);
    file_copy(TEST_VECTORS "/tiny-llama.gguf", path);
    struct generate_options o = eh_greedy(3);
    struct eh *a = open_with("tiny-llama.gguf", 0, 0);
    struct eh *h = open_with(path, 500, 64 << 20);
    struct eh_ask ask = {.policy = "counter_causal", .budget_tokens = 80};
    uint64_t s = eh_session(h, &ask), t = eh_session(a, &ask);
    turn(h, s, 0);
    turn(a, t, 0);
    fall_asleep(h);
    unlink(path);
    const struct report *r = eh_reply(h, eh_post_ids(h, s, prompt, 20, &o));
    assert_int_equal(r->type, REP_ERROR);
    assert_int_equal(r->u.error.code, BC_ENOTFOUND);
    assert_int_equal(weights(h), 0);
    file_copy(TEST_VECTORS "/tiny-llama-rope3.gguf", path);
    eh_expect_error(h, eh_post_ids(h, s, prompt, 20, &o), BC_ESTATE, "model");
    assert_int_equal(weights(h), 0);
    r = eh_reply(h, eh_post_open(h, &ask));
    assert_int_equal(r->type, REP_ERROR);
    file_copy(TEST_VECTORS "/tiny-llama.gguf", path);
    turn(h, s, 1);
    turn(a, t, 1);
    equal(a, t, h, s);
    eh_close(&h);
    eh_close(&a);
    unlink(path);
}

/* While it is loaded again: other sessions of it are asked too, one is closed, one is cancelled. */
static void many_wait_for_the_same_model(void **state)
{
    (void)state;
    struct eh *h = open_with("tiny-llama.gguf", 1000, 64 << 20);
    struct generate_options o = eh_greedy(5);
    struct eh_ask ask = {.policy = "h2o", .budget_tokens = 80};
    uint64_t s[4];
    for (int i = 0; i < 4; i++) {
        s[i] = eh_session(h, &ask);
        turn(h, s[i], i);
    }
    eh_pass(h, 2000);
    eh_run(h);
    assert_int_equal(weights(h), 0);
    uint32_t r[3];
    for (int i = 0; i < 3; i++)
        r[i] = eh_post_ids(h, s[i], prompt, 20, &o);
    uint32_t cancel = eh_post(h, eh_command(h, CMD_CANCEL, s[1]));
    uint32_t close = eh_post(h, eh_command(h, CMD_CLOSE, s[2]));
    eh_expect(h, r[0], REP_ACCEPTED);
    eh_run_to_end(h, s[0]);
    assert_int_equal(eh_stream(h, s[0])->n_ids, NEW + 5);
    eh_expect(h, r[1], REP_ACCEPTED);
    eh_expect(h, cancel, REP_DONE);
    assert_int_equal(eh_stream(h, s[1])->end.u.end.reason, END_CANCELLED);
    eh_expect(h, r[2], REP_ACCEPTED);
    eh_expect(h, close, REP_CLOSED);
    turn(h, s[3], 0);
    turn(h, s[1], 0);
    eh_close(&h);
}

static void with_threads(void **state)
{
    (void)state;
    struct eh *h = open_with("tiny-llama.gguf", 3000, 64 << 20);
    struct eh_ask ask = {.policy = "h2o", .budget_tokens = 80};
    eh_start(h);
    uint64_t s = eh_session(h, &ask);
    for (int k = 0; k < 6; k++) {
        turn(h, s, k % 4);
        usleep(k % 2 == 0 ? 20000 : 100);
    }
    eh_close(&h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_model_sleeps_and_its_sessions_go_on),
        cmocka_unit_test(a_model_with_nowhere_to_put_its_caches_stays),
        cmocka_unit_test(memory_stays_flat_over_twenty_times),
        cmocka_unit_test(the_file_must_be_what_it_was),
        cmocka_unit_test(many_wait_for_the_same_model),
        cmocka_unit_test(with_threads),
    };
    return cmocka_run_group_tests(tests, setup, NULL);
}
