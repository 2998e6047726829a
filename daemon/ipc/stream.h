/* stream.h: the loop's side of a session: its rings, what waits for them, what is kept of it.
 *
 *     engine reports --> queue --> outflow: records --> d2c ring (and the kept stream, if named)
 *     c2d ring --> inflow: PROMPT records --> upload --> CMD_GENERATE;  CANCEL --> CMD_CANCEL
 *
 *   OPENING --REP_OPENED--> LIVE, attached --client goes--> unnamed: dropped
 *                             ^                             named: LIVE, detached: records are only
 *                             '----------ATTACH------------       kept (the last 256 KiB)
 *
 * A session that breaks the ring's protocol is closed with PROTOCOL and its connection goes on.
 * The engine never waits for a ring: what does not fit waits in the queue (at most
 * SESSION_REPORTS_MAX reports, because the engine parks the session), and a request whose client
 * takes nothing for 30 s is ended with END_STALLED. Owner: the loop's thread. */
#ifndef BACKCAST_IPC_STREAM_H
#define BACKCAST_IPC_STREAM_H
#include "backlog.h"
#include "conn.h"
#include "shm.h"

#define STREAM_MAGIC 0x73747265u
#define STREAM_TOKEN_BYTES 16
#define STREAM_TURN_RECORDS 64
#define STREAM_TURN_BYTES (256u << 10)
#define STREAM_STALL_US 30000000u
#define UPLOAD_STALL_US 5000000u
#define UPLOAD_BYTES_MAX (64u << 20)
#define BELLS_SECOND_MAX 2000 /* bells with nothing behind them, before they are ignored a while */

/* A prompt that comes by ring. */
struct upload {
    struct command *command; /* CMD_GENERATE, its text growing; NULL: none under way */
    struct pending *pending;
    uint64_t total, done;
    uint64_t first_seq; /* records before it belong to a prompt that was refused */
    uint64_t progress_us;
};

struct stream {
    unsigned magic;
    struct idnode node; /* server.streams, by session id; id 0: opening */
    struct server *server;
    struct stream *next, *prev;           /* server.stream_list */
    struct stream *conn_next, *conn_prev; /* conn.streams */
    struct stream *run_next;
    struct stream *bell_next; /* server.bell_first, while bell_due */
    bool queued, running, dead, out_due, in_due;

    struct conn *conn;  /* NULL: nobody is attached */
    uint64_t attaching; /* connection of an Attach under way; 0: none */
    uint32_t uid;
    struct account *account;
    char name[65];
    uint8_t token[STREAM_TOKEN_BYTES];
    struct session_port *port;

    struct shm shm;      /* of the attached client; d2c NULL: none */
    struct shm next_shm; /* of the Attach under way */
    uint64_t attach_seq, generation, ring_size, charged_rings;
    struct ring_writer w;
    struct ring_reader r;
    uint32_t bell; /* slot in server.bells; UINT32_MAX: none */
    bool bell_due; /* the client sleeps and has not heard yet of what was published */
    bool asleep, suspect, muted;
    bool held; /* records wait until the paused connection has been read: see inflow.c */
    uint32_t empty_bells;

    uint64_t seq;    /* of the last record made */
    uint64_t in_seq; /* of the last record taken, in this generation */
    struct report *out, **out_tail;
    uint32_t part, part_more; /* how much of the first report has gone out: see outflow.c */
    struct backlog backlog;   /* named sessions */
    bool replaying;           /* the kept stream goes first, from replay_seq on */
    uint64_t replay_seq;
    bool blocked;         /* a record waits for room */
    uint64_t progress_us; /* when the client last took something, while blocked or parked */
    uint64_t last_head;
    bool parked, stall_told, room_due;
    bool cancellable; /* a request was posted and no CANCEL record since: see inflow.c */
    bool cancel_due;  /* a CANCEL record that the engine could not take yet */

    bool busy; /* an accepted request runs: holds one QUOTA_REQUESTS */
    struct upload upload;
};

/* ---- stream.c */
struct stream *stream_find(struct server *s, uint64_t session);
struct stream *stream_named(struct server *s, uint32_t uid, const char *name);
/* An OPENING stream with its rings made and charged. */
int stream_new(struct conn *c, const char *name, uint64_t ring_size, struct stream **ret,
               struct err *e);
/* One of an earlier daemon: it has a name, its number and its token, and nobody is attached. */
int stream_recovered(struct server *s, struct report *r, struct err *e);
/* The engine opened it: it gets its id; fds for the reply. */
int stream_opened(struct stream *st, uint64_t session, int ret_fds[4], struct err *e);
/* Attach, in two steps around the engine's answer. */
int stream_attach_begin(struct stream *st, struct conn *c, uint64_t ring_size, uint64_t last_seq,
                        struct err *e);
int stream_attached(struct stream *st, struct conn *c, int ret_fds[4], struct err *e);
void stream_attach_failed(struct stream *st);
/* Every stream of a connection that goes away: unnamed ones are dropped, named ones detached; the
 * engine is told (CMD_GONE). */
void streams_gone(struct conn *c);
/* Its client left before it had its rings. */
void stream_orphan(struct stream *st);
/* The session is no more: tells the client through its ring, frees everything. */
void stream_drop(struct stream *st, int code);
/* The client broke the ring's rules: closes the session. */
void stream_violation(struct stream *st, const char *why);
void stream_run(struct stream *st); /* its turn */
void stream_bell(struct stream *st);
void stream_sweep(struct stream *st, uint64_t now_us);
void stream_state(struct stream *st, enum ring_state state, int code);
void stream_not_busy(struct stream *st);
int stream_cancel(struct stream *st, uint32_t reason, struct err *e);
/* A request of its client was posted: there is something to cancel again. */
void stream_asked(struct stream *st);

/* ---- outflow.c */
void outflow_report(struct stream *st, struct report **r); /* takes it */
/* One turn. True: more could go out at once. < 0 of the ring: violation handled inside. */
bool outflow_run(struct stream *st);
void outflow_clear(struct stream *st);
/* Rings the bells of all that published in this turn. */
void outflow_bells(struct server *s);
void outflow_bell_forget(struct stream *st); /* its rings go */
/* Of a detached session: everything that waits becomes records now, so that st->seq is the last one. */
void outflow_keep(struct stream *st);

/* ---- inflow.c */
bool inflow_run(struct stream *st);
void inflow_sweep(struct stream *st, uint64_t now_us);
/* Ends an upload: e NULL: silently (nobody is there to be told). */
void upload_fail(struct stream *st, const struct err *e);
#endif
