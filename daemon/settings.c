/* settings.c: from the configuration to what the server takes, and whether its values make sense together: what config_read,
 * which looks at one value at a time, cannot judge.
 *
 *   [daemon] log          levels and topics that there are
 *   [daemon] backend, isa names that there are on some machine; whether on this one, kn_open knows
 *   [session]             a session that asks for nothing can be opened: without the model, as far as tokens go;
 *   [memory] kv_memory    with it, in bytes, too
 *   [limits] max_tokens   at least [session] max_tokens, what a request gets that asks for nothing; where nobody has set that
 *                         one, such a request gets the limit at most
 *
 * An error begins with the place where the value at fault was given: a line of the file, or an option. */
#include "daemon.h"
#include "kn.h"
#include "log.h"
#include <string.h>

struct server_limits settings_limits(const struct config *c)
{
    return (struct server_limits){.connections = c->limits_connections,
                                  .sessions = c->limits_sessions,
                                  .requests = c->limits_requests,
                                  .queued_bytes = c->limits_queued_bytes,
                                  .ring_bytes = c->limits_ring_bytes,
                                  .frames_per_second = (uint32_t)c->limits_frames_per_second,
                                  .max_tokens = (uint32_t)c->limits_max_tokens};
}

/* What a request gets that asks for nothing. */
static uint64_t max_tokens_default(const struct config *c)
{
    char place[240];
    if (config_place(c, "session", "max_tokens", place, sizeof place))
        return c->session_max_tokens;
    return BC_MIN(c->session_max_tokens, c->limits_max_tokens);
}

struct server_defaults settings_defaults(const struct config *c)
{
    struct server_defaults d = {
        .budget_tokens = c->session_budget.tokens,
        .budget_bytes = c->session_budget.bytes,
        .keep = (uint32_t)c->session_keep,
        .span = (uint32_t)c->session_span,
        .min_gap = (uint32_t)c->session_min_gap,
        .frozen = c->session_frozen == CONFIG_AUTO ? UINT32_MAX : (uint32_t)c->session_frozen,
        .recent = c->session_recent == CONFIG_AUTO ? -1 : (int64_t)c->session_recent,
        .span_quantile = (float)c->session_span_quantile,
        .max_tokens = (uint32_t)max_tokens_default(c),
    };
    snprintf(d.policy, sizeof d.policy, "%s", c->session_policy);
    snprintf(d.score, sizeof d.score, "%s", c->session_score);
    snprintf(d.trigger, sizeof d.trigger, "%s", c->session_trigger);
    snprintf(d.kv_type, sizeof d.kv_type, "%s", c->session_kv_type);
    snprintf(d.positions, sizeof d.positions, "%s", c->session_positions);
    return d;
}

/* ---- checks */

struct key {
    const char *section, *key;
};

/* The first of n keys (section NULL: skipped) that was not left at its default; "": all were. */
static const char *place_of(const struct config *c, const struct key *keys, size_t n, char *ret,
                            size_t size)
{
    ret[0] = '\0';
    for (size_t i = 0; i < n; i++)
        if (keys[i].section != NULL &&
            config_place(c, keys[i].section, keys[i].key, ret, size - strlen(": "))) {
            strcat(ret, ": ");
            return ret;
        }
    return ret;
}

/* An error's field is called as in the protocol. Of what several keys make impossible together, the field at fault may be
 * one that nobody has set: then it is its budget, its keep or its policy that does not suit the rest. */
static int session_fail(const struct config *c, const struct err *why, struct err *e)
{
    static const char *const names[][2] = {
        {"budget_tokens", "budget"},
        {"budget_bytes", "budget"},
        {"keep_tokens", "keep"},
        {"recent_tokens", "recent"},
        {"frozen_tokens", "frozen"},
        {"policy", "policy"},
        {"score", "score"},
        {"trigger", "trigger"},
        {"span", "span"},
        {"span_quantile", "span_quantile"},
        {"min_gap", "min_gap"},
        {"kv_type", "kv_type"},
        {"positions", "positions"},
    };
    struct key keys[] = {{NULL, NULL},
                         {"session", "keep"},
                         {"session", "budget"},
                         {"session", "policy"},
                         {"session", "frozen"}};
    static const struct key memory = {"memory", "kv_memory"};
    char place[240];
    if (strcmp(why->field, memory.key) == 0)
        return err_set(e, why->code, why->field, "%s[memory] %s",
                       place_of(c, &memory, 1, place, sizeof place), why->text);
    for (size_t i = 0; i < ARRAY_LEN(names); i++)
        if (strcmp(names[i][0], why->field) == 0)
            keys[0] = (struct key){"session", names[i][1]};
    return err_set(e, why->code, why->field, "%s[session] %s",
                   place_of(c, keys, ARRAY_LEN(keys), place, sizeof place), why->text);
}

static int log_fail(const struct config *c, const struct err *why, struct err *e)
{
    const struct key key = {"daemon", "log"};
    char place[240];
    return err_set(e, why->code, why->field, "%s[daemon] log: %s",
                   place_of(c, &key, 1, place, sizeof place), why->text);
}

static bool backend_known(const char *name)
{
    for (unsigned i = 0; kn_backend_name(i) != NULL; i++)
        if (strcmp(name, kn_backend_name(i)) == 0)
            return true;
    return strcmp(name, "auto") == 0;
}

/* what: the key of [daemon]. first may be NULL; names: those that there are besides. */
static int name_fail(const struct config *c, const char *what, const char *value, const char *first,
                     const char *(*names)(unsigned), struct err *e)
{
    const struct key key = {"daemon", what};
    char place[240], list[200];
    size_t at = (size_t)snprintf(list, sizeof list, "%s", first != NULL ? first : "");
    for (unsigned i = 0; names(i) != NULL && at < sizeof list; i++)
        at += (size_t)snprintf(list + at, sizeof list - at, "%s%s", at > 0 ? ", " : "", names(i));
    return err_set(e, BC_EUNKNOWN, what, "%s[daemon] unknown %s \"%s\"; there are %s",
                   place_of(c, &key, 1, place, sizeof place), what, value, list);
}

static int names_check(const struct config *c, struct err *e)
{
    if (!backend_known(c->daemon_backend))
        return name_fail(c, "backend", c->daemon_backend, "auto", kn_backend_name, e);
    if (c->daemon_isa[0] != '\0' && !kn_isa_known(c->daemon_isa))
        return name_fail(c, "isa", c->daemon_isa, NULL, kn_isa_name, e);
    return BC_OK;
}

static int max_tokens_check(const struct config *c, struct err *e)
{
    static const struct key keys[] = {{"limits", "max_tokens"}, {"session", "max_tokens"}};
    char place[240];
    if (max_tokens_default(c) <= c->limits_max_tokens)
        return BC_OK;
    return err_set(e, BC_EINVALID, "max_tokens",
                   "%s[limits] max_tokens %llu is less than [session] max_tokens %llu, which a "
                   "request gets that asks for nothing",
                   place_of(c, keys, ARRAY_LEN(keys), place, sizeof place),
                   (unsigned long long)c->limits_max_tokens,
                   (unsigned long long)c->session_max_tokens);
}

int settings_check(const struct config *c, const struct engine *en, struct err *e)
{
    struct server_defaults d = settings_defaults(c);
    struct err why;
    if (log_check(c->daemon_log, &why) < 0)
        return log_fail(c, &why, e);
    int rc = names_check(c, e);
    if (rc < 0)
        return rc;
    if (server_defaults_check(&d, en, c->memory_kv_memory.bytes, &why) < 0)
        return session_fail(c, &why, e);
    return max_tokens_check(c, e);
}
