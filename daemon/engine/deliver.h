/* deliver.h: from sampled ids to text that may be shown: detokeniser, stop strings, log-probability
 * reports, ends.
 *
 *   buf   | shown last time | held back ............ | room for one piece |
 *         0                 n_shown                  n
 *
 * Text that could be the beginning of a stop string is held back until it is known not to be, so
 * nothing of a stop string is ever shown. What is held is at most a stop string's length less one.
 */
#ifndef BACKCAST_DELIVER_H
#define BACKCAST_DELIVER_H
#include "engine.h"
#include "tok.h"

struct deliver {
    const struct tok *tok;
    const struct generate_options *opt; /* the request's: stop strings */
    struct detok detok;
    char *buf;
    size_t cap, n, n_shown;
};

/* opt must outlive d. at_start: a SentencePiece answer that opens a text loses its leading space. */
int deliver_open(struct deliver *d, const struct tok *t, const struct generate_options *opt,
                 bool at_start, struct err *e);
void deliver_close(struct deliver *d);
/* Adds one sampled token. *ret_text[*ret_len]: what may be shown now, valid until the next call.
 * True: a stop string is complete; all text before it has been handed out, the rest is dropped. */
bool deliver_push(struct deliver *d, int32_t id, const char **ret_text, size_t *ret_len);
/* The end without a stop string: all that was held back, an unfinished character included. */
void deliver_flush(struct deliver *d, const char **ret_text, size_t *ret_len);
#endif
