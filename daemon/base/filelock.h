/* filelock.h: the lock of a file, for the life of a process. */
#ifndef BACKCAST_FILELOCK_H
#define BACKCAST_FILELOCK_H
#include <stdbool.h>
#include <errno.h>
#include <sys/file.h>
#include <time.h>

#define FILELOCK_WAIT_MS 1000

/* Takes fd's lock (flock). A process that was killed holds its own until the system has taken it
 * apart, so a second is waited for it. False: errno says why; EWOULDBLOCK: somebody lives and has
 * it. */
static inline bool filelock_take(int fd)
{
    bool held = flock(fd, LOCK_EX | LOCK_NB) < 0;
    for (int ms = 0; held && errno == EWOULDBLOCK && ms < FILELOCK_WAIT_MS; ms += 10) {
        nanosleep(&(struct timespec){0, 10 * 1000 * 1000}, NULL);
        held = flock(fd, LOCK_EX | LOCK_NB) < 0;
    }
    return !held;
}
#endif
