/* linear.cu: which way a product goes, and the forms of its input.
 *
 *      weights      rows 1..4              5..64                       more
 *      quantised    dp4a, x as int8        tensor cores, x as int8     expanded to halves slice by slice, cuBLAS
 *      F16, BF16    x as f32               x as halves or bf16, f32 sums: tensor cores up to 32 rows, cuBLAS beyond
 *      F32          x as f32               cuBLAS in f32, no TF32: with f32 caches nothing is ever rounded below f32
 *
 * Sums. int8: exact within a block of 32 (sub-block of 16), blocks added in f32 with kn_int8.h's two fma; linear_gemv.cu
 * and linear_gemm.cu say in which order. Halves: values beyond 2^15 would overflow, so if there are any, x is divided by a
 * power of two for the whole call and the sums are multiplied by it (exact unless values become subnormal). Which one follows
 * from the largest value, or from a bound that the op before knows: rmsnorm's from its gains, attention's from the halves
 * that it averages. An input that the op before left in 16 bits is taken as it is (capture.cu). */
#include "linear.cuh"
#include "narrow.cuh"

#define GRID_Y_MAX ((size_t)65535)
#define SLICE_TILE 256 /* rows of the library's largest tile */

/* ---- activations ---- */

static struct x_form x_form_of(enum kn_type type, uint32_t cols)
{
    const struct kn_int8_format *f = kn_int8_format(type);
    bool is_signed = f->table || f->code_bits == 8; /* as the planes have them: no zero point */
    struct x_form r = {x_form::START, is_signed ? 0 : (int)f->zero, cols / 32};
    if (f->n_sub == 2)
        r.kind = x_form::SUMS;
    else if (f->has_min)
        r.kind = x_form::MINIMUM;
    return r;
}

/* Four values a thread, eight threads a block of 32. Whole warps are in or out: kbp is a multiple of 4. GATE: of silu(x) *
 * up. */
template <bool GATE>
__global__ void __launch_bounds__(256)
    quantise(struct x_target to, const float *x, const float *up, uint32_t rows)
{
    uint32_t i = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y, n = to.form.kb * 8;
    early_next();
    early_wait();
    if (i >= to.kbp * 8)
        return;
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (row < rows && i < n) {
        v = ((const float4 *)x)[(size_t)row * n + i];
        if (GATE)
            v = gated4(v, ((const float4 *)up)[(size_t)row * n + i]);
    }
    x_store(to, row, i, v);
}

struct x_target x_int8_target(struct cuda *c, enum kn_type type, uint32_t cols, uint32_t rows_pad)
{
    struct x_target r = {c->scratch.x, NULL, (cols / 32 + 3) / 4 * 4, rows_pad,
                         x_form_of(type, cols)};
    r.scales = (uint2 *)(r.codes + (size_t)rows_pad * r.kbp * 32);
    kn_assert((size_t)rows_pad * r.kbp * 40 <= c->scratch.x_bytes);
    return r;
}

void x_to_int8(struct cuda *c, const struct x_target *to, const float *x, const float *up,
               uint32_t rows)
{
    dim3 grid((to->kbp * 8 + 255) / 256, to->rows_pad);
    if (up)
        KERNEL_EARLY(c, quantise<true>, grid, dim3(256), 0, *to, x, up, rows);
    else
        KERNEL_EARLY(c, quantise<false>, grid, dim3(256), 0, *to, x, up, rows);
}

/* The largest magnitude of n values, as the bits of a float, into *ret (zero before). */
__global__ void __launch_bounds__(256) largest(const float *x, size_t n, uint32_t *ret)
{
    DYN_SMEM(float, part); /* one a warp */
    size_t step = (size_t)gridDim.x * 256, i = (size_t)blockIdx.x * 256 + threadIdx.x;
    float m = 0.0f;
    early_next();
    early_wait();
    for (size_t at = i; at < n / 4; at += step)
        m = fmaxf(m, largest4(((const float4 *)x)[at]));
    if (i < n % 4)
        m = fmaxf(m, fabsf(x[n / 4 * 4 + i]));
    m = warp_max(m);
    if (lane_id() == 0)
        part[warp_id()] = m;
    __syncthreads();
    if (warp_id() != 0)
        return;
    m = warp_max(lane_id() < 8 ? part[lane_id()] : 0.0f);
    if (lane_id() == 0)
        atomicMax(ret, __float_as_uint(m));
}

/* Rows of cols floats to rows of ld halves or bf16, the rest zeros. Halves are divided by *known, or without it by what
 * `largest` says, which goes to *alpha. */
template <bool BF16>
__global__ void __launch_bounds__(256)
    narrow(const float *x, uint32_t cols, uint32_t ld, const float *known,
           const uint32_t *largest_bits, float *alpha, uint16_t *out)
{
    size_t row = blockIdx.y;
    uint32_t i = (blockIdx.x * 256 + threadIdx.x) * 8;
    early_next();
    early_wait();
    float scale = BF16 ? 1.0f : known ? *known : half_scale(*largest_bits), inverse = 1.0f / scale;
    if (!BF16 && !known && row == 0 && i == 0)
        *alpha = scale;
    if (i >= ld)
        return;
    float v[8];
    if (cols % 8 == 0) {
        float4 a = *(const float4 *)(x + row * cols + i);
        float4 b = *(const float4 *)(x + row * cols + i + 4);
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
        v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else {
        for (uint32_t k = 0; k < 8; k++)
            v[k] = i + k < cols ? x[row * cols + i + k] : 0.0f;
    }
    *(uint4 *)(out + row * ld + i) =
        make_uint4(narrow2<BF16>(v[0], v[1], inverse), narrow2<BF16>(v[2], v[3], inverse),
                   narrow2<BF16>(v[4], v[5], inverse), narrow2<BF16>(v[6], v[7], inverse));
}

cudaDataType x_type(const struct cuda *c, enum kn_type weight)
{
    if (weight == KN_F32)
        return CUDA_R_32F;
    return weight == KN_BF16 && c->sm >= 80 ? CUDA_R_16BF : CUDA_R_16F;
}

uint32_t x_rows_max(const struct cuda *c, cudaDataType type, uint32_t cols)
{
    size_t row = (size_t)(cols + 7) / 8 * 16;
    size_t n = type == CUDA_R_32F ? GRID_Y_MAX : KN_MIN(GRID_Y_MAX, c->scratch.x_bytes / row);
    return (uint32_t)KN_MAX((size_t)1, n);
}

struct x_plain x_to_plain(struct cuda *c, cudaDataType type, const float *x, uint32_t rows,
                          uint32_t cols, const float *scale)
{
    struct x_plain r = {x, type, rows, cols, cols, c->scratch.one + SCALAR_ONE};
    if (type == CUDA_R_32F)
        return r;
    uint16_t *out = (uint16_t *)c->scratch.x;
    float *alpha = c->scratch.one + SCALAR_NARROW;
    uint32_t *bits = c->scratch.words + WORD_LARGEST;
    r.ld = (cols + 7) / 8 * 8;
    r.x = out;
    dim3 grid((r.ld / 8 + 255) / 256, rows);
    kn_assert((size_t)rows * r.ld * 2 <= c->scratch.x_bytes);
    if (type == CUDA_R_16BF) {
        KERNEL_EARLY(c, narrow<true>, grid, dim3(256), 0, x, cols, r.ld, scale, bits, alpha, out);
        return r;
    }
    if (!scale) {
        size_t n = (size_t)rows * cols;
        unsigned blocks = (unsigned)KN_MIN((n + 4095) / 4096, (size_t)c->n_sms * 8);
        RUN(c, cudaMemsetAsync, bits, 0, sizeof *bits, c->stream);
        KERNEL_EARLY(c, largest, dim3(blocks), dim3(256), 8 * sizeof(float), x, n, bits);
    }
    KERNEL_EARLY(c, narrow<false>, grid, dim3(256), 0, x, cols, r.ld, scale, bits, alpha, out);
    r.alpha = scale ? scale : alpha;
    return r;
}

/* ---- cuBLAS ---- */

/* Row-major out = x . w^T is, column by column, w^T's transpose times x. */
static void blas(struct cuda *c, const void *w, uint32_t ldw, uint32_t n, const struct x_plain *x,
                 float *out, uint32_t ldc, bool add)
{
    bool f32 = x->type == CUDA_R_32F;
    if (c->failed != cudaSuccess)
        return;
    RUN_BLAS(c, cublasGemmEx, c->blas, CUBLAS_OP_T, CUBLAS_OP_N, (int)n, (int)x->rows, (int)x->cols,
             x->alpha, w, x->type, (int)ldw, x->x, x->type, (int)x->ld,
             c->scratch.one + (add ? SCALAR_ONE : SCALAR_ZERO), out, CUDA_R_32F, (int)ldc,
             f32 ? CUBLAS_COMPUTE_32F_PEDANTIC : CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
}

/* Rows of a slice of n, of which `most` fit: equal parts, so that none is too small to fill the device, of whole tiles. */
static uint32_t slice_rows(uint32_t n, uint32_t most)
{
    most = KN_MAX(1u, most);
    uint32_t parts = (n + most - 1) / most, even = (n + parts - 1) / parts;
    uint32_t tiles = (even + SLICE_TILE - 1) / SLICE_TILE * SLICE_TILE;
    return KN_MIN(tiles, most);
}

/* Are the weights what the library multiplies x with, without expansion? */
static bool as_it_is(const struct kn_weight *w, const struct x_plain *x)
{
    return w->type == KN_F32 || w->type == KN_F16 || (w->type == KN_BF16 && x->type == CUDA_R_16BF);
}

void product(struct cuda *c, const struct kn_weight *w, uint32_t first, uint32_t n,
             const struct x_plain *x, float *out, uint32_t ldc, bool add)
{
    if (as_it_is(w, x)) {
        size_t elem = w->type == KN_F32 ? 4 : 2;
        blas(c, w->p.a + (size_t)first * w->p.ld * elem, w->p.ld, n, x, out, ldc, add);
        return;
    }
    uint32_t ld = w->type == KN_BF16 ? w->p.ld : w->cols;
    uint32_t slice = slice_rows(n, (uint32_t)(c->scratch.w_bytes / (ld * sizeof(uint16_t))));
    for (uint32_t at = 0; at < n; at += slice) {
        uint32_t m = KN_MIN(slice, n - at);
        weight_to_half(c, w, first + at, m, ld, c->scratch.w);
        blas(c, c->scratch.w, ld, m, x, out + at, ldc, add);
    }
}

#define BIAS_ROWS 8 /* of a block */

/* out = bias, or out + bias: what a product is then added to. A thread keeps its biases for the block's rows. */
__global__ void __launch_bounds__(128)
    bias_rows(float *out, const float *bias, uint32_t n, uint32_t rows, bool add)
{
    uint32_t i = blockIdx.x * 128 + threadIdx.x, row = blockIdx.y * BIAS_ROWS;
    uint32_t end = min(row + BIAS_ROWS, rows);
    early_next();
    if (n % 4 == 0) {
        float4 b = i < n / 4 ? ((const float4 *)bias)[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        early_wait(); /* biases are weights */
        if (i >= n / 4)
            return;
#pragma unroll 4
        for (; row < end; row++) {
            float4 *at = (float4 *)(out + (size_t)row * n) + i, v = make_float4(0, 0, 0, 0);
            if (add)
                v = *at;
            *at = make_float4(v.x + b.x, v.y + b.y, v.z + b.z, v.w + b.w);
        }
        return;
    }
    early_wait();
    for (; row < end; row++)
        for (uint32_t k = i; k < n; k += gridDim.x * 128) {
            float *at = out + (size_t)row * n + k;
            *at = add ? *at + bias[k] : bias[k];
        }
}

const void *linear_kernel(void)
{
    return (const void *)bias_rows;
}

/* Rows first .. first + rows of one matrix's outputs. */
static void product_out(struct cuda *c, const struct op_linear *l, uint32_t i, uint32_t first,
                        const struct x_plain *x)
{
    const struct kn_weight *w = l->w[i];
    float *out = l->outs[i] + (size_t)first * w->rows;
    if (l->bias[i])
        KERNEL_EARLY(c, bias_rows,
                     dim3((w->rows + 511) / 512, (x->rows + BIAS_ROWS - 1) / BIAS_ROWS), dim3(128),
                     0, out, l->bias[i], w->rows, x->rows, (bool)l->add);
    product(c, w, 0, w->rows, x, out, w->rows, l->add || l->bias[i]);
}

/* Gate and up in one call: the tiles of two products of a few hundred rows fill the device's last wave better than those of
 * each alone. False: they are not of one shape, or lie so that no batch upwards in memory describes them. */
static bool product_pair(struct cuda *c, const struct op_linear *l, uint32_t i, uint32_t first,
                         const struct x_plain *x)
{
    const struct kn_weight *a = l->w[i], *b = l->w[i + 1];
    if (a->rows != b->rows || a->p.ld != b->p.ld || !as_it_is(a, x) || !as_it_is(b, x) ||
        x->type == CUDA_R_32F || l->bias[i] || l->bias[i + 1] || c->failed != cudaSuccess)
        return false;
    uint32_t low = a->p.a < b->p.a ? i : i + 1, high = 2 * i + 1 - low;
    const uint8_t *w = l->w[low]->p.a;
    float *out = l->outs[low];
    long long apart = (long long)(l->w[high]->p.a - w), out_apart = (intptr_t)l->outs[high];
    out_apart -= (intptr_t)out;
    if (apart % 16 != 0 || out_apart % 16 != 0 || out_apart <= 0)
        return false;
    RUN_BLAS(c, cublasGemmStridedBatchedEx, c->blas, CUBLAS_OP_T, CUBLAS_OP_N, (int)a->rows,
             (int)x->rows, (int)x->cols, x->alpha, w, x->type, (int)a->p.ld, apart / 2, x->x,
             x->type, (int)x->ld, 0, c->scratch.one + (l->add ? SCALAR_ONE : SCALAR_ZERO),
             out + (size_t)first * a->rows, CUDA_R_32F, (int)a->rows, out_apart / 4, 2,
             CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    return true;
}

/* ---- the choice ---- */

/* Of `rows` rows from `row` on, matrices first .. first + n. */
static struct jobs jobs_of(const struct op_linear *l, uint32_t first, uint32_t n, uint32_t row,
                           uint32_t rows)
{
    struct jobs j;
    memset(&j, 0, sizeof j);
    j.n = n;
    j.rows = rows;
    j.add = l->add;
    for (uint32_t i = 0; i < n; i++) {
        j.p[i] = l->w[first + i]->p;
        j.bias[i] = l->bias[first + i];
        j.out[i] = l->outs[first + i] + (size_t)row * l->w[first + i]->rows;
    }
    return j;
}

static bool by_library(enum kn_type type, uint32_t rows)
{
    return rows > GEMV_ROWS && (kn_int8_format(type) == NULL || rows > GEMM_ROWS);
}

static uint32_t int8_pad(uint32_t rows)
{
    return rows <= GEMV_ROWS ? gemv_pad(rows) : gemm_pad(rows);
}

struct wanted linear_wants(const struct cuda *c, const struct op_linear *l, const float *x,
                           size_t n)
{
    const struct kn_weight *w = l->w[0];
    struct wanted r = {x_type(c, w->type), w->type, l->rows, w->cols, 0}, none = WANTED_FLOATS;
    bool library = by_library(w->type, l->rows);
    if (l->x != x || (size_t)l->rows * w->cols != n || w->cols % 8 != 0)
        return none;
    for (uint32_t i = 0; i < l->n_w; i++)
        if (by_library(l->w[i]->type, l->rows) != library || x_type(c, l->w[i]->type) != r.type ||
            (!library && l->w[i]->type != w->type))
            return none;
    if (library)
        return l->rows > x_rows_max(c, r.type, w->cols) ? none : r;
    r.type = CUDA_R_8I;
    r.rows_pad = int8_pad(l->rows);
    return kn_int8_format(w->type) ? r : none;
}

/* Matrices first .. first + n, all of one type, by cuBLAS, as many rows at a time as the scratch holds. */
static void run_plain(struct cuda *c, const struct op_linear *l, uint32_t first, uint32_t n)
{
    cudaDataType type = x_type(c, l->w[first]->type);
    uint32_t cols = l->w[0]->cols, piece = even_piece(l->rows, x_rows_max(c, type, cols));
    const struct input known = c->input.x == l->x ? c->input : (struct input){};
    bool ready = known.x && type != CUDA_R_32F && known.type == type;
    for (uint32_t r = 0; r < l->rows; r += piece) {
        uint32_t rows = KN_MIN(piece, l->rows - r);
        struct x_plain x = {known.data, type, rows, cols, cols, known.scale};
        if (!ready)
            x = x_to_plain(c, type, l->x + (size_t)r * cols, rows, cols, known.scale);
        if (rows <= HALF_ROWS && type != CUDA_R_32F && as_it_is(l->w[first], &x)) {
            struct jobs j = jobs_of(l, first, n, r, rows);
            gemm_half(c, &j, &x);
            continue;
        }
        for (uint32_t i = first; i < first + n; i++)
            if (i + 1 < first + n && product_pair(c, l, i, r, &x))
                i++;
            else
                product_out(c, l, i, r, &x);
    }
}

static void run_group(struct cuda *c, const struct op_linear *l, uint32_t first, uint32_t n)
{
    enum kn_type type = l->w[first]->type;
    struct jobs j = jobs_of(l, first, n, 0, l->rows);
    if (by_library(type, l->rows)) {
        run_plain(c, l, first, n);
        return;
    }
    if (!kn_int8_format(type)) {
        gemv_floats(c, type, &j, l->x);
        return;
    }
    struct x_target to = x_int8_target(c, type, l->w[0]->cols, int8_pad(l->rows));
    if (c->input.x != l->x || c->input.type != CUDA_R_8I)
        x_to_int8(c, &to, l->x, NULL, l->rows);
    struct x_int8 x = {to.codes, to.scales, to.kbp, to.rows_pad};
    if (l->rows <= GEMV_ROWS)
        gemv_quantised(c, type, &j, &x);
    else
        gemm_quantised(c, type, &j, &x);
}

void run_linear(struct cuda *c, const struct op *o)
{
    const struct op_linear *l = &o->u.linear;
    for (uint32_t first = 0, end; first < l->n_w; first = end) {
        for (end = first + 1; end < l->n_w && l->w[end]->type == l->w[first]->type;)
            end++;
        run_group(c, l, first, end - first);
    }
}

int linear_open(struct cuda *c)
{
    if (!RUN_BLAS(c, cublasSetPointerMode, c->blas, CUBLAS_POINTER_MODE_DEVICE))
        return KN_EDEVICE;
    return gemm_open(c) == KN_OK ? gemm_half_open(c) : KN_EDEVICE;
}

void cuda_linear(struct kn *kn, uint32_t n_w, const struct kn_weight *const *w,
                 const float *const *bias, const float *x, uint32_t rows, float *const *outs,
                 bool add)
{
    struct op o = op_make(OP_LINEAR);
    kn_assert(n_w >= 1 && n_w <= KN_LINEAR_MAX);
    if (rows == 0)
        return;
    for (uint32_t i = 0; i < n_w; i++) {
        kn_assert(w[i]->magic == CUDA_WEIGHT_MAGIC && w[i]->cols == w[0]->cols);
        o.u.linear.w[i] = w[i];
        o.u.linear.bias[i] = bias ? bias[i] : NULL;
        o.u.linear.outs[i] = outs[i];
    }
    o.u.linear.x = x;
    o.u.linear.n_w = n_w;
    o.u.linear.rows = rows;
    o.u.linear.add = add;
    op_submit(cuda_of(kn), &o);
}
