/* quality.h: what a backend's arithmetic does to a model: perplexity of a text, and greedy answers, by the whole
 * engine. Two backends compared this way say whether the fast one is as good as the exact one.
 *
 *     struct eh *h = quality_open(model, &(struct quality_how){"ref", "f32", 1, 0});
 *     double nll = quality_nll(h, "f32", ids, n);     perplexity of n tokens: exp(nll / (n - 1))
 *     quality_answer(h, "f32", 3, &a);
 *     eh_close(&h);
 */
#ifndef BACKCAST_TEST_QUALITY_H
#define BACKCAST_TEST_QUALITY_H
#include "engine_harness.h"

#define QUALITY_WINDOW 1024u /* tokens of a text that are read as one */
#define QUALITY_ANSWER 32u   /* tokens */
#define QUALITY_PROMPTS 20u
/* Below this the best token's lead over the next is a near-tie: two backends' arithmetic may turn it, and both are right. A
 * perturbation of the logits below half of it turns no larger lead. */
#define QUALITY_NEAR_TIE 0.5f /* nats */

struct quality_how {
    const char *backend, *kv_type;
    uint32_t threads;
    uint32_t activations; /* of kn_options */
};
struct quality_answer {
    uint32_t n;
    int32_t ids[QUALITY_ANSWER];
    int32_t second[QUALITY_ANSWER]; /* the next likely one */
    float lead[QUALITY_ANSWER];     /* of the token over it, nats */
};

struct eh *quality_open(const char *model, const struct quality_how *how);
/* Tokens of the texts of these files, one after another, at most max. *ret malloced. Any failure ends the test. */
uint32_t quality_tokens(const char *model, const char *const *files, uint32_t max, int32_t **ret);
/* Sum of -log p of tokens 1 .. n - 1, each behind all before it; n <= QUALITY_WINDOW. */
double quality_nll(struct eh *h, const char *kv_type, const int32_t *ids, uint32_t n);
/* The answer to question i < QUALITY_PROMPTS of a fixed list, as a chat: greedy, to the end token or QUALITY_ANSWER. */
void quality_answer(struct eh *h, const char *kv_type, uint32_t i, struct quality_answer *ret);
/* How many tokens from the first on are the same; equal: all, and none is left on either side. */
uint32_t quality_common(const struct quality_answer *a, const struct quality_answer *b);
bool quality_equal(const struct quality_answer *a, const struct quality_answer *b);
/* The same count; where a goes another way than ref, it must take ref's second token, at a near-tie of ref's. Or the test fails,
 * with a sentence about `what`. Beyond that token nothing is compared: they answer different texts. */
uint32_t quality_part(const struct quality_answer *ref, const struct quality_answer *a,
                      const char *what);
#endif
