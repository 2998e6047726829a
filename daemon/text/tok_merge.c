/* tok_merge.c: one word to ids, by joining neighbours, best first.
 *
 *   symbols   h  e  l  l  o      a doubly linked list over the word's bytes (BPE) or characters
 *                                (SentencePiece)
 *   heap      (rank, left)       of every pair that may join
 *
 * Popping the best pair joins it, unlinks its right half and offers the two new neighbours. An
 * entry is stale when the two symbols no longer cover as many bytes as when it was pushed. n log n
 * for a word of n bytes. BPE: the lowest rank first; SentencePiece: the highest score first; ties:
 * the leftmost.
 */
#include "tok_internal.h"
#include "utf8.h"
#include <stdlib.h>
#include <string.h>

struct symbol {
    uint32_t start, len; /* len 0: joined into its left neighbour */
    int32_t prev, next;  /* -1: none */
    int32_t id;          /* -1: no piece */
};

struct pair {
    uint32_t order; /* the smaller the sooner */
    uint32_t left;  /* symbol */
    uint32_t len;   /* bytes of both when pushed */
    int32_t id;     /* of the joined piece */
};

int ids_add(struct ids *ids, int32_t id, struct err *e)
{
    if (ids->n == ids->cap) {
        size_t cap = ids->cap < 64 ? 64 : ids->cap * 2;
        int32_t *v = realloc(ids->v, cap * sizeof *v);
        if (v == NULL)
            return err_nomem(e, cap * sizeof *v);
        ids->v = v;
        ids->cap = cap;
    }
    ids->v[ids->n++] = id;
    return BC_OK;
}

static bool sooner(const struct pair *a, const struct pair *b)
{
    return a->order != b->order ? a->order < b->order : a->left < b->left;
}

/* Room is there: n symbols start with n - 1 pairs, and each of at most n - 1 joins pops one and
 * pushes two. */
static void heap_push(struct merger *m, struct pair p)
{
    size_t i = m->heap_n++;
    bc_assert(i < m->heap_cap);
    while (i > 0 && sooner(&p, &m->heap[(i - 1) / 2])) {
        m->heap[i] = m->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    m->heap[i] = p;
}

static struct pair heap_pop(struct merger *m)
{
    struct pair top = m->heap[0], last = m->heap[--m->heap_n];
    size_t i = 0, n = m->heap_n;
    for (size_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && sooner(&m->heap[child + 1], &m->heap[child]))
            child++;
        if (!sooner(&m->heap[child], &last))
            break;
        m->heap[i] = m->heap[child];
    }
    m->heap[i] = last;
    return top;
}

/* Higher scores get lower numbers. */
static uint32_t score_order(float score)
{
    uint32_t bits;
    float s = score + 0.0f; /* -0 is 0 */
    memcpy(&bits, &s, sizeof bits);
    return (bits & 0x80000000u) != 0 ? bits : 0x7fffffffu - bits;
}

/* Offers the pair (left, its right neighbour), if the vocabulary joins it. */
static void offer(struct merger *m, const char *s, int32_t left)
{
    const struct symbol *a = left < 0 ? NULL : &m->syms[left];
    if (a == NULL || a->next < 0)
        return;
    const struct symbol *b = &m->syms[a->next];
    struct pair p = {0, (uint32_t)left, a->len + b->len, -1};
    if (m->t->spm) {
        p.id = index_find(m->t, s + a->start, p.len);
        if (p.id >= 0 && !type_merges(m->t->types[p.id]))
            p.id = -1;
        p.order = p.id >= 0 ? score_order(m->t->scores[p.id]) : 0;
    } else {
        const struct merge *found = merge_find(m->t, a->id, b->id);
        p.id = found != NULL ? found->id : -1;
        p.order = found != NULL ? found->rank : 0;
    }
    if (p.id >= 0)
        heap_push(m, p);
}

static int reserve(struct merger *m, size_t n, struct err *e)
{
    if (n <= m->sym_cap)
        return BC_OK;
    size_t cap = BC_MAX(n, (size_t)256);
    struct symbol *syms = realloc(m->syms, cap * sizeof *syms);
    if (syms == NULL)
        return err_nomem(e, cap * sizeof *syms);
    m->syms = syms;
    struct pair *heap = realloc(m->heap, 2 * cap * sizeof *heap);
    if (heap == NULL)
        return err_nomem(e, 2 * cap * sizeof *heap);
    m->heap = heap;
    m->heap_cap = 2 * cap;
    m->sym_cap = cap;
    return BC_OK;
}

/* Characters, a byte that is none counting as one. */
static size_t count_chars(const char *s, size_t n)
{
    size_t count = 0;
    for (size_t at = 0; at < n; count++) {
        int len = utf8_step((const uint8_t *)s + at, n - at);
        at += len < 1 ? 1 : (size_t)len;
    }
    return count;
}

/* The word's symbols before any join: bytes, or characters (a byte that is none is a symbol of its
 * own). */
static size_t spell(struct merger *m, const char *s, size_t n)
{
    size_t count = 0;
    for (size_t at = 0; at < n; count++) {
        int len = m->t->spm ? utf8_step((const uint8_t *)s + at, n - at) : 1;
        struct symbol *sym = &m->syms[count];
        sym->start = (uint32_t)at;
        sym->len = len < 1 ? 1 : (uint32_t)len;
        sym->prev = (int32_t)count - 1;
        sym->next = (int32_t)count + 1;
        if (m->t->spm) {
            int32_t id = index_find(m->t, s + at, sym->len);
            sym->id = id >= 0 && type_merges(m->t->types[id]) ? id : -1;
        } else {
            sym->id = m->t->byte_id[(uint8_t)s[at]];
        }
        at += sym->len;
    }
    m->syms[count - 1].next = -1;
    return count;
}

static void join_all(struct merger *m, const char *s)
{
    while (m->heap_n > 0) {
        struct pair p = heap_pop(m);
        struct symbol *a = &m->syms[p.left];
        if (a->len == 0 || a->next < 0 || a->len + m->syms[a->next].len != p.len)
            continue;
        struct symbol *b = &m->syms[a->next];
        a->len = p.len;
        a->id = p.id;
        a->next = b->next;
        b->len = 0;
        if (a->next >= 0)
            m->syms[a->next].prev = (int32_t)p.left;
        offer(m, s, a->prev);
        offer(m, s, (int32_t)p.left);
    }
}

/* A symbol that is no piece, byte by byte. */
static int add_bytes(const struct tok *t, const char *s, size_t n, struct ids *ids, struct err *e)
{
    int rc = BC_OK;
    for (size_t i = 0; i < n && rc == BC_OK; i++) {
        int32_t id = t->byte_id[(uint8_t)s[i]];
        if (id >= 0)
            rc = ids_add(ids, id, e);
        for (uint32_t j = 0; j < t->n_missing && id < 0 && rc == BC_OK; j++)
            rc = ids_add(ids, t->missing[j], e);
    }
    return rc;
}

int merge_word(struct merger *m, const char *s, size_t n, struct ids *ids, struct err *e)
{
    bc_assert(n > 0 && n <= 3u * TOK_WORD_MAX + SPM_SPACE_LEN);
    int rc = reserve(m, m->t->spm ? count_chars(s, n) : n, e);
    if (rc != BC_OK)
        return rc;
    size_t count = spell(m, s, n);
    m->heap_n = 0;
    for (size_t i = 0; i + 1 < count; i++)
        offer(m, s, (int32_t)i);
    join_all(m, s);
    for (int32_t i = 0; i >= 0 && rc == BC_OK; i = m->syms[i].next) {
        const struct symbol *sym = &m->syms[i];
        rc = sym->id >= 0 ? ids_add(ids, sym->id, e)
                          : add_bytes(m->t, s + sym->start, sym->len, ids, e);
    }
    return rc;
}

void merger_free(struct merger *m)
{
    free(m->syms);
    free(m->heap);
    memset(m, 0, sizeof *m);
}
