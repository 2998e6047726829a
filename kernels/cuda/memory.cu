/* memory.cu: device memory, and the way to it and back.
 *
 * The scratch block, planned once. Ops use its parts one after the other on one stream, so they share them:
 *
 *      | x: activations as int8, halves, bf16 | w: a slice of weights as halves | l: logits | blas | one, words, counts |
 *        attention's partial results            raw blocks at load                split products
 *
 * Host memory that the caller gives is not pinned, so it goes through a ring of two pinned halves: one is filled while the
 * other is copied. */
#include "backend.h"

#define ALIGN 256
static size_t aligned(size_t bytes)
{
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

/* What the scratch's parts get, by the size of the device's memory. A slice of weights is large enough for a whole matrix of
 * a model of 7 or 8 G weights: a library product fills the device only with some hundred tiles, and a slice that stayed in the
 * second-level cache would have a few dozen. Activations likewise: 4096 rows by 18944 columns are 148 MiB. Logits of 4096
 * rows by 2048 columns (and what goes with them) stay in the cache. */
static void scratch_plan(struct scratch *s, size_t total)
{
    bool small = total < (size_t)4 << 30, large = total >= (size_t)16 << 30;
    s->x_bytes = (size_t)(small ? 2 : large ? 192 : 64) << 20;
    s->w_bytes = (size_t)(small ? 1 : large ? 192 : 64) << 20; /* at least RING_HALF */
    s->l_bytes = (size_t)(small ? 1 : 36) << 20;
    s->blas_bytes = (size_t)(small ? 1 : 128) << 18;
    s->bytes = s->x_bytes + s->w_bytes + s->l_bytes + s->blas_bytes + 2 * ALIGN +
               COUNTS_MAX * sizeof(uint32_t);
}

int device_alloc(struct cuda *c, size_t bytes, void **ret)
{
    void *p = NULL;
    if (c->failed != cudaSuccess)
        return KN_EDEVICE;
    cudaError_t e = TRY(c, cudaMalloc, &p, bytes ? bytes : 1);
    if (e == cudaSuccess) {
        *ret = p;
        return KN_OK;
    }
    cudaGetLastError(); /* an allocation that does not fit is no failure of the device */
    if (e == cudaErrorMemoryAllocation || e == cudaErrorInvalidValue)
        return KN_ENOMEM;
    cuda_ok(c, e, "cudaMalloc");
    return KN_EDEVICE;
}

void device_free(struct cuda *c, void *p)
{
    if (!p)
        return;
    if (c->failed == cudaSuccess)
        RUN(c, cudaFree, p);
    else
        cudaFree(p); /* a dead context frees nothing, and says so again */
}

int memory_open(struct cuda *c, size_t total)
{
    struct scratch *s = &c->scratch;
    struct ring *r = &c->ring;
    scratch_plan(s, total);
    int code = device_alloc(c, s->bytes, (void **)&s->base);
    if (code == KN_OK)
        code = device_alloc(c, SIDE_BYTES, (void **)&r->side);
    if (code != KN_OK)
        return code;
    s->x = s->base;
    s->w = s->x + s->x_bytes;
    s->l = (float *)(s->w + s->w_bytes);
    s->blas = (uint8_t *)s->l + s->l_bytes;
    s->one = (float *)(s->blas + s->blas_bytes);
    s->words = (uint32_t *)((uint8_t *)s->one + ALIGN);
    s->counts = (uint32_t *)((uint8_t *)s->words + ALIGN);
    cudaError_t e = TRY(c, cudaMallocHost, (void **)&r->host, 2 * RING_HALF);
    if (e != cudaSuccess) {
        cudaGetLastError();
        return KN_ENOMEM;
    }
    for (int i = 0; i < 2; i++)
        RUN(c, cudaEventCreateWithFlags, &r->done[i], cudaEventDisableTiming);
    float scalars[SCALAR_N] = {0};
    scalars[SCALAR_ONE] = 1.0f;
    scalars[SCALAR_TWO] = 2.0f;
    ring_upload(c, c->stream, s->one, scalars, sizeof scalars);
    RUN(c, cudaMemsetAsync, s->words, 0, WORD_N * sizeof *s->words, c->stream);
    RUN(c, cudaMemsetAsync, s->counts, 0, COUNTS_MAX * sizeof(uint32_t), c->stream);
    c->pub.bytes_scratch = s->bytes + SIDE_BYTES;
    return c->failed == cudaSuccess ? KN_OK : KN_EDEVICE;
}

void memory_close(struct cuda *c)
{
    struct ring *r = &c->ring;
    for (int i = 0; i < 2; i++)
        if (r->done[i])
            cudaEventDestroy(r->done[i]);
    if (r->host)
        cudaFreeHost(r->host);
    device_free(c, r->side);
    device_free(c, c->scratch.base);
}

/* ---- the ring ---- */

/* The next half, free to be written. */
static uint8_t *ring_half(struct cuda *c)
{
    struct ring *r = &c->ring;
    r->turn ^= 1;
    if (r->busy[r->turn] && !RUN(c, cudaEventSynchronize, r->done[r->turn]))
        return NULL;
    r->busy[r->turn] = false;
    return r->host + r->turn * RING_HALF;
}

static bool ring_mark(struct cuda *c, cudaStream_t s)
{
    struct ring *r = &c->ring;
    r->busy[r->turn] = true;
    return RUN(c, cudaEventRecord, r->done[r->turn], s);
}

void ring_upload(struct cuda *c, cudaStream_t s, void *dst, const void *src, size_t bytes)
{
    for (size_t at = 0; at < bytes && c->failed == cudaSuccess; at += RING_HALF) {
        size_t n = KN_MIN(bytes - at, RING_HALF);
        uint8_t *half = ring_half(c);
        if (!half)
            return;
        memcpy(half, (const uint8_t *)src + at, n);
        RUN(c, cudaMemcpyAsync, (uint8_t *)dst + at, half, n, cudaMemcpyHostToDevice, s);
        ring_mark(c, s);
    }
}

const void *side_push(struct cuda *c, const void *src, size_t bytes)
{
    struct ring *r = &c->ring;
    kn_assert(bytes <= SIDE_MAX);
    if (r->side_at + bytes > SIDE_BYTES)
        r->side_at = 0; /* whoever reads what lies there stands before this copy on the stream */
    uint8_t *at = r->side + r->side_at;
    r->side_at += aligned(bytes);
    ring_upload(c, c->stream, at, src, bytes);
    return at;
}

void fetch(struct cuda *c, void *dst_host, const void *src_device, size_t bytes)
{
    uint8_t *dst = (uint8_t *)dst_host;
    size_t at = 0, behind = 0,
           n_behind = 0; /* one half is copied while the one behind is emptied */
    uint8_t *half_behind = NULL;
    while (at < bytes || half_behind) {
        uint8_t *half = NULL;
        size_t n = KN_MIN(bytes - at, RING_HALF);
        if (n > 0 && c->failed == cudaSuccess && (half = ring_half(c))) {
            RUN(c, cudaMemcpyAsync, half, (const uint8_t *)src_device + at, n,
                cudaMemcpyDeviceToHost, c->stream);
            ring_mark(c, c->stream);
        }
        if (half_behind) {
            unsigned other = c->ring.turn ^ (half ? 1u : 0u);
            if (c->failed == cudaSuccess && RUN(c, cudaEventSynchronize, c->ring.done[other]))
                memcpy(dst + behind, half_behind, n_behind);
            c->ring.busy[other] = false;
        }
        if (c->failed != cudaSuccess) {
            memset(dst_host, 0, bytes);
            return;
        }
        half_behind = half;
        behind = at;
        n_behind = n;
        at += n;
    }
}

/* ---- the table's ---- */

int cuda_buf_alloc(struct kn *kn, size_t bytes, void **ret)
{
    struct cuda *c = cuda_of(kn);
    void *p;
    int code = device_alloc(c, bytes, &p);
    if (code != KN_OK)
        return code;
    if (!RUN(c, cudaMemsetAsync, p, 0, bytes ? bytes : 1, c->stream)) {
        device_free(c, p);
        return KN_EDEVICE;
    }
    kn->bytes_buffers += bytes;
    *ret = p;
    return KN_OK;
}

void cuda_buf_free(struct kn *kn, void *buf, size_t bytes)
{
    struct cuda *c = cuda_of(kn);
    if (!buf)
        return;
    capture_reset(c);
    kn_assert(kn->bytes_buffers >= bytes);
    kn->bytes_buffers -= bytes;
    if (c->failed == cudaSuccess)
        RUN(c, cudaStreamSynchronize, c->stream);
    device_free(c, buf);
}

void cuda_upload(struct kn *kn, void *dst_device, const void *src_host, size_t bytes)
{
    struct cuda *c = cuda_of(kn);
    capture_flush(c);
    c->input.x = NULL;
    ring_upload(c, c->stream, dst_device, src_host, bytes);
}

void cuda_download(struct kn *kn, void *dst_host, const void *src_device, size_t bytes)
{
    struct cuda *c = cuda_of(kn);
    capture_flush(c);
    fetch(c, dst_host, src_device, bytes);
}
