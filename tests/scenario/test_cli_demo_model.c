/* test_cli_demo_model.c: `backcast demo` with the default model: three sessions read a text longer than two of their
 * budgets, at the same time. It is the beginning of the text that `make demo` gives them whole. Needs the default model. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <unistd.h>
#include "command.h"
#include "models.h"

#define TEXT TEST_VECTORS "/long-prompt.txt"
#define BOTH_BREAK 6800 /* bytes: more than 1536 tokens */
#define ONE_BREAKS 3400 /* more than 768 */

static char text_path[] = "/tmp/bc-demo-XXXXXX";

/* The first n bytes of the text, as a file. */
static const char *beginning(size_t n)
{
    static char text[BOTH_BREAK];
    FILE *in = fopen(TEXT, "r"), *out = fopen(text_path, "w");

    assert_true(in != NULL && out != NULL && n <= sizeof(text));
    assert_int_equal(fread(text, 1, n, in), n);
    assert_int_equal(fwrite(text, 1, n, out), n);
    fclose(in);
    assert_int_equal(fclose(out), 0);
    return text_path;
}

/* The number behind a key in one line of JSON. */
static uint64_t number(const char *line, const char *key)
{
    char quoted[40];
    snprintf(quoted, sizeof(quoted), "\"%s\":", key);
    const char *at = strstr(line, quoted);
    if (at == NULL)
        fail_msg("no %s in %s", key, line);
    return strtoull(at + strlen(quoted), NULL, 10);
}

static void budgets_hold_and_the_full_cache_keeps_all(void **state)
{
    (void)state;
    static const uint64_t budgets[3] = {768, 1536, 0};
    const char *argv[] = {TEST_BIN "/backcast",  "demo", "--json", "--text",
                          beginning(BOTH_BREAK), NULL};
    struct prog_result r = prog_run(argv, NULL, NULL);

    if (r.exit_code != 0 || !json_valid(r.out, true))
        fail_msg("exit %d: %s %s", r.exit_code, r.out, r.err);
    char *line = strtok(r.out, "\n");
    for (int i = 0; i < 3; i++, line = strtok(NULL, "\n")) {
        assert_non_null(line);
        uint64_t in = number(line, "tokens_in"), out = number(line, "tokens_out");
        uint64_t pruned = number(line, "pruned"), cached = number(line, "cached");
        assert_int_equal(number(line, "budget_tokens"), budgets[i]);
        assert_true(in > budgets[1] + 50 && out >= 2);
        assert_null(strstr(line, "\"\"")); /* no empty answer */
        /* every token is in the cache or dropped; the end token between two turns is in neither
         * count, the last token of an answer is not in the cache */
        if (cached + pruned + 2 < in + out || cached + pruned > in + out + 2)
            fail_msg("%llu + %llu tokens, %llu cached, %llu pruned", (unsigned long long)in,
                     (unsigned long long)out, (unsigned long long)cached,
                     (unsigned long long)pruned);
        if (budgets[i] == 0) {
            assert_int_equal(pruned, 0);
            continue;
        }
        assert_true(cached <= budgets[i] && pruned > 0);
        assert_int_equal(number(line, "refreshes"), pruned / (budgets[i] / 4));
        assert_true(number(line, "live_after") < number(line, "live_before"));
        assert_true(number(line, "prune_micros") > 0);
    }
    assert_null(line);
    prog_free(&r);
}

static void people_see_answers_side_by_side(void **state)
{
    (void)state;
    const char *argv[] = {TEST_BIN "/backcast", "demo", "--text", beginning(ONE_BREAKS), NULL};
    struct prog_result r = prog_run(argv, NULL, NULL);

    assert_int_equal(r.exit_code, 0);
    assert_non_null(strstr(r.err, "tokens read"));
    assert_non_null(strstr(r.out, "budget 768 tokens, counter_causal_fast"));
    assert_non_null(strstr(r.out, "policy none, nothing dropped"));
    assert_non_null(strstr(r.out, "forgotten: \""));
    assert_non_null(strstr(r.out, "answer: "));
    assert_non_null(strstr(r.out, "ms/refr."));
    prog_free(&r);
}

int main(void)
{
    char path[4096];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(budgets_hold_and_the_full_cache_keeps_all),
        cmocka_unit_test(people_see_answers_side_by_side),
    };
    if (model_find(NULL, path, sizeof(path), NULL) < 0) {
        fprintf(stderr, "the default model is not here (backcast pull)\n");
        return 77;
    }
    close(mkstemp(text_path));
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(text_path);
    return rc;
}
