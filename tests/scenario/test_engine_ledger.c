/* The ledger of a running engine: after every step its sums are those of the pools and of the
 * backends, and what it says of big things is what the process's allocator and the system say. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "core.h"
#include "engine_harness.h"
#include "ledger_test.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define OWN_ALLOCATOR 0 /* the sanitizer's does not answer mallinfo2 */
#else
#define OWN_ALLOCATOR 1
#endif

static int32_t prompt[2000];

static int setup(void **state)
{
    (void)state;
    uint32_t x = 9;
    for (size_t i = 0; i < ARRAY_LEN(prompt); i++) {
        x = x * 1664525u + 1013904223u;
        prompt[i] = (int32_t)(3 + (x >> 8) % 280);
    }
    return 0;
}

static struct ledger_owner *daemon_of(struct eh *h)
{
    return ledger_daemon(engine_ledger(h->en));
}

/* ---- sums, every step ---- */

static void blocks(struct engine_options *o, void *arg)
{
    (void)arg;
    o->score_rows = 20;
    o->prefill_chunk = 50;
}

static void every_step_of_mixed_work_adds_up(void **state)
{
    (void)state;
    static const struct eh_ask asks[] = {
        {.policy = "counter_causal_fast", .budget_tokens = 100},
        {.policy = "h2o", .budget_tokens = 130, .uid = 2000, .conn = 3},
        {.policy = "tova", .budget_tokens = 70, .kv_type = "f32"},
        {.policy = "none", .kv_type = "bf16"},
        {.policy = "sliding_window", .budget_tokens = 200, .trigger = "prefill_end", .keep = 40},
    };
    struct eh *h = eh_open("tiny-llama.gguf", blocks, NULL);
    struct ledger_owner *all = daemon_of(h);
    uint64_t at_rest = ledger_sum(all) - ledger_all(all, LEDGER_scratch);
    struct generate_options o = eh_greedy(40);
    uint64_t s[ARRAY_LEN(asks)];
    h->on_step = ledger_agrees;
    for (size_t i = 0; i < ARRAY_LEN(asks); i++)
        s[i] = eh_session(h, &asks[i]);
    for (size_t i = 0; i < ARRAY_LEN(asks); i++) {
        struct command *c = eh_command(h, CMD_GENERATE, s[i]);
        c->conn = asks[i].conn != 0 ? asks[i].conn : EH_CONN;
        c->uid = asks[i].uid != 0 ? asks[i].uid : EH_UID;
        c->u.generate.kind = PROMPT_IDS;
        c->u.generate.opt = o;
        c->u.generate.n_ids = 180;
        c->u.generate.ids = malloc(180 * sizeof *prompt);
        assert_non_null(c->u.generate.ids);
        memcpy(c->u.generate.ids, prompt + i, 180 * sizeof *prompt);
        eh_expect(h, eh_post(h, c), REP_ACCEPTED);
    }
    for (size_t i = 0; i < ARRAY_LEN(asks); i++)
        eh_run_to_end(h, s[i]);
    eh_expect(h, eh_post(h, eh_command(h, CMD_SCORES, s[0])), REP_ACCEPTED);
    eh_step(h);
    assert_true(ledger_all(all, LEDGER_refresh) > 0);
    eh_run_to_end(h, s[0]);
    for (size_t i = 0; i < ARRAY_LEN(asks); i++) {
        struct command *c = eh_command(h, CMD_CLOSE, s[i]);
        c->admin = true;
        eh_expect(h, eh_post(h, c), REP_CLOSED);
    }
    /* what is left over is what a model keeps once a session has used it: pools' tables, queries */
    ledger_agrees(h);
    assert_int_equal(ledger_all(all, LEDGER_kv) + ledger_all(all, LEDGER_shared), 0);
    assert_int_equal(ledger_sum(all) - ledger_all(all, LEDGER_scratch), at_rest);
    eh_close(&h);
}

/* A session's number in a listing is what the ledger has of it. */
static void a_listing_says_what_is_booked(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-llama.gguf", NULL, NULL);
    struct generate_options o = eh_greedy(3);
    uint64_t id = eh_session(h, &(struct eh_ask){.policy = "tova", .budget_tokens = 300});
    eh_ids(h, id, prompt, 200, &o);
    eh_run_to_end(h, id);
    const struct report *r = eh_expect(h, eh_post(h, eh_command(h, CMD_STAT, id)), REP_STAT);
    const struct report_session *info = r->u.stat.sessions;
    const struct session *s = h->en->list[0];
    assert_int_equal(info->held, ledger_own(&s->owner, LEDGER_kv));
    assert_int_equal(info->other, SESSION_STATE_BYTES + s->m->batch.query_len * sizeof(float));
    const struct report_model *m = r->u.stat.models;
    assert_int_equal(m->bytes_weights + m->bytes_scratch + m->bytes_text, ledger_sum(&s->m->owner));
    assert_true(m->bytes_text > 0);
    eh_close(&h);
}

/* ---- against the allocator and the system ---- */

static uint64_t malloced(void)
{
    struct mallinfo2 m = mallinfo2();
    return m.uordblks + m.hblkhd;
}

static uint64_t resident(void)
{
    unsigned long size = 0, pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    assert_non_null(f);
    assert_int_equal(fscanf(f, "%lu %lu", &size, &pages), 2);
    fclose(f);
    return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* What malloc has given out grows by what the ledger books of it, within 3 %: model (its weights are
 * malloced on ref), session, prompt, refresh. */
static void ref_backend(struct engine_options *o, void *arg)
{
    (void)arg;
    o->backend = "ref";
    o->max_sessions = 64;
}

static void malloc_has_given_out_what_is_booked(void **state)
{
    (void)state;
    if (!OWN_ALLOCATOR)
        skip();
    uint64_t before = malloced();
    struct eh *h = eh_open("tiny-llama.gguf", ref_backend, NULL);
    uint64_t s = eh_session(h, &(struct eh_ask){.policy = "h2o", .budget_tokens = 1000});
    struct generate_options o = eh_greedy(1);
    eh_ids(h, s, prompt, 900, &o);
    struct ledger_owner *all = daemon_of(h);
    uint64_t pages = 0;
    for (const struct model_ref *m = h->en->models; m != NULL; m = m->next)
        pages += m->kn->bytes_arena;
    uint64_t booked = ledger_sum(all) - pages; /* pages are mapped, their index rows malloced */
    uint64_t given = malloced() - before;
    if (given < booked * 97 / 100 || given > booked * 103 / 100)
        fail_msg("malloc gave out %llu bytes, the ledger books %llu", (unsigned long long)given,
                 (unsigned long long)booked);
    eh_run_to_end(h, s);
    eh_close(&h);
}

static void apart(struct engine_options *o, void *arg)
{
    (void)arg;
    o->no_prefixes = true;
}

/* Cache pages that are full of rows are resident memory, and only they. */
static void full_pages_are_resident(void **state)
{
    (void)state;
    if (!OWN_ALLOCATOR)
        skip();
    struct eh *h = eh_open("tiny-llama.gguf", apart, NULL);
    struct generate_options o = eh_greedy(0);
    uint64_t warm = eh_session(h, &(struct eh_ask){.policy = "none"});
    eh_ids(h, warm, prompt, 512, &o);
    eh_run_to_end(h, warm);
    uint64_t before = resident(), booked = ledger_all(daemon_of(h), LEDGER_kv);
    uint64_t s[16];
    for (size_t i = 0; i < ARRAY_LEN(s); i++) {
        s[i] = eh_session(h, &(struct eh_ask){.policy = "none"});
        eh_ids(h, s[i], prompt, 1024 - 64, &o);
        eh_run_to_end(h, s[i]);
    }
    uint64_t grown = resident() - before;
    booked = ledger_all(daemon_of(h), LEDGER_kv) - booked;
    assert_int_equal(booked, 16 * 15 * 34304);
    if (grown < booked * 95 / 100 || grown > booked * 105 / 100)
        fail_msg("resident memory grew by %llu bytes, the pages are %llu",
                 (unsigned long long)grown, (unsigned long long)booked);
    for (size_t i = 0; i < ARRAY_LEN(s); i++)
        eh_close_session(h, s[i]);
    assert_true(resident() - before < booked / 10); /* index rows that malloc keeps for later */
    eh_close(&h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_step_of_mixed_work_adds_up),
        cmocka_unit_test(a_listing_says_what_is_booked),
        cmocka_unit_test(malloc_has_given_out_what_is_booked),
        cmocka_unit_test(full_pages_are_resident),
    };
    return cmocka_run_group_tests(tests, setup, NULL);
}
