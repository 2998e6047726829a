/* bench_limits MODEL [--threads 2] [--rounds 5]
 *
 * A real backcastd against limits that do not depend on any other program:
 *
 *     limits,start,ready_ms             from exec to READY, the file in the page cache; median
 *     limits,memory,resident_mib        VmRSS after one answer; file_mib, kv_mib: the model's file, the cache held;
 *                                       over_mib: resident - file - kv
 *     limits,decode N,tps               decoded tokens a second behind N tokens
 *     limits,decode N,gbs               bytes of weights, keys and values x that
 *     limits,decode N,read_gbs          what as many threads read at best from as many bytes, in turns; share_percent: of it
 *     limits,endless,old_tps, new_tps   decode under a budget of 512 tokens (counter_causal_fast), prunes included: a session that has
 *                                       decoded 5,632 tokens (7,954 at the end), and one that has just filled its budget; medians of what
 *                                       each gave in turns, old new new old, so that what changes on the machine changes both
 *     limits,endless,ratio              old / new of such a turn, median; ratio_low, ratio_high: quartiles */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <pthread.h>
#include <sys/stat.h>
#include "daemon_harness.h"
#include "kn.h"
#include "serve.h"

#define ENDLESS 5632u /* decoded tokens, before the turns */
#define BUDGET 512u
#define SPAN 128u /* decoded in a turn: one prune */
#define TURNS 9u
#define THREADS_MAX 64u

struct limits {
    const char *model;
    char threads[24];
    uint32_t n_threads, rounds;
    struct samples s;
};

/* ---- what the memory gives */

struct lane {
    const uint64_t *from;
    size_t n;
};

static void *lane_read(void *arg)
{
    const struct lane *l = arg;
    uint64_t sum[16] = {0};
    for (size_t i = 0; i + 16 <= l->n; i += 16)
        for (int k = 0; k < 16; k++)
            sum[k] ^= l->from[i + (size_t)k];
    for (int k = 1; k < 16; k++)
        sum[0] ^= sum[k];
    __asm__ volatile("" : : "r"(sum[0]) : "memory");
    return NULL;
}

/* GB/s of `threads` threads that read `bytes` over and over: the best of 12. */
static double read_measure(size_t bytes, uint32_t threads)
{
    uint64_t *room = aligned_alloc(4096, bytes / 4096 * 4096);
    struct lane lanes[THREADS_MAX];
    pthread_t t[THREADS_MAX];
    double best = 0;

    assert_non_null(room);
    memset(room, 1, bytes / 4096 * 4096);
    size_t each = bytes / 8 / threads / 16 * 16;
    for (int round = 0; round < 12; round++) {
        uint64_t start = clock_us();
        for (uint32_t i = 0; i < threads; i++) {
            lanes[i] = (struct lane){room + each * i, each};
            if (i > 0)
                assert_int_equal(pthread_create(&t[i], NULL, lane_read, &lanes[i]), 0);
        }
        lane_read(&lanes[0]);
        for (uint32_t i = 1; i < threads; i++)
            pthread_join(t[i], NULL);
        best = BC_MAX(best,
                      (double)(each * 8 * threads) * 1e-3 / (double)BC_MAX(clock_us() - start, 1));
    }
    free(room);
    return best;
}

/* ---- the daemon */

static double ready_ms(struct limits *b)
{
    const char *args[] = {b->threads, NULL};
    uint64_t start = clock_us();
    struct dh *d = dh_start(b->model, args);
    double ms = (double)(clock_us() - start) * 1e-3;
    dh_stop(&d);
    return ms;
}

/* n tokens behind `depth`, a second; what the cache then holds in ret_kv. */
static double decode_tps(backcast *c, uint32_t depth, uint32_t n, double *ret_kv)
{
    backcast_session *s = serve_open(c, "none", depth + n + 64);
    struct backcast_event ev;
    struct backcast_stats before, st;
    uint64_t first = 0;

    if (backcast_stats(c, &before) < 0)
        serve_die(c, "stats");
    serve_ask(c, s, depth, n + 1);
    do {
        serve_next(c, &ev);
        if (ev.type == BACKCAST_TEXT && first == 0)
            first = clock_us();
    } while (ev.type != BACKCAST_END);
    double tps = n * 1e6 / (double)(clock_us() - first);
    if (backcast_stats(c, &st) < 0)
        serve_die(c, "stats");
    uint32_t held = (depth + n + KN_PAGE_ROWS - 1) / KN_PAGE_ROWS * KN_PAGE_ROWS;
    *ret_kv = (double)(st.kv_held - before.kv_held) * (depth + n / 2.0) / held;
    backcast_session_close(&s);
    return tps;
}

static void memory_print(struct limits *b, struct dh *d, backcast *c)
{
    backcast_session *s = serve_open(c, NULL, 4096);
    struct backcast_stats st;
    struct stat file;

    serve_ask(c, s, 256, 128);
    serve_finish(c, s);
    if (backcast_stats(c, &st) < 0)
        serve_die(c, "stats");
    assert_int_equal(stat(b->model, &file), 0);
    double mib = 1.0 / 1048576, resident = (double)dh_rss(d) * mib;
    double size = (double)file.st_size * mib, kv = (double)st.kv_held * mib;
    printf(
        "limits,memory,resident_mib,%.1f\nlimits,memory,file_mib,%.1f\nlimits,memory,kv_mib,%.1f\n"
        "limits,memory,over_mib,%.1f\n",
        resident, size, kv, resident - size - kv);
    backcast_session_close(&s);
}

static void decode_print(struct limits *b, backcast *c, uint32_t depth)
{
    struct backcast_stats st;

    if (backcast_stats(c, &st) < 0)
        serve_die(c, "stats");
    b->s.n = 0;
    double kv = 0, peak = 0;
    for (uint32_t i = 0; i < b->rounds; i++) {
        sample(&b->s, decode_tps(c, depth, 64, &kv));
        peak = BC_MAX(peak, read_measure((size_t)((double)st.bytes_weights + kv), b->n_threads));
    }
    double tps = samples_quantile(&b->s, 0.5), gbs = ((double)st.bytes_weights + kv) * tps * 1e-9;
    printf("limits,decode %u,tps,%.1f\nlimits,decode %u,gbs,%.2f\nlimits,decode %u,read_gbs,%.2f\n"
           "limits,decode %u,share_percent,%.1f\n",
           depth, tps, depth, gbs, depth, peak, depth, 100 * gbs / peak);
    fflush(stdout);
}

/* Seconds that the session takes for SPAN tokens behind one more of the prompt's. */
static double span_run(backcast *c, backcast_session *s)
{
    uint64_t start = clock_us();
    serve_ask(c, s, 1, SPAN);
    serve_finish(c, s);
    return (double)(clock_us() - start) * 1e-6;
}

static void endless_print(backcast *c)
{
    static struct samples ratio, olds, news;
    backcast_session *old = serve_open(c, "counter_causal_fast", BUDGET);

    serve_ask(c, old, 64, ENDLESS);
    serve_finish(c, old);
    for (uint32_t i = 0; i < TURNS; i++) {
        backcast_session *new = serve_open(c, "counter_causal_fast", BUDGET);
        serve_ask(c, new, BUDGET, 1);
        serve_finish(c, new);
        double o = span_run(c, old), n = span_run(c, new);
        n += span_run(c, new);
        o += span_run(c, old);
        sample(&olds, 2 * SPAN / o);
        sample(&news, 2 * SPAN / n);
        sample(&ratio, n / o);
        backcast_session_close(&new);
    }
    printf("limits,endless,old_tps,%.1f\nlimits,endless,new_tps,%.1f\n"
           "limits,endless,ratio,%.3f\nlimits,endless,ratio_low,%.3f\nlimits,endless,ratio_high,%."
           "3f\n",
           samples_quantile(&olds, 0.5), samples_quantile(&news, 0.5),
           samples_quantile(&ratio, 0.5), samples_quantile(&ratio, 0.25),
           samples_quantile(&ratio, 0.75));
    backcast_session_close(&old);
}

int main(int argc, char **argv)
{
    static struct limits b = {.n_threads = 2, .rounds = 5};
    backcast *c;

    for (int i = 1; i < argc; i++) {
        if (argv[i][0] != '-')
            b.model = argv[i];
        else if (i + 1 < argc && strcmp(argv[i], "--threads") == 0)
            b.n_threads = (uint32_t)strtoul(argv[++i], NULL, 10);
        else if (i + 1 < argc && strcmp(argv[i], "--rounds") == 0)
            b.rounds = (uint32_t)strtoul(argv[++i], NULL, 10);
        else
            argc = 0;
    }
    if (argc == 0 || b.model == NULL || b.rounds == 0 || b.n_threads < 1 ||
        b.n_threads > THREADS_MAX) {
        fprintf(stderr, "usage: bench_limits MODEL.gguf [--threads 1..64] [--rounds N]\n");
        return 2;
    }
    snprintf(b.threads, sizeof(b.threads), "--threads=%u", b.n_threads);
    ready_ms(&b); /* the file comes into the page cache */
    for (uint32_t i = 0; i < b.rounds; i++)
        sample(&b.s, ready_ms(&b));
    printf("limits,start,ready_ms,%.1f\n", samples_quantile(&b.s, 0.5));
    const char *args[] = {b.threads, NULL};
    struct dh *d = dh_start(b.model, args);
    if (backcast_connect(&c, d->socket) < 0)
        serve_die(NULL, "connect");
    memory_print(&b, d, c);
    decode_print(&b, c, 1);
    decode_print(&b, c, 2048);
    endless_print(c);
    backcast_disconnect(&c);
    dh_stop(&d);
    return 0;
}
