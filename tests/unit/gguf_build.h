/* gguf_build.h: builds small GGUF files in memory, right ones and wrong ones. */
#ifndef GGUF_BUILD_H
#define GGUF_BUILD_H
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "gguf.h"

struct file {
    uint8_t b[1 << 16];
    size_t n;
    uint64_t n_keys; /* counted by key_*(); head_done() writes it */
};

static inline void put(struct file *f, const void *p, size_t n)
{
    assert_true(f->n + n <= sizeof f->b);
    memcpy(f->b + f->n, p, n);
    f->n += n;
}

static inline void put32(struct file *f, uint32_t v)
{
    put(f, &v, sizeof v);
}
static inline void put64(struct file *f, uint64_t v)
{
    put(f, &v, sizeof v);
}

static inline void put_strn(struct file *f, const char *s, size_t n)
{
    put64(f, n);
    put(f, s, n);
}

static inline void put_str(struct file *f, const char *s)
{
    put_strn(f, s, strlen(s));
}

static inline void head(struct file *f, uint32_t version, uint64_t n_tensors, uint64_t n_keys)
{
    f->n = 0;
    f->n_keys = 0;
    put(f, "GGUF", 4);
    put32(f, version);
    put64(f, n_tensors);
    put64(f, n_keys);
}

/* After the last key_*(): no tensors follow. */
static inline void head_done(struct file *f)
{
    memcpy(f->b + 16, &f->n_keys, sizeof f->n_keys);
}

static inline void key32(struct file *f, const char *name, uint32_t kind, uint32_t v)
{
    put_str(f, name);
    put32(f, kind);
    put32(f, v);
    f->n_keys++;
}

static inline void key_bool(struct file *f, const char *name, bool v)
{
    uint8_t b = v;
    put_str(f, name);
    put32(f, GGUF_BOOL);
    put(f, &b, 1);
    f->n_keys++;
}

static inline void key_str(struct file *f, const char *name, const char *v)
{
    put_str(f, name);
    put32(f, GGUF_STRING);
    put_str(f, v);
    f->n_keys++;
}

/* The head of an array; its elements follow by put*(). */
static inline void key_array(struct file *f, const char *name, uint32_t kind, uint64_t n)
{
    put_str(f, name);
    put32(f, GGUF_ARRAY);
    put32(f, kind);
    put64(f, n);
    f->n_keys++;
}

/* The whole of a file, malloced. */
static inline uint8_t *slurp(const char *path, size_t *ret_n)
{
    FILE *in = fopen(path, "rb");
    if (in == NULL)
        fail_msg("cannot open %s", path);
    assert_int_equal(fseek(in, 0, SEEK_END), 0);
    long n = ftell(in);
    assert_true(n > 0);
    rewind(in);
    uint8_t *b = malloc((size_t)n + 1);
    assert_non_null(b);
    assert_int_equal(fread(b, 1, (size_t)n, in), n);
    fclose(in);
    b[n] = 0;
    *ret_n = (size_t)n;
    return b;
}

/* A generator whose every step is the same on every machine. */
static inline uint32_t rnd(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}
#endif
