/* ipc.h: the daemon's side of the border, as main.c sees it: a listening socket, and a server that
 * turns frames into the engine's commands and the engine's reports into frames and ring records.
 *
 *   listen_open -> server_open -> server_engine (when the model is there) -> uv_run -> server_drain
 *   -> (engine_stop) -> server_flush -> server_close -> listen_close
 *
 * Threads: everything belongs to the loop's thread except server_wake (any thread).
 */
#ifndef BACKCAST_IPC_H
#define BACKCAST_IPC_H
#include <sys/types.h>
#include <uv.h>
#include "base.h"

#define BACKCAST_DAEMON_VERSION "0.1.0"

struct engine;
struct ledger;
struct server;

/* ---- listen.c */

struct listen_options {
    const char *path;  /* of the socket; its folder is made (0750) if it is missing */
    mode_t mode;       /* of the socket file */
    const char *group; /* NULL or "": the process's */
};
struct listener {
    int fd;
    int lock_fd;    /* -1: inherited socket */
    bool inherited; /* never unlinked */
    char path[108], lock_path[128];
};
/* Takes the lock beside the socket for life, replaces a stale socket under it, refuses a live one
 * (BC_EBUSY). The mode is right from the first instant that anybody can connect. */
int listen_open(struct listener *ret, const struct listen_options *opt, struct err *e);
/* A listening socket that the service manager made: checked to be AF_UNIX, SOCK_STREAM, listening.
 * */
int listen_inherit(struct listener *ret, int fd, struct err *e);
void listen_close(struct listener *l);

/* ---- server.c */

/* Per uid. */
struct server_limits {
    uint64_t connections, sessions, requests, queued_bytes, ring_bytes;
    uint32_t frames_per_second;
    uint32_t max_tokens; /* largest Generate.max_tokens */
};

/* What a session gets where its OpenSession is silent. */
struct server_defaults {
    char policy[32], score[16], trigger[16], kv_type[8], positions[12];
    uint32_t budget_tokens; /* 0: budget_bytes */
    uint64_t budget_bytes;
    uint32_t keep, span, min_gap, frozen; /* frozen UINT32_MAX: auto */
    int64_t recent;                       /* -1: auto */
    float span_quantile;
    uint32_t max_tokens; /* of a request */
};

/* Whether a session that asks for nothing could be opened with them, of the engine's default model; en NULL: as far as that can
 * be told without one. */
int server_defaults_check(const struct server_defaults *d, const struct engine *en,
                          uint64_t kv_memory, struct err *e);

struct server_options {
    uv_loop_t *loop;
    const struct listener *listener; /* stays the caller's */
    struct server_limits limits;
    struct server_defaults defaults;
    struct ledger *ledger;     /* the process's; NULL: nothing is booked */
    const char *default_model; /* its name, for Hello; copied */
    /* Names that Hello lists; NULL past the end. */
    const char *(*model_name)(void *arg, unsigned i);
    /* A name that the engine does not know by itself -> a path in ret; false: no such file. */
    bool (*model_path)(void *arg, const char *name, char *ret, size_t size);
    void *arg;
    /* The engine failed for good (BC_EDEVICE): the daemon must end. */
    void (*fatal)(void *arg, const struct err *e);
};

/* Starts accepting. Until server_engine, only Hello is answered; other requests wait. */
int server_open(struct server **ret, const struct server_options *opt, struct err *e);
void server_engine(struct server *s, struct engine *en);
void server_wake(void *server); /* engine_options.wake */
/* New limits and defaults; they apply from the next request on. */
void server_configure(struct server *s, const struct server_limits *l,
                      const struct server_defaults *d);
unsigned server_connections(const struct server *s);
/* Accepts nobody and reads nothing any more; what the engine reports still goes out. */
void server_drain(struct server *s);
/* After engine_stop: takes the last reports, fills the rings, marks them closed. */
void server_flush(struct server *s);
/* Closes every handle; run the loop until it is empty, then server_free. */
void server_close(struct server *s);
void server_free(struct server **s);
#endif
