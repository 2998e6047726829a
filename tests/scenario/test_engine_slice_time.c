/* How long the slices of a refresh take on a slow device: no longer than the device wishes and than SLICE_PASSES passes of the
 * neighbour that waits behind them, for all four scores, whatever the device is limited by, and not much less.
 *
 * The device is the cpu backend with a clock of its own: every op takes what a roofline says of its shape, and as on a GPU an op
 * returns before it has run; the clock moves when somebody waits for the device.
 *
 *   ns of an op = launch + bytes of its weights x read + rows x bytes x compute + visible keys x attend */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include "core.h"
#include "durable_test.h"

#define BUDGET 700u
#define KEEP 350u
#define PASSES 0.75
#define FILLED 0.6 /* a mean slice takes so much of what it may, at least */

static int32_t prompt[BUDGET + 5];

/* What a device is limited by. ns */
static const struct device {
    const char *name;
    double launch, read, compute, attend; /* a op, a byte, a byte and row, a key and row */
    uint32_t slice_us, rows_read;
    /* a slice may be so many times as long: rates are learned from the slices before */
    double slack;
} devices[] = {
    {"bytes, as a GPU", 3000, 2, 0.016, 0.02, 2000, 128, 1.1},
    {"bytes, without a wish", 3000, 2, 0.016, 0.02, 0, 128, 1.1},
    {"arithmetic, as a CPU", 100, 1, 0.25, 1, 0, 4, 1.1},
    {"attention: a row costs much in a layer, little at the head", 3000, 2, 0.016, 20, 2000, 128,
     1.3},
};

static struct slow {
    const struct device *how;
    const struct kn_ops *real;
    struct kn_ops ops;
    struct eh *h;
    double queued, spare; /* ns: asked for, not waited for; not a whole microsecond */
    double pass, slice;   /* ns since the neighbour's last token */
    double put_off; /* ns that the next pass takes longer, once: somebody else had the device */
    bool in_slice;
    const struct kn_batch *b;
} slow;

static void takes(double ns)
{
    slow.queued += slow.how->launch + ns;
    *(slow.in_slice ? &slow.slice : &slow.pass) += slow.how->launch + ns;
}

static void waits(void)
{
    double ns = slow.queued + slow.spare;
    uint64_t us = (uint64_t)(ns / 1000);
    slow.queued = 0;
    slow.spare = ns - 1000.0 * (double)us;
    eh_pass(slow.h, us);
}

static double weight(const struct kn_weight *w, uint32_t rows)
{
    double bytes = (double)slow.real->weight_bytes(w);
    return bytes * slow.how->read + rows * bytes * slow.how->compute;
}

static void slow_batch_begin(struct kn *kn, const struct kn_batch *b)
{
    slow.b = b;
    slow.in_slice = b->lo[0] > 0; /* the future alone */
    slow.real->batch_begin(kn, b);
}

static void slow_linear(struct kn *kn, uint32_t n, const struct kn_weight *const *w,
                        const float *const *bias, const float *x, uint32_t rows, float *const *outs,
                        bool add)
{
    for (uint32_t i = 0; i < n; i++)
        takes(weight(w[i], rows));
    if (!slow.in_slice && slow.put_off > 0) {
        takes(slow.put_off);
        slow.put_off = 0;
    }
    slow.real->linear(kn, n, w, bias, x, rows, outs, add);
}

static void slow_attention(struct kn *kn, const struct kn_batch *b, uint32_t layer, const float *q,
                           uint32_t n_heads, float scale, float *out)
{
    uint64_t keys = 0;
    for (uint32_t r = 0; r < b->n_rows; r++)
        keys += b->hi[r] - b->lo[r];
    takes((double)keys * slow.how->attend);
    slow.real->attention(kn, b, layer, q, n_heads, scale, out);
}

static void slow_row_logit(struct kn *kn, const struct kn_weight *w, const float *x, uint32_t rows,
                           const int32_t *ids, float *ret)
{
    takes(0);
    waits();
    slow.real->row_logit(kn, w, x, rows, ids, ret);
}

static void slow_row_lse(struct kn *kn, const struct kn_weight *w, const float *x, uint32_t rows,
                         float *ret)
{
    takes(weight(w, rows));
    waits();
    slow.real->row_lse(kn, w, x, rows, ret);
}

static void slow_download(struct kn *kn, void *dst, const void *src, size_t bytes)
{
    waits();
    slow.real->download(kn, dst, src, bytes);
}

static void slow_sync(struct kn *kn)
{
    waits();
    slow.real->sync(kn);
}

static void slow_open(struct eh *h, const struct device *how)
{
    struct kn *kn = h->en->default_model->kn;
    slow = (struct slow){.how = how, .real = kn->ops, .ops = *kn->ops, .h = h};
    slow.ops.batch_begin = slow_batch_begin;
    slow.ops.linear = slow_linear;
    slow.ops.attention = slow_attention;
    slow.ops.row_logit = slow_row_logit;
    slow.ops.row_lse = slow_row_lse;
    slow.ops.download = slow_download;
    slow.ops.sync = slow_sync;
    kn->ops = &slow.ops;
    kn->slice_us = how->slice_us;
    kn->rows_read = how->rows_read;
}

/* What the neighbour sees of the other's refresh. */
struct watch {
    uint64_t victim;
    uint32_t slices;
    double total, longest; /* parts of what a slice may take */
    double may,
        behind; /* ns: what one may take before a pass was put off, the longest one behind it */
};

/* A prompt's passes are not looked at: its chunks are cut by rows. */
static void look(struct eh *h)
{
    struct watch *w = h->arg;
    const struct session *s = sess_find(h->en, w->victim);
    if (slow.slice > 0 && s->prune.active) { /* the last one is as long as what is left */
        w->slices++;
        double limit = PASSES * 1000 * (double)h->en->decode_us;
        if (slow.how->slice_us > 0)
            limit = BC_MIN(limit, 1000.0 * slow.how->slice_us);
        w->total += slow.slice / limit;
        w->longest = BC_MAX(w->longest, slow.slice / limit);
    }
    slow.slice = slow.pass = 0;
}

/* A full cache is refreshed beside a neighbour. */
static void refresh_watched(const struct device *how, const char *policy, const char *score,
                            void (*look_at)(struct eh *h), struct watch *w)
{
    struct eh *h = eh_open("tiny-llama.gguf", NULL, NULL);
    struct generate_options endless = eh_greedy(3000), o = eh_greedy(2);
    slow_open(h, how);
    w->victim = eh_session(h, &(struct eh_ask){.policy = policy,
                                               .score = score,
                                               .span = 1,
                                               .budget_tokens = BUDGET,
                                               .keep = KEEP});
    uint64_t neighbour = eh_session(h, &(struct eh_ask){.policy = "none"});
    endless.ignore_end = true;
    eh_ids(h, neighbour, prompt, 5, &endless);
    while (eh_stream(h, neighbour)->n_ids < 5)
        eh_step(h);
    h->arg = w;
    h->on_step = look_at;
    eh_ids(h, w->victim, prompt, ARRAY_LEN(prompt), &o);
    eh_run_to_end(h, w->victim);
    assert_int_equal(eh_stream(h, w->victim)->n_prunes, 1);
    h->on_step = NULL;
    eh_close(&h);
}

static void refresh(const struct device *how, const char *policy, const char *score,
                    uint32_t *ret_cut)
{
    struct watch w = {0};
    refresh_watched(how, policy, score, look, &w);
    if (w.longest > how->slack)
        fail_msg("%s, %s %s: a slice took %.2f times as long as it may", how->name, policy, score,
                 w.longest);
    if (w.slices > 3 && w.total / w.slices < FILLED)
        fail_msg("%s, %s %s: %u slices took %.2f of what they may", how->name, policy, score,
                 w.slices, w.total / w.slices);
    *ret_cut += w.slices > 3;
}

static void no_slice_is_longer_than_it_may_be(void **state)
{
    (void)state;
    static const char *const scores[] = {"logit", "logprob"};
    prompt_fill(prompt, ARRAY_LEN(prompt), 5);
    for (int k = 0; k < 4; k++) {
        uint32_t cut = 0; /* devices on which there was something to see */
        for (size_t d = 0; d < ARRAY_LEN(devices); d++)
            refresh(&devices[d], k < 2 ? "counter_causal" : "counter_causal_fast", scores[k % 2],
                    &cut);
        assert_true(cut > 0);
    }
}

/* Once, when three slices have told what they take. */
static void put_off_once(struct eh *h)
{
    struct watch *w = h->arg;
    const struct session *s = sess_find(h->en, w->victim);
    if (slow.slice > 0 && s->prune.active && ++w->slices == 3) {
        w->may = PASSES * 1000 * (double)h->en->decode_us;
        slow.put_off = 30 * w->may;
    } else if (w->may > 0) {
        w->behind = BC_MAX(w->behind, slow.slice);
    }
    slow.slice = slow.pass = 0;
}

/* A pass that somebody else made wait says little of the next ones: the slices before those stay about as long. */
static void a_pass_put_off_makes_no_slice_long(void **state)
{
    (void)state;
    const struct device *how = &devices[2];
    struct watch w = {0};
    prompt_fill(prompt, ARRAY_LEN(prompt), 5);
    refresh_watched(how, "counter_causal", "logit", put_off_once, &w);
    assert_true(w.slices > 6);
    assert_true(w.behind > 0.5 * w.may);
    if (w.behind > 1.25 * how->slack * w.may)
        fail_msg("a slice behind a pass that was put off took %.2f times as long as it might",
                 w.behind / w.may);
}

/* ---- several sessions ---- */

#define N_SMALL 6u
#define SMALL 100u

/* What the neighbour sees of all of them. */
struct crowd_watch {
    uint32_t steps;
    double longest, total; /* ns; a step's slices */
};

static void look_at_all(struct eh *h)
{
    struct crowd_watch *w = h->arg;
    w->steps += slow.slice > 0;
    w->longest = BC_MAX(w->longest, slow.slice);
    w->total += slow.slice;
    slow.slice = slow.pass = 0;
}

/* Fills n small caches, and has all of them refreshed in one step beside a neighbour. */
static void crowd_refresh(const struct device *how, const char *policy, uint32_t n,
                          struct crowd_watch *ret, double *ret_may)
{
    struct eh *h = eh_open("tiny-llama.gguf", NULL, NULL);
    struct generate_options endless = eh_greedy(3000), none = eh_greedy(0);
    uint64_t s[N_SMALL], neighbour;
    slow_open(h, how);
    endless.ignore_end = true;
    for (uint32_t i = 0; i < n; i++) {
        s[i] = eh_session(h, &(struct eh_ask){.policy = policy,
                                              .span = 1,
                                              .budget_tokens = SMALL,
                                              .keep = SMALL / 2});
        eh_ids(h, s[i], prompt + i, SMALL, &none);
        eh_run_to_end(h, s[i]);
    }
    neighbour = eh_session(h, &(struct eh_ask){.policy = "none"});
    eh_ids(h, neighbour, prompt, 5, &endless);
    while (eh_stream(h, neighbour)->n_ids < 5)
        eh_step(h);
    *ret = (struct crowd_watch){0};
    *ret_may = PASSES * 1000 * (double)h->en->decode_us;
    if (how->slice_us > 0)
        *ret_may = BC_MIN(*ret_may, 1000.0 * how->slice_us);
    slow.slice = 0;
    h->arg = ret;
    h->on_step = look_at_all;
    for (uint32_t i = 0; i < n; i++)
        eh_post_ids(h, s[i], prompt, 1, &none); /* in one step */
    for (uint32_t i = 0; i < n; i++)
        eh_run_to_end(h, s[i]);
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(eh_stream(h, s[i])->n_prunes, 1);
    h->on_step = NULL;
    eh_close(&h);
}

/* Small caches that are full at the same time are refreshed in one step while there is time, not each before a pass of its
 * own. */
static void small_refreshes_share_a_step(void **state)
{
    (void)state;
    struct crowd_watch w;
    double may;
    crowd_refresh(&devices[0], "counter_causal_fast", N_SMALL, &w, &may);
    assert_in_range(w.steps, 1, N_SMALL);
    assert_true(w.longest <= 1.1 * may);
}

/* And their rows share passes: together they take less of the device than one after the other, nowhere longer at a time than one
 * alone may. */
static void small_refreshes_share_passes(void **state)
{
    (void)state;
    for (size_t d = 0; d < ARRAY_LEN(devices); d++)
        for (int fast = 0; fast < 2; fast++) {
            const char *policy = fast ? "counter_causal_fast" : "counter_causal";
            struct crowd_watch one, all;
            double may;
            crowd_refresh(&devices[d], policy, 1, &one, &may);
            crowd_refresh(&devices[d], policy, N_SMALL, &all, &may);
            if (all.longest > devices[d].slack * may)
                fail_msg("%s, %s: slices of a step took %.2f times as long as they may",
                         devices[d].name, policy, all.longest / may);
            /* where reading is most of what one takes, it is most of what is saved */
            double part = devices[d].rows_read < SMALL ? 1.0 : fast ? 0.6 : 0.9;
            assert_true(all.total < part * N_SMALL * one.total);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_slice_is_longer_than_it_may_be),
        cmocka_unit_test(a_pass_put_off_makes_no_slice_long),
        cmocka_unit_test(small_refreshes_share_a_step),
        cmocka_unit_test(small_refreshes_share_passes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
