/* memory.cc */
#include "memory.h"
#include <stdio.h>
#include "exec.h"
namespace simt
{
void heap_tell(const void *, char *text, size_t bytes)
{
    snprintf(text, bytes, "no memory of the device");
}
size_t heap_room(const void *)
{
    return SIZE_MAX;
}
void check_access(const void *p, size_t bytes, size_t align, const char *what)
{
    if ((uintptr_t)p % align)
        report("misaligned access", "%s at %p, which is no multiple of %zu", what, p, align);
    const unsigned char *c = (const unsigned char *)p;
    if (c >= w.smem && c + bytes <= w.smem + w.smem_bytes)
        return;
    size_t room = heap_room(p);
    if (room < bytes) {
        char text[200];
        heap_tell(p, text, sizeof text);
        report("out of bounds", "%s of %zu bytes at %p, %s", what, bytes, p, text);
    }
}
void check_shared(const void *p, size_t bytes, const char *what)
{
    if ((uintptr_t)p % 16)
        report("misaligned access", "%s at %p, which is no multiple of 16", what, p);
    const unsigned char *c = (const unsigned char *)p;
    if (c < w.smem || c + bytes > w.smem + w.smem_bytes)
        report("out of bounds", "%s of %zu bytes at byte %td of %zu bytes of shared memory", what,
               bytes, c - w.smem, w.smem_bytes);
}
void atomic_begin(const void *p, size_t bytes)
{
    check_access(p, bytes, bytes, "atomic");
}
void atomic_end() {}
void fence()
{
    w.ex->fenced = true;
}
void launch(const launch_shape &shape, std::function<void()> body)
{
    exec_run(shape, body);
}
} // namespace simt
