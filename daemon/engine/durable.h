/* durable.h: what a durable session's journal says: one record for everything that changes what the
 * session is. docs/DURABILITY.md has the bytes.
 *
 *   CREATE                      who it is, its model, its parameters
 *   REQUEST                     a prompt was accepted: ids, options
 *   STEP  STEP  EVICT  STEP     rows went into the cache; what was sampled; what was dropped, where
 *   END                         how it ended, and what the session is then
 *   PARAMS  MARK  SNAPSHOT      a new budget; numbers of the stream; the cache as a file, as of here
 *   ATTEMPT  READY  CLEAN       a daemon began to rebuild it, was ready, ended well
 *
 * To rebuild is to do it again: the same rows into the same cache, the same evictions at the same
 * places. A token's keys and values depend on what was cached when it came, so nothing less will do;
 * and since a row's result depends on nothing else, this does: the same bits, under the same
 * arithmetic. Tokens are never sampled again: what the journal says was said. */
#ifndef BACKCAST_ENGINE_DURABLE_H
#define BACKCAST_ENGINE_DURABLE_H
#include "request.h"
#include "state.h"

enum durable_type {
    DURABLE_CREATE = 1,
    DURABLE_REQUEST,
    DURABLE_STEP,
    DURABLE_EVICT,
    DURABLE_END,
    DURABLE_PARAMS,
    DURABLE_MARK,
    DURABLE_SNAPSHOT,
    DURABLE_ATTEMPT,
    DURABLE_READY,
    DURABLE_CLEAN,
};
#define DURABLE_TOKEN_BYTES 16
#define DURABLE_ADOPTED (-2)   /* in the place of what a STEP sampled: others had its rows */
#define DURABLE_ATTEMPTS_MAX 5 /* then it is not the others' bad luck any more */

/* ---- what is done again (replay.c) */
enum replay_kind { REPLAY_APPEND, REPLAY_EVICT, REPLAY_PARAMS };
struct replay_op {
    enum replay_kind kind;
    uint32_t n;     /* APPEND: tokens */
    size_t at, len; /* else: in replay.blob */
};
struct replay {
    struct replay_op *ops;
    uint32_t n_ops, next;
    int32_t *ids; /* of all APPENDs */
    size_t n_ids, ids_done;
    struct bytes_out blob;
    uint64_t booked;
    /* what the session is when all is done; its cache aside */
    struct sess_state *end;
    struct request *resume; /* the request that was under way; NULL: none */
    bool prune_owed;        /* the one at its prompt's end */
    uint32_t cancel;        /* 1 + reason: its client did not wait */
    struct err give_up;     /* code < 0: it is not tried again */
    struct err failed;      /* code < 0: the rows cannot be done */
    uint64_t room;          /* put off: bytes of pages that it must find to be tried again */
};

/* ---- what a journal says (story.c) */
struct story {
    struct engine *en;
    struct model_ref *m;
    uint64_t id, arithmetic, identity, records;
    uint32_t cached; /* tokens */
    uint8_t token[DURABLE_TOKEN_BYTES];
    struct sess_state *begin; /* as created */
    struct replay *r;         /* from the beginning, or from the snapshot on */
    uint64_t snapshot_mark;   /* of the snapshot file that there is; 0: none */
    bool from_snapshot;
    /* the stream since the last request began */
    uint64_t seq, seq_first; /* of the last record; before the first of `reports` */
    struct report *reports, **reports_tail;
    /* while it is read */
    struct request *q;
    struct report *item, **item_tail;
    bool last_request_over;
    uint32_t attempts, attempts_here; /* since the last READY; since the last STEP */
    uint32_t ops_max;
    size_t ids_max;
};
#endif
