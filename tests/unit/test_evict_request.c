/* What a client asks for, turned into parameters: what is left open, what is refused, and what a refusal says would do. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>
#include "evict.h"

#define PAGE_BYTES 34304

static struct evict_request open_request(void)
{
    return (struct evict_request){.recent = -1, .span_quantile = -1};
}

static struct evict_params resolved(const struct evict_request *r, uint64_t default_bytes)
{
    struct evict_params p;
    struct err e = {0};
    if (evict_resolve(r, PAGE_BYTES, default_bytes, &p, &e))
        fail_msg("%s: %s", e.field, e.text);
    return p;
}

static void expect_refused(const struct evict_request *r, int code, const char *field,
                           const char *number)
{
    struct evict_params p, untouched;
    struct err e = {0};
    memset(&p, 0x5a, sizeof p);
    untouched = p;
    assert_int_equal(evict_resolve(r, PAGE_BYTES, 0, &p, &e), code);
    assert_int_equal(e.code, code);
    assert_string_equal(e.field, field);
    if (strstr(e.text, number) == NULL)
        fail_msg("\"%s\" does not say %s", e.text, number);
    assert_memory_equal(&p, &untouched, sizeof p);
}

static void what_is_left_open_gets_the_defaults(void **state)
{
    (void)state;
    struct evict_request r = open_request();
    r.budget_tokens = 512;
    struct evict_params p = resolved(&r, 0);
    assert_string_equal(p.policy->name, "counter_causal_fast");
    assert_int_equal(p.budget, 512);
    assert_int_equal(p.keep, 384);
    assert_int_equal(p.recent, 32);
    assert_int_equal(p.frozen, 0);
    assert_int_equal(p.min_gap, 0);
    assert_int_equal(p.span, 15);
    assert_true(p.span_quantile == 0.25f);
    assert_int_equal(p.score, EVICT_LOGIT);
    assert_int_equal(p.trigger, EVICT_ON_BUDGET);
    r.budget_tokens = 100;
    p = resolved(&r, 0);
    assert_int_equal(p.keep, 75);
    assert_int_equal(p.recent, 12); /* an eighth */
    r.budget_tokens = 10;
    assert_int_equal(resolved(&r, 0).keep, 7);
}

static void bytes_round_down_to_pages(void **state)
{
    (void)state;
    struct evict_request r = open_request();
    r.budget_bytes = 4 * PAGE_BYTES - 1;
    struct evict_params p = resolved(&r, 0);
    assert_int_equal(p.budget, 3 * 64);
    assert_int_equal(budget_bytes(&p, PAGE_BYTES), 3 * PAGE_BYTES);
    r.budget_bytes = 4 * PAGE_BYTES;
    assert_int_equal(resolved(&r, 0).budget, 4 * 64);
    r.budget_bytes = UINT64_MAX; /* more than can be addressed: the most that can */
    assert_int_equal(resolved(&r, 0).budget, POOL_PAGES_MAX * 64);
    r.budget_bytes = 0;
    assert_int_equal(resolved(&r, 5 * PAGE_BYTES).budget, 5 * 64);
    r.budget_tokens = 65; /* a token budget is exact; its bytes are whole pages */
    p = resolved(&r, 5 * PAGE_BYTES);
    assert_int_equal(p.budget, 65);
    assert_int_equal(budget_bytes(&p, PAGE_BYTES), 2 * PAGE_BYTES);
    r.budget_tokens = 0;
    r.budget_bytes = PAGE_BYTES - 1;
    expect_refused(&r, BC_EBUDGET, "budget_bytes", "34303");
    r.budget_bytes = PAGE_BYTES;
    r.budget_tokens = 64;
    expect_refused(&r, BC_EINVALID, "budget_tokens", "64");
}

static void policy_none_needs_no_budget(void **state)
{
    (void)state;
    struct evict_request r = open_request();
    r.policy = "none";
    struct evict_params p = resolved(&r, 5 * PAGE_BYTES);
    assert_int_equal(p.budget, 0);
    assert_int_equal(budget_room(&p, 1000000), UINT32_MAX);
    assert_int_equal(budget_bytes(&p, PAGE_BYTES), 0);
    r.budget_tokens = 100;
    p = resolved(&r, 0);
    assert_int_equal(budget_room(&p, 99), 1);
    assert_int_equal(budget_room(&p, 100), 0);
    r.trigger = "prefill_end";
    expect_refused(&r, BC_EINVALID, "trigger", "none");
}

static void prefill_end_needs_a_budget_or_a_keep(void **state)
{
    (void)state;
    struct evict_request r = open_request();
    r.trigger = "prefill_end";
    expect_refused(&r, BC_EINVALID, "keep_tokens", "0");
    r.keep = 80;
    struct evict_params p = resolved(&r, 0);
    assert_int_equal(p.trigger, EVICT_ON_PREFILL_END);
    assert_int_equal(p.budget, 0);
    assert_int_equal(p.recent, 10);
    assert_int_equal(budget_room(&p, 1000000), UINT32_MAX);
    r.budget_tokens = 80;
    expect_refused(&r, BC_EINVALID, "keep_tokens", "80");
}

static void names_that_nobody_knows_are_refused(void **state)
{
    (void)state;
    struct evict_request r = open_request();
    r.budget_tokens = 64;
    r.policy = "lru";
    expect_refused(&r, BC_EUNKNOWN, "policy", "\"lru\"");
    r.policy = "";
    expect_refused(&r, BC_EUNKNOWN, "policy", "key_similarity");
    r.policy = NULL;
    r.score = "loss";
    expect_refused(&r, BC_EUNKNOWN, "score", "logprob");
    r.score = NULL;
    r.trigger = "always";
    expect_refused(&r, BC_EUNKNOWN, "trigger", "prefill_end");
}

static void numbers_out_of_range_are_refused(void **state)
{
    (void)state;
    struct evict_request r = open_request();
    expect_refused(&r, BC_EINVALID, "budget_tokens", "counter_causal_fast");
    r.budget_tokens =
        1; /* no keep would do: it is the budget that is at fault, asked for a keep or not */
    expect_refused(&r, BC_EINVALID, "budget_tokens", "budget_tokens 1: must be at least 2");
    r.keep = 1;
    expect_refused(&r, BC_EINVALID, "budget_tokens", "budget_tokens 1: must be at least 2");
    r.keep = 0;
    r.budget_tokens = 2;
    assert_int_equal(resolved(&r, 0).keep, 1);
    r.budget_tokens = 64;
#define REFUSED(member, value, code, field, number)                                                \
    do {                                                                                           \
        struct evict_request bad = r;                                                              \
        bad.member = (value);                                                                      \
        expect_refused(&bad, code, field, number);                                                 \
    } while (0)
    REFUSED(keep, 64, BC_EINVALID, "keep_tokens", "64");
    REFUSED(keep, UINT32_MAX, BC_EINVALID, "keep_tokens", "4294967295");
    REFUSED(frozen, 48, BC_EINVALID, "frozen_tokens", "48");
    REFUSED(frozen, 64, BC_EINVALID, "frozen_tokens", "64");
    REFUSED(frozen, UINT32_MAX - 1, BC_EINVALID, "frozen_tokens", "4294967294");
    REFUSED(frozen, 41, BC_EINVALID, "recent_tokens", "41"); /* recent is 8 by default, keep 48 */
    REFUSED(recent, 49, BC_EINVALID, "recent_tokens", "49");
    REFUSED(recent, -2, BC_EINVALID, "recent_tokens", "-2");
    REFUSED(recent, INT64_MAX, BC_EINVALID, "recent_tokens", "9223372036854775807");
    REFUSED(min_gap, 48, BC_EINVALID, "min_gap", "48");
    REFUSED(min_gap, UINT32_MAX, BC_EINVALID, "min_gap", "4294967295");
    REFUSED(span, 2, BC_EINVALID, "span", "2");
    REFUSED(span, 257, BC_EINVALID, "span", "257");
    REFUSED(span_quantile, 1.5f, BC_EINVALID, "span_quantile", "1.5");
    REFUSED(span_quantile, NAN, BC_EINVALID, "span_quantile", "nan");
    struct evict_request good = r;
    good.frozen = 40;
    good.recent = 8;
    good.min_gap = 7;
    assert_int_equal(resolved(&good, 0).frozen, 40);
}

struct advice {
    uint32_t keep, budget; /* budget 0: that of the request will do */
    unsigned long long bytes;
};

/* Of a refusal; false: it gives none. */
static bool advised(const struct evict_request *r, struct advice *ret)
{
    struct evict_params p;
    struct err e = {0};
    *ret = (struct advice){0};
    assert_int_equal(evict_resolve(r, PAGE_BYTES, 0, &p, &e), BC_EINVALID);
    const char *at = strstr(e.text, "; it takes ");
    if (at == NULL)
        return false;
    int n = sscanf(at, "; it takes keep_tokens %u and a budget of %u tokens (%llu bytes)",
                   &ret->keep, &ret->budget, &ret->bytes);
    assert_true(n == 3 || (n == 1 && strstr(at, "budget") == NULL));
    return true;
}

static void refused_or_not(const struct evict_request *r, bool refused)
{
    struct evict_params p;
    assert_int_equal(evict_resolve(r, PAGE_BYTES, 0, &p, NULL), refused ? BC_EINVALID : BC_OK);
}

/* What a refusal names is taken, and nothing less. */
static void a_refusal_names_what_would_do(void **state)
{
    (void)state;
    static const struct {
        uint32_t budget, keep, frozen, min_gap;
        int64_t recent;
    } rows[] = {{64, 0, 41, 0, -1},  {64, 0, 60, 0, -1},   {64, 0, 700, 0, -1},  {64, 0, 0, 0, 49},
                {64, 0, 0, 100, -1}, {128, 0, 98, 20, 10}, {64, 64, 0, 0, -1},   {64, 90, 0, 0, -1},
                {64, 5, 7, 0, -1},   {64, 5, 700, 3, 9},   {64, 70, 100, 0, -1}, {2, 0, 3, 0, -1},
                {500, 20, 0, 0, 30}};
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        struct evict_request r = open_request(), less;
        struct advice a;
        r.budget_tokens = rows[i].budget;
        r.keep = rows[i].keep;
        r.frozen = rows[i].frozen;
        r.min_gap = rows[i].min_gap;
        r.recent = rows[i].recent;
        assert_true(advised(&r, &a));
        assert_true(a.budget != 0 || a.keep < r.budget_tokens);
        if (a.budget != 0) {
            assert_true(a.bytes == (a.budget + 63ull) / 64 * PAGE_BYTES);
            less = r;
            less.budget_tokens = a.budget - 1;
            less.keep = rows[i].keep != 0 ? a.keep : 0;
            refused_or_not(&less, true);
            r.budget_tokens = a.budget;
            refused_or_not(&r, rows[i].keep != 0 && rows[i].keep < a.keep);
        }
        less = r;
        r.keep = a.keep;
        refused_or_not(&r, false);
        less.keep = a.keep - 1;
        refused_or_not(&less, rows[i].keep < a.keep); /* else it is what was asked for */
    }
    struct evict_request r = open_request();
    struct advice a;
    r.budget_tokens = 64;
    r.frozen = UINT32_MAX - 1; /* no budget would do */
    assert_false(advised(&r, &a));
    r.frozen = 100;
    r.span = 4; /* nor is it that */
    assert_false(advised(&r, &a));
}

static void frozen_auto_is_checked_when_it_is_fixed(void **state)
{
    (void)state;
    struct evict_request r = open_request();
    struct evict *ev;
    struct err e = {0};
    r.budget_tokens = 64;
    r.frozen = EVICT_FROZEN_AUTO;
    struct evict_params p = resolved(&r, 0);
    assert_int_equal(evict_open(&ev, &p, &e), 0);
    p.frozen = 41;
    assert_int_equal(evict_set_params(ev, &p, &e), BC_EINVALID);
    assert_int_equal(evict_params(ev)->frozen, EVICT_FROZEN_AUTO);
    p.frozen = 40;
    assert_int_equal(evict_set_params(ev, &p, &e), 0);
    assert_int_equal(evict_params(ev)->frozen, 40);
    p.policy = evict_policy_find("tova");
    assert_int_equal(evict_set_params(ev, &p, &e), BC_EINVALID);
    assert_string_equal(e.field, "policy");
    evict_close(&ev);
    assert_null(ev);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_left_open_gets_the_defaults),
        cmocka_unit_test(bytes_round_down_to_pages),
        cmocka_unit_test(policy_none_needs_no_budget),
        cmocka_unit_test(prefill_end_needs_a_budget_or_a_keep),
        cmocka_unit_test(names_that_nobody_knows_are_refused),
        cmocka_unit_test(numbers_out_of_range_are_refused),
        cmocka_unit_test(a_refusal_names_what_would_do),
        cmocka_unit_test(frozen_auto_is_checked_when_it_is_fixed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
