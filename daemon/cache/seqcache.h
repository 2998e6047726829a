/* seqcache.h: the KV cache of one sequence: which tokens are cached, in order, and where each lies.
 *
 *   index      0      1      2      3        (cache order = token order)
 *   id         17     3      90     4        token
 *   position   0      1      7      8        keys are rotated to it; given once, unless renumbered
 *   stream     0      1      7      8        count of the token in the session's life
 *   slot       64     65     71     3        page * 64 + row in the pool
 *
 * An eviction edits these arrays and moves no K or V; freed slots are refilled by the next tokens.
 *
 * Pages may be shared: with sequences that adopted the same prefix (prefix.h) or were forked. A page
 * with other holders is never written: what this sequence evicts from it leaves a slot that is dead
 * to it, until the others have gone. So a sequence prunes shared tokens without copying and without
 * anybody noticing; only when its ceiling leaves no room for new pages are live rows copied out.
 *
 * Owner: the engine thread. Invariants: indices ascending in stream; every slot lies in a page that
 * this sequence holds, no slot twice; rows + free slots + dead slots = pages * 64.
 */
#ifndef BACKCAST_SEQCACHE_H
#define BACKCAST_SEQCACHE_H
#include "pool.h"

struct seqcache;

int seqcache_open(struct seqcache **ret, struct pool *p, struct err *e);
void seqcache_close(struct seqcache **s); /* gives every page back */
struct pool *seqcache_pool(const struct seqcache *s);
/* Whom its pages are booked to, from the next one on, and whom those that it shares; NULL (at open):
 * nobody. */
void seqcache_owner(struct seqcache *s, struct ledger_owner *o, struct ledger_owner *shared);

uint32_t seqcache_count(const struct seqcache *s);
const int32_t *seqcache_ids(const struct seqcache *s);       /* [count] */
const int32_t *seqcache_positions(const struct seqcache *s); /* [count] */
const uint64_t *seqcache_stream(const struct seqcache *s);   /* [count] */
const uint32_t *seqcache_slots(const struct seqcache *s);    /* [count] */
struct kn_seq seqcache_view(const struct seqcache *s);
uint32_t seqcache_pages(const struct seqcache *s);            /* that it holds */
uint32_t seqcache_page(const struct seqcache *s, uint32_t i); /* number of the i-th in the pool */

uint32_t seqcache_rows_free(const struct seqcache *s); /* that need no page */
uint32_t seqcache_rows_dead(const struct seqcache *s); /* slots of shared pages that it has left */
/* Pages that seqcache_reserve would take. */
uint32_t seqcache_pages_needed(const struct seqcache *s, uint32_t n);
/* Makes room for n more rows: takes pages as needed. All or nothing. BC_EBUDGET / BC_ENOMEM. */
int seqcache_reserve(struct seqcache *s, uint32_t n, struct err *e);
/* The same under a ceiling of pages held: where shared pages leave too little of it, live rows are
 * copied out of those that have the fewest. rows + n must fit in that many pages: asserted. */
uint32_t seqcache_pages_within(struct seqcache *s, uint32_t n, uint32_t max_pages);
int seqcache_reserve_within(struct seqcache *s, uint32_t n, uint32_t max_pages, struct err *e);
/* Appends n reserved rows (asserted): ids, positions first_position.., stream indices
 * first_stream... The rows are part of the view at once; the pass that writes their K and V
 * follows. */
void seqcache_append(struct seqcache *s, uint32_t n, const int32_t *ids, int32_t first_position,
                     uint64_t first_stream);
void seqcache_pop(struct seqcache *s,
                  uint32_t n); /* takes the last n rows back (a pass that failed) */

/* Keeps exactly the n_keep cache indices of keep (ascending, asserted); the rest go. Moves no K or
 * V. */
void seqcache_evict(struct seqcache *s, const uint32_t *keep, uint32_t n_keep);
/* A whole sequence at once, for one that holds nothing: rows as given, in n_pages pages of their own;
 * a slot counts these from 0, in the order in which seqcache_page then tells them. The order of
 * stream indices and that no slot stands twice are the caller's to have checked. All or nothing:
 * BC_EBUDGET, BC_ENOMEM. */
struct seqcache_rows {
    uint32_t n_rows, n_pages;
    const int32_t *ids, *positions;
    const uint64_t *stream;
    const uint32_t *slots;
};
int seqcache_place(struct seqcache *s, const struct seqcache_rows *rows, struct err *e);
/* Gives every page back: it holds nothing. */
void seqcache_clear(struct seqcache *s);
/* Moves live rows of its own pages together so that whole pages can be given back; returns the
 * number of pages freed. Shared pages stay, unless no row of this sequence is left in them. */
uint32_t seqcache_compact(struct seqcache *s);
/* The same, with room for n_room more rows left. */
uint32_t seqcache_compact_room(struct seqcache *s, uint32_t n_room);

/* ---- positions */

/* Renumbering: cached token i gets position i. Its keys are turned by whoever asks for it, between the two calls:
 *   seqcache_renumber_reserve   rows whose position changes lie in pages of this sequence's own: those in
 *                               pages that others hold are copied out of them. All or nothing: BC_EBUDGET,
 *                               BC_ENOMEM. It holds no more pages afterwards than before.
 *   seqcache_renumber           the positions. The pages must still be its own: asserted.
 * A row that was turned is no beginning of a prompt any more: its position is less than its stream
 * index, so seqcache_pristine is false. One that was not has all of its bits. */
uint32_t seqcache_renumber_pages(struct seqcache *s); /* that the first would take */
int seqcache_renumber_reserve(struct seqcache *s, struct err *e);
void seqcache_renumber(struct seqcache *s);

/* ---- sharing */

/* Whether its rows are tokens 0, 1, 2 ... of its life, none evicted, and row i lies in row i % 64 of
 * a page: what a prefix may be made of, as far as the pages are full. */
bool seqcache_pristine(const struct seqcache *s, uint32_t page);
/* Appends a whole page of tokens that lies in the pool already: it takes a reference. Only for a
 * sequence whose pages are full and all pristine. BC_ENOMEM: nothing has changed. */
int seqcache_adopt(struct seqcache *s, uint32_t page, const int32_t *ids, struct err *e);
/* Gives its at-th page of tokens (pristine, full) up for another with the same content. */
void seqcache_swap_page(struct seqcache *s, uint32_t at, uint32_t page);
/* A second sequence, booked to `owner`, with the same rows in the same pages; free slots become dead
 * to both. */
int seqcache_fork(struct seqcache *s, struct ledger_owner *owner, struct seqcache **ret,
                  struct err *e);
/* Pages whose other holders have gone are its own again: booked so, and their dead slots are free. */
void seqcache_settle(struct seqcache *s);
/* The same, and pages with dead slots that only the index holds beside it are taken out of the index,
 * so that these slots are free too: when their room is wanted. */
void seqcache_claim(struct seqcache *s);

size_t seqcache_bytes_live(const struct seqcache *s); /* rows x row cost */
size_t seqcache_bytes_held(const struct seqcache *s); /* pages x page cost, shared ones too */
/* of those: pages that others hold as well */
size_t seqcache_bytes_shared(const struct seqcache *s);
/* copies, ever: an eviction must not make any */
uint64_t seqcache_rows_moved(const struct seqcache *s);
#endif
