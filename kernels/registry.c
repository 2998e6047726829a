/* registry.c: which backends this build has, in order of preference, and the choice among them.
 *
 *   kn_open("auto")  the first of the table that opens on this machine; why then says what spoke against better ones.
 *                    Options that one of them calls wrong are an error: the next one may only be slower
 *   kn_open("cpu")   that one or an error
 *
 * Backends that need a vendor's libraries are shared objects, so that the program starts without them. They are looked for
 * beside the program's binary and in the library folder of the installation, nowhere else, and stay open for good. Those
 * for tests are beside the program of a build or nowhere. A machine without the vendor's driver is told before anything
 * of the vendor's is loaded: that takes time and memory.
 *
 * To add a backend: its open function in kn_backends.h and one line in the table. */
#include "kn_backends.h"
#include "kn_assert.h"
#include <dlfcn.h>
#include <limits.h>
#include <string.h>
#include <unistd.h>

#if defined(KN_HAVE_CUDA)
/* dir/file into path; false if there is no such file. */
static bool shared_at(const char *dir, const char *file, char *path, size_t path_len)
{
    int n = snprintf(path, path_len, "%s/%s", dir, file);
    return n > 0 && (size_t)n < path_len && access(path, R_OK) == 0;
}

/* libdir NULL: beside the program only. */
static bool shared_find(const char *file, const char *libdir, char *path, size_t path_len)
{
    char dir[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", dir, sizeof dir - 1);
    if (n > 0) {
        dir[n] = '\0';
        char *slash = strrchr(dir, '/');
        if (slash) {
            *slash = '\0';
            if (shared_at(dir, file, path, path_len))
                return true;
        }
    }
    return libdir && shared_at(libdir, file, path, path_len);
}

static int shared_open(const char *file, const char *libdir, struct kn **ret,
                       const struct kn_options *opt, char *why, size_t why_len)
{
    char path[PATH_MAX];
    if (!shared_find(file, libdir, path, sizeof path)) {
        snprintf(why, why_len, "%s is neither beside the program nor %s%s", file,
                 libdir ? "in " : "anywhere else that is looked at", libdir ? libdir : "");
        return KN_EUNSUPPORTED;
    }
    void *object = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!object) {
        snprintf(why, why_len, "%s does not load: %s", file, dlerror());
        return KN_EUNSUPPORTED;
    }
    kn_open_fn *open = NULL;
    *(void **)&open = dlsym(object, "kn_cuda_open");
    if (!open) {
        snprintf(why, why_len, "%s is not of this program: %s", path, dlerror());
        return KN_EUNSUPPORTED;
    }
    return open(ret, opt, why, why_len);
}

static int cuda_open(struct kn **ret, const struct kn_options *opt, char *why, size_t why_len)
{
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (!driver) {
        snprintf(why, why_len, "no usable GPU: no NVIDIA driver on this machine (libcuda.so.1)");
        return KN_EUNSUPPORTED;
    }
    dlclose(driver);
    return shared_open("libbackcast-cuda.so", KN_LIBDIR, ret, opt, why, why_len);
}
#endif

#if defined(KN_HAVE_SIMT)
static int simt_open(struct kn **ret, const struct kn_options *opt, char *why, size_t why_len)
{
    return shared_open("libbackcast-simt.so", NULL, ret, opt, why, why_len);
}
#endif

#if defined(KN_HAVE_SIMT_RACE)
static int simt_race_open(struct kn **ret, const struct kn_options *opt, char *why, size_t why_len)
{
    return shared_open("libbackcast-simt-race.so", NULL, ret, opt, why, why_len);
}
#endif

struct backend {
    const char *name;
    kn_open_fn *open;
    bool by_name_only; /* never chosen by "auto" */
    bool has_memory;   /* of its own: "auto" goes on where it is full */
};

static const struct backend backends[] = {
#if defined(KN_HAVE_CUDA)
    {"cuda", cuda_open, false, true},
#endif
#if defined(KN_HAVE_CPU)
    {"cpu", kn_cpu_open, false, false},
#endif
    {"ref", kn_ref_open, false, false},
#if defined(KN_HAVE_SIMT)
    {"simt", simt_open, true, true}, /* the cuda backend's sources on a CPU, for tests */
#if defined(KN_HAVE_SIMT_RACE)
    {"simt-race", simt_race_open, true, true}, /* and every access of its kernels looked at */
#endif
#endif
};

enum { N_BACKENDS = sizeof backends / sizeof backends[0] };

const char *kn_backend_name(unsigned i)
{
    return i < N_BACKENDS ? backends[i].name : NULL;
}

#if defined(KN_HAVE_CPU)
const char *kn_isa_name(unsigned i)
{
    return kn_cpu_isa_name(i);
}

static bool cpu_isa_known(const char *isa)
{
    return kn_cpu_isa_known(isa);
}
#else
const char *kn_isa_name(unsigned i)
{
    return i == 0 ? "scalar" : NULL; /* ref's */
}

static bool cpu_isa_known(const char *isa)
{
    return strcmp(isa, kn_isa_name(0)) == 0;
}
#endif

/* A GPU's is "sm_90". */
bool kn_isa_known(const char *isa)
{
    static const char gpu[] = "sm_";
    size_t n = strlen(gpu);
    if (strncmp(isa, gpu, n) != 0)
        return cpu_isa_known(isa);
    size_t digits = strspn(isa + n, "0123456789");
    return digits > 0 && isa[n + digits] == '\0';
}

static int open_auto(struct kn **ret, const struct kn_options *opt, char *why, size_t why_len)
{
    int code = KN_EUNSUPPORTED;
    size_t at = 0;
    for (unsigned i = 0; i < N_BACKENDS; i++) {
        char reason[224] = "";
        if (backends[i].by_name_only)
            continue;
        code = backends[i].open(ret, opt, reason, sizeof reason);
        if (reason[0] != '\0' && at < why_len) {
            int n = snprintf(why + at, why_len - at, "%s%s: %s", at ? "; " : "", backends[i].name,
                             reason);
            at += n > 0 ? (size_t)n : 0;
        }
        if (code == KN_OK || code == KN_EINVALID || (code == KN_ENOMEM && !backends[i].has_memory))
            break;
    }
    return code;
}

int kn_open(struct kn **ret, const struct kn_options *opt, char *why, size_t why_len)
{
    char scrap[512];
    if (!why || why_len < 160) {
        why = scrap;
        why_len = sizeof scrap;
    }
    why[0] = '\0';
    if (opt->activations != 0 && opt->activations != KN_ACTIVATIONS &&
        opt->activations != KN_ACTIVATIONS_WIDE) {
        snprintf(why, why_len, "activations: must be %d or %d bits, not %u", KN_ACTIVATIONS,
                 KN_ACTIVATIONS_WIDE, opt->activations);
        return KN_EINVALID;
    }
    const char *name = opt->backend ? opt->backend : "auto";
    if (strcmp(name, "auto") == 0)
        return open_auto(ret, opt, why, why_len);
    for (unsigned i = 0; i < N_BACKENDS; i++)
        if (strcmp(name, backends[i].name) == 0)
            return backends[i].open(ret, opt, why, why_len);
    int at = snprintf(why, why_len, "this build has no backend \"%.40s\"; it has: auto", name);
    for (unsigned i = 0; i < N_BACKENDS && (size_t)at < why_len; i++)
        at += snprintf(why + at, why_len - (size_t)at, ", %s", backends[i].name);
    return KN_EINVALID;
}

void kn_close(struct kn **kn)
{
    if (!*kn)
        return;
    kn_assert((*kn)->magic == KN_MAGIC);
    (*kn)->ops->close(*kn);
    *kn = NULL;
}
