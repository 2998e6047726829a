/* keeper.c: see keeper.h. The upper half runs in the engine's thread, the lower one in the keeper's. */
#include "core.h"
#include "log.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* ---- the engine's half ---- */

static void made_clear(struct keeper *k)
{
    k->frames = (struct bytes_out){0};
    k->seq_at = SIZE_MAX;
    k->made = NULL;
    k->made_tail = &k->made;
    k->made_bytes = 0;
    k->create = k->remove = k->sync = k->reset = false;
}

struct keeper *keeper_new(struct engine *en, struct session *s)
{
    struct keeper *k = calloc(1, sizeof *k);
    char folder[DISK_PATH_MAX];
    int n = snprintf(folder, sizeof folder, "%s/durable/%u-%s", en->opt.state_dir, s->uid, s->name);
    bc_assert(n > 0 && (size_t)n < sizeof folder - 32);
    if (k == NULL || (k->folder = strdup(folder)) == NULL) {
        free(k);
        return NULL;
    }
    k->magic = KEEPER_MAGIC;
    k->session = s->id;
    made_clear(k);
    s->keeper = k;
    en->keeping.n++;
    return k;
}

size_t keeper_frame(struct keeper *k, uint16_t type)
{
    MAGIC_OK(k, KEEPER_MAGIC);
    size_t frame = journal_frame(&k->frames, type);
    k->seq_at = k->frames.n;
    bytes_put_u64(&k->frames, 0);
    return frame;
}

void keeper_frame_end(struct keeper *k, size_t frame)
{
    journal_frame_end(&k->frames, frame);
    if (k->frames.failed)
        bc_panic(__FILE__, __LINE__, "out of memory for a journal"); /* as for a report: report.c */
}

void keeper_discard(struct keeper **pk)
{
    struct keeper *k = *pk;
    k->magic = 0;
    free(k->frames.at);
    free(k->folder);
    free(k);
    *pk = NULL;
}

/* The session closes: its keeper ends with the step's last item. remove: and its folder with it. */
void keeper_leave(struct engine *en, struct session *s, bool remove)
{
    struct keeper *k = s->keeper;
    s->keeper = NULL;
    en->keeping.n--;
    k->remove = remove;
    k->sync = true;
    if (!remove)
        keeper_frame_end(k, keeper_frame(k, DURABLE_CLEAN));
    k->next = en->keeping.leaving;
    en->keeping.leaving = k;
}

struct keeper *keeper_of(struct engine *en, uint64_t session)
{
    struct session *s = session != 0 ? sess_find(en, session) : NULL;
    if (s != NULL)
        return s->keeper;
    for (struct keeper *k = en->keeping.leaving; k != NULL; k = k->next)
        if (k->session == session)
            return k;
    return NULL;
}

void keeper_report(struct keeper *k, struct report *r)
{
    if (r->type == REP_ACCEPTED)
        k->accepted = k->items + 1; /* the item that will be made of this step */
    *k->made_tail = r;
    k->made_tail = &r->next;
    k->made_bytes += r->bytes;
    r->despite = k->despite;
}

static struct keep_item *item_make(struct engine *en, struct keeper *k, bool last)
{
    bool marks = k->seq_at == SIZE_MAX && k->made != NULL && !k->create && !k->remove;
    if (marks) /* reports without a frame: their numbers are told all the same */
        keeper_frame_end(k, keeper_frame(k, DURABLE_MARK));
    struct keep_item *it = calloc(1, sizeof *it);
    if (it == NULL)
        bc_panic(__FILE__, __LINE__, "out of memory for a journal");
    if (k->seq_at != SIZE_MAX)
        memcpy(k->frames.at + k->seq_at, &k->seq, sizeof k->seq);
    *it = (struct keep_item){.k = k,
                             .session = k->session,
                             .number = ++k->items,
                             .create = k->create,
                             .remove = k->remove,
                             .sync = k->sync,
                             .reset = k->reset,
                             .last = last,
                             .frames = k->frames,
                             .reports = k->made,
                             .bytes = k->frames.n + k->made_bytes};
    made_clear(k);
    k->flight += it->bytes;
    ledger_charge(ledger_daemon(en->ledger), LEDGER_journal, it->frames.cap);
    return it;
}

static void item_push(struct engine *en, struct keep_item *it)
{
    pthread_mutex_lock(&en->lock);
    *en->keeping.queue_tail = it;
    en->keeping.queue_tail = &it->next;
    pthread_cond_signal(&en->keeper_cond);
    pthread_mutex_unlock(&en->lock);
}

void keepers_flush(struct engine *en)
{
    for (uint32_t i = 0; en->keeping.n > 0 && i < en->n_sessions; i++) {
        struct keeper *k = en->list[i]->keeper;
        if (k != NULL && (k->made != NULL || k->frames.n > 0))
            item_push(en, item_make(en, k, false));
    }
    while (en->keeping.leaving != NULL) {
        struct keeper *k = en->keeping.leaving;
        en->keeping.leaving = k->next;
        item_push(en, item_make(en, k, true));
    }
    if (!en->threads)
        keepers_drain(en);
}

/* What was refused: the stream's numbers go back, the request that was under way ends. */
static void refused(struct engine *en, struct keep_item *it)
{
    struct session *s = sess_find(en, it->session);
    if (s == NULL || s->keeper != it->k) /* it has closed meanwhile */
        return;
    log_error("engine.durable", "session %llu: %s", (unsigned long long)s->id, it->err.text);
    s->port->queued -= it->lost_reports;
    it->k->seq -= it->lost_records;
    if (it->create) {
        durable_refused(en, s);
        return;
    }
    bool running = s->req != NULL && s->req->kind != REQUEST_REPLAY;
    if (running && it->k->accepted > it->number)
        return; /* a later one: its acceptance is refused as well, and will be back */
    it->k->reset = true;
    if (running && it->refused && it->k->accepted == it->number) {
        request_drop(en, s);
    } else if (running) {
        it->k->despite = true;
        request_end(en, s, END_ERROR, &it->err);
        it->k->despite = false;
    }
}

static void item_free(struct engine *en, struct keep_item **it)
{
    ledger_credit(ledger_daemon(en->ledger), LEDGER_journal, (*it)->frames.cap);
    free((*it)->frames.at);
    free(*it);
    *it = NULL;
}

void keepers_back(struct engine *en)
{
    pthread_mutex_lock(&en->lock);
    struct keep_item *list = en->keeping.back;
    en->keeping.back = NULL;
    en->keeping.back_tail = &en->keeping.back;
    en->keeping.drained = false;
    pthread_mutex_unlock(&en->lock);
    while (list != NULL) {
        struct keep_item *it = list;
        list = it->next;
        refused(en, it);
        item_free(en, &it);
        en->worked = true;
    }
}

/* ---- the keeper's half ---- */

static void publish(struct engine *en, struct report *list)
{
    if (list == NULL)
        return;
    pthread_mutex_lock(&en->lock);
    while (list != NULL) {
        struct report *r = list;
        list = r->next;
        r->next = NULL;
        *en->outbox_tail = r;
        en->outbox_tail = &r->next;
        en->reports_out++;
    }
    pthread_mutex_unlock(&en->lock);
    if (en->opt.wake != NULL)
        en->opt.wake(en->opt.wake_arg);
}

static struct report *error_for(struct engine *en, const struct report *r, const struct err *e)
{
    struct report *x = report_new(REP_ERROR, 0);
    x->conn = r->conn;
    x->request_id = r->request_id;
    x->session = r->session;
    x->u.error = *e;
    ledger_charge(ledger_daemon(en->ledger), LEDGER_reports, x->bytes);
    return x;
}

static bool acknowledges(enum report_type type)
{
    return type == REP_OPENED || type == REP_ACCEPTED || type == REP_BUDGET ||
           type == REP_PRUNED_REPLY || type == REP_CLOSED;
}

/* Whoever was told that a request began hears that it has ended, and why. */
static bool end_refused(const struct keeper *k, struct report *r, const struct err *e)
{
    if (r->type != REP_END ||
        (k->dead && r->request_id == k->dead_request && r->conn == k->dead_conn))
        return false;
    r->u.end.reason = END_ERROR;
    r->u.end.code = (uint32_t)-e->code;
    snprintf(r->u.end.text, sizeof r->u.end.text, "%.*s", (int)sizeof r->u.end.text - 1, e->text);
    return true;
}

/* A report of the stream. True: it goes out even so. */
static bool stream_refused(struct keep_item *it, struct report *r)
{
    if (r->despite || end_refused(it->k, r, &it->err))
        return true;
    it->lost_reports++;
    it->lost_records += report_records(r);
    return false;
}

/* Another report. True: it goes out. */
static bool reply_refused(struct keep_item *it, struct report *r)
{
    struct keeper *k = it->k;
    if (r->type == REP_ACCEPTED) {
        it->refused = k->dead = true;
        k->dead_request = r->request_id;
        k->dead_conn = r->conn;
    } else if (r->type == REP_CLOSED) {
        r->conn = r->request_id = 0; /* the loop takes the session apart; its client hears why */
    }
    return r->type == REP_CLOSED || !acknowledges(r->type);
}

/* The item's reports, without what would be an acknowledgement of what was not written. */
static void reports_refuse(struct engine *en, struct keep_item *it)
{
    struct report *list = it->reports, *kept = NULL, **tail = &kept;
    while (list != NULL) {
        struct report *r = list;
        list = r->next;
        r->next = NULL;
        if (acknowledges(r->type)) {
            *tail = error_for(en, r, &it->err);
            tail = &(*tail)->next;
        }
        if (r->type >= REP_TOKENS ? stream_refused(it, r) : reply_refused(it, r)) {
            *tail = r;
            tail = &r->next;
        } else {
            ledger_credit(ledger_daemon(en->ledger), LEDGER_reports, r->bytes);
            report_free(&r);
        }
    }
    it->reports = NULL;
    publish(en, kept);
}

/* The journal goes first: a folder without one is nobody's session. */
static int folder_remove(struct engine *en, const char *folder, struct err *e)
{
    static const char *const names[] = {"journal", "snapshot", "snapshot.tmp", "journal.tmp"};
    const struct disk_io *io = en->opt.io;
    char path[DISK_PATH_MAX];
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        if (io->unlink(io->arg, path) < 0 && errno != ENOENT)
            return disk_failed(e, "removing", path);
        if (i == 0 && io->sync_folder(io->arg, folder) < 0 && errno != ENOENT)
            return disk_failed(e, "syncing", folder);
    }
    rmdir(folder); /* if a snapshot is being written still, the next start does it */
    return BC_OK;
}

/* What was to be removed and is there still: its session is gone, and must not come back. */
static void leftover_add(struct engine *en, const char *folder)
{
    struct keeping *kp = &en->keeping;
    char *copy = kp->n_leftovers < KEEPER_LEFTOVERS_MAX ? strdup(folder) : NULL;
    if (copy != NULL)
        kp->leftovers[kp->n_leftovers++] = copy;
    else
        log_error("engine.durable", "%s stays: the next start brings it back", folder);
}

/* Tries again; folder NULL: all of them. */
static void leftovers_remove(struct engine *en, const char *folder)
{
    struct keeping *kp = &en->keeping;
    for (uint32_t i = kp->n_leftovers; i-- > 0;) {
        struct err e = {0};
        if (folder != NULL && strcmp(kp->leftovers[i], folder) != 0)
            continue;
        if (folder_remove(en, kp->leftovers[i], &e) < 0) {
            log_error("engine.durable", "%s", e.text);
            continue;
        }
        free(kp->leftovers[i]);
        kp->leftovers[i] = kp->leftovers[--kp->n_leftovers];
    }
}

static int file_create(struct engine *en, struct keep_item *it, struct err *e)
{
    char path[DISK_PATH_MAX];
    leftovers_remove(en, it->k->folder);
    snprintf(path, sizeof path, "%s/journal", it->k->folder);
    int rc = folders_make(path, e);
    if (rc < 0)
        return rc;
    rc = journal_create(&it->k->journal, en->opt.io, path, &it->frames, e);
    if (rc == BC_EBUSY)
        return err_set(
            e, BC_EBUSY, "name",
            "a durable session of this name lies on the disk and could not be recovered: "
            "see the log of the daemon's start");
    if (rc < 0 && access(path, F_OK) == 0)
        leftover_add(en, it->k->folder);
    return rc;
}

static int file_remove(struct engine *en, struct keeper *k, struct err *e)
{
    if (k->journal == NULL) /* it was never made; what may lie there is not this session's */
        return BC_OK;
    journal_close(&k->journal);
    int rc = folder_remove(en, k->folder, e);
    if (rc < 0)
        leftover_add(en, k->folder);
    return rc;
}

static void dirty_add(struct engine *en, struct keeper *k)
{
    if (k->dirty_us != 0 || k->journal == NULL || !journal_dirty(k->journal))
        return;
    k->dirty_us = engine_now(en);
    k->next_dirty = en->keeping.dirty;
    en->keeping.dirty = k;
}

static void dirty_remove(struct engine *en, struct keeper *k)
{
    struct keeper **at = &en->keeping.dirty;
    if (k->dirty_us == 0)
        return;
    while (*at != k)
        at = &(*at)->next_dirty;
    *at = k->next_dirty;
    k->dirty_us = 0;
}

static int item_write(struct engine *en, struct keep_item *it, struct err *e)
{
    struct keeper *k = it->k;
    if (it->create)
        return file_create(en, it, e);
    if (it->remove)
        return file_remove(en, k, e);
    if (k->journal == NULL) /* its creation was refused: nobody was told that it is there */
        return err_set(e, BC_ESTATE, "durable", "the session has no journal");
    int rc = it->frames.n > 0 ? journal_put(k->journal, &it->frames, e) : BC_OK;
    if (rc == BC_OK && it->sync)
        rc = journal_sync(k->journal, e);
    return rc;
}

static void item_back(struct engine *en, struct keep_item *it)
{
    it->next = NULL;
    pthread_mutex_lock(&en->lock);
    *en->keeping.back_tail = it;
    en->keeping.back_tail = &it->next;
    pthread_cond_signal(&en->engine_cond);
    pthread_mutex_unlock(&en->lock);
}

static void keeper_free(struct engine *en, struct keeper *k)
{
    dirty_remove(en, k);
    if (k->journal != NULL)
        journal_close(&k->journal);
    k->magic = 0;
    free(k->frames.at);
    free(k->folder);
    free(k);
}

static void landed(struct engine *en, struct keeper *k, uint64_t bytes)
{
    uint64_t before = atomic_fetch_sub(&k->flight, bytes);
    if (before <= KEEPER_FLIGHT_MAX || before - bytes > KEEPER_FLIGHT_MAX)
        return;
    pthread_mutex_lock(&en->lock);
    en->keeping.drained = true; /* it was parked for this */
    pthread_cond_signal(&en->engine_cond);
    pthread_mutex_unlock(&en->lock);
}

static void item_run(struct engine *en, struct keep_item *it)
{
    struct keeper *k = it->k;
    MAGIC_OK(k, KEEPER_MAGIC);
    int rc = item_write(en, it, &it->err);
    k->last = it->number;
    if (it->reset)
        k->failing = k->dead = false;
    if (rc == BC_OK && k->failing && !it->last) /* written now, but the engine does not know yet */
        rc = err_set(&it->err, BC_EIO, "state_dir", "what came before it could not be written");
    landed(en, k, it->bytes);
    if (rc == BC_OK) {
        publish(en, it->reports);
    } else {
        it->err.code = rc;
        k->failing = !it->last;
        reports_refuse(en, it);
        log_error("engine.durable", "%s: %s", k->folder, it->err.text);
    }
    if (it->last)
        keeper_free(en, k);
    else
        dirty_add(en, k);
    if (rc == BC_OK || it->last)
        item_free(en, &it);
    else
        item_back(en, it);
}

/* Nobody asked for this one: if it fails, the engine is told by an empty item. */
static void sync_run(struct engine *en, struct keeper *k)
{
    struct err e = {0};
    int rc = journal_sync(k->journal, &e);
    if (rc == BC_OK)
        return;
    struct keep_item *it = calloc(1, sizeof *it);
    if (it == NULL)
        bc_panic(__FILE__, __LINE__, "out of memory for a journal");
    e.code = rc;
    k->failing = true;
    *it = (struct keep_item){.k = k, .session = k->session, .number = k->last, .err = e};
    item_back(en, it);
}

/* Those that have waited long enough. */
static void dirty_sync(struct engine *en, uint64_t now_us)
{
    for (struct keeper *k = en->keeping.dirty, *next; k != NULL; k = next) {
        next = k->next_dirty;
        if (now_us - k->dirty_us < KEEPER_SYNC_US)
            continue;
        dirty_remove(en, k);
        sync_run(en, k);
    }
}

static struct keep_item *keeper_take(struct engine *en)
{
    pthread_mutex_lock(&en->lock);
    struct keep_item *it = en->keeping.queue;
    if (it != NULL && (en->keeping.queue = it->next) == NULL)
        en->keeping.queue_tail = &en->keeping.queue;
    pthread_mutex_unlock(&en->lock);
    return it;
}

/* Until an item comes, or the oldest dirty file wants to be synced. False: stop. */
static bool keeper_wait(struct engine *en)
{
    uint64_t until_us = UINT64_MAX;
    for (const struct keeper *k = en->keeping.dirty; k != NULL; k = k->next_dirty)
        until_us = BC_MIN(until_us, k->dirty_us + KEEPER_SYNC_US);
    struct timespec until = {.tv_sec = (time_t)(until_us / 1000000),
                             .tv_nsec = (long)(until_us % 1000000) * 1000};
    int late = 0;
    pthread_mutex_lock(&en->lock);
    while (en->keeping.queue == NULL && !en->keeping.stopping && late == 0)
        late = until_us != UINT64_MAX ? pthread_cond_timedwait(&en->keeper_cond, &en->lock, &until)
                                      : pthread_cond_wait(&en->keeper_cond, &en->lock);
    bool go_on = !en->keeping.stopping || en->keeping.queue != NULL;
    pthread_mutex_unlock(&en->lock);
    return go_on;
}

void keepers_drain(struct engine *en)
{
    for (struct keep_item *it; (it = keeper_take(en)) != NULL;)
        item_run(en, it);
    dirty_sync(en, engine_now(en));
}

void *keeper_main(void *arg)
{
    struct engine *en = arg;
    while (keeper_wait(en))
        keepers_drain(en);
    while (en->keeping.dirty != NULL) {
        struct keeper *k = en->keeping.dirty;
        dirty_remove(en, k);
        sync_run(en, k);
    }
    return NULL;
}

/* ---- life ---- */

void keepers_open(struct engine *en)
{
    en->keeping.queue_tail = &en->keeping.queue;
    en->keeping.back_tail = &en->keeping.back;
}

/* The engine has ended and its last items are in the queue. */
void keepers_stop(struct engine *en)
{
    pthread_mutex_lock(&en->lock);
    en->keeping.stopping = true;
    pthread_cond_signal(&en->keeper_cond);
    pthread_mutex_unlock(&en->lock);
}

void keepers_close(struct engine *en)
{
    keepers_drain(en);
    keepers_back(en);
    leftovers_remove(en, NULL);
    while (en->keeping.n_leftovers > 0)
        free(en->keeping.leftovers[--en->keeping.n_leftovers]);
    bc_assert(en->keeping.n == 0 && en->keeping.queue == NULL && en->keeping.dirty == NULL);
}
