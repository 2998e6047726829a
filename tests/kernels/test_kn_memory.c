/* Opening backends, buffers, arenas, and the counters: exact to the byte at every step. */
#include "kernels_compare.h"
#include <unistd.h>

/* An allocation that no machine can give is part of these tests: sanitizers must refuse it like
 * malloc. */
const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
    return "allocator_may_return_null=1";
}

/* Every backend of the build opens, but a GPU's needs a GPU: then it says what is missing. */
static bool opens(const char *name)
{
    struct kn_options opt = {.backend = name, .threads = 1};
    struct kn *kn = NULL;
    char why[200] = "";
    if (kn_open(&kn, &opt, why, sizeof why) == KN_OK) {
        kn_close(&kn);
        return true;
    }
    assert_string_equal(name, "cuda");
    assert_true(why[0] != '\0');
    return false;
}

static void backends_open_by_name_or_say_why(void **state)
{
    (void)state;
    struct kn *kn = NULL, *untouched = (struct kn *)(uintptr_t)8;
    char why[200] = "";
    bool ref = false;
    for (unsigned i = 0; kn_backend_name(i); i++)
        ref |= strcmp(kn_backend_name(i), "ref") == 0;
    assert_true(ref);
    assert_null(kn_backend_name(1000));

    struct kn_options opt = {.backend = "auto", .threads = 1};
    assert_int_equal(kn_open(&kn, &opt, why, sizeof why), KN_OK);
    unsigned best = 0;
    while (!opens(kn_backend_name(best)))
        best++;
    assert_string_equal(kn->name, kn_backend_name(best));
    kn_close(&kn);
    assert_null(kn);
    kn_close(&kn); /* nothing to close */
    opt.backend = NULL;
    assert_int_equal(kn_open(&kn, &opt, NULL, 0), KN_OK);
    kn_close(&kn);

    opt = (struct kn_options){.backend = "abacus", .threads = 1};
    assert_int_equal(kn_open(&untouched, &opt, why, sizeof why), KN_EINVALID);
    assert_ptr_equal(untouched, (void *)(uintptr_t)8);
    assert_non_null(strstr(why, "abacus"));
    assert_non_null(strstr(why, "ref"));
    for (unsigned i = 0; kn_backend_name(i); i++) {
        if (!opens(kn_backend_name(i)))
            continue;
        opt = (struct kn_options){.backend = kn_backend_name(i), .isa = "z80", .threads = 1};
        why[0] = '\0';
        assert_int_equal(kn_open(&untouched, &opt, why, sizeof why), KN_EUNSUPPORTED);
        assert_ptr_equal(untouched, (void *)(uintptr_t)8);
        assert_non_null(strstr(why, "z80"));
    }
    opt = (struct kn_options){.backend = "ref", .isa = "scalar", .threads = 4};
    assert_int_equal(kn_open(&kn, &opt, why, sizeof why), KN_OK);
    assert_string_equal(kn->isa, "scalar");
    kn_close(&kn);
}

static void threads_are_what_was_asked(void **state)
{
    (void)state;
    for (unsigned i = 0; kn_backend_name(i); i++)
        for (uint32_t threads = 0; threads <= 5; threads += 1 + threads / 3) {
            struct kn_options opt = {.backend = kn_backend_name(i), .threads = threads};
            struct kn *kn = NULL;
            char why[200];
            if (!opens(kn_backend_name(i)))
                continue;
            assert_int_equal(kn_open(&kn, &opt, why, sizeof why), KN_OK);
            bool ref = kc_is_ref(kn) || kc_is_device(kn);
            assert_in_range(kn->n_threads, ref || !threads ? 1 : threads, ref ? 1 : 64);
            kn_close(&kn);
        }
}

static bool all_are(struct kn *kn, const void *dev, size_t bytes, uint8_t value)
{
    uint8_t *host = malloc(bytes);
    bool same = true;
    assert_non_null(host);
    kn->ops->download(kn, host, dev, bytes);
    for (size_t i = 0; i < bytes; i++)
        same &= host[i] == value;
    free(host);
    return same;
}

static void buffers_are_zeroed_aligned_and_counted(void **state)
{
    (void)state;
    static const size_t sizes[] = {1, 63, 64, 4096, 1000003};
    for (unsigned i = 0; i < kc_all.n; i++) {
        struct kn *kn = kc_all.kn[i];
        void *buf[KC_LEN(sizes)];
        size_t total = 0;
        for (size_t s = 0; s < KC_LEN(sizes); s++) {
            assert_int_equal(kn->ops->buf_alloc(kn, sizes[s], &buf[s]), KN_OK);
            assert_int_equal((uintptr_t)buf[s] % 64, 0);
            assert_true(all_are(kn, buf[s], sizes[s], 0));
            total += sizes[s];
            assert_int_equal(kn->bytes_buffers, total);
        }
        uint8_t data[64];
        memset(data, 0xa5, sizeof data);
        kn->ops->upload(kn, buf[2], data, 64);
        kn->ops->sync(kn);
        assert_true(all_are(kn, buf[2], 64, 0xa5));
        for (size_t s = 0; s < KC_LEN(sizes); s++)
            kn->ops->buf_free(kn, buf[s], sizes[s]);
        assert_int_equal(kn->bytes_buffers, 0);
        void *none = data;
        assert_int_equal(kn->ops->buf_alloc(kn, (size_t)1 << 60, &none), KN_ENOMEM);
        assert_ptr_equal(none, data);
        assert_int_equal(kn->bytes_buffers, 0);
        assert_int_equal(kn->ops->status(kn), KN_OK);
    }
}

/* Far more reserved than there is memory; what is committed reads as zero, also the second time. */
static void arenas_hold_what_is_committed(void **state)
{
    (void)state;
    size_t stride = 2 << 20;
    uint32_t n_pages = 200000; /* 400 GB */
    static const uint32_t pages[] = {0, 1, 199999, 777};
    uint8_t data[100];
    memset(data, 0x3c, sizeof data);
    for (unsigned i = 0; i < kc_all.n; i++) {
        struct kn *kn = kc_all.kn[i];
        const struct kn_ops *ops = kn->ops;
        void *base = NULL;
        assert_int_equal(ops->arena_open(kn, stride, n_pages, &base), KN_OK);
        assert_int_equal(kn->bytes_arena, 0);
        for (int round = 0; round < 2; round++) {
            for (size_t p = 0; p < KC_LEN(pages); p++) {
                uint8_t *at = (uint8_t *)base + pages[p] * stride;
                assert_int_equal(ops->arena_commit(kn, base, stride, pages[p]), KN_OK);
                assert_int_equal(kn->bytes_arena, (p + 1) * stride);
                assert_true(all_are(kn, at, stride, 0));
                ops->upload(kn, at + stride - sizeof data, data, sizeof data);
                assert_true(all_are(kn, at + stride - sizeof data, sizeof data, 0x3c));
            }
            for (size_t p = KC_LEN(pages); round == 0 && p-- > 0;) {
                ops->arena_release(kn, base, stride, pages[p]);
                assert_int_equal(kn->bytes_arena, p * stride);
            }
        }
        ops->arena_close(kn, base, stride, n_pages); /* takes the committed pages along */
        assert_int_equal(kn->bytes_arena, 0);
    }
}

/* The process's own resident memory follows commit, use and release. */
static size_t resident_bytes(void)
{
    unsigned long size = 0, pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    assert_non_null(f);
    assert_int_equal(fscanf(f, "%lu %lu", &size, &pages), 2);
    fclose(f);
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

static void released_pages_go_back_to_the_system(void **state)
{
    (void)state;
    size_t stride = 16 << 20;
    uint8_t *data = malloc(stride);
    assert_non_null(data);
    memset(data, 1, stride);
    for (unsigned i = 0; i < kc_all.n; i++) {
        struct kn *kn = kc_all.kn[i];
        void *base = NULL;
        if (kc_is_device(kn))
            continue; /* no memory of this process */
        assert_int_equal(kn->ops->arena_open(kn, stride, 8, &base), KN_OK);
        size_t start = resident_bytes();
        for (uint32_t p = 0; p < 4; p++) {
            assert_int_equal(kn->ops->arena_commit(kn, base, stride, p), KN_OK);
            kn->ops->upload(kn, (uint8_t *)base + p * stride, data, stride);
        }
        assert_true(resident_bytes() >= start + 3 * stride);
        for (uint32_t p = 0; p < 4; p++)
            kn->ops->arena_release(kn, base, stride, p);
        assert_true(resident_bytes() < start + stride);
        kn->ops->arena_close(kn, base, stride, 8);
    }
    free(data);
}

static void misshapen_arenas_are_refused(void **state)
{
    (void)state;
    void *base = &base;
    for (unsigned i = 0; i < kc_all.n; i++) {
        struct kn *kn = kc_all.kn[i];
        assert_int_equal(kn->ops->arena_open(kn, 100, 4, &base), KN_EINVALID);
        assert_int_equal(kn->ops->arena_open(kn, 0, 4, &base), KN_EINVALID);
        assert_int_equal(kn->ops->arena_open(kn, 4096, 0, &base), KN_EINVALID);
        assert_int_equal(kn->ops->arena_open(kn, (size_t)1 << 60, 64, &base), KN_ENOMEM);
        assert_ptr_equal(base, &base);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(backends_open_by_name_or_say_why),
        cmocka_unit_test(threads_are_what_was_asked),
        cmocka_unit_test(buffers_are_zeroed_aligned_and_counted),
        cmocka_unit_test(arenas_hold_what_is_committed),
        cmocka_unit_test(released_pages_go_back_to_the_system),
        cmocka_unit_test(misshapen_arenas_are_refused),
    };
    return cmocka_run_group_tests(tests, kc_all_open, kc_all_close);
}
