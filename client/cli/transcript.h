/* transcript.h: the token ids of a session's stream, so that ranges of what was dropped can be shown
 * as words.
 *
 *   stream index   0 ......... base ............ first_stream ......... end
 *                  earlier     this turn's ids   the answer's ids
 *                              (rendered here)   (from TEXT events)
 *
 * The daemon sends ids of answers only. The prompt's are made here by the same code that the daemon
 * uses (chat_render, tok_encode) from the model's file, if this user can read it; the first TEXT event
 * says where the answer begins, and where our count differs the prompt's words stay unknown. Without
 * the file every call does nothing and ranges are shown as numbers. */
#ifndef BACKCAST_TRANSCRIPT_H
#define BACKCAST_TRANSCRIPT_H
#include "backcast.h"
#include "chat.h"

struct transcript;

/* model: path of the GGUF; template: name, NULL or "": the file's. Never fails: without a vocabulary
 * *ret is an object that knows no words. NULL only without memory. */
struct transcript *transcript_open(const char *model, const char *chat_template);
void transcript_close(struct transcript **t);
bool transcript_has_words(const struct transcript *t);
struct tok *transcript_tok(struct transcript *t); /* NULL: no vocabulary */

/* A prompt is about to be sent. role NULL: raw text. */
void transcript_turn(struct transcript *t, const char *role, const char *text, size_t len,
                     bool answer);
/* Every event of the session. */
void transcript_event(struct transcript *t, const struct backcast_event *ev);

uint64_t transcript_tokens(const struct transcript *t); /* of the stream so far, as known here */
bool transcript_dropped(const struct transcript *t, uint64_t stream);
/* The words of a range into buf (len >= 64), cut in the middle with " ... " where they do not fit,
 * control characters as spaces. Returns false if they are not known. */
bool transcript_words(const struct transcript *t, struct backcast_range r, char *buf, size_t len);
#endif
