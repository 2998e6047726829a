/* simt_control.c: see the header. The backend's shared object is found by the address of one of its ops. */
#include "simt_control.h"
#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

typedef int control_fn(const char *name, long value);
typedef long counted_fn(const char *name);

static void *symbol_of(const struct kn *kn, const char *name)
{
    Dl_info where;
    void *object, *ret;
    if (!dladdr((void *)kn->ops->close, &where) || !where.dli_fname)
        return NULL;
    object = dlopen(where.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    if (!object)
        return NULL;
    ret = dlsym(object, name);
    dlclose(object); /* the backend keeps it open */
    return ret;
}

static control_fn *control_of(const struct kn *kn)
{
    control_fn *call = NULL;
    *(void **)&call = symbol_of(kn, "simt_control");
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

long simt_counted(const struct kn *kn, const char *name)
{
    counted_fn *call = NULL;
    *(void **)&call = symbol_of(kn, "simt_counted");
    assert_non_null(call);
    long n = call(name);
    if (n < 0)
        fail_msg("the shim does not count \"%s\"", name);
    return n;
}
