/* bench_spill MODEL [--threads 2] [--rounds 5] [--tokens 2048] [--folder DIR]
 *
 * What a neighbour feels when a cache leaves its pages for a tier and comes back. A real backcastd; one session decodes
 * without end, the other holds --tokens tokens, is left alone until it has gone, and is asked again. For the tiers `host`
 * and `disk` (a file without a name in --folder):
 *
 *     spill,TIER,step_ms          gap between two tokens of the neighbour, the other cache at rest: median
 *     spill,TIER,rest_worst_ms    the longest of a round at rest, median over the rounds: what the machine does by itself
 *     spill,TIER,leave_worst_ms   the longest of a round while it leaves, median over the rounds; and of all rounds:
 *     spill,TIER,leave_worst_of_all_ms
 *     spill,TIER,here_worst_ms    the longest around a request of one token to the other session, its cache in its pages
 *     spill,TIER,back_worst_ms    the same, its cache in the tier; and of all rounds:
 *     spill,TIER,back_worst_of_all_ms
 *     spill,TIER,here_ms, back_ms   from asking to the END of that request: back - here is what coming back takes */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <pthread.h>
#include <stdatomic.h>
#include "daemon_harness.h"
#include "serve.h"

#define NEAR_US 900000u       /* of --spill-after: from here on it may leave at any moment */
#define LEAVES_US 20000000u   /* it has gone by then */
#define NEIGHBOUR_TOKENS 7000 /* more than all rounds take: asked again when they end */

struct bench {
    const char *model, *folder;
    char threads[24];
    uint32_t n_threads, rounds, tokens;
    backcast *c,
        *c_other; /* a prompt is accepted when the cache is back: it waits on a thread of its own */
    backcast_session *neighbour, *other;
    double took_ms;    /* of that thread */
    atomic_bool ended; /* it has */
    uint64_t last;     /* when the neighbour had its last token; 0: it has just begun again */
    double worst;      /* since it was set to 0 */
    struct samples gap, rest, leave, here, back, here_took, back_took;
};

static void neighbour_begin(struct bench *b)
{
    if (b->neighbour != NULL)
        backcast_session_close(&b->neighbour);
    b->neighbour = serve_open(b->c, "none", 8192);
    b->last = 0;
    serve_ask(b->c, b->neighbour, 32, NEIGHBOUR_TOKENS);
}

/* The next event; the gap before it, where it is a token of the neighbour (else 0). */
static double next_gap(struct bench *b)
{
    struct backcast_event ev;
    serve_next(b->c, &ev);
    if (ev.type != BACKCAST_TEXT || ev.session != b->neighbour)
        return 0;
    uint64_t now = clock_us();
    double gap = b->last != 0 ? (double)(now - b->last) * 1e-3 : 0;
    b->last = now;
    b->worst = BC_MAX(b->worst, gap);
    return gap;
}

static bool gone(struct bench *b)
{
    struct backcast_stats st;
    struct backcast_session_info info;
    backcast_session_info(b->other, &info);
    if (backcast_stats_page(b->c, &st) < 0)
        serve_die(b->c, "stats page");
    for (size_t i = 0; i < st.n_sessions; i++)
        if (st.sessions[i].id == info.id)
            return strcmp(st.sessions[i].state, "spilled") == 0;
    return false;
}

static void *other_main(void *arg)
{
    struct bench *b = arg;
    uint64_t start = clock_us();
    serve_ask(b->c_other, b->other, 1, 0);
    serve_finish(b->c_other, b->other);
    b->took_ms = (double)(clock_us() - start) * 1e-3;
    b->ended = true;
    return NULL;
}

/* A request of one token to the other session, until its END and a few tokens of the neighbour more. */
static void other_ask(struct bench *b, struct samples *worst, struct samples *took)
{
    pthread_t thread;
    b->ended = false;
    for (int i = 0; i < 3;) /* the neighbour is at it */
        i += next_gap(b) > 0;
    b->worst = 0;
    assert_int_equal(pthread_create(&thread, NULL, other_main, b), 0);
    while (!b->ended)
        next_gap(b);
    for (int i = 0; i < 3;)
        i += next_gap(b) > 0;
    assert_int_equal(pthread_join(thread, NULL), 0);
    sample(took, b->took_ms);
    sample(worst, b->worst);
}

static void round_run(struct bench *b)
{
    neighbour_begin(b);
    other_ask(b, &b->here, &b->here_took);
    uint64_t start = clock_us();
    for (b->worst = 0; clock_us() - start < NEAR_US;) {
        double gap = next_gap(b);
        if (gap > 0)
            sample(&b->gap, gap);
    }
    sample(&b->rest, b->worst);
    for (b->worst = 0; !gone(b);) {
        next_gap(b);
        if (clock_us() - start > LEAVES_US) {
            fprintf(stderr, "bench_spill: the cache does not leave\n");
            exit(1);
        }
    }
    sample(&b->leave, b->worst);
    other_ask(b, &b->back, &b->back_took);
}

static void tier_run(struct bench *b, const char *tier)
{
    const struct {
        const char *name;
        struct samples *s;
        double q;
    } lines[] = {{"step_ms", &b->gap, 0.5},
                 {"rest_worst_ms", &b->rest, 0.5},
                 {"leave_worst_ms", &b->leave, 0.5},
                 {"leave_worst_of_all_ms", &b->leave, 1},
                 {"here_worst_ms", &b->here, 0.5},
                 {"back_worst_ms", &b->back, 0.5},
                 {"back_worst_of_all_ms", &b->back, 1},
                 {"here_ms", &b->here_took, 0.5},
                 {"back_ms", &b->back_took, 0.5}};
    bool disk = strcmp(tier, "disk") == 0;
    const char *args[] = {b->threads,
                          "--spill-after=1s",
                          disk ? "--host-tier=0" : "--host-tier=1GiB",
                          disk ? "--disk-tier=4GiB" : "--disk-tier=0",
                          "--state-dir",
                          b->folder,
                          NULL};
    struct dh *d = dh_start(b->model, args);
    if (backcast_connect(&b->c, d->socket) < 0)
        serve_die(NULL, "connect");
    for (size_t i = 0; i < ARRAY_LEN(lines); i++)
        lines[i].s->n = 0;
    if (backcast_connect(&b->c_other, d->socket) < 0)
        serve_die(NULL, "connect");
    b->other = serve_open(b->c_other, "none", b->tokens + 2 * b->rounds + 64);
    serve_ask(b->c_other, b->other, b->tokens, 0);
    serve_finish(b->c_other, b->other);
    for (uint32_t k = 0; k < b->rounds; k++)
        round_run(b);
    for (size_t i = 0; i < ARRAY_LEN(lines); i++)
        printf("spill,%s,%s,%.3f\n", tier, lines[i].name, samples_quantile(lines[i].s, lines[i].q));
    fflush(stdout);
    backcast_session_close(&b->neighbour);
    backcast_session_close(&b->other);
    backcast_disconnect(&b->c);
    backcast_disconnect(&b->c_other);
    dh_stop(&d);
}

static bool parse(struct bench *b, int argc, char **argv)
{
    *b = (struct bench){.folder = "/tmp", .n_threads = 2, .rounds = 5, .tokens = 2048};
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
        else if (strcmp(a, "--tokens") == 0)
            b->tokens = n;
        else if (strcmp(a, "--folder") == 0)
            b->folder = argv[i];
        else
            return false;
    }
    return b->model != NULL && b->n_threads > 0 && b->rounds > 0 && b->tokens > 0 &&
           b->tokens <= 4096; /* what serve_ask takes */
}

int main(int argc, char **argv)
{
    static struct bench b;
    if (!parse(&b, argc, argv)) {
        fprintf(stderr, "usage: bench_spill MODEL.gguf [--threads N] [--rounds N] "
                        "[--tokens 1..4096] [--folder DIR]\n");
        return 2;
    }
    snprintf(b.threads, sizeof b.threads, "--threads=%u", b.n_threads);
    printf("bench,case,figure,value\n");
    tier_run(&b, "host");
    tier_run(&b, "disk");
    return 0;
}
