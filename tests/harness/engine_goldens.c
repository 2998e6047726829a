/* engine_goldens.c: see engine_goldens.h. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "engine_goldens.h"
#include "golden_forms.h"

static const int32_t *tensor(const struct gguf *g, const char *name, uint32_t *ret_n)
{
    const struct gguf_tensor *t = gguf_tensor_find(g, name);
    if (t == NULL)
        fail_msg("%s: no tensor %s", gguf_path(g), name);
    *ret_n = (uint32_t)(t->bytes / sizeof(int32_t));
    return t->data;
}

/* The value of a field of the case [text, end); NULL: it has none. */
static const char *field(const char *text, size_t len, const char *name)
{
    char key[64];
    int n = snprintf(key, sizeof key, "\"%s\": ", name);
    const char *at = memmem(text, len, key, (size_t)n);
    return at != NULL ? at + n : NULL;
}

static uint32_t number(const char *text, size_t len, const char *name)
{
    const char *at = field(text, len, name);
    return at != NULL ? (uint32_t)strtoul(at, NULL, 10) : 0;
}

static void case_texts(struct goldens *g, struct golden_case *c)
{
    char prompt[64];
    snprintf(prompt, sizeof prompt, "%.3s.prompt", c->name);
    c->prompt = tensor(g->file, prompt, &c->n_prompt);
    c->text = tensor(g->file, c->name, &c->n_text);
}

static void case_read(struct goldens *g, const char *name, const char *text, size_t len)
{
    const struct golden_form *f = golden_form_of(name);
    const char *trigger = field(text, len, "trigger");
    bool end = trigger != NULL && strncmp(trigger, "\"prefill_end\"", 13) == 0;
    assert_true(g->n < GOLDEN_CASES_MAX);
    struct golden_case *c = &g->cases[g->n++];
    snprintf(c->name, sizeof c->name, "%s", name);
    c->ask = (struct eh_ask){
        .policy = f->policy,
        .score = f->score,
        .span = f->span,
        .span_quantile = f->quantile > 0 ? f->quantile : -1,
        .min_gap = f->min_gap,
        .budget_tokens = number(text, len, "budget"),
        .keep = number(text, len, "keep"),
        .frozen = number(text, len, "frozen"),
        .recent = number(text, len, "recent"),
        .recent_zero = number(text, len, "recent") == 0,
        .trigger = end ? "prefill_end" : "budget",
        .kv_type = "f32",
    };
    c->refreshes = number(text, len, "refreshes");
    case_texts(g, c);
    assert_int_equal(c->n_text, number(text, len, "n_new"));
}

void goldens_open(struct goldens *g, const char *arch)
{
    static const char *const groups[] = {"gen", "gap", "end"};
    char path[512];
    struct gguf_str s;
    struct err e = {0};
    memset(g, 0, sizeof *g);
    snprintf(path, sizeof path, "%s/golden-%s.gguf", TEST_VECTORS, arch);
    if (gguf_open(&g->file, path, &e) < 0 || gguf_get_str(g->file, "golden.cases", &s, &e) < 0)
        fail_msg("%s: %s", path, e.text);
    for (size_t i = 0; i < ARRAY_LEN(groups); i++) {
        struct golden_case *c = &g->cases[g->n++];
        snprintf(c->name, sizeof c->name, "%s.none", groups[i]);
        c->ask = (struct eh_ask){.policy = "none", .kv_type = "f32"};
        case_texts(g, c);
    }
    for (const char *at = s.s, *end = s.s + s.len; (at = memchr(at, '{', (size_t)(end - at)));) {
        size_t len = (size_t)((const char *)memchr(at, '}', (size_t)(end - at)) + 1 - at);
        const char *name = field(at, len, "name");
        char copy[96];
        snprintf(copy, sizeof copy, "%.*s", (int)strcspn(name + 1, "\""), name + 1);
        if (field(at, len, "n_new") != NULL)
            case_read(g, copy, at, len);
        at += len;
    }
    assert_int_equal(g->n, 3 + 25);
}

void goldens_close(struct goldens *g)
{
    gguf_close(&g->file);
}

void golden_check(const struct golden_case *c, const struct eh_stream *s, const char *label)
{
    if (s->n_ids != c->n_text)
        fail_msg("%s %s: %u tokens, not %u", label, c->name, s->n_ids, c->n_text);
    for (uint32_t i = 0; i < s->n_ids; i++) {
        if (s->ids[i] != c->text[i])
            fail_msg("%s %s: token %u is %d, not %d", label, c->name, i, s->ids[i], c->text[i]);
        assert_int_equal(s->streams[i], c->n_prompt + i);
    }
    assert_int_equal(s->n_prunes, c->refreshes);
}
