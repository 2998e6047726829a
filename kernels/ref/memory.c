/* memory.c: buffers, and arenas whose pages exist only while they are committed.
 *
 *      reserved with no access, nothing behind it
 *   +----------------------+--------+--------+--------+-- ... --+
 *   | bitmap, struct arena | page 0 | page 1 | page 2 |         |
 *   +----------------------+--------+--------+--------+-- ... --+
 *                          ^ base   (stride bytes each)
 *
 * The record of what is committed stands just before base, so that an arena needs no table
 * elsewhere; it also catches pages committed or released twice. A released page loses its memory
 * and its access rights: a stale slot faults. */
#include "ref.h"
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct arena {
    unsigned magic;
    uint32_t n_pages, n_committed;
    size_t stride;
    uint8_t *bitmap; /* a bit a page: committed */
    void *map;
    size_t map_bytes;
};
#define ARENA_MAGIC 0x61726e61u
#define POPULATE_LEAST ((size_t)256 << 10)

int ref_buf_alloc(struct kn *kn, size_t bytes, void **ret)
{
    void *buf;
    if (posix_memalign(&buf, 64, bytes ? bytes : 1) != 0)
        return KN_ENOMEM;
    memset(buf, 0, bytes);
    kn->bytes_buffers += bytes;
    *ret = buf;
    return KN_OK;
}

void ref_buf_free(struct kn *kn, void *buf, size_t bytes)
{
    if (!buf)
        return;
    kn_assert(kn->bytes_buffers >= bytes);
    kn->bytes_buffers -= bytes;
    free(buf);
}

/* Memory that nobody has written yet gets its pages in one call, not by a fault for every 4 KiB. No matter if it
 * fails, or the system does not know it (before Linux 5.14). */
static void pages_ahead(void *dst, size_t bytes)
{
#ifdef MADV_POPULATE_WRITE
    size_t unit = (size_t)sysconf(_SC_PAGESIZE), skip = -(uintptr_t)dst % unit;
    if (bytes >= POPULATE_LEAST + skip)
        (void)madvise((uint8_t *)dst + skip, (bytes - skip) / unit * unit, MADV_POPULATE_WRITE);
#else
    (void)dst, (void)bytes;
#endif
}

void ref_upload(struct kn *kn, void *dst_device, const void *src_host, size_t bytes)
{
    (void)kn;
    pages_ahead(dst_device, bytes);
    memcpy(dst_device, src_host, bytes);
}

void ref_download(struct kn *kn, void *dst_host, const void *src_device, size_t bytes)
{
    (void)kn;
    memcpy(dst_host, src_device, bytes);
}

static struct arena *arena_of(void *base, size_t stride)
{
    struct arena *a = (struct arena *)base - 1;
    kn_assert(a->magic == ARENA_MAGIC && a->stride == stride);
    return a;
}

int ref_arena_open(struct kn *kn, size_t stride, uint32_t n_pages, void **ret_base)
{
    (void)kn;
    size_t unit = (size_t)sysconf(_SC_PAGESIZE), pages, total;
    if (stride == 0 || stride % unit != 0 || n_pages == 0)
        return KN_EINVALID;
    size_t head = ((size_t)n_pages + 7) / 8 + sizeof(struct arena);
    head = (head + unit - 1) / unit * unit;
    if (__builtin_mul_overflow(stride, n_pages, &pages) ||
        __builtin_add_overflow(pages, head, &total))
        return KN_ENOMEM;
    uint8_t *map = mmap(NULL, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED)
        return KN_ENOMEM;
    if (mprotect(map, head, PROT_READ | PROT_WRITE) != 0) {
        munmap(map, total);
        return KN_ENOMEM;
    }
    struct arena *a = (struct arena *)(map + head) - 1;
    *a = (struct arena){.magic = ARENA_MAGIC,
                        .n_pages = n_pages,
                        .stride = stride,
                        .bitmap = map,
                        .map = map,
                        .map_bytes = total};
    *ret_base = map + head;
    return KN_OK;
}

int ref_arena_commit(struct kn *kn, void *base, size_t stride, uint32_t page)
{
    struct arena *a = arena_of(base, stride);
    uint8_t bit = (uint8_t)(1 << page % 8);
    kn_assert(page < a->n_pages && !(a->bitmap[page / 8] & bit));
    if (mprotect((uint8_t *)base + page * stride, stride, PROT_READ | PROT_WRITE) != 0)
        return KN_ENOMEM;
    a->bitmap[page / 8] |= bit;
    a->n_committed++;
    kn->bytes_arena += stride;
    return KN_OK;
}

void ref_arena_release(struct kn *kn, void *base, size_t stride, uint32_t page)
{
    struct arena *a = arena_of(base, stride);
    uint8_t bit = (uint8_t)(1 << page % 8), *at = (uint8_t *)base + page * stride;
    kn_assert(page < a->n_pages && (a->bitmap[page / 8] & bit));
    /* The system may refuse to split the mapping when it is short of map entries: the page then
     * keeps its rights, and only the trap for stale slots is lost. Dropping the memory needs no new
     * entry. */
    kn_assert(madvise(at, stride, MADV_DONTNEED) == 0);
    (void)!mprotect(at, stride, PROT_NONE);
    a->bitmap[page / 8] &= (uint8_t)~bit;
    a->n_committed--;
    kn->bytes_arena -= stride;
}

void ref_arena_close(struct kn *kn, void *base, size_t stride, uint32_t n_pages)
{
    struct arena *a = arena_of(base, stride);
    kn_assert(a->n_pages == n_pages);
    kn->bytes_arena -= a->n_committed * stride;
    a->magic = 0;
    munmap(a->map, a->map_bytes);
}
