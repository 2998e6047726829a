/* seqpages.c: the pages of a sequence: taken, emptied, given back.
 *
 *   fixed pages (shared or offered)     own pages                       max_pages: a ceiling
 *   | ##### ##x## | x#xxxxx |           | ####. | #.#.. |               # live  . free  x dead
 *                   ^ fewest live rows
 *
 * Free slots exist in own pages only. Under a ceiling, the fixed pages with the fewest live rows are
 * emptied into own ones, as few as make room: each gives back a whole page for the rows that it has.
 */
#include "seqcache_internal.h"
#include <stdlib.h>
#include <string.h>

static uint32_t pages_of_rows(uint64_t rows)
{
    return (uint32_t)((rows + KN_PAGE_ROWS - 1) / KN_PAGE_ROWS);
}

/* ---- arrays ---- */

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

bool arrays_resize(struct seqcache *s, uint32_t n_pages)
{
    size_t rows = (size_t)n_pages * KN_PAGE_ROWS;
    return array_resize(&s->ids, rows, sizeof *s->ids) &&
           array_resize(&s->positions, rows, sizeof *s->positions) &&
           array_resize(&s->stream, rows, sizeof *s->stream) &&
           array_resize(&s->slots, rows, sizeof *s->slots) &&
           array_resize(&s->pages, n_pages, sizeof *s->pages);
}

/* ---- which pages, and how full ---- */

static int by_page(const void *a, const void *b)
{
    uint32_t x = ((const struct page_use *)a)->page, y = ((const struct page_use *)b)->page;
    return (x > y) - (x < y);
}

/* The fullest first. */
static int by_live_then_page(const void *a, const void *b)
{
    uint32_t x = ((const struct page_use *)a)->n_live, y = ((const struct page_use *)b)->n_live;
    return x != y ? (x < y) - (x > y) : by_page(a, b);
}

/* Where slot's page stands among the first n, which are ascending by page. NULL: not there. */
static struct page_use *page_of(const struct seqcache *s, uint32_t slot, uint32_t n)
{
    struct page_use key = {.page = page_of_slot(slot)};
    return bsearch(&key, s->pages, n, sizeof key, by_page);
}

void pages_count(struct seqcache *s)
{
    qsort(s->pages, s->n_pages, sizeof *s->pages, by_page);
    for (uint32_t i = 0; i < s->n_pages; i++) {
        s->pages[i].n_live = 0;
        s->pages[i].leaves = false;
    }
    for (uint32_t i = 0; i < s->n_rows; i++)
        page_of(s, s->slots[i], s->n_pages)->n_live++;
}

/* Puts the pages that stay in front, ascending by number; returns how many. */
static uint32_t pages_part(struct seqcache *s)
{
    uint32_t n_stay = 0;
    for (uint32_t i = 0; i < s->n_pages; i++) {
        struct page_use u = s->pages[i];
        if (u.leaves)
            continue;
        s->pages[i] = s->pages[n_stay];
        s->pages[n_stay++] = u;
    }
    qsort(s->pages, n_stay, sizeof *s->pages, by_page);
    return n_stay;
}

/* Keeps the entries [from, to) whose page stays, moved down to `at`; returns where they end. */
static uint32_t slots_filter(struct seqcache *s, uint32_t at, uint32_t from, uint32_t to,
                             uint32_t n_stay)
{
    for (uint32_t i = from; i < to; i++)
        if (page_of(s, s->slots[i], n_stay) != NULL)
            s->slots[at++] = s->slots[i];
    return at;
}

void pages_empty(struct seqcache *s)
{
    struct kn *kn = pool_kn(s->pool);
    uint32_t n_stay = pages_part(s), all = rows_total(s), usable = s->n_usable;
    if (n_stay == s->n_pages)
        return;
    s->n_usable = slots_filter(s, s->n_rows, s->n_rows, usable, n_stay);
    for (uint32_t i = 0; i < s->n_rows; i++) {
        if (page_of(s, s->slots[i], n_stay) != NULL)
            continue;
        bc_assert(s->n_usable > s->n_rows);
        uint32_t to = s->slots[--s->n_usable];
        kn->ops->row_copy(kn, pool_kv(s->pool), to, s->slots[i]);
        s->slots[i] = to;
        s->rows_moved++;
    }
    uint32_t end = slots_filter(s, s->n_usable, usable, all, n_stay);
    bc_assert(end == n_stay * KN_PAGE_ROWS);
    while (s->n_pages > n_stay)
        page_leave(s, &s->pages[--s->n_pages]);
    arrays_resize(s, n_stay);
}

/* ---- under a ceiling ---- */

/* Pages that leave first, of those the emptiest. */
static int by_leaving(const void *a, const void *b)
{
    const struct page_use *x = a, *y = b;
    return x->leaves != y->leaves ? (int)y->leaves - (int)x->leaves : by_live_then_page(b, a);
}

/* Brings the fixed pages to the front, the emptiest first; returns how many. */
static uint32_t fixed_first(struct seqcache *s)
{
    uint32_t n_fixed = 0;
    pages_count(s);
    for (uint32_t i = 0; i < s->n_pages; i++) {
        s->pages[i].leaves = !writable(s, s->pages[i].page);
        n_fixed += s->pages[i].leaves;
    }
    qsort(s->pages, s->n_pages, sizeof *s->pages, by_leaving);
    return n_fixed;
}

/* How many of the fixed pages, which are then the first, must be emptied so that n more rows fit in
 * max_pages; *ret_need: pages to take for them and the rows. */
static uint32_t plan(struct seqcache *s, uint32_t n, uint32_t max_pages, uint32_t *ret_need)
{
    uint64_t rows = n, n_free = s->n_usable - s->n_rows;
    uint32_t n_fixed = fixed_first(s), out = 0;
    for (;; out++) {
        *ret_need = rows > n_free ? pages_of_rows(rows - n_free) : 0;
        if (out == n_fixed || (uint64_t)s->n_pages - out + *ret_need <= max_pages)
            return out;
        rows += s->pages[out].n_live;
    }
}

uint32_t seqcache_pages_needed(const struct seqcache *s, uint32_t n)
{
    uint32_t n_free = seqcache_rows_free(s);
    return n <= n_free ? 0 : pages_of_rows((uint64_t)n - n_free);
}

/* Whether n more rows would break the ceiling if nothing is emptied. */
static bool too_tight(const struct seqcache *s, uint32_t n, uint32_t max_pages)
{
    return (uint64_t)s->n_pages + seqcache_pages_needed(s, n) > max_pages;
}

/* The same once all that is its own is used. */
static bool still_too_tight(struct seqcache *s, uint32_t n, uint32_t max_pages)
{
    seqcache_claim(s);
    if (too_tight(s, n, max_pages))
        seqcache_compact_room(s, n);
    return too_tight(s, n, max_pages);
}

uint32_t seqcache_pages_within(struct seqcache *s, uint32_t n, uint32_t max_pages)
{
    uint32_t need;
    MAGIC_OK(s, SEQCACHE_MAGIC);
    if (!too_tight(s, n, max_pages) || !still_too_tight(s, n, max_pages))
        return seqcache_pages_needed(s, n);
    plan(s, n, max_pages, &need);
    return need;
}

/* ---- taking ---- */

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
        fresh[i].joined = fresh[i].leaves = false;
    }
    return 0;
}

/* `more` pages behind the others, their slots free. */
static int pages_add(struct seqcache *s, uint32_t more, struct err *e)
{
    size_t page_bytes = pool_page_bytes(s->pool);
    uint32_t left = pool_pages_max(s->pool) - pool_pages_out(s->pool);
    if (more > left)
        return err_amount(e, BC_EBUDGET, "kv_memory", more * page_bytes, left * page_bytes,
                          "%u more cache pages of %zu bytes are needed, %u are left", more,
                          page_bytes, left);
    int rc = arrays_resize(s, s->n_pages + more) ? pages_take(s, more, e)
                                                 : err_nomem(e, more * page_bytes);
    if (rc < 0) {
        arrays_resize(s, s->n_pages);
        return rc;
    }
    uint32_t n_dead = rows_total(s) - s->n_usable;
    for (uint32_t i = 0; i < more * KN_PAGE_ROWS; i++) {
        uint32_t page = s->pages[s->n_pages + i / KN_PAGE_ROWS].page;
        if (n_dead > 0) /* free slots stand before dead ones */
            s->slots[s->n_usable + n_dead] = s->slots[s->n_usable];
        s->slots[s->n_usable++] = page * KN_PAGE_ROWS + i % KN_PAGE_ROWS;
    }
    s->n_pages += more;
    return 0;
}

int seqcache_reserve_within(struct seqcache *s, uint32_t n, uint32_t max_pages, struct err *e)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    uint32_t more = 0, out = 0;
    if (n <= s->n_usable - s->n_rows && s->n_pages <= max_pages)
        return 0;
    if (still_too_tight(s, n, max_pages))
        out = plan(s, n, max_pages, &more);
    else
        more = seqcache_pages_needed(s, n);
    for (uint32_t i = 0; i < s->n_pages; i++)
        s->pages[i].leaves = i < out;
    int rc = more > 0 ? pages_add(s, more, e) : 0;
    if (rc < 0)
        return rc;
    pages_empty(s);
    bc_assert(s->n_pages <= max_pages && n <= s->n_usable - s->n_rows);
    return 0;
}

int seqcache_reserve(struct seqcache *s, uint32_t n, struct err *e)
{
    return seqcache_reserve_within(s, n, UINT32_MAX, e);
}

/* ---- renumbering ---- */

/* Marks the pages that rows whose position changes must leave, because others hold them; what only the index
 * holds beside this sequence is taken out of it. Returns how many pages must be taken for their rows. */
static uint32_t renumber_plan(struct seqcache *s)
{
    uint64_t n_out = 0;
    for (uint32_t i = 0; i < s->n_rows; i++)
        if (s->positions[i] != (int32_t)i && !others_hold(s, page_of_slot(s->slots[i])))
            pool_withdraw(s->pool, page_of_slot(s->slots[i]));
    seqcache_settle(s);
    pages_count(s);
    for (uint32_t i = 0; i < s->n_rows; i++) {
        struct page_use *u = page_of(s, s->slots[i], s->n_pages);
        if (s->positions[i] == (int32_t)i || u->leaves || writable(s, u->page))
            continue;
        u->leaves = true;
        n_out += u->n_live;
    }
    uint32_t n_free = s->n_usable - s->n_rows;
    return n_out > n_free ? pages_of_rows(n_out - n_free) : 0;
}

uint32_t seqcache_renumber_pages(struct seqcache *s)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    return renumber_plan(s);
}

int seqcache_renumber_reserve(struct seqcache *s, struct err *e)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    uint32_t more = renumber_plan(s), before = s->n_pages;
    int rc = more > 0 ? pages_add(s, more, e) : 0;
    if (rc < 0)
        return rc;
    pages_empty(s);
    bc_assert(s->n_pages <= before);
    return 0;
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

/* ---- giving back ---- */

uint32_t seqcache_compact_room(struct seqcache *s, uint32_t n_room)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    uint32_t before = s->n_pages, n_own = 0;
    uint64_t live = 0;
    seqcache_settle(s);
    if (pages_of_rows((uint64_t)s->n_rows + n_room) >= s->n_pages)
        return 0;
    pages_count(s);
    qsort(s->pages, s->n_pages, sizeof *s->pages, by_live_then_page);
    for (uint32_t i = 0; i < s->n_pages; i++)
        if (writable(s, s->pages[i].page))
            live += s->pages[i].n_live;
    uint32_t stay = pages_of_rows(live + n_room); /* the fullest: so that the fewest rows move */
    for (uint32_t i = 0; i < s->n_pages; i++)
        if (writable(s, s->pages[i].page))
            s->pages[i].leaves = ++n_own > stay;
        else
            s->pages[i].leaves = s->pages[i].n_live == 0;
    pages_empty(s);
    return before - s->n_pages;
}

uint32_t seqcache_compact(struct seqcache *s)
{
    return seqcache_compact_room(s, 0);
}

void seqcache_clear(struct seqcache *s)
{
    MAGIC_OK(s, SEQCACHE_MAGIC);
    s->n_rows = s->n_usable = 0;
    while (s->n_pages > 0)
        page_leave(s, &s->pages[--s->n_pages]);
    arrays_resize(s, 0);
}
