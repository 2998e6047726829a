/* When budgets add up to more than there is: who is made to forget, who is refused, and that nobody
 * within its share notices. Pages of tiny-llama, f16, without hidden rows: 34,304 bytes; 64 tokens. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "core.h"
#include "engine_harness.h"

#define PAGE 34304u

static int32_t prompt[4000];

static int setup(void **state)
{
    (void)state;
    uint32_t x = 11;
    for (size_t i = 0; i < ARRAY_LEN(prompt); i++) {
        x = x * 1664525u + 1013904223u;
        prompt[i] = (int32_t)(3 + (x >> 8) % 280);
    }
    return 0;
}

/* kv_memory of so many pages, and the scratch of a refresh of so many tokens: the largest budget of a
 * session that prunes. */
struct world {
    uint32_t pages, tokens, uid_pages, max_pages;
};
/* h2o: keys of 64 rows, 32 queries; counter_causal: 64 rows of the model */
#define WALK (64u * 2 * 16 * 4 + 32 + 32 * 2 * (16 + 2) * 4 + 64 * 64 * 4)
#define SCRATCH(tokens) ((tokens) > 0 ? 32u * ((tokens) + 1u) + WALK : 0u)
static void world_set(struct engine_options *o, void *arg)
{
    const struct world *w = arg;
    o->kv_memory = w->pages * (uint64_t)PAGE + SCRATCH(w->tokens);
    o->kv_memory_max = w->max_pages * (uint64_t)PAGE + SCRATCH(w->tokens);
    o->session_budget = 4 * PAGE;
    o->score_rows = 64;
    o->prefill_chunk = 64;
    o->limits.uid_bytes = w->uid_pages * (uint64_t)PAGE;
}

/* Of the processor: what others do on the machine does not count. */
static uint64_t cpu_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000;
}

/* After every step: whoever is within its share has never been pruned for others, and the ceilings
 * hold. */
static void nobody_within_its_share_pays(struct eh *h)
{
    struct engine *en = h->en;
    uint64_t uid = share_uid(en), uid_held[2] = {0, 0};
    for (uint32_t i = 0; i < en->n_sessions; i++) {
        const struct session *s = en->list[i];
        uint64_t held = seqcache_bytes_held(s->cache);
        if (s->prune.active && s->prune.reason == PRUNE_PRESSURE && !s->prune.self)
            assert_true(s->prune.keep >= share_guaranteed(en, s) / pool_page_bytes(s->pool) * 64);
        assert_true(s->budget_bytes == 0 || held <= s->budget_bytes);
        uid_held[s->uid == EH_UID] += held;
    }
    if (!h->arg) /* not while a limit shrinks */
        assert_true(uid_held[0] <= uid && uid_held[1] <= uid);
    assert_true(models_held(en) <= en->page_budget);
}

static struct eh *world_open(struct world w)
{
    struct eh *h = eh_open("tiny-llama.gguf", world_set, &w);
    h->on_step = nobody_within_its_share_pays;
    return h;
}

static const struct report_session *stat_of(struct eh *h, uint64_t s)
{
    const struct report *r = eh_expect(h, eh_post(h, eh_command(h, CMD_STAT, s)), REP_STAT);
    assert_int_equal(r->u.stat.n_sessions, 1);
    return r->u.stat.sessions;
}

static uint64_t held(struct eh *h, uint64_t s)
{
    assert_int_equal(stat_of(h, s)->page_bytes, PAGE);
    return stat_of(h, s)->held / PAGE;
}

static uint64_t filled(struct eh *h, const struct eh_ask *ask, uint32_t n)
{
    struct generate_options o = eh_greedy(0);
    uint64_t s = eh_session(h, ask);
    eh_ids(h, s, prompt + s * 5, n, &o);
    eh_run_to_end(h, s);
    assert_int_equal(eh_stream(h, s)->end.u.end.reason, END_LENGTH);
    return s;
}

/* Prunes of a session that were for the sake of others. */
static uint32_t pressed(struct eh *h, uint64_t s)
{
    const struct eh_stream *st = eh_stream(h, s);
    uint32_t n = 0;
    for (uint32_t i = 0; i < st->n_prunes; i++)
        n += st->prunes[i].reason == PRUNE_PRESSURE;
    return n;
}

/* ---- shares ---- */

static void shares_follow_weights_budgets_and_users(void **state)
{
    (void)state;
    struct eh *h = world_open((struct world){.pages = 24, .tokens = 1280});
    uint64_t a = eh_session(h, &(struct eh_ask){.policy = "h2o", .budget_tokens = 64 * 20});
    uint64_t all = stat_of(h, a)->guaranteed / PAGE;
    assert_int_equal(all, 20); /* its budget */
    uint64_t b =
        eh_session(h, &(struct eh_ask){.policy = "h2o", .budget_tokens = 64 * 20, .weight = 3});
    assert_int_equal(stat_of(h, a)->guaranteed / PAGE, 6);
    assert_int_equal(stat_of(h, b)->guaranteed / PAGE, 18);
    uint64_t c = eh_session(h, &(struct eh_ask){.policy = "none", .weight = 2});
    assert_int_equal(stat_of(h, a)->guaranteed / PAGE, 4);
    assert_int_equal(stat_of(h, b)->guaranteed / PAGE, 12);
    assert_int_equal(stat_of(h, c)->guaranteed / PAGE, 8);
    eh_close_session(h, b);
    assert_int_equal(stat_of(h, a)->guaranteed / PAGE, 8);
    assert_int_equal(stat_of(h, c)->guaranteed / PAGE, 16);
    eh_expect_error(h, eh_post_open(h, &(struct eh_ask){.weight = 1001}), BC_EINVALID, "weight");
    eh_close(&h);

    h = world_open((struct world){.pages = 24, .tokens = 1280, .uid_pages = 10});
    a = eh_session(h, &(struct eh_ask){.policy = "h2o", .budget_tokens = 64 * 20});
    assert_int_equal(stat_of(h, a)->guaranteed / PAGE, 10);
    b = eh_session(h, &(struct eh_ask){.policy = "h2o", .budget_tokens = 640, .uid = 2000});
    c = eh_session(h, &(struct eh_ask){.policy = "h2o", .budget_tokens = 640, .uid = 2000});
    assert_int_equal(stat_of(h, a)->guaranteed / PAGE, 8);
    assert_int_equal(stat_of(h, b)->guaranteed / PAGE, 5);
    eh_close(&h);
}

static void a_session_that_would_leave_others_without_a_page_is_refused(void **state)
{
    (void)state;
    struct eh *h = world_open((struct world){.pages = 6, .tokens = 384});
    for (int i = 0; i < 6; i++)
        eh_session(h, &(struct eh_ask){.policy = "h2o", .budget_tokens = 384});
    const struct err *e =
        eh_expect_error(h, eh_post_open(h, &(struct eh_ask){.policy = "h2o", .budget_tokens = 384}),
                        BC_EBUDGET, "kv_memory");
    assert_int_equal(e->needed, PAGE);
    assert_true(e->available < PAGE);
    eh_close(&h);
}

/* ---- order ---- */

static void the_largest_overshoot_forgets_first(void **state)
{
    (void)state;
    struct eh *h = world_open((struct world){.pages = 16, .tokens = 640});
    struct generate_options o = eh_greedy(0);
    struct eh_ask big = {.policy = "knorm", .budget_tokens = 640, .keep = 600};
    uint64_t a = filled(h, &big, 7 * 64), b = filled(h, &big, 5 * 64), c = filled(h, &big, 3 * 64);
    uint64_t d = eh_session(h, &big);
    assert_int_equal(stat_of(h, d)->guaranteed / PAGE, 4);
    eh_ids(h, d, prompt, 64, &o);
    eh_run_to_end(h, d);
    assert_int_equal(pressed(h, a) + pressed(h, b) + pressed(h, c), 0); /* there was a page */
    eh_ids(h, d, prompt, 64, &o);
    eh_run_to_end(h, d);
    assert_int_equal(pressed(h, a), 1); /* 3 above; b: 1 */
    assert_int_equal(held(h, a), 5);
    assert_int_equal(eh_stream(h, a)->prunes[0].before, 7 * 64);
    assert_int_equal(eh_stream(h, a)->prunes[0].after, 5 * 64);
    eh_ids(h, d, prompt, 64, &o); /* half of three was two: there is one left */
    eh_run_to_end(h, d);
    eh_ids(h, d, prompt, 64, &o);
    eh_run_to_end(h, d);
    assert_int_equal(pressed(h, a), 2); /* as much as b, and used longer ago */
    assert_int_equal(pressed(h, b), 0);
    /* now d has its share, and for more it would be the one above */
    eh_ids(h, d, prompt, 64, &o);
    eh_run_to_end(h, d);
    assert_int_equal(held(h, a), 4);
    assert_int_equal(held(h, b) + held(h, d), 9);
    assert_int_equal(pressed(h, c), 0);
    assert_int_equal(held(h, c), 3);
    eh_close(&h);
}

static void then_the_lowest_priority_then_the_one_used_longest_ago(void **state)
{
    (void)state;
    struct eh *h = world_open((struct world){.pages = 18, .tokens = 640});
    struct generate_options o = eh_greedy(0);
    struct eh_ask low = {.policy = "knorm", .budget_tokens = 640, .keep = 600, .priority = -5};
    struct eh_ask high = {.policy = "knorm", .budget_tokens = 640, .keep = 600, .priority = 5};
    uint64_t a = filled(h, &high, 6 * 64), b = filled(h, &low, 6 * 64), c = filled(h, &low, 6 * 64);
    uint64_t d = eh_session(h, &high); /* shares of four pages now: each is two above */
    uint64_t order[3] = {b, c, a};
    eh_ids(h, b, prompt, 0 + 1, &o); /* b's 385th token: refused to nobody, but c is older now */
    eh_run_to_end(h, b);
    order[0] = c;
    order[1] = b;
    /* b asked, was above all others and forgot for itself */
    assert_int_equal(pressed(h, b), 1);
    assert_int_equal(pressed(h, a) + pressed(h, c), 0);
    uint32_t before[3] = {0, 1, 0};
    for (int i = 0; i < 3; i++) {
        eh_ids(h, d, prompt, 64, &o);
        eh_run_to_end(h, d);
        assert_int_equal(pressed(h, order[i]), before[i] + 1);
        for (int k = i + 1; k < 3; k++)
            assert_int_equal(pressed(h, order[k]), before[k]);
    }
    eh_close(&h);
}

/* Nobody is above its share and nothing is left: the one that asks for more forgets, or is told. */
static void whoever_is_largest_pays_for_itself(void **state)
{
    (void)state;
    struct eh *h = world_open((struct world){.pages = 8, .tokens = 512});
    struct generate_options o = eh_greedy(300);
    uint64_t a = filled(h, &(struct eh_ask){.policy = "knorm", .budget_tokens = 512}, 4 * 64);
    uint64_t b = eh_session(h, &(struct eh_ask){.policy = "knorm", .budget_tokens = 512});
    eh_ids(h, b, prompt, 200, &o);
    eh_run_to_end(h, b);
    struct eh_stream *st = eh_stream(h, b);
    assert_int_equal(st->end.u.end.reason, END_LENGTH);
    assert_int_equal(st->n_ids, 300);
    assert_true(pressed(h, b) >= 3);
    assert_int_equal(pressed(h, b), st->n_prunes);
    assert_int_equal(st->prunes[0].before, 256);
    assert_int_equal(st->prunes[0].after, 192); /* keep is 3/4 of what it may have */
    assert_int_equal(held(h, b), 4);
    assert_int_equal(held(h, a), 4);
    assert_int_equal(pressed(h, a), 0);
    eh_close(&h);

    h = world_open((struct world){.pages = 8, .tokens = 512});
    a = filled(h, &(struct eh_ask){.policy = "knorm", .budget_tokens = 512}, 4 * 64);
    b = eh_session(h, &(struct eh_ask){.policy = "none"});
    const struct err *e =
        eh_expect_error(h, eh_post_ids(h, b, prompt, 4 * 64 + 1, &o), BC_EBUDGET, "kv_memory");
    assert_int_equal(e->needed, 5 * PAGE);
    assert_int_equal(e->available, 4 * PAGE); /* the rest is a's, whether it uses it or not */
    eh_ids(h, b, prompt, 250, &o);
    eh_run_to_end(h, b);
    assert_int_equal(eh_stream(h, b)->end.u.end.reason, END_BUDGET);
    assert_int_equal(eh_stream(h, b)->n_ids, 4 * 64 - 250 + 1);
    assert_int_equal(pressed(h, a), 0);
    eh_close(&h);
}

/* ---- what is promised within the share ---- */

#define ENDLESS 220
static void endless(struct eh *h, uint64_t s)
{
    struct generate_options o = eh_greedy(ENDLESS); /* as far as the model was trained */
    eh_ids(h, s, prompt, 800, &o);
}

static void three_equal_their_solo_text_beside_an_endless_one(void **state)
{
    (void)state;
    static const struct eh_ask asks[3] = {
        {.policy = "counter_causal", .budget_tokens = 64 * 4},
        {.policy = "h2o", .budget_tokens = 64 * 4, .keep = 150},
        {.policy = "none", .budget_tokens = 64 * 4},
    };
    struct generate_options o = eh_greedy(150);
    o.max_tokens = 150;
    for (int hog = 0; hog < 2; hog++) { /* the endless one comes first, or last */
        struct eh *h = world_open((struct world){.pages = 16, .tokens = 960});
        uint64_t s[3], x = 0;
        if (hog == 0) {
            x = eh_session(h, &(struct eh_ask){.policy = "sliding_window", .budget_tokens = 960});
            endless(h, x);
            for (int i = 0; i < 30; i++)
                eh_step(h);
            assert_true(held(h, x) > 12);
        }
        for (int i = 0; i < 3; i++)
            s[i] = eh_session(h, &asks[i]);
        if (hog == 1) {
            x = eh_session(h, &(struct eh_ask){.policy = "sliding_window", .budget_tokens = 960});
            endless(h, x);
        }
        for (int i = 0; i < 3; i++) /* none: 100 + 150 fit */
            eh_ids(h, s[i], prompt + 50 * i, i == 2 ? 100 : 400, &o);
        for (int i = 0; i < 3; i++)
            eh_run_to_end(h, s[i]);
        for (int i = 0; i < 3; i++) {
            struct eh *solo = eh_open("tiny-llama.gguf", NULL, NULL);
            uint64_t t = eh_session(solo, &asks[i]);
            eh_ids(solo, t, prompt + 50 * i, i == 2 ? 100 : 400, &o);
            eh_run_to_end(solo, t);
            const struct eh_stream *p = eh_stream(h, s[i]), *q = eh_stream(solo, t);
            assert_int_equal(p->end.u.end.reason, END_LENGTH);
            assert_int_equal(p->n_ids, 150);
            assert_memory_equal(p->ids, q->ids, 150 * sizeof *p->ids);
            assert_int_equal(p->n_prunes, q->n_prunes);
            assert_int_equal(pressed(h, s[i]), 0);
            eh_close(&solo);
        }
        eh_run_to_end(h, x);
        assert_int_equal(eh_stream(h, x)->end.u.end.reason, END_LENGTH);
        assert_int_equal(eh_stream(h, x)->n_ids, ENDLESS);
        assert_true(pressed(h, x) > 0);
        eh_close(&h);
    }
}

static uint32_t post_limits(struct eh *h, uint32_t pages, uint32_t tokens, uint32_t uid_pages)
{
    struct command *c = eh_command(h, CMD_LIMITS, 0);
    c->admin = true;
    c->u.limits.kv_memory = pages * (uint64_t)PAGE + SCRATCH(tokens);
    c->u.limits.limits.uid_bytes = uid_pages * (uint64_t)PAGE;
    return eh_post(h, c);
}

/* ---- what can never fit is said at once ---- */

static void what_can_never_fit_is_refused_at_submit(void **state)
{
    (void)state;
    struct eh *h = world_open((struct world){.pages = 12, .tokens = 640});
    struct generate_options o = eh_greedy(20);
    uint64_t hog = filled(h, &(struct eh_ask){.policy = "none"}, 9 * 64);
    /* what is never evicted is five pages: more than the three that are left */
    uint64_t a = eh_session(
        h, &(struct eh_ask){.policy = "knorm", .budget_tokens = 640, .keep = 500, .frozen = 300});
    uint64_t t = cpu_us();
    const struct err *e =
        eh_expect_error(h, eh_post_ids(h, a, prompt, 400, &o), BC_EBUDGET, "kv_memory");
    assert_true(cpu_us() - t < 100000);
    assert_non_null(strstr(e->text, "is taken"));
    assert_int_equal(e->needed, 6 * PAGE); /* 300 + 32 + 1 rows */
    assert_int_equal(e->available, 3 * PAGE);
    eh_ids(h, a, prompt, 150, &o); /* this much can be held */
    eh_run_to_end(h, a);
    assert_int_equal(eh_stream(h, a)->end.u.end.reason, END_LENGTH);
    eh_close_session(h, hog);
    eh_ids(h, a, prompt, 400, &o);
    eh_run_to_end(h, a);
    assert_int_equal(eh_stream(h, a)->end.u.end.reason, END_LENGTH);
    eh_close_session(h, a);
    a = eh_session(
        h, &(struct eh_ask){.policy = "knorm", .budget_tokens = 640, .keep = 500, .frozen = 300});
    eh_expect(h, post_limits(h, 4, 640, 0), REP_DONE); /* nobody holds any, and it is too little */
    e = eh_expect_error(h, eh_post_ids(h, a, prompt, 400, &o), BC_EBUDGET, "kv_memory");
    assert_non_null(strstr(e->text, "is too small"));
    assert_int_equal(e->needed, 6 * PAGE);
    eh_close(&h);
}

/* A prompt that must be whole waits until others have forgotten. */
static void a_promised_prompt_waits_for_its_pages(void **state)
{
    (void)state;
    struct eh *h = world_open((struct world){.pages = 12, .tokens = 640});
    struct generate_options o = eh_greedy(5);
    uint64_t a = filled(h, &(struct eh_ask){.policy = "knorm", .budget_tokens = 640}, 10 * 64);
    uint64_t b = eh_session(h, &(struct eh_ask){.policy = "knorm",
                                                .trigger = "prefill_end",
                                                .budget_tokens = 384,
                                                .keep = 60});
    eh_ids(h, b, prompt, 370, &o);
    eh_run_to_end(h, b);
    struct eh_stream *st = eh_stream(h, b);
    assert_int_equal(st->end.u.end.reason, END_LENGTH);
    assert_int_equal(st->n_prunes, 1);
    assert_int_equal(st->prunes[0].before, 370);
    assert_int_equal(pressed(h, a), 1);
    assert_int_equal(held(h, a), 6);
    eh_close(&h);
}

/* ---- limits that change while running ---- */

static void a_smaller_daemon_prunes_at_once(void **state)
{
    (void)state;
    struct eh *h = world_open((struct world){.pages = 20, .tokens = 640, .max_pages = 30});
    struct engine_counts c;
    struct eh_ask ask = {.policy = "knorm", .budget_tokens = 640, .keep = 600};
    uint64_t a = filled(h, &ask, 10 * 64), b = filled(h, &ask, 6 * 64), d = filled(h, &ask, 4 * 64);
    eh_expect(h, post_limits(h, 12, 640, 0), REP_DONE);
    eh_run(h);
    engine_counts(h->en, &c);
    assert_true(c.kv_held <= 12 * PAGE);
    assert_int_equal(h->en->page_budget, 12 * PAGE + SCRATCH(640)); /* in force */
    assert_true(held(h, a) >= 4 && held(h, b) >= 4);
    assert_int_equal(held(h, d), 4); /* its share: untouched */
    assert_int_equal(pressed(h, d), 0);
    assert_true(pressed(h, a) > 0 && pressed(h, b) > 0);
    /* and back, and beyond what it was */
    eh_expect(h, post_limits(h, 30, 640, 0), REP_DONE);
    struct generate_options o = eh_greedy(0);
    for (int i = 0; i < 3; i++) {
        uint64_t s = i == 0 ? a : i == 1 ? b : d;
        eh_ids(h, s, prompt, 640 - stat_of(h, s)->tokens, &o);
        eh_run_to_end(h, s);
        assert_int_equal(held(h, s), 10);
    }
    const struct err *e = eh_expect_error(h, post_limits(h, 31, 640, 0), BC_EINVALID, "kv_memory");
    assert_int_equal(e->available, 30 * PAGE + SCRATCH(640));
    struct command *not_admin = eh_command(h, CMD_LIMITS, 0);
    not_admin->u.limits.kv_memory = 12 * PAGE;
    eh_expect_error(h, eh_post(h, not_admin), BC_EPERMISSION, "");
    eh_close(&h);
}

/* What never prunes stays; nothing is refused that fits below it, and the rest goes down. */
static void what_cannot_shrink_stays_and_grows_no_more(void **state)
{
    (void)state;
    struct eh *h = world_open((struct world){.pages = 12, .tokens = 640});
    struct generate_options o = eh_greedy(0);
    uint64_t a = filled(h, &(struct eh_ask){.policy = "none"}, 6 * 64);
    uint64_t b = filled(h, &(struct eh_ask){.policy = "knorm", .budget_tokens = 640}, 6 * 64);
    eh_expect(h, post_limits(h, 8, 640, 0), REP_DONE);
    eh_run(h);
    assert_int_equal(held(h, a), 6);
    assert_int_equal(held(h, b), 4); /* its share of eight: not below */
    assert_int_equal(models_held(h->en), 10 * PAGE);
    eh_expect_error(h, eh_post_ids(h, a, prompt, 1, &o), BC_EBUDGET, "kv_memory");
    eh_close_session(h, a);
    eh_ids(h, b, prompt, 64, &o);
    eh_run_to_end(h, b);
    assert_int_equal(held(h, b), 5);
    assert_int_equal(h->en->page_budget, 8 * PAGE + SCRATCH(640));
    eh_close(&h);
}

static void a_users_share_is_hard_and_its_own(void **state)
{
    (void)state;
    struct eh *h = world_open((struct world){.pages = 24, .tokens = 512, .uid_pages = 8});
    struct generate_options o = eh_greedy(100);
    struct eh_ask mine = {.policy = "knorm", .budget_tokens = 512};
    struct eh_ask theirs = {.policy = "knorm", .budget_tokens = 512, .uid = 2000, .conn = 3};
    uint64_t a = filled(h, &mine, 8 * 64), x = filled(h, &theirs, 8 * 64);
    uint64_t b = eh_session(h, &mine);
    eh_ids(h, b, prompt, 400, &o); /* eight pages of the daemon are free, none of mine */
    eh_run_to_end(h, b);
    assert_int_equal(eh_stream(h, b)->end.u.end.reason, END_LENGTH);
    assert_true(pressed(h, a) > 0 && pressed(h, b) > 0);
    assert_int_equal(held(h, a) + held(h, b), 8);
    assert_int_equal(held(h, x), 8);
    assert_int_equal(pressed(h, x), 0);
    /* lowered while running */
    h->arg = h;
    eh_expect(h, post_limits(h, 24, 512, 6), REP_DONE);
    eh_run(h);
    h->arg = NULL;
    assert_int_equal(held(h, a), 3);
    assert_int_equal(held(h, b), 3);
    assert_int_equal(held(h, x), 6);
    uint64_t none = eh_session(h, &(struct eh_ask){.policy = "none"});
    const struct err *e =
        eh_expect_error(h, eh_post_ids(h, none, prompt, 3 * 64, &o), BC_EBUDGET, "uid_share");
    assert_int_equal(e->needed, 3 * PAGE);
    assert_int_equal(e->available, 2 * PAGE);
    eh_close(&h);
}

static void a_refusal_names_the_numbers_within_a_tenth_of_a_second(void **state)
{
    (void)state;
    struct eh *h = world_open((struct world){.pages = 8});
    struct generate_options o = eh_greedy(10);
    filled(h, &(struct eh_ask){.policy = "none"}, 4 * 64);
    filled(h, &(struct eh_ask){.policy = "none"}, 4 * 64);
    for (int i = 0; i < 20; i++) {
        uint64_t s = eh_session(h, &(struct eh_ask){.policy = i % 2 ? "none" : "knorm"}), t;
        t = cpu_us();
        const struct err *e =
            eh_expect_error(h, eh_post_ids(h, s, prompt, 10, &o), BC_EBUDGET, "kv_memory");
        assert_true(cpu_us() - t < 100000);
        assert_int_equal(e->needed, PAGE);
        assert_int_equal(e->available, 0);
        eh_close_session(h, s);
    }
    eh_close(&h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shares_follow_weights_budgets_and_users),
        cmocka_unit_test(a_session_that_would_leave_others_without_a_page_is_refused),
        cmocka_unit_test(the_largest_overshoot_forgets_first),
        cmocka_unit_test(then_the_lowest_priority_then_the_one_used_longest_ago),
        cmocka_unit_test(whoever_is_largest_pays_for_itself),
        cmocka_unit_test(three_equal_their_solo_text_beside_an_endless_one),
        cmocka_unit_test(what_can_never_fit_is_refused_at_submit),
        cmocka_unit_test(a_promised_prompt_waits_for_its_pages),
        cmocka_unit_test(a_smaller_daemon_prunes_at_once),
        cmocka_unit_test(what_cannot_shrink_stays_and_grows_no_more),
        cmocka_unit_test(a_users_share_is_hard_and_its_own),
        cmocka_unit_test(a_refusal_names_the_numbers_within_a_tenth_of_a_second),
    };
    return cmocka_run_group_tests(tests, setup, NULL);
}
