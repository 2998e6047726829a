/* batch.cu: what a pass brings along, in one copy to the device.
 *
 *      | ids | positions | seq | lo | hi | slots | sequences | tiles | side | slot list of seq 0 | of seq 1 | ...
 *        [n_rows] each                             [n_seqs]    [n_rows]
 *
 * The same layout in pinned and in device memory. Everything before the slot lists lies at places that follow from n_rows
 * and n_seqs alone, so a decode pass of the next step finds the addresses of this one: graphs need that. "side" takes the
 * small host arrays of a pass's ops (gather_rows).
 *
 * Tiles cut the rows into runs of one sequence and those into blocks for attention; tile_class says how many queries
 * (rows x heads of a group) a block has. Long tiles come first, so that the last blocks to run are short ones. */
#include "backend.h"

#define BATCH_BYTES ((size_t)1 << 20) /* at first */
#define DECODE_SIDE_WORDS 4           /* a row */
#define PART ((size_t)16)             /* parts of the layout begin at multiples */

static int batch_alloc(struct cuda *c, size_t cap)
{
    struct batch *b = &c->batch;
    void *dev, *host = NULL;
    int code = device_alloc(c, cap, &dev);
    if (code != KN_OK)
        return code;
    if (TRY(c, cudaMallocHost, &host, cap) != cudaSuccess) {
        cudaGetLastError();
        device_free(c, dev);
        return KN_ENOMEM;
    }
    b->dev = (uint8_t *)dev;
    b->host = (uint8_t *)host;
    b->cap = cap;
    c->pub.bytes_scratch += cap;
    return KN_OK;
}

static void batch_free(struct cuda *c)
{
    struct batch *b = &c->batch;
    device_free(c, b->dev);
    if (b->host)
        cudaFreeHost(b->host);
    c->pub.bytes_scratch -= b->cap;
    b->dev = b->host = NULL;
    b->cap = 0;
}

int batch_open(struct cuda *c)
{
    if (!RUN(c, cudaEventCreateWithFlags, &c->batch.copied, cudaEventDisableTiming))
        return KN_EDEVICE;
    c->batch.n_heads = c->batch.group = 1;
    c->batch.head_dim = 64;
    return batch_alloc(c, BATCH_BYTES);
}

void batch_close(struct cuda *c)
{
    batch_free(c);
    if (c->batch.copied)
        cudaEventDestroy(c->batch.copied);
}

/* More room, or what there was. */
static int batch_grow(struct cuda *c, size_t bytes)
{
    struct batch *b = &c->batch;
    struct batch old = *b;
    size_t cap = b->cap;
    while (cap < bytes)
        cap *= 2;
    capture_reset(c);
    cuda_sync(&c->pub); /* nothing is copied from the old one any more */
    b->in_flight = false;
    int code = batch_alloc(c, cap);
    if (code != KN_OK)
        return code;
    device_free(c, old.dev);
    cudaFreeHost(old.host);
    c->pub.bytes_scratch -= old.cap;
    return KN_OK;
}

/* What layout_make takes at most: each of its parts may be padded. */
static size_t layout_most(size_t n_rows, size_t n_seqs, size_t n_slots)
{
    size_t row = (6 + DECODE_SIDE_WORDS) * sizeof(uint32_t) + sizeof(struct dev_tile);
    return n_rows * row + n_seqs * (sizeof(struct dev_seq) + PART) + n_slots * sizeof(uint32_t) +
           16 * PART;
}

/* The pinned copy may be written, and is large enough: a pass that nobody announced (cuda_batch_reserve) grows here, and there is
 * nobody to tell that it cannot. */
static bool batch_room(struct cuda *c, size_t bytes)
{
    struct batch *b = &c->batch;
    if (b->in_flight && !RUN(c, cudaEventSynchronize, b->copied))
        return false;
    b->in_flight = false;
    if (bytes <= b->cap)
        return true;
    if (batch_grow(c, bytes) == KN_OK)
        return true;
    cuda_ok(c, cudaErrorMemoryAllocation, "memory for a batch");
    return false;
}

int batch_reserve(struct cuda *c, size_t pages)
{
    size_t bytes = BATCH_BYTES / 2 + pages * KN_PAGE_ROWS * sizeof(uint32_t);
    kn_assert(!c->batch.open);
    return bytes <= c->batch.cap ? KN_OK : batch_grow(c, bytes);
}

int cuda_batch_reserve(struct kn *kn, uint32_t n_rows, uint32_t n_seqs, uint64_t n_slots)
{
    struct cuda *c = cuda_of(kn);
    kn_assert(!c->batch.open);
    if (c->failed != cudaSuccess)
        return KN_EDEVICE;
    size_t bytes = layout_most(n_rows, n_seqs, n_slots);
    return bytes <= c->batch.cap ? KN_OK : batch_grow(c, bytes);
}

/* ---- tiles ---- */

static int longer_first(const void *a, const void *b)
{
    const struct dev_tile *x = (const struct dev_tile *)a, *y = (const struct dev_tile *)b;
    uint32_t x_len = x->hi - x->lo, y_len = y->hi - y->lo;
    if (x_len != y_len)
        return x_len < y_len ? 1 : -1;
    return (x->row > y->row) - (x->row < y->row);
}

static enum tile_class class_of(const struct cuda *c, uint32_t seq, uint32_t n_rows)
{
    const struct kn_kv *kv = c->batch.b->seqs[seq].kv;
    bool few = n_rows * c->batch.group <= c->batch.queries[TILE_FEW];
    if (kv->type == KN_F32 || kv->head_dim % 8 != 0)
        return TILE_FLOAT;
    if (kv->type == KN_F16)
        return few ? TILE_FEW : TILE_MANY;
    if (few)
        return TILE_FEW_WIDE;
    return kv->head_dim > 128 && c->sm < ATTN_WIDE_LARGE_SM ? TILE_FLOAT : TILE_MANY_WIDE;
}

static struct dev_tile tile_make(const struct kn_batch *b, uint32_t row, uint32_t n_rows)
{
    struct dev_tile t = {row, n_rows, b->seq[row], UINT32_MAX, 0, 0, UINT32_MAX, 0};
    for (uint32_t r = row; r < row + n_rows; r++) {
        bool blind = b->lo[r] >= b->hi[r];
        t.lo = blind ? t.lo : KN_MIN(t.lo, b->lo[r]);
        t.hi = blind ? t.hi : KN_MAX(t.hi, b->hi[r]);
        t.all_lo = blind ? UINT32_MAX : KN_MAX(t.all_lo, b->lo[r]);
        t.all_hi = blind ? 0 : KN_MIN(t.all_hi, b->hi[r]);
    }
    if (t.hi == 0)
        t.lo = 0;
    return t;
}

/* The tiles of one class, to `tiles`. */
static uint32_t tiles_of(const struct cuda *c, enum tile_class which, struct dev_tile *tiles)
{
    const struct kn_batch *b = c->batch.b;
    uint32_t n = 0, per = KN_MAX(1u, c->batch.queries[which] / c->batch.group);
    for (uint32_t first = 0, end; first < b->n_rows; first = end) {
        for (end = first + 1; end < b->n_rows && b->seq[end] == b->seq[first];)
            end++;
        if (class_of(c, b->seq[first], end - first) != which)
            continue;
        for (uint32_t r = first; r < end; r += per)
            tiles[n++] = tile_make(b, r, KN_MIN(per, end - r));
    }
    qsort(tiles, n, sizeof *tiles, longer_first);
    return n;
}

/* Queries of a block over halves, for so many rows: 128 where there are two such blocks a multiprocessor then. */
static uint32_t queries_many(const struct cuda *c)
{
    const struct batch *b = &c->batch;
    uint64_t blocks = (uint64_t)b->view.n_rows * b->n_heads / ATTN_QUERIES_PAIRED;
    if (b->head_dim > 128)
        return 32;
    return c->sm >= ATTN_PAIRED_SM && b->head_dim > 32 && blocks >= 2 * (uint64_t)c->n_sms
               ? ATTN_QUERIES_PAIRED
               : 64;
}

static void tiles_fill(struct cuda *c)
{
    struct batch *b = &c->batch;
    struct dev_tile *tiles = (struct dev_tile *)(b->host + b->tiles_at);
    b->queries[TILE_FEW] = b->queries[TILE_FEW_WIDE] = b->queries[TILE_FLOAT] = 16;
    b->queries[TILE_MANY] = queries_many(c);
    b->queries[TILE_MANY_WIDE] = b->head_dim > 128 ? 32 : 64;
    for (int i = 0; i < TILE_N; i++) {
        b->view.n_tiles[i] = tiles_of(c, (enum tile_class)i, tiles);
        tiles += b->view.n_tiles[i];
    }
}

void batch_tiles(struct cuda *c, uint32_t n_heads, uint32_t n_kv_heads, uint32_t head_dim)
{
    struct batch *b = &c->batch;
    if (b->n_heads == n_heads && b->group == n_heads / n_kv_heads && b->head_dim == head_dim)
        return;
    b->n_heads = n_heads;
    b->group = n_heads / n_kv_heads;
    b->head_dim = head_dim;
    if (!batch_room(c, b->bytes))
        return;
    tiles_fill(c);
    if (!b->uploaded)
        return;
    RUN(c, cudaMemcpyAsync, b->dev + b->tiles_at, b->host + b->tiles_at,
        b->view.n_rows * sizeof(struct dev_tile), cudaMemcpyHostToDevice, c->stream);
    b->in_flight = RUN(c, cudaEventRecord, b->copied, c->stream);
}

/* ---- staging ---- */

static void batch_check(const struct kn_batch *b)
{
    for (uint32_t r = 0; r < b->n_rows; r++) {
        kn_assert(b->seq[r] < b->n_seqs && b->lo[r] <= b->hi[r]);
        kn_assert(b->lo[r] == b->hi[r] || b->hi[r] <= b->seqs[b->seq[r]].n);
    }
}

/* A score pass stores nothing; a decode pass has one row a sequence. */
static enum stream_kind kind_of(const struct kn_batch *b)
{
    if (!b->slots)
        return STREAM_REFRESH;
    for (uint32_t r = 1; r < b->n_rows; r++)
        if (b->seq[r] == b->seq[r - 1])
            return STREAM_PREFILL;
    return b->n_rows <= DECODE_ROWS_MAX ? STREAM_DECODE : STREAM_PREFILL;
}

/* Takes the next `bytes` of the layout. */
static size_t take(size_t *at, size_t bytes)
{
    size_t here = *at;
    *at = (here + bytes + PART - 1) / PART * PART;
    return here;
}

struct layout {
    size_t ids, positions, seq, lo, hi, slots, seqs, lists;
};

static void layout_make(struct batch *b, const struct kn_batch *kb, struct layout *l)
{
    size_t at = 0, rows = kb->n_rows * sizeof(uint32_t);
    l->ids = take(&at, rows);
    l->positions = take(&at, rows);
    l->seq = take(&at, rows);
    l->lo = take(&at, rows);
    l->hi = take(&at, rows);
    l->slots = take(&at, rows);
    l->seqs = take(&at, kb->n_seqs * sizeof(struct dev_seq));
    b->tiles_at = take(&at, kb->n_rows * sizeof(struct dev_tile));
    b->side_at = take(&at, DECODE_SIDE_WORDS * rows);
    b->side_end = at;
    l->lists = at;
    size_t n_slots = 0;
    for (uint32_t s = 0; s < kb->n_seqs; s++) {
        take(&at, kb->seqs[s].n * sizeof(uint32_t));
        n_slots += kb->seqs[s].n;
    }
    b->bytes = at;
    kn_assert(at <= layout_most(kb->n_rows, kb->n_seqs, n_slots));
}

static void seqs_fill(struct batch *b, const struct kn_batch *kb, const struct layout *l)
{
    struct dev_seq *seqs = (struct dev_seq *)(b->host + l->seqs);
    size_t at = l->lists;
    for (uint32_t s = 0; s < kb->n_seqs; s++) {
        size_t bytes = kb->seqs[s].n * sizeof(uint32_t), here = take(&at, bytes);
        seqs[s] = dev_seq_of(kb->seqs[s].kv);
        seqs[s].slots = (const uint32_t *)(b->dev + here);
        seqs[s].n = kb->seqs[s].n;
        if (bytes > 0)
            memcpy(b->host + here, kb->seqs[s].slots, bytes);
    }
}

static void batch_fill(struct cuda *c, const struct kn_batch *kb, const struct layout *l)
{
    struct batch *b = &c->batch;
    size_t rows = kb->n_rows * sizeof(uint32_t);
    uint32_t span = 64;
    memcpy(b->host + l->ids, kb->ids, rows);
    memcpy(b->host + l->positions, kb->positions, rows);
    memcpy(b->host + l->seq, kb->seq, rows);
    memcpy(b->host + l->lo, kb->lo, rows);
    memcpy(b->host + l->hi, kb->hi, rows);
    if (kb->slots)
        memcpy(b->host + l->slots, kb->slots, rows);
    seqs_fill(b, kb, l);
    for (uint32_t r = 0; r < kb->n_rows; r++)
        while (span < kb->hi[r])
            span *= 2;
    memset(&b->view, 0, sizeof b->view);
    b->view.ids = (const int32_t *)(b->dev + l->ids);
    b->view.positions = (const int32_t *)(b->dev + l->positions);
    b->view.seq = (const uint32_t *)(b->dev + l->seq);
    b->view.lo = (const uint32_t *)(b->dev + l->lo);
    b->view.hi = (const uint32_t *)(b->dev + l->hi);
    b->view.slots = kb->slots ? (const uint32_t *)(b->dev + l->slots) : NULL;
    b->view.seqs = (const struct dev_seq *)(b->dev + l->seqs);
    b->view.tiles = (const struct dev_tile *)(b->dev + b->tiles_at);
    b->view.n_rows = kb->n_rows;
    b->view.n_seqs = kb->n_seqs;
    b->view.span = span;
    tiles_fill(c);
}

void cuda_batch_begin(struct kn *kn, const struct kn_batch *kb)
{
    struct cuda *c = cuda_of(kn);
    struct batch *b = &c->batch;
    struct layout l;
    enum stream_kind kind = kind_of(kb);
    kn_assert(!b->open);
    capture_flush(c);
    batch_check(kb);
    b->open = true;
    b->uploaded = false;
    b->b = kb;
    if (c->failed != cudaSuccess)
        return;
    stream_use(c, kind);
    layout_make(b, kb, &l);
    if (!batch_room(c, b->bytes))
        return;
    b->side_used = b->side_sent = b->side_at;
    batch_fill(c, kb, &l);
    capture_begin(c, kind);
    if (!c->capture.on)
        batch_upload(c);
}

void cuda_batch_end(struct kn *kn, const struct kn_batch *kb)
{
    struct cuda *c = cuda_of(kn);
    kn_assert(c->batch.open && c->batch.b == kb);
    capture_flush(c);
    c->capture.on = false;
    c->batch.open = false;
    c->batch.b = NULL;
    if (c->failed == cudaSuccess)
        arenas_collect(c, false);
}

void batch_upload(struct cuda *c)
{
    struct batch *b = &c->batch;
    size_t from = b->uploaded ? b->side_sent : 0, to = b->uploaded ? b->side_used : b->bytes;
    if (from >= to || c->failed != cudaSuccess)
        return;
    RUN(c, cudaMemcpyAsync, b->dev + from, b->host + from, to - from, cudaMemcpyHostToDevice,
        c->stream);
    b->in_flight = RUN(c, cudaEventRecord, b->copied, c->stream);
    b->uploaded = true;
    b->side_sent = b->side_used;
}

const uint32_t *batch_side(struct cuda *c, const uint32_t *src, uint32_t n)
{
    struct batch *b = &c->batch;
    size_t bytes = n * sizeof *src, at = b->side_used;
    if (c->capture.on && at + bytes > b->side_end) {
        capture_flush(c);
        c->capture.on = false;
    }
    if (!c->capture.on)
        return (const uint32_t *)side_push(c, src, bytes);
    memcpy(b->host + at, src, bytes);
    take(&b->side_used, bytes);
    return (const uint32_t *)(b->dev + at);
}
