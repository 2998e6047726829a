/* A durable session on a disk that fails: every call that changes the disk, once, twice and for good,
 * full or broken. Whoever was told that something is done finds it after a kill at that moment; what
 * could not be written is an error; and when the disk is well again so is the session. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include "core.h"
#include "durable_test.h"
#include "faulty_disk.h"
#include "folders_test.h"
#include "records.h"

#define NEW 10u
#define PROMPT 40u

static int32_t prompt[400];
static char root[FOLDER_PATH], dir[FOLDER_PATH], copy[FOLDER_PATH];
static struct faulty_disk disk;

static int setup(void **state)
{
    (void)state;
    prompt_fill(prompt, ARRAY_LEN(prompt), 5);
    folder_root_memory(root, "durable-faults");
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    folder_drop(root);
    return 0;
}

static struct eh *engine_on(char *folder, const struct disk_io *io)
{
    return durable_engine(&(struct durable_setup){.dir = folder, .io = io});
}

/* What a client knows: the tokens that it asked with (accepted) and got. */
struct known {
    int32_t id[400]; /* by stream index; -1: not known */
    uint64_t n;      /* all below it are there for certain */
};

static void known_clear(struct known *k)
{
    memset(k->id, 0xff, sizeof k->id);
    k->n = 0;
}

static void learn(struct known *k, const struct eh_stream *st)
{
    for (uint32_t i = 0; i < st->n_ids; i++) {
        assert_true(st->streams[i] < ARRAY_LEN(k->id));
        k->id[st->streams[i]] = st->ids[i];
        k->n = BC_MAX(k->n, st->streams[i] + 1);
    }
}

/* A kill now: the next engine has what the client knows. The policy is "none": nothing was dropped. */
static void kill_loses_nothing(const struct known *k, const char *what)
{
    folder_fresh(copy, root, "copy");
    folder_copy(dir, copy);
    struct eh *h = engine_on(copy, NULL);
    uint64_t s = eh_attach(h, "work");
    if (s == 0)
        fail_msg("%s: the session is gone", what);
    const struct session *e = h->en->list[0];
    const struct replay *r = e->replay;
    uint64_t n = r != NULL ? r->end->stream + r->end->has_pending : e->stream + e->has_pending;
    if (n < k->n)
        fail_msg("%s: %llu tokens told, %llu kept", what, (unsigned long long)k->n,
                 (unsigned long long)n);
    eh_run(h);
    const int32_t *ids = seqcache_ids(e->cache);
    for (uint64_t i = 0; i < k->n && i < seqcache_count(e->cache); i++)
        if (k->id[i] >= 0 && k->id[i] != ids[i])
            fail_msg("%s: token %llu is %d, not %d", what, (unsigned long long)i, ids[i], k->id[i]);
    assert_int_equal(folder_files(copy), 1); /* the journal */
    eh_close(&h);
}

/* One request, to its end. True: it was accepted and ended as it should. */
static bool ask(struct eh *h, uint64_t s, const int32_t *ids, struct known *k, const char *what)
{
    struct generate_options o = eh_greedy(NEW);
    struct eh_stream *st = eh_stream(h, s);
    eh_forget(h, s);
    const struct report *r = eh_reply(h, eh_post_ids(h, s, ids, PROMPT, &o));
    bool accepted = r->type == REP_ACCEPTED;
    if (accepted) {
        eh_run_to_end(h, s);
        if (st->end.u.end.reason == END_ERROR) {
            assert_int_equal(st->end.u.end.code, -BC_EIO);
            assert_true(strlen(st->end.u.end.text) > 0);
        } else {
            assert_int_equal(st->n_ids, NEW); /* all of it, or an error */
        }
    } else {
        assert_int_equal(r->u.error.code, BC_EIO);
        assert_int_equal(st->n_ids, 0);
        assert_int_equal(st->n_ends, 0);
    }
    eh_run(h);
    learn(k, st);
    kill_loses_nothing(k, what);
    return accepted && st->end.u.end.reason == END_LENGTH;
}

/* The disk is well again: so is the session, and the next engine has the same. */
static void healed(struct eh *h, uint64_t s, struct known *k, const char *what)
{
    faulty_arm(&disk, 0, 0, 0);
    bool good = ask(h, s, prompt + 100, k, what); /* or the one that is told of the last failure */
    if (!good && !ask(h, s, prompt + 100, k, what))
        fail_msg("%s: it does not heal", what);
    folder_fresh(copy, root, "copy");
    folder_copy(dir, copy);
    struct eh *g = engine_on(copy, NULL);
    uint64_t t = eh_attach(g, "work");
    eh_run(g);
    sessions_equal(h, s, g, t, what);
    answers_equal(h, s, g, t, prompt + 200, 20, 12, what);
    eh_close(&g);
}

/* Opens, asks twice, closes, while calls `at` .. fail. False: they were not reached. */
static bool one_fault(long at, long n, int why)
{
    char what[96];
    struct known k;
    struct eh_ask a = {.policy = "none", .durable = true, .name = "work"};
    known_clear(&k);
    snprintf(what, sizeof what, "call %ld (%ld fail, %s)", at, n, strerror(why));
    faulty_make(&disk);
    faulty_arm(&disk, at, n, why);
    folder_fresh(dir, root, "live");
    struct eh *h = engine_on(dir, &disk.io);
    const struct report *r = eh_reply(h, eh_post_open(h, &a));
    eh_run(h);
    if (r->type != REP_OPENED) { /* refused: there is nothing, and nothing comes later */
        assert_int_equal(r->u.error.code, BC_EIO);
        assert_int_equal(h->en->n_sessions, 0);
        faulty_arm(&disk, 0, 0, 0);
        if (at % 2 == 0) /* and the name is free */
            eh_close_session(h, eh_session(h, &a));
        eh_close(&h);
        h = engine_on(dir, NULL);
        assert_int_equal(h->en->n_sessions, 0);
        assert_int_equal(folder_files(dir), 0);
        eh_session(h, &a);
        eh_close(&h);
        return true;
    }
    uint64_t s = r->session;
    ask(h, s, prompt, &k, what);
    eh_pass(h, KEEPER_SYNC_US);
    eh_run(h); /* a sync is due */
    ask(h, s, prompt + 50, &k, what);
    bool reached = disk.failed > 0;
    if (reached)
        healed(h, s, &k, what);
    eh_close(&h);
    return reached;
}

static void every_call_fails_once(void **state)
{
    (void)state;
    long at = 0;
    while (one_fault(at, 1, EIO))
        at++;
    assert_true(at > 2 * NEW);
    at = 0;
    while (one_fault(at, 1, ENOSPC))
        at += 2;
}

static void a_disk_fills_up_and_is_emptied(void **state)
{
    (void)state;
    for (long at = 0; one_fault(at, 9, ENOSPC); at += 3)
        ;
}

static void a_disk_is_gone_for_a_while(void **state)
{
    (void)state;
    for (long at = 0; one_fault(at, 100000, EIO); at += 2)
        ;
    for (long at = 1; one_fault(at, 100000, ENOSPC); at += 4)
        ;
}

/* A sync that failed is never believed later: the file is left alone and made anew. */
static void a_failed_sync_makes_a_new_file(void **state)
{
    (void)state;
    struct eh_ask a = {.policy = "none", .durable = true, .name = "work"};
    char path[FOLDER_PATH + 64];
    for (long n = 1; n < 6; n++) {
        struct known k;
        known_clear(&k);
        faulty_make(&disk);
        disk.syncs_only = true;
        folder_fresh(dir, root, "live");
        struct eh *h = engine_on(dir, &disk.io);
        uint64_t s = eh_session(h, &a);
        snprintf(path, sizeof path, "%s/durable/%u-work/journal", dir, EH_UID);
        assert_true(ask(h, s, prompt, &k, "before"));
        int old = open(path, O_RDONLY | O_CLOEXEC);
        struct stat was, is;
        assert_true(old >= 0 && fstat(old, &was) == 0); /* open: its number is not given again */
        eh_pass(h, KEEPER_SYNC_US);
        faulty_arm(&disk, 0, n, EIO);
        assert_false(eh_step(h) && disk.failed == 0);
        eh_run(h);
        assert_true(disk.failed > 0);
        bool good = ask(h, s, prompt + 50, &k, "after");
        faulty_arm(&disk, 0, 0, 0);
        if (!good && !ask(h, s, prompt + 50, &k, "after that"))
            fail_msg("%ld syncs failed: it does not heal", n);
        assert_int_equal(stat(path, &is), 0);
        assert_true(is.st_ino != was.st_ino);
        close(old);
        healed(h, s, &k, "a failed sync");
        eh_close(&h);
    }
}

/* Closing means forgetting: it is told only when it is so. */
static void a_close_that_fails_is_told(void **state)
{
    (void)state;
    struct eh_ask a = {.policy = "none", .durable = true, .name = "work"};
    for (long at = 0;; at++) {
        struct known k;
        known_clear(&k);
        faulty_make(&disk);
        folder_fresh(dir, root, "live");
        struct eh *h = engine_on(dir, &disk.io);
        uint64_t s = eh_session(h, &a);
        ask(h, s, prompt, &k, "before");
        faulty_arm(&disk, at, 1, EIO);
        const struct report *r = eh_reply(h, eh_post(h, eh_command(h, CMD_CLOSE, s)));
        assert_int_equal(h->en->n_sessions, 0);
        bool told = r->type == REP_CLOSED, reached = disk.failed > 0;
        if (!told) {
            assert_int_equal(r->u.error.code, BC_EIO);
            assert_true(reached);
        }
        faulty_arm(&disk, 0, 0, 0);
        if (at % 2 == 0) /* another of its name begins with nothing */
            eh_close_session(h, eh_session(h, &a));
        eh_close(&h);
        h = engine_on(dir, NULL);
        if (told)
            assert_int_equal(h->en->n_sessions, 0);
        eh_close(&h);
        if (!reached)
            break;
        assert_true(at < 20);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_call_fails_once),
        cmocka_unit_test(a_disk_fills_up_and_is_emptied),
        cmocka_unit_test(a_disk_is_gone_for_a_while),
        cmocka_unit_test(a_failed_sync_makes_a_new_file),
        cmocka_unit_test(a_close_that_fails_is_told),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
