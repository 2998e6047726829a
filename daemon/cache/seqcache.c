/* seqcache.c: see seqcache.h. Four parallel arrays in cache order, as long as the pages have rows.
 *
 *             0                 n_rows              n_usable          n_pages * 64
 *   ids       | 17 3 90 4 ...   |                   |                 |
 *   positions | 0  1 7  8 ...   |                   |                 |
 *   stream    | 0  1 7  8 ...   |                   |                 |
 *   slots     | 64 65 71 3 ...  | 66 67 68 ...      | 129 140 ...     |
 *               in cache order    free, any order     dead, any order
 *
 * The slots behind n_rows are the free ones: to append is to move n_rows to the right, to take back
 * is to move it to the left, to evict is to exchange entries. Dead slots are those of shared pages
 * that no row of this sequence uses. So every slot of every page stands in `slots` exactly once,
 * whatever happens, and no operation but those that take pages can fail. An array element costs what
 * POOL_INDEX_BYTES charges for it (the fifth value, 4 bytes, is the policy's): the charge of a page
 * pays for its first holder; who comes to share it has its index rows booked as state.
 */
#include "seqcache_internal.h"
#include <stdlib.h>
#include <string.h>

/* ---- life ---- */

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
        page_leave(s, &s->pages[i]);
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

void seqcache_owner(struct seqcache *s, struct ledger_owner *o, struct ledger_owner *shared)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    bc_assert(s->n_pages == 0);
    s->owner = o;
    s->shared = shared;
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

uint32_t seqcache_rows_free(const struct seqcache *s)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    return s->n_usable - s->n_rows + slots_to_claim(s);
}

uint32_t seqcache_rows_dead(const struct seqcache *s)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    return rows_total(s) - s->n_usable;
}

/* ---- rows ---- */

void seqcache_append(struct seqcache *s, uint32_t n, const int32_t *ids, int32_t first_position,
                     uint64_t first_stream)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    bc_assert(n <= s->n_usable - s->n_rows);
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

/* The slots [n_rows, end) were live until now: those that cannot be written are dead. What only the
 * index holds beside this sequence is taken out of it. */
static void slots_retire(struct seqcache *s, uint32_t end)
{
    for (uint32_t i = s->n_rows; i < end; i++)
        if (!others_hold(s, page_of_slot(s->slots[i])))
            pool_withdraw(s->pool, page_of_slot(s->slots[i]));
    for (uint32_t i = s->n_rows; i < BC_MIN(end, s->n_usable);)
        if (writable(s, page_of_slot(s->slots[i])))
            i++;
        else
            slots_swap(s, i, --s->n_usable);
}

void seqcache_evict(struct seqcache *s, const uint32_t *keep, uint32_t n_keep)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    uint32_t before = s->n_rows;
    for (uint32_t i = 0; i < n_keep; i++) {
        uint32_t from = keep[i]; /* >= i, and ahead of all that was exchanged so far */
        bc_assert(from < s->n_rows && (i == 0 || from > keep[i - 1]));
        s->ids[i] = s->ids[from];
        s->positions[i] = s->positions[from];
        s->stream[i] = s->stream[from];
        slots_swap(s, i, from);
    }
    s->n_rows = n_keep;
    slots_retire(s, before);
    pages_forget(s);
}

void seqcache_renumber(struct seqcache *s)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    for (uint32_t i = 0; i < s->n_rows; i++) {
        bc_assert(s->positions[i] == (int32_t)i || writable(s, page_of_slot(s->slots[i])));
        s->positions[i] = (int32_t)i;
    }
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

size_t seqcache_bytes_shared(const struct seqcache *s)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    size_t n = 0;
    for (uint32_t i = 0; i < s->n_pages; i++)
        n += others_hold(s, s->pages[i].page);
    return n * pool_page_bytes(s->pool);
}

uint64_t seqcache_rows_moved(const struct seqcache *s)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    return s->rows_moved;
}
