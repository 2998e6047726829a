/* attention_half.cuh: the steps of attention over halves on tensor cores, for a warp with MT times 16 queries.
 *
 *      S = Q K^T                  f32 sums
 *      online softmax in base 2   P in halves
 *      O = O * c + P V
 *
 * Rows in shared memory are padded by 16 bytes: eight rows of a fragment lie in different banks. Head sizes between the
 * compiled ones run on the next larger one, the rest zeros. Order of sums: keys ascending in steps of 16 (inside the
 * tensor core's own order). Of each 16 queries a lane has two, g = lane / 4 and g + 8. */
#ifndef BACKCAST_ATTENTION_HALF_CUH
#define BACKCAST_ATTENTION_HALF_CUH
#include "attention.cuh"

/* Blocks of a multiprocessor that registers must suffice for. Before sm_80 addresses of copies take more of them. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define BLOCKS_AT_ONCE(n) 1
#else
#define BLOCKS_AT_ONCE(n) (n)
#endif
/* Whether blocks of ATTN_QUERIES_PAIRED are launched. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 10 * ATTN_PAIRED_SM
#define PAIRED_RUNS false
#else
#define PAIRED_RUNS true
#endif

/* Lanes that copy one row of D halves, 16 bytes each: a power of two. */
template <int D> struct row_lanes {
    static constexpr int N = D <= 16 ? 2 : D <= 32 ? 4 : D <= 64 ? 8 : D <= 128 ? 16 : 32;
};

/* Byte from a run's start where the key or value of a slot lies. WIDE: of bf16 or q8_0 (attention_wide.cuh), else of halves. */
template <bool WIDE> DEV uint64_t key_offset(const struct dev_seq &s, uint32_t slot)
{
    uint32_t bytes = WIDE ? kv_line_bytes(s.type, s.head_dim) : s.head_dim * 2;
    return (slot / KN_PAGE_ROWS) * (uint64_t)s.stride + slot % KN_PAGE_ROWS * bytes;
}

/* Four neighbouring values of a row of d as halves; zeros outside. */
DEV uint2 query_four(const float *row, uint32_t col, uint32_t d)
{
    if (col >= d)
        return make_uint2(0, 0);
    float4 v = *(const float4 *)(row + col);
    return make_uint2(pack2(v.x, v.y), pack2(v.z, v.w));
}

/* M queries as halves to shared memory, by THREADS threads; zeros past the last one. */
template <int D, int M, int THREADS>
DEV void queries_load(const struct attn_args &a, const struct attn_work &w, half_t *qs)
{
#pragma unroll 8
    for (uint32_t i = threadIdx.x; i < M * (D / 4); i += THREADS) {
        uint32_t m = i / (D / 4), col = i % (D / 4) * 4;
        *(uint2 *)(qs + m * (D + 8) + col) =
            m < w.n ? query_four(a.q + attn_at(a, w, m) * a.d, col, a.d) : make_uint2(0, 0);
    }
}

/* Step k of 16 queries in shared memory. */
template <int D> DEV void query_fragment(uint32_t *to, const half_t *qs, int k)
{
    int lane = lane_id();
    ldsm4(to, qs + (lane & 15) * (D + 8) + k * 16 + (lane >> 4) * 8);
}

/* sc = Q K^T for BN keys. Queries are in registers [D / 16][4], or, with MT > 1 or large heads, in shared memory. */
template <int D, int MT, int BN, bool Q_SHARED>
DEV void scores_make(const uint32_t (*q)[4], const half_t *qs, const half_t *ks,
                     float (*sc)[BN / 8][4])
{
    int lane = lane_id();
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int n = 0; n < BN / 8; n++)
            sc[mt][n][0] = sc[mt][n][1] = sc[mt][n][2] = sc[mt][n][3] = 0.0f;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t a[MT][4];
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
            if (Q_SHARED)
                query_fragment<D>(a[mt], qs + mt * 16 * (D + 8), k);
            else
                for (int i = 0; i < 4; i++)
                    a[mt][i] = q[Q_SHARED ? 0 : k][i];
#pragma unroll
        for (int n = 0; n < BN / 16; n++) {
            uint32_t b[4];
            ldsm4(b, ks + (n * 16 + (lane & 7) + (lane >> 4) * 8) * (D + 8) + k * 16 +
                         (lane >> 3 & 1) * 8);
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                mma_f16(sc[mt][2 * n], a[mt], b);
                mma_f16(sc[mt][2 * n + 1], a[mt], b + 2);
            }
        }
    }
}

/* What lies outside the ranges of the lane's two queries goes. */
template <int BN> DEV void scores_mask(uint32_t start, uint2 range0, uint2 range1, float (*sc)[4])
{
#pragma unroll
    for (int n = 0; n < BN / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t j = start + n * 8 + 2 * (lane_id() & 3) + (i & 1);
            uint2 r = i < 2 ? range0 : range1;
            if (j < r.x || j >= r.y)
                sc[n][i] = -INFINITY;
        }
}

/* Scores of 16 queries, times the lane's two queries' scales, to weights; PACK: in halves, as values_add takes them. The maximum
 * m and the lane's share of the weight l carry on, o is scaled to the new maximum; once that stands, nothing is. */
template <int D, int BN, bool PACK>
DEV void softmax_step(const float *scale, float (*sc)[4], float *m, float *l, float (*o)[4],
                      uint32_t (*p)[4])
{
    float c[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = -INFINITY, sum = 0.0f;
#pragma unroll
        for (int n = 0; n < BN / 8; n++)
            top = fmaxf(top, fmaxf(sc[n][2 * r], sc[n][2 * r + 1]));
        top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 1));
        top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 2));
        top = fmaxf(m[r], top * scale[r]);
        float base = top == -INFINITY ? 0.0f : top; /* a row that has seen nothing yet */
        c[r] = exp2_fast(m[r] - base);
        m[r] = top;
#pragma unroll
        for (int n = 0; n < BN / 8; n++) {
            sc[n][2 * r] = exp2_fast(fmaf(sc[n][2 * r], scale[r], -base));
            sc[n][2 * r + 1] = exp2_fast(fmaf(sc[n][2 * r + 1], scale[r], -base));
            sum += sc[n][2 * r] + sc[n][2 * r + 1];
        }
        l[r] = fmaf(l[r], c[r], sum);
    }
#pragma unroll
    for (int k = 0; k < (PACK ? BN / 16 : 0); k++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *pair = &sc[2 * k + (i >> 1)][2 * (i & 1)];
            p[k][i] = pack2(pair[0], pair[1]);
        }
    if (!__any_sync(FULL_WARP, c[0] != 1.0f || c[1] != 1.0f))
        return;
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            o[n][i] *= c[i >> 1];
}

/* o += P V. */
template <int D, int MT, int BN>
DEV void values_add(const uint32_t (*p)[BN / 16][4], const half_t *vs, float (*o)[D / 8][4])
{
    int lane = lane_id();
#pragma unroll
    for (int k = 0; k < BN / 16; k++)
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            uint32_t b[4];
            ldsm4t(b, vs + (k * 16 + (lane & 15)) * (D + 8) + n * 16 + (lane >> 4) * 8);
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                mma_f16(o[mt][2 * n], p[mt][k], b);
                mma_f16(o[mt][2 * n + 1], p[mt][k], b + 2);
            }
        }
}

/* The weights of a row's four lanes together. */
DEV float quad_sum(float v)
{
    v += __shfl_xor_sync(FULL_WARP, v, 1);
    return v + __shfl_xor_sync(FULL_WARP, v, 2);
}
#endif
