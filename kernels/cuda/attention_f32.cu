/* attention_f32.cu: attention in f32 throughout: pools of f32, and of any type with heads of no multiple of 8. The same tiles,
 * ranges and splits as attention.cu.
 *
 * A block has 16 queries, four a warp, and 32 keys at a time: lanes are keys for the scores (each adds its products in
 * ascending dims), then dims for the values (ascending keys). Keys and values share one buffer; its rows are padded by one
 * float, so that a column lies in 32 banks. Tiles are added in ascending order by
 *
 *      m' = max(m, m_t)    l = l exp(m - m') + sum exp(s - m')    a = a exp(m - m') + sum exp(s - m') v */
#include "attention.cuh"

#define QUERIES 16 /* of a block, as batch.cu has it */
#define WARPS 4
#define PER_WARP 4
#define KEYS 32
#define DIMS (KN_HEAD_DIM_MAX / 32) /* of a lane */

static size_t smem_bytes(uint32_t d)
{
    return (QUERIES * d + KEYS * (d + 1) + QUERIES * KEYS) * sizeof(float) +
           QUERIES * sizeof(uint2);
}

/* Keys or values start .. start + 32 as floats; zeros from end on. */
DEV void rows_fill(const struct dev_seq &s, const uint8_t *run, uint32_t d, uint32_t start,
                   uint32_t end, float *to)
{
    for (uint32_t i = threadIdx.x; i < KEYS * d; i += 128) {
        uint32_t r = i / d, col = i % d, j = start + r;
        float v = 0.0f;
        if (j < end) {
            uint32_t slot = s.slots[j];
            const uint8_t *page = run + (slot / KN_PAGE_ROWS) * s.stride;
            v = kv_value(s.type, page + slot % KN_PAGE_ROWS * kv_line_bytes(s.type, d), col);
        }
        to[r * (d + 1) + col] = v;
    }
}

struct query_state {
    float m, l, acc[DIMS];
};

/* Weights of the lane's key for the warp's queries, into p [PER_WARP][KEYS]. */
DEV void weights_make(const struct attn_args &a, const float *qs, const float *keys,
                      const uint2 *ranges, uint32_t start, struct query_state *st, float *p)
{
    uint32_t lane = (uint32_t)lane_id(), j = start + lane;
    float sc[PER_WARP] = {};
    for (uint32_t i = 0; i < a.d; i++) {
        float k = keys[lane * (a.d + 1) + i];
#pragma unroll
        for (int q = 0; q < PER_WARP; q++)
            sc[q] = fmaf(qs[q * a.d + i], k, sc[q]);
    }
#pragma unroll
    for (int q = 0; q < PER_WARP; q++) {
        float v = j >= ranges[q].x && j < ranges[q].y ? sc[q] * a.scale : -INFINITY;
        float top = fmaxf(st[q].m, warp_max(v));
        float base = top == -INFINITY ? 0.0f : top;
        float c = expf(st[q].m - base);
        v = expf(v - base);
        st[q].m = top;
        st[q].l = st[q].l * c + warp_sum(v);
#pragma unroll
        for (int x = 0; x < DIMS; x++)
            st[q].acc[x] *= c;
        p[q * KEYS + lane] = v;
    }
}

DEV void values_add(const struct attn_args &a, const float *values, const float *p,
                    struct query_state *st)
{
    for (uint32_t k = 0; k < KEYS; k++)
#pragma unroll
        for (int x = 0; x < DIMS; x++) {
            uint32_t col = x * 32 + (uint32_t)lane_id();
            if (col >= a.d)
                break;
            float v = values[k * (a.d + 1) + col];
#pragma unroll
            for (int q = 0; q < PER_WARP; q++)
                st[q].acc[x] = fmaf(p[q * KEYS + k], v, st[q].acc[x]);
        }
}

DEV void query_store(const struct attn_args &a, const struct attn_work &w, uint32_t m,
                     const struct query_state &st)
{
    if (m >= w.n)
        return;
    size_t at = attn_at(a, w, m);
    float *to = attn_target(a, w, at), l = !w.whole || st.l == 0.0f ? 1.0f : st.l;
    if (!w.whole && lane_id() == 0)
        a.top[at * a.splits + blockIdx.y] = make_float2(st.m, st.l);
#pragma unroll
    for (int x = 0; x < DIMS; x++) {
        uint32_t col = x * 32 + (uint32_t)lane_id();
        if (col < a.d)
            to[col] = st.acc[x] / l;
    }
}

__global__ void __launch_bounds__(WARPS * 32, 4) attn_f32(struct attn_args a)
{
    DYN_SMEM(float, qs); /* [QUERIES][d] */
    float *rows = qs + QUERIES * a.d, *ps = rows + KEYS * (a.d + 1);
    uint2 *ranges = (uint2 *)(ps + QUERIES * KEYS);
    early_next();
    const struct attn_work w = attn_work_of(a, QUERIES);
    early_wait();
    if (w.idle)
        return;
    const struct dev_seq s = a.b.seqs[w.tile.seq];
    uint32_t mine = (uint32_t)warp_id() * PER_WARP;
    struct query_state st[PER_WARP];
#pragma unroll
    for (int q = 0; q < PER_WARP; q++) {
        st[q].m = -INFINITY;
        st[q].l = 0.0f;
#pragma unroll
        for (int x = 0; x < DIMS; x++)
            st[q].acc[x] = 0.0f;
    }
    if (threadIdx.x < QUERIES) {
        uint2 r = attn_range(a, w, threadIdx.x);
        ranges[threadIdx.x] = make_uint2(r.x, min(r.y, w.hi));
    }
    for (uint32_t i = threadIdx.x; i < QUERIES * a.d; i += 128)
        qs[i] = i / a.d < w.n ? a.q[attn_at(a, w, i / a.d) * a.d + i % a.d] : 0.0f;
    __syncthreads();
    const uint8_t *k_run = kv_run(s, 0, a.layer, 0, w.kv_head);
    const uint8_t *v_run = kv_run(s, 0, a.layer, 1, w.kv_head);
    for (uint32_t start = w.lo; start < w.hi; start += KEYS) {
        rows_fill(s, k_run, a.d, start, w.hi, rows);
        __syncthreads();
        weights_make(a, qs + mine * a.d, rows, ranges + mine, start, st, ps + mine * KEYS);
        __syncthreads();
        rows_fill(s, v_run, a.d, start, w.hi, rows);
        __syncthreads();
        values_add(a, rows, ps + mine * KEYS, st);
        __syncthreads();
    }
#pragma unroll
    for (int q = 0; q < PER_WARP; q++)
        query_store(a, w, mine + q, st[q]);
    splits_merge<WARPS, 1, false>(a, w, (uint32_t *)ps);
}

void attn_launch_f32(struct cuda *c, const struct attn_args *a, dim3 grid)
{
    KERNEL_EARLY(c, attn_f32, grid, dim3(WARPS * 32), smem_bytes(a->d), *a);
}

int attn_open_f32(struct cuda *c)
{
    return kernel_smem(c, (const void *)attn_f32, smem_bytes(KN_HEAD_DIM_MAX)) ? KN_OK : KN_EDEVICE;
}
