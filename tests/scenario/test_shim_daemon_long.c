/* test_shim_daemon_long.c: test_shim_daemon.c's daemon on more: every text of every model family, the default model's
 * first words, and a GPU whose memory ends in the middle of a cache. Minutes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "quality.h"
#include "shim_daemon.h"
#include "../unit/smollm2.h"

#define WORDS 20u /* tokens of the default model */
_Static_assert(WORDS <= QUALITY_ANSWER, "an answer holds them");

static void texts_of_every_family_are_the_goldens(void **state)
{
    (void)state;
    static const char *const archs[] = {"llama", "llama-rope3", "qwen2", "qwen3"};
    for (size_t i = 0; i < ARRAY_LEN(archs); i++)
        shim_goldens(archs[i], NULL);
}

/* A prompt's next words, `says` among them, and what nearly came instead of each. */
static void words_ask(backcast *c, const char *prompt, const char *says, struct quality_answer *ret)
{
    struct backcast_session_options so = answer_budget("counter_causal_fast", 512);
    struct backcast_generate_options go = answer_options(WORDS);
    struct backcast_event ev;
    struct answer a = {0};
    backcast_session *s = NULL;
    go.n_logprobs = 2;
    ret->n = 0;
    if (backcast_session_open(c, &so, &s) != 0 ||
        backcast_prompt(s, prompt, strlen(prompt), &go) != 0)
        fail_msg("%s: %s", backcast_last_error_field(c), backcast_last_error(c));
    while (!a.ended) {
        int rc = backcast_next(c, &ev, 120000);
        if (rc != 1)
            fail_msg("next: %d %s", rc, backcast_last_error(c));
        answer_event(&a, &ev);
        if (ev.type != BACKCAST_LOGPROB)
            continue;
        const struct backcast_top *top = ev.logprob.top;
        assert_true(ret->n < WORDS && ev.logprob.n_top == 2);
        assert_int_equal(ev.logprob.id, top[0].id); /* greedy */
        ret->ids[ret->n] = top[0].id;
        ret->second[ret->n] = top[1].id;
        ret->lead[ret->n++] = top[0].logprob - top[1].logprob;
    }
    assert_string_equal(a.reason, "length");
    assert_int_equal(ret->n, WORDS);
    assert_int_equal(a.n_ids, WORDS);
    assert_memory_equal(ret->ids, a.ids, WORDS * sizeof *a.ids);
    print_message("%s%s\n", prompt, a.text);
    assert_non_null(strstr(a.text, says));
    answer_free(&a);
    backcast_session_close(&s);
}

/* The CPU's words, until one at a near-tie: they add up in other orders, so that one may differ, and then all after it. */
static void smollm2_says_what_it_says_on_the_cpu(void **state)
{
    (void)state;
    static const char *const backends[] = {"cpu", "simt"};
    static const struct {
        const char *prompt, *says;
        uint32_t same; /* so many lead by more than a near-tie: 0.66 nats at least */
    } cases[] = {{"The capital of France is", " Paris", 5}, {"1 2 3 4 5 6", " 7 8 9 10", WORDS}};
    struct quality_answer a[2][ARRAY_LEN(cases)];
    char path[512];
    if (!smollm2_find(path, sizeof path))
        skip();
    for (int k = 0; k < 2; k++) {
        struct dh *d = shim_start(backends[k], path, NULL);
        backcast *c = dh_connect(d);
        for (size_t i = 0; i < ARRAY_LEN(cases); i++)
            words_ask(c, cases[i].prompt, cases[i].says, &a[k][i]);
        backcast_disconnect(&c);
        dh_stop(&d);
    }
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        uint32_t same = quality_part(&a[0][i], &a[1][i], cases[i].prompt);
        if (same < cases[i].same)
            fail_msg("%s: only %u words are the same", cases[i].prompt, same);
    }
}

/* The device has one granule of pages and never gets another: the session forgets as if that were its budget, and goes
 * on; one that never forgets is refused. */
static void a_cache_outgrows_the_device(void **state)
{
    (void)state;
    const char *const args[] = {shim_arg(), "--inject=cuMemCreate:2:2:1000000", NULL};
    static struct shim_answer a;
    static int32_t ids[3000];
    struct backcast_session_options so = answer_budget("sliding_window", 4096);
    so.kv_type = "f32";
    for (int i = 0; i < 3000; i++)
        ids[i] = 3 + i * 7 % 280;
    struct dh *d = dh_start_long(args);
    backcast *c = dh_connect(d);
    shim_ask(c, &so, ids, 3000, 5, &a);
    if (strcmp(a.a.reason, "length") != 0)
        fail_msg("%s: %s", a.a.reason, a.a.error);
    assert_true(a.a.prunes > 0);
    assert_string_equal(a.a.last_prune, "pressure");
    answer_free(&a.a);
    so.policy = "none";
    shim_ask(c, &so, ids, 3000, 5, &a);
    assert_int_equal(a.a.code, BACKCAST_ENOMEM);
    answer_free(&a.a);
    backcast_disconnect(&c);
    dh_stop(&d);
}

int main(int argc, char **argv)
{
    shim_use(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(texts_of_every_family_are_the_goldens),
        cmocka_unit_test(smollm2_says_what_it_says_on_the_cpu),
        cmocka_unit_test(a_cache_outgrows_the_device),
    };
    return shim_there() ? cmocka_run_group_tests(tests, NULL, NULL) : SKIPPED;
}
