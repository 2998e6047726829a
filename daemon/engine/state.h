/* state.h: what a session is beside its cache: as bytes, and back as plain data. Bytes are not
 * believed: whatever would break an invariant of the engine is refused with a sentence. */
#ifndef BACKCAST_ENGINE_STATE_H
#define BACKCAST_ENGINE_STATE_H
#include "bytes.h"
#include "chat.h"
#include "evict.h"
#include "sampler.h"

#define STATE_VERSION 3u
#define STATE_VERSION_MIN 2u /* without positions: they are kept */
#define STATE_PATH_MAX 4096

struct session;

struct sess_state {
    uint32_t uid, weight;
    int32_t priority;
    uint64_t mark; /* of the snapshot that it stands in; 0: it is none */
    char name[65], client[64], model[96], chat_template[32], kv_type[8];
    char path[STATE_PATH_MAX]; /* of the model's file */
    struct evict_request ask;
    struct evict_params params;
    bool frozen_auto, has_pending;
    bool rerotate;
    uint64_t stream, position_zero;
    int32_t pending;
    enum chat_state chat;
    uint32_t n_recent, dropped_why;
    const void *recent; /* the newest ids, oldest first: inside the bytes */
    uint64_t prunes, dropped, tokens_in, tokens_out, prune_micros, prunes_at_end, dropped_at_end;
    const void *policy; /* what it has learnt: inside the bytes */
    size_t n_policy;
};

const char *sess_template(const struct session *s); /* as it was asked for; "": the model's own */
void sess_state_put(const struct session *s, struct bytes_out *o);
/* BC_ECORRUPT, BC_EVERSION. Points into bytes. */
int sess_state_get(const void *bytes, size_t n, struct sess_state *ret, struct err *e);
/* What can be known of s before its cache is here: everything but cache, policy and newest tokens. */
void sess_state_take(struct session *s, const struct sess_state *st);
int sess_policy_apply(struct session *s, const struct sess_state *st, uint32_t n_rows,
                      struct err *e); /* what the policy has learnt alone */
/* Makes s, whose model, policy and cache are there, what the state says. n_rows: cached tokens. */
int sess_state_apply(struct session *s, const struct sess_state *st, uint32_t n_rows,
                     struct err *e);
#endif
