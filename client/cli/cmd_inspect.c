/* cmd_inspect.c: inspect FILE: a GGUF's keys and tensors, as the loader sees them. No daemon, and no
 * weights are read. */
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include "cli.h"
#include "gguf.h"
#include "json.h"
#include "models.h"

static const char *kind_name(enum gguf_kind k)
{
    static const char *const names[] = {
        [GGUF_U8] = "u8",         [GGUF_I8] = "i8",       [GGUF_U16] = "u16", [GGUF_I16] = "i16",
        [GGUF_U32] = "u32",       [GGUF_I32] = "i32",     [GGUF_F32] = "f32", [GGUF_BOOL] = "bool",
        [GGUF_STRING] = "string", [GGUF_ARRAY] = "array", [GGUF_U64] = "u64", [GGUF_I64] = "i64",
        [GGUF_F64] = "f64"};
    return (unsigned)k < ARRAY_LEN(names) && names[k] != NULL ? names[k] : "?";
}

static const char *type_name(enum kn_type type)
{
    const struct kn_type_info *info = kn_type_find(type);
    return info != NULL ? info->name : "?";
}

static void keys_print(const struct gguf *g)
{
    for (size_t i = 0; i < gguf_n_keys(g); i++) {
        struct gguf_str name = gguf_key_name(g, i);
        char value[160];
        int n = gguf_key_print(g, i, value, sizeof(value));
        for (char *p = value; *p != '\0'; p++)
            if ((unsigned char)*p < 0x20 || *p == 0x7f)
                *p = ' ';
        printf("%-44.*s %-7s %s%s\n", (int)name.len, name.s, kind_name(gguf_key_kind(g, i)), value,
               n >= (int)sizeof(value) ? "..." : "");
    }
}

static void tensors_print(const struct gguf *g)
{
    char size[24];

    for (size_t i = 0; i < gguf_n_tensors(g); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(g, i);
        char shape[96];
        int at = 0;
        for (uint32_t d = 0; d < t->n_dims; d++)
            at += snprintf(shape + at, sizeof(shape) - (size_t)at, "%s%llu", d > 0 ? " x " : "",
                           (unsigned long long)t->dims[d]);
        printf("%-44.*s %-7s %-20s %s\n", (int)t->name.len, t->name.s, type_name(t->type), shape,
               bytes_text(t->bytes, size));
    }
}

/* Strings, numbers and truths as JSON has them; of an array what the table shows, as a text. */
static void value_json(struct json *j, const struct gguf *g, size_t i)
{
    struct gguf_str name = gguf_key_name(g, i), s;
    char key[256], value[4096];
    enum gguf_kind kind = gguf_key_kind(g, i);
    bool b;

    snprintf(key, sizeof(key), "%.*s", (int)BC_MIN(name.len, sizeof(key) - 1), name.s);
    gguf_key_print(g, i, value, sizeof(value));
    if (kind == GGUF_STRING && gguf_get_str(g, key, &s, NULL) == BC_OK)
        json_bytes(j, "value", s.s, s.len);
    else if (kind == GGUF_BOOL && gguf_get_bool(g, key, &b, NULL) == BC_OK)
        json_bool(j, "value", b);
    else if (kind == GGUF_F32 || kind == GGUF_F64)
        json_num(j, "value", strtod(value, NULL));
    else if (kind == GGUF_U8 || kind == GGUF_U16 || kind == GGUF_U32 || kind == GGUF_U64)
        json_uint(j, "value", strtoull(value, NULL, 10));
    else if (kind == GGUF_I8 || kind == GGUF_I16 || kind == GGUF_I32 || kind == GGUF_I64)
        json_int(j, "value", strtoll(value, NULL, 10));
    else
        json_text(j, "value", value);
}

static void json_print(const struct args *a, const struct gguf *g, const char *path)
{
    struct json j = json_start(stdout);

    json_open(&j, NULL, '{');
    json_text(&j, "path", path);
    json_uint(&j, "version", gguf_version(g));
    json_uint(&j, "bytes", gguf_file_bytes(g));
    if (!a->tensors) {
        json_open(&j, "keys", '[');
        for (size_t i = 0; i < gguf_n_keys(g); i++) {
            struct gguf_str name = gguf_key_name(g, i);
            json_open(&j, NULL, '{');
            json_bytes(&j, "key", name.s, name.len);
            json_text(&j, "type", kind_name(gguf_key_kind(g, i)));
            value_json(&j, g, i);
            json_shut(&j, '}');
        }
        json_shut(&j, ']');
    }
    if (!a->keys) {
        json_open(&j, "tensors", '[');
        for (size_t i = 0; i < gguf_n_tensors(g); i++) {
            const struct gguf_tensor *t = gguf_tensor_at(g, i);
            json_open(&j, NULL, '{');
            json_bytes(&j, "name", t->name.s, t->name.len);
            json_text(&j, "type", type_name(t->type));
            json_open(&j, "shape", '[');
            for (uint32_t d = 0; d < t->n_dims; d++)
                json_uint(&j, NULL, t->dims[d]);
            json_shut(&j, ']');
            json_uint(&j, "bytes", t->bytes);
            json_shut(&j, '}');
        }
        json_shut(&j, ']');
    }
    json_shut(&j, '}');
}

int cmd_inspect(struct args *a)
{
    char path[PATH_MAX], size[24];
    struct gguf *g = NULL;
    struct err e = {0};

    if (model_find(a->rest[0], path, sizeof(path), &e) < 0 || model_file_open(&g, path, &e) < 0) {
        say_err(&e, "inspect");
        return CLI_FAILED;
    }
    if (a->json) {
        json_print(a, g, path);
    } else {
        printf("%s: GGUF version %u, %zu keys, %zu tensors, %s\n", path, gguf_version(g),
               gguf_n_keys(g), gguf_n_tensors(g), bytes_text(gguf_file_bytes(g), size));
        if (!a->tensors)
            keys_print(g);
        if (!a->keys)
            tensors_print(g);
    }
    gguf_close(&g);
    return CLI_FINE;
}
