/* pressure.c: the memory gate: a slot for every new token before the pass, or a reason why not.
 *
 *   pressure_reserve
 *     1  a full cache that must grow     --> prune to keep            (policy none: END budget)
 *     2  prunes under way, first come first served, at most score_rows rows a step  --> WORKING
 *     3  rows granted = min(wanted, room in the budget); pages taken  --> OK
 *                                        no page left in the daemon   --> compact idle caches,
 *                                                                         then REFUSED: END budget
 *
 * Two ceilings hold at every instant, and budgets_check asserts them every step: a session's held
 * bytes <= its budget, all pools' held bytes <= kv_memory. A prune is due only when the cache is
 * full and something waits to be appended, so where a prompt is cut changes nothing.
 */
#include "core.h"
#include <string.h>

/* ---- pages ---- */

static uint64_t bytes_needed(const struct session *s, uint64_t rows)
{
    /* more rows than fit in 32 bits are more than any pool has */
    uint32_t n = (uint32_t)BC_MIN(rows, (uint64_t)UINT32_MAX - KN_PAGE_ROWS);
    return (uint64_t)seqcache_pages_needed(s->cache, n) * pool_page_bytes(s->pool);
}

static int bytes_fit(struct engine *en, const struct pool *p, uint64_t need, struct err *e)
{
    uint64_t held = models_held(en);
    uint64_t left = en->page_budget > held ? en->page_budget - held : 0;
    uint64_t pool_left = (uint64_t)(pool_pages_max(p) - pool_pages_out(p)) * pool_page_bytes(p);
    left = BC_MIN(left, pool_left);
    if (need <= left)
        return BC_OK;
    return err_amount(e, BC_EBUDGET, "kv_memory", need, left,
                      "the daemon's cache memory is taken: %llu bytes are needed, %llu are left",
                      (unsigned long long)need, (unsigned long long)left);
}

/* Gives back the pages that live rows no longer fill, of all sessions that have no rows in this
 * pass and no prompt that was promised its pages. */
static void compact_idle(struct engine *en)
{
    for (uint32_t i = 0; i < en->n_sessions; i++) {
        struct session *s = en->list[i];
        bool promised = s->req != NULL && s->req->phase == REQUEST_PREFILL &&
                        evict_params(s->ev)->trigger == EVICT_ON_PREFILL_END;
        if (s->pick_n == 0 && !promised && !s->prune.active && !s->scoring.active &&
            s->lodging.transfer == NULL)
            seqcache_compact(s->cache);
    }
}

int pressure_fits(struct engine *en, const struct session *s, uint64_t rows, struct err *e)
{
    int rc = bytes_fit(en, s->pool, bytes_needed(s, rows), e);
    if (rc == BC_OK)
        return rc;
    compact_idle(en);
    return bytes_fit(en, s->pool, bytes_needed(s, rows), e);
}

int pressure_pages(struct engine *en, const struct pool *p, uint32_t pages, struct err *e)
{
    uint64_t need = (uint64_t)pages * pool_page_bytes(p);
    int rc = bytes_fit(en, p, need, e);
    if (rc == BC_OK)
        return rc;
    compact_idle(en);
    return bytes_fit(en, p, need, e);
}

bool pressure_passes(struct engine *en, const struct session *s, const struct err *e)
{
    return e->code == BC_EBUDGET && strcmp(e->field, "kv_memory") == 0 &&
           tier_relieve(en, s, e->needed - BC_MIN(e->needed, e->available));
}

/* ---- the gate ---- */

static void end_budget(struct engine *en, struct batch_entry *b, const struct err *e)
{
    b->n = 0;
    en->worked = true;
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

/* Step 3: pages for the rows. */
static void gate_pages(struct engine *en, struct batch_entry *b)
{
    struct session *s = b->s;
    struct err e = {0};
    b->n = BC_MIN(b->n, budget_room(evict_params(s->ev), seqcache_count(s->cache)));
    bc_assert(b->n > 0);
    int rc = pressure_fits(en, s, b->n, &e);
    if (rc < 0 && pressure_passes(en, s, &e)) {
        b->n = 0; /* pages will be free in a few steps: it waits for them */
        return;
    }
    if (rc == BC_OK)
        rc = seqcache_reserve(s->cache, b->n, &e);
    if (rc < 0)
        end_budget(en, b, &e);
}

void pressure_reserve(struct engine *en)
{
    en->score_rows_left = en->opt.score_rows;
    for (struct model_ref *m = models_ready(en->models); m != NULL; m = models_ready(m->next))
        for (uint32_t i = 0; i < m->batch.n_entries; i++)
            gate_budget(en, &m->batch.entries[i]);
    prunes_run(en);
    for (struct model_ref *m = models_ready(en->models); m != NULL; m = models_ready(m->next))
        for (uint32_t i = 0; i < m->batch.n_entries; i++) {
            struct batch_entry *b = &m->batch.entries[i];
            if (b->s->prune.active || b->s->req == NULL || en->failed)
                b->n = 0; /* WORKING, or ended above */
            if (b->n > 0)
                gate_pages(en, b);
        }
}

void budgets_check(struct engine *en)
{
    uint64_t held = 0;
    for (uint32_t i = 0; i < en->n_sessions; i++) {
        const struct session *s = en->list[i];
        uint64_t mine = seqcache_bytes_held(s->cache);
        bc_assert(s->budget_bytes == 0 || mine <= s->budget_bytes);
        held += mine;
    }
    bc_assert(held == models_held(en)); /* the sessions' numbers add up to the pools' */
    bc_assert(held <= en->page_budget);
}
