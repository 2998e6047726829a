/* link.c: a daemon to talk to: the one that listens, else, where the command may, a private one. */
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "cli.h"
#include "private.h"

#define GONE_TRIES 10

static int start_own(struct link *l, const struct args *a)
{
    struct private_options opt = private_options(a);
    struct err e = {0};

    int rc = args_check(a, &e); /* before seconds go by */
    if (rc < 0) {
        say_err(&e, "options");
        return rc == BC_EINVALID ? CLI_USAGE : CLI_FAILED;
    }
    if (!a->quiet)
        say("no daemon listens: starting a private one for this command");
    rc = private_start(&l->own, &opt, &e);
    if (rc < 0)
        return private_failed(&e, "private daemon");
    rc = backcast_connect(&l->c, private_socket(l->own));
    if (rc < 0) {
        say_failure(NULL, rc, "private daemon");
        private_stop(&l->own);
        return CLI_FAILED;
    }
    return CLI_FINE;
}

/* The daemon that listens has settings of its own: an answer made with others than were asked for is none. */
static bool private_asked(const struct args *a, const backcast *c)
{
    char list[80] = "";
    const char *name;
    unsigned n = 0;

    while ((name = args_given(a, OPT_PRIVATE, n)) != NULL) {
        size_t len = strlen(list);
        snprintf(list + len, sizeof(list) - len, "%s--%s", n++ > 0 ? ", " : "", name);
    }
    if (n > 0)
        say("a daemon listens (%s), and %s %s for a private one: leave %s out, or give %s to that "
            "daemon",
            backcast_daemon_version(c), list, n == 1 ? "is" : "are", n == 1 ? "it" : "them",
            n == 1 ? "it" : "them");
    return n > 0;
}

int link_open(struct link *ret, const struct args *a, bool may_start)
{
    struct link l = {NULL, NULL};
    int rc = backcast_connect(&l.c, a->socket);

    for (int i = 0; rc == BACKCAST_ECLOSED && i < GONE_TRIES && interrupt_count() == 0; i++) {
        poll(NULL, 0, 100); /* it ended while we said hello: is there another one? */
        rc = backcast_connect(&l.c, a->socket);
    }
    if (rc == BACKCAST_ENOTFOUND && may_start && !a->no_start && a->socket == NULL) {
        rc = start_own(&l, a);
        if (rc == CLI_FINE)
            *ret = l;
        return rc;
    }
    if (rc < 0) {
        int cli = say_refusal(a, NULL, rc, "connect");
        if (rc == BACKCAST_ECLOSED)
            say("the daemon ended, or was stopped, just now: try again when it is back");
        return cli;
    }
    if (private_asked(a, l.c)) {
        link_close(&l);
        return CLI_FAILED;
    }
    *ret = l;
    return CLI_FINE;
}

void link_close(struct link *l)
{
    backcast_disconnect(&l->c);
    private_stop(&l->own);
}

/* "12" or "#12"; 0: neither. */
static uint64_t number_of(const char *text)
{
    char *end;
    const char *digits = text + (text[0] == '#');
    if (digits[0] < '0' || digits[0] > '9')
        return 0;
    uint64_t id = strtoull(digits, &end, 10);
    return *end == '\0' ? id : 0;
}

const struct backcast_session_stat *stats_session(const struct backcast_stats *st, uint64_t id)
{
    for (size_t i = 0; i < st->n_sessions; i++)
        if (st->sessions[i].id == id)
            return &st->sessions[i];
    return NULL;
}

const struct backcast_session_stat *stats_named(const struct backcast_stats *st, const char *name,
                                                unsigned *ret_others)
{
    const struct backcast_session_stat *other = NULL;

    *ret_others = 0;
    for (size_t i = 0; i < st->n_sessions; i++) {
        if (strcmp(st->sessions[i].name, name) != 0)
            continue;
        if (st->sessions[i].uid == geteuid()) {
            *ret_others = 0;
            return &st->sessions[i];
        }
        other = &st->sessions[i];
        ++*ret_others;
    }
    return other;
}

const struct backcast_model_stat *stats_model(const struct backcast_stats *st, const char *name)
{
    for (size_t i = 0; i < st->n_models; i++)
        if (strcmp(st->models[i].name, name) == 0)
            return &st->models[i];
    return NULL;
}

const struct backcast_session_stat *session_look(backcast *c, uint64_t id, int *ret_rc)
{
    struct backcast_stats st;

    *ret_rc = backcast_stats(c, &st);
    return *ret_rc < 0 ? NULL : stats_session(&st, id);
}

const struct backcast_session_stat *session_find(backcast *c, const char *text)
{
    const struct backcast_session_stat *s = NULL;
    struct backcast_stats st;
    unsigned others = 0;
    int rc = backcast_stats(c, &st);

    if (rc < 0) {
        say_failure(c, rc, "sessions");
        return NULL;
    }
    if (text[0] != '#')
        s = stats_named(&st, text, &others);
    if (others > 1) {
        say("%u users have a session that is called '%s': give its number, #N (backcast ls)",
            others, text);
        return NULL;
    }
    if (s == NULL)
        s = stats_session(&st, number_of(text));
    if (s == NULL)
        say("no session has the name or number '%s' (backcast ls)", text);
    return s;
}

int session_do(struct args *a, session_act *act)
{
    struct link l;
    int rc = link_open(&l, a, false);

    if (rc != CLI_FINE)
        return rc;
    const struct backcast_session_stat *s = session_find(l.c, a->rest[0]);
    rc = s != NULL ? act(a, l.c, s) : CLI_FAILED;
    link_close(&l);
    return rc;
}
