/* attention.cuh: what the attention kernels share: tiles of queries, ranges, partial results.
 *
 * A block takes one tile of rows of one sequence and one KV head: its queries are the rows times the heads of the group,
 *
 *      query m = (row m / heads, head m % heads)         q of a row's group lies together: [row][n_heads][d]
 *
 * so that keys and values are fetched once for the whole group, in prefill, decode and scoring alike. What a row sees is
 * [lo, hi): causal, counter-causal or all, the kernels do not know; only tiles of keys that a range cuts are masked.
 *
 * Long contexts with few blocks are split by cache index: split s sees [s * len, (s + 1) * len). Each split leaves
 * unnormalised sums with their maximum and weight (base 2 in halves' kernel, base e in f32's), which attn_merge puts
 * together in ascending order. */
#ifndef BACKCAST_ATTENTION_CUH
#define BACKCAST_ATTENTION_CUH
#include "kv.cuh"

struct attn_args {
    struct dev_batch b;
    const struct dev_tile *tiles; /* of one class */
    const float *q;
    float *out;
    float *acc;  /* [row][head][split][d], and */
    float2 *top; /* [row][head][split]: maximum, weight; NULL: not split */
    uint32_t layer, n_heads, group, d;
    uint32_t chunks;    /* parts of a group that is larger than a tile */
    uint32_t split_len; /* cache indices of a split */
    float scale;        /* times log2(e) for halves */
};

/* What a block works on. */
struct attn_work {
    struct dev_tile tile;
    uint32_t kv_head, first_head, heads, n; /* n queries */
};

DEV struct attn_work attn_work_of(const struct attn_args &a, uint32_t queries)
{
    struct attn_work w;
    w.tile = a.tiles[blockIdx.x];
    w.kv_head = blockIdx.y / a.chunks;
    uint32_t skip = blockIdx.y % a.chunks * queries;
    w.first_head = w.kv_head * a.group + skip;
    w.heads = min(a.group - skip, queries);
    w.n = w.tile.n_rows * w.heads;
    return w;
}

/* Row and head of query m. */
DEV uint32_t attn_row(const struct attn_work &w, uint32_t m)
{
    return w.tile.row + m / w.heads;
}
DEV uint32_t attn_head(const struct attn_work &w, uint32_t m)
{
    return w.first_head + m % w.heads;
}
DEV size_t attn_at(const struct attn_args &a, const struct attn_work &w, uint32_t m)
{
    return (size_t)attn_row(w, m) * a.n_heads + attn_head(w, m);
}

/* The range of query m inside this block's split; lo == hi == 0 if it sees nothing there. */
DEV uint2 attn_range(const struct attn_args &a, const struct attn_work &w, uint32_t m)
{
    if (m >= w.n)
        return make_uint2(0, 0);
    uint32_t row = attn_row(w, m), start = blockIdx.z * a.split_len;
    uint32_t lo = max(a.b.lo[row], start), hi = min(a.b.hi[row], start + a.split_len);
    return lo < hi ? make_uint2(lo, hi) : make_uint2(0, 0);
}

/* Of all queries that see something: what any of them sees, and what all of them see. */
struct attn_span {
    uint32_t lo, hi, all_lo, all_hi;
};

DEV struct attn_span attn_span_of(const uint2 *ranges, uint32_t n)
{
    struct attn_span s = {0xffffffffu, 0, 0, 0xffffffffu};
    for (uint32_t i = 0; i < n; i++) {
        uint2 r = ranges[i];
        if (r.x == r.y)
            continue;
        s.lo = min(s.lo, r.x);
        s.hi = max(s.hi, r.y);
        s.all_lo = max(s.all_lo, r.x);
        s.all_hi = min(s.all_hi, r.y);
    }
    return s;
}

/* attention.cu, attention_f32.cu */
void attn_launch_f32(struct cuda *c, const struct attn_args *a, dim3 grid);
int attn_open_f32(struct cuda *c);
#endif
