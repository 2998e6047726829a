/* test_simt_blas.cc: the shim's cuBLAS against sums in double precision: both transpositions, all types that the backend
 * uses, leading dimensions with gaps, alpha and beta, batches; what it refuses. */
#include "test_simt.h"
#include <math.h>

struct shape {
    int m, n, k;
};

static double value_of(cudaDataType t, const std::vector<char> &x, size_t i)
{
    const char *p = x.data();
    if (t == CUDA_R_32F)
        return ((const float *)p)[i];
    if (t == CUDA_R_16F)
        return h2f(((const half_t *)p)[i]);
    if (t == CUDA_R_16BF)
        return bf2f(((const uint16_t *)p)[i]);
    return t == CUDA_R_8I ? (double)((const int8_t *)p)[i] : (double)((const int *)p)[i];
}

static size_t size_of(cudaDataType t)
{
    return t == CUDA_R_8I ? 1 : t == CUDA_R_16F || t == CUDA_R_16BF ? 2 : 4;
}

static std::vector<char> matrix(cudaDataType t, size_t n, test_random *r)
{
    std::vector<char> x(n * size_of(t));
    for (size_t i = 0; i < n; i++) {
        float f = r->unit();
        if (t == CUDA_R_32F)
            ((float *)x.data())[i] = f;
        else if (t == CUDA_R_16F)
            ((half_t *)x.data())[i] = f2h(f);
        else if (t == CUDA_R_16BF)
            ((uint16_t *)x.data())[i] = f2bf(f);
        else if (t == CUDA_R_8I)
            ((int8_t *)x.data())[i] = (int8_t)r->bits();
        else
            ((int *)x.data())[i] = (int)(r->bits() % 1000);
    }
    return x;
}

struct problem {
    shape s;
    bool ta, tb;
    cudaDataType in, out;
    float alpha, beta;
    int batch;
};

static void check_output(const problem &p, const std::vector<char> *abc, const std::vector<char> &c,
                         int lda, int ldb, int ldc, const long long *strides)
{
    double eps = p.out == CUDA_R_16F ? 0x1p-10 : p.out == CUDA_R_16BF ? 0x1p-7 : 1e-5;
    for (int x = 0; x < p.batch; x++)
        for (int j = 0; j < p.s.n; j++)
            for (int i = 0; i < p.s.m; i++) {
                double sum = 0, size = 0;
                for (int k = 0; k < p.s.k; k++) {
                    size_t ia = (size_t)(p.ta ? k + i * lda : i + k * lda);
                    size_t ib = (size_t)(p.tb ? j + k * ldb : k + j * ldb);
                    double t = value_of(p.in, abc[0], (size_t)(x * strides[0]) + ia) *
                               value_of(p.in, abc[1], (size_t)(x * strides[1]) + ib);
                    sum += t;
                    size += fabs(t);
                }
                size_t at = (size_t)(x * strides[2] + i + j * ldc);
                double want = p.alpha * sum, old = value_of(p.out, abc[2], at);
                if (p.beta != 0)
                    want += p.beta * old;
                double got = value_of(p.out, c, at);
                double room = p.out == CUDA_R_32I ? 0 : eps * (fabs(p.alpha) * size + fabs(old));
                if (!(fabs(got - want) <= room))
                    fail_msg("%d x %d x %d, batch %d at (%d, %d): %g, not %g", p.s.m, p.s.n, p.s.k,
                             x, i, j, got, want);
            }
}

static void solve(cublasHandle_t h, const problem &p, test_random *r)
{
    int pad = p.in == CUDA_R_8I ? 4 : 3, round = p.in == CUDA_R_8I ? 4 : 1;
    auto lead = [=](int rows) { return (rows + round - 1) / round * round + pad; };
    int lda = lead(p.ta ? p.s.k : p.s.m), ldb = lead(p.tb ? p.s.n : p.s.k), ldc = lead(p.s.m);
    long long strides[3] = {(long long)lda * (p.ta ? p.s.m : p.s.k) + 8,
                            (long long)ldb * (p.tb ? p.s.k : p.s.n) + 4,
                            (long long)ldc * p.s.n + 12};
    std::vector<char> abc[3];
    for (int i = 0; i < 3; i++)
        abc[i] = matrix(i == 2 ? p.out : p.in, (size_t)(strides[i] * p.batch), r);
    std::vector<char> start = abc[2];
    if (p.beta == 0)
        memset(start.data(), 0xff, start.size()); /* NaN that must not be read */
    char *da = device_of(abc[0]), *db = device_of(abc[1]), *dc = device_of(start);
    int alpha_i = (int)p.alpha, beta_i = (int)p.beta;
    bool ints = p.in == CUDA_R_8I;
    const void *alpha = ints ? (const void *)&alpha_i : &p.alpha;
    const void *beta = ints ? (const void *)&beta_i : &p.beta;
    cublasComputeType_t compute = ints ? CUBLAS_COMPUTE_32I : CUBLAS_COMPUTE_32F;
    cublasOperation_t ta = p.ta ? CUBLAS_OP_T : CUBLAS_OP_N, tb = p.tb ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasStatus_t s =
        p.batch == 1
            ? cublasGemmEx(h, ta, tb, p.s.m, p.s.n, p.s.k, alpha, da, p.in, lda, db, p.in, ldb,
                           beta, dc, p.out, ldc, compute, CUBLAS_GEMM_DEFAULT)
            : cublasGemmStridedBatchedEx(h, ta, tb, p.s.m, p.s.n, p.s.k, alpha, da, p.in, lda,
                                         strides[0], db, p.in, ldb, strides[1], beta, dc, p.out,
                                         ldc, strides[2], p.batch, compute, CUBLAS_GEMM_DEFAULT);
    assert_int_equal(s, CUBLAS_STATUS_SUCCESS);
    std::vector<char> c = host_of(dc, abc[2].size());
    check_output(p, abc, c, lda, ldb, ldc, strides);
    /* nothing between the columns was written */
    size_t size = size_of(p.out);
    assert_memory_equal(c.data() + (size_t)p.s.m * size, start.data() + (size_t)p.s.m * size, size);
    CUDA(cudaFree(da));
    CUDA(cudaFree(db));
    CUDA(cudaFree(dc));
}

static void products_are_right(void **)
{
    use_streams(simt::STREAMS_LAZY);
    cublasHandle_t h;
    test_random r = {77};
    assert_int_equal(cublasCreate(&h), CUBLAS_STATUS_SUCCESS);
    const shape shapes[] = {{1, 1, 1},    {1, 5, 64},  {17, 3, 33},
                            {64, 64, 64}, {63, 65, 7}, {130, 2, 96}};
    const cudaDataType types[][2] = {{CUDA_R_32F, CUDA_R_32F},  {CUDA_R_16F, CUDA_R_16F},
                                     {CUDA_R_16F, CUDA_R_32F},  {CUDA_R_16BF, CUDA_R_16BF},
                                     {CUDA_R_16BF, CUDA_R_32F}, {CUDA_R_8I, CUDA_R_32I}};
    for (const shape &s : shapes)
        for (auto &t : types)
            for (int form = 0; form < 4; form++) {
                problem p = {s, (form & 1) != 0, (form & 2) != 0, t[0], t[1], 1, 0, 1};
                solve(h, p, &r);
                p.alpha = 3;
                p.beta = form == 3 ? -2 : 1;
                solve(h, p, &r);
                p.batch = 3;
                solve(h, p, &r);
            }
    assert_int_equal(cublasDestroy(h), CUBLAS_STATUS_SUCCESS);
}

static void a_product_waits_in_its_stream(void **)
{
    use_streams(simt::STREAMS_LAZY);
    cublasHandle_t h;
    cudaStream_t s;
    CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    assert_int_equal(cublasCreate(&h), CUBLAS_STATUS_SUCCESS);
    assert_int_equal(cublasSetStream(h, s), CUBLAS_STATUS_SUCCESS);
    assert_int_equal(cublasSetMathMode(h, CUBLAS_PEDANTIC_MATH), CUBLAS_STATUS_SUCCESS);
    void *workspace;
    CUDA(cudaMalloc(&workspace, 4096));
    assert_int_equal(cublasSetWorkspace(h, workspace, 4096), CUBLAS_STATUS_SUCCESS);
    assert_int_equal(cublasSetWorkspace(h, workspace, 8192), CUBLAS_STATUS_INVALID_VALUE);
    float *a = device_of(std::vector<float>{2.0f}), *c = device_of(std::vector<float>{0.0f}), *out;
    CUDA(cudaMallocHost(&out, 4));
    float one = 1.0f, zero = 0.0f;
    assert_int_equal(cublasGemmEx(h, CUBLAS_OP_N, CUBLAS_OP_N, 1, 1, 1, &one, a, CUDA_R_32F, 1, a,
                                  CUDA_R_32F, 1, &zero, c, CUDA_R_32F, 1, CUBLAS_COMPUTE_32F,
                                  CUBLAS_GEMM_DEFAULT),
                     CUBLAS_STATUS_SUCCESS);
    one = 100.0f; /* host scalars are taken at the call */
    CUDA(cudaMemcpyAsync(out, c, 4, cudaMemcpyDeviceToHost, s));
    assert_true(out[0] != out[0]);
    CUDA(cudaStreamSynchronize(s));
    assert_float_equal(out[0], 4.0f, 0.0f);
    assert_int_equal(cublasDestroy(h), CUBLAS_STATUS_SUCCESS);
    CUDA(cudaStreamDestroy(s));
    CUDA(cudaFreeHost(out));
    CUDA(cudaFree(a));
    CUDA(cudaFree(c));
    CUDA(cudaFree(workspace));
}

static void nonsense_is_refused(void **)
{
    cublasHandle_t h;
    assert_int_equal(cublasCreate(&h), CUBLAS_STATUS_SUCCESS);
    float *x = device_of(std::vector<float>(64, 0.0f)), one = 1.0f, zero = 0.0f;
    auto call = [&](cudaDataType in, cudaDataType out, int lda, int ldc, cublasComputeType_t c) {
        return cublasGemmEx(h, CUBLAS_OP_N, CUBLAS_OP_N, 4, 4, 4, &one, x, in, lda, x, in, 4, &zero,
                            x, out, ldc, c, CUBLAS_GEMM_DEFAULT);
    };
    assert_int_equal(call(CUDA_R_32F, CUDA_R_32F, 3, 4, CUBLAS_COMPUTE_32F),
                     CUBLAS_STATUS_INVALID_VALUE);
    assert_int_equal(call(CUDA_R_32F, CUDA_R_32F, 4, 3, CUBLAS_COMPUTE_32F),
                     CUBLAS_STATUS_INVALID_VALUE);
    assert_int_equal(call(CUDA_R_32F, CUDA_R_16F, 4, 4, CUBLAS_COMPUTE_32F),
                     CUBLAS_STATUS_NOT_SUPPORTED);
    assert_int_equal(call(CUDA_R_8I, CUDA_R_32I, 5, 4, CUBLAS_COMPUTE_32I),
                     CUBLAS_STATUS_NOT_SUPPORTED); /* rows of bytes begin at multiples of 4 */
    expect_report(
        [&] {
            cublasGemmEx(h, CUBLAS_OP_N, CUBLAS_OP_N, 8, 9, 1, &one, x, CUDA_R_32F, 8, x,
                         CUDA_R_32F, 1, &zero, x, CUDA_R_32F, 8, CUBLAS_COMPUTE_32F,
                         CUBLAS_GEMM_DEFAULT);
            cudaDeviceSynchronize();
        },
        {"out of bounds", "cublasGemmEx"});
    assert_int_equal(cublasDestroy(h), CUBLAS_STATUS_SUCCESS);
    CUDA(cudaFree(x));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_are_right),
        cmocka_unit_test(a_product_waits_in_its_stream),
        cmocka_unit_test(nonsense_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
