/* engine_harness.h: an engine in the test's own process, as the loop thread would use it: post
 * commands, collect reports.
 *
 *     struct eh *h = eh_open("tiny-llama.gguf", NULL);
 *     uint64_t s = eh_session(h, &(struct eh_ask){.policy = "h2o", .budget_tokens = 48});
 *     eh_ids(h, s, ids, n, &opt);              posts and checks that it was accepted
 *     eh_run_to_end(h, s);                     steps (or waits for the engine's thread)
 *     eh_stream(h, s)->ids ...                 all that the session's stream said
 *     eh_close(&h);                            checks that all bytes are back
 *
 * Stepped by hand by default: every step happens inside a call of the test and takes a microsecond,
 * whatever the machine; eh_pass lets more go by. eh_start gives the engine its threads and the system's
 * clock; the same calls then wait. Failures are cmocka's.
 */
#ifndef BACKCAST_ENGINE_HARNESS_H
#define BACKCAST_ENGINE_HARNESS_H
#include "engine.h"

struct eh_prune {
    uint32_t before, after, reason;
    uint64_t live_before, live_after, held_before, held_after;
    uint32_t n_ranges;
    struct evict_range *ranges;
    uint32_t after_ids; /* ids of this stream that came before it */
    uint32_t progress;  /* prompt tokens that were in when it came */
};
/* Everything that came on a session's stream since it was opened, or since eh_forget. */
struct eh_stream {
    uint64_t session, conn; /* as it was opened: eh_command speaks for it */
    uint32_t uid;
    int32_t *ids;
    uint64_t *streams; /* stream index of each id */
    uint32_t n_ids;
    char *text; /* NUL-terminated as well */
    size_t text_len;
    struct eh_prune *prunes;
    uint32_t n_prunes;
    struct report *rerotated; /* whole reports */
    uint32_t n_rerotated;
    struct report_score *scores;
    uint32_t n_scores;
    struct report *logprobs; /* whole reports */
    uint32_t n_logprobs;
    uint32_t n_progress, done, total;
    uint32_t n_ends, ends_waited; /* by eh_run_to_end */
    struct report end;            /* the last one */
    uint64_t seq;                 /* of the last record that the reports so far become */
    uint64_t lost;
    bool recovered, busy;
};

struct eh {
    struct engine *en;
    bool started;
    bool hold;                     /* do not take stream reports away: sessions park */
    void (*on_step)(struct eh *h); /* after every step by hand; NULL */
    void *arg;
    uint64_t steps;
    uint64_t now_us; /* while it is stepped by hand: see eh_pass */
    uint32_t next_request;
    struct eh_stream **streams;
    uint32_t n_streams;
    struct report **replies; /* by arrival */
    uint32_t n_replies;
    struct report **held;
    uint32_t n_held;
    struct session_port **ports; /* of streams[i] */
    struct eh_waker *waker;
};

#define EH_CONN 7u
#define EH_UID 1000u

/* A default model (a name in the vectors' folder, or a path; NULL: none), kv_memory 64 MiB, one
 * thread, ref... tweak may change the options. */
struct eh *eh_open(const char *model, void (*tweak)(struct engine_options *o, void *arg),
                   void *arg);
void eh_start(struct eh *h);
void eh_close(struct eh **h);

/* ---- what a client asks */
struct eh_ask {
    const char *model, *policy, *score, *trigger, *kv_type, *name, *chat_template, *positions;
    uint64_t budget_bytes, seed;
    uint32_t budget_tokens, keep, frozen, span, min_gap;
    int64_t recent;      /* 0: default; -1 would be too, so eh_none for really 0 */
    float span_quantile; /* 0: default; < 0: really 0 */
    uint64_t conn;       /* 0: EH_CONN */
    uint32_t uid;        /* 0: EH_UID */
    int32_t priority;
    uint32_t weight;
    bool recent_zero, durable;
};
/* A session of every policy, and what else decides what a cache is made of: number type, hidden rows, trigger, another
 * family. */
#define EH_POLICIES 13u
extern const struct eh_ask eh_policies[EH_POLICIES];
uint32_t eh_post(struct eh *h, struct command *c); /* fills request_id and returns it */
struct command *eh_command(struct eh *h, enum command_type type, uint64_t session);
uint32_t eh_post_open(struct eh *h, const struct eh_ask *a);
uint32_t eh_post_save(struct eh *h, uint64_t session, const char *name);
uint32_t eh_post_restore_as(struct eh *h, const char *name, uint64_t conn, uint32_t uid);
uint32_t eh_post_fork(struct eh *h, uint64_t session, const char *name); /* NULL: none */
uint32_t eh_post_fork_as(struct eh *h, uint64_t session, const char *name, uint64_t conn,
                         uint32_t uid);
uint32_t eh_post_restore(struct eh *h, const char *name); /* its stream is known by the reply */
/* A durable session of an earlier engine, attached to; 0: it was not recovered. */
uint64_t eh_attach(struct eh *h, const char *name);
uint32_t eh_post_ids(struct eh *h, uint64_t session, const int32_t *ids, size_t n,
                     const struct generate_options *o);
uint32_t eh_post_text(struct eh *h, uint64_t session, enum prompt_kind kind, const char *role,
                      const char *text, size_t len, const struct generate_options *o);

/* ---- and what it gets */
/* The reply to a request: steps or waits until it is there. Lives as long as h. */
const struct report *eh_reply(struct eh *h, uint32_t request);
/* Its type must be `type` (the error's sentence is printed otherwise). */
const struct report *eh_expect(struct eh *h, uint32_t request, enum report_type type);
const struct err *eh_expect_error(struct eh *h, uint32_t request, int code, const char *field);

uint64_t eh_session(struct eh *h, const struct eh_ask *a); /* opened, or the test fails */
void eh_ids(struct eh *h, uint64_t session, const int32_t *ids, size_t n,
            const struct generate_options *o);
void eh_text(struct eh *h, uint64_t session, enum prompt_kind kind, const char *text,
             const struct generate_options *o);
void eh_close_session(struct eh *h, uint64_t session);

void eh_pass(struct eh *h, uint64_t us);            /* so much time goes by (by hand) */
bool eh_step(struct eh *h);                         /* one step by hand; false: idle */
void eh_collect(struct eh *h);                      /* takes all reports that are there */
void eh_run(struct eh *h);                          /* until idle (by hand) */
void eh_run_to_end(struct eh *h, uint64_t session); /* until the next END of this session */
struct eh_stream *eh_stream(struct eh *h, uint64_t session);
struct session_port *eh_port(struct eh *h, uint64_t session);
void eh_forget(struct eh *h, uint64_t session); /* empties its stream */
/* Forgets all replies, and the streams of sessions that are closed: for runs of many commands. */
void eh_tidy(struct eh *h);
void eh_release(struct eh *h); /* hands over what `hold` kept */

/* Greedy, ignore_end, n tokens: what the goldens are. */
struct generate_options eh_greedy(uint32_t n);
#endif
