/* log.c: see log.h. At most 16 topic rules; the first that matches wins; the bare level comes last.
 */
#include "log.h"
#include "base.h"
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#define LOG_RULES_MAX 16

struct log_table {
    enum log_level level;
    unsigned n_rules;
    struct {
        char glob[48];
        enum log_level level;
    } rules[LOG_RULES_MAX];
    bool journal;                   /* stderr is systemd's: prefix with <priority> */
    const struct log_table *before; /* never freed: somebody may be reading it */
};
static const struct log_table log_first = {.level = LOG_INFO};
static const struct log_table *_Atomic log_table = &log_first;

static const char *const level_names[] = {"error", "warn", "info", "debug", "trace"};
static const int level_priority[] = {3, 4, 6, 7, 7};

static int level_parse(const char *s, size_t len)
{
    for (int i = 0; i < (int)ARRAY_LEN(level_names); i++)
        if (strlen(level_names[i]) == len && strncasecmp(level_names[i], s, len) == 0)
            return i;
    return -1;
}

/* One "level" or "glob:level" of a specification. */
static int rule_add(struct log_table *t, const char *p, size_t len, struct err *e)
{
    const char *colon = memchr(p, ':', len);
    const char *name = colon != NULL ? colon + 1 : p;
    int level = level_parse(name, (size_t)(p + len - name));
    if (level < 0)
        return err_set(e, BC_EINVALID, "log", "'%.*s' is not error, warn, info, debug or trace",
                       (int)(p + len - name), name);
    if (colon == NULL) {
        t->level = (enum log_level)level;
        return BC_OK;
    }
    size_t n = (size_t)(colon - p);
    if (t->n_rules == LOG_RULES_MAX || n >= sizeof t->rules[0].glob)
        return err_set(e, BC_EINVALID, "log", "more than %d topic rules, or one too long",
                       LOG_RULES_MAX);
    memcpy(t->rules[t->n_rules].glob, p, n);
    t->rules[t->n_rules].glob[n] = '\0';
    t->rules[t->n_rules++].level = (enum log_level)level;
    return BC_OK;
}

static int spec_parse(const char *spec, struct log_table *ret, struct err *e)
{
    bc_assert(spec != NULL);
    *ret = log_first;
    for (const char *p = spec; *p != '\0';) {
        size_t len = strcspn(p, ",");
        int rc = rule_add(ret, p, len, e);
        if (rc < 0)
            return rc;
        p += len + (p[len] == ',');
    }
    return BC_OK;
}

int log_check(const char *spec, struct err *e)
{
    struct log_table t;
    return spec_parse(spec, &t, e);
}

int log_setup(const char *spec, struct err *e)
{
    struct log_table t, *now;
    int rc = spec_parse(spec, &t, e);
    if (rc < 0)
        return rc;
    if ((now = malloc(sizeof *now)) == NULL)
        return err_nomem(e, sizeof *now);
    t.journal = getenv("JOURNAL_STREAM") != NULL;
    t.before = log_table;
    *now = t;
    log_table = now;
    return BC_OK;
}

bool log_on(const char *topic, enum log_level level)
{
    const struct log_table *t = log_table;
    for (unsigned i = 0; i < t->n_rules; i++)
        if (fnmatch(t->rules[i].glob, topic, 0) == 0)
            return level <= t->rules[i].level;
    return level <= t->level;
}

void log_line(const char *topic, enum log_level level, const char *fmt, ...)
{
    if (!log_on(topic, level))
        return;
    char line[1024];
    int n = log_table->journal ? snprintf(line, sizeof line, "<%d>", level_priority[level]) : 0;
    n += snprintf(line + n, sizeof line - (size_t)n, "%s: %s: ", level_names[level], topic);
    va_list ap;
    va_start(ap, fmt);
    int m = vsnprintf(line + n, sizeof line - (size_t)n - 1, fmt, ap);
    va_end(ap);
    size_t len = BC_MIN((size_t)(n + (m > 0 ? m : 0)), sizeof line - 2);
    for (size_t i = (size_t)n; i < len; i++) /* names of files and clients hold what they like */
        if ((unsigned char)line[i] < 0x20 || line[i] == 0x7f)
            line[i] = '?';
    line[len++] = '\n';
    if (write(STDERR_FILENO, line, len) < 0)
        return; /* nowhere left to say it */
}
