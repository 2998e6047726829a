/* vec.cu: ops that work row by row: norm, gate, gather. */
#include "backend.h"
#include "port.cuh"

#define NORM_THREADS 256

/* One block a row; threads take neighbouring values, their sums are added by warps, then the warps' in order: the sum
 * depends on d alone. x and out may be the same: a thread reads its values before it writes them. */
__global__ void __launch_bounds__(NORM_THREADS)
    rmsnorm(float *out, const float *x, const float *gain, uint32_t d, float eps)
{
    DYN_SMEM(float, part); /* one a warp */
    const float *from = x + (size_t)blockIdx.x * d;
    float *to = out + (size_t)blockIdx.x * d;
    float sum = 0.0f;
    bool wide = d % 4 == 0;
    if (wide)
        for (uint32_t i = threadIdx.x; i < d / 4; i += NORM_THREADS) {
            float4 v = ((const float4 *)from)[i];
            sum += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
        }
    else
        for (uint32_t i = threadIdx.x; i < d; i += NORM_THREADS)
            sum += from[i] * from[i];
    sum = warp_sum(sum);
    if (lane_id() == 0)
        part[warp_id()] = sum;
    __syncthreads();
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < NORM_THREADS / 32; i++)
        sum += part[i];
    float scale = 1.0f / sqrtf(sum / (float)d + eps);
    if (wide)
        for (uint32_t i = threadIdx.x; i < d / 4; i += NORM_THREADS) {
            float4 v = ((const float4 *)from)[i], g = ((const float4 *)gain)[i];
            ((float4 *)to)[i] = make_float4(v.x * scale * g.x, v.y * scale * g.y, v.z * scale * g.z,
                                            v.w * scale * g.w);
        }
    else
        for (uint32_t i = threadIdx.x; i < d; i += NORM_THREADS)
            to[i] = from[i] * scale * gain[i];
}

void run_rmsnorm(struct cuda *c, const struct op *o)
{
    const struct op_rmsnorm *r = &o->u.rmsnorm;
    KERNEL(c, rmsnorm, dim3(r->rows), dim3(NORM_THREADS), NORM_THREADS / 32 * sizeof(float), r->out,
           r->x, r->gain, r->d, r->eps);
}

void cuda_rmsnorm(struct kn *kn, float *out, const float *x, const float *gain, uint32_t rows,
                  uint32_t d, float eps)
{
    struct op o = op_make(OP_RMSNORM);
    if (rows == 0)
        return;
    o.u.rmsnorm.out = out;
    o.u.rmsnorm.x = x;
    o.u.rmsnorm.gain = gain;
    o.u.rmsnorm.rows = rows;
    o.u.rmsnorm.d = d;
    o.u.rmsnorm.eps = eps;
    op_submit(cuda_of(kn), &o);
}

/* Four values a thread. */
DEV float gated(float g, float u)
{
    return g / (1.0f + expf(-g)) * u;
}

__global__ void __launch_bounds__(256)
    swiglu(float *out, const float *gate, const float *up, size_t n)
{
    size_t i = ((size_t)blockIdx.x * 256 + threadIdx.x) * 4;
    if (i + 4 <= n) {
        float4 g = *(const float4 *)(gate + i), u = *(const float4 *)(up + i);
        *(float4 *)(out + i) =
            make_float4(gated(g.x, u.x), gated(g.y, u.y), gated(g.z, u.z), gated(g.w, u.w));
        return;
    }
    for (; i < n; i++)
        out[i] = gated(gate[i], up[i]);
}

void run_swiglu(struct cuda *c, const struct op *o)
{
    const struct op_swiglu *s = &o->u.swiglu;
    KERNEL(c, swiglu, dim3((unsigned)((s->n + 1023) / 1024)), dim3(256), 0, s->out, s->gate, s->up,
           s->n);
}

void cuda_swiglu(struct kn *kn, float *out, const float *gate, const float *up, size_t n)
{
    struct op o = op_make(OP_SWIGLU);
    if (n == 0)
        return;
    o.u.swiglu.out = out;
    o.u.swiglu.gate = gate;
    o.u.swiglu.up = up;
    o.u.swiglu.n = n;
    op_submit(cuda_of(kn), &o);
}

__global__ void __launch_bounds__(256)
    gather_rows(float *out, const float *x, const uint32_t *rows, uint32_t d)
{
    const float *from = x + (size_t)rows[blockIdx.x] * d;
    float *to = out + (size_t)blockIdx.x * d;
    if (d % 4 == 0)
        for (uint32_t i = threadIdx.x; i < d / 4; i += 256)
            ((float4 *)to)[i] = ((const float4 *)from)[i];
    else
        for (uint32_t i = threadIdx.x; i < d; i += 256)
            to[i] = from[i];
}

void run_gather(struct cuda *c, const struct op *o)
{
    const struct op_gather *g = &o->u.gather;
    KERNEL(c, gather_rows, dim3(g->n), dim3(256), 0, g->out, g->x, g->rows, g->d);
}

void cuda_gather_rows(struct kn *kn, float *out, const float *x, const uint32_t *rows, uint32_t n,
                      uint32_t d)
{
    struct cuda *c = cuda_of(kn);
    const uint32_t piece = SIDE_MAX / sizeof *rows;
    for (uint32_t at = 0; at < n; at += piece) {
        uint32_t m = KN_MIN(piece, n - at);
        struct op o = op_make(OP_GATHER);
        o.u.gather.rows = batch_side(c, rows + at, m);
        o.u.gather.out = out + (size_t)at * d;
        o.u.gather.x = x;
        o.u.gather.n = m;
        o.u.gather.d = d;
        op_submit(c, &o);
    }
}
