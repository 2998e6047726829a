/* Instruction sets of the cpu backend: names, the choice among them, and products by tiles.
 *
 * Machines with AMX are few, so the tiles here are the model of kernels/cpu/tiles.h: it computes what the processor would
 * and aborts where the processor would fault. test_kn_linear holds isa "amx-model" (and "amx", where there is one) against
 * the integer rule like every other set. */
#define TILES_MODEL
#include "kernels_compare.h"
#include "../../kernels/cpu/amx.h"
#include "../../kernels/cpu/isa.h"
#include "../../kernels/cpu/tiles.h"

static const char *const names[][2] = {{"amx", "amx-int8"},
                                       {"avx512-bf16", "avx512-vnni-bf16"},
                                       {"avx512", "avx512-vnni"},
                                       {"avx2", "avx2"},
                                       {"scalar", "scalar"}};

static struct kn *open_isa(const char *isa, char *why, size_t why_len)
{
    struct kn_options opt = {.backend = "cpu", .isa = isa, .threads = 1};
    struct kn *kn = NULL;
    int code = kn_open(&kn, &opt, why, why_len);
    assert_int_equal(code, kn ? KN_OK : KN_EUNSUPPORTED);
    return kn;
}

/* Every name opens, under both its names, or the error lists those that do; the best of them is taken unasked. */
static void names_open_or_are_explained(void **state)
{
    (void)state;
    char why[200], all[200];
    const char *best = NULL;
    bool listed[KC_LEN(names)];
    assert_null(open_isa("z80", all, sizeof all));
    const char *list = strstr(all, "this machine has ");
    assert_true(strstr(all, "isa \"z80\"") && list);
    assert_null(strstr(all, "model")); /* not for users */
    for (size_t i = 0; i < KC_LEN(names); i++) {
        char lower[32];
        listed[i] = strstr(list, names[i][0]) != NULL;
        for (int k = 0; k < 2; k++) {
            struct kn *kn = open_isa(names[i][k], why, sizeof why);
            assert_int_equal(kn != NULL, listed[i]);
            if (kn) {
                assert_string_equal(kn->isa, names[i][1]);
                best = best ? best : names[i][1];
                kn_close(&kn);
                continue;
            }
            snprintf(lower, sizeof lower, "isa \"%s\"", names[i][k]);
            assert_true(strstr(why, lower) && strstr(why, list));
        }
    }
    assert_true(listed[KC_LEN(names) - 1]);
    struct kn *kn = open_isa(NULL, why, sizeof why);
    assert_non_null(kn);
    assert_string_equal(kn->isa, best);
    kn_close(&kn);
}

/* The list for users is this one, on every machine; what else is known is not listed. */
static void known_names_are_those_of_every_machine(void **state)
{
    (void)state;
    for (size_t i = 0; i < KC_LEN(names); i++) {
        assert_string_equal(kn_isa_name((unsigned)i), names[i][0]);
        assert_true(kn_isa_known(names[i][0]) && kn_isa_known(names[i][1]));
    }
    assert_null(kn_isa_name(KC_LEN(names)));
    assert_true(kn_isa_known("amx-model") && kn_isa_known("sm_90"));
    assert_false(kn_isa_known("z80") || kn_isa_known("") || kn_isa_known("avx"));
    assert_false(kn_isa_known("sm_") || kn_isa_known("sm_90a") || kn_isa_known("xsm_90"));
}

static bool have_backend(const char *name)
{
    for (unsigned i = 0; kn_backend_name(i); i++)
        if (strcmp(kn_backend_name(i), name) == 0)
            return true;
    return false;
}

/* A backend that has 8 bits only says so, it does not take them instead. */
static void the_gpu_backend_refuses_16_bits(void **state)
{
    (void)state;
    if (!have_backend("simt"))
        skip();
    for (uint32_t bits = 8; bits <= 16; bits += 8) {
        struct kn_options opt = {.backend = "simt", .activations = bits};
        struct kn *kn = NULL;
        char why[200];
        int code = kn_open(&kn, &opt, why, sizeof why);
        assert_int_equal(code, bits == 8 ? KN_OK : KN_EUNSUPPORTED);
        assert_int_equal(kn != NULL, bits == 8);
        if (kn) {
            assert_int_equal(kn->activations, 8);
            kn_close(&kn);
        } else {
            assert_string_equal(why, "backend \"simt\" rounds activations to 8 bits, not to 16");
        }
    }
}

/* Bits of activations: two numbers, the first unasked; ref rounds none and takes both. */
static void activations_are_8_or_16_bits(void **state)
{
    (void)state;
    static const struct {
        const char *backend;
        uint32_t asked, got; /* got 0: refused */
    } cases[] = {{"cpu", 0, 8},  {"cpu", 8, 8},   {"cpu", 16, 16}, {"cpu", 12, 0},
                 {"ref", 0, 32}, {"ref", 16, 32}, {"ref", 32, 0},  {"auto", 1, 0}};
    for (size_t i = 0; i < KC_LEN(cases); i++) {
        struct kn_options opt = {.backend = cases[i].backend,
                                 .threads = 1,
                                 .activations = cases[i].asked};
        struct kn *kn = NULL;
        char why[200], want[64];
        int code = kn_open(&kn, &opt, why, sizeof why);
        if (cases[i].got == 0) {
            snprintf(want, sizeof want, "activations: must be 8 or 16 bits, not %u",
                     opt.activations);
            assert_int_equal(code, KN_EINVALID);
            assert_string_equal(why, want);
            assert_null(kn);
            continue;
        }
        assert_int_equal(code, KN_OK);
        assert_int_equal(kn->activations, cases[i].got);
        kn_close(&kn);
    }
}

/* ---- tiles ------------------------------------------------------------------------------------------- */

static void the_model_multiplies(void **state)
{
    (void)state;
    static const struct tile_config shapes = {.palette = 1,
                                              .bytes = {12, 20, 12},
                                              .rows = {3, 3, 5}}; /* C 3x3, A 3x20, B 5x3x4 */
    static struct tile_room room;
    struct kc_rng r = {7};
    int8_t a[3][20];
    uint8_t b[5][12];
    int32_t c[3][3], got[3][4];
    for (size_t i = 0; i < sizeof a; i++)
        a[i / 20][i % 20] = (int8_t)kc_bits(&r);
    for (size_t i = 0; i < sizeof b; i++)
        b[i / 12][i % 12] = (uint8_t)kc_bits(&r);
    for (int i = 0; i < 9; i++)
        c[i / 3][i % 3] = (int32_t)kc_bits(&r);
    memset(got, 0x55, sizeof got);
    TILE_CONFIG(&room, &shapes);
    TILE_LOAD(&room, 0, c, 12);
    TILE_LOAD(&room, 1, a, 20);
    TILE_LOAD(&room, 2, b, 12);
    TILE_DOT(&room, 0, 1, 2);
    TILE_STORE(&room, 0, got, 16);
    TILE_RELEASE(&room);
    for (int i = 0; i < 3; i++) {
        for (int o = 0; o < 3; o++) {
            uint32_t want = (uint32_t)c[i][o];
            for (int k = 0; k < 20; k++)
                want += (uint32_t)(a[i][k] * b[k / 4][o * 4 + k % 4]);
            assert_int_equal(got[i][o], (int32_t)want);
        }
        assert_int_equal(got[i][3], 0x55555555); /* a row of 12 bytes */
    }
    assert_int_equal(room.model.config.palette, 0);
}

static struct tile_room *room_new(void)
{
    struct tile_room *room = aligned_alloc(64, sizeof *room);
    assert_non_null(room);
    memset(room, 0, sizeof *room);
    return room;
}

/* Rows that pay go through tiles, others not; without begin none does. */
static void rows_that_pay_take_tiles(void **state)
{
    (void)state;
    if (!cpuid_read().avx512)
        skip();
    struct tile_room *room = room_new();
    static _Alignas(64) uint8_t codes[3 * 512];
    static struct act_block x[3];
    static struct act_wide wide[3];
    static float d[3 * CPU_LANES], acc[CPU_ROWS * CPU_LANES];
    struct q8_tile t = {.form = FORM_BYTE,
                        .zero = 128,
                        .codes = codes,
                        .d = d,
                        .n_blocks = 3,
                        .x = x,
                        .acc = acc,
                        .acc_stride = CPU_LANES,
                        .tiles = room};
    for (int k = 0; k < 2; k++) {
        t.wide = k == 1; /* high and low bytes: twice as many */
        t.x = t.wide ? (const void *)wide : (const void *)x;
        for (t.n_rows = 1; t.n_rows <= CPU_ROWS; t.n_rows++) {
            uint64_t want = t.n_rows < CPU_TILE_ROWS_MIN ? 0 : t.wide ? 6 : 3;
            matmul_amx_model.begin(room);
            matmul_amx_model.q8(&t);
            assert_int_equal(room->model.n_dots, want);
            matmul_amx_model.end(room);
            matmul_amx_model.q8(&t);
            assert_int_equal(room->model.n_dots, 0);
        }
    }
    free(room);
}

/* amx_proves accepts the right kernel, on the model; it sees one wrong bit, and outlives a machine that faults. */
static bool spoil_wide;

static void q8_spoilt(const struct q8_tile *t)
{
    matmul_amx_model.q8(t);
    if (t->n_rows == CPU_ROWS && t->form == FORM_TABLE && t->wide == spoil_wide) {
        float *spoilt = t->acc + 5 * t->acc_stride + 7;
        *spoilt = nextafterf(*spoilt, 1e9f);
    }
}

static void q8_faulting(const struct q8_tile *t)
{
    (void)t;
    __asm__ volatile("ud2");
}

static void the_proof_sees_one_wrong_bit(void **state)
{
    (void)state;
    char why[160] = "";
    if (!cpuid_read().avx512)
        skip();
    assert_true(amx_proves(&matmul_amx_model, why, sizeof why));
    assert_string_equal(why, "");
    struct matmul_kernels wrong = matmul_amx_model;
    wrong.q8 = q8_spoilt;
    for (int k = 0; k < 2; k++) {
        spoil_wide = k == 1;
        assert_false(amx_proves(&wrong, why, sizeof why));
        assert_non_null(strstr(why, "wrong products"));
    }
    wrong.q8 = q8_faulting;
    assert_false(amx_proves(&wrong, why, sizeof why));
    assert_non_null(strstr(why, "faults on AMX tiles (signal 4)"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_open_or_are_explained),
        cmocka_unit_test(known_names_are_those_of_every_machine),
        cmocka_unit_test(activations_are_8_or_16_bits),
        cmocka_unit_test(the_gpu_backend_refuses_16_bits),
        cmocka_unit_test(the_model_multiplies),
        cmocka_unit_test(rows_that_pay_take_tiles),
        cmocka_unit_test(the_proof_sees_one_wrong_bit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
