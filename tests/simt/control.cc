/* control.cc: the shim's options, for programs that link it and, by name, for those that open a shared object with it
 * inside. */
#include "exec.h"
#include "memory.h"
#include "runtime.h"
#include "stream.h"

namespace simt
{

options options_default()
{
    return options_initial;
}

void set_options(const options &o)
{
    call_lock lock;
    w.opt = o;
    w.q->random = o.seed;
    heap *h = heap_get();
    h->is_open = !h->is_open; /* whatever the rights are, set those that the options ask for */
    if (o.protect)
        heap_close();
    else
        heap_open();
}

} // namespace simt

using namespace simt;

/* simt_control(name, value): 0, or -1 for an unknown name. The same as the fields of simt::options; and "inject" (the
 * nth call from now on) with "inject_error" (its code, to be set first); "reset" forgets every error. */
extern "C" __attribute__((visibility("default"))) int simt_control(const char *name, long value)
{
    options o = w.opt;
    static const struct {
        const char *name;
        void (*set)(options *o, long v);
    } fields[] = {
        {"schedule", [](options *x, long v) { x->schedule = (enum schedule)v; }},
        {"streams", [](options *x, long v) { x->streams = (enum stream_order)v; }},
        {"seed", [](options *x, long v) { x->seed = (uint32_t)v; }},
        {"protect", [](options *x, long v) { x->protect = v != 0; }},
        {"trap_is_error", [](options *x, long v) { x->trap_is_error = v != 0; }},
        {"device_bytes", [](options *x, long v) { x->device_bytes = (size_t)v; }},
        {"sm", [](options *x, long v) { x->sm_major = (int)v / 10, x->sm_minor = (int)v % 10; }},
        {"smem_optin_bytes", [](options *x, long v) { x->smem_optin_bytes = (size_t)v; }},
    };
    for (const auto &f : fields)
        if (strcmp(f.name, name) == 0) {
            f.set(&o, value);
            set_options(o);
            return 0;
        }
    call_lock lock;
    if (strcmp(name, "inject_error") == 0)
        w.q->inject_error = (cudaError_t)value;
    else if (strcmp(name, "inject") == 0)
        inject(nullptr, (unsigned)value, w.q->inject_error);
    else if (strcmp(name, "reset") == 0)
        cudaDeviceReset();
    else
        return -1;
    return 0;
}

/* Since the object was opened: "copies_out" and "bytes_out" from the device to the host; "waits": calls that had to wait for
 * the device. -1 for an unknown name. */
extern "C" __attribute__((visibility("default"))) long simt_counted(const char *name)
{
    call_lock lock;
    const queues *q = w.q;
    return (long)(strcmp(name, "copies_out") == 0  ? q->copies_out
                  : strcmp(name, "bytes_out") == 0 ? q->bytes_out
                  : strcmp(name, "waits") == 0     ? q->waits
                                                   : (uint64_t)-1);
}
