/* gguf.c: reads a GGUF v2/v3 file into a flat, checked table.
 *
 *   "GGUF" | u32 version | u64 n_tensors | u64 n_keys
 *   n_keys x    { string name | u32 kind | value }             string = u64 length | bytes
 *   n_tensors x { string name | u32 n_dims | u64 dims[n_dims] | u32 type | u64 offset }
 *   padding to general.alignment (32 if absent) | tensor data, each at its offset from here
 *
 * All little-endian. One reader with (pos, end); nothing is added or multiplied unchecked, and a
 * count is believed only as far as the bytes left could hold it. Arrays of keys and tensors grow as
 * records are really read, so a lying count costs nothing. Names are indexed by a sorted order, not
 * a hash, so that no file can make look-ups slow; the same order finds duplicates.
 */
#include "gguf_internal.h"
#include "fault.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define KEY_BYTES_MIN (8u + 1 + 4 + 1)            /* length, one letter, kind, smallest value */
#define TENSOR_BYTES_MIN (8u + 1 + 4 + 8 + 4 + 8) /* length, one letter, dims, type, offset */
#define TYPE_NUMBERS_MAX 64u                      /* GGUF's type numbers lie far below this */

struct reader {
    const uint8_t *data;
    size_t pos, len; /* pos <= len */
    char what[64];   /* the key or tensor being read, printable */
    struct err *e;
};

static size_t left(const struct reader *r)
{
    return r->len - r->pos;
}

static int corrupt(struct reader *r, size_t at, const char *why)
{
    return err_set(r->e, BC_ECORRUPT, r->what, "%s%s%s (byte offset %zu of %zu)", r->what,
                   r->what[0] != 0 ? ": " : "", why, at, r->len);
}

static int read_bytes(struct reader *r, void *ret, size_t n)
{
    if (left(r) < n)
        return corrupt(r, r->pos, "the file ends in the middle of the header");
    memcpy(ret, r->data + r->pos, n);
    r->pos += n;
    return BC_OK;
}

static int read_u32(struct reader *r, uint32_t *ret)
{
    return read_bytes(r, ret, sizeof *ret);
}
static int read_u64(struct reader *r, uint64_t *ret)
{
    return read_bytes(r, ret, sizeof *ret);
}

static int read_str(struct reader *r, struct gguf_str *ret)
{
    uint64_t n = 0;
    size_t at = r->pos;
    int rc = read_u64(r, &n);
    if (rc != BC_OK)
        return rc;
    if (n > left(r))
        return corrupt(r, at, "a string is longer than the rest of the file");
    ret->s = (const char *)r->data + r->pos;
    ret->len = n;
    r->pos += n;
    return BC_OK;
}

/* A key's or tensor's name: short and printable ASCII. It becomes r->what for later errors. */
static int read_name(struct reader *r, struct gguf_str *ret)
{
    size_t at = r->pos;
    struct gguf_str s;
    int rc = read_str(r, &s);
    if (rc != BC_OK)
        return rc;
    if (s.len < 1 || s.len > GGUF_NAME_MAX)
        return corrupt(r, at, "a name's length is outside 1..1024");
    for (size_t i = 0; i < s.len; i++)
        if (s.s[i] < 0x20 || s.s[i] > 0x7e)
            return corrupt(r, at, "a name holds a byte that is not printable ASCII");
    snprintf(r->what, sizeof r->what, "%.*s", (int)s.len, s.s);
    *ret = s;
    return BC_OK;
}

static int check_bools(struct reader *r, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (r->data[r->pos + i] > 1)
            return corrupt(r, r->pos + i, "a bool is neither 0 nor 1");
    return BC_OK;
}

/* Fixed-size values: checked and skipped. */
static int read_fixed(struct reader *r, uint32_t kind, size_t n)
{
    size_t bytes;
    if (!size_mul(n, gguf_kind_bytes(kind), &bytes) || bytes > left(r))
        return corrupt(r, r->pos, "its value reaches past the end of the file");
    int rc = kind == GGUF_BOOL ? check_bools(r, n) : BC_OK;
    if (rc == BC_OK)
        r->pos += bytes;
    return rc;
}

static int read_array_str(struct reader *r, struct gguf_key *k, size_t n)
{
    size_t at = r->pos;
    if (n > GGUF_ARRAY_STR_MAX)
        return err_set(r->e, BC_EUNSUPPORTED, r->what, "%s: %zu strings, at most %u are read",
                       r->what, n, GGUF_ARRAY_STR_MAX);
    k->starts = malloc((n + 1) * sizeof *k->starts);
    if (k->starts == NULL)
        return err_nomem(r->e, (n + 1) * sizeof *k->starts);
    for (size_t i = 0; i < n; i++) {
        struct gguf_str s;
        if (r->pos - at > UINT32_MAX)
            return corrupt(r, r->pos, "an array of strings is larger than 4 GiB");
        k->starts[i] = (uint32_t)(r->pos - at);
        int rc = read_str(r, &s);
        if (rc != BC_OK)
            return rc;
    }
    return BC_OK;
}

static int read_array(struct reader *r, struct gguf_key *k)
{
    uint32_t elem = 0;
    uint64_t n = 0;
    size_t at = r->pos;
    int rc = read_u32(r, &elem);
    if (rc == BC_OK)
        rc = read_u64(r, &n);
    if (rc != BC_OK)
        return rc;
    if (elem == GGUF_ARRAY)
        return corrupt(r, at, "an array of arrays");
    size_t least = elem == GGUF_STRING ? 8 : gguf_kind_bytes(elem);
    if (least == 0)
        return corrupt(r, at, "the array's element kind is unknown");
    if (n > left(r) / least)
        return corrupt(r, at, "the array has more elements than the file could hold");
    k->elem = (enum gguf_kind)elem;
    k->n = n;
    k->value = r->data + r->pos;
    return elem == GGUF_STRING ? read_array_str(r, k, n) : read_fixed(r, elem, n);
}

/* k is zeroed; on failure the caller frees k->starts with the rest of the table. */
static int read_key(struct reader *r, struct gguf_key *k)
{
    uint32_t kind = 0;
    size_t at = r->pos;
    struct gguf_str s;
    int rc = read_name(r, &k->name);
    if (rc == BC_OK)
        rc = read_u32(r, &kind);
    if (rc != BC_OK)
        return rc;
    if (kind != GGUF_STRING && kind != GGUF_ARRAY && gguf_kind_bytes(kind) == 0)
        return corrupt(r, at, "its kind is unknown");
    k->kind = (enum gguf_kind)kind;
    k->n = 1;
    k->value = r->data + r->pos;
    if (kind == GGUF_ARRAY)
        return read_array(r, k);
    return kind == GGUF_STRING ? read_str(r, &s) : read_fixed(r, kind, 1);
}

/* Makes room for one more record: capacities are powers of two. */
static int grow(void **array, size_t n, size_t record_bytes, struct err *e)
{
    if (n != 0 && (n & (n - 1)) != 0)
        return BC_OK;
    size_t bytes = (n == 0 ? 1 : 2 * n) * record_bytes;
    void *p = realloc(*array, bytes);
    if (p == NULL)
        return err_nomem(e, bytes);
    memset((char *)p + n * record_bytes, 0, bytes - n * record_bytes);
    *array = p;
    return BC_OK;
}

static int read_keys(struct gguf *g, struct reader *r, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        void *array = g->keys;
        int rc = grow(&array, g->n_keys, sizeof *g->keys, r->e);
        if (rc != BC_OK)
            return rc;
        g->keys = array;
        rc = read_key(r, &g->keys[g->n_keys++]);
        if (rc != BC_OK)
            return rc;
        r->what[0] = 0;
    }
    return BC_OK;
}

/* Rows are whole blocks, the size is exact, and neither product wraps. */
static int size_tensor(struct reader *r, struct gguf_tensor *t, uint32_t type, size_t at)
{
    const struct kn_type_info *info = kn_type_find(type);
    if (info == NULL && type < TYPE_NUMBERS_MAX)
        return err_set(r->e, BC_EUNSUPPORTED, r->what,
                       "%s: tensor type %u is not supported (byte offset %zu)", r->what, type, at);
    if (info == NULL)
        return corrupt(r, at, "its type is outside GGUF's table");
    size_t values = 1;
    for (unsigned d = 0; d < 4; d++)
        if (!size_mul(values, t->dims[d], &values))
            return corrupt(r, at, "its dimensions multiply to more than 64 bits");
    if (t->dims[0] % info->block != 0)
        return corrupt(r, at, "its row length is not a multiple of its type's block");
    if (!size_mul(values / info->block, info->bytes, &t->bytes))
        return corrupt(r, at, "its size in bytes exceeds 64 bits");
    t->type = info->type;
    return BC_OK;
}

/* Leaves the offset from the data section in *ret_offset: the section's start is known only later.
 */
static int read_tensor(struct reader *r, struct gguf_tensor *t, uint64_t *ret_offset)
{
    uint32_t type = 0;
    size_t at = r->pos;
    int rc = read_name(r, &t->name);
    if (rc == BC_OK)
        rc = read_u32(r, &t->n_dims);
    if (rc != BC_OK)
        return rc;
    if (t->n_dims < 1 || t->n_dims > 4)
        return corrupt(r, at, "its number of dimensions is outside 1..4");
    for (unsigned d = 0; d < 4; d++) {
        t->dims[d] = 1;
        rc = d < t->n_dims ? read_u64(r, &t->dims[d]) : BC_OK;
        if (rc != BC_OK)
            return rc;
        if (t->dims[d] == 0)
            return corrupt(r, at, "a dimension is 0");
    }
    rc = read_u32(r, &type);
    if (rc == BC_OK)
        rc = read_u64(r, ret_offset);
    return rc == BC_OK ? size_tensor(r, t, type, at) : rc;
}

/* t->data holds the offset as a number until place_tensors() knows where the data section starts.
 */
static int read_tensors(struct gguf *g, struct reader *r, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        uint64_t offset = 0;
        void *array = g->tensors;
        int rc = grow(&array, g->n_tensors, sizeof *g->tensors, r->e);
        if (rc != BC_OK)
            return rc;
        g->tensors = array;
        struct gguf_tensor *t = &g->tensors[g->n_tensors];
        rc = read_tensor(r, t, &offset);
        if (rc != BC_OK)
            return rc;
        t->data = (const void *)(uintptr_t)offset;
        g->n_tensors++;
        r->what[0] = 0;
    }
    return BC_OK;
}

static int cmp_key(const void *a, const void *b, void *arg)
{
    const struct gguf_key *k = arg;
    return gguf_str_cmp(k[*(const uint32_t *)a].name, k[*(const uint32_t *)b].name);
}

static int cmp_tensor(const void *a, const void *b, void *arg)
{
    const struct gguf_tensor *t = arg;
    return gguf_str_cmp(t[*(const uint32_t *)a].name, t[*(const uint32_t *)b].name);
}

static int cmp_offset(const void *a, const void *b, void *arg)
{
    const struct gguf_tensor *t = arg;
    uintptr_t x = (uintptr_t)t[*(const uint32_t *)a].data;
    uintptr_t y = (uintptr_t)t[*(const uint32_t *)b].data;
    return x < y ? -1 : x > y;
}

static int order_make(uint32_t **ret, size_t n, void *records,
                      int (*cmp)(const void *, const void *, void *), struct err *e)
{
    uint32_t *order = malloc((n + 1) * sizeof *order);
    if (order == NULL)
        return err_nomem(e, (n + 1) * sizeof *order);
    for (size_t i = 0; i < n; i++)
        order[i] = (uint32_t)i;
    qsort_r(order, n, sizeof *order, cmp, records);
    *ret = order;
    return BC_OK;
}

/* Sorted orders of names; an equal neighbour is a duplicate. */
static int index_names(struct gguf *g, struct reader *r)
{
    int rc = order_make(&g->key_order, g->n_keys, g->keys, cmp_key, r->e);
    if (rc == BC_OK)
        rc = order_make(&g->tensor_order, g->n_tensors, g->tensors, cmp_tensor, r->e);
    if (rc != BC_OK)
        return rc;
    struct gguf_str twice = {NULL, 0};
    for (size_t i = 1; i < g->n_keys; i++)
        if (cmp_key(&g->key_order[i - 1], &g->key_order[i], g->keys) == 0)
            twice = g->keys[g->key_order[i]].name;
    for (size_t i = 1; i < g->n_tensors; i++)
        if (cmp_tensor(&g->tensor_order[i - 1], &g->tensor_order[i], g->tensors) == 0)
            twice = g->tensors[g->tensor_order[i]].name;
    if (twice.s == NULL)
        return BC_OK;
    snprintf(r->what, sizeof r->what, "%.*s", (int)twice.len, twice.s);
    return corrupt(r, (size_t)((const uint8_t *)twice.s - g->data),
                   "a key or tensor of this name stands in the file twice");
}

static int read_alignment(const struct gguf *g, struct reader *r, uint32_t *ret)
{
    *ret = 32;
    int rc = gguf_get_u32(g, "general.alignment", ret, r->e);
    if (rc != BC_OK && rc != BC_ENOTFOUND)
        return rc;
    if (*ret < 8 || *ret > 4096 || (*ret & (*ret - 1)) != 0)
        return err_set(r->e, BC_ECORRUPT, "general.alignment",
                       "general.alignment: %u is not a power of two in 8..4096", *ret);
    return BC_OK;
}

static int tensor_fault(struct reader *r, const struct gguf_tensor *t, const char *why)
{
    snprintf(r->what, sizeof r->what, "%.*s", (int)t->name.len, t->name.s);
    return corrupt(r, (size_t)((const uint8_t *)t->name.s - r->data), why);
}

/* Turns offsets into pointers: aligned, inside the file, and no two tensors share a byte. */
static int place_tensors(struct gguf *g, struct reader *r)
{
    uint32_t alignment, *order = NULL;
    int rc = read_alignment(g, r, &alignment);
    if (rc != BC_OK || g->n_tensors == 0)
        return rc;
    size_t start = r->pos, end = 0;
    if (!size_add(start, alignment - 1, &start))
        return corrupt(r, r->pos, "the header is too long");
    start &= ~(size_t)(alignment - 1);
    if (start > r->len)
        return corrupt(r, r->pos, "the file ends before its tensor data");
    rc = order_make(&order, g->n_tensors, g->tensors, cmp_offset, r->e);
    for (size_t i = 0; i < g->n_tensors && rc == BC_OK; i++) {
        struct gguf_tensor *t = &g->tensors[order[i]];
        size_t offset = (uintptr_t)t->data;
        if (offset % alignment != 0)
            rc = tensor_fault(r, t, "its offset is not aligned");
        else if (offset > r->len - start || t->bytes > r->len - start - offset)
            rc = tensor_fault(r, t, "its data reaches past the end of the file");
        else if (offset < end)
            rc = tensor_fault(r, t, "its data overlaps another tensor's");
        if (rc != BC_OK)
            break;
        end = offset + t->bytes;
        t->data = g->data + start + offset;
    }
    free(order);
    return rc;
}

/* Magic and version: what else it might be gets its own sentence. */
static int read_version(struct gguf *g, struct reader *r)
{
    char magic[4];
    int rc = read_bytes(r, magic, sizeof magic);
    if (rc == BC_OK && memcmp(magic, "GGUF", 4) != 0)
        return memcmp(magic, "FUGG", 4) == 0
                   ? err_set(r->e, BC_EUNSUPPORTED, "magic", "a big-endian GGUF file")
                   : err_set(r->e, BC_ECORRUPT, "magic",
                             "not a GGUF file: it starts with %02x %02x %02x %02x",
                             (uint8_t)magic[0], (uint8_t)magic[1], (uint8_t)magic[2],
                             (uint8_t)magic[3]);
    if (rc == BC_OK)
        rc = read_u32(r, &g->version);
    if (rc != BC_OK)
        return rc;
    if ((g->version & 0xffff) == 0 && g->version != 0)
        return err_set(r->e, BC_EUNSUPPORTED, "version",
                       "a big-endian GGUF file (version field %#x)", g->version);
    if (g->version != 2 && g->version != 3)
        return err_set(r->e, BC_EUNSUPPORTED, "version",
                       "GGUF version %u; versions 2 and 3 are read", g->version);
    return BC_OK;
}

static int count_check(struct reader *r, const char *what, uint64_t n, size_t least, uint32_t most)
{
    if (n > left(r) / least)
        return err_set(r->e, BC_ECORRUPT, what,
                       "%s is %llu, more than the file's %zu bytes could hold", what,
                       (unsigned long long)n, r->len);
    if (n > most)
        return err_set(r->e, BC_EUNSUPPORTED, what, "%s is %llu, at most %u are read", what,
                       (unsigned long long)n, most);
    return BC_OK;
}

static int parse(struct gguf *g, struct reader *r)
{
    uint64_t n_tensors = 0, n_keys = 0;
    int rc = read_version(g, r);
    if (rc == BC_OK)
        rc = read_u64(r, &n_tensors);
    if (rc == BC_OK)
        rc = read_u64(r, &n_keys);
    if (rc == BC_OK)
        rc = count_check(r, "n_tensors", n_tensors, TENSOR_BYTES_MIN, GGUF_TENSORS_MAX);
    if (rc == BC_OK)
        rc = count_check(r, "n_keys", n_keys, KEY_BYTES_MIN, GGUF_KEYS_MAX);
    if (rc == BC_OK)
        rc = read_keys(g, r, n_keys);
    if (rc == BC_OK)
        rc = read_tensors(g, r, n_tensors);
    if (rc == BC_OK)
        rc = index_names(g, r);
    return rc == BC_OK ? place_tensors(g, r) : rc;
}

/* FNV-1a over 8-byte words with a rotation, the length last: both ends of the header count. */
static uint64_t hash_header(const uint8_t *p, size_t n)
{
    uint64_t h = 0xcbf29ce484222325u, w;
    for (size_t i = 0; i < n; i += sizeof w) {
        w = 0;
        memcpy(&w, p + i, BC_MIN(sizeof w, n - i));
        h = (h ^ w) * 0x100000001b3u;
        h = h << 29 | h >> 35;
    }
    h = (h ^ n) * 0x100000001b3u;
    return h ^ h >> 32;
}

int gguf_parse(struct gguf **ret, const void *data, size_t len, struct err *e)
{
    bc_assert(ret != NULL && (data != NULL || len == 0));
    struct gguf *g = calloc(1, sizeof *g);
    if (g == NULL)
        return err_nomem(e, sizeof *g);
    g->magic = GGUF_MAGIC;
    g->data = data;
    g->len = len;
    struct reader r = {.data = data, .len = len, .e = e};
    int rc = parse(g, &r);
    if (rc != BC_OK) {
        gguf_close(&g);
        return rc;
    }
    g->identity = hash_header(g->data, r.pos);
    *ret = g;
    return BC_OK;
}

static int map_file(const char *path, void **ret_map, size_t *ret_len, struct err *e)
{
    int rc = BC_OK;
    struct stat st;
    /* O_NONBLOCK: a fifo must not hang us */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return err_set(e, errno == ENOENT || errno == ENOTDIR ? BC_ENOTFOUND : BC_EIO, "path",
                       "%s: %s", path, strerror(errno));
    if (fstat(fd, &st) != 0)
        rc = err_set(e, BC_EIO, "path", "%s: %s", path, strerror(errno));
    else if (!S_ISREG(st.st_mode))
        rc = err_set(e, BC_EINVALID, "path", "%s is not a regular file", path);
    else if (st.st_size == 0)
        rc = err_set(e, BC_ECORRUPT, "path", "%s is empty", path);
    if (rc != BC_OK)
        goto out;
    void *map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED) {
        rc = err_set(e, BC_EIO, "path", "%s: mmap: %s", path, strerror(errno));
        goto out;
    }
    *ret_map = map;
    *ret_len = (size_t)st.st_size;
out:
    close(fd);
    return rc;
}

int gguf_open(struct gguf **ret, const char *path, struct err *e)
{
    bc_assert(ret != NULL && path != NULL);
    void *map = NULL;
    size_t len = 0;
    int rc = map_file(path, &map, &len, e);
    if (rc != BC_OK)
        return rc;
    struct gguf *g = NULL;
    int fault = fault_watch(map, len);
    rc = gguf_parse(&g, map, len, e);
    if (rc != BC_OK) {
        fault_unwatch(fault);
        munmap(map, len);
        return rc;
    }
    g->map = map;
    g->fault = fault;
    g->path = strdup(path);
    rc = g->path == NULL ? err_nomem(e, strlen(path) + 1) : gguf_intact(g, e);
    if (rc != BC_OK) {
        gguf_close(&g);
        return rc;
    }
    *ret = g;
    return BC_OK;
}

int gguf_intact(const struct gguf *g, struct err *e)
{
    MAGIC_OK(g, GGUF_MAGIC);
    if (g->map != NULL && fault_seen(g->fault))
        return err_set(e, BC_ECORRUPT, "path",
                       "%s was truncated while it was read: it had %zu bytes", gguf_path(g),
                       g->len);
    return BC_OK;
}

void gguf_close(struct gguf **gp)
{
    struct gguf *g = *gp;
    if (g == NULL)
        return;
    MAGIC_OK(g, GGUF_MAGIC);
    for (size_t i = 0; i < g->n_keys; i++)
        free(g->keys[i].starts);
    free(g->keys);
    free(g->key_order);
    free(g->tensors);
    free(g->tensor_order);
    free(g->path);
    if (g->map != NULL) {
        fault_unwatch(g->fault);
        munmap(g->map, g->len);
    }
    g->magic = 0;
    free(g);
    *gp = NULL;
}
