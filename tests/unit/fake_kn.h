/* fake_kn.h: a backend of arenas alone, for tests of cache and counters: it knows which pages are
 * committed, remembers for every slot which token was written there, and refuses to commit when
 * told to. */
#ifndef BACKCAST_FAKE_KN_H
#define BACKCAST_FAKE_KN_H
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "base.h"
#include "kn.h"

#define FAKE_EMPTY UINT64_MAX

struct fake_kn {
    struct kn kn;
    uint32_t n_pages, n_committed,
        refuse_after;      /* commits until one is refused; UINT32_MAX: never */
    bool failed;           /* the device */
    bool open, *committed; /* [n_pages] */
    uint64_t *row;         /* [n_pages * KN_PAGE_ROWS] */
    uint64_t n_copies;
};

static int fake_arena_open(struct kn *kn, size_t stride, uint32_t n_pages, void **ret_base)
{
    struct fake_kn *f = (struct fake_kn *)kn;
    assert_false(f->open);
    assert_true(stride > 0);
    f->open = true;
    f->n_pages = n_pages;
    f->committed = calloc(n_pages, sizeof *f->committed);
    f->row = malloc((size_t)n_pages * KN_PAGE_ROWS * sizeof *f->row);
    assert_true(f->committed != NULL && f->row != NULL);
    memset(f->row, 0xee, (size_t)n_pages * KN_PAGE_ROWS * sizeof *f->row);
    *ret_base = f;
    return KN_OK;
}

static int fake_arena_commit(struct kn *kn, void *base, size_t stride, uint32_t page)
{
    struct fake_kn *f = (struct fake_kn *)kn;
    assert_ptr_equal(base, f);
    assert_true(page < f->n_pages && !f->committed[page]);
    if (f->refuse_after == 0)
        return KN_ENOMEM;
    if (f->refuse_after != UINT32_MAX)
        f->refuse_after--;
    f->committed[page] = true;
    f->n_committed++;
    kn->bytes_arena += stride;
    for (uint32_t r = 0; r < KN_PAGE_ROWS; r++)
        f->row[page * KN_PAGE_ROWS + r] = FAKE_EMPTY;
    return KN_OK;
}

static void fake_arena_release(struct kn *kn, void *base, size_t stride, uint32_t page)
{
    struct fake_kn *f = (struct fake_kn *)kn;
    assert_ptr_equal(base, f);
    assert_true(page < f->n_pages && f->committed[page]);
    f->committed[page] = false;
    f->n_committed--;
    kn->bytes_arena -= stride;
}

static void fake_arena_close(struct kn *kn, void *base, size_t stride, uint32_t n_pages)
{
    struct fake_kn *f = (struct fake_kn *)kn;
    (void)stride;
    assert_ptr_equal(base, f);
    assert_int_equal(n_pages, f->n_pages);
    assert_int_equal(f->n_committed, 0);
    free(f->committed);
    free(f->row);
    f->open = false;
}

static void fake_row_copy(struct kn *kn, const struct kn_kv *kv, uint32_t dst, uint32_t src)
{
    struct fake_kn *f = (struct fake_kn *)kn;
    assert_ptr_equal(kv->base, f);
    assert_true(f->committed[dst / KN_PAGE_ROWS] && f->committed[src / KN_PAGE_ROWS]);
    f->row[dst] = f->row[src];
    f->n_copies++;
}

static int fake_status(struct kn *kn)
{
    return ((struct fake_kn *)kn)->failed ? KN_EDEVICE : KN_OK;
}

static const struct kn_ops fake_ops = {
    .status = fake_status,
    .arena_open = fake_arena_open,
    .arena_commit = fake_arena_commit,
    .arena_release = fake_arena_release,
    .arena_close = fake_arena_close,
    .row_copy = fake_row_copy,
};

static struct fake_kn fake_kn_make(void)
{
    return (struct fake_kn){
        .kn = {.magic = KN_MAGIC, .ops = &fake_ops, .name = "fake"},
        .refuse_after = UINT32_MAX,
    };
}

/* 2 layers, 2 KV heads of 16: 512 bytes of K and V a row, so 32 KiB a page. */
static struct kn_kv fake_shape(void)
{
    return (struct kn_kv){
        .n_layers = 2, .n_kv_heads = 2, .head_dim = 16, .type = KN_F32, .stride = 32768};
}
#endif
