/* simt.h: CUDA's device side on a CPU, as port.cuh sees it when it is built with -DBC_SIMT. A kernel is ordinary C++;
 * every CUDA thread is a fiber with a stack of its own, and one OS thread runs them in turn:
 *
 *      block  +-- warp 0: fiber 0 .. 31 --+   a fiber runs until it must wait: at a warp collective for the lanes of
 *             +-- warp 1: fiber 32 .. 63 -+   the mask, at a barrier for the block. Then the next lane of its warp runs,
 *             +-- ...                     +   then the next warp. Blocks run one after the other.
 *
 * A waiting fiber leaves a pointer to its operands; the lane that completes a collective computes it for all of them.
 * Nothing here is ever concurrent, so a bug shows as a wrong order, not as a wrong mood: the order is chosen to be a bad
 * one (simt::options::schedule), memory starts as NaN, copies arrive as late as they may. What is not allowed ends the
 * process with a report that names kernel, block, thread and line (report.cc).
 *
 * All state hangs on one object, simt::world. The runtime locks it, so any OS thread may call in. */
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <functional>
#include <tuple>
#include <type_traits>
#include "cuda_fp16.h"
#include "cuda_runtime.h"

namespace simt
{

/* Where a kernel's code stands: the last collective or barrier that a thread came to, for reports and to tell one
 * collective from another. A default argument, so that it says the caller's place. */
struct place {
    const char *file;
    int line;
    static constexpr place here(const char *f = __builtin_FILE(), int l = __builtin_LINE())
    {
        return place{f, l};
    }
};
#define SIMT_HERE simt::place at = simt::place::here()

/* ---- the world ---- */

enum schedule {
    SCHEDULE_FORWARD, /* lowest lane, warp and block first */
    SCHEDULE_REVERSE, /* highest first */
    SCHEDULE_RANDOM   /* warps, lanes and blocks in an order drawn from the seed */
};
enum stream_order {
    STREAMS_LAZY, /* only what the waiter needs runs, at the last moment: whoever forgot an event reads old data */
    STREAMS_EAGER, /* other streams run first, as far as they can: whoever forgot one finds its data overwritten */
    STREAMS_RANDOM, /* drawn from the seed, operation by operation */
};

struct options {
    enum schedule schedule;
    enum stream_order streams;
    uint32_t seed;
    bool protect;            /* device memory without rights outside kernels */
    size_t device_bytes;     /* what cudaMalloc and cuMemCreate can give out together */
    int sm_major, sm_minor;  /* what the device says it is */
    size_t smem_optin_bytes; /* shared memory that a block can ask for */
    bool trap_is_error; /* __trap is cudaErrorLaunchFailure, as on a device, instead of a report */
};
/* Of a card of the sm_89 kind. */
constexpr options options_initial = {SCHEDULE_FORWARD, STREAMS_LAZY, 1, true, (size_t)8 << 30, 8, 9,
                                     101376,           false};
options options_default();

struct thread;   /* one CUDA thread: exec.h */
struct exec;     /* fibers and warps */
struct heap;     /* device memory */
struct queues;   /* streams, events, graphs */
struct detector; /* race.cc */

struct world {
    /* read by running kernels */
    thread *cur;
    dim3 tid, bid, block, grid;
    unsigned char *smem;
    size_t smem_bytes;

    options opt;
    exec *ex;
    heap *mem;
    queues *q;
    detector *race;
};
extern world w;

/* Changes take effect with the next thing that runs. */
void set_options(const options &o);

/* The nth call (1: the next) of that name (NULL: of any, launches included as "launch") fails with e. */
void inject(const char *name, unsigned nth, cudaError_t e);
/* Calls seen since the last inject: how far a test can go. */
unsigned inject_calls();

/* ---- launches ---- */

struct launch_shape {
    const char *name;
    const void *func;
    dim3 grid, block;
    size_t smem;
    cudaStream_t stream;
    bool
        early; /* may begin before the launch in front of it has ended: each thread must call early_wait */
};
/* Checks the shape and puts the launch on the stream (or into the graph being captured). body runs one thread. */
void launch(const launch_shape &shape, std::function<void()> body);

template <class... P, class... A>
inline void launch_as(bool early, const char *name, void (*kernel)(P...), dim3 grid, dim3 block,
                      size_t smem, cudaStream_t stream, A &&...args)
{
    std::tuple<std::decay_t<P>...> copy(
        std::forward<A>(args)...); /* as the hardware's parameter space */
    launch(launch_shape{name, (const void *)kernel, grid, block, smem, stream, early},
           [kernel, copy] { std::apply(kernel, copy); });
}
template <class... P, class... A>
inline void launch(const char *name, void (*kernel)(P...), dim3 grid, dim3 block, size_t smem,
                   cudaStream_t stream, A &&...args)
{
    launch_as(false, name, kernel, grid, block, smem, stream, std::forward<A>(args)...);
}

/* ---- what a running thread calls ---- */

/* Is it aligned, and inside shared memory or one allocation of device memory? */
void check_access(const void *p, size_t bytes, size_t align, const char *what);
void check_shared(const void *p, size_t bytes, const char *what);
template <class T> inline T load(const void *p)
{
    check_access(p, sizeof(T), sizeof(T), "vector load");
    T v;
    memcpy(&v, p, sizeof v);
    return v;
}

void barrier(place at);
enum barrier_vote { VOTE_COUNT, VOTE_AND, VOTE_OR };
int barrier_reduce(enum barrier_vote vote, int predicate, place at);
void warp_sync(uint32_t mask, place at);

enum shuffle { SHUFFLE_IDX, SHUFFLE_XOR, SHUFFLE_UP, SHUFFLE_DOWN };
uint64_t warp_shuffle(enum shuffle how, uint32_t mask, uint64_t v, int arg, int width, place at);
enum vote { WARP_BALLOT, WARP_ANY, WARP_ALL };
uint32_t warp_vote(enum vote how, uint32_t mask, int predicate, place at);
enum reduce { REDUCE_ADD, REDUCE_MIN, REDUCE_MAX, REDUCE_AND, REDUCE_OR, REDUCE_XOR };
int64_t warp_reduce(enum reduce how, uint32_t mask, int64_t v, place at);
uint32_t warp_match_any(uint32_t mask, uint64_t v, place at);

void mma_f16(float *d, const uint32_t *a, const uint32_t *b, SIMT_HERE);
void mma_bf16(float *d, const uint32_t *a, const uint32_t *b, SIMT_HERE);
void mma_f16_k8(float *d, const uint32_t *a, const uint32_t *b, SIMT_HERE);
void mma_s8(int *d, const uint32_t *a, const uint32_t *b, SIMT_HERE);
void ldsm4(uint32_t *r, const void *row, SIMT_HERE);
void ldsm4t(uint32_t *r, const void *row, SIMT_HERE);
void ldsm2(uint32_t *r, const void *row, SIMT_HERE);
void ldsm2t(uint32_t *r, const void *row, SIMT_HERE);

void cpa_bytes(void *dst, const void *src, unsigned bytes, bool ok, SIMT_HERE);
inline void cpa16(void *dst, const void *src, bool ok, SIMT_HERE)
{
    cpa_bytes(dst, src, 16, ok, at);
}
template <int BYTES> inline void cpa_small(void *dst, const void *src, SIMT_HERE)
{
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async has no other");
    cpa_bytes(dst, src, BYTES, true, at);
}
void cpa_commit();
void cpa_wait_for(int newest);
template <int N> inline void cpa_wait()
{
    cpa_wait_for(N);
}

void atomic_begin(const void *p, size_t bytes); /* checks, and tells the race detector */
void atomic_end();
void fence();
void early_wait();
[[noreturn]] void trap(place at);

static inline int dp4a_us(uint32_t a, int b, int c)
{
    for (int i = 0; i < 32; i += 8)
        c += (int)(uint8_t)(a >> i) * (int)(int8_t)(b >> i);
    return c;
}

} // namespace simt

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __shared__ static_shared_memory_is_not_allowed_use_DYN_SMEM
#define __constant__ constant_memory_is_not_allowed
#define DEV static inline
#define DYN_SMEM(T, name) T *name = (T *)simt::w.smem
#define LAUNCH(kernel, grid, block, smem, stream, ...)                                             \
    simt::launch(#kernel, kernel, grid, block, smem, stream, ##__VA_ARGS__)
#define LAUNCH_EARLY(kernel, grid, block, smem, stream, ...)                                       \
    simt::launch_as(true, #kernel, kernel, grid, block, smem, stream, ##__VA_ARGS__)

#define threadIdx (simt::w.tid)
#define blockIdx (simt::w.bid)
#define blockDim (simt::w.block)
#define gridDim (simt::w.grid)
constexpr int warpSize = 32;

#include "simt_builtins.h"
