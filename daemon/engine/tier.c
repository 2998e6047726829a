/* tier.c: see tier.h: which caches leave, which come back, and which commands wait meanwhile. */
#include "core.h"
#include "log.h"
#include <stdio.h>
#include <stdlib.h>

#define RETRY_US 60000000u /* after a spill that failed */

/* ---- commands that wait ---- */

static void commands_add(struct command ***tail, struct command **pc)
{
    (*pc)->next = NULL;
    **tail = *pc;
    *tail = &(*pc)->next;
    *pc = NULL;
}

/* Runs them in the order in which they came; some may come to wait again. */
static void commands_run(struct engine *en, struct command **list, struct command ***tail)
{
    struct command *c = *list;
    *list = NULL;
    *tail = list;
    while (c != NULL) {
        struct command *next = c->next;
        c->next = NULL;
        command_run(en, &c);
        c = next;
    }
}

static void commands_refuse(struct engine *en, struct command **list, struct command ***tail,
                            const struct err *e)
{
    struct command *c = *list;
    *list = NULL;
    *tail = list;
    while (c != NULL) {
        struct command *next = c->next;
        c->next = NULL;
        command_refuse(en, &c, e);
        c = next;
    }
}

/* ---- what the tiers hold ---- */

/* The tiers' bytes: those of s's image. */
static void image_book(struct engine *en, struct session *s, bool in)
{
    const struct image *i = s->lodging.image;
    if (i->kind == IMAGE_NAMED) /* a durable session's own file */
        return;
    uint64_t *sum = i->kind == IMAGE_HOST ? &en->tier.host_bytes : &en->tier.disk_bytes;
    bc_assert(in || *sum >= i->bytes);
    *sum = in ? *sum + i->bytes : *sum - i->bytes;
    if (i->kind == IMAGE_HOST && in)
        ledger_charge(&s->owner, LEDGER_host, i->bytes);
    else if (i->kind == IMAGE_HOST)
        ledger_credit(&s->owner, LEDGER_host, i->bytes);
}

static void lodging_drop(struct engine *en, struct session *s)
{
    image_book(en, s, false);
    image_drop(en, &s->lodging.image);
}

/* Where n bytes fit; false: nowhere. */
static bool image_fits(const struct engine *en, uint64_t n, enum image_kind *ret)
{
    const struct engine_options *o = &en->opt;
    bool host = n <= o->host_tier && en->tier.host_bytes <= o->host_tier - n;
    bool disk = n <= o->disk_tier && en->tier.disk_bytes <= o->disk_tier - n;
    *ret = host ? IMAGE_HOST : IMAGE_UNNAMED;
    return host || (disk && o->state_dir != NULL);
}

/* ---- leaving ---- */

bool tier_idle(struct engine *en, const struct session *s)
{
    return s->lodging.place == PLACE_HERE && s->lodging.transfer == NULL && s->req == NULL &&
           !s->prune.active && !s->scoring.active && seqcache_count(s->cache) > 0 &&
           s->lodging.waiting == NULL && !queue_has_prompt(en, (struct session *)(uintptr_t)s);
}

static int spill_prepare(struct engine *en, struct transfer *t, struct err *e)
{
    enum image_kind kind;
    int rc = transfer_describe(en, t, e);
    if (rc < 0)
        return rc;
    uint64_t n = spill_bytes(t->sp);
    if (t->s->keeper != NULL) {
        char path[DISK_PATH_MAX];
        snprintf(path, sizeof path, "%s/snapshot", t->s->keeper->folder);
        t->image = image_named(path);
    } else if (!image_fits(en, n, &kind))
        return err_amount(e, BC_EBUDGET, "host_tier", n, en->opt.host_tier - en->tier.host_bytes,
                          "neither tier has room for %llu bytes more", (unsigned long long)n);
    else
        t->image = image_new(kind);
    if (t->image == NULL)
        return err_nomem(e, sizeof *t->image);
    t->image->bytes = n;
    t->image->rows = spill_rows(t->sp);
    return transfer_buffer(en, t, e);
}

int tier_leave(struct engine *en, struct session *s, struct err *e)
{
    struct transfer *t = transfer_new(en, s, true, WHY_TIER);
    if (t == NULL)
        return err_nomem(e, sizeof *t);
    if (s->keeper != NULL)
        durable_mark(s);
    int rc = spill_prepare(en, t, e);
    if (rc < 0) {
        if (t->image != NULL)
            image_drop(en, &t->image);
        transfer_free(en, &t);
        return rc;
    }
    s->lodging.image = t->image;
    image_book(en, s, true);
    t->still = true;
    s->lodging.place = PLACE_LEAVING;
    transfer_begin(en, t);
    return BC_OK;
}

void tier_stay(struct engine *en, struct session *s)
{
    bc_assert(s->lodging.place == PLACE_LEAVING);
    transfer_give_up(en, s->lodging.transfer);
    lodging_drop(en, s);
    s->lodging.place = PLACE_HERE;
}

void tier_left(struct engine *en, struct transfer *t)
{
    struct session *s = t->s;
    s->lodging.place = PLACE_AWAY;
    en->tier.spills++;
    log_debug("engine.tier", "session %llu: %u tokens, %llu bytes to %s", (unsigned long long)s->id,
              s->lodging.image->rows, (unsigned long long)s->lodging.image->bytes,
              s->lodging.image->kind == IMAGE_HOST ? "host memory" : "disk");
    if (s->keeper != NULL)
        durable_snapshot(s);
    seqcache_clear(s->cache);
    evict_state_clear(s->ev);
    transfer_free(en, &t);
    en->tier.freed = true;
}

/* Sessions that nobody has used for long enough. */
static void spill_idle(struct engine *en, uint64_t now)
{
    struct err e;
    en->tier.next_us = UINT64_MAX;
    bool tiers = en->opt.host_tier > 0 || en->opt.disk_tier > 0;
    if (en->opt.spill_after_us == 0 || (!tiers && en->keeping.n == 0))
        return;
    for (uint32_t i = 0; i < en->n_sessions; i++) {
        struct session *s = en->list[i];
        if ((!tiers && s->keeper == NULL) || !tier_idle(en, s))
            continue;
        uint64_t due = BC_MAX(s->last_use_us + en->opt.spill_after_us, en->tier.retry_us);
        if (due > now)
            en->tier.next_us = BC_MIN(en->tier.next_us, due);
        else if (tier_leave(en, s, &e) < 0)
            en->tier.retry_us = now + RETRY_US; /* no room: who stays is no worse off */
    }
}

static bool any_leaving(const struct engine *en)
{
    for (const struct transfer *t = en->tier.transfers; t != NULL; t = t->next)
        if (t->why == WHY_TIER && t->out && !t->given_up)
            return true;
    return false;
}

void tier_run(struct engine *en)
{
    transfers_run(en);
    if (en->tier.starved != NULL && (en->tier.freed || !any_leaving(en))) {
        en->worked = true;
        commands_run(en, &en->tier.starved, &en->tier.starved_tail);
    }
    en->tier.freed = false;
    spill_idle(en, engine_now(en));
    keep_alive_run(en, engine_now(en));
    sharing_run(en, engine_now(en));
    replays_run(en);
}

/* ---- coming back ---- */

int tier_fetch(struct engine *en, struct session *s, struct err *e)
{
    if (s->lodging.image == NULL) /* it was put off: its journal has everything */
        return recover_rebuild(en, s, e);
    struct transfer *t = transfer_new(en, s, false, WHY_TIER);
    if (t == NULL)
        return err_nomem(e, sizeof *t);
    t->image = s->lodging.image;
    s->lodging.place = PLACE_COMING;
    transfer_begin(en, t);
    return BC_OK;
}

void tier_waiting_run(struct engine *en, struct session *s)
{
    commands_run(en, &s->lodging.waiting, &s->lodging.waiting_tail);
}

void tier_waiting_refuse(struct engine *en, struct session *s, const struct err *e)
{
    commands_refuse(en, &s->lodging.waiting, &s->lodging.waiting_tail, e);
}

void tier_model_back(struct engine *en, struct model_ref *m)
{
    for (uint32_t i = en->n_sessions; i-- > 0;) {
        struct session *s = en->list[i];
        struct err e = {0};
        if (s->m != m || s->lodging.waiting == NULL)
            continue;
        if (m->state == MODEL_FAILED)
            tier_waiting_refuse(en, s, &m->err);
        else if (s->lodging.place != PLACE_AWAY)
            tier_waiting_run(en, s);
        else if (tier_fetch(en, s, &e) < 0)
            tier_waiting_refuse(en, s, &e);
    }
}

void tier_came(struct engine *en, struct transfer *t)
{
    struct session *s = t->s;
    s->lodging.place = PLACE_HERE;
    s->last_use_us = engine_now(en);
    lodging_drop(en, s);
    en->tier.returns++;
    transfer_free(en, &t);
    sharing_offer(s);              /* pages that others hold still are held once again */
    if (s->replay_after != NULL) { /* a daemon before this one made the image: what came after it */
        struct replay *r = s->replay_after;
        s->replay_after = NULL;
        replay_begin(en, s, &r);
        return;
    }
    tier_waiting_run(en, s);
}

void tier_failed(struct engine *en, struct transfer *t, const struct err *e)
{
    struct session *s = t->s;
    bool out = t->out, damaged = e->code != BC_ENOMEM && e->code != BC_EBUDGET;
    struct err why = *e;
    transfer_free(en, &t);
    if (!out) {
        seqcache_clear(s->cache);
        if (s->keeper != NULL && damaged) { /* its journal has everything */
            if (recover_rebuild(en, s, &why) == BC_OK) {
                lodging_drop(en, s);
                return;
            }
        }
        s->lodging.place = PLACE_AWAY; /* the next use tries again */
        tier_waiting_refuse(en, s, &why);
        return;
    }
    lodging_drop(en, s);
    s->lodging.place = PLACE_HERE;
    en->tier.retry_us = engine_now(en) + RETRY_US;
    tier_waiting_run(en, s);
}

/* ---- what others ask ---- */

bool tier_here(const struct session *s)
{
    const struct lodging *l = &s->lodging;
    return s->m->state == MODEL_READY && l->place == PLACE_HERE &&
           (l->transfer == NULL || !l->transfer->still);
}

void tier_wait(struct engine *en, struct session *s, struct command **pc)
{
    struct lodging *l = &s->lodging;
    struct err e = {0};
    if (l->place == PLACE_LEAVING) {
        tier_stay(en, s);
        command_run(en, pc);
        return;
    }
    if (s->m->state != MODEL_READY) {
        models_wake(en, s->m);
        commands_add(&l->waiting_tail, pc);
        return;
    }
    if (l->place == PLACE_AWAY && tier_fetch(en, s, &e) < 0) {
        command_refuse(en, pc, &e);
        return;
    }
    commands_add(&l->waiting_tail, pc);
}

void tier_starve(struct engine *en, struct command **pc)
{
    commands_add(&en->tier.starved_tail, pc);
}

static struct session *idle_oldest(struct engine *en, const struct session *but,
                                   const struct uid_turn *scope)
{
    struct session *oldest = NULL;
    for (uint32_t i = 0; i < en->n_sessions; i++) {
        struct session *s = en->list[i];
        if (s != but && (scope == NULL || s->turns == scope) && tier_idle(en, s) &&
            (oldest == NULL || s->priority < oldest->priority ||
             (s->priority == oldest->priority && s->last_use_us < oldest->last_use_us)))
            oldest = s;
    }
    return oldest;
}

bool tier_relieve(struct engine *en, const struct session *s, const struct uid_turn *scope,
                  uint64_t bytes)
{
    uint64_t coming = 0;
    struct err e;
    for (uint32_t i = 0; i < en->n_sessions; i++)
        if (en->list[i]->lodging.place == PLACE_LEAVING &&
            (scope == NULL || en->list[i]->turns == scope))
            coming += share_alone(en->list[i]);
    while (coming < bytes && engine_now(en) >= en->tier.retry_us) {
        struct session *idle = idle_oldest(en, s, scope);
        if (idle == NULL || tier_leave(en, idle, &e) < 0)
            break;
        coming += share_alone(idle);
    }
    return coming >= bytes;
}

void tier_close_session(struct engine *en, struct session *s)
{
    struct lodging *l = &s->lodging;
    struct transfer *t = l->transfer;
    struct err e = {0};
    err_set(&e, BC_ECANCELLED, "session", "session %llu was closed", (unsigned long long)s->id);
    tier_waiting_refuse(en, s, &e);
    if (t != NULL && t->why == WHY_SAVE && t->phase != TRANSFER_BEGIN && !t->still) {
        t->s = NULL; /* all it needs has been copied: the save goes on without its session */
        l->transfer = t = NULL;
    }
    if (t != NULL && t->asker != NULL) {
        report_error(en, t->asker, &e);
        queue_command_done(en, &t->asker);
    }
    if (t != NULL)
        transfer_give_up(en, t);
    if (l->image != NULL)
        lodging_drop(en, s);
}

void tier_open(struct engine *en)
{
    en->tier.starved_tail = &en->tier.starved;
    en->tier.queue_tail = &en->tier.queue;
    en->tier.done_tail = &en->tier.done;
    en->tier.next_us = UINT64_MAX;
}

/* Nothing comes or goes any more: who waits is told why. */
void tier_refuse_all(struct engine *en, const struct err *e)
{
    commands_refuse(en, &en->tier.starved, &en->tier.starved_tail, e);
    for (uint32_t i = 0; i < en->n_sessions; i++)
        tier_waiting_refuse(en, en->list[i], e);
    for (struct transfer *t = en->tier.transfers; t != NULL; t = t->next)
        if (t->asker != NULL) {
            report_error(en, t->asker, e);
            queue_command_done(en, &t->asker);
        }
    saved_refuse_all(en, e);
}

void tier_close(struct engine *en)
{
    disk_drain(en);
    for (struct disk_task *k = disk_done(en), *next; k != NULL; k = next) {
        next = k->next;
        if (k->t == NULL) {
            saved_back(en, k);
            continue;
        }
        k->out = false;
        k->t->n_out--;
    }
    while (en->tier.transfers != NULL) {
        struct transfer *t = en->tier.transfers;
        bc_assert(t->s == NULL);
        transfer_free(en, &t);
    }
    disk_drain(en);
    bc_assert(en->tier.host_bytes == 0 && en->tier.disk_bytes == 0);
}
