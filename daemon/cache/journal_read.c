/* journal_read.c: see journal.h: the reading side. Nothing that is read is believed before its sum
 * was found right, and the first byte that is not good ends the reading; the rest is only looked
 * through for a record that says that the damaged place had been safe. */
#include "journal.h"
#include "crc32c.h"
#include "journal_frame.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A whole record at bytes[at]: its length in all; 0: there is none. */
static size_t record_at(const uint8_t *bytes, size_t n, size_t at, struct frame_head *ret_head,
                        uint32_t *ret_sum)
{
    struct frame_head h;
    uint32_t sum;
    if (n - at < JOURNAL_FRAME_BYTES)
        return 0;
    memcpy(&h, bytes + at, sizeof h);
    if (h.len > JOURNAL_PAYLOAD_MAX || h.len > n - at - JOURNAL_FRAME_BYTES || h.zero != 0 ||
        h.type == 0 || h.type > JOURNAL_TYPE_MAX || h.seq == 0 || h.synced >= h.seq)
        return 0;
    memcpy(&sum, bytes + at + sizeof h + h.len, sizeof sum);
    if (sum != crc32c(0, bytes + at, sizeof h + h.len))
        return 0;
    *ret_head = h;
    *ret_sum = sum;
    return JOURNAL_FRAME_BYTES + h.len;
}

/* What stands behind the last good record: a tail that was lost, or damage. */
static void judge(const uint8_t *bytes, size_t n, struct journal_scan *s)
{
    struct frame_head h;
    uint32_t sum;
    s->state = s->end == n ? JOURNAL_WHOLE : JOURNAL_TORN;
    for (size_t at = s->end + 1; at < n; at++)
        if (record_at(bytes, n, at, &h, &sum) > 0 && h.synced > s->seq) {
            s->state = JOURNAL_BROKEN;
            snprintf(s->why, sizeof s->why,
                     "damaged at byte %llu (record %llu), which had been synced: record %llu at "
                     "byte %zu says so",
                     (unsigned long long)s->end, (unsigned long long)s->seq + 1,
                     (unsigned long long)h.seq, at);
            return;
        }
}

static int file_load(const struct disk_io *io, const char *path, uint8_t **ret, size_t *ret_n,
                     struct err *e)
{
    int fd = io->open(io->arg, path, O_RDONLY, 0);
    if (fd < 0 && errno == ENOENT)
        return err_set(e, BC_ENOTFOUND, "state_dir", "%.200s is not there", path);
    if (fd < 0)
        return disk_failed(e, "opening", path);
    int64_t size = io->size(io->arg, fd);
    size_t n = size > 0 ? (size_t)size : 0;
    uint8_t *bytes = malloc(n + 1);
    int rc = BC_OK;
    if (size < 0)
        rc = disk_failed(e, "looking at", path);
    else if (bytes == NULL)
        rc = err_nomem(e, n);
    else
        rc = disk_read(io, fd, bytes, n, 0, path, e);
    io->close(io->arg, fd);
    if (rc < 0) {
        free(bytes);
        return rc;
    }
    *ret = bytes;
    *ret_n = n;
    return BC_OK;
}

static int head_check(const uint8_t *bytes, size_t n, struct journal_scan *s, struct err *e)
{
    struct file_head h = {0};
    memcpy(&h, bytes, BC_MIN(n, sizeof h));
    if (n < sizeof h || memcmp(h.magic, FILE_MAGIC, sizeof h.magic) != 0 || h.zero != 0) {
        s->state = JOURNAL_BROKEN;
        snprintf(s->why, sizeof s->why, "does not begin as a journal");
        return BC_OK;
    }
    if (h.version != JOURNAL_VERSION)
        return err_set(e, BC_EVERSION, "state_dir",
                       "the journal is of version %u, this daemon reads version %u", h.version,
                       JOURNAL_VERSION);
    s->end = sizeof h;
    return BC_OK;
}

int journal_read(const struct disk_io *io, const char *path, struct journal_scan *ret,
                 int (*on_record)(void *arg, const struct journal_record *r, struct err *e),
                 void *arg, struct err *e)
{
    struct journal_scan s = {.state = JOURNAL_WHOLE};
    struct frame_head h;
    uint8_t *bytes = NULL;
    size_t n = 0, len;
    uint32_t sum;
    int rc = file_load(io, path, &bytes, &n, e);
    if (rc < 0)
        return rc;
    rc = head_check(bytes, n, &s, e);
    while (rc == BC_OK && s.state != JOURNAL_BROKEN &&
           (len = record_at(bytes, n, s.end, &h, &sum)) > 0 && h.seq == s.seq + 1) {
        const struct journal_record r = {.type = h.type,
                                         .seq = h.seq,
                                         .sum = sum,
                                         .payload = bytes + s.end + sizeof h,
                                         .n = h.len};
        s.end += len;
        s.seq = h.seq;
        s.sum = sum;
        s.synced = BC_MAX(s.synced, h.synced);
        rc = on_record(arg, &r, e);
    }
    if (rc == BC_OK && s.state != JOURNAL_BROKEN)
        judge(bytes, n, &s);
    free(bytes);
    if (rc == BC_OK)
        *ret = s;
    return rc;
}
