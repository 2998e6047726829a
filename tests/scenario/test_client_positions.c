/* positions = rerotate through the whole of it: a daemon whose model was trained on texts of 200 tokens, the library, the command. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "answer.h"
#include "command.h"
#include "daemon_harness.h"

#define CONTEXT 200u
#define NEW 700u

static struct dh *d;

static int start(void **state)
{
    const char *args[] = {"--threads=1", "--budget=64t", NULL};
    *state = d = dh_start_context(CONTEXT, args);
    return 0;
}

/* Events stand in the stream between the tokens that they say. */
static void the_library_is_told(void **state)
{
    (void)state;
    backcast *c = dh_connect(d);
    backcast_session *s;
    struct backcast_session_options so;
    struct backcast_session_info info;
    struct backcast_generate_options go = answer_options(NEW);
    struct backcast_event ev = {0};
    struct backcast_stats st;
    uint64_t next = 0;
    uint32_t n = 0, tokens = 0;
    backcast_session_options_init(&so);
    so.positions = "rerotate";
    if (backcast_session_open(c, &so, &s) < 0)
        fail_msg("%s", backcast_last_error(c));
    backcast_session_info(s, &info);
    assert_string_equal(info.positions, "rerotate");
    assert_int_equal(info.context_tokens, CONTEXT);
    assert_int_equal(backcast_stats(c, &st), 0);
    assert_string_equal(st.sessions[0].positions, "rerotate");
    assert_int_equal(backcast_prompt(s, "The mill", 8, &go), 0);
    while (ev.type != BACKCAST_END) {
        assert_int_equal(backcast_next(c, &ev, DH_PATIENCE_MS), 1);
        if (ev.type == BACKCAST_TEXT && ev.text.n_ids > 0) {
            tokens += (uint32_t)ev.text.n_ids;
            next = ev.text.first_stream + ev.text.n_ids;
        } else if (ev.type == BACKCAST_REROTATED) {
            assert_int_equal(ev.rerotated.position, CONTEXT);
            assert_in_range(ev.rerotated.tokens, 1, 64);
            assert_int_equal(ev.rerotated.stream + 1, next); /* the newest is sampled, not cached */
            n++;
        }
    }
    assert_string_equal(ev.end.reason, "length");
    assert_int_equal(tokens, NEW);
    assert_true(n >= 4);
    backcast_session_close(&s);
    backcast_disconnect(&c);
}

static void without_it_a_session_ends(void **state)
{
    (void)state;
    backcast *c = dh_connect(d);
    struct answer a = {0};
    struct backcast_session_options so;
    struct backcast_generate_options go = answer_options(NEW);
    backcast_session_options_init(&so);
    answer_ask(c, &so, "The mill", 8, &go, &a);
    assert_string_equal(a.reason, "context");
    answer_free(&a);
    backcast_disconnect(&c);
}

static void refused(backcast *c, const char *positions, const char *policy, int code)
{
    backcast_session *s = NULL;
    struct backcast_session_options so;
    backcast_session_options_init(&so);
    so.positions = positions;
    so.policy = policy;
    assert_int_equal(backcast_session_open(c, &so, &s), code);
    assert_string_equal(backcast_last_error_field(c), "positions");
    assert_null(s);
}

static void what_cannot_be_is_refused(void **state)
{
    (void)state;
    backcast *c = dh_connect(d);
    refused(c, "spin", NULL, BACKCAST_EUNKNOWN);
    refused(c, "rerotate", "none", BACKCAST_EINVALID);
    backcast_disconnect(&c);
}

static void the_command_says_so(void **state)
{
    (void)state;
    const char *argv[] = {
        TEST_BIN "/backcast", "run", "--socket",     d->socket,  "--raw", "--positions", "rerotate",
        "--max-tokens",       "600", "--ignore-end", "The mill", NULL,    NULL};
    struct prog_result r = prog_run(argv, NULL, NULL);
    assert_int_equal(r.exit_code, 0);
    assert_non_null(strstr(r.err, "200 would be the first beyond the trained context"));
    prog_free(&r);
    argv[11] = "--json";
    r = prog_run(argv, NULL, NULL);
    assert_int_equal(r.exit_code, 0);
    assert_non_null(strstr(r.out, "\"event\":\"rerotated\""));
    assert_non_null(strstr(r.out, "\"position\":200"));
    prog_free(&r);
    argv[6] = "spin";
    r = prog_run(argv, NULL, NULL);
    assert_int_not_equal(r.exit_code, 0);
    assert_non_null(strstr(r.err, "positions"));
    prog_free(&r);
}

/* [session] positions: what it says is for sessions that can have it. */
static void the_default_can_be_set(void **state)
{
    (void)state;
    const char *args[] = {"--threads=1", "--budget=64t", "--positions=rerotate", NULL};
    const char *bad[] = {"--positions=spin", NULL};
    char log[4096];
    struct dh *other = dh_start_context(CONTEXT, args);
    backcast *c = NULL;
    backcast_session *s;
    struct backcast_session_options so;
    struct backcast_session_info info;
    assert_int_equal(backcast_connect(&c, other->socket), 0);
    for (int none = 0; none < 2; none++) {
        backcast_session_options_init(&so);
        so.policy = none ? "none" : NULL;
        assert_int_equal(backcast_session_open(c, &so, &s), 0);
        backcast_session_info(s, &info);
        assert_string_equal(info.positions, none ? "keep" : "rerotate");
        backcast_session_close(&s);
    }
    backcast_disconnect(&c);
    dh_stop(&other);
    assert_int_not_equal(dh_start_fails(bad, log, sizeof log), 0);
    assert_non_null(strstr(log, "spin"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_library_is_told),       cmocka_unit_test(without_it_a_session_ends),
        cmocka_unit_test(what_cannot_be_is_refused), cmocka_unit_test(the_command_says_so),
        cmocka_unit_test(the_default_can_be_set),
    };
    return cmocka_run_group_tests(tests, start, dh_group_stop);
}
