/* gpu_limits: what this card can do at most, to hold the other figures against. CSV, a line a limit; medians of 7.
 *
 *   copy   4 GiB from device memory to device memory, bytes read and written
 *   read   4 GiB read by a kernel that keeps nothing but a sum
 *   f16    a product of 8192 x 8192 halves by cuBLAS, sums in f32, on random values: zeros run faster
 *   two    gate and up of a layer (3584 to 18944) for 512 rows: two products, and one call of a batch of two whose matrices
 *          lie apart, upwards and downwards in memory
 *   launch an empty kernel after an empty kernel, and the same in a graph of 100 */
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cublas_v2.h>
#include <cuda_runtime.h>

#define REPS 7
#define BYTES ((size_t)4 << 30)
#define N 8192
#define CHAIN 100

static void must(int code, const char *what)
{
    if (code == 0)
        return;
    fprintf(stderr, "gpu_limits: %s: %d\n", what, code);
    exit(1);
}
#define MUST(call) must((int)(call), #call)

__global__ void fill(uint32_t *p, size_t n) /* halves of 2^-6 .. 2^-5, either sign */
{
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        uint32_t x = (uint32_t)i * 2654435761u;
        x ^= x >> 15;
        x *= 0x85ebca77u;
        x ^= x >> 13;
        p[i] = (x & 0x83ff83ffu) | 0x24002400u;
    }
}

__global__ void __launch_bounds__(512) read_all(const uint4 *p, size_t n, uint32_t *ret)
{
    uint32_t sum = 0;
    size_t step = (size_t)gridDim.x * blockDim.x, i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * step < n; i += 4 * step) {
        uint4 a = p[i], b = p[i + step], c = p[i + 2 * step], d = p[i + 3 * step];
        sum += a.x ^ b.y ^ c.z ^ d.w;
    }
    if (sum == 0x12345678u)
        *ret = sum;
}

__global__ void nothing(void) {}

template <class F> static float median_ms(F work)
{
    cudaEvent_t a, b;
    float ms[REPS];
    MUST(cudaEventCreate(&a));
    MUST(cudaEventCreate(&b));
    work();
    for (int i = 0; i < REPS; i++) {
        MUST(cudaEventRecord(a));
        work();
        MUST(cudaEventRecord(b));
        MUST(cudaEventSynchronize(b));
        MUST(cudaEventElapsedTime(&ms[i], a, b));
    }
    MUST(cudaGetLastError());
    std::sort(ms, ms + REPS);
    return ms[REPS / 2];
}

static float graph_ms(cudaStream_t s)
{
    cudaGraph_t g;
    cudaGraphExec_t e;
    MUST(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < CHAIN; i++)
        nothing<<<1, 32, 0, s>>>();
    MUST(cudaStreamEndCapture(s, &g));
    MUST(cudaGraphInstantiate(&e, g, 0));
    return median_ms([&] { MUST(cudaGraphLaunch(e, 0)); });
}

/* us of two products of 512 rows, one after the other or as a batch whose second matrix lies `apart` halves behind the
 * first (-1: cuBLAS refuses that). */
static float pair_us(cublasHandle_t blas, uint16_t *w, long long apart, uint16_t *x, float *out,
                     bool batch)
{
    enum { D = 3584, F = 18944, ROWS = 512 };
    const float one = 1, zero = 0;
    const long long out_apart = (apart < 0 ? -1LL : 1LL) * F * ROWS;
    int bad = 0;
    auto work = [&] {
        for (int i = 0; i < (batch ? 0 : 2); i++)
            bad |= cublasGemmEx(blas, CUBLAS_OP_T, CUBLAS_OP_N, F, ROWS, D, &one, w + i * apart,
                                CUDA_R_16F, D, x, CUDA_R_16F, D, &zero, out + i * out_apart,
                                CUDA_R_32F, F, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
        if (batch)
            bad |= cublasGemmStridedBatchedEx(blas, CUBLAS_OP_T, CUBLAS_OP_N, F, ROWS, D, &one, w,
                                              CUDA_R_16F, D, apart, x, CUDA_R_16F, D, 0, &zero, out,
                                              CUDA_R_32F, F, out_apart, 2, CUBLAS_COMPUTE_32F,
                                              CUBLAS_GEMM_DEFAULT);
    };
    float ms = median_ms(work);
    return bad ? -1.0f : 1e3f * ms;
}

int main(void)
{
    cublasHandle_t blas;
    cudaStream_t s;
    uint32_t *p;
    const float one = 1, zero = 0;
    MUST(cudaMalloc(&p, 2 * BYTES));
    MUST(cublasCreate(&blas));
    MUST(cudaStreamCreate(&s));
    fill<<<4096, 256>>>(p, 2 * BYTES / 4);
    MUST(cudaDeviceSynchronize());
    uint8_t *to = (uint8_t *)p + BYTES;
    float copy = median_ms([&] { MUST(cudaMemcpyAsync(to, p, BYTES, cudaMemcpyDeviceToDevice)); });
    float read = median_ms([&] { read_all<<<2048, 512>>>((const uint4 *)p, BYTES / 16, p); });
    uint16_t *a = (uint16_t *)p, *b = a + (size_t)N * N;
    float *c = (float *)(b + (size_t)N * N);
    float gemm = median_ms([&] {
        MUST(cublasGemmEx(blas, CUBLAS_OP_T, CUBLAS_OP_N, N, N, N, &one, a, CUDA_R_16F, N, b,
                          CUDA_R_16F, N, &zero, c, CUDA_R_32F, N, CUBLAS_COMPUTE_32F,
                          CUBLAS_GEMM_DEFAULT));
    });
    const long long apart = (long long)18944 * 3584 + 4096;
    uint16_t *x = a + 4 * apart;
    float *out = (float *)(x + 4096 * 3584) + (size_t)4 * 512 * 18944; /* room on both sides */
    float two[3] = {pair_us(blas, a, apart, x, out, false), pair_us(blas, a, apart, x, out, true),
                    pair_us(blas, a + apart, -apart, x, out, true)};
    float chain = median_ms([&] {
        for (int i = 0; i < CHAIN; i++)
            nothing<<<1, 32>>>();
    });
    printf("limit,value,unit\n");
    printf("copy,%.1f,GB/s\n", 2e-6 * BYTES / copy);
    printf("read,%.1f,GB/s\n", 1e-6 * BYTES / read);
    printf("f16,%.1f,TFLOP/s\n", 2e-9 * N * N * N / gemm);
    printf("two products of 512 rows,%.1f,us\n", two[0]);
    printf("the same as a batch upwards,%.1f,us\n", two[1]);
    printf("the same as a batch downwards,%.1f,us\n", two[2]);
    printf("launch,%.2f,us\n", 1e3 * chain / CHAIN);
    printf("launch in a graph,%.2f,us\n", 1e3 * graph_ms(s) / CHAIN);
    return 0;
}
