/* stopping.c: what a clean stop does for the next start: the caches of durable sessions go to their snapshots, so that nothing
 * needs to be evaluated again.
 *
 *   requests have ended, or are left to the next daemon; the threads are gone, and this one does the disk's work, too
 *     --> sessions with rows that no snapshot has, those with most of them first
 *           --> the ordinary way out (transfer.c), one after the other, until stop_snapshots_us are over
 *                 --> SNAPSHOT in the journal, then CLEAN
 *
 * A snapshot may stand in the middle of an answer: the journal has the request, and the next daemon goes on with it.
 *
 * What is not under its last sum when the time is over, or does not fit on the disk, stays as it was: a file that is not whole never
 * gets the name of the snapshot, and the journal has everything. So has it if the process is killed meanwhile. */
#include "core.h"
#include "log.h"
#include <stdlib.h>

/* Whatever was on its way stays where it was, as when its session closes; but a way out that leads to a snapshot goes on. */
static void transfers_stop(struct engine *en)
{
    for (struct transfer *t = en->tier.transfers, *next; t != NULL; t = next) {
        next = t->next;
        bool to_snapshot = t->out && t->why == WHY_TIER && t->s != NULL && t->s->keeper != NULL;
        if (!t->given_up && !to_snapshot)
            transfer_give_up(en, t);
    }
}

static bool wants_snapshot(const struct session *s)
{
    const struct lodging *l = &s->lodging;
    bool here = l->place == PLACE_HERE && l->transfer == NULL && seqcache_count(s->cache) > 0;
    return s->keeper != NULL && s->keeper->rows > 0 && s->m->state == MODEL_READY &&
           (here || l->place == PLACE_LEAVING);
}

static int by_rows(const void *a, const void *b)
{
    const struct session *s = *(struct session *const *)a, *t = *(struct session *const *)b;
    return s->keeper->rows > t->keeper->rows   ? -1
           : s->keeper->rows < t->keeper->rows ? 1
                                               : (s->id > t->id) - (s->id < t->id);
}

/* Its last task gives the file the snapshot's name: then the journal must tell of it. */
static bool under_way(const struct session *s, struct engine *en, uint64_t until_us)
{
    const struct transfer *t = s->lodging.transfer;
    return t != NULL && (t->phase == TRANSFER_FINISH || engine_now(en) < until_us);
}

/* True: its snapshot is whole. */
static bool snapshot_write(struct engine *en, struct session *s, uint64_t until_us)
{
    struct err e = {0};
    if (s->prune.active)
        prune_take_back(s);
    if (s->lodging.place == PLACE_HERE && tier_leave(en, s, &e) < 0) {
        log_warn("engine.durable", "%s: %s", s->name, e.text);
        return false;
    }
    while (under_way(s, en, until_us)) {
        disk_drain(en);
        transfers_run(en);
    }
    if (s->lodging.transfer != NULL)
        tier_stay(en, s);
    queue_publish(en); /* its record */
    return s->lodging.place == PLACE_AWAY;
}

void stopping_snapshots(struct engine *en)
{
    uint64_t until_us = engine_now(en) + en->opt.stop_snapshots_us, again = 0;
    uint32_t n = 0, done = 0;
    if (en->opt.stop_snapshots_us == 0 || en->keeping.n == 0 || en->failed)
        return;
    transfers_stop(en);
    for (uint32_t i = 0; i < en->n_sessions; i++)
        if (wants_snapshot(en->list[i]))
            en->cand[n++] = en->list[i];
    qsort(en->cand, n, sizeof *en->cand, by_rows);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t rows = en->cand[i]->keeper->rows;
        bool whole = engine_now(en) < until_us && snapshot_write(en, en->cand[i], until_us);
        done += whole;
        again += whole ? 0 : rows;
    }
    if (done < n)
        log_warn(
            "engine.durable",
            "caches that went to their snapshots: %u of %u; %llu tokens will be evaluated again",
            done, n, (unsigned long long)again);
    else if (n > 0)
        log_info("engine.durable", "caches that went to their snapshots: %u", n);
}
