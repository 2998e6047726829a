/* test_simt_runtime.cc: the fake runtime: lazy streams and what they show, graphs, mapped memory, rights, errors. */
#include "test_simt.h"

static const enum simt::stream_order orders[] = {simt::STREAMS_LAZY, simt::STREAMS_EAGER,
                                                 simt::STREAMS_RANDOM};

__global__ void add(float *x, float v)
{
    x[threadIdx.x] += v;
}
__global__ void scale(float *x, float v)
{
    x[threadIdx.x] *= v;
}
__global__ void copy_to(float *to, const float *from)
{
    to[threadIdx.x] = from[threadIdx.x];
}

static cudaStream_t stream_new()
{
    cudaStream_t s;
    CUDA(cudaStreamCreateWithPriority(&s, cudaStreamNonBlocking, -1));
    return s;
}
static cudaEvent_t event_new()
{
    cudaEvent_t e;
    CUDA(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    return e;
}
static float *zeros()
{
    return device_of(std::vector<float>(32, 0.0f));
}

/* ---- streams ---- */

static void a_stream_keeps_its_order(void **)
{
    for (enum simt::stream_order o : orders) {
        use_streams(o);
        cudaStream_t s = stream_new();
        float *x = zeros(), *host;
        CUDA(cudaMallocHost(&host, 128));
        for (int i = 0; i < 3; i++) {
            LAUNCH(add, dim3(1), dim3(32), 0, s, x, 1.0f);
            LAUNCH(scale, dim3(1), dim3(32), 0, s, x, 2.0f);
        }
        CUDA(cudaMemcpyAsync(host, x, 128, cudaMemcpyDeviceToHost, s));
        CUDA(cudaMemsetAsync(x, 0, 128, s));
        assert_true(host[3] != host[3]); /* nothing has run, and the old bytes are gone */
        CUDA(cudaStreamSynchronize(s));
        assert_float_equal(host[3], 14.0f, 0.0f);
        assert_float_equal(host_of(x, 32)[3], 0.0f, 0.0f);
        CUDA(cudaStreamDestroy(s));
        CUDA(cudaFree(x));
        CUDA(cudaFreeHost(host));
    }
}

/* event: 0 none, 1 as it should be. Reader after writer, and writer after reader. */
static bool hand_over(bool event, bool overwrite)
{
    cudaStream_t a = stream_new(), b = stream_new();
    cudaEvent_t e = event_new();
    float *x = zeros(), *y = zeros();
    if (overwrite)
        LAUNCH(copy_to, dim3(1), dim3(32), 0, a, y, x); /* reads 0 */
    else
        LAUNCH(add, dim3(1), dim3(32), 0, a, x, 5.0f);
    if (event) {
        CUDA(cudaEventRecord(e, a));
        CUDA(cudaStreamWaitEvent(b, e, 0));
    }
    if (overwrite)
        LAUNCH(add, dim3(1), dim3(32), 0, b, x, 5.0f);
    else
        LAUNCH(copy_to, dim3(1), dim3(32), 0, b, y, x);
    CUDA(cudaStreamSynchronize(overwrite ? a : b));
    bool right = host_of(y, 32)[1] == (overwrite ? 0.0f : 5.0f);
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaEventDestroy(e));
    CUDA(cudaStreamDestroy(a));
    CUDA(cudaStreamDestroy(b));
    CUDA(cudaFree(x));
    CUDA(cudaFree(y));
    return right;
}

static void a_missing_event_changes_the_result(void **)
{
    for (int overwrite = 0; overwrite < 2; overwrite++) {
        bool without = true, with = true;
        for (enum simt::stream_order o : orders) {
            use_streams(o, 3);
            with &= hand_over(true, overwrite);
            without &= hand_over(false, overwrite);
        }
        assert_true(with);
        assert_false(without);
        use_streams(overwrite ? simt::STREAMS_EAGER : simt::STREAMS_LAZY);
        assert_false(hand_over(false, overwrite)); /* the order made for this bug */
    }
}

static void staging_is_read_when_the_copy_runs(void **)
{
    use_streams(simt::STREAMS_LAZY);
    cudaStream_t s = stream_new();
    float *x = zeros(), *staging, pageable[32];
    CUDA(cudaMallocHost(&staging, 128));
    staging[2] = 1.0f;
    CUDA(cudaMemcpyAsync(x, staging, 128, cudaMemcpyHostToDevice, s));
    staging[2] = 2.0f; /* too early: that is what arrives */
    CUDA(cudaStreamSynchronize(s));
    assert_float_equal(host_of(x, 32)[2], 2.0f, 0.0f);
    pageable[2] = 3.0f; /* staged by the runtime */
    CUDA(cudaMemcpyAsync(x, pageable, 128, cudaMemcpyHostToDevice, s));
    pageable[2] = 4.0f;
    CUDA(cudaStreamSynchronize(s));
    assert_float_equal(host_of(x, 32)[2], 3.0f, 0.0f);
    /* a copy back over a buffer whose upload is still to run leaves the upload its bytes */
    staging[2] = 7.0f;
    CUDA(cudaMemcpyAsync(x, staging, 128, cudaMemcpyHostToDevice, s));
    LAUNCH(add, dim3(1), dim3(32), 0, s, x, 1.0f);
    CUDA(cudaMemcpyAsync(staging, x, 128, cudaMemcpyDeviceToHost, s));
    CUDA(cudaStreamSynchronize(s));
    assert_float_equal(staging[2], 8.0f, 0.0f);
    /* registered memory is pinned, too */
    std::vector<float> mine(32, 9.0f);
    CUDA(cudaHostRegister(mine.data(), 128, 0));
    CUDA(cudaMemcpyAsync(x, mine.data(), 128, cudaMemcpyHostToDevice, s));
    mine[2] = 10.0f;
    CUDA(cudaStreamSynchronize(s));
    assert_float_equal(host_of(x, 32)[2], 10.0f, 0.0f);
    CUDA(cudaHostUnregister(mine.data()));
    assert_int_equal(cudaHostUnregister(mine.data()), cudaErrorInvalidValue);
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidValue);
    CUDA(cudaFreeHost(staging));
    CUDA(cudaStreamDestroy(s));
    CUDA(cudaFree(x));
}

static void counts_up(void *user)
{
    ++*(int *)user;
}

static void queries_see_time_go_by(void **)
{
    for (enum simt::stream_order o : orders) {
        use_streams(o, 11);
        cudaStream_t s = stream_new();
        cudaEvent_t start, end, never = event_new();
        CUDA(cudaEventCreate(&start));
        CUDA(cudaEventCreate(&end));
        float *x = zeros(), ms = -1;
        int called = 0;
        CUDA(cudaEventRecord(start, s));
        for (int i = 0; i < 5; i++)
            LAUNCH(add, dim3(1), dim3(32), 0, s, x, 1.0f);
        CUDA(cudaLaunchHostFunc(s, counts_up, &called));
        CUDA(cudaEventRecord(end, s));
        assert_int_equal(cudaEventQuery(end), cudaErrorNotReady);
        assert_int_equal(cudaEventElapsedTime(&ms, start, end), cudaErrorNotReady);
        assert_int_equal(cudaEventQuery(never), cudaSuccess);
        int polls = 0;
        while (cudaEventQuery(end) == cudaErrorNotReady)
            assert_true(++polls < 100);
        assert_true(polls > 3);
        assert_int_equal(called, 1);
        CUDA(cudaEventElapsedTime(&ms, start, end));
        assert_true(ms >= 0.0f);
        assert_int_equal(cudaStreamQuery(s), cudaSuccess);
        assert_int_equal(cudaGetLastError(), cudaErrorNotReady); /* "no error", but remembered */
        CUDA(cudaEventDestroy(start));
        CUDA(cudaEventDestroy(end));
        CUDA(cudaEventDestroy(never));
        CUDA(cudaStreamDestroy(s));
        CUDA(cudaFree(x));
    }
}

static void the_default_stream_waits_for_all_but_nonblocking(void **)
{
    for (enum simt::stream_order o : orders) {
        use_streams(o);
        cudaStream_t blocking, free_one = stream_new();
        CUDA(cudaStreamCreate(&blocking));
        float *x = zeros(), *y = zeros();
        LAUNCH(add, dim3(1), dim3(32), 0, blocking, x, 1.0f);
        LAUNCH(scale, dim3(1), dim3(32), 0, 0, x, 3.0f);
        LAUNCH(add, dim3(1), dim3(32), 0, blocking, x, 1.0f);
        CUDA(cudaStreamSynchronize(blocking));
        assert_float_equal(host_of(x, 32)[0], 4.0f, 0.0f);
        LAUNCH(add, dim3(1), dim3(32), 0, free_one, y, 1.0f);
        LAUNCH(scale, dim3(1), dim3(32), 0, 0, y, 3.0f);
        CUDA(cudaDeviceSynchronize());
        float v = host_of(y, 32)[0];
        assert_true(v == 3.0f || v == 1.0f); /* no order */
        CUDA(cudaStreamDestroy(blocking));
        CUDA(cudaStreamDestroy(free_one));
        CUDA(cudaFree(x));
        CUDA(cudaFree(y));
    }
}

/* ---- graphs ---- */

static void graphs_replay(void **)
{
    for (enum simt::stream_order o : orders) {
        use_streams(o, 5);
        cudaStream_t s = stream_new(), side = stream_new();
        cudaEvent_t fork = event_new(), join = event_new();
        float *x = zeros(), *y = zeros(), *in, *out;
        CUDA(cudaMallocHost(&in, 128));
        CUDA(cudaMallocHost(&out, 128));
        CUDA(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
        CUDA(cudaMemcpyAsync(x, in, 128, cudaMemcpyHostToDevice, s));
        CUDA(cudaEventRecord(fork, s));
        CUDA(cudaStreamWaitEvent(side, fork, 0));
        cudaStreamCaptureStatus status;
        CUDA(cudaStreamIsCapturing(side, &status));
        assert_int_equal(status, cudaStreamCaptureStatusActive);
        LAUNCH(copy_to, dim3(1), dim3(32), 0, side, y, x);
        LAUNCH(add, dim3(1), dim3(32), 0, side, y, 1.0f);
        CUDA(cudaEventRecord(join, side));
        CUDA(cudaStreamWaitEvent(s, join, 0));
        LAUNCH(scale, dim3(1), dim3(32), 0, s, y, 2.0f);
        CUDA(cudaMemcpyAsync(out, y, 128, cudaMemcpyDeviceToHost, s));
        cudaGraph_t g;
        cudaGraphExec_t exec;
        CUDA(cudaStreamEndCapture(s, &g));
        size_t n = 0;
        CUDA(cudaGraphGetNodes(g, nullptr, &n));
        assert_int_equal(n, 5);
        CUDA(cudaGraphInstantiate(&exec, g, 0));
        CUDA(cudaGraphDestroy(g));
        for (int step = 0; step < 4; step++) {
            in[7] = (float)step;
            CUDA(cudaGraphLaunch(exec, s));
            assert_true(out[7] != out[7]);
            CUDA(cudaStreamSynchronize(s));
            assert_float_equal(out[7], 2.0f * ((float)step + 1.0f), 0.0f);
        }
        CUDA(cudaGraphExecDestroy(exec));
        CUDA(cudaStreamDestroy(s));
        CUDA(cudaStreamDestroy(side));
        CUDA(cudaEventDestroy(fork));
        CUDA(cudaEventDestroy(join));
        CUDA(cudaFreeHost(in));
        CUDA(cudaFreeHost(out));
        CUDA(cudaFree(x));
        CUDA(cudaFree(y));
    }
}

static void captures_refuse_what_the_runtime_refuses(void **)
{
    use_streams(simt::STREAMS_LAZY);
    cudaStream_t s = stream_new(), side = stream_new();
    cudaEvent_t e = event_new();
    float *x = zeros(), host[32];
    cudaGraph_t g;
    void *p;
    auto begin = [&] { CUDA(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal)); };
    auto ends_with = [&](cudaError_t want) {
        assert_int_equal(cudaStreamEndCapture(s, &g), want);
        assert_null(g);
        (void)cudaGetLastError();
    };
    begin();
    assert_int_equal(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal),
                     cudaErrorIllegalState);
    assert_int_equal(cudaMalloc(&p, 64), cudaErrorStreamCaptureUnsupported);
    ends_with(cudaErrorStreamCaptureInvalidated);
    begin();
    assert_int_equal(cudaStreamSynchronize(s), cudaErrorStreamCaptureUnsupported);
    ends_with(cudaErrorStreamCaptureInvalidated);
    begin();
    assert_int_equal(cudaMemcpyAsync(host, x, 128, cudaMemcpyDeviceToHost, s),
                     cudaErrorStreamCaptureUnsupported); /* pageable */
    ends_with(cudaErrorStreamCaptureInvalidated);
    begin();
    assert_int_equal(cudaMemcpy(host, x, 128, cudaMemcpyDeviceToHost),
                     cudaErrorStreamCaptureImplicit);
    ends_with(cudaErrorStreamCaptureInvalidated);
    begin();
    CUDA(cudaEventRecord(e, s));
    assert_int_equal(cudaEventSynchronize(e), cudaErrorCapturedEvent);
    CUDA(cudaStreamWaitEvent(side, e, 0));
    LAUNCH(add, dim3(1), dim3(32), 0, side, x, 1.0f); /* never joined */
    ends_with(cudaErrorStreamCaptureUnjoined);
    CUDA(cudaEventRecord(e, side)); /* an event from outside */
    begin();
    assert_int_equal(cudaStreamWaitEvent(s, e, 0), cudaErrorStreamCaptureIsolation);
    CUDA(cudaStreamEndCapture(s, &g));
    CUDA(cudaGraphDestroy(g));
    (void)cudaGetLastError();
    CUDA(cudaDeviceSynchronize());
    assert_float_equal(host_of(x, 32)[0], 0.0f, 0.0f); /* nothing of it has run */
    CUDA(cudaStreamDestroy(s));
    CUDA(cudaStreamDestroy(side));
    CUDA(cudaEventDestroy(e));
    CUDA(cudaFree(x));
}

/* ---- memory ---- */

static void the_host_cannot_touch_device_memory(void **)
{
    use_streams(simt::STREAMS_LAZY);
    float *x = zeros();
    for (int write = 0; write < 2; write++) {
        child_end end = child_run([x, write] {
            volatile float *v = x;
            float f = write ? *v = 1.0f : *v;
            (void)f;
        });
        assert_true(!end.fine());
    }
    LAUNCH(add, dim3(1), dim3(32), 0, 0, x, 1.0f);
    CUDA(cudaDeviceSynchronize());
    child_end end = child_run([x] {
        volatile float *v = x;
        *v = 1.0f;
    });
    assert_true(!end.fine()); /* closed again */
    cudaPointerAttributes a;
    CUDA(cudaPointerGetAttributes(&a, x));
    assert_int_equal(a.type, cudaMemoryTypeDevice);
    CUDA(cudaFree(x));
}

static void memory_is_counted_and_ends(void **)
{
    simt::options o = simt::options_default();
    size_t before, total, now;
    CUDA(cudaMemGetInfo(&before, &total));
    o.device_bytes = total - before + (1u << 20);
    simt::set_options(o);
    void *a, *b = (void *)1;
    CUDA(cudaMalloc(&a, 700 << 10));
    assert_int_equal(cudaMalloc(&b, 700 << 10), cudaErrorMemoryAllocation);
    assert_null(b);
    assert_int_equal(cudaGetLastError(), cudaErrorMemoryAllocation);
    CUDA(cudaMemGetInfo(&now, &total));
    assert_int_equal(now, (1024 - 700) << 10);
    CUDA(cudaFree(a));
    CUDA(cudaMalloc(&b, 1 << 20));
    CUDA(cudaFree(b));
    assert_int_equal(cudaFree(b), cudaErrorInvalidValue);
    CUDA(cudaFree(nullptr));
    (void)cudaGetLastError();
    use_streams(simt::STREAMS_LAZY);
}

static void copies_check_their_ranges(void **)
{
    use_streams(simt::STREAMS_LAZY);
    float *x = zeros(), host[64] = {};
    assert_int_equal(cudaMemcpy(x, host, 132, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    assert_int_equal(cudaMemcpy(host, x + 30, 12, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
    assert_int_equal(cudaMemcpy(x, host, 128, cudaMemcpyDeviceToHost),
                     cudaErrorInvalidMemcpyDirection);
    assert_int_equal(cudaMemset(x + 1, 0, 128), cudaErrorInvalidValue);
    assert_int_equal(cudaMemset(host, 0, 128), cudaErrorInvalidValue);
    CUDA(cudaMemcpy(x, host, 0, cudaMemcpyHostToDevice));
    for (int i = 0; i < 64; i++)
        host[i] = (float)i;
    /* a 4 x 3 piece of an 8-wide picture */
    CUDA(cudaMemcpy2DAsync(x, 16, host + 2, 32, 12, 4, cudaMemcpyHostToDevice, 0));
    std::vector<float> o = host_of(x, 32);
    assert_float_equal(o[4 * 3 + 2], 3 * 8 + 4, 0.0f);
    assert_float_equal(o[4 * 2 + 3], 0.0f, 0.0f);
    (void)cudaGetLastError();
    CUDA(cudaFree(x));
}

/* Reserve, create, map, use, move to another address, unmap; and what the driver refuses. */
static void mapped_memory(void **)
{
    use_streams(simt::STREAMS_LAZY);
    rt_driver d;
    const char *missing = nullptr;
    CUDA(rt_driver_open(&d, &missing));
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    CUmemAccessDesc access = {prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    size_t unit = 0, before, after, total;
    CUDA(cudaMemGetInfo(&before, &total));
    assert_int_equal(d.granularity(&unit, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM), CUDA_SUCCESS);
    assert_int_equal(unit, 2 << 20);
    CUdeviceptr base = 0;
    assert_int_equal(d.address_reserve(&base, unit + 1, 0, 0, 0), CUDA_ERROR_INVALID_VALUE);
    assert_int_equal(d.address_reserve(&base, 8 * unit, 0, 0, 0), CUDA_SUCCESS);
    CUmemGenericAllocationHandle h[2];
    assert_int_equal(d.create(&h[0], 100, &prop, 0), CUDA_ERROR_INVALID_VALUE);
    for (CUmemGenericAllocationHandle &one : h)
        assert_int_equal(d.create(&one, unit, &prop, 0), CUDA_SUCCESS);
    assert_int_equal(d.map(base + 4096, unit, 0, h[0], 0), CUDA_ERROR_INVALID_VALUE);
    assert_int_equal(d.map(base + 8 * unit, unit, 0, h[0], 0), CUDA_ERROR_INVALID_VALUE);
    for (int i = 0; i < 2; i++)
        assert_int_equal(d.map(base + (size_t)(3 + i) * unit, unit, 0, h[i], 0), CUDA_SUCCESS);
    assert_int_equal(d.map(base + 3 * unit, unit, 0, h[1], 0), CUDA_ERROR_INVALID_VALUE);
    assert_int_equal(d.set_access(base + 2 * unit, 2 * unit, &access, 1), CUDA_ERROR_INVALID_VALUE);
    float *x = (float *)(uintptr_t)(base + 4 * unit - 64); /* over the border of two pieces */
    assert_int_equal(cudaMemset(x, 0, 128), cudaErrorInvalidValue); /* no access yet */
    assert_int_equal(d.set_access(base + 3 * unit, 2 * unit, &access, 1), CUDA_SUCCESS);
    float fresh = host_of((float *)(uintptr_t)(base + 3 * unit), 4)[1];
    assert_true(fresh != fresh);
    CUDA(cudaMemset(x, 0, 128));
    LAUNCH(add, dim3(1), dim3(32), 0, 0, x, 6.0f);
    assert_float_equal(host_of(x, 32)[20], 6.0f, 0.0f);
    /* the memory of a piece outlives its address */
    assert_int_equal(d.unmap(base + 4 * unit, unit), CUDA_SUCCESS);
    expect_report(
        [x] {
            LAUNCH(add, dim3(1), dim3(32), 0, 0, x, 1.0f);
            cudaDeviceSynchronize();
        },
        {"out of bounds", "device memory", "kernel add"});
    assert_int_equal(d.map(base, unit, 0, h[1], 0), CUDA_SUCCESS);
    assert_int_equal(d.set_access(base, unit, &access, 1), CUDA_SUCCESS);
    assert_float_equal(host_of((float *)(uintptr_t)base, 16)[9], 6.0f, 0.0f);
    assert_int_equal(d.address_free(base, 8 * unit), CUDA_ERROR_INVALID_VALUE);
    CUDA(cudaMemGetInfo(&after, &total));
    assert_int_equal(before - after, 2 * unit);
    for (CUmemGenericAllocationHandle one : h)
        assert_int_equal(d.release(one), CUDA_SUCCESS); /* goes when it is unmapped */
    assert_int_equal(d.release(h[0]), CUDA_ERROR_INVALID_VALUE);
    assert_int_equal(d.unmap(base, unit), CUDA_SUCCESS);
    assert_int_equal(d.unmap(base + 3 * unit, unit), CUDA_SUCCESS);
    assert_int_equal(d.unmap(base + 3 * unit, unit), CUDA_ERROR_INVALID_VALUE);
    assert_int_equal(d.address_free(base, 8 * unit), CUDA_SUCCESS);
    CUDA(cudaMemGetInfo(&after, &total));
    assert_int_equal(before, after);
    void *none;
    cudaDriverEntryPointQueryResult found;
    CUDA(cudaGetDriverEntryPointByVersion("cuNoSuchCall", &none, 12000, 0, &found));
    assert_int_equal(found, cudaDriverEntryPointSymbolNotFound);
}

/* ---- errors ---- */

static void any_call_can_fail(void **)
{
    use_streams(simt::STREAMS_LAZY);
    float *x = zeros();
    void *p;
    simt::inject("cudaMalloc", 2, cudaErrorMemoryAllocation);
    CUDA(cudaMalloc(&p, 64));
    CUDA(cudaFree(p));
    assert_int_equal(cudaMalloc(&p, 64), cudaErrorMemoryAllocation);
    CUDA(cudaMalloc(&p, 64));
    CUDA(cudaFree(p));
    assert_int_equal(simt::inject_calls(), 3);
    (void)cudaGetLastError();
    simt::inject("launch", 1, cudaErrorLaunchOutOfResources);
    LAUNCH(add, dim3(1), dim3(32), 0, 0, x, 1.0f);
    assert_int_equal(cudaGetLastError(), cudaErrorLaunchOutOfResources);
    LAUNCH(add, dim3(1), dim3(32), 0, 0, x, 1.0f);
    assert_int_equal(cudaGetLastError(), cudaSuccess);
    assert_float_equal(host_of(x, 32)[0], 1.0f, 0.0f);
    simt::inject(nullptr, 0, cudaSuccess);
    CUDA(cudaFree(x));
}

static void a_sticky_error_stays(void **)
{
    expect_silence([] {
        float *x = zeros();
        cudaStream_t s = stream_new();
        LAUNCH(add, dim3(1), dim3(32), 0, s, x, 1.0f);
        simt::inject("cudaStreamSynchronize", 1, cudaErrorIllegalAddress);
        int n;
        cublasHandle_t h;
        bool sticks = cudaStreamSynchronize(s) == cudaErrorIllegalAddress &&
                      cudaGetLastError() == cudaErrorIllegalAddress &&
                      cudaGetLastError() == cudaErrorIllegalAddress &&
                      cudaStreamSynchronize(s) == cudaErrorIllegalAddress &&
                      cudaGetDeviceCount(&n) == cudaErrorIllegalAddress &&
                      cudaFree(x) == cudaErrorIllegalAddress &&
                      cublasCreate(&h) == CUBLAS_STATUS_EXECUTION_FAILED;
        LAUNCH(add, dim3(1), dim3(32), 0, s, x, 1.0f);
        sticks = sticks && cudaDeviceSynchronize() == cudaErrorIllegalAddress;
        CUDA(cudaDeviceReset());
        sticks = sticks && cudaGetLastError() == cudaSuccess && cudaFree(x) == cudaSuccess;
        if (!sticks)
            _exit(1);
    });
}

static void handles_are_checked(void **)
{
    struct CUevent_st *none = nullptr;
    assert_int_equal(cudaEventRecord(none, 0), cudaErrorInvalidResourceHandle);
    assert_int_equal(cudaEventSynchronize(none), cudaErrorInvalidResourceHandle);
    assert_int_equal(cudaStreamDestroy(0), cudaErrorInvalidResourceHandle);
    assert_int_equal(cudaGraphLaunch(nullptr, 0), cudaErrorInvalidValue);
    assert_int_equal(cudaSetDevice(1), cudaErrorInvalidDevice);
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidDevice);
    cudaDeviceProp p;
    CUDA(cudaGetDeviceProperties(&p, 0));
    int value = 0;
    CUDA(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    assert_int_equal(value, p.sharedMemPerBlockOptin);
    assert_string_equal(cudaGetErrorName(cudaErrorLaunchFailure), "cudaErrorLaunchFailure");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stream_keeps_its_order),
        cmocka_unit_test(a_missing_event_changes_the_result),
        cmocka_unit_test(staging_is_read_when_the_copy_runs),
        cmocka_unit_test(queries_see_time_go_by),
        cmocka_unit_test(the_default_stream_waits_for_all_but_nonblocking),
        cmocka_unit_test(graphs_replay),
        cmocka_unit_test(captures_refuse_what_the_runtime_refuses),
        cmocka_unit_test(the_host_cannot_touch_device_memory),
        cmocka_unit_test(memory_is_counted_and_ends),
        cmocka_unit_test(copies_check_their_ranges),
        cmocka_unit_test(mapped_memory),
        cmocka_unit_test(any_call_can_fail),
        cmocka_unit_test(a_sticky_error_stays),
        cmocka_unit_test(handles_are_checked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
