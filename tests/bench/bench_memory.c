/* bench_memory: what looking after memory costs.
 *
 *   bookkeeping   a token's share of pages, slots, ledger and ceilings, as a part of a decode step
 *   tiers         a cache that leaves its pages and comes back, beside plain copies of as many bytes; on disk beside a
 *                 file that is written, synced and read back when the system has forgotten it (plain), and beside one
 *                 that never leaves the system's page cache (cached)
 *
 *     bench_memory MODEL.gguf [--sessions 8] [--tokens 1024] [--rounds 5] [--folder DIR]
 *
 * Prints bench,case,figure,value. The engine is stepped by hand: its copies and sums run one after the
 * other, where the daemon's threads overlap them, so its tiers are at least as fast as what stands here.
 * The best of the rounds counts. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "clock.h"
#include "core.h"
#include "engine_harness.h"

#define SESSIONS_MAX 64u
#define IDLE_US 1000000u
#define DECODE_STEPS 40u
#define BOOK_TOKENS 512u
#define CHUNK (1u << 20)

static struct bench {
    char *model, *folder;
    uint32_t sessions, tokens, rounds;
    bool disk; /* of the engine that is open */
    int32_t *prompt;
} b = {.folder = "/tmp", .sessions = 8, .tokens = 1024, .rounds = 5};

static void figure(const char *name, const char *what, double value)
{
    printf("memory,%s,%s,%.4g\n", name, what, value);
    fflush(stdout);
}

static void options(struct engine_options *o, void *arg)
{
    (void)arg;
    o->kv_memory = 8ull << 30;
    o->session_budget = 4ull << 30;
    o->max_sessions = b.sessions + 2;
    o->spill_after_us = IDLE_US;
    o->host_tier = b.disk ? 0 : 8ull << 30;
    o->disk_tier = b.disk ? 8ull << 30 : 0;
    o->state_dir = b.disk ? b.folder : NULL;
}

/* ---- bookkeeping */

/* Microseconds of a decode step of all sessions. */
static double step_us(struct eh *h)
{
    struct generate_options o = eh_greedy(DECODE_STEPS * (b.rounds + 2));
    uint64_t s[SESSIONS_MAX];
    double best = 1e18;
    for (uint32_t i = 0; i < b.sessions; i++) {
        s[i] = eh_session(h, &(struct eh_ask){.policy = "none"});
        eh_ids(h, s[i], b.prompt, 64, &o);
    }
    while (eh_stream(h, s[b.sessions - 1])->n_ids == 0)
        eh_step(h);
    for (uint32_t k = 0; k < b.rounds; k++) {
        uint64_t t = clock_ns();
        for (uint32_t i = 0; i < DECODE_STEPS; i++)
            engine_step(h->en);
        best = BC_MIN(best, (double)(clock_ns() - t) * 1e-3 / DECODE_STEPS);
        eh_collect(h);
    }
    for (uint32_t i = 0; i < b.sessions; i++)
        eh_close_session(h, s[i]);
    return best;
}

/* The same tokens without their mathematics: rows reserved and appended, pages taken, booked and given
 * back, ceilings looked at. */
static double book_us(struct eh *h)
{
    struct seqcache *c[64];
    struct err e = {0};
    double best = 1e18;
    uint64_t own = eh_session(h, &(struct eh_ask){.policy = "none"});
    struct session *s = sess_find(h->en, own);
    for (uint32_t i = 0; i < b.sessions; i++) {
        assert_int_equal(seqcache_open(&c[i], s->pool, &e), 0);
        seqcache_owner(c[i], &s->owner, s->turns->owner);
    }
    for (uint32_t k = 0; k < b.rounds; k++) {
        uint64_t t = clock_ns();
        for (uint32_t n = 0; n < BOOK_TOKENS; n++) {
            for (uint32_t i = 0; i < b.sessions; i++) {
                assert_int_equal(seqcache_reserve_within(c[i], 1, 1u << 20, &e), 0);
                seqcache_append(c[i], 1, &b.prompt[n], (int32_t)n, n);
            }
            struct engine_counts counts;
            engine_counts(h->en, &counts);
        }
        for (uint32_t i = 0; i < b.sessions; i++)
            seqcache_clear(c[i]);
        best = BC_MIN(best, (double)(clock_ns() - t) * 1e-3 / BOOK_TOKENS);
    }
    for (uint32_t i = 0; i < b.sessions; i++)
        seqcache_close(&c[i]);
    eh_close_session(h, own);
    return best;
}

static void bookkeeping(void)
{
    char name[40];
    b.disk = false;
    struct eh *h = eh_open(b.model, options, NULL);
    double step = step_us(h), book = book_us(h);
    snprintf(name, sizeof name, "decode of %u sessions", b.sessions);
    figure(name, "step_us", step);
    figure(name, "bookkeeping_us", book);
    figure(name, "bookkeeping_percent", book / step * 100);
    eh_close(&h);
}

/* ---- tiers */

static double gb_per_s(uint64_t bytes, uint64_t ns)
{
    return (double)bytes / (double)BC_MAX(ns, (uint64_t)1);
}

/* GB/s */
struct peak {
    double out, in;
};

/* of: what the same bytes take without the tier; named plain, cached ... */
static void tier(const char *name, const struct peak *of, const char *const *names, uint32_t n_of,
                 uint64_t *ret_bytes)
{
    char what[64];
    struct generate_options none = eh_greedy(0);
    double out = 0, in = 0;
    struct eh *h = eh_open(b.model, options, NULL);
    uint64_t s = eh_session(h, &(struct eh_ask){.policy = "none"});
    struct tiers *t = &h->en->tier;
    eh_ids(h, s, b.prompt, b.tokens, &none);
    eh_run_to_end(h, s);
    for (uint32_t k = 0; k < b.rounds; k++) {
        eh_run(h);
        eh_pass(h, IDLE_US);
        uint64_t at = clock_ns();
        while (t->spills == k)
            eh_step(h);
        uint64_t bytes = t->host_bytes + t->disk_bytes;
        out = BC_MAX(out, gb_per_s(bytes, clock_ns() - at));
        *ret_bytes = bytes;
        struct command *c =
            eh_command(h, CMD_SCORES, s); /* needs the cache, and computes nothing */
        c->conn = EH_CONN + 1;
        c->u.scores.dropped = true;
        uint32_t r = eh_post(h, c);
        at = clock_ns();
        while (t->returns == k)
            eh_step(h);
        in = BC_MAX(in, gb_per_s(bytes, clock_ns() - at));
        eh_expect(h, r, REP_SCORES_REPLY);
    }
    if (n_of > 0) {
        figure(name, "mib", (double)*ret_bytes / 1048576);
        figure(name, "spill_gb_per_s", out);
        figure(name, "return_gb_per_s", in);
    }
    for (uint32_t i = 0; i < n_of; i++) {
        snprintf(what, sizeof what, "spill_percent_of_%s", names[i]);
        figure(name, what, out / of[i].out * 100);
        snprintf(what, sizeof what, "return_percent_of_%s", names[i]);
        figure(name, what, in / of[i].in * 100);
    }
    eh_close(&h);
}

/* As many bytes, copied once; into memory that is new each time, as a tier's is. */
static double copy_peak(uint64_t bytes)
{
    char *from = malloc(bytes);
    double best = 0;
    assert_non_null(from);
    memset(from, 1, bytes);
    for (uint32_t k = 0; k < b.rounds; k++) {
        uint64_t at = clock_ns();
        char *to = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        assert_true(to != MAP_FAILED);
        memcpy(to, from, bytes);
        __asm__ volatile("" : : "r"(to) : "memory");
        best = BC_MAX(best, gb_per_s(bytes, clock_ns() - at));
        munmap(to, bytes);
    }
    free(from);
    return best;
}

/* What a file without a name, as the tier's is, does. synced: the disk itself, synced, and read back when the system has
 * forgotten it (where it can be made to: not on a file system in memory). */
static struct peak file_peak(uint64_t bytes, bool synced)
{
    char *block = malloc(CHUNK);
    struct peak peak = {0};
    assert_non_null(block);
    memset(block, 1, CHUNK);
    for (uint32_t k = 0; k < b.rounds; k++) {
        int fd = open(b.folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
        assert_true(fd >= 0);
        uint64_t at = clock_ns();
        for (uint64_t n = 0; n < bytes; n += CHUNK)
            assert_int_equal(pwrite(fd, block, CHUNK, (off_t)n), CHUNK);
        if (synced)
            assert_int_equal(fdatasync(fd), 0);
        peak.out = BC_MAX(peak.out, gb_per_s(bytes, clock_ns() - at));
        if (synced)
            assert_int_equal(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
        at = clock_ns();
        for (uint64_t n = 0; n < bytes; n += CHUNK)
            assert_int_equal(pread(fd, block, CHUNK, (off_t)n), CHUNK);
        peak.in = BC_MAX(peak.in, gb_per_s(bytes, clock_ns() - at));
        close(fd);
    }
    free(block);
    return peak;
}

static void tiers(void)
{
    static const char *const names[] = {"plain", "cached"};
    uint64_t bytes = 0;
    uint32_t rounds = b.rounds;
    struct peak of[2];
    b.disk = false;
    b.rounds = 1;
    tier("host", NULL, NULL, 0, &bytes); /* how many bytes there are */
    b.rounds = rounds;
    of[0].out = of[0].in = copy_peak(bytes);
    figure("host", "plain_copy_gb_per_s", of[0].out);
    tier("host", of, names, 1, &bytes);
    b.disk = true;
    for (int i = 0; i < 2; i++) {
        char what[40];
        of[i] = file_peak(bytes, i == 0);
        snprintf(what, sizeof what, "%s_write_gb_per_s", names[i]);
        figure("disk", what, of[i].out);
        snprintf(what, sizeof what, "%s_read_gb_per_s", names[i]);
        figure("disk", what, of[i].in);
    }
    tier("disk", of, names, 2, &bytes);
}

static void run(void **state)
{
    (void)state;
    b.prompt = malloc(BC_MAX(b.tokens, BOOK_TOKENS) * sizeof *b.prompt);
    assert_non_null(b.prompt);
    for (uint32_t i = 0; i < BC_MAX(b.tokens, BOOK_TOKENS); i++)
        b.prompt[i] = (int32_t)(300 + (i * 2654435761u >> 8) % 20000);
    puts("bench,case,figure,value");
    bookkeeping();
    tiers();
    free(b.prompt);
}

static bool parse(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        char *value = i + 1 < argc ? argv[i + 1] : NULL;
        uint32_t n = value != NULL ? (uint32_t)strtoul(value, NULL, 10) : 0;
        if (argv[i][0] != '-') {
            b.model = argv[i];
            continue;
        }
        if (value == NULL)
            return false;
        if (strcmp(argv[i], "--sessions") == 0)
            b.sessions = n;
        else if (strcmp(argv[i], "--tokens") == 0)
            b.tokens = n;
        else if (strcmp(argv[i], "--rounds") == 0)
            b.rounds = n;
        else if (strcmp(argv[i], "--folder") == 0)
            b.folder = value;
        else
            return false;
        i++;
    }
    return b.model != NULL && b.sessions > 0 && b.sessions <= SESSIONS_MAX && b.tokens > 0 &&
           b.rounds > 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(run)};
    if (!parse(argc, argv)) {
        fprintf(stderr,
                "usage: bench_memory MODEL.gguf [--sessions 1..64] [--tokens N] [--rounds N] "
                "[--folder DIR]\n");
        return 2;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
