/* replies.c: the engine's reports -> frames, and what they change on the loop's side. Stream
 * reports go on to their session's outflow. An answer whose client has gone is dropped here, after
 * what it made has been taken apart again. */
#include "backcast.pb-c.h"
#include "clock.h"
#include "conn.h"
#include "log.h"
#include "stream.h"
#include <stdlib.h>
#include <string.h>

#define STAT_MAX 256 /* sessions or models of one StatReply */

static ProtobufCBinaryData text_of(const char *s)
{
    return (ProtobufCBinaryData){strlen(s), (uint8_t *)(uintptr_t)s};
}

static void post_alone(struct server *s, enum command_type type, uint64_t conn, uint64_t session)
{
    struct command *cmd = command_new(type, conn, 0);
    struct err e;
    if (cmd == NULL)
        return;
    cmd->session = session;
    cmd->admin = true;
    if (engine_post(s->en, &cmd, &e) < 0) {
        log_warn("ipc", "session %llu: %s", (unsigned long long)session, e.text);
        command_free(&cmd);
    }
}

/* ---- sessions that come */

static void session_opened(struct conn *c, uint32_t id, const struct stream *st,
                           const struct report_session *info, const int fds[4])
{
    Backcast__SessionOpened m = BACKCAST__SESSION_OPENED__INIT;
    m.has_session = m.has_token = m.has_budget_bytes = m.has_budget_tokens = 1;
    m.has_keep_tokens = m.has_bytes_per_token = m.has_context_tokens = m.has_model = 1;
    m.has_policy = m.has_generation = m.has_recent_tokens = m.has_frozen_tokens = 1;
    m.has_page_bytes = m.has_chat_template = m.has_last_seq = m.has_positions = 1;
    m.session = info->id;
    m.token = (ProtobufCBinaryData){STREAM_TOKEN_BYTES, (uint8_t *)(uintptr_t)st->token};
    m.budget_bytes = info->budget_bytes;
    m.budget_tokens = info->budget;
    m.keep_tokens = info->keep;
    m.bytes_per_token = (uint32_t)info->row_bytes;
    m.context_tokens = info->context;
    m.model = text_of(info->model);
    m.policy = text_of(info->policy);
    m.generation = st->generation;
    m.last_seq = st->seq;
    m.has_name = st->name[0] != '\0';
    m.name = text_of(st->name);
    m.recent_tokens = info->recent;
    m.frozen_tokens = info->frozen;
    m.page_bytes = info->page_bytes;
    m.chat_template = text_of(info->chat_template);
    m.positions = text_of(info->positions);
    conn_reply(c, id, FRAME_SESSION_OPENED, &m.base, fds, 4);
}

static void on_opened(struct server *s, struct conn *c, struct pending *p, const struct report *r)
{
    struct stream *st = p->stream;
    uint32_t id = p->request_id;
    int fds[4];
    struct err e;
    bc_assert(st != NULL && st->node.id == 0); /* an opening stream goes with its answer only */
    int rc = stream_opened(st, r->u.info.id, fds, &e);
    pending_free(s, &p, false);
    if (rc < 0) {
        post_alone(s, CMD_CLOSE, r->conn, r->u.info.id);
        stream_drop(st, rc);
        if (c != NULL)
            conn_error(c, id, &e);
    } else if (c == NULL) {
        /* The client left while the session was being made. A named one is kept, the rest goes;
         * said again, because the engine may have heard of it before the session was there. */
        for (unsigned i = 0; i < 4; i++)
            close(fds[i]);
        stream_orphan(st);
        post_alone(s, CMD_GONE, r->conn, 0);
    } else {
        session_opened(c, id, st, &r->u.info, fds);
    }
}

static void on_attached(struct server *s, struct conn *c, struct pending *p, const struct report *r)
{
    struct stream *st = p->stream;
    uint32_t id = p->request_id;
    int fds[4];
    struct err e;
    pending_free(s, &p, false);
    if (st == NULL || c == NULL) { /* closed, or the client left, in between */
        if (st != NULL)
            stream_attach_failed(st);
        post_alone(s, CMD_GONE, r->conn, 0);
        return;
    }
    int rc = stream_attached(st, c, fds, &e);
    if (rc < 0) { /* as at an open: that session ends, the connection's others do not */
        post_alone(s, CMD_CLOSE, r->conn, r->session);
        stream_drop(st, rc);
        conn_error(c, id, &e);
        return;
    }
    session_opened(c, id, st, &r->u.info, fds);
}

/* ---- errors and acknowledgements */

static void on_error(struct server *s, struct conn *c, struct pending *p, const struct report *r)
{
    struct stream *st = p->stream;
    uint32_t id = p->request_id;
    uint16_t type = p->type;
    pending_free(s, &p, false);
    if ((type == FRAME_OPEN_SESSION || type == FRAME_RESTORE || type == FRAME_FORK) && st != NULL)
        stream_drop(st, r->u.error.code);
    else if (type == FRAME_ATTACH && st != NULL)
        stream_attach_failed(st);
    if (c != NULL)
        conn_error(c, id, &r->u.error);
    if (r->u.error.code == BC_EDEVICE)
        server_fatal(s, r->u.error.text);
}

static void on_accepted(struct server *s, struct conn *c, struct pending *p, const struct report *r)
{
    struct stream *st = p->stream;
    uint32_t id = p->request_id;
    Backcast__Accepted m = BACKCAST__ACCEPTED__INIT;
    bool goes_on = st != NULL && !st->dead && !st->busy;
    if (goes_on)
        st->busy = true;
    pending_free(s, &p, goes_on);
    m.has_session = 1;
    m.session = r->session;
    if (c != NULL)
        conn_reply(c, id, FRAME_ACCEPTED, &m.base, NULL, 0);
}

static void on_closed(struct server *s, struct conn *c, struct pending *p, const struct report *r)
{
    struct stream *st = stream_find(s, r->session);
    Backcast__Closed m = BACKCAST__CLOSED__INIT;
    uint32_t id = p != NULL ? p->request_id : 0;
    if (p != NULL)
        pending_free(s, &p, false);
    if (st != NULL) {
        while (outflow_run(st)) /* its last records, as many as fit: there is no later turn */
            ;
        stream_drop(st, 0);
    }
    m.has_session = m.has_bytes_freed = 1;
    m.session = r->session;
    m.bytes_freed = r->u.closed.bytes_freed;
    if (c != NULL && id != 0)
        conn_reply(c, id, FRAME_CLOSED, &m.base, NULL, 0);
}

static void on_budget(struct conn *c, uint32_t id, const struct report *r)
{
    Backcast__BudgetSet m = BACKCAST__BUDGET_SET__INIT;
    m.has_session = m.has_budget_bytes = m.has_budget_tokens = m.has_keep_tokens = 1;
    m.session = r->u.info.id;
    m.budget_bytes = r->u.info.budget_bytes;
    m.budget_tokens = r->u.info.budget;
    m.keep_tokens = r->u.info.keep;
    conn_reply(c, id, FRAME_BUDGET_SET, &m.base, NULL, 0);
}

static void on_pruned(struct conn *c, uint32_t id, const struct report *r)
{
    Backcast__Pruned m = BACKCAST__PRUNED__INIT;
    m.has_session = m.has_tokens_before = m.has_tokens_after = 1;
    m.session = r->session;
    m.tokens_before = r->u.pruned.tokens_before;
    m.tokens_after = r->u.pruned.tokens_after;
    conn_reply(c, id, FRAME_PRUNED, &m.base, NULL, 0);
}

static void on_scores(struct conn *c, uint32_t id, const struct report *r)
{
    Backcast__ScoresReply m = BACKCAST__SCORES_REPLY__INIT;
    struct err e;
    int fd;
    if (shm_copy(r->u.scores.rows, r->u.scores.n * sizeof *r->u.scores.rows, &fd, &e) < 0) {
        conn_error(c, id, &e);
        return;
    }
    m.has_session = m.has_n_rows = 1;
    m.session = r->session;
    m.n_rows = r->u.scores.n;
    conn_reply(c, id, FRAME_SCORES_REPLY, &m.base, &fd, 1);
}

/* ---- listings */

/* As many as fit into the client's frame; the rest it asks for. */
static void on_saved(struct conn *c, uint32_t id, const struct report *r)
{
    Backcast__SavedFile files[REPORT_SAVED_MAX], *at[REPORT_SAVED_MAX];
    Backcast__SavedList m = BACKCAST__SAVED_LIST__INIT;
    size_t bytes = 16; /* `more` */
    m.files = at;
    m.has_more = 1;
    for (; m.n_files < r->u.saved.n; m.n_files++) {
        const struct report_saved *from = &r->u.saved.files[m.n_files];
        Backcast__SavedFile *f = at[m.n_files] = &files[m.n_files];
        backcast__saved_file__init(f);
        f->has_name = f->has_bytes = f->has_unix_seconds = 1;
        f->name = text_of(from->name);
        f->bytes = from->bytes;
        f->unix_seconds = from->unix_seconds;
        if ((bytes += backcast__saved_file__get_packed_size(f) + 4) > c->payload_out_max)
            break;
    }
    m.more = r->u.saved.more || m.n_files < r->u.saved.n;
    conn_reply(c, id, FRAME_SAVED_LIST, &m.base, NULL, 0);
}

static void session_stat(Backcast__SessionStat *m, const struct report_session *i)
{
    uint64_t now = clock_us();
    backcast__session_stat__init(m);
    m->has_session = m->has_uid = m->has_name = m->has_model = m->has_policy = 1;
    m->has_kv_type = m->has_state = m->has_tokens = m->has_bytes_live = m->has_bytes_held = 1;
    m->has_bytes_shared = m->has_budget_bytes = m->has_budget_tokens = m->has_keep_tokens = 1;
    m->has_prunes = m->has_tokens_dropped = m->has_tokens_in = m->has_tokens_out = 1;
    m->has_prune_micros = m->has_idle_micros = m->has_client = 1;
    m->has_frozen_tokens = m->has_recent_tokens = m->has_bytes_other = 1;
    m->has_bytes_guaranteed = m->has_rows_moved = m->has_positions = 1;
    m->has_durable = m->has_tier = m->has_score = m->has_span = m->has_span_quantile = 1;
    m->has_min_gap = m->has_trigger = m->has_chat_template = m->has_priority = m->has_weight = 1;
    m->session = i->id;
    m->uid = i->uid;
    m->name = text_of(i->name);
    m->model = text_of(i->model);
    m->policy = text_of(i->policy);
    m->kv_type = text_of(i->kv_type);
    m->state = text_of(i->state);
    m->positions = text_of(i->positions);
    m->durable = i->durable;
    m->tier = text_of(i->tier);
    m->score = text_of(i->score);
    m->span = i->span;
    m->span_quantile = i->span_quantile;
    m->min_gap = i->min_gap;
    m->trigger = text_of(i->trigger);
    m->chat_template = text_of(i->chat_template);
    m->priority = i->priority;
    m->weight = i->weight;
    m->tokens = i->tokens;
    m->bytes_live = i->live;
    m->bytes_held = i->held;
    m->bytes_shared = i->shared;
    m->bytes_other = i->other;
    m->bytes_guaranteed = i->guaranteed;
    m->rows_moved = i->rows_moved;
    m->budget_bytes = i->budget_bytes;
    m->budget_tokens = i->budget;
    m->keep_tokens = i->keep;
    m->prunes = i->prunes;
    m->tokens_dropped = i->dropped;
    m->tokens_in = i->tokens_in;
    m->tokens_out = i->tokens_out;
    m->prune_micros = i->prune_micros;
    m->idle_micros = now > i->last_use_us ? now - i->last_use_us : 0;
    m->client = text_of(i->attached ? i->client : "");
    m->frozen_tokens = i->frozen;
    m->recent_tokens = i->recent;
}

static void model_stat(Backcast__ModelStat *m, const struct report_model *i)
{
    backcast__model_stat__init(m);
    m->has_name = m->has_family = m->has_path = m->has_backend = m->has_bytes_weights = 1;
    m->has_bytes_scratch = m->has_context_tokens = m->has_sessions = m->has_chat_template = 1;
    m->has_bytes_text = 1;
    m->bytes_text = i->bytes_text;
    m->name = text_of(i->name);
    m->family = text_of(i->family);
    m->path = text_of(i->path);
    m->backend = text_of(i->backend);
    m->bytes_weights = i->bytes_weights;
    m->bytes_scratch = i->bytes_scratch;
    m->context_tokens = i->context;
    m->sessions = i->sessions;
    m->chat_template = text_of(i->chat_template);
}

struct ledger_lines {
    Backcast__LedgerLine line[N_LEDGER], *at[N_LEDGER];
};

static void ledger_lines(const struct server *s, const struct conn *c, Backcast__DaemonStat *m,
                         struct ledger_lines *lines)
{
    uint64_t bytes[N_LEDGER];
    m->has_bytes_booked = m->has_bytes_resident = 1;
    m->bytes_booked = statsout_ledger(s, c->admin ? NULL : c->account, bytes);
    m->bytes_resident = statsout_resident();
    m->ledger = lines->at;
    m->n_ledger = N_LEDGER;
    for (unsigned i = 0; i < N_LEDGER; i++) {
        Backcast__LedgerLine *l = lines->at[i] = &lines->line[i];
        backcast__ledger_line__init(l);
        l->has_name = l->has_bytes = 1;
        l->name = text_of(ledger_name(i));
        l->bytes = bytes[i];
    }
}

static void daemon_stat(const struct server *s, const struct conn *c, Backcast__DaemonStat *m,
                        const struct report *r)
{
    backcast__daemon_stat__init(m);
    m->has_kv_held = m->has_kv_memory = m->has_bytes_weights = m->has_bytes_scratch = 1;
    m->has_bytes_rings = m->has_uptime_micros = m->has_steps = m->has_sessions = 1;
    m->has_connections = m->has_version = 1;
    m->kv_held = r->u.stat.kv_held;
    m->kv_memory = r->u.stat.kv_memory;
    m->bytes_weights = r->u.stat.bytes_weights;
    m->bytes_scratch = r->u.stat.bytes_scratch;
    for (const struct account *a = s->accounts.first; a != NULL; a = a->next)
        if (c->admin || a == c->account) /* as the stats pages have it */
            m->bytes_rings += a->used[QUOTA_RINGS];
    m->uptime_micros = clock_us() - s->start_us;
    m->steps = r->u.stat.steps;
    m->sessions = (uint32_t)s->streams.n;
    m->connections = (uint32_t)s->conns.n;
    m->version = text_of(BACKCAST_DAEMON_VERSION);
}

/* What one StatReply points into. */
struct stat_frame {
    Backcast__SessionStat sessions[STAT_MAX], *session_at[STAT_MAX];
    Backcast__ModelStat models[STAT_MAX], *model_at[STAT_MAX];
    Backcast__DaemonStat daemon;
    struct ledger_lines ledger;
    Backcast__StatReply m;
};

/* Fills one frame from model *k and session *i on, no fuller than max bytes; one item always goes.
 * */
static void stat_fill(struct stat_frame *f, const struct report *r, uint32_t *i, uint32_t *k,
                      uint32_t max)
{
    Backcast__StatReply *m = &f->m;
    size_t bytes = backcast__stat_reply__get_packed_size(m);
    for (; *k < r->u.stat.n_models && m->n_models < STAT_MAX; ++*k, m->n_models++) {
        Backcast__ModelStat *to = f->model_at[m->n_models] = &f->models[m->n_models];
        model_stat(to, &r->u.stat.models[*k]);
        if ((bytes += backcast__model_stat__get_packed_size(to) + 4) > max && m->n_models > 0)
            return;
    }
    for (; *i < r->u.stat.n_sessions && m->n_sessions < STAT_MAX && *k == r->u.stat.n_models;
         ++*i, m->n_sessions++) {
        Backcast__SessionStat *to = f->session_at[m->n_sessions] = &f->sessions[m->n_sessions];
        session_stat(to, &r->u.stat.sessions[*i]);
        if ((bytes += backcast__session_stat__get_packed_size(to) + 4) > max &&
            m->n_sessions + m->n_models > 0)
            return;
    }
}

/* As many frames as it takes: each as full as the client's max_frame allows. */
static void on_stat(struct server *s, struct conn *c, uint32_t id, const struct report *r)
{
    struct stat_frame *f = malloc(sizeof *f);
    uint64_t conn = c->node.id;
    uint32_t i = 0, k = 0;
    bool more = true;
    if (f == NULL) {
        struct err e;
        err_nomem(&e, sizeof *f);
        conn_error(c, id, &e);
        return;
    }
    for (bool first = true; more && conn_find(s, conn) != NULL; first = false) {
        backcast__stat_reply__init(&f->m);
        f->m.sessions = f->session_at;
        f->m.models = f->model_at;
        daemon_stat(s, c, &f->daemon, r);
        ledger_lines(s, c, &f->daemon, &f->ledger);
        f->m.daemon = first ? &f->daemon : NULL;
        f->m.has_more = f->m.more = 1;
        stat_fill(f, r, &i, &k, c->payload_out_max);
        f->m.more = more = i < r->u.stat.n_sessions || k < r->u.stat.n_models;
        conn_reply(c, id, FRAME_STAT_REPLY, &f->m.base, NULL, 0);
    }
    free(f);
}

/* ---- the switch */

static void reply_answer(struct server *s, struct conn *c, struct pending *p,
                         const struct report *r)
{
    uint32_t id = p->request_id;
    switch (r->type) {
    case REP_OPENED:
        on_opened(s, c, p, r);
        return;
    case REP_ATTACHED:
        on_attached(s, c, p, r);
        return;
    case REP_ERROR:
        on_error(s, c, p, r);
        return;
    case REP_ACCEPTED:
        on_accepted(s, c, p, r);
        return;
    case REP_CLOSED:
        on_closed(s, c, p, r);
        return;
    default:
        break;
    }
    pending_free(s, &p, false);
    if (c == NULL)
        return;
    if (r->type == REP_BUDGET) {
        on_budget(c, id, r);
    } else if (r->type == REP_PRUNED_REPLY) {
        on_pruned(c, id, r);
    } else if (r->type == REP_SCORES_REPLY) {
        on_scores(c, id, r);
    } else if (r->type == REP_STAT) {
        on_stat(s, c, id, r);
    } else if (r->type == REP_SAVED) {
        on_saved(c, id, r);
    } else {
        bc_assert(r->type == REP_DONE);
        Backcast__Done m = BACKCAST__DONE__INIT;
        conn_reply(c, id, FRAME_DONE, &m.base, NULL, 0);
    }
}

void reply_report(struct server *s, struct report **pr)
{
    struct report *r = *pr;
    if (r->type >= REP_TOKENS) {
        struct stream *st = stream_find(s, r->session);
        if (st != NULL)
            outflow_report(st, pr);
        else
            report_free(pr); /* of a session whose client has gone */
        return;
    }
    if (r->type == REP_RECOVERED) {
        struct err e;
        if (stream_recovered(s, r, &e) < 0) /* it runs on, unseen until the next start */
            log_error("ipc", "session %llu: %s", (unsigned long long)r->session, e.text);
        report_free(pr);
        return;
    }
    struct pending *p = r->request_id != 0 ? pending_find(s, r->conn, r->request_id) : NULL;
    if (p != NULL)
        reply_answer(s, conn_find(s, r->conn), p, r);
    else if (r->type == REP_STAT && r->conn == 0)
        statsout_publish(s, r);
    else if (r->type == REP_CLOSED)
        on_closed(s, NULL, NULL, r);
    else if (r->type == REP_ERROR && r->u.error.code == BC_EDEVICE)
        server_fatal(s, r->u.error.text);
    report_free(pr);
}
