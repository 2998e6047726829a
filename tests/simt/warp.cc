/* warp.cc: what the lanes of a warp do together: shuffles, votes, tensor-core products, ldmatrix; and cp.async, which a
 * thread does alone.
 *
 * Tensor-core arithmetic: products of halves are exact in f32 and are added in ascending k to the f32 accumulator;
 * hardware keeps some more bits inside a product of 16, so the two agree to f32 rounding, not to the bit. int8 is exact. */
#include <stdlib.h>
#include "exec.h"
#include "race.h"

namespace simt
{

/* ---- order and exchange ---- */

void warp_sync(uint32_t mask, place at)
{
    static const collective op = {"__syncwarp", [](void **, uint32_t m) { race_warp_sync(m); }};
    collect(op, mask, nullptr, at);
}

struct shuffle_arg {
    uint64_t v, ret;
    int src;
};

static void shuffle_finish(void **args, uint32_t mask)
{
    for (int i = 0; i < LANES; i++) {
        if (!(mask >> i & 1u))
            continue;
        shuffle_arg *a = (shuffle_arg *)args[i];
        if (!(mask >> a->src & 1u))
            report("lane missing from a mask",
                   "lane %d shuffles from lane %d, which mask %08x lacks", i, a->src, mask);
        a->ret = ((shuffle_arg *)args[a->src])->v;
    }
}

uint64_t warp_shuffle(enum shuffle how, uint32_t mask, uint64_t v, int arg, int width, place at)
{
    static const collective ops[] = {{"__shfl_sync", shuffle_finish},
                                     {"__shfl_xor_sync", shuffle_finish},
                                     {"__shfl_up_sync", shuffle_finish},
                                     {"__shfl_down_sync", shuffle_finish}};
    if (width < 1 || width > LANES || (width & (width - 1)))
        report("bad argument", "a shuffle of width %d", width);
    int lane = w.cur->lane, first = lane & ~(width - 1), last = first + width - 1, src = lane;
    if (how == SHUFFLE_IDX)
        src = first | (arg & (width - 1));
    else if (how == SHUFFLE_XOR)
        src = lane ^ arg;
    else
        src = how == SHUFFLE_UP ? lane - arg : lane + arg;
    if (src < (how == SHUFFLE_UP ? first : 0) || src > last)
        src = lane; /* past the segment's end: a lane keeps its own value */
    shuffle_arg a = {v, 0, src};
    collect(ops[how], mask, &a, at);
    return a.ret;
}

struct vote_arg {
    bool p;
    uint32_t ret;
};

static void vote_finish(void **args, uint32_t mask)
{
    uint32_t set = 0;
    for (int i = 0; i < LANES; i++)
        if (mask >> i & 1u)
            set |= (uint32_t)((vote_arg *)args[i])->p << i;
    for (int i = 0; i < LANES; i++)
        if (mask >> i & 1u)
            ((vote_arg *)args[i])->ret = set;
}

uint32_t warp_vote(enum vote how, uint32_t mask, int predicate, place at)
{
    static const collective ops[] = {{"__ballot_sync", vote_finish},
                                     {"__any_sync", vote_finish},
                                     {"__all_sync", vote_finish}};
    vote_arg a = {predicate != 0, 0};
    collect(ops[how], mask, &a, at);
    if (how == WARP_BALLOT)
        return a.ret;
    return how == WARP_ANY ? a.ret != 0 : a.ret == mask;
}

struct reduce_arg {
    int64_t v;
};

template <class F> static void reduce_with(void **args, uint32_t mask, F join)
{
    bool first = true;
    int64_t r = 0;
    for (int i = 0; i < LANES; i++) {
        if (!(mask >> i & 1u))
            continue;
        int64_t v = ((reduce_arg *)args[i])->v;
        r = first ? v : join(r, v);
        first = false;
    }
    for (int i = 0; i < LANES; i++)
        if (mask >> i & 1u)
            ((reduce_arg *)args[i])->v = r;
}

int64_t warp_reduce(enum reduce how, uint32_t mask, int64_t v, place at)
{
    typedef int64_t I;
    static const collective ops[] = {
        /* as enum reduce */
        {"__reduce_add_sync",
         [](void **a, uint32_t m) { reduce_with(a, m, [](I x, I y) { return x + y; }); }},
        {"__reduce_min_sync",
         [](void **a, uint32_t m) { reduce_with(a, m, [](I x, I y) { return x < y ? x : y; }); }},
        {"__reduce_max_sync",
         [](void **a, uint32_t m) { reduce_with(a, m, [](I x, I y) { return x > y ? x : y; }); }},
        {"__reduce_and_sync",
         [](void **a, uint32_t m) { reduce_with(a, m, [](I x, I y) { return x & y; }); }},
        {"__reduce_or_sync",
         [](void **a, uint32_t m) { reduce_with(a, m, [](I x, I y) { return x | y; }); }},
        {"__reduce_xor_sync",
         [](void **a, uint32_t m) { reduce_with(a, m, [](I x, I y) { return x ^ y; }); }},
    };
    reduce_arg a = {v};
    collect(ops[how], mask, &a, at);
    return a.v;
}

struct match_arg {
    uint64_t v;
    uint32_t ret;
};

uint32_t warp_match_any(uint32_t mask, uint64_t v, place at)
{
    static const collective op = {"__match_any_sync", [](void **args, uint32_t m) {
                                      for (int i = 0; i < LANES; i++)
                                          for (int j = 0; j < LANES; j++)
                                              if ((m >> i & 1u) && (m >> j & 1u) &&
                                                  ((match_arg *)args[i])->v ==
                                                      ((match_arg *)args[j])->v)
                                                  ((match_arg *)args[i])->ret |= 1u << j;
                                  }};
    match_arg a = {v, 0};
    collect(op, mask, &a, at);
    return a.ret;
}

/* ---- tensor cores ---- */

struct mma_arg {
    void *d; /* float[4] or int[4] */
    const uint32_t *a, *b;
};

static float half_value(uint32_t bits)
{
    return __half2float(__half{(uint16_t)bits});
}
static float bf16_value(uint32_t bits) /* the upper half of a float */
{
    return __uint_as_float(bits << 16);
}

/* Lane l holds pair t of fragment row or column g, in the layouts of port.cuh. VALUE: what 16 bits are. */
template <int K, float (*VALUE)(uint32_t bits)> static void mma_half_finish(void **args, uint32_t)
{
    float A[16][K], B[K][8], D[16][8];
    for (int l = 0; l < LANES; l++) {
        const mma_arg *x = (const mma_arg *)args[l];
        int g = l >> 2, t = (l & 3) * 2;
        for (int h = 0; h < 2; h++) {
            for (int k = 0; k < K / 8; k++) {
                A[g][8 * k + t + h] = VALUE(x->a[2 * k] >> 16 * h & 0xffffu);
                A[g + 8][8 * k + t + h] = VALUE(x->a[2 * k + 1] >> 16 * h & 0xffffu);
                B[8 * k + t + h][g] = VALUE(x->b[k] >> 16 * h & 0xffffu);
            }
            D[g][t + h] = ((const float *)x->d)[h];
            D[g + 8][t + h] = ((const float *)x->d)[2 + h];
        }
    }
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < K; k++)
            for (int j = 0; j < 8; j++)
                D[i][j] += A[i][k] * B[k][j];
    for (int l = 0; l < LANES; l++) {
        int g = l >> 2, t = (l & 3) * 2;
        float *d = (float *)((mma_arg *)args[l])->d;
        d[0] = D[g][t];
        d[1] = D[g][t + 1];
        d[2] = D[g + 8][t];
        d[3] = D[g + 8][t + 1];
    }
}

void mma_f16(float *d, const uint32_t *a, const uint32_t *b, place at)
{
    static const collective op = {"mma.m16n8k16.f16", mma_half_finish<16, half_value>};
    mma_arg x = {d, a, b};
    collect(op, 0xffffffffu, &x, at);
}

void mma_bf16(float *d, const uint32_t *a, const uint32_t *b, place at)
{
    static const collective op = {"mma.m16n8k16.bf16", mma_half_finish<16, bf16_value>};
    mma_arg x = {d, a, b};
    collect(op, 0xffffffffu, &x, at);
}

void mma_f16_k8(float *d, const uint32_t *a, const uint32_t *b, place at)
{
    static const collective op = {"mma.m16n8k8.f16", mma_half_finish<8, half_value>};
    mma_arg x = {d, a, b};
    collect(op, 0xffffffffu, &x, at);
}

static void mma_s8_finish(void **args, uint32_t)
{
    int32_t A[16][32], B[8][32]; /* B by columns: sums run along contiguous k */
    for (int l = 0; l < LANES; l++) {
        const mma_arg *x = (const mma_arg *)args[l];
        int g = l >> 2, k0 = (l & 3) * 4;
        for (int i = 0; i < 4; i++) {
            A[g][k0 + i] = (int8_t)(x->a[0] >> 8 * i);
            A[g + 8][k0 + i] = (int8_t)(x->a[1] >> 8 * i);
            A[g][k0 + 16 + i] = (int8_t)(x->a[2] >> 8 * i);
            A[g + 8][k0 + 16 + i] = (int8_t)(x->a[3] >> 8 * i);
            B[g][k0 + i] = (int8_t)(x->b[0] >> 8 * i);
            B[g][k0 + 16 + i] = (int8_t)(x->b[1] >> 8 * i);
        }
    }
    for (int l = 0; l < LANES; l++) {
        int *d = (int *)((mma_arg *)args[l])->d;
        for (int e = 0; e < 4; e++) {
            const int32_t *row = A[(l >> 2) + 8 * (e >> 1)], *col = B[(l & 3) * 2 + (e & 1)];
            int32_t sum = 0;
            for (int k = 0; k < 32; k++)
                sum += row[k] * col[k];
            d[e] = (int)((uint32_t)d[e] + (uint32_t)sum); /* wraps, as the instruction does */
        }
    }
}

void mma_s8(int *d, const uint32_t *a, const uint32_t *b, place at)
{
    static const collective op = {"mma.m16n8k32.s8", mma_s8_finish};
    mma_arg x = {d, a, b};
    collect(op, 0xffffffffu, &x, at);
}

/* ---- ldmatrix ---- */

struct ldsm_arg {
    uint32_t *r;
    const void *row;
};

template <int N, bool TRANS> static void ldsm_finish(void **args, uint32_t)
{
    const uint16_t *rows[8 * N];
    for (int i = 0; i < 8 * N; i++)
        rows[i] = (const uint16_t *)((ldsm_arg *)args[i])->row;
    for (int l = 0; l < LANES; l++) {
        int g = l >> 2, t = (l & 3) * 2;
        for (int m = 0; m < N; m++) {
            uint16_t lo = TRANS ? rows[8 * m + t][g] : rows[8 * m + g][t];
            uint16_t hi = TRANS ? rows[8 * m + t + 1][g] : rows[8 * m + g][t + 1];
            ((ldsm_arg *)args[l])->r[m] = lo | (uint32_t)hi << 16;
        }
    }
}

template <int N, bool TRANS> static void ldsm(uint32_t *r, const void *row, place at)
{
    static const collective op = {N == 4  ? TRANS ? "ldmatrix.x4.trans" : "ldmatrix.x4"
                                  : TRANS ? "ldmatrix.x2.trans"
                                          : "ldmatrix.x2",
                                  ldsm_finish<N, TRANS>};
    w.cur->at = at;
    if (w.cur->lane < 8 * N) {
        check_shared(row, 16, op.name);
        race_access(row, 16, ACCESS_READ);
    }
    ldsm_arg x = {r, row};
    collect(op, 0xffffffffu, &x, at);
}

void ldsm4(uint32_t *r, const void *row, place at)
{
    ldsm<4, false>(r, row, at);
}
void ldsm4t(uint32_t *r, const void *row, place at)
{
    ldsm<4, true>(r, row, at);
}
void ldsm2(uint32_t *r, const void *row, place at)
{
    ldsm<2, false>(r, row, at);
}
void ldsm2t(uint32_t *r, const void *row, place at)
{
    ldsm<2, true>(r, row, at);
}

/* ---- cp.async ---- */

/* The target is NaN from the issue on; the bytes arrive when the thread waits for the group, and not before: whoever
 * reads too early, or waits for one group too few, reads NaN. The source is read then, too. */
void cpa_bytes(void *dst, const void *src, unsigned bytes, bool ok, place at)
{
    thread *t = w.cur;
    t->at = at;
    check_shared(dst, bytes, "cp.async to");
    check_access(src, ok ? bytes : 0, bytes, "cp.async from");
    race_access(dst, bytes, ACCESS_WRITE);
    if (ok)
        race_access(src, bytes, ACCESS_READ);
    for (const async_copy &c : t->copies)
        if ((const char *)dst < (char *)c.dst + c.bytes && (char *)c.dst < (char *)dst + bytes)
            report("cp.async in flight",
                   "a second copy to shared byte %td before the first was "
                   "waited for",
                   (unsigned char *)dst - w.smem);
    memset(dst, 0xff, bytes);
    t->copies.push_back(async_copy{dst, ok ? src : nullptr, t->group, bytes});
}

void cpa_commit()
{
    w.cur->group++;
}

void cpa_wait_for(int newest)
{
    thread *t = w.cur;
    size_t kept = 0;
    for (const async_copy &c : t->copies) {
        if (c.group >= t->group - newest) {
            t->copies[kept++] = c;
            continue;
        }
        race_access(c.dst, c.bytes, ACCESS_WRITE);
        if (c.src)
            memcpy(c.dst, c.src, c.bytes);
        else
            memset(c.dst, 0, c.bytes);
    }
    t->copies.resize(kept);
}

} // namespace simt
