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
    const char *args[] = {"--threads=1", NULL};
    *state = d = dh_start_long(args);
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

#define CONTEXT 1024 /* of tiny-llama.gguf */

/* The tokens of a question of len bytes; more than the context: it is refused. */
static uint32_t question_tokens(backcast *c, const char *question, size_t len)
{
    struct backcast_generate_options go = answer_options(1);
    backcast_session *s = NULL;
    struct answer a = {0};
    uint32_t n = CONTEXT + 1;
    assert_int_equal(backcast_session_open(c, NULL, &s), 0);
    if (backcast_chat(s, "user", question, len, &go) == 0) {
        answer_read(c, s, &a);
        n = a.tokens_in;
    }
    answer_free(&a);
    backcast_session_close(&s);
    return n;
}

/* A question that leaves the context no room for an answer: what comes is no whole one, and the
 * program says so. */
static void hello_tells_an_answer_that_ended_early(void **state)
{
    (void)state;
    struct dh *small = dh_start("tiny-llama.gguf", NULL);
    backcast *c = NULL;
    char *question = answer_prompt(4000, 3);
    size_t fits = 1, most = 4000;
    assert_int_equal(backcast_connect(&c, small->socket), 0);
    while (most - fits > 1) {
        size_t half = (fits + most) / 2;
        if (question_tokens(c, question, half) < CONTEXT)
            fits = half;
        else
            most = half;
    }
    question[fits] = '\0';
    struct prog_result r =
        prog_run((const char *[]){EXAMPLE("hello"), small->socket, question, NULL}, NULL, NULL);
    if (r.exit_code != 1 || strstr(r.err, "the answer ended early: context") == NULL)
        fail_msg("exit %d: %s", r.exit_code, r.err);
    prog_free(&r);
    free(question);
    backcast_disconnect(&c);
    dh_stop(&small);
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
    assert_non_null(strstr(r.out, "  may be dropped ("));
    assert_non_null(strstr(r.out, "  recent ("));
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
        cmocka_unit_test(hello_tells_an_answer_that_ended_early),
        cmocka_unit_test(poll_loop_answers_both),
        cmocka_unit_test(budget_shows_prunes_and_scores),
    };
    return cmocka_run_group_tests(tests, start, dh_group_stop);
}
