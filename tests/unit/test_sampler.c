/* The sampler: which tokens may come, how often, and that nothing but (logits, options, seed,
 * stream index) decides. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "sampler.h"

#define V 97u
#define DRAWS 200000u

static struct sampler S;
static float logits[V];

static int setup(void **state)
{
    (void)state;
    struct err e = {0};
    uint32_t x = 12345;
    assert_int_equal(sampler_open(&S, V, &e), BC_OK);
    for (uint32_t i = 0; i < V; i++) {
        x = x * 1664525u + 1013904223u;
        logits[i] = (float)(x >> 8) / (float)(1 << 24) * 6 - 3;
    }
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    sampler_close(&S);
    return 0;
}

static struct generate_options options(float temperature)
{
    struct generate_options o;
    generate_options_init(&o);
    o.temperature = temperature;
    return o;
}

static int32_t pick(const struct generate_options *o, uint64_t stream)
{
    return sampler_pick(&S, o, logits, NULL, 0, stream);
}

static void greedy_takes_the_largest_and_the_lowest_id_of_a_tie(void **state)
{
    (void)state;
    struct generate_options o = options(0);
    float saved = logits[20], tie = logits[60];
    logits[60] = logits[20] = 50;
    assert_int_equal(pick(&o, 3), 20);
    logits[20] = saved;
    assert_int_equal(pick(&o, 4), 60);
    logits[60] = tie;
}

static void broken_logits_do_not_break_the_sampler(void **state)
{
    (void)state;
    float l[V];
    for (int sampled = 0; sampled < 2; sampled++) {
        struct generate_options o = options(sampled ? 0.7f : 0);
        o.top_p = 0.9f;
        for (uint32_t i = 0; i < V; i++)
            l[i] = NAN;
        assert_int_equal(sampler_pick(&S, &o, l, NULL, 0, 1), 0);
        l[33] = 1; /* the only number */
        assert_int_equal(sampler_pick(&S, &o, l, NULL, 0, 1), 33);
        l[41] = INFINITY;
        assert_int_equal(sampler_pick(&S, &o, l, NULL, 0, 1), 41);
        for (uint32_t i = 0; i < V; i++)
            l[i] = -INFINITY;
        assert_int_equal(sampler_pick(&S, &o, l, NULL, 0, 1), 0);
    }
    struct report_top top[5];
    assert_true(isinf(sampler_logprob(l, V, 3, 5, top)));
    for (uint32_t i = 0; i < V; i++)
        l[i] = NAN;
    assert_true(isinf(sampler_logprob(l, V, 3, 5, top)));
}

/* Few different values, so ties everywhere, and NaN and infinities among them: a plain search from the front says who wins,
 * with a penalty of 1 and with one that no token gets. */
static void greedy_is_a_plain_search(void **state)
{
    (void)state;
    enum { N = 64 * 5 + 7 };
    static const float odd[] = {NAN, -INFINITY, -0.0f, 0.0f};
    struct sampler wide;
    struct err e = {0};
    uint32_t x = 99;
    float l[N];
    assert_int_equal(sampler_open(&wide, N, &e), BC_OK);
    for (int round = 0; round < 2000; round++) {
        uint32_t best = 0;
        float max = -INFINITY;
        for (uint32_t i = 0; i < N; i++) {
            x = x * 1664525u + 1013904223u;
            uint32_t v = (x >> 16) % (20 + (uint32_t)round);
            l[i] = v < 4 ? odd[v] : (float)v - 100;
            if (l[i] > max) {
                max = l[i];
                best = i;
            }
        }
        struct generate_options o = options(0);
        assert_int_equal(sampler_pick(&wide, &o, l, NULL, 0, 1), best);
        o.repeat_penalty = 1.5f;
        assert_int_equal(sampler_pick(&wide, &o, l, NULL, 0, 1), best);
    }
    sampler_close(&wide);
}

/* Chi-square of the draws against the probabilities p [V] (0: must never come). */
static void check_draws(const struct generate_options *o, const double *p)
{
    static uint32_t count[V];
    double chi = 0;
    uint32_t cells = 0;
    memset(count, 0, sizeof count);
    for (uint32_t i = 0; i < DRAWS; i++)
        count[pick(o, i)]++;
    for (uint32_t i = 0; i < V; i++) {
        if (p[i] == 0) {
            assert_int_equal(count[i], 0);
            continue;
        }
        double expected = p[i] * DRAWS;
        chi += (count[i] - expected) * (count[i] - expected) / expected;
        cells++;
    }
    /* mean cells - 1, deviation sqrt(2 (cells - 1)): five of them is one in millions */
    double freedom = cells - 1.0;
    if (chi > freedom + 5 * sqrt(2 * freedom) + 5)
        fail_msg("chi-square %g for %g degrees of freedom", chi, freedom);
}

static void softmax(double temperature, double *p)
{
    double sum = 0;
    for (uint32_t i = 0; i < V; i++)
        sum += p[i] = exp((double)logits[i] / temperature);
    for (uint32_t i = 0; i < V; i++)
        p[i] /= sum;
}

static uint32_t order[V];
static const double *order_by;
static int descending(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return order_by[x] != order_by[y] ? (order_by[x] < order_by[y] ? 1 : -1) : (x > y) - (x < y);
}

/* The first n in descending order stay, n as stop says. */
static void cut(double *p, uint32_t most, double mass)
{
    double sum = 0, kept = 0;
    for (uint32_t i = 0; i < V; i++)
        order[i] = i;
    order_by = p;
    qsort(order, V, sizeof order[0], descending);
    for (uint32_t i = 0; i < V; i++) {
        bool stays = i < most && sum < mass;
        sum += p[order[i]];
        kept += stays ? p[order[i]] : 0;
        if (!stays)
            p[order[i]] = 0;
    }
    for (uint32_t i = 0; i < V; i++)
        p[i] /= kept;
}

static void draws_follow_the_softmax_at_each_temperature(void **state)
{
    (void)state;
    double p[V];
    for (double t = 0.5; t < 3; t += 0.75) {
        struct generate_options o = options((float)t);
        o.seed = (uint64_t)(t * 100);
        softmax((double)o.temperature, p);
        check_draws(&o, p);
    }
}

static void top_k_top_p_and_min_p_cut_what_they_say(void **state)
{
    (void)state;
    double p[V];
    struct generate_options o = options(1);
    o.seed = 11;
    o.top_k = 7;
    softmax(1, p);
    cut(p, 7, 2);
    check_draws(&o, p);

    o.top_k = 0;
    o.top_p = 0.6f;
    softmax(1, p);
    cut(p, V, (double)o.top_p);
    check_draws(&o, p);

    o.top_k = 4; /* the stricter of the two */
    softmax(1, p);
    cut(p, 4, (double)o.top_p);
    check_draws(&o, p);

    o = options(1);
    o.min_p = 0.2f;
    o.seed = 12;
    softmax(1, p);
    double max = 0, kept = 0;
    for (uint32_t i = 0; i < V; i++)
        max = fmax(max, p[i]);
    for (uint32_t i = 0; i < V; i++)
        kept += p[i] = p[i] >= (double)o.min_p * max ? p[i] : 0;
    for (uint32_t i = 0; i < V; i++)
        p[i] /= kept;
    check_draws(&o, p);

    o.top_p = 0; /* the most probable one always stays */
    assert_int_equal(pick(&o, 1), pick(&(struct generate_options){.repeat_penalty = 1}, 1));
    o.top_p = 1;
    o.top_k = 1;
    assert_int_equal(pick(&o, 9), pick(&(struct generate_options){.repeat_penalty = 1}, 9));
}

/* ---- the same by sorting everything */

static const float *sorted_by;

static int likelier(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    float l = sorted_by[x], m = sorted_by[y];
    return l != m ? (l < m) - (l > m) : (x > y) - (x < y);
}

static int32_t pick_sorted(const struct generate_options *o, const float *l, uint32_t n,
                           uint64_t stream)
{
    uint32_t *id = malloc(n * sizeof *id), n_id = 0, taken = 0;
    double *w = malloc(n * sizeof *w), total = 0, cut = 0, sum = 0;
    float max = -INFINITY;
    assert_true(id != NULL && w != NULL);
    for (uint32_t i = 0; i < n; i++)
        max = l[i] > max ? l[i] : max;
    for (uint32_t i = 0; i < n; i++) {
        w[i] = exp(((double)l[i] - (double)max) / (double)o->temperature);
        if (w[i] > 0 && w[i] >= (double)o->min_p) {
            id[n_id++] = i;
            total += w[i];
        }
    }
    sorted_by = l;
    qsort(id, n_id, sizeof *id, likelier);
    while (taken < n_id && (o->top_k == 0 || taken < o->top_k) &&
           (taken == 0 || o->top_p >= 1 || cut < (double)o->top_p * total))
        cut += w[id[taken++]];
    double at = sampler_uniform(o->seed, stream);
    int32_t ret = -1;
    for (uint32_t i = 0; i < taken && ret < 0; i++)
        ret = (sum += w[id[i]]) > at * cut || i + 1 == taken ? (int32_t)id[i] : -1;
    free(id);
    free(w);
    return ret;
}

/* Flat and steep distributions, ties, nuclei of one and of nearly all: those that lie in the likeliest, and those that do not. */
static void a_nucleus_is_that_of_the_whole_vocabulary(void **state)
{
    (void)state;
    enum { N = 3000 };
    static const float temperatures[] = {0.1f, 0.7f, 1, 5, 50};
    static const float top_ps[] = {0.01f, 0.5f, 0.95f, 0.9999f, 1};
    static const uint32_t top_ks[] = {0, 1, 40, 2999, 5000};
    static float l[N];
    struct sampler any;
    struct err e = {0};
    uint32_t x = 99;
    assert_int_equal(sampler_open(&any, N, &e), BC_OK);
    for (uint32_t round = 0; round < 250; round++) {
        struct generate_options o = options(temperatures[round % 5]);
        o.top_p = top_ps[round / 5 % 5];
        o.top_k = o.top_p < 1 ? top_ks[round / 25 % 5] : top_ks[1 + round / 25 % 4];
        o.min_p = round % 7 == 0 ? 0.02f : 0;
        o.seed = round;
        for (uint32_t i = 0; i < N; i++) {
            x = x * 1664525u + 1013904223u;
            float g = (float)(x >> 8) / (float)(1 << 24);
            l[i] = round % 3 == 0 ? (float)(x >> 28) : 20 * g * g * g;
        }
        for (uint64_t stream = 0; stream < 3; stream++)
            assert_int_equal(sampler_pick(&any, &o, l, NULL, 0, stream),
                             pick_sorted(&o, l, N, stream));
    }
    sampler_close(&any);
}

static void the_draw_is_a_function_of_seed_and_index(void **state)
{
    (void)state;
    struct generate_options a = options(1), b = options(1);
    b.seed = 1;
    uint32_t same = 0, shifted = 0;
    for (uint64_t i = 0; i < 4000; i++) {
        assert_int_equal(pick(&a, i), pick(&a, i));
        same += pick(&a, i) == pick(&b, i);
        shifted += pick(&a, i + 1) == pick(&b, i);
    }
    assert_true(same < 400 && shifted < 400); /* about 4000 / 40 by chance */
    double sum = 0, square = 0;
    for (uint64_t i = 0; i < DRAWS; i++) {
        double u = sampler_uniform(7, i);
        assert_true(u >= 0 && u < 1);
        sum += u;
        square += u * u;
    }
    assert_true(fabs(sum / DRAWS - 0.5) < 0.004);
    assert_true(fabs(square / DRAWS - 1.0 / 3) < 0.004);
}

static void the_penalty_counts_a_token_once(void **state)
{
    (void)state;
    struct generate_options o = options(0);
    o.repeat_penalty = 2;
    float l[V] = {0};
    l[5] = 3;
    l[6] = 2;
    l[7] = 1.4f;
    int32_t once[] = {5}, often[] = {5, 5, 5, 6}, all[V];
    assert_int_equal(sampler_pick(&S, &o, l, NULL, 0, 0), 5);
    assert_int_equal(sampler_pick(&S, &o, l, once, 1, 0), 6);  /* 1.5 < 2 */
    assert_int_equal(sampler_pick(&S, &o, l, often, 4, 0), 5); /* 1.5 > 1.4 > 1 */
    for (uint32_t i = 0; i < V; i++) {
        all[i] = (int32_t)i;
        l[i] = i == 50 ? -1 : -2; /* below zero it multiplies */
    }
    int32_t fifty[] = {50};
    l[51] = -1.5f;
    assert_int_equal(sampler_pick(&S, &o, l, fifty, 1, 0), 51);
    assert_int_equal(sampler_pick(&S, &o, l, all, V, 0), 50);
}

static void log_probabilities_are_those_of_the_raw_logits(void **state)
{
    (void)state;
    struct report_top top[20];
    double p[V], sum = 0;
    softmax(1, p);
    for (uint32_t id = 0; id < V; id++) {
        float lp = sampler_logprob(logits, V, (int32_t)id, 20, top);
        assert_true(fabs((double)lp - log(p[id])) < 1e-5);
        sum += exp((double)lp);
    }
    assert_true(fabs(sum - 1) < 1e-5);
    order_by = p;
    for (uint32_t i = 0; i < V; i++)
        order[i] = i;
    qsort(order, V, sizeof order[0], descending);
    for (int i = 0; i < 20; i++) {
        assert_int_equal(top[i].id, order[i]);
        assert_true(fabs((double)top[i].logprob - log(p[order[i]])) < 1e-5);
    }
}

/* The log-probability of the first of two tokens is -log(1 + exp(-x)), where the second is x lower: for large x that is -exp(-x). */
static void weights_are_exponentials(void **state)
{
    (void)state;
    struct report_top top[1];
    for (float x = 0; x < 20; x += 0.003f) {
        float l[2] = {0.25f, 0.25f - x};
        double want = log1p(exp((double)l[1] - (double)l[0]));
        double got = -(double)sampler_logprob(l, 2, 0, 0, top);
        if (!(fabs(got - want) < want * 0x1p-20))
            fail_msg("x %.4f: %.9g, not %.9g", (double)x, got, want);
    }
}

static void options_out_of_range_are_refused_by_name(void **state)
{
    (void)state;
    struct generate_options ok = options(0), o;
    struct err e = {0};
    assert_int_equal(generate_options_check(&ok, &e), BC_OK);
#define BAD(which, change)                                                                         \
    o = ok;                                                                                        \
    change;                                                                                        \
    assert_int_equal(generate_options_check(&o, &e), BC_EINVALID);                                 \
    assert_string_equal(e.field, which)
    BAD("temperature", o.temperature = -0.1f);
    BAD("temperature", o.temperature = NAN);
    BAD("top_p", o.top_p = 1.5f);
    BAD("min_p", o.min_p = -1);
    BAD("repeat_penalty", o.repeat_penalty = 0);
    BAD("repeat_last", o.repeat_last = SAMPLER_REPEAT_MAX + 1);
    BAD("n_logprobs", o.n_logprobs = 21);
    BAD("n_logprobs", o.n_logprobs = -2);
    BAD("stop", o.n_stop = GENERATE_STOPS_MAX + 1);
    BAD("stop", o.n_stop = 1); /* an empty one */
    BAD("stop", (o.n_stop = 1, o.stop[0].len = 2, memcpy(o.stop[0].bytes, "a\xc3", 2)));
    BAD("stop", (o.n_stop = 1, o.stop[0].len = 3, memcpy(o.stop[0].bytes, "\xed\xa0\x80", 3)));
#undef BAD
    o = ok;
    o.n_stop = 1;
    o.stop[0].len = 4;
    memcpy(o.stop[0].bytes, "\xf0\x9f\x98\x80", 4);
    assert_int_equal(generate_options_check(&o, &e), BC_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(greedy_takes_the_largest_and_the_lowest_id_of_a_tie),
        cmocka_unit_test(greedy_is_a_plain_search),
        cmocka_unit_test(broken_logits_do_not_break_the_sampler),
        cmocka_unit_test(draws_follow_the_softmax_at_each_temperature),
        cmocka_unit_test(top_k_top_p_and_min_p_cut_what_they_say),
        cmocka_unit_test(a_nucleus_is_that_of_the_whole_vocabulary),
        cmocka_unit_test(the_draw_is_a_function_of_seed_and_index),
        cmocka_unit_test(the_penalty_counts_a_token_once),
        cmocka_unit_test(log_probabilities_are_those_of_the_raw_logits),
        cmocka_unit_test(weights_are_exponentials),
        cmocka_unit_test(options_out_of_range_are_refused_by_name),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
