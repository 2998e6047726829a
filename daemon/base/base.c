/* base.c: error texts from proto/errors.tbl, error sentences, and the one way to die. */
#include "base.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    int code;
    const char *name, *text;
} errors[] = {
#define ERR(name, number, text) {-(number), #name, text},
#include "errors.tbl"
#undef ERR
};

const char *err_name(int code)
{
    for (size_t i = 0; i < ARRAY_LEN(errors); i++)
        if (errors[i].code == code)
            return errors[i].name;
    return code == 0 ? "OK" : "INTERNAL";
}

const char *err_brief(int code)
{
    for (size_t i = 0; i < ARRAY_LEN(errors); i++)
        if (errors[i].code == code)
            return errors[i].text;
    return code == 0 ? "no error" : "internal error";
}

static int err_fill(struct err *e, int code, const char *field, const char *fmt, va_list ap)
{
    bc_assert(code < 0);
    if (e == NULL)
        return code;
    char text[sizeof e->text]; /* a caller may pass e->text as an argument */
    vsnprintf(text, sizeof text, fmt, ap);
    char name[sizeof e->field];
    snprintf(name, sizeof name, "%s", field != NULL ? field : "");
    memset(e, 0, sizeof *e);
    e->code = code;
    memcpy(e->field, name, sizeof name);
    memcpy(e->text, text, sizeof text);
    return code;
}

int err_set(struct err *e, int code, const char *field, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    err_fill(e, code, field, fmt, ap);
    va_end(ap);
    return code;
}

int err_amount(struct err *e, int code, const char *field, uint64_t needed, uint64_t available,
               const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    err_fill(e, code, field, fmt, ap);
    va_end(ap);
    if (e != NULL) {
        e->needed = needed;
        e->available = available;
    }
    return code;
}

int err_nomem(struct err *e, size_t bytes)
{
    return err_set(e, BC_ENOMEM, "", "out of memory: %zu bytes could not be allocated", bytes);
}

void err_of_file(struct err *e, const char *path)
{
    char text[sizeof e->text];
    size_t len = strlen(path), used = strlen(e->text) + sizeof "...: ";
    if (strstr(e->text, path) != NULL || used + 16 > sizeof text)
        return;
    size_t room = sizeof text - used;
    snprintf(text, sizeof text, "%s%s: %s", len > room ? "..." : "",
             len > room ? path + len - room : path, e->text);
    memcpy(e->text, text, strlen(text) + 1);
}

_Noreturn void bc_panic(const char *file, int line, const char *what)
{
    fprintf(stderr, "backcast: %s:%d: assertion failed: %s\n", file, line, what);
    fflush(stderr);
    abort();
}
