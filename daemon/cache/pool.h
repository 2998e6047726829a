/* pool.h: fixed pages of K and V (and hidden rows): allocation, references, exact byte counts.
 *
 * One pool per (model, kv type, hidden yes/no). Address space for all pages is reserved when the
 * pool opens; a page is committed when it is taken and given back to the system when its last
 * reference drops, zeroed before anybody else sees it. pool_bytes_held is exactly pages out x
 * pool_page_bytes, counted in the same function that moves the page. Owner: one thread.
 */
#ifndef BACKCAST_POOL_H
#define BACKCAST_POOL_H
#include "kn.h"
#include "ledger.h"

struct pool;

#define POOL_PAGE_NONE UINT32_MAX
/* So that every slot (page * 64 + row) fits in 32 bits. */
#define POOL_PAGES_MAX (UINT32_MAX / KN_PAGE_ROWS - 1)
/* Host-side bytes of a cached token beside its page: id, position, stream index (8), slot, and one
 * policy value. Charged with the page. */
#define POOL_INDEX_BYTES 24

/* shape: layout as model_kv_shape gives it (copied; base is filled in here). */
int pool_open(struct pool **ret, struct kn *kn, const struct kn_kv *shape, uint32_t max_pages,
              struct err *e);
void pool_close(struct pool **p); /* all pages must be back: asserted */
const struct kn_kv *pool_kv(const struct pool *p);
struct kn *pool_kn(const struct pool *p);

/* BC_EBUDGET: max_pages are out; BC_ENOMEM. */
int pool_take(struct pool *p, uint32_t *ret_page, struct err *e);
void pool_ref(struct pool *p, uint32_t page);
void pool_drop(struct pool *p, uint32_t page);
uint32_t pool_refs(const struct pool *p, uint32_t page);

/* A page can be offered: it stands in an index whose `node` it is (prefix.h), which holds one of its
 * references. A page that is offered or has several holders is never written; the one holder of an
 * offered page that wants to calls pool_withdraw first, and the index takes it out. */
void pool_offer(struct pool *p, uint32_t page, void *node);
void *pool_offered(const struct pool *p, uint32_t page); /* NULL: it is not */
void pool_unoffer(struct pool *p, uint32_t page);
void pool_on_withdraw(struct pool *p, void (*withdraw)(void *node));
void pool_withdraw(struct pool *p, uint32_t page);
uint32_t pool_holders(const struct pool *p, uint32_t page); /* references but the index's */
uint32_t pool_pages_idle(const struct pool *p);             /* offered and held by nobody */
/* Whether a page has come down to one holder since this was last asked: see seqcache_settle. */
bool pool_settle_due(struct pool *p);

/* Books a page that is out to an owner: as kv to a session, as shared to anybody else; NULL: to
 * nobody, as pages are when they are taken. */
void pool_book(struct pool *p, uint32_t page, struct ledger_owner *o);
struct ledger_owner *pool_booked(const struct pool *p, uint32_t page);

/* kn_kv_row_bytes + POOL_INDEX_BYTES: the true cost of a token. */
size_t pool_row_bytes(const struct pool *p);
size_t pool_page_bytes(const struct pool *p); /* stride + KN_PAGE_ROWS * POOL_INDEX_BYTES */
size_t pool_bytes_held(const struct pool *p);
uint32_t pool_pages_out(const struct pool *p);
uint32_t pool_pages_max(const struct pool *p);
size_t pool_table_bytes(const struct pool *p); /* host memory beside the pages */
#endif
