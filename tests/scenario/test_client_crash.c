/* test_client_crash.c: the daemon is killed (SIGKILL) under its clients: what the library says then, how it goes on with the
 * next daemon on the same socket, what a durable session still has, and what the command prints. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#include "answer.h"
#include "command.h"
#include "daemon_harness.h"

#define COMMAND TEST_BIN "/backcast"

static char state_dir[64], state_arg[96];

static int start(void **state)
{
    (void)state;
    snprintf(state_dir, sizeof(state_dir), "/tmp/backcast-state-XXXXXX");
    assert_non_null(mkdtemp(state_dir));
    snprintf(state_arg, sizeof(state_arg), "--state-dir=%s", state_dir);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    char command[96];
    snprintf(command, sizeof(command), "rm -rf '%s'", state_dir);
    return system(command);
}

static void kill_daemon(struct dh *d)
{
    assert_int_equal(kill(d->pid, SIGKILL), 0);
    int status = dh_wait(d, DH_PATIENCE_MS);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    assert_int_equal(access(d->socket, F_OK), 0); /* it could not take it away */
}

/* The next daemon, in the place of one that was killed. */
static struct dh *next_daemon(const struct dh *killed, const char *more)
{
    const char *args[] = {"--socket", killed->socket, more, NULL};
    struct dh *d = dh_start_long(args);
    snprintf(d->socket, sizeof(d->socket), "%s", killed->socket);
    return d;
}

static void read_some(backcast *c, struct answer *a, size_t n)
{
    struct backcast_event ev;
    while (a->n_ids < n) {
        assert_int_equal(backcast_next(c, &ev, 30000), 1);
        answer_event(a, &ev);
    }
}

/* What had come is handed out; then the end, once and for all. */
static void read_to_the_end(backcast *c, struct answer *a)
{
    struct pollfd p = {.fd = backcast_fd(c), .events = POLLIN};
    struct backcast_event ev;
    int rc;
    assert_int_equal(poll(&p, 1, 10000), 1); /* an event loop hears of it */
    while ((rc = backcast_next(c, &ev, -1)) == 1)
        answer_event(a, &ev);
    assert_int_equal(rc, BACKCAST_ECLOSED);
    assert_true(strlen(backcast_last_error(c)) > 10);
    assert_int_equal(backcast_next(c, &ev, -1), BACKCAST_ECLOSED); /* does not wait */
}

/* Every call says so, and none waits. */
static void all_is_closed(backcast *c, backcast_session *s)
{
    struct backcast_generate_options go = answer_options(5);
    struct backcast_stats st;
    struct backcast_score *rows = NULL;
    backcast_session *t = NULL;
    size_t n = 0;
    assert_int_equal(backcast_prompt(s, "x", 1, &go), BACKCAST_ECLOSED);
    assert_true(strlen(backcast_last_error(c)) > 10);
    assert_int_equal(backcast_chat(s, "user", "x", 1, &go), BACKCAST_ECLOSED);
    assert_int_equal(backcast_session_budget(s, 0, 50, 0), BACKCAST_ECLOSED);
    assert_int_equal(backcast_session_prune(s, 10), BACKCAST_ECLOSED);
    assert_int_equal(backcast_session_scores(s, &rows, &n), BACKCAST_ECLOSED);
    assert_int_equal(backcast_cancel(s), BACKCAST_ECLOSED);
    assert_int_equal(backcast_session_open(c, NULL, &t), BACKCAST_ECLOSED);
    assert_int_equal(backcast_session_attach(c, "work", &t), BACKCAST_ECLOSED);
    assert_int_equal(backcast_stats(c, &st), BACKCAST_ECLOSED);
    assert_null(t);
    assert_null(rows);
}

static void killed_under_an_answer(void **state)
{
    (void)state;
    struct dh *first = dh_start_long(NULL), *next = NULL;
    struct backcast_session_options so = answer_budget("counter_causal_fast", 64);
    struct backcast_generate_options go = answer_options(1000000);
    backcast *c = NULL;
    backcast_session *plain = NULL, *named = NULL, *fresh = NULL;
    struct answer a = {0}, b = {0};

    assert_int_equal(backcast_connect(&c, first->socket), 0);
    assert_int_equal(backcast_session_open(c, &so, &plain), 0);
    so.name = "work";
    assert_int_equal(backcast_session_open(c, &so, &named), 0);
    assert_int_equal(backcast_prompt(named, "oak", 3, &go), 0);
    read_some(c, &a, 100);
    kill_daemon(first);
    read_to_the_end(c, &a);
    assert_false(a.ended); /* nobody said that it was */
    all_is_closed(c, named);
    all_is_closed(c, plain);
    assert_int_equal(backcast_reconnect(c), BACKCAST_ENOTFOUND);
    all_is_closed(c, plain);
    next = next_daemon(first, NULL);
    assert_int_equal(backcast_reconnect(c), 0); /* it knows no session */
    assert_int_equal(backcast_prompt(plain, "x", 1, &go), BACKCAST_ECLOSED);
    int rc = backcast_prompt(named, "x", 1, &go);
    assert_true(rc == BACKCAST_EUNKNOWN || rc == BACKCAST_EPERMISSION);
    backcast_session_close(&plain);
    backcast_session_close(&named);
    go.max_tokens = 100;
    assert_int_equal(backcast_session_open(c, &so, &fresh), 0); /* the name is free */
    assert_int_equal(backcast_prompt(fresh, "oak", 3, &go), 0);
    answer_read(c, fresh, &b);
    assert_memory_equal(a.ids, b.ids, 100 * sizeof(*a.ids));
    answer_free(&a);
    answer_free(&b);
    backcast_disconnect(&c);
    dh_stop(&next);
    dh_free(&first);
}

/* Killed while the client waits: in an event wait without end, and in calls. */
static void killed_while_the_client_waits(void **state)
{
    (void)state;
    for (int in_call = 0; in_call < 2; in_call++) {
        struct dh *d = dh_start_long(NULL);
        backcast *c = NULL;
        backcast_session *s = NULL;
        struct backcast_event ev;
        struct backcast_stats st;
        int rc = 0;
        assert_int_equal(backcast_connect(&c, d->socket), 0);
        assert_int_equal(backcast_session_open(c, NULL, &s), 0);
        pid_t killer = fork();
        if (killer == 0) {
            usleep(50000);
            kill(d->pid, SIGKILL);
            _exit(0);
        }
        if (in_call)
            while ((rc = backcast_stats(c, &st)) == 0)
                ;
        else
            rc = backcast_next(c, &ev, -1);
        assert_int_equal(rc, BACKCAST_ECLOSED);
        waitpid(killer, NULL, 0);
        dh_wait(d, DH_PATIENCE_MS);
        backcast_disconnect(&c);
        dh_free(&d);
    }
}

/* A durable session under an answer: the next daemon has it, and the answer goes on, token for token. */
static void durable_sessions_go_on(void **state)
{
    (void)state;
    struct dh *first = dh_start_long((const char *[]){state_arg, NULL}), *next = NULL;
    struct backcast_session_options so = answer_budget("counter_causal_fast", 64);
    struct backcast_generate_options go = answer_options(1500);
    backcast *c = NULL;
    backcast_session *s = NULL;
    struct answer whole = {0}, a = {0};

    assert_int_equal(backcast_connect(&c, first->socket), 0);
    answer_ask(c, &so, "the tide", 8, &go, &whole);
    assert_true(whole.prunes > 10);
    so.name = "diary";
    so.durable = 1;
    assert_int_equal(backcast_session_open(c, &so, &s), 0);
    assert_int_equal(backcast_prompt(s, "the tide", 8, &go), 0);
    read_some(c, &a, 200);
    kill_daemon(first);
    read_to_the_end(c, &a);
    assert_int_equal(backcast_reconnect(c), BACKCAST_ENOTFOUND);
    next = next_daemon(first, state_arg);
    assert_int_equal(backcast_reconnect(c), 1);
    answer_read(c, s, &a);
    assert_true(answer_equal(&a, &whole));
    answer_free(&a);
    answer_free(&whole);
    backcast_session_close(&s);
    backcast_disconnect(&c);
    dh_stop(&next);
    dh_free(&first);
}

/* ---- the command */

static void command_says_that_its_daemon_is_gone(void **state)
{
    (void)state;
    static const char *const commands[] = {"run", "chat"};
    for (int i = 0; i < 2; i++) {
        struct dh *d = dh_start_long(NULL);
        const char *argv[] = {COMMAND, commands[i], "--socket", d->socket,      "--raw",
                              "-N",    "1000000",   "-b64t",    "--ignore-end", NULL};
        struct prog_child p = prog_start(argv, NULL, "the tide\nand again\n");
        assert_true(prog_says(p.err, "forgot"));
        kill_daemon(d);
        struct prog_result r = prog_wait(&p);
        if (r.exit_code != 1 || strstr(r.err, "the daemon closed the connection") == NULL)
            fail_msg("%s: exit %d: %s", commands[i], r.exit_code, r.err);
        assert_true(r.out_len > 50); /* what had come stays */
        prog_free(&r);
        r = prog_run(argv, NULL, "the tide\n"); /* and there is none any more */
        assert_int_equal(r.exit_code, 1);
        assert_non_null(strstr(r.err, "no daemon listens"));
        prog_free(&r);
        dh_free(&d);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(killed_under_an_answer),
        cmocka_unit_test(killed_while_the_client_waits),
        cmocka_unit_test(durable_sessions_go_on),
        cmocka_unit_test(command_says_that_its_daemon_is_gone),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
