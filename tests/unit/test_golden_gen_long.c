/* The goldens' texts at every cut on the backends that take their time: the portable path of cpu, and the GPU backend on
 * the shim. The others are through with them in test_golden_gen.c. */
#include "golden_texts.h"

static void slow_backends_meet_every_cut(void **state)
{
    (void)state;
    struct kn_options ko;
    for (unsigned i = 0; rig_backend(i, &ko); i++) {
        struct bench b;
        bench_open(&b, &ko, archs[0], "golden");
        bool slow = bench_is_slow(&b);
        bench_close(&b);
        for (size_t a = 0; slow && a < ARRAY_LEN(archs); a++)
            check_arch(&ko, a, &texts_all);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(slow_backends_meet_every_cut)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
