/* rope.cu: (norm and) rotary embedding in place, of queries, keys or both, and with the keys' the row's way into its page.
 *
 *      rope q --.
 *      rope k --+-- held (capture.cu) -- one launch: a warp an item of a row, or some of them
 *      kv_write '                        items: heads of q | heads of k, to their pages too | heads of v, to their pages
 *
 * A lane has pairs 2l, 2l + 1 and 64 further: both styles are vectors then. It works out their angles once for all of its items,
 * while the launch in front ends.
 *
 * The angle is the f32 product position * inv_freq; it is reduced to [-1, 1] half turns in two floats (the second one is what
 * the product with 1 / pi lost), from where sincospif is accurate: no slow path for large positions. */
#include "kv.cuh"

#define WARPS 4
#define PER_LANE (KN_HEAD_DIM_MAX / 2 / 32) /* pairs */
#define PER_WARP_MAX 8                      /* items */

struct rope_args {
    struct dev_batch b;
    struct rope_set set;
    uint32_t items; /* of a row */
    uint32_t per;   /* of a warp */
};

DEV void angle_turn(float angle, float *sine, float *cosine)
{
    const float inverse = 0.31830988618379067154f, rest = 1.28412766e-8f; /* 1 / pi */
    float turns = __fmul_rn(angle, inverse);
    float lost = fmaf(angle, rest, fmaf(angle, inverse, -turns));
    turns -= 2.0f * rintf(0.5f * turns);
    sincospif(turns + lost, sine, cosine);
}

/* The index of a lane's i-th pair, and where its two values lie. */
DEV uint32_t pair_index(int i)
{
    return 2 * (uint32_t)lane_id() + (i & 1) + 64 * (i >> 1);
}
DEV uint2 pair_at(enum kn_rope_style style, uint32_t pairs, uint32_t p)
{
    return style == KN_ROPE_PAIRS ? make_uint2(2 * p, 2 * p + 1) : make_uint2(p, p + pairs);
}

/* Pairs of one head. VEC: they are even in number, and rows are multiples of 16 bytes. */
template <bool VEC>
DEV void pairs_load(const float *x, enum kn_rope_style style, uint32_t pairs, float2 *v)
{
#pragma unroll
    for (int i = 0; i < PER_LANE; i += 2) {
        uint32_t p = pair_index(i);
        v[i] = v[i + 1] = make_float2(0.0f, 0.0f);
        if (VEC && p < pairs && style == KN_ROPE_PAIRS) {
            float4 f = *(const float4 *)(x + 2 * p);
            v[i] = make_float2(f.x, f.y);
            v[i + 1] = make_float2(f.z, f.w);
        } else if (VEC && p < pairs) {
            float2 lo = *(const float2 *)(x + p), hi = *(const float2 *)(x + p + pairs);
            v[i] = make_float2(lo.x, hi.x);
            v[i + 1] = make_float2(lo.y, hi.y);
        } else if (!VEC) {
            for (int k = i; k < i + 2; k++)
                if (p + (k - i) < pairs) {
                    uint2 at = pair_at(style, pairs, p + (k - i));
                    v[k] = make_float2(x[at.x], x[at.y]);
                }
        }
    }
}

template <bool VEC>
DEV void pairs_store(float *x, enum kn_rope_style style, uint32_t pairs, const float2 *v)
{
#pragma unroll
    for (int i = 0; i < PER_LANE; i += 2) {
        uint32_t p = pair_index(i);
        if (VEC && p < pairs && style == KN_ROPE_PAIRS) {
            *(float4 *)(x + 2 * p) = make_float4(v[i].x, v[i].y, v[i + 1].x, v[i + 1].y);
        } else if (VEC && p < pairs) {
            *(float2 *)(x + p) = make_float2(v[i].x, v[i + 1].x);
            *(float2 *)(x + p + pairs) = make_float2(v[i].y, v[i + 1].y);
        } else if (!VEC) {
            for (int k = i; k < i + 2; k++)
                if (p + (k - i) < pairs) {
                    uint2 at = pair_at(style, pairs, p + (k - i));
                    x[at.x] = v[k].x;
                    x[at.y] = v[k].y;
                }
        }
    }
}

/* The same as halves or bf16. */
template <bool VEC>
DEV void pairs_store_narrow(uint32_t type, uint8_t *page, enum kn_rope_style style, uint32_t pairs,
                            const float2 *v)
{
#pragma unroll
    for (int i = 0; i < PER_LANE; i += 2) {
        uint32_t p = pair_index(i);
        if (VEC && p < pairs && style == KN_ROPE_PAIRS) {
            *(uint2 *)(page + 4 * p) =
                make_uint2(kv_pair(type, v[i].x, v[i].y), kv_pair(type, v[i + 1].x, v[i + 1].y));
        } else if (VEC && p < pairs) {
            *(uint32_t *)(page + 2 * p) = kv_pair(type, v[i].x, v[i + 1].x);
            *(uint32_t *)(page + 2 * (p + pairs)) = kv_pair(type, v[i].y, v[i + 1].y);
        } else if (!VEC) {
            for (int k = i; k < i + 2; k++)
                if (p + (k - i) < pairs) {
                    uint2 at = pair_at(style, pairs, p + (k - i));
                    kv_value_put(type, page, at.x, v[k].x);
                    kv_value_put(type, page, at.y, v[k].y);
                }
        }
    }
}

/* A head's values to their page. */
template <bool VEC> DEV void values_copy(const float *x, uint32_t d, uint32_t type, uint8_t *page)
{
    if (type == KN_Q8_0) {
        q8_line_put(x, d, page);
        return;
    }
    for (uint32_t i = (uint32_t)lane_id() * 4; i < d; i += 128)
        if (VEC) {
            float4 v = *(const float4 *)(x + i);
            if (type == KN_F32)
                *(float4 *)(page + i * 4) = v;
            else
                *(uint2 *)(page + i * 2) =
                    make_uint2(kv_pair(type, v.x, v.y), kv_pair(type, v.z, v.w));
        } else {
            for (uint32_t k = i; k < min(i + 4, d); k++)
                kv_value_put(type, page, k, x[k]);
        }
}

/* Dims first .. d of a key to its page, by the lanes that made them. */
DEV void rest_copy(const float *x, uint32_t first, uint32_t d, uint32_t type, uint8_t *page)
{
    for (uint32_t i = first + (uint32_t)lane_id(); i < d; i += 32)
        kv_value_put(type, page, i, x[i]);
}

/* One head in place; page: where it goes besides, NULL: nowhere. */
template <bool VEC>
DEV void head_turn(const struct kn_rope &r, const float *sines, const float *cosines, float *x,
                   uint8_t *page, uint32_t type)
{
    uint32_t pairs = r.n_rot / 2;
    float2 v[PER_LANE];
    pairs_load<VEC>(x, r.style, pairs, v);
    if (r.norm) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            sum += v[i].x * v[i].x + v[i].y * v[i].y;
        for (uint32_t i = r.n_rot + (uint32_t)lane_id(); i < r.head_dim; i += 32)
            sum += x[i] * x[i];
        float scale = 1.0f / sqrtf(warp_sum(sum) / (float)r.head_dim + r.norm_eps);
        for (uint32_t i = r.n_rot + (uint32_t)lane_id(); i < r.head_dim; i += 32)
            x[i] = x[i] * scale * r.norm[i];
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            if (pair_index(i) < pairs) {
                uint2 at = pair_at(r.style, pairs, pair_index(i));
                v[i].x = v[i].x * scale * r.norm[at.x];
                v[i].y = v[i].y * scale * r.norm[at.y];
            }
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
        v[i] = make_float2(v[i].x * cosines[i] - v[i].y * sines[i],
                           v[i].x * sines[i] + v[i].y * cosines[i]);
    pairs_store<VEC>(x, r.style, pairs, v);
    if (!page)
        return;
    if (type == KN_Q8_0) { /* blocks are of neighbours, which other lanes have made */
        __syncwarp();
        q8_line_put(x, r.head_dim, page);
        return;
    }
    if (type == KN_F32)
        pairs_store<VEC>((float *)page, r.style, pairs, v);
    else
        pairs_store_narrow<VEC>(type, page, r.style, pairs, v);
    rest_copy(x, r.n_rot, r.head_dim, type, page);
}

template <bool VEC> __global__ void __launch_bounds__(WARPS * 32, 4) rope(struct rope_args a)
{
    const struct rope_set &set = a.set;
    uint32_t row = blockIdx.x, item = (blockIdx.y * WARPS + (uint32_t)warp_id()) * a.per;
    uint32_t end = min(item + a.per, a.items), slot = 0;
    float sines[PER_LANE], cosines[PER_LANE];
    struct dev_seq s;
    early_next();
    /* positions, sequences and slots came with the pass, before any of its kernels */
    float position = (float)a.b.positions[row];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        sines[i] = 0.0f;
        cosines[i] = 1.0f;
        if (pair_index(i) < set.r[0].n_rot / 2)
            angle_turn(__fmul_rn(position, set.r[0].inv_freq[pair_index(i)]), &sines[i],
                       &cosines[i]);
    }
    if (set.kv.v) {
        slot = a.b.slots[row];
        s = a.b.seqs[a.b.seq[row]];
    }
    early_wait();
    for (; item < end; item++) {
        uint32_t head = item, n = 0;
        for (; n < set.n && head >= set.r[n].n_heads; n++)
            head -= set.r[n].n_heads;
        if (n == set.n) { /* a value */
            values_copy<VEC>(set.kv.v + ((size_t)row * set.kv.n_heads + head) * set.kv.d, set.kv.d,
                             s.type, kv_row(s, slot, set.kv.layer, 1, head));
            continue;
        }
        const struct kn_rope &r = set.r[n];
        float *x = set.x[n] + ((size_t)row * r.n_heads + head) * r.head_dim;
        bool is_key = set.kv.v && set.kv.k == set.x[n];
        head_turn<VEC>(r, sines, cosines, x, is_key ? kv_row(s, slot, set.kv.layer, 0, head) : NULL,
                       is_key ? s.type : (uint32_t)KN_F32);
    }
}

const void *rope_kernel(void)
{
    return (const void *)rope<true>;
}

/* ---- what goes together ---- */

static bool is_rope_fit(const struct rope_set *set, const struct op_rope *o)
{
    const struct kn_rope *r = &set->r[0];
    if (set->n == 0)
        return !set->kv.v;
    return set->n < ROPES_MAX && r->style == o->r.style && r->head_dim == o->r.head_dim &&
           r->n_rot == o->r.n_rot && r->inv_freq == o->r.inv_freq && set->x[0] != o->x &&
           (!set->kv.v || (set->kv.v != o->x && set->kv.k != o->x));
}

/* The keys must be among what turns here, with heads of the pages' size. */
static bool is_write_fit(const struct rope_set *set, const struct op_kv_write *w)
{
    bool found = false;
    if (set->kv.v || w->n_heads == 0)
        return false;
    for (uint32_t i = 0; i < set->n; i++) {
        if (set->x[i] == w->v)
            return false;
        found = found || (set->x[i] == w->k && set->r[i].n_heads == w->n_heads &&
                          set->r[i].head_dim == w->d);
    }
    return found;
}

bool rope_joins(const struct rope_set *set, const struct op *o)
{
    return o->kind == OP_ROPE ? is_rope_fit(set, &o->u.rope)
                              : o->kind == OP_KV_WRITE && is_write_fit(set, &o->u.kv_write);
}

void rope_join(struct rope_set *set, const struct op *o)
{
    if (o->kind == OP_KV_WRITE) {
        set->kv = o->u.kv_write;
        return;
    }
    set->r[set->n] = o->u.rope.r;
    set->x[set->n++] = o->u.rope.x;
}

void rope_run(struct cuda *c, const struct rope_set *set)
{
    const struct kn_rope *r = &set->r[0];
    struct rope_args a;
    memset(&a, 0, sizeof a);
    a.b = c->batch.view;
    a.set = *set;
    a.items = set->kv.v ? set->kv.n_heads : 0;
    for (uint32_t i = 0; i < set->n; i++)
        a.items += set->r[i].n_heads;
    if (a.b.n_rows == 0)
        return;
    /* all the warps that the device holds, then several items a warp */
    uint64_t warps = (uint64_t)a.b.n_rows * a.items / (32 * (uint64_t)c->n_sms);
    a.per = (uint32_t)KN_MAX((uint64_t)1, KN_MIN(warps, (uint64_t)PER_WARP_MAX));
    dim3 grid(a.b.n_rows, (a.items + WARPS * a.per - 1) / (WARPS * a.per));
    if (r->n_rot % 4 == 0 && r->head_dim % 4 == 0)
        KERNEL_EARLY(c, rope<true>, grid, dim3(WARPS * 32), 0, a);
    else
        KERNEL_EARLY(c, rope<false>, grid, dim3(WARPS * 32), 0, a);
}

void run_rope(struct cuda *c, const struct op *o)
{
    struct rope_set set;
    memset(&set, 0, sizeof set);
    rope_join(&set, o);
    rope_run(c, &set);
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
