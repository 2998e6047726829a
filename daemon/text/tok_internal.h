/* tok_internal.h: the vocabulary as tok*.c share it.
 *
 *   tok.c          opens and checks a vocabulary, answers about ids
 *   tok_index.c    piece, merge and special-token look-ups
 *   tok_alphabet.c the byte alphabet of byte-level BPE files
 *   tok_split.c    text to words, by the file's splitter
 *   tok_merge.c    word to ids: the pair-merging loop
 *   tok_encode.c   text to ids: special tokens, words, cache
 *   detok.c        ids to text
 */
#ifndef BACKCAST_TOK_INTERNAL_H
#define BACKCAST_TOK_INTERNAL_H
#define PCRE2_CODE_UNIT_WIDTH 8
#include "gguf_internal.h"
#include "tok.h"
#include <pcre2.h>

#define TOK_MAGIC 0x70c0de1u
#define TOK_VOCAB_MAX (1u << 22)
#define TOK_PIECE_MAX 4096u /* bytes of one piece, as stored */
#define TOK_STAGES_MAX 6
#define TOK_WORD_MAX (1u << 20)  /* longer words are cut: bounds the memory of one merge */
#define SPM_SPACE "\xe2\x96\x81" /* U+2581 */
#define SPM_SPACE_LEN 3u

/* tokenizer.ggml.token_type; 0 in a file counts as TYPE_NORMAL */
enum tok_type {
    TYPE_NORMAL = 1,
    TYPE_UNKNOWN,
    TYPE_CONTROL,
    TYPE_USER,
    TYPE_UNUSED,
    TYPE_BYTE,
};

/* Strings packed one after the other: string i is bytes[start[i]] .. bytes[start[i + 1]]. */
struct pack {
    char *bytes;
    uint32_t *start; /* n + 1 of them */
};

struct merge {
    uint32_t left, right; /* ids; left = UINT32_MAX: an empty slot */
    uint32_t rank;
    int32_t id; /* of the merged piece */
};

/* Special tokens sorted by their bytes, so that a common prefix is a range. */
struct specials {
    int32_t *ids;
    uint32_t n;
    uint32_t first[257]; /* ids[first[b]] .. ids[first[b + 1]] start with byte b */
};

struct splitter {
    const char *name;
    bool whole_words; /* a word that is a piece is that piece, whatever the merges say */
    bool adds_bos;    /* if the file does not say */
    const char *const *
        stages; /* regular expressions, NULL at the end; each splits the pieces of the one before */
};

struct tok {
    unsigned magic;
    bool spm;
    bool adds_bos;
    bool space_prefix; /* SentencePiece: text starts with a space that is not there */
    bool spm_words;    /* no piece has a space behind a letter: text can be cut before spaces */
    uint32_t n_vocab;
    int32_t bos, eos, unk;
    struct pack stored; /* as in the file */
    struct pack pieces; /* as in text */
    uint8_t *types;     /* enum tok_type */
    uint8_t *ends;      /* 1: ends a turn */
    size_t piece_max, stored_max;
    uint64_t seed; /* of both hash tables: a file cannot know it, so it cannot make them slow */
    int32_t *index;
    uint32_t index_mask;
    struct specials all, user; /* user: those that message text may contain */
    int32_t byte_id[256];      /* -1: no token for this byte */
    /* BPE */
    const struct splitter *splitter;
    pcre2_code *stages[TOK_STAGES_MAX];
    bool jit[TOK_STAGES_MAX];
    unsigned n_stages;
    struct merge *merges;
    uint32_t merges_mask;
    int32_t missing[3]; /* what stands for a byte without a token */
    uint32_t n_missing;
    /* SentencePiece */
    float *scores;
    size_t bytes;
};

static inline struct gguf_str pack_at(const struct pack *p, uint32_t i)
{
    return (struct gguf_str){p->bytes + p->start[i], p->start[i + 1] - p->start[i]};
}

/* May stand in the result of merges: text cannot become a control or byte token by spelling it. */
static inline bool type_merges(uint8_t type)
{
    return type == TYPE_NORMAL || type == TYPE_USER || type == TYPE_UNUSED;
}

/* ---- tok_index.c */
uint64_t tok_hash(uint64_t seed, const void *p, size_t n);
int index_build(struct tok *t, struct err *e);
int32_t index_find(const struct tok *t, const char *s, size_t n); /* by stored piece; -1 */
int merges_build(struct tok *t, const struct gguf *g, struct err *e);
const struct merge *merge_find(const struct tok *t, int32_t left, int32_t right); /* NULL: none */
int specials_build(struct tok *t, struct specials *ret, bool user_only, struct err *e);
/* The longest special token at s (n bytes left); -1: none. */
int32_t special_match(const struct tok *t, const struct specials *sp, const char *s, size_t n);

/* ---- tok_alphabet.c: the printable stand-ins of bytes in byte-level BPE files */
/* Encodes n bytes; ret has room for 2 n. Returns the length. */
size_t alphabet_encode(const char *s, size_t n, char *ret);
/* Decodes; ret has room for n. False: a character is no stand-in (ret is then garbage). */
bool alphabet_decode(const char *s, size_t n, char *ret, size_t *ret_n);

/* ---- tok_split.c */
const struct splitter *splitter_find(const char *name, size_t len); /* NULL: unknown */
int splitter_compile(struct tok *t, struct err *e);
struct split; /* scratch of one encode call */
int split_open(struct split **ret, const struct tok *t, struct err *e);
void split_close(struct split **s);
/* Calls word(arg, ...) for every word of valid UTF-8 text, in order; stops at its first error. */
int split_text(struct split *s, const char *text, size_t n,
               int (*word)(void *, const char *, size_t), void *arg, struct err *e);

/* ---- tok_merge.c */
struct merger {
    const struct tok *t;
    struct symbol *syms;
    struct pair *heap;
    size_t sym_cap, heap_cap, heap_n;
};
struct ids {
    int32_t *v;
    size_t n, cap;
};
int ids_add(struct ids *ids, int32_t id, struct err *e);
/* Appends the ids of one word of at most 3 * TOK_WORD_MAX + 3 bytes. */
int merge_word(struct merger *m, const char *s, size_t n, struct ids *ids, struct err *e);
void merger_free(struct merger *m);
#endif
