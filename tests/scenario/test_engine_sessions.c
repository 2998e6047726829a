/* Many sessions of one engine: each one's text is the same alone and among others, ceilings hold at
 * every step, and when all are closed every byte is back. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "engine_harness.h"
#include "records.h"
#include "sanitized.h"

#define N_KINDS 8u

/* Eight sessions, each with a policy, a budget and a way to sample of its own. */
static const struct kind {
    struct eh_ask ask;
    uint32_t n_prompt, n_new;
    float temperature;
    uint32_t top_k;
    float top_p, penalty;
} kinds[N_KINDS] = {
    {{.policy = "counter_causal_fast", .budget_tokens = 100}, 300, 60, 0, 0, 1, 1},
    {{.policy = "counter_causal", .budget_tokens = 64, .kv_type = "f32"}, 200, 50, 0.8f, 0, 1, 1},
    {{.policy = "sliding_window", .budget_tokens = 48, .frozen = 4}, 90, 70, 1, 40, 0.9f, 1.1f},
    {{.policy = "h2o", .budget_bytes = 500000, .kv_type = "bf16"}, 400, 40, 0, 0, 1, 1.3f},
    {{.policy = "tova", .budget_tokens = 70}, 150, 60, 0.5f, 5, 1, 1},
    {{.policy = "none"}, 120, 80, 0.9f, 0, 0.7f, 1},
    {{.policy = "keydiff", .budget_tokens = 130, .keep = 65}, 260, 30, 0, 0, 1, 1},
    {{.policy = "counter_causal_fast",
      .score = "logprob",
      .trigger = "prefill_end",
      .keep = 40,
      .budget_tokens = 400},
     333,
     44,
     0,
     0,
     1,
     1},
};

static int32_t *prompt_of(uint32_t kind, uint32_t n)
{
    int32_t *ids = malloc(n * sizeof *ids);
    uint32_t x = 77 + kind;
    assert_non_null(ids);
    for (uint32_t i = 0; i < n; i++) {
        x = x * 1664525u + 1013904223u;
        ids[i] = (int32_t)(3 + (x >> 8) % 280);
    }
    return ids;
}

static struct generate_options options_of(uint32_t kind)
{
    const struct kind *k = &kinds[kind];
    struct generate_options o = eh_greedy(k->n_new);
    o.temperature = k->temperature;
    o.top_k = k->top_k;
    o.top_p = k->top_p;
    o.repeat_penalty = k->penalty;
    o.seed = 1000 + kind;
    return o;
}

struct shape {
    uint32_t chunk, max_rows, score_rows;
};
static void shape_set(struct engine_options *o, void *arg)
{
    const struct shape *s = arg;
    o->prefill_chunk = s->chunk;
    o->max_rows = s->max_rows;
    o->score_rows = s->score_rows;
}

static struct eh *open_shape(struct shape s)
{
    return eh_open("tiny-llama.gguf", shape_set, &s);
}

static void post_kind(struct eh *h, uint64_t session, uint32_t kind)
{
    struct generate_options o = options_of(kind);
    int32_t *ids = prompt_of(kind, kinds[kind].n_prompt);
    eh_post_ids(h, session, ids, kinds[kind].n_prompt, &o);
    free(ids);
}

static void streams_equal(const struct eh_stream *a, const struct eh_stream *b, uint32_t kind)
{
    if (a->n_ids != b->n_ids || a->n_prunes != b->n_prunes)
        fail_msg("kind %u: %u tokens and %u prunes, alone %u and %u", kind, a->n_ids, a->n_prunes,
                 b->n_ids, b->n_prunes);
    assert_memory_equal(a->ids, b->ids, a->n_ids * sizeof *a->ids);
    assert_memory_equal(a->streams, b->streams, a->n_ids * sizeof *a->streams);
    assert_string_equal(a->text, b->text);
    for (uint32_t i = 0; i < a->n_prunes; i++) {
        const struct eh_prune *x = &a->prunes[i], *y = &b->prunes[i];
        assert_int_equal(x->before, y->before);
        assert_int_equal(x->after, y->after);
        assert_int_equal(x->n_ranges, y->n_ranges);
        assert_memory_equal(x->ranges, y->ranges, x->n_ranges * sizeof *x->ranges);
        assert_int_equal(x->after_ids, y->after_ids);
    }
}

/* Every session's text in an engine of its own. */
static void run_solo(struct eh *ret[N_KINDS], uint64_t session[N_KINDS])
{
    for (uint32_t k = 0; k < N_KINDS; k++) {
        ret[k] = open_shape((struct shape){.chunk = 64});
        session[k] = eh_session(ret[k], &kinds[k].ask);
        post_kind(ret[k], session[k], k);
        eh_run_to_end(ret[k], session[k]);
        assert_int_equal(eh_stream(ret[k], session[k])->n_ids, kinds[k].n_new);
    }
}

static uint64_t sum_of_budgets;

static void ceilings_hold(struct eh *h)
{
    struct engine_counts c;
    engine_counts(h->en, &c);
    assert_true(c.kv_held <= sum_of_budgets);
    assert_true(c.kv_live <= c.kv_held);
}

static uint64_t held(struct eh *h)
{
    struct engine_counts c;
    engine_counts(h->en, &c);
    return c.kv_held;
}

static void each_text_equals_its_solo_run(void **state)
{
    (void)state;
    static const struct shape shapes[] = {{9, 40, 32}, {1, 8, 1000}, {0, 0, 0}, {70, 16, 7}};
    struct eh *solo[N_KINDS];
    uint64_t alone[N_KINDS], session[2 * N_KINDS];
    run_solo(solo, alone);
    for (size_t i = 0; i < (SANITIZED ? 2 : ARRAY_LEN(shapes)); i++) {
        struct eh *h = open_shape(shapes[i]);
        uint64_t start = held(h);
        sum_of_budgets = 0;
        for (uint32_t k = 0; k < 2 * N_KINDS; k++) { /* two of each */
            uint32_t r = eh_post_open(h, &kinds[k % N_KINDS].ask);
            const struct report_session *info = &eh_expect(h, r, REP_OPENED)->u.info;
            session[k] = info->id;
            sum_of_budgets += info->budget_bytes != 0 ? info->budget_bytes : 4 * info->page_bytes;
            if (k > 0)
                assert_true(info->id > session[k - 1]);
        }
        h->on_step = ceilings_hold;
        for (uint32_t k = 0; k < 2 * N_KINDS; k++) {
            post_kind(h, session[k], k % N_KINDS);
            for (uint32_t n = 0; n < k; n++)
                eh_step(h); /* they begin one after the other */
        }
        for (uint32_t k = 0; k < 2 * N_KINDS; k++) {
            eh_run_to_end(h, session[k]);
            streams_equal(eh_stream(h, session[k]),
                          eh_stream(solo[k % N_KINDS], alone[k % N_KINDS]), k % N_KINDS);
        }
        for (uint32_t k = 0; k < 2 * N_KINDS; k++)
            eh_close_session(h, session[k]);
        assert_int_equal(held(h), start);
        eh_close(&h);
    }
    for (uint32_t k = 0; k < N_KINDS; k++)
        eh_close(&solo[k]);
}

/* A conversation in three requests is the same whether its second was cut short and continued. */
static void a_cut_answer_goes_on_where_it_was(void **state)
{
    (void)state;
    for (uint32_t k = 0; k < N_KINDS; k++) {
        struct eh *h = open_shape((struct shape){.chunk = 50});
        uint64_t whole = eh_session(h, &kinds[k].ask), cut = eh_session(h, &kinds[k].ask);
        struct generate_options o = options_of(k);
        int32_t *ids = prompt_of(k, kinds[k].n_prompt);
        eh_ids(h, whole, ids, kinds[k].n_prompt, &o);
        eh_run_to_end(h, whole);
        for (uint32_t done = 0, n = 1; done < kinds[k].n_new; done += n, n += 3) {
            o.max_tokens = n = BC_MIN(n, kinds[k].n_new - done);
            eh_ids(h, cut, ids, done == 0 ? kinds[k].n_prompt : 0, &o);
            eh_run_to_end(h, cut);
            assert_int_equal(eh_stream(h, cut)->end.u.end.reason, END_LENGTH);
            assert_int_equal(eh_stream(h, cut)->end.u.end.tokens_out, n);
            assert_int_equal(eh_stream(h, cut)->end.u.end.tokens_in,
                             done == 0 ? kinds[k].n_prompt : 0);
        }
        streams_equal(eh_stream(h, cut), eh_stream(h, whole), k);
        free(ids);
        eh_close(&h);
    }
}

/* ---- cancelling ---- */

static void cancelled_at_any_moment_nothing_is_lost(void **state)
{
    (void)state;
    struct eh *h = open_shape((struct shape){.chunk = 20, .max_rows = 64, .score_rows = 16});
    uint64_t x = 99;
    for (uint32_t round = 0; round < (SANITIZED ? 70 : 200); round++) {
        x = x * 6364136223846793005ull + 1442695040888963407ull;
        uint32_t k = (uint32_t)(x >> 33) % N_KINDS, after = (uint32_t)(x >> 40) % 60;
        uint64_t s = eh_session(h, &kinds[k].ask), other = eh_session(h, &kinds[2].ask);
        post_kind(h, other, 2);
        post_kind(h, s, k);
        for (uint32_t i = 0; i < after; i++)
            eh_step(h);
        struct eh_stream *got = eh_stream(h, s);
        bool ended = got->n_ends > 0;
        eh_expect(h, eh_post(h, eh_command(h, CMD_CANCEL, s)), REP_DONE);
        assert_int_equal(got->n_ends, 1);
        if (!ended)
            assert_int_equal(got->end.u.end.reason, END_CANCELLED);
        uint32_t had = got->n_ids;
        uint64_t next = had > 0 ? got->streams[had - 1] + 1 : got->end.u.end.tokens_in;
        /* the next request goes on at the next stream index */
        struct generate_options o = eh_greedy(3);
        int32_t more[] = {5, 6, 7};
        eh_ids(h, s, more, 3, &o);
        eh_run_to_end(h, s); /* the cancelled one */
        eh_run_to_end(h, s);
        assert_int_equal(got->n_ids, had + 3);
        assert_int_equal(got->streams[had], next + 3);
        assert_int_equal(got->end.u.end.tokens_in, 3);
        eh_close_session(h, s);
        eh_close_session(h, other);
        assert_int_equal(held(h), 0);
    }
    eh_close(&h);
}

/* A client that goes away: everything of it is gone after one step. */
static void gone_frees_everything_within_one_step(void **state)
{
    (void)state;
    struct eh *h = open_shape((struct shape){.chunk = 30, .score_rows = 16});
    for (uint32_t round = 0; round < 40; round += SANITIZED ? 3 : 1) {
        uint64_t s[N_KINDS];
        for (uint32_t k = 0; k < N_KINDS; k++) {
            struct eh_ask ask = kinds[k].ask;
            ask.name = k == 3 ? "stays" : NULL;
            s[k] = eh_session(h, &ask);
            post_kind(h, s[k], k);
        }
        for (uint32_t i = 0; i < round; i++)
            eh_step(h);
        eh_post(h, eh_command(h, CMD_GONE, 0));
        eh_step(h);
        struct engine_counts c;
        engine_counts(h->en, &c);
        assert_int_equal(c.sessions, 1);
        assert_int_equal(eh_stream(h, s[3])->n_ends, 1);
        struct command *attach = eh_command(h, CMD_ATTACH, 0);
        snprintf(attach->u.attach.name, sizeof attach->u.attach.name, "stays");
        const struct report *r = eh_expect(h, eh_post(h, attach), REP_ATTACHED);
        assert_int_equal(r->session, s[3]);
        assert_true(r->u.info.attached);
        assert_int_equal(r->u.info.held, c.kv_held);
        assert_int_equal(r->u.info.tokens, eh_stream(h, s[3])->end.u.end.tokens_cached);
        eh_close_session(h, s[3]);
        assert_int_equal(held(h), 0);
    }
    eh_close(&h);
}

/* ---- fairness ---- */

static uint64_t decoding;
static uint32_t decode_ids;

static void decode_advances(struct eh *h)
{
    uint32_t n = eh_stream(h, decoding)->n_ids;
    assert_int_equal(n, decode_ids + 1); /* a token every step, whoever else is there */
    decode_ids = n;
}

static void a_decode_advances_every_step_while_others_prefill(void **state)
{
    (void)state;
    struct eh *h = open_shape((struct shape){.chunk = 16, .max_rows = 40, .score_rows = 40});
    struct generate_options o = eh_greedy(900);
    int32_t *ids = prompt_of(0, 900);
    uint64_t long_one[3];
    decoding = eh_session(h, &(struct eh_ask){.policy = "none"});
    for (int i = 0; i < 3; i++)
        long_one[i] = eh_session(h, &(struct eh_ask){.policy = "counter_causal",
                                                     .budget_tokens = 100,
                                                     .uid = 2000});
    eh_ids(h, decoding, ids, 5, &o);
    while (eh_stream(h, decoding)->n_ids == 0)
        eh_step(h);
    decode_ids = eh_stream(h, decoding)->n_ids;
    o.max_tokens = 0;
    for (int i = 0; i < 3; i++) {
        struct command *c = eh_command(h, CMD_GENERATE, long_one[i]);
        c->uid = 2000;
        c->u.generate.kind = PROMPT_IDS;
        c->u.generate.opt = o;
        c->u.generate.ids =
            prompt_of(1, 160); /* the clock stands: a refresh takes two rows a step */
        c->u.generate.n_ids = 160;
        eh_post(h, c);
    }
    h->on_step = decode_advances;
    uint32_t steps = 0;
    while (eh_stream(h, long_one[2])->n_ends == 0) {
        eh_step(h);
        steps++;
        /* the three advance side by side: none is more than a chunk ahead of another, but for the
         * rows that a refresh of its own took from it */
        uint32_t least = UINT32_MAX, most = 0;
        for (int i = 0; i < 3; i++) {
            least = BC_MIN(least, eh_stream(h, long_one[i])->done);
            most = BC_MAX(most, eh_stream(h, long_one[i])->done);
        }
        assert_true(most - least <= 4 * 16 + 100);
    }
    assert_true(steps < 890);
    h->on_step = NULL;
    free(ids);
    eh_close(&h);
}

/* A user with many sessions takes no more turns than a user with one. */
static void users_share_and_not_sessions(void **state)
{
    (void)state;
    struct eh *h = open_shape((struct shape){.chunk = 16, .max_rows = 16});
    struct generate_options o = eh_greedy(0);
    int32_t *ids = prompt_of(0, 640);
    uint64_t many[10], one;
    for (int i = 0; i < 10; i++)
        many[i] = eh_session(h, &(struct eh_ask){.policy = "none"});
    one = eh_session(h, &(struct eh_ask){.policy = "none", .uid = 2000});
    for (int i = 0; i < 10; i++)
        eh_post_ids(h, many[i], ids, 640, &o);
    struct command *c = eh_command(h, CMD_GENERATE, one);
    c->uid = 2000;
    c->u.generate.kind = PROMPT_IDS;
    c->u.generate.opt = o;
    c->u.generate.ids = prompt_of(1, 640);
    c->u.generate.n_ids = 640;
    eh_post(h, c);
    eh_run_to_end(h, one);
    uint32_t sum = 0, most = 0, least = UINT32_MAX;
    for (int i = 0; i < 10; i++) {
        uint32_t done = eh_stream(h, many[i])->done;
        sum += done;
        most = BC_MAX(most, done);
        least = BC_MIN(least, done);
    }
    assert_true(sum >= 640 - 32 && sum <= 640 + 32); /* half and half */
    assert_true(most - least <= 16);
    free(ids);
    eh_close(&h);
}

/* More decodes than a pass has logits: turns go round, and a prompt still gets in. */
static void more_decodes_than_places_share_them(void **state)
{
    (void)state;
    struct eh *h = open_shape((struct shape){.chunk = 8, .max_rows = 8});
    struct generate_options o = eh_greedy(40);
    uint64_t s[20];
    int32_t *ids = prompt_of(3, 30);
    for (int i = 0; i < 20; i++) {
        s[i] = eh_session(h, &(struct eh_ask){.policy = "none"});
        eh_post_ids(h, s[i], ids, 30, &o);
    }
    for (int i = 0; i < 20; i++)
        eh_run_to_end(h, s[i]);
    for (int i = 1; i < 20; i++)
        assert_memory_equal(eh_stream(h, s[i])->ids, eh_stream(h, s[0])->ids, 40 * sizeof(int32_t));
    free(ids);
    eh_close(&h);
}

/* ---- readers that do not read ---- */

static void a_slow_reader_parks_itself_alone(void **state)
{
    (void)state;
    struct eh *h = open_shape((struct shape){.chunk = 64});
    uint64_t slow = eh_session(h, &kinds[0].ask), fast = eh_session(h, &kinds[2].ask);
    post_kind(h, slow, 0);
    while (eh_stream(h, slow)->n_ids < 3)
        eh_step(h);
    uint32_t had = eh_stream(h, slow)->n_ids;
    eh_port(h, slow)->room = PORT_ROOM_MIN - 1;
    post_kind(h, fast, 2);
    eh_run_to_end(h, fast);
    assert_int_equal(eh_stream(h, slow)->n_ids, had);
    assert_false(eh_step(h)); /* and the engine sleeps */
    eh_port(h, slow)->room = PORT_ROOM_MIN;
    eh_post(h, eh_command(h, CMD_ROOM, slow));
    eh_run_to_end(h, slow);
    assert_int_equal(eh_stream(h, slow)->n_ids, kinds[0].n_new);
    /* reports that nobody takes: bounded by their number */
    h->hold = true;
    struct generate_options o = eh_greedy(100000);
    uint64_t endless =
        eh_session(h,
                   &(struct eh_ask){.policy = "sliding_window", .budget_tokens = 64, .frozen = 1});
    int32_t one = 9;
    o.n_logprobs = 0;
    eh_ids(h, endless, &one, 1, &o);
    while (eh_step(h))
        ;
    uint32_t queued = eh_port(h, endless)->queued;
    assert_true(queued <= 1024 * 4 + 8);
    eh_release(h);
    assert_true(eh_stream(h, endless)->n_ids > 400);
    eh_close_session(h, endless);
    eh_close(&h);
}

/* ---- answers ---- */

/* What had come at each wake-up of a step. */
struct wakes {
    struct eh *h;
    uint64_t session;
    uint32_t n, replies[8], streamed[8];
};

static void on_wake(void *arg)
{
    struct wakes *w = arg;
    if (w->h == NULL || w->n == ARRAY_LEN(w->replies))
        return;
    eh_collect(w->h);
    const struct eh_stream *st = eh_stream(w->h, w->session);
    w->replies[w->n] = w->h->n_replies;
    w->streamed[w->n++] = st->n_progress + st->n_ids;
}

static void wake_tweak(struct engine_options *o, void *arg)
{
    o->wake = on_wake;
    o->wake_arg = arg;
}

/* Who asks for something while others' rows are computed is not told a pass later. */
static void answers_do_not_wait_for_the_pass(void **state)
{
    (void)state;
    struct wakes w = {0};
    struct eh *h = eh_open("tiny-llama.gguf", wake_tweak, &w);
    struct generate_options o = eh_greedy(8);
    int32_t *ids = prompt_of(0, 40);
    w.session = eh_session(h, &(struct eh_ask){.policy = "none"});
    eh_collect(h);
    uint32_t before = h->n_replies, request = eh_post_ids(h, w.session, ids, 40, &o);
    w.h = h;
    eh_step(h);
    w.h = NULL;
    assert_int_equal(w.n, 2);
    assert_int_equal(w.replies[0], before + 1); /* accepted, and nothing computed yet */
    assert_int_equal(w.streamed[0], 0);
    assert_int_equal(w.replies[1], before + 1);
    assert_true(w.streamed[1] > 0);
    eh_expect(h, request, REP_ACCEPTED);
    eh_run_to_end(h, w.session);
    free(ids);
    eh_close(&h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_text_equals_its_solo_run),
        cmocka_unit_test(a_cut_answer_goes_on_where_it_was),
        cmocka_unit_test(cancelled_at_any_moment_nothing_is_lost),
        cmocka_unit_test(gone_frees_everything_within_one_step),
        cmocka_unit_test(a_decode_advances_every_step_while_others_prefill),
        cmocka_unit_test(users_share_and_not_sessions),
        cmocka_unit_test(more_decodes_than_places_share_them),
        cmocka_unit_test(a_slow_reader_parks_itself_alone),
        cmocka_unit_test(answers_do_not_wait_for_the_pass),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
