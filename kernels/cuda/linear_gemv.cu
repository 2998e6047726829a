/* linear_gemv.cu: products of one to four rows: bound by the bytes of the weights.
 *
 * A block has four warps. kw of them share a row's blocks of 32 (dealt in turn to their 32 * kw lanes), 4 / kw groups of
 * warps have rows of their own, R at a time, so that a lane has R loads of 16 bytes under way and uses each activation R
 * times. kw follows from cols alone:
 *
 *      cols / 32       1 .. 47     48 .. 95     96 ..
 *      kw              1           2            4
 *
 * Order of a sum: a lane adds its blocks in ascending order (kn_int8.h's fma; float types: ascending chunks of 16 bytes);
 * the 32 lanes by halves (lane i and i ^ 16, i ^ 8 ... 1); the warps in ascending order. It depends on cols alone, not on
 * the number of rows. */
#include "linear.cuh"

#define THREADS 128
#define WARPS 4

static uint32_t warps_along(uint32_t chunks) /* of 16 bytes, or blocks of 32 */
{
    return chunks >= 96 ? 4 : chunks >= 48 ? 2 : 1;
}

uint32_t gemv_pad(uint32_t rows)
{
    return rows == 3 ? 4 : rows;
}

/* Adds the kw warps' sums of R rows x NB and stores them. part: [WARPS][R * NB] of shared memory. */
template <int R, int NB>
DEV void sums_store(const struct jobs &j, uint32_t job, uint32_t o, uint32_t kw, float (*acc)[NB],
                    float *part)
{
    uint32_t warp = (uint32_t)warp_id();
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int b = 0; b < NB; b++) {
            float sum = warp_sum(acc[r][b]);
            if (lane_id() == 0)
                part[warp * (R * NB) + r * NB + b] = sum;
        }
    if (kw > 1)
        __syncthreads();
    else
        __syncwarp();
    uint32_t i = (uint32_t)lane_id();
    if (warp % kw != 0 || i >= R * NB || i % NB >= j.rows || o + i / NB >= j.p[job].rows)
        return;
    float t = 0.0f;
    for (uint32_t k = 0; k < kw; k++)
        t += part[(warp + k) * (R * NB) + i];
    job_store(j, job, i % NB, o + i / NB, t);
}

/* One block of 32 of one matrix row against one row of activations. */
template <class Q>
DEV float block_add(const uint32_t *quads, const float *d, const float *m, const uint4 *x, uint2 xs,
                    float acc)
{
    const uint32_t words[8] = {x[0].x, x[0].y, x[0].z, x[0].w, x[1].x, x[1].y, x[1].z, x[1].w};
    float da = x_scale(xs);
    int sum[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        sum[h] = -Q::ZERO * x_sum(xs, h);
#pragma unroll
        for (int t = 0; t < 4; t++)
            sum[h] = __dp4a((int)quads[2 * t + h], (int)words[4 * h + t], sum[h]);
    }
    int xsum[2] = {x_sum(xs, 0), x_sum(xs, 1)};
    if (Q::N_SUB == 1) {
        sum[0] += sum[1];
        xsum[0] += xsum[1];
    }
#pragma unroll
    for (int h = 0; h < Q::N_SUB; h++) {
        acc = __fmaf_rn(__fmul_rn(d[h], da), (float)sum[h], acc);
        if (Q::MIN)
            acc = __fmaf_rn(m[h], __fmul_rn(da, (float)xsum[h]), acc);
    }
    return acc;
}

template <class Q, int NB, int R>
__global__ void __launch_bounds__(THREADS, 4) gemv_int8(struct jobs j, struct x_int8 x, uint32_t kw)
{
    DYN_SMEM(float, part);
    uint32_t job = job_of(j, blockIdx.x), warp = (uint32_t)warp_id();
    const struct packed p = j.p[job];
    uint32_t o = ((blockIdx.x - j.first[job]) * (WARPS / kw) + warp / kw) * R;
    float acc[R][NB];
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int b = 0; b < NB; b++)
            acc[r][b] = 0.0f;
    for (uint32_t blk = warp % kw * 32 + (uint32_t)lane_id(); blk < p.kb; blk += kw * 32) {
        block_words<Q> w[R];
#pragma unroll
        for (int r = 0; r < R; r++) /* a row too many reads the last one again */
            block_load<Q>(p, min(o + r, p.rows - 1), blk, &w[r]);
        uint4 xw[NB][2];
        uint2 xs[NB];
#pragma unroll
        for (int b = 0; b < NB; b++) {
            xw[b][0] = *(const uint4 *)x_codes(x, b, 0, blk);
            xw[b][1] = *(const uint4 *)x_codes(x, b, 1, blk);
            xs[b] = x.scales[(size_t)blk * x.rows_pad + b];
        }
#pragma unroll
        for (int r = 0; r < R; r++) {
            float d[2], m[2];
            uint32_t quads[8];
            scales_load<Q>(p, min(o + r, p.rows - 1), blk, d, m);
#pragma unroll
            for (int q = 0; q < 8; q++)
                quads[q] = quad_in<Q>(w[r], q / 2, q % 2);
#pragma unroll
            for (int b = 0; b < NB; b++)
                acc[r][b] = block_add<Q>(quads, d, m, xw[b], xs[b], acc[r][b]);
        }
    }
    sums_store<R, NB>(j, job, o, kw, acc, part);
}

/* ---- float weights ---- */

template <int TYPE, int NB, int R>
__global__ void __launch_bounds__(THREADS, 4) gemv_float(struct jobs j, const float *x, uint32_t kw)
{
    constexpr int N = TYPE == KN_F32 ? 4 : 8;
    DYN_SMEM(float, part);
    uint32_t job = job_of(j, blockIdx.x), warp = (uint32_t)warp_id();
    const struct packed p = j.p[job];
    uint32_t o = ((blockIdx.x - j.first[job]) * (WARPS / kw) + warp / kw) * R;
    float acc[R][NB];
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int b = 0; b < NB; b++)
            acc[r][b] = 0.0f;
    for (uint32_t at = warp % kw * 32 + (uint32_t)lane_id(); at * N < p.ld; at += kw * 32) {
        uint4 w[R];
#pragma unroll
        for (int r = 0; r < R; r++)
            w[r] = ld_stream16(p.a + (size_t)min(o + r, p.rows - 1) * p.ld * (16 / N) + at * 16);
        float xv[NB][N];
#pragma unroll
        for (int b = 0; b < NB; b++)
            if (b < (int)j.rows)
                x_values<N>(x + (size_t)b * p.cols, p.cols, at * N, xv[b]);
#pragma unroll
        for (int r = 0; r < R; r++) {
            float wv[N];
            chunk_values<TYPE>(w[r], wv);
#pragma unroll
            for (int b = 0; b < NB; b++)
                if (b < (int)j.rows)
#pragma unroll
                    for (int i = 0; i < N; i++)
                        acc[r][b] = __fmaf_rn(wv[i], xv[b][i], acc[r][b]);
        }
    }
    sums_store<R, NB>(j, job, o, kw, acc, part);
}

/* ---- launches ---- */

/* The blocks that each matrix gets, all in all. */
static uint32_t blocks_deal(struct jobs *j, uint32_t per)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < j->n; i++) {
        j->first[i] = n;
        n += (j->p[i].rows + per - 1) / per;
    }
    j->first[j->n] = n;
    return n;
}

template <class Q, int NB, int R>
static void launch_int8(struct cuda *c, struct jobs *j, const struct x_int8 *x)
{
    uint32_t kw = warps_along(j->p[0].kb), blocks = blocks_deal(j, WARPS / kw * R);
    KERNEL(c, (gemv_int8<Q, NB, R>), dim3(blocks), dim3(THREADS), WARPS * R * NB * sizeof(float),
           *j, *x, kw);
}

template <int TYPE, int NB, int R>
static void launch_float(struct cuda *c, struct jobs *j, const float *x)
{
    uint32_t kw = warps_along(j->p[0].ld * (TYPE == KN_F32 ? 4 : 2) / 16);
    uint32_t blocks = blocks_deal(j, WARPS / kw * R);
    KERNEL(c, (gemv_float<TYPE, NB, R>), dim3(blocks), dim3(THREADS),
           WARPS * R * NB * sizeof(float), *j, x, kw);
}

void gemv_quantised(struct cuda *c, enum kn_type type, struct jobs *j, const struct x_int8 *x)
{
#define GEMV(TYPE)                                                                                 \
    if (j->rows == 1)                                                                              \
        launch_int8<quant<TYPE>, 1, 4>(c, j, x);                                                   \
    else if (j->rows == 2)                                                                         \
        launch_int8<quant<TYPE>, 2, 4>(c, j, x);                                                   \
    else                                                                                           \
        launch_int8<quant<TYPE>, 4, 2>(c, j, x)
    QUANT_SWITCH(type, GEMV)
#undef GEMV
}

template <int TYPE> static void floats(struct cuda *c, struct jobs *j, const float *x)
{
    if (j->rows == 1)
        launch_float<TYPE, 1, 4>(c, j, x);
    else if (j->rows == 2)
        launch_float<TYPE, 2, 4>(c, j, x);
    else
        launch_float<TYPE, 4, 2>(c, j, x);
}

void gemv_floats(struct cuda *c, enum kn_type type, struct jobs *j, const float *x)
{
    if (type == KN_F32)
        floats<KN_F32>(c, j, x);
    else if (type == KN_F16)
        floats<KN_F16>(c, j, x);
    else
        floats<KN_BF16>(c, j, x);
}
