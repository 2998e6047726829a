/* test_cuda_attention.c over the whole grid: every head size at every length, both types of pages, every size of group with each
 * head size, views and orders of slots in turn. */
#include "cuda_attention.h"

static void every_head_size_at_every_length(void **state)
{
    (void)state;
    static const uint32_t dims[] = {16, 32, 64, 80, 96, 128, 256},
                          lengths[] = {1, 2, 63, 64, 65, 700};
    unsigned turn = 0;
    for (size_t d = 0; d < KC_LEN(dims); d++)
        for (size_t n = 0; n < KC_LEN(lengths); n++)
            for (int half = 0; half < 2; half++, turn++) {
                struct kca_shape s = {.d = dims[d],
                                      .n_kv = 1 + turn % 2,
                                      .group = 1 + turn % 3,
                                      .n = lengths[n],
                                      .type = half ? KN_F16 : KN_F32,
                                      .slots = (enum kc_slots)(turn % 3),
                                      .deviation = 1.0f};
                if (s.n < 700)
                    run(s, (enum kca_view)(turn % 4), 0, 0);
                else /* some rows of it: a decode's, and a block's */
                    run(s, (enum kca_view)(turn % 4), half ? 699 : 300, half ? 1 : 20);
            }
}

static void every_group_with_every_head_size(void **state)
{
    (void)state;
    static const uint32_t dims[] = {16, 32, 64, 80, 96, 128, 256};
    for (uint32_t group = 1; group <= 8; group++)
        for (size_t d = 0; d < KC_LEN(dims); d++)
            run((struct kca_shape){.d = dims[d],
                                   .n_kv = 2,
                                   .group = group,
                                   .n = 66,
                                   .type = (group + d) % 4 == 0 ? KN_F32 : KN_F16,
                                   .slots = KC_SCATTERED,
                                   .deviation = 1.0f},
                (enum kca_view)((group + d) % 4), d % 2 ? 0 : 60, d % 2 ? 9 : 6);
}

static void long_inputs_of_every_head_size(void **state)
{
    (void)state;
    static const uint32_t dims[] = {40, 64, 72, 80, 96, 112, 128};
    for (size_t d = 0; d < KC_LEN(dims); d++)
        run((struct kca_shape){.d = dims[d],
                               .n_kv = 1 + (uint32_t)d % 2,
                               .group = 1 + (uint32_t)d,
                               .n = 1030 / (1 + (uint32_t)d),
                               .type = KN_F16,
                               .slots = KC_SCATTERED,
                               .deviation = 1.0f},
            (enum kca_view)(d % 4), 0, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_head_size_at_every_length),
        cmocka_unit_test(every_group_with_every_head_size),
        cmocka_unit_test(long_inputs_of_every_head_size),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
