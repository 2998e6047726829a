/* engine_goldens.h: the cases of the golden files as sessions of an engine: what each name means,
 * its prompt and its text. */
#ifndef BACKCAST_ENGINE_GOLDENS_H
#define BACKCAST_ENGINE_GOLDENS_H
#include "engine_harness.h"
#include "gguf.h"

#define GOLDEN_CASES_MAX 64

struct golden_case {
    char name[96];
    struct eh_ask ask; /* f32 KV */
    const int32_t *prompt, *text;
    uint32_t n_prompt, n_text, refreshes;
};
struct goldens {
    struct gguf *file;
    struct golden_case cases[GOLDEN_CASES_MAX];
    uint32_t n;
};
/* Every text of golden-ARCH.gguf, the full caches' included. */
void goldens_open(struct goldens *g, const char *arch);
void goldens_close(struct goldens *g);
/* The text that came is the golden's, at stream indices without a hole. */
void golden_check(const struct golden_case *c, const struct eh_stream *s, const char *label);
#endif
