/* seqshare.c: pages that several sequences hold.
 *
 *   holders of a page   1, not offered   its own: free slots are refilled
 *                       1, offered       full and untouched; to write there takes it out of the index
 *                       2 and more       fixed: what is evicted leaves a dead slot
 *
 * A page is booked to the one that holds it alone, and to `shared` while several do or while only the
 * index does. Nobody is told when another holder goes: seqcache_settle looks (pool_settle_due says
 * when that is worth while).
 */
#include "seqcache_internal.h"
#include <stdlib.h>
#include <string.h>

/* ---- coming and going ---- */

static void joined_set(struct seqcache *s, struct page_use *u, bool joined)
{
    if (joined && !u->joined)
        ledger_charge(s->owner, LEDGER_state, KN_PAGE_ROWS * POOL_INDEX_BYTES);
    if (!joined && u->joined)
        ledger_credit(s->owner, LEDGER_state, KN_PAGE_ROWS * POOL_INDEX_BYTES);
    u->joined = joined;
}

/* One more holder for a page that is out. */
struct page_use page_join(struct seqcache *s, uint32_t page)
{
    struct page_use u = {.page = page};
    pool_ref(s->pool, page);
    if (others_hold(s, page)) {
        pool_book(s->pool, page, s->shared);
        joined_set(s, &u, true);
    } else {
        pool_book(s->pool, page, s->owner); /* it was idle */
    }
    return u;
}

void page_leave(struct seqcache *s, struct page_use *u)
{
    joined_set(s, u, false);
    if (pool_refs(s->pool, u->page) > 1 && pool_booked(s->pool, u->page) == s->owner)
        pool_book(s->pool, u->page, s->shared); /* it stays with others, or idle */
    pool_drop(s->pool, u->page);
}

/* ---- dead slots ---- */

uint32_t slots_to_claim(const struct seqcache *s)
{
    uint32_t n = 0;
    for (uint32_t i = s->n_usable; i < rows_total(s); i++)
        n += !others_hold(s, page_of_slot(s->slots[i]));
    return n;
}

/* Dead slots that may be written are free. */
static void slots_revive(struct seqcache *s)
{
    for (uint32_t i = s->n_usable; i < rows_total(s); i++)
        if (writable(s, page_of_slot(s->slots[i])))
            slots_swap(s, i, s->n_usable++);
}

void seqcache_settle(struct seqcache *s)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    for (uint32_t i = 0; i < s->n_pages; i++) {
        struct page_use *u = &s->pages[i];
        if (others_hold(s, u->page))
            continue;
        pool_book(s->pool, u->page, s->owner);
        joined_set(s, u, false);
    }
    slots_revive(s);
}

void seqcache_claim(struct seqcache *s)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    for (uint32_t i = s->n_usable; i < rows_total(s); i++)
        if (!others_hold(s, page_of_slot(s->slots[i])))
            pool_withdraw(s->pool, page_of_slot(s->slots[i]));
    seqcache_settle(s);
}

void pages_forget(struct seqcache *s)
{
    uint32_t n_fixed = 0;
    for (uint32_t i = 0; i < s->n_pages; i++)
        n_fixed += !writable(s, s->pages[i].page);
    if (n_fixed == 0)
        return;
    pages_count(s);
    for (uint32_t i = 0; i < s->n_pages; i++)
        s->pages[i].leaves = s->pages[i].n_live == 0 && !writable(s, s->pages[i].page);
    pages_empty(s);
}

/* ---- sharing ---- */

bool seqcache_pristine(const struct seqcache *s, uint32_t at)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    uint32_t first = at * KN_PAGE_ROWS, last = first + KN_PAGE_ROWS - 1;
    if (last >= s->n_rows || s->stream[first] != first || s->stream[last] != last ||
        s->positions[first] != (int32_t)first || s->positions[last] != (int32_t)last)
        return false;
    for (uint32_t i = 0; i < KN_PAGE_ROWS; i++)
        if (s->slots[first + i] != page_of_slot(s->slots[first]) * KN_PAGE_ROWS + i)
            return false;
    return true;
}

int seqcache_adopt(struct seqcache *s, uint32_t page, const int32_t *ids, struct err *e)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    uint32_t first = s->n_rows;
    bc_assert(first == rows_total(s) && s->n_usable == first);
    bc_assert(first == 0 || s->stream[first - 1] == first - 1);
    if (!arrays_resize(s, s->n_pages + 1)) {
        arrays_resize(s, s->n_pages);
        return err_nomem(e, KN_PAGE_ROWS * POOL_INDEX_BYTES);
    }
    s->pages[s->n_pages++] = page_join(s, page);
    for (uint32_t i = 0; i < KN_PAGE_ROWS; i++) {
        s->ids[first + i] = ids[i];
        s->positions[first + i] = (int32_t)(first + i);
        s->stream[first + i] = first + i;
        s->slots[first + i] = page * KN_PAGE_ROWS + i;
    }
    s->n_rows = s->n_usable = first + KN_PAGE_ROWS;
    return 0;
}

void seqcache_swap_page(struct seqcache *s, uint32_t at, uint32_t page)
{
    bc_assert(seqcache_pristine(s, at));
    uint32_t first = at * KN_PAGE_ROWS, old = page_of_slot(s->slots[first]), i = 0;
    while (s->pages[i].page != old)
        i++;
    page_leave(s, &s->pages[i]);
    s->pages[i] = page_join(s, page);
    for (uint32_t r = 0; r < KN_PAGE_ROWS; r++)
        s->slots[first + r] = page * KN_PAGE_ROWS + r;
}

int seqcache_fork(struct seqcache *s, struct ledger_owner *owner, struct seqcache **ret,
                  struct err *e)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    struct seqcache *f;
    seqcache_compact(s); /* no page without a row is shared */
    int rc = seqcache_open(&f, s->pool, e);
    if (rc < 0)
        return rc;
    if (!arrays_resize(f, s->n_pages)) {
        seqcache_close(&f);
        return err_nomem(e, rows_total(s) * (size_t)POOL_INDEX_BYTES);
    }
    f->owner = owner;
    f->shared = s->shared;
    for (uint32_t i = 0; i < s->n_pages; i++)
        f->pages[f->n_pages++] = page_join(f, s->pages[i].page);
    size_t n = s->n_rows;
    if (n > 0) {
        memcpy(f->ids, s->ids, n * sizeof *f->ids);
        memcpy(f->positions, s->positions, n * sizeof *f->positions);
        memcpy(f->stream, s->stream, n * sizeof *f->stream);
        memcpy(f->slots, s->slots, rows_total(s) * sizeof *f->slots);
    }
    f->n_rows = f->n_usable = s->n_rows;
    s->n_usable = s->n_rows;
    *ret = f;
    return 0;
}
