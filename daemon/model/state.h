/* state.h: struct model itself, for model.c, forward.c and score.c. */
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
    uint32_t *pick; /* places of rows to gather */
    float *lse;
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
    SCRATCH_REST,   /* [rest_rows][d_model] of `resting` */
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
    struct model_rest *resting; /* whose rows lie between two layers; NULL: nobody's */
};

/* A pass over batch b (batch_begin done), on this model's scratch. */
struct pass model_pass(struct model *m, const struct kn_batch *b);
/* Closes the pass's batch and asks the device how it went. */
int model_pass_end(struct model *m, struct pass *p, struct err *e);
#endif
