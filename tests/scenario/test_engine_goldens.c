/* Greedy texts of every golden through the whole engine: one at a time at four chunk sizes (two under a sanitizer), all
 * of a file at once, and with threads. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>
#include "engine_goldens.h"
#include "records.h"
#include "sanitized.h"

static const char *const archs[] = {"llama", "llama-rope3", "qwen2", "qwen3"};

struct shape {
    const char *backend;
    uint32_t chunk, score_rows, threads;
};

static void shape_set(struct engine_options *o, void *arg)
{
    const struct shape *s = arg;
    o->backend = s->backend;
    o->prefill_chunk = s->chunk;
    o->score_rows = s->score_rows;
    o->threads = s->threads;
}

static struct eh *open_arch(const char *arch, struct shape *s)
{
    char model[64];
    snprintf(model, sizeof model, "tiny-%s.gguf", arch);
    return eh_open(model, shape_set, s);
}

/* One prune as the client was told of it: stream indices that were said before it, dropped once and
 * never frozen ones. gone: what went before. */
static void check_prune(const struct golden_case *c, const struct eh_prune *p, bool *gone)
{
    uint64_t dropped = 0, last = 0;
    for (uint32_t k = 0; k < p->n_ranges; k++) {
        assert_true(k == 0 || p->ranges[k].first > last);
        last = p->ranges[k].first + p->ranges[k].count;
        for (uint64_t at = p->ranges[k].first; at < last; at++, dropped++) {
            assert_true(at < 512 && !gone[at] && at >= c->ask.frozen);
            gone[at] = true;
        }
    }
    assert_int_equal(dropped, p->before - p->after);
    assert_int_equal(p->after, c->ask.keep);
    assert_true(p->live_after < p->live_before && p->held_after <= p->held_before);
    bool end = strcmp(c->ask.trigger, "prefill_end") == 0;
    assert_int_equal(p->reason, end ? PRUNE_PREFILL_END : PRUNE_BUDGET);
    if (!end)
        assert_int_equal(p->before, c->ask.budget_tokens);
    /* the newest delivered token is not cached yet */
    assert_true(last <= p->progress + (p->after_ids > 0 ? p->after_ids - 1 : 0));
}

static void check_prunes(const struct golden_case *c, const struct eh_stream *s)
{
    bool gone[512] = {false};
    for (uint32_t i = 0; i < s->n_prunes; i++)
        check_prune(c, &s->prunes[i], gone);
}

static void run_alone(struct eh *h, const struct golden_case *c, const char *label)
{
    struct generate_options o = eh_greedy(c->n_text);
    uint64_t s = eh_session(h, &c->ask);
    eh_ids(h, s, c->prompt, c->n_prompt, &o);
    eh_run_to_end(h, s);
    struct eh_stream *got = eh_stream(h, s);
    golden_check(c, got, label);
    check_prunes(c, got);
    assert_int_equal(got->end.u.end.reason, END_LENGTH);
    assert_int_equal(got->end.u.end.tokens_in, c->n_prompt);
    assert_int_equal(got->end.u.end.tokens_out, c->n_text);
    assert_int_equal(got->end.u.end.prunes, c->refreshes);
    assert_int_equal(got->done, c->n_prompt);
    assert_int_equal(got->total, c->n_prompt);
    eh_close_session(h, s);
}

static void one_at_a_time(void **state)
{
    (void)state;
    static const uint32_t chunks[] = {70, 7, 13, 1};
    static const char *const backends[] = {"ref", "auto"};
    uint32_t n = 0;
    for (size_t b = 0; b < ARRAY_LEN(backends); b++)
        for (size_t a = 0; a < ARRAY_LEN(archs); a++)
            for (size_t k = 0; k < (SANITIZED ? 1 + b : ARRAY_LEN(chunks)); k++) {
                struct shape shape = {backends[b], chunks[k], k == 0 ? 0 : 5, 1};
                struct goldens g;
                goldens_open(&g, archs[a]);
                struct eh *h = open_arch(archs[a], &shape);
                for (uint32_t i = 0; i < g.n; i++, n++)
                    run_alone(h, &g.cases[i], archs[a]);
                eh_close(&h);
                goldens_close(&g);
            }
    print_message("%u texts\n", n);
}

/* All cases of a file at once, prompts in pieces, refreshes in blocks. */
static void all_at_once(struct eh *h, const struct goldens *g, const char *label)
{
    uint64_t session[GOLDEN_CASES_MAX];
    for (uint32_t i = 0; i < g->n; i++)
        session[i] = eh_session(h, &g->cases[i].ask);
    for (uint32_t i = 0; i < g->n; i++) {
        struct generate_options o = eh_greedy(g->cases[i].n_text);
        eh_post_ids(h, session[i], g->cases[i].prompt, g->cases[i].n_prompt, &o);
    }
    for (uint32_t i = 0; i < g->n; i++) {
        eh_run_to_end(h, session[i]);
        golden_check(&g->cases[i], eh_stream(h, session[i]), label);
        check_prunes(&g->cases[i], eh_stream(h, session[i]));
    }
    for (uint32_t i = 0; i < g->n; i++)
        eh_close_session(h, session[i]);
}

static void together(struct shape shape, bool threads)
{
    for (size_t a = 0; a < ARRAY_LEN(archs); a++) {
        struct goldens g;
        goldens_open(&g, archs[a]);
        struct eh *h = open_arch(archs[a], &shape);
        if (threads)
            eh_start(h);
        all_at_once(h, &g, archs[a]);
        eh_close(&h);
        goldens_close(&g);
    }
}

static void together_they_say_the_same(void **state)
{
    (void)state;
    together((struct shape){"auto", 11, 60, 2}, false);
}

static void with_threads_they_say_the_same(void **state)
{
    (void)state;
    together((struct shape){"auto", 32, 100, 1}, true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_at_a_time),
        cmocka_unit_test(together_they_say_the_same),
        cmocka_unit_test(with_threads_they_say_the_same),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
