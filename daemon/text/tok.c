/* tok.c: opens a vocabulary from the GGUF keys tokenizer.ggml.*, checks all of it, and answers
 * about ids.
 *
 *   model             "gpt2" (byte-level BPE: merges, pre) or "llama" (SentencePiece-style: scores,
 *                     byte tokens)
 *   tokens            the pieces, by id
 *   token_type        enum tok_type; all normal if absent
 *   X_token_id        bos, eos, eot, eom, unknown
 *   add_bos_token, add_space_prefix
 *
 * Files are careless about the types of turn markers ("<|im_end|>" as a normal or user-defined
 * piece), so the known ones count as control tokens whatever the file says: message text must never
 * become one.
 */
#include "log.h"
#include "tok_internal.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#define KEY(name) "tokenizer.ggml." name

/* Control tokens by their text. end: generation stops there. */
static const struct {
    const char *text;
    bool end;
} markers[] = {
    {"<|im_start|>", false},
    {"<|im_end|>", true},
    {"<|endoftext|>", true},
    {"<|end_of_text|>", true},
    {"<|begin_of_text|>", false},
    {"<|start_header_id|>", false},
    {"<|end_header_id|>", false},
    {"<|eot_id|>", true},
    {"<|eom_id|>", true},
    {"<|end|>", true},
    {"<|EOT|>", true},
    {"<end_of_turn>", true},
    {"<start_of_turn>", false},
    {"<\xef\xbd\x9cUser\xef\xbd\x9c>", false},
    {"<\xef\xbd\x9c"
     "Assistant\xef\xbd\x9c>",
     false},
    {"<\xef\xbd\x9c"
     "begin\xe2\x96\x81of\xe2\x96\x81sentence\xef\xbd\x9c>",
     false},
    {"<\xef\xbd\x9c"
     "end\xe2\x96\x81of\xe2\x96\x81sentence\xef\xbd\x9c>",
     true},
};

static const struct gguf_key *array_key(const struct gguf *g, const char *key, uint64_t n,
                                        int *ret_rc, struct err *e)
{
    const struct gguf_key *k = gguf_key_find(g, key);
    if (k != NULL && (k->kind != GGUF_ARRAY || k->n != n)) {
        *ret_rc =
            err_set(e, BC_ECORRUPT, key, "%s is not an array of %llu values, one for each token",
                    key, (unsigned long long)n);
        return NULL;
    }
    return k;
}

static int open_model(struct tok *t, const struct gguf *g, struct err *e)
{
    struct gguf_str s;
    int rc = gguf_get_str(g, KEY("model"), &s, e);
    if (rc != BC_OK)
        return rc;
    if (s.len == 5 && memcmp(s.s, "llama", 5) == 0)
        t->spm = true;
    else if (s.len != 4 || memcmp(s.s, "gpt2", 4) != 0)
        return err_set(e, BC_EUNSUPPORTED, KEY("model"),
                       KEY("model") " is \"%.*s\"; \"gpt2\" and \"llama\" are supported",
                       (int)BC_MIN(s.len, (size_t)60), s.s);
    if (t->spm)
        return BC_OK;
    rc = gguf_get_str(g, KEY("pre"), &s, e);
    if (rc == BC_ENOTFOUND) {
        log_warn("tok", "the file does not say how its text is split (" KEY(
                            "pre") "): words are "
                                   "cut the default way, and answers may suffer");
        s = (struct gguf_str){"default", 7};
    } else if (rc != BC_OK) {
        return rc;
    }
    t->splitter = splitter_find(s.s, s.len);
    if (t->splitter == NULL)
        return err_set(e, BC_EUNSUPPORTED, KEY("pre"),
                       KEY("pre") " is \"%.*s\", a splitter that is not known",
                       (int)BC_MIN(s.len, (size_t)60), s.s);
    return splitter_compile(t, e);
}

static int pack_open(struct tok *t, struct pack *p, size_t bytes, struct err *e)
{
    size_t starts = ((size_t)t->n_vocab + 1) * sizeof *p->start;
    p->bytes = malloc(bytes + 1);
    p->start = malloc(starts);
    if (p->bytes == NULL || p->start == NULL)
        return err_nomem(e, bytes + starts);
    t->bytes += bytes + 1 + starts;
    p->start[0] = 0;
    return BC_OK;
}

static int open_tokens(struct tok *t, const struct gguf *g, struct err *e)
{
    const char *key = KEY("tokens");
    const struct gguf_key *k = gguf_key_find(g, key);
    size_t total = 0;
    if (k == NULL)
        return err_set(e, BC_ENOTFOUND, key, "the file has no key %s", key);
    if (k->kind != GGUF_ARRAY || k->elem != GGUF_STRING)
        return err_set(e, BC_ECORRUPT, key, "%s is not an array of strings", key);
    if (k->n == 0 || k->n > TOK_VOCAB_MAX)
        return err_set(e, BC_ECORRUPT, key, "%s has %zu entries, not 1..%u", key, k->n,
                       TOK_VOCAB_MAX);
    t->n_vocab = (uint32_t)k->n;
    for (size_t i = 0; i < k->n; i++) {
        size_t len = gguf_key_str(k, i).len;
        if (len > TOK_PIECE_MAX)
            return err_set(e, BC_ECORRUPT, key, "%s: entry %zu is %zu bytes long, more than %u",
                           key, i, len, TOK_PIECE_MAX);
        total +=
            len; /* at most the file's size; an index of it fits 32 bits: an array is below 4 GiB */
        t->stored_max = BC_MAX(t->stored_max, len);
    }
    int rc = pack_open(t, &t->stored, total, e);
    for (uint32_t i = 0; i < t->n_vocab && rc == BC_OK; i++) {
        struct gguf_str s = gguf_key_str(k, i);
        memcpy(t->stored.bytes + t->stored.start[i], s.s, s.len);
        t->stored.start[i + 1] = t->stored.start[i] + (uint32_t)s.len;
    }
    return rc;
}

/* The known marker that piece i is; -1: none. */
static int marker_of(const struct tok *t, uint32_t i)
{
    struct gguf_str s = pack_at(&t->stored, i);
    if (s.len == 0 || s.s[0] != '<')
        return -1;
    for (size_t m = 0; m < ARRAY_LEN(markers); m++)
        if (strlen(markers[m].text) == s.len && memcmp(markers[m].text, s.s, s.len) == 0)
            return (int)m;
    return -1;
}

static int open_types(struct tok *t, const struct gguf *g, struct err *e)
{
    const char *key = KEY("token_type");
    int rc = BC_OK;
    const struct gguf_key *k = array_key(g, key, t->n_vocab, &rc, e);
    if (rc != BC_OK)
        return rc;
    if (k != NULL && (k->elem == GGUF_STRING || k->elem == GGUF_F32 || k->elem == GGUF_F64))
        return err_set(e, BC_ECORRUPT, key, "%s is not an array of integers", key);
    t->types = malloc(t->n_vocab);
    t->ends = calloc(t->n_vocab, 1);
    if (t->types == NULL || t->ends == NULL)
        return err_nomem(e, t->n_vocab);
    t->bytes += 2 * (size_t)t->n_vocab;
    for (uint32_t i = 0; i < t->n_vocab; i++) {
        int64_t type = k != NULL ? gguf_array_int(g, key, i) : TYPE_NORMAL;
        if (type < 0 || type > TYPE_BYTE)
            return err_set(e, BC_ECORRUPT, key, "%s: entry %u is %lld, not 0..%d", key, i,
                           (long long)type, TYPE_BYTE);
        t->types[i] = type == 0 ? TYPE_NORMAL : (uint8_t)type;
        int m = marker_of(t, i);
        if (m >= 0) {
            t->types[i] = TYPE_CONTROL;
            t->ends[i] = markers[m].end;
        }
    }
    return BC_OK;
}

/* "<0x1F>" exactly; -1: something else. */
static int byte_of(struct gguf_str s)
{
    int v = 0;
    if (s.len != 6 || memcmp(s.s, "<0x", 3) != 0 || s.s[5] != '>')
        return -1;
    for (int i = 3; i < 5; i++) {
        char c = s.s[i];
        int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
        if (digit < 0)
            return -1;
        v = 16 * v + digit;
    }
    return v;
}

/* Piece i as text; ret has room for its stored length. SentencePiece: U+2581 is a space; BPE: the
 * byte alphabet is undone; special and user-defined pieces are text already. */
static int piece_text(const struct tok *t, uint32_t i, char *ret, size_t *ret_n, struct err *e)
{
    struct gguf_str s = pack_at(&t->stored, i);
    int b = t->types[i] == TYPE_BYTE ? byte_of(s) : -1;
    bool plain =
        t->types[i] == TYPE_CONTROL || t->types[i] == TYPE_UNKNOWN || t->types[i] == TYPE_USER;
    *ret_n = 0;
    if (b >= 0) {
        ret[(*ret_n)++] = (char)b;
    } else if (t->spm && t->types[i] == TYPE_BYTE) {
        return err_set(e, BC_ECORRUPT, KEY("tokens"),
                       "token %u is a byte token but not <0x00>..<0xFF>", i);
    } else if (t->spm && (!plain || t->types[i] == TYPE_USER)) {
        for (size_t at = 0; at < s.len;) {
            bool space =
                s.len - at >= SPM_SPACE_LEN && memcmp(s.s + at, SPM_SPACE, SPM_SPACE_LEN) == 0;
            ret[(*ret_n)++] = space ? ' ' : s.s[at];
            at += space ? SPM_SPACE_LEN : 1;
        }
    } else if (plain || !alphabet_decode(s.s, s.len, ret, ret_n)) {
        memcpy(ret, s.s, s.len);
        *ret_n = s.len;
    }
    return BC_OK;
}

static int open_pieces(struct tok *t, struct err *e)
{
    int rc = pack_open(t, &t->pieces, t->stored.start[t->n_vocab], e);
    for (uint32_t i = 0; i < t->n_vocab && rc == BC_OK; i++) {
        size_t n = 0;
        uint32_t at = t->pieces.start[i];
        rc = piece_text(t, i, t->pieces.bytes + at, &n, e);
        t->pieces.start[i + 1] = at + (uint32_t)n;
        t->piece_max = BC_MAX(t->piece_max, n);
    }
    return rc;
}

/* An id key: absent leaves *ret at -1; present it must be below the vocabulary's size. */
static int open_id(const struct tok *t, const struct gguf *g, const char *key, int32_t *ret,
                   struct err *e)
{
    uint32_t id;
    int rc = gguf_get_u32(g, key, &id, e);
    *ret = -1;
    if (rc == BC_ENOTFOUND)
        return BC_OK;
    if (rc != BC_OK)
        return rc;
    if (id >= t->n_vocab)
        return err_set(e, BC_ECORRUPT, key, "%s is %u, but the vocabulary has %u tokens", key, id,
                       t->n_vocab);
    *ret = (int32_t)id;
    return BC_OK;
}

static int open_ids(struct tok *t, const struct gguf *g, struct err *e)
{
    int32_t ends[3] = {-1, -1, -1};
    int rc = open_id(t, g, KEY("bos_token_id"), &t->bos, e);
    if (rc == BC_OK)
        rc = open_id(t, g, KEY("eos_token_id"), &ends[0], e);
    if (rc == BC_OK)
        rc = open_id(t, g, KEY("eot_token_id"), &ends[1], e);
    if (rc == BC_OK)
        rc = open_id(t, g, KEY("eom_token_id"), &ends[2], e);
    if (rc == BC_OK)
        rc = open_id(t, g, KEY("unknown_token_id"), &t->unk, e);
    if (rc != BC_OK)
        return rc;
    t->eos = ends[0];
    for (unsigned i = 0; i < ARRAY_LEN(ends); i++)
        if (ends[i] >= 0)
            t->ends[ends[i]] = 1;
    t->adds_bos = t->spm || t->splitter->adds_bos;
    rc = gguf_get_bool(g, KEY("add_bos_token"), &t->adds_bos, e);
    if (rc != BC_OK && rc != BC_ENOTFOUND)
        return rc;
    t->adds_bos = t->adds_bos && t->bos >= 0;
    t->space_prefix = t->spm;
    rc = gguf_get_bool(g, KEY("add_space_prefix"), &t->space_prefix, e);
    return rc == BC_ENOTFOUND ? BC_OK : rc;
}

static int open_scores(struct tok *t, const struct gguf *g, struct err *e)
{
    const char *key = KEY("scores");
    int rc = BC_OK;
    const struct gguf_key *k = array_key(g, key, t->n_vocab, &rc, e);
    if (rc != BC_OK)
        return rc;
    if (k == NULL || k->elem != GGUF_F32)
        return err_set(e, BC_ECORRUPT, key,
                       "%s is not there or not an array of f32, which its tokenizer needs", key);
    t->scores = malloc(t->n_vocab * sizeof *t->scores);
    if (t->scores == NULL)
        return err_nomem(e, t->n_vocab * sizeof *t->scores);
    t->bytes += t->n_vocab * sizeof *t->scores;
    memcpy(t->scores, k->value, t->n_vocab * sizeof *t->scores);
    for (uint32_t i = 0; i < t->n_vocab; i++)
        if (!isfinite(t->scores[i]))
            return err_set(e, BC_ECORRUPT, key, "%s: entry %u is not finite", key, i);
    return BC_OK;
}

/* Whether any piece has a space behind a letter; if none, no merge crosses the edge before a space.
 */
static bool crosses_space(const struct tok *t, uint32_t i)
{
    struct gguf_str s = pack_at(&t->stored, i);
    bool letter = false;
    for (size_t at = 0; at < s.len;) {
        if (s.len - at >= SPM_SPACE_LEN && memcmp(s.s + at, SPM_SPACE, SPM_SPACE_LEN) == 0) {
            if (letter)
                return true;
            at += SPM_SPACE_LEN;
        } else {
            letter = true;
            at++;
        }
    }
    return false;
}

static int open_spm(struct tok *t, const struct gguf *g, struct err *e)
{
    int rc = open_scores(t, g, e);
    t->spm_words = true;
    for (uint32_t i = 0; i < t->n_vocab && rc == BC_OK; i++) {
        if (t->types[i] == TYPE_BYTE)
            t->byte_id[byte_of(pack_at(&t->stored, i))] = (int32_t)i;
        else if (type_merges(t->types[i]) && crosses_space(t, i))
            t->spm_words = false;
    }
    return rc;
}

/* A byte's token, if its text is that byte: in some files the stand-in of a byte that no UTF-8 has
 * is a user-defined token that means the stand-in itself. */
static int open_bpe(struct tok *t, const struct gguf *g, struct err *e)
{
    for (unsigned b = 0; b < 256; b++) {
        char byte = (char)b, name[2];
        int32_t id = index_find(t, name, alphabet_encode(&byte, 1, name));
        if (id < 0 || !type_merges(t->types[id]))
            continue;
        struct gguf_str s = pack_at(&t->pieces, (uint32_t)id);
        if (s.len == 1 && (uint8_t)s.s[0] == b)
            t->byte_id[b] = id;
    }
    return merges_build(t, g, e);
}

/* What stands for a byte that has no token: BPE: U+FFFD, if that can be spelt; else the unknown
 * token. */
static int open_missing(struct tok *t, struct err *e)
{
    unsigned lack = 256;
    struct merger m = {.t = t};
    struct ids ids = {NULL, 0, 0};
    int rc = BC_OK;
    for (unsigned b = 0; b < 256 && lack == 256; b++)
        if (t->byte_id[b] < 0)
            lack = b;
    if (lack == 256)
        return BC_OK;
    if (!t->spm && t->byte_id[0xef] >= 0 && t->byte_id[0xbf] >= 0 && t->byte_id[0xbd] >= 0) {
        rc = merge_word(&m, "\xef\xbf\xbd", 3, &ids, e);
    } else if (t->unk >= 0) {
        rc = ids_add(&ids, t->unk, e);
    } else {
        rc = err_set(e, BC_ECORRUPT, KEY("tokens"),
                     "the vocabulary has no token for byte 0x%02x and none for unknown text", lack);
    }
    bc_assert(rc != BC_OK || (ids.n >= 1 && ids.n <= ARRAY_LEN(t->missing)));
    if (rc == BC_OK) {
        memcpy(t->missing, ids.v, ids.n * sizeof *ids.v);
        t->n_missing = (uint32_t)ids.n;
    }
    free(ids.v);
    merger_free(&m);
    return rc;
}

static uint64_t random_seed(const void *salt)
{
    uint64_t seed = 0;
    struct timespec now;
    if (getrandom(&seed, sizeof seed, GRND_NONBLOCK) == (ssize_t)sizeof seed)
        return seed;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)(uintptr_t)salt ^ (uint64_t)now.tv_nsec << 32 ^ (uint64_t)now.tv_sec;
}

int tok_open(struct tok **ret, const struct gguf *g, struct err *e)
{
    struct tok *t = calloc(1, sizeof *t);
    if (t == NULL)
        return err_nomem(e, sizeof *t);
    t->magic = TOK_MAGIC;
    t->bytes = sizeof *t;
    t->seed = random_seed(t);
    memset(t->byte_id, 0xff, sizeof t->byte_id);
    int rc = open_model(t, g, e);
    if (rc == BC_OK)
        rc = open_tokens(t, g, e);
    if (rc == BC_OK)
        rc = open_types(t, g, e);
    if (rc == BC_OK)
        rc = open_pieces(t, e);
    if (rc == BC_OK)
        rc = open_ids(t, g, e);
    if (rc == BC_OK)
        rc = index_build(t, e);
    if (rc == BC_OK)
        rc = t->spm ? open_spm(t, g, e) : open_bpe(t, g, e);
    if (rc == BC_OK)
        rc = open_missing(t, e);
    if (rc == BC_OK)
        rc = specials_build(t, &t->all, false, e);
    if (rc == BC_OK)
        rc = specials_build(t, &t->user, true, e);
    if (gguf_intact(g, NULL) != BC_OK)
        rc = gguf_intact(g, e); /* the true reason, whatever failed first */
    if (rc != BC_OK) {
        tok_close(&t);
        return rc;
    }
    *ret = t;
    return BC_OK;
}

void tok_close(struct tok **tp)
{
    struct tok *t = *tp;
    if (t == NULL)
        return;
    MAGIC_OK(t, TOK_MAGIC);
    free(t->stored.bytes);
    free(t->stored.start);
    free(t->pieces.bytes);
    free(t->pieces.start);
    free(t->types);
    free(t->ends);
    free(t->index);
    free(t->all.ids);
    free(t->user.ids);
    for (unsigned i = 0; i < TOK_STAGES_MAX; i++)
        pcre2_code_free(t->stages[i]);
    free(t->merges);
    free(t->scores);
    t->magic = 0;
    free(t);
    *tp = NULL;
}

size_t tok_bytes(const struct tok *t)
{
    MAGIC_OK(t, TOK_MAGIC);
    return t->bytes;
}

uint32_t tok_n_vocab(const struct tok *t)
{
    MAGIC_OK(t, TOK_MAGIC);
    return t->n_vocab;
}

const char *tok_family(const struct tok *t)
{
    MAGIC_OK(t, TOK_MAGIC);
    return t->spm ? "spm" : "bpe";
}

const char *tok_splitter(const struct tok *t)
{
    MAGIC_OK(t, TOK_MAGIC);
    return t->spm ? "spm" : t->splitter->name;
}

int32_t tok_bos(const struct tok *t)
{
    MAGIC_OK(t, TOK_MAGIC);
    return t->bos;
}

int32_t tok_eos(const struct tok *t)
{
    MAGIC_OK(t, TOK_MAGIC);
    return t->eos;
}

bool tok_adds_bos(const struct tok *t)
{
    MAGIC_OK(t, TOK_MAGIC);
    return t->adds_bos;
}

static uint32_t id_check(const struct tok *t, int32_t id)
{
    MAGIC_OK(t, TOK_MAGIC);
    bc_assert(id >= 0 && (uint32_t)id < t->n_vocab);
    return (uint32_t)id;
}

bool tok_is_end(const struct tok *t, int32_t id)
{
    return t->ends[id_check(t, id)] != 0;
}

bool tok_is_special(const struct tok *t, int32_t id)
{
    uint8_t type = t->types[id_check(t, id)];
    return type == TYPE_CONTROL || type == TYPE_UNKNOWN;
}

int32_t tok_find(const struct tok *t, const char *piece, size_t len)
{
    MAGIC_OK(t, TOK_MAGIC);
    return index_find(t, piece, len);
}

struct gguf_str tok_piece(const struct tok *t, int32_t id)
{
    return pack_at(&t->pieces, id_check(t, id));
}

size_t tok_bytes_max(const struct tok *t)
{
    MAGIC_OK(t, TOK_MAGIC);
    return BC_MAX(t->stored_max, (size_t)4); /* as stored no byte is less than one; 4: an unknown
                                                character */
}

size_t tok_piece_max(const struct tok *t)
{
    MAGIC_OK(t, TOK_MAGIC);
    return t->piece_max;
}
