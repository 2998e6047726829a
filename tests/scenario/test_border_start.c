/* Starting and stopping: one daemon a socket, stale sockets, wrong options, signals at any time, a
 * parent that dies, a configuration that changes. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>
#include "daemon_harness.h"
#include "raw_client.h"

#define TINY TEST_VECTORS "/tiny-llama.gguf"

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

static void a_second_start_touches_nothing(void **state)
{
    (void)state;
    struct dh *d = dh_start("tiny-llama.gguf", NULL);
    struct stat before, after;
    char log[2000];
    assert_int_equal(stat(d->socket, &before), 0);
    assert_int_equal(before.st_mode & 07777, 0660);
    const char *const args[] = {"--model", TINY, "--socket", d->socket, NULL};
    assert_int_equal(dh_start_fails(args, log, sizeof log), 1);
    assert_non_null(strstr(log, "another daemon serves"));
    assert_int_equal(stat(d->socket, &after), 0);
    assert_int_equal(before.st_ino, after.st_ino);
    served(d->socket);
    dh_stop(&d);
}

/* A program that listens there without our lock is alive all the same. */
static void a_strangers_socket_is_left_alone(void **state)
{
    (void)state;
    char dir[] = "/tmp/backcast-start-XXXXXX", path[64], log[2000];
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/x.sock", dir);
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    snprintf(sa.sun_path, sizeof sa.sun_path, "%s", path);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&sa, sizeof sa), 0);
    assert_int_equal(listen(fd, 5), 0);
    const char *const args[] = {"--model", TINY, "--socket", path, NULL};
    assert_int_equal(dh_start_fails(args, log, sizeof log), 1);
    assert_non_null(strstr(log, "another program serves"));
    assert_int_equal(access(path, F_OK), 0);
    close(fd); /* now it is stale */
    unlink(path);
    int file = open(path, O_CREAT | O_WRONLY, 0600);
    close(file);
    assert_int_equal(dh_start_fails(args, log, sizeof log), 1);
    assert_non_null(strstr(log, "is no socket"));
    assert_int_equal(access(path, F_OK), 0);
    unlink(path);
    snprintf(path, sizeof path, "%s/x.lock", dir);
    unlink(path);
    rmdir(dir);
}

static void a_stale_socket_is_replaced(void **state)
{
    (void)state;
    struct dh *d = dh_start("tiny-llama.gguf", NULL);
    assert_int_equal(kill(d->pid, SIGKILL), 0);
    dh_wait(d, DH_PATIENCE_MS);
    assert_int_equal(access(d->socket, F_OK), 0);
    const char *const args[] = {"--socket", d->socket, NULL};
    struct dh *next = dh_start("tiny-llama.gguf", args);
    served(d->socket);
    snprintf(next->socket, sizeof next->socket, "%s", d->socket);
    dh_stop(&next);
    dh_free(&d);
}

static void what_cannot_work_is_said(void **state)
{
    (void)state;
    static const struct {
        int code;
        const char *args[5], *says;
    } cases[] = {
        {2, {"--bugdet=5MiB"}, "--budget"},
        {2, {"--kv-memory=lots"}, "lots"},
        {2, {"--config=/nowhere/at/all.conf"}, "/nowhere/at/all.conf"},
        /* defaults that no session could be opened with */
        {2, {"--model", TINY, "--policy=guess"}, "--policy: [session] unknown policy \"guess\""},
        {2,
         {"--model", TINY, "--limit-max-tokens=10", "--max-tokens=11"},
         "--limit-max-tokens: [limits] max_tokens 10 is less than [session] max_tokens 11"},
        {2, {"--model", TINY, "--score=guess"}, "guess"},
        {2, {"--model", TINY, "--trigger=guess"}, "guess"},
        {2, {"--model", TINY, "--kv-type=f64"}, "f64"},
        {2, {"--model", TINY, "--span=4"}, "span 4"},
        {2, {"--model", TINY, "--budget=64t", "--keep=64"}, "keep_tokens 64"},
        {2, {"--model", TINY, "--budget=64t", "--frozen=60"}, "frozen_tokens 60"},
        {2,
         {"--model", TINY, "--recent=200000"},
         "--recent: [session] frozen_tokens 0 + max(recent_tokens 200000,"}, /* 64 MiB of its pages */
        {2,
         {"--model", TINY, "--budget=1000"},
         "--budget: [session] budget_bytes 1000 is less than"},
        {2, {"--model", TINY, "--budget=1t"}, "[session] budget_tokens 1: must be at least 2"},
        {2, {"--model", TINY, "--policy=none", "--trigger=prefill_end"}, "prefill_end"},
        {1, {"--model", "/nowhere.gguf"}, "/nowhere.gguf"},
        {1, {"--model", "not-a-name-of-a-model"}, "backcast pull"},
        {1, {"--model", TEST_VECTORS "/README.md"}, "README.md"},
        {2, {"--model", TINY, "--log=loud"}, "[daemon] log: 'loud'"},
        {2,
         {"--model", TINY, "--backend=abacus"},
         "--backend: [daemon] unknown backend \"abacus\""},
        {2, {"--model", TINY, "--isa=sse"}, "--isa: [daemon] unknown isa \"sse\"; there are "},
        {1, /* there is one, but not here */
         {"--model", TINY, "--backend=ref", "--isa=avx2"},
         "has no isa \"avx2\", only \"scalar\""},
        {2, {"--model", TINY, "--activations=12"}, "--activations: activations = \"12\" is not"},
        {1, {"--model", TINY, "--socket-group=no-such-group-here"}, "no-such-group-here"},
        {1, {"--model", TINY, "--socket=/nowhere/at/all/x.sock"}, "/nowhere/at/all"},
        {2,
         {"--socket=/tmp/"
          "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
          "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa.sock"},
         "107"},
    };
    for (unsigned i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char log[2000];
        int code = dh_start_fails(cases[i].args, log, sizeof log);
        if (code != cases[i].code || strstr(log, cases[i].says) == NULL)
            fail_msg("case %u: code %d, \"%s\"; wanted %d and \"%s\"", i, code, log, cases[i].code,
                     cases[i].says);
    }
}

static void the_longest_socket_path_works(void **state)
{
    (void)state;
    char dir[] = "/tmp/backcast-start-XXXXXX", path[108], arg[120], lock[120];
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/%0*d.sock", dir, (int)(107 - strlen(dir) - 6), 7);
    assert_int_equal(strlen(path), 107);
    snprintf(arg, sizeof arg, "--socket=%s", path);
    const char *const args[] = {arg, NULL};
    struct dh *d = dh_start("tiny-llama.gguf", args);
    served(path);
    assert_int_equal(kill(d->pid, SIGTERM), 0);
    assert_int_equal(dh_wait(d, DH_PATIENCE_MS), 0);
    assert_int_equal(access(path, F_OK), -1);
    dh_free(&d);
    snprintf(lock, sizeof lock, "%.*s.lock", 102, path);
    assert_int_equal(unlink(lock), 0);
    rmdir(dir);
}

static uint64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

/* In the middle of a prefill, of decoding, of an upload: requests end with RETRY, then the end. */
static void signals_end_it_in_good_order(void **state)
{
    (void)state;
    static char text[15000];
    memset(text, 'p', sizeof text);
    for (unsigned i = 0; i < 4; i++) {
        struct dh *d = dh_start_long(NULL);
        struct raw *r = raw_connect(d->socket);
        raw_hello(r);
        struct raw_session *s = raw_open(r, NULL);
        Backcast__Generate g = BACKCAST__GENERATE__INIT;
        g.has_max_tokens = g.has_ignore_end = 1;
        g.max_tokens = 1000000;
        g.ignore_end = 1;
        if (i == 1) {
            raw_generate(s, "go", 2, &g);
        } else if (i == 2) {
            g.has_session = g.has_kind = g.has_ring_bytes = 1;
            g.session = s->id;
            g.kind = 1;
            g.ring_bytes = 50000;
            raw_send(r, FRAME_GENERATE, &g.base);
        } else if (i == 3) {
            raw_generate(s, text, sizeof text, &g);
        }
        if (i != 3)
            usleep(50000);
        uint64_t start = now_ms();
        assert_int_equal(kill(d->pid, i % 2 == 0 ? SIGTERM : SIGINT), 0);
        if (i == 1 || i == 3) {
            raw_collect(s); /* what the ring holds outlives the daemon */
            assert_int_equal(s->end.reason, END_RETRY);
        }
        assert_int_equal(dh_wait(d, DH_PATIENCE_MS), 0);
        assert_true(now_ms() - start < 5000);
        raw_is_closed(r);
        assert_int_equal(atomic_load(&s->d2c->state), RING_CLOSED);
        dh_free(&d);
        raw_session_free(&s);
        raw_close(&r);
    }
}

static void a_second_signal_ends_it_at_once(void **state)
{
    (void)state;
    struct dh *d = dh_start("tiny-llama.gguf", NULL);
    kill(d->pid, SIGTERM);
    kill(d->pid, SIGINT);
    assert_int_equal(dh_wait(d, DH_PATIENCE_MS), 0);
    dh_free(&d);
}

static void it_does_not_outlive_its_parent(void **state)
{
    (void)state;
    struct dh *d = dh_start("tiny-llama.gguf", NULL);
    assert_int_equal(shutdown(d->parent_fd, SHUT_RDWR), 0);
    assert_int_equal(dh_wait(d, DH_PATIENCE_MS), 0);
    dh_free(&d);
}

/* Names: a section of the configuration, a file of a models folder; the default by either. */
static void models_are_found_by_name(void **state)
{
    (void)state;
    char dir[] = "/tmp/backcast-data-XXXXXX", path[120];
    static const char *const links[][2] = {{"SmolLM2-135M-Instruct.Q4_1.gguf", "tiny-llama.gguf"},
                                           {"other.gguf", "tiny-qwen2.gguf"}};
    assert_non_null(mkdtemp(dir));
    for (unsigned i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/backcast%s", dir, i == 0 ? "" : "/models");
        assert_int_equal(mkdir(path, 0700), 0);
    }
    for (unsigned i = 0; i < 2; i++) {
        char target[300];
        snprintf(path, sizeof path, "%s/backcast/models/%s", dir, links[i][0]);
        snprintf(target, sizeof target, TEST_VECTORS "/%s", links[i][1]);
        assert_int_equal(symlink(target, path), 0);
    }
    setenv("XDG_DATA_HOME", dir, 1);
    const char *const args[] = {"--model=", "--model.third.path=" TEST_VECTORS "/tiny-qwen3.gguf",
                                NULL};
    struct dh *d = dh_start("tiny-llama.gguf", args); /* overridden: the default's own name */
    unsetenv("XDG_DATA_HOME");
    struct raw *r = raw_connect(d->socket);
    Backcast__Hello h = BACKCAST__HELLO__INIT;
    Backcast__HelloReply *reply = raw_call(r, FRAME_HELLO, &h.base, FRAME_HELLO_REPLY);
    assert_memory_equal(reply->default_model.data, "SmolLM2-135M-Instruct.Q4_1", 26);
    assert_int_equal(reply->n_models, 3);
    static const char *const asked[] = {NULL, "other", "third"};
    static const char *const chat[] = {"tiny", "other", "third"};
    for (unsigned i = 0; i < 3; i++) {
        Backcast__OpenSession m = BACKCAST__OPEN_SESSION__INIT;
        m.has_model = asked[i] != NULL;
        if (asked[i] != NULL)
            m.model = (ProtobufCBinaryData){strlen(asked[i]), (uint8_t *)(uintptr_t)asked[i]};
        struct raw_session *s = raw_open(r, &m);
        raw_generate(s, chat[i], strlen(chat[i]), NULL);
        raw_collect(s);
        raw_session_free(&s);
    }
    raw_close(&r);
    dh_stop(&d);
    for (unsigned i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/backcast/models/%s", dir, links[i][0]);
        unlink(path);
    }
    snprintf(path, sizeof path, "%s/backcast/models", dir);
    rmdir(path);
    snprintf(path, sizeof path, "%s/backcast", dir);
    rmdir(path);
    rmdir(dir);
}

static bool log_has_changes(void *arg)
{
    return dh_log_has(arg, "changes that apply now: 2, that wait for a restart: 2");
}

static bool log_has_refusal(void *arg)
{
    return dh_log_has(arg, "nothing has changed");
}

static bool log_has_policy(void *arg)
{
    return dh_log_has(arg, "unknown policy \"guess\"");
}

static bool log_has_recent(void *arg)
{
    return dh_log_has(arg, ":2: [session] frozen_tokens 0 + max(recent_tokens 200000");
}

static bool log_has_level(void *arg)
{
    return dh_log_has(arg, "[daemon] log: 'loud' is not error");
}

static void sighup_applies_what_can_change(void **state)
{
    (void)state;
    char conf[] = "/tmp/backcast-conf-XXXXXX", arg[64];
    int fd = mkstemp(conf);
    assert_true(fd >= 0);
    static const char before[] = "[limits]\nsessions = 1\n",
                      after[] = "[limits]\nsessions = 2\n[memory]\nkv_memory = 1GiB\n"
                                "[session]\npolicy = h2o\n[daemon]\nthreads = 3\npin = 1\n"
                                "[model.x]\npath = /x.gguf\n";
    assert_int_equal(write(fd, before, sizeof before - 1), sizeof before - 1);
    snprintf(arg, sizeof arg, "--config=%s", conf);
    const char *const args[] = {arg, NULL};
    struct dh *d = dh_start("tiny-llama.gguf", args);
    struct raw *r = raw_connect(d->socket);
    raw_hello(r);
    struct raw_session *a = raw_open(r, NULL), *b;
    Backcast__OpenSession m = BACKCAST__OPEN_SESSION__INIT;
    raw_call_fails(r, FRAME_OPEN_SESSION, &m.base, 5, "sessions");
    assert_int_equal(pwrite(fd, after, sizeof after - 1, 0), sizeof after - 1);
    assert_int_equal(kill(d->pid, SIGHUP), 0);
    assert_true(dh_until(log_has_changes, d, DH_PATIENCE_MS));
    assert_true(dh_log_has(d, "[limits] sessions applied"));
    assert_true(dh_log_has(d, "[daemon] pin needs a restart"));
    assert_true(dh_log_has(d, "[model.NAME] path or chat_template needs a restart"));
    assert_false(dh_log_has(d, "[daemon] threads")); /* of the command line, too */
    assert_false(dh_log_has(d, "kv_memory")); /* the command line says otherwise, as before */
    Backcast__SessionOpened *o = raw_call(r, FRAME_OPEN_SESSION, &m.base, FRAME_SESSION_OPENED);
    assert_memory_equal(o->policy.data, "h2o", 3);
    b = raw_session_of(r);
    assert_int_equal(ftruncate(fd, 0), 0);
    assert_int_equal(pwrite(fd, "nonsense\n", 9, 0), 9);
    assert_int_equal(kill(d->pid, SIGHUP), 0);
    assert_true(dh_until(log_has_refusal, d, DH_PATIENCE_MS));
    static const char no_policy[] = "[limits]\nsessions = 3\n[session]\npolicy = guess\n";
    assert_int_equal(pwrite(fd, no_policy, sizeof no_policy - 1, 0), sizeof no_policy - 1);
    assert_int_equal(kill(d->pid, SIGHUP), 0);
    assert_true(dh_until(log_has_policy, d, DH_PATIENCE_MS));
    static const char no_level[] = "[limits]\nsessions = 3\n[daemon]\nlog = ipc:debug,loud\n";
    assert_int_equal(ftruncate(fd, 0), 0);
    assert_int_equal(pwrite(fd, no_level, sizeof no_level - 1, 0), sizeof no_level - 1);
    assert_int_equal(kill(d->pid, SIGHUP), 0);
    assert_true(dh_until(log_has_level, d, DH_PATIENCE_MS));
    assert_false(dh_log_has(d, "[daemon] log applied"));
    static const char no_recent[] = "[session]\nrecent = 200000\n[limits]\nsessions = 3\n";
    assert_int_equal(ftruncate(fd, 0), 0);
    assert_int_equal(pwrite(fd, no_recent, sizeof no_recent - 1, 0), sizeof no_recent - 1);
    assert_int_equal(kill(d->pid, SIGHUP), 0);
    assert_true(dh_until(log_has_recent, d, DH_PATIENCE_MS));
    raw_call_fails(r, FRAME_OPEN_SESSION, &m.base, 5, "sessions"); /* still 2 */
    raw_session_free(&a);
    raw_session_free(&b);
    raw_close(&r);
    dh_stop(&d);
    close(fd);
    unlink(conf);
}

/* ---- under conditions that the harness does not make */

struct start {
    int sent; /* a signal that is there before the program is; 0: none */
    int resource;
    rlim_t limit; /* of resource; RLIM_INFINITY: as it is */
    const char *log;
};

static pid_t start_under(const struct start *s, const char *socket)
{
    pid_t pid = fork();
    if (pid != 0)
        return pid;
    int log = open(s->log, O_CREAT | O_TRUNC | O_WRONLY, 0600);
    sigset_t set;
    signal(
        SIGINT,
        SIG_DFL); /* a shell in the background has it ignored, and a test that waits for its effect would wait for ever */
    sigemptyset(&set);
    if (s->sent != 0 && (sigaddset(&set, s->sent), sigprocmask(SIG_BLOCK, &set, NULL) < 0))
        _exit(126);
    if (s->sent != 0)
        raise(s->sent); /* what is pending stays so over exec */
    struct rlimit rl = {s->limit, s->limit};
    if (dup2(log, 2) < 0 || (s->limit != RLIM_INFINITY && setrlimit(s->resource, &rl) < 0))
        _exit(126);
    execl(TEST_BIN "/backcastd", "backcastd", "--no-config", "--model", TINY, "--threads=1",
          "--kv-memory=64MiB", "--state-dir=none", "--socket", socket, NULL);
    _exit(127);
}

static int end_of(pid_t pid)
{
    int status = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return status;
}

struct place {
    char dir[40], socket[64], log[64];
};

static struct place place_make(void)
{
    struct place p = {.dir = "/tmp/backcast-start-XXXXXX"};
    assert_non_null(mkdtemp(p.dir));
    snprintf(p.socket, sizeof p.socket, "%s/x.sock", p.dir);
    snprintf(p.log, sizeof p.log, "%s/log", p.dir);
    return p;
}

static void place_remove(const struct place *p)
{
    char lock[64];
    snprintf(lock, sizeof lock, "%s/x.lock", p->dir);
    unlink(lock);
    unlink(p->log);
    assert_int_equal(rmdir(p->dir), 0); /* no socket is left */
}

static bool is_there(void *path)
{
    return access(path, F_OK) == 0;
}

/* Sent before the program began, it is answered by the loop; sent at some other time, nothing is left either. */
static void signals_during_the_start_wait_for_their_answer(void **state)
{
    (void)state;
    static const int numbers[] = {SIGTERM, SIGINT, SIGHUP};
    struct place p = place_make();
    for (unsigned i = 0; i < 3; i++) {
        struct start s = {.sent = numbers[i], .limit = RLIM_INFINITY, .log = p.log};
        pid_t pid = start_under(&s, p.socket);
        if (numbers[i] == SIGHUP) { /* read again, and no end */
            assert_true(dh_until(is_there, p.socket, DH_PATIENCE_MS));
            served(p.socket);
            assert_int_equal(kill(pid, SIGTERM), 0);
        }
        assert_int_equal(end_of(pid), 0);
        assert_int_equal(access(p.socket, F_OK), -1);
    }
    for (unsigned i = 0; i < 30; i++) {
        struct start s = {.limit = RLIM_INFINITY, .log = p.log};
        int sent = numbers[i % 2];
        pid_t pid = start_under(&s, p.socket);
        usleep(i * 300);
        kill(pid, sent);
        int status = end_of(pid);
        assert_true(status == 0 || (WIFSIGNALED(status) && WTERMSIG(status) == sent));
        assert_int_equal(access(p.socket, F_OK), -1);
    }
    place_remove(&p);
}

static void limits_of_the_system_are_said(void **state)
{
    (void)state;
    struct place p = place_make();
    char text[400];
    for (rlim_t n = 5; n < 64; n += 9) {
        struct start s = {.resource = RLIMIT_NOFILE, .limit = n, .log = p.log};
        int status = end_of(start_under(&s, p.socket));
        FILE *f = fopen(p.log, "r");
        text[fread(text, 1, sizeof text - 1, f)] = '\0';
        fclose(f);
        if (n > 10) /* with fewer the program may not even find its libraries */
            assert_non_null(strstr(text, "open files are allowed"));
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) != 0);
        assert_int_equal(access(p.socket, F_OK), -1);
    }
    /* files of 4 KiB at most: no shared memory for a client; the daemon lives */
    struct start s = {.resource = RLIMIT_FSIZE, .limit = 4096, .log = p.log};
    pid_t pid = start_under(&s, p.socket);
    assert_true(dh_until(is_there, p.socket, DH_PATIENCE_MS));
    struct raw *r = raw_connect(p.socket);
    Backcast__OpenSession m = BACKCAST__OPEN_SESSION__INIT;
    raw_hello(r);
    raw_send(r, FRAME_OPEN_SESSION, &m.base);
    assert_int_equal(raw_recv(r, RAW_TIMEOUT_MS), 1);
    assert_int_equal(r->h.type, FRAME_ERROR);
    raw_close(&r);
    assert_int_equal(kill(pid, SIGTERM), 0);
    assert_int_equal(end_of(pid), 0);
    place_remove(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_second_start_touches_nothing),
        cmocka_unit_test(a_strangers_socket_is_left_alone),
        cmocka_unit_test(a_stale_socket_is_replaced),
        cmocka_unit_test(what_cannot_work_is_said),
        cmocka_unit_test(the_longest_socket_path_works),
        cmocka_unit_test(signals_end_it_in_good_order),
        cmocka_unit_test(a_second_signal_ends_it_at_once),
        cmocka_unit_test(it_does_not_outlive_its_parent),
        cmocka_unit_test(models_are_found_by_name),
        cmocka_unit_test(sighup_applies_what_can_change),
        cmocka_unit_test(signals_during_the_start_wait_for_their_answer),
        cmocka_unit_test(limits_of_the_system_are_said),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
