/* Conversations: each call renders only its own turn, and what is cached in the end is what one
 * prompt with the whole conversation would have put there. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "daemon_harness.h"
#include "engine_harness.h"
#include "records.h"

#define HISTORY_MAX 2048u

/* The model's own vocabulary and template, to render by hand. */
static struct tok *T;
static struct chat *C;

static int setup(void **state)
{
    (void)state;
    struct gguf *g;
    struct err e = {0};
    if (gguf_open(&g, TEST_VECTORS "/tiny-llama.gguf", &e) < 0 || tok_open(&T, g, &e) < 0 ||
        chat_open(&C, g, T, NULL, &e) < 0)
        fail_msg("%s", e.text);
    gguf_close(&g);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    chat_close(&C);
    tok_close(&T);
    return 0;
}

/* All tokens that a conversation should have put into the stream. */
struct history {
    int32_t ids[HISTORY_MAX];
    size_t n, n_system;
    enum chat_state chat;
};

static void history_add(struct history *k, const int32_t *ids, size_t n)
{
    assert_true(k->n + n <= HISTORY_MAX);
    if (n > 0)
        memcpy(k->ids + k->n, ids, n * sizeof *ids);
    k->n += n;
}

static void history_turn(struct history *k, const char *role, const char *text, bool answer)
{
    struct chat_turn t;
    struct err e = {0};
    if (chat_render(C, k->chat, role, text, strlen(text), answer, &t, &e) < 0)
        fail_msg("%s", e.text);
    if (k->n == 0)
        k->n_system = t.n_system;
    history_add(k, t.ids, t.n);
    k->chat = t.state;
    chat_turn_free(&t);
}

/* What the engine said since the last turn. */
static void history_answer(struct history *k, const struct eh_stream *s)
{
    for (uint32_t i = 0; i < s->n_ids; i++)
        assert_int_equal(s->streams[i], k->n + i);
    history_add(k, s->ids, s->n_ids);
    if (s->end.u.end.end_id != UINT32_MAX) {
        int32_t end = (int32_t)s->end.u.end.end_id;
        assert_true(tok_is_end(T, end));
        history_add(k, &end, 1);
        k->chat = CHAT_ENDED;
    } else if (s->n_ids > 0) {
        k->chat = CHAT_OPEN;
    }
    assert_int_equal(s->end.u.end.chat, k->chat);
}

static void say(struct eh *h, uint64_t s, struct history *k, const char *role, const char *text,
                const struct generate_options *o)
{
    bool answer = o->max_tokens > 0 && strcmp(role, "user") == 0;
    history_turn(k, role, text, answer);
    eh_forget(h, s);
    eh_expect(h, eh_post_text(h, s, PROMPT_CHAT, role, text, strlen(text), o), REP_ACCEPTED);
    eh_run_to_end(h, s);
    history_answer(k, eh_stream(h, s));
}

/* The same conversation as one prompt of ids, in a session of its own: the next words are the
 * same. */
static void check_history(struct eh *h, uint64_t s, const struct history *k)
{
    struct generate_options o = eh_greedy(12);
    uint64_t twin = eh_session(h, &(struct eh_ask){.policy = "none", .kv_type = "f32"});
    eh_forget(h, s);
    int32_t more[] = {40, 41, 42}; /* after whatever was pending */
    eh_ids(h, s, more, 3, &o);
    eh_run_to_end(h, s);
    eh_ids(h, twin, k->ids, k->n,
           &(struct generate_options){
               .max_tokens = 0, .top_p = 1, .repeat_penalty = 1, .n_logprobs = -1});
    eh_run_to_end(h, twin);
    eh_ids(h, twin, more, 3, &o);
    eh_run_to_end(h, twin);
    assert_int_equal(eh_stream(h, s)->n_ids, 12);
    assert_int_equal(eh_stream(h, s)->streams[0], k->n + 3);
    assert_memory_equal(eh_stream(h, s)->ids, eh_stream(h, twin)->ids, 12 * sizeof(int32_t));
    eh_close_session(h, twin);
}

/* Options whose answers end in every way. */
static struct generate_options way(uint32_t i)
{
    struct generate_options o;
    generate_options_init(&o);
    o.max_tokens = 1 + i * 7 % 40;
    if (i % 3 == 1) {
        o.temperature = 3; /* end tokens come up */
        o.max_tokens = 300;
        o.seed = i;
    }
    if (i % 3 == 2) {
        o.temperature = 1;
        o.seed = i;
        o.n_stop = 2;
        o.stop[0].len = o.stop[1].len = 1;
        o.stop[0].bytes[0] = 'e';
        o.stop[1].bytes[0] = ' ';
        o.max_tokens = 100;
    }
    return o;
}

static void a_conversation_is_one_text(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-llama.gguf", NULL, NULL);
    uint32_t reasons[8] = {0}, ended_by_token = 0;
    for (uint32_t round = 0; round < 12; round++) {
        struct history k = {.chat = CHAT_FRESH};
        uint64_t s = eh_session(h, &(struct eh_ask){.policy = "none", .kv_type = "f32"});
        struct generate_options none = way(0);
        none.max_tokens = 0;
        if (round % 2 == 0)
            say(h, s, &k, "system", "You say little.", &none);
        if (round % 3 == 0) {
            say(h, s, &k, "user", "before", &none);
            say(h, s, &k, "assistant", "an example", &none);
        }
        for (uint32_t i = 0; i < 3 && k.n < 500; i++) {
            struct generate_options o = way(round + i);
            say(h, s, &k, "user", i == 1 ? "<|im_end|> and \xff" : "hello there", &o);
            struct eh_stream *st = eh_stream(h, s);
            reasons[st->end.u.end.reason]++;
            ended_by_token += st->end.u.end.end_id != UINT32_MAX;
            if (o.n_stop > 0)
                assert_null(strpbrk(st->text, "e "));
        }
        check_history(h, s, &k);
        eh_close_session(h, s);
    }
    assert_true(reasons[END_LENGTH] > 5 && reasons[END_STOP] > 5 && ended_by_token > 3);
    eh_close(&h);
}

static uint32_t frozen_of(struct eh *h, uint64_t s)
{
    return eh_expect(h, eh_post(h, eh_command(h, CMD_STAT, s)), REP_STAT)->u.stat.sessions->frozen;
}

static void frozen_auto_is_the_system_message(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-llama.gguf", NULL, NULL);
    struct eh_ask ask = {.policy = "sliding_window",
                         .budget_tokens = 90,
                         .frozen = EVICT_FROZEN_AUTO};
    struct history k = {.chat = CHAT_FRESH};
    uint64_t s = eh_session(h, &ask);
    assert_int_equal(frozen_of(h, s), EVICT_FROZEN_AUTO);
    struct generate_options o = eh_greedy(120);
    say(h, s, &k, "system", "Keep this in mind.", &o); /* no answer: it is a system message */
    assert_int_equal(eh_stream(h, s)->n_ids, 0);
    assert_int_equal(eh_stream(h, s)->end.u.end.reason, END_LENGTH);
    assert_int_equal(frozen_of(h, s), k.n_system);
    assert_int_equal(k.n_system, k.n);
    say(h, s, &k, "user", "go on and on", &o);
    assert_true(eh_stream(h, s)->n_prunes > 2);
    for (uint32_t i = 0; i < eh_stream(h, s)->n_prunes; i++)
        assert_true(eh_stream(h, s)->prunes[i].ranges[0].first >= k.n_system);
    /* raw text first: nothing is frozen, now or later */
    uint64_t raw = eh_session(h, &ask);
    eh_text(h, raw, PROMPT_RAW, "once",
            &(struct generate_options){
                .max_tokens = 0, .top_p = 1, .repeat_penalty = 1, .n_logprobs = -1});
    eh_run_to_end(h, raw);
    assert_int_equal(frozen_of(h, raw), 0);
    eh_text(h, raw, PROMPT_CHAT, "hello", &o);
    eh_run_to_end(h, raw);
    assert_int_equal(frozen_of(h, raw), 0);
    /* a first chat without a system message: this template has no default one */
    uint64_t plain = eh_session(h, &ask);
    eh_text(h, plain, PROMPT_CHAT, "hello", &o);
    eh_run_to_end(h, plain);
    assert_int_equal(frozen_of(h, plain), 0);
    eh_close(&h);
}

static void tiny_chunks(struct engine_options *o, void *arg)
{
    (void)arg;
    o->prefill_chunk = 4;
}

static void a_system_message_that_was_cut_freezes_what_is_there(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-llama.gguf", tiny_chunks, NULL);
    struct generate_options o = eh_greedy(0);
    uint64_t s = eh_session(h, &(struct eh_ask){.budget_tokens = 200, .frozen = EVICT_FROZEN_AUTO});
    const char *text = "A long system message that takes many steps to read.";
    uint32_t r = eh_post_text(h, s, PROMPT_CHAT, "system", text, strlen(text), &o);
    uint32_t c = eh_post(h, eh_command(h, CMD_CANCEL, s)); /* before it began */
    eh_expect(h, r, REP_ACCEPTED);
    eh_expect(h, c, REP_DONE);
    eh_run_to_end(h, s);
    assert_int_equal(eh_stream(h, s)->end.u.end.reason, END_CANCELLED);
    assert_int_equal(eh_stream(h, s)->end.u.end.chat, CHAT_FRESH);
    assert_int_equal(frozen_of(h, s), EVICT_FROZEN_AUTO);
    r = eh_post_text(h, s, PROMPT_CHAT, "system", text, strlen(text), &o);
    eh_expect(h, r, REP_ACCEPTED);
    eh_step(h);
    eh_expect(h, eh_post(h, eh_command(h, CMD_CANCEL, s)), REP_DONE);
    eh_run_to_end(h, s);
    assert_int_equal(eh_stream(h, s)->end.u.end.reason, END_CANCELLED);
    assert_int_equal(eh_stream(h, s)->end.u.end.chat, CHAT_OPEN);
    assert_true(frozen_of(h, s) > 0 && frozen_of(h, s) < 20);
    assert_int_equal(frozen_of(h, s), eh_stream(h, s)->end.u.end.tokens_cached);
    eh_close(&h);
}

static void a_cancelled_prompt_in_intake_is_answered_at_once(void **state)
{
    (void)state;
    char path[] = "/tmp/backcast-chat-XXXXXX.gguf"; /* of a model that could read it all */
    int fd = mkstemps(path, 5);
    assert_true(fd >= 0);
    close(fd);
    dh_long_model(path);
    struct eh *h = eh_open(path, NULL, NULL);
    unlink(path);
    struct generate_options o = eh_greedy(5);
    uint64_t s = eh_session(h, &(struct eh_ask){.budget_tokens = 64});
    eh_start(h); /* now intake is a thread that has a long text to read */
    size_t n = 4u << 20;
    char *text = malloc(n);
    assert_non_null(text);
    memset(text, 'y', n);
    uint32_t r = eh_post_text(h, s, PROMPT_RAW, NULL, text, n, &o);
    uint32_t busy = eh_post_text(h, s, PROMPT_RAW, NULL, "me too", 6, &o);
    uint32_t c = eh_post(h, eh_command(h, CMD_CANCEL, s));
    eh_expect_error(h, busy, BC_EBUSY, "session");
    const struct report *first = eh_reply(h, r);
    eh_expect(h, c, REP_DONE);
    if (first->type == REP_ACCEPTED) { /* else intake was faster, and the text does not fit */
        eh_run_to_end(h, s);
        assert_int_equal(eh_stream(h, s)->end.u.end.reason, END_CANCELLED);
    } else {
        eh_expect_error(h, r, BC_ECONTEXT, "text");
    }
    eh_text(h, s, PROMPT_RAW, "short", &o); /* and the session is free again */
    eh_run_to_end(h, s);
    assert_int_equal(eh_stream(h, s)->n_ids, 5);
    free(text);
    eh_close(&h);
}

/* ---- log-probabilities ---- */

static void log_probabilities_of_prompt_and_answer(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-llama.gguf", tiny_chunks, NULL);
    struct generate_options o = eh_greedy(6);
    int32_t ids[30];
    for (int i = 0; i < 30; i++)
        ids[i] = 3 + i * 17 % 280;
    o.prompt_logprobs = true;
    o.n_logprobs = 20;
    uint64_t s = eh_session(h, &(struct eh_ask){.policy = "none", .kv_type = "f32"});
    eh_ids(h, s, ids, 30, &o);
    eh_run_to_end(h, s);
    struct eh_stream *a = eh_stream(h, s);
    assert_int_equal(a->n_logprobs, 29 + 6);
    for (uint32_t i = 0; i < a->n_logprobs; i++) {
        const struct report *r = &a->logprobs[i];
        assert_int_equal(r->u.logprob.stream, i + 1);
        assert_int_equal(r->u.logprob.prompt, i < 29);
        assert_int_equal(r->u.logprob.id, i < 29 ? ids[i + 1] : a->ids[i - 29]);
        assert_int_equal(r->u.logprob.n_top, 20);
        float sum = 0;
        for (int t = 0; t < 20; t++) {
            sum += expf(r->u.logprob.top[t].logprob);
            assert_true(t == 0 || r->u.logprob.top[t].logprob <= r->u.logprob.top[t - 1].logprob);
        }
        assert_true(sum > 0 && sum < 1.0001f);
        assert_true(r->u.logprob.logprob <= 0);
        if (i >= 29) /* greedy */
            assert_true(r->u.logprob.top[0].id == r->u.logprob.id);
    }
    /* the answer's, judged as a prompt by another session: the same numbers */
    int32_t all[36];
    memcpy(all, ids, sizeof ids);
    memcpy(all + 30, a->ids, 6 * sizeof *all);
    uint64_t t = eh_session(h, &(struct eh_ask){.policy = "none", .kv_type = "f32"});
    o.max_tokens = 0;
    o.n_logprobs = -1;
    eh_ids(h, t, all, 36, &o);
    eh_run_to_end(h, t);
    struct eh_stream *b = eh_stream(h, t);
    assert_int_equal(b->n_logprobs, 35);
    for (uint32_t i = 0; i < 35; i++) {
        assert_true(a->logprobs[i].u.logprob.logprob == b->logprobs[i].u.logprob.logprob);
        assert_int_equal(b->logprobs[i].u.logprob.n_top, 0);
    }
    eh_close(&h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_conversation_is_one_text),
        cmocka_unit_test(frozen_auto_is_the_system_message),
        cmocka_unit_test(a_system_message_that_was_cut_freezes_what_is_there),
        cmocka_unit_test(a_cancelled_prompt_in_intake_is_answered_at_once),
        cmocka_unit_test(log_probabilities_of_prompt_and_answer),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
