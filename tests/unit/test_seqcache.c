/* The slot list of one sequence: single cases, then thousands of random operations over several
 * sequences of one pool, checked against a plain model of what each sequence should hold. */
#include "fake_kn.h"
#include "seqcache.h"

#define PAGES 24
#define SEQS 4
#define ROWS_MAX (PAGES * KN_PAGE_ROWS)
#define OPERATIONS 6000

/* What a sequence should hold, kept in the simplest way. */
struct truth {
    uint32_t n;
    uint64_t next;             /* stream index of the next token */
    uint64_t stream[ROWS_MAX]; /* ids and positions are functions of it */
};

struct world {
    struct fake_kn fake;
    struct pool *pool;
    struct seqcache *seq[SEQS];
    struct truth truth[SEQS];
    uint32_t random;
};

static int32_t id_of(uint64_t stream)
{
    return (int32_t)(stream * 7 % 383);
}
static int32_t position_of(uint64_t stream)
{
    return (int32_t)stream;
}

static int world_open(void **state)
{
    struct world *w = calloc(1, sizeof *w);
    struct kn_kv shape = fake_shape();
    struct err e;
    assert_non_null(w);
    w->fake = fake_kn_make();
    w->random = 12345;
    assert_int_equal(pool_open(&w->pool, &w->fake.kn, &shape, PAGES, &e), 0);
    for (int i = 0; i < SEQS; i++)
        assert_int_equal(seqcache_open(&w->seq[i], w->pool, &e), 0);
    *state = w;
    return 0;
}

static int world_close(void **state)
{
    struct world *w = *state;
    for (int i = 0; i < SEQS; i++) {
        seqcache_close(&w->seq[i]);
        assert_null(w->seq[i]);
    }
    assert_int_equal(pool_bytes_held(w->pool), 0);
    assert_int_equal(w->fake.kn.bytes_arena, 0);
    pool_close(&w->pool);
    free(w);
    return 0;
}

static uint32_t below(struct world *w, uint32_t n)
{
    w->random = w->random * 1664525u + 1013904223u;
    return (uint32_t)(((uint64_t)w->random * n) >> 32);
}

/* ---- operations on sequence i and on its truth ----------------------------------------------- */

/* True if the rows went in; otherwise nothing has changed. */
static bool append(struct world *w, int i, uint32_t n)
{
    struct seqcache *s = w->seq[i];
    struct truth *t = &w->truth[i];
    int32_t ids[ROWS_MAX];
    struct err e = {0};
    uint32_t needed = seqcache_pages_needed(s, n), out = pool_pages_out(w->pool);
    assert_true(n <= ROWS_MAX);
    int rc = seqcache_reserve(s, n, &e);
    if (rc != 0) {
        assert_true(rc == BC_EBUDGET || rc == BC_ENOMEM);
        assert_true(rc != BC_EBUDGET || out + needed > PAGES);
        assert_int_equal(pool_pages_out(w->pool), out);
        return false;
    }
    assert_int_equal(pool_pages_out(w->pool), out + needed);
    for (uint32_t k = 0; k < n; k++) {
        ids[k] = id_of(t->next + k);
        t->stream[t->n + k] = t->next + k;
    }
    seqcache_append(s, n, ids, position_of(t->next), t->next);
    for (uint32_t k = 0; k < n; k++) /* the pass writes K and V */
        w->fake.row[seqcache_slots(s)[t->n + k]] = ((uint64_t)(unsigned)i << 32) | (t->next + k);
    t->n += n;
    t->next += n;
    return true;
}

static void evict_random(struct world *w, int i)
{
    struct truth *t = &w->truth[i];
    uint32_t keep[ROWS_MAX], n_keep = 0, percent = below(w, 101);
    for (uint32_t k = 0; k < t->n; k++)
        if (below(w, 100) < percent)
            keep[n_keep++] = k;
    uint64_t copies = w->fake.n_copies;
    uint32_t out = pool_pages_out(w->pool);
    seqcache_evict(w->seq[i], keep, n_keep);
    assert_int_equal(w->fake.n_copies, copies); /* no K or V moves, no page changes hands */
    assert_int_equal(pool_pages_out(w->pool), out);
    for (uint32_t k = 0; k < n_keep; k++)
        t->stream[k] = t->stream[keep[k]];
    t->n = n_keep;
}

static void compact(struct world *w, int i)
{
    uint64_t copies = w->fake.n_copies, moved = seqcache_rows_moved(w->seq[i]);
    uint32_t out = pool_pages_out(w->pool);
    uint32_t freed = seqcache_compact(w->seq[i]);
    assert_int_equal(pool_pages_out(w->pool) + freed, out);
    assert_int_equal(seqcache_rows_moved(w->seq[i]) - moved, w->fake.n_copies - copies);
    assert_int_equal(seqcache_bytes_held(w->seq[i]),
                     (w->truth[i].n + 63) / 64 * pool_page_bytes(w->pool));
    assert_int_equal(seqcache_compact(w->seq[i]), 0);
}

/* Takes back up to n rows: never past an evicted one, as only the rows of the last pass are ever
 * taken back. */
static void pop(struct world *w, int i, uint32_t n_most)
{
    const struct truth *t = &w->truth[i];
    uint32_t n = 0;
    while (n < n_most && n < t->n && t->stream[t->n - 1 - n] == t->next - 1 - n)
        n++;
    seqcache_pop(w->seq[i], n);
    w->truth[i].n -= n;
    w->truth[i].next -= n; /* the rows that a failed pass appended: the same tokens come again */
}

static void reopen(struct world *w, int i)
{
    struct err e;
    seqcache_close(&w->seq[i]);
    assert_int_equal(seqcache_open(&w->seq[i], w->pool, &e), 0);
    memset(&w->truth[i], 0, sizeof w->truth[i]);
}

/* ---- what must hold after every operation ---------------------------------------------------- */

static void check(struct world *w)
{
    bool used[ROWS_MAX] = {false};
    size_t held = 0;
    for (int i = 0; i < SEQS; i++) {
        const struct seqcache *s = w->seq[i];
        const struct truth *t = &w->truth[i];
        struct kn_seq view = seqcache_view(s);
        assert_int_equal(seqcache_count(s), t->n);
        assert_int_equal(view.n, t->n);
        assert_ptr_equal(view.kv, pool_kv(w->pool));
        for (uint32_t k = 0; k < t->n; k++) {
            uint32_t slot = view.slots[k];
            assert_true(slot < ROWS_MAX && !used[slot]); /* in no other sequence and not twice */
            used[slot] = true;
            assert_true(w->fake.committed[slot / KN_PAGE_ROWS]);
            assert_int_equal(w->fake.row[slot], ((uint64_t)(unsigned)i << 32) | t->stream[k]);
            assert_int_equal(seqcache_stream(s)[k], t->stream[k]);
            assert_int_equal(seqcache_ids(s)[k], id_of(t->stream[k]));
            assert_int_equal(seqcache_positions(s)[k], position_of(t->stream[k]));
        }
        assert_int_equal(seqcache_bytes_live(s), t->n * pool_row_bytes(w->pool));
        assert_true(seqcache_bytes_held(s) >= (t->n + 63) / 64 * pool_page_bytes(w->pool));
        held += seqcache_bytes_held(s);
    }
    assert_int_equal(held, pool_bytes_held(w->pool));
    assert_int_equal(pool_pages_out(w->pool), w->fake.n_committed);
    assert_int_equal(w->fake.kn.bytes_arena, w->fake.n_committed * pool_kv(w->pool)->stride);
}

/* ---- cases ----------------------------------------------------------------------------------- */

static void evicted_slots_are_refilled_before_a_page_is_taken(void **state)
{
    struct world *w = *state;
    uint32_t keep[33];
    for (uint32_t k = 0; k < 33; k++)
        keep[k] = k == 0 ? 0 : k + 31;
    assert_true(append(w, 0, 64));
    seqcache_evict(w->seq[0], keep, 33);
    memmove(&w->truth[0].stream[1], &w->truth[0].stream[32], 32 * sizeof(uint64_t));
    w->truth[0].n = 33;
    check(w);
    assert_int_equal(seqcache_pages_needed(w->seq[0], 31), 0);
    assert_int_equal(seqcache_pages_needed(w->seq[0], 32), 1);
    assert_true(append(w, 0, 31));
    check(w);
    assert_int_equal(pool_pages_out(w->pool), 1);
    assert_int_equal(seqcache_rows_moved(w->seq[0]), 0);
}

static void a_reservation_is_all_or_nothing(void **state)
{
    struct world *w = *state;
    struct err e = {0};
    assert_true(append(w, 0, 10));
    assert_int_equal(seqcache_reserve(w->seq[0], ROWS_MAX, &e), BC_EBUDGET);
    assert_string_equal(e.field, "kv_memory");
    assert_int_equal(e.needed, PAGES * pool_page_bytes(w->pool));
    assert_int_equal(e.available, (PAGES - 1) * pool_page_bytes(w->pool));
    check(w);
    w->fake.refuse_after = 2; /* the third page is refused: the two before it go back */
    assert_int_equal(seqcache_reserve(w->seq[0], 300, &e), BC_ENOMEM);
    assert_int_equal(pool_pages_out(w->pool), 1);
    check(w);
    w->fake.refuse_after = UINT32_MAX;
    assert_true(append(w, 0, 300));
    check(w);
}

static void compaction_moves_the_fewest_rows(void **state)
{
    struct world *w = *state;
    uint32_t keep[192], n_keep = 0;
    assert_true(
        append(w, 0, 192)); /* three pages; 40, 3 and 20 of their rows stay: one page is enough */
    for (uint32_t k = 0; k < 192; k++)
        if (k < 40 || (k >= 64 && k < 67) || k >= 172) {
            w->truth[0].stream[n_keep] = k;
            keep[n_keep++] = k;
        }
    seqcache_evict(w->seq[0], keep, n_keep);
    w->truth[0].n = n_keep;
    assert_int_equal(seqcache_compact(w->seq[0]), 2);
    assert_int_equal(seqcache_rows_moved(w->seq[0]), 23);
    assert_int_equal(seqcache_bytes_held(w->seq[0]), pool_page_bytes(w->pool));
    check(w);
    seqcache_evict(w->seq[0], NULL, 0);
    w->truth[0].n = 0;
    assert_int_equal(seqcache_compact(w->seq[0]), 1);
    assert_int_equal(seqcache_bytes_held(w->seq[0]), 0);
    check(w);
    assert_true(append(w, 0, 65));
    check(w);
}

static void random_operations_keep_every_invariant(void **state)
{
    struct world *w = *state;
    uint32_t n_refused = 0, n_compacted = 0, n_full = 0;
    for (int op = 0; op < OPERATIONS; op++) {
        int i = (int)below(w, SEQS);
        uint32_t kind = below(w, 100);
        w->fake.refuse_after = below(w, 10) == 0 ? below(w, 3) : UINT32_MAX;
        if (kind < 55)
            n_refused += !append(w, i, 1 + below(w, below(w, 4) == 0 ? 400 : 20));
        else if (kind < 75)
            evict_random(w, i);
        else if (kind < 90) {
            n_compacted++;
            compact(w, i);
        } else if (kind < 98)
            pop(w, i, 1 + below(w, 30));
        else
            reopen(w, i);
        n_full += pool_pages_out(w->pool) == PAGES;
        check(w);
    }
    assert_true(n_refused > 50 && n_compacted > 500 && n_full > 20); /* the walk went everywhere */
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, world_open, world_close)
    const struct CMUnitTest tests[] = {
        T(evicted_slots_are_refilled_before_a_page_is_taken),
        T(a_reservation_is_all_or_nothing),
        T(compaction_moves_the_fewest_rows),
        T(random_operations_keep_every_invariant),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
