/* weights.cu: matrices from a file's blocks to planes (quant.cuh), and their rows as floats or halves.
 *
 * Loading: a piece of the file's blocks goes through the ring to the device; a kernel takes blocks apart and packs codes and
 * scales into the planes. Float types keep their values in rows of whole 16 bytes, the rest zeros.
 *
 * The block formats as they lie in a file are drawn in kn_int8.c; the kernel's results are compared with that file's. */
#include "quant.cuh"

/* ---- shapes ---- */

struct shape {
    uint32_t a_bits, b_bits, s_bytes, super; /* super: 1 for blocks of 256 */
};

static struct shape shape_of(enum kn_type type)
{
    const struct kn_int8_format *f = kn_int8_format(type);
    uint32_t super = kn_type_find(type)->block == 256;
    uint32_t a = f->code_bits >= 8 ? 8 : f->code_bits >= 4 ? 4 : 2;
    return (struct shape){a, f->code_bits - a, super || !f->has_min ? 2u : 4u, super};
}

static uint8_t *plane(size_t *at, uint8_t *base, size_t bytes)
{
    uint8_t *here = base + *at;
    *at += (bytes + 255) / 256 * 256;
    return here;
}

/* The planes of w with its memory at base; returns how many bytes they take. */
static size_t planes_make(struct kn_weight *w, uint8_t *base)
{
    struct packed *p = &w->p;
    size_t at = 0, rows = w->rows;
    uint32_t elem = (uint32_t)kn_type_find(w->type)->bytes;
    *p = (struct packed){};
    p->rows = w->rows;
    p->cols = w->cols;
    if (!kn_int8_format(w->type)) {
        uint32_t unit = 16 / elem;
        p->ld = (w->cols + unit - 1) / unit * unit;
        p->a = plane(&at, base, rows * p->ld * elem);
        return at;
    }
    struct shape s = shape_of(w->type);
    p->kb = w->cols / 32;
    p->kbp = (p->kb + 3) / 4 * 4;
    p->a = plane(&at, base, rows * p->kb * s.a_bits * 4);
    p->b = plane(&at, base, rows * p->kbp * s.b_bits * 4);
    p->s = plane(&at, base, rows * p->kbp * s.s_bytes);
    p->super = (const uint32_t *)plane(&at, base, s.super ? rows * (p->kb / 8) * 4 : 0);
    return at;
}

/* ---- taking blocks apart ---- */

/* 32 codes; what planes s and super hold of them. Codes of 8 bits are the file's signed bytes, those of the IQ4 types
 * indices into their table. */
struct raw_block {
    uint8_t u[32];
    uint32_t s, super;
};

DEV uint32_t half_at(const uint8_t *p)
{
    return p[0] | (uint32_t)p[1] << 8;
}

DEV void raw_nibbles(const uint8_t *q, struct raw_block *r)
{
    for (int i = 0; i < 16; i++) {
        r->u[i] = q[i] & 15;
        r->u[i + 16] = q[i] >> 4;
    }
}

DEV void raw_fifth(const uint8_t *h, struct raw_block *r)
{
    for (int i = 0; i < 32; i++)
        r->u[i] |= (uint8_t)((h[i / 8] >> (i % 8) & 1) << 4);
}

DEV void raw_of_32(int type, const uint8_t *p, struct raw_block *r)
{
    bool min = type == KN_Q4_1 || type == KN_Q5_1, fifth = type == KN_Q5_0 || type == KN_Q5_1;
    r->s = half_at(p) | (min ? half_at(p + 2) << 16 : 0);
    p += min ? 4 : 2;
    if (type == KN_Q8_0) {
        for (int i = 0; i < 32; i++)
            r->u[i] = p[i];
        return;
    }
    raw_nibbles(p + (fifth ? 4 : 0), r);
    if (fifth)
        raw_fifth(p, r);
}

DEV void raw_q45k(bool five, const uint8_t *p, uint32_t j, struct raw_block *r)
{
    const uint8_t *s = p + 4, *q = p + (five ? 48 : 16) + 32 * (j / 2);
    uint32_t scale, min;
    if (j < 4) {
        scale = s[j] & 63u;
        min = s[j + 4] & 63u;
    } else {
        scale = (s[j + 4] & 15u) | (uint32_t)(s[j - 4] >> 6) << 4;
        min = (uint32_t)(s[j + 4] >> 4) | (uint32_t)(s[j] >> 6) << 4;
    }
    r->s = scale | min << 8;
    r->super = half_at(p) | half_at(p + 2) << 16;
    for (int i = 0; i < 32; i++) {
        r->u[i] = (uint8_t)(j % 2 ? q[i] >> 4 : q[i] & 15);
        if (five)
            r->u[i] |= (uint8_t)((p[16 + i] >> j & 1) << 4);
    }
}

DEV void raw_q23k(bool three, const uint8_t *p, uint32_t j, struct raw_block *r)
{
    const uint8_t *q = p + (three ? 32 : 16) + 32 * (j / 4);
    for (int i = 0; i < 32; i++) {
        r->u[i] = q[i] >> 2 * (j % 4) & 3;
        if (three)
            r->u[i] |= (uint8_t)((p[i] >> j & 1) << 2);
    }
    if (!three) {
        r->s = p[2 * j] | (uint32_t)p[2 * j + 1] << 8;
        r->super = half_at(p + 80) | half_at(p + 82) << 16;
        return;
    }
    r->s = 0;
    r->super = half_at(p + 108);
    for (uint32_t h = 0; h < 2; h++) {
        const uint8_t *s = p + 96;
        uint32_t k = 2 * j + h, low = k < 8 ? s[k] & 15u : (uint32_t)(s[k - 8] >> 4);
        uint32_t scale = (low | (s[8 + k % 4] >> 2 * (k / 4) & 3u) << 4) - 32u;
        r->s |= (scale & 255u) << 8 * h;
    }
}

DEV void raw_q6k(const uint8_t *p, uint32_t j, struct raw_block *r)
{
    uint32_t part = j % 4;
    const uint8_t *ql = p + 64 * (j / 4) + 32 * (part % 2), *qh = p + 128 + 32 * (j / 4);
    for (int i = 0; i < 32; i++) {
        uint32_t low = part < 2 ? ql[i] & 15u : (uint32_t)(ql[i] >> 4);
        r->u[i] = (uint8_t)(low | (qh[i] >> 2 * part & 3u) << 4);
    }
    r->s = p[192 + 2 * j] | (uint32_t)p[193 + 2 * j] << 8;
    r->super = half_at(p + 208);
}

DEV void raw_iq4xs(const uint8_t *p, uint32_t j, struct raw_block *r)
{
    uint32_t low = p[4 + j / 2] >> 4 * (j % 2) & 15u, high = p[2 + j / 4] >> 2 * (j % 4) & 3u;
    uint32_t scale = ((low | high << 4) - 32u) & 255u;
    r->s = scale | scale << 8;
    r->super = half_at(p);
    raw_nibbles(p + 8 + 16 * j, r);
}

/* Block j (0, or 0..7) of the file's block at p. */
DEV void raw_unpack(int type, const uint8_t *p, uint32_t j, struct raw_block *r)
{
    r->super = 0;
    switch (type) {
    case KN_Q2_K:
    case KN_Q3_K:
        raw_q23k(type == KN_Q3_K, p, j, r);
        break;
    case KN_Q4_K:
    case KN_Q5_K:
        raw_q45k(type == KN_Q5_K, p, j, r);
        break;
    case KN_Q6_K:
        raw_q6k(p, j, r);
        break;
    case KN_IQ4_XS:
        raw_iq4xs(p, j, r);
        break;
    default:
        raw_of_32(type, p, r);
    }
}

/* bits `from` .. `from` + b of 32 codes as a plane with b bits packs them, 4 * b bytes. */
DEV void plane_store(const struct raw_block &r, uint32_t from, uint32_t b, uint32_t *dst)
{
    uint32_t per = 8 / b, mask = (1u << b) - 1u;
    for (uint32_t w = 0; w < b; w++) {
        uint32_t word = 0;
        for (uint32_t k = 0; k < per; k++) {
            uint32_t q = w * per + k, first = 16 * (q & 1) + 4 * (q >> 1);
            for (uint32_t i = 0; i < 4; i++)
                word |= (r.u[first + i] >> from & mask) << (8 * i + b * k);
        }
        dst[w] = word;
    }
}

/* One thread a block of 32. raw: file blocks first .. of the matrix, each of `bytes`, `per` blocks of 32 in each. */
__global__ void __launch_bounds__(128)
    repack(int type, const uint8_t *raw, uint32_t bytes, uint32_t per, size_t first, uint32_t n,
           struct packed p, struct shape s)
{
    uint32_t i = blockIdx.x * 128 + threadIdx.x;
    if (i >= n)
        return;
    struct raw_block r;
    size_t block = first + i; /* of 32, counted through the matrix */
    uint32_t row = (uint32_t)(block / p.kb), blk = (uint32_t)(block % p.kb);
    raw_unpack(type, raw + (size_t)(i / per) * bytes, i % per, &r);
    if (s.a_bits == 8) {
        for (int h = 0; h < 2; h++)
            for (int t = 0; t < 4; t++) {
                const uint8_t *u = r.u + 16 * h + 4 * t;
                uint32_t *dst = (uint32_t *)(p.a + h * (size_t)p.rows * p.kb * 16 + block * 16) + t;
                *dst = u[0] | (uint32_t)u[1] << 8 | (uint32_t)u[2] << 16 | (uint32_t)u[3] << 24;
            }
    } else {
        plane_store(r, 0, s.a_bits, (uint32_t *)(p.a + block * s.a_bits * 4));
    }
    size_t j = padded_index(p, row, blk);
    if (s.b_bits)
        plane_store(r, s.a_bits, s.b_bits, (uint32_t *)(p.b + j * s.b_bits * 4));
    if (s.s_bytes == 4)
        *(uint32_t *)(p.s + j * 4) = r.s;
    else
        *(uint16_t *)(p.s + j * 2) = (uint16_t)r.s;
    if (s.super && blk % 8 == 0)
        ((uint32_t *)p.super)[(size_t)row * (p.kb / 8) + blk / 8] = r.super;
}

/* Rows of cols elements to rows of ld. first: the first element of raw in the matrix. */
template <class T>
__global__ void __launch_bounds__(256)
    respace(const T *raw, size_t first, uint32_t n, uint32_t cols, uint32_t ld, T *dst)
{
    uint32_t i = blockIdx.x * 256 + threadIdx.x;
    if (i >= n)
        return;
    size_t at = first + i;
    dst[at / cols * ld + at % cols] = raw[i];
}

/* ---- loading ---- */

static void load_quantised(struct cuda *c, const struct kn_tensor *src, struct kn_weight *w)
{
    const struct kn_type_info *info = kn_type_find(src->type);
    uint32_t per = info->block / 32;
    size_t n_blocks = src->bytes / info->bytes, piece = RING_HALF / info->bytes;
    for (size_t at = 0; at < n_blocks; at += piece) {
        uint32_t n = (uint32_t)KN_MIN(piece, n_blocks - at);
        ring_upload(c, c->stream, c->scratch.w, (const uint8_t *)src->data + at * info->bytes,
                    (size_t)n * info->bytes);
        KERNEL(c, repack, dim3((n * per + 127) / 128), dim3(128), 0, (int)src->type, c->scratch.w,
               info->bytes, per, at * per, n * per, w->p, shape_of(src->type));
    }
}

static void load_floats(struct cuda *c, const struct kn_tensor *src, struct kn_weight *w)
{
    uint32_t elem = (uint32_t)kn_type_find(src->type)->bytes;
    size_t n = src->bytes / elem, piece = RING_HALF / elem;
    if (w->p.ld == w->cols) {
        ring_upload(c, c->stream, w->mem, src->data, src->bytes);
        return;
    }
    for (size_t at = 0; at < n; at += piece) {
        uint32_t m = (uint32_t)KN_MIN(piece, n - at);
        ring_upload(c, c->stream, c->scratch.w, (const uint8_t *)src->data + at * elem,
                    (size_t)m * elem);
        if (elem == 4)
            KERNEL(c, respace<uint32_t>, dim3((m + 255) / 256), dim3(256), 0,
                   (const uint32_t *)c->scratch.w, at, m, w->cols, w->p.ld, (uint32_t *)w->mem);
        else
            KERNEL(c, respace<uint16_t>, dim3((m + 255) / 256), dim3(256), 0,
                   (const uint16_t *)c->scratch.w, at, m, w->cols, w->p.ld, (uint16_t *)w->mem);
    }
}

/* The number as it stands: in C++ an enum may not even be read while it holds what none of its values is. */
static uint32_t type_number(const struct kn_tensor *src)
{
    uint32_t n;
    static_assert(sizeof n == sizeof src->type, "the same bytes");
    memcpy(&n, &src->type, sizeof n);
    return n;
}

int cuda_weight_load(struct kn *kn, const struct kn_tensor *src, struct kn_weight **ret)
{
    struct cuda *c = cuda_of(kn);
    const struct kn_type_info *info = kn_type_find(type_number(src));
    if (!info || info->type == KN_I32)
        return KN_EUNSUPPORTED;
    if (src->rows == 0 || src->cols == 0 || src->cols % info->block != 0 ||
        src->bytes != (size_t)(src->cols / info->block) * info->bytes * src->rows)
        return KN_EINVALID;
    struct kn_weight *w = (struct kn_weight *)calloc(1, sizeof *w);
    if (!w)
        return KN_ENOMEM;
    w->magic = CUDA_WEIGHT_MAGIC;
    w->type = src->type;
    w->rows = src->rows;
    w->cols = src->cols;
    w->bytes = planes_make(w, NULL);
    int code = device_alloc(c, w->bytes, &w->mem);
    if (code != KN_OK) {
        free(w);
        return code;
    }
    planes_make(w, (uint8_t *)w->mem);
    stream_use(c, STREAM_COPY);
    RUN(c, cudaMemsetAsync, w->mem, 0, w->bytes, c->stream);
    if (kn_int8_format(src->type))
        load_quantised(c, src, w);
    else
        load_floats(c, src, w);
    if (c->failed != cudaSuccess) {
        device_free(c, w->mem);
        free(w);
        return KN_EDEVICE;
    }
    kn->bytes_weights += w->bytes;
    *ret = w;
    return KN_OK;
}

void cuda_weight_free(struct kn *kn, struct kn_weight **w)
{
    struct cuda *c = cuda_of(kn);
    if (!*w)
        return;
    kn_assert((*w)->magic == CUDA_WEIGHT_MAGIC && kn->bytes_weights >= (*w)->bytes);
    capture_reset(c);
    if (c->failed == cudaSuccess)
        RUN(c, cudaStreamSynchronize, c->stream);
    kn->bytes_weights -= (*w)->bytes;
    device_free(c, (*w)->mem);
    (*w)->magic = 0;
    free(*w);
    *w = NULL;
}

size_t cuda_weight_bytes(const struct kn_weight *w)
{
    kn_assert(w->magic == CUDA_WEIGHT_MAGIC);
    return w->bytes;
}

/* ---- rows as floats, rows as halves ---- */

#define HALVES_EACH 4 /* pieces of 16 bytes a thread */

/* blockIdx.x: row of the batch. Four threads a block of 32 values, and no loops: one row must not take longer than memory. */
template <class Q>
__global__ void __launch_bounds__(128)
    embed_quantised(struct packed p, const int32_t *ids, float *out)
{
    uint32_t id = (uint32_t)ids[blockIdx.x], i = blockIdx.y * 128 + threadIdx.x, blk = i / 4;
    float *to = out + (size_t)blockIdx.x * p.cols + blk * 32 + 4 * (i % 4);
    if (blk >= p.kb)
        return;
    int t = (int)(i % 4);
    float d[2], m[2];
    block_words<Q> w;
    block_load<Q>(p, id, blk, &w);
    scales_load<Q>(p, id, blk, d, m);
#pragma unroll
    for (int k = 0; k < 4; k++)
        if (k == t) { /* a constant index: words stay in registers */
            *(float4 *)to = values_of<Q>(quad_in<Q>(w, k, 0), d[0], m[0]);
            *(float4 *)(to + 16) = values_of<Q>(quad_in<Q>(w, k, 1), d[1], m[1]);
        }
}

/* 16 bytes of the row a thread. */
__global__ void __launch_bounds__(128)
    embed_floats(int type, struct packed p, const int32_t *ids, float *out)
{
    uint32_t chunk = blockIdx.y * 128 + threadIdx.x, n = type == KN_F32 ? 4 : 8, col = chunk * n;
    if (col >= p.ld)
        return;
    size_t row = (size_t)ids[blockIdx.x] * (p.ld / n);
    uint4 v = ((const uint4 *)p.a)[row + chunk];
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
    float *to = out + (size_t)blockIdx.x * p.cols + col;
#pragma unroll
    for (uint32_t k = 0; k < 4; k++) {
        float2 f = type == KN_F16 ? unpack2(w[k])
                                  : make_float2(bf2f((uint16_t)w[k]), bf2f((uint16_t)(w[k] >> 16)));
        if (type == KN_F32) {
            if (col + k < p.cols)
                to[k] = __uint_as_float(w[k]);
            continue;
        }
        if (p.cols % 2 == 0 && col + 2 * k < p.cols)
            *(float2 *)(to + 2 * k) = f;
        if (p.cols % 2 != 0 && col + 2 * k < p.cols)
            to[2 * k] = f.x;
        if (p.cols % 2 != 0 && col + 2 * k + 1 < p.cols)
            to[2 * k + 1] = f.y;
    }
}

const void *weights_kernel(void)
{
    return (const void *)embed_floats;
}

void run_embed(struct cuda *c, const struct op *o)
{
    const struct op_embed *e = &o->u.embed;
    const struct dev_batch *b = &c->batch.view;
    if (b->n_rows == 0)
        return;
    bool floats = !kn_int8_format(e->w->type);
    uint32_t per = e->w->type == KN_F32 ? 4 : 8,
             pieces = floats ? e->w->p.ld / per : e->w->p.kb * 4;
    dim3 grid(b->n_rows, (pieces + 127) / 128);
#define EMBED(TYPE)                                                                                \
    KERNEL(c, (embed_quantised<quant<TYPE>>), grid, dim3(128), 0, e->w->p, b->ids, e->out)
    if (!floats)
        QUANT_SWITCH(e->w->type, EMBED)
    else
        KERNEL(c, embed_floats, grid, dim3(128), 0, (int)e->w->type, e->w->p, b->ids, e->out);
#undef EMBED
}

void cuda_embed(struct kn *kn, const struct kn_weight *w, const struct kn_batch *b, float *out)
{
    struct cuda *c = cuda_of(kn);
    kn_assert(w->magic == CUDA_WEIGHT_MAGIC && c->batch.b == b);
    for (uint32_t r = 0; r < b->n_rows; r++)
        kn_assert(b->ids[r] >= 0 && (uint32_t)b->ids[r] < w->rows);
    struct op o = op_make(OP_EMBED);
    o.u.embed.w = w;
    o.u.embed.out = out;
    op_submit(c, &o);
}

/* Eight neighbouring values of a block as they lie in the planes: quads (t, h) and (t + 1, h) of eighth i: h = i / 2, t even. */
template <class Q> struct eighth {
    uint32_t a[2], b, s, super;
};

/* blk: counted from p's first row on, which is why p's planes begin there. */
template <class Q> DEV eighth<Q> eighth_load(const struct packed &p, uint32_t blk, uint32_t i)
{
    eighth<Q> r;
    uint32_t upper = i >> 1, pair = i & 1, j = blk; /* j: blk in rows of kbp */
    if (p.kb != p.kbp)
        j += blk / p.kb * (p.kbp - p.kb);
    r.a[1] = r.b = r.super = 0;
    if (Q::A_BITS == 2) {
        r.a[0] = ((const uint32_t *)p.a)[(size_t)blk * 2 + pair];
    } else {
        size_t plane = Q::A_BITS == 8 && upper ? (size_t)p.rows * p.kb * 2 : 0;
        uint2 v = ((const uint2 *)p.a)[plane + (size_t)blk * 2 + pair];
        r.a[0] = v.x;
        r.a[1] = v.y;
    }
    if (Q::B_BITS > 0)
        r.b = ((const uint32_t *)p.b)[Q::B_BITS == 2 ? (size_t)j * 2 + pair : j];
    r.s = Q::S_BYTES == 4 ? ((const uint32_t *)p.s)[j] : ((const uint16_t *)p.s)[j];
    if (Q::SUPER)
        r.super = p.super[blk / 8];
    return r;
}

template <class Q> DEV uint4 eighth_halves(const eighth<Q> &r, uint32_t i)
{
    int h = (int)(i >> 1), t = (int)(i & 1) * 2;
    float d[2], m[2], dh, mh;
    uint32_t w[4];
    scales_of<Q>(r.s, r.super, d, m);
    dh = h && Q::N_SUB == 2 ? d[1] : d[0];
    mh = h && Q::N_SUB == 2 ? m[1] : m[0];
#pragma unroll
    for (int e = 0; e < 2; e++) {
        uint32_t word = r.a[Q::A_BITS == 2 ? 0 : e];
        float4 v = values_of<Q>(quad_of<Q>(word, r.b, Q::B_BITS == 1 ? t + e : e, h), dh, mh);
        w[2 * e] = pack2(v.x, v.y);
        w[2 * e + 1] = pack2(v.z, v.w);
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
}

/* n blocks of p (whose planes begin at the first one) to halves, 16 bytes a thread and store, four of them in turn, so that
 * their loads are under way together: bound by memory, about 2.6 bytes of it a value of 4 bits. */
template <class Q>
__global__ void __launch_bounds__(256) halves_of(struct packed p, uint32_t n, uint4 *out)
{
    uint32_t first = blockIdx.x * (256 * HALVES_EACH) + threadIdx.x;
    eighth<Q> r[HALVES_EACH];
#pragma unroll
    for (uint32_t k = 0; k < HALVES_EACH; k++) {
        uint32_t i = min(first + k * 256, n * 4 - 1);
        r[k] = eighth_load<Q>(p, i / 4, i % 4);
    }
#pragma unroll
    for (uint32_t k = 0; k < HALVES_EACH; k++)
        if (first + k * 256 < n * 4)
            out[first + k * 256] = eighth_halves<Q>(r[k], threadIdx.x % 4);
}

__global__ void __launch_bounds__(256)
    halves_of_bf16(struct packed p, uint32_t first, uint32_t n, uint32_t ld, half_t *out)
{
    size_t i = (size_t)blockIdx.x * 256 + threadIdx.x;
    size_t row = i / p.ld, col = i % p.ld;
    if (row < n)
        out[row * ld + col] = f2h(bf2f(((const uint16_t *)p.a)[(first + row) * p.ld + col]));
}

/* p from row `first` on. The second plane of 8 bits stays p.rows * kb blocks behind the first. */
static struct packed packed_from(const struct kn_weight *w, uint32_t first)
{
    struct packed p = w->p;
    struct shape s = shape_of(w->type);
    p.a += (size_t)first * p.kb * (s.a_bits == 8 ? 16 : s.a_bits * 4);
    p.b += (size_t)first * p.kbp * s.b_bits * 4;
    p.s += (size_t)first * p.kbp * s.s_bytes;
    p.super += s.super ? (size_t)first * (p.kb / 8) : 0;
    return p;
}

void weight_to_half(struct cuda *c, const struct kn_weight *w, uint32_t first, uint32_t n,
                    uint32_t ld, void *out)
{
    if (w->type == KN_BF16) {
        size_t threads = (size_t)n * w->p.ld;
        KERNEL(c, halves_of_bf16, dim3((unsigned)((threads + 255) / 256)), dim3(256), 0, w->p,
               first, n, ld, (half_t *)out);
        return;
    }
    kn_assert(ld == w->cols && (size_t)n * w->p.kb * 4 <= UINT32_MAX - 256 * HALVES_EACH);
    struct packed p = packed_from(w, first);
    uint32_t blocks = n * p.kb, each = 64 * HALVES_EACH;
#define HALVES(TYPE)                                                                               \
    KERNEL(c, (halves_of<quant<TYPE>>), dim3((blocks + each - 1) / each), dim3(256), 0, p, blocks, \
           (uint4 *)out)
    QUANT_SWITCH(w->type, HALVES)
#undef HALVES
}
