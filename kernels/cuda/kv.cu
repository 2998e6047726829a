/* kv.cu: rows into pages and out of them.
 *
 *   page = base + (slot / 64) * stride: [layer][K | V][kv head][64 rows][head_dim], then [64][d_hidden], then [64] scales
 *   (halves only), as kn.h and kn_kv_addr.h have it. */
#include "kv.cuh"

struct dev_seq dev_seq_of(const struct kn_kv *kv)
{
    struct dev_seq s;
    memset(&s, 0, sizeof s);
    s.base = (uint8_t *)kv->base;
    s.stride = kv->stride;
    s.n_layers = kv->n_layers;
    s.n_kv_heads = kv->n_kv_heads;
    s.head_dim = kv->head_dim;
    s.d_hidden = kv->d_hidden;
    s.type = kv->type;
    return s;
}

/* ---- keys and values ---- */

/* One block a row; K and V of all heads. */
__global__ void __launch_bounds__(128)
    kv_write(struct dev_batch b, uint32_t layer, const float *k, const float *v)
{
    uint32_t row = blockIdx.x;
    struct dev_seq s = b.seqs[b.seq[row]];
    uint32_t slot = b.slots[row], d = s.head_dim, width = s.n_kv_heads * d;
    for (uint32_t part = 0; part < 2; part++) {
        const float *from = (part ? v : k) + (size_t)row * width;
        if (s.type == KN_Q8_0) { /* a warp a head */
            for (uint32_t head = (uint32_t)warp_id(); head < s.n_kv_heads; head += 4)
                q8_line_put(from + head * d, d, kv_row(s, slot, layer, part, head));
            continue;
        }
        if (d % 8 == 0 && s.type != KN_F32) { /* eight values are 16 bytes, and of one head */
            for (uint32_t i = threadIdx.x * 8; i < width; i += 128 * 8) {
                float4 lo = *(const float4 *)(from + i), hi = *(const float4 *)(from + i + 4);
                uint8_t *to = kv_row(s, slot, layer, part, i / d) + (i % d) * 2;
                *(uint4 *)to = make_uint4(kv_pair(s.type, lo.x, lo.y), kv_pair(s.type, lo.z, lo.w),
                                          kv_pair(s.type, hi.x, hi.y), kv_pair(s.type, hi.z, hi.w));
            }
            continue;
        }
        for (uint32_t i = threadIdx.x; i < width; i += 128)
            kv_value_put(s.type, kv_row(s, slot, layer, part, i / d), i % d, from[i]);
    }
}

void run_kv_write(struct cuda *c, const struct op *o)
{
    const struct op_kv_write *w = &o->u.kv_write;
    if (c->batch.view.n_rows > 0)
        KERNEL(c, kv_write, dim3(c->batch.view.n_rows), dim3(128), 0, c->batch.view, w->layer, w->k,
               w->v);
}

void cuda_kv_write(struct kn *kn, const struct kn_batch *b, uint32_t layer, const float *k,
                   const float *v)
{
    struct cuda *c = cuda_of(kn);
    struct op o = op_make(OP_KV_WRITE);
    kn_assert(b->slots && c->batch.b == b);
    o.u.kv_write.layer = layer;
    for (uint32_t i = 0; i < b->n_seqs; i++) {
        const struct kn_kv *kv = b->seqs[i].kv, *first = b->seqs[0].kv;
        bool same = kv->n_kv_heads == first->n_kv_heads && kv->head_dim == first->head_dim;
        o.u.kv_write.n_heads = same && (i == 0 || o.u.kv_write.n_heads) ? kv->n_kv_heads : 0;
        o.u.kv_write.d = kv->head_dim;
    }
    o.u.kv_write.k = k;
    o.u.kv_write.v = v;
    op_submit(c, &o);
}

/* ---- hidden rows ---- */

/* One block a row of d values. */
__global__ void __launch_bounds__(256) hidden_write(struct dev_batch b, const float *x, uint32_t d)
{
    DYN_SMEM(float, part); /* one a warp */
    uint32_t row = blockIdx.x, slot = b.slots[row];
    struct dev_seq s = b.seqs[b.seq[row]];
    const float *from = x + (size_t)row * d;
    if (s.d_hidden == 0)
        return;
    if (!kv_hidden_is_half(s)) {
        float *to = (float *)kv_hidden(s, slot);
        for (uint32_t i = threadIdx.x; i < d; i += 256)
            to[i] = from[i];
        return;
    }
    float m = 0.0f;
    for (uint32_t i = threadIdx.x; i < d; i += 256)
        m = fmaxf(m, fabsf(from[i]));
    m = warp_max(m);
    if (lane_id() == 0)
        part[warp_id()] = m;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; i++)
        m = fmaxf(m, part[i]);
    float scale = row_scale_for(m), inverse = power_inverse(scale);
    half_t *to = (half_t *)kv_hidden(s, slot);
    for (uint32_t i = threadIdx.x; i < d; i += 256)
        to[i] = f2h(from[i] * inverse);
    if (threadIdx.x == 0)
        *kv_hidden_scale(s, slot) = scale;
}

const void *kv_kernel(void)
{
    return (const void *)hidden_write;
}

void run_hidden_write(struct cuda *c, const struct op *o)
{
    const struct op_hidden *h = &o->u.hidden;
    KERNEL(c, hidden_write, dim3(c->batch.view.n_rows), dim3(256), 8 * sizeof(float), c->batch.view,
           (const float *)h->x, h->d);
}

void cuda_hidden_write(struct kn *kn, const struct kn_batch *b, const float *x)
{
    struct cuda *c = cuda_of(kn);
    struct op o = op_make(OP_HIDDEN_WRITE);
    kn_assert(b->slots && c->batch.b == b);
    for (uint32_t i = 0; i < b->n_seqs; i++) /* one model a batch: one width */
        o.u.hidden.d = KN_MAX(o.u.hidden.d, b->seqs[i].kv->d_hidden);
    if (o.u.hidden.d == 0 || b->n_rows == 0)
        return;
    o.u.hidden.x = (float *)(uintptr_t)x;
    op_submit(c, &o);
}

/* Four values a thread where d allows it, else one; blockIdx.x: the row. */
__global__ void __launch_bounds__(128)
    hidden_read(struct dev_batch b, const uint32_t *row_slots, float *out, uint32_t d)
{
    early_next();
    early_wait();
    uint32_t row = blockIdx.x, slot = row_slots[row], i = blockIdx.y * 128 + threadIdx.x;
    struct dev_seq s = b.seqs[b.seq[row]];
    float *to = out + (size_t)row * d;
    float scale = kv_hidden_is_half(s) ? *kv_hidden_scale(s, slot) : 1.0f;
    const uint8_t *from = kv_hidden(s, slot);
    if (d % 4 == 0) {
        if (i >= d / 4)
            return;
        ((float4 *)to)[i] = kv_hidden4(s, from, i, scale);
    } else if (i < d) {
        to[i] = kv_hidden_is_half(s) ? h2f(((const half_t *)from)[i]) * scale
                                     : ((const float *)from)[i];
    }
}

void run_hidden_read(struct cuda *c, const struct op *o)
{
    const struct op_hidden *h = &o->u.hidden;
    uint32_t threads = h->d % 4 == 0 ? h->d / 4 : h->d;
    KERNEL_EARLY(c, hidden_read, dim3(c->batch.view.n_rows, (threads + 127) / 128), dim3(128), 0,
                 c->batch.view, h->slots, h->x, h->d);
}

void cuda_hidden_read(struct kn *kn, const struct kn_batch *b, const uint32_t *row_slots,
                      float *out)
{
    struct cuda *c = cuda_of(kn);
    struct op o = op_make(OP_HIDDEN_READ);
    kn_assert(c->batch.b == b);
    if (b->n_rows == 0)
        return;
    o.u.hidden.d = b->seqs[b->seq[0]].kv->d_hidden;
    for (uint32_t r = 0; r < b->n_rows; r++)
        kn_assert(b->seqs[b->seq[r]].kv->d_hidden == o.u.hidden.d);
    kn_assert(o.u.hidden.d > 0);
    o.u.hidden.slots = batch_side(c, row_slots, b->n_rows);
    o.u.hidden.x = out;
    op_submit(c, &o);
}

/* ---- one row, and keys for the host ---- */

/* Blocks 0 .. layers * 2 * heads - 1 copy a head's key or value, the last one the hidden row. */
__global__ void __launch_bounds__(64) row_copy(struct dev_seq s, uint32_t dst, uint32_t src)
{
    uint32_t runs = s.n_layers * 2 * s.n_kv_heads, run = blockIdx.x;
    const uint8_t *from;
    uint8_t *to;
    uint32_t bytes;
    if (run < runs) {
        uint32_t head = run % s.n_kv_heads, part = run / s.n_kv_heads % 2;
        from = kv_row(s, src, run / s.n_kv_heads / 2, part, head);
        to = kv_row(s, dst, run / s.n_kv_heads / 2, part, head);
        bytes = kv_line_bytes(s.type, s.head_dim);
    } else {
        from = kv_hidden(s, src);
        to = kv_hidden(s, dst);
        bytes = s.d_hidden * (kv_hidden_is_half(s) ? 2 : 4);
        if (kv_hidden_is_half(s) && threadIdx.x == 0)
            *kv_hidden_scale(s, dst) = *kv_hidden_scale(s, src);
    }
    if (bytes % 16 == 0)
        for (uint32_t i = threadIdx.x * 16; i < bytes; i += 64 * 16)
            *(uint4 *)(to + i) = *(const uint4 *)(from + i);
    else
        for (uint32_t i = threadIdx.x * 2; i < bytes; i += 64 * 2)
            *(uint16_t *)(to + i) = *(const uint16_t *)(from + i);
}

void cuda_row_copy(struct kn *kn, const struct kn_kv *kv, uint32_t dst_slot, uint32_t src_slot)
{
    struct cuda *c = cuda_of(kn);
    if (dst_slot == src_slot)
        return;
    capture_flush(c);
    struct dev_seq s = dev_seq_of(kv);
    KERNEL(c, row_copy, dim3(kv->n_layers * 2 * kv->n_kv_heads + (kv->d_hidden > 0)), dim3(64), 0,
           s, dst_slot, src_slot);
}

/* One block a row: the keys of all heads as floats. */
__global__ void __launch_bounds__(128)
    keys_read(struct dev_seq s, const uint32_t *slots, uint32_t layer, float *out)
{
    uint32_t d = s.head_dim, width = s.n_kv_heads * d, slot = slots[blockIdx.x];
    for (uint32_t i = threadIdx.x; i < width; i += 128) {
        out[(size_t)blockIdx.x * width + i] =
            kv_value(s.type, kv_row(s, slot, layer, 0, i / d), i % d);
    }
}

void cuda_keys_read(struct kn *kn, const struct kn_seq *s, uint32_t layer, uint32_t first,
                    uint32_t count, float *ret)
{
    struct cuda *c = cuda_of(kn);
    uint32_t width = s->kv->n_kv_heads * s->kv->head_dim;
    size_t row_bytes = width * sizeof(float);
    uint32_t piece = (uint32_t)KN_MIN(c->scratch.x_bytes / row_bytes, SIDE_MAX / sizeof(uint32_t));
    kn_assert(first <= s->n && count <= s->n - first && layer < s->kv->n_layers);
    capture_flush(c);
    for (uint32_t at = 0; at < count; at += piece) {
        uint32_t n = KN_MIN(piece, count - at);
        const uint32_t *slots =
            (const uint32_t *)side_push(c, s->slots + first + at, n * sizeof(uint32_t));
        KERNEL(c, keys_read, dim3(n), dim3(128), 0, dev_seq_of(s->kv), slots, layer,
               (float *)c->scratch.x);
        fetch(c, ret + (size_t)at * width, c->scratch.x, n * row_bytes);
    }
}

/* ---- renumbering ---- */

/* One key of q8_0, by a warp: its blocks are scaled anew. key: room for its values. */
DEV void q8_turn(const struct kn_rope &r, const float *angles, uint8_t *line, float *key)
{
    uint32_t pairs = r.n_rot / 2;
    for (uint32_t i = (uint32_t)lane_id(); i < r.head_dim; i += 32)
        key[i] = kv_value(KN_Q8_0, line, i);
    __syncwarp();
    for (uint32_t i = (uint32_t)lane_id(); i < pairs; i += 32) {
        uint32_t at = r.style == KN_ROPE_PAIRS ? 2 * i : i;
        uint32_t to = r.style == KN_ROPE_PAIRS ? 2 * i + 1 : i + pairs;
        float x = key[at], y = key[to], sine = angles[i], cosine = angles[pairs + i];
        key[at] = x * cosine - y * sine;
        key[to] = x * sine + y * cosine;
    }
    __syncwarp();
    q8_line_put(key, r.head_dim, line);
    __syncwarp();
}

/* One block a cached token: its keys of all layers and heads are turned from position from[token] to first + token (kn_turn.h).
 * A thread reads and writes whole pairs, so keys are turned in place; those of q8_0 by warps. */
__global__ void __launch_bounds__(128)
    kv_rotate(struct dev_seq s, struct kn_rope r, const uint32_t *slots, const int32_t *from,
              uint32_t first)
{
    DYN_SMEM(float, keys); /* q8_0: one a warp; then the angles: [n_rot / 2] sines, cosines */
    float *angles = keys + (s.type == KN_Q8_0 ? 4 * s.head_dim : 0);
    int32_t was = from[blockIdx.x], is = (int32_t)(first + blockIdx.x);
    uint32_t pairs = r.n_rot / 2, slot = slots[blockIdx.x];
    if (was == is)
        return;
    for (uint32_t i = threadIdx.x; i < pairs; i += 128) {
        float a = __fmul_rn((float)was, r.inv_freq[i]), b = __fmul_rn((float)is, r.inv_freq[i]);
        double turns = ((double)b - (double)a) * 0.31830988618379067154; /* half turns */
        turns -= 2.0 * rint(0.5 * turns);
        sincospif((float)turns, &angles[i], &angles[pairs + i]);
    }
    __syncthreads();
    if (s.type == KN_Q8_0) {
        for (uint32_t k = (uint32_t)warp_id(); k < s.n_layers * s.n_kv_heads; k += 4)
            q8_turn(r, angles, kv_row(s, slot, k / s.n_kv_heads, 0, k % s.n_kv_heads),
                    keys + warp_id() * s.head_dim);
        return;
    }
    uint32_t all = s.n_layers * s.n_kv_heads * pairs;
    for (uint32_t k = threadIdx.x; k < all; k += 128) {
        uint32_t i = k % pairs, head = k / pairs % s.n_kv_heads, layer = k / pairs / s.n_kv_heads;
        uint32_t at = r.style == KN_ROPE_PAIRS ? 2 * i : i;
        uint32_t to = r.style == KN_ROPE_PAIRS ? 2 * i + 1 : i + pairs;
        uint8_t *key = kv_row(s, slot, layer, 0, head);
        float sine = angles[i], cosine = angles[pairs + i];
        float x = kv_value(s.type, key, at), y = kv_value(s.type, key, to);
        kv_value_put(s.type, key, at, x * cosine - y * sine);
        kv_value_put(s.type, key, to, x * sine + y * cosine);
    }
}

void cuda_kv_rotate(struct kn *kn, const struct kn_seq *s, const struct kn_rope *r,
                    const int32_t *from)
{
    struct cuda *c = cuda_of(kn);
    const uint32_t piece = SIDE_MAX / 2 / sizeof(uint32_t); /* slots and positions, both good */
    size_t smem = (r->n_rot + (s->kv->type == KN_Q8_0 ? 4 * r->head_dim : 0)) * sizeof(float);
    kn_assert(r->norm == NULL && r->n_heads == s->kv->n_kv_heads && r->head_dim == s->kv->head_dim);
    capture_flush(c);
    for (uint32_t at = 0; at < s->n; at += piece) {
        uint32_t n = KN_MIN(piece, s->n - at);
        const uint32_t *slots = (const uint32_t *)side_push(c, s->slots + at, n * sizeof *slots);
        const int32_t *was = (const int32_t *)side_push(c, from + at, n * sizeof *was);
        KERNEL(c, kv_rotate, dim3(n), dim3(128), smem, dev_seq_of(s->kv), *r, slots, was, at);
    }
}
