/* bench.h: what programs that measure a model in process have in common: an end with a sentence, lists of sizes, memory,
 * a model with pages, a median. */
#ifndef BACKCAST_BENCH_H
#define BACKCAST_BENCH_H
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "gguf.h"
#include "model.h"

static inline void die(const char *what, const char *why)
{
    fprintf(stderr, "%s: %s: %s\n", program_invocation_short_name, what, why);
    exit(1);
}

static inline void check(int rc, const struct err *e)
{
    if (rc < 0)
        die(e->field, e->text);
}

/* Zeroed; the caller frees. */
static inline void *take(size_t n, size_t size)
{
    void *p = calloc(n, size);
    if (!p)
        die("memory", "there is not enough");
    return p;
}

/* "256,512" to numbers of least .. most. Returns how many, at most max; 0: it is no such list. */
static inline uint32_t list_parse(char *list, uint32_t *to, uint32_t max, uint32_t least,
                                  uint32_t most)
{
    uint32_t n_to = 0;
    for (char *save, *at = strtok_r(list, ",", &save); at; at = strtok_r(NULL, ",", &save)) {
        unsigned long n = strtoul(at, NULL, 10);
        if (n_to == max || n < least || n > most)
            return 0;
        to[n_to++] = (uint32_t)n;
    }
    return n_to;
}

static inline void model_of_file(struct kn **kn, struct model **m, const struct kn_options *ko,
                                 const char *path, const struct model_options *mo)
{
    struct gguf *g;
    struct err e = {0};
    char why[160] = "";
    if (kn_open(kn, ko, why, sizeof why) != KN_OK)
        die("backend", why);
    check(gguf_open(&g, path, &e), &e);
    check(model_open(m, *kn, g, mo, NULL, NULL, &e), &e);
    gguf_close(&g);
}

static inline void pages_make(struct kn *kn, struct kn_kv *kv, uint32_t n)
{
    if (kn->ops->arena_open(kn, kv->stride, n, &kv->base) != KN_OK)
        die("pages", "no addresses");
    for (uint32_t p = 0; p < n; p++)
        if (kn->ops->arena_commit(kn, kv->base, kv->stride, p) != KN_OK)
            die("pages", "no memory");
}

static inline void pages_drop(struct kn *kn, struct kn_kv *kv, uint32_t n)
{
    for (uint32_t p = 0; p < n; p++)
        kn->ops->arena_release(kn, kv->base, kv->stride, p);
    kn->ops->arena_close(kn, kv->base, kv->stride, n);
}

static inline int by_size(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Of n > 0 values, which are sorted. */
static inline uint64_t median(uint64_t *us, size_t n)
{
    qsort(us, n, sizeof *us, by_size);
    return us[n / 2];
}
#endif
