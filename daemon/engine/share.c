/* share.c: what each session may count on, and what it could come to hold.
 *
 *   kv_memory | refresh | guaranteed A | guaranteed B | guaranteed C |      budgets may add up to more
 *                       |##held########|##held###.....|##held#######|##    .: B's, though C uses it
 *                                                                     '-- C's overshoot: what others
 *                                                                         may make it forget
 *
 * What several sessions share is booked once, to their user, but each of them is held to all pages that
 * it has: what it has of others' pages now it may have to hold alone later, so that the shares suffice
 * whatever happens to the others. What is sure to stay, and what comes free, counts shared pages once.
 *
 * Guaranteed share = min(budget, kv_memory x weight / weights of all open sessions, and the same of
 * its user's share), in whole pages. Below it a session is never pruned or refused for anybody's
 * sake. A session that never prunes may grow past its share only into what others are not
 * guaranteed, because it could not be made to give it back - unless there are tiers: then it leaves
 * when it is idle, sessions take turns, and a share may be less than a page. The scratch of the
 * largest refresh, and of the small ones that may go with it, is set aside: a prune under pressure
 * must not fail for want of memory.
 */
#include "core.h"

#define SHARE_PERCENT_MAX 100.0

/* ---- limits ---- */

uint64_t share_kv(const struct engine *en)
{
    return en->kv_memory - BC_MIN(en->kv_memory, en->refresh_max);
}

uint64_t share_uid(const struct engine *en)
{
    double percent = en->limits.uid_percent;
    if (percent > 0 && percent < SHARE_PERCENT_MAX)
        return (uint64_t)((double)share_kv(en) * percent / 100);
    return en->limits.uid_bytes > 0 ? en->limits.uid_bytes : UINT64_MAX;
}

/* Pages that users share among each other are nobody's: there, each user has all that it holds. */
uint64_t share_uid_held(const struct engine *en, const struct uid_turn *u)
{
    uint64_t held = ledger_all(u->owner, LEDGER_kv) + ledger_all(u->owner, LEDGER_shared);
    for (uint32_t i = 0; en->opt.share_across_uids && i < en->n_sessions; i++)
        if (en->list[i]->turns == u)
            held += seqcache_bytes_shared(en->list[i]->cache);
    return held;
}

uint64_t share_alone(const struct session *s)
{
    return seqcache_bytes_held(s->cache) - seqcache_bytes_shared(s->cache);
}

static uint64_t refresh_bytes(const struct engine *en, const struct session *newcomer)
{
    uint64_t largest = 0, joining = 0;
    uint32_t n = en->n_sessions + (newcomer != NULL), n_joining = 0;
    for (uint32_t i = 0; i < n; i++) {
        const struct session *s = i < en->n_sessions ? en->list[i] : newcomer;
        const struct evict_params *p = evict_params(s->ev);
        uint32_t tokens = BC_MAX(p->budget, seqcache_count(s->cache));
        uint64_t bytes = evict_run_bytes(p, pool_kv(s->pool), &s->m->info, tokens);
        largest = BC_MAX(largest, bytes);
        if (!evict_may_join(p, tokens))
            continue;
        joining = BC_MAX(joining, bytes);
        n_joining++;
    }
    n_joining = BC_MIN(n_joining, n - 1);
    return largest + joining * BC_MIN(n_joining, EVICT_TOGETHER_MAX - 1);
}

void share_update(struct engine *en)
{
    en->refresh_max = en->n_sessions > 0 ? refresh_bytes(en, NULL) : 0;
}

/* ---- shares ---- */

static uint64_t share_in(const struct engine *en, const struct session *s, uint64_t weights,
                         uint64_t uid_weights)
{
    uint64_t g = share_kv(en) / weights * s->weight, uid = share_uid(en);
    if (uid != UINT64_MAX)
        g = BC_MIN(g, uid / uid_weights * s->weight);
    if (s->budget_bytes > 0)
        g = BC_MIN(g, s->budget_bytes);
    return g - g % pool_page_bytes(s->pool);
}

uint64_t share_guaranteed(const struct engine *en, const struct session *s)
{
    uint64_t g = share_in(en, s, en->weights, s->turns->weights);
    return BC_MAX(g, (uint64_t)pool_page_bytes(s->pool));
}

bool share_turns(const struct engine *en)
{
    return en->opt.host_tier > 0 || en->opt.disk_tier > 0;
}

/* With one more session of this weight, everybody must still be guaranteed a page. */
int share_admit(struct engine *en, const struct session *newcomer, struct err *e)
{
    uint64_t weights = en->weights + newcomer->weight;
    uint64_t mine = newcomer->turns->weights + newcomer->weight;
    uint64_t before = en->refresh_max;
    int rc = BC_OK;
    if (share_turns(en))
        return BC_OK;
    en->refresh_max = BC_MAX(before, refresh_bytes(en, newcomer));
    for (uint32_t i = 0; i <= en->n_sessions && rc == BC_OK; i++) {
        const struct session *s = i < en->n_sessions ? en->list[i] : newcomer;
        uint64_t page = pool_page_bytes(s->pool);
        uint64_t w = s->turns == newcomer->turns ? mine : s->turns->weights;
        if (share_in(en, s, weights, w) < page)
            rc = err_amount(e, BC_EBUDGET, "kv_memory", page, share_kv(en) / weights * s->weight,
                            "with %u sessions open, one more would leave a session less than a "
                            "page (%llu bytes) of the cache memory",
                            en->n_sessions, (unsigned long long)page);
    }
    en->refresh_max = before;
    return rc;
}

uint64_t share_overshoot(const struct engine *en, const struct session *s, uint64_t more)
{
    uint64_t held = seqcache_bytes_held(s->cache) + more, g = share_guaranteed(en, s);
    return held > g ? held - g : 0;
}

/* What pressure cannot take from v, of the `held` bytes; for a session that could not give it back, v's
 * whole share. */
static uint64_t floor_of(const struct engine *en, const struct session *v, uint64_t held,
                         bool reserve)
{
    uint64_t g = share_guaranteed(en, v);
    uint64_t least = evict_policy_prunes(evict_params(v->ev)->policy) ? BC_MIN(held, g) : held;
    return reserve ? BC_MAX(least, g) : least;
}

/* Pages that several sessions hold, each once; those that nobody holds can go at any time. */
static uint64_t shared_held(const struct engine *en, const struct uid_turn *scope)
{
    uint64_t idle = sharing_idle(en, scope);
    uint64_t all =
        ledger_all(scope != NULL ? scope->owner : ledger_daemon(en->ledger), LEDGER_shared);
    return all - BC_MIN(all, idle);
}

/* Two sums of what others keep, both too high rather than too low: with shared pages once, or as if
 * each of them held its part of them alone. */
static uint64_t reach_in(const struct engine *en, const struct session *s, uint64_t limit,
                         const struct uid_turn *scope)
{
    bool reserve = !evict_policy_prunes(evict_params(s->ev)->policy) && !share_turns(en);
    uint64_t each = 0, once = shared_held(en, scope), mine = seqcache_bytes_shared(s->cache);
    for (uint32_t i = 0; i < en->n_sessions; i++) {
        const struct session *v = en->list[i];
        if (v == s || (scope != NULL && v->turns != scope))
            continue;
        each += floor_of(en, v, seqcache_bytes_held(v->cache), reserve);
        once += floor_of(en, v, share_alone(v), reserve);
    }
    once -= BC_MIN(once, mine);
    bool apart = scope == NULL || !en->opt.share_across_uids; /* else: see share_uid_held */
    uint64_t taken = apart ? BC_MIN(each, once) : each;
    return limit > taken ? limit - taken : 0;
}

uint64_t share_reach(const struct engine *en, const struct session *s)
{
    uint64_t reach = reach_in(en, s, share_kv(en), NULL), uid = share_uid(en);
    if (uid != UINT64_MAX)
        reach = BC_MIN(reach, reach_in(en, s, uid, s->turns));
    return reach;
}
