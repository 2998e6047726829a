/* command.c: what each command of a client does, one function each; every command is answered by
 * one report, at once or when what it waits for (a model, a prune) is done. Also the commands'
 * and ports' own lives.
 */
#include "core.h"
#include "log.h"
#include <stdlib.h>
#include <string.h>

/* ---- sessions come and go ---- */

void command_open(struct engine *en, struct command **c, struct model_ref *m)
{
    struct session *s = NULL;
    struct err e = {0};
    int rc = durable_check(en, *c, &e);
    if (rc == BC_OK)
        rc = sess_open(en, *c, m, &s, &e);
    if (rc == BC_OK && (*c)->u.open.durable && (rc = durable_begin(en, s, *c, &e)) < 0)
        sess_close(en, &s);
    if (rc < 0) {
        report_error(en, *c, &e);
    } else {
        struct report *r = report_new(REP_OPENED, 0);
        r->session = s->id;
        sess_info(en, s, &r->u.info);
        report_reply(en, *c, r);
    }
    queue_command_done(en, c);
}

/* OPEN and LOAD: at once, or when the model is there. */
static void run_with_model(struct engine *en, struct command **pc)
{
    struct command *c = *pc;
    struct model_ref *m;
    struct err e = {0};
    if (c->type == CMD_LOAD && !c->admin) {
        err_set(&e, BC_EPERMISSION, "", "loading a model is an administrator's call");
    } else if (models_find(en, c->type == CMD_OPEN ? c->u.open.model : c->u.load.path, &m, &e) ==
               BC_OK) {
        if (m->state == MODEL_LOADING) {
            models_wait(m, pc);
        } else if (c->type == CMD_OPEN) {
            command_open(en, pc, m);
        } else {
            report_reply(en, c, report_new(REP_DONE, 0));
        }
        return;
    }
    report_error(en, c, &e);
}

static void run_unload(struct engine *en, struct command *c)
{
    struct err e = {0};
    if (!c->admin)
        err_set(&e, BC_EPERMISSION, "", "unloading a model is an administrator's call");
    else if (models_unload(en, c->u.load.path, &e) == BC_OK) {
        report_reply(en, c, report_new(REP_DONE, 0));
        return;
    }
    report_error(en, c, &e);
}

/* A prompt that is still in intake ends before it begins: it is accepted and cancelled at once. */
static bool cancel_in_intake(struct engine *en, struct session *s, uint32_t reason)
{
    struct command who = {.session = s->id};
    if (!queue_prompt_cancel(en, s, &who.conn, &who.request_id))
        return false;
    report_reply(en, &who, report_new(REP_ACCEPTED, 0));
    struct report *r = report_new(REP_END, 0);
    r->request_id = who.request_id;
    r->u.end.reason = reason;
    r->u.end.end_id = UINT32_MAX;
    r->u.end.tokens_cached = sess_tokens(s);
    r->u.end.budget = sess_budget(s);
    r->u.end.chat = s->chat_state;
    report_stream(en, s, r);
    queue_face(en, s);
    return true;
}

static void cancel_all(struct engine *en, struct session *s, uint32_t reason)
{
    if (replay_cancel(s, reason))
        return; /* it ends when its rows are done */
    if (s->req != NULL && s->req->kind != REQUEST_REPLAY)
        request_end(en, s, (enum record_end_reason)reason, NULL);
    else
        cancel_in_intake(en, s, reason);
}

static void close_session(struct engine *en, struct session *s)
{
    struct err e = {0};
    err_set(&e, BC_ECANCELLED, "session", "session %llu was closed", (unsigned long long)s->id);
    cancel_all(en, s, END_CANCELLED);
    sess_refuse_waiters(en, s, &e);
    if (s->keeper != NULL)
        keeper_leave(en, s, true);
    sess_close(en, &s);
}

static void run_close(struct engine *en, struct command *c)
{
    struct session *s;
    struct err e = {0};
    if (sess_for(en, c, &s, &e) < 0) {
        report_error(en, c, &e);
        return;
    }
    struct report *r = report_new(REP_CLOSED, 0);
    r->u.closed.bytes_freed = share_alone(s);
    close_session(en, s);
    report_reply(en, c, r);
}

static void run_gone(struct engine *en, struct command *c)
{
    if (c->conn == 0) /* nobody: named sessions that wait for an attach */
        return;
    struct err e = {0};
    err_set(&e, BC_ECANCELLED, "", "the client went away");
    for (struct model_ref *m = en->models; m != NULL; m = m->next)
        for (struct command **at = &m->waiting; *at != NULL;) {
            struct command *w = *at;
            if (w->conn != c->conn) {
                at = &w->next;
                continue;
            }
            *at = w->next;
            w->next = NULL;
            report_error(en, w, &e); /* the loop takes apart what it had made for it */
            if (w->type == CMD_RESTORE)
                restore_forget(en, w);
            queue_command_done(en, &w);
        }
    for (uint32_t i = en->n_sessions; i-- > 0;) {
        struct session *s = en->list[i];
        if (s->conn != c->conn)
            continue;
        if (s->name[0] == '\0') {
            close_session(en, s);
            continue;
        }
        cancel_all(en, s, END_CANCELLED);
        s->conn = 0;
        queue_face(en, s);
    }
}

static void run_attach(struct engine *en, struct command *c)
{
    struct session *s = NULL;
    struct err e = {0};
    const char *name = c->u.attach.name;
    int rc = BC_OK;
    if (name[0] == '\0')
        rc = sess_for(en, c, &s, &e);
    else if ((s = sess_named(en, c->uid, name)) == NULL)
        rc = err_set(&e, BC_EUNKNOWN, "name", "no session of yours is called \"%.64s\"", name);
    if (rc == BC_OK && s->conn != 0)
        rc = err_set(&e, BC_EBUSY, "session", "a client is attached to session %llu already",
                     (unsigned long long)s->id);
    struct session_port *port = rc == BC_OK ? port_share(c->u.attach.port) : NULL;
    if (rc == BC_OK && port == NULL)
        rc = err_nomem(&e, sizeof *port);
    if (rc < 0) {
        report_error(en, c, &e);
        return;
    }
    port_drop(&s->port);
    s->port = port;
    s->conn = c->conn;
    queue_face(en, s);
    struct report *r = report_new(REP_ATTACHED, 0);
    r->session = s->id;
    sess_info(en, s, &r->u.info);
    report_reply(en, c, r);
}

/* ---- requests ---- */

static void run_generate(struct engine *en, struct command **pc)
{
    struct command *c = *pc;
    struct session *s = sess_find(en, c->session);
    struct err e = {0};
    if (c->own.m != NULL && (s == NULL || !queue_prompt_arrived(en, s, c)))
        return; /* cancelled, or its session closed, while it was in intake: answered then */
    int rc = sess_for(en, c, &s, &e);
    if (rc == BC_OK && s->conn != c->conn)
        rc = err_set(&e, BC_EPERMISSION, "session",
                     "session %llu is another connection's: attach to it first",
                     (unsigned long long)s->id);
    if (rc == BC_OK && (rc = c->u.generate.failed) < 0)
        e = c->u.generate.err;
    if (rc == BC_OK && (c->own.m == NULL || s->req != NULL))
        rc = err_set(&e, BC_EBUSY, "session", "session %llu has a request under way",
                     (unsigned long long)s->id);
    if (rc == BC_OK && en->failed) {
        rc = en->failure.code;
        e = en->failure;
    }
    if (rc == BC_OK)
        rc = request_accept(en, s, c, &e);
    if (rc < 0 && s != NULL && pressure_passes(en, s, &e)) {
        queue_prompt_back(en, s, c); /* pages will be free in a few steps: it waits for them */
        tier_starve(en, pc);
        return;
    }
    if (rc == BC_OK)
        report_reply(en, c, report_new(REP_ACCEPTED, 0));
    else
        report_error(en, c, &e);
    if (s != NULL)
        queue_face(en, s);
}

static void run_cancel(struct engine *en, struct command *c)
{
    struct session *s;
    struct err e = {0};
    if (sess_for(en, c, &s, &e) < 0) {
        report_error(en, c, &e);
        return;
    }
    cancel_all(en, s, c->u.cancel.reason != 0 ? c->u.cancel.reason : END_CANCELLED);
    report_reply(en, c, report_new(REP_DONE, 0));
}

/* ---- memory ---- */

static int prune_busy(const struct session *s, struct err *e)
{
    bool whole = s->req != NULL && s->req->phase == REQUEST_PREFILL &&
                 evict_params(s->ev)->trigger == EVICT_ON_PREFILL_END;
    if (s->scoring.active || (s->prune.active && s->prune.reply))
        return err_set(e, BC_EBUSY, "session", "session %llu is being pruned or scored",
                       (unsigned long long)s->id);
    if (whole || (s->prune.active && s->prune.reason == PRUNE_PREFILL_END))
        return err_set(e, BC_EBUSY, "session",
                       "session %llu takes in a prompt that its trigger prunes afterwards",
                       (unsigned long long)s->id);
    if (!evict_can_score(s->ev) && seqcache_count(s->cache) > 0)
        return err_set(e, BC_EBUSY, "session",
                       "policy %s of session %llu looks at a token that is still to be evaluated",
                       evict_params(s->ev)->policy->name, (unsigned long long)s->id);
    return BC_OK;
}

static void prune_ask(struct engine *en, struct session *s, const struct command *c,
                      enum record_prune_reason reason, uint32_t keep)
{
    if (s->prune.active) /* for its own budget: this one does more */
        prune_abort(s);
    prune_start(en, s, reason, keep);
    s->prune.reply = true;
    s->prune.conn = c->conn;
    s->prune.request_id = c->request_id;
}

static int resolve_budget(struct engine *en, const struct session *s, const struct command *c,
                          struct evict_request *ask, struct evict_params *p, struct err *e)
{
    const struct terms t = {.m = s->m,
                            .rerotate = s->rerotate,
                            .page = pool_page_bytes(s->pool),
                            .kv = share_kv(en),
                            .usual = en->opt.session_budget};
    if (c->u.budget.bytes == 0 && c->u.budget.tokens == 0)
        return err_set(e, BC_EINVALID, "budget_tokens",
                       "give one of budget_bytes and budget_tokens");
    *ask = s->ask;
    ask->budget_bytes = c->u.budget.bytes;
    ask->budget_tokens = c->u.budget.tokens;
    ask->keep = c->u.budget.keep;
    int rc = terms_resolve(&t, ask, p, e);
    if (rc < 0)
        return rc;
    uint32_t count = seqcache_count(s->cache);
    if (count > p->budget && !evict_policy_prunes(p->policy))
        return err_amount(e, BC_EBUDGET, "budget_tokens", count, p->budget,
                          "%u tokens are cached, and policy none never prunes", count);
    return BC_OK;
}

static void run_budget(struct engine *en, struct command *c)
{
    struct session *s;
    struct err e = {0};
    struct evict_params p;
    struct evict_request ask;
    if (sess_for(en, c, &s, &e) < 0 || prune_busy(s, &e) < 0 ||
        resolve_budget(en, s, c, &ask, &p, &e) < 0) {
        report_error(en, c, &e);
        return;
    }
    struct evict_params before = *evict_params(s->ev);
    struct evict_request ask_before = s->ask;
    int rc = evict_set_params(s->ev, &p, &e);
    bc_assert(rc == BC_OK); /* evict_resolve checked it */
    s->ask = ask;
    if (seqcache_count(s->cache) > p.budget) { /* prune_done tells the journal */
        prune_ask(en, s, c, PRUNE_SHRUNK, p.keep);
        s->prune.before = before;
        s->prune.ask_before = ask_before;
        share_update(en);
        return;
    }
    if (s->prune.active) /* it may be due no more; if it is, it begins again */
        prune_abort(s);
    durable_params(s);
    sess_ceiling(en, s);
    share_update(en);
    struct report *r = report_new(REP_BUDGET, 0);
    sess_info(en, s, &r->u.info);
    report_reply(en, c, r);
}

static int check_prune(struct session *s, uint32_t keep, struct err *e)
{
    struct evict_params p = *evict_params(s->ev);
    if (!evict_policy_prunes(p.policy))
        return err_set(e, BC_EINVALID, "policy", "policy %s never prunes", p.policy->name);
    p.keep = keep;
    p.budget = BC_MAX(p.budget, keep + 1); /* what is kept now may be all that fits */
    return evict_check(&p, e);
}

static void run_prune(struct engine *en, struct command *c)
{
    struct session *s;
    struct err e = {0};
    if (sess_for(en, c, &s, &e) < 0 || prune_busy(s, &e) < 0) {
        report_error(en, c, &e);
        return;
    }
    uint32_t keep = c->u.budget.keep != 0 ? c->u.budget.keep : evict_params(s->ev)->keep;
    uint32_t count = seqcache_count(s->cache);
    if (check_prune(s, keep, &e) < 0) {
        report_error(en, c, &e);
    } else if (count > keep) {
        prune_ask(en, s, c, PRUNE_ASKED, keep);
    } else {
        struct report *r = report_new(REP_PRUNED_REPLY, 0);
        r->u.pruned.tokens_before = r->u.pruned.tokens_after = count;
        report_reply(en, c, r);
    }
}

static int check_limits(const struct engine *en, const struct command *c, struct err *e)
{
    uint64_t kv = c->u.limits.kv_memory;
    double percent = c->u.limits.limits.uid_percent;
    if (!c->admin)
        return err_set(e, BC_EPERMISSION, "", "limits are an administrator's to change");
    if (kv == 0 || kv > en->opt.kv_memory_max)
        return err_amount(e, BC_EINVALID, "kv_memory", kv, en->opt.kv_memory_max,
                          "kv_memory %llu: must be 1 to %llu while the daemon runs",
                          (unsigned long long)kv, (unsigned long long)en->opt.kv_memory_max);
    if (!(percent >= 0 && percent <= 100))
        return err_set(e, BC_EINVALID, "uid_share", "uid_share %g %%: must be 0 to 100", percent);
    return BC_OK;
}

/* The step that follows brings down what is above them. */
static void run_limits(struct engine *en, struct command *c)
{
    struct err e = {0};
    if (check_limits(en, c, &e) < 0) {
        log_error("engine", "%s; nothing has changed", e.text); /* SIGHUP: nobody is told */
        report_error(en, c, &e);
        return;
    }
    en->kv_memory = c->u.limits.kv_memory;
    en->limits = c->u.limits.limits;
    if (c->u.limits.session_budget > 0)
        en->opt.session_budget = c->u.limits.session_budget;
    en->shrink_told = false;
    log_info("engine", "caches may take %llu bytes, %llu of one user",
             (unsigned long long)en->kv_memory,
             (unsigned long long)BC_MIN(share_uid(en), en->kv_memory));
    for (struct model_ref *m = models_ready(en->models); m != NULL; m = models_ready(m->next))
        models_memory_check(en, m);
    report_reply(en, c, report_new(REP_DONE, 0));
}

/* ---- looking ---- */

static void model_fill(const struct model_ref *m, struct report_model *r)
{
    const struct model_info *mi = &m->info;
    *r = (struct report_model){.bytes_weights = ledger_own(&m->owner, LEDGER_weights),
                               .bytes_scratch = ledger_own(&m->owner, LEDGER_scratch),
                               .bytes_text = ledger_own(&m->owner, LEDGER_text),
                               .context = mi->context_train,
                               .sessions = m->sessions};
    snprintf(r->name, sizeof r->name, "%s", m->name);
    snprintf(r->family, sizeof r->family, "%s", mi->family);
    snprintf(r->path, sizeof r->path, "%s", m->path);
    char kernels[MODELS_KERNELS_LEN];
    snprintf(r->backend, sizeof r->backend, "%s", models_kernels(m, kernels));
    snprintf(r->chat_template, sizeof r->chat_template, "%s", chat_name(m->chat));
}

static void run_stat(struct engine *en, struct command *c)
{
    struct session *one = NULL;
    struct err e = {0};
    if (c->session != 0 && sess_for(en, c, &one, &e) < 0) {
        report_error(en, c, &e);
        return;
    }
    uint32_t n = 0, n_models = 0;
    sharing_settle(en); /* so that all numbers are of this moment */
    for (uint32_t i = 0; i < en->n_sessions; i++)
        n += one != NULL ? en->list[i] == one : c->admin || en->list[i]->uid == c->uid;
    for (const struct model_ref *m = en->models; m != NULL; m = m->next)
        n_models += models_known(m);
    struct report *r = report_new(REP_STAT, n * sizeof(struct report_session) +
                                                n_models * sizeof(struct report_model));
    struct report_session *rs = r->u.stat.sessions = (struct report_session *)(r + 1);
    struct report_model *rm = r->u.stat.models = (struct report_model *)(rs + n);
    for (uint32_t i = 0; i < en->n_sessions; i++)
        if (one != NULL ? en->list[i] == one : c->admin || en->list[i]->uid == c->uid)
            sess_info(en, en->list[i], rs++);
    for (const struct model_ref *m = en->models; m != NULL; m = m->next)
        if (models_known(m))
            model_fill(m, rm++);
    struct engine_counts counts;
    engine_counts(en, &counts);
    r->u.stat.n_sessions = n;
    r->u.stat.n_models = n_models;
    r->u.stat.kv_held = counts.kv_held;
    r->u.stat.kv_memory = en->kv_memory;
    r->u.stat.bytes_weights = counts.bytes_weights;
    r->u.stat.bytes_scratch = counts.bytes_scratch;
    r->u.stat.steps = counts.steps;
    report_reply(en, c, r);
}

/* ---- the table ---- */

void command_refuse(struct engine *en, struct command **pc, const struct err *e)
{
    struct command *c = *pc;
    struct session *s = c->type == CMD_GENERATE ? sess_find(en, c->session) : NULL;
    bool alive = c->own.m == NULL || (s != NULL && queue_prompt_arrived(en, s, c));
    if (c->type != CMD_GENERATE || alive)
        report_error(en, c, e);
    if (s != NULL)
        queue_face(en, s);
    queue_command_done(en, pc);
}

/* The session whose cache a command needs and which is not here; NULL: run it. */
static struct session *wants_cache(struct engine *en, const struct command *c)
{
    bool needs = c->type == CMD_BUDGET || c->type == CMD_PRUNE || c->type == CMD_SCORES ||
                 c->type == CMD_SAVE || c->type == CMD_FORK ||
                 (c->type == CMD_GENERATE && c->own.m != NULL);
    struct session *s = needs && !en->failed ? sess_find(en, c->session) : NULL;
    if (s == NULL || (s->uid != c->uid && !c->admin) ||
        (c->type == CMD_GENERATE && s->conn != c->conn))
        return NULL;
    return tier_here(s) ? NULL : s;
}

void command_run(struct engine *en, struct command **pc)
{
    struct command *c = *pc;
    bool may_run = c->type == CMD_CLOSE || c->type == CMD_GONE || c->type == CMD_STAT ||
                   c->type == CMD_CANCEL || c->type == CMD_ROOM || c->type == CMD_GENERATE;
    if (en->failed && !may_run) {
        report_error(en, c, &en->failure);
        queue_command_done(en, pc);
        return;
    }
    struct session *away = wants_cache(en, c);
    if (away != NULL) {
        tier_wait(en, away, pc);
        return;
    }
    switch (c->type) {
    case CMD_OPEN:
    case CMD_LOAD:
        run_with_model(en, pc);
        break;
    case CMD_GENERATE:
        run_generate(en, pc);
        break;
    case CMD_SAVE:
        save_command(en, pc);
        break;
    case CMD_SAVED:
    case CMD_UNSAVE:
        saved_command(en, pc);
        break;
    case CMD_RESTORE:
        restore_command(en, pc);
        break;
    case CMD_FORK:
        fork_command(en, c);
        break;
    case CMD_CANCEL:
        run_cancel(en, c);
        break;
    case CMD_BUDGET:
        run_budget(en, c);
        break;
    case CMD_PRUNE:
        run_prune(en, c);
        break;
    case CMD_SCORES:
        scores_command(en, c);
        break;
    case CMD_CLOSE:
        run_close(en, c);
        break;
    case CMD_GONE:
        run_gone(en, c);
        break;
    case CMD_STAT:
        run_stat(en, c);
        break;
    case CMD_UNLOAD:
        run_unload(en, c);
        break;
    case CMD_ROOM: /* that it arrived is all it says: the scheduler looks at the port */
        break;
    case CMD_ATTACH:
        run_attach(en, c);
        break;
    case CMD_LIMITS:
        run_limits(en, c);
        break;
    }
    if (*pc != NULL)
        queue_command_done(en, pc);
}
