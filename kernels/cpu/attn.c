/* attn.c: which thread attends to what. attn_body.h has the arithmetic of a tile.
 *
 * Neighbouring rows of one sequence form a block; the query heads of one KV head (up to ATTN_Q_MAX) form a
 * unit. Block x unit = up to ATTN_Q_MAX queries that share every tile of keys and values they look at.
 *
 *   many blocks (prefill, scores, several sequences):  item = (block, unit), spans ascending inside
 *   few blocks (decode of one long sequence):          item = (unit, span) -> part (m, l, acc) in memory;
 *                                                      then item = unit merges its parts, ascending
 *
 *   | tile tile tile tile | tile tile tile tile | ..    64 cache indices a tile, ATTN_SPAN tiles a span
 *   '------- span --------'------- span --------'
 *
 * A span's first tile makes a state that the others join, ascending, and its first span one that the other spans join: the
 * same numbers by the same formula in the same order both ways, so a row's result does not tell which way was taken. Borders are
 * cache indices. */
#include "cpu.h"
#include "kn_kv_addr.h"
#include "ops.h"
#include <math.h>

/* Tiles of a span: of parts of one tile there would be four times as many to merge, one after the other. */
#define ATTN_SPAN 4
#define MERGE_ALONE_MAX 16384 /* floats of parts that are merged sooner than another thread comes */
#define ATTN_DIRECT_MAX 8     /* queries up to which values are used where they lie */

struct attn_job {
    struct kn_cpu *c;
    const struct kn_batch *b;
    uint32_t layer, n_heads, d, d_pad;
    uint32_t group;               /* query heads of a KV head */
    uint32_t unit_heads, unit_kv; /* query heads of a unit (at most), units of a KV head */
    uint32_t n_units;             /* of all KV heads */
    uint32_t n_blocks;
    float scale;
    const float *q;
    float *out;
    /* a split block */
    const struct attn_block *block;
    uint32_t first_span, n_spans; /* of this pass */
    bool first_pass, last_pass;
};

/* One block and unit: its queries. */
struct queries {
    const struct attn_block *block;
    const struct kn_seq *seq;
    uint32_t kv_head, first_head, n_heads, n_q;
};

static struct queries queries_of(const struct attn_job *j, const struct attn_block *block,
                                 uint32_t unit)
{
    struct queries u = {.block = block, .seq = &j->b->seqs[j->b->seq[block->row]]};
    uint32_t in = unit % j->unit_kv * j->unit_heads;
    u.kv_head = unit / j->unit_kv;
    u.first_head = u.kv_head * j->group + in;
    u.n_heads = KN_MIN(j->unit_heads, j->group - in);
    u.n_q = u.n_heads * block->n_rows;
    return u;
}

/* Query i is head i % n_heads of row i / n_heads. */
static void queries_load(const struct attn_job *j, const struct queries *u, float *q)
{
    for (uint32_t i = 0; i < u->n_q; i++, q += j->d_pad) {
        size_t row = u->block->row + i / u->n_heads, head = u->first_head + i % u->n_heads;
        memcpy(q, j->q + (row * j->n_heads + head) * j->d, j->d * sizeof *q);
        memset(q + j->d, 0, (j->d_pad - j->d) * sizeof *q);
    }
}

/* Are n slots neighbours in one page? That is how they lie until a prune. */
static bool slots_run(const uint32_t *slots, uint32_t n)
{
    uint32_t off = 0;
    for (uint32_t i = 0; i < n; i++)
        off |= slots[i] ^ (slots[0] + i);
    return off == 0 && slots[0] % KN_PAGE_ROWS + n <= KN_PAGE_ROWS;
}

/* The tile's rows that somebody in the block may see: up to hi. */
static void rows_find(const struct kn_seq *s, uint32_t layer, uint32_t kv_head, uint32_t tile,
                      uint32_t hi, struct attn_rows *r)
{
    uint32_t first = tile * KN_TILE;
    const uint32_t *slots = s->slots + first;
    const uint8_t *page = kn_kv_row(s->kv, 0, layer, KN_KV_K, kv_head);
    size_t bytes = kn_kv_step(s->kv), stride = s->kv->stride;
    r->type = s->kv->type;
    r->d = s->kv->head_dim;
    r->n = KN_MIN((uint32_t)KN_TILE, KN_MIN(hi, s->n) - first);
    r->to_v = (const uint8_t *)kn_kv_row(s->kv, 0, layer, KN_KV_V, kv_head) - page;
    if (slots_run(slots, r->n)) {
        const uint8_t *at =
            page + slots[0] / KN_PAGE_ROWS * stride + slots[0] % KN_PAGE_ROWS * bytes;
        for (uint32_t i = 0; i < r->n; i++)
            r->k[i] = at + i * bytes;
    } else {
        for (uint32_t i = 0; i < r->n; i++)
            r->k[i] = page + slots[i] / KN_PAGE_ROWS * stride + slots[i] % KN_PAGE_ROWS * bytes;
    }
    for (uint32_t i = r->n; i < KN_TILE; i++) /* whole registers of keys, seen by nobody */
        r->k[i] = r->k[r->n - 1];
}

static void tile_rows(const struct attn_job *j, const struct queries *u, uint32_t tile,
                      struct attn_rows *r)
{
    uint32_t hi = 0;
    for (uint32_t i = 0; i < u->block->n_rows; i++)
        hi = KN_MAX(hi, j->b->hi[u->block->row + i]);
    rows_find(u->seq, j->layer, u->kv_head, tile, hi, r);
}

/* Asks memory for lines of a tile that comes next, at once: for many queries, whose arithmetic takes longer than memory
 * does. Lines lie anywhere, and no hardware foresees a slot list. To the second level: the first is full of this tile.
 * ahead: 0 for keys, to_v for values. */
static void lines_ask(const struct attn_rows *r, size_t ahead, size_t bytes)
{
    for (uint32_t i = 0; i < r->n; i++)
        for (size_t at = 0; at < bytes; at += 64)
            __builtin_prefetch((const char *)r->k[i] + ahead + at, 0, 2);
}

/* What the rows of the block see of a tile: lo, hi per query. */
static void visible(const struct attn_job *j, const struct queries *u, uint32_t tile, uint8_t *lo,
                    uint8_t *hi)
{
    uint32_t first = tile * KN_TILE, i = 0;
    for (uint32_t r = u->block->row; r < u->block->row + u->block->n_rows; r++) {
        uint32_t a = KN_MAX(j->b->lo[r], first), z = KN_MIN(j->b->hi[r], first + KN_TILE);
        if (a >= z)
            a = z = first;
        for (uint32_t h = 0; h < u->n_heads; h++, i++) {
            lo[i] = (uint8_t)(a - first);
            hi[i] = (uint8_t)(z - first);
        }
    }
}

/* The unit's (m, l, acc) of one tile, and memory is asked for the next one's rows, if any. t: q, m, l and acc are set by
 * the caller. */
static void tile_attend(const struct attn_job *j, const struct queries *u, uint32_t tile,
                        struct cpu_scratch *room, struct attn_tile *t)
{
    const struct attn_rows *rows = &room->rows[room->now];
    const struct attn_rows *next = room->more ? &room->rows[1 - room->now] : NULL;
    const struct kn_kv *kv = u->seq->kv;
    /* few queries: turning keys and expanding values first would cost more than it saves */
    bool direct = u->n_q <= ATTN_DIRECT_MAX && j->d == j->d_pad;
    bool turned = !direct || u->n_q > j->c->attn->turn_max;
    if (turned)
        j->c->attn->load(rows, room->kt, direct ? NULL : room->v);
    t->kt = turned ? room->kt : NULL;
    t->spread = room->kt;
    t->rows = direct ? rows : NULL;
    t->next = direct ? next : NULL;
    if (next && turned) /* else scores asks */
        lines_ask(next, 0, kn_kv_line_bytes(kv, KN_KV_K));
    visible(j, u, tile, room->lo, room->hi);
    t->d_pad = j->d_pad;
    t->v = room->v;
    t->n_q = u->n_q;
    t->scale = j->scale;
    t->lo = room->lo;
    t->hi = room->hi;
    t->s = room->s;
    j->c->attn->scores(t);
    if (next && !direct) /* else values asks */
        lines_ask(next, next->to_v, kn_kv_line_bytes(kv, KN_KV_V));
    j->c->attn->weights(t);
    j->c->attn->values(t);
    room->now = 1 - room->now;
}

static void sums_clear(uint32_t n_q, float *m, float *l)
{
    for (uint32_t i = 0; i < n_q; i++) {
        m[i] = -INFINITY;
        l[i] = 0.0f;
    }
}

static void finish(const struct attn_job *j, const struct queries *u, const float *l,
                   const float *acc)
{
    bool turned = kn_kv_hadamard(u->seq->kv->type);
    for (uint32_t i = 0; i < u->n_q; i++, acc += j->d_pad) {
        size_t row = u->block->row + i / u->n_heads, head = u->first_head + i % u->n_heads;
        float *out = j->out + (row * j->n_heads + head) * j->d;
        if (j->b->lo[row] == j->b->hi[row]) {
            memset(out, 0, j->d * sizeof *out);
            continue;
        }
        j->c->attn->finish(out, acc, l[i], j->d);
        if (turned)
            j->c->vec->hadamard_off(out, j->d);
    }
}

/* The tiles of one span that one unit of a block looks at. */
struct place {
    struct queries u;
    uint32_t tile, end_tile;
};

static struct place place_of(const struct attn_job *j, const struct attn_block *block,
                             uint32_t unit, uint32_t span)
{
    return (struct place){.u = queries_of(j, block, unit),
                          .tile = KN_MAX(block->first_tile, span * ATTN_SPAN),
                          .end_tile = KN_MIN(block->end_tile, (span + 1) * ATTN_SPAN)};
}

/* The state of the tiles of p, into g: the first one's is it already, the others join it. Memory is asked for what the thread
 * looks at next: `after`, or NULL where it does not know. room: q is set, and rows[now] are those of p's first tile; behind it
 * those of after's. */
static void span_attend(const struct attn_job *j, const struct place *p, const struct place *after,
                        struct cpu_scratch *room, struct attn_merge *g)
{
    struct attn_tile t = {.q = room->q, .m = g->m, .l = g->l, .acc = g->acc};
    g->m_t = room->m_t;
    g->l_t = room->l_t;
    g->acc_t = room->a_t;
    kn_assert(p->tile < p->end_tile);
    for (uint32_t tile = p->tile; tile < p->end_tile; tile++) {
        struct attn_rows *next = &room->rows[1 - room->now];
        room->more = tile + 1 < p->end_tile || after;
        if (tile + 1 < p->end_tile)
            tile_rows(j, &p->u, tile + 1, next);
        else if (after)
            tile_rows(j, &after->u, after->tile, next);
        tile_attend(j, &p->u, tile, room, &t);
        if (tile > p->tile)
            j->c->attn->merge(g);
        t.m = room->m_t;
        t.l = room->l_t;
        t.acc = room->a_t;
    }
}

static uint32_t spans_end(const struct attn_block *block)
{
    return (block->end_tile + ATTN_SPAN - 1) / ATTN_SPAN;
}

/* Items: (block, unit). The blocks that see most go first, so that threads end together: a prompt's last ones, the first ones of
 * rows that look at what came after them. */
static uint32_t block_of(const struct attn_job *j, uint32_t item)
{
    const struct attn_block *k = j->c->attn_blocks, *last = k + j->n_blocks - 1;
    bool backwards = last->end_tile - last->first_tile >= k->end_tile - k->first_tile;
    uint32_t block = item / j->n_units;
    return backwards ? j->n_blocks - 1 - block : block;
}

static void whole_items(void *ctx, unsigned thread, uint32_t first, uint32_t end)
{
    const struct attn_job *j = ctx;
    struct cpu_scratch *room = &j->c->scratch[thread];
    for (uint32_t item = first; item < end; item++) {
        const struct attn_block *block = &j->c->attn_blocks[block_of(j, item)];
        uint32_t unit = item % j->n_units, span = block->first_tile / ATTN_SPAN;
        struct place p = place_of(j, block, unit, span), after;
        struct attn_merge g = {p.u.n_q,      j->d_pad, room->m_span, room->l_span,
                               room->a_span, NULL,     NULL,         NULL};
        struct attn_merge run = {p.u.n_q, j->d_pad, room->m_run, room->l_run,
                                 room->a, NULL,     NULL,        NULL};
        queries_load(j, &p.u, room->q);
        if (p.tile < p.end_tile)
            tile_rows(j, &p.u, p.tile, &room->rows[room->now]);
        for (bool more = false; span < spans_end(block); span++, p = after, more = true) {
            after = place_of(j, block, unit, span + 1);
            span_attend(j, &p, span + 1 < spans_end(block) ? &after : NULL, room, more ? &g : &run);
            if (more)
                j->c->attn->merge(&run);
            run.m_t = room->m_span;
            run.l_t = room->l_span;
            run.acc_t = room->a_span;
        }
        finish(j, &p.u, run.l, run.acc);
    }
}

/* ---- one block over several threads -------------------------------------------------------------------- */

static size_t state_floats(const struct attn_job *j, uint32_t n_rows)
{
    return (size_t)j->unit_heads * n_rows * (j->d_pad + 2);
}

/* m [n_q], l [n_q], acc [n_q][d_pad] at p */
static struct attn_merge state_at(const struct attn_job *j, float *p, uint32_t n_q)
{
    return (
        struct attn_merge){.n_q = n_q, .d_pad = j->d_pad, .m = p, .l = p + n_q, .acc = p + 2 * n_q};
}

static struct place part_place(const struct attn_job *j, uint32_t item)
{
    return place_of(j, j->block, item / j->n_spans, j->first_span + item % j->n_spans);
}

static void part_items(void *ctx, unsigned thread, uint32_t first, uint32_t end)
{
    const struct attn_job *j = ctx;
    struct cpu_scratch *room = &j->c->scratch[thread];
    struct place p = part_place(j, first), after;
    if (p.tile < p.end_tile)
        tile_rows(j, &p.u, p.tile, &room->rows[room->now]);
    for (uint32_t item = first; item < end; item++, p = after) {
        struct attn_merge g =
            state_at(j, j->c->attn_part + item * state_floats(j, j->block->n_rows), p.u.n_q);
        bool more = item + 1 < j->n_units * j->n_spans; /* a thread's next run is the next item */
        if (more)
            after = part_place(j, item + 1);
        queries_load(j, &p.u, room->q);
        span_attend(j, &p, more ? &after : NULL, room, &g);
    }
}

static void merge_items(void *ctx, unsigned thread, uint32_t first, uint32_t end)
{
    (void)thread;
    const struct attn_job *j = ctx;
    size_t step = state_floats(j, j->block->n_rows);
    for (uint32_t unit = first; unit < end; unit++) {
        struct queries u = queries_of(j, j->block, unit);
        struct attn_merge run = state_at(j, j->c->attn_state + unit * step, u.n_q);
        float *parts = j->c->attn_part + (size_t)unit * j->n_spans * step;
        uint32_t begin = j->first_pass && j->n_spans > 0;
        if (begin)
            memcpy(run.m, parts, u.n_q * (j->d_pad + 2) * sizeof *parts);
        for (uint32_t i = begin; i < j->n_spans; i++) {
            struct attn_merge part = state_at(j, parts + i * step, u.n_q);
            run.m_t = part.m;
            run.l_t = part.l;
            run.acc_t = part.acc;
            j->c->attn->merge(&run);
        }
        if (j->last_pass)
            finish(j, &u, run.l, run.acc);
    }
}

/* The states of all units must fit ATTN_STATE_FLOATS. */
static void block_split(struct attn_job *j, const struct attn_block *block)
{
    size_t all = state_floats(j, block->n_rows) * j->n_units;
    uint32_t fit = (uint32_t)(ATTN_PART_FLOATS / all), end = spans_end(block);
    uint32_t span = block->first_tile / ATTN_SPAN;
    j->block = block;
    do { /* once for a block that sees nothing: its zeros */
        j->first_span = span;
        j->n_spans = KN_MIN(fit, end - span);
        j->first_pass = span == block->first_tile / ATTN_SPAN;
        j->last_pass = span + j->n_spans == end;
        uint32_t items = j->n_units * j->n_spans;
        team_run(j->c->team, part_items, j, items, 1);
        team_run(j->c->team, merge_items, j, j->n_units,
                 items * state_floats(j, block->n_rows) <= MERGE_ALONE_MAX ? j->n_units : 1);
        span += j->n_spans;
    } while (span < end);
}

/* ---- the ops --------------------------------------------------------------------------------------------- */

/* The block that starts at row: same sequence, at most `most` rows. */
static struct attn_block block_at(const struct kn_batch *b, uint32_t row, uint32_t most)
{
    struct attn_block k = {.row = row, .first_tile = UINT32_MAX};
    for (uint32_t r = row; r < b->n_rows && k.n_rows < most && b->seq[r] == b->seq[row]; r++) {
        k.n_rows++;
        if (b->lo[r] == b->hi[r])
            continue;
        k.first_tile = KN_MIN(k.first_tile, b->lo[r] / KN_TILE);
        k.end_tile = KN_MAX(k.end_tile, (b->hi[r] + KN_TILE - 1) / KN_TILE);
    }
    k.first_tile = KN_MIN(k.first_tile, k.end_tile);
    return k;
}

static void heads_set(struct attn_job *j, const struct kn_kv *kv, uint32_t n_heads)
{
    kn_assert(kv->head_dim >= 1 && kv->head_dim <= KN_HEAD_DIM_MAX &&
              n_heads % kv->n_kv_heads == 0 && j->layer < kv->n_layers);
    j->n_heads = n_heads;
    j->d = kv->head_dim;
    j->d_pad = (j->d + 15) / 16 * 16;
    j->group = n_heads / kv->n_kv_heads;
    j->unit_heads = KN_MIN(j->group, (uint32_t)ATTN_Q_MAX);
    j->unit_kv = (j->group + j->unit_heads - 1) / j->unit_heads;
    j->n_units = kv->n_kv_heads * j->unit_kv;
}

void cpu_attention(struct kn *kn, const struct kn_batch *b, uint32_t layer, const float *q,
                   uint32_t n_heads, float scale, float *out)
{
    struct kn_cpu *c = cpu_of(kn);
    struct attn_job j = {.c = c, .b = b, .layer = layer, .scale = scale, .q = q, .out = out};
    if (b->n_rows == 0)
        return;
    heads_set(&j, b->seqs[b->seq[0]].kv, n_heads);
    uint32_t threads = team_size(c->team);
    uint32_t share = (uint32_t)((uint64_t)b->n_rows * j.n_units / (2 * threads));
    uint32_t most = KN_MAX(1u, KN_MIN(share, ATTN_Q_MAX / j.unit_heads));
    bool fits = threads > 1 && state_floats(&j, most) * j.n_units <= ATTN_STATE_FLOATS;
    for (uint32_t row = 0; row < b->n_rows;) {
        uint32_t spans = 0;
        for (j.n_blocks = 0; row < b->n_rows && j.n_blocks < ATTN_BLOCKS; j.n_blocks++) {
            struct attn_block k = block_at(b, row, most);
            c->attn_blocks[j.n_blocks] = k;
            spans = KN_MAX(spans, spans_end(&k) - k.first_tile / ATTN_SPAN);
            row += k.n_rows;
        }
        if (fits && spans > 1 && j.n_blocks * j.n_units < 2 * threads)
            for (uint32_t i = 0; i < j.n_blocks; i++)
                block_split(&j, &c->attn_blocks[i]);
        else
            team_run(c->team, whole_items, &j, j.n_blocks * j.n_units, 1);
    }
}

/* Softmax weights of one query row: the maximum and sum of every tile first, then the weights. */
struct row_job {
    struct attn_job a; /* its q: [n_heads][d] */
    const struct kn_seq *seq;
    uint32_t first_tile; /* of this pass */
    float *part;         /* [tiles][2][n_heads] */
    float *ret;
};

static void row_scores(const struct row_job *j, uint32_t unit, uint32_t tile,
                       struct cpu_scratch *room, struct attn_tile *t)
{
    const struct attn_job *a = &j->a;
    struct attn_rows rows;
    uint32_t in = unit % a->unit_kv * a->unit_heads;
    *t = (struct attn_tile){.d_pad = a->d_pad,
                            .kt = room->kt,
                            .v = NULL,
                            .q = room->q,
                            .scale = a->scale,
                            .lo = room->lo,
                            .hi = room->hi,
                            .s = room->s,
                            .m = room->m_t,
                            .l = room->l_t};
    t->n_q = KN_MIN(a->unit_heads, a->group - in);
    rows_find(j->seq, a->layer, unit / a->unit_kv, tile, j->seq->n, &rows);
    a->c->attn->load(&rows, room->kt, NULL);
    size_t head = unit / a->unit_kv * a->group + in;
    for (uint32_t i = 0; i < t->n_q; i++) {
        float *q = room->q + (size_t)i * a->d_pad;
        memcpy(q, a->q + (head + i) * a->d, a->d * sizeof *q);
        memset(q + a->d, 0, (a->d_pad - a->d) * sizeof *q);
        room->lo[i] = 0;
        room->hi[i] = (uint8_t)rows.n;
    }
    a->c->attn->scores(t);
}

static uint32_t unit_head(const struct attn_job *a, uint32_t unit)
{
    return unit / a->unit_kv * a->group + unit % a->unit_kv * a->unit_heads;
}

static void row_sums(void *ctx, unsigned thread, uint32_t first, uint32_t end)
{
    const struct row_job *j = ctx;
    const struct attn_job *a = &j->a;
    for (uint32_t i = first; i < end; i++)
        for (uint32_t unit = 0; unit < a->n_units; unit++) {
            struct attn_tile t;
            float *m = j->part + (size_t)i * 2 * a->n_heads + unit_head(a, unit);
            row_scores(j, unit, j->first_tile + i, &a->c->scratch[thread], &t);
            a->c->attn->weights(&t);
            memcpy(m, t.m, t.n_q * sizeof *m);
            memcpy(m + a->n_heads, t.l, t.n_q * sizeof *m);
        }
}

/* part[0][..] holds each head's maximum, part[1][..] its sum, over the whole row. */
static void row_weights(void *ctx, unsigned thread, uint32_t first, uint32_t end)
{
    const struct row_job *j = ctx;
    const struct attn_job *a = &j->a;
    for (uint32_t tile = first; tile < end; tile++) {
        uint32_t n = KN_MIN((uint32_t)KN_TILE, j->seq->n - tile * KN_TILE);
        float *ret = j->ret + (size_t)tile * KN_TILE;
        memset(ret, 0, n * sizeof *ret);
        for (uint32_t unit = 0; unit < a->n_units; unit++) {
            struct attn_tile t;
            const float *top = j->part + unit_head(a, unit), *sum = top + a->n_heads;
            row_scores(j, unit, tile, &a->c->scratch[thread], &t);
            memcpy(t.m, top, t.n_q * sizeof *t.m);
            a->c->attn->weights(&t);
            for (uint32_t i = 0; i < t.n_q; i++)
                for (uint32_t k = 0; k < n; k++)
                    ret[k] += t.s[i * KN_TILE + k] / sum[i] / (float)a->n_heads;
        }
    }
}

void cpu_attention_row(struct kn *kn, const struct kn_seq *s, uint32_t layer, const float *q,
                       uint32_t n_heads, float scale, float *ret)
{
    struct kn_cpu *c = cpu_of(kn);
    struct row_job j = {.a = {.c = c, .layer = layer, .scale = scale, .q = q},
                        .seq = s,
                        .ret = ret};
    if (s->n == 0)
        return;
    heads_set(&j.a, s->kv, n_heads);
    kn_assert(2 * n_heads <= ATTN_STATE_FLOATS);
    uint32_t n_tiles = (s->n + KN_TILE - 1) / KN_TILE, fit = ATTN_PART_FLOATS / (2 * n_heads);
    float *top = c->attn_state, *sum = top + n_heads;
    sums_clear(n_heads, top, sum);
    for (; j.first_tile < n_tiles; j.first_tile += fit) {
        uint32_t n = KN_MIN(fit, n_tiles - j.first_tile);
        j.part = c->attn_part;
        team_run(c->team, row_sums, &j, n, 1);
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t h = 0; h < n_heads; h++) {
                const float *part = j.part + (size_t)i * 2 * n_heads + h;
                float m = fmaxf(top[h], part[0]);
                sum[h] = sum[h] * expf(top[h] - m) + part[n_heads] * expf(part[0] - m);
                top[h] = m;
            }
    }
    j.part = c->attn_state;
    team_run(c->team, row_weights, &j, n_tiles, 1);
}
