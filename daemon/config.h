/* config.h: what the daemon was told: a config file, then the command line over it, checked against
 * params.tbl. Owner: whoever read it; immutable afterwards. */
#ifndef BACKCAST_CONFIG_H
#define BACKCAST_CONFIG_H
#include "base.h"
#include <stdio.h>

#define CONFIG_MODELS_MAX 32
#define CONFIG_NAME_MAX 64
#define CONFIG_PATH_MAX 4096
#define CONFIG_AUTO UINT64_MAX

typedef char *config_TEXT;
typedef uint64_t config_COUNT, config_SIZE, config_AUTO, config_EITHER, config_MODE, config_TIME;
typedef double config_REAL;
typedef struct {
    uint64_t bytes;
    double percent; /* 0: bytes were given */
} config_SHARE;
typedef config_SHARE config_PART; /* a percentage of another parameter: bytes 0 */
typedef struct {
    uint64_t bytes; /* 0: tokens were given */
    uint32_t tokens;
} config_BUDGET;

enum {
    CONFIG_PARAMS = 0 /* of params.tbl */
#define SECTION(name, text)
#define PARAM(section, key, type, flag, def, min, max, live, text) +1
#include "params.tbl"
#undef PARAM
#undef SECTION
};

struct config_model { /* [model.NAME] */
    char name[CONFIG_NAME_MAX], chat_template[32];
    char *path;
};

struct config {
#define SECTION(name, text)
#define PARAM(section, key, type, flag, def, min, max, live, text) config_##type section##_##key;
#include "params.tbl"
#undef PARAM
#undef SECTION
    struct config_model models[CONFIG_MODELS_MAX];
    size_t n_models;
    char *file; /* that was read; NULL: none */
    /* Where each parameter of params.tbl got its value: a line of `file`, or one of the two below. */
    uint32_t places[CONFIG_PARAMS];
};
#define CONFIG_DEFAULT 0
#define CONFIG_OPTION UINT32_MAX /* the command line */

/* Everything on the command line that is no parameter. */
enum config_action { CONFIG_RUN, CONFIG_PRINT, CONFIG_HELP, CONFIG_VERSION };
struct config_command {
    enum config_action action;
    const char *file; /* --config; NULL: the usual places; "": --no-config */
    int parent_fd;    /* --parent-fd; -1: none */
};

/* Defaults, file, command line, in this order. BC_EINVALID names file and line, or the flag, and
 * the nearest known key. available: bytes of memory that a share is taken of. */
int config_read(struct config *ret, int argc, char **argv, uint64_t available,
                struct config_command *ret_command, struct err *e);
void config_free(struct config *c);
/* "FILE:LINE" or "--FLAG", where this value was given; false: it is the default. */
bool config_place(const struct config *c, const char *section, const char *key, char *ret,
                  size_t size);
void config_print(const struct config *c, FILE *to); /* a whole commented file that reads back */
void config_help(FILE *to);
struct config_change {
    const char *section, *key;
    bool live; /* else it needs a restart */
};
/* Where `now` differs from `before`, max changes at most; all [model.NAME] sections are one. What is not live is set back to `before`'s
 * value, but for these sections. */
size_t config_compare(const struct config *before, struct config *now, struct config_change *ret,
                      size_t max);
#endif
