/* attention_many.cu: attention of many queries over halves: prompts, and scoring. A block has WARPS times MT times 16
 * queries and goes through its keys BN at a time, in a ring of RING places in shared memory:
 *
 *      barrier     K of tile i is there, V of tile i - 1 was read: its place takes V of tile i    (RING 3; with 2 places
 *      S = Q K^T, mask where a range cuts, softmax                                                 one thing less is on
 *      barrier     V of tile i is there, K of tile i was read: its place takes K of tile i + 1     its way)
 *      O += P V
 *
 * Where a key lies follows from its slot; threads work that out two tiles ahead and leave it in shared memory. A warp skips
 * tiles that none of its queries sees, and masks those that not all of them see.
 *
 * MT = 2 has each fragment of keys and values serve 32 queries, which halves what shared memory must deliver, at the price
 * of half as many blocks: it is for inputs that keep the device busy nonetheless (batch.cu decides). WIDE: rows of bf16 or
 * q8_0; before a barrier warps unpack those of the item in question that they have fetched. */
#include "attention_wide.cuh"

template <int D, int MT> struct many_shape {
    static constexpr int WARPS = D > 128 ? 2 : 4, THREADS = WARPS * 32, BN = D > 128 ? 32 : 64;
    static constexpr int RING = D > 128 ? 2 : 3, PITCH = D + 8, M = WARPS * 16 * MT;
    static constexpr bool Q_SHARED = D > 128 || MT > 1;
    static constexpr int PLACE = BN * PITCH; /* halves */
    static constexpr int HALVES = RING * PLACE + (Q_SHARED ? M * PITCH : 0);
    static constexpr int BYTES = HALVES * 2 + M * 8 + 2 * BN * 8;
};

/* Where the block's tiles of keys lie. */
struct many_keys {
    const uint8_t *k_run, *v_run;
    uint32_t lo, hi, tiles, type;
    uint64_t *offsets; /* [2][BN]: of tile i at i % 2 */
    half_t *ring;
};

/* Slot of the thread's key of tile i; past the end that of the last one. */
template <int BN>
DEV uint32_t many_slot(const struct dev_seq &s, const struct many_keys &f, uint32_t i)
{
    uint32_t j = f.lo + i * BN + threadIdx.x;
    return threadIdx.x < BN && i < f.tiles ? s.slots[min(j, f.hi - 1)] : 0;
}

/* Starts the copy of item n of K 0, V 0, K 1, V 1 ... into its place, and closes its group; none left: an empty group. */
template <int D, int MT, bool WIDE>
DEV void many_copy(const struct many_keys &f, uint32_t n, uint32_t d)
{
    typedef many_shape<D, MT> L;
    constexpr uint32_t LANES = row_lanes<D>::N, ROWS = L::THREADS / LANES;
    uint32_t row = threadIdx.x / LANES, col = threadIdx.x % LANES * 8;
    if (n < 2 * f.tiles && col < D) {
        const uint8_t *run = (n & 1 ? f.v_run : f.k_run) + (!WIDE && col < d ? col * 2 : 0);
        const uint64_t *offsets = f.offsets + (n >> 1 & 1) * L::BN + row;
        half_t *to = f.ring + n % L::RING * L::PLACE + row * L::PITCH + col;
        constexpr uint32_t STEPS = L::BN / ROWS, BATCH = STEPS < 4 ? STEPS : 4;
#pragma unroll
        for (uint32_t step = 0; step < STEPS;
             step += BATCH) { /* offsets first: copies are not overtaken */
            uint64_t at[BATCH];
#pragma unroll
            for (uint32_t i = 0; i < BATCH; i++)
                at[i] = offsets[(step + i) * ROWS];
#pragma unroll
            for (uint32_t i = 0; i < BATCH; i++)
                if (WIDE)
                    wide_copy<D>(run, at[i], f.type, d, threadIdx.x % LANES,
                                 to - col + (step + i) * ROWS * L::PITCH);
                else
                    cpa16(to + (step + i) * ROWS * L::PITCH, run + at[i], col < d);
        }
    }
    cpa_commit();
}

/* The thread's share of item n, which has come, becomes halves. */
template <int D, int MT> DEV void many_unpack(const struct many_keys &f, uint32_t n, uint32_t d)
{
    typedef many_shape<D, MT> L;
    constexpr int LANES = row_lanes<D>::N, ROWS = L::THREADS / LANES;
    wide_unpack<D, ROWS, L::BN / ROWS>(f.type, d,
                                       f.ring + n % L::RING * L::PLACE +
                                           threadIdx.x / LANES * L::PITCH);
}

/* What any of a warp's n queries sees, and what all of them see. */
struct attn_span {
    uint32_t lo, hi, all_lo, all_hi;
};

DEV struct attn_span warp_span(const uint2 *ranges, uint32_t n)
{
    struct attn_span s = {0xffffffffu, 0, 0, 0xffffffffu};
    for (uint32_t i = (uint32_t)lane_id(); i < n; i += 32) {
        uint2 r = ranges[i];
        s.lo = r.x < r.y ? min(s.lo, r.x) : s.lo;
        s.hi = max(s.hi, r.y);
        s.all_lo = max(s.all_lo, r.x < r.y ? r.x : 0xffffffffu);
        s.all_hi = min(s.all_hi, r.y);
    }
#pragma unroll
    for (int i = 16; i; i >>= 1) {
        s.lo = min(s.lo, __shfl_xor_sync(FULL_WARP, s.lo, i));
        s.hi = max(s.hi, __shfl_xor_sync(FULL_WARP, s.hi, i));
        s.all_lo = max(s.all_lo, __shfl_xor_sync(FULL_WARP, s.all_lo, i));
        s.all_hi = min(s.all_hi, __shfl_xor_sync(FULL_WARP, s.all_hi, i));
    }
    return s;
}

/* The lane's two queries of 16 that begin at m0. */
template <int D>
DEV void many_store(const struct attn_args &a, const struct attn_work &w, uint32_t m0,
                    const float *m, const float *l, const float (*o)[4])
{
    uint32_t t = (uint32_t)lane_id() & 3;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        uint32_t query = m0 + (uint32_t)lane_id() / 4 + 8 * r;
        float weight = quad_sum(l[r]);
        if (query >= w.n)
            continue;
        size_t at = attn_at(a, w, query);
        float scale = !w.whole ? 1.0f : weight > 0.0f ? 1.0f / weight : 0.0f;
        float *to = attn_target(a, w, at);
        if (!w.whole && t == 0)
            a.top[at * a.splits + blockIdx.y] = make_float2(m[r], weight);
#pragma unroll
        for (uint32_t n = 0; n < D / 8; n++)
            if (n * 8 < a.d) {
                const float v[2] = {o[n][2 * r] * scale, o[n][2 * r + 1] * scale};
                if (w.whole)
                    result_store<2>(a, at * a.d + n * 8 + 2 * t, v);
                else
                    *(float2 *)(to + n * 8 + 2 * t) = make_float2(v[0], v[1]);
            }
    }
}

template <int D, int MT, bool WIDE>
__global__ void __launch_bounds__(many_shape<D, MT>::THREADS,
                                  BLOCKS_AT_ONCE(D > 128                                ? 1
                                                 : D > 96 || MT > 1 || (WIDE && D > 64) ? 2
                                                                                        : 3))
    attn_many(struct attn_args a)
{
    typedef many_shape<D, MT> L;
    constexpr int BN = L::BN;
    DYN_SMEM(half_t, ring);
    half_t *qs = ring + L::RING * L::PLACE + warp_id() * 16 * MT * L::PITCH;
    uint2 *ranges = (uint2 *)(ring + L::HALVES), *mine = ranges + warp_id() * 16 * MT;
    early_next();
    /* tiles, ranges and slots came with the pass, before any of its kernels */
    const struct attn_work w = attn_work_of(a, L::M);
    struct dev_seq s = a.b.seqs[w.tile.seq];
    if (!WIDE)
        s.type = KN_F16;
    const struct many_keys f = {kv_run(s, 0, a.layer, 0, w.kv_head),
                                kv_run(s, 0, a.layer, 1, w.kv_head),
                                w.lo,
                                w.hi,
                                (w.hi - w.lo + BN - 1) / BN,
                                s.type,
                                (uint64_t *)(ranges + L::M),
                                ring};
    if (threadIdx.x < BN) {
        f.offsets[threadIdx.x] = key_offset<WIDE>(s, many_slot<BN>(s, f, 0));
        f.offsets[BN + threadIdx.x] = key_offset<WIDE>(s, many_slot<BN>(s, f, 1));
    }
    for (uint32_t i = threadIdx.x; i < (uint32_t)L::M; i += L::THREADS)
        ranges[i] = attn_range(a, w, i);
    early_wait();
    if (w.idle || (MT > 1 && !PAIRED_RUNS) || (WIDE && D > 128 && !WIDE_LARGE_RUNS))
        return;
    uint32_t q[L::Q_SHARED ? 1 : D / 16][4];
    float scale[2] = {a.scale, a.scale}, top = WIDE_LEAST;
    half_t *queries = L::Q_SHARED ? ring + L::RING * L::PLACE : ring;
    if (WIDE)
        wide_queries<D, L::M, L::WARPS>(a, w, queries);
    else
        queries_load<D, L::M, L::THREADS>(a, w, queries);
    if (WIDE || !L::Q_SHARED)
        __syncthreads();
    for (int r = 0; r < (WIDE ? 2 : 0); r++)
        scale[r] = wide_query_scale<D>(queries, (uint32_t)(warp_id() * 16 + lane_id() / 4 + 8 * r),
                                       a.scale);
    if (!L::Q_SHARED) { /* through the ring, before keys come */
#pragma unroll
        for (int k = 0; k < (L::Q_SHARED ? 0 : D / 16); k++)
            query_fragment<D>(q[L::Q_SHARED ? 0 : k], ring + warp_id() * 16 * L::PITCH, k);
    }
    __syncthreads();
    uint32_t before = (uint32_t)warp_id() * 16 * MT;
    const struct attn_span span = warp_span(mine, w.n > before ? min(w.n - before, 16u * MT) : 0);
    for (uint32_t n = 0; n < (uint32_t)L::RING - 1; n++)
        many_copy<D, MT, WIDE>(f, n, a.d);
    float o[MT][D / 8][4], m[MT][2], l[MT][2];
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
        m[mt][0] = m[mt][1] = -INFINITY;
        l[mt][0] = l[mt][1] = 0.0f;
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            o[mt][n][0] = o[mt][n][1] = o[mt][n][2] = o[mt][n][3] = 0.0f;
    }
    for (uint32_t i = 0; i < f.tiles; i++) {
        uint32_t start = f.lo + i * BN, slot = many_slot<BN>(s, f, i + 2);
        bool sees = start < span.hi && start + BN > span.lo;
        uint32_t p[MT][BN / 16][4];
        float sc[MT][BN / 8][4];
        cpa_wait<L::RING - 2>();
        if (WIDE)
            many_unpack<D, MT>(f, 2 * i, a.d);
        __syncthreads();
        many_copy<D, MT, WIDE>(f, 2 * i + L::RING - 1, a.d);
        if (sees) {
            scores_make<D, MT, BN, L::Q_SHARED>(q, qs, ring + 2 * i % L::RING * L::PLACE, sc);
            if (WIDE)
                wide_scores<D, BN>(ring + 2 * i % L::RING * L::PLACE, sc[0]);
            bool cut = start < span.all_lo || start + BN > min(span.all_hi, f.hi);
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                if (cut) {
                    uint2 r0 = mine[mt * 16 + lane_id() / 4],
                          r1 = mine[mt * 16 + lane_id() / 4 + 8];
                    scores_mask<BN>(start, make_uint2(r0.x, min(r0.y, f.hi)),
                                    make_uint2(r1.x, min(r1.y, f.hi)), sc[mt]);
                }
                softmax_step<D, BN, !WIDE>(scale, sc[mt], m[mt], l[mt], o[mt], p[mt]);
            }
        }
        cpa_wait<L::RING - 2>();
        if (WIDE)
            many_unpack<D, MT>(f, 2 * i + 1, a.d);
        __syncthreads();
        many_copy<D, MT, WIDE>(f, 2 * i + L::RING, a.d);
        if (threadIdx.x < BN) /* tile i's are used up */
            f.offsets[(i & 1) * BN + threadIdx.x] = key_offset<WIDE>(s, slot);
        const half_t *values = ring + (2 * i + 1) % L::RING * L::PLACE;
        if (sees && WIDE)
            wide_weights<D, BN>(values, sc[0], &top, o[0], p[0]);
        if (sees)
            values_add<D, MT, BN>(p, values, o);
    }
    cpa_wait<0>();
    if (WIDE)
        sums_scale<D>(top, o[0]);
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
        many_store<D>(a, w, ((uint32_t)warp_id() * MT + mt) * 16, m[mt], l[mt], o[mt]);
    splits_merge<L::WARPS, 4, true>(a, w, (uint32_t *)ranges);
}

/* ---- launches ---- */

/* Two fragments of queries a warp for these heads only: others are rare. */
#define PAIRED_SWITCH(d, F)                                                                        \
    if ((d) <= 64) {                                                                               \
        F(64);                                                                                     \
    } else if ((d) <= 96) {                                                                        \
        F(96);                                                                                     \
    } else {                                                                                       \
        F(128);                                                                                    \
    }

void attn_launch_many(struct cuda *c, const struct attn_args *a, dim3 grid, uint32_t queries,
                      bool wide)
{
#define LAUNCH_MANY(D, MT, WIDE)                                                                   \
    KERNEL_EARLY(c, (attn_many<D, MT, WIDE>), grid, dim3((many_shape<D, MT>::THREADS)),            \
                 (size_t)(many_shape<D, MT>::BYTES), *a)
#define ONE(D) LAUNCH_MANY(D, 1, false)
#define TWO(D) LAUNCH_MANY(D, 2, false)
#define OF_OTHERS(D) LAUNCH_MANY(D, 1, true)
    if (wide) {
        WIDE_SWITCH(a->d, OF_OTHERS)
    } else if (queries == ATTN_QUERIES_PAIRED) {
        PAIRED_SWITCH(a->d, TWO)
    } else {
        HEAD_SWITCH(a->d, ONE)
    }
#undef ONE
#undef TWO
#undef OF_OTHERS
#undef LAUNCH_MANY
}

int attn_open_many(struct cuda *c)
{
    static const int sizes[] = {16, 32, 64, 80, 96, 128, 256};
    bool ok = true;
#define ONE(D)                                                                                     \
    ok = ok && kernel_smem(c, (const void *)attn_many<D, 1, false>, many_shape<D, 1>::BYTES)
#define OF_OTHERS(D)                                                                               \
    ok = ok && kernel_smem(c, (const void *)attn_many<D, 1, true>, many_shape<D, 1>::BYTES)
#define TWO(D)                                                                                     \
    ok = ok && kernel_smem(c, (const void *)attn_many<D, 2, false>, many_shape<D, 2>::BYTES)
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        HEAD_SWITCH(sizes[i], ONE)
        WIDE_SWITCH(sizes[i], OF_OTHERS)
        if (c->sm >= ATTN_PAIRED_SM && sizes[i] >= 64 && sizes[i] <= 128) {
            PAIRED_SWITCH(sizes[i], TWO)
        }
    }
#undef ONE
#undef TWO
#undef OF_OTHERS
    return ok ? KN_OK : KN_EDEVICE;
}
