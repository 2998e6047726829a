/* attention_wide.cuh: pages of bf16 and q8_0 for the kernels of halves. A row comes as it is stored, by cp.async, and is made
 * into halves where it lies, by the warp that fetched it:
 *
 *      fetched    | bf16, or the 16-byte pieces that hold a line of q8_0       | shift |    byte of its start in them
 *      unpacked   | D halves                                                   | scale |    value = half * scale
 *
 * scale is the power of two that brings the row's largest magnitude (of q8_0: 128 times its largest block's scale) to
 * [2^14, 2^15). So none overflows, whatever a bf16 holds, and what a value loses is 2^-11 of its own or 2^-39 of the row's
 * largest. Queries are scaled in the same way. Scores are multiplied by their key's scale; weights by their value's over the
 * largest that the warp has met, by which the sums are multiplied at the end. */
#ifndef BACKCAST_ATTENTION_WIDE_CUH
#define BACKCAST_ATTENTION_WIDE_CUH
#include "attention_half.cuh"

/* Whether attention_many.cu takes heads of more than 128 values: their sums leave too few registers before sm_80. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 10 * ATTN_WIDE_LARGE_SM
#define WIDE_LARGE_RUNS false
#else
#define WIDE_LARGE_RUNS true
#endif

/* F(D) for the compiled size that holds d: fewer of them than of halves. */
#define WIDE_SWITCH(d, F)                                                                          \
    if ((d) <= 32) {                                                                               \
        F(32);                                                                                     \
    } else if ((d) <= 64) {                                                                        \
        F(64);                                                                                     \
    } else if ((d) <= 128) {                                                                       \
        F(128);                                                                                    \
    } else {                                                                                       \
        F(256);                                                                                    \
    }

#define WIDE_LEAST 1.17549435e-38f /* the smallest scale, 2^-126 */

/* Starts the copy of a row by row_lanes<D>::N lanes. run: a multiple of 16. */
template <int D>
DEV void wide_copy(const uint8_t *run, uint64_t offset, uint32_t type, uint32_t d, uint32_t lane,
                   half_t *row)
{
    uint32_t col = lane * 8;
    if (type == KN_BF16) {
        if (col < D)
            cpa16(row + col, run + offset + (col < d ? col * 2 : 0), col < d);
        return;
    }
    uint32_t shift = (uint32_t)offset & 15;
    if (lane * 16 < shift + kv_line_bytes(KN_Q8_0, d))
        cpa16(row + col, run + (offset - shift) + lane * 16, true);
    if (lane == 0)
        *(uint32_t *)(row + D) = shift;
}

/* Eight fetched values from `col` on: bf16, or two words of bytes and their scale. top: their largest magnitude. */
template <int D>
DEV uint4 wide_load(uint32_t type, uint32_t d, uint32_t col, const half_t *row, float *top)
{
    *top = 0.0f;
    if (col >= d)
        return make_uint4(0, 0, 0, 0);
    if (type == KN_BF16) {
        uint4 w = *(const uint4 *)(row + col);
        const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int i = 0; i < 4; i++)
            *top = fmaxf(*top, fmaxf(fabsf(bf2f((uint16_t)words[i])),
                                     fabsf(bf2f((uint16_t)(words[i] >> 16)))));
        return w;
    }
    const uint8_t *block =
        (const uint8_t *)row + *(const uint32_t *)(row + D) + col / Q8_VALUES * Q8_BYTES;
    const uint16_t *codes = (const uint16_t *)(block + 2 + col % Q8_VALUES);
    float scale = h2f(*(const half_t *)block);
    *top = fabsf(scale) * 128.0f;
    return make_uint4(codes[0] | (uint32_t)codes[1] << 16, codes[2] | (uint32_t)codes[3] << 16,
                      __float_as_uint(scale), 0);
}

/* Two values of four bytes in a word, times f. */
DEV uint32_t bytes_pair(uint32_t word, int i, float f)
{
    return pack2((float)(int8_t)(word >> 16 * i) * f, (float)(int8_t)(word >> (16 * i + 8)) * f);
}

/* What wide_load gave as halves, divided by the row's scale. */
DEV uint4 wide_halves(uint32_t type, uint4 w, float inverse)
{
    if (type == KN_BF16)
        return make_uint4(
            pack2(bf2f((uint16_t)w.x) * inverse, bf2f((uint16_t)(w.x >> 16)) * inverse),
            pack2(bf2f((uint16_t)w.y) * inverse, bf2f((uint16_t)(w.y >> 16)) * inverse),
            pack2(bf2f((uint16_t)w.z) * inverse, bf2f((uint16_t)(w.z >> 16)) * inverse),
            pack2(bf2f((uint16_t)w.w) * inverse, bf2f((uint16_t)(w.w >> 16)) * inverse));
    float f = __uint_as_float(w.z) * inverse;
    return make_uint4(bytes_pair(w.x, 0, f), bytes_pair(w.x, 1, f), bytes_pair(w.y, 0, f),
                      bytes_pair(w.y, 1, f));
}

/* The lane's share of the rows that it fetched: STEPS of them, STRIDE apart, from `rows` on. After cpa_wait. */
template <int D, int STRIDE, int STEPS>
DEV void wide_unpack(uint32_t type, uint32_t d, half_t *rows)
{
    constexpr int LANES = row_lanes<D>::N, MOST = D > 128 ? 2 : 4; /* rows at a time */
    constexpr int BATCH = STEPS < MOST ? STEPS : MOST;
    uint32_t lane = (uint32_t)lane_id() % LANES, col = lane * 8;
    __syncwarp(); /* the row's other lanes have waited, too */
#pragma unroll
    for (int step = 0; step < STEPS; step += BATCH) {
        uint4 w[BATCH];
        float top[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            w[i] = wide_load<D>(type, d, col, rows + (step + i) * STRIDE * (D + 8), &top[i]);
#pragma unroll
        for (int o = LANES / 2; o; o >>= 1)
#pragma unroll
            for (int i = 0; i < BATCH; i++)
                top[i] = fmaxf(top[i], __shfl_xor_sync(FULL_WARP, top[i], o));
        __syncwarp(); /* the rows were read */
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            half_t *row = rows + (step + i) * STRIDE * (D + 8);
            float scale = row_scale_for(top[i]);
            if (col < D)
                *(uint4 *)(row + col) = wide_halves(type, w[i], power_inverse(scale));
            if (lane == 0)
                *(float *)(row + D) = scale;
        }
    }
}

/* The scale of an unpacked row. */
template <int D> DEV float wide_scale(const half_t *rows, uint32_t row)
{
    return *(const float *)(rows + row * (D + 8) + D);
}

/* What a query's scores are multiplied by: never 0, which would make a masked one NaN. */
template <int D> DEV float wide_query_scale(const half_t *qs, uint32_t m, float scale)
{
    return fmaxf(scale * wide_scale<D>(qs, m), WIDE_LEAST);
}

/* M queries as halves with their scales to shared memory, a warp a query; zeros past the last one. */
template <int D, int M, int WARPS>
DEV void wide_queries(const struct attn_args &a, const struct attn_work &w, half_t *qs)
{
    constexpr int PER = (D + 127) / 128;
    for (uint32_t m = (uint32_t)warp_id(); m < M; m += WARPS) {
        float4 v[PER];
        float top = 0.0f;
#pragma unroll
        for (int i = 0; i < PER; i++) {
            uint32_t col = (uint32_t)lane_id() * 4 + 128 * i;
            v[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (m < w.n && col < a.d)
                v[i] = *(const float4 *)(a.q + attn_at(a, w, m) * a.d + col);
            top = fmaxf(top, fmaxf(fmaxf(fabsf(v[i].x), fabsf(v[i].y)),
                                   fmaxf(fabsf(v[i].z), fabsf(v[i].w))));
        }
        float scale = row_scale_for(warp_max(top)), inverse = power_inverse(scale);
#pragma unroll
        for (int i = 0; i < PER; i++) {
            uint32_t col = (uint32_t)lane_id() * 4 + 128 * i;
            if (col < D)
                *(uint2 *)(qs + m * (D + 8) + col) =
                    make_uint2(pack2(v[i].x * inverse, v[i].y * inverse),
                               pack2(v[i].z * inverse, v[i].w * inverse));
        }
        if (lane_id() == 0)
            *(float *)(qs + m * (D + 8) + D) = scale;
    }
}

/* Scores times their keys' scales. */
template <int D, int BN> DEV void wide_scores(const half_t *ks, float (*sc)[4])
{
#pragma unroll
    for (int n = 0; n < BN / 8; n++) {
        uint32_t j = n * 8 + 2 * ((uint32_t)lane_id() & 3);
        float lo = wide_scale<D>(ks, j), hi = wide_scale<D>(ks, j + 1);
        sc[n][0] *= lo;
        sc[n][1] *= hi;
        sc[n][2] *= lo;
        sc[n][3] *= hi;
    }
}

template <int D> DEV void sums_scale(float f, float (*o)[4])
{
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            o[n][i] *= f;
}

/* Weights times their values' scales, as values_add takes them. top: the largest scale so far; sums are in units of it. */
template <int D, int BN>
DEV void wide_weights(const half_t *vs, float (*sc)[4], float *top, float (*o)[4], uint32_t (*p)[4])
{
    float scales[BN / 8][2], most = *top;
#pragma unroll
    for (int n = 0; n < BN / 8; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            scales[n][i] = wide_scale<D>(vs, n * 8 + 2 * ((uint32_t)lane_id() & 3) + i);
            most = fmaxf(most, scales[n][i]);
        }
    most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 1));
    most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 2));
    float inverse = power_inverse(most);
    if (most > *top) /* the whole warp's */
        sums_scale<D>(*top * inverse, o);
    *top = most;
#pragma unroll
    for (int k = 0; k < BN / 16; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *pair = &sc[2 * k + (i >> 1)][2 * (i & 1)],
                        *scale = scales[2 * k + (i >> 1)];
            p[k][i] = pack2(pair[0] * (scale[0] * inverse), pair[1] * (scale[1] * inverse));
        }
}
#endif
