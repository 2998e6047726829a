/* recover.c: the durable sessions of the daemon before this one.
 *
 *   STATE_DIR/durable/KEY/  journal --> whose? which model? --> snapshot, if there is a whole one that
 *     the journal knows --> story --> a session, on its way --> rows done again, in turns --> here
 *
 *   no journal: a session that was closed, or never opened: the folder goes
 *   damaged:    the folder is moved to STATE_DIR/quarantine with its reason; the others go on
 *   no model:   it stays where it is, for a start that finds one
 */
#include "core.h"
#include "log.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SNAPSHOT_HEAD_MAX (256u << 20)

/* ---- what is not recovered ---- */

static void reason_write(const char *folder, const char *why)
{
    char path[DISK_PATH_MAX + 16];
    snprintf(path, sizeof path, "%s/reason", folder);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd >= 0 && (write(fd, why, strlen(why)) < 0 || write(fd, "\n", 1) < 0))
        log_warn("engine.durable", "%s: %s", path, strerror(errno));
    if (fd >= 0)
        close(fd);
}

static void quarantine(struct engine *en, const char *key, const char *why)
{
    char from[DISK_PATH_MAX], to[DISK_PATH_MAX];
    struct err e;
    snprintf(from, sizeof from, "%s/durable/%s", en->opt.state_dir, key);
    for (unsigned n = 1; n < 10000; n++) {
        snprintf(to, sizeof to, "%s/quarantine/%s-%u", en->opt.state_dir, key, n);
        if (folders_make(to, &e) < 0 || (access(to, F_OK) < 0 && rename(from, to) == 0))
            break;
    }
    reason_write(to, why);
    log_error("engine.durable", "%s cannot be recovered: %s; it lies in %s now", key, why, to);
}

static void folder_drop(struct engine *en, const char *key)
{
    static const char *const names[] = {"snapshot", "snapshot.tmp", "journal.tmp"};
    char path[DISK_PATH_MAX];
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        snprintf(path, sizeof path, "%s/durable/%s/%s", en->opt.state_dir, key, names[i]);
        unlink(path);
    }
    snprintf(path, sizeof path, "%s/durable/%s", en->opt.state_dir, key);
    if (rmdir(path) < 0)
        log_warn("engine.durable", "%s: %s", path, strerror(errno));
}

/* ---- snapshots ---- */

/* The head of the snapshot, if it is whole and of this model: its mark; 0: there is none to use. */
static uint64_t snapshot_mark(struct engine *en, const char *path, uint64_t identity,
                              struct image **ret)
{
    const struct disk_io *io = en->opt.io;
    struct spill *sp = NULL;
    struct sess_state *st = malloc(sizeof *st);
    uint8_t *bytes = NULL;
    size_t n = 0, need = SPILL_FIXED_BYTES;
    uint64_t mark = 0;
    struct err e = {0};
    int fd = io->open(io->arg, path, O_RDONLY, 0);
    int64_t size = fd >= 0 ? io->size(io->arg, fd) : -1;
    while (st != NULL && size >= (int64_t)need && need <= SNAPSHOT_HEAD_MAX && need > n) {
        uint8_t *more = realloc(bytes, need);
        if (more == NULL)
            break;
        bytes = more;
        if (disk_read(io, fd, bytes + n, need - n, n, path, &e) < 0)
            break;
        n = need;
        if (spill_read(&sp, bytes, n, (uint64_t)size, &need, &e) < 0)
            break;
    }
    if (sp != NULL && spill_origin(sp).model == identity) {
        size_t n_state;
        const void *state = spill_state(sp, &n_state);
        if (sess_state_get(state, n_state, st, &e) == BC_OK && (*ret = image_named(path)) != NULL) {
            mark = st->mark;
            (*ret)->rows = spill_rows(sp);
            (*ret)->bytes = spill_bytes(sp);
        }
    }
    if (e.code < 0)
        log_warn("engine.durable", "%s: %s; it is not used", path, e.text);
    if (fd >= 0)
        io->close(io->arg, fd);
    spill_free(&sp);
    free(bytes);
    free(st);
    return mark;
}

/* ---- one session ---- */

static int model_of(struct engine *en, const struct story *st, struct model_ref **ret,
                    struct err *e)
{
    for (struct model_ref *m = models_ready(en->models); m != NULL; m = models_ready(m->next))
        if (m->info.identity == st->identity) {
            *ret = m;
            return BC_OK;
        }
    int rc = models_find(en, st->begin->model, ret, NULL);
    if (rc < 0)
        rc = models_find(en, st->begin->path, ret, e);
    if (rc < 0)
        return rc;
    if ((*ret)->state == MODEL_LOADING) {
        struct model_ref *m = *ret;
        loads_drain(en);
        struct err why = m->err;
        models_take_loaded(en);
        if (why.code < 0) {
            if (e != NULL)
                *e = why;
            return why.code;
        }
    }
    if ((*ret)->info.identity != st->identity)
        return err_set(e, BC_ESTATE, "model", "the file of model %s is another one now",
                       st->begin->model);
    return BC_OK;
}

/* The session as it was created, its cache empty or away. */
static int session_make(struct engine *en, const struct story *st, struct session **ret,
                        struct err *e)
{
    const struct sess_state *b = st->begin;
    struct command open = {.type = CMD_OPEN, .uid = b->uid};
    struct session *s;
    open.u.open.evict = b->ask;
    open.u.open.kv_type = b->kv_type;
    open.u.open.positions = b->rerotate ? "rerotate" : "keep";
    open.u.open.name = b->name;
    open.u.open.chat_template = b->chat_template;
    open.u.open.priority = b->priority;
    open.u.open.weight = b->weight;
    open.u.open.id = st->id;
    memcpy(open.u.open.client, b->client, sizeof open.u.open.client);
    int rc = sess_open(en, &open, st->m, &s, e);
    if (rc < 0)
        return rc;
    if ((rc = sess_state_apply(s, b, 0, e)) < 0) {
        sess_close(en, &s);
        return rc;
    }
    *ret = s;
    return BC_OK;
}

/* What the loop must know of it; then the reports of its last request, as they were numbered. */
static void tell(struct engine *en, struct session *s, struct story *st)
{
    struct report *r = report_new(REP_RECOVERED, 0);
    en->keeping.telling = true;
    r->session = s->id;
    sess_info(en, s, &r->u.recovered.info);
    memcpy(r->u.recovered.token, st->token, sizeof r->u.recovered.token);
    r->u.recovered.seq = st->seq_first;
    r->u.recovered.busy = st->r->resume != NULL;
    r->u.recovered.port = port_share(s->port);
    report_push(en, r);
    while (st->reports != NULL) {
        r = st->reports;
        st->reports = r->next;
        r->next = NULL;
        report_stream(en, s, r);
    }
    st->reports_tail = &st->reports;
    en->keeping.telling = false;
    s->keeper->seq = st->seq;
}

static int keeper_attach(struct engine *en, struct session *s, const char *journal,
                         const struct journal_scan *scan, struct err *e)
{
    struct keeper *k = keeper_new(en, s);
    if (k == NULL)
        return err_nomem(e, sizeof *k);
    int rc = journal_open(&k->journal, en->opt.io, journal, scan, e);
    if (rc < 0) {
        s->keeper = NULL;
        en->keeping.n--;
        keeper_discard(&k);
        return rc;
    }
    return BC_OK;
}

/* On its way: from the snapshot, or from nothing. */
static void set_out(struct engine *en, struct session *s, struct story *st, struct image **image)
{
    struct err e = {0};
    bool at_rest = st->r->n_ops == 0 && st->r->resume == NULL;
    if (!st->from_snapshot) {
        replay_begin(en, s, &st->r);
        return;
    }
    s->lodging.image = *image;
    *image = NULL;
    s->lodging.place = PLACE_AWAY;
    sess_state_take(s, st->r->end);
    s->budget_bytes = budget_bytes(&st->r->end->params, pool_page_bytes(s->pool));
    s->replay_after = st->r;
    st->r = NULL;
    queue_face(en, s);
    if (at_rest) { /* it comes when it is called */
        durable_note(s, DURABLE_READY);
        return;
    }
    if (tier_fetch(en, s, &e) < 0)
        log_warn("engine.durable", "%s: %s", s->name, e.text); /* the next use tries again */
}

static int story_of(struct engine *en, const char *folder, struct story *st, struct image **image,
                    struct journal_scan *scan, struct err *e)
{
    char path[DISK_PATH_MAX + 16];
    snprintf(path, sizeof path, "%s/journal", folder);
    int rc = story_whose(st, path, e);
    if (rc < 0 || (rc = model_of(en, st, &st->m, e)) < 0)
        return rc;
    snprintf(path, sizeof path, "%s/snapshot", folder);
    st->snapshot_mark = snapshot_mark(en, path, st->identity, image);
    snprintf(path, sizeof path, "%s/journal", folder);
    if ((rc = story_read(st, path, scan, e)) < 0)
        return rc;
    if (st->snapshot_mark != 0 && !st->from_snapshot)
        log_warn("engine.durable",
                 "%s: its snapshot is not one that it tells of: all is done again", path);
    if (scan->state == JOURNAL_TORN)
        log_warn("engine.durable", "%s: its last records never reached the disk: cut at byte %llu",
                 path, (unsigned long long)scan->end);
    if (st->attempts >= DURABLE_ATTEMPTS_MAX)
        return err_set(e, BC_ECORRUPT, "journal", "%u daemons ended while they rebuilt it",
                       st->attempts);
    if (st->attempts_here >= DURABLE_ATTEMPTS_MAX && st->r->resume != NULL)
        err_set(&st->r->give_up, BC_EINTERNAL, "session",
                "%u daemons ended while this request ran: it is not tried again",
                st->attempts_here);
    return BC_OK;
}

static int recover_one(struct engine *en, const char *key, struct err *e)
{
    char folder[DISK_PATH_MAX], path[DISK_PATH_MAX + 16];
    struct story st;
    struct journal_scan scan;
    struct image *image = NULL;
    struct session *s = NULL;
    snprintf(folder, sizeof folder, "%s/durable/%s", en->opt.state_dir, key);
    snprintf(path, sizeof path, "%s/journal", folder);
    int rc = story_open(&st, en, e);
    if (rc < 0)
        return rc;
    rc = story_of(en, folder, &st, &image, &scan, e);
    if (rc == BC_OK)
        rc = session_make(en, &st, &s, e);
    if (rc == BC_OK && (rc = keeper_attach(en, s, path, &scan, e)) < 0)
        sess_close(en, &s);
    if (rc == BC_OK) {
        tell(en, s, &st);
        durable_note(s, DURABLE_ATTEMPT);
        set_out(en, s, &st, &image);
    }
    if (image != NULL)
        image_drop(en, &image);
    story_close(&st);
    return rc;
}

/* ---- all of them ---- */

static bool is_there(const struct engine *en, const char *key)
{
    char path[DISK_PATH_MAX];
    snprintf(path, sizeof path, "%s/durable/%s/journal", en->opt.state_dir, key);
    return access(path, F_OK) == 0;
}

void recover_all(struct engine *en)
{
    char path[DISK_PATH_MAX];
    struct dirent *ent;
    unsigned n = 0, all = 0;
    if (en->opt.state_dir == NULL)
        return;
    snprintf(path, sizeof path, "%s/durable", en->opt.state_dir);
    DIR *dir = opendir(path);
    while (dir != NULL && (ent = readdir(dir)) != NULL) {
        struct err e = {0};
        if (ent->d_name[0] == '.')
            continue;
        if (!is_there(en, ent->d_name)) {
            folder_drop(en, ent->d_name);
            continue;
        }
        all++;
        int rc = recover_one(en, ent->d_name, &e);
        n += rc == BC_OK;
        if (rc == BC_ECORRUPT || rc == BC_EVERSION)
            quarantine(en, ent->d_name, e.text);
        else if (rc < 0)
            log_error("engine.durable", "%s is not recovered now: %s", ent->d_name, e.text);
    }
    if (dir != NULL)
        closedir(dir);
    if (all > 0)
        log_info("engine.durable", "%u of %u durable sessions are back", n, all);
}

/* ---- later ---- */

/* What the journal says cannot be done: the session ends here; its folder is kept for people. */
void recover_give_up(struct engine *en, struct session *s, const struct err *e)
{
    char key[96];
    struct report *r = report_new(REP_CLOSED, 0);
    snprintf(key, sizeof key, "%u-%s", s->uid, s->name);
    r->session = s->id;
    replay_stop(s);
    keeper_leave(en, s, false);
    report_push(en, r);
    sess_close(en, &s);
    if (e->code == BC_ECORRUPT || e->code == BC_EVERSION)
        quarantine(en, key, e->text);
}

/* The snapshot did not come back whole, or there was no room for what the journal says: the journal has everything. */
int recover_rebuild(struct engine *en, struct session *s, struct err *e)
{
    char path[DISK_PATH_MAX];
    struct story st;
    struct journal_scan scan;
    int rc = story_open(&st, en, e);
    if (rc < 0)
        return rc;
    st.m = s->m;
    snprintf(path, sizeof path, "%s/journal", s->keeper->folder);
    rc = story_read(&st, path, &scan, e);
    bool behind = st.r->end->stream != s->stream || st.r->resume != NULL;
    if (rc == BC_OK && s->replay_after == NULL && behind)
        rc = err_set(e, BC_ESTATE, "journal", "the journal is behind its session");
    if (rc == BC_OK) {
        s->stream = 0;
        evict_state_clear(s->ev);
        rc = sess_state_apply(s, st.begin, 0, e);
    }
    if (rc == BC_OK) {
        if (s->lodging.image != NULL)
            log_warn("engine.durable",
                     "session %llu (%s): its snapshot is damaged: all is done again",
                     (unsigned long long)s->id, s->name);
        if (s->replay_after != NULL)
            st.r->cancel = s->replay_after->cancel;
        replay_free(&s->replay_after);
        replay_begin(en, s, &st.r);
    }
    story_close(&st);
    return rc;
}
