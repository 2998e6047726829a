/* Durable sessions: the engine ends at any step, another one opens what it left (the state folder as a
 * kill would leave it: a copy of that moment), and everything that was said is there; the rest of the
 * answer, and the answers after it, are those of a run that nothing disturbed, for every policy. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "core.h"
#include "durable_test.h"
#include "folders_test.h"
#include "records.h"
#include "sanitized.h"

#define TURNS 3
#define NEW 40
#define STREAM_MAX 2000

static int32_t prompt[2000];
static char root[FOLDER_PATH];

static int setup(void **state)
{
    (void)state;
    prompt_fill(prompt, ARRAY_LEN(prompt), 77);
    folder_root_memory(root, "durable");
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    folder_drop(root);
    return 0;
}

/* ---- engines ---- */

static struct eh *engine_on(char *dir)
{
    return durable_engine(&(struct durable_setup){.dir = dir});
}

static struct generate_options options_of(int k)
{
    struct generate_options o = eh_greedy(NEW);
    o.temperature = k == 1 ? 0.7f : 0;
    o.seed = 5;
    o.repeat_penalty = 1.2f;
    return o;
}

static void ask(struct eh *h, uint64_t s, int k)
{
    struct generate_options o = options_of(k);
    eh_ids(h, s, prompt + k * 60, k == 1 ? 9 : 60, &o);
}

/* What an undisturbed run says, by stream index; -1: a token of a prompt. */
struct truth {
    int32_t id[STREAM_MAX];
    uint64_t n;
    uint32_t prunes;
};

static void truth_add(struct truth *t, const struct eh_stream *s)
{
    for (uint32_t i = 0; i < s->n_ids; i++) {
        assert_true(s->streams[i] < STREAM_MAX);
        t->id[s->streams[i]] = s->ids[i];
        t->n = BC_MAX(t->n, s->streams[i] + 1);
    }
    t->prunes = s->n_prunes;
}

static void truth_make(struct truth *t, const struct eh_ask *a)
{
    struct eh *h = engine_on(NULL);
    uint64_t s = eh_session(h, a);
    for (size_t i = 0; i < STREAM_MAX; i++)
        t->id[i] = -1;
    t->n = 0;
    for (int k = 0; k < TURNS; k++) {
        ask(h, s, k);
        eh_run_to_end(h, s);
    }
    truth_add(t, eh_stream(h, s));
    eh_close(&h);
}

/* Every token that came is the truth's, at its place, without a hole inside an answer. */
static void stream_check(const struct truth *t, const struct eh_stream *s, const char *what)
{
    for (uint32_t i = 0; i < s->n_ids; i++)
        if (s->streams[i] >= t->n || t->id[s->streams[i]] != s->ids[i])
            fail_msg("%s: token %u (stream %llu) is %d, not %d", what, i,
                     (unsigned long long)s->streams[i], s->ids[i],
                     s->streams[i] < t->n ? t->id[s->streams[i]] : -2);
}

/* ---- a kill at any step ---- */

struct moment {
    char copy[FOLDER_PATH];
    int turn;      /* that was asked */
    bool over;     /* and had ended */
    uint64_t told; /* stream indices below it were told */
    uint64_t seq;  /* records that the client has */
    uint64_t cached;
};

/* From the copy on: what was told is there, the answer under way goes on, the others follow. */
static void go_on(const struct truth *t, const struct moment *m, const char *what)
{
    struct eh *h = engine_on((char *)(uintptr_t)m->copy);
    uint64_t s = eh_attach(h, "work");
    if (s == 0)
        fail_msg("%s: the session is gone", what);
    struct eh_stream *st = eh_stream(h, s);
    bool busy = st->busy, ended = st->n_ends > 0;
    assert_true(st->seq >= m->seq); /* numbers go on */
    assert_true(busy || ended || m->turn < 0 || m->told == 0 || m->over);
    stream_check(t, st, what);
    if (busy) {
        eh_run_to_end(h, s);
    } else if (ended) {
        st->ends_waited = st->n_ends;
    }
    eh_run(h);
    stream_check(t, st, what);
    uint64_t last = st->n_ids > 0 ? st->streams[st->n_ids - 1] + 1 : 0;
    if (last < m->told)
        fail_msg("%s: told up to %llu, known up to %llu", what, (unsigned long long)m->told,
                 (unsigned long long)last);
    /* the turn that was asked may not have been accepted before the end */
    int next = m->turn + (busy || ended || m->over ? 1 : 0);
    for (int k = next; k < TURNS; k++) {
        ask(h, s, k);
        eh_run_to_end(h, s);
        stream_check(t, st, what);
        assert_int_equal(st->end.u.end.tokens_out, NEW);
    }
    assert_int_equal(st->streams[st->n_ids - 1] + 1, t->n);
    /* and it can be closed for good */
    eh_close_session(h, s);
    eh_close(&h);
    assert_int_equal(folder_files(m->copy), 0);
}

static void killed_at_many_steps(const struct eh_ask *a, uint32_t every, uint32_t seed)
{
    struct truth t;
    char dir[FOLDER_PATH], what[128];
    struct eh_ask durable = *a;
    uint32_t steps = 0, moments = 0;
    durable.durable = true;
    durable.name = "work";
    truth_make(&t, a);
    folder_fresh(dir, root, "live");
    struct eh *h = engine_on(dir);
    uint64_t s = eh_session(h, &durable);
    struct eh_stream *st = eh_stream(h, s);
    for (int k = 0; k < TURNS; k++) {
        ask(h, s, k);
        bool more = true;
        while (more) {
            more = eh_step(h);
            if (st->n_ends > st->ends_waited)
                more = false;
            if (steps++ % every != seed % every && more)
                continue;
            struct moment m = {.turn = k, .over = st->n_ends > st->ends_waited, .seq = st->seq};
            m.told = st->n_ids > 0 ? st->streams[st->n_ids - 1] + 1 : 0;
            folder_fresh(m.copy, root, "copy");
            folder_copy(dir, m.copy);
            snprintf(what, sizeof what, "%s, turn %d, step %u%s", a->policy, k, steps,
                     m.over ? ", over" : "");
            go_on(&t, &m, what);
            moments++;
        }
        st->ends_waited = st->n_ends;
    }
    stream_check(&t, st, a->policy);
    assert_true(moments >= 6);
    eh_close(&h);
}

static void every_policy_is_rebuilt_as_it_was(void **state)
{
    (void)state;
    for (size_t i = 0; i < EH_POLICIES; i++)
        killed_at_many_steps(&eh_policies[i], SANITIZED ? 29 : 17, (uint32_t)i * 5);
}

static void killed_at_every_step(void **state)
{
    (void)state;
    killed_at_many_steps(&eh_policies[0], SANITIZED ? 3 : 1, 0);
}

/* ---- snapshots ---- */

static void file_of(char *ret, const char *dir, const char *name)
{
    snprintf(ret, FOLDER_PATH + 64, "%s/durable/%u-work/%s", dir, EH_UID, name);
}

/* A session that has left for its snapshot, and (tail) has been asked again since. */
static void snapshot_make(char dir[FOLDER_PATH], const struct eh_ask *a, int tail)
{
    struct eh_ask durable = *a;
    durable.durable = true;
    durable.name = "work";
    folder_fresh(dir, root, "live");
    struct eh *h = durable_engine(
        &(struct durable_setup){.dir = dir, .spill_after_us = 1, .host_tier = 64 << 20});
    uint64_t s = eh_session(h, &durable);
    ask(h, s, 0);
    eh_run_to_end(h, s);
    eh_pass(h, 100);
    eh_run(h); /* it leaves */
    assert_int_equal(h->en->list[0]->lodging.place, PLACE_AWAY);
    h->en->opt.spill_after_us = 0;
    if (tail > 0)
        ask(h, s, 1);
    for (int i = 0; i < tail; i++)
        eh_step(h);
    char copy[FOLDER_PATH];
    folder_fresh(copy, root, "copy");
    folder_copy(dir, copy); /* the kill */
    eh_close(&h);
    folder_fresh(dir, root, "live");
    folder_copy(copy, dir);
}

/* Rest of the conversation, in an engine on dir. expected: tokens that must be done again. */
static void rest_is_true(const struct truth *t, char *dir, int next, size_t least, size_t most)
{
    struct eh *h = engine_on(dir);
    uint64_t s = eh_attach(h, "work");
    assert_true(s != 0);
    const struct session *e = h->en->list[0];
    const struct replay *r = e->replay != NULL ? e->replay : e->replay_after;
    size_t n = r != NULL ? r->n_ids : 0;
    if (n < least || n > most)
        fail_msg("%zu tokens are done again, not %zu to %zu", n, least, most);
    struct eh_stream *st = eh_stream(h, s);
    if (st->busy)
        eh_run_to_end(h, s);
    st->ends_waited = st->n_ends;
    for (int k = next; k < TURNS; k++) {
        ask(h, s, k);
        eh_run_to_end(h, s);
    }
    stream_check(t, st, "rest");
    assert_int_equal(st->streams[st->n_ids - 1] + 1, t->n);
    eh_close(&h);
}

static void a_snapshot_shortens_the_way(void **state)
{
    (void)state;
    char dir[FOLDER_PATH];
    for (size_t i = 0; i < EH_POLICIES; i += 2) {
        struct truth t;
        truth_make(&t, &eh_policies[i]);
        snapshot_make(dir, &eh_policies[i], 0);
        rest_is_true(&t, dir, 1, 0, 0); /* nothing: it comes when it is called */
        snapshot_make(dir, &eh_policies[i], 25);
        rest_is_true(&t, dir, 2, 10, 40); /* what came after it */
    }
}

static void a_damaged_snapshot_is_not_used(void **state)
{
    (void)state;
    char dir[FOLDER_PATH], path[FOLDER_PATH + 64];
    struct truth t;
    size_t n;
    truth_make(&t, &eh_policies[3]);
    for (int what = 0; what < 6; what++) {
        snapshot_make(dir, &eh_policies[3], what % 2 == 0 ? 0 : 20);
        file_of(path, dir, "snapshot");
        uint8_t *bytes = file_load(path, &n);
        if (what < 2)
            bytes[100] ^= 1; /* its head: seen at once */
        else
            bytes[n - 3000] ^= 1; /* a row: seen when it comes back */
        file_store(path, bytes, what < 4 ? n : n / 2);
        free(bytes);
        if (what >= 4)
            unlink(path);
        bool seen = what < 2 || what >= 4;
        rest_is_true(&t, dir, what % 2 == 0 ? 1 : 2, seen ? 90 : 0, 200);
    }
}

/* A snapshot that the journal does not know (its record never reached the disk) counts for nothing. */
static void a_snapshot_ahead_of_its_journal_is_not_used(void **state)
{
    (void)state;
    char dir[FOLDER_PATH], path[FOLDER_PATH + 64];
    struct truth t;
    size_t n;
    truth_make(&t, &eh_policies[0]);
    snapshot_make(dir, &eh_policies[0], 0);
    file_of(path, dir, "journal");
    uint8_t *bytes = file_load(path, &n);
    file_store(path, bytes, n - 1); /* the SNAPSHOT record is its last */
    free(bytes);
    rest_is_true(&t, dir, 1, 90, 200);
}

/* ---- budgets that changed ---- */

static const struct session *session_of(struct eh *h)
{
    assert_int_equal(h->en->n_sessions, 1);
    return h->en->list[0];
}

static uint32_t post_budget(struct eh *h, uint64_t s, uint32_t tokens)
{
    struct command *c = eh_command(h, CMD_BUDGET, s);
    c->u.budget.tokens = tokens;
    return eh_post(h, c);
}

/* A session that was opened with `first` tokens and has `tokens` since, with a whole prompt of 100 in it. */
static struct eh *engine_budgeted(char *dir, uint32_t first, uint32_t tokens, uint64_t *ret)
{
    struct eh *h = durable_engine(
        &(struct durable_setup){.dir = dir, .spill_after_us = 1, .host_tier = 64 << 20});
    struct generate_options o = eh_greedy(8);
    h->en->opt.spill_after_us = 0;
    *ret = eh_session(h, &(struct eh_ask){.policy = "counter_causal",
                                          .budget_tokens = first,
                                          .durable = dir != NULL,
                                          .name = "work"});
    if (first != tokens)
        eh_expect(h, post_budget(h, *ret, tokens), REP_BUDGET);
    eh_ids(h, *ret, prompt, 100, &o);
    eh_run_to_end(h, *ret);
    return h;
}

static void leaves(struct eh *h)
{
    h->en->opt.spill_after_us = 1;
    eh_pass(h, 100);
    eh_run(h);
    assert_int_equal(session_of(h)->lodging.place, PLACE_AWAY);
    h->en->opt.spill_after_us = 0;
}

static void goes_on_as(struct eh *h, uint64_t s, char *dir, const char *what)
{
    struct eh *g = engine_on(dir);
    uint64_t t = eh_attach(g, "work");
    assert_true(t != 0);
    eh_run(g);
    assert_int_equal(session_of(g)->budget_bytes, session_of(h)->budget_bytes);
    answers_equal(h, s, g, t, prompt + 200, 30, 40, what);
    eh_close(&g);
}

/* What may be held when a snapshot comes back is what its session's budget was then: neither the one that
 * it was opened with nor the one that it has now. */
static void a_snapshot_comes_back_under_another_budget(void **state)
{
    (void)state;
    char dir[FOLDER_PATH], copy[FOLDER_PATH];
    uint64_t s;
    folder_fresh(dir, root, "raised");
    struct eh *h = engine_budgeted(dir, 40, 300, &s);
    leaves(h);
    folder_fresh(copy, root, "copy");
    folder_copy(dir, copy); /* the kill */
    goes_on_as(h, s, copy, "raised before");
    eh_close(&h);

    folder_fresh(dir, root, "lowered");
    h = engine_budgeted(dir, 300, 300, &s);
    leaves(h);
    eh_expect(h, post_budget(h, s, 40), REP_BUDGET); /* it comes back for that */
    eh_run(h);
    folder_fresh(copy, root, "copy");
    folder_copy(dir, copy);
    goes_on_as(h, s, copy, "lowered since");
    eh_close(&h);
}

/* A budget that is being lowered is the old one or the new one, whenever the kill comes. */
static void a_kill_while_a_budget_is_lowered(void **state)
{
    (void)state;
    char dir[FOLDER_PATH], copy[FOLDER_PATH];
    uint64_t s;
    bool before = false, after = false, over = false;
    folder_fresh(dir, root, "lowering");
    struct eh *h = engine_budgeted(dir, 300, 300, &s);
    post_budget(h, s, 40);
    while (!over) {
        over = !eh_step(h);
        folder_fresh(copy, root, "copy");
        folder_copy(dir, copy);
        struct eh *g = engine_on(copy);
        assert_true(eh_attach(g, "work") != 0);
        eh_run(g);
        const struct evict_params *p = evict_params(session_of(g)->ev);
        uint32_t n = seqcache_count(session_of(g)->cache);
        assert_true(p->budget == 40 || p->budget == 300);
        if (n > p->budget)
            fail_msg("%u tokens under a budget of %u", n, p->budget);
        before |= p->budget == 300;
        after |= p->budget == 40;
        eh_close(&g);
    }
    assert_true(before && after);
    eh_close(&h);
}

/* ---- ENDs ---- */

/* Steps until n tokens of the answer are out; a step takes a millisecond. */
/* ---- a next daemon with less memory ---- */

static struct session *named(struct eh *h, const char *name)
{
    struct session *s = sess_named(h->en, EH_UID, name);
    assert_non_null(s);
    return s;
}

/* Two sessions of three pages each, the first one's second answer under way; a copy as a kill leaves it. */
static uint64_t two_left(char copy[FOLDER_PATH], const struct eh_ask *a)
{
    char dir[FOLDER_PATH];
    struct eh_ask one = *a, two = *a;
    one.durable = two.durable = true;
    one.name = "one";
    two.name = "two";
    folder_fresh(dir, root, "both");
    folder_fresh(copy, root, "copy");
    struct eh *h = engine_on(dir);
    uint64_t t = eh_session(h, &two), s = eh_session(h, &one);
    struct generate_options o = eh_greedy(5);
    eh_ids(h, t, prompt + 1000, 150, &o);
    eh_run_to_end(h, t);
    ask(h, s, 0);
    eh_run_to_end(h, s);
    ask(h, s, 1);
    while (eh_stream(h, s)->n_ids < NEW + 30)
        eh_step(h);
    folder_copy(dir, copy);
    uint64_t page = pool_page_bytes(named(h, "one")->pool);
    assert_true(seqcache_pages(named(h, "one")->cache) == 3);
    assert_true(seqcache_pages(named(h, "two")->cache) == 3);
    eh_close(&h);
    return page;
}

/* A daemon with room for neither beside the other. */
static struct eh *two_put_off(char copy[FOLDER_PATH], uint64_t page, uint64_t stop_snapshots_us)
{
    struct eh *h = durable_engine(&(struct durable_setup){.dir = copy,
                                                          .kv_memory = 4 * page,
                                                          .stop_snapshots_us = stop_snapshots_us});
    eh_run(h);
    assert_int_equal(h->en->n_sessions, 2);
    assert_int_equal(models_held(h->en), 0);
    assert_int_equal(named(h, "one")->lodging.place, PLACE_AWAY);
    assert_int_equal(named(h, "two")->lodging.place, PLACE_AWAY);
    return h;
}

/* Nobody gives: both wait, and are told so when they are used; when one is closed, the other comes back by itself, and its
 * answer goes on. */
static void what_finds_no_room_is_put_off(void **state)
{
    (void)state;
    static const struct eh_ask a = {.policy = "none"};
    struct generate_options o = options_of(2);
    struct truth t;
    char copy[FOLDER_PATH];
    truth_make(&t, &a);
    uint64_t page = two_left(copy, &a);
    for (uint32_t i = 0; i <= DURABLE_ATTEMPTS_MAX; i++) { /* no daemon ends of it */
        struct eh *h = two_put_off(copy, page, i % 2 == 0 ? 0 : 1000000);
        eh_close(&h);
    }
    struct eh *h = two_put_off(copy, page, 0);
    uint64_t one = eh_attach(h, "one"), two = eh_attach(h, "two");
    struct eh_stream *st = eh_stream(h, one);
    assert_true(st->busy && st->n_ends == 0);
    const struct err *e =
        eh_expect_error(h, eh_post_ids(h, two, prompt, 5, &o), BC_EBUDGET, "kv_memory");
    assert_true(e->needed > e->available);
    eh_run(h);
    assert_int_equal(named(h, "two")->lodging.place, PLACE_AWAY);
    eh_close_session(h, two);
    eh_run(h);
    assert_int_equal(named(h, "one")->lodging.place, PLACE_HERE);
    assert_int_equal(st->n_ends, 1);
    stream_check(&t, st, "put off");
    assert_int_equal(st->streams[st->n_ids - 1] + 1, t.n - NEW - 60);
    eh_close_session(h, one);
    eh_close(&h);
    assert_int_equal(folder_files(copy), 0);
}

static void raise_memory(struct eh *h, uint64_t kv_memory)
{
    struct command *c = eh_command(h, CMD_LIMITS, 0);
    c->admin = true;
    c->u.limits.kv_memory = kv_memory;
    eh_expect(h, eh_post(h, c), REP_DONE);
    eh_run(h);
}

/* With more memory both come back, each to what it was; who did not wait for its answer is not given one. */
static void what_was_put_off_comes_with_the_room(void **state)
{
    (void)state;
    static const struct eh_ask a = {.policy = "none"};
    char copy[FOLDER_PATH], whole[FOLDER_PATH];
    uint64_t page = two_left(copy, &a);
    folder_fresh(whole, root, "whole");
    folder_copy(copy, whole);
    struct eh *h = two_put_off(copy, page, 0), *g = engine_on(whole);
    uint64_t one = eh_attach(h, "one"), two = eh_attach(h, "two");
    uint64_t its = eh_attach(g, "two");
    eh_run(g);
    eh_expect(h, eh_post(h, eh_command(h, CMD_CANCEL, one)), REP_DONE);
    raise_memory(h, 5 * page); /* for one of them; who comes first is left where it is */
    assert_true(named(h, "one")->lodging.place == PLACE_AWAY ||
                named(h, "two")->lodging.place == PLACE_AWAY);
    raise_memory(h, 8 * page);
    assert_int_equal(named(h, "one")->lodging.place, PLACE_HERE);
    assert_int_equal(eh_stream(h, one)->n_ends, 1);
    assert_int_equal(eh_stream(h, one)->end.u.end.reason, END_CANCELLED);
    sessions_equal(g, its, h, two, "put off");
    answers_equal(g, its, h, two, prompt, 20, 10, "put off");
    eh_close(&g);
    eh_close(&h);
}

/* A larger budget on the way sets memory aside that the one in the end does not: with just so much that the end seems to fit, it is
 * tried once, not for ever. */
static void what_seems_to_fit_is_tried_once(void **state)
{
    (void)state;
    struct generate_options o = eh_greedy(5);
    char dir[FOLDER_PATH], copy[FOLDER_PATH];
    uint64_t s, kv;
    folder_fresh(dir, root, "wide");
    folder_fresh(copy, root, "copy");
    struct eh *h = engine_on(dir);
    s = eh_session(
        h, &(struct eh_ask){.policy = "tova", .budget_tokens = 80, .durable = true, .name = "one"});
    eh_expect(h, post_budget(h, s, 600), REP_BUDGET);
    kv = h->en->refresh_max;
    eh_ids(h, s, prompt, 500, &o);
    eh_run_to_end(h, s);
    assert_int_equal(seqcache_pages(named(h, "one")->cache), 8);
    eh_expect(h, post_budget(h, s, 80), REP_BUDGET);
    eh_run(h);
    kv = 8 * pool_page_bytes(named(h, "one")->pool) + (kv + h->en->refresh_max) / 2;
    folder_copy(dir, copy);
    struct eh *g = durable_engine(&(struct durable_setup){.dir = copy, .kv_memory = kv});
    eh_run(g);
    assert_int_equal(named(g, "one")->lodging.place, PLACE_AWAY);
    uint64_t t = eh_attach(g, "one");
    eh_expect_error(g, eh_post_ids(g, t, prompt, 5, &o), BC_EBUDGET, "kv_memory");
    raise_memory(g, 2 * kv);
    assert_int_equal(named(g, "one")->lodging.place, PLACE_HERE);
    sessions_equal(h, s, g, t, "tried once");
    eh_close(&h);
    eh_close(&g);
}

static void slow_steps(struct eh *h, const struct eh_stream *st, uint32_t n)
{
    while (st->n_ids < n && st->n_ends == st->ends_waited) {
        eh_pass(h, 999); /* and the step's own microsecond */
        eh_step(h);
    }
}

/* An END counts all tokens of its answer, and the time of all daemons that made it: a speed is what it was. */
static void an_end_has_the_time_of_all_daemons(void **state)
{
    (void)state;
    char dir[FOLDER_PATH], copy[FOLDER_PATH];
    struct generate_options o = eh_greedy(NEW);
    struct eh_ask a = {.policy = "counter_causal_fast", .budget_tokens = 300, .durable = true};
    a.name = "work";
    folder_fresh(dir, root, "times");
    struct eh *h = engine_on(dir);
    uint64_t s = eh_session(h, &a);
    eh_ids(h, s, prompt, 200, &o);
    slow_steps(h, eh_stream(h, s), NEW - 8);
    folder_fresh(copy, root, "copy");
    folder_copy(dir, copy); /* the kill */
    slow_steps(h, eh_stream(h, s), NEW + 1);
    const struct report *whole = &eh_stream(h, s)->end;
    assert_true(whole->u.end.prefill_us >= 5000 && whole->u.end.decode_us >= (NEW - 2) * 1000);

    struct eh *g = engine_on(copy);
    uint64_t t = eh_attach(g, "work");
    struct eh_stream *st = eh_stream(g, t);
    assert_true(st->busy && st->n_ends == 0);
    slow_steps(g, st, NEW + 1);
    assert_int_equal(st->end.u.end.tokens_out, NEW);
    assert_int_equal(st->end.u.end.tokens_in, 200);
    assert_int_equal(st->end.u.end.budget, 300);
    assert_int_equal(st->end.u.end.prefill_us, whole->u.end.prefill_us);
    /* what ran since its last step was written is lost, and the last row is done again: a step or two */
    assert_true(st->end.u.end.decode_us <= whole->u.end.decode_us + 2000 &&
                st->end.u.end.decode_us + 2000 >= whole->u.end.decode_us);
    eh_close(&g);

    g = engine_on(dir); /* told again by one that has not made it */
    t = eh_attach(g, "work");
    const struct report *told = &eh_stream(g, t)->end;
    assert_int_equal(eh_stream(g, t)->n_ends, 1);
    assert_int_equal(told->u.end.budget, 300);
    assert_int_equal(told->u.end.prefill_us, whole->u.end.prefill_us);
    assert_int_equal(told->u.end.decode_us, whole->u.end.decode_us);
    eh_close(&g);
    eh_close(&h);
}

/* What another session had is not counted as read, also by the daemon that goes on. */
static void an_end_knows_what_was_adopted(void **state)
{
    (void)state;
    char dir[FOLDER_PATH], copy[FOLDER_PATH];
    struct generate_options o = eh_greedy(NEW);
    folder_fresh(dir, root, "adopted");
    struct eh *h = engine_on(dir);
    uint64_t first = eh_session(h, &(struct eh_ask){.policy = "counter_causal_fast"});
    eh_ids(h, first, prompt, 200, &o);
    eh_run_to_end(h, first);
    uint64_t s = eh_session(h, &(struct eh_ask){.policy = "counter_causal_fast",
                                                .durable = true,
                                                .name = "work"});
    eh_ids(h, s, prompt, 200, &o);
    slow_steps(h, eh_stream(h, s), NEW / 2);
    folder_fresh(copy, root, "copy");
    folder_copy(dir, copy);
    struct eh *g = engine_on(copy);
    uint64_t t = eh_attach(g, "work");
    eh_run_to_end(g, t);
    assert_int_equal(eh_stream(g, t)->end.u.end.tokens_adopted, 192);
    eh_close(&g);
    eh_close(&h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_policy_is_rebuilt_as_it_was),
        cmocka_unit_test(killed_at_every_step),
        cmocka_unit_test(a_snapshot_shortens_the_way),
        cmocka_unit_test(a_damaged_snapshot_is_not_used),
        cmocka_unit_test(a_snapshot_ahead_of_its_journal_is_not_used),
        cmocka_unit_test(a_snapshot_comes_back_under_another_budget),
        cmocka_unit_test(what_finds_no_room_is_put_off),
        cmocka_unit_test(what_was_put_off_comes_with_the_room),
        cmocka_unit_test(what_seems_to_fit_is_tried_once),
        cmocka_unit_test(a_kill_while_a_budget_is_lowered),
        cmocka_unit_test(an_end_has_the_time_of_all_daemons),
        cmocka_unit_test(an_end_knows_what_was_adopted),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
