/* private.c: see private.h. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>
#include "cli.h"
#include "clock.h"
#include "models.h"
#include "private.h"

#define PREFIX "backcast-"
#define DAEMON_USAGE 2 /* its exit code: see backcastd(8) */
#define STOP_MS 15000  /* from SIGTERM to SIGKILL */

struct private_daemon {
    unsigned magic;
    pid_t pid;      /* 0: not running */
    int line;       /* our end of its --parent-fd */
    char said[600]; /* a line that is not whole yet */
    size_t said_len;
    char dir[72], socket[100], program[PATH_MAX];
};
#define PRIVATE_MAGIC 0x42637072u

const char *private_socket(const struct private_daemon *d)
{
    return d->socket;
}

const char *private_program(const struct private_daemon *d)
{
    return d->program;
}

/* ---- the program */

static bool is_program(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISREG(st.st_mode) && access(path, X_OK) == 0;
}

static bool find_in_path(char *buf, size_t len)
{
    const char *p = getenv("PATH");

    while (p != NULL && *p != '\0') {
        size_t n = strcspn(p, ":");
        if (n > 0 && p[0] == '/' && snprintf(buf, len, "%.*s/backcastd", (int)n, p) < (int)len &&
            is_program(buf))
            return true;
        p += n + (p[n] == ':');
    }
    return false;
}

int private_find(char *buf, size_t len, struct err *e)
{
    char self[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);

    if (n > 0) {
        self[n] = '\0';
        char *slash = strrchr(self, '/');
        *slash = '\0';
        if (snprintf(buf, len, "%s/backcastd", self) < (int)len && is_program(buf))
            return BC_OK;
    }
    if (snprintf(buf, len, "%s/backcastd", BACKCAST_LIBEXEC) < (int)len && is_program(buf))
        return BC_OK;
    if (find_in_path(buf, len))
        return BC_OK;
    return err_set(e, BC_ENOTFOUND, "backcastd",
                   "the program backcastd is not beside backcast, in %s or in PATH",
                   BACKCAST_LIBEXEC);
}

/* ---- the folder */

static void dir_remove(const char *dir)
{
    DIR *d = opendir(dir);
    struct dirent *f;

    while (d != NULL && (f = readdir(d)) != NULL)
        if (strcmp(f->d_name, ".") != 0 && strcmp(f->d_name, "..") != 0)
            unlinkat(dirfd(d), f->d_name, 0);
    if (d != NULL)
        closedir(d);
    rmdir(dir);
}

/* Folders of this user whose command is gone (it was killed). */
static void dirs_sweep(const char *base)
{
    char path[PATH_MAX];
    DIR *d = opendir(base);
    struct dirent *f;
    struct stat st;

    while (d != NULL && (f = readdir(d)) != NULL) {
        char *end;
        if (strncmp(f->d_name, PREFIX, strlen(PREFIX)) != 0)
            continue;
        long pid = strtol(f->d_name + strlen(PREFIX), &end, 10);
        if (pid <= 0 || *end != '-' || kill((pid_t)pid, 0) == 0 || errno != ESRCH)
            continue;
        if (snprintf(path, sizeof(path), "%s/%s", base, f->d_name) < (int)sizeof(path) &&
            lstat(path, &st) == 0 && S_ISDIR(st.st_mode) && st.st_uid == getuid())
            dir_remove(path);
    }
    if (d != NULL)
        closedir(d);
}

static int dir_make(struct private_daemon *d, struct err *e)
{
    const char *names[] = {"XDG_RUNTIME_DIR", "TMPDIR"};
    const char *base = "/tmp";
    struct stat st;

    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        const char *p = getenv(names[i]);
        /* a socket's path has at most 107 bytes */
        if (p != NULL && p[0] == '/' && strlen(p) < 40 && stat(p, &st) == 0 &&
            S_ISDIR(st.st_mode) && access(p, W_OK | X_OK) == 0) {
            base = p;
            break;
        }
    }
    dirs_sweep(base);
    snprintf(d->dir, sizeof(d->dir), "%s/" PREFIX "%d-XXXXXX", base, (int)getpid());
    if (mkdtemp(d->dir) == NULL) {
        int rc = err_set(e, BC_EIO, "", "cannot make a folder in %s: %s", base, strerror(errno));
        d->dir[0] = '\0';
        return rc;
    }
    snprintf(d->socket, sizeof(d->socket), "%s/backcast.sock", d->dir);
    return BC_OK;
}

/* ---- the process */

/* In the child: never returns. */
static _Noreturn void child_run(const struct private_daemon *d, char **argv, pid_t parent, int log,
                                int line)
{
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);

    setsid();
    prctl(PR_SET_PDEATHSIG, SIGTERM); /* beside --parent-fd: it holds while the daemon loads, too */
    if (getppid() != parent)          /* it died before the line above */
        _exit(1);
    unsetenv("NOTIFY_SOCKET");
    unsetenv("LISTEN_FDS");
    unsetenv("LISTEN_PID");
    unsetenv("WATCHDOG_USEC");
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
    if (null < 0 || dup2(null, 0) < 0 || dup2(log, 1) < 0 || dup2(log, 2) < 0 ||
        fcntl(line, F_SETFD, 0) < 0)
        _exit(1);
    execv(d->program, argv);
    dprintf(2, "cannot run %s: %s\n", d->program, strerror(errno));
    _exit(127);
}

static char *word(const char *s)
{
    return (char *)(uintptr_t)s; /* execv does not write to its arguments */
}

static int child_start(struct private_daemon *d, const struct private_options *opt,
                       const char *model, struct err *e)
{
    char log_path[100], line_text[16];
    char *argv[32];
    int pair[2], n = 0;

    snprintf(log_path, sizeof(log_path), "%s/log", d->dir);
    int log = open(log_path, O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0600);
    if (log < 0)
        return err_set(e, BC_EIO, "", "%s: %s", log_path, strerror(errno));
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0) {
        close(log);
        return err_set(e, BC_EIO, "", "socketpair: %s", strerror(errno));
    }
    d->line = pair[0];
    snprintf(line_text, sizeof(line_text), "%d", pair[1]);
    const char *words[] = {d->program, "--no-config", "--state-dir=none", "--socket", d->socket,
                           "--model",  model,         "--parent-fd",      line_text};
    for (size_t i = 0; i < ARRAY_LEN(words); i++)
        argv[n++] = word(words[i]);
    const char *options[][2] = {{"--threads", opt->threads},
                                {"--isa", opt->isa},
                                {"--activations", opt->activations},
                                {"--kv-memory", opt->kv_memory}};
    for (size_t i = 0; i < ARRAY_LEN(options); i++)
        if (options[i][1] != NULL) {
            argv[n++] = word(options[i][0]);
            argv[n++] = word(options[i][1]);
        }
    argv[n] = NULL;
    pid_t parent = getpid();
    d->pid = fork();
    if (d->pid == 0)
        child_run(d, argv, parent, log, pair[1]);
    close(log);
    close(pair[1]);
    if (d->pid < 0) {
        d->pid = 0;
        return err_set(e, BC_EIO, "", "fork: %s", strerror(errno));
    }
    return BC_OK;
}

/* The last line of its log, for the sentence of a failed start. */
static void log_tail(const struct private_daemon *d, char *buf, size_t len)
{
    char path[100];
    snprintf(path, sizeof(path), "%s/log", d->dir);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    off_t end = fd >= 0 ? lseek(fd, 0, SEEK_END) : 0;

    buf[0] = '\0';
    if (fd < 0)
        return;
    lseek(fd, end > (off_t)len - 1 ? end - (off_t)len + 1 : 0, SEEK_SET);
    ssize_t n = read(fd, buf, len - 1);
    close(fd);
    buf[n > 0 ? n : 0] = '\0';
    for (size_t i = strlen(buf); i > 0 && buf[i - 1] == '\n'; i--)
        buf[i - 1] = '\0';
    char *last = strrchr(buf, '\n');
    if (last != NULL)
        memmove(buf, last + 1, strlen(last + 1) + 1);
}

/* ---- what it says: STATUS=text, READY=1, ERROR=text, a line each */

enum said { SAID_NOTHING, SAID_READY, SAID_ERROR };

static enum said line_take(const char *text, bool bar, struct err *e)
{
    const char *percent = strchr(text, '%');

    if (strcmp(text, "READY=1") == 0)
        return SAID_READY;
    if (strncmp(text, "ERROR=", 6) == 0) {
        err_set(e, BC_ESTATE, "backcastd", "backcastd did not start: %s", text + 6);
        return SAID_ERROR;
    }
    if (bar && strncmp(text, "STATUS=", 7) == 0 && percent != NULL) {
        const char *digits = percent;
        while (digits > text && strchr(" 0123456789", digits[-1]) != NULL)
            digits--;
        bar_draw("loading", strtoul(digits, NULL, 10), 100, "%");
    }
    return SAID_NOTHING;
}

static enum said said_take(struct private_daemon *d, bool bar, struct err *e)
{
    for (;;) {
        char *end = memchr(d->said, '\n', d->said_len);
        if (end != NULL) {
            size_t n = (size_t)(end - d->said) + 1;
            *end = '\0';
            enum said said = line_take(d->said, bar, e);
            memmove(d->said, d->said + n, d->said_len - n);
            d->said_len -= n;
            if (said != SAID_NOTHING)
                return said;
            continue;
        }
        if (d->said_len == sizeof(d->said))
            d->said_len = 0; /* no line is that long */
        ssize_t n =
            recv(d->line, d->said + d->said_len, sizeof(d->said) - d->said_len, MSG_DONTWAIT);
        if (n <= 0)
            return SAID_NOTHING;
        d->said_len += (size_t)n;
    }
}

/* It ends by itself, or is made to. Returns its status as waitpid gives it. */
static int child_wait(struct private_daemon *d)
{
    uint64_t deadline = clock_us() + STOP_MS * 1000ull;
    int status = 0;

    while (waitpid(d->pid, &status, WNOHANG) == 0) {
        if (clock_us() > deadline) {
            kill(d->pid, SIGKILL);
            waitpid(d->pid, &status, 0);
            break;
        }
        poll(NULL, 0, 10);
    }
    d->pid = 0;
    return status;
}

static void child_stop(struct private_daemon *d)
{
    if (d->pid == 0)
        return;
    kill(d->pid, SIGTERM);
    child_wait(d);
}

/* Its exit code tells a value that its options cannot have from what went wrong. */
static int start_failed(int status, struct err *e)
{
    bool usage = WIFEXITED(status) && WEXITSTATUS(status) == DAEMON_USAGE;
    return e->code = usage ? BC_EINVALID : BC_ESTATE;
}

static int wait_ready(struct private_daemon *d, bool bar, struct err *e)
{
    for (;;) {
        struct pollfd p = {.fd = d->line, .events = POLLIN};
        int status;

        poll(&p, 1, 100);
        enum said said = said_take(d, bar, e);
        if (said == SAID_READY)
            return BC_OK;
        if (said == SAID_ERROR)
            return start_failed(child_wait(d), e);
        if (interrupt_count() > 0)
            return err_set(e, BC_ECANCELLED, "", "interrupted");
        if (waitpid(d->pid, &status, WNOHANG) == d->pid) {
            char tail[256];
            d->pid = 0;
            log_tail(d, tail, sizeof(tail));
            err_set(e, BC_ESTATE, "backcastd", "backcastd did not start: %s",
                    tail[0] != '\0' ? tail : "it said nothing");
            return start_failed(status, e);
        }
    }
}

struct private_options private_options(const struct args *a)
{
    return (struct private_options){.model = a->model,
                                    .threads = a->threads,
                                    .isa = a->isa,
                                    .activations = a->activations,
                                    .kv_memory = a->kv_memory,
                                    .bar = !a->quiet};
}

int private_start(struct private_daemon **ret, const struct private_options *opt, struct err *e)
{
    char model[PATH_MAX];
    struct private_daemon *d = calloc(1, sizeof(*d));

    if (d == NULL)
        return err_nomem(e, sizeof(*d));
    d->magic = PRIVATE_MAGIC;
    d->line = -1;
    int rc = model_find(opt->model, model, sizeof(model), e);
    if (rc == BC_OK)
        rc = private_find(d->program, sizeof(d->program), e);
    if (rc == BC_OK)
        rc = dir_make(d, e);
    if (rc == BC_OK)
        rc = child_start(d, opt, model, e);
    if (rc == BC_OK)
        rc = wait_ready(d, opt->bar, e);
    bar_clear();
    if (rc < 0) {
        private_stop(&d);
        return rc;
    }
    *ret = d;
    return BC_OK;
}

int private_failed(const struct err *e, const char *doing)
{
    if (e->code == BC_ECANCELLED)
        return CLI_INTERRUPTED;
    say_err(e, doing);
    return e->code == BC_EINVALID ? CLI_USAGE : CLI_FAILED;
}

void private_stop(struct private_daemon **pd)
{
    struct private_daemon *d = *pd;

    if (d == NULL)
        return;
    MAGIC_OK(d, PRIVATE_MAGIC);
    *pd = NULL;
    if (d->line >= 0)
        close(d->line);
    child_stop(d);
    if (d->dir[0] != '\0')
        dir_remove(d->dir);
    d->magic = 0;
    free(d);
}
