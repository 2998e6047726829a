/* bench_pauses [--seconds 10]: how often this machine takes a core from a thread that never waits.
 *
 * As many threads as cores look at the clock again and again, each on a core of its own. Where two looks are more than
 * PAUSE_US apart, somebody else had the core: another program, or the host of a virtual machine, whose pauses no
 * processor time inside shows. What a benchmark sees of gaps between two tokens (bench_gap, bench_serve) holds these too.
 *
 *     pauses,core N,per_minute        pauses of more than PAUSE_US
 *     pauses,core N,mean_ms
 *     pauses,core N,longest_ms
 *
 * CSV: bench,case,figure,value */
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "clock.h"

#define PAUSE_US 1000u
#define CORES_MAX 64u

struct core {
    pthread_t thread;
    int cpu;
    uint64_t for_us, n, sum, longest; /* us; of all pauses */
};

static void *look(void *arg)
{
    struct core *c = arg;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(c->cpu, &one);
    pthread_setaffinity_np(pthread_self(), sizeof one, &one);
    uint64_t last = clock_us(), end = last + c->for_us;
    while (last < end) {
        uint64_t now = clock_us(), gap = now - last;
        if (gap > PAUSE_US) {
            c->n++;
            c->sum += gap;
            c->longest = gap > c->longest ? gap : c->longest;
        }
        last = now;
    }
    return NULL;
}

int main(int argc, char **argv)
{
    static struct core cores[CORES_MAX];
    double seconds = 10;
    unsigned n = 0;
    cpu_set_t all;
    if (argc == 3 && strcmp(argv[1], "--seconds") == 0)
        seconds = strtod(argv[2], NULL);
    else if (argc != 1)
        seconds = 0;
    if (!(seconds >= 1 && seconds <= 600) || sched_getaffinity(0, sizeof all, &all) != 0) {
        fprintf(stderr, "usage: bench_pauses [--seconds 1..600]\n");
        return 2;
    }
    for (int cpu = 0; cpu < CPU_SETSIZE && n < CORES_MAX; cpu++)
        if (CPU_ISSET(cpu, &all))
            cores[n++] = (struct core){.cpu = cpu, .for_us = (uint64_t)(seconds * 1e6)};
    for (unsigned i = 0; i < n; i++)
        if (pthread_create(&cores[i].thread, NULL, look, &cores[i]) != 0)
            return 1;
    printf("bench,case,figure,value\n");
    for (unsigned i = 0; i < n; i++) {
        const struct core *c = &cores[i];
        pthread_join(c->thread, NULL);
        printf("pauses,core %d,per_minute,%.0f\n", c->cpu, (double)c->n * 60 / seconds);
        printf("pauses,core %d,mean_ms,%.2f\n", c->cpu,
               c->n > 0 ? (double)c->sum / (double)c->n / 1e3 : 0.0);
        printf("pauses,core %d,longest_ms,%.2f\n", c->cpu, (double)c->longest / 1e3);
    }
    return 0;
}
