/* Bad input: an error that names the field, nothing lost, and the next request works. Also the two
 * ends of what is good: one token, and a prompt far longer than its budget. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "engine_harness.h"
#include "records.h"

/* What OPEN refuses. */
static const struct bad_open {
    struct eh_ask ask;
    int code;
    const char *field;
} bad_opens[] = {
    {{.policy = "lru"}, BC_EUNKNOWN, "policy"},
    {{.model = "gpt-5"}, BC_EUNKNOWN, "model"},
    {{.model = "/nowhere/x.gguf"}, BC_ENOTFOUND, "model"},
    {{.model = TEST_VECTORS}, BC_EINVALID, "model"},
    {{.model = TEST_VECTORS "/README.md"}, BC_ECORRUPT, "magic"},
    {{.model = TEST_VECTORS "/quants.gguf"}, BC_ECORRUPT, "tokenizer.ggml.model"},
    {{.score = "loud"}, BC_EUNKNOWN, "score"},
    {{.trigger = "now"}, BC_EUNKNOWN, "trigger"},
    {{.kv_type = "q2"}, BC_EUNKNOWN, "kv_type"},
    {{.kv_type = "q8_0"}, BC_EUNSUPPORTED, "kv_type"}, /* its heads have 16 values */
    {{.kv_type = "q8_q4"}, BC_EUNSUPPORTED, "kv_type"},
    {{.chat_template = "morse"}, BC_EUNKNOWN, "chat_template"},
    {{.budget_tokens = 64, .frozen = 64}, BC_EINVALID, "frozen_tokens"},
    {{.budget_tokens = 64, .frozen = 1000}, BC_EINVALID, "frozen_tokens"},
    {{.budget_tokens = 64, .frozen = 42}, BC_EINVALID, "recent_tokens"},
    {{.budget_tokens = 64, .keep = 64}, BC_EINVALID, "keep_tokens"},
    {{.budget_tokens = 64, .keep = 65}, BC_EINVALID, "keep_tokens"},
    {{.budget_tokens = 64, .recent = 49}, BC_EINVALID, "recent_tokens"},
    {{.budget_tokens = 64, .min_gap = 60}, BC_EINVALID, "min_gap"},
    {{.budget_tokens = 64, .span = 4}, BC_EINVALID, "span"},
    {{.budget_tokens = 64, .span_quantile = 1.5f}, BC_EINVALID, "span_quantile"},
    {{.budget_tokens = 64, .span_quantile = NAN}, BC_EINVALID, "span_quantile"},
    {{.budget_bytes = 10}, BC_EBUDGET, "budget_bytes"},
    {{.budget_bytes = 1u << 20, .budget_tokens = 64}, BC_EINVALID, "budget_tokens"},
    {{.budget_bytes = 1ull << 40}, BC_EBUDGET, "budget_bytes"},
    {{.budget_tokens = UINT32_MAX}, BC_EBUDGET, "budget_tokens"},
    {{.policy = "none", .trigger = "prefill_end"}, BC_EINVALID, "trigger"},
    {{.priority = 101}, BC_EINVALID, "priority"},
    {{.name = "a/b"}, BC_EINVALID, "name"},
    {{.name = "0123456789012345678901234567890123456789012345678901234567890123x"},
     BC_EINVALID,
     "name"},
};

static void the_engine_works(struct eh *h)
{
    int32_t one = 50;
    struct generate_options o = eh_greedy(4);
    uint64_t s = eh_session(h, &(struct eh_ask){.budget_tokens = 64});
    eh_ids(h, s, &one, 1, &o); /* a prompt of one token */
    eh_run_to_end(h, s);
    assert_int_equal(eh_stream(h, s)->n_ids, 4);
    eh_close_session(h, s);
    struct engine_counts c;
    engine_counts(h->en, &c);
    assert_int_equal(c.kv_held, 0);
    assert_int_equal(c.sessions, 0);
}

static void bad_sessions_are_refused_by_field(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-llama.gguf", NULL, NULL);
    for (size_t i = 0; i < ARRAY_LEN(bad_opens); i++) {
        const struct bad_open *b = &bad_opens[i];
        const struct report *r = eh_reply(h, eh_post_open(h, &b->ask));
        if (r->type != REP_ERROR || r->u.error.code != b->code ||
            strcmp(r->u.error.field, b->field) != 0)
            fail_msg("row %zu: report %d, %s, \"%s\", %s", i, r->type,
                     r->type == REP_ERROR ? err_name(r->u.error.code) : "",
                     r->type == REP_ERROR ? r->u.error.field : "", r->u.error.text);
        assert_true(strlen(r->u.error.text) > 0);
        struct engine_counts c;
        engine_counts(h->en, &c);
        assert_int_equal(c.sessions, 0);
        assert_int_equal(c.kv_held, 0);
    }
    the_engine_works(h);
    eh_close(&h);
}

static void empty_prompts_are_refused_unless_something_waits(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-llama.gguf", NULL, NULL);
    struct generate_options o = eh_greedy(3);
    uint64_t s = eh_session(h, &(struct eh_ask){.budget_tokens = 200});
    eh_expect_error(h, eh_post_ids(h, s, NULL, 0, &o), BC_EINVALID, "ids");
    eh_expect_error(h, eh_post_text(h, s, PROMPT_RAW, NULL, "", 0, &o), BC_EINVALID, "text");
    eh_expect_error(h, eh_post_text(h, s, PROMPT_CHAT, NULL, "", 0, &o), BC_EINVALID, "text");
    eh_expect_error(h, eh_post_text(h, s, PROMPT_CHAT, "assistant", "", 0, &o), BC_EINVALID,
                    "text");
    eh_text(h, s, PROMPT_RAW, "once upon", &o);
    eh_run_to_end(h, s);
    eh_text(h, s, PROMPT_RAW, "", &o); /* goes on */
    eh_run_to_end(h, s);
    eh_text(h, s, PROMPT_CHAT, "", &o);
    eh_run_to_end(h, s);
    assert_int_equal(eh_stream(h, s)->n_ids, 9);
    for (uint32_t i = 1; i < 9; i++)
        assert_int_equal(eh_stream(h, s)->streams[i], eh_stream(h, s)->streams[0] + i);
    eh_close_session(h, s);
    the_engine_works(h);
    eh_close(&h);
}

static void bad_prompts_leave_the_session_as_it_was(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-llama.gguf", NULL, NULL);
    struct generate_options o = eh_greedy(8), bad;
    int32_t ids[1100], twin_ids[20];
    for (int i = 0; i < 1100; i++)
        ids[i] = 3 + i % 280;
    memcpy(twin_ids, ids, sizeof twin_ids);
    struct eh_ask ask = {.budget_tokens = 128, .frozen = EVICT_FROZEN_AUTO};
    uint64_t s = eh_session(h, &ask), twin = eh_session(h, &ask);
    ids[7] = 384;
    eh_expect_error(h, eh_post_ids(h, s, ids, 20, &o), BC_EINVALID, "ids");
    ids[7] = -1;
    eh_expect_error(h, eh_post_ids(h, s, ids, 20, &o), BC_EINVALID, "ids");
    ids[7] = 10;
    const struct err *e = eh_expect_error(h, eh_post_ids(h, s, ids, 1025, &o), BC_ECONTEXT, "ids");
    assert_int_equal(e->needed, 1025);
    assert_int_equal(e->available, 1024);
    bad = o;
    bad.temperature = -1;
    eh_expect_error(h, eh_post_ids(h, s, ids, 20, &bad), BC_EINVALID, "temperature");
    eh_expect_error(h, eh_post_text(h, s, PROMPT_CHAT, "king", "hm", 2, &o), BC_EINVALID, "role");
    /* a system message that would fill what is kept */
    char system[400];
    memset(system, 'x', sizeof system);
    eh_expect_error(h, eh_post_text(h, s, PROMPT_CHAT, "system", system, 400, &o), BC_EINVALID,
                    "frozen_tokens");
    eh_ids(h, s, twin_ids, 20, &o);
    eh_expect_error(h, eh_post_ids(h, s, ids, 20, &o), BC_EBUSY, "session");
    eh_run_to_end(h, s);
    eh_ids(h, twin, twin_ids, 20, &o);
    eh_run_to_end(h, twin);
    assert_int_equal(eh_stream(h, s)->streams[0], 20);
    assert_memory_equal(eh_stream(h, s)->ids, eh_stream(h, twin)->ids, 8 * sizeof *ids);
    eh_close(&h);
}

static void any_bytes_are_text(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-llama.gguf", NULL, NULL);
    struct generate_options o = eh_greedy(5);
    char bytes[256];
    for (int i = 0; i < 256; i++)
        bytes[i] = (char)(255 - i); /* invalid UTF-8 of every kind, and a zero byte */
    for (int kind = PROMPT_CHAT; kind <= PROMPT_RAW; kind++) {
        uint64_t s = eh_session(h, &(struct eh_ask){.policy = "none"});
        eh_expect(h, eh_post_text(h, s, (enum prompt_kind)kind, NULL, bytes, 256, &o),
                  REP_ACCEPTED);
        eh_run_to_end(h, s);
        assert_true(eh_stream(h, s)->end.u.end.tokens_in >= 200);
        assert_int_equal(eh_stream(h, s)->n_ids, 5);
    }
    eh_close(&h);
}

static void a_prompt_longer_than_its_budget_is_pruned_on_the_way(void **state)
{
    (void)state;
    static const char *const policies[] = {"counter_causal_fast", "counter_causal", "h2o", "tova",
                                           "sliding_window",      "random"};
    struct eh *h = eh_open("tiny-llama.gguf", NULL, NULL);
    int32_t ids[900];
    for (int i = 0; i < 900; i++)
        ids[i] = 3 + (i * i + 7 * i) % 280;
    for (size_t p = 0; p < ARRAY_LEN(policies); p++) {
        struct generate_options o = eh_greedy(20);
        uint64_t s = eh_session(h, &(struct eh_ask){.policy = policies[p], .budget_tokens = 65});
        eh_ids(h, s, ids, 900, &o);
        eh_run_to_end(h, s);
        struct eh_stream *st = eh_stream(h, s);
        assert_int_equal(st->end.u.end.tokens_in, 900);
        assert_int_equal(st->end.u.end.tokens_out, 20);
        assert_true(st->end.u.end.tokens_cached <= 65);
        assert_int_equal(st->end.u.end.tokens_cached + st->end.u.end.tokens_dropped, 919);
        assert_int_equal(st->end.u.end.prunes, st->n_prunes);
        eh_close_session(h, s);
    }
    /* without a policy it is refused, with the numbers */
    struct generate_options o = eh_greedy(20);
    uint64_t s = eh_session(h, &(struct eh_ask){.policy = "none", .budget_tokens = 65});
    const struct err *e =
        eh_expect_error(h, eh_post_ids(h, s, ids, 66, &o), BC_EBUDGET, "budget_tokens");
    assert_int_equal(e->needed, 66);
    assert_int_equal(e->available, 65);
    eh_ids(h, s, ids, 60, &o);
    eh_run_to_end(h, s);
    assert_int_equal(eh_stream(h, s)->end.u.end.reason, END_BUDGET);
    assert_int_equal(eh_stream(h, s)->n_ids, 6);
    eh_close(&h);
}

static void the_trained_context_ends_an_answer(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-llama.gguf", NULL, NULL);
    struct generate_options o = eh_greedy(100);
    int32_t ids[1024];
    for (int i = 0; i < 1024; i++)
        ids[i] = 3 + i % 280;
    uint64_t s = eh_session(h, &(struct eh_ask){.budget_tokens = 100});
    eh_ids(h, s, ids, 1000, &o);
    eh_run_to_end(h, s);
    struct eh_stream *st = eh_stream(h, s);
    assert_int_equal(st->end.u.end.reason, END_CONTEXT);
    assert_int_equal(st->n_ids, 25); /* the last one stands at 1024, and is not cached */
    assert_int_equal(st->streams[24], 1024);
    eh_expect_error(h, eh_post_ids(h, s, ids, 1, &o), BC_ECONTEXT, "ids");
    eh_close_session(h, s);
    s = eh_session(h, &(struct eh_ask){.budget_tokens = 100});
    eh_ids(h, s, ids, 1024, &o); /* exactly full: one token can still be said */
    eh_run_to_end(h, s);
    assert_int_equal(eh_stream(h, s)->end.u.end.reason, END_CONTEXT);
    assert_int_equal(eh_stream(h, s)->n_ids, 1);
    eh_close(&h);
}

/* Megabytes that cannot fit are refused without being cut into tokens first. */
static void far_too_long_is_said_at_once(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-llama.gguf", NULL, NULL);
    struct generate_options o = eh_greedy(1);
    uint64_t s = eh_session(h, &(struct eh_ask){.budget_tokens = 100});
    size_t len = 4u << 20;
    char *text = malloc(len);
    memset(text, 'a', len);
    for (unsigned kind = PROMPT_CHAT; kind <= PROMPT_RAW; kind++) {
        uint32_t id = eh_post_text(h, s, (enum prompt_kind)kind, "user", text, len, &o);
        const struct err *e = eh_expect_error(h, id, BC_ECONTEXT, "text");
        assert_int_equal(e->available, 1024);
        assert_true(e->needed > 1024 && e->needed < len);
        assert_non_null(strstr(e->text, "4194304 bytes"));
    }
    /* a few bytes too many for the context are counted in tokens, as ever */
    uint32_t id = eh_post_text(h, s, PROMPT_RAW, "user", text, 3000, &o);
    assert_non_null(strstr(eh_expect_error(h, id, BC_ECONTEXT, "text")->text, "ends at token"));
    free(text);
    eh_text(h, s, PROMPT_RAW, "and short ones go on", &o);
    eh_run_to_end(h, s);
    eh_close(&h);
}

static void options_of_the_engine_are_checked(void **state)
{
    (void)state;
    struct engine *en = NULL;
    struct err e = {0};
    struct engine_options o = {.backend = "ref", .kv_memory = 0};
    assert_int_equal(engine_open(&en, &o, &e), BC_EINVALID);
    assert_string_equal(e.field, "kv_memory");
    o.kv_memory = 1 << 20;
    o.max_rows = 3;
    assert_int_equal(engine_open(&en, &o, &e), BC_EINVALID);
    assert_string_equal(e.field, "max_rows");
    o.max_rows = 0;
    o.activations = 7;
    assert_int_equal(engine_open(&en, &o, &e), BC_EINVALID);
    assert_string_equal(e.field, "activations");
    o.activations = 0;
    o.default_model = "/nowhere.gguf";
    assert_int_equal(engine_open(&en, &o, &e), BC_ENOTFOUND);
    o.default_model = TEST_VECTORS "/tiny-llama.gguf";
    o.backend = "abacus";
    assert_int_equal(engine_open(&en, &o, &e), BC_EUNSUPPORTED);
    assert_string_equal(e.field, "backend");
    assert_null(en);
    o.backend = "ref";
    o.kv_memory = 1000; /* opens; but no page fits */
    assert_int_equal(engine_open(&en, &o, &e), BC_OK);
    engine_close(&en);
}

static void full_tables_say_so(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-llama.gguf", NULL, NULL);
    for (int i = 0; i < 256; i++)
        eh_session(h, &(struct eh_ask){.budget_tokens = 64});
    const struct err *e = eh_expect_error(h, eh_post_open(h, &(struct eh_ask){.budget_tokens = 64}),
                                          BC_EBUSY, "session");
    assert_int_equal(e->available, 256);
    struct err why = {0};
    struct command *c = NULL;
    for (uint32_t i = 0; i <= ENGINE_INBOX_MAX; i++) {
        c = eh_command(h, CMD_STAT, 1);
        int rc = engine_post(h->en, &c, &why);
        assert_int_equal(rc, i < ENGINE_INBOX_MAX ? BC_OK : BC_EBUSY);
    }
    assert_non_null(c); /* untouched */
    command_free(&c);
    eh_post(h, eh_command(h, CMD_GONE, 0)); /* never refused */
    eh_run(h);
    the_engine_works(h);
    eh_close(&h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_sessions_are_refused_by_field),
        cmocka_unit_test(empty_prompts_are_refused_unless_something_waits),
        cmocka_unit_test(bad_prompts_leave_the_session_as_it_was),
        cmocka_unit_test(any_bytes_are_text),
        cmocka_unit_test(a_prompt_longer_than_its_budget_is_pruned_on_the_way),
        cmocka_unit_test(the_trained_context_ends_an_answer),
        cmocka_unit_test(far_too_long_is_said_at_once),
        cmocka_unit_test(options_of_the_engine_are_checked),
        cmocka_unit_test(full_tables_say_so),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
