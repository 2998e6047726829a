/* params.h: values of params.tbl as text: reading, checking, writing. For config.c. */
#ifndef BACKCAST_PARAMS_H
#define BACKCAST_PARAMS_H
#include "config.h"

enum param_type {
    PARAM_TEXT,
    PARAM_COUNT,
    PARAM_SIZE,
    PARAM_SHARE,
    PARAM_PART,
    PARAM_BUDGET,
    PARAM_AUTO,
    PARAM_EITHER,
    PARAM_REAL,
    PARAM_MODE,
    PARAM_TIME
};
struct param {
    const char *section, *key;
    enum param_type type;
    const char *flag, *def;
    double min, max;
    bool live;
    const char *text;
    size_t offset; /* in struct config */
};
#define PARAM_VALUE_MAX 4160 /* bytes of a value as text, with the NUL */

const struct param *param_at(size_t i); /* NULL past the end */
const char *param_section_text(const char *section);
const char *param_unit(enum param_type type); /* for people: "bytes, KiB, MiB, GiB" */
/* By section and key, or by flag; dashes and underscores are the same. NULL: unknown. */
const struct param *param_find(const char *section, const char *key);
const struct param *param_by_flag(const char *flag);
/* The known word that is nearest to an unknown one; NULL: nothing like it. flags: compare with
 * those. */
const char *param_nearest(const char *word, bool flags);

/* Reads text into c's field. what: how to call the place in an error ("file:3", "--budget"). */
int param_set(struct config *c, const struct param *p, const char *text, uint64_t available,
              const char *what, struct err *e);
void param_format(const struct config *c, const struct param *p, char *ret, size_t size);
void param_free(struct config *c, const struct param *p);
bool param_equal(const struct config *a, const struct config *b, const struct param *p);
/* Copies from's value into to's field. */
int param_copy(struct config *to, const struct config *from, const struct param *p);
#endif
