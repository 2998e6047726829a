/* pressure.c: the memory gate: a slot for every new token before the pass, or a reason why not.
 *
 *   pressure_reserve
 *     1  a full cache that must grow     --> prune to keep            (policy none: END budget)
 *     2  prunes under way, first come first served, a slice of rows a step (prune.c) --> WORKING
 *     3  rows granted = min(wanted, room in the budget); pages taken  --> OK
 *        no page left: the order under pressure, each rung only when the one above was not enough
 *          -  beginnings of prompts that no session holds any more go       at once, no token lost
 *          a  holes of idle caches are closed, whole pages go back          at once, no token lost
 *          b  idle caches leave for the tiers, if there are any             the session waits
 *          c  whoever holds most above its guaranteed share is pruned       the session waits
 *             (then the lowest priority, then the one used longest ago)
 *          d  refused, with the numbers
 *
 * The session that asks is measured like all others, with what it asks for: if its overshoot is the
 * largest, it is the one that is pruned, or refused if its policy never prunes. So nobody within its
 * share ever pays for somebody above it (share.c).
 *
 * Ceilings hold at every instant, and budgets_check asserts them every step: a session's held bytes
 * <= its budget, all pools' held bytes <= kv_memory. A prune for the own budget is due only when the
 * cache is full and something waits to be appended, so where a prompt is cut changes nothing. When
 * kv_memory or a user's share shrinks while running, rungs a to c bring it down at once.
 */
#include "core.h"
#include "log.h"
#include <string.h>

/* ---- pages ---- */

static uint64_t bytes_needed(const struct session *s, uint64_t rows)
{
    /* more rows than fit in 32 bits are more than any pool has */
    uint32_t n = (uint32_t)BC_MIN(rows, (uint64_t)UINT32_MAX - KN_PAGE_ROWS);
    return (uint64_t)seqcache_pages_needed(s->cache, n) * pool_page_bytes(s->pool);
}

static uint64_t over_zero(uint64_t a, uint64_t b)
{
    return a > b ? a - b : 0;
}

/* Bytes that s could take now: of the daemon's, of its user's, of its pool's. */
static uint64_t bytes_left(const struct engine *en, const struct session *s)
{
    uint64_t left = over_zero(share_kv(en), models_held(en)), uid = share_uid(en);
    if (uid != UINT64_MAX)
        left = BC_MIN(left, over_zero(uid, share_uid_held(en, s->turns)));
    uint64_t pool = pool_pages_max(s->pool) - pool_pages_out(s->pool);
    return BC_MIN(left, pool * pool_page_bytes(s->pool));
}

/* A prompt that was promised its pages. */
static bool promised(const struct session *s)
{
    return s->req != NULL && s->req->phase == REQUEST_PREFILL &&
           evict_params(s->ev)->trigger == EVICT_ON_PREFILL_END;
}

/* Rung a: gives back the pages that live rows, and those of this pass, do not fill. */
static void relieve_now(struct engine *en)
{
    for (uint32_t i = 0; i < en->n_sessions; i++) {
        struct session *s = en->list[i];
        if (!promised(s) && !s->prune.active && !s->scoring.active && s->lodging.transfer == NULL) {
            seqcache_claim(s->cache);
            seqcache_compact_room(s->cache, s->pick_n);
        }
    }
}

/* Whose memory is short when s cannot have `need`: its user's, or everybody's (NULL). */
static const struct uid_turn *short_of(const struct engine *en, const struct session *s,
                                       uint64_t need)
{
    uint64_t uid = share_uid(en);
    return uid != UINT64_MAX && need > over_zero(uid, share_uid_held(en, s->turns)) ? s->turns
                                                                                    : NULL;
}

static bool fits(struct engine *en, const struct session *s, uint64_t need)
{
    while (need > bytes_left(en, s) && sharing_shed(en, short_of(en, s, need)))
        ;
    if (need <= bytes_left(en, s))
        return true;
    relieve_now(en);
    return need <= bytes_left(en, s);
}

bool pressure_fits(struct engine *en, const struct session *s, uint32_t rows)
{
    return fits(en, s, bytes_needed(s, rows));
}

static int no_memory(const struct engine *en, const struct session *s, uint64_t need,
                     uint64_t available, struct err *e)
{
    uint64_t page = pool_page_bytes(s->pool);
    bool user = share_uid(en) < share_kv(en);
    uint64_t all = user ? share_uid(en) : share_kv(en);
    if (need > all)
        return err_amount(
            e, BC_EBUDGET, user ? "uid_share" : "kv_memory", need, available - available % page,
            "the cache memory of %s is too small: %llu bytes are needed, and it is %llu",
            user ? "a user" : "the daemon", (unsigned long long)need, (unsigned long long)all);
    return err_amount(e, BC_EBUDGET, user ? "uid_share" : "kv_memory", need,
                      available - available % page,
                      "the cache memory of %s is taken: %llu bytes are needed, %llu are left",
                      user ? "this user" : "the daemon", (unsigned long long)need,
                      (unsigned long long)(available - available % page));
}

/* Rows that a session must be able to hold so that it can go on for ever: what is never evicted,
 * and one that comes. */
static uint64_t rows_least(const struct evict_params *p)
{
    uint64_t frozen = p->frozen == EVICT_FROZEN_AUTO ? 0 : p->frozen;
    return frozen + BC_MAX((uint64_t)p->recent, (uint64_t)p->min_gap + 1) + 1;
}

int pressure_admits(struct engine *en, const struct session *s, const struct evict_params *p,
                    uint32_t rows, struct err *e)
{
    bool whole = p->trigger == EVICT_ON_PREFILL_END || !evict_policy_prunes(p->policy);
    uint64_t held = seqcache_bytes_held(s->cache), count = seqcache_count(s->cache);
    uint64_t least = whole ? rows : BC_MIN((uint64_t)rows, over_zero(rows_least(p), count));
    uint64_t need = bytes_needed(s, least), reach = share_reach(en, s);
    if (need == 0 || held + need <= reach || fits(en, s, need))
        return BC_OK;
    return no_memory(en, s, need, over_zero(reach, held), e);
}

/* ---- rung c: who must forget ---- */

static uint32_t rows_protected(const struct session *s)
{
    return (uint32_t)(rows_least(evict_params(s->ev)) - 1);
}

enum giving { GIVES_NOT, GIVES_SOON, GIVES_NOW };

/* Soon: what keeps it from being pruned ends by itself. */
static enum giving may_forget(const struct engine *en, const struct session *s)
{
    if (s->replay != NULL)
        return GIVES_SOON;
    if (!evict_policy_prunes(evict_params(s->ev)->policy)) /* it can leave when it is idle */
        return share_turns(en) && s->req != NULL && !sess_parked(s) ? GIVES_SOON : GIVES_NOT;
    if (s->prune.active || s->lodging.transfer != NULL || s->replay != NULL ||
        engine_now(en) < s->deaf_us || !evict_can_score(s->ev))
        return GIVES_SOON;
    if (s->scoring.active || promised(s))
        return sess_parked(s) ? GIVES_NOT : GIVES_SOON;
    return GIVES_NOW;
}

/* Whether others can have a page of s, and what it is pruned to then: at least half of its overshoot
 * goes, nothing below its share. Only pages that it holds alone come free by that. */
static enum giving victim_gives(const struct engine *en, const struct session *s, uint64_t need,
                                uint32_t *ret_keep)
{
    uint64_t page = pool_page_bytes(s->pool), over = share_overshoot(en, s, 0) / page;
    uint64_t held = seqcache_bytes_held(s->cache) / page, dead = seqcache_rows_dead(s->cache);
    over = BC_MIN(over, share_alone(s) / page);
    uint64_t give = BC_MIN(over, BC_MAX((need + page - 1) / page, (over + 1) / 2));
    uint64_t keep = over_zero((held - give) * KN_PAGE_ROWS, dead);
    if (dead > 0)
        keep = BC_MAX(keep, share_guaranteed(en, s) / page * KN_PAGE_ROWS);
    keep = BC_MAX(keep, (uint64_t)rows_protected(s));
    if (!evict_policy_prunes(evict_params(s->ev)->policy))
        return may_forget(en, s);
    if (give == 0 || (keep + KN_PAGE_ROWS - 1) / KN_PAGE_ROWS >= held)
        return GIVES_NOT;
    if (keep >= seqcache_count(s->cache)) /* its free slots are for rows of this pass */
        return s->pick_n > 0 ? GIVES_SOON : GIVES_NOT;
    *ret_keep = (uint32_t)keep;
    return may_forget(en, s);
}

/* What a session is pruned to that gets no more pages: as if those it has were its budget. 0: it
 * cannot. */
static uint32_t keep_of_itself(const struct engine *en, const struct session *s)
{
    const struct evict_params *p = evict_params(s->ev);
    uint64_t count = seqcache_count(s->cache);
    uint64_t keep = p->budget > 0 ? count * p->keep / p->budget : count - count / 4;
    keep = BC_MAX(keep, (uint64_t)rows_protected(s));
    return keep < count && may_forget(en, s) == GIVES_NOW ? (uint32_t)keep : 0;
}

/* Whether a must forget before b. */
static bool pays_before(const struct session *a, uint64_t over_a, const struct session *b,
                        uint64_t over_b)
{
    if (over_a != over_b)
        return over_a > over_b;
    if (a->priority != b->priority)
        return a->priority < b->priority;
    if (a->last_use_us != b->last_use_us)
        return a->last_use_us < b->last_use_us;
    return a->id < b->id;
}

/* Whether somebody forgets or leaves already. */
static bool pressed(const struct engine *en, const struct uid_turn *scope)
{
    for (uint32_t i = 0; i < en->n_sessions; i++) {
        const struct session *s = en->list[i];
        bool forgets = s->prune.active && s->prune.reason == PRUNE_PRESSURE;
        if ((scope == NULL || s->turns == scope) && (forgets || s->lodging.place == PLACE_LEAVING))
            return true;
    }
    return false;
}

/* Who would pay, so far. */
struct payer {
    struct session *s;
    uint64_t over;
    uint32_t keep; /* 0: it cannot forget */
};

static void payer_weigh(struct payer *best, struct session *s, uint64_t over, uint32_t keep)
{
    if (best->s == NULL || pays_before(s, over, best->s, best->over))
        *best = (struct payer){s, over, keep};
}

/* Starts the prune of whoever must forget for `need` bytes more, of all sessions or of one user's.
 * asker NULL: a limit has shrunk. False: nobody can give. True: wait, and ask again. */
static bool relieve(struct engine *en, struct session *asker, uint64_t need,
                    const struct uid_turn *scope)
{
    struct payer now = {NULL, 0, 0}, soon = {NULL, 0, 0};
    if (pressed(en, scope))
        return true; /* one after the other: what it frees may be enough */
    for (uint32_t i = 0; i < en->n_sessions; i++) {
        struct session *s = en->list[i];
        if (scope != NULL && s->turns != scope)
            continue;
        uint64_t over = share_overshoot(en, s, s == asker ? need : 0);
        uint32_t keep = 0;
        if (over == 0)
            continue;
        if (s == asker) {
            payer_weigh(&now, s, over, keep_of_itself(en, s));
            continue;
        }
        enum giving gives = victim_gives(en, s, need, &keep);
        if (gives == GIVES_NOW)
            payer_weigh(&now, s, over, keep);
        else if (gives == GIVES_SOON)
            payer_weigh(&soon, s, over, 0);
    }
    bool mine = now.s == NULL || now.s == asker; /* nobody else can give now ... */
    if (mine && soon.s != NULL &&
        (now.s == NULL || pays_before(soon.s, soon.over, now.s, now.over))) {
        en->wait_memory = true; /* ... but somebody will */
        return true;
    }
    if (now.keep == 0) /* nobody, or the asker's is the largest and it cannot forget */
        return false;
    prune_start(en, now.s, PRUNE_PRESSURE, now.keep);
    now.s->prune.self = now.s == asker;
    en->worked = true;
    return true;
}

/* Rungs b and c. What leaves for a tier comes back whole, so that goes first. */
static bool ladder(struct engine *en, struct session *asker, uint64_t need,
                   const struct uid_turn *scope, uint64_t missing)
{
    return tier_relieve(en, asker, scope, missing) || relieve(en, asker, need, scope);
}

int pressure_pages(struct engine *en, struct session *s, uint32_t pages, struct err *e)
{
    uint64_t need = (uint64_t)pages * pool_page_bytes(s->pool);
    return fits(en, s, need) ? BC_OK : no_memory(en, s, need, bytes_left(en, s), e);
}

bool pressure_waits(struct engine *en, struct session *s, const struct err *e)
{
    return e->code == BC_EBUDGET && e->needed > e->available &&
           ladder(en, s, e->needed, short_of(en, s, e->needed), e->needed - e->available);
}

bool pressure_passes(struct engine *en, const struct session *s, const struct err *e)
{
    bool user = strcmp(e->field, "uid_share") == 0;
    return e->code == BC_EBUDGET && (user || strcmp(e->field, "kv_memory") == 0) &&
           tier_relieve(en, s, user ? s->turns : NULL, over_zero(e->needed, e->available));
}

/* ---- the gate ---- */

static void end_budget(struct engine *en, struct batch_entry *b, const struct err *e)
{
    b->n = 0;
    en->worked = true;
    if (b->s->req->kind == REQUEST_REPLAY) { /* this daemon has not the memory that there was */
        b->s->replay->failed = *e;
        return;
    }
    request_end(en, b->s, END_BUDGET, e);
}

/* Step 1: is there room under the session's own ceiling? */
static void gate_budget(struct engine *en, struct batch_entry *b)
{
    struct session *s = b->s;
    const struct evict_params *p = evict_params(s->ev);
    struct err e = {0};
    if (budget_room(p, seqcache_count(s->cache)) > 0)
        return;
    if (evict_policy_prunes(p->policy)) {
        prune_start(en, s, PRUNE_BUDGET, p->keep);
        return;
    }
    err_amount(&e, BC_EBUDGET, "budget_tokens", (uint64_t)p->budget + 1, p->budget,
               "the budget of %u tokens is full, and policy none never prunes", p->budget);
    end_budget(en, b, &e);
}

/* The most rows, up to n, that s can have now within `most` pages: those of its free slots and of the pages left, less
 * those that it takes for rows in pages of others which it must give back. */
static uint32_t rows_to_be_had(const struct engine *en, const struct session *s, uint32_t n,
                               uint32_t most)
{
    uint64_t page = pool_page_bytes(s->pool);
    uint32_t some = 0;
    while (some < n) {
        uint32_t more = some + (n - some + 1) / 2;
        if (seqcache_pages_within(s->cache, more, most) * page <= bytes_left(en, s))
            some = more;
        else
            n = more - 1;
    }
    return some;
}

/* A session that never prunes keeps what it takes: past its share only what nobody is promised. */
static bool may_keep(const struct engine *en, const struct session *s, uint64_t need)
{
    return share_turns(en) || evict_policy_prunes(evict_params(s->ev)->policy) ||
           share_overshoot(en, s, need) == 0 ||
           seqcache_bytes_held(s->cache) + need <= share_reach(en, s);
}

bool pressure_room(const struct engine *en, const struct session *s, uint64_t bytes)
{
    return bytes <= bytes_left(en, s) && may_keep(en, s, bytes);
}

uint64_t pressure_room_after(const struct engine *en, const struct session *s, uint64_t bytes)
{
    uint64_t uid = share_uid(en), page = pool_page_bytes(s->pool);
    uint64_t pool = pool_pages_max(s->pool) - pool_pages_out(s->pool) + pool_pages_idle(s->pool);
    uint64_t left = over_zero(share_kv(en) + sharing_idle(en, NULL), models_held(en));
    if (uid != UINT64_MAX)
        left =
            BC_MIN(left, over_zero(uid + sharing_idle(en, s->turns), share_uid_held(en, s->turns)));
    left = BC_MIN(left, pool * page);
    return bytes <= left && may_keep(en, s, bytes) ? left + 1 : bytes;
}

/* Pages that s may hold with so many rows more: those of its budget; but rows that it has forgotten in
 * pages of others make it grow only up to its share, then what is left of them is copied. */
static uint32_t pages_most(const struct engine *en, const struct session *s, uint32_t rows)
{
    uint64_t page = pool_page_bytes(s->pool);
    uint64_t budget = s->budget_bytes > 0 ? s->budget_bytes / page : UINT32_MAX;
    uint64_t fit = ((uint64_t)seqcache_count(s->cache) + rows + KN_PAGE_ROWS - 1) / KN_PAGE_ROWS;
    uint64_t most = BC_MAX(fit, (uint64_t)seqcache_pages(s->cache));
    return (uint32_t)BC_MIN(budget, BC_MAX(most, share_guaranteed(en, s) / page));
}

/* A GPU's memory may be full below kv_memory: as if it were, and the asker forgets what is its own
 * if nobody else can give. True: it will be asked again. */
static bool device_full(struct engine *en, struct session *s, uint64_t need)
{
    if (ladder(en, s, need, NULL, need))
        return true;
    uint32_t keep = keep_of_itself(en, s);
    if (keep == 0)
        return false;
    prune_start(en, s, PRUNE_PRESSURE, keep);
    s->prune.self = true;
    en->worked = true;
    return true;
}

/* Takes the pages, or says how it ends. */
static void gate_take(struct engine *en, struct batch_entry *b, uint32_t rows, uint32_t most)
{
    struct session *s = b->s;
    struct err e = {0};
    int rc = seqcache_reserve_within(s->cache, rows, most, &e);
    if (rc == BC_ENOMEM) {
        while (sharing_shed(en, NULL))
            ;
        relieve_now(en);
        rc = seqcache_reserve_within(s->cache, rows, most, &e);
    }
    if (rc == BC_ENOMEM && device_full(en, s, bytes_needed(s, rows)))
        b->n = 0;
    else if (rc == BC_EDEVICE)
        engine_fail(en, &e);
    else if (rc < 0)
        end_budget(en, b, &e);
}

/* Keys that are about to be turned and lie in pages that others read get a place of their own. False: not in this pass. */
static bool gate_positions(struct engine *en, struct batch_entry *b)
{
    struct session *s = b->s;
    struct err e = {0};
    uint64_t page = pool_page_bytes(s->pool);
    uint64_t need = seqcache_renumber_pages(s->cache) * page;
    bool room = fits(en, s, need);
    if (room) /* holes may have been closed for it: then fewer slots are free */
        room = fits(en, s, need = seqcache_renumber_pages(s->cache) * page);
    if (!room && ladder(en, s, need, short_of(en, s, need), over_zero(need, bytes_left(en, s)))) {
        b->n = 0;
        return false;
    }
    int rc = room ? seqcache_renumber_reserve(s->cache, &e)
                  : no_memory(en, s, need, bytes_left(en, s), &e);
    if (rc == BC_ENOMEM && device_full(en, s, need)) {
        b->n = 0;
        return false;
    }
    if (rc == BC_EDEVICE)
        engine_fail(en, &e);
    else if (rc < 0)
        end_budget(en, b, &e);
    return rc == BC_OK;
}

/* The pass brings every session's slot list along. Sessions that share pages have longer lists than there are pages: no page
 * that was taken has made room for them. */
static void gate_lists(struct engine *en, struct batch_entry *x)
{
    struct session *s = x->s;
    struct batch *b = &s->m->batch;
    const struct kn_ops *ops = s->m->kn->ops;
    uint64_t slots = b->n_slots + seqcache_count(s->cache) + x->n;
    int rc = ops->batch_reserve != NULL
                 ? ops->batch_reserve(s->m->kn, b->rows_max, b->n_entries, slots)
                 : KN_OK;
    struct err e = {0};
    if (rc == KN_OK) {
        b->n_slots = slots;
        return;
    }
    if (rc == KN_ENOMEM) {
        err_set(&e, BC_ENOMEM, "",
                "the memory of device %s is full: a pass over %llu cached tokens does not fit",
                s->m->kn->name, (unsigned long long)slots);
        end_budget(en, x, &e);
        return;
    }
    err_set(&e, BC_EDEVICE, "", "device %s failed before a pass: %s", s->m->kn->name,
            s->m->kn->failed);
    engine_fail(en, &e);
}

/* Step 3: pages for the rows. */
static void gate_pages(struct engine *en, struct batch_entry *b)
{
    struct session *s = b->s;
    struct err e = {0};
    if (positions_due(s) && !gate_positions(en, b))
        return;
    b->n = BC_MIN(b->n, budget_room(evict_params(s->ev), seqcache_count(s->cache)));
    b->n = BC_MIN(b->n, positions_room(s));
    bc_assert(b->n > 0);
    uint32_t rows = promised(s) ? s->req->n - s->req->done : b->n;
    if (s->budget_bytes > budget_bytes(evict_params(s->ev), pool_page_bytes(s->pool)))
        sess_ceiling(en, s);
    uint32_t most = pages_most(en, s, rows), pages = seqcache_pages_within(s->cache, rows, most);
    uint64_t need = (uint64_t)pages * pool_page_bytes(s->pool);
    if (need > 0 && !may_keep(en, s, need)) {
        no_memory(en, s, need, over_zero(share_reach(en, s), seqcache_bytes_held(s->cache)), &e);
        end_budget(en, b, &e);
        return;
    }
    if (!fits(en, s, need)) {
        uint32_t some = promised(s) ? 0 : rows_to_be_had(en, s, b->n, most);
        if (some == 0 &&
            ladder(en, s, need, short_of(en, s, need), over_zero(need, bytes_left(en, s)))) {
            b->n = 0; /* somebody forgets or leaves: it will be asked again */
            return;
        }
        if (some == 0) {
            no_memory(en, s, need, bytes_left(en, s), &e);
            end_budget(en, b, &e);
            return;
        }
        rows = b->n = some;
    }
    gate_take(en, b, rows, most);
}

/* ---- a limit that was lowered while running ---- */

/* What sessions share comes free when all of them have let go of it: one after the other is pruned to
 * its share, and what is left is copied out of the shared pages. For that, more than before may be held
 * for a while: a limit is being lowered, and pages come free that were there all the time. False:
 * nobody is above its share, or can do anything about it. */
static bool part(struct engine *en, const struct uid_turn *scope)
{
    struct payer first = {NULL, 0, 0};
    for (uint32_t i = 0; i < en->n_sessions; i++) {
        struct session *s = en->list[i];
        uint64_t over = share_overshoot(en, s, 0);
        if (over > 0 && (scope == NULL || s->turns == scope) &&
            seqcache_bytes_shared(s->cache) > 0 && may_forget(en, s) == GIVES_NOW)
            payer_weigh(&first, s, over, 0);
    }
    struct session *s = first.s;
    if (s == NULL)
        return false;
    uint64_t page = pool_page_bytes(s->pool), share = share_guaranteed(en, s) / page;
    uint64_t keep = BC_MAX(share * KN_PAGE_ROWS, (uint64_t)rows_protected(s));
    uint32_t count = seqcache_count(s->cache);
    if (count > keep) {
        prune_start(en, s, PRUNE_PRESSURE, (uint32_t)keep);
    } else {
        uint32_t fit = (count + KN_PAGE_ROWS - 1) / KN_PAGE_ROWS;
        uint32_t most = BC_MAX(fit, (uint32_t)share);
        uint32_t more = seqcache_pages_within(s->cache, 0, most);
        if (seqcache_pages(s->cache) <= most ||
            seqcache_reserve_within(s->cache, 0, most, NULL) < 0)
            return false;
        en->page_budget = BC_MAX(en->page_budget, models_held(en) + more * page);
    }
    en->worked = true;
    return true;
}

/* What is above the limit goes, in the order of the ladder; then what is shared. */
static bool come_down(struct engine *en, uint64_t over, const struct uid_turn *scope)
{
    return ladder(en, NULL, over, scope, over) || part(en, scope);
}

static void shrink(struct engine *en)
{
    uint64_t held = models_held(en), kv = share_kv(en), uid = share_uid(en);
    while (held > kv && sharing_shed(en, NULL))
        held = models_held(en);
    if (held > kv) {
        relieve_now(en);
        held = models_held(en);
        if (held > kv && !come_down(en, held - kv, NULL) && !en->shrink_told) {
            en->shrink_told = true;
            log_warn("engine.pressure",
                     "sessions that never prune hold %llu bytes of caches, %llu above kv_memory",
                     (unsigned long long)held, (unsigned long long)(held - kv));
        }
    }
    for (uint32_t i = 0; uid != UINT64_MAX && i < en->n_sessions; i++) {
        const struct uid_turn *u = en->list[i]->turns;
        while (share_uid_held(en, u) > uid && sharing_shed(en, u))
            ;
        if (share_uid_held(en, u) <= uid)
            continue;
        relieve_now(en);
        if (share_uid_held(en, u) > uid)
            come_down(en, share_uid_held(en, u) - uid, u);
    }
    en->page_budget = BC_MAX(en->kv_memory, BC_MIN(en->page_budget, models_held(en)));
}

/* Whether somebody waits for the next word while caches are refreshed. */
static bool any_decodes(struct engine *en)
{
    for (struct model_ref *m = models_ready(en->models); m != NULL; m = models_ready(m->next))
        for (uint32_t i = 0; i < m->batch.n_entries; i++)
            if (m->batch.entries[i].decode && !m->batch.entries[i].s->prune.active)
                return true;
    return false;
}

void pressure_reserve(struct engine *en)
{
    en->score_rows_left = en->opt.score_rows;
    en->slices_us = 0;
    en->wait_memory = false;
    shrink(en);
    for (struct model_ref *m = models_ready(en->models); m != NULL; m = models_ready(m->next))
        for (uint32_t i = 0; i < m->batch.n_entries; i++)
            if (!m->batch.entries[i].s->prune.active)
                gate_budget(en, &m->batch.entries[i]);
    en->neighbours = any_decodes(en);
    prunes_run(en);
    for (struct model_ref *m = models_ready(en->models); m != NULL; m = models_ready(m->next))
        for (uint32_t i = 0; i < m->batch.n_entries; i++) {
            struct batch_entry *b = &m->batch.entries[i];
            if (b->s->prune.active || b->s->req == NULL || en->failed)
                b->n = 0; /* WORKING, or ended above */
            if (b->n > 0)
                gate_pages(en, b);
            if (b->n > 0 && !en->failed)
                gate_lists(en, b);
        }
}

void budgets_check(struct engine *en)
{
    const struct ledger_owner *all = ledger_daemon(en->ledger);
    uint64_t held = models_held(en);
    for (uint32_t i = 0; i < en->n_sessions; i++) {
        const struct session *s = en->list[i];
        bc_assert(s->budget_bytes == 0 || seqcache_bytes_held(s->cache) <= s->budget_bytes);
    }
    /* what is booked, to sessions and as shared, adds up to the pools' numbers */
    bc_assert(held == ledger_all(all, LEDGER_kv) + ledger_all(all, LEDGER_shared));
    bc_assert(held <= en->page_budget);
}
