/* test_cuda_kv.c's attention over the whole grid: bf16 and q8_0 with every head size at every length, every size of group with
 * each head size, and inputs of many rows; views and orders of slots in turn. */
#include "cuda_attention.h"

static const enum kn_type types[] = {KN_BF16, KN_Q8_0};
static const uint32_t dims[] = {16, 32, 64, 80, 96, 128, 256};

static bool fits(enum kn_type type, uint32_t d)
{
    return d % kn_kv_type_find(type)->block == 0;
}

static void every_head_size_at_every_length(void **state)
{
    (void)state;
    static const uint32_t lengths[] = {1, 2, 63, 64, 65, 700};
    unsigned turn = 0;
    for (size_t d = 0; d < KC_LEN(dims); d++)
        for (size_t n = 0; n < KC_LEN(lengths); n++)
            for (size_t t = 0; t < KC_LEN(types); t++) {
                struct kca_shape s = {.d = dims[d],
                                      .n_kv = 1 + turn % 2,
                                      .group = 1 + turn % 3,
                                      .n = lengths[n],
                                      .type = types[t],
                                      .slots = (enum kc_slots)(turn % 3),
                                      .deviation = 1.0f};
                if (!fits(s.type, s.d))
                    continue;
                if (s.n < 700)
                    run(s, (enum kca_view)(turn % 4), 0, 0);
                else /* some rows of it: a decode's, and a block's */
                    run(s, (enum kca_view)(turn % 4), turn % 2 ? 699 : 300, turn % 2 ? 1 : 20);
                turn++;
            }
}

static void every_group_with_every_head_size(void **state)
{
    (void)state;
    for (uint32_t group = 1; group <= 8; group++)
        for (size_t d = 0; d < KC_LEN(dims); d++)
            run((struct kca_shape){.d = dims[d],
                                   .n_kv = 2,
                                   .group = group,
                                   .n = 66,
                                   .type = types[fits(KN_Q8_0, dims[d]) && (group + d) % 3 > 0],
                                   .slots = KC_SCATTERED,
                                   .deviation = 1.0f},
                (enum kca_view)((group + d) % 4), d % 2 ? 0 : 60, d % 2 ? 9 : 6);
}

static void long_inputs_of_every_head_size(void **state)
{
    (void)state;
    static const uint32_t sizes[] = {40, 64, 96, 112, 128, 160};
    for (size_t d = 0; d < KC_LEN(sizes); d++)
        run((struct kca_shape){.d = sizes[d],
                               .n_kv = 1,
                               .group = 1 + (uint32_t)d,
                               .n = 600 / (1 + (uint32_t)d),
                               .type = types[fits(KN_Q8_0, sizes[d])],
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
