/* slab.c: see slab.h. In address sanitizer builds every weight is an allocation of its own, so that
 * reading past its end is seen. */
#include "slab.h"
#include "kn_assert.h"
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#define SLAB_MAGIC 0x6b6e736cu
#define HUGE_PAGE ((size_t)2 << 20)
#define SLAB_BYTES ((size_t)32 << 20)

#ifdef __SANITIZE_ADDRESS__
#define ALONE true
#else
#define ALONE false
#endif

struct slab {
    unsigned magic;
    unsigned n_live;
    uint8_t *map; /* huge-page aligned; NULL: its one weight is from malloc */
    size_t bytes, used;
};

static size_t up(size_t n, size_t unit)
{
    return (n + unit - 1) / unit * unit;
}

/* A mapping whose address is a multiple of HUGE_PAGE. */
static uint8_t *map_aligned(size_t bytes)
{
    uint8_t *at = mmap(NULL, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
        return NULL;
    size_t head = (HUGE_PAGE - (uintptr_t)at % HUGE_PAGE) % HUGE_PAGE;
    if (head > 0)
        munmap(at, head);
    munmap(at + head + bytes, HUGE_PAGE - head);
    (void)madvise(at + head, bytes, MADV_HUGEPAGE); /* a wish: without it things are just slower */
    return at + head;
}

static struct slab *slab_open(size_t bytes)
{
    struct slab *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->magic = SLAB_MAGIC;
    if (ALONE)
        return s;
    s->bytes = up(KN_MAX(bytes, SLAB_BYTES), HUGE_PAGE);
    s->map = map_aligned(s->bytes);
    if (!s->map) {
        free(s);
        return NULL;
    }
    return s;
}

static int take_alone(size_t bytes, void **ret, struct slab **ret_slab)
{
    struct slab *s = slab_open(bytes);
    void *memory = s ? aligned_alloc(64, bytes) : NULL;
    if (!memory) {
        free(s);
        return -1;
    }
    memset(memory, 0, bytes);
    s->n_live = 1;
    *ret = memory;
    *ret_slab = s;
    return 0;
}

int slab_take(struct slab_set *set, size_t bytes, void **ret, struct slab **ret_slab)
{
    bytes = up(bytes, 64);
    if (ALONE)
        return take_alone(bytes, ret, ret_slab);
    struct slab *s = set->current;
    if (!s || s->bytes - s->used < bytes) {
        s = slab_open(bytes);
        if (!s)
            return -1;
        set->current = s; /* the one before lives on through its weights */
    }
    *ret = s->map + s->used;
    *ret_slab = s;
    s->used += bytes;
    s->n_live++;
    return 0;
}

void slab_drop(struct slab_set *set, struct slab *s, void *memory)
{
    kn_assert(s->magic == SLAB_MAGIC && s->n_live > 0);
    if (--s->n_live > 0)
        return;
    if (set->current == s)
        set->current = NULL;
    if (s->map)
        munmap(s->map, s->bytes);
    else
        free(memory);
    s->magic = 0;
    free(s);
}
