/* tok_alphabet.c: byte-level BPE files spell every byte as a printable character: the printable
 * bytes of Latin-1 stand for themselves, the other 68 for U+0100 and up in byte order. Space is
 * U+0120.
 */
#include "tok_internal.h"
#include "utf8.h"
#include <string.h>

static bool stands_for_itself(unsigned b)
{
    return (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
}

/* Bytes below b that have a stand-in above U+00FF. */
static unsigned others_below(unsigned b)
{
    unsigned below = BC_MIN(b, 0x21u); /* 0x00..0x20 */
    if (b > 0x7f)
        below += BC_MIN(b, 0xa1u) - 0x7f; /* 0x7f..0xa0 */
    return below + (b > 0xad);            /* 0xad */
}

size_t alphabet_encode(const char *s, size_t n, char *ret)
{
    char *out = ret;
    for (size_t i = 0; i < n; i++) {
        unsigned b = (uint8_t)s[i], c = stands_for_itself(b) ? b : 256 + others_below(b);
        if (c < 0x80) {
            *out++ = (char)c;
        } else {
            *out++ = (char)(0xc0 | c >> 6);
            *out++ = (char)(0x80 | (c & 0x3f));
        }
    }
    return (size_t)(out - ret);
}

/* The byte that U+0100 + i stands for. */
static unsigned other_at(unsigned i)
{
    return i < 0x21 ? i : i < 0x43 ? 0x7f + (i - 0x21) : 0xad;
}

bool alphabet_decode(const char *s, size_t n, char *ret, size_t *ret_n)
{
    const uint8_t *p = (const uint8_t *)s;
    size_t out = 0;
    for (size_t i = 0; i < n;) {
        int len = utf8_step(p + i, n - i);
        if (len != 1 && len != 2)
            return false;
        unsigned c = len == 1 ? p[i] : (p[i] & 0x1fu) << 6 | (p[i + 1] & 0x3fu);
        if (c >= 256 + 68 || (c < 256 && !stands_for_itself(c)))
            return false;
        ret[out++] = (char)(c < 256 ? c : other_at(c - 256));
        i += (size_t)len;
    }
    *ret_n = out;
    return true;
}
