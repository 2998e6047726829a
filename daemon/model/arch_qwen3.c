/* arch_qwen3.c: the qwen3 family (dense Qwen3).
 *
 *     x --+-- norm -- q, k, v -- norm each head of q, k -- rope -- attention -- wo --(+)-- x
 *         '---------------------------------------------------------------------------'
 *     x --+-- norm -- gate, up -- silu(gate) * up -- down --(+)-- x
 *         '--------------------------------------------------'
 *
 * Differs from qwen2 in having no biases and a norm over each head of q and k before the rotation.
 * head_dim is given by attention.key_length and need not be d_model / n_heads. Rotary pairs:
 * dimension i turns with i + head_dim / 2.
 */
#include "arch.h"

static int qwen3_hparams(const struct gguf *g, struct hparams *hp, struct err *e)
{
    (void)g;
    if (hp->n_rot != hp->head_dim)
        return err_set(e, BC_EUNSUPPORTED, "qwen3.rope.dimension_count",
                       "key qwen3.rope.dimension_count is %u: must be the head's %u", hp->n_rot,
                       hp->head_dim);
    return BC_OK;
}

static int qwen3_load(struct loader *ld, struct layer *w, uint32_t l)
{
    const struct hparams *hp = ld->hp;
    uint32_t d = hp->d_model, q = hp->n_heads * hp->head_dim, kv = hp->n_kv_heads * hp->head_dim;
    int rc;

    if ((rc = load_vector(ld, l, "attn_norm.weight", d, &w->attn_norm)) ||
        (rc = load_matrix(ld, l, "attn_q.weight", q, d, &w->wq)) ||
        (rc = load_matrix(ld, l, "attn_k.weight", kv, d, &w->wk)) ||
        (rc = load_matrix(ld, l, "attn_v.weight", kv, d, &w->wv)) ||
        (rc = load_vector(ld, l, "attn_q_norm.weight", hp->head_dim, &w->q_norm)) ||
        (rc = load_vector(ld, l, "attn_k_norm.weight", hp->head_dim, &w->k_norm)) ||
        (rc = load_matrix(ld, l, "attn_output.weight", d, q, &w->wo)) ||
        (rc = load_vector(ld, l, "ffn_norm.weight", d, &w->ffn_norm)) ||
        (rc = load_matrix(ld, l, "ffn_gate.weight", hp->n_ff, d, &w->w_gate)) ||
        (rc = load_matrix(ld, l, "ffn_up.weight", hp->n_ff, d, &w->w_up)) ||
        (rc = load_matrix(ld, l, "ffn_down.weight", d, hp->n_ff, &w->w_down)))
        return rc;
    return BC_OK;
}

static void qwen3_layer(struct pass *p, const struct layer *w, uint32_t l, unsigned parts)
{
    block_norm(p, w->attn_norm);
    block_qkv(p, w, parts);
    if (parts & LAYER_KV) {
        block_rope_k(p, KN_ROPE_HALVES, w->k_norm);
        block_store(p, l);
    }
    if (parts & LAYER_Q) {
        block_rope_q(p, KN_ROPE_HALVES, w->q_norm);
        block_attend(p, l);
        block_output(p, w);
    }
    if (parts & LAYER_MLP) {
        block_norm(p, w->ffn_norm);
        block_mlp(p, w);
    }
}

const struct arch arch_qwen3 = {
    .name = "qwen3",
    .key_rope = KN_ROPE_HALVES,
    .hparams = qwen3_hparams,
    .load = qwen3_load,
    .layer = qwen3_layer,
};
