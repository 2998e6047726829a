/* answer.h: what a request brought, gathered: for tests that compare answers. */
#ifndef BACKCAST_TEST_ANSWER_H
#define BACKCAST_TEST_ANSWER_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "backcast.h"

struct answer {
    char *text; /* malloced */
    size_t len, cap;
    int32_t *ids;
    size_t n_ids, ids_cap;
    uint32_t prunes, progress, logprobs, prompt_logprobs;
    uint64_t dropped, first_stream; /* of the first id */
    char reason[16], error[128], last_prune[16];
    int code;
    uint32_t tokens_in, tokens_out, tokens_cached, tokens_adopted;
    bool ended;
};
void answer_event(struct answer *a, const struct backcast_event *ev);
void answer_free(struct answer *a);
bool answer_equal(const struct answer *a, const struct answer *b); /* ids, text, reason */
/* Reads c until s's END. Events of other sessions fail the test. */
void answer_read(backcast *c, backcast_session *s, struct answer *a);
/* Open with these options, one raw prompt, read, close. */
void answer_ask(backcast *c, const struct backcast_session_options *so, const char *text,
                size_t len, const struct backcast_generate_options *go, struct answer *a);
struct backcast_generate_options answer_options(uint32_t max_tokens); /* ignores end tokens */
struct backcast_session_options answer_budget(const char *policy, uint32_t tokens);
char *answer_prompt(size_t len, unsigned seed); /* words, malloced, len bytes and a NUL */
#endif
