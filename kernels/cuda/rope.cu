/* rope.cu: (norm and) rotary embedding in place. One block a row: the row's angles are worked out once for all heads, then
 * each warp takes heads.
 *
 * The angle is the f32 product position * inv_freq; it is reduced to [-1, 1] half turns in double (two operations), from
 * where sincospif is accurate: no slow path for large positions. */
#include "backend.h"
#include "port.cuh"

#define ROPE_THREADS 128
#define PER_LANE (KN_HEAD_DIM_MAX / 32)

/* Turns the pair (x[a], x[b]). */
DEV void turn(float *x, uint32_t a, uint32_t b, float sin, float cos)
{
    float x0 = x[a], x1 = x[b];
    x[a] = x0 * cos - x1 * sin;
    x[b] = x0 * sin + x1 * cos;
}

/* RMSNorm of one head by a warp. */
DEV void head_norm(float *x, const float *gain, uint32_t d, float eps)
{
    float v[PER_LANE], sum = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < PER_LANE; i++) {
        uint32_t at = i * 32 + (uint32_t)lane_id();
        v[i] = at < d ? x[at] : 0.0f;
        sum += v[i] * v[i];
    }
    float scale = 1.0f / sqrtf(warp_sum(sum) / (float)d + eps);
#pragma unroll
    for (uint32_t i = 0; i < PER_LANE; i++) {
        uint32_t at = i * 32 + (uint32_t)lane_id();
        if (at < d)
            x[at] = v[i] * scale * gain[at];
    }
    __syncwarp();
}

__global__ void __launch_bounds__(ROPE_THREADS, 4)
    rope(float *x, const int32_t *positions, struct kn_rope r)
{
    DYN_SMEM(float, angles); /* [n_rot / 2] sines, then cosines */
    uint32_t pairs = r.n_rot / 2;
    float *sines = angles, *cosines = angles + pairs;
    for (uint32_t i = threadIdx.x; i < pairs; i += ROPE_THREADS) {
        double turns = (double)__fmul_rn((float)positions[blockIdx.x], r.inv_freq[i]) *
                       0.31830988618379067154; /* half turns: angle / pi */
        turns -= 2.0 * rint(0.5 * turns);
        sincospif((float)turns, &sines[i], &cosines[i]);
    }
    __syncthreads();
    for (uint32_t h = (uint32_t)warp_id(); h < r.n_heads; h += ROPE_THREADS / 32) {
        float *head = x + ((size_t)blockIdx.x * r.n_heads + h) * r.head_dim;
        if (r.norm)
            head_norm(head, r.norm, r.head_dim, r.norm_eps);
        for (uint32_t i = (uint32_t)lane_id(); i < pairs; i += 32)
            if (r.style == KN_ROPE_PAIRS)
                turn(head, 2 * i, 2 * i + 1, sines[i], cosines[i]);
            else
                turn(head, i, i + pairs, sines[i], cosines[i]);
    }
}

void run_rope(struct cuda *c, const struct op *o)
{
    const struct op_rope *r = &o->u.rope;
    const struct dev_batch *b = &c->batch.view;
    if (b->n_rows > 0)
        KERNEL(c, rope, dim3(b->n_rows), dim3(ROPE_THREADS), r->r.n_rot * sizeof(float), r->x,
               b->positions, r->r);
}

void cuda_rope(struct kn *kn, const struct kn_batch *b, const struct kn_rope *r, float *x)
{
    struct cuda *c = cuda_of(kn);
    struct op o = op_make(OP_ROPE);
    kn_assert(c->batch.b == b);
    kn_assert(r->n_rot % 2 == 0 && r->n_rot <= r->head_dim && r->head_dim <= KN_HEAD_DIM_MAX);
    /* field by field: gaps between them stay zero */
    o.u.rope.r.style = r->style;
    o.u.rope.r.n_heads = r->n_heads;
    o.u.rope.r.head_dim = r->head_dim;
    o.u.rope.r.n_rot = r->n_rot;
    o.u.rope.r.inv_freq = r->inv_freq;
    o.u.rope.r.norm = r->norm;
    o.u.rope.r.norm_eps = r->norm_eps;
    o.u.rope.x = x;
    op_submit(c, &o);
}
