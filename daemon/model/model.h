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
 * BC_EDEVICE when the device failed, or picked what is no token. */
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

/* SCORE in pieces, of several sequences together: their rows go through the model one behind the other, in the order of the parts,
 * and a pass takes rows of as many of them as it has room for.
 *
 *      part 0  | ............xxxx |           due: xxxx
 *      part 1  | xxxxxxxxxx |                 one pass: xxxx + xxxxxxxxxx + xx
 *      part 2  | xx......... |
 *
 * By all layers the rows of a pass are a block, which may rest between two layers, or before the head, while other passes run:
 * a call may be shorter than a row's way through the model. Every sequence owns its rows of the block, and may give them up
 * whenever it likes: the others' go on. n, layer and headed 0: none rest. */
#define MODEL_PARTS_MAX 8u
#define MODEL_REST_ROWS 64u /* at least: info.rest_rows are those of a block */
#define MODEL_REST_ROWS_MIN 8u
struct model_rest {
    uint32_t n, layer; /* rows in the block; layers behind them */
    uint32_t headed;   /* rows that have their score */
    /* [min(info.rest_rows, tokens)][d_model] HOST, the caller's: what the rows are there, if other rows have taken their place on the
     * device since */
    float *x;
    /* where they have a place, and which: rows at .. at + n - 1; NULL: nowhere. See model_rest_close */
    struct model *m;
    uint32_t at;
    struct model_rest *next; /* who else has one */
};
/* Rows are given up half way: the model forgets them. x stays the caller's. */
void model_rest_close(struct model_rest *rest);

/* Cache indices next .. end - 1 of one sequence are due. */
struct model_part {
    struct model_score job;
    struct model_rest *rest; /* fast: not used */
    uint32_t next, end;      /* next moves on, by whole blocks */
    float *scores;           /* [seq.n] by cache index */
    /* rows' worth of work of the last call, with its part of kn.rows_read for every pass */
    double spent;
};
/* Goes on with all parts in turn, which are of one kind (fast, logprob), for no more than max_rows rows' worth of work. fast: so
 * many rows. Else at least one step of a block: MODEL_REST_ROWS rows, or as many as one layer of which fits into max_rows (at least
 * MODEL_REST_ROWS_MIN, and half of kn.rows_read), go through one layer, or one row meets the head. Rows do not depend on their
 * block, so the results are those of model_score_rows. */
int model_score_some(struct model *m, struct model_part *parts, uint32_t n_parts, uint32_t max_rows,
                     struct err *e);
#endif
