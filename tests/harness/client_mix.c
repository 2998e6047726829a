/* client_mix.c: see client_mix.h. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <pthread.h>
#include <time.h>
#include "answer.h"
#include "client_mix.h"
#include "daemon_harness.h"

#define CLIENTS 8u
#define SESSIONS 3u /* of a client */
#define TEXT_BYTES 40000u
#define LINES_MAX 32u

enum op {
    OP_ASK,
    OP_ASK_LONG, /* by the ring */
    OP_ASK_IDS,
    OP_READ,
    OP_CANCEL,
    OP_BUDGET,
    OP_PRUNE,
    OP_SCORES,
    OP_LIST,
    OP_CLOSE,
    OP_DROP, /* the connection, whatever is under way */
    N_OPS
};

struct mixer {
    struct dh *d;
    uint64_t end_ms;
    uint32_t x, number;
    backcast *c;
    backcast_session *s[SESSIONS];
    const char *text; /* TEXT_BYTES */
    unsigned done[N_OPS], refused, ends;
    char failed[300];
};

static uint64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

static uint32_t below(struct mixer *m, uint32_t n)
{
    m->x = m->x * 1664525u + 1013904223u;
    return (uint32_t)(((uint64_t)m->x * n) >> 32);
}

/* What a client can bring on itself; anything else is a failure. */
static bool result_fits(struct mixer *m, const char *what, int rc)
{
    switch (rc) {
    case BACKCAST_EINVALID:
    case BACKCAST_EBUSY:
    case BACKCAST_EBUDGET:
    case BACKCAST_ECONTEXT:
        m->refused++;
        return true;
    default:
        if (rc < 0 && m->failed[0] == '\0')
            snprintf(m->failed, sizeof m->failed, "%s: %d %s: %.200s", what, rc,
                     backcast_strerror(rc), backcast_last_error(m->c));
        return rc >= 0;
    }
}

/* ---- sessions */

static void session_open(struct mixer *m, unsigned i)
{
    static const char *const policies[] = {"none",           "sliding_window",
                                           "key_similarity", "h2o",
                                           "tova",           "knorm",
                                           "keydiff",        "random",
                                           "counter_causal", "counter_causal_fast"};
    static const char *const models[] = {NULL, NULL, NULL, TEST_VECTORS "/tiny-qwen2.gguf"};
    struct backcast_session_options o = answer_budget(policies[below(m, 10)], 48 + below(m, 250));
    char name[32];
    o.model = models[below(m, 4)];
    o.ring_bytes = 4096u << below(m, 5);
    if (below(m, 4) == 0)
        o.kv_type = "f32";
    if (below(m, 4) == 0 && strcmp(o.policy, "none") != 0)
        o.trigger = "prefill_end";
    if (below(m, 5) == 0) { /* two clients want the same few names */
        snprintf(name, sizeof name, "mix%u", below(m, 6));
        o.name = name;
    }
    result_fits(m, "open", backcast_session_open(m->c, &o, &m->s[i]));
}

static void ask(struct mixer *m, backcast_session *s, enum op op)
{
    struct backcast_generate_options g = answer_options(below(m, 80));
    uint32_t at = below(m, 1000), len = below(m, 900);
    int rc;
    if (below(m, 3) == 0) {
        g.temperature = 0.8f;
        g.seed = below(m, 1000);
    }
    if (below(m, 6) == 0) {
        g.n_logprobs = (int32_t)below(m, 4);
        g.prompt_logprobs = below(m, 2) == 0;
    }
    if (op == OP_ASK_IDS) {
        int32_t ids[40];
        for (unsigned i = 0; i < 40; i++)
            ids[i] = (int32_t)below(m, 390); /* a few are no token */
        rc = backcast_prompt_ids(s, ids, below(m, 41), &g);
    } else if (op == OP_ASK_LONG) {
        rc = backcast_prompt(s, m->text + at, 17000 + below(m, 20000), &g);
    } else if (below(m, 2) == 0) {
        rc = backcast_chat(s, "user", m->text + at, len, &g);
    } else {
        rc = backcast_prompt(s, m->text + at, len, &g);
    }
    result_fits(m, "ask", rc);
}

static void read_some(struct mixer *m, unsigned n)
{
    struct backcast_event ev;
    int rc = 1;
    for (; n > 0 && rc == 1; n--) {
        rc = backcast_next(m->c, &ev, (int)below(m, 30));
        if (rc == 1 && ev.type == BACKCAST_LOST)
            snprintf(m->failed, sizeof m->failed, "events were lost");
        m->ends += rc == 1 && ev.type == BACKCAST_END;
    }
    result_fits(m, "next", rc);
}

static void scores(struct mixer *m, backcast_session *s)
{
    struct backcast_score *rows = NULL;
    size_t n = 0;
    result_fits(m, "scores", backcast_session_scores(s, &rows, &n));
    free(rows);
}

static void drop(struct mixer *m)
{
    backcast_disconnect(&m->c);
    memset(m->s, 0, sizeof m->s);
    int rc = backcast_connect(&m->c, m->d->socket);
    if (rc != 0)
        snprintf(m->failed, sizeof m->failed, "connect: %s", backcast_last_error(NULL));
}

static enum op op_draw(struct mixer *m)
{
    static const uint8_t weight[N_OPS] = {20, 2, 5, 40, 6, 5, 4, 3, 3, 6, 1};
    uint32_t at = below(m, 95);
    for (enum op op = 0; op < N_OPS; op++) {
        if (at < weight[op])
            return op;
        at -= weight[op];
    }
    return OP_READ;
}

static void step(struct mixer *m)
{
    unsigned i = below(m, SESSIONS);
    struct backcast_stats st;
    enum op op = op_draw(m);
    if (m->s[i] == NULL) {
        session_open(m, i);
        return;
    }
    m->done[op]++;
    switch (op) {
    case OP_ASK:
    case OP_ASK_LONG:
    case OP_ASK_IDS:
        ask(m, m->s[i], op);
        break;
    case OP_CANCEL:
        result_fits(m, "cancel", backcast_cancel(m->s[i]));
        break;
    case OP_BUDGET:
        result_fits(m, "budget", backcast_session_budget(m->s[i], 0, 20 + below(m, 300), 0));
        break;
    case OP_PRUNE:
        result_fits(m, "prune", backcast_session_prune(m->s[i], below(m, 100)));
        break;
    case OP_SCORES:
        scores(m, m->s[i]);
        break;
    case OP_LIST:
        result_fits(m, "list", backcast_stats(m->c, &st));
        break;
    case OP_CLOSE:
        backcast_session_close(&m->s[i]);
        break;
    case OP_DROP:
        drop(m);
        break;
    default:
        read_some(m, 1 + below(m, 60));
        break;
    }
}

static void *mixer_main(void *arg)
{
    struct mixer *m = arg;
    drop(m);
    while (m->failed[0] == '\0' && now_ms() < m->end_ms)
        step(m);
    if (m->c != NULL && m->number % 2 == 0) /* the others leave as they are */
        for (unsigned i = 0; i < SESSIONS; i++)
            backcast_session_close(&m->s[i]);
    backcast_disconnect(&m->c);
    return NULL;
}

/* ---- before, beside and after */

static void good_answer(backcast *c, struct answer *a)
{
    struct backcast_session_options so = answer_budget("counter_causal_fast", 96);
    struct backcast_generate_options go = answer_options(300);
    answer_ask(c, &so, "the tide turns a mill", 21, &go, a);
}

struct rest {
    backcast *c;
    const struct dh *d;
    size_t n_lines;
    uint64_t lines[LINES_MAX];
    unsigned fds;
};

/* Work space is kept for the next pass, and grows with the largest one. */
static bool line_counts(const char *name)
{
    return strcmp(name, "scratch") != 0;
}

static struct rest rest_of(backcast *c, const struct dh *d)
{
    struct rest r = {.c = c, .d = d, .fds = dh_fds(d)};
    struct backcast_stats st;
    assert_int_equal(backcast_stats(c, &st), 0);
    assert_true(st.n_ledger > 3 && st.n_ledger <= LINES_MAX);
    r.n_lines = st.n_ledger;
    for (size_t i = 0; i < st.n_ledger; i++)
        r.lines[i] = line_counts(st.ledger[i].name) ? st.ledger[i].bytes : 0;
    return r;
}

static bool all_is_back(void *arg)
{
    const struct rest *was = arg;
    struct rest now = rest_of(was->c, was->d);
    struct backcast_stats st;
    assert_int_equal(backcast_stats(was->c, &st), 0);
    return now.fds <= was->fds && st.n_sessions == 0 && st.kv_held == 0 && st.bytes_rings == 0 &&
           st.n_connections == 1 && memcmp(now.lines, was->lines, sizeof now.lines) == 0;
}

/* Named sessions outlive their clients: they are closed by number. */
static void close_named(backcast *c)
{
    struct backcast_stats st;
    uint64_t ids[64];
    size_t n = 0;
    assert_int_equal(backcast_stats(c, &st), 0);
    for (; n < st.n_sessions && n < 64; n++)
        ids[n] = st.sessions[n].id;
    for (size_t i = 0; i < n; i++) {
        int rc = backcast_close_by_id(c, ids[i]);
        assert_true(rc == 0 || rc == BACKCAST_EUNKNOWN); /* it went meanwhile */
    }
}

static void mixers_check(const struct mixer *m)
{
    unsigned ends = 0;
    for (unsigned i = 0; i < CLIENTS; i++) {
        if (m[i].failed[0] != '\0')
            fail_msg("client %u: %s", i, m[i].failed);
        ends += m[i].ends;
    }
    print_message("%u answers ended; client 0: %u asked, %u refused, %u cancelled, %u dropped\n",
                  ends, m[0].done[OP_ASK], m[0].refused, m[0].done[OP_CANCEL], m[0].done[OP_DROP]);
    assert_true(ends > 0);
}

void client_mix(unsigned seconds, uint32_t seed)
{
    static struct mixer m[CLIENTS];
    pthread_t threads[CLIENTS];
    backcast *c = NULL;
    struct answer want = {0}, got = {0};
    struct dh *d = dh_start_long((const char *[]){"--threads=2", NULL});
    struct backcast_session_options other = answer_budget("h2o", 64);
    struct backcast_generate_options go = answer_options(3);
    char *text = answer_prompt(TEXT_BYTES, seed);

    assert_int_equal(backcast_connect(&c, d->socket), 0);
    other.model = TEST_VECTORS "/tiny-qwen2.gguf"; /* loaded once, and it stays */
    answer_ask(c, &other, "oak", 3, &go, &got);
    answer_free(&got);
    good_answer(c, &want);
    struct rest rest = rest_of(c, d);
    uint64_t end_ms = now_ms() + seconds * 1000u;
    for (unsigned i = 0; i < CLIENTS; i++) {
        m[i] = (struct mixer){
            .d = d, .end_ms = end_ms, .x = seed * 100 + i, .number = i, .text = text};
        assert_int_equal(pthread_create(&threads[i], NULL, mixer_main, &m[i]), 0);
    }
    do {
        good_answer(c, &got);
        if (!answer_equal(&got, &want))
            fail_msg("the answer is another one in company: %s", got.reason);
        answer_free(&got);
    } while (now_ms() < end_ms);
    for (unsigned i = 0; i < CLIENTS; i++)
        pthread_join(threads[i], NULL);
    mixers_check(m);
    close_named(c);
    if (!dh_until(all_is_back, &rest, DH_PATIENCE_MS))
        fail_msg("not everything is back: %u descriptors, before %u", dh_fds(d), rest.fds);
    answer_free(&want);
    free(text);
    backcast_disconnect(&c);
    dh_stop(&d);
}
