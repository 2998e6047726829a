/* vmm.cc: the driver's virtual memory: ranges that are reserved, pieces of memory that are created, and maps between
 * them. Physical memory is one memory file; a piece keeps its bytes while it is mapped nowhere. What the driver would
 * refuse is refused: sizes and addresses that are no multiples of the granule, maps over maps, ranges with holes. */
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include "cuda.h"
#include "exec.h"
#include "memory.h"
#include "race.h"
#include "runtime.h"

namespace simt
{

constexpr size_t GRANULE = 2u << 20;

static reserved_range *range_of(char *at, size_t bytes)
{
    heap *h = heap_get();
    auto it = h->ranges.upper_bound(at);
    if (it == h->ranges.begin())
        return nullptr;
    --it;
    return at + bytes <= it->first + it->second.bytes ? &it->second : nullptr;
}

static CUresult address_reserve(CUdeviceptr *ret, size_t bytes, size_t align, CUdeviceptr,
                                unsigned long long flags)
{
    ENTER_DRIVER("cuMemAddressReserve");
    if (!bytes || bytes % GRANULE || (align & (align - 1)) || flags)
        return CUDA_ERROR_INVALID_VALUE;
    char *at = heap_space(bytes, align > GRANULE ? align : GRANULE);
    if (!at)
        return CUDA_ERROR_OUT_OF_MEMORY;
    heap_get()->ranges[at] = reserved_range{bytes};
    *ret = (CUdeviceptr)(uintptr_t)at;
    return CUDA_SUCCESS;
}

static CUresult address_free(CUdeviceptr p, size_t bytes)
{
    ENTER_DRIVER("cuMemAddressFree");
    heap *h = heap_get();
    char *at = (char *)(uintptr_t)p;
    auto it = h->ranges.find(at);
    if (it == h->ranges.end() || it->second.bytes != bytes)
        return CUDA_ERROR_INVALID_VALUE;
    auto first = h->blocks.lower_bound(at);
    if (first != h->blocks.end() && first->first < at + bytes)
        return CUDA_ERROR_INVALID_VALUE; /* something is still mapped */
    h->ranges.erase(it);
    return CUDA_SUCCESS;
}

static bool prop_ok(const CUmemAllocationProp *prop)
{
    return prop && prop->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
           prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE && prop->location.id == 0;
}

/* A piece of the memory file: an old hole of just that size, or new bytes at its end. */
static bool file_take(heap *h, size_t bytes, size_t *ret)
{
    auto hole = h->holes.find(bytes);
    if (hole != h->holes.end()) {
        *ret = hole->second;
        h->holes.erase(hole);
        return true;
    }
    if (h->file < 0)
        h->file = memfd_create("simt-device-memory", MFD_CLOEXEC);
    if (h->file < 0 || ftruncate(h->file, (off_t)(h->file_bytes + bytes)) != 0)
        return false;
    *ret = h->file_bytes;
    h->file_bytes += bytes;
    return true;
}

static CUresult create(CUmemGenericAllocationHandle *ret, size_t bytes,
                       const CUmemAllocationProp *prop, unsigned long long flags)
{
    ENTER_DRIVER("cuMemCreate");
    heap *h = heap_get();
    if (!bytes || bytes % GRANULE || !prop_ok(prop) || flags)
        return CUDA_ERROR_INVALID_VALUE;
    size_t offset;
    if (bytes > w.opt.device_bytes || h->bytes_used > w.opt.device_bytes - bytes ||
        !file_take(h, bytes, &offset))
        return CUDA_ERROR_OUT_OF_MEMORY;
    h->bytes_used += bytes;
    uint64_t handle = ++h->next_handle;
    h->physicals[handle] = physical{offset, bytes, 0, false};
    void *fresh = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, h->file, (off_t)offset);
    if (fresh == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memset(fresh, 0xff, bytes); /* nobody promises zeros */
    munmap(fresh, bytes);
    *ret = handle;
    return CUDA_SUCCESS;
}

static void physical_drop(heap *h, std::map<uint64_t, physical>::iterator it)
{
    physical &p = it->second;
    if (!p.released || p.n_maps)
        return;
    fallocate(h->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)p.offset, (off_t)p.bytes);
    h->holes.emplace(p.bytes, p.offset);
    h->bytes_used -= p.bytes;
    h->physicals.erase(it);
}

static CUresult release(CUmemGenericAllocationHandle handle)
{
    ENTER_DRIVER("cuMemRelease");
    heap *h = heap_get();
    auto it = h->physicals.find(handle);
    if (it == h->physicals.end() || it->second.released)
        return CUDA_ERROR_INVALID_VALUE;
    it->second.released = true;
    physical_drop(h, it);
    return CUDA_SUCCESS;
}

static CUresult map(CUdeviceptr p, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                    unsigned long long flags)
{
    ENTER_DRIVER("cuMemMap");
    heap *h = heap_get();
    char *at = (char *)(uintptr_t)p;
    auto it = h->physicals.find(handle);
    if (it == h->physicals.end() || it->second.released || it->second.bytes != bytes || offset ||
        flags || p % GRANULE || !range_of(at, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    auto next = h->blocks.lower_bound(at);
    if ((next != h->blocks.end() && next->first < at + bytes) || heap_room(at))
        return CUDA_ERROR_INVALID_VALUE; /* already mapped */
    if (mmap(at, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, h->file, (off_t)it->second.offset) ==
        MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    block b = {};
    b.kind = BLOCK_MAPPED;
    b.p = b.map = at;
    b.bytes = b.map_bytes = bytes;
    b.handle = handle;
    it->second.n_maps++;
    race_forget(at, bytes);
    h->blocks[at] = b;
    return CUDA_SUCCESS;
}

/* Calls f for every block of [at, at + bytes); false if they do not fill it exactly. */
template <class F> static bool blocks_of(char *at, size_t bytes, F f)
{
    heap *h = heap_get();
    char *end = at + bytes;
    for (char *p = at; p < end;) {
        auto it = h->blocks.find(p);
        if (it == h->blocks.end() || it->second.kind != BLOCK_MAPPED || p + it->second.bytes > end)
            return false;
        p += it->second.bytes;
        f(it->second);
    }
    return true;
}

/* Waits for nothing, as the driver's: work that is still to run and uses the range will fault and be reported. */
static CUresult unmap(CUdeviceptr p, size_t bytes)
{
    ENTER_DRIVER("cuMemUnmap");
    heap *h = heap_get();
    char *at = (char *)(uintptr_t)p;
    if (!bytes || !blocks_of(at, bytes, [](block &) {}))
        return CUDA_ERROR_INVALID_VALUE;
    while (bytes) {
        auto it = h->blocks.find(at);
        size_t n = it->second.bytes;
        mmap(at, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        auto ph = h->physicals.find(it->second.handle);
        ph->second.n_maps--;
        physical_drop(h, ph);
        h->blocks.erase(it);
        at += n;
        bytes -= n;
    }
    return CUDA_SUCCESS;
}

static CUresult set_access(CUdeviceptr p, size_t bytes, const CUmemAccessDesc *desc, size_t n)
{
    ENTER_DRIVER("cuMemSetAccess");
    heap *h = heap_get();
    char *at = (char *)(uintptr_t)p;
    if (!bytes || n != 1 || desc->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
        desc->location.id != 0 || desc->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE ||
        !blocks_of(at, bytes, [](block &) {}))
        return CUDA_ERROR_INVALID_VALUE;
    blocks_of(at, bytes, [](block &b) { b.can_access = true; });
    if (h->is_open)
        mprotect(at, bytes, PROT_READ | PROT_WRITE);
    return CUDA_SUCCESS;
}

static CUresult granularity(size_t *ret, const CUmemAllocationProp *prop,
                            CUmemAllocationGranularity_flags)
{
    ENTER_DRIVER("cuMemGetAllocationGranularity");
    if (!prop_ok(prop))
        return CUDA_ERROR_INVALID_VALUE;
    *ret = GRANULE;
    return CUDA_SUCCESS;
}

void *driver_entry(const char *name)
{
    static const struct {
        const char *name;
        void *call;
    } calls[] = {
        {"cuMemAddressReserve", (void *)address_reserve},
        {"cuMemAddressFree", (void *)address_free},
        {"cuMemCreate", (void *)create},
        {"cuMemRelease", (void *)release},
        {"cuMemMap", (void *)map},
        {"cuMemUnmap", (void *)unmap},
        {"cuMemSetAccess", (void *)set_access},
        {"cuMemGetAllocationGranularity", (void *)granularity},
    };
    for (const auto &c : calls)
        if (strcmp(c.name, name) == 0)
            return c.call;
    return nullptr;
}

} // namespace simt
