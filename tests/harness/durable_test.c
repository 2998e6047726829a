/* durable_test.c: see durable_test.h. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include "core.h"
#include "durable_test.h"

static void tweak(struct engine_options *o, void *arg)
{
    const struct durable_setup *d = arg;
    o->state_dir = d->dir;
    o->io = d->io;
    o->spill_after_us = d->spill_after_us;
    o->stop_snapshots_us = d->stop_snapshots_us;
    o->host_tier = d->host_tier;
    o->disk_tier = d->disk_tier;
    o->kv_memory_max = o->kv_memory;
    o->kv_memory = d->kv_memory != 0 ? d->kv_memory : o->kv_memory;
    o->score_rows = 30;
    o->prefill_chunk = 32;
}

struct eh *durable_engine(const struct durable_setup *d)
{
    struct durable_setup copy = *d;
    const char *model = d->model == NULL ? "tiny-llama.gguf" : d->model;
    return eh_open(model[0] != '\0' ? model : NULL, tweak, &copy);
}

static struct session *find(struct eh *h, uint64_t id, const char *what)
{
    for (uint32_t i = 0; i < h->en->n_sessions; i++)
        if (h->en->list[i]->id == id)
            return h->en->list[i];
    fail_msg("%s: no session %llu", what, (unsigned long long)id);
    return NULL;
}

static void same(uint64_t a, uint64_t b, const char *name, const char *what)
{
    if (a != b)
        fail_msg("%s: %s is %llu, was %llu", what, name, (unsigned long long)b,
                 (unsigned long long)a);
}

static void bytes_same(const void *a, const void *b, size_t n, const char *name, const char *what)
{
    if (n > 0 && memcmp(a, b, n) != 0)
        fail_msg("%s: %s differs", what, name);
}

static void policies_equal(const struct session *s, const struct session *t, const char *what)
{
    struct bytes_out a = {0}, b = {0};
    evict_params_put(evict_params(s->ev), &a);
    evict_params_put(evict_params(t->ev), &b);
    evict_request_put(&s->ask, &a);
    evict_request_put(&t->ask, &b);
    evict_state_put(s->ev, &a);
    evict_state_put(t->ev, &b);
    same(a.n, b.n, "the policy's size", what);
    bytes_same(a.at, b.at, a.n, "what the policy knows", what);
    free(a.at);
    free(b.at);
}

void sessions_equal(struct eh *a, uint64_t sid, struct eh *b, uint64_t tid, const char *what)
{
    const struct session *s = find(a, sid, what), *t = find(b, tid, what);
    uint32_t n = seqcache_count(s->cache);
    assert_true(s->req == NULL && t->req == NULL && t->replay == NULL);
    same(s->stream, t->stream, "the stream", what);
    same(s->position_zero, t->position_zero, "the next position", what);
    same(s->rerotate, t->rerotate, "what becomes of positions", what);
    same(s->has_pending, t->has_pending, "has_pending", what);
    if (s->has_pending)
        same((uint32_t)s->pending, (uint32_t)t->pending, "the token to come", what);
    same(s->chat_state, t->chat_state, "the conversation", what);
    same(s->frozen_auto, t->frozen_auto, "frozen_auto", what);
    same(s->tokens_in, t->tokens_in, "tokens_in", what);
    same(s->tokens_out, t->tokens_out, "tokens_out", what);
    same(s->prunes, t->prunes, "prunes", what);
    same(s->dropped, t->dropped, "dropped", what);
    same(s->dropped_why, t->dropped_why, "why tokens were dropped", what);
    same(s->n_recent, t->n_recent, "the ring of ids", what);
    same(s->recent_from, t->recent_from, "the first id known", what);
    bytes_same(s->recent, t->recent, s->n_recent * sizeof *s->recent, "the newest ids", what);
    same(s->budget_bytes, t->budget_bytes, "the budget", what);
    same(s->weight, t->weight, "its weight", what);
    same((uint32_t)s->priority, (uint32_t)t->priority, "its priority", what);
    same(n, seqcache_count(t->cache), "what is cached", what);
    bytes_same(seqcache_ids(s->cache), seqcache_ids(t->cache), n * sizeof(int32_t), "the tokens",
               what);
    bytes_same(seqcache_positions(s->cache), seqcache_positions(t->cache), n * sizeof(int32_t),
               "their positions", what);
    bytes_same(seqcache_stream(s->cache), seqcache_stream(t->cache), n * sizeof(uint64_t),
               "their places", what);
    policies_equal(s, t, what);
}

void answers_equal(struct eh *a, uint64_t s, struct eh *b, uint64_t t, const int32_t *ids, size_t n,
                   uint32_t n_new, const char *what)
{
    struct generate_options o = eh_greedy(n_new);
    struct eh *h[2] = {a, b};
    uint64_t id[2] = {s, t};
    o.n_logprobs = 2;
    for (int i = 0; i < 2; i++) {
        struct eh_stream *x = eh_stream(h[i], id[i]);
        eh_run(h[i]);
        eh_forget(h[i], id[i]);
        eh_ids(h[i], id[i], ids, n, &o);
        eh_run_to_end(h[i], id[i]);
        if (x->end.u.end.tokens_out != n_new)
            fail_msg("%s: %u tokens: %s", what, x->end.u.end.tokens_out, x->end.u.end.text);
    }
    struct eh_stream *x = eh_stream(a, s), *y = eh_stream(b, t);
    same(x->n_ids, y->n_ids, "the answer's length", what);
    bytes_same(x->ids, y->ids, x->n_ids * sizeof *x->ids, "the answer", what);
    bytes_same(x->streams, y->streams, x->n_ids * sizeof *x->streams, "the answer's place", what);
    same(x->n_logprobs, y->n_logprobs, "log-probabilities", what);
    for (uint32_t i = 0; i < x->n_logprobs; i++)
        bytes_same(&x->logprobs[i].u.logprob, &y->logprobs[i].u.logprob,
                   offsetof(struct report, u.logprob.top) - offsetof(struct report, u.logprob),
                   "a log-probability", what);
    same(x->n_prunes, y->n_prunes, "the answer's prunes", what);
    for (uint32_t i = 0; i < x->n_prunes; i++) {
        same(x->prunes[i].n_ranges, y->prunes[i].n_ranges, "a prune's ranges", what);
        bytes_same(x->prunes[i].ranges, y->prunes[i].ranges,
                   x->prunes[i].n_ranges * sizeof *x->prunes[i].ranges, "a prune", what);
    }
    sessions_equal(a, s, b, t, what);
}

void prompt_fill(int32_t *ids, size_t n, uint32_t seed)
{
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        ids[i] = (int32_t)(3 + (seed >> 8) % 280);
    }
}
