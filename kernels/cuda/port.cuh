/* port.cuh: the only header that kernels include. One source, two machines:
 *
 *      nvcc          real instructions, bodies chosen by __CUDA_ARCH__ (sm_75 has its fallbacks)
 *      g++ -DBC_SIMT calls into the shim (tests/simt), which runs a kernel thread by thread on the CPU
 *
 * Rules for kernels, so that both agree:
 *   - launches:  LAUNCH(kernel, grid, block, smem_bytes, stream, args...) and nothing else; a kernel with commas in
 *                its name stands in parentheses: LAUNCH((attn<64, 128>), ...). Arguments are copied at the launch.
 *                Blocks are whole warps (a multiple of 32 threads).
 *   - early:     LAUNCH_EARLY is LAUNCH, but the kernel may begin while the one in front of it on the stream still runs (sm_90
 *                on). Each thread calls early_wait() before it touches what any kernel writes, or writes anything;
 *                before that it may read what never changes (weights). early_next() lets the next one begin.
 *   - shared:    DYN_SMEM(T, name) only; a static __shared__ array does not compile. All of it is garbage at the start.
 *   - functions: DEV float f(...) for what kernels call.
 *   - warps:     __shfl*_sync, __ballot_sync, __any_sync, __all_sync, __syncwarp, mma_*, ldsm*: every lane named in the mask
 *                must arrive, at the same line. mma and ldsm take the whole warp. Shuffles do not order memory; __syncwarp does.
 *   - cp.async:  what cpa16 writes is garbage until cpa_wait of its group, and other threads see it after a barrier.
 *   - order:     blocks of one launch neither wait for each other nor see each other's plain writes.
 *   - fragments: the layouts of the PTX manual, written out at each function below.
 * g = lane / 4, t = lane % 4 in those layouts. */
#ifndef BACKCAST_PORT_CUH
#define BACKCAST_PORT_CUH
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#ifdef BC_SIMT
#include "simt.h"
#else
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define DEV static __device__ __forceinline__
#define DYN_SMEM(T, name)                                                                          \
    extern __shared__ __align__(128) unsigned char bc_smem_raw[];                                  \
    T *name = (T *)bc_smem_raw
#define LAUNCH(kernel, grid, block, smem, stream, ...)                                             \
    kernel<<<(grid), (block), (smem), (stream)>>>(__VA_ARGS__)
#define LAUNCH_EARLY(kernel, grid, block, smem, stream, ...)                                       \
    launch_early(kernel, grid, block, smem, stream, __VA_ARGS__)

/* What goes wrong is cudaGetLastError's, as with a plain launch. */
template <class... P, class... A>
static inline void launch_early(void (*kernel)(P...), dim3 grid, dim3 block, size_t smem,
                                cudaStream_t stream, A... args)
{
    cudaLaunchAttribute early = {};
    cudaLaunchConfig_t how = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    how.gridDim = grid;
    how.blockDim = block;
    how.dynamicSmemBytes = smem;
    how.stream = stream;
    how.attrs = &early;
    how.numAttrs = 1;
    cudaLaunchKernelEx(&how, kernel, P(args)...);
}
#endif

#define FULL_WARP 0xffffffffu

/* ---- numbers ---- */

typedef __half half_t;

DEV float h2f(half_t h)
{
    return __half2float(h);
}
DEV half_t f2h(float f) /* nearest even */
{
    return __float2half_rn(f);
}
DEV uint16_t half_bits(half_t h)
{
    return __half_as_ushort(h);
}
DEV half_t half_of(uint16_t bits)
{
    return __ushort_as_half(bits);
}
DEV uint32_t pack2(float lo, float hi) /* two halves in a register, as mma and ldsm know them */
{
    return half_bits(f2h(lo)) | (uint32_t)half_bits(f2h(hi)) << 16;
}
DEV float2 unpack2(uint32_t pair)
{
    return make_float2(h2f(half_of((uint16_t)pair)), h2f(half_of((uint16_t)(pair >> 16))));
}
DEV float bf2f(uint16_t bits) /* bfloat16 is the upper half of a float */
{
    return __uint_as_float((uint32_t)bits << 16);
}
DEV uint16_t f2bf(float f) /* nearest even; a NaN stays a NaN */
{
    uint32_t u = __float_as_uint(f);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(u >> 16 | 0x40u);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

/* ---- the launch in front ---- */

#ifdef BC_SIMT
using simt::early_wait;
DEV void early_next() {}
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
DEV void early_wait() /* all of it has ended, and its writes are there */
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
DEV void early_next() /* once every block has said so or ended, the next launch may begin */
{
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
#else
DEV void early_wait() {}
DEV void early_next() {}
#endif

/* 2^x and 1/sqrt(x) of the hardware: 2 ulp, denormals are zeros. exp2f and 1/sqrtf are the accurate ones. */
#ifdef BC_SIMT
DEV float exp2_fast(float x)
{
    return exp2f(x);
}
DEV float rsqrt_fast(float x)
{
    return 1.0f / sqrtf(x);
}
#else
DEV float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEV float rsqrt_fast(float x)
{
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

/* c + sum of four products of bytes; __dp4a(int, int, int) has signed bytes on both sides, here a's are unsigned. */
#ifdef BC_SIMT
DEV int dp4a_us(uint32_t a, int b, int c)
{
    return simt::dp4a_us(a, b, c);
}
#else
DEV int dp4a_us(uint32_t a, int b, int c)
{
    int d;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
#endif

/* 16 bytes that are read once (weights): kept out of L1. The address is a multiple of 16. */
#ifdef BC_SIMT
DEV uint4 ld_stream16(const void *p)
{
    return simt::load<uint4>(p);
}
#else
DEV uint4 ld_stream16(const void *p)
{
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(p));
    return v;
}
#endif

/* ---- warps ---- */

DEV int lane_id()
{
    return (int)(threadIdx.x & 31u); /* blocks are laid out along x */
}
DEV int warp_id()
{
    return (int)(threadIdx.x >> 5);
}
template <class T> DEV T warp_sum(T v) /* every lane gets the same bits: each level adds a pair */
{
#pragma unroll
    for (int o = 16; o; o >>= 1)
        v += __shfl_xor_sync(FULL_WARP, v, o);
    return v;
}
template <class T> DEV T warp_max(T v)
{
#pragma unroll
    for (int o = 16; o; o >>= 1) {
        T other = __shfl_xor_sync(FULL_WARP, v, o);
        v = v < other ? other : v;
    }
    return v;
}

/* ---- tensor cores and ldmatrix ---- */

#ifdef BC_SIMT
/* d (16x8, f32) += a (16x16, row) . b (16x8, col), halves in pairs:
 *      a[0]: row g,   k 2t..2t+1     a[2]: row g,   k 2t+8..2t+9     b[0]: k 2t..2t+1,   col g
 *      a[1]: row g+8, k 2t..2t+1     a[3]: row g+8, k 2t+8..2t+9     b[1]: k 2t+8..2t+9, col g
 *      d[0], d[1]: row g, cols 2t, 2t+1                              d[2], d[3]: row g+8, the same cols */
using simt::mma_bf16; /* the same of bf16; sm_80 on */
using simt::mma_f16;  /* (float d[4], const uint32_t a[4], const uint32_t b[2]) */
/* The half of it: k = 8, a[0], a[1] and b as above. */
using simt::mma_f16_k8; /* (float d[4], const uint32_t a[2], const uint32_t b[1]) */
/* d (16x8, s32) += a (16x32, row) . b (32x8, col), signed bytes in fours:
 *      a[0]: row g, k 4t..4t+3   a[1]: row g+8   a[2]: row g, k 4t+16..4t+19   a[3]: row g+8, k the same
 *      b[0]: k 4t..4t+3, col g   b[1]: k 4t+16..4t+19, col g                   d as above */
using simt::mma_s8; /* (int d[4], const uint32_t a[4], const uint32_t b[2]) */
/* Four 8x8 matrices of halves from shared memory: lane i gives the address of row i % 8 of matrix i / 8 (16 bytes,
 * aligned). r[m] of a lane: row g, cols 2t, 2t+1 of matrix m; with trans: rows 2t, 2t+1 of col g. */
using simt::ldsm4; /* (uint32_t r[4], const void *row) */
using simt::ldsm4t;
/* Two matrices; lanes 0..15 give the rows, the other lanes' addresses are not looked at. */
using simt::ldsm2; /* (uint32_t r[2], const void *row) */
using simt::ldsm2t;
#else
DEV uint32_t smem_addr(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}
DEV void mma_f16_k8(float *d, const uint32_t *a, const uint32_t *b)
{
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(b[0]));
}
DEV void mma_f16(float *d, const uint32_t *a, const uint32_t *b)
{
#if __CUDA_ARCH__ < 800
    mma_f16_k8(d, a, b);
    mma_f16_k8(d, a + 2, b + 1);
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
DEV void mma_bf16(float *d, const uint32_t *a, const uint32_t *b)
{
#if __CUDA_ARCH__ < 800
    __trap(); /* no such instruction: linear.cu makes halves of bf16 there */
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
#if __CUDA_ARCH__ < 800
DEV void mma_s8_8x8x16(int *d, uint32_t a, uint32_t b)
{
    asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
                 : "+r"(d[0]), "+r"(d[1])
                 : "r"(a), "r"(b));
}
#endif
DEV void mma_s8(int *d, const uint32_t *a, const uint32_t *b)
{
#if __CUDA_ARCH__ < 800
    mma_s8_8x8x16(d, a[0], b[0]);
    mma_s8_8x8x16(d + 2, a[1], b[0]);
    mma_s8_8x8x16(d, a[2], b[1]);
    mma_s8_8x8x16(d + 2, a[3], b[1]);
#else
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
DEV void ldsm4(uint32_t *r, const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem_addr(row))
                 : "memory");
}
DEV void ldsm4t(uint32_t *r, const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem_addr(row))
                 : "memory");
}
DEV void ldsm2(uint32_t *r, const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(smem_addr(row))
                 : "memory");
}
DEV void ldsm2t(uint32_t *r, const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(smem_addr(row))
                 : "memory");
}
#endif

/* ---- copies from global to shared memory behind the threads' back ---- */

#ifdef BC_SIMT
/* 16 bytes, both addresses multiples of 16; !ok: zeros are written and src is not read (it must still be a valid pointer).
 */
using simt::cpa16; /* (void *dst, const void *src, bool ok) */
/* cpa_small<N>: N = 4, 8 or 16 bytes, both addresses multiples of N; goes through the first-level cache. */
using simt::cpa_commit;
using simt::cpa_small; /* (void *dst, const void *src) */
using simt::cpa_wait;  /* cpa_wait<N>(): all but the newest N groups of this thread have arrived */
#elif __CUDA_ARCH__ < 800
DEV void cpa16(void *dst, const void *src, bool ok)
{
    *(uint4 *)dst = ok ? *(const uint4 *)src : make_uint4(0, 0, 0, 0);
}
template <int BYTES> DEV void cpa_small(void *dst, const void *src)
{
#pragma unroll
    for (int i = 0; i < BYTES / 4; i++)
        ((uint32_t *)dst)[i] = ((const uint32_t *)src)[i];
}
DEV void cpa_commit() {}
template <int N> DEV void cpa_wait() {}
#else
DEV void cpa16(void *dst, const void *src, bool ok)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_addr(dst)), "l"(src),
                 "r"(ok ? 16 : 0)
                 : "memory");
}
template <int BYTES> DEV void cpa_small(void *dst, const void *src)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(smem_addr(dst)), "l"(src),
                 "n"(BYTES)
                 : "memory");
}
DEV void cpa_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N> DEV void cpa_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
#endif
#endif
