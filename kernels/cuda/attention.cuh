/* attention.cuh: what the attention kernels share: tiles of queries, ranges, partial results.
 *
 * A block takes one tile of rows of one sequence and one KV head: its queries are the rows times the heads of the group,
 *
 *      query m = (row m / heads, head m % heads)         q of a row's group lies together: [row][n_heads][d]
 *
 * so that keys and values are fetched once for the whole group, in prefill, decode and scoring alike. What a row sees is
 * [lo, hi): causal, counter-causal or all, the kernels do not know; only keys that a range cuts off are masked.
 *
 * Long contexts with few blocks are split: split s of a tile sees split_len indices from tile.lo + s * split_len on. Each
 * leaves unnormalised sums with their maximum and weight, and the block that ends last puts them together:
 *
 *      split 0 --> acc, top --.
 *      split 1 --> acc, top --+-- counts[tile and head] says who is last --> out, in ascending order of splits
 *      split 2 --> acc, top --'   (and leaves the count at 0 for the next launch)
 *
 * so sums do not depend on which one that is. Exponents are in base 2 in the kernels of halves, in base e in f32's. */
#ifndef BACKCAST_ATTENTION_CUH
#define BACKCAST_ATTENTION_CUH
#include "kv.cuh"

struct attn_args {
    struct dev_batch b;
    const struct dev_tile *tiles; /* of one class */
    const float *q;
    float *out;
    uint16_t *halves; /* NULL, or where the result goes as halves, divided by 2, in place of out */
    float *acc;       /* [row][head][split][d], and */
    float2 *top;      /* [row][head][split]: maximum, weight */
    uint32_t *counts; /* of a tile's splits that are done, for each block along x */
    uint32_t layer, n_heads, group, d;
    uint32_t chunks,
        parts; /* of a group that is larger than a tile; KV heads times that: blocks of a tile */
    uint32_t split_len, splits; /* cache indices of a split; the most splits of a tile */
    float scale;                /* times log2(e) for halves */
};

/* What a block works on: n queries over cache indices lo .. hi, a split's or, whole, the tile's. */
struct attn_work {
    struct dev_tile tile;
    uint32_t kv_head, first_head, heads, n;
    uint32_t lo, hi;
    uint32_t inverse; /* of heads, times 2^20: m / heads of less than 1024 queries */
    bool whole, idle; /* idle: a split that its tile does not have */
};

DEV struct attn_work attn_work_of(const struct attn_args &a, uint32_t queries)
{
    struct attn_work w;
    uint32_t part = blockIdx.x % a.parts, skip = 0;
    w.tile = a.tiles[blockIdx.x / a.parts];
    w.kv_head = part;
    if (a.chunks > 1) {
        w.kv_head = part / a.chunks;
        skip = part % a.chunks * queries;
    }
    w.first_head = w.kv_head * a.group + skip;
    w.heads = min(a.group - skip, queries);
    w.n = w.tile.n_rows * w.heads;
    w.inverse = (1u << 20) / w.heads + 1;
    w.lo = min(w.tile.lo + blockIdx.y * a.split_len, w.tile.hi);
    w.hi = min(w.lo + a.split_len, w.tile.hi);
    w.whole = w.tile.hi - w.tile.lo <= a.split_len;
    w.idle = w.lo == w.hi && blockIdx.y > 0;
    return w;
}

/* Row and head of query m. */
DEV uint32_t attn_row(const struct attn_work &w, uint32_t m)
{
    return w.tile.row + (m * w.inverse >> 20);
}
DEV size_t attn_at(const struct attn_args &a, const struct attn_work &w, uint32_t m)
{
    uint32_t row = m * w.inverse >> 20;
    return (size_t)(w.tile.row + row) * a.n_heads + w.first_head + m - row * w.heads;
}

/* What query m sees; lo == hi == 0 if that is nothing. */
DEV uint2 attn_range(const struct attn_args &a, const struct attn_work &w, uint32_t m)
{
    if (m >= w.n)
        return make_uint2(0, 0);
    uint32_t row = attn_row(w, m), lo = a.b.lo[row], hi = a.b.hi[row];
    return lo < hi ? make_uint2(lo, hi) : make_uint2(0, 0);
}

/* N neighbouring values of the result: value `at` and those behind it. */
template <int N> DEV void result_store(const struct attn_args &a, size_t at, const float *v)
{
    if constexpr (N == 4) {
        if (a.halves)
            *(uint2 *)(a.halves + at) =
                make_uint2(pack2(v[0] * 0.5f, v[1] * 0.5f), pack2(v[2] * 0.5f, v[3] * 0.5f));
        else
            *(float4 *)(a.out + at) = make_float4(v[0], v[1], v[2], v[3]);
    } else if constexpr (N == 2) {
        if (a.halves)
            *(uint32_t *)(a.halves + at) = pack2(v[0] * 0.5f, v[1] * 0.5f);
        else
            *(float2 *)(a.out + at) = make_float2(v[0], v[1]);
    } else {
        for (int i = 0; i < N; i++)
            a.out[at + i] = v[i];
    }
}

/* Where the results of query `at` (attn_at) go: the split's sums or the result. */
DEV float *attn_target(const struct attn_args &a, const struct attn_work &w, size_t at)
{
    return w.whole ? a.out + at * a.d : a.acc + (at * a.splits + blockIdx.y) * a.d;
}

/* W neighbouring floats that another block wrote. */
template <int W> DEV void floats_read(const float *from, float *to)
{
    if constexpr (W == 4)
        *(float4 *)to = __ldcg((const float4 *)from);
    else
        for (int i = 0; i < W; i++)
            to[i] = __ldcg(from + i);
}

/* One query's splits together, by a warp; lanes are dims, W at a time. */
template <int W, bool BASE2>
DEV void query_merge(const struct attn_args &a, uint32_t splits, size_t at)
{
    const float2 *tops = a.top + at * a.splits;
    uint32_t lane = (uint32_t)lane_id();
    float top = -INFINITY, weight = 0.0f;
    for (uint32_t i = lane; i < splits; i += 32)
        top = fmaxf(top, __ldcg(tops + i).x);
    top = warp_max(top);
    for (uint32_t x = 0; x < a.d; x += 32 * W) {
        uint32_t col = x + lane * W;
        float sum[W] = {};
        weight = 0.0f;
        for (uint32_t first = 0; first < splits; first += 32) {
            uint32_t n = min(32u, splits - first);
            float factor = 0.0f;
            if (lane < n) {
                float2 v = __ldcg(tops + first + lane);
                if (v.y > 0.0f)
                    factor = BASE2 ? exp2_fast(v.x - top) : expf(v.x - top);
                weight += v.y * factor;
            }
#pragma unroll 8
            for (uint32_t i = 0; i < n; i++) {
                float v[W] = {}, f = __shfl_sync(FULL_WARP, factor, (int)i);
                if (col < a.d)
                    floats_read<W>(a.acc + (at * a.splits + first + i) * a.d + col, v);
                for (int k = 0; k < W; k++)
                    sum[k] = fmaf(f, v[k], sum[k]);
            }
        }
        weight = warp_sum(weight);
        float inverse = weight > 0.0f ? 1.0f / weight : 0.0f;
        for (int k = 0; k < W; k++)
            sum[k] *= inverse;
        if (col < a.d)
            result_store<W>(a, at * a.d + col, sum);
    }
}

/* The end of a block of WARPS warps that has written its sums: if it is the tile's last one, all are put together.
 * flag: a word of shared memory that nobody uses any more. */
template <int WARPS, int W, bool BASE2>
DEV void splits_merge(const struct attn_args &a, const struct attn_work &w, uint32_t *flag)
{
    if (w.whole)
        return;
    uint32_t splits = (w.tile.hi - w.tile.lo + a.split_len - 1) / a.split_len;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        bool last = atomicAdd(a.counts + blockIdx.x, 1u) + 1 == splits;
        if (last)
            atomicExch(a.counts + blockIdx.x, 0u);
        __threadfence();
        *flag = last;
    }
    __syncthreads();
    if (!*flag)
        return;
    for (uint32_t m = (uint32_t)warp_id(); m < w.n; m += WARPS)
        query_merge<W, BASE2>(a, splits, attn_at(a, w, m));
}

/* F(D) for the smallest compiled size that holds d. */
#define HEAD_SWITCH(d, F)                                                                          \
    if ((d) <= 16) {                                                                               \
        F(16);                                                                                     \
    } else if ((d) <= 32) {                                                                        \
        F(32);                                                                                     \
    } else if ((d) <= 64) {                                                                        \
        F(64);                                                                                     \
    } else if ((d) <= 80) {                                                                        \
        F(80);                                                                                     \
    } else if ((d) <= 96) {                                                                        \
        F(96);                                                                                     \
    } else if ((d) <= 128) {                                                                       \
        F(128);                                                                                    \
    } else {                                                                                       \
        F(256);                                                                                    \
    }

/* attention_few.cu, attention_many.cu, attention_f32.cu: a launch of the grid, and what there is to do at open. */
void attn_launch_few(struct cuda *c, const struct attn_args *a, dim3 grid, bool wide);
void attn_launch_many(struct cuda *c, const struct attn_args *a, dim3 grid, uint32_t queries,
                      bool wide);
void attn_launch_f32(struct cuda *c, const struct attn_args *a, dim3 grid);
int attn_open_few(struct cuda *c);
int attn_open_many(struct cuda *c);
int attn_open_f32(struct cuda *c);
#endif
