/* Beginnings of prompts that sessions have in common: evaluated once, held once, and nobody can tell
 * but by the time: texts and prunes of every policy are those of a session that has its pages to
 * itself. Pages of tiny-llama: 64 tokens. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "core.h"
#include "durable_test.h"
#include "engine_harness.h"
#include "folders_test.h"
#include "records.h"
#include "sanitized.h"

#define COMMON 2000
#define OWN 100
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define PROMPT 640u /* of fifty, there ten, sessions */
#define MANY 10
#define VARIANTS(k) ((k) % 3), ((k) % 3 + 1)
#else
#define PROMPT 2000u
#define MANY 50
#define VARIANTS(k) 0, 3
#endif

static int32_t common[COMMON], own[64][OWN];

static int setup(void **state)
{
    (void)state;
    uint32_t x = 41;
    for (size_t i = 0; i < COMMON + 64 * OWN; i++) {
        x = x * 1664525u + 1013904223u;
        int32_t id = (int32_t)(3 + (x >> 8) % 280);
        if (i < COMMON)
            common[i] = id;
        else
            own[(i - COMMON) / OWN][(i - COMMON) % OWN] = id;
    }
    return 0;
}

struct setting {
    bool apart, across;
    uint64_t keep_us, kv_memory, uid_bytes, host, alive;
    uint32_t chunk;
};

static void apply(struct engine_options *o, void *arg)
{
    const struct setting *s = arg;
    o->no_prefixes = s->apart;
    o->share_across_uids = s->across;
    o->prefix_keep_us = s->keep_us;
    o->limits.uid_bytes = s->uid_bytes;
    o->host_tier = s->host;
    o->keep_alive_us = s->alive;
    o->prefill_chunk = s->chunk != 0 ? s->chunk : 64;
    o->score_rows = 100;
    if (s->kv_memory != 0)
        o->kv_memory = s->kv_memory;
}

/* After every step: what is booked is what the pools have out, each shared page once. */
static void the_books_are_right(struct eh *h)
{
    struct engine *en = h->en;
    const struct ledger_owner *all = ledger_daemon(en->ledger);
    uint64_t alone = 0;
    for (uint32_t i = 0; i < en->n_sessions; i++) {
        const struct session *s = en->list[i];
        assert_true(ledger_own(&s->owner, LEDGER_kv) <= seqcache_bytes_held(s->cache));
        alone += ledger_own(&s->owner, LEDGER_kv);
        assert_true(s->budget_bytes == 0 || seqcache_bytes_held(s->cache) <= s->budget_bytes);
        if (share_uid(en) != UINT64_MAX)
            assert_true(share_uid_held(en, s->turns) <= share_uid(en));
    }
    assert_int_equal(alone, ledger_all(all, LEDGER_kv));
    assert_int_equal(models_held(en), alone + ledger_all(all, LEDGER_shared));
    assert_true(models_held(en) <= en->kv_memory);
}

static struct eh *open_with(struct setting s)
{
    struct eh *h = eh_open("tiny-llama.gguf", apply, &s);
    h->on_step = the_books_are_right;
    /* the file says 1,024, and nothing but the check of prompts depends on it */
    h->en->default_model->info.context_train = 4096;
    return h;
}

static struct session *of(struct eh *h, uint64_t id)
{
    return sess_find(h->en, id);
}

static uint32_t pages_out(struct eh *h, uint64_t id)
{
    return pool_pages_out(of(h, id)->pool);
}

/* n tokens of the common beginning, then so many of its own. */
static void post(struct eh *h, uint64_t s, uint32_t n, uint32_t who, uint32_t n_own, uint32_t n_new)
{
    struct generate_options o = eh_greedy(n_new);
    int32_t ids[COMMON + OWN];
    memcpy(ids, common, n * sizeof *ids);
    memcpy(ids + n, own[who], n_own * sizeof *ids);
    eh_ids(h, s, ids, n + n_own, &o);
}

static uint32_t run(struct eh *h, uint64_t s, uint32_t n, uint32_t who, uint32_t n_own,
                    uint32_t n_new)
{
    post(h, s, n, who, n_own, n_new);
    eh_run_to_end(h, s);
    return eh_stream(h, s)->end.u.end.tokens_adopted;
}

static void streams_equal(const struct eh_stream *a, const struct eh_stream *b, const char *what)
{
    if (a->n_ids != b->n_ids || memcmp(a->ids, b->ids, a->n_ids * sizeof *a->ids) != 0)
        fail_msg("%s: the text differs", what);
    assert_memory_equal(a->streams, b->streams, a->n_ids * sizeof *a->streams);
    if (a->n_prunes != b->n_prunes)
        fail_msg("%s: %u prunes, not %u", what, b->n_prunes, a->n_prunes);
    for (uint32_t i = 0; i < a->n_prunes; i++) {
        assert_int_equal(a->prunes[i].before, b->prunes[i].before);
        assert_int_equal(a->prunes[i].n_ranges, b->prunes[i].n_ranges);
        assert_memory_equal(a->prunes[i].ranges, b->prunes[i].ranges,
                            a->prunes[i].n_ranges * sizeof(struct evict_range));
        assert_int_equal(a->prunes[i].reason, b->prunes[i].reason);
    }
}

/* ---- exact ---- */

static struct eh_ask ask_of(unsigned policy, unsigned variant)
{
    const char *name = evict_policy_at(policy)->name;
    struct eh_ask ask = {.policy = name, .seed = 9};
    if (!evict_policy_prunes(evict_policy_at(policy)))
        return ask;
    ask.frozen = variant == 1 ? 70 : 0;
    /* it prunes in its prompt; at its end; at the end of a page, where adopting would end too */
    ask.budget_tokens = variant == 0 ? 192 : variant == 1 ? 150 : 400;
    ask.trigger = variant == 2 ? "prefill_end" : "budget";
    ask.keep = variant == 2 ? 100 : 0;
    return ask;
}

static void every_policy_says_and_forgets_the_same(void **state)
{
    (void)state;
    static const uint32_t n_common[3] = {200, 150, 256};
    for (unsigned k = 0; evict_policy_at(k) != NULL; k++)
        for (unsigned range[2] = {VARIANTS(k)}, variant = range[0]; variant < range[1]; variant++) {
            struct eh *a = open_with((struct setting){.apart = true, .chunk = 50});
            struct eh *b = open_with((struct setting){.keep_us = UINT64_MAX / 2});
            struct eh_ask ask = ask_of(k, variant);
            uint64_t s[4], t[4];
            for (unsigned i = 0; i < 4; i++) { /* the first gives, the others take */
                struct eh_ask wide = {.policy = ask.policy,
                                      .budget_tokens = ask.budget_tokens != 0 ? 600 : 0};
                s[i] = eh_session(a, i == 0 ? &wide : &ask);
                t[i] = eh_session(b, i == 0 ? &wide : &ask);
                run(a, s[i], n_common[variant], i, 40, 40);
                uint32_t adopted = run(b, t[i], n_common[variant], i, 40, 40);
                if ((i == 1 || i == 2) && adopted < 128)
                    fail_msg("%s %u: session %u adopted %u", ask.policy, variant, i, adopted);
                if (i == 2) { /* who gave goes on, and forgets what the others have of it */
                    run(a, s[0], 0, 7, 100, 250);
                    run(b, t[0], 0, 7, 100, 250);
                }
            }
            for (unsigned i = 0; i < 4; i++)
                streams_equal(eh_stream(a, s[i]), eh_stream(b, t[i]), ask.policy);
            eh_close(&a);
            eh_close(&b);
        }
}

/* Log-probabilities of a prompt are of all its tokens: they must be evaluated. */
static void a_prompt_whose_every_token_is_wanted_is_evaluated(void **state)
{
    (void)state;
    struct eh *h = open_with((struct setting){.keep_us = UINT64_MAX / 2});
    struct generate_options o = eh_greedy(0);
    uint64_t s = eh_session(h, &(struct eh_ask){.policy = "none"});
    uint64_t t = eh_session(h, &(struct eh_ask){.policy = "none"});
    run(h, s, 300, 0, 10, 0);
    o.n_logprobs = 0;
    o.prompt_logprobs = true;
    eh_ids(h, t, common, 300, &o);
    eh_run_to_end(h, t);
    assert_int_equal(eh_stream(h, t)->end.u.end.tokens_adopted, 0);
    assert_int_equal(eh_stream(h, t)->n_logprobs, 299);
    assert_int_equal(pages_out(h, t), 5 + 1); /* evaluated twice, held once */
    eh_close(&h);
}

/* ---- once ---- */

static void fifty_sessions_hold_a_common_beginning_once(void **state)
{
    (void)state;
    struct eh *h = open_with((struct setting){.keep_us = UINT64_MAX / 2});
    struct eh *a = open_with((struct setting){.apart = true});
    uint64_t s[MANY], twin[2];
    for (int i = 0; i < MANY; i++) {
        s[i] = eh_session(h, &(struct eh_ask){.policy = "h2o", .budget_tokens = 3000});
        run(h, s[i], PROMPT, (uint32_t)i, OWN, 4);
    }
    uint64_t page = pool_page_bytes(of(h, s[0])->pool), one = (PROMPT + 63) / 64 * page;
    uint64_t mine = (OWN + 4 + 63) / 64 * page;
    assert_true(models_held(h->en) <= one + one / 10 + MANY * mine);
    assert_true(ledger_all(ledger_daemon(h->en->ledger), LEDGER_shared) <= one);
    /* one forgets most of what is shared: nothing is copied, and nobody notices */
    struct command *c = eh_command(h, CMD_PRUNE, s[3]);
    c->u.budget.keep = PROMPT / 5;
    uint64_t moved = seqcache_rows_moved(of(h, s[3])->cache), before = models_held(h->en);
    eh_expect(h, eh_post(h, c), REP_PRUNED_REPLY);
    assert_int_equal(seqcache_count(of(h, s[3])->cache), PROMPT / 5);
    assert_true(seqcache_rows_moved(of(h, s[3])->cache) - moved < 64); /* its own last pages' */
    assert_true(models_held(h->en) <= before);
    for (int i = 0; i < 2; i++) {
        uint32_t who = i == 0 ? 3 : 4;
        twin[i] = eh_session(a, &(struct eh_ask){.policy = "h2o", .budget_tokens = 3000});
        run(a, twin[i], PROMPT, who, OWN, 4);
        if (i == 0) {
            c = eh_command(a, CMD_PRUNE, twin[i]);
            c->u.budget.keep = PROMPT / 5;
            eh_expect(a, eh_post(a, c), REP_PRUNED_REPLY);
        }
        run(a, twin[i], 0, 9, 40, 40);
        run(h, s[who], 0, 9, 40, 40);
        streams_equal(eh_stream(a, twin[i]), eh_stream(h, s[who]), i == 0 ? "pruned" : "not");
    }
    /* what is pruned is never offered: one that comes later gets the untouched pages */
    uint64_t late = eh_session(h, &(struct eh_ask){.policy = "h2o", .budget_tokens = 3000});
    assert_int_equal(run(h, late, PROMPT, 60, 10, 2), PROMPT / 64 * 64);
    eh_close(&a);
    eh_close(&h);
}

/* Who starts together follows the first, page by page, instead of evaluating all of it. */
static void those_who_start_together_evaluate_it_once(void **state)
{
    (void)state;
    enum { N = 12 };
    struct eh *h = open_with((struct setting){.keep_us = UINT64_MAX / 2});
    uint64_t s[N], adopted = 0;
    for (uint32_t i = 0; i < N; i++)
        s[i] = eh_session(h, &(struct eh_ask){.policy = "none"});
    for (uint32_t i = 0; i < N; i++)
        post(h, s[i], 960, i, 20, 2);
    for (uint32_t i = 0; i < N; i++) {
        eh_run_to_end(h, s[i]);
        adopted += eh_stream(h, s[i])->end.u.end.tokens_adopted;
    }
    assert_true(adopted >= (N - 8) * 960); /* a pass has rows for eight of them */
    assert_int_equal(pages_out(h, s[0]), 15 + N);
    eh_close(&h);
}

/* ---- whose ---- */

static void users_share_only_if_the_configuration_says_so(void **state)
{
    (void)state;
    for (int across = 0; across < 2; across++) {
        struct eh *h = open_with((struct setting){.keep_us = UINT64_MAX / 2,
                                                  .across = across != 0,
                                                  .uid_bytes = 24 * 34304});
        uint64_t s = eh_session(h, &(struct eh_ask){.policy = "none", .uid = 1});
        uint64_t t = eh_session(h, &(struct eh_ask){.policy = "none", .uid = 2});
        uint64_t u = eh_session(h, &(struct eh_ask){.policy = "none", .uid = 2});
        run(h, s, 640, 0, 10, 2);
        assert_int_equal(run(h, t, 640, 1, 10, 2), across ? 640 : 0);
        assert_int_equal(run(h, u, 500, 1, 10, 2), 448);
        assert_int_equal(pages_out(h, s), across ? 10 + 3 : 11 + 11 + 1);
        /* a user's share counts what it holds, shared with others or not */
        assert_int_equal(share_uid_held(h->en, of(h, s)->turns), 11 * 34304);
        assert_int_equal(share_uid_held(h->en, of(h, t)->turns),
                         across ? (11 + 8) * 34304 : 12 * 34304);
        eh_close_session(h, s);
        uint64_t v = eh_session(h, &(struct eh_ask){.policy = "none", .uid = 3});
        assert_int_equal(run(h, v, 640, 2, 0, 1), across ? 576 : 0);
        eh_close(&h);
    }
}

/* ---- idle beginnings ---- */

static void idle_beginnings_go_first_and_not_before(void **state)
{
    (void)state;
    struct eh *h = open_with((struct setting){.keep_us = UINT64_MAX / 2, .kv_memory = 12 * 34304});
    struct eh_ask none = {.policy = "none"};
    uint64_t s = eh_session(h, &none);
    run(h, s, 512, 0, 10, 2);
    eh_close_session(h, s);
    assert_int_equal(models_held(h->en), 8 * 34304); /* the tail went, the beginning waits */
    s = eh_session(h, &none);
    assert_int_equal(run(h, s, 512, 1, 10, 2), 512);
    eh_close_session(h, s);
    /* another text of eleven pages: room is made without a refusal, from the end of the idle one */
    s = eh_session(h, &none);
    run(h, s, 0, 2, 100, 0);
    run(h, s, 0, 3, 100, 0);
    run(h, s, 0, 4, 100, 0);
    run(h, s, 0, 5, 100, 0);
    run(h, s, 0, 6, 100, 2);
    assert_int_equal(eh_stream(h, s)->end.u.end.reason, END_LENGTH);
    assert_int_equal(models_held(h->en), 12 * 34304);
    uint64_t t = eh_session(h, &none);
    eh_close_session(h, s);
    assert_int_equal(run(h, t, 512, 1, 10, 2), 256); /* of eight pages, four are left */
    eh_close(&h);
    /* and when their time is over */
    h = open_with((struct setting){.keep_us = 3000000});
    s = eh_session(h, &none);
    run(h, s, 512, 0, 10, 2);
    eh_close_session(h, s);
    eh_pass(h, 1500000);
    eh_run(h);
    assert_int_equal(models_held(h->en), 8 * 34304);
    eh_pass(h, 2500000);
    eh_run(h);
    assert_int_equal(models_held(h->en), 0);
    assert_null(h->en->trees);
    eh_close(&h);
}

/* A lowered kv_memory, a user's share: the same order. */
static void ceilings_stay_hard(void **state)
{
    (void)state;
    struct eh *h = open_with((struct setting){.keep_us = UINT64_MAX / 2,
                                              .kv_memory = 64 * 34304,
                                              .uid_bytes = 12 * 34304});
    struct eh_ask none = {.policy = "none", .uid = 5};
    uint64_t s = eh_session(h, &none);
    run(h, s, 512, 0, 10, 2);
    eh_close_session(h, s);
    assert_int_equal(models_held(h->en), 8 * 34304);
    s = eh_session(h, &none);
    for (uint32_t i = 2; i < 8; i++) /* 600 tokens of its own: ten pages, and two idle ones */
        run(h, s, 0, i, 100, 0);
    assert_int_equal(models_held(h->en), 12 * 34304); /* checked after every step as well */
    struct command *c = eh_command(h, CMD_LIMITS, 0);
    c->admin = true;
    c->u.limits.kv_memory = 11 * 34304;
    c->u.limits.limits.uid_bytes = 12 * 34304;
    eh_expect(h, eh_post(h, c), REP_DONE);
    eh_run(h);
    assert_int_equal(models_held(h->en), 11 * 34304);
    eh_close(&h);
}

/* Sessions that share most of what they have are pruned until a lowered share holds them all. */
static void a_lowered_share_is_reached_through_shared_pages(void **state)
{
    (void)state;
    for (unsigned k = 0; evict_policy_at(k) != NULL; k++) {
        const char *policy = evict_policy_at(k)->name;
        if (!evict_policy_prunes(evict_policy_at(k)) || k % (SANITIZED ? 4 : 2) != 0)
            continue; /* what is done with values does not depend on where they come from */
        struct eh *h = open_with((struct setting){.keep_us = UINT64_MAX / 2});
        h->on_step = NULL; /* it is above the share until it has come down */
        struct eh_ask ask = {.policy = policy, .budget_tokens = 500};
        uint64_t s[3];
        for (uint32_t i = 0; i < 3; i++) {
            s[i] = eh_session(h, &ask);
            run(h, s[i], 300, i, i < 2 ? 60 : 0, 0);
        }
        uint64_t page = pool_page_bytes(of(h, s[0])->pool), before = models_held(h->en) / page;
        assert_int_equal(before, 4 + 2 + 2 + 1);
        for (uint64_t pages = before - 1; pages >= 3; pages--) {
            struct command *c = eh_command(h, CMD_LIMITS, 0);
            c->admin = true;
            c->u.limits.kv_memory = h->en->kv_memory;
            c->u.limits.limits.uid_bytes = pages * page;
            eh_expect(h, eh_post(h, c), REP_DONE);
            for (int step = 0; step < 2000 && models_held(h->en) > pages * page; step++)
                eh_step(h);
            if (models_held(h->en) > pages * page)
                fail_msg("%s: %u pages of %u are held", policy,
                         (unsigned)(models_held(h->en) / page), (unsigned)pages);
        }
        for (uint32_t i = 0; i < 3; i++) {
            run(h, s[i], 0, 9, 30, 5);
            assert_int_equal(eh_stream(h, s[i])->n_ids, 5);
        }
        eh_close(&h);
    }
}

/* ---- with the rest ---- */

static void what_comes_back_from_a_tier_is_shared_again(void **state)
{
    (void)state;
    struct eh *h = open_with((struct setting){.keep_us = UINT64_MAX / 2, .host = 64 << 20});
    struct eh *a = open_with((struct setting){.apart = true});
    struct eh_ask ask = {.policy = "h2o", .budget_tokens = 700};
    uint64_t s[3], t[3];
    struct err e;
    for (uint32_t i = 0; i < 3; i++) {
        s[i] = eh_session(h, &ask);
        t[i] = eh_session(a, &ask);
        run(h, s[i], 600, i, 20, 10);
        run(a, t[i], 600, i, 20, 10);
    }
    uint32_t before = pages_out(h, s[0]);
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(tier_leave(h->en, of(h, s[i]), &e), BC_OK);
    eh_run(h);
    assert_int_equal(of(h, s[0])->lodging.place, PLACE_AWAY);
    assert_int_equal(pages_out(h, s[0]), before - 2);
    for (uint32_t i = 0; i < 3; i++) {
        run(h, s[i], 0, 10 + i, 100, 50);
        run(a, t[i], 0, 10 + i, 100, 50);
        streams_equal(eh_stream(a, t[i]), eh_stream(h, s[i]), "back");
    }
    assert_int_equal(h->en->tier.returns, 2);
    assert_true(seqcache_bytes_shared(of(h, s[0])->cache) > 0);
    eh_close(&a);
    eh_close(&h);
}

/* Sessions that a daemon was killed under are replayed, share what they have in common again, and go on
 * as those that were not killed. */
static void replayed_sessions_share_again(void **state)
{
    (void)state;
    static const char *const names[3] = {"one", "two", "three"};
    static const char *const policies[3] = {"h2o", "tova", "none"};
    char root[FOLDER_PATH], dir[FOLDER_PATH], kill[FOLDER_PATH];
    folder_root(root, "prefix");
    for (int k = 0; k < 3; k++) {
        folder_fresh(dir, root, "live");
        folder_fresh(kill, root, "kill");
        struct eh *a = durable_engine(&(struct durable_setup){.dir = dir});
        uint64_t s[3], t[3];
        for (uint32_t i = 0; i < 3; i++) {
            s[i] = eh_session(a, &(struct eh_ask){.policy = policies[k],
                                                  .budget_tokens = k < 2 ? 300 : 0,
                                                  .name = names[i],
                                                  .durable = true});
            assert_int_equal(run(a, s[i], 200, i, 40, 20), i > 0 ? 192 : 0);
        }
        folder_copy(dir, kill);
        struct eh *b = durable_engine(&(struct durable_setup){.dir = kill});
        b->on_step = the_books_are_right;
        for (uint32_t i = 0; i < 3; i++) {
            t[i] = eh_attach(b, names[i]);
            assert_true(t[i] != 0);
        }
        eh_run(b);
        for (uint32_t i = 0; i < 3; i++) {
            sessions_equal(a, s[i], b, t[i], policies[k]);
            assert_int_equal(seqcache_bytes_shared(of(b, t[i])->cache),
                             seqcache_bytes_shared(of(a, s[i])->cache));
            assert_true(seqcache_bytes_shared(of(b, t[i])->cache) > 0);
        }
        for (uint32_t i = 0; i < 3; i++)
            answers_equal(a, s[i], b, t[i], own[10 + i], 80, 50, policies[k]);
        eh_close(&a);
        eh_close(&b);
    }
    folder_drop(root);
}

static void a_model_that_sleeps_takes_idle_beginnings_along(void **state)
{
    (void)state;
    struct eh *h = open_with((struct setting){.keep_us = UINT64_MAX / 2, .alive = 500});
    uint64_t s = eh_session(h, &(struct eh_ask){.policy = "none"});
    run(h, s, 512, 0, 10, 2);
    eh_close_session(h, s);
    struct model_ref *m = h->en->models;
    eh_pass(h, 1000);
    eh_run(h);
    assert_int_equal(m->state, MODEL_ASLEEP);
    assert_null(h->en->trees);
    assert_int_equal(models_held(h->en), 0);
    s = eh_session(h, &(struct eh_ask){.policy = "none"});
    assert_int_equal(run(h, s, 512, 0, 10, 2), 0);
    eh_close(&h);
}

/* A budget that shrinks below what shared pages hold. */
static void a_budget_shrinks_through_shared_pages(void **state)
{
    (void)state;
    struct eh *h = open_with((struct setting){.keep_us = UINT64_MAX / 2});
    struct eh *a = open_with((struct setting){.apart = true});
    struct eh_ask ask = {.policy = "h2o", .budget_tokens = 900};
    struct eh *eng[2] = {a, h};
    uint64_t s[2][2];
    for (int k = 0; k < 2; k++)
        for (uint32_t i = 0; i < 2; i++) {
            s[k][i] = eh_session(eng[k], &ask);
            run(eng[k], s[k][i], 640, i, 20, 10);
        }
    for (int k = 0; k < 2; k++) {
        struct command *c = eh_command(eng[k], CMD_BUDGET, s[k][1]);
        c->u.budget.tokens = 200;
        const struct report *r = eh_expect(eng[k], eh_post(eng[k], c), REP_BUDGET);
        assert_int_equal(r->u.info.budget_bytes, 4 * 34304);
        assert_true(r->u.info.held <= 4 * 34304);
        for (uint32_t i = 0; i < 2; i++)
            run(eng[k], s[k][i], 0, 20 + i, 100, 100);
    }
    for (uint32_t i = 0; i < 2; i++)
        streams_equal(eh_stream(a, s[0][i]), eh_stream(h, s[1][i]), "shrunk");
    eh_close(&a);
    eh_close(&h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_policy_says_and_forgets_the_same),
        cmocka_unit_test(a_prompt_whose_every_token_is_wanted_is_evaluated),
        cmocka_unit_test(fifty_sessions_hold_a_common_beginning_once),
        cmocka_unit_test(those_who_start_together_evaluate_it_once),
        cmocka_unit_test(users_share_only_if_the_configuration_says_so),
        cmocka_unit_test(idle_beginnings_go_first_and_not_before),
        cmocka_unit_test(ceilings_stay_hard),
        cmocka_unit_test(a_lowered_share_is_reached_through_shared_pages),
        cmocka_unit_test(what_comes_back_from_a_tier_is_shared_again),
        cmocka_unit_test(replayed_sessions_share_again),
        cmocka_unit_test(a_model_that_sleeps_takes_idle_beginnings_along),
        cmocka_unit_test(a_budget_shrinks_through_shared_pages),
    };
    return cmocka_run_group_tests(tests, setup, NULL);
}
