/* Durable sessions: the engine ends at any step, another one opens what it left (the state folder as a
 * kill would leave it: a copy of that moment), and everything that was said is there; the rest of the
 * answer, and the answers after it, are those of a run that nothing disturbed, for every policy. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "core.h"
#include "engine_harness.h"
#include "records.h"

#define TURNS 3
#define NEW 40
#define STREAM_MAX 2000

static const struct eh_ask asks[] = {
    {.policy = "counter_causal_fast", .budget_tokens = 100},
    {.policy = "counter_causal", .budget_tokens = 64, .kv_type = "f32", .score = "logprob"},
    {.policy = "sliding_window", .budget_tokens = 48, .frozen = 4},
    {.policy = "h2o", .budget_tokens = 90},
    {.policy = "tova", .budget_tokens = 70},
    {.policy = "key_similarity", .budget_tokens = 80},
    {.policy = "knorm", .budget_tokens = 75},
    {.policy = "keydiff", .budget_tokens = 130, .keep = 65},
    {.policy = "random", .budget_tokens = 66, .seed = 11},
    {.policy = "none"},
    {.policy = "counter_causal_fast", .trigger = "prefill_end", .keep = 60, .budget_tokens = 500},
};

static int32_t prompt[2000];
static char root[64];

static int setup(void **state)
{
    (void)state;
    uint32_t x = 77;
    for (size_t i = 0; i < ARRAY_LEN(prompt); i++) {
        x = x * 1664525u + 1013904223u;
        prompt[i] = (int32_t)(3 + (x >> 8) % 280);
    }
    strcpy(root, "/tmp/backcast-durable-XXXXXX");
    return mkdtemp(root) != NULL ? 0 : -1;
}

static void shell(const char *fmt, const char *a, const char *b)
{
    char command[400];
    snprintf(command, sizeof command, fmt, a, b);
    assert_int_equal(system(command), 0);
}

static int teardown(void **state)
{
    (void)state;
    shell("rm -rf '%s'%s", root, "");
    return 0;
}

/* ---- folders ---- */

static void folder_fresh(char *ret, const char *name)
{
    snprintf(ret, 96, "%s/%s", root, name);
    shell("rm -rf '%s' && mkdir '%s'", ret, ret);
}

static void file_copy(const char *from, const char *to)
{
    char bytes[65536];
    int in = open(from, O_RDONLY), out = open(to, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_true(in >= 0 && out >= 0);
    for (ssize_t n; (n = read(in, bytes, sizeof bytes)) > 0;)
        assert_int_equal(write(out, bytes, (size_t)n), n);
    close(in);
    close(out);
}

/* What a kill at this moment would leave. */
static void folder_copy(const char *from, const char *to)
{
    char a[400], b[400];
    struct dirent *e;
    DIR *d = opendir(from);
    assert_non_null(d);
    mkdir(to, 0700);
    while ((e = readdir(d)) != NULL) {
        if (e->d_name[0] == '.')
            continue;
        snprintf(a, sizeof a, "%s/%s", from, e->d_name);
        snprintf(b, sizeof b, "%s/%s", to, e->d_name);
        struct stat st;
        assert_int_equal(stat(a, &st), 0);
        if (S_ISDIR(st.st_mode))
            folder_copy(a, b);
        else
            file_copy(a, b);
    }
    closedir(d);
}

static unsigned folder_files(const char *path)
{
    char a[400];
    unsigned n = 0;
    struct dirent *e;
    DIR *d = opendir(path);
    if (d == NULL)
        return 0;
    while ((e = readdir(d)) != NULL) {
        if (e->d_name[0] == '.')
            continue;
        snprintf(a, sizeof a, "%s/%s", path, e->d_name);
        struct stat st;
        assert_int_equal(stat(a, &st), 0);
        n += S_ISDIR(st.st_mode) ? folder_files(a) : 1;
    }
    closedir(d);
    return n;
}

/* ---- engines ---- */

static uint64_t spill_after;
static const struct disk_io *use_io;

static void tweak(struct engine_options *o, void *arg)
{
    o->state_dir = arg;
    o->io = use_io;
    o->spill_after_us = spill_after;
    o->host_tier = spill_after != 0 ? 64 << 20 : 0;
    o->score_rows = 30;
    o->prefill_chunk = 32;
}

static struct eh *engine_on(char *dir)
{
    return eh_open("tiny-llama.gguf", tweak, dir);
}

static struct generate_options options_of(int k)
{
    struct generate_options o = eh_greedy(NEW);
    o.temperature = k == 1 ? 0.7f : 0;
    o.seed = 5;
    o.repeat_penalty = 1.2f;
    return o;
}

static void ask(struct eh *h, uint64_t s, int k)
{
    struct generate_options o = options_of(k);
    eh_ids(h, s, prompt + k * 60, k == 1 ? 9 : 60, &o);
}

/* What an undisturbed run says, by stream index; -1: a token of a prompt. */
struct truth {
    int32_t id[STREAM_MAX];
    uint64_t n;
    uint32_t prunes;
};

static void truth_add(struct truth *t, const struct eh_stream *s)
{
    for (uint32_t i = 0; i < s->n_ids; i++) {
        assert_true(s->streams[i] < STREAM_MAX);
        t->id[s->streams[i]] = s->ids[i];
        t->n = BC_MAX(t->n, s->streams[i] + 1);
    }
    t->prunes = s->n_prunes;
}

static void truth_make(struct truth *t, const struct eh_ask *a)
{
    struct eh *h = eh_open("tiny-llama.gguf", tweak, NULL);
    uint64_t s = eh_session(h, a);
    for (size_t i = 0; i < STREAM_MAX; i++)
        t->id[i] = -1;
    t->n = 0;
    for (int k = 0; k < TURNS; k++) {
        ask(h, s, k);
        eh_run_to_end(h, s);
    }
    truth_add(t, eh_stream(h, s));
    eh_close(&h);
}

/* Every token that came is the truth's, at its place, without a hole inside an answer. */
static void stream_check(const struct truth *t, const struct eh_stream *s, const char *what)
{
    for (uint32_t i = 0; i < s->n_ids; i++)
        if (s->streams[i] >= t->n || t->id[s->streams[i]] != s->ids[i])
            fail_msg("%s: token %u (stream %llu) is %d, not %d", what, i,
                     (unsigned long long)s->streams[i], s->ids[i],
                     s->streams[i] < t->n ? t->id[s->streams[i]] : -2);
}

/* ---- a kill at any step ---- */

struct moment {
    char copy[96];
    int turn;      /* that was asked */
    bool over;     /* and had ended */
    uint64_t told; /* stream indices below it were told */
    uint64_t seq;  /* records that the client has */
    uint64_t cached;
};

/* From the copy on: what was told is there, the answer under way goes on, the others follow. */
static void go_on(const struct truth *t, const struct moment *m, const char *what)
{
    struct eh *h = engine_on((char *)(uintptr_t)m->copy);
    uint64_t s = eh_attach(h, "work");
    if (s == 0)
        fail_msg("%s: the session is gone", what);
    struct eh_stream *st = eh_stream(h, s);
    bool busy = st->busy, ended = st->n_ends > 0;
    assert_true(st->seq >= m->seq); /* numbers go on */
    assert_true(busy || ended || m->turn < 0 || m->told == 0 || m->over);
    stream_check(t, st, what);
    if (busy) {
        eh_run_to_end(h, s);
    } else if (ended) {
        st->ends_waited = st->n_ends;
    }
    eh_run(h);
    stream_check(t, st, what);
    uint64_t last = st->n_ids > 0 ? st->streams[st->n_ids - 1] + 1 : 0;
    if (last < m->told)
        fail_msg("%s: told up to %llu, known up to %llu", what, (unsigned long long)m->told,
                 (unsigned long long)last);
    /* the turn that was asked may not have been accepted before the end */
    int next = m->turn + (busy || ended || m->over ? 1 : 0);
    for (int k = next; k < TURNS; k++) {
        ask(h, s, k);
        eh_run_to_end(h, s);
        stream_check(t, st, what);
        assert_int_equal(st->end.u.end.tokens_out, NEW);
    }
    assert_int_equal(st->streams[st->n_ids - 1] + 1, t->n);
    /* and it can be closed for good */
    eh_close_session(h, s);
    eh_close(&h);
    assert_int_equal(folder_files(m->copy), 0);
}

static void killed_at_many_steps(const struct eh_ask *a, uint32_t every, uint32_t seed)
{
    struct truth t;
    char dir[96], what[128];
    struct eh_ask durable = *a;
    uint32_t steps = 0, moments = 0;
    durable.durable = true;
    durable.name = "work";
    truth_make(&t, a);
    folder_fresh(dir, "live");
    struct eh *h = engine_on(dir);
    uint64_t s = eh_session(h, &durable);
    struct eh_stream *st = eh_stream(h, s);
    for (int k = 0; k < TURNS; k++) {
        ask(h, s, k);
        bool more = true;
        while (more) {
            more = eh_step(h);
            if (st->n_ends > st->ends_waited)
                more = false;
            if (steps++ % every != seed % every && more)
                continue;
            struct moment m = {.turn = k, .over = st->n_ends > st->ends_waited, .seq = st->seq};
            m.told = st->n_ids > 0 ? st->streams[st->n_ids - 1] + 1 : 0;
            folder_fresh(m.copy, "copy");
            folder_copy(dir, m.copy);
            snprintf(what, sizeof what, "%s, turn %d, step %u%s", a->policy, k, steps,
                     m.over ? ", over" : "");
            go_on(&t, &m, what);
            moments++;
        }
        st->ends_waited = st->n_ends;
    }
    stream_check(&t, st, a->policy);
    assert_true(moments >= 6);
    eh_close(&h);
}

static void every_policy_is_rebuilt_as_it_was(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(asks); i++)
        killed_at_many_steps(&asks[i], 17, (uint32_t)i * 5);
}

static void killed_at_every_step(void **state)
{
    (void)state;
    killed_at_many_steps(&asks[0], 1, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_policy_is_rebuilt_as_it_was),
        cmocka_unit_test(killed_at_every_step),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
