/* The border after a daemon that was killed: its durable sessions are there for whoever comes first,
 * even while the next one loads, and closing them touches nobody else's descriptors. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>
#include "answer.h"
#include "daemon_harness.h"
#include "folders_test.h"

#define SESSIONS 3
#define TOKENS 3000

static struct dh *d;
static char root[FOLDER_PATH], state_option[FOLDER_PATH + 32];
static const char *const args[] = {state_option, NULL};

static int start(void **state)
{
    (void)state;
    folder_root(root, "border");
    snprintf(state_option, sizeof state_option, "--state-dir=%s/state", root);
    d = dh_start_long(args);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    dh_stop(&d);
    folder_drop(root);
    return 0;
}

static void killed_and_started(void)
{
    char model[80];
    snprintf(model, sizeof model, "%s/model.gguf", d->dir);
    assert_int_equal(kill(d->pid, SIGKILL), 0);
    dh_wait(d, 5000);
    dh_again(d, model, args);
}

static backcast_session *durable(backcast *c, const char *name)
{
    struct backcast_session_options o;
    backcast_session *s = NULL;
    backcast_session_options_init(&o);
    o.name = name;
    o.durable = 1;
    if (backcast_session_open(c, &o, &s) != 0)
        fail_msg("%s: %s", name, backcast_last_error(c));
    return s;
}

/* What the daemon's standard input is. */
static void input_of(char *ret, size_t size)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/0", (int)d->pid);
    ssize_t n = readlink(path, ret, size - 1);
    ret[n > 0 ? n : 0] = '\0';
}

/* A session that came back and that nobody has attached to has no rings: its end closes none. */
static void ends_of_sessions_that_came_back(void **state)
{
    (void)state;
    char before[100], after[100], name[16];
    struct backcast_stats st;
    backcast *c = dh_connect(d);
    for (int i = 0; i < SESSIONS; i++) {
        snprintf(name, sizeof name, "b%d", i);
        durable(c, name);
    }
    killed_and_started();
    dh_ready(d);
    backcast_disconnect(&c);
    c = dh_connect(d);
    input_of(before, sizeof before);
    unsigned fds = dh_fds(d);
    assert_string_not_equal(before, "");
    assert_int_equal(backcast_stats(c, &st), 0);
    assert_int_equal(st.n_sessions, SESSIONS);
    for (int i = SESSIONS; i-- > 0;) {
        backcast *other = dh_connect(d); /* gets the lowest number that is free */
        assert_int_equal(backcast_stats(c, &st), 0);
        assert_int_equal(backcast_close_by_id(c, st.sessions[0].id), 0);
        assert_int_equal(backcast_stats(c, &st), 0); /* both go on */
        assert_int_equal(st.n_sessions, i);
        assert_int_equal(backcast_stats(other, &st), 0);
        backcast_disconnect(&other);
    }
    input_of(after, sizeof after);
    assert_string_equal(before, after);
    assert_true(dh_fds(d) <= fds); /* and the journals' */
    backcast_disconnect(&c);
}

/* The client of an answer comes back before the next daemon has even loaded, and gets the rest. */
static void an_answer_goes_on_for_its_client(void **state)
{
    (void)state;
    backcast *c = dh_connect(d);
    backcast_session *s = durable(c, "talk");
    struct backcast_generate_options go = answer_options(TOKENS);
    struct backcast_event ev;
    struct answer a = {0};
    int rc = 0;

    assert_int_equal(backcast_prompt(s, "oak", 3, &go), 0);
    while (a.n_ids < TOKENS / 4) {
        assert_int_equal(backcast_next(c, &ev, 30000), 1);
        answer_event(&a, &ev);
    }
    assert_null(a.reason[0] != '\0' ? a.reason : NULL);
    killed_and_started();
    while ((rc = backcast_next(c, &ev, 1000)) == 1)
        answer_event(&a, &ev);
    assert_true(rc < 0 || a.reason[0] != '\0');
    while ((rc = backcast_reconnect(c)) < 0)
        usleep(1000);
    assert_int_equal(rc, 1);
    answer_read(c, s, &a);
    dh_ready(d);
    assert_string_equal(a.reason, "length");
    assert_int_equal(a.n_ids, TOKENS);
    backcast_session_close(&s);
    backcast_disconnect(&c);
    answer_free(&a);
}

/* The lock of a daemon that was killed may be held a moment longer: the next one waits for it. */
static void a_start_waits_for_a_lock_that_is_let_go(void **state)
{
    (void)state;
    char model[80], lock[80];
    snprintf(model, sizeof model, "%s/model.gguf", d->dir);
    snprintf(lock, sizeof lock, "%s/s/backcast.lock", d->dir);
    assert_int_equal(kill(d->pid, SIGKILL), 0);
    dh_wait(d, 5000);
    int fd = open(lock, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(flock(fd, LOCK_EX), 0);
    dh_again(d, model, args);
    usleep(100000); /* it asks about now; nothing depends on it */
    close(fd);
    dh_ready(d);
    backcast *c = dh_connect(d);
    backcast_disconnect(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ends_of_sessions_that_came_back),
        cmocka_unit_test(an_answer_goes_on_for_its_client),
        cmocka_unit_test(a_start_waits_for_a_lock_that_is_let_go),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
