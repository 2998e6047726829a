/* conn.h: one client's control socket: whole frames in, whole frames out, file descriptors out
 * only.
 *
 *   HELLO --Hello answered--> OPEN --EOF, violation, limit--> CLOSING --handle closed--> freed
 *
 * Reading stops (it is never refused) while the user's ration of frames is used up, while the
 * client does not take its replies, while many of its requests are unanswered, and before the model
 * is loaded. A client that goes away is noticed even then. Owner: the loop's thread. */
#ifndef BACKCAST_IPC_CONN_H
#define BACKCAST_IPC_CONN_H
#include "server.h"

#define CONN_MAGIC 0x636f6e6eu
#define CONN_OUT_PAUSE_BYTES (256u << 10) /* replies waiting: reading stops */
#define CONN_OUT_MAX_BYTES (4u << 20)     /* the client is dropped */
#define CONN_REQUESTS_MAX 64u /* unanswered: reading stops, so that pipelining is never refused */

enum conn_state { CONN_HELLO, CONN_OPEN, CONN_CLOSING };
enum conn_pause { PAUSE_RATE = 1, PAUSE_OUT = 2, PAUSE_LOADING = 4, PAUSE_REQUESTS = 8 };

struct out_frame {
    struct out_frame *next;
    uint32_t len, sent;
    unsigned n_fds;
    int fds[FRAME_FDS_MAX]; /* ours until they are sent, then closed */
    uint8_t bytes[];
};

struct conn {
    unsigned magic;
    struct idnode node; /* server.conns */
    struct server *server;
    struct conn *next, *prev; /* server.conn_list */
    enum conn_state state;
    unsigned paused;   /* enum conn_pause */
    uint32_t requests; /* unanswered */
    bool resume;       /* look at `part` again: a pause has ended */
    int fd;
    uv_poll_t poll;
    uint32_t uid;
    pid_t pid; /* decoration: pids are reused */
    bool admin;
    struct account *account;
    uint64_t born_us, features;
    uint32_t payload_in_max, payload_out_max;
    char client[65];
    uint8_t *part; /* bytes of a frame that is not whole yet, or that a pause holds back */
    size_t part_len;
    struct out_frame *out, **out_tail;
    size_t out_bytes;
    struct stream *streams; /* attached to it */
};

/* A freshly accepted socket; takes fd, even on failure. */
int conn_open(struct server *s, int fd, struct err *e);
struct conn *conn_find(struct server *s, uint64_t id);
/* Packs and queues a reply. fds become the connection's, even when it is closing. */
void conn_reply(struct conn *c, uint32_t request_id, enum frame_type type,
                const ProtobufCMessage *m, const int *fds, unsigned n_fds);
void conn_error(struct conn *c, uint32_t request_id, const struct err *e);
/* An ERROR frame with id 0 if it fits without waiting, then conn_close. */
void conn_fail(struct conn *c, int code, const char *why);
/* Its sessions are detached, the engine is told, the handle closes. Safe to call at any depth: the
 * object lives until the loop's close callback. */
void conn_close(struct conn *c);
void conn_unpause(struct conn *c, enum conn_pause why);
/* Handles every frame that has arrived. False: a pause stopped it (or the connection is closing).
 * From the turn, not from a handler. */
bool conn_drain(struct conn *c);
/* From the turn, not from a callback: handles what a pause held back. */
void conn_resume(struct conn *c);
/* Drops a client that has not said Hello in time. */
void conn_sweep(struct conn *c, uint64_t now_us);
/* Says BUSY on a socket that is not going to be a connection, and closes it. */
void conn_turn_away(int fd, const struct err *e);
#endif
