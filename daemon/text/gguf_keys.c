/* gguf_keys.c: look-ups in a parsed GGUF table, typed access to keys, and keys as text.
 *
 * Look-ups are a binary search over the sorted order of names. Values are read with memcpy: nothing
 * in the header is aligned.
 */
#include "gguf_internal.h"
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define PRINT_ELEMENTS 8u /* elements of an array that `inspect` shows */

static const struct {
    const char *name;
    size_t bytes;
} kinds[] = {
    [GGUF_U8] = {"u8", 1},       [GGUF_I8] = {"i8", 1},     [GGUF_U16] = {"u16", 2},
    [GGUF_I16] = {"i16", 2},     [GGUF_U32] = {"u32", 4},   [GGUF_I32] = {"i32", 4},
    [GGUF_F32] = {"f32", 4},     [GGUF_BOOL] = {"bool", 1}, [GGUF_STRING] = {"string", 0},
    [GGUF_ARRAY] = {"array", 0}, [GGUF_U64] = {"u64", 8},   [GGUF_I64] = {"i64", 8},
    [GGUF_F64] = {"f64", 8},
};

size_t gguf_kind_bytes(uint32_t kind)
{
    return kind < ARRAY_LEN(kinds) ? kinds[kind].bytes : 0;
}

const char *gguf_kind_name(uint32_t kind)
{
    return kind < ARRAY_LEN(kinds) ? kinds[kind].name : "?";
}

int gguf_str_cmp(struct gguf_str a, struct gguf_str b)
{
    if (a.len != b.len)
        return a.len < b.len ? -1 : 1;
    return memcmp(a.s, b.s, a.len);
}

const struct gguf_key *gguf_key_find(const struct gguf *g, const char *key)
{
    MAGIC_OK(g, GGUF_MAGIC);
    struct gguf_str want = {key, strlen(key)};
    size_t lo = 0, hi = g->n_keys;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        const struct gguf_key *k = &g->keys[g->key_order[mid]];
        int c = gguf_str_cmp(k->name, want);
        if (c == 0)
            return k;
        if (c < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return NULL;
}

const struct gguf_tensor *gguf_tensor_find(const struct gguf *g, const char *name)
{
    MAGIC_OK(g, GGUF_MAGIC);
    struct gguf_str want = {name, strlen(name)};
    size_t lo = 0, hi = g->n_tensors;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        const struct gguf_tensor *t = &g->tensors[g->tensor_order[mid]];
        int c = gguf_str_cmp(t->name, want);
        if (c == 0)
            return t;
        if (c < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return NULL;
}

const char *gguf_path(const struct gguf *g)
{
    MAGIC_OK(g, GGUF_MAGIC);
    return g->path != NULL ? g->path : "";
}

size_t gguf_file_bytes(const struct gguf *g)
{
    MAGIC_OK(g, GGUF_MAGIC);
    return g->len;
}

uint32_t gguf_version(const struct gguf *g)
{
    MAGIC_OK(g, GGUF_MAGIC);
    return g->version;
}

uint64_t gguf_identity(const struct gguf *g)
{
    MAGIC_OK(g, GGUF_MAGIC);
    return g->identity;
}

size_t gguf_n_tensors(const struct gguf *g)
{
    MAGIC_OK(g, GGUF_MAGIC);
    return g->n_tensors;
}

const struct gguf_tensor *gguf_tensor_at(const struct gguf *g, size_t i)
{
    MAGIC_OK(g, GGUF_MAGIC);
    bc_assert(i < g->n_tensors);
    return &g->tensors[i];
}

size_t gguf_n_keys(const struct gguf *g)
{
    MAGIC_OK(g, GGUF_MAGIC);
    return g->n_keys;
}

static const struct gguf_key *key_at(const struct gguf *g, size_t i)
{
    MAGIC_OK(g, GGUF_MAGIC);
    bc_assert(i < g->n_keys);
    return &g->keys[i];
}

struct gguf_str gguf_key_name(const struct gguf *g, size_t i)
{
    return key_at(g, i)->name;
}

enum gguf_kind gguf_key_kind(const struct gguf *g, size_t i)
{
    return key_at(g, i)->kind;
}

bool gguf_has(const struct gguf *g, const char *key)
{
    return gguf_key_find(g, key) != NULL;
}

/* One element of an integer or bool kind, widened; above_i64: a u64 that int64_t cannot hold. */
static bool int_load(enum gguf_kind kind, const uint8_t *p, int64_t *ret, bool *above_i64)
{
    union {
        uint8_t u8;
        int8_t i8;
        uint16_t u16;
        int16_t i16;
        uint32_t u32;
        int32_t i32;
        uint64_t u64;
        int64_t i64;
    } v = {0};
    memcpy(&v, p, gguf_kind_bytes(kind));
    *above_i64 = false;
    switch (kind) {
    case GGUF_U8:
    case GGUF_BOOL:
        *ret = v.u8;
        return true;
    case GGUF_I8:
        *ret = v.i8;
        return true;
    case GGUF_U16:
        *ret = v.u16;
        return true;
    case GGUF_I16:
        *ret = v.i16;
        return true;
    case GGUF_U32:
        *ret = v.u32;
        return true;
    case GGUF_I32:
        *ret = v.i32;
        return true;
    case GGUF_U64:
        *above_i64 = v.u64 > INT64_MAX;
        *ret = (int64_t)v.u64;
        return true;
    case GGUF_I64:
        *ret = v.i64;
        return true;
    default:
        return false;
    }
}

static double float_load(enum gguf_kind kind, const uint8_t *p)
{
    float f;
    double d;
    bc_assert(kind == GGUF_F32 || kind == GGUF_F64);
    if (kind == GGUF_F64) {
        memcpy(&d, p, sizeof d);
        return d;
    }
    memcpy(&f, p, sizeof f);
    return f;
}

static struct gguf_str str_load(const uint8_t *p)
{
    uint64_t n;
    memcpy(&n, p, sizeof n);
    return (struct gguf_str){(const char *)p + sizeof n, n};
}

struct gguf_str gguf_key_str(const struct gguf_key *k, size_t i)
{
    return str_load(k->value + k->starts[i]);
}

static int missing(const char *key, struct err *e)
{
    return err_set(e, BC_ENOTFOUND, key, "the file has no key %s", key);
}

static int wrong_kind(const struct gguf *g, const struct gguf_key *k, const char *key,
                      const char *want, struct err *e)
{
    return err_set(e, BC_ECORRUPT, key, "%s is of kind %s, not %s (byte offset %zu)", key,
                   gguf_kind_name(k->kind), want, (size_t)(k->value - g->data));
}

int gguf_get_u32(const struct gguf *g, const char *key, uint32_t *ret, struct err *e)
{
    const struct gguf_key *k = gguf_key_find(g, key);
    int64_t v;
    bool above;
    if (k == NULL)
        return missing(key, e);
    if (k->kind == GGUF_BOOL || k->kind == GGUF_STRING || k->kind == GGUF_ARRAY ||
        !int_load(k->kind, k->value, &v, &above))
        return wrong_kind(g, k, key, "an integer", e);
    if (above || v < 0 || v > UINT32_MAX)
        return err_set(e, BC_ECORRUPT, key, "%s is %s%" PRId64 ", outside 0..%u (byte offset %zu)",
                       key, above ? "above " : "", above ? INT64_MAX : v, UINT32_MAX,
                       (size_t)(k->value - g->data));
    *ret = (uint32_t)v;
    return BC_OK;
}

int gguf_get_f32(const struct gguf *g, const char *key, float *ret, struct err *e)
{
    const struct gguf_key *k = gguf_key_find(g, key);
    if (k == NULL)
        return missing(key, e);
    if (k->kind != GGUF_F32 && k->kind != GGUF_F64)
        return wrong_kind(g, k, key, "a float", e);
    double v = float_load(k->kind, k->value);
    if (!isfinite(v) || fabs(v) > (double)FLT_MAX)
        return err_set(e, BC_ECORRUPT, key, "%s is %g, not a finite 32-bit float (byte offset %zu)",
                       key, v, (size_t)(k->value - g->data));
    *ret = (float)v;
    return BC_OK;
}

int gguf_get_bool(const struct gguf *g, const char *key, bool *ret, struct err *e)
{
    const struct gguf_key *k = gguf_key_find(g, key);
    if (k == NULL)
        return missing(key, e);
    if (k->kind != GGUF_BOOL)
        return wrong_kind(g, k, key, "a bool", e);
    *ret = k->value[0] != 0;
    return BC_OK;
}

int gguf_get_str(const struct gguf *g, const char *key, struct gguf_str *ret, struct err *e)
{
    const struct gguf_key *k = gguf_key_find(g, key);
    if (k == NULL)
        return missing(key, e);
    if (k->kind != GGUF_STRING)
        return wrong_kind(g, k, key, "a string", e);
    *ret = str_load(k->value);
    return BC_OK;
}

int gguf_array(const struct gguf *g, const char *key, enum gguf_kind *ret_kind, size_t *ret_n,
               struct err *e)
{
    const struct gguf_key *k = gguf_key_find(g, key);
    if (k == NULL)
        return missing(key, e);
    if (k->kind != GGUF_ARRAY)
        return wrong_kind(g, k, key, "an array", e);
    *ret_kind = k->elem;
    *ret_n = k->n;
    return BC_OK;
}

/* The caller has asked gguf_array() for kind and count: a mismatch here is its bug, not the file's.
 */
static const uint8_t *element(const struct gguf *g, const char *key, size_t i,
                              const struct gguf_key **ret)
{
    const struct gguf_key *k = gguf_key_find(g, key);
    bc_assert(k != NULL && k->kind == GGUF_ARRAY && i < k->n);
    *ret = k;
    return k->elem == GGUF_STRING ? k->value + k->starts[i]
                                  : k->value + i * gguf_kind_bytes(k->elem);
}

struct gguf_str gguf_array_str(const struct gguf *g, const char *key, size_t i)
{
    const struct gguf_key *k;
    const uint8_t *p = element(g, key, i, &k);
    bc_assert(k->elem == GGUF_STRING);
    return str_load(p);
}

int64_t gguf_array_int(const struct gguf *g, const char *key, size_t i)
{
    const struct gguf_key *k;
    const uint8_t *p = element(g, key, i, &k);
    int64_t v;
    bool above;
    bc_assert(k->elem != GGUF_STRING && int_load(k->elem, p, &v, &above));
    return above ? INT64_MAX : v;
}

double gguf_array_float(const struct gguf *g, const char *key, size_t i)
{
    const struct gguf_key *k;
    const uint8_t *p = element(g, key, i, &k);
    return float_load(k->elem, p);
}

/* Text built in a caller's buffer: counts on past the end, like snprintf. */
struct out {
    char *buf;
    size_t cap, n;
};

static void out_add(struct out *o, const char *s, size_t n)
{
    if (o->n < o->cap)
        memcpy(o->buf + o->n, s, BC_MIN(n, o->cap - o->n));
    o->n += n;
}

static void out_text(struct out *o, const char *s)
{
    out_add(o, s, strlen(s));
}

/* A string in quotes; what a terminal should not see is escaped. */
static void out_quoted(struct out *o, struct gguf_str s)
{
    char esc[8];
    out_text(o, "\"");
    for (size_t i = 0; i < s.len; i++) {
        unsigned char c = (unsigned char)s.s[i];
        if (c == '\n')
            out_text(o, "\\n");
        else if (c == '"' || c == '\\') {
            snprintf(esc, sizeof esc, "\\%c", c);
            out_text(o, esc);
        } else if (c < 0x20 || c == 0x7f) {
            snprintf(esc, sizeof esc, "\\x%02x", c);
            out_text(o, esc);
        } else {
            out_add(o, &s.s[i], 1);
        }
    }
    out_text(o, "\"");
}

static void out_value(struct out *o, enum gguf_kind kind, const uint8_t *p)
{
    char num[40] = "";
    int64_t v = 0;
    bool above = false;
    if (kind == GGUF_STRING) {
        out_quoted(o, str_load(p));
        return;
    }
    if (kind == GGUF_BOOL)
        snprintf(num, sizeof num, "%s", p[0] != 0 ? "true" : "false");
    else if (kind == GGUF_F32 || kind == GGUF_F64)
        snprintf(num, sizeof num, "%.9g", float_load(kind, p));
    else if (int_load(kind, p, &v, &above) && above)
        snprintf(num, sizeof num, "%" PRIu64, (uint64_t)v);
    else
        snprintf(num, sizeof num, "%" PRId64, v);
    out_text(o, num);
}

int gguf_key_print(const struct gguf *g, size_t i, char *buf, size_t len)
{
    const struct gguf_key *k = key_at(g, i);
    struct out o = {buf, len > 0 ? len - 1 : 0, 0};
    char count[48];
    if (k->kind != GGUF_ARRAY) {
        out_value(&o, k->kind, k->value);
    } else {
        snprintf(count, sizeof count, "%zu x %s [", k->n, gguf_kind_name(k->elem));
        out_text(&o, count);
        for (size_t j = 0; j < BC_MIN(k->n, PRINT_ELEMENTS); j++) {
            size_t at = k->elem == GGUF_STRING ? k->starts[j] : j * gguf_kind_bytes(k->elem);
            out_text(&o, j > 0 ? ", " : "");
            out_value(&o, k->elem, k->value + at);
        }
        out_text(&o, k->n > PRINT_ELEMENTS ? ", ...]" : "]");
    }
    if (len > 0)
        buf[BC_MIN(o.n, o.cap)] = 0;
    return (int)BC_MIN(o.n, (size_t)INT32_MAX);
}
