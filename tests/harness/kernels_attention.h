/* kernels_attention.h: a made-up cache of one sequence with queries over it, and what attention over it must give, in double
 * precision: for tests of attention on any backend. */
#ifndef BACKCAST_KERNELS_ATTENTION_H
#define BACKCAST_KERNELS_ATTENTION_H
#include "kernels_compare.h"

/* One layer's cache of one sequence and a batch of queries over it. */
struct kca_shape {
    uint32_t d, n_kv, group, n;
    enum kn_type type;
    enum kc_slots slots;
    float deviation; /* of queries and keys: large ones make sharp softmaxes */
};

enum kca_view { KCA_PREFILL, KCA_SCORE, KCA_SCORE_GAP, KCA_WINDOWS };

struct kca_world {
    struct kca_shape s;
    uint32_t n_pages, n_heads, n_rows;
    uint32_t *slots, *seq, *lo, *hi;
    int32_t *zeros;
    float *q, *k, *v;           /* [n_rows][n_heads][d], [n][n_kv][d] */
    float *k_stored, *v_stored; /* as the pages give them back */
    float scale;
};

struct kca_world kca_make(struct kca_shape s);
void kca_free(struct kca_world *w);
/* Sets lo and hi of every row. */
void kca_look(struct kca_world *w, enum kca_view view);
struct kn_batch kca_batch(const struct kca_world *w, const struct kn_seq *seq, uint32_t first,
                          uint32_t n);
/* One row and head: p (scratch) [n], out [d]. */
void kca_attend(const struct kca_world *w, uint32_t row, uint32_t head, double *p, double *out);
/* A pool with the world's keys and values at layer 1 of 2. */
void kca_pool(const struct kca_world *w, struct kc_pool *pool, struct kn *kn, struct kn_seq *seq);
#endif
