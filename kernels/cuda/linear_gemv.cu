/* linear_gemv.cu: products of one to four rows: bound by the bytes of the weights.
 *
 * A group of kw warps shares two (floats: four) rows of weights, and that is nearly all of a block, so that many of them are
 * under way and a small matrix is fetched by the whole device at once. What each lane fetches of its rows is asked for before
 * any of it is used, and before the kernel in front has ended (weights do not wait for activations).
 *
 *      quantised: blocks of 32, 128 at a time, dealt in turn to the kw warps:
 *
 *          128c + 32u + lane,  u = 0..3        a lane: 4 blocks of 2 rows: 8 loads of 16 bytes of codes, 8 of scales
 *          kw = cols / 4096, rounded up, at most 8
 *
 *      For q4_0, one row and 16 bytes of codes the loop has 41 instructions, a third of them addresses (sm_90): at the speed of
 *      memory a multiprocessor of an H200 issues about 40 % of what it can.
 *
 *      floats: chunks of 16 bytes of the row, dealt in turn to the 32 * kw lanes
 *
 *          chunks          1 .. 47     48 .. 95     96 ..
 *          kw              1           2            4
 *
 * Order of a sum: a lane adds its blocks in ascending order (kn_int8.h's fma; float types: ascending chunks of 16 bytes);
 * the 32 lanes by halves (lane i and i ^ 16, i ^ 8 ... 1); the warps in ascending order. It depends on cols alone, not on
 * the number of rows. */
#include "linear.cuh"

#define FLOAT_THREADS 128
#define FLOAT_WARPS 4
#define KW_MAX 8
#define CHUNK 128u /* blocks of 32 that a warp takes at a time */
#define ROWS 2     /* of weights: of a group of warps */

uint32_t gemv_pad(uint32_t rows)
{
    return rows == 3 ? 4 : rows;
}

/* The sums of N values (a power of two) over the warp: lanes i * 32 / N and following get that of value i. Each level adds
 * lanes i and i ^ o, as warp_sum does, but while there are several values a lane goes on with half of them. */
template <int N> DEV float warp_fold(float *v)
{
    int lane = lane_id(), n = N;
#pragma unroll
    for (int o = 16; o; o >>= 1) {
        bool upper = (lane & o) != 0;
        if (n == 1) {
            v[0] += __shfl_xor_sync(FULL_WARP, v[0], o);
            continue;
        }
        n /= 2;
#pragma unroll
        for (int i = 0; i < n; i++) {
            float keep = upper ? v[n + i] : v[i], give = upper ? v[i] : v[n + i];
            v[i] = keep + __shfl_xor_sync(FULL_WARP, give, o);
        }
    }
    return v[0];
}

/* Adds the kw warps' sums of rows o .. of weights, acc[row * NB + x's row], and stores them. part: [warps][R * NB] of shared
 * memory, if kw > 1. */
template <int R, int NB>
DEV void sums_store(const struct jobs &j, uint32_t job, uint32_t o, uint32_t kw, float *acc,
                    float *part)
{
    constexpr uint32_t N = R * NB, EACH = 32 / N;
    uint32_t warp = (uint32_t)warp_id(), lane = (uint32_t)lane_id(), i = lane / EACH;
    float sum = warp_fold<N>(acc);
    if (kw > 1) {
        if (lane % EACH == 0)
            part[warp * N + i] = sum;
        __syncthreads();
        if (warp % kw != 0)
            return;
        sum = 0.0f;
#pragma unroll 1
        for (uint32_t k = 0; k < kw; k++)
            sum += part[(warp + k) * N + i];
    }
    if (lane % EACH == 0 && i % NB < j.rows && o + i / NB < j.p[job].rows)
        job_store(j, job, i % NB, o + i / NB, sum);
}

/* ---- quantised weights ---- */

/* A block of 32 of one row as it lies in the planes. */
template <class Q> struct raw_words {
    block_words<Q> w;
    uint32_t s, super;
};

/* Four bits, no table: the upper ones stay where they are, 16 times their value, and their sum is divided. */
template <class Q> DEV constexpr bool upper_in_place()
{
    return Q::A_BITS == 4 && Q::B_BITS == 0 && !Q::TABLE && Q::N_SUB == 1;
}

/* One block of 32 of one matrix row against one row of activations. */
template <class Q>
DEV float block_add(const uint32_t *quads, const float *d, const float *m, const uint32_t *x,
                    uint2 xs, float acc)
{
    float da = x_scale(xs);
    if (Q::N_SUB == 1) {
        int low = x_start<Q>(xs, 0), high = 0;
#pragma unroll
        for (int t = 0; t < 4; t++) {
            low = __dp4a((int)quads[2 * t], (int)x[t], low);
            high = upper_in_place<Q>() ? dp4a_us(quads[2 * t + 1], (int)x[4 + t], high)
                                       : __dp4a((int)quads[2 * t + 1], (int)x[4 + t], high);
        }
        low += upper_in_place<Q>() ? high >> 4 : high;
        acc = __fmaf_rn(__fmul_rn(d[0], da), sum_value(low), acc);
        if (Q::MIN)
            acc = __fmaf_rn(m[0], x_minimum<Q>(xs, 0), acc);
    } else {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int sum = x_start<Q>(xs, h);
#pragma unroll
            for (int t = 0; t < 4; t++)
                sum = __dp4a((int)quads[2 * t + h], (int)x[4 * h + t], sum);
            acc = __fmaf_rn(__fmul_rn(d[h], da), sum_value(sum), acc);
            if (Q::MIN)
                acc = __fmaf_rn(m[h], x_minimum<Q>(xs, h), acc);
        }
    }
    return acc;
}

/* One block of 32 of ROWS rows against NB rows of activations. blk behind the end: real is false, and nothing is added. */
template <class Q, int NB>
DEV void blocks_add(const raw_words<Q> *w, const struct x_int8 &x, uint32_t blk, bool real,
                    float *acc)
{
    uint32_t xw[NB][8];
    uint2 xs[NB];
    const uint8_t *codes = x.codes + (size_t)blk * 16;
#pragma unroll
    for (int b = 0; b < NB; b++) {
        uint4 low = *(const uint4 *)(codes + (size_t)(2 * b) * x.kbp * 16);
        uint4 high = *(const uint4 *)(codes + (size_t)(2 * b + 1) * x.kbp * 16);
        xs[b] = x.scales[(size_t)blk * NB + b];
        xs[b].x = real ? xs[b].x : 0u;
        if (Q::MIN)
            xs[b].y = real ? xs[b].y : 0u;
        xw[b][0] = low.x, xw[b][1] = low.y, xw[b][2] = low.z, xw[b][3] = low.w;
        xw[b][4] = high.x, xw[b][5] = high.y, xw[b][6] = high.z, xw[b][7] = high.w;
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float d[2], m[2];
        uint32_t quads[8];
        scales_of<Q>(w[r].s, w[r].super, d, m);
#pragma unroll
        for (int q = 0; q < 8; q++)
            quads[q] = upper_in_place<Q>() && q % 2 ? w[r].w.a[q / 2 % Q::A_BITS] & 0xf0f0f0f0u
                                                    : quad_in<Q>(w[r].w, q / 2, q % 2);
#pragma unroll
        for (int b = 0; b < NB; b++)
            acc[r * NB + b] = block_add<Q>(quads, d, m, xw[b], xs[b], acc[r * NB + b]);
    }
}

/* U: of a lane's four blocks of a chunk, how many are fetched together: as many as registers hold. */
template <class Q, int NB> struct together {
    static constexpr int U = Q::A_BITS == 8 || Q::B_BITS == 2 || NB == 4 ? 2 : 4;
};

template <class Q, int NB>
__global__ void __launch_bounds__(KW_MAX * 32, NB == 4 ? 1 : 2)
    gemv_int8(struct jobs j, struct x_int8 x, uint32_t kw)
{
    constexpr int U = together<Q, NB>::U;
    DYN_SMEM(float, part);
    uint32_t job = job_of(j, blockIdx.x), warp = (uint32_t)warp_id(), lane = (uint32_t)lane_id();
    const struct packed p = j.p[job];
    bool alone = kw == 1; /* warps are: each has rows of its own */
    uint32_t groups = alone ? blockDim.x / 32 : 1, along = alone ? 0 : warp;
    uint32_t o = ((blockIdx.x - j.first[job]) * groups + (alone ? warp : 0)) * ROWS;
    packed_row rows[ROWS];
    float acc[ROWS * NB];
    early_next();
#pragma unroll
    for (uint32_t r = 0; r < ROWS; r++) /* a row too many reads the last one again */
        rows[r] = row_of<Q>(p, min(o + r, p.rows - 1));
#pragma unroll
    for (int i = 0; i < ROWS * NB; i++)
        acc[i] = 0.0f;
    for (uint32_t c = along * CHUNK; c < p.kb; c += kw * CHUNK) {
#pragma unroll
        for (uint32_t u0 = 0; u0 < 4; u0 += U) {
            raw_words<Q> w[U][ROWS];
#pragma unroll
            for (uint32_t u = 0; u < U; u++) {
                uint32_t blk = min(c + 32 * (u0 + u) + lane, p.kb - 1);
#pragma unroll
                for (uint32_t r = 0; r < ROWS; r++) {
                    block_load<Q>(rows[r], blk, &w[u][r].w);
                    scales_words<Q>(rows[r], blk, &w[u][r].s, &w[u][r].super);
                }
            }
            if (u0 == 0 && c == along * CHUNK)
                early_wait();
#pragma unroll
            for (uint32_t u = 0; u < U; u++) {
                uint32_t blk = c + 32 * (u0 + u) + lane;
                if (blk - lane < p.kb)
                    blocks_add<Q, NB>(w[u], x, min(blk, p.kb - 1), blk < p.kb, acc);
            }
        }
    }
    sums_store<ROWS, NB>(j, job, o, kw, acc, part);
}

/* ---- float weights ---- */

template <int TYPE, int NB, int R>
__global__ void __launch_bounds__(FLOAT_THREADS, 4)
    gemv_float(struct jobs j, const float *x, uint32_t kw)
{
    constexpr int N = TYPE == KN_F32 ? 4 : 8;
    DYN_SMEM(float, part);
    uint32_t job = job_of(j, blockIdx.x), warp = (uint32_t)warp_id();
    const struct packed p = j.p[job];
    uint32_t o = ((blockIdx.x - j.first[job]) * (FLOAT_WARPS / kw) + warp / kw) * R;
    uint32_t first = warp % kw * 32 + (uint32_t)lane_id();
    float acc[R * NB];
    early_next();
#pragma unroll
    for (int i = 0; i < R * NB; i++)
        acc[i] = 0.0f;
    if (first * N >= p.ld)
        early_wait();
    for (uint32_t at = first; at * N < p.ld; at += kw * 32) {
        uint4 w[R];
#pragma unroll
        for (int r = 0; r < R; r++)
            w[r] = ld_stream16(p.a + (size_t)min(o + r, p.rows - 1) * p.ld * (16 / N) + at * 16);
        if (at == first)
            early_wait();
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
                        acc[r * NB + b] = __fmaf_rn(wv[i], xv[b][i], acc[r * NB + b]);
        }
    }
    sums_store<R, NB>(j, job, o, kw, acc, part);
}

const void *gemv_kernel(void)
{
    return (const void *)gemv_float<KN_F16, 1, 4>;
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

template <class Q, int NB>
static void launch_int8(struct cuda *c, struct jobs *j, const struct x_int8 *x)
{
    uint32_t kw = KN_MIN((j->p[0].kb + CHUNK - 1) / CHUNK, (uint32_t)KW_MAX);
    uint32_t warps = kw == 1 ? 2 : kw, blocks = blocks_deal(j, warps / kw * ROWS);
    kn_assert(x->rows_pad == NB);
    KERNEL_EARLY(c, (gemv_int8<Q, NB>), dim3(blocks), dim3(warps * 32),
                 warps * ROWS * NB * sizeof(float), *j, *x, kw);
}

template <int TYPE, int NB, int R>
static void launch_float(struct cuda *c, struct jobs *j, const float *x)
{
    uint32_t chunks = j->p[0].ld * (TYPE == KN_F32 ? 4 : 2) / 16;
    uint32_t kw = chunks >= 96 ? 4 : chunks >= 48 ? 2 : 1;
    uint32_t blocks = blocks_deal(j, FLOAT_WARPS / kw * R);
    KERNEL_EARLY(c, (gemv_float<TYPE, NB, R>), dim3(blocks), dim3(FLOAT_THREADS),
                 FLOAT_WARPS * R * NB * sizeof(float), *j, x, kw);
}

void gemv_quantised(struct cuda *c, enum kn_type type, struct jobs *j, const struct x_int8 *x)
{
#define GEMV(TYPE)                                                                                 \
    if (j->rows == 1)                                                                              \
        launch_int8<quant<TYPE>, 1>(c, j, x);                                                      \
    else if (j->rows == 2)                                                                         \
        launch_int8<quant<TYPE>, 2>(c, j, x);                                                      \
    else                                                                                           \
        launch_int8<quant<TYPE>, 4>(c, j, x)
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
