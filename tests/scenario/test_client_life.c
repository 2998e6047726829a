/* test_client_life.c: sessions of libbackcast over their life with a real daemon: cancelled, abandoned,
 * attached to again, given other budgets, refused; and what the listings say meanwhile. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <math.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>
#include "answer.h"
#include "daemon_harness.h"

static struct dh *d;

static int start(void **state)
{
    const char *args[] = {"--threads=1", NULL};
    *state = d = dh_start_long(args);
    return 0;
}

static struct backcast_stats stats(backcast *c)
{
    struct backcast_stats st;
    if (backcast_stats(c, &st) != 0)
        fail_msg("stats: %s", backcast_last_error(c));
    return st;
}

static bool nothing_is_held(void *arg)
{
    struct backcast_stats st = stats(arg);
    return st.n_sessions == 0 && st.kv_held == 0;
}

static void cancel_ends_at_once_in_prefill_and_decode(void **state)
{
    (void)state;
    backcast *c = dh_connect(d);
    backcast_session *s = NULL;
    struct backcast_event ev;
    struct backcast_generate_options go = answer_options(1000000);
    char *text = answer_prompt(600000, 3);
    struct answer a = {0}, b = {0};

    assert_int_equal(backcast_session_open(c, NULL, &s), 0);
    assert_int_equal(backcast_prompt(s, "oak", 3, &go), 0);
    for (int n = 0; n < 50;) {
        assert_int_equal(backcast_next(c, &ev, 30000), 1);
        n += ev.type == BACKCAST_TEXT;
        answer_event(&a, &ev);
    }
    assert_int_equal(backcast_cancel(s), 0);
    answer_read(c, s, &a);
    assert_string_equal(a.reason, "cancelled");
    assert_true(a.n_ids >= 50 && a.n_ids < 100000);
    assert_int_equal(backcast_prompt(s, text, 600000, &go), 0);
    while (b.progress == 0) {
        assert_int_equal(backcast_next(c, &ev, 30000), 1);
        answer_event(&b, &ev);
    }
    uint32_t total = ev.progress.total;
    assert_int_equal(backcast_cancel(s), 0);
    answer_read(c, s, &b);
    assert_string_equal(b.reason, "cancelled");
    assert_int_equal(b.n_ids, 0);
    assert_true(total > 100000 && b.tokens_in < total); /* not to its end */
    answer_free(&a);
    answer_free(&b);
    go.max_tokens = 5; /* and the session goes on */
    assert_int_equal(backcast_prompt(s, "mill", 4, &go), 0);
    answer_read(c, s, &a);
    assert_string_equal(a.reason, "length");
    answer_free(&a);
    free(text);
    backcast_disconnect(&c);
}

/* ---- a client that is no more */

static _Noreturn void client_that_will_be_killed(int ready)
{
    backcast *c = NULL;
    backcast_session *s[3];
    struct backcast_generate_options go = answer_options(1000000);
    struct backcast_event ev;
    bool told = false;

    if (backcast_connect(&c, d->socket) != 0)
        _exit(1);
    for (int i = 0; i < 3; i++)
        if (backcast_session_open(c, NULL, &s[i]) != 0 || backcast_prompt(s[i], "oak", 3, &go) != 0)
            _exit(2);
    while (backcast_next(c, &ev, -1) >= 0)
        if (ev.type == BACKCAST_TEXT && !told)
            told = write(ready, "x", 1) == 1;
    _exit(3);
}

static void killed_client_leaves_nothing(void **state)
{
    (void)state;
    backcast *c = dh_connect(d);
    unsigned fds = dh_fds(d);

    for (int i = 0; i < 5; i++) {
        int ready[2];
        char byte;
        assert_int_equal(pipe(ready), 0);
        pid_t pid = fork();
        if (pid == 0)
            client_that_will_be_killed(ready[1]);
        close(ready[1]);
        assert_int_equal(read(ready[0], &byte, 1), 1);
        close(ready[0]);
        assert_int_equal(stats(c).n_sessions, 3);
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        assert_true(dh_until(nothing_is_held, c, DH_PATIENCE_MS));
    }
    assert_true(dh_fds(d) <= fds);
    assert_int_equal(stats(c).n_connections, 1);
    backcast_disconnect(&c);
}

/* ---- sessions that somebody else closes */

#define SHARED 6 /* of the owner, every third with a name */

struct told {
    int32_t index, code;
}; /* an END of the owner's */

/* Asks for endless answers, says which sessions those are, and tells every END. reads false: not before a byte comes. */
static _Noreturn void owner_of_many(int to, bool reads)
{
    backcast *c = NULL;
    backcast_session *s[SHARED];
    struct backcast_session_options so = answer_budget("counter_causal_fast", 96);
    struct backcast_generate_options go = answer_options(1000000);
    struct backcast_event ev;
    char name[16], byte;

    if (backcast_connect(&c, d->socket) != 0)
        _exit(1);
    for (int i = 0; i < SHARED; i++) {
        snprintf(name, sizeof name, "shared%d", i);
        so.name = i % 3 == 2 ? name : NULL;
        if (backcast_session_open(c, &so, &s[i]) != 0 || backcast_prompt(s[i], "oak", 3, &go) != 0)
            _exit(2);
        uint64_t id = backcast_session_id(s[i]);
        if (write(to, &id, sizeof id) != sizeof id)
            _exit(3);
    }
    if (!reads && read(to, &byte, 1) != 1)
        _exit(4);
    while (backcast_next(c, &ev, -1) >= 0) {
        struct told t = {.code = ev.end.code};
        if (ev.type != BACKCAST_END)
            continue;
        while (s[t.index] != ev.session)
            t.index++;
        if (t.index % 2 == 0) /* or it stays, dead, among those that live */
            backcast_session_close(&s[t.index]);
        if (write(to, &t, sizeof t) != sizeof t)
            _exit(5);
    }
    _exit(6);
}

static bool all_talk(void *arg)
{
    struct backcast_stats st = stats(arg);
    size_t n = 0;
    for (size_t i = 0; i < st.n_sessions; i++)
        n += st.sessions[i].tokens_out > 1;
    return n == SHARED;
}

/* Its owner decodes and sleeps on the bells of all; or has read nothing yet, and gets first what was said. Whoever is closed ends, the
 * others do not notice; then the owner dies in its sleep. */
static void closed_by_another_under_its_answer(void **state)
{
    (void)state;
    backcast *tool = dh_connect(d);
    unsigned fds = dh_fds(d);

    for (int round = 0; round < 8; round++) {
        bool reads = round % 4 != 3;
        uint64_t id[SHARED];
        int pair[2];
        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
        pid_t pid = fork();
        if (pid == 0)
            owner_of_many(pair[1], reads);
        close(pair[1]);
        for (int i = 0; i < SHARED; i++)
            assert_int_equal(read(pair[0], &id[i], sizeof id[i]), sizeof id[i]);
        assert_true(dh_until(all_talk, tool, DH_PATIENCE_MS));
        for (int k = 0; k < SHARED / 2; k++) {
            int i = (round + 2 * k) % SHARED;
            struct told t;
            usleep((useconds_t)(round * 7919 + k * 104729) % 3000);
            assert_int_equal(backcast_close_by_id(tool, id[i]), 0);
            assert_int_equal(backcast_close_by_id(tool, id[i]), BACKCAST_EUNKNOWN);
            if (!reads && k == 0)
                assert_int_equal(write(pair[0], "x", 1), 1);
            assert_int_equal(read(pair[0], &t, sizeof t), sizeof t);
            assert_int_equal(t.index, i);
            if (reads || t.code != BACKCAST_ECLOSED) /* a full ring has no room for the last word */
                assert_int_equal(t.code, 0);
        }
        assert_int_equal(stats(tool).n_sessions, SHARED - SHARED / 2);
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        close(pair[0]);
        for (int i = 2; i < SHARED; i += 3) /* those with a name stay */
            if (backcast_close_by_id(tool, id[i]) != 0)
                assert_true((i + round) % 2 == 0); /* closed above */
        assert_true(dh_until(nothing_is_held, tool, DH_PATIENCE_MS));
    }
    assert_true(dh_fds(d) <= fds);
    assert_int_equal(stats(tool).n_connections, 1);
    backcast_disconnect(&tool);
}

/* Far more records than one turn of the loop moves wait behind the pass that it is closed in: they come, and so does the END. */
static void what_was_said_before_a_close_comes(void **state)
{
    (void)state;
    backcast *c = dh_connect(d), *tool = dh_connect(d);
    struct backcast_generate_options go = answer_options(1000000);
    int32_t ids[250];
    go.prompt_logprobs = 1;

    for (int round = 0; round < 20; round++) {
        backcast_session *s = NULL;
        struct answer a = {0};
        for (int i = 0; i < 250; i++)
            ids[i] = 3 + (round + i * 7) % 280;
        assert_int_equal(backcast_session_open(c, NULL, &s), 0);
        assert_int_equal(backcast_prompt_ids(s, ids, 250, &go), 0);
        usleep((useconds_t)round * 400);
        assert_int_equal(backcast_close_by_id(tool, backcast_session_id(s)), 0);
        answer_read(c, s, &a);
        assert_string_equal(a.reason, "cancelled");
        assert_int_equal(a.code, 0);
        assert_int_equal(a.prompt_logprobs, a.tokens_in < 250 ? a.tokens_in : 249);
        answer_free(&a);
        backcast_session_close(&s);
    }
    assert_true(dh_until(nothing_is_held, tool, DH_PATIENCE_MS));
    backcast_disconnect(&c);
    backcast_disconnect(&tool);
}

/* ---- named sessions */

static void named_session_outlives_its_client(void **state)
{
    (void)state;
    backcast *a = dh_connect(d), *b = dh_connect(d);
    backcast_session *s = NULL, *t = NULL;
    struct backcast_session_options so = answer_budget("counter_causal_fast", 96);
    struct backcast_generate_options go = answer_options(50);
    struct backcast_session_info info;
    struct backcast_event ev = {0};
    struct answer first = {0}, again = {0}, second = {0}, whole = {0};

    assert_int_equal(backcast_session_open(a, &so, &s), 0); /* the truth: one client, unnamed */
    assert_int_equal(backcast_prompt(s, "the tide", 8, &go), 0);
    answer_read(a, s, &first);
    assert_int_equal(backcast_prompt(s, " and the mill", 13, &go), 0);
    answer_read(a, s, &whole);
    backcast_session_close(&s);
    answer_free(&first);

    so.name = "work";
    assert_int_equal(backcast_session_open(a, &so, &s), 0);
    assert_int_equal(backcast_session_attach(b, "work", &t), BACKCAST_EBUSY);
    assert_int_equal(backcast_session_open(b, &so, &t), BACKCAST_EBUSY); /* the name is taken */
    assert_int_equal(backcast_prompt(s, "the tide", 8, &go), 0);
    answer_read(a, s, &first);
    backcast_disconnect(&a);
    while (backcast_session_attach(b, "work", &t) == BACKCAST_EBUSY)
        ; /* until the daemon has seen that the other one is gone */
    assert_non_null(t);
    assert_int_equal(backcast_session_info(t, &info), 0);
    assert_true(info.replay_seq > 0);
    while (ev.seq < info.replay_seq) { /* what was said before comes again */
        assert_int_equal(backcast_next(b, &ev, 5000), 1);
        answer_event(&again, &ev);
    }
    assert_true(answer_equal(&first, &again));
    assert_int_equal(backcast_prompt(t, " and the mill", 13, &go), 0);
    answer_read(b, t, &second);
    assert_true(answer_equal(&whole, &second));
    assert_true(second.prunes > 0);
    backcast_session_close(&t);
    assert_true(dh_until(nothing_is_held, b, DH_PATIENCE_MS));
    assert_int_equal(backcast_session_attach(b, "work", &t), BACKCAST_EUNKNOWN);
    backcast_disconnect(&b);
    answer_free(&first);
    answer_free(&again);
    answer_free(&second);
    answer_free(&whole);
}

/* Cuts the control socket of this process's connection to the daemon. */
static void cut_connections(void)
{
    for (int fd = 3; fd < 256; fd++) {
        struct sockaddr_un a = {0};
        socklen_t len = sizeof(a);
        if (getpeername(fd, (struct sockaddr *)&a, &len) == 0 && a.sun_family == AF_UNIX &&
            strcmp(a.sun_path, d->socket) == 0)
            shutdown(fd, SHUT_RDWR);
    }
}

static void reconnect_takes_up_the_stream(void **state)
{
    (void)state;
    backcast *c = dh_connect(d);
    backcast_session *named = NULL, *plain = NULL;
    struct backcast_session_options so = answer_budget("counter_causal_fast", 96);
    struct backcast_generate_options go = answer_options(1000000);
    struct backcast_event ev;
    struct answer a = {0};
    int rc;

    assert_int_equal(backcast_session_open(c, &so, &plain), 0);
    so.name = "cut";
    assert_int_equal(backcast_session_open(c, &so, &named), 0);
    assert_int_equal(backcast_prompt(named, "oak", 3, &go), 0);
    while (a.n_ids < 20) {
        assert_int_equal(backcast_next(c, &ev, 30000), 1);
        answer_event(&a, &ev);
    }
    cut_connections();
    while ((rc = backcast_next(c, &ev, 30000)) == 1)
        answer_event(&a, &ev);
    assert_int_equal(rc, BACKCAST_ECLOSED);
    assert_int_equal(backcast_prompt(plain, "x", 1, &go), BACKCAST_ECLOSED);
    assert_int_equal(backcast_reconnect(c), 1);
    answer_read(c, named,
                &a); /* every token since, without a gap, and the END of the cancelled one */
    assert_string_equal(a.reason, "cancelled");
    assert_int_equal(backcast_prompt(plain, "x", 1, &go), BACKCAST_ECLOSED);
    answer_free(&a);
    go.max_tokens = 4;
    assert_int_equal(backcast_prompt(named, "mill", 4, &go), 0);
    answer_read(c, named, &a);
    assert_int_equal(a.n_ids, 4);
    answer_free(&a);
    backcast_session_close(&plain);
    backcast_session_close(&named);
    assert_true(dh_until(nothing_is_held, c, DH_PATIENCE_MS));
    backcast_disconnect(&c);
}

/* The daemon ends under an answer; another one takes its place. */
static void restarted_daemon_is_a_new_one(void **state)
{
    (void)state;
    const char *args[] = {"--threads=1", NULL};
    struct dh *first = dh_start_long(args), *next = NULL;
    char path[96];
    backcast *c = NULL;
    backcast_session *s = NULL, *t = NULL;
    struct backcast_session_options so = answer_budget("counter_causal_fast", 64);
    struct backcast_generate_options go = answer_options(1000000);
    struct backcast_event ev;
    struct answer a = {0};
    int rc;

    snprintf(path, sizeof(path), "/tmp/backcast-link-%d.sock", (int)getpid());
    assert_int_equal(symlink(first->socket, path), 0);
    assert_int_equal(backcast_connect(&c, path), 0);
    so.name = "work";
    assert_int_equal(backcast_session_open(c, &so, &s), 0);
    assert_int_equal(backcast_prompt(s, "oak", 3, &go), 0);
    while (a.n_ids < 10) {
        assert_int_equal(backcast_next(c, &ev, 30000), 1);
        answer_event(&a, &ev);
    }
    kill(first->pid, SIGTERM);
    while ((rc = backcast_next(c, &ev, 30000)) == 1)
        answer_event(&a, &ev);
    assert_int_equal(rc, BACKCAST_ECLOSED);
    assert_true(a.ended); /* told to ask again, before the connection went */
    assert_string_equal(a.reason, "retry");
    assert_int_equal(dh_wait(first, DH_PATIENCE_MS), 0);
    assert_int_equal(backcast_reconnect(c), BACKCAST_ENOTFOUND);
    next = dh_start_long(args);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(symlink(next->socket, path), 0);
    assert_int_equal(backcast_reconnect(c), 0);
    rc = backcast_prompt(s, "oak", 3, &go); /* it does not say whether it has such a number */
    assert_true(rc == BACKCAST_EUNKNOWN || rc == BACKCAST_EPERMISSION);
    assert_true(strlen(backcast_last_error(c)) > 10);
    so.name = NULL;
    assert_int_equal(backcast_session_open(c, &so, &t), 0);
    answer_free(&a);
    backcast_disconnect(&c);
    unlink(path);
    dh_free(&first);
    dh_stop(&next);
}

/* What neither options nor program say, the daemon's configuration says. */
static void defaults_are_the_daemons(void **state)
{
    (void)state;
    const char *args[] = {"--threads=1",   "--policy=sliding_window",
                          "--budget=100t", "--max-tokens=7",
                          "--recent=20",   NULL};
    struct dh *other = dh_start("tiny-llama.gguf", args);
    backcast *c = NULL;
    backcast_session *s = NULL;
    struct backcast_session_options so;
    struct backcast_generate_options go;
    struct backcast_session_info info;
    struct answer a = {0};

    backcast_session_options_init(&so);
    backcast_generate_options_init(&go);
    go.ignore_end = 1;
    assert_int_equal(backcast_connect(&c, other->socket), 0);
    assert_int_equal(backcast_session_open(c, &so, &s), 0);
    assert_int_equal(backcast_session_info(s, &info), 0);
    assert_string_equal(info.policy, "sliding_window");
    assert_int_equal(info.budget_tokens, 100);
    assert_int_equal(info.recent_tokens, 20);
    assert_int_equal(backcast_prompt(s, "oak", 3, &go), 0);
    answer_read(c, s, &a);
    assert_int_equal(a.n_ids, 7);
    answer_free(&a);
    backcast_session_close(&s);
    so.policy = "tova";
    so.recent_tokens = 5;
    assert_int_equal(backcast_session_open(c, &so, &s), 0);
    assert_int_equal(backcast_session_info(s, &info), 0);
    assert_string_equal(info.policy, "tova");
    assert_int_equal(info.recent_tokens, 5);
    backcast_disconnect(&c);
    dh_stop(&other);
}

/* ---- memory */

static void budgets_prunes_and_scores_of_a_live_session(void **state)
{
    (void)state;
    backcast *c = dh_connect(d), *tool = dh_connect(d);
    backcast_session *s = NULL;
    struct backcast_session_options so = answer_budget("counter_causal_fast", 256);
    struct backcast_generate_options go = answer_options(1);
    struct backcast_session_info info;
    struct backcast_score *own = NULL, *other = NULL;
    struct answer a = {0};
    struct backcast_event ev = {0};
    char *text = answer_prompt(900, 5);
    size_t n_own = 0, n_other = 0;

    assert_int_equal(backcast_session_open(c, &so, &s), 0);
    assert_int_equal(backcast_prompt(s, text, 900, &go), 0);
    answer_read(c, s, &a);
    assert_int_equal(a.prunes > 0, a.tokens_in > 256);
    uint64_t id = backcast_session_id(s);
    assert_int_equal(backcast_budget_by_id(tool, id, 0, 100, 0), 0); /* from outside */
    while (ev.type != BACKCAST_PRUNED)
        assert_int_equal(backcast_next(c, &ev, 5000), 1);
    assert_string_equal(ev.pruned.reason, "shrunk");
    assert_true(ev.pruned.tokens_after <= 100);
    assert_int_equal(backcast_session_prune(s, 50), 0);
    do
        assert_int_equal(backcast_next(c, &ev, 5000), 1);
    while (ev.type != BACKCAST_PRUNED);
    assert_string_equal(ev.pruned.reason, "asked");
    assert_int_equal(ev.pruned.tokens_after, 50);
    assert_int_equal(backcast_session_scores(s, &own, &n_own), 0);
    assert_int_equal(backcast_scores_by_id(tool, id, &other, &n_other), 0);
    assert_int_equal(n_own, 50);
    assert_int_equal(n_other, 50);
    for (size_t i = 0; i < n_own; i++) {
        assert_memory_equal(&own[i], &other[i], sizeof(*own));
        assert_true(i == 0 || own[i].stream > own[i - 1].stream);
        assert_int_equal(own[i].stream, own[i].position);
    }
    assert_true(own[n_own - 1].flags & 2);
    assert_int_equal(backcast_session_budget(s, 1, 0, 0), BACKCAST_EBUDGET); /* less than a page */
    assert_int_equal(backcast_session_budget(s, 0, 500, 300), 0);
    assert_int_equal(backcast_session_info(s, &info), 0);
    assert_true(info.budget_tokens == 500 && info.keep_tokens == 300);
    struct backcast_stats st = stats(tool), page;
    assert_int_equal(st.n_sessions, 1);
    assert_int_equal(st.sessions[0].tokens, 50);
    assert_int_equal(st.sessions[0].bytes_live, 50ull * info.bytes_per_token);
    assert_int_equal(st.kv_held, st.sessions[0].bytes_held);
    assert_int_equal(st.n_models, 1);
    assert_int_equal(backcast_stats_page(tool, &page), 0);
    assert_true(page.uptime_micros > 0 && page.kv_memory == st.kv_memory);
    assert_int_equal(backcast_close_by_id(tool, id), 0);
    assert_int_equal(backcast_close_by_id(tool, id), BACKCAST_EUNKNOWN);
    assert_int_equal(backcast_prompt(s, "x", 1, &go), BACKCAST_EUNKNOWN);
    free(own);
    free(other);
    free(text);
    answer_free(&a);
    backcast_disconnect(&c);
    backcast_disconnect(&tool);
}

/* ---- refusals */

struct bad_open {
    const char *field;
    int code;
    void (*spoil)(struct backcast_session_options *o);
};

#define SPOIL(name, statement)                                                                     \
    static void spoil_##name(struct backcast_session_options *o)                                   \
    {                                                                                              \
        statement;                                                                                 \
    }
SPOIL(policy, o->policy = "best_of_all")
SPOIL(score, o->score = "loudness")
SPOIL(trigger, o->trigger = "tuesday")
SPOIL(kv_type, o->kv_type = "f8")
SPOIL(model, o->model = "no-such-model")
SPOIL(model_path, o->model = "/nonexistent/model.gguf")
SPOIL(model_not, o->model = "/etc/passwd")
SPOIL(budget_small, o->budget_tokens = 0; o->budget_bytes = 10)
SPOIL(keep, o->keep_tokens = 64)
SPOIL(keep_more, o->keep_tokens = 1000)
SPOIL(frozen, o->frozen_tokens = 64)
SPOIL(recent, o->recent_tokens = 60)
SPOIL(gap, o->min_gap = 50)
SPOIL(span_even, o->span = 4)
SPOIL(span_zero, o->span = 0)
SPOIL(quantile, o->span_quantile = 1.5f)
SPOIL(quantile_nan, o->span_quantile = NAN)
SPOIL(name, o->name = "a/b")
SPOIL(name_long, o->name = "0123456789012345678901234567890123456789012345678901234567890123456789")
SPOIL(priority, o->priority = 101)
SPOIL(template, o->chat_template = "shakespeare")
SPOIL(ring, o->ring_bytes = 5000)
SPOIL(ring_big, o->ring_bytes = 1u << 30)

static void bad_options_name_their_field(void **state)
{
    (void)state;
    static const struct bad_open rows[] = {
        {"policy", BACKCAST_EUNKNOWN, spoil_policy},
        {"score", BACKCAST_EUNKNOWN, spoil_score},
        {"trigger", BACKCAST_EUNKNOWN, spoil_trigger},
        {"kv_type", BACKCAST_EUNKNOWN, spoil_kv_type},
        {"model", 0, spoil_model},
        {"model", 0, spoil_model_path},
        {"", BACKCAST_ECORRUPT, spoil_model_not},
        {"budget_bytes", BACKCAST_EBUDGET, spoil_budget_small},
        {"keep_tokens", BACKCAST_EINVALID, spoil_keep},
        {"keep_tokens", BACKCAST_EINVALID, spoil_keep_more},
        {"frozen_tokens", BACKCAST_EINVALID, spoil_frozen},
        {"recent_tokens", BACKCAST_EINVALID, spoil_recent},
        {"min_gap", BACKCAST_EINVALID, spoil_gap},
        {"span", BACKCAST_EINVALID, spoil_span_even},
        {"span", BACKCAST_EINVALID, spoil_span_zero},
        {"span_quantile", BACKCAST_EINVALID, spoil_quantile},
        {"span_quantile", BACKCAST_EINVALID, spoil_quantile_nan},
        {"name", BACKCAST_EINVALID, spoil_name},
        {"name", BACKCAST_EINVALID, spoil_name_long},
        {"priority", BACKCAST_EINVALID, spoil_priority},
        {"chat_template", 0, spoil_template},
        {"ring_bytes", BACKCAST_EINVALID, spoil_ring},
        {"ring_bytes", BACKCAST_EINVALID, spoil_ring_big},
    };
    backcast *c = dh_connect(d);

    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct backcast_session_options o = answer_budget("counter_causal_fast", 64);
        backcast_session *s = NULL;
        rows[i].spoil(&o);
        int rc = backcast_session_open(c, &o, &s);
        const char *field = backcast_last_error_field(c);
        if (rc >= 0 || s != NULL || (rows[i].code != 0 && rc != rows[i].code) ||
            strncmp(field, rows[i].field, strlen(rows[i].field)) != 0 ||
            strlen(backcast_last_error(c)) < 8)
            fail_msg("row %zu (%s): %d, field '%s', '%s'", i, rows[i].field, rc, field,
                     backcast_last_error(c));
    }
    assert_true(dh_until(nothing_is_held, c, DH_PATIENCE_MS));
    backcast_disconnect(&c);
}

struct bad_ask {
    const char *field;
    struct backcast_generate_options o;
};

static void bad_requests_name_their_field(void **state)
{
    (void)state;
    static const char *const nine[9] = {"a", "b", "c", "d", "e", "f", "g", "h", "i"};
    static const char *const empty[1] = {""};
    static char long_stop[300];
    static const char *const longest[1] = {long_stop};
    struct backcast_generate_options good = answer_options(3);
    struct bad_ask rows[14];
    size_t n = 0;
    backcast *c = dh_connect(d);
    backcast_session *s = NULL, *t = NULL;
    struct answer a = {0};

    memset(long_stop, 'x', sizeof(long_stop) - 1);
#define ROW(name, change) (rows[n] = (struct bad_ask){name, good}, rows[n].o.change, n++)
    ROW("temperature", temperature = NAN);
    ROW("temperature", temperature = -1);
    ROW("top_p", top_p = 2);
    ROW("top_p", top_p = -0.5f);
    ROW("min_p", min_p = 1.5f);
    ROW("repeat_penalty", repeat_penalty = -1);
    ROW("repeat_penalty", repeat_penalty = INFINITY);
    ROW("n_logprobs", n_logprobs = 21);
    ROW("max_tokens", max_tokens = UINT32_MAX - 1);
    ROW("stop", stop = nine);
    rows[n - 1].o.n_stop = 9;
    ROW("stop", stop = empty);
    rows[n - 1].o.n_stop = 1;
    ROW("stop", stop = longest);
    rows[n - 1].o.n_stop = 1;
#undef ROW
    assert_int_equal(backcast_session_open(c, NULL, &s), 0);
    for (size_t i = 0; i < n; i++) {
        int rc = backcast_prompt(s, "oak", 3, &rows[i].o);
        if (rc != BACKCAST_EINVALID ||
            strncmp(backcast_last_error_field(c), rows[i].field, strlen(rows[i].field)) != 0)
            fail_msg("row %zu (%s): %d, field '%s', '%s'", i, rows[i].field, rc,
                     backcast_last_error_field(c), backcast_last_error(c));
    }
    int32_t ids[2] = {5, 1 << 20};
    assert_int_equal(backcast_prompt_ids(s, ids, 2, &good), BACKCAST_EINVALID);
    assert_int_equal(backcast_prompt_ids(s, ids, 0, &good), BACKCAST_EINVALID);
    assert_true(backcast_chat(s, "wizard", "hi", 2, &good) < 0);
    assert_string_equal(backcast_last_error_field(c), "role");
    assert_int_equal(backcast_session_save(s, "x"), BACKCAST_EUNSUPPORTED);
    assert_int_equal(backcast_session_restore(c, "x", &t), BACKCAST_EUNSUPPORTED);
    assert_null(t);
    /* odd, but no mistake: no UTF-8, one byte, NULs */
    static const char odd[] = "\xff\xfe\x00\x80 oak";
    assert_int_equal(backcast_prompt(s, odd, sizeof(odd) - 1, &good), 0);
    answer_read(c, s, &a);
    assert_string_equal(a.reason, "length");
    answer_free(&a);
    backcast_disconnect(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cancel_ends_at_once_in_prefill_and_decode),
        cmocka_unit_test(killed_client_leaves_nothing),
        cmocka_unit_test(closed_by_another_under_its_answer),
        cmocka_unit_test(what_was_said_before_a_close_comes),
        cmocka_unit_test(named_session_outlives_its_client),
        cmocka_unit_test(reconnect_takes_up_the_stream),
        cmocka_unit_test(restarted_daemon_is_a_new_one),
        cmocka_unit_test(defaults_are_the_daemons),
        cmocka_unit_test(budgets_prunes_and_scores_of_a_live_session),
        cmocka_unit_test(bad_options_name_their_field),
        cmocka_unit_test(bad_requests_name_their_field),
    };
    return cmocka_run_group_tests(tests, start, dh_group_stop);
}
