/* state.h: struct model itself, for model.c, forward.c, score.c and score_some.c. */
#ifndef BACKCAST_MODEL_STATE_H
#define BACKCAST_MODEL_STATE_H
#include "arch.h"
#include "model.h"

#define MODEL_MAGIC 0x6d6f6431u
#define MODEL_ROWS_MAX 65536
#define ROW_NONE UINT32_MAX

/* Host arrays of a pass, [max_rows] each: the rows of a narrowed or a score batch. */
struct row_scratch {
    int32_t *ids, *positions;
    uint32_t *seq, *lo, *hi;
    uint32_t *want; /* batch rows that go on after the last layer's K and V */
    uint32_t *at;   /* batch row -> its place in `want`, or ROW_NONE */
    uint32_t *pick; /* places of rows to gather; slots of hidden rows to read */
    float *score, *lse;
};

/* Device buffers of a pass: see blocks.h. */
enum scratch_buf {
    SCRATCH_X,
    SCRATCH_H,
    SCRATCH_Q,
    SCRATCH_K,
    SCRATCH_V,
    SCRATCH_ATT,
    SCRATCH_GATE,
    SCRATCH_UP,
    SCRATCH_LOGITS, /* [max_out][n_vocab] */
    SCRATCH_REST,   /* [rest_rows][d_model] of those in `resting` */
    SCRATCH_N,
};

struct model {
    unsigned magic;
    struct kn *kn;
    const struct arch *arch;
    struct hparams hp;
    struct weights w;
    struct model_info info;
    struct device_buf scratch[SCRATCH_N];
    void *row_block; /* what row_scratch points into */
    size_t row_bytes;
    struct row_scratch rows;
    struct kn_seq seqs[MODEL_PARTS_MAX]; /* of a score batch */
    struct model_rest *resting;          /* whose rows lie between two layers: a list */
};

/* A pass over batch b (batch_begin done), on this model's scratch. */
struct pass model_pass(struct model *m, const struct kn_batch *b);
/* Closes the pass's batch and asks the device how it went. */
int model_pass_end(struct model *m, struct pass *p, struct err *e);

/* score.c: rows first .. first + n - 1 of one sequence in a score pass; runs of several make up the pass. */
struct score_run {
    const struct model_score *job;
    uint32_t first, n;
    float *ret; /* [n] */
};
struct kn_batch score_batch(struct model *m, const struct score_run *runs, uint32_t n_runs);
/* The last norm and the rows' own tokens at the head, for the rows of the pass. */
void score_head(struct model *m, struct pass *p, const struct score_run *runs, uint32_t n_runs);
/* All the way. */
int score_pass(struct model *m, const struct score_run *runs, uint32_t n_runs, struct err *e);
/* Rows below it see something; the last min_gap + 1 do not, and cost nothing. */
uint32_t score_rows_seeing(const struct model_score *job);
#endif
