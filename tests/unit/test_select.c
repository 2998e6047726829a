/* The selection against its definition: every small case is tried, then random larger ones, ties,
 * NaN and the rows that see nothing. The definition is checked, not a second implementation of the
 * same steps. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "evict.h"

#define SMALL 7
#define LARGE 300

static uint32_t random_state = 7;

static uint32_t below(uint32_t n)
{
    random_state = random_state * 1664525u + 1013904223u;
    return (uint32_t)(((uint64_t)random_state * n) >> 32);
}

struct cut {
    const float *value;
    uint32_t n, keep, frozen, recent;
};

/* Whether row i must go before row j: by value, NaN above all; of equals the later one goes. */
static bool goes_first(const float *v, uint32_t i, uint32_t j)
{
    if (isnan(v[i]) != isnan(v[j]))
        return isnan(v[i]);
    if (isnan(v[i]) || v[i] == v[j])
        return i > j;
    return v[i] > v[j];
}

/* The definition: right number, ascending, protected rows in, and no row that is out should have
 * stayed for one that is in. */
static void check_keep(const struct cut *c)
{
    uint32_t scratch[LARGE], kept[LARGE + 1];
    bool in[LARGE] = {false};
    memset(kept, 0xee, sizeof kept);
    uint32_t n = select_keep(c->value, c->n, c->keep, c->frozen, c->recent, scratch, kept);
    assert_int_equal(n, BC_MIN(c->n, c->keep));
    assert_int_equal(kept[n], 0xeeeeeeee);
    for (uint32_t k = 0; k < n; k++) {
        assert_true(kept[k] < c->n && (k == 0 || kept[k] > kept[k - 1]));
        in[kept[k]] = true;
    }
    if (c->n <= c->keep)
        return;
    for (uint32_t i = 0; i < c->n; i++) {
        bool is_protected = i < c->frozen || i >= c->n - c->recent;
        assert_true(in[i] || !is_protected);
        if (!in[i] || is_protected)
            continue;
        for (uint32_t j = c->frozen; j < c->n - c->recent; j++)
            assert_false(!in[j] && goes_first(c->value, i, j));
    }
}

static void check_all_cuts(const float *value, uint32_t n)
{
    for (uint32_t keep = 1; keep <= n + 1; keep++)
        for (uint32_t frozen = 0; frozen <= keep; frozen++)
            for (uint32_t recent = 0; frozen + recent <= keep; recent++) {
                struct cut c = {value, n, keep, frozen, recent};
                check_keep(&c);
            }
}

/* All values of 1..SMALL rows out of five: a tie, an order, a row that sees nothing, a NaN. */
static void every_small_cut_is_the_definition(void **state)
{
    (void)state;
    static const float values[] = {-INFINITY, -1.5f, 0.0f, 2.0f, NAN};
    for (uint32_t n = 1; n <= SMALL; n++) {
        uint32_t cases = 1;
        for (uint32_t i = 0; i < n; i++)
            cases *= ARRAY_LEN(values);
        for (uint32_t k = 0; k < cases; k++) {
            float value[SMALL];
            uint32_t digits = k;
            for (uint32_t i = 0; i < n; i++, digits /= ARRAY_LEN(values))
                value[i] = values[digits % ARRAY_LEN(values)];
            check_all_cuts(value, n);
        }
    }
}

static void large_cuts_with_many_ties_are_the_definition(void **state)
{
    (void)state;
    float value[LARGE];
    for (int round = 0; round < 300; round++) {
        struct cut c = {.value = value, .n = 1 + below(LARGE)};
        uint32_t levels = 1 + below(round % 2 ? 5 : 5000);
        for (uint32_t i = 0; i < c.n; i++)
            value[i] = (float)below(levels) - 2;
        c.keep = 1 + below(c.n);
        c.frozen = below(c.keep + 1);
        c.recent = below(c.keep - c.frozen + 1);
        check_keep(&c);
    }
}

static void ties_keep_the_earlier(void **state)
{
    (void)state;
    const float value[6] = {1, 1, 1, 1, 1, 1};
    uint32_t scratch[6], kept[6];
    assert_int_equal(select_keep(value, 6, 4, 1, 1, scratch, kept), 4);
    const uint32_t want[4] = {0, 1, 2, 5};
    assert_memory_equal(kept, want, sizeof want);
}

static void the_drawn_example_is_true(void **state)
{
    (void)state;
    const float value[7] = {0.3f, 0.9f, 0.1f, 0.9f, 0.5f, 0.2f, -INFINITY};
    uint32_t scratch[7], kept[7];
    assert_int_equal(select_keep(value, 7, 4, 1, 1, scratch, kept), 4);
    const uint32_t want[4] = {0, 2, 5, 6};
    assert_memory_equal(kept, want, sizeof want);
}

/* ---- spans ------------------------------------------------------------------------------------
 */

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* The definition, one window at a time. */
static void check_span(const float *value, uint32_t n, uint32_t span, double quantile)
{
    float pooled[LARGE + 1], window[EVICT_SPAN_MAX];
    uint32_t half = (span - 1) / 2, scored = n;
    while (scored > 0 && value[scored - 1] == -INFINITY)
        scored--;
    pooled[n] = 12345;
    select_span(value, n, span, quantile, pooled);
    assert_true(pooled[n] == 12345);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t first = i > half ? i - half : 0, end = BC_MIN(scored, i + half + 1);
        if (i >= scored) {
            assert_true(pooled[i] == -INFINITY);
            continue;
        }
        memcpy(window, value + first, (end - first) * sizeof *window);
        qsort(window, end - first, sizeof *window, by_value);
        assert_true(pooled[i] == window[(uint32_t)floor(quantile * (end - first - 1))]);
    }
}

static void spans_are_the_definition(void **state)
{
    (void)state;
    static const double quantiles[] = {0, 0.1, 0.25, 0.3, 0.5, 0.7, 0.999, 1};
    static const uint32_t spans[] = {1, 3, 5, 15, 101, EVICT_SPAN_MAX};
    float value[LARGE];
    for (uint32_t round = 0; round < 120; round++) {
        uint32_t n = round < 20 ? round : 1 + below(LARGE), blind = below(n + 1) % 6;
        for (uint32_t i = 0; i < n; i++)
            value[i] = i + blind >= n ? -INFINITY : (float)below(round % 3 ? 50 : 3) - 20.5f;
        for (size_t s = 0; s < ARRAY_LEN(spans); s++)
            for (size_t q = 0; q < ARRAY_LEN(quantiles); q++)
                check_span(value, n, spans[s], quantiles[q]);
    }
}

static void span_one_changes_nothing(void **state)
{
    (void)state;
    const float value[5] = {3, -1, 2, 2, -INFINITY};
    float pooled[5];
    select_span(value, 5, 1, 0.25, pooled);
    assert_memory_equal(pooled, value, sizeof value);
}

static void spans_survive_nan(void **state)
{
    (void)state;
    const float value[7] = {3, NAN, 2, NAN, NAN, 1, 0};
    const float want[7] = {3, 2, 2, 2, 1, 0, 0};
    float pooled[7];
    select_span(value, 7, 3, 0, pooled);
    assert_memory_equal(pooled, want, sizeof want);
    select_span(value, 7, 3, 1, pooled);
    for (uint32_t i = 0; i < 6; i++)
        assert_true(isnan(pooled[i]));
    assert_true(pooled[6] == 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_small_cut_is_the_definition),
        cmocka_unit_test(large_cuts_with_many_ties_are_the_definition),
        cmocka_unit_test(ties_keep_the_earlier),
        cmocka_unit_test(the_drawn_example_is_true),
        cmocka_unit_test(spans_are_the_definition),
        cmocka_unit_test(span_one_changes_nothing),
        cmocka_unit_test(spans_survive_nan),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
