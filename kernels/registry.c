/* registry.c: which backends this build has, in order of preference, and the choice among them.
 *
 *   kn_open("auto")  the first of the table that opens on this machine
 *   kn_open("cpu")   that one or an error
 *
 * To add a backend: its open function in kn_backends.h and one line in the table. */
#include "kn_backends.h"
#include "kn_assert.h"
#include <string.h>

struct backend {
    const char *name;
    int (*open)(struct kn **ret, const struct kn_options *opt, char *why, size_t why_len);
};

static const struct backend backends[] = {
#ifdef KN_HAVE_CPU
    {"cpu", kn_cpu_open},
#endif
    {"ref", kn_ref_open},
};

enum { N_BACKENDS = sizeof backends / sizeof backends[0] };

const char *kn_backend_name(unsigned i)
{
    return i < N_BACKENDS ? backends[i].name : NULL;
}

static int open_auto(struct kn **ret, const struct kn_options *opt, char *why, size_t why_len)
{
    int code = KN_EUNSUPPORTED;
    for (unsigned i = 0; i < N_BACKENDS; i++) {
        code = backends[i].open(ret, opt, why, why_len);
        if (code == KN_OK || code == KN_ENOMEM)
            break;
    }
    return code;
}

int kn_open(struct kn **ret, const struct kn_options *opt, char *why, size_t why_len)
{
    char scrap[160];
    if (!why || why_len < sizeof scrap) {
        why = scrap;
        why_len = sizeof scrap;
    }
    why[0] = '\0';
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
