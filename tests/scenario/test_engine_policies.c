/* Every policy's text, token for token and prune for prune: alone on one thread of the backend, then all policies at once
 * on 1, 2 and 4 threads. Bytes held stay below the sum of the budgets at every step, and are back when all are closed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "engine_harness.h"
#include "evict.h"
#include "sanitized.h"

#define POLICIES_MAX 16u
#define N_PROMPT 230u
#define N_NEW 40u

static const char *const models[] = {"tiny-llama-q4_0.gguf", "tiny-llama.gguf", "tiny-qwen2.gguf",
                                     "tiny-qwen3.gguf"};
static int32_t prompt[N_PROMPT];

static int setup(void **state)
{
    (void)state;
    uint32_t x = 11;
    for (size_t i = 0; i < N_PROMPT; i++) {
        x = x * 1664525u + 1013904223u;
        prompt[i] = (int32_t)(3 + (x >> 8) % 280);
    }
    return 0;
}

static struct eh_ask ask_of(unsigned p)
{
    const struct evict_policy *policy = evict_policy_at(p);
    struct eh_ask a = {.policy = policy->name, .seed = 5 + p};
    if (evict_policy_prunes(policy)) {
        a.budget_tokens = 64 + 8 * p; /* each its own */
        a.frozen = p % 3;
    }
    return a;
}

/* Half of them greedy, half sampled. */
static struct generate_options options_of(unsigned p)
{
    struct generate_options o = eh_greedy(N_NEW);
    if (p % 2 == 1) {
        o.temperature = 0.9f;
        o.top_p = 0.95f;
        o.seed = 70 + p;
    }
    return o;
}

static void threads_set(struct engine_options *o, void *arg)
{
    o->threads = *(const uint32_t *)arg;
    o->prefill_chunk = 50;
    o->score_rows = 30;
}

static uint64_t held(struct eh *h)
{
    struct engine_counts c;
    engine_counts(h->en, &c);
    return c.kv_held;
}

static uint64_t sum_of_budgets; /* of the sessions that are open */

static void ceilings_hold(struct eh *h)
{
    assert_true(held(h) <= sum_of_budgets);
}

static uint64_t session_open(struct eh *h, unsigned p)
{
    struct eh_ask a = ask_of(p);
    const struct report_session *info = &eh_expect(h, eh_post_open(h, &a), REP_OPENED)->u.info;
    uint64_t pages = (N_PROMPT + N_NEW + 63) / 64; /* what one without a budget needs */
    sum_of_budgets += info->budget_bytes != 0 ? info->budget_bytes : pages * info->page_bytes;
    return info->id;
}

static void same_stream(const struct eh_stream *got, const struct eh_stream *want, const char *what)
{
    if (got->n_ids != want->n_ids || got->n_prunes != want->n_prunes ||
        memcmp(got->ids, want->ids, want->n_ids * sizeof *want->ids) != 0)
        fail_msg("%s: %u tokens and %u prunes, alone %u and %u, or other tokens", what, got->n_ids,
                 got->n_prunes, want->n_ids, want->n_prunes);
    assert_string_equal(got->text, want->text);
    for (uint32_t i = 0; i < want->n_prunes; i++) {
        const struct eh_prune *x = &got->prunes[i], *y = &want->prunes[i];
        assert_int_equal(x->before, y->before);
        assert_int_equal(x->after, y->after);
        assert_int_equal(x->after_ids, y->after_ids);
        assert_int_equal(x->n_ranges, y->n_ranges);
        assert_memory_equal(x->ranges, y->ranges, x->n_ranges * sizeof *x->ranges);
    }
}

/* One engine for each, so that no stream shares a batch with another. */
static unsigned run_alone(const char *model, struct eh **ret, uint64_t *session)
{
    unsigned n = 0;
    for (; evict_policy_at(n) != NULL; n++) {
        uint32_t threads = 1;
        assert_true(n < POLICIES_MAX);
        struct generate_options o = options_of(n);
        ret[n] = eh_open(model, threads_set, &threads);
        sum_of_budgets = 0;
        session[n] = session_open(ret[n], n);
        ret[n]->on_step = ceilings_hold;
        eh_ids(ret[n], session[n], prompt, N_PROMPT, &o);
        eh_run_to_end(ret[n], session[n]);
        const struct eh_stream *s = eh_stream(ret[n], session[n]);
        assert_int_equal(s->n_ids, N_NEW);
        assert_int_equal(s->n_prunes > 0, evict_policy_prunes(evict_policy_at(n)));
    }
    return n;
}

static void run_together(const char *model, uint32_t threads, unsigned n, struct eh *const *alone,
                         const uint64_t *alone_session)
{
    struct eh *h = eh_open(model, threads_set, &threads);
    uint64_t session[POLICIES_MAX];
    sum_of_budgets = 0;
    for (unsigned p = 0; p < n; p++)
        session[p] = session_open(h, p);
    h->on_step = ceilings_hold;
    for (unsigned p = 0; p < n; p++) {
        struct generate_options o = options_of(p);
        eh_post_ids(h, session[p], prompt, N_PROMPT, &o);
    }
    for (unsigned p = 0; p < n; p++) {
        char what[128];
        snprintf(what, sizeof what, "%s, %s, %u threads", model, evict_policy_at(p)->name, threads);
        eh_run_to_end(h, session[p]);
        same_stream(eh_stream(h, session[p]), eh_stream(alone[p], alone_session[p]), what);
    }
    for (unsigned p = 0; p < n; p++)
        eh_close_session(h, session[p]);
    assert_int_equal(held(h), 0);
    eh_close(&h);
}

static void texts_do_not_depend_on_threads_or_neighbours(void **state)
{
    (void)state;
    static const uint32_t threads[] = {1, 2, 4};
    for (size_t m = 0; m < (SANITIZED ? 1 : ARRAY_LEN(models)); m++) {
        struct eh *alone[POLICIES_MAX];
        uint64_t session[POLICIES_MAX];
        unsigned n = run_alone(models[m], alone, session);
        assert_int_equal(n, 10);
        for (size_t t = 0; t < ARRAY_LEN(threads); t++)
            run_together(models[m], threads[t], n, alone, session);
        for (unsigned p = 0; p < n; p++)
            eh_close(&alone[p]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(texts_do_not_depend_on_threads_or_neighbours),
    };
    return cmocka_run_group_tests(tests, setup, NULL);
}
