/* dispatch.c: message type -> handler, and the handlers that need few lines; open.c and generate.c
 * have the others. No engine state here: what is not known to the loop is the engine's to refuse.
 * */
#include "dispatch.h"
#include "log.h"
#include <stdlib.h>
#include <string.h>

/* ---- what handlers share */

bool server_admin(const struct server *s, uint32_t uid)
{
    (void)s;
    return uid == 0 || uid == (uint32_t)geteuid();
}

int request_new(struct conn *c, uint32_t request_id, enum command_type type, uint64_t session,
                struct command **ret, struct err *e)
{
    struct command *cmd = command_new(type, c->node.id, request_id);
    if (cmd == NULL)
        return err_nomem(e, sizeof *cmd);
    cmd->uid = c->uid;
    cmd->admin = c->admin;
    cmd->session = session;
    *ret = cmd;
    return BC_OK;
}

int request_post(struct conn *c, struct command **cmd, enum frame_type type, uint64_t bytes,
                 struct stream *st, struct err *e)
{
    struct pending *p;
    int rc = pending_add(c, (*cmd)->request_id, (uint16_t)type, bytes, &p, e);
    if (rc < 0) {
        command_free(cmd);
        return rc;
    }
    p->stream = st;
    if ((rc = engine_post(c->server->en, cmd, e)) < 0) {
        command_free(cmd);
        pending_free(c->server, &p, false);
    } else if (st != NULL) {
        stream_asked(st);
    }
    return rc;
}

int any_stream(struct conn *c, bool has, uint64_t session, struct stream **ret, struct err *e)
{
    if (!has)
        return err_set(e, BC_EINVALID, "session", "session is missing");
    struct stream *st = stream_find(c->server, session);
    if (st == NULL)
        return err_set(e, BC_EUNKNOWN, "session", "there is no session %llu",
                       (unsigned long long)session);
    if (st->uid != c->uid && !c->admin)
        return err_set(e, BC_EPERMISSION, "session", "session %llu belongs to another user",
                       (unsigned long long)session);
    *ret = st;
    return BC_OK;
}

int own_stream(struct conn *c, bool has, uint64_t session, struct stream **ret, struct err *e)
{
    struct stream *st;
    int rc = any_stream(c, has, session, &st, e);
    if (rc < 0)
        return rc;
    if (st->conn != c)
        return err_set(e, BC_ESTATE, "session", "session %llu is not attached to this connection",
                       (unsigned long long)session);
    *ret = st;
    return BC_OK;
}

static bool is_path(const char *model)
{
    size_t n = strlen(model);
    return strchr(model, '/') != NULL || (n > 5 && strcmp(model + n - 5, ".gguf") == 0);
}

int model_argument(struct conn *c, const ProtobufCBinaryData *b, char *ret, size_t size,
                   struct err *e)
{
    struct server *s = c->server;
    char name[4096];
    int rc = field_text("model", b, name, sizeof name, e);
    if (rc < 0)
        return rc;
    size_t n = strlen(name);
    if (n > 5 && strchr(name, '/') == NULL && strcmp(name + n - 5, ".gguf") == 0)
        name[n - 5] = '\0'; /* a file of the models folder, not of wherever the daemon stands */
    if (is_path(name) && !c->admin)
        return err_set(e, BC_EPERMISSION, "model",
                       "a model is named by its path only by root or the daemon's own user");
    if (is_path(name) || s->opt.model_path == NULL ||
        !s->opt.model_path(s->opt.arg, name, ret, size))
        snprintf(ret, size, "%s", name); /* a name that the engine knows, or will refuse */
    return BC_OK;
}

/* ---- short handlers */

static int on_cancel(struct conn *c, uint32_t id, const ProtobufCMessage *pm, struct err *e)
{
    const Backcast__Cancel *m = (const Backcast__Cancel *)pm;
    struct stream *st;
    struct command *cmd;
    int rc = own_stream(c, m->has_session, m->session, &st, e);
    if (rc < 0)
        return rc;
    if (st->upload.command != NULL) {
        struct err why;
        err_set(&why, BC_ECANCELLED, "", "cancelled before the prompt was complete");
        upload_fail(st, &why);
        Backcast__Done done = BACKCAST__DONE__INIT;
        conn_reply(c, id, FRAME_DONE, &done.base, NULL, 0);
        return BC_OK;
    }
    if ((rc = request_new(c, id, CMD_CANCEL, m->session, &cmd, e)) < 0)
        return rc;
    cmd->u.cancel.reason = END_CANCELLED;
    return request_post(c, &cmd, FRAME_CANCEL, 0, NULL, e);
}

static int on_set_budget(struct conn *c, uint32_t id, const ProtobufCMessage *pm, struct err *e)
{
    const Backcast__SetBudget *m = (const Backcast__SetBudget *)pm;
    struct stream *st;
    struct command *cmd;
    int rc = any_stream(c, m->has_session, m->session, &st, e);
    if (rc < 0 || (rc = field_range("budget_tokens", m->budget_tokens, 0, TOKENS_MAX, e)) < 0 ||
        (rc = field_range("keep_tokens", m->keep_tokens, 0, TOKENS_MAX, e)) < 0)
        return rc;
    if ((m->budget_bytes != 0) == (m->budget_tokens != 0))
        return err_set(e, BC_EINVALID, "budget_bytes",
                       "either budget_bytes or budget_tokens is given, and not 0");
    if ((rc = request_new(c, id, CMD_BUDGET, m->session, &cmd, e)) < 0)
        return rc;
    cmd->u.budget.bytes = m->budget_bytes;
    cmd->u.budget.tokens = m->budget_tokens;
    cmd->u.budget.keep = m->keep_tokens;
    return request_post(c, &cmd, FRAME_SET_BUDGET, 0, NULL, e);
}

static int on_prune(struct conn *c, uint32_t id, const ProtobufCMessage *pm, struct err *e)
{
    const Backcast__Prune *m = (const Backcast__Prune *)pm;
    struct stream *st;
    struct command *cmd;
    int rc = any_stream(c, m->has_session, m->session, &st, e);
    if (rc < 0 || (rc = field_range("keep_tokens", m->keep_tokens, 0, TOKENS_MAX, e)) < 0 ||
        (rc = request_new(c, id, CMD_PRUNE, m->session, &cmd, e)) < 0)
        return rc;
    cmd->u.budget.keep = m->keep_tokens;
    return request_post(c, &cmd, FRAME_PRUNE, 0, NULL, e);
}

static int on_scores(struct conn *c, uint32_t id, const ProtobufCMessage *pm, struct err *e)
{
    const Backcast__Scores *m = (const Backcast__Scores *)pm;
    struct stream *st;
    struct command *cmd;
    int rc = any_stream(c, m->has_session, m->session, &st, e);
    if (rc < 0)
        return rc;
    bool own = st->conn == c;
    if (own && st->upload.command != NULL)
        return err_set(e, BC_EBUSY, "session", "session %llu has a prompt under way",
                       (unsigned long long)m->session);
    if (!own && (c->features & FEATURE_SCORES_FD) == 0)
        return err_set(e, BC_EUNSUPPORTED, "session",
                       "scores of a session of another connection need the feature SCORES_FD");
    if ((rc = request_new(c, id, CMD_SCORES, m->session, &cmd, e)) < 0)
        return rc;
    cmd->u.scores.dropped = m->dropped;
    return request_post(c, &cmd, FRAME_SCORES, 0, own ? st : NULL, e);
}

static int on_close(struct conn *c, uint32_t id, const ProtobufCMessage *pm, struct err *e)
{
    const Backcast__Close *m = (const Backcast__Close *)pm;
    struct stream *st;
    struct command *cmd;
    int rc = any_stream(c, m->has_session, m->session, &st, e);
    if (rc < 0 || (rc = request_new(c, id, CMD_CLOSE, m->session, &cmd, e)) < 0)
        return rc;
    return request_post(c, &cmd, FRAME_CLOSE, 0, NULL, e);
}

static int on_save(struct conn *c, uint32_t id, const ProtobufCMessage *pm, struct err *e)
{
    const Backcast__Save *m = (const Backcast__Save *)pm;
    struct stream *st;
    struct command *cmd;
    char name[sizeof cmd->u.save.name];
    int rc = any_stream(c, m->has_session, m->session, &st, e);
    if (rc < 0 || (rc = field_name("name", &m->name, name, sizeof name, e)) < 0)
        return rc;
    if (st->upload.command != NULL)
        return err_set(e, BC_EBUSY, "session", "session %llu has a prompt under way",
                       (unsigned long long)m->session);
    if ((rc = request_new(c, id, CMD_SAVE, m->session, &cmd, e)) < 0)
        return rc;
    memcpy(cmd->u.save.name, name, sizeof name);
    return request_post(c, &cmd, FRAME_SAVE, 0, NULL, e);
}

static int saved_request(struct conn *c, uint32_t id, enum command_type type, const char *name,
                         struct err *e)
{
    struct command *cmd;
    int rc = request_new(c, id, type, 0, &cmd, e);
    if (rc < 0)
        return rc;
    snprintf(cmd->u.save.name, sizeof cmd->u.save.name, "%s", name);
    return request_post(c, &cmd, type == CMD_SAVED ? FRAME_LIST_SAVED : FRAME_UNSAVE, 0, NULL, e);
}

static int on_list_saved(struct conn *c, uint32_t id, const ProtobufCMessage *pm, struct err *e)
{
    const Backcast__ListSaved *m = (const Backcast__ListSaved *)pm;
    char after[sizeof((struct command *)0)->u.save.name] = "";
    int rc = m->has_after ? field_name("after", &m->after, after, sizeof after, e) : BC_OK;
    return rc < 0 ? rc : saved_request(c, id, CMD_SAVED, after, e);
}

static int on_unsave(struct conn *c, uint32_t id, const ProtobufCMessage *pm, struct err *e)
{
    const Backcast__Unsave *m = (const Backcast__Unsave *)pm;
    char name[sizeof((struct command *)0)->u.save.name];
    int rc = field_name("name", &m->name, name, sizeof name, e);
    return rc < 0 ? rc : saved_request(c, id, CMD_UNSAVE, name, e);
}

static int on_stat(struct conn *c, uint32_t id, const ProtobufCMessage *pm, struct err *e)
{
    const Backcast__Stat *m = (const Backcast__Stat *)pm;
    struct stream *st;
    struct command *cmd;
    int rc = BC_OK;
    if (m->has_session && (rc = any_stream(c, true, m->session, &st, e)) < 0)
        return rc;
    if ((rc = request_new(c, id, CMD_STAT, m->session, &cmd, e)) < 0)
        return rc;
    return request_post(c, &cmd, FRAME_STAT, 0, NULL, e);
}

static int model_command(struct conn *c, uint32_t id, enum command_type type, enum frame_type frame,
                         const ProtobufCBinaryData *model, struct err *e)
{
    char path[4096];
    struct command *cmd;
    if (!c->admin)
        return err_set(e, BC_EPERMISSION, "",
                       "models are loaded and unloaded by root or the daemon's own user");
    if (model->len == 0)
        return err_set(e, BC_EINVALID, "model", "model is missing");
    int rc = model_argument(c, model, path, sizeof path, e);
    if (rc < 0 || (rc = request_new(c, id, type, 0, &cmd, e)) < 0)
        return rc;
    if ((cmd->u.load.path = strdup(path)) == NULL) {
        command_free(&cmd);
        return err_nomem(e, strlen(path));
    }
    return request_post(c, &cmd, frame, 0, NULL, e);
}

static int on_load(struct conn *c, uint32_t id, const ProtobufCMessage *pm, struct err *e)
{
    const Backcast__LoadModel *m = (const Backcast__LoadModel *)pm;
    return model_command(c, id, CMD_LOAD, FRAME_LOAD_MODEL, &m->model, e);
}

static int on_unload(struct conn *c, uint32_t id, const ProtobufCMessage *pm, struct err *e)
{
    const Backcast__UnloadModel *m = (const Backcast__UnloadModel *)pm;
    return model_command(c, id, CMD_UNLOAD, FRAME_UNLOAD_MODEL, &m->model, e);
}

/* ---- the table */

static const struct {
    uint16_t type;
    handler_fn *handle;
} handlers[] = {
    {FRAME_HELLO, dispatch_hello},
    {FRAME_OPEN_SESSION, dispatch_open},
    {FRAME_ATTACH, dispatch_attach},
    {FRAME_CLOSE, on_close},
    {FRAME_GENERATE, dispatch_generate},
    {FRAME_CANCEL, on_cancel},
    {FRAME_SET_BUDGET, on_set_budget},
    {FRAME_PRUNE, on_prune},
    {FRAME_SCORES, on_scores},
    {FRAME_FORK, dispatch_fork},
    {FRAME_SAVE, on_save},
    {FRAME_RESTORE, dispatch_restore},
    {FRAME_LIST_SAVED, on_list_saved},
    {FRAME_UNSAVE, on_unsave},
    {FRAME_STAT, on_stat},
    {FRAME_LOAD_MODEL, on_load},
    {FRAME_UNLOAD_MODEL, on_unload},
};

static handler_fn *handler_of(unsigned type)
{
    for (size_t i = 0; i < ARRAY_LEN(handlers); i++)
        if (handlers[i].type == type)
            return handlers[i].handle;
    return NULL;
}

static int unpack(struct conn *c, const struct frame_head *h, const uint8_t *payload,
                  ProtobufCMessage **ret, struct err *e)
{
    static const struct frame_limits limits = {FRAME_FIELDS_MAX, FRAME_DEPTH_MAX};
    const char *why = "";
    int rc = frame_unpack(h, payload, &limits, &c->server->arena, ret, &why);
    if (rc == WIRE_OK)
        return BC_OK;
    return err_set(e, rc == WIRE_ENOMEM ? BC_ENOMEM : BC_EINVALID, "", "%s: %s",
                   frame_name(h->type), why);
}

void dispatch_frame(struct conn *c, const struct frame_head *h, const uint8_t *payload)
{
    struct err e;
    ProtobufCMessage *m;
    handler_fn *handle = handler_of(h->type);
    if (c->state == CONN_HELLO && h->type != FRAME_HELLO) {
        conn_fail(c, BC_EPROTOCOL, "the first frame is not Hello");
        return;
    }
    log_trace("ipc", "connection %llu: %s, %u bytes, request %u", (unsigned long long)c->node.id,
              handle != NULL ? frame_name(h->type) : "unknown type", h->len, h->request_id);
    if (handle == NULL) {
        if ((h->flags & FRAME_CRITICAL) == 0)
            return;
        err_set(&e, BC_EUNKNOWN, "type", "message type %u is unknown", h->type);
        conn_error(c, h->request_id, &e);
        return;
    }
    int rc = unpack(c, h, payload, &m, &e);
    if (rc == BC_OK && c->server->draining)
        rc = err_set(&e, BC_ECLOSED, "", "the daemon is stopping");
    if (rc == BC_OK)
        rc = handle(c, h->request_id, m, &e);
    if (rc < 0)
        conn_error(c, h->request_id, &e);
}
