/* The GGUF reader: real files read right, and every recorded way to lie refused with a reason.
 *
 * Crafted files are written by gguf_build.h, one per fault; then the tiny model is cut at
 * 200 places and its header corrupted 2,000 times: the answer must be an error or a handle whose
 * every field can be read (the sanitizer builds watch).
 */
#include "gguf_build.h"
#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

#define TINY TEST_VECTORS "/tiny-llama.gguf"

static void tensor(struct file *f, const char *name, uint32_t type, uint64_t n, uint64_t offset)
{
    put_str(f, name);
    put32(f, 1);
    put64(f, n);
    put32(f, type);
    put64(f, offset);
}

static void pad(struct file *f, size_t to)
{
    while (f->n % to != 0)
        put(f, "", 1);
}

static void data(struct file *f, size_t bytes)
{
    pad(f, 32);
    for (size_t i = 0; i < bytes; i++)
        put(f, "x", 1);
}

/* Reads everything a handle offers, so that a sanitizer sees a bad pointer. Returns a sum to keep.
 */
static uint64_t walk(const struct gguf *g)
{
    uint64_t sum = gguf_identity(g);
    char text[300];
    for (size_t i = 0; i < gguf_n_keys(g); i++) {
        char key[2048];
        enum gguf_kind kind;
        size_t n;
        struct gguf_str name = gguf_key_name(g, i);
        snprintf(key, sizeof key, "%.*s", (int)name.len, name.s);
        sum += (uint64_t)gguf_key_print(g, i, text, sizeof text) + strlen(text);
        if (gguf_array(g, key, &kind, &n, NULL) != BC_OK)
            continue;
        for (size_t j = 0; j < n; j++) {
            if (kind == GGUF_STRING) {
                struct gguf_str s = gguf_array_str(g, key, j);
                sum += s.len > 0 ? (uint8_t)s.s[0] + (uint8_t)s.s[s.len - 1] : 0;
            } else if (kind == GGUF_F32 || kind == GGUF_F64) {
                sum += gguf_array_float(g, key, j) > 0;
            } else {
                sum += (uint64_t)gguf_array_int(g, key, j);
            }
        }
    }
    for (size_t i = 0; i < gguf_n_tensors(g); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(g, i);
        const uint8_t *p = t->data;
        sum += p[0] + (uint64_t)p[t->bytes - 1];
    }
    return sum;
}

/* In a heap block of its own, so that reading one byte too far is caught. */
static int parse_copy(const uint8_t *b, size_t n, struct err *e)
{
    uint8_t *copy = malloc(n + (n == 0));
    struct gguf *g = NULL;
    assert_non_null(copy);
    memcpy(copy, b, n);
    memset(e, 0, sizeof *e);
    int rc = gguf_parse(&g, copy, n, e);
    if (rc == BC_OK) {
        volatile uint64_t keep = walk(g);
        (void)keep;
    } else {
        assert_null(g);
        assert_int_equal(rc, e->code);
        assert_true(e->text[0] != 0);
    }
    gguf_close(&g);
    free(copy);
    return rc;
}

static void refuse(const struct file *f, int code, const char *field, const char *fragment)
{
    struct err e;
    int rc = parse_copy(f->b, f->n, &e);
    if (rc != code || strcmp(e.field, field) != 0 || strstr(e.text, fragment) == NULL)
        fail_msg("wanted %s, field \"%s\", \"...%s...\"; got %s, \"%s\", \"%s\"", err_name(code),
                 field, fragment, err_name(rc), e.field, e.text);
}

static void accept(const struct file *f)
{
    struct err e;
    if (parse_copy(f->b, f->n, &e) != BC_OK)
        fail_msg("refused: %s", e.text);
}

/* ---- real files --------------------------------------------------------------------------------
 */

static void test_tiny(void **state)
{
    (void)state;
    struct gguf *g = NULL;
    struct err e = {0};
    uint32_t u;
    float x;
    bool b;
    struct gguf_str s;
    enum gguf_kind kind;
    size_t n;
    assert_int_equal(gguf_open(&g, TINY, &e), BC_OK);
    assert_string_equal(gguf_path(g), TINY);
    assert_int_equal(gguf_version(g), 3);
    assert_int_equal(gguf_get_u32(g, "llama.block_count", &u, &e), BC_OK);
    assert_int_equal(u, 4);
    assert_int_equal(gguf_get_f32(g, "llama.rope.freq_base", &x, &e), BC_OK);
    assert_true(x == 10000.0f);
    assert_int_equal(gguf_get_bool(g, "tokenizer.ggml.add_bos_token", &b, &e), BC_OK);
    assert_false(b);
    assert_int_equal(gguf_get_str(g, "general.architecture", &s, &e), BC_OK);
    assert_memory_equal(s.s, "llama", s.len);
    assert_int_equal(gguf_array(g, "tokenizer.ggml.tokens", &kind, &n, &e), BC_OK);
    assert_int_equal(kind, GGUF_STRING);
    assert_int_equal(n, 384);
    s = gguf_array_str(g, "tokenizer.ggml.tokens", 2);
    assert_int_equal(s.len, 10);
    assert_memory_equal(s.s, "<|im_end|>", 10);
    assert_int_equal(gguf_array_int(g, "tokenizer.ggml.token_type", 2), 3);
    const struct gguf_tensor *t = gguf_tensor_find(g, "token_embd.weight");
    assert_non_null(t);
    assert_int_equal(t->type, KN_F32);
    assert_int_equal(t->n_dims, 2);
    assert_int_equal(t->dims[0], 64);
    assert_int_equal(t->dims[1], 384);
    assert_int_equal(t->dims[2], 1);
    assert_int_equal(t->bytes, 64 * 384 * 4);
    assert_null(gguf_tensor_find(g, "token_embd.weigh"));
    for (size_t i = 0; i < gguf_n_tensors(g); i++) {
        char name[128];
        const struct gguf_tensor *at = gguf_tensor_at(g, i);
        snprintf(name, sizeof name, "%.*s", (int)at->name.len, at->name.s);
        assert_ptr_equal(gguf_tensor_find(g, name), at);
    }
    gguf_close(&g);
    assert_null(g);
    gguf_close(&g); /* again is harmless */
}

static void test_all_vectors(void **state)
{
    (void)state;
    static const char *const names[] = {
        "tiny-llama.gguf",      "tiny-llama-q4_0.gguf",  "tiny-llama-q4_1.gguf",
        "tiny-llama-q8_0.gguf", "tiny-llama-rope3.gguf", "tiny-qwen2.gguf",
        "tiny-qwen3.gguf",      "golden-llama.gguf",     "golden-llama-rope3.gguf",
        "golden-qwen2.gguf",    "golden-qwen3.gguf",     "golden-smollm2.gguf",
        "quants.gguf",
    };
    uint64_t seen[ARRAY_LEN(names)];
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        char path[512];
        struct gguf *g = NULL;
        struct err e = {0};
        snprintf(path, sizeof path, TEST_VECTORS "/%s", names[i]);
        if (gguf_open(&g, path, &e) != BC_OK)
            fail_msg("%s: %s", names[i], e.text);
        assert_true(gguf_n_tensors(g) > 0);
        walk(g);
        seen[i] = gguf_identity(g);
        for (size_t j = 0; j < i; j++)
            assert_true(seen[j] != seen[i]);
        gguf_close(&g);
    }
}

static void test_missing_and_wrong_kind(void **state)
{
    (void)state;
    struct file f;
    struct err e;
    struct gguf *g = NULL;
    uint32_t u = 77;
    float x = 7;
    bool b = true;
    enum gguf_kind kind;
    size_t n;
    head(&f, 3, 0, 6);
    key32(&f, "minus", GGUF_I32, (uint32_t)-5);
    put_str(&f, "big");
    put32(&f, GGUF_U64);
    put64(&f, 1ull << 40);
    put_str(&f, "fits");
    put32(&f, GGUF_I64);
    put64(&f, 4000000000u);
    key32(&f, "nan", GGUF_F32, 0x7fc00000);
    put_str(&f, "huge");
    put32(&f, GGUF_U64);
    put64(&f, UINT64_MAX);
    put_str(&f, "list");
    put32(&f, GGUF_ARRAY);
    put32(&f, GGUF_I16);
    put64(&f, 2);
    put32(&f, 0xfffe0001);
    assert_int_equal(gguf_parse(&g, f.b, f.n, &e), BC_OK);
    assert_int_equal(gguf_get_u32(g, "none", &u, &e), BC_ENOTFOUND);
    assert_string_equal(e.field, "none");
    assert_int_equal(gguf_get_u32(g, "minus", &u, &e), BC_ECORRUPT);
    assert_string_equal(e.field, "minus");
    assert_int_equal(gguf_get_u32(g, "big", &u, &e), BC_ECORRUPT);
    assert_int_equal(gguf_get_u32(g, "huge", &u, &e), BC_ECORRUPT);
    assert_int_equal(gguf_get_u32(g, "nan", &u, &e), BC_ECORRUPT);
    assert_int_equal(gguf_get_f32(g, "nan", &x, &e), BC_ECORRUPT);
    assert_int_equal(gguf_get_f32(g, "fits", &x, &e), BC_ECORRUPT);
    assert_int_equal(gguf_get_bool(g, "fits", &b, &e), BC_ECORRUPT);
    assert_int_equal(gguf_array(g, "fits", &kind, &n, &e), BC_ECORRUPT);
    assert_true(u == 77 && x == 7 && b);
    assert_int_equal(gguf_get_u32(g, "fits", &u, &e), BC_OK);
    assert_true(u == 4000000000u);
    assert_int_equal(gguf_array(g, "list", &kind, &n, &e), BC_OK);
    assert_int_equal(n, 2);
    assert_int_equal(gguf_array_int(g, "list", 0), 1);
    assert_int_equal(gguf_array_int(g, "list", 1), -2);
    gguf_close(&g);
}

static void test_print(void **state)
{
    (void)state;
    struct file f;
    struct gguf *g = NULL;
    char buf[64], small[8];
    head(&f, 2, 0, 3);
    put_str(&f, "s");
    put32(&f, GGUF_STRING);
    put_str(&f, "a\"b\n\x1b[1m");
    put_str(&f, "l");
    put32(&f, GGUF_ARRAY);
    put32(&f, GGUF_U8);
    put64(&f, 10);
    put(&f, "\1\2\3\4\5\6\7\10\11\12", 10);
    put_str(&f, "u");
    put32(&f, GGUF_U64);
    put64(&f, UINT64_MAX);
    assert_int_equal(gguf_parse(&g, f.b, f.n, NULL), BC_OK);
    assert_int_equal(gguf_key_print(g, 0, buf, sizeof buf), 15);
    assert_string_equal(buf, "\"a\\\"b\\n\\x1b[1m\"");
    assert_int_equal(gguf_key_print(g, 0, small, sizeof small), 15);
    assert_string_equal(small, "\"a\\\"b\\n");
    gguf_key_print(g, 1, buf, sizeof buf);
    assert_string_equal(buf, "10 x u8 [1, 2, 3, 4, 5, 6, 7, 8, ...]");
    gguf_key_print(g, 2, buf, sizeof buf);
    assert_string_equal(buf, "18446744073709551615");
    gguf_close(&g);
}

/* ---- crafted faults ----------------------------------------------------------------------------
 */

static void test_magic_and_version(void **state)
{
    (void)state;
    struct file f;
    for (size_t n = 0; n < 24;
         n++) { /* a file of 4 bytes, and every other size below the header's */
        head(&f, 3, 0, 0);
        f.n = n;
        refuse(&f, BC_ECORRUPT, "", "ends");
    }
    head(&f, 3, 0, 0);
    accept(&f);
    head(&f, 2, 0, 0);
    accept(&f);
    head(&f, 1, 0, 0);
    refuse(&f, BC_EUNSUPPORTED, "version", "version 1");
    head(&f, 4, 0, 0);
    refuse(&f, BC_EUNSUPPORTED, "version", "version 4");
    head(&f, 0, 0, 0);
    refuse(&f, BC_EUNSUPPORTED, "version", "version 0");
    head(&f, 0x03000000, 0, 0);
    refuse(&f, BC_EUNSUPPORTED, "version", "big-endian");
    memcpy(f.b, "FUGG", 4);
    refuse(&f, BC_EUNSUPPORTED, "magic", "big-endian");
    memcpy(f.b, "GGML", 4);
    refuse(&f, BC_ECORRUPT, "magic", "47 47 4d 4c");
}

static void test_counts(void **state)
{
    (void)state;
    struct file f;
    static const uint64_t lies[] = {1, 1000, 1ull << 32, 1ull << 61, UINT64_MAX};
    for (size_t i = 0; i < ARRAY_LEN(lies); i++) {
        head(&f, 3, lies[i], 0);
        refuse(&f, BC_ECORRUPT, "n_tensors", "could hold");
        head(&f, 3, 0, lies[i]);
        refuse(&f, BC_ECORRUPT, "n_keys", "could hold");
        if (lies[i] == 1)
            continue;
        head(&f, 3, 0, 1); /* string length */
        put64(&f, lies[i]);
        put(&f, "keyname-keyname-keyname", 23);
        refuse(&f, BC_ECORRUPT, "", "longer than the rest");
        head(&f, 3, 0, 1); /* string value */
        put_str(&f, "k");
        put32(&f, GGUF_STRING);
        put64(&f, lies[i]);
        refuse(&f, BC_ECORRUPT, "k", "longer than the rest");
        for (uint32_t kind = 0; kind <= GGUF_F64; kind++) { /* array counts */
            if (kind == GGUF_ARRAY)
                continue;
            head(&f, 3, 0, 1);
            put_str(&f, "k");
            put32(&f, GGUF_ARRAY);
            put32(&f, kind);
            put64(&f, lies[i]);
            put(&f, "12345678", 8);
            refuse(&f, BC_ECORRUPT, "k", "more elements");
        }
    }
}

static void test_kinds(void **state)
{
    (void)state;
    struct file f;
    static const uint32_t bad[] = {13, 14, 255, 0x80000000, UINT32_MAX};
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        head(&f, 3, 0, 1);
        key32(&f, "k", bad[i], 0);
        refuse(&f, BC_ECORRUPT, "k", "kind is unknown");
        head(&f, 3, 0, 1);
        put_str(&f, "k");
        put32(&f, GGUF_ARRAY);
        put32(&f, bad[i]);
        put64(&f, 1);
        put64(&f, 0);
        refuse(&f, BC_ECORRUPT, "k", "element kind");
    }
    head(&f, 3, 0, 1); /* nested arrays */
    put_str(&f, "k");
    put32(&f, GGUF_ARRAY);
    for (int i = 0; i < 100; i++) {
        put32(&f, GGUF_ARRAY);
        put64(&f, 1);
    }
    refuse(&f, BC_ECORRUPT, "k", "array of arrays");
    head(&f, 3, 0, 1);
    put_str(&f, "k");
    put32(&f, GGUF_BOOL);
    put(&f, "\2", 1);
    refuse(&f, BC_ECORRUPT, "k", "bool");
    head(&f, 3, 0, 1);
    put_str(&f, "k");
    put32(&f, GGUF_ARRAY);
    put32(&f, GGUF_BOOL);
    put64(&f, 3);
    put(&f, "\1\0\3", 3);
    refuse(&f, BC_ECORRUPT, "k", "bool");
    head(&f, 3, 0, 1); /* an array of strings whose second string is cut */
    put_str(&f, "k");
    put32(&f, GGUF_ARRAY);
    put32(&f, GGUF_STRING);
    put64(&f, 2);
    put_str(&f, "fine");
    put64(&f, 9);
    put(&f, "abc", 3);
    refuse(&f, BC_ECORRUPT, "k", "longer than the rest");
}

static void test_names(void **state)
{
    (void)state;
    struct file f;
    char *longest = malloc(1026);
    assert_non_null(longest);
    head(&f, 3, 0, 1);
    key32(&f, "", GGUF_U32, 0);
    put32(&f, 0);
    refuse(&f, BC_ECORRUPT, "", "length");
    head(&f, 3, 0, 1);
    key32(&f, "a\nb", GGUF_U32, 0);
    refuse(&f, BC_ECORRUPT, "", "printable");
    head(&f, 3, 0, 1);
    key32(&f, "caf\xc3\xa9", GGUF_U32, 0);
    refuse(&f, BC_ECORRUPT, "", "printable");
    memset(longest, 'n', 1025);
    longest[1025] = 0;
    head(&f, 3, 0, 1);
    key32(&f, longest, GGUF_U32, 0);
    refuse(&f, BC_ECORRUPT, "", "length");
    longest[1024] = 0;
    head(&f, 3, 0, 1);
    key32(&f, longest, GGUF_U32, 0);
    accept(&f);
    free(longest);
    head(&f, 3, 0, 3);
    key32(&f, "same", GGUF_U32, 1);
    key32(&f, "other", GGUF_U32, 1);
    key32(&f, "same", GGUF_F32, 1);
    refuse(&f, BC_ECORRUPT, "same", "twice");
    head(&f, 3, 2, 0);
    tensor(&f, "t", KN_F32, 8, 0);
    tensor(&f, "t", KN_F32, 8, 32);
    data(&f, 64);
    refuse(&f, BC_ECORRUPT, "t", "twice");
}

static void test_alignment(void **state)
{
    (void)state;
    struct file f;
    static const uint32_t bad[] = {0, 1, 4, 12, 33, 4097, 8192, 0x80000000, UINT32_MAX};
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        head(&f, 3, 0, 1);
        key32(&f, "general.alignment", GGUF_U32, bad[i]);
        refuse(&f, BC_ECORRUPT, "general.alignment", "power of two");
    }
    head(&f, 3, 0, 1);
    key32(&f, "general.alignment", GGUF_F32, 32);
    refuse(&f, BC_ECORRUPT, "general.alignment", "not an integer");
    for (uint32_t a = 8; a <= 4096; a *= 2) {
        head(&f, 3, 1, 1);
        key32(&f, "general.alignment", GGUF_U32, a);
        tensor(&f, "t", KN_F32, 1, a == 4096 ? 0 : a);
        pad(&f, a);
        for (uint32_t i = 0; i < (a == 4096 ? 4 : a + 4); i++)
            put(&f, "y", 1);
        accept(&f);
        f.n--;
        refuse(&f, BC_ECORRUPT, "t", "past the end");
    }
}

static void test_tensor_shape(void **state)
{
    (void)state;
    struct file f;
    static const uint32_t n_dims[] = {0, 5, 6, 255, UINT32_MAX};
    for (size_t i = 0; i < ARRAY_LEN(n_dims); i++) {
        head(&f, 3, 1, 0);
        put_str(&f, "t");
        put32(&f, n_dims[i]);
        for (int d = 0; d < 6; d++)
            put64(&f, 1);
        data(&f, 64);
        refuse(&f, BC_ECORRUPT, "t", "outside 1..4");
    }
    head(&f, 3, 1, 0);
    tensor(&f, "t", KN_F32, 0, 0);
    data(&f, 64);
    refuse(&f, BC_ECORRUPT, "t", "dimension is 0");
    head(&f, 3, 1, 0);
    tensor(&f, "t", KN_Q8_0, 33, 0);
    data(&f, 64);
    refuse(&f, BC_ECORRUPT, "t", "block");
    static const uint32_t types[] = {4, 5, 9, 15, 31, 63};
    for (size_t i = 0; i < ARRAY_LEN(types); i++) {
        head(&f, 3, 1, 0);
        tensor(&f, "t", types[i], 32, 0);
        data(&f, 64);
        refuse(&f, BC_EUNSUPPORTED, "t", "is not supported");
    }
    head(&f, 3, 1, 0);
    tensor(&f, "t", UINT32_MAX, 32, 0);
    data(&f, 64);
    refuse(&f, BC_ECORRUPT, "t", "outside GGUF's table");
    static const uint64_t wraps[][4] = {
        {1ull << 32, 1ull << 32, 1, 1},
        {UINT64_MAX, 2, 1, 1},
        {1ull << 16, 1ull << 16, 1ull << 16, 1ull << 16},
        {1ull << 62, 1, 1, 4},
    };
    for (size_t i = 0; i < ARRAY_LEN(wraps); i++) {
        head(&f, 3, 1, 0);
        put_str(&f, "t");
        put32(&f, 4);
        put(&f, wraps[i], sizeof wraps[i]);
        put32(&f, KN_F32);
        put64(&f, 0);
        data(&f, 64);
        refuse(&f, BC_ECORRUPT, "t", "64 bits");
    }
    head(&f, 3, 1, 0); /* fits 64 bits in values, not in bytes */
    tensor(&f, "t", KN_F32, 1ull << 62, 0);
    data(&f, 64);
    refuse(&f, BC_ECORRUPT, "t", "64 bits");
}

static void test_tensor_place(void **state)
{
    (void)state;
    struct file f;
    static const uint64_t bad[] = {1, 31, 33, UINT64_MAX};
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        head(&f, 3, 1, 0);
        tensor(&f, "t", KN_F32, 8, bad[i]);
        data(&f, 64);
        refuse(&f, BC_ECORRUPT, "t", "not aligned");
    }
    static const uint64_t far[] = {64, 1ull << 40, UINT64_MAX - 31};
    for (size_t i = 0; i < ARRAY_LEN(far); i++) {
        head(&f, 3, 1, 0);
        tensor(&f, "t", KN_F32, 8, far[i]);
        data(&f, 64);
        refuse(&f, BC_ECORRUPT, "t", "past the end");
    }
    head(&f, 3, 1, 0);
    tensor(&f, "t", KN_F32, 17, 0);
    data(&f, 64);
    refuse(&f, BC_ECORRUPT, "t", "past the end");
    head(&f, 3, 1, 0); /* no data section at all */
    tensor(&f, "t", KN_F32, 1, 0);
    refuse(&f, BC_ECORRUPT, "", "before its tensor data");
    head(&f, 3, 3, 0); /* c lies inside b */
    tensor(&f, "a", KN_F32, 8, 0);
    tensor(&f, "b", KN_F32, 24, 32);
    tensor(&f, "c", KN_F32, 8, 96);
    data(&f, 160);
    refuse(&f, BC_ECORRUPT, "c", "overlaps");
    head(&f, 3, 2, 0); /* out of order is no fault */
    tensor(&f, "a", KN_F32, 8, 32);
    tensor(&f, "b", KN_F32, 8, 0);
    data(&f, 64);
    accept(&f);
}

/* ---- damage ------------------------------------------------------------------------------------
 */

static void test_cut(void **state)
{
    (void)state;
    size_t n;
    struct err e;
    uint8_t *b = slurp(TINY, &n);
    for (size_t i = 0; i < 200; i++) { /* half of the cuts in the header, half anywhere */
        size_t at = i < 100 ? i * 131 : (i - 100) * n / 100;
        if (parse_copy(b, at, &e) == BC_OK)
            fail_msg("a file cut at %zu was accepted", at);
    }
    assert_int_equal(parse_copy(b, n - 1, &e), BC_ECORRUPT);
    assert_int_equal(parse_copy(b, n, &e), BC_OK);
    free(b);
}

static void test_corrupt(void **state)
{
    (void)state;
    size_t n, refused = 0;
    struct err e;
    uint8_t *b = slurp(TINY, &n);
    uint32_t seed = 12345;
    for (size_t i = 0; i < 2000; i++) {
        seed = seed * 1664525u + 1013904223u;
        size_t at = i < 1000 ? i % 500 : (seed >> 8) % 14000;
        uint8_t was = b[at], now = (uint8_t)(was ^ (1u << (seed >> 29)));
        if (i % 3 == 0)
            now = (uint8_t)(seed >> 21);
        b[at] = now;
        refused += parse_copy(b, n, &e) != BC_OK;
        b[at] = was;
    }
    free(b);
    assert_true(refused > 200); /* the corruptions do hit structure */
}

static void test_open_errors(void **state)
{
    (void)state;
    struct gguf *g = NULL;
    struct err e;
    char path[] = "/tmp/backcast-gguf-XXXXXX";
    assert_int_equal(gguf_open(&g, TEST_VECTORS "/no-such-file.gguf", &e), BC_ENOTFOUND);
    assert_non_null(strstr(e.text, "no-such-file"));
    assert_int_equal(gguf_open(&g, TEST_VECTORS, &e), BC_EINVALID);
    assert_non_null(strstr(e.text, "regular file"));
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(gguf_open(&g, path, &e), BC_ECORRUPT);
    assert_non_null(strstr(e.text, "empty"));
    assert_int_equal(write(fd, "GGUF", 4), 4);
    close(fd);
    assert_int_equal(gguf_open(&g, path, &e), BC_ECORRUPT);
    assert_non_null(strstr(e.text, "ends"));
    unlink(path);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(gguf_open(&g, path, &e), BC_EINVALID); /* and does not hang */
    unlink(path);
    assert_null(g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tiny),
        cmocka_unit_test(test_all_vectors),
        cmocka_unit_test(test_missing_and_wrong_kind),
        cmocka_unit_test(test_print),
        cmocka_unit_test(test_magic_and_version),
        cmocka_unit_test(test_counts),
        cmocka_unit_test(test_kinds),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_alignment),
        cmocka_unit_test(test_tensor_shape),
        cmocka_unit_test(test_tensor_place),
        cmocka_unit_test(test_cut),
        cmocka_unit_test(test_corrupt),
        cmocka_unit_test(test_open_errors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
