/* gguf_bytes.h: GGUF files with changed bytes, for tests of what a file may get wrong: keys and
 * tensors are renamed, numbers overwritten, keys put in. The result is still a file that the reader
 * accepts. */
#ifndef BACKCAST_GGUF_BYTES_H
#define BACKCAST_GGUF_BYTES_H
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "gguf.h"

struct bytes {
    uint8_t *b;
    size_t n;
};

static inline struct bytes file_read(const char *name)
{
    struct bytes f;
    char path[512];

    snprintf(path, sizeof path, TEST_VECTORS "/%s", name);
    FILE *in = fopen(path, "rb");
    assert_non_null(in);
    fseek(in, 0, SEEK_END);
    f.n = (size_t)ftell(in);
    rewind(in);
    f.b = malloc(f.n);
    assert_int_equal(fread(f.b, 1, f.n, in), f.n);
    fclose(in);
    return f;
}

/* Where `text` stands as a GGUF string (its length before it). */
static inline uint8_t *find_string(struct bytes *f, const char *text)
{
    uint64_t len = strlen(text);
    uint8_t pattern[128];

    memcpy(pattern, &len, 8);
    memcpy(pattern + 8, text, len);
    uint8_t *at = memmem(f->b, f->n, pattern, len + 8);
    assert_non_null(at);
    return at + 8;
}

/* Another name of the same length. */
static inline void rename_to(struct bytes *f, const char *from, const char *to)
{
    assert_int_equal(strlen(from), strlen(to));
    memcpy(find_string(f, from), to, strlen(to));
}

/* The four bytes of a key's u32 or f32 value: after the name comes the kind (u32). */
static inline void set_u32(struct bytes *f, const char *key, uint32_t v)
{
    memcpy(find_string(f, key) + strlen(key) + 4, &v, 4);
}

static inline void set_f32(struct bytes *f, const char *key, float v)
{
    memcpy(find_string(f, key) + strlen(key) + 4, &v, 4);
}

/* A tensor's first dimension: name | u32 n_dims | u64 dims[] */
static inline void set_dim(struct bytes *f, const char *tensor, unsigned dim, uint64_t v)
{
    memcpy(find_string(f, tensor) + strlen(tensor) + 4 + 8 * dim, &v, 8);
}

/* One key as it stands in a file. */
static inline size_t key_put(uint8_t *to, const char *name, enum gguf_kind kind, const void *value,
                             size_t len)
{
    uint64_t n = strlen(name);
    uint32_t k = kind;

    memcpy(to, &n, 8);
    memcpy(to + 8, name, n);
    memcpy(to + 8 + n, &k, 4);
    memcpy(to + 12 + n, value, len);
    return 12 + n + len;
}

/* A new first key; a second one fills up to a multiple of the alignment, so that the data stays
 * where the tensor table says. */
static inline void add_key(struct bytes *f, const char *name, enum gguf_kind kind,
                           const void *value, size_t len)
{
    uint8_t more[512] = {0}, pad[64] = {0};
    static unsigned n_pads;
    char pad_name[16];
    uint64_t n_keys, n_pad;

    size_t n = key_put(more, name, kind, value, len);
    snprintf(pad_name, sizeof pad_name, "pad.%03u", n_pads++ % 1000);
    n_pad = (32 - (n + 12 + 7 + 8) % 32) % 32;
    memcpy(pad, &n_pad, 8);
    n += key_put(more + n, pad_name, GGUF_STRING, pad, 8 + n_pad);
    f->b = realloc(f->b, f->n + n);
    memmove(f->b + 24 + n, f->b + 24, f->n - 24);
    memcpy(f->b + 24, more, n);
    f->n += n;
    memcpy(&n_keys, f->b + 16, 8);
    n_keys += 2;
    memcpy(f->b + 16, &n_keys, 8);
}

static inline void add_u32(struct bytes *f, const char *name, uint32_t v)
{
    add_key(f, name, GGUF_U32, &v, 4);
}

static inline void add_f32(struct bytes *f, const char *name, float v)
{
    add_key(f, name, GGUF_F32, &v, 4);
}

static inline void add_str(struct bytes *f, const char *name, const char *text)
{
    uint8_t v[128];
    uint64_t n = strlen(text);

    memcpy(v, &n, 8);
    memcpy(v + 8, text, n);
    add_key(f, name, GGUF_STRING, v, 8 + n);
}
#endif
