/* daemon.h: the running daemon: loop, signals, the thread that loads the model, the way down.
 *
 *   daemon_start          loop, server (Hello is answered at once), loader thread
 *      '-- loaded ------> server_engine, READY=1
 *      '-- SIGHUP ------> configuration again: what can change while running does
 *      '-- SIGTERM, SIGINT, parent gone, fatal error
 *            '----------> STOPPING=1, nobody new, requests end with RETRY, rings are filled, closed
 *   daemon_run returns the exit code: 0, 1 (could not start), 2 (the configuration does not suit the model), 70 (the
 *   device failed)
 *
 * A device that hangs cannot be called back, nor can the engine that waits for it: the loop looks at the engine's waits
 * once a second (DAEMON_WATCH_MS), from the first weight on, and ends the process when one has lasted for device_timeout. Opening
 * the device is not looked at: a card that is newer than the program takes minutes to build its kernels then.
 */
#ifndef BACKCAST_DAEMON_H
#define BACKCAST_DAEMON_H
#include <pthread.h>
#include <signal.h>
#include "config.h"
#include "engine.h"
#include "ipc.h"
#include "paths.h"

#define DAEMON_MAGIC 0x6461656du
/* Beside stop_snapshots: then the process ends without the engine's consent */
#define DAEMON_STOP_MS 4000
#define DAEMON_EXIT_USAGE 2
#define DAEMON_EXIT_DEVICE 70
#define DAEMON_WATCH_MS 1000

struct daemon_options {
    struct config *config; /* becomes the daemon's */
    struct listener listener;
    int argc; /* for reading the configuration again */
    char **argv;
    int parent_fd;
    uint64_t available; /* memory at start */
    char model_path[CONFIG_PATH_MAX], model_name[96];
    char state_dir[CONFIG_PATH_MAX]; /* "": nothing is kept on disk */
    int state_fd;                    /* its lock, held for life; -1: none */
};

enum daemon_state { DAEMON_LOADING, DAEMON_SERVING, DAEMON_STOPPING };

struct daemon {
    unsigned magic;
    struct daemon_options opt;
    struct paths_names names;
    uv_loop_t loop;
    struct ledger *ledger; /* every byte of the process, by owner */
    struct server *server;
    struct engine *engine;
    enum daemon_state state;
    int exit_code;
    uv_signal_t signals[3];
    uv_async_t loaded, stopped;
    uv_timer_t deadline, watch;
    struct engine_watch waits;
    uv_poll_t parent;
    pthread_t loader, stopper;
    bool loader_runs;
    bool reload_due; /* SIGHUP came while the loader reads the configuration */
    /* the loader's, until `loaded` */
    struct engine *load_engine;
    struct err load_err;
    int load_percent;
    bool load_refused; /* the configuration does not suit the model */
};

/* ---- settings.c: the configuration as the server takes it */
struct server_limits settings_limits(const struct config *c);
struct server_defaults settings_defaults(const struct config *c);
/* What config_read cannot judge: the levels of the log, whether the defaults make a session that can be opened, and a request that
 * is within its limit. en: with its default model; NULL: before there is one. */
int settings_check(const struct config *c, const struct engine *en, struct err *e);

/* ---- daemon.c */
/* The signals that the loop answers: main holds them back until daemon_start lets them through. */
void daemon_signals(sigset_t *ret);
/* Takes opt's listener, also on failure; opt's config on success. */
int daemon_start(struct daemon *d, const struct daemon_options *opt, struct err *e);
int daemon_run(struct daemon *d);

/* ---- notify.c: the service manager, and the parent of a private daemon */
void notify_ready(int parent_fd, const char *status);
void notify_loading(int parent_fd, const char *status);
void notify_stopping(int parent_fd, uint64_t most_ms); /* that it takes */
void notify_failed(int parent_fd, const char *why);
/* The inherited descriptor called "control"; -1: none. Others are closed, with a warning. */
int notify_listen_fd(void);
#endif
