/* Renumbering a cache whose pages others read too: nobody else's page is written, what need not move stays shared, and what was turned
 * is never offered as a beginning. */
#include "fake_kn.h"
#include "prefix.h"

#define PAGES 20

struct world {
    struct fake_kn fake;
    struct pool *pool;
    struct prefix *tree;
    struct ledger *ledger;
    struct ledger_owner *user, owner[2];
    struct seqcache *seq[2];
};

static int world_open(void **state)
{
    struct world *w = calloc(1, sizeof *w);
    struct kn_kv shape = fake_shape();
    struct err e;
    assert_non_null(w);
    w->fake = fake_kn_make();
    assert_int_equal(ledger_open(&w->ledger, &e), 0);
    w->user = ledger_uid_get(w->ledger, 5);
    assert_int_equal(pool_open(&w->pool, &w->fake.kn, &shape, PAGES, &e), 0);
    assert_int_equal(prefix_open(&w->tree, w->pool, w->user, &e), 0);
    for (int i = 0; i < 2; i++) {
        ledger_owner_open(&w->owner[i], LEDGER_SESSION, w->user);
        assert_int_equal(seqcache_open(&w->seq[i], w->pool, &e), 0);
        seqcache_owner(w->seq[i], &w->owner[i], w->user);
    }
    *state = w;
    return 0;
}

static int world_close(void **state)
{
    struct world *w = *state;
    for (int i = 0; i < 2; i++) {
        seqcache_close(&w->seq[i]);
        ledger_owner_close(&w->owner[i]);
    }
    prefix_close(&w->tree);
    assert_int_equal(pool_bytes_held(w->pool), 0);
    pool_close(&w->pool);
    ledger_uid_put(w->ledger, &w->user);
    ledger_close(&w->ledger);
    free(w);
    return 0;
}

/* Token i is id i; its row says so. */
static void append(struct world *w, int k, uint32_t n)
{
    struct seqcache *s = w->seq[k];
    uint32_t first = seqcache_count(s);
    uint64_t next = first > 0 ? seqcache_stream(s)[first - 1] + 1 : 0;
    assert_int_equal(seqcache_reserve(s, n, NULL), 0);
    for (uint32_t i = 0; i < n; i++) {
        int32_t id = (int32_t)(next + i);
        seqcache_append(s, 1, &id, id, next + i);
        w->fake.row[seqcache_slots(s)[first + i]] = next + i;
    }
}

/* Both hold the first two pages; then each has 64 of its own. */
static void share_two_pages(struct world *w)
{
    int32_t ids[128];
    for (int i = 0; i < 128; i++)
        ids[i] = i;
    append(w, 0, 128);
    assert_int_equal(prefix_offer(w->tree, w->seq[0], 1), 2);
    assert_int_equal(prefix_adopt(w->tree, w->seq[1], ids, 128, 2), 128);
    append(w, 0, 64);
    append(w, 1, 64);
}

static void evict_from(struct seqcache *s, uint32_t first, uint32_t n)
{
    uint32_t keep[PAGES * KN_PAGE_ROWS], kept = 0;
    for (uint32_t i = 0; i < seqcache_count(s); i++)
        if (i < first || i >= first + n)
            keep[kept++] = i;
    seqcache_evict(s, keep, kept);
}

static void rows_are_whole(struct world *w, int k, const char *what)
{
    const struct seqcache *s = w->seq[k];
    for (uint32_t i = 0; i < seqcache_count(s); i++)
        if (w->fake.row[seqcache_slots(s)[i]] != seqcache_stream(s)[i] ||
            seqcache_ids(s)[i] != (int32_t)seqcache_stream(s)[i])
            fail_msg("%s: row %u is another one's", what, i);
}

static bool holds(const struct seqcache *s, uint32_t page)
{
    for (uint32_t i = 0; i < seqcache_pages(s); i++)
        if (seqcache_page(s, i) == page)
            return true;
    return false;
}

static void moved_rows_leave_shared_pages(void **state)
{
    struct world *w = *state;
    struct seqcache *s = w->seq[1];
    share_two_pages(w);
    uint32_t first = seqcache_slots(s)[0] / KN_PAGE_ROWS,
             second = seqcache_slots(s)[64] / KN_PAGE_ROWS;
    evict_from(s, 80, 20); /* 28 rows of the second page are left behind the gap */
    uint32_t pages = seqcache_pages(s), needed = seqcache_renumber_pages(s);
    uint32_t out = pool_pages_out(w->pool);
    assert_int_equal(needed, 1); /* 44 rows of that page, and no free slot */
    assert_int_equal(seqcache_renumber_reserve(s, NULL), 0);
    assert_int_equal(pool_pages_out(w->pool), out + 1);
    assert_int_equal(seqcache_pages(s), pages);
    assert_true(holds(s, first)); /* nothing in it moves */
    assert_false(holds(s, second));
    assert_int_equal(w->fake.n_copies, 44);
    assert_int_equal(seqcache_renumber_pages(s), 0);
    rows_are_whole(w, 1, "the one that moves");
    rows_are_whole(w, 0, "the other one");
    seqcache_renumber(s);
    for (uint32_t i = 0; i < seqcache_count(s); i++)
        assert_int_equal(seqcache_positions(s)[i], i);
    assert_int_equal(seqcache_stream(s)[80], 100); /* these stay */
    assert_true(seqcache_pristine(s, 0));
    for (uint32_t i = 1; i < 3; i++)
        assert_false(seqcache_pristine(s, i));
    assert_int_equal(prefix_offer(w->tree, s, 5), 1);
    /* the other one has all of its pages, and they are offered still */
    assert_int_equal(prefix_offer(w->tree, w->seq[0], 6), 3);
}

/* A page that only the index holds beside it is taken out of it, and nothing is copied. */
static void its_own_pages_are_taken_out_of_the_index(void **state)
{
    struct world *w = *state;
    struct seqcache *s = w->seq[1];
    share_two_pages(w);
    evict_from(s, 70, 10);
    seqcache_clear(w->seq[0]); /* the index still has both */
    assert_int_equal(prefix_pages(w->tree), 2);
    assert_int_equal(seqcache_renumber_pages(s), 0);
    assert_int_equal(seqcache_renumber_reserve(s, NULL), 0);
    assert_int_equal(w->fake.n_copies, 0);
    assert_int_equal(prefix_pages(w->tree), 1); /* nothing in the first one moves */
    seqcache_renumber(s);
    assert_int_equal(prefix_offer(w->tree, s, 2), 1);
    rows_are_whole(w, 1, "alone");
}

static void a_fork_is_left_alone(void **state)
{
    struct world *w = *state;
    struct seqcache *f;
    append(w, 0, 150);
    evict_from(w->seq[0], 0, 3);
    assert_int_equal(seqcache_fork(w->seq[0], &w->owner[1], &f, NULL), 0);
    seqcache_close(&w->seq[1]);
    w->seq[1] = f;
    uint32_t pages = seqcache_pages(f);
    assert_int_equal(seqcache_renumber_pages(f), 3);
    assert_int_equal(seqcache_renumber_reserve(f, NULL), 0);
    assert_int_equal(seqcache_pages(f), pages);
    assert_int_equal(w->fake.n_copies, 147);
    seqcache_renumber(f);
    assert_int_equal(seqcache_positions(f)[0], 0);
    assert_int_equal(seqcache_positions(w->seq[0])[0], 3);
    for (uint32_t i = 0; i < seqcache_pages(w->seq[0]); i++)
        assert_false(holds(f, seqcache_page(w->seq[0], i)));
    rows_are_whole(w, 0, "the session");
    rows_are_whole(w, 1, "its fork");
}

static void no_page_changes_nothing(void **state)
{
    struct world *w = *state;
    struct err e = {0};
    share_two_pages(w);
    evict_from(w->seq[1], 70, 10);
    append(w, 0, (PAGES - 4) * KN_PAGE_ROWS); /* all that is left */
    uint32_t pages = seqcache_pages(w->seq[1]);
    assert_int_equal(seqcache_renumber_reserve(w->seq[1], &e), BC_EBUDGET);
    assert_int_equal(seqcache_pages(w->seq[1]), pages);
    assert_int_equal(w->fake.n_copies, 0);
    rows_are_whole(w, 0, "the other one");
    rows_are_whole(w, 1, "the one that could not");
    seqcache_clear(w->seq[0]);
    assert_int_equal(seqcache_renumber_reserve(w->seq[1], &e), 0);
    rows_are_whole(w, 1, "later");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(moved_rows_leave_shared_pages, world_open, world_close),
        cmocka_unit_test_setup_teardown(its_own_pages_are_taken_out_of_the_index, world_open,
                                        world_close),
        cmocka_unit_test_setup_teardown(a_fork_is_left_alone, world_open, world_close),
        cmocka_unit_test_setup_teardown(no_page_changes_nothing, world_open, world_close),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
