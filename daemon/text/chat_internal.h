/* chat_internal.h: the table of templates as chat.c reads it. */
#ifndef BACKCAST_CHAT_INTERNAL_H
#define BACKCAST_CHAT_INTERNAL_H
#include "chat.h"

enum {
    TEMPLATE_FOLDS = 1,       /* the system message opens the first user turn */
    TEMPLATE_LATE_SYSTEM = 2, /* a system message may come at any time */
    TEMPLATE_TRIMS = 4,       /* white space around messages goes */
    TEMPLATE_ALWAYS = 8,      /* the system message is there even if it is empty */
    TEMPLATE_ALTERNATES = 16, /* an assistant message only behind a user's */
};

/* In every text "{bos}" and "{eos}" stand for those tokens of the file. */
struct chat_template {
    const char *name;
    const char *needs[3]; /* the file's template has all of these ... */
    const char *lacks[2]; /* ... and none of these */
    const char *system_open, *system_close;
    const char *user_open, *user_close;
    const char *answer_open; /* the model goes on from here */
    const char *reply_open;  /* before an answer that the client gives */
    const char *reply_close; /* ends an answer that was cut or given */
    const char *after_end;   /* follows an end token that the model gave */
    const char *think;       /* if the file's template has this, answer_open gains "<think>\n" */
    /* if the file's template has a literal text between this and "<|im_end|>", that is the system
     * message where the client gives none */
    const char *fallback;
    unsigned flags;
};

const struct chat_template *chat_template_at(unsigned i); /* NULL past the end */
/* The first that fits the text of a file's template; NULL: none. */
const struct chat_template *chat_template_match(const char *text, size_t len);
/* The literal text in a template behind `open` and a newline, up to `close`, unescaped: *ret is
 * malloced, NULL if there is none. BC_ENOMEM. */
int chat_literal(const char *text, size_t len, const char *open, const char *close, char **ret);
bool chat_contains(const char *text, size_t len, const char *fragment);
#endif
