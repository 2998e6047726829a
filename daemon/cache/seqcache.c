/* seqcache.c: see seqcache.h. Four parallel arrays in cache order, as long as the pages have rows.
 *
 *             0                 n_rows              n_pages * 64
 *   ids       | 17 3 90 4 ...   |                   |
 *   positions | 0  1 7  8 ...   |                   |
 *   stream    | 0  1 7  8 ...   |                   |
 *   slots     | 64 65 71 3 ...  | 66 67 68 ...      |
 *               in cache order    free, any order
 *
 * The slots behind n_rows are the free ones: to append is to move n_rows to the right, to take back
 * is to move it to the left, to evict is to exchange entries. So every slot of every page stands in
 * `slots` exactly once, whatever happens, and no operation but `reserve` can fail. An array element
 * costs what POOL_INDEX_BYTES charges for it (the fifth value, 4 bytes, is the policy's).
 */
#include "seqcache.h"
#include <stdlib.h>
#include <string.h>

#define SEQCACHE_MAGIC 0x73657163u /* "seqc" */

struct page_use {
    uint32_t page, n_live;
};

struct seqcache {
    unsigned magic;
    struct pool *pool;
    struct ledger_owner *owner; /* NULL: its pages are not booked */
    uint32_t n_rows, n_pages;
    int32_t *ids, *positions;
    uint64_t *stream;
    uint32_t *slots;
    struct page_use *pages; /* [n_pages] in any order; n_live counts inside compact only */
    uint64_t rows_moved;
};

static uint32_t rows_total(const struct seqcache *s)
{
    return s->n_pages * KN_PAGE_ROWS;
}

int seqcache_open(struct seqcache **ret, struct pool *p, struct err *e)
{
    bc_assert(p != NULL);
    struct seqcache *s = calloc(1, sizeof *s);
    if (s == NULL)
        return err_nomem(e, sizeof *s);
    s->magic = SEQCACHE_MAGIC;
    s->pool = p;
    *ret = s;
    return 0;
}

void seqcache_close(struct seqcache **ps)
{
    struct seqcache *s = *ps;
    if (s == NULL)
        return;
    MAGIC_OK(s, SEQCACHE_MAGIC);
    for (uint32_t i = 0; i < s->n_pages; i++)
        pool_drop(s->pool, s->pages[i].page);
    s->magic = 0;
    free(s->ids);
    free(s->positions);
    free(s->stream);
    free(s->slots);
    free(s->pages);
    free(s);
    *ps = NULL;
}

struct pool *seqcache_pool(const struct seqcache *s)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    return s->pool;
}

void seqcache_owner(struct seqcache *s, struct ledger_owner *o)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    s->owner = o;
}

uint32_t seqcache_count(const struct seqcache *s)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    return s->n_rows;
}

const int32_t *seqcache_ids(const struct seqcache *s)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    return s->ids;
}

const int32_t *seqcache_positions(const struct seqcache *s)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    return s->positions;
}

const uint64_t *seqcache_stream(const struct seqcache *s)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    return s->stream;
}

const uint32_t *seqcache_slots(const struct seqcache *s)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    return s->slots;
}

struct kn_seq seqcache_view(const struct seqcache *s)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    return (struct kn_seq){.kv = pool_kv(s->pool), .slots = s->slots, .n = s->n_rows};
}

uint32_t seqcache_pages(const struct seqcache *s)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    return s->n_pages;
}

uint32_t seqcache_page(const struct seqcache *s, uint32_t i)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    bc_assert(i < s->n_pages);
    return s->pages[i].page;
}

/* ---- growing --------------------------------------------------------------------------------- */

/* *array becomes [n] elements. False: no memory, it is as it was. */
static bool array_resize(void *array, size_t n, size_t element)
{
    void *old, *moved = NULL;
    memcpy(&old, array, sizeof old); /* array is the address of a pointer of whichever type */
    if (n == 0)
        free(old);
    else if ((moved = reallocarray(old, n, element)) == NULL)
        return false;
    memcpy(array, &moved, sizeof moved);
    return true;
}

/* The arrays get room for n_pages pages. False: no memory; some may be longer than the pages need,
 * which harms nobody. */
static bool arrays_resize(struct seqcache *s, uint32_t n_pages)
{
    size_t rows = (size_t)n_pages * KN_PAGE_ROWS;
    return array_resize(&s->ids, rows, sizeof *s->ids) &&
           array_resize(&s->positions, rows, sizeof *s->positions) &&
           array_resize(&s->stream, rows, sizeof *s->stream) &&
           array_resize(&s->slots, rows, sizeof *s->slots) &&
           array_resize(&s->pages, n_pages, sizeof *s->pages);
}

uint32_t seqcache_rows_free(const struct seqcache *s)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    return rows_total(s) - s->n_rows;
}

uint32_t seqcache_pages_needed(const struct seqcache *s, uint32_t n)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    uint32_t n_free = seqcache_rows_free(s);
    if (n <= n_free)
        return 0;
    return (uint32_t)(((uint64_t)(n - n_free) + KN_PAGE_ROWS - 1) / KN_PAGE_ROWS);
}

/* Takes `more` pages into the unused end of `pages`: all of them or none. */
static int pages_take(struct seqcache *s, uint32_t more, struct err *e)
{
    struct page_use *fresh = s->pages + s->n_pages;
    for (uint32_t i = 0; i < more; i++) {
        int rc = pool_take(s->pool, &fresh[i].page, e);
        if (rc < 0) {
            while (i-- > 0)
                pool_drop(s->pool, fresh[i].page);
            return rc;
        }
        pool_book(s->pool, fresh[i].page, s->owner);
    }
    return 0;
}

int seqcache_reserve(struct seqcache *s, uint32_t n, struct err *e)
{
    uint32_t more = seqcache_pages_needed(s, n);
    if (more == 0)
        return 0;
    uint32_t left = pool_pages_max(s->pool) - pool_pages_out(s->pool);
    size_t page_bytes = pool_page_bytes(s->pool);
    if (more > left)
        return err_amount(e, BC_EBUDGET, "kv_memory", more * page_bytes, left * page_bytes,
                          "%u more tokens need %u more cache pages of %zu bytes, %u are left", n,
                          more, page_bytes, left);
    int rc = arrays_resize(s, s->n_pages + more) ? pages_take(s, more, e)
                                                 : err_nomem(e, more * page_bytes);
    if (rc < 0) {
        arrays_resize(s, s->n_pages);
        return rc;
    }
    for (; more > 0; more--) {
        uint32_t *slots = s->slots + rows_total(s);
        for (uint32_t row = 0; row < KN_PAGE_ROWS; row++)
            slots[row] = s->pages[s->n_pages].page * KN_PAGE_ROWS + row;
        s->n_pages++;
    }
    return 0;
}

void seqcache_append(struct seqcache *s, uint32_t n, const int32_t *ids, int32_t first_position,
                     uint64_t first_stream)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    bc_assert(n <= rows_total(s) - s->n_rows);
    if (s->n_rows > 0 && n > 0)
        bc_assert(first_stream > s->stream[s->n_rows - 1]);
    for (uint32_t i = 0; i < n; i++, s->n_rows++) {
        s->ids[s->n_rows] = ids[i];
        s->positions[s->n_rows] = first_position + (int32_t)i;
        s->stream[s->n_rows] = first_stream + i;
    }
}

void seqcache_pop(struct seqcache *s, uint32_t n)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    bc_assert(n <= s->n_rows);
    s->n_rows -= n;
}

/* The slots of all pages, those of the rows first. */
static void slots_place(struct seqcache *s, const struct seqcache_rows *rows, uint8_t *used)
{
    uint32_t n_free = rows->n_rows;
    for (uint32_t i = 0; i < rows->n_rows; i++) {
        uint32_t slot = rows->slots[i];
        bc_assert(slot < rows_total(s) && used[slot] == 0);
        used[slot] = 1;
        s->slots[i] = s->pages[slot / KN_PAGE_ROWS].page * KN_PAGE_ROWS + slot % KN_PAGE_ROWS;
    }
    for (uint32_t slot = 0; slot < rows_total(s); slot++)
        if (used[slot] == 0)
            s->slots[n_free++] =
                s->pages[slot / KN_PAGE_ROWS].page * KN_PAGE_ROWS + slot % KN_PAGE_ROWS;
}

int seqcache_place(struct seqcache *s, const struct seqcache_rows *rows, struct err *e)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    bc_assert(s->n_rows == 0 && s->n_pages == 0);
    bc_assert(rows->n_rows <= rows->n_pages * (uint64_t)KN_PAGE_ROWS);
    size_t n = rows->n_rows, all = (size_t)rows->n_pages * KN_PAGE_ROWS;
    uint8_t *used = calloc(1, all + 1);
    if (used == NULL)
        return err_nomem(e, all + 1);
    int rc = all > 0 ? seqcache_reserve(s, (uint32_t)all, e) : 0;
    if (rc < 0)
        goto out;
    if (n > 0) {
        memcpy(s->ids, rows->ids, n * sizeof *s->ids);
        memcpy(s->positions, rows->positions, n * sizeof *s->positions);
        memcpy(s->stream, rows->stream, n * sizeof *s->stream);
    }
    slots_place(s, rows, used);
    s->n_rows = rows->n_rows;
out:
    free(used);
    return rc;
}

/* ---- shrinking ------------------------------------------------------------------------------- */

void seqcache_evict(struct seqcache *s, const uint32_t *keep, uint32_t n_keep)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    for (uint32_t i = 0; i < n_keep; i++) {
        uint32_t from = keep[i]; /* >= i, and ahead of all that was exchanged so far */
        bc_assert(from < s->n_rows && (i == 0 || from > keep[i - 1]));
        s->ids[i] = s->ids[from];
        s->positions[i] = s->positions[from];
        s->stream[i] = s->stream[from];
        uint32_t slot = s->slots[i];
        s->slots[i] = s->slots[from];
        s->slots[from] = slot;
    }
    s->n_rows = n_keep;
}

static int by_page(const void *a, const void *b)
{
    uint32_t x = ((const struct page_use *)a)->page, y = ((const struct page_use *)b)->page;
    return (x > y) - (x < y);
}

static int by_live_then_page(const void *a, const void *b)
{
    uint32_t x = ((const struct page_use *)a)->n_live, y = ((const struct page_use *)b)->n_live;
    return x != y ? (x < y) - (x > y) : by_page(a, b);
}

/* Where slot's page stands among the first n, which are ascending by page. NULL: not there. */
static struct page_use *page_of(const struct seqcache *s, uint32_t slot, uint32_t n)
{
    struct page_use key = {.page = slot / KN_PAGE_ROWS};
    return bsearch(&key, s->pages, n, sizeof key, by_page);
}

/* Puts the n_stay fullest pages in front, ascending by page: to empty the others moves the fewest
 * rows. */
static void pages_rank(struct seqcache *s, uint32_t n_stay)
{
    qsort(s->pages, s->n_pages, sizeof *s->pages, by_page);
    for (uint32_t i = 0; i < s->n_pages; i++)
        s->pages[i].n_live = 0;
    for (uint32_t i = 0; i < s->n_rows; i++)
        page_of(s, s->slots[i], s->n_pages)->n_live++;
    qsort(s->pages, s->n_pages, sizeof *s->pages, by_live_then_page);
    qsort(s->pages, n_stay, sizeof *s->pages, by_page);
}

uint32_t seqcache_compact_room(struct seqcache *s, uint32_t n_room)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    struct kn *kn = pool_kn(s->pool);
    uint64_t pages = ((uint64_t)s->n_rows + n_room + KN_PAGE_ROWS - 1) / KN_PAGE_ROWS;
    uint32_t n_stay = (uint32_t)BC_MIN(pages, (uint64_t)s->n_pages), n_gone = s->n_pages - n_stay;
    if (n_gone == 0)
        return 0;
    pages_rank(s, n_stay);
    uint32_t *spare = s->slots + s->n_rows, n_spare = 0;
    for (uint32_t i = s->n_rows; i < rows_total(s); i++)
        if (page_of(s, s->slots[i], n_stay) != NULL)
            spare[n_spare++] = s->slots[i];
    for (uint32_t i = 0; i < s->n_rows; i++) {
        if (page_of(s, s->slots[i], n_stay) != NULL)
            continue;
        uint32_t to = spare[--n_spare];
        kn->ops->row_copy(kn, pool_kv(s->pool), to, s->slots[i]);
        s->slots[i] = to;
        s->rows_moved++;
    }
    bc_assert(s->n_rows + n_spare == n_stay * KN_PAGE_ROWS);
    while (s->n_pages > n_stay)
        pool_drop(s->pool, s->pages[--s->n_pages].page);
    arrays_resize(s, n_stay);
    return n_gone;
}

uint32_t seqcache_compact(struct seqcache *s)
{
    return seqcache_compact_room(s, 0);
}

void seqcache_clear(struct seqcache *s)
{
    s->n_rows = 0;
    seqcache_compact(s); /* no rows: every page goes, none is moved */
    bc_assert(s->n_pages == 0);
}

/* ---- counting -------------------------------------------------------------------------------- */

size_t seqcache_bytes_live(const struct seqcache *s)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    return s->n_rows * pool_row_bytes(s->pool);
}

size_t seqcache_bytes_held(const struct seqcache *s)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    return s->n_pages * pool_page_bytes(s->pool);
}

uint64_t seqcache_rows_moved(const struct seqcache *s)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    return s->rows_moved;
}
