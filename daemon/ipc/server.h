/* server.h: the loop's world, for the files of this folder.
 *
 *   server ---- accounts    one a uid: charges, counters, stats page          quota.c statsout.c
 *     |------- conns       one a socket: frames in, frames out               conn.c
 *     |           '------- pending   requests that the engine has not answered yet
 *     |------- streams     one a session: reports -> records, records -> requests
 * |           '------- shm, ring_writer, ring_reader, backlog            stream.c outflow.c
 * inflow.c
 *     '------- run queue   streams with something to do; each gets one bounded turn in its round
 *
 * A turn (server_turn): take reports, resume paused connections, run each waiting stream once. It
 * runs again at once while anything is left, with the loop's poll in between: nobody starves. */
#ifndef BACKCAST_IPC_SERVER_H
#define BACKCAST_IPC_SERVER_H
#include "engine.h"
#include "frame.h"
#include "idmap.h"
#include "ipc.h"
#include "quota.h"

#define SERVER_MAGIC 0x73727672u
#define REPORTS_TURN_MAX 1024 /* reports taken in one turn */
#define ACCEPTS_TURN_MAX 64   /* connections accepted in one turn */
#define SWEEP_MS 1000         /* RING_RECHECK_MS: the other end of the same promise */
#define RATE_MS 20            /* paused connections are looked at again */
#define HELLO_US 5000000u     /* time for the first frame */
#define RECORD_COPY_BYTES (RING_BYTES_MAX / 4)
#define MODEL_NAMES_MAX 32 /* in a HelloReply */

struct conn;
struct stream;

/* A request that waits for the engine's answer. It outlives its connection: the answer of an OPEN
 * whose client has gone still has to be cleaned up after. */
struct pending {
    struct pending *next;
    uint64_t conn;
    uint32_t request_id, uid;
    uint16_t type;         /* enum frame_type of the request */
    struct stream *stream; /* OPEN_SESSION, ATTACH: the one being made; GENERATE, SCORES: its own */
    uint64_t charged;      /* QUOTA_QUEUED */
    struct account *account; /* holds one QUOTA_REQUESTS */
};

struct bell_slot {
    struct stream *stream;
    uint32_t generation;
};

struct server {
    unsigned magic;
    struct server_options opt;
    char default_model[96];
    struct engine *en; /* NULL: still loading */
    bool draining, closed, fatal_told;
    int spare_fd; /* given up to answer a connection when no descriptor is left */

    uv_poll_t accept_poll, bells_poll, wake_poll;
    uv_timer_t sweep, rate;
    uv_idle_t turn;
    int wake_fd; /* an eventfd, not a uv_async_t: a loop that is awake before its waker is done would spin for it */
    _Atomic bool woken; /* rung and not yet heard */
    int bells_fd;       /* one epoll set of all sessions' c2d bells, edge-triggered, never read */
    struct bell_slot *bells; /* [ENGINE_SESSIONS_MAX] */

    struct accounts accounts;
    struct idmap conns, streams;
    struct conn *conn_list;
    struct stream *stream_list;
    struct stream *run_first, **run_tail;
    struct stream *bell_first; /* published, and their clients sleep */
    struct pending *pending;   /* of all connections, newest first */
    uint64_t last_conn, last_generation;
    bool resume, rate_paused;

    uint8_t *scratch; /* one frame */
    uint8_t *record;  /* one record's payload, RECORD_COPY_BYTES */
    struct frame_arena arena;
    uint64_t booked; /* this struct and the blocks above */
    uint64_t totals[N_STATS];
    uint64_t start_us;
    struct stats_out *page; /* everybody's, for administrators */
    uint64_t stats_us, stats_steps;
    bool stats_asked;
};

/* ---- server.c */
void server_work(struct server *s); /* a turn is due */
void server_run(struct server *s, struct stream *st);
/* Whom memory of no user is booked to; NULL: nobody. */
struct ledger_owner *server_owner(const struct server *s);
bool server_admin(const struct server *s, uint32_t uid);
void server_fatal(struct server *s, const char *why); /* the device is gone */
void server_pause_rate(struct server *s); /* a connection waits for its ration of frames */
static inline void server_count(struct server *s, struct account *a, enum stat_id id, uint64_t n)
{
    s->totals[id] += n;
    if (a != NULL)
        a->stats[id] += n;
}

/* ---- pending.c */
/* Charges the request to the connection's user. BC_EINVALID: the id is in use; BC_EBUSY. */
int pending_add(struct conn *c, uint32_t request_id, uint16_t type, uint64_t bytes,
                struct pending **ret, struct err *e);
struct pending *pending_find(struct server *s, uint64_t conn, uint32_t request_id);
/* Takes it out and gives its charges back; keep_request: the request goes on (an accepted one is
 * charged until its END). */
void pending_free(struct server *s, struct pending **p, bool keep_request);

/* ---- dispatch.c */
/* One whole frame of a connection. */
void dispatch_frame(struct conn *c, const struct frame_head *h, const uint8_t *payload);

/* ---- replies.c */
/* One reply of the engine; takes it. */
void reply_report(struct server *s, struct report **r);

/* ---- statsout.c */
/* The fd of the page that uid may see (made on first use; stays open), and its size. */
int statsout_fd(struct server *s, struct account *a, bool admin, int *ret_fd, uint64_t *ret_bytes,
                struct err *e);
void statsout_sweep(struct server *s, uint64_t now_us); /* asks the engine when something changed */
/* What the ledger says to a user (a NULL: to administrators): its own bytes, and the daemon's where
 * no user has a share. Returns their sum. */
uint64_t statsout_ledger(const struct server *s, const struct account *a, uint64_t ret[N_LEDGER]);
uint64_t statsout_resident(void); /* bytes of this process in memory, as the system counts */
void statsout_publish(struct server *s, const struct report *stat);
void statsout_close(struct server *s);
#endif
