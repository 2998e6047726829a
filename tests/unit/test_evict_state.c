/* Parameters, wishes and what a policy has learnt, as bytes and back: the same for every policy, and
 * nothing of what is damaged is taken. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include "bytes.h"
#include "policy.h"

static struct evict_params params_of(const struct evict_policy *policy, int variant)
{
    bool prunes = evict_policy_prunes(policy);
    return (struct evict_params){
        .policy = policy,
        .budget = prunes ? 1000 : 0,
        .keep = 700,
        .frozen = variant == 0 ? EVICT_FROZEN_AUTO : 20,
        .recent = 31,
        .min_gap = variant == 0 ? 0 : 3,
        .score = variant == 0 ? EVICT_LOGIT : EVICT_LOGPROB,
        .span = variant == 0 ? 15 : 1,
        .span_quantile = 0.7f,
        .trigger = variant == 1 && prunes ? EVICT_ON_PREFILL_END : EVICT_ON_BUDGET,
        .seed = 0xfedcba9876543210u,
    };
}

static void parameters_come_back(void **state)
{
    (void)state;
    const struct evict_policy *policy;
    for (unsigned i = 0; (policy = evict_policy_at(i)) != NULL; i++)
        for (int variant = 0; variant < 2; variant++) {
            struct bytes_out o = {0};
            struct evict_params p = params_of(policy, variant), q;
            struct err e;
            memset(&q, 0, sizeof q);
            evict_params_put(&p, &o);
            struct bytes_in in = {.at = o.at, .n = o.n};
            assert_int_equal(evict_params_get(&in, &q, &e), BC_OK);
            assert_int_equal(in.n, 0);
            assert_ptr_equal(q.policy, p.policy);
            assert_int_equal(q.budget, p.budget);
            assert_int_equal(q.keep, p.keep);
            assert_int_equal(q.frozen, p.frozen);
            assert_int_equal(q.recent, p.recent);
            assert_int_equal(q.min_gap, p.min_gap);
            assert_int_equal(q.score, p.score);
            assert_int_equal(q.span, p.span);
            assert_true(q.span_quantile == p.span_quantile);
            assert_int_equal(q.trigger, p.trigger);
            assert_true(q.seed == p.seed);
            for (size_t n = 0; n < o.n; n++) { /* cut anywhere */
                in = (struct bytes_in){.at = o.at, .n = n};
                assert_int_equal(evict_params_get(&in, &q, &e), BC_ECORRUPT);
            }
            free(o.at);
        }
}

static void impossible_parameters_are_refused(void **state)
{
    (void)state;
    struct evict_params p = params_of(evict_policy_find("h2o"), 0), q;
    struct bytes_out o = {0};
    struct err e;
    p.keep = p.budget; /* nothing would ever be dropped */
    evict_params_put(&p, &o);
    struct bytes_in in = {.at = o.at, .n = o.n};
    assert_int_equal(evict_params_get(&in, &q, &e), BC_EINVALID);
    o.at[4] = 'x'; /* x2o */
    in = (struct bytes_in){.at = o.at, .n = o.n};
    assert_int_equal(evict_params_get(&in, &q, &e), BC_ECORRUPT);
    free(o.at);
}

static void wishes_come_back(void **state)
{
    (void)state;
    const struct evict_request r = {.policy = "tova",
                                    .score = "logprob",
                                    .trigger = "prefill_end",
                                    .budget_bytes = 1ull << 40,
                                    .keep = 17,
                                    .frozen = EVICT_FROZEN_AUTO,
                                    .recent = -1,
                                    .min_gap = 2,
                                    .span = 9,
                                    .span_quantile = -1,
                                    .seed = 5};
    struct evict_request q;
    struct bytes_out o = {0};
    struct err e;
    evict_request_put(&r, &o);
    struct bytes_in in = {.at = o.at, .n = o.n};
    assert_int_equal(evict_request_get(&in, &q, &e), BC_OK);
    assert_string_equal(q.policy, "tova");
    assert_ptr_equal(q.policy, evict_policy_find("tova")->name); /* the program's own string */
    assert_string_equal(q.score, "logprob");
    assert_string_equal(q.trigger, "prefill_end");
    assert_true(q.budget_bytes == r.budget_bytes && q.recent == -1 && q.seed == 5);
    assert_true(q.frozen == EVICT_FROZEN_AUTO && q.keep == 17 && q.span == 9 && q.min_gap == 2);
    assert_true(q.span_quantile == -1 && q.budget_tokens == 0);
    for (size_t n = 0; n < o.n; n++) {
        in = (struct bytes_in){.at = o.at, .n = n};
        assert_int_equal(evict_request_get(&in, &q, &e), BC_ECORRUPT);
    }
    free(o.at);
}

static void what_a_policy_has_learnt_comes_back(void **state)
{
    (void)state;
    struct err e;
    float query[64];
    struct evict *a, *b;
    struct bytes_out o = {0}, again = {0};
    for (int i = 0; i < 64; i++)
        query[i] = (float)i * 0.37f;

    struct evict_params p = params_of(evict_policy_find("h2o"), 0);
    assert_int_equal(evict_open(&a, &p, &e), BC_OK);
    assert_int_equal(evict_open(&b, &p, &e), BC_OK);
    a->mass = calloc(50, sizeof(float));
    assert_non_null(a->mass);
    a->n_mass = a->mass_max = 50;
    for (int i = 0; i < 50; i++)
        a->mass[i] = (float)i / 7;
    evict_state_put(a, &o);
    struct bytes_in in = {.at = o.at, .n = o.n};
    assert_int_equal(evict_state_get(b, &in, 49, &e), BC_ECORRUPT); /* more than there are tokens */
    assert_int_equal(b->n_mass, 0);
    in = (struct bytes_in){.at = o.at, .n = o.n - 1};
    assert_int_equal(evict_state_get(b, &in, 50, &e), BC_ECORRUPT);
    in = (struct bytes_in){.at = o.at, .n = o.n};
    assert_int_equal(evict_state_get(b, &in, 50, &e), BC_OK);
    evict_state_put(b, &again);
    assert_int_equal(again.n, o.n);
    assert_memory_equal(again.at, o.at, o.n);
    evict_close(&a);
    evict_close(&b);

    o.n = again.n = 0;
    p = params_of(evict_policy_find("tova"), 0);
    assert_int_equal(evict_open(&a, &p, &e), BC_OK);
    assert_int_equal(evict_open(&b, &p, &e), BC_OK);
    evict_note_query(a, query, 64);
    evict_state_put(a, &o);
    in = (struct bytes_in){.at = o.at, .n = o.n};
    assert_int_equal(evict_state_get(b, &in, 0, &e), BC_OK);
    assert_int_equal(b->query_len, 64);
    assert_memory_equal(b->query, query, sizeof query);
    evict_close(&a);
    evict_close(&b);
    free(o.at);
    free(again.at);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parameters_come_back),
        cmocka_unit_test(impossible_parameters_are_refused),
        cmocka_unit_test(wishes_come_back),
        cmocka_unit_test(what_a_policy_has_learnt_comes_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
