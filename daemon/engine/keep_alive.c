/* keep_alive.c: models that nobody uses give their weights back.
 *
 *   READY --no request for keep_alive--> its sessions' caches leave (tier.c) --all away--> ASLEEP
 *     ^                                                                                      |
 *     '---- loader: the same file again, checked to be the same <---- a command that needs it'
 *
 * What stays of a model that sleeps: its vocabulary, its templates, its backend and its pools, without
 * a page; so sessions can be listed, attached to and closed. A model whose sessions' caches have
 * nowhere to go stays awake. */
#include "core.h"

#define RETRY_US 60000000u

/* When m was last used; 0: it is in use. */
static uint64_t last_use(struct engine *en, const struct model_ref *m, bool *ret_pages)
{
    uint64_t last = m->last_use_us;
    *ret_pages = false;
    for (uint32_t i = 0; i < en->n_sessions; i++) {
        struct session *s = en->list[i];
        if (s->m != m)
            continue;
        if (s->req != NULL || s->prune.active || s->scoring.active || s->lodging.waiting != NULL ||
            s->lodging.transfer != NULL || queue_has_prompt(en, s))
            return 0;
        last = BC_MAX(last, s->last_use_us);
        *ret_pages |= seqcache_pages(s->cache) > 0;
    }
    return last;
}

/* False: a cache has nowhere to go. */
static bool caches_leave(struct engine *en, const struct model_ref *m)
{
    struct err e;
    for (uint32_t i = 0; i < en->n_sessions; i++) {
        struct session *s = en->list[i];
        if (s->m != m || seqcache_pages(s->cache) == 0)
            continue;
        if (seqcache_count(s->cache) == 0)
            seqcache_clear(s->cache); /* pages that a prompt had reserved */
        else if (!tier_idle(en, s) || tier_leave(en, s, &e) < 0)
            return false;
    }
    return true;
}

void keep_alive_run(struct engine *en, uint64_t now_us)
{
    if (en->opt.keep_alive_us == 0)
        return;
    for (struct model_ref *m = models_ready(en->models); m != NULL; m = models_ready(m->next)) {
        bool pages;
        uint64_t last = last_use(en, m, &pages), due = last + en->opt.keep_alive_us;
        if (last == 0 || m->waiting != NULL)
            continue;
        if (due > now_us) {
            en->tier.next_us = BC_MIN(en->tier.next_us, due);
        } else if (!pages) {
            models_sleep(en, m);
        } else if (!caches_leave(en, m)) {
            m->last_use_us = now_us; /* not before it would be due again */
            en->tier.next_us = BC_MIN(en->tier.next_us, now_us + RETRY_US);
        }
    }
}
