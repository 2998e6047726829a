/* journal.c: see journal.h: the writing side.
 *
 *   file    | synced .................. | written, not synced |
 *                                       ^ synced_end           ^ end
 *   owed                                | the same bytes      | and what a failed write left out |
 *                                       '---- in memory until a sync succeeds ----'
 */
#include "journal.h"
#include "crc32c.h"
#include "journal_frame.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define JOURNAL_MAGIC 0x6a726e6cu
#define COPY_BYTES (1u << 20)

struct journal {
    unsigned magic;
    const struct disk_io *io;
    char *path;
    int fd; /* -1: abandoned; the file at path is good up to synced_end */
    uint64_t synced_end, end;
    uint64_t seq, synced_seq;
    uint32_t sum;
    struct bytes_out owed; /* from synced_end on */
};

/* ---- frames ---- */

size_t journal_frame(struct bytes_out *o, uint16_t type)
{
    size_t at = o->n;
    struct frame_head h = {.type = type};
    bytes_put(o, &h, sizeof h);
    return at;
}

void journal_frame_end(struct bytes_out *o, size_t frame)
{
    if (o->failed)
        return;
    uint32_t len = (uint32_t)(o->n - frame - sizeof(struct frame_head));
    bc_assert(len <= JOURNAL_PAYLOAD_MAX);
    memcpy(o->at + frame, &len, sizeof len);
    bytes_put_u32(o, 0);
}

/* Numbers and sums for all frames of a buffer. */
static void frames_seal(struct journal *j, uint8_t *at, size_t n)
{
    while (n > 0) {
        struct frame_head h;
        memcpy(&h, at, sizeof h);
        size_t all = sizeof h + h.len + sizeof j->sum;
        bc_assert(all <= n);
        h.seq = ++j->seq;
        h.synced = j->synced_seq;
        memcpy(at, &h, sizeof h);
        j->sum = crc32c(0, at, sizeof h + h.len);
        memcpy(at + sizeof h + h.len, &j->sum, sizeof j->sum);
        at += all;
        n -= all;
    }
}

/* ---- life ---- */

static struct journal *journal_new(const struct disk_io *io, const char *path)
{
    struct journal *j = calloc(1, sizeof *j);
    if (j == NULL)
        return NULL;
    j->magic = JOURNAL_MAGIC;
    j->io = io;
    j->fd = -1;
    if ((j->path = strdup(path)) == NULL) {
        free(j);
        return NULL;
    }
    return j;
}

void journal_close(struct journal **pj)
{
    struct journal *j = *pj;
    if (j == NULL)
        return;
    MAGIC_OK(j, JOURNAL_MAGIC);
    if (j->fd >= 0)
        j->io->close(j->io->arg, j->fd);
    j->magic = 0;
    free(j->owed.at);
    free(j->path);
    free(j);
    *pj = NULL;
}

static int owed_add(struct journal *j, const struct bytes_out *frames, struct err *e)
{
    if (frames->failed || j->owed.n + frames->n > JOURNAL_OWED_MAX)
        return err_nomem(e, j->owed.n + frames->n);
    size_t at = j->owed.n;
    bytes_put(&j->owed, frames->at, frames->n);
    if (j->owed.failed) {
        j->owed.failed = false; /* as it was: nothing has been added */
        return err_nomem(e, at + frames->n);
    }
    frames_seal(j, j->owed.at + at, frames->n);
    return BC_OK;
}

/* What is owed is synced: it need not be kept. */
static void owed_clear(struct journal *j)
{
    j->synced_end = j->end;
    j->synced_seq = j->seq;
    j->owed.n = 0;
    if (j->owed.cap > COPY_BYTES) { /* a long prompt went through */
        free(j->owed.at);
        j->owed = (struct bytes_out){0};
    }
}

/* ---- a new file ---- */

static int part_write(struct journal *j, int fd, const void *bytes, size_t n, uint64_t *at,
                      struct err *e)
{
    int rc = disk_write(j->io, fd, bytes, n, *at, j->path, e);
    *at += n;
    return rc;
}

/* The part of the old file that had been synced, checked record by record as it goes over. */
struct copy {
    struct journal *j;
    int fd;
    uint64_t at, seq;
};

static int copy_record(void *arg, const struct journal_record *r, struct err *e)
{
    struct copy *c = arg;
    size_t n = sizeof(struct frame_head) + r->n + sizeof r->sum;
    if (c->at + n > c->j->synced_end)
        return BC_OK; /* its bytes are owed */
    c->seq = r->seq;
    return part_write(c->j, c->fd, r->payload - sizeof(struct frame_head), n, &c->at, e);
}

static int copy_synced(struct journal *j, int fd, uint64_t *ret_at, struct err *e)
{
    struct copy c = {.j = j, .fd = fd};
    struct journal_scan scan;
    struct file_head head = {.magic = FILE_MAGIC, .version = JOURNAL_VERSION};
    int rc = part_write(j, fd, &head, sizeof head, &c.at, e);
    if (rc == BC_OK && j->synced_end > sizeof head)
        rc = journal_read(j->io, j->path, &scan, copy_record, &c, e);
    if (rc == BC_OK && c.at != BC_MAX(j->synced_end, sizeof head))
        rc =
            err_set(e, BC_EIO, "state_dir", "%.150s has lost what was synced: good up to byte %llu",
                    j->path, (unsigned long long)c.at);
    *ret_at = c.at;
    return rc;
}

/* Makes the file anew. Its old self stays until the new one is safe. */
static int rewrite(struct journal *j, struct err *e)
{
    const struct disk_io *io = j->io;
    char path[DISK_PATH_MAX + 8];
    uint64_t at = 0;
    if (j->fd >= 0)
        io->close(io->arg, j->fd);
    j->fd = -1;
    snprintf(path, sizeof path, "%s.tmp", j->path);
    int fd = io->open(io->arg, path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (fd < 0)
        return disk_failed(e, "making", path);
    int rc = copy_synced(j, fd, &at, e);
    if (rc == BC_OK)
        rc = part_write(j, fd, j->owed.at, j->owed.n, &at, e);
    if (rc < 0)
        io->unlink(io->arg, path);
    else
        rc = disk_replace(io, fd, j->path, e);
    if (rc < 0) {
        io->close(io->arg, fd);
        return rc;
    }
    j->fd = fd;
    j->end = at;
    owed_clear(j);
    return BC_OK;
}

int journal_create(struct journal **ret, const struct disk_io *io, const char *path,
                   const struct bytes_out *frames, struct err *e)
{
    int there = io->open(io->arg, path, O_RDONLY, 0);
    if (there >= 0) {
        io->close(io->arg, there);
        return err_set(e, BC_EBUSY, "name", "%.200s exists", path);
    }
    struct journal *j = journal_new(io, path);
    if (j == NULL)
        return err_nomem(e, sizeof *j);
    int rc = owed_add(j, frames, e);
    if (rc == BC_OK)
        rc = rewrite(j, e);
    if (rc < 0) {
        io->unlink(io->arg, path); /* only its folder may have failed */
        journal_close(&j);
        return rc;
    }
    *ret = j;
    return BC_OK;
}

int journal_open(struct journal **ret, const struct disk_io *io, const char *path,
                 const struct journal_scan *at, struct err *e)
{
    bc_assert(at->state != JOURNAL_BROKEN);
    struct journal *j = journal_new(io, path);
    if (j == NULL)
        return err_nomem(e, sizeof *j);
    int rc = BC_OK;
    if ((j->fd = io->open(io->arg, path, O_RDWR, 0)) < 0)
        rc = disk_failed(e, "opening", path);
    else if (at->state == JOURNAL_TORN && io->truncate(io->arg, j->fd, at->end) < 0)
        rc = disk_failed(e, "cutting", path);
    else if (io->sync(io->arg, j->fd) < 0) /* what was read may be in memory alone */
        rc = disk_failed(e, "syncing", path);
    if (rc < 0) {
        journal_close(&j);
        return rc;
    }
    j->end = j->synced_end = at->end;
    j->seq = j->synced_seq = at->seq;
    j->sum = at->sum;
    *ret = j;
    return BC_OK;
}

/* ---- adding ---- */

int journal_put(struct journal *j, const struct bytes_out *frames, struct err *e)
{
    MAGIC_OK(j, JOURNAL_MAGIC);
    size_t before = j->owed.n;
    int rc = owed_add(j, frames, e);
    if (rc < 0)
        return rc;
    if (j->fd < 0)
        return rewrite(j, e);
    rc = disk_write(j->io, j->fd, j->owed.at + before, j->owed.n - before, j->end, j->path, e);
    if (rc < 0) /* what of it is in the file nobody knows */
        return rewrite(j, e);
    j->end += j->owed.n - before;
    return BC_OK;
}

int journal_sync(struct journal *j, struct err *e)
{
    MAGIC_OK(j, JOURNAL_MAGIC);
    if (!journal_dirty(j))
        return BC_OK;
    if (j->fd < 0 || j->io->datasync(j->io->arg, j->fd) < 0) /* a second try would find it clean */
        return rewrite(j, e);
    owed_clear(j);
    return BC_OK;
}

uint64_t journal_seq(const struct journal *j)
{
    MAGIC_OK(j, JOURNAL_MAGIC);
    return j->seq;
}

uint32_t journal_sum(const struct journal *j)
{
    MAGIC_OK(j, JOURNAL_MAGIC);
    return j->sum;
}

bool journal_dirty(const struct journal *j)
{
    MAGIC_OK(j, JOURNAL_MAGIC);
    return j->owed.n > 0 || j->fd < 0;
}

size_t journal_owed(const struct journal *j)
{
    MAGIC_OK(j, JOURNAL_MAGIC);
    return j->owed.n;
}
