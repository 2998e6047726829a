/* The default model on the cpu backend, whose activations are 8-bit integers where weights are quantised: the answers are close, and
 * the scores keep nearly the same tokens. */
#include "smollm2.h"

/* Every instruction set of this machine but the scalar one, which the tiny models check. */
static void cpu_stays_close_to_the_goldens_of_the_default_model(void **state)
{
    struct kn_options ko;
    unsigned n_run = 0;
    (void)state;

    for (unsigned i = 0; rig_backend(i, &ko); i++) {
        struct smollm2 w = {.backend = "cpu",
                            .isa = ko.isa,
                            .limits = {.logprob = 0.08, .overlap = 0.94}};
        if (strcmp(ko.backend, "cpu") != 0 || (ko.isa && strcmp(ko.isa, "scalar") == 0))
            continue;
        smollm2_run(&w);
        n_run++;
    }
    assert_true(n_run > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cpu_stays_close_to_the_goldens_of_the_default_model),
    };
    char path[512];

    if (!smollm2_find(path, sizeof path)) {
        printf("skipped: no default model at %s (backcast pull fetches it)\n", path);
        return SKIPPED;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
