/* disk_io.c: see disk_io.h. */
#include "disk_io.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int system_open(void *arg, const char *path, int flags, mode_t mode)
{
    (void)arg;
    /* a pipe under this name would wait for its other end; what is no file is told by its size */
    return open(path, flags | O_CLOEXEC | O_NONBLOCK, mode);
}

static int system_close(void *arg, int fd)
{
    (void)arg;
    return close(fd);
}

static int64_t system_size(void *arg, int fd)
{
    struct stat st;
    (void)arg;
    if (fstat(fd, &st) < 0)
        return -1;
    if (!S_ISREG(st.st_mode)) {
        errno = S_ISDIR(st.st_mode) ? EISDIR : ESPIPE;
        return -1;
    }
    return st.st_size;
}

static ssize_t system_pread(void *arg, int fd, void *to, size_t n, uint64_t at)
{
    (void)arg;
    return pread(fd, to, n, (off_t)at);
}

static ssize_t system_pwrite(void *arg, int fd, const void *from, size_t n, uint64_t at)
{
    (void)arg;
    return pwrite(fd, from, n, (off_t)at);
}

static int system_datasync(void *arg, int fd)
{
    (void)arg;
    return fdatasync(fd);
}

static int system_sync(void *arg, int fd)
{
    (void)arg;
    return fsync(fd);
}

static int system_truncate(void *arg, int fd, uint64_t size)
{
    (void)arg;
    return ftruncate(fd, (off_t)size);
}

static int system_rename(void *arg, const char *from, const char *to)
{
    (void)arg;
    return rename(from, to);
}

static int system_unlink(void *arg, const char *path)
{
    (void)arg;
    return unlink(path);
}

static int system_sync_folder(void *arg, const char *path)
{
    (void)arg;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    int rc = fsync(fd), why = errno;
    close(fd);
    errno = why;
    return rc;
}

const struct disk_io disk_io_system = {
    .open = system_open,
    .close = system_close,
    .size = system_size,
    .pread = system_pread,
    .pwrite = system_pwrite,
    .datasync = system_datasync,
    .sync = system_sync,
    .truncate = system_truncate,
    .rename = system_rename,
    .unlink = system_unlink,
    .sync_folder = system_sync_folder,
};

int disk_failed(struct err *e, const char *what, const char *name)
{
    return err_set(e, BC_EIO, "state_dir", "%s %.150s: %s", what, name, strerror(errno));
}

int disk_write(const struct disk_io *io, int fd, const void *from, size_t n, uint64_t at,
               const char *name, struct err *e)
{
    const uint8_t *p = from;
    while (n > 0) {
        ssize_t k = io->pwrite(io->arg, fd, p, n, at);
        if (k < 0 && errno == EINTR)
            continue;
        if (k == 0)
            errno = ENOSPC;
        if (k <= 0)
            return disk_failed(e, "writing", name);
        p += k;
        at += (uint64_t)k;
        n -= (size_t)k;
    }
    return BC_OK;
}

int disk_read(const struct disk_io *io, int fd, void *to, size_t n, uint64_t at, const char *name,
              struct err *e)
{
    uint8_t *p = to;
    while (n > 0) {
        ssize_t k = io->pread(io->arg, fd, p, n, at);
        if (k < 0 && errno == EINTR)
            continue;
        if (k < 0)
            return disk_failed(e, "reading", name);
        if (k == 0)
            return err_set(e, BC_ECORRUPT, "state_dir", "%.150s ends at byte %llu, %zu too early",
                           name, (unsigned long long)at, n);
        p += k;
        at += (uint64_t)k;
        n -= (size_t)k;
    }
    return BC_OK;
}

int disk_replace(const struct disk_io *io, int fd, const char *path, struct err *e)
{
    char temporary[DISK_PATH_MAX + 8], folder[DISK_PATH_MAX];
    const char *slash = strrchr(path, '/');
    bc_assert(slash != NULL && strlen(path) < DISK_PATH_MAX);
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    snprintf(folder, sizeof folder, "%.*s", (int)(slash - path), path);
    int rc = BC_OK;
    if (io->sync(io->arg, fd) < 0)
        rc = disk_failed(e, "syncing", temporary);
    else if (io->rename(io->arg, temporary, path) < 0)
        rc = disk_failed(e, "renaming", temporary);
    else if (io->sync_folder(io->arg, folder) < 0)
        return disk_failed(e, "syncing", folder);
    if (rc < 0)
        io->unlink(io->arg, temporary);
    return rc;
}
