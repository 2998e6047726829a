/* daemon_harness.c: see daemon_harness.h. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>
#include "daemon_harness.h"

#define ARGS_MAX 48
#define START_MS 60000
#define CHILD_FD 3

static uint64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

static void pause_ms(unsigned ms)
{
    struct timespec t = {ms / 1000, (long)(ms % 1000) * 1000000};
    nanosleep(&t, NULL);
}

int dh_until(bool (*what)(void *arg), void *arg, unsigned timeout_ms)
{
    uint64_t end = now_ms() + timeout_ms;
    while (!what(arg)) {
        if (now_ms() > end)
            return 0;
        pause_ms(5);
    }
    return 1;
}

static struct dh *dh_new(void)
{
    struct dh *d = calloc(1, sizeof *d);
    assert_non_null(d);
    snprintf(d->dir, sizeof d->dir, "/tmp/backcast-test-XXXXXX");
    assert_non_null(mkdtemp(d->dir));
    snprintf(d->socket, sizeof d->socket, "%s/s/backcast.sock", d->dir);
    snprintf(d->log, sizeof d->log, "%s/log", d->dir);
    return d;
}

static _Noreturn void child(const struct dh *d, char **argv, int fd)
{
    int log = open(d->log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    int null = open("/dev/null", O_RDONLY);
    if (log < 0 || null < 0 || dup2(fd, 100) < 0 || dup2(null, 0) < 0 || dup2(log, 1) < 0 ||
        dup2(log, 2) < 0)
        _exit(126);
    close_range(CHILD_FD, 99, 0); /* nothing of the test's goes along */
    if (dup2(100, CHILD_FD) < 0 || close_range(CHILD_FD + 1, ~0U, 0) < 0)
        _exit(126);
    unsetenv("NOTIFY_SOCKET");
    unsetenv("LISTEN_FDS");
    execv(argv[0], argv);
    _exit(127);
}

static void spawn(struct dh *d, const char *const *more)
{
    char *argv[ARGS_MAX];
    int n = 0, pair[2];
    argv[n++] = (char *)TEST_BIN "/backcastd";
    argv[n++] = (char *)"--no-config";
    argv[n++] = (char *)"--socket";
    argv[n++] = d->socket;
    argv[n++] = (char *)"--parent-fd=3";
    argv[n++] = (char *)"--kv-memory=512MiB";
    argv[n++] = (char *)"--state-dir=none"; /* unless the test says where */
    argv[n++] = (char *)"--prefix-keep=0";  /* what nobody holds goes at once */
    for (; more != NULL && *more != NULL && n < ARGS_MAX - 1; more++)
        argv[n++] = (char *)(uintptr_t)*more;
    argv[n] = NULL;
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    d->pid = fork();
    if (d->pid == 0)
        child(d, argv, pair[1]);
    assert_true(d->pid > 0);
    close(pair[1]);
    d->parent_fd = pair[0];
}

static void log_show(const struct dh *d)
{
    char line[512];
    FILE *f = fopen(d->log, "r");
    while (f != NULL && fgets(line, sizeof line, f) != NULL)
        fprintf(stderr, "backcastd| %s", line);
    if (f != NULL)
        fclose(f);
}

/* Reads status lines until READY=1. */
static bool ready_wait(struct dh *d)
{
    char buf[4096];
    size_t n = 0;
    uint64_t end = now_ms() + START_MS;
    while (now_ms() < end && n < sizeof buf - 1) {
        struct pollfd p = {.fd = d->parent_fd, .events = POLLIN};
        if (poll(&p, 1, 1000) <= 0)
            continue;
        ssize_t got = read(d->parent_fd, buf + n, sizeof buf - 1 - n);
        if (got <= 0)
            return false;
        n += (size_t)got;
        buf[n] = '\0';
        if (strstr(buf, "READY=1\n") != NULL)
            return true;
        if (strstr(buf, "ERROR=") != NULL)
            return false;
    }
    return false;
}

static void spawn_on(struct dh *d, const char *path, const char *const *args)
{
    const char *more[ARGS_MAX] = {"--model", path, "--threads=1"};
    size_t n = 3;
    for (; args != NULL && *args != NULL && n < ARGS_MAX - 12; args++)
        more[n++] = *args;
    spawn(d, more);
}

void dh_ready(struct dh *d)
{
    if (!ready_wait(d)) {
        log_show(d);
        fail_msg("backcastd did not become ready");
    }
}

static struct dh *start_on(struct dh *d, const char *path, const char *const *args)
{
    spawn_on(d, path, args);
    dh_ready(d);
    return d;
}

static void model_path(const char *model, char *ret, size_t size)
{
    snprintf(ret, size, "%s%s", strchr(model, '/') != NULL ? "" : TEST_VECTORS "/", model);
}

struct dh *dh_start(const char *model, const char *const *args)
{
    char path[512];
    model_path(model, path, sizeof path);
    return start_on(dh_new(), path, args);
}

void dh_again(struct dh *d, const char *model, const char *const *args)
{
    char path[512];
    assert_int_equal(d->pid, 0);
    close(d->parent_fd);
    model_path(model, path, sizeof path);
    spawn_on(d, path, args);
}

void dh_context_model(const char *path, const char *model, uint32_t context)
{
    static const char key[] = ".context_length";
    char from[512];
    snprintf(from, sizeof from, "%s/%s", TEST_VECTORS, model);
    FILE *in = fopen(from, "rb");
    assert_non_null(in);
    assert_int_equal(fseek(in, 0, SEEK_END), 0);
    size_t size = (size_t)ftell(in);
    char *bytes = malloc(size);
    rewind(in);
    assert_int_equal(fread(bytes, 1, size, in), size);
    fclose(in);
    char *at = memmem(bytes, size, key, sizeof key - 1);
    assert_non_null(at);
    memcpy(at + sizeof key - 1 + 4, &context, 4); /* behind the key: type u32, then the value */
    FILE *out = fopen(path, "wb");
    assert_non_null(out);
    assert_int_equal(fwrite(bytes, 1, size, out), size);
    fclose(out);
    free(bytes);
}

void dh_long_model(const char *path)
{
    dh_context_model(path, "tiny-llama.gguf", 1u << 20);
}

struct dh *dh_start_context(uint32_t context, const char *const *args)
{
    char path[64];
    struct dh *d = dh_new();
    snprintf(path, sizeof path, "%s/model.gguf", d->dir);
    dh_context_model(path, "tiny-llama.gguf", context);
    return start_on(d, path, args);
}

struct dh *dh_start_long(const char *const *args)
{
    return dh_start_context(1u << 20, args);
}

int dh_wait(struct dh *d, unsigned timeout_ms)
{
    uint64_t end = now_ms() + timeout_ms;
    int status = 0;
    pid_t got;
    while ((got = waitpid(d->pid, &status, WNOHANG)) == 0 && now_ms() < end)
        pause_ms(5);
    if (got == 0) {
        kill(d->pid, SIGABRT); /* a core or a stack says where it hangs */
        waitpid(d->pid, &status, 0);
        log_show(d);
        fail_msg("backcastd did not end within %u ms", timeout_ms);
    }
    d->pid = 0;
    return status;
}

void dh_free(struct dh **pd)
{
    struct dh *d = *pd;
    char path[128];
    assert_int_equal(d->pid, 0);
    close(d->parent_fd);
    unlink(d->log);
    unlink(d->socket);
    snprintf(path, sizeof path, "%s/s/backcast.lock", d->dir);
    unlink(path);
    snprintf(path, sizeof path, "%s/model.gguf", d->dir);
    unlink(path);
    snprintf(path, sizeof path, "%s/s", d->dir);
    rmdir(path);
    rmdir(d->dir);
    free(d);
    *pd = NULL;
}

backcast *dh_connect(const struct dh *d)
{
    backcast *c = NULL;
    if (backcast_connect(&c, d->socket) < 0)
        fail_msg("%s", backcast_last_error(NULL));
    return c;
}

void dh_stop(struct dh **pd)
{
    struct dh *d = *pd;
    assert_int_equal(kill(d->pid, SIGTERM), 0);
    int status = dh_wait(d, DH_PATIENCE_MS);
    if (status != 0)
        log_show(d);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    assert_int_equal(access(d->socket, F_OK), -1); /* it took its socket away */
    dh_free(pd);
}

int dh_group_stop(void **state)
{
    struct dh *d = *state;
    dh_stop(&d);
    return 0;
}

int dh_start_fails(const char *const *args, char *ret_log, size_t size)
{
    struct dh *d = dh_new();
    spawn(d, args);
    int status = dh_wait(d, 20000);
    int fd = open(d->log, O_RDONLY);
    ssize_t n = fd >= 0 ? read(fd, ret_log, size - 1) : 0;
    ret_log[n > 0 ? n : 0] = '\0';
    close(fd);
    dh_free(&d);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

bool dh_alive(const struct dh *d)
{
    return d->pid > 0 && waitpid(d->pid, NULL, WNOHANG) == 0;
}

unsigned dh_fds(const struct dh *d)
{
    char path[64];
    unsigned n = 0;
    snprintf(path, sizeof path, "/proc/%d/fd", (int)d->pid);
    DIR *dir = opendir(path);
    assert_non_null(dir);
    for (struct dirent *e; (e = readdir(dir)) != NULL;)
        n += e->d_name[0] != '.';
    closedir(dir);
    return n;
}

uint64_t dh_rss(const struct dh *d)
{
    char path[64];
    unsigned long long pages = 0;
    snprintf(path, sizeof path, "/proc/%d/statm", (int)d->pid);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    assert_int_equal(fscanf(f, "%*u %llu", &pages), 1);
    fclose(f);
    return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

bool dh_log_has(const struct dh *d, const char *text)
{
    char line[1200];
    bool found = false;
    FILE *f = fopen(d->log, "r");
    while (f != NULL && !found && fgets(line, sizeof line, f) != NULL)
        found = strstr(line, text) != NULL;
    if (f != NULL)
        fclose(f);
    return found;
}
