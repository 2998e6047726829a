/* shim_daemon.h: a daemon whose backend is the GPU's, on a CPU (tests/simt), and what its sessions keep.
 *
 * A kept set is followed from the stream alone: the PRUNED records name the stream indices that go. */
#ifndef BACKCAST_SHIM_DAEMON_H
#define BACKCAST_SHIM_DAEMON_H
#include "answer.h"
#include "daemon_harness.h"
#include "engine_goldens.h"

#define SHIM_TOKENS_MAX 4096

/* One session's answer and the tokens that it holds, by stream index. */
struct shim_answer {
    struct answer a;
    bool gone[SHIM_TOKENS_MAX];
    uint32_t first[SHIM_TOKENS_MAX], n_first; /* held right after the first prune */
};

/* A program's arguments: on a machine with a GPU, "cuda" in place of the shim. */
void shim_use(int argc, char **argv);
/* "--backend=simt", or what shim_use said. */
const char *shim_arg(void);
/* Fails unless text has `format`, in which %s is the device's name. */
void shim_says(const char *text, const char *format);
/* False: this build has no shim, or a sanitizer would make it crawl; the program is skipped then (77). */
bool shim_there(void);
/* backend "simt": what shim_use said. */
struct dh *shim_start(const char *backend, const char *model, const char *const *more);
/* All cases of a golden file as sessions at once; the texts must be the goldens'. only: a group ("gen") or NULL. */
void shim_goldens(const char *arch, const char *only);
/* A raw prompt of token ids under a policy; everything that came. */
void shim_ask(backcast *c, const struct backcast_session_options *so, const int32_t *ids, size_t n,
              uint32_t max_tokens, struct shim_answer *ret);
void shim_ask_how(backcast *c, const struct backcast_session_options *so, const int32_t *ids,
                  size_t n, const struct backcast_generate_options *go, struct shim_answer *ret);
#endif
