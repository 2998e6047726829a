/* paths.c: see paths.h. */
#include "paths.h"
#include "env.h"
#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SYSTEM_MODELS "/var/lib/backcast/models"
#define SUFFIX ".gguf"

void paths_socket(const struct config *c, char *ret, size_t size)
{
    char dir[CONFIG_PATH_MAX];
    if (c->daemon_socket[0] != '\0')
        snprintf(ret, size, "%s", c->daemon_socket);
    else if (env_dir(ENV_RUNTIME, dir, sizeof dir))
        snprintf(ret, size, "%s/backcast/backcast.sock", dir);
    else
        snprintf(ret, size, "/run/backcast/backcast.sock");
}

void paths_state(const struct config *c, char *ret, size_t size)
{
    char dir[CONFIG_PATH_MAX];
    if (strcmp(c->daemon_state_dir, "none") == 0)
        ret[0] = '\0';
    else if (c->daemon_state_dir[0] != '\0')
        snprintf(ret, size, "%s", c->daemon_state_dir);
    else if (env_dir(ENV_SERVICE_STATE, dir, sizeof dir))
        snprintf(ret, size, "%.*s", (int)strcspn(dir, ":"), dir);
    else if (env_dir(ENV_STATE, dir, sizeof dir))
        snprintf(ret, size, "%.*s/backcast", (int)size - 16, dir);
    else
        snprintf(ret, size, "/var/lib/backcast");
}

/* The i-th models folder; false past the end. */
static bool models_folder(unsigned i, char *ret, size_t size)
{
    char data[CONFIG_PATH_MAX];
    if (i == 0) {
        if (env_dir(ENV_DATA, data, sizeof data))
            snprintf(ret, size, "%.*s/backcast/models", (int)size - 32, data);
        else
            snprintf(ret, size, "%s", SYSTEM_MODELS);
        return true;
    }
    if (i == 1)
        snprintf(ret, size, "%s", SYSTEM_MODELS);
    return i == 1;
}

bool paths_model(const char *name, char *ret, size_t size)
{
    char dir[CONFIG_PATH_MAX];
    if (name[0] == '\0' || name[0] == '.' || strchr(name, '/') != NULL)
        return false;
    for (unsigned i = 0; models_folder(i, dir, sizeof dir); i++)
        if ((size_t)snprintf(ret, size, "%s/%s" SUFFIX, dir, name) < size && access(ret, R_OK) == 0)
            return true;
    return false;
}

/* "/a/NAME.gguf" -> "NAME" */
static void name_of(const char *path, char *ret, size_t size)
{
    const char *slash = strrchr(path, '/');
    const char *base = slash != NULL ? slash + 1 : path;
    size_t n = strlen(base), s = strlen(SUFFIX);
    if (n > s && strcmp(base + n - s, SUFFIX) == 0)
        n -= s;
    snprintf(ret, size, "%.*s", (int)BC_MIN(n, size - 1), base);
}

int paths_default_model(const struct config *c, char *ret_path, size_t size, char *ret_name,
                        size_t name_size, struct err *e)
{
    const char *asked = c->model_default[0] != '\0' ? c->model_default : PATHS_DEFAULT_MODEL;
    for (size_t i = 0; i < c->n_models; i++)
        if (strcmp(c->models[i].name, asked) == 0) {
            snprintf(ret_path, size, "%s", c->models[i].path);
            snprintf(ret_name, name_size, "%s", asked);
            return BC_OK;
        }
    size_t n = strlen(asked), s = strlen(SUFFIX);
    bool whole = strchr(asked, '/') != NULL, file = n > s && strcmp(asked + n - s, SUFFIX) == 0;
    char name[CONFIG_NAME_MAX];
    name_of(asked, name, sizeof name);
    if (whole || (file && access(asked, R_OK) == 0)) {
        if (access(asked, R_OK) < 0)
            return err_set(e, BC_ENOTFOUND, "model", "%s: %m", asked);
        snprintf(ret_path, size, "%s", asked);
    } else if (!paths_model(name, ret_path, size)) {
        char dir[CONFIG_PATH_MAX];
        models_folder(0, dir, sizeof dir);
        return err_set(e, BC_ENOTFOUND, "model",
                       "no model: %.60s.gguf is neither in %.120s nor in " SYSTEM_MODELS
                       ". `backcast pull` fetches %s; or name a file: --model FILE",
                       name, dir,
                       strcmp(name, PATHS_DEFAULT_MODEL) == 0 ? "it" : PATHS_DEFAULT_MODEL);
    }
    name_of(ret_path, ret_name, name_size);
    return BC_OK;
}

static void names_add(struct paths_names *n, const char *name)
{
    if (n->n == PATHS_NAMES_MAX || strlen(name) >= CONFIG_NAME_MAX || name[0] == '.')
        return;
    for (unsigned i = 0; i < n->n; i++)
        if (strcmp(n->names[i], name) == 0)
            return;
    snprintf(n->names[n->n++], CONFIG_NAME_MAX, "%s", name);
}

static void names_of_folder(struct paths_names *n, const char *dir)
{
    DIR *d = opendir(dir);
    struct dirent *ent;
    while (d != NULL && (ent = readdir(d)) != NULL) {
        char name[sizeof ent->d_name];
        name_of(ent->d_name, name, sizeof name);
        if (strlen(name) + strlen(SUFFIX) == strlen(ent->d_name))
            names_add(n, name);
    }
    if (d != NULL)
        closedir(d);
}

int paths_names(const struct config *c, struct paths_names *ret, struct err *e)
{
    char dir[CONFIG_PATH_MAX];
    struct paths_names n = {.names = calloc(PATHS_NAMES_MAX, CONFIG_NAME_MAX)};
    if (n.names == NULL)
        return err_nomem(e, (size_t)PATHS_NAMES_MAX * CONFIG_NAME_MAX);
    for (size_t i = 0; i < c->n_models; i++)
        names_add(&n, c->models[i].name);
    for (unsigned i = 0; models_folder(i, dir, sizeof dir); i++)
        names_of_folder(&n, dir);
    *ret = n;
    return BC_OK;
}

void paths_names_free(struct paths_names *n)
{
    free(n->names);
    *n = (struct paths_names){0};
}
