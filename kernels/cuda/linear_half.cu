/* linear_half.cu: products of 5 to 32 rows with weights in 16 bits, halves or bf16: tensor cores, the batch as N. Bound by the
 * bytes of the weights, as one row is.
 *
 *                      64 columns a step                      a block: 64 weight rows, 4 warps of 16
 *      weights   64 rows of 128 bytes  --cp.async-->  shared, 3 to 6 stages  --ldmatrix-->  A fragments
 *      x         8, 16 or 32 rows of 128 bytes, those that are not there zeros           -->  B fragments
 *
 * With the 4 stages that an H200's shared memory leaves five blocks, 24 KiB of weights of each are under way: 70 to 110 KiB a
 * multiprocessor, more than memory's speed times its delay. Weights of the first steps are asked for before the kernel that makes x
 * has ended. A library's product cannot, and picks tiles of which so few rows fill a part.
 *
 * Order of a sum: one f32 accumulator an output, 16 columns at a time in ascending order (within them the tensor core's own);
 * cut as linear_gemm.cu's where the matrices have few rows.
 *
 * Rows of 128 bytes in shared memory have their eight chunks of 16 swapped by row, chunk ^ row % 8, so that the eight rows of a
 * fragment lie in different banks. */
#include "linear.cuh"

#define THREADS 128
#define STEP 64   /* columns */
#define CHUNKS 8u /* of 16 bytes: a row of a step */
#define ROW_BYTES 128u
#define ROWS_AT_ONCE 16u /* that all threads copy with one chunk each */

struct half_args {
    struct jobs j;
    struct parts parts;
    const uint16_t *x; /* [rows][ld] */
    const float *alpha;
    uint32_t rows, ld, stages;
};

DEV uint32_t swapped(uint32_t row, uint32_t chunk)
{
    return row * ROW_BYTES + (chunk ^ (row & 7u)) * 16;
}

/* Starts the copies of this thread's chunk of every 16th row of one step, from row `first` on; rows behind `there` and columns
 * behind a row's end become zeros. clamp: such rows are the last one again. */
template <int N>
DEV void rows_copy(const uint16_t *from, uint32_t ld, uint32_t first, uint32_t there, bool clamp,
                   uint32_t step, uint8_t *to)
{
    uint32_t row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    bool ok = step * STEP + chunk * 8 < ld;
#pragma unroll
    for (uint32_t r = 0; r < N; r += ROWS_AT_ONCE) {
        if (N % ROWS_AT_ONCE != 0 && row >= N)
            break;
        uint32_t at = first + r + row;
        bool is = ok && (clamp || at < there);
        const uint16_t *src = from + (size_t)min(at, there - 1) * ld;
        cpa16(to + swapped(r + row, chunk), is ? src + step * STEP + chunk * 8 : src, is);
    }
}

template <bool BF16> DEV void multiply(float *d, const uint32_t *a, const uint32_t *b)
{
    if (BF16)
        mma_bf16(d, a, b);
    else
        mma_f16(d, a, b);
}

/* acc += 16 rows of weights by NT * 8 of x over 64 columns. */
template <bool BF16, int NT> DEV void step_add(const uint8_t *w, const uint8_t *x, float (*acc)[4])
{
    uint32_t lane = (uint32_t)lane_id(), row = (uint32_t)warp_id() * 16 + lane % 16;
#pragma unroll
    for (uint32_t k = 0; k < CHUNKS; k += 4) { /* 32 columns: two of 16 */
        uint32_t a[2][4];
        ldsm4(a[0], w + swapped(row, k + lane / 16));
        ldsm4(a[1], w + swapped(row, k + 2 + lane / 16));
#pragma unroll
        for (uint32_t nt = 0; nt < NT; nt++) {
            uint32_t b[4];
            ldsm4(b, x + swapped(nt * 8 + lane % 8, k + lane / 8));
            multiply<BF16>(acc[nt], a[0], b);
            multiply<BF16>(acc[nt], a[1], b + 2);
        }
    }
}

template <bool BF16, int NT>
__global__ void __launch_bounds__(THREADS, 4) gemm_16(struct half_args g)
{
    constexpr uint32_t STAGE = (GEMM_TILE + NT * 8) * ROW_BYTES, X_AT = GEMM_TILE * ROW_BYTES;
    DYN_SMEM(uint8_t, stages);
    uint32_t job = job_of(g.j, blockIdx.x), n = g.stages;
    const struct packed p = g.j.p[job];
    const uint16_t *weights = (const uint16_t *)p.a;
    uint32_t o = (blockIdx.x - g.j.first[job]) * GEMM_TILE;
    uint32_t step = blockIdx.y * g.parts.steps;
    uint32_t end = min(step + g.parts.steps, (p.ld + STEP - 1) / STEP);
    float acc[NT][4];
    early_next();
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
        acc[nt][0] = acc[nt][1] = acc[nt][2] = acc[nt][3] = 0.0f;
    for (uint32_t s = 0; s < n - 1 && step + s < end; s++)
        rows_copy<GEMM_TILE>(weights, p.ld, o, p.rows, true, step + s, stages + s * STAGE);
    early_wait();
    for (uint32_t s = 0; s < n - 1; s++) {
        if (step + s < end)
            rows_copy<NT * 8>(g.x, g.ld, 0, g.rows, false, step + s, stages + s * STAGE + X_AT);
        cpa_commit();
    }
    uint8_t *now = stages, *ahead = stages + (n - 1) * STAGE, *last = ahead;
    for (; step < end; step++) {
        stages_wait(n);
        __syncthreads(); /* the step has arrived, and the stage that is copied into below is read out */
        if (step + n - 1 < end) {
            rows_copy<GEMM_TILE>(weights, p.ld, o, p.rows, true, step + n - 1, ahead);
            rows_copy<NT * 8>(g.x, g.ld, 0, g.rows, false, step + n - 1, ahead + X_AT);
        }
        cpa_commit();
        step_add<BF16, NT>(now, now + X_AT, acc);
        now = now == last ? stages : now + STAGE;
        ahead = ahead == last ? stages : ahead + STAGE;
    }
    cpa_wait<0>();
    float alpha = *g.alpha;
    uint32_t lane = (uint32_t)lane_id(), mine = o + (uint32_t)warp_id() * 16 + lane / 4;
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t col = nt * 8 + 2 * (lane & 3) + (i & 1), row = mine + 8 * (i >> 1);
            if (row < p.rows && col < g.rows)
                part_store(g.j, g.parts, job, col, row, acc[nt][i] * alpha);
        }
}

/* ---- launches ---- */

template <bool BF16, int NT> static void launch(struct cuda *c, struct half_args *g)
{
    constexpr uint32_t STAGE = (GEMM_TILE + NT * 8) * ROW_BYTES;
    uint32_t steps = (g->j.p[0].ld + STEP - 1) / STEP;
    uint32_t blocks = parts_plan(c, &g->j, steps, HALF_ROWS, NT * 8, &g->parts);
    g->stages = stages_for(c, STAGE);
    KERNEL_EARLY(c, (gemm_16<BF16, NT>), dim3(blocks, g->parts.n), dim3(THREADS), g->stages * STAGE,
                 *g);
    parts_add(c, &g->j, &g->parts);
}

template <bool BF16> static void launch_rows(struct cuda *c, struct half_args *g)
{
    if (g->rows <= 8)
        launch<BF16, 1>(c, g);
    else if (g->rows <= 16)
        launch<BF16, 2>(c, g);
    else
        launch<BF16, 4>(c, g);
}

void gemm_half(struct cuda *c, struct jobs *j, const struct x_plain *x)
{
    struct half_args g;
    memset(&g, 0, sizeof g);
    g.j = *j;
    g.x = (const uint16_t *)x->x;
    g.alpha = x->alpha;
    g.rows = x->rows;
    g.ld = x->ld;
    kn_assert(x->rows <= HALF_ROWS && x->ld == j->p[0].ld);
    if (x->type == CUDA_R_16BF)
        launch_rows<true>(c, &g);
    else
        launch_rows<false>(c, &g);
}

template <bool BF16, int NT> static bool smem_ask(struct cuda *c)
{
    size_t bytes = STAGES_MAX * (GEMM_TILE + NT * 8) * ROW_BYTES;
    return kernel_smem(c, (const void *)gemm_16<BF16, NT>, KN_MIN(bytes, c->smem_max));
}

int gemm_half_open(struct cuda *c)
{
    bool ok = smem_ask<false, 1>(c) && smem_ask<false, 2>(c) && smem_ask<false, 4>(c) &&
              smem_ask<true, 1>(c) && smem_ask<true, 2>(c) && smem_ask<true, 4>(c);
    return ok ? KN_OK : KN_EDEVICE;
}
