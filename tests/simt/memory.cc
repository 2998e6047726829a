/* memory.cc: device memory, pinned host memory, and the checks of addresses.
 *
 *      | no rights | slack, canaries | allocation | < 256 B of canaries | no rights |
 *                  ^ page                                               ^ page
 *
 * An allocation stands as far right in its pages as its alignment (256, CUDA's promise) allows, so that most overruns
 * hit the page behind; the rest is found by looking at the canaries after each kernel. Memory starts as NaN. Addresses are
 * never given out twice: whoever keeps a freed pointer faults. Outside kernels and copies device memory has no
 * rights at all, so that host code that touches it faults where it does. */
#include "memory.h"
#include <stdio.h>
#include <vector>
#include <sys/mman.h>
#include <unistd.h>
#include "exec.h"
#ifdef SIMT_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace simt
{

constexpr size_t ALLOC_ALIGN = 256;
constexpr size_t SPACE_BYTES = (size_t)4 << 40;
constexpr size_t CANARY_LOOK = 256; /* bytes looked at on each side */
constexpr unsigned char CANARY = 0xfc;
constexpr size_t POISON_BYTES = 16u << 20;
constexpr size_t LARGE_BYTES = 1u << 20;

static size_t page_bytes()
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

static size_t round_up(size_t n, size_t unit)
{
    return (n + unit - 1) / unit * unit;
}

heap *heap_get()
{
    if (w.mem)
        return w.mem;
    heap *h = new heap();
    h->file = h->poison = -1;
    for (size_t bytes = SPACE_BYTES; !h->space && bytes >= (size_t)1 << 32; bytes /= 2) {
        void *map =
            mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (map != MAP_FAILED) {
            h->space = (char *)map;
            h->space_end = h->space + bytes;
        }
    }
    if (!h->space)
        report("out of memory", "no address space for device memory");
    h->next = h->space;
    w.mem = h;
    return h;
}

char *heap_space(size_t bytes, size_t align)
{
    heap *h = heap_get();
    size_t page = page_bytes();
    char *at = (char *)round_up((uintptr_t)h->next + page, align);
    if (at > h->space_end || (size_t)(h->space_end - at) < bytes + page)
        return nullptr;
    h->next = at + bytes + page;
    return at;
}

/* Canaries around a block, and ASan's marks. */
void block_guard(const block &b)
{
    memset(b.map, CANARY, (size_t)(b.p - b.map));
    memset(b.p + b.bytes, CANARY, (size_t)(b.map + b.map_bytes - b.p) - b.bytes);
#ifdef SIMT_ASAN
    __asan_poison_memory_region(b.map, (size_t)(b.p - b.map));
    __asan_poison_memory_region(b.p + b.bytes, (size_t)(b.map + b.map_bytes - b.p) - b.bytes);
#endif
}

/* Pinned memory lies elsewhere; its address space is given back with it. */
static char *pinned_space(size_t bytes)
{
    size_t page = page_bytes();
    void *map = mmap(nullptr, bytes + 2 * page, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return map == MAP_FAILED ? nullptr : (char *)map + page;
}

/* Fills fresh pages with 0xff. A large block is mapped from one file of it over and over, so that pages nobody touches
 * cost no memory, and no time when rights change. */
static bool poison(heap *h, char *map, size_t bytes)
{
    if (bytes < LARGE_BYTES) {
        if (mprotect(map, bytes, PROT_READ | PROT_WRITE) != 0)
            return false;
        memset(map, 0xff, bytes);
        return true;
    }
    if (h->poison < 0) {
        std::vector<char> ones(1u << 20, (char)0xff);
        h->poison = memfd_create("simt-poison", MFD_CLOEXEC);
        for (size_t done = 0; h->poison >= 0 && done < POISON_BYTES; done += ones.size())
            if (write(h->poison, ones.data(), ones.size()) != (ssize_t)ones.size())
                return false;
    }
    for (size_t at = 0; at < bytes; at += POISON_BYTES) {
        size_t n = bytes - at < POISON_BYTES ? bytes - at : POISON_BYTES;
        if (mmap(map + at, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, h->poison, 0) ==
            MAP_FAILED)
            return false;
    }
    return true;
}

static void *block_make(enum block_kind kind, size_t bytes)
{
    heap *h = heap_get();
    size_t body = round_up(bytes ? bytes : 1, ALLOC_ALIGN);
    size_t map_bytes = round_up(body, page_bytes());
    char *map =
        kind == BLOCK_MALLOC ? heap_space(map_bytes, page_bytes()) : pinned_space(map_bytes);
    if (!map || !poison(h, map, map_bytes))
        return nullptr;
    block b = {};
    b.kind = kind;
    b.map = map;
    b.map_bytes = map_bytes;
    b.p = map + map_bytes - body;
    b.bytes = bytes;
    block_guard(b);
    if (kind == BLOCK_MALLOC && !h->is_open && w.opt.protect)
        mprotect(map, map_bytes, PROT_NONE);
    h->blocks[b.p] = b;
    return b.p;
}

static void block_drop(std::map<char *, block>::iterator it)
{
    heap *h = w.mem;
    block b = it->second;
#ifdef SIMT_ASAN
    __asan_unpoison_memory_region(b.map, b.map_bytes);
#endif
    if (b.kind == BLOCK_PINNED && !b.registered)
        munmap(b.map - page_bytes(), b.map_bytes + 2 * page_bytes());
    else if (!b.registered)
        mmap(b.map, b.map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
             -1, 0);
    if (b.kind == BLOCK_MALLOC)
        h->freed[b.p] = b.bytes;
    h->blocks.erase(it);
}

void *heap_alloc(size_t bytes)
{
    heap *h = heap_get();
    if (bytes > w.opt.device_bytes || h->bytes_used > w.opt.device_bytes - bytes)
        return nullptr;
    void *p = block_make(BLOCK_MALLOC, bytes);
    if (p)
        h->bytes_used += bytes;
    return p;
}

static bool free_kind(void *p, enum block_kind kind, bool registered)
{
    heap *h = heap_get();
    auto it = h->blocks.find((char *)p);
    if (it == h->blocks.end() || it->second.kind != kind || it->second.registered != registered)
        return false;
    if (kind == BLOCK_MALLOC)
        h->bytes_used -= it->second.bytes;
    block_drop(it);
    return true;
}

bool heap_free(void *p)
{
    return free_kind(p, BLOCK_MALLOC, false);
}
void *heap_alloc_pinned(size_t bytes)
{
    return block_make(BLOCK_PINNED, bytes);
}
bool heap_free_pinned(void *p)
{
    return free_kind(p, BLOCK_PINNED, false);
}
bool heap_unregister(void *p)
{
    return free_kind(p, BLOCK_PINNED, true);
}

bool heap_register(void *p, size_t bytes)
{
    heap *h = heap_get();
    if (!p || !bytes || heap_room(p))
        return false;
    block b = {};
    b.kind = BLOCK_PINNED;
    b.registered = true;
    b.p = b.map = (char *)p;
    b.bytes = b.map_bytes = bytes;
    h->blocks[b.p] = b;
    return true;
}

/* ---- rights ---- */

static bool is_device(const block &b)
{
    return b.kind == BLOCK_MALLOC || (b.kind == BLOCK_MAPPED && b.can_access);
}

static void rights_set(int rights)
{
    for (auto &at : w.mem->blocks)
        if (is_device(at.second) && mprotect(at.second.map, at.second.map_bytes, rights) != 0)
            report("out of memory", "the system refuses to change the rights of device memory");
}

void heap_open()
{
    heap *h = heap_get();
    if (!h->is_open && w.opt.protect)
        rights_set(PROT_READ | PROT_WRITE);
    h->is_open = true;
}

void heap_close()
{
    heap *h = heap_get();
    if (h->is_open && w.opt.protect)
        rights_set(PROT_NONE);
    h->is_open = !w.opt.protect;
}

/* ---- what lies where ---- */

/* The block at or before p. */
static const block *block_before(const void *p)
{
    heap *h = heap_get();
    auto it = h->blocks.upper_bound((char *)p);
    if (it == h->blocks.begin())
        return nullptr;
    return &(--it)->second;
}

const block *heap_find(const void *p)
{
    const block *b = block_before(p);
    return b && (const char *)p < b->p + b->bytes ? b : nullptr;
}

size_t heap_room(const void *p)
{
    const block *b = heap_find(p);
    return b ? (size_t)(b->p + b->bytes - (const char *)p) : 0;
}

void heap_tell(const void *p, char *text, size_t bytes)
{
    heap *h = heap_get();
    const char *c = (const char *)p;
    static const char *const kinds[] = {"device memory", "mapped device memory",
                                        "pinned host memory"};
    const block *b = block_before(p);
    auto next = h->blocks.upper_bound((char *)p);
    auto old = h->freed.upper_bound((char *)p);
    if (old != h->freed.begin() && c < (--old)->first + old->second) {
        snprintf(text, bytes, "byte %td of %zu bytes of device memory that is freed",
                 c - old->first, old->second);
        return;
    }
    if (b && c < b->p + b->bytes)
        snprintf(text, bytes, "byte %td of %zu bytes of %s%s", c - b->p, b->bytes, kinds[b->kind],
                 h->is_open ? "" : ", which the host cannot touch");
    else if (b && c - (b->p + b->bytes) < 65536)
        snprintf(text, bytes, "%td bytes behind the end of %zu bytes of %s", c - b->p - b->bytes,
                 b->bytes, kinds[b->kind]);
    else if (next != h->blocks.end() && next->first - c < 65536)
        snprintf(text, bytes, "%td bytes before %zu bytes of %s", next->first - c,
                 next->second.bytes, kinds[next->second.kind]);
    else if (c >= h->space && c < h->next)
        snprintf(text, bytes, "device memory that is not mapped");
    else
        snprintf(text, bytes, "no memory that the device can see");
}

/* from .. to, at most a page of them, must still be canaries. */
static void canaries_check(const block &b, const char *from, const char *to)
{
    static unsigned char want[4096];
    if (!want[0])
        memset(want, CANARY, sizeof want);
#ifdef SIMT_ASAN
    __asan_unpoison_memory_region(from, (size_t)(to - from));
#endif
    if (memcmp(from, want, (size_t)(to - from)) != 0)
        for (const char *p = from; p < to; p++)
            if ((unsigned char)*p != CANARY)
                report("out of bounds", "something wrote to byte %td of %zu bytes of device memory",
                       p - b.p, b.bytes);
#ifdef SIMT_ASAN
    __asan_poison_memory_region(from, (size_t)(to - from));
#endif
}

void heap_check()
{
    for (auto &at : heap_get()->blocks) {
        const block &b = at.second;
        if (b.kind != BLOCK_MALLOC)
            continue;
        size_t before = (size_t)(b.p - b.map);
        canaries_check(b, b.p - (before < CANARY_LOOK ? before : CANARY_LOOK), b.p);
        canaries_check(b, b.p + b.bytes, b.map + b.map_bytes);
    }
}

void check_access(const void *p, size_t bytes, size_t align, const char *what)
{
    char text[200];
    if ((uintptr_t)p % align) {
        heap_tell(p, text, sizeof text);
        report("misaligned access", "%s at %p, which is no multiple of %zu (%s)", what, p, align,
               text);
    }
    const unsigned char *c = (const unsigned char *)p;
    if (c >= w.smem && c + bytes <= w.smem + w.smem_bytes)
        return;
    if (heap_room(p) >= bytes && bytes)
        return;
    if (!bytes && heap_room(p))
        return;
    heap_tell(p, text, sizeof text);
    report("out of bounds", "%s of %zu bytes at %p, %s", what, bytes, p, text);
}

void check_shared(const void *p, size_t bytes, const char *what)
{
    const unsigned char *c = (const unsigned char *)p;
    if ((uintptr_t)p % bytes)
        report("misaligned access", "%s shared byte %td, which is no multiple of %zu", what,
               c - w.smem, bytes);
    if (c < w.smem || c + bytes > w.smem + w.smem_bytes)
        report("out of bounds", "%s of %zu bytes at byte %td of %zu bytes of shared memory", what,
               bytes, c - w.smem, w.smem_bytes);
}

} // namespace simt
