/* attention_few.cu: attention of few queries (at most 16: decode rows, ends of prompts) over halves. Time is what memory
 * takes, so warps share nothing but the queries: each has every WARPS-th 16 keys of the block's split and a ring of its own
 *
 *      ring   | K 0 | V 0 | K 1 |     16 keys or values each; two are on their way while one is worked on
 *               V 1   K 2   V 2 ...   a place is filled again as soon as it was read, no barrier but the warp's
 *
 * and at the end the warps' sums, in their rings, are put together in ascending order. WIDE: rows of bf16 or q8_0, which the
 * warp unpacks when they are there. */
#include "attention_wide.cuh"

#define KEYS 16 /* of a step of a warp */
#define RING 3

template <int D> struct few_shape {
    static constexpr int WARPS = D > 128 ? 2 : 4, PITCH = D + 8;
    static constexpr bool Q_SHARED = D > 128;
    static constexpr int PLACE = KEYS * PITCH; /* halves */
    static constexpr int HALVES = (WARPS * RING + 1) * PLACE;
    static constexpr int BYTES = HALVES * 2 + WARPS * 16 * 8;
};

/* A warp's way through its keys: step i begins at first + i * stride. */
struct few_keys {
    const uint8_t *k_run, *v_run;
    uint32_t first, stride, end, steps, d, type;
};

/* Slot of the lane's key (lane % 16) of step i; past the end that of the last one. */
DEV uint32_t few_slot(const struct dev_seq &s, const struct few_keys &f, uint32_t i)
{
    uint32_t j = f.first + i * f.stride + ((uint32_t)lane_id() & 15);
    return i < f.steps ? s.slots[min(j, f.end - 1)] : 0;
}

/* Starts the copy of 16 rows, whose offsets lanes 0 .. 15 have, and closes its group; none: an empty group. */
template <int D, bool WIDE>
DEV void few_copy(const struct few_keys &f, const uint8_t *run, uint64_t offset, bool any,
                  half_t *to)
{
    constexpr uint32_t LANES = row_lanes<D>::N, ROWS = 32 / LANES;
    uint32_t lane = (uint32_t)lane_id(), col = lane % LANES * 8;
    if (any) {
#pragma unroll
        for (uint32_t r = 0; r < KEYS; r += ROWS) {
            uint64_t at = __shfl_sync(FULL_WARP, offset, (int)(r + lane / LANES));
            half_t *row = to + (r + lane / LANES) * (D + 8);
            if (WIDE)
                wide_copy<D>(run, at, f.type, f.d, lane % LANES, row);
            else if (col < D)
                cpa16(row + col, run + at + (col < f.d ? col * 2 : 0), col < f.d);
        }
    }
    cpa_commit();
}

/* What has come to a place becomes halves. */
template <int D> DEV void few_unpack(const struct few_keys &f, half_t *place)
{
    constexpr int LANES = row_lanes<D>::N, ROWS = 32 / LANES;
    wide_unpack<D, ROWS, KEYS / ROWS>(f.type, f.d, place + lane_id() / LANES * (D + 8));
}

/* Sums, maximum and weight of the warp's queries to shared memory. */
template <int D>
DEV void few_leave(uint32_t n, const float *m, const float *l, const float (*o)[4], float *sums,
                   float2 *stats)
{
    uint32_t g = (uint32_t)lane_id() / 4, t = (uint32_t)lane_id() & 3;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float weight = quad_sum(l[r]);
        if (g + 8 * r >= n)
            continue;
        if (t == 0)
            stats[g + 8 * r] = make_float2(m[r], weight);
#pragma unroll
        for (int i = 0; i < D / 8; i++)
            *(float2 *)(sums + (g + 8 * r) * (D + 8) + i * 8 + 2 * t) =
                make_float2(o[i][2 * r], o[i][2 * r + 1]);
    }
}

/* What the warps left together, four dims of a query a thread. */
template <int D>
DEV void few_join(const struct attn_args &a, const struct attn_work &w, const half_t *rings,
                  const float2 *stats)
{
    typedef few_shape<D> L;
    for (uint32_t i = threadIdx.x; i < w.n * (D / 4); i += L::WARPS * 32) {
        uint32_t m = i / (D / 4), col = i % (D / 4) * 4;
        float top = -INFINITY, weight = 0.0f, sum[4] = {};
        size_t at = attn_at(a, w, m);
#pragma unroll
        for (int k = 0; k < L::WARPS; k++)
            top = fmaxf(top, stats[k * 16 + m].x);
#pragma unroll
        for (int k = 0; k < L::WARPS; k++) {
            float2 v = stats[k * 16 + m];
            float f = v.y > 0.0f ? exp2_fast(v.x - top) : 0.0f;
            float4 o =
                *(const float4 *)((const float *)(rings + k * RING * L::PLACE) + m * (D + 8) + col);
            weight = fmaf(v.y, f, weight);
            sum[0] = fmaf(o.x, f, sum[0]);
            sum[1] = fmaf(o.y, f, sum[1]);
            sum[2] = fmaf(o.z, f, sum[2]);
            sum[3] = fmaf(o.w, f, sum[3]);
        }
        float scale = !w.whole ? 1.0f : weight > 0.0f ? 1.0f / weight : 0.0f;
        const float v[4] = {sum[0] * scale, sum[1] * scale, sum[2] * scale, sum[3] * scale};
        if (col < a.d && w.whole)
            result_store<4>(a, at * a.d + col, v);
        else if (col < a.d)
            *(float4 *)(attn_target(a, w, at) + col) = *(const float4 *)v;
        if (!w.whole && col == 0)
            a.top[at * a.splits + blockIdx.y] = make_float2(top, weight);
    }
}

template <int D, bool WIDE>
__global__ void __launch_bounds__(few_shape<D>::WARPS * 32, BLOCKS_AT_ONCE(D > 128          ? 1
                                                                           : WIDE && D > 80 ? 2
                                                                                            : 3))
    attn_few(struct attn_args a)
{
    typedef few_shape<D> L;
    DYN_SMEM(half_t, rings);
    half_t *ring = rings + warp_id() * RING * L::PLACE, *qs = rings + L::WARPS * RING * L::PLACE;
    float2 *stats = (float2 *)(rings + L::HALVES);
    early_next();
    /* tiles and slots came with the pass, before any of its kernels; keys, values and queries are of the ones in front */
    const struct attn_work w = attn_work_of(a, 16);
    struct dev_seq s = a.b.seqs[w.tile.seq];
    if (!WIDE)
        s.type = KN_F16;
    struct few_keys f = {kv_run(s, 0, a.layer, 0, w.kv_head),
                         kv_run(s, 0, a.layer, 1, w.kv_head),
                         w.lo + (uint32_t)warp_id() * KEYS,
                         L::WARPS * KEYS,
                         w.hi,
                         0,
                         a.d,
                         s.type};
    if (f.first < f.end)
        f.steps = (f.end - f.first + f.stride - 1) / f.stride;
    uint32_t slot0 = few_slot(s, f, 0), slot = few_slot(s, f, 1);
    early_wait();
    if (w.idle)
        return;
    uint64_t at = key_offset<WIDE>(s, slot0);
    few_copy<D, WIDE>(f, f.k_run, at, f.steps > 0, ring);
    few_copy<D, WIDE>(f, f.v_run, at, f.steps > 0, ring + L::PLACE);
    at = key_offset<WIDE>(s, slot);
    few_copy<D, WIDE>(f, f.k_run, at, f.steps > 1, ring + 2 * L::PLACE);
    if (WIDE)
        wide_queries<D, 16, L::WARPS>(a, w, qs);
    else
        queries_load<D, 16, L::WARPS * 32>(a, w, qs);
    const uint2 seen[2] = {attn_range(a, w, (uint32_t)lane_id() / 4),
                           attn_range(a, w, (uint32_t)lane_id() / 4 + 8)};
    __syncthreads();
    uint32_t q[L::Q_SHARED ? 1 : D / 16][4], place = 0;
#pragma unroll
    for (int k = 0; k < (L::Q_SHARED ? 0 : D / 16); k++)
        query_fragment<D>(q[L::Q_SHARED ? 0 : k], qs, k);
    float o[1][D / 8][4], m[2] = {-INFINITY, -INFINITY}, l[2] = {0.0f, 0.0f}, top = WIDE_LEAST;
    float scale[2] = {a.scale, a.scale};
    for (int r = 0; r < (WIDE ? 2 : 0); r++)
        scale[r] = wide_query_scale<D>(qs, (uint32_t)lane_id() / 4 + 8 * r, a.scale);
#pragma unroll
    for (int n = 0; n < D / 8; n++)
        o[0][n][0] = o[0][n][1] = o[0][n][2] = o[0][n][3] = 0.0f;
    for (uint32_t i = 0; i < f.steps; i++) { /* `at` belongs to step i + 1 */
        uint32_t start = f.first + i * f.stride;
        float sc[1][KEYS / 8][4];
        uint32_t p[1][KEYS / 16][4];
        slot = few_slot(s, f, i + 2);
        cpa_wait<RING - 1>();
        if (WIDE)
            few_unpack<D>(f, ring + place * L::PLACE);
        __syncwarp(); /* K is there */
        scores_make<D, 1, KEYS, L::Q_SHARED>(q, qs, ring + place * L::PLACE, sc);
        if (WIDE)
            wide_scores<D, KEYS>(ring + place * L::PLACE, sc[0]);
        __syncwarp(); /* and was read */
        few_copy<D, WIDE>(f, f.v_run, at, i + 1 < f.steps, ring + place * L::PLACE);
        place = place == RING - 1 ? 0 : place + 1;
        if (start < w.tile.all_lo || start + KEYS > min(w.tile.all_hi, w.hi))
            scores_mask<KEYS>(start, make_uint2(seen[0].x, min(seen[0].y, w.hi)),
                              make_uint2(seen[1].x, min(seen[1].y, w.hi)), sc[0]);
        softmax_step<D, KEYS, !WIDE>(scale, sc[0], m, l, o[0], p[0]);
        at = key_offset<WIDE>(s, slot);
        cpa_wait<RING - 1>();
        if (WIDE)
            few_unpack<D>(f, ring + place * L::PLACE);
        __syncwarp(); /* V is there */
        if (WIDE)
            wide_weights<D, KEYS>(ring + place * L::PLACE, sc[0], &top, o[0], p[0]);
        values_add<D, 1, KEYS>(p, ring + place * L::PLACE, o);
        __syncwarp();
        few_copy<D, WIDE>(f, f.k_run, at, i + 2 < f.steps, ring + place * L::PLACE);
        place = place == RING - 1 ? 0 : place + 1;
    }
    cpa_wait<0>();
    __syncwarp();
    if (WIDE)
        sums_scale<D>(top, o[0]);
    few_leave<D>(w.n, m, l, o[0], (float *)ring, stats + warp_id() * 16);
    __syncthreads();
    few_join<D>(a, w, rings, stats);
    splits_merge<L::WARPS, 4, true>(a, w, (uint32_t *)qs);
}

void attn_launch_few(struct cuda *c, const struct attn_args *a, dim3 grid, bool wide)
{
#define LAUNCH_FEW(D, WIDE)                                                                        \
    KERNEL_EARLY(c, (attn_few<D, WIDE>), grid, dim3(few_shape<D>::WARPS * 32),                     \
                 (size_t)few_shape<D>::BYTES, *a)
#define OF_HALVES(D) LAUNCH_FEW(D, false)
#define OF_OTHERS(D) LAUNCH_FEW(D, true)
    if (wide) {
        WIDE_SWITCH(a->d, OF_OTHERS)
    } else {
        HEAD_SWITCH(a->d, OF_HALVES)
    }
#undef OF_HALVES
#undef OF_OTHERS
#undef LAUNCH_FEW
}

int attn_open_few(struct cuda *c)
{
    static const int sizes[] = {16, 32, 64, 80, 96, 128, 256};
    bool ok = true;
#define SMEM(D) ok = ok && kernel_smem(c, (const void *)attn_few<D, false>, few_shape<D>::BYTES)
#define SMEM_WIDE(D) ok = ok && kernel_smem(c, (const void *)attn_few<D, true>, few_shape<D>::BYTES)
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        HEAD_SWITCH(sizes[i], SMEM)
        WIDE_SWITCH(sizes[i], SMEM_WIDE)
    }
#undef SMEM
#undef SMEM_WIDE
    return ok ? KN_OK : KN_EDEVICE;
}
