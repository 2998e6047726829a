/* Opening backends, buffers, arenas, and the counters: exact to the byte at every step. */
#include "kernels_compare.h"
#include <pthread.h>
#include <sys/mman.h>
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
    /* too many for the best one: no reason to take a slower one, which has a single thread */
    struct kn_options opt = {.backend = "auto", .threads = 1000};
    struct kn *kn = NULL;
    char why[200];
    if (!opens("cpu"))
        return;
    int code = kn_open(&kn, &opt, why, sizeof why);
    if (code == KN_OK) {
        assert_true(kc_is_device(kn));
        kn_close(&kn);
        return;
    }
    assert_int_equal(code, KN_EINVALID);
    assert_non_null(strstr(why, "threads: 1000"));
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

/* ---- pages on huge pages of the system */

#define WORLD_PAGES 48u

/* An arena beside what it should hold: a committed page is full of its own byte. */
struct world {
    struct kn *kn;
    uint8_t *base;
    size_t stride, committed, start; /* start: resident bytes before */
    uint8_t full[WORLD_PAGES];       /* the byte; 0: not committed */
    uint8_t next;
};

static void world_check(const struct world *w, uint32_t page)
{
    const uint8_t *at = w->base + page * w->stride;
    if (w->full[page] == 0)
        return;
    for (size_t i = 0; i < w->stride; i++)
        if (at[i] != w->full[page])
            fail_msg("%s, pages of %zu: byte %zu of page %u is %u, not %u", kc_name(w->kn),
                     w->stride, i, page, at[i], w->full[page]);
}

static void world_commit(struct world *w, uint32_t page, bool write)
{
    uint8_t *at = w->base + page * w->stride;
    assert_int_equal(w->kn->ops->arena_commit(w->kn, w->base, w->stride, page), KN_OK);
    w->committed += w->stride;
    for (size_t i = 0; write && i < w->stride; i++)
        if (at[i] != 0)
            fail_msg("%s, pages of %zu: byte %zu of page %u is not 0 but %u", kc_name(w->kn),
                     w->stride, i, page, at[i]);
    w->next = (uint8_t)(w->next % 255 + 1);
    memset(at, w->next, write ? w->stride : 1);
    w->full[page] = write ? w->next : 0;
}

static void world_release(struct world *w, uint32_t page)
{
    world_check(w, page);
    w->kn->ops->arena_release(w->kn, w->base, w->stride, page);
    w->full[page] = 0;
    w->committed -= w->stride;
}

/* Regions of 2 MiB come together and fall apart under pages of all sizes: every page keeps its bytes, a new one
 * is zero, and the process never holds more than what is committed (and what it held before). */
static void pages_keep_their_bytes_in_any_order(void **state)
{
    (void)state;
    static const size_t strides[] = {4096, 12288, 348160, 1474560, 2097152, 3149824, 5242880};
    const size_t room = 6 << 20; /* scratch; what tests and sanitizers take beside */
    for (size_t s = 0; s < KC_LEN(strides); s++) {
        struct kc_rng r = {.state = s + 1};
        struct world w = {.kn = kc_all.kn[0], .stride = strides[s], .start = resident_bytes()};
        void *base = NULL;
        bool out[WORLD_PAGES] = {false};
        assert_int_equal(w.kn->ops->arena_open(w.kn, w.stride, WORLD_PAGES, &base), KN_OK);
        w.base = base;
        for (uint32_t page = 0; page < WORLD_PAGES / 2; page++) { /* as a long prompt does */
            world_commit(&w, page, true);
            out[page] = true;
        }
        for (uint32_t i = 0; i < 150; i++) {
            uint32_t page = kc_below(&r, WORLD_PAGES), run = 1 + kc_below(&r, 4);
            bool was = out[page];
            for (; run > 0 && page < WORLD_PAGES && out[page] == was; run--, page++) {
                if (was)
                    world_release(&w, page);
                else
                    world_commit(&w, page, kc_below(&r, 4) > 0);
                out[page] = !was;
            }
            world_check(&w, kc_below(&r, WORLD_PAGES));
            assert_int_equal(w.kn->bytes_arena, w.committed);
            assert_true(resident_bytes() <= w.start + w.committed + room);
        }
        for (uint32_t page = 0; page < WORLD_PAGES; page++)
            world_check(&w, page);
        w.kn->ops->arena_close(w.kn, base, w.stride, WORLD_PAGES);
        assert_int_equal(w.kn->bytes_arena, 0);
    }
}

struct reader {
    const uint8_t *at;
    size_t bytes;
    uint8_t value;
    _Atomic uint32_t rounds;
    _Atomic bool stop, differs;
};

static void *read_on(void *arg)
{
    struct reader *r = arg;
    do {
        for (size_t i = 0; i < r->bytes; i += 61)
            if (((const volatile uint8_t *)r->at)[i] != r->value)
                r->differs = true;
        r->rounds++;
    } while (!r->stop);
    return NULL;
}

/* While one page is read, its neighbours come and go, and the memory of its first and last bytes changes places. */
static void who_reads_a_page_sees_its_bytes_all_the_time(void **state)
{
    (void)state;
    struct world w = {.kn = kc_all.kn[0], .stride = 1474560};
    void *base = NULL;
    pthread_t t;
    assert_int_equal(w.kn->ops->arena_open(w.kn, w.stride, 4, &base), KN_OK);
    w.base = base;
    world_commit(&w, 1, true);
    struct reader r = {.at = w.base + w.stride, .bytes = w.stride, .value = w.full[1]};
    assert_int_equal(pthread_create(&t, NULL, read_on, &r), 0);
    for (uint32_t i = 0; i < 60 || r.rounds < 60; i++) {
        static const uint32_t pages[] = {0, 2, 3};
        for (size_t p = 0; p < KC_LEN(pages); p++)
            world_commit(&w, pages[p], true);
        for (size_t p = 0; p < KC_LEN(pages); p++)
            world_release(&w, pages[(p + i) % KC_LEN(pages)]);
    }
    r.stop = true;
    pthread_join(t, NULL);
    assert_false(r.differs);
    w.kn->ops->arena_close(w.kn, base, w.stride, 4);
}

/* AnonHugePages of the mappings from `from` to `to`, in bytes. */
static size_t huge_bytes(const void *from, const void *to)
{
    char line[256];
    size_t sum = 0, kb;
    uintptr_t at = 0, end;
    FILE *f = fopen("/proc/self/smaps", "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f)) {
        uintptr_t a;
        if (sscanf(line, "%lx-%lx ", &a, &end) == 2)
            at = a;
        else if (at >= (uintptr_t)from && at < (uintptr_t)to &&
                 sscanf(line, "AnonHugePages: %zu kB", &kb) == 1)
            sum += kb << 10;
    }
    fclose(f);
    return sum;
}

/* Whether the system has a huge page for who asks for one. */
static bool system_has_huge(void)
{
    size_t two = 2 << 20;
    uint8_t *at = mmap(NULL, 2 * two, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(at != MAP_FAILED);
    (void)madvise(at, 2 * two, MADV_HUGEPAGE);
    memset(at, 1, 2 * two);
    bool has = huge_bytes(at, at + 2 * two) > 0;
    munmap(at, 2 * two);
    return has;
}

/* What is whole and committed is on huge pages, whatever came before; what is not is not. */
static void whole_regions_are_huge(void **state)
{
    (void)state;
    const size_t two = 2 << 20;
    struct world w = {.kn = kc_all.kn[0], .stride = 1474560};
    uint32_t n = 16, whole = (uint32_t)(n * w.stride / two); /* 11 regions and a quarter */
    size_t most = 0;
    if (!system_has_huge())
        skip();
    for (int round = 0; round < 3; round++) {
        void *base = NULL;
        assert_int_equal(w.kn->ops->arena_open(w.kn, w.stride, n, &base), KN_OK);
        w.base = base;
        uint8_t *end = w.base + n * w.stride;
        for (uint32_t page = 0; page < n; page++) /* the second time from the last to the first */
            world_commit(&w, round == 1 ? n - 1 - page : page, true);
        size_t huge = huge_bytes(base, end);
        assert_true(huge <= whole * two);
        most = huge > most ? huge : most;
        world_release(&w, 5); /* bytes 7,372,800 to 8,847,360: of regions 3 and 4 */
        assert_true(huge_bytes(base, end) <= (whole - 2) * two);
        for (uint32_t page = 0; page < n; page++)
            if (page != 5)
                world_release(&w, page);
        assert_int_equal(huge_bytes(base, end), 0);
        w.kn->ops->arena_close(w.kn, base, w.stride, n);
    }
    /* In one round at least: a system that is short of huge pages may have none for a while. */
    assert_int_equal(most, whole * two);
}

/* ---- entries of the memory map */

static unsigned long map_entries(void)
{
    unsigned long n = 0;
    FILE *f = fopen("/proc/self/maps", "r");
    assert_non_null(f);
    for (int c; (c = getc(f)) != EOF;)
        n += c == '\n';
    fclose(f);
    return n;
}

/* A region on a huge page is an entry of its own, but not longer than it is in use. */
static void empty_regions_leave_no_entry_in_the_map(void **state)
{
    (void)state;
    struct kn *kn = kc_all.kn[0];
    size_t stride = 1474560;
    uint32_t n = 60; /* 42 regions */
    void *base = NULL;
    assert_int_equal(kn->ops->arena_open(kn, stride, n, &base), KN_OK);
    unsigned long before = map_entries();
    for (int round = 0; round < 2; round++) {
        for (uint32_t page = 0; page < n; page++)
            assert_int_equal(kn->ops->arena_commit(kn, base, stride, page), KN_OK);
        for (uint32_t page = 0; page < n; page++)
            kn->ops->arena_release(kn, base, stride, round ? n - 1 - page : page);
        assert_in_range(map_entries(), 0, before + 8);
    }
    kn->ops->arena_close(kn, base, stride, n);
    assert_int_equal(kn->n_moved, 0);
}

#define FULL_MAX 200000ul

/* Takes entries until there are none, then gives `left` back. */
static uint8_t *map_fill(unsigned long left)
{
    size_t unit = (size_t)sysconf(_SC_PAGESIZE), n = 0;
    uint8_t *at = mmap(NULL, unit * 2 * FULL_MAX, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_true(at != MAP_FAILED);
    while (n < FULL_MAX && mprotect(at + n * 2 * unit, unit, PROT_READ) == 0)
        n++;
    for (; left > 0 && n > 0 && n < FULL_MAX; left--)
        (void)mprotect(at + --n * 2 * unit, unit, PROT_NONE);
    return at;
}

/* With hardly an entry left pages are refused, or come as small ones; those that are there keep their bytes. */
static void a_full_map_costs_no_bytes(void **state)
{
    (void)state;
    unsigned long most = 0, size = 2 * FULL_MAX * (unsigned long)sysconf(_SC_PAGESIZE);
    FILE *f = fopen("/proc/sys/vm/max_map_count", "r");
    if (f != NULL) {
        assert_int_equal(fscanf(f, "%lu", &most), 1);
        fclose(f);
    }
    if (most == 0 || most >= FULL_MAX)
        skip(); /* such a map takes too long to fill */
    for (unsigned long left = 0; left < 8; left++) {
        struct world w = {.kn = kc_all.kn[0], .stride = 1474560};
        void *base = NULL;
        int rc[8];
        assert_int_equal(w.kn->ops->arena_open(w.kn, w.stride, 8, &base), KN_OK);
        w.base = base;
        world_commit(&w, 0, true);
        world_commit(&w, 2, true);
        uint8_t *full = map_fill(left); /* no assertion while it is: a failing one would allocate */
        for (uint32_t page = 1; page < 8; page++) {
            rc[page] = page == 2 ? KN_OK : w.kn->ops->arena_commit(w.kn, base, w.stride, page);
            if (rc[page] == KN_OK)
                memset(w.base + page * w.stride, w.full[page] = (uint8_t)(100 + page), w.stride);
        }
        munmap(full, size);
        for (uint32_t page = 1; page < 8; page++)
            assert_true(rc[page] == KN_OK || rc[page] == KN_ENOMEM);
        for (uint32_t page = 0; page < 8; page++)
            world_check(&w, page);
        w.kn->ops->arena_close(w.kn, base, w.stride, 8);
    }
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
        cmocka_unit_test(pages_keep_their_bytes_in_any_order),
        cmocka_unit_test(who_reads_a_page_sees_its_bytes_all_the_time),
        cmocka_unit_test(whole_regions_are_huge),
        cmocka_unit_test(empty_regions_leave_no_entry_in_the_map),
        cmocka_unit_test(a_full_map_costs_no_bytes),
        cmocka_unit_test(released_pages_go_back_to_the_system),
        cmocka_unit_test(misshapen_arenas_are_refused),
    };
    return cmocka_run_group_tests(tests, kc_all_open, kc_all_close);
}
