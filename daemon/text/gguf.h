/* gguf.h: a GGUF v2/v3 file as a checked, flat table of keys and tensors.
 *
 * gguf_parse is a pure function of bytes: every count, length, offset, type and alignment is
 * checked before it is used, with checked arithmetic only, so no assertion can be reached from a
 * file and no allocation is larger than a small multiple of the file. gguf_open maps a file
 * read-only and parses it. Strings point into the mapping (not NUL-terminated). Immutable
 * afterwards: any thread may read. Errors are BC_ECORRUPT / BC_ENOTFOUND / BC_EUNSUPPORTED with the
 * key or tensor in err.field and the byte offset in the sentence.
 */
#ifndef BACKCAST_GGUF_H
#define BACKCAST_GGUF_H
#include "base.h"
#include "kn_quant.h"

struct gguf;

enum gguf_kind {
    GGUF_U8,
    GGUF_I8,
    GGUF_U16,
    GGUF_I16,
    GGUF_U32,
    GGUF_I32,
    GGUF_F32,
    GGUF_BOOL,
    GGUF_STRING,
    GGUF_ARRAY,
    GGUF_U64,
    GGUF_I64,
    GGUF_F64,
};

struct gguf_str {
    const char *s;
    size_t len;
};

struct gguf_tensor {
    struct gguf_str name;
    enum kn_type type;
    uint32_t n_dims;  /* 1..4 */
    uint64_t dims[4]; /* dims[0] varies fastest (row length); unused ones are 1 */
    const void *data; /* in the mapping */
    size_t bytes;
};

int gguf_open(struct gguf **ret, const char *path, struct err *e);
/* data must outlive the handle. */
int gguf_parse(struct gguf **ret, const void *data, size_t len, struct err *e);
void gguf_close(struct gguf **g);
/* Whether the mapped file still was as long as when it was opened, for all that has been read of it so far: BC_ECORRUPT if somebody truncated
 * it meanwhile (what was read there was zeros). Whoever has read tensors or keys asks at the end. BC_OK for gguf_parse. */
int gguf_intact(const struct gguf *g, struct err *e);
const char *gguf_path(const struct gguf *g); /* "" for gguf_parse */
size_t gguf_file_bytes(const struct gguf *g);
uint32_t gguf_version(const struct gguf *g);
/* FNV-1a-like 64-bit identity of header and tensor table (not of the weights): cheap, stable. */
uint64_t gguf_identity(const struct gguf *g);

size_t gguf_n_tensors(const struct gguf *g);
const struct gguf_tensor *gguf_tensor_at(const struct gguf *g, size_t i);
const struct gguf_tensor *gguf_tensor_find(const struct gguf *g, const char *name); /* NULL: none */

/* Keys. The get functions return BC_ENOTFOUND if the key is missing (ret untouched) and
 * BC_ECORRUPT, naming the key, if its type cannot hold the wanted value (integers of any width
 * convert when the value fits). */
size_t gguf_n_keys(const struct gguf *g);
struct gguf_str gguf_key_name(const struct gguf *g, size_t i);
enum gguf_kind gguf_key_kind(const struct gguf *g, size_t i);
bool gguf_has(const struct gguf *g, const char *key);
int gguf_get_u32(const struct gguf *g, const char *key, uint32_t *ret, struct err *e);
int gguf_get_f32(const struct gguf *g, const char *key, float *ret, struct err *e);
int gguf_get_bool(const struct gguf *g, const char *key, bool *ret, struct err *e);
int gguf_get_str(const struct gguf *g, const char *key, struct gguf_str *ret, struct err *e);
/* Arrays: element kind and count, then elements. Strings were walked once at parse time and are
 * indexed. */
int gguf_array(const struct gguf *g, const char *key, enum gguf_kind *ret_kind, size_t *ret_n,
               struct err *e);
struct gguf_str gguf_array_str(const struct gguf *g, const char *key,
                               size_t i); /* kind STRING, i < n: asserted */
int64_t gguf_array_int(const struct gguf *g, const char *key,
                       size_t i); /* an integer or bool kind */
double gguf_array_float(const struct gguf *g, const char *key, size_t i); /* F32 or F64 */
/* One key's value as text for `inspect` (arrays: count and the first few). Returns the length that
 * snprintf would. */
int gguf_key_print(const struct gguf *g, size_t i, char *buf, size_t len);
#endif
