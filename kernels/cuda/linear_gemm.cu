/* linear_gemm.cu: products of 5 to 64 rows with quantised weights: int8 tensor cores, the batch as N.
 *
 *                      128 columns a step (4 blocks of 32)                    a block: 64 weight rows, 4 warps of 16
 *      weights   64 x [ a | b ]   --cp.async-->  shared, 3 stages  -->  A fragments: codes unpacked in registers
 *      x int8    8 NT x [ 128 ]   --cp.async-->  shared            -->  B fragments
 *      scales of weights: registers, one step ahead
 *
 * One mma makes a 16 x 8 tile of exact sums over a block of 32 (two for types with sub-blocks of 16, the other half of A
 * zero); they are scaled and added to the f32 accumulators at once. The zero point enters as the sums' starting value.
 *
 * Order of a sum: one accumulator an output, blocks ascending: kn_int8.h's rule to the bit, if one block of threads has the
 * whole row. Where the matrix has too few rows to fill the device, cols are split in `splits` equal parts (a number that
 * depends on the matrix and the device alone), whose sums are added in ascending order.
 *
 * Rows of 64 bytes in shared memory have their four chunks of 16 swapped by row, chunk ^ (row / 2 % 4), so that the eight
 * rows of a fragment lie in different banks; rows of 32 bytes are padded to 48. */
#include "linear.cuh"

#define THREADS 128
#define ROWS 64
#define STAGES 3
#define STEP 4 /* blocks of 32 a step */
#define SPLITS_MAX 8

template <class Q, int NT> struct stage_of {
    static constexpr int A_PITCH = Q::A_BITS == 2 ? 48 : 64;
    static constexpr int B_PITCH = Q::B_BITS == 2 ? 48 : 16;
    static constexpr int A_PLANE = ROWS * A_PITCH;
    static constexpr int B_AT = A_PLANE * Q::A_PLANES;
    static constexpr int X_AT = B_AT + (Q::B_BITS ? ROWS * B_PITCH : 0);
    static constexpr int X_PLANE = NT * 8 * 64;
    static constexpr int S_AT = X_AT + 2 * X_PLANE;
    static constexpr int BYTES = S_AT + STEP * NT * 8 * 8;
};

struct gemm_args {
    struct jobs j;
    struct x_int8 x;
    uint32_t per; /* steps of a split */
    float *part;  /* [split][x.rows_pad][all matrices' rows], or NULL */
    uint32_t part_rows, part_at[KN_LINEAR_MAX];
};

DEV uint32_t swapped(uint32_t row, uint32_t chunk)
{
    return row * 64 + ((chunk ^ (row >> 1 & 3u)) * 16);
}

/* Starts the copies of one step into a stage. Blocks behind a row's end become zeros. */
template <class Q, int NT>
DEV void step_copy(const struct gemm_args &g, const struct packed &p, uint32_t o, uint32_t step,
                   uint8_t *stage)
{
    typedef stage_of<Q, NT> L;
    constexpr uint32_t CHUNKS = Q::A_BITS == 2 ? 2 : 4; /* of 16 bytes a row, in each plane */
    uint32_t blk0 = step * STEP;
    for (uint32_t i = threadIdx.x; i < ROWS * CHUNKS * Q::A_PLANES; i += THREADS) {
        uint32_t plane = i / (ROWS * CHUNKS), row = i / CHUNKS % ROWS, chunk = i % CHUNKS;
        uint32_t blk = blk0 + (Q::A_BITS == 2 ? 2 * chunk : chunk);
        bool ok = blk < p.kb;
        const uint8_t *src = p.a + plane * (size_t)p.rows * p.kb * 16 +
                             block_index(p, min(o + row, p.rows - 1), ok ? blk : 0) * Q::A_BYTES;
        uint32_t at = Q::A_BITS == 2 ? row * L::A_PITCH + chunk * 16 : swapped(row, chunk);
        cpa16(stage + plane * L::A_PLANE + at, src, ok);
    }
    if (Q::B_BITS > 0) {
        constexpr uint32_t B = Q::B_BITS > 0 ? Q::B_BITS : 1;
        for (uint32_t i = threadIdx.x; i < ROWS * B; i += THREADS) {
            uint32_t row = i / B, chunk = i % B;
            const uint8_t *src =
                p.b + padded_index(p, min(o + row, p.rows - 1), blk0) * (4 * B) + chunk * 16;
            cpa16(stage + L::B_AT + row * L::B_PITCH + chunk * 16, src, true);
        }
    }
    uint32_t cols = g.x.rows_pad; /* at most NT * 8 */
    for (uint32_t i = threadIdx.x; i < cols * 8; i += THREADS) {
        uint32_t h = i / (cols * 4), col = i / 4 % cols, chunk = i % 4;
        cpa16(stage + L::X_AT + h * L::X_PLANE + swapped(col, chunk),
              x_codes(g.x, col, h, blk0 + chunk), true);
    }
    for (uint32_t i = threadIdx.x; i < STEP * cols / 2; i += THREADS) {
        uint32_t b = i / (cols / 2), pair = i % (cols / 2);
        cpa16(stage + L::S_AT + (b * NT * 8 + pair * 2) * 8,
              g.x.scales + (size_t)(blk0 + b) * cols + pair * 2, true);
    }
}

/* Scales of the STEP blocks of rows g and g + 8, as they lie in the planes. */
template <class Q> struct step_scales {
    uint32_t s[2][STEP], super[2];
};

template <class Q>
DEV void scales_fetch(const struct packed &p, uint32_t o, uint32_t step, step_scales<Q> *ret)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        uint32_t row = min(o + 8 * r, p.rows - 1);
        size_t at = padded_index(p, row, step * STEP);
        if (Q::S_BYTES == 4) {
            uint4 v = *(const uint4 *)(p.s + at * 4);
            ret->s[r][0] = v.x;
            ret->s[r][1] = v.y;
            ret->s[r][2] = v.z;
            ret->s[r][3] = v.w;
        } else {
            uint2 v = *(const uint2 *)(p.s + at * 2);
            ret->s[r][0] = v.x & 0xffffu;
            ret->s[r][1] = v.x >> 16;
            ret->s[r][2] = v.y & 0xffffu;
            ret->s[r][3] = v.y >> 16;
        }
        ret->super[r] = Q::SUPER ? p.super[(size_t)row * (p.kb / 8) + step * STEP / 8] : 0;
    }
}

/* A fragment of block b: a[0], a[1] rows g, g + 8, values 4t..; a[2], a[3] the same, values 16 + 4t... */
template <class Q, int NT>
DEV void codes_fetch(const uint8_t *stage, uint32_t row, uint32_t b, uint32_t *a)
{
    typedef stage_of<Q, NT> L;
    int t = lane_id() & 3;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        uint32_t at = row + 8 * r, wb = 0;
        const uint32_t *words =
            (const uint32_t *)(stage + (Q::A_BITS == 2 ? at * L::A_PITCH + b * 8 : swapped(at, b)));
        if (Q::B_BITS > 0)
            wb = ((const uint32_t *)(stage + L::B_AT +
                                     at * L::B_PITCH))[b * Q::B_BITS + quad_word_b<Q>(t)];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t wa =
                Q::A_BITS == 8 ? words[h * (L::A_PLANE / 4) + t] : words[quad_word_a<Q>(t, h)];
            a[2 * h + r] = quad_of<Q>(wa, wb, t, h);
        }
    }
}

/* acc += the scaled sums of one sub-block (or block, h == 0 and both halves). */
template <class Q>
DEV void tile_add(const uint32_t *a, const uint32_t *b, int h, const float (*d)[2],
                  const float (*m)[2], const uint2 *xs, float *acc)
{
    bool both = Q::N_SUB == 1;
    int s0 = x_start<Q>(xs[0], h), s1 = x_start<Q>(xs[1], h), sum[4] = {s0, s1, s0, s1};
    const uint32_t part[4] = {both || h == 0 ? a[0] : 0u, both || h == 0 ? a[1] : 0u,
                              both || h == 1 ? a[2] : 0u, both || h == 1 ? a[3] : 0u};
    mma_s8(sum, part, b);
    float da[2] = {x_scale(xs[0]), x_scale(xs[1])};
    float sa[2] = {x_minimum<Q>(xs[0], h), x_minimum<Q>(xs[1], h)};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        acc[i] = __fmaf_rn(__fmul_rn(d[i >> 1][h], da[i & 1]), sum_value(sum[i]), acc[i]);
        if (Q::MIN)
            acc[i] = __fmaf_rn(m[i >> 1][h], sa[i & 1], acc[i]);
    }
}

template <class Q, int NT>
DEV void step_add(const struct gemm_args &g, const uint8_t *stage, const step_scales<Q> &sc,
                  float (*acc)[4])
{
    typedef stage_of<Q, NT> L;
    uint32_t lane = (uint32_t)lane_id(), row = (uint32_t)warp_id() * 16 + lane / 4, t = lane & 3;
#pragma unroll
    for (uint32_t b = 0; b < STEP; b++) {
        uint32_t a[4];
        float d[2][2], m[2][2];
        codes_fetch<Q, NT>(stage, row, b, a);
        scales_of<Q>(sc.s[0][b], sc.super[0], d[0], m[0]);
        scales_of<Q>(sc.s[1][b], sc.super[1], d[1], m[1]);
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            if (nt * 8 >= (int)g.x.rows_pad)
                break;
            uint32_t at = swapped(nt * 8 + lane / 4, b) + t * 4;
            const uint32_t bf[2] = {*(const uint32_t *)(stage + L::X_AT + at),
                                    *(const uint32_t *)(stage + L::X_AT + L::X_PLANE + at)};
            uint4 v = *(const uint4 *)(stage + L::S_AT + (b * NT * 8 + nt * 8 + 2 * t) * 8);
            const uint2 xs[2] = {make_uint2(v.x, v.y), make_uint2(v.z, v.w)};
            tile_add<Q>(a, bf, 0, d, m, xs, acc[nt]);
            if (Q::N_SUB == 2)
                tile_add<Q>(a, bf, 1, d, m, xs, acc[nt]);
        }
    }
}

template <class Q, int NT>
__global__ void __launch_bounds__(THREADS, 4) gemm_int8(struct gemm_args g)
{
    typedef stage_of<Q, NT> L;
    DYN_SMEM(uint8_t, stages);
    uint32_t job = job_of(g.j, blockIdx.x), lane = (uint32_t)lane_id();
    const struct packed p = g.j.p[job];
    uint32_t o = (blockIdx.x - g.j.first[job]) * ROWS;
    uint32_t mine = o + (uint32_t)warp_id() * 16 + lane / 4; /* and + 8 */
    uint32_t step = blockIdx.y * g.per, end = min(step + g.per, p.kbp / STEP);
    float acc[NT][4];
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
        acc[nt][0] = acc[nt][1] = acc[nt][2] = acc[nt][3] = 0.0f;
#pragma unroll
    for (uint32_t s = 0; s < STAGES - 1; s++) {
        if (step + s < end)
            step_copy<Q, NT>(g, p, o, step + s, stages + s * L::BYTES);
        cpa_commit();
    }
    step_scales<Q> now, next;
    if (step < end)
        scales_fetch<Q>(p, mine, step, &now);
    for (uint32_t s = 0; step + s < end; s++) {
        cpa_wait<STAGES - 2>();
        __syncthreads(); /* the step has arrived, and the stage that is copied into below is read out */
        uint32_t ahead = s + STAGES - 1;
        if (step + ahead < end)
            step_copy<Q, NT>(g, p, o, step + ahead, stages + ahead % STAGES * L::BYTES);
        cpa_commit();
        if (step + s + 1 < end)
            scales_fetch<Q>(p, mine, step + s + 1, &next);
        step_add<Q, NT>(g, stages + s % STAGES * L::BYTES, now, acc);
        now = next;
    }
    cpa_wait<0>();
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t col = nt * 8 + 2 * (lane & 3) + (i & 1), row = mine + 8 * (i >> 1);
            if (row >= p.rows || col >= g.j.rows)
                continue;
            if (g.part)
                g.part[((size_t)blockIdx.y * g.x.rows_pad + col) * g.part_rows + g.part_at[job] +
                       row] = acc[nt][i];
            else
                job_store(g.j, job, col, row, acc[nt][i]);
        }
}

/* One thread an output: the splits' sums in ascending order. blockIdx.y: row, z: matrix. */
__global__ void __launch_bounds__(256) splits_add(struct gemm_args g, uint32_t splits)
{
    uint32_t o = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y, job = blockIdx.z;
    if (o >= g.j.p[job].rows)
        return;
    float t = 0.0f;
    for (uint32_t s = 0; s < splits; s++)
        t += g.part[((size_t)s * g.x.rows_pad + row) * g.part_rows + g.part_at[job] + o];
    job_store(g.j, job, row, o, t);
}

/* ---- launches ---- */

uint32_t gemm_pad(uint32_t rows)
{
    return (rows + 7) / 8 * 8;
}

/* Parts of a row, so that there are two blocks for each multiprocessor; none shorter than four steps. */
static uint32_t splits_for(const struct cuda *c, uint32_t blocks, uint32_t steps)
{
    uint32_t want = 2 * (uint32_t)c->n_sms / blocks;
    return KN_MAX(1u, KN_MIN(KN_MIN(want, SPLITS_MAX), steps / 4));
}

template <class Q, int NT> static void launch(struct cuda *c, struct gemm_args *g)
{
    uint32_t blocks = 0, most = 0, steps = g->j.p[0].kbp / STEP;
    for (uint32_t i = 0; i < g->j.n; i++) {
        g->j.first[i] = blocks;
        g->part_at[i] = g->part_rows;
        blocks += (g->j.p[i].rows + ROWS - 1) / ROWS;
        g->part_rows += g->j.p[i].rows;
        most = KN_MAX(most, g->j.p[i].rows);
    }
    uint32_t splits = splits_for(c, blocks, steps);
    size_t part = (size_t)GEMM_ROWS * g->part_rows *
                  sizeof(float); /* whatever the rows: one number of splits */
    splits = (uint32_t)KN_MIN((size_t)splits, KN_MAX((size_t)1, c->scratch.l_bytes / part));
    g->per = (steps + splits - 1) / splits;
    splits = (steps + g->per - 1) / g->per;
    g->part = splits > 1 ? c->scratch.l : NULL;
    KERNEL(c, (gemm_int8<Q, NT>), dim3(blocks, splits), dim3(THREADS),
           STAGES * (stage_of<Q, NT>::BYTES), *g);
    if (splits > 1)
        KERNEL(c, splits_add, dim3((most + 255) / 256, g->j.rows, g->j.n), dim3(256), 0, *g,
               splits);
}

void gemm_quantised(struct cuda *c, enum kn_type type, struct jobs *j, const struct x_int8 *x)
{
    struct gemm_args g;
    memset(&g, 0, sizeof g);
    g.j = *j;
    g.x = *x;
#define GEMM(TYPE)                                                                                 \
    if (j->rows <= 16)                                                                             \
        launch<quant<TYPE>, 2>(c, &g);                                                             \
    else                                                                                           \
        launch<quant<TYPE>, 8>(c, &g)
    QUANT_SWITCH(type, GEMM)
#undef GEMM
}

int gemm_open(struct cuda *c)
{
    bool ok = true;
#define SMEM(TYPE)                                                                                 \
    ok = ok && kernel_smem(c, (const void *)gemm_int8<quant<TYPE>, 8>,                             \
                           STAGES * stage_of<quant<TYPE>, 8>::BYTES)
    for (int type = 0; type <= KN_BF16; type++)
        QUANT_SWITCH(type, SMEM)
#undef SMEM
    return ok ? KN_OK : KN_EDEVICE;
}
