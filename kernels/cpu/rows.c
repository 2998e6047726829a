/* rows.c: the small ops that go row by row, and rows into and out of the pages. */
#include "cpu.h"
#include "kn_kv_addr.h"
#include "kn_turn.h"
#include "ops.h"
#include <math.h>

/* Below this many values a loop is done by the caller alone. */
#define ALONE_MAX 16384

/* Runs of rows: all at once when it is little work, else about 4096 values each. */
static uint32_t grain(uint32_t rows, size_t row_values)
{
    if (rows * row_values <= ALONE_MAX)
        return KN_MAX(1u, rows);
    return (uint32_t)KN_MAX((size_t)1, 4096 / row_values);
}

/* ---- a pass ---------------------------------------------------------------------------------------------- */

void cpu_batch_begin(struct kn *kn, const struct kn_batch *b)
{
    struct kn_cpu *c = cpu_of(kn);
    for (uint32_t r = 0; r < b->n_rows; r++) {
        kn_assert(b->seq[r] < b->n_seqs && b->lo[r] <= b->hi[r]);
        kn_assert(b->lo[r] == b->hi[r] || b->hi[r] <= b->seqs[b->seq[r]].n);
    }
    for (unsigned i = 0; i < ROPE_TABLES; i++)
        c->rope[i].batch = NULL;
}

void cpu_batch_end(struct kn *kn, const struct kn_batch *b)
{
    (void)b;
    struct kn_cpu *c = cpu_of(kn);
    for (unsigned i = 0; i < ROPE_TABLES; i++)
        c->rope[i].batch = NULL;
}

/* ---- norm, gate ------------------------------------------------------------------------------------------- */

struct vec_job {
    struct kn_cpu *c;
    float *out;
    const float *x, *y;
    size_t n;
    uint32_t d;
    float eps;
};

static void norm_items(void *ctx, unsigned thread, uint32_t first, uint32_t end)
{
    (void)thread;
    const struct vec_job *j = ctx;
    for (size_t r = first; r < end; r++)
        j->c->vec->rmsnorm(j->out + r * j->d, j->x + r * j->d, j->y, j->d, j->eps);
}

void cpu_rmsnorm(struct kn *kn, float *out, const float *x, const float *gain, uint32_t rows,
                 uint32_t d, float eps)
{
    struct vec_job j = {.c = cpu_of(kn), .out = out, .x = x, .y = gain, .d = d, .eps = eps};
    team_run(j.c->team, norm_items, &j, rows, grain(rows, d));
}

#define GATE_RUN 4096

static void swiglu_items(void *ctx, unsigned thread, uint32_t first, uint32_t end)
{
    (void)thread;
    const struct vec_job *j = ctx;
    size_t at = (size_t)first * GATE_RUN, stop = KN_MIN((size_t)end * GATE_RUN, j->n);
    j->c->vec->swiglu(j->out + at, j->x + at, j->y + at, stop - at);
}

void cpu_swiglu(struct kn *kn, float *out, const float *gate, const float *up, size_t n)
{
    struct vec_job j = {.c = cpu_of(kn), .out = out, .x = gate, .y = up, .n = n};
    uint32_t items = (uint32_t)((n + GATE_RUN - 1) / GATE_RUN);
    team_run(j.c->team, swiglu_items, &j, items, n <= ALONE_MAX / 4 ? KN_MAX(1u, items) : 1);
}

/* ---- rotary embedding --------------------------------------------------------------------------------------- */

struct rope_job {
    struct kn_cpu *c;
    const struct kn_batch *b;
    const struct kn_rope *r;
    struct rope_table *table;
    float *x;
};

static void angles(const struct kn_rope *r, int32_t position, float *cos, float *sin)
{
    for (uint32_t i = 0; i < r->n_rot / 2; i++) {
        float angle = (float)position * r->inv_freq[i];
        sin[i] = sinf(angle);
        cos[i] = cosf(angle);
    }
}

/* Items: places whose angles are to be made. */
static void table_items(void *ctx, unsigned thread, uint32_t first, uint32_t end)
{
    (void)thread;
    const struct rope_job *j = ctx;
    const struct rope_table *t = j->table;
    for (uint32_t i = first; i < end; i++) {
        uint32_t place = t->todo[i];
        float *cos = t->cs + (size_t)place * t->n_rot;
        angles(j->r, t->positions[place], cos, cos + t->n_rot / 2);
    }
}

static uint32_t table_place(const struct rope_table *t, int32_t position)
{
    return (uint32_t)position % t->n_places;
}

/* The table of these frequencies: of values, for a model that is closed leaves its address to another one. */
static struct rope_table *table_find(struct kn_cpu *c, const struct kn_rope *r)
{
    size_t bytes = r->n_rot / 2 * sizeof *r->inv_freq;
    for (unsigned i = 0; i < ROPE_TABLES; i++) {
        struct rope_table *t = &c->rope[i];
        if (t->n_places > 0 && t->n_rot == r->n_rot && memcmp(t->inv_freq, r->inv_freq, bytes) == 0)
            return t;
    }
    struct rope_table *t = &c->rope[c->rope_next++ % ROPE_TABLES];
    t->batch = NULL;
    t->n_rot = r->n_rot;
    memcpy(t->inv_freq, r->inv_freq, bytes);
    t->n_places = KN_MIN((uint32_t)ROPE_PLACES, ROPE_TABLE_FLOATS / KN_MAX(1u, r->n_rot));
    t->now = 0;
    memset(t->since, 0, t->n_places * sizeof *t->since);
    return t;
}

/* Places for the batch's positions. One that another row of the batch has is not taken from it: such a row's angles are computed
 * on the spot. Made at the first call of a pass (q of layer 0), for all others. */
static void table_fill(struct rope_job *j)
{
    struct rope_table *t = j->table;
    uint32_t n = 0;
    if (t->batch == j->b)
        return;
    t->batch = j->b;
    if (++t->now == 0) { /* 0 says that a place is empty */
        memset(t->since, 0, t->n_places * sizeof *t->since);
        t->now = 1;
    }
    for (uint32_t r = 0; r < j->b->n_rows; r++) {
        int32_t position = j->b->positions[r];
        uint32_t place = table_place(t, position);
        bool there = t->since[place] != 0 && t->positions[place] == position;
        if (t->since[place] == t->now)
            continue;
        t->since[place] = t->now;
        t->positions[place] = position;
        if (!there)
            t->todo[n++] = place;
    }
    team_run(j->c->team, table_items, j, n, grain(n, (size_t)t->n_rot * 16));
}

static void rope_items(void *ctx, unsigned thread, uint32_t first, uint32_t end)
{
    (void)thread;
    const struct rope_job *j = ctx;
    const struct rope_table *t = j->table;
    struct rope_row row = {.style = j->r->style,
                           .n_heads = j->r->n_heads,
                           .head_dim = j->r->head_dim,
                           .n_rot = j->r->n_rot,
                           .norm = j->r->norm,
                           .norm_eps = j->r->norm_eps};
    float own[KN_HEAD_DIM_MAX];
    for (uint32_t r = first; r < end; r++) {
        const float *cs = own;
        int32_t position = j->b->positions[r];
        uint32_t place = table_place(t, position);
        if (t->positions[place] == position)
            cs = t->cs + (size_t)place * row.n_rot;
        else
            angles(j->r, position, own, own + row.n_rot / 2);
        row.cos = cs;
        row.sin = cs + row.n_rot / 2;
        j->c->vec->rope(&row, j->x + (size_t)r * row.n_heads * row.head_dim);
    }
}

void cpu_rope(struct kn *kn, const struct kn_batch *b, const struct kn_rope *r, float *x)
{
    struct rope_job j = {.c = cpu_of(kn), .b = b, .r = r, .x = x};
    kn_assert(r->n_rot % 2 == 0 && r->n_rot <= r->head_dim && r->head_dim <= KN_HEAD_DIM_MAX);
    j.table = table_find(j.c, r);
    table_fill(&j);
    team_run(j.c->team, rope_items, &j, b->n_rows,
             grain(b->n_rows, (size_t)r->n_heads * r->head_dim));
}

/* ---- pages ---------------------------------------------------------------------------------------------------- */

struct kv_job {
    struct kn_cpu *c;
    const struct kn_batch *b;
    const struct kn_seq *s;
    uint32_t layer, first, d;
    const float *k, *v;
    const uint32_t *slots;
    float *ret;
};

static void value_put(const struct vec_kernels *vec, const struct kn_kv *kv, const float *v,
                      void *line)
{
    float turned[KN_HEAD_DIM_MAX];
    if (kn_kv_hadamard(kv->type)) {
        memcpy(turned, v, kv->head_dim * sizeof *v);
        vec->hadamard_on(turned, kv->head_dim);
        v = turned;
    }
    vec->line_put(kn_kv_line_type(kv->type, KN_KV_V), line, v, kv->head_dim);
}

static void write_items(void *ctx, unsigned thread, uint32_t first, uint32_t end)
{
    (void)thread;
    const struct kv_job *j = ctx;
    for (uint32_t r = first; r < end; r++) {
        const struct kn_kv *kv = j->b->seqs[j->b->seq[r]].kv;
        size_t at = (size_t)r * kv->n_kv_heads * kv->head_dim;
        for (uint32_t h = 0; h < kv->n_kv_heads; h++, at += kv->head_dim) {
            uint32_t slot = j->b->slots[r];
            j->c->vec->line_put(kn_kv_line_type(kv->type, KN_KV_K),
                                kn_kv_row(kv, slot, j->layer, KN_KV_K, h), j->k + at, kv->head_dim);
            value_put(j->c->vec, kv, j->v + at, kn_kv_row(kv, slot, j->layer, KN_KV_V, h));
        }
    }
}

void cpu_kv_write(struct kn *kn, const struct kn_batch *b, uint32_t layer, const float *k,
                  const float *v)
{
    struct kv_job j = {.c = cpu_of(kn), .b = b, .layer = layer, .k = k, .v = v};
    kn_assert(b->slots);
    if (b->n_rows == 0)
        return;
    const struct kn_kv *kv = b->seqs[b->seq[0]].kv;
    team_run(j.c->team, write_items, &j, b->n_rows,
             grain(b->n_rows, (size_t)kv->n_kv_heads * kv->head_dim));
}

static void hidden_put(const struct kn_cpu *c, const struct kn_kv *kv, uint32_t slot,
                       const float *x)
{
    if (!kn_kv_hidden_scaled(kv)) {
        memcpy(kn_kv_hidden(kv, slot), x, kv->d_hidden * sizeof *x);
        return;
    }
    float scale = kn_kv_scale_for(c->vec->max_abs(x, kv->d_hidden));
    c->vec->narrow(kn_kv_hidden(kv, slot), x, kv->d_hidden, 1.0f / scale);
    *kn_kv_hidden_scale(kv, slot) = scale;
}

static void hidden_write_items(void *ctx, unsigned thread, uint32_t first, uint32_t end)
{
    (void)thread;
    const struct kv_job *j = ctx;
    for (uint32_t r = first; r < end; r++) {
        const struct kn_kv *kv = j->b->seqs[j->b->seq[r]].kv;
        if (kv->d_hidden > 0)
            hidden_put(j->c, kv, j->b->slots[r], j->k + (size_t)r * j->d);
    }
}

void cpu_hidden_write(struct kn *kn, const struct kn_batch *b, const float *x)
{
    struct kv_job j = {.c = cpu_of(kn), .b = b, .k = x};
    kn_assert(b->slots);
    for (uint32_t i = 0; i < b->n_seqs; i++) /* one model: one width wherever rows are kept */
        j.d = KN_MAX(j.d, b->seqs[i].kv->d_hidden);
    if (j.d > 0)
        team_run(j.c->team, hidden_write_items, &j, b->n_rows, grain(b->n_rows, j.d));
}

static void hidden_read_items(void *ctx, unsigned thread, uint32_t first, uint32_t end)
{
    (void)thread;
    const struct kv_job *j = ctx;
    for (uint32_t r = first; r < end; r++) {
        const struct kn_kv *kv = j->b->seqs[j->b->seq[r]].kv;
        float *out = j->ret + (size_t)r * j->d;
        kn_assert(kv->d_hidden == j->d);
        const void *from = kn_kv_hidden(kv, j->slots[r]);
        if (!kn_kv_hidden_scaled(kv)) {
            memcpy(out, from, j->d * sizeof *out);
            continue;
        }
        j->c->vec->widen(out, from, j->d, *kn_kv_hidden_scale(kv, j->slots[r]));
    }
}

void cpu_hidden_read(struct kn *kn, const struct kn_batch *b, const uint32_t *row_slots, float *out)
{
    struct kv_job j = {.c = cpu_of(kn), .b = b, .slots = row_slots, .ret = out};
    if (b->n_rows == 0)
        return;
    j.d = b->seqs[b->seq[0]].kv->d_hidden;
    team_run(j.c->team, hidden_read_items, &j, b->n_rows, grain(b->n_rows, j.d));
}

static void keys_items(void *ctx, unsigned thread, uint32_t first, uint32_t end)
{
    (void)thread;
    const struct kv_job *j = ctx;
    const struct kn_kv *kv = j->s->kv;
    for (uint32_t i = first; i < end; i++) {
        float *ret = j->ret + (size_t)i * kv->n_kv_heads * kv->head_dim;
        for (uint32_t h = 0; h < kv->n_kv_heads; h++, ret += kv->head_dim)
            j->c->vec->line_get(kn_kv_line_type(kv->type, KN_KV_K), ret,
                                kn_kv_row(kv, j->s->slots[j->first + i], j->layer, KN_KV_K, h),
                                kv->head_dim);
    }
}

void cpu_keys_read(struct kn *kn, const struct kn_seq *s, uint32_t layer, uint32_t first,
                   uint32_t count, float *ret)
{
    struct kv_job j = {.c = cpu_of(kn), .s = s, .layer = layer, .first = first, .ret = ret};
    const struct kn_kv *kv = s->kv;
    kn_assert(first <= s->n && count <= s->n - first && layer < kv->n_layers);
    team_run(j.c->team, keys_items, &j, count, grain(count, (size_t)kv->n_kv_heads * kv->head_dim));
}

struct turn_job {
    struct kn_cpu *c;
    const struct kn_seq *s;
    const struct kn_rope *r;
    const int32_t *from;
};

/* Rows whose angles are at hand together: one head's keys of neighbours lie side by side in a page. */
#define TURN_ROWS 16u

static void turn_rows(const struct turn_job *j, uint32_t first, uint32_t n)
{
    const struct kn_kv *kv = j->s->kv;
    const struct vec_kernels *vec = j->c->vec;
    float cos[TURN_ROWS][KN_HEAD_DIM_MAX / 2], sin[TURN_ROWS][KN_HEAD_DIM_MAX / 2];
    float key[KN_HEAD_DIM_MAX];
    enum kn_type type = kn_kv_line_type(kv->type, KN_KV_K);
    struct rope_row turn = {.style = j->r->style,
                            .n_heads = 1,
                            .head_dim = kv->head_dim,
                            .n_rot = j->r->n_rot};
    for (uint32_t i = 0; i < n; i++)
        kn_turn_angles(j->r, j->from[first + i], (int32_t)(first + i), cos[i], sin[i]);
    for (uint32_t layer = 0; layer < kv->n_layers; layer++)
        for (uint32_t h = 0; h < kv->n_kv_heads; h++)
            for (uint32_t i = 0; i < n; i++) {
                if (j->from[first + i] == (int32_t)(first + i))
                    continue;
                void *line = kn_kv_row(kv, j->s->slots[first + i], layer, KN_KV_K, h);
                turn.cos = cos[i];
                turn.sin = sin[i];
                vec->line_get(type, key, line, kv->head_dim);
                vec->rope(&turn, key);
                vec->line_put(type, line, key, kv->head_dim);
            }
}

static void turn_items(void *ctx, unsigned thread, uint32_t first, uint32_t end)
{
    (void)thread;
    for (uint32_t i = first; i < end; i += TURN_ROWS)
        turn_rows(ctx, i, KN_MIN(TURN_ROWS, end - i));
}

void cpu_kv_rotate(struct kn *kn, const struct kn_seq *s, const struct kn_rope *r,
                   const int32_t *from)
{
    struct turn_job j = {.c = cpu_of(kn), .s = s, .r = r, .from = from};
    const struct kn_kv *kv = s->kv;
    kn_assert(r->norm == NULL && r->n_heads == kv->n_kv_heads && r->head_dim == kv->head_dim);
    team_run(j.c->team, turn_items, &j, s->n, TURN_ROWS);
}
