/* command.c: see command.h. */
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>
#include "command.h"

#define RUN_MS 240000

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

struct prog_child prog_start(const char *const *argv, const char *const *env, const char *input)
{
    struct prog_child c;
    int in = input != NULL ? memfd_create("in", MFD_CLOEXEC) : open("/dev/null", O_RDONLY);

    c.out = memfd_create("out", MFD_CLOEXEC);
    c.err = memfd_create("err", MFD_CLOEXEC);
    assert_true(in >= 0 && c.out >= 0 && c.err >= 0);
    if (input != NULL) {
        assert_int_equal(write(in, input, strlen(input)), (ssize_t)strlen(input));
        lseek(in, 0, SEEK_SET);
    }
    c.pid = fork();
    assert_true(c.pid >= 0);
    if (c.pid == 0) {
        for (; env != NULL && *env != NULL; env++) {
            if (strchr(*env, '=') != NULL)
                putenv((char *)(uintptr_t)*env);
            else
                unsetenv(*env);
        }
        dup2(in, 0);
        dup2(c.out, 1);
        dup2(c.err, 2);
        execv(argv[0], (char **)(uintptr_t)argv);
        _exit(127);
    }
    close(in);
    return c;
}

static char *file_text(int fd, size_t *len)
{
    struct stat st;
    assert_int_equal(fstat(fd, &st), 0);
    char *text = malloc((size_t)st.st_size + 1);
    assert_non_null(text);
    ssize_t n = pread(fd, text, (size_t)st.st_size, 0);
    assert_true(n >= 0);
    text[n] = '\0';
    *len = (size_t)n;
    return text;
}

struct prog_result prog_wait(struct prog_child *c)
{
    struct prog_result r = {0};
    uint64_t end = now_ms() + RUN_MS;
    int status = 0;

    while (waitpid(c->pid, &status, WNOHANG) == 0) {
        if (now_ms() > end) {
            kill(c->pid, SIGKILL);
            waitpid(c->pid, &status, 0);
            break;
        }
        pause_ms(2);
    }
    r.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    r.out = file_text(c->out, &r.out_len);
    r.err = file_text(c->err, &r.err_len);
    close(c->out);
    close(c->err);
    return r;
}

struct prog_result prog_run(const char *const *argv, const char *const *env, const char *input)
{
    struct prog_child c = prog_start(argv, env, input);
    return prog_wait(&c);
}

void prog_free(struct prog_result *r)
{
    free(r->out);
    free(r->err);
    r->out = r->err = NULL;
}

struct prog_result backcast_run(const char *const *args, const char *const *env, const char *input)
{
    const char *argv[24] = {TEST_BIN "/backcast"};
    size_t n = 0;
    while (args[n] != NULL) {
        assert_true(n + 2 < sizeof argv / sizeof argv[0]);
        argv[n + 1] = args[n];
        n++;
    }
    return prog_run(argv, env, input);
}

void prog_check(const char *what, struct prog_result *r, int code, const char *out, const char *err)
{
    if (r->exit_code != code || (out != NULL && strstr(r->out, out) == NULL) ||
        (err != NULL && strstr(r->err, err) == NULL))
        fail_msg("%s: exit %d, not %d\n--- out\n%s\n--- err\n%s", what, r->exit_code, code, r->out,
                 r->err);
    prog_free(r);
}

void home_make(struct test_home *h)
{
    static const char *const names[5] = {"HOME", "XDG_RUNTIME_DIR", "XDG_DATA_HOME",
                                         "XDG_STATE_HOME", "TMPDIR"};
    folder_root(h->dir, "home");
    for (int i = 0; i < 5; i++) {
        snprintf(h->vars[i], sizeof h->vars[i], "%s=%s", names[i], h->dir);
        h->env[i] = h->vars[i];
    }
    h->env[5] = NULL;
}

void home_drop(struct test_home *h)
{
    folder_drop(h->dir);
}

bool prog_says(int fd, const char *text)
{
    uint64_t end = now_ms() + 20000;
    for (;;) {
        size_t len;
        char *all = file_text(fd, &len);
        bool found = strstr(all, text) != NULL;
        free(all);
        if (found || now_ms() > end)
            return found;
        pause_ms(5);
    }
}

/* ---- JSON: a recogniser (RFC 8259), no more */

static const char *space(const char *s)
{
    while (*s == ' ' || *s == '\t' || *s == '\r' || *s == '\n')
        s++;
    return s;
}

static const char *string_end(const char *s)
{
    if (*s++ != '"')
        return NULL;
    for (; *s != '"'; s++) {
        if ((unsigned char)*s < 0x20)
            return NULL;
        if (*s != '\\')
            continue;
        s++;
        if (*s == 'u') {
            for (int i = 0; i < 4; i++)
                if (!isxdigit((unsigned char)*++s))
                    return NULL;
        } else if (*s == '\0' || strchr("\"\\/bfnrt", *s) == NULL) {
            return NULL;
        }
    }
    return s + 1;
}

static const char *number_end(const char *s)
{
    if (*s == '-')
        s++;
    if (!isdigit((unsigned char)*s))
        return NULL;
    char *end;
    strtod(s, &end);
    return end;
}

static const char *value_end(const char *s, int depth)
{
    static const char *const words[] = {"true", "false", "null"};
    bool object = *s == '{';

    for (int i = 0; i < 3; i++)
        if (strncmp(s, words[i], strlen(words[i])) == 0)
            return s + strlen(words[i]);
    if (*s == '"')
        return string_end(s);
    if (*s != '{' && *s != '[')
        return number_end(s);
    char close = object ? '}' : ']';
    if (depth > 32)
        return NULL;
    s = space(s + 1);
    if (*s == close)
        return s + 1;
    for (;;) {
        if (object) {
            s = string_end(s);
            if (s == NULL || *(s = space(s)) != ':')
                return NULL;
            s = space(s + 1);
        }
        s = value_end(s, depth + 1);
        if (s == NULL)
            return NULL;
        s = space(s);
        if (*s == close)
            return s + 1;
        if (*s != ',')
            return NULL;
        s = space(s + 1);
    }
}

bool json_valid(const char *text, bool lines)
{
    const char *s = text;
    int n = 0;
    do {
        s = value_end(s, 0);
        n++;
        if (s == NULL)
            return false;
        if (lines && *s == '\n')
            s++;
    } while (lines && *s != '\0');
    return n > 0 && *space(s) == '\0';
}
