/* faulty_disk.h: the system's disk with calls that fail when a test says so. It counts the calls that
 * change something; those with the numbers fail_at .. fail_at + fail_n - 1 fail with `why`.
 *
 * ENOSPC on a write, when the call after it fails as well, is what a disk does that fills up: half of
 * the bytes go in, and the next call says that there is no room. `why` 0: writes are short, nothing
 * else happens. Threads may call it; what is to fail is set while nobody does. */
#ifndef BACKCAST_FAULTY_DISK_H
#define BACKCAST_FAULTY_DISK_H
#include "disk_io.h"

struct faulty_disk {
    struct disk_io io;
    _Atomic long ops, failed; /* so far */
    long fail_at, fail_n;     /* fail_n 0: none */
    int why;
    bool syncs_only; /* only calls that sync are counted, and fail */
    /* Before every call that changes what a killed process leaves behind, and in the middle of a write:
     * half of its bytes are in. NULL: nobody looks. */
    void (*look)(void *arg, const char *call);
    void *look_arg;
};
void faulty_make(struct faulty_disk *d);
/* Syncs do nothing: for tests of kills, which lose nothing that was written, and of memory. */
void disk_unsynced(struct disk_io *io);
/* From the next call on. */
void faulty_arm(struct faulty_disk *d, long after, long n, int why);
#endif
