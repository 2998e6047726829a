/* Bad input through the library to a running daemon: damaged model files (some of test_border_damage_long.c's), and
 * sessions and prompts that cannot be. Each gets an error that names its field; the daemon lives, and an answer under way
 * is not disturbed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <unistd.h>
#include "answer.h"
#include "daemon_harness.h"
#include "damaged_models.h"

#define BUDGET 64u

static void damaged_models_harm_nobody(void **state)
{
    (void)state;
    damaged_models(20, 40);
}

static const struct {
    const char *policy, *model;
    uint32_t frozen, keep;
    int code;
    const char *field;
} bad_sessions[] = {
    {"lru", NULL, BACKCAST_FROZEN_AUTO, 0, BACKCAST_EUNKNOWN, "policy"},
    {NULL, "gpt-5", BACKCAST_FROZEN_AUTO, 0, BACKCAST_EUNKNOWN, "model"},
    {NULL, "/nowhere/x.gguf", BACKCAST_FROZEN_AUTO, 0, BACKCAST_ENOTFOUND, "model"},
    {NULL, NULL, BUDGET, 0, BACKCAST_EINVALID, "frozen_tokens"},
    {NULL, NULL, BUDGET + 1, 0, BACKCAST_EINVALID, "frozen_tokens"},
    {NULL, NULL, BACKCAST_FROZEN_AUTO, BUDGET, BACKCAST_EINVALID, "keep_tokens"},
    {NULL, NULL, BACKCAST_FROZEN_AUTO, BUDGET + 1, BACKCAST_EINVALID, "keep_tokens"},
};

static void refused(backcast *c, int rc, int code, const char *field)
{
    if (rc != code || strcmp(backcast_last_error_field(c), field) != 0 ||
        strlen(backcast_last_error(c)) < 10)
        fail_msg("%d, not %d of %s: \"%s\": %s", rc, code, field, backcast_last_error_field(c),
                 backcast_last_error(c));
}

static void refuse_sessions(backcast *c)
{
    for (size_t i = 0; i < sizeof bad_sessions / sizeof *bad_sessions; i++) {
        struct backcast_session_options so = answer_budget(bad_sessions[i].policy, BUDGET);
        backcast_session *s = NULL;
        so.model = bad_sessions[i].model;
        so.frozen_tokens = bad_sessions[i].frozen;
        so.keep_tokens = bad_sessions[i].keep;
        int rc = backcast_session_open(c, &so, &s);
        refused(c, rc, bad_sessions[i].code, bad_sessions[i].field);
        assert_null(s);
    }
}

static void odd_prompts(backcast *c)
{
    static const char bytes[] = "\xff\xfe\x80 \0 \xc0\x80\xed\xa0\x80\xf5\xe2\x82";
    struct backcast_session_options so = answer_budget("none", BUDGET);
    struct backcast_generate_options go = answer_options(5);
    backcast_session *s = NULL;
    char *text = answer_prompt(3000, 5);
    const int32_t one = 50;
    struct answer a = {0};
    uint64_t needed = 0, available = 0;

    assert_int_equal(backcast_session_open(c, &so, &s), 0);
    refused(c, backcast_prompt(s, "", 0, &go), BACKCAST_EINVALID, "text");
    refused(c, backcast_chat(s, "user", "", 0, &go), BACKCAST_EINVALID, "text");
    refused(c, backcast_prompt_ids(s, &one, 0, &go), BACKCAST_EINVALID, "ids");
    refused(c, backcast_prompt(s, text, 3000, &go), BACKCAST_EBUDGET, "budget_tokens");
    backcast_last_error_amounts(c, &needed, &available);
    assert_true(needed > BUDGET && available == BUDGET);
    assert_int_equal(backcast_prompt_ids(s, &one, 1, &go), 0); /* nothing of it is left */
    answer_read(c, s, &a);
    assert_int_equal(a.tokens_in, 1);
    assert_int_equal(a.n_ids, 5);
    answer_free(&a);
    assert_int_equal(backcast_prompt(s, bytes, sizeof bytes - 1, &go), 0); /* text is bytes */
    answer_read(c, s, &a);
    assert_true(a.tokens_in > 10);
    assert_int_equal(a.n_ids, 5);
    answer_free(&a);
    backcast_session_close(&s);
    so = answer_budget("counter_causal_fast", BUDGET); /* which a policy makes fit */
    answer_ask(c, &so, text, 3000, &go, &a);
    assert_true(a.prunes > 0 && a.tokens_cached <= BUDGET);
    assert_string_equal(a.reason, "length");
    answer_free(&a);
    free(text);
}

static void bad_sessions_and_prompts_harm_nobody(void **state)
{
    (void)state;
    struct dh *d = dh_start_long(NULL);
    backcast *c = NULL, *good = NULL;
    backcast_session *s = NULL;
    struct backcast_session_options so = answer_budget("counter_causal_fast", 96);
    struct backcast_generate_options go = answer_options(2000);
    struct answer want = {0}, got = {0};

    assert_int_equal(backcast_connect(&c, d->socket), 0);
    assert_int_equal(backcast_connect(&good, d->socket), 0);
    answer_ask(good, &so, "the tide turns a mill", 21, &go, &want);
    assert_int_equal(backcast_session_open(good, &so, &s), 0);
    assert_int_equal(backcast_prompt(s, "the tide turns a mill", 21, &go), 0);
    refuse_sessions(c);
    odd_prompts(c);
    answer_read(good, s, &got);
    assert_true(answer_equal(&got, &want));
    assert_int_equal(want.n_ids, 2000);
    answer_free(&want);
    answer_free(&got);
    backcast_disconnect(&c);
    backcast_disconnect(&good);
    dh_stop(&d);
}

/* The file of a loaded model is emptied, removed and replaced by another model's: answers stay what they were. */
static void a_loaded_model_needs_its_file_no_more(void **state)
{
    (void)state;
    struct dh *d = dh_start_long(NULL);
    backcast *c = NULL;
    struct backcast_session_options so = answer_budget("counter_causal_fast", 96);
    struct backcast_generate_options go = answer_options(300);
    struct answer want = {0};
    char path[64], copy[600];

    snprintf(path, sizeof path, "%s/model.gguf", d->dir);
    snprintf(copy, sizeof copy, "cp '%s' '%s'", TEST_VECTORS "/tiny-qwen2.gguf", path);
    assert_int_equal(backcast_connect(&c, d->socket), 0);
    answer_ask(c, &so, "the tide", 8, &go, &want);
    for (int change = 0; change < 4; change++) {
        struct answer got = {0};
        if (change == 0)
            assert_int_equal(truncate(path, 5000), 0);
        else if (change == 1)
            assert_int_equal(truncate(path, 0), 0);
        else if (change == 2)
            assert_int_equal(unlink(path), 0);
        else
            assert_int_equal(system(copy), 0);
        answer_ask(c, &so, "the tide", 8, &go, &got);
        assert_true(answer_equal(&got, &want));
        answer_free(&got);
    }
    answer_free(&want);
    backcast_disconnect(&c);
    dh_stop(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(damaged_models_harm_nobody),
        cmocka_unit_test(bad_sessions_and_prompts_harm_nobody),
        cmocka_unit_test(a_loaded_model_needs_its_file_no_more),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
