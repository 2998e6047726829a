/* engine.h: the one thread that owns sessions and caches.
 *
 *   loop --engine_post--> [inbox] --------------------------> engine --report--> engine_take
 *             '--prompt--> [intake: template, tokens] -----------^  '--file--> [loader]
 *
 * A command has one owner at a time: engine_post takes it (it must be made with command_new), the
 * engine frees it. Reports travel back through one queue; the loop takes them with engine_take and
 * frees them with report_free. Nobody else touches a session. The engine never waits for a reader:
 * when a session's reports pile up or its ring has no room the session is parked and its neighbours
 * go on.
 *
 * Every command but GONE and ROOM is answered by exactly one reply with its request_id. Replies to commands that need
 * no waiting come in the order of the commands; one that waits for a model, for its prompt's tokens
 * or for a prune comes when that is done.
 *
 * The step, on one screen, is engine_step in engine.c:
 *   take inbox -> pick rows -> reserve memory (prune first where due) -> one forward pass per model
 *   -> sample -> deliver -> check ceilings -> stats
 *
 * Threads: engine_post, engine_take from the loop thread; engine_step from the engine thread only
 * (engine_start makes it; tests may step by hand instead). Models are shared, immutable and
 * reference-counted by the engine; each has a backend of its own, so that one can be loaded while
 * others run.
 */
#ifndef BACKCAST_ENGINE_H
#define BACKCAST_ENGINE_H
#include "base.h"
#include "evict.h"
#include "chat.h"

struct engine;

#define ENGINE_SESSIONS_MAX 4096
#define ENGINE_INBOX_MAX 4096 /* commands under way: BC_EBUSY beyond */
/* stream reports waiting for the loop, per session: then the session is parked */
#define SESSION_REPORTS_MAX 4096
#define GENERATE_STOPS_MAX 8
#define GENERATE_STOP_BYTES_MAX 256
#define GENERATE_LOGPROBS_MAX 20

/* What changes while running, with CMD_LIMITS. */
struct engine_limits {
    /* of kv_memory that the caches of one user may take; 0: uid_bytes; 100: all */
    double uid_percent;
    uint64_t uid_bytes; /* 0 as well: no limit of its own */
};
#define ENGINE_WEIGHT_MAX 1000

#define ENGINE_MODELS_MAX 16 /* loaded at once */
/* The waits of an engine's backends for their devices, a place a model: what engine_device_waits looks at while the engine, or
 * engine_open, does not return. */
struct engine_watch {
    struct device_watch {
        uint32_t waits; /* the backend's: kn_options */
        bool taken;
        uint32_t seen, looks; /* the watcher's */
    } places[ENGINE_MODELS_MAX];
};

struct engine_options {
    const char *backend, *isa; /* kn_options */
    const char *inject;        /* kn_options; NULL: nothing */
    uint32_t threads;
    bool pin;                       /* kn_options */
    uint32_t activations;           /* kn_options */
    const char *default_model;      /* path; loaded by engine_open unless NULL */
    const char *default_model_name; /* "" or NULL: the file's */
    /* names that OpenSession takes beside paths; [n_models]; copied */
    const struct engine_model_path *models;
    size_t n_models;
    struct ledger *ledger; /* the process's; NULL: one of its own */
    /* what it may be raised to while running: addresses are reserved for it; 0: kv_memory */
    uint64_t kv_memory_max;
    struct engine_limits limits;
    uint64_t kv_memory;      /* bytes of pages of all sessions together: hard; never 0 */
    uint64_t session_budget; /* default budget of a session, bytes */
    /* Idle caches leave the pages when others want them, or after a time: to host memory, as long as
     * it is under host_tier, else to a file without a name. 0, 0: they stay. */
    uint64_t host_tier, disk_tier; /* bytes */
    uint64_t spill_after_us;       /* idle for so long; 0: only when pages are wanted */
    uint64_t stop_snapshots_us;    /* what a stop may take for snapshots of durable sessions */
    uint64_t keep_alive_us;        /* a model unused for so long gives its weights back; 0: never */
    /* Beginnings of prompts that sessions of one user have in common are held once (sharing.c). */
    bool no_prefixes, share_across_uids;
    uint64_t prefix_keep_us;  /* kept for so long when no session holds them; 0: not at all */
    const char *state_dir;    /* saved sessions, the disk tier; NULL: nothing is kept on disk */
    const struct disk_io *io; /* NULL: the system's */
    /* Microseconds that never go back; any thread. NULL: the system's, the one that threads sleep by:
     * another is for an engine that is stepped by hand. */
    uint64_t (*now)(void *arg);
    void *now_arg;
    uint32_t max_rows;           /* rows of a pass: decodes first, the rest is prefill; 0: 512 */
    uint32_t prefill_chunk;      /* most prompt rows of one session in one pass; 0: 256 */
    uint32_t score_rows;         /* most refresh rows between two passes; 0: 256 */
    uint32_t max_sessions;       /* 0: ENGINE_SESSIONS_MAX */
    uint32_t max_tokens_default; /* 0: 512 */
    /* called (any thread) when engine_take has something new; must not wait */
    void (*wake)(void *arg);
    void *wake_arg;
    void (*progress)(void *arg, const char *model, uint64_t done,
                     uint64_t total); /* from the loading thread; may be NULL */
    void *progress_arg;
    /* Called by engine_open when the default model is there, before any session is: engine_open fails with what it returns.
     * May be NULL. */
    int (*ready)(void *arg, const struct engine *en, struct err *e);
    void *ready_arg;
    /* the caller's, zeroed, until engine_close has returned; may be NULL */
    struct engine_watch *watch;
};
struct engine_model_path {
    const char *name, *path, *chat_template;
};

/* Opens the backend and the default model. */
int engine_open(struct engine **ret, const struct engine_options *opt, struct err *e);
int engine_start(struct engine *en, struct err *e); /* the intake and engine threads */
void engine_stop(struct engine *en);   /* any thread; ends every request with END_RETRY, joins;
                                          reports stay readable */
void engine_close(struct engine **en); /* after engine_stop (if started); frees everything, checks
                                          that all bytes are back */

/* ---- commands
 * -------------------------------------------------------------------------------------- */

enum command_type {
    CMD_OPEN,
    CMD_GENERATE,
    CMD_CANCEL,
    CMD_BUDGET,
    CMD_PRUNE,
    CMD_SCORES,
    CMD_CLOSE,
    CMD_GONE, /* the client of connection `conn` went away: unnamed sessions close, named ones are
                 cancelled and kept */
    CMD_STAT,
    CMD_LOAD,
    CMD_UNLOAD,
    CMD_ROOM,    /* the loop made room in a parked session's ring: look again (see session_port) */
    CMD_ATTACH,  /* a named session gets a new owner connection */
    CMD_SAVE,    /* a session at rest as a file */
    CMD_SAVED,   /* which such files this user has */
    CMD_UNSAVE,  /* one of them goes */
    CMD_RESTORE, /* a new session out of one */
    CMD_FORK,    /* a new session that is what one at rest is now */
    CMD_LIMITS,  /* new kv_memory, limits and default budget: what is above them goes at once */
};

/* The loop's side of a session's ring as the engine sees it: written by the loop, read by the
 * engine. Reference-counted: loop + engine. */
struct session_port {
    _Atomic uint32_t refs;
    _Atomic uint32_t room; /* bytes free in the d2c ring as last seen by the loop; the engine parks
                              below PORT_ROOM_MIN */
    _Atomic uint32_t queued; /* reports handed out and not yet in the ring */
};
#define PORT_ROOM_MIN 4096
struct session_port *port_new(void);
void port_drop(struct session_port **p);

struct generate_options {
    uint32_t max_tokens; /* UINT32_MAX: the default */
    float temperature, top_p, min_p, repeat_penalty;
    uint32_t top_k, repeat_last;
    uint64_t seed;
    uint32_t n_stop;
    struct {
        uint16_t len;
        char bytes[GENERATE_STOP_BYTES_MAX];
    } stop[GENERATE_STOPS_MAX];
    int32_t n_logprobs; /* -1: none */
    bool prompt_logprobs, ignore_end;
};
/* A session that is the only one. */
struct engine_session_ask {
    struct evict_request evict;         /* budget_bytes: any but 0 is session_budget */
    const char *kv_type;                /* NULL: f16 */
    const char *positions;              /* NULL: keep */
    uint64_t kv_memory, session_budget; /* as in engine_options */
};
/* Whether it could be opened: with the default model of en, or, en NULL, as far as that can be told without one: a budget in
 * bytes, and whether it fits, is not judged then. Any thread. */
int engine_session_check(const struct engine *en, const struct engine_session_ask *ask,
                         struct err *e);
/* the daemon's defaults: greedy, 512 tokens */
void generate_options_init(struct generate_options *o);
int generate_options_check(const struct generate_options *o,
                           struct err *e); /* ranges; names the field */

enum prompt_kind { PROMPT_CHAT, PROMPT_RAW, PROMPT_IDS };

struct command {
    enum command_type type;
    uint64_t conn;       /* connection of the loop, for replies */
    uint32_t request_id; /* echoed in the reply */
    uint32_t uid;
    bool admin;
    uint64_t session;
    struct command *next; /* queues */
    struct {              /* the engine's own, from engine_post on */
        uint64_t serial;
        struct model_ref *m; /* of a prompt on its way through intake */
        struct chat *chat;
        bool fresh;   /* the prompt opens the session's stream */
        bool endless; /* its session's positions never end */
        bool holds_port;
        struct transfer *transfer; /* of a RESTORE that waits for its model */
    } own;
    union {
        struct {
            struct evict_request evict; /* strings point into `strings` */
            const char *model, *kv_type, *name, *chat_template;
            const char *positions; /* "rerotate"; NULL, "keep": see positions.c */
            char *strings;         /* one allocation, freed with the command; NULL: none */
            char client[64];
            int32_t priority;
            uint32_t weight;           /* 0: 1 */
            struct session_port *port; /* the engine takes a reference of its own */
            bool durable;              /* it outlives the daemon; needs a name */
            uint8_t token[16];         /* the right to attach, kept with a durable one */
            uint64_t id;               /* 0: the next free one */
        } open;
        struct {
            enum prompt_kind kind;
            char role[16];
            char *text; /* malloced, freed with the command */
            size_t len;
            int32_t *ids; /* kind IDS: given; else made by intake */
            struct generate_options opt;
            /* intake's work: */
            size_t n_ids, n_system;
            enum chat_state chat, chat_after; /* the engine knows where the conversation stands */
            int failed;                       /* intake's verdict, sent on: the engine answers */
            struct err err;
        } generate;
        struct {
            uint32_t reason; /* enum record_end_reason of the END; 0: END_CANCELLED */
        } cancel;
        struct {
            uint64_t bytes;
            uint32_t tokens, keep;
        } budget; /* CMD_PRUNE uses keep */
        struct {
            bool dropped; /* rows of what was dropped, too */
        } scores;
        struct {
            char *path;
        } load;
        struct {
            uint64_t kv_memory, session_budget;
            struct engine_limits limits;
        } limits;
        struct {
            struct session_port *port;
            char name[65];
        } attach;
        struct {
            char name[65]; /* of the file: an older one of that name is replaced */
        } save;            /* CMD_SAVED: the list begins behind it; CMD_UNSAVE: that one */
        struct {
            char name[65]; /* of the new one; "": none */
            char client[64];
            struct session_port *port;
        } fork;
        struct {
            char name[65]; /* of the file, and of the session */
            char client[64];
            struct session_port *port;
        } restore;
    } u;
};
struct command *command_new(enum command_type type, uint64_t conn, uint32_t request_id);
void command_free(struct command **c);

/* Takes *c (set to NULL) or fails with BC_EBUSY (*c untouched). */
int engine_post(struct engine *en, struct command **c, struct err *e);

/* ---- reports
 * --------------------------------------------------------------------------------------- */

enum report_type {
    REP_ERROR,
    REP_OPENED,
    REP_ACCEPTED,
    REP_BUDGET,
    REP_PRUNED_REPLY,
    REP_CLOSED,
    REP_STAT,
    REP_SCORES_REPLY,
    REP_DONE,
    REP_SAVED,
    REP_ATTACHED,
    REP_RECOVERED, /* a durable session of an earlier daemon; its stream reports follow */
    /* stream reports: in order, one session */
    REP_TOKENS,
    REP_LOGPROB,
    REP_PROGRESS,
    REP_PRUNED,
    REP_SCORES,
    REP_END,
    REP_LOST, /* records that an earlier daemon made and this one cannot */
    REP_REROTATED,
};
struct report_top {
    int32_t id;
    float logprob;
};
struct report_score {
    uint64_t stream;
    int32_t id, position;
    float score;
    uint32_t flags;
};
struct report_session { /* for REP_OPENED, REP_ATTACHED, REP_BUDGET and each session of REP_STAT */
    uint64_t id, budget_bytes, guaranteed, page_bytes, row_bytes, live, held, shared, other, prunes,
        dropped, tokens_in, tokens_out, prune_micros, last_use_us, rows_moved;
    uint32_t uid, budget, keep, frozen, recent, tokens, context;
    char name[65], model[96], policy[32], kv_type[8], state[12], client[64], chat_template[32],
        positions[12], tier[8]; /* tier: where its cache lies: "memory" "host" "disk" */
    char score[8], trigger[12];
    uint32_t span, min_gap, weight;
    int32_t priority;
    float span_quantile;
    bool attached, durable;
};
#define REPORT_SAVED_MAX 256 /* files of one REP_SAVED */
struct report_saved {
    char name[65];
    uint64_t bytes, unix_seconds;
};
struct report_model {
    char name[96], family[16], path[256], backend[64], chat_template[32];
    uint64_t bytes_weights, bytes_scratch, bytes_text;
    uint32_t context, sessions;
};
struct report {
    enum report_type type;
    uint64_t conn, session;
    uint32_t request_id;
    struct report *next;
    size_t bytes; /* malloced size, for accounting */
    bool despite; /* it goes out even if the journal fails */
    union {
        struct err error;
        struct report_session info;
        struct {
            uint64_t first_stream;
            uint32_t n_ids, text_len;
            int32_t *ids;
            char *text;
        } tokens; /* inside the allocation */
        struct {
            uint64_t stream;
            int32_t id;
            float logprob;
            uint32_t n_top;
            bool prompt;
            struct report_top top[GENERATE_LOGPROBS_MAX];
        } logprob;
        struct {
            uint32_t done, total;
        } progress;
        struct {
            uint32_t tokens_before, tokens_after, reason;
            uint64_t live_before, live_after, held_before, held_after, micros;
            char policy[32];
            uint32_t n_ranges;
            struct evict_range *ranges; /* inside the allocation */
        } pruned;
        struct {
            uint64_t stream, micros;
            uint32_t tokens, position;
        } rerotated;
        struct {
            uint32_t n, total, offset;
            struct report_score *rows;
        } scores;
        struct {
            uint32_t reason, code, tokens_in, tokens_out, tokens_cached, prunes, end_id;
            uint64_t tokens_dropped, prefill_us, decode_us;
            uint32_t dropped_why;    /* since the last END: bits 1 << enum record_prune_reason */
            uint32_t tokens_adopted; /* of tokens_in: not evaluated, others had them */
            uint32_t budget;         /* tokens, now; 0: none */
            enum chat_state chat;    /* where the conversation stands now */
            char text[256];
        } end;
        struct {
            uint32_t n_sessions, n_models;
            struct report_session *sessions; /* inside the allocation */
            struct report_model *models;
            uint64_t kv_held, kv_memory, bytes_weights, bytes_scratch, steps;
        } stat;
        struct {
            uint64_t bytes_freed;
        } closed;
        struct {
            uint32_t n;
            bool more;
            struct report_saved *files; /* by name; inside the allocation */
        } saved;
        struct {
            uint64_t count;
        } lost;
        struct {
            struct report_session info;
            uint8_t token[16];
            uint64_t seq; /* of the stream's last record, before the reports that follow */
            bool busy;    /* a request is under way */
            struct session_port *port; /* a reference for the loop, which sets it to NULL */
        } recovered;
    } u;
};
/* The next report, or NULL. Loop thread. Stream reports of a session come in order. The loop subtracts
 * from port->queued when a report has gone into the ring. */
struct report *engine_take(struct engine *en);
void report_free(struct report **r);
/* Records that a stream report becomes, for a session with a name (pieces.h). */
uint32_t report_records(const struct report *r);

/* ---- stepping and looking (tests; the engine thread)
 * -------------------------------------------------- */

enum engine_state { ENGINE_IDLE, ENGINE_RAN };
enum engine_state engine_step(struct engine *en);
/* Exact counters of this instant; engine thread or a stopped engine. */
struct engine_counts {
    uint64_t kv_held, kv_live, bytes_weights, bytes_scratch, steps, reports_queued;
    uint64_t host_bytes, disk_bytes, spills, returns; /* not among the totals */
    uint32_t sessions;
};
void engine_counts(const struct engine *en, struct engine_counts *ret);
/* Totals for the stats page, published by the engine once a step under a sequence lock; any thread.
 */
void engine_totals(struct engine *en, struct engine_counts *ret);
/* The device failed: every request ended with END_ERROR and none is taken any more (any thread). */
bool engine_failed(const struct engine *en);
/* How many calls of this function in a row have found one and the same wait of the engine, or of a load, for its device:
 * called at even times, by one thread, from before engine_open on, it tells a device that hangs. A process that is stopped does
 * not call, and does not count. */
uint32_t engine_device_waits(struct engine_watch *w);
const char *engine_failure(const struct engine *en); /* the device's failure in a sentence, or "" */
const char *engine_default_model(const struct engine *en);
struct ledger *engine_ledger(const struct engine *en);
#endif
