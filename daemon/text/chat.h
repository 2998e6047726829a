/* chat.h: chat templates, recognised from the file's template text (no template language is
 * executed).
 *
 * Each call renders only its own turn as token ids: what was said before is in the cache already.
 * What must stand in front depends on where the conversation is, so the caller passes that state
 * and keeps it:
 *
 * - CHAT_FRESH: nothing in the cache: BOS (if the file adds one) and the template's default system
 *   message come first.
 * - CHAT_SYSTEM: a system message was the last thing rendered (some templates fold it into the
 *   first user turn).
 * - CHAT_USER: a user turn without an answer (max_tokens = 0).
 * - CHAT_OPEN: an answer was generated and cut (length, stop string, cancel), or given by the
 *   client: the turn must be closed first.
 * - CHAT_ENDED: an answer ended with its end token; that sampled token is not in the cache yet, the
 *   engine appends it with the next turn, before these ids.
 *
 * Special tokens are parsed in the template's own text, never in message text: a user cannot forge
 * a turn.
 */
#ifndef BACKCAST_CHAT_H
#define BACKCAST_CHAT_H
#include "tok.h"

enum chat_state { CHAT_FRESH, CHAT_SYSTEM, CHAT_USER, CHAT_OPEN, CHAT_ENDED };

struct chat; /* a template bound to a vocabulary; immutable, any thread */

struct chat_turn {
    int32_t *ids; /* malloced; chat_turn_free */
    size_t n;
    size_t n_system; /* leading ids through the system message (frozen = auto); 0: none here */
    enum chat_state state; /* after these ids, before an answer; CHAT_OPEN if they open one */
};

/* The template is that of the key tokenizer.chat_template. name: NULL, or force one of
 * chat_names(); BC_EUNKNOWN: there is no such name. An unknown or absent template is not an error
 * here: chat_render then fails with BC_EUNSUPPORTED saying so; raw prompts still work. t must
 * outlive the handle, g need not. */
int chat_open(struct chat **ret, const struct gguf *g, const struct tok *t, const char *name,
              struct err *e);
void chat_close(struct chat **c);
/* "chatml", "llama-3", "llama-2", "mistral", "deepseek-r1" ...; "none", also for NULL. */
const char *chat_name(const struct chat *c);
const char *chat_names(unsigned i); /* the table of known templates; NULL past the end */

/* role: "system" | "user" | "assistant". answer: add the generation prompt (a turn that asks for an
 * answer). An assistant message is left open (CHAT_OPEN): with answer the model continues it, else
 * the next turn closes it. BC_EINVALID: unknown role or a role that cannot follow the state (a
 * system message after the start, where the template has no place for it). */
int chat_render(const struct chat *c, enum chat_state state, const char *role, const char *text,
                size_t len, bool answer, struct chat_turn *ret, struct err *e);
void chat_turn_free(struct chat_turn *t);
#endif
