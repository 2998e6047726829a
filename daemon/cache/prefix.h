/* prefix.h: pages of untouched tokens that several sequences may read: a radix tree over whole pages.
 *
 *   root --+-- [You are a helpful ... 64 ids] page 7 --+-- [ ... 64 ids] page 8 -- ...
 *          |                                           '-- [ ... 64 ids] page 31
 *          '-- [Translate the ...     64 ids] page 12 ...
 *
 * A node is a page and the 64 tokens in it; its path from the root is all tokens before it. What a row
 * of K and V holds depends on the model, the tokens up to it and their positions, and those are the
 * same for whoever has the same path: so a sequence that begins with it takes the page instead of
 * evaluating it, and gets the same text.
 *
 * One tree per (pool, user): nobody sees what another user has cached, not even by its speed, unless
 * the configuration says so. Only pristine pages are offered (seqcache_pristine), so a pruned cache
 * never is; a page that a sequence alone holds leaves the tree when the sequence prunes tokens of it.
 * Pages that no sequence holds any more are idle: kept until memory is wanted or their time is over.
 *
 * Owner: the engine thread. The tree must be closed before its pool.
 */
#ifndef BACKCAST_PREFIX_H
#define BACKCAST_PREFIX_H
#include "seqcache.h"

struct prefix;

/* shared: whom idle and shared pages and the tree's own memory are booked to. */
int prefix_open(struct prefix **ret, struct pool *p, struct ledger_owner *shared, struct err *e);
void prefix_close(struct prefix **t);

/* How many of ids [n] prefix_adopt would append to s; nothing changes. */
uint32_t prefix_match(struct prefix *t, const struct seqcache *s, const int32_t *ids, uint32_t n,
                      uint64_t now);
/* Appends to s, whose pages are full and pristine, the whole pages of ids [n] that are in the tree
 * behind what s holds. now: any clock, for what was used longest ago. Returns the tokens adopted. */
uint32_t prefix_adopt(struct prefix *t, struct seqcache *s, const int32_t *ids, uint32_t n,
                      uint64_t now);
/* Offers the full pristine pages of s; where the tree has the same tokens already, s takes that page
 * and gives its own up. Returns how many of s's pages are in the tree now. */
uint32_t prefix_offer(struct prefix *t, struct seqcache *s, uint64_t now);

uint32_t prefix_pages(const struct prefix *t);      /* in the tree */
uint32_t prefix_pages_idle(const struct prefix *t); /* of those: held by no sequence */
/* The idle page that was used longest ago, if it was before `before`, goes, and what hangs below it
 * leaves the tree. False: there is none. */
bool prefix_shed(struct prefix *t, uint64_t before);
uint64_t prefix_oldest(const struct prefix *t); /* when that was used; UINT64_MAX: none is idle */
#endif
