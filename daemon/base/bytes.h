/* bytes.h: fixed little-endian bytes, written one value after another into a buffer that grows, and
 * read back with every length checked: the innards of the files in the state folder.
 *
 *     struct bytes_out o = {0};              struct bytes_in in = {.at = bytes, .n = n};
 *     bytes_put_u32(&o, 7);                  uint32_t seven = bytes_get_u32(&in);
 *     bytes_put_text(&o, "abc");             bytes_get_text(&in, name, sizeof name);
 *     if (o.failed) ... no memory            if (in.failed) ... it ended too early, or a text is too long
 *     free(o.at);
 *
 * A failure sticks: what follows does nothing and reads zeros, so one check at the end is enough. */
#ifndef BACKCAST_BYTES_H
#define BACKCAST_BYTES_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "values are copied as they stand");

struct bytes_out {
    uint8_t *at; /* malloced */
    size_t n, cap;
    bool failed;
};
void bytes_put(struct bytes_out *o, const void *from, size_t n);
void bytes_put_zeros(struct bytes_out *o, size_t n);
void bytes_put_text(struct bytes_out *o, const char *text); /* u32 length, then the characters */
static inline void bytes_put_u32(struct bytes_out *o, uint32_t v)
{
    bytes_put(o, &v, sizeof v);
}
static inline void bytes_put_u64(struct bytes_out *o, uint64_t v)
{
    bytes_put(o, &v, sizeof v);
}
static inline void bytes_put_f32(struct bytes_out *o, float v)
{
    bytes_put(o, &v, sizeof v);
}

struct bytes_in {
    const uint8_t *at;
    size_t n; /* left */
    bool failed;
};
/* The next n bytes where they stand; NULL: there are fewer. */
const void *bytes_take(struct bytes_in *in, size_t n);
void bytes_get(struct bytes_in *in, void *to, size_t n); /* zeros if there are fewer */
/* Into ret[size], NUL-terminated; longer ones and such that hold a NUL fail. */
void bytes_get_text(struct bytes_in *in, char *ret, size_t size);
static inline uint32_t bytes_get_u32(struct bytes_in *in)
{
    uint32_t v;
    bytes_get(in, &v, sizeof v);
    return v;
}
static inline uint64_t bytes_get_u64(struct bytes_in *in)
{
    uint64_t v;
    bytes_get(in, &v, sizeof v);
    return v;
}
static inline float bytes_get_f32(struct bytes_in *in)
{
    float v;
    bytes_get(in, &v, sizeof v);
    return v;
}
#endif
