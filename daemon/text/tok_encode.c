/* tok_encode.c: text to ids.
 *
 *   text -> special tokens | raw text    by longest match from the left
 *   raw  -> words                        BPE: the splitter, around bytes that are not UTF-8;
 *                                        SentencePiece: before spaces
 *   word -> ids                          a small cache, else tok_merge.c
 *
 * Words repeat so much that the cache (direct-mapped, 256 KiB, gone at the end of the call) carries
 * most of the speed. Words longer than TOK_WORD_MAX are cut there: nothing is lost, and a hostile
 * prompt cannot make one merge huge.
 */
#include "tok_internal.h"
#include "utf8.h"
#include <stdlib.h>
#include <string.h>

#define CACHE_SLOTS 4096u /* a power of two */
#define CACHE_KEY_MAX 26u
#define CACHE_IDS_MAX 9u
#define CACHE_TEXT_MIN 512u /* shorter texts are not worth it */

struct slot {
    uint8_t len, n; /* len 0: empty */
    char key[CACHE_KEY_MAX];
    int32_t ids[CACHE_IDS_MAX];
};

struct enc {
    const struct tok *t;
    struct err *e;
    struct ids out;
    struct merger merger;
    struct split *split;
    struct slot *cache; /* NULL: none */
    char *spell;        /* SentencePiece: a word with its spaces as U+2581 */
    size_t spell_cap;
};

/* BPE files that say so take a word whole if it is a piece; -1: it is none. */
static int32_t whole_word(const struct tok *t, const char *s, size_t n)
{
    char buf[2 * TOK_PIECE_MAX];
    if (t->spm || !t->splitter->whole_words || n > t->stored_max)
        return -1;
    int32_t id = index_find(t, buf, alphabet_encode(s, n, buf));
    return id >= 0 && type_merges(t->types[id]) ? id : -1;
}

static int word_ids(struct enc *x, const char *s, size_t n)
{
    int32_t id = whole_word(x->t, s, n);
    return id >= 0 ? ids_add(&x->out, id, x->e) : merge_word(&x->merger, s, n, &x->out, x->e);
}

static int cached_word(struct enc *x, const char *s, size_t n)
{
    if (x->cache == NULL || n > CACHE_KEY_MAX)
        return word_ids(x, s, n);
    struct slot *c = &x->cache[tok_hash(x->t->seed, s, n) & (CACHE_SLOTS - 1)];
    int rc = BC_OK;
    if (c->len == n && memcmp(c->key, s, n) == 0) {
        for (unsigned i = 0; i < c->n && rc == BC_OK; i++)
            rc = ids_add(&x->out, c->ids[i], x->e);
        return rc;
    }
    size_t before = x->out.n;
    rc = word_ids(x, s, n);
    size_t count = x->out.n - before;
    if (rc == BC_OK && count <= CACHE_IDS_MAX) {
        c->len = (uint8_t)n;
        c->n = (uint8_t)count;
        memcpy(c->key, s, n);
        memcpy(c->ids, x->out.v + before, count * sizeof *c->ids);
    }
    return rc;
}

/* How much of s to take as one word: all, or TOK_WORD_MAX less a character that would be cut. */
static size_t word_cut(const char *s, size_t n)
{
    size_t cut = TOK_WORD_MAX;
    if (n <= TOK_WORD_MAX)
        return n;
    while (cut > TOK_WORD_MAX - 4 && ((uint8_t)s[cut] & 0xc0) == 0x80)
        cut--;
    return cut;
}

static int bpe_word(void *arg, const char *s, size_t n)
{
    int rc = BC_OK;
    while (n > 0 && rc == BC_OK) {
        size_t len = word_cut(s, n);
        rc = cached_word(arg, s, len);
        s += len;
        n -= len;
    }
    return rc;
}

/* Bytes that are not UTF-8 are words of their own: an expression never sees them, and none is lost.
 */
static int bpe_raw(struct enc *x, const char *s, size_t n)
{
    const uint8_t *p = (const uint8_t *)s;
    int rc = BC_OK;
    for (size_t at = 0; at < n && rc == BC_OK;) {
        size_t valid = utf8_valid(p + at, n - at), bad = 0;
        if (valid > 0)
            rc = split_text(x->split, s + at, valid, bpe_word, x, x->e);
        at += valid;
        while (at + bad < n && utf8_step(p + at + bad, n - at - bad) <= 0)
            bad++;
        if (bad > 0 && rc == BC_OK)
            rc = bpe_word(x, s + at, bad);
        at += bad;
    }
    return rc;
}

/* Bytes of a space at s: 1 or 3 (U+2581 itself), 0: no space. */
static size_t space_len(const char *s, size_t n)
{
    if (s[0] == ' ')
        return 1;
    return n >= SPM_SPACE_LEN && memcmp(s, SPM_SPACE, SPM_SPACE_LEN) == 0 ? SPM_SPACE_LEN : 0;
}

/* Spaces, then everything before the next space; the whole text where pieces cross spaces. */
static size_t spm_word_len(const struct tok *t, const char *s, size_t n)
{
    size_t at = 0, len;
    if (!t->spm_words)
        return word_cut(s, n);
    while (at < n && (len = space_len(s + at, n - at)) > 0)
        at += len;
    while (at < n && space_len(s + at, n - at) == 0)
        at++;
    return at > TOK_WORD_MAX ? word_cut(s, n) : at;
}

static int spm_word(struct enc *x, const char *s, size_t n, bool prefix)
{
    size_t need = SPM_SPACE_LEN * (n + 1), out = 0;
    if (need > x->spell_cap) {
        char *p = realloc(x->spell, need);
        if (p == NULL)
            return err_nomem(x->e, need);
        x->spell = p;
        x->spell_cap = need;
    }
    for (size_t i = 0; i < n + prefix; i++) {
        if ((prefix && i == 0) || s[i - prefix] == ' ') {
            memcpy(x->spell + out, SPM_SPACE, SPM_SPACE_LEN);
            out += SPM_SPACE_LEN;
        } else {
            x->spell[out++] = s[i - prefix];
        }
    }
    return cached_word(x, x->spell, out);
}

static int spm_raw(struct enc *x, const char *s, size_t n, bool prefix)
{
    int rc = BC_OK;
    while (n > 0 && rc == BC_OK) {
        size_t len = spm_word_len(x->t, s, n);
        rc = spm_word(x, s, len, prefix);
        prefix = false;
        s += len;
        n -= len;
    }
    return rc;
}

static int raw(struct enc *x, const char *s, size_t n, bool prefix)
{
    if (n == 0)
        return BC_OK;
    return x->t->spm ? spm_raw(x, s, n, prefix && x->t->space_prefix) : bpe_raw(x, s, n);
}

/* Special tokens are looked for inside each part alone; raw text runs on from one part into the
 * next. */
static int encode(struct enc *x, const char *text, const struct tok_part *parts, size_t n_parts,
                  bool prefix)
{
    size_t start = 0, at = 0, end = 0;
    int rc = BC_OK;
    for (size_t i = 0; i < n_parts; i++) {
        const struct specials *sp = parts[i].parse_special ? &x->t->all : &x->t->user;
        end += parts[i].len;
        while (at < end && rc == BC_OK) {
            uint8_t b = (uint8_t)text[at];
            int32_t id = sp->first[b] == sp->first[b + 1]
                             ? -1
                             : special_match(x->t, sp, text + at, end - at);
            if (id < 0) {
                at++;
                continue;
            }
            rc = raw(x, text + start, at - start, prefix);
            if (rc == BC_OK)
                rc = ids_add(&x->out, id, x->e);
            prefix = true; /* a special token starts a fragment */
            at += pack_at(&x->t->pieces, (uint32_t)id).len;
            start = at;
        }
    }
    return rc == BC_OK ? raw(x, text + start, end - start, prefix) : rc;
}

/* parts are contiguous at text, len bytes in all. */
static int encode_all(const struct tok *t, const char *text, size_t len,
                      const struct tok_part *parts, size_t n_parts, bool prefix, struct ids *ret,
                      struct err *e)
{
    struct enc x = {.t = t, .e = e, .merger.t = t};
    int rc = BC_OK;
    x.out.cap = len / 3 + 16;
    x.out.v = malloc(x.out.cap * sizeof *x.out.v);
    if (x.out.v == NULL) {
        rc = err_nomem(e, x.out.cap * sizeof *x.out.v);
        goto out;
    }
    if (len >= CACHE_TEXT_MIN)
        x.cache = calloc(CACHE_SLOTS, sizeof *x.cache); /* without it: slower, not wrong */
    if (!t->spm)
        rc = split_open(&x.split, t, e);
    if (rc == BC_OK)
        rc = encode(&x, text, parts, n_parts, prefix);
    if (rc == BC_OK) {
        *ret = x.out;
        x.out.v = NULL;
    }
out:
    free(x.out.v);
    free(x.cache);
    free(x.spell);
    split_close(&x.split);
    merger_free(&x.merger);
    return rc;
}

static int too_long(size_t len, struct err *e)
{
    return err_set(e, BC_EINVALID, "text", "a text of %zu bytes, at most %u are taken", len,
                   TOK_TEXT_MAX);
}

int tok_encode(const struct tok *t, const char *text, size_t len, struct tok_flags flags,
               int32_t **ret, size_t *ret_n, struct err *e)
{
    MAGIC_OK(t, TOK_MAGIC);
    bc_assert(text != NULL || len == 0);
    struct ids ids;
    struct tok_part part = {text, len, flags.parse_special};
    if (len > TOK_TEXT_MAX)
        return too_long(len, e);
    int rc = encode_all(t, text, len, &part, 1, !flags.no_prefix, &ids, e);
    if (rc != BC_OK)
        return rc;
    *ret = ids.v;
    *ret_n = ids.n;
    return BC_OK;
}

int tok_encode_parts(const struct tok *t, const struct tok_part *parts, size_t n, bool no_prefix,
                     int32_t **ret, size_t *ret_n, struct err *e)
{
    MAGIC_OK(t, TOK_MAGIC);
    size_t len = 0, at = 0;
    struct ids ids;
    for (size_t i = 0; i < n; i++)
        if (!size_add(len, parts[i].len, &len) || len > TOK_TEXT_MAX)
            return too_long(len, e);
    char *text = malloc(len + 1);
    if (text == NULL)
        return err_nomem(e, len + 1);
    for (size_t i = 0; i < n; i++) {
        if (parts[i].len > 0)
            memcpy(text + at, parts[i].s, parts[i].len);
        at += parts[i].len;
    }
    int rc = encode_all(t, text, len, parts, n, !no_prefix, &ids, e);
    free(text);
    if (rc != BC_OK)
        return rc;
    *ret = ids.v;
    *ret_n = ids.n;
    return BC_OK;
}
