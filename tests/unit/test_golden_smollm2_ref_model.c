/* The default model on the ref backend: float maths over the file's 4-bit weights, as the goldens were made, so the answers
 * must all but coincide. Takes a few minutes, so it is left out of the sanitizer builds. */
#include "smollm2.h"

static void ref_agrees_with_the_goldens_of_the_default_model(void **state)
{
    struct smollm2 w = {.backend = "ref",
                        .limits = {.logprob = 0.01, .overlap = 0.99, .greedy = 60}};
    (void)state;

    smollm2_run(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ref_agrees_with_the_goldens_of_the_default_model),
    };
    char path[512];

    if (!smollm2_find(path, sizeof path)) {
        printf("skipped: no default model at %s (backcast pull fetches it)\n", path);
        return SKIPPED;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
