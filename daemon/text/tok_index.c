/* tok_index.c: three look-ups over a vocabulary.
 *
 *   piece -> id              open addressing, seeded hash
 *   (left, right) -> merge   the same
 *   text -> special token    special tokens sorted by bytes: each byte of text narrows a range of
 *                            them, and the last one that ends on the way is the longest match. No
 *                            special token costs more than its length.
 */
#include "tok_internal.h"
#include <stdlib.h>
#include <string.h>

#define K1 0x9e3779b97f4a7c15u
#define K2 0xd6e8feb86659fd93u

static uint64_t mix(uint64_t a, uint64_t b)
{
    unsigned __int128 p = (unsigned __int128)a * b;
    return (uint64_t)p ^ (uint64_t)(p >> 64);
}

uint64_t tok_hash(uint64_t seed, const void *p, size_t n)
{
    const uint8_t *b = p;
    uint64_t h = seed ^ n * K1, w;
    for (; n >= 8; b += 8, n -= 8) {
        memcpy(&w, b, 8);
        h = mix(h ^ w, K2);
    }
    w = 0;
    memcpy(&w, b, n);
    return mix(h ^ w, K1 ^ seed);
}

/* A power of two that leaves at least half of the slots empty. */
static size_t slots_for(size_t n)
{
    size_t slots = 16;
    while (slots < 2 * n)
        slots *= 2;
    return slots;
}

/* Where stored piece s is, or the empty slot where it would go. */
static uint32_t index_slot(const struct tok *t, const char *s, size_t n)
{
    uint32_t at = (uint32_t)tok_hash(t->seed, s, n) & t->index_mask;
    for (;; at = (at + 1) & t->index_mask) {
        if (t->index[at] < 0)
            return at;
        struct gguf_str have = pack_at(&t->stored, (uint32_t)t->index[at]);
        if (have.len == n && memcmp(have.s, s, n) == 0)
            return at;
    }
}

/* The same text twice: what merges may produce wins, then the later one. */
int index_build(struct tok *t, struct err *e)
{
    size_t slots = slots_for(t->n_vocab);
    t->index = malloc(slots * sizeof *t->index);
    if (t->index == NULL)
        return err_nomem(e, slots * sizeof *t->index);
    t->bytes += slots * sizeof *t->index;
    memset(t->index, 0xff, slots * sizeof *t->index);
    t->index_mask = (uint32_t)slots - 1;
    for (uint32_t i = 0; i < t->n_vocab; i++) {
        struct gguf_str s = pack_at(&t->stored, i);
        if (s.len == 0)
            continue;
        uint32_t at = index_slot(t, s.s, s.len);
        int32_t was = t->index[at];
        if (was < 0 || type_merges(t->types[i]) || !type_merges(t->types[was]))
            t->index[at] = (int32_t)i;
    }
    return BC_OK;
}

int32_t index_find(const struct tok *t, const char *s, size_t n)
{
    return n == 0 || n > t->stored_max ? -1 : t->index[index_slot(t, s, n)];
}

static uint32_t merge_slot(const struct tok *t, uint32_t left, uint32_t right)
{
    uint64_t pair = (uint64_t)left << 32 | right;
    uint32_t at = (uint32_t)mix(pair ^ t->seed, K1) & t->merges_mask;
    while (t->merges[at].left != UINT32_MAX &&
           (t->merges[at].left != left || t->merges[at].right != right))
        at = (at + 1) & t->merges_mask;
    return at;
}

const struct merge *merge_find(const struct tok *t, int32_t left, int32_t right)
{
    if (left < 0 || right < 0)
        return NULL;
    const struct merge *m = &t->merges[merge_slot(t, (uint32_t)left, (uint32_t)right)];
    return m->left == UINT32_MAX ? NULL : m;
}

static int32_t find_mergeable(const struct tok *t, const char *s, size_t n)
{
    int32_t id = index_find(t, s, n);
    return id >= 0 && type_merges(t->types[id]) ? id : -1;
}

/* "left right": the first space behind the first byte parts them. joined: scratch of stored_max
 * bytes. */
static int merge_add(struct tok *t, struct gguf_str s, size_t rank, char *joined, struct err *e)
{
    const char *key = "tokenizer.ggml.merges";
    const char *gap = s.len > 1 ? memchr(s.s + 1, ' ', s.len - 1) : NULL;
    if (gap == NULL)
        return err_set(e, BC_ECORRUPT, key, "%s: entry %zu is not two pieces with a space between",
                       key, rank);
    size_t left_len = (size_t)(gap - s.s), right_len = s.len - left_len - 1;
    int32_t left = find_mergeable(t, s.s, left_len);
    int32_t right = find_mergeable(t, gap + 1, right_len);
    int32_t id = -1;
    if (left >= 0 && right >= 0 && left_len + right_len <= t->stored_max) {
        memcpy(joined, s.s, left_len);
        memcpy(joined + left_len, gap + 1, right_len);
        id = find_mergeable(t, joined, left_len + right_len);
    }
    if (id < 0)
        return err_set(e, BC_ECORRUPT, key, "%s: entry %zu joins pieces that the vocabulary lacks",
                       key, rank);
    struct merge *m = &t->merges[merge_slot(t, (uint32_t)left, (uint32_t)right)];
    if (m->left == UINT32_MAX) /* said twice: the first counts */
        *m = (struct merge){(uint32_t)left, (uint32_t)right, (uint32_t)rank, id};
    return BC_OK;
}

int merges_build(struct tok *t, const struct gguf *g, struct err *e)
{
    const char *key = "tokenizer.ggml.merges";
    const struct gguf_key *k = gguf_key_find(g, key);
    if (k == NULL)
        return err_set(e, BC_ECORRUPT, key, "the file has no key %s, which its tokenizer needs",
                       key);
    if (k->kind != GGUF_ARRAY || k->elem != GGUF_STRING)
        return err_set(e, BC_ECORRUPT, key, "%s is not an array of strings", key);
    size_t slots = slots_for(k->n);
    t->merges = malloc(slots * sizeof *t->merges);
    char *joined = malloc(t->stored_max + 1);
    int rc = BC_OK;
    if (t->merges == NULL || joined == NULL) {
        rc = err_nomem(e, slots * sizeof *t->merges);
        goto out;
    }
    t->bytes += slots * sizeof *t->merges;
    memset(t->merges, 0xff, slots * sizeof *t->merges);
    t->merges_mask = (uint32_t)slots - 1;
    for (size_t i = 0; i < k->n && rc == BC_OK; i++)
        rc = merge_add(t, gguf_key_str(k, i), i, joined, e);
out:
    free(joined);
    return rc;
}

static int cmp_special(const void *a, const void *b, void *arg)
{
    const struct tok *t = arg;
    uint32_t i = *(const uint32_t *)a, j = *(const uint32_t *)b;
    struct gguf_str x = pack_at(&t->pieces, i), y = pack_at(&t->pieces, j);
    int c = memcmp(x.s, y.s, BC_MIN(x.len, y.len));
    if (c == 0)
        c = x.len < y.len ? -1 : x.len > y.len;
    return c != 0 ? c : (i < j ? -1 : i > j);
}

static bool is_special(uint8_t type, bool user_only)
{
    return type == TYPE_USER || (!user_only && (type == TYPE_CONTROL || type == TYPE_UNKNOWN));
}

/* Of equal texts only the first id stays, so that a look-up never walks over copies. */
static void drop_twins(const struct tok *t, struct specials *sp)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < sp->n; i++) {
        struct gguf_str s = pack_at(&t->pieces, (uint32_t)sp->ids[i]);
        if (n > 0) {
            struct gguf_str last = pack_at(&t->pieces, (uint32_t)sp->ids[n - 1]);
            if (gguf_str_cmp(last, s) == 0)
                continue;
        }
        sp->ids[n++] = sp->ids[i];
    }
    sp->n = n;
}

int specials_build(struct tok *t, struct specials *ret, bool user_only, struct err *e)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < t->n_vocab; i++)
        n += is_special(t->types[i], user_only) && pack_at(&t->pieces, i).len > 0;
    ret->ids = malloc((n + 1) * sizeof *ret->ids);
    if (ret->ids == NULL)
        return err_nomem(e, (n + 1) * sizeof *ret->ids);
    t->bytes += (n + 1) * sizeof *ret->ids;
    for (uint32_t i = 0; i < t->n_vocab; i++)
        if (is_special(t->types[i], user_only) && pack_at(&t->pieces, i).len > 0)
            ret->ids[ret->n++] = (int32_t)i;
    qsort_r(ret->ids, ret->n, sizeof *ret->ids, cmp_special, t);
    drop_twins(t, ret);
    for (uint32_t b = 0, i = 0; b < 257; b++) {
        while (i < ret->n && (uint8_t)pack_at(&t->pieces, (uint32_t)ret->ids[i]).s[0] < b)
            i++;
        ret->first[b] = i;
    }
    return BC_OK;
}

/* First in [lo, hi) whose byte at depth is >= b; all of them are longer than depth and agree before
 * it. */
static uint32_t narrow(const struct tok *t, const struct specials *sp, uint32_t lo, uint32_t hi,
                       size_t depth, unsigned b)
{
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;
        if ((uint8_t)pack_at(&t->pieces, (uint32_t)sp->ids[mid]).s[depth] < b)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

int32_t special_match(const struct tok *t, const struct specials *sp, const char *s, size_t n)
{
    uint32_t lo = sp->first[(uint8_t)s[0]], hi = sp->first[(uint8_t)s[0] + 1];
    int32_t best = -1;
    for (size_t depth = 1; lo < hi; depth++) {
        /* the shorter sorts first: one that ends here is a token */
        if (pack_at(&t->pieces, (uint32_t)sp->ids[lo]).len == depth)
            best = sp->ids[lo++];
        if (depth == n || lo == hi)
            break;
        unsigned b = (uint8_t)s[depth];
        uint32_t end = b == 255 ? hi : narrow(t, sp, lo, hi, depth, b + 1);
        lo = narrow(t, sp, lo, end, depth, b);
        hi = end;
    }
    return best;
}
