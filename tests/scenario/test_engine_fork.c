/* Forks: both sessions go on as one that nobody has forked, for every policy; pages are shared until
 * they part; and what cannot be forked. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "core.h"
#include "engine_harness.h"
#include "folders_test.h"
#include "records.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FIRST(k) ((k) % 2) /* one of two variants for each policy */
#define STEP 2
#else
#define FIRST(k) 0
#define STEP 1
#endif

static int32_t prompt[2000];

static int setup(void **state)
{
    (void)state;
    uint32_t x = 71;
    for (size_t i = 0; i < ARRAY_LEN(prompt); i++) {
        x = x * 1664525u + 1013904223u;
        prompt[i] = (int32_t)(3 + (x >> 8) % 280);
    }
    return 0;
}

static void apply(struct engine_options *o, void *arg)
{
    o->prefill_chunk = 64;
    o->score_rows = 100;
    o->host_tier = 64 << 20;
    o->state_dir = arg;
}

static struct session *of(struct eh *h, uint64_t id)
{
    return sess_find(h->en, id);
}

static void turn(struct eh *h, uint64_t s, uint32_t at, uint32_t n)
{
    struct generate_options o = eh_greedy(40);
    o.temperature = at % 2 != 0 ? 0.8f : 0;
    o.seed = at;
    o.repeat_penalty = 1.1f; /* the newest tokens are a state of their own */
    eh_ids(h, s, prompt + at * 50, n, &o);
    eh_run_to_end(h, s);
}

static void equal(struct eh *h, uint64_t twin, uint64_t s, const char *what)
{
    const struct eh_stream *a = eh_stream(h, twin), *b = eh_stream(h, s);
    if (a->n_ids != b->n_ids || memcmp(a->ids, b->ids, a->n_ids * sizeof *a->ids) != 0)
        fail_msg("%s: the text differs", what);
    assert_memory_equal(a->streams, b->streams, a->n_ids * sizeof *a->streams);
    if (a->n_prunes != b->n_prunes)
        fail_msg("%s: %u prunes, not %u", what, b->n_prunes, a->n_prunes);
    for (uint32_t i = 0; i < a->n_prunes; i++) {
        assert_int_equal(a->prunes[i].before, b->prunes[i].before);
        assert_int_equal(a->prunes[i].n_ranges, b->prunes[i].n_ranges);
        assert_memory_equal(a->prunes[i].ranges, b->prunes[i].ranges,
                            a->prunes[i].n_ranges * sizeof(struct evict_range));
    }
    assert_int_equal(a->end.u.end.prunes, b->end.u.end.prunes);
    assert_int_equal(a->end.u.end.tokens_dropped, b->end.u.end.tokens_dropped);
    assert_int_equal(of(h, twin)->stream, of(h, s)->stream);
}

static uint64_t fork_of(struct eh *h, uint64_t s)
{
    uint32_t pages = pool_pages_out(of(h, s)->pool);
    uint64_t f = eh_expect(h, eh_post_fork(h, s, NULL), REP_OPENED)->session;
    assert_true(pool_pages_out(of(h, s)->pool) <= pages); /* free */
    assert_int_equal(seqcache_bytes_shared(of(h, s)->cache), seqcache_bytes_held(of(h, f)->cache));
    assert_int_equal(of(h, f)->budget_bytes, of(h, s)->budget_bytes);
    return f;
}

/* History; fork; then each its own way, while the twins had the same history by themselves. */
static void both_go_on_as_if_nothing_had_been(void **state)
{
    (void)state;
    for (unsigned k = 0; evict_policy_at(k) != NULL; k++)
        for (unsigned variant = FIRST(k); variant < 2; variant += STEP) {
            const struct evict_policy *p = evict_policy_at(k);
            struct eh_ask ask = {.policy = p->name, .seed = 3, .frozen = variant * 20};
            if (evict_policy_prunes(p)) /* two pages, or more than the history */
                ask.budget_tokens = variant == 0 ? 128 : 300;
            struct eh *h = eh_open("tiny-llama.gguf", apply, NULL);
            h->en->opt.no_prefixes = variant != 0;
            uint64_t s[3], twin[3];
            s[0] = eh_session(h, &ask);
            turn(h, s[0], 0, 100);
            turn(h, s[0], 3, 45);
            s[1] = fork_of(h, s[0]);
            turn(h, s[1], 5, 60);
            s[2] = fork_of(h, s[1]); /* of a fork */
            eh_forget(h, s[0]);
            eh_forget(h, s[1]);
            for (uint32_t i = 0; i < 3; i++)
                turn(h, s[i], 8 + i, 70);
            for (uint32_t i = 0; i < 3; i++) {
                twin[i] = eh_session(h, &ask);
                turn(h, twin[i], 0, 100);
                turn(h, twin[i], 3, 45);
                if (i > 0)
                    turn(h, twin[i], 5, 60);
                eh_forget(h, twin[i]);
                turn(h, twin[i], 8 + i, 70);
                equal(h, twin[i], s[i], p->name);
            }
            eh_close_session(h, s[0]); /* the others' pages stay */
            turn(h, s[1], 20, 70);
            turn(h, twin[1], 20, 70);
            equal(h, twin[1], s[1], p->name);
            eh_close(&h);
        }
}

static void one_prompt_a_pass(struct engine_options *o, void *arg)
{
    apply(o, arg);
    o->max_rows = 64;
}

/* Slots of shared pages that are free to nobody count against the budget: a prompt that is reserved as a whole gets by without,
 * also while it waits for its first pass. */
static void a_whole_prompt_stays_under_the_ceiling(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-llama.gguf", one_prompt_a_pass, NULL);
    struct eh_ask ask = {.policy = "counter_causal_fast",
                         .trigger = "prefill_end",
                         .budget_tokens = 232,
                         .keep = 100};
    struct generate_options o = eh_greedy(40);
    uint64_t s = eh_session(h, &ask), twin = eh_session(h, &ask);
    turn(h, s, 0, 46);
    turn(h, twin, 0, 46);
    uint64_t both[2] = {s, fork_of(h, s)};
    assert_int_equal(seqcache_count(of(h, s)->cache),
                     85); /* in 2 pages; 135 more in 2 of 4, not in 3 */
    eh_forget(h, twin);
    eh_ids(h, twin, prompt + 400, 134, &o);
    eh_run_to_end(h, twin);
    eh_forget(h, s);
    for (int i = 0; i < 2; i++)
        eh_post_ids(h, both[i], prompt + 400, 134, &o);
    for (int i = 0; i < 2; i++) {
        eh_run_to_end(h, both[i]);
        equal(h, twin, both[i], "whole");
    }
    eh_close(&h);
}

/* An answer that was cut goes on in both. */
static void a_pending_token_is_in_both(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-llama.gguf", apply, NULL);
    struct generate_options o = eh_greedy(30);
    uint64_t s = eh_session(h, &(struct eh_ask){.policy = "h2o", .budget_tokens = 100});
    eh_ids(h, s, prompt, 90, &o);
    eh_run_to_end(h, s);
    uint64_t f = fork_of(h, s), both[2] = {s, f};
    eh_forget(h, s);
    for (int i = 0; i < 2; i++) {
        eh_ids(h, both[i], prompt, 0, &o);
        eh_run_to_end(h, both[i]);
    }
    equal(h, s, f, "cut");
    eh_close(&h);
}

static void one_that_is_away_comes_back_first(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-llama.gguf", apply, NULL);
    struct eh_ask ask = {.policy = "tova", .budget_tokens = 110};
    struct err e;
    uint64_t s = eh_session(h, &ask), twin = eh_session(h, &ask);
    turn(h, s, 0, 150);
    turn(h, twin, 0, 150);
    assert_int_equal(tier_leave(h->en, of(h, s), &e), BC_OK);
    eh_run(h);
    assert_int_equal(of(h, s)->lodging.place, PLACE_AWAY);
    uint64_t f = eh_expect(h, eh_post_fork(h, s, "second"), REP_OPENED)->session;
    assert_string_equal(of(h, f)->name, "second");
    eh_forget(h, twin);
    turn(h, f, 7, 80);
    turn(h, twin, 7, 80);
    equal(h, twin, f, "back");
    eh_close(&h);
}

static void what_is_not_forked(void **state)
{
    (void)state;
    char dir[FOLDER_PATH];
    folder_root(dir, "fork");
    struct eh *h = eh_open("tiny-llama.gguf", apply, dir);
    struct generate_options o = eh_greedy(30);
    uint64_t s = eh_session(h, &(struct eh_ask){.policy = "none", .name = "one"});
    eh_ids(h, s, prompt, 90, &o);
    eh_step(h);
    eh_expect_error(h, eh_post_fork(h, s, NULL), BC_EBUSY, "session");
    eh_run_to_end(h, s);
    uint32_t sessions = h->en->n_sessions;
    eh_expect_error(h, eh_post_fork(h, s, "one"), BC_EBUSY, "name");
    eh_expect_error(h, eh_post_fork(h, s, "a/b"), BC_EINVALID, "name");
    eh_expect_error(h, eh_post_fork(h, 12345, NULL), BC_EUNKNOWN, "session");
    uint64_t other = eh_session(h, &(struct eh_ask){.policy = "none", .uid = 5});
    struct command *c = eh_command(h, CMD_FORK, other);
    c->uid = 6;
    eh_expect_error(h, eh_post(h, c), BC_EPERMISSION, "session");
    c = eh_command(h, CMD_FORK, other);
    c->uid = 6;
    c->admin = true;
    eh_expect_error(h, eh_post(h, c), BC_EPERMISSION, "session");
    eh_close_session(h, other);
    uint64_t d = eh_session(h, &(struct eh_ask){.policy = "none", .name = "kept", .durable = true});
    eh_expect_error(h, eh_post_fork(h, d, NULL), BC_EUNSUPPORTED, "session");
    eh_close_session(h, d);
    assert_int_equal(h->en->n_sessions, sessions);
    eh_ids(h, s, prompt, 20, &o); /* none of it has harmed the one that there is */
    eh_run_to_end(h, s);
    eh_close(&h);
    folder_drop(dir);
}

/* A fork counts like any other session: none that would leave others without a page. */
static void small(struct engine_options *o, void *arg)
{
    apply(o, NULL);
    o->host_tier = 0;
    o->kv_memory = 3 * 34304;
    o->session_budget = 34304;
    (void)arg;
}

static void a_fork_needs_its_share(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-llama.gguf", small, NULL);
    uint64_t s = eh_session(h, &(struct eh_ask){.policy = "none"});
    struct generate_options o = eh_greedy(0);
    eh_ids(h, s, prompt, 40, &o);
    eh_run_to_end(h, s);
    fork_of(h, s);
    fork_of(h, s);
    assert_int_equal(models_held(h->en), 34304);
    eh_expect_error(h, eh_post_fork(h, s, NULL), BC_EBUDGET, "kv_memory");
    eh_close(&h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(both_go_on_as_if_nothing_had_been),
        cmocka_unit_test(a_whole_prompt_stays_under_the_ceiling),
        cmocka_unit_test(a_pending_token_is_in_both),
        cmocka_unit_test(one_that_is_away_comes_back_first),
        cmocka_unit_test(what_is_not_forked),
        cmocka_unit_test(a_fork_needs_its_share),
    };
    return cmocka_run_group_tests(tests, setup, NULL);
}
