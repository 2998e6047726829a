/* Pages of a pool: taken, shared, given back, and counted to the byte. */
#include "fake_kn.h"
#include "pool.h"
#include <stdio.h>
#include <unistd.h>

#define PAGES 5

struct world {
    struct fake_kn fake;
    struct pool *pool;
};

static int world_open(void **state)
{
    struct world *w = calloc(1, sizeof *w);
    struct kn_kv shape = fake_shape();
    struct err e;
    assert_non_null(w);
    w->fake = fake_kn_make();
    assert_int_equal(pool_open(&w->pool, &w->fake.kn, &shape, PAGES, &e), 0);
    *state = w;
    return 0;
}

static int world_close(void **state)
{
    struct world *w = *state;
    pool_close(&w->pool);
    assert_null(w->pool);
    assert_false(w->fake.open);
    assert_int_equal(w->fake.kn.bytes_arena, 0);
    free(w);
    return 0;
}

static uint32_t take(struct world *w)
{
    uint32_t page = POOL_PAGE_NONE;
    struct err e;
    assert_int_equal(pool_take(w->pool, &page, &e), 0);
    assert_true(page < PAGES);
    return page;
}

static void costs_are_exact(void **state)
{
    struct world *w = *state;
    const struct kn_kv *kv = pool_kv(w->pool);
    assert_ptr_equal(pool_kn(w->pool), &w->fake.kn);
    assert_ptr_equal(kv->base, &w->fake);
    assert_int_equal(kn_kv_row_bytes(kv), 2 * 2 * 2 * 16 * 4);
    assert_int_equal(pool_row_bytes(w->pool), 512 + 24);
    assert_int_equal(pool_page_bytes(w->pool), 32768 + 64 * 24);
    assert_int_equal(pool_pages_max(w->pool), PAGES);
}

static void pages_are_committed_while_they_are_out(void **state)
{
    struct world *w = *state;
    uint32_t a = take(w), b = take(w);
    assert_int_not_equal(a, b);
    assert_true(w->fake.committed[a] && w->fake.committed[b]);
    assert_int_equal(pool_pages_out(w->pool), 2);
    assert_int_equal(pool_bytes_held(w->pool), 2 * pool_page_bytes(w->pool));
    assert_int_equal(w->fake.kn.bytes_arena, 2 * 32768);
    pool_drop(w->pool, a);
    assert_false(w->fake.committed[a]);
    assert_int_equal(pool_refs(w->pool, a), 0);
    assert_int_equal(pool_bytes_held(w->pool), pool_page_bytes(w->pool));
    assert_int_equal(take(w), a); /* the page dropped last comes first, and empty */
    assert_int_equal(w->fake.row[a * KN_PAGE_ROWS], FAKE_EMPTY);
    pool_drop(w->pool, a);
    pool_drop(w->pool, b);
    assert_int_equal(pool_bytes_held(w->pool), 0);
}

static void a_shared_page_goes_with_its_last_reference(void **state)
{
    struct world *w = *state;
    uint32_t a = take(w);
    pool_ref(w->pool, a);
    assert_int_equal(pool_refs(w->pool, a), 2);
    assert_int_equal(pool_bytes_held(w->pool), pool_page_bytes(w->pool)); /* booked once */
    pool_drop(w->pool, a);
    assert_true(w->fake.committed[a]);
    assert_int_equal(pool_pages_out(w->pool), 1);
    pool_drop(w->pool, a);
    assert_false(w->fake.committed[a]);
    assert_int_equal(pool_pages_out(w->pool), 0);
}

static void an_empty_pool_says_what_is_missing(void **state)
{
    struct world *w = *state;
    uint32_t pages[PAGES], none = POOL_PAGE_NONE;
    struct err e = {0};
    for (int i = 0; i < PAGES; i++)
        pages[i] = take(w);
    assert_int_equal(pool_take(w->pool, &none, &e), BC_EBUDGET);
    assert_int_equal(none, POOL_PAGE_NONE);
    assert_string_equal(e.field, "kv_memory");
    assert_int_equal(e.needed, pool_page_bytes(w->pool));
    assert_int_equal(e.available, 0);
    assert_int_equal(pool_pages_out(w->pool), PAGES);
    for (int i = 0; i < PAGES; i++)
        pool_drop(w->pool, pages[i]);
}

static void a_refused_commit_changes_nothing(void **state)
{
    struct world *w = *state;
    uint32_t none = POOL_PAGE_NONE;
    struct err e = {0};
    w->fake.refuse_after = 0;
    assert_int_equal(pool_take(w->pool, &none, &e), BC_ENOMEM);
    assert_int_equal(none, POOL_PAGE_NONE);
    assert_int_equal(pool_bytes_held(w->pool), 0);
    w->fake.refuse_after = UINT32_MAX;
    pool_drop(w->pool, take(w));
}

static void impossible_sizes_are_refused(void **state)
{
    (void)state;
    struct fake_kn fake = fake_kn_make();
    struct kn_kv shape = fake_shape();
    struct pool *p = NULL;
    struct err e = {0};
    assert_int_equal(pool_open(&p, &fake.kn, &shape, 0, &e), BC_EINVALID);
    assert_int_equal(pool_open(&p, &fake.kn, &shape, UINT32_MAX, &e), BC_EINVALID);
    assert_string_equal(e.field, "kv_memory");
    shape.stride = SIZE_MAX / 2;
    assert_int_equal(pool_open(&p, &fake.kn, &shape, 3, &e), BC_EINVALID);
    assert_null(p);
    assert_false(fake.open);
}

/* Memory of this process, in bytes. */
static size_t resident(void)
{
    unsigned long pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    assert_non_null(f);
    assert_int_equal(fscanf(f, "%*u %lu", &pages), 1);
    fclose(f);
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

/* On a real backend: a pool of a terabyte costs nothing, a page that is given back is memory of the
 * system again, and the next one to take it finds zeros. */
static void pages_return_to_the_system_and_come_back_empty(void **state)
{
    (void)state;
    const struct kn_options options = {.backend = "ref"};
    struct kn_kv shape = fake_shape();
    const uint32_t n = 64;
    uint32_t pages[64];
    struct kn *kn;
    struct pool *pool;
    struct err e = {0};
    shape.n_layers = 64;
    shape.stride = kn_kv_page_bytes(&shape); /* 1 MiB */
    assert_int_equal(kn_open(&kn, &options, NULL, 0), KN_OK);
    assert_int_equal(pool_open(&pool, kn, &shape, 1u << 20, &e), 0);
    char *base = pool_kv(pool)->base;
    size_t before = resident();
    for (uint32_t i = 0; i < n; i++) {
        assert_int_equal(pool_take(pool, &pages[i], &e), 0);
        memset(base + pages[i] * shape.stride, 0x5a, shape.stride);
    }
    assert_int_equal(kn->bytes_arena, n * shape.stride);
    assert_true(resident() >= before + n * shape.stride / 2);
    for (uint32_t i = 0; i < n; i++)
        pool_drop(pool, pages[i]);
    assert_int_equal(kn->bytes_arena, 0);
    assert_true(resident() < before + n * shape.stride / 4);
    for (uint32_t i = 0; i < n; i++) {
        assert_int_equal(pool_take(pool, &pages[i], &e), 0);
        const char *page = base + pages[i] * shape.stride;
        assert_true(page[0] == 0 && memcmp(page, page + 1, shape.stride - 1) == 0);
    }
    for (uint32_t i = 0; i < n; i++)
        pool_drop(pool, pages[i]);
    pool_close(&pool);
    kn_close(&kn);
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, world_open, world_close)
    const struct CMUnitTest tests[] = {
        T(costs_are_exact),
        T(pages_are_committed_while_they_are_out),
        T(a_shared_page_goes_with_its_last_reference),
        T(an_empty_pool_says_what_is_missing),
        T(a_refused_commit_changes_nothing),
        cmocka_unit_test(impossible_sizes_are_refused),
        cmocka_unit_test(pages_return_to_the_system_and_come_back_empty),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
