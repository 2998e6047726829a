/* The engine with its threads: models that come and go beside running answers, a storm of commands,
 * the end at any moment, and sleep when there is nothing to do. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "engine_harness.h"
#include "records.h"
#include "sanitized.h"

static const struct engine_model_path models[] = {
    {"second", TEST_VECTORS "/tiny-qwen2.gguf", NULL},
    {"third", TEST_VECTORS "/tiny-qwen3.gguf", "chatml"},
    {"lost", "/nowhere/lost.gguf", NULL},
};

static void with_models(struct engine_options *o, void *arg)
{
    (void)arg;
    o->models = models;
    o->n_models = ARRAY_LEN(models);
    o->default_model_name = "first";
    o->prefill_chunk = 24;
    o->score_rows = 20;
}

static int32_t prompt[600];

static int setup(void **state)
{
    (void)state;
    uint32_t x = 3;
    for (size_t i = 0; i < ARRAY_LEN(prompt); i++) {
        x = x * 1664525u + 1013904223u;
        prompt[i] = (int32_t)(3 + (x >> 8) % 280);
    }
    return 0;
}

static uint32_t post_model(struct eh *h, enum command_type type, const char *name, bool admin)
{
    struct command *c = eh_command(h, type, 0);
    c->admin = admin;
    c->u.load.path = strdup(name);
    assert_non_null(c->u.load.path);
    return eh_post(h, c);
}

static void models_come_and_go(struct eh *h)
{
    struct generate_options o = eh_greedy(300);
    uint64_t first = eh_session(h, &(struct eh_ask){.budget_tokens = 90});
    eh_ids(h, first, prompt, 200, &o); /* runs beside all of this */
    assert_string_equal(engine_default_model(h->en), "first");

    struct eh_ask ask = {.model = "second", .budget_tokens = 90};
    uint32_t a = eh_post_open(h, &ask), b = eh_post_open(h, &ask); /* both wait for one load */
    ask.model = TEST_VECTORS "/../vectors/tiny-qwen2.gguf";        /* the same file */
    uint64_t by_path = eh_session(h, &ask);
    uint64_t by_name[2] = {eh_expect(h, a, REP_OPENED)->session,
                           eh_expect(h, b, REP_OPENED)->session};
    eh_expect_error(h, eh_post_open(h, &(struct eh_ask){.model = "lost"}), BC_ENOTFOUND, "model");
    eh_expect(h, post_model(h, CMD_LOAD, "third", true), REP_DONE);
    eh_expect_error(h, post_model(h, CMD_LOAD, "third", false), BC_EPERMISSION, "");
    const struct report *r = eh_expect(h, eh_post(h, eh_command(h, CMD_STAT, 0)), REP_STAT);
    assert_int_equal(r->u.stat.n_models, 3);
    assert_int_equal(r->u.stat.n_sessions, 4);
    for (uint32_t i = 0; i < 3; i++)
        if (strcmp(r->u.stat.models[i].name, "second") == 0)
            assert_int_equal(r->u.stat.models[i].sessions, 3);

    eh_ids(h, by_name[0], prompt, 100, &o);
    eh_expect_error(h, post_model(h, CMD_UNLOAD, "second", true), BC_EBUSY, "model");
    eh_expect_error(h, post_model(h, CMD_UNLOAD, "first", true), BC_EBUSY, "model");
    eh_expect_error(h, post_model(h, CMD_UNLOAD, "fourth", true), BC_EUNKNOWN, "model");
    eh_expect_error(h, post_model(h, CMD_UNLOAD, "third", false), BC_EPERMISSION, "");
    eh_expect(h, post_model(h, CMD_UNLOAD, "third", true), REP_DONE);
    eh_run_to_end(h, by_name[0]);
    assert_int_equal(eh_stream(h, by_name[0])->n_ids, 300);
    eh_close_session(h, by_name[0]);
    eh_close_session(h, by_name[1]);
    eh_close_session(h, by_path);
    eh_expect(h, post_model(h, CMD_UNLOAD, "second", true), REP_DONE);
    eh_run_to_end(h, first);
    assert_int_equal(eh_stream(h, first)->n_ids, 300);
    r = eh_expect(h, eh_post(h, eh_command(h, CMD_STAT, 0)), REP_STAT);
    assert_int_equal(r->u.stat.n_models, 1);
}

static void models_come_and_go_beside_running_answers(void **state)
{
    (void)state;
    for (int threads = 0; threads < 2; threads++) {
        struct eh *h = eh_open("tiny-llama.gguf", with_models, NULL);
        if (threads)
            eh_start(h);
        models_come_and_go(h);
        eh_close(&h);
    }
}

/* A client that goes away while its model loads gets no session. */
static void gone_while_the_model_loads(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-llama.gguf", with_models, NULL);
    struct eh_ask ask = {.model = "second", .budget_tokens = 64, .conn = 99};
    uint32_t open = eh_post_open(h, &ask); /* both in one step: the load begins after it */
    struct command *c = eh_command(h, CMD_GONE, 0);
    c->conn = 99;
    eh_post(h, c);
    eh_expect_error(h, open, BC_ECANCELLED, ""); /* who made rings for it must hear of it */
    eh_start(h);
    eh_session(h, &(struct eh_ask){.model = "second", .budget_tokens = 64});
    const struct report *r = eh_expect(h, eh_post(h, eh_command(h, CMD_STAT, 0)), REP_STAT);
    assert_int_equal(r->u.stat.n_sessions, 1);
    eh_close(&h);
}

/* ---- the end ---- */

static void stopped_at_any_moment_every_request_is_told(void **state)
{
    (void)state;
    for (uint32_t round = 0; round < 25; round += SANITIZED ? 2 : 1) {
        struct eh *h = eh_open("tiny-llama.gguf", with_models, NULL);
        uint64_t s[6];
        uint32_t request[6], loading;
        struct generate_options o = eh_greedy(800);
        eh_start(h);
        for (uint32_t i = 0; i < 6; i++) {
            s[i] = eh_session(h, &(struct eh_ask){.budget_tokens = 70 + i});
            request[i] = eh_post_ids(h, s[i], prompt, 10 + 20 * i, &o);
        }
        loading = eh_post_open(h, &(struct eh_ask){.model = "second"});
        nanosleep(&(struct timespec){.tv_nsec = 700000 * (long)round}, NULL);
        engine_stop(h->en);
        struct err e = {0};
        struct command *c = eh_command(h, CMD_STAT, 0);
        assert_int_equal(engine_post(h->en, &c, &e), BC_ECLOSED);
        command_free(&c);
        eh_collect(h); /* reports stay readable */
        for (uint32_t i = 0; i < 6; i++) {
            const struct report *r = eh_reply(h, request[i]);
            struct eh_stream *st = eh_stream(h, s[i]);
            if (r->type == REP_ERROR) {
                assert_int_equal(r->u.error.code, BC_ECLOSED);
                assert_int_equal(st->n_ends, 0);
            } else {
                assert_int_equal(st->n_ends, 1);
                assert_true(st->end.u.end.reason == END_RETRY ||
                            (st->end.u.end.reason == END_LENGTH && st->n_ids == 800));
            }
        }
        eh_reply(h, loading); /* one way or the other */
        eh_close(&h);
    }
}

/* ---- sleep ---- */

static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void an_idle_engine_uses_no_processor(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-llama.gguf", NULL, NULL);
    eh_start(h);
    struct generate_options o = eh_greedy(50);
    uint64_t s = eh_session(h, &(struct eh_ask){.budget_tokens = 64});
    eh_ids(h, s, prompt, 50, &o);
    eh_run_to_end(h, s);
    nanosleep(&(struct timespec){.tv_nsec = 300000000}, NULL); /* workers may look for a while */
    double before = cpu_seconds();
    nanosleep(&(struct timespec){.tv_sec = 1}, NULL);
    double used = cpu_seconds() - before;
    print_message("idle: %.2f ms of processor in a second\n", used * 1e3);
    assert_true(used < 0.01);
    /* parked is as good as idle */
    eh_port(h, s)->room = 0;
    eh_ids(h, s, prompt, 50, &o);
    before = cpu_seconds();
    nanosleep(&(struct timespec){.tv_sec = 1}, NULL);
    used = cpu_seconds() - before;
    assert_true(used < 0.01);
    eh_port(h, s)->room = UINT32_MAX;
    eh_post(h, eh_command(h, CMD_ROOM, s));
    eh_run_to_end(h, s);
    eh_close(&h);
}

/* ---- a storm ---- */

#define STORM_SESSIONS 12u

static bool watching;

/* Another thread reads the totals all the while. */
static void *watch(void *arg)
{
    struct engine *en = arg;
    struct engine_counts c;
    uint64_t steps = 0, looked = 0;
    while (__atomic_load_n(&watching, __ATOMIC_ACQUIRE)) {
        engine_totals(en, &c);
        bc_assert(c.steps >= steps && c.kv_live <= c.kv_held && c.sessions <= STORM_SESSIONS);
        steps = c.steps;
        if (++looked % 64 == 0)
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return NULL;
}

struct storm {
    struct eh *h;
    uint64_t session[STORM_SESSIONS];
    uint32_t opening[STORM_SESSIONS];
    uint64_t x;
    uint32_t done[CMD_ATTACH + 1];
};

static uint32_t pick(struct storm *w, uint32_t n)
{
    w->x = w->x * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(w->x >> 33) % n;
}

static void storm_open(struct storm *w, uint32_t i)
{
    static const char *const policies[] = {
        "counter_causal_fast", "counter_causal", "h2o", "tova", "sliding_window", "none"};
    static const char *const names[] = {NULL, NULL, "second", TEST_VECTORS "/tiny-llama-q4_0.gguf"};
    uint32_t p = pick(w, 6);
    w->opening[i] =
        eh_post_open(w->h, &(struct eh_ask){.policy = policies[p],
                                            .model = names[pick(w, 4)],
                                            .budget_tokens = p == 5 ? 0 : 40 + pick(w, 200),
                                            .frozen = pick(w, 3) == 0 ? EVICT_FROZEN_AUTO : 0});
}

static void storm_command(struct storm *w, uint32_t i)
{
    struct eh *h = w->h;
    uint64_t s = w->session[i];
    struct generate_options o = eh_greedy(pick(w, 60));
    struct command *c;
    uint32_t kind = pick(w, 12);
    w->done[kind < 6 ? CMD_GENERATE : kind - 5]++;
    switch (kind) {
    case 6:
        eh_post(h, eh_command(h, CMD_CANCEL, s));
        break;
    case 7:
        c = eh_command(h, CMD_BUDGET, s);
        c->u.budget.tokens = 30 + pick(w, 300);
        eh_post(h, c);
        break;
    case 8:
        c = eh_command(h, CMD_PRUNE, s);
        c->u.budget.keep = pick(w, 100);
        eh_post(h, c);
        break;
    case 9:
        c = eh_command(h, CMD_SCORES, s);
        c->conn = pick(w, 2) == 0 ? EH_CONN : 5;
        eh_post(h, c);
        break;
    case 10:
        eh_post(h, eh_command(h, CMD_STAT, pick(w, 2) == 0 ? s : 0));
        break;
    case 11:
        eh_post(h, eh_command(h, CMD_CLOSE, s));
        w->session[i] = 0;
        break;
    default:
        o.temperature = (float)pick(w, 3) * 0.5f;
        o.ignore_end = pick(w, 2) == 0;
        if (kind < 3)
            eh_post_ids(h, s, prompt, pick(w, 150), &o);
        else
            eh_post_text(h, s, kind < 5 ? PROMPT_CHAT : PROMPT_RAW, NULL, "tell me a story",
                         pick(w, 15), &o);
    }
}

static void storm_opened(struct storm *w, uint32_t i)
{
    const struct report *r = eh_reply(w->h, w->opening[i]);
    w->opening[i] = 0;
    w->session[i] = r->type == REP_OPENED ? r->session : 0;
}

static void storm(struct eh *h, uint32_t n, uint64_t seed)
{
    struct storm w = {.h = h, .x = seed};
    for (uint32_t op = 0; op < n; op++) {
        uint32_t i = pick(&w, STORM_SESSIONS);
        if (w.opening[i] != 0)
            storm_opened(&w, i);
        else if (w.session[i] == 0)
            storm_open(&w, i);
        else
            storm_command(&w, i);
        if (!h->started)
            eh_step(h);
        else if (pick(&w, 4) == 0)
            nanosleep(&(struct timespec){.tv_nsec = (long)pick(&w, 400000)}, NULL);
        eh_collect(h);
    }
    for (uint32_t i = 0; i < STORM_SESSIONS; i++)
        if (w.opening[i] != 0)
            storm_opened(&w, i);
    eh_post(h, eh_command(h, CMD_GONE, 0));
    const struct report *r = eh_expect(h, eh_post(h, eh_command(h, CMD_STAT, 0)), REP_STAT);
    assert_int_equal(r->u.stat.n_sessions, 0);
    assert_int_equal(r->u.stat.kv_held, 0);
    for (uint32_t i = 1; i <= 6; i++)
        assert_true(w.done[i] > 0);
}

static void a_storm_of_commands_leaves_nothing_behind(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= (SANITIZED ? 2 : 3); seed++)
        for (int threads = 0; threads < 2; threads++) {
            struct eh *h = eh_open("tiny-llama.gguf", with_models, NULL);
            pthread_t watcher;
            if (threads)
                eh_start(h);
            __atomic_store_n(&watching, true, __ATOMIC_RELEASE);
            assert_int_equal(pthread_create(&watcher, NULL, watch, h->en), 0);
            storm(h, SANITIZED ? 1000 : 1500, seed);
            __atomic_store_n(&watching, false, __ATOMIC_RELEASE);
            pthread_join(watcher, NULL);
            eh_close(&h);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(models_come_and_go_beside_running_answers),
        cmocka_unit_test(gone_while_the_model_loads),
        cmocka_unit_test(stopped_at_any_moment_every_request_is_told),
        cmocka_unit_test(an_idle_engine_uses_no_processor),
        cmocka_unit_test(a_storm_of_commands_leaves_nothing_behind),
    };
    return cmocka_run_group_tests(tests, setup, NULL);
}
