/* Pages that several sequences read: single cases, then thousands of random operations over sequences
 * with common beginnings, against a plain model. Every row of the fake backend holds a hash of all
 * tokens that it was computed from, so a page that is shared wrongly is seen at once; and every write
 * is checked to go to a page that nobody else reads. */
#include "fake_kn.h"
#include "prefix.h"

#define PAGES 60
#define SEQS 10
#define ROWS_MAX (PAGES * KN_PAGE_ROWS)
#define OPERATIONS 12000
#define FAMILIES 3

struct truth {
    uint32_t n;
    uint64_t next;    /* stream index of the next token */
    uint64_t history; /* hash of all tokens so far, and of what was forgotten */
    uint32_t family, branch;
    uint64_t stream[ROWS_MAX], content[ROWS_MAX];
    int32_t id[ROWS_MAX];
};

struct world {
    struct fake_kn fake;
    struct pool *pool;
    struct prefix *tree;
    struct ledger *ledger;
    struct ledger_owner *user, owner[SEQS];
    struct seqcache *seq[SEQS];
    struct truth truth[SEQS];
    uint32_t random;
    uint64_t now;
};

static uint64_t mix(uint64_t h, uint64_t x)
{
    h = (h ^ x) * 0x9e3779b97f4a7c15u;
    return h ^ h >> 31;
}

static uint32_t below(struct world *w, uint32_t n)
{
    w->random = w->random * 1664525u + 1013904223u;
    return (uint32_t)(((uint64_t)w->random * n) >> 32);
}

static void seq_open(struct world *w, int i)
{
    struct err e;
    ledger_owner_open(&w->owner[i], LEDGER_SESSION, w->user);
    assert_int_equal(seqcache_open(&w->seq[i], w->pool, &e), 0);
    seqcache_owner(w->seq[i], &w->owner[i], w->user);
    memset(&w->truth[i], 0, sizeof w->truth[i]);
    w->truth[i].family = below(w, FAMILIES);
    w->truth[i].branch = below(w, 4);
}

static void seq_close(struct world *w, int i)
{
    seqcache_close(&w->seq[i]);
    ledger_owner_close(&w->owner[i]); /* asserts that every charge is back */
}

static int world_open(void **state)
{
    struct world *w = calloc(1, sizeof *w);
    struct kn_kv shape = fake_shape();
    struct err e;
    assert_non_null(w);
    w->fake = fake_kn_make();
    w->random = 99;
    assert_int_equal(ledger_open(&w->ledger, &e), 0);
    w->user = ledger_uid_get(w->ledger, 5);
    assert_int_equal(pool_open(&w->pool, &w->fake.kn, &shape, PAGES, &e), 0);
    assert_int_equal(prefix_open(&w->tree, w->pool, w->user, &e), 0);
    for (int i = 0; i < SEQS; i++)
        seq_open(w, i);
    *state = w;
    return 0;
}

static int world_close(void **state)
{
    struct world *w = *state;
    for (int i = 0; i < SEQS; i++)
        seq_close(w, i);
    prefix_close(&w->tree);
    assert_null(w->tree);
    assert_int_equal(pool_bytes_held(w->pool), 0);
    assert_int_equal(ledger_sum(ledger_daemon(w->ledger)), 0);
    pool_close(&w->pool);
    ledger_uid_put(w->ledger, &w->user);
    ledger_close(&w->ledger);
    free(w);
    return 0;
}

/* Token at stream index i of a family: the first 256 are the same for all of it, then branches part. */
static int32_t id_at(const struct truth *t, uint64_t i)
{
    return (int32_t)(mix(t->family + (i < 256 ? 0 : 10 + t->branch), i) % 977);
}

/* ---- operations ---- */

static bool writable(const struct world *w, uint32_t slot)
{
    uint32_t page = slot / KN_PAGE_ROWS;
    return pool_holders(w->pool, page) == 1 && pool_offered(w->pool, page) == NULL;
}

static void truth_add(struct truth *t, int32_t id)
{
    t->history = mix(t->history, (uint64_t)id + 1);
    t->id[t->n] = id;
    t->stream[t->n] = t->next++;
    t->content[t->n++] = t->history;
}

static bool append(struct world *w, int i, uint32_t n, uint32_t max_pages)
{
    struct seqcache *s = w->seq[i];
    struct truth *t = &w->truth[i];
    int32_t ids[ROWS_MAX];
    struct err e = {0};
    uint32_t needed = seqcache_pages_within(s, n, max_pages), before = pool_pages_out(w->pool);
    int rc = seqcache_reserve_within(s, n, max_pages, &e);
    if (rc != 0) {
        assert_true(rc == BC_ENOMEM || (rc == BC_EBUDGET && before + needed > PAGES));
        assert_int_equal(pool_pages_out(w->pool), before);
        return false;
    }
    assert_true(seqcache_pages(s) <= max_pages);
    assert_true(pool_pages_out(w->pool) <= before + needed);
    for (uint32_t k = 0; k < n; k++)
        ids[k] = id_at(t, t->next + k);
    seqcache_append(s, n, ids, (int32_t)t->next, t->next);
    for (uint32_t k = 0; k < n; k++) {
        uint32_t slot = seqcache_slots(s)[t->n];
        assert_true(writable(w, slot));
        truth_add(t, ids[k]);
        w->fake.row[slot] = t->content[t->n - 1];
    }
    return true;
}

static void offer(struct world *w, int i)
{
    struct truth *t = &w->truth[i];
    uint32_t whole = 0, n = prefix_offer(w->tree, w->seq[i], ++w->now);
    while (whole < t->n && t->stream[whole] == whole)
        whole++;
    assert_true(n <= whole / KN_PAGE_ROWS); /* nothing of a pruned cache */
}

static void adopt(struct world *w, int i, uint32_t most)
{
    struct seqcache *s = w->seq[i];
    struct truth *t = &w->truth[i];
    int32_t ids[1024];
    if (t->n % KN_PAGE_ROWS != 0 || t->n != t->next || t->n != seqcache_pages(s) * KN_PAGE_ROWS)
        return;
    for (uint32_t k = 0; k < most; k++)
        ids[k] = id_at(t, t->next + k);
    uint32_t before = pool_pages_out(w->pool);
    uint32_t n = prefix_adopt(w->tree, s, ids, most, ++w->now);
    assert_true(n % KN_PAGE_ROWS == 0 && n <= most);
    assert_int_equal(pool_pages_out(w->pool), before);
    for (uint32_t k = 0; k < n; k++)
        truth_add(t, ids[k]);
}

static void evict_random(struct world *w, int i)
{
    struct truth *t = &w->truth[i];
    uint32_t keep[ROWS_MAX] = {0}, n_keep = 0, percent = below(w, 101);
    uint32_t frozen = below(w, 2) * BC_MIN(t->n, 128u);
    for (uint32_t k = 0; k < t->n; k++)
        if (k < frozen || below(w, 100) < percent)
            keep[n_keep++] = k;
    uint64_t copies = w->fake.n_copies;
    seqcache_evict(w->seq[i], keep, n_keep);
    assert_int_equal(w->fake.n_copies, copies); /* no K or V moves */
    if (n_keep < t->n)
        t->history = mix(t->history, UINT64_MAX); /* what comes sees less: it is something else */
    for (uint32_t k = 0; k < n_keep; k++) {
        t->stream[k] = t->stream[keep[k]];
        t->content[k] = t->content[keep[k]];
        t->id[k] = t->id[keep[k]];
    }
    t->n = n_keep;
}

static void fork_into(struct world *w, int from, int to)
{
    struct err e;
    uint32_t out;
    seq_close(w, to);
    ledger_owner_open(&w->owner[to], LEDGER_SESSION, w->user);
    seqcache_compact(w->seq[from]);
    out = pool_pages_out(w->pool);
    assert_int_equal(seqcache_fork(w->seq[from], &w->owner[to], &w->seq[to], &e), 0);
    assert_int_equal(pool_pages_out(w->pool), out); /* free until one of them goes on */
    w->truth[to] = w->truth[from];
    w->truth[from].branch = below(w, 4);
}

/* ---- what must hold ---- */

static void check(struct world *w)
{
    static uint8_t holders[PAGES];
    uint64_t kv = 0;
    memset(holders, 0, sizeof holders);
    for (int i = 0; i < SEQS; i++) {
        const struct seqcache *s = w->seq[i];
        const struct truth *t = &w->truth[i];
        bool mine[PAGES] = {false}, used[ROWS_MAX] = {false};
        assert_int_equal(seqcache_count(s), t->n);
        for (uint32_t p = 0; p < seqcache_pages(s); p++) {
            mine[seqcache_page(s, p)] = true;
            holders[seqcache_page(s, p)]++;
        }
        for (uint32_t k = 0; k < t->n; k++) {
            uint32_t slot = seqcache_slots(s)[k];
            assert_true(mine[slot / KN_PAGE_ROWS] && !used[slot]);
            used[slot] = true;
            assert_int_equal(seqcache_stream(s)[k], t->stream[k]);
            assert_int_equal(seqcache_ids(s)[k], t->id[k]);
            assert_int_equal(w->fake.row[slot], t->content[k]);
        }
        assert_int_equal(seqcache_bytes_held(s), seqcache_pages(s) * pool_page_bytes(w->pool));
        kv += ledger_own(&w->owner[i], LEDGER_kv);
    }
    uint32_t idle = 0;
    for (uint32_t p = 0; p < PAGES; p++)
        if (w->fake.committed[p]) {
            assert_int_equal(pool_holders(w->pool, p), holders[p]);
            idle += holders[p] == 0;
            assert_true(holders[p] > 0 || pool_offered(w->pool, p) != NULL);
        }
    assert_int_equal(idle, pool_pages_idle(w->pool));
    assert_int_equal(idle, prefix_pages_idle(w->tree));
    assert_int_equal(kv + ledger_own(w->user, LEDGER_shared), pool_bytes_held(w->pool));
    assert_int_equal(kv, ledger_all(w->user, LEDGER_kv));
}

/* After a settle, what is held alone is booked so, and what is held by several once. */
static void check_settled(struct world *w)
{
    uint64_t shared = 0;
    for (int i = 0; i < SEQS; i++)
        seqcache_settle(w->seq[i]);
    for (uint32_t p = 0; p < PAGES; p++)
        shared += w->fake.committed[p] && pool_holders(w->pool, p) != 1;
    assert_int_equal(ledger_own(w->user, LEDGER_shared), shared * pool_page_bytes(w->pool));
    for (int i = 0; i < SEQS; i++)
        assert_int_equal(ledger_own(&w->owner[i], LEDGER_kv),
                         seqcache_bytes_held(w->seq[i]) - seqcache_bytes_shared(w->seq[i]));
}

/* ---- cases ---- */

static void fill(struct world *w, int i, uint32_t family, uint32_t branch, uint32_t n)
{
    w->truth[i].family = family;
    w->truth[i].branch = branch;
    adopt(w, i, BC_MIN(n, 1024u));
    assert_true(append(w, i, n - w->truth[i].n, UINT32_MAX));
    offer(w, i);
    check(w);
}

static void a_common_beginning_is_held_once(void **state)
{
    struct world *w = *state;
    fill(w, 0, 0, 0, 300);
    assert_int_equal(pool_pages_out(w->pool), 5);
    assert_int_equal(prefix_pages(w->tree), 4);
    assert_int_equal(seqcache_bytes_shared(w->seq[0]), 0);
    for (int i = 1; i < 8; i++) {
        fill(w, i, 0, (uint32_t)i, 300);
        assert_int_equal(pool_pages_out(w->pool), 5 + i);
        assert_int_equal(seqcache_bytes_shared(w->seq[i]), 4 * pool_page_bytes(w->pool));
        assert_int_equal(seqcache_bytes_held(w->seq[i]), 5 * pool_page_bytes(w->pool));
    }
    fill(w, 8, 1, 0, 300); /* another beginning */
    assert_int_equal(pool_pages_out(w->pool), 5 + 7 + 5);
    check_settled(w);
    /* all go; the beginnings stay, idle, until somebody wants the memory */
    for (int i = 0; i < SEQS; i++) {
        seq_close(w, i);
        seq_open(w, i);
        check(w);
    }
    assert_int_equal(pool_pages_out(w->pool), 8);
    assert_int_equal(pool_pages_idle(w->pool), 8);
    fill(w, 3, 0, 3, 300);
    assert_int_equal(pool_pages_out(w->pool), 9);
    assert_int_equal(seqcache_bytes_shared(w->seq[3]), 0); /* alone */
    while (prefix_shed(w->tree, UINT64_MAX))
        check(w);
    assert_int_equal(pool_pages_out(w->pool), 5);
    assert_int_equal(prefix_pages(w->tree), 4); /* those in use are still offered */
}

static void two_that_evaluated_the_same_at_once_end_with_one_copy(void **state)
{
    struct world *w = *state;
    w->truth[0].family = w->truth[1].family = 2;
    assert_true(append(w, 0, 200, UINT32_MAX) && append(w, 1, 260, UINT32_MAX));
    assert_int_equal(pool_pages_out(w->pool), 4 + 5);
    offer(w, 0);
    offer(w, 1);
    check(w);
    assert_int_equal(pool_pages_out(w->pool), 4 + 2);
    check_settled(w);
}

static void a_prune_of_shared_tokens_is_nobody_elses_business(void **state)
{
    struct world *w = *state;
    uint32_t keep[200], n = 0;
    fill(w, 0, 0, 0, 256);
    fill(w, 1, 0, 1, 256);
    for (uint32_t k = 0; k < 256; k++)
        if (k < 64 || k >= 192 || k % 4 == 0)
            keep[n++] = k;
    uint64_t copies = w->fake.n_copies;
    seqcache_evict(w->seq[0], keep, n);
    struct truth *t = &w->truth[0];
    for (uint32_t k = 0; k < n; k++) {
        t->stream[k] = t->stream[keep[k]];
        t->content[k] = t->content[keep[k]];
        t->id[k] = t->id[keep[k]];
    }
    t->n = n;
    t->history = mix(t->history, UINT64_MAX);
    check(w);
    assert_int_equal(w->fake.n_copies, copies);
    assert_int_equal(pool_pages_out(w->pool), 4);
    assert_int_equal(seqcache_rows_free(w->seq[0]), 0); /* its holes are dead slots */
    assert_int_equal(prefix_pages(w->tree), 4);         /* a third one still finds all of it */
    fill(w, 2, 0, 2, 320);
    assert_int_equal(seqcache_bytes_shared(w->seq[2]), 4 * pool_page_bytes(w->pool));
    /* with room under its ceiling it takes a page; without, it copies out of the emptiest ones */
    assert_true(append(w, 0, 10, 5));
    assert_int_equal(w->fake.n_copies, copies);
    assert_int_equal(seqcache_pages(w->seq[0]), 5);
    assert_true(append(w, 0, 60, 5));
    assert_int_equal(seqcache_pages(w->seq[0]), 5);
    assert_int_equal(w->fake.n_copies, copies + 16); /* a page of 16 live rows is enough */
    check(w);
    /* when the others have gone, its dead slots are free again */
    fill(w, 3, 0, 3, 256);
    n = 0;
    for (uint32_t k = 0; k < 256; k += 2)
        keep[n++] = k;
    seqcache_evict(w->seq[3], keep, n);
    assert_int_equal(seqcache_rows_free(w->seq[3]), 0);
    for (int i = 0; i < 3; i++) {
        seq_close(w, i);
        seq_open(w, i);
    }
    assert_int_equal(seqcache_rows_free(w->seq[3]), 128);
    assert_int_equal(seqcache_pages_needed(w->seq[3], 128), 0);
    seq_close(w, 3);
    seq_open(w, 3);
}

/* The tree alone shares with a sequence: a prune takes the page out, and its holes are refilled. */
static void alone_a_sequence_keeps_its_pages_to_itself(void **state)
{
    struct world *w = *state;
    uint32_t keep[256], n = 0;
    fill(w, 0, 0, 0, 256);
    assert_int_equal(prefix_pages(w->tree), 4);
    for (uint32_t k = 0; k < 256; k++)
        if (k < 130 || k % 3 == 0)
            keep[n++] = k;
    seqcache_evict(w->seq[0], keep, n);
    assert_int_equal(prefix_pages(w->tree), 2); /* frozen ones stay offered */
    assert_int_equal(seqcache_rows_free(w->seq[0]), 256 - n);
    assert_int_equal(seqcache_pages(w->seq[0]), 4);
    seq_close(w, 0);
    seq_open(w, 0);
    fill(w, 1, 0, 0, 200);
    assert_int_equal(pool_pages_out(w->pool), 4);
}

static void a_fork_is_free_until_it_goes_on(void **state)
{
    struct world *w = *state;
    fill(w, 0, 0, 0, 200);
    fork_into(w, 0, 1);
    fork_into(w, 1, 2);
    check(w);
    assert_int_equal(pool_pages_out(w->pool), 4);
    assert_int_equal(seqcache_bytes_held(w->seq[2]), 4 * pool_page_bytes(w->pool));
    w->truth[1].branch = 1;
    w->truth[2].branch = 2;
    uint64_t copies = w->fake.n_copies;
    assert_true(append(w, 1, 1, UINT32_MAX));
    assert_int_equal(pool_pages_out(w->pool), 5);
    assert_true(append(w, 0, 20, 4)); /* no room for a page more: the last one's eight rows move */
    assert_int_equal(w->fake.n_copies, copies + 8);
    assert_int_equal(seqcache_pages(w->seq[0]), 4);
    check(w);
    seq_close(w, 0);
    seq_open(w, 0);
    seq_close(w, 1);
    seq_open(w, 1);
    check(w);
    assert_true(append(w, 2, 56, UINT32_MAX)); /* alone again: into the page's own free slots */
    assert_int_equal(pool_pages_out(w->pool), 4);
    check_settled(w);
}

static void random_operations_keep_every_invariant(void **state)
{
    struct world *w = *state;
    uint32_t n_adopted = 0, n_tight = 0, n_refused = 0, n_shed = 0, n_shared = 0;
    for (int op = 0; op < OPERATIONS; op++) {
        int i = (int)below(w, SEQS);
        uint32_t kind = below(w, 100), had = w->truth[i].n;
        w->fake.refuse_after = below(w, 12) == 0 ? below(w, 3) : UINT32_MAX;
        if (kind < 20) {
            adopt(w, i, below(w, 500));
            n_adopted += w->truth[i].n > had;
        } else if (kind < 50) {
            uint32_t n = 1 + below(w, below(w, 3) == 0 ? 200 : 70);
            uint32_t least = (had + n + 63) / 64;
            bool tight = below(w, 3) == 0;
            uint32_t copies = (uint32_t)w->fake.n_copies;
            n_refused += !append(w, i, n, tight ? BC_MAX(least, 1u) : UINT32_MAX);
            n_tight += w->fake.n_copies > copies;
        } else if (kind < 65) {
            offer(w, i);
        } else if (kind < 75) {
            evict_random(w, i);
        } else if (kind < 80) {
            seqcache_compact(w->seq[i]);
        } else if (kind < 86) {
            seq_close(w, i);
            seq_open(w, i);
        } else if (kind < 92) {
            int k = (int)below(w, SEQS);
            if (k != i)
                fork_into(w, i, k);
        } else if (kind < 96) {
            n_shed += prefix_shed(w->tree, UINT64_MAX);
        } else {
            check_settled(w);
        }
        check(w);
        n_shared += seqcache_bytes_shared(w->seq[i]) > 0;
    }
    print_message("%u adopted, %u copied under a ceiling, %u refused, %u shed, %u shared\n",
                  n_adopted, n_tight, n_refused, n_shed, n_shared);
    /* the walk went everywhere */
    assert_true(n_adopted > 100 && n_tight > 30 && n_refused > 50 && n_shed > 50);
    assert_true(n_shared > 2000);
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, world_open, world_close)
    const struct CMUnitTest tests[] = {
        T(a_common_beginning_is_held_once),
        T(two_that_evaluated_the_same_at_once_end_with_one_copy),
        T(a_prune_of_shared_tokens_is_nobody_elses_business),
        T(alone_a_sequence_keeps_its_pages_to_itself),
        T(a_fork_is_free_until_it_goes_on),
        T(random_operations_keep_every_invariant),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
