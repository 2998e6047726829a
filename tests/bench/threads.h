/* threads.h: processor time of a process's threads, as the system's scheduler counts it, by what they do in backcastd:
 *
 *     THREADS_LOOP      the first thread: sockets and rings
 *     THREADS_KERNELS   "kn-worker": the backend's team, without its caller
 *     THREADS_ENGINE    the others: the engine's own, intake, disk, keeper
 *
 * Reads /proc/PID/task/TID/schedstat: nanoseconds that it ran, nanoseconds that it waited for a core, times that it ran. */
#ifndef BACKCAST_BENCH_THREADS_H
#define BACKCAST_BENCH_THREADS_H
#include <dirent.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

enum threads_kind { THREADS_LOOP, THREADS_ENGINE, THREADS_KERNELS, THREADS_KINDS };

struct thread_time {
    uint64_t ran_ns, waited_ns, runs;
};

/* A file of /proc/PID/task/TID; false: it is gone. */
static inline bool thread_file(pid_t pid, int tid, const char *name, char *ret, size_t size)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/task/%d/%s", (int)pid, tid, name);
    FILE *f = fopen(path, "re");
    bool read = f != NULL && fgets(ret, (int)size, f) != NULL;
    if (f != NULL)
        fclose(f);
    return read;
}

/* Adds up the threads that there are; zeroes where the system does not say. */
static inline void threads_read(pid_t pid, struct thread_time ret[THREADS_KINDS])
{
    char path[32], text[96];
    memset(ret, 0, THREADS_KINDS * sizeof *ret);
    snprintf(path, sizeof path, "/proc/%d/task", (int)pid);
    DIR *d = opendir(path);
    for (struct dirent *x; d != NULL && (x = readdir(d)) != NULL;) {
        int tid = atoi(x->d_name);
        if (tid == 0 || !thread_file(pid, tid, "comm", text, sizeof text))
            continue;
        struct thread_time *t = tid == (int)pid                      ? &ret[THREADS_LOOP]
                                : strncmp(text, "kn-worker", 9) == 0 ? &ret[THREADS_KERNELS]
                                                                     : &ret[THREADS_ENGINE];
        unsigned long long ran, waited, runs;
        if (thread_file(pid, tid, "schedstat", text, sizeof text) &&
            sscanf(text, "%llu %llu %llu", &ran, &waited, &runs) == 3) {
            t->ran_ns += ran;
            t->waited_ns += waited;
            t->runs += runs;
        }
    }
    if (d != NULL)
        closedir(d);
}
#endif
