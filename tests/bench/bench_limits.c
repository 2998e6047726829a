/* bench_limits MODEL [--threads 2] [--rounds 5]
 *
 * A real backcastd against limits that do not depend on any other program:
 *
 *     limits,start,ready_ms             from exec to READY, the file in the page cache; median
 *     limits,memory,resident_mib        VmRSS after one answer; file_mib, kv_mib: the model's file, the cache held;
 *                                       over_mib: resident - file - kv
 *     limits,decode,weights_gbs         bytes of weights x decoded tokens a second behind an empty cache
 *     limits,decode,read_gbs            what as many threads read at best from as many bytes; share_percent: of it
 *     limits,endless,first_tps, last_tps   decode under a budget of 512 tokens (counter_causal_fast): tokens 512 ..
 *                                       1,023 and the last 512 of 7,936, prunes included; ratio: last / first */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <pthread.h>
#include <sys/stat.h>
#include "daemon_harness.h"
#include "serve.h"

#define ENDLESS 7936u /* decoded tokens */
#define SPAN 512u
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

static double decode_tps(backcast *c, uint32_t n)
{
    backcast_session *s = serve_open(c, NULL, n + 64);
    struct backcast_event ev;
    uint64_t first = 0;

    serve_ask(c, s, 1, n + 1);
    do {
        serve_next(c, &ev);
        if (ev.type == BACKCAST_TEXT && first == 0)
            first = clock_us();
    } while (ev.type != BACKCAST_END);
    double tps = n * 1e6 / (double)(clock_us() - first);
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

static void decode_print(struct limits *b, backcast *c)
{
    struct backcast_stats st;

    if (backcast_stats(c, &st) < 0)
        serve_die(c, "stats");
    b->s.n = 0;
    double weights = (double)st.bytes_weights, peak = 0;
    for (uint32_t i = 0; i < b->rounds; i++) {
        sample(&b->s, decode_tps(c, 64));
        peak = BC_MAX(peak, read_measure((size_t)st.bytes_weights, b->n_threads));
    }
    double gbs = weights * samples_quantile(&b->s, 0.5) * 1e-9;
    printf("limits,decode,weights_gbs,%.2f\nlimits,decode,read_gbs,%.2f\n"
           "limits,decode,share_percent,%.1f\n",
           gbs, peak, 100 * gbs / peak);
}

static void endless_print(backcast *c)
{
    backcast_session *s = serve_open(c, "counter_causal_fast", 512);
    struct backcast_event ev;
    uint64_t at[4] = {0}; /* when token 512, 1,024, the last but 512 and the last had come */
    uint32_t n = 0;

    serve_ask(c, s, 64, ENDLESS);
    do {
        serve_next(c, &ev);
        if (ev.type != BACKCAST_TEXT)
            continue;
        n += (uint32_t)ev.text.n_ids;
        static const uint32_t marks[4] = {SPAN, 2 * SPAN, ENDLESS - SPAN, ENDLESS - 4};
        for (int i = 0; i < 4; i++)
            if (at[i] == 0 && n >= marks[i])
                at[i] = clock_us();
    } while (ev.type != BACKCAST_END);
    double first = SPAN * 1e6 / (double)(at[1] - at[0]),
           last = (SPAN - 4) * 1e6 / (double)(at[3] - at[2]);
    printf(
        "limits,endless,first_tps,%.1f\nlimits,endless,last_tps,%.1f\nlimits,endless,ratio,%.3f\n",
        first, last, last / first);
    backcast_session_close(&s);
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
    decode_print(&b, c);
    endless_print(c);
    backcast_disconnect(&c);
    dh_stop(&d);
    return 0;
}
