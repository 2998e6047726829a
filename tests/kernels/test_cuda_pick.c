/* Selection and sampling on the device, in every way it can run.
 *
 *   select_keep   exactly the eviction code's, with ties, zeros of both signs, infinities and NaN
 *   sample        greedy: the largest, the lowest id of equals; filters: exactly the tokens that an ordered vocabulary gives;
 *                 draws: frequencies within five deviations, the same alone and in a batch; the engine's own tokens */
#include "evict.h"
#include "kernels_device.h"
#include "sampler.h"

/* ---- selection ---- */

static float value_at(struct kc_rng *r, int how)
{
    static const float odd[] = {0.0f, -0.0f, 1.0f, -1.0f, INFINITY, -INFINITY, NAN, 1e-40f};
    if (how == 0)
        return kc_normal(r);
    if (how == 1)
        return (float)kc_below(r, 5); /* many ties */
    return odd[kc_below(r, KC_LEN(odd))];
}

static void check_select_case(struct kn *kn, struct kn_select s, int how)
{
    float *value = malloc(s.n * sizeof *value);
    uint32_t *want = malloc(s.n * sizeof *want), *scratch = malloc(s.n * sizeof *scratch);
    uint32_t *got = malloc(s.n * sizeof *got);
    struct kc_rng r = {s.n + s.keep + (uint32_t)how};
    assert_true(value && want && scratch && got);
    for (uint32_t i = 0; i < s.n; i++)
        value[i] = value_at(&r, how);
    uint32_t n = select_keep(value, s.n, s.keep, s.frozen, s.recent, scratch, want);
    float *dev = kc_up(kn, value, s.n * sizeof *value);
    assert_int_equal(kn->ops->select_keep(kn, dev, &s, got), n);
    for (uint32_t i = 0; i < n; i++)
        if (got[i] != want[i])
            fail_msg("%s: n %u, keep %u, frozen %u, recent %u, values %d: place %u has row %u, "
                     "expected %u",
                     kd_label(), s.n, s.keep, s.frozen, s.recent, how, i, got[i], want[i]);
    kc_drop(kn, dev, s.n * sizeof *value);
    free(value);
    free(want);
    free(scratch);
    free(got);
}

static void check_select(struct kn *kn)
{
    static const uint32_t lengths[] = {1, 2, 63, 64, 65, 700, 4096};
    for (size_t i = 0; i < KC_LEN(lengths); i++)
        for (int how = 0; how < 3; how++) {
            uint32_t n = lengths[i];
            check_select_case(kn, (struct kn_select){n, n / 2, 0, 0}, how);
            check_select_case(kn, (struct kn_select){n, n / 2, n / 8, n / 5}, how);
            if (i == 5) {
                check_select_case(kn, (struct kn_select){n, 0, 0, 0}, how);
                check_select_case(kn, (struct kn_select){n, n - 1, 3, 0}, how);
                check_select_case(kn, (struct kn_select){n, 100, 40, 60}, how); /* none chosen */
                check_select_case(kn, (struct kn_select){n, n + 7, 1, 1}, how);
            }
        }
}

static void selection_is_the_eviction_codes(void **state)
{
    (void)state;
    kd_each(check_select);
}

/* ---- sampling ---- */

static struct kn_sample plain(void)
{
    return (struct kn_sample){.temperature = 1.0f, .top_p = 1.0f, .repeat_penalty = 1.0f};
}

static void sample(struct kn *kn, const float *logits, uint32_t rows, uint32_t n,
                   const struct kn_sample *how, int32_t *ret)
{
    float *dev = kc_up(kn, logits, (size_t)rows * n * sizeof *logits);
    kn->ops->sample(kn, dev, rows, n, how, ret);
    kc_drop(kn, dev, (size_t)rows * n * sizeof *logits);
}

static void check_greedy(struct kn *kn)
{
    static const uint32_t sizes[] = {1, 2, 1023, 1025, 9001};
    for (size_t i = 0; i < KC_LEN(sizes); i++) {
        enum { ROWS = 4 };
        uint32_t n = sizes[i];
        float *logits = kc_floats(n, (size_t)ROWS * n, 3.0f);
        int32_t got[ROWS], recent[3];
        struct kn_sample how[ROWS];
        for (uint32_t r = 0; r < ROWS; r++)
            how[r] = plain(), how[r].temperature = 0.0f;
        logits[0] = NAN;                          /* row 0: a NaN first */
        for (uint32_t k = 0; n > 4 && k < 3; k++) /* row 1: three equal ones at the top */
            logits[n + 2 + k * (n / 5)] = 50.0f;
        for (uint32_t k = 0; k < n; k++) /* row 2: nothing at all */
            logits[2 * (size_t)n + k] = -INFINITY;
        sample(kn, logits, ROWS, n, how, got);
        for (uint32_t r = 0; r < ROWS; r++) {
            const float *row = logits + (size_t)r * n;
            uint32_t best = 0;
            for (uint32_t k = 1; k < n; k++)
                if (row[k] > row[best] || (isnan(row[best]) && row[k] > -INFINITY))
                    best = k;
            assert_int_equal(got[r], best);
        }
        /* the best token of row 3 was said before (twice): another one wins, or it still does */
        recent[0] = recent[1] = got[3];
        recent[2] = 0;
        how[3].recent = recent;
        how[3].n_recent = 3;
        how[3].repeat_penalty = 1.5f;
        sample(kn, logits + 3 * (size_t)n, 1, n, &how[3], got);
        float *row = logits + 3 * (size_t)n;
        for (int k = 0; k < 3; k++) /* once each */
            if (k == 0 || (k == 2 && recent[2] != recent[0]))
                row[recent[k]] *= row[recent[k]] > 0 ? 1 / 1.5f : 1.5f;
        uint32_t best = 0;
        for (uint32_t k = 1; k < n; k++)
            if (row[k] > row[best])
                best = k;
        assert_int_equal(got[0], best);
        free(logits);
    }
}

static void greedy_takes_the_largest(void **state)
{
    (void)state;
    kd_each(check_greedy);
}

/* Which tokens may be drawn, by an ordered vocabulary in doubles. */
static uint32_t allowed(const float *logits, uint32_t n, const struct kn_sample *how, bool *ret)
{
    uint32_t *order = malloc(n * sizeof *order), count = 0;
    double total = 0, sum = 0, *w = malloc(n * sizeof *w);
    float max = -INFINITY;
    assert_true(order && w);
    for (uint32_t i = 0; i < n; i++)
        max = fmaxf(max, logits[i]);
    for (uint32_t i = 0; i < n; i++) {
        w[i] = exp(((double)logits[i] - (double)max) / (double)how->temperature);
        if (w[i] < (double)how->min_p)
            w[i] = 0;
        total += w[i];
        uint32_t at = i; /* insertion by logit, then id */
        for (; at > 0 && logits[order[at - 1]] < logits[i]; at--)
            order[at] = order[at - 1];
        order[at] = i;
    }
    memset(ret, 0, n * sizeof *ret);
    for (uint32_t i = 0; i < n; i++) {
        if ((how->top_k && i >= how->top_k) || w[order[i]] == 0)
            break;
        if (how->top_p < 1.0f && i > 0 && sum >= (double)how->top_p * total)
            break;
        sum += w[order[i]];
        ret[order[i]] = true;
        count++;
    }
    free(order);
    free(w);
    return count;
}

enum { V = 300, ROWS_MANY = 64, ROWS_FEW = 16, ROUNDS = 5 };

/* Every allowed token comes (they are few and likely), no other does. */
/* Draws of a case: what may be drawn is checked in every way that the backend can run, that all of it is in the first. */
static uint32_t rounds_of(const struct kn *kn)
{
    return kd_is_simt(kn) && strcmp(kd_label(), "simt, forward, lazy streams") != 0 ? 1 : ROUNDS;
}

static void check_filter(struct kn *kn, struct kn_sample how, float deviation, bool ties)
{
    float *one = kc_floats(how.top_k + 9, V, deviation), *logits;
    bool ok[V], seen[V] = {false};
    struct kn_sample all[ROWS_FEW];
    int32_t got[ROWS_FEW];
    logits = malloc((size_t)ROWS_FEW * V * sizeof *logits);
    assert_non_null(logits);
    for (uint32_t i = 0; ties && i < V; i++)
        one[i] = (float)(i % 7);
    for (uint32_t r = 0; r < ROWS_FEW; r++)
        memcpy(logits + (size_t)r * V, one, V * sizeof *one);
    uint32_t n = allowed(one, V, &how, ok), found = 0;
    for (uint32_t round = 0; round < rounds_of(kn); round++) {
        for (uint32_t r = 0; r < ROWS_FEW; r++) {
            all[r] = how;
            all[r].seed = 1234567890123456789u;
            all[r].stream = round * ROWS_FEW + r;
        }
        sample(kn, logits, ROWS_FEW, V, all, got);
        for (uint32_t r = 0; r < ROWS_FEW; r++) {
            if (got[r] < 0 || got[r] >= V || !ok[got[r]])
                fail_msg("%s: k %u, p %g, min %g: token %d was drawn", kd_label(), how.top_k,
                         (double)how.top_p, (double)how.min_p, got[r]);
            found += !seen[got[r]];
            seen[got[r]] = true;
        }
    }
    if (n <= 12 && rounds_of(kn) == ROUNDS && found != n)
        fail_msg("%s: k %u, p %g, min %g: %u of %u tokens were drawn", kd_label(), how.top_k,
                 (double)how.top_p, (double)how.min_p, found, n);
    free(one);
    free(logits);
}

/* A vocabulary that a block reads in several turns; ties: only the first of many equal ones, which lie in all turns, stay. */
static void check_wide(struct kn *kn, struct kn_sample how, bool ties)
{
    enum { WIDE = 9001, ROWS = 1 };
    float *logits = kc_floats(21, (size_t)ROWS * WIDE, 3.0f);
    static bool ok[WIDE];
    struct kn_sample all[ROWS];
    int32_t got[ROWS];
    for (uint32_t i = 0; ties && i < ROWS * WIDE; i++)
        logits[i] = (float)(i % WIDE % 7);
    for (uint32_t r = 0; r < ROWS; r++) {
        all[r] = how;
        all[r].stream = r;
    }
    sample(kn, logits, ROWS, WIDE, all, got);
    for (uint32_t r = 0; r < ROWS; r++) {
        allowed(logits + (size_t)r * WIDE, WIDE, &how, ok);
        if (got[r] < 0 || got[r] >= WIDE || !ok[got[r]])
            fail_msg("%s: k %u, p %g of many: token %d was drawn", kd_label(), how.top_k,
                     (double)how.top_p, got[r]);
    }
    free(logits);
}

static void check_filters(struct kn *kn)
{
    struct kn_sample how = plain();
    how.top_k = 1;
    check_filter(kn, how, 1.0f, false);
    how.top_k = 5;
    check_filter(kn, how, 1.0f, false);
    check_filter(kn, how, 1.0f, true); /* the first five of many equal ones */
    how.top_p = 0.5f;
    how.top_k = 0;
    check_filter(kn, how, 3.0f, false);
    check_filter(kn, how, 1.0f, true);
    how.top_p = 1e-6f; /* at least one */
    check_filter(kn, how, 1.0f, false);
    how.top_p = 0.9f;
    how.top_k = 4;
    check_filter(kn, how, 2.0f, false);
    how = plain();
    how.min_p = 0.2f;
    check_filter(kn, how, 2.0f, false);
    how.top_p = 0.6f;
    how.temperature = 0.7f;
    check_filter(kn, how, 2.0f, false);
    check_wide(kn, how, false);
    how = plain();
    how.top_k = 700;
    check_wide(kn, how, true);
    how.top_k = 0;
    how.top_p = 0.3f;
    check_wide(kn, how, true);
}

static void filters_keep_what_an_order_keeps(void **state)
{
    (void)state;
    kd_each(check_filters);
}

/* Frequencies of eight tokens among 192 draws. */
static void check_draws(struct kn *kn)
{
    float logits[ROWS_MANY * 8];
    double p[8], total = 0;
    uint32_t count[8] = {0};
    struct kn_sample how[ROWS_MANY];
    int32_t got[ROWS_MANY], one;
    for (int i = 0; i < ROWS_MANY * 8; i++)
        logits[i] = 0.4f * (float)(i % 8);
    for (int i = 0; i < 8; i++)
        total += p[i] = exp(0.4 * i / 0.8);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        for (uint32_t r = 0; r < ROWS_MANY; r++) {
            how[r] = plain();
            how[r].temperature = 0.8f;
            how[r].seed = 99 + r % 3;
            how[r].stream = ((uint64_t)round << 33) + r / 3;
        }
        sample(kn, logits, ROWS_MANY, 8, how, got);
        for (uint32_t r = 0; r < ROWS_MANY; r++)
            count[got[r]]++;
        sample(kn, logits, 1, 8, &how[17], &one); /* the same alone */
        assert_int_equal(one, got[17]);
    }
    double n = ROWS_MANY * ROUNDS;
    for (int i = 0; i < 8; i++) {
        double want = n * p[i] / total, dev = sqrt(want * (1 - p[i] / total));
        if (fabs(count[i] - want) > 5 * dev)
            fail_msg("%s: token %d was drawn %u times, expected %g +- %g", kd_label(), i, count[i],
                     want, dev);
    }
}

static void draws_have_their_probabilities(void **state)
{
    (void)state;
    kd_each(check_draws);
}

/* Every parameter, together and alone: what the engine's sampler picks from the same logits. */
static void check_sampler(struct kn *kn)
{
    enum { WIDE = 1500, ROWS = 6 };
    static const struct {
        float temperature, top_p, min_p, penalty;
        uint32_t top_k;
    } how[] = {{0.7f, 1, 0, 1, 0},        {1, 0.9f, 0, 1, 0},      {1, 1, 0, 1, 40},
               {1.3f, 0.5f, 0, 1.2f, 20}, {1, 1, 0.1f, 1.3f, 0},   {2, 0.95f, 0.02f, 1, 1400},
               {0.3f, 1, 0, 1, 5000},     {1, 1e-6f, 0, 1.1f, 0},  {0, 0.9f, 0, 1.5f, 3},
               {1e-40f, 1, 0, 1, 0},      {1e-45f, 0.9f, 0, 1, 40}}; /* their inverse is infinite */
    float *logits = kc_floats(31, (size_t)ROWS * WIDE, 2.5f);
    struct err e;
    struct sampler s = {0};
    int32_t recent[] = {17, 2, 900, 17}, got[ROWS];
    assert_int_equal(sampler_open(&s, WIDE, &e), BC_OK);
    for (uint32_t i = 0; i < 2 * WIDE; i++) /* ties in two rows, a NaN in one */
        logits[i] = (float)(i % 11);
    logits[2 * WIDE + 5] = NAN;
    for (size_t h = 0; h < KC_LEN(how); h++) {
        struct kn_sample all[ROWS];
        struct generate_options opt;
        generate_options_init(&opt);
        opt.temperature = how[h].temperature;
        opt.top_p = how[h].top_p;
        opt.min_p = how[h].min_p;
        opt.top_k = how[h].top_k;
        opt.repeat_penalty = how[h].penalty;
        for (uint32_t r = 0; r < ROWS; r++)
            all[r] = (struct kn_sample){.temperature = opt.temperature,
                                        .top_p = opt.top_p,
                                        .min_p = opt.min_p,
                                        .top_k = opt.top_k,
                                        .repeat_penalty = opt.repeat_penalty,
                                        .recent = recent,
                                        .n_recent = KC_LEN(recent),
                                        .seed = 5 + ((uint64_t)r << 40),
                                        .stream = ((uint64_t)h << 33) + 7 * r};
        sample(kn, logits, ROWS, WIDE, all, got);
        for (uint32_t r = 0; r < ROWS; r++) {
            opt.seed = all[r].seed;
            int32_t want = sampler_pick(&s, &opt, logits + (size_t)r * WIDE, recent, KC_LEN(recent),
                                        all[r].stream);
            if (got[r] != want)
                fail_msg("%s: way %zu, row %u: token %d, the sampler picks %d", kd_label(), h, r,
                         got[r], want);
        }
    }
    sampler_close(&s);
    free(logits);
}

static void tokens_are_the_engines(void **state)
{
    (void)state;
    kd_each(check_sampler);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(selection_is_the_eviction_codes),
        cmocka_unit_test(greedy_takes_the_largest),
        cmocka_unit_test(filters_keep_what_an_order_keeps),
        cmocka_unit_test(draws_have_their_probabilities),
        cmocka_unit_test(tokens_are_the_engines),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
