/* capture.cu: decode passes, and score passes of one layer, as CUDA graphs.
 *
 *      batch_begin   the pass collects its ops in a list
 *      flush         one copy of the batch to the device, then
 *                      list and batch layout seen never    run op by op (it warms up what loads lazily)
 *                      seen once                           captured into a graph, launched
 *                      seen more often                     the graph is launched
 *
 * "Seen" compares every argument of every op and the batch's view byte by byte: addresses, shapes, and the power of two
 * that the context's length is rounded to. What changes from step to step (ids, positions, slot lists, ranges) is read by
 * the kernels from the batch's device memory, whose places follow from the number of rows. So there is one graph per
 * number of rows and length of context, at most GRAPHS_MAX; the one that was not used longest makes room.
 *
 * A score pass through many layers keeps the device busy longer than its launches take; it differs from the next one in where it
 * rests, too. Its list runs op by op.
 *
 * Freed weights and buffers throw all graphs away: a new one at the same address must not look the same.
 *
 * An op whose result a product reads may be held back until the next op is known: rmsnorm, swiglu and attention write the halves that a
 * product through cuBLAS wants, or the int8 that one with quantised weights does, in place of floats that somebody would have
 * to read, measure and write again.
 *
 *      rmsnorm    held             linear of its result     rmsnorm (halves), then linear       anything else     rmsnorm (floats)
 *
 * and a norm of hidden rows reads them from their pages itself. Rotations wait for each other and for the rows' way into pages,
 * to run in one launch (rope.cu).
 */
#include "backend.h"

static void (*const run_table[OP_N])(struct cuda *c, const struct op *o) = {
    run_embed,       run_rmsnorm,   run_linear, run_rope,   run_kv_write, run_hidden_write,
    run_hidden_read, run_attention, run_swiglu, run_gather, run_logit,
};

int capture_open(struct cuda *c)
{
    c->held.kind = c->source.kind = OP_N;
    c->wanted = (struct wanted)WANTED_FLOATS;
    c->capture.list = (struct op *)malloc(OPS_MAX * sizeof(struct op));
    return c->capture.list ? KN_OK : KN_ENOMEM;
}

static void graph_drop(struct graph *g)
{
    if (g->exec)
        cudaGraphExecDestroy(g->exec);
    free(g->ops);
    memset(g, 0, sizeof *g);
}

static void graphs_drop(struct capture *p)
{
    for (uint32_t i = 0; i < p->n_graphs; i++)
        graph_drop(&p->graphs[i]);
    p->n_graphs = 0;
}

void capture_close(struct cuda *c)
{
    graphs_drop(&c->capture);
    free(c->capture.list);
}

void capture_reset(struct cuda *c)
{
    capture_flush(c);
    c->input.x = NULL;
    if (c->capture.n_graphs == 0)
        return;
    if (c->failed == cudaSuccess) /* one of them may be under way */
        RUN(c, cudaStreamSynchronize, c->stream);
    graphs_drop(&c->capture);
}

void capture_begin(struct cuda *c, enum stream_kind kind)
{
    bool some = kind == STREAM_DECODE || kind == STREAM_REFRESH;
    c->capture.on = some && !c->capture.disabled && c->failed == cudaSuccess;
    c->capture.brief = kind == STREAM_REFRESH;
    c->capture.n = 0;
    c->capture.pass++;
}

/* Runs an op; what is known of the last one's result ends, what is known of this one's begins. */
static void op_do(struct cuda *c, const struct op *o)
{
    if (o->kind != OP_LINEAR && o->kind != OP_LOGIT) /* they read it */
        c->input.x = NULL;
    run_table[o->kind](c, o);
    if (o->kind == OP_LINEAR)
        c->input.x = NULL;
}

/* How a product wants an op's result. */
static struct wanted wanted_of(const struct cuda *c, const struct op *o, const struct op_linear *l)
{
    const struct op_rmsnorm *r = &o->u.rmsnorm;
    const struct op_swiglu *s = &o->u.swiglu;
    const struct op_attention *a = &o->u.attention;
    if (o->kind == OP_RMSNORM)
        return linear_wants(c, l, r->out, (size_t)r->rows * r->d);
    if (o->kind == OP_SWIGLU)
        return linear_wants(c, l, s->out, s->n);
    if (o->kind == OP_ATTENTION)
        return linear_wants(c, l, a->out, (size_t)c->batch.view.n_rows * a->n_heads * a->head_dim);
    return (struct wanted)WANTED_FLOATS;
}

static void ropes_run(struct cuda *c)
{
    if (c->ropes.n > 0 && c->failed == cudaSuccess) {
        c->input.x = NULL;
        rope_run(c, &c->ropes);
    }
    memset(&c->ropes, 0, sizeof c->ropes);
}

void held_run(struct cuda *c, const struct op *next)
{
    struct op o = c->held;
    ropes_run(c);
    c->held.kind = OP_N;
    if (o.kind != OP_N && c->failed == cudaSuccess) {
        if (next && next->kind == OP_LINEAR)
            c->wanted = wanted_of(c, &o, &next->u.linear);
        op_do(c, &o);
    }
    c->wanted = (struct wanted)WANTED_FLOATS;
    c->source.kind = OP_N;
}

/* Is the held op one that reads hidden rows, all of this norm's input? */
static bool is_norm_of_held(const struct cuda *c, const struct op *o)
{
    const struct op_rmsnorm *r = &o->u.rmsnorm;
    const struct op_hidden *h = &c->held.u.hidden;
    return c->held.kind == OP_HIDDEN_READ && o->kind == OP_RMSNORM && r->x == h->x &&
           r->out != h->x && r->d == h->d && r->rows == c->batch.view.n_rows;
}

void op_run(struct cuda *c, const struct op *o)
{
    if (c->ropes.n > 0 && rope_joins(&c->ropes, o)) {
        rope_join(&c->ropes, o);
        return;
    }
    if (is_norm_of_held(c, o))
        c->source = c->held;
    else
        held_run(c, o);
    if (c->failed != cudaSuccess)
        return;
    if (o->kind == OP_RMSNORM || o->kind == OP_SWIGLU || o->kind == OP_HIDDEN_READ ||
        o->kind == OP_ATTENTION)
        c->held = *o;
    else if (o->kind == OP_ROPE)
        rope_join(&c->ropes, o);
    else
        op_do(c, o);
}

void op_submit(struct cuda *c, const struct op *o)
{
    struct capture *p = &c->capture;
    if (p->on && p->n == OPS_MAX) {
        capture_flush(c);
        p->on = false;
    }
    if (p->on)
        p->list[p->n++] = *o;
    else
        op_run(c, o);
}

/* ---- graphs ---- */

static uint64_t hash_bytes(uint64_t h, const void *data, size_t bytes)
{
    const uint8_t *p = (const uint8_t *)data;
    for (size_t i = 0; i + 8 <= bytes; i += 8) {
        uint64_t w;
        memcpy(&w, p + i, 8);
        h = (h ^ w) * 0x9e3779b97f4a7c15u;
        h ^= h >> 29;
    }
    return h;
}

static bool is_same(const struct graph *g, const struct cuda *c, uint64_t hash)
{
    const struct capture *p = &c->capture;
    return g->hash == hash && g->n_ops == p->n && g->stream == c->stream &&
           memcmp(&g->view, &c->batch.view, sizeof g->view) == 0 &&
           memcmp(g->ops, p->list, p->n * sizeof *p->list) == 0;
}

/* The entry of the list that was collected, a new one if need be; NULL without memory for it. */
static struct graph *graph_find(struct cuda *c)
{
    struct capture *p = &c->capture;
    uint64_t hash = hash_bytes(p->n, p->list, p->n * sizeof *p->list);
    struct graph *oldest = &p->graphs[0];
    hash = hash_bytes(hash, &c->batch.view, sizeof c->batch.view);
    for (uint32_t i = 0; i < p->n_graphs; i++) {
        if (is_same(&p->graphs[i], c, hash))
            return &p->graphs[i];
        if (p->graphs[i].used < oldest->used)
            oldest = &p->graphs[i];
    }
    struct op *ops = (struct op *)malloc(p->n * sizeof *ops);
    if (!ops)
        return NULL;
    if (p->n_graphs < GRAPHS_MAX) {
        oldest = &p->graphs[p->n_graphs++];
    } else {
        if (oldest
                ->exec) /* it ran last GRAPHS_MAX passes ago or more, but nobody has waited since */
            RUN(c, cudaStreamSynchronize, oldest->stream);
        graph_drop(oldest);
    }
    memcpy(ops, p->list, p->n * sizeof *ops);
    memset(oldest, 0, sizeof *oldest);
    oldest->hash = hash;
    oldest->ops = ops;
    oldest->n_ops = p->n;
    oldest->stream = c->stream;
    oldest->view = c->batch.view;
    return oldest;
}

static void list_run(struct cuda *c)
{
    c->input.x = NULL; /* a graph of it must not depend on what was before */
    for (uint32_t i = 0; i < c->capture.n; i++)
        op_run(c, &c->capture.list[i]);
    held_run(c, NULL);
}

/* Captures the list; false: this device or driver cannot, and nothing has run. */
static bool graph_capture(struct cuda *c, struct graph *g)
{
    cudaGraph_t made = NULL;
    if (TRY(c, cudaStreamBeginCapture, c->stream, cudaStreamCaptureModeThreadLocal) != cudaSuccess)
        return false;
    list_run(c);
    g->left = c->input;
    cudaError_t e = TRY(c, cudaStreamEndCapture, c->stream, &made);
    if (e == cudaSuccess && c->failed == cudaSuccess)
        e = TRY(c, cudaGraphInstantiate, &g->exec, made, 0);
    if (made)
        cudaGraphDestroy(made);
    if (e != cudaSuccess || !g->exec) {
        g->exec = NULL;
        cudaGetLastError();
        return false;
    }
    c->capture.captured++;
    return true;
}

void capture_flush(struct cuda *c)
{
    struct capture *p = &c->capture;
    held_run(c, NULL); /* of ops that ran as they came */
    if (p->n == 0)
        return;
    batch_upload(c);
    bool graph = c->failed == cudaSuccess && (!p->brief || p->n <= BRIEF_OPS_MAX);
    struct graph *g = graph ? graph_find(c) : NULL;
    if (g) {
        g->used = p->pass;
        if (g->seen++ == 1 && !graph_capture(c, g))
            p->disabled = true;
    }
    if (g && g->exec && c->failed == cudaSuccess) {
        RUN(c, cudaGraphLaunch, g->exec, c->stream);
        p->launched++;
        c->input = g->left;
    } else {
        list_run(c);
    }
    p->n = 0;
}
