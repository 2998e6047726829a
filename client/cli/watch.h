/* watch.h: one session followed from a prompt to its END, and shown: text to stdout, all else to
 * stderr, or everything as JSON lines. Shared by run and chat. */
#ifndef BACKCAST_WATCH_H
#define BACKCAST_WATCH_H
#include "cli.h"
#include "transcript.h"

struct watch {
    backcast *c;
    backcast_session *s;
    const struct args *a;
    struct transcript *t;
    bool durable;   /* the session outlives the daemon */
    bool lines;     /* end every answer with a newline on a pipe too (run gives the bare text) */
    bool silent;    /* a system message is put down: nothing to show but errors */
    bool mute;      /* not even those: what a session said before this command */
    bool replay;    /* chat: the same, shown: texts alone, or events that say so */
    bool under_way; /* events have come since the last END */
    bool taken;     /* the daemon has accepted the last message */
    bool cancelled; /* Ctrl-C was passed on */
    bool closed;    /* the daemon has closed the session, or gone */
    bool line_open; /* stdout's terminal line is not ended */
    bool texted;    /* text has come: what is to be told waits until its end */
    char *held;     /* malloced; lines about prunes */
    size_t held_len;
    uint64_t prunes, dropped, prune_micros; /* since watch_open */
};

/* attach.c: attaches to the session that a->session.name names, or opens one. Says what goes wrong;
 * returns a cli_exit. *ret_old (may be NULL): it was there already. Then it gets the budget that was
 * asked for; what else was asked for must be what it has, and a->system must come before its first
 * message: whoever calls sends it. */
int session_begin(const struct link *l, struct args *a, backcast_session **ret, bool *ret_old);
/* A system message has no place left: the session has messages, or works on its first one. */
bool session_has_messages(const struct backcast_session_stat *s);
/* Finds the words of the session's model, where its file can be read. */
int watch_open(struct watch *w, const struct link *l, backcast_session *s, const struct args *a);
void watch_close(struct watch *w);
/* Sends a message (role NULL: raw text) and shows what comes until its END. A cli_exit: FINE,
 * FAILED, USAGE (the daemon refused an option's value), or INTERRUPTED (cancelled by Ctrl-C). */
int watch_send(struct watch *w, const char *role, const char *text, size_t len,
               const struct backcast_generate_options *opt);
/* After a failure: the connection is over, too. A daemon that stops closes its sessions before it, so where only the session is gone it
 * is asked something that one that lives answers. */
bool watch_is_over(struct watch *w);
/* Events that a call has caused (of a live budget, of a prune). */
void watch_drain(struct watch *w);
/* What an attached session said before; an answer that is still under way comes to its end. A
 * cli_exit. */
int watch_replay(struct watch *w);
/* The rest of an answer whose connection was lost and has been made again. A cli_exit. */
int watch_resume(struct watch *w);
/* "forgot 128 of 512 tokens ..." for one PRUNED event, into buf. */
void prune_text(const struct transcript *t, const struct backcast_event *ev, char *buf, size_t len);
/* The same for one REROTATED event. */
void rerotated_text(const struct backcast_event *ev, char *buf, size_t len);
/* Passes that decode_micros of an END has taken: the first token comes out of the prompt's last pass; an end token takes one, too. */
uint32_t end_steps(const struct backcast_event *ev);
void event_json(FILE *f, const struct backcast_event *ev, bool replay);
/* The table of scores; tok may be NULL. */
void scores_print(const struct args *a, const struct backcast_score *rows, size_t n,
                  struct tok *tok, const char *policy);
#endif
