/* test_example.c: the programs of client/examples, against a real daemon. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "answer.h"
#include "command.h"
#include "daemon_harness.h"

#define EXAMPLE(name) TEST_BIN "/examples/" name

static struct dh *d;

static int start(void **state)
{
    (void)state;
    const char *args[] = {"--threads=1", NULL};
    d = dh_start_long(args);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    dh_stop(&d);
    return 0;
}

static void hello_prints_the_answer(void **state)
{
    (void)state;
    backcast *c = NULL;
    backcast_session *s = NULL;
    struct answer a = {0};
    struct prog_result r =
        prog_run((const char *[]){EXAMPLE("hello"), d->socket, "Why?", NULL}, NULL, NULL);

    assert_int_equal(backcast_connect(&c, d->socket), 0);
    assert_int_equal(backcast_session_open(c, NULL, &s), 0);
    assert_int_equal(backcast_chat(s, "user", "Why?", 4, NULL), 0);
    answer_read(c, s, &a);
    assert_int_equal(r.exit_code, 0);
    assert_int_equal(r.out_len, a.len + 1);
    if (a.len > 0)
        assert_memory_equal(r.out, a.text, a.len);
    answer_free(&a);
    backcast_disconnect(&c);
    prog_free(&r);
    r = prog_run((const char *[]){EXAMPLE("hello"), "/nowhere", NULL}, NULL, NULL);
    assert_int_equal(r.exit_code, 1);
    assert_non_null(strstr(r.err, "no daemon listens at /nowhere"));
    prog_free(&r);
}

static void poll_loop_answers_both(void **state)
{
    (void)state;
    struct prog_result r =
        prog_run((const char *[]){EXAMPLE("poll_loop"), d->socket, "One?", "Two?", NULL}, NULL,
                 NULL);
    assert_int_equal(r.exit_code, 0);
    assert_non_null(strstr(r.out, "[1] "));
    assert_non_null(strstr(r.out, "[2] "));
    prog_free(&r);
}

static void budget_shows_prunes_and_scores(void **state)
{
    (void)state;
    char *text = answer_prompt(3000, 9);
    struct prog_result r =
        prog_run((const char *[]){EXAMPLE("budget"), d->socket, "400000", "counter_causal", NULL},
                 NULL, text);

    assert_int_equal(r.exit_code, 0);
    assert_non_null(strstr(r.out, "granted "));
    assert_non_null(strstr(r.out, "pruned by counter_causal (budget)"));
    assert_non_null(strstr(r.out, "end length"));
    assert_non_null(strstr(r.out, "tokens are left"));
    prog_free(&r);
    r = prog_run((const char *[]){EXAMPLE("budget"), d->socket, "100", NULL}, NULL, text);
    assert_int_equal(r.exit_code, 1);
    assert_non_null(strstr(r.err, "budget_bytes"));
    prog_free(&r);
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hello_prints_the_answer),
        cmocka_unit_test(poll_loop_answers_both),
        cmocka_unit_test(budget_shows_prunes_and_scores),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
