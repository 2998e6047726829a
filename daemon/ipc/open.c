/* open.c: Hello, OpenSession, Restore, Fork, Attach: how a client comes in and gets its rings. */
#include "dispatch.h"
#include "log.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAME_BYTES_MAX 65 /* with the NUL */
#define WORD_BYTES_MAX 32
#define PATH_BYTES_MAX 4096

/* ---- Hello */

static ProtobufCBinaryData text_of(const char *s)
{
    return (ProtobufCBinaryData){strlen(s), (uint8_t *)(uintptr_t)s};
}

static void hello_reply(struct conn *c, uint32_t id, uint32_t version)
{
    struct server *s = c->server;
    Backcast__HelloReply r = BACKCAST__HELLO_REPLY__INIT;
    ProtobufCBinaryData names[MODEL_NAMES_MAX];
    int fds[1];
    struct err e;
    r.has_version = r.has_features = r.has_max_frame = r.has_daemon = r.has_uid = r.has_admin = 1;
    r.version = version;
    r.max_frame = c->payload_out_max;
    r.daemon = text_of("backcastd " BACKCAST_DAEMON_VERSION);
    r.uid = c->uid;
    r.admin = c->admin;
    r.has_default_model = 1;
    r.default_model = text_of(s->en != NULL ? engine_default_model(s->en) : s->default_model);
    const char *name;
    for (unsigned i = 0; i < MODEL_NAMES_MAX && s->opt.model_name != NULL &&
                         (name = s->opt.model_name(s->opt.arg, i)) != NULL;
         i++)
        names[r.n_models++] = text_of(name);
    r.models = names;
    if ((c->features & FEATURE_STATS_PAGE) != 0 &&
        statsout_fd(s, c->account, c->admin, &fds[0], &r.stats_bytes, &e) < 0) {
        log_warn("ipc", "no stats page for uid %u: %s", c->uid, e.text);
        c->features &= ~FEATURE_STATS_PAGE;
    }
    bool page = (c->features & FEATURE_STATS_PAGE) != 0;
    r.has_stats_bytes = page;
    r.features = c->features;
    conn_reply(c, id, FRAME_HELLO_REPLY, &r.base, fds, page);
}

int dispatch_hello(struct conn *c, uint32_t id, const ProtobufCMessage *pm, struct err *e)
{
    const Backcast__Hello *m = (const Backcast__Hello *)pm;
    char client[sizeof c->client];
    if (c->state != CONN_HELLO)
        return err_set(e, BC_ESTATE, "", "Hello was said already");
    uint32_t min = m->has_min_version ? m->min_version : PROTOCOL_VERSION_MIN;
    uint32_t max = m->has_max_version ? m->max_version : min;
    uint32_t frame = m->has_max_frame ? m->max_frame : FRAME_PAYLOAD_MAX;
    int rc = field_range("max_frame", frame, FRAME_PAYLOAD_MIN_MAX, FRAME_PAYLOAD_MAX, e);
    if (rc < 0 || (rc = field_range("max_version", max, min, UINT32_MAX, e)) < 0 ||
        (rc = field_text("client", &m->client, client, sizeof client, e)) < 0)
        return rc;
    if (max < PROTOCOL_VERSION_MIN || min > PROTOCOL_VERSION_MAX) {
        err_set(e, BC_EVERSION, "max_version",
                "the client speaks versions %u to %u, the daemon %u to %u", min, max,
                PROTOCOL_VERSION_MIN, PROTOCOL_VERSION_MAX);
        conn_error(c, id, e);
        conn_close(c);
        return BC_OK;
    }
    memcpy(c->client, client, sizeof client);
    c->features = m->features & FEATURES_ALL;
    c->payload_in_max = FRAME_PAYLOAD_MAX;
    c->payload_out_max = frame;
    c->state = CONN_OPEN;
    hello_reply(c, id, BC_MIN(max, PROTOCOL_VERSION_MAX));
    return BC_OK;
}

/* ---- OpenSession */

/* The texts of an OpenSession, checked; "" where the message is silent. */
struct open_texts {
    char model[PATH_BYTES_MAX];
    char policy[WORD_BYTES_MAX], score[WORD_BYTES_MAX], trigger[WORD_BYTES_MAX],
        kv_type[WORD_BYTES_MAX], chat_template[WORD_BYTES_MAX], positions[WORD_BYTES_MAX];
    char name[NAME_BYTES_MAX];
};

static int open_texts_read(struct conn *c, const Backcast__OpenSession *m, struct open_texts *t,
                           struct err *e)
{
    memset(t, 0, sizeof *t);
    int rc = BC_OK;
    if (m->has_model && m->model.len > 0)
        rc = model_argument(c, &m->model, t->model, sizeof t->model, e);
    if (rc == BC_OK && m->has_policy)
        rc = field_text("policy", &m->policy, t->policy, sizeof t->policy, e);
    if (rc == BC_OK && m->has_score)
        rc = field_text("score", &m->score, t->score, sizeof t->score, e);
    if (rc == BC_OK && m->has_trigger)
        rc = field_text("trigger", &m->trigger, t->trigger, sizeof t->trigger, e);
    if (rc == BC_OK && m->has_kv_type)
        rc = field_text("kv_type", &m->kv_type, t->kv_type, sizeof t->kv_type, e);
    if (rc == BC_OK && m->has_positions)
        rc = field_text("positions", &m->positions, t->positions, sizeof t->positions, e);
    if (rc == BC_OK && m->has_chat_template)
        rc = field_text("chat_template", &m->chat_template, t->chat_template,
                        sizeof t->chat_template, e);
    if (rc == BC_OK && m->has_name && m->name.len > 0)
        rc = field_name("name", &m->name, t->name, sizeof t->name, e);
    return rc;
}

static int ring_size_read(bool has, uint32_t bytes, uint64_t *ret, struct err *e)
{
    uint64_t size = has && bytes != 0 ? bytes : RING_BYTES_DEFAULT;
    if (!ring_size_ok(size))
        return err_set(e, BC_EINVALID, "ring_bytes", "ring_bytes %llu is no power of two in %u..%u",
                       (unsigned long long)size, RING_BYTES_MIN, RING_BYTES_MAX);
    *ret = size;
    return BC_OK;
}

static int open_numbers_check(const Backcast__OpenSession *m, struct err *e)
{
    int rc = BC_OK;
    if (m->budget_bytes != 0 && m->budget_tokens != 0)
        return err_set(e, BC_EINVALID, "budget_tokens",
                       "budget_bytes and budget_tokens are both given");
    if ((rc = field_range("budget_tokens", m->budget_tokens, 0, TOKENS_MAX, e)) < 0 ||
        (rc = field_range("keep_tokens", m->keep_tokens, 0, TOKENS_MAX, e)) < 0 ||
        (rc = field_range("min_gap", m->min_gap, 0, TOKENS_MAX, e)) < 0)
        return rc;
    if (m->has_span && ((m->span & 1) == 0 || m->span > EVICT_SPAN_MAX))
        return err_set(e, BC_EINVALID, "span", "span %u is no odd number in 1..%u", m->span,
                       EVICT_SPAN_MAX);
    if (m->has_span_quantile && (rc = field_real("span_quantile", m->span_quantile, 0, 1, e)) < 0)
        return rc;
    if (m->recent_tokens != UINT32_MAX &&
        (rc = field_range("recent_tokens", m->recent_tokens, 0, TOKENS_MAX, e)) < 0)
        return rc;
    if (m->frozen_tokens != UINT32_MAX &&
        (rc = field_range("frozen_tokens", m->frozen_tokens, 0, TOKENS_MAX, e)) < 0)
        return rc;
    if (m->priority < -100 || m->priority > 100)
        return err_set(e, BC_EINVALID, "priority", "priority %d is not in -100..100", m->priority);
    if (m->has_weight && (rc = field_range("weight", m->weight, 1, ENGINE_WEIGHT_MAX, e)) < 0)
        return rc;
    return BC_OK;
}

/* Copies the texts behind the command's own pointer; a silent one stays NULL or takes the default.
 * */
static int open_strings(struct command *cmd, const struct open_texts *t,
                        const struct server_defaults *d, struct err *e)
{
    const char *from[] = {t->model,
                          t->policy[0] != '\0' ? t->policy : d->policy,
                          t->score[0] != '\0' ? t->score : d->score,
                          t->trigger[0] != '\0' ? t->trigger : d->trigger,
                          t->kv_type[0] != '\0' ? t->kv_type : d->kv_type,
                          t->name,
                          t->chat_template,
                          t->positions[0] != '\0' ? t->positions : d->positions};
    const char **to[] = {&cmd->u.open.model,         &cmd->u.open.evict.policy,
                         &cmd->u.open.evict.score,   &cmd->u.open.evict.trigger,
                         &cmd->u.open.kv_type,       &cmd->u.open.name,
                         &cmd->u.open.chat_template, &cmd->u.open.positions};
    size_t total = 0;
    for (size_t i = 0; i < ARRAY_LEN(from); i++)
        total += strlen(from[i]) + 1;
    char *at = malloc(total);
    if (at == NULL)
        return err_nomem(e, total);
    cmd->u.open.strings = at;
    for (size_t i = 0; i < ARRAY_LEN(from); i++) {
        size_t n = strlen(from[i]) + 1;
        memcpy(at, from[i], n);
        *to[i] = n > 1 ? at : NULL;
        at += n;
    }
    return BC_OK;
}

static void open_evict(struct evict_request *r, const Backcast__OpenSession *m,
                       const struct server_defaults *d)
{
    bool asked = m->budget_bytes != 0 || m->budget_tokens != 0;
    r->budget_bytes = asked ? m->budget_bytes : d->budget_tokens == 0 ? d->budget_bytes : 0;
    r->budget_tokens = asked ? m->budget_tokens : d->budget_tokens;
    bool none = r->policy != NULL && strcmp(r->policy, "none") == 0;
    bool at_end = r->trigger != NULL && strcmp(r->trigger, "prefill_end") == 0;
    if (!asked && (none || at_end))
        r->budget_bytes = r->budget_tokens = 0; /* these two may go without a ceiling */
    r->keep = m->keep_tokens != 0 ? m->keep_tokens : asked ? 0 : d->keep;
    r->frozen = m->has_frozen_tokens ? m->frozen_tokens : d->frozen;
    r->recent = !m->has_recent_tokens            ? d->recent
                : m->recent_tokens == UINT32_MAX ? -1
                                                 : (int64_t)m->recent_tokens;
    r->min_gap = m->has_min_gap ? m->min_gap : d->min_gap;
    r->span = m->has_span ? m->span : d->span;
    r->span_quantile = m->has_span_quantile ? m->span_quantile : d->span_quantile;
    r->seed = m->seed;
}

/* The default is for sessions that can have it: what never prunes, or has no ceiling, keeps its positions. */
static bool positions_kept(const struct evict_request *r)
{
    bool none = r->policy != NULL && strcmp(r->policy, "none") == 0;
    return none || (r->budget_bytes == 0 && r->budget_tokens == 0);
}

static void open_positions(struct command *cmd, const struct open_texts *t)
{
    if (t->positions[0] == '\0' && positions_kept(&cmd->u.open.evict))
        cmd->u.open.positions = NULL;
}

int server_defaults_check(const struct server_defaults *d, const struct engine *en,
                          uint64_t kv_memory, struct err *e)
{
    const Backcast__OpenSession silent = BACKCAST__OPEN_SESSION__INIT;
    struct engine_session_ask ask = {
        .evict = {.policy = d->policy, .score = d->score, .trigger = d->trigger},
        .kv_type = d->kv_type,
        .positions = d->positions,
        .kv_memory = kv_memory,
        .session_budget = d->budget_bytes,
    };
    open_evict(&ask.evict, &silent, d);
    if (positions_kept(&ask.evict))
        ask.positions = NULL;
    return engine_session_check(en, &ask, e);
}

int dispatch_open(struct conn *c, uint32_t id, const ProtobufCMessage *pm, struct err *e)
{
    const Backcast__OpenSession *m = (const Backcast__OpenSession *)pm;
    const struct server_defaults *d = &c->server->opt.defaults;
    struct open_texts t;
    struct stream *st = NULL;
    struct command *cmd = NULL;
    uint64_t ring_size = 0;
    int rc = open_numbers_check(m, e);
    if (rc < 0 || (rc = open_texts_read(c, m, &t, e)) < 0 ||
        (rc = ring_size_read(m->has_ring_bytes, m->ring_bytes, &ring_size, e)) < 0)
        return rc;
    if (t.name[0] != '\0' && stream_named(c->server, c->uid, t.name) != NULL)
        return err_set(e, BC_EBUSY, "name", "a session of this user is called %s: attach to it",
                       t.name);
    if ((rc = stream_new(c, t.name, ring_size, &st, e)) < 0)
        return rc;
    if ((rc = request_new(c, id, CMD_OPEN, 0, &cmd, e)) < 0 ||
        (rc = open_strings(cmd, &t, d, e)) < 0)
        goto fail;
    open_evict(&cmd->u.open.evict, m, d);
    open_positions(cmd, &t);
    if (m->budget_bytes == 0 && m->budget_tokens == 0) /* the engine's default, cut to kv_memory */
        cmd->u.open.evict.budget_bytes = 0;
    snprintf(cmd->u.open.client, sizeof cmd->u.open.client, "%.63s", c->client);
    cmd->u.open.priority = m->priority;
    cmd->u.open.weight = m->weight;
    cmd->u.open.port = st->port;
    cmd->u.open.durable = m->durable;
    memcpy(cmd->u.open.token, st->token, sizeof cmd->u.open.token);
    if ((rc = request_post(c, &cmd, FRAME_OPEN_SESSION, 0, st, e)) < 0)
        goto fail;
    return BC_OK;
fail:
    if (cmd != NULL)
        command_free(&cmd);
    stream_drop(st, rc);
    return rc;
}

/* ---- Restore */

int dispatch_restore(struct conn *c, uint32_t id, const ProtobufCMessage *pm, struct err *e)
{
    const Backcast__Restore *m = (const Backcast__Restore *)pm;
    char name[NAME_BYTES_MAX];
    struct stream *st = NULL;
    struct command *cmd = NULL;
    uint64_t ring_size = 0;
    int rc = field_name("name", &m->name, name, sizeof name, e);
    if (rc < 0 || (rc = ring_size_read(m->has_ring_bytes, m->ring_bytes, &ring_size, e)) < 0)
        return rc;
    if (stream_named(c->server, c->uid, name) != NULL)
        return err_set(e, BC_EBUSY, "name", "a session of this user is called %s: close it first",
                       name);
    if ((rc = stream_new(c, name, ring_size, &st, e)) < 0)
        return rc;
    if ((rc = request_new(c, id, CMD_RESTORE, 0, &cmd, e)) == BC_OK) {
        memcpy(cmd->u.restore.name, name, sizeof cmd->u.restore.name);
        snprintf(cmd->u.restore.client, sizeof cmd->u.restore.client, "%.63s", c->client);
        cmd->u.restore.port = st->port;
        rc = request_post(c, &cmd, FRAME_RESTORE, 0, st, e);
    }
    if (rc < 0)
        stream_drop(st, rc);
    return rc;
}

/* ---- Fork */

int dispatch_fork(struct conn *c, uint32_t id, const ProtobufCMessage *pm, struct err *e)
{
    const Backcast__Fork *m = (const Backcast__Fork *)pm;
    char name[NAME_BYTES_MAX] = "";
    struct stream *of, *st = NULL;
    struct command *cmd = NULL;
    uint64_t ring_size = 0;
    int rc = any_stream(c, m->has_session, m->session, &of, e);
    if (rc == BC_OK && m->has_name && m->name.len > 0)
        rc = field_name("name", &m->name, name, sizeof name, e);
    if (rc < 0 || (rc = ring_size_read(m->has_ring_bytes, m->ring_bytes, &ring_size, e)) < 0)
        return rc;
    if (of->upload.command != NULL)
        return err_set(e, BC_EBUSY, "session", "session %llu has a prompt under way",
                       (unsigned long long)m->session);
    if (name[0] != '\0' && stream_named(c->server, c->uid, name) != NULL)
        return err_set(e, BC_EBUSY, "name", "a session of this user is called %s already", name);
    if ((rc = stream_new(c, name, ring_size, &st, e)) < 0)
        return rc;
    if ((rc = request_new(c, id, CMD_FORK, m->session, &cmd, e)) == BC_OK) {
        memcpy(cmd->u.fork.name, name, sizeof cmd->u.fork.name);
        snprintf(cmd->u.fork.client, sizeof cmd->u.fork.client, "%.63s", c->client);
        cmd->u.fork.port = st->port;
        rc = request_post(c, &cmd, FRAME_FORK, 0, st, e);
    }
    if (rc < 0)
        stream_drop(st, rc);
    return rc;
}

/* ---- Attach */

/* By name, or by number and token: the same session for this user. */
static int attach_find(struct conn *c, const Backcast__Attach *m, struct stream **ret,
                       struct err *e)
{
    char name[NAME_BYTES_MAX] = "";
    int rc = m->has_name ? field_name("name", &m->name, name, sizeof name, e) : BC_OK;
    if (rc < 0)
        return rc;
    if (m->has_name) {
        if ((*ret = stream_named(c->server, c->uid, name)) == NULL)
            return err_set(e, BC_EUNKNOWN, "name", "no session of this user is called %s", name);
        return BC_OK;
    }
    if (!m->has_session || !m->has_token)
        return err_set(e, BC_EINVALID, "name", "a name, or session and token, are needed");
    struct stream *st = stream_find(c->server, m->session);
    unsigned differs = 1;
    if (st != NULL && st->uid == c->uid && m->token.len == STREAM_TOKEN_BYTES) {
        differs = 0; /* compared in constant time: a token is guessed whole or not at all */
        for (unsigned i = 0; i < STREAM_TOKEN_BYTES; i++)
            differs |= st->token[i] ^ m->token.data[i];
    }
    if (differs != 0)
        return err_set(e, BC_EPERMISSION, "token", "no session of this user has this token");
    *ret = st;
    return BC_OK;
}

int dispatch_attach(struct conn *c, uint32_t id, const ProtobufCMessage *pm, struct err *e)
{
    const Backcast__Attach *m = (const Backcast__Attach *)pm;
    struct stream *st = NULL;
    struct command *cmd = NULL;
    int rc = attach_find(c, m, &st, e);
    if (rc < 0)
        return rc;
    if (st->name[0] == '\0')
        return err_set(e, BC_EUNSUPPORTED, "session", "only a named session can be attached to");
    if ((rc = stream_attach_begin(st, c, st->ring_size, m->last_seq, e)) < 0)
        return rc;
    if ((rc = request_new(c, id, CMD_ATTACH, st->node.id, &cmd, e)) == BC_OK) {
        cmd->u.attach.port = st->port;
        snprintf(cmd->u.attach.name, sizeof cmd->u.attach.name, "%s", st->name);
        rc = request_post(c, &cmd, FRAME_ATTACH, 0, st, e);
    }
    if (rc < 0)
        stream_attach_failed(st);
    return rc;
}
