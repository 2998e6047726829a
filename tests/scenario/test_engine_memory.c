/* Budgets that change while a session lives, prunes and scores on request, the daemon's own ceiling,
 * and who may do what to whose session. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "engine_harness.h"
#include "kn.h"
#include "records.h"

static int32_t prompt[2000];

static int setup(void **state)
{
    (void)state;
    uint32_t x = 5;
    for (size_t i = 0; i < ARRAY_LEN(prompt); i++) {
        x = x * 1664525u + 1013904223u;
        prompt[i] = (int32_t)(3 + (x >> 8) % 280);
    }
    return 0;
}

static void small_blocks(struct engine_options *o, void *arg)
{
    (void)arg;
    o->score_rows = 10;
    o->prefill_chunk = 32;
}

static uint32_t post_budget(struct eh *h, uint64_t s, uint64_t bytes, uint32_t tokens,
                            uint32_t keep)
{
    struct command *c = eh_command(h, CMD_BUDGET, s);
    c->u.budget.bytes = bytes;
    c->u.budget.tokens = tokens;
    c->u.budget.keep = keep;
    return eh_post(h, c);
}

static uint32_t post_prune(struct eh *h, uint64_t s, uint32_t keep)
{
    struct command *c = eh_command(h, CMD_PRUNE, s);
    c->u.budget.keep = keep;
    return eh_post(h, c);
}

static uint64_t filled(struct eh *h, const struct eh_ask *ask, uint32_t n)
{
    struct generate_options o = eh_greedy(0);
    uint64_t s = eh_session(h, ask);
    eh_ids(h, s, prompt, n, &o);
    eh_run_to_end(h, s);
    return s;
}

static const struct report_session *stat_of(struct eh *h, uint64_t s)
{
    const struct report *r = eh_expect(h, eh_post(h, eh_command(h, CMD_STAT, s)), REP_STAT);
    assert_int_equal(r->u.stat.n_sessions, 1);
    return r->u.stat.sessions;
}

static void a_live_budget_prunes_only_what_is_above_it(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-llama.gguf", small_blocks, NULL);
    uint64_t s = filled(h, &(struct eh_ask){.policy = "counter_causal", .budget_tokens = 512}, 300);
    struct eh_stream *st = eh_stream(h, s);
    const struct report_session *before = stat_of(h, s);
    assert_int_equal(before->tokens, 300);
    assert_int_equal(before->held, 5 * before->page_bytes);

    /* above what is cached: nothing happens, and a default keep follows */
    const struct report_session *b =
        &eh_expect(h, post_budget(h, s, 0, 301, 0), REP_BUDGET)->u.info;
    assert_int_equal(b->budget, 301);
    assert_int_equal(b->keep, 301 - 76);
    assert_int_equal(b->tokens, 300);
    assert_int_equal(b->budget_bytes, 5 * b->page_bytes);
    assert_int_equal(st->n_prunes, 0);

    /* below: prunes to its keep, gives whole pages back, tells in order */
    uint32_t r = post_budget(h, s, 0, 100, 60);
    b = &eh_expect(h, r, REP_BUDGET)->u.info;
    assert_int_equal(b->budget, 100);
    assert_int_equal(b->keep, 60);
    assert_int_equal(b->recent, 12); /* the default follows too */
    assert_int_equal(b->tokens, 60);
    assert_int_equal(b->held, b->page_bytes);
    assert_int_equal(st->n_prunes, 1);
    assert_int_equal(st->prunes[0].reason, PRUNE_SHRUNK);
    assert_int_equal(st->prunes[0].before, 300);
    assert_int_equal(st->prunes[0].after, 60);
    assert_int_equal(st->prunes[0].held_after, b->page_bytes);

    /* bytes round down to whole pages */
    b = &eh_expect(h, post_budget(h, s, 3 * b->page_bytes - 1, 0, 0), REP_BUDGET)->u.info;
    assert_int_equal(b->budget, 128);
    assert_int_equal(b->budget_bytes, 2 * b->page_bytes);

    eh_expect_error(h, post_budget(h, s, 0, 0, 0), BC_EINVALID, "budget_tokens");
    eh_expect_error(h, post_budget(h, s, 5, 0, 0), BC_EBUDGET, "budget_bytes");
    eh_expect_error(h, post_budget(h, s, 0, 50, 50), BC_EINVALID, "keep_tokens");
    eh_expect_error(h, post_budget(h, s, 0, 100000000, 0), BC_EBUDGET, "budget_tokens");
    eh_expect_error(h, post_budget(h, s + 1, 0, 50, 0), BC_EUNKNOWN, "session");
    assert_int_equal(stat_of(h, s)->budget, 128); /* as it was */
    eh_close(&h);
}

/* While it generates: the answer goes on under the new ceiling. */
static void a_budget_shrinks_under_a_running_answer(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-llama.gguf", small_blocks, NULL);
    struct generate_options o = eh_greedy(200);
    uint64_t s =
        eh_session(h, &(struct eh_ask){.policy = "counter_causal_fast", .budget_tokens = 256});
    struct eh_stream *st = eh_stream(h, s);
    eh_ids(h, s, prompt, 150, &o);
    while (st->n_ids < 20)
        eh_step(h);
    eh_expect(h, post_budget(h, s, 0, 90, 0), REP_BUDGET);
    assert_int_equal(stat_of(h, s)->budget_bytes, 2 * stat_of(h, s)->page_bytes);
    eh_run_to_end(h, s);
    assert_int_equal(st->n_ids, 200);
    for (uint32_t i = 1; i < 200; i++)
        assert_int_equal(st->streams[i], st->streams[i - 1] + 1);
    assert_true(st->n_prunes > 5);
    assert_true(stat_of(h, s)->tokens <= 90);

    /* and in the middle of a prompt, while a refresh of its own is under way */
    eh_ids(h, s, prompt, 400, &o);
    while (strcmp(stat_of(h, s)->state, "pruning") != 0)
        eh_step(h);
    eh_expect(h, post_budget(h, s, 0, 40, 0), REP_BUDGET);
    assert_int_equal(stat_of(h, s)->held, stat_of(h, s)->page_bytes);
    eh_expect(h, post_budget(h, s, 0, 300, 0), REP_BUDGET);
    eh_run_to_end(h, s);
    assert_int_equal(st->end.u.end.tokens_in, 400);
    assert_int_equal(st->end.u.end.tokens_out, 200);
    eh_close(&h);
}

static void prunes_on_request(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-llama.gguf", small_blocks, NULL);
    uint64_t s =
        filled(h, &(struct eh_ask){.policy = "counter_causal", .budget_tokens = 200, .frozen = 8},
               150);
    struct eh_stream *st = eh_stream(h, s);
    const struct report *r = eh_expect(h, post_prune(h, s, 0), REP_PRUNED_REPLY);
    assert_int_equal(r->u.pruned.tokens_before, 150); /* its keep is 150: nothing to do */
    assert_int_equal(r->u.pruned.tokens_after, 150);
    assert_int_equal(st->n_prunes, 0);
    r = eh_expect(h, post_prune(h, s, 64), REP_PRUNED_REPLY);
    assert_int_equal(r->u.pruned.tokens_after, 64);
    assert_int_equal(st->n_prunes, 1);
    assert_int_equal(st->prunes[0].reason, PRUNE_ASKED);
    assert_int_equal(stat_of(h, s)->held, stat_of(h, s)->page_bytes);
    eh_expect_error(h, post_prune(h, s, 20), BC_EINVALID, "recent_tokens"); /* 8 + 25 */
    eh_expect_error(h, post_prune(h, s, 7), BC_EINVALID, "frozen_tokens");

    uint64_t none = filled(h, &(struct eh_ask){.policy = "none"}, 50);
    eh_expect_error(h, post_prune(h, none, 20), BC_EINVALID, "policy");
    eh_expect_error(h, post_budget(h, none, 0, 49, 0), BC_EBUDGET, "budget_tokens");
    eh_expect(h, post_budget(h, none, 0, 50, 0), REP_BUDGET);

    /* two at once: the second is told so; a close answers who waits */
    uint64_t big =
        filled(h, &(struct eh_ask){.policy = "counter_causal", .budget_tokens = 600}, 500);
    uint32_t first = post_prune(h, big, 100), second = post_prune(h, big, 90);
    eh_expect_error(h, second, BC_EBUSY, "session");
    uint32_t gone = eh_post(h, eh_command(h, CMD_CLOSE, big));
    eh_expect_error(h, first, BC_ECANCELLED, "session");
    assert_int_equal(eh_expect(h, gone, REP_CLOSED)->u.closed.bytes_freed, 8 * 34304);
    eh_close(&h);
}

/* ---- scores ---- */

static void scores_are_streamed_to_the_owner_and_sent_to_others(void **state)
{
    (void)state;
    static const char *const policies[] = {"counter_causal", "h2o", "knorm"};
    for (size_t i = 0; i < ARRAY_LEN(policies); i++) {
        struct eh *h = eh_open("tiny-llama.gguf", small_blocks, NULL);
        struct eh_ask ask = {.policy = policies[i],
                             .budget_tokens = 400,
                             .frozen = 5,
                             .recent = 20};
        uint64_t s = filled(h, &ask, 390);
        struct eh_stream *st = eh_stream(h, s);
        uint64_t asked_us = h->now_us;
        eh_expect(h, eh_post(h, eh_command(h, CMD_SCORES, s)), REP_ACCEPTED);
        eh_run_to_end(h, s);
        assert_int_equal(st->end.u.end.reason, END_SCORES);
        assert_int_equal(st->n_scores, 390);
        assert_in_range(st->end.u.end.prefill_us, 1, h->now_us - asked_us); /* its own time alone */
        assert_int_equal(st->end.u.end.decode_us, 0);
        struct command *c = eh_command(h, CMD_SCORES, s);
        c->conn = 12345; /* another connection of this user */
        const struct report *r = eh_expect(h, eh_post(h, c), REP_SCORES_REPLY);
        assert_int_equal(r->u.scores.n, 390);
        assert_int_equal(r->u.scores.total, 390);
        for (uint32_t k = 0; k < 390; k++) {
            const struct report_score *a = &st->scores[k], *b = &r->u.scores.rows[k];
            assert_memory_equal(a, b, sizeof *a);
            assert_int_equal(a->stream, k);
            assert_int_equal(a->position, k);
            assert_int_equal(a->id, prompt[k]);
            assert_int_equal(a->flags, (k < 5 ? 1u : 0u) | (k >= 370 ? 2u : 0u));
            if (i == 0)
                assert_true((isinf(a->score) != 0) == (k == 389));
        }
        /* nothing was changed: the next answer is the same with and without having looked */
        struct generate_options o = eh_greedy(30);
        uint64_t twin = filled(h, &ask, 390);
        eh_ids(h, s, prompt, 20, &o);
        eh_run_to_end(h, s);
        eh_ids(h, twin, prompt, 20, &o);
        eh_run_to_end(h, twin);
        assert_memory_equal(st->ids, eh_stream(h, twin)->ids, 30 * sizeof(int32_t));
        eh_close(&h);
    }
}

static void scores_know_when_they_cannot(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-llama.gguf", small_blocks, NULL);
    uint64_t none = filled(h, &(struct eh_ask){.policy = "none"}, 20);
    eh_expect_error(h, eh_post(h, eh_command(h, CMD_SCORES, none)), BC_EINVALID, "policy");
    uint64_t empty = eh_session(h, &(struct eh_ask){.policy = "h2o", .budget_tokens = 64});
    eh_expect(h, eh_post(h, eh_command(h, CMD_SCORES, empty)), REP_ACCEPTED);
    eh_run_to_end(h, empty);
    assert_int_equal(eh_stream(h, empty)->end.u.end.reason, END_SCORES);
    struct generate_options o = eh_greedy(50);
    eh_ids(h, empty, prompt, 20, &o);
    eh_expect_error(h, eh_post(h, eh_command(h, CMD_SCORES, empty)), BC_EBUSY, "session");
    eh_run_to_end(h, empty);
    /* cancelled while they are computed */
    uint64_t big =
        filled(h, &(struct eh_ask){.policy = "counter_causal", .budget_tokens = 600}, 500);
    eh_expect(h, eh_post(h, eh_command(h, CMD_SCORES, big)), REP_ACCEPTED);
    eh_step(h);
    eh_expect(h, eh_post(h, eh_command(h, CMD_CANCEL, big)), REP_DONE);
    assert_int_equal(eh_stream(h, big)->end.u.end.reason, END_CANCELLED);
    eh_ids(h, big, prompt, 20, &o);
    eh_close(&h);
}

/* ---- the daemon's ceiling ---- */

static void tight(struct engine_options *o, void *arg)
{
    (void)arg;
    o->no_prefixes = true;          /* their prompts are the same */
    o->kv_memory = 6 * 34304 + 100; /* six pages of f16, plain rows */
    o->session_budget = 4 * 34304;
}

static void the_daemons_ceiling_refuses_and_ends_but_never_breaks(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-llama.gguf", tight, NULL);
    struct generate_options o = eh_greedy(100);
    struct eh_ask none = {.policy = "none"};
    struct engine_counts c;
    uint64_t a = eh_session(h, &none), b = eh_session(h, &none);
    assert_int_equal(stat_of(h, a)->page_bytes, 34304);
    const struct err *e =
        eh_expect_error(h, eh_post_ids(h, a, prompt, 6 * 64 + 1, &o), BC_EBUDGET, "kv_memory");
    assert_int_equal(e->needed, 7 * 34304);
    assert_int_equal(e->available, 3 * 34304); /* half: b, empty as it is, is promised the other */
    eh_ids(h, a, prompt, 3 * 64 - 10, &o);
    eh_ids(h, b, prompt, 3 * 64 - 10, &o);
    eh_run_to_end(h, a);
    eh_run_to_end(h, b);
    /* each got its three pages and the ten tokens that fit, and one more that is not cached */
    for (int i = 0; i < 2; i++) {
        struct eh_stream *st = eh_stream(h, i == 0 ? a : b);
        assert_int_equal(st->end.u.end.reason, END_BUDGET);
        assert_true(strlen(st->end.u.end.text) > 0);
        assert_int_equal(st->n_ids, 11);
    }
    engine_counts(h->en, &c);
    assert_int_equal(c.kv_held, 6 * 34304);
    /* memory that comes free lets them go on where they were */
    eh_close_session(h, b);
    o.max_tokens = 60;
    eh_ids(h, a, prompt, 0, &o);
    eh_run_to_end(h, a);
    assert_int_equal(eh_stream(h, a)->end.u.end.reason, END_LENGTH);
    assert_int_equal(eh_stream(h, a)->streams[11], 3 * 64 + 1);
    /* no session may ask for more than there is */
    eh_expect_error(h, eh_post_open(h, &(struct eh_ask){.policy = "h2o", .budget_tokens = 385}),
                    BC_EBUDGET, "budget_tokens");
    eh_close(&h);
}

/* Pages that a neighbour's live rows do not fill are given back before anybody is refused. */
static void slack_of_neighbours_is_given_back_first(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-llama.gguf", tight, NULL);
    struct generate_options o = eh_greedy(0);
    uint64_t a =
        filled(h, &(struct eh_ask){.policy = "sliding_window", .budget_tokens = 256, .keep = 60},
               300);
    assert_int_equal(stat_of(h, a)->tokens, 60 + 44);
    assert_int_equal(stat_of(h, a)->held, 4 * 34304);
    uint64_t b = eh_session(h, &(struct eh_ask){.policy = "none"});
    eh_ids(h, b, prompt, 128, &o);
    eh_run_to_end(h, b);
    eh_ids(h, b, prompt, 0 + 10, &o); /* in a page that only a's slack can give */
    eh_run_to_end(h, b);
    assert_int_equal(eh_stream(h, b)->end.u.end.reason, END_LENGTH);
    assert_int_equal(stat_of(h, a)->held, 2 * 34304);
    eh_close(&h);
}

static void prefill_end_has_its_prompt_reserved_or_refused(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-llama.gguf", small_blocks, NULL);
    struct eh_ask ask = {.policy = "h2o",
                         .trigger = "prefill_end",
                         .budget_tokens = 320,
                         .keep = 50};
    struct generate_options o = eh_greedy(5);
    uint64_t s = eh_session(h, &ask);
    const struct err *e =
        eh_expect_error(h, eh_post_ids(h, s, prompt, 321, &o), BC_EBUDGET, "budget_tokens");
    assert_int_equal(e->needed, 321);
    assert_int_equal(e->available, 320);
    assert_int_equal(stat_of(h, s)->held, 0);
    uint32_t r = eh_post_ids(h, s, prompt, 320, &o);
    eh_expect(h, r, REP_ACCEPTED);
    assert_int_equal(stat_of(h, s)->held, 5 * 34304); /* before it is in */
    assert_true(stat_of(h, s)->tokens < 320);
    eh_expect_error(h, post_budget(h, s, 0, 100, 0), BC_EBUSY, "session");
    eh_expect(h, eh_post(h, eh_command(h, CMD_CANCEL, s)), REP_DONE);
    const struct report_session *st = stat_of(h, s);
    assert_int_equal(st->held, (st->tokens + 63) / 64 * 34304); /* the rest is given back */
    eh_run_to_end(h, s);
    eh_ids(h, s, prompt, 320 - st->tokens, &o);
    eh_run_to_end(h, s);
    assert_int_equal(eh_stream(h, s)->n_prunes, 1);
    assert_int_equal(eh_stream(h, s)->prunes[0].before, 320);
    assert_int_equal(stat_of(h, s)->tokens, 50 + 4);
    assert_int_equal(stat_of(h, s)->held, 34304);
    eh_close(&h);
}

/* ---- whose session ---- */

static struct command *from(struct eh *h, enum command_type type, uint64_t s, uint64_t conn,
                            uint32_t uid, bool admin)
{
    struct command *c = eh_command(h, type, s);
    c->conn = conn;
    c->uid = uid;
    c->admin = admin;
    return c;
}

static void sessions_belong_to_their_user(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-llama.gguf", NULL, NULL);
    uint64_t s =
        filled(h, &(struct eh_ask){.policy = "h2o", .budget_tokens = 100, .name = "work"}, 90);
    static const enum command_type types[] = {CMD_CANCEL, CMD_PRUNE,  CMD_SCORES,  CMD_STAT,
                                              CMD_CLOSE,  CMD_BUDGET, CMD_GENERATE};
    for (size_t i = 0; i < ARRAY_LEN(types); i++) {
        eh_expect_error(h, eh_post(h, from(h, types[i], s, 3, 2000, false)), BC_EPERMISSION,
                        "session");
        eh_expect_error(h, eh_post(h, from(h, types[i], s + 7, 3, 2000, true)), BC_EUNKNOWN,
                        "session");
    }
    /* other connections of the same user may look and shrink, but not speak */
    eh_expect(h, eh_post(h, from(h, CMD_PRUNE, s, 3, EH_UID, false)), REP_PRUNED_REPLY);
    eh_expect_error(h, eh_post(h, from(h, CMD_GENERATE, s, 3, EH_UID, false)), BC_EPERMISSION,
                    "session");
    const struct report *r =
        eh_expect(h, eh_post(h, from(h, CMD_STAT, 0, 3, 2000, false)), REP_STAT);
    assert_int_equal(r->u.stat.n_sessions, 0);
    r = eh_expect(h, eh_post(h, from(h, CMD_STAT, 0, 3, 0, true)), REP_STAT);
    assert_int_equal(r->u.stat.n_sessions, 1);
    assert_string_equal(r->u.stat.sessions[0].name, "work");
    assert_int_equal(r->u.stat.n_models, 1);
    assert_string_equal(r->u.stat.models[0].name, "tiny-llama");
    assert_int_equal(r->u.stat.models[0].sessions, 1);
    /* names: one each a user; attach only to what nobody holds */
    eh_expect_error(h, eh_post_open(h, &(struct eh_ask){.name = "work"}), BC_EBUSY, "name");
    eh_session(h, &(struct eh_ask){.name = "work", .uid = 2000, .conn = 3});
    eh_expect_error(h, eh_post_open(h, &(struct eh_ask){.name = "wo rk"}), BC_EINVALID, "name");
    struct command *c = from(h, CMD_ATTACH, 0, 4, EH_UID, false);
    snprintf(c->u.attach.name, sizeof c->u.attach.name, "work");
    eh_expect_error(h, eh_post(h, c), BC_EBUSY, "session");
    c = from(h, CMD_ATTACH, 0, 4, EH_UID, false);
    snprintf(c->u.attach.name, sizeof c->u.attach.name, "play");
    eh_expect_error(h, eh_post(h, c), BC_EUNKNOWN, "name");
    eh_post(h, from(h, CMD_GONE, 0, EH_CONN, EH_UID, false));
    c = from(h, CMD_ATTACH, s, 4, EH_UID, false); /* by id */
    assert_int_equal(eh_expect(h, eh_post(h, c), REP_ATTACHED)->session, s);
    eh_expect(h, eh_post(h, from(h, CMD_CLOSE, s, 9, 0, true)), REP_CLOSED);
    eh_close(&h);
}

/* ---- too little for anybody ---- */

static void so_little(struct engine_options *o, void *arg)
{
    o->kv_memory = o->session_budget = *(uint64_t *)arg;
    o->kv_memory_max = 64u << 20;
}

/* What an engine of so much memory, lowered to `then` (0: not) while it runs, says in the log. */
static void log_of(uint64_t kv_memory, uint64_t then, char *ret, size_t size)
{
    FILE *f = tmpfile();
    int was = dup(STDERR_FILENO);
    assert_true(f != NULL && was >= 0);
    dup2(fileno(f), STDERR_FILENO);
    struct eh *h = eh_open("tiny-qwen3.gguf", so_little, &kv_memory);
    if (then > 0) {
        struct command *c = eh_command(h, CMD_LIMITS, 0);
        c->admin = true;
        c->u.limits.kv_memory = then;
        eh_expect(h, eh_post(h, c), REP_DONE);
    }
    eh_close(&h);
    dup2(was, STDERR_FILENO);
    close(was);
    rewind(f);
    ret[fread(ret, 1, size - 1, f)] = '\0';
    fclose(f);
}

/* A page of tiny-qwen3 as the daemon tells it; UINT64_MAX: the model cannot have such pages. */
static uint64_t page_bytes(const struct eh_ask *a)
{
    struct eh *h = eh_open("tiny-qwen3.gguf", NULL, NULL);
    const struct report *r = eh_reply(h, eh_post_open(h, a));
    uint64_t page = r->type == REP_OPENED ? r->u.info.page_bytes : UINT64_MAX;
    eh_close(&h);
    return page;
}

/* The smallest page of all types of keys and values. */
static uint64_t smallest_page(const char **ret_type)
{
    uint64_t least = UINT64_MAX;
    const struct kn_kv_type *t;
    for (unsigned i = 0; (t = kn_kv_type_at(i)) != NULL; i++) {
        uint64_t page = page_bytes(&(struct eh_ask){.policy = "none", .kv_type = t->name});
        if (page < least) {
            least = page;
            *ret_type = t->name;
        }
    }
    return least;
}

/* A daemon that could open no session says so when the model is there, with the numbers. */
static void memory_that_holds_no_page_is_told(void **state)
{
    (void)state;
    const char *type = NULL;
    uint64_t least = smallest_page(&type);
    uint64_t usual = page_bytes(&(struct eh_ask){0});
    char log[4000], number[96];
    assert_true(least < usual);
    log_of(least - 1, 0, log, sizeof log);
    snprintf(number, sizeof number, "kv_memory %llu holds not one page",
             (unsigned long long)least - 1);
    assert_non_null(strstr(log, number));
    snprintf(number, sizeof number, "(%llu bytes, kv_type %s:", (unsigned long long)least, type);
    assert_non_null(strstr(log, number));
    assert_non_null(strstr(log, "no session of it can be opened"));
    log_of(usual - 1, 0, log, sizeof log);
    snprintf(number, sizeof number, "counter_causal_fast (%llu bytes)", (unsigned long long)usual);
    assert_non_null(strstr(log, number));
    assert_null(strstr(log, "no session of it can be opened"));
    snprintf(number, sizeof number, "those of kv_type %s and policy none can (%llu bytes)", type,
             (unsigned long long)least);
    assert_non_null(strstr(log, number));
    log_of(usual, 0, log, sizeof log);
    assert_null(strstr(log, "not one page"));
    log_of(usual, least - 1, log, sizeof log); /* lowered while it runs */
    assert_non_null(strstr(log, "no session of it can be opened"));
}

static int usual_session(struct eh *h, uint64_t budget, int64_t recent, uint64_t kv_memory,
                         struct err *e)
{
    struct engine_session_ask ask = {.evict = {.budget_bytes = budget,
                                               .recent = recent,
                                               .span_quantile = -1},
                                     .session_budget = budget,
                                     .kv_memory = kv_memory};
    return engine_session_check(h->en, &ask, e);
}

/* With the model's pages it is known which budgets in bytes make a session, before anybody opens one. */
static void the_usual_session_is_judged_by_the_models_pages(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-qwen3.gguf", NULL, NULL);
    const char *type = NULL;
    uint64_t least = smallest_page(&type), page = page_bytes(&(struct eh_ask){0});
    uint64_t budget = 10 * page;
    struct err e;
    assert_int_equal(usual_session(h, budget, -1, budget, &e), BC_OK);
    assert_int_equal(usual_session(h, budget, 480, budget, &e), BC_OK); /* 3/4 of 640 */
    assert_int_equal(usual_session(h, budget, 481, budget, &e), BC_EINVALID);
    assert_string_equal(e.field, "recent_tokens");
    char says[96];
    snprintf(says, sizeof says, "keep_tokens 481 and a budget of 642 tokens (%llu bytes)",
             11ull * (unsigned long long)page);
    assert_non_null(strstr(e.text, says));
    assert_int_equal(usual_session(h, 11 * page, 481, 11 * page, &e), BC_OK);
    assert_int_equal(usual_session(h, 11 * page, 481, budget, &e), BC_EINVALID); /* it is cut */
    assert_int_equal(usual_session(h, page - 1, -1, budget, &e), BC_EBUDGET);
    assert_string_equal(e.field, "budget_bytes");
    assert_int_equal(usual_session(h, budget, -1, least - 1, &e), BC_EBUDGET);
    assert_string_equal(e.field, "kv_memory");
    assert_int_equal(e.needed, least);
    assert_int_equal(usual_session(h, budget, -1, least, &e), BC_OK); /* for those who ask for it */
    struct engine_session_ask tokens = {
        .evict = {.budget_tokens = 640, .recent = -1, .span_quantile = -1}, .kv_memory = budget};
    assert_int_equal(engine_session_check(h->en, &tokens, &e), BC_OK);
    tokens.kv_memory = budget - 1;
    assert_int_equal(engine_session_check(h->en, &tokens, &e), BC_EBUDGET);
    assert_string_equal(e.field, "budget_tokens");
    assert_int_equal(engine_session_check(NULL, &tokens, &e), BC_OK); /* it cannot be known */
    eh_close(&h);
}

/* What the log says then is so, and who asks for the wrong pages is told what was asked for. */
static void memory_of_one_small_page_serves_those_who_ask_for_it(void **state)
{
    (void)state;
    struct eh_ask ask = {.policy = "none"};
    uint64_t least = smallest_page(&ask.kv_type), usual = page_bytes(&(struct eh_ask){0});
    struct eh *h = eh_open("tiny-qwen3.gguf", so_little, &least);
    char says[96];
    uint64_t s = eh_session(h, &ask);
    const struct err *e =
        eh_expect_error(h, eh_post_open(h, &(struct eh_ask){0}), BC_EBUDGET, "kv_memory");
    snprintf(says, sizeof says, "not one page of kv_type f16 and policy %s (%llu bytes)",
             EVICT_POLICY_DEFAULT, (unsigned long long)usual);
    assert_non_null(strstr(e->text, says));
    eh_expect_error(h, eh_post_open(h, &(struct eh_ask){.policy = "guess"}), BC_EUNKNOWN, "policy");
    eh_close_session(h, s);
    eh_close(&h);
}

/* A session that asks for no budget, where there is not one page: it is the memory that is named. */
static void a_memory_lowered_below_a_page_is_named(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-qwen3.gguf", NULL, NULL);
    uint64_t s = eh_session(h, &(struct eh_ask){0}), page = page_bytes(&(struct eh_ask){0});
    eh_close_session(h, s);
    struct command *c = eh_command(h, CMD_LIMITS, 0);
    c->admin = true;
    c->u.limits.kv_memory = page - 1;
    eh_expect(h, eh_post(h, c), REP_DONE);
    const struct err *e =
        eh_expect_error(h, eh_post_open(h, &(struct eh_ask){0}), BC_EBUDGET, "kv_memory");
    assert_int_equal(e->needed, page);
    assert_int_equal(e->available, page - 1);
    eh_close(&h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_live_budget_prunes_only_what_is_above_it),
        cmocka_unit_test(a_budget_shrinks_under_a_running_answer),
        cmocka_unit_test(prunes_on_request),
        cmocka_unit_test(scores_are_streamed_to_the_owner_and_sent_to_others),
        cmocka_unit_test(scores_know_when_they_cannot),
        cmocka_unit_test(the_daemons_ceiling_refuses_and_ends_but_never_breaks),
        cmocka_unit_test(slack_of_neighbours_is_given_back_first),
        cmocka_unit_test(prefill_end_has_its_prompt_reserved_or_refused),
        cmocka_unit_test(sessions_belong_to_their_user),
        cmocka_unit_test(memory_that_holds_no_page_is_told),
        cmocka_unit_test(memory_of_one_small_page_serves_those_who_ask_for_it),
        cmocka_unit_test(the_usual_session_is_judged_by_the_models_pages),
        cmocka_unit_test(a_memory_lowered_below_a_page_is_named),
    };
    return cmocka_run_group_tests(tests, setup, NULL);
}
