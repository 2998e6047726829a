/* workers.h: a fixed team of threads that shares out loops.
 *
 * team_run cuts items 0 .. n_items - 1 in runs of `grain` (the last one may be shorter) and gives the caller and the workers
 * neighbouring ones to begin with; who is done early takes some of another's. Nobody may count on an order. Who computes an item never changes its result (every
 * item writes its own outputs), so a result does not depend on the number of threads nor on their
 * speed.
 *
 * One thread at a time calls into a team. `thread` in the callback is 0 for the caller, 1 .. n - 1
 * for the workers: an index for per-thread scratch. */
#ifndef BACKCAST_CPU_WORKERS_H
#define BACKCAST_CPU_WORKERS_H
#include <stdbool.h>
#include <stdint.h>

#define TEAM_THREADS_MAX 64

struct team;
typedef void (*team_fn)(void *ctx, unsigned thread, uint32_t first, uint32_t end);

/* n_threads counts the caller: 1 starts no thread. pin: worker i keeps to core i of those that the process may use (in
 * turns, if there are fewer); the caller's thread is the caller's and stays as it is. 0, or -1 (memory, threads) with *ret
 * untouched. */
int team_open(struct team **ret, unsigned n_threads, bool pin);
void team_close(struct team **team);
unsigned team_size(const struct team *team);
void team_run(struct team *team, team_fn fn, void *ctx, uint32_t n_items, uint32_t grain);
#endif
