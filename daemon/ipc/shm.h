/* shm.h: memory that clients may see: rings, bells, the stats page, copies to hand out. All made by
 * the daemon, sized before anybody gets them, and sealed; nothing is ever imported. */
#ifndef BACKCAST_SHM_H
#define BACKCAST_SHM_H
#include "base.h"
#include "ring.h"

/* A session's pair of regions and its two bells, both ends. fds -1 when closed or handed on: a zeroed
 * struct names descriptor 0, so it begins as SHM_NONE. */
struct shm {
    uint64_t size;
    struct ring_region *d2c;
    const struct ring_region *c2d;
    int d2c_fd, c2d_fd;
    int c2d_bell;                /* eventfd: watched by epoll, never read or written here */
    int d2c_bell, d2c_bell_peer; /* socket pair: ours, the client's */
};
#define SHM_NONE                                                                                   \
    ((struct shm){.d2c_fd = -1, .c2d_fd = -1, .c2d_bell = -1, .d2c_bell = -1, .d2c_bell_peer = -1})
int shm_open_rings(struct shm *ret, uint64_t size, struct err *e);
/* The four fds of SessionOpened, in wire order. They become the caller's (c2d_bell is a copy). */
int shm_client_fds(struct shm *m, int ret[4], struct err *e);
void shm_ring_bell(const struct shm *m); /* tells the client; never waits */
void shm_close(struct shm *m);           /* SHM_NONE then */
uint64_t shm_charge(uint64_t size);      /* bytes that a pair of regions takes */

/* A page that the daemon writes and clients can only read. The fd stays open for handing out. */
int shm_page(size_t bytes, void **ret_map, int *ret_fd, struct err *e);
/* An unchangeable copy of bytes. */
int shm_copy(const void *bytes, size_t len, int *ret_fd, struct err *e);
#endif
