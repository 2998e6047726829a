/* The ledger as a client sees it: by request and on the stats page, sums that agree, and a daemon
 * that is as big after a crowd has left as it was before. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "backcast.h"
#include "daemon_harness.h"

static uint64_t line(const struct backcast_stats *st, const char *name)
{
    for (size_t i = 0; i < st->n_ledger; i++)
        if (strcmp(st->ledger[i].name, name) == 0)
            return st->ledger[i].bytes;
    fail_msg("the ledger has no line %s", name);
    return 0;
}

static void sums_are_right(const struct backcast_stats *st)
{
    uint64_t sum = 0, held = 0, other = 0;
    for (size_t i = 0; i < st->n_ledger; i++)
        sum += st->ledger[i].bytes;
    assert_int_equal(sum, st->bytes_booked);
    for (size_t i = 0; i < st->n_sessions; i++) {
        held += st->sessions[i].bytes_held - st->sessions[i].bytes_shared;
        other += st->sessions[i].bytes_other;
    }
    assert_int_equal(held, line(st, "kv"));
    assert_true(line(st, "state") + line(st, "refresh") + line(st, "prompts") + line(st, "host") +
                    line(st, "journal") >=
                other);
    assert_int_equal(line(st, "kv") + line(st, "shared"), st->kv_held);
    assert_true(line(st, "weights") > 0 && line(st, "text") > 0 && line(st, "border") > 0);
    assert_true(st->n_sessions == 0 || line(st, "rings") > 0);
    assert_true(st->bytes_resident > line(st, "weights") + line(st, "kv"));
}

static backcast_session *filled(backcast *c, uint32_t budget, size_t n)
{
    struct backcast_session_options so;
    struct backcast_generate_options go;
    struct backcast_event ev;
    backcast_session *s = NULL;
    int32_t ids[400];
    backcast_session_options_init(&so);
    backcast_generate_options_init(&go);
    so.budget_tokens = budget;
    so.frozen_tokens = 0;
    go.max_tokens = 30;
    go.ignore_end = 1;
    for (size_t i = 0; i < n; i++)
        ids[i] = (int32_t)(3 + i * 37 % 280);
    if (backcast_session_open(c, &so, &s) < 0 || backcast_prompt_ids(s, ids, n, &go) < 0)
        fail_msg("%s", backcast_last_error(c));
    do
        assert_int_equal(backcast_next(c, &ev, 30000), 1);
    while (ev.type != BACKCAST_END);
    assert_string_equal(ev.end.reason, "length");
    return s;
}

struct page_wait {
    backcast *c;
    struct backcast_stats st;
    size_t sessions;
};

/* The page follows within a second or so. */
static bool page_has_them(void *arg)
{
    struct page_wait *w = arg;
    return backcast_stats_page(w->c, &w->st) == 0 && w->st.n_sessions == w->sessions &&
           w->st.sessions[0].tokens > 0 && strcmp(w->st.sessions[0].state, "idle") == 0 &&
           strcmp(w->st.sessions[w->sessions - 1].state, "idle") == 0;
}

static void request_and_page_tell_the_same(void **state)
{
    (void)state;
    struct dh *d = dh_start("tiny-llama.gguf", NULL);
    backcast *c = dh_connect(d);
    struct backcast_stats st;
    filled(c, 100, 300);
    filled(c, 500, 400);
    assert_int_equal(backcast_stats(c, &st), 0);
    assert_int_equal(st.n_sessions, 2);
    sums_are_right(&st);
    uint64_t kv = line(&st, "kv"), weights = line(&st, "weights"), text = line(&st, "text");
    size_t n = st.n_ledger;
    struct page_wait w = {.c = c, .sessions = 2};
    assert_int_equal(dh_until(page_has_them, &w, DH_PATIENCE_MS), 1);
    sums_are_right(&w.st);
    assert_int_equal(w.st.n_ledger, n);
    assert_int_equal(line(&w.st, "kv"), kv);
    assert_int_equal(line(&w.st, "weights"), weights);
    assert_int_equal(line(&w.st, "text"), text);
    assert_int_equal(w.st.sessions[0].bytes_shared, 0);
    assert_true(w.st.sessions[0].bytes_other > 0);
    backcast_disconnect(&c);
    dh_stop(&d);
}

static uint64_t booked(backcast *c, uint64_t *ret_kv)
{
    struct backcast_stats st;
    assert_int_equal(backcast_stats(c, &st), 0);
    sums_are_right(&st);
    *ret_kv = st.kv_held;
    return st.bytes_booked;
}

static void a_crowd_leaves_nothing_behind(void **state)
{
    (void)state;
    struct dh *d = dh_start("tiny-llama.gguf", NULL);
    uint64_t before = 0, kv = 0;
    backcast *watch = dh_connect(d);
    for (int round = 0; round < 6; round++) {
        backcast *c = dh_connect(d);
        for (int i = 0; i < 6; i++)
            filled(c, 64 + 64 * (uint32_t)i, 150 + 40 * (size_t)i);
        (void)booked(watch, &kv);
        assert_true(kv > 0);
        backcast_disconnect(&c);
        uint64_t now = 0;
        for (int tries = 0; tries < 500; tries++, usleep(10000)) {
            now = booked(watch, &kv);
            if (kv == 0 && (before == 0 || now == before))
                break;
        }
        assert_int_equal(kv, 0);
        if (round == 0)
            before = now; /* pools and pages that stay are there now */
        assert_int_equal(now, before);
    }
    backcast_disconnect(&watch);
    dh_stop(&d); /* the daemon asserts on its way out that every charge is back */
}

/* ---- SIGHUP */

struct held_wait {
    backcast *c;
    uint64_t at_most;
    struct backcast_stats st;
};

static bool held_at_most(void *arg)
{
    struct held_wait *w = arg;
    return backcast_stats(w->c, &w->st) == 0 && w->st.kv_held <= w->at_most;
}

/* ---- two models, one memory */

#define PAIRS 4

/* Reads until none of the n talks; how many prunes for others' sake. */
static uint32_t read_all(backcast *c, uint32_t talking)
{
    struct backcast_event ev;
    uint32_t pressure = 0;
    while (talking > 0) {
        assert_int_equal(backcast_next(c, &ev, DH_PATIENCE_MS), 1);
        pressure += ev.type == BACKCAST_PRUNED && strcmp(ev.pruned.reason, "pressure") == 0;
        if (ev.type != BACKCAST_END)
            continue;
        assert_string_not_equal(ev.end.reason, "error");
        talking--;
    }
    return pressure;
}

static void talk(backcast_session *s, uint32_t most)
{
    struct backcast_generate_options go;
    int32_t ids[200];
    backcast_generate_options_init(&go);
    go.max_tokens = most;
    go.ignore_end = 1;
    for (int i = 0; i < 200; i++)
        ids[i] = 3 + i * 37 % 280;
    assert_int_equal(backcast_prompt_ids(s, ids, 200, &go), 0);
}

static bool sleeps(void *arg)
{
    struct page_wait *w = arg;
    assert_int_equal(backcast_stats(w->c, &w->st), 0);
    return w->st.bytes_weights == w->sessions;
}

/* Sessions of both are pruned for each other's sake; then those of one go, and its weights, while the other's decode. */
static void two_models_share_one_memory(void **state)
{
    (void)state;
    const char *args[] = {"--kv-memory=1536KiB", "--keep-alive=1", "--host-tier=0", "--threads=1",
                          NULL};
    struct dh *d = dh_start_long(args);
    backcast *c = dh_connect(d), *tool = dh_connect(d);
    backcast_session *s[2 * PAIRS] = {0};
    struct backcast_session_options so;
    struct backcast_stats st;
    struct backcast_event ev;

    assert_int_equal(backcast_stats(tool, &st), 0);
    struct page_wait w = {.c = tool, .sessions = st.bytes_weights}; /* of the first alone */
    backcast_session_options_init(&so);
    so.budget_tokens = 400;
    for (int i = 0; i < 2 * PAIRS; i++) {
        so.model = i % 2 == 0 ? NULL : TEST_VECTORS "/tiny-qwen2.gguf";
        assert_int_equal(backcast_session_open(c, &so, &s[i]), 0);
        talk(s[i], 300);
    }
    assert_true(read_all(c, 2 * PAIRS) > 0);
    assert_int_equal(backcast_stats(tool, &st), 0);
    sums_are_right(&st);
    assert_true(st.kv_held <= st.kv_memory && st.bytes_weights > w.sessions);
    for (int i = 0; i < 2 * PAIRS; i += 2)
        talk(s[i], 1000000);
    for (int i = 1; i < 2 * PAIRS; i += 2)
        backcast_session_close(&s[i]);
    assert_true(dh_until(sleeps, &w, DH_PATIENCE_MS));
    assert_int_equal(w.st.n_sessions, PAIRS);
    for (int n = 0; n < 50; n += ev.type == BACKCAST_TEXT) /* as if nothing had been */
        assert_int_equal(backcast_next(c, &ev, DH_PATIENCE_MS), 1);
    for (int i = 0; i < 2 * PAIRS; i += 2)
        assert_int_equal(backcast_cancel(s[i]), 0);
    read_all(c, PAIRS);
    assert_int_equal(backcast_stats(tool, &st), 0);
    sums_are_right(&st);
    for (int i = 0; i < 2 * PAIRS; i += 2)
        backcast_session_close(&s[i]);
    assert_int_equal(backcast_stats(tool, &st), 0);
    assert_int_equal(st.n_sessions, 0);
    assert_int_equal(line(&st, "kv"), 0);
    assert_int_equal(line(&st, "shared"), st.kv_held);
    backcast_disconnect(&c);
    backcast_disconnect(&tool);
    dh_stop(&d);
}

static void conf_write(int fd, const char *text)
{
    assert_int_equal(ftruncate(fd, 0), 0);
    assert_int_equal(pwrite(fd, text, strlen(text), 0), (ssize_t)strlen(text));
}

static void a_users_share_shrinks_on_sighup_and_prunes_at_once(void **state)
{
    (void)state;
    char conf[] = "/tmp/backcast-conf-XXXXXX", arg[64];
    int fd = mkstemp(conf);
    assert_true(fd >= 0);
    conf_write(fd, "[memory]\nuid_share = 50%\n");
    snprintf(arg, sizeof arg, "--config=%s", conf);
    const char *const args[] = {arg, "--host-tier=0", NULL}; /* they cannot leave */
    struct dh *d = dh_start("tiny-llama.gguf", args);
    backcast *c = dh_connect(d);
    filled(c, 500, 400);
    filled(c, 500, 300);
    struct held_wait w = {.c = c, .at_most = UINT64_MAX};
    assert_true(held_at_most(&w));
    uint64_t before = w.st.kv_held;
    assert_true(before > 400000 && w.st.sessions[0].prunes + w.st.sessions[1].prunes == 0);
    conf_write(fd, "[memory]\nuid_share = 300000\n");
    assert_int_equal(kill(d->pid, SIGHUP), 0);
    w.at_most = 300000;
    assert_int_equal(dh_until(held_at_most, &w, DH_PATIENCE_MS), 1);
    sums_are_right(&w.st);
    assert_true(w.st.sessions[0].prunes + w.st.sessions[1].prunes > 0);
    assert_true(w.st.sessions[0].bytes_guaranteed <= 150000);
    backcast_disconnect(&c);
    dh_stop(&d);
    close(fd);
    unlink(conf);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(request_and_page_tell_the_same),
        cmocka_unit_test(a_crowd_leaves_nothing_behind),
        cmocka_unit_test(two_models_share_one_memory),
        cmocka_unit_test(a_users_share_shrinks_on_sighup_and_prunes_at_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
