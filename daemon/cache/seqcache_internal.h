/* seqcache_internal.h: the sequence itself, for the files that implement it.
 *
 *   seqcache.c   arrays: append, evict, looking
 *   seqpages.c   pages: taking, emptying, giving back; the plan under a ceiling
 *   seqshare.c   pages with several holders: adopt, swap, fork, settle
 */
#ifndef BACKCAST_SEQCACHE_INTERNAL_H
#define BACKCAST_SEQCACHE_INTERNAL_H
#include "seqcache.h"

#define SEQCACHE_MAGIC 0x73657163u /* "seqc" */

struct page_use {
    uint32_t page;
    bool joined;     /* it was somebody else's: its index rows are booked beside it */
    bool leaves;     /* for pages_empty */
    uint32_t n_live; /* rows of this sequence; as pages_count left it */
};

struct seqcache {
    unsigned magic;
    struct pool *pool;
    struct ledger_owner *owner, *shared; /* NULL: its pages are not booked */
    uint32_t n_rows, n_usable, n_pages;
    int32_t *ids, *positions;
    uint64_t *stream;
    uint32_t *slots;
    struct page_use *pages; /* [n_pages] in any order */
    uint64_t rows_moved;
};

static inline uint32_t rows_total(const struct seqcache *s)
{
    return s->n_pages * KN_PAGE_ROWS;
}

static inline uint32_t page_of_slot(uint32_t slot)
{
    return slot / KN_PAGE_ROWS;
}

static inline bool others_hold(const struct seqcache *s, uint32_t page)
{
    return pool_holders(s->pool, page) > 1;
}

/* Whether rows may be written there. */
static inline bool writable(const struct seqcache *s, uint32_t page)
{
    return !others_hold(s, page) && pool_offered(s->pool, page) == NULL;
}

static inline void slots_swap(struct seqcache *s, uint32_t i, uint32_t k)
{
    uint32_t slot = s->slots[i];
    s->slots[i] = s->slots[k];
    s->slots[k] = slot;
}

/* ---- seqpages.c */
/* The arrays get room for n_pages pages. False: no memory; some may be longer than the pages need,
 * which harms nobody. */
bool arrays_resize(struct seqcache *s, uint32_t n_pages);
/* Sorts the pages by number, counts the live rows of each, and nobody leaves. */
void pages_count(struct seqcache *s);
/* Copies the live rows of the pages that leave into free slots of the others (there must be enough of
 * them) and lets go of those pages. */
void pages_empty(struct seqcache *s);

/* ---- seqshare.c */
struct page_use page_join(struct seqcache *s, uint32_t page); /* one more holder of a page */
void page_leave(struct seqcache *s, struct page_use *u);
uint32_t slots_to_claim(const struct seqcache *s);
/* Shared pages without a row of this sequence are let go. */
void pages_forget(struct seqcache *s);
#endif
