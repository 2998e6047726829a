/* damaged_models.c: see damaged_models.h. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <unistd.h>
#include "answer.h"
#include "daemon_harness.h"
#include "damaged_models.h"
#include "gguf.h"

#define GOOD_TOKENS 400u

struct damage {
    struct dh *d;
    backcast *c;    /* names the damaged files */
    backcast *good; /* connection of the undisturbed session */
    backcast_session *s;
    struct answer now, want; /* of s: under way; alone */
    unsigned n_answers;
    uint8_t *file;
    size_t size, header;
    uint32_t seed, n_files, n_opened, n_refused;
};

static uint32_t draw(struct damage *w, uint32_t n)
{
    w->seed = w->seed * 1664525u + 1013904223u;
    return (uint32_t)(((uint64_t)w->seed * n) >> 32);
}

/* ---- the good session */

static void good_ask(struct damage *w)
{
    struct backcast_session_options so = answer_budget("counter_causal_fast", 96);
    struct backcast_generate_options go = answer_options(GOOD_TOKENS);
    if (backcast_session_open(w->good, &so, &w->s) != 0 ||
        backcast_prompt(w->s, "the tide turns a mill", 21, &go) != 0)
        fail_msg("good session: %s", backcast_last_error(w->good));
}

static void good_end(struct damage *w)
{
    if (!answer_equal(&w->now, &w->want))
        fail_msg("answer %u, after %u files: %s", w->n_answers, w->n_files, w->now.reason);
    w->n_answers++;
    answer_free(&w->now);
    backcast_session_close(&w->s);
}

/* Takes what has come; a whole answer is compared, and the next one begins. */
static void good_look(struct damage *w)
{
    struct backcast_event ev;
    int rc;
    while ((rc = backcast_next(w->good, &ev, 0)) == 1) {
        answer_event(&w->now, &ev);
        if (!w->now.ended)
            continue;
        good_end(w);
        good_ask(w);
    }
    if (rc < 0)
        fail_msg("after %u files: %s", w->n_files, backcast_last_error(w->good));
}

/* ---- the damaged ones */

static void file_read(struct damage *w, const char *name)
{
    char path[512];
    struct gguf *g = NULL;
    struct err e = {0};
    snprintf(path, sizeof path, TEST_VECTORS "/%s", name);
    if (gguf_open(&g, path, &e) < 0)
        fail_msg("%s: %s", path, e.text);
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    assert_int_equal(fseek(f, 0, SEEK_END), 0);
    w->size = w->header = (size_t)ftell(f);
    rewind(f);
    w->file = malloc(w->size);
    assert_non_null(w->file);
    assert_int_equal(fread(w->file, 1, w->size, f), w->size);
    fclose(f);
    for (size_t i = 0; i < gguf_n_tensors(g); i++)
        w->header -= gguf_tensor_at(g, i)->bytes;
    gguf_close(&g);
}

/* An error is a whole one: a code of a file, a sentence, and the name of what is wrong. */
static void check_error(struct damage *w, int rc)
{
    const char *text = backcast_last_error(w->c), *field = backcast_last_error_field(w->c);
    bool known = rc == BACKCAST_ECORRUPT || rc == BACKCAST_EUNSUPPORTED ||
                 rc == BACKCAST_EINVALID || rc == BACKCAST_EBUDGET || rc == BACKCAST_ENOMEM;
    if (!known || strlen(text) < 5 || field[0] == '\0')
        fail_msg("file %u: %d, field \"%s\": %s", w->n_files, rc, field, text);
    w->n_refused++;
}

/* It opened: whatever its numbers mean, a prompt has an end. */
static void ask_damaged(struct damage *w, backcast_session *s)
{
    struct backcast_generate_options go = answer_options(4);
    struct answer a = {0};
    int rc = backcast_prompt(s, "oak", 3, &go);
    if (rc == 0)
        answer_read(w->c, s, &a);
    else
        check_error(w, rc);
    answer_free(&a);
    w->n_opened++;
}

static void try_file(struct damage *w, size_t size)
{
    char path[96];
    backcast_session *s = NULL;
    struct backcast_session_options so = answer_budget("counter_causal_fast", 64);
    snprintf(path, sizeof path, "%s/%u.gguf", w->d->dir, w->n_files++); /* a path is a model */
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(w->file, 1, size, f), size);
    assert_int_equal(fclose(f), 0);
    so.model = path;
    int rc = backcast_session_open(w->c, &so, &s);
    if (rc == 0)
        ask_damaged(w, s);
    else
        check_error(w, rc);
    backcast_session_close(&s);
    unlink(path);
    good_look(w);
    assert_true(dh_alive(w->d));
}

static void try_all(struct damage *w, unsigned n_cut, unsigned n_changed)
{
    for (unsigned i = 0; i < n_cut; i++) /* half of them in the header */
        try_file(w, draw(w, (uint32_t)(i % 2 == 0 ? w->header : w->size)));
    assert_int_equal(w->n_opened, 0);
    for (unsigned i = 0; i < n_changed; i++) {
        uint8_t *at = w->file + draw(w, (uint32_t)w->header), old = *at;
        *at ^= (uint8_t)(1 + draw(w, 255));
        try_file(w, w->size);
        *at = old;
    }
}

static bool nothing_is_held(void *arg)
{
    struct backcast_stats st;
    return backcast_stats(arg, &st) == 0 && st.n_sessions == 0 && st.kv_held == 0;
}

void damaged_models(unsigned n_cut, unsigned n_changed)
{
    struct damage w = {.seed = 99 + n_changed};
    w.d = dh_start_long(NULL);
    assert_int_equal(backcast_connect(&w.c, w.d->socket), 0);
    assert_int_equal(backcast_connect(&w.good, w.d->socket), 0);
    good_ask(&w);
    answer_read(w.good, w.s, &w.want);
    backcast_session_close(&w.s);
    assert_int_equal(w.want.n_ids, GOOD_TOKENS);
    assert_true(w.want.prunes > 0);
    file_read(&w, "tiny-llama-q4_0.gguf");
    good_ask(&w);
    try_all(&w, n_cut, n_changed);
    assert_true(w.n_opened > 0 && w.n_refused >= n_cut && w.n_refused < w.n_files);
    answer_read(w.good, w.s, &w.now);
    good_end(&w);
    print_message("%u files refused, %u opened; %u good answers beside them\n", w.n_refused,
                  w.n_opened, w.n_answers);
    assert_true(dh_until(nothing_is_held, w.good, DH_PATIENCE_MS));
    answer_free(&w.want);
    free(w.file);
    backcast_disconnect(&w.c);
    backcast_disconnect(&w.good);
    dh_stop(&w.d);
}
