/* Sessions whose caches are full at the same time are refreshed together: what each of them keeps and says is what it keeps and says
 * alone, token for token, for every counter-causal form, with and without somebody who decodes, and whatever becomes of the others
 * on the way. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include "core.h"
#include "durable_test.h"
#include "sanitized.h"

#define N 11u /* more than go together */
#define N_NEW 6u
#define PROMPT_MAX 140u

static const char *const models[] = {"tiny-llama.gguf", "tiny-qwen3.gguf", "tiny-llama-q4_0.gguf"};

/* Session k of a form: sizes of its own, so that rows of several are in one block and a block in several sessions. */
static struct eh_ask ask_of(unsigned form, uint32_t k)
{
    return (struct eh_ask){
        .policy = form & 1 ? "counter_causal_fast" : "counter_causal",
        .score = form & 2 ? "logprob" : "logit",
        .span = k % 3 == 0 ? 1 : 7,
        .min_gap = k % 4,
        .budget_tokens = 40 + 9 * k,
        .keep = 25 + 5 * k,
    };
}

/* A prompt longer by a little than the budget, so that all prune in the same step. */
static uint32_t prompt_of(uint32_t k, int32_t *ret)
{
    uint32_t n = 40 + 9 * k + 5;
    assert_true(n <= PROMPT_MAX);
    prompt_fill(ret, n, 50 + k);
    return n;
}

static void ask(struct eh *h, uint64_t s, uint32_t k)
{
    int32_t ids[PROMPT_MAX];
    struct generate_options o = eh_greedy(N_NEW);
    uint32_t n = prompt_of(k, ids);
    eh_post_ids(h, s, ids, n, &o);
}

/* Steps of the engine, and what score passes there were. */
static struct watched {
    const struct kn_ops *real;
    struct kn_ops ops;
    struct kn *kn;
    uint32_t shared; /* passes of more than one session */
    uint32_t most;
} watched;

static void watch_batch(struct kn *kn, const struct kn_batch *b)
{
    if (b->slots == NULL) {
        watched.shared += b->n_seqs > 1;
        watched.most = BC_MAX(watched.most, b->n_seqs);
    }
    watched.real->batch_begin(kn, b);
}

static void rows_set(struct engine_options *o, void *arg)
{
    o->max_rows = 512;
    o->score_rows = *(const uint32_t *)arg;
}

static struct eh *open_watched(const char *model, uint32_t score_rows)
{
    struct eh *h = eh_open(model, rows_set, &score_rows);
    struct kn *kn = h->en->default_model->kn;
    watched = (struct watched){.real = kn->ops, .ops = *kn->ops, .kn = kn};
    watched.ops.batch_begin = watch_batch;
    kn->ops = &watched.ops;
    return h;
}

static void close_watched(struct eh **h)
{
    watched.kn->ops = watched.real;
    eh_close(h); /* asserts that every byte is back */
}

/* Each in an engine of its own. */
static void run_alone(const char *model, unsigned form, struct eh **ret, uint64_t *session)
{
    for (uint32_t k = 0; k < N; k++) {
        struct eh_ask a = ask_of(form, k);
        ret[k] = eh_open(model, NULL, NULL);
        session[k] = eh_session(ret[k], &a);
        ask(ret[k], session[k], k);
        eh_run_to_end(ret[k], session[k]);
        assert_int_equal(eh_stream(ret[k], session[k])->n_ids, N_NEW);
        assert_true(eh_stream(ret[k], session[k])->n_prunes >= 1);
    }
}

static void same_stream(const struct eh_stream *got, const struct eh_stream *want, uint32_t k)
{
    if (got->n_ids != want->n_ids || got->n_prunes != want->n_prunes ||
        memcmp(got->ids, want->ids, want->n_ids * sizeof *want->ids) != 0)
        fail_msg("session %u: %u tokens and %u prunes, alone %u and %u, or other tokens", k,
                 got->n_ids, got->n_prunes, want->n_ids, want->n_prunes);
    for (uint32_t i = 0; i < want->n_prunes; i++) {
        const struct eh_prune *x = &got->prunes[i], *y = &want->prunes[i];
        assert_int_equal(x->before, y->before);
        assert_int_equal(x->after, y->after);
        assert_int_equal(x->n_ranges, y->n_ranges);
        assert_memory_equal(x->ranges, y->ranges, x->n_ranges * sizeof *x->ranges);
    }
}

/* What befalls the others while the refreshes run; those of mask `gone` have another story after it. */
struct mishap {
    uint32_t gone;
    void (*happens)(struct eh *h, const uint64_t *s);
};

static uint32_t pruning(struct eh *h, const uint64_t *s)
{
    uint32_t n = 0;
    for (uint32_t k = 0; k < N; k++) {
        const struct session *x = sess_find(h->en, s[k]);
        n += x != NULL && x->prune.active;
    }
    return n;
}

static void run_together(const char *model, unsigned form, uint32_t score_rows, bool neighbour,
                         const struct mishap *m, struct eh *const *alone,
                         const uint64_t *alone_session)
{
    struct eh *h = open_watched(model, score_rows);
    struct generate_options endless = eh_greedy(1500);
    uint64_t s[N];
    endless.ignore_end = true;
    if (neighbour) {
        uint64_t other = eh_session(h, &(struct eh_ask){.policy = "none"});
        int32_t ids[5];
        prompt_fill(ids, ARRAY_LEN(ids), 3);
        eh_ids(h, other, ids, ARRAY_LEN(ids), &endless);
        while (eh_stream(h, other)->n_ids == 0)
            eh_step(h);
    }
    for (uint32_t k = 0; k < N; k++) {
        struct eh_ask a = ask_of(form, k);
        s[k] = eh_session(h, &a);
        ask(h, s[k], k);
    }
    if (m->happens != NULL) { /* small slices: they are not done in one step */
        while (pruning(h, s) < N - 2)
            assert_true(eh_step(h));
        assert_true(eh_step(h));
        m->happens(h, s);
    }
    for (uint32_t k = 0; k < N; k++) {
        if (m->gone >> k & 1)
            continue;
        eh_run_to_end(h, s[k]);
        same_stream(eh_stream(h, s[k]), eh_stream(alone[k], alone_session[k]), k);
    }
    assert_true(watched.shared > 0 && watched.most <= EVICT_TOGETHER_MAX);
    close_watched(&h);
}

/* ---- mishaps: of the oldest, in the middle of a block, of one that has not begun ---- */

static void some_are_closed(struct eh *h, const uint64_t *s)
{
    assert_true(pruning(h, s) > 5);
    eh_close_session(h, s[4]);
    eh_step(h);
    eh_close_session(h, s[2]);
    eh_close_session(h, s[10]);
}

static void some_are_cancelled(struct eh *h, const uint64_t *s)
{
    for (uint32_t k = 3; k < 10; k += 3) {
        eh_post(h, eh_command(h, CMD_CANCEL, s[k]));
        eh_step(h);
    }
}

/* One that is asked for takes the place of the run under way, and keeps other tokens. */
static void some_begin_again(struct eh *h, const uint64_t *s)
{
    for (uint32_t k = 5; k < 9; k++) {
        struct command *c = eh_command(h, CMD_PRUNE, s[k]);
        c->u.budget.keep = 24;
        eh_post(h, c);
        eh_step(h);
        const struct session *x = sess_find(h->en, s[k]);
        assert_true(x->prune.active && x->prune.reply && x->prune.keep == 24);
    }
}

static const struct mishap mishaps[] = {
    {0, NULL},
    {1u << 4 | 1u << 2 | 1u << 10, some_are_closed},
    {1u << 3 | 1u << 6 | 1u << 9, some_are_cancelled},
    {1u << 5 | 1u << 6 | 1u << 7 | 1u << 8, some_begin_again},
};

static void a_cache_keeps_the_same_alone_and_together(void **state)
{
    (void)state;
    static const uint32_t score_rows[] = {256, 20};
    for (size_t model = 0; model < (SANITIZED ? 1 : ARRAY_LEN(models)); model++)
        for (unsigned form = 0; form < 4; form++) {
            struct eh *alone[N];
            uint64_t session[N];
            run_alone(models[model], form, alone, session);
            for (size_t i = 0; i < ARRAY_LEN(mishaps); i++) {
                bool neighbour = (form + i + model) % 2;
                run_together(models[model], form, score_rows[i > 0], neighbour, &mishaps[i], alone,
                             session);
            }
            for (uint32_t k = 0; k < N; k++)
                eh_close(&alone[k]);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_cache_keeps_the_same_alone_and_together),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
