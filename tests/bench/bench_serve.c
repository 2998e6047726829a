/* bench_serve MODEL [--threads 2] [--rounds 9] [--sessions 32] [--new 48]
 *
 * A real backcastd, seen through its socket and rings, beside the same engine in this process. A round is served, alone, alone,
 * served (then alone, served, served, alone), so that what changes on the machine meanwhile changes both:
 *
 *     serve,N sessions,tokens_per_s      all sessions' tokens / (from the first prompt to the last END)
 *     serve,N sessions,engine_per_s      the same work by the engine alone, without socket, rings and a second process
 *     serve,N sessions,tax_percent       what serving costs: 1 - engine's time / served time of a round, median over the rounds
 *     serve,N sessions,tax_low_percent, tax_high_percent   the quartiles
 *     serve,N sessions,first_token_ms    from the call to the first token, median over sessions
 *     serve,N sessions,gap_p50_ms, gap_p99_ms   between two tokens of one session
 *
 *     serve,neighbour,step_ms            gap of a session that decodes alone with a full neighbour at rest, median
 *     serve,neighbour,worst_gap_ms       its longest gap while the neighbour's 4,096 tokens are refreshed (full, logit)
 *     serve,neighbour,refresh_ms         what that refresh took
 *
 *
 * More than 8 sessions: a third of the rounds. Prompts are 64 tokens; a session's answer is --new tokens. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "daemon_harness.h"
#include "engine_harness.h"
#include "serve.h"

#define PROMPT 64u
#define NEIGHBOUR 4096u

struct serve {
    const char *model;
    char threads[24];
    uint32_t n_threads, rounds, sessions, n_new;
    backcast *c;
    struct eh *engine;
    struct samples first, gap, served, alone, tax;
};

/* One round of n sessions through the daemon: tokens a second. */
static double served_run(struct serve *b, uint32_t n)
{
    backcast_session *s[SERVE_SESSIONS_MAX];
    uint64_t sent[SERVE_SESSIONS_MAX], last[SERVE_SESSIONS_MAX] = {0};
    uint32_t ended = 0;
    struct backcast_event ev;

    for (uint32_t i = 0; i < n; i++)
        s[i] = serve_open(b->c, "none", PROMPT + b->n_new + 64);
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
            else
                sample(&b->gap, (double)(now - last[i]) * 1e-3);
            last[i] = now;
        }
        ended += ev.type == BACKCAST_END;
    }
    uint64_t end = clock_us();
    for (uint32_t i = 0; i < n; i++)
        backcast_session_close(&s[i]);
    return n * b->n_new * 1e6 / (double)(end - start);
}

static double engine_run(struct serve *b, uint32_t n)
{
    uint64_t s[SERVE_SESSIONS_MAX];
    int32_t ids[PROMPT];
    struct generate_options o = eh_greedy(b->n_new);
    bool all = false;

    for (uint32_t i = 0; i < n; i++)
        s[i] = eh_session(b->engine, &(struct eh_ask){.policy = "none",
                                                      .budget_tokens = PROMPT + b->n_new + 64});
    uint64_t start = clock_us();
    for (uint32_t i = 0; i < n; i++) {
        serve_prompt(ids, PROMPT);
        eh_ids(b->engine, s[i], ids, PROMPT, &o);
    }
    while (!all) {
        eh_step(b->engine);
        eh_collect(b->engine);
        all = true;
        for (uint32_t i = 0; i < n; i++)
            all = all && eh_stream(b->engine, s[i])->n_ends > 0;
    }
    uint64_t end = clock_us();
    for (uint32_t i = 0; i < n; i++)
        eh_close_session(b->engine, s[i]);
    return n * b->n_new * 1e6 / (double)(end - start);
}

static void count_run(struct serve *b, uint32_t n)
{
    b->first.n = b->gap.n = b->served.n = b->alone.n = b->tax.n = 0;
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
        else if (strcmp(a, "--sessions") == 0)
            b->sessions = n;
        else if (strcmp(a, "--new") == 0)
            b->n_new = n;
        else
            return false;
    }
    return b->model != NULL && b->n_threads > 0 && b->rounds > 0 && b->n_new > 1 &&
           b->n_new <= 1024 && b->sessions > 0 && b->sessions <= SERVE_SESSIONS_MAX;
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
        fprintf(stderr,
                "usage: bench_serve MODEL.gguf [--threads N] [--rounds N] [--sessions 1..32] "
                "[--new 2..1024]\n");
        return 2;
    }
    snprintf(b.threads, sizeof(b.threads), "--threads=%u", b.n_threads);
    const char *args[] = {b.threads, NULL};
    struct dh *d = dh_start(b.model, args);
    if (backcast_connect(&b.c, d->socket) < 0)
        serve_die(NULL, "connect");
    b.engine = eh_open(b.model, tweak, &b);
    served_run(&b, 1); /* warm */
    engine_run(&b, 1);
    for (uint32_t n = 1; n <= b.sessions; n *= 2)
        count_run(&b, n);
    neighbour_run(&b);
    eh_close(&b.engine);
    backcast_disconnect(&b.c);
    dh_stop(&d);
    return 0;
}
