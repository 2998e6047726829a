/* main.c: backcastd: start order and stop order, nothing else.
 *
 * configuration -> log -> process limits -> model file -> socket -> loop (daemon_start,
 * daemon_run)
 *   -> engine closed -> socket gone
 * The state folder is taken between socket and loop: its lock says that nobody else writes there.
 *
 * Exit codes: 0 stopped in good order; 1 could not start (a sentence on stderr says why); 2 usage;
 * 70 the device failed: the service manager starts it again. */
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include "daemon.h"
#include "env.h"
#include "folders.h"
#include "log.h"

#define DESCRIPTORS_MIN 64 /* the daemon's own, a model being read, and a client or two */

/* A signal during the start waits until the loop can answer it (daemon_start lets them through): whatever was made by then,
 * a socket for one, is taken away in good order. */
static void signals_hold(void)
{
    sigset_t set;
    daemon_signals(&set);
    sigprocmask(SIG_BLOCK, &set, NULL);
}

static int process_prepare(struct err *e)
{
    struct rlimit rl;
    signal(SIGPIPE, SIG_IGN); /* whoever goes away is noticed by EPIPE and by the loop */
    signal(SIGXFSZ, SIG_IGN); /* a file that may not grow is EFBIG to whoever writes it */
    umask(0077);
    if (getrlimit(RLIMIT_NOFILE, &rl) < 0)
        return BC_OK;
    rl.rlim_cur = rl.rlim_max; /* three descriptors a session */
    setrlimit(RLIMIT_NOFILE, &rl);
    if (rl.rlim_max < DESCRIPTORS_MIN)
        return err_amount(e, BC_EINVALID, "", DESCRIPTORS_MIN, rl.rlim_max,
                          "%llu open files are allowed (ulimit -n, LimitNOFILE): %d are needed",
                          (unsigned long long)rl.rlim_max, DESCRIPTORS_MIN);
    return BC_OK;
}

static int socket_open(const struct config *c, struct listener *ret, struct err *e)
{
    char path[CONFIG_PATH_MAX];
    int fd = notify_listen_fd();
    if (fd >= 0)
        return listen_inherit(ret, fd, e);
    paths_socket(c, path, sizeof path);
    struct listen_options lo = {.path = path,
                                .mode = (mode_t)c->daemon_socket_mode,
                                .group = c->daemon_socket_group};
    return listen_open(ret, &lo, e);
}

/* The folder that was asked for must be there; without the usual one the daemon runs, and what
 * needs it is refused. */
static int state_open(const struct config *c, struct daemon_options *o, struct err *e)
{
    o->state_fd = -1;
    paths_state(c, o->state_dir, sizeof o->state_dir);
    if (o->state_dir[0] == '\0')
        return BC_OK;
    int rc = folders_lock(o->state_dir, &o->state_fd, e);
    if (rc == BC_OK || c->daemon_state_dir[0] != '\0')
        return rc;
    log_warn("daemon", "%s: nothing is kept on disk", e->text);
    o->state_dir[0] = '\0';
    return BC_OK;
}

static int say(const struct config *c, enum config_action action)
{
    if (action == CONFIG_HELP)
        config_help(stdout);
    else if (action == CONFIG_VERSION)
        printf("backcastd " BACKCAST_DAEMON_VERSION "\n");
    else
        config_print(c, stdout);
    return fflush(stdout) == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

static int fail(const struct daemon_options *o, const struct err *e, int code)
{
    log_error("daemon", "%s", e->text);
    notify_failed(o->parent_fd, e->text);
    config_free(o->config);
    return code;
}

int main(int argc, char **argv)
{
    static struct daemon d;
    struct config c;
    struct config_command cmd;
    struct err e;
    struct daemon_options o = {.config = &c, .argc = argc, .argv = argv, .parent_fd = -1};

    signals_hold();
    o.available = env_memory();
    if (config_read(&c, argc, argv, o.available, &cmd, &e) < 0) {
        log_error("daemon", "%s", e.text);
        return DAEMON_EXIT_USAGE;
    }
    o.parent_fd = cmd.parent_fd;
    if (cmd.action != CONFIG_RUN) {
        int rc = say(&c, cmd.action);
        config_free(&c);
        return rc;
    }
    if (settings_check(&c, NULL, &e) < 0)
        return fail(&o, &e, DAEMON_EXIT_USAGE);
    if (log_setup(c.daemon_log, &e) < 0)
        return fail(&o, &e, EXIT_FAILURE);
    if (process_prepare(&e) < 0 ||
        paths_default_model(&c, o.model_path, sizeof o.model_path, o.model_name,
                            sizeof o.model_name, &e) < 0 ||
        socket_open(&c, &o.listener, &e) < 0)
        return fail(&o, &e, EXIT_FAILURE);
    if (state_open(&c, &o, &e) < 0) {
        listen_close(&o.listener);
        return fail(&o, &e, EXIT_FAILURE);
    }
    log_info("daemon", "memory for caches: %llu MiB of %llu MiB available",
             (unsigned long long)c.memory_kv_memory.bytes >> 20,
             (unsigned long long)o.available >> 20);
    if (daemon_start(&d, &o, &e) < 0)
        return fail(&o, &e, EXIT_FAILURE);
    return daemon_run(&d);
}
