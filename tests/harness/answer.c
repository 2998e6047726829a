/* answer.c: see answer.h. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "answer.h"

static void text_add(struct answer *a, const struct backcast_event *ev)
{
    if (a->len + ev->text.len + 1 > a->cap) {
        a->cap = (a->len + ev->text.len + 1) * 2;
        a->text = realloc(a->text, a->cap);
        assert_non_null(a->text);
    }
    memcpy(a->text + a->len, ev->text.text, ev->text.len);
    a->len += ev->text.len;
    a->text[a->len] = '\0';
    if (a->n_ids == 0)
        a->first_stream = ev->text.first_stream;
    else if (ev->text.n_ids > 0) /* no token is left out or told twice */
        assert_int_equal(ev->text.first_stream, a->first_stream + a->n_ids);
    if (a->n_ids + ev->text.n_ids > a->ids_cap) {
        a->ids_cap = (a->n_ids + ev->text.n_ids) * 2;
        a->ids = realloc(a->ids, a->ids_cap * sizeof(*a->ids));
        assert_non_null(a->ids);
    }
    if (ev->text.n_ids > 0)
        memcpy(a->ids + a->n_ids, ev->text.ids, ev->text.n_ids * sizeof(*a->ids));
    a->n_ids += ev->text.n_ids;
}

void answer_event(struct answer *a, const struct backcast_event *ev)
{
    switch (ev->type) {
    case BACKCAST_TEXT:
        text_add(a, ev);
        break;
    case BACKCAST_LOGPROB:
        a->logprobs += !ev->logprob.prompt;
        a->prompt_logprobs += ev->logprob.prompt != 0;
        break;
    case BACKCAST_PROGRESS:
        assert_true(ev->progress.done <= ev->progress.total);
        a->progress = ev->progress.done;
        break;
    case BACKCAST_PRUNED:
        a->prunes++;
        snprintf(a->last_prune, sizeof(a->last_prune), "%s", ev->pruned.reason);
        uint64_t n = 0;
        for (size_t i = 0; i < ev->pruned.n_dropped; i++)
            n += ev->pruned.dropped[i].count;
        assert_int_equal(n, ev->pruned.tokens_before - ev->pruned.tokens_after);
        assert_true(ev->pruned.held_after <= ev->pruned.held_before);
        a->dropped += n;
        break;
    case BACKCAST_END:
        snprintf(a->reason, sizeof(a->reason), "%s", ev->end.reason);
        snprintf(a->error, sizeof(a->error), "%.120s", ev->end.text);
        a->code = ev->end.code;
        a->tokens_in = ev->end.tokens_in;
        a->tokens_out = ev->end.tokens_out;
        a->tokens_cached = ev->end.tokens_cached;
        a->tokens_adopted = ev->end.tokens_adopted;
        assert_int_equal(ev->end.prunes, a->prunes);
        assert_int_equal(ev->end.tokens_dropped, a->dropped);
        a->ended = true;
        break;
    default:
        break;
    }
}

void answer_free(struct answer *a)
{
    free(a->text);
    free(a->ids);
    *a = (struct answer){0};
}

bool answer_equal(const struct answer *a, const struct answer *b)
{
    return a->len == b->len && a->n_ids == b->n_ids && strcmp(a->reason, b->reason) == 0 &&
           (a->len == 0 || memcmp(a->text, b->text, a->len) == 0) &&
           (a->n_ids == 0 || memcmp(a->ids, b->ids, a->n_ids * sizeof(*a->ids)) == 0);
}

void answer_read(backcast *c, backcast_session *s, struct answer *a)
{
    struct backcast_event ev;

    while (!a->ended) {
        int rc = backcast_next(c, &ev, 30000);
        if (rc != 1)
            fail_msg("next: %d %s", rc, backcast_last_error(c));
        assert_ptr_equal(ev.session, s);
        answer_event(a, &ev);
    }
}

void answer_ask(backcast *c, const struct backcast_session_options *so, const char *text,
                size_t len, const struct backcast_generate_options *go, struct answer *a)
{
    backcast_session *s = NULL;

    if (backcast_session_open(c, so, &s) != 0 || backcast_prompt(s, text, len, go) != 0)
        fail_msg("%s: %s", backcast_last_error_field(c), backcast_last_error(c));
    answer_read(c, s, a);
    backcast_session_close(&s);
}

struct backcast_generate_options answer_options(uint32_t max_tokens)
{
    struct backcast_generate_options o;
    backcast_generate_options_init(&o);
    o.max_tokens = max_tokens;
    o.ignore_end = 1;
    return o;
}

struct backcast_session_options answer_budget(const char *policy, uint32_t tokens)
{
    struct backcast_session_options o;
    backcast_session_options_init(&o);
    o.policy = policy;
    o.budget_tokens = tokens;
    return o;
}

char *answer_prompt(size_t len, unsigned seed)
{
    static const char *const words[] = {"the",   "tide", "mill",  "turns", "a",
                                        "wheel", "of",   "oak",   "and",   "water",
                                        "runs",  "out",  "under", "nine",  "gates"};
    char *t = malloc(len + 16);
    size_t at = 0;

    assert_non_null(t);
    while (at < len) {
        seed = seed * 1664525u + 1013904223u;
        at += (size_t)sprintf(t + at, "%s ", words[(seed >> 16) % 15]);
    }
    t[len] = '\0';
    return t;
}
