/* runtime.cc: the calls of the fake runtime: errors, devices, memory, copies, streams. Graphs and events: graph.cc. */
#include "runtime.h"
#include "exec.h"
#include "memory.h"
#include "stream.h"
#include <stdio.h>

namespace simt
{

/* ---- errors ---- */

call_lock::call_lock()
{
    queues_get()->mutex.lock();
}
call_lock::~call_lock()
{
    w.q->mutex.unlock();
}

/* Errors after which the context is dead, as the runtime's manual lists them. */
bool is_sticky(cudaError_t e)
{
    switch (e) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
        return true;
    default:
        return false;
    }
}

void stick(cudaError_t e)
{
    queues_get()->sticky = e;
}

cudaError_t sticky_error()
{
    return queues_get()->sticky;
}

void inject(const char *name, unsigned nth, cudaError_t e)
{
    call_lock lock;
    queues *q = w.q;
    q->inject_name = name;
    q->inject_at = nth;
    q->inject_seen = 0;
    q->inject_error = e;
}

unsigned inject_calls()
{
    return queues_get()->inject_seen;
}

cudaError_t call_begin(const char *name)
{
    queues *q = w.q;
    if (q->sticky != cudaSuccess)
        return q->sticky;
    if (q->inject_name && strcmp(q->inject_name, name) != 0)
        return cudaSuccess;
    q->inject_seen++;
    if (q->inject_at == 0 || q->inject_seen != q->inject_at)
        return cudaSuccess;
    if (is_sticky(q->inject_error))
        q->sticky = q->inject_error;
    return q->inject_error;
}

cudaError_t call_end(cudaError_t e)
{
    if (e != cudaSuccess)
        w.q->last_error = e;
    return e;
}

/* ---- launches ---- */

static cudaError_t shape_check(const launch_shape &s)
{
    uint64_t threads = (uint64_t)s.block.x * s.block.y * s.block.z;
    if (!s.grid.x || !s.grid.y || !s.grid.z || !threads || threads > BLOCK_THREADS_MAX ||
        s.block.z > 64 || s.grid.x > 0x7fffffffu || s.grid.y > 65535 || s.grid.z > 65535)
        return cudaErrorInvalidConfiguration;
    auto limit = w.q->smem_limits.find(s.func);
    size_t most = 48u << 10;
    if (limit != w.q->smem_limits.end() && (size_t)limit->second > most)
        most = (size_t)limit->second;
    return s.smem > most ? cudaErrorInvalidValue : cudaSuccess;
}

void launch(const launch_shape &shape, std::function<void()> body)
{
    call_lock lock;
    cudaError_t e = call_begin("launch");
    CUstream_st *s = e == cudaSuccess ? stream_of(shape.stream) : nullptr;
    if (e == cudaSuccess && !s)
        e = cudaErrorInvalidResourceHandle;
    if (e == cudaSuccess)
        e = shape_check(shape);
    if (e != cudaSuccess) {
        call_end(e);
        return;
    }
    if (shape.block.x * shape.block.y * shape.block.z % LANES)
        report("bad argument", "kernel %s: a block of %u threads is no number of whole warps",
               shape.name, shape.block.x * shape.block.y * shape.block.z);
    op o = {};
    o.name = shape.name;
    o.on_device = true;
    o.run = [shape, body] { exec_run(shape, body); };
    call_end(stream_push(s, std::move(o)));
}

} // namespace simt

using namespace simt;

extern "C" {

cudaError_t cudaGetLastError(void)
{
    call_lock lock;
    cudaError_t e = w.q->sticky != cudaSuccess ? w.q->sticky : w.q->last_error;
    w.q->last_error = cudaSuccess;
    return e;
}

cudaError_t cudaPeekAtLastError(void)
{
    call_lock lock;
    return w.q->sticky != cudaSuccess ? w.q->sticky : w.q->last_error;
}

#define NAMES(X)                                                                                   \
    X(cudaSuccess, "no error")                                                                     \
    X(cudaErrorInvalidValue, "invalid argument")                                                   \
    X(cudaErrorMemoryAllocation, "out of memory")                                                  \
    X(cudaErrorInitializationError, "initialization error")                                        \
    X(cudaErrorInvalidConfiguration, "invalid configuration argument")                             \
    X(cudaErrorInvalidDevicePointer, "invalid device pointer")                                     \
    X(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy")                        \
    X(cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version") \
    X(cudaErrorNoDevice, "no CUDA-capable device is detected")                                     \
    X(cudaErrorInvalidDevice, "invalid device ordinal")                                            \
    X(cudaErrorECCUncorrectable, "uncorrectable ECC error encountered")                            \
    X(cudaErrorInvalidResourceHandle, "invalid resource handle")                                   \
    X(cudaErrorIllegalState, "the operation cannot be performed in the present state")             \
    X(cudaErrorNotReady, "device not ready")                                                       \
    X(cudaErrorIllegalAddress, "an illegal memory access was encountered")                         \
    X(cudaErrorLaunchOutOfResources, "too many resources requested for launch")                    \
    X(cudaErrorLaunchTimeout, "the launch timed out and was terminated")                           \
    X(cudaErrorMisalignedAddress, "misaligned address")                                            \
    X(cudaErrorLaunchFailure, "unspecified launch failure")                                        \
    X(cudaErrorNotSupported, "operation not supported")                                            \
    X(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing")       \
    X(cudaErrorStreamCaptureInvalidated,                                                           \
      "operation failed due to a previous error during capture")                                   \
    X(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work")                        \
    X(cudaErrorStreamCaptureImplicit,                                                              \
      "operation would make the legacy stream depend on a capturing blocking stream")

const char *cudaGetErrorName(cudaError_t e)
{
    switch (e) {
#define X(code, text)                                                                              \
    case code:                                                                                     \
        return #code;
        NAMES(X)
#undef X
    default:
        return "cudaErrorUnknown";
    }
}

const char *cudaGetErrorString(cudaError_t e)
{
    switch (e) {
#define X(code, text)                                                                              \
    case code:                                                                                     \
        return text;
        NAMES(X)
#undef X
    default:
        return "unknown error";
    }
}

/* ---- the device ---- */

cudaError_t cudaGetDeviceCount(int *n)
{
    ENTER("cudaGetDeviceCount");
    *n = 1;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    ENTER("cudaSetDevice");
    return call_end(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}

cudaError_t cudaGetDevice(int *device)
{
    ENTER("cudaGetDevice");
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *ret, int device)
{
    ENTER("cudaGetDeviceProperties");
    if (device != 0)
        return call_end(cudaErrorInvalidDevice);
    *ret = cudaDeviceProp();
    snprintf(ret->name, sizeof ret->name, "SIMT shim");
    ret->totalGlobalMem = w.opt.device_bytes;
    ret->sharedMemPerBlock = 48u << 10;
    ret->sharedMemPerBlockOptin = w.opt.smem_optin_bytes;
    ret->sharedMemPerMultiprocessor = w.opt.smem_optin_bytes + 1024;
    ret->regsPerBlock = ret->regsPerMultiprocessor = 65536;
    ret->warpSize = LANES;
    ret->maxThreadsPerBlock = (int)BLOCK_THREADS_MAX;
    ret->maxThreadsPerMultiProcessor = 1536;
    ret->maxThreadsDim[0] = ret->maxThreadsDim[1] = 1024;
    ret->maxThreadsDim[2] = 64;
    ret->maxGridSize[0] = 0x7fffffff;
    ret->maxGridSize[1] = ret->maxGridSize[2] = 65535;
    ret->major = w.opt.sm_major;
    ret->minor = w.opt.sm_minor;
    ret->multiProcessorCount = 4;
    ret->concurrentKernels = ret->unifiedAddressing = 1;
    ret->asyncEngineCount = 1;
    ret->memoryBusWidth = 64;
    ret->l2CacheSize = 4 << 20;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *ret, cudaDeviceAttr attr, int device)
{
    cudaDeviceProp p;
    cudaError_t e = cudaGetDeviceProperties(&p, device);
    if (e != cudaSuccess)
        return e;
    switch (attr) {
    case cudaDevAttrMaxThreadsPerBlock:
        *ret = p.maxThreadsPerBlock;
        return e;
    case cudaDevAttrMaxSharedMemoryPerBlock:
        *ret = (int)p.sharedMemPerBlock;
        return e;
    case cudaDevAttrWarpSize:
        *ret = p.warpSize;
        return e;
    case cudaDevAttrMultiProcessorCount:
        *ret = p.multiProcessorCount;
        return e;
    case cudaDevAttrL2CacheSize:
        *ret = p.l2CacheSize;
        return e;
    case cudaDevAttrComputeCapabilityMajor:
        *ret = p.major;
        return e;
    case cudaDevAttrComputeCapabilityMinor:
        *ret = p.minor;
        return e;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *ret = (int)p.sharedMemPerBlockOptin;
        return e;
    }
    return cudaErrorInvalidValue;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    ENTER("cudaDeviceGetStreamPriorityRange");
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *ret)
{
    ENTER("cudaDriverGetVersion");
    *ret = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *ret)
{
    ENTER("cudaRuntimeGetVersion");
    *ret = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **ret, unsigned version,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult *status)
{
    ENTER("cudaGetDriverEntryPointByVersion");
    *ret = driver_entry(symbol);
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSuccess;
    if (!*ret)
        found = cudaDriverEntryPointSymbolNotFound;
    else if (version < 10020)
        found = cudaDriverEntryPointVersionNotSufficent;
    if (status)
        *status = found;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *func, cudaFuncAttribute attr, int value)
{
    ENTER("cudaFuncSetAttribute");
    if (attr != cudaFuncAttributeMaxDynamicSharedMemorySize)
        return cudaSuccess; /* a hint */
    if (value < 0 || (size_t)value > w.opt.smem_optin_bytes)
        return call_end(cudaErrorInvalidValue);
    w.q->smem_limits[func] = value;
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *ret, const void *func)
{
    ENTER("cudaFuncGetAttributes");
    *ret = cudaFuncAttributes();
    ret->maxThreadsPerBlock = (int)BLOCK_THREADS_MAX;
    ret->binaryVersion = ret->ptxVersion = w.opt.sm_major * 10 + w.opt.sm_minor;
    auto limit = w.q->smem_limits.find(func);
    ret->maxDynamicSharedSizeBytes = limit == w.q->smem_limits.end() ? 48 << 10 : limit->second;
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void)
{
    ENTER("cudaDeviceSynchronize");
    if (capture_forbids() != cudaSuccess)
        return call_end(cudaErrorStreamCaptureUnsupported);
    run_all();
    return call_end(sticky_error());
}

/* Forgets the errors, too: tests begin anew with it. Memory and streams stay their owners'. */
cudaError_t cudaDeviceReset(void)
{
    call_lock lock;
    run_all();
    w.q->sticky = w.q->last_error = cudaSuccess;
    return cudaSuccess;
}

/* ---- streams ---- */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *ret, unsigned flags, int priority)
{
    ENTER("cudaStreamCreate");
    *ret = stream_make(!(flags & cudaStreamNonBlocking), priority, false);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *ret, unsigned flags)
{
    return cudaStreamCreateWithPriority(ret, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *ret)
{
    return cudaStreamCreateWithPriority(ret, 0, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    ENTER("cudaStreamDestroy");
    CUstream_st *s = stream_of(stream);
    if (!s || s->id == 0 || s->internal)
        return call_end(cudaErrorInvalidResourceHandle);
    if (s->capturing)
        return call_end(cudaErrorStreamCaptureUnsupported);
    stream_drop(s);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    ENTER("cudaStreamSynchronize");
    CUstream_st *s = stream_of(stream);
    if (!s)
        return call_end(cudaErrorInvalidResourceHandle);
    if (s->capturing) {
        s->capturing->broken = true;
        return call_end(cudaErrorStreamCaptureUnsupported);
    }
    run_until(point{s->id, s->pushed});
    return call_end(sticky_error());
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    ENTER("cudaStreamQuery");
    CUstream_st *s = stream_of(stream);
    if (!s)
        return call_end(cudaErrorInvalidResourceHandle);
    if (s->capturing) {
        s->capturing->broken = true;
        return call_end(cudaErrorStreamCaptureUnsupported);
    }
    if (s->ops.empty()) {
        clock_join(&w.q->host, s->seen);
        return call_end(sticky_error());
    }
    run_some(); /* time goes by */
    return call_end(cudaErrorNotReady);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void *user)
{
    ENTER("cudaLaunchHostFunc");
    CUstream_st *s = stream_of(stream);
    if (!s)
        return call_end(cudaErrorInvalidResourceHandle);
    op o = {};
    o.name = "host function";
    o.run = [fn, user] { fn(user); };
    return call_end(stream_push(s, std::move(o)));
}

} // extern "C"
