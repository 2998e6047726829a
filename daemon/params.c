/* params.c: see params.h. */
#include "params.h"
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define SHARE_PERCENT_MAX 95.0 /* the daemon and its neighbours need some */
#define PART_PERCENT_MAX 100.0
#define BUDGET_TOKENS_MAX 16777216u

#define LIVE_YES true
#define LIVE_NO false
static const struct param params[] = {
#define SECTION(name, text)
#define PARAM(section, key, type, flag, def, min, max, live, text)                                 \
    {#section, #key, PARAM_##type, flag, def,                                                      \
     min,      max,  LIVE_##live,  text, offsetof(struct config, section##_##key)},
#include "params.tbl"
#undef PARAM
#undef SECTION
};
static const struct {
    const char *name, *text;
} sections[] = {
#define SECTION(name, text) {#name, text},
#define PARAM(section, key, type, flag, def, min, max, live, text)
#include "params.tbl"
#undef PARAM
#undef SECTION
};

const struct param *param_at(size_t i)
{
    return i < ARRAY_LEN(params) ? &params[i] : NULL;
}

const char *param_section_text(const char *section)
{
    for (size_t i = 0; i < ARRAY_LEN(sections); i++)
        if (strcmp(sections[i].name, section) == 0)
            return sections[i].text;
    return NULL;
}

const char *param_unit(enum param_type type)
{
    static const char *const units[] = {
        [PARAM_TEXT] = "text",
        [PARAM_COUNT] = "a whole number",
        [PARAM_SIZE] = "bytes, KiB, MiB, GiB",
        [PARAM_SHARE] = "bytes, KiB, MiB, GiB, or %",
        [PARAM_PART] = "bytes, KiB, MiB, GiB, or %",
        [PARAM_BUDGET] = "bytes, KiB, MiB, GiB, or tokens: t",
        [PARAM_AUTO] = "a whole number, or auto",
        [PARAM_EITHER] = "one of two whole numbers",
        [PARAM_REAL] = "a number",
        [PARAM_MODE] = "octal",
        [PARAM_TIME] = "a time: s, min, h, d",
    };
    return units[type];
}

/* ---- finding */

static bool same_word(const char *a, const char *b)
{
    for (; *a != '\0' && *b != '\0'; a++, b++)
        if (*a != *b && !((*a == '-' || *a == '_') && (*b == '-' || *b == '_')))
            return false;
    return *a == *b;
}

const struct param *param_find(const char *section, const char *key)
{
    for (size_t i = 0; i < ARRAY_LEN(params); i++)
        if (strcmp(params[i].section, section) == 0 && same_word(params[i].key, key))
            return &params[i];
    return NULL;
}

const struct param *param_by_flag(const char *flag)
{
    const char *dot = strchr(flag, '.');
    for (size_t i = 0; i < ARRAY_LEN(params); i++) {
        if (same_word(params[i].flag, flag))
            return &params[i];
        size_t n = strlen(params[i].section);
        if (dot != NULL && (size_t)(dot - flag) == n && strncmp(params[i].section, flag, n) == 0 &&
            same_word(params[i].key, dot + 1))
            return &params[i];
    }
    return NULL;
}

/* Edits (insert, delete, replace) from a to b; words longer than the row count as far away. */
static unsigned distance(const char *a, const char *b)
{
    enum { WORD_MAX = 48 };
    unsigned row[WORD_MAX + 1];
    size_t n = strlen(b);
    if (n > WORD_MAX || strlen(a) > WORD_MAX)
        return WORD_MAX;
    for (unsigned k = 0; k <= n; k++)
        row[k] = k;
    for (unsigned i = 1; a[i - 1] != '\0'; i++) {
        unsigned diagonal = row[0];
        row[0] = i;
        for (unsigned k = 1; k <= n; k++) {
            unsigned replace = diagonal + (a[i - 1] != b[k - 1]);
            diagonal = row[k];
            row[k] = BC_MIN(replace, BC_MIN(row[k], row[k - 1]) + 1);
        }
    }
    return row[n];
}

const char *param_nearest(const char *word, bool flags)
{
    const char *best = NULL;
    unsigned least = (unsigned)strlen(word) / 2 + 1;
    for (size_t i = 0; i < ARRAY_LEN(params); i++) {
        const char *known = flags ? params[i].flag : params[i].key;
        unsigned d = distance(word, known);
        if (d < least) {
            least = d;
            best = known;
        }
    }
    return best;
}

/* ---- reading values */

static void *field_of(const struct config *c, const struct param *p)
{
    return (char *)(uintptr_t)c + p->offset;
}

static double percent_max(enum param_type type)
{
    return type == PARAM_SHARE ? SHARE_PERCENT_MAX : PART_PERCENT_MAX;
}

static int bad(const struct param *p, const char *what, const char *text, struct err *e)
{
    char range[128] = "";
    if (p->type == PARAM_TEXT)
        snprintf(range, sizeof range, " of %.0f to %.0f bytes", p->min, p->max);
    else if (p->type == PARAM_MODE)
        snprintf(range, sizeof range, ", 0 to %o", (unsigned)p->max);
    else if (p->type == PARAM_EITHER)
        snprintf(range, sizeof range, ": %.17g or %.17g", p->min, p->max);
    else
        snprintf(range, sizeof range, ", %.17g to %.17g", p->min, p->max);
    size_t n = strlen(range);
    if (p->type == PARAM_SHARE || p->type == PARAM_PART)
        snprintf(range + n, sizeof range - n, ", or more than 0 and up to %g%%",
                 percent_max(p->type));
    else if (p->type == PARAM_BUDGET)
        snprintf(range + n, sizeof range - n, ", or 1t to %ut", BUDGET_TOKENS_MAX);
    return err_set(e, BC_EINVALID, p->key, "%s: %s = \"%.80s\" is not %s%s", what, p->key, text,
                   param_unit(p->type), range);
}

/* Digits, perhaps a fraction, then a unit out of the list; no sign, nothing behind it. */
static bool size_parse(const char *text, double *ret, const char **ret_unit)
{
    static const struct {
        const char *name;
        double bytes;
    } units[] = {{"", 1},
                 {"B", 1},
                 {"KiB", 1024.0},
                 {"K", 1024.0},
                 {"MiB", 1048576},
                 {"M", 1048576},
                 {"GiB", 1073741824.0},
                 {"G", 1073741824.0},
                 {"TiB", 1099511627776.0},
                 {"%", 1},
                 {"t", 1}};
    char *end;
    if (!isdigit((unsigned char)text[0]))
        return false;
    errno = 0;
    double v = strtod(text, &end);
    if (errno != 0 || !isfinite(v) || memchr(text, 'x', (size_t)(end - text)) != NULL)
        return false;
    while (*end == ' ')
        end++;
    for (size_t i = 0; i < ARRAY_LEN(units); i++)
        if (strcmp(units[i].name, end) == 0) {
            *ret = v * units[i].bytes;
            *ret_unit = units[i].name;
            return true;
        }
    return false;
}

static bool in_range(const struct param *p, double v)
{
    return v >= p->min && v <= p->max;
}

static bool whole_parse(const char *text, int base, uint64_t *ret)
{
    char *end;
    if (!isdigit((unsigned char)text[0]))
        return false;
    errno = 0;
    unsigned long long v = strtoull(text, &end, base);
    if (errno != 0 || *end != '\0')
        return false;
    *ret = v;
    return true;
}

static int text_set(char **field, const char *text, struct err *e)
{
    char *copy = strdup(text);
    if (copy == NULL)
        return err_nomem(e, strlen(text));
    free(*field);
    *field = copy;
    return BC_OK;
}

static bool sized_set(void *field, const struct param *p, const char *text, uint64_t available)
{
    double v;
    const char *unit;
    if (!size_parse(text, &v, &unit))
        return false;
    bool percent = strcmp(unit, "%") == 0, tokens = strcmp(unit, "t") == 0;
    if (percent && (p->type == PARAM_SHARE || p->type == PARAM_PART) &&
        (v <= 0 || v > percent_max(p->type)))
        return false;
    if (p->type == PARAM_SHARE && percent) {
        *(config_SHARE *)field =
            (config_SHARE){BC_MAX((uint64_t)((double)available * v / 100), (uint64_t)p->min), v};
        return true;
    }
    if (p->type == PARAM_PART && percent) {
        *(config_PART *)field = (config_PART){0, v};
        return true;
    }
    if (p->type == PARAM_BUDGET && tokens) {
        if (v != floor(v) || v < 1 || v > BUDGET_TOKENS_MAX)
            return false;
        *(config_BUDGET *)field = (config_BUDGET){0, (uint32_t)v};
        return true;
    }
    if (percent || tokens || v != floor(v) || !in_range(p, v))
        return false;
    if (p->type == PARAM_SHARE || p->type == PARAM_PART)
        *(config_SHARE *)field = (config_SHARE){(uint64_t)v, 0};
    else if (p->type == PARAM_BUDGET)
        *(config_BUDGET *)field = (config_BUDGET){(uint64_t)v, 0};
    else
        *(config_SIZE *)field = (uint64_t)v;
    return true;
}

static const struct {
    const char *name;
    uint64_t seconds;
} times[] = {{"d", 86400}, {"h", 3600}, {"min", 60}, {"s", 1}, {"", 1}};

static bool time_parse(const char *text, uint64_t *ret)
{
    char *end;
    if (!isdigit((unsigned char)text[0]))
        return false;
    errno = 0;
    unsigned long long v = strtoull(text, &end, 10);
    if (errno != 0 || v > UINT32_MAX)
        return false;
    while (*end == ' ')
        end++;
    for (size_t i = 0; i < ARRAY_LEN(times); i++)
        if (strcmp(times[i].name, end) == 0) {
            *ret = v * times[i].seconds;
            return true;
        }
    return false;
}

static void time_format(uint64_t v, char *ret, size_t size)
{
    size_t i = 0;
    while (v > 0 && v % times[i].seconds != 0)
        i++;
    snprintf(ret, size, "%llu%s", (unsigned long long)(v / times[i].seconds),
             v > 0 ? times[i].name : "");
}

int param_set(struct config *c, const struct param *p, const char *text, uint64_t available,
              const char *what, struct err *e)
{
    void *field = field_of(c, p);
    uint64_t n = 0;
    bool ok = false;
    switch (p->type) {
    case PARAM_TEXT:
        ok = in_range(p, (double)strlen(text));
        return ok ? text_set(field, text, e) : bad(p, what, text, e);
    case PARAM_SIZE:
    case PARAM_SHARE:
    case PARAM_PART:
    case PARAM_BUDGET:
        ok = sized_set(field, p, text, available);
        break;
    case PARAM_AUTO:
        ok = strcmp(text, "auto") == 0 || (whole_parse(text, 10, &n) && in_range(p, (double)n));
        if (ok)
            *(config_AUTO *)field = strcmp(text, "auto") == 0 ? CONFIG_AUTO : n;
        break;
    case PARAM_EITHER:
        ok = whole_parse(text, 10, &n) && ((double)n == p->min || (double)n == p->max);
        if (ok)
            *(config_EITHER *)field = n;
        break;
    case PARAM_COUNT:
    case PARAM_MODE:
        ok = whole_parse(text, p->type == PARAM_MODE ? 8 : 10, &n) && in_range(p, (double)n);
        if (ok)
            *(config_COUNT *)field = n;
        break;
    case PARAM_TIME:
        ok = time_parse(text, &n) && in_range(p, (double)n);
        if (ok)
            *(config_TIME *)field = n;
        break;
    case PARAM_REAL: {
        char *end;
        double v = strtod(text, &end);
        ok = end != text && *end == '\0' && isfinite(v) && in_range(p, v);
        if (ok)
            *(config_REAL *)field = v;
        break;
    }
    }
    return ok ? BC_OK : bad(p, what, text, e);
}

/* ---- writing, comparing */

static void size_format(uint64_t v, char *ret, size_t size)
{
    static const char *const units[] = {"", "KiB", "MiB", "GiB"};
    unsigned i = 0;
    while (i < 3 && v >= 1024 && v % 1024 == 0) {
        v /= 1024;
        i++;
    }
    snprintf(ret, size, "%llu%s", (unsigned long long)v, units[i]);
}

void param_format(const struct config *c, const struct param *p, char *ret, size_t size)
{
    const void *field = field_of(c, p);
    const config_SHARE *share = field;
    const config_BUDGET *budget = field;
    uint64_t n = *(const uint64_t *)field;
    switch (p->type) {
    case PARAM_TEXT:
        snprintf(ret, size, "%s", *(char *const *)field);
        break;
    case PARAM_SIZE:
        size_format(n, ret, size);
        break;
    case PARAM_SHARE:
    case PARAM_PART:
        if (share->percent > 0)
            snprintf(ret, size, "%g%%", share->percent);
        else
            size_format(share->bytes, ret, size);
        break;
    case PARAM_BUDGET:
        if (budget->tokens > 0)
            snprintf(ret, size, "%ut", budget->tokens);
        else
            size_format(budget->bytes, ret, size);
        break;
    case PARAM_AUTO:
        if (n == CONFIG_AUTO)
            snprintf(ret, size, "auto");
        else
            snprintf(ret, size, "%llu", (unsigned long long)n);
        break;
    case PARAM_COUNT:
    case PARAM_EITHER:
        snprintf(ret, size, "%llu", (unsigned long long)n);
        break;
    case PARAM_TIME:
        time_format(n, ret, size);
        break;
    case PARAM_MODE:
        snprintf(ret, size, "%04o", (unsigned)n);
        break;
    case PARAM_REAL:
        snprintf(ret, size, "%g", *(const double *)field);
        break;
    }
}

void param_free(struct config *c, const struct param *p)
{
    if (p->type == PARAM_TEXT) {
        char **field = field_of(c, p);
        free(*field);
        *field = NULL;
    }
}

bool param_equal(const struct config *a, const struct config *b, const struct param *p)
{
    char ta[PARAM_VALUE_MAX], tb[PARAM_VALUE_MAX];
    param_format(a, p, ta, sizeof ta);
    param_format(b, p, tb, sizeof tb);
    return strcmp(ta, tb) == 0;
}

int param_copy(struct config *to, const struct config *from, const struct param *p)
{
    static const size_t sizes[] = {
        [PARAM_COUNT] = sizeof(config_COUNT),   [PARAM_SIZE] = sizeof(config_SIZE),
        [PARAM_SHARE] = sizeof(config_SHARE),   [PARAM_PART] = sizeof(config_PART),
        [PARAM_BUDGET] = sizeof(config_BUDGET), [PARAM_AUTO] = sizeof(config_AUTO),
        [PARAM_EITHER] = sizeof(config_EITHER), [PARAM_REAL] = sizeof(config_REAL),
        [PARAM_MODE] = sizeof(config_MODE),     [PARAM_TIME] = sizeof(config_TIME),
    };
    if (p->type == PARAM_TEXT)
        return text_set(field_of(to, p), *(char *const *)field_of(from, p), NULL);
    memcpy(field_of(to, p), field_of(from, p), sizes[p->type]);
    return BC_OK;
}
