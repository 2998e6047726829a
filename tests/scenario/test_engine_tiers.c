/* Idle caches leave their pages and come back on use: the text is the one of a session that never
 * left, whatever the policy; who wants pages gets them; nothing is left behind. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "core.h"
#include "engine_harness.h"
#include "records.h"
#include "sanitized.h"

#define TURNS 4
#define NEW 40

static int32_t prompt[2000];

static int setup(void **state)
{
    (void)state;
    uint32_t x = 21;
    for (size_t i = 0; i < ARRAY_LEN(prompt); i++) {
        x = x * 1664525u + 1013904223u;
        prompt[i] = (int32_t)(3 + (x >> 8) % 280);
    }
    return 0;
}

/* What an engine is told, and what the test looks at. */
struct setting {
    uint64_t host, disk, after, kv_memory;
    const char *dir;
    const struct disk_io *io;
    bool apart;
};

static void apply(struct engine_options *o, void *arg)
{
    const struct setting *s = arg;
    o->host_tier = s->host;
    o->no_prefixes = s->apart; /* every session has all of its pages to itself */
    o->disk_tier = s->disk;
    o->spill_after_us = s->after;
    o->state_dir = s->dir;
    o->io = s->io;
    o->score_rows = 30;
    o->prefill_chunk = 32;
    if (s->kv_memory != 0)
        o->kv_memory = s->kv_memory;
}

static struct engine_counts counts(struct eh *h)
{
    struct engine_counts c;
    engine_counts(h->en, &c);
    return c;
}

static const char *state_of(struct eh *h, uint64_t id)
{
    const struct report *r = eh_expect(h, eh_post(h, eh_command(h, CMD_STAT, id)), REP_STAT);
    return r->u.stat.sessions[0].state;
}

static void turn(struct eh *h, uint64_t s, int k)
{
    struct generate_options o = eh_greedy(NEW);
    o.temperature = k == 1 ? 0.7f : 0; /* sampling has no state to lose */
    o.seed = 5;
    o.repeat_penalty = 1.2f; /* but the newest tokens are one */
    eh_ids(h, s, prompt + k * 60, k == 2 ? 3 : 60, &o);
    eh_run_to_end(h, s);
}

static void streams_equal(const struct eh_stream *a, const struct eh_stream *b, const char *what)
{
    if (a->n_ids != b->n_ids || memcmp(a->ids, b->ids, a->n_ids * sizeof *a->ids) != 0)
        fail_msg("%s: the text differs", what);
    assert_memory_equal(a->streams, b->streams, a->n_ids * sizeof *a->streams);
    assert_int_equal(a->n_prunes, b->n_prunes);
    for (uint32_t i = 0; i < a->n_prunes; i++) {
        assert_int_equal(a->prunes[i].before, b->prunes[i].before);
        assert_int_equal(a->prunes[i].n_ranges, b->prunes[i].n_ranges);
        assert_memory_equal(a->prunes[i].ranges, b->prunes[i].ranges,
                            a->prunes[i].n_ranges * sizeof(struct evict_range));
    }
}

/* Turns with a leave between them, against the same turns without. */
static void away_and_back(struct setting *with, const struct eh_ask *ask)
{
    struct setting stays = {0};
    struct eh *a = eh_open("tiny-llama.gguf", apply, &stays);
    struct eh *b = eh_open("tiny-llama.gguf", apply, with);
    uint64_t s = eh_session(a, ask), t = eh_session(b, ask);
    for (int k = 0; k < TURNS; k++) {
        turn(a, s, k);
        turn(b, t, k);
        eh_pass(b, 100);
        eh_run(b);
        struct engine_counts c = counts(b);
        assert_int_equal(c.spills, k + 1);
        assert_int_equal(c.returns, k);
        assert_int_equal(c.kv_held, 0);
        assert_true(c.host_bytes + c.disk_bytes > 0);
        assert_string_equal(state_of(b, t), "spilled");
        const struct report *r = eh_expect(b, eh_post(b, eh_command(b, CMD_STAT, t)), REP_STAT);
        assert_int_equal(r->u.stat.sessions[0].tokens, eh_stream(b, t)->end.u.end.tokens_cached);
        assert_string_equal(r->u.stat.sessions[0].tier, c.host_bytes > 0 ? "host" : "disk");
        assert_false(r->u.stat.sessions[0].durable);
    }
    streams_equal(eh_stream(a, s), eh_stream(b, t), ask->policy);
    /* a prune on request, of a cache that is away, drops the same tokens */
    if (strcmp(ask->policy, "none") != 0) {
        struct command *c = eh_command(a, CMD_PRUNE, s), *d = eh_command(b, CMD_PRUNE, t);
        c->u.budget.keep = d->u.budget.keep = 45;
        eh_expect(a, eh_post(a, c), REP_PRUNED_REPLY);
        eh_expect(b, eh_post(b, d), REP_PRUNED_REPLY);
        eh_run(a);
        streams_equal(eh_stream(a, s), eh_stream(b, t), "asked");
    }
    eh_close_session(b, t);
    assert_int_equal(counts(b).host_bytes + counts(b).disk_bytes, 0);
    eh_close(&a);
    eh_close(&b);
}

static void every_policy_goes_on_as_if_it_had_stayed(void **state)
{
    (void)state;
    for (size_t i = 0; i < EH_POLICIES; i++) {
        struct setting host = {.host = 64 << 20, .after = 1};
        away_and_back(&host, &eh_policies[i]);
    }
}

static void dir_make(char *dir)
{
    strcpy(dir, "/tmp/backcast-tier-XXXXXX");
    assert_non_null(mkdtemp(dir));
}

static unsigned dir_entries(const char *dir)
{
    unsigned n = 0;
    DIR *d = opendir(dir);
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d)) != NULL;)
        n += e->d_name[0] != '.';
    closedir(d);
    return n;
}

static void the_disk_tier_leaves_nothing_in_its_folder(void **state)
{
    (void)state;
    char dir[64];
    dir_make(dir);
    for (size_t i = 0; i < EH_POLICIES; i += 3) {
        struct setting disk = {.disk = 64 << 20, .after = 1, .dir = dir};
        away_and_back(&disk, &eh_policies[i]);
        assert_int_equal(dir_entries(dir), 0);
    }
    assert_int_equal(rmdir(dir), 0);
}

/* Room for one session's pages, and two sessions in turn. */
static void who_wants_pages_gets_those_of_the_idle(void **state)
{
    (void)state;
    struct setting wide = {0};
    struct eh *a = eh_open("tiny-llama.gguf", apply, &wide);
    struct eh_ask ask = {.policy = "none"};
    uint64_t s = eh_session(a, &ask);
    uint64_t page = eh_expect(a, eh_post(a, eh_command(a, CMD_STAT, s)), REP_STAT)
                        ->u.stat.sessions[0]
                        .page_bytes;
    for (int k = 0; k < TURNS; k++)
        turn(a, s, k);
    uint64_t held = counts(a).kv_held;
    struct setting tight = {.host = 64 << 20, .kv_memory = held + page, .apart = true};
    struct eh *b = eh_open("tiny-llama.gguf", apply, &tight);
    uint64_t t[3] = {eh_session(b, &ask), eh_session(b, &ask), eh_session(b, &ask)};
    for (int k = 0; k < TURNS; k++)
        for (int i = 0; i < 3; i++)
            turn(b, t[i], k);
    assert_true(counts(b).spills >= 2 * TURNS);
    for (int i = 0; i < 3; i++)
        streams_equal(eh_stream(a, s), eh_stream(b, t[i]), "in turn");
    eh_close(&a);
    eh_close(&b);
}

/* All at once: those that find no page wait for one that decodes to end, or are told; the text of
 * whoever ends well is that of a session alone. */
static void too_little_for_all_is_said_with_numbers(void **state)
{
    (void)state;
    struct setting tight = {.kv_memory = 0};
    struct eh *a = eh_open("tiny-llama.gguf", apply, &tight);
    struct eh_ask ask = {.policy = "none"};
    uint64_t s = eh_session(a, &ask);
    turn(a, s, 0);
    uint64_t held = counts(a).kv_held;
    tight = (struct setting){.host = held / 2, .kv_memory = held}; /* and nowhere to go */
    struct eh *b = eh_open("tiny-llama.gguf", apply, &tight);
    uint64_t t = eh_session(b, &ask), u = eh_session(b, &ask);
    turn(b, t, 0);
    streams_equal(eh_stream(a, s), eh_stream(b, t), "alone");
    struct generate_options o = eh_greedy(1);
    const struct err *e =
        eh_expect_error(b, eh_post_ids(b, u, prompt, 60, &o), BC_EBUDGET, "kv_memory");
    assert_true(e->needed > e->available);
    assert_int_equal(counts(b).spills, 0);
    eh_close(&a);
    eh_close(&b);
}

/* ---- a disk that lies ---- */

struct faults {
    uint64_t flip_at; /* this byte of the file comes back changed; UINT64_MAX: none */
    int fail_pwrite;  /* the Nth write from now on fails; 0: none */
    uint64_t reads;
};

static ssize_t bad_pread(void *arg, int fd, void *to, size_t n, uint64_t at)
{
    struct faults *f = arg;
    ssize_t k = disk_io_system.pread(NULL, fd, to, n, at);
    f->reads++;
    if (k > 0 && f->flip_at >= at && f->flip_at < at + (uint64_t)k)
        ((uint8_t *)to)[f->flip_at - at] ^= 0x10;
    return k;
}

static ssize_t bad_pwrite(void *arg, int fd, const void *from, size_t n, uint64_t at)
{
    struct faults *f = arg;
    if (f->fail_pwrite > 0 && --f->fail_pwrite == 0) {
        errno = ENOSPC;
        return -1;
    }
    return disk_io_system.pwrite(NULL, fd, from, n, at);
}

static void what_came_back_wrong_is_not_used(void **state)
{
    (void)state;
    char dir[64];
    struct faults f = {.flip_at = UINT64_MAX};
    struct disk_io io = disk_io_system;
    io.pread = bad_pread;
    io.pwrite = bad_pwrite;
    io.arg = &f;
    dir_make(dir);
    struct setting disk = {.disk = 64 << 20, .after = 1, .dir = dir, .io = &io}, stays = {0};
    struct eh *a = eh_open("tiny-llama.gguf", apply, &stays);
    struct eh *b = eh_open("tiny-llama.gguf", apply, &disk);
    uint64_t s = eh_session(a, &eh_policies[0]), t = eh_session(b, &eh_policies[0]);
    struct generate_options o = eh_greedy(NEW);
    turn(a, s, 0);
    turn(b, t, 0);
    eh_pass(b, 100);
    eh_run(b);
    uint64_t bytes = counts(b).disk_bytes;
    for (uint64_t at = 0; at < bytes; at += bytes / 23) {
        f.flip_at = at;
        const struct report *r = eh_reply(b, eh_post_ids(b, t, prompt, 9, &o));
        assert_int_equal(r->type, REP_ERROR);
        assert_true(r->u.error.code == BC_ECORRUPT || r->u.error.code == BC_EVERSION);
        assert_string_equal(state_of(b, t), "spilled");
        assert_int_equal(counts(b).kv_held, 0);
    }
    f.flip_at = UINT64_MAX; /* the disk has recovered: so has the session */
    turn(a, s, 1);
    turn(b, t, 1);
    streams_equal(eh_stream(a, s), eh_stream(b, t), "after errors");

    /* a full disk: it stays where it is */
    f.fail_pwrite = 1;
    eh_pass(b, 100);
    eh_run(b);
    assert_int_equal(counts(b).disk_bytes, 0);
    assert_string_equal(state_of(b, t), "idle");
    turn(a, s, 2);
    turn(b, t, 2);
    streams_equal(eh_stream(a, s), eh_stream(b, t), "full disk");
    eh_close(&a);
    eh_close(&b);
    assert_int_equal(rmdir(dir), 0);
}

/* ---- in the middle of it ---- */

/* Closed, cancelled, left and asked for at every step of its way out and back. */
static void at_every_step_of_its_way(void **state)
{
    (void)state;
    struct generate_options o = eh_greedy(5);
    for (int what = 0; what < 4; what++)
        for (int steps = SANITIZED ? what % 2 : 0; steps < 12; steps += SANITIZED ? 2 : 1) {
            struct setting host = {.host = 64 << 20, .after = 1};
            struct eh *h = eh_open("tiny-llama.gguf", apply, &host);
            uint64_t s = eh_session(h, &eh_policies[0]);
            turn(h, s, 0);
            eh_pass(h, 100);
            uint32_t r = 0;
            if (steps >= 6) { /* on its way back */
                eh_run(h);
                r = eh_post_ids(h, s, prompt, 9, &o);
            }
            for (int i = 0; i < steps % 6; i++)
                eh_step(h);
            if (what == 0) {
                eh_close_session(h, s);
                eh_run(h);
                assert_int_equal(counts(h).host_bytes, 0);
            } else if (what == 1) {
                eh_expect(h, eh_post(h, eh_command(h, CMD_CANCEL, s)), REP_DONE);
                eh_run(h);
            } else if (what == 2) {
                struct command *c = command_new(CMD_GONE, EH_CONN, 0);
                assert_non_null(c);
                eh_post(h, c);
                eh_run(h);
                assert_int_equal(counts(h).sessions, 0);
                assert_int_equal(counts(h).host_bytes, 0);
            } else if (r == 0) {
                eh_ids(h, s, prompt, 9, &o);
                eh_run_to_end(h, s);
                assert_int_equal(eh_stream(h, s)->n_ids, NEW + 5);
            }
            if (r != 0) { /* answered once, one way or the other */
                eh_reply(h, r);
                uint32_t n = 0;
                for (uint32_t i = 0; i < h->n_replies; i++)
                    n += h->replies[i]->request_id == r;
                assert_int_equal(n, 1);
            }
            eh_close(&h);
        }
}

/* Caches of many blocks leave together while a neighbour decodes: no step copies more than its
 * share, and the neighbour's text is its own. */
static void neighbours_go_on_meanwhile(void **state)
{
    enum { BIG = 20 };
    (void)state;
    struct setting host = {.host = 1u << 30, .after = 1, .kv_memory = 1u << 30, .apart = true},
                   stays = {0};
    struct eh *a = eh_open("tiny-llama.gguf", apply, &stays);
    struct eh *b = eh_open("tiny-llama.gguf", apply, &host);
    struct generate_options none = eh_greedy(0), many = eh_greedy(300);
    struct eh_ask ask = {.policy = "none", .kv_type = "f32"};
    uint64_t alone = eh_session(a, &ask), small = eh_session(b, &ask), big[BIG];
    eh_ids(a, alone, prompt, 20, &many);
    eh_run_to_end(a, alone);
    for (int i = 0; i < BIG; i++) {
        b->en->opt.spill_after_us = 0; /* not one after the other */
        big[i] = eh_session(b, &ask);
        eh_ids(b, big[i], prompt, 1000, &none);
        eh_run_to_end(b, big[i]);
    }
    assert_true(counts(b).kv_held > 2 * TIER_STEP_BYTES);
    eh_ids(b, small, prompt, 20, &many);
    b->en->opt.spill_after_us = 1;
    uint32_t seen = 0, with_copy = 0;
    eh_pass(b, 100);
    while (counts(b).spills < BIG) {
        uint32_t before = eh_stream(b, small)->n_ids;
        eh_step(b);
        assert_true(b->en->tier.step_left <= TIER_STEP_BYTES);
        with_copy += b->en->tier.step_left < TIER_STEP_BYTES;
        seen += eh_stream(b, small)->n_ids - before;
    }
    assert_true(with_copy >= 3);
    assert_true(seen + 1 >= with_copy); /* a token in every one of them */
    eh_run_to_end(b, small);
    streams_equal(eh_stream(a, alone), eh_stream(b, small), "neighbour");
    eh_close(&a);
    eh_close(&b);
}

/* With its threads: many sessions over pages for a few, each with the text of one alone. */
static void with_threads(void **state)
{
    (void)state;
    enum { N = 6 };
    char dir[64];
    dir_make(dir);
    struct setting wide = {0};
    struct eh *a = eh_open("tiny-llama.gguf", apply, &wide);
    uint64_t alone[N], s[N];
    for (int i = 0; i < N; i++) {
        alone[i] = eh_session(a, &eh_policies[i]);
        for (int k = 0; k < TURNS; k++)
            turn(a, alone[i], k);
    }
    struct setting tight = {.host = counts(a).kv_held / 3,
                            .disk = 64 << 20,
                            .after = 2000,
                            .dir = dir,
                            .kv_memory = counts(a).kv_held / 2};
    struct eh *b = eh_open("tiny-llama.gguf", apply, &tight);
    eh_start(b);
    for (int i = 0; i < N; i++)
        s[i] = eh_session(b, &eh_policies[i]);
    for (int k = 0; k < TURNS; k++)
        for (int i = 0; i < N; i++)
            turn(b, s[i], k);
    for (int i = 0; i < N; i++)
        streams_equal(eh_stream(a, alone[i]), eh_stream(b, s[i]), eh_policies[i].policy);
    eh_close(&a);
    eh_close(&b);
    assert_int_equal(rmdir(dir), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_policy_goes_on_as_if_it_had_stayed),
        cmocka_unit_test(the_disk_tier_leaves_nothing_in_its_folder),
        cmocka_unit_test(who_wants_pages_gets_those_of_the_idle),
        cmocka_unit_test(too_little_for_all_is_said_with_numbers),
        cmocka_unit_test(what_came_back_wrong_is_not_used),
        cmocka_unit_test(at_every_step_of_its_way),
        cmocka_unit_test(neighbours_go_on_meanwhile),
        cmocka_unit_test(with_threads),
    };
    return cmocka_run_group_tests(tests, setup, NULL);
}
