/* utf8.h: one step through bytes that may or may not be UTF-8 (RFC 3629: no overlong forms, no
 * surrogates, nothing above U+10FFFF). */
#ifndef BACKCAST_UTF8_H
#define BACKCAST_UTF8_H
#include <stddef.h>
#include <stdint.h>

/* n > 0. Length of the valid character at p (1..4); 0: the bytes end inside what could still become
 * one; -1: p[0] cannot start a character here, whatever follows. */
static inline int utf8_step(const uint8_t *p, size_t n)
{
    uint8_t lo = 0x80, hi = 0xbf;
    int len;
    if (p[0] < 0x80)
        return 1;
    if (p[0] < 0xc2 || p[0] > 0xf4)
        return -1;
    len = p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : 4;
    if (p[0] == 0xe0)
        lo = 0xa0;
    else if (p[0] == 0xed)
        hi = 0x9f;
    else if (p[0] == 0xf0)
        lo = 0x90;
    else if (p[0] == 0xf4)
        hi = 0x8f;
    for (int i = 1; i < len; i++) {
        if ((size_t)i == n)
            return 0;
        if (p[i] < lo || p[i] > hi)
            return -1;
        lo = 0x80;
        hi = 0xbf;
    }
    return len;
}

/* Length of the longest valid prefix of p. */
static inline size_t utf8_valid(const uint8_t *p, size_t n)
{
    size_t i = 0;
    while (i < n) {
        int len = utf8_step(p + i, n - i);
        if (len <= 0)
            break;
        i += (size_t)len;
    }
    return i;
}
#endif
