/* test_client_save.c: sessions that outlive their daemon in files: by library and by command; the
 * state folder, who may have it, and what is said where there is none. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <sys/stat.h>
#include <unistd.h>
#include "answer.h"
#include "command.h"
#include "daemon_harness.h"

#define COMMAND TEST_BIN "/backcast"

static char state_dir[FOLDER_PATH], state_arg[FOLDER_PATH + 16];

static int setup(void **state)
{
    (void)state;
    folder_root(state_dir, "state");
    snprintf(state_arg, sizeof(state_arg), "--state-dir=%s", state_dir);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    folder_drop(state_dir);
    return 0;
}

static struct dh *daemon_start(void)
{
    const char *args[] = {state_arg, NULL};
    return dh_start("tiny-llama.gguf", args);
}

static void ask(backcast *c, backcast_session *s, const char *text, struct answer *a)
{
    struct backcast_generate_options o = answer_options(40);
    int rc = backcast_prompt(s, text, strlen(text), &o);
    if (rc < 0)
        fail_msg("%s", backcast_last_error(c));
    answer_read(c, s, a);
}

static const char first[] = "The mill stands on the north bank of the river, and the miller said ";
static const char second[] = "that the rain would come before the night. ";

static void a_saved_session_goes_on_in_the_next_daemon(void **state)
{
    (void)state;
    struct dh *d = daemon_start();
    backcast *c = dh_connect(d);
    struct backcast_session_options o = answer_budget("h2o", 60);
    backcast_session *s, *stays;
    struct answer a = {0}, b = {0}, go_on = {0};
    assert_int_equal(backcast_session_open(c, &o, &s), 0);
    ask(c, s, first, &a);
    assert_int_equal(backcast_session_save(s, "mill"), 0);
    ask(c, s, second, &go_on); /* what an undisturbed session says next */
    assert_int_equal(backcast_session_save(s, "../mill"), BACKCAST_EINVALID);
    assert_string_equal(backcast_last_error_field(c), "name");
    assert_int_equal(backcast_save_by_id(c, 12345, "mill"), BACKCAST_EUNKNOWN);
    backcast_disconnect(&c);
    dh_stop(&d);

    d = daemon_start();
    c = dh_connect(d);
    assert_int_equal(backcast_session_restore(c, "nobody", &s), BACKCAST_ENOTFOUND);
    assert_int_equal(backcast_session_restore(c, "mill", &s), 0);
    struct backcast_session_info info;
    backcast_session_info(s, &info);
    assert_string_equal(info.name, "mill");
    assert_string_equal(info.policy, "h2o");
    assert_int_equal(info.budget_tokens, 60);
    assert_int_equal(backcast_session_restore(c, "mill", &stays), BACKCAST_EBUSY);
    ask(c, s, second, &b);
    assert_true(answer_equal(&go_on, &b));
    assert_int_equal(b.tokens_in, go_on.tokens_in); /* its own tokens, and no others */
    assert_int_equal(b.first_stream, go_on.first_stream);
    backcast_disconnect(&c);

    /* it has a name: the next client finds it */
    c = dh_connect(d);
    assert_int_equal(backcast_session_attach(c, "mill", &s), 0);
    backcast_session_close(&s);
    backcast_disconnect(&c);
    dh_stop(&d);
    answer_free(&a);
    answer_free(&b);
    answer_free(&go_on);
}

/* The library forks, the command forks by name, and both say what the one session would have said. */
static void a_fork_says_what_the_session_would_have_said(void **state)
{
    (void)state;
    struct dh *d = daemon_start();
    backcast *c = dh_connect(d);
    struct backcast_session_options o = answer_budget("h2o", 60);
    struct backcast_session_info info;
    backcast_session *s, *f, *g;
    struct answer a[4] = {{0}};
    o.name = "trunk";
    assert_int_equal(backcast_session_open(c, &o, &s), 0);
    ask(c, s, first, &a[0]);
    assert_int_equal(backcast_session_fork(s, &f), 0);
    backcast_session_info(f, &info);
    assert_int_equal(info.budget_tokens, 60);
    assert_string_equal(info.policy, "h2o");
    const char *twig[] = {COMMAND, "fork", "--socket", d->socket, "trunk", "twig", NULL};
    struct prog_result r = prog_run(twig, NULL, NULL);
    assert_int_equal(r.exit_code, 0);
    assert_non_null(strstr(r.out, "is made"));
    prog_free(&r);
    r = prog_run(twig, NULL, NULL); /* the name is taken now */
    assert_int_equal(r.exit_code, 1);
    assert_non_null(strstr(r.err, "twig"));
    prog_free(&r);
    ask(c, s, second, &a[1]);
    ask(c, f, second, &a[2]);
    backcast_session_close(&s);
    /* the command has gone; the session has a name, and stays */
    int rc = backcast_session_attach(c, "twig", &g);
    for (int tries = 0; rc == BACKCAST_EBUSY && tries < 500; tries++, usleep(10000))
        rc = backcast_session_attach(c, "twig", &g);
    assert_int_equal(rc, 0);
    ask(c, g, second, &a[3]);
    for (int i = 2; i < 4; i++) {
        assert_true(answer_equal(&a[1], &a[i]));
        assert_int_equal(a[i].first_stream, a[1].first_stream);
    }
    assert_int_equal(backcast_fork_by_id(c, 12345, NULL, &g), BACKCAST_EUNKNOWN);
    backcast_disconnect(&c);
    dh_stop(&d);
    for (int i = 0; i < 4; i++)
        answer_free(&a[i]);
}

/* An END says how much of the prompt another session had evaluated; a listing what is shared. */
static void what_is_shared_is_said(void **state)
{
    (void)state;
    struct dh *d = daemon_start();
    backcast *c = dh_connect(d);
    struct backcast_session_options o = answer_budget("none", 0);
    struct backcast_stats st;
    backcast_session *s[2];
    struct answer a[2] = {{0}};
    char *text = answer_prompt(900, 3);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(backcast_session_open(c, &o, &s[i]), 0);
        ask(c, s[i], text, &a[i]);
    }
    assert_int_equal(a[0].tokens_adopted, 0);
    assert_true(a[1].tokens_adopted > 0 && a[1].tokens_adopted % 64 == 0);
    assert_int_equal(a[1].tokens_adopted, (a[1].tokens_in - 1) / 64 * 64);
    assert_true(answer_equal(&a[0], &a[1]));
    assert_int_equal(backcast_stats(c, &st), 0);
    assert_int_equal(st.n_sessions, 2);
    for (int i = 0; i < 2; i++)
        assert_true(st.sessions[i].bytes_shared > 0 &&
                    st.sessions[i].bytes_shared <= st.sessions[i].bytes_held);
    assert_int_equal(st.sessions[0].bytes_held + st.sessions[1].bytes_held -
                         st.sessions[0].bytes_shared,
                     st.kv_held);
    backcast_disconnect(&c);
    dh_stop(&d);
    free(text);
    answer_free(&a[0]);
    answer_free(&a[1]);
}

static void the_command_saves_and_restores(void **state)
{
    (void)state;
    struct dh *d = daemon_start();
    backcast *c = dh_connect(d);
    struct backcast_session_options o = answer_budget("counter_causal_fast", 64);
    backcast_session *s;
    struct answer a = {0};
    o.name = "talk";
    assert_int_equal(backcast_session_open(c, &o, &s), 0);
    ask(c, s, first, &a);
    char file[FOLDER_PATH + 64];
    struct stat st;
    const char *save[] = {COMMAND, "save", "--socket", d->socket, "talk", "monday", NULL};
    const char *bad[] = {COMMAND, "save", "--socket", d->socket, "talk", "a/b", NULL};
    const char *restore[] = {COMMAND, "restore", "--json", "--socket", d->socket, "monday", NULL};
    struct prog_result r = prog_run(save, NULL, NULL);
    assert_int_equal(r.exit_code, 0);
    assert_non_null(strstr(r.out, "saved as monday"));
    prog_free(&r);
    snprintf(file, sizeof(file), "%s/saved/%u/monday.bcs", state_dir, (unsigned)getuid());
    assert_int_equal(stat(file, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    r = prog_run(bad, NULL, NULL);
    assert_int_equal(r.exit_code, 2);
    assert_non_null(strstr(r.err, "name"));
    prog_free(&r);
    backcast_disconnect(&c);
    dh_stop(&d);

    d = daemon_start();
    restore[4] = d->socket;
    r = prog_run(restore, NULL, NULL);
    assert_int_equal(r.exit_code, 0);
    assert_true(json_valid(r.out, false));
    prog_free(&r);
    r = prog_run(restore, NULL, NULL); /* it is there already */
    assert_int_equal(r.exit_code, 1);
    assert_non_null(strstr(r.err, "monday"));
    prog_free(&r);
    const char *ls[] = {COMMAND, "ls", "--socket", d->socket, NULL};
    r = prog_run(ls, NULL, NULL);
    assert_non_null(strstr(r.out, "monday"));
    prog_free(&r);
    dh_stop(&d);
    answer_free(&a);
}

#define FILES 600 /* more than one answer of the daemon has */

static void saved_files_are_listed_and_go(void **state)
{
    (void)state;
    struct dh *d = daemon_start();
    backcast *c = dh_connect(d);
    backcast_session *s = NULL;
    struct backcast_saved *list = NULL;
    struct answer a = {0};
    size_t n = 0;
    char path[FOLDER_PATH + 64], name[16];

    assert_int_equal(backcast_session_open(c, NULL, &s), 0);
    ask(c, s, "oak", &a);
    assert_int_equal(backcast_session_save(s, "real"), 0);
    assert_int_equal(backcast_saved(c, &list, &n), 0);
    size_t were = n; /* others of this folder, and ours */
    assert_true(were >= 1);
    free(list);
    for (int i = 0; i < FILES; i++) {
        snprintf(path, sizeof(path), "%s/saved/%u/f%03d.bcs%s", state_dir, (unsigned)getuid(), i,
                 i == 0 ? ".tmp" : ""); /* one that is no save */
        FILE *f = fopen(path, "w");
        assert_non_null(f);
        fputs("twelve bytes", f);
        fclose(f);
    }
    assert_int_equal(backcast_saved(c, &list, &n), 0);
    assert_int_equal(n, were + FILES - 1);
    bool real = false;
    for (size_t i = 0; i < n; i++) {
        assert_true(i == 0 || strcmp(list[i - 1].name, list[i].name) < 0);
        real |= strcmp(list[i].name, "real") == 0 && list[i].bytes > 1000;
        assert_true(list[i].name[0] != 'f' || list[i].bytes == 12);
        assert_true(list[i].unix_seconds > 1000000000);
    }
    assert_true(real);
    free(list);
    for (int i = 1; i < FILES; i++) {
        snprintf(name, sizeof(name), "f%03d", i);
        assert_int_equal(backcast_unsave(c, name), 0);
    }
    snprintf(path, sizeof(path), "%s/saved/%u/f000.bcs.tmp", state_dir, (unsigned)getuid());
    unlink(path);
    assert_int_equal(backcast_unsave(c, "f001"), BACKCAST_ENOTFOUND);
    assert_int_equal(backcast_unsave(c, "../real"), BACKCAST_EINVALID);
    assert_string_equal(backcast_last_error_field(c), "name");
    snprintf(path, sizeof(path), "--socket=%s", d->socket);
    struct prog_result r =
        prog_run((const char *[]){COMMAND, "saved", path, "--json", NULL}, NULL, NULL);
    assert_true(json_valid(r.out, true));
    assert_non_null(strstr(r.out, "\"name\":\"real\""));
    prog_free(&r);
    r = prog_run((const char *[]){COMMAND, "unsave", path, "real", NULL}, NULL, NULL);
    assert_int_equal(r.exit_code, 0);
    prog_free(&r);
    r = prog_run((const char *[]){COMMAND, "saved", path, NULL}, NULL, NULL);
    assert_int_equal(r.exit_code, 0);
    assert_null(strstr(r.out, "real "));
    prog_free(&r);
    answer_free(&a);
    backcast_disconnect(&c);
    dh_stop(&d);
}

/* What lies under a save's name and is no file is refused at once, and saves go on. */
static void what_is_no_file_holds_nobody_up(void **state)
{
    (void)state;
    struct dh *d = daemon_start();
    backcast *c = dh_connect(d);
    struct backcast_session_options o = answer_budget("h2o", 60);
    backcast_session *s, *back = NULL;
    char path[FOLDER_PATH + 64];
    assert_int_equal(backcast_session_open(c, &o, &s), 0);
    assert_int_equal(backcast_session_save(s, "pipe"), 0);
    snprintf(path, sizeof path, "%s/saved/%u/pipe.bcs", state_dir, (unsigned)getuid());
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(backcast_session_restore(c, "pipe", &back), BACKCAST_EIO);
    assert_null(back);
    assert_int_equal(backcast_session_save(s, "pipe"), 0); /* in the place of it */
    assert_int_equal(backcast_session_restore(c, "pipe", &back), 0);
    backcast_disconnect(&c);
    dh_stop(&d);
}

/* A default is nobody's wish: it is cut to what there is; a budget that was asked for is refused. */
static void the_default_budget_fits_a_small_daemon(void **state)
{
    (void)state;
    const char *args[] = {"--kv-memory=2MiB", NULL};
    struct dh *d = dh_start("tiny-llama.gguf", args);
    backcast *c = dh_connect(d);
    struct backcast_session_options o;
    struct backcast_session_info info;
    backcast_session *s, *t;
    struct answer a = {0};
    backcast_session_options_init(&o);
    assert_int_equal(backcast_session_open(c, &o, &s), 0);
    assert_int_equal(backcast_session_info(s, &info), 0);
    assert_in_range(info.budget_bytes, info.page_bytes, 2 << 20);
    ask(c, s, first, &a);
    assert_int_equal(backcast_session_open(c, &o, &t), 0);
    o.budget_bytes = 64 << 20;
    assert_int_equal(backcast_session_open(c, &o, &t), BACKCAST_EBUDGET);
    answer_free(&a);
    backcast_disconnect(&c);
    dh_stop(&d);
}

static void a_state_folder_has_one_daemon(void **state)
{
    (void)state;
    char log[2000];
    struct dh *d = daemon_start();
    const char *args[] = {"--model", TEST_VECTORS "/tiny-llama.gguf", state_arg, NULL};
    assert_int_equal(dh_start_fails(args, log, sizeof(log)), 1);
    assert_non_null(strstr(log, "another daemon"));
    assert_non_null(strstr(log, state_dir));
    dh_stop(&d);
    const char *nowhere[] = {"--model", TEST_VECTORS "/tiny-llama.gguf",
                             "--state-dir=/proc/nowhere", NULL};
    assert_int_equal(dh_start_fails(nowhere, log, sizeof(log)), 1);
    assert_non_null(strstr(log, "/proc/nowhere"));
    const char *relative[] = {"--model", TEST_VECTORS "/tiny-llama.gguf", "--state-dir=here", NULL};
    assert_int_equal(dh_start_fails(relative, log, sizeof(log)), 1);
    assert_non_null(strstr(log, "here"));
}

static void without_a_state_folder_it_says_so(void **state)
{
    (void)state;
    struct dh *d = dh_start("tiny-llama.gguf", NULL);
    backcast *c = dh_connect(d);
    backcast_session *s, *t = NULL;
    assert_int_equal(backcast_session_open(c, NULL, &s), 0);
    assert_int_equal(backcast_session_save(s, "x"), BACKCAST_EUNSUPPORTED);
    assert_string_equal(backcast_last_error_field(c), "state_dir");
    assert_int_equal(backcast_session_restore(c, "x", &t), BACKCAST_EUNSUPPORTED);
    assert_null(t);
    backcast_disconnect(&c);
    dh_stop(&d);
}

/* Sessions that go idle and come back, through the daemon: nobody notices but the listing. */
static void idle_sessions_leave_and_come_back(void **state)
{
    (void)state;
    const char *args[] = {state_arg, "--spill-after=1s", "--host-tier=64MiB", NULL};
    struct dh *d = dh_start("tiny-llama.gguf", args);
    backcast *c = dh_connect(d);
    struct backcast_session_options o = answer_budget("counter_causal_fast", 60);
    backcast_session *s, *t;
    struct answer a = {0}, b = {0}, x = {0}, y = {0};
    struct backcast_stats st;
    assert_int_equal(backcast_session_open(c, &o, &s), 0);
    ask(c, s, first, &a);
    ask(c, s, second, &b);
    backcast_session_close(&s);
    assert_int_equal(backcast_session_open(c, &o, &t), 0);
    ask(c, t, first, &x);
    for (int i = 0; i < 300; i++) {
        assert_int_equal(backcast_stats(c, &st), 0);
        if (strcmp(st.sessions[0].state, "spilled") == 0)
            break;
        usleep(100000);
    }
    assert_string_equal(st.sessions[0].state, "spilled");
    assert_true(st.sessions[0].tokens > 0);
    assert_int_equal(st.sessions[0].bytes_held, 0);
    assert_int_equal(st.kv_held, 0);
    ask(c, t, second, &y);
    assert_true(answer_equal(&a, &x));
    assert_true(answer_equal(&b, &y));
    backcast_disconnect(&c);
    dh_stop(&d);
    answer_free(&a);
    answer_free(&b);
    answer_free(&x);
    answer_free(&y);
}

/* Waits until the listing (page: the shared one) calls it so; the session's entry, until the next call. */
static const struct backcast_session_stat *becomes(backcast *c, const char *name, const char *state,
                                                   bool page)
{
    struct backcast_stats st;
    for (int i = 0; i < 600; i++, usleep(50000)) {
        assert_int_equal(page ? backcast_stats_page(c, &st) : backcast_stats(c, &st), 0);
        for (size_t k = 0; k < st.n_sessions; k++)
            if (strcmp(st.sessions[k].name, name) == 0 && strcmp(st.sessions[k].state, state) == 0)
                return &st.sessions[k];
    }
    fail_msg("%s is never %s", name, state);
    return NULL;
}

static void tell(const char *socket, const char *name, const char *want, const char *json)
{
    const char *stat[] = {"stat", socket, name, NULL}, *ls[] = {"ls", socket, NULL};
    const char *stat_json[] = {"stat", "--json", socket, name, NULL};
    struct prog_result r = backcast_run(stat, NULL, NULL);
    prog_check("stat", &r, 0, want, NULL);
    r = backcast_run(stat_json, NULL, NULL);
    prog_check("stat --json", &r, 0, json, NULL);
    r = backcast_run(ls, NULL, NULL);
    prog_check("ls", &r, 0, "TIER   DURABLE", NULL);
}

/* What outlives the daemon, and where every cache lies. */
static void a_listing_tells_what_is_durable_and_where(void **state)
{
    (void)state;
    const char *args[] = {state_arg, "--spill-after=1s", "--host-tier=64MiB", NULL};
    struct dh *d = dh_start("tiny-llama.gguf", args);
    backcast *c = dh_connect(d);
    struct backcast_session_options o = answer_budget("counter_causal_fast", 60);
    backcast_session *s[2];
    struct answer a = {0};
    char socket[120];
    snprintf(socket, sizeof socket, "--socket=%s", d->socket);
    o.name = "fleeting";
    assert_int_equal(backcast_session_open(c, &o, &s[0]), 0);
    o.name = "lasting";
    o.durable = 1;
    assert_int_equal(backcast_session_open(c, &o, &s[1]), 0);
    const struct backcast_session_stat *t = becomes(c, "lasting", "idle", false);
    assert_string_equal(t->tier, "memory"); /* nothing is cached: it has nowhere to go */
    assert_int_equal(t->durable, 1);
    tell(socket, "lasting", "durable        yes\ntier           memory\n",
         "\"tier\":\"memory\",\"durable\":true");
    ask(c, s[0], first, &a);
    answer_free(&a);
    ask(c, s[1], first, &a);
    answer_free(&a);
    for (int page = 0; page < 2; page++) {
        t = becomes(c, "fleeting", "spilled", page);
        assert_string_equal(t->tier, "host");
        assert_int_equal(t->durable, 0);
        t = becomes(c, "lasting", "spilled", page);
        assert_string_equal(t->tier, "disk");
        assert_int_equal(t->durable, 1);
    }
    tell(socket, "lasting", "durable        yes\ntier           disk\n",
         "\"tier\":\"disk\",\"durable\":true");
    tell(socket, "fleeting", "durable        no\ntier           host\n",
         "\"tier\":\"host\",\"durable\":false");
    backcast_session_close(&s[1]);
    backcast_disconnect(&c);
    dh_stop(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_saved_session_goes_on_in_the_next_daemon),
        cmocka_unit_test(a_fork_says_what_the_session_would_have_said),
        cmocka_unit_test(what_is_shared_is_said),
        cmocka_unit_test(the_command_saves_and_restores),
        cmocka_unit_test(saved_files_are_listed_and_go),
        cmocka_unit_test(what_is_no_file_holds_nobody_up),
        cmocka_unit_test(the_default_budget_fits_a_small_daemon),
        cmocka_unit_test(a_state_folder_has_one_daemon),
        cmocka_unit_test(without_a_state_folder_it_says_so),
        cmocka_unit_test(idle_sessions_leave_and_come_back),
        cmocka_unit_test(a_listing_tells_what_is_durable_and_where),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
