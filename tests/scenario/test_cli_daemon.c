/* test_cli_daemon.c: the command with a real daemon, one that listens and private ones: what it prints
 * where, its exit codes, JSON that parses, and private daemons that never outlive it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <dirent.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>
#include "command.h"
#include "daemon_harness.h"

#define COMMAND TEST_BIN "/backcast"
#define MODEL TEST_VECTORS "/tiny-llama.gguf"

static struct dh *d;
static struct test_home home;
static char socket_opt[80];

static int start(void **state)
{
    (void)state;
    home_make(&home);
    const char *args[] = {"--threads=1", NULL};
    d = dh_start_long(args);
    snprintf(socket_opt, sizeof(socket_opt), "--socket=%s", d->socket);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    dh_stop(&d);
    home_drop(&home);
    return 0;
}

#define CHECK_JSON(...)                                                                            \
    do {                                                                                           \
        struct prog_result r_ = RUN(NULL, __VA_ARGS__);                                            \
        if (r_.exit_code != 0 || !json_valid(r_.out, true))                                        \
            fail_msg("%s: exit %d, no JSON: %s %s", #__VA_ARGS__, r_.exit_code, r_.out, r_.err);   \
        prog_free(&r_);                                                                            \
    } while (0)

static void usage_is_2_and_failure_is_1(void **state)
{
    (void)state;
    struct prog_result r = prog_run((const char *[]){COMMAND, NULL}, home.env, NULL);
    prog_check("no command", &r, 2, NULL, "usage");
    CHECK(2, NULL, "no command 'fly'", "fly");
    CHECK(2, NULL, "no option --fly", "ls", "--fly");
    CHECK(2, NULL, "no option --no-start", "bench", "--no-start"); /* it always starts one */
    CHECK(2, NULL, "no option --no-start", "demo", "--no-start", "--text", "/nonexistent");
    CHECK(2, NULL, "an argument is missing", "budget", "1");
    CHECK(2, NULL, "too many", "ls", "x");
    CHECK(2, NULL, "not a size", "budget", "1", "lots");
    CHECK(2, NULL, "--raw has no system", "run", "--raw", "--system", "x", "y");
    CHECK(2, NULL, "--raw has no system", "chat", "--raw", "--system", "x");
    CHECK(2, NULL, "--n-logprobs is printed with --json alone", "run", "--n-logprobs", "2", "y");
    CHECK(2, NULL, "--prompt-logprobs is printed with --json", "chat", "--prompt-logprobs");
    CHECK(0, "usage", NULL, "help");
    CHECK(0, "--span-quantile", NULL, "help", "run");
    CHECK(0, "--json", NULL, "ls", "--help");
    CHECK(0, "backcast 0.", NULL, "--version");
    CHECK(1, NULL, "no daemon listens", "ls");
    CHECK(1, NULL, "no daemon listens", "run", "--no-start", "hello");
    CHECK(1, NULL, "/nowhere/sock", "stat", "--socket", "/nowhere/sock");
    CHECK(1, NULL, "`backcast pull`", "run", "hello"); /* private daemon, but no model */
    CHECK(1, NULL, "no file and no model", "tokenize", "-m", "nosuch", "x");
    CHECK(1, NULL, "/etc/passwd", "run", "-m", "/etc/passwd/x", "hello");
    CHECK(1, NULL, "magic", "inspect", "/etc/passwd");
    CHECK(1, NULL, "/nonexistent", "run", "-f", "/nonexistent", "hello");
    CHECK(1, NULL, "no file and not in the catalogue", "pull", "gpt-9");
}

/* What is wrong with a model's file is said with its name, whoever reads it. */
static void errors_name_the_model_file(void **state)
{
    (void)state;
    char file[FOLDER_PATH + 16], want[FOLDER_PATH + 200], first[64];
    snprintf(file, sizeof file, "%s/cut.gguf", home.dir);
    FILE *in = fopen(MODEL, "r"), *out = fopen(file, "w");
    assert_non_null(in);
    assert_non_null(out);
    assert_int_equal(fread(first, 1, sizeof first, in), sizeof first);
    assert_int_equal(fwrite(first, 1, sizeof first, out), sizeof first);
    fclose(in);
    assert_int_equal(fclose(out), 0);
    static const char *const commands[][2] = {
        {"inspect", NULL}, {"pull", NULL}, {"tokenize", "x"}, {"run", "x"}, {"run", "there"}};
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        const char *name = commands[i][0], *text = commands[i][1];
        struct prog_result r;
        if (text == NULL)
            r = RUN(NULL, name, file);
        else if (strcmp(text, "there") == 0)
            r = RUN(NULL, name, socket_opt, "-m", file, text);
        else
            r = RUN(NULL, name, "-m", file, text);
        snprintf(want, sizeof want, "%s: ", file);
        const char *once = strstr(r.err, want);
        if (once == NULL || strstr(once + 1, want) != NULL)
            fail_msg("%s does not name %s once: %s", name, file, r.err);
        prog_check(name, &r, 1, NULL, NULL);
    }
    assert_int_equal(unlink(file), 0);
}

/* A full disk behind standard output is a failure, whatever the command. */
static void what_cannot_be_written_is_said(void **state)
{
    (void)state;
    static const char *const commands[] = {"\"$0\" help > /dev/full",
                                           "\"$0\" --version > /dev/full",
                                           "\"$0\" inspect \"$1\" > /dev/full",
                                           "\"$0\" tokenize -m \"$1\" tide > /dev/full",
                                           "\"$0\" ls \"$2\" > /dev/full",
                                           "\"$0\" run --raw -N 300 \"$2\" tide > /dev/full",
                                           "\"$0\" run --json -N 3 \"$2\" tide > /dev/full"};
    for (size_t i = 0; i < sizeof(commands) / sizeof(*commands); i++) {
        const char *argv[] = {"/bin/sh", "-c", commands[i], COMMAND, MODEL, socket_opt, NULL};
        struct prog_result r = prog_run(argv, home.env, NULL);
        prog_check(commands[i], &r, 1, NULL, "could not be written");
    }
}

/* Every command of the table stands in the manual. */
static void manual_names_every_command(void **state)
{
    (void)state;
    static char page[32768];
    FILE *f = fopen(TEST_VECTORS "/../../docs/man/backcast.1", "r");
    struct prog_result r = RUN(NULL, "help");
    int n = 0;

    assert_non_null(f);
    page[fread(page, 1, sizeof(page) - 1, f)] = '\0';
    fclose(f);
    for (char *line = strtok(r.out, "\n"); line != NULL; line = strtok(NULL, "\n")) {
        char name[16];
        if (strncmp(line, "  ", 2) != 0 || sscanf(line, " %15[a-z]", name) != 1 ||
            strcmp(name, "help") == 0)
            continue;
        n++;
        if (strstr(page, name) == NULL)
            fail_msg("%s is not in the manual", name);
    }
    assert_true(n >= 16); /* the help has them all */
    prog_free(&r);
}

static void models_and_vocabularies_need_no_daemon(void **state)
{
    (void)state;
    struct prog_result r;

    CHECK(0, "llama.block_count", NULL, "inspect", MODEL);
    CHECK(0, "token_embd.weight", NULL, "inspect", "--tensors", MODEL);
    CHECK_JSON("inspect", "--json", MODEL);
    CHECK_JSON("tokenize", "-m", MODEL, "The mill");
    CHECK_JSON("tokenize", "-m", MODEL, "--json", "--pieces", "The \"mill\"\n\xff");
    r = RUN("tide\n", "tokenize", "-m", MODEL);
    struct prog_result back = RUN(r.out, "detokenize", "-m", MODEL);
    assert_string_equal(back.out, "tide\n");
    prog_free(&back);
    prog_free(&r);
    CHECK(1, NULL, "past the vocabulary", "detokenize", "-m", MODEL, "999999");
    CHECK(2, NULL, "no token id", "detokenize", "-m", MODEL, "12", "x");
    r = RUN("12 x", "detokenize", "-m", MODEL); /* no mistake of the command line's */
    prog_check("detokenize", &r, 1, NULL, "no token id");
    CHECK(0, NULL, "backcast pull", "models");
    CHECK(0, "tiny-llama.gguf", "installed", "pull", MODEL);
    CHECK(1, NULL, "is there already", "pull", MODEL);
    CHECK(0, "tiny-llama.gguf", NULL, "pull", "--force", "--link", MODEL);
    CHECK(0, "llama", NULL, "models");
    CHECK_JSON("models", "--json");
    CHECK(0, "keys", NULL, "inspect", "tiny-llama"); /* by its name now */
    r = RUN(NULL, "doctor", "--json", "-m", MODEL, socket_opt);
    assert_true(json_valid(r.out, true));
    assert_non_null(strstr(r.out, "\"check\":\"kernel\",\"verdict\":\"ok\""));
    assert_non_null(strstr(r.out, "\"check\":\"daemon\",\"verdict\":\"ok\""));
    prog_free(&r);
}

static void listings_and_calls_by_name(void **state)
{
    (void)state;
    struct prog_result r;

    r = RUN("oak and water\n/stat\n/forgotten\n/budget 90t\n/nonsense\n/help\n", "chat", socket_opt,
            "--raw", "--name", "work", "--budget", "64t", "-N", "100", "--ignore-end");
    assert_non_null(strstr(r.err, "there is no /nonsense"));
    assert_non_null(strstr(r.err, "/forgotten"));
    assert_non_null(strstr(r.err, "tokens are forgotten"));
    prog_check("chat", &r, 0, "of 64 tokens cached", "budget 90 tokens");
    CHECK(0, "work", NULL, "ls", socket_opt);
    CHECK(0, "counter_causal_fast", NULL, "stat", socket_opt, "work");
    CHECK(0, "weights", NULL, "stat", socket_opt);
    CHECK_JSON("ls", "--json", socket_opt);
    CHECK_JSON("stat", "--json", socket_opt);
    CHECK_JSON("stat", "--json", socket_opt, "work");
    CHECK_JSON("top", "--json", "-c", "2", "-i", "10", socket_opt);
    CHECK(0, "work", NULL, "top", "-c", "1", socket_opt);
    CHECK(0, "position", "counter-causal", "scores", socket_opt, "work");
    CHECK_JSON("scores", "--json", socket_opt, "work");
    CHECK(0, "[-", "dropped, policy counter_causal_fast", "map", socket_opt, "work");
    CHECK_JSON("map", "--json", socket_opt, "work");
    CHECK(0, "<del title=", NULL, "map", "--html", "-", socket_opt, "work");
    CHECK(1, NULL, "/nonexistent/page", "map", "--html", "/nonexistent/page", socket_opt, "work");
    CHECK(1, NULL, "name or number 'play'", "map", socket_opt, "play");
    CHECK(0, "40 tokens cached", NULL, "prune", socket_opt, "work", "-k", "40");
    CHECK_JSON("prune", "--json", socket_opt, "work", "-k", "35");
    CHECK(0, "budget 200", NULL, "budget", socket_opt, "work", "200t");
    CHECK_JSON("budget", "--json", socket_opt, "work", "16MiB");
    CHECK(1, NULL, "budget_bytes", "budget", socket_opt, "work", "10");
    CHECK(1, NULL, "name or number 'play'", "prune", socket_opt, "play");
    CHECK(1, NULL, "77777", "prune", socket_opt, "77777");
    r = RUN("mill\n", "chat", socket_opt, "--raw", "--name", "work", "-N",
            "3"); /* taken up again */
    prog_check("chat again", &r, 0, NULL, "going on with work");
    CHECK(0, "is closed", NULL, "close", socket_opt, "work");
    CHECK(1, NULL, "work", "close", socket_opt, "work");
    CHECK(0, "ID", NULL, "ls", socket_opt);
}

static void run_gives_text_and_events(void **state)
{
    (void)state;
    char path[FOLDER_PATH + 8];
    struct prog_result r, s;

    CHECK_JSON("run", "--json", socket_opt, "--raw", "--budget", "48t", "-N", "80", "--n-logprobs",
               "2", "--prompt-logprobs", "--ignore-end", "the tide mill turns");
    r = RUN("the tide", "run", "-q", socket_opt, "--raw", "-N", "20", "--ignore-end");
    assert_int_equal(r.exit_code, 0);
    assert_int_equal(r.err_len, 0); /* quiet */
    s = RUN(NULL, "run", "-q", socket_opt, "--raw", "-N", "20", "--ignore-end", "the", "tide");
    assert_string_equal(r.out, s.out);
    prog_free(&s);
    snprintf(path, sizeof(path), "%s/text", home.dir);
    FILE *f = fopen(path, "w");
    fputs("the tide", f);
    fclose(f);
    s = RUN(NULL, "run", "-q", socket_opt, "--raw", "-N", "20", "--ignore-end", "-f", path);
    assert_string_equal(r.out, s.out);
    prog_free(&s);
    prog_free(&r);
    CHECK(2, NULL, "[policy]", "run", socket_opt, "--policy", "luck", "hello");
    CHECK(2, NULL, "[temperature]", "run", socket_opt, "--raw", "-t", "-1", "hello");
    CHECK(1, NULL, "policy none", "run", socket_opt, "--raw", "-p", "none", "-b", "20t", "-N", "90",
          "--ignore-end", "the tide mill");
}

/* ---- private daemons */

static bool process_gone(void *pid)
{
    return kill(*(pid_t *)pid, 0) < 0;
}

/* The private daemon of a command: its folder's name begins with the command's process id. */
static bool private_dir(pid_t command, char *buf, size_t len)
{
    char prefix[40];
    DIR *dir = opendir(home.dir);
    struct dirent *e;
    bool found = false;

    snprintf(prefix, sizeof(prefix), "backcast-%d-", (int)command);
    while (!found && (e = readdir(dir)) != NULL)
        if (strncmp(e->d_name, prefix, strlen(prefix)) == 0)
            found = snprintf(buf, len, "%s/%s", home.dir, e->d_name) < (int)len;
    closedir(dir);
    return found;
}

/* Child processes of a process, by /proc. */
static pid_t child_of(pid_t parent)
{
    char path[64], text[32] = "";
    snprintf(path, sizeof(path), "/proc/%d/task/%d/children", (int)parent, (int)parent);
    FILE *f = fopen(path, "r");
    if (f == NULL)
        return 0;
    if (fgets(text, sizeof(text), f) == NULL)
        text[0] = '\0';
    fclose(f);
    return (pid_t)strtol(text, NULL, 10);
}

static void private_daemon_answers_like_the_other(void **state)
{
    (void)state;
    char dir[200];
    struct stat st;
    struct prog_result r, s;

    r = RUN(NULL, "run", "-m", MODEL, "--raw", "-N", "20", "--ignore-end", "--threads", "1",
            "the tide");
    assert_int_equal(r.exit_code, 0);
    assert_non_null(strstr(r.err, "starting a private one"));
    s = RUN(NULL, "run", "-q", socket_opt, "--raw", "-N", "20", "--ignore-end", "the tide");
    assert_string_equal(r.out, s.out);
    prog_free(&r);
    prog_free(&s);
    r = RUN("hello\n", "chat", "-m", MODEL, "--raw", "-N", "5", "--threads", "1");
    prog_check("chat", &r, 0, NULL, "starting a private one");
    static const char *const wrong[][3] = {{"--threads", "lots", "threads = \"lots\""},
                                           {"--activations", "9", "activations = \"9\""},
                                           {"--kv-memory", "much", "kv_memory = \"much\""},
                                           {"--isa", "abacus", "unknown isa \"abacus\""}};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(*wrong); i++) {
        r = RUN(NULL, "run", "-m", MODEL, wrong[i][0], wrong[i][1], "hello");
        assert_non_null(strstr(r.err, "backcastd did not start: "));
        prog_check(wrong[i][0], &r, 2, NULL, wrong[i][2]);
    }

    const char *argv[] = {COMMAND,    "run",  "-m",           MODEL,       "--raw",
                          "-N",       "1000", "--ignore-end", "--threads", "1",
                          "--budget", "64t",  "the tide",     NULL};
    struct prog_child c = prog_start(argv, home.env, NULL);
    assert_true(prog_says(c.err, "forgot"));
    assert_true(private_dir(c.pid, dir, sizeof(dir)));
    assert_int_equal(stat(dir, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0700);
    r = prog_wait(&c);
    assert_int_equal(r.exit_code, 0);
    prog_free(&r);
    assert_int_equal(stat(dir, &st), -1); /* nothing is left */
}

/* A long answer by a private daemon of a model that has the room for it. */
static struct prog_child long_run(void)
{
    static char model[64];
    snprintf(model, sizeof(model), "%s/model.gguf", d->dir);
    const char *argv[] = {COMMAND,    "run",     "-m",           model,       "--raw",
                          "-N",       "1000000", "--ignore-end", "--threads", "1",
                          "--budget", "64t",     "the tide",     NULL};
    struct prog_child c = prog_start(argv, home.env, NULL);
    assert_true(prog_says(c.err, "forgot"));
    return c;
}

static void interrupt_cancels_and_is_130(void **state)
{
    (void)state;
    struct prog_child c = long_run();
    pid_t daemon = child_of(c.pid);

    assert_true(daemon > 0);
    kill(c.pid, SIGINT);
    struct prog_result r = prog_wait(&c);
    assert_int_equal(r.exit_code, 130);
    assert_non_null(strstr(r.err, "cancelled:"));
    prog_free(&r);
    assert_true(dh_until(process_gone, &daemon, DH_PATIENCE_MS));
}

static void killed_command_takes_its_daemon_along(void **state)
{
    (void)state;
    char dir[200];
    struct stat st;
    struct prog_child c = long_run();
    pid_t daemon = child_of(c.pid);

    assert_true(daemon > 0);
    assert_true(private_dir(c.pid, dir, sizeof(dir)));
    kill(c.pid, SIGKILL);
    struct prog_result r = prog_wait(&c);
    assert_int_equal(r.exit_code, 128 + SIGKILL);
    prog_free(&r);
    assert_true(dh_until(process_gone, &daemon, DH_PATIENCE_MS));
    /* the next one sweeps up */
    CHECK(0, NULL, NULL, "run", "-m", MODEL, "--raw", "-N", "1", "--threads", "1", "x");
    assert_int_equal(stat(dir, &st), -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(usage_is_2_and_failure_is_1),
        cmocka_unit_test(errors_name_the_model_file),
        cmocka_unit_test(what_cannot_be_written_is_said),
        cmocka_unit_test(manual_names_every_command),
        cmocka_unit_test(models_and_vocabularies_need_no_daemon),
        cmocka_unit_test(listings_and_calls_by_name),
        cmocka_unit_test(run_gives_text_and_events),
        cmocka_unit_test(private_daemon_answers_like_the_other),
        cmocka_unit_test(interrupt_cancels_and_is_130),
        cmocka_unit_test(killed_command_takes_its_daemon_along),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
