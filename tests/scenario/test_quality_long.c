/* test_quality_long.c: the cpu backend, as the daemon runs it, against ref (f32 throughout) with the default model: the
 * perplexity of 2,048 tokens differs by less than half a percent, and where one of twenty answers takes another way, it does
 * so at a token that ref itself nearly had not chosen. tests/bench/bench_quality does it over more text and prints every figure. */
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
static const struct quality_how how[2] = {{"ref", "f32", 1}, {"cpu", "f16", 2}};

static void perplexity_is_the_references(void **state)
{
    (void)state;
    const char *files[] = {TEST_VECTORS "/long-prompt.txt", NULL};
    double nll[2] = {0, 0};
    int32_t *ids;
    uint32_t n = quality_tokens(model, files, 2 * QUALITY_WINDOW, &ids);

    assert_int_equal(n, 2 * QUALITY_WINDOW);
    for (int k = 0; k < 2; k++) {
        struct eh *h = quality_open(model, &how[k]);
        for (uint32_t w = 0; w < 2; w++)
            nll[k] +=
                quality_nll(h, how[k].kv_type, ids + (size_t)w * QUALITY_WINDOW, QUALITY_WINDOW);
        eh_close(&h);
    }
    double ref = exp(nll[0] / (n - 2)), cpu = exp(nll[1] / (n - 2));
    print_message("perplexity: ref %.4f, cpu %.4f\n", ref, cpu);
    assert_true(ref > 5 && ref < 100); /* it is a text to the model */
    assert_true(fabs(cpu / ref - 1) < 0.005);
    free(ids);
}

/* A perturbation of the logits below half of LEAD cannot turn a choice whose lead is larger. */
#define LEAD 0.5f

static void answers_part_at_near_ties_only(void **state)
{
    (void)state;
    struct eh *h[2];
    uint32_t compared = 0;

    for (int k = 0; k < 2; k++)
        h[k] = quality_open(model, &how[k]);
    for (uint32_t i = 0; i < QUALITY_PROMPTS; i++) {
        struct quality_answer a[2];
        for (int k = 0; k < 2; k++)
            quality_answer(h[k], how[k].kv_type, i, &a[k]);
        uint32_t same = quality_common(&a[0], &a[1]);
        compared += same;
        if (same < a[0].n && a[0].lead[same] >= LEAD)
            fail_msg("question %u: token %u led by %.3f nats", i, same, (double)a[0].lead[same]);
    }
    print_message("%u tokens are the same before the first that is not\n", compared);
    assert_true(compared >= 5 * QUALITY_PROMPTS);
    for (int k = 0; k < 2; k++)
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
