/* linear_gemm.cu: products of 5 to 64 rows with quantised weights: int8 tensor cores, the batch as N.
 *
 *                      128 columns a step (4 blocks of 32)                    a block: 64 weight rows, 4 warps of 16
 *      weights   64 x [ a | b | s | super ]  --cp.async-->  shared, 3 to 6 stages -->  A fragments: codes unpacked in registers
 *      x int8    columns of 128, their scales --cp.async--> shared            -->  B fragments
 *
 * All that a step needs comes through the stages, so that five steps are under way: 20 KiB of 4-bit codes a block, and four
 * or five blocks a multiprocessor (fewer stages with more columns, or where shared memory is small). Weights of the first
 * steps are asked for before the kernel that makes x has ended. For q4_0 the loop has 20 instructions a tile of 16 x 8 x 32,
 * and about 150 for the rest of a step, which copies 16 bytes of codes twice a thread (sm_90).
 *
 * One mma makes a 16 x 8 tile of exact sums over a block of 32 (two for types with sub-blocks of 16, the other half of A
 * zero); they are scaled and added to the f32 accumulators at once. The zero point enters as the sums' starting value.
 *
 * Order of a sum: one accumulator an output, blocks ascending: kn_int8.h's rule to the bit, if one block of threads has the
 * whole row. Where the matrix has too few rows to fill the device, it is cut (struct parts).
 *
 * Rows of 64 bytes in shared memory have their four chunks of 16 swapped by row, chunk ^ (row / 2 % 4), so that the eight
 * rows of a fragment (ldmatrix) lie in different banks; rows of 32 bytes are padded to 48. */
#include "linear.cuh"

#define THREADS 128
#define ROWS GEMM_TILE
#define STEP 4 /* blocks of 32 a step */
#define PARTS_MAX 8u

/* A stage: the planes' parts, then x and its scales, whose size follows from cols, the padded rows of x. */
template <class Q> struct stage_of {
    static constexpr int A_PITCH = Q::A_BITS == 2 ? 48 : 64;
    static constexpr int B_PITCH = Q::B_BITS == 2 ? 48 : 16;
    static constexpr int A_PLANE = ROWS * A_PITCH;
    static constexpr int B_AT = A_PLANE * Q::A_PLANES;
    static constexpr int S_AT = B_AT + (Q::B_BITS ? ROWS * B_PITCH : 0);
    static constexpr int S_PITCH = STEP * Q::S_BYTES;
    static constexpr int SUPER_AT = S_AT + ROWS * S_PITCH;
    static constexpr int X_AT = SUPER_AT + (Q::SUPER ? ROWS * 4 : 0);
    static constexpr int X_COL = 2 * 64 + STEP * 8; /* bytes of a column */
};

struct gemm_args {
    struct jobs j;
    struct x_int8 x;
    struct parts parts;
    uint32_t stage, stages; /* bytes of a stage, and how many there are */
};

DEV uint32_t swapped(uint32_t row, uint32_t chunk)
{
    return row * 64 + ((chunk ^ (row >> 1 & 3u)) * 16);
}

/* What a thread copies of every step: 16 bytes of plane a once or twice (of each plane, 32 rows apart), and perhaps some of
 * the other planes. Pointers are those of step 0. */
template <class Q> struct copier {
    static constexpr uint32_t CHUNKS = Q::A_BITS == 2 ? 2 : 4; /* of 16 bytes a row */
    static constexpr uint32_t EACH = ROWS * CHUNKS / THREADS;
    const uint8_t *a[EACH], *b, *s, *super, *x, *xs;
    size_t upper;               /* from plane a to the second one of 8 bits */
    uint32_t a_to, x_to, first; /* where in the stage; the first block that an a comes from */
};

template <class Q>
DEV void copier_make(const struct gemm_args &g, const struct packed &p, uint32_t o, copier<Q> *ret)
{
    typedef stage_of<Q> L;
    typedef copier<Q> C;
    constexpr uint32_t B = Q::B_BITS ? Q::B_BITS : 1;
    uint32_t i = threadIdx.x, row = i / C::CHUNKS, chunk = i % C::CHUNKS;
#pragma unroll
    for (uint32_t k = 0; k < C::EACH; k++)
        ret->a[k] =
            row_of<Q>(p, min(o + row + k * (THREADS / C::CHUNKS), p.rows - 1)).a + chunk * 16;
    ret->a_to = Q::A_BITS == 2 ? row * L::A_PITCH + chunk * 16 : swapped(row, chunk);
    ret->first = Q::A_BITS == 2 ? 2 * chunk : chunk;
    ret->upper = (size_t)p.rows * p.kb * 16;
    ret->b = row_of<Q>(p, min(o + i / B, p.rows - 1)).b + i % B * 16;
    packed_row r = row_of<Q>(p, min(o + i % ROWS, p.rows - 1));
    ret->s = r.s;
    ret->super = (const uint8_t *)r.super;
    uint32_t part = i / 4; /* of a column of x: 2 * column + h */
    ret->x = g.x.codes + ((size_t)part * g.x.kbp + i % 4) * 16;
    ret->x_to = (part & 1) * g.x.rows_pad * 64 + swapped(part / 2, i % 4);
    ret->xs = (const uint8_t *)g.x.scales + i * 16;
}

/* Starts the copies of one step's weights. Blocks behind a row's end become zeros. */
template <class Q>
DEV void weights_copy(const struct packed &p, const copier<Q> &c, uint32_t step, uint8_t *stage)
{
    typedef stage_of<Q> L;
    typedef copier<Q> C;
    bool ok = step * STEP + c.first < p.kb;
#pragma unroll
    for (uint32_t k = 0; k < C::EACH; k++)
#pragma unroll
        for (uint32_t plane = 0; plane < Q::A_PLANES; plane++)
            cpa16(stage + plane * L::A_PLANE + c.a_to + k * (THREADS / C::CHUNKS) * L::A_PITCH,
                  c.a[k] + (ok ? plane * c.upper + (size_t)step * (STEP * Q::A_BYTES) : 0), ok);
    if (Q::B_BITS > 0 && threadIdx.x < ROWS * Q::B_BITS) {
        constexpr uint32_t B = Q::B_BITS ? Q::B_BITS : 1;
        cpa16(stage + L::B_AT + threadIdx.x / B * L::B_PITCH + threadIdx.x % B * 16,
              c.b + (size_t)step * (STEP * 4 * B), true);
    }
    if (threadIdx.x < ROWS)
        cpa_small<L::S_PITCH>(stage + L::S_AT + threadIdx.x * L::S_PITCH,
                              c.s + (size_t)step * L::S_PITCH);
    else if (Q::SUPER)
        cpa_small<4>(stage + L::SUPER_AT + threadIdx.x % ROWS * 4, c.super + step * STEP / 8 * 4);
}

/* And of its columns of x. */
template <class Q>
DEV void x_copy(const struct gemm_args &g, const copier<Q> &c, uint32_t step, uint8_t *stage)
{
    uint32_t cols = g.x.rows_pad; /* at most 64 */
    uint8_t *to = stage + stage_of<Q>::X_AT;
    const uint8_t *from = c.x + (size_t)step * (STEP * 16);
    for (uint32_t i = 0; i + threadIdx.x / 4 < cols * 2; i += THREADS / 4)
        cpa16(to + c.x_to + i / 2 * 64, from + (size_t)i * g.x.kbp * 16, true);
    if (threadIdx.x < cols * (STEP / 2))
        cpa16(to + cols * 128 + threadIdx.x * 16, c.xs + (size_t)step * STEP * cols * 8, true);
}

/* A fragments of blocks b and b + 1: a[0], a[1] rows g, g + 8, values 4t..; a[2], a[3] the same, values 16 + 4t... */
template <class Q> DEV void codes_fetch(const uint8_t *stage, uint32_t b, uint32_t (*a)[4])
{
    typedef stage_of<Q> L;
    uint32_t lane = (uint32_t)lane_id(), row = (uint32_t)warp_id() * 16 + lane / 4;
    uint32_t mine = (uint32_t)warp_id() * 16 + lane % 8,
             m = lane / 8; /* the row that ldsm4 asks for */
    int t = (int)(lane & 3);
    uint32_t words[2][2] = {{0, 0}, {0, 0}}; /* of plane a, for 2 and 4 bits: [block][row] */
    if (Q::A_BITS == 8) {
#pragma unroll
        for (uint32_t i = 0; i < 2; i++)
            ldsm4(a[i], stage + (m >> 1) * L::A_PLANE + swapped(mine + 8 * (m & 1), b + i));
    } else if (Q::A_BITS == 4) {
        uint32_t r[4];
        ldsm4(r, stage + swapped(mine + 8 * (m & 1), b + (m >> 1)));
        words[0][0] = r[0], words[0][1] = r[1], words[1][0] = r[2], words[1][1] = r[3];
    }
#pragma unroll
    for (uint32_t i = 0; i < 2; i++)
#pragma unroll
        for (uint32_t r = 0; r < 2; r++) {
            uint32_t at = row + 8 * r, wb = 0;
            if (Q::A_BITS == 2)
                words[i][r] = ((const uint32_t *)(stage + at * L::A_PITCH + (b + i) * 8))[t >> 1];
            if (Q::B_BITS > 0)
                wb = ((const uint32_t *)(stage + L::B_AT +
                                         at * L::B_PITCH))[(b + i) * Q::B_BITS + quad_word_b<Q>(t)];
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (Q::A_BITS < 8)
                    a[i][2 * h + r] = quad_of<Q>(words[i][r], wb, t, h);
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

/* Scales of blocks b and b + 1 of rows g and g + 8. */
template <class Q>
DEV void scales_fetch(const uint8_t *stage, uint32_t b, float (*d)[2][2], float (*m)[2][2])
{
    typedef stage_of<Q> L;
#pragma unroll
    for (uint32_t r = 0; r < 2; r++) {
        uint32_t row = (uint32_t)warp_id() * 16 + (uint32_t)lane_id() / 4 + 8 * r, s[2];
        const uint8_t *at = stage + L::S_AT + row * L::S_PITCH + b * Q::S_BYTES;
        if (Q::S_BYTES == 4) {
            uint2 v = *(const uint2 *)at;
            s[0] = v.x;
            s[1] = v.y;
        } else {
            uint32_t v = *(const uint32_t *)at;
            s[0] = v & 0xffffu;
            s[1] = v >> 16;
        }
        uint32_t super = Q::SUPER ? *(const uint32_t *)(stage + L::SUPER_AT + row * 4) : 0;
        scales_of<Q>(s[0], super, d[0][r], m[0][r]);
        scales_of<Q>(s[1], super, d[1][r], m[1][r]);
    }
}

template <class Q, int NT>
DEV void step_add(const struct gemm_args &g, const uint8_t *stage, float (*acc)[4])
{
    uint32_t lane = (uint32_t)lane_id(), t = lane & 3, cols = g.x.rows_pad, m = lane / 8;
    const uint8_t *x = stage + stage_of<Q>::X_AT;
#pragma unroll
    for (uint32_t b = 0; b < STEP; b += 2) {
        uint32_t a[2][4];
        float d[2][2][2], min[2][2][2];
        codes_fetch<Q>(stage, b, a);
        scales_fetch<Q>(stage, b, d, min);
        const uint8_t *row = x + (m & 1) * cols * 64 + swapped(lane % 8, b + (m >> 1));
        const uint8_t *scales = x + cols * 128 + (b * cols + 2 * t) * 8;
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            if (nt * 8 >= (int)cols)
                break;
            uint32_t bf[4]; /* both halves of block b, then of b + 1 */
            ldsm4(bf, row + nt * 512);
#pragma unroll
            for (uint32_t i = 0; i < 2; i++) {
                uint4 v = *(const uint4 *)(scales + i * cols * 8 + nt * 64);
                const uint2 xs[2] = {make_uint2(v.x, v.y), make_uint2(v.z, v.w)};
                tile_add<Q>(a[i], bf + 2 * i, 0, d[i], min[i], xs, acc[nt]);
                if (Q::N_SUB == 2)
                    tile_add<Q>(a[i], bf + 2 * i, 1, d[i], min[i], xs, acc[nt]);
            }
        }
    }
}

template <class Q, int NT>
DEV void sums_store(const struct gemm_args &g, uint32_t job, uint32_t mine, float (*acc)[4])
{
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t col = nt * 8 + 2 * ((uint32_t)lane_id() & 3) + (i & 1),
                     row = mine + 8 * (i >> 1);
            if (row >= g.j.p[job].rows || col >= g.j.rows)
                continue;
            part_store(g.j, g.parts, job, col, row, acc[nt][i]);
        }
}

/* Blocks a multiprocessor that registers must suffice for, at 64 columns. */
template <class Q> constexpr int blocks_least()
{
    return Q::N_SUB == 2 ? 3 : Q::SUPER || Q::B_BITS > 0 ? 4 : 5;
}

template <class Q, int NT>
__global__ void __launch_bounds__(THREADS, NT < 8 ? 4 : blocks_least<Q>())
    gemm_int8(struct gemm_args g)
{
    DYN_SMEM(uint8_t, stages);
    uint32_t job = job_of(g.j, blockIdx.x), n = g.stages;
    const struct packed p = g.j.p[job];
    uint32_t o = (blockIdx.x - g.j.first[job]) * ROWS;
    uint32_t step = blockIdx.y * g.parts.steps, end = min(step + g.parts.steps, p.kbp / STEP);
    float acc[NT][4];
    copier<Q> c;
    early_next();
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
        acc[nt][0] = acc[nt][1] = acc[nt][2] = acc[nt][3] = 0.0f;
    copier_make<Q>(g, p, o, &c);
    for (uint32_t s = 0; s < n - 1 && step + s < end; s++)
        weights_copy<Q>(p, c, step + s, stages + s * g.stage);
    early_wait();
    for (uint32_t s = 0; s < n - 1; s++) {
        if (step + s < end)
            x_copy<Q>(g, c, step + s, stages + s * g.stage);
        cpa_commit();
    }
    uint8_t *now = stages, *ahead = stages + (n - 1) * g.stage, *last = ahead;
    for (; step < end; step++) {
        stages_wait(n);
        __syncthreads(); /* the step has arrived, and the stage that is copied into below is read out */
        if (step + n - 1 < end) {
            weights_copy<Q>(p, c, step + n - 1, ahead);
            x_copy<Q>(g, c, step + n - 1, ahead);
        }
        cpa_commit();
        step_add<Q, NT>(g, now, acc);
        now = now == last ? stages : now + g.stage;
        ahead = ahead == last ? stages : ahead + g.stage;
    }
    cpa_wait<0>();
    sums_store<Q, NT>(g, job, o + (uint32_t)warp_id() * 16 + (uint32_t)lane_id() / 4, acc);
}

/* One thread an output: the parts' sums in ascending order. blockIdx.y: row, z: matrix. */
__global__ void __launch_bounds__(256) parts_sum(struct jobs j, struct parts p)
{
    uint32_t o = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y, job = blockIdx.z;
    early_next();
    early_wait();
    if (o >= j.p[job].rows)
        return;
    float t = 0.0f;
    const float *sums = p.sums + (job == 0 ? p.at[0] : job == 1 ? p.at[1] : p.at[2]) + o;
    for (uint32_t k = 0; k < p.n; k++)
        t += sums[((size_t)k * p.rows_pad + row) * p.rows];
    job_store(j, job, row, o, t);
}

/* ---- launches ---- */

uint32_t gemm_pad(uint32_t rows)
{
    return (rows + 7) / 8 * 8;
}

uint32_t parts_plan(struct cuda *c, struct jobs *j, uint32_t steps, uint32_t rows_most,
                    uint32_t rows_pad, struct parts *ret)
{
    uint32_t blocks = 0;
    memset(ret, 0, sizeof *ret);
    for (uint32_t i = 0; i < j->n; i++) {
        j->first[i] = blocks;
        ret->at[i] = ret->rows;
        blocks += (j->p[i].rows + GEMM_TILE - 1) / GEMM_TILE;
        ret->rows += j->p[i].rows;
    }
    /* three blocks for each multiprocessor, no part shorter than four steps, and whatever the rows: one number of parts */
    size_t bytes = (size_t)rows_most * ret->rows * sizeof(float);
    size_t n = KN_MIN(KN_MIN(3 * (uint32_t)c->n_sms / blocks, PARTS_MAX), steps / 4);
    n = KN_MAX((size_t)1, KN_MIN(n, c->scratch.l_bytes / bytes));
    ret->steps = (steps + (uint32_t)n - 1) / (uint32_t)n;
    ret->n = (steps + ret->steps - 1) / ret->steps;
    ret->rows_pad = rows_pad;
    ret->sums = ret->n > 1 ? c->scratch.l : NULL;
    return blocks;
}

void parts_add(struct cuda *c, const struct jobs *j, const struct parts *p)
{
    uint32_t most = 0;
    for (uint32_t i = 0; i < j->n; i++)
        most = KN_MAX(most, j->p[i].rows);
    if (p->sums)
        KERNEL_EARLY(c, parts_sum, dim3((most + 255) / 256, j->rows, j->n), dim3(256), 0, *j, *p);
}

uint32_t stages_for(const struct cuda *c, uint32_t bytes)
{
    size_t blocks = KN_MAX((size_t)2, KN_MIN((size_t)5, c->smem_max / (44 << 10)));
    size_t fit = (c->smem_max / blocks - 1024) / bytes; /* 1 KiB is the system's */
    return (uint32_t)KN_MAX((size_t)STAGES_MIN, KN_MIN(fit, (size_t)STAGES_MAX));
}

template <class Q> static uint32_t stage_bytes(uint32_t cols)
{
    return stage_of<Q>::X_AT + cols * stage_of<Q>::X_COL;
}

template <class Q, int NT> static void launch(struct cuda *c, struct gemm_args *g)
{
    uint32_t steps = g->j.p[0].kbp / STEP;
    uint32_t blocks = parts_plan(c, &g->j, steps, GEMM_ROWS, g->x.rows_pad, &g->parts);
    g->stage = stage_bytes<Q>(g->x.rows_pad);
    g->stages = stages_for(c, g->stage);
    KERNEL_EARLY(c, (gemm_int8<Q, NT>), dim3(blocks, g->parts.n), dim3(THREADS),
                 g->stages * g->stage, *g);
    parts_add(c, &g->j, &g->parts);
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

/* Both kernels of a type may ask for as much shared memory as there is, or as they can use. */
template <class Q> static bool smem_ask(struct cuda *c)
{
    size_t few = STAGES_MAX * (size_t)stage_bytes<Q>(16),
           many = STAGES_MAX * (size_t)stage_bytes<Q>(GEMM_ROWS);
    return kernel_smem(c, (const void *)gemm_int8<Q, 2>, KN_MIN(few, c->smem_max)) &&
           kernel_smem(c, (const void *)gemm_int8<Q, 8>, KN_MIN(many, c->smem_max));
}

int gemm_open(struct cuda *c)
{
    bool ok = true;
#define SMEM(TYPE) ok = ok && smem_ask<quant<TYPE>>(c)
    for (int type = 0; type <= KN_BF16; type++)
        QUANT_SWITCH(type, SMEM)
#undef SMEM
    return ok ? KN_OK : KN_EDEVICE;
}
