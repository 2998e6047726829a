/* golden_texts.h: greedy texts under every policy, token for token, and the kept set of every refresh,
 * against an outside implementation: all tiny models, prompts cut at 1, 7, 13 and 70 tokens. */
#ifndef BACKCAST_GOLDEN_TEXTS_H
#define BACKCAST_GOLDEN_TEXTS_H
#include "golden_forms.h"
#include "golden_run.h"
#include "sanitized.h"

static const char *const archs[] = {"llama", "llama-rope3", "qwen2", "qwen3"};
static const uint32_t chunks[] = {13, 70, 1, 7}; /* tokens of a pass */

/* 64 bits do not fit in a JSON number: the seed is a string. */
static inline uint64_t gcase_seed(const struct gcase *c)
{
    const char *at = gcase_field(c, "seed");
    return at != NULL ? strtoull(at + 1, NULL, 10) : 0;
}

static inline struct evict_params case_params(const struct gcase *c, const struct golden_form *f)
{
    struct evict_request r = {
        .policy = f->policy,
        .budget_tokens = (uint32_t)gcase_number(c, "budget", -1),
        .keep = (uint32_t)gcase_number(c, "keep", -1),
        .frozen = (uint32_t)gcase_number(c, "frozen", -1),
        .recent = (int64_t)gcase_number(c, "recent", -2),
        .min_gap = f->min_gap,
        .score = f->score,
        .span = f->span,
        .span_quantile = f->quantile,
        .trigger = gcase_is(c, "trigger", "\"prefill_end\"") ? "prefill_end" : "budget",
        .seed = gcase_seed(c),
    };
    struct evict_params p;
    struct err e = {0};
    assert_int_equal((uint32_t)gcase_number(c, "min_gap", 0), f->min_gap);
    if (evict_resolve(&r, 4096, 0, &p, &e))
        fail_msg("%s: %s", e.field, e.text);
    return p;
}

static inline void check_text(const struct bench *b, const char *name, const int32_t *got,
                              uint32_t n)
{
    uint32_t n_golden;
    const int32_t *golden = golden_i32(b->golden, name, &n_golden);
    assert_int_equal(n, n_golden);
    for (uint32_t i = 0; i < n; i++)
        if (got[i] != golden[i])
            fail_msg("%s %s: token %u is %d, not %d", b->label, name, i, got[i], golden[i]);
}

static inline void check_case(struct bench *b, const struct gcase *c, uint32_t chunk)
{
    struct evict_params p = case_params(c, golden_form_of(c->name));
    struct session s;
    char name[128];
    int32_t text[RUN_TOKENS_MAX];
    uint32_t n_prompt, n_new = (uint32_t)gcase_number(c, "n_new", 0);
    snprintf(name, sizeof name, "%.3s.prompt", c->name);
    const int32_t *prompt = golden_i32(b->golden, name, &n_prompt);
    session_open(&s, b, &p);
    s.score_rows = chunk == 70 ? 0 : chunk; /* a refresh cut into blocks selects the same */
    s.look = chunk == 13;
    session_generate(&s, prompt, n_prompt, chunk, n_new, text);
    check_text(b, c->name, text, n_new);
    assert_int_equal(s.n_prunes, (uint32_t)gcase_number(c, "refreshes", 0));
    for (uint32_t i = 0; i < s.n_prunes; i++) {
        snprintf(name, sizeof name, "%s.keep%u", c->name, i);
        check_kept(b, name, s.prune[i].keep, s.prune[i].n);
    }
    session_close(&s);
}

/* Without a ceiling: the full cache's text. */
static inline void check_none(struct bench *b, const char *group, uint32_t chunk)
{
    struct evict_request r = {.policy = "none", .recent = -1, .span_quantile = -1};
    struct evict_params p;
    struct session s;
    struct err e = {0};
    char name[64];
    int32_t text[RUN_TOKENS_MAX];
    uint32_t n_prompt, n_new;
    assert_int_equal(evict_resolve(&r, 4096, 1 << 20, &p, &e), 0);
    snprintf(name, sizeof name, "%s.prompt", group);
    const int32_t *prompt = golden_i32(b->golden, name, &n_prompt);
    snprintf(name, sizeof name, "%s.none", group);
    golden_i32(b->golden, name, &n_new);
    session_open(&s, b, &p);
    session_generate(&s, prompt, n_prompt, chunk, n_new, text);
    check_text(b, name, text, n_new);
    assert_int_equal(s.n_prunes, 0);
    session_close(&s);
}

/* How much of it: all cases at every cut; or what `make check` has time for: a cut or two, and fewer cases, under a sanitizer,
 * and on backends that take their time one cut and every `step`-th case. */
struct texts_depth {
    unsigned n_chunks, step, first; /* chunks from `first` on */
};
static const struct texts_depth texts_all = {ARRAY_LEN(chunks), 1, 0};

static inline struct texts_depth texts_depth_of(const struct bench *b, size_t arch)
{
    unsigned first = (unsigned)arch; /* architectures that have not all cuts have different ones */
    if (!SANITIZED && !bench_is_slow(b))
        return texts_all;
    if (!SANITIZED)
        return (struct texts_depth){1, arch > 0 ? 6 : bench_is_gpu(b) ? 2 : 1, first};
    if (bench_is_slow(b))
        return (struct texts_depth){1, arch > 0 ? 9 : 4, first};
    return (struct texts_depth){arch == 0 ? 2 : 1, arch == 0 ? 1 : 3, first};
}

/* The texts of one file, whose cases belong to `groups`. */
static inline void check_file(struct bench *b, const struct texts_depth *d, const char *prefix,
                              const char *const *groups, unsigned n_cases)
{
    struct gcase c;
    unsigned n = 0, n_seen = 0;
    for (unsigned i = 0; i < d->n_chunks; i++) {
        uint32_t chunk = chunks[(d->first + i) % ARRAY_LEN(chunks)];
        for (const char *const *g = groups; *g != NULL; g++)
            check_none(b, *g, chunk);
        for (size_t at = 0; gcase_next(b->golden, &at, &c);) {
            if (gcase_field(&c, "n_new") == NULL || n_seen++ % d->step != 0)
                continue;
            check_case(b, &c, chunk);
            n++;
        }
    }
    assert_int_equal(n_seen, d->n_chunks * n_cases);
    assert_int_equal(n, (n_seen + d->step - 1) / d->step);
    print_message("%s, %s: %u texts and all their kept sets\n", b->label, prefix, n);
}

/* Both files of an architecture: the goldens, and the baselines that the reference lacks. */
static inline void check_arch(const struct kn_options *ko, size_t arch,
                              const struct texts_depth *all)
{
    static const char *const golden_groups[] = {"gen", "gap", "end", NULL};
    static const char *const baseline_groups[] = {"gen", NULL};
    struct bench b;
    bench_open(&b, ko, archs[arch], "golden");
    struct texts_depth d = all != NULL ? *all : texts_depth_of(&b, arch);
    check_file(&b, &d, "golden", golden_groups, 10 + 5 + 10);
    bench_close(&b);
    bench_open(&b, ko, archs[arch], "baseline");
    d.step = 1;
    check_file(&b, &d, "baseline", baseline_groups, 3);
    bench_close(&b);
}

#endif
