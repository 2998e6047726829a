/* score.cu: what a vocabulary says of a row, and one query's weights over a cache.
 *
 *      row_logit       x . row id of w: a dot product, one block a row; weights expanded exactly, sums in f32
 *      row_lse         log sum exp over all of w: slices of 2048 to 16384 rows through cuBLAS, folded into (max, sum) a row;
 *                      memory does not depend on the vocabulary
 *      attention_row   mean over the heads of softmax(q . k): scores [heads][n], then each head's (max, sum), then the mean */
#include "kv.cuh"
#include "linear.cuh"

#define SLICE 2048 /* columns of the vocabulary, at least */
#define SLICE_MAX 16384

/* ---- row_logit ---- */

#define LOGIT_THREADS 128

/* The sum over the block in its first warp: within warps by halves, then the warps in order. */
DEV float block_total(float v)
{
    DYN_SMEM(float, part); /* one a warp */
    v = warp_sum(v);
    if (lane_id() == 0)
        part[warp_id()] = v;
    __syncthreads();
    float sum = part[0];
#pragma unroll
    for (int i = 1; i < LOGIT_THREADS / 32; i++)
        sum += part[i];
    return sum;
}

/* Four floats of a row from `at` on, zeros behind its end. */
DEV float4 floats_at(const float *row, uint32_t cols, uint32_t at)
{
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (cols % 4 == 0) {
        if (at < cols)
            v = *(const float4 *)(row + at);
        return v;
    }
    v.x = at < cols ? row[at] : 0.0f;
    v.y = at + 1 < cols ? row[at + 1] : 0.0f;
    v.z = at + 2 < cols ? row[at + 2] : 0.0f;
    v.w = at + 3 < cols ? row[at + 3] : 0.0f;
    return v;
}

/* A block a row: threads take blocks of 32 values in turn. */
template <class Q>
__global__ void __launch_bounds__(LOGIT_THREADS)
    logit_quantised(struct packed p, const float *x, const int32_t *ids, float *ret)
{
    early_next();
    early_wait();
    uint32_t row = blockIdx.x, id = (uint32_t)ids[row];
    float acc = 0.0f;
    for (uint32_t blk = threadIdx.x; blk < p.kb; blk += LOGIT_THREADS) {
        float d[2], m[2];
        block_words<Q> w;
        block_load<Q>(p, id, blk, &w);
        scales_load<Q>(p, id, blk, d, m);
#pragma unroll
        for (int q = 0; q < 8; q++) {
            int t = q / 2, h = q % 2;
            float4 a = *(const float4 *)(x + (size_t)row * p.cols + blk * 32 + 16 * h + 4 * t);
            float4 v = values_of<Q>(quad_in<Q>(w, t, h), d[h], m[h]);
            acc = fmaf(v.x, a.x, acc);
            acc = fmaf(v.y, a.y, acc);
            acc = fmaf(v.z, a.z, acc);
            acc = fmaf(v.w, a.w, acc);
        }
    }
    acc = block_total(acc);
    if (threadIdx.x == 0)
        ret[row] = acc;
}

#define LOGIT_AHEAD 4

/* The same in steps of 16 bytes, four of a thread under way at a time. Elements behind a row's end are zeros on both sides. */
template <int TYPE>
__global__ void __launch_bounds__(LOGIT_THREADS)
    logit_float(struct packed p, const float *x, const int32_t *ids, float *ret)
{
    constexpr int N = TYPE == KN_F32 ? 4 : 8; /* values of 16 bytes */
    early_next();
    early_wait();
    const uint8_t *weights = p.a + (size_t)ids[blockIdx.x] * p.ld * (16 / N);
    const float *row = x + (size_t)blockIdx.x * p.cols;
    float acc = 0.0f;
    for (uint32_t at = threadIdx.x; at * N < p.ld; at += LOGIT_THREADS * LOGIT_AHEAD) {
        uint4 w[LOGIT_AHEAD];
        float4 v[LOGIT_AHEAD][N / 4];
#pragma unroll
        for (int k = 0; k < LOGIT_AHEAD; k++) {
            uint32_t i = at + k * LOGIT_THREADS;
            w[k] = i * N < p.ld ? ld_stream16(weights + (size_t)i * 16) : make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int h = 0; h < N / 4; h++)
                v[k][h] = floats_at(row, p.cols, i * N + h * 4);
        }
#pragma unroll
        for (int k = 0; k < LOGIT_AHEAD; k++) {
            float a[N];
            chunk_values<TYPE>(w[k], a);
#pragma unroll
            for (int h = 0; h < N / 4; h++) {
                acc = fmaf(a[4 * h], v[k][h].x, acc);
                acc = fmaf(a[4 * h + 1], v[k][h].y, acc);
                acc = fmaf(a[4 * h + 2], v[k][h].z, acc);
                acc = fmaf(a[4 * h + 3], v[k][h].w, acc);
            }
        }
    }
    acc = block_total(acc);
    if (threadIdx.x == 0)
        ret[blockIdx.x] = acc;
}

void run_logit(struct cuda *c, const struct op *o)
{
    const struct op_logit *l = &o->u.logit;
    const struct kn_weight *w = l->w;
    const float *x = l->x;
    const int32_t *ids = l->ids;
    float *ret = c->scratch.l;
    dim3 grid(l->rows), block(LOGIT_THREADS);
    size_t smem = LOGIT_THREADS / 32 * sizeof(float);
#define LOGIT(TYPE)                                                                                \
    KERNEL_EARLY(c, (logit_quantised<quant<TYPE>>), grid, block, smem, w->p, x, ids, ret)
#define LOGIT_FLOAT(TYPE) KERNEL_EARLY(c, (logit_float<TYPE>), grid, block, smem, w->p, x, ids, ret)
    if (kn_int8_format(w->type))
        QUANT_SWITCH(w->type, LOGIT)
    else if (w->type == KN_F32)
        LOGIT_FLOAT(KN_F32);
    else if (w->type == KN_F16)
        LOGIT_FLOAT(KN_F16);
    else
        LOGIT_FLOAT(KN_BF16);
#undef LOGIT
#undef LOGIT_FLOAT
}

/* Rows that the scratch holds results of. Ids are the pass's own or on the device already. */
static void logits_of(struct cuda *c, const struct kn_weight *w, const float *x, uint32_t rows,
                      const int32_t *ids, float *ret)
{
    struct op o = op_make(OP_LOGIT);
    o.u.logit.w = w;
    o.u.logit.x = x;
    o.u.logit.ids = ids;
    o.u.logit.rows = rows;
    op_submit(c, &o);
    capture_flush(c);
    fetch(c, ret, c->scratch.l, rows * sizeof *ret);
}

void cuda_row_logit(struct kn *kn, const struct kn_weight *w, const float *x, uint32_t rows,
                    const int32_t *ids, float *ret)
{
    struct cuda *c = cuda_of(kn);
    const struct batch *b = &c->batch;
    const uint32_t piece = (uint32_t)(KN_MIN(SIDE_MAX, c->scratch.l_bytes) / sizeof *ids);
    kn_assert(w->magic == CUDA_WEIGHT_MAGIC);
    for (uint32_t r = 0; r < rows; r++)
        kn_assert(ids[r] >= 0 && (uint32_t)ids[r] < w->rows);
    if (b->open && ids == b->b->ids && rows == b->b->n_rows && rows > 0 && rows <= piece) {
        /* each row's own token: the pass has brought them along */
        logits_of(c, w, x, rows, b->view.ids, ret);
        return;
    }
    capture_flush(c);
    for (uint32_t at = 0; at < rows; at += piece) {
        uint32_t n = KN_MIN(piece, rows - at);
        const int32_t *dev = (const int32_t *)side_push(c, ids + at, n * sizeof *ids);
        logits_of(c, w, x + (size_t)at * w->cols, n, dev, ret + at);
    }
}

/* ---- row_lse ---- */

#define LSE_THREADS 256
#define LSE_AHEAD 4 /* loads of 16 bytes under way in a thread */

/* A running log-sum-exp: x is the largest so far, y the sum of e^(v - x). */
DEV float exp_of(float x) /* 2 ulp; 0 for -inf */
{
    return exp2_fast(x * 1.44269504088896341f);
}
DEV float lse_base(float top) /* nothing but -inf so far: no difference of infinities */
{
    return top == -INFINITY ? 0.0f : top;
}
DEV float2 lse_join(float2 a, float2 b)
{
    float top = fmaxf(a.x, b.x), base = lse_base(top);
    return make_float2(top, a.y * exp_of(a.x - base) + b.y * exp_of(b.x - base));
}
DEV float2 lse_warp(float2 s)
{
    float top = warp_max(s.x);
    return make_float2(top, warp_sum(s.y * exp_of(s.x - lse_base(top))));
}

/* One block a row, one pass: its logits of one slice join the row's state. first: there is none yet; ret: this is the last
 * slice (else NULL). The sum's order follows from n. */
__global__ void __launch_bounds__(LSE_THREADS)
    lse_add(const float *logits, uint32_t n, uint32_t ld, float2 *state, bool first, float *ret)
{
    DYN_SMEM(float2, part); /* one a warp */
    const float *v = logits + (size_t)blockIdx.x * ld;
    float2 s = make_float2(-INFINITY, 0.0f);
    early_wait();
    for (uint32_t i = threadIdx.x; i < n / 4; i += LSE_THREADS * LSE_AHEAD) {
        float4 a[LSE_AHEAD];
        float top = s.x;
#pragma unroll
        for (int k = 0; k < LSE_AHEAD; k++) {
            uint32_t at = i + k * LSE_THREADS;
            a[k] = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
            if (at < n / 4)
                a[k] = ((const float4 *)v)[at];
        }
#pragma unroll
        for (int k = 0; k < LSE_AHEAD; k++)
            top = fmaxf(top, fmaxf(fmaxf(a[k].x, a[k].y), fmaxf(a[k].z, a[k].w)));
        float base = lse_base(top), sum[2] = {s.y * exp_of(s.x - base), 0.0f};
#pragma unroll
        for (int k = 0; k < LSE_AHEAD; k++)
            sum[k % 2] += (exp_of(a[k].x - base) + exp_of(a[k].y - base)) +
                          (exp_of(a[k].z - base) + exp_of(a[k].w - base));
        s = make_float2(top, sum[0] + sum[1]);
    }
    if (threadIdx.x < n % 4)
        s = lse_join(s, make_float2(v[n / 4 * 4 + threadIdx.x], 1.0f));
    s = lse_warp(s);
    if (lane_id() == 0)
        part[warp_id()] = s;
    __syncthreads();
    if (warp_id() != 0)
        return;
    s = lse_warp(lane_id() < LSE_THREADS / 32 ? part[lane_id()] : make_float2(-INFINITY, 0.0f));
    if (lane_id() != 0)
        return;
    if (!first)
        s = lse_join(state[blockIdx.x], s);
    if (ret)
        ret[blockIdx.x] = s.x + logf(s.y);
    else
        state[blockIdx.x] = s;
}

const void *score_kernel(void)
{
    return (const void *)lse_add;
}

/* Columns that so many rows take at a time: few rows take wide slices, or launches would outweigh the work. */
static uint32_t slice_of(const struct cuda *c, uint32_t rows)
{
    size_t fit = c->scratch.l_bytes / (rows * sizeof(float)) - 4;
    return (uint32_t)KN_MIN(KN_MAX(fit / SLICE * SLICE, (size_t)SLICE), (size_t)SLICE_MAX);
}

/* rows at most what the scratch holds: x, and of l a slice of logits, states and results. */
static void lse_run(struct cuda *c, const struct kn_weight *w, const float *x, uint32_t rows,
                    const float *scale, float *ret)
{
    uint32_t slice = slice_of(c, rows);
    float *logits = c->scratch.l, *result = logits + (size_t)rows * slice;
    float2 *state = (float2 *)(result + (rows + 1) / 2 * 2);
    struct x_plain plain = x_to_plain(c, x_type(c, w->type), x, rows, w->cols, scale);
    for (uint32_t first = 0; first < w->rows; first += slice) {
        uint32_t n = KN_MIN(slice, w->rows - first);
        product(c, w, first, n, &plain, logits, slice, false);
        KERNEL_EARLY(c, lse_add, dim3(rows), dim3(LSE_THREADS), LSE_THREADS / 32 * sizeof(float2),
                     logits, n, slice, state, first == 0, n == w->rows - first ? result : NULL);
    }
    fetch(c, ret, result, rows * sizeof *ret);
}

void cuda_row_lse(struct kn *kn, const struct kn_weight *w, const float *x, uint32_t rows,
                  float *ret)
{
    struct cuda *c = cuda_of(kn);
    uint32_t piece = x_rows_max(c, x_type(c, w->type), w->cols);
    kn_assert(w->magic == CUDA_WEIGHT_MAGIC);
    capture_flush(c);
    const float *scale = c->input.x == x ? c->input.scale : NULL;
    piece = (uint32_t)KN_MIN((size_t)piece, c->scratch.l_bytes / ((SLICE + 4) * sizeof(float)));
    piece = even_piece(rows, piece);
    for (uint32_t at = 0; at < rows; at += piece)
        lse_run(c, w, x + (size_t)at * w->cols, KN_MIN(piece, rows - at), scale, ret + at);
}

/* ---- attention_row ---- */

struct row_args {
    struct dev_seq s;
    const float *q; /* [heads][d] */
    float *scores;  /* [heads][n] */
    float2 *top;    /* [heads] */
    uint32_t layer, first_head, group, n_heads;
    float scale;
};

/* A thread a key, blockIdx.y a head. */
__global__ void __launch_bounds__(128) row_scores(struct row_args a)
{
    DYN_SMEM(float, q);
    uint32_t head = a.first_head + blockIdx.y, d = a.s.head_dim;
    uint32_t j = blockIdx.x * 128 + threadIdx.x;
    for (uint32_t i = threadIdx.x; i < d; i += 128)
        q[i] = a.q[(size_t)head * d + i];
    __syncthreads();
    if (j >= a.s.n)
        return;
    const uint8_t *k = kv_row(a.s, a.s.slots[j], a.layer, 0, head / a.group);
    float sum = 0.0f;
    for (uint32_t i = 0; i < d; i++)
        sum = fmaf(q[i], kv_value(a.s.type, k, i), sum);
    a.scores[(size_t)blockIdx.y * a.s.n + j] = sum * a.scale;
}

/* A block a head: its largest score and the sum of weights. */
__global__ void __launch_bounds__(256) row_top(struct row_args a)
{
    DYN_SMEM(float, part);
    const float *v = a.scores + (size_t)blockIdx.x * a.s.n;
    float m = -INFINITY, sum = 0.0f;
    for (uint32_t i = threadIdx.x; i < a.s.n; i += 256)
        m = fmaxf(m, v[i]);
    m = warp_max(m);
    if (lane_id() == 0)
        part[warp_id()] = m;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; i++)
        m = fmaxf(m, part[i]);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < a.s.n; i += 256)
        sum += expf(v[i] - m);
    sum = warp_sum(sum);
    if (lane_id() == 0)
        part[warp_id()] = sum;
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    sum = 0.0f;
    for (int i = 0; i < 8; i++)
        sum += part[i];
    a.top[blockIdx.x] = make_float2(m, sum);
}

/* A thread a key: adds `heads` heads' weights to out (starts from 0 with the first head). */
__global__ void __launch_bounds__(128) row_mean(struct row_args a, uint32_t heads, float *out)
{
    uint32_t j = blockIdx.x * 128 + threadIdx.x;
    if (j >= a.s.n)
        return;
    float sum = a.first_head == 0 ? 0.0f : out[j];
    for (uint32_t h = 0; h < heads; h++) {
        float2 t = a.top[h];
        sum += expf(a.scores[(size_t)h * a.s.n + j] - t.x) / t.y / (float)a.n_heads;
    }
    out[j] = sum;
}

/* Slots lie in scratch.w, scores in x; in l: the query, (max, sum) a head, the result. */
void cuda_attention_row(struct kn *kn, const struct kn_seq *s, uint32_t layer, const float *q,
                        uint32_t n_heads, float scale, float *ret)
{
    struct cuda *c = cuda_of(kn);
    uint32_t d = s->kv->head_dim, n = s->n;
    size_t bytes = n * sizeof(float);
    kn_assert(d <= KN_HEAD_DIM_MAX && n_heads % s->kv->n_kv_heads == 0);
    capture_flush(c);
    if (n == 0)
        return;
    float2 *top = (float2 *)(c->scratch.l + (size_t)n_heads * d + (size_t)n_heads * d % 2);
    float *out = (float *)(top + n_heads);
    kn_assert((uint8_t *)(out + n) <= (uint8_t *)c->scratch.l + c->scratch.l_bytes);
    kn_assert(bytes <= c->scratch.w_bytes && bytes <= c->scratch.x_bytes);
    struct row_args a = {dev_seq_of(s->kv),
                         c->scratch.l,
                         (float *)c->scratch.x,
                         top,
                         layer,
                         0,
                         n_heads / s->kv->n_kv_heads,
                         n_heads,
                         scale};
    a.s.n = n;
    a.s.slots = (const uint32_t *)c->scratch.w;
    ring_upload(c, c->stream, c->scratch.w, s->slots, bytes);
    ring_upload(c, c->stream, c->scratch.l, q, (size_t)n_heads * d * sizeof *q);
    uint32_t piece = (uint32_t)KN_MIN((size_t)n_heads, c->scratch.x_bytes / bytes);
    for (; a.first_head < n_heads; a.first_head += piece) {
        uint32_t heads = KN_MIN(piece, n_heads - a.first_head);
        KERNEL(c, row_scores, dim3((n + 127) / 128, heads), dim3(128), d * sizeof(float), a);
        KERNEL(c, row_top, dim3(heads), dim3(256), 8 * sizeof(float), a);
        KERNEL(c, row_mean, dim3((n + 127) / 128), dim3(128), 0, a, heads, out);
    }
    fetch(c, ret, out, bytes);
}
