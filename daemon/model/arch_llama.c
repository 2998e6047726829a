/* arch_llama.c: the llama family (Llama, SmolLM2, Mistral and others that share its layer).
 *
 *     x --+-- norm -- q, k, v -- rope -- attention -- wo --(+)-- x
 *         '-------------------------------------------------'
 *     x --+-- norm -- gate, up -- silu(gate) * up -- down --(+)-- x
 *         '--------------------------------------------------'
 *
 * Rows of wq and wk are stored so that rotary pairs are neighbours, (2i, 2i + 1).
 * rope_freqs.weight, when present, holds divisors of the frequencies (the Llama 3.1 scaling).
 * Without output.weight the head is the embedding.
 */
#include "arch.h"
#include <math.h>

static int llama_load(struct loader *ld, struct layer *w, uint32_t l)
{
    const struct hparams *hp = ld->hp;
    uint32_t d = hp->d_model, q = hp->n_heads * hp->head_dim, kv = hp->n_kv_heads * hp->head_dim;
    int rc;

    if ((rc = load_vector(ld, l, "attn_norm.weight", d, &w->attn_norm)) ||
        (rc = load_matrix(ld, l, "attn_q.weight", q, d, &w->wq)) ||
        (rc = load_matrix(ld, l, "attn_k.weight", kv, d, &w->wk)) ||
        (rc = load_matrix(ld, l, "attn_v.weight", kv, d, &w->wv)) ||
        (rc = load_matrix(ld, l, "attn_output.weight", d, q, &w->wo)) ||
        (rc = load_vector(ld, l, "ffn_norm.weight", d, &w->ffn_norm)) ||
        (rc = load_matrix(ld, l, "ffn_gate.weight", hp->n_ff, d, &w->w_gate)) ||
        (rc = load_matrix(ld, l, "ffn_up.weight", hp->n_ff, d, &w->w_up)) ||
        (rc = load_matrix(ld, l, "ffn_down.weight", d, hp->n_ff, &w->w_down)))
        return rc;
    return BC_OK;
}

static int llama_frequencies(struct loader *ld, float *inv_freq)
{
    static const char name[] = "rope_freqs.weight";
    float divisor[KN_HEAD_DIM_MAX / 2];
    uint32_t n = ld->hp->n_rot / 2;

    int rc = load_floats(ld, LOAD_GLOBAL, name, n, divisor);
    if (rc)
        return rc == BC_ENOTFOUND ? BC_OK : rc;
    for (uint32_t i = 0; i < n; i++) {
        if (!(divisor[i] > 0 && isfinite(divisor[i])))
            return err_set(ld->e, BC_ECORRUPT, name, "tensor %s divides frequency %u by %g", name,
                           i, (double)divisor[i]);
        inv_freq[i] /= divisor[i];
    }
    return BC_OK;
}

static void llama_layer(struct pass *p, const struct layer *w, uint32_t l, unsigned parts)
{
    block_norm(p, w->attn_norm);
    block_qkv(p, w, parts);
    if (parts & LAYER_KV) {
        block_rope_k(p, KN_ROPE_PAIRS, NULL);
        block_store(p, l);
    }
    if (parts & LAYER_Q) {
        block_rope_q(p, KN_ROPE_PAIRS, NULL);
        block_attend(p, l);
        block_output(p, w);
    }
    if (parts & LAYER_MLP) {
        block_norm(p, w->ffn_norm);
        block_mlp(p, w);
    }
}

const struct arch arch_llama = {
    .name = "llama",
    .key_rope = KN_ROPE_PAIRS,
    .load = llama_load,
    .frequencies = llama_frequencies,
    .layer = llama_layer,
};
