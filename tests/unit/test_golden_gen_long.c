/* The goldens' texts of every architecture at every cut on every backend, also on those that take their time: the portable path of
 * cpu, and the GPU backend on the shim. */
#include "golden_texts.h"

static void every_backend_meets_every_cut(void **state)
{
    (void)state;
    struct kn_options ko;
    for (unsigned i = 0; rig_backend(i, &ko); i++)
        for (size_t a = 0; a < ARRAY_LEN(archs); a++)
            check_arch(&ko, a, &texts_all);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_backend_meets_every_cut)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
