/* state.c: what a policy knows of a session beside its cache, as bytes and back: h2o's mass, tova's
 * query; the parameters; the client's wishes, which a live budget resolves again.
 *
 * Names travel as text and become the program's own again, so a table may grow between the two. */
#include "policy.h"
#include "bytes.h"
#include <stdlib.h>
#include <string.h>

#define QUERY_MAX (1u << 20)

static const char *const score_names[2] = {"logit", "logprob"};
static const char *const trigger_names[2] = {"budget", "prefill_end"};

static int damaged(struct err *e, const char *what)
{
    return err_set(e, BC_ECORRUPT, "state", "the policy's state is damaged: %s", what);
}

static bool name_of(const char *text, const char *const names[2], const char **ret)
{
    for (int i = 0; i < 2; i++)
        if (strcmp(text, names[i]) == 0) {
            *ret = names[i];
            return true;
        }
    return false;
}

/* ---- parameters ---- */

void evict_params_put(const struct evict_params *p, struct bytes_out *o)
{
    bytes_put_text(o, p->policy->name);
    bytes_put_text(o, score_names[p->score == EVICT_LOGPROB]);
    bytes_put_text(o, trigger_names[p->trigger == EVICT_ON_PREFILL_END]);
    bytes_put_u32(o, p->budget);
    bytes_put_u32(o, p->keep);
    bytes_put_u32(o, p->frozen);
    bytes_put_u32(o, p->recent);
    bytes_put_u32(o, p->min_gap);
    bytes_put_u32(o, p->span);
    bytes_put_f32(o, p->span_quantile);
    bytes_put_u64(o, p->seed);
}

int evict_params_get(struct bytes_in *in, struct evict_params *ret, struct err *e)
{
    char policy[32], score[16], trigger[16];
    const char *name;
    bytes_get_text(in, policy, sizeof policy);
    bytes_get_text(in, score, sizeof score);
    bytes_get_text(in, trigger, sizeof trigger);
    struct evict_params p = {.policy = evict_policy_find(policy)};
    p.budget = bytes_get_u32(in);
    p.keep = bytes_get_u32(in);
    p.frozen = bytes_get_u32(in);
    p.recent = bytes_get_u32(in);
    p.min_gap = bytes_get_u32(in);
    p.span = bytes_get_u32(in);
    p.span_quantile = bytes_get_f32(in);
    p.seed = bytes_get_u64(in);
    if (in->failed || p.policy == NULL)
        return damaged(e, "no such policy");
    if (!name_of(score, score_names, &name))
        return damaged(e, "no such score");
    p.score = name == score_names[1] ? EVICT_LOGPROB : EVICT_LOGIT;
    if (!name_of(trigger, trigger_names, &name))
        return damaged(e, "no such trigger");
    p.trigger = name == trigger_names[1] ? EVICT_ON_PREFILL_END : EVICT_ON_BUDGET;
    int rc = evict_check(&p, e);
    if (rc == 0)
        *ret = p;
    return rc;
}

void evict_request_put(const struct evict_request *r, struct bytes_out *o)
{
    bytes_put_text(o, r->policy);
    bytes_put_text(o, r->score);
    bytes_put_text(o, r->trigger);
    bytes_put_u64(o, r->budget_bytes);
    bytes_put_u32(o, r->budget_tokens);
    bytes_put_u32(o, r->keep);
    bytes_put_u32(o, r->frozen);
    bytes_put_u64(o, (uint64_t)r->recent);
    bytes_put_u32(o, r->min_gap);
    bytes_put_u32(o, r->span);
    bytes_put_f32(o, r->span_quantile);
    bytes_put_u64(o, r->seed);
}

int evict_request_get(struct bytes_in *in, struct evict_request *ret, struct err *e)
{
    char policy[32], score[16], trigger[16];
    struct evict_request r = {0};
    bytes_get_text(in, policy, sizeof policy);
    bytes_get_text(in, score, sizeof score);
    bytes_get_text(in, trigger, sizeof trigger);
    const struct evict_policy *p = evict_policy_find(policy);
    if (in->failed || p == NULL || !name_of(score, score_names, &r.score) ||
        !name_of(trigger, trigger_names, &r.trigger))
        return damaged(e, "no such policy, score or trigger");
    r.policy = p->name;
    r.budget_bytes = bytes_get_u64(in);
    r.budget_tokens = bytes_get_u32(in);
    r.keep = bytes_get_u32(in);
    r.frozen = bytes_get_u32(in);
    r.recent = (int64_t)bytes_get_u64(in);
    r.min_gap = bytes_get_u32(in);
    r.span = bytes_get_u32(in);
    r.span_quantile = bytes_get_f32(in);
    r.seed = bytes_get_u64(in);
    if (in->failed)
        return damaged(e, "it ends too early");
    *ret = r;
    return 0;
}

/* ---- what the policy has learnt ---- */

void evict_state_put(const struct evict *ev, struct bytes_out *o)
{
    MAGIC_OK(ev, EVICT_MAGIC);
    bytes_put_u32(o, ev->n_mass);
    bytes_put(o, ev->mass, ev->n_mass * sizeof *ev->mass);
    bytes_put_u32(o, ev->query_len);
    bytes_put(o, ev->query, ev->query_len * sizeof *ev->query);
}

int evict_state_get(struct evict *ev, struct bytes_in *in, uint32_t n_rows, struct err *e)
{
    MAGIC_OK(ev, EVICT_MAGIC);
    uint32_t n_mass = bytes_get_u32(in);
    const void *mass = bytes_take(in, n_mass * sizeof *ev->mass);
    uint32_t query_len = bytes_get_u32(in);
    const void *query = bytes_take(in, query_len * sizeof *ev->query);
    if (in->failed || n_mass > n_rows || query_len > QUERY_MAX)
        return damaged(e, "it has more values than tokens, or ends too early");
    float *to = NULL;
    if (n_mass > 0) {
        if ((to = malloc(n_mass * sizeof *to)) == NULL)
            return err_nomem(e, n_mass * sizeof *to);
        memcpy(to, mass, n_mass * sizeof *to);
    }
    evict_abort(ev);
    free(ev->mass);
    ev->mass = to;
    ev->n_mass = ev->mass_max = n_mass;
    if (query_len > 0)
        evict_note_query(ev, query, query_len);
    return 0;
}

void evict_state_clear(struct evict *ev)
{
    MAGIC_OK(ev, EVICT_MAGIC);
    evict_abort(ev);
    evict_forget(ev);
    free(ev->mass);
    ev->mass = NULL;
    ev->n_mass = ev->mass_max = 0;
    /* a query is one row whatever the cache's size: it may stay */
}
