/* engine_harness.c: see engine_harness.h. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "clock.h"
#include "core.h"
#include "engine_harness.h"
#include "records.h"

const struct eh_ask eh_policies[EH_POLICIES] = {
    {.policy = "counter_causal_fast", .budget_tokens = 100},
    {.policy = "counter_causal", .budget_tokens = 64, .kv_type = "f32", .score = "logprob"},
    {.policy = "sliding_window", .budget_tokens = 48, .frozen = 4},
    {.policy = "h2o", .budget_tokens = 90, .kv_type = "bf16"},
    {.policy = "tova", .budget_tokens = 70},
    {.policy = "key_similarity", .budget_tokens = 80},
    {.model = TEST_VECTORS "/tiny-qwen3.gguf",
     .policy = "knorm",
     .budget_tokens = 75,
     .kv_type = "q8_q4"},
    {.policy = "keydiff", .budget_tokens = 130, .keep = 65},
    {.policy = "random", .budget_tokens = 66, .seed = 11},
    {.policy = "none"},
    {.model = TEST_VECTORS "/tiny-qwen3.gguf",
     .policy = "counter_causal_fast",
     .budget_tokens = 80,
     .kv_type = "q8_0"},
    {.policy = "counter_causal_fast", .trigger = "prefill_end", .keep = 60, .budget_tokens = 500},
    {.policy = "counter_causal_fast", .budget_tokens = 120, .kv_type = "f32"},
};

#ifndef TEST_VECTORS
#error "TEST_VECTORS: the folder of the models"
#endif
#define WAIT_SECONDS 120
#define STEPS_MAX 2000000u

/* What the engine's wake-up does: the loop's async handle, here a counter. */
struct eh_waker {
    pthread_mutex_t lock;
    pthread_cond_t cond;
    uint64_t rung;
};

static void wake(void *arg)
{
    struct eh_waker *w = arg;
    pthread_mutex_lock(&w->lock);
    w->rung++;
    pthread_cond_broadcast(&w->cond);
    pthread_mutex_unlock(&w->lock);
}

/* By hand: the test's; with threads, which sleep by the system's clock: that one. */
static uint64_t now(void *arg)
{
    const struct eh *h = arg;
    return h->started ? BC_MAX(h->now_us, clock_us()) : h->now_us;
}

void eh_pass(struct eh *h, uint64_t us)
{
    assert_false(h->started);
    h->now_us += us;
}

static void *grown(void *at, size_t n, size_t size)
{
    if ((n & (n - 1)) != 0) /* grows at powers of two only */
        return at;
    void *moved = reallocarray(at, n > 0 ? 2 * n : 1, size);
    assert_non_null(moved);
    return moved;
}

struct eh *eh_open(const char *model, void (*tweak)(struct engine_options *o, void *arg), void *arg)
{
    struct eh *h = calloc(1, sizeof *h);
    char path[512];
    struct err e = {0};
    assert_non_null(h);
    h->waker = calloc(1, sizeof *h->waker);
    assert_non_null(h->waker);
    pthread_mutex_init(&h->waker->lock, NULL);
    pthread_cond_init(&h->waker->cond, NULL);
    if (model != NULL && strchr(model, '/') == NULL)
        snprintf(path, sizeof path, "%s/%s", TEST_VECTORS, model);
    else if (model != NULL)
        snprintf(path, sizeof path, "%s", model);
    struct engine_options o = {.backend = "auto",
                               .threads = 1,
                               .default_model = model != NULL ? path : NULL,
                               .kv_memory = 64u << 20,
                               .session_budget = 16u << 20,
                               .max_sessions = 256,
                               .wake = wake,
                               .wake_arg = h->waker,
                               .now = now,
                               .now_arg = h};
    h->now_us = clock_us();
    if (tweak != NULL)
        tweak(&o, arg);
    if (engine_open(&h->en, &o, &e) < 0)
        fail_msg("engine_open: %s: %s", e.field, e.text);
    h->next_request = 1;
    return h;
}

void eh_start(struct eh *h)
{
    struct err e = {0};
    h->started = true;
    if (engine_start(h->en, &e) < 0)
        fail_msg("engine_start: %s", e.text);
}

static void stream_clear(struct eh_stream *s)
{
    for (uint32_t i = 0; i < s->n_prunes; i++)
        free(s->prunes[i].ranges);
    free(s->ids);
    free(s->streams);
    free(s->text);
    free(s->prunes);
    free(s->scores);
    free(s->logprobs);
    free(s->rerotated);
    *s = (struct eh_stream){.session = s->session, .conn = s->conn, .uid = s->uid};
    s->text = calloc(1, 1);
}

void eh_close(struct eh **ph)
{
    struct eh *h = *ph;
    if (h->started)
        engine_stop(h->en);
    h->hold = false;
    eh_collect(h);
    engine_close(&h->en);
    for (uint32_t i = 0; i < h->n_streams; i++) {
        stream_clear(h->streams[i]);
        free(h->streams[i]->text);
        free(h->streams[i]);
        port_drop(&h->ports[i]);
    }
    for (uint32_t i = 0; i < h->n_replies; i++)
        report_free(&h->replies[i]);
    for (uint32_t i = 0; i < h->n_held; i++)
        report_free(&h->held[i]);
    free(h->streams);
    free(h->ports);
    free(h->replies);
    free(h->held);
    pthread_cond_destroy(&h->waker->cond);
    pthread_mutex_destroy(&h->waker->lock);
    free(h->waker);
    free(h);
    *ph = NULL;
}

static bool is_open(const struct eh *h, uint64_t session)
{
    for (uint32_t i = 0; i < h->en->n_sessions; i++)
        if (h->en->list[i]->id == session)
            return true;
    return false;
}

/* Its opening was answered: with a no, if it has no session yet. */
static bool was_answered(const struct eh *h, const struct eh_stream *s)
{
    for (uint32_t i = 0; i < h->n_replies; i++)
        if (h->replies[i]->request_id == s->end.request_id)
            return true;
    return false;
}

void eh_tidy(struct eh *h)
{
    uint32_t n = 0;
    assert_false(h->started || h->hold);
    for (uint32_t i = 0; i < h->n_streams; i++) {
        struct eh_stream *s = h->streams[i];
        if (s->session != 0 ? is_open(h, s->session) : !was_answered(h, s)) {
            h->streams[n] = s;
            h->ports[n++] = h->ports[i];
            continue;
        }
        stream_clear(s);
        free(s->text);
        free(s);
        port_drop(&h->ports[i]);
    }
    h->n_streams = n;
    for (uint32_t i = 0; i < h->n_replies; i++)
        report_free(&h->replies[i]);
    h->n_replies = 0;
}

/* ---- asking ---- */

struct command *eh_command(struct eh *h, enum command_type type, uint64_t session)
{
    struct command *c = command_new(type, EH_CONN, h->next_request++);
    assert_non_null(c);
    c->uid = EH_UID;
    c->session = session;
    for (uint32_t i = 0; session != 0 && i < h->n_streams; i++)
        if (h->streams[i]->session == session) {
            c->uid = h->streams[i]->uid;
            c->conn = h->streams[i]->conn;
        }
    return c;
}

uint32_t eh_post(struct eh *h, struct command *c)
{
    struct err e = {0};
    uint32_t id = c->request_id;
    if (engine_post(h->en, &c, &e) < 0)
        fail_msg("engine_post: %s", e.text);
    assert_null(c);
    return id;
}

/* The strings of an open command live in one block that goes with it. */
static const char *keep_string(char **at, const char *s)
{
    if (s == NULL)
        return NULL;
    char *start = *at;
    size_t n = strlen(s) + 1;
    memcpy(start, s, n);
    *at += n;
    return start;
}

static size_t string_bytes(const char *s)
{
    return s != NULL ? strlen(s) + 1 : 0;
}

/* A stream for the session that c will make: known by its request until the reply says its id. */
static struct session_port *stream_await(struct eh *h, const struct command *c)
{
    struct session_port *port = port_new();
    struct eh_stream *s = calloc(1, sizeof *s);
    assert_true(port != NULL && s != NULL);
    stream_clear(s);
    s->end.request_id = c->request_id;
    s->conn = c->conn;
    s->uid = c->uid;
    h->ports = grown(h->ports, h->n_streams, sizeof *h->ports);
    h->streams = grown(h->streams, h->n_streams, sizeof *h->streams);
    h->ports[h->n_streams] = port;
    h->streams[h->n_streams++] = s;
    return port;
}

uint32_t eh_post_save(struct eh *h, uint64_t session, const char *name)
{
    struct command *c = eh_command(h, CMD_SAVE, session);
    snprintf(c->u.save.name, sizeof c->u.save.name, "%s", name);
    return eh_post(h, c);
}

uint32_t eh_post_restore_as(struct eh *h, const char *name, uint64_t conn, uint32_t uid)
{
    struct command *c = eh_command(h, CMD_RESTORE, 0);
    c->conn = conn;
    c->uid = uid;
    snprintf(c->u.restore.name, sizeof c->u.restore.name, "%s", name);
    c->u.restore.port = stream_await(h, c);
    return eh_post(h, c);
}

uint32_t eh_post_fork(struct eh *h, uint64_t session, const char *name)
{
    return eh_post_fork_as(h, session, name, EH_CONN, EH_UID);
}

uint32_t eh_post_fork_as(struct eh *h, uint64_t session, const char *name, uint64_t conn,
                         uint32_t uid)
{
    struct command *c = eh_command(h, CMD_FORK, session);
    c->conn = conn;
    c->uid = uid;
    snprintf(c->u.fork.name, sizeof c->u.fork.name, "%s", name != NULL ? name : "");
    c->u.fork.port = stream_await(h, c);
    return eh_post(h, c);
}

uint32_t eh_post_restore(struct eh *h, const char *name)
{
    return eh_post_restore_as(h, name, EH_CONN, EH_UID);
}

static struct eh_stream *stream_find(struct eh *h, uint64_t session, uint32_t *ret_at);

uint64_t eh_attach(struct eh *h, const char *name)
{
    uint64_t id = 0;
    uint32_t at = 0;
    eh_collect(h);
    for (uint32_t i = 0; i < h->n_replies; i++)
        if (h->replies[i]->type == REP_RECOVERED &&
            strcmp(h->replies[i]->u.recovered.info.name, name) == 0)
            id = h->replies[i]->session;
    if (id == 0)
        return 0;
    struct command *c = eh_command(h, CMD_ATTACH, id);
    assert_non_null(stream_find(h, id, &at));
    snprintf(c->u.attach.name, sizeof c->u.attach.name, "%s", name);
    c->u.attach.port = h->ports[at];
    eh_expect(h, eh_post(h, c), REP_ATTACHED);
    return id;
}

uint32_t eh_post_open(struct eh *h, const struct eh_ask *a)
{
    struct command *c = eh_command(h, CMD_OPEN, 0);
    size_t n = string_bytes(a->model) + string_bytes(a->policy) + string_bytes(a->score) +
               string_bytes(a->trigger) + string_bytes(a->kv_type) + string_bytes(a->name) +
               string_bytes(a->chat_template) + string_bytes(a->positions);
    char *at = c->u.open.strings = malloc(n + 1);
    assert_non_null(at);
    if (a->conn != 0)
        c->conn = a->conn;
    if (a->uid != 0)
        c->uid = a->uid;
    c->u.open.evict = (struct evict_request){
        .policy = keep_string(&at, a->policy),
        .budget_bytes = a->budget_bytes,
        .budget_tokens = a->budget_tokens,
        .keep = a->keep,
        .frozen = a->frozen,
        .recent = a->recent_zero   ? 0
                  : a->recent == 0 ? -1
                                   : a->recent,
        .min_gap = a->min_gap,
        .score = keep_string(&at, a->score),
        .span = a->span,
        .span_quantile = a->span_quantile == 0  ? -1
                         : a->span_quantile < 0 ? 0
                                                : a->span_quantile,
        .trigger = keep_string(&at, a->trigger),
        .seed = a->seed,
    };
    c->u.open.model = keep_string(&at, a->model);
    c->u.open.kv_type = keep_string(&at, a->kv_type);
    c->u.open.positions = keep_string(&at, a->positions);
    c->u.open.name = keep_string(&at, a->name);
    c->u.open.chat_template = keep_string(&at, a->chat_template);
    c->u.open.priority = a->priority;
    c->u.open.durable = a->durable;
    memset(c->u.open.token, 0x77, sizeof c->u.open.token);
    c->u.open.weight = a->weight;
    snprintf(c->u.open.client, sizeof c->u.open.client, "harness");
    c->u.open.port = stream_await(h, c);
    return eh_post(h, c);
}

uint32_t eh_post_ids(struct eh *h, uint64_t session, const int32_t *ids, size_t n,
                     const struct generate_options *o)
{
    struct command *c = eh_command(h, CMD_GENERATE, session);
    c->u.generate.kind = PROMPT_IDS;
    c->u.generate.opt = *o;
    c->u.generate.ids = malloc((n + 1) * sizeof *ids);
    assert_non_null(c->u.generate.ids);
    if (n > 0)
        memcpy(c->u.generate.ids, ids, n * sizeof *ids);
    c->u.generate.n_ids = n;
    return eh_post(h, c);
}

uint32_t eh_post_text(struct eh *h, uint64_t session, enum prompt_kind kind, const char *role,
                      const char *text, size_t len, const struct generate_options *o)
{
    struct command *c = eh_command(h, CMD_GENERATE, session);
    c->u.generate.kind = kind;
    c->u.generate.opt = *o;
    snprintf(c->u.generate.role, sizeof c->u.generate.role, "%s", role != NULL ? role : "");
    c->u.generate.text = malloc(len + 1);
    assert_non_null(c->u.generate.text);
    memcpy(c->u.generate.text, text, len);
    c->u.generate.len = len;
    return eh_post(h, c);
}

/* ---- collecting ---- */

static struct eh_stream *stream_find(struct eh *h, uint64_t session, uint32_t *ret_at)
{
    for (uint32_t i = 0; i < h->n_streams; i++)
        if (h->streams[i]->session == session) {
            if (ret_at != NULL)
                *ret_at = i;
            return h->streams[i];
        }
    return NULL;
}

struct eh_stream *eh_stream(struct eh *h, uint64_t session)
{
    struct eh_stream *s = session != 0 ? stream_find(h, session, NULL) : NULL;
    if (s == NULL)
        fail_msg("no session %llu was opened here", (unsigned long long)session);
    return s;
}

struct session_port *eh_port(struct eh *h, uint64_t session)
{
    uint32_t at = 0;
    assert_non_null(stream_find(h, session, &at));
    return h->ports[at];
}

void eh_forget(struct eh *h, uint64_t session)
{
    stream_clear(eh_stream(h, session));
}

static void add_tokens(struct eh_stream *s, const struct report *r)
{
    for (uint32_t i = 0; i < r->u.tokens.n_ids; i++) {
        s->ids = grown(s->ids, s->n_ids, sizeof *s->ids);
        s->streams = grown(s->streams, s->n_ids, sizeof *s->streams);
        s->streams[s->n_ids] = r->u.tokens.first_stream + i;
        s->ids[s->n_ids++] = r->u.tokens.ids[i];
    }
    s->text = realloc(s->text, s->text_len + r->u.tokens.text_len + 1);
    assert_non_null(s->text);
    memcpy(s->text + s->text_len, r->u.tokens.text, r->u.tokens.text_len);
    s->text_len += r->u.tokens.text_len;
    s->text[s->text_len] = '\0';
}

static void add_prune(struct eh_stream *s, const struct report *r)
{
    size_t bytes = r->u.pruned.n_ranges * sizeof(struct evict_range);
    s->prunes = grown(s->prunes, s->n_prunes, sizeof *s->prunes);
    struct eh_prune *p = &s->prunes[s->n_prunes++];
    *p = (struct eh_prune){.before = r->u.pruned.tokens_before,
                           .after = r->u.pruned.tokens_after,
                           .reason = r->u.pruned.reason,
                           .live_before = r->u.pruned.live_before,
                           .live_after = r->u.pruned.live_after,
                           .held_before = r->u.pruned.held_before,
                           .held_after = r->u.pruned.held_after,
                           .n_ranges = r->u.pruned.n_ranges,
                           .ranges = malloc(bytes + 1),
                           .after_ids = s->n_ids,
                           .progress = s->done};
    assert_non_null(p->ranges);
    if (bytes > 0)
        memcpy(p->ranges, r->u.pruned.ranges, bytes);
}

static void add_stream(struct eh *h, struct report *r)
{
    uint32_t at = 0;
    struct eh_stream *s = stream_find(h, r->session, &at);
    if (s == NULL)
        fail_msg("a report of session %llu, which nobody opened", (unsigned long long)r->session);
    assert_true(h->ports[at]->queued > 0);
    h->ports[at]->queued--;
    s->seq += report_records(r);
    switch (r->type) {
    case REP_TOKENS:
        add_tokens(s, r);
        break;
    case REP_LOGPROB:
        s->logprobs = grown(s->logprobs, s->n_logprobs, sizeof *s->logprobs);
        s->logprobs[s->n_logprobs++] = *r;
        break;
    case REP_PROGRESS:
        assert_true(r->u.progress.done <= r->u.progress.total);
        s->n_progress++;
        s->done = r->u.progress.done;
        s->total = r->u.progress.total;
        break;
    case REP_PRUNED:
        add_prune(s, r);
        break;
    case REP_SCORES:
        if (r->u.scores.offset == 0)
            s->n_scores = 0;
        assert_int_equal(r->u.scores.offset, s->n_scores);
        s->scores = realloc(s->scores, (r->u.scores.total + 1) * sizeof *s->scores);
        assert_non_null(s->scores);
        memcpy(s->scores + s->n_scores, r->u.scores.rows, r->u.scores.n * sizeof *s->scores);
        s->n_scores += r->u.scores.n;
        break;
    case REP_REROTATED:
        s->rerotated = grown(s->rerotated, s->n_rerotated, sizeof *s->rerotated);
        s->rerotated[s->n_rerotated++] = *r;
        break;
    case REP_LOST:
        s->lost += r->u.lost.count;
        break;
    default:
        assert_int_equal(r->type, REP_END);
        s->n_ends++;
        s->end = *r;
    }
    report_free(&r);
}

static void add_reply(struct eh *h, struct report *r)
{
    if (r->type == REP_OPENED)
        for (uint32_t i = 0; i < h->n_streams; i++)
            if (h->streams[i]->session == 0 && h->streams[i]->end.request_id == r->request_id)
                h->streams[i]->session = r->session;
    for (uint32_t i = 0; i < h->n_replies; i++) /* one answer each; 0: nobody asked */
        assert_true(r->request_id == 0 || h->replies[i]->request_id != r->request_id);
    if (r->type == REP_RECOVERED) {
        h->ports = grown(h->ports, h->n_streams, sizeof *h->ports);
        h->streams = grown(h->streams, h->n_streams, sizeof *h->streams);
        struct eh_stream *s = calloc(1, sizeof *s);
        assert_non_null(s);
        s->session = r->session;
        stream_clear(s);
        s->uid = r->u.recovered.info.uid;
        s->conn = EH_CONN;
        s->recovered = true;
        s->busy = r->u.recovered.busy;
        s->seq = r->u.recovered.seq;
        h->ports[h->n_streams] = r->u.recovered.port;
        h->streams[h->n_streams++] = s;
        r->u.recovered.port = NULL;
    }
    h->replies = grown(h->replies, h->n_replies, sizeof *h->replies);
    h->replies[h->n_replies++] = r;
}

void eh_collect(struct eh *h)
{
    for (struct report *r; (r = engine_take(h->en)) != NULL;) {
        if (r->type < REP_TOKENS) {
            add_reply(h, r);
        } else if (h->hold) {
            h->held = grown(h->held, h->n_held, sizeof *h->held);
            h->held[h->n_held++] = r;
        } else {
            add_stream(h, r);
        }
    }
}

void eh_release(struct eh *h)
{
    h->hold = false;
    for (uint32_t i = 0; i < h->n_held; i++)
        add_stream(h, h->held[i]);
    h->n_held = 0;
    eh_post(h, eh_command(h, CMD_ROOM, 0));
}

bool eh_step(struct eh *h)
{
    assert_false(h->started);
    bool ran = engine_step(h->en) == ENGINE_RAN;
    h->steps++;
    h->now_us++; /* what came later is younger */
    eh_collect(h);
    if (h->on_step != NULL)
        h->on_step(h);
    return ran;
}

void eh_run(struct eh *h)
{
    for (uint64_t n = 0; eh_step(h); n++)
        assert_true(n < STEPS_MAX);
}

/* One more turn of whatever the test waits for. */
static void turn(struct eh *h, uint64_t *rung, const char *what)
{
    if (!h->started) {
        if (!eh_step(h))
            fail_msg("the engine is idle and there is no %s", what);
        return;
    }
    struct timespec until;
    int rc = 0;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += WAIT_SECONDS;
    pthread_mutex_lock(&h->waker->lock);
    while (h->waker->rung == *rung && rc == 0)
        rc = pthread_cond_timedwait(&h->waker->cond, &h->waker->lock, &until);
    *rung = h->waker->rung;
    pthread_mutex_unlock(&h->waker->lock);
    if (rc != 0)
        fail_msg("no %s within %d s", what, WAIT_SECONDS);
    eh_collect(h);
}

const struct report *eh_reply(struct eh *h, uint32_t request)
{
    uint64_t rung = 0;
    for (eh_collect(h);; turn(h, &rung, "reply"))
        for (uint32_t i = h->n_replies; i-- > 0;)
            if (h->replies[i]->request_id == request)
                return h->replies[i];
}

const struct report *eh_expect(struct eh *h, uint32_t request, enum report_type type)
{
    const struct report *r = eh_reply(h, request);
    if (r->type == REP_ERROR && type != REP_ERROR)
        fail_msg("refused: %s: %s", r->u.error.field, r->u.error.text);
    assert_int_equal(r->type, type);
    return r;
}

const struct err *eh_expect_error(struct eh *h, uint32_t request, int code, const char *field)
{
    const struct report *r = eh_reply(h, request);
    if (r->type != REP_ERROR)
        fail_msg("not refused: a report of type %d instead of %s", r->type, err_name(code));
    if (r->u.error.code != code || strcmp(r->u.error.field, field) != 0)
        fail_msg("%s, field \"%s\" (%s); not %s, field \"%s\"", err_name(r->u.error.code),
                 r->u.error.field, r->u.error.text, err_name(code), field);
    assert_true(strlen(r->u.error.text) > 0);
    return &r->u.error;
}

void eh_run_to_end(struct eh *h, uint64_t session)
{
    struct eh_stream *s = eh_stream(h, session);
    uint64_t rung = 0;
    for (eh_collect(h); s->n_ends == s->ends_waited;)
        turn(h, &rung, "end");
    s->ends_waited++;
}

/* ---- in one call ---- */

uint64_t eh_session(struct eh *h, const struct eh_ask *a)
{
    return eh_expect(h, eh_post_open(h, a), REP_OPENED)->session;
}

void eh_ids(struct eh *h, uint64_t session, const int32_t *ids, size_t n,
            const struct generate_options *o)
{
    eh_expect(h, eh_post_ids(h, session, ids, n, o), REP_ACCEPTED);
}

void eh_text(struct eh *h, uint64_t session, enum prompt_kind kind, const char *text,
             const struct generate_options *o)
{
    eh_expect(h, eh_post_text(h, session, kind, NULL, text, strlen(text), o), REP_ACCEPTED);
}

void eh_close_session(struct eh *h, uint64_t session)
{
    eh_expect(h, eh_post(h, eh_command(h, CMD_CLOSE, session)), REP_CLOSED);
}

struct generate_options eh_greedy(uint32_t n)
{
    struct generate_options o;
    generate_options_init(&o);
    o.max_tokens = n;
    o.ignore_end = true;
    return o;
}
