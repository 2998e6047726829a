/* test_cli_session.c: the command and sessions that were there before it: run prints its own answer,
 * options meet what the session has, chat goes on over a daemon that was killed; and what a script
 * sees: JSON on every line, streams that do not run into each other, mistakes before any waiting. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <signal.h>
#include <unistd.h>
#include "backcast.h"
#include "command.h"
#include "daemon_harness.h"
#include "folders_test.h"
#include "sanitized.h"

#define COMMAND TEST_BIN "/backcast"
#define MODEL TEST_VECTORS "/tiny-llama.gguf"

static struct dh *d;
static struct test_home home;
static char socket_opt[80], state_opt[FOLDER_PATH + 32];
static const char *const args[] = {state_opt, NULL};

static int start(void **state)
{
    (void)state;
    home_make(&home);
    setenv("XDG_DATA_HOME", home.dir, 1); /* the daemon's models folder, too */
    snprintf(state_opt, sizeof(state_opt), "--state-dir=%s/state", home.dir);
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

/* Two answers of one session: the second command prints the second alone, as a session that was
 * asked both in one conversation does. */
static void run_prints_its_own_answer(void **state)
{
    (void)state;
    struct prog_result one = RUN(NULL, "run", socket_opt, "-q", "--raw", "-N", "9", "--ignore-end",
                                 "--name", "own", "oak");
    struct prog_result two = RUN(NULL, "run", socket_opt, "-q", "--raw", "-N", "9", "--ignore-end",
                                 "--name", "own", "mill");
    struct prog_result both = RUN("oak\nmill\n", "chat", socket_opt, "-q", "--raw", "-N", "9",
                                  "--ignore-end", "--name", "both");
    char want[400];

    assert_int_equal(one.exit_code + two.exit_code + both.exit_code, 0);
    assert_true(one.out_len > 0 && two.out_len > 0);
    size_t n = one.out[one.out_len - 1] == '\n' ? one.out_len - 1 : one.out_len;
    snprintf(want, sizeof(want), "%.*s\n%s", (int)n, one.out, two.out);
    assert_true(strncmp(want, both.out, strlen(want)) == 0);
    prog_free(&one);
    prog_free(&two);
    prog_free(&both);
    struct prog_result json = RUN(NULL, "run", socket_opt, "--json", "--raw", "-N", "9",
                                  "--ignore-end", "--name", "own", "tide");
    assert_true(json_valid(json.out, true));
    assert_null(strstr(json.out, "replay"));
    char *end = strstr(json.out, "\"event\":\"end\"");
    assert_non_null(end);
    assert_null(strstr(end + 1, "\"event\":\"end\"")); /* one answer */
    prog_free(&json);
    json = RUN("tide\n", "chat", socket_opt, "--json", "--raw", "-N", "9", "--name", "own");
    assert_true(json_valid(json.out, true));
    assert_non_null(strstr(json.out, "\"replay\":true"));
    prog_free(&json);
}

/* Another client lowers the budget while the answer is made: its end tells the new one. */
static void an_end_tells_the_budget_of_then(void **state)
{
    (void)state;
    const char *argv[] = {COMMAND, "run",  socket_opt, "--raw", "-N",     "1000000", "--ignore-end",
                          "-b",    "300t", "--name",   "moved", "--json", "oak",     NULL};
    for (int json = 1; json >= 0; json--) {
        argv[11] = json ? "--json" : "--raw";
        struct prog_child c = prog_start(argv, home.env, NULL);
        assert_true(prog_says(json ? c.out : c.err, json ? "\"event\":\"pruned\"" : "forgot "));
        CHECK(0, "budget 200", NULL, "budget", socket_opt, "moved", "200t");
        assert_int_equal(kill(c.pid, SIGINT), 0);
        struct prog_result r = prog_wait(&c);
        if (json)
            assert_non_null(strstr(r.out, "\"reason\":\"cancelled\""));
        prog_check("Ctrl-C", &r, 130, json ? "\"budget_tokens\":200," : NULL,
                   json ? NULL : " of 200 cached");
        CHECK(0, "is closed", NULL, "close", socket_opt, "moved");
    }
}

static void options_meet_the_session(void **state)
{
    (void)state;
    CHECK(0, NULL, NULL, "run", socket_opt, "--raw", "-N", "3", "--name", "meet", "-b", "300t",
          "-p", "sliding_window", "oak");
    CHECK(0, NULL, "budget of 128 tokens now", "run", socket_opt, "--raw", "-N", "3", "--name",
          "meet", "-b", "128t", "-p", "sliding_window", "oak");
    CHECK(0, "budget 128", NULL, "stat", socket_opt, "meet");
    CHECK(0, NULL, "budget of 100 tokens now", "run", socket_opt, "--raw", "-N", "3", "--name",
          "meet", "-b", "100t", "-k", "60", "oak");
    CHECK(0, NULL, "budget of 100 tokens now, keep 50", "run", socket_opt, "--raw", "-N", "3",
          "--name", "meet", "-k", "50", "oak");
    CHECK(0, NULL, "budget of 128 tokens now", "run", socket_opt, "--raw", "-N", "3", "--name",
          "meet", "-b", "128t", "oak");
    CHECK(1, NULL, "other values: --policy none (it has sliding_window);", "run", socket_opt,
          "--raw", "-N", "3", "--name", "meet", "-p", "none", "oak");
    CHECK(1, NULL, "other values: --kv-type q8_0 (it has f16);", "run", socket_opt, "--raw", "-N",
          "3", "--name", "meet", "--kv-type", "q8_0", "oak");
    static const char *const same[][2] = {{"--span", "15"},        {"--span-quantile", "0.25"},
                                          {"--min-gap", "0"},      {"--score", "logit"},
                                          {"--trigger", "budget"}, {"--priority", "0"},
                                          {"--weight", "1"},       {"--kv-type", "f16"},
                                          {"--positions", "keep"}, {"--recent-tokens", "16"},
                                          {"--seed", "7"}};
    static const char *const other[][3] = {
        {"--span", "3", "--span 3 (it has 15)"},
        {"--span-quantile", "0.5", "--span-quantile 0.5 (it has 0.25)"},
        {"--min-gap", "2", "--min-gap 2 (it has 0)"},
        {"--score", "logprob", "--score logprob (it has logit)"},
        {"--trigger", "prefill_end", "--trigger prefill_end (it has budget)"},
        {"--priority", "5", "--priority 5 (it has 0)"},
        {"--weight", "3", "--weight 3 (it has 1)"},
        {"--positions", "rerotate", "--positions rerotate (it has keep)"},
        {"--recent-tokens", "5", "--recent-tokens 5 (it has 16)"},
        {"--model", "no-such", "--model no-such (it has model)"},
        {"--durable", NULL, "--durable (it is not)"}};
    for (size_t i = 0; i < sizeof same / sizeof *same; i += SANITIZED ? 3 : 1) {
        struct prog_result r = RUN(NULL, "run", socket_opt, "--raw", "-q", "-N", "1", "--name",
                                   "meet", "oak", same[i][0], same[i][1]);
        prog_check(same[i][0], &r, 0, NULL, NULL);
    }
    for (size_t i = 0; i < sizeof other / sizeof *other; i++) {
        struct prog_result r = RUN(NULL, "run", socket_opt, "--raw", "-q", "-N", "1", "--name",
                                   "meet", "oak", other[i][0], other[i][1]);
        prog_check(other[i][0], &r, 1, NULL, other[i][2]);
    }
    CHECK(0, NULL, "nothing is done with --ring-bytes", "run", socket_opt, "--raw", "-N", "3",
          "--name", "meet", "--ring-bytes", "131072", "oak");
    CHECK(0, NULL, NULL, "run", socket_opt, "--raw", "-q", "-N", "3", "--name", "lasts",
          "--durable", "oak");
    CHECK(0, NULL, NULL, "run", socket_opt, "--raw", "-q", "-N", "3", "--name", "lasts",
          "--durable", "oak"); /* it is */
    CHECK(0, "score logit, span 15, quantile 0.25, min gap 0, trigger budget", NULL, "stat",
          socket_opt, "meet");
    CHECK(0, "\"score\":\"logit\",\"span\":15,\"span_quantile\":0.25,", NULL, "stat", "--json",
          socket_opt, "meet");
    CHECK(0, "is closed", NULL, "close", socket_opt, "lasts");
    CHECK(0, "nothing to prune", NULL, "prune", socket_opt, "meet");
    CHECK(1, NULL, "budget", "run", socket_opt, "--raw", "--name", "meet", "-b", "10", "oak");
    CHECK(2, NULL, "budget_tokens 1: must be at least 2", "run", socket_opt, "-b", "1t", "oak");
    CHECK(2, NULL, "budget_tokens 1: must be at least 2", "budget", socket_opt, "meet", "1t");
}

/* A number beyond what its option takes is told the range, whichever way it is beyond. */
static void numbers_are_told_their_range(void **state)
{
    (void)state;
    static const char *const bad[][3] = {
        {"-N", "99999999999", "a whole number, 0 to 16777216, and no more than its daemon"},
        {"-N", "5000000000", "limit: 1048576"},
        {"-N", "4294967295", "limit: 1048576"},
        {"-N", "-1", "0 to 16777216"},
        {"-N", "18446744073709551617", "0 to 16777216"},
        {"--weight", "0", "--weight: '0' is not a whole number, 1 to 1000"},
        {"--weight", "1001", "1 to 1000"},
        {"--priority", "-101", "-100 to 100"},
        {"--priority", "99999999999", "-100 to 100"},
        {"--n-logprobs", "21", "-1 to 20"},
        {"--top-k", "4294967295", "0 to 4294967294"},
        {"--recent-tokens", "16777217", "0 to 16777216, or auto"},
        {"--seed", "18446744073709551616", "0 to 18446744073709551615"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct prog_result r = RUN(NULL, "run", socket_opt, bad[i][0], bad[i][1], "oak");
        prog_check(bad[i][1], &r, 2, NULL, bad[i][2]);
    }
    CHECK(2, NULL, "1048576", "run", socket_opt, "-N", "1048577", "oak"); /* the daemon's own */
    CHECK(0, NULL, NULL, "run", socket_opt, "-q", "--raw", "-N", "1", "--weight", "1000",
          "--priority", "-100", "--recent-tokens", "auto", "oak");
}

/* The value of a key in one line of JSON, as it stands there. */
static void json_value(const char *text, const char *key, char *ret, size_t size)
{
    const char *at = strstr(text, key);
    assert_non_null(at);
    at += strlen(key) + 1; /* the colon */
    snprintf(ret, size, "%.*s", (int)strcspn(at, ",}"), at);
}

/* The system message is the first or none: where the session has others, nothing is sent or dropped without a word. */
static void a_system_message_is_the_first(void **state)
{
    (void)state;
    CHECK(0, NULL, NULL, "chat", socket_opt, "-q", "-n", "bare"); /* no message yet */
    CHECK(0, NULL, NULL, "chat", socket_opt, "-q", "-n", "bare", "--system", "be short");
    char before[32], after[32];
    struct prog_result r = RUN(NULL, "stat", "--json", socket_opt, "bare");
    json_value(r.out, "\"tokens_in\"", before, sizeof before);
    assert_string_not_equal(before, "0"); /* it was sent */
    prog_free(&r);
    static const char *const commands[] = {"run", "chat"};
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        r = RUN("oak\n", commands[i], socket_opt, "-N", "3", "-n", "bare", "--system", "be long");
        assert_string_equal(r.out, "");
        prog_check(commands[i], &r, 1, NULL,
                   "session bare is there already and has messages, and --system goes before");
    }
    r = RUN(NULL, "stat", "--json", socket_opt, "bare");
    json_value(r.out, "\"tokens_in\"", after, sizeof after);
    assert_string_equal(before, after); /* nothing was */
    prog_free(&r);
    CHECK(0, NULL, NULL, "run", socket_opt, "-q", "-N", "3", "-n", "bare", "oak");
    CHECK(0, "is closed", NULL, "close", socket_opt, "bare");
}

/* The same inside of chat, where what is taken is told, too. */
static void a_system_message_is_confirmed_or_refused(void **state)
{
    (void)state;
    const char *taken = "the session has this system message\n", *late = "before the first message";
    struct prog_result r = RUN("/system be short\noak\n", "chat", socket_opt, "-q", "-N", "3");
    assert_null(strstr(r.err, late));
    prog_check("first", &r, 0, NULL, taken);
    r = RUN("/system be short\n/system be long\n", "chat", socket_opt, "-q", "-N", "3");
    assert_non_null(strstr(r.err, taken));
    prog_check("second", &r, 0, NULL, late);
    r = RUN("oak\n/system be short\n", "chat", socket_opt, "-q", "-N", "3");
    assert_null(strstr(r.err, taken));
    prog_check("after a message", &r, 0, NULL, late);
    r = RUN("/system be short\n", "chat", socket_opt, "-q", "--raw");
    prog_check("raw", &r, 0, NULL, "/system: --raw has no system message");
    r = RUN("/system be short\n", "chat", socket_opt, "-q", "--json");
    assert_true(json_valid(r.out, true));
    prog_check("json", &r, 0, "{\"command\":\"system\",\"text\":\"be short\"}", NULL);
}

static void chat_is_json_on_every_line(void **state)
{
    (void)state;
    struct prog_result r =
        RUN("oak and water\n/stat\n/forgotten\n/budget 90t\n/budget\n/help\n/prune 40\n/prune\n"
            "/save kept\n/scores\n",
            "chat", socket_opt, "--json", "--raw", "--name", "lines", "--budget", "64t", "-N",
            "100", "--ignore-end");
    assert_int_equal(r.exit_code, 0);
    assert_true(json_valid(r.out, true));
    static const char *const has[] = {"\"kv_type\"",           "\"command\":\"forgotten\"",
                                      "\"budget_tokens\":90",  "\"command\":\"help\"",
                                      "\"command\":\"prune\"", "\"saved\":\"kept\"",
                                      "\"position\""};
    for (size_t i = 0; i < sizeof(has) / sizeof(*has); i++)
        if (strstr(r.out, has[i]) == NULL)
            fail_msg("no %s in %s", has[i], r.out);
    assert_string_equal(r.err, ""); /* nothing is said elsewhere */
    prog_free(&r);
    r = RUN("/prune\n/prune x\n", "chat", socket_opt, "--raw", "--name", "lines");
    assert_non_null(strstr(r.err, "not a number"));
    prog_check("chat", &r, 0, NULL, "nothing to prune");
    CHECK(2, NULL, "no option -f", "chat", socket_opt, "-f", MODEL);
}

static void a_pipe_comes_before_the_arguments(void **state)
{
    (void)state;
    struct prog_result r, s;
    r = RUN("the report\n", "run", "-q", socket_opt, "--raw", "-N", "9", "--ignore-end", "in",
            "short");
    s = RUN(NULL, "run", "-q", socket_opt, "--raw", "-N", "9", "--ignore-end",
            "the report\n\nin short");
    assert_int_equal(r.exit_code, 0);
    assert_string_equal(r.out, s.out);
    prog_free(&r);
    prog_free(&s);
    r = RUN("", "run", "-q", socket_opt, "--raw", "-N", "9", "--ignore-end", "in short");
    s = RUN(NULL, "run", "-q", socket_opt, "--raw", "-N", "9", "--ignore-end", "in short");
    assert_string_equal(r.out, s.out);
    prog_free(&r);
    prog_free(&s);
}

/* Both streams into one file: the figures begin a line of their own. */
static void streams_in_one_place_do_not_mix(void **state)
{
    (void)state;
    char line[600];
    snprintf(line, sizeof(line), "%s run %s --raw -N 200 --ignore-end -b 64t oak 2>&1", COMMAND,
             socket_opt);
    struct prog_result r = prog_run((const char *[]){"/bin/sh", "-c", line, NULL}, home.env, NULL);
    assert_int_equal(r.exit_code, 0);
    assert_non_null(strstr(r.out, "\nforgot "));
    assert_non_null(strstr(r.out, "\nlength: "));
    prog_free(&r);
}

/* A daemon that listens has been told already how it is to compute, and how much it may hold. */
static void a_daemon_that_listens_keeps_its_settings(void **state)
{
    (void)state;
    static const char *const its[][2] = {{"--activations", "16"},
                                         {"--isa", "avx2"},
                                         {"--kv-memory", "64MiB"},
                                         {"--threads", "1"}};
    char want[80];
    for (size_t i = 0; i < sizeof its / sizeof *its; i++) {
        struct prog_result r = RUN(NULL, "run", socket_opt, its[i][0], its[i][1], "oak");
        assert_string_equal(r.out, "");
        snprintf(want, sizeof want, ", and %s is for a private one: leave it out", its[i][0]);
        prog_check(its[i][0], &r, 1, NULL, want);
    }
    struct prog_result r = RUN("oak\n", "chat", socket_opt, "--threads", "1", "--isa", "avx2");
    prog_check("chat", &r, 1, NULL, ", and --threads, --isa are for a private one: leave them out");
    CHECK(0, NULL, NULL, "run", socket_opt, "--no-start", "--raw", "-N", "1", "oak");
}

/* Nothing is started for a command that cannot work. */
static void mistakes_come_before_the_private_daemon(void **state)
{
    (void)state;
    static const char *const bad[][3] = {{"--span", "4", "odd"},
                                         {"--policy", "luck", "known are"},
                                         {"-t", "-1", "0 to 100"},
                                         {"--durable", "--raw", "needs --name"},
                                         {"--kv-type", "f8", "known are"}};
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        struct prog_result r = RUN(NULL, "run", "-m", MODEL, bad[i][0], bad[i][1], "hello");
        assert_null(strstr(r.err, "starting"));
        prog_check(bad[i][0], &r, 2, NULL, bad[i][2]);
    }
    CHECK(1, NULL, "needs a running backcastd", "run", "-m", MODEL, "--durable", "--name=x", "oak");
    CHECK(2, NULL, "prompt is empty", "run", "-m", MODEL, "");
    CHECK(2, NULL, "prompt is empty", "run", "-m", MODEL);
    CHECK(2, NULL, "'0' is not a whole number, 1 to 4294967294", "top", socket_opt, "-c", "0");
}

/* A value that its option cannot have is usage, whoever finds it: the command, a daemon that listens, or the private one
 * that does not start. What another daemon, or another day, would take is not. */
static void a_mistake_ends_alike_whoever_finds_it(void **state)
{
    (void)state;
    static const char *const bad[][2] = {
        {"--span", "4"},
        {"--policy", "luck"},
        {"--temperature", "-1"},
        {"--kv-type", "f8"},
        {"--top-p", "2"},
        {"--chat-template", "x"},
        {"--positions", "never"},
        {"--trigger", "never"},
        {"--n-logprobs", "99"},
        {"--weight", "5000"},
        {"--name", "a b"},
        {"--ring-bytes", "1000"},
        {"--keep-tokens", "999999"},
    };
    char path[200];
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++)
        for (int listens = 0; listens < 2; listens++) {
            struct prog_result r =
                listens ? RUN(NULL, "run", socket_opt, "-b", "100t", bad[i][0], bad[i][1], "oak")
                        : RUN(NULL, "run", "-m", MODEL, "-b", "100t", bad[i][0], bad[i][1], "oak");
            prog_check(bad[i][0], &r, 2, NULL, NULL);
        }
    CHECK(2, NULL, "--threads: threads = \"two\"", "run", "-m", MODEL, "--threads", "two", "oak");
    CHECK(2, NULL, "--kv-memory: kv_memory = \"1\"", "bench", "-m", MODEL, "--kv-memory", "1");
    CHECK(2, NULL, "[name]", "restore", socket_opt, "a b");
    CHECK(2, NULL, "[name]", "unsave", socket_opt, "a/b");
    snprintf(path, sizeof path, "/tmp/%0150d", 7);
    CHECK(2, NULL, "longer than", "ls", "--socket", path);
    CHECK(1, NULL, "[name]", "restore", socket_opt, "no.such");
    CHECK(1, NULL, "[model]", "run", socket_opt, "-m", "no.such", "oak");
    CHECK(1, NULL, "kv_memory holds", "run", socket_opt, "-b", "900GiB", "oak");
}

/* The number of the session that has a name. */
static void number_of(const char *name, char *ret, size_t size)
{
    struct prog_result r = RUN(NULL, "stat", "--json", socket_opt, name);
    json_value(r.out, "\"session\"", ret, size);
    prog_free(&r);
}

/* A session called "first", and one whose name is the number of that. */
static void first_and_its_number(char *ret_id, char *ret_hashed, size_t size)
{
    CHECK(0, NULL, NULL, "run", socket_opt, "--raw", "-q", "-N", "3", "--name", "first", "oak");
    number_of("first", ret_id, size);
    snprintf(ret_hashed, size, "#%.20s", ret_id);
    CHECK(0, NULL, NULL, "run", socket_opt, "--raw", "-q", "-N", "3", "--name", ret_id, "mill");
}

/* A name of digits is a name, also where another session has that number; with a # in front it is the number. */
static void a_name_of_digits_is_a_name(void **state)
{
    (void)state;
    char id[32], number[32];
    first_and_its_number(id, number, sizeof id);
    CHECK(0, "is closed", NULL, "close", socket_opt, id);
    CHECK(0, "first", NULL, "stat", socket_opt, id); /* the name is free: the number again */
    CHECK(0, "is closed", NULL, "close", socket_opt, number);
    CHECK(1, NULL, "first", "stat", socket_opt, "first");
    CHECK(1, NULL, "#x", "close", socket_opt, "#x");
}

/* Whatever is done with a session, it is found in one way: by name, then by number; #N is the number. */
static void every_command_finds_a_session_in_one_way(void **state)
{
    (void)state;
    char id[32], number[32], named[32], want[2][64];
    static const char *const does[][3] = {
        {"stat", NULL, NULL},    {"prune", NULL, NULL}, {"budget", "80t", NULL},
        {"save", "found", NULL}, {"close", NULL, NULL},
    };
    struct prog_result r;
    first_and_its_number(id, number, sizeof id);
    number_of(id, named, sizeof named);
    assert_string_not_equal(id, named);
    for (size_t i = 0; i < sizeof does / sizeof *does; i++) {
        bool stat = strcmp(does[i][0], "stat") == 0;
        snprintf(want[0], sizeof want[0], "session%s%s", stat ? "        " : " ", named);
        snprintf(want[1], sizeof want[1], "session%s%s", stat ? "        " : " ", id);
        for (int k = 0; k < 2; k++) {
            r = RUN(NULL, does[i][0], socket_opt, k == 0 ? id : number, does[i][1]);
            prog_check(does[i][0], &r, 0, want[k], NULL);
        }
    }
    CHECK(0, "is gone", NULL, "unsave", socket_opt, "found");
    static const char *const all[][2] = {{"stat", NULL}, {"prune", NULL}, {"budget", "80t"},
                                         {"save", "x"},  {"close", NULL}, {"fork", "x"},
                                         {"map", NULL},  {"scores", NULL}};
    static const char *const none[] = {"no.such", "#77777", "77777"};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        for (size_t k = 0; k < sizeof none / sizeof *none; k++) {
            if (SANITIZED && k != i % 3)
                continue;
            r = RUN(NULL, all[i][0], socket_opt, none[k], all[i][1]);
            snprintf(want[0], sizeof want[0], "backcast: no session has the name or number '%s'",
                     none[k]);
            prog_check(all[i][0], &r, 1, NULL, want[0]);
        }
        r = RUN(NULL, "help", all[i][0]);
        prog_check(all[i][0], &r, 0, "'#12' is always the number", NULL);
    }
}

/* A speed is of the passes that the time was taken by: the first token comes with the prompt's last one. */
static void a_speed_is_of_what_was_timed(void **state)
{
    (void)state;
    CHECK(0, NULL, ", 1 out, ", "run", socket_opt, "--raw", "-N", "1", "--ignore-end", "oak");
    CHECK(0, NULL, ", 2 out (", "run", socket_opt, "--raw", "-N", "2", "--ignore-end", "oak");
}

static void figures_have_one_name_and_one_value(void **state)
{
    (void)state;
    static const char *const keys[] = {"\"version\"", "\"bytes_rings\""};
    char a[64], b[64];
    backcast *c = NULL;
    assert_int_equal(backcast_connect(&c, d->socket), 0);
    struct prog_result s = RUN(NULL, "stat", "--json", socket_opt);
    struct prog_result t = RUN(NULL, "top", "--json", "-c", "1", socket_opt);
    for (size_t i = 0; i < 2; i++) {
        json_value(s.out, keys[i], a, sizeof(a));
        json_value(t.out, keys[i], b, sizeof(b));
        assert_string_equal(a, b);
    }
    prog_free(&s);
    prog_free(&t);
    backcast_disconnect(&c);
    CHECK(0, "\"value\":\"llama\"", NULL, "inspect", "--json", MODEL);
    CHECK(0, "\"key\":\"llama.block_count\",\"type\":\"u32\",\"value\":4", NULL, "inspect",
          "--json", MODEL);
}

static void a_model_has_one_name(void **state)
{
    (void)state;
    CHECK(0, "tiny-llama", "installed", "pull", MODEL);
    CHECK(0, "tiny-llama ", NULL, "models");
    CHECK(0, NULL, NULL, "run", socket_opt, "--raw", "-N", "1", "-m", "tiny-llama", "-n", "m1",
          "x");
    CHECK(0, NULL, NULL, "run", socket_opt, "--raw", "-N", "1", "-m", "tiny-llama.gguf", "-n", "m2",
          "x");
    CHECK(0, "model          tiny-llama\n", NULL, "stat", socket_opt, "m1");
    CHECK(0, "model          tiny-llama\n", NULL, "stat", socket_opt, "m2");
    CHECK(1, NULL, "models of this daemon: ", "run", socket_opt, "-m", "nosuch", "x");
    CHECK(0, "tiny-llama, /", NULL, "doctor", "-m", "tiny-llama", socket_opt);
}

/* Another client closes the session: the messages that follow are not sent, one after the other, to nobody. */
static void chat_ends_with_its_session(void **state)
{
    (void)state;
    const char *argv[] = {COMMAND, "chat",    socket_opt,     "--name", "ends", "--raw",
                          "-N",    "1000000", "--ignore-end", "-b",     "128t", NULL};
    struct prog_child c = prog_start(argv, home.env, "oak\nmill\ntide\n");
    assert_true(prog_says(c.err, "forgot "));
    CHECK(0, "is closed", NULL, "close", socket_opt, "ends");
    struct prog_result r = prog_wait(&c);
    const char *refused = strstr(r.err, "backcast: prompt: ");
    assert_true(refused == NULL || strstr(refused + 1, "backcast: prompt: ") == NULL);
    if (strstr(r.err, "ended early: cancelled: not by this command") ==
        NULL) /* no room for the END */
        assert_non_null(strstr(r.err, "broke off: the daemon has closed the session"));
    prog_check("chat", &r, 1, NULL, NULL);
}

/* So long that the daemon ends in the middle of it. */
#define LONG_ANSWER (SANITIZED ? "6000" : "20000")

/* The daemon ends in the middle of an answer: the chat waits for the next one and shows the rest. */
static void chat_goes_on_over(int signum)
{
    char model[80], whole[40];
    snprintf(model, sizeof(model), "%s/model.gguf", d->dir);
    snprintf(whole, sizeof whole, "\"tokens_out\":%s", LONG_ANSWER);
    const char *argv[] = {COMMAND,  "chat", socket_opt,  "--durable",    "--name", "over", "--raw",
                          "--json", "-N",   LONG_ANSWER, "--ignore-end", "-b",     "128t", NULL};
    struct prog_child c = prog_start(argv, home.env, "oak\n");
    assert_true(prog_says(c.out, "\"event\":\"pruned\""));
    assert_int_equal(kill(d->pid, signum), 0);
    dh_wait(d, DH_PATIENCE_MS);
    assert_true(prog_says(c.err, "the daemon has gone"));
    dh_again(d, model, args);
    dh_ready(d);
    struct prog_result r = prog_wait(&c);
    if (r.exit_code != 0)
        fail_msg("exit %d: %s", r.exit_code, r.err);
    assert_non_null(strstr(r.err, "over goes on"));
    assert_non_null(strstr(r.out, whole));
    prog_free(&r);
    CHECK(0, "is closed", NULL, "close", socket_opt, "over");
}

static void chat_goes_on_over_a_kill(void **state)
{
    (void)state;
    chat_goes_on_over(SIGKILL);
}

/* ... and the next one evaluates nothing again: the stop has written the cache. */
static void chat_goes_on_over_a_stop(void **state)
{
    (void)state;
    chat_goes_on_over(SIGTERM);
    assert_true(dh_log_has(d, "caches that went to their snapshots: "));
    assert_true(dh_log_has(d, "(over): 0 tokens done again"));
}

/* A run does not wait, but says what becomes of its answer; figures that nobody has told are not printed. */
static void run_tells_that_the_answer_goes_on(void **state)
{
    (void)state;
    char model[80];
    snprintf(model, sizeof(model), "%s/model.gguf", d->dir);
    const char *argv[] = {COMMAND, "run",   socket_opt, "--durable", "--name",
                          "later", "--raw", "-N",       "1000000",   "--ignore-end",
                          "-b",    "128t",  "oak",      NULL};
    struct prog_child c = prog_start(argv, home.env, NULL);
    assert_true(prog_says(c.err, "forgot "));
    assert_int_equal(kill(d->pid, SIGTERM), 0);
    dh_wait(d, DH_PATIENCE_MS);
    dh_again(d, model, args);
    dh_ready(d);
    struct prog_result r = prog_wait(&c);
    assert_null(strstr(r.err, " cached"));
    prog_check(
        "run", &r, 1, NULL,
        "broke off: the daemon has closed the session\nbackcast: the daemon has gone: the next "
        "one goes on with the answer (`backcast chat --name later` shows it)\n");
    const char *chat[] = {COMMAND, "chat", socket_opt, "--json", "--name", "later", NULL};
    c = prog_start(chat, home.env, "");
    assert_true(prog_says(c.out, "\"event\":\"pruned\"")); /* it is under way */
    assert_int_equal(kill(c.pid, SIGINT), 0);
    r = prog_wait(&c);
    prog_check("chat", &r, 130, "\"reason\":\"cancelled\"", "going on with later");
    CHECK(0, "is closed", NULL, "close", socket_opt, "later");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(run_prints_its_own_answer),
        cmocka_unit_test(an_end_tells_the_budget_of_then),
        cmocka_unit_test(options_meet_the_session),
        cmocka_unit_test(numbers_are_told_their_range),
        cmocka_unit_test(a_system_message_is_the_first),
        cmocka_unit_test(a_system_message_is_confirmed_or_refused),
        cmocka_unit_test(chat_is_json_on_every_line),
        cmocka_unit_test(a_pipe_comes_before_the_arguments),
        cmocka_unit_test(streams_in_one_place_do_not_mix),
        cmocka_unit_test(a_daemon_that_listens_keeps_its_settings),
        cmocka_unit_test(mistakes_come_before_the_private_daemon),
        cmocka_unit_test(a_mistake_ends_alike_whoever_finds_it),
        cmocka_unit_test(a_name_of_digits_is_a_name),
        cmocka_unit_test(every_command_finds_a_session_in_one_way),
        cmocka_unit_test(a_speed_is_of_what_was_timed),
        cmocka_unit_test(figures_have_one_name_and_one_value),
        cmocka_unit_test(a_model_has_one_name),
        cmocka_unit_test(chat_ends_with_its_session),
        cmocka_unit_test(chat_goes_on_over_a_kill),
        cmocka_unit_test(chat_goes_on_over_a_stop),
        cmocka_unit_test(run_tells_that_the_answer_goes_on),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
