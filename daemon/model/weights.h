/* weights.h: a model's tensors on a backend, and the loader that takes them from a file.
 *
 * A family names its tensors through load_matrix and load_vector, which find, check and upload one
 * each. Everything loaded is noted in two lists, so that freeing needs no knowledge of the family.
 * A tensor in the file that nobody asked for is an error: a bias that is ignored would be a wrong
 * answer, not a smaller one. */
#ifndef BACKCAST_WEIGHTS_H
#define BACKCAST_WEIGHTS_H
#include "hparams.h"
#include "kn.h"

struct arch;

/* One transformer layer. NULL: the family has none. Vectors are device memory, f32. */
struct layer {
    struct kn_weight *wq, *wk, *wv;           /* [n_heads | n_kv_heads x head_dim][d_model] */
    struct kn_weight *wo;                     /* [d_model][n_heads x head_dim] */
    struct kn_weight *w_gate, *w_up, *w_down; /* [n_ff][d_model] twice, [d_model][n_ff] */
    const float *attn_norm, *ffn_norm;        /* [d_model] */
    const float *bq, *bk, *bv;                /* biases: rows of wq, wk, wv */
    const float *q_norm, *k_norm;             /* [head_dim] */
};

struct device_buf {
    void *data;
    size_t bytes;
};

struct weights {
    struct kn_weight *embd; /* [n_vocab][d_model] */
    struct kn_weight *head; /* [n_vocab][d_model]; embd itself when the two are tied */
    const float *out_norm;  /* [d_model] */
    const float *inv_freq;  /* [n_rot / 2] */
    struct layer *layers;   /* [n_layers] */
    uint64_t n_params;
    /* what weights_free gives back */
    struct kn_weight **matrices;
    struct device_buf *vectors;
    uint32_t n_matrices, n_vectors, cap;
};

struct load_progress {
    void (*call)(void *arg, uint64_t done, uint64_t total); /* may be NULL; bytes */
    void *arg;
};

/* w is zeroed first; on failure everything is freed again. */
int weights_load(struct weights *w, struct kn *kn, const struct gguf *g, const struct arch *arch,
                 const struct hparams *hp, const struct load_progress *progress, struct err *e);
void weights_free(struct weights *w, struct kn *kn);

/* ---- for the families
 * ----------------------------------------------------------------------------- */

struct loader {
    struct kn *kn;
    const struct gguf *g;
    const struct hparams *hp;
    struct weights *w;
    const struct load_progress *progress;
    uint64_t done, total;
    const struct gguf_tensor **used; /* [w->cap * 2] */
    uint32_t n_used;
    struct err *e;
};

#define LOAD_GLOBAL UINT32_MAX /* instead of a layer: a tensor outside the layers */

/* Tensor blk.{layer}.{name} as a matrix [rows][cols] in any type the backend runs. BC_ECORRUPT:
 * missing or misshapen. */
int load_matrix(struct loader *ld, uint32_t layer, const char *name, uint32_t rows, uint32_t cols,
                struct kn_weight **ret);
/* ... as n floats (F32, F16 or BF16 in the file) on the device. */
int load_vector(struct loader *ld, uint32_t layer, const char *name, uint32_t n, const float **ret);
/* ... as n floats on the host. BC_ENOTFOUND (ret untouched, no error set) when the file has none.
 */
int load_floats(struct loader *ld, uint32_t layer, const char *name, uint32_t n, float *ret);
#endif
