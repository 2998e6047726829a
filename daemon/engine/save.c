/* save.c: a session as a file of its own, and a session out of such a file.
 *
 *   SAVE     session at rest --> blocks --> NAME.bcs.tmp --> fsync, rename, fsync --> DONE
 *   RESTORE  NAME.bcs --> head checked --> its model, loaded if need be --> a new session called NAME
 *              --> pages --> blocks checked and placed --> OPENED
 *
 * What is restored goes on as if it had never left: the next prompt evaluates its own tokens and no
 * others, and the next prune sees the same cache, the same values and the same parameters. */
#include "core.h"
#include "log.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- where ---- */

int save_path(const struct engine *en, uint32_t uid, const char *name, char *ret, size_t size,
              struct err *e)
{
    if (en->opt.state_dir == NULL)
        return err_set(e, BC_EUNSUPPORTED, "state_dir",
                       "this daemon has no state folder: it keeps nothing");
    if (!folders_name_ok(name))
        return err_set(e, BC_EINVALID, "name", "\"%.64s\": a name is 1 to 64 of A-Z a-z 0-9 . _ -",
                       name);
    int n = snprintf(ret, size, "%s/saved/%u/%s.bcs", en->opt.state_dir, uid, name);
    bc_assert(n > 0 && (size_t)n < size);
    return BC_OK;
}

/* One write of a file at a time. */
bool save_under_way(const struct engine *en, const char *path)
{
    for (const struct transfer *t = en->tier.transfers; t != NULL; t = t->next)
        if (t->why == WHY_SAVE && t->image != NULL && strcmp(t->image->path, path) == 0)
            return true;
    return false;
}

/* ---- save ---- */

static int save_check(const struct engine *en, const struct session *s, const char *path,
                      struct err *e)
{
    if (s->req != NULL || s->prune.active || s->scoring.active)
        return err_set(e, BC_EBUSY, "session",
                       "session %llu has a request or a prune under way: it is saved at rest",
                       (unsigned long long)s->id);
    if (s->lodging.transfer != NULL || save_under_way(en, path))
        return err_set(e, BC_EBUSY, "name", "a save is under way");
    return BC_OK;
}

static int save_begin(struct engine *en, struct session *s, const char *path, struct err *e)
{
    struct transfer *t = transfer_new(en, s, true, WHY_SAVE);
    if (t == NULL)
        return err_nomem(e, sizeof *t);
    int rc = (t->image = image_named(path)) != NULL ? BC_OK : err_nomem(e, sizeof *t->image);
    if (rc == BC_OK)
        rc = transfer_describe(en, t, e);
    if (rc == BC_OK)
        rc = transfer_buffer(en, t, e);
    if (rc < 0) {
        transfer_free(en, &t);
        return rc;
    }
    t->still = true;
    transfer_begin(en, t);
    return BC_OK;
}

void save_command(struct engine *en, struct command **pc)
{
    struct command *c = *pc;
    struct session *s;
    struct err e = {0};
    char path[DISK_PATH_MAX];
    int rc = sess_for(en, c, &s, &e);
    if (rc == BC_OK)
        rc = save_path(en, s->uid, c->u.save.name, path, sizeof path, &e);
    if (rc == BC_OK)
        rc = save_check(en, s, path, &e);
    if (rc == BC_OK)
        rc = save_begin(en, s, path, &e);
    if (rc < 0) {
        report_error(en, c, &e);
        return;
    }
    s->lodging.transfer->asker = c;
    *pc = NULL;
}

void save_done(struct engine *en, struct transfer *t)
{
    log_info("engine.save", "%s: %u tokens, %llu bytes", t->image->path, spill_rows(t->sp),
             (unsigned long long)spill_bytes(t->sp));
    en->tier.saves++;
    if (t->asker != NULL) {
        report_reply(en, t->asker, report_new(REP_DONE, 0));
        queue_command_done(en, &t->asker);
    }
    transfer_free(en, &t);
}

void save_failed(struct engine *en, struct transfer *t, const struct err *e)
{
    struct session *s = t->s;
    if (t->asker != NULL) {
        report_error(en, t->asker, e);
        queue_command_done(en, &t->asker);
    }
    transfer_free(en, &t);
    if (s != NULL)
        tier_waiting_run(en, s);
}

/* ---- restore ---- */

void restore_command(struct engine *en, struct command **pc)
{
    struct command *c = *pc;
    struct err e = {0};
    struct transfer *t = NULL;
    char path[DISK_PATH_MAX];
    int rc = save_path(en, c->uid, c->u.restore.name, path, sizeof path, &e);
    if (rc == BC_OK && sess_named(en, c->uid, c->u.restore.name) != NULL)
        rc = err_set(&e, BC_EBUSY, "name", "a session is called \"%s\" already: close it first",
                     c->u.restore.name);
    if (rc == BC_OK && (t = transfer_new(en, NULL, false, WHY_RESTORE)) == NULL)
        rc = err_nomem(&e, sizeof *t);
    if (rc == BC_OK && (t->image = image_named(path)) == NULL) {
        transfer_free(en, &t);
        rc = err_nomem(&e, sizeof *t);
    }
    if (rc < 0) {
        report_error(en, c, &e);
        return;
    }
    t->asker = c;
    *pc = NULL;
    transfer_begin(en, t);
}

/* A new session as the state says, its cache still to come. */
static int restore_session(struct engine *en, struct transfer *t, const struct sess_state *st,
                           struct model_ref *m, struct err *e)
{
    struct command *c = t->asker;
    struct command open = {.type = CMD_OPEN, .conn = c->conn, .uid = c->uid};
    struct session *s;
    open.u.open.evict = st->ask;
    open.u.open.kv_type = st->kv_type;
    open.u.open.positions = st->rerotate ? "rerotate" : "keep";
    open.u.open.name = c->u.restore.name;
    open.u.open.chat_template = st->chat_template;
    open.u.open.priority = st->priority;
    open.u.open.weight = st->weight;
    open.u.open.port = c->u.restore.port;
    memcpy(open.u.open.client, c->u.restore.client, sizeof open.u.open.client);
    int rc = sess_open(en, &open, m, &s, e);
    if (rc < 0)
        return rc;
    s->lodging.place = PLACE_COMING;
    s->lodging.transfer = t;
    s->budget_bytes = budget_bytes(&st->params, pool_page_bytes(s->pool));
    t->s = s;
    return transfer_fits(en, t, e);
}

/* The model whose weights it was made with: one that is loaded, or the one of that name or place. */
static int restore_model(struct engine *en, const struct transfer *t, const struct sess_state *st,
                         struct model_ref **ret, struct err *e)
{
    uint64_t identity = spill_origin(t->sp).model;
    for (struct model_ref *m = models_ready(en->models); m != NULL; m = models_ready(m->next))
        if (m->info.identity == identity) {
            *ret = m;
            return BC_OK;
        }
    struct err first = {0};
    if (models_find(en, st->model, ret, &first) == BC_OK)
        return BC_OK;
    return models_find(en, st->path, ret, e);
}

static int state_read(const struct transfer *t, struct sess_state **ret, struct err *e)
{
    struct sess_state *st;
    int rc = transfer_state(t, &st, e);
    if (rc < 0)
        return rc;
    if (st->uid != t->asker->uid)
        rc = err_set(e, BC_EPERMISSION, "name", "it was saved by another user");
    if (rc == BC_OK && st->stream <= spill_last_stream(t->sp) && spill_rows(t->sp) > 0)
        rc = err_set(e, BC_ECORRUPT, "state", "the session's state is older than its cache");
    if (rc < 0)
        free(st);
    else
        *ret = st;
    return rc;
}

int restore_opened(struct engine *en, struct transfer *t, struct err *e)
{
    struct sess_state *st;
    struct model_ref *m = NULL;
    int rc = state_read(t, &st, e);
    if (rc < 0)
        return rc;
    rc = restore_model(en, t, st, &m, e);
    if (rc == BC_OK && m->state == MODEL_LOADING) {
        t->phase = TRANSFER_MODEL;
        t->asker->own.transfer = t;
        models_wait(m, &t->asker);
    } else if (rc == BC_OK) {
        rc = restore_session(en, t, st, m, e);
    }
    free(st);
    return rc;
}

void restore_go_on(struct engine *en, struct command **pc, struct model_ref *m)
{
    struct transfer *t = (*pc)->own.transfer;
    struct sess_state *st;
    struct err e = {0};
    t->asker = *pc;
    *pc = NULL;
    int rc = m->state == MODEL_FAILED ? m->err.code : BC_OK;
    if (rc < 0) {
        transfer_fail(t, rc, &m->err);
        return;
    }
    if ((rc = state_read(t, &st, &e)) == BC_OK) {
        rc = restore_session(en, t, st, m, &e);
        free(st);
    }
    if (rc < 0)
        transfer_fail(t, rc, &e);
}

/* The client went away while its model was loaded. */
void restore_forget(struct engine *en, struct command *c)
{
    transfer_give_up(en, c->own.transfer);
}

void restore_done(struct engine *en, struct transfer *t)
{
    struct session *s = t->s;
    struct report *r = report_new(REP_OPENED, 0);
    if (spill_origin(t->sp).arithmetic != models_arithmetic(s->m))
        log_info("engine.save",
                 "%s: made by another build, on another processor or with other activations",
                 t->image->path);
    s->lodging.place = PLACE_HERE;
    s->last_use_us = engine_now(en);
    en->tier.restores++;
    queue_face(en, s);
    r->session = s->id;
    sess_info(en, s, &r->u.info);
    if (t->asker != NULL) {
        report_reply(en, t->asker, r);
        queue_command_done(en, &t->asker);
    } else {
        report_free(&r);
    }
    transfer_free(en, &t);
    tier_waiting_run(en, s);
}

void restore_failed(struct engine *en, struct transfer *t, const struct err *e)
{
    struct session *s = t->s;
    if (t->asker != NULL) {
        report_error(en, t->asker, e);
        queue_command_done(en, &t->asker);
    }
    transfer_free(en, &t);
    if (s != NULL)
        sess_close(en, &s);
}
