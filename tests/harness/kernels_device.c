/* kernels_device.c: see the header. */
#include "kernels_device.h"
#include "simt_control.h"

enum { FORWARD, REVERSE, RANDOM };
enum { LAZY, EAGER };

struct way {
    const char *backend, *label;
    long schedule, streams;
};

static const struct way ways[] = {
    {"simt", "simt, forward, lazy streams", FORWARD, LAZY},
    {"simt", "simt, reverse, eager streams", REVERSE, EAGER},
#if !defined(__SANITIZE_ADDRESS__)
    {"simt", "simt, random", RANDOM, RANDOM},
    {"simt-race", "simt-race", FORWARD, LAZY},
#endif
    {"cuda", "cuda", 0, 0},
};

static const struct way *now;

const char *kd_label(void)
{
    return now->label;
}

bool kd_is_simt(const struct kn *kn)
{
    return simt_inside(kn);
}

static bool build_has(const char *backend)
{
    for (unsigned i = 0; kn_backend_name(i); i++)
        if (strcmp(kn_backend_name(i), backend) == 0)
            return true;
    return false;
}

int kd_open(struct kn **ret, const char *inject)
{
    struct kn_options opt = {.backend = now->backend, .inject = inject};
    char why[256] = "";
    int code = kn_open(ret, &opt, why, sizeof why);
    assert_true(code == KN_OK || why[0] != '\0');
    if (code == KN_OK && strcmp(now->backend, "cuda") != 0) {
        assert_true(simt_inside(*ret));
        simt_set(*ret, "schedule", now->schedule);
        simt_set(*ret, "streams", now->streams);
        simt_set(*ret, "seed", 7);
    }
    return code;
}

static void back_to_normal(struct kn *kn)
{
    if (!simt_inside(kn))
        return;
    simt_set(kn, "schedule", FORWARD);
    simt_set(kn, "streams", LAZY);
}

void kd_each(void (*f)(struct kn *kn))
{
    unsigned n = 0;
    for (size_t i = 0; i < KC_LEN(ways); i++) {
        struct kn *kn = NULL;
        now = &ways[i];
        if (!build_has(now->backend))
            continue;
        int code = kd_open(&kn, NULL);
        if (code == KN_EUNSUPPORTED && strcmp(now->backend, "cuda") == 0)
            continue; /* no GPU here */
        assert_int_equal(code, KN_OK);
        f(kn);
        if (kn->ops->status(kn) != KN_OK)
            fail_msg("%s: the device has failed", now->label);
        assert_int_equal(kn->bytes_buffers + kn->bytes_weights + kn->bytes_arena, 0);
        back_to_normal(kn);
        kn_close(&kn);
        n++;
    }
    if (n == 0)
        print_message("  no GPU backend in this build\n");
}
