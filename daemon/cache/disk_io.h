/* disk_io.h: the system calls that change files of the state folder, behind one table, so that tests
 * can fail the Nth one, keep a list of them, or lose what was not synced.
 *
 * Functions answer as the system call does: -1 and errno. The three that loop over them (disk_write,
 * disk_read, disk_replace) answer with codes and a sentence. Any thread; a table has no state of its
 * own but `arg`.
 *
 * How a file comes to its name:   NAME.tmp: written, fsync   rename to NAME   fsync of the folder
 * so that NAME is the old file or the new one, whole, whenever the power goes. */
#ifndef BACKCAST_DISK_IO_H
#define BACKCAST_DISK_IO_H
#include <sys/types.h>
#include "base.h"

struct disk_io {
    int (*open)(void *arg, const char *path, int flags, mode_t mode); /* O_CLOEXEC is added */
    int (*close)(void *arg, int fd);
    int64_t (*size)(void *arg, int fd); /* of an ordinary file; EISDIR: it is none */
    ssize_t (*pread)(void *arg, int fd, void *to, size_t n, uint64_t at);
    ssize_t (*pwrite)(void *arg, int fd, const void *from, size_t n, uint64_t at);
    int (*datasync)(void *arg, int fd);
    int (*sync)(void *arg, int fd);
    int (*truncate)(void *arg, int fd, uint64_t size);
    int (*rename)(void *arg, const char *from, const char *to);
    int (*unlink)(void *arg, const char *path);
    int (*sync_folder)(void *arg, const char *path); /* its entries */
    void *arg;
};
extern const struct disk_io disk_io_system;

/* All n bytes, however many calls it takes. BC_EIO names the file; BC_ECORRUPT: it ends too early. */
int disk_write(const struct disk_io *io, int fd, const void *from, size_t n, uint64_t at,
               const char *name, struct err *e);
int disk_read(const struct disk_io *io, int fd, void *to, size_t n, uint64_t at, const char *name,
              struct err *e);
/* Syncs fd, which was opened as path + ".tmp", gives it its name and syncs the folder. On failure
 * the temporary file is gone and path is what it was (or the new file, if only the folder could not
 * be synced: the caller was not told that it is safe, and it may be). fd stays open. */
int disk_replace(const struct disk_io *io, int fd, const char *path, struct err *e);
int disk_failed(struct err *e, const char *what, const char *name); /* BC_EIO from errno */
#define DISK_PATH_MAX 4096
#endif
