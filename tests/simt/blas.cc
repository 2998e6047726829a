/* blas.cc: cuBLAS's matrix products on the CPU, put on the handle's stream like a kernel.
 *
 *      C (m x n) = alpha * op(A) (m x k) . op(B) (k x n) + beta * C        column-major: element (i, j) at i + j * ld
 *
 * Inputs f16, bf16, f32 with f32 sums in ascending k (one accumulator an output); int8 with exact int32 sums. With beta 0
 * the old C is not read (it may be NaN). Math modes change nothing: f32 stays f32. What cuBLAS refuses is refused. */
#include "cublas_v2.h"
#include "exec.h"
#include "memory.h"
#include "race.h"
#include "runtime.h"
#include "stream.h"

struct cublasContext {
    unsigned magic;
    cudaStream_t stream;
    bool on_device; /* alpha and beta are read when the product runs */
};

namespace simt
{

constexpr unsigned BLAS_MAGIC = 0x626c6173u;

struct matrix {
    char *p;
    cudaDataType type;
    int ld, rows, cols; /* as stored */
    long long stride;   /* elements from one of a batch to the next */
};

struct product {
    bool ta, tb;
    int m, n, k, batch;
    float alpha, beta;
    int alpha_i, beta_i;
    const void *alpha_at, *beta_at; /* of device memory, or NULL */
    matrix a, b, c;
};

static size_t type_bytes(cudaDataType t)
{
    return t == CUDA_R_32F || t == CUDA_R_32I ? 4 : t == CUDA_R_8I ? 1 : 2;
}

static float load_float(const char *p, cudaDataType t)
{
    uint16_t h;
    uint32_t u;
    float f;
    if (t == CUDA_R_32F) {
        memcpy(&f, p, 4);
        return f;
    }
    memcpy(&h, p, 2);
    if (t == CUDA_R_16F)
        return __half2float(__half{h});
    u = (uint32_t)h << 16;
    memcpy(&f, &u, 4);
    return f;
}

static void store_float(char *p, cudaDataType t, float f)
{
    if (t == CUDA_R_32F) {
        memcpy(p, &f, 4);
        return;
    }
    uint16_t h = __float2half_rn(f).bits;
    if (t == CUDA_R_16BF) {
        uint32_t u;
        memcpy(&u, &f, 4);
        h = f == f ? (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16) : 0x7fff;
    }
    memcpy(p, &h, 2);
}

/* op(A) or op(B) unpacked: [outer][k] of T, so that a sum runs along a line. */
template <class T, class L>
static std::vector<T> unpack(const matrix &x, const char *p, int outer, int k, bool k_is_row, L one)
{
    std::vector<T> out((size_t)outer * k);
    size_t size = type_bytes(x.type);
    for (int o = 0; o < outer; o++)
        for (int i = 0; i < k; i++) {
            size_t at = k_is_row ? (size_t)i + (size_t)o * x.ld : (size_t)o + (size_t)i * x.ld;
            out[(size_t)o * k + i] = one(p + at * size);
        }
    return out;
}

/* Sixteen rows of op(A) at a time, lanes are outputs. */
constexpr int TILE = 16;

template <class T, class S>
static void multiply(const std::vector<T> &a, const std::vector<T> &b, int m, int n, int k, S store)
{
    std::vector<T> panel((size_t)k * TILE);
    for (int i0 = 0; i0 < m; i0 += TILE) {
        int rows = m - i0 < TILE ? m - i0 : TILE;
        for (int i = 0; i < TILE; i++)
            for (int x = 0; x < k; x++)
                panel[(size_t)x * TILE + i] = i < rows ? a[(size_t)(i0 + i) * k + x] : T(0);
        for (int j = 0; j < n; j++) {
            T sum[TILE] = {};
            const T *col = &b[(size_t)j * k], *p = panel.data();
            for (int x = 0; x < k; x++, p += TILE)
                for (int i = 0; i < TILE; i++)
                    sum[i] += p[i] * col[x];
            for (int i = 0; i < rows; i++)
                store(i0 + i, j, sum[i]);
        }
    }
}

static void product_floats(const product &g, const char *pa, const char *pb, char *pc)
{
    auto load = [](cudaDataType t) { return [t](const char *p) { return load_float(p, t); }; };
    std::vector<float> a = unpack<float>(g.a, pa, g.m, g.k, g.ta, load(g.a.type));
    std::vector<float> b = unpack<float>(g.b, pb, g.n, g.k, !g.tb, load(g.b.type));
    size_t size = type_bytes(g.c.type);
    multiply(a, b, g.m, g.n, g.k, [&](int i, int j, float sum) {
        char *at = pc + ((size_t)i + (size_t)j * g.c.ld) * size;
        float v = g.alpha * sum;
        if (g.beta != 0.0f)
            v += g.beta * load_float(at, g.c.type);
        store_float(at, g.c.type, v);
    });
}

static void product_ints(const product &g, const char *pa, const char *pb, char *pc)
{
    auto load = [](const char *p) { return (int32_t) * (const int8_t *)p; };
    std::vector<int32_t> a = unpack<int32_t>(g.a, pa, g.m, g.k, g.ta, load);
    std::vector<int32_t> b = unpack<int32_t>(g.b, pb, g.n, g.k, !g.tb, load);
    multiply(a, b, g.m, g.n, g.k, [&](int i, int j, int32_t sum) {
        int32_t *at = (int32_t *)pc + (size_t)i + (size_t)j * g.c.ld;
        *at = g.alpha_i * sum + (g.beta_i ? g.beta_i * *at : 0);
    });
}

/* Every column that is read or written must be in one allocation; the detector hears of it. */
static void touch(const matrix &x, char *p, bool write)
{
    size_t size = type_bytes(x.type);
    for (int j = 0; j < x.cols; j++) {
        char *col = p + (size_t)j * x.ld * size;
        check_access(col, (size_t)x.rows * size, size, "cublasGemmEx");
        race_range(col, (size_t)x.rows * size, write ? ACCESS_WRITE : ACCESS_READ);
    }
}

static void scale_load(const void *at, float *f, int *i)
{
    check_access(at, 4, 4, "cublasGemmEx");
    race_range(at, 4, ACCESS_READ);
    memcpy(f, at, 4);
    memcpy(i, at, 4);
}

static void product_run(const product &made)
{
    product g = made;
    if (g.alpha_at) {
        scale_load(g.alpha_at, &g.alpha, &g.alpha_i);
        scale_load(g.beta_at, &g.beta, &g.beta_i);
        if (g.c.type != CUDA_R_32I)
            g.alpha_i = g.beta_i = 0;
    }
    for (int i = 0; i < g.batch; i++) {
        char *pa = g.a.p + i * g.a.stride * (long long)type_bytes(g.a.type);
        char *pb = g.b.p + i * g.b.stride * (long long)type_bytes(g.b.type);
        char *pc = g.c.p + i * g.c.stride * (long long)type_bytes(g.c.type);
        touch(g.a, pa, false);
        touch(g.b, pb, false);
        if (g.beta != 0.0f || g.beta_i)
            touch(g.c, pc, false);
        touch(g.c, pc, true);
        if (g.c.type == CUDA_R_32I)
            product_ints(g, pa, pb, pc);
        else
            product_floats(g, pa, pb, pc);
    }
}

/* The pairs of types that the backend may use, of the table in cuBLAS's manual. */
static bool types_ok(const product &g, cublasComputeType_t compute)
{
    cudaDataType in = g.a.type, out = g.c.type;
    if (in != g.b.type)
        return false;
    if (compute == CUBLAS_COMPUTE_32I || compute == CUBLAS_COMPUTE_32I_PEDANTIC)
        return in == CUDA_R_8I && out == CUDA_R_32I && g.a.ld % 4 == 0 && g.b.ld % 4 == 0;
    if (in == CUDA_R_32F)
        return out == CUDA_R_32F;
    return (in == CUDA_R_16F || in == CUDA_R_16BF) && (out == in || out == CUDA_R_32F);
}

static bool shape_ok(const product &g)
{
    return g.m >= 0 && g.n >= 0 && g.k >= 0 && g.batch >= 0 &&
           g.a.ld >= (g.a.rows ? g.a.rows : 1) && g.b.ld >= (g.b.rows ? g.b.rows : 1) &&
           g.c.ld >= (g.m ? g.m : 1) && g.a.p && g.b.p && g.c.p;
}

static cublasStatus_t product_push(cublasHandle_t h, const product &g, cublasComputeType_t compute)
{
    if (!h || h->magic != BLAS_MAGIC)
        return CUBLAS_STATUS_NOT_INITIALIZED;
    if (!shape_ok(g))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (!types_ok(g, compute))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    CUstream_st *s = stream_of(h->stream);
    if (!s)
        return CUBLAS_STATUS_EXECUTION_FAILED;
    if (!g.m || !g.n || !g.batch)
        return CUBLAS_STATUS_SUCCESS;
    op o = {};
    o.name = "cublasGemmEx";
    o.on_device = true;
    o.run = [g] { product_run(g); };
    return stream_push(s, std::move(o)) == cudaSuccess ? CUBLAS_STATUS_SUCCESS
                                                       : CUBLAS_STATUS_EXECUTION_FAILED;
}

static cublasStatus_t blas_error(cudaError_t e)
{
    if (e == cudaErrorMemoryAllocation)
        return CUBLAS_STATUS_ALLOC_FAILED;
    return e == cudaErrorNotSupported ? CUBLAS_STATUS_NOT_SUPPORTED
                                      : CUBLAS_STATUS_EXECUTION_FAILED;
}

} // namespace simt

using namespace simt;

#define ENTER_BLAS(name)                                                                           \
    simt::call_lock lock_;                                                                         \
    do {                                                                                           \
        cudaError_t e_ = simt::call_begin(name);                                                   \
        if (e_ != cudaSuccess)                                                                     \
            return blas_error(e_);                                                                 \
    } while (0)

extern "C" {

cublasStatus_t cublasCreate(cublasHandle_t *ret)
{
    ENTER_BLAS("cublasCreate");
    *ret = new cublasContext{BLAS_MAGIC, nullptr, false};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy(cublasHandle_t h)
{
    ENTER_BLAS("cublasDestroy");
    if (!h || h->magic != BLAS_MAGIC)
        return CUBLAS_STATUS_NOT_INITIALIZED;
    h->magic = 0;
    delete h;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream(cublasHandle_t h, cudaStream_t s)
{
    ENTER_BLAS("cublasSetStream");
    if (!h || h->magic != BLAS_MAGIC)
        return CUBLAS_STATUS_NOT_INITIALIZED;
    h->stream = s;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace(cublasHandle_t h, void *buf, size_t bytes)
{
    ENTER_BLAS("cublasSetWorkspace");
    if (!h || h->magic != BLAS_MAGIC)
        return CUBLAS_STATUS_NOT_INITIALIZED;
    if (bytes && ((uintptr_t)buf % 256 || heap_room(buf) < bytes))
        return CUBLAS_STATUS_INVALID_VALUE;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t h, cublasMath_t)
{
    ENTER_BLAS("cublasSetMathMode");
    return h && h->magic == BLAS_MAGIC ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_INITIALIZED;
}

cublasStatus_t cublasSetPointerMode(cublasHandle_t h, cublasPointerMode_t mode)
{
    ENTER_BLAS("cublasSetPointerMode");
    if (!h || h->magic != BLAS_MAGIC)
        return CUBLAS_STATUS_NOT_INITIALIZED;
    h->on_device = mode == CUBLAS_POINTER_MODE_DEVICE;
    return CUBLAS_STATUS_SUCCESS;
}

const char *cublasGetStatusName(cublasStatus_t s)
{
    switch (s) {
    case CUBLAS_STATUS_SUCCESS:
        return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED:
        return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED:
        return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE:
        return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_ARCH_MISMATCH:
        return "CUBLAS_STATUS_ARCH_MISMATCH";
    case CUBLAS_STATUS_EXECUTION_FAILED:
        return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_INTERNAL_ERROR:
        return "CUBLAS_STATUS_INTERNAL_ERROR";
    case CUBLAS_STATUS_NOT_SUPPORTED:
        return "CUBLAS_STATUS_NOT_SUPPORTED";
    }
    return "unknown status";
}

const char *cublasGetStatusString(cublasStatus_t s)
{
    return cublasGetStatusName(s);
}

cublasStatus_t cublasGemmStridedBatchedEx(
    cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
    const void *alpha, const void *a, cudaDataType at, int lda, long long stride_a, const void *b,
    cudaDataType bt, int ldb, long long stride_b, const void *beta, void *c, cudaDataType ct,
    int ldc, long long stride_c, int batch, cublasComputeType_t compute, cublasGemmAlgo_t)
{
    ENTER_BLAS("cublasGemmEx");
    product g = {};
    g.ta = ta != CUBLAS_OP_N;
    g.tb = tb != CUBLAS_OP_N;
    g.m = m;
    g.n = n;
    g.k = k;
    g.batch = batch;
    if (h && h->on_device) {
        g.alpha_at = alpha;
        g.beta_at = beta;
    } else if (compute == CUBLAS_COMPUTE_32I || compute == CUBLAS_COMPUTE_32I_PEDANTIC) {
        g.alpha_i = *(const int *)alpha;
        g.beta_i = *(const int *)beta;
    } else {
        g.alpha = *(const float *)alpha;
        g.beta = *(const float *)beta;
    }
    g.a = matrix{(char *)(uintptr_t)a, at, lda, g.ta ? k : m, g.ta ? m : k, stride_a};
    g.b = matrix{(char *)(uintptr_t)b, bt, ldb, g.tb ? n : k, g.tb ? k : n, stride_b};
    g.c = matrix{(char *)c, ct, ldc, m, n, stride_c};
    return product_push(h, g, compute);
}

cublasStatus_t cublasGemmEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m,
                            int n, int k, const void *alpha, const void *a, cudaDataType at,
                            int lda, const void *b, cudaDataType bt, int ldb, const void *beta,
                            void *c, cudaDataType ct, int ldc, cublasComputeType_t compute,
                            cublasGemmAlgo_t algo)
{
    return cublasGemmStridedBatchedEx(h, ta, tb, m, n, k, alpha, a, at, lda, 0, b, bt, ldb, 0, beta,
                                      c, ct, ldc, 0, 1, compute, algo);
}

} // extern "C"
