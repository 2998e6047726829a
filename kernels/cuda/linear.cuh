/* linear.cuh: shared by the linear files: activations in the forms that products want, and jobs. */
#ifndef BACKCAST_LINEAR_CUH
#define BACKCAST_LINEAR_CUH
#include "quant.cuh"

/* Activations under kn_int8.h's rule 1, [rows_pad] rows padded with zeros in both directions:
 *
 *      codes   [row][half h][kbp][16 bytes]      values 16h .. 16h + 15 of each block of 32
 *      scales  [kbp][rows_pad]                   da, and what the weights' type makes of the exact sums of codes:
 *
 *              one scale a block       X_START - ZERO * asum: where a sum of integers starts
 *              and a minimum           da * asum, a float
 *              two sub-blocks          the sums of the halves, 16 bits each
 *
 * Sums of integers start at X_START, the bits of 1.5 * 2^23: read as a float, a sum is then 1.5 * 2^23 + itself exactly (it is
 * below 2^22), so one subtraction stands for the conversion, of which a multiprocessor makes 16 a clock instead of 128. */
struct x_int8 {
    const uint8_t *codes;
    const uint2 *scales;
    uint32_t kbp, rows_pad;
};
#define X_START 0x4b400000

/* What the second word of x_int8's scales is. */
struct x_form {
    enum { START, MINIMUM, SUMS } kind;
    int zero;
    uint32_t kb;
};

/* Where activations go as int8. */
struct x_target {
    uint8_t *codes;
    uint2 *scales;
    uint32_t kbp, rows_pad;
    struct x_form form;
};

DEV uint32_t x_second(const struct x_form &form, float da, int low, int high)
{
    if (form.kind == x_form::SUMS)
        return ((uint32_t)low & 0xffffu) | (uint32_t)high << 16;
    if (form.kind == x_form::MINIMUM)
        return __float_as_uint(__fmul_rn(da, (float)(low + high)));
    return (uint32_t)(X_START - form.zero * (low + high));
}

/* The four values from 4 at on of a row, of which eight threads side by side hold a block of 32. Whole warps call it. */
DEV void x_store(const struct x_target &to, uint32_t row, uint32_t at, float4 v)
{
    uint32_t blk = at / 8, q = at % 8;
    float amax = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
#pragma unroll
    for (int o = 1; o < 8; o <<= 1)
        amax = fmaxf(amax, __shfl_xor_sync(FULL_WARP, amax, o));
    bool zeros = !(amax >= KN_INT8_AMAX_MIN);
    float inverse = zeros ? 0.0f : __fdiv_rn(127.0f, amax);
    int a = __float2int_rn(__fmul_rn(v.x, inverse)), b = __float2int_rn(__fmul_rn(v.y, inverse));
    int c = __float2int_rn(__fmul_rn(v.z, inverse)), d = __float2int_rn(__fmul_rn(v.w, inverse));
    uint32_t word = ((uint32_t)a & 255u) | ((uint32_t)b & 255u) << 8 | ((uint32_t)c & 255u) << 16 |
                    (uint32_t)d << 24;
    ((uint32_t *)to.codes)[(((size_t)row * 2 + q / 4) * to.kbp + blk) * 4 + q % 4] = word;
    int sum = a + b + c + d;
    sum += __shfl_xor_sync(FULL_WARP, sum, 1);
    sum += __shfl_xor_sync(FULL_WARP, sum, 2);
    int other = __shfl_xor_sync(FULL_WARP, sum, 4);
    float da = zeros ? 0.0f : __fdiv_rn(amax, 127.0f);
    if (q == 0)
        to.scales[(size_t)blk * to.rows_pad + row] =
            make_uint2(__float_as_uint(da), x_second(to.form, da, sum, other));
}

DEV const uint8_t *x_codes(const struct x_int8 &x, uint32_t row, uint32_t h, uint32_t blk)
{
    return x.codes + (((size_t)row * 2 + h) * x.kbp + blk) * 16;
}
DEV float x_scale(uint2 s)
{
    return __uint_as_float(s.x);
}
DEV int x_sum(uint2 s, int h) /* of half h; types with two sub-blocks */
{
    return (int)(int16_t)(s.y >> 16 * h & 0xffffu);
}
template <class Q>
DEV int x_start(uint2 s, int h) /* where the sum over half h, or the block, starts */
{
    if (Q::N_SUB == 2)
        return X_START - Q::ZERO * x_sum(s, h);
    return Q::MIN ? X_START : (int)s.y;
}
template <class Q> DEV float x_minimum(uint2 s, int h) /* what M is multiplied with */
{
    return Q::N_SUB == 2 ? __fmul_rn(x_scale(s), (float)x_sum(s, h)) : __uint_as_float(s.y);
}
DEV float sum_value(int sum) /* of a sum that began at X_START */
{
    return __fadd_rn(__uint_as_float((uint32_t)sum), -12582912.0f);
}

/* Up to three matrices of one type that share their input, in one launch: matrix i has the grid's columns of blocks from
 * first[i] on. */
struct jobs {
    struct packed p[KN_LINEAR_MAX];
    const float *bias[KN_LINEAR_MAX];
    float *out[KN_LINEAR_MAX];
    uint32_t first[KN_LINEAR_MAX + 1];
    uint32_t n, rows, add;
};

DEV uint32_t job_of(const struct jobs &j, uint32_t block)
{
    uint32_t i = 0;
    while (i + 1 < j.n && block >= j.first[i + 1])
        i++;
    return i;
}

DEV void job_store(const struct jobs &j, uint32_t i, uint32_t row, uint32_t o, float t)
{
    float *at = j.out[i] + (size_t)row * j.p[i].rows + o;
    if (j.bias[i])
        t += j.bias[i][o];
    *at = j.add ? *at + t : t;
}

/* Where the matrices have too few rows to fill the device, cols are cut in parts (a number that depends on the matrices and the
 * device alone): blockIdx.y is one, and parts_add adds their sums in ascending order. */
struct parts {
    float *sums;       /* [n][rows_pad][all matrices' rows], or NULL: there is one part */
    uint32_t n, steps; /* steps of a part */
    uint32_t rows_pad, rows, at[KN_LINEAR_MAX];
};

DEV void part_store(const struct jobs &j, const struct parts &p, uint32_t i, uint32_t row,
                    uint32_t o, float t)
{
    if (p.sums)
        p.sums[((size_t)blockIdx.y * p.rows_pad + row) * p.rows + p.at[i] + o] = t;
    else
        job_store(j, i, row, o, t);
}

/* For the oldest of n stages, of which all but one may be under way. */
#define STAGES_MIN 3
#define STAGES_MAX 6
DEV void stages_wait(uint32_t n)
{
    if (n == 6)
        cpa_wait<4>();
    else if (n == 5)
        cpa_wait<3>();
    else if (n == 4)
        cpa_wait<2>();
    else
        cpa_wait<1>();
}

/* linear.cu */
/* Activations as int8 in the scratch, `cols` a row, padded to rows_pad rows, for weights of this type. */
struct x_target x_int8_target(struct cuda *c, enum kn_type type, uint32_t cols, uint32_t rows_pad);
/* x [rows][cols] there; or silu(x) * up, if there is `up`. */
void x_to_int8(struct cuda *c, const struct x_target *to, const float *x, const float *up,
               uint32_t rows);
/* What type of activations a weight's library product takes: CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF. */
cudaDataType x_type(const struct cuda *c, enum kn_type weight);
/* x [rows][cols] in that type for `product`, in the scratch (f32: as it is). rows <= x_rows_max. scale: what halves are to
 * be divided by (device); NULL: found out. */
struct x_plain {
    const void *x;
    cudaDataType type;
    uint32_t rows, cols, ld;
    const float *alpha; /* device: what products are multiplied with */
};
struct x_plain x_to_plain(struct cuda *c, cudaDataType type, const float *x, uint32_t rows,
                          uint32_t cols, const float *scale);
uint32_t x_rows_max(const struct cuda *c, cudaDataType type, uint32_t cols);
/* Rows to take at a time where at most `most` can be: no small rest, whose product would leave the device idle. */
static inline uint32_t even_piece(uint32_t rows, uint32_t most)
{
    uint32_t parts = (rows + most - 1) / most;
    return parts > 1 ? (rows + parts - 1) / parts : most;
}
/* out [rows][ldc], columns 0 .. n - 1 (+)= x . (rows first .. first + n of w)^T, through cuBLAS. */
void product(struct cuda *c, const struct kn_weight *w, uint32_t first, uint32_t n,
             const struct x_plain *x, float *out, uint32_t ldc, bool add);

/* linear_gemv.cu: at most GEMV_ROWS rows. x: int8 for quantised weights (padded to gemv_pad), else f32. */
#define GEMV_ROWS 4
uint32_t gemv_pad(uint32_t rows);
void gemv_quantised(struct cuda *c, enum kn_type type, struct jobs *j, const struct x_int8 *x);
void gemv_floats(struct cuda *c, enum kn_type type, struct jobs *j, const float *x);

/* linear_gemm.cu: quantised weights, at most GEMM_ROWS rows, padded to gemm_pad. */
#define GEMM_ROWS 64
uint32_t gemm_pad(uint32_t rows);
int gemm_open(struct cuda *c);
void gemm_quantised(struct cuda *c, enum kn_type type, struct jobs *j, const struct x_int8 *x);
#define GEMM_TILE 64 /* rows of weights of a block */
/* Deals blocks to the matrices and cuts their rows of `steps` steps, for a kernel that takes at most rows_most rows (rows_pad:
 * now); returns the blocks. */
uint32_t parts_plan(struct cuda *c, struct jobs *j, uint32_t steps, uint32_t rows_most,
                    uint32_t rows_pad, struct parts *ret);
void parts_add(struct cuda *c, const struct jobs *j, const struct parts *p);
/* Stages of so many bytes: as many as leave shared memory for five blocks a multiprocessor, or for two where there is little. */
uint32_t stages_for(const struct cuda *c, uint32_t bytes);

/* linear_half.cu: weights in 16 bits, x as they are, at most HALF_ROWS rows: all that a decode pass has. */
#define HALF_ROWS 32
int gemm_half_open(struct cuda *c);
void gemm_half(struct cuda *c, struct jobs *j, const struct x_plain *x);
/* Eight values (16-bit types) or four from 16 bytes. */
template <int TYPE> DEV void chunk_values(uint4 v, float *ret)
{
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (TYPE == KN_F32) {
            ret[i] = __uint_as_float(w[i]);
        } else if (TYPE == KN_F16) {
            float2 f = unpack2(w[i]);
            ret[2 * i] = f.x;
            ret[2 * i + 1] = f.y;
        } else {
            ret[2 * i] = bf2f((uint16_t)w[i]);
            ret[2 * i + 1] = bf2f((uint16_t)(w[i] >> 16));
        }
    }
}

/* N values of a row of activations from `col` on; those behind the row's end are zero. */
template <int N> DEV void x_values(const float *x, uint32_t cols, uint32_t col, float *ret)
{
    if (cols % N == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            float4 v = *(const float4 *)(x + col + i);
            ret[i] = v.x;
            ret[i + 1] = v.y;
            ret[i + 2] = v.z;
            ret[i + 3] = v.w;
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < N; i++)
        ret[i] = col + i < cols ? x[col + i] : 0.0f;
}

#endif
