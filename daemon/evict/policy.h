/* policy.h: what the policies' files see of a session's state; for files of this folder only. */
#ifndef BACKCAST_POLICY_H
#define BACKCAST_POLICY_H
#include "evict.h"

#define EVICT_MAGIC 0x65766963u /* "evic" */

/* A run from its first call to its last. Everything is allocated when it begins: the steps after
 * scoring cannot fail. */
struct evict_job {
    bool active;
    uint32_t keep, n;       /* to, from */
    struct evict_rows want; /* rows whose value matters: the unprotected ones and their spans */
    uint32_t next;          /* first of them that has none yet */
    double micros;
    float *value, *pooled; /* [n]; 0 where no value is wanted */
    uint32_t *order;       /* [n] scratch of the selection */
};

/* The stored keys of a cache as f32, layer by layer, a slice of rows at a time: memory does not
 * grow with the cache. */
#define KEYS_SLICE 64

struct keys {
    struct kn *kn;
    struct kn_seq seq;
    uint32_t n_layers, n_heads, head_dim; /* KV heads */
    float *slice;                         /* [KEYS_SLICE][n_heads][head_dim] */
};

/* A walk over the keys of all layers: each layer is gone over `rounds` times, a slice at a time. walk.c
 * drives it and may stop after any slice.
 *
 *   layer 0: round 0: start, slice slice slice ..   round 1: start, slice slice slice ..   layer 1: ... */
struct evict_walk {
    bool active;
    struct keys keys;
    uint32_t from;                /* first row that is gone over: set by open */
    uint32_t layer, round, first; /* the slice that comes next */
    void *state;                  /* the policy's own: [state_bytes], zeroed */
    float *value;                 /* [n] what becomes of it */
    uint64_t bytes;               /* of slice and state */
};

struct evict_walker {
    uint32_t rounds;
    size_t (*state_bytes)(const struct evict_params *p, const struct kn_kv *kv, uint32_t n);
    int (*open)(struct evict *ev, struct evict_walk *w, struct err *e); /* fills value */
    void (*start)(struct evict_walk *w);                 /* before a round; may be NULL */
    void (*slice)(struct evict_walk *w, uint32_t count); /* rows first .. first + count - 1 */
};

/* Values of cache indices next .. end - 1 of a cache are due. */
struct evict_part {
    struct evict *ev;
    const struct seqcache *s;
    uint32_t next, end;
    float *value; /* [count] */
};

struct evict {
    unsigned magic;
    struct evict_params params;
    struct evict_job job;
    struct evict_walk walk;
    struct model_rest rest; /* counter-causal, all layers: rows between two layers */
    double rows_done;       /* of the last call */

    float *mass;        /* h2o: attention so far of the tokens that the last prune kept, */
    uint32_t n_mass;    /* which are the first n_mass of the cache; younger ones have none */
    uint32_t mass_max;  /* room */
    float *query;       /* tova: last-layer query of the newest token */
    uint32_t query_len; /* 0: none was noted */

    uint32_t *keep; /* arrays of the last record */
    struct evict_range *dropped;

    struct ledger_owner *owner; /* NULL: nobody */
    uint64_t booked_job, booked_record, booked_query, booked_rest;
};

static inline uint32_t evict_frozen(const struct evict_params *p)
{
    return p->frozen == EVICT_FROZEN_AUTO ? 0 : p->frozen;
}

int keys_open(struct keys *ret, const struct seqcache *s, struct err *e);
void keys_close(struct keys *k);
/* Reads rows first.. of a layer into the slice; returns how many: fewer than KEYS_SLICE only at the
 * end of the cache. */
uint32_t keys_load(struct keys *k, uint32_t layer, uint32_t first);
/* Key of row i of the slice. [head_dim] */
const float *keys_at(const struct keys *k, uint32_t i, uint32_t head);
float keys_dot(const float *a, const float *b, uint32_t n);

/* Begins a walk, or goes on with the one under way: max_rows rows of it, 0: all. *ret_done: value is
 * complete, and the walk closed. */
int walk_some(struct evict *ev, const struct seqcache *s, uint32_t max_rows, float *value,
              bool *ret_done, struct err *e);
void walk_close(struct evict *ev);
uint64_t walk_bytes(const struct evict_params *p, const struct kn_kv *kv, uint32_t n);
#endif
