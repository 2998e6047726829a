/* test_client_text.c: what libbackcast hands out of a real daemon: the same text whoever asks, in
 * whatever company, by whichever way the prompt travelled and at whatever pace it is read. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <poll.h>
#include <time.h>
#include "answer.h"
#include "command.h"
#include "daemon_harness.h"
#include "sanitized.h"

static struct dh *d;

static int start(void **state)
{
    const char *args[] = {"--threads=1", NULL};
    *state = d = dh_start_long(args);
    return 0;
}

static void command_and_library_say_the_same(void **state)
{
    (void)state;
    static const char prompt[] = "The mill stands on the north bank of the river.";
    backcast *c = dh_connect(d);
    struct answer a = {0};
    struct backcast_session_options so = answer_budget("counter_causal_fast", 64);
    struct backcast_generate_options go = answer_options(120);
    const char *argv[] = {
        TEST_BIN "/backcast", "run", "--socket",     d->socket, "--raw", "--budget", "64t",
        "--max-tokens",       "120", "--ignore-end", prompt,    NULL};

    answer_ask(c, &so, prompt, strlen(prompt), &go, &a);
    struct prog_result r = prog_run(argv, NULL, NULL);
    assert_int_equal(r.exit_code, 0);
    assert_int_equal(r.out_len, a.len);
    assert_memory_equal(r.out, a.text, a.len);
    assert_true(a.prunes > 2);
    assert_non_null(strstr(r.err, "forgot ")); /* told on stderr */
    prog_free(&r);
    answer_free(&a);
    backcast_disconnect(&c);
}

/* Eight sessions on two connections, all at once, against each alone. */
static void company_changes_nothing(void **state)
{
    (void)state;
    enum { N = 8 };
    static const char *const policies[N] = {
        "counter_causal_fast", "counter_causal", "tova",    "h2o",
        "sliding_window",      "knorm",          "keydiff", "random"};
    backcast *c[2] = {dh_connect(d), dh_connect(d)};
    backcast_session *s[N];
    struct answer solo[N] = {{0}}, together[N] = {{0}};
    struct backcast_generate_options go = answer_options(60);
    struct backcast_event ev;
    int left = N;

    for (unsigned i = 0; i < N; i++) {
        struct backcast_session_options so = answer_budget(policies[i], 48 + 8 * i);
        char *text = answer_prompt(300 + 50 * i, i);
        answer_ask(c[0], &so, text, strlen(text), &go, &solo[i]);
        free(text);
    }
    for (unsigned i = 0; i < N; i++) {
        struct backcast_session_options so = answer_budget(policies[i], 48 + 8 * i);
        char *text = answer_prompt(300 + 50 * i, i);
        assert_int_equal(backcast_session_open(c[i % 2], &so, &s[i]), 0);
        assert_int_equal(backcast_prompt(s[i], text, strlen(text), &go), 0);
        free(text);
    }
    while (left > 0)
        for (unsigned k = 0; k < 2; k++)
            while (backcast_next(c[k], &ev, 1) == 1)
                for (unsigned i = 0; i < N; i++)
                    if (s[i] == ev.session) {
                        answer_event(&together[i], &ev);
                        left -= ev.type == BACKCAST_END;
                    }
    for (unsigned i = 0; i < N; i++) {
        if (!answer_equal(&solo[i], &together[i]))
            fail_msg("%s: the text differs in company", policies[i]);
        assert_true(solo[i].prunes > 0);
        answer_free(&solo[i]);
        answer_free(&together[i]);
    }
    backcast_disconnect(&c[0]);
    backcast_disconnect(&c[1]);
}

#define LONG_BYTES (SANITIZED ? 17000u : 40000u)

/* A long prompt by ring in one piece; inline in pieces of less than 16 KiB; and at the very limit. */
static void ring_and_inline_prompts_are_the_same_prompt(void **state)
{
    (void)state;
    backcast *c = dh_connect(d);
    backcast_session *s = NULL;
    struct answer by_ring = {0}, by_parts = {0};
    struct backcast_session_options so = answer_budget("counter_causal_fast", 128);
    struct backcast_generate_options go = answer_options(40), none = answer_options(0);
    char *text = answer_prompt(LONG_BYTES, 7);
    size_t at = 0;

    so.ring_bytes = 4096; /* many turns of the ring */
    answer_ask(c, &so, text, LONG_BYTES, &go, &by_ring);
    assert_true(by_ring.tokens_in > LONG_BYTES / 10);
    assert_int_equal(backcast_session_open(c, &so, &s), 0);
    while (at < LONG_BYTES) { /* cut before a space: there the tokens do not reach over */
        size_t n = LONG_BYTES - at < 12000 ? LONG_BYTES - at : 12000;
        while (at + n < LONG_BYTES && text[at + n] != ' ')
            n--;
        bool last = at + n == LONG_BYTES;
        struct answer part = {0};
        assert_int_equal(backcast_prompt(s, text + at, n, last ? &go : &none), 0);
        answer_read(c, s, last ? &by_parts : &part);
        answer_free(&part);
        at += n;
    }
    backcast_session_close(&s);
    assert_true(by_ring.n_ids == by_parts.n_ids);
    assert_memory_equal(by_ring.ids, by_parts.ids, by_ring.n_ids * sizeof(int32_t));
    answer_free(&by_ring);
    answer_free(&by_parts);
    for (size_t n = 16383; n <= 16385; n++) {
        struct answer a = {0};
        answer_ask(c, &so, text, n, &none, &a);
        assert_string_equal(a.reason, "length");
        assert_int_equal(a.n_ids, 0);
        answer_free(&a);
    }
    free(text);
    backcast_disconnect(&c);
}

static void ids_text_and_logprobs_agree(void **state)
{
    (void)state;
    static const char prompt[] = "a wheel of oak";
    backcast *c = dh_connect(d);
    backcast_session *s = NULL;
    struct answer a = {0}, b = {0};
    struct backcast_generate_options go = answer_options(30);
    struct backcast_event ev;
    int32_t ids[64];
    size_t n = 0;

    go.n_logprobs = 3;
    go.prompt_logprobs = 1;
    assert_int_equal(backcast_session_open(c, NULL, &s), 0);
    assert_int_equal(backcast_prompt(s, prompt, strlen(prompt), &go), 0);
    while (!a.ended) {
        assert_int_equal(backcast_next(c, &ev, 30000), 1);
        answer_event(&a, &ev);
        if (ev.type != BACKCAST_LOGPROB)
            continue;
        assert_true(ev.logprob.n_top <= 3 && ev.logprob.logprob <= 0);
        if (!ev.logprob.prompt) { /* greedy: the first alternative is the choice */
            assert_int_equal(ev.logprob.n_top, 3);
            assert_int_equal(ev.logprob.top[0].id, ev.logprob.id);
            assert_true(ev.logprob.top[0].logprob >= ev.logprob.top[1].logprob);
        } else { /* the first token follows nothing */
            assert_int_equal(ev.logprob.stream, ++n);
        }
    }
    backcast_session_close(&s);
    assert_int_equal(a.logprobs, 30);
    assert_int_equal(a.prompt_logprobs, a.tokens_in - 1);

    /* the same prompt as ids, from the command's tokenizer */
    char file[96];
    snprintf(file, sizeof(file), "%s/model.gguf", d->dir);
    const char *argv[] = {TEST_BIN "/backcast", "tokenize", "--bos", "-m", file, prompt, NULL};
    struct prog_result r = prog_run(argv, NULL, NULL);
    assert_int_equal(r.exit_code, 0);
    n = 0;
    for (char *p = r.out + 1; n < 64 && *p != '\0' && *p != '\n'; p++) {
        ids[n++] = (int32_t)strtol(p, &p, 10);
        if (*p == ']')
            break;
    }
    prog_free(&r);
    assert_int_equal(n, a.tokens_in);
    assert_int_equal(backcast_session_open(c, NULL, &s), 0);
    assert_int_equal(backcast_prompt_ids(s, ids, n, &go), 0);
    answer_read(c, s, &b);
    backcast_session_close(&s);
    assert_true(answer_equal(&a, &b));
    answer_free(&a);
    answer_free(&b);
    backcast_disconnect(&c);
}

/* A ring of 4 KiB and a reader that dawdles: everything arrives, in order. */
static void slow_reader_gets_everything(void **state)
{
    (void)state;
    backcast *c = dh_connect(d);
    backcast_session *s = NULL;
    struct backcast_session_options so = answer_budget("counter_causal_fast", 256);
    struct backcast_generate_options go = answer_options(1500);
    struct answer quick = {0}, slow = {0};
    struct backcast_event ev;
    unsigned n = 0;

    answer_ask(c, &so, "water", 5, &go, &quick);
    so.ring_bytes = 4096;
    assert_int_equal(backcast_session_open(c, &so, &s), 0);
    assert_int_equal(backcast_prompt(s, "water", 5, &go), 0);
    while (!slow.ended) {
        if (n++ % 200 == 0)
            nanosleep(&(struct timespec){0, 150 * 1000000}, NULL);
        struct pollfd p = {.fd = backcast_fd(c), .events = POLLIN};
        assert_int_equal(poll(&p, 1, 30000), 1); /* the promise to event loops */
        while (!slow.ended && backcast_next(c, &ev, 0) == 1)
            answer_event(&slow, &ev);
    }
    assert_true(answer_equal(&quick, &slow));
    assert_int_equal(slow.n_ids, 1500);
    answer_free(&quick);
    answer_free(&slow);
    backcast_disconnect(&c);
}

static void same_seed_same_text(void **state)
{
    (void)state;
    backcast *c = dh_connect(d);
    struct backcast_generate_options go = answer_options(40);
    struct answer a = {0}, b = {0}, other = {0};

    go.temperature = 1.5f;
    go.seed = 11;
    answer_ask(c, NULL, "oak", 3, &go, &a);
    answer_ask(c, NULL, "oak", 3, &go, &b);
    go.seed = 12;
    answer_ask(c, NULL, "oak", 3, &go, &other);
    assert_true(answer_equal(&a, &b));
    assert_false(answer_equal(&a, &other));
    answer_free(&a);
    answer_free(&b);
    answer_free(&other);
    backcast_disconnect(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(command_and_library_say_the_same),
        cmocka_unit_test(company_changes_nothing),
        cmocka_unit_test(ring_and_inline_prompts_are_the_same_prompt),
        cmocka_unit_test(ids_text_and_logprobs_agree),
        cmocka_unit_test(slow_reader_gets_everything),
        cmocka_unit_test(same_seed_same_text),
    };
    return cmocka_run_group_tests(tests, start, dh_group_stop);
}
