/* daemon.c: see daemon.h. */
#include "daemon.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "clock.h"
#include "log.h"

static struct engine_limits engine_limits_of(const struct config *c)
{
    return (struct engine_limits){.uid_percent = c->memory_uid_share.percent,
                                  .uid_bytes = c->memory_uid_share.bytes};
}

/* What the engine has to know of a new configuration. */
static void engine_configure(struct daemon *d, const struct config *c)
{
    struct command *cmd = d->engine != NULL ? command_new(CMD_LIMITS, 0, 0) : NULL;
    struct err e;
    if (cmd == NULL)
        return;
    cmd->admin = true;
    cmd->u.limits.kv_memory = c->memory_kv_memory.bytes;
    cmd->u.limits.session_budget = c->session_budget.bytes;
    cmd->u.limits.limits = engine_limits_of(c);
    if (engine_post(d->engine, &cmd, &e) < 0) {
        log_error("daemon", "SIGHUP: %s", e.text);
        command_free(&cmd);
    }
}

/* ---- loading, in a thread of its own: the loop answers Hello meanwhile */

static void on_progress(void *arg, const char *model, uint64_t done, uint64_t total)
{
    struct daemon *d = arg;
    char status[200];
    int percent = total > 0 ? (int)(done * 100 / total) : 0;
    if (percent < d->load_percent + 5 && percent != 100)
        return;
    d->load_percent = percent;
    snprintf(status, sizeof status, "Loading %.100s: %d %%", model, percent);
    notify_loading(d->opt.parent_fd, status);
}

/* Before durable sessions are looked for: a mistake in the configuration leaves them as they are. */
static int on_ready(void *arg, const struct engine *en, struct err *e)
{
    struct daemon *d = arg;
    int rc = settings_check(d->opt.config, en, e);
    d->load_refused = rc < 0;
    return rc;
}

static void *loader_main(void *arg)
{
    struct daemon *d = arg;
    const struct config *c = d->opt.config;
    struct engine_model_path models[CONFIG_MODELS_MAX];
    for (size_t i = 0; i < c->n_models; i++)
        models[i] = (struct engine_model_path){c->models[i].name, c->models[i].path,
                                               c->models[i].chat_template[0] != '\0'
                                                   ? c->models[i].chat_template
                                                   : NULL};
    struct engine_options eo = {
        .backend = c->daemon_backend,
        .isa = c->daemon_isa[0] != '\0' ? c->daemon_isa : NULL,
        .inject = c->daemon_inject[0] != '\0' ? c->daemon_inject : NULL,
        .threads = (uint32_t)c->daemon_threads,
        .pin = c->daemon_pin != 0,
        .activations = (uint32_t)c->daemon_activations,
        .default_model = d->opt.model_path,
        .default_model_name = d->opt.model_name,
        .models = models,
        .n_models = c->n_models,
        .ledger = d->ledger,
        .kv_memory = c->memory_kv_memory.bytes,
        .kv_memory_max = d->opt.available,
        .limits = engine_limits_of(c),
        .session_budget = c->session_budget.bytes,
        .host_tier = c->memory_host_tier.bytes,
        .disk_tier = c->memory_disk_tier,
        .spill_after_us = c->memory_spill_after * 1000000,
        .stop_snapshots_us = c->memory_stop_snapshots * 1000000,
        .keep_alive_us = c->memory_keep_alive * 1000000,
        .no_prefixes = c->memory_share_prefixes == 0,
        .share_across_uids = c->memory_share_across_uids != 0,
        .prefix_keep_us = c->memory_prefix_keep * 1000000,
        .state_dir = d->opt.state_dir[0] != '\0' ? d->opt.state_dir : NULL,
        .max_tokens_default = (uint32_t)c->session_max_tokens,
        .wake = server_wake,
        .wake_arg = d->server,
        .progress = on_progress,
        .progress_arg = d,
        .ready = on_ready,
        .ready_arg = d,
        .watch = &d->waits,
    };
    int rc = engine_open(&d->load_engine, &eo, &d->load_err);
    if (rc == BC_OK && (rc = engine_start(d->load_engine, &d->load_err)) < 0)
        engine_close(&d->load_engine);
    d->load_err.code = rc;
    uv_async_send(&d->loaded);
    return NULL;
}

static void daemon_stop(struct daemon *d, const char *why);
static void daemon_reload(struct daemon *d);

static void load_failed(struct daemon *d)
{
    log_error("daemon", "%s", d->load_err.text);
    notify_failed(d->opt.parent_fd, d->load_err.text);
    d->exit_code = d->load_refused                  ? DAEMON_EXIT_USAGE
                   : d->load_err.code == BC_EDEVICE ? DAEMON_EXIT_DEVICE
                                                    : EXIT_FAILURE;
    daemon_stop(d, d->load_refused ? "the configuration does not suit the model"
                                   : "the model could not be loaded");
}

static void on_loaded(uv_async_t *handle)
{
    struct daemon *d = handle->data;
    char status[256];
    pthread_join(d->loader, NULL);
    d->loader_runs = false;
    if (d->load_err.code < 0) {
        load_failed(d);
        return;
    }
    d->engine = d->load_engine;
    d->state = DAEMON_SERVING;
    server_engine(d->server, d->engine);
    snprintf(status, sizeof status, "Serving %.90s on %.107s", engine_default_model(d->engine),
             d->opt.listener.path);
    log_info("daemon", "%s", status);
    notify_ready(d->opt.parent_fd, status);
    if (d->reload_due)
        daemon_reload(d);
}

/* ---- the way down */

/* Without waiting for anybody: no lock, no handle, no byte on disk depends on a clean end. */
_Noreturn static void daemon_leave(struct daemon *d)
{
    listen_close(&d->opt.listener);
    _exit(d->exit_code);
}

static void close_if_open(uv_handle_t *h)
{
    if (h->type != UV_UNKNOWN_HANDLE && !uv_is_closing(h))
        uv_close(h, NULL);
}

/* The engine is down (or never was up): the loop runs until every handle has closed. */
static void daemon_finish(struct daemon *d)
{
    server_flush(d->server);
    server_close(d->server);
    for (size_t i = 0; i < ARRAY_LEN(d->signals); i++)
        close_if_open((uv_handle_t *)&d->signals[i]);
    close_if_open((uv_handle_t *)&d->loaded);
    close_if_open((uv_handle_t *)&d->stopped);
    close_if_open((uv_handle_t *)&d->deadline);
    close_if_open((uv_handle_t *)&d->watch);
    close_if_open((uv_handle_t *)&d->parent);
}

static void *stopper_main(void *arg)
{
    struct daemon *d = arg;
    engine_stop(d->engine); /* waits for the pass that is under way */
    uv_async_send(&d->stopped);
    return NULL;
}

static void on_stopped(uv_async_t *handle)
{
    struct daemon *d = handle->data;
    pthread_join(d->stopper, NULL);
    daemon_finish(d);
}

/* What the engine may take for the pass under way and what follows it, snapshots included. */
static uint64_t stop_ms(const struct daemon *d)
{
    return DAEMON_STOP_MS + d->opt.config->memory_stop_snapshots * 1000;
}

static void on_deadline(uv_timer_t *handle)
{
    struct daemon *d = handle->data;
    log_warn("daemon", "the engine did not stop in %llu ms: ending without it",
             (unsigned long long)stop_ms(d));
    daemon_leave(d);
}

static void daemon_stop(struct daemon *d, const char *why)
{
    MAGIC_OK(d, DAEMON_MAGIC);
    if (d->state == DAEMON_STOPPING || d->loader_runs) {
        log_info("daemon", "%s: ending at once", why);
        notify_stopping(d->opt.parent_fd, 0);
        daemon_leave(d); /* a load cannot be called back; a second signal will not wait */
    }
    log_info("daemon", "%s: stopping", why);
    notify_stopping(d->opt.parent_fd, stop_ms(d));
    d->state = DAEMON_STOPPING;
    server_drain(d->server);
    if (d->engine == NULL) {
        daemon_finish(d);
        return;
    }
    uv_timer_start(&d->deadline, on_deadline, stop_ms(d), 0);
    if (pthread_create(&d->stopper, NULL, stopper_main, d) != 0)
        daemon_leave(d);
}

static void on_fatal(void *arg, const struct err *e)
{
    struct daemon *d = arg;
    log_error("daemon", "the device failed: %s", e->text);
    d->exit_code = DAEMON_EXIT_DEVICE;
    if (d->state != DAEMON_STOPPING)
        daemon_stop(d, "fatal error");
}

static void on_watch(uv_timer_t *handle)
{
    struct daemon *d = handle->data;
    uint64_t most = d->opt.config->daemon_device_timeout;
    char why[80];
    if (engine_device_waits(&d->waits) * (uint64_t)DAEMON_WATCH_MS < most * 1000)
        return;
    snprintf(why, sizeof why, "the device failed: no answer for %llu s", (unsigned long long)most);
    log_error("daemon", "%s", why);
    if (d->state == DAEMON_LOADING)
        notify_failed(d->opt.parent_fd, why);
    d->exit_code = DAEMON_EXIT_DEVICE;
    daemon_leave(d);
}

/* ---- SIGHUP */

static void daemon_reload(struct daemon *d)
{
    struct config now;
    struct config_command cmd;
    struct config_change changes[64];
    struct err e;
    d->reload_due = d->loader_runs;
    if (d->reload_due)
        return;
    if (config_read(&now, d->opt.argc, d->opt.argv, d->opt.available, &cmd, &e) < 0) {
        log_error("daemon", "SIGHUP: %s; nothing has changed", e.text);
        return;
    }
    if (settings_check(&now, d->engine, &e) < 0) {
        log_error("daemon", "SIGHUP: %s; nothing has changed", e.text);
        config_free(&now);
        return;
    }
    size_t n = config_compare(d->opt.config, &now, changes, ARRAY_LEN(changes)), live = 0;
    for (size_t i = 0; i < n; i++) {
        live += changes[i].live;
        log_info("daemon", "SIGHUP: [%s] %s %s", changes[i].section, changes[i].key,
                 !changes[i].live                            ? "needs a restart"
                 : strcmp(changes[i].section, "memory") == 0 ? "asked of the engine"
                                                             : "applied");
    }
    if (log_setup(now.daemon_log, &e) < 0)
        log_error("daemon", "SIGHUP: %s", e.text);
    struct server_limits l = settings_limits(&now);
    struct server_defaults def = settings_defaults(&now);
    server_configure(d->server, &l, &def);
    engine_configure(d, &now);
    log_info("daemon", "SIGHUP: changes that apply now: %zu, that wait for a restart: %zu", live,
             n - live);
    /* Paths of models stay with the engine: the old list lives on. */
    for (size_t i = 0; i < now.n_models; i++)
        free(now.models[i].path);
    memcpy(now.models, d->opt.config->models, sizeof now.models);
    now.n_models = d->opt.config->n_models;
    d->opt.config->n_models = 0;
    config_free(d->opt.config);
    *d->opt.config = now;
}

static void on_signal(uv_signal_t *handle, int signum)
{
    struct daemon *d = handle->data;
    if (signum == SIGHUP)
        daemon_reload(d);
    else
        daemon_stop(d, signum == SIGTERM ? "SIGTERM" : "SIGINT");
}

/* The other end was closed, by will or by death. */
static void on_parent(uv_poll_t *handle, int status, int events)
{
    struct daemon *d = handle->data;
    char bytes[64];
    ssize_t n = status == 0 && (events & UV_READABLE) != 0
                    ? read(d->opt.parent_fd, bytes, sizeof bytes)
                    : 0;
    if (n > 0)
        return; /* words of a parent mean nothing */
    uv_poll_stop(handle);
    if (d->state != DAEMON_STOPPING)
        daemon_stop(d, "the parent has gone");
}

/* ---- start */

static const char *model_name_at(void *arg, unsigned i)
{
    struct daemon *d = arg;
    return i < d->names.n ? d->names.names[i] : NULL;
}

static bool model_path_of(void *arg, const char *name, char *ret, size_t size)
{
    struct daemon *d = arg;
    for (size_t i = 0; i < d->opt.config->n_models; i++)
        if (strcmp(d->opt.config->models[i].name, name) == 0)
            return false; /* the engine knows it */
    if (strcmp(name, d->opt.model_name) == 0)
        return false;
    return paths_model(name, ret, size);
}

static const int numbers[3] = {SIGTERM, SIGINT, SIGHUP};

void daemon_signals(sigset_t *ret)
{
    sigemptyset(ret);
    for (size_t i = 0; i < ARRAY_LEN(numbers); i++)
        sigaddset(ret, numbers[i]);
}

static int signals_start(struct daemon *d)
{
    sigset_t set;
    int rc = 0;
    for (size_t i = 0; i < 3; i++) {
        rc |= uv_signal_init(&d->loop, &d->signals[i]);
        d->signals[i].data = d;
        rc |= uv_signal_start(&d->signals[i], on_signal, numbers[i]);
    }
    daemon_signals(&set);
    sigprocmask(SIG_UNBLOCK, &set, NULL);
    return rc;
}

static int parent_start(struct daemon *d, struct err *e)
{
    if (d->opt.parent_fd < 0)
        return BC_OK;
    if (uv_poll_init(&d->loop, &d->parent, d->opt.parent_fd) < 0)
        return err_set(e, BC_EINVALID, "parent-fd", "--parent-fd %d is no pipe or socket",
                       d->opt.parent_fd);
    d->parent.data = d;
    uv_poll_start(&d->parent, UV_READABLE | UV_DISCONNECT, on_parent);
    return BC_OK;
}

int daemon_start(struct daemon *d, const struct daemon_options *opt, struct err *e)
{
    *d = (struct daemon){.magic = DAEMON_MAGIC, .opt = *opt, .load_percent = -5};
    struct server_options so = {.loop = &d->loop,
                                .listener = &d->opt.listener,
                                .limits = settings_limits(opt->config),
                                .defaults = settings_defaults(opt->config),
                                .default_model = d->opt.model_name,
                                .model_name = model_name_at,
                                .model_path = model_path_of,
                                .arg = d,
                                .fatal = on_fatal};
    int rc = ledger_open(&d->ledger, e);
    if (rc < 0 || (rc = paths_names(opt->config, &d->names, e)) < 0)
        goto fail;
    so.ledger = d->ledger;
    if (uv_loop_init(&d->loop) < 0 || signals_start(d) < 0 ||
        uv_async_init(&d->loop, &d->loaded, on_loaded) < 0 ||
        uv_async_init(&d->loop, &d->stopped, on_stopped) < 0 ||
        uv_timer_init(&d->loop, &d->deadline) < 0 || uv_timer_init(&d->loop, &d->watch) < 0) {
        rc = err_set(e, BC_EIO, "", "the event loop could not be made");
        goto fail;
    }
    d->loaded.data = d->stopped.data = d->deadline.data = d->watch.data = d;
    if ((rc = parent_start(d, e)) < 0 || (rc = server_open(&d->server, &so, e)) < 0)
        goto fail;
    if (pthread_create(&d->loader, NULL, loader_main, d) != 0) {
        rc = err_set(e, BC_ENOMEM, "", "no thread for loading");
        goto fail;
    }
    d->loader_runs = true;
    if (opt->config->daemon_device_timeout > 0)
        uv_timer_start(&d->watch, on_watch, DAEMON_WATCH_MS, DAEMON_WATCH_MS);
    return BC_OK;
fail:
    paths_names_free(&d->names);
    listen_close(&d->opt.listener);
    return rc;
}

int daemon_run(struct daemon *d)
{
    MAGIC_OK(d, DAEMON_MAGIC);
    uv_run(&d->loop, UV_RUN_DEFAULT);
    server_free(&d->server);
    if (d->engine != NULL)
        engine_close(&d->engine);
    ledger_close(&d->ledger); /* asserts that every byte is back */
    listen_close(&d->opt.listener);
    int rc = uv_loop_close(&d->loop);
    bc_assert(rc == 0);
    paths_names_free(&d->names);
    config_free(d->opt.config);
    return d->exit_code;
}
