/* disk.c: the disk thread: sums over blocks, files written and read. It sees bytes and files, never
 * a session or a page; tier.c decides what happens when and why.
 *
 *   engine --task--> [queue] --> disk_run --> [done] --> the engine's next step
 *
 * Tasks run one after another, in the order in which they came. When the engine is stepped by hand
 * they run inside the step. */
#include "core.h"
#include "log.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define HOST_PIECE ((size_t)512 << 10)
#define HEAD_FIRST 4096u /* read at once: most heads are not longer */

static const char *name_of(const struct image *i)
{
    return i->path != NULL ? i->path : "the disk tier's file";
}

/* ---- ways out ---- */

/* Its pages are made here and not in the steps that copy, for which decodes wait; in pieces, because whoever maps or unmaps
 * meanwhile waits for one. Where a kernel cannot, the copies make them. */
static void host_populate(uint8_t *flat, size_t bytes)
{
#ifdef MADV_POPULATE_WRITE
    for (size_t at = 0, n; at < bytes; at += n) {
        n = BC_MIN(bytes - at, HOST_PIECE);
        if (madvise(flat + at, n, MADV_POPULATE_WRITE) != 0)
            return;
    }
#else
    (void)flat;
    (void)bytes;
#endif
}

static int host_create(struct image *i, struct err *e)
{
    void *flat = mmap(NULL, i->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (flat == MAP_FAILED)
        return err_nomem(e, i->bytes);
    (void)madvise(flat, i->bytes, MADV_HUGEPAGE); /* fewer faults; as good without */
    (void)madvise(flat, i->bytes, MADV_DONTDUMP);
    host_populate(flat, i->bytes);
    i->flat = flat;
    return BC_OK;
}

/* A file that has no name, so that nothing is left of it when the process ends, however it ends. */
static int unnamed_create(const struct engine *en, struct image *i, struct err *e)
{
    const struct disk_io *io = en->opt.io;
    char path[DISK_PATH_MAX + 32];
    i->fd = io->open(io->arg, en->opt.state_dir, O_TMPFILE | O_RDWR, 0600);
    if (i->fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == ENOENT)) {
        snprintf(path, sizeof path, "%s/tier.tmp", en->opt.state_dir);
        i->fd = io->open(io->arg, path, O_RDWR | O_CREAT | O_EXCL, 0600);
        if (i->fd >= 0)
            io->unlink(io->arg, path);
    }
    return i->fd >= 0 ? BC_OK : disk_failed(e, "making a file in", en->opt.state_dir);
}

static int named_create(const struct engine *en, struct image *i, struct err *e)
{
    const struct disk_io *io = en->opt.io;
    char path[DISK_PATH_MAX + 8];
    int rc = folders_make(i->path, e);
    if (rc < 0)
        return rc;
    snprintf(path, sizeof path, "%s.tmp", i->path);
    i->fd = io->open(io->arg, path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    i->begun = i->fd >= 0;
    return i->begun ? BC_OK : disk_failed(e, "making", path);
}

static int run_create(const struct engine *en, struct image *i, struct err *e)
{
    if (i->kind == IMAGE_HOST)
        return host_create(i, e);
    return i->kind == IMAGE_UNNAMED ? unnamed_create(en, i, e) : named_create(en, i, e);
}

static int run_put(const struct engine *en, struct disk_task *k, struct err *e)
{
    struct spill *sp = k->t->sp;
    spill_block_seal(sp, k->block, k->bytes);
    if (k->image->kind == IMAGE_HOST)
        return BC_OK;
    return disk_write(en->opt.io, k->image->fd, k->bytes, spill_block_bytes(sp, k->block),
                      spill_block_at(sp, k->block), name_of(k->image), e);
}

static int run_finish(const struct engine *en, struct disk_task *k, struct err *e)
{
    const struct disk_io *io = en->opt.io;
    struct image *i = k->image;
    struct spill *sp = k->t->sp;
    const void *head = spill_head(sp);
    if (i->kind == IMAGE_HOST) {
        memcpy(i->flat, head, spill_head_bytes(sp));
        return BC_OK;
    }
    int rc = disk_write(io, i->fd, head, spill_head_bytes(sp), 0, name_of(i), e);
    if (rc < 0 || i->kind == IMAGE_UNNAMED)
        return rc;
    if ((rc = disk_replace(io, i->fd, i->path, e)) < 0)
        return rc;
    i->begun = false;
    io->close(io->arg, i->fd);
    i->fd = -1;
    return BC_OK;
}

/* ---- ways back ---- */

static int host_open(struct transfer *t, struct err *e)
{
    size_t need;
    const struct image *i = t->image;
    int rc = spill_read(&t->sp, i->flat, i->bytes, i->bytes, &need, e);
    bc_assert(rc < 0 || need == 0);
    return rc;
}

static int file_open(const struct engine *en, struct image *i, struct err *e)
{
    const struct disk_io *io = en->opt.io;
    if (i->kind == IMAGE_NAMED && i->fd < 0) {
        i->fd = io->open(io->arg, i->path, O_RDONLY, 0);
        if (i->fd < 0 && errno == ENOENT)
            return err_set(e, BC_ENOTFOUND, "name", "there is no saved cache of this name");
        if (i->fd < 0)
            return disk_failed(e, "opening", i->path);
    }
    int64_t n = io->size(io->arg, i->fd);
    if (n < 0)
        return disk_failed(e, "looking at", name_of(i));
    i->bytes = (uint64_t)n;
    return BC_OK;
}

static int run_open(const struct engine *en, struct transfer *t, struct err *e)
{
    struct image *i = t->image;
    uint8_t *bytes = NULL;
    size_t n = 0, need = HEAD_FIRST;
    if (i->kind == IMAGE_HOST)
        return host_open(t, e);
    int rc = file_open(en, i, e);
    while (rc == BC_OK && need > n) {
        need = BC_MIN(need, i->bytes);
        uint8_t *more = realloc(bytes, need + 1);
        if (more == NULL) {
            rc = err_nomem(e, need);
            break;
        }
        bytes = more;
        rc = disk_read(en->opt.io, i->fd, bytes + n, need - n, n, name_of(i), e);
        n = need;
        if (rc == BC_OK)
            rc = spill_read(&t->sp, bytes, n, i->bytes, &need, e);
    }
    free(bytes);
    return rc;
}

static int run_get(const struct engine *en, struct disk_task *k, struct err *e)
{
    const struct spill *sp = k->t->sp;
    int rc = BC_OK;
    if (k->image->kind != IMAGE_HOST)
        rc = disk_read(en->opt.io, k->image->fd, k->bytes, spill_block_bytes(sp, k->block),
                       spill_block_at(sp, k->block), name_of(k->image), e);
    return rc == BC_OK ? spill_block_check(sp, k->block, k->bytes, e) : rc;
}

static void image_free(const struct engine *en, struct image *i)
{
    const struct disk_io *io = en->opt.io;
    if (i->flat != NULL)
        munmap(i->flat, i->bytes);
    if (i->fd >= 0)
        io->close(io->arg, i->fd);
    if (i->begun) {
        char path[DISK_PATH_MAX + 8];
        snprintf(path, sizeof path, "%s.tmp", i->path);
        io->unlink(io->arg, path);
    }
    free(i->path);
    free(i);
}

/* ---- the thread ---- */

static void disk_run(struct engine *en, struct disk_task *k)
{
    k->err = (struct err){0};
    switch (k->what) {
    case DISK_CREATE:
        k->rc = run_create(en, k->image, &k->err);
        break;
    case DISK_PUT:
        k->rc = run_put(en, k, &k->err);
        break;
    case DISK_FINISH:
        k->rc = run_finish(en, k, &k->err);
        break;
    case DISK_OPEN:
        k->rc = run_open(en, k->t, &k->err);
        break;
    case DISK_GET:
        k->rc = run_get(en, k, &k->err);
        break;
    case DISK_LIST:
    case DISK_UNLINK:
        saved_run(en, k);
        break;
    case DISK_DROP:
        image_free(en, k->image); /* the task lies in it */
        return;
    }
    pthread_mutex_lock(&en->lock);
    k->next = NULL;
    *en->tier.done_tail = k;
    en->tier.done_tail = &k->next;
    pthread_cond_signal(&en->engine_cond);
    pthread_mutex_unlock(&en->lock);
}

void disk_push(struct engine *en, struct disk_task *k)
{
    k->next = NULL;
    pthread_mutex_lock(&en->lock);
    *en->tier.queue_tail = k;
    en->tier.queue_tail = &k->next;
    pthread_cond_signal(&en->disk_cond);
    pthread_mutex_unlock(&en->lock);
}

static struct disk_task *disk_take(struct engine *en, bool wait)
{
    pthread_mutex_lock(&en->lock);
    while (wait && en->tier.queue == NULL && !en->stopping)
        pthread_cond_wait(&en->disk_cond, &en->lock);
    struct disk_task *k = wait && en->stopping ? NULL : en->tier.queue;
    if (k != NULL && (en->tier.queue = k->next) == NULL)
        en->tier.queue_tail = &en->tier.queue;
    pthread_mutex_unlock(&en->lock);
    return k;
}

void *disk_main(void *arg)
{
    struct engine *en = arg;
    for (struct disk_task *k; (k = disk_take(en, true)) != NULL;)
        disk_run(en, k);
    return NULL;
}

void disk_drain(struct engine *en)
{
    for (struct disk_task *k; (k = disk_take(en, false)) != NULL;)
        disk_run(en, k);
}

struct disk_task *disk_done(struct engine *en)
{
    pthread_mutex_lock(&en->lock);
    struct disk_task *list = en->tier.done;
    en->tier.done = NULL;
    en->tier.done_tail = &en->tier.done;
    pthread_mutex_unlock(&en->lock);
    return list;
}
