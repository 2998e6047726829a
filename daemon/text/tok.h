/* tok.h: a model's vocabulary: text to token ids and back.
 *
 * Two families, read from the GGUF keys tokenizer.ggml.*: byte-level BPE ("gpt2": merges, with a
 * splitter chosen by tokenizer.ggml.pre) and SentencePiece-style ("llama": scores, byte fallback,
 * space prefix). Everything is checked at open (ids below the vocabulary's size, array kinds and
 * lengths, byte tokens); a vocabulary-only file is enough. Immutable after open: any thread may
 * encode and decode. Memory: a small multiple of the vocabulary, tok_bytes().
 */
#ifndef BACKCAST_TOK_H
#define BACKCAST_TOK_H
#include "gguf.h"

struct tok;

/* Copies what it needs: g may be closed. */
int tok_open(struct tok **ret, const struct gguf *g, struct err *e);
void tok_close(struct tok **t);
size_t tok_bytes(const struct tok *t);

uint32_t tok_n_vocab(const struct tok *t);
const char *tok_family(const struct tok *t);   /* "bpe" | "spm" */
const char *tok_splitter(const struct tok *t); /* "smollm", "gpt-2", ...; "spm" */
int32_t tok_bos(const struct tok *t);          /* -1: none */
int32_t tok_eos(const struct tok *t);          /* -1: none */
bool tok_adds_bos(const struct tok *t);        /* the file asks for BOS at stream index 0 */
/* True for every id that ends a turn: eos, eot, and the known end tokens (<|im_end|>, <|eot_id|>,
 * <|endoftext|> ...). */
bool tok_is_end(const struct tok *t, int32_t id);
/* A control or unknown token: prints as nothing in answers. */
bool tok_is_special(const struct tok *t, int32_t id);
/* The id of a piece exactly as stored in the file; -1: none. */
int32_t tok_find(const struct tok *t, const char *piece, size_t len);

/* Encodes bytes, any bytes: what is not UTF-8 is encoded byte by byte, never refused or lost. (A
 * byte that the vocabulary has no token for becomes U+FFFD or the unknown token.) Nothing is added
 * in front. parse_special: the text of special tokens becomes their ids; else it is ordinary text.
 * *ret is malloced (caller frees), *ret_n its length. BC_EINVALID: len > TOK_TEXT_MAX. */
#define TOK_TEXT_MAX (64u << 20)
struct tok_flags {
    bool parse_special;
    bool no_prefix; /* a continued text: no space prefix even if the file asks for one */
};
int tok_encode(const struct tok *t, const char *text, size_t len, struct tok_flags flags,
               int32_t **ret, size_t *ret_n, struct err *e);

/* The same for a text in parts, as one text: merges run across the edges, but a special token is
 * recognised only inside a part that has parse_special. */
struct tok_part {
    const char *s;
    size_t len;
    bool parse_special;
};
int tok_encode_parts(const struct tok *t, const struct tok_part *parts, size_t n, bool no_prefix,
                     int32_t **ret, size_t *ret_n, struct err *e);

/* The bytes of one token, in *ret (points into tok, not NUL-terminated). Special tokens give their
 * text. id must be < n_vocab. SentencePiece: U+2581 has become a space already. */
struct gguf_str tok_piece(const struct tok *t, int32_t id);

/* Streams ids as whole UTF-8 characters. Bytes of an unfinished character wait (at most 3) for the
 * next token; bytes that can never become a character are passed through as they are once that is
 * certain, so that the concatenation is byte-exact. */
struct detok {
    unsigned char wait[8];
    uint8_t n_wait;
    bool strip_space; /* SentencePiece: drop the one leading space of the first piece */
};
void detok_start(struct detok *d, const struct tok *t, bool at_stream_start);
/* Appends to buf (cap bytes) what can be shown after `id` and returns the count; special: print
 * special tokens' text too, else they print as nothing. cap must be >= 8 + length of the longest
 * piece (tok_piece_max). */
size_t detok_push(struct detok *d, const struct tok *t, int32_t id, bool special, char *buf,
                  size_t cap);
/* The waiting bytes, as they are: at the end of an answer. */
size_t detok_flush(struct detok *d, char *buf, size_t cap);
size_t tok_piece_max(const struct tok *t);
/* Bytes of text that one token stands for at most: n bytes take no fewer than n / this tokens. */
size_t tok_bytes_max(const struct tok *t);
#endif
