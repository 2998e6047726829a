/* shm.c: see shm.h.
 *
 * A region is a memfd: fallocated first (no page fault can fail later), mapped, then sealed. What
 * the seals forbid to everybody, the daemon included: to shrink it (a client could make us die of
 * SIGBUS), to grow it, to add seals; and for what only we write: any further way to write
 * (F_SEAL_FUTURE_WRITE leaves the mapping that exists, which is ours). A seal that fails is fatal
 * for the session. Fds of memfds are closed once they are sent: a mapping keeps the memory. */
#include "shm.h"
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U /* Linux 6.3 */
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010 /* Linux 5.1 */
#endif

static int sys_error(struct err *e, const char *what)
{
    int code = errno == EMFILE || errno == ENFILE   ? BC_EBUSY
               : errno == ENOMEM || errno == ENOSPC ? BC_ENOMEM
                                                    : BC_EIO;
    return err_set(e, code, "", "shared memory: %s: %s", what, strerror(errno));
}

static int memfd_new(const char *name, size_t bytes, int *ret, struct err *e)
{
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    if (fd < 0 && errno == EINVAL)
        fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return sys_error(e, "memfd_create");
    if (bytes > 0 && fallocate(fd, 0, 0, (off_t)bytes) < 0) {
        int rc = sys_error(e, "fallocate");
        close(fd);
        return rc;
    }
    *ret = fd;
    return BC_OK;
}

#define SEALS_SIZE (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

/* Makes, maps and seals one region; ours to write (then nobody else can), or only to read. */
static int region_new(const char *name, size_t bytes, bool ours, void **ret_map, int *ret_fd,
                      struct err *e)
{
    int fd, prot = ours ? PROT_READ | PROT_WRITE : PROT_READ;
    int seals = ours ? SEALS_SIZE | F_SEAL_FUTURE_WRITE : SEALS_SIZE;
    int rc = memfd_new(name, bytes, &fd, e);
    if (rc < 0)
        return rc;
    void *map = mmap(NULL, bytes, prot, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED) {
        rc = sys_error(e, "mmap");
        goto close_fd;
    }
    if (fcntl(fd, F_ADD_SEALS, seals) < 0) {
        rc = sys_error(e, "sealing");
        goto unmap;
    }
    (void)madvise(map, bytes, MADV_DONTDUMP); /* prompts stay out of core files */
    *ret_map = map;
    *ret_fd = fd;
    return BC_OK;
unmap:
    munmap(map, bytes);
close_fd:
    close(fd);
    return rc;
}

static void fd_close(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

int shm_open_rings(struct shm *ret, uint64_t size, struct err *e)
{
    bc_assert(ring_size_ok(size));
    struct shm m = SHM_NONE;
    void *map;
    int pair[2];
    m.size = size;
    int rc = region_new("backcast-d2c", RING_REGION_BYTES(size), true, &map, &m.d2c_fd, e);
    if (rc < 0)
        goto fail;
    m.d2c = map;
    rc = region_new("backcast-c2d", RING_REGION_BYTES(size), false, &map, &m.c2d_fd, e);
    if (rc < 0)
        goto fail;
    m.c2d = map;
    if ((m.c2d_bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) < 0) {
        rc = sys_error(e, "eventfd");
        goto fail;
    }
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) < 0) {
        rc = sys_error(e, "socketpair");
        goto fail;
    }
    m.d2c_bell = pair[0];
    m.d2c_bell_peer = pair[1];
    *ret = m;
    return BC_OK;
fail:
    shm_close(&m);
    return rc;
}

int shm_client_fds(struct shm *m, int ret[4], struct err *e)
{
    bc_assert(m->d2c_fd >= 0 && m->d2c_bell_peer >= 0);
    int bell = fcntl(m->c2d_bell, F_DUPFD_CLOEXEC, 0);
    if (bell < 0)
        return sys_error(e, "dup");
    ret[0] = m->d2c_fd;
    ret[1] = m->c2d_fd;
    ret[2] = bell;
    ret[3] = m->d2c_bell_peer;
    m->d2c_fd = m->c2d_fd = m->d2c_bell_peer = -1;
    return BC_OK;
}

void shm_ring_bell(const struct shm *m)
{
    /* Full: the client has a bell to read already. Closed: its connection tells us. */
    (void)!send(m->d2c_bell, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

void shm_close(struct shm *m)
{
    if (m->d2c != NULL)
        munmap(m->d2c, RING_REGION_BYTES(m->size));
    if (m->c2d != NULL)
        munmap((void *)(uintptr_t)m->c2d, RING_REGION_BYTES(m->size));
    m->d2c = NULL;
    m->c2d = NULL;
    fd_close(&m->d2c_fd);
    fd_close(&m->c2d_fd);
    fd_close(&m->c2d_bell);
    fd_close(&m->d2c_bell);
    fd_close(&m->d2c_bell_peer);
}

uint64_t shm_charge(uint64_t size)
{
    return 2 * RING_REGION_BYTES(size);
}

int shm_page(size_t bytes, void **ret_map, int *ret_fd, struct err *e)
{
    return region_new("backcast-stats", bytes, true, ret_map, ret_fd, e);
}

int shm_copy(const void *bytes, size_t len, int *ret_fd, struct err *e)
{
    int fd;
    int rc = memfd_new("backcast-scores", 0, &fd, e);
    if (rc < 0)
        return rc;
    for (size_t done = 0; done < len;) {
        ssize_t n = write(fd, (const char *)bytes + done, len - done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            rc = sys_error(e, "write");
            goto fail;
        }
        done += (size_t)n;
    }
    if (fcntl(fd, F_ADD_SEALS, SEALS_SIZE | F_SEAL_WRITE) < 0) {
        rc = sys_error(e, "sealing");
        goto fail;
    }
    *ret_fd = fd;
    return BC_OK;
fail:
    close(fd);
    return rc;
}
