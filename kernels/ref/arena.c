/* arena.c: pages of keys and values that exist only while they are committed, on huge pages of the system
 * where whole ones fit.
 *
 *      reserved with no access, nothing behind it
 *   +------+-----------------------+--------+--------+--------+-- ... --+---------+
 *   |      | bitmaps, struct arena | page 0 | page 1 | page 2 |         | scratch |
 *   +------+-----------------------+--------+--------+--------+-- ... --+---------+
 *                                  ^ base   (stride bytes each)
 *   regions of 2 MiB               |     0     |     1     |     2     | ...
 *
 * The record of what is committed stands just before base, so that an arena needs no table elsewhere; it
 * also catches pages committed or released twice. A released page loses its memory and its access rights:
 * a stale slot faults.
 *
 * Decoding behind a long cache reads tens of megabytes a step, which pages of 4 KiB make a miss of the TLB
 * for every 64th line (docs/decisions/013-huge-pages.md has the figures, and the other ways). A page is not
 * a multiple of 2 MiB, and memory that nobody asked for must not come with it. So a region becomes huge
 * when its last part is committed, never earlier:
 *
 *      gather   a huge page is made at scratch, what the region holds is copied there, and mremap puts it
 *               in the region's place. Who reads meanwhile sees the same bytes; nobody may write
 *      tear     a page of a huge region is released. Its memory is unmapped, but goes back to the system
 *               only with the whole 2 MiB, or when they are split
 *      mend     the split. It waits until another region is torn, because a session that closes releases
 *               its pages one after the other, and then the rest of the region mostly goes next
 *
 * So resident memory is never more than what is committed, and at most one region an arena holds memory
 * that is unmapped. Where the system has no huge page to give, the region stays as it is.
 *
 * A region that came from scratch is an entry of its own in the process's memory map, which holds some 65,000:
 * a cache of 128 GiB would fill it. It becomes part of its neighbours again when its last page is released, and all
 * arenas of a handle (a model) together have no more of them than a quarter of the map. */
#include "ref.h"
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define ARENA_MAGIC 0x61726e61u
#define REGION ((size_t)2 << 20)
#define REGION_NONE SIZE_MAX
/* A region that could not be gathered costs some 4 KiB of clearing and three calls: so many pages go by
 * before the next try. */
#define HOLDOFF_PAGES 64
#define MAP_ENTRIES_USUAL 65530
#ifndef MADV_COLD
#define MADV_COLD 20 /* Linux 5.4 */
#endif
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4 /* Linux 5.7 */
#endif

struct arena {
    unsigned magic;
    uint32_t n_pages, n_committed;
    uint32_t holdoff; /* pages to commit before a region is gathered again */
    size_t stride, unit, n_regions;
    size_t torn; /* the region that was torn last and is not mended, or REGION_NONE */
    uint32_t n_moved, moved_max; /* regions: this arena's; those of all arenas of the handle */
    uint8_t *committed;          /* a bit a page */
    uint8_t *huge;               /* a bit a region: gathered, and not mended since */
    uint8_t *moved;              /* a bit a region: gathered, and not empty since */
    uint8_t *base, *scratch;     /* scratch NULL: no region is gathered (any more) */
    void *map;
    size_t map_bytes;
};

static bool bit_of(const uint8_t *bits, size_t i)
{
    return bits[i / 8] >> i % 8 & 1;
}

static void bit_set(uint8_t *bits, size_t i, bool on)
{
    uint8_t bit = (uint8_t)(1 << i % 8);
    bits[i / 8] = (uint8_t)(on ? bits[i / 8] | bit : bits[i / 8] & ~bit);
}

static size_t up(size_t n, size_t unit)
{
    return (n + unit - 1) / unit * unit;
}

static struct arena *arena_of(void *base, size_t stride)
{
    struct arena *a = (struct arena *)base - 1;
    kn_assert(a->magic == ARENA_MAGIC && a->stride == stride);
    return a;
}

/* ---- regions ---- */

/* The pages that have a part in region r: first to last. */
static void region_pages(const struct arena *a, size_t r, size_t *ret_first, size_t *ret_last)
{
    *ret_first = r * REGION / a->stride;
    *ret_last = KN_MIN(((r + 1) * REGION - 1) / a->stride, a->n_pages - 1);
}

static bool region_is_whole(const struct arena *a, size_t r)
{
    size_t page, last;
    if ((r + 1) * REGION > a->n_pages * a->stride)
        return false;
    for (region_pages(a, r, &page, &last); page <= last; page++)
        if (!bit_of(a->committed, page))
            return false;
    return true;
}

/* Scratch as a range that a first write gives a huge page, if the system has one. */
static bool scratch_reset(struct arena *a)
{
    void *at = mmap(a->scratch, REGION, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return at != MAP_FAILED && madvise(at, REGION, MADV_HUGEPAGE) == 0;
}

/* A first write; true: its last bytes came with it. */
static bool scratch_is_huge(struct arena *a)
{
    unsigned char there = 0;
    *(volatile uint8_t *)a->scratch = 0;
    return mincore(a->scratch + REGION - a->unit, a->unit, &there) == 0 && (there & 1);
}

/* What region r holds beside a page, from where the region stands at `from` to where it shall at `to`. */
static void region_copy(const struct arena *a, size_t r, uint32_t page, uint8_t *to,
                        const uint8_t *from)
{
    size_t start = r * REGION, end = start + REGION;
    size_t before = KN_MAX(page * a->stride, start), behind = KN_MIN((page + 1) * a->stride, end);
    memcpy(to, from, before - start);
    memcpy(to + (behind - start), from + (behind - start), end - behind);
}

/* An mremap that fails for want of map entries leaves the region as it was, one that fails later has taken it away. */
static bool region_is_mapped(const struct arena *a, size_t r)
{
    unsigned char there[REGION / 4096];
    return mincore(a->base + r * REGION, REGION, there) == 0 || errno != ENOMEM;
}

/* What region r holds, on a huge page; `fresh`, which was committed last and has a part in it, is zeros still. Nothing is lost
 * if that fails: the region stays as it was, or is made anew of small pages when the system took it away and then had no room
 * for the other. */
static void region_gather(struct kn *kn, struct arena *a, size_t r, uint32_t fresh)
{
    uint8_t *at = a->base + r * REGION;
    if (!bit_of(a->moved, r) && kn->n_moved >= a->moved_max)
        return;
    if (!scratch_is_huge(a))
        goto small;
    region_copy(a, r, fresh, a->scratch, at);
    if (mremap(a->scratch, REGION, REGION, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, at) !=
        at) {
        if (region_is_mapped(a, r))
            goto small;
        kn_assert(mmap(at, REGION, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == at);
        region_copy(a, r, fresh, at, a->scratch);
        goto small;
    }
    bit_set(a->huge, r, true);
    a->n_moved += !bit_of(a->moved, r);
    kn->n_moved += !bit_of(a->moved, r);
    bit_set(a->moved, r, true);
    if (a->torn == r)
        a->torn = REGION_NONE;
    return;
small:
    if (!scratch_reset(a)) /* it may hold what was copied */
        a->scratch = NULL;
    a->holdoff = HOLDOFF_PAGES;
}

/* Splits the huge page of a region that lost a part, which gives the lost part's memory back: a wish about a
 * part of it does that. Where the system does not know it, it splits when memory runs short. */
static void region_mend(struct arena *a)
{
    size_t r = a->torn, page, last;
    for (region_pages(a, r, &page, &last); page <= last; page++) {
        size_t from = KN_MAX(page * a->stride, r * REGION);
        size_t to = KN_MIN((page + 1) * a->stride, (r + 1) * REGION);
        if (bit_of(a->committed, page))
            (void)madvise(a->base + from, to - from, MADV_COLD);
    }
    bit_set(a->huge, r, false);
    a->torn = REGION_NONE;
}

/* Nothing of region r is committed: it is as it was before the first page of it. */
static void region_empty(struct kn *kn, struct arena *a, size_t r)
{
    uint8_t *at = a->base + r * REGION;
    if (mmap(at, REGION, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
             0) != at)
        return; /* so it remains an entry of its own */
    bit_set(a->moved, r, false);
    a->n_moved--;
    kn->n_moved--;
}

/* Region r has lost a part. */
static void region_tear(struct kn *kn, struct arena *a, size_t r)
{
    size_t page, last;
    bool kept = false;
    if (!bit_of(a->moved, r))
        return;
    for (region_pages(a, r, &page, &last); page <= last; page++)
        kept |= bit_of(a->committed, page);
    if (!kept)
        region_empty(kn, a, r);
    if (!bit_of(a->huge, r))
        return;
    if (a->torn != REGION_NONE && a->torn != r && kept)
        region_mend(a);
    if (kept || a->torn == r)
        a->torn = kept ? r : REGION_NONE;
    bit_set(a->huge, r, kept);
}

/* ---- the ops ---- */

/* Bytes that an arena reserves, and what of them stands before its pages. */
static bool arena_size(size_t stride, uint32_t n_pages, size_t unit, size_t *ret_head,
                       size_t *ret_map)
{
    size_t pages;
    if (__builtin_mul_overflow(stride, n_pages, &pages) || pages > SIZE_MAX - 4 * REGION)
        return false;
    size_t regions = up(pages, REGION) / REGION;
    *ret_head = up(up(n_pages, 8) / 8 + 2 * (up(regions, 8) / 8) + sizeof(struct arena), unit);
    /* Before base up to a region, for base is a multiple of one; after the pages the scratch. */
    return !__builtin_add_overflow(*ret_head, up(pages, REGION) + 2 * REGION, ret_map);
}

/* How many the memory map of a process may have. */
static uint32_t map_entries(void)
{
    unsigned long n = MAP_ENTRIES_USUAL;
    FILE *f = fopen("/proc/sys/vm/max_map_count", "re");
    if (f != NULL && fscanf(f, "%lu", &n) != 1)
        n = MAP_ENTRIES_USUAL;
    if (f != NULL)
        fclose(f);
    return (uint32_t)KN_MIN(n, (unsigned long)UINT32_MAX);
}

int ref_arena_open(struct kn *kn, size_t stride, uint32_t n_pages, void **ret_base)
{
    (void)kn;
    size_t unit = (size_t)sysconf(_SC_PAGESIZE), head, total;
    if (stride == 0 || stride % unit != 0 || n_pages == 0)
        return KN_EINVALID;
    if (!arena_size(stride, n_pages, unit, &head, &total))
        return KN_ENOMEM;
    uint8_t *map = mmap(NULL, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED)
        return KN_ENOMEM;
    uint8_t *base = map + head + (REGION - (uintptr_t)(map + head) % REGION) % REGION;
    if (mprotect(base - head, head, PROT_READ | PROT_WRITE) != 0) {
        munmap(map, total);
        return KN_ENOMEM;
    }
    struct arena *a = (struct arena *)base - 1;
    size_t n_regions = up(stride * n_pages, REGION) / REGION;
    *a = (struct arena){.magic = ARENA_MAGIC,
                        .n_pages = n_pages,
                        .stride = stride,
                        .unit = unit,
                        .n_regions = n_regions,
                        .torn = REGION_NONE,
                        .moved_max = map_entries() / 4,
                        .committed = base - head,
                        .huge = base - head + up(n_pages, 8) / 8,
                        .moved = base - head + up(n_pages, 8) / 8 + up(n_regions, 8) / 8,
                        .base = base,
                        .scratch = base + n_regions * REGION,
                        .map = map,
                        .map_bytes = total};
    if (!scratch_reset(a))
        a->scratch = NULL;
    *ret_base = base;
    return KN_OK;
}

int ref_arena_commit(struct kn *kn, void *base, size_t stride, uint32_t page)
{
    struct arena *a = arena_of(base, stride);
    kn_assert(page < a->n_pages && !bit_of(a->committed, page));
    if (mprotect(a->base + page * stride, stride, PROT_READ | PROT_WRITE) != 0)
        return KN_ENOMEM;
    bit_set(a->committed, page, true);
    a->n_committed++;
    kn->bytes_arena += stride;
    a->holdoff -= a->holdoff > 0;
    size_t r = page * stride / REGION, last = ((page + 1) * stride - 1) / REGION;
    for (; r <= last; r++)
        if (a->scratch && a->holdoff == 0 && region_is_whole(a, r))
            region_gather(kn, a, r, page);
    return KN_OK;
}

void ref_arena_release(struct kn *kn, void *base, size_t stride, uint32_t page)
{
    struct arena *a = arena_of(base, stride);
    uint8_t *at = a->base + page * stride;
    kn_assert(page < a->n_pages && bit_of(a->committed, page));
    /* The system may refuse to split the mapping when it is short of map entries: the page then
     * keeps its rights, and only the trap for stale slots is lost. Dropping the memory needs no new
     * entry. */
    kn_assert(madvise(at, stride, MADV_DONTNEED) == 0);
    (void)!mprotect(at, stride, PROT_NONE);
    bit_set(a->committed, page, false);
    a->n_committed--;
    kn->bytes_arena -= stride;
    size_t r = page * stride / REGION, last = ((page + 1) * stride - 1) / REGION;
    for (; r <= last; r++)
        region_tear(kn, a, r);
}

void ref_arena_close(struct kn *kn, void *base, size_t stride, uint32_t n_pages)
{
    struct arena *a = arena_of(base, stride);
    kn_assert(a->n_pages == n_pages);
    kn->bytes_arena -= a->n_committed * stride;
    kn->n_moved -= a->n_moved;
    a->magic = 0;
    munmap(a->map, a->map_bytes);
}
