/* kills.c: see kills.h.
 *
 *   life:  [killer: sleeps a random while, kill -9]      every third life only once all sessions are back:
 *          open, ask, read, close ... until ECLOSED      a session that no daemon lives long enough for is
 *          next daemon, reconnect, what was in doubt     given up, and rightly so
 *
 * What is in doubt after a call that the kill cut: the daemon knows. Every prompt has TURN_IN tokens, so
 * the number that a session has had tells which turns were accepted. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "answer.h"
#include "base.h"
#include "daemon_harness.h"
#include "durable_test.h"
#include "folders_test.h"
#include "kills.h"

#define MODEL "tiny-llama.gguf"
#define TURNS 3
#define TURN_IN 50u
#define NEW 64u
#define LIFE_US 60000u
#define SHORT 150u

static const struct {
    const char *policy, *trigger;
    uint32_t budget;
    bool rerotate; /* a model that was trained on SHORT tokens: three turns go past it twice */
} asks[] = {
    {"counter_causal_fast", NULL, 100, false},
    {"counter_causal", NULL, 64, false},
    {"sliding_window", NULL, 48, false},
    {"h2o", NULL, 90, false},
    {"tova", NULL, 70, false},
    {"key_similarity", NULL, 80, false},
    {"knorm", NULL, 75, false},
    {"keydiff", NULL, 130, false},
    {"random", NULL, 66, false},
    {"none", NULL, 0, false},
    {"counter_causal_fast", "prefill_end", 300, false},
    {"counter_causal_fast", NULL, 100, true},
    {"h2o", NULL, 60, true},
};
#define SLOTS ARRAY_LEN(asks)

struct slot {
    backcast_session *s;
    int turn;              /* 0..TURNS */
    bool asked, sure;      /* the prompt of this turn was sent; and accepted */
    bool opening, closing; /* in doubt */
    struct answer a;
};
static struct world {
    struct dh *d;
    pid_t killer;
    backcast *c;
    struct slot slots[SLOTS];
    struct answer truth[SLOTS][TURNS];
    int32_t prompt[SLOTS + TURNS * TURN_IN];
    uint64_t x;
    uint32_t n_kills, kills, answers, sessions, cut_opens, cut_prompts, cut_closes, cut_answers;
    char root[FOLDER_PATH], state[FOLDER_PATH + 32], short_model[FOLDER_PATH + 32];
} w;

static uint32_t below(uint32_t n)
{
    w.x = w.x * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(w.x >> 33) % n;
}

static struct backcast_session_options options_of(size_t i, bool durable, char name[16])
{
    struct backcast_session_options o = answer_budget(asks[i].policy, asks[i].budget);
    o.trigger = asks[i].trigger;
    o.seed = 11;
    if (asks[i].rerotate) {
        o.positions = "rerotate";
        o.model = w.short_model;
    }
    if (durable) {
        snprintf(name, 16, "work-%zu", i);
        o.name = name;
        o.durable = 1;
    }
    return o;
}

static int ask(backcast_session *s, size_t i, int turn)
{
    struct backcast_generate_options go = answer_options(NEW);
    return backcast_prompt_ids(s, w.prompt + i + (size_t)turn * TURN_IN, TURN_IN, &go);
}

static void truth_make(void)
{
    char name[16];
    backcast *c = NULL;
    assert_int_equal(backcast_connect(&c, w.d->socket), 0);
    for (size_t i = 0; i < SLOTS; i++) {
        struct backcast_session_options o = options_of(i, false, name);
        backcast_session *s = NULL;
        assert_int_equal(backcast_session_open(c, &o, &s), 0);
        for (int k = 0; k < TURNS; k++) {
            assert_int_equal(ask(s, i, k), 0);
            answer_read(c, s, &w.truth[i][k]);
            assert_string_equal(w.truth[i][k].reason, "length");
        }
        backcast_session_close(&s);
    }
    backcast_disconnect(&c);
}

/* ---- the client */

static struct slot *slot_of(const backcast_session *s)
{
    for (size_t i = 0; i < SLOTS; i++)
        if (w.slots[i].s == s)
            return &w.slots[i];
    fail_msg("an event of no session");
    return NULL;
}

/* An event: never another token than the undisturbed run's. */
static void take(const struct backcast_event *ev)
{
    struct slot *p = slot_of(ev->session);
    size_t i = (size_t)(p - w.slots);
    if (!p->asked)
        fail_msg("session %zu, turn %d, kill %u: event %d (seq %llu), and nothing was asked: %s %s "
                 "in %u out %u",
                 i, p->turn, w.kills, ev->type, (unsigned long long)ev->seq, ev->end.reason,
                 ev->end.text, ev->end.tokens_in, ev->end.tokens_out);
    const struct answer *t = &w.truth[i][p->turn];
    answer_event(&p->a, ev);
    if (p->a.n_ids > t->n_ids || (p->a.n_ids > 0 && memcmp(p->a.ids, t->ids, p->a.n_ids * 4) != 0))
        fail_msg("session %zu, turn %d: another token among the first %zu", i, p->turn, p->a.n_ids);
    if (!p->a.ended)
        return;
    if (!answer_equal(&p->a, t) || p->a.tokens_cached != t->tokens_cached)
        fail_msg("session %zu, turn %d: %zu tokens and %s: %s", i, p->turn, p->a.n_ids, p->a.reason,
                 p->a.error);
    answer_free(&p->a);
    p->turn++;
    p->asked = p->sure = false;
    w.answers++;
}

/* 0, or ECLOSED: it was killed. Anything else fails. */
static int alive(int rc, const char *what)
{
    if (rc < 0 && rc != BACKCAST_ECLOSED)
        fail_msg("%s: %s", what, backcast_last_error(w.c));
    return rc < 0 ? rc : 0;
}

static int slot_open(struct slot *p, size_t i)
{
    char name[16];
    struct backcast_session_options o = options_of(i, true, name);
    p->opening = true;
    int rc = alive(backcast_session_open(w.c, &o, &p->s), "open");
    if (rc < 0)
        return rc;
    p->opening = false;
    p->turn = 0;
    w.sessions++;
    return 0;
}

static int slot_close(struct slot *p)
{
    p->closing = true;
    int rc = backcast_close_by_id(w.c, backcast_session_id(p->s));
    if (rc != BACKCAST_EUNKNOWN && (rc = alive(rc, "close")) < 0)
        return rc;
    backcast_session_close(&p->s);
    *p = (struct slot){0};
    return 0;
}

static int slot_step(size_t i)
{
    struct slot *p = &w.slots[i];
    if (p->s == NULL)
        return slot_open(p, i);
    if (p->closing || (p->turn == TURNS && !p->asked))
        return slot_close(p);
    if (p->asked)
        return 0;
    p->asked = true;
    int rc = alive(ask(p->s, i, p->turn), "prompt");
    p->sure = rc == 0;
    return rc;
}

static int read_some(uint32_t n)
{
    struct backcast_event ev;
    int rc = 1;
    while (n-- > 0 && (rc = backcast_next(w.c, &ev, 1)) == 1)
        take(&ev);
    return rc < 0 ? alive(rc, "events") : 0;
}

/* ---- after a kill */

static bool stat_of(const backcast_session *s, struct backcast_session_stat *ret, int *rc)
{
    struct backcast_stats st;
    if ((*rc = alive(backcast_stats(w.c, &st), "stat")) < 0)
        return false;
    for (size_t k = 0; k < st.n_sessions; k++)
        if (st.sessions[k].id == backcast_session_id(s)) {
            *ret = st.sessions[k];
            return true;
        }
    fail_msg("a session that is attached to is not listed");
    return false;
}

/* Whether the prompt that the kill cut was accepted. */
static int settle_prompt(struct slot *p)
{
    struct backcast_session_stat st;
    int rc;
    for (;;) {
        if (!stat_of(p->s, &st, &rc))
            return rc;
        if (strcmp(st.state, "idle") == 0)
            break;
        if (strcmp(st.state, "returning") != 0) {
            p->sure = true; /* it runs */
            return 0;
        }
        if ((rc = read_some(8)) < 0)
            return rc;
        if (!p->asked)
            return 0; /* its END came */
    }
    assert_int_equal(st.tokens_in % TURN_IN, 0);
    p->sure = st.tokens_in == (uint64_t)(p->turn + 1) * TURN_IN;
    if (!p->sure)
        assert_int_equal(st.tokens_in, (uint64_t)p->turn * TURN_IN);
    p->asked = p->sure; /* accepted: its END is on the way */
    return 0;
}

static int settle(void)
{
    for (size_t i = 0; i < SLOTS; i++) {
        struct slot *p = &w.slots[i];
        char name[16];
        int rc = 0;
        if (p->opening) {
            options_of(i, true, name);
            rc = backcast_session_attach(w.c, name, &p->s);
            if (rc != BACKCAST_EUNKNOWN && (rc = alive(rc, "attach")) < 0)
                return rc;
            p->opening = false;
            w.sessions += p->s != NULL;
        } else if (p->asked && !p->sure && (rc = settle_prompt(p)) < 0) {
            return rc;
        }
    }
    return 0;
}

static int all_back(void)
{
    struct backcast_stats st;
    for (;;) {
        size_t n = 0;
        int rc = alive(backcast_stats(w.c, &st), "stat");
        for (size_t k = 0; rc == 0 && k < st.n_sessions; k++)
            n += strcmp(st.sessions[k].state, "returning") == 0;
        if (rc < 0 || n == 0)
            return rc;
        if ((rc = read_some(8)) < 0)
            return rc;
    }
}

static void killer_start(void)
{
    uint32_t us = below(LIFE_US);
    fflush(NULL);
    w.killer = fork();
    if (w.killer == 0) {
        usleep(us);
        kill(w.d->pid, SIGKILL);
        _exit(0);
    }
    assert_true(w.killer > 0);
}

static void count_cuts(void)
{
    for (size_t i = 0; i < SLOTS; i++) {
        const struct slot *p = &w.slots[i];
        w.cut_opens += p->opening;
        w.cut_closes += p->closing;
        w.cut_prompts += p->asked && !p->sure;
        w.cut_answers += p->asked && p->sure;
    }
}

static void next_life(bool first)
{
    const char *args[] = {w.state, NULL};
    if (!first) {
        assert_int_equal(waitpid(w.killer, NULL, 0), w.killer);
        int status = dh_wait(w.d, 20000);
        assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        count_cuts();
        w.kills++;
        dh_again(w.d, MODEL, args);
        dh_ready(w.d);
    }
    bool armed = w.kills % 3 != 0 && w.kills < w.n_kills;
    if (armed)
        killer_start();
    int n = first ? 0 : backcast_reconnect(w.c), must = 0;
    for (size_t i = 0; i < SLOTS; i++)
        must += w.slots[i].s != NULL && !w.slots[i].closing;
    if (n < 0 && armed)
        return; /* killed again already */
    if (n < must)
        fail_msg("kill %u: %d of %d sessions are back: %s", w.kills, n, must,
                 backcast_last_error(w.c));
    if (!armed)
        assert_int_equal(all_back(), 0);
    if (!armed && w.kills < w.n_kills)
        killer_start();
}

/* Until the daemon is killed; quiet: until every session has had all its turns. */
static void live(bool quiet)
{
    int rc = settle();
    size_t i = below(SLOTS), done = 0;
    while (rc == 0 && done < SLOTS) {
        struct slot *p = &w.slots[i];
        bool over = quiet && p->s == NULL;
        done = over ? done + 1 : 0;
        if (!over)
            rc = slot_step(i);
        if (rc == 0)
            rc = read_some(below(30));
        i = (i + 1) % SLOTS;
    }
    assert_true(quiet ? rc == 0 : rc == BACKCAST_ECLOSED);
}

static struct inner {
    uint64_t seed;
    uint32_t n;
} inner;

static void killed_at_random_moments(void **state)
{
    (void)state;
    w.x = inner.seed;
    w.n_kills = inner.n;
    print_message("seed %llu\n", (unsigned long long)inner.seed);
    prompt_fill(w.prompt, ARRAY_LEN(w.prompt), 5);
    folder_root(w.root, "kills");
    snprintf(w.state, sizeof w.state, "--state-dir=%s/state", w.root);
    snprintf(w.short_model, sizeof w.short_model, "%s/short.gguf", w.root);
    dh_context_model(w.short_model, MODEL, SHORT);
    const char *args[] = {w.state, NULL};
    w.d = dh_start(MODEL, args);
    truth_make();
    assert_int_equal(backcast_connect(&w.c, w.d->socket), 0);
    for (bool first = true; w.kills < w.n_kills; first = false) {
        next_life(first);
        if (w.kills < w.n_kills)
            live(false);
    }
    live(true);
    print_message(
        "%u kills, %u sessions, %u answers; cut: %u opens, %u prompts, %u answers, %u closes\n",
        w.kills, w.sessions, w.answers, w.cut_opens, w.cut_prompts, w.cut_answers, w.cut_closes);
    assert_true(w.cut_answers > 0);
    backcast_disconnect(&w.c);
    dh_stop(&w.d);
    char saved[FOLDER_PATH + 32];
    snprintf(saved, sizeof saved, "%s/state/durable", w.root);
    assert_int_equal(folder_files(saved), 0); /* all were closed: nothing is left */
    for (size_t i = 0; i < SLOTS; i++)
        for (int k = 0; k < TURNS; k++)
            answer_free(&w.truth[i][k]);
    folder_drop(w.root);
}

int kills_main(int argc, char **argv, uint64_t seed, uint32_t n_kills)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(killed_at_random_moments)};
    inner = (struct inner){seed != 0 ? seed : (uint64_t)time(NULL), n_kills};
    if (argc == 3 && strcmp(argv[1], "--seed") == 0)
        inner.seed = strtoull(argv[2], NULL, 10);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
