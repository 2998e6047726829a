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
#include "shim_daemon.h"
#include "../unit/smollm2.h"

static void texts_of_every_family_are_the_goldens(void **state)
{
    (void)state;
    static const char *const archs[] = {"llama", "llama-rope3", "qwen2", "qwen3"};
    for (size_t i = 0; i < ARRAY_LEN(archs); i++)
        shim_goldens(archs[i], NULL);
}

/* 20 tokens, the CPU's beside them: with 4-bit weights both multiply the same integers in every decode step. */
static void smollm2_says_what_it_says_on_the_cpu(void **state)
{
    (void)state;
    static const char prompt[] = "The capital of France is";
    static const char *const backends[] = {"simt", "cpu"};
    struct answer a[2] = {{0}};
    struct backcast_session_options so = answer_budget("counter_causal_fast", 512);
    struct backcast_generate_options go = answer_options(20);
    char path[512];
    if (!smollm2_find(path, sizeof path))
        skip();
    for (int k = 0; k < 2; k++) {
        struct dh *d = shim_start(backends[k], path, NULL);
        backcast *c = dh_connect(d);
        answer_ask(c, &so, prompt, strlen(prompt), &go, &a[k]);
        assert_int_equal(a[k].n_ids, 20);
        print_message("%s: %s\n", backends[k], a[k].text);
        backcast_disconnect(&c);
        dh_stop(&d);
    }
    assert_non_null(strstr(a[0].text, "Paris"));
    assert_true(answer_equal(&a[0], &a[1]));
    answer_free(&a[0]);
    answer_free(&a[1]);
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
