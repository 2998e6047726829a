/* quality.c: see quality.h. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "quality.h"
#include "tok.h"

static const char *const prompts[QUALITY_PROMPTS] = {
    "Why is the sky blue?",
    "Name three rivers in Europe.",
    "How do I boil an egg?",
    "What is the capital of Japan?",
    "Write one sentence about a lighthouse.",
    "What does a compiler do?",
    "Explain what a prime number is.",
    "Give me a short recipe for pancakes.",
    "Who wrote Romeo and Juliet?",
    "How many days are in a leap year?",
    "What is the difference between a frog and a toad?",
    "Translate 'good morning' into French.",
    "Why do leaves fall in autumn?",
    "List the planets of the solar system.",
    "What is photosynthesis?",
    "Tell me a fact about the moon.",
    "How does a bicycle stay upright?",
    "Write a haiku about rain.",
    "What is the boiling point of water?",
    "Suggest a name for a black cat.",
};

static void tweak(struct engine_options *o, void *arg)
{
    const struct quality_how *how = arg;
    o->backend = how->backend;
    o->threads = how->threads;
    o->activations = how->activations;
    o->kv_memory = 256u << 20;
    o->session_budget = 128u << 20;
}

struct eh *quality_open(const char *model, const struct quality_how *how)
{
    struct quality_how copy = *how;
    return eh_open(model, tweak, &copy);
}

static char *file_read(const char *path, size_t *ret_len)
{
    FILE *f = fopen(path, "rb");
    char *text = malloc(1u << 20);

    if (f == NULL || text == NULL)
        fail_msg("%s cannot be read", path);
    *ret_len = fread(text, 1, 1u << 20, f);
    fclose(f);
    return text;
}

uint32_t quality_tokens(const char *model, const char *const *files, uint32_t max, int32_t **ret)
{
    struct gguf *g = NULL;
    struct tok *t = NULL;
    struct err e = {0};
    uint32_t n = 0;
    int32_t *all = calloc(max, sizeof(*all));

    assert_non_null(all);
    if (gguf_open(&g, model, &e) < 0 || tok_open(&t, g, &e) < 0)
        fail_msg("%s: %s", model, e.text);
    for (; *files != NULL && n < max; files++) {
        size_t len, k;
        int32_t *ids;
        char *text = file_read(*files, &len);
        assert_int_equal(tok_encode(t, text, len, (struct tok_flags){0}, &ids, &k, &e), BC_OK);
        k = BC_MIN(k, (size_t)(max - n));
        memcpy(all + n, ids, k * sizeof(*ids));
        n += (uint32_t)k;
        free(ids);
        free(text);
    }
    tok_close(&t);
    gguf_close(&g);
    *ret = all;
    return n;
}

static uint64_t session(struct eh *h, const char *kv_type)
{
    return eh_session(h, &(struct eh_ask){.policy = "none",
                                          .kv_type = kv_type,
                                          .budget_tokens = 2 * QUALITY_WINDOW});
}

double quality_nll(struct eh *h, const char *kv_type, const int32_t *ids, uint32_t n)
{
    struct generate_options o = eh_greedy(0);
    double sum = 0;

    assert_true(n >= 2 && n <= QUALITY_WINDOW);
    o.n_logprobs = 0;
    o.prompt_logprobs = true;
    uint64_t s = session(h, kv_type);
    eh_ids(h, s, ids, n, &o);
    eh_run_to_end(h, s);
    const struct eh_stream *st = eh_stream(h, s);
    assert_int_equal(st->n_logprobs, n - 1); /* the first token has nothing before it */
    for (uint32_t i = 0; i < n - 1; i++) {
        assert_int_equal(st->logprobs[i].u.logprob.id, ids[i + 1]);
        sum -= (double)st->logprobs[i].u.logprob.logprob;
    }
    eh_close_session(h, s);
    return sum;
}

void quality_answer(struct eh *h, const char *kv_type, uint32_t i, struct quality_answer *ret)
{
    struct generate_options o = eh_greedy(QUALITY_ANSWER);

    assert_true(i < QUALITY_PROMPTS);
    o.ignore_end = false;
    o.n_logprobs = 2;
    uint64_t s = session(h, kv_type);
    eh_text(h, s, PROMPT_CHAT, prompts[i], &o);
    eh_run_to_end(h, s);
    const struct eh_stream *st = eh_stream(h, s);
    assert_true(st->n_ids > 0 && st->n_ids <= QUALITY_ANSWER);
    ret->n = st->n_ids;
    memcpy(ret->ids, st->ids, st->n_ids * sizeof(*ret->ids));
    assert_true(st->n_logprobs >= st->n_ids);
    for (uint32_t k = 0; k < st->n_ids; k++) {
        const struct report_top *top = st->logprobs[k].u.logprob.top;
        assert_int_equal(st->logprobs[k].u.logprob.n_top, 2);
        ret->second[k] = top[1].id;
        ret->lead[k] = top[0].logprob - top[1].logprob;
    }
    eh_close_session(h, s);
}

uint32_t quality_common(const struct quality_answer *a, const struct quality_answer *b)
{
    uint32_t n = 0;
    while (n < a->n && n < b->n && a->ids[n] == b->ids[n])
        n++;
    return n;
}

bool quality_equal(const struct quality_answer *a, const struct quality_answer *b)
{
    return a->n == b->n && quality_common(a, b) == a->n;
}

uint32_t quality_part(const struct quality_answer *ref, const struct quality_answer *a,
                      const char *what)
{
    uint32_t same = quality_common(ref, a);
    if (same == ref->n)
        return same;
    if (!(ref->lead[same] < QUALITY_NEAR_TIE))
        fail_msg("%s: token %u led by %.3f nats", what, same, (double)ref->lead[same]);
    /* an answer that ends here took an end token, which has no log-probability and is in no list */
    if (same < a->n && a->ids[same] != ref->second[same])
        fail_msg("%s: token %u is %d, neither the best, %d, nor the second, %d", what, same,
                 a->ids[same], ref->ids[same], ref->second[same]);
    return same;
}
