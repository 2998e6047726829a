/* Saved sessions: what is restored, by another daemon, goes on as if it had never left; a file that
 * is not whole, or not for this model, is refused and nothing changes; a save that fails leaves the
 * older file. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "core.h"
#include "engine_harness.h"
#include "faulty_disk.h"
#include "records.h"

#define NEW 40

static int32_t prompt[2000];
static char dir[64];
static const struct disk_io *use_io;
static uint64_t spill_after;

static int setup(void **state)
{
    (void)state;
    uint32_t x = 33;
    for (size_t i = 0; i < ARRAY_LEN(prompt); i++) {
        x = x * 1664525u + 1013904223u;
        prompt[i] = (int32_t)(3 + (x >> 8) % 280);
    }
    strcpy(dir, "/tmp/backcast-save-XXXXXX");
    return mkdtemp(dir) != NULL ? 0 : -1;
}

static int teardown(void **state)
{
    char command[128];
    (void)state;
    snprintf(command, sizeof command, "rm -rf %s", dir);
    return system(command);
}

static void tweak(struct engine_options *o, void *arg)
{
    const uint32_t *activations = arg;
    o->activations = activations != NULL ? *activations : 0;
    o->state_dir = dir;
    o->io = use_io;
    o->host_tier = 64 << 20;
    o->spill_after_us = spill_after;
    o->score_rows = 30;
    o->prefill_chunk = 32;
}

static struct eh *daemon_open(const char *model)
{
    return eh_open(model, tweak, NULL);
}

static void turn(struct eh *h, uint64_t s, int k)
{
    struct generate_options o = eh_greedy(NEW);
    o.temperature = k == 1 ? 0.7f : 0;
    o.seed = 5;
    o.repeat_penalty = 1.2f;
    eh_ids(h, s, prompt + k * 60, k == 2 ? 3 : 60, &o);
    eh_run_to_end(h, s);
}

static const struct report_session *stat_of(struct eh *h, uint64_t s)
{
    return eh_expect(h, eh_post(h, eh_command(h, CMD_STAT, s)), REP_STAT)->u.stat.sessions;
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

static void file_of(const char *name, char *ret, size_t size)
{
    snprintf(ret, size, "%s/saved/%u/%s.bcs", dir, EH_UID, name);
}

/* ---- as if it had never left ---- */

static void goes_on_in_another_daemon(const struct eh_ask *ask)
{
    struct eh *a = daemon_open("tiny-llama.gguf"), *b = daemon_open("tiny-llama.gguf");
    uint64_t s = eh_session(a, ask), t = eh_session(b, ask);
    turn(a, s, 0);
    turn(b, t, 0);
    turn(a, s, 1);
    turn(b, t, 1);
    eh_expect(b, eh_post_save(b, t, "work"), REP_DONE);
    struct report_session before = *stat_of(b, t);
    eh_close(&b);

    b = daemon_open("tiny-llama.gguf");
    const struct report *r = eh_expect(b, eh_post_restore(b, "work"), REP_OPENED);
    uint64_t u = r->session;
    assert_string_equal(r->u.info.name, "work");
    assert_string_equal(r->u.info.policy, before.policy);
    assert_string_equal(r->u.info.kv_type, before.kv_type);
    assert_int_equal(r->u.info.budget_bytes, before.budget_bytes);
    assert_int_equal(r->u.info.budget, before.budget);
    assert_int_equal(r->u.info.keep, before.keep);
    assert_int_equal(r->u.info.frozen, before.frozen);
    assert_int_equal(r->u.info.tokens, before.tokens);
    assert_int_equal(r->u.info.prunes, before.prunes);
    assert_int_equal(r->u.info.dropped, before.dropped);
    assert_int_equal(r->u.info.tokens_in, before.tokens_in);
    assert_int_equal(r->u.info.tokens_out, before.tokens_out);

    eh_forget(a, s);
    /* one token more is one token evaluated: the pending one goes in before it */
    struct generate_options one = eh_greedy(1);
    uint64_t in = stat_of(b, u)->tokens_in;
    eh_ids(a, s, prompt, 1, &one);
    eh_run_to_end(a, s);
    eh_ids(b, u, prompt, 1, &one);
    eh_run_to_end(b, u);
    assert_int_equal(stat_of(b, u)->tokens_in, in + 1);
    assert_int_equal(eh_stream(b, u)->end.u.end.tokens_in, 1);
    assert_int_equal(eh_stream(b, u)->total, 1);

    turn(a, s, 2);
    turn(b, u, 2);
    turn(a, s, 3);
    turn(b, u, 3);
    streams_equal(eh_stream(a, s), eh_stream(b, u), ask->policy);
    assert_true(eh_stream(a, s)->n_prunes > 0 || strcmp(ask->policy, "none") == 0);
    eh_close(&a);
    eh_close(&b);
}

static void its_weight_comes_back(void **state)
{
    (void)state;
    struct eh *h = daemon_open("tiny-llama.gguf");
    uint64_t s = eh_session(h, &(struct eh_ask){.budget_tokens = 100, .weight = 7, .priority = -3});
    eh_expect(h, eh_post_save(h, s, "heavy"), REP_DONE);
    eh_close_session(h, s);
    eh_expect(h, eh_post_restore(h, "heavy"), REP_OPENED);
    assert_int_equal(h->en->list[0]->weight, 7);
    assert_int_equal(h->en->weights, 7);
    assert_int_equal(h->en->list[0]->priority, -3);
    eh_close(&h);
}

static void every_policy_goes_on_in_another_daemon(void **state)
{
    (void)state;
    for (size_t i = 0; i < EH_POLICIES; i++)
        goes_on_in_another_daemon(&eh_policies[i]);
}

/* A conversation: the template's state, the frozen system message and the end token come along. */
static void a_conversation_goes_on(void **state)
{
    (void)state;
    struct eh_ask ask = {.policy = "counter_causal_fast",
                         .budget_tokens = 120,
                         .frozen = EVICT_FROZEN_AUTO,
                         .chat_template = "chatml"};
    struct generate_options o = eh_greedy(20);
    struct eh *a = daemon_open("tiny-llama.gguf"), *b = daemon_open("tiny-llama.gguf");
    uint32_t r = eh_post_open(a, &ask);
    if (eh_reply(a, r)->type == REP_ERROR) { /* this vocabulary lacks the template's tokens */
        ask.chat_template = NULL;
        r = eh_post_open(a, &ask);
    }
    uint64_t s = eh_expect(a, r, REP_OPENED)->session, t = eh_session(b, &ask);
    uint32_t x = eh_post_text(a, s, PROMPT_CHAT, "user", "abc", 3, &o);
    if (eh_reply(a, x)->type == REP_ERROR) { /* no template at all: nothing to hold here */
        eh_close(&a);
        eh_close(&b);
        skip();
    }
    eh_run_to_end(a, s);
    eh_text(b, t, PROMPT_CHAT, "abc", &o);
    eh_run_to_end(b, t);
    eh_expect(b, eh_post_save(b, t, "talk"), REP_DONE);
    eh_close(&b);
    b = daemon_open("tiny-llama.gguf");
    uint64_t u = eh_expect(b, eh_post_restore(b, "talk"), REP_OPENED)->session;
    eh_forget(a, s);
    eh_text(a, s, PROMPT_CHAT, "and then?", &o);
    eh_run_to_end(a, s);
    eh_text(b, u, PROMPT_CHAT, "and then?", &o);
    eh_run_to_end(b, u);
    streams_equal(eh_stream(a, s), eh_stream(b, u), "chat");
    assert_int_equal(eh_stream(a, s)->end.u.end.tokens_in, eh_stream(b, u)->end.u.end.tokens_in);
    eh_close(&a);
    eh_close(&b);
}

/* The model is not loaded when the file is opened: it is found by what the file says. */
static void its_model_is_loaded_for_it(void **state)
{
    (void)state;
    struct eh *b = daemon_open("tiny-qwen3.gguf");
    struct eh_ask ask = eh_policies[0];
    ask.model = TEST_VECTORS "/tiny-llama.gguf";
    uint64_t t = eh_session(b, &ask);
    turn(b, t, 0);
    eh_expect(b, eh_post_save(b, t, "other"), REP_DONE);
    turn(b, t, 1);
    struct eh *c = daemon_open("tiny-qwen3.gguf");
    uint64_t u = eh_expect(c, eh_post_restore(c, "other"), REP_OPENED)->session;
    turn(c, u, 1);
    struct eh_stream *full = eh_stream(b, t), *rest = eh_stream(c, u);
    assert_int_equal(rest->n_ids, NEW);
    assert_memory_equal(full->ids + NEW, rest->ids, NEW * sizeof *rest->ids);
    eh_close(&b);

    /* the client leaves while it loads: nothing stays */
    struct eh *d = daemon_open("tiny-qwen3.gguf");
    eh_start(d);
    eh_post_restore(d, "other");
    struct command *gone = command_new(CMD_GONE, EH_CONN, 0);
    assert_non_null(gone);
    eh_post(d, gone);
    eh_close(&d);
    eh_close(&c);
}

/* ---- refusals ---- */

static void what_cannot_be_is_refused(void **state)
{
    (void)state;
    struct eh *h = daemon_open("tiny-llama.gguf");
    uint64_t s = eh_session(h, &eh_policies[0]);
    turn(h, s, 0);
    eh_expect_error(h, eh_post_restore(h, "never"), BC_ENOTFOUND, "name");
    eh_expect_error(h, eh_post_save(h, s, ""), BC_EINVALID, "name");
    eh_expect_error(h, eh_post_save(h, s, "../../etc/passwd"), BC_EINVALID, "name");
    eh_expect_error(h, eh_post_restore(h, "a/b"), BC_EINVALID, "name");
    eh_expect_error(h, eh_post_save(h, s + 1, "x"), BC_EUNKNOWN, "session");
    eh_expect(h, eh_post_save(h, s, ".."), REP_DONE); /* a name like any other */
    eh_expect(h, eh_post_restore(h, ".."), REP_OPENED);
    eh_expect_error(h, eh_post_restore(h, ".."), BC_EBUSY, "name");

    struct command *c = eh_command(h, CMD_SAVE, s);
    c->uid = EH_UID + 1;
    snprintf(c->u.save.name, sizeof c->u.save.name, "theirs");
    eh_expect_error(h, eh_post(h, c), BC_EPERMISSION, "session");
    c = eh_command(h, CMD_RESTORE, 0);
    c->uid = EH_UID + 1; /* another user's files are not even there */
    snprintf(c->u.restore.name, sizeof c->u.restore.name, "..");
    eh_expect_error(h, eh_post(h, c), BC_ENOTFOUND, "name");

    /* in the middle of an answer */
    struct generate_options o = eh_greedy(NEW);
    eh_ids(h, s, prompt, 20, &o);
    eh_expect_error(h, eh_post_save(h, s, "x"), BC_EBUSY, "session");
    eh_run_to_end(h, s);

    /* twice at once: the first one goes through */
    uint32_t a = eh_post_save(h, s, "x"), b = eh_post_save(h, s, "x");
    eh_expect(h, a, REP_DONE);
    const struct report *r = eh_reply(h, b);
    assert_true(r->type == REP_DONE || r->u.error.code == BC_EBUSY);
    eh_close(&h);

    struct eh *none = eh_open("tiny-llama.gguf", NULL, NULL); /* no state folder */
    uint64_t t = eh_session(none, &eh_policies[0]);
    eh_expect_error(none, eh_post_save(none, t, "x"), BC_EUNSUPPORTED, "state_dir");
    eh_expect_error(none, eh_post_restore(none, "x"), BC_EUNSUPPORTED, "state_dir");
    eh_close(&none);
}

static uint8_t *file_read(const char *path, size_t *ret_n)
{
    struct stat st;
    int fd = open(path, O_RDONLY);
    assert_true(fd >= 0 && fstat(fd, &st) == 0);
    uint8_t *bytes = malloc((size_t)st.st_size + 1);
    assert_non_null(bytes);
    assert_int_equal(read(fd, bytes, (size_t)st.st_size), st.st_size);
    close(fd);
    *ret_n = (size_t)st.st_size;
    return bytes;
}

static void file_write(const char *path, const uint8_t *bytes, size_t n)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, bytes, n), n);
    close(fd);
}

/* Through the whole engine: a sample of places of the file, and every byte of its head. (That no
 * byte of any part gets by is test_spill's.) The session that lives goes on untouched. */
static void a_changed_file_is_refused(void **state)
{
    (void)state;
    char path[256];
    size_t n;
    struct eh *a = daemon_open("tiny-llama.gguf"), *h = daemon_open("tiny-llama.gguf");
    struct eh_ask ask = {.policy = "sliding_window", .budget_tokens = 40, .frozen = 4};
    uint64_t s = eh_session(a, &ask), t = eh_session(h, &ask);
    turn(a, s, 0);
    turn(h, t, 0);
    eh_expect(h, eh_post_save(h, t, "flip"), REP_DONE);
    file_of("flip", path, sizeof path);
    uint8_t *bytes = file_read(path, &n);
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    uint32_t live = h->en->n_sessions;
    for (size_t i = 0; i < n; i += i < 256 ? 1 : 997) {
        bytes[i] ^= 0x41;
        file_write(path, bytes, n);
        bytes[i] ^= 0x41;
        const struct report *r = eh_reply(h, eh_post_restore(h, "flip"));
        assert_int_equal(r->type, REP_ERROR);
        assert_true(r->u.error.code == BC_ECORRUPT || r->u.error.code == BC_EVERSION);
        assert_int_equal(h->en->n_sessions, live);
        eh_run(h);
        assert_null(h->en->tier.transfers);
    }
    for (size_t cut = 0; cut < n; cut += 1 + n / 13) {
        file_write(path, bytes, cut);
        eh_expect_error(h, eh_post_restore(h, "flip"), BC_ECORRUPT, "state");
    }
    turn(a, s, 1);
    turn(h, t, 1);
    streams_equal(eh_stream(a, s), eh_stream(h, t), "live");
    file_write(path, bytes, n);
    eh_expect(h, eh_post_restore(h, "flip"), REP_OPENED);
    free(bytes);
    eh_close(&a);
    eh_close(&h);
}

static void another_model_is_refused(void **state)
{
    (void)state;
    char path[256], copy[128];
    size_t n;
    struct eh *h = daemon_open("tiny-llama.gguf");
    uint64_t s = eh_session(h, &eh_policies[0]);
    turn(h, s, 0);
    snprintf(copy, sizeof copy, "%s/model.gguf", dir);
    uint8_t *model = file_read(TEST_VECTORS "/tiny-llama-rope3.gguf", &n);
    file_write(copy, model, n);
    free(model);
    struct eh_ask ask = eh_policies[0];
    ask.model = copy;
    uint64_t t = eh_session(h, &ask);
    turn(h, t, 0);
    eh_expect(h, eh_post_save(h, t, "swap"), REP_DONE);
    eh_close(&h);
    /* other weights under the same name, of the same shape */
    model = file_read(TEST_VECTORS "/tiny-llama.gguf", &n);
    file_write(copy, model, n);
    free(model);
    h = daemon_open("tiny-llama.gguf");
    eh_expect_error(h, eh_post_restore(h, "swap"), BC_ESTATE, "model");
    assert_int_equal(h->en->n_sessions, 0);
    eh_close(&h);
    assert_int_equal(unlink(copy), 0);
    h = daemon_open("tiny-llama.gguf");
    eh_expect_error(h, eh_post_restore(h, "swap"), BC_ENOTFOUND, "model");
    eh_close(&h);
    file_of("swap", path, sizeof path);
    assert_int_equal(access(path, F_OK), 0); /* a refusal takes nothing away */
}

/* Activations of other sizes give other numbers: the cache is taken, and marked as foreign, as another processor's is. */
static void other_activations_are_another_arithmetic(void **state)
{
    (void)state;
    uint32_t bits[] = {8, 16, 8};
    uint64_t id[3];
    struct eh *h = eh_open("tiny-llama.gguf", tweak, &bits[0]);
    id[0] = models_arithmetic(h->en->default_model);
    uint64_t s = eh_session(h, &eh_policies[0]);
    turn(h, s, 0);
    uint64_t out = stat_of(h, s)->tokens_out;
    eh_expect(h, eh_post_save(h, s, "bits"), REP_DONE);
    eh_close(&h);
    for (int k = 1; k < 3; k++) {
        h = eh_open("tiny-llama.gguf", tweak, &bits[k]);
        id[k] = models_arithmetic(h->en->default_model);
        s = eh_expect(h, eh_post_restore(h, "bits"), REP_OPENED)->session;
        assert_int_equal(h->en->n_sessions, 1);
        assert_int_equal(h->en->list[0]->foreign, id[k] != id[0]);
        turn(h, s, 3);
        assert_int_equal(stat_of(h, s)->tokens_out, out + NEW);
        eh_close(&h);
    }
    assert_true(id[1] != id[0]);
    assert_true(id[2] == id[0]);
}

/* ---- a disk that fails ---- */

/* Every call that changes the disk fails once, and each time the caller hears of it; what was saved
 * before stays whole. A short write is no failure: the rest follows. */
static void a_failed_save_is_an_error_and_the_old_file_stays(void **state)
{
    (void)state;
    char path[256], temporary[300];
    struct faulty_disk disk;
    faulty_make(&disk);
    use_io = &disk.io;
    struct eh *h = daemon_open("tiny-llama.gguf");
    use_io = NULL;
    uint64_t s = eh_session(h, &eh_policies[0]);
    turn(h, s, 0);
    eh_expect(h, eh_post_save(h, s, "fail"), REP_DONE);
    uint32_t tokens = stat_of(h, s)->tokens;
    turn(h, s, 1);
    file_of("fail", path, sizeof path);
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    size_t n, m;
    uint8_t *old = file_read(path, &n);
    unsigned failures = 0;
    for (long at = 0;; at++) {
        faulty_arm(&disk, at, 1, EIO);
        const struct report *r = eh_reply(h, eh_post_save(h, s, "fail"));
        if (r->type == REP_DONE)
            break;
        failures++;
        assert_int_equal(r->u.error.code, BC_EIO);
        eh_run(h);
        assert_int_equal(access(temporary, F_OK), -1);
        uint8_t *now = file_read(path, &m);
        bool folder = at == 5; /* the rename is done, only its safety is not known */
        if (!folder) {
            assert_int_equal(m, n);
            assert_memory_equal(now, old, n);
        }
        free(now);
    }
    assert_true(failures >= 5);      /* open, block, head, sync, rename, folder */
    faulty_arm(&disk, 1, 2, ENOSPC); /* half of a block, and there is no room */
    eh_expect_error(h, eh_post_save(h, s, "fail"), BC_EIO, "state_dir");
    faulty_arm(&disk, 0, 1000, 0); /* all writes are short, and go on */
    eh_expect(h, eh_post_save(h, s, "fail"), REP_DONE);
    assert_true(disk.failed > failures + 4);
    faulty_arm(&disk, 0, 0, 0);
    uint64_t u = eh_expect(h, eh_post_restore(h, "fail"), REP_OPENED)->session;
    assert_int_equal(stat_of(h, u)->tokens, stat_of(h, s)->tokens);
    assert_true(tokens > 0);
    free(old);
    eh_close(&h);
}

/* A cache that is away is fetched, saved, and the session goes on; one that closes meanwhile too. */
static void what_is_away_can_be_saved(void **state)
{
    (void)state;
    spill_after = 1;
    struct eh *a = daemon_open("tiny-llama.gguf"), *h = daemon_open("tiny-llama.gguf");
    spill_after = 0;
    uint64_t s = eh_session(a, &eh_policies[3]), t = eh_session(h, &eh_policies[3]);
    turn(a, s, 0);
    turn(h, t, 0);
    eh_pass(h, 100);
    eh_run(h);
    assert_string_equal(stat_of(h, t)->state, "spilled");
    eh_expect(h, eh_post_save(h, t, "away"), REP_DONE);
    turn(a, s, 1);
    turn(h, t, 1);
    streams_equal(eh_stream(a, s), eh_stream(h, t), "saved while away");
    for (int steps = 0; steps < 8; steps++) { /* closed at any moment: answered, and no temporary */
        uint64_t v = eh_session(h, &eh_policies[0]);
        turn(h, v, 0);
        uint32_t r = eh_post_save(h, v, "closing");
        for (int i = 0; i < steps; i++)
            eh_step(h);
        eh_close_session(h, v);
        const struct report *answer = eh_reply(h, r);
        assert_true(answer->type == REP_DONE || answer->u.error.code == BC_ECANCELLED);
    }
    eh_close(&a);
    eh_close(&h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_policy_goes_on_in_another_daemon),
        cmocka_unit_test(its_weight_comes_back),
        cmocka_unit_test(a_conversation_goes_on),
        cmocka_unit_test(its_model_is_loaded_for_it),
        cmocka_unit_test(what_cannot_be_is_refused),
        cmocka_unit_test(a_changed_file_is_refused),
        cmocka_unit_test(another_model_is_refused),
        cmocka_unit_test(other_activations_are_another_arithmetic),
        cmocka_unit_test(a_failed_save_is_an_error_and_the_old_file_stays),
        cmocka_unit_test(what_is_away_can_be_saved),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
