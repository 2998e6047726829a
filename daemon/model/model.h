/* model.h: a language model ready to run: weights on a backend, one straight-line file per family.
 *
 * Owns the weights and the scratch of a pass; knows nothing of sessions, budgets or pages: a caller
 * gives it rows, positions and slot lists (kn_batch) and gets logits or scores. One thread (the
 * engine's) calls forward and score at a time. All scratch is allocated at open for max_rows rows:
 * a pass allocates nothing.
 *
 * Source of the scores: Gould and van den Hengel, "Back from the Future: Key-Value Cache Management
 * by Counter-Causal Surprise", arXiv 2607.27600; daemon/evict/README.md has the method in our
 * words.
 */
#ifndef BACKCAST_MODEL_H
#define BACKCAST_MODEL_H
#include "base.h"
#include "kn.h"

struct gguf; /* gguf.h: whoever opens a model includes it */
struct model;

struct model_options {
    uint32_t max_rows; /* rows of a pass (prefill chunk + decodes); 0: 512 */
    uint32_t max_out;  /* rows of a pass whose logits may be asked for; 0: 64 */
};

struct model_info {
    const char *family; /* "llama", "qwen2", "qwen3" */
    char name[96];      /* general.name, or the file's base name */
    uint32_t n_layers, d_model, n_heads, n_kv_heads, head_dim, n_ff, n_vocab, context_train;
    uint32_t max_rows, max_out;
    uint32_t rest_rows; /* of a block that may rest between two layers */
    uint64_t n_params;
    uint64_t identity; /* gguf_identity: journal and saved caches check it */
    size_t bytes_weights, bytes_scratch;
};

/* g must stay open until model_open returns (weights are repacked; nothing of the mapping is kept).
 * BC_EUNSUPPORTED: family or type; BC_ECORRUPT: missing or misshapen tensor or key, named in
 * e->field. progress may be NULL; it is called with bytes done of total, from this thread. */
int model_open(struct model **ret, struct kn *kn, const struct gguf *g,
               const struct model_options *opt,
               void (*progress)(void *arg, uint64_t done, uint64_t total), void *arg,
               struct err *e);
void model_close(struct model **m);
const struct model_info *model_info(const struct model *m);
struct kn *model_kn(const struct model *m);
/* Fills the shape fields of a page layout for this model (base stays NULL, stride = page bytes
 * rounded up to 4096). */
void model_kv_shape(const struct model *m, enum kn_type kv_type, bool hidden, struct kn_kv *ret);

/* What a pass should hand out. All HOST. */
struct model_out {
    const uint32_t *rows; /* [n] batch rows whose logits are wanted, ascending */
    uint32_t n;
    float *logits; /* [n][n_vocab]; NULL: nobody reads them */
    /* Where the backend picks tokens itself (kn_ops.sample), four bytes a row come instead: how [n] says how, NULL: it
     * does not. */
    const struct kn_sample *how;
    int32_t *tokens;            /* [n] */
    const uint32_t *query_rows; /* [n_query] batch rows whose last-layer query is wanted (tova) */
    uint32_t n_query;
    float *queries; /* [n_query][n_heads][head_dim], rotated */
};

/* EXTEND: appends the batch's rows to their sequences (K, V and hidden rows are written at their
 * slots) and gives logits of the wanted rows. b->n_rows <= max_rows, out->n <= max_out: asserted.
 * BC_EDEVICE when the device failed. */
int model_forward(struct model *m, const struct kn_batch *b, const struct model_out *out,
                  struct err *e);

/* Turns the stored keys of a sequence, whose tokens were at `positions` [seq->n], to 0 .. seq->n - 1, in cache order. Values and
 * hidden rows have no position in them. The pages must be the sequence's own where a position changes, and the
 * backend have kv_rotate. BC_EDEVICE. */
int model_renumber(struct model *m, const struct kn_seq *seq, const int32_t *positions,
                   struct err *e);

/* SCORE: counter-causal scores of cached tokens first .. first+count-1 of one sequence (cache
 * indices). ids, positions: [seq.n] in cache order. full: all layers from the embeddings; fast:
 * last layer only from the stored hidden rows (kv.d_hidden > 0: asserted), without its MLP. Row i
 * attends to the STORED keys and values of cache indices j > i + min_gap; then final norm and the
 * head's row of its own token: logit, or log-probability. A row that sees nothing (the last min_gap
 * + 1) scores -INFINITY. Rows do not depend on each other, so a refresh may be cut anywhere: the
 * results are the same. */
struct model_score {
    struct kn_seq seq;
    const int32_t *ids, *positions;
    uint32_t min_gap;
    bool fast, logprob;
};
int model_score_rows(struct model *m, const struct model_score *job, uint32_t first, uint32_t count,
                     float *ret_scores, struct err *e);

/* SCORE by all layers in pieces shorter than a row's way through the model: a block of rows may rest between two layers, or before
 * the head, while other passes run. n, layer and headed 0: none rests. */
#define MODEL_REST_ROWS 64u /* at least: info.rest_rows are those of a block */
#define MODEL_REST_ROWS_MIN 8u
struct model_rest {
    uint32_t n, layer; /* rows of the block; layers behind them */
    uint32_t headed;   /* rows that have their score */
    /* [info.rest_rows][d_model] HOST, the caller's: what the rows are there, if another block has taken their place on the
     * device since */
    float *x;
    struct model *m; /* whose place they have; NULL: none. See model_rest_close */
    double spent;    /* rows' worth of work of the last call, with kn.rows_read for every block */
};
/* A block is given up half way: the model forgets it. x stays the caller's. */
void model_rest_close(struct model_rest *rest);
/* Goes on with cache indices *next .. end - 1 of a job that is not fast, for no more than max_rows rows' worth of layers, but at
 * least one step of a block: MODEL_REST_ROWS rows, or as many as one layer of which fits into max_rows (at least
 * MODEL_REST_ROWS_MIN, and half of kn.rows_read), go through one layer, or one row meets the head. *next moves on by whole blocks; scores go to
 * ret_scores[cache index]. Rows do not depend on their block, so the results are those of model_score_rows. */
int model_score_some(struct model *m, const struct model_score *job, struct model_rest *rest,
                     uint32_t *next, uint32_t end, uint32_t max_rows, float *ret_scores,
                     struct err *e);
#endif
