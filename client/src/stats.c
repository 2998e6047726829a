/* stats.c: listings, and calls about a session by its number (tools; no ring of its own). */
#include <stdlib.h>
#include <string.h>
#include "lib.h"

void stats_free(struct stats_store *st)
{
    free(st->sessions);
    free(st->models);
    free(st->strings);
    free(st->entries);
    free(st->ledger);
    *st = (struct stats_store){0};
}

/* Puts b as a C string at *at, which moves on. NUL bytes inside end it early: names have none. */
static const char *string_put(char **at, const ProtobufCBinaryData *b)
{
    char *s = *at;
    if (b->len > 0)
        memcpy(s, b->data, b->len);
    s[b->len] = '\0';
    *at = s + b->len + 1;
    return s;
}

/* Of n texts, each with its NUL. */
static size_t strings_bytes(const size_t *len, size_t n)
{
    size_t bytes = n;
    for (size_t i = 0; i < n; i++)
        bytes += len[i];
    return bytes;
}

static size_t strings_size(const Backcast__StatReply *r)
{
    size_t n = 1;
    for (size_t i = 0; i < r->n_sessions; i++) {
        const Backcast__SessionStat *s = r->sessions[i];
        const size_t len[] = {s->name.len,  s->model.len,   s->policy.len,       s->kv_type.len,
                              s->state.len, s->client.len,  s->positions.len,    s->tier.len,
                              s->score.len, s->trigger.len, s->chat_template.len};
        n += strings_bytes(len, sizeof(len) / sizeof(*len));
    }
    for (size_t i = 0; i < r->n_models; i++) {
        const Backcast__ModelStat *m = r->models[i];
        const size_t len[] = {m->name.len, m->family.len, m->path.len, m->backend.len,
                              m->chat_template.len};
        n += strings_bytes(len, sizeof(len) / sizeof(*len));
    }
    for (size_t i = 0; r->daemon != NULL && i < r->daemon->n_ledger; i++)
        n += r->daemon->ledger[i]->name.len + 1;
    return n + (r->daemon != NULL ? r->daemon->version.len : 0) + 1;
}

static void session_put(const Backcast__SessionStat *m, char **at,
                        struct backcast_session_stat *ret)
{
    *ret = (struct backcast_session_stat){
        .id = m->session,
        .uid = m->uid,
        .name = string_put(at, &m->name),
        .model = string_put(at, &m->model),
        .policy = string_put(at, &m->policy),
        .kv_type = string_put(at, &m->kv_type),
        .state = string_put(at, &m->state),
        .client = string_put(at, &m->client),
        .positions = string_put(at, &m->positions),
        .tier = string_put(at, &m->tier),
        .score = string_put(at, &m->score),
        .trigger = string_put(at, &m->trigger),
        .chat_template = string_put(at, &m->chat_template),
        .span = m->span,
        .span_quantile = m->span_quantile,
        .min_gap = m->min_gap,
        .weight = m->weight,
        .priority = m->priority,
        .durable = m->durable != 0,
        .tokens = m->tokens,
        .budget_tokens = m->budget_tokens,
        .keep_tokens = m->keep_tokens,
        .frozen_tokens = m->frozen_tokens,
        .recent_tokens = m->recent_tokens,
        .bytes_live = m->bytes_live,
        .bytes_held = m->bytes_held,
        .bytes_shared = m->bytes_shared,
        .bytes_other = m->bytes_other,
        .bytes_guaranteed = m->bytes_guaranteed,
        .budget_bytes = m->budget_bytes,
        .prunes = m->prunes,
        .tokens_dropped = m->tokens_dropped,
        .tokens_in = m->tokens_in,
        .tokens_out = m->tokens_out,
        .prune_micros = m->prune_micros,
        .rows_moved = m->rows_moved,
        .idle_micros = m->idle_micros,
    };
}

static void model_put(const Backcast__ModelStat *m, char **at, struct backcast_model_stat *ret)
{
    *ret = (struct backcast_model_stat){
        .name = string_put(at, &m->name),
        .family = string_put(at, &m->family),
        .path = string_put(at, &m->path),
        .backend = string_put(at, &m->backend),
        .chat_template = string_put(at, &m->chat_template),
        .bytes_weights = m->bytes_weights,
        .bytes_scratch = m->bytes_scratch,
        .bytes_text = m->bytes_text,
        .context_tokens = m->context_tokens,
        .sessions = m->sessions,
    };
}

int backcast_stats(backcast *c, struct backcast_stats *ret)
{
    Backcast__Stat m = BACKCAST__STAT__INIT;
    ProtobufCMessage *reply = NULL;
    struct call call = {FRAME_STAT, &m.base, FRAME_STAT_REPLY, CALL_MS, &reply, NULL, NULL};
    struct stats_store st = {0};

    fail_clear(c);
    int rc = conn_call(c, &call);
    if (rc < 0)
        return rc;
    const Backcast__StatReply *r = (const Backcast__StatReply *)reply;
    const Backcast__DaemonStat *d = r->daemon;
    char *at = st.strings = malloc(strings_size(r));
    st.sessions = calloc(r->n_sessions + 1, sizeof(*st.sessions));
    st.models = calloc(r->n_models + 1, sizeof(*st.models));
    size_t n_ledger = d != NULL ? d->n_ledger : 0;
    st.ledger = calloc(n_ledger + 1, sizeof(*st.ledger));
    if (at == NULL || st.sessions == NULL || st.models == NULL || st.ledger == NULL) {
        stats_free(&st);
        return fail(&c->fail, BACKCAST_ENOMEM, "", "out of memory");
    }
    for (size_t i = 0; i < r->n_sessions; i++)
        session_put(r->sessions[i], &at, &st.sessions[i]);
    for (size_t i = 0; i < r->n_models; i++)
        model_put(r->models[i], &at, &st.models[i]);
    for (size_t i = 0; i < n_ledger; i++)
        st.ledger[i] = (struct backcast_ledger_line){string_put(&at, &d->ledger[i]->name),
                                                     d->ledger[i]->bytes};
    stats_free(&c->stats);
    c->stats = st;
    *ret = (struct backcast_stats){
        .sessions = st.sessions,
        .n_sessions = r->n_sessions,
        .models = st.models,
        .n_models = r->n_models,
        .version = "",
        .ledger = st.ledger,
        .n_ledger = n_ledger,
    };
    if (d != NULL) {
        ret->bytes_booked = d->bytes_booked;
        ret->bytes_resident = d->bytes_resident;
        ret->kv_held = d->kv_held;
        ret->kv_memory = d->kv_memory;
        ret->bytes_weights = d->bytes_weights;
        ret->bytes_scratch = d->bytes_scratch;
        ret->bytes_rings = d->bytes_rings;
        ret->uptime_micros = d->uptime_micros;
        ret->steps = d->steps;
        ret->n_sessions_all = d->sessions;
        ret->n_connections = d->connections;
        ret->version = string_put(&at, &d->version);
    }
    return 0;
}

static const char *page_tier(uint32_t flags)
{
    return flags & STAT_ENTRY_MEMORY ? "memory"
           : flags & STAT_ENTRY_HOST ? "host"
           : flags & STAT_ENTRY_DISK ? "disk"
                                     : "";
}

static void entry_put(const struct stat_entry *e, uint64_t now, struct backcast_session_stat *ret)
{
    *ret = (struct backcast_session_stat){
        .id = e->session,
        .uid = e->uid,
        .name = e->name,
        .model = e->model,
        .policy = e->policy,
        .kv_type = e->kv_type,
        .state = e->state,
        .client = e->client,
        .positions = "",
        .tier = page_tier(e->flags),
        .score = "",
        .trigger = "",
        .chat_template = "",
        .durable = (e->flags & STAT_ENTRY_DURABLE) != 0,
        .tokens = e->tokens,
        .budget_tokens = e->budget_tokens,
        .keep_tokens = e->keep_tokens,
        .frozen_tokens = e->frozen_tokens,
        .recent_tokens = e->recent_tokens,
        .bytes_live = e->bytes_live,
        .bytes_held = e->bytes_held,
        .bytes_shared = e->bytes_shared,
        .bytes_other = e->bytes_other,
        .bytes_guaranteed = e->bytes_guaranteed,
        .budget_bytes = e->budget_bytes,
        .prunes = e->prunes,
        .tokens_dropped = e->tokens_dropped,
        .tokens_in = e->tokens_in,
        .tokens_out = e->tokens_out,
        .prune_micros = e->prune_micros,
        .rows_moved = e->rows_moved,
        .idle_micros = now > e->last_use_micros ? now - e->last_use_micros : 0,
    };
}

/* A copy from the daemon's memory: no string may lack its end. */
static void entry_close(struct stat_entry *e)
{
    e->state[sizeof(e->state) - 1] = e->name[sizeof(e->name) - 1] = '\0';
    e->model[sizeof(e->model) - 1] = e->policy[sizeof(e->policy) - 1] = '\0';
    e->client[sizeof(e->client) - 1] = e->kv_type[sizeof(e->kv_type) - 1] = '\0';
}

/* The ledger's lines among the counters of the page. */
static const struct {
    const char *name;
    enum stat_id id;
} page_ledger[] = {
    {"weights", STAT_weights}, {"scratch", STAT_scratch},  {"text", STAT_text},
    {"kv", STAT_kv_held},      {"shared", STAT_kv_shared}, {"state", STAT_state},
    {"refresh", STAT_refresh}, {"prompts", STAT_prompts},  {"reports", STAT_reports},
    {"rings", STAT_rings},     {"queued", STAT_queued},    {"border", STAT_border},
    {"journal", STAT_journal}, {"host", STAT_host},
};
#define N_PAGE_LEDGER (sizeof(page_ledger) / sizeof(page_ledger[0]))

static void page_ledger_put(const struct statpage_copy *copy, struct backcast_ledger_line *ret)
{
    for (size_t i = 0; i < N_PAGE_LEDGER; i++) {
        uint64_t bytes = copy->counters[page_ledger[i].id];
        if (page_ledger[i].id == STAT_kv_held) /* the page has both kinds together */
            bytes -= copy->counters[STAT_kv_shared];
        ret[i] = (struct backcast_ledger_line){page_ledger[i].name, bytes};
    }
}

/* "0.1.0", as the listings say it, of "backcastd 0.1.0". */
static const char *version_of(const backcast *c)
{
    const char *program = backcast_daemon_version(c), *space = strrchr(program, ' ');
    return space != NULL ? space + 1 : program;
}

int backcast_stats_page(backcast *c, struct backcast_stats *ret)
{
    struct stats_store st = {0};
    struct statpage_copy copy;
    const char *why = "";

    fail_clear(c);
    if (c->page == NULL)
        return fail(&c->fail, BACKCAST_EUNSUPPORTED, "", "this daemon shares no stats page");
    st.entries = calloc(STATPAGE_ENTRIES_MAX, sizeof(*st.entries));
    st.sessions = calloc(STATPAGE_ENTRIES_MAX + 1, sizeof(*st.sessions));
    st.ledger = calloc(N_PAGE_LEDGER, sizeof(*st.ledger));
    if (st.entries == NULL || st.sessions == NULL || st.ledger == NULL) {
        stats_free(&st);
        return fail(&c->fail, BACKCAST_ENOMEM, "", "out of memory");
    }
    int rc = statpage_read(c->page, c->page_bytes, &copy, st.entries, STATPAGE_ENTRIES_MAX, &why);
    if (rc < 0) {
        stats_free(&st);
        return fail(&c->fail, rc, "", "stats page: %s", why);
    }
    size_t n = copy.n_entries < STATPAGE_ENTRIES_MAX ? copy.n_entries : STATPAGE_ENTRIES_MAX;
    for (size_t i = 0; i < n; i++) {
        entry_close(&st.entries[i]);
        entry_put(&st.entries[i], copy.now_micros, &st.sessions[i]);
    }
    page_ledger_put(&copy, st.ledger);
    stats_free(&c->stats);
    c->stats = st;
    *ret = (struct backcast_stats){
        .sessions = st.sessions,
        .n_sessions = n,
        .version = version_of(c),
        .kv_held = copy.counters[STAT_kv_held],
        .kv_memory = copy.counters[STAT_kv_memory],
        .bytes_weights = copy.counters[STAT_weights],
        .bytes_scratch = copy.counters[STAT_scratch],
        .bytes_rings = copy.counters[STAT_rings],
        .uptime_micros = copy.counters[STAT_uptime_micros],
        .steps = copy.counters[STAT_steps],
        .n_sessions_all = (uint32_t)copy.counters[STAT_sessions],
        .n_connections = (uint32_t)copy.counters[STAT_connections],
        .ledger = st.ledger,
        .n_ledger = N_PAGE_LEDGER,
        .bytes_booked = copy.counters[STAT_booked],
        .bytes_resident = copy.counters[STAT_resident],
    };
    return 0;
}

/* The session object of this connection that has the number, if there is one: its own calls keep its
 * info up to date. */
static backcast_session *session_by_id(backcast *c, uint64_t id)
{
    for (backcast_session *s = c->sessions; s != NULL; s = s->next)
        if (s->id == id && s->dead == 0)
            return s;
    return NULL;
}

int backcast_budget_by_id(backcast *c, uint64_t id, uint64_t bytes, uint32_t tokens,
                          uint32_t keep_tokens)
{
    Backcast__SetBudget m = BACKCAST__SET_BUDGET__INIT;
    struct call call = {FRAME_SET_BUDGET, &m.base, FRAME_BUDGET_SET, CALL_MS, NULL, NULL, NULL};
    backcast_session *s = session_by_id(c, id);

    if (s != NULL)
        return backcast_session_budget(s, bytes, tokens, keep_tokens);
    fail_clear(c);
    m.has_session = true;
    m.session = id;
    m.has_budget_bytes = bytes != 0;
    m.budget_bytes = bytes;
    m.has_budget_tokens = tokens != 0;
    m.budget_tokens = tokens;
    m.has_keep_tokens = keep_tokens != 0;
    m.keep_tokens = keep_tokens;
    return conn_call(c, &call);
}

int backcast_prune_by_id(backcast *c, uint64_t id, uint32_t keep_tokens)
{
    Backcast__Prune m = BACKCAST__PRUNE__INIT;
    struct call call = {FRAME_PRUNE, &m.base, FRAME_PRUNED, CALL_MS, NULL, NULL, NULL};

    fail_clear(c);
    m.has_session = true;
    m.session = id;
    m.has_keep_tokens = keep_tokens != 0;
    m.keep_tokens = keep_tokens;
    return conn_call(c, &call);
}

int backcast_save_by_id(backcast *c, uint64_t id, const char *name)
{
    Backcast__Save m = BACKCAST__SAVE__INIT;
    struct call call = {FRAME_SAVE, &m.base, FRAME_DONE, OPEN_MS, NULL, NULL, NULL};

    fail_clear(c);
    m.has_session = m.has_name = true;
    m.session = id;
    m.name = bytes_of(name != NULL ? name : "");
    return conn_call(c, &call);
}

int backcast_close_by_id(backcast *c, uint64_t id)
{
    Backcast__Close m = BACKCAST__CLOSE__INIT;
    struct call call = {FRAME_CLOSE, &m.base, FRAME_CLOSED, CALL_MS, NULL, NULL, NULL};
    backcast_session *s = session_by_id(c, id);

    fail_clear(c);
    m.has_session = true;
    m.session = id;
    int rc = conn_call(c, &call);
    if (rc == 0 && s != NULL)
        session_kill(s, BACKCAST_ECLOSED, "it was closed by its number");
    return rc;
}
