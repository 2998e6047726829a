/* shim_daemon.c: see shim_daemon.h. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "kn.h"
#include "shim_daemon.h"

#define ARGS_MAX 12
#define CASES_MAX 32

static const char *device = "simt";
static char device_arg[32] = "--backend=simt";

void shim_use(int argc, char **argv)
{
    if (argc < 2)
        return;
    device = argv[1];
    snprintf(device_arg, sizeof device_arg, "--backend=%s", device);
}

const char *shim_arg(void)
{
    return device_arg;
}

void shim_says(const char *text, const char *format)
{
    const char *at = strstr(format, "%s");
    char want[160];
    assert_non_null(at);
    snprintf(want, sizeof want, "%.*s%s%s", (int)(at - format), format, device, at + 2);
    if (strstr(text, want) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", text, want);
}

bool shim_there(void)
{
    struct kn_options o = {.backend = device};
    struct kn *kn = NULL;
    if (strcmp(device, "simt") != 0) {
        if (kn_open(&kn, &o, NULL, 0) != KN_OK)
            return false;
        kn_close(&kn);
        return true;
    }
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return false;
#else
    for (unsigned i = 0; kn_backend_name(i) != NULL; i++)
        if (strcmp(kn_backend_name(i), "simt") == 0)
            return true;
    return false;
#endif
}

struct dh *shim_start(const char *backend, const char *model, const char *const *more)
{
    const char *args[ARGS_MAX] = {"--backend", strcmp(backend, "simt") == 0 ? device : backend,
                                  "--device-timeout=0"}; /* a pass may take the shim a minute */
    for (size_t n = 3; more != NULL && *more != NULL; more++) {
        assert_true(n < ARGS_MAX - 1);
        args[n++] = *more;
    }
    return dh_start(model, args);
}

static void event(struct shim_answer *sa, const struct backcast_event *ev)
{
    answer_event(&sa->a, ev);
    if (ev->type != BACKCAST_PRUNED)
        return;
    for (size_t i = 0; i < ev->pruned.n_dropped; i++)
        for (uint64_t k = 0; k < ev->pruned.dropped[i].count; k++) {
            uint64_t at = ev->pruned.dropped[i].first + k;
            assert_true(at < SHIM_TOKENS_MAX && !sa->gone[at]);
            sa->gone[at] = true;
        }
    if (sa->n_first > 0)
        return;
    for (uint32_t at = 0; sa->n_first < ev->pruned.tokens_after && at < SHIM_TOKENS_MAX; at++)
        if (!sa->gone[at])
            sa->first[sa->n_first++] = at;
    assert_int_equal(sa->n_first, ev->pruned.tokens_after);
}

static backcast_session *ask(backcast *c, const struct backcast_session_options *so,
                             const int32_t *ids, size_t n,
                             const struct backcast_generate_options *go)
{
    backcast_session *s = NULL;
    if (backcast_session_open(c, so, &s) != 0 || backcast_prompt_ids(s, ids, n, go) != 0)
        fail_msg("%s: %s", backcast_last_error_field(c), backcast_last_error(c));
    return s;
}

void shim_ask(backcast *c, const struct backcast_session_options *so, const int32_t *ids, size_t n,
              uint32_t max_tokens, struct shim_answer *ret)
{
    struct backcast_generate_options go = answer_options(max_tokens);
    shim_ask_how(c, so, ids, n, &go, ret);
}

void shim_ask_how(backcast *c, const struct backcast_session_options *so, const int32_t *ids,
                  size_t n, const struct backcast_generate_options *go, struct shim_answer *ret)
{
    struct backcast_event ev;
    backcast_session *s = ask(c, so, ids, n, go);
    memset(ret, 0, sizeof *ret);
    while (!ret->a.ended) {
        int rc = backcast_next(c, &ev, 120000);
        if (rc != 1)
            fail_msg("next: %d %s", rc, backcast_last_error(c));
        event(ret, &ev);
    }
    backcast_session_close(&s);
}

static struct backcast_session_options options_of(const struct golden_case *g)
{
    struct backcast_session_options so = answer_budget(g->ask.policy, g->ask.budget_tokens);
    so.keep_tokens = g->ask.keep;
    so.score = g->ask.score;
    so.trigger = g->ask.trigger;
    so.kv_type = "f32";
    so.min_gap = g->ask.min_gap;
    if (strcmp(so.policy, "none") == 0)
        return so;
    so.span = g->ask.span;
    so.span_quantile = g->ask.span_quantile < 0 ? 0 : g->ask.span_quantile;
    so.frozen_tokens = g->ask.frozen;
    so.recent_tokens = g->ask.recent;
    return so;
}

static void golden_compare(const char *arch, const struct golden_case *g, const struct answer *a)
{
    if (a->n_ids != g->n_text)
        fail_msg("%s %s: %zu tokens, not %u (%s)", arch, g->name, a->n_ids, g->n_text, a->error);
    for (uint32_t i = 0; i < g->n_text; i++)
        if (a->ids[i] != g->text[i])
            fail_msg("%s %s: token %u is %d, not %d", arch, g->name, i, a->ids[i], g->text[i]);
    assert_int_equal(a->prunes, g->refreshes);
    assert_int_equal(a->first_stream, g->n_prompt);
}

void shim_goldens(const char *arch, const char *only)
{
    char model[64];
    struct goldens g;
    struct backcast_event ev;
    backcast_session *s[CASES_MAX] = {NULL};
    struct answer a[CASES_MAX] = {{0}};
    unsigned left = 0;
    snprintf(model, sizeof model, "tiny-%s.gguf", arch);
    goldens_open(&g, arch);
    assert_true(g.n <= CASES_MAX);
    struct dh *d = shim_start("simt", model, NULL);
    backcast *c = dh_connect(d);
    for (uint32_t i = 0; i < g.n; i++) {
        const struct golden_case *k = &g.cases[i];
        struct backcast_session_options so = options_of(k);
        if (only != NULL && strncmp(k->name, only, strlen(only)) != 0)
            continue;
        struct backcast_generate_options go = answer_options(k->n_text);
        s[i] = ask(c, &so, k->prompt, k->n_prompt, &go);
        left++;
    }
    assert_true(left >= 4);
    while (left > 0) {
        int rc = backcast_next(c, &ev, 120000);
        if (rc != 1)
            fail_msg("next: %d %s", rc, backcast_last_error(c));
        for (uint32_t i = 0; i < g.n; i++)
            if (s[i] == ev.session)
                answer_event(&a[i], &ev);
        left -= ev.type == BACKCAST_END;
    }
    for (uint32_t i = 0; i < g.n; i++)
        if (s[i] != NULL) {
            golden_compare(arch, &g.cases[i], &a[i]);
            answer_free(&a[i]);
        }
    backcast_disconnect(&c);
    dh_stop(&d);
    goldens_close(&g);
}
