/* The daemon under a service manager, without one: systemd-socket-activate hands it sockets good and
 * bad, a notify socket of the test's own hears what it says, systemd-analyze reads the units. Skipped
 * where the tools are absent. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>
#include "raw_client.h"

#define TINY TEST_VECTORS "/tiny-llama.gguf"
#define ACTIVATE "/usr/bin/systemd-socket-activate"
#define ANALYZE "/usr/bin/systemd-analyze"

static char dir[] = "/tmp/backcast-systemd-XXXXXX";
static char sock[64], log_path[64], own[64];

static void need(const char *tool)
{
    if (access(tool, X_OK) < 0)
        skip();
}

static uint64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

/* Runs argv with its output in log_path; NOTIFY_SOCKET if notify is not NULL. */
static pid_t spawn(const char *const *argv, const char *notify)
{
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid > 0)
        return pid;
    int log = open(log_path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    dup2(log, 1);
    dup2(log, 2);
    unsetenv("LISTEN_FDS");
    if (notify != NULL)
        setenv("NOTIFY_SOCKET", notify, 1);
    else
        unsetenv("NOTIFY_SOCKET");
    execv(argv[0], (char *const *)(uintptr_t)argv);
    _exit(127);
}

static int wait_end(pid_t pid, unsigned ms)
{
    uint64_t end = now_ms() + ms;
    int status;
    while (waitpid(pid, &status, WNOHANG) == 0) {
        if (now_ms() > end) {
            kill(pid, SIGKILL);
            waitpid(pid, &status, 0);
            fail_msg("process %d did not end in %u ms", (int)pid, ms);
        }
        usleep(5000);
    }
    return status;
}

static const char *log_text(void)
{
    static char text[8000];
    int fd = open(log_path, O_RDONLY);
    ssize_t n = fd >= 0 ? read(fd, text, sizeof text - 1) : 0;
    text[n > 0 ? n : 0] = '\0';
    close(fd);
    return text;
}

static void wait_for(const char *path)
{
    for (unsigned i = 0; i < 2000 && access(path, F_OK) < 0; i++)
        usleep(5000);
    assert_int_equal(access(path, F_OK), 0);
}

static void served(const char *socket)
{
    struct raw *r = raw_connect(socket);
    raw_hello(r);
    struct raw_session *s = raw_open(r, NULL);
    raw_generate(s, "hello", 5, NULL);
    raw_collect(s);
    raw_session_free(&s);
    raw_close(&r);
}

static void the_first_client_starts_it(void **state)
{
    (void)state;
    need(ACTIVATE);
    static const char *argv[] = {ACTIVATE,
                                 "-l",
                                 sock,
                                 "--fdname=control",
                                 TEST_BIN "/backcastd",
                                 "--no-config",
                                 "--state-dir=none",
                                 "--model",
                                 TINY,
                                 "--kv-memory=256MiB",
                                 "--socket",
                                 own,
                                 NULL};
    pid_t pid = spawn(argv, NULL);
    wait_for(sock);
    served(sock); /* waits in the backlog until the model is there */
    served(sock);
    assert_int_equal(access(own, F_OK), -1);
    assert_int_equal(kill(pid, SIGTERM), 0);
    assert_int_equal(wait_end(pid, 5000), 0);
    assert_int_equal(access(sock, F_OK), 0); /* it belongs to the manager */
    assert_non_null(strstr(log_text(), "(inherited)"));
    unlink(sock);
}

static void strangers_are_ignored(void **state)
{
    (void)state;
    need(ACTIVATE);
    static const char *argv[] = {ACTIVATE,
                                 "-l",
                                 sock,
                                 "--fdname=http",
                                 TEST_BIN "/backcastd",
                                 "--no-config",
                                 "--state-dir=none",
                                 "--model",
                                 TINY,
                                 "--kv-memory=256MiB",
                                 "--socket",
                                 own,
                                 NULL};
    pid_t pid = spawn(argv, NULL);
    wait_for(sock);
    struct raw *r = raw_connect(sock); /* starts it */
    wait_for(own);
    served(own);
    raw_close(&r);
    assert_int_equal(kill(pid, SIGTERM), 0);
    assert_int_equal(wait_end(pid, 5000), 0);
    assert_non_null(strstr(log_text(), "\"http\""));
    assert_int_equal(access(own, F_OK), -1);
    unlink(sock);
}

static void wrong_sockets_are_refused(void **state)
{
    (void)state;
    need(ACTIVATE);
    static const char *const kinds[][2] = {{"-d", "no listening"},
                                           {"--seqpacket", "no listening"},
                                           {NULL, "abstract"}};
    for (unsigned i = 0; i < 3; i++) {
        char at[70];
        snprintf(at, sizeof at, i == 2 ? "@%s" : "%s", sock);
        const char *argv[] = {ACTIVATE,
                              "-l",
                              at,
                              "--fdname=control",
                              kinds[i][0] != NULL ? kinds[i][0] : "--setenv=A=B",
                              TEST_BIN "/backcastd",
                              "--no-config",
                              "--state-dir=none",
                              "--model",
                              TINY,
                              NULL};
        pid_t pid = spawn(argv, NULL);
        struct sockaddr_un sa = {.sun_family = AF_UNIX};
        snprintf(sa.sun_path + (i == 2), sizeof sa.sun_path - 1, "%s", sock);
        socklen_t len = i == 2
                            ? (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(sock))
                            : (socklen_t)sizeof sa;
        int type = i == 0 ? SOCK_DGRAM : i == 1 ? SOCK_SEQPACKET : SOCK_STREAM;
        int fd = socket(AF_UNIX, type, 0), rc = -1;
        for (unsigned k = 0; k < 1000 && rc < 0; k++) {
            rc = connect(fd, (struct sockaddr *)&sa, len);
            usleep(5000);
        }
        assert_int_equal(rc, 0);
        if (i == 0)
            assert_int_equal(send(fd, "x", 1, 0), 1);
        int status = wait_end(pid, 10000);
        assert_true(WIFEXITED(status));
        if (WEXITSTATUS(status) != 1 || strstr(log_text(), kinds[i][1]) == NULL)
            fail_msg("kind %u: %d, %s", i, status, log_text());
        close(fd);
        unlink(sock);
    }
}

/* ---- notify */

static int notify_open(const char *path)
{
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    snprintf(sa.sun_path, sizeof sa.sun_path, "%s", path);
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&sa, sizeof sa), 0);
    return fd;
}

/* Messages until one that has `wanted`; all of them, joined, in ret. */
static bool notify_until(int fd, const char *wanted, char *ret, size_t size)
{
    uint64_t end = now_ms() + 20000;
    size_t n = strlen(ret);
    while (strstr(ret, wanted) == NULL && now_ms() < end) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        if (poll(&p, 1, 500) != 1)
            continue;
        ssize_t got = recv(fd, ret + n, size - 2 - n, 0);
        assert_true(got > 0);
        n += (size_t)got;
        ret[n++] = '\n';
        ret[n] = '\0';
    }
    return strstr(ret, wanted) != NULL;
}

static void ready_means_that_a_prompt_can_be_served(void **state)
{
    (void)state;
    char path[64], said[4000] = "";
    snprintf(path, sizeof path, "%s/notify", dir);
    int fd = notify_open(path);
    static const char *argv[] = {TEST_BIN "/backcastd",
                                 "--no-config",
                                 "--state-dir=none",
                                 "--model",
                                 TINY,
                                 "--kv-memory=256MiB",
                                 "--socket",
                                 own,
                                 NULL};
    pid_t pid = spawn(argv, path);
    assert_true(notify_until(fd, "READY=1", said, sizeof said));
    uint64_t start = now_ms();
    served(own);
    assert_true(now_ms() - start < 3000);
    char *loading = strstr(said, "STATUS=Loading"), *ready = strstr(said, "READY=1");
    assert_true(loading != NULL && loading < ready);
    assert_non_null(strstr(said, "EXTEND_TIMEOUT_USEC="));
    assert_non_null(strstr(ready, "STATUS=Serving tiny-llama"));
    assert_int_equal(kill(pid, SIGTERM), 0);
    assert_true(notify_until(fd, "STOPPING=1", said, sizeof said));
    assert_int_equal(wait_end(pid, 5000), 0);
    close(fd);
    unlink(path);
}

static void not_ready_without_a_model(void **state)
{
    (void)state;
    char path[64], said[4000] = "";
    snprintf(path, sizeof path, "%s/notify", dir);
    int fd = notify_open(path);
    static const char *argv[] = {TEST_BIN "/backcastd",
                                 "--no-config",
                                 "--state-dir=none",
                                 "--model",
                                 TEST_VECTORS "/README.md",
                                 "--socket",
                                 own,
                                 NULL};
    pid_t pid = spawn(argv, path);
    int status = wait_end(pid, 10000);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 1);
    assert_true(notify_until(fd, "STATUS=", said, sizeof said));
    assert_null(strstr(said, "READY=1"));
    close(fd);
    unlink(path);
}

/* ---- units */

static void units_are_valid(void **state)
{
    (void)state;
    need(ANALYZE);
    static const char *const units[] = {"backcast.socket", "backcast.service"};
    for (unsigned user = 0; user < 2; user++) {
        char paths[2][300];
        for (unsigned i = 0; i < 2; i++) {
            snprintf(paths[i], sizeof paths[i], "%s/../systemd/test/%s/%s", TEST_BIN,
                     user ? "user" : "system", units[i]);
            assert_int_equal(access(paths[i], R_OK), 0);
        }
        const char *argv[] = {ANALYZE,    user ? "--user" : "--system",
                              "--man=no", "verify",
                              paths[0],   paths[1],
                              NULL};
        setenv("XDG_RUNTIME_DIR", dir, 1);
        pid_t pid = spawn(argv, NULL);
        int status = wait_end(pid, 60000);
        const char *text = log_text();
        if (status != 0 || strstr(text, "backcast") != NULL)
            fail_msg("systemd-analyze verify (%s): %d\n%s", user ? "user" : "system", status, text);
    }
}

static int setup(void **state)
{
    (void)state;
    if (mkdtemp(dir) == NULL)
        return -1;
    snprintf(sock, sizeof sock, "%s/a.sock", dir);
    snprintf(own, sizeof own, "%s/own.sock", dir);
    snprintf(log_path, sizeof log_path, "%s/log", dir);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    char cmd[80];
    snprintf(cmd, sizeof cmd, "rm -rf %s", dir);
    return system(cmd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_first_client_starts_it),
        cmocka_unit_test(strangers_are_ignored),
        cmocka_unit_test(wrong_sockets_are_refused),
        cmocka_unit_test(ready_means_that_a_prompt_can_be_served),
        cmocka_unit_test(not_ready_without_a_model),
        cmocka_unit_test(units_are_valid),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
