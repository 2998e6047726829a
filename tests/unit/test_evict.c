/* The list of policies, and the driver of a prune: which rows it asks for, in which pieces, what it leaves alone when something
 * fails. The model is a stand-in of this file: it answers with numbers of a table and notes what it was asked. */
#include "fake_kn.h"
#include "evict.h"
#include <math.h>

#define ROWS_MAX 512
#define PAGE_BYTES 34304 /* of fake_shape */

/* ---- the stand-in model ------------------------------------------------------------------------ */

struct model {
    struct model_info info;
    struct kn *kn;
    uint32_t n_calls, n_asked[ROWS_MAX], n_parts, largest_call,
        fail_at; /* call that fails; 0: none */
    float value[ROWS_MAX];
    struct model_score last_job;
};

const struct model_info *model_info(const struct model *m)
{
    return &m->info;
}

struct kn *model_kn(const struct model *m)
{
    return m->kn;
}

void model_rest_close(struct model_rest *rest)
{
    *rest = (struct model_rest){.x = rest->x};
}

/* Whole rows of each part in turn. */
int model_score_some(struct model *m, struct model_part *parts, uint32_t n_parts, uint32_t max_rows,
                     struct err *e)
{
    uint32_t left = max_rows;
    if (++m->n_calls == m->fail_at)
        return err_set(e, BC_EDEVICE, "", "told to fail");
    m->n_parts = n_parts;
    for (uint32_t k = 0; k < n_parts; k++) {
        struct model_part *p = &parts[k];
        uint32_t n = BC_MIN(left, p->end - p->next);
        assert_true(p->job.fast || p->rest->x != NULL);
        m->last_job = p->job;
        p->spent = n;
        left -= n;
        for (; n > 0; n--, p->next++) {
            m->n_asked[p->next]++;
            p->scores[p->next] =
                p->next + p->job.min_gap + 1 >= p->job.seq.n ? -INFINITY : m->value[p->next];
        }
    }
    m->largest_call = BC_MAX(m->largest_call, max_rows - left);
    return 0;
}

struct world {
    struct fake_kn fake;
    struct pool *pool;
    struct seqcache *cache;
    struct model model;
};

static int world_open(void **state)
{
    struct world *w = calloc(1, sizeof *w);
    struct kn_kv shape = fake_shape();
    struct err e;
    assert_non_null(w);
    w->fake = fake_kn_make();
    assert_int_equal(pool_open(&w->pool, &w->fake.kn, &shape, ROWS_MAX / 64, &e), 0);
    assert_int_equal(pool_page_bytes(w->pool), PAGE_BYTES);
    assert_int_equal(seqcache_open(&w->cache, w->pool, &e), 0);
    w->model = (struct model){
        .info = {.n_layers = 2, .n_heads = 4, .head_dim = 16, .d_model = 64, .rest_rows = 64},
        .kn = &w->fake.kn};
    uint32_t random = 99;
    for (int i = 0; i < ROWS_MAX; i++)
        w->model.value[i] = (float)((random = random * 1664525u + 1013904223u) >> 24);
    *state = w;
    return 0;
}

static int world_close(void **state)
{
    struct world *w = *state;
    seqcache_close(&w->cache);
    pool_close(&w->pool);
    free(w);
    return 0;
}

static void fill(struct world *w, uint32_t n)
{
    int32_t ids[ROWS_MAX] = {0};
    struct err e;
    uint64_t next = 0;
    if (seqcache_count(w->cache) > 0)
        next = seqcache_stream(w->cache)[seqcache_count(w->cache) - 1] + 1;
    assert_int_equal(seqcache_reserve(w->cache, n, &e), 0);
    seqcache_append(w->cache, n, ids, (int32_t)next, next);
}

/* ---- the list ---------------------------------------------------------------------------------- */

static void the_list_of_policies_is_whole(void **state)
{
    (void)state;
    const char *const names[] = {"none",           "sliding_window",
                                 "key_similarity", "h2o",
                                 "tova",           "knorm",
                                 "keydiff",        "random",
                                 "counter_causal", "counter_causal_fast"};
    unsigned n = 0;
    for (const struct evict_policy *p; (p = evict_policy_at(n)) != NULL; n++) {
        assert_ptr_equal(evict_policy_find(p->name), p);
        assert_true(strlen(p->summary) > 10 && p->row_state_bytes <= 4);
        assert_true(p->score == NULL || p->score_rows == NULL);
        assert_int_equal(evict_policy_prunes(p), strcmp(p->name, "none") != 0);
        assert_int_equal(p->needs_hidden, strcmp(p->name, "counter_causal_fast") == 0);
    }
    assert_int_equal(n, ARRAY_LEN(names));
    for (size_t i = 0; i < ARRAY_LEN(names); i++)
        assert_non_null(evict_policy_find(names[i]));
    assert_ptr_equal(evict_policy_find("streaming_llm"), evict_policy_find("sliding_window"));
    assert_null(evict_policy_find("Random"));
}

/* ---- runs -------------------------------------------------------------------------------------- */

static struct evict_params params(const char *policy, uint32_t keep, uint32_t frozen,
                                  uint32_t recent)
{
    return (struct evict_params){.policy = evict_policy_find(policy),
                                 .budget = ROWS_MAX,
                                 .keep = keep,
                                 .frozen = frozen,
                                 .recent = recent,
                                 .span = 1,
                                 .span_quantile = 0.25f};
}

static struct evict *opened(const struct evict_params *p)
{
    struct evict *ev;
    struct err e = {0};
    if (evict_open(&ev, p, &e))
        fail_msg("%s: %s", e.field, e.text);
    return ev;
}

/* A call for one session: 0 and its answer, or why it failed; the record is untouched until it is DONE. */
static int run_one(struct world *w, struct evict *ev, uint32_t keep, uint32_t max_rows,
                   enum evict_answer *ret, struct evict_record *ret_record, struct err *e)
{
    struct evict_run r = {.ev = ev, .cache = w->cache, .keep = keep, .record = *ret_record};
    evict_run(&r, 1, &w->model, max_rows);
    *ret_record = r.record;
    if (r.answer == EVICT_FAILED) {
        *e = r.err;
        return r.err.code;
    }
    *ret = r.answer;
    return 0;
}

static struct evict_record run_whole(struct world *w, struct evict *ev, uint32_t keep)
{
    struct evict_record record = {0};
    enum evict_answer answer;
    struct err e = {0};
    if (run_one(w, ev, keep, 0, &answer, &record, &e))
        fail_msg("%s: %s", e.field, e.text);
    assert_int_equal(answer, EVICT_DONE);
    return record;
}

/* Exactly the rows within half a span of an unprotected row, and none that sees nothing. */
static void only_rows_that_matter_are_scored(void **state)
{
    struct world *w = *state;
    static const struct {
        uint32_t n, keep, frozen, recent, gap, span;
    } cases[] = {
        {100, 50, 0, 0, 0, 1},  {100, 50, 4, 8, 0, 1},   {100, 50, 20, 20, 0, 15},
        {100, 50, 4, 8, 4, 15}, {100, 50, 0, 0, 12, 5},  {100, 50, 20, 3, 9, 15},
        {100, 99, 0, 0, 0, 15}, {100, 60, 30, 30, 0, 3}, {65, 40, 2, 6, 1, 255},
    };
    for (size_t c = 0; c < ARRAY_LEN(cases); c++) {
        struct evict_params p =
            params("counter_causal", cases[c].keep, cases[c].frozen, cases[c].recent);
        p.min_gap = cases[c].gap;
        p.span = cases[c].span;
        uint32_t n = cases[c].n, tail = BC_MAX(p.recent, p.min_gap + 1), half = p.span / 2;
        seqcache_evict(w->cache, NULL, 0);
        fill(w, n);
        memset(w->model.n_asked, 0, sizeof w->model.n_asked);
        struct evict *ev = opened(&p);
        run_whole(w, ev, p.keep);
        evict_close(&ev);
        for (uint32_t i = 0; i < n; i++) {
            bool matters = false;
            for (uint32_t u = p.frozen; u < n - tail; u++)
                matters = matters || (i + half >= u && i <= u + half);
            bool blind = i + p.min_gap + 1 >= n;
            if (w->model.n_asked[i] != (matters && !blind))
                fail_msg("case %zu: row %u was asked %u times", c, i, w->model.n_asked[i]);
        }
        assert_int_equal(w->model.last_job.min_gap, p.min_gap);
        assert_int_equal(w->model.last_job.seq.n, n);
    }
}

/* The whole of it, from the definition: all rows scored, pooled and cut at once. */
static uint32_t expected_keep(const struct world *w, const struct evict_params *p, uint32_t n,
                              uint32_t *ret)
{
    float value[ROWS_MAX], pooled[ROWS_MAX];
    uint32_t scratch[ROWS_MAX];
    for (uint32_t i = 0; i < n; i++)
        value[i] = i + p->min_gap + 1 >= n ? -INFINITY : w->model.value[i];
    select_span(value, n, p->span, p->span_quantile, pooled);
    return select_keep(pooled, n, p->keep, p->frozen, BC_MAX(p->recent, p->min_gap + 1), scratch,
                       ret);
}

static void a_run_in_blocks_keeps_the_same(void **state)
{
    struct world *w = *state;
    struct evict_params p = params("counter_causal_fast", 120, 10, 20);
    uint32_t want[ROWS_MAX];
    p.span = 15;
    p.score = EVICT_LOGPROB;
    for (uint32_t max_rows = 1; max_rows < 60; max_rows += 7) {
        struct evict_record record = {0};
        enum evict_answer answer = EVICT_WORKING;
        struct err e = {0};
        uint32_t calls = 0;
        seqcache_evict(w->cache, NULL, 0);
        fill(w, 200);
        w->model.largest_call = w->model.n_calls = 0;
        struct evict *ev = opened(&p);
        for (; answer == EVICT_WORKING; calls++) {
            assert_int_equal(seqcache_count(w->cache), 200);
            assert_int_equal(run_one(w, ev, 120, max_rows, &answer, &record, &e), 0);
        }
        uint32_t n_rows = (200 - 20 + 7) - (10 - 7); /* see the case above */
        assert_int_equal(calls, (n_rows + max_rows - 1) / max_rows);
        assert_int_equal(w->model.n_calls, calls);
        assert_int_equal(w->model.largest_call, max_rows);
        assert_true(w->model.last_job.fast && w->model.last_job.logprob);
        assert_int_equal(record.tokens_after, expected_keep(w, &p, 200, want));
        assert_memory_equal(record.keep, want, record.tokens_after * sizeof *want);
        evict_close(&ev);
    }
}

static void a_failed_or_forgotten_run_changes_nothing(void **state)
{
    struct world *w = *state;
    struct evict_params p = params("counter_causal", 100, 0, 10);
    struct evict *ev = opened(&p);
    struct evict_record record = {0}, untouched;
    enum evict_answer answer;
    struct err e = {0};
    uint32_t slots[200], want[ROWS_MAX];
    fill(w, 200);
    memcpy(slots, seqcache_slots(w->cache), sizeof slots);
    memset(&record, 0x5a, sizeof record);
    untouched = record;
    w->model.fail_at = 3;
    for (int i = 0; i < 2; i++) {
        assert_int_equal(run_one(w, ev, 100, 50, &answer, &record, &e), 0);
        assert_int_equal(answer, EVICT_WORKING);
    }
    assert_int_equal(run_one(w, ev, 100, 50, &answer, &record, &e), BC_EDEVICE);
    w->model.fail_at = 0;
    assert_int_equal(run_one(w, ev, 100, 50, &answer, &record, &e), 0);
    assert_int_equal(answer, EVICT_WORKING);
    evict_abort(ev);
    assert_int_equal(seqcache_count(w->cache), 200);
    assert_memory_equal(seqcache_slots(w->cache), slots, sizeof slots);
    assert_memory_equal(&record, &untouched, sizeof record);
    fill(w, 1); /* after an abort the cache may change */
    record = run_whole(w, ev, 100);
    assert_int_equal(record.tokens_before, 201);
    assert_int_equal(record.tokens_after, expected_keep(w, &p, 201, want));
    assert_memory_equal(record.keep, want, 100 * sizeof *want);
    w->fake.failed = true; /* a sticky device error is noticed even where no call reports it */
    assert_int_equal(run_one(w, ev, 90, 0, &answer, &record, &e), BC_EDEVICE);
    assert_int_equal(seqcache_count(w->cache), 100);
    evict_close(&ev);
}

/* ---- several sessions ---- */

#define N_CROWD 4u

struct crowd {
    struct seqcache *cache[N_CROWD];
    struct evict *ev[N_CROWD];
    struct evict_run run[N_CROWD];
};

/* Caches of 100, 99, 98 .. tokens, to be pruned to 40 + k. */
static void crowd_open(struct world *w, struct crowd *c, const struct evict_params *p)
{
    for (uint32_t k = 0; k < N_CROWD; k++) {
        struct err e;
        assert_int_equal(seqcache_open(&c->cache[k], w->pool, &e), 0);
        struct seqcache *own = w->cache;
        w->cache = c->cache[k];
        fill(w, 100 - k);
        w->cache = own;
        c->ev[k] = opened(p);
        c->run[k] = (struct evict_run){.ev = c->ev[k], .cache = c->cache[k], .keep = 40 + k};
    }
}

static void crowd_close(struct crowd *c)
{
    for (uint32_t k = 0; k < N_CROWD; k++) {
        evict_close(&c->ev[k]);
        seqcache_close(&c->cache[k]);
    }
}

static void kept_as_alone(const struct world *w, const struct crowd *c, uint32_t k,
                          struct evict_params p)
{
    uint32_t want[ROWS_MAX];
    p.keep = 40 + k;
    assert_int_equal(c->run[k].answer, EVICT_DONE);
    assert_int_equal(c->run[k].record.tokens_before, 100 - k);
    assert_int_equal(expected_keep(w, &p, 100 - k, want), 40 + k);
    assert_memory_equal(c->run[k].record.keep, want, (40 + k) * sizeof *want);
}

/* Rows of the first, then of the next: who is done leaves, and whoever fails by himself fails alone. */
static void runs_share_a_call(void **state)
{
    struct world *w = *state;
    static const char *const policies[] = {"counter_causal", "counter_causal_fast"};
    for (size_t i = 0; i < ARRAY_LEN(policies); i++) {
        struct evict_params p = params(policies[i], 40, 0, 10);
        struct crowd c;
        p.span = 3;
        crowd_open(w, &c, &p);
        c.run[1].keep = 9; /* fewer than its recent ones */
        w->model.n_calls = w->model.largest_call = 0;
        evict_run(c.run, N_CROWD, &w->model, 120); /* 91 rows and 29 of 89 */
        assert_int_equal(w->model.n_calls, 1);
        assert_int_equal(w->model.n_parts, 3);
        assert_int_equal(w->model.largest_call, 120);
        kept_as_alone(w, &c, 0, p);
        assert_int_equal(c.run[1].answer, EVICT_FAILED);
        assert_int_equal(c.run[1].err.code, BC_EINVALID);
        assert_string_equal(c.run[1].err.field, "keep_tokens");
        assert_int_equal(seqcache_count(c.cache[1]), 99);
        assert_int_equal(c.run[2].answer, EVICT_WORKING);
        assert_int_equal(c.run[3].answer, EVICT_WORKING);
        assert_int_equal((int)evict_rows_done(c.ev[0]), 91);
        assert_int_equal((int)evict_rows_done(c.ev[2]), 29);
        assert_int_equal((int)evict_rows_done(c.ev[3]), 0);
        evict_abort(c.ev[2]); /* forgotten: the other goes on */
        evict_run(&c.run[3], 1, &w->model, 120);
        kept_as_alone(w, &c, 3, p);
        c.run[1].keep = 41;
        evict_run(&c.run[1], 2, &w->model, 0);
        kept_as_alone(w, &c, 1, p);
        kept_as_alone(w, &c, 2, p);
        crowd_close(&c);
    }
}

/* A device that fails is nobody's own failure. */
static void a_device_that_fails_fails_all_of_them(void **state)
{
    struct world *w = *state;
    struct evict_params p = params("counter_causal", 40, 0, 10);
    struct crowd c;
    crowd_open(w, &c, &p);
    w->model.fail_at = w->model.n_calls + 1;
    evict_run(c.run, N_CROWD, &w->model, 50);
    for (uint32_t k = 0; k < N_CROWD; k++) {
        assert_int_equal(c.run[k].answer, EVICT_FAILED);
        assert_int_equal(c.run[k].err.code, BC_EDEVICE);
        assert_int_equal(seqcache_count(c.cache[k]), 100 - k);
    }
    evict_run(c.run, N_CROWD, &w->model, 0);
    for (uint32_t k = 0; k < N_CROWD; k++)
        kept_as_alone(w, &c, k, p);
    crowd_close(&c);
}

static void only_small_caches_of_one_kind_go_together(void **state)
{
    struct world *w = *state;
    struct evict_params full = params("counter_causal", 40, 0, 10), other = full;
    struct evict *a = opened(&full), *b = opened(&full);
    fill(w, ROWS_MAX);
    assert_true(ROWS_MAX <= EVICT_TOGETHER_TOKENS && evict_joins(b, w->cache, a));
    evict_close(&b);
    assert_false(evict_may_join(&full, EVICT_TOGETHER_TOKENS + 1));
    other.score = EVICT_LOGPROB;
    b = opened(&other);
    assert_false(evict_joins(b, w->cache, a));
    evict_close(&b);
    other = params("counter_causal_fast", 40, 0, 10);
    b = opened(&other);
    assert_false(evict_joins(b, w->cache, a));
    evict_close(&b);
    for (uint32_t i = 0; evict_policy_at(i) != NULL; i++) {
        other = params(evict_policy_at(i)->name, 40, 0, 10);
        assert_int_equal(evict_may_join(&other, 100), other.policy->counter_causal);
    }
    evict_close(&a);
}

static void a_record_says_what_was_dropped(void **state)
{
    struct world *w = *state;
    struct evict_params p = params("counter_causal", 100, 0, 0);
    struct evict *ev = opened(&p);
    for (uint32_t i = 0; i < 200; i++)
        w->model.value[i] = (float)(i % 2); /* odd rows go, but the last, which sees nothing */
    fill(w, 200);
    struct evict_record r = run_whole(w, ev, 100);
    assert_ptr_equal(r.policy, p.policy);
    assert_int_equal(r.tokens_before, 200);
    assert_int_equal(r.tokens_after, 100);
    assert_int_equal(r.live_before, 200 * pool_row_bytes(w->pool));
    assert_int_equal(r.live_after, 100 * pool_row_bytes(w->pool));
    assert_int_equal(r.held_before, 4 * PAGE_BYTES);
    assert_int_equal(r.held_after, 4 * PAGE_BYTES);
    assert_int_equal(r.n_dropped, 99); /* the even row 198 makes room for 199 */
    for (uint32_t i = 0; i < 99; i++) {
        assert_int_equal(r.dropped[i].first, 2 * i + 1);
        assert_int_equal(r.dropped[i].count, i < 98 ? 1 : 2);
    }
    /* what is left is 0 2 4 ... 196 199: the first fifty of it go as fifty ranges */
    for (uint32_t i = 0; i < 100; i++)
        w->model.value[i] = -(float)i;
    r = run_whole(w, ev, 50);
    assert_int_equal(r.n_dropped, 50);
    assert_int_equal(r.dropped[49].first, 98);
    fill(w, 64); /* 200 .. 263: a run of neighbours is one range */
    for (uint32_t i = 0; i < 114; i++)
        w->model.value[i] = i >= 60 ? 1 : 0;
    r = run_whole(w, ev, 61);
    assert_int_equal(r.tokens_after, 61);
    assert_int_equal(r.n_dropped, 1);
    assert_int_equal(r.dropped[0].first, 210);
    assert_int_equal(r.dropped[0].count, 53);
    evict_close(&ev);
}

static void a_cache_below_keep_is_left_alone(void **state)
{
    struct world *w = *state;
    struct evict_params p = params("counter_causal", 100, 0, 10);
    struct evict *ev = opened(&p);
    for (uint32_t n = 0; n <= 100; n += 50) {
        struct evict_record r = run_whole(w, ev, 100);
        assert_int_equal(r.tokens_before, n);
        assert_int_equal(r.tokens_after, n);
        assert_int_equal(r.n_dropped, 0);
        assert_int_equal(w->model.n_calls, 0);
        fill(w, 50);
    }
    evict_close(&ev);
}

static void a_keep_below_the_protected_rows_is_refused(void **state)
{
    struct world *w = *state;
    struct evict_params p = params("counter_causal", 100, 20, 10);
    struct evict *ev = opened(&p);
    struct evict_record record = {0};
    enum evict_answer answer;
    struct err e = {0};
    fill(w, 200);
    assert_int_equal(run_one(w, ev, 29, 0, &answer, &record, &e), BC_EINVALID);
    assert_string_equal(e.field, "keep_tokens");
    assert_non_null(strstr(e.text, "29"));
    assert_int_equal(run_one(w, ev, 0, 0, &answer, &record, &e), BC_EINVALID);
    assert_int_equal(seqcache_count(w->cache), 200);
    assert_int_equal(run_whole(w, ev, 30).tokens_after, 30);
    evict_close(&ev);
    p = params("none", 100, 0, 0);
    ev = opened(&p);
    assert_int_equal(run_one(w, ev, 20, 0, &answer, &record, &e), BC_EINVALID);
    assert_string_equal(e.field, "policy");
    evict_close(&ev);
}

static void frozen_and_recent_rows_stay_whatever_their_value(void **state)
{
    struct world *w = *state;
    struct evict_params p = params("random", 30, 20, 10);
    for (uint64_t seed = 0; seed < 20; seed++) {
        p.seed = seed;
        struct evict *ev = opened(&p);
        seqcache_evict(w->cache, NULL, 0);
        fill(w, 100);
        struct evict_record r = run_whole(w, ev, 30);
        for (uint32_t i = 0; i < 30; i++)
            assert_int_equal(r.keep[i], i < 20 ? i : 70 + i);
        evict_close(&ev);
    }
}

static void random_depends_on_seed_and_position_alone(void **state)
{
    struct world *w = *state;
    struct evict_params p = params("random", 50, 0, 0);
    struct err e;
    float a[100], b[100], c[50];
    uint32_t same = 0, keep[50];
    fill(w, 100);
    struct evict *ev = opened(&p);
    assert_int_equal(evict_scores(ev, &w->model, w->cache, a, &e), 0);
    for (uint32_t i = 0; i < 50; i++)
        keep[i] = 2 * i;
    seqcache_evict(w->cache, keep, 50);
    assert_int_equal(evict_scores(ev, &w->model, w->cache, c, &e), 0);
    for (uint32_t i = 0; i < 50; i++)
        assert_true(c[i] == a[2 * i] && a[i] >= 0 && a[i] < 1);
    evict_close(&ev);
    p.seed = 1;
    ev = opened(&p);
    assert_int_equal(evict_scores(ev, &w->model, w->cache, b, &e), 0);
    for (uint32_t i = 0; i < 50; i++)
        same += b[i] == c[i];
    assert_true(same < 3);
    evict_close(&ev);
}

static void tova_without_a_query_says_so(void **state)
{
    struct world *w = *state;
    struct evict_params p = params("tova", 50, 0, 0);
    struct evict *ev = opened(&p);
    struct evict_record record = {0};
    enum evict_answer answer;
    struct err e = {0};
    fill(w, 100);
    assert_int_equal(run_one(w, ev, 50, 0, &answer, &record, &e), BC_ESTATE);
    assert_int_equal(seqcache_count(w->cache), 100);
    evict_close(&ev);
}

static void scores_of_an_empty_cache_are_none(void **state)
{
    struct world *w = *state;
    struct err e = {0};
    float untouched = 3;
    const struct evict_policy *policy;
    for (unsigned i = 0; (policy = evict_policy_at(i)) != NULL; i++) {
        struct evict_params p = params(policy->name, 50, 0, 0);
        struct evict *ev = opened(&p);
        int rc = evict_scores(ev, &w->model, w->cache, &untouched, &e);
        assert_int_equal(rc, evict_policy_prunes(policy) ? 0 : BC_EINVALID);
        assert_true(untouched == 3);
        evict_close(&ev);
    }
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, world_open, world_close)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_list_of_policies_is_whole),
        T(only_rows_that_matter_are_scored),
        T(a_run_in_blocks_keeps_the_same),
        T(a_failed_or_forgotten_run_changes_nothing),
        T(runs_share_a_call),
        T(a_device_that_fails_fails_all_of_them),
        T(only_small_caches_of_one_kind_go_together),
        T(a_record_says_what_was_dropped),
        T(a_cache_below_keep_is_left_alone),
        T(a_keep_below_the_protected_rows_is_refused),
        T(frozen_and_recent_rows_stay_whatever_their_value),
        T(random_depends_on_seed_and_position_alone),
        T(tova_without_a_query_says_so),
        T(scores_of_an_empty_cache_are_none),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
