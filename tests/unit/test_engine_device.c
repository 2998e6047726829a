/* A device that fails in the middle: every request ends with the reason, every later one is
 * refused with it, sessions can still be listed and closed, and all bytes come back. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include "core.h"
#include "engine_harness.h"
#include "folders_test.h"

static int broken(struct kn *kn)
{
    (void)kn;
    return KN_EDEVICE;
}

static void small(struct engine_options *o, void *arg)
{
    (void)arg;
    o->prefill_chunk = 16;
    o->score_rows = 16;
}

static void a_failed_device_ends_everything_politely(void **state)
{
    (void)state;
    for (int where = 0; where < 40; where++) {
        struct eh *h = eh_open("tiny-llama.gguf", small, NULL);
        struct kn *kn = h->en->default_model->kn;
        struct kn_ops ops = *kn->ops;
        ops.status = broken;
        struct generate_options o = eh_greedy(50);
        int32_t ids[300];
        uint64_t s[3];
        for (int i = 0; i < 300; i++)
            ids[i] = 3 + i * 7 % 280;
        for (int i = 0; i < 3; i++) {
            s[i] =
                eh_session(h, &(struct eh_ask){.policy = "counter_causal", .budget_tokens = 100});
            eh_ids(h, s[i], ids, 100 * (size_t)(i + 1), &o);
        }
        struct command *prune = eh_command(h, CMD_PRUNE, s[1]);
        prune->u.budget.keep = 40;
        for (int i = 0; i < where; i++)
            eh_step(h);
        uint32_t asked = eh_post(h, prune);
        kn->ops = &ops;
        eh_run(h);
        assert_true(engine_failed(h->en));
        for (int i = 0; i < 3; i++) {
            struct eh_stream *st = eh_stream(h, s[i]);
            assert_int_equal(st->n_ends, 1);
            if (st->end.u.end.reason != END_LENGTH) {
                assert_int_equal(st->end.u.end.reason, END_ERROR);
                assert_int_equal(st->end.u.end.code, -BC_EDEVICE);
            }
        }
        eh_reply(h, asked); /* done, busy or failed: but answered */
        eh_expect_error(h, eh_post_ids(h, s[0], ids, 5, &o), BC_EDEVICE, "");
        eh_expect_error(h, eh_post_open(h, &(struct eh_ask){.budget_tokens = 64}), BC_EDEVICE, "");
        const struct report *r = eh_expect(h, eh_post(h, eh_command(h, CMD_STAT, 0)), REP_STAT);
        assert_int_equal(r->u.stat.n_sessions, 3);
        eh_close_session(h, s[2]);
        eh_close(&h);
    }
}

static void with_folder(struct engine_options *o, void *arg)
{
    small(o, NULL);
    o->state_dir = arg;
}

/* What comes off a device that has failed is zeros: no sum is put over them. */
static void a_failed_device_is_not_saved(void **state)
{
    (void)state;
    char root[FOLDER_PATH];
    folder_root_memory(root, "device");
    struct eh *h = eh_open("tiny-llama.gguf", with_folder, root);
    struct kn *kn = h->en->default_model->kn;
    struct kn_ops ops = *kn->ops;
    struct generate_options o = eh_greedy(5);
    int32_t ids[50];
    for (int i = 0; i < 50; i++)
        ids[i] = 3 + i * 7 % 280;
    uint64_t s = eh_session(h, &(struct eh_ask){.policy = "h2o", .budget_tokens = 100});
    eh_ids(h, s, ids, 50, &o);
    eh_run_to_end(h, s);
    ops.status = broken;
    kn->ops = &ops;
    unsigned before = folder_files(root);
    uint32_t asked = eh_post_save(h, s, "x");
    eh_run(h);
    eh_expect_error(h, asked, BC_EDEVICE, "");
    assert_true(engine_failed(h->en));
    assert_int_equal(folder_files(root), before);
    eh_close(&h);
    folder_drop(root);
}

/* ---- a device that picks what is no token ---- */

static int32_t pick;
static uint32_t picks_before; /* rows that get an honest token first */

static void pick_any(struct kn *kn, const float *logits, uint32_t rows, uint32_t n_vocab,
                     const struct kn_sample *how, int32_t *ret)
{
    (void)kn;
    (void)logits;
    (void)how;
    for (uint32_t r = 0; r < rows; r++) {
        ret[r] = picks_before > 0 ? (int32_t)(n_vocab - 1) : pick;
        picks_before -= picks_before > 0;
    }
}

/* As models.c does for a backend that picks: its batch frees both. */
static void picks_itself(struct batch *b)
{
    b->how = calloc(b->outs_max, sizeof *b->how);
    b->tokens = calloc((size_t)b->outs_max * (1 + SAMPLER_REPEAT_MAX), sizeof *b->tokens);
    assert_true(b->how != NULL && b->tokens != NULL);
    b->recent = b->tokens + b->outs_max;
}

/* The last token of the vocabulary is one; what lies outside reaches no client and no cache, but ends like any other failure. */
static void a_pick_outside_the_vocabulary_is_a_failure(void **state)
{
    (void)state;
    const int32_t outside[] = {0 /* the vocabulary's size */, -1, INT32_MIN, INT32_MAX};
    for (size_t i = 0; i < ARRAY_LEN(outside); i++) {
        struct eh *h = eh_open("tiny-llama.gguf", NULL, NULL);
        struct model_ref *m = h->en->default_model;
        struct kn_ops ops = *m->kn->ops;
        int32_t n_vocab = (int32_t)m->batch.n_vocab;
        picks_itself(&m->batch);
        ops.sample = pick_any;
        m->kn->ops = &ops;
        pick = i == 0 ? n_vocab : outside[i];
        picks_before = 7;
        struct generate_options o = eh_greedy(50);
        int32_t ids[20];
        uint64_t s[2];
        for (int k = 0; k < 20; k++)
            ids[k] = 3 + k * 7 % 280;
        for (int k = 0; k < 2; k++) {
            s[k] = eh_session(h, &(struct eh_ask){.policy = "none", .budget_tokens = 100});
            eh_ids(h, s[k], ids, ARRAY_LEN(ids), &o);
        }
        eh_run(h);
        assert_true(engine_failed(h->en));
        assert_non_null(strstr(engine_failure(h->en), "picked token"));
        uint32_t told = 0;
        for (int k = 0; k < 2; k++) {
            const struct eh_stream *st = eh_stream(h, s[k]);
            assert_int_equal(st->n_ends, 1);
            assert_int_equal(st->end.u.end.reason, END_ERROR);
            assert_int_equal(st->end.u.end.code, -BC_EDEVICE);
            for (uint32_t t = 0; t < st->n_ids; t++)
                assert_int_equal(st->ids[t], n_vocab - 1);
            told += st->n_ids;
        }
        assert_int_equal(told, 6); /* of seven: the pass of the last one had a lie beside it */
        eh_close(&h);
    }
}

/* A wait that ends between two looks is none that hangs, however many there are; one that lasts is counted, whoever waits. */
static void a_wait_that_lasts_is_counted(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-llama.gguf", NULL, NULL);
    uint32_t *own = &h->en->default_model->watch->waits, *other = &h->en->watch->places[5].waits;
    assert_ptr_not_equal(own, other);
    for (int i = 0; i < 5; i++) {
        assert_int_equal(engine_device_waits(h->en->watch), 0);
        *own += i % 2 ? 1 : 2; /* at rest, waiting, another wait, at rest ... */
    }
    *own |= 1;
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(engine_device_waits(h->en->watch), i);
        *other += 1;
    }
    *other |= 1;
    *own += 1;
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(engine_device_waits(h->en->watch), i);
    *other += 1;
    assert_int_equal(engine_device_waits(h->en->watch), 0);
    eh_close(&h);
}

/* ---- a pass that does not fit ---- */

static uint64_t lists_most, lists_asked;

static int reserve(struct kn *kn, uint32_t n_rows, uint32_t n_seqs, uint64_t n_slots)
{
    (void)kn;
    assert_true(n_seqs > 0 && n_seqs <= n_rows);
    lists_asked = BC_MAX(lists_asked, n_slots);
    return n_slots <= lists_most ? KN_OK : KN_ENOMEM;
}

/* Sessions on shared pages: the lists of all of them do not fit into a pass, those of two do. One request ends with the reason,
 * and the device goes on. */
static void a_pass_that_does_not_fit_is_one_requests_error(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-llama.gguf", NULL, NULL);
    struct kn *kn = h->en->default_model->kn;
    struct kn_ops ops = *kn->ops;
    ops.batch_reserve = reserve;
    kn->ops = &ops;
    lists_most = 2 * 300;
    lists_asked = 0;
    struct generate_options o = eh_greedy(30);
    int32_t ids[200];
    uint64_t s[3];
    o.ignore_end = true;
    for (int i = 0; i < 200; i++)
        ids[i] = 3 + i * 7 % 280;
    for (int i = 0; i < 3; i++) {
        s[i] = eh_session(h, &(struct eh_ask){.policy = "none"});
        eh_ids(h, s[i], ids, ARRAY_LEN(ids), &o);
        while (i == 0 && eh_stream(h, s[0])->n_ids == 0) /* the others find its beginning */
            eh_step(h);
    }
    eh_run(h);
    assert_true(lists_asked > lists_most);
    assert_false(engine_failed(h->en));
    uint32_t whole = 0, refused = 0;
    for (int i = 0; i < 3; i++) {
        const struct eh_stream *st = eh_stream(h, s[i]);
        assert_int_equal(st->n_ends, 1);
        whole += st->end.u.end.reason == END_LENGTH && st->n_ids == 30;
        refused += st->end.u.end.reason == END_BUDGET && st->end.u.end.code == -BC_ENOMEM;
    }
    assert_int_equal(whole, 2);
    assert_int_equal(refused, 1);
    eh_close(&h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_failed_device_ends_everything_politely),
        cmocka_unit_test(a_failed_device_is_not_saved),
        cmocka_unit_test(a_pick_outside_the_vocabulary_is_a_failure),
        cmocka_unit_test(a_wait_that_lasts_is_counted),
        cmocka_unit_test(a_pass_that_does_not_fit_is_one_requests_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
