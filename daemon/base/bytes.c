/* bytes.c: see bytes.h. */
#include "bytes.h"
#include <stdlib.h>
#include <string.h>

static bool room(struct bytes_out *o, size_t n)
{
    size_t need, cap = o->cap > 0 ? o->cap : 256;
    if (o->failed || __builtin_add_overflow(o->n, n, &need)) {
        o->failed = true;
        return false;
    }
    while (cap < need && cap <= SIZE_MAX / 2)
        cap *= 2;
    if (cap != o->cap) {
        uint8_t *more = cap >= need ? realloc(o->at, cap) : NULL;
        if (more == NULL) {
            o->failed = true;
            return false;
        }
        o->at = more;
        o->cap = cap;
    }
    return true;
}

void bytes_put(struct bytes_out *o, const void *from, size_t n)
{
    if (n == 0 || !room(o, n))
        return;
    memcpy(o->at + o->n, from, n);
    o->n += n;
}

void bytes_put_zeros(struct bytes_out *o, size_t n)
{
    if (n == 0 || !room(o, n))
        return;
    memset(o->at + o->n, 0, n);
    o->n += n;
}

void bytes_put_text(struct bytes_out *o, const char *text)
{
    size_t n = strlen(text);
    bytes_put_u32(o, (uint32_t)n);
    bytes_put(o, text, n);
}

const void *bytes_take(struct bytes_in *in, size_t n)
{
    if (in->failed || n > in->n) {
        in->failed = true;
        return NULL;
    }
    const void *at = in->at;
    in->at += n;
    in->n -= n;
    return at;
}

void bytes_get(struct bytes_in *in, void *to, size_t n)
{
    const void *from = bytes_take(in, n);
    if (from != NULL)
        memcpy(to, from, n);
    else
        memset(to, 0, n);
}

void bytes_get_text(struct bytes_in *in, char *ret, size_t size)
{
    uint32_t n = bytes_get_u32(in);
    const char *from = bytes_take(in, n);
    if (from == NULL || n >= size || memchr(from, '\0', n) != NULL) {
        in->failed = true;
        n = 0;
    }
    memcpy(ret, n > 0 ? from : "", n);
    ret[n] = '\0';
}
