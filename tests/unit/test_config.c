/* Configuration: every type of value, every way to be wrong (the error names file, line and the key
 * that was meant), files that read back, and what a reload may change. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>
#include "config.h"
#include "daemon.h"
#include "params.h"

#define GIB (1ull << 30)

static char path[] = "/tmp/backcast-config-XXXXXX";

static void write_file(const char *text)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static int read_args(struct config *c, struct config_command *cmd, struct err *e, int n, ...)
{
    char *argv[12] = {(char *)"backcastd"};
    va_list ap;
    va_start(ap, n);
    for (int i = 0; i < n; i++)
        argv[1 + i] = va_arg(ap, char *);
    va_end(ap);
    return config_read(c, n + 1, argv, 8 * GIB, cmd, e);
}

static void defaults_are_the_tables(void **state)
{
    (void)state;
    struct config c;
    struct config_command cmd;
    struct err e;
    assert_int_equal(read_args(&c, &cmd, &e, 1, "--no-config"), BC_OK);
    assert_int_equal(cmd.action, CONFIG_RUN);
    assert_int_equal(cmd.parent_fd, -1);
    assert_int_equal(c.daemon_socket_mode, 0660);
    assert_true(c.memory_kv_memory.bytes == 4 * GIB);
    assert_true(c.session_budget.bytes == 64u << 20);
    assert_string_equal(c.session_policy, "counter_causal_fast");
    assert_true(c.session_frozen == CONFIG_AUTO && c.session_recent == CONFIG_AUTO);
    assert_true(c.session_span_quantile == 0.25);
    assert_int_equal(c.limits_frames_per_second, 2000);
    config_free(&c);
}

static void file_then_command_line(void **state)
{
    (void)state;
    struct config c;
    struct config_command cmd;
    struct err e;
    write_file("# a comment\n[daemon]\nsocket = /run/x.sock\nthreads=3\n\n[memory]\n"
               "kv_memory = 1.5 GiB ; inline\n[session]\nbudget = 2048t\nspan-quantile = 0.5\n"
               "frozen = 12\n[limits]\nsessions = 9\n"
               "[model.small]\npath = /m/s.gguf\nchat_template = chatml\n"
               "[model.other.v2]\npath=/m/o.gguf\n");
    assert_int_equal(read_args(&c, &cmd, &e, 6, "--config", path, "--threads=7",
                               "--limits.sessions", "11", "--model.third.path=/t.gguf"),
                     BC_OK);
    assert_string_equal(c.daemon_socket, "/run/x.sock");
    assert_int_equal(c.daemon_threads, 7);
    assert_int_equal(c.limits_sessions, 11);
    assert_true(c.memory_kv_memory.bytes == GIB + GIB / 2 && c.memory_kv_memory.percent == 0);
    assert_true(c.session_budget.bytes == 0 && c.session_budget.tokens == 2048);
    assert_true(c.session_span_quantile == 0.5);
    assert_int_equal(c.session_frozen, 12);
    assert_int_equal(c.n_models, 3);
    assert_string_equal(c.models[0].name, "small");
    assert_string_equal(c.models[0].chat_template, "chatml");
    assert_string_equal(c.models[1].name, "other.v2");
    assert_string_equal(c.models[2].path, "/t.gguf");
    config_free(&c);
}

/* The whole configuration as a file gives the same configuration. */
static void printed_config_reads_back(void **state)
{
    (void)state;
    struct config a, b;
    struct config_command cmd;
    struct err e;
    struct config_change changes[64];
    assert_int_equal(read_args(&a, &cmd, &e, 7, "--no-config", "--budget=100t", "--kv-memory=25%",
                               "--log", "evict.*:trace,info", "--socket-mode=0600",
                               "--model.a.path=/a.gguf"),
                     BC_OK);
    FILE *f = fopen(path, "w");
    config_print(&a, f);
    fclose(f);
    if (read_args(&b, &cmd, &e, 2, "--config", path) < 0)
        fail_msg("%s", e.text);
    assert_int_equal(config_compare(&a, &b, changes, 64), 0);
    assert_int_equal(b.n_models, 1);
    assert_true(b.memory_kv_memory.percent == 25);
    config_free(&a);
    config_free(&b);
    /* and it mentions every parameter with its sentence */
    char *text = calloc(1, 65536);
    f = fopen(path, "r");
    assert_true(fread(text, 1, 65535, f) > 2000);
    fclose(f);
    for (size_t i = 0; param_at(i) != NULL; i++)
        assert_non_null(strstr(text, param_at(i)->text));
    free(text);
}

static void times_have_units(void **state)
{
    (void)state;
    static const struct {
        const char *text, *printed;
        uint64_t seconds;
    } rows[] = {{"90", "90s", 90},      {"90s", "90s", 90},        {"600", "10min", 600},
                {"3h", "3h", 10800},    {"48h", "2d", 172800},     {"0", "0", 0},
                {"7 min", "7min", 420}, {"86399", "86399s", 86399}};
    struct config c;
    struct config_command cmd;
    struct err e;
    char printed[64];
    const struct param *p = param_find("memory", "spill_after");
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        assert_int_equal(read_args(&c, &cmd, &e, 3, "--no-config", "--spill-after", rows[i].text),
                         BC_OK);
        assert_int_equal(c.memory_spill_after, rows[i].seconds);
        param_format(&c, p, printed, sizeof printed);
        assert_string_equal(printed, rows[i].printed);
        config_free(&c);
    }
}

static void bad_file(const char *text, int code, const char *a, const char *b)
{
    struct config c;
    struct config_command cmd;
    struct err e;
    write_file(text);
    int rc = read_args(&c, &cmd, &e, 2, "--config", path);
    assert_int_equal(rc, code);
    if (strstr(e.text, a) == NULL || strstr(e.text, b) == NULL)
        fail_msg("\"%s\" should say \"%s\" and \"%s\"", e.text, a, b);
    assert_true(a[0] != ':' || strstr(e.text, path) != NULL);
}

static void mistakes_in_a_file_name_the_line(void **state)
{
    (void)state;
    static const char *const no_bits[] = {"0", "9", "12", "32", "-8", "8.0", "abc", ""};
    char text[400], says[96];
    bad_file("[session]\n\nbugdet = 5MiB\n", BC_EINVALID, ":3:", "budget");
    bad_file("[session]\npolicies = h2o\n", BC_EINVALID, ":2:", "policy");
    bad_file("[sesion]\nbudget = 5MiB\n", BC_EINVALID, ":2:", "[sesion]");
    bad_file("budget = 5MiB\n", BC_EINVALID, ":1:", "before any");
    bad_file("[limits]\nsessions = many\n", BC_EINVALID, ":2:", "many");
    bad_file("[limits]\nsessions = 0\n", BC_EINVALID, ":2:", "1 to 4096");
    bad_file("[limits]\nsessions = -5\n", BC_EINVALID, ":2:", "-5");
    bad_file("[limits]\nsessions = 5 5\n", BC_EINVALID, ":2:", "5 5");
    bad_file("[limits]\nsessions = 99999999999999999999\n", BC_EINVALID, ":2:", "sessions");
    bad_file("[memory]\nkv_memory = 120%\n", BC_EINVALID, ":2:", "\"120%\" is not");
    bad_file("[memory]\nkv_memory = 96%\n", BC_EINVALID, ":2:", "or more than 0 and up to 95%");
    bad_file("[memory]\nhost_tier = 0%\n", BC_EINVALID, ":2:", "or more than 0 and up to 95%");
    bad_file("[memory]\nuid_share = 101%\n", BC_EINVALID, ":2:", "or more than 0 and up to 100%");
    bad_file("[memory]\nuid_share = 5\n", BC_EINVALID, ":2:", "65536");
    bad_file("[memory]\nkv_memory = 5 parsecs\n", BC_EINVALID, ":2:", "parsecs");
    bad_file("[memory]\nkv_memory = 0x10MiB\n", BC_EINVALID, ":2:", "0x10");
    bad_file("[memory]\nkv_memory = inf\n", BC_EINVALID, ":2:", "inf");
    bad_file("[memory]\nspill_after = 5 weeks\n", BC_EINVALID, ":2:", "5 weeks");
    bad_file("[memory]\nspill_after = -1\n", BC_EINVALID, ":2:", "-1");
    bad_file("[memory]\nspill_after = 400d\n", BC_EINVALID, ":2:", "s, min, h, d");
    bad_file("[session]\nspan_quantile = nan\n", BC_EINVALID, ":2:", "nan");
    bad_file("[session]\nbudget = 0.5t\n", BC_EINVALID, ":2:", "0.5t");
    bad_file("[session]\nbudget = 16777217t\n", BC_EINVALID, ":2:", "or 1t to 16777216t");
    bad_file("[session]\nfrozen = never\n", BC_EINVALID, ":2:", "auto");
    for (size_t i = 0; i < ARRAY_LEN(no_bits); i++) { /* one sentence, whatever is wrong with it */
        snprintf(text, sizeof text, "[daemon]\nactivations = %s\n", no_bits[i]);
        snprintf(says, sizeof says, "activations = \"%s\" is not one of two whole numbers: 8 or 16",
                 no_bits[i]);
        bad_file(text, BC_EINVALID, ":2:", says);
    }
    bad_file("[daemon]\nsocket_mode = 0999\n", BC_EINVALID, ":2:", "0999");
    bad_file("[daemon]\nthreads = 1\nthreads = 2\n", BC_EINVALID, ":3:", "twice");
    bad_file("[daemon]\nthreads = 1\n  2\n", BC_EINVALID, ":3:", "twice");
    bad_file("[daemon]\nthreads\n", BC_EINVALID, ":2:", "neither");
    bad_file("[daemon\nthreads = 1\n", BC_EINVALID, ":1:", "neither");
    bad_file("[model.x]\nweight = 3\n", BC_EINVALID, ":2:", "path or chat_template");
    bad_file("[model.x]\nchat_template = chatml\n", BC_EINVALID, "model.x", "no path");
    bad_file("[model.x]\npath = a\npath = b\n", BC_EINVALID, ":3:", "twice");
    bad_file("[model.]\npath = a\n", BC_EINVALID, ":2:", "no name");
    snprintf(text, sizeof text, "[daemon]\nsocket = /%0250d\n", 7);
    bad_file(text, BC_EINVALID, ":2:", "longer");
    snprintf(text, sizeof text, "[model.%060d]\npath = /x\n", 7);
    bad_file(text, BC_EINVALID, ":1:", "longer");
    struct config c;
    struct config_command cmd;
    struct err e;
    char fifo[64];
    assert_int_equal(read_args(&c, &cmd, &e, 1, "--config=/nowhere/at/all"), BC_ENOTFOUND);
    assert_int_equal(read_args(&c, &cmd, &e, 1, "--config=/tmp"), BC_EIO);
    assert_int_equal(read_args(&c, &cmd, &e, 1, "--config=/dev/zero"), BC_EINVALID);
    assert_non_null(strstr(e.text, "/dev/zero:1: a zero byte"));
    snprintf(fifo, sizeof fifo, "%s.fifo", path);
    assert_int_equal(mkfifo(fifo, 0600), 0);
    assert_int_equal(read_args(&c, &cmd, &e, 2, "--config", fifo), BC_EIO); /* and does not hang */
    unlink(fifo);
    assert_int_equal(read_args(&c, &cmd, &e, 1, "--config=/dev/null"), BC_OK);
    config_free(&c);
}

/* Each value alone is one of its kind; NULL flag: the file alone. */
static void not_together(const char *text, const char *flag, const char *place, const char *says)
{
    struct config c;
    struct config_command cmd;
    struct err e;
    char begin[120];
    write_file(text);
    if (read_args(&c, &cmd, &e, flag != NULL ? 3 : 2, "--config", path, flag) < 0)
        fail_msg("%s", e.text);
    assert_int_equal(settings_check(&c, NULL, &e),
                     strstr(says, "unknown") ? BC_EUNKNOWN : BC_EINVALID);
    config_free(&c);
    snprintf(begin, sizeof begin, "%s%s", place[0] == ':' ? path : "", place);
    if (strncmp(e.text, begin, strlen(begin)) != 0 || strstr(e.text, says) == NULL)
        fail_msg("\"%s\" should begin with \"%s\" and say \"%s\"", e.text, begin, says);
}

static void values_that_do_not_go_together_name_their_place(void **state)
{
    (void)state;
    struct config c;
    struct config_command cmd;
    struct err e;
    not_together("[daemon]\nlog = loud\n", NULL, ":2: [daemon] log: ", "'loud' is not error");
    not_together("[daemon]\nlog = info\n", "--log=x:loud", "--log: [daemon] log: ", "'loud'");
    not_together("[daemon]\npin = 0\nbackend = abacus\n", NULL, ":3: [daemon] ",
                 "unknown backend \"abacus\"; there are auto, ");
    not_together("[daemon]\nisa = avx2\n", "--isa=sse", "--isa: [daemon] ",
                 "unknown isa \"sse\"; there are amx, avx512-bf16, avx512, avx2, scalar");
    not_together("", "--isa=sm_9x", "--isa: [daemon] ", "unknown isa \"sm_9x\"");
    not_together("\n\n[session]\npolicy = guess\n", NULL, ":4: [session] ", "unknown policy");
    not_together("[session]\nspan = 4\n", NULL, ":2: [session] ", "span 4");
    not_together("[session]\nspan = 4\nkeep = 0\n", "--span=6", "--span: [session] ", "span 6");
    not_together("[session]\nbudget = 64t\nrecent = 60\n", NULL, ":3: [session] ",
                 "recent_tokens 60");
    /* what is too much is a default; what was set is too little for it */
    not_together("[session]\nspan = 3\nkeep = 5\n", NULL, ":3: [session] ", "recent_tokens 32");
    not_together("[session]\nbudget = 64t\n", "--min-gap=50", "--min-gap: [session] ",
                 "min_gap 50");
    not_together("[session]\nmax_tokens = 11\n[limits]\nmax_tokens = 10\n", NULL,
                 ":4: [limits] max_tokens 10 ", "[session] max_tokens 11");
    not_together("[limits]\nsessions = 9\n", "--max-tokens=1048577",
                 "--max-tokens: [limits] max_tokens 1048576 ", "[session] max_tokens 1048577");
    /* another machine's are no mistake */
    static const char *const isas[] = {"--isa=amx", "--isa=avx512-vnni", "--isa=scalar",
                                       "--isa=sm_90", "--backend=cuda"};
    for (size_t i = 0; i < ARRAY_LEN(isas); i++) {
        assert_int_equal(read_args(&c, &cmd, &e, 2, "--no-config", isas[i]), BC_OK);
        assert_int_equal(settings_check(&c, NULL, &e), BC_OK);
        config_free(&c);
    }
    write_file("[session]\nmax_tokens = 10\n[limits]\nmax_tokens = 10\n");
    assert_int_equal(read_args(&c, &cmd, &e, 2, "--config", path), BC_OK);
    assert_int_equal(settings_check(&c, NULL, &e), BC_OK);
    config_free(&c);
    write_file("[limits]\nmax_tokens = 10\n"); /* nobody has set the other one: it gives way */
    assert_int_equal(read_args(&c, &cmd, &e, 2, "--config", path), BC_OK);
    assert_int_equal(settings_check(&c, NULL, &e), BC_OK);
    assert_int_equal(settings_defaults(&c).max_tokens, 10);
    config_free(&c);
}

static void bad_args(const char *a, const char *b, const char *says)
{
    struct config c;
    struct config_command cmd;
    struct err e;
    assert_int_equal(read_args(&c, &cmd, &e, b != NULL ? 3 : 2, "--no-config", a, b), BC_EINVALID);
    if (strstr(e.text, says) == NULL)
        fail_msg("\"%s\" should say \"%s\"", e.text, says);
}

static void mistakes_on_the_command_line_name_the_option(void **state)
{
    (void)state;
    bad_args("--bugdet=5", NULL, "--budget");
    bad_args("--zzzzzzzzzz", NULL, "--zzzzzzzzzz");
    bad_args("--budget", NULL, "needs a value");
    bad_args("--budget=", NULL, "budget");
    bad_args("--threads=two", NULL, "two");
    bad_args("budget", NULL, "no option");
    bad_args("-b", "5", "no option");
    bad_args("--parent-fd=1", NULL, "parent-fd");
    bad_args("--parent-fd=x", NULL, "parent-fd");
    bad_args("--model.x.colour=5", NULL, "path or chat_template");
    bad_args("--model.x.chat_template=chatml", NULL, "no path");
    struct config c;
    struct config_command cmd;
    struct err e;
    assert_int_equal(read_args(&c, &cmd, &e, 2, "--help", "--config=/nowhere"), BC_OK);
    assert_int_equal(cmd.action, CONFIG_HELP);
    config_free(&c);
    assert_int_equal(read_args(&c, &cmd, &e, 2, "--print-config", "--no-config"), BC_OK);
    assert_int_equal(cmd.action, CONFIG_PRINT);
    config_free(&c);
}

static void a_reload_changes_only_what_can(void **state)
{
    (void)state;
    struct config a, b;
    struct config_command cmd;
    struct err e;
    struct config_change ch[64];
    assert_int_equal(read_args(&a, &cmd, &e, 1, "--no-config"), BC_OK);
    assert_int_equal(read_args(&b, &cmd, &e, 8, "--no-config", "--threads=5", "--policy=h2o",
                               "--max-sessions=7", "--socket=/x", "--activations=16",
                               "--model.a.path=/a.gguf", "--model.b.path=/b.gguf"),
                     BC_OK);
    assert_int_equal(config_compare(&a, &b, ch, 64), 6);
    unsigned live = 0;
    for (unsigned i = 0; i < 6; i++)
        live += ch[i].live;
    assert_int_equal(live, 2);
    assert_string_equal(ch[5].section, "model.NAME"); /* both sections are one change */
    assert_int_equal(b.daemon_threads, 0);            /* set back: it needs a restart */
    assert_int_equal(b.daemon_activations, 8);
    assert_string_equal(b.daemon_socket, "");
    assert_string_equal(b.session_policy, "h2o");
    assert_int_equal(b.limits_sessions, 7);
    config_free(&a);
    assert_int_equal(read_args(&a, &cmd, &e, 7, "--no-config", "--policy=h2o", "--max-sessions=7",
                               "--model.a.path=/a.gguf", "--model.a.chat_template=chatml",
                               "--model.b.path=/b.gguf", "--pin=0"),
                     BC_OK);
    assert_int_equal(config_compare(&a, &b, ch, 64), 1); /* what a model is, not only how many */
    config_free(&a);
    config_free(&b);
}

/* Random files: read or refused, never more. */
static void random_files(void **state)
{
    (void)state;
    static const char *const words[] = {"[session]", "[limits]", "[model.a]", "budget",      "=",
                                        "5MiB",      "policy",   "h2o",       "\n",          "\n",
                                        " ",         ";",        "#",         "path",        "\xff",
                                        "[",         "]",        ":",         "99999999999", "-1"};
    uint32_t x = 3;
    unsigned good = 0, bad = 0;
    for (unsigned i = 0; i < 4000; i++) {
        FILE *f = fopen(path, "w");
        for (unsigned k = 0; k < 12; k++) {
            x = x * 1664525u + 1013904223u;
            fputs(words[(x >> 8) % (sizeof words / sizeof words[0])], f);
        }
        fclose(f);
        struct config c;
        struct config_command cmd;
        struct err e = {0};
        int rc = read_args(&c, &cmd, &e, 2, "--config", path);
        if (rc == BC_OK)
            config_free(&c);
        else
            assert_true(e.text[0] != '\0');
        good += rc == BC_OK;
        bad += rc != BC_OK;
    }
    assert_true(good > 10 && bad > 10);
}

static void table_has_no_doubles(void **state)
{
    (void)state;
    for (size_t i = 0; param_at(i) != NULL; i++) {
        const struct param *p = param_at(i);
        assert_ptr_equal(param_find(p->section, p->key), p);
        assert_ptr_equal(param_by_flag(p->flag), p);
        assert_non_null(param_section_text(p->section));
        size_t n = strlen(p->text);
        assert_true(n > 10 && p->text[n - 1] == '.');
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_are_the_tables),
        cmocka_unit_test(file_then_command_line),
        cmocka_unit_test(times_have_units),
        cmocka_unit_test(printed_config_reads_back),
        cmocka_unit_test(mistakes_in_a_file_name_the_line),
        cmocka_unit_test(values_that_do_not_go_together_name_their_place),
        cmocka_unit_test(mistakes_on_the_command_line_name_the_option),
        cmocka_unit_test(a_reload_changes_only_what_can),
        cmocka_unit_test(random_files),
        cmocka_unit_test(table_has_no_doubles),
    };
    int fd = mkstemp(path);
    if (fd < 0)
        return 1;
    close(fd);
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(path);
    return rc;
}
