/* What a single refresh keeps, for the four scores, two gaps, spans and protected rows, on a dense cache and on one with holes in its
 * positions, against an outside implementation: equal wherever its cut is clear. Also cut into blocks of rows. */
#include "golden_run.h"
#include "sanitized.h"

static const char *const archs[] = {"llama", "llama-rope3", "qwen2", "qwen3"};

static struct evict_params case_params(const struct gcase *c)
{
    struct evict_request r = {
        .policy = gcase_is(c, "score", "\"fast") ? "counter_causal_fast" : "counter_causal",
        .budget_tokens = RUN_TOKENS_MAX, /* the cache is pruned when we say so */
        .keep = (uint32_t)gcase_number(c, "keep", -1),
        .frozen = (uint32_t)gcase_number(c, "frozen", -1),
        .recent = (int64_t)gcase_number(c, "recent", -2),
        .min_gap = (uint32_t)gcase_number(c, "min_gap", -1),
        .score =
            gcase_is(c, "score", "\"full_logprob\"") || gcase_is(c, "score", "\"fast_logprob\"")
                ? "logprob"
                : "logit",
        .span = (uint32_t)gcase_number(c, "span", 1),
        .span_quantile = (float)gcase_number(c, "span_quantile", 0.25),
    };
    struct evict_params p;
    struct err e = {0};
    if (evict_resolve(&r, 4096, 0, &p, &e))
        fail_msg("%s: %s: %s", c->name, e.field, e.text);
    return p;
}

/* The cache of a dense case is the golden's tokens; a holed one lost some of them and got others. */
static void cache_fill(struct session *s, bool holed)
{
    struct bench *b = s->bench;
    uint32_t n_tokens, n_keep, n_more;
    const int32_t *tokens = golden_i32(b->golden, "tokens", &n_tokens);
    session_extend(s, tokens, n_tokens);
    if (!holed)
        return;
    const int32_t *keep = golden_i32(b->golden, "holed.keep", &n_keep);
    const int32_t *more = golden_i32(b->golden, "holed.more", &n_more);
    seqcache_evict(s->cache, (const uint32_t *)keep, n_keep);
    session_extend(s, more, n_more);
}

static void check_case(struct bench *b, const struct gcase *c, uint32_t score_rows)
{
    struct evict_params p = case_params(c);
    struct session s;
    session_open(&s, b, &p);
    s.score_rows = score_rows;
    cache_fill(&s, strncmp(c->name, "holed.", 6) == 0);
    session_prune(&s);
    check_kept(b, c->name, s.prune[0].keep, s.prune[0].n);
    session_close(&s);
}

/* Every step-th case: a GPU's threads one by one take long, as does every access under a sanitizer; one architecture has all
 * cases (a third of them under a sanitizer). */
static void check_arch(const struct kn_options *ko, const char *arch)
{
    static const uint32_t blocks[] = {10, 0};
    struct bench b;
    struct gcase c;
    unsigned n_checked = 0, n_unclear = 0, n_run = 0;
    bench_open(&b, ko, arch, "golden");
    bool slow = bench_is_gpu(&b) || SANITIZED;
    unsigned step = slow && strcmp(arch, archs[0]) != 0 ? 5 : SANITIZED ? 3 : 1;
    for (size_t at = 0; gcase_next(b.golden, &at, &c);) {
        if (gcase_field(&c, "clear_cut") == NULL)
            continue;
        bool clear = gcase_is(&c, "clear_cut", "true");
        n_checked += clear;
        n_unclear += !clear;
        if (!clear || n_checked % step != 0)
            continue;
        n_run++;
        for (size_t i = 0; i < (bench_is_slow(&b) || SANITIZED ? 1 : ARRAY_LEN(blocks)); i++)
            check_case(&b, &c, blocks[i]);
    }
    assert_int_equal(n_checked + n_unclear, 2 * 22);
    assert_true(n_checked > 30);
    assert_int_equal(n_run, n_checked / step);
    print_message("%s: %u kept sets equal, %u without a clear cut left out\n", b.label, n_run,
                  n_unclear);
    bench_close(&b);
}

static void kept_sets_of_one_refresh_equal_the_goldens(void **state)
{
    (void)state;
    struct kn_options ko;
    for (unsigned i = 0; rig_backend(i, &ko); i++)
        for (size_t a = 0; a < ARRAY_LEN(archs); a++)
            check_arch(&ko, archs[a]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kept_sets_of_one_refresh_equal_the_goldens)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
