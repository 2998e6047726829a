/* daemon_harness.h: a real backcastd of the test's own, on a private socket in a folder of its own.
 *
 *     struct dh *d = dh_start("tiny-llama.gguf", NULL);
 *     backcast *c = dh_connect(d); ...
 *     dh_stop(&d);                 SIGTERM; asserts that it ended by itself with code 0
 *
 * It is ready when dh_start returns and ends with the test, even if the test is killed. Under a
 * sanitizer a leak or a race makes dh_stop fail, and the daemon's log goes to stderr. Failures are
 * cmocka's. */
#ifndef BACKCAST_DAEMON_HARNESS_H
#define BACKCAST_DAEMON_HARNESS_H
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include "backcast.h"

/* How long something that comes at once is waited for: the machine may be busy with other things. */
#define DH_PATIENCE_MS 30000

struct dh {
    pid_t pid;
    int parent_fd; /* its end is the daemon's --parent-fd */
    char dir[40], socket[64], log[64];
};

/* model: a file of tests/vectors, or a path with a '/'. args: more options, NULL-terminated, or
 * NULL.
 */
struct dh *dh_start(const char *model, const char *const *args);
/* tiny-llama.gguf saying that it was trained on texts of a million tokens: for long answers. */
struct dh *dh_start_long(const char *const *args);
struct dh *dh_start_context(uint32_t context, const char *const *args); /* ... or of so many */
void dh_long_model(const char *path);                                   /* writes it */
/* Writes any tiny model with another trained context. */
void dh_context_model(const char *path, const char *model, uint32_t context);
void dh_stop(struct dh **d);
/* the teardown of a group whose setup has left its daemon in *state */
int dh_group_stop(void **state);
backcast *dh_connect(const struct dh *d); /* the caller disconnects */
/* After dh_wait: another daemon in the place of the one that ended, on the same socket. It loads when
 * this returns; dh_ready waits until it is ready. */
void dh_again(struct dh *d, const char *model, const char *const *args);
void dh_ready(struct dh *d);
/* Started, but not waited for: returns its exit code within 20 s. For starts that must fail. */
int dh_start_fails(const char *const *args, char *ret_log, size_t size);
/* Waits until it has ended; its wait status. */
int dh_wait(struct dh *d, unsigned timeout_ms);
void dh_free(struct dh **d); /* after dh_wait: removes the folder */
bool dh_alive(const struct dh *d);
unsigned dh_fds(const struct dh *d);                   /* open descriptors of the daemon */
uint64_t dh_rss(const struct dh *d);                   /* bytes */
bool dh_log_has(const struct dh *d, const char *text); /* anywhere in its log so far */
/* Polls `what` until it is true: 1, or time is over: 0. */
int dh_until(bool (*what)(void *arg), void *arg, unsigned timeout_ms);
#endif
