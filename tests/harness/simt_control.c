/* simt_control.c: see the header. The backend's shared object is found by the address of one of its ops. */
#include "simt_control.h"
#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

typedef int control_fn(const char *name, long value);

static control_fn *control_of(const struct kn *kn)
{
    Dl_info where;
    control_fn *call = NULL;
    void *object;
    if (!dladdr((void *)kn->ops->close, &where) || !where.dli_fname)
        return NULL;
    object = dlopen(where.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    if (!object)
        return NULL;
    *(void **)&call = dlsym(object, "simt_control");
    dlclose(object); /* the backend keeps it open */
    return call;
}

bool simt_inside(const struct kn *kn)
{
    return control_of(kn) != NULL;
}

void simt_set(const struct kn *kn, const char *name, long value)
{
    control_fn *call = control_of(kn);
    assert_non_null(call);
    if (call(name, value) != 0)
        fail_msg("the shim has no option \"%s\"", name);
}
