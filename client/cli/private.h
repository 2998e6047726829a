/* private.h: a backcastd for the life of one command.
 *
 *   $XDG_RUNTIME_DIR or $TMPDIR or /tmp
 *     backcast-PID-XXXXXX/          0700
 *       backcast.sock, .lock        the daemon's
 *       log                         its stderr
 *
 * A socket pair (--parent-fd) carries its STATUS=, READY= and ERROR= lines to us; when our end closes,
 * because the command ended in whatever way, it stops. It has a session of its own, so Ctrl-C reaches
 * the command alone. What a killed command left lying is removed by the next private_start. */
#ifndef BACKCAST_PRIVATE_H
#define BACKCAST_PRIVATE_H
#include "base.h"

struct private_daemon;

struct private_options {
    const char *model; /* path; NULL: the default model */
    /* as backcastd's options take them; NULL: its defaults */
    const char *threads, *isa, *activations, *kv_memory;
    bool bar; /* show a bar while it loads, if stderr is a terminal */
};
struct args;
struct private_options private_options(const struct args *a); /* as the command was asked for it */
/* Starts one and waits until it can serve a prompt. BC_ECANCELLED: Ctrl-C meanwhile. BC_EINVALID: an option of it has a value
 * that it cannot have. */
int private_start(struct private_daemon **ret, const struct private_options *opt, struct err *e);
/* Says why, unless it was Ctrl-C; what the command ends with. */
int private_failed(const struct err *e, const char *doing);
const char *private_socket(const struct private_daemon *d);
const char *private_program(const struct private_daemon *d);
void private_stop(struct private_daemon **d);
/* Where backcastd is: beside this program, then libexec, then PATH. */
int private_find(char *buf, size_t len, struct err *e);
#endif
