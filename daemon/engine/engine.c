/* engine.c: the engine's life and its one loop. Read engine_step first.
 *
 *             .------------------------- engine_step -------------------------.
 *   inbox --> | commands -> who runs -> memory -> pass -> sample -> deliver    | --> outbox
 *             |     | answers              | prune                             |
 *             '----------------------------------------------------------------'
 *   nothing to do: the thread sleeps on a condition variable until a command comes.
 */
#include "core.h"
#include "clock.h"
#include "log.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_ROWS_DEFAULT 512
#define MAX_ROWS_MIN 8
#define PREFILL_CHUNK_DEFAULT 256
#define SCORE_ROWS_DEFAULT 256

/* ---- the step ---- */

static void inbox_take(struct engine *en)
{
    struct command *list;
    if (!en->threads) { /* stepped by hand: the other threads' work is done here */
        loads_drain(en);
        intake_drain(en);
        disk_drain(en);
    }
    models_take_loaded(en);
    keepers_back(en);
    queue_inbox_take(en, &list);
    while (list != NULL) {
        struct command *c = list;
        list = c->next;
        c->next = NULL;
        en->worked |= c->type != CMD_ROOM && c->type != CMD_STAT;
        en->looked |= c->type == CMD_STAT; /* no step: counting them adds none */
        command_run(en, &c);
    }
}

static void totals_publish(struct engine *en)
{
    struct engine_counts c;
    engine_counts(en, &c);
    const uint64_t words[] = {c.kv_held, c.kv_live,        c.bytes_weights, c.bytes_scratch,
                              c.steps,   c.reports_queued, c.sessions};
    uint32_t seq = atomic_load_explicit(&en->totals_seq, memory_order_relaxed);
    atomic_store(&en->totals_seq, seq + 1); /* odd: being written */
    for (unsigned i = 0; i < ARRAY_LEN(words); i++)
        atomic_store(&en->totals[i], words[i]);
    atomic_store(&en->totals_seq, seq + 2);
}

/* What the inbox was answered must not wait for the pass: who asks for several things, one after the
 * other, would be a pass late with each. Totals first: an answer's reader may look at them. */
static void answers_publish(struct engine *en)
{
    if (en->made == NULL)
        return;
    totals_publish(en);
    queue_answer(en);
}

static void stats_publish(struct engine *en)
{
    en->steps += en->worked;
    totals_publish(en);
    queue_publish(en);
}

enum engine_state engine_step(struct engine *en)
{
    MAGIC_OK(en, ENGINE_MAGIC);
    en->worked = en->looked = false;
    inbox_take(en);       /* 1 opens, prompts, cancels, budgets, closes */
    answers_publish(en);  /*   to all of which the answers go now */
    tier_run(en);         /*   caches that leave or come back, a few blocks of them */
    sched_pick(en);       /* 2 decodes first, then prompt chunks in fair turns */
    pressure_reserve(en); /* 3 a slot for every new token; prune first where it is due */
    batch_forward(en);    /* 4 one pass over the weights of each model */
    sample_batch(en);     /* 5 the next ids */
    deliver_batch(en);    /* 6 text, stop rules, ends */
    budgets_check(en);    /* 7 no ceiling was broken */
    stats_publish(en);    /* 8 totals, and what this step's pass made, at once */
    return en->worked || en->looked ? ENGINE_RAN : ENGINE_IDLE;
}

/* Whether a session has work and only its reader keeps it. */
static bool any_parked(const struct engine *en)
{
    for (uint32_t i = 0; i < en->n_sessions; i++)
        if (en->list[i]->req != NULL && sess_parked(en->list[i]))
            return true;
    return false;
}

/* When there is something to do again without anybody's asking. */
static uint64_t next_look(const struct engine *en)
{
    uint64_t parked = en->wait_memory || any_parked(en) ? engine_now(en) + RECHECK_US : UINT64_MAX;
    return BC_MIN(parked, en->tier.next_us);
}

static void *engine_main(void *arg)
{
    struct engine *en = arg;
    bool go_on = true;
    while (go_on)
        if (engine_step(en) == ENGINE_IDLE)
            go_on = queue_wait(en, next_look(en));
        else
            go_on = !queue_stopping(en);
    return NULL;
}

void engine_fail(struct engine *en, const struct err *e)
{
    if (en->failed)
        return;
    en->failure = *e;
    if (en->failure.code == BC_OK)
        en->failure.code = BC_EDEVICE;
    en->failed = true; /* from here on any thread may read the failure */
    log_debug("engine", "nothing runs any more: %s", e->text);
    for (uint32_t i = 0; i < en->n_sessions; i++) {
        replay_stop(en->list[i]);
        if (en->list[i]->req != NULL)
            request_end(en, en->list[i], END_ERROR, &en->failure);
        sess_refuse_waiters(en, en->list[i], &en->failure);
    }
    tier_refuse_all(en, &en->failure);
    if (en->opt.wake != NULL) /* even if nobody was waiting for a reply */
        en->opt.wake(en->opt.wake_arg);
}

bool engine_failed(const struct engine *en)
{
    return atomic_load(&en->failed);
}

const char *engine_failure(const struct engine *en)
{
    return engine_failed(en) ? en->failure.text : "";
}

uint32_t engine_device_waits(struct engine_watch *all)
{
    uint32_t most = 0;
    for (uint32_t i = 0; i < ENGINE_MODELS_MAX; i++) {
        struct device_watch *w = &all->places[i];
        uint32_t now = __atomic_load_n(&w->waits, __ATOMIC_ACQUIRE);
        w->looks = now % 2 != 0 && now == w->seen ? w->looks + 1 : 0;
        w->seen = now;
        most = BC_MAX(most, w->looks);
    }
    return most;
}

/* ---- opening ---- */

static char *copy_or_null(const char *s)
{
    return s != NULL ? strdup(s) : NULL;
}

static int check_options(const struct engine_options *o, struct err *e)
{
    if (o->kv_memory == 0)
        return err_set(e, BC_EINVALID, "kv_memory", "kv_memory 0: the daemon could cache nothing");
    if (o->max_rows != 0 && o->max_rows < MAX_ROWS_MIN)
        return err_set(e, BC_EINVALID, "max_rows", "max_rows %u: at least %u", o->max_rows,
                       MAX_ROWS_MIN);
    if (o->activations != 0 && o->activations != KN_ACTIVATIONS &&
        o->activations != KN_ACTIVATIONS_WIDE)
        return err_set(e, BC_EINVALID, "activations", "activations %u: must be %d or %d",
                       o->activations, KN_ACTIVATIONS, KN_ACTIVATIONS_WIDE);
    if (o->state_dir != NULL && (o->state_dir[0] != '/' || strlen(o->state_dir) > STATE_DIR_MAX))
        return err_set(e, BC_EINVALID, "state_dir",
                       "state_dir %.150s: a whole path of up to %u bytes", o->state_dir,
                       STATE_DIR_MAX);
    if (o->max_sessions > ENGINE_SESSIONS_MAX)
        return err_set(e, BC_EINVALID, "max_sessions", "max_sessions %u: at most %u",
                       o->max_sessions, ENGINE_SESSIONS_MAX);
    for (size_t i = 0; i < o->n_models; i++)
        if (o->models[i].name == NULL || o->models[i].name[0] == '\0' ||
            o->models[i].path == NULL || strlen(o->models[i].name) >= 96)
            return err_set(e, BC_EINVALID, "model", "model %zu: a name of 1 to 95 bytes and a path",
                           i + 1);
    return BC_OK;
}

/* The tables of sessions and users, made once. */
static uint64_t table_bytes(const struct engine *en)
{
    return sizeof *en + en->n_slots * sizeof *en->slots +
           en->max_sessions * (sizeof *en->list + sizeof *en->cand + sizeof *en->uids);
}

static uint64_t system_now(void *arg)
{
    (void)arg;
    return clock_us();
}

static int copy_options(struct engine *en, const struct engine_options *o, struct err *e)
{
    en->opt = *o;
    en->opt.backend = copy_or_null(o->backend);
    en->opt.inject = copy_or_null(o->inject);
    en->opt.isa = copy_or_null(o->isa);
    en->opt.default_model = copy_or_null(o->default_model);
    en->opt.default_model_name = copy_or_null(o->default_model_name);
    en->opt.state_dir = copy_or_null(o->state_dir);
    en->opt.io = o->io != NULL ? o->io : &disk_io_system;
    en->opt.now = o->now != NULL ? o->now : system_now;
    en->opt.models = NULL;
    en->opt.max_rows = o->max_rows != 0 ? o->max_rows : MAX_ROWS_DEFAULT;
    en->opt.prefill_chunk = o->prefill_chunk != 0 ? o->prefill_chunk : PREFILL_CHUNK_DEFAULT;
    en->opt.score_rows = o->score_rows != 0 ? o->score_rows : SCORE_ROWS_DEFAULT;
    en->opt.max_tokens_default =
        o->max_tokens_default != 0 ? o->max_tokens_default : MAX_TOKENS_DEFAULT;
    en->opt.session_budget = o->session_budget != 0 ? o->session_budget : SESSION_BUDGET_DEFAULT;
    en->max_sessions = o->max_sessions != 0 ? o->max_sessions : ENGINE_SESSIONS_MAX;
    en->kv_memory = en->page_budget = o->kv_memory;
    en->opt.kv_memory_max = BC_MAX(o->kv_memory_max, o->kv_memory);
    en->limits = o->limits;
    for (en->n_slots = 1; en->n_slots < 2 * en->max_sessions;)
        en->n_slots *= 2; /* half of the places stay free: the next id is never far */
    en->slots = calloc(en->n_slots, sizeof *en->slots);
    en->list = calloc(en->max_sessions, sizeof *en->list);
    en->cand = calloc(en->max_sessions, sizeof *en->cand);
    en->uids = calloc(en->max_sessions, sizeof *en->uids);
    en->paths = calloc(o->n_models + 1, sizeof *en->paths);
    if (!en->slots || !en->list || !en->cand || !en->uids || !en->paths)
        return err_nomem(e, en->n_slots * sizeof *en->slots);
    for (; en->n_paths < o->n_models; en->n_paths++)
        en->paths[en->n_paths] =
            (struct engine_model_path){.name = copy_or_null(o->models[en->n_paths].name),
                                       .path = copy_or_null(o->models[en->n_paths].path),
                                       .chat_template =
                                           copy_or_null(o->models[en->n_paths].chat_template)};
    en->booked = table_bytes(en);
    ledger_charge(ledger_daemon(en->ledger), LEDGER_state, en->booked);
    return BC_OK;
}

/* The default model, loaded before anybody can ask for it. */
static int load_default(struct engine *en, struct err *e)
{
    struct model_ref *m;
    const char *path = en->opt.default_model, *name = en->opt.default_model_name;
    if (path == NULL)
        return BC_OK;
    int rc = models_default(en, path, name, &m, e);
    if (rc < 0)
        return rc;
    loads_drain(en);
    struct err why = m->err; /* the entry goes away if the load failed */
    models_take_loaded(en);
    if (why.code != BC_OK) {
        if (e != NULL)
            *e = why;
        return why.code;
    }
    en->default_model = m;
    return BC_OK;
}

int engine_open(struct engine **ret, const struct engine_options *opt, struct err *e)
{
    int rc = check_options(opt, e);
    if (rc < 0)
        return rc;
    struct engine *en = calloc(1, sizeof *en);
    if (en == NULL)
        return err_nomem(e, sizeof *en);
    en->magic = ENGINE_MAGIC;
    en->watch = opt->watch != NULL ? opt->watch : &en->own_watch;
    queue_open(en);
    tier_open(en);
    keepers_open(en);
    en->ledger = opt->ledger;
    en->own_ledger = opt->ledger == NULL;
    if (en->own_ledger && (rc = ledger_open(&en->ledger, e)) < 0) {
        queue_close(en);
        free(en);
        return rc;
    }
    if ((rc = copy_options(en, opt, e)) < 0 || (rc = load_default(en, e)) < 0 ||
        (opt->ready != NULL && (rc = opt->ready(opt->ready_arg, en, e)) < 0)) {
        engine_close(&en);
        return rc;
    }
    recover_all(en);
    stats_publish(en);
    *ret = en;
    return BC_OK;
}

int engine_start(struct engine *en, struct err *e)
{
    MAGIC_OK(en, ENGINE_MAGIC);
    bc_assert(!en->threads && !en->stopped);
    en->threads = true;
    if (pthread_create(&en->engine_thread, NULL, engine_main, en) != 0)
        goto none;
    if (pthread_create(&en->intake_thread, NULL, intake_main, en) != 0)
        goto engine;
    if (pthread_create(&en->loads_thread, NULL, loads_main, en) != 0)
        goto intake;
    if (pthread_create(&en->disk_thread, NULL, disk_main, en) != 0)
        goto loads;
    if (pthread_create(&en->keeper_thread, NULL, keeper_main, en) != 0)
        goto disk;
    return BC_OK;
disk:
    queue_stop(en);
    pthread_join(en->disk_thread, NULL);
loads:
    queue_stop(en);
    pthread_join(en->loads_thread, NULL);
intake:
    queue_stop(en);
    pthread_join(en->intake_thread, NULL);
engine:
    queue_stop(en);
    pthread_join(en->engine_thread, NULL);
none:
    en->threads = false;
    return err_set(e, BC_ENOMEM, "", "the engine's threads could not be started");
}

/* ---- stopping ---- */

void engine_stop(struct engine *en)
{
    MAGIC_OK(en, ENGINE_MAGIC);
    queue_stop(en);
    if (en->stopped)
        return;
    en->stopped = true;
    if (en->threads) {
        pthread_join(en->loads_thread, NULL);
        pthread_join(en->intake_thread, NULL);
        pthread_join(en->engine_thread, NULL);
        pthread_join(en->disk_thread, NULL);
    }
    /* the threads are gone: their state is this thread's now */
    struct err e = {0};
    err_set(&e, BC_ECLOSED, "", "the daemon is stopping");
    for (uint32_t i = 0; i < en->n_sessions; i++) {
        struct session *s = en->list[i];
        replay_stop(s);
        if (s->req != NULL && s->keeper != NULL && s->req->kind == REQUEST_GENERATE)
            request_forget(en, s); /* the next daemon goes on with it */
        else if (s->req != NULL)
            request_end(en, s, END_RETRY, NULL);
        sess_refuse_waiters(en, s, &e);
    }
    tier_refuse_all(en, &e);
    queue_refuse_all(en, &e);
    queue_publish(en); /* whoever waits hears of it before the disk has its turn */
    stopping_snapshots(en);
    if (en->threads) {
        keepers_stop(en);
        pthread_join(en->keeper_thread, NULL);
        en->threads = false;
    }
}

static void free_options(struct engine *en)
{
    free((char *)en->opt.backend);
    free((char *)en->opt.inject);
    free((char *)en->opt.isa);
    free((char *)en->opt.default_model);
    free((char *)en->opt.default_model_name);
    free((char *)en->opt.state_dir);
    for (size_t i = 0; i < en->n_paths; i++) {
        free((char *)en->paths[i].name);
        free((char *)en->paths[i].path);
        free((char *)en->paths[i].chat_template);
    }
    free(en->paths);
    free(en->slots);
    free(en->list);
    free(en->cand);
    free(en->uids);
}

void engine_close(struct engine **pen)
{
    struct engine *en = *pen;
    if (en == NULL)
        return;
    engine_stop(en);
    while (en->n_sessions > 0) {
        struct session *s = en->list[en->n_sessions - 1];
        sess_close(en, &s);
    }
    tier_close(en);
    queue_publish(en);
    keepers_close(en);
    for (const struct model_ref *m = en->models; m != NULL; m = m->next)
        sharing_forget(en, m);
    bc_assert(models_held(en) == 0); /* every page is back */
    models_close(en);
    for (struct report *r; (r = engine_take(en)) != NULL;)
        report_free(&r);
    queue_close(en);
    free_options(en);
    ledger_credit(ledger_daemon(en->ledger), LEDGER_state, en->booked);
    if (en->own_ledger)
        ledger_close(&en->ledger);
    en->magic = 0;
    free(en);
    *pen = NULL;
}

/* ---- looking ---- */

void engine_counts(const struct engine *en, struct engine_counts *ret)
{
    struct engine_counts c = {.steps = en->steps, .sessions = en->n_sessions};
    c.kv_held = models_held(en);
    c.host_bytes = en->tier.host_bytes;
    c.disk_bytes = en->tier.disk_bytes;
    c.spills = en->tier.spills;
    c.returns = en->tier.returns;
    for (uint32_t i = 0; i < en->n_sessions; i++) {
        c.kv_live += seqcache_bytes_live(en->list[i]->cache);
        c.reports_queued += en->list[i]->port->queued;
    }
    c.kv_live = BC_MIN(c.kv_live, c.kv_held); /* rows that several sessions have lie there once */
    for (const struct model_ref *m = en->models; m != NULL; m = m->next) {
        if (m->state != MODEL_READY && m->state != MODEL_ASLEEP)
            continue; /* a thread of its own books what it loads */
        c.bytes_weights += ledger_own(&m->owner, LEDGER_weights);
        c.bytes_scratch += ledger_own(&m->owner, LEDGER_scratch);
    }
    *ret = c;
}

void engine_totals(struct engine *en, struct engine_counts *ret)
{
    uint64_t w[ARRAY_LEN(en->totals)];
    uint32_t seq;
    do {
        seq = atomic_load(&en->totals_seq);
        for (unsigned i = 0; i < ARRAY_LEN(w); i++)
            w[i] = atomic_load(&en->totals[i]);
    } while (seq % 2 != 0 || seq != atomic_load(&en->totals_seq));
    *ret = (struct engine_counts){.kv_held = w[0],
                                  .kv_live = w[1],
                                  .bytes_weights = w[2],
                                  .bytes_scratch = w[3],
                                  .steps = w[4],
                                  .reports_queued = w[5],
                                  .sessions = (uint32_t)w[6]};
}

struct ledger *engine_ledger(const struct engine *en)
{
    MAGIC_OK(en, ENGINE_MAGIC);
    return en->ledger;
}

const char *engine_default_model(const struct engine *en)
{
    return en->default_model != NULL ? en->default_model->name : "";
}
