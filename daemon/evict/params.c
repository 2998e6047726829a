/* params.c: what a client asked for, turned into checked parameters. Every refusal names the field,
 * its value and the limit.
 *
 *   field     left open                                  notes
 *   policy    counter_causal_fast
 *   budget    the daemon's default; policy none: none    bytes round down to pages of 64 tokens
 *   keep      3/4 of the budget                          counts the frozen ones
 *   frozen    -                                          auto: fixed by the first chat call
 *   recent    min(32, budget / 8)
 *   score     logit
 *   span      15, quantile 0.25
 *   trigger   budget
 */
#include "evict.h"
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define DEFAULT_RECENT_MAX 32
#define DEFAULT_SPAN 15
#define DEFAULT_QUANTILE 0.25f
#define BUDGET_MAX ((uint64_t)POOL_PAGES_MAX * KN_PAGE_ROWS)

/* ---- names ----------------------------------------------------------------------------------- */

static int resolve_policy(const char *name, const struct evict_policy **ret, struct err *e)
{
    const struct evict_policy *found =
                                  evict_policy_find(name != NULL ? name : EVICT_POLICY_DEFAULT),
                              *p;
    char known[256] = "";
    if (found == NULL) {
        for (unsigned i = 0; (p = evict_policy_at(i)) != NULL; i++) {
            size_t len = strlen(known);
            snprintf(known + len, sizeof known - len, "%s%s", i > 0 ? ", " : "", p->name);
        }
        return err_set(e, BC_EUNKNOWN, "policy", "unknown policy \"%.40s\"; known: %s", name,
                       known);
    }
    *ret = found;
    return 0;
}

/* One of two names; NULL is the first. */
static int resolve_choice(const char *field, const char *name, const char *const names[2],
                          unsigned *ret, struct err *e)
{
    for (unsigned i = 0; i < 2; i++)
        if (name == NULL || strcmp(name, names[i]) == 0) {
            *ret = i;
            return 0;
        }
    return err_set(e, BC_EUNKNOWN, field, "unknown %s \"%.40s\"; known: %s, %s", field, name,
                   names[0], names[1]);
}

/* ---- numbers --------------------------------------------------------------------------------- */

static int resolve_budget(const struct evict_request *r, size_t page_bytes, uint64_t default_bytes,
                          struct evict_params *p, struct err *e)
{
    uint64_t bytes = r->budget_bytes;
    p->budget = r->budget_tokens;
    if (bytes != 0 && p->budget != 0)
        return err_set(e, BC_EINVALID, "budget_tokens",
                       "budget_tokens %u and budget_bytes %" PRIu64 ": give one of the two",
                       p->budget, bytes);
    if (bytes == 0 && p->budget == 0 && evict_policy_prunes(p->policy))
        bytes = default_bytes;
    if (bytes == 0)
        return 0;
    if (bytes < page_bytes)
        return err_amount(e, BC_EBUDGET, "budget_bytes", page_bytes, bytes,
                          "budget_bytes %" PRIu64 " is less than one page of %u tokens (%zu bytes)",
                          bytes, KN_PAGE_ROWS, page_bytes);
    p->budget = (uint32_t)BC_MIN(bytes / page_bytes, (uint64_t)POOL_PAGES_MAX) * KN_PAGE_ROWS;
    return 0;
}

static uint32_t recent_auto(uint32_t of)
{
    return BC_MIN(of / 8, DEFAULT_RECENT_MAX);
}

static uint32_t keep_auto(uint32_t budget)
{
    return budget - budget / 4 - (budget % 4 != 0);
}

static int resolve_recent(int64_t asked, struct evict_params *p, struct err *e)
{
    uint32_t of = p->budget > 0 ? p->budget : p->keep;
    if (asked < -1 || asked > UINT32_MAX)
        return err_set(e, BC_EINVALID, "recent_tokens",
                       "recent_tokens %" PRId64 ": must be 0 to %u", asked, UINT32_MAX);
    p->recent = asked == -1 ? recent_auto(of) : (uint32_t)asked;
    return 0;
}

int evict_resolve(const struct evict_request *r, size_t page_bytes, uint64_t default_budget_bytes,
                  struct evict_params *ret, struct err *e)
{
    static const char *const scores[2] = {"logit", "logprob"};
    static const char *const triggers[2] = {"budget", "prefill_end"};
    struct evict_params p = {.frozen = r->frozen, .min_gap = r->min_gap, .seed = r->seed};
    unsigned score, trigger;
    int rc;
    if ((rc = resolve_policy(r->policy, &p.policy, e)) < 0 ||
        (rc = resolve_choice("score", r->score, scores, &score, e)) < 0 ||
        (rc = resolve_choice("trigger", r->trigger, triggers, &trigger, e)) < 0 ||
        (rc = resolve_budget(r, page_bytes, default_budget_bytes, &p, e)) < 0)
        return rc;
    p.score = score == 1 ? EVICT_LOGPROB : EVICT_LOGIT;
    p.trigger = trigger == 1 ? EVICT_ON_PREFILL_END : EVICT_ON_BUDGET;
    p.keep = r->keep != 0 ? r->keep : keep_auto(p.budget);
    p.span = r->span != 0 ? r->span : DEFAULT_SPAN;
    p.span_quantile = r->span_quantile < 0 ? DEFAULT_QUANTILE : r->span_quantile;
    if ((rc = resolve_recent(r->recent, &p, e)) < 0)
        return rc;
    if ((rc = evict_check(&p, e)) < 0) {
        evict_advise(r, &p, page_bytes, e);
        return rc;
    }
    *ret = p;
    return 0;
}

/* ---- what must hold -------------------------------------------------------------------------- */

/* Rows that no prune may drop, of parameters that may not fit together yet. */
static uint64_t rows_held_back(const struct evict_params *p)
{
    uint64_t frozen = p->frozen == EVICT_FROZEN_AUTO ? 0 : p->frozen;
    return frozen + BC_MAX((uint64_t)p->recent, (uint64_t)p->min_gap + 1);
}

/* Protected rows must fit in what is kept. The field at fault is the one that alone is too large,
 * else the largest part. */
static int check_protected(const struct evict_params *p, struct err *e)
{
    uint64_t frozen = p->frozen == EVICT_FROZEN_AUTO ? 0 : p->frozen;
    uint64_t blind = (uint64_t)p->min_gap + 1, all = rows_held_back(p);
    if (all <= p->keep)
        return 0;
    const char *field = frozen >= p->keep   ? "frozen_tokens"
                        : blind > p->recent ? "min_gap"
                                            : "recent_tokens";
    return err_set(e, BC_EINVALID, field,
                   "frozen_tokens %" PRIu64 " + max(recent_tokens %u, min_gap %u + 1) = %" PRIu64
                   " tokens are never evicted: more than keep_tokens %u",
                   frozen, p->recent, p->min_gap, all, p->keep);
}

static int check_pruning(const struct evict_params *p, struct err *e)
{
    if (p->budget == 0 && p->trigger == EVICT_ON_BUDGET)
        return err_set(e, BC_EINVALID, "budget_tokens", "policy %s needs a budget",
                       p->policy->name);
    if (p->budget == 1)
        return err_set(e, BC_EINVALID, "budget_tokens",
                       "budget_tokens 1: must be at least 2, of which a prune leaves one");
    if (p->keep == 0)
        return err_set(e, BC_EINVALID, "keep_tokens",
                       "keep_tokens 0: without a budget it must be at least 1");
    if (p->budget != 0 && p->keep >= p->budget)
        return err_set(e, BC_EINVALID, "keep_tokens",
                       "keep_tokens %u: must be less than the budget of %u tokens", p->keep,
                       p->budget);
    return check_protected(p, e);
}

int evict_check(const struct evict_params *p, struct err *e)
{
    if (p->span % 2 == 0 || p->span > EVICT_SPAN_MAX)
        return err_set(e, BC_EINVALID, "span", "span %u: must be odd, 1 to %u", p->span,
                       EVICT_SPAN_MAX);
    if (!(p->span_quantile >= 0 && p->span_quantile <= 1))
        return err_set(e, BC_EINVALID, "span_quantile", "span_quantile %g: must be 0 to 1",
                       (double)p->span_quantile);
    if (evict_policy_prunes(p->policy))
        return check_pruning(p, e);
    if (p->trigger == EVICT_ON_PREFILL_END)
        return err_set(e, BC_EINVALID, "trigger", "trigger prefill_end: policy %s never prunes",
                       p->policy->name);
    return 0;
}

/* ---- what would do ---------------------------------------------------------------------------- */

/* With a larger budget its usual keep grows, and so may what "auto" takes for recent: by three quarters and by an eighth, so
 * that the first budget that holds them is the least. A keep that was asked for grows alone, as long as the budget is larger. */
static void grow(const struct evict_request *r, struct evict_params *want)
{
    uint64_t all = rows_held_back(want);
    want->keep = (uint32_t)BC_MAX(all, (uint64_t)r->keep);
    if (r->keep != 0 && want->budget > want->keep)
        return;
    want->budget = r->keep != 0 ? want->keep : (uint32_t)(all + all / 3); /* no less can do */
    do {
        want->budget++;
        want->keep = r->keep != 0 ? want->budget - 1 : keep_auto(want->budget);
        if (r->recent == -1)
            want->recent = recent_auto(want->budget);
    } while (rows_held_back(want) > want->keep);
    want->keep = (uint32_t)BC_MAX(rows_held_back(want), (uint64_t)r->keep);
}

void evict_advise(const struct evict_request *r, const struct evict_params *p, size_t page_bytes,
                  struct err *e)
{
    static const char *const fields[] = {"keep_tokens", "frozen_tokens", "recent_tokens",
                                         "min_gap"};
    struct evict_params want = *p;
    bool ours = false;
    for (size_t i = 0; e != NULL && i < ARRAY_LEN(fields); i++)
        ours = ours || strcmp(e->field, fields[i]) == 0;
    if (!ours || p->budget < 2 || BC_MAX(rows_held_back(p), (uint64_t)r->keep) > BUDGET_MAX / 2)
        return;
    grow(r, &want);
    size_t n = strlen(e->text), size = sizeof e->text;
    n += (size_t)snprintf(e->text + n, size - n, "; it takes keep_tokens %u", want.keep);
    if (want.budget != p->budget && n < size)
        n += (size_t)snprintf(e->text + n, size - n, " and a budget of %u tokens", want.budget);
    if (want.budget != p->budget && n < size && page_bytes > 0)
        snprintf(e->text + n, size - n, " (%" PRIu64 " bytes)", budget_bytes(&want, page_bytes));
}
