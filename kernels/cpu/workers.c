/* workers.c: the team. One word tells the workers whether there is something to do:
 *
 *     state   [ epoch : 23 | open : 1 | joined : 8 ]
 *
 *   caller: write the loop's fields, shares and done, state = epoch + 1 | open      (release)
 *   worker: sees a new epoch, joins by CAS (joined + 1) while `open` still stands   (acquire)
 *   both:   take runs from their share, then from others', until all are empty
 *   caller: clears `open`, learns how many joined, waits until `done` says they left
 *
 * Every thread has a share of the items, in one piece, and takes runs from its front: what it reads is one stream, and
 * the hardware reads ahead of it. A thread whose share is empty takes the back half of another's for its own:
 *
 *     thread 0   | done |  next ..... end |                     thread 1   | done ...... end |     empty
 *     thread 0   | done |  next . end |  <- CAS of one word     thread 1   | next ....... end |    the rest
 *
 * A word {next, end} is all there is to a share: a CAS that succeeds takes what it saw, even if the same word had gone to a
 * thief and come back meanwhile. Nobody is in two loops at once. The share of a worker that does not come goes the same way.
 *
 * So the caller waits only for workers that really took part: one that is asleep or was put off its
 * core delays nobody. The fields of a loop are written only when no joined worker is left, and read
 * only by joined ones: there is no race. An epoch that wraps around while a worker sleeps makes it
 * miss one loop, which is harmless.
 *
 * Waiting: spin for SPIN_US, then sleep on a futex. Between the loops of a pass nobody gets to
 * sleep; an idle daemon uses no CPU. */
#include "workers.h"
#include "kn_assert.h"
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define TEAM_MAGIC 0x6b6e7465u
#define SPIN_US 150
#define SPINS_PER_LOOK 32 /* pauses between two looks at the clock */

enum { JOINED_MASK = 0xff, OPEN = 0x100, EPOCH_ONE = 0x200 };

/* Workers never allocate: an allocator would set up a heap for each. */
struct worker_arg {
    struct team *team;
    unsigned thread;
};

/* Items next .. end - 1 that nobody has begun, next in the low half; each on a cache line of its own. next and end are
 * multiples of the grain, but for the last end. */
struct share {
    _Alignas(64) _Atomic uint64_t items;
};

struct team {
    unsigned magic;
    unsigned n_threads;
    unsigned n_started; /* pthreads to join; == n_threads - 1 once open */
    pthread_t threads[TEAM_THREADS_MAX];
    struct worker_arg args[TEAM_THREADS_MAX];
    atomic_bool stop;
    /* the loop now running: see the rule above */
    team_fn fn;
    void *ctx;
    uint32_t n_items, grain;
    _Alignas(64) atomic_uint state;
    atomic_uint sleepers; /* workers in, or on their way into, futex_wait(state) */
    _Alignas(64) atomic_uint done;
    atomic_uint caller_sleeps;
    struct share shares[TEAM_THREADS_MAX];
};

static void futex_wait(atomic_uint *word, unsigned seen)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void futex_wake(atomic_uint *word, int n)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, n, NULL, NULL, 0);
}

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline void cpu_pause(void)
{
    __builtin_ia32_pause();
}

static inline unsigned epoch_of(unsigned state)
{
    return state / EPOCH_ONE;
}

/* Waits until state's epoch differs from `epoch`; returns the state seen. */
static unsigned state_wait(struct team *t, unsigned epoch)
{
    uint64_t end = now_ns() + SPIN_US * 1000;
    do {
        for (int i = 0; i < SPINS_PER_LOOK; i++) {
            unsigned s = atomic_load_explicit(&t->state, memory_order_acquire);
            if (epoch_of(s) != epoch)
                return s;
            cpu_pause();
        }
    } while (now_ns() < end);
    /* The kernel compares the word again, so a loop opened after this load is never slept through;
     * sequential consistency orders the increment before it against team_run's look at sleepers. */
    atomic_fetch_add(&t->sleepers, 1);
    unsigned s;
    while (epoch_of(s = atomic_load(&t->state)) == epoch)
        futex_wait(&t->state, s);
    atomic_fetch_sub(&t->sleepers, 1);
    return s;
}

static uint64_t items_word(uint32_t next, uint32_t end)
{
    return (uint64_t)end << 32 | next;
}

static uint32_t items_next(uint64_t items)
{
    return (uint32_t)items;
}

static uint32_t items_end(uint64_t items)
{
    return (uint32_t)(items >> 32);
}

static bool items_left(uint64_t items)
{
    return items_next(items) < items_end(items);
}

/* To each thread its share: whole runs. */
static void shares_deal(struct team *t)
{
    uint64_t runs = (t->n_items - 1) / t->grain + 1;
    uint32_t next = 0;
    for (unsigned i = 0; i < t->n_threads; i++) {
        uint64_t end = runs * (i + 1) / t->n_threads * t->grain;
        uint32_t stop = (uint32_t)KN_MIN(end, (uint64_t)t->n_items);
        atomic_store_explicit(&t->shares[i].items, items_word(next, stop), memory_order_relaxed);
        next = stop;
    }
}

/* The runs of the thread's own share, from its front. */
static void share_run(struct team *t, unsigned thread)
{
    _Atomic uint64_t *own = &t->shares[thread].items;
    uint64_t v = atomic_load_explicit(own, memory_order_relaxed);
    while (items_left(v)) {
        uint32_t first = items_next(v), end = first + KN_MIN(t->grain, items_end(v) - first);
        if (!atomic_compare_exchange_weak_explicit(own, &v, items_word(end, items_end(v)),
                                                   memory_order_relaxed, memory_order_relaxed))
            continue;
        t->fn(t->ctx, thread, first, end);
        v = atomic_load_explicit(own, memory_order_relaxed);
    }
}

/* Half of another's runs, the greater one, from its back, for this thread's empty share. */
static bool share_steal(struct team *t, unsigned thread)
{
    for (unsigned i = 1; i < t->n_threads; i++) {
        _Atomic uint64_t *from = &t->shares[(thread + i) % t->n_threads].items;
        uint64_t v = atomic_load_explicit(from, memory_order_relaxed);
        while (items_left(v)) {
            uint32_t next = items_next(v), end = items_end(v);
            uint32_t stay = ((end - next - 1) / t->grain + 1) / 2 * t->grain;
            if (!atomic_compare_exchange_weak_explicit(from, &v, items_word(next, next + stay),
                                                       memory_order_relaxed, memory_order_relaxed))
                continue;
            atomic_store_explicit(&t->shares[thread].items, items_word(next + stay, end),
                                  memory_order_relaxed);
            return true;
        }
    }
    return false;
}

static void items_take(struct team *t, unsigned thread)
{
    do
        share_run(t, thread);
    while (share_steal(t, thread));
}

static void *worker_main(void *p)
{
    const struct worker_arg *arg = p;
    struct team *t = arg->team;
    unsigned epoch = 0;
    for (;;) {
        unsigned s = state_wait(t, epoch);
        epoch = epoch_of(s);
        if (atomic_load(&t->stop))
            return NULL;
        while ((s & OPEN) && epoch_of(s) == epoch &&
               !atomic_compare_exchange_weak_explicit(&t->state, &s, s + 1, memory_order_acq_rel,
                                                      memory_order_acquire))
            ;
        if (!(s & OPEN) || epoch_of(s) != epoch)
            continue;
        items_take(t, arg->thread);
        atomic_fetch_add(&t->done, 1);
        if (atomic_load(&t->caller_sleeps))
            futex_wake(&t->done, 1);
    }
}

/* Waits until `joined` workers have left the loop. */
static void done_wait(struct team *t, unsigned joined)
{
    uint64_t end = 0;
    for (;;) {
        for (int i = 0; i < SPINS_PER_LOOK; i++) {
            if (atomic_load_explicit(&t->done, memory_order_acquire) == joined)
                return;
            cpu_pause();
        }
        uint64_t now = now_ns();
        if (end == 0)
            end = now + SPIN_US * 1000;
        else if (now >= end)
            break;
    }
    atomic_store(&t->caller_sleeps, 1);
    unsigned seen;
    while ((seen = atomic_load(&t->done)) != joined)
        futex_wait(&t->done, seen);
    atomic_store(&t->caller_sleeps, 0);
}

static void loop_open(struct team *t)
{
    unsigned s = atomic_load_explicit(&t->state, memory_order_relaxed);
    atomic_store(&t->state, (epoch_of(s) + 1) * EPOCH_ONE | OPEN);
    if (atomic_load(&t->sleepers))
        futex_wake(&t->state, INT_MAX);
}

void team_run(struct team *t, team_fn fn, void *ctx, uint32_t n_items, uint32_t grain)
{
    kn_assert(t && t->magic == TEAM_MAGIC && grain > 0 && n_items < UINT32_MAX / 2);
    if (n_items == 0)
        return;
    if (t->n_threads == 1 || n_items <= grain) {
        fn(ctx, 0, 0, n_items);
        return;
    }
    t->fn = fn;
    t->ctx = ctx;
    t->n_items = n_items;
    t->grain = grain;
    shares_deal(t);
    atomic_store_explicit(&t->done, 0, memory_order_relaxed);
    loop_open(t);
    items_take(t, 0);
    unsigned s = atomic_fetch_and(&t->state, ~(unsigned)OPEN);
    done_wait(t, s & JOINED_MASK);
}

unsigned team_size(const struct team *t)
{
    return t->n_threads;
}

static int worker_start(struct team *t, unsigned thread)
{
    struct worker_arg *arg = &t->args[thread];
    *arg = (struct worker_arg){t, thread};
    if (pthread_create(&t->threads[t->n_started], NULL, worker_main, arg) != 0)
        return -1;
    pthread_setname_np(t->threads[t->n_started], "kn-worker");
    t->n_started++;
    return 0;
}

/* The n-th core of the set, counted in turns. */
static int core_of(const cpu_set_t *set, unsigned n)
{
    n %= (unsigned)CPU_COUNT(set);
    for (int core = 0;; core++)
        if (CPU_ISSET(core, set) && n-- == 0)
            return core;
}

/* A wish, not a condition: where the system refuses, threads go where it sends them. */
static void workers_pin(const struct team *t)
{
    cpu_set_t all, one;
    if (sched_getaffinity(0, sizeof all, &all) != 0 || CPU_COUNT(&all) < 2)
        return;
    for (unsigned i = 0; i < t->n_started; i++) {
        CPU_ZERO(&one);
        CPU_SET(core_of(&all, i + 1), &one);
        pthread_setaffinity_np(t->threads[i], sizeof one, &one);
    }
}

int team_open(struct team **ret, unsigned n_threads, bool pin)
{
    kn_assert(n_threads >= 1 && n_threads <= TEAM_THREADS_MAX);
    struct team *t = aligned_alloc(64, (sizeof *t + 63) / 64 * 64);
    if (!t)
        return -1;
    *t = (struct team){.magic = TEAM_MAGIC, .n_threads = n_threads};
    /* signals belong to the caller's threads */
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &old);
    int rc = 0;
    for (unsigned i = 1; i < n_threads && rc == 0; i++)
        rc = worker_start(t, i);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (rc != 0) {
        team_close(&t);
        return -1;
    }
    if (pin)
        workers_pin(t);
    *ret = t;
    return 0;
}

void team_close(struct team **team)
{
    struct team *t = *team;
    if (!t)
        return;
    kn_assert(t->magic == TEAM_MAGIC);
    atomic_store(&t->stop, true);
    loop_open(t); /* open or not: a worker looks at stop first */
    for (unsigned i = 0; i < t->n_started; i++)
        pthread_join(t->threads[i], NULL);
    t->magic = 0;
    free(t);
    *team = NULL;
}
