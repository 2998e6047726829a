/* idmap.h: objects by a number that is never reused: connections and sessions. Intrusive chains
 * over a fixed table; owner: the loop's thread. */
#ifndef BACKCAST_IDMAP_H
#define BACKCAST_IDMAP_H
#include <stddef.h>
#include <stdint.h>

#define IDMAP_BUCKETS 1024u

struct idnode {
    uint64_t id;
    struct idnode *next;
};
struct idmap {
    struct idnode *buckets[IDMAP_BUCKETS];
    size_t n;
};
#define CONTAINER(node, type, member) ((type *)(void *)((char *)(node)-offsetof(type, member)))

static inline struct idnode **idmap_at(struct idmap *m, uint64_t id)
{
    struct idnode **at = &m->buckets[id % IDMAP_BUCKETS];
    while (*at != NULL && (*at)->id != id)
        at = &(*at)->next;
    return at;
}
static inline struct idnode *idmap_get(struct idmap *m, uint64_t id)
{
    return *idmap_at(m, id);
}
static inline void idmap_put(struct idmap *m, struct idnode *n, uint64_t id)
{
    n->id = id;
    n->next = m->buckets[id % IDMAP_BUCKETS];
    m->buckets[id % IDMAP_BUCKETS] = n;
    m->n++;
}
static inline void idmap_drop(struct idmap *m, struct idnode *n)
{
    struct idnode **at = idmap_at(m, n->id);
    if (*at == n) {
        *at = n->next;
        m->n--;
    }
    n->next = NULL;
}
#endif
