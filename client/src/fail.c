/* fail.c: the sentence of the last failure, and the texts of the codes. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "lib.h"

static _Thread_local struct failure thread_failure;

struct failure *fail_of_thread(void)
{
    return &thread_failure;
}

int fail(struct failure *f, int code, const char *field, const char *fmt, ...)
{
    va_list ap;

    f->code = code;
    f->needed = f->available = 0;
    snprintf(f->field, sizeof(f->field), "%s", field);
    va_start(ap, fmt);
    vsnprintf(f->text, sizeof(f->text), fmt, ap);
    va_end(ap);
    return code;
}

void fail_clear(backcast *c)
{
    c->fail.code = 0;
    c->fail.field[0] = c->fail.text[0] = '\0';
    c->fail.needed = c->fail.available = 0;
}

const char *backcast_strerror(int err)
{
    switch (err) {
    case 0:
        return "no error";
#define ERR(name, number, text)                                                                    \
    case BACKCAST_E##name:                                                                         \
        return text;
#include "errors.tbl"
#undef ERR
    default:
        return "unknown error";
    }
}

#define ERR(name, number, text) _Static_assert(BACKCAST_E##name == -(number), "errors.tbl");
#include "errors.tbl"
#undef ERR

const char *backcast_last_error(const backcast *c)
{
    return c != NULL ? c->fail.text : thread_failure.text;
}

const char *backcast_last_error_field(const backcast *c)
{
    return c != NULL ? c->fail.field : thread_failure.field;
}

void backcast_last_error_amounts(const backcast *c, uint64_t *needed, uint64_t *available)
{
    const struct failure *f = c != NULL ? &c->fail : &thread_failure;
    if (needed != NULL)
        *needed = f->needed;
    if (available != NULL)
        *available = f->available;
}
