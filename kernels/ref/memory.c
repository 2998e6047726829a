/* memory.c: buffers of ordinary memory, and the way into them and out. Arenas: arena.c. */
#include "ref.h"
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define POPULATE_LEAST ((size_t)256 << 10)

int ref_buf_alloc(struct kn *kn, size_t bytes, void **ret)
{
    void *buf;
    if (posix_memalign(&buf, 64, bytes ? bytes : 1) != 0)
        return KN_ENOMEM;
    memset(buf, 0, bytes);
    kn->bytes_buffers += bytes;
    *ret = buf;
    return KN_OK;
}

void ref_buf_free(struct kn *kn, void *buf, size_t bytes)
{
    if (!buf)
        return;
    kn_assert(kn->bytes_buffers >= bytes);
    kn->bytes_buffers -= bytes;
    free(buf);
}

/* Memory that nobody has written yet gets its pages in one call, not by a fault for every 4 KiB. No matter if it
 * fails, or the system does not know it (before Linux 5.14). */
static void pages_ahead(void *dst, size_t bytes)
{
#ifdef MADV_POPULATE_WRITE
    size_t unit = (size_t)sysconf(_SC_PAGESIZE), skip = -(uintptr_t)dst % unit;
    if (bytes >= POPULATE_LEAST + skip)
        (void)madvise((uint8_t *)dst + skip, (bytes - skip) / unit * unit, MADV_POPULATE_WRITE);
#else
    (void)dst, (void)bytes;
#endif
}

void ref_upload(struct kn *kn, void *dst_device, const void *src_host, size_t bytes)
{
    (void)kn;
    pages_ahead(dst_device, bytes);
    memcpy(dst_device, src_host, bytes);
}

void ref_download(struct kn *kn, void *dst_host, const void *src_device, size_t bytes)
{
    (void)kn;
    memcpy(dst_host, src_device, bytes);
}
