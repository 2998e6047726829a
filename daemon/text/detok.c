/* detok.c: ids to text as they come, whole characters at a time.
 *
 *   wait | piece      what is a valid character goes out; bytes that can be no character go out as
 *                     they are; the start of a character whose rest may still come (at most
 *                     3 bytes) waits
 */
#include "tok_internal.h"
#include "utf8.h"
#include <string.h>

void detok_start(struct detok *d, const struct tok *t, bool at_stream_start)
{
    MAGIC_OK(t, TOK_MAGIC);
    memset(d, 0, sizeof *d);
    d->strip_space = at_stream_start && t->spm && t->space_prefix;
}

/* Bytes of p that can go out now. */
static size_t showable(const uint8_t *p, size_t n)
{
    size_t i = 0;
    while (i < n) {
        int len = utf8_step(p + i, n - i);
        if (len == 0)
            break;
        i += len < 0 ? 1 : (size_t)len;
    }
    return i;
}

size_t detok_push(struct detok *d, const struct tok *t, int32_t id, bool special, char *buf,
                  size_t cap)
{
    struct gguf_str s = tok_piece(t, id);
    bc_assert(cap >= sizeof d->wait + t->piece_max && d->n_wait <= 3);
    size_t n = d->n_wait;
    if (tok_is_special(t, id)) {
        n = detok_flush(d, buf, cap); /* no character continues behind it */
        if (special) {
            memcpy(buf + n, s.s, s.len);
            n += s.len;
        }
        return n;
    }
    if (d->strip_space && s.len > 0) {
        d->strip_space = false;
        if (s.s[0] == ' ') {
            s.s++;
            s.len--;
        }
    }
    memcpy(buf, d->wait, n);
    memcpy(buf + n, s.s, s.len);
    n += s.len;
    size_t out = showable((const uint8_t *)buf, n);
    d->n_wait = (uint8_t)(n - out);
    memcpy(d->wait, buf + out, d->n_wait);
    return out;
}

size_t detok_flush(struct detok *d, char *buf, size_t cap)
{
    size_t n = d->n_wait;
    bc_assert(cap >= n);
    memcpy(buf, d->wait, n);
    d->n_wait = 0;
    return n;
}
