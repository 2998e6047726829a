/* attach.c: the session of a command: the one that has its name, or a new one.
 *
 *   --name of a session that is there
 *     --budget, --keep-tokens     it gets them
 *     what it tells about itself  (policy, template, kv type, frozen, recent): must be the same
 *     what it does not tell       stays as it was opened, and a line says so
 */
#include <string.h>
#include "watch.h"

#define LIST_MAX 300

static void list_add(char *list, const char *name)
{
    size_t n = strlen(list);
    snprintf(list + n, LIST_MAX - n, "%s--%s", n > 0 ? ", " : "", name);
}

/* The storage type of a session's cache; "": the daemon does not say. */
static void kv_type_of(backcast *c, uint64_t id, char *ret, size_t len)
{
    struct backcast_stats st;
    ret[0] = '\0';
    if (backcast_stats(c, &st) < 0)
        return;
    for (size_t i = 0; i < st.n_sessions; i++)
        if (st.sessions[i].id == id)
            snprintf(ret, len, "%s", st.sessions[i].kv_type);
}

enum same { SAME, OTHER, UNTOLD };

static enum same same_text(const char *asked, const char *has)
{
    return has == NULL || has[0] == '\0' ? UNTOLD : strcmp(asked, has) == 0 ? SAME : OTHER;
}

/* Is the option `name`, as it was given, what the session has? */
static enum same option_compare(const struct args *a, const char *name, backcast *c,
                                const struct backcast_session_info *info)
{
    const struct backcast_session_options *o = &a->session;
    char kv_type[16];

    if (strcmp(name, "policy") == 0)
        return same_text(o->policy, info->policy);
    if (strcmp(name, "chat-template") == 0)
        return same_text(o->chat_template, info->chat_template);
    if (strcmp(name, "positions") == 0)
        return same_text(o->positions, info->positions);
    if (strcmp(name, "recent-tokens") == 0)
        return o->recent_tokens == BACKCAST_RECENT_AUTO  ? UNTOLD
               : o->recent_tokens == info->recent_tokens ? SAME
                                                         : OTHER;
    if (strcmp(name, "frozen-tokens") == 0)
        return o->frozen_tokens == BACKCAST_FROZEN_AUTO  ? UNTOLD
               : o->frozen_tokens == info->frozen_tokens ? SAME
                                                         : OTHER;
    if (strcmp(name, "kv-type") == 0) {
        kv_type_of(c, info->id, kv_type, sizeof(kv_type));
        return same_text(o->kv_type, kv_type);
    }
    return strcmp(name, "name") == 0 || strcmp(name, "budget") == 0 ||
                   strcmp(name, "keep-tokens") == 0 || strcmp(name, "seed") == 0
               ? SAME
               : UNTOLD;
}

/* A model by one of its names, or by its file. */
static bool model_is(const char *asked, backcast *c, const char *has)
{
    struct backcast_stats st;
    size_t n = strlen(has);

    if (strncmp(asked, has, n) == 0 && (asked[n] == '\0' || strcmp(asked + n, ".gguf") == 0))
        return true;
    if (asked[0] != '/' || backcast_stats(c, &st) < 0)
        return false;
    for (size_t i = 0; i < st.n_models; i++)
        if (strcmp(st.models[i].name, has) == 0)
            return strcmp(st.models[i].path, asked) == 0;
    return false;
}

static int options_compare(const struct args *a, backcast *c,
                           const struct backcast_session_info *info)
{
    char other[LIST_MAX] = "", untold[LIST_MAX] = "";
    const char *name;

    if (a->session.model != NULL && !model_is(a->session.model, c, info->model))
        list_add(other, "model");
    for (unsigned i = 0; (name = args_given(a, OPT_SESSION, i)) != NULL; i++) {
        enum same same = option_compare(a, name, c, info);
        if (same == OTHER)
            list_add(other, name);
        else if (same == UNTOLD)
            list_add(untold, name);
    }
    if (other[0] != '\0') {
        say("session %s is there already and has other values: %s (`backcast stat %s` shows them, "
            "`backcast close %s` ends it)",
            a->session.name, other, a->session.name, a->session.name);
        return CLI_FAILED;
    }
    if (untold[0] != '\0' && !a->quiet)
        say("session %s is there already and stays as it was opened: nothing is done with %s",
            a->session.name, untold);
    return CLI_FINE;
}

static int budget_apply(const struct args *a, backcast *c, backcast_session *s)
{
    struct backcast_session_info was, now;
    uint64_t bytes = a->budget.bytes;
    uint32_t tokens = a->budget.tokens, keep = a->session.keep_tokens;

    if (bytes == 0 && tokens == 0 && keep == 0)
        return CLI_FINE;
    backcast_session_info(s, &was);
    if (bytes == 0 && tokens == 0)
        bytes = was.budget_bytes; /* the same, with another keep */
    int rc = backcast_session_budget(s, bytes, tokens, keep);
    if (rc < 0) {
        say_failure(c, rc, "budget");
        return CLI_FAILED;
    }
    backcast_session_info(s, &now);
    if (!a->quiet && (now.budget_tokens != was.budget_tokens || now.keep_tokens != was.keep_tokens))
        say("session %s has a budget of %u tokens now, keep %u (it had %u, keep %u)",
            a->session.name, now.budget_tokens, now.keep_tokens, was.budget_tokens,
            was.keep_tokens);
    return CLI_FINE;
}

/* Names that would have worked. */
static void models_say(backcast *c)
{
    const char *name;
    char list[600] = "";

    for (unsigned i = 0; (name = backcast_model_name(c, i)) != NULL; i++) {
        size_t n = strlen(list);
        snprintf(list + n, sizeof(list) - n, "%s%s", n > 0 ? ", " : "", name);
    }
    if (list[0] != '\0')
        say("models of this daemon: %s", list);
}

int session_begin(const struct link *l, struct args *a, backcast_session **ret, bool *ret_old)
{
    char path[4096];
    const struct backcast_session_options *opt = args_session(a, path, sizeof(path));
    struct backcast_session_info info;
    int rc = BACKCAST_EUNKNOWN;

    if (l->own != NULL)
        a->session.model = NULL; /* its only one */
    if (ret_old != NULL)
        *ret_old = false;
    if (opt->name != NULL && l->own == NULL) {
        rc = backcast_session_attach(l->c, opt->name, ret);
        if (rc == 0) {
            if (ret_old != NULL)
                *ret_old = true;
            backcast_session_info(*ret, &info);
            int cli = options_compare(a, l->c, &info);
            return cli == CLI_FINE ? budget_apply(a, l->c, *ret) : cli;
        }
    }
    if (rc == BACKCAST_EUNKNOWN || rc == BACKCAST_ENOTFOUND || rc == BACKCAST_EUNSUPPORTED)
        rc = backcast_session_open(l->c, opt, ret);
    if (rc < 0) {
        bool model = strcmp(backcast_last_error_field(l->c), "model") == 0;
        say_failure(l->c, rc, "session");
        if (model && (rc == BACKCAST_EUNKNOWN || rc == BACKCAST_ENOTFOUND))
            models_say(l->c);
        return CLI_FAILED;
    }
    return CLI_FINE;
}
