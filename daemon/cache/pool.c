/* pool.c: pages out of one reserved arena.
 *
 *   arena   | page 0 | page 1 | page 2 | page 3 | ...    max_pages x stride bytes of addresses
 *             out      free     out      never out yet: n_fresh = 3
 *   refs      1        0        2        0
 *   spare     [1]                                        a stack: dropped last, taken first
 *
 * A page is committed memory exactly while refs > 0. page_out and page_back are the only two places
 * where a page changes hands, and where pages_out moves. Invariants: pages_out + n_spare = n_fresh;
 * n_idle counts the pages whose only reference is the index's.
 */
#include "pool.h"
#include <stdlib.h>

#define POOL_MAGIC 0x706f6f6cu /* "pool" */

struct pool {
    unsigned magic;
    struct kn *kn;
    struct kn_kv kv;
    uint32_t max_pages, n_fresh, n_spare, pages_out, n_idle;
    bool settle_due;
    void (*withdraw)(void *node);
    uint32_t *refs;              /* [max_pages] */
    uint32_t *spare;             /* [n_spare] of max_pages */
    struct ledger_owner **owner; /* [max_pages] who a page is booked to */
    void **node;                 /* [max_pages] of an index; NULL: not offered */
};

static void shape_check(const struct kn_kv *shape)
{
    bc_assert(shape->n_layers > 0 && shape->n_kv_heads > 0);
    bc_assert(shape->head_dim > 0 && shape->head_dim <= KN_HEAD_DIM_MAX);
    bc_assert(kn_kv_type_find(shape->type) != NULL);
    bc_assert(shape->stride >= kn_kv_page_bytes(shape));
}

int pool_open(struct pool **ret, struct kn *kn, const struct kn_kv *shape, uint32_t max_pages,
              struct err *e)
{
    MAGIC_OK(kn, KN_MAGIC);
    shape_check(shape);
    size_t arena_bytes;
    if (max_pages < 1 || max_pages > POOL_PAGES_MAX)
        return err_set(e, BC_EINVALID, "kv_memory", "a pool of %u pages: must be 1 to %u",
                       max_pages, POOL_PAGES_MAX);
    if (!size_mul(shape->stride, max_pages, &arena_bytes))
        return err_set(e, BC_EINVALID, "kv_memory",
                       "%u pages of %zu bytes exceed the address space", max_pages, shape->stride);
    struct pool *p = calloc(1, sizeof *p);
    if (p == NULL)
        return err_nomem(e, sizeof *p);
    int rc;
    p->magic = POOL_MAGIC;
    p->kn = kn;
    p->kv = *shape;
    p->max_pages = max_pages;
    p->refs = calloc(max_pages, sizeof *p->refs);
    p->spare = calloc(max_pages, sizeof *p->spare);
    p->owner = calloc(max_pages, sizeof *p->owner);
    p->node = calloc(max_pages, sizeof *p->node);
    if (p->refs == NULL || p->spare == NULL || p->owner == NULL || p->node == NULL) {
        rc = err_nomem(e, pool_table_bytes(p));
        goto fail;
    }
    if (kn->ops->arena_open(kn, shape->stride, max_pages, &p->kv.base) != KN_OK) {
        rc = err_set(e, BC_ENOMEM, "kv_memory", "%zu bytes of address space could not be reserved",
                     arena_bytes);
        goto fail;
    }
    *ret = p;
    return 0;
fail:
    free(p->node);
    free(p->owner);
    free(p->spare);
    free(p->refs);
    free(p);
    return rc;
}

void pool_close(struct pool **pp)
{
    struct pool *p = *pp;
    if (p == NULL)
        return;
    MAGIC_OK(p, POOL_MAGIC);
    bc_assert(p->pages_out == 0);
    p->kn->ops->arena_close(p->kn, p->kv.base, p->kv.stride, p->max_pages);
    p->magic = 0;
    free(p->node);
    free(p->owner);
    free(p->spare);
    free(p->refs);
    free(p);
    *pp = NULL;
}

const struct kn_kv *pool_kv(const struct pool *p)
{
    MAGIC_OK(p, POOL_MAGIC);
    return &p->kv;
}

struct kn *pool_kn(const struct pool *p)
{
    MAGIC_OK(p, POOL_MAGIC);
    return p->kn;
}

/* The page that the next take would give: the one dropped last, else the first that was never out.
 */
static uint32_t page_next(const struct pool *p)
{
    return p->n_spare > 0 ? p->spare[p->n_spare - 1] : p->n_fresh;
}

static void page_out(struct pool *p, uint32_t page)
{
    if (p->n_spare > 0)
        p->n_spare--;
    else
        p->n_fresh++;
    p->refs[page] = 1;
    p->pages_out++;
}

static void page_back(struct pool *p, uint32_t page)
{
    pool_book(p, page, NULL);
    p->kn->ops->arena_release(p->kn, p->kv.base, p->kv.stride, page);
    p->spare[p->n_spare++] = page;
    p->pages_out--;
}

int pool_take(struct pool *p, uint32_t *ret_page, struct err *e)
{
    MAGIC_OK(p, POOL_MAGIC);
    if (p->pages_out == p->max_pages)
        return err_amount(e, BC_EBUDGET, "kv_memory", pool_page_bytes(p), 0,
                          "all %u pages (%zu bytes) of the cache memory are in use", p->max_pages,
                          pool_bytes_held(p));
    uint32_t page = page_next(p);
    int rc = p->kn->ops->arena_commit(p->kn, p->kv.base, p->kv.stride, page);
    if (rc == KN_EDEVICE)
        return err_set(e, BC_EDEVICE, "", "device %s failed while a cache page was allocated: %s",
                       p->kn->name, p->kn->failed);
    if (rc != KN_OK)
        return err_set(e, BC_ENOMEM, "kv_memory",
                       "the memory of device %s is full: no page of %zu bytes fits", p->kn->name,
                       p->kv.stride);
    page_out(p, page);
    *ret_page = page;
    return 0;
}

void pool_ref(struct pool *p, uint32_t page)
{
    bc_assert(pool_refs(p, page) > 0 && p->refs[page] < UINT32_MAX);
    p->n_idle -= pool_holders(p, page) == 0;
    p->refs[page]++;
}

void pool_drop(struct pool *p, uint32_t page)
{
    bc_assert(pool_holders(p, page) > 0);
    if (--p->refs[page] == 0) {
        page_back(p, page);
        return;
    }
    uint32_t left = pool_holders(p, page);
    p->n_idle += left == 0;
    p->settle_due |= left == 1;
}

/* ---- offered pages ---- */

void pool_offer(struct pool *p, uint32_t page, void *node)
{
    bc_assert(pool_refs(p, page) > 0 && p->node[page] == NULL && node != NULL);
    p->refs[page]++;
    p->node[page] = node;
}

void *pool_offered(const struct pool *p, uint32_t page)
{
    return pool_refs(p, page) > 0 ? p->node[page] : NULL;
}

void pool_unoffer(struct pool *p, uint32_t page)
{
    bc_assert(pool_offered(p, page) != NULL);
    p->n_idle -= pool_holders(p, page) == 0;
    p->node[page] = NULL;
    if (--p->refs[page] == 0)
        page_back(p, page);
    else
        p->settle_due |= p->refs[page] == 1;
}

void pool_on_withdraw(struct pool *p, void (*withdraw)(void *node))
{
    MAGIC_OK(p, POOL_MAGIC);
    p->withdraw = withdraw;
}

void pool_withdraw(struct pool *p, uint32_t page)
{
    void *node = pool_offered(p, page);
    if (node != NULL)
        p->withdraw(node);
    bc_assert(p->node[page] == NULL);
}

uint32_t pool_holders(const struct pool *p, uint32_t page)
{
    return pool_refs(p, page) - (p->node[page] != NULL);
}

uint32_t pool_pages_idle(const struct pool *p)
{
    MAGIC_OK(p, POOL_MAGIC);
    return p->n_idle;
}

bool pool_settle_due(struct pool *p)
{
    MAGIC_OK(p, POOL_MAGIC);
    bool due = p->settle_due;
    p->settle_due = false;
    return due;
}

/* ---- counting ---- */

static enum ledger_kind book_kind(const struct ledger_owner *o)
{
    return o != NULL && o->rank == LEDGER_SESSION ? LEDGER_kv : LEDGER_shared;
}

void pool_book(struct pool *p, uint32_t page, struct ledger_owner *o)
{
    MAGIC_OK(p, POOL_MAGIC);
    bc_assert(page < p->max_pages);
    struct ledger_owner *was = p->owner[page];
    if (o == was)
        return;
    ledger_credit(was, book_kind(was), pool_page_bytes(p));
    ledger_charge(o, book_kind(o), pool_page_bytes(p));
    p->owner[page] = o;
}

struct ledger_owner *pool_booked(const struct pool *p, uint32_t page)
{
    MAGIC_OK(p, POOL_MAGIC);
    bc_assert(page < p->max_pages);
    return p->owner[page];
}

uint32_t pool_refs(const struct pool *p, uint32_t page)
{
    MAGIC_OK(p, POOL_MAGIC);
    bc_assert(page < p->max_pages);
    return p->refs[page];
}

size_t pool_row_bytes(const struct pool *p)
{
    MAGIC_OK(p, POOL_MAGIC);
    return kn_kv_row_bytes(&p->kv) + POOL_INDEX_BYTES;
}

size_t pool_page_bytes(const struct pool *p)
{
    MAGIC_OK(p, POOL_MAGIC);
    return p->kv.stride + KN_PAGE_ROWS * POOL_INDEX_BYTES;
}

size_t pool_bytes_held(const struct pool *p)
{
    return pool_pages_out(p) * pool_page_bytes(p);
}

uint32_t pool_pages_out(const struct pool *p)
{
    MAGIC_OK(p, POOL_MAGIC);
    return p->pages_out;
}

uint32_t pool_pages_max(const struct pool *p)
{
    MAGIC_OK(p, POOL_MAGIC);
    return p->max_pages;
}

size_t pool_table_bytes(const struct pool *p)
{
    MAGIC_OK(p, POOL_MAGIC);
    return sizeof *p +
           p->max_pages * (sizeof *p->refs + sizeof *p->spare + sizeof *p->owner + sizeof *p->node);
}
