/* attention.cu: softmax(q . k) v over slot lists: which kernel takes which tiles, and in how many parts.
 *
 *      tile_class   TILE_FEW     attention_few.cu    at most 16 queries a sequence and KV head (decode), halves
 *                   TILE_MANY    attention_many.cu   more (prompts, scoring), halves
 *                   TILE_*_WIDE  the same two        pools of bf16 and q8_0: made into halves on the way (attention_wide.cuh)
 *                   TILE_FLOAT   attention_f32.cu    pools of f32, odd head sizes */
#include "attention.cuh"

int attention_open(struct cuda *c)
{
    int code = attn_open_few(c);
    if (code == KN_OK)
        code = attn_open_many(c);
    return code == KN_OK ? attn_open_f32(c) : code;
}

/* How many parts contexts of `span` indices are cut in when there are so many blocks: two blocks a multiprocessor, if the
 * parts are worth their putting together. Decode's have 64 keys or more, up to 32 of them, or more with 512 keys. */
static uint32_t splits_wanted(const struct cuda *c, enum tile_class which, uint32_t span,
                              uint32_t blocks)
{
    uint32_t n = 2 * (uint32_t)c->n_sms / blocks;
    if (which == TILE_FEW || which == TILE_FEW_WIDE)
        return KN_MIN(n, KN_MIN(span / 64, KN_MAX(32u, span / 512)));
    return KN_MIN(n, KN_MIN(span / 256, 16u));
}

/* The result as halves lies behind the splits' sums, at the end of the scratch. */
static size_t halves_bytes(const struct attn_args *a)
{
    return a->halves ? ((size_t)a->b.n_rows * a->n_heads * a->d * 2 + 255) / 256 * 256 : 0;
}

static void splits_plan(const struct cuda *c, enum tile_class which, uint32_t blocks,
                        struct attn_args *a)
{
    uint32_t span = a->b.span, n = splits_wanted(c, which, span, blocks);
    size_t part = (size_t)a->b.n_rows * a->n_heads * (a->d + 2) * sizeof(float);
    n = (uint32_t)KN_MIN((size_t)n, (c->scratch.x_bytes - halves_bytes(a)) / part);
    if (n <= 1 || blocks > COUNTS_MAX) {
        a->split_len = span;
        a->splits = 1;
        return;
    }
    a->split_len = ((span + n - 1) / n + 63) / 64 * 64;
    a->splits = (span + a->split_len - 1) / a->split_len;
    a->acc = (float *)c->scratch.x;
    a->top = (float2 *)(a->acc + (size_t)a->b.n_rows * a->n_heads * a->splits * a->d);
    a->counts = c->scratch.counts;
}

static void run_class(struct cuda *c, const struct op_attention *o, enum tile_class which,
                      const struct dev_tile *tiles, uint16_t *halves)
{
    const struct dev_batch *b = &c->batch.view;
    uint32_t n_tiles = b->n_tiles[which], queries = c->batch.queries[which];
    struct attn_args a;
    if (n_tiles == 0)
        return;
    memset(&a, 0, sizeof a);
    a.b = *b;
    a.tiles = tiles;
    a.q = o->q;
    a.out = o->out;
    a.halves = halves;
    a.layer = o->layer;
    a.n_heads = o->n_heads;
    a.group = o->n_heads / o->n_kv_heads;
    a.d = o->head_dim;
    a.chunks = (a.group + queries - 1) / queries;
    a.parts = o->n_kv_heads * a.chunks;
    a.scale = which == TILE_FLOAT ? o->scale : o->scale * 1.44269504088896341f;
    splits_plan(c, which, n_tiles * a.parts, &a);
    dim3 grid(n_tiles * a.parts, a.splits);
    if (which == TILE_FLOAT)
        attn_launch_f32(c, &a, grid);
    else if (which == TILE_FEW || which == TILE_FEW_WIDE)
        attn_launch_few(c, &a, grid, which == TILE_FEW_WIDE);
    else
        attn_launch_many(c, &a, grid, queries, which == TILE_MANY_WIDE);
}

void run_attention(struct cuda *c, const struct op *o)
{
    const struct op_attention *at = &o->u.attention;
    const struct dev_batch *b = &c->batch.view;
    const struct dev_tile *tiles = b->tiles;
    bool of_halves = b->n_tiles[TILE_FLOAT] == 0 && b->n_tiles[TILE_FEW_WIDE] == 0 &&
                     b->n_tiles[TILE_MANY_WIDE] == 0;
    size_t bytes = ((size_t)b->n_rows * at->n_heads * at->head_dim * 2 + 255) / 256 * 256;
    uint16_t *halves = NULL;
    if (of_halves && c->wanted.type == CUDA_R_16F && bytes <= c->scratch.x_bytes / 2)
        halves = (uint16_t *)(c->scratch.x + c->scratch.x_bytes - bytes);
    for (int i = 0; i < TILE_N; i++) {
        run_class(c, at, (enum tile_class)i, tiles, halves);
        tiles += b->n_tiles[i];
    }
    /* means of halves: with roundings, at most a little more than the largest half */
    if (of_halves)
        c->input = (struct input){at->out, c->scratch.one + SCALAR_TWO, halves,
                                  halves ? CUDA_R_16F : CUDA_R_32F};
}

void cuda_attention(struct kn *kn, const struct kn_batch *b, uint32_t layer, const float *q,
                    uint32_t n_heads, float scale, float *out)
{
    struct cuda *c = cuda_of(kn);
    struct op o = op_make(OP_ATTENTION);
    kn_assert(c->batch.b == b);
    if (b->n_rows == 0)
        return;
    const struct kn_kv *kv = b->seqs[b->seq[0]].kv;
    for (uint32_t s = 0; s < b->n_seqs; s++) /* one model a batch */
        kn_assert(b->seqs[s].kv->head_dim == kv->head_dim &&
                  b->seqs[s].kv->n_kv_heads == kv->n_kv_heads);
    kn_assert(kv->head_dim <= KN_HEAD_DIM_MAX && n_heads % kv->n_kv_heads == 0 && scale > 0.0f);
    held_run(c, NULL); /* it has tiles of its own */
    batch_tiles(c, n_heads, kv->n_kv_heads, kv->head_dim);
    o.u.attention.q = q;
    o.u.attention.out = out;
    o.u.attention.layer = layer;
    o.u.attention.n_heads = n_heads;
    o.u.attention.n_kv_heads = kv->n_kv_heads;
    o.u.attention.head_dim = kv->head_dim;
    o.u.attention.scale = scale;
    op_submit(c, &o);
}
