/* backcast.h: the C library of Backcast: sessions of a local language model whose KV caches the
 * daemon owns.
 *
 *     backcast *c;
 *     backcast_session *s;
 *     struct backcast_event ev;
 *     if (backcast_connect(&c, NULL) < 0 || backcast_session_open(c, NULL, &s) < 0)
 *         return 1;
 *     backcast_chat(s, "user", "Why is the sky blue?", 20, NULL);
 *     while (backcast_next(c, &ev, -1) > 0 && ev.type != BACKCAST_END)
 *         if (ev.type == BACKCAST_TEXT)
 *             fwrite(ev.text.text, 1, ev.text.len, stdout);
 *     backcast_disconnect(&c);
 *
 * Threads: a connection and its sessions are used from one thread at a time; different connections
 * are independent. Calls block until the daemon has answered (at most 30 s: BACKCAST_ETIMEOUT;
 * opening a session whose model must be loaded: 300 s) except those that say otherwise; text and
 * events arrive through backcast_next alone. For an event loop, poll backcast_fd() for reading and
 * then call backcast_next(c, &ev, 0) until it returns 0. Errors: negative codes BACKCAST_E*;
 * backcast_last_error() has the sentence that names the field. Outputs are untouched on failure.
 * Ownership: sessions belong to their connection; event contents belong to the library and are
 * valid until the next call on the connection. The library installs no signal handler, starts no
 * thread, prints nothing.
 */
#ifndef BACKCAST_H
#define BACKCAST_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

#define BACKCAST_VERSION "0.1.0"

typedef struct backcast backcast;
typedef struct backcast_session backcast_session;

enum backcast_error {
    BACKCAST_OK = 0,
    BACKCAST_EINVALID = -1,
    BACKCAST_EUNKNOWN = -2,
    BACKCAST_ENOMEM = -3,
    BACKCAST_EBUDGET = -4,
    BACKCAST_EBUSY = -5,
    BACKCAST_EUNSUPPORTED = -6,
    BACKCAST_EPROTOCOL = -7,
    BACKCAST_EVERSION = -8,
    BACKCAST_EPERMISSION = -9,
    BACKCAST_ECANCELLED = -10,
    BACKCAST_EIO = -11,
    BACKCAST_ECORRUPT = -12,
    BACKCAST_ENOTFOUND = -13,
    BACKCAST_ECLOSED = -14,
    BACKCAST_ETIMEOUT = -15,
    BACKCAST_ECONTEXT = -16,
    BACKCAST_EDEVICE = -17,
    BACKCAST_ESTATE = -18,
    BACKCAST_EINTERNAL = -19
};

/* ---- connection
 * ------------------------------------------------------------------------------------ */

/* socket_path NULL: $XDG_RUNTIME_DIR/backcast/backcast.sock, then /run/backcast/backcast.sock.
 * BACKCAST_ENOTFOUND: no daemon listens there. */
int backcast_connect(backcast **ret, const char *socket_path);
void backcast_disconnect(
    backcast **c); /* closes its sessions (named ones stay in the daemon); sets *c to NULL */
/* After BACKCAST_ECLOSED: connects again and attaches the sessions that have a name; the others are
 * gone (their calls return BACKCAST_ECLOSED; close them). Returns the number of sessions
 * re-attached. */
int backcast_reconnect(backcast *c);
int backcast_fd(const backcast *c);
const char *backcast_strerror(int err);
/* The sentence of the last failed call on c (c NULL: of the last failed connect of this thread); ""
 * if none. Valid until the next call. */
const char *backcast_last_error(const backcast *c);
const char *backcast_last_error_field(const backcast *c);
/* needed and available of the last BACKCAST_EBUDGET or BACKCAST_EBUSY. */
void backcast_last_error_amounts(const backcast *c, uint64_t *needed, uint64_t *available);
const char *backcast_daemon_version(const backcast *c);
const char *
backcast_model_name(const backcast *c,
                    unsigned i); /* models that can be named; NULL past the end; 0 is the default */

/* ---- sessions
 * -------------------------------------------------------------------------------------- */

#define BACKCAST_FROZEN_AUTO UINT32_MAX /* the system prompt */
#define BACKCAST_RECENT_AUTO UINT32_MAX /* min(32, budget / 8) */
#define BACKCAST_DEFAULT UINT32_MAX     /* of a number: what the daemon is configured to */

/* backcast_session_options_init leaves every choice to the daemon: its configuration, and without
 * one the values named here. */
struct backcast_session_options {
    size_t size;           /* set by backcast_session_options_init */
    const char *model;     /* name or path; NULL: the daemon's default */
    uint64_t budget_bytes; /* either; hard ceiling; both zero: the daemon's default */
    uint32_t budget_tokens;
    uint32_t keep_tokens;                  /* prune to this; 0: 3/4 of the budget */
    const char *policy;                    /* NULL: "counter_causal_fast" */
    const char *score;                     /* "logit" | "logprob"; NULL: "logit" */
    uint32_t span;                         /* odd; 1: the published method; BACKCAST_DEFAULT: 15 */
    float span_quantile;                   /* 0..1; -1: the default, 0.25 */
    uint32_t min_gap;                      /* BACKCAST_DEFAULT: 0 */
    uint32_t recent_tokens, frozen_tokens; /* BACKCAST_RECENT_AUTO, BACKCAST_FROZEN_AUTO */
    const char *trigger;                   /* "budget" | "prefill_end"; NULL: "budget" */
    const char *kv_type;       /* "f16" | "f32" | "bf16" | "q8_0" | "q8_q4"; NULL: "f16" */
    const char *name;          /* can be attached to later; NULL: dies with the connection */
    const char *chat_template; /* NULL: the file's */
    uint64_t seed;             /* policy "random" */
    int priority;
    uint32_t ring_bytes;   /* 0: 64 KiB each direction */
    uint32_t weight;       /* 1..1000: its part of the memory that is guaranteed; 0: 1 */
    int durable;           /* with a name: it outlives the daemon, however that ends; what was
                            delivered is never forgotten, and an answer under way goes on */
    const char *positions; /* "keep" | "rerotate"; NULL: "keep". Where the model's trained context
                              ends: the session ends; or what is cached is renumbered, with an event,
                              and it goes on, for ever (budget_tokens <= context_tokens) */
};
void backcast_session_options_init(struct backcast_session_options *opt);
/* opt NULL: all defaults. */
int backcast_session_open(backcast *c, const struct backcast_session_options *opt,
                          backcast_session **ret);
/* A named session of this user that nobody is attached to. */
int backcast_session_attach(backcast *c, const char *name, backcast_session **ret);
void backcast_session_close(backcast_session **s); /* frees its cache, named or not */
uint64_t backcast_session_id(const backcast_session *s);

/* What the daemon granted. */
struct backcast_session_info {
    uint64_t id, budget_bytes, page_bytes;
    uint64_t replay_seq; /* events up to this seq were made before this attach; 0: none were */
    uint32_t budget_tokens, keep_tokens, recent_tokens, frozen_tokens, bytes_per_token,
        context_tokens;
    const char *model, *policy, *name, *chat_template; /* live as long as the session */
    const char *positions;                             /* "keep" | "rerotate"; "": not told */
};
int backcast_session_info(const backcast_session *s, struct backcast_session_info *ret);

/* ---- prompts
 * --------------------------------------------------------------------------------------- */

struct backcast_generate_options {
    size_t size;                     /* set by backcast_generate_options_init */
    uint32_t max_tokens;             /* 0: prefill only; BACKCAST_DEFAULT: 512 */
    float temperature, top_p, min_p; /* 0: greedy; 1: off; 0: off */
    uint32_t top_k;                  /* 0: off */
    float repeat_penalty;            /* 1: off */
    uint32_t repeat_last;            /* 64 */
    uint64_t seed;
    const char *const *stop; /* NUL-terminated strings, at most 8 */
    size_t n_stop;
    int32_t n_logprobs; /* alternatives; -1: no log-probabilities */
    int prompt_logprobs, ignore_end;
};
void backcast_generate_options_init(struct backcast_generate_options *opt);
/* Return when the daemon has accepted the request and, for a prompt over 16 KiB, the prompt is in
 * the ring. One request a session at a time: BACKCAST_EBUSY. Text may hold any bytes. opt NULL:
 * defaults.
 * role: "system": put into the cache, END comes without text; "user", also NULL and "": answered, if max_tokens is more than 0,
 * and with no text at all an answer that was cut goes on; "assistant": the text is the beginning of an answer, which goes on. */
int backcast_chat(backcast_session *s, const char *role, const char *text, size_t len,
                  const struct backcast_generate_options *opt);
int backcast_prompt(backcast_session *s, const char *text, size_t len,
                    const struct backcast_generate_options *opt);
int backcast_prompt_ids(backcast_session *s, const int32_t *ids, size_t n,
                        const struct backcast_generate_options *opt);
int backcast_cancel(backcast_session *s); /* returns at once; END("cancelled") follows */

/* ---- events
 * ---------------------------------------------------------------------------------------- */

enum backcast_event_type {
    BACKCAST_TEXT = 1,
    BACKCAST_LOGPROB,
    BACKCAST_PROGRESS,
    BACKCAST_PRUNED,
    BACKCAST_SCORES,
    BACKCAST_LOST,
    BACKCAST_END,
    BACKCAST_REROTATED
};
struct backcast_range {
    uint64_t first, count;
}; /* stream indices: tokens counted since the session was opened */
struct backcast_top {
    int32_t id;
    float logprob;
};
struct backcast_score {
    uint64_t stream;
    int32_t id, position; /* position -1: of a dropped token, in a session that was renumbered */
    float score;
    uint32_t flags; /* 1 frozen, 2 recent, 4 dropped (backcast_session_map) */
};

struct backcast_event {
    enum backcast_event_type type;
    backcast_session *session;
    uint64_t seq;
    struct {
        const char *text;
        size_t len;
        const int32_t *ids;
        size_t n_ids;
        uint64_t first_stream;
    } text; /* whole UTF-8 characters */
    struct {
        uint64_t stream;
        int32_t id;
        float logprob;
        int prompt;
        const struct backcast_top *top;
        size_t n_top;
    } logprob;
    struct {
        uint32_t done, total;
    } progress; /* prompt tokens */
    struct {
        const struct backcast_range *dropped;
        size_t n_dropped;
        uint64_t live_before, live_after, held_before, held_after; /* bytes */
        uint64_t micros;
        uint32_t tokens_before, tokens_after;
        const char *policy,
            *reason; /* reason: "budget" "prefill_end" "asked" "shrunk" "pressure" */
    } pruned;
    struct {
        const struct backcast_score *rows;
        size_t n_rows;
        uint32_t offset, total;
    } scores;
    struct {
        uint64_t first_seq, count;
    } lost;
    struct {
        const char *reason; /* "stop" "length" "cancelled" "stalled" "budget" "context" "error"
                               "scores" "retry" */
        const char *text;   /* a sentence, for "error" and "budget" */
        int code; /* BACKCAST_ECLOSED: the session is gone, and no figures came: they are 0 */
        uint32_t tokens_in, tokens_out, tokens_cached, prunes;
        uint64_t tokens_dropped, prefill_micros, decode_micros;
        int32_t end_id; /* -1: none */
        /* prunes, tokens_dropped: since the last END; and why: "", or some of a prune's reasons,
         * "budget, pressure" */
        const char *dropped_why;
        uint32_t tokens_adopted; /* of tokens_in: not evaluated, another session's cache had them */
        uint32_t budget_tokens;  /* the session's then; 0: none, or an older daemon */
    } end;
    /* positions "rerotate": the next token, number `stream`, would have been at `position`, the first
     * one outside of the trained context; the cached ones are at 0 .. tokens - 1 now, and it goes on
     * behind them */
    struct {
        uint64_t stream, micros;
        uint32_t tokens, position;
    } rerotated;
};
/* The next event of any session of c, sessions in turn. timeout_ms -1: wait; 0: only what is there.
 * 1 event; 0 timeout, or a signal arrived; < 0 error (events that arrived before an error are handed
 * out first). A session that the daemon ends, or whose ring is found broken, ends its request with
 * END "error"; without a request its next call says so. */
int backcast_next(backcast *c, struct backcast_event *ret, int timeout_ms);

/* ---- memory
 * ---------------------------------------------------------------------------------------- */

/* Bytes or tokens (the other 0); keep_tokens 0: follows the budget. Shrinking prunes at once. */
int backcast_session_budget(backcast_session *s, uint64_t bytes, uint32_t tokens,
                            uint32_t keep_tokens);
int backcast_session_prune(backcast_session *s,
                           uint32_t keep_tokens); /* now; 0: the session's keep */
/* The policy's score of every cached token. *ret malloced, caller frees. Only while no request
 * runs. */
int backcast_session_scores(backcast_session *s, struct backcast_score **ret, size_t *ret_n);
/* The same with rows of the dropped tokens between them (flag 4, score 0), in the order of the stream;
 * their ids are known for the newest 65,536 of it. Any policy: "none" has scores of 0. */
int backcast_session_map(backcast_session *s, struct backcast_score **ret, size_t *ret_n);
/* A second session that is what s, at rest (else BACKCAST_EBUSY), is now: same tokens, same parameters.
 * Nothing is copied; both go on, each by itself. A durable session cannot be forked
 * (BACKCAST_EUNSUPPORTED). */
int backcast_session_fork(backcast_session *s, backcast_session **ret);
/* The session, at rest (else BACKCAST_EBUSY), as a file of the daemon's that outlives it; one of that
 * name is replaced. Returns when the file is safe. Name: 1 to 64 of A-Z a-z 0-9 . _ - */
int backcast_session_save(backcast_session *s, const char *name);
/* A new session of that name out of such a file, also in a later daemon: it goes on as if it had never
 * left. BACKCAST_ENOTFOUND: this user has saved none; BACKCAST_EBUSY: a session is called so;
 * BACKCAST_ECORRUPT: the file is damaged. */
int backcast_session_restore(backcast *c, const char *name, backcast_session **ret);

/* This user's saved sessions, by name. *ret malloced, caller frees. */
struct backcast_saved {
    char name[72];
    uint64_t bytes;        /* of the file */
    uint64_t unix_seconds; /* when it was saved */
};
int backcast_saved(backcast *c, struct backcast_saved **ret, size_t *ret_n);
int backcast_unsave(backcast *c, const char *name); /* the file goes; BACKCAST_ENOTFOUND */

/* ---- listings
 * -------------------------------------------------------------------------------------- */

struct backcast_session_stat {
    uint64_t id;
    uint32_t uid;
    const char *name, *model, *policy, *kv_type, *state, *client;
    uint32_t tokens, budget_tokens, keep_tokens, frozen_tokens, recent_tokens;
    uint64_t bytes_live, bytes_held, bytes_shared, budget_bytes, prunes, tokens_dropped, tokens_in,
        tokens_out;
    uint64_t prune_micros, idle_micros;
    uint64_t bytes_guaranteed; /* never pruned below this for the sake of others */
    uint64_t bytes_other;      /* beside bytes_held: policy, prompt under way, scratch */
    uint64_t
        rows_moved; /* tokens whose K and V were copied to give pages back; a prune copies none */
    const char *positions; /* "keep" | "rerotate"; "": from the stats page, or an older daemon */
    const char *tier;      /* where its cache lies: "memory" "host" "disk"; "": an older daemon */
    int durable;           /* it outlives the daemon; 0 with tier "": not known */
    /* as it was opened; "" and 0: from the stats page, or an older daemon */
    const char *score, *trigger, *chat_template;
    uint32_t span, min_gap, weight;
    float span_quantile;
    int priority;
};
struct backcast_model_stat {
    const char *name, *family, *path, *backend, *chat_template;
    uint64_t bytes_weights, bytes_scratch;
    uint32_t context_tokens, sessions;
    uint64_t bytes_text; /* vocabulary */
};
struct backcast_ledger_line { /* what the daemon has booked of one kind: "weights", "kv" ... */
    const char *name;
    uint64_t bytes; /* this user's, and the daemon's where no user has a share */
};
struct backcast_stats {
    const struct backcast_session_stat *sessions;
    size_t n_sessions;
    const struct backcast_model_stat *models;
    size_t n_models;
    uint64_t kv_held, kv_memory, bytes_weights, bytes_scratch, bytes_rings, uptime_micros, steps;
    uint32_t n_sessions_all, n_connections;
    const char *version;
    const struct backcast_ledger_line *ledger;
    size_t n_ledger;
    uint64_t bytes_booked, bytes_resident; /* sum of the lines; the process, as the system counts */
};
/* Sessions that this user may see. The contents live until the next call on c. */
int backcast_stats(backcast *c, struct backcast_stats *ret);
/* The same, read from the daemon's shared page: no round trip, no work for the daemon, up to a second
 * old; no models. BACKCAST_EUNSUPPORTED: the daemon shares none. */
int backcast_stats_page(backcast *c, struct backcast_stats *ret);
/* By id, for tools: sessions of this user, or any for an admin. */
int backcast_budget_by_id(backcast *c, uint64_t id, uint64_t bytes, uint32_t tokens,
                          uint32_t keep_tokens);
int backcast_prune_by_id(backcast *c, uint64_t id, uint32_t keep_tokens);
int backcast_close_by_id(backcast *c, uint64_t id);
int backcast_save_by_id(backcast *c, uint64_t id, const char *name);
/* A session of this user; name of the new one, NULL: none. */
int backcast_fork_by_id(backcast *c, uint64_t id, const char *name, backcast_session **ret);
/* Scores of another connection's session (same user). */
int backcast_scores_by_id(backcast *c, uint64_t id, struct backcast_score **ret, size_t *ret_n);
int backcast_map_by_id(backcast *c, uint64_t id, struct backcast_score **ret, size_t *ret_n);

#ifdef __cplusplus
}
#endif
#endif
