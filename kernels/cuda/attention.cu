/* attention.cu: softmax(q . k) v over slot lists, keys and values in halves, on tensor cores.
 *
 *      for each BN keys       K -> shared (cp.async, rows gathered through the slot list)
 *                             S = Q K^T         16 queries a warp, f32 sums        V is on its way meanwhile
 *                             online softmax in base 2
 *                             O = O * c + P V   P in halves                        the next K is on its way
 *
 * Shared rows are padded by 16 bytes: eight rows of a fragment lie in different banks. Queries are read once and stay in
 * registers (head sizes over 128: in shared memory). Head sizes between the compiled ones run on the next larger one, the
 * rest zeros. Order of sums: keys ascending in steps of 16 (inside the tensor core's own order), splits ascending. */
#include "attention.cuh"

template <int D, int WARPS, int BN> struct attn_shape {
    static constexpr int M = WARPS * 16, PITCH = D + 8;
    static constexpr bool Q_SHARED = D > 128;
    static constexpr int HALVES = 2 * BN * PITCH + (Q_SHARED ? M * PITCH : 0);
    static constexpr int BYTES = HALVES * 2 + M * 8;
};

/* Two neighbouring values of query m from column col on, as halves; zeros outside. */
DEV uint32_t query_pair(const struct attn_args &a, const struct attn_work &w, uint32_t m,
                        uint32_t col)
{
    if (m >= w.n || col >= a.d)
        return 0;
    float2 v = *(const float2 *)(a.q + attn_at(a, w, m) * a.d + col);
    return pack2(v.x, v.y);
}

/* Starts the copies of keys or values start .. start + BN. */
template <int D, int WARPS, int BN>
DEV void keys_copy(const struct dev_seq &s, const uint8_t *run, uint32_t d, uint32_t start,
                   const struct attn_span &span, half_t *to)
{
    constexpr uint32_t CHUNKS = D / 8;
    for (uint32_t i = threadIdx.x; i < BN * CHUNKS; i += WARPS * 32) {
        uint32_t r = i / CHUNKS, col = i % CHUNKS * 8, j = start + r;
        bool ok = j >= span.lo && j < span.hi && col < d;
        uint32_t slot = s.slots[ok ? j : span.lo];
        const uint8_t *src = run + (slot / KN_PAGE_ROWS) * s.stride +
                             ((slot % KN_PAGE_ROWS) * d + (ok ? col : 0)) * 2;
        cpa16(to + r * (D + 8) + col, src, ok);
    }
}

/* sc = Q K^T for BN keys. */
template <int D, int WARPS, int BN>
DEV void scores_make(const uint32_t (*q)[4], const half_t *qs, const half_t *ks, float (*sc)[4])
{
    typedef attn_shape<D, WARPS, BN> L;
    int lane = lane_id();
#pragma unroll
    for (int n = 0; n < BN / 8; n++)
        sc[n][0] = sc[n][1] = sc[n][2] = sc[n][3] = 0.0f;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t a[4];
        if (L::Q_SHARED)
            ldsm4(a, qs + (warp_id() * 16 + (lane & 15)) * L::PITCH + k * 16 + (lane >> 4) * 8);
        else
            for (int i = 0; i < 4; i++)
                a[i] = q[L::Q_SHARED ? 0 : k][i];
#pragma unroll
        for (int n = 0; n < BN / 16; n++) {
            uint32_t b[4];
            ldsm4(b, ks + (n * 16 + (lane & 7) + (lane >> 4) * 8) * L::PITCH + k * 16 +
                         (lane >> 3 & 1) * 8);
            mma_f16(sc[2 * n], a, b);
            mma_f16(sc[2 * n + 1], a, b + 2);
        }
    }
}

/* What lies outside the two rows' ranges goes. */
template <int BN> DEV void scores_mask(uint32_t start, uint2 range0, uint2 range1, float (*sc)[4])
{
#pragma unroll
    for (int n = 0; n < BN / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t j = start + n * 8 + 2 * (lane_id() & 3) + (i & 1);
            uint2 r = i < 2 ? range0 : range1;
            if (j < r.x || j >= r.y)
                sc[n][i] = -INFINITY;
        }
}

/* Scores to weights, two rows of a lane; m and l carry on, o is scaled to the new maximum. */
template <int D, int BN>
DEV void softmax_step(float scale, float (*sc)[4], float *m, float *l, float (*o)[4])
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = -INFINITY;
#pragma unroll
        for (int n = 0; n < BN / 8; n++) {
            sc[n][2 * r] *= scale;
            sc[n][2 * r + 1] *= scale;
            top = fmaxf(top, fmaxf(sc[n][2 * r], sc[n][2 * r + 1]));
        }
        top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 1));
        top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 2));
        top = fmaxf(top, m[r]);
        float base = top == -INFINITY ? 0.0f : top; /* a row that has seen nothing yet */
        float c = exp2_fast(m[r] - base), sum = 0.0f;
        m[r] = top;
#pragma unroll
        for (int n = 0; n < BN / 8; n++) {
            sc[n][2 * r] = exp2_fast(sc[n][2 * r] - base);
            sc[n][2 * r + 1] = exp2_fast(sc[n][2 * r + 1] - base);
            sum += sc[n][2 * r] + sc[n][2 * r + 1];
        }
        l[r] = l[r] * c + sum;
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            o[n][2 * r] *= c;
            o[n][2 * r + 1] *= c;
        }
    }
}

/* o += P V. */
template <int D, int BN> DEV void values_add(const float (*p)[4], const half_t *vs, float (*o)[4])
{
    int lane = lane_id();
#pragma unroll
    for (int k = 0; k < BN / 16; k++) {
        const uint32_t a[4] = {pack2(p[2 * k][0], p[2 * k][1]), pack2(p[2 * k][2], p[2 * k][3]),
                               pack2(p[2 * k + 1][0], p[2 * k + 1][1]),
                               pack2(p[2 * k + 1][2], p[2 * k + 1][3])};
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            uint32_t b[4];
            ldsm4t(b, vs + (k * 16 + (lane & 15)) * (D + 8) + n * 16 + (lane >> 4) * 8);
            mma_f16(o[2 * n], a, b);
            mma_f16(o[2 * n + 1], a, b + 2);
        }
    }
}

/* The lane's two rows: g and g + 8 of its warp's 16. */
template <int D>
DEV void rows_store(const struct attn_args &a, const struct attn_work &w, uint32_t m0,
                    const uint2 *seen, const float *m, float *l, const float (*o)[4])
{
    uint32_t t = (uint32_t)lane_id() & 3;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        uint32_t q = m0 + 8 * r;
        l[r] += __shfl_xor_sync(FULL_WARP, l[r], 1);
        l[r] += __shfl_xor_sync(FULL_WARP, l[r], 2);
        bool blind = seen[r].x == seen[r].y;
        if (q >= w.n || (a.top && blind))
            continue;
        size_t at = attn_at(a, w, q);
        float inverse = blind ? 0.0f : 1.0f / l[r];
        float *to = a.out + at * a.d;
        if (a.top) {
            at = at * gridDim.z + blockIdx.z;
            if (t == 0)
                a.top[at] = make_float2(m[r], l[r]);
            to = a.acc + at * a.d;
            inverse = 1.0f;
        }
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            if (n * 8 + 2 * t < a.d)
                *(float2 *)(to + n * 8 + 2 * t) =
                    make_float2(o[n][2 * r] * inverse, o[n][2 * r + 1] * inverse);
    }
}

template <int D, int WARPS, int BN>
__global__ void __launch_bounds__(WARPS * 32, 1) attn_half(struct attn_args a)
{
    typedef attn_shape<D, WARPS, BN> L;
    DYN_SMEM(half_t, ks);
    half_t *vs = ks + BN * L::PITCH, *qs = vs + BN * L::PITCH;
    uint2 *ranges = (uint2 *)(ks + L::HALVES);
    struct attn_work w = attn_work_of(a, L::M);
    const struct dev_seq s = a.b.seqs[w.tile.seq];
    uint32_t m0 = (uint32_t)warp_id() * 16 + (uint32_t)lane_id() / 4, t = (uint32_t)lane_id() & 3;
    for (uint32_t i = threadIdx.x; i < (uint32_t)L::M; i += WARPS * 32)
        ranges[i] = attn_range(a, w, i);
    if (L::Q_SHARED)
        for (uint32_t i = threadIdx.x; i < L::M * (D / 2); i += WARPS * 32)
            *(uint32_t *)(qs + i / (D / 2) * L::PITCH + i % (D / 2) * 2) =
                query_pair(a, w, i / (D / 2), i % (D / 2) * 2);
    __syncthreads();
    const struct attn_span span = attn_span_of(ranges, L::M);
    const uint2 seen[2] = {ranges[m0], ranges[m0 + 8]};
    const uint8_t *k_run = kv_run(s, 0, a.layer, 0, w.kv_head);
    const uint8_t *v_run = kv_run(s, 0, a.layer, 1, w.kv_head);
    uint32_t q[L::Q_SHARED ? 1 : D / 16][4];
    float o[D / 8][4], m[2] = {-INFINITY, -INFINITY}, l[2] = {0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < (L::Q_SHARED ? 0 : D / 16); k++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            q[L::Q_SHARED ? 0 : k][i] =
                query_pair(a, w, m0 + 8 * (i & 1), k * 16 + 8 * (i >> 1) + 2 * t);
#pragma unroll
    for (int n = 0; n < D / 8; n++)
        o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
    uint32_t start = span.lo / BN * BN;
    if (span.hi > 0)
        keys_copy<D, WARPS, BN>(s, k_run, a.d, start, span, ks);
    cpa_commit();
    for (; start < span.hi; start += BN) {
        float sc[BN / 8][4];
        cpa_wait<0>();
        __syncthreads(); /* K is there; nobody reads the old V any more */
        keys_copy<D, WARPS, BN>(s, v_run, a.d, start, span, vs);
        cpa_commit();
        scores_make<D, WARPS, BN>(q, qs, ks, sc);
        if (start < span.all_lo || start + BN > span.all_hi)
            scores_mask<BN>(start, seen[0], seen[1], sc);
        softmax_step<D, BN>(a.scale, sc, m, l, o);
        cpa_wait<0>();
        __syncthreads(); /* V is there; nobody reads K any more */
        if (start + BN < span.hi)
            keys_copy<D, WARPS, BN>(s, k_run, a.d, start + BN, span, ks);
        cpa_commit();
        values_add<D, BN>(sc, vs, o);
    }
    cpa_wait<0>();
    rows_store<D>(a, w, m0, seen, m, l, o);
}

/* ---- putting splits together ---- */

/* One block a tile and KV head's chunk; a warp takes its queries in turn, lanes are dims. base2: exponents' base. */
__global__ void __launch_bounds__(128)
    attn_merge(struct attn_args a, uint32_t queries, uint32_t splits, bool base2)
{
    struct attn_work w = attn_work_of(a, queries);
    for (uint32_t m = (uint32_t)warp_id(); m < w.n; m += 4) {
        uint32_t row = attn_row(w, m), lo = a.b.lo[row], hi = a.b.hi[row];
        size_t at = attn_at(a, w, m);
        uint32_t first = lo / a.split_len, end = lo < hi ? (hi - 1) / a.split_len + 1 : first;
        float top = -INFINITY, weight = 0.0f;
        for (uint32_t i = first; i < end; i++)
            top = fmaxf(top, a.top[at * splits + i].x);
        for (uint32_t i = first; i < end; i++) {
            float2 v = a.top[at * splits + i];
            weight += v.y * (base2 ? exp2_fast(v.x - top) : expf(v.x - top));
        }
        float inverse = first < end ? 1.0f / weight : 0.0f;
        for (uint32_t x = (uint32_t)lane_id(); x < a.d; x += 32) {
            float sum = 0.0f;
            for (uint32_t i = first; i < end; i++) {
                float from = a.top[at * splits + i].x - top;
                sum += a.acc[(at * splits + i) * a.d + x] * (base2 ? exp2_fast(from) : expf(from));
            }
            a.out[at * a.d + x] = sum * inverse;
        }
    }
}

/* ---- launches ---- */

/* F(D) for the smallest compiled size that holds d. */
#define HEAD_SWITCH(d, F)                                                                          \
    if (d <= 16) {                                                                                 \
        F(16);                                                                                     \
    } else if (d <= 32) {                                                                          \
        F(32);                                                                                     \
    } else if (d <= 64) {                                                                          \
        F(64);                                                                                     \
    } else if (d <= 80) {                                                                          \
        F(80);                                                                                     \
    } else if (d <= 96) {                                                                          \
        F(96);                                                                                     \
    } else if (d <= 128) {                                                                         \
        F(128);                                                                                    \
    } else {                                                                                       \
        F(256);                                                                                    \
    }
/* Warps of a tile of many queries, keys of a step. */
#define MANY_WARPS(D) ((D) > 128 ? 2 : 4)
#define KEYS(D) ((D) > 128 ? 32 : 64)

static void launch_half(struct cuda *c, const struct attn_args *a, dim3 grid, enum tile_class which)
{
#define FEW(D)                                                                                     \
    KERNEL(c, (attn_half<D, 1, KEYS(D)>), grid, dim3(32),                                          \
           (size_t)(attn_shape<D, 1, KEYS(D)>::BYTES), *a)
#define MANY(D)                                                                                    \
    KERNEL(c, (attn_half<D, MANY_WARPS(D), KEYS(D)>), grid, dim3(MANY_WARPS(D) * 32),              \
           (size_t)(attn_shape<D, MANY_WARPS(D), KEYS(D)>::BYTES), *a)
    if (which == TILE_FEW)
        HEAD_SWITCH(a->d, FEW)
    else
        HEAD_SWITCH(a->d, MANY)
#undef FEW
#undef MANY
}

int attention_open(struct cuda *c)
{
    static const int sizes[] = {16, 32, 64, 80, 96, 128, 256};
    bool ok = true;
#define SMEM(D)                                                                                    \
    ok = ok &&                                                                                     \
         kernel_smem(c, (const void *)attn_half<D, MANY_WARPS(D), KEYS(D)>,                        \
                     attn_shape<D, MANY_WARPS(D), KEYS(D)>::BYTES) &&                              \
         kernel_smem(c, (const void *)attn_half<D, 1, KEYS(D)>, attn_shape<D, 1, KEYS(D)>::BYTES)
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        HEAD_SWITCH(sizes[i], SMEM)
#undef SMEM
    return ok ? attn_open_f32(c) : KN_EDEVICE;
}

/* How many parts the contexts are cut in: enough for two blocks a multiprocessor, none shorter than 256 indices, and the
 * partial results fit in the scratch. */
static uint32_t splits_plan(const struct cuda *c, struct attn_args *a, uint32_t blocks)
{
    uint32_t span = a->b.span, n = KN_MIN(2 * (uint32_t)c->n_sms / blocks, span / 256);
    size_t part = (size_t)a->b.n_rows * a->n_heads * (a->d + 2) * sizeof(float);
    n = (uint32_t)KN_MIN((size_t)KN_MAX(1u, n), c->scratch.x_bytes / part);
    if (n <= 1) {
        a->split_len = span;
        return 1;
    }
    a->split_len = ((span + n - 1) / n + 63) / 64 * 64;
    n = (span + a->split_len - 1) / a->split_len;
    a->acc = (float *)c->scratch.x;
    a->top = (float2 *)(a->acc + (size_t)a->b.n_rows * a->n_heads * n * a->d);
    return n;
}

static void run_class(struct cuda *c, const struct op_attention *o, enum tile_class which,
                      const struct dev_tile *tiles)
{
    const struct dev_batch *b = &c->batch.view;
    uint32_t n_tiles = b->n_tiles[which], queries = c->batch.queries[which];
    struct attn_args a;
    if (n_tiles == 0)
        return;
    memset(&a, 0, sizeof a);
    a.b = *b;
    a.tiles = tiles;
    a.q = o->q;
    a.out = o->out;
    a.layer = o->layer;
    a.n_heads = o->n_heads;
    a.group = o->n_heads / o->n_kv_heads;
    a.d = o->head_dim;
    a.chunks = (a.group + queries - 1) / queries;
    a.scale = which == TILE_FLOAT ? o->scale : o->scale * 1.44269504088896341f;
    dim3 grid(n_tiles, o->n_kv_heads * a.chunks);
    uint32_t splits = splits_plan(c, &a, grid.x * grid.y);
    grid.z = splits;
    if (which == TILE_FLOAT)
        attn_launch_f32(c, &a, grid);
    else
        launch_half(c, &a, grid, which);
    if (splits > 1)
        KERNEL(c, attn_merge, dim3(grid.x, grid.y), dim3(128), 0, a, queries, splits,
               which != TILE_FLOAT);
}

void run_attention(struct cuda *c, const struct op *o)
{
    const struct dev_tile *tiles = c->batch.view.tiles;
    for (int i = 0; i < TILE_N; i++) {
        run_class(c, &o->u.attention, (enum tile_class)i, tiles);
        tiles += c->batch.view.n_tiles[i];
    }
}

void cuda_attention(struct kn *kn, const struct kn_batch *b, uint32_t layer, const float *q,
                    uint32_t n_heads, float scale, float *out)
{
    struct cuda *c = cuda_of(kn);
    struct op o = op_make(OP_ATTENTION);
    kn_assert(c->batch.b == b);
    if (b->n_rows == 0)
        return;
    const struct kn_kv *kv = b->seqs[b->seq[0]].kv;
    for (uint32_t s = 0; s < b->n_seqs; s++) /* one model a batch */
        kn_assert(b->seqs[s].kv->head_dim == kv->head_dim &&
                  b->seqs[s].kv->n_kv_heads == kv->n_kv_heads);
    kn_assert(kv->head_dim <= KN_HEAD_DIM_MAX && n_heads % kv->n_kv_heads == 0);
    batch_tiles(c, n_heads / kv->n_kv_heads, kv->head_dim);
    o.u.attention.q = q;
    o.u.attention.out = out;
    o.u.attention.layer = layer;
    o.u.attention.n_heads = n_heads;
    o.u.attention.n_kv_heads = kv->n_kv_heads;
    o.u.attention.head_dim = kv->head_dim;
    o.u.attention.scale = scale;
    op_submit(c, &o);
}
