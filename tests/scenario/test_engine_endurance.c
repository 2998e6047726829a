/* What must not grow: memory after requests cancelled at random, after models that come and go, and
 * under a limit of the system just above what was configured. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include "core.h"
#include "engine_harness.h"
#include "sanitized.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
/* a sanitizer's address space cannot be limited, and it keeps freed blocks */
#define OWN_ALLOCATOR 0
#else
#define OWN_ALLOCATOR 1
#endif

static int32_t prompt[2000];
static uint32_t seed = 3;

static uint32_t below(uint32_t n)
{
    seed = seed * 1664525u + 1013904223u;
    return (uint32_t)(((uint64_t)seed * n) >> 32);
}

static int setup(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(prompt); i++)
        prompt[i] = (int32_t)(3 + below(280));
    return 0;
}

static uint64_t booked(struct eh *h)
{
    return ledger_sum(ledger_daemon(engine_ledger(h->en)));
}

/* ---- cancels ---- */

static void small_blocks(struct engine_options *o, void *arg)
{
    (void)arg;
    o->score_rows = 30;
    o->prefill_chunk = 40;
    o->kv_memory = 40 * 34304;
    o->session_budget = 10 * 34304;
}

static uint64_t open_random(struct eh *h)
{
    static const char *const policies[] = {"counter_causal",      "h2o", "tova", "sliding_window",
                                           "counter_causal_fast", "none"};
    struct eh_ask ask = {.policy = policies[below(6)], .budget_tokens = 64 + below(200)};
    ask.trigger = below(4) == 0 && strcmp(ask.policy, "none") != 0 ? "prefill_end" : NULL;
    return eh_session(h, &ask);
}

#define CANCELS (SANITIZED ? 300 : 1000)

static void a_thousand_cancels_leave_nothing(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-llama.gguf", small_blocks, NULL);
    uint64_t s[4], rest = 0;
    uint32_t n_cut = 0;
    for (int i = 0; i < 4; i++)
        s[i] = open_random(h);
    for (int round = 0; round < CANCELS; round++) {
        int i = (int)below(4);
        struct generate_options o = eh_greedy(1 + below(60));
        uint32_t ends = eh_stream(h, s[i])->n_ends;
        uint32_t r = eh_post_ids(h, s[i], prompt + below(1000), 1 + below(150), &o);
        if (eh_reply(h, r)->type == REP_ACCEPTED) {
            for (uint32_t n = below(12); n > 0 && eh_stream(h, s[i])->n_ends == ends; n--)
                eh_step(h);
            n_cut += eh_stream(h, s[i])->n_ends == ends;
            eh_expect(h, eh_post(h, eh_command(h, CMD_CANCEL, s[i])), REP_DONE);
            assert_int_equal(eh_stream(h, s[i])->n_ends, ends + 1);
        }
        if (below(3) == 0) { /* most are cut more than once */
            eh_close_session(h, s[i]);
            s[i] = open_random(h);
        }
        if (round % 100 == 99) {
            for (int k = 0; k < 4; k++)
                eh_close_session(h, s[k]);
            eh_run(h);
            assert_int_equal(models_held(h->en), 0);
            struct ledger_owner *all = ledger_daemon(engine_ledger(h->en));
            uint64_t now =
                booked(h) - ledger_all(all, LEDGER_scratch); /* pools are made on demand */
            assert_true(rest == 0 || now == rest);
            rest = now;
            for (int k = 0; k < 4; k++)
                s[k] = open_random(h);
        }
    }
    assert_true(n_cut > CANCELS / 5 * 2);
    eh_close(&h);
}

/* ---- models that come and go ---- */

static uint64_t resident(void)
{
    unsigned long size = 0, pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    assert_non_null(f);
    assert_int_equal(fscanf(f, "%lu %lu", &size, &pages), 2);
    fclose(f);
    return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

static uint32_t post_model(struct eh *h, enum command_type type, const char *name)
{
    char path[512];
    struct command *c = eh_command(h, type, 0);
    snprintf(path, sizeof path, "%s/%s", TEST_VECTORS, name);
    c->admin = true;
    c->u.load.path = strdup(path);
    assert_non_null(c->u.load.path);
    return eh_post(h, c);
}

static void loading_and_unloading_is_flat(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-llama.gguf", NULL, NULL);
    char path[512];
    uint64_t at_first = 0, rss_first = 0;
    snprintf(path, sizeof path, "%s/tiny-qwen3.gguf", TEST_VECTORS);
    for (int i = 0; i < (SANITIZED ? 8 : 20); i++) {
        struct generate_options o = eh_greedy(20);
        eh_expect(h, post_model(h, CMD_LOAD, "tiny-qwen3.gguf"), REP_DONE);
        assert_true(booked(h) > at_first);
        uint64_t s = eh_session(h, &(struct eh_ask){.model = path, .budget_tokens = 100});
        eh_ids(h, s, prompt, 300, &o);
        eh_run_to_end(h, s);
        eh_expect_error(h, post_model(h, CMD_UNLOAD, "tiny-qwen3.gguf"), BC_EBUSY, "model");
        eh_close_session(h, s);
        eh_expect(h, post_model(h, CMD_UNLOAD, "tiny-qwen3.gguf"), REP_DONE);
        malloc_trim(0);
        if (i == 2) {
            at_first = booked(h);
            rss_first = resident();
        }
        assert_true(i <= 2 || booked(h) == at_first);
    }
    if (OWN_ALLOCATOR) /* a twentieth of one model's size a cycle would show */
        assert_true(resident() < rss_first + (1u << 20));
    eh_close(&h);
}

/* ---- a limit of the system, 10 % above the configured total ---- */

#define KV (3u << 20)
#define N_SESSIONS 16
#define TURNS 1000

static void configured(struct engine_options *o, void *arg)
{
    (void)arg;
    o->kv_memory = KV;
    o->session_budget = KV / 8;
    o->max_sessions = N_SESSIONS;
    o->prefill_chunk = 64;
}

static uint64_t address_space(void)
{
    unsigned long size = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f == NULL || fscanf(f, "%lu", &size) != 1)
        fail_msg("statm");
    fclose(f);
    return size * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* In a process of its own: pools reserve their addresses, then nothing more than 10 % of the whole may
 * come. Budgets add up to twice of what there is. */
static void turns_under_a_limit(void **state)
{
    (void)state;
    static const char *const policies[] = {"counter_causal_fast", "h2o", "sliding_window", "none"};
    struct eh *h = eh_open("tiny-llama.gguf", configured, NULL);
    uint64_t s[N_SESSIONS], n_budget = 0, most = 0;
    uint32_t turns[N_SESSIONS] = {0};
    for (int i = 0; i < N_SESSIONS; i++)
        s[i] = eh_session(h, &(struct eh_ask){.policy = policies[i % 4]});
    struct rlimit rl = {0};
    rl.rlim_cur = rl.rlim_max = address_space() + booked(h) / 10 + KV / 10;
    assert_int_equal(setrlimit(RLIMIT_AS, &rl), 0);
    for (int turn = 0; turn < TURNS; turn++) {
        int i = (int)below(N_SESSIONS);
        struct generate_options o = eh_greedy(1 + below(20));
        if (turns[i] > 6) { /* near the trained context */
            eh_close_session(h, s[i]);
            s[i] = eh_session(h, &(struct eh_ask){.policy = policies[i % 4]});
            turns[i] = 0;
        }
        turns[i]++;
        const struct report *r =
            eh_reply(h, eh_post_ids(h, s[i], prompt + below(1000), 1 + below(120), &o));
        if (r->type != REP_ACCEPTED) { /* a session that never prunes may be told so */
            assert_int_equal(i % 4, 3);
            assert_int_equal(r->u.error.code, BC_EBUDGET);
            n_budget++;
            continue;
        }
        eh_run_to_end(h, s[i]);
        uint32_t reason = eh_stream(h, s[i])->end.u.end.reason;
        if (reason == END_BUDGET && i % 4 == 3)
            n_budget++;
        else
            assert_int_equal(reason, END_LENGTH);
        eh_forget(h, s[i]);
        most = BC_MAX(most, models_held(h->en));
        eh_stream(h, s[i])->ends_waited = 0;
    }
    print_message("%u turns, %llu refused for memory, caches %llu of %u bytes\n", TURNS,
                  (unsigned long long)n_budget, (unsigned long long)most, KV);
    assert_true(most > KV / 100 * 95); /* it was full */
    eh_close(&h);
}

static void a_thousand_turns_fit_under_the_systems_limit(void **state)
{
    (void)state;
    int status = 0;
    if (!OWN_ALLOCATOR)
        skip();
    pid_t child = fork();
    if (child == 0) {
        char *args[] = {"test_engine_endurance", "--turns", NULL};
        execv("/proc/self/exe", args);
        _exit(4);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
        fail_msg("it ended with status %x", (unsigned)status);
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "--turns") == 0) {
        const struct CMUnitTest inner[] = {cmocka_unit_test(turns_under_a_limit)};
        return cmocka_run_group_tests(inner, setup, NULL);
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_thousand_cancels_leave_nothing),
        cmocka_unit_test(loading_and_unloading_is_flat),
        cmocka_unit_test(a_thousand_turns_fit_under_the_systems_limit),
    };
    return cmocka_run_group_tests(tests, setup, NULL);
}
