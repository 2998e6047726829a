/* Whole passes of the GPU backend: decode passes as graphs, arenas under work in flight, and every call of the runtime failing
 * once. A small model of one layer with f32 weights and an f32 pool; ref runs the same ops beside it. */
#include "kernels_device.h"
#include "simt_control.h"
#include <unistd.h>

enum { V = 97, D = 64, HEADS = 4, KV_HEADS = 2, HD = 16, FF = 96, SEQS = 5, PAGES = 12, ROWS = 40 };
enum { WQ, WK, WV, WO, WUP, WDOWN, WHEAD, N_W };

struct rig {
    struct kn *kn;
    struct kn_weight *w[N_W];
    struct kc_pool pool;
    float *x, *h, *q, *k, *v, *att, *up, *logits, *gain, *inv_freq;
    uint32_t n[SEQS], slots[SEQS][2 * 64];
};

static const uint32_t shapes[N_W][2] = {
    {HEADS * HD, D}, {KV_HEADS * HD, D}, {KV_HEADS * HD, D}, {D, HEADS *HD}, {FF, D}, {D, FF},
    {V, D}};
static const struct kn_kv pool_shape = {.n_layers = 1,
                                        .n_kv_heads = KV_HEADS,
                                        .head_dim = HD,
                                        .d_hidden = D};

/* Memory of the device that can fail: NULL then. */
static float *maybe(struct kn *kn, size_t n)
{
    void *p = NULL;
    return kn->ops->buf_alloc(kn, n * sizeof(float), &p) == KN_OK ? p : NULL;
}

static struct kn_weight *weight(struct kn *kn, int which, enum kn_type type, uint64_t seed)
{
    struct kn_tensor t = kc_tensor(type, shapes[which][0], shapes[which][1], seed);
    struct kn_weight *w = NULL;
    kn->ops->weight_load(kn, &t, &w);
    kc_tensor_free(&t);
    return w;
}

static enum kn_type weights_are = KN_F32; /* and keys, values and hidden rows */

static bool pool_open(struct rig *r)
{
    void *base = NULL;
    struct kn_kv kv = pool_shape;
    kv.type = weights_are; /* F32 or F16 */
    kv.stride = (kn_kv_page_bytes(&kv) + 4095) / 4096 * 4096;
    if (r->kn->ops->arena_open(r->kn, kv.stride, PAGES, &base) != KN_OK)
        return false;
    kv.base = base;
    r->pool = (struct kc_pool){r->kn, kv, PAGES};
    for (uint32_t p = 0; p < PAGES; p++)
        if (r->kn->ops->arena_commit(r->kn, base, kv.stride, p) != KN_OK)
            return false;
    return true;
}

/* False if something could not be had; rig_close takes what there is. */
static bool rig_open(struct rig *r, struct kn *kn)
{
    memset(r, 0, sizeof *r);
    r->kn = kn;
    for (int i = 0; i < N_W; i++)
        if (!(r->w[i] = weight(kn, i, weights_are, 10 + (uint64_t)i)))
            return false;
    if (!pool_open(r))
        return false;
    r->x = maybe(kn, ROWS * D);
    r->h = maybe(kn, ROWS * D);
    r->q = maybe(kn, ROWS * HEADS * HD);
    r->k = maybe(kn, ROWS * KV_HEADS * HD);
    r->v = maybe(kn, ROWS * KV_HEADS * HD);
    r->att = maybe(kn, ROWS * HEADS * HD);
    r->up = maybe(kn, ROWS * FF);
    r->logits = maybe(kn, ROWS * V);
    r->gain = maybe(kn, D);
    r->inv_freq = maybe(kn, HD / 2);
    if (!r->x || !r->h || !r->q || !r->k || !r->v || !r->att || !r->up || !r->logits || !r->gain ||
        !r->inv_freq)
        return false;
    float inv_freq[HD / 2], *gain = kc_floats(7, D, 1.0f);
    for (int i = 0; i < HD / 2; i++)
        inv_freq[i] = powf(100.0f, -2.0f * (float)i / HD);
    kn->ops->upload(kn, r->gain, gain, D * sizeof *gain);
    kn->ops->upload(kn, r->inv_freq, inv_freq, sizeof inv_freq);
    free(gain);
    for (uint32_t s = 0; s < SEQS; s++) /* slots s, s + SEQS, ... of two pages each, backwards */
        for (uint32_t i = 0; i < 2 * 64; i++)
            r->slots[s][i] = (2 * 64 - 1 - i) * SEQS + s;
    return true;
}

static void drop(struct kn *kn, float *p, size_t n)
{
    if (p)
        kn->ops->buf_free(kn, p, n * sizeof(float));
}

static void rig_close(struct rig *r)
{
    struct kn *kn = r->kn;
    for (int i = 0; i < N_W; i++)
        kn->ops->weight_free(kn, &r->w[i]);
    drop(kn, r->x, ROWS * D);
    drop(kn, r->h, ROWS * D);
    drop(kn, r->q, ROWS * HEADS * HD);
    drop(kn, r->k, ROWS * KV_HEADS * HD);
    drop(kn, r->v, ROWS * KV_HEADS * HD);
    drop(kn, r->att, ROWS * HEADS * HD);
    drop(kn, r->up, ROWS * FF);
    drop(kn, r->logits, ROWS * V);
    drop(kn, r->gain, D);
    drop(kn, r->inv_freq, HD / 2);
    if (r->pool.kv.base)
        kc_pool_close(&r->pool);
}

/* How the next pass's tokens are picked, and where they go; NULL: nobody picks. */
static const struct kn_sample *pick_how;
static int32_t picked[SEQS];

/* Appends n tokens to each of the sequences `first` .. `first + count - 1` (n == 1: a decode pass). logits: of the last row of
 * each sequence; NULL: nobody waits for this pass. */
static void forward(struct rig *r, uint32_t first, uint32_t count, uint32_t n, float *logits)
{
    struct kn *kn = r->kn;
    const struct kn_ops *ops = kn->ops;
    uint32_t rows = 0, seq[ROWS], lo[ROWS], hi[ROWS], slots[ROWS], pick[SEQS];
    int32_t ids[ROWS], positions[ROWS];
    struct kn_seq seqs[SEQS];
    for (uint32_t s = 0; s < count; s++) {
        uint32_t *have = &r->n[first + s];
        for (uint32_t i = 0; i < n; i++, rows++, (*have)++) {
            ids[rows] = (int32_t)((*have * 7 + (first + s) * 13) % V);
            positions[rows] = (int32_t)*have;
            seq[rows] = s;
            lo[rows] = 0;
            hi[rows] = *have + 1;
            slots[rows] = r->slots[first + s][*have];
        }
        pick[s] = rows - 1;
        seqs[s] = (struct kn_seq){&r->pool.kv, r->slots[first + s], *have};
    }
    struct kn_batch b = {rows, count, ids, positions, seq, lo, hi, slots, seqs};
    const struct kn_weight *qkv[] = {r->w[WQ], r->w[WK], r->w[WV]}, *o[] = {r->w[WO]},
                           *up[] = {r->w[WUP]}, *down[] = {r->w[WDOWN]}, *head[] = {r->w[WHEAD]};
    struct kn_rope rope = {KN_ROPE_HALVES, HEADS, HD, HD, r->inv_freq, NULL, 0.0f};
    ops->batch_begin(kn, &b);
    ops->embed(kn, r->w[WHEAD], &b, r->x);
    ops->rmsnorm(kn, r->h, r->x, r->gain, rows, D, 1e-5f);
    ops->linear(kn, 3, qkv, NULL, r->h, rows, (float *[]){r->q, r->k, r->v}, false);
    ops->rope(kn, &b, &rope, r->q);
    rope.n_heads = KV_HEADS;
    ops->rope(kn, &b, &rope, r->k);
    ops->kv_write(kn, &b, 0, r->k, r->v);
    ops->hidden_write(kn, &b, r->x);
    ops->attention(kn, &b, 0, r->q, HEADS, 0.25f, r->att);
    ops->linear(kn, 1, o, NULL, r->att, rows, &r->x, true);
    ops->rmsnorm(kn, r->h, r->x, r->gain, rows, D, 1e-5f);
    ops->linear(kn, 1, up, NULL, r->h, rows, &r->up, false);
    ops->swiglu(kn, r->up, r->up, r->up, (size_t)rows * FF);
    ops->linear(kn, 1, down, NULL, r->up, rows, &r->x, true);
    ops->gather_rows(kn, r->h, r->x, pick, count, D);
    ops->rmsnorm(kn, r->h, r->h, r->gain, count, D, 1e-5f);
    ops->linear(kn, 1, head, NULL, r->h, count, &r->logits, false);
    if (pick_how)
        ops->sample(kn, r->logits, count, V, pick_how, picked);
    if (logits)
        ops->download(kn, logits, r->logits, (size_t)count * V * sizeof *logits);
    ops->batch_end(kn, &b);
}

static void forward_both(struct rig *r, struct rig *ref, uint32_t first, uint32_t count, uint32_t n)
{
    float got[SEQS * V], want[SEQS * V];
    forward(r, first, count, n, got);
    forward(ref, first, count, n, want);
    kc_near(kd_label(), got, want, (size_t)count * V, kc_max_abs(want, count * V),
            weights_are == KN_F32 ? 1e-5f : 2 * KC_HALVES);
}

static struct kn *open_ref(void)
{
    struct kn_options opt = {.backend = "ref"};
    struct kn *kn = NULL;
    assert_int_equal(kn_open(&kn, &opt, NULL, 0), KN_OK);
    return kn;
}

/* Another weight at the old one's address, if that can be had. */
static void weight_replace(struct rig *r)
{
    enum { TRIES = 40 };
    struct kn_weight *old = r->w[WUP], *others[TRIES];
    int n = 0;
    r->kn->ops->weight_free(r->kn, &r->w[WUP]);
    while ((r->w[WUP] = weight(r->kn, WUP, KN_F32, 99)) != old && n + 1 < TRIES)
        others[n++] = r->w[WUP];
    assert_non_null(r->w[WUP]);
    while (n > 0)
        r->kn->ops->weight_free(r->kn, &others[--n]);
}

/* The same pass again and again, with more context (beyond 64: another graph), other sequences, other numbers of rows,
 * prompts in between, and another weight at the old one's place. */
static void check_graphs(struct kn *kn)
{
    struct kn *ref_kn = open_ref();
    struct rig r, ref;
    assert_true(rig_open(&r, kn) && rig_open(&ref, ref_kn));
    forward_both(&r, &ref, 0, 2, 20);
    for (uint32_t i = 0; i < 5; i++)
        forward_both(&r, &ref, 0, 2, 1);
    forward_both(&r, &ref, 2, 3, 13);
    for (uint32_t i = 0; i < 4; i++) {
        forward_both(&r, &ref, i % 2, 4, 1);
        forward_both(&r, &ref, 4, 1, 1);
    }
    forward_both(&r, &ref, 0, 1, 32);
    for (uint32_t i = 0; i < 6; i++) /* sequence 0 grows over 64 */
        forward_both(&r, &ref, 0, 2, 1);
    weight_replace(&r);
    weight_replace(&ref);
    for (uint32_t i = 0; i < 3; i++)
        forward_both(&r, &ref, 0, 2, 1);
    for (uint32_t i = 0; i < 6;
         i++) { /* what the next pass stages does not touch what this one has not copied yet */
        forward(&r, 1 + i % 2, 2, 1 + i / 3, NULL);
        forward(&ref, 1 + i % 2, 2, 1 + i / 3, NULL);
    }
    forward_both(&r, &ref, 0, 4, 1);
    rig_close(&r);
    rig_close(&ref);
    kn_close(&ref_kn);
}

static void decode_passes_are_graphs(void **state)
{
    (void)state;
    kd_each(check_graphs);
}

/* Scores rows 0 .. n - 1 of a sequence from their hidden rows, as a refresh through the last layer does. */
static void score(struct rig *r, uint32_t s, uint32_t n, float *logit, float *lse)
{
    const struct kn_ops *ops = r->kn->ops;
    int32_t ids[ROWS], positions[ROWS];
    uint32_t seq[ROWS] = {0}, lo[ROWS], hi[ROWS];
    struct kn_seq seqs[] = {{&r->pool.kv, r->slots[s], r->n[s]}};
    for (uint32_t i = 0; i < n; i++) {
        ids[i] = (int32_t)((i * 5 + s) % V);
        positions[i] = (int32_t)i;
        lo[i] = i + 1;
        hi[i] = r->n[s];
    }
    struct kn_batch b = {n, 1, ids, positions, seq, lo, hi, NULL, seqs};
    struct kn_rope rope = {KN_ROPE_HALVES, HEADS, HD, HD, r->inv_freq, NULL, 0.0f};
    const struct kn_weight *q[] = {r->w[WQ]}, *o[] = {r->w[WO]};
    ops->batch_begin(r->kn, &b);
    ops->hidden_read(r->kn, &b, r->slots[s], r->x);
    ops->rmsnorm(r->kn, r->h, r->x, r->gain, n, D, 1e-5f);
    ops->linear(r->kn, 1, q, NULL, r->h, n, &r->q, false);
    ops->rope(r->kn, &b, &rope, r->q);
    ops->attention(r->kn, &b, 0, r->q, HEADS, 0.25f, r->att);
    ops->linear(r->kn, 1, o, NULL, r->att, n, &r->x, true);
    ops->rmsnorm(r->kn, r->h, r->x, r->gain, n, D, 1e-5f);
    ops->row_logit(r->kn, r->w[WHEAD], r->h, n, ids, logit);
    ops->row_lse(r->kn, r->w[WHEAD], r->h, n, lse);
    ops->batch_end(r->kn, &b);
}

/* The same shape again and again, with other sequences, other hidden rows and decode passes in between. */
static void check_scores(struct kn *kn)
{
    struct kn *ref_kn = open_ref();
    struct rig r, ref;
    float got[2][ROWS], want[2][ROWS];
    for (int half = 0; half < 2; half++) {
        float tolerance = half ? 2 * KC_HALVES : 1e-5f;
        weights_are = half ? KN_F16 : KN_F32;
        assert_true(rig_open(&r, kn) && rig_open(&ref, ref_kn));
        forward_both(&r, &ref, 0, 2, 15);
        for (uint32_t i = 0; i < 6; i++) {
            uint32_t n = i == 2 ? 3 : 11;
            score(&r, i % 2, n, got[0], got[1]);
            score(&ref, i % 2, n, want[0], want[1]);
            kc_near(kd_label(), got[0], want[0], n, kc_max_abs(want[1], n), tolerance);
            kc_near(kd_label(), got[1], want[1], n, kc_max_abs(want[1], n), tolerance);
            if (i > 1)
                forward_both(&r, &ref, 0, 2, 1);
        }
        rig_close(&r);
        rig_close(&ref);
    }
    kn_close(&ref_kn);
    weights_are = KN_F32;
}

static void score_passes_of_one_layer_are_graphs(void **state)
{
    (void)state;
    kd_each(check_scores);
}

/* Five rows meet weights in halves: what one op of the graph leaves in 16 bits for the next. */
static void check_halves(struct kn *kn)
{
    struct kn *ref_kn = open_ref();
    struct rig r, ref;
    weights_are = KN_F16;
    assert_true(rig_open(&r, kn) && rig_open(&ref, ref_kn));
    for (uint32_t i = 0; i < 5; i++) {
        forward_both(&r, &ref, 0, 5, 1);
        if (i == 2)
            forward_both(&r, &ref, 0, 2, 7);
    }
    rig_close(&r);
    rig_close(&ref);
    kn_close(&ref_kn);
    weights_are = KN_F32;
}

static void decode_passes_in_halves_are_graphs(void **state)
{
    (void)state;
    kd_each(check_halves);
}

/* A decode step that picks its tokens on the device: they are all that leaves it, in one copy, and the host waits once. */
static void check_what_leaves(struct kn *kn)
{
    enum { N = 3, STEPS = 8 };
    static const char *const names[] = {"copies_out", "bytes_out", "waits"};
    static const long want[] = {1, N * (long)sizeof(int32_t), 1};
    int32_t recent[] = {1, 5, 5};
    struct rig r;
    if (!kd_is_simt(kn))
        return;
    struct kn_sample how[N] = {{.top_p = 1, .repeat_penalty = 1},
                               {.temperature = 1, .top_p = 0.9f, .repeat_penalty = 1, .seed = 3},
                               {.temperature = 0.8f,
                                .top_p = 1,
                                .min_p = 0.05f,
                                .top_k = 20,
                                .repeat_penalty = 1.2f,
                                .recent = recent,
                                .n_recent = 3}};
    assert_true(rig_open(&r, kn));
    forward(&r, 0, N, 5, NULL);
    pick_how = how;
    for (uint32_t i = 0; i < STEPS; i++) {
        long before[KC_LEN(names)];
        for (size_t k = 0; k < KC_LEN(names); k++)
            before[k] = simt_counted(kn, names[k]);
        forward(&r, 0, N, 1, NULL);
        assert_int_equal(kn->ops->status(kn), KN_OK);
        for (size_t k = 0; k < KC_LEN(names) && i > 0;
             k++) /* the first waits for the prompt, too */
            if (simt_counted(kn, names[k]) - before[k] != want[k])
                fail_msg("%s: step %u: %s went up by %ld, expected %ld", kd_label(), i, names[k],
                         simt_counted(kn, names[k]) - before[k], want[k]);
        for (uint32_t k = 0; k < N; k++)
            assert_true(picked[k] >= 0 && picked[k] < V);
    }
    pick_how = NULL;
    rig_close(&r);
}

static void only_tokens_leave_the_device(void **state)
{
    (void)state;
    kd_each(check_what_leaves);
}

/* ---- arenas ---- */

enum { ARENA_PAGES = 16 };

/* Pages that share granules with their neighbours, in a drawn order: zero when they come, untouched while they stay. */
static void check_arena(struct kn *kn)
{
    static const size_t strides[] = {4096 * 90, 4096 * 700, 1 << 20, 6 << 20};
    for (size_t c = 0; c < KC_LEN(strides); c++) {
        size_t stride = strides[c], granule = 2 << 20;
        void *base = NULL;
        bool out[ARENA_PAGES] = {false};
        struct kc_rng rng = {c};
        uint8_t *host = malloc(stride), mark[64];
        assert_non_null(host);
        assert_int_equal(kn->ops->arena_open(kn, stride, ARENA_PAGES, &base), KN_OK);
        for (int step = 0; step < (stride > granule ? 12 : 40); step++) {
            uint32_t page = kc_below(&rng, ARENA_PAGES);
            uint8_t *at = (uint8_t *)base + page * stride;
            if (out[page]) {
                kn->ops->download(kn, mark, at + stride - 64, 64);
                for (int i = 0; i < 64; i++)
                    assert_int_equal(mark[i], page + 1);
                kn->ops->arena_release(kn, base, stride, page);
            } else {
                assert_int_equal(kn->ops->arena_commit(kn, base, stride, page), KN_OK);
                kn->ops->download(kn, host, at, stride);
                for (size_t i = 0; i < stride; i++)
                    if (host[i] != 0)
                        fail_msg("%s: byte %zu of a fresh page is %u", kd_label(), i, host[i]);
                memset(mark, (int)page + 1, sizeof mark);
                kn->ops->upload(kn, at, mark, sizeof mark);
                kn->ops->upload(kn, at + stride - 64, mark, sizeof mark);
            }
            out[page] = !out[page];
            size_t held = 0; /* granules that a page touches */
            for (size_t g = 0; g < ARENA_PAGES * stride; g += granule)
                for (uint32_t p = (uint32_t)(g / stride), any = 0;
                     !any && p < ARENA_PAGES && p * stride < g + granule; p++)
                    held += (any = out[p]) ? granule : 0;
            assert_int_equal(kn->bytes_arena, held);
        }
        kn->ops->arena_close(kn, base, stride, ARENA_PAGES);
        free(host);
    }
}

static void pages_share_granules(void **state)
{
    (void)state;
    kd_each(check_arena);
}

/* A page is released while a kernel that reads it has not run: the rows come out whole. */
static void check_release(struct kn *kn)
{
    enum { W = 2 * 64 };
    for (uint32_t round = 0; round < 3; round++) {
        struct kc_pool pool;
        uint32_t slots[4] = {3, 70, 5, 64}, moved[4] = {130, 131, 132, 133};
        float *k = kc_floats(round, 4 * W, 1.0f), got[4 * W];
        kc_pool_open(
            &pool, kn,
            (struct kn_kv){.n_layers = 30, .n_kv_heads = 2, .head_dim = 64, .type = KN_F32}, 3);
        struct kn_seq from = {&pool.kv, slots, 4}, to = {&pool.kv, moved, 4};
        kc_pool_write(&pool, &from, 29, (struct kc_rows){0, 4, k, k, NULL});
        for (int i = 0; i < 4; i++)
            kn->ops->row_copy(kn, &pool.kv, moved[i], slots[i]);
        kn->ops->arena_release(kn, pool.kv.base, pool.kv.stride, 0);
        kn->ops->arena_release(kn, pool.kv.base, pool.kv.stride, 1);
        if (round == 1) /* one comes back at once */
            assert_int_equal(kn->ops->arena_commit(kn, pool.kv.base, pool.kv.stride, 1), KN_OK);
        kn->ops->keys_read(kn, &to, 29, 0, 4, got);
        kc_same(kd_label(), got, k, 4 * W);
        kc_pool_close(&pool);
        free(k);
    }
}

static void pages_are_released_under_work_in_flight(void **state)
{
    (void)state;
    kd_each(check_release);
}

/* ---- failures ---- */

static int stderr_copy;
static FILE *stderr_file;

static void stderr_catch(void)
{
    fflush(stderr);
    stderr_file = tmpfile();
    stderr_copy = dup(STDERR_FILENO);
    assert_true(stderr_file && stderr_copy >= 0);
    dup2(fileno(stderr_file), STDERR_FILENO);
}

/* Lines since stderr_catch. */
static unsigned stderr_give_back(void)
{
    unsigned lines = 0;
    int ch;
    fflush(stderr);
    dup2(stderr_copy, STDERR_FILENO);
    close(stderr_copy);
    rewind(stderr_file);
    while ((ch = fgetc(stderr_file)) != EOF)
        lines += ch == '\n';
    fclose(stderr_file);
    return lines;
}

/* What came of a run with a failing call. */
struct outcome {
    int open, status, status_later;
    bool whole; /* everything could be had */
    bool named; /* kn.failed says something */
    size_t bytes;
};

static void run_all(struct kn *kn, struct outcome *o)
{
    struct rig r;
    float logits[SEQS * V], lse[2];
    o->whole = rig_open(&r, kn);
    if (o->whole) {
        forward(&r, 0, 2, 11, logits);
        for (int i = 0; i < 4; i++)
            forward(&r, 0, 2, 1, logits);
        kn->ops->row_lse(kn, r.w[WHEAD], r.x, 2, lse);
        kn->ops->arena_release(kn, r.pool.kv.base, r.pool.kv.stride, PAGES - 1);
        int code = kn->ops->arena_commit(kn, r.pool.kv.base, r.pool.kv.stride, PAGES - 1);
        o->whole = code == KN_OK;
    }
    o->status = kn->ops->status(kn);
    rig_close(&r);
    o->bytes = kn->bytes_buffers + kn->bytes_weights + kn->bytes_arena;
    o->status_later = kn->ops->status(kn);
    o->named = kn->failed[0] != '\0';
}

/* Everything that the rig does, with the nth call failing. Returns false if it was never reached. */
static bool failing(const char *call, unsigned nth, unsigned error)
{
    char inject[64];
    struct kn *kn = NULL;
    struct outcome o = {0};
    snprintf(inject, sizeof inject, "%s:%u:%u", call, nth, error);
    stderr_catch();
    o.open = kd_open(&kn, inject);
    if (o.open == KN_OK) {
        run_all(kn, &o);
        kn_close(&kn);
    }
    unsigned lines = stderr_give_back();
    if (o.open != KN_OK && o.open != KN_EDEVICE && o.open != KN_EUNSUPPORTED && o.open != KN_ENOMEM)
        fail_msg("%s: opening gave %d", inject, o.open);
    if (lines > 0 || o.bytes != 0 || (o.status != KN_OK && o.status_later == KN_OK) ||
        o.named != (o.status_later != KN_OK))
        fail_msg("%s: %u lines were said, %zu bytes stayed, status %d, later %d, %s", inject, lines,
                 o.bytes, o.status, o.status_later, o.named ? "named" : "not named");
    if (error == 2 && o.status != KN_OK)
        fail_msg("%s: no memory, and the device counts as failed", inject);
    return o.open != KN_OK || !o.whole || o.status != KN_OK || o.status_later != KN_OK;
}

/* Slot lists of many sequences on the same pages: room for them is asked for before the pass, and a no ends nothing. Returns
 * whether there was one. */
static bool lists(struct kn *kn)
{
    enum { N_SEQS = 40, LEN = 64 * PAGES };
    static const uint64_t most = (uint64_t)600 * 1000;
    uint32_t list[LEN], zero = 0, row = 0;
    struct kn_seq seqs[N_SEQS];
    int32_t id = 1, position = 0;
    struct rig r = {.kn = kn};
    size_t before = kn->bytes_scratch;
    int code = kn->ops->batch_reserve(kn, ROWS, N_SEQS, most);
    if (code != KN_OK) {
        assert_int_equal(code, KN_ENOMEM);
        assert_int_equal(kn->ops->status(kn), KN_OK);
        assert_int_equal(kn->bytes_scratch, before);
        assert_int_equal(kn->ops->batch_reserve(kn, ROWS, N_SEQS, most), KN_OK);
    }
    assert_true(kn->bytes_scratch >= before + most * sizeof(uint32_t) / 2);
    before = kn->bytes_scratch;
    assert_int_equal(kn->ops->batch_reserve(kn, ROWS, N_SEQS, most), KN_OK);
    assert_true(pool_open(&r));
    for (uint32_t i = 0; i < LEN; i++)
        list[i] = i;
    for (uint32_t i = 0; i < N_SEQS; i++)
        seqs[i] = (struct kn_seq){&r.pool.kv, list, LEN};
    struct kn_batch b = {1, N_SEQS, &id, &position, &zero, &zero, &row, &zero, seqs};
    kn->ops->batch_begin(kn, &b);
    kn->ops->batch_end(kn, &b);
    assert_int_equal(kn->ops->status(kn), KN_OK);
    assert_int_equal(kn->bytes_scratch, before);
    kn->ops->arena_close(kn, r.pool.kv.base, r.pool.kv.stride, PAGES);
    return code != KN_OK;
}

static void check_lists(struct kn *kn)
{
    static const char *const calls[] = {"cudaMalloc", "cudaMallocHost"};
    assert_false(lists(kn));
    for (size_t i = 0; i < KC_LEN(calls); i++) {
        bool refused = false;
        for (unsigned nth = 1; nth < 12 && !refused; nth++) { /* those of opening come first */
            struct kn *full = NULL;
            char inject[64];
            snprintf(inject, sizeof inject, "%s:%u:2", calls[i], nth);
            if (kd_open(&full, inject) != KN_OK)
                continue;
            refused = lists(full);
            kn_close(&full);
        }
        assert_true(refused);
    }
}

static void room_for_a_pass_is_asked_for_before(void **state)
{
    (void)state;
    kd_each(check_lists);
}

/* Calls of set-up may fail for want of memory, which ends nothing; the others' failures end the device. */
static void check_failures(struct kn *kn)
{
    static const char *const calls[] = {"launch",
                                        "cudaMemcpyAsync",
                                        "cudaMemsetAsync",
                                        "cudaEventRecord",
                                        "cublasGemmEx",
                                        "cudaEventSynchronize",
                                        "cudaStreamWaitEvent",
                                        "cudaGraphLaunch",
                                        "cublasSetStream",
                                        "cudaStreamSynchronize",
                                        "cuMemMap",
                                        "cuMemSetAccess",
                                        "cudaMalloc",
                                        "cuMemCreate",
                                        "cudaMallocHost",
                                        "cudaGetDeviceCount",
                                        "cudaSetDevice",
                                        "cublasCreate",
                                        "cudaEventCreateWithFlags"};
    if (!kd_is_simt(kn) || strcmp(kd_label(), "simt, forward, lazy streams") != 0)
        return; /* the host's code is the same on every way */
    for (size_t i = 0; i < KC_LEN(calls); i++) {
        unsigned nth = 1, hits = 0, misses = 0;
        bool memory =
            strncmp(calls[i], "cudaMalloc", 10) == 0 || strcmp(calls[i], "cuMemCreate") == 0;
        /* every early call, later ones in growing steps; cuMemCreate is tried again, so a single failure shows nothing */
        for (; misses < 2; nth += 1 + nth / 12)
            if (failing(calls[i], nth, memory ? 2 : 719))
                hits++;
            else
                misses++;
        if (hits == 0 && strcmp(calls[i], "cuMemCreate") != 0)
            fail_msg("%s never failed", calls[i]);
    }
}

static void every_call_may_fail(void **state)
{
    (void)state;
    kd_each(check_failures);
}

/* Without graphs the pass runs op by op. */
static void check_no_graphs(struct kn *kn)
{
    static const char *const calls[] = {"cudaStreamBeginCapture:1:900",
                                        "cudaGraphInstantiate:1:910"};
    if (!kd_is_simt(kn))
        return;
    for (size_t i = 0; i < KC_LEN(calls); i++) {
        struct kn *ref_kn = open_ref(), *own = NULL;
        struct rig r, ref;
        assert_int_equal(kd_open(&own, calls[i]), KN_OK);
        assert_true(rig_open(&r, own) && rig_open(&ref, ref_kn));
        for (uint32_t k = 0; k < 5; k++)
            forward_both(&r, &ref, 0, 2, 1);
        assert_int_equal(own->ops->status(own), KN_OK);
        rig_close(&r);
        rig_close(&ref);
        kn_close(&own);
        kn_close(&ref_kn);
    }
}

static void a_pass_that_cannot_be_captured_runs(void **state)
{
    (void)state;
    kd_each(check_no_graphs);
}

static void bad_injections_are_refused(void **state)
{
    (void)state;
    static const char *const bad[] = {"launch", "launch:0", "launch:1:0",    "",
                                      ":3",     "launch:x", "launch:1:hung", "launch:1:hang:2"};
    for (size_t i = 0; i < KC_LEN(bad); i++) {
        struct kn_options opt = {.backend = "simt", .inject = bad[i]};
        struct kn *kn = NULL;
        char why[200] = "";
        if (kn_open(&kn, &opt, why, sizeof why) == KN_EINVALID && strstr(why, "no backend"))
            return; /* this build has no shim */
        assert_null(kn);
        assert_non_null(strstr(why, "inject"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decode_passes_are_graphs),
        cmocka_unit_test(decode_passes_in_halves_are_graphs),
        cmocka_unit_test(score_passes_of_one_layer_are_graphs),
        cmocka_unit_test(only_tokens_leave_the_device),
        cmocka_unit_test(pages_share_granules),
        cmocka_unit_test(pages_are_released_under_work_in_flight),
        cmocka_unit_test(every_call_may_fail),
        cmocka_unit_test(room_for_a_pass_is_asked_for_before),
        cmocka_unit_test(a_pass_that_cannot_be_captured_runs),
        cmocka_unit_test(bad_injections_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
