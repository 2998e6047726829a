/* Every field of every request with every kind of wrong value: refused by its name, nothing changed,
 * the session as good as before. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "daemon_harness.h"
#include "raw_client.h"

#define TEXT_MAX_TEST 16384 /* the longest inline prompt */

static struct dh *d;
static struct raw *r;
static struct raw_session *s;

static int start(void **state)
{
    (void)state;
    const char *const args[] = {"--limit-max-tokens=5000", NULL};
    d = dh_start("tiny-llama.gguf", args);
    r = raw_connect(d->socket);
    raw_hello(r);
    s = raw_open(r, NULL);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    raw_session_free(&s);
    raw_close(&r);
    dh_stop(&d);
    return 0;
}

static ProtobufCBinaryData text(const char *t)
{
    return (ProtobufCBinaryData){strlen(t), (uint8_t *)(uintptr_t)t};
}

#define OPEN_REFUSED(code, field, ...)                                                             \
    do {                                                                                           \
        Backcast__OpenSession m = BACKCAST__OPEN_SESSION__INIT;                                    \
        __VA_ARGS__;                                                                               \
        raw_call_fails(r, FRAME_OPEN_SESSION, &m.base, code, field);                               \
    } while (0)
#define SET(f, v) (m.has_##f = 1, m.f = (v))

static void open_session(void **state)
{
    (void)state;
    char longer[100];
    memset(longer, 'a', 99);
    longer[99] = '\0';
    OPEN_REFUSED(2, "model", SET(model, text("nobody-knows-me")));
    OPEN_REFUSED(13, "model", SET(model, text("/nowhere/at/all.gguf")));
    OPEN_REFUSED(1, "model", SET(model, text("a\nb")));
    OPEN_REFUSED(1, "budget_tokens", SET(budget_bytes, 1 << 20), SET(budget_tokens, 64));
    OPEN_REFUSED(1, "budget_tokens", SET(budget_tokens, UINT32_MAX));
    OPEN_REFUSED(4, "budget_bytes", SET(budget_bytes, 5)); /* less than a page */
    OPEN_REFUSED(1, "keep_tokens", SET(keep_tokens, UINT32_MAX));
    OPEN_REFUSED(1, "keep_tokens", SET(budget_tokens, 64), SET(keep_tokens, 64));
    OPEN_REFUSED(2, "policy", SET(policy, text("no_such_policy")));
    OPEN_REFUSED(1, "policy", SET(policy, text(longer)));
    OPEN_REFUSED(2, "score", SET(score, text("guess")));
    OPEN_REFUSED(1, "span", SET(span, 0));
    OPEN_REFUSED(1, "span", SET(span, 4));
    OPEN_REFUSED(1, "span", SET(span, 257));
    OPEN_REFUSED(1, "span_quantile", SET(span_quantile, NAN));
    OPEN_REFUSED(1, "span_quantile", SET(span_quantile, -0.5f));
    OPEN_REFUSED(1, "span_quantile", SET(span_quantile, 1.5f));
    OPEN_REFUSED(1, "span_quantile", SET(span_quantile, INFINITY));
    OPEN_REFUSED(1, "min_gap", SET(min_gap, UINT32_MAX));
    OPEN_REFUSED(1, "recent_tokens", SET(recent_tokens, UINT32_MAX - 1));
    OPEN_REFUSED(1, "frozen_tokens", SET(frozen_tokens, UINT32_MAX - 1));
    OPEN_REFUSED(1, NULL, SET(budget_tokens, 64), SET(frozen_tokens, 64));
    OPEN_REFUSED(2, "trigger", SET(trigger, text("sometimes")));
    OPEN_REFUSED(2, "kv_type", SET(kv_type, text("q2_k")));
    OPEN_REFUSED(2, "positions", SET(positions, text("spin")));
    OPEN_REFUSED(1, "positions", SET(positions, text("rerotate")), SET(policy, text("none")));
    OPEN_REFUSED(1, "positions", SET(positions, text("rerotate")), SET(budget_tokens, 1025));
    OPEN_REFUSED(1, "positions", SET(positions, text(longer)));
    OPEN_REFUSED(1, "name", SET(name, text("a b")));
    OPEN_REFUSED(1, "name", SET(name, text("../../etc")));
    OPEN_REFUSED(1, "name", SET(name, text(longer)));
    OPEN_REFUSED(1, "priority", SET(priority, 101));
    OPEN_REFUSED(1, "priority", SET(priority, -101));
    OPEN_REFUSED(2, "chat_template", SET(chat_template, text("no-such-template")));
    OPEN_REFUSED(1, "ring_bytes", SET(ring_bytes, 5000));
    OPEN_REFUSED(1, "ring_bytes", SET(ring_bytes, 2048));
    OPEN_REFUSED(1, "ring_bytes", SET(ring_bytes, 8u << 20));
    Backcast__OpenSession m = BACKCAST__OPEN_SESSION__INIT;
    SET(name, text("taken"));
    struct raw_session *named = raw_open(r, &m);
    raw_call_fails(r, FRAME_OPEN_SESSION, &m.base, 5, "name");
    Backcast__Close c = BACKCAST__CLOSE__INIT;
    c.has_session = 1;
    c.session = named->id;
    raw_call(r, FRAME_CLOSE, &c.base, FRAME_CLOSED);
    raw_session_free(&named);
    named = raw_open(r, &m); /* free again */
    c.session = named->id;
    raw_call(r, FRAME_CLOSE, &c.base, FRAME_CLOSED);
    raw_session_free(&named);
}

#define GENERATE_REFUSED(code, field, ...)                                                         \
    do {                                                                                           \
        Backcast__Generate m = BACKCAST__GENERATE__INIT;                                           \
        SET(session, s->id);                                                                       \
        SET(kind, 1);                                                                              \
        SET(text, text("hello"));                                                                  \
        __VA_ARGS__;                                                                               \
        raw_call_fails(r, FRAME_GENERATE, &m.base, code, field);                                   \
    } while (0)

static void generate(void **state)
{
    (void)state;
    static char big[TEXT_MAX_TEST + 1];
    static char stop_text[300];
    int32_t ids[3] = {1, 2, 3}, wrong[2] = {5, 100000}, negative[1] = {-1};
    ProtobufCBinaryData stops[9], empty = {0, NULL}, longer = {257, (uint8_t *)stop_text};
    memset(big, 'a', sizeof big);
    memset(stop_text, 'b', sizeof stop_text);
    for (unsigned i = 0; i < 9; i++)
        stops[i] = text("x");
    GENERATE_REFUSED(1, "session", m.has_session = 0);
    GENERATE_REFUSED(2, "session", SET(session, 123456));
    GENERATE_REFUSED(1, "kind", SET(kind, 3));
    GENERATE_REFUSED(1, "text", SET(text, ((ProtobufCBinaryData){sizeof big, (uint8_t *)big})));
    GENERATE_REFUSED(1, "text", m.has_text = 0);
    GENERATE_REFUSED(1, "ring_bytes", SET(ring_bytes, 5));
    GENERATE_REFUSED(1, "ids", m.ids = ids, m.n_ids = 3);
    GENERATE_REFUSED(1, "text", SET(kind, 2), m.ids = ids, m.n_ids = 3);
    GENERATE_REFUSED(1, "ids", SET(kind, 2), m.has_text = 0);
    GENERATE_REFUSED(1, "ids", SET(kind, 2), m.has_text = 0, m.ids = wrong, m.n_ids = 2);
    GENERATE_REFUSED(1, "ids", SET(kind, 2), m.has_text = 0, m.ids = negative, m.n_ids = 1);
    GENERATE_REFUSED(1, "ring_bytes", SET(kind, 2), m.has_text = 0, SET(ring_bytes, 40));
    GENERATE_REFUSED(1, "max_tokens", SET(max_tokens, 5001));
    GENERATE_REFUSED(1, "temperature", SET(temperature, -1));
    GENERATE_REFUSED(1, "temperature", SET(temperature, NAN));
    GENERATE_REFUSED(1, "temperature", SET(temperature, INFINITY));
    GENERATE_REFUSED(1, "top_p", SET(top_p, 2));
    GENERATE_REFUSED(1, "top_p", SET(top_p, NAN));
    GENERATE_REFUSED(1, "min_p", SET(min_p, -0.1f));
    GENERATE_REFUSED(1, "min_p", SET(min_p, NAN));
    GENERATE_REFUSED(1, "repeat_penalty", SET(repeat_penalty, 0));
    GENERATE_REFUSED(1, "repeat_penalty", SET(repeat_penalty, NAN));
    GENERATE_REFUSED(1, "repeat_last", SET(repeat_last, UINT32_MAX));
    GENERATE_REFUSED(1, "stop", m.stop = stops, m.n_stop = 9);
    GENERATE_REFUSED(1, "stop", m.stop = &empty, m.n_stop = 1);
    GENERATE_REFUSED(1, "stop", m.stop = &longer, m.n_stop = 1);
    GENERATE_REFUSED(1, "n_logprobs", SET(n_logprobs, 21));
    GENERATE_REFUSED(1, "role", SET(kind, 0), SET(role, text("a role that is far too long")));
    GENERATE_REFUSED(1, "role", SET(kind, 0), SET(role, text("nobody")));
    /* nothing of all that is left */
    Backcast__Generate m = BACKCAST__GENERATE__INIT;
    SET(max_tokens, 3);
    SET(ignore_end, 1);
    raw_generate(s, "hello", 5, &m);
    raw_collect(s);
    assert_int_equal(s->n_ids, 3);
    /* an empty prompt after the first one, invalid UTF-8, NUL bytes: text is bytes */
    static const char odd[] = "\xff\xfe\x80 \0 \xe2\x82";
    raw_generate(s, odd, sizeof odd - 1, &m);
    raw_collect(s);
    assert_int_equal(s->end.reason, END_LENGTH);
}

static void the_rest(void **state)
{
    (void)state;
    {
        Backcast__SetBudget m = BACKCAST__SET_BUDGET__INIT;
        raw_call_fails(r, FRAME_SET_BUDGET, &m.base, 1, "session");
        SET(session, s->id);
        raw_call_fails(r, FRAME_SET_BUDGET, &m.base, 1, "budget_bytes");
        SET(budget_tokens, 64);
        SET(budget_bytes, 1 << 20);
        raw_call_fails(r, FRAME_SET_BUDGET, &m.base, 1, "budget_bytes");
        m.budget_bytes = 0;
        SET(keep_tokens, 64);
        raw_call_fails(r, FRAME_SET_BUDGET, &m.base, 1, "keep_tokens");
        SET(keep_tokens, 40);
        Backcast__BudgetSet *b = raw_call(r, FRAME_SET_BUDGET, &m.base, FRAME_BUDGET_SET);
        assert_int_equal(b->budget_tokens, 64);
        assert_int_equal(b->keep_tokens, 40);
    }
    {
        Backcast__Prune m = BACKCAST__PRUNE__INIT;
        raw_call_fails(r, FRAME_PRUNE, &m.base, 1, "session");
        SET(session, s->id);
        SET(keep_tokens, UINT32_MAX);
        raw_call_fails(r, FRAME_PRUNE, &m.base, 1, "keep_tokens");
    }
    {
        Backcast__Scores m = BACKCAST__SCORES__INIT;
        raw_call_fails(r, FRAME_SCORES, &m.base, 1, "session");
        SET(session, 0);
        raw_call_fails(r, FRAME_SCORES, &m.base, 2, "session");
    }
    {
        Backcast__Close m = BACKCAST__CLOSE__INIT;
        raw_call_fails(r, FRAME_CLOSE, &m.base, 1, "session");
        SET(session, UINT64_MAX);
        raw_call_fails(r, FRAME_CLOSE, &m.base, 2, "session");
    }
    {
        Backcast__Cancel m = BACKCAST__CANCEL__INIT;
        raw_call_fails(r, FRAME_CANCEL, &m.base, 1, "session");
        SET(session, s->id);
        raw_call(r, FRAME_CANCEL, &m.base, FRAME_DONE); /* nothing under way: nothing happens */
    }
    {
        Backcast__Attach m = BACKCAST__ATTACH__INIT;
        raw_call_fails(r, FRAME_ATTACH, &m.base, 1, "name");
        SET(session, s->id);
        SET(token, ((ProtobufCBinaryData){16, s->token}));
        raw_call_fails(r, FRAME_ATTACH, &m.base, 6, "session"); /* it has no name */
        m.token.len = 15;
        raw_call_fails(r, FRAME_ATTACH, &m.base, 9, "token");
    }
}

static void models(void **state)
{
    (void)state;
    Backcast__LoadModel m = BACKCAST__LOAD_MODEL__INIT;
    raw_call_fails(r, FRAME_LOAD_MODEL, &m.base, 1, "model");
    SET(model, text("nobody-knows-me"));
    raw_call_fails(r, FRAME_LOAD_MODEL, &m.base, 2, "model");
    SET(model, text(TEST_VECTORS "/README.md"));
    raw_call_fails(r, FRAME_LOAD_MODEL, &m.base, 12, NULL);
    SET(model, text(TEST_VECTORS "/tiny-qwen2.gguf"));
    raw_call(r, FRAME_LOAD_MODEL, &m.base, FRAME_DONE);
    Backcast__OpenSession o = BACKCAST__OPEN_SESSION__INIT;
    o.has_model = 1;
    o.model = m.model;
    struct raw_session *q = raw_open(r, &o);
    Backcast__UnloadModel u = BACKCAST__UNLOAD_MODEL__INIT;
    u.has_model = 1;
    u.model = m.model;
    raw_call_fails(r, FRAME_UNLOAD_MODEL, &u.base, 5, "model"); /* in use */
    Backcast__Close c = BACKCAST__CLOSE__INIT;
    c.has_session = 1;
    c.session = q->id;
    raw_call(r, FRAME_CLOSE, &c.base, FRAME_CLOSED);
    raw_call(r, FRAME_UNLOAD_MODEL, &u.base, FRAME_DONE);
    raw_session_free(&q);
}

/* Random bytes and random mutations of real requests: an answer each time, and the daemon lives. */
static void mutated_requests(void **state)
{
    (void)state;
    Backcast__Generate g = BACKCAST__GENERATE__INIT;
    Backcast__OpenSession o = BACKCAST__OPEN_SESSION__INIT;
    struct raw *f = raw_connect(d->socket);
    uint8_t good[2][256], bytes[256];
    size_t len[2];
    uint32_t x = 77;
    raw_hello(f);
    g.has_session = g.has_kind = g.has_text = g.has_max_tokens = g.has_top_p = 1;
    g.session = s->id;
    g.kind = 1;
    g.text = text("some text");
    g.max_tokens = 2;
    g.top_p = 0.5f;
    o.has_policy = o.has_budget_tokens = o.has_span = o.has_name = 1;
    o.policy = text("h2o");
    o.budget_tokens = 128;
    o.span = 3;
    o.name = text("fuzz");
    len[0] = protobuf_c_message_pack(&g.base, good[0]);
    len[1] = protobuf_c_message_pack(&o.base, good[1]);
    unsigned answers = 0;
    for (unsigned i = 0; i < 1500; i++) {
        unsigned w = i % 2;
        memcpy(bytes, good[w], len[w]);
        for (unsigned k = 0; k <= i % 5; k++) {
            x = x * 1664525u + 1013904223u;
            bytes[(x >> 8) % len[w]] = (uint8_t)(x >> 20);
        }
        raw_send_flags(f, w == 0 ? FRAME_GENERATE : FRAME_OPEN_SESSION, 0, bytes, len[w]);
        int rc = raw_recv(f, RAW_TIMEOUT_MS);
        if (rc != 1)
            fail_msg("no answer to mutation %u", i);
        answers++;
        if (f->h.type == FRAME_SESSION_OPENED) { /* close it: names and sessions are limited */
            Backcast__Close c = BACKCAST__CLOSE__INIT;
            c.has_session = 1;
            c.session = ((Backcast__SessionOpened *)f->m)->session;
            raw_call(f, FRAME_CLOSE, &c.base, FRAME_CLOSED);
        }
    }
    assert_int_equal(answers, 1500);
    raw_close(&f);
    assert_true(dh_alive(d));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(open_session),     cmocka_unit_test(generate),
        cmocka_unit_test(the_rest),         cmocka_unit_test(models),
        cmocka_unit_test(mutated_requests),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
