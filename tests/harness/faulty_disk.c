/* faulty_disk.c: see faulty_disk.h. */
#include <errno.h>
#include <fcntl.h>
#include "faulty_disk.h"

enum verdict { FINE, SHORT, FAILS };

static enum verdict judge(struct faulty_disk *d, bool write, bool sync)
{
    if (d->syncs_only && !sync)
        return FINE;
    long at = d->ops++;
    if (at < d->fail_at || at >= d->fail_at + d->fail_n)
        return FINE;
    if (d->why == 0 && !write)
        return FINE;
    d->failed++;
    if (write && (d->why == 0 || (d->why == ENOSPC && at + 1 < d->fail_at + d->fail_n)))
        return SHORT;
    errno = d->why;
    return FAILS;
}

static void look(const struct faulty_disk *d, const char *call)
{
    if (d->look != NULL)
        d->look(d->look_arg, call);
}

static int faulty_open(void *arg, const char *path, int flags, mode_t mode)
{
    bool makes = (flags & (O_CREAT | O_TRUNC)) != 0;
    if (makes)
        look(arg, "open");
    if (makes && judge(arg, false, false) == FAILS)
        return -1;
    return disk_io_system.open(NULL, path, flags, mode);
}

static ssize_t faulty_pwrite(void *arg, int fd, const void *from, size_t n, uint64_t at)
{
    const struct faulty_disk *d = arg;
    look(d, "write");
    if (d->look != NULL && n > 1 && disk_io_system.pwrite(NULL, fd, from, n / 2, at) > 0)
        look(d, "half of a write");
    enum verdict v = judge(arg, true, false);
    if (v == FAILS)
        return -1;
    return disk_io_system.pwrite(NULL, fd, from, v == SHORT && n > 1 ? n / 2 : n, at);
}

static int faulty_datasync(void *arg, int fd)
{
    return judge(arg, false, true) == FAILS ? -1 : disk_io_system.datasync(NULL, fd);
}

static int faulty_sync(void *arg, int fd)
{
    return judge(arg, false, true) == FAILS ? -1 : disk_io_system.sync(NULL, fd);
}

static int faulty_truncate(void *arg, int fd, uint64_t size)
{
    look(arg, "truncate");
    return judge(arg, false, false) == FAILS ? -1 : disk_io_system.truncate(NULL, fd, size);
}

static int faulty_rename(void *arg, const char *from, const char *to)
{
    look(arg, "rename");
    return judge(arg, false, false) == FAILS ? -1 : disk_io_system.rename(NULL, from, to);
}

static int faulty_unlink(void *arg, const char *path)
{
    look(arg, "unlink");
    return judge(arg, false, false) == FAILS ? -1 : disk_io_system.unlink(NULL, path);
}

static int faulty_sync_folder(void *arg, const char *path)
{
    return judge(arg, false, true) == FAILS ? -1 : disk_io_system.sync_folder(NULL, path);
}

void faulty_make(struct faulty_disk *d)
{
    *d = (struct faulty_disk){.io = disk_io_system};
    d->io.open = faulty_open;
    d->io.pwrite = faulty_pwrite;
    d->io.datasync = faulty_datasync;
    d->io.sync = faulty_sync;
    d->io.truncate = faulty_truncate;
    d->io.rename = faulty_rename;
    d->io.unlink = faulty_unlink;
    d->io.sync_folder = faulty_sync_folder;
    d->io.arg = d;
}

void faulty_arm(struct faulty_disk *d, long after, long n, int why)
{
    d->fail_at = d->ops + after;
    d->fail_n = n;
    d->why = why;
}

static int synced(void *arg, int fd)
{
    (void)arg;
    (void)fd;
    return 0;
}

static int folder_synced(void *arg, const char *path)
{
    (void)arg;
    (void)path;
    return 0;
}

void disk_unsynced(struct disk_io *io)
{
    io->sync = io->datasync = synced;
    io->sync_folder = folder_synced;
}
