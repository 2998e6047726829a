/* test_simt_race.cc: the race detector: what it must report whatever the schedule makes of it, and what it must let pass. */
#include "test_simt.h"

static const enum simt::schedule schedules[] = {simt::SCHEDULE_FORWARD, simt::SCHEDULE_REVERSE,
                                                simt::SCHEDULE_RANDOM};

#define WHERE(name) "kernel " name, "block (", "thread ("

/* Reported in every schedule: the detector asks for order, not for luck. */
static void reported(const std::function<void()> &body, const std::vector<const char *> &words)
{
    for (enum simt::schedule s : schedules)
        expect_report(
            [&] {
                use_schedule(s);
                body();
                cudaDeviceSynchronize();
            },
            words);
}

static void silent(const std::function<void()> &body)
{
    for (enum simt::schedule s : schedules)
        expect_silence([&] {
            use_schedule(s);
            body();
            if (cudaDeviceSynchronize() != cudaSuccess)
                _exit(1);
        });
}

/* ---- shared memory ---- */

/* missing: 1 the barrier before the read, 2 the barrier before the next write. */
__global__ void rotate(float *out, int missing, int by)
{
    DYN_SMEM(float, s);
    int t = (int)threadIdx.x, n = (int)blockDim.x;
    float sum = 0;
    for (int round = 0; round < 3; round++) {
        s[t] = (float)(t + round);
        if (missing != 1)
            __syncthreads();
        sum += s[(t + by) % n];
        if (missing != 2)
            __syncthreads();
    }
    out[t] = sum;
}

static void missing_barriers(void **)
{
    auto run = [](int missing, int by) {
        return [=] {
            LAUNCH(rotate, dim3(1), dim3(128), 512, 0, device_new<float>(128), missing, by);
        };
    };
    silent(run(0, 40));
    silent(run(1, 0)); /* its own value */
    reported(run(1, 40), {"missing barrier", "shared byte", WHERE("rotate")});
    reported(run(2, 40), {"missing barrier", "shared byte", WHERE("rotate")});
    reported(run(1, 1), {"missing ", "shared byte", WHERE("rotate")});
}

/* how: 0 __syncwarp, 1 nothing, 2 a shuffle (which orders nothing), 3 a __syncwarp of some lanes. */
__global__ void exchange(float *out, int how)
{
    DYN_SMEM(float, s);
    int l = lane_id();
    float *mine = s + warp_id() * 32;
    mine[l] = (float)l;
    if (how == 0)
        __syncwarp();
    if (how == 2)
        out[threadIdx.x] = warp_sum(1.0f);
    if (how == 3)
        __syncwarp(l < 16 ? 0x0000ffffu : 0xffff0000u);
    out[threadIdx.x] = mine[how == 3 ? l ^ 1 : 31 - l];
    if (how == 3) {
        __syncwarp();
        out[threadIdx.x] += mine[31 - l];
    }
}

static void missing_warp_syncs(void **)
{
    auto run = [](int how) {
        return [=] { LAUNCH(exchange, dim3(2), dim3(64), 256, 0, device_new<float>(64), how); };
    };
    /* blocks of one launch write the same 64 floats: each warp its own, blocks do not */
    reported(run(1), {"missing __syncwarp", "shared byte", WHERE("exchange")});
    reported(run(2), {"missing __syncwarp", "shared byte", WHERE("exchange")});
    auto one_block = [](int how) {
        return [=] { LAUNCH(exchange, dim3(1), dim3(64), 256, 0, device_new<float>(64), how); };
    };
    silent(one_block(0));
    silent(one_block(3));
}

/* how: 0 waits and writes, 1 the other way round, 2 one thread never waits. */
__global__ void early(const float *x, float *out, int how)
{
    float v = x[threadIdx.x];
    if (how == 1)
        out[threadIdx.x] = v;
    if (how != 2 || threadIdx.x != 40)
        early_wait();
    if (how == 0)
        out[threadIdx.x] = v;
}

static void early_launches_wait(void **)
{
    auto run = [](int how) {
        return [=] {
            float *x = device_of(std::vector<float>(64, 1.0f));
            LAUNCH_EARLY(early, dim3(1), dim3(64), 0, 0, x, device_new<float>(64), how);
        };
    };
    silent(run(0));
    reported(run(1), {"early launch", "written before early_wait", WHERE("early")});
    reported(run(2), {"early launch", "has not called early_wait", WHERE("early")});
    silent([] { /* a plain launch need not */
                float *x = device_of(std::vector<float>(64, 1.0f));
                LAUNCH(early, dim3(1), dim3(64), 0, 0, x, device_new<float>(64), 2);
    });
}

__global__ void reads_too_much(float *out, int n)
{
    DYN_SMEM(float, s);
    int t = (int)threadIdx.x;
    if (t < n)
        s[t] = 1.0f;
    __syncthreads();
    out[blockIdx.x * blockDim.x + threadIdx.x] = s[t];
}

static void uninitialised_shared_memory(void **)
{
    auto run = [](int n) {
        return
            [=] { LAUNCH(reads_too_much, dim3(3), dim3(64), 256, 0, device_new<float>(192), n); };
    };
    silent(run(64));
    reported(run(63), {"uninitialised shared memory", "byte 252", WHERE("reads_too_much")});
}

__global__ void histogram(const int *x, int *out, int n, int plain)
{
    DYN_SMEM(int, h);
    int t = (int)threadIdx.x;
    h[t] = 0;
    __syncthreads();
    for (int i = t; i < n; i += 64) {
        if (plain && i == 63)
            h[x[i]]++;
        else
            atomicAdd(&h[x[i]], 1);
    }
    __syncthreads();
    atomicAdd(&out[t], h[t]);
}

static void atomics_are_no_races(void **)
{
    auto run = [](int plain) {
        return [=] {
            std::vector<int> x(256);
            for (int i = 0; i < 256; i++)
                x[(size_t)i] = i % 7;
            int *out = device_of(std::vector<int>(64, 0));
            LAUNCH(histogram, dim3(4), dim3(64), 256, 0, device_of(x), out, 256, plain);
        };
    };
    silent(run(0));
    reported(run(1), {"missing ", "shared byte", WHERE("histogram")});
}

/* A double-buffered tile product as kernels have it: cp.async, ldmatrix, mma. missing: 1 the barrier after the wait, 2 the
 * barrier at the end of a round, 3 wait for one group less. */
__global__ void tiles(const half_t *a, const half_t *b, float *c, int k, int missing)
{
    DYN_SMEM(half_t, s); /* [2][64 + 64][40] */
    const int ld = 40, tile = 64 * ld;
    int t = (int)threadIdx.x, l = lane_id(), w = warp_id();
    auto load = [&](int k0, int buffer) {
        for (int i = t; i < 64 * 4; i += 128) {
            int row = i / 4, col = i % 4 * 8;
            half_t *to = s + buffer * 2 * tile + row * ld + col;
            cpa16(to, a + (size_t)row * k + k0 + col, true);
            cpa16(to + tile, b + (size_t)row * k + k0 + col, true);
        }
        cpa_commit();
    };
    float d[8][4] = {};
    load(0, 0);
    for (int k0 = 0, round = 0; k0 < k; k0 += 32, round++) {
        const half_t *sa = s + round % 2 * 2 * tile, *sb = sa + tile;
        if (k0 + 32 < k) {
            load(k0 + 32, (round + 1) % 2);
            if (missing == 3)
                cpa_wait<2>();
            else
                cpa_wait<1>();
        } else {
            cpa_wait<0>();
        }
        if (missing != 1)
            __syncthreads();
        for (int kk = 0; kk < 32; kk += 16) {
            uint32_t fa[4], fb[4];
            ldsm4(fa, sa + (w * 16 + (l & 15)) * ld + kk + (l >> 4) * 8);
            for (int j = 0; j < 8; j += 2) {
                ldsm4(fb, sb + (j * 8 + (l & 7) + (l >> 4) * 8) * ld + kk + (l >> 3 & 1) * 8);
                mma_f16(d[j], fa, fb);
                mma_f16(d[j + 1], fa, fb + 2);
            }
        }
        if (missing != 2)
            __syncthreads();
    }
    for (int j = 0; j < 8; j++)
        for (int i = 0; i < 4; i++)
            c[(size_t)(w * 16 + l / 4 + i / 2 * 8) * 64 + (size_t)(j * 8 + l % 4 * 2 + i % 2)] =
                d[j][i];
}

static void a_real_pipeline_passes(void **)
{
    auto run = [](int missing) {
        return [=] {
            const int k = 96;
            test_random r = {9};
            std::vector<half_t> a(64 * k), b(64 * k);
            for (half_t &x : a)
                x = f2h(r.unit());
            for (half_t &x : b)
                x = f2h(r.unit());
            float *c = device_new<float>(64 * 64);
            LAUNCH(tiles, dim3(1), dim3(128), 2 * 2 * 64 * 40 * sizeof(half_t), 0, device_of(a),
                   device_of(b), c, k, missing);
            std::vector<float> host = host_of(c, 64 * 64);
            for (int i = 0; i < 64 * 64; i += 37) {
                double sum = 0;
                for (int x = 0; x < k; x++)
                    sum += (double)h2f(a[(size_t)(i / 64 * k + x)]) *
                           (double)h2f(b[(size_t)(i % 64 * k + x)]);
                if (!(fabs(host[(size_t)i] - sum) < 1e-4))
                    _exit(2);
            }
        };
    };
    silent(run(0));
    reported(run(1), {"missing barrier", "shared byte", WHERE("tiles")});
    reported(run(2), {"missing ", "shared byte", WHERE("tiles")});
    reported(run(3), {"cp.async in flight", WHERE("tiles")});
}

/* ---- device memory ---- */

/* how: 0 each block its own, 1 all write the same place, 2 a block reads its neighbour's, 3 with fence and atomic. */
__global__ void blocks(float *x, unsigned *count, float *out, int how)
{
    unsigned b = blockIdx.x;
    if (threadIdx.x == 0) {
        x[how == 1 ? 0 : b] = 1.0f;
        if (how == 2)
            out[b] = x[(b + 1) % gridDim.x];
        if (how == 3) {
            __threadfence();
            if (atomicAdd(count, 1u) == gridDim.x - 1) {
                float sum = 0;
                for (unsigned i = 0; i < gridDim.x; i++)
                    sum += x[i];
                out[0] = sum;
            }
        }
    }
}

static void blocks_do_not_see_each_other(void **)
{
    auto run = [](int how) {
        return [=] {
            LAUNCH(blocks, dim3(4), dim3(32), 0, 0, device_of(std::vector<float>(4, 0.0f)),
                   device_of(std::vector<unsigned>(1, 0u)), device_new<float>(4), how);
        };
    };
    silent(run(0));
    silent(run(3));
    reported(run(1), {"race between blocks", "device memory", WHERE("blocks")});
    reported(run(2), {"race between blocks", "device memory", WHERE("blocks")});
}

__global__ void through_device_memory(float *x, float *out, int barrier)
{
    x[threadIdx.x] = 1.0f;
    if (barrier)
        __syncthreads();
    out[threadIdx.x] = x[(threadIdx.x + 32) % 64];
}
/* Neighbours write halves of one word: no race. */
__global__ void neighbours(half_t *x, unsigned char *bytes)
{
    x[threadIdx.x] = f2h(1.0f);
    bytes[threadIdx.x] = (unsigned char)threadIdx.x;
}
__global__ void through_device_memory_in_a_warp(float *x, float *out, int sync)
{
    x[threadIdx.x] = 1.0f;
    if (sync)
        __syncwarp();
    out[threadIdx.x] = x[threadIdx.x ^ 1];
}
__global__ void reads_one(const float *x, float *out, int at)
{
    if (threadIdx.x == 3)
        out[0] = x[at];
}

static void device_memory_inside_a_block(void **)
{
    auto run = [](int barrier) {
        return [=] {
            LAUNCH(through_device_memory, dim3(1), dim3(64), 0, 0, device_new<float>(64),
                   device_new<float>(64), barrier);
        };
    };
    silent(run(1));
    reported(run(0), {"missing barrier", "device memory", WHERE("through_device_memory")});
    auto in_a_warp = [](int sync) {
        return [=] {
            LAUNCH(through_device_memory_in_a_warp, dim3(1), dim3(64), 0, 0,
                   device_of(std::vector<float>(64, 0.0f)), device_new<float>(64), sync);
        };
    };
    silent(in_a_warp(1));
    reported(in_a_warp(0),
             {"missing __syncwarp", "device memory", WHERE("through_device_memory_in_a_warp")});
    silent([] {
        LAUNCH(neighbours, dim3(1), dim3(64), 0, 0, device_new<half_t>(64),
               device_new<unsigned char>(64));
    });
    auto read = [](int n, int at) {
        return [=] {
            float *x = device_new<float>(65);
            CUDA(cudaMemset(x, 0, (size_t)n * 4));
            LAUNCH(reads_one, dim3(1), dim3(32), 0, 0, x, device_new<float>(1), at);
        };
    };
    silent(read(65, 64));
    reported(read(60, 64), {"uninitialised device memory", "byte 256 of 260", WHERE("reads_one")});
    reported(read(65, 65), {"out of bounds", "0 bytes behind the end", WHERE("reads_one")});
    reported([] { (void)host_of(device_new<float>(4), 4); },
             {"uninitialised device memory", "copy reads"});
}

/* ---- streams ---- */

__global__ void produce(float *x, float v)
{
    x[threadIdx.x] = v;
}
__global__ void consume(const float *x, float *out)
{
    out[threadIdx.x] = x[threadIdx.x] + 1.0f;
}

struct two_streams {
    cudaStream_t a, b;
    cudaEvent_t e;
    two_streams()
    {
        CUDA(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
        CUDA(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
        CUDA(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    }
    void order() /* b after a */
    {
        CUDA(cudaEventRecord(e, a));
        CUDA(cudaStreamWaitEvent(b, e, 0));
    }
};

static void missing_events(void **)
{
    for (enum simt::stream_order o :
         {simt::STREAMS_LAZY, simt::STREAMS_EAGER, simt::STREAMS_RANDOM}) {
        auto in = [o](const std::function<void(two_streams &, float *, float *)> &body) {
            return [o, body] {
                use_streams(o, 7);
                two_streams s;
                float *x = device_of(std::vector<float>(32, 0.0f)), *out = device_new<float>(32);
                body(s, x, out);
                CUDA(cudaDeviceSynchronize());
            };
        };
        auto read_after_write = [](bool event) {
            return [event](two_streams &s, float *x, float *out) {
                LAUNCH(produce, dim3(1), dim3(32), 0, s.a, x, 2.0f);
                if (event)
                    s.order();
                LAUNCH(consume, dim3(1), dim3(32), 0, s.b, x, out);
            };
        };
        auto write_after_read = [](bool event) {
            return [event](two_streams &s, float *x, float *out) {
                LAUNCH(consume, dim3(1), dim3(32), 0, s.a, x, out);
                if (event)
                    s.order();
                CUDA(cudaMemsetAsync(x, 0, 128, s.b));
            };
        };
        expect_silence(in(read_after_write(true)));
        expect_silence(in(write_after_read(true)));
        expect_report(in(read_after_write(false)),
                      {"missing event", "produce", "consume", "stream"});
        expect_report(in(write_after_read(false)), {"missing event", "fill", "consume"});
        /* the host as the order: it waits for a before it goes on */
        expect_silence(in([](two_streams &s, float *x, float *out) {
            LAUNCH(produce, dim3(1), dim3(32), 0, s.a, x, 2.0f);
            CUDA(cudaStreamSynchronize(s.a));
            LAUNCH(consume, dim3(1), dim3(32), 0, s.b, x, out);
        }));
        /* an event that was recorded too early */
        expect_report(in([](two_streams &s, float *x, float *out) {
                          CUDA(cudaEventRecord(s.e, s.a));
                          LAUNCH(produce, dim3(1), dim3(32), 0, s.a, x, 2.0f);
                          CUDA(cudaStreamWaitEvent(s.b, s.e, 0));
                          LAUNCH(consume, dim3(1), dim3(32), 0, s.b, x, out);
                      }),
                      {"missing event"});
        /* order goes through a third stream, and holds though the event's work was done long ago */
        expect_silence(in([](two_streams &s, float *x, float *out) {
            cudaStream_t c;
            cudaEvent_t f;
            CUDA(cudaStreamCreateWithFlags(&c, cudaStreamNonBlocking));
            CUDA(cudaEventCreate(&f));
            LAUNCH(produce, dim3(1), dim3(32), 0, s.a, x, 2.0f);
            CUDA(cudaEventRecord(s.e, s.a));
            CUDA(cudaStreamWaitEvent(c, s.e, 0));
            CUDA(cudaEventRecord(f, c));
            for (int i = 0; i < 8; i++)
                (void)cudaEventQuery(f);
            CUDA(cudaStreamWaitEvent(s.b, f, 0));
            LAUNCH(consume, dim3(1), dim3(32), 0, s.b, x, out);
        }));
    }
}

/* A fork and join inside a graph, launched twice; join: the second branch waits for the first. */
static void graph_edges(void **)
{
    auto run = [](bool edge) {
        return [edge] {
            two_streams s;
            float *x = device_of(std::vector<float>(32, 0.0f)), *out = device_new<float>(32);
            cudaEvent_t fork, done;
            CUDA(cudaEventCreate(&fork));
            CUDA(cudaEventCreate(&done));
            CUDA(cudaStreamBeginCapture(s.a, cudaStreamCaptureModeThreadLocal));
            CUDA(cudaEventRecord(fork, s.a));
            CUDA(cudaStreamWaitEvent(s.b, fork, 0));
            LAUNCH(produce, dim3(1), dim3(32), 0, s.a, x, 3.0f);
            if (edge)
                s.order();
            LAUNCH(consume, dim3(1), dim3(32), 0, s.b, x, out);
            CUDA(cudaEventRecord(done, s.b));
            CUDA(cudaStreamWaitEvent(s.a, done, 0));
            cudaGraph_t g;
            cudaGraphExec_t exec;
            CUDA(cudaStreamEndCapture(s.a, &g));
            CUDA(cudaGraphInstantiate(&exec, g, 0));
            CUDA(cudaGraphLaunch(exec, s.a));
            CUDA(cudaGraphLaunch(exec, s.b)); /* never beside itself */
            CUDA(cudaDeviceSynchronize());
        };
    };
    silent(run(true));
    reported(run(false), {"missing event", "produce", "consume"});
}

static void products_are_operations_too(void **)
{
    auto run = [](bool event) {
        return [event] {
            two_streams s;
            cublasHandle_t h;
            std::vector<float> ones(64, 1.0f);
            float *a = device_of(ones), *b = device_of(ones), *c = device_new<float>(64);
            const float one = 1.0f, zero = 0.0f;
            cublasCreate(&h);
            cublasSetStream(h, s.b);
            LAUNCH(produce, dim3(1), dim3(64), 0, s.a, a, 2.0f);
            if (event)
                s.order();
            cublasGemmEx(h, CUBLAS_OP_T, CUBLAS_OP_N, 8, 8, 8, &one, a, CUDA_R_32F, 8, b,
                         CUDA_R_32F, 8, &zero, c, CUDA_R_32F, 8, CUBLAS_COMPUTE_32F,
                         CUBLAS_GEMM_DEFAULT);
            CUDA(cudaDeviceSynchronize());
        };
    };
    silent(run(true));
    reported(run(false), {"missing event", "produce", "cublasGemmEx"});
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(missing_barriers),
        cmocka_unit_test(missing_warp_syncs),
        cmocka_unit_test(early_launches_wait),
        cmocka_unit_test(uninitialised_shared_memory),
        cmocka_unit_test(atomics_are_no_races),
        cmocka_unit_test(a_real_pipeline_passes),
        cmocka_unit_test(blocks_do_not_see_each_other),
        cmocka_unit_test(device_memory_inside_a_block),
        cmocka_unit_test(missing_events),
        cmocka_unit_test(graph_edges),
        cmocka_unit_test(products_are_operations_too),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
