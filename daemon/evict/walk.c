/* walk.c: policies that look at every stored key go over them here, cut where the engine wants to make a pass.
 *
 *   walk_open   the slice, the policy's own state; what they take is booked
 *   slice       KEYS_SLICE rows of one layer, expanded to f32, shown to the policy
 *   walk_close  after the last slice, on an error, or when the run is forgotten
 *
 * The order of slices is fixed, so where a walk is cut changes no bit of its result. How much one call may do is given in rows,
 * as for policies that ask the model: so many rows of all layers and rounds, in whole slices. */
#include "policy.h"
#include <stdlib.h>

static uint64_t slice_bytes(const struct kn_kv *kv)
{
    return (uint64_t)KEYS_SLICE * kv->n_kv_heads * kv->head_dim * sizeof(float);
}

uint64_t walk_bytes(const struct evict_params *p, const struct kn_kv *kv, uint32_t n)
{
    const struct evict_walker *how = p->policy->walker;
    return how != NULL ? slice_bytes(kv) + how->state_bytes(p, kv, n) : 0;
}

static int walk_open(struct evict *ev, const struct seqcache *s, float *value, struct err *e)
{
    struct evict_walk *w = &ev->walk;
    const struct evict_params *p = &ev->params;
    const struct kn_kv *kv = pool_kv(seqcache_pool(s));
    size_t state = p->policy->walker->state_bytes(p, kv, seqcache_count(s));
    *w = (struct evict_walk){.active = true, .value = value};
    int rc = keys_open(&w->keys, s, e);
    if (rc == 0 && state > 0 && (w->state = calloc(1, state)) == NULL)
        rc = err_nomem(e, state);
    if (rc == 0)
        rc = p->policy->walker->open(ev, w, e);
    if (rc < 0) {
        walk_close(ev);
        return rc;
    }
    w->bytes = walk_bytes(p, kv, seqcache_count(s));
    ledger_charge(ev->owner, LEDGER_refresh, w->bytes);
    w->first = w->from;
    return 0;
}

void walk_close(struct evict *ev)
{
    struct evict_walk *w = &ev->walk;
    if (!w->active)
        return;
    ledger_credit(ev->owner, LEDGER_refresh, w->bytes);
    free(w->state);
    keys_close(&w->keys);
    *w = (struct evict_walk){.active = false};
}

/* The next slice. */
static void walk_step(const struct evict_walker *how, struct evict_walk *w)
{
    if (w->first == w->from && how->start != NULL)
        how->start(w);
    uint32_t count = keys_load(&w->keys, w->layer, w->first);
    how->slice(w, count);
    w->first += count;
    if (w->first < w->keys.seq.n)
        return;
    w->first = w->from;
    if (++w->round == how->rounds) {
        w->round = 0;
        w->layer++;
    }
}

int walk_some(struct evict *ev, const struct seqcache *s, uint32_t max_rows, float *value,
              bool *ret_done, struct err *e)
{
    struct evict_walk *w = &ev->walk;
    const struct evict_walker *how = ev->params.policy->walker;
    *ret_done = false;
    int rc = w->active ? 0 : walk_open(ev, s, value, e);
    if (rc < 0)
        return rc;
    bc_assert(w->value == value && w->keys.seq.n == seqcache_count(s));
    w->keys.seq = seqcache_view(s); /* its pages may have been packed more tightly since */
    uint64_t left = (uint64_t)max_rows * w->keys.n_layers * how->rounds / KEYS_SLICE;
    left = max_rows == 0 ? UINT64_MAX : BC_MAX(left, (uint64_t)1);
    uint64_t slices = 0;
    for (; w->layer < w->keys.n_layers && slices < left; slices++)
        walk_step(how, w);
    ev->rows_done = (double)(slices * KEYS_SLICE) / (w->keys.n_layers * how->rounds);
    if (w->layer < w->keys.n_layers)
        return 0;
    walk_close(ev);
    *ret_done = true;
    return 0;
}
