/* gguf_internal.h: the parsed table, shared by gguf.c (which fills it) and gguf_keys.c (which reads
 * it). */
#ifndef BACKCAST_GGUF_INTERNAL_H
#define BACKCAST_GGUF_INTERNAL_H
#include "gguf.h"

#define GGUF_MAGIC 0x47ab01u
#define GGUF_KEYS_MAX (1u << 16)
#define GGUF_TENSORS_MAX (1u << 16)
#define GGUF_NAME_MAX 1024u           /* bytes of a key or tensor name */
#define GGUF_ARRAY_STR_MAX (1u << 22) /* strings in one array: 16 MiB of index */

struct gguf_key {
    struct gguf_str name;
    enum gguf_kind kind;
    enum gguf_kind elem;  /* kind ARRAY: of its elements */
    size_t n;             /* kind ARRAY: count; else 1 */
    const uint8_t *value; /* first value byte; a string's length field; an array's first element */
    uint32_t *starts;     /* array of strings: offset of each length field from value; else NULL */
};

struct gguf {
    unsigned magic;
    const uint8_t *data; /* the file's bytes: ours to unmap if map is set */
    size_t len;
    void *map;
    int fault;  /* fault_watch of map; -1: not watched */
    char *path; /* NULL for gguf_parse */
    uint32_t version;
    uint64_t identity;
    struct gguf_key *keys;
    size_t n_keys;
    uint32_t *key_order; /* key numbers, ascending by (length, bytes) of the name */
    struct gguf_tensor *tensors;
    size_t n_tensors;
    uint32_t *tensor_order; /* the same for tensors */
};

/* Bytes of one value of a fixed-size kind; 0 for STRING, ARRAY and numbers that are no kind. */
size_t gguf_kind_bytes(uint32_t kind);
const char *gguf_kind_name(uint32_t kind); /* "u32", "string" ...; "?" */
/* (length, bytes) order of names: equal only if the same. */
int gguf_str_cmp(struct gguf_str a, struct gguf_str b);
const struct gguf_key *gguf_key_find(const struct gguf *g, const char *key); /* NULL: none */
/* String i of an array of strings: kind and i are the caller's to check. */
struct gguf_str gguf_key_str(const struct gguf_key *k, size_t i);
#endif
