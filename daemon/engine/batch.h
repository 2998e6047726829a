/* batch.h: one pass over a model's weights, as arrays: which sessions are in it and with how many
 * rows.
 *
 *   entries   | A decode | B decode | C prefill 256 | D prefill 90 |      sched_pick
 *   n         |    1     |    1     |      256      |   40         |      pressure_reserve (room)
 *   rows      | 0        | 1        | 2 ........ 257| 258 .... 297 |      batch_fill
 *   out rows  | 0        | 1        |               | 297          |      logits wanted
 *
 * All arrays are allocated when the model is loaded; a pass allocates nothing. Owner: the engine
 * thread.
 */
#ifndef BACKCAST_BATCH_H
#define BACKCAST_BATCH_H
#include "model.h"

struct session;

#define BATCH_NONE UINT32_MAX

struct batch_entry {
    struct session *s;
    uint32_t n;         /* rows granted; 0: left out of this pass */
    uint32_t n_out;     /* rows whose logits are wanted: the last n_out of the n */
    uint32_t first_out; /* into batch.logits */
    uint32_t query;     /* into batch.queries; BATCH_NONE */
    bool decode;
    int32_t picked;       /* the next token; -1: none is wanted */
    bool renumbered;      /* its cache, before these rows went in: positions.c */
    uint64_t renumber_us; /* what that took */
};

struct batch {
    uint32_t rows_max, outs_max, n_vocab, query_len;
    uint32_t n_entries, n_rows, n_outs, n_queries;
    uint64_t n_slots;            /* of the granted entries' lists, the pass's rows among them */
    struct batch_entry *entries; /* [rows_max] */
    int32_t *ids, *positions;    /* [rows_max] */
    uint32_t *seq, *lo, *hi, *slots;
    struct kn_seq *seqs; /* [rows_max] */
    uint32_t *out_rows;  /* [outs_max] */
    float *logits;       /* [outs_max][n_vocab]; those of a pass only if wants_logits */
    bool wants_logits;
    /* NULL unless the backend picks the tokens: how, and which, [outs_max]; recent: what penalties look at */
    struct kn_sample *how;
    int32_t *tokens, *recent;
    uint32_t *query_rows;
    float *queries; /* [rows_max][query_len]; NULL until a policy wants one */
    size_t bytes;   /* of all of the above */
};
#endif
