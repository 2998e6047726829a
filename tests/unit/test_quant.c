/* Block formats against floats from outside (quants.gguf), half floats against arithmetic, and the
 * pieces of the integer rule against their definitions. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include "base.h"
#include "gguf.h"
#include "kn_int8.h"
#include "kn_hadamard.h"
#include "kn_kv_addr.h"

static const enum kn_type all_types[] = {KN_F16,  KN_BF16, KN_Q8_0,   KN_Q4_0,  KN_Q4_1,
                                         KN_Q5_0, KN_Q5_1, KN_Q2_K,   KN_Q3_K,  KN_Q4_K,
                                         KN_Q5_K, KN_Q6_K, KN_IQ4_NL, KN_IQ4_XS};

#define GOLDEN_VALUES 2048

struct golden {
    struct gguf *g;
};

static int golden_open(void **state)
{
    static struct golden golden;
    struct err e;
    assert_int_equal(gguf_open(&golden.g, TEST_VECTORS "/quants.gguf", &e), 0);
    *state = &golden;
    return 0;
}

static int golden_close(void **state)
{
    struct golden *golden = *state;
    gguf_close(&golden->g);
    return 0;
}

static const void *golden_data(struct golden *golden, enum kn_type type, const char *part)
{
    char name[32];
    snprintf(name, sizeof name, "%s.%s", kn_type_find(type)->name, part);
    const struct gguf_tensor *t = gguf_tensor_find(golden->g, name);
    assert_non_null(t);
    assert_int_equal(t->dims[0] * t->dims[1], GOLDEN_VALUES);
    return t->data;
}

static void formats_expand_to_the_goldens_bits(void **state)
{
    float got[GOLDEN_VALUES];
    for (size_t i = 0; i < ARRAY_LEN(all_types); i++) {
        const void *packed = golden_data(*state, all_types[i], "packed");
        const float *want = golden_data(*state, all_types[i], "floats");
        kn_dequant(all_types[i], packed, GOLDEN_VALUES, got);
        for (size_t j = 0; j < GOLDEN_VALUES; j++)
            if (got[j] != want[j])
                fail_msg("%s value %zu: %a, expected %a", kn_type_find(all_types[i])->name, j,
                         (double)got[j], (double)want[j]);
    }
}

/* D * (u - zero) + M is the value, and a stretch that starts inside a file block is the same
 * stretch. */
static void blocks_come_apart_to_the_same_values(void **state)
{
    for (size_t i = 0; i < ARRAY_LEN(all_types); i++) {
        const struct kn_int8_format *f = kn_int8_format(all_types[i]);
        if (!f)
            continue;
        const void *packed = golden_data(*state, all_types[i], "packed");
        const float *want = golden_data(*state, all_types[i], "floats");
        struct kn_int8_block all[GOLDEN_VALUES / 32], some[5];
        kn_int8_unpack(f->type, packed, 0, ARRAY_LEN(all), all);
        kn_int8_unpack(f->type, packed, 7, 5, some);
        assert_memory_equal(all + 7, some, sizeof some);
        for (size_t j = 0; j < GOLDEN_VALUES; j++) {
            const struct kn_int8_block *b = &all[j / 32];
            size_t s = f->n_sub == 2 ? j % 32 / 16 : 0;
            float value = b->d[s] * (float)(b->u[j % 32] - f->zero) + b->m[s];
            assert_true(value == want[j]);
            assert_true(f->has_min || b->m[s] == 0.0f);
            assert_true(f->table || b->u[j % 32] < 1u << f->code_bits);
        }
    }
}

static void types_are_described_once(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(all_types); i++) {
        const struct kn_type_info *info = kn_type_find(all_types[i]);
        assert_non_null(info);
        assert_ptr_equal(kn_type_named(info->name), info);
        bool quantised = all_types[i] != KN_F16 && all_types[i] != KN_BF16;
        assert_int_equal(kn_int8_format(all_types[i]) != NULL, quantised);
    }
    assert_null(kn_type_find(999));
    assert_null(kn_type_named("Q9_9"));
    assert_null(kn_int8_format(KN_F32));
}

/* Every half is the f32 that it denotes, and comes back as itself. */
static void halves_widen_exactly(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 65536; h++) {
        float got = kn_f16_to_f32((uint16_t)h);
        int e = h >> 10 & 31, m = h & 1023;
        if (e == 31 && m != 0) {
            assert_true(isnan(got));
            assert_true(isnan(kn_f16_to_f32(kn_f32_to_f16(got))));
            continue;
        }
        double want = e == 31 ? INFINITY : e == 0 ? ldexp(m, -24) : ldexp(1024 + m, e - 25);
        assert_true(got == (float)(h >> 15 ? -want : want));
        assert_int_equal(kn_f32_to_f16(got), h);
    }
}

/* Between two neighbouring halves: just below, at and just above the middle. */
static void halves_round_to_nearest_even(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 0x7c00; h++) {
        float low = kn_f16_to_f32((uint16_t)h);
        float high = h == 0x7bff ? 65536.0f : kn_f16_to_f32((uint16_t)(h + 1));
        float middle = (low + high) / 2; /* exact: 12 bits */
        uint32_t even = h % 2 == 0 ? h : h + 1;
        assert_int_equal(kn_f32_to_f16(middle), even);
        assert_int_equal(kn_f32_to_f16(-middle), even | 0x8000);
        assert_int_equal(kn_f32_to_f16(nextafterf(middle, 0)), h);
        assert_int_equal(kn_f32_to_f16(nextafterf(middle, INFINITY)), h + 1);
    }
    assert_int_equal(kn_f32_to_f16(1e30f), 0x7c00);
    assert_int_equal(kn_f32_to_f16(-INFINITY), 0xfc00);
    assert_int_equal(kn_f32_to_f16(0x1p-149f), 0);
}

static void bfloats_round_to_nearest_even(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 0x7f80; h++) {
        float low = kn_bf16_to_f32((uint16_t)h), high = kn_bf16_to_f32((uint16_t)(h + 1));
        assert_int_equal(kn_f32_to_bf16(low), h);
        if (h == 0x7f7f)
            continue; /* the next one is infinity */
        float middle = low + (high - low) / 2;
        assert_int_equal(kn_f32_to_bf16(middle), h % 2 == 0 ? h : h + 1);
        assert_int_equal(kn_f32_to_bf16(-nextafterf(middle, 0)), h | 0x8000);
        assert_int_equal(kn_f32_to_bf16(nextafterf(middle, INFINITY)), h + 1);
    }
    assert_true(isnan(kn_bf16_to_f32(kn_f32_to_bf16(NAN))));
    assert_int_equal(kn_f32_to_bf16(INFINITY), 0x7f80);
}

static void activations_follow_the_rule(void **state)
{
    (void)state;
    float x[96];
    for (int i = 0; i < 32; i++) {
        x[i] = (float)(i * i - 300) / 7.0f;
        x[32 + i] = 0.0f;
        x[64 + i] = i == 3 ? -127.0f : (float)i + 0.5f; /* amax 127: ties, to even */
    }
    int8_t a[96];
    float da[3];
    int16_t asum[6];
    kn_int8_quantise(x, 96, a, da, asum);
    float amax = (31 * 31 - 300) / 7.0f;
    assert_true(da[0] == amax / 127.0f);
    int sums[6] = {0};
    for (int i = 0; i < 96; i++) {
        assert_in_range(a[i] + 127, 0, 254);
        sums[i / 16] += a[i];
        assert_true(fabsf((float)a[i] * da[i / 32] - x[i]) <= da[i / 32] * 0.5001f);
    }
    for (int i = 0; i < 6; i++)
        assert_int_equal(asum[i], sums[i]);
    assert_int_equal(a[31], 127);
    assert_true(da[1] == 0.0f && a[40] == 0);
    assert_true(da[2] == 1.0f);
    assert_int_equal(a[64 + 3], -127);
    assert_int_equal(a[64 + 4], 4);
    assert_int_equal(a[64 + 5], 6);
}

/* Rule 4: finer codes, and two bytes that are each as small as a code of rule 1. */
static void wide_activations_follow_the_rule(void **state)
{
    (void)state;
    float x[96];
    for (int i = 0; i < 32; i++) {
        x[i] = (float)(i * i - 300) / 7.0f;
        x[32 + i] = 1e-31f;                                      /* below 2^-100 */
        x[64 + i] = i == 3 ? -32512.0f : 7.0f * (float)i + 0.5f; /* ties, to even */
    }
    int16_t a[96];
    float da[3];
    int32_t asum[6], sums[6] = {0};
    kn_int16_quantise(x, 96, a, da, asum);
    assert_true(da[0] == (31 * 31 - 300) / 7.0f / 32512.0f);
    assert_true(da[1] == 0.0f && da[2] == 1.0f);
    for (int i = 0; i < 96; i++) {
        sums[i / 16] += a[i];
        if (i / 32 != 1)
            assert_true(fabsf((float)a[i] * da[i / 32] - x[i]) <= da[i / 32] * 0.505f);
    }
    for (int i = 0; i < 6; i++)
        assert_int_equal(asum[i], sums[i]);
    assert_int_equal(a[31], 32512);
    assert_int_equal(a[40], 0);
    assert_int_equal(a[64 + 3], -32512);
    assert_int_equal(a[64 + 4], 28);
    assert_int_equal(a[64 + 5], 36);
    for (int v = -KN_INT16_MAX; v <= KN_INT16_MAX; v++) {
        int high = kn_int16_high(v), low = kn_int16_low(v);
        assert_true(high >= -127 && high <= 127 && low >= -127 && low <= 127);
        assert_int_equal(KN_INT16_BASE * high + low, v);
    }
}

/* The integer product is the exact product of what weights and activations were rounded to, up to
 * f32's sums. */
static void integer_product_is_near_the_exact_one(void **state)
{
    for (size_t i = 0; i < ARRAY_LEN(all_types); i++) {
        if (!kn_int8_format(all_types[i]))
            continue;
        const struct kn_type_info *info = kn_type_find(all_types[i]);
        size_t bytes = GOLDEN_VALUES / info->block * info->bytes;
        struct kn_tensor w = {all_types[i], 4, 512, golden_data(*state, all_types[i], "packed"),
                              bytes};
        const float *values = golden_data(*state, all_types[i], "floats");
        float x[2][512], da[16], out[2][4];
        int8_t a[512];
        int16_t asum[32];
        for (int k = 0; k < 512; k++) {
            x[0][k] = sinf((float)k * 1.7f) * 3.0f;
            x[1][k] = k == 77 ? 20.0f : cosf((float)k);
        }
        kn_ref_linear_q8(&w, x[0], 2, out[0]);
        for (int r = 0; r < 2; r++) {
            kn_int8_quantise(x[r], 512, a, da, asum);
            for (int o = 0; o < 4; o++) {
                double want = 0, size = 0;
                for (int k = 0; k < 512; k++) {
                    double t = (double)values[o * 512 + k] * a[k] * (double)da[k / 32];
                    want += t;
                    size += fabs(t);
                }
                assert_true(fabs(out[r][o] - want) <= 2e-6 * size);
            }
        }
    }
}

static void pages_hold_what_they_say(void **state)
{
    (void)state;
    struct kn_kv kv = {NULL, 0, 3, 2, 16, 48, KN_F16};
    assert_int_equal(kn_kv_row_bytes(&kv), 3 * 2 * 2 * 16 * 2 + 48 * 2 + 4);
    assert_int_equal(kn_kv_page_bytes(&kv), 64 * kn_kv_row_bytes(&kv));
    kv.stride = 1 << 20;
    kv.base = (void *)(uintptr_t)0x100000;
    uintptr_t page2 = 0x100000 + 2 * kv.stride;
    assert_int_equal((uintptr_t)kn_kv_row(&kv, 2 * 64 + 5, 1, KN_KV_V, 1),
                     page2 + (((1 * 2 + 1) * 2 + 1) * 64 + 5) * 16 * 2);
    assert_int_equal((uintptr_t)kn_kv_hidden(&kv, 2 * 64 + 5),
                     page2 + 3 * 2 * 2 * 64 * 16 * 2 + 5 * 48 * 2);
    assert_int_equal((uintptr_t)kn_kv_hidden_scale(&kv, 2 * 64 + 63),
                     page2 + kn_kv_page_bytes(&kv) - 4);
    kv.type = KN_F32;
    kv.d_hidden = 0;
    assert_int_equal(kn_kv_row_bytes(&kv), 3 * 2 * 2 * 16 * 4);
    kv.type = KN_BF16;
    assert_int_equal(kn_kv_row_bytes(&kv), 3 * 2 * 2 * 16 * 2);
    kv = (struct kn_kv){kv.base, kv.stride, 3, 2, 64, 48, KN_Q8_0};
    assert_int_equal(kn_kv_row_bytes(&kv), 3 * 2 * 2 * 2 * 34 + 48 * 2 + 4);
    assert_int_equal((uintptr_t)kn_kv_row(&kv, 2 * 64 + 5, 1, KN_KV_V, 1),
                     page2 + (((1 * 2 + 1) * 2 + 1) * 64 + 5) * 68);
    assert_int_equal((uintptr_t)kn_kv_hidden(&kv, 2 * 64 + 5),
                     page2 + 3 * 2 * 2 * 64 * 68 + 5 * 48 * 2);
    assert_int_equal((uintptr_t)kn_kv_hidden_scale(&kv, 2 * 64 + 63),
                     page2 + kn_kv_page_bytes(&kv) - 4);
    kv.type = KN_Q8_Q4; /* keys of 68 bytes, each with its value of 36 behind it */
    assert_int_equal(kn_kv_row_bytes(&kv), 3 * 2 * (68 + 36) + 48 * 2 + 4);
    for (uint32_t part = KN_KV_K; part <= KN_KV_V; part++)
        assert_int_equal((uintptr_t)kn_kv_row(&kv, 2 * 64 + 5, 1, part, 1),
                         page2 + ((1 * 2 + 1) * 64 + 5) * 104 + part * 68);
    assert_int_equal((uintptr_t)kn_kv_hidden(&kv, 2 * 64 + 5),
                     page2 + 3 * 2 * 64 * 104 + 5 * 48 * 2);
}

static void types_of_keys_say_what_they_need(void **state)
{
    (void)state;
    char why[160] = "";
    struct kn device = {.name = "plain"}, host = {.name = "cpu", .kv_types = 1u << KN_Q8_0};
    for (unsigned i = 0; kn_kv_type_at(i) != NULL; i++) {
        const struct kn_kv_type *t = kn_kv_type_at(i);
        assert_ptr_equal(kn_kv_type_named(t->name), t);
        assert_ptr_equal(kn_kv_type_find(t->type), t);
        assert_int_equal(kn_kv_check(&device, t->type, 64, why, sizeof why),
                         t->type == KN_F16 || t->type == KN_F32 ? KN_OK : KN_EUNSUPPORTED);
    }
    assert_string_equal(why, "backend \"plain\" has no keys and values of type q8_q4");
    assert_int_equal(kn_kv_check(&host, KN_Q8_0, 96, why, sizeof why), KN_OK);
    assert_int_equal(kn_kv_check(&host, KN_Q8_0, 80, why, sizeof why), KN_EUNSUPPORTED);
    assert_string_equal(why, "type q8_0 needs heads of a multiple of 32 values; these have 80");
    assert_null(kn_kv_type_named("q4_0"));
    assert_null(kn_kv_type_find(KN_Q4_0));
}

/* Half a step of the block, and what the rounding of its scale adds: 127 times half a unit of a half, at the smallest. */
static void q8_lines_are_as_near_as_they_can_be(void **state)
{
    (void)state;
    for (int e = -14; e < 16; e++)
        for (int seed = 0; seed < 40; seed++) {
            float x[32], top = 0.0f, back[32];
            uint8_t block[34];
            for (int i = 0; i < 32; i++) {
                x[i] = ldexpf((float)((i * 7919 + seed * 104729 + 13) % 2001 - 1000) / 1000.0f, e);
                top = fmaxf(top, fabsf(x[i]));
            }
            kn_kv_q8_put(x, block);
            kn_dequant(KN_Q8_0, block, 32, back);
            for (int i = 0; i < 32; i++)
                assert_true(fabsf(back[i] - x[i]) <= 0.57f * top / 127.0f + 127.0f * 0x1p-25f);
        }
}

/* Half a step, a whole one on the side that has only 7 of them, and what the rounding of the scale adds. */
static void q4_lines_are_as_near_as_they_can_be(void **state)
{
    (void)state;
    for (int e = -10; e < 16; e++)
        for (int seed = 0; seed < 40; seed++) {
            float x[32], top = 0.0f, back[32];
            uint8_t block[18];
            for (int i = 0; i < 32; i++) {
                x[i] = ldexpf((float)((i * 7919 + seed * 104729 + 13) % 2001 - 1000) / 1000.0f, e);
                top = fabsf(x[i]) > fabsf(top) ? x[i] : top;
            }
            kn_kv_q4_put(x, block);
            kn_dequant(KN_Q4_0, block, 32, back);
            for (int i = 0; i < 32; i++) {
                bool far_side = x[i] / top < -7.5f / 8.0f;
                assert_true(fabsf(back[i] - x[i]) <=
                            (far_side ? 1.01f : 0.51f) * fabsf(top) / 8.0f);
            }
        }
}

/* On and off is nothing but rounding, lengths stay, and a value that is one large dim, or all dims alike, needs no more
 * levels than another one. */
static void a_turn_spreads_what_is_large(void **state)
{
    (void)state;
    static const uint32_t lens[] = {32, 64, 96, 128, 160, 256};
    for (size_t k = 0; k < ARRAY_LEN(lens); k++)
        for (uint32_t kind = 0; kind < 2 + lens[k]; kind++) {
            uint32_t n = lens[k], block = n & -n;
            float x[256], y[256], top = 0.0f, most = 0.0f;
            double was = 0, is = 0;
            for (uint32_t i = 0; i < n; i++)
                y[i] = x[i] = kind == 0                 ? 1.0f
                              : kind == 1               ? (float)((int)(i * 7919 % 201) - 100)
                              : i == (uint32_t)kind - 2 ? 100.0f
                                                        : 0.0f;
            kn_hadamard_on(y, n);
            for (uint32_t i = 0; i < n; i++) {
                was += (double)x[i] * (double)x[i];
                is += (double)y[i] * (double)y[i];
                most = fmaxf(most, fabsf(y[i]));
                top = fmaxf(top, fabsf(x[i]));
            }
            assert_true(fabs(is / was - 1) < 1e-5);
            assert_true(most <= 4.0f * (float)sqrt(was / (kind > 1 ? block : n)));
            kn_hadamard_off(y, n);
            for (uint32_t i = 0; i < n; i++)
                assert_true(fabsf(y[i] - x[i]) <= 1e-6f * top);
        }
}

static void hidden_scale_fits_every_row(void **state)
{
    (void)state;
    for (int e = -149; e <= 127; e++)
        for (float f = 1.0f; f < 2.0f; f += 0.49f) {
            float max_abs = ldexpf(f, e), scale = kn_kv_scale_for(max_abs);
            assert_true(isnormal(scale) && isnormal(1.0f / scale));
            assert_true(max_abs * (1.0f / scale) < 32768.0f);
            assert_true(scale == 0x1p-126f || max_abs / scale >= 16384.0f);
        }
    assert_true(kn_kv_scale_for(0.0f) > 0.0f);
    assert_true(kn_kv_scale_for(INFINITY) == 1.0f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(formats_expand_to_the_goldens_bits),
        cmocka_unit_test(blocks_come_apart_to_the_same_values),
        cmocka_unit_test(types_are_described_once),
        cmocka_unit_test(halves_widen_exactly),
        cmocka_unit_test(halves_round_to_nearest_even),
        cmocka_unit_test(bfloats_round_to_nearest_even),
        cmocka_unit_test(activations_follow_the_rule),
        cmocka_unit_test(wide_activations_follow_the_rule),
        cmocka_unit_test(integer_product_is_near_the_exact_one),
        cmocka_unit_test(pages_hold_what_they_say),
        cmocka_unit_test(types_of_keys_say_what_they_need),
        cmocka_unit_test(q8_lines_are_as_near_as_they_can_be),
        cmocka_unit_test(q4_lines_are_as_near_as_they_can_be),
        cmocka_unit_test(a_turn_spreads_what_is_large),
        cmocka_unit_test(hidden_scale_fits_every_row),
    };
    return cmocka_run_group_tests(tests, golden_open, golden_close);
}
