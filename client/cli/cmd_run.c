/* cmd_run.c: run: one prompt, one answer. */
#include <stdlib.h>
#include <string.h>
#include "cli.h"
#include "input.h"
#include "watch.h"

static int run_session(const struct link *l, struct args *a, const char *text, size_t len)
{
    backcast_session *s = NULL;
    struct watch w;
    bool old = false;

    int rc = session_begin(l, a, &s, &old);
    if (rc != CLI_FINE)
        return rc;
    rc = watch_open(&w, l, s, a);
    if (rc == CLI_FINE && old) {
        w.mute = true; /* what it said before is not this command's answer */
        rc = watch_replay(&w);
        rc = rc == CLI_INTERRUPTED ? rc : CLI_FINE;
        w.mute = false;
    }
    if (rc == CLI_FINE && a->system != NULL) {
        w.silent = true;
        rc = watch_send(&w, "system", a->system, strlen(a->system), &a->generate);
    }
    w.silent = false;
    if (rc == CLI_FINE) {
        rc = watch_send(&w, a->raw ? NULL : "user", text, len, &a->generate);
        if (rc == CLI_FAILED && w.durable && w.taken && watch_is_over(&w))
            say("the daemon has gone: the next one goes on with the answer (`backcast chat --name "
                "%s` shows it)",
                a->session.name);
    }
    watch_close(&w);
    if (a->session.name == NULL)
        backcast_session_close(&s);
    return rc;
}

int cmd_run(struct args *a)
{
    struct link l;
    char *text = NULL;
    size_t len = 0;

    interrupt_watch();
    if (a->file == NULL && a->n_rest > 0 && input_is_piped())
        a->file = "-";
    int rc = input_text(a, &text, &len);
    if (rc != CLI_FINE)
        return rc;
    if (len == 0) {
        say("the prompt is empty: give it as an argument, with -f FILE, or on standard input");
        free(text);
        return CLI_USAGE;
    }
    rc = link_open(&l, a, true);
    if (rc == CLI_FINE) {
        rc = run_session(&l, a, text, len);
        link_close(&l);
    }
    free(text);
    return rc;
}
