/* vocab_build.h: small vocabularies in memory: the 256 bytes, special tokens, merges. */
#ifndef VOCAB_BUILD_H
#define VOCAB_BUILD_H
#include "gguf_build.h"
#include "tok_internal.h"

struct vocab_piece {
    const char *s;
    int type; /* enum tok_type */
};

/* A byte-level vocabulary: ids 0..255 are the bytes, then the pieces (count n, as stored), then
 * what each merge makes. merges: "a b", NULL at the end. The caller may add keys before
 * head_done(). */
static inline void vocab_bpe(struct file *f, const char *pre, const struct vocab_piece *pieces,
                             size_t n, const char *const *merges)
{
    size_t n_merges = 0;
    while (merges[n_merges] != NULL)
        n_merges++;
    head(f, 3, 0, 0);
    key_str(f, "tokenizer.ggml.model", "gpt2");
    key_str(f, "tokenizer.ggml.pre", pre);
    key_array(f, "tokenizer.ggml.tokens", GGUF_STRING, 256 + n + n_merges);
    for (unsigned b = 0; b < 256; b++) {
        char byte = (char)b, name[2];
        put_strn(f, name, alphabet_encode(&byte, 1, name));
    }
    for (size_t i = 0; i < n; i++)
        put_str(f, pieces[i].s);
    for (size_t i = 0; i < n_merges; i++) {
        char joined[256];
        const char *gap = strchr(merges[i] + 1, ' ');
        snprintf(joined, sizeof joined, "%.*s%s", (int)(gap - merges[i]), merges[i], gap + 1);
        put_str(f, joined);
    }
    key_array(f, "tokenizer.ggml.token_type", GGUF_I32, 256 + n + n_merges);
    for (size_t i = 0; i < 256 + n + n_merges; i++)
        put32(f, i >= 256 && i < 256 + n ? (uint32_t)pieces[i - 256].type : TYPE_NORMAL);
    key_array(f, "tokenizer.ggml.merges", GGUF_STRING, n_merges);
    for (size_t i = 0; i < n_merges; i++)
        put_str(f, merges[i]);
}

/* A SentencePiece-style vocabulary: <unk> <s> </s>, 256 byte tokens (ids 3..258), then the pieces
 * with scores -1, -2 ... */
static inline void vocab_spm(struct file *f, const struct vocab_piece *pieces, size_t n)
{
    static const char *const first[] = {"<unk>", "<s>", "</s>"};
    head(f, 3, 0, 0);
    key_str(f, "tokenizer.ggml.model", "llama");
    key_array(f, "tokenizer.ggml.tokens", GGUF_STRING, 259 + n);
    for (size_t i = 0; i < 3; i++)
        put_str(f, first[i]);
    for (unsigned b = 0; b < 256; b++) {
        char name[8];
        snprintf(name, sizeof name, "<0x%02X>", b);
        put_str(f, name);
    }
    for (size_t i = 0; i < n; i++)
        put_str(f, pieces[i].s);
    key_array(f, "tokenizer.ggml.token_type", GGUF_I32, 259 + n);
    for (size_t i = 0; i < 259 + n; i++)
        put32(f, i == 0    ? TYPE_UNKNOWN
                 : i < 3   ? TYPE_CONTROL
                 : i < 259 ? TYPE_BYTE
                           : (uint32_t)pieces[i - 259].type);
    key_array(f, "tokenizer.ggml.scores", GGUF_F32, 259 + n);
    for (size_t i = 0; i < 259 + n; i++) {
        float score = i < 259 ? 0 : -1.0f - (float)(i - 259);
        put(f, &score, sizeof score);
    }
    key32(f, "tokenizer.ggml.bos_token_id", GGUF_U32, 1);
    key32(f, "tokenizer.ggml.eos_token_id", GGUF_U32, 2);
    key32(f, "tokenizer.ggml.unknown_token_id", GGUF_U32, 0);
}

static inline struct tok *vocab_open(struct file *f)
{
    struct gguf *g = NULL;
    struct tok *t = NULL;
    struct err e = {0};
    head_done(f);
    if (gguf_parse(&g, f->b, f->n, &e) != BC_OK || tok_open(&t, g, &e) != BC_OK)
        fail_msg("%s: %s", e.field, e.text);
    gguf_close(&g);
    return t;
}

static inline struct tok *vocab_load(const char *path)
{
    struct gguf *g = NULL;
    struct tok *t = NULL;
    struct err e = {0};
    if (gguf_open(&g, path, &e) != BC_OK || tok_open(&t, g, &e) != BC_OK)
        fail_msg("%s: %s: %s", path, e.field, e.text);
    gguf_close(&g);
    return t;
}

/* Encodes and compares; -1 ends the expected ids. */
static inline void expect_ids(const struct tok *t, const char *text, size_t len,
                              struct tok_flags flags, const int32_t *want, size_t n_want)
{
    int32_t *ids = NULL;
    size_t n = 0;
    struct err e = {0};
    if (tok_encode(t, text, len, flags, &ids, &n, &e) != BC_OK)
        fail_msg("\"%.*s\": %s", (int)len, text, e.text);
    for (size_t i = 0; i < n || i < n_want; i++)
        if (i >= n || i >= n_want || ids[i] != want[i])
            fail_msg("\"%.*s\": id %zu of %zu (%zu wanted) is %d, not %d", (int)len, text, i, n,
                     n_want, i < n ? ids[i] : -1, i < n_want ? want[i] : -1);
    free(ids);
}

#define EXPECT_IDS(t, text, flags, ...)                                                            \
    do {                                                                                           \
        const int32_t want_[] = {__VA_ARGS__};                                                     \
        expect_ids(t, text, strlen(text), flags, want_, sizeof want_ / sizeof *want_);             \
    } while (0)

/* The pieces of ids, one after the other, malloced and NUL-terminated. */
static inline char *pieces_text(const struct tok *t, const int32_t *ids, size_t n, size_t *ret_len)
{
    size_t len = 0, at = 0;
    for (size_t i = 0; i < n; i++)
        len += tok_piece(t, ids[i]).len;
    char *ret = malloc(len + 1);
    assert_non_null(ret);
    for (size_t i = 0; i < n; i++) {
        struct gguf_str s = tok_piece(t, ids[i]);
        if (s.len > 0)
            memcpy(ret + at, s.s, s.len);
        at += s.len;
    }
    ret[len] = 0;
    *ret_len = len;
    return ret;
}
#endif
