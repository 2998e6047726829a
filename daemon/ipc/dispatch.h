/* dispatch.h: what handlers share. A handler checks its message and posts one command; it answers
 * nothing itself but errors (by returning < 0) and what needs no engine. */
#ifndef BACKCAST_IPC_DISPATCH_H
#define BACKCAST_IPC_DISPATCH_H
#include "backcast.pb-c.h"
#include "conn.h"
#include "fields.h"
#include "stream.h"

typedef int handler_fn(struct conn *c, uint32_t request_id, const ProtobufCMessage *m,
                       struct err *e);

handler_fn dispatch_hello, dispatch_open, dispatch_restore, dispatch_fork, dispatch_attach,
    dispatch_generate;

#define TEXT_INLINE_MAX 16384u
#define TOKENS_MAX (1u << 24) /* of budgets and the like */

/* A command on behalf of c. */
int request_new(struct conn *c, uint32_t request_id, enum command_type type, uint64_t session,
                struct command **ret, struct err *e);
/* Charges it and hands it to the engine; frees *cmd on failure. st: the stream being made, or
 * NULL. */
int request_post(struct conn *c, struct command **cmd, enum frame_type type, uint64_t bytes,
                 struct stream *st, struct err *e);
/* The session that a request names: attached to this connection. */
int own_stream(struct conn *c, bool has, uint64_t session, struct stream **ret, struct err *e);
/* The same for calls that a session's user, or an administrator, may make from anywhere. */
int any_stream(struct conn *c, bool has, uint64_t session, struct stream **ret, struct err *e);
/* A model as a client names it -> what the engine is told. Paths are for the daemon's own user. */
int model_argument(struct conn *c, const ProtobufCBinaryData *b, char *ret, size_t size,
                   struct err *e);
#endif
