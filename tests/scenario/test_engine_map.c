/* What a client is told of what was dropped: why, with every END; and on request every token of the
 * stream, cached or not, as far back as the ring of ids goes, also out of a file. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "core.h"
#include "daemon_harness.h"
#include "durable_test.h"
#include "folders_test.h"
#include "records.h"

#define LONG 5000u

static int32_t prompt[LONG];
static char root[FOLDER_PATH], long_model[FOLDER_PATH + 32];

static int setup(void **state)
{
    (void)state;
    prompt_fill(prompt, ARRAY_LEN(prompt), 31);
    folder_root_memory(root, "map");
    snprintf(long_model, sizeof long_model, "%s/long.gguf", root);
    dh_long_model(long_model);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    folder_drop(root);
    return 0;
}

/* ---- every token of the stream */

/* What was asked and answered, by stream index. */
struct told {
    int32_t id[LONG + 500];
    uint64_t n;
};

static void turn(struct eh *h, uint64_t s, uint32_t from, uint32_t n, uint32_t n_new,
                 struct told *t)
{
    struct generate_options o = eh_greedy(n_new);
    struct eh_stream *st = eh_stream(h, s);
    eh_forget(h, s);
    eh_ids(h, s, prompt + from, n, &o);
    eh_run_to_end(h, s);
    uint64_t first = st->n_ids > 0 ? st->streams[0] : t->n + n;
    memcpy(t->id + first - n, prompt + from, n * sizeof *prompt);
    for (uint32_t i = 0; i < st->n_ids; i++)
        t->id[st->streams[i]] = st->ids[i];
    t->n = first + st->n_ids;
}

/* Rows for another connection; they live as long as h. */
static const struct report *map_of(struct eh *h, uint64_t s, bool dropped)
{
    struct command *c = eh_command(h, CMD_SCORES, s);
    c->conn = 12345;
    c->u.scores.dropped = dropped;
    return eh_expect(h, eh_post(h, c), REP_SCORES_REPLY);
}

/* first: the oldest that may be known. */
static void map_is_whole(struct eh *h, uint64_t id, const struct told *t, uint64_t first,
                         bool scores)
{
    const struct session *s = sess_find(h->en, id);
    const struct report *r = map_of(h, id, true);
    const struct report *kept = scores ? map_of(h, id, false) : NULL;
    const struct report_score *row = r->u.scores.rows;
    uint32_t at = 0;
    assert_int_equal(s->stream + s->has_pending, t->n);
    for (uint32_t i = 0; i < r->u.scores.n; i++) {
        bool cached =
            at < seqcache_count(s->cache) && seqcache_stream(s->cache)[at] == row[i].stream;
        assert_true(i == 0 || row[i].stream > row[i - 1].stream);
        assert_int_equal(row[i].id, t->id[row[i].stream]);
        assert_int_equal((row[i].flags & SCORE_DROPPED) == 0, cached);
        if (cached && scores)
            assert_memory_equal(&row[i], &kept->u.scores.rows[at], sizeof row[i]);
        at += cached;
        if (row[i].stream >= first && i > 0 && row[i - 1].stream >= first)
            assert_int_equal(row[i].stream, row[i - 1].stream + 1);
    }
    assert_int_equal(at, seqcache_count(s->cache));
    assert_int_equal(row[r->u.scores.n - 1].stream, s->stream - 1);
    assert_true(first > 0 || row[0].stream == 0);
}

static void every_token_of_the_stream_is_told(void **state)
{
    (void)state;
    static const struct eh_ask asks[] = {
        {.policy = "counter_causal", .budget_tokens = 80, .frozen = 4},
        {.policy = "h2o", .budget_tokens = 100, .kv_type = "bf16"},
        {.policy = "sliding_window", .budget_tokens = 70},
        {.policy = "none"},
    };
    for (size_t i = 0; i < ARRAY_LEN(asks); i++) {
        static struct told t;
        struct eh *h = eh_open("tiny-llama.gguf", NULL, NULL);
        uint64_t s = eh_session(h, &asks[i]);
        t.n = 0;
        for (uint32_t k = 0; k < 4; k++) {
            turn(h, s, k * 70, 70, 20 + k, &t);
            map_is_whole(h, s, &t, 0, i != 3);
        }
        eh_close(&h);
    }
}

/* Its owner gets the rows by its stream, cut into reports. */
static void the_owner_reads_the_same_rows(void **state)
{
    (void)state;
    static struct told t;
    struct eh *h = eh_open("tiny-llama.gguf", NULL, NULL);
    uint64_t s = eh_session(h, &(struct eh_ask){.policy = "knorm", .budget_tokens = 90});
    t.n = 0;
    turn(h, s, 0, 400, 5, &t);
    struct command *c = eh_command(h, CMD_SCORES, s);
    c->u.scores.dropped = true;
    eh_expect(h, eh_post(h, c), REP_ACCEPTED);
    eh_run_to_end(h, s);
    const struct report *r = map_of(h, s, true);
    assert_int_equal(eh_stream(h, s)->n_scores, r->u.scores.n);
    assert_int_equal(r->u.scores.n, 404);
    assert_memory_equal(eh_stream(h, s)->scores, r->u.scores.rows,
                        404 * sizeof(struct report_score));
    eh_close(&h);
}

static void limits(struct engine_options *o, void *arg)
{
    o->state_dir = arg;
    o->max_sessions = 4;
}

/* The ring of ids grows with the stream, is booked, and goes where the session goes. */
static void ids_are_kept_and_saved(void **state)
{
    (void)state;
    static struct told t;
    char dir[FOLDER_PATH];
    folder_fresh(dir, root, "state");
    struct eh *h = eh_open(long_model, limits, dir);
    uint64_t s = eh_session(h, &(struct eh_ask){.policy = "sliding_window", .budget_tokens = 64});
    const struct session *e = h->en->list[0];
    uint64_t before = ledger_own(&e->owner, LEDGER_state);
    t.n = 0;
    turn(h, s, 0, 1000, 1, &t);
    assert_int_equal(e->n_recent, SAMPLER_REPEAT_MAX);
    assert_int_equal(ledger_own(&e->owner, LEDGER_state), before);
    turn(h, s, 1000, LONG - 1000, 3, &t);
    assert_int_equal(e->n_recent, 8192);
    assert_int_equal(ledger_own(&e->owner, LEDGER_state), before + (8192 - SAMPLER_REPEAT_MAX) * 4);
    map_is_whole(h, s, &t, 0, true);
    eh_expect(h, eh_post_save(h, s, "kept"), REP_DONE);
    eh_close(&h);
    h = eh_open(long_model, limits, dir);
    s = eh_expect(h, eh_post_restore(h, "kept"), REP_OPENED)->session;
    map_is_whole(h, s, &t, 0, true);
    turn(h, s, 0, 300, 3, &t);
    map_is_whole(h, s, &t, 0, true);
    eh_close(&h);
}

/* What memory or the ring's size has no room for any more is left out, and nothing else. */
static void what_is_not_known_is_left_out(void **state)
{
    (void)state;
    static struct told t;
    struct eh *h = eh_open("tiny-llama.gguf", NULL, NULL);
    uint64_t s = eh_session(h, &(struct eh_ask){.policy = "counter_causal", .budget_tokens = 80});
    t.n = 0;
    turn(h, s, 0, 300, 5, &t);
    h->en->list[0]->recent_from = 200;
    map_is_whole(h, s, &t, 200, true);
    assert_true(map_of(h, s, true)->u.scores.n < 304);
    eh_close(&h);
}

/* ---- why */

static uint32_t why(struct eh *h, uint64_t s, uint32_t n)
{
    struct generate_options o = eh_greedy(2);
    eh_ids(h, s, prompt, n, &o);
    eh_run_to_end(h, s);
    const struct report *r = &eh_stream(h, s)->end;
    assert_true((r->u.end.dropped_why != 0) == (r->u.end.tokens_dropped > 0));
    assert_true((r->u.end.dropped_why != 0) == (r->u.end.prunes > 0));
    return r->u.end.dropped_why;
}

static void an_end_says_why_tokens_were_dropped(void **state)
{
    (void)state;
    struct eh *h = eh_open("tiny-llama.gguf", NULL, NULL);
    uint64_t s = eh_session(h, &(struct eh_ask){.policy = "h2o", .budget_tokens = 100});
    assert_int_equal(why(h, s, 50), 0);
    struct command *c = eh_command(h, CMD_PRUNE, s);
    c->u.budget.keep = 40;
    eh_expect(h, eh_post(h, c), REP_PRUNED_REPLY);
    assert_int_equal(why(h, s, 5), 1u << PRUNE_ASKED);
    assert_int_equal(why(h, s, 5), 0); /* since the last END */
    assert_int_equal(why(h, s, 90), 1u << PRUNE_BUDGET);
    c = eh_command(h, CMD_BUDGET, s);
    c->u.budget.tokens = 64;
    eh_expect(h, eh_post(h, c), REP_BUDGET);
    assert_int_equal(why(h, s, 60), 1u << PRUNE_SHRUNK | 1u << PRUNE_BUDGET);
    uint64_t t = eh_session(h, &(struct eh_ask){.policy = "tova",
                                                .trigger = "prefill_end",
                                                .budget_tokens = 300,
                                                .keep = 50});
    assert_int_equal(why(h, t, 200), 1u << PRUNE_PREFILL_END);
    eh_close(&h);
}

/* The reason lasts over a save and over the end of the daemon. */
static void a_reason_outlives_the_daemon(void **state)
{
    (void)state;
    char dir[FOLDER_PATH];
    for (int durable = 0; durable < 2; durable++) {
        folder_fresh(dir, root, "why");
        struct eh *h = durable_engine(&(struct durable_setup){.dir = dir});
        uint64_t s = eh_session(h, &(struct eh_ask){.policy = "h2o",
                                                    .budget_tokens = 100,
                                                    .durable = durable != 0,
                                                    .name = "work"});
        assert_int_equal(why(h, s, 50), 0);
        struct command *c = eh_command(h, CMD_PRUNE, s);
        c->u.budget.keep = 40;
        eh_expect(h, eh_post(h, c), REP_PRUNED_REPLY);
        if (!durable)
            eh_expect(h, eh_post_save(h, s, "work2"), REP_DONE);
        eh_run(h);
        eh_close(&h);
        h = durable_engine(&(struct durable_setup){.dir = dir});
        if (durable) {
            s = eh_attach(h, "work");
            eh_run(h);
            eh_forget(h, s);
        } else {
            s = eh_expect(h, eh_post_restore(h, "work2"), REP_OPENED)->session;
        }
        assert_int_equal(why(h, s, 5), 1u << PRUNE_ASKED);
        eh_close(&h);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_token_of_the_stream_is_told),
        cmocka_unit_test(the_owner_reads_the_same_rows),
        cmocka_unit_test(ids_are_kept_and_saved),
        cmocka_unit_test(what_is_not_known_is_left_out),
        cmocka_unit_test(an_end_says_why_tokens_were_dropped),
        cmocka_unit_test(a_reason_outlives_the_daemon),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
