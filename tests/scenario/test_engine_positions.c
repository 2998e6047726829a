/* positions = rerotate: sessions of a model that was trained on texts of 160 tokens go on past that several times. Their text does
 * not depend on threads, neighbours, or where a prompt is cut; nobody else's pages are written; what is saved, forked, or replayed out of
 * a journal goes on as an undisturbed run does, to the bit. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "core.h"
#include "daemon_harness.h"
#include "durable_test.h"
#include "folders_test.h"
#include "records.h"
#include "sanitized.h"

#define CONTEXT 160u
#define N_PROMPT 350u
#define N_NEW 130u
#define POLICIES_MAX 16u

static char root[FOLDER_PATH], llama[FOLDER_PATH + 32], qwen3[FOLDER_PATH + 32];
static int32_t prompt[2000];

static int setup(void **state)
{
    (void)state;
    folder_root_memory(root, "positions");
    snprintf(llama, sizeof llama, "%s/llama.gguf", root);
    snprintf(qwen3, sizeof qwen3, "%s/qwen3.gguf", root);
    dh_context_model(llama, "tiny-llama.gguf", CONTEXT);
    dh_context_model(qwen3, "tiny-qwen3.gguf", CONTEXT);
    prompt_fill(prompt, ARRAY_LEN(prompt), 21);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    folder_drop(root);
    return 0;
}

/* ---- what always holds ---- */

/* No cached token outside of the trained context, in order, and never behind its stream index. */
static void positions_hold(struct eh *h)
{
    for (uint32_t i = 0; i < h->en->n_sessions; i++) {
        const struct session *s = h->en->list[i];
        const int32_t *at = seqcache_positions(s->cache);
        uint32_t n = seqcache_count(s->cache);
        for (uint32_t k = 0; k < n; k++)
            if (at[k] < (int32_t)k || at[k] >= (int32_t)CONTEXT || (k > 0 && at[k] <= at[k - 1]) ||
                (uint64_t)at[k] > seqcache_stream(s->cache)[k])
                fail_msg("token %u of %u is at %d", k, n, at[k]);
    }
}

/* Events stand where the arithmetic of the stream says: each begins CONTEXT - tokens before the next. */
static void events_hold(const struct eh_stream *s, uint32_t least)
{
    if (s->n_rerotated < least)
        fail_msg("%u renumberings, at least %u expected", s->n_rerotated, least);
    for (uint32_t i = 0; i < s->n_rerotated; i++) {
        const struct report *r = &s->rerotated[i];
        assert_int_equal(r->u.rerotated.position, CONTEXT);
        assert_in_range(r->u.rerotated.tokens, 1, CONTEXT - 1);
        if (i == 0)
            assert_int_equal(r->u.rerotated.stream, CONTEXT);
        else
            assert_int_equal(r->u.rerotated.stream,
                             r[-1].u.rerotated.stream + CONTEXT - r[-1].u.rerotated.tokens);
    }
}

static void same_stream(const struct eh_stream *got, const struct eh_stream *want, const char *what)
{
    if (got->n_ids != want->n_ids || got->n_prunes != want->n_prunes ||
        got->n_rerotated != want->n_rerotated ||
        memcmp(got->ids, want->ids, want->n_ids * sizeof *want->ids) != 0)
        fail_msg("%s: %u tokens, %u prunes, %u renumberings; alone %u, %u and %u, or other tokens",
                 what, got->n_ids, got->n_prunes, got->n_rerotated, want->n_ids, want->n_prunes,
                 want->n_rerotated);
    for (uint32_t i = 0; i < want->n_rerotated; i++) {
        assert_int_equal(got->rerotated[i].u.rerotated.stream,
                         want->rerotated[i].u.rerotated.stream);
        assert_int_equal(got->rerotated[i].u.rerotated.tokens,
                         want->rerotated[i].u.rerotated.tokens);
    }
    for (uint32_t i = 0; i < want->n_prunes; i++) {
        assert_int_equal(got->prunes[i].n_ranges, want->prunes[i].n_ranges);
        assert_memory_equal(got->prunes[i].ranges, want->prunes[i].ranges,
                            want->prunes[i].n_ranges * sizeof *want->prunes[i].ranges);
    }
}

/* The stored keys of all layers, to the bit. */
static void keys_equal(struct eh *a, uint64_t sa, struct eh *b, uint64_t sb, const char *what)
{
    const struct session *x = sess_find(a->en, sa), *y = sess_find(b->en, sb);
    const struct kn_kv *kv = pool_kv(x->pool);
    struct kn_seq vx = seqcache_view(x->cache), vy = seqcache_view(y->cache);
    assert_int_equal(vx.n, vy.n);
    size_t n = (size_t)vx.n * kv->n_kv_heads * kv->head_dim;
    float *kx = malloc((n + 1) * sizeof *kx), *ky = malloc((n + 1) * sizeof *ky);
    assert_true(kx != NULL && ky != NULL);
    for (uint32_t l = 0; l < kv->n_layers; l++) {
        x->m->kn->ops->keys_read(x->m->kn, &vx, l, 0, vx.n, kx);
        y->m->kn->ops->keys_read(y->m->kn, &vy, l, 0, vy.n, ky);
        if (memcmp(kx, ky, n * sizeof *kx) != 0)
            fail_msg("%s: keys of layer %u differ", what, l);
    }
    free(kx);
    free(ky);
}

/* ---- any threads, neighbours, cuts ---- */

struct how {
    uint32_t threads, chunk;
};

static void how_set(struct engine_options *o, void *arg)
{
    const struct how *how = arg;
    o->threads = how->threads;
    o->prefill_chunk = how->chunk;
    o->score_rows = 30;
}

static struct eh_ask ask_of(unsigned p)
{
    static const char *const types[] = {"f16", "f32", "bf16"};
    return (struct eh_ask){.policy = evict_policy_at(p)->name,
                           .positions = "rerotate",
                           .budget_tokens = p == 0 ? CONTEXT : 64 + 8 * p, /* up to all of it */
                           .frozen = p % 3,
                           .kv_type = types[p % 3],
                           .seed = 5 + p};
}

static void ask(struct eh *h, uint64_t s, unsigned p)
{
    struct generate_options o = eh_greedy(N_NEW);
    o.temperature = p % 2 == 1 ? 0.9f : 0;
    o.seed = 70 + p;
    eh_ids(h, s, prompt, N_PROMPT, &o);
}

static unsigned run_alone(const char *model, struct eh **ret, uint64_t *session)
{
    struct how how = {1, 50};
    unsigned n = 0;
    for (; evict_policy_at(n) != NULL && evict_policy_prunes(evict_policy_at(n)); n++) {
        struct eh_ask a = ask_of(n);
        assert_true(n < POLICIES_MAX);
        ret[n] = eh_open(model, how_set, &how);
        session[n] = eh_session(ret[n], &a);
        ret[n]->on_step = positions_hold;
        ask(ret[n], session[n], n);
        eh_run_to_end(ret[n], session[n]);
        const struct eh_stream *s = eh_stream(ret[n], session[n]);
        assert_int_equal(s->end.u.end.reason, END_LENGTH);
        assert_int_equal(s->n_ids, N_NEW);
        events_hold(s, 3);
    }
    return n;
}

static void run_together(const char *model, struct how how, unsigned n, struct eh *const *alone,
                         const uint64_t *alone_session)
{
    struct eh *h = eh_open(model, how_set, &how);
    uint64_t session[POLICIES_MAX];
    char what[160];
    for (unsigned p = 0; p < n; p++) {
        struct eh_ask a = ask_of(p);
        session[p] = eh_session(h, &a);
    }
    h->on_step = positions_hold;
    for (unsigned p = 0; p < n; p++)
        ask(h, session[p], p);
    for (unsigned p = 0; p < n; p++) {
        snprintf(what, sizeof what, "%s, %s, %u threads, chunk %u", model, evict_policy_at(p)->name,
                 how.threads, how.chunk);
        eh_run_to_end(h, session[p]);
        same_stream(eh_stream(h, session[p]), eh_stream(alone[p], alone_session[p]), what);
        keys_equal(h, session[p], alone[p], alone_session[p], what);
    }
    eh_close(&h);
}

static void endless_texts_do_not_depend_on_threads_neighbours_or_cuts(void **state)
{
    (void)state;
    static const struct how hows[] = {{1, 1}, {2, 7}, {4, 70}};
    const char *const models[] = {llama, qwen3};
    for (size_t m = 0; m < (SANITIZED ? 1 : ARRAY_LEN(models)); m++) {
        struct eh *alone[POLICIES_MAX];
        uint64_t session[POLICIES_MAX];
        unsigned n = run_alone(models[m], alone, session);
        assert_int_equal(n, 9);
        for (size_t i = 0; i < (SANITIZED ? 2 : ARRAY_LEN(hows)); i++)
            run_together(models[m], hows[i], n, alone, session);
        for (unsigned p = 0; p < n; p++)
            eh_close(&alone[p]);
    }
}

/* One answer that is many times as long as the context. */
static void an_answer_need_not_end(void **state)
{
    (void)state;
    struct how how = {1, 50};
    struct eh *h = eh_open(llama, how_set, &how);
    struct generate_options o = eh_greedy(SANITIZED ? 1000 : 3000);
    uint64_t s = eh_session(h, &(struct eh_ask){.positions = "rerotate", .budget_tokens = 64});
    const struct eh_stream *st = eh_stream(h, s);
    h->on_step = positions_hold;
    eh_ids(h, s, prompt, 5, &o);
    eh_run_to_end(h, s);
    assert_int_equal(st->end.u.end.reason, END_LENGTH);
    assert_int_equal(st->n_ids, o.max_tokens);
    for (uint32_t i = 0; i < st->n_ids; i++) /* stream indices have no hole */
        assert_int_equal(st->streams[i], 5 + i);
    events_hold(st, o.max_tokens / CONTEXT);
    assert_true(seqcache_rows_moved(sess_find(h->en, s)->cache) ==
                0); /* keys turn where they lie */
    eh_close(&h);
}

/* ---- with others in the same pages ---- */

static void share_set(struct engine_options *o, void *arg)
{
    o->no_prefixes = arg != NULL;
    o->prefill_chunk = 50;
    o->score_rows = 30;
}

/* Two sessions with one beginning, and a fork. */
static void shared_pages_are_left_alone(void **state)
{
    (void)state;
    const struct eh_ask asks[2] = {
        {.positions = "rerotate", .budget_tokens = 155, .frozen = 70},
        {.positions = "rerotate", .budget_tokens = 140, .policy = "h2o"},
    };
    struct generate_options o = eh_greedy(10), more = eh_greedy(400);
    int shy;
    for (int k = 0; k < 2; k++) {
        struct eh *h = eh_open(llama, share_set, NULL), *alone = eh_open(llama, share_set, &shy);
        struct eh_ask b = asks[k];
        b.positions = "keep";
        uint64_t one = eh_session(h, &asks[k]), other = eh_session(h, &b);
        uint64_t lone = eh_session(alone, &asks[k]), lone_b = eh_session(alone, &b);
        eh_ids(h, one, prompt, 130, &o);
        eh_run_to_end(h, one);
        eh_ids(h, other, prompt, 130, &o);
        eh_run_to_end(h, other);
        assert_int_equal(eh_stream(h, other)->end.u.end.tokens_adopted, 128);
        eh_ids(alone, lone, prompt, 130, &o);
        eh_run_to_end(alone, lone);
        eh_ids(alone, lone_b, prompt, 130, &o);
        eh_run_to_end(alone, lone_b);
        uint64_t f = eh_expect(h, eh_post_fork(h, one, NULL), REP_OPENED)->session;
        h->on_step = positions_hold;
        eh_ids(h, one, prompt + 500, 20, &more); /* goes round several times; the others rest */
        eh_run_to_end(h, one);
        eh_ids(alone, lone, prompt + 500, 20, &more);
        eh_run_to_end(alone, lone);
        events_hold(eh_stream(h, one), 2);
        same_stream(eh_stream(h, one), eh_stream(alone, lone), "beside others");
        keys_equal(h, one, alone, lone, "beside others");
        keys_equal(h, other, alone, lone_b, "the one that keeps its positions");
        size_t page = pool_page_bytes(sess_find(h->en, one)->pool);
        size_t shared = seqcache_bytes_shared(sess_find(h->en, one)->cache);
        assert_int_equal(shared, k == 0 ? page : 0); /* 64 of the frozen ones need not move */
        eh_ids(h, f, prompt + 500, 20, &more);
        eh_run_to_end(h, f);
        const struct eh_stream *x = eh_stream(h, f), *y = eh_stream(alone, lone);
        assert_int_equal(x->n_ids, 400);
        assert_memory_equal(x->ids, y->ids + 10, 400 * sizeof *x->ids);
        keys_equal(h, f, alone, lone, "the fork");
        eh_close(&h);
        eh_close(&alone);
    }
}

/* Nothing that was turned is a beginning for others. */
static void turned_pages_are_not_offered(void **state)
{
    (void)state;
    struct eh *h = eh_open(llama, share_set, NULL);
    struct generate_options o = eh_greedy(1);
    uint64_t s = eh_session(h, &(struct eh_ask){.positions = "rerotate", .budget_tokens = 140});
    eh_ids(h, s, prompt, 1000, &o);
    eh_run_to_end(h, s);
    events_hold(eh_stream(h, s), 5);
    const struct share_tree *t = sess_find(h->en, s)->tree;
    uint32_t offered = prefix_pages(t->tree);
    assert_true(offered <= 2); /* of before the first prune */
    eh_ids(h, s, prompt, 1000, &o);
    eh_run_to_end(h, s);
    assert_true(prefix_pages(t->tree) <= offered);
    eh_close(&h);
}

/* ---- away and back ---- */

static const struct eh_ask kept[] = {
    {.policy = "counter_causal_fast", .budget_tokens = 100},
    {.policy = "tova", .budget_tokens = 70, .kv_type = "f32"},
    {.policy = "h2o", .budget_tokens = 90, .kv_type = "bf16", .frozen = 3},
    {.policy = "random", .budget_tokens = 66, .seed = 11},
    {.model = qwen3, .policy = "counter_causal", .budget_tokens = 80, .kv_type = "q8_0"},
    {.model = qwen3, .policy = "tova", .budget_tokens = 90, .kv_type = "q8_q4"},
};

static struct eh_ask kept_ask(size_t i, bool durable)
{
    struct eh_ask a = kept[i];
    a.positions = "rerotate";
    a.durable = durable;
    a.name = durable ? "work" : NULL;
    return a;
}

static struct eh *engine_on(char *dir)
{
    return durable_engine(&(struct durable_setup){.dir = dir, .model = llama});
}

static void turn(struct eh *h, uint64_t s, int k)
{
    struct generate_options o = eh_greedy(120);
    o.temperature = k == 1 ? 0.7f : 0;
    o.seed = 5;
    eh_ids(h, s, prompt + k * 300, 150, &o);
}

static void a_saved_session_goes_on_as_if_it_had_stayed(void **state)
{
    (void)state;
    char dir[FOLDER_PATH];
    for (size_t i = 0; i < ARRAY_LEN(kept); i++) {
        struct eh_ask a = kept_ask(i, false);
        folder_fresh(dir, root, "saved");
        struct eh *stay = engine_on(NULL), *h = engine_on(dir);
        uint64_t s = eh_session(stay, &a), t = eh_session(h, &a);
        turn(stay, s, 0);
        eh_run_to_end(stay, s);
        turn(h, t, 0);
        eh_run_to_end(h, t);
        assert_true(sess_find(h->en, t)->position_zero > 0);
        eh_expect(h, eh_post_save(h, t, "x"), REP_DONE);
        eh_close(&h);
        h = engine_on(dir);
        const struct report *r = eh_expect(h, eh_post_restore(h, "x"), REP_OPENED);
        assert_string_equal(r->u.info.positions, "rerotate");
        t = r->session;
        sessions_equal(stay, s, h, t, a.policy);
        keys_equal(stay, s, h, t, a.policy);
        answers_equal(stay, s, h, t, prompt + 700, 150, 200, a.policy);
        keys_equal(stay, s, h, t, a.policy);
        assert_true(eh_stream(stay, s)->n_rerotated > 0);
        assert_int_equal(eh_stream(stay, s)->n_rerotated, eh_stream(h, t)->n_rerotated);
        eh_close(&h);
        eh_close(&stay);
    }
}

/* The journal up to a moment of the second turn, in an engine of its own: it goes on as the undisturbed one. */
static void killed_here(char *copy, struct eh *truth, uint64_t ts, const char *what)
{
    struct eh *h = engine_on(copy);
    uint64_t s = eh_attach(h, "work");
    assert_true(s != 0);
    struct eh_stream *st = eh_stream(h, s);
    const struct eh_stream *want = eh_stream(truth, ts);
    if (st->busy)
        eh_run_to_end(h, s);
    eh_run(h);
    assert_true(sess_find(h->en, s)->replay == NULL);
    if (st->n_ids != want->n_ids || memcmp(st->ids, want->ids, st->n_ids * sizeof *st->ids) != 0)
        fail_msg("%s: %u tokens, %u in the undisturbed run, or others", what, st->n_ids,
                 want->n_ids);
    assert_int_equal(st->n_rerotated, want->n_rerotated); /* told ones of before, and those since */
    for (uint32_t i = 0; i < want->n_rerotated; i++) {
        assert_int_equal(st->rerotated[i].u.rerotated.stream,
                         want->rerotated[i].u.rerotated.stream);
        assert_int_equal(st->rerotated[i].u.rerotated.tokens,
                         want->rerotated[i].u.rerotated.tokens);
    }
    sessions_equal(truth, ts, h, s, what);
    keys_equal(truth, ts, h, s, what);
    eh_close(&h);
}

static void replay_gives_the_same_bits(void **state)
{
    (void)state;
    char dir[FOLDER_PATH], copy[FOLDER_PATH], what[100];
    for (size_t i = 0; i < (SANITIZED ? 2 : ARRAY_LEN(kept)); i++) {
        struct eh_ask a = kept_ask(i, false), d = kept_ask(i, true);
        folder_fresh(dir, root, "live");
        struct eh *truth = engine_on(NULL), *h = engine_on(dir);
        uint64_t ts = eh_session(truth, &a), s = eh_session(h, &d);
        uint32_t steps = 0, n = 0;
        for (int k = 0; k < 2; k++) {
            eh_forget(truth, ts);
            turn(truth, ts, k);
            eh_run_to_end(truth, ts);
        }
        assert_true(eh_stream(truth, ts)->n_rerotated >= 2);
        turn(h, s, 0);
        eh_run_to_end(h, s);
        turn(h, s, 1);
        uint32_t ends = eh_stream(h, s)->n_ends;
        while (eh_stream(h, s)->n_ends == ends) {
            eh_step(h);
            if (++steps % 29 != (uint32_t)i)
                continue;
            folder_fresh(copy, root, "copy");
            folder_copy(dir, copy);
            snprintf(what, sizeof what, "%s, step %u", a.policy, steps);
            killed_here(copy, truth, ts, what);
            n++;
        }
        assert_true(n >= 4);
        sessions_equal(truth, ts, h, s, a.policy);
        eh_close(&h);
        eh_close(&truth);
    }
}

/* The state of a file that an earlier version wrote says nothing of positions: they were kept. */
static void state_of_an_earlier_version_is_read(void **state)
{
    (void)state;
    struct eh *h = engine_on(NULL);
    struct eh_ask a = kept_ask(0, false);
    uint64_t id = eh_session(h, &a);
    struct session *s = sess_find(h->en, id);
    const uint32_t earlier = 2;
    struct bytes_out o = {0};
    struct sess_state *st = malloc(sizeof *st);
    struct err e = {0};
    assert_non_null(st);
    turn(h, id, 0);
    eh_run_to_end(h, id);
    sess_state_put(s, &o);
    assert_int_equal(sess_state_get(o.at, o.n, st, &e), BC_OK);
    assert_true(st->rerotate && st->position_zero == s->position_zero && st->position_zero > 0);
    uint8_t *bytes = o.at, *at = memmem(bytes, o.n, &s->stream, sizeof s->stream);
    assert_non_null(at);
    at += sizeof s->stream; /* then: u32 rerotate, u64 position_zero */
    memset(at + 4, 0, 8);
    assert_int_equal(sess_state_get(o.at, o.n, st, &e), BC_OK);
    *at = 0;
    at[4] = 1; /* a keeper of positions that was renumbered */
    assert_int_equal(sess_state_get(o.at, o.n, st, &e), BC_ECORRUPT);
    memmove(at, at + 12, (size_t)(bytes + o.n - (at + 12)));
    memcpy(bytes, &earlier, sizeof earlier);
    assert_int_equal(sess_state_get(o.at, o.n - 12, st, &e), BC_OK);
    assert_true(!st->rerotate && st->position_zero == 0 && st->stream == s->stream);
    assert_int_equal(st->tokens_out, s->tokens_out); /* what follows is in its place */
    free(st);
    free(o.at);
    eh_close(&h);
}

/* ---- what is refused ---- */

static void what_cannot_be_is_refused(void **state)
{
    (void)state;
    struct how how = {1, 50};
    struct eh *h = eh_open(llama, how_set, &how);
    const struct eh_ask bad[] = {
        {.positions = "rerotate", .policy = "none"},
        {.positions = "rerotate", .policy = "none", .budget_tokens = 100},
        {.positions = "rerotate",
         .trigger = "prefill_end",
         .keep = 50,
         .budget_tokens = CONTEXT + 1},
        {.positions = "rerotate", .budget_tokens = CONTEXT + 1},
        {.positions = "rerotate"}, /* the default budget is larger */
    };
    for (size_t i = 0; i < ARRAY_LEN(bad); i++)
        eh_expect_error(h, eh_post_open(h, &bad[i]), BC_EINVALID, "positions");
    eh_expect_error(h, eh_post_open(h, &(struct eh_ask){.positions = "spin", .budget_tokens = 64}),
                    BC_EUNKNOWN, "positions");
    uint64_t s = eh_session(h, &(struct eh_ask){.positions = "rerotate", .budget_tokens = CONTEXT});
    for (uint32_t tokens = CONTEXT + 1; tokens >= CONTEXT; tokens--) {
        struct command *c = eh_command(h, CMD_BUDGET, s);
        c->u.budget.tokens = tokens;
        if (tokens > CONTEXT)
            eh_expect_error(h, eh_post(h, c), BC_EINVALID, "positions");
        else
            eh_expect(h, eh_post(h, c), REP_BUDGET);
    }
    uint64_t keep = eh_session(h, &(struct eh_ask){.positions = "keep", .budget_tokens = 64});
    struct generate_options o = eh_greedy(300);
    eh_expect_error(h, eh_post_ids(h, keep, prompt, CONTEXT + 1, &o), BC_ECONTEXT, "ids");
    eh_ids(h, keep, prompt, 10, &o);
    eh_run_to_end(h, keep);
    assert_int_equal(eh_stream(h, keep)->end.u.end.reason, END_CONTEXT);
    eh_close(&h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(endless_texts_do_not_depend_on_threads_neighbours_or_cuts),
        cmocka_unit_test(an_answer_need_not_end),
        cmocka_unit_test(shared_pages_are_left_alone),
        cmocka_unit_test(turned_pages_are_not_offered),
        cmocka_unit_test(a_saved_session_goes_on_as_if_it_had_stayed),
        cmocka_unit_test(replay_gives_the_same_bits),
        cmocka_unit_test(state_of_an_earlier_version_is_read),
        cmocka_unit_test(what_cannot_be_is_refused),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
