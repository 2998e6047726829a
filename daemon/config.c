/* config.c: see config.h.
 *
 *   params.tbl defaults --> file (libinih) --> command line --> struct config
 *
 * libinih has quirks that must not reach a user: it cuts lines at 199 bytes and section names at
 * 49, and joins indented lines to the key above. The reader below sees every line first and
 * refuses the long ones; a joined line shows as a key set twice, and that is refused as well. */
#include "config.h"
#include "env.h"
#include "params.h"
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <ini.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SECTION_BYTES_MAX 49

/* ---- [model.NAME] */

static struct config_model *model_section(struct config *c, const char *name, const char *what,
                                          struct err *e)
{
    for (size_t i = 0; i < c->n_models; i++)
        if (strcmp(c->models[i].name, name) == 0)
            return &c->models[i];
    if (name[0] == '\0' || strlen(name) >= CONFIG_NAME_MAX || strchr(name, '/') != NULL) {
        err_set(e, BC_EINVALID, "model",
                "%s: \"%.80s\" is no name for a model: 1 to %d bytes, no /", what, name,
                CONFIG_NAME_MAX - 1);
        return NULL;
    }
    if (c->n_models == CONFIG_MODELS_MAX) {
        err_set(e, BC_EINVALID, "model", "%s: more than %d [model.NAME] sections", what,
                CONFIG_MODELS_MAX);
        return NULL;
    }
    struct config_model *m = &c->models[c->n_models++];
    *m = (struct config_model){0};
    snprintf(m->name, sizeof m->name, "%s", name);
    return m;
}

static int model_set(struct config *c, const char *name, const char *key, const char *value,
                     const char *what, struct err *e)
{
    bool path = strcmp(key, "path") == 0, chat = strcmp(key, "chat_template") == 0;
    if (!path && !chat)
        return err_set(e, BC_EINVALID, key,
                       "%s: unknown key %.60s in [model.%.60s]: path or chat_template", what, key,
                       name);
    struct config_model *m = model_section(c, name, what, e);
    if (m == NULL)
        return BC_EINVALID;
    if (path ? m->path != NULL : m->chat_template[0] != '\0')
        return err_set(e, BC_EINVALID, key, "%s: [model.%s] %s is set twice", what, name, key);
    if (value[0] == '\0' || (chat && strlen(value) >= sizeof m->chat_template))
        return err_set(e, BC_EINVALID, key, "%s: [model.%s] %s is empty or too long", what, name,
                       key);
    if (chat)
        snprintf(m->chat_template, sizeof m->chat_template, "%s", value);
    else if ((m->path = strdup(value)) == NULL)
        return err_nomem(e, strlen(value));
    return BC_OK;
}

static int models_check(const struct config *c, struct err *e)
{
    for (size_t i = 0; i < c->n_models; i++)
        if (c->models[i].path == NULL)
            return err_set(e, BC_EINVALID, "path", "[model.%s] has no path", c->models[i].name);
    return BC_OK;
}

/* ---- file */

/* A folder or a pipe is no configuration, and must not be waited for; a device may be: /dev/null. */
static int file_open(const char *name, FILE **ret, struct err *e)
{
    struct stat st;
    int fd = open(name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return err_set(e, errno == ENOENT ? BC_ENOTFOUND : BC_EIO, "config", "%s: %s", name,
                       strerror(errno));
    int rc = BC_OK;
    if (fstat(fd, &st) < 0 || (!S_ISREG(st.st_mode) && !S_ISCHR(st.st_mode)))
        rc = err_set(e, BC_EIO, "config", "%s: not a regular file", name);
    else if ((*ret = fdopen(fd, "r")) == NULL)
        rc = err_nomem(e, BUFSIZ);
    if (rc < 0)
        close(fd);
    return rc;
}

struct file_state {
    struct config *c;
    FILE *file;
    const char *name;
    unsigned line;
    uint64_t available;
    bool seen[CONFIG_PARAMS];
    int rc;
    struct err *e;
};

static void place(const struct file_state *f, char *ret, size_t size)
{
    snprintf(ret, size, "%.200s:%u", f->name, f->line);
}

/* As fgets, which does not tell a zero byte from the line's end: 0 at the end of the file. */
static size_t get_line(char *line, int size, FILE *file)
{
    size_t n = 0;
    for (int c = 0; n + 1 < (size_t)size && c != '\n' && (c = getc(file)) != EOF;)
        line[n++] = (char)c;
    line[n] = '\0';
    return n;
}

static char *read_line(char *line, int size, void *arg)
{
    struct file_state *f = arg;
    char what[240];
    size_t n = f->rc < 0 ? 0 : get_line(line, size, f->file);
    if (n == 0)
        return NULL;
    f->line++;
    place(f, what, sizeof what);
    if (strlen(line) < n)
        f->rc = err_set(f->e, BC_EINVALID, "", "%s: a zero byte: this is no text", what);
    else if (n + 1 == (size_t)size && line[n - 1] != '\n')
        f->rc =
            err_set(f->e, BC_EINVALID, "", "%s: the line is longer than %d bytes", what, size - 2);
    const char *p = line + strspn(line, " \t");
    const char *end = *p == '[' ? strchr(p, ']') : NULL;
    if (*p == '[' && end == NULL && f->rc == BC_OK)
        f->rc = err_set(f->e, BC_EINVALID, "", "%s: neither [section] nor key = value", what);
    if (end != NULL && end - p - 1 > SECTION_BYTES_MAX)
        f->rc = err_set(f->e, BC_EINVALID, "", "%s: the section's name is longer than %d bytes",
                        what, SECTION_BYTES_MAX);
    return f->rc < 0 ? NULL : line;
}

static int unknown_key(const struct file_state *f, const char *section, const char *key)
{
    char what[240];
    place(f, what, sizeof what);
    if (section[0] == '\0')
        return err_set(f->e, BC_EINVALID, key, "%s: key %.60s stands before any [section]", what,
                       key);
    if (param_section_text(section) == NULL)
        return err_set(f->e, BC_EINVALID, key,
                       "%s: unknown section [%.60s]: daemon, memory, session, model, limits or "
                       "model.NAME",
                       what, section);
    const char *near = param_nearest(key, false);
    return err_set(f->e, BC_EINVALID, key, "%s: unknown key %.60s in [%.60s]%s%s%s", what, key,
                   section, near != NULL ? ": is " : "", near != NULL ? near : "",
                   near != NULL ? " meant?" : "");
}

static int on_key(void *arg, const char *section, const char *key, const char *value)
{
    struct file_state *f = arg;
    char what[240];
    if (f->rc < 0)
        return 0;
    place(f, what, sizeof what);
    if (strncmp(section, "model.", 6) == 0) {
        f->rc = model_set(f->c, section + 6, key, value, what, f->e);
        return f->rc == BC_OK;
    }
    const struct param *p = param_find(section, key);
    if (p == NULL) {
        f->rc = unknown_key(f, section, key);
    } else if (f->seen[p - param_at(0)]) {
        f->rc = err_set(f->e, BC_EINVALID, key, "%s: [%s] %s is set twice", what, section, key);
    } else {
        f->seen[p - param_at(0)] = true;
        f->c->places[p - param_at(0)] = f->line;
        f->rc = param_set(f->c, p, value, f->available, what, f->e);
    }
    return f->rc == BC_OK;
}

static int file_read(struct config *c, const char *name, uint64_t available, struct err *e)
{
    struct file_state f = {.c = c, .name = name, .available = available, .e = e};
    int rc = file_open(name, &f.file, e);
    if (rc < 0)
        return rc;
    int line = ini_parse_stream(read_line, &f, on_key, &f);
    bool broken = ferror(f.file) != 0;
    fclose(f.file);
    if (f.rc < 0)
        return f.rc;
    if (broken)
        return err_set(e, BC_EIO, "config", "%s: %s", name, strerror(EIO));
    if (line != 0)
        return err_set(e, BC_EINVALID, "config", "%s:%d: neither [section] nor key = value", name,
                       line);
    if ((c->file = strdup(name)) == NULL)
        return err_nomem(e, strlen(name));
    return BC_OK;
}

/* $XDG_CONFIG_HOME/backcast/backcast.conf, then /etc; the first that is there. */
static int usual_file_read(struct config *c, uint64_t available, struct err *e)
{
    char path[CONFIG_PATH_MAX], dir[CONFIG_PATH_MAX - 32];
    struct err ignored;
    if (env_dir(ENV_CONFIG, dir, sizeof dir)) {
        snprintf(path, sizeof path, "%s/backcast/backcast.conf", dir);
        int rc = file_read(c, path, available, e);
        if (rc != BC_ENOTFOUND)
            return rc;
    }
    int rc = file_read(c, "/etc/backcast/backcast.conf", available, &ignored);
    if (rc < 0 && rc != BC_ENOTFOUND && e != NULL)
        *e = ignored;
    return rc == BC_ENOTFOUND ? BC_OK : rc;
}

/* ---- command line */

struct args {
    int argc, at;
    char **argv;
};

/* The value of an option at args.at: behind its '=', or the next word. NULL: none is left. */
static const char *arg_value(struct args *a, const char *inline_value)
{
    if (inline_value != NULL)
        return inline_value;
    return a->at + 1 < a->argc ? a->argv[++a->at] : NULL;
}

/* Splits "--name=value". */
static const char *arg_name(const char *arg, char *ret, size_t size)
{
    const char *eq = strchr(arg, '=');
    size_t n = eq != NULL ? (size_t)(eq - arg) : strlen(arg);
    snprintf(ret, size, "%.*s", (int)BC_MIN(n, size - 1), arg);
    return eq != NULL ? eq + 1 : NULL;
}

/* --config, --no-config and the rest that is no parameter. 1: it was one of them. */
static int special_option(struct args *a, const char *name, const char *value,
                          struct config_command *cmd, struct err *e)
{
    static const struct {
        const char *name;
        enum config_action action;
    } actions[] = {{"print-config", CONFIG_PRINT},
                   {"help", CONFIG_HELP},
                   {"version", CONFIG_VERSION}};
    for (size_t i = 0; i < ARRAY_LEN(actions); i++)
        if (strcmp(name, actions[i].name) == 0) {
            cmd->action = actions[i].action;
            return 1;
        }
    if (strcmp(name, "no-config") == 0) {
        cmd->file = "";
        return 1;
    }
    bool config = strcmp(name, "config") == 0, parent = strcmp(name, "parent-fd") == 0;
    if (!config && !parent)
        return 0;
    if ((value = arg_value(a, value)) == NULL || value[0] == '\0')
        return err_set(e, BC_EINVALID, name, "--%s needs a value", name);
    if (config) {
        cmd->file = value;
        return 1;
    }
    char *end;
    long fd = strtol(value, &end, 10);
    if (*end != '\0' || fd < 3 || fd > 65535)
        return err_set(e, BC_EINVALID, name, "--parent-fd %s is no open descriptor above 2", value);
    cmd->parent_fd = (int)fd;
    return 1;
}

static int unknown_option(const char *name, struct err *e)
{
    const char *near = param_nearest(name, true);
    return err_set(e, BC_EINVALID, name, "unknown option --%s%s%s%s; --help lists them", name,
                   near != NULL ? ": is --" : "", near != NULL ? near : "",
                   near != NULL ? " meant?" : "");
}

/* --model.NAME.path, --model.NAME.chat_template. 1: it was one. */
static int model_option(struct config *c, struct args *a, const char *name, const char *value,
                        struct err *e)
{
    const char *dot = strrchr(name, '.');
    char model[CONFIG_NAME_MAX + 8], what[256];
    if (strncmp(name, "model.", 6) != 0 || dot == name + 5)
        return 0;
    snprintf(model, sizeof model, "%.*s", (int)BC_MIN((size_t)(dot - name - 6), sizeof model - 1),
             name + 6);
    if ((value = arg_value(a, value)) == NULL)
        return err_set(e, BC_EINVALID, name, "--%s needs a value", name);
    snprintf(what, sizeof what, "--%.200s", name);
    int rc = model_set(c, model, dot + 1, value, what, e);
    return rc < 0 ? rc : 1;
}

/* pass 0 looks for the options that come before the file, pass 1 applies the others. */
static int args_read(struct config *c, struct args a, int pass, uint64_t available,
                     struct config_command *cmd, struct err *e)
{
    for (a.at = 1; a.at < a.argc; a.at++) {
        char name[160], what[180];
        const char *arg = a.argv[a.at];
        if (strcmp(arg, "-h") == 0)
            arg = "--help";
        if (strncmp(arg, "--", 2) != 0)
            return err_set(e, BC_EINVALID, "", "\"%.80s\" is no option; --help lists them", arg);
        const char *value = arg_name(arg + 2, name, sizeof name);
        int rc = special_option(&a, name, value, cmd, e);
        if (rc < 0)
            return rc;
        if (rc == 1)
            continue;
        const struct param *p = param_by_flag(name);
        if (p == NULL) {
            if (pass == 0 ? strncmp(name, "model.", 6) != 0
                          : (rc = model_option(c, &a, name, value, e)) == 0)
                return unknown_option(name, e);
            if (pass == 0 && value == NULL)
                a.at++;
            if (rc < 0)
                return rc;
            continue;
        }
        if ((value = arg_value(&a, value)) == NULL)
            return err_set(e, BC_EINVALID, name, "--%s needs a value", name);
        snprintf(what, sizeof what, "--%s", name);
        if (pass == 1 && (rc = param_set(c, p, value, available, what, e)) < 0)
            return rc;
        if (pass == 1)
            c->places[p - param_at(0)] = CONFIG_OPTION;
    }
    return BC_OK;
}

/* ---- the whole */

int config_read(struct config *ret, int argc, char **argv, uint64_t available,
                struct config_command *ret_command, struct err *e)
{
    struct config c = {0};
    struct config_command cmd = {.parent_fd = -1};
    int rc = BC_OK;
    const struct param *p;
    for (size_t i = 0; rc == BC_OK && (p = param_at(i)) != NULL; i++)
        rc = param_set(&c, p, p->def, available, "default", e);
    if (rc == BC_OK)
        rc = args_read(&c, (struct args){.argc = argc, .argv = argv}, 0, available, &cmd, e);
    if (rc == BC_OK && cmd.action != CONFIG_HELP && cmd.action != CONFIG_VERSION) {
        if (cmd.file == NULL)
            rc = usual_file_read(&c, available, e);
        else if (cmd.file[0] != '\0')
            rc = file_read(&c, cmd.file, available, e);
    }
    if (rc == BC_OK)
        rc = args_read(&c, (struct args){.argc = argc, .argv = argv}, 1, available, &cmd, e);
    if (rc == BC_OK)
        rc = models_check(&c, e);
    if (rc < 0) {
        config_free(&c);
        return rc;
    }
    *ret = c;
    *ret_command = cmd;
    return BC_OK;
}

void config_free(struct config *c)
{
    const struct param *p;
    for (size_t i = 0; (p = param_at(i)) != NULL; i++)
        param_free(c, p);
    for (size_t i = 0; i < c->n_models; i++)
        free(c->models[i].path);
    free(c->file);
    *c = (struct config){0};
}

bool config_place(const struct config *c, const char *section, const char *key, char *ret,
                  size_t size)
{
    const struct param *p = param_find(section, key);
    bc_assert(p != NULL);
    uint32_t at = c->places[p - param_at(0)];
    if (at == CONFIG_OPTION)
        snprintf(ret, size, "--%s", p->flag);
    else if (at != CONFIG_DEFAULT)
        snprintf(ret, size, "%.200s:%u", c->file, at);
    return at != CONFIG_DEFAULT;
}

void config_print(const struct config *c, FILE *to)
{
    const struct param *p;
    const char *section = "";
    char value[PARAM_VALUE_MAX];
    fprintf(
        to,
        "# backcast.conf: configuration of backcastd. Every key is shown, with its default.\n"
        "# Read from $XDG_CONFIG_HOME/backcast/backcast.conf, or /etc/backcast/backcast.conf.\n");
    for (size_t i = 0; (p = param_at(i)) != NULL; i++) {
        if (strcmp(section, p->section) != 0)
            fprintf(to, "\n# %s\n[%s]\n", param_section_text(p->section), p->section);
        section = p->section;
        param_format(c, p, value, sizeof value);
        fprintf(to, "# %s\n# (--%s; %s; default %s%s)\n%s = %s\n", p->text, p->flag,
                param_unit(p->type), p->def[0] != '\0' ? p->def : "empty",
                p->live ? "; SIGHUP applies it" : "; needs a restart", p->key, value);
    }
    for (size_t i = 0; i < c->n_models; i++) {
        fprintf(to, "\n[model.%s]\npath = %s\n", c->models[i].name, c->models[i].path);
        if (c->models[i].chat_template[0] != '\0')
            fprintf(to, "chat_template = %s\n", c->models[i].chat_template);
    }
}

void config_help(FILE *to)
{
    const struct param *p;
    const char *section = "";
    fprintf(to, "usage: backcastd [options]\n\n"
                "  --config FILE       read this file instead of the usual one\n"
                "  --no-config         read none\n"
                "  --print-config      print the whole configuration, with comments, and exit\n"
                "  --parent-fd N       end when the other end of this pipe or socket is closed\n"
                "  --help, --version\n\n"
                "Every key of the configuration file has an option; --SECTION.KEY works, too.\n");
    for (size_t i = 0; (p = param_at(i)) != NULL; i++) {
        if (strcmp(section, p->section) != 0)
            fprintf(to, "\n[%s] %s\n", p->section, param_section_text(p->section));
        section = p->section;
        fprintf(to, "  --%s VALUE   (key %s; %s; default %s)\n      %s\n", p->flag, p->key,
                param_unit(p->type), p->def[0] != '\0' ? p->def : "empty", p->text);
    }
}

static bool models_equal(const struct config *a, const struct config *b)
{
    if (a->n_models != b->n_models)
        return false;
    for (size_t i = 0; i < a->n_models; i++)
        if (strcmp(a->models[i].name, b->models[i].name) != 0 ||
            strcmp(a->models[i].path, b->models[i].path) != 0 ||
            strcmp(a->models[i].chat_template, b->models[i].chat_template) != 0)
            return false;
    return true;
}

size_t config_compare(const struct config *before, struct config *now, struct config_change *ret,
                      size_t max)
{
    size_t n = 0;
    const struct param *p;
    for (size_t i = 0; (p = param_at(i)) != NULL; i++) {
        if (param_equal(before, now, p))
            continue;
        if (!p->live && param_copy(now, before, p) < 0)
            continue;
        if (n < max)
            ret[n++] = (struct config_change){p->section, p->key, p->live};
    }
    if (!models_equal(before, now) && n < max)
        ret[n++] = (struct config_change){"model.NAME", "path or chat_template", false};
    return n;
}
