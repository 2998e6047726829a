/* spill.c: see spill.h. The head in memory is the head in the file: sections are found by offsets
 * that follow from the fixed part alone. */
#include "spill.h"
#include "bytes.h"
#include "crc32c.h"
#include <stdlib.h>
#include <string.h>

#define SPILL_MAGIC 0x7370696cu
#define DIMENSION_MAX 1048576u

static const char file_magic[8] = "BCSPILL\n";

/* The first SPILL_FIXED_BYTES, as they stand. */
struct fixed {
    char magic[8];
    uint32_t version, head_bytes;
    uint64_t total_bytes, model, arithmetic;
    uint32_t n_rows, n_pages, n_blocks, block_pages;
    uint64_t page_bytes;
    uint32_t n_state, n_layers, n_kv_heads, head_dim, d_hidden, type, page_rows;
    uint32_t zero[7];
    uint32_t rest_sum; /* of the head behind these bytes */
    uint32_t sum;      /* of the 124 bytes before */
};
_Static_assert(sizeof(struct fixed) == SPILL_FIXED_BYTES, "as the format says");

struct spill {
    unsigned magic;
    struct fixed f;
    size_t state_at, ids_at, positions_at, stream_at, slots_at, sums_at; /* in head */
    uint8_t *head;                                                       /* [f.head_bytes] */
    uint32_t *pages; /* [n_pages] of the pool: while the sequence is resident */
};

/* ---- sizes ---- */

static size_t round_up(size_t n, size_t unit)
{
    return (n + unit - 1) / unit * unit;
}

/* Where the sections stand; all counts have been checked against their limits. */
static void sections_set(struct spill *sp)
{
    const struct fixed *f = &sp->f;
    sp->state_at = SPILL_FIXED_BYTES;
    sp->stream_at = round_up(sp->state_at + f->n_state, 8);
    sp->ids_at = sp->stream_at + (size_t)f->n_rows * 8;
    sp->positions_at = sp->ids_at + (size_t)f->n_rows * 4;
    sp->slots_at = sp->positions_at + (size_t)f->n_rows * 4;
    sp->sums_at = sp->slots_at + (size_t)f->n_rows * 4;
}

static size_t head_size(const struct spill *sp)
{
    return round_up(sp->sums_at + (size_t)sp->f.n_blocks * 4, SPILL_ALIGN);
}

static uint32_t pages_a_block(uint64_t page_bytes)
{
    return (uint32_t)BC_MAX(SPILL_BLOCK_BYTES / page_bytes, (uint64_t)1);
}

static uint32_t *sums(const struct spill *sp)
{
    return (uint32_t *)(sp->head + sp->sums_at);
}

static uint32_t *slots(const struct spill *sp)
{
    return (uint32_t *)(sp->head + sp->slots_at);
}

static int32_t *positions(const struct spill *sp)
{
    return (int32_t *)(sp->head + sp->positions_at);
}

static uint64_t *stream(const struct spill *sp)
{
    return (uint64_t *)(sp->head + sp->stream_at);
}

/* ---- going out ---- */

static struct fixed describe(const struct seqcache *s, const struct spill_origin *from,
                             size_t n_state)
{
    const struct kn_kv *kv = pool_kv(seqcache_pool(s));
    struct fixed f = {.version = SPILL_VERSION,
                      .model = from->model,
                      .arithmetic = from->arithmetic,
                      .n_rows = seqcache_count(s),
                      .n_pages = seqcache_pages(s),
                      .page_bytes = kn_kv_page_bytes(kv),
                      .n_state = (uint32_t)n_state,
                      .n_layers = kv->n_layers,
                      .n_kv_heads = kv->n_kv_heads,
                      .head_dim = kv->head_dim,
                      .d_hidden = kv->d_hidden,
                      .type = kv->type,
                      .page_rows = KN_PAGE_ROWS};
    memcpy(f.magic, file_magic, sizeof f.magic);
    f.block_pages = pages_a_block(f.page_bytes);
    f.n_blocks = (f.n_pages + f.block_pages - 1) / f.block_pages;
    return f;
}

struct page_at {
    uint32_t page, index;
};

static int by_page(const void *a, const void *b)
{
    uint32_t x = ((const struct page_at *)a)->page, y = ((const struct page_at *)b)->page;
    return (x > y) - (x < y);
}

/* Slots with the pages counted from 0 in the order of sp->pages. */
static int slots_number(struct spill *sp, const struct seqcache *s, struct err *e)
{
    uint32_t n = sp->f.n_pages;
    struct page_at *sorted = calloc(n + 1, sizeof *sorted);
    if (sorted == NULL)
        return err_nomem(e, (n + 1) * sizeof *sorted);
    for (uint32_t i = 0; i < n; i++)
        sorted[i] = (struct page_at){sp->pages[i], i};
    qsort(sorted, n, sizeof *sorted, by_page);
    const uint32_t *from = seqcache_slots(s);
    for (uint32_t i = 0; i < sp->f.n_rows; i++) {
        struct page_at key = {.page = from[i] / KN_PAGE_ROWS};
        const struct page_at *hit = bsearch(&key, sorted, n, sizeof key, by_page);
        bc_assert(hit != NULL);
        slots(sp)[i] = hit->index * KN_PAGE_ROWS + from[i] % KN_PAGE_ROWS;
    }
    free(sorted);
    return BC_OK;
}

static int arrays_alloc(struct spill *sp, struct err *e)
{
    sp->head = calloc(1, sp->f.head_bytes);
    sp->pages = calloc(sp->f.n_pages + 1, sizeof *sp->pages);
    return sp->head != NULL && sp->pages != NULL ? BC_OK : err_nomem(e, sp->f.head_bytes);
}

int spill_make(struct spill **ret, const struct seqcache *s, const struct spill_origin *from,
               const void *state, size_t n_state, struct err *e)
{
    bc_assert(n_state <= SPILL_STATE_MAX);
    struct spill *sp = calloc(1, sizeof *sp);
    if (sp == NULL)
        return err_nomem(e, sizeof *sp);
    sp->magic = SPILL_MAGIC;
    sp->f = describe(s, from, n_state);
    sections_set(sp);
    sp->f.head_bytes = (uint32_t)head_size(sp);
    sp->f.total_bytes = sp->f.head_bytes + sp->f.n_pages * sp->f.page_bytes;
    int rc = arrays_alloc(sp, e);
    for (uint32_t i = 0; rc == BC_OK && i < sp->f.n_pages; i++)
        sp->pages[i] = seqcache_page(s, i);
    if (rc < 0 || (rc = slots_number(sp, s, e)) < 0) {
        spill_free(&sp);
        return rc;
    }
    size_t n = sp->f.n_rows;
    if (n_state > 0)
        memcpy(sp->head + sp->state_at, state, n_state);
    if (n > 0) {
        memcpy(stream(sp), seqcache_stream(s), n * 8);
        memcpy(sp->head + sp->ids_at, seqcache_ids(s), n * 4);
        memcpy(positions(sp), seqcache_positions(s), n * 4);
    }
    *ret = sp;
    return BC_OK;
}

void spill_free(struct spill **psp)
{
    struct spill *sp = *psp;
    if (sp == NULL)
        return;
    MAGIC_OK(sp, SPILL_MAGIC);
    sp->magic = 0;
    free(sp->head);
    free(sp->pages);
    free(sp);
    *psp = NULL;
}

/* The pages of a block: from the first on, how many. */
static uint32_t block_first(const struct spill *sp, uint32_t block, uint32_t *ret_n)
{
    MAGIC_OK(sp, SPILL_MAGIC);
    bc_assert(block < sp->f.n_blocks);
    uint32_t first = block * sp->f.block_pages;
    *ret_n = BC_MIN(sp->f.block_pages, sp->f.n_pages - first);
    return first;
}

static void *page_address(const struct kn_kv *kv, uint32_t page)
{
    return (uint8_t *)kv->base + page * kv->stride;
}

void spill_block_copy(const struct spill *sp, uint32_t block, const struct seqcache *s, void *to)
{
    uint32_t n, first = block_first(sp, block, &n);
    const struct kn_kv *kv = pool_kv(seqcache_pool(s));
    struct kn *kn = pool_kn(seqcache_pool(s));
    for (uint32_t i = 0; i < n; i++)
        kn->ops->download(kn, (uint8_t *)to + i * sp->f.page_bytes,
                          page_address(kv, sp->pages[first + i]), sp->f.page_bytes);
}

void spill_block_seal(struct spill *sp, uint32_t block, const void *bytes)
{
    sums(sp)[block] = crc32c(0, bytes, spill_block_bytes(sp, block));
}

const void *spill_head(struct spill *sp)
{
    MAGIC_OK(sp, SPILL_MAGIC);
    struct fixed *f = &sp->f;
    f->rest_sum = crc32c(0, sp->head + SPILL_FIXED_BYTES, f->head_bytes - SPILL_FIXED_BYTES);
    f->sum = crc32c(0, f, sizeof *f - sizeof f->sum);
    memcpy(sp->head, f, sizeof *f);
    return sp->head;
}

/* ---- coming back ---- */

static int corrupt(struct err *e, const char *what)
{
    return err_set(e, BC_ECORRUPT, "state", "the saved cache is damaged: %s", what);
}

/* The numbers of the fixed part agree with each other and with the file's size. */
static int fixed_check(const struct fixed *f, uint64_t file_bytes, struct err *e)
{
    const struct kn_kv_type *type;
    if (memcmp(f->magic, file_magic, sizeof f->magic) != 0)
        return corrupt(e, "it does not begin as one");
    if (f->version != SPILL_VERSION)
        return err_set(e, BC_EVERSION, "state",
                       "the saved cache is of version %u, this daemon reads version %u", f->version,
                       SPILL_VERSION);
    if (f->sum != crc32c(0, f, sizeof *f - sizeof f->sum))
        return corrupt(e, "the sum over its first bytes is wrong");
    if (f->n_layers - 1 >= DIMENSION_MAX || f->n_kv_heads - 1 >= DIMENSION_MAX ||
        f->head_dim - 1 >= KN_HEAD_DIM_MAX || f->d_hidden > DIMENSION_MAX ||
        (type = kn_kv_type_find(f->type)) == NULL || f->head_dim % type->block != 0 ||
        f->page_rows != KN_PAGE_ROWS)
        return corrupt(e, "its pages have a shape that no page has");
    struct kn_kv kv = {.n_layers = f->n_layers,
                       .n_kv_heads = f->n_kv_heads,
                       .head_dim = f->head_dim,
                       .d_hidden = f->d_hidden,
                       .type = (enum kn_type)f->type};
    if (f->page_bytes != kn_kv_page_bytes(&kv) || f->n_pages > POOL_PAGES_MAX ||
        f->n_rows > f->n_pages * (uint64_t)KN_PAGE_ROWS || f->n_state > SPILL_STATE_MAX ||
        f->block_pages != pages_a_block(f->page_bytes) ||
        f->n_blocks != (f->n_pages + (uint64_t)f->block_pages - 1) / f->block_pages)
        return corrupt(e, "its numbers contradict each other");
    uint64_t blocks;
    if (__builtin_mul_overflow((uint64_t)f->n_pages, f->page_bytes, &blocks) ||
        f->total_bytes < f->head_bytes || f->total_bytes - f->head_bytes != blocks ||
        f->total_bytes != file_bytes)
        return corrupt(e, "it is not as long as it says");
    return BC_OK;
}

/* Slots lie in its pages, none twice; stream indices ascend. */
static int rows_check(const struct spill *sp, struct err *e)
{
    uint32_t n = sp->f.n_rows, all = sp->f.n_pages * KN_PAGE_ROWS;
    const uint32_t *slot = slots(sp);
    uint8_t *seen = calloc(1, all / 8 + 1);
    int rc = BC_OK;
    if (seen == NULL)
        return err_nomem(e, all / 8 + 1);
    for (uint32_t i = 0; i < n && rc == BC_OK; i++) {
        if (slot[i] >= all || (seen[slot[i] / 8] >> slot[i] % 8 & 1) != 0)
            rc = corrupt(e, "two rows in one place, or one outside of its pages");
        else
            seen[slot[i] / 8] |= (uint8_t)(1 << slot[i] % 8);
        if (positions(sp)[i] < 0 || (i > 0 && stream(sp)[i] <= stream(sp)[i - 1]))
            rc = corrupt(e, "its rows are out of order");
    }
    free(seen);
    return rc;
}

int spill_read(struct spill **ret, const void *bytes, size_t n, uint64_t file_bytes,
               size_t *ret_need, struct err *e)
{
    struct spill *sp;
    if (file_bytes < SPILL_FIXED_BYTES)
        return corrupt(e, "it is too short to be one");
    if (n < SPILL_FIXED_BYTES) {
        *ret_need = SPILL_FIXED_BYTES;
        return BC_OK;
    }
    if ((sp = calloc(1, sizeof *sp)) == NULL)
        return err_nomem(e, sizeof *sp);
    sp->magic = SPILL_MAGIC;
    memcpy(&sp->f, bytes, sizeof sp->f);
    int rc = fixed_check(&sp->f, file_bytes, e);
    if (rc < 0)
        goto fail;
    sections_set(sp);
    if (sp->f.head_bytes != head_size(sp)) {
        rc = corrupt(e, "its numbers contradict each other");
        goto fail;
    }
    if (n < sp->f.head_bytes) {
        *ret_need = sp->f.head_bytes;
        spill_free(&sp);
        return BC_OK;
    }
    if ((rc = arrays_alloc(sp, e)) < 0)
        goto fail;
    memcpy(sp->head, bytes, sp->f.head_bytes);
    if (sp->f.rest_sum !=
        crc32c(0, sp->head + SPILL_FIXED_BYTES, sp->f.head_bytes - SPILL_FIXED_BYTES))
        rc = corrupt(e, "the sum over its index is wrong");
    else
        rc = rows_check(sp, e);
    if (rc < 0)
        goto fail;
    *ret_need = 0;
    *ret = sp;
    return BC_OK;
fail:
    spill_free(&sp);
    return rc;
}

int spill_fits(const struct spill *sp, const struct kn_kv *kv, uint64_t model, struct err *e)
{
    MAGIC_OK(sp, SPILL_MAGIC);
    const struct fixed *f = &sp->f;
    if (f->model != model)
        return err_set(e, BC_ESTATE, "model",
                       "the saved cache belongs to another model: identity %016llx, not %016llx",
                       (unsigned long long)f->model, (unsigned long long)model);
    if (f->type != kv->type)
        return err_set(e, BC_ESTATE, "kv_type", "the saved cache is of type %s, not %s",
                       kn_kv_type_find(f->type)->name, kn_kv_type_find(kv->type)->name);
    if (f->n_layers != kv->n_layers || f->n_kv_heads != kv->n_kv_heads ||
        f->head_dim != kv->head_dim || f->d_hidden != kv->d_hidden)
        return err_set(e, BC_ESTATE, "model",
                       "the saved cache has %u layers of %u heads of %u and hidden rows of %u; "
                       "this model has %u, %u, %u and %u",
                       f->n_layers, f->n_kv_heads, f->head_dim, f->d_hidden, kv->n_layers,
                       kv->n_kv_heads, kv->head_dim, kv->d_hidden);
    return BC_OK;
}

int spill_place(const struct spill *sp, struct seqcache *s, struct err *e)
{
    MAGIC_OK(sp, SPILL_MAGIC);
    const struct seqcache_rows rows = {.n_rows = sp->f.n_rows,
                                       .n_pages = sp->f.n_pages,
                                       .ids = spill_ids(sp),
                                       .positions = positions(sp),
                                       .stream = stream(sp),
                                       .slots = slots(sp)};
    int rc = seqcache_place(s, &rows, e);
    for (uint32_t i = 0; rc == BC_OK && i < sp->f.n_pages; i++)
        sp->pages[i] = seqcache_page(s, i);
    return rc;
}

int spill_block_check(const struct spill *sp, uint32_t block, const void *bytes, struct err *e)
{
    if (sums(sp)[block] == crc32c(0, bytes, spill_block_bytes(sp, block)))
        return BC_OK;
    return err_set(e, BC_ECORRUPT, "state",
                   "the saved cache is damaged: the sum of block %u (byte %llu on) is wrong", block,
                   (unsigned long long)spill_block_at(sp, block));
}

void spill_block_place(const struct spill *sp, uint32_t block, struct seqcache *s,
                       const void *bytes)
{
    uint32_t n, first = block_first(sp, block, &n);
    const struct kn_kv *kv = pool_kv(seqcache_pool(s));
    struct kn *kn = pool_kn(seqcache_pool(s));
    for (uint32_t i = 0; i < n; i++)
        kn->ops->upload(kn, page_address(kv, sp->pages[first + i]),
                        (const uint8_t *)bytes + i * sp->f.page_bytes, sp->f.page_bytes);
}

/* ---- looking ---- */

uint64_t spill_bytes(const struct spill *sp)
{
    MAGIC_OK(sp, SPILL_MAGIC);
    return sp->f.total_bytes;
}

size_t spill_head_bytes(const struct spill *sp)
{
    MAGIC_OK(sp, SPILL_MAGIC);
    return sp->f.head_bytes;
}

uint32_t spill_rows(const struct spill *sp)
{
    MAGIC_OK(sp, SPILL_MAGIC);
    return sp->f.n_rows;
}

uint32_t spill_pages(const struct spill *sp)
{
    MAGIC_OK(sp, SPILL_MAGIC);
    return sp->f.n_pages;
}

uint32_t spill_blocks(const struct spill *sp)
{
    MAGIC_OK(sp, SPILL_MAGIC);
    return sp->f.n_blocks;
}

uint64_t spill_block_at(const struct spill *sp, uint32_t block)
{
    uint32_t n, first = block_first(sp, block, &n);
    return sp->f.head_bytes + first * sp->f.page_bytes;
}

size_t spill_block_bytes(const struct spill *sp, uint32_t block)
{
    uint32_t n;
    block_first(sp, block, &n);
    return n * sp->f.page_bytes;
}

struct spill_origin spill_origin(const struct spill *sp)
{
    MAGIC_OK(sp, SPILL_MAGIC);
    return (struct spill_origin){.model = sp->f.model, .arithmetic = sp->f.arithmetic};
}

const void *spill_state(const struct spill *sp, size_t *ret_n)
{
    MAGIC_OK(sp, SPILL_MAGIC);
    *ret_n = sp->f.n_state;
    return sp->head + sp->state_at;
}

const int32_t *spill_ids(const struct spill *sp)
{
    MAGIC_OK(sp, SPILL_MAGIC);
    return (const int32_t *)(sp->head + sp->ids_at);
}

uint64_t spill_last_stream(const struct spill *sp)
{
    MAGIC_OK(sp, SPILL_MAGIC);
    return sp->f.n_rows > 0 ? stream(sp)[sp->f.n_rows - 1] : 0;
}
