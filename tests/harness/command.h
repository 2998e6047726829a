/* command.h: a program run to its end, with what it printed: for tests of the command.
 *
 *     struct prog_result r = prog_run((const char *[]){TEST_BIN "/backcast", "ls", NULL}, env, "input");
 *     ... r.exit_code, r.out, r.err ...
 *     prog_free(&r);
 */
#ifndef BACKCAST_TEST_COMMAND_H
#define BACKCAST_TEST_COMMAND_H
#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>
#include "folders_test.h"

struct prog_result {
    int exit_code;   /* 128 + signal if it was killed by one */
    char *out, *err; /* malloced, NUL-terminated */
    size_t out_len, err_len;
};
/* env: "NAME=value" to add, or "NAME" to take out, NULL-terminated; may be NULL. input: text for
 * standard input, NULL: /dev/null. A program that does not end within four minutes is killed. */
struct prog_result prog_run(const char *const *argv, const char *const *env, const char *input);
void prog_free(struct prog_result *r);
/* build/bin/backcast with these arguments (NULL-terminated, 22 at most). */
struct prog_result backcast_run(const char *const *args, const char *const *env, const char *input);
/* Fails the test unless it ended with `code` and printed these (NULL: anything); frees the result. */
void prog_check(const char *what, struct prog_result *r, int code, const char *out,
                const char *err);

/* Where a test has a `struct test_home home`: the command with these arguments; the same without input, checked at once. */
#define RUN(input, ...) backcast_run((const char *const[]){__VA_ARGS__, NULL}, home.env, input)
#define CHECK(code, out, err, ...)                                                                 \
    do {                                                                                           \
        struct prog_result r_ = RUN(NULL, __VA_ARGS__);                                            \
        prog_check(#__VA_ARGS__, &r_, code, out, err);                                             \
    } while (0)

/* A home of its own: no daemon, no model, no history of whoever runs the test. */
struct test_home {
    char dir[FOLDER_PATH];
    const char *env[6]; /* for prog_run: HOME, TMPDIR and the XDG folders are dir */
    char vars[5][FOLDER_PATH + 32];
};
void home_make(struct test_home *h);
void home_drop(struct test_home *h);

/* The same in the background: output goes to two files in /tmp that prog_wait reads and removes. */
struct prog_child {
    pid_t pid;
    int out, err; /* files; read with prog_says while it runs */
};
struct prog_child prog_start(const char *const *argv, const char *const *env, const char *input);
struct prog_result prog_wait(struct prog_child *c);
/* True once the file (c->out or c->err) contains the text; waits up to 20 s. */
bool prog_says(int fd, const char *text);

/* True if the text is one JSON value (or, with lines, one a line, at least one). */
bool json_valid(const char *text, bool lines);
#endif
