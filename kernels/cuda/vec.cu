/* vec.cu: ops that work row by row: norm, gate, gather. */
#include "kv.cuh"
#include "linear.cuh"
#include "narrow.cuh"

/* ---- norm ---- */

#define NORM_HELD 2 /* vectors of four that a thread keeps between the sum and the product */

/* Where a row's result goes: as floats, or in 16 bits for the product that follows, halves divided by *scale. */
struct norm_out {
    float *floats;
    uint16_t *narrow; /* NULL: floats */
    float *scale; /* of halves: bounds follow from the gains alone, |out| <= sqrt(d) max |gain| */
    bool bf16;
    struct x_target int8; /* NORM_INT8 */
};

/* Where a row comes from: x, or a page of hidden rows from where it goes to x, too (hidden_read's work). */
struct norm_in {
    float *x;
    uint32_t rows;
    struct dev_batch b;
    const uint32_t *slots;
};

struct norm_row {
    struct dev_seq s;
    const uint8_t *page;
    float scale;
    float4 *x;
};

template <bool PAGES> DEV void norm_row_find(const struct norm_in &in, uint32_t d, norm_row *ret)
{
    uint32_t row = blockIdx.x;
    ret->x = (float4 *)(in.x + (size_t)row * d);
    if (!PAGES)
        return;
    uint32_t slot = in.slots[row];
    ret->s = in.b.seqs[in.b.seq[row]];
    ret->page = kv_hidden(ret->s, slot);
    ret->scale = kv_hidden_is_half(ret->s) ? *kv_hidden_scale(ret->s, slot) : 1.0f;
}

template <bool PAGES> DEV float4 norm_load(const norm_row &r, uint32_t i)
{
    return PAGES ? kv_hidden4(r.s, r.page, i, r.scale) : r.x[i];
}

DEV void norm_store(const struct norm_out &o, size_t at, float4 v, float inverse)
{
    if (!o.narrow)
        ((float4 *)o.floats)[at] = v;
    else if (o.bf16)
        ((uint2 *)o.narrow)[at] = narrow4<true>(v, inverse);
    else
        ((uint2 *)o.narrow)[at] = narrow4<false>(v, inverse);
}

/* The block's sum of v.x and maximum of v.y, to every thread: within warps, then the warps in the same way. */
DEV float2 norm_reduce(float2 v, float2 *part)
{
    uint32_t warps = blockDim.x / 32, lane = (uint32_t)lane_id();
    v = make_float2(warp_sum(v.x), warp_max(v.y));
    if (lane == 0)
        part[warp_id()] = v;
    __syncthreads();
    v = lane < warps ? part[lane] : make_float2(0.0f, 0.0f);
    return make_float2(warp_sum(v.x), warp_max(v.y));
}

DEV float2 norm_add(float2 s, float4 v, float4 g)
{
    return make_float2(s.x + ((v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w)),
                       fmaxf(s.y, largest4(g)));
}

DEV float4 scaled(float4 v, float scale, float4 g)
{
    return make_float4(v.x * scale * g.x, v.y * scale * g.y, v.z * scale * g.z, v.w * scale * g.w);
}

/* Rows of x as floats or in 16 bits; the same of rows in pages; rows of x as int8. */
enum norm_kind { NORM_PLAIN, NORM_PAGES, NORM_INT8 };

/* Vector i of a row of n: v as it was, y the result. */
template <int KIND>
DEV void norm_put(const struct norm_out &o, const norm_row &from, uint32_t n, uint32_t i, float4 v,
                  float4 y, float inverse)
{
    if (KIND == NORM_INT8) {
        x_store(o.int8, blockIdx.x, i, y);
        return;
    }
    if (KIND == NORM_PAGES)
        from.x[i] = v;
    norm_store(o, (size_t)blockIdx.x * n + i, y, inverse);
}

/* One block a row, d a multiple of 4. All loads of a thread are under way before the first is waited for. The number of
 * threads, and so the order of the sum, depends on d alone. x and out may be the same: a thread writes what it has read.
 * int8: there are rows and columns behind the last ones, all zeros; whole warps are at one column's side of the row's end. */
template <int KIND>
__global__ void __launch_bounds__(1024)
    rmsnorm(struct norm_out out, struct norm_in in, const float *gain, uint32_t d, float eps)
{
    constexpr bool PAGES = KIND == NORM_PAGES;
    DYN_SMEM(float2, part); /* one a warp */
    const float4 *gains = (const float4 *)gain;
    uint32_t n = KIND == NORM_INT8 && blockIdx.x >= in.rows ? 0 : d / 4, step = blockDim.x;
    uint32_t end = KIND == NORM_INT8 ? out.int8.kbp * 8 : n;
    float4 v[NORM_HELD], g[NORM_HELD];
    struct norm_row from;
    early_next();
#pragma unroll
    for (uint32_t k = 0; k < NORM_HELD; k++) {
        uint32_t i = threadIdx.x + k * step;
        g[k] = i < n ? gains[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    early_wait(); /* gains are weights */
    norm_row_find<PAGES>(in, d, &from);
#pragma unroll
    for (uint32_t k = 0; k < NORM_HELD; k++) {
        uint32_t i = threadIdx.x + k * step;
        v[k] = i < n ? norm_load<PAGES>(from, i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    float2 s = make_float2(0.0f, 0.0f);
#pragma unroll
    for (uint32_t k = 0; k < NORM_HELD; k++)
        s = norm_add(s, v[k], g[k]);
    for (uint32_t i = threadIdx.x + NORM_HELD * step; i < n; i += step)
        s = norm_add(s, norm_load<PAGES>(from, i), gains[i]);
    s = norm_reduce(s, part);
    float scale = 1.0f / sqrtf(s.x / (float)d + eps);
    float divisor = half_scale(__float_as_uint(s.y * sqrtf((float)d)));
    if (blockIdx.x == 0 && threadIdx.x == 0)
        *out.scale = divisor;
#pragma unroll
    for (uint32_t k = 0; k < NORM_HELD; k++) {
        uint32_t i = threadIdx.x + k * step;
        if (i < end)
            norm_put<KIND>(out, from, n, i, v[k], scaled(v[k], scale, g[k]), 1.0f / divisor);
    }
    for (uint32_t i = threadIdx.x + NORM_HELD * step; i < end; i += step) {
        float4 a = make_float4(0.0f, 0.0f, 0.0f, 0.0f), b = a;
        if (i < n) {
            a = norm_load<PAGES>(from, i);
            b = gains[i];
        }
        norm_put<KIND>(out, from, n, i, a, scaled(a, scale, b), 1.0f / divisor);
    }
}

/* The same for any d, value by value. */
__global__ void __launch_bounds__(256)
    norm_odd(float *out, const float *x, const float *gain, uint32_t d, float eps)
{
    DYN_SMEM(float2, part);
    const float *from = x + (size_t)blockIdx.x * d;
    float2 s = make_float2(0.0f, 0.0f);
    for (uint32_t i = threadIdx.x; i < d; i += 256)
        s.x += from[i] * from[i];
    s = norm_reduce(s, part);
    float scale = 1.0f / sqrtf(s.x / (float)d + eps);
    for (uint32_t i = threadIdx.x; i < d; i += 256)
        out[(size_t)blockIdx.x * d + i] = from[i] * scale * gain[i];
}

void run_rmsnorm(struct cuda *c, const struct op *o)
{
    const struct op_rmsnorm *r = &o->u.rmsnorm;
    const struct wanted *to = &c->wanted;
    uint32_t threads = KN_MIN(1024u, (r->d / 4 + NORM_HELD * 32 - 1) / (NORM_HELD * 32) * 32);
    size_t smem = 32 * sizeof(float2);
    bool is_int8 = to->type == CUDA_R_8I;
    bool pages = c->source.kind == OP_HIDDEN_READ && r->d % 4 == 0 && !is_int8;
    if (c->source.kind == OP_HIDDEN_READ && !pages)
        run_hidden_read(c, &c->source);
    if (r->d % 4 != 0) {
        KERNEL(c, norm_odd, dim3(r->rows), dim3(256), smem, r->out, r->x, r->gain, r->d, r->eps);
        return;
    }
    struct norm_out out;
    struct norm_in in;
    memset(&out, 0, sizeof out);
    memset(&in, 0, sizeof in);
    in.x = (float *)(uintptr_t)r->x;
    in.rows = r->rows;
    out.floats = r->out;
    out.scale = c->scratch.one + SCALAR_NORM;
    out.bf16 = to->type == CUDA_R_16BF;
    if (out.bf16 || to->type == CUDA_R_16F)
        out.narrow = (uint16_t *)c->scratch.x;
#define NORM(KIND, ROWS)                                                                           \
    KERNEL_EARLY(c, rmsnorm<KIND>, dim3(ROWS), dim3(threads), smem, out, in, r->gain, r->d, r->eps)
    if (is_int8) {
        out.int8 = x_int8_target(c, to->weight, r->d, to->rows_pad);
        NORM(NORM_INT8, to->rows_pad);
    } else if (pages) {
        in.b = c->batch.view;
        in.slots = c->source.u.hidden.slots;
        NORM(NORM_PAGES, r->rows);
    } else {
        NORM(NORM_PLAIN, r->rows);
    }
#undef NORM
    c->input = (struct input){r->out, c->scratch.one + (out.bf16 ? SCALAR_ONE : SCALAR_NORM),
                              c->scratch.x, to->type};
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

/* ---- gate ---- */

/* Four values a thread. */
__global__ void __launch_bounds__(256)
    swiglu(float *out, const float *gate, const float *up, size_t n)
{
    size_t i = ((size_t)blockIdx.x * 256 + threadIdx.x) * 4;
    early_next();
    early_wait();
    if (i + 4 <= n) {
        *(float4 *)(out + i) = gated4(*(const float4 *)(gate + i), *(const float4 *)(up + i));
        return;
    }
    for (; i < n; i++)
        out[i] = gated(gate[i], up[i]);
}

/* Values 8 i .. 8 i + 7, divided, to out; returns the largest magnitude before. */
template <bool BF16>
DEV float gate_narrow(uint16_t *out, const float *gate, const float *up, size_t i, float inverse)
{
    const float4 *g = (const float4 *)gate + 2 * i, *u = (const float4 *)up + 2 * i;
    float4 g0 = g[0], g1 = g[1], u0 = u[0], u1 = u[1];
    float4 a = gated4(g0, u0), b = gated4(g1, u1);
    uint2 lo = narrow4<BF16>(a, inverse), hi = narrow4<BF16>(b, inverse);
    ((uint4 *)out)[i] = make_uint4(lo.x, lo.y, hi.x, hi.y);
    return fmaxf(largest4(a), largest4(b));
}

/* swiglu in 16 bits: eight values a thread. Halves that overflow are noted in *top, and gate_again makes all of them anew. */
template <bool BF16>
__global__ void __launch_bounds__(256)
    swiglu_narrow(uint16_t *out, const float *gate, const float *up, size_t n8, uint32_t *top)
{
    size_t i = (size_t)blockIdx.x * 256 + threadIdx.x;
    early_next();
    early_wait();
    if (i >= n8)
        return;
    float m = gate_narrow<BF16>(out, gate, up, i, 1.0f);
    if (!BF16 && m >= HALF_SAFE)
        atomicMax(top, __float_as_uint(m));
}

/* Leaves the scale of swiglu_narrow's halves in *scale. It is 1 and there is nothing to do, but for values beyond the halves'
 * range: then all are made again. The last block clears the words for the next time. */
__global__ void __launch_bounds__(256) gate_again(uint16_t *out, const float *gate, const float *up,
                                                  size_t n8, uint32_t *words, float *scale)
{
    early_next();
    early_wait();
    float divisor = half_scale(words[WORD_GATE]);
    if (divisor != 1.0f)
        for (size_t i = (size_t)blockIdx.x * 256 + threadIdx.x; i < n8;
             i += (size_t)gridDim.x * 256)
            gate_narrow<false>(out, gate, up, i, 1.0f / divisor);
    __syncthreads(); /* the block has read the word */
    if (threadIdx.x != 0)
        return;
    if (blockIdx.x == 0)
        *scale = divisor;
    __threadfence();
    if (atomicAdd(&words[WORD_GATE_DONE], 1u) == gridDim.x - 1) {
        words[WORD_GATE] = 0;
        words[WORD_GATE_DONE] = 0;
    }
}

/* A product in 16 bits follows: floats are not written. out may be gate, so nothing of gate or up is touched either. */
static void swiglu_for_product(struct cuda *c, const struct op_swiglu *s)
{
    uint16_t *out = (uint16_t *)c->scratch.x;
    float *scale = c->scratch.one + SCALAR_GATE;
    uint32_t *words = c->scratch.words;
    size_t n8 = s->n / 8;
    dim3 grid((unsigned)((n8 + 255) / 256));
    kn_assert(s->n % 8 == 0 && s->n * 2 <= c->scratch.x_bytes);
    if (c->wanted.type == CUDA_R_16BF) {
        KERNEL_EARLY(c, swiglu_narrow<true>, grid, dim3(256), 0, out, s->gate, s->up, n8, words);
        c->input = (struct input){s->out, c->scratch.one + SCALAR_ONE, out, CUDA_R_16BF};
        return;
    }
    KERNEL_EARLY(c, swiglu_narrow<false>, grid, dim3(256), 0, out, s->gate, s->up, n8,
                 words + WORD_GATE);
    grid.x = KN_MIN(grid.x, (unsigned)c->n_sms);
    KERNEL_EARLY(c, gate_again, grid, dim3(256), 0, out, s->gate, s->up, n8, words, scale);
    c->input = (struct input){s->out, scale, out, CUDA_R_16F};
}

void run_swiglu(struct cuda *c, const struct op *o)
{
    const struct op_swiglu *s = &o->u.swiglu;
    const struct wanted *to = &c->wanted;
    if (to->type == CUDA_R_8I) {
        struct x_target target = x_int8_target(c, to->weight, to->cols, to->rows_pad);
        x_to_int8(c, &target, s->gate, s->up, to->rows);
        c->input = (struct input){s->out, NULL, target.codes, CUDA_R_8I};
    } else if (to->type != CUDA_R_32F) {
        swiglu_for_product(c, s);
    } else {
        KERNEL_EARLY(c, swiglu, dim3((unsigned)((s->n + 1023) / 1024)), dim3(256), 0, s->out,
                     s->gate, s->up, s->n);
    }
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

/* ---- gather ---- */

/* A thread 16 bytes where d allows it, else one value; blockIdx.y: the row. */
__global__ void __launch_bounds__(128)
    gather_rows(float *out, const float *x, const uint32_t *rows, uint32_t d)
{
    uint32_t i = blockIdx.x * 128 + threadIdx.x;
    early_next();
    early_wait();
    const float *from = x + (size_t)rows[blockIdx.y] * d;
    float *to = out + (size_t)blockIdx.y * d;
    if (d % 4 == 0) {
        if (i < d / 4)
            ((float4 *)to)[i] = ((const float4 *)from)[i];
    } else if (i < d) {
        to[i] = from[i];
    }
}

const void *vec_kernel(void)
{
    return (const void *)gather_rows;
}

void run_gather(struct cuda *c, const struct op *o)
{
    const struct op_gather *g = &o->u.gather;
    uint32_t threads = g->d % 4 == 0 ? g->d / 4 : g->d;
    KERNEL_EARLY(c, gather_rows, dim3((threads + 127) / 128, g->n), dim3(128), 0, g->out, g->x,
                 g->rows, g->d);
}

void cuda_gather_rows(struct kn *kn, float *out, const float *x, const uint32_t *rows, uint32_t n,
                      uint32_t d)
{
    struct cuda *c = cuda_of(kn);
    const uint32_t piece = KN_MIN((uint32_t)(SIDE_MAX / sizeof *rows), 65535u); /* a grid's y */
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
