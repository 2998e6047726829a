/* paths.h: where sockets and models lie. */
#ifndef BACKCAST_PATHS_H
#define BACKCAST_PATHS_H
#include "config.h"

#define PATHS_DEFAULT_MODEL "SmolLM2-135M-Instruct.Q4_1" /* what `backcast pull` fetches */
#define PATHS_NAMES_MAX 256

/* The configured socket, or the usual place. */
void paths_socket(const struct config *c, char *ret, size_t size);
/* The configured folder of state, or the usual place; "": nothing is kept on disk. */
void paths_state(const struct config *c, char *ret, size_t size);
/* A model's name, as files in the models folders: NAME -> FOLDER/NAME.gguf. Folders: that of the
 * user's data, then /var/lib/backcast/models. False: no such file. */
bool paths_model(const char *name, char *ret, size_t size);
/* The default model: path and name. BC_ENOTFOUND says how to get one. */
int paths_default_model(const struct config *c, char *ret_path, size_t size, char *ret_name,
                        size_t name_size, struct err *e);
/* Names that a client may use: configured ones, then files of the folders. */
struct paths_names {
    char (*names)[CONFIG_NAME_MAX];
    unsigned n;
};
int paths_names(const struct config *c, struct paths_names *ret, struct err *e);
void paths_names_free(struct paths_names *n);
#endif
