/* simt_builtins.h: CUDA's built-in functions under their own names. Included by simt.h only. */
#pragma once

/* ---- barriers and warps ---- */

static inline void __syncthreads(SIMT_HERE)
{
    simt::barrier(at);
}
static inline int __syncthreads_count(int p, SIMT_HERE)
{
    return simt::barrier_reduce(simt::VOTE_COUNT, p, at);
}
static inline int __syncthreads_and(int p, SIMT_HERE)
{
    return simt::barrier_reduce(simt::VOTE_AND, p, at);
}
static inline int __syncthreads_or(int p, SIMT_HERE)
{
    return simt::barrier_reduce(simt::VOTE_OR, p, at);
}
static inline void __syncwarp(uint32_t mask = 0xffffffffu, SIMT_HERE)
{
    simt::warp_sync(mask, at);
}

namespace simt
{
template <class T>
inline T shuffle_any(enum shuffle how, uint32_t mask, T v, int arg, int width, place at)
{
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "shuffles move 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &v, sizeof v);
    bits = warp_shuffle(how, mask, bits, arg, width, at);
    memcpy(&v, &bits, sizeof v);
    return v;
}
} // namespace simt

template <class T>
static inline T __shfl_sync(uint32_t mask, T v, int src, int width = 32, SIMT_HERE)
{
    return simt::shuffle_any(simt::SHUFFLE_IDX, mask, v, src, width, at);
}
template <class T>
static inline T __shfl_xor_sync(uint32_t mask, T v, int bits, int width = 32, SIMT_HERE)
{
    return simt::shuffle_any(simt::SHUFFLE_XOR, mask, v, bits, width, at);
}
template <class T>
static inline T __shfl_up_sync(uint32_t mask, T v, unsigned by, int width = 32, SIMT_HERE)
{
    return simt::shuffle_any(simt::SHUFFLE_UP, mask, v, (int)by, width, at);
}
template <class T>
static inline T __shfl_down_sync(uint32_t mask, T v, unsigned by, int width = 32, SIMT_HERE)
{
    return simt::shuffle_any(simt::SHUFFLE_DOWN, mask, v, (int)by, width, at);
}
static inline uint32_t __ballot_sync(uint32_t mask, int p, SIMT_HERE)
{
    return simt::warp_vote(simt::WARP_BALLOT, mask, p, at);
}
static inline int __any_sync(uint32_t mask, int p, SIMT_HERE)
{
    return (int)simt::warp_vote(simt::WARP_ANY, mask, p, at);
}
static inline int __all_sync(uint32_t mask, int p, SIMT_HERE)
{
    return (int)simt::warp_vote(simt::WARP_ALL, mask, p, at);
}
template <class T> static inline uint32_t __match_any_sync(uint32_t mask, T v, SIMT_HERE)
{
    uint64_t bits = 0;
    memcpy(&bits, &v, sizeof v);
    return simt::warp_match_any(mask, bits, at);
}
/* sm_80 and later */
static inline int __reduce_add_sync(uint32_t mask, int v, SIMT_HERE)
{
    return (int)simt::warp_reduce(simt::REDUCE_ADD, mask, v, at);
}
static inline unsigned __reduce_add_sync(uint32_t mask, unsigned v, SIMT_HERE)
{
    return (unsigned)simt::warp_reduce(simt::REDUCE_ADD, mask, v, at);
}
static inline int __reduce_max_sync(uint32_t mask, int v, SIMT_HERE)
{
    return (int)simt::warp_reduce(simt::REDUCE_MAX, mask, v, at);
}
static inline unsigned __reduce_max_sync(uint32_t mask, unsigned v, SIMT_HERE)
{
    return (unsigned)simt::warp_reduce(simt::REDUCE_MAX, mask, v, at);
}
static inline int __reduce_min_sync(uint32_t mask, int v, SIMT_HERE)
{
    return (int)simt::warp_reduce(simt::REDUCE_MIN, mask, v, at);
}
static inline unsigned __reduce_min_sync(uint32_t mask, unsigned v, SIMT_HERE)
{
    return (unsigned)simt::warp_reduce(simt::REDUCE_MIN, mask, v, at);
}
static inline unsigned __reduce_or_sync(uint32_t mask, unsigned v, SIMT_HERE)
{
    return (unsigned)simt::warp_reduce(simt::REDUCE_OR, mask, v, at);
}
static inline unsigned __reduce_and_sync(uint32_t mask, unsigned v, SIMT_HERE)
{
    return (unsigned)simt::warp_reduce(simt::REDUCE_AND, mask, v, at);
}

static inline void __threadfence()
{
    simt::fence();
}
static inline void __threadfence_block() {}
static inline void __trap(SIMT_HERE)
{
    simt::trap(at);
}

/* ---- atomics: the old value comes back ---- */

namespace simt
{
template <class T, class F> inline T atomic(T *p, F change)
{
    atomic_begin(p, sizeof *p);
    T old = *p;
    *p = change(old);
    atomic_end();
    return old;
}
} // namespace simt

#define SIMT_ATOMICS(T)                                                                            \
    static inline T atomicAdd(T *p, T v)                                                           \
    {                                                                                              \
        return simt::atomic(p, [v](T o) { return (T)(o + v); });                                   \
    }                                                                                              \
    static inline T atomicExch(T *p, T v)                                                          \
    {                                                                                              \
        return simt::atomic(p, [v](T) { return v; });                                              \
    }
#define SIMT_ATOMICS_INTEGER(T)                                                                    \
    SIMT_ATOMICS(T)                                                                                \
    static inline T atomicMax(T *p, T v)                                                           \
    {                                                                                              \
        return simt::atomic(p, [v](T o) { return o > v ? o : v; });                                \
    }                                                                                              \
    static inline T atomicMin(T *p, T v)                                                           \
    {                                                                                              \
        return simt::atomic(p, [v](T o) { return o < v ? o : v; });                                \
    }                                                                                              \
    static inline T atomicAnd(T *p, T v)                                                           \
    {                                                                                              \
        return simt::atomic(p, [v](T o) { return (T)(o & v); });                                   \
    }                                                                                              \
    static inline T atomicOr(T *p, T v)                                                            \
    {                                                                                              \
        return simt::atomic(p, [v](T o) { return (T)(o | v); });                                   \
    }                                                                                              \
    static inline T atomicCAS(T *p, T expect, T v)                                                 \
    {                                                                                              \
        return simt::atomic(p, [expect, v](T o) { return o == expect ? v : o; });                  \
    }

SIMT_ATOMICS(float)
SIMT_ATOMICS_INTEGER(int)
SIMT_ATOMICS_INTEGER(unsigned)
SIMT_ATOMICS_INTEGER(unsigned long long)
static inline int atomicSub(int *p, int v)
{
    return atomicAdd(p, -v);
}
static inline unsigned atomicInc(unsigned *p, unsigned limit)
{
    return simt::atomic(p, [limit](unsigned o) { return o >= limit ? 0u : o + 1; });
}
#undef SIMT_ATOMICS
#undef SIMT_ATOMICS_INTEGER

/* ---- integers and bits ---- */

static inline int __popc(uint32_t x)
{
    return __builtin_popcount(x);
}
static inline int __popcll(unsigned long long x)
{
    return __builtin_popcountll(x);
}
static inline int __clz(int x)
{
    return x ? __builtin_clz((unsigned)x) : 32;
}
static inline int __ffs(int x)
{
    return __builtin_ffs(x);
}
static inline unsigned __brev(unsigned x)
{
    unsigned r = 0;
    for (int i = 0; i < 32; i++)
        r |= (x >> i & 1u) << (31 - i);
    return r;
}
static inline unsigned __umulhi(unsigned a, unsigned b)
{
    return (unsigned)((uint64_t)a * b >> 32);
}
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
static inline int __dp4a(int a, int b, int c)
{
    for (int i = 0; i < 32; i += 8)
        c += (int)(int8_t)(a >> i) * (int)(int8_t)(b >> i);
    return c;
}
static inline unsigned __dp4a(unsigned a, unsigned b, unsigned c)
{
    for (int i = 0; i < 32; i += 8)
        c += (a >> i & 255u) * (b >> i & 255u);
    return c;
}
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s)
{
    uint64_t both = (uint64_t)y << 32 | x;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) {
        unsigned pick = s >> 4 * i, byte = (unsigned)(both >> 8 * (pick & 7u)) & 255u;
        if (pick & 8u)
            byte = byte & 128u ? 255u : 0u; /* replicate the sign */
        r |= byte << 8 * i;
    }
    return r;
}
static inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned n)
{
    return (unsigned)((((uint64_t)hi << 32 | lo) << (n & 31u)) >> 32);
}
static inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned n)
{
    return (unsigned)(((uint64_t)hi << 32 | lo) >> (n & 31u));
}
static inline unsigned __vadd4(unsigned a, unsigned b) /* four bytes, each wraps */
{
    return ((a & 0x7f7f7f7fu) + (b & 0x7f7f7f7fu)) ^ ((a ^ b) & 0x80808080u);
}
static inline unsigned __vsub4(unsigned a, unsigned b)
{
    return ((a | 0x80808080u) - (b & 0x7f7f7f7fu)) ^ ((a ^ ~b) & 0x80808080u);
}
static inline unsigned __vsubss4(unsigned a, unsigned b) /* signed, saturating */
{
    unsigned r = 0;
    for (int i = 0; i < 32; i += 8) {
        int d = (int)(int8_t)(a >> i) - (int)(int8_t)(b >> i);
        d = d < -128 ? -128 : d > 127 ? 127 : d;
        r |= ((unsigned)d & 255u) << i;
    }
    return r;
}

#define SIMT_MINMAX(T)                                                                             \
    static inline T min(T a, T b)                                                                  \
    {                                                                                              \
        return b < a ? b : a;                                                                      \
    }                                                                                              \
    static inline T max(T a, T b)                                                                  \
    {                                                                                              \
        return a < b ? b : a;                                                                      \
    }
SIMT_MINMAX(int)
SIMT_MINMAX(unsigned)
SIMT_MINMAX(long long)
SIMT_MINMAX(unsigned long long)
SIMT_MINMAX(long)
SIMT_MINMAX(unsigned long)
#undef SIMT_MINMAX
static inline float min(float a, float b)
{
    return fminf(a, b);
}
static inline float max(float a, float b)
{
    return fmaxf(a, b);
}

/* ---- floats ---- */

template <class To, class From> static inline To simt_bits(From v)
{
    static_assert(sizeof(To) == sizeof(From), "same size");
    To r;
    memcpy(&r, &v, sizeof r);
    return r;
}
static inline unsigned __float_as_uint(float f)
{
    return simt_bits<unsigned>(f);
}
static inline int __float_as_int(float f)
{
    return simt_bits<int>(f);
}
static inline float __uint_as_float(unsigned u)
{
    return simt_bits<float>(u);
}
static inline float __int_as_float(int i)
{
    return simt_bits<float>(i);
}
static inline int __float2int_rn(float f)
{
    return (int)rintf(f);
}
static inline int __float2int_rz(float f)
{
    return (int)f;
}
static inline float __int2float_rn(int i)
{
    return (float)i;
}
static inline float __uint2float_rn(unsigned u)
{
    return (float)u;
}
static inline float __fmaf_rn(float a, float b, float c)
{
    return fmaf(a, b, c);
}
static inline float __fmul_rn(float a, float b)
{
    return a * b;
}
static inline float __fadd_rn(float a, float b)
{
    return a + b;
}
static inline float __fsub_rn(float a, float b)
{
    return a - b;
}
static inline float __fdiv_rn(float a, float b)
{
    return a / b;
}
static inline float __frcp_rn(float a)
{
    return 1.0f / a;
}
static inline float __fsqrt_rn(float a)
{
    return sqrtf(a);
}
static inline float rsqrtf(float a)
{
    return 1.0f / sqrtf(a);
}
#define __expf(a) expf(a) /* libc's headers have functions of these names already */
#define __logf(a) logf(a)
static inline float __fdividef(float a, float b)
{
    return a / b;
}
static inline float __saturatef(float a)
{
    return a < 0.0f ? 0.0f : a > 1.0f ? 1.0f : a == a ? a : 0.0f;
}
template <class T> static inline T __ldg(const T *p)
{
    return *p;
}
template <class T> static inline T __ldcg(const T *p)
{
    return *p;
}
template <class T> static inline T __ldcs(const T *p)
{
    return *p;
}
template <class T> static inline void __stcs(T *p, T v)
{
    *p = v;
}
static inline void sincospif(float x, float *s, float *c)
{
    double a = 3.14159265358979323846 * (double)x;
    *s = (float)sin(a);
    *c = (float)cos(a);
}
