/* hparams.h: the numbers of a model, read from its file's keys and checked.
 *
 * Keys are {family}.NAME. Every value that later sizes a buffer or divides another is checked here,
 * so that the rest of the folder may rely on it; a missing or impossible one is an error that names
 * the key. */
#ifndef BACKCAST_HPARAMS_H
#define BACKCAST_HPARAMS_H
#include "gguf.h"

#define LAYERS_MAX 512
#define D_MODEL_MAX 65536
#define HEADS_MAX 1024
#define FF_MAX (1u << 20)
#define VOCAB_MAX (1u << 24)
#define CONTEXT_MAX (1u << 20) /* as far as the backends' rotary angles are exact */

struct hparams {
    uint32_t n_layers, d_model, n_heads, n_kv_heads, head_dim, n_ff;
    uint32_t n_vocab;       /* rows of token_embd.weight */
    uint32_t context_train; /* positions that the model was trained for, at most CONTEXT_MAX */
    uint32_t n_rot;         /* leading dimensions of a head that rotate; even, <= head_dim */
    float rope_base;        /* frequency i is rope_base^(-2i / n_rot) ... */
    float rope_factor;      /* ... divided by this (linear scaling; 1: none) */
    float norm_eps;
};

int hparams_read(const struct gguf *g, const char *family, struct hparams *ret, struct err *e);

/* ret [n_rot / 2]: what a position is multiplied with to give the angle of pair i. */
void hparams_frequencies(const struct hparams *hp, float *ret);
#endif
