/* listen.c: the listening socket. See ipc.h.
 *
 *   folder (0750) -> lock file, flock for life -> is a daemon alive there? -> unlink the stale one
 *   -> bind with the final mode -> chown -> listen
 *
 * Everything between lock and listen happens under the lock, so two starts at once cannot unlink
 * each other's socket; nobody can connect before listen(2), so there is no instant with wider
 * permissions than configured. The lock file is never removed: removing it would let two holders
 * exist. */
#include "filelock.h"
#include "ipc.h"
#include "log.h"
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define LISTEN_BACKLOG 1024

static int path_set(struct listener *l, const char *path, struct err *e)
{
    size_t n = strlen(path);
    if (n == 0 || n >= sizeof l->path)
        return err_set(e, BC_EINVALID, "socket", "%s: a socket path has 1 to %zu bytes, not %zu",
                       path, sizeof l->path - 1, n);
    memcpy(l->path, path, n + 1);
    bool suffix = n > 5 && strcmp(path + n - 5, ".sock") == 0;
    snprintf(l->lock_path, sizeof l->lock_path, "%.*s.lock", (int)(suffix ? n - 5 : n), path);
    return BC_OK;
}

static int folder_make(const char *path, struct err *e)
{
    char dir[108];
    snprintf(dir, sizeof dir, "%s", path);
    char *slash = strrchr(dir, '/');
    if (slash == NULL || slash == dir)
        return BC_OK;
    *slash = '\0';
    if (mkdir(dir, 0750) < 0 && errno != EEXIST)
        return err_set(e, BC_EIO, "socket", "folder %s: %s", dir, strerror(errno));
    return BC_OK;
}

static int lock_take(struct listener *l, struct err *e)
{
    l->lock_fd = open(l->lock_path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (l->lock_fd < 0)
        return err_set(e, BC_EIO, "socket", "lock file %s: %s", l->lock_path, strerror(errno));
    if (!filelock_take(l->lock_fd)) {
        int rc =
            errno == EWOULDBLOCK
                ? err_set(e, BC_EBUSY, "socket", "another daemon serves %s (it holds %s)", l->path,
                          l->lock_path)
                : err_set(e, BC_EIO, "socket", "lock file %s: %s", l->lock_path, strerror(errno));
        close(l->lock_fd);
        l->lock_fd = -1;
        return rc;
    }
    return BC_OK;
}

/* Under the lock: whoever answers at the path does not know our lock; what does not answer is
 * stale. */
static int stale_remove(const struct listener *l, const struct sockaddr_un *sa, struct err *e)
{
    struct stat st;
    if (lstat(l->path, &st) < 0)
        return errno == ENOENT ? BC_OK
                               : err_set(e, BC_EIO, "socket", "%s: %s", l->path, strerror(errno));
    if (!S_ISSOCK(st.st_mode))
        return err_set(e, BC_EINVALID, "socket", "%s exists and is no socket", l->path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return err_set(e, BC_EIO, "socket", "socket: %s", strerror(errno));
    int refused = connect(fd, (const struct sockaddr *)sa, sizeof *sa) < 0 ? errno : 0;
    close(fd);
    if (refused != ECONNREFUSED && refused != ENOENT)
        return err_set(e, BC_EBUSY, "socket", "another program serves %s", l->path);
    if (refused == ECONNREFUSED) {
        log_info("ipc", "replacing the stale socket %s", l->path);
        if (unlink(l->path) < 0 && errno != ENOENT)
            return err_set(e, BC_EIO, "socket", "%s: %s", l->path, strerror(errno));
    }
    return BC_OK;
}

static int group_find(const char *name, gid_t *ret, struct err *e)
{
    struct group *g = getgrnam(name);
    if (g == NULL)
        return err_set(e, BC_EUNKNOWN, "socket_group", "no group is called %s", name);
    *ret = g->gr_gid;
    return BC_OK;
}

static int bind_and_listen(struct listener *l, const struct listen_options *opt,
                           const struct sockaddr_un *sa, struct err *e)
{
    gid_t gid = (gid_t)-1;
    bool has_group = opt->group != NULL && opt->group[0] != '\0';
    if (has_group && group_find(opt->group, &gid, e) < 0)
        return BC_EUNKNOWN;
    l->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (l->fd < 0)
        return err_set(e, BC_EIO, "socket", "socket: %s", strerror(errno));
    mode_t old = umask(0); /* no thread runs yet */
    bool bound =
        fchmod(l->fd, opt->mode) == 0 && bind(l->fd, (const struct sockaddr *)sa, sizeof *sa) == 0;
    int err = errno;
    umask(old);
    if (!bound)
        return err_set(e, BC_EIO, "socket", "%s: %s", l->path, strerror(err));
    if ((has_group && lchown(l->path, (uid_t)-1, gid) < 0) || listen(l->fd, LISTEN_BACKLOG) < 0) {
        err = errno;
        unlink(l->path);
        return err_set(e, BC_EIO, "socket", "%s: %s", l->path, strerror(err));
    }
    return BC_OK;
}

int listen_open(struct listener *ret, const struct listen_options *opt, struct err *e)
{
    struct listener l = {.fd = -1, .lock_fd = -1};
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    int rc = path_set(&l, opt->path, e);
    if (rc < 0)
        return rc;
    memcpy(sa.sun_path, l.path, strlen(l.path) + 1);
    if ((rc = folder_make(l.path, e)) < 0 || (rc = lock_take(&l, e)) < 0)
        return rc;
    if ((rc = stale_remove(&l, &sa, e)) < 0 || (rc = bind_and_listen(&l, opt, &sa, e)) < 0) {
        if (l.fd >= 0)
            close(l.fd);
        close(l.lock_fd);
        return rc;
    }
    *ret = l;
    return BC_OK;
}

int listen_inherit(struct listener *ret, int fd, struct err *e)
{
    struct sockaddr_un sa;
    socklen_t len = sizeof sa;
    int type = 0, accepting = 0;
    socklen_t n = sizeof type;
    memset(&sa, 0, sizeof sa);
    if (getsockname(fd, (struct sockaddr *)&sa, &len) < 0)
        return err_set(e, BC_EINVALID, "socket", "inherited descriptor %d: %s", fd,
                       strerror(errno));
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &n) < 0 ||
        getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &accepting, &n) < 0 || sa.sun_family != AF_UNIX ||
        type != SOCK_STREAM || accepting == 0)
        return err_set(e, BC_EINVALID, "socket",
                       "inherited descriptor %d is no listening AF_UNIX stream socket", fd);
    if (sa.sun_path[0] == '\0')
        return err_set(e, BC_EINVALID, "socket",
                       "inherited descriptor %d has no path: an abstract socket has no mode", fd);
    if (fcntl(fd, F_SETFD, FD_CLOEXEC) < 0 || fcntl(fd, F_SETFL, O_RDWR | O_NONBLOCK) < 0)
        return err_set(e, BC_EIO, "socket", "inherited descriptor %d: %s", fd, strerror(errno));
    struct listener l = {.fd = fd, .lock_fd = -1, .inherited = true};
    snprintf(l.path, sizeof l.path, "%.*s", (int)sizeof sa.sun_path - 1, sa.sun_path);
    *ret = l;
    return BC_OK;
}

void listen_close(struct listener *l)
{
    if (l->fd >= 0)
        close(l->fd);
    if (!l->inherited && l->fd >= 0)
        unlink(l->path); /* still under the lock */
    if (l->lock_fd >= 0)
        close(l->lock_fd);
    l->fd = l->lock_fd = -1;
}
