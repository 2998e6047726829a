/* positions.c: what follows when a session's next position would leave the context that its model was trained on.
 *
 *   keep       position = stream index, for ever: the session ends there (END context)
 *   rerotate   the cached tokens are renumbered and the session goes on:
 *
 *     stream     0  1  7  8  ...  8190  8191 |             position_zero = stream - count
 *     position   0  1  7  8  ...  8190  8191 |  8192: not trained
 *                                            v
 *     position   0  1  2  3  ...  2046  2047 |  2048  2049 ...     n cached tokens are at 0 .. n - 1
 *
 * Keys are turned by the difference of the two angles, values and hidden rows have no position in them, and so whatever looks at
 * the cache (the next pass, every policy) finds a text of n tokens. Stream indices stay. A token at the front of the cache that
 * nothing before it was dropped from keeps its position and its bits: a frozen system prompt stays shared.
 *
 * When: right before the row is appended whose position would be the first one outside, whatever brought it: prompts are cut there,
 * a prune that is due comes first. So it happens at a stream index that follows from the tokens and evictions before it alone, and
 * a journal that is replayed does it again at the same place. Nothing can fail at that point: the pages are made sure of in the
 * memory gate (positions_reserve), and the query that `tova` keeps is replaced by the pass that follows. */
#include "core.h"
#include "log.h"
#include <inttypes.h>
#include <string.h>

/* ---- opening, and a new budget ---- */

int positions_named(const char *name, bool *ret_rerotate, struct err *e)
{
    bool rerotate = name != NULL && strcmp(name, "rerotate") == 0;
    if (name != NULL && name[0] != '\0' && !rerotate && strcmp(name, "keep") != 0)
        return err_set(e, BC_EUNKNOWN, "positions",
                       "unknown positions \"%.20s\"; known: keep, rerotate", name);
    *ret_rerotate = rerotate;
    return BC_OK;
}

const char *positions_name(const struct session *s)
{
    return s->rerotate ? "rerotate" : "keep";
}

int positions_check(const struct model_ref *m, bool rerotate, const struct evict_params *p,
                    struct err *e)
{
    uint32_t context = m->info.context_train;
    if (!rerotate)
        return BC_OK;
    if (m->kn->ops->kv_rotate == NULL)
        return err_set(e, BC_EUNSUPPORTED, "positions",
                       "positions rerotate: backend %s cannot turn keys", m->kn->name);
    if (!evict_policy_prunes(p->policy) || p->budget == 0)
        return err_set(e, BC_EINVALID, "positions",
                       "positions rerotate needs a budget and a policy that prunes (policy %s, "
                       "budget_tokens %u): what is never dropped cannot be renumbered into %u "
                       "positions for ever",
                       p->policy->name, p->budget, context);
    if (p->budget > context)
        return err_amount(e, BC_EINVALID, "positions", p->budget, context,
                          "positions rerotate: a budget of %u tokens is more than the %u positions "
                          "that the model was trained on",
                          p->budget, context);
    return BC_OK;
}

/* ---- while it runs ---- */

uint64_t positions_next(const struct session *s)
{
    return s->stream - s->position_zero;
}

bool positions_due(const struct session *s)
{
    return s->rerotate && positions_next(s) >= s->m->info.context_train;
}

uint32_t positions_room(const struct session *s)
{
    uint32_t context = s->m->info.context_train;
    if (!s->rerotate)
        return UINT32_MAX;
    if (positions_due(s))
        return context - BC_MIN(context, seqcache_count(s->cache));
    return context - (uint32_t)positions_next(s);
}

void positions_renumber(struct session *s, struct batch_entry *x)
{
    uint64_t start = engine_now(s->m->en);
    struct err e = {0};
    uint32_t n = seqcache_count(s->cache);
    struct kn_seq view = seqcache_view(s->cache);
    bc_assert(positions_due(s) && !s->scoring.active);
    bc_assert(n + (uint64_t)x->n <= s->m->info.context_train);
    /* a device that fails here fails the pass that follows: its failure is sticky */
    model_renumber(s->m->model, &view, seqcache_positions(s->cache), &e);
    seqcache_renumber(s->cache);
    s->position_zero = s->stream - n;
    x->renumbered = true;
    x->renumber_us = engine_now(s->m->en) - start;
    log_debug("engine.positions",
              "session %" PRIu64 ": %u tokens renumbered at stream index %" PRIu64, s->id, n,
              s->stream);
}

void positions_report(struct engine *en, struct session *s, const struct batch_entry *x)
{
    struct report *r = report_new(REP_REROTATED, 0);
    r->u.rerotated.stream = s->stream - x->n;
    r->u.rerotated.tokens = seqcache_count(s->cache) - x->n;
    r->u.rerotated.position = s->m->info.context_train;
    r->u.rerotated.micros = x->renumber_us;
    report_stream(en, s, r);
}
