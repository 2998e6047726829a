/* attach.c: the session of a command: the one that has its name, or a new one.
 *
 *   --name of a session that is there
 *     --budget, --keep-tokens     it gets them
 *     what it was opened with     must be the same: else nothing is done, and a line has both values of each
 *     --system                    is for a session without messages: else nothing is done
 *     --ring-bytes, "auto", and   stays as it was, and a line says so
 *     what an older daemon does
 *     not tell
 */
#include <string.h>
#include <unistd.h>
#include "watch.h"

#define LIST_MAX 2400 /* every option of a session, with both values */

enum same { SAME, OTHER, UNTOLD };

/* An option as it was given, and what the session has, as words. */
struct values {
    char asked[80], has[80];
};

static void list_add(char *list, const char *text)
{
    size_t n = strlen(list);
    snprintf(list + n, LIST_MAX - n, "%s%s", n > 0 ? ", " : "", text);
}

static enum same texts(const char *asked, const char *has, struct values *v)
{
    snprintf(v->asked, sizeof(v->asked), " %s", asked);
    snprintf(v->has, sizeof(v->has), "it has %s", has);
    return has[0] == '\0' ? UNTOLD : strcmp(asked, has) == 0 ? SAME : OTHER;
}

static enum same numbers(double asked, double has, struct values *v)
{
    snprintf(v->asked, sizeof(v->asked), " %g", asked);
    snprintf(v->has, sizeof(v->has), "it has %g", has);
    return asked == has ? SAME : OTHER;
}

/* A model by one of its names, or by its file. */
static bool model_is(const char *asked, const struct backcast_stats *st, const char *has)
{
    const struct backcast_model_stat *m = stats_model(st, has);
    size_t n = strlen(has);

    return (strncmp(asked, has, n) == 0 && (asked[n] == '\0' || strcmp(asked + n, ".gguf") == 0)) ||
           (asked[0] == '/' && m != NULL && strcmp(m->path, asked) == 0);
}

/* What every daemon tells. */
static enum same compare_old(const struct backcast_session_options *o, const char *name,
                             const struct backcast_session_stat *s, struct values *v)
{
    if (strcmp(name, "policy") == 0)
        return texts(o->policy, s->policy, v);
    if (strcmp(name, "kv-type") == 0)
        return texts(o->kv_type, s->kv_type, v);
    if (strcmp(name, "positions") == 0)
        return texts(o->positions, s->positions, v);
    if (strcmp(name, "recent-tokens") == 0 && o->recent_tokens != BACKCAST_RECENT_AUTO)
        return numbers(o->recent_tokens, s->recent_tokens, v);
    if (strcmp(name, "frozen-tokens") == 0 && o->frozen_tokens != BACKCAST_FROZEN_AUTO)
        return numbers(o->frozen_tokens, s->frozen_tokens, v);
    if (strcmp(name, "name") == 0 || strcmp(name, "budget") == 0 ||
        strcmp(name, "keep-tokens") == 0 || strcmp(name, "seed") == 0)
        return SAME; /* it gets them, or they are the answer's */
    return UNTOLD;
}

static enum same option_compare(const struct backcast_session_options *o, const char *name,
                                const struct backcast_session_stat *s, struct values *v)
{
    bool told = s->score[0] != '\0';

    if (strcmp(name, "durable") == 0) {
        snprintf(v->has, sizeof(v->has), "it is not");
        v->asked[0] = '\0';
        return s->tier[0] == '\0' ? UNTOLD : s->durable ? SAME : OTHER;
    }
    if (strcmp(name, "score") == 0)
        return texts(o->score, s->score, v);
    if (strcmp(name, "trigger") == 0)
        return texts(o->trigger, s->trigger, v);
    if (strcmp(name, "chat-template") == 0)
        return texts(o->chat_template, s->chat_template, v);
    if (told && strcmp(name, "span") == 0)
        return numbers(o->span, s->span, v);
    if (told && strcmp(name, "span-quantile") == 0)
        return numbers((double)o->span_quantile, (double)s->span_quantile, v);
    if (told && strcmp(name, "min-gap") == 0)
        return numbers(o->min_gap, s->min_gap, v);
    if (told && strcmp(name, "priority") == 0)
        return numbers(o->priority, s->priority, v);
    if (told && strcmp(name, "weight") == 0)
        return numbers(o->weight > 0 ? o->weight : 1, s->weight, v);
    return compare_old(o, name, s, v);
}

static int options_compare(const struct args *a, const struct backcast_stats *st,
                           const struct backcast_session_stat *s)
{
    char other[LIST_MAX] = "", untold[LIST_MAX] = "", line[240];
    const char *name;
    struct values v;

    if (a->session.model != NULL && !model_is(a->session.model, st, s->model)) {
        snprintf(line, sizeof(line), "--model %.80s (it has %.80s)", a->session.model, s->model);
        list_add(other, line);
    }
    for (unsigned i = 0; (name = args_given(a, OPT_SESSION, i)) != NULL; i++) {
        enum same same = option_compare(&a->session, name, s, &v);
        if (same == UNTOLD)
            snprintf(line, sizeof(line), "--%s", name);
        else
            snprintf(line, sizeof(line), "--%s%s (%s)", name, v.asked, v.has);
        if (same != SAME)
            list_add(same == OTHER ? other : untold, line);
    }
    if (other[0] != '\0') {
        say("session %s is there already and has other values: %s; leave them out, or end it first "
            "(`backcast close %s`)",
            a->session.name, other, a->session.name);
        return CLI_FAILED;
    }
    if (untold[0] != '\0' && !a->quiet)
        say("session %s is there already and stays as it was opened: nothing is done with %s",
            a->session.name, untold);
    return CLI_FINE;
}

bool session_has_messages(const struct backcast_session_stat *s)
{
    static const char *const works[] = {"queued", "prefill", "decode", "pruning"};

    for (size_t i = 0; i < ARRAY_LEN(works); i++)
        if (strcmp(s->state, works[i]) == 0)
            return true;
    return s->tokens > 0 || s->tokens_in > 0 || s->tokens_out > 0;
}

static int system_check(const struct args *a, const struct backcast_session_stat *s)
{
    if (a->system == NULL || !session_has_messages(s))
        return CLI_FINE;
    say("session %s is there already and has messages, and --system goes before the first one: "
        "leave it out, or end the session first (`backcast close %s`)",
        a->session.name, a->session.name);
    return CLI_FAILED;
}

/* The session that an attach would find, if there is one, is what was asked for. Before anybody attaches: an answer that nobody waits
 * for goes on. */
static int session_check(const struct args *a, backcast *c)
{
    struct backcast_stats st;
    unsigned others;
    int rc = backcast_stats(c, &st);

    if (rc < 0) {
        say_failure(c, rc, "session");
        return CLI_FAILED;
    }
    const struct backcast_session_stat *s = stats_named(&st, a->session.name, &others);
    if (others > 1 || (others == 1 && geteuid() == 0))
        s = NULL; /* none but administrators see what is not theirs: who else sees one is in a user namespace, where numbers differ */
    if (s == NULL)
        return CLI_FINE;
    rc = options_compare(a, &st, s);
    return rc == CLI_FINE ? system_check(a, s) : rc;
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
        tokens = was.budget_tokens; /* the same, with another keep */
    int rc = backcast_session_budget(s, bytes, tokens, keep);
    if (rc < 0)
        return say_refusal(a, c, rc, "budget");
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
    int rc = BACKCAST_EUNKNOWN;

    if (l->own != NULL)
        a->session.model = NULL; /* its only one */
    if (ret_old != NULL)
        *ret_old = false;
    if (opt->name != NULL && l->own == NULL) {
        int cli = session_check(a, l->c);
        if (cli != CLI_FINE)
            return cli;
        rc = backcast_session_attach(l->c, opt->name, ret);
        if (rc == 0) {
            if (ret_old != NULL)
                *ret_old = true;
            return budget_apply(a, l->c, *ret);
        }
    }
    if (rc == BACKCAST_EUNKNOWN || rc == BACKCAST_ENOTFOUND || rc == BACKCAST_EUNSUPPORTED)
        rc = backcast_session_open(l->c, opt, ret);
    if (rc < 0) {
        bool model = strcmp(backcast_last_error_field(l->c), "model") == 0;
        int cli = say_refusal(a, l->c, rc, "session");
        if (model && (rc == BACKCAST_EUNKNOWN || rc == BACKCAST_ENOTFOUND))
            models_say(l->c);
        return cli;
    }
    return CLI_FINE;
}
