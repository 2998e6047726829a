/* prefix.c: see prefix.h. Nodes are found by a hash of their whole path (parent's hash and own ids) in
 * one table; links to parent, first child and siblings serve to take a subtree out. Every node holds
 * one reference of its page (pool_offer), so a page in the tree is never given back under it.
 */
#include "prefix.h"
#include <stdlib.h>
#include <string.h>

#define PREFIX_MAGIC 0x70726578u
#define BUCKETS_MIN 64u

struct node {
    struct prefix *tree;
    struct node *up, *child, *next, **link; /* *link: what points to this node among its siblings */
    struct node *chain;                     /* of its bucket */
    uint64_t hash, used;
    uint32_t page;
    int32_t ids[KN_PAGE_ROWS];
};

struct prefix {
    unsigned magic;
    struct pool *pool;
    struct ledger_owner *shared;
    struct node root; /* no page */
    struct node **buckets;
    uint32_t n_buckets, n_nodes; /* a power of two */
};

/* ---- finding ---- */

static uint64_t hash_path(uint64_t h, const int32_t *ids)
{
    for (uint32_t i = 0; i < KN_PAGE_ROWS; i++) {
        h ^= (uint32_t)ids[i];
        h *= 0x9e3779b97f4a7c15u;
        h ^= h >> 29;
    }
    return h;
}

static struct node **bucket_of(const struct prefix *t, uint64_t hash)
{
    return &t->buckets[hash & (t->n_buckets - 1)];
}

static struct node *node_find(const struct prefix *t, const struct node *up, const int32_t *ids)
{
    uint64_t hash = hash_path(up->hash, ids);
    struct node *n = *bucket_of(t, hash);
    while (n != NULL && (n->hash != hash || n->up != up || memcmp(n->ids, ids, sizeof n->ids) != 0))
        n = n->chain;
    return n;
}

/* ---- coming ---- */

static uint64_t bytes_of(uint32_t n_buckets)
{
    return sizeof(struct prefix) + n_buckets * sizeof(struct node *);
}

/* Twice as many buckets; without memory for them, chains are longer and nothing else. */
static void table_grow(struct prefix *t)
{
    uint32_t n = t->n_buckets * 2;
    struct node **more = calloc(n, sizeof *more);
    if (more == NULL)
        return;
    for (uint32_t i = 0; i < t->n_buckets; i++)
        for (struct node *x = t->buckets[i], *next; x != NULL; x = next) {
            next = x->chain;
            x->chain = more[x->hash & (n - 1)];
            more[x->hash & (n - 1)] = x;
        }
    free(t->buckets);
    ledger_charge(t->shared, LEDGER_state, bytes_of(n) - bytes_of(t->n_buckets));
    t->buckets = more;
    t->n_buckets = n;
}

/* NULL: no memory, and the page is not in the tree. */
static struct node *node_add(struct prefix *t, struct node *up, const int32_t *ids, uint32_t page)
{
    struct node *n = malloc(sizeof *n);
    if (n == NULL)
        return NULL;
    if (t->n_nodes >= t->n_buckets)
        table_grow(t);
    *n = (struct node){.tree = t,
                       .up = up,
                       .next = up->child,
                       .link = &up->child,
                       .hash = hash_path(up->hash, ids),
                       .page = page};
    memcpy(n->ids, ids, sizeof n->ids);
    if (up->child != NULL)
        up->child->link = &n->next;
    up->child = n;
    n->chain = *bucket_of(t, n->hash);
    *bucket_of(t, n->hash) = n;
    t->n_nodes++;
    ledger_charge(t->shared, LEDGER_state, sizeof *n);
    pool_offer(t->pool, page, n);
    return n;
}

/* ---- going ---- */

static void leaf_drop(struct node *n)
{
    struct prefix *t = n->tree;
    struct node **at = bucket_of(t, n->hash);
    bc_assert(n->child == NULL);
    while (*at != n)
        at = &(*at)->chain;
    *at = n->chain;
    *n->link = n->next;
    if (n->next != NULL)
        n->next->link = n->link;
    t->n_nodes--;
    ledger_credit(t->shared, LEDGER_state, sizeof *n);
    pool_unoffer(t->pool, n->page);
    free(n);
}

/* With everything below it: nobody could find that any more. */
static void node_drop(struct node *n)
{
    for (struct node *at = n;;) {
        while (at->child != NULL)
            at = at->child;
        struct node *up = at->up;
        bool last = at == n;
        leaf_drop(at);
        if (last)
            return;
        at = up;
    }
}

static void on_withdraw(void *node)
{
    node_drop(node);
}

/* ---- life ---- */

int prefix_open(struct prefix **ret, struct pool *p, struct ledger_owner *shared, struct err *e)
{
    struct prefix *t = calloc(1, sizeof *t);
    struct node **buckets = calloc(BUCKETS_MIN, sizeof *buckets);
    if (t == NULL || buckets == NULL) {
        free(t);
        free(buckets);
        return err_nomem(e, bytes_of(BUCKETS_MIN));
    }
    t->magic = PREFIX_MAGIC;
    t->pool = p;
    t->shared = shared;
    t->root = (struct node){.tree = t, .hash = 1, .page = POOL_PAGE_NONE};
    t->buckets = buckets;
    t->n_buckets = BUCKETS_MIN;
    pool_on_withdraw(p, on_withdraw);
    ledger_charge(shared, LEDGER_state, bytes_of(BUCKETS_MIN));
    *ret = t;
    return BC_OK;
}

void prefix_close(struct prefix **pt)
{
    struct prefix *t = *pt;
    if (t == NULL)
        return;
    MAGIC_OK(t, PREFIX_MAGIC);
    while (t->root.child != NULL)
        node_drop(t->root.child);
    ledger_credit(t->shared, LEDGER_state, bytes_of(t->n_buckets));
    t->magic = 0;
    free(t->buckets);
    free(t);
    *pt = NULL;
}

/* ---- use ---- */

/* The node of s's first n pages; NULL: the tree has not got them all. */
static struct node *node_of(struct prefix *t, const struct seqcache *s, uint32_t n, uint64_t now)
{
    struct node *at = &t->root;
    const int32_t *ids = seqcache_ids(s);
    for (uint32_t i = 0; i < n && at != NULL; i++) {
        at = node_find(t, at, ids + i * KN_PAGE_ROWS);
        if (at != NULL)
            at->used = now;
    }
    return at;
}

uint32_t prefix_match(struct prefix *t, const struct seqcache *s, const int32_t *ids, uint32_t n,
                      uint64_t now)
{
    MAGIC_OK(t, PREFIX_MAGIC);
    uint32_t known = 0;
    bc_assert(seqcache_pool(s) == t->pool && seqcache_count(s) % KN_PAGE_ROWS == 0);
    struct node *at = node_of(t, s, seqcache_count(s) / KN_PAGE_ROWS, now);
    while (at != NULL && n - known >= KN_PAGE_ROWS && (at = node_find(t, at, ids + known)) != NULL)
        known += KN_PAGE_ROWS;
    return known;
}

uint32_t prefix_adopt(struct prefix *t, struct seqcache *s, const int32_t *ids, uint32_t n,
                      uint64_t now)
{
    MAGIC_OK(t, PREFIX_MAGIC);
    uint32_t adopted = 0;
    bc_assert(seqcache_pool(s) == t->pool && seqcache_count(s) % KN_PAGE_ROWS == 0);
    struct node *at = node_of(t, s, seqcache_count(s) / KN_PAGE_ROWS, now);
    while (at != NULL && n - adopted >= KN_PAGE_ROWS) {
        if ((at = node_find(t, at, ids + adopted)) == NULL ||
            seqcache_adopt(s, at->page, at->ids, NULL) < 0)
            break;
        at->used = now;
        adopted += KN_PAGE_ROWS;
    }
    return adopted;
}

uint32_t prefix_offer(struct prefix *t, struct seqcache *s, uint64_t now)
{
    MAGIC_OK(t, PREFIX_MAGIC);
    struct node *at = &t->root;
    uint32_t n = 0;
    bc_assert(seqcache_pool(s) == t->pool);
    for (; seqcache_pristine(s, n); n++) {
        const int32_t *ids = seqcache_ids(s) + n * KN_PAGE_ROWS;
        uint32_t page = seqcache_slots(s)[n * KN_PAGE_ROWS] / KN_PAGE_ROWS;
        struct node *known = node_find(t, at, ids);
        if (known == NULL && pool_offered(t->pool, page) != NULL)
            break; /* in a tree of its own by another path: not to be had twice */
        if (known == NULL && (known = node_add(t, at, ids, page)) == NULL)
            break;
        if (known->page != page)
            seqcache_swap_page(s, n, known->page);
        known->used = now;
        at = known;
    }
    return n;
}

/* ---- idle pages ---- */

uint32_t prefix_pages(const struct prefix *t)
{
    MAGIC_OK(t, PREFIX_MAGIC);
    return t->n_nodes;
}

static bool is_idle(const struct node *n)
{
    return pool_holders(n->tree->pool, n->page) == 0;
}

uint32_t prefix_pages_idle(const struct prefix *t)
{
    MAGIC_OK(t, PREFIX_MAGIC);
    uint32_t n = 0;
    for (uint32_t i = 0; i < t->n_buckets; i++)
        for (const struct node *x = t->buckets[i]; x != NULL; x = x->chain)
            n += is_idle(x);
    return n;
}

static bool has_idle_child(const struct node *n)
{
    for (const struct node *c = n->child; c != NULL; c = c->next)
        if (is_idle(c))
            return true;
    return false;
}

/* Ends of paths first: what is below a node is never older than what leads to it. */
static struct node *oldest_idle(const struct prefix *t)
{
    struct node *oldest = NULL;
    for (uint32_t i = 0; i < t->n_buckets; i++)
        for (struct node *x = t->buckets[i]; x != NULL; x = x->chain)
            if ((oldest == NULL || x->used < oldest->used) && is_idle(x) && !has_idle_child(x))
                oldest = x;
    return oldest;
}

bool prefix_shed(struct prefix *t, uint64_t before)
{
    MAGIC_OK(t, PREFIX_MAGIC);
    struct node *n = oldest_idle(t);
    if (n == NULL || n->used >= before)
        return false;
    node_drop(n);
    return true;
}

uint64_t prefix_oldest(const struct prefix *t)
{
    MAGIC_OK(t, PREFIX_MAGIC);
    const struct node *n = oldest_idle(t);
    return n != NULL ? n->used : UINT64_MAX;
}
