/* state.c: see state.h. */
#include "state.h"
#include "core.h"
#include <string.h>

static int damaged(struct err *e, const char *what)
{
    return err_set(e, BC_ECORRUPT, "state", "the session's state is damaged: %s", what);
}

const char *sess_template(const struct session *s)
{
    return s->chat == s->m->chat ? "" : chat_name(s->chat);
}

void sess_state_put(const struct session *s, struct bytes_out *o)
{
    const uint64_t counts[7] = {s->prunes,       s->dropped,       s->tokens_in,     s->tokens_out,
                                s->prune_micros, s->prunes_at_end, s->dropped_at_end};
    uint32_t n = (uint32_t)BC_MIN(s->stream, (uint64_t)s->n_recent);
    bytes_put_u32(o, STATE_VERSION);
    bytes_put_u32(o, s->uid);
    bytes_put_u32(o, (uint32_t)s->priority);
    bytes_put_u32(o, s->weight);
    bytes_put_u64(o, s->snapshot_mark);
    bytes_put_text(o, s->name);
    bytes_put_text(o, s->client);
    bytes_put_text(o, s->m->name);
    bytes_put_text(o, s->m->path);
    bytes_put_text(o, sess_template(s));
    bytes_put_text(o, kn_kv_type_find(s->kv_type)->name);
    evict_request_put(&s->ask, o);
    evict_params_put(evict_params(s->ev), o);
    bytes_put_u32(o, s->frozen_auto);
    bytes_put_u64(o, s->stream);
    bytes_put_u32(o, s->rerotate);
    bytes_put_u64(o, s->position_zero);
    bytes_put_u32(o, s->has_pending);
    bytes_put_u32(o, (uint32_t)s->pending);
    bytes_put_u32(o, (uint32_t)s->chat_state);
    bytes_put_u32(o, n);
    for (uint32_t i = 0; i < n; i++)
        bytes_put_u32(o, (uint32_t)s->recent[(s->stream - n + i) % s->n_recent]);
    for (size_t i = 0; i < ARRAY_LEN(counts); i++)
        bytes_put_u64(o, counts[i]);
    bytes_put_u32(o, s->dropped_why);
    evict_state_put(s->ev, o);
}

static void get_recent(struct bytes_in *in, struct sess_state *st)
{
    st->n_recent = bytes_get_u32(in);
    if (st->n_recent > HISTORY_MAX || st->n_recent > st->stream)
        in->failed = true;
    st->recent = bytes_take(in, st->n_recent * sizeof(int32_t));
}

int sess_state_get(const void *bytes, size_t n, struct sess_state *st, struct err *e)
{
    struct bytes_in in = {.at = bytes, .n = n};
    memset(st, 0, sizeof *st);
    uint32_t version = bytes_get_u32(&in);
    if (!in.failed && (version < STATE_VERSION_MIN || version > STATE_VERSION))
        return err_set(e, BC_EVERSION, "state",
                       "the session's state is of version %u, this daemon reads versions %u to %u",
                       version, STATE_VERSION_MIN, STATE_VERSION);
    st->uid = bytes_get_u32(&in);
    st->priority = (int32_t)bytes_get_u32(&in);
    st->weight = bytes_get_u32(&in);
    st->mark = bytes_get_u64(&in);
    bytes_get_text(&in, st->name, sizeof st->name);
    bytes_get_text(&in, st->client, sizeof st->client);
    bytes_get_text(&in, st->model, sizeof st->model);
    bytes_get_text(&in, st->path, sizeof st->path);
    bytes_get_text(&in, st->chat_template, sizeof st->chat_template);
    bytes_get_text(&in, st->kv_type, sizeof st->kv_type);
    if (in.failed)
        return damaged(e, "it ends too early");
    int rc = evict_request_get(&in, &st->ask, e);
    if (rc < 0 || (rc = evict_params_get(&in, &st->params, e)) < 0)
        return rc;
    st->frozen_auto = bytes_get_u32(&in) != 0;
    st->stream = bytes_get_u64(&in);
    if (version > STATE_VERSION_MIN) {
        st->rerotate = bytes_get_u32(&in) != 0;
        st->position_zero = bytes_get_u64(&in);
    }
    st->has_pending = bytes_get_u32(&in) != 0;
    st->pending = (int32_t)bytes_get_u32(&in);
    uint32_t chat = bytes_get_u32(&in);
    st->chat = (enum chat_state)chat;
    get_recent(&in, st);
    uint64_t *counts[7] = {&st->prunes,        &st->dropped,      &st->tokens_in,
                           &st->tokens_out,    &st->prune_micros, &st->prunes_at_end,
                           &st->dropped_at_end};
    for (size_t i = 0; i < ARRAY_LEN(counts); i++)
        *counts[i] = bytes_get_u64(&in);
    st->dropped_why = bytes_get_u32(&in);
    st->policy = in.at;
    st->n_policy = in.n;
    if (in.failed)
        return damaged(e, "it ends too early");
    if (st->position_zero > st->stream || (!st->rerotate && st->position_zero != 0) ||
        st->stream - st->position_zero > INT32_MAX)
        return damaged(e, "its next position is none");
    if (chat > CHAT_ENDED || st->frozen_auto != (st->params.frozen == EVICT_FROZEN_AUTO) ||
        strcmp(st->ask.policy, st->params.policy->name) != 0)
        return damaged(e, "its parts contradict each other");
    return BC_OK;
}

static bool ids_ok(const struct session *s, const void *bytes, uint32_t n)
{
    struct bytes_in in = {.at = bytes, .n = n * sizeof(int32_t)};
    for (uint32_t i = 0; i < n; i++)
        if (bytes_get_u32(&in) >= s->m->sampler.n_vocab)
            return false;
    return true;
}

void sess_state_take(struct session *s, const struct sess_state *st)
{
    int rc = evict_set_params(s->ev, &st->params, NULL);
    bc_assert(rc == BC_OK); /* they were checked, and the policy is the session's */
    s->ask = st->ask;
    s->frozen_auto = st->frozen_auto;
    s->stream = st->stream;
    s->position_zero = st->position_zero;
    s->has_pending = st->has_pending;
    s->pending = st->pending;
    s->chat_state = st->chat;
    s->prunes = st->prunes;
    s->dropped = st->dropped;
    s->tokens_in = st->tokens_in;
    s->tokens_out = st->tokens_out;
    s->prune_micros = st->prune_micros;
    s->prunes_at_end = st->prunes_at_end;
    s->dropped_at_end = st->dropped_at_end;
    s->dropped_why = st->dropped_why;
}

int sess_policy_apply(struct session *s, const struct sess_state *st, uint32_t n_rows,
                      struct err *e)
{
    struct bytes_in in = {.at = st->policy, .n = st->n_policy};
    return evict_state_get(s->ev, &in, n_rows, e);
}

int sess_state_apply(struct session *s, const struct sess_state *st, uint32_t n_rows, struct err *e)
{
    struct bytes_in in = {.at = st->policy, .n = st->n_policy};
    if (!ids_ok(s, st->recent, st->n_recent) || (st->has_pending && !ids_ok(s, &st->pending, 1)))
        return damaged(e, "a token that the vocabulary lacks");
    if (st->params.budget != 0 && n_rows > st->params.budget)
        return damaged(e, "more tokens are cached than its budget allows");
    uint64_t bytes = budget_bytes(&st->params, pool_page_bytes(s->pool)),
             most = (uint64_t)pool_pages_max(s->pool) * pool_page_bytes(s->pool);
    if (bytes > most)
        return err_amount(e, BC_EBUDGET, "budget_bytes", bytes, most,
                          "its budget of %llu bytes: the daemon's kv_memory holds %llu",
                          (unsigned long long)bytes, (unsigned long long)most);
    int rc = positions_check(s->m, s->rerotate, &st->params, e);
    if (rc < 0 || (rc = evict_set_params(s->ev, &st->params, e)) < 0 ||
        (rc = evict_state_get(s->ev, &in, n_rows, e)) < 0)
        return rc;
    s->budget_bytes = bytes;
    sess_state_take(s, st);
    sess_remember(s, s->stream);
    s->recent_from = st->stream - st->n_recent;
    struct bytes_in ids = {.at = st->recent, .n = st->n_recent * sizeof(int32_t)};
    for (uint32_t i = 0; i < st->n_recent; i++)
        s->recent[(st->stream - st->n_recent + i) % s->n_recent] = (int32_t)bytes_get_u32(&ids);
    return BC_OK;
}
