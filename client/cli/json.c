/* json.c: see json.h. */
#include <math.h>
#include <string.h>
#include "json.h"

struct json json_start(FILE *f)
{
    return (struct json){.f = f};
}

size_t utf8_length(const char *s, size_t len)
{
    const unsigned char *u = (const unsigned char *)s;
    size_t n;
    uint32_t v, least;

    if (len == 0)
        return 0;
    if (u[0] < 0x80)
        return 1;
    if (u[0] >= 0xc2 && u[0] < 0xe0)
        n = 2, v = u[0] & 0x1f, least = 0x80;
    else if (u[0] >= 0xe0 && u[0] < 0xf0)
        n = 3, v = u[0] & 0x0f, least = 0x800;
    else if (u[0] >= 0xf0 && u[0] < 0xf5)
        n = 4, v = u[0] & 0x07, least = 0x10000;
    else
        return 0;
    if (len < n)
        return 0;
    for (size_t i = 1; i < n; i++) {
        if ((u[i] & 0xc0) != 0x80)
            return 0;
        v = v << 6 | (u[i] & 0x3f);
    }
    return v < least || v > 0x10ffff || (v >= 0xd800 && v < 0xe000) ? 0 : n;
}

static void write_string(FILE *f, const char *s, size_t len)
{
    fputc('"', f);
    for (size_t i = 0; i < len;) {
        unsigned char b = (unsigned char)s[i];
        size_t n = utf8_length(s + i, len - i);
        if (n == 0)
            fputs("\\ufffd", f);
        else if (b == '"' || b == '\\')
            fprintf(f, "\\%c", b);
        else if (b == '\n')
            fputs("\\n", f);
        else if (b < 0x20 || b == 0x7f)
            fprintf(f, "\\u%04x", b);
        else
            fwrite(s + i, 1, n, f);
        i += n == 0 ? 1 : n;
    }
    fputc('"', f);
}

static void before_value(struct json *j, const char *key)
{
    if (j->comma)
        fputc(',', j->f);
    j->comma = true;
    if (key != NULL) {
        write_string(j->f, key, strlen(key));
        fputc(':', j->f);
    }
}

void json_open(struct json *j, const char *key, char bracket)
{
    before_value(j, key);
    fputc(bracket, j->f);
    j->depth++;
    j->comma = false;
}

void json_shut(struct json *j, char bracket)
{
    fputc(bracket, j->f);
    j->comma = true;
    if (--j->depth == 0) {
        fputc('\n', j->f);
        fflush(j->f);
        j->comma = false;
    }
}

void json_bytes(struct json *j, const char *key, const char *s, size_t len)
{
    before_value(j, key);
    write_string(j->f, s, len);
}

void json_text(struct json *j, const char *key, const char *s)
{
    before_value(j, key);
    if (s == NULL)
        fputs("null", j->f);
    else
        write_string(j->f, s, strlen(s));
}

void json_uint(struct json *j, const char *key, uint64_t v)
{
    before_value(j, key);
    fprintf(j->f, "%llu", (unsigned long long)v);
}

void json_int(struct json *j, const char *key, int64_t v)
{
    before_value(j, key);
    fprintf(j->f, "%lld", (long long)v);
}

void json_num(struct json *j, const char *key, double v)
{
    before_value(j, key);
    if (isfinite(v))
        fprintf(j->f, "%.9g", v);
    else
        fputs("null", j->f);
}

void json_bool(struct json *j, const char *key, bool v)
{
    before_value(j, key);
    fputs(v ? "true" : "false", j->f);
}
