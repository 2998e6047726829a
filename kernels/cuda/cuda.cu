/* cuda.cu: the backend's table, its opening and closing, its errors.
 *
 * The device is the one with the most memory among those of compute capability 7.5 and up. All that can be asked for at
 * once is asked for here (streams, scratch, pinned memory), so that a pass allocates nothing. */
#include "backend.h"
#include "port.cuh"
#include <unistd.h>

static const struct kn_ops cuda_ops = {
    .close = cuda_close,
    .status = cuda_status,
    .sync = cuda_sync,
    .buf_alloc = cuda_buf_alloc,
    .buf_free = cuda_buf_free,
    .upload = cuda_upload,
    .download = cuda_download,
    .arena_open = cuda_arena_open,
    .arena_commit = cuda_arena_commit,
    .arena_release = cuda_arena_release,
    .arena_close = cuda_arena_close,
    .row_copy = cuda_row_copy,
    .weight_load = cuda_weight_load,
    .weight_free = cuda_weight_free,
    .weight_bytes = cuda_weight_bytes,
    .batch_begin = cuda_batch_begin,
    .batch_end = cuda_batch_end,
    .embed = cuda_embed,
    .rmsnorm = cuda_rmsnorm,
    .linear = cuda_linear,
    .rope = cuda_rope,
    .kv_write = cuda_kv_write,
    .hidden_write = cuda_hidden_write,
    .hidden_read = cuda_hidden_read,
    .attention = cuda_attention,
    .swiglu = cuda_swiglu,
    .gather_rows = cuda_gather_rows,
    .row_logit = cuda_row_logit,
    .row_lse = cuda_row_lse,
    .keys_read = cuda_keys_read,
    .kv_rotate = cuda_kv_rotate,
    .attention_row = cuda_attention_row,
    .batch_reserve = cuda_batch_reserve,
    .select_keep = cuda_select_keep,
    .sample = cuda_sample,
};

/* ---- errors ---- */

bool cuda_ok(struct cuda *c, cudaError_t e, const char *call)
{
    if (e == cudaSuccess)
        return true;
    if (c->failed == cudaSuccess) {
        c->failed = e;
        snprintf(c->pub.failed, sizeof c->pub.failed, "%.60s: %.80s (%d)", call,
                 cudaGetErrorString(e), (int)e);
    }
    return false;
}

bool cuda_blas_ok(struct cuda *c, cublasStatus_t s, const char *call)
{
    if (s == CUBLAS_STATUS_SUCCESS)
        return true;
    cudaError_t e = cudaGetLastError();
    bool first = c->failed == cudaSuccess && e == cudaSuccess;
    cuda_ok(c, e != cudaSuccess ? e : cudaErrorUnknown, call);
    if (first) /* cuBLAS has numbers of its own */
        snprintf(c->pub.failed, sizeof c->pub.failed, "%.60s: status %d", call, (int)s);
    return false;
}

bool is_done(struct cuda *c, cudaError_t e, const char *query)
{
    if (e == cudaErrorNotReady) {
        cudaGetLastError(); /* the runtime keeps even this one */
        return false;
    }
    return cuda_ok(c, e, query);
}

cudaError_t cuda_injected(struct cuda *c, const char *call)
{
    struct inject *i = &c->inject;
    if (i->nth == 0 || strcmp(i->call, call) != 0)
        return cudaSuccess;
    i->seen++;
    if (i->seen < i->nth || i->seen - i->nth >= i->count)
        return cudaSuccess;
    while (i->hang)
        pause();
    return i->error;
}

/* "CALL:NTH[:ERROR[:COUNT]]": COUNT such calls of the runtime (or "launch") fail from the nth on, by default one, as a
 * kernel that died. "CALL:NTH:hang": the nth does not return. */
static bool inject_parse(struct inject *i, const char *text)
{
    unsigned nth = 0, error = cudaErrorLaunchFailure, count = 1;
    char call[sizeof i->call];
    int end[3] = {0, 0, 0}; /* behind NTH, ERROR, COUNT */
    int n = sscanf(text, "%47[A-Za-z]:%u%n:%u%n:%u%n", call, &nth, &end[0], &error, &end[1], &count,
                   &end[2]);
    if (n < 2 || nth == 0 || error == 0 || count == 0)
        return false;
    const char *rest = text + end[n - 2];
    i->hang = n == 2 && strcmp(rest, ":hang") == 0;
    if (*rest != '\0' && !i->hang)
        return false;
    memcpy(i->call, call, sizeof call);
    i->nth = nth;
    i->seen = 0;
    i->count = count;
    i->error = (cudaError_t)error;
    return true;
}

int cuda_status(struct kn *kn)
{
    struct cuda *c = cuda_of(kn);
    capture_flush(c);
    if (c->failed == cudaSuccess) /* a kernel may have died since */
        is_done(c, TRY(c, cudaStreamQuery, c->stream), "cudaStreamQuery");
    return c->failed == cudaSuccess ? KN_OK : KN_EDEVICE;
}

void cuda_sync(struct kn *kn)
{
    struct cuda *c = cuda_of(kn);
    capture_flush(c);
    if (c->failed == cudaSuccess)
        RUN(c, cudaStreamSynchronize, c->stream);
}

/* ---- streams ---- */

void stream_use(struct cuda *c, enum stream_kind kind)
{
    cudaStream_t next = c->streams[kind];
    if (next == c->stream || c->failed != cudaSuccess)
        return;
    RUN(c, cudaEventRecord, c->handoff, c->stream);
    RUN(c, cudaStreamWaitEvent, next, c->handoff, 0);
    c->stream = next;
    RUN_BLAS(c, cublasSetStream, c->blas, next);
    /* setting a stream takes the work space away */
    RUN_BLAS(c, cublasSetWorkspace, c->blas, c->scratch.blas, c->scratch.blas_bytes);
}

bool kernel_smem(struct cuda *c, const void *kernel, size_t bytes)
{
    if (bytes > c->smem_max)
        return false;
    return RUN(c, cudaFuncSetAttribute, kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
               (int)bytes);
}

static bool streams_open(struct cuda *c)
{
    int least = 0, greatest = 0;
    bool ok = RUN(c, cudaDeviceGetStreamPriorityRange, &least, &greatest);
    const int priority[STREAM_N] = {greatest, (least + greatest) / 2, least, least};
    for (int i = 0; ok && i < STREAM_N; i++)
        ok = RUN(c, cudaStreamCreateWithPriority, &c->streams[i], cudaStreamNonBlocking,
                 priority[i]);
    c->stream = c->streams[STREAM_PREFILL];
    return ok && RUN(c, cudaEventCreateWithFlags, &c->handoff, cudaEventDisableTiming);
}

static void streams_close(struct cuda *c)
{
    if (c->handoff)
        cudaEventDestroy(c->handoff);
    for (int i = 0; i < STREAM_N; i++)
        if (c->streams[i])
            cudaStreamDestroy(c->streams[i]);
}

/* ---- opening ---- */

/* The device to use, or a sentence. ret->totalGlobalMem is 0 before. */
static int device_pick(struct cuda *c, cudaDeviceProp *ret, char *why, size_t why_len)
{
    int n = 0, best = -1, seen_major = 0, seen_minor = 0;
    cudaError_t e = TRY(c, cudaGetDeviceCount, &n);
    if (e != cudaSuccess || n == 0) {
        snprintf(why, why_len, "no usable GPU: %s",
                 e != cudaSuccess ? cudaGetErrorString(e) : "no device");
        return KN_EUNSUPPORTED;
    }
    for (int i = 0; i < n; i++) {
        cudaDeviceProp p;
        if (TRY(c, cudaGetDeviceProperties, &p, i) != cudaSuccess)
            continue;
        seen_major = p.major;
        seen_minor = p.minor;
        if (p.major * 10 + p.minor < 75 || p.totalGlobalMem <= ret->totalGlobalMem)
            continue;
        best = i;
        *ret = p;
    }
    if (best < 0) {
        snprintf(why, why_len, "no usable GPU: compute capability %d.%d, at least 7.5 is needed",
                 seen_major, seen_minor);
        return KN_EUNSUPPORTED;
    }
    c->device = best;
    c->sm = ret->major * 10 + ret->minor;
    c->n_sms = ret->multiProcessorCount;
#ifdef BC_SIMT
    c->early = true; /* nothing overlaps there, but the rules are checked */
#else
    c->early = c->sm >= 90;
#endif
    c->smem_max = ret->sharedMemPerBlockOptin;
    snprintf(c->pub.isa, sizeof c->pub.isa, "sm_%d", c->sm);
    return KN_OK;
}

/* The runtime loads a file's kernels when the first of them is used, and builds all of them from PTX then if the card is newer
 * than they are: now, not in somebody's first pass, nor in a graph's capture. */
static bool kernels_load(struct cuda *c)
{
    const void *const of_files[] = {
        weights_kernel(), linear_kernel(), gemv_kernel(),   vec_kernel(),    rope_kernel(),
        kv_kernel(),      score_kernel(),  select_kernel(), sample_kernel(),
    }; /* the others' memory is asked for by linear_open and attention_open */
    bool ok = true;
    for (size_t i = 0; ok && i < sizeof of_files / sizeof of_files[0]; i++) {
        cudaFuncAttributes a;
        ok = RUN(c, cudaFuncGetAttributes, &a, of_files[i]);
    }
    return ok;
}

static int parts_open(struct cuda *c, size_t total, char *why, size_t why_len)
{
    const char *missing = NULL;
    cudaError_t e = TRY(c, cudaSetDevice, c->device);
    if (e == cudaSuccess)
        e = rt_driver_open(&c->driver, &missing);
    if (e != cudaSuccess) {
        snprintf(why, why_len, "%s%s%s", missing ? missing : "", missing ? ": " : "",
                 cudaGetErrorString(e));
        return KN_EUNSUPPORTED;
    }
    int code = KN_OK;
    if (!streams_open(c) || !RUN_BLAS(c, cublasCreate, &c->blas))
        code = KN_EDEVICE;
    if (code == KN_OK)
        code = memory_open(c, total);
    if (code == KN_OK)
        code = arenas_open(c);
    if (code == KN_OK)
        code = batch_open(c);
    if (code == KN_OK)
        code = capture_open(c);
    if (code == KN_OK &&
        (!kernels_load(c) || linear_open(c) != KN_OK || attention_open(c) != KN_OK))
        code = KN_EDEVICE;
    if (code == KN_OK) /* the first stream has everything that stream_use sets */
        stream_use(c, STREAM_DECODE);
    if (code == KN_OK && c->failed != cudaSuccess)
        code = KN_EDEVICE;
    if (code != KN_OK)
        snprintf(why, why_len, "GPU %d (%s): %s", c->device, c->pub.isa,
                 code == KN_ENOMEM ? "not enough memory for the backend's work space"
                                   : c->pub.failed);
    return code;
}

static void parts_close(struct cuda *c)
{
    capture_close(c);
    arenas_close(c);
    batch_close(c);
    if (c->blas)
        cublasDestroy(c->blas);
    memory_close(c);
    streams_close(c);
    c->pub.magic = 0;
    free(c);
}

static int options_check(struct cuda *c, const struct kn_options *opt, char *why, size_t why_len)
{
    if (opt->inject && !inject_parse(&c->inject, opt->inject)) {
        snprintf(why, why_len,
                 "inject \"%.60s\": must be CALL:NTH[:ERROR[:COUNT]] or CALL:NTH:hang",
                 opt->inject);
        return KN_EINVALID;
    }
    if (opt->activations == KN_ACTIVATIONS_WIDE) {
        snprintf(why, why_len, "backend \"%s\" rounds activations to %d bits, not to %d",
                 c->pub.name, KN_ACTIVATIONS, KN_ACTIVATIONS_WIDE);
        return KN_EUNSUPPORTED;
    }
    cudaDeviceProp p;
    p.totalGlobalMem = 0;
    int code = device_pick(c, &p, why, why_len);
    if (code == KN_OK && opt->isa && strcmp(opt->isa, c->pub.isa) != 0) {
        snprintf(why, why_len, "backend \"%s\" has no isa \"%.40s\", only \"%s\"", c->pub.name,
                 opt->isa, c->pub.isa);
        code = KN_EUNSUPPORTED;
    }
    return code == KN_OK ? parts_open(c, p.totalGlobalMem, why, why_len) : code;
}

extern "C" __attribute__((visibility("default"))) int
kn_cuda_open(struct kn **ret, const struct kn_options *opt, char *why, size_t why_len)
{
    struct cuda *c = (struct cuda *)calloc(1, sizeof *c);
    if (!c) {
        snprintf(why, why_len, "no memory for the handle of the backend");
        return KN_ENOMEM;
    }
    c->pub.magic = KN_MAGIC;
    c->pub.ops = &cuda_ops;
#if defined(BC_SIMT_RACE)
    c->pub.name = "simt-race";
#elif defined(BC_SIMT)
    c->pub.name = "simt";
#else
    c->pub.name = "cuda";
#endif
    c->pub.n_threads = 1;
    c->pub.activations = KN_ACTIVATIONS;
    c->waits = &c->nobodys; /* opening may take long */
    c->pub.slice_us = SLICE_US;
    c->pub.rows_read = ROWS_READ;
    c->pub.kv_types = 1u << KN_BF16 | 1u << KN_Q8_0;
    int code = options_check(c, opt, why, why_len);
    if (code != KN_OK) {
        parts_close(c);
        cudaGetLastError(); /* whatever it was belongs to this attempt */
        return code;
    }
    c->waits = opt->waits ? opt->waits : &c->nobodys;
    *ret = &c->pub;
    return KN_OK;
}

void cuda_close(struct kn *kn)
{
    struct cuda *c = cuda_of(kn);
    capture_flush(c);
    if (c->failed == cudaSuccess)
        cuda_ok(c, cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    kn_assert(kn->bytes_buffers == 0 && kn->bytes_weights == 0 && kn->bytes_arena == 0);
    parts_close(c);
}
