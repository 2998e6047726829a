/* A clean stop of an engine with durable sessions: the next one evaluates nothing again, and says what an undisturbed one says, for
 * every policy and wherever the stop comes; what does not fit the time or the disk is done again; a kill meanwhile loses nothing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "core.h"
#include "durable_test.h"
#include "faulty_disk.h"
#include "folders_test.h"
#include "sanitized.h"

#define TURNS 3
#define TURN_IN 70
#define NEW 30u
#define NEXT 64u /* tokens that must be the same afterwards */
#define STREAM_MAX 2000

static int32_t prompt[2000];
static struct disk_io fast_disk;
static char root[FOLDER_PATH];

static int setup(void **state)
{
    (void)state;
    prompt_fill(prompt, ARRAY_LEN(prompt), 31);
    fast_disk = disk_io_system;
    disk_unsynced(&fast_disk);
    folder_root_memory(root, "stopping");
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    folder_drop(root);
    return 0;
}

static struct eh *engine_on(char *dir)
{
    return durable_engine(
        &(struct durable_setup){.dir = dir, .io = &fast_disk, .stop_snapshots_us = 1000000});
}

static void ask(struct eh *h, uint64_t s, int turn)
{
    struct generate_options o = eh_greedy(NEW);
    eh_ids(h, s, prompt + turn * TURN_IN, TURN_IN, &o);
}

/* Tokens that the engine will evaluate again for its only session. */
static size_t owed(const struct eh *h)
{
    const struct session *s = h->en->list[0];
    const struct replay *r = s->replay != NULL ? s->replay : s->replay_after;
    assert_int_equal(h->en->n_sessions, 1);
    return r != NULL ? r->n_ids : 0;
}

struct truth {
    int32_t id[STREAM_MAX]; /* by stream index */
};

static void truth_check(const struct truth *t, const struct eh_stream *st, const char *what)
{
    for (uint32_t i = 0; i < st->n_ids; i++)
        if (st->streams[i] >= STREAM_MAX || t->id[st->streams[i]] != st->ids[i])
            fail_msg("%s: token %llu is another one", what, (unsigned long long)st->streams[i]);
}

/* A session that nothing disturbs, all turns over. */
static struct eh *undisturbed(const struct eh_ask *a, struct truth *t, uint64_t *ret)
{
    struct eh *h = durable_engine(&(struct durable_setup){0});
    uint64_t s = eh_session(h, a);
    memset(t, 0xff, sizeof *t);
    for (int k = 0; k < TURNS; k++) {
        ask(h, s, k);
        eh_run_to_end(h, s);
    }
    const struct eh_stream *st = eh_stream(h, s);
    for (uint32_t i = 0; i < st->n_ids; i++)
        t->id[st->streams[i]] = st->ids[i];
    *ret = s;
    return h;
}

/* The same conversation through engines that are stopped every so many steps. */
static void stopped_again_and_again(const struct eh_ask *a, uint32_t every)
{
    struct truth t;
    char dir[FOLDER_PATH];
    struct eh_ask durable = *a;
    uint64_t s, u;
    uint32_t stops = 0, in_prompt = 0, in_answer = 0;
    struct eh *h = undisturbed(a, &t, &s);
    durable.durable = true;
    durable.name = "work";
    folder_fresh(dir, root, "live");
    struct eh *g = engine_on(dir);
    u = eh_session(g, &durable);
    for (int k = 0; k < TURNS; k++) {
        ask(g, u, k);
        for (bool over = false, first = true; !over; first = false) {
            struct eh_stream *st = eh_stream(g, u);
            uint32_t steps = first ? 1 + stops % 3 : every; /* in the prompt, too */
            for (uint32_t i = 0; i < steps && st->n_ends == st->ends_waited; i++)
                eh_step(g);
            const struct request *q = g->en->list[0]->req;
            in_prompt += q != NULL && q->phase == REQUEST_PREFILL;
            in_answer += q != NULL && q->phase == REQUEST_DECODE;
            eh_close(&g);
            stops++;
            g = engine_on(dir);
            if (owed(g) != 0)
                fail_msg("%s: %zu tokens are evaluated again", a->policy, owed(g));
            assert_int_equal(eh_attach(g, "work"), u);
            st = eh_stream(g, u);
            truth_check(&t, st, a->policy);
            over = !st->busy;
            st->ends_waited = st->n_ends;
        }
    }
    assert_true(stops > TURNS && in_prompt > 0 && in_answer > 0);
    answers_equal(h, s, g, u, prompt + 1000, 50, NEXT, a->policy);
    eh_close(&g);
    eh_close(&h);
}

static void nothing_is_done_again(void **state)
{
    (void)state;
    for (size_t i = 0; i < EH_POLICIES; i++)
        stopped_again_and_again(&eh_policies[i], (SANITIZED ? 13 : 9) + (uint32_t)(i * 5) % 13);
}

/* ---- not enough time ---- */

static const char *const names[] = {"long", "short"};

/* Two sessions at rest: the second one has cost less. */
static struct eh *two_sessions(struct durable_setup *d, uint64_t id[2])
{
    struct eh *h = durable_engine(d);
    for (int i = 0; i < 2; i++) {
        struct eh_ask a = {.policy = "h2o", .budget_tokens = 90, .durable = d->dir != NULL};
        struct generate_options o = eh_greedy(NEW);
        a.name = names[i];
        id[i] = eh_session(h, &a);
        eh_ids(h, id[i], prompt + i * 300, i == 0 ? 250 : 100, &o);
        eh_run_to_end(h, id[i]);
    }
    return h;
}

/* Every call that changes the disk takes a second. */
static void a_second_goes_by(void *arg, const char *call)
{
    struct eh *h = arg;
    (void)call;
    h->now_us += 1000000;
}

static size_t owed_by(const struct eh *h, uint64_t id)
{
    for (uint32_t i = 0; i < h->en->n_sessions; i++) {
        const struct session *s = h->en->list[i];
        const struct replay *r = s->replay != NULL ? s->replay : s->replay_after;
        if (s->id == id)
            return r != NULL ? r->n_ids : 0;
    }
    fail_msg("session %llu is gone", (unsigned long long)id);
    return 0;
}

/* Opens what a stop has left: sessions that owe these tokens, and go on as if nothing had been. */
static void rest_is_right(char *dir, uint64_t id[2], size_t long_owes, size_t short_owes)
{
    uint64_t s[2];
    struct eh *h = two_sessions(&(struct durable_setup){0}, s);
    struct eh *g = engine_on(dir);
    if (owed_by(g, id[0]) != long_owes || owed_by(g, id[1]) != short_owes)
        fail_msg("%zu and %zu tokens are evaluated again, not %zu and %zu", owed_by(g, id[0]),
                 owed_by(g, id[1]), long_owes, short_owes);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(eh_attach(g, names[i]), id[i]);
        answers_equal(h, s[i], g, id[i], prompt + 900, 40, NEXT, names[i]);
    }
    eh_close(&g);
    eh_close(&h);
}

#define LONG_ROWS (250u + NEW - 1)
#define SHORT_ROWS (100u + NEW - 1)

/* Stops that may take 0, 1, 2 ... seconds: none, the one that has cost most, both. */
static void time_is_over_some_time(void **state)
{
    (void)state;
    bool none = false, one = false, both = false;
    for (uint64_t seconds = 0; !both; seconds++) {
        char dir[FOLDER_PATH];
        uint64_t id[2];
        struct faulty_disk disk;
        faulty_make(&disk);
        folder_fresh(dir, root, "live");
        struct durable_setup d = {.dir = dir,
                                  .io = &disk.io,
                                  .stop_snapshots_us = seconds * 1000000};
        struct eh *h = two_sessions(&d, id);
        disk.look = a_second_goes_by;
        disk.look_arg = h;
        eh_close(&h);
        char path[2][FOLDER_PATH + 64], tmp[FOLDER_PATH + 64];
        for (int i = 0; i < 2; i++) {
            snprintf(path[i], sizeof path[i], "%s/durable/%u-%s/snapshot", dir, EH_UID, names[i]);
            snprintf(tmp, sizeof tmp, "%s/durable/%u-%s/snapshot.tmp", dir, EH_UID, names[i]);
            assert_int_equal(access(tmp, F_OK), -1); /* what was begun is taken away */
        }
        bool has[2] = {access(path[0], F_OK) == 0, access(path[1], F_OK) == 0};
        assert_true(has[0] || !has[1]);
        rest_is_right(dir, id, has[0] ? 0 : LONG_ROWS, has[1] ? 0 : SHORT_ROWS);
        none |= !has[0];
        one |= has[0] && !has[1];
        both |= has[1];
        assert_true(seconds < 60);
    }
    assert_true(none && one);
}

/* ---- a disk that is full ---- */

static void a_full_disk_costs_time_alone(void **state)
{
    (void)state;
    bool some = false, full = false;
    for (long at = 0; !some; at++) {
        char dir[FOLDER_PATH];
        uint64_t id[2];
        struct faulty_disk disk;
        faulty_make(&disk);
        folder_fresh(dir, root, "live");
        struct durable_setup d = {.dir = dir, .io = &disk.io, .stop_snapshots_us = 1000000};
        struct eh *h = two_sessions(&d, id);
        faulty_arm(&disk, at, 1000000, ENOSPC);
        eh_close(&h);
        faulty_arm(&disk, 0, 0, 0);
        struct eh *g = engine_on(dir);
        size_t n = owed_by(g, id[0]), m = owed_by(g, id[1]);
        eh_close(&g);
        full |= n > 0 && m > 0;
        some = n == 0 && m == 0;
        assert_true(at < 60);
    }
    assert_true(full);
}

/* ---- a kill meanwhile ---- */

struct killed {
    char dir[FOLDER_PATH];
    uint64_t id[2];
    unsigned looks;
};

static void dies_here(void *arg, const char *call)
{
    struct killed *k = arg;
    char copy[FOLDER_PATH];
    (void)call;
    folder_fresh(copy, root, "copy");
    folder_copy(k->dir, copy);
    struct eh *g = engine_on(copy);
    size_t owes[2] = {owed_by(g, k->id[0]), owed_by(g, k->id[1])};
    assert_true(owes[0] == 0 || owes[0] == LONG_ROWS);
    assert_true(owes[1] == 0 || owes[1] == SHORT_ROWS);
    eh_close(&g);
    if (k->looks++ % (SANITIZED ? 3 : 1) != 0)
        return;
    folder_fresh(copy, root, "copy"); /* that start and its stop have written to it */
    folder_copy(k->dir, copy);
    rest_is_right(copy, k->id, owes[0], owes[1]);
}

static void a_kill_in_a_stop_loses_nothing(void **state)
{
    (void)state;
    struct killed k = {.looks = 0};
    struct faulty_disk disk;
    faulty_make(&disk);
    folder_fresh(k.dir, root, "live");
    struct durable_setup d = {.dir = k.dir, .io = &disk.io, .stop_snapshots_us = 1000000};
    struct eh *h = two_sessions(&d, k.id);
    disk.look = dies_here;
    disk.look_arg = &k;
    eh_close(&h);
    if (k.looks < 12)
        fail_msg("%u looks", k.looks);
}

/* ---- whatever else was going on ---- */

/* A budget that is being lowered when the stop comes was not lowered; its client is told so. */
static void a_stop_while_a_budget_is_lowered(void **state)
{
    (void)state;
    bool before = false, after = false;
    for (uint32_t steps = 0; !after; steps++) {
        char dir[FOLDER_PATH];
        struct generate_options o = eh_greedy(8);
        folder_fresh(dir, root, "live");
        struct eh *h = engine_on(dir);
        uint64_t s = eh_session(h, &(struct eh_ask){.policy = "counter_causal",
                                                    .budget_tokens = 300,
                                                    .durable = true,
                                                    .name = "work"});
        eh_ids(h, s, prompt, 200, &o);
        eh_run_to_end(h, s);
        struct command *c = eh_command(h, CMD_BUDGET, s);
        c->u.budget.tokens = 40;
        uint32_t request = eh_post(h, c);
        for (uint32_t i = 0; i < steps; i++)
            eh_step(h);
        engine_stop(h->en);
        eh_collect(h);
        bool lowered = eh_reply(h, request)->type == REP_BUDGET;
        eh_close(&h);
        struct eh *g = engine_on(dir);
        assert_int_equal(owed(g), 0);
        assert_int_equal(eh_attach(g, "work"), s);
        eh_stream(g, s)->ends_waited = eh_stream(g, s)->n_ends; /* it is told again */
        eh_ids(g, s, prompt + 400, 60, &o);
        eh_run_to_end(g, s);
        assert_int_equal(eh_stream(g, s)->end.u.end.tokens_out, 8);
        assert_int_equal(eh_stream(g, s)->end.u.end.budget, lowered ? 40 : 300);
        before |= !lowered;
        after |= lowered;
        assert_true(steps < 100);
        eh_close(&g);
    }
    assert_true(before);
}

/* One that was on its way out, or back, or is away, needs nothing more. */
static void what_is_on_its_way_when_the_stop_comes(void **state)
{
    (void)state;
    for (int steps = 0; steps < 8; steps++) {
        char dir[FOLDER_PATH];
        uint64_t id[2], s[2];
        folder_fresh(dir, root, "live");
        struct durable_setup d = {.dir = dir,
                                  .io = &fast_disk,
                                  .stop_snapshots_us = 1000000,
                                  .spill_after_us = 1000};
        struct eh *u = two_sessions(&(struct durable_setup){0}, s);
        struct eh *h = two_sessions(&d, id);
        eh_pass(h, 2000);
        for (int i = 0; i < steps; i++)
            eh_step(h); /* both leave */
        if (steps >= 4) {
            struct generate_options o = eh_greedy(NEW);
            eh_run(h);
            h->en->opt.spill_after_us = 0;
            eh_ids(u, s[1], prompt + 800, 20, &o);
            eh_run_to_end(u, s[1]);
            eh_post_ids(h, id[1], prompt + 800, 20, &o); /* one comes back */
            for (int i = 4; i < steps; i++)
                eh_step(h);
        }
        eh_close(&h);
        struct eh *g = engine_on(dir);
        assert_int_equal(owed_by(g, id[0]) + owed_by(g, id[1]), 0);
        assert_int_equal(eh_attach(g, names[0]), id[0]);
        assert_int_equal(eh_attach(g, names[1]), id[1]);
        answers_equal(u, s[0], g, id[0], prompt + 900, 40, NEXT, "long");
        eh_run(g);
        uint64_t in = g->en->list[1]->tokens_in;
        if (steps < 4 || in == 120) /* the prompt had begun */
            answers_equal(u, s[1], g, id[1], prompt + 900, 40, NEXT, "short");
        eh_close(&g);
        eh_close(&u);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_is_done_again),
        cmocka_unit_test(time_is_over_some_time),
        cmocka_unit_test(a_full_disk_costs_time_alone),
        cmocka_unit_test(a_kill_in_a_stop_loses_nothing),
        cmocka_unit_test(a_stop_while_a_budget_is_lowered),
        cmocka_unit_test(what_is_on_its_way_when_the_stop_comes),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
