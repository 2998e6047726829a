/* arena.cu: reserved ranges of device addresses, mapped in granules of 2 MiB as pages are committed.
 *
 *      pages     | 0    | 1    | 2    | 3    | 4    | ...          stride: any multiple of 256 bytes
 *      granules  |   0       |   1       |   2       | ...         mapped while a page touches it
 *      refs          2           3           2
 *
 * A stride that divides 2 MiB, or is a multiple of it, wastes nothing; others share granules with their neighbours. The
 * base never moves, so graphs and kernels keep their pointers while a budget grows and shrinks.
 *
 * A granule that loses its last page is unmapped after an event that was recorded later (backend.h: releases), and comes back
 * to life without a call if a page of it is committed before. bytes_arena counts granules that pages use. */
#include "backend.h"

#define ARENA_MAGIC 0x61726e61u
#define STRIDE_UNIT 256

struct granule {
    CUmemGenericAllocationHandle handle; /* while is_mapped */
    uint32_t refs, gen;                  /* pages that touch it; how often it lost its last one */
    bool is_mapped;
};

struct arena {
    unsigned magic;
    struct arena *next;
    CUdeviceptr base;
    size_t stride, bytes;
    uint32_t n_pages, n_granules;
    struct granule *granules;
    uint8_t *committed; /* a bit a page */
};

/* A call of the driver, as TRY and RUN; its errors have the runtime's numbers. */
#define TRY_DRIVER(c, field, name, ...)                                                            \
    (cuda_injected(c, name) != cudaSuccess ? (c)->inject.error                                     \
                                           : (cudaError_t)(c)->driver.field(__VA_ARGS__))
#define RUN_DRIVER(c, field, name, ...) cuda_ok(c, TRY_DRIVER(c, field, name, __VA_ARGS__), name)

static CUmemAllocationProp prop_of(const struct cuda *c)
{
    CUmemAllocationProp p;
    memset(&p, 0, sizeof p);
    p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE;
    p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    p.location.id = c->device;
    return p;
}

int arenas_open(struct cuda *c)
{
    CUmemAllocationProp prop = prop_of(c);
    size_t unit = 0;
    if (!RUN_DRIVER(c, granularity, "cuMemGetAllocationGranularity", &unit, &prop,
                    CU_MEM_ALLOC_GRANULARITY_MINIMUM))
        return KN_EDEVICE;
    if (!RUN(c, cudaEventCreateWithFlags, &c->releases.event, cudaEventDisableTiming))
        return KN_EDEVICE;
    return unit != 0 && GRANULE % unit == 0 ? KN_OK : KN_EUNSUPPORTED;
}

/* ---- granules ---- */

static CUdeviceptr granule_at(const struct arena *a, uint32_t i)
{
    return a->base + i * GRANULE;
}

/* KN_OK, KN_ENOMEM, or KN_EDEVICE with the failure noted. */
static int granule_map(struct cuda *c, struct arena *a, uint32_t i)
{
    struct granule *g = &a->granules[i];
    CUmemAllocationProp prop = prop_of(c);
    CUmemAccessDesc access;
    memset(&access, 0, sizeof access);
    access.location = prop.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    cudaError_t e = TRY_DRIVER(c, create, "cuMemCreate", &g->handle, GRANULE, &prop, 0);
    if (e == cudaErrorMemoryAllocation)
        return KN_ENOMEM;
    if (!cuda_ok(c, e, "cuMemCreate"))
        return KN_EDEVICE;
    if (!RUN_DRIVER(c, map, "cuMemMap", granule_at(a, i), GRANULE, 0, g->handle, 0)) {
        c->driver.release(g->handle);
        return KN_EDEVICE;
    }
    g->is_mapped = true;
    return RUN_DRIVER(c, set_access, "cuMemSetAccess", granule_at(a, i), GRANULE, &access, 1)
               ? KN_OK
               : KN_EDEVICE;
}

static void granule_unmap(struct cuda *c, struct arena *a, uint32_t i)
{
    struct granule *g = &a->granules[i];
    if (!g->is_mapped)
        return;
    g->is_mapped = false;
    RUN_DRIVER(c, unmap, "cuMemUnmap", granule_at(a, i), GRANULE);
    RUN_DRIVER(c, release, "cuMemRelease", g->handle);
}

/* ---- releases ---- */

static void closed_unmap(struct cuda *c)
{
    struct releases *r = &c->releases;
    for (uint32_t i = 0; i < r->n_closed; i++) {
        struct released *e = &r->closed[i];
        struct granule *g = &e->arena->granules[e->granule];
        if (g->refs == 0 && g->gen == e->gen)
            granule_unmap(c, e->arena, e->granule);
    }
    r->n_closed = 0;
}

void arenas_collect(struct cuda *c, bool wait)
{
    struct releases *r = &c->releases;
    for (int round = 0; round < 2 && (r->n_closed > 0 || r->n_open > 0); round++) {
        if (r->n_closed > 0) {
            if (wait ? !RUN(c, cudaEventSynchronize, r->event)
                     : !is_done(c, TRY(c, cudaEventQuery, r->event), "cudaEventQuery"))
                return;
            closed_unmap(c);
        }
        if (r->n_open == 0)
            continue;
        if (!RUN(c, cudaEventRecord, r->event, c->stream))
            return;
        struct released *t = r->closed;
        r->closed = r->open;
        r->open = t;
        r->n_closed = r->n_open;
        r->n_open = 0;
        if (!wait)
            return;
    }
}

static bool releases_grow(struct releases *r)
{
    uint32_t cap = r->cap ? 2 * r->cap : 256;
    void *open = realloc(r->open, cap * sizeof *r->open);
    if (open)
        r->open = (struct released *)open;
    void *closed = realloc(r->closed, cap * sizeof *r->closed);
    if (closed)
        r->closed = (struct released *)closed;
    if (open && closed)
        r->cap = cap;
    return open && closed;
}

static void granule_drop(struct cuda *c, struct arena *a, uint32_t i)
{
    struct releases *r = &c->releases;
    struct granule *g = &a->granules[i];
    kn_assert(g->refs > 0);
    if (--g->refs > 0)
        return;
    c->pub.bytes_arena -= GRANULE;
    g->gen++;
    if (r->n_open == r->cap && !releases_grow(r)) { /* no memory for a note: wait instead */
        cuda_sync(&c->pub);
        granule_unmap(c, a, i);
        return;
    }
    r->open[r->n_open++] = (struct released){a, i, g->gen};
}

/* ---- the table's ---- */

static struct arena *arena_of(struct cuda *c, void *base, size_t stride)
{
    struct arena *a = c->arenas;
    while (a && a->base != (CUdeviceptr)(uintptr_t)base)
        a = a->next;
    kn_assert(a && a->magic == ARENA_MAGIC && a->stride == stride);
    return a;
}

static void arena_free(struct arena *a)
{
    a->magic = 0;
    free(a->granules);
    free(a->committed);
    free(a);
}

int cuda_arena_open(struct kn *kn, size_t stride, uint32_t n_pages, void **ret_base)
{
    struct cuda *c = cuda_of(kn);
    size_t bytes;
    if (stride == 0 || stride % STRIDE_UNIT != 0 || n_pages == 0)
        return KN_EINVALID;
    if (__builtin_mul_overflow(stride, (size_t)n_pages, &bytes) ||
        __builtin_add_overflow(bytes, GRANULE - 1, &bytes) || bytes / GRANULE > UINT32_MAX)
        return KN_ENOMEM;
    struct arena *a = (struct arena *)calloc(1, sizeof *a);
    if (!a)
        return KN_ENOMEM;
    a->magic = ARENA_MAGIC;
    a->stride = stride;
    a->n_pages = n_pages;
    a->n_granules = (uint32_t)(bytes / GRANULE);
    a->bytes = a->n_granules * GRANULE;
    a->granules = (struct granule *)calloc(a->n_granules, sizeof *a->granules);
    a->committed = (uint8_t *)calloc((n_pages + 7) / 8, 1);
    if (!a->granules || !a->committed ||
        TRY_DRIVER(c, address_reserve, "cuMemAddressReserve", &a->base, a->bytes, 0, 0, 0) !=
            cudaSuccess) {
        arena_free(a);
        return KN_ENOMEM;
    }
    a->next = c->arenas;
    c->arenas = a;
    *ret_base = (void *)(uintptr_t)a->base;
    return KN_OK;
}

/* The granules of a page: first .. last. */
static void page_granules(const struct arena *a, uint32_t page, uint32_t *first, uint32_t *last)
{
    *first = (uint32_t)(page * a->stride / GRANULE);
    *last = (uint32_t)(((page + (size_t)1) * a->stride - 1) / GRANULE);
}

int cuda_arena_commit(struct kn *kn, void *base, size_t stride, uint32_t page)
{
    struct cuda *c = cuda_of(kn);
    struct arena *a = arena_of(c, base, stride);
    uint8_t bit = (uint8_t)(1 << page % 8);
    uint32_t first, last, i;
    int code = c->failed == cudaSuccess ? KN_OK : KN_EDEVICE;
    kn_assert(page < a->n_pages && !(a->committed[page / 8] & bit));
    page_granules(a, page, &first, &last);
    if (code == KN_OK)
        code = batch_reserve(c, c->n_pages + 1);
    for (i = first; code == KN_OK && i <= last; i++) {
        struct granule *g = &a->granules[i];
        if (g->refs == 0 && !g->is_mapped) {
            code = granule_map(c, a, i);
            if (code == KN_ENOMEM) { /* what was released may still hold memory */
                arenas_collect(c, true);
                code = granule_map(c, a, i);
            }
            if (code != KN_OK)
                break;
        }
        if (g->refs++ == 0)
            kn->bytes_arena += GRANULE;
    }
    if (code == KN_OK &&
        !RUN(c, cudaMemsetAsync, (uint8_t *)base + page * stride, 0, stride, c->stream))
        code = KN_EDEVICE;
    if (code != KN_OK) {
        while (i-- > first)
            granule_drop(c, a, i);
        return code;
    }
    a->committed[page / 8] |= bit;
    c->n_pages++;
    return KN_OK;
}

void cuda_arena_release(struct kn *kn, void *base, size_t stride, uint32_t page)
{
    struct cuda *c = cuda_of(kn);
    struct arena *a = arena_of(c, base, stride);
    uint8_t bit = (uint8_t)(1 << page % 8);
    uint32_t first, last;
    kn_assert(page < a->n_pages && (a->committed[page / 8] & bit));
    capture_flush(c);
    a->committed[page / 8] &= (uint8_t)~bit;
    c->n_pages--;
    page_granules(a, page, &first, &last);
    for (uint32_t i = first; i <= last; i++)
        granule_drop(c, a, i);
    if (c->failed == cudaSuccess)
        arenas_collect(c, false);
}

static void arena_close(struct cuda *c, struct arena *a)
{
    struct arena **at = &c->arenas;
    while (*at != a)
        at = &(*at)->next;
    *at = a->next;
    for (uint32_t i = 0; i < a->n_pages; i++)
        c->n_pages -= a->committed[i / 8] >> i % 8 & 1;
    for (uint32_t i = 0; i < a->n_granules; i++) {
        if (a->granules[i].refs > 0)
            c->pub.bytes_arena -= GRANULE;
        granule_unmap(c, a, i);
    }
    RUN_DRIVER(c, address_free, "cuMemAddressFree", a->base, a->bytes);
    arena_free(a);
}

void cuda_arena_close(struct kn *kn, void *base, size_t stride, uint32_t n_pages)
{
    struct cuda *c = cuda_of(kn);
    struct arena *a = arena_of(c, base, stride);
    kn_assert(a->n_pages == n_pages);
    capture_reset(c);
    cuda_sync(kn);
    arenas_collect(c, true); /* notes name their arena */
    c->releases.n_open = c->releases.n_closed = 0;
    arena_close(c, a);
}

void arenas_close(struct cuda *c)
{
    struct releases *r = &c->releases;
    while (c->arenas)
        arena_close(c, c->arenas);
    if (r->event)
        cudaEventDestroy(r->event);
    free(r->open);
    free(r->closed);
}
