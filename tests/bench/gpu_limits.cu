/* gpu_limits: what this card can do at most, to hold the other figures against. CSV, a line a limit; medians of 7.
 *
 *   copy   4 GiB from device memory to device memory, bytes read and written
 *   read   4 GiB read by a kernel that keeps nothing but a sum
 *   f16    a product of 8192 x 8192 halves by cuBLAS, sums in f32, on random values: zeros run faster
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
    float chain = median_ms([&] {
        for (int i = 0; i < CHAIN; i++)
            nothing<<<1, 32>>>();
    });
    printf("limit,value,unit\n");
    printf("copy,%.1f,GB/s\n", 2e-6 * BYTES / copy);
    printf("read,%.1f,GB/s\n", 1e-6 * BYTES / read);
    printf("f16,%.1f,TFLOP/s\n", 2e-9 * N * N * N / gemm);
    printf("launch,%.2f,us\n", 1e3 * chain / CHAIN);
    printf("launch in a graph,%.2f,us\n", 1e3 * graph_ms(s) / CHAIN);
    return 0;
}
