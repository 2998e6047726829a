/* session.c: the table of sessions: opening, finding, closing, and what a session says of itself.
 *
 *   id 5 --> slots[5 & (n_slots - 1)] --> session <-- list[at]
 *
 * Ids count up and skip those whose place is taken, so a look-up is one index. A session belongs to
 * the uid that opened it: that uid and admins may look at it, shrink it and close it; only the
 * connection that owns it (conn; 0: nobody) may put prompts to it.
 */
#include "core.h"
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- finding ---- */

struct session *sess_find(struct engine *en, uint64_t id)
{
    struct session *s = en->slots[id & (en->n_slots - 1)];
    return s != NULL && s->id == id ? s : NULL;
}

int sess_for(struct engine *en, const struct command *c, struct session **ret, struct err *e)
{
    struct session *s = sess_find(en, c->session);
    if (s == NULL)
        return err_set(e, BC_EUNKNOWN, "session", "there is no session %llu",
                       (unsigned long long)c->session);
    if (s->uid != c->uid && !c->admin)
        return err_set(e, BC_EPERMISSION, "session", "session %llu belongs to another user",
                       (unsigned long long)c->session);
    *ret = s;
    return BC_OK;
}

struct session *sess_named(struct engine *en, uint32_t uid, const char *name)
{
    for (uint32_t i = 0; i < en->n_sessions; i++)
        if (en->list[i]->uid == uid && strcmp(en->list[i]->name, name) == 0)
            return en->list[i];
    return NULL;
}

/* ---- opening ---- */

static int check_name(struct engine *en, const struct command *c, struct err *e)
{
    const char *name = c->u.open.name;
    if (name == NULL || name[0] == '\0')
        return BC_OK;
    size_t n = strlen(name);
    if (n > 64)
        return err_set(e, BC_EINVALID, "name", "a name of %zu bytes: at most 64", n);
    for (size_t i = 0; i < n; i++)
        if (!isalnum((unsigned char)name[i]) && strchr("._-", name[i]) == NULL)
            return err_set(e, BC_EINVALID, "name",
                           "byte %zu of the name is none of A-Z a-z 0-9 . _ -", i + 1);
    if (sess_named(en, c->uid, name) != NULL)
        return err_set(e, BC_EBUSY, "name", "a session is called \"%s\" already: attach to it",
                       name);
    return BC_OK;
}

static int check_kv_type(const char *name, enum kn_type *ret, struct err *e)
{
    const struct kn_kv_type *t = kn_kv_type_at(0);
    if (name != NULL && name[0] != '\0')
        t = kn_kv_type_named(name);
    if (t == NULL)
        return err_set(e, BC_EUNKNOWN, "kv_type",
                       "unknown kv_type \"%.20s\"; known: f16, f32, bf16, q8_0, q8_q4", name);
    *ret = t->type;
    return BC_OK;
}

int terms_resolve(const struct terms *t, const struct evict_request *ask, struct evict_params *ret,
                  struct err *e)
{
    struct evict_params p;
    uint64_t most = t->kv - t->kv % t->page;
    bool open = ask->budget_bytes == 0 && ask->budget_tokens == 0;
    int rc = evict_resolve(ask, t->page, BC_MIN(t->usual, BC_MAX(most, t->page)), &p, e);
    if (rc < 0)
        return rc;
    uint64_t bytes = budget_bytes(&p, t->page);
    if (bytes > most && open)
        return err_amount(e, BC_EBUDGET, "kv_memory", t->page, t->kv,
                          "kv_memory leaves %llu bytes for caches: less than one page (%llu bytes)",
                          (unsigned long long)t->kv, (unsigned long long)t->page);
    if (bytes > most)
        return err_amount(e, BC_EBUDGET, ask->budget_tokens > 0 ? "budget_tokens" : "budget_bytes",
                          bytes, most, "a budget of %llu bytes: the daemon's kv_memory holds %llu",
                          (unsigned long long)bytes, (unsigned long long)most);
    if ((rc = positions_check(t->m, t->rerotate, &p, e)) < 0)
        return rc;
    *ret = p;
    return BC_OK;
}

/* Without a model: how many tokens a budget in bytes is, the model's rows would say. */
static int check_alone(const struct evict_request *r, struct err *e)
{
    struct evict_request ask = *r;
    struct evict_params p;
    if (ask.budget_bytes != 0) {
        ask.budget_bytes = 0;
        ask.budget_tokens = POOL_PAGES_MAX * KN_PAGE_ROWS - 1;
    }
    return evict_resolve(&ask, 0, 0, &p, e);
}

/* Whatever may run meanwhile: of the model, only what stays the same from its first load on. */
static int check_with(const struct engine *en, const struct evict_request *r, enum kn_type kv,
                      struct terms *t, struct err *e)
{
    struct evict_request ask = *r;
    struct evict_params p;
    t->m = en->default_model;
    ask.budget_bytes = 0; /* as open.c asks for it */
    const struct evict_policy *policy =
        evict_policy_find(ask.policy != NULL ? ask.policy : EVICT_POLICY_DEFAULT);
    int rc = models_memory_least(t->m, t->kv, e);
    if (rc < 0 || (rc = models_page(t->m, kv, policy->needs_hidden, &t->page, e)) < 0)
        return rc;
    if (t->kv < t->page)
        return BC_OK; /* those who ask for less can be served: models_memory_check tells of it */
    return terms_resolve(t, &ask, &p, e);
}

int engine_session_check(const struct engine *en, const struct engine_session_ask *ask,
                         struct err *e)
{
    struct terms t = {.kv = ask->kv_memory,
                      .usual =
                          ask->session_budget != 0 ? ask->session_budget : SESSION_BUDGET_DEFAULT};
    enum kn_type kv;
    int rc = check_kv_type(ask->kv_type, &kv, e);
    if (rc < 0 || (rc = positions_named(ask->positions, &t.rerotate, e)) < 0 ||
        (rc = check_alone(&ask->evict, e)) < 0 || en == NULL || en->default_model == NULL)
        return rc;
    return check_with(en, &ask->evict, kv, &t, e);
}

/* NULL: no memory. */
static struct uid_turn *turns_take(struct engine *en, uint32_t uid)
{
    struct uid_turn *vacant = NULL;
    for (uint32_t i = 0; i < en->max_sessions; i++) {
        struct uid_turn *u = &en->uids[i];
        if (u->sessions > 0 && u->uid == uid) {
            u->sessions++;
            return u;
        }
        if (u->sessions == 0 && vacant == NULL)
            vacant = u;
    }
    bc_assert(vacant != NULL); /* as many as sessions */
    struct ledger_owner *owner = ledger_uid_get(en->ledger, uid);
    if (owner == NULL)
        return NULL;
    *vacant = (struct uid_turn){.uid = uid, .sessions = 1, .owner = owner};
    return vacant;
}

static void turns_drop(struct engine *en, struct uid_turn *u)
{
    if (--u->sessions == 0)
        ledger_uid_put(en->ledger, &u->owner);
}

/* The names in a request become ones that live as long as the program. */
static void ask_intern(struct evict_request *ask, const struct evict_params *p)
{
    ask->policy = p->policy->name;
    ask->score = p->score == EVICT_LOGPROB ? "logprob" : "logit";
    ask->trigger = p->trigger == EVICT_ON_PREFILL_END ? "prefill_end" : "budget";
}

/* Policy, pool and budget of a new session. */
static int open_cache(struct engine *en, struct session *s, const struct command *c, struct err *e)
{
    struct evict_params p;
    s->ask = c->u.open.evict;
    const struct evict_policy *policy =
        evict_policy_find(s->ask.policy != NULL ? s->ask.policy : EVICT_POLICY_DEFAULT);
    if (policy == NULL) /* which ones there are */
        return evict_resolve(&s->ask, 0, 0, &p, e);
    int rc = models_pool(en, s->m, s->kv_type, policy, &s->pool, e);
    if (rc < 0)
        return rc;
    const struct terms t = {.m = s->m,
                            .rerotate = s->rerotate,
                            .page = pool_page_bytes(s->pool),
                            .kv = share_kv(en),
                            .usual = en->opt.session_budget};
    if ((rc = terms_resolve(&t, &s->ask, &p, e)) < 0)
        return rc;
    ask_intern(&s->ask, &p);
    s->frozen_auto = p.frozen == EVICT_FROZEN_AUTO;
    s->budget_bytes = budget_bytes(&p, t.page);
    if (policy->needs_query && (rc = models_query_space(s->m, e)) < 0)
        return rc;
    if ((rc = evict_open(&s->ev, &p, e)) < 0 || (rc = seqcache_open(&s->cache, s->pool, e)) < 0)
        return rc;
    if ((rc = sharing_join(en, s, e)) < 0)
        return rc;
    evict_owner(s->ev, &s->owner);
    seqcache_owner(s->cache, &s->owner, sharing_owner(s));
    return BC_OK;
}

/* Of the ring of newest ids, beyond what SESSION_STATE_BYTES has of it. */
static uint64_t history_bytes(const struct session *s)
{
    return (s->n_recent - SAMPLER_REPEAT_MAX) * sizeof *s->recent;
}

static void sess_free(struct engine *en, struct session **ps)
{
    struct session *s = *ps;
    if (s->cache != NULL)
        seqcache_close(&s->cache);
    sharing_leave(en, s);
    if (s->ev != NULL)
        evict_close(&s->ev);
    if (s->port != NULL)
        port_drop(&s->port);
    scores_abort(s);
    if (s->n_recent > 0)
        ledger_credit(&s->owner, LEDGER_state, history_bytes(s));
    free(s->recent);
    ledger_credit(&s->owner, LEDGER_state, SESSION_STATE_BYTES);
    ledger_owner_close(&s->owner); /* asserts that every byte is back */
    turns_drop(en, s->turns);
    s->magic = 0;
    free(s);
    *ps = NULL;
}

static uint64_t id_next(struct engine *en)
{
    do
        en->last_id++;
    while (en->slots[en->last_id & (en->n_slots - 1)] != NULL);
    return en->last_id;
}

/* id: wanted, if it is free; 0: the next one. */
static void table_add(struct engine *en, struct session *s, uint64_t id)
{
    struct session *there = en->slots[id & (en->n_slots - 1)];
    s->id = id != 0 && there == NULL ? id : id_next(en);
    en->last_id = BC_MAX(en->last_id, s->id);
    s->at = en->n_sessions;
    en->list[en->n_sessions++] = s;
    s->m->sessions++;
    en->weights += s->weight;
    s->turns->weights += s->weight;
    share_update(en);
    pthread_mutex_lock(&en->lock);
    s->face = (struct session_face){.conn = s->conn, .chat = CHAT_FRESH, .fresh = true};
    en->slots[s->id & (en->n_slots - 1)] = s;
    pthread_mutex_unlock(&en->lock);
}

int sess_open(struct engine *en, struct command *c, struct model_ref *m, struct session **ret,
              struct err *e)
{
    if (en->n_sessions == en->max_sessions)
        return err_amount(e, BC_EBUSY, "session", en->max_sessions + 1, en->max_sessions,
                          "%u sessions are open: no more fit", en->max_sessions);
    int rc = check_name(en, c, e);
    if (rc < 0)
        return rc;
    struct session *s = calloc(1, sizeof *s);
    if (s == NULL || (s->turns = turns_take(en, c->uid)) == NULL) {
        free(s);
        return err_nomem(e, sizeof *s);
    }
    s->magic = SESSION_MAGIC;
    s->lodging.waiting_tail = &s->lodging.waiting;
    ledger_owner_open(&s->owner, LEDGER_SESSION, s->turns->owner);
    ledger_charge(&s->owner, LEDGER_state, SESSION_STATE_BYTES);
    s->conn = c->conn;
    s->uid = c->uid;
    s->priority = c->u.open.priority;
    s->weight = c->u.open.weight != 0 ? c->u.open.weight : 1;
    s->m = m;
    s->last_use_us = engine_now(en);
    snprintf(s->name, sizeof s->name, "%s", c->u.open.name != NULL ? c->u.open.name : "");
    memcpy(s->client, c->u.open.client, sizeof s->client);
    s->client[sizeof s->client - 1] = '\0';
    if ((rc = check_kv_type(c->u.open.kv_type, &s->kv_type, e)) < 0 ||
        (rc = positions_named(c->u.open.positions, &s->rerotate, e)) < 0 ||
        (rc = models_chat(m, c->u.open.chat_template, &s->chat, e)) < 0 ||
        (rc = open_cache(en, s, c, e)) < 0)
        goto fail;
    if (s->priority < -100 || s->priority > 100) {
        rc = err_set(e, BC_EINVALID, "priority", "priority %d: must be -100 to 100", s->priority);
        goto fail;
    }
    if (s->weight > ENGINE_WEIGHT_MAX) {
        rc = err_set(e, BC_EINVALID, "weight", "weight %u: must be 1 to %u", s->weight,
                     ENGINE_WEIGHT_MAX);
        goto fail;
    }
    if ((rc = share_admit(en, s, e)) < 0)
        goto fail;
    s->recent = calloc(SAMPLER_REPEAT_MAX, sizeof *s->recent);
    s->port = port_share(c->u.open.port);
    if (s->recent == NULL || s->port == NULL) {
        rc = err_nomem(e, SAMPLER_REPEAT_MAX * sizeof *s->recent);
        goto fail;
    }
    s->n_recent = SAMPLER_REPEAT_MAX;
    table_add(en, s, c->u.open.id);
    *ret = s;
    return BC_OK;
fail:
    sess_free(en, &s);
    return rc;
}

void sess_close(struct engine *en, struct session **ps)
{
    struct session *s = *ps;
    MAGIC_OK(s, SESSION_MAGIC);
    replay_stop(s);
    bc_assert(s->req == NULL);
    tier_close_session(en, s);
    if (s->keeper != NULL) /* the daemon ends: the next one has it */
        keeper_leave(en, s, false);
    pthread_mutex_lock(&en->lock);
    en->slots[s->id & (en->n_slots - 1)] = NULL;
    pthread_mutex_unlock(&en->lock);
    sharing_offer(s); /* what it leaves behind was used now */
    struct session *last = en->list[--en->n_sessions];
    en->list[s->at] = last;
    last->at = s->at;
    s->m->sessions--;
    en->weights -= s->weight;
    s->turns->weights -= s->weight;
    share_update(en);
    s->m->last_use_us = engine_now(en);
    sess_free(en, ps);
}

void sess_refuse_waiters(struct engine *en, struct session *s, const struct err *e)
{
    struct command who = {.session = s->id};
    if (s->prune.active && s->prune.reply) {
        who.conn = s->prune.conn;
        who.request_id = s->prune.request_id;
        report_error(en, &who, e);
        prune_take_back(s);
    }
    if (s->scoring.active && s->scoring.reply) {
        who.conn = s->scoring.conn;
        who.request_id = s->scoring.request_id;
        report_error(en, &who, e);
        scores_abort(s);
    }
}

/* ---- small things ---- */

bool sess_parked(const struct session *s)
{
    return s->port->room < PORT_ROOM_MIN || s->port->queued >= SESSION_REPORTS_MAX ||
           (s->keeper != NULL && s->keeper->flight > KEEPER_FLIGHT_MAX);
}

void sess_remember(struct session *s, uint64_t stream)
{
    uint64_t n = s->n_recent;
    while (n < stream && n < HISTORY_MAX)
        n *= 2;
    int32_t *more = n > s->n_recent ? malloc(n * sizeof *more) : NULL;
    if (more == NULL) /* no memory: what was dropped long ago stays without words */
        return;
    uint64_t first = s->stream - BC_MIN(s->stream, (uint64_t)s->n_recent);
    s->recent_from = BC_MAX(s->recent_from, first);
    for (uint64_t i = first; i < s->stream; i++)
        more[i % n] = s->recent[i % s->n_recent];
    ledger_credit(&s->owner, LEDGER_state, history_bytes(s));
    free(s->recent);
    s->recent = more;
    s->n_recent = (uint32_t)n;
    ledger_charge(&s->owner, LEDGER_state, history_bytes(s));
}

void sess_append(struct session *s, const int32_t *ids, uint32_t n)
{
    seqcache_append(s->cache, n, ids, (int32_t)positions_next(s), s->stream);
    sess_count(s, ids, n);
}

void sess_count(struct session *s, const int32_t *ids, uint32_t n)
{
    sess_remember(s, s->stream + n);
    for (uint32_t i = 0; i < n; i++)
        s->recent[(s->stream + i) % s->n_recent] = ids[i];
    s->stream += n;
}

void sess_ceiling(struct engine *en, struct session *s)
{
    const struct evict_params *p = evict_params(s->ev);
    size_t page = pool_page_bytes(s->pool);
    uint64_t bytes = budget_bytes(p, page);
    uint32_t pages = (uint32_t)(bytes / page), n = seqcache_count(s->cache);
    if (bytes == 0) {
        s->budget_bytes = 0;
        return;
    }
    if (seqcache_pages(s->cache) > pages)
        seqcache_compact(s->cache);
    if (seqcache_pages(s->cache) > pages && n <= (uint64_t)pages * KN_PAGE_ROWS &&
        pressure_pages(en, s, seqcache_pages_within(s->cache, 0, pages), NULL) == BC_OK)
        seqcache_reserve_within(s->cache, 0, pages, NULL);
    s->budget_bytes = BC_MAX(bytes, (uint64_t)seqcache_bytes_held(s->cache));
}

uint32_t sess_tokens(const struct session *s)
{
    return s->lodging.image != NULL ? s->lodging.image->rows : seqcache_count(s->cache);
}

uint32_t sess_budget(const struct session *s)
{
    bool lowered = s->prune.active && s->prune.reason == PRUNE_SHRUNK;
    return lowered ? s->prune.before.budget : evict_params(s->ev)->budget;
}

static const char *state_name(struct engine *en, struct session *s)
{
    if (s->prune.active || s->scoring.active)
        return "pruning";
    if (s->lodging.place == PLACE_AWAY || s->lodging.place == PLACE_COMING)
        return s->lodging.place == PLACE_AWAY ? "spilled" : "returning";
    if (s->req == NULL)
        return queue_has_prompt(en, s) ? "queued" : "idle";
    if (sess_parked(s))
        return "parked";
    return s->req->phase == REQUEST_PREFILL ? "prefill" : "decode";
}

/* One that leaves lies in its pages until the last block is under its sum. */
static const char *tier_name(const struct session *s)
{
    const struct lodging *l = &s->lodging;
    if (l->place == PLACE_AWAY && l->image == NULL) /* put off: its journal */
        return "disk";
    if (l->image == NULL || l->place == PLACE_LEAVING)
        return "memory";
    return l->image->kind == IMAGE_HOST ? "host" : "disk";
}

void sess_info(struct engine *en, struct session *s, struct report_session *r)
{
    const struct evict_params *p = evict_params(s->ev);
    const struct model_info *mi = &s->m->info;
    *r = (struct report_session){
        .id = s->id,
        .budget_bytes = s->budget_bytes,
        .guaranteed = share_guaranteed(en, s),
        .page_bytes = pool_page_bytes(s->pool),
        .row_bytes = pool_row_bytes(s->pool),
        .live = seqcache_bytes_live(s->cache),
        .held = seqcache_bytes_held(s->cache),
        .shared = seqcache_bytes_shared(s->cache),
        .other = ledger_sum(&s->owner) - ledger_own(&s->owner, LEDGER_kv),
        .prunes = s->prunes,
        .dropped = s->dropped,
        .tokens_in = s->tokens_in,
        .tokens_out = s->tokens_out,
        .prune_micros = s->prune_micros,
        .rows_moved = seqcache_rows_moved(s->cache),
        .last_use_us = s->last_use_us,
        .uid = s->uid,
        .budget = p->budget,
        .keep = p->keep,
        .frozen = p->frozen,
        .recent = p->recent,
        .tokens = sess_tokens(s),
        .context = mi->context_train,
        .span = p->span,
        .span_quantile = p->span_quantile,
        .min_gap = p->min_gap,
        .weight = s->weight,
        .priority = s->priority,
        .attached = s->conn != 0,
        .durable = s->keeper != NULL,
    };
    snprintf(r->name, sizeof r->name, "%s", s->name);
    snprintf(r->model, sizeof r->model, "%s", s->m->name);
    snprintf(r->policy, sizeof r->policy, "%s", p->policy->name);
    snprintf(r->kv_type, sizeof r->kv_type, "%s", kn_kv_type_find(s->kv_type)->name);
    snprintf(r->state, sizeof r->state, "%s", state_name(en, s));
    snprintf(r->client, sizeof r->client, "%s", s->conn != 0 ? s->client : "");
    snprintf(r->chat_template, sizeof r->chat_template, "%s", chat_name(s->chat));
    snprintf(r->positions, sizeof r->positions, "%s", positions_name(s));
    snprintf(r->tier, sizeof r->tier, "%s", tier_name(s));
    snprintf(r->score, sizeof r->score, "%s", s->ask.score);
    snprintf(r->trigger, sizeof r->trigger, "%s", s->ask.trigger);
}
