/* blocks.c: the blocks that layers are made of, each one or two kernel calls. See blocks.h. */
#include "blocks.h"
#include <math.h>

void block_norm(struct pass *p, const float *gain)
{
    p->kn->ops->rmsnorm(p->kn, p->h, p->x, gain, p->b->n_rows, p->hp->d_model, p->hp->norm_eps);
}

void block_qkv(struct pass *p, const struct layer *w, unsigned parts)
{
    const struct kn_weight *weights[3];
    const float *bias[3];
    float *outs[3];
    uint32_t n = 0;

    if (parts & LAYER_Q) {
        weights[n] = w->wq;
        bias[n] = w->bq;
        outs[n++] = p->q;
    }
    if (parts & LAYER_KV) {
        weights[n] = w->wk;
        bias[n] = w->bk;
        outs[n++] = p->k;
        weights[n] = w->wv;
        bias[n] = w->bv;
        outs[n++] = p->v;
    }
    p->kn->ops->linear(p->kn, n, weights, bias, p->h, p->b->n_rows, outs, false);
}

static void rope(struct pass *p, enum kn_rope_style style, const float *norm, float *x,
                 uint32_t n_heads)
{
    struct kn_rope r = {
        .style = style,
        .n_heads = n_heads,
        .head_dim = p->hp->head_dim,
        .n_rot = p->hp->n_rot,
        .inv_freq = p->w->inv_freq,
        .norm = norm,
        .norm_eps = p->hp->norm_eps,
    };
    p->kn->ops->rope(p->kn, p->b, &r, x);
}

void block_rope_q(struct pass *p, enum kn_rope_style style, const float *norm)
{
    rope(p, style, norm, p->q, p->hp->n_heads);
}

void block_rope_k(struct pass *p, enum kn_rope_style style, const float *norm)
{
    rope(p, style, norm, p->k, p->hp->n_kv_heads);
}

void block_store(struct pass *p, uint32_t l)
{
    p->kn->ops->kv_write(p->kn, p->b, l, p->k, p->v);
}

void block_attend(struct pass *p, uint32_t l)
{
    float scale = 1.0f / sqrtf((float)p->hp->head_dim);

    p->kn->ops->attention(p->kn, p->b, l, p->q, p->hp->n_heads, scale, p->att);
}

void block_output(struct pass *p, const struct layer *w)
{
    const struct kn_weight *weights[] = {w->wo};
    float *outs[] = {p->x};

    p->kn->ops->linear(p->kn, 1, weights, NULL, p->att, p->b->n_rows, outs, true);
}

void block_mlp(struct pass *p, const struct layer *w)
{
    const struct kn_weight *in[] = {w->w_gate, w->w_up}, *down[] = {w->w_down};
    float *mid[] = {p->gate, p->up}, *outs[] = {p->x};
    uint32_t rows = p->b->n_rows;

    p->kn->ops->linear(p->kn, 2, in, NULL, p->h, rows, mid, false);
    p->kn->ops->swiglu(p->kn, p->gate, p->gate, p->up, (size_t)rows * p->hp->n_ff);
    p->kn->ops->linear(p->kn, 1, down, NULL, p->gate, rows, outs, true);
}

void block_narrow(struct pass *p, const uint32_t *rows, const struct kn_batch *to)
{
    float *x = p->x;

    p->kn->ops->gather_rows(p->kn, p->h, x, rows, to->n_rows, p->hp->d_model);
    p->x = p->h;
    p->h = x;
    p->kn->ops->batch_end(p->kn, p->b);
    p->b = to;
    p->kn->ops->batch_begin(p->kn, to);
}
