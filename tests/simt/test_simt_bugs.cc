/* test_simt_bugs.cc: bugs of kernels, seeded one by one, and what the shim says to them without the race detector (its
 * own are in test_simt_race.cc). A bug that only makes a result depend on the order must change the result in one of the
 * schedules; any other must be reported with kernel, block and thread. */
#include "test_simt.h"

#define WHERE(name) "kernel " name, "block (", "thread ("

/* ---- the order of threads ---- */

/* missing: 0 nothing, 1 the barrier before the read, 2 the barrier before the buffer is used again. */
__global__ void rotate(const float *x, float *out, int missing)
{
    DYN_SMEM(float, s);
    int t = (int)threadIdx.x, n = (int)blockDim.x;
    float sum = 0;
    for (int round = 0; round < 3; round++) {
        s[t] = x[round * n + t];
        if (missing != 1)
            __syncthreads();
        sum += s[(t + 40) % n];
        if (missing != 2)
            __syncthreads();
    }
    out[t] = sum;
}

static bool rotate_right(int missing)
{
    const int n = 128;
    std::vector<float> x(3 * n);
    for (int i = 0; i < 3 * n; i++)
        x[(size_t)i] = (float)(i * i % 517);
    float *dx = device_of(x), *dout = device_new<float>(n);
    LAUNCH(rotate, dim3(1), dim3(n), n * sizeof(float), 0, dx, dout, missing);
    std::vector<float> out = host_of(dout, n);
    bool right = true;
    for (int t = 0; t < n; t++) {
        float sum = 0;
        for (int round = 0; round < 3; round++)
            sum += x[(size_t)(round * n + (t + 40) % n)];
        right &= out[(size_t)t] == sum;
    }
    CUDA(cudaFree(dx));
    CUDA(cudaFree(dout));
    return right;
}

static void a_missing_barrier_changes_the_result(void **)
{
    for (int missing = 0; missing < 3; missing++) {
        bool right = true;
        for (enum simt::schedule s : {simt::SCHEDULE_FORWARD, simt::SCHEDULE_REVERSE}) {
            use_schedule(s);
            right &= rotate_right(missing);
        }
        assert_int_equal(right, missing == 0);
        for (uint32_t seed = 1; seed < 5 && right; seed++) {
            use_schedule(simt::SCHEDULE_RANDOM, seed);
            assert_true(rotate_right(missing));
        }
    }
}

/* Any one-way order between two warps shows in the first two schedules, whichever warps they are. */
__global__ void one_way(float *out, int writer, int reader)
{
    DYN_SMEM(float, s);
    __syncthreads();
    if (warp_id() == writer)
        s[lane_id()] = 1.0f;
    warp_sum(1.0f); /* no order between warps */
    if (warp_id() == reader)
        out[lane_id()] = s[lane_id()];
}

static void every_pair_of_warps_comes_in_both_orders(void **)
{
    float *d = device_new<float>(32);
    for (int writer = 0; writer < 5; writer++)
        for (int reader = 0; reader < 5; reader++) {
            int seen = 0;
            for (enum simt::schedule s : {simt::SCHEDULE_FORWARD, simt::SCHEDULE_REVERSE}) {
                use_schedule(s);
                LAUNCH(one_way, dim3(1), dim3(160), 128, 0, d, writer, reader);
                float v = host_of(d, 32)[7];
                seen |= v == 1.0f ? 1 : 2;
            }
            assert_int_equal(seen, writer == reader ? 1 : 3);
        }
    CUDA(cudaFree(d));
}

__global__ void one_way_lanes(float *out, int writer, int reader)
{
    DYN_SMEM(float, s);
    __syncwarp();
    if (lane_id() == writer)
        s[0] = 1.0f;
    if (lane_id() == reader)
        out[0] = s[0];
}

static void every_pair_of_lanes_comes_in_both_orders(void **)
{
    float *d = device_new<float>(1);
    for (int writer : {0, 1, 15, 30, 31})
        for (int reader : {0, 1, 16, 30, 31}) {
            int seen = 0;
            for (enum simt::schedule s : {simt::SCHEDULE_FORWARD, simt::SCHEDULE_REVERSE}) {
                use_schedule(s);
                LAUNCH(one_way_lanes, dim3(1), dim3(32), 128, 0, d, writer, reader);
                seen |= host_of(d, 1)[0] == 1.0f ? 1 : 2;
            }
            assert_int_equal(seen, writer == reader ? 1 : 3);
        }
    CUDA(cudaFree(d));
}

/* A double-buffered copy that waits for one group too few (off = 1). */
__global__ void pipeline(const float *x, float *out, int n_tiles, int off)
{
    DYN_SMEM(float, s); /* [2][128] */
    int t = (int)threadIdx.x;
    float sum = 0;
    cpa16(s + 4 * t, x + 4 * t, true);
    cpa_commit();
    for (int i = 0; i < n_tiles; i++) {
        bool more = i + 1 < n_tiles;
        if (more)
            cpa16(s + (i + 1) % 2 * 128 + 4 * t, x + (i + 1) * 128 + 4 * t, true);
        cpa_commit();
        if (off)
            cpa_wait<2>();
        else
            cpa_wait<1>();
        __syncthreads();
        sum += s[i % 2 * 128 + (t * 4 + 77) % 128];
        __syncthreads();
    }
    cpa_wait<0>();
    out[t] = sum;
}

static void a_wait_for_too_few_copies_gives_nan(void **)
{
    std::vector<float> x(5 * 128, 1.0f);
    for (int off = 0; off < 2; off++) {
        use_schedule(simt::SCHEDULE_FORWARD);
        float *dx = device_of(x), *dout = device_new<float>(32);
        LAUNCH(pipeline, dim3(1), dim3(32), 2 * 128 * 4, 0, dx, dout, off ? 2 : 5, off);
        float v = host_of(dout, 32)[3];
        assert_true(off ? v != v : v == 5.0f);
        CUDA(cudaFree(dx));
        CUDA(cudaFree(dout));
    }
    expect_report(/* and with more tiles a buffer is the target of two copies */
                  [&x] {
                      float *dx = device_of(x), *dout = device_new<float>(32);
                      LAUNCH(pipeline, dim3(1), dim3(32), 2 * 128 * 4, 0, dx, dout, 5, 1);
                      cudaDeviceSynchronize();
                  },
                  {"cp.async in flight", WHERE("pipeline")});
}

__global__ void never_waits(const float *x)
{
    DYN_SMEM(float, s);
    cpa16(s + 4 * threadIdx.x, x + 4 * threadIdx.x, true);
    cpa_commit();
}

__global__ void reads_too_much(float *out)
{
    DYN_SMEM(float, s);
    int t = (int)threadIdx.x;
    if (t < 31)
        s[t] = 1.0f;
    __syncthreads();
    out[t] = s[t];
}

static void uninitialised_shared_memory_is_nan(void **)
{
    use_schedule(simt::SCHEDULE_FORWARD);
    float *d = device_new<float>(32);
    LAUNCH(reads_too_much, dim3(3), dim3(32), 128, 0, d); /* old blocks leave nothing behind */
    std::vector<float> o = host_of(d, 32);
    assert_true(o[30] == 1.0f && o[31] != o[31]);
    float fresh = host_of(device_new<float>(4), 4)[2];
    assert_true(fresh != fresh);
    CUDA(cudaFree(d));
    expect_report(
        [] {
            float *x = device_of(std::vector<float>(128, 1.0f));
            LAUNCH(never_waits, dim3(1), dim3(32), 512, 0, x);
            cudaDeviceSynchronize();
        },
        {"cp.async in flight", WHERE("never_waits")});
}

/* ---- collectives ---- */

__global__ void half_a_warp(float *o)
{
    float v = (float)threadIdx.x;
    if (lane_id() < 16)
        v += __shfl_xor_sync(FULL_WARP, v, 1);
    o[threadIdx.x] = v;
}
__global__ void not_in_the_mask(float *o)
{
    o[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, 1.0f, 1);
}
__global__ void source_not_in_the_mask(float *o)
{
    if (lane_id() < 16)
        o[threadIdx.x] = __shfl_sync(0x0000ffffu, 1.0f, 20);
}
__global__ void two_collectives(float *o)
{
    float v = 1.0f;
    if (threadIdx.x & 1u)
        v = __shfl_xor_sync(FULL_WARP, v, 2);
    else
        __syncwarp();
    o[threadIdx.x] = v;
}
__global__ void two_lines(float *o)
{
    float v = 1.0f;
    if (threadIdx.x & 1u)
        v = __shfl_xor_sync(FULL_WARP, v, 2);
    else
        v = __shfl_xor_sync(FULL_WARP, v, 1);
    o[threadIdx.x] = v;
}
__global__ void crossed_masks(float *o)
{
    uint32_t mine = lane_id() < 8 ? 0x0000ffffu : 0x00ffffffu; /* each waits for the other */
    if (lane_id() < 24)
        o[threadIdx.x] = (float)__ballot_sync(mine, 1);
}
__global__ void lonely_mma(float *o)
{
    float d[4] = {0, 0, 0, 0};
    uint32_t a[4] = {0, 0, 0, 0};
    if (lane_id() != 31)
        mma_f16(d, a, a);
    o[threadIdx.x] = d[0];
}

static void collectives_need_all_their_lanes(void **)
{
    struct {
        void (*kernel)(float *);
        const char *name, *kind;
    } bugs[] = {
        {half_a_warp, "half_a_warp", "lane missing from a collective: __shfl_xor_sync"},
        {not_in_the_mask, "not_in_the_mask", "lane missing from a mask"},
        {source_not_in_the_mask, "source_not_in_the_mask", "lane missing from a mask"},
        {two_collectives, "two_collectives", "divergent collective"},
        {two_lines, "two_lines", "divergent collective"},
        {crossed_masks, "crossed_masks", "divergent collective"},
        {lonely_mma, "lonely_mma", "lane missing from a collective: mma"},
    };
    for (auto &bug : bugs)
        for (enum simt::schedule s : {simt::SCHEDULE_FORWARD, simt::SCHEDULE_REVERSE})
            expect_report(
                [&] {
                    use_schedule(s);
                    float *d = device_new<float>(64);
                    simt::launch(bug.name, bug.kernel, dim3(1), dim3(64), 0, nullptr, d);
                    cudaDeviceSynchronize();
                },
                {bug.kind, "kernel ", bug.name, "block (0,0,0)", "thread (", "test_simt_bugs.cc:"});
}

/* ---- barriers ---- */

__global__ void leaves_early(float *o, int n)
{
    if ((int)threadIdx.x >= n)
        return;
    __syncthreads();
    o[threadIdx.x] = 1;
}
__global__ void two_barriers(float *o)
{
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
    o[threadIdx.x] = 1;
}
__global__ void barrier_and_shuffle(float *o)
{
    float v = 1;
    if (lane_id() == 3)
        __syncthreads();
    else
        v = __shfl_xor_sync(FULL_WARP, v, 1);
    o[threadIdx.x] = v;
}
__global__ void block_two_only(float *o)
{
    if (blockIdx.x == 2 && threadIdx.x >= 32)
        return;
    __syncthreads();
    o[threadIdx.x] = 1;
}

static void barriers_need_the_whole_block(void **)
{
    for (enum simt::schedule s : {simt::SCHEDULE_FORWARD, simt::SCHEDULE_REVERSE}) {
        auto in = [s](auto launch_it) {
            return [s, launch_it] {
                use_schedule(s);
                launch_it(device_new<float>(64));
                cudaDeviceSynchronize();
            };
        };
        expect_report(in([](float *d) { LAUNCH(leaves_early, dim3(1), dim3(64), 0, 0, d, 40); }),
                      {"exit before a barrier", WHERE("leaves_early")});
        expect_report(in([](float *d) { LAUNCH(two_barriers, dim3(1), dim3(64), 0, 0, d); }),
                      {"divergent barrier", WHERE("two_barriers")});
        expect_report(in([](float *d) { LAUNCH(barrier_and_shuffle, dim3(1), dim3(32), 0, 0, d); }),
                      {"lane missing from a collective", WHERE("barrier_and_shuffle")});
        expect_report(in([](float *d) { LAUNCH(block_two_only, dim3(4), dim3(64), 0, 0, d); }),
                      {"exit before a barrier", "block (2,0,0)", "thread ("});
    }
}

/* ---- addresses ---- */

__global__ void vector_at(const float *x, float4 *out, int offset)
{
    out[threadIdx.x] = *(const float4 *)(x + 4 * threadIdx.x + offset);
}
__global__ void stream_at(const float *x, uint4 *out, int offset)
{
    out[threadIdx.x] = ld_stream16(x + 4 * threadIdx.x + offset);
}
__global__ void copy_at(const float *x, float *out, int offset, int shared_offset)
{
    DYN_SMEM(float, s);
    cpa16(s + 4 * threadIdx.x + shared_offset, x + 4 * threadIdx.x + offset, true);
    cpa_commit();
    cpa_wait<0>();
    out[threadIdx.x] = s[4 * threadIdx.x + (unsigned)shared_offset];
}
__global__ void matrix_at(float *out, int offset)
{
    DYN_SMEM(half_t, s);
    for (int i = lane_id(); i < 512; i += 32)
        s[i] = f2h(1.0f);
    __syncwarp();
    uint32_t r[4];
    ldsm4(r, s + lane_id() * 8 + offset);
    out[threadIdx.x] = (float)r[0];
}

static void misaligned_vectors_are_reported(void **)
{
    auto x = [] { return device_of(std::vector<float>(256, 1.0f)); };
    expect_silence([&] {
        LAUNCH(vector_at, dim3(1), dim3(32), 0, 0, x(), device_new<float4>(32), 4);
        LAUNCH(stream_at, dim3(1), dim3(32), 0, 0, x(), device_new<uint4>(32), 8);
        LAUNCH(copy_at, dim3(1), dim3(32), 1024, 0, x(), device_new<float>(32), 8, 4);
        LAUNCH(matrix_at, dim3(1), dim3(32), 1024, 0, device_new<float>(32), 8);
        cudaDeviceSynchronize();
    });
    if (!SANITIZED)
        expect_report(
            [&] {
                LAUNCH(vector_at, dim3(1), dim3(32), 0, 0, x(), device_new<float4>(32), 1);
                cudaDeviceSynchronize();
            },
            {"misaligned access", "no multiple of 16", "test_simt_bugs.cc:", WHERE("vector_at")});
    expect_report(
        [&] {
            LAUNCH(stream_at, dim3(1), dim3(32), 0, 0, x(), device_new<uint4>(32), 2);
            cudaDeviceSynchronize();
        },
        {"misaligned access", "vector load", WHERE("stream_at")});
    expect_report(
        [&] {
            LAUNCH(copy_at, dim3(1), dim3(32), 1024, 0, x(), device_new<float>(32), 1, 0);
            cudaDeviceSynchronize();
        },
        {"misaligned access", "cp.async from", WHERE("copy_at")});
    expect_report(
        [&] {
            LAUNCH(copy_at, dim3(1), dim3(32), 1024, 0, x(), device_new<float>(32), 0, 2);
            cudaDeviceSynchronize();
        },
        {"misaligned access", "cp.async to", WHERE("copy_at")});
    expect_report(
        [&] {
            LAUNCH(matrix_at, dim3(1), dim3(32), 1024, 0, device_new<float>(32), 4);
            cudaDeviceSynchronize();
        },
        {"misaligned access", "ldmatrix", WHERE("matrix_at")});
}

__global__ void global_at(float *x, int at, int write)
{
    if (threadIdx.x == 5) {
        if (write)
            x[at] = 1.0f;
        else
            x[0] = x[at];
    }
}
__global__ void shared_at(float *out, int at, int write)
{
    DYN_SMEM(float, s);
    if (threadIdx.x == 5) {
        if (write)
            s[at] = 1.0f;
        else
            out[0] = s[at];
    }
}
__global__ void array_at(float *out, int at)
{
    float acc[4] = {0, 0, 0, 0};
    for (int i = 0; i < at; i++)
        acc[i] += (float)i;
    out[threadIdx.x] = acc[threadIdx.x % 4];
}
__global__ void deep(float *out, int n)
{
    float big[100000];
    for (int i = 0; i < n; i++)
        big[i] = (float)i;
    out[0] = big[n / 2];
}

static void expect_fault(int n, int at, int write)
{
    expect_report(
        [=] {
            float *x = device_of(std::vector<float>((size_t)n, 0.0f));
            LAUNCH(global_at, dim3(1), dim3(32), 0, 0, x, at, write);
            cudaDeviceSynchronize();
        },
        {"out of bounds", "device memory", "kernel global_at"});
}

static void accesses_outside_are_reported(void **)
{
    expect_fault(64, 64, 1); /* the page behind */
    expect_fault(64, 64, 0);
    expect_fault(64, -4096, 0); /* the page before */
    expect_fault(65, 66, 1);    /* inside the slack: a canary */
    expect_fault(65, -1, 1);
    expect_fault(1 << 20, 1 << 20, 0);
    auto shared = [](int bytes, int at, int write) {
        return [=] {
            LAUNCH(shared_at, dim3(1), dim3(32), bytes, 0, device_new<float>(1), at, write);
            cudaDeviceSynchronize();
        };
    };
    expect_silence(shared(256, 63, 1));
    expect_report(shared(256, 64, 1), {"out of bounds", "shared memory", WHERE("shared_at")});
    expect_report(shared(256, 64, 0), {"out of bounds", "shared memory", WHERE("shared_at")});
    expect_report(shared(260, 65, 1), {"out of bounds", "shared memory", "kernel shared_at"});
    expect_report(shared(256, -1, 1), {"out of bounds", "shared memory", "kernel shared_at"});
    expect_report(shared(0, 0, 1), {"out of bounds", "shared memory", WHERE("shared_at")});
    if (!SANITIZED)
        expect_report(
            [] {
                LAUNCH(array_at, dim3(1), dim3(32), 0, 0, device_new<float>(32), 5);
                cudaDeviceSynchronize();
            },
            {"out of bounds", "index 4 of", "test_simt_bugs.cc:", WHERE("array_at")});
    expect_report(
        [] {
            LAUNCH(deep, dim3(1), dim3(32), 0, 0, device_new<float>(1), 90000);
            cudaDeviceSynchronize();
        },
        {SANITIZED ? "" : "stack of a thread", "kernel deep"});
    expect_report(
        [] {
            float *x = device_new<float>(64);
            CUDA(cudaFree(x));
            LAUNCH(global_at, dim3(1), dim3(32), 0, 0, x, 0, 0);
            cudaDeviceSynchronize();
        },
        {"out of bounds", "freed", WHERE("global_at")});
    expect_report(
        [] {
            float host = 0;
            LAUNCH(stream_at, dim3(1), dim3(32), 0, 0, &host, device_new<uint4>(32), 0);
            cudaDeviceSynchronize();
        },
        {"stream_at"});
}

__global__ void stops(float *x)
{
    if (x[0] == 7.0f && blockIdx.x == 1 && threadIdx.x == 40)
        __trap();
    __syncthreads();
    x[1 + blockIdx.x] = 1.0f;
}

static void a_trap_is_a_report_or_a_dead_device(void **)
{
    auto body = [] {
        float *x = device_of(std::vector<float>{7, 0, 0, 0});
        LAUNCH(stops, dim3(3), dim3(64), 0, 0, x);
        return cudaDeviceSynchronize();
    };
    expect_report([&] { body(); }, {"trap", "block (1,0,0)", "thread (40,0,0)", "kernel stops"});
    expect_silence([&] {
        simt::options o = simt::options_default();
        o.trap_is_error = true;
        simt::set_options(o);
        void *p;
        int n;
        if (body() != cudaErrorLaunchFailure || cudaGetLastError() != cudaErrorLaunchFailure ||
            cudaMalloc(&p, 4) != cudaErrorLaunchFailure || cudaGetDeviceCount(&n) == cudaSuccess)
            _exit(1);
    });
}

static void misshapen_launches_are_refused(void **)
{
    float *d = device_new<float>(64);
    auto launch_is = [d](dim3 grid, dim3 block, size_t smem, cudaError_t want) {
        LAUNCH(leaves_early, grid, block, smem, 0, d, 64);
        assert_int_equal(cudaPeekAtLastError(), want);
        assert_int_equal(cudaGetLastError(), want);
        assert_int_equal(cudaGetLastError(), cudaSuccess);
        CUDA(cudaDeviceSynchronize());
    };
    use_schedule(simt::SCHEDULE_FORWARD);
    launch_is(dim3(1), dim3(64), 0, cudaSuccess);
    launch_is(dim3(0), dim3(64), 0, cudaErrorInvalidConfiguration);
    launch_is(dim3(1), dim3(1056), 0, cudaErrorInvalidConfiguration);
    launch_is(dim3(1, 65536), dim3(64), 0, cudaErrorInvalidConfiguration);
    launch_is(dim3(1), dim3(64), 48 << 10, cudaSuccess);
    launch_is(dim3(1), dim3(64), (48 << 10) + 4, cudaErrorInvalidValue);
    CUDA(cudaFuncSetAttribute(leaves_early, cudaFuncAttributeMaxDynamicSharedMemorySize, 101376));
    launch_is(dim3(1), dim3(64), 101376, cudaSuccess);
    launch_is(dim3(1), dim3(64), 101380, cudaErrorInvalidValue);
    assert_int_equal(cudaFuncSetAttribute(leaves_early, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          101380),
                     cudaErrorInvalidValue);
    expect_report([d] { LAUNCH(leaves_early, dim3(1), dim3(48), 0, 0, d, 64); },
                  {"whole warps", "leaves_early"});
    CUDA(cudaFree(d));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_missing_barrier_changes_the_result),
        cmocka_unit_test(every_pair_of_warps_comes_in_both_orders),
        cmocka_unit_test(every_pair_of_lanes_comes_in_both_orders),
        cmocka_unit_test(a_wait_for_too_few_copies_gives_nan),
        cmocka_unit_test(uninitialised_shared_memory_is_nan),
        cmocka_unit_test(collectives_need_all_their_lanes),
        cmocka_unit_test(barriers_need_the_whole_block),
        cmocka_unit_test(misaligned_vectors_are_reported),
        cmocka_unit_test(accesses_outside_are_reported),
        cmocka_unit_test(a_trap_is_a_report_or_a_dead_device),
        cmocka_unit_test(misshapen_launches_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
