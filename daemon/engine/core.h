/* core.h: the engine's own structures, for the files of this folder and nobody else.
 *
 *   engine ---- sessions[] ---- request, seqcache, evict, prune job     engine thread alone
 *     |            '-- face: what engine_post must know of it           under `lock`
 *     |---- models: kn + model + tok + chats + pools + batch            engine thread (loading: the
 *     |                                                                 loader, until handed back)
 *     |---- queues: inbox, intake, loads, outbox                        under `lock`
 *     '---- totals                                                      one word each, atomic
 *
 * Who may run what: functions of queue.c and intake.c take `lock` for themselves; all others belong
 * to the engine thread and are called without it.
 */
#ifndef BACKCAST_ENGINE_CORE_H
#define BACKCAST_ENGINE_CORE_H
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include "batch.h"
#include "request.h"
#include "durable.h"
#include "folders.h"
#include "keeper.h"
#include "prefix.h"
#include "sampler.h"
#include "state.h"
#include "tier.h"

#define ENGINE_MAGIC 0x656e6731u
#define SESSION_MAGIC 0x73657373u
#define MODEL_REF_MAGIC 0x6d726566u

#define MAX_TOKENS_DEFAULT 512
#define MODEL_POOLS 10                     /* two a type of kn_kv_type_at */
#define SESSION_BUDGET_DEFAULT (64u << 20) /* bytes; engine_options.session_budget 0 */
#define MODEL_CHATS_MAX 16                 /* templates that a session may ask for by name */
#define SCORES_PER_REPORT 128
#define SCORES_REPORTS_STEP 16
/* What every session has beside its pages, arrays of its policy and prompt. */
#define SESSION_STATE_BYTES (sizeof(struct session) + SAMPLER_REPEAT_MAX * sizeof(int32_t))
#define HISTORY_MAX 65536u  /* newest ids of a session, for those who ask what was forgotten */
#define RECHECK_US 1000000u /* parked sessions are looked at again at least this often */
#define PROGRESS_US 900000u

/* ---- models ---- */

/* ASLEEP: its weights were freed because nobody used it; none of its sessions has a page. */
enum model_state { MODEL_LOADING, MODEL_READY, MODEL_FAILED, MODEL_ASLEEP };
struct model_ref {
    unsigned magic;
    struct model_ref *next;
    enum model_state state;
    struct engine *en;
    char name[96], chat_template[32];
    char *path; /* canonical, malloced */
    struct device_watch *watch;
    struct kn *kn;          /* of its own: a load runs beside other models' passes */
    struct model *model;    /* READY */
    struct model_info info; /* from the first load on, the same for ever */
    bool again;             /* it is being loaded after a sleep */
    struct tok *tok;
    struct chat *chat;                          /* the file's, or the configured one */
    struct chat *chat_by_name[MODEL_CHATS_MAX]; /* NULL: this vocabulary cannot */
    struct pool *pools[MODEL_POOLS]; /* by type of keys and values, without and with hidden rows */
    uint64_t pages[MODEL_POOLS]; /* bytes of a page of each; from the first load on; 0: not here */
    struct batch batch;
    struct sampler sampler;
    struct err err;            /* why the load failed */
    struct command *waiting;   /* opens and loads until it is there, oldest first */
    struct ledger_owner owner; /* weights, scratch, text */
    uint32_t sessions;
    uint32_t prompts; /* in intake; under engine.lock */
    bool settle;      /* see sharing.c */
    uint64_t last_use_us;
};

/* Beginnings of prompts that sessions of one user have in common (share_across_uids: of everybody). */
struct share_tree {
    struct share_tree *next; /* engine.trees */
    const struct model_ref *m;
    struct pool *pool;
    uint32_t uid, sessions;
    struct ledger_owner *owner; /* of shared and idle pages */
    struct prefix *tree;
};

/* ---- sessions ---- */

/* A prune under way: why, how far, and who waits for the answer. */
struct prune {
    bool active, reply;
    enum record_prune_reason reason;
    uint32_t keep;
    uint64_t order; /* first come, first served */
    uint64_t conn;
    uint32_t request_id;
    bool self; /* PRUNE_PRESSURE: for its own rows, which refill the slots */
    /* PRUNE_SHRUNK: the parameters to go back to if it fails, and the ceiling after it */
    struct evict_params before;
    struct evict_request ask_before;
};

/* Scores of all cached tokens under way, for the session's own client (then a REQUEST_SCORES runs
 * beside it and streams them) or for another connection (one reply). The session rests meanwhile. */
struct scoring {
    bool active, reply;
    uint64_t conn;
    uint32_t request_id;
    float *value; /* [n] of what is cached */
    uint32_t n, done;
    struct report_score *row; /* [total] with what was dropped, if that was asked */
    uint32_t total;
    bool made; /* the rows */
};

/* Turns of one uid: sessions of one user share its turn. */
struct uid_turn {
    uint32_t uid, sessions;
    uint64_t weights;           /* of its sessions */
    struct ledger_owner *owner; /* while there are sessions */
    uint64_t turn[2];           /* when last served: decode, prefill */
};

struct session_face { /* under engine.lock */
    uint64_t conn;
    enum chat_state chat;
    bool fresh; /* nothing was ever cached or sampled */
    bool busy;  /* a prompt is in intake or a request runs */
    uint64_t serial, gen_conn;
    uint32_t gen_request; /* of the prompt in intake; serial 0: none */
    uint64_t dead_serial; /* prompts up to this one were cancelled in intake */
};

struct session {
    unsigned magic;
    uint64_t id;
    uint32_t at;   /* in engine.list */
    uint64_t conn; /* 0: nobody is attached */
    uint32_t uid;
    int32_t priority;
    uint32_t weight;  /* its part of what is guaranteed: see share.c */
    uint64_t deaf_us; /* not asked to give memory before */
    char name[65], client[64];
    struct session_port *port;
    struct session_face face;
    struct ledger_owner owner; /* kv, state, refresh, prompts */

    struct model_ref *m;
    struct chat *chat;
    enum kn_type kv_type;
    struct pool *pool;
    struct seqcache *cache;
    struct evict *ev;
    struct evict_request ask; /* as asked at open (names static): a live budget resolves it again */
    bool frozen_auto;         /* not fixed yet */
    uint64_t budget_bytes;    /* ceiling of held bytes; 0: none; see sess_ceiling */
    struct share_tree *tree;  /* NULL: it adopts and offers nothing */
    bool foreign;             /* rows of another build or processor are in its cache */

    struct lodging lodging;               /* where its cache is */
    struct keeper *keeper;                /* NULL: it is not durable */
    struct replay *replay, *replay_after; /* under way; due when its snapshot is back */
    uint64_t snapshot_mark;

    uint64_t stream; /* tokens ever cached: index of the next one */
    /* its position is stream - position_zero: 0 unless the cache was renumbered */
    uint64_t position_zero;
    bool rerotate;
    bool has_pending;
    int32_t pending; /* sampled, not evaluated yet */
    enum chat_state chat_state;
    int32_t *recent; /* [n_recent] ring: token of stream index i at i % n_recent, dropped or not */
    /* a power of two, SAMPLER_REPEAT_MAX to HISTORY_MAX: it grows with the stream */
    uint32_t n_recent;
    uint64_t recent_from; /* ids before this index are not known any more */

    struct request *req;
    struct prune prune;
    struct scoring scoring;
    struct uid_turn *turns;
    uint64_t turn[2];
    uint32_t pick_n; /* rows of the pass that is being made; 0: none */

    double row_us;   /* what a row of its refresh takes, about; 0: not known */
    double slice_us; /* of the last slice */
    uint32_t slice_rows;
    uint64_t prunes, dropped, tokens_in, tokens_out, prune_micros, last_use_us;
    uint64_t prunes_at_end, dropped_at_end;
    uint32_t dropped_why; /* since the last END: bits 1 << enum record_prune_reason */
};

enum turn_kind { TURN_DECODE, TURN_PREFILL };

struct engine {
    unsigned magic;
    struct engine_options opt; /* strings owned */
    struct ledger *ledger;
    bool own_ledger;
    uint64_t booked; /* its own tables */
    struct engine_model_path *paths;
    size_t n_paths;
    uint64_t kv_memory; /* what all caches may take, from now on */
    /* the ceiling in force: kv_memory, or what is still above a lowered one */
    uint64_t page_budget;
    uint64_t refresh_max; /* scratch of the largest refresh that may come, with others: set aside */
    uint64_t weights;     /* of all sessions */
    struct engine_limits limits;
    bool shrink_told;
    bool wait_memory; /* a session waits for memory that will come: look again */

    struct model_ref *models, *default_model;
    struct engine_watch *watch, own_watch; /* the caller's, or NULL and ours */
    struct share_tree *trees;
    uint64_t trees_look_us; /* when to look again for what has been idle too long */
    struct session **list;  /* [n_sessions] live ones, any order */
    struct session **slots; /* [n_slots] by id & (n_slots - 1); written under lock */
    uint32_t n_sessions, max_sessions, n_slots;
    uint64_t last_id, tick;
    struct uid_turn *uids;    /* [max_sessions] */
    struct session **cand;    /* [max_sessions] scratch of the scheduler */
    uint32_t score_rows_left; /* of this step */
    uint64_t slices_us;       /* what they took so far */
    bool neighbours;          /* this step's pass has decodes: refreshes take short slices */
    uint64_t decode_us;       /* what a pass of decodes alone takes, about; 0: none yet */
    bool worked, looked;      /* this step did something; it only told what there is */
    atomic_bool failed;       /* the device is gone: nothing runs any more */
    struct err failure;

    pthread_mutex_t lock;
    pthread_cond_t engine_cond, intake_cond, loads_cond, disk_cond, keeper_cond;
    struct command *inbox, **inbox_tail, *intake, **intake_tail;
    struct model_ref *loads[ENGINE_MODELS_MAX], *loaded[ENGINE_MODELS_MAX]; /* oldest first */
    uint32_t n_loads, n_loaded;
    struct report *outbox, **outbox_tail;
    uint32_t commands; /* under way */
    uint64_t serial, reports_out;
    bool stopping, stopped, threads;
    pthread_t engine_thread, intake_thread, loads_thread, disk_thread, keeper_thread;
    struct tiers tier;
    struct keeping keeping;

    /* this step's reports, before they go to the outbox at once */
    struct report *made, **made_tail;
    uint64_t n_made;

    _Atomic uint32_t totals_seq;
    _Atomic uint64_t totals[7];
    uint64_t steps;
};

/* queue.c */
void queue_open(struct engine *en);
void queue_close(struct engine *en);
void queue_stop(struct engine *en); /* any thread: everybody wakes up and ends */
bool queue_stopping(struct engine *en);
/* The threads are gone: what still waits is answered. */
void queue_refuse_all(struct engine *en, const struct err *e);
void queue_inbox_take(struct engine *en, struct command **ret); /* a list; the caller owns it */
/* Until something came, or until_us (UINT64_MAX: as long as it takes). False: stop. */
bool queue_wait(struct engine *en, uint64_t until_us);
void queue_answer(struct engine *en);                       /* made reports -> outbox, wake */
void queue_publish(struct engine *en);                      /* so, and durable ones to the disk */
void queue_to_engine(struct engine *en, struct command *c); /* from intake */
void queue_command_done(struct engine *en, struct command **c); /* frees it, one fewer under way */
bool queue_has_prompt(struct engine *en, struct session *s);    /* of this session, in intake */
/* A prompt came out of intake. False: it was cancelled in there, and answered then. */
bool queue_prompt_arrived(struct engine *en, struct session *s, const struct command *c);
/* It must wait again, and may be cancelled meanwhile as if it were in intake still. */
void queue_prompt_back(struct engine *en, struct session *s, const struct command *c);
/* Cancels the prompt in intake, if there is one, and says whose it is. */
bool queue_prompt_cancel(struct engine *en, struct session *s, uint64_t *ret_conn,
                         uint32_t *ret_request);
/* The session's face after something changed. */
void queue_face(struct engine *en, struct session *s);

/* intake.c */
void *intake_main(void *en);
void intake_drain(struct engine *en); /* inline, when no thread runs */
void *loads_main(void *en);
void loads_drain(struct engine *en);

/* disk.c */
void *disk_main(void *en);
void disk_drain(struct engine *en);
void disk_push(struct engine *en, struct disk_task *k);
struct disk_task *disk_done(struct engine *en); /* a list of tasks that are back */

/* transfer.c */
struct image *image_new(enum image_kind kind); /* NULL: no memory */
struct image *image_named(const char *path);
void image_drop(struct engine *en, struct image **i);
struct transfer *transfer_new(struct engine *en, struct session *s, bool out,
                              enum transfer_why why); /* NULL: no memory */
void transfer_free(struct engine *en, struct transfer **t);
/* Out: what leaves (t->sp); the pages are dense afterwards. */
int transfer_describe(struct engine *en, struct transfer *t, struct err *e);
/* What the image says of its session, which points into it; the caller frees. */
int transfer_state(const struct transfer *t, struct sess_state **ret, struct err *e);
int transfer_buffer(struct engine *en, struct transfer *t, struct err *e);
void transfer_begin(struct engine *en, struct transfer *t);
/* In: the head was read, and there is a session: does it fit? */
int transfer_fits(struct engine *en, struct transfer *t, struct err *e);
void transfer_fail(struct transfer *t, int rc, const struct err *e);
/* Nobody waits for it any more. */
void transfer_give_up(struct engine *en, struct transfer *t);
void transfers_run(struct engine *en);

/* keep_alive.c */
void keep_alive_run(struct engine *en, uint64_t now_us);

/* tier.c */
void tier_open(struct engine *en);
void tier_close(struct engine *en); /* no session is left */
void tier_run(struct engine *en);   /* a step's share */
void tier_refuse_all(struct engine *en, const struct err *e);
void tier_close_session(struct engine *en, struct session *s);
bool tier_here(const struct session *s); /* its cache may be used and changed now */
/* A command that needs the cache of a session that is not here, or weights that are not loaded: it
 * runs when they are back. */
void tier_wait(struct engine *en, struct session *s, struct command **c);
void tier_waiting_run(struct engine *en, struct session *s);
void tier_model_back(struct engine *en, struct model_ref *m);        /* or its load has failed */
int tier_fetch(struct engine *en, struct session *s, struct err *e); /* one that is away */
int tier_leave(struct engine *en, struct session *s, struct err *e); /* an idle one */
void tier_stay(struct engine *en, struct session *s);                /* one that is leaving */
bool tier_idle(struct engine *en, const struct session *s);
void tier_waiting_refuse(struct engine *en, struct session *s, const struct err *e);
/* Sends idle sessions other than s away (scope: of one user) until so many bytes of pages will be
 * free. False: there are not enough of them, or nowhere to go. */
bool tier_relieve(struct engine *en, const struct session *s, const struct uid_turn *scope,
                  uint64_t bytes);
/* A command that found no pages, while some are about to come free: it runs again then. */
void tier_starve(struct engine *en, struct command **c);
void tier_left(struct engine *en, struct transfer *t); /* the ends of a transfer */
void tier_came(struct engine *en, struct transfer *t);
void tier_failed(struct engine *en, struct transfer *t, const struct err *e);

/* keeper.c */
void keepers_open(struct engine *en);
void keepers_stop(struct engine *en);
void keepers_close(struct engine *en);
void *keeper_main(void *en);
void keepers_drain(struct engine *en);
void keepers_flush(struct engine *en); /* this step's frames and reports, to the thread */
void keepers_back(struct engine *en);  /* what was refused */
struct keeper *keeper_new(struct engine *en, struct session *s); /* NULL: no memory */
void keeper_discard(struct keeper **k);                          /* nothing was handed over */
/* Its session closes; remove: and is forgotten. */
void keeper_leave(struct engine *en, struct session *s, bool remove);
struct keeper *keeper_of(struct engine *en, uint64_t session);
void keeper_report(struct keeper *k, struct report *r);
size_t keeper_frame(struct keeper *k, uint16_t type);
void keeper_frame_end(struct keeper *k, size_t frame);

/* durable.c: a session's records, before the reports of what they record */
int durable_check(const struct engine *en, const struct command *c, struct err *e);
int durable_begin(struct engine *en, struct session *s, const struct command *c, struct err *e);
void durable_refused(struct engine *en, struct session *s);
void durable_request(struct session *s, const struct request *q);
void durable_step(struct session *s, uint32_t n, int32_t sampled); /* rows that are cached now */
void durable_evict(struct session *s, const struct evict_record *rec, uint32_t reason,
                   uint64_t held_after);
void durable_end(struct session *s, const struct report *r);
void durable_params(struct session *s);
void durable_mark(struct session *s); /* a new snapshot begins */
void durable_snapshot(struct session *s);
void durable_note(struct session *s, enum durable_type type);

/* story.c */
int story_open(struct story *st, struct engine *en, struct err *e);
void story_close(struct story *st);
int story_whose(struct story *st, const char *path, struct err *e);
int story_read(struct story *st, const char *path, struct journal_scan *ret, struct err *e);
void story_request_free(struct request **q);
void replay_free(struct replay **r);

/* replay.c */
void replay_begin(struct engine *en, struct session *s, struct replay **r); /* takes it */
void replay_next(struct engine *en, struct session *s);
void replay_stop(struct session *s);
void replays_run(struct engine *en); /* those that cannot be done end, or are put off */
/* The request that will go on when the rows are done is to end at once then. False: there is none. */
bool replay_cancel(struct session *s, uint32_t reason);

/* recover.c */
void recover_all(struct engine *en);
void recover_give_up(struct engine *en, struct session *s, const struct err *e);
int recover_rebuild(struct engine *en, struct session *s, struct err *e);

/* stopping.c: requests are over, the threads but the keeper's are gone */
void stopping_snapshots(struct engine *en);

/* fork.c */
void fork_command(struct engine *en, struct command *c);

/* save.c: commands, and the ends of their transfers */
void save_command(struct engine *en, struct command **c);
void save_done(struct engine *en, struct transfer *t);
void save_failed(struct engine *en, struct transfer *t, const struct err *e);
void restore_command(struct engine *en, struct command **c);
int restore_opened(struct engine *en, struct transfer *t, struct err *e);
void restore_go_on(struct engine *en, struct command **c, struct model_ref *m);
void restore_forget(struct engine *en, struct command *c);
void restore_done(struct engine *en, struct transfer *t);
void restore_failed(struct engine *en, struct transfer *t, const struct err *e);
int save_path(const struct engine *en, uint32_t uid, const char *name, char *ret, size_t size,
              struct err *e);
bool save_under_way(const struct engine *en, const char *path);

/* saved.c */
void saved_command(struct engine *en, struct command **c);
void saved_run(const struct engine *en, struct disk_task *k); /* disk thread */
void saved_back(struct engine *en, struct disk_task *k);
void saved_refuse_all(struct engine *en, const struct err *e);

/* models.c */
int models_find(struct engine *en, const char *name, struct model_ref **ret, struct err *e);
/* An entry for the daemon's default, queued for loading; name may be NULL. */
int models_default(struct engine *en, const char *path, const char *name, struct model_ref **ret,
                   struct err *e);
void models_load(struct model_ref *m, void (*progress)(void *, uint64_t, uint64_t), void *arg);
/* The pages that a session of such keys and values takes under that policy. */
int models_pool(struct engine *en, struct model_ref *m, enum kn_type kv,
                const struct evict_policy *policy, struct pool **ret, struct err *e);
/* Says in the log if kv_memory holds not one page of m's caches, or none of the usual type and policy. */
void models_memory_check(const struct engine *en, const struct model_ref *m);
/* BC_EBUDGET: so much holds not one page of m's caches, whatever the type of its keys and values. */
int models_memory_least(const struct model_ref *m, uint64_t kv_memory, struct err *e);
/* Bytes of a page of such keys and values, with or without hidden rows, and of what is booked with it. BC_EUNSUPPORTED: the
 * backend, or the model, has none of that type. */
int models_page(const struct model_ref *m, enum kn_type kv, bool hidden, uint64_t *ret,
                struct err *e);
int models_chat(struct model_ref *m, const char *name, struct chat **ret, struct err *e);
int models_query_space(struct model_ref *m, struct err *e);
/* Puts a command behind those that wait for m, which is being loaded. */
void models_wait(struct model_ref *m, struct command **c);
/* READY or ASLEEP: it has a vocabulary and pools, and may have sessions. */
bool models_known(const struct model_ref *m);
/* Loads the weights of one that is asleep, in the loader's thread. */
void models_wake(struct engine *en, struct model_ref *m);
void models_sleep(struct engine *en, struct model_ref *m); /* no page is out */
/* The backend for people: "cpu avx512-vnni, 8-bit activations". Returns ret. */
#define MODELS_KERNELS_LEN 64
const char *models_kernels(const struct model_ref *m, char ret[MODELS_KERNELS_LEN]);
/* What the numbers depend on beside weights and tokens: build, backend, instruction set, activations. */
uint64_t models_arithmetic(const struct model_ref *m);
void models_take_loaded(struct engine *en);
int models_unload(struct engine *en, const char *name, struct err *e);
void models_close(struct engine *en);
void models_drop(struct engine *en, struct model_ref **m);
/* m itself or the next one in the list that is READY; NULL. What is LOADING is the loader's alone. */
struct model_ref *models_ready(struct model_ref *m);
uint64_t models_held(const struct engine *en); /* bytes of pages of all pools */

/* session.c */
/* What a session has to suit. */
struct terms {
    const struct model_ref *m;
    bool rerotate;
    uint64_t page;  /* bytes of one */
    uint64_t kv;    /* that all caches may take */
    uint64_t usual; /* budget of a session that asks for none, if it fits */
};
/* What `ask` comes to, and whether a session can have it. */
int terms_resolve(const struct terms *t, const struct evict_request *ask, struct evict_params *ret,
                  struct err *e);
int sess_open(struct engine *en, struct command *c, struct model_ref *m, struct session **ret,
              struct err *e);
void sess_close(struct engine *en, struct session **s);
struct session *sess_find(struct engine *en, uint64_t id);
/* The session that c names, if c's sender may use it. */
int sess_for(struct engine *en, const struct command *c, struct session **ret, struct err *e);
/* Whoever waits for a prune or for scores of this session is told why there will be none. */
void sess_refuse_waiters(struct engine *en, struct session *s, const struct err *e);
struct session *sess_named(struct engine *en, uint32_t uid, const char *name);
bool sess_parked(const struct session *s);
uint32_t sess_tokens(const struct session *s); /* cached, wherever the cache is */
uint32_t sess_budget(const struct session *s); /* tokens; while it is lowered: the old one still */
void sess_append(struct session *s, const int32_t *ids, uint32_t n); /* cache, stream, ring */
/* Room in the ring for ids up to a stream index, as far as there is memory; ids stay. */
void sess_remember(struct session *s, uint64_t stream);
void sess_count(struct session *s, const int32_t *ids, uint32_t n); /* stream and ring alone */
/* The ceiling of held bytes follows the budget, which the cached tokens fit in. Where pages that
 * others hold too stand in the way and there is no memory to copy out of them, it is what is held,
 * until there is. */
void sess_ceiling(struct engine *en, struct session *s);
void sess_info(struct engine *en, struct session *s, struct report_session *ret);

/* request.c */
/* All checks of a prompt that intake has made ids of, then the request: nothing changes on failure. */
int request_accept(struct engine *en, struct session *s, struct command *c, struct err *e);
/* Ends it as soon as it owes nothing more (a prune at the prompt's end). */
void request_finish(struct engine *en, struct session *s, enum record_end_reason reason);
/* n rows of its prompt are in the cache now. */
void request_rows_in(struct session *s, struct request *q, uint32_t n);
/* Takes one that was made elsewhere into the books. */
void request_adopt(struct session *s, const struct request *q);
/* Ends it without a word to the client, who was told that it never began. */
void request_drop(struct engine *en, struct session *s);
/* Forgets it, as the end of the process would. */
void request_forget(struct engine *en, struct session *s);
/* Ends it now. e: a code and a sentence for END_ERROR and END_BUDGET, else NULL. */
void request_end(struct engine *en, struct session *s, enum record_end_reason reason,
                 const struct err *e);

/* command.c */
struct session_port *port_share(struct session_port *p); /* one more holder; NULL: a port that never
                                                            parks, or NULL: no memory */
void command_run(struct engine *en, struct command **c); /* takes it */
void command_open(struct engine *en, struct command **c, struct model_ref *m);
/* Answers it with an error, unless it was answered already. */
void command_refuse(struct engine *en, struct command **c, const struct err *e);

/* sched.c: steps 2 and 4 */
void sched_pick(struct engine *en);
void batch_forward(struct engine *en);

/* share.c */
uint64_t share_kv(const struct engine *en);  /* bytes that pages may take */
uint64_t share_uid(const struct engine *en); /* ... of one user; UINT64_MAX: no limit */
uint64_t share_uid_held(const struct engine *en, const struct uid_turn *u);
void share_update(struct engine *en); /* sessions or their budgets have changed */
/* Bytes of pages that s may count on whatever others do: whole pages, at least one. */
uint64_t share_guaranteed(const struct engine *en, const struct session *s);
/* Whether idle caches can leave, so that sessions take turns. */
bool share_turns(const struct engine *en);
int share_admit(struct engine *en, const struct session *newcomer, struct err *e);
/* What s holds above its share when it holds `more` bytes more. */
uint64_t share_overshoot(const struct engine *en, const struct session *s, uint64_t more);
/* What s could come to hold in all, once others have given what they can be made to give. */
uint64_t share_reach(const struct engine *en, const struct session *s);

uint64_t share_alone(const struct session *s); /* bytes of pages that no other session holds */

/* sharing.c */
int sharing_join(struct engine *en, struct session *s,
                 struct err *e);                             /* a new session with a pool */
void sharing_leave(struct engine *en, struct session *s);    /* its pages are back */
struct ledger_owner *sharing_owner(const struct session *s); /* of pages that it shares */
/* How many of the next ids of its request are held by others already: sharing_adopt takes them. */
uint32_t sharing_match(const struct session *s, const struct request *q);
void sharing_adopt(struct session *s);
void sharing_offer(const struct session *s);
/* A page that nobody holds goes, of one user or of anybody (NULL). False: there is none. */
bool sharing_shed(struct engine *en, const struct uid_turn *scope);
uint64_t sharing_idle(const struct engine *en,
                      const struct uid_turn *scope);               /* bytes of such pages */
void sharing_forget(struct engine *en, const struct model_ref *m); /* all of them */
void sharing_settle(struct engine *en); /* pages that one session holds alone now are its own */
void sharing_run(struct engine *en, uint64_t now_us);

/* pressure.c: step 3 and 7 */
void pressure_reserve(struct engine *en);
/* Whether s may begin a prompt of so many rows under p: at once, or once others have been made to
 * forget. BC_EBUDGET with the numbers if not. */
int pressure_admits(struct engine *en, const struct session *s, const struct evict_params *p,
                    uint32_t rows, struct err *e);
/* Whether the pages for more rows of s are there now, with holes of idle caches closed. */
bool pressure_fits(struct engine *en, const struct session *s, uint32_t rows);
/* Whether so many more pages are there for s. BC_EBUDGET with the numbers if not. */
int pressure_pages(struct engine *en, struct session *s, uint32_t pages, struct err *e);
/* After a no, with its numbers: whether others forget or leave now, so that asking again will help. */
bool pressure_waits(struct engine *en, struct session *s, const struct err *e);
/* The same for what pressure_admits refused: only who leaves can help. */
bool pressure_passes(struct engine *en, const struct session *s, const struct err *e);
/* Whether s could take so many bytes more now, without anybody's giving. */
bool pressure_room(const struct engine *en, const struct session *s, uint64_t bytes);
/* For which room s, which was refused so many bytes, is to wait: if there is that much now, also what no session holds counted, for more. */
uint64_t pressure_room_after(const struct engine *en, const struct session *s, uint64_t bytes);
void budgets_check(struct engine *en);

/* positions.c */
int positions_named(const char *name, bool *ret_rerotate, struct err *e); /* NULL, "": keep */
const char *positions_name(const struct session *s);
/* Whether a session of m can have these parameters, as far as its positions are concerned. */
int positions_check(const struct model_ref *m, bool rerotate, const struct evict_params *p,
                    struct err *e);
uint64_t positions_next(const struct session *s);
/* Whether the cache must be renumbered before the next row goes in. */
bool positions_due(const struct session *s);
/* Rows that may go in until then, or behind it if it is due. */
uint32_t positions_room(const struct session *s);
/* It is due, its pages are its own, and the rows of x follow. */
void positions_renumber(struct session *s, struct batch_entry *x);
void positions_report(struct engine *en, struct session *s, const struct batch_entry *x);

/* prune.c */
void prune_start(struct engine *en, struct session *s, enum record_prune_reason reason,
                 uint32_t keep);
void prune_abort(struct session *s);
/* Beside it, what was to become true with it: the budget is as it was. */
void prune_take_back(struct session *s);
/* Refreshes and scores under way: score_rows_left rows of them. */
void prunes_run(struct engine *en);
/* Rows of refreshes that run now, before the next pass: of the first session, and of those behind it where it has not so many. */
struct slice {
    struct session *who[EVICT_TOGETHER_MAX]; /* given */
    uint32_t n;
    uint32_t rows, most; /* that may run; no more than there are */
    uint64_t start;
};
/* Around them: begin says how many, done takes the time. whole: they were all done, so that it says what a row takes. */
void slice_begin(struct engine *en, struct slice *sl);
void slice_done(struct engine *en, const struct slice *sl, bool whole);

/* scores.c */
void scores_command(struct engine *en, struct command *c);
void scores_run(struct engine *en, struct session *s); /* a block of rows, or reports */
void scores_abort(struct session *s);

/* output.c: steps 5 and 6 */
void sample_prepare(struct batch *b); /* before the pass, its entries filled */
void sample_batch(struct engine *en);
void deliver_batch(struct engine *en);

/* report.c */
struct report *report_new(enum report_type type, size_t extra); /* never NULL: see there */
void report_push(struct engine *en, struct report *r);
void report_stream(struct engine *en, struct session *s, struct report *r);
void report_reply(struct engine *en, const struct command *c, struct report *r);
void report_error(struct engine *en, const struct command *c, const struct err *e);
struct report *report_of_tokens(uint64_t first, const int32_t *ids, uint32_t n, const char *text,
                                size_t len);
struct report *report_of_progress(const struct request *q);
void report_tokens(struct engine *en, struct session *s, uint64_t first, const int32_t *ids,
                   uint32_t n, const char *text, size_t len);
void report_progress(struct engine *en, struct session *s);

/* engine.c */
static inline uint64_t engine_now(const struct engine *en) /* microseconds; any thread */
{
    return en->opt.now(en->opt.now_arg);
}
void engine_fail(struct engine *en, const struct err *e);
#endif
