/* queue.c: the engine's borders: commands in, reports out, and the few words that cross threads.
 *
 *   engine_post --prompt of an idle session--> intake --> inbox --> engine --> made --> outbox
 *        '----------everything else-------------------------^      (a step)   (publish)   |
 *                                                                              engine_take'
 *
 * Everything here stands under one lock that is held for a few instructions. A prompt goes to
 * intake without a detour through the engine thread, which may be in the middle of a pass: that is
 * what session.face is for. Bounds: ENGINE_INBOX_MAX commands under way, one answer each, and a
 * session's stream stops by itself (sess_parked).
 */
#include "core.h"
#include <stdlib.h>
#include <string.h>
#include <time.h>

void queue_open(struct engine *en)
{
    pthread_condattr_t attr;
    en->inbox_tail = &en->inbox;
    en->intake_tail = &en->intake;
    en->outbox_tail = &en->outbox;
    en->made_tail = &en->made;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&en->lock, NULL);
    pthread_cond_init(&en->engine_cond, &attr);
    pthread_cond_init(&en->intake_cond, &attr);
    pthread_cond_init(&en->loads_cond, &attr);
    pthread_cond_init(&en->disk_cond, &attr);
    pthread_cond_init(&en->keeper_cond, &attr);
    pthread_condattr_destroy(&attr);
}

void queue_close(struct engine *en)
{
    bc_assert(en->inbox == NULL && en->intake == NULL && en->outbox == NULL && en->commands == 0);
    pthread_cond_destroy(&en->keeper_cond);
    pthread_cond_destroy(&en->disk_cond);
    pthread_cond_destroy(&en->loads_cond);
    pthread_cond_destroy(&en->intake_cond);
    pthread_cond_destroy(&en->engine_cond);
    pthread_mutex_destroy(&en->lock);
}

void queue_stop(struct engine *en)
{
    pthread_mutex_lock(&en->lock);
    en->stopping = true;
    pthread_cond_broadcast(&en->engine_cond);
    pthread_cond_broadcast(&en->intake_cond);
    pthread_cond_broadcast(&en->loads_cond);
    pthread_cond_broadcast(&en->disk_cond);
    pthread_mutex_unlock(&en->lock);
}

bool queue_stopping(struct engine *en)
{
    pthread_mutex_lock(&en->lock);
    bool stopping = en->stopping;
    pthread_mutex_unlock(&en->lock);
    return stopping;
}

static void inbox_push(struct engine *en, struct command *c)
{
    c->next = NULL;
    *en->inbox_tail = c;
    en->inbox_tail = &c->next;
    pthread_cond_signal(&en->engine_cond);
}

static void intake_push(struct engine *en, struct command *c)
{
    c->next = NULL;
    *en->intake_tail = c;
    en->intake_tail = &c->next;
    pthread_cond_signal(&en->intake_cond);
}

/* A prompt that may be rendered and tokenised now. False: the engine will say why not. */
static bool to_intake(struct engine *en, struct command *c)
{
    struct session *s = en->slots[c->session & (en->n_slots - 1)];
    if (s == NULL || s->id != c->session || s->face.conn != c->conn)
        return false;
    struct session_face *f = &s->face;
    if (f->busy) {
        c->u.generate.failed = err_set(&c->u.generate.err, BC_EBUSY, "session",
                                       "session %llu has a request under way: one at a time",
                                       (unsigned long long)c->session);
        return false;
    }
    f->busy = true;
    f->serial = c->own.serial;
    f->gen_conn = c->conn;
    f->gen_request = c->request_id;
    c->own.m = s->m;
    c->own.chat = s->chat;
    c->own.fresh = f->fresh;
    c->own.endless = s->rerotate; /* for life, as m and chat are */
    c->u.generate.chat = f->chat;
    s->m->prompts++;
    return true;
}

int engine_post(struct engine *en, struct command **pc, struct err *e)
{
    MAGIC_OK(en, ENGINE_MAGIC);
    struct command *c = *pc;
    bc_assert(c != NULL && c->next == NULL);
    pthread_mutex_lock(&en->lock);
    if (en->stopping) {
        pthread_mutex_unlock(&en->lock);
        return err_set(e, BC_ECLOSED, "", "the daemon is stopping");
    }
    /* what only frees is never refused: its number is bounded by the connections */
    if (en->commands >= ENGINE_INBOX_MAX && c->type != CMD_GONE) {
        pthread_mutex_unlock(&en->lock);
        return err_amount(e, BC_EBUSY, "", ENGINE_INBOX_MAX + 1, ENGINE_INBOX_MAX,
                          "%u requests are under way: no more fit", ENGINE_INBOX_MAX);
    }
    en->commands++;
    c->own.serial = ++en->serial;
    struct session_port *port = c->type == CMD_OPEN      ? c->u.open.port
                                : c->type == CMD_ATTACH  ? c->u.attach.port
                                : c->type == CMD_RESTORE ? c->u.restore.port
                                : c->type == CMD_FORK    ? c->u.fork.port
                                                         : NULL;
    if (port != NULL) {
        port->refs++;
        c->own.holds_port = true;
    }
    if (c->type == CMD_GENERATE && to_intake(en, c))
        intake_push(en, c);
    else
        inbox_push(en, c);
    *pc = NULL;
    pthread_mutex_unlock(&en->lock);
    return BC_OK;
}

void queue_to_engine(struct engine *en, struct command *c)
{
    pthread_mutex_lock(&en->lock);
    inbox_push(en, c);
    pthread_mutex_unlock(&en->lock);
}

void queue_inbox_take(struct engine *en, struct command **ret)
{
    pthread_mutex_lock(&en->lock);
    *ret = en->inbox;
    en->inbox = NULL;
    en->inbox_tail = &en->inbox;
    pthread_mutex_unlock(&en->lock);
}

void queue_command_done(struct engine *en, struct command **c)
{
    pthread_mutex_lock(&en->lock);
    bc_assert(en->commands > 0);
    en->commands--;
    if ((*c)->own.m != NULL)
        (*c)->own.m->prompts--;
    pthread_mutex_unlock(&en->lock);
    command_free(c);
}

bool queue_wait(struct engine *en, uint64_t until_us)
{
    struct timespec until = {.tv_sec = (time_t)(until_us / 1000000),
                             .tv_nsec = (long)(until_us % 1000000) * 1000};
    bool late = false;
    pthread_mutex_lock(&en->lock);
    while (en->inbox == NULL && en->n_loaded == 0 && en->tier.done == NULL &&
           en->keeping.back == NULL && !en->keeping.drained && !en->stopping && !late) {
        if (until_us != UINT64_MAX)
            late = pthread_cond_timedwait(&en->engine_cond, &en->lock, &until) != 0;
        else
            pthread_cond_wait(&en->engine_cond, &en->lock);
    }
    bool go_on = !en->stopping;
    pthread_mutex_unlock(&en->lock);
    return go_on;
}

void queue_face(struct engine *en, struct session *s)
{
    pthread_mutex_lock(&en->lock);
    s->face.conn = s->conn;
    const struct replay *r = s->replay;
    s->face.chat = r != NULL ? r->end->chat : s->chat_state;
    s->face.fresh =
        r != NULL ? r->end->stream == 0 && !r->end->has_pending : s->stream == 0 && !s->has_pending;
    bool resumes = (r != NULL && r->resume != NULL) ||
                   (s->replay_after != NULL && s->replay_after->resume != NULL);
    s->face.busy =
        (s->req != NULL && s->req->kind != REQUEST_REPLAY) || resumes || s->face.serial != 0;
    pthread_mutex_unlock(&en->lock);
}

bool queue_has_prompt(struct engine *en, struct session *s)
{
    pthread_mutex_lock(&en->lock);
    bool has = s->face.serial != 0;
    pthread_mutex_unlock(&en->lock);
    return has;
}

bool queue_prompt_arrived(struct engine *en, struct session *s, const struct command *c)
{
    pthread_mutex_lock(&en->lock);
    struct session_face *f = &s->face;
    bool alive = c->own.serial > f->dead_serial;
    if (f->serial == c->own.serial)
        f->serial = 0;
    pthread_mutex_unlock(&en->lock);
    return alive;
}

void queue_prompt_back(struct engine *en, struct session *s, const struct command *c)
{
    pthread_mutex_lock(&en->lock);
    s->face.serial = c->own.serial;
    pthread_mutex_unlock(&en->lock);
}

bool queue_prompt_cancel(struct engine *en, struct session *s, uint64_t *ret_conn,
                         uint32_t *ret_request)
{
    pthread_mutex_lock(&en->lock);
    struct session_face *f = &s->face;
    bool there = f->serial != 0;
    if (there) {
        f->dead_serial = f->serial;
        f->serial = 0;
        *ret_conn = f->gen_conn;
        *ret_request = f->gen_request;
    }
    pthread_mutex_unlock(&en->lock);
    return there;
}

static void refuse_list(struct engine *en, struct command **list, const struct err *e)
{
    while (*list != NULL) {
        struct command *c = *list;
        *list = c->next;
        c->next = NULL;
        report_error(en, c, e);
        queue_command_done(en, &c);
    }
}

void queue_refuse_all(struct engine *en, const struct err *e)
{
    for (struct model_ref *m = en->models; m != NULL; m = m->next)
        refuse_list(en, &m->waiting, e);
    refuse_list(en, &en->intake, e);
    refuse_list(en, &en->inbox, e);
    en->intake_tail = &en->intake;
    en->inbox_tail = &en->inbox;
}

/* ---- reports ---- */

void queue_answer(struct engine *en)
{
    if (en->made == NULL)
        return;
    pthread_mutex_lock(&en->lock);
    *en->outbox_tail = en->made;
    en->outbox_tail = en->made_tail;
    en->reports_out += en->n_made;
    pthread_mutex_unlock(&en->lock);
    en->made = NULL;
    en->made_tail = &en->made;
    en->n_made = 0;
    if (en->opt.wake != NULL)
        en->opt.wake(en->opt.wake_arg);
}

void queue_publish(struct engine *en)
{
    keepers_flush(en);
    queue_answer(en);
}

struct report *engine_take(struct engine *en)
{
    MAGIC_OK(en, ENGINE_MAGIC);
    pthread_mutex_lock(&en->lock);
    struct report *r = en->outbox;
    if (r != NULL) {
        if ((en->outbox = r->next) == NULL)
            en->outbox_tail = &en->outbox;
        en->reports_out--;
        r->next = NULL;
        ledger_credit(ledger_daemon(en->ledger), LEDGER_reports, r->bytes);
    }
    pthread_mutex_unlock(&en->lock);
    return r;
}
