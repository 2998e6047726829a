/* A long refresh and a neighbour that decodes: between two tokens of the neighbour there is one slice of the refresh, whatever the
 * policy, and the refresh gives what it gives uncut. Counted in slices, not in time: the engine's clock stands still here, so a
 * slice is as long as a first one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include "core.h"
#include "durable_test.h"

#define BUDGET 300u
#define KEEP 150u
#define FIRST 2u /* rows of a first slice */
#define LAYERS 4u
#define SLICE_KEYS 64u
#define BLOCK 32u

/* policy, score; the fewest steps that its refresh must take beside a neighbour; 0: it costs nothing and is not cut. */
static const struct kind {
    const char *policy, *score;
    uint32_t span;
    uint32_t steps;
} kinds[] = {
    {"counter_causal", "logit", 1, LAYERS *((BUDGET - 32) / BLOCK)}, /* 32 rows, one layer */
    {"counter_causal", "logprob", 1, LAYERS *((BUDGET - 32) / BLOCK)},
    {"counter_causal_fast", "logit", 1, (BUDGET - 33) / FIRST},
    {"counter_causal_fast", "logprob", 1, (BUDGET - 33) / FIRST},
    {"h2o", NULL, 0, LAYERS * 2 * (BUDGET / SLICE_KEYS)},
    {"keydiff", NULL, 0, LAYERS * 2 * (BUDGET / SLICE_KEYS)},
    {"knorm", NULL, 0, LAYERS *(BUDGET / SLICE_KEYS)},
    {"tova", NULL, 0, 0},
    {"key_similarity", NULL, 0, 0},
    {"sliding_window", NULL, 0, 0},
};

static int32_t prompt[BUDGET + 20];

static int setup(void **state)
{
    (void)state;
    prompt_fill(prompt, ARRAY_LEN(prompt), 5);
    return 0;
}

static uint64_t victim_open(struct eh *h, const struct kind *k)
{
    return eh_session(h, &(struct eh_ask){.policy = k->policy,
                                          .score = k->score,
                                          .span = k->span,
                                          .budget_tokens = BUDGET,
                                          .keep = KEEP});
}

/* What the neighbour sees. */
struct watch {
    uint64_t neighbour, victim;
    uint32_t had, slices;
};

static void a_token_every_step(struct eh *h)
{
    struct watch *w = h->arg;
    uint32_t n = eh_stream(h, w->neighbour)->n_ids;
    struct session *s = sess_find(h->en, w->victim);
    assert_int_equal(n, w->had + 1);
    w->had = n;
    w->slices += s->prune.active;
    if (s->prune.active) /* and nothing was left for another slice */
        assert_int_equal(h->en->score_rows_left, 0);
}

/* Fills the victim's cache beside a decoding neighbour, then makes it prune. Returns slices after which the refresh was not
 * complete. */
static uint32_t refresh_beside(struct eh *h, uint64_t victim)
{
    struct generate_options endless = eh_greedy(1500), o = eh_greedy(5);
    struct watch w = {.victim = victim};
    w.neighbour = eh_session(h, &(struct eh_ask){.policy = "none"});
    endless.ignore_end = true;
    eh_ids(h, w.neighbour, prompt, 5, &endless);
    while (eh_stream(h, w.neighbour)->n_ids == 0)
        eh_step(h);
    w.had = eh_stream(h, w.neighbour)->n_ids;
    h->arg = &w;
    h->on_step = a_token_every_step;
    eh_ids(h, victim, prompt, ARRAY_LEN(prompt), &o);
    while (eh_stream(h, victim)->n_ends == 0)
        eh_step(h);
    h->on_step = NULL;
    return w.slices;
}

static void one_slice_between_two_tokens_of_a_neighbour(void **state)
{
    (void)state;
    for (size_t k = 0; k < ARRAY_LEN(kinds); k++) {
        struct eh *alone = eh_open("tiny-llama.gguf", NULL, NULL);
        struct eh *h = eh_open("tiny-llama.gguf", NULL, NULL);
        struct generate_options o = eh_greedy(5);
        uint64_t a = victim_open(alone, &kinds[k]), b = victim_open(h, &kinds[k]);
        eh_ids(alone, a, prompt, ARRAY_LEN(prompt), &o);
        eh_run_to_end(alone, a);
        uint32_t slices = refresh_beside(h, b);
        const struct eh_stream *x = eh_stream(alone, a), *y = eh_stream(h, b);
        assert_int_equal(x->n_prunes, 1);
        assert_int_equal(y->n_prunes, 1);
        assert_int_equal(y->prunes[0].before, BUDGET);
        assert_int_equal(x->prunes[0].n_ranges, y->prunes[0].n_ranges);
        assert_memory_equal(x->prunes[0].ranges, y->prunes[0].ranges,
                            x->prunes[0].n_ranges * sizeof *x->prunes[0].ranges);
        assert_int_equal(x->n_ids, y->n_ids);
        assert_memory_equal(x->ids, y->ids, x->n_ids * sizeof *x->ids);
        if (slices < kinds[k].steps || (kinds[k].steps == 0 && slices > 0))
            fail_msg("%s: %u slices, %u expected", kinds[k].policy, slices, kinds[k].steps);
        eh_close(&alone);
        eh_close(&h);
    }
}

/* Scores for whoever asked go the same way. */
static void scores_are_cut_as_refreshes_are(void **state)
{
    (void)state;
    for (size_t k = 0; k < ARRAY_LEN(kinds); k++) {
        struct eh *h = eh_open("tiny-llama.gguf", NULL, NULL);
        struct generate_options none = eh_greedy(0), endless = eh_greedy(1500);
        uint64_t s = victim_open(h, &kinds[k]);
        float alone[BUDGET];
        eh_ids(h, s, prompt, BUDGET - 1, &none);
        eh_run_to_end(h, s);
        eh_expect(h, eh_post(h, eh_command(h, CMD_SCORES, s)), REP_ACCEPTED);
        eh_run_to_end(h, s);
        assert_int_equal(eh_stream(h, s)->n_scores, BUDGET - 1);
        for (uint32_t i = 0; i < BUDGET - 1; i++)
            alone[i] = eh_stream(h, s)->scores[i].score;
        eh_forget(h, s);
        struct watch w = {.victim = s};
        w.neighbour = eh_session(h, &(struct eh_ask){.policy = "none"});
        endless.ignore_end = true;
        eh_ids(h, w.neighbour, prompt, 5, &endless);
        while (eh_stream(h, w.neighbour)->n_ids == 0)
            eh_step(h);
        w.had = eh_stream(h, w.neighbour)->n_ids;
        h->arg = &w;
        h->on_step = a_token_every_step;
        eh_post(h, eh_command(h, CMD_SCORES, s));
        uint32_t steps = 0;
        for (; eh_stream(h, s)->n_ends == 0; steps++)
            eh_step(h);
        h->on_step = NULL;
        assert_true(steps >= kinds[k].steps);
        assert_int_equal(eh_stream(h, s)->n_scores, BUDGET - 1);
        for (uint32_t i = 0; i < BUDGET - 1; i++)
            assert_memory_equal(&alone[i], &eh_stream(h, s)->scores[i].score, sizeof alone[i]);
        eh_close(&h);
    }
}

/* A walk that is forgotten half way leaves no memory and no trace: the client goes away, or asks for a smaller budget. */
static void a_walk_can_be_forgotten(void **state)
{
    (void)state;
    for (uint32_t after = 1; after < 30; after += 7) {
        struct eh *h = eh_open("tiny-llama.gguf", NULL, NULL);
        struct generate_options o = eh_greedy(5), endless = eh_greedy(1500);
        uint64_t n = eh_session(h, &(struct eh_ask){.policy = "none"});
        uint64_t s = victim_open(h, &kinds[4]);
        endless.ignore_end = true;
        eh_ids(h, n, prompt, 5, &endless);
        eh_ids(h, s, prompt, ARRAY_LEN(prompt), &o);
        while (!sess_find(h->en, s)->prune.active)
            eh_step(h);
        for (uint32_t i = 0; i < after; i++)
            eh_step(h);
        assert_true(sess_find(h->en, s)->prune.active);
        assert_true(ledger_own(&sess_find(h->en, s)->owner, LEDGER_refresh) > 0);
        if (after % 2 == 0) {
            struct command *c = eh_command(h, CMD_PRUNE, s);
            c->u.budget.keep = 100;
            eh_expect(h, eh_post(h, c), REP_PRUNED_REPLY);
            eh_run_to_end(h, s);
            assert_int_equal(eh_stream(h, s)->n_ids, 5);
        } else {
            eh_close_session(h, s);
        }
        eh_close(&h); /* asserts that every byte is back */
    }
}

/* A prune edits the slot list: no key or value moves, in prunes of every policy. Pages that are asked back are emptied by copies,
 * and those are counted. */
static void a_prune_moves_no_row(void **state)
{
    (void)state;
    for (size_t k = 0; k < ARRAY_LEN(kinds); k++) {
        struct eh *h = eh_open("tiny-llama.gguf", NULL, NULL);
        struct generate_options o = eh_greedy(600);
        uint64_t s = victim_open(h, &kinds[k]);
        o.ignore_end = true;
        eh_ids(h, s, prompt, ARRAY_LEN(prompt), &o);
        eh_run_to_end(h, s);
        const struct report *r = eh_expect(h, eh_post(h, eh_command(h, CMD_STAT, s)), REP_STAT);
        assert_true(r->u.stat.sessions[0].prunes >= 4);
        assert_true(r->u.stat.sessions[0].dropped >= 4 * (BUDGET - KEEP));
        assert_int_equal(r->u.stat.sessions[0].rows_moved, 0);
        struct command *c = eh_command(h, CMD_PRUNE, s);
        c->u.budget.keep = 70;
        eh_expect(h, eh_post(h, c), REP_PRUNED_REPLY);
        r = eh_expect(h, eh_post(h, eh_command(h, CMD_STAT, s)), REP_STAT);
        uint64_t moved = r->u.stat.sessions[0].rows_moved;
        assert_true(moved <= 70);
        assert_int_equal(r->u.stat.sessions[0].held / r->u.stat.sessions[0].page_bytes, 2);
        eh_close(&h);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_slice_between_two_tokens_of_a_neighbour),
        cmocka_unit_test(scores_are_cut_as_refreshes_are),
        cmocka_unit_test(a_walk_can_be_forgotten),
        cmocka_unit_test(a_prune_moves_no_row),
    };
    return cmocka_run_group_tests(tests, setup, NULL);
}
