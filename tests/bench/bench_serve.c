/* bench_serve MODEL [--threads 2] [--rounds 9] [--from 1] [--sessions 32] [--new 48]
 *
 * A real backcastd, seen through its socket and rings, beside the same engine in this process. A round is served, alone, alone,
 * served (then alone, served, served, alone), so that what changes on the machine meanwhile changes both:
 *
 *     serve,N sessions,tokens_per_s      all sessions' tokens / (from the first prompt to the last END)
 *     serve,N sessions,engine_per_s      the same work by the engine alone, without socket, rings and a second process
 *     serve,N sessions,tax_percent       what serving costs: 1 - engine's time / served time of a round, median over the rounds
 *     serve,N sessions,tax_low_percent, tax_high_percent   the quartiles
 *     serve,N sessions,first_token_ms    from the call to the first token, median over sessions
 *     serve,N sessions,gap_p50_ms, gap_p99_ms   between two tokens of one session, once all have had their first
 *     serve,N sessions,first_token_alone_ms, gap_alone_p50_ms   the same of the engine alone
 *     serve,N sessions,loop_us_per_token, loop_waited_us_per_token, loop_runs_per_token   processor time of the daemon's loop
 *                                        thread, time that it waited for a core, times that it got one; so engine_... (the
 *                                        engine's and what helps it), kernels_... (its team) and client_...
 *     serve,N sessions,engine_alone_us_per_token   processor time of the engine alone, all its threads
 *     serve,N sessions,steps_per_token, steps_alone_per_token   passes: whether both did the same work
 *
 *     serve,neighbour,step_ms            gap of a session that decodes alone with a full neighbour at rest, median
 *     serve,neighbour,worst_gap_ms       its longest gap while the neighbour's 4,096 tokens are refreshed (full, logit)
 *     serve,neighbour,refresh_ms         what that refresh took
 *
 *
 * More than 8 sessions: a third of the rounds. Prompts are 64 tokens; a session's answer is --new tokens. --from N: numbers of sessions
 * from N on, no neighbour. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <unistd.h>
#include "daemon_harness.h"
#include "engine_harness.h"
#include "serve.h"
#include "threads.h"

#define PROMPT 64u
#define NEIGHBOUR 4096u

struct serve {
    const char *model;
    char threads[24];
    uint32_t n_threads, rounds, from, sessions, n_new;
    struct dh *d;
    backcast *c;
    struct eh *engine;
    struct samples first, gap, served, alone, tax, first_alone, gap_alone;
    struct thread_time daemon[THREADS_KINDS], client[THREADS_KINDS], engine_alone;
    uint64_t served_tokens, served_steps, alone_tokens, alone_steps;
};

static void times_add(struct thread_time *sum, const struct thread_time *from,
                      const struct thread_time *to)
{
    sum->ran_ns += to->ran_ns - from->ran_ns;
    sum->waited_ns += to->waited_ns - from->waited_ns;
    sum->runs += to->runs - from->runs;
}

static uint64_t steps_of(struct serve *b)
{
    struct backcast_stats st;
    if (backcast_stats(b->c, &st) < 0)
        serve_die(b->c, "stats");
    return st.steps;
}

/* One round of n sessions through the daemon: tokens a second. */
static double served_run(struct serve *b, uint32_t n)
{
    backcast_session *s[SERVE_SESSIONS_MAX];
    uint64_t sent[SERVE_SESSIONS_MAX], last[SERVE_SESSIONS_MAX] = {0};
    uint32_t ended = 0, begun = 0;
    struct backcast_event ev;

    for (uint32_t i = 0; i < n; i++)
        s[i] = serve_open(b->c, "none", PROMPT + b->n_new + 64);
    struct thread_time d0[THREADS_KINDS], d1[THREADS_KINDS], c0[THREADS_KINDS], c1[THREADS_KINDS];
    uint64_t steps0 = steps_of(b);
    threads_read(b->d->pid, d0);
    threads_read(getpid(), c0);
    uint64_t start = clock_us();
    for (uint32_t i = 0; i < n; i++) {
        sent[i] = clock_us();
        serve_ask(b->c, s[i], PROMPT, b->n_new);
    }
    while (ended < n) {
        serve_next(b->c, &ev);
        uint64_t now = clock_us();
        for (uint32_t i = 0; i < n; i++) {
            if (s[i] != ev.session || ev.type != BACKCAST_TEXT)
                continue;
            if (last[i] == 0)
                sample(&b->first, (double)(now - sent[i]) * 1e-3);
            else if (begun == n)
                sample(&b->gap, (double)(now - last[i]) * 1e-3);
            begun += last[i] == 0;
            last[i] = now;
        }
        ended += ev.type == BACKCAST_END;
    }
    uint64_t end = clock_us();
    threads_read(b->d->pid, d1);
    threads_read(getpid(), c1);
    for (int k = 0; k < THREADS_KINDS; k++) {
        times_add(&b->daemon[k], &d0[k], &d1[k]);
        times_add(&b->client[k], &c0[k], &c1[k]);
    }
    b->served_tokens += (uint64_t)n * b->n_new;
    b->served_steps += steps_of(b) - steps0;
    for (uint32_t i = 0; i < n; i++)
        backcast_session_close(&s[i]);
    return n * b->n_new * 1e6 / (double)(end - start);
}

static double engine_run(struct serve *b, uint32_t n)
{
    uint64_t s[SERVE_SESSIONS_MAX];
    int32_t ids[PROMPT];
    struct generate_options o = eh_greedy(b->n_new);
    uint64_t last[SERVE_SESSIONS_MAX] = {0};
    uint32_t had[SERVE_SESSIONS_MAX] = {0}, begun = 0;
    bool all = false;

    for (uint32_t i = 0; i < n; i++)
        s[i] = eh_session(b->engine, &(struct eh_ask){.policy = "none",
                                                      .budget_tokens = PROMPT + b->n_new + 64});
    struct thread_time t0[THREADS_KINDS], t1[THREADS_KINDS];
    uint64_t steps0 = b->engine->steps;
    threads_read(getpid(), t0);
    uint64_t start = clock_us();
    for (uint32_t i = 0; i < n; i++) {
        serve_prompt(ids, PROMPT);
        eh_ids(b->engine, s[i], ids, PROMPT, &o);
    }
    while (!all) {
        eh_step(b->engine);
        eh_collect(b->engine);
        uint64_t now = clock_us();
        all = true;
        for (uint32_t i = 0; i < n; i++) {
            const struct eh_stream *st = eh_stream(b->engine, s[i]);
            all = all && st->n_ends > 0;
            if (st->n_ids == had[i])
                continue;
            if (last[i] == 0)
                sample(&b->first_alone, (double)(now - start) * 1e-3);
            else if (begun == n)
                sample(&b->gap_alone, (double)(now - last[i]) * 1e-3);
            begun += last[i] == 0;
            last[i] = now;
            had[i] = st->n_ids;
        }
    }
    uint64_t end = clock_us();
    threads_read(getpid(), t1);
    for (int k = 0; k < THREADS_KINDS; k++)
        times_add(&b->engine_alone, &t0[k], &t1[k]);
    b->alone_tokens += (uint64_t)n * b->n_new;
    b->alone_steps += b->engine->steps - steps0;
    for (uint32_t i = 0; i < n; i++)
        eh_close_session(b->engine, s[i]);
    return n * b->n_new * 1e6 / (double)(end - start);
}

static void cost_print(const struct serve *b, uint32_t n)
{
    static const char *const names[THREADS_KINDS] = {"loop", "engine", "kernels"};
    double t = (double)b->served_tokens;
    for (int k = 0; k < THREADS_KINDS; k++) {
        printf("serve,%u sessions,%s_us_per_token,%.2f\n", n, names[k],
               (double)b->daemon[k].ran_ns * 1e-3 / t);
        printf("serve,%u sessions,%s_waited_us_per_token,%.2f\n", n, names[k],
               (double)b->daemon[k].waited_ns * 1e-3 / t);
        printf("serve,%u sessions,%s_runs_per_token,%.2f\n", n, names[k],
               (double)b->daemon[k].runs / t);
    }
    printf("serve,%u sessions,client_us_per_token,%.2f\n", n,
           (double)b->client[THREADS_LOOP].ran_ns * 1e-3 / t);
    printf("serve,%u sessions,client_runs_per_token,%.2f\n", n,
           (double)b->client[THREADS_LOOP].runs / t);
    printf("serve,%u sessions,engine_alone_us_per_token,%.2f\n", n,
           (double)b->engine_alone.ran_ns * 1e-3 / (double)b->alone_tokens);
    printf("serve,%u sessions,steps_per_token,%.4f\n", n, (double)b->served_steps / t);
    printf("serve,%u sessions,steps_alone_per_token,%.4f\n", n,
           (double)b->alone_steps / (double)b->alone_tokens);
}

static void count_run(struct serve *b, uint32_t n)
{
    memset(b->daemon, 0, sizeof b->daemon);
    memset(b->client, 0, sizeof b->client);
    memset(&b->engine_alone, 0, sizeof b->engine_alone);
    b->served_tokens = b->served_steps = b->alone_tokens = b->alone_steps = 0;
    b->first.n = b->gap.n = b->first_alone.n = b->gap_alone.n = b->served.n = b->alone.n =
        b->tax.n = 0;
    uint32_t rounds = n > 8 ? (b->rounds + 2) / 3 : b->rounds; /* they take long */
    for (uint32_t i = 0; i < rounds; i++) {
        double served = 0, alone = 0; /* seconds a token */
        for (uint32_t k = 0; k < 4; k++) {
            bool outer = k == 0 || k == 3;
            if (outer == (i % 2 == 0))
                served += 1 / served_run(b, n);
            else
                alone += 1 / engine_run(b, n);
        }
        sample(&b->served, 2 / served);
        sample(&b->alone, 2 / alone);
        sample(&b->tax, 100 * (1 - alone / served));
    }
    printf("serve,%u sessions,tokens_per_s,%.2f\n", n, samples_quantile(&b->served, 0.5));
    printf("serve,%u sessions,engine_per_s,%.2f\n", n, samples_quantile(&b->alone, 0.5));
    printf("serve,%u sessions,tax_percent,%.2f\n", n, samples_quantile(&b->tax, 0.5));
    printf("serve,%u sessions,tax_low_percent,%.2f\n", n, samples_quantile(&b->tax, 0.25));
    printf("serve,%u sessions,tax_high_percent,%.2f\n", n, samples_quantile(&b->tax, 0.75));
    printf("serve,%u sessions,first_token_ms,%.3f\n", n, samples_quantile(&b->first, 0.5));
    printf("serve,%u sessions,gap_p50_ms,%.3f\n", n, samples_quantile(&b->gap, 0.5));
    printf("serve,%u sessions,gap_p99_ms,%.3f\n", n, samples_quantile(&b->gap, 0.99));
    printf("serve,%u sessions,first_token_alone_ms,%.3f\n", n,
           samples_quantile(&b->first_alone, 0.5));
    printf("serve,%u sessions,gap_alone_p50_ms,%.3f\n", n, samples_quantile(&b->gap_alone, 0.5));
    cost_print(b, n);
    fflush(stdout);
}

/* A session decodes while its neighbour, whose cache is full, is asked for one token more. */
static void neighbour_run(struct serve *b)
{
    backcast_session *big = serve_open(b->c, "counter_causal", NEIGHBOUR);
    backcast_session *s = serve_open(b->c, "none", 4096);
    struct backcast_event ev;
    uint64_t last = 0, micros = 0;
    uint32_t n = 0;
    double worst = 0;

    serve_ask(b->c, big, NEIGHBOUR, 0);
    serve_finish(b->c, big);
    b->gap.n = 0;
    serve_ask(b->c, s, PROMPT, 2048);
    while (micros == 0) {
        serve_next(b->c, &ev);
        uint64_t now = clock_us();
        if (ev.type == BACKCAST_PRUNED)
            micros = ev.pruned.micros;
        if (ev.type != BACKCAST_TEXT || ev.session != s)
            continue;
        double gap = last != 0 ? (double)(now - last) * 1e-3 : 0;
        last = now;
        n++;
        if (n > 1 && n <= 64)
            sample(&b->gap, gap);
        else if (n > 64)
            worst = BC_MAX(worst, gap);
        if (n == 64)
            serve_ask(b->c, big, 1, 0);
    }
    printf("serve,neighbour,step_ms,%.3f\n", samples_quantile(&b->gap, 0.5));
    printf("serve,neighbour,worst_gap_ms,%.3f\n", worst);
    printf("serve,neighbour,refresh_ms,%.3f\n", (double)micros * 1e-3);
    backcast_session_close(&big);
    backcast_session_close(&s);
}

static bool parse(struct serve *b, int argc, char **argv)
{
    b->n_threads = 2;
    b->rounds = 9;
    b->from = 1;
    b->sessions = SERVE_SESSIONS_MAX;
    b->n_new = 48;
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i];
        if (a[0] != '-') {
            b->model = a;
            continue;
        }
        if (i + 1 == argc)
            return false;
        uint32_t n = (uint32_t)strtoul(argv[++i], NULL, 10);
        if (strcmp(a, "--threads") == 0)
            b->n_threads = n;
        else if (strcmp(a, "--rounds") == 0)
            b->rounds = n;
        else if (strcmp(a, "--from") == 0)
            b->from = n;
        else if (strcmp(a, "--sessions") == 0)
            b->sessions = n;
        else if (strcmp(a, "--new") == 0)
            b->n_new = n;
        else
            return false;
    }
    return b->model != NULL && b->n_threads > 0 && b->rounds > 0 && b->n_new > 1 &&
           b->n_new <= 1024 && b->from > 0 && b->sessions > 0 && b->sessions <= SERVE_SESSIONS_MAX;
}

static void tweak(struct engine_options *o, void *arg)
{
    o->backend = "cpu";
    o->threads = ((const struct serve *)arg)->n_threads;
    o->kv_memory = 512u << 20;
}

int main(int argc, char **argv)
{
    static struct serve b;

    if (!parse(&b, argc, argv)) {
        fprintf(stderr, "usage: bench_serve MODEL.gguf [--threads N] [--rounds N] [--from N] "
                        "[--sessions 1..32] "
                        "[--new 2..1024]\n");
        return 2;
    }
    snprintf(b.threads, sizeof(b.threads), "--threads=%u", b.n_threads);
    const char *args[] = {b.threads, NULL};
    struct dh *d = b.d = dh_start(b.model, args);
    if (backcast_connect(&b.c, d->socket) < 0)
        serve_die(NULL, "connect");
    b.engine = eh_open(b.model, tweak, &b);
    served_run(&b, 1); /* warm */
    engine_run(&b, 1);
    for (uint32_t n = b.from; n <= b.sessions; n *= 2)
        count_run(&b, n);
    if (b.from == 1)
        neighbour_run(&b);
    eh_close(&b.engine);
    backcast_disconnect(&b.c);
    dh_stop(&d);
    return 0;
}
