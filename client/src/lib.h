/* lib.h: what the files of libbackcast share. Nothing here is exported (libbackcast.map).
 *
 *   conn.c      socket, frames, file descriptors, request and reply, Hello
 *   session.c   open, attach, close, budget, prune, scores: one request each
 *   prompt.c    Generate; long prompts through the ring; cancel
 *   stream.c    records of the rings -> events; backcast_next
 *   stats.c     listings, calls by a session's number
 *   fail.c      errors and their sentences
 *
 *        backcast (one socket, one epoll fd)
 *          |-- session -- d2c region (read-only), c2d region, bell in (socket), bell out (eventfd)
 *          |-- session ...
 *
 * The daemon is not trusted either: frames, fds, region headers, cursors, records and counts are
 * checked before use, on private copies. A lie about one session ends that session, a lie on the
 * socket ends the connection.
 *
 * Waking: the epoll fd (backcast_fd) holds the socket, every session's bell, and `kick`, an eventfd
 * that is readable while events may wait which no bell will announce (a blocking call drained the
 * bell, or an event was made here).
 */
#ifndef BACKCAST_LIB_H
#define BACKCAST_LIB_H
#include <stdbool.h>
#include <stdint.h>
#include "backcast.h"
#include "backcast.pb-c.h"
#include "frame.h"
#include "ring.h"
#include "statpage.h"

#define CONN_MAGIC 0x42436c69u
#define SESSION_MAGIC 0x42437365u
#define CALL_MS 30000                /* a request's answer */
#define OPEN_MS 300000               /* an open's answer: a model may have to be loaded */
#define ATTACH_MS 3000               /* a reconnect waits for the old connection's end */
#define PROMPT_INLINE_MAX 16384      /* longer ones go by ring */
#define SESSIONS_MAX 4096            /* of one connection */
#define PENDING_BYTES_MAX (4u << 20) /* records of a session that wait outside its ring */
#define RANGES_MAX (1u << 20)        /* of one prune */
#define SCORE_ROWS_MAX (1u << 24)    /* of one session */
#define MODELS_MAX 256
#define STATS_PAGE_MAX (16 << 20) /* bytes */

struct failure {
    int code;
    char field[64];
    char text[512];
    uint64_t needed, available;
};

struct pending { /* a record read from a ring before somebody asked for events */
    struct pending *next;
    struct record_head head;
    unsigned char payload[];
};

struct backcast_session {
    unsigned magic;
    backcast *c;
    struct backcast_session *next;
    uint64_t id, generation;
    uint8_t token[16];
    struct backcast_session_info info; /* strings point into the five below */
    char model[256], policy[64], name[72], chat_template[64], positions[16];
    struct ring_region *d2c, *c2d; /* NULL: no rings (dead) */
    uint64_t ring_size;
    int bell_in, bell_out; /* -1: none */
    struct ring_reader in;
    struct ring_writer out;
    uint64_t last_seq;
    uint64_t others_seq; /* ENDs up to here are of requests of an earlier client */
    bool busy;           /* a request was accepted and its END has not been seen */
    int dead;            /* < 0: the session is over, for this reason */
    bool end_owed;       /* it died while busy: an END of our own is due */
    char dead_text[160];
    struct pending *pending, **pending_tail;
    size_t pending_bytes;
    struct backcast_range *ranges; /* of a prune whose records are split */
    size_t n_ranges, ranges_cap;
};

struct frame_in { /* the frame being received */
    uint8_t head_bytes[FRAME_HEAD_BYTES];
    uint32_t have; /* bytes of header and payload */
    bool head_ok;
    struct frame_head head;
    uint8_t *payload; /* [FRAME_PAYLOAD_MAX] */
    int fds[FRAME_FDS_MAX];
    int n_fds;
};

struct stats_store { /* what the last struct backcast_stats points into */
    struct backcast_session_stat *sessions;
    struct backcast_model_stat *models;
    char *strings;
    struct stat_entry *entries;
    struct backcast_ledger_line *ledger;
};

struct backcast {
    unsigned magic;
    int sock, epoll, kick; /* sock -1: not connected */
    char *path;
    int lost; /* < 0: the connection is over, for this reason */
    uint32_t last_request, send_max;
    uint64_t features;
    char *version;
    char *models[MODELS_MAX];
    unsigned n_models;
    struct failure fail;
    struct frame_in in;
    struct frame_arena arena;
    struct backcast_session *sessions; /* in order of their opening */
    struct backcast_session *turn;     /* looked at first by the next backcast_next */
    unsigned n_sessions;
    unsigned char *record; /* the copy that the present event points into */
    size_t record_cap;
    char event_policy[33], event_text[320], event_why[64];
    struct stats_store stats;
    struct statpage *page; /* the daemon's, read-only; NULL: it sent none */
    size_t page_bytes;
};

/* ---- fail.c */
int fail(struct failure *f, int code, const char *field, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
void fail_clear(backcast *c);
struct failure *fail_of_thread(void); /* of backcast_connect */

/* ---- conn.c */

/* One request. reply: the type wanted; *ret its message, in the arena until the next call; fds (of
 * FRAME_FDS_MAX) and n_fds as they came, owned by the caller; NULL where none may come. */
struct call {
    unsigned type;
    const ProtobufCMessage *request;
    unsigned reply;
    int timeout_ms;
    ProtobufCMessage **ret;
    int *fds, *n_fds;
};
int conn_call(backcast *c, const struct call *call);
/* The two halves of conn_call. conn_answer with timeout_ms 0 only looks: BACKCAST_ETIMEOUT if the
 * answer is not there yet. */
int conn_send(backcast *c, unsigned type, const ProtobufCMessage *m, uint32_t *ret_id);
int conn_answer(backcast *c, uint32_t id, const struct call *call);
/* Takes what lies on the socket while no answer is awaited: late replies are dropped, an error about
 * the connection or its end sets c->lost. */
void conn_look(backcast *c);
/* Ends the connection: c->lost = code, with the sentence. Sessions keep what is in their rings. */
int conn_lose(backcast *c, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
int conn_check(backcast *c); /* 0, or c->lost with its sentence */
/* Adds fd to what backcast_fd() watches; `who` tells backcast_next whose it is. Taken out again by
 * conn_unwatch, which closes it too and sets it to -1. */
int conn_watch(backcast *c, int fd, void *who);
void conn_unwatch(backcast *c, int *fd);
uint64_t now_ms(void);
void fds_close(int *fds, int *n);
/* Copies bytes that may hold anything into a C string of at most len - 1 bytes. */
void bytes_copy(char *to, size_t len, const ProtobufCBinaryData *from);
ProtobufCBinaryData bytes_of(const char *s); /* of a C string; not copied */

/* ---- session.c */
int session_check(backcast_session *s); /* 0, or why no call on it can work */
void session_unmap(backcast_session *s);
void session_free(backcast_session *s); /* and out of its connection's list */
/* Ends a session here: later calls fail with code; if busy, an END event is owed. */
void session_kill(backcast_session *s, int code, const char *text);
/* Attach, by name or by number and token, into s: fresh rings. */
int session_attach_again(backcast_session *s);
void session_ring_bell(backcast_session *s);
void session_drain_bell(backcast_session *s);

/* ---- stream.c */

/* The next record of s's ring, copied to c->record: 1, 0: none, < 0: a lie (the session is dead
 * then). */
int stream_take(backcast_session *s, struct record_head *ret);
/* Puts the record in c->record back, to be handed out by backcast_next later. */
int stream_keep(backcast_session *s, const struct record_head *head);
void stream_drop_pending(backcast_session *s);
/* c->record as an event. 1; 0: no event (unknown, or to be continued); < 0: a lie. */
int stream_event(backcast_session *s, const struct record_head *h, struct backcast_event *ret);
void stream_kick(backcast *c);

void stats_free(struct stats_store *st);
#endif
