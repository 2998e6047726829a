/* copy.cc: allocation, copies and fills.
 *
 * Pinned host memory is read and written when a copy runs, not when it is asked for: who overwrites a staging buffer too
 * early sends the new bytes, who reads a result too early finds NaN (stream.cc). Pageable memory is staged at the call,
 * as the runtime does; into pageable memory a copy waits, so the call is not asynchronous at all. */
#include "exec.h"
#include "memory.h"
#include "race.h"
#include "runtime.h"
#include "stream.h"

namespace simt
{

enum where { WHERE_PAGEABLE, WHERE_PINNED, WHERE_DEVICE };

static enum where where_is(const void *p)
{
    const block *b = heap_find(p);
    if (!b)
        return WHERE_PAGEABLE;
    return b->kind == BLOCK_PINNED ? WHERE_PINNED : WHERE_DEVICE;
}

/* A range that the device uses must lie in one block; mapped pieces of a range may follow one another. */
static bool range_ok(const void *p, size_t bytes)
{
    const char *c = (const char *)p;
    if (where_is(p) == WHERE_PAGEABLE)
        return true;
    while (bytes) {
        const block *b = heap_find(c);
        if (!b || (b->kind == BLOCK_MAPPED && !b->can_access))
            return false;
        size_t room = (size_t)(b->p + b->bytes - c);
        if (room >= bytes)
            return true;
        if (b->kind != BLOCK_MAPPED)
            return false;
        c += room;
        bytes -= room;
    }
    return true;
}

static bool direction_ok(enum where dst, enum where src, cudaMemcpyKind kind)
{
    bool to_device = dst == WHERE_DEVICE, from_device = src == WHERE_DEVICE;
    switch (kind) {
    case cudaMemcpyHostToHost:
        return !to_device && !from_device;
    case cudaMemcpyHostToDevice:
        return to_device && !from_device;
    case cudaMemcpyDeviceToHost:
        return !to_device && from_device;
    case cudaMemcpyDeviceToDevice:
        return to_device && from_device;
    case cudaMemcpyDefault:
        return true;
    }
    return false;
}

/* Rows of `width` bytes, `pitch` apart. */
struct rect {
    char *dst;
    const char *src;
    size_t dst_pitch, src_pitch, width, height;
};

static void rect_run(const rect &r, bool out)
{
    w.q->copies_out += out;
    w.q->bytes_out += out ? r.width * r.height : 0;
    for (size_t i = 0; i < r.height; i++) {
        race_range(r.src + i * r.src_pitch, r.width, ACCESS_READ);
        race_range(r.dst + i * r.dst_pitch, r.width, ACCESS_WRITE);
        memmove(r.dst + i * r.dst_pitch, r.src + i * r.src_pitch, r.width);
    }
}

static size_t span(size_t pitch, size_t width, size_t height)
{
    return height ? pitch * (height - 1) + width : 0;
}

static cudaError_t copy(rect r, cudaMemcpyKind kind, cudaStream_t stream, bool wait)
{
    CUstream_st *s = stream_of(stream);
    if (!s)
        return cudaErrorInvalidResourceHandle;
    if (r.width == 0 || r.height == 0)
        return cudaSuccess;
    if (!r.dst || !r.src || r.dst_pitch < r.width || r.src_pitch < r.width)
        return cudaErrorInvalidValue;
    size_t dst_bytes = span(r.dst_pitch, r.width, r.height),
           src_bytes = span(r.src_pitch, r.width, r.height);
    enum where dst = where_is(r.dst), src = where_is(r.src);
    if (!direction_ok(dst, src, kind))
        return cudaErrorInvalidMemcpyDirection;
    if (!range_ok(r.dst, dst_bytes) || !range_ok(r.src, src_bytes))
        return cudaErrorInvalidValue;
    if (s->capturing && (dst == WHERE_PAGEABLE || src == WHERE_PAGEABLE || wait)) {
        s->capturing->broken = true;
        return cudaErrorStreamCaptureUnsupported;
    }
    op o = {};
    o.name = "copy";
    o.on_device = true;
    if (dst == WHERE_PINNED)
        o.host_writes = host_range{r.dst, dst_bytes};
    if (src == WHERE_PINNED)
        o.host_reads = host_range{r.src, src_bytes};
    if (src == WHERE_PAGEABLE) { /* staged now */
        auto staged = std::make_shared<std::vector<char>>(r.src, r.src + src_bytes);
        o.run = [r, staged] {
            rect from = r;
            from.src = staged->data();
            rect_run(from, false);
        };
    } else {
        bool out = src == WHERE_DEVICE && dst != WHERE_DEVICE;
        o.run = [r, out] { rect_run(r, out); };
    }
    cudaError_t e = stream_push(s, std::move(o));
    if (e == cudaSuccess && (wait || dst == WHERE_PAGEABLE)) {
        run_until(point{s->id, s->pushed});
        e = sticky_error();
    }
    return e;
}

static cudaError_t fill(void *dst, int value, size_t bytes, cudaStream_t stream)
{
    CUstream_st *s = stream_of(stream);
    if (!s)
        return cudaErrorInvalidResourceHandle;
    if (!bytes)
        return cudaSuccess;
    if (where_is(dst) == WHERE_PAGEABLE || !range_ok(dst, bytes))
        return cudaErrorInvalidValue;
    op o = {};
    o.name = "fill";
    o.on_device = true;
    if (where_is(dst) == WHERE_PINNED)
        o.host_writes = host_range{(char *)dst, bytes};
    o.run = [dst, value, bytes] {
        race_range(dst, bytes, ACCESS_WRITE);
        memset(dst, value, bytes);
    };
    return stream_push(s, std::move(o));
}

} // namespace simt

using namespace simt;

extern "C" {

cudaError_t cudaMalloc(void **ret, size_t bytes)
{
    ENTER("cudaMalloc");
    if (capture_forbids() != cudaSuccess)
        return call_end(cudaErrorStreamCaptureUnsupported);
    *ret = nullptr;
    if (!bytes)
        return cudaSuccess;
    void *p = heap_alloc(bytes);
    if (!p)
        return call_end(cudaErrorMemoryAllocation);
    *ret = p;
    return cudaSuccess;
}

cudaError_t cudaFree(void *p)
{
    ENTER("cudaFree");
    if (capture_forbids() != cudaSuccess)
        return call_end(cudaErrorStreamCaptureUnsupported);
    if (!p)
        return cudaSuccess;
    run_all(); /* as the runtime does */
    return call_end(heap_free(p) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaHostAlloc(void **ret, size_t bytes, unsigned)
{
    ENTER("cudaMallocHost");
    if (capture_forbids() != cudaSuccess)
        return call_end(cudaErrorStreamCaptureUnsupported);
    *ret = nullptr;
    if (!bytes)
        return cudaSuccess;
    void *p = heap_alloc_pinned(bytes);
    if (!p)
        return call_end(cudaErrorMemoryAllocation);
    *ret = p;
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void **ret, size_t bytes)
{
    return cudaHostAlloc(ret, bytes, 0);
}

cudaError_t cudaFreeHost(void *p)
{
    ENTER("cudaFreeHost");
    if (!p)
        return cudaSuccess;
    run_all();
    return call_end(heap_free_pinned(p) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned)
{
    ENTER("cudaHostRegister");
    return call_end(heap_register(p, bytes) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaHostUnregister(void *p)
{
    ENTER("cudaHostUnregister");
    run_all();
    return call_end(heap_unregister(p) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    ENTER("cudaMemGetInfo");
    *total_bytes = w.opt.device_bytes;
    *free_bytes = w.opt.device_bytes - heap_get()->bytes_used;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *ret, const void *p)
{
    ENTER("cudaPointerGetAttributes");
    static const cudaMemoryType types[] = {cudaMemoryTypeUnregistered, cudaMemoryTypeHost,
                                           cudaMemoryTypeDevice};
    *ret = cudaPointerAttributes();
    ret->type = types[where_is(p)];
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind)
{
    ENTER("cudaMemcpy");
    return call_end(
        copy(rect{(char *)dst, (const char *)src, bytes, bytes, bytes, 1}, kind, nullptr, true));
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    ENTER("cudaMemcpyAsync");
    return call_end(
        copy(rect{(char *)dst, (const char *)src, bytes, bytes, bytes, 1}, kind, stream, false));
}

cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch,
                              size_t width, size_t height, cudaMemcpyKind kind, cudaStream_t stream)
{
    ENTER("cudaMemcpyAsync");
    return call_end(copy(rect{(char *)dst, (const char *)src, dst_pitch, src_pitch, width, height},
                         kind, stream, false));
}

cudaError_t cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t stream)
{
    ENTER("cudaMemsetAsync");
    return call_end(fill(dst, value, bytes, stream));
}

cudaError_t cudaMemset(void *dst, int value, size_t bytes)
{
    ENTER("cudaMemset");
    return call_end(fill(dst, value, bytes, nullptr));
}

} // extern "C"
