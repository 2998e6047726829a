/* blocks.h: a pass under way, and the blocks that the families' layers are made of.
 *
 *   x  [rows][d_model]              the residual stream
 *   h  [rows][d_model]              its norm: what the next projection reads
 *   q  [rows][n_heads][head_dim]    k, v [rows][n_kv_heads][head_dim]
 *   att [rows][n_heads][head_dim]   what attention gives
 *   gate, up [rows][n_ff]
 *
 * All device memory, allocated once for max_rows rows. A block reads and writes these by name, so a
 * layer is a list of calls. A pass is of two kinds, by the parts of a layer that it runs:
 *
 *   EXTEND  KV + Q + MLP   new tokens: K and V are made, stored and then attended to
 *   SCORE   Q + MLP        cached tokens: their queries look at the K and V that are stored
 *                          (fast: the last layer's Q alone)
 */
#ifndef BACKCAST_BLOCKS_H
#define BACKCAST_BLOCKS_H
#include "weights.h"

enum layer_part {
    LAYER_KV = 1,  /* project K and V of the rows and store them at their slots */
    LAYER_Q = 2,   /* project the queries, attend, add to x */
    LAYER_MLP = 4, /* feed forward, add to x */
};

struct pass {
    struct kn *kn;
    const struct hparams *hp;
    const struct weights *w;
    const struct kn_batch *b; /* rows of the buffers = b->n_rows */
    float *x, *h, *q, *k, *v, *att, *gate, *up;
};

/* h = norm(x) * gain */
void block_norm(struct pass *p, const float *gain);
/* q, k, v = h . wq^T (+ bq) ...: those that `parts` asks for, in one call */
void block_qkv(struct pass *p, const struct layer *w, unsigned parts);
/* q (k): norm of each head if `norm` is not NULL, then the rotary embedding at the rows' positions
 */
void block_rope_q(struct pass *p, enum kn_rope_style style, const float *norm);
void block_rope_k(struct pass *p, enum kn_rope_style style, const float *norm);
/* stores k and v of layer l at the rows' slots */
void block_store(struct pass *p, uint32_t l);
/* att = what the rows' queries see of layer l's stored K and V */
void block_attend(struct pass *p, uint32_t l);
/* x += att . wo^T */
void block_output(struct pass *p, const struct layer *w);
/* x += (silu(h . gate^T) * (h . up^T)) . down^T */
void block_mlp(struct pass *p, const struct layer *w);
/* Goes on with n chosen rows alone: x of rows[0..n) (HOST) moves to the front, and b becomes `to`,
 * whose rows they are. Swaps x and h, so h holds nothing afterwards. */
void block_narrow(struct pass *p, const uint32_t *rows, const struct kn_batch *to);
#endif
