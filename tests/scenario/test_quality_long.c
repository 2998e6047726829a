/* test_quality_long.c: the cpu backend, as the daemon runs it, against ref (f32 throughout) with the default model: the
 * perplexity of 2,048 tokens differs by less than half a percent, and where one of twenty answers takes another way, it does
 * so at a token that ref itself nearly had not chosen, and takes ref's second. With activations of 16 bits the perplexity is
 * ref's and at least 18 answers are the same. tests/bench/bench_quality does it over more text and prints every figure. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include "../unit/smollm2.h"
#include "quality.h"

static char model[512];
enum { REF, CPU, WIDE, N_HOW };
static const struct quality_how how[N_HOW] = {{"ref", "f32", 1, 0},
                                              {"cpu", "f16", 2, 8},
                                              {"cpu", "f16", 2, 16}};

static void perplexity_is_the_references(void **state)
{
    (void)state;
    const char *files[] = {TEST_VECTORS "/long-prompt.txt", NULL};
    double nll[N_HOW] = {0}, p[N_HOW];
    int32_t *ids;
    uint32_t n = quality_tokens(model, files, 2 * QUALITY_WINDOW, &ids);

    assert_int_equal(n, 2 * QUALITY_WINDOW);
    for (int k = 0; k < N_HOW; k++) {
        struct eh *h = quality_open(model, &how[k]);
        for (uint32_t w = 0; w < 2; w++)
            nll[k] +=
                quality_nll(h, how[k].kv_type, ids + (size_t)w * QUALITY_WINDOW, QUALITY_WINDOW);
        eh_close(&h);
    }
    for (int k = 0; k < N_HOW; k++)
        p[k] = exp(nll[k] / (n - 2));
    print_message("perplexity: ref %.4f, cpu %.4f, with 16 bits %.4f\n", p[REF], p[CPU], p[WIDE]);
    assert_true(p[REF] > 5 && p[REF] < 100); /* it is a text to the model */
    assert_true(fabs(p[CPU] / p[REF] - 1) < 0.005);
    assert_true(fabs(p[WIDE] / p[REF] - 1) < 0.0005);
    free(ids);
}

static void answers_part_at_near_ties_only(void **state)
{
    (void)state;
    struct eh *h[N_HOW];
    uint32_t compared = 0, equal[N_HOW] = {0};

    for (int k = 0; k < N_HOW; k++)
        h[k] = quality_open(model, &how[k]);
    for (uint32_t i = 0; i < QUALITY_PROMPTS; i++) {
        struct quality_answer a[N_HOW];
        char what[32];
        snprintf(what, sizeof what, "question %u", i);
        for (int k = 0; k < N_HOW; k++) {
            quality_answer(h[k], how[k].kv_type, i, &a[k]);
            equal[k] += quality_equal(&a[REF], &a[k]);
        }
        compared += quality_part(&a[REF], &a[CPU], what);
        quality_part(&a[REF], &a[WIDE], what);
    }
    print_message(
        "%u tokens are the same before the first that is not; %u answers, with 16 bits %u\n",
        compared, equal[CPU], equal[WIDE]);
    assert_true(compared >= 5 * QUALITY_PROMPTS);
    assert_true(equal[WIDE] >= QUALITY_PROMPTS - 2);
    for (int k = 0; k < N_HOW; k++)
        eh_close(&h[k]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(perplexity_is_the_references),
        cmocka_unit_test(answers_part_at_near_ties_only),
    };
    if (!smollm2_find(model, sizeof(model)))
        return SKIPPED;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
