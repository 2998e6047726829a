/* sim_disk.h: a disk for tests: files in memory behind struct disk_io, that fails when it is told to,
 * and that forgets, as a machine does whose power goes, any part of what was not synced.
 *
 *   what programs see       names -> file -> bytes            (a kill -9 loses nothing of it)
 *   what is safe            names -> file -> bytes            moved by sync, datasync, sync_folder
 *
 *   sim_power_loss: names: each unsynced rename happened or not; bytes: of each unsynced piece of 64
 *   bytes the old or the new ones; the length anything between. */
#ifndef BACKCAST_SIM_DISK_H
#define BACKCAST_SIM_DISK_H
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "disk_io.h"

#define SIM_FILES 32
#define SIM_FDS 32
#define SIM_PIECE 64

struct sim_file {
    uint8_t *now, *safe;
    size_t n_now, n_safe;
    bool used;
};
struct sim_name {
    char path[128];
    int file; /* -1: no such name */
};
struct sim_disk {
    struct disk_io io;
    struct sim_file files[SIM_FILES];
    struct sim_name now[SIM_FILES], safe[SIM_FILES];
    int fds[SIM_FDS]; /* file; -1: closed */
    uint32_t random;
    long ops;      /* changing calls so far */
    long fail_at;  /* the call with this number fails; -1: none */
    long fail_run; /* and so many after it */
    int why;       /* errno; ENOSPC on a write: half of it goes in first */
    long kill_at;  /* this call and all later ones do nothing: the process is dead; -1: never */
};

static uint32_t sim_below(struct sim_disk *d, uint32_t n)
{
    d->random = d->random * 1664525u + 1013904223u;
    return (uint32_t)(((uint64_t)d->random * n) >> 32);
}

static bool sim_dead(const struct sim_disk *d)
{
    return d->kill_at >= 0 && d->ops >= d->kill_at;
}

/* Counts a changing call; true: it fails with errno. */
static bool sim_fails(struct sim_disk *d)
{
    long at = d->ops++;
    if (d->kill_at >= 0 && at >= d->kill_at) {
        errno = EIO;
        return true;
    }
    if (d->fail_at < 0 || at < d->fail_at || at > d->fail_at + d->fail_run)
        return false;
    errno = d->why;
    return true;
}

static int *sim_find(struct sim_name *names, const char *path)
{
    for (int i = 0; i < SIM_FILES; i++)
        if (names[i].file >= 0 && strcmp(names[i].path, path) == 0)
            return &names[i].file;
    return NULL;
}

static void sim_name_set(struct sim_name *names, const char *path, int file)
{
    int *at = sim_find(names, path);
    if (at != NULL) {
        *at = file;
        return;
    }
    for (int i = 0; file >= 0 && i < SIM_FILES; i++)
        if (names[i].file < 0) {
            snprintf(names[i].path, sizeof names[i].path, "%s", path);
            names[i].file = file;
            return;
        }
    assert_int_equal(file, -1);
}

static int sim_open(void *arg, const char *path, int flags, mode_t mode)
{
    struct sim_disk *d = arg;
    (void)mode;
    int *at = sim_find(d->now, path), file = at != NULL ? *at : -1;
    if ((flags & O_CREAT) != 0 && sim_fails(d))
        return -1;
    if (file < 0 && (flags & O_CREAT) == 0) {
        errno = ENOENT;
        return -1;
    }
    for (int i = 0; file < 0 && i < SIM_FILES; i++)
        if (!d->files[i].used) {
            d->files[i] = (struct sim_file){.used = true};
            sim_name_set(d->now, path, file = i);
        }
    assert_true(file >= 0);
    if ((flags & O_TRUNC) != 0)
        d->files[file].n_now = 0;
    for (int fd = 0; fd < SIM_FDS; fd++)
        if (d->fds[fd] < 0) {
            d->fds[fd] = file;
            return fd;
        }
    fail_msg("too many descriptors");
    return -1;
}

static int sim_close(void *arg, int fd)
{
    struct sim_disk *d = arg;
    assert_true(fd >= 0 && fd < SIM_FDS && d->fds[fd] >= 0);
    d->fds[fd] = -1;
    return 0;
}

static struct sim_file *sim_of(struct sim_disk *d, int fd)
{
    assert_true(fd >= 0 && fd < SIM_FDS && d->fds[fd] >= 0);
    return &d->files[d->fds[fd]];
}

static int64_t sim_size(void *arg, int fd)
{
    return (int64_t)sim_of(arg, fd)->n_now;
}

static ssize_t sim_pread(void *arg, int fd, void *to, size_t n, uint64_t at)
{
    struct sim_file *f = sim_of(arg, fd);
    if (at >= f->n_now)
        return 0;
    n = BC_MIN(n, f->n_now - at);
    memcpy(to, f->now + at, n);
    return (ssize_t)n;
}

static ssize_t sim_pwrite(void *arg, int fd, const void *from, size_t n, uint64_t at)
{
    struct sim_disk *d = arg;
    struct sim_file *f = sim_of(d, fd);
    bool was_dead = sim_dead(d);
    if (sim_fails(d)) {
        if (was_dead || d->why != ENOSPC || n < 2)
            return -1;
        n /= 2; /* what fits; the next try says that there is no more room */
    }
    if (at + n > f->n_now) {
        f->now = realloc(f->now, at + n);
        assert_non_null(f->now);
        memset(f->now + f->n_now, 0, at + n - f->n_now);
        f->n_now = at + n;
    }
    memcpy(f->now + at, from, n);
    return (ssize_t)n;
}

static int sim_truncate(void *arg, int fd, uint64_t size)
{
    struct sim_disk *d = arg;
    struct sim_file *f = sim_of(d, fd);
    if (sim_fails(d))
        return -1;
    assert_true(size <= f->n_now);
    f->n_now = size;
    return 0;
}

static int sim_sync(void *arg, int fd)
{
    struct sim_disk *d = arg;
    struct sim_file *f = sim_of(d, fd);
    if (sim_fails(d))
        return -1; /* and the system believes the pages clean from now on: what it does to us */
    f->safe = realloc(f->safe, f->n_now + 1);
    assert_non_null(f->safe);
    if (f->n_now > 0)
        memcpy(f->safe, f->now, f->n_now);
    f->n_safe = f->n_now;
    return 0;
}

static int sim_rename(void *arg, const char *from, const char *to)
{
    struct sim_disk *d = arg;
    if (sim_fails(d))
        return -1;
    int *at = sim_find(d->now, from), file = at != NULL ? *at : -1;
    assert_true(file >= 0);
    *at = -1;
    sim_name_set(d->now, to, file);
    return 0;
}

static int sim_unlink(void *arg, const char *path)
{
    struct sim_disk *d = arg;
    int *at = sim_find(d->now, path);
    if (sim_fails(d))
        return -1;
    if (at == NULL) {
        errno = ENOENT;
        return -1;
    }
    *at = -1;
    return 0;
}

static int sim_sync_folder(void *arg, const char *path)
{
    struct sim_disk *d = arg;
    (void)path;
    if (sim_fails(d))
        return -1;
    memcpy(d->safe, d->now, sizeof d->safe);
    return 0;
}

static void sim_make(struct sim_disk *d)
{
    *d = (struct sim_disk){.random = 1, .fail_at = -1, .kill_at = -1, .why = EIO};
    d->io = (struct disk_io){.open = sim_open,
                             .close = sim_close,
                             .size = sim_size,
                             .pread = sim_pread,
                             .pwrite = sim_pwrite,
                             .datasync = sim_sync,
                             .sync = sim_sync,
                             .truncate = sim_truncate,
                             .rename = sim_rename,
                             .unlink = sim_unlink,
                             .sync_folder = sim_sync_folder,
                             .arg = d};
    for (int i = 0; i < SIM_FILES; i++)
        d->now[i].file = d->safe[i].file = -1;
    for (int i = 0; i < SIM_FDS; i++)
        d->fds[i] = -1;
}

static void sim_free(struct sim_disk *d)
{
    for (int i = 0; i < SIM_FILES; i++) {
        free(d->files[i].now);
        free(d->files[i].safe);
    }
}

/* The process has ended: its descriptors are gone, what it wrote is there. */
static void sim_restart(struct sim_disk *d)
{
    for (int i = 0; i < SIM_FDS; i++)
        d->fds[i] = -1;
    d->fail_at = d->kill_at = -1;
}

static void sim_file_lose(struct sim_disk *d, struct sim_file *f)
{
    size_t lo = BC_MIN(f->n_safe, f->n_now), hi = BC_MAX(f->n_safe, f->n_now);
    size_t n = lo + sim_below(d, (uint32_t)(hi - lo) + 1);
    uint8_t *mix = calloc(1, n + 1);
    assert_non_null(mix);
    for (size_t at = 0; at < n; at += SIM_PIECE) {
        bool newer = sim_below(d, 2) != 0;
        const uint8_t *from = newer ? f->now : f->safe;
        size_t has = newer ? f->n_now : f->n_safe, len = BC_MIN((size_t)SIM_PIECE, n - at);
        if (from != NULL && at < has)
            memcpy(mix + at, from + at, BC_MIN(len, has - at));
    }
    free(f->now);
    free(f->safe);
    f->now = mix;
    f->n_now = f->n_safe = n;
    f->safe = malloc(n + 1);
    assert_non_null(f->safe);
    memcpy(f->safe, mix, n);
}

/* The power goes and comes back. */
static void sim_power_loss(struct sim_disk *d)
{
    for (int i = 0; i < SIM_FILES; i++)
        if (d->files[i].used)
            sim_file_lose(d, &d->files[i]);
    if (sim_below(d, 2) != 0) /* the folder's last changes never got there */
        memcpy(d->now, d->safe, sizeof d->now);
    else
        memcpy(d->safe, d->now, sizeof d->safe);
    sim_restart(d);
}
#endif
