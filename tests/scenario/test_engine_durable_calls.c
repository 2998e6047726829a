/* A durable session whose process ends at every single call that changes the disk, and in the middle of
 * every write: what was told by then is there, and what follows is what an undisturbed session says. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "core.h"
#include "durable_test.h"
#include "faulty_disk.h"
#include "folders_test.h"
#include "records.h"

#define TURNS 2
#define TURN_IN 50u
#define NEW 14u
#define NEXT 64u /* tokens that must be the same afterwards */
#define STREAM_MAX 600
#define IDLE_US 1000000u
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define EVERY 4 /* moments; nothing but time speaks against all */
#else
#define EVERY 1
#endif

static int32_t prompt[1000];
static struct disk_io fast_disk;
static char root[FOLDER_PATH], dir[FOLDER_PATH], copy[FOLDER_PATH];

static int setup(void **state)
{
    (void)state;
    prompt_fill(prompt, ARRAY_LEN(prompt), 19);
    folder_root_memory(root, "durable-calls");
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    folder_drop(root);
    return 0;
}

static void ask(struct eh *h, uint64_t s, int turn)
{
    struct generate_options o = eh_greedy(turn < TURNS ? NEW : NEXT);
    eh_ids(h, s, prompt + turn * TURN_IN, TURN_IN, &o);
}

/* What an undisturbed session says, by stream index; -1: a token of a prompt. */
static int32_t truth[STREAM_MAX];

static void truth_make(const struct eh_ask *a)
{
    struct eh *h = durable_engine(&(struct durable_setup){0});
    uint64_t s = eh_session(h, a);
    memset(truth, 0xff, sizeof truth);
    for (int k = 0; k <= TURNS; k++) {
        ask(h, s, k);
        eh_run_to_end(h, s);
    }
    const struct eh_stream *st = eh_stream(h, s);
    for (uint32_t i = 0; i < st->n_ids; i++)
        truth[st->streams[i]] = st->ids[i];
    eh_close(&h);
}

/* The living session, and what its client was told. */
struct live {
    struct eh *h;
    uint64_t s;    /* 0: it was not told that there is one */
    int turn;      /* that was asked last; -1: none */
    bool accepted; /* and the client knows it */
    bool closing;  /* it may be gone */
    uint32_t looks;
};

static uint64_t told(const struct live *l)
{
    const struct eh_stream *st = l->s != 0 ? eh_stream(l->h, l->s) : NULL;
    return st != NULL && st->n_ids > 0 ? st->streams[st->n_ids - 1] + 1 : 0;
}

static void stream_check(const struct eh_stream *st, const char *what)
{
    for (uint32_t i = 0; i < st->n_ids; i++)
        if (truth[st->streams[i]] != st->ids[i])
            fail_msg("%s: token %llu is %d, not %d", what, (unsigned long long)st->streams[i],
                     st->ids[i], truth[st->streams[i]]);
}

/* The process ends here. */
static void ends_here(void *arg, const char *call)
{
    struct live *l = arg;
    char what[96];
    if (l->looks % EVERY != 0) {
        l->looks++;
        return;
    }
    snprintf(what, sizeof what, "look %u, %s, turn %d", l->looks++, call, l->turn);
    folder_fresh(copy, root, "copy");
    folder_copy(dir, copy);
    struct eh *h = durable_engine(&(struct durable_setup){.dir = copy, .io = &fast_disk});
    uint64_t s = eh_attach(h, "work");
    if (s == 0) {
        if (l->s != 0 && !l->closing)
            fail_msg("%s: the session is gone", what);
        eh_close(&h);
        return;
    }
    struct eh_stream *st = eh_stream(h, s);
    if (st->busy)
        eh_run_to_end(h, s);
    st->ends_waited = st->n_ends;
    eh_run(h);
    stream_check(st, what);
    int turns = (int)(sess_find(h->en, s)->tokens_in / TURN_IN); /* that it has had */
    uint64_t known = st->n_ids > 0 ? st->streams[st->n_ids - 1] + 1 : 0;
    if (known < told(l) || turns < l->turn + l->accepted)
        fail_msg("%s: told up to token %llu, known up to %llu, turns %d", what,
                 (unsigned long long)told(l), (unsigned long long)known, turns);
    uint32_t n_before = st->n_ids;
    for (int k = turns; k <= TURNS; k++) { /* what its client does next */
        ask(h, s, k);
        eh_run_to_end(h, s);
    }
    stream_check(st, what);
    assert_true(st->n_ids >= n_before + NEXT);
    eh_close(&h);
}

static void at_every_call(const struct eh_ask *a, uint32_t at_least)
{
    struct faulty_disk disk;
    struct live l = {.turn = -1};
    struct eh_ask durable = *a;
    durable.durable = true;
    durable.name = "work";
    truth_make(a);
    faulty_make(&disk);
    disk_unsynced(&disk.io);
    fast_disk = disk_io_system;
    disk_unsynced(&fast_disk);
    folder_fresh(dir, root, "live");
    l.h = durable_engine(&(struct durable_setup){
        .dir = dir, .io = &disk.io, .spill_after_us = IDLE_US, .host_tier = 64 << 20});
    disk.look = ends_here;
    disk.look_arg = &l;
    l.s = eh_session(l.h, &durable);
    for (int k = 0; k < TURNS; k++) {
        l.accepted = false;
        l.turn = k;
        ask(l.h, l.s, k);
        l.accepted = true;
        eh_run_to_end(l.h, l.s);
        eh_pass(l.h, IDLE_US);
        eh_run(l.h); /* its snapshot is written */
    }
    stream_check(eh_stream(l.h, l.s), "undisturbed");
    l.closing = true;
    eh_close_session(l.h, l.s);
    disk.look = NULL;
    eh_close(&l.h);
    assert_int_equal(folder_files(dir), 0);
    if (l.looks < at_least)
        fail_msg("%u calls", l.looks);
}

static void with_prunes(void **state)
{
    (void)state;
    at_every_call(&(struct eh_ask){.policy = "counter_causal_fast", .budget_tokens = 48}, 60);
}

static void with_what_a_policy_has_learnt(void **state)
{
    (void)state;
    at_every_call(&(struct eh_ask){.policy = "h2o", .budget_tokens = 60, .frozen = 3}, 60);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(with_prunes),
        cmocka_unit_test(with_what_a_policy_has_learnt),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
