/* Greedy texts under every policy, token for token, and the kept set of every refresh, against an
 * outside implementation, on every backend and instruction set of this machine (golden_texts.h).
 * Backends that take their time meet a part of it here and all of it in test_golden_gen_long.c. */
#include "golden_texts.h"

static void texts_and_kept_sets_equal_the_goldens(void **state)
{
    (void)state;
    struct kn_options ko;
    for (unsigned i = 0; rig_backend(i, &ko); i++)
        for (size_t a = 0; a < ARRAY_LEN(archs); a++)
            check_arch(&ko, a, NULL);
}

/* The values themselves, on the prompt's full cache. */
static void check_values(struct bench *b, const struct gcase *c, double tolerance)
{
    struct evict_params p = case_params(c, golden_form_of(c->name));
    struct session s;
    struct err e = {0};
    float value[RUN_TOKENS_MAX];
    char name[128];
    uint32_t n, n_golden;
    const int32_t *prompt = golden_i32(b->golden, "gen.prompt", &n);
    p.budget = RUN_TOKENS_MAX;
    session_open(&s, b, &p);
    session_feed(&s, prompt, n, 70);
    assert_int_equal(evict_scores(s.ev, b->model, s.cache, value, &e), 0);
    snprintf(name, sizeof name, "values.%s", golden_form_of(c->name)->suffix);
    const float *golden = golden_f32(b->golden, name, &n_golden);
    assert_int_equal(n, n_golden);
    double off = max_diff(value, golden, n);
    if (!(off <= tolerance))
        fail_msg("%s %s is off by %g", b->label, name, off);
    session_close(&s);
}

static void values_equal_their_generator(void **state)
{
    (void)state;
    struct kn_options ko;
    for (unsigned i = 0; rig_backend(i, &ko); i++)
        for (size_t a = 0; a < ARRAY_LEN(archs); a++) {
            struct bench b;
            struct gcase c;
            bench_open(&b, &ko, archs[a], "baseline");
            for (size_t at = 0; gcase_next(b.golden, &at, &c);)
                check_values(&b, &c, strstr(c.name, "random") != NULL ? 0 : 1e-4);
            bench_close(&b);
        }
}

/* No token comes between two prunes: the newest one's query meets what is left. */
static void check_tova_twice(struct bench *b)
{
    struct evict_request r = {.policy = "tova",
                              .budget_tokens = RUN_TOKENS_MAX,
                              .frozen = 2,
                              .recent = 6};
    struct evict_params p;
    struct session s;
    struct err e = {0};
    uint32_t n;
    const int32_t *prompt = golden_i32(b->golden, "gen.prompt", &n);
    r.span_quantile = -1;
    assert_int_equal(evict_resolve(&r, 4096, 0, &p, &e), 0);
    session_open(&s, b, &p);
    session_feed(&s, prompt, n, 13);
    for (uint32_t i = 0; i < 2; i++) {
        static const char *const names[] = {"twice.tova.keep0", "twice.tova.keep1"};
        p.keep = i == 0 ? 50 : 30;
        assert_int_equal(evict_set_params(s.ev, &p, &e), 0);
        session_prune(&s);
        check_kept(b, names[i], s.prune[i].keep, s.prune[i].n);
    }
    session_close(&s);
}

static void tova_prunes_twice_with_one_query(void **state)
{
    (void)state;
    struct kn_options ko;
    for (unsigned i = 0; rig_backend(i, &ko); i++)
        for (size_t a = 0; a < ARRAY_LEN(archs); a++) {
            struct bench b;
            bench_open(&b, &ko, archs[a], "baseline");
            check_tova_twice(&b);
            bench_close(&b);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(texts_and_kept_sets_equal_the_goldens),
        cmocka_unit_test(values_equal_their_generator),
        cmocka_unit_test(tova_prunes_twice_with_one_query),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
