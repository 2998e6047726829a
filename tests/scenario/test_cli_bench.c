/* test_cli_bench.c: `backcast bench` with a real private daemon and a tiny model: which figures it gives, that
 * they are figures, and what it refuses. How large they are is no matter of tests. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "command.h"
#include "daemon_harness.h"

#define COMMAND TEST_BIN "/backcast"

static struct test_home home;
static char model[FOLDER_PATH + 16];

static const char *const keys[] = {"prefill_512_tps",
                                   "prefill_2048_tps",
                                   "decode_tps",
                                   "decode_512_tps",
                                   "decode_2048_tps",
                                   "refresh_full_logit_512_ms",
                                   "refresh_full_logit_2048_ms",
                                   "refresh_full_logprob_512_ms",
                                   "refresh_full_logprob_2048_ms",
                                   "refresh_fast_logit_512_ms",
                                   "refresh_fast_logit_2048_ms",
                                   "refresh_fast_logprob_512_ms",
                                   "refresh_fast_logprob_2048_ms",
                                   "decode_8_tps"};
#define N_KEYS (sizeof(keys) / sizeof(keys[0]))

static int start(void **state)
{
    (void)state;
    home_make(&home);
    snprintf(model, sizeof(model), "%s/model.gguf", home.dir);
    dh_long_model(model);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    home_drop(&home);
    return 0;
}

static struct prog_result bench(const char *a, const char *b, const char *c)
{
    const char *argv[] = {COMMAND, "bench", "-m", model, "--threads", "1", "-q", a, b, c, NULL};
    return prog_run(argv, home.env, NULL);
}

static void must(struct prog_result *r, int code, const char *err)
{
    if (r->exit_code != code || (err != NULL && strstr(r->err, err) == NULL))
        fail_msg("exit %d, not %d\n--- out\n%s\n--- err\n%s", r->exit_code, code, r->out, r->err);
}

/* The value behind "key": in a flat object; the keys are looked for with their quotes, so none is found inside
 * another. */
static double value_of(const char *json, const char *key)
{
    char quoted[64];
    snprintf(quoted, sizeof(quoted), "\"%s\":", key);
    const char *at = strstr(json, quoted);
    if (at == NULL)
        fail_msg("no %s in %s", key, json);
    assert_null(strstr(at + 1, quoted));
    return strtod(at + strlen(quoted), NULL);
}

static void json_has_every_figure_and_nothing_else(void **state)
{
    (void)state;
    struct prog_result r = bench("--json", "--rounds", "1");
    size_t colons = 0;

    must(&r, 0, NULL);
    assert_true(json_valid(r.out, false));
    for (size_t i = 0; i < N_KEYS; i++)
        assert_true(value_of(r.out, keys[i]) > 0);
    for (const char *p = r.out; (p = strchr(p, ':')) != NULL; p++)
        colons++;
    assert_int_equal(colons, N_KEYS);
    assert_int_equal(r.err_len, 0);
    /* all layers with a product for every row cost more than the last one without its MLP */
    assert_true(value_of(r.out, "refresh_full_logit_2048_ms") >
                value_of(r.out, "refresh_fast_logit_2048_ms"));
    prog_free(&r);
}

static void only_gives_a_part_for_people(void **state)
{
    (void)state;
    struct prog_result r = bench("--only", "fast_logit_512", "--rounds=3");
    double median, low, high;

    must(&r, 0, NULL);
    assert_int_equal(sscanf(r.out, "fast refresh, logit, 512 tokens %lf ms (%lf .. %lf)", &median,
                            &low, &high),
                     3);
    assert_true(0 < low && low <= median && median <= high);
    assert_ptr_equal(strchr(r.out, '\n'), r.out + r.out_len - 1); /* one line */
    prog_free(&r);
}

static void what_cannot_be_measured_is_refused(void **state)
{
    (void)state;
    struct prog_result r = bench("--rounds", "0", NULL);
    must(&r, 2, "--rounds: '0' is not a whole number, 1 to 4294967294");
    prog_free(&r);
    r = bench("--rounds", "101", NULL);
    must(&r, 2, "--rounds: 101 is not from 1 to 100");
    prog_free(&r);
    r = bench("--only", "prefil_", NULL);
    must(&r, 2, "--only: no figure has 'prefil_'");
    prog_free(&r);
    const char *argv[] = {COMMAND, "bench", "-m", TEST_VECTORS "/tiny-llama.gguf", NULL};
    r = prog_run(argv, home.env, NULL);
    must(&r, 1, "tokens at most; the figures need 2304");
    prog_free(&r);
}

/* The script of all measurements: before any step it looks whether there is a build to measure. */
static void the_script_wants_a_build(void **state)
{
    (void)state;
    static const char *const wrong[] = {"--help", "", TEST_VECTORS};
    for (unsigned i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        const char *argv[] = {TEST_VECTORS "/../bench/run.sh", wrong[i], NULL};
        struct prog_result r = prog_run(argv, home.env, NULL);
        must(&r, 2, "usage: run.sh BUILD [STEP...]");
        assert_string_equal(r.out, "");
        prog_free(&r);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(json_has_every_figure_and_nothing_else),
        cmocka_unit_test(only_gives_a_part_for_people),
        cmocka_unit_test(what_cannot_be_measured_is_refused),
        cmocka_unit_test(the_script_wants_a_build),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
