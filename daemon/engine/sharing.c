/* sharing.c: beginnings of prompts that several sessions have in common are evaluated and held once.
 *
 *   prompt   | You are a helpful ...  2,000 ids  | the session's own ...
 *   tree     | page 7 | page 8 | ...  | page 37  |     one tree a (pool, user): prefix.h
 *            '-- adopted: no pass, no page    --'-- evaluated: at least the last token
 *
 * A session adopts when its request begins, and again whenever its turn in a pass comes at a page's
 * end: ten sessions that start together with the same prompt follow the first one, page by page. What
 * it has evaluated it offers after every chunk and when a request ends.
 *
 * Nothing that a client can see depends on it but the time. A row of K, V and hidden values depends on
 * the tokens before it and on nothing else, as long as none of them was evicted (seqcache_pristine),
 * so whoever adopts has the same bits; policies keep nothing of a row before its first prune. Two
 * limits make that hold for all of them: the last token of a prompt is always evaluated, because its
 * logits are wanted, and so is the last one that fits under the budget, because the prune that follows
 * may look at its query. Rows that another build or processor made are offered to nobody.
 *
 * Pages that no session holds any more are kept for prefix_keep_us, unless others want the memory:
 * they are the first to go (pressure.c). They are booked to their user, like those that are shared.
 */
#include "core.h"
#include "log.h"
#include <stdlib.h>

#define LOOK_US 1000000u /* between two looks for what has been idle for too long */

/* ---- trees ---- */

static struct share_tree *tree_find(struct engine *en, const struct pool *p, uint32_t uid)
{
    struct share_tree *t = en->trees;
    while (t != NULL && (t->pool != p || (t->uid != uid && !en->opt.share_across_uids)))
        t = t->next;
    return t;
}

static void tree_close(struct engine *en, struct share_tree *t)
{
    struct share_tree **at = &en->trees;
    bc_assert(t->sessions == 0);
    while (*at != t)
        at = &(*at)->next;
    *at = t->next;
    prefix_close(&t->tree);
    if (!en->opt.share_across_uids)
        ledger_uid_put(en->ledger, &t->owner);
    free(t);
}

/* An empty tree that nobody uses goes. */
static void tree_tidy(struct engine *en, struct share_tree *t)
{
    if (t->sessions == 0 && prefix_pages(t->tree) == 0)
        tree_close(en, t);
}

static struct share_tree *tree_open(struct engine *en, const struct session *s, struct err *e)
{
    struct share_tree *t = calloc(1, sizeof *t);
    if (t == NULL) {
        err_nomem(e, sizeof *t);
        return NULL;
    }
    t->m = s->m;
    t->pool = s->pool;
    t->uid = s->uid;
    t->owner =
        en->opt.share_across_uids ? ledger_daemon(en->ledger) : ledger_uid_get(en->ledger, s->uid);
    if (t->owner == NULL || prefix_open(&t->tree, t->pool, t->owner, e) < 0) {
        if (!en->opt.share_across_uids)
            ledger_uid_put(en->ledger, &t->owner);
        free(t);
        return NULL;
    }
    t->next = en->trees;
    en->trees = t;
    return t;
}

int sharing_join(struct engine *en, struct session *s, struct err *e)
{
    if (en->opt.no_prefixes)
        return BC_OK;
    s->tree = tree_find(en, s->pool, s->uid);
    if (s->tree == NULL && (s->tree = tree_open(en, s, e)) == NULL)
        return BC_ENOMEM;
    s->tree->sessions++;
    return BC_OK;
}

struct ledger_owner *sharing_owner(const struct session *s)
{
    return s->tree != NULL ? s->tree->owner : s->turns->owner;
}

/* Idle pages that were used before `before` go; only those of one tree, if it is given. */
static void shed_before(struct engine *en, struct share_tree *t, uint64_t before)
{
    if (pool_pages_idle(t->pool) > 0)
        while (prefix_shed(t->tree, before))
            en->worked = true;
}

void sharing_leave(struct engine *en, struct session *s)
{
    struct share_tree *t = s->tree;
    s->tree = NULL;
    if (t == NULL)
        return;
    t->sessions--;
    if (en->opt.prefix_keep_us == 0)
        shed_before(en, t, UINT64_MAX);
    tree_tidy(en, t);
}

void sharing_forget(struct engine *en, const struct model_ref *m)
{
    for (struct share_tree *t = en->trees, *next; t != NULL; t = next) {
        next = t->next;
        if (t->m != m)
            continue;
        shed_before(en, t, UINT64_MAX);
        tree_tidy(en, t);
    }
}

/* ---- adopting, offering ---- */

/* Whether s is where pages may be added behind its last one, or offered. */
static bool may_share(const struct session *s)
{
    return s->tree != NULL && !s->foreign && !s->prune.active && !s->scoring.active &&
           s->lodging.transfer == NULL && s->m->state == MODEL_READY && !s->m->en->failed;
}

/* How many of the next ids of q may be adopted; nothing was evicted yet. */
static uint32_t ids_most(const struct session *s, const struct request *q)
{
    const struct evict_params *p = evict_params(s->ev);
    uint32_t count = seqcache_count(s->cache), n = q->n - q->done;
    if (!may_share(s) || q->opt.prompt_logprobs || n <= KN_PAGE_ROWS || s->stream != count ||
        seqcache_pages(s->cache) * KN_PAGE_ROWS != count)
        return 0;
    n--;
    return p->budget == 0 ? n : BC_MIN(n, p->budget - BC_MIN(count + 1, p->budget));
}

uint32_t sharing_match(const struct session *s, const struct request *q)
{
    uint32_t n = ids_most(s, q);
    return n == 0
               ? 0
               : prefix_match(s->tree->tree, s->cache, q->ids + q->done, n, engine_now(s->m->en));
}

void sharing_adopt(struct session *s)
{
    struct request *q = s->req;
    uint32_t most = ids_most(s, q);
    const int32_t *ids = q->ids + q->done;
    uint32_t n =
        most > 0 ? prefix_adopt(s->tree->tree, s->cache, ids, most, engine_now(s->m->en)) : 0;
    if (n == 0)
        return;
    sess_count(s, ids, n);
    request_rows_in(s, q, n);
    q->adopted += q->done == n ? n - q->lead : n;
    if (q->kind == REQUEST_GENERATE)
        durable_step(s, n, DURABLE_ADOPTED);
}

void sharing_offer(const struct session *s)
{
    if (may_share(s) && (s->lodging.place == PLACE_HERE || s->replay != NULL))
        prefix_offer(s->tree->tree, s->cache, engine_now(s->m->en));
}

/* ---- idle pages ---- */

static struct share_tree *tree_oldest(struct engine *en, const struct uid_turn *scope)
{
    struct share_tree *oldest = NULL;
    uint64_t when = UINT64_MAX;
    for (struct share_tree *t = en->trees; t != NULL; t = t->next) {
        uint64_t used = pool_pages_idle(t->pool) > 0 ? prefix_oldest(t->tree) : UINT64_MAX;
        if ((scope == NULL || t->owner == scope->owner) && used < when) {
            oldest = t;
            when = used;
        }
    }
    return oldest;
}

bool sharing_shed(struct engine *en, const struct uid_turn *scope)
{
    struct share_tree *t = tree_oldest(en, scope);
    if (t == NULL || !prefix_shed(t->tree, UINT64_MAX))
        return false;
    tree_tidy(en, t);
    return true;
}

uint64_t sharing_idle(const struct engine *en, const struct uid_turn *scope)
{
    uint64_t sum = 0;
    for (const struct share_tree *t = en->trees; t != NULL; t = t->next)
        if (pool_pages_idle(t->pool) > 0 && (scope == NULL || t->owner == scope->owner))
            sum += prefix_pages_idle(t->tree) * (uint64_t)pool_page_bytes(t->pool);
    return sum;
}

/* Sessions whose pages have come down to one holder. */
void sharing_settle(struct engine *en)
{
    for (struct model_ref *m = en->models; m != NULL; m = m->next)
        m->settle = false;
    for (uint32_t i = 0; i < en->n_sessions; i++)
        if (pool_settle_due(en->list[i]->pool))
            en->list[i]->m->settle = true;
    for (uint32_t i = 0; i < en->n_sessions; i++)
        if (en->list[i]->m->settle)
            seqcache_settle(en->list[i]->cache);
}

void sharing_run(struct engine *en, uint64_t now)
{
    uint64_t keep = en->opt.prefix_keep_us, next = UINT64_MAX;
    sharing_settle(en);
    for (struct share_tree *t = en->trees, *after; t != NULL; t = after) {
        after = t->next;
        if (pool_pages_idle(t->pool) == 0)
            continue;
        if (now >= en->trees_look_us || keep == 0) {
            shed_before(en, t, keep == 0 ? UINT64_MAX : now - BC_MIN(now, keep));
            uint64_t oldest = prefix_oldest(t->tree);
            next = BC_MIN(next, oldest != UINT64_MAX ? oldest + keep : oldest);
        } else {
            next = BC_MIN(next, en->trees_look_us);
        }
        tree_tidy(en, t);
    }
    if (now >= en->trees_look_us)
        en->trees_look_us = next == UINT64_MAX ? now + LOOK_US : BC_MAX(next, now + LOOK_US);
    if (next != UINT64_MAX)
        en->tier.next_us = BC_MIN(en->tier.next_us, en->trees_look_us);
}
