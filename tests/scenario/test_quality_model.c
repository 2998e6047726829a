/* test_quality_model.c: the short form of test_quality_long.c: the cpu backend's perplexity of 512 tokens beside what ref gave,
 * kept here since ref needs half a minute for it:
 *
 *     bench_quality MODEL tests/vectors/long-prompt.txt --tokens 512 --prompts 0     nll_ref_f32 1580.682487 */
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

#define TOKENS 512u
#define REF_NLL 1580.682487

static char model[512];

static void perplexity_is_the_references(void **state)
{
    (void)state;
    const char *files[] = {TEST_VECTORS "/long-prompt.txt", NULL};
    const struct quality_how how = {"cpu", "f16", 2, 0};
    int32_t *ids;
    uint32_t n = quality_tokens(model, files, TOKENS, &ids);
    struct eh *h = quality_open(model, &how);

    assert_int_equal(n, TOKENS);
    double ref = exp(REF_NLL / (n - 1)), cpu = exp(quality_nll(h, how.kv_type, ids, n) / (n - 1));
    print_message("perplexity: ref %.4f, cpu %.4f\n", ref, cpu);
    assert_true(fabs(cpu / ref - 1) < 0.005);
    eh_close(&h);
    free(ids);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(perplexity_is_the_references)};
    if (!smollm2_find(model, sizeof(model)))
        return SKIPPED;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
