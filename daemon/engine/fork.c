/* fork.c: a second session that is what another one is now.
 *
 *   session A   pages 7 8 9:  [.... 64] [.... 64] [.... 20, free 44]
 *   fork B      pages 7 8 9:  the same, none copied; what is free in 9 is dead to both
 *   then        A goes on in page 20, B in page 21; 7 8 9 are read by both until one of them forgets
 *
 * The fork is of the same user and model, with the same parameters, budget, policy state, counters and
 * pending token, so both go on as one undisturbed session would, whatever the other one does. A session
 * must be at rest; one whose cache is away comes back first. A durable session is not forked: its copy
 * would have no journal from which it could be made again, and a copy that is quietly less is a trap.
 */
#include "core.h"
#include <stdlib.h>
#include <string.h>

static int check(struct engine *en, const struct command *c, struct session **ret, struct err *e)
{
    struct session *s;
    int rc = sess_for(en, c, &s, e);
    if (rc < 0)
        return rc;
    unsigned long long id = s->id;
    if (s->uid != c->uid)
        return err_set(e, BC_EPERMISSION, "session",
                       "session %llu belongs to another user: a fork would be yours", id);
    if (s->keeper != NULL)
        return err_set(e, BC_EUNSUPPORTED, "session",
                       "session %llu is durable: a fork of it would not be", id);
    if (s->req != NULL || s->prune.active || s->scoring.active || queue_has_prompt(en, s))
        return err_set(e, BC_EBUSY, "session",
                       "session %llu has a request or a prune under way: fork it when it rests",
                       id);
    *ret = s;
    return BC_OK;
}

/* What s is beside its cache, for f: through bytes, as for a file. */
static int state_copy(const struct session *s, struct session *f, struct err *e)
{
    struct bytes_out o = {0};
    struct sess_state *st = malloc(sizeof *st);
    int rc = BC_OK;
    sess_state_put(s, &o);
    if (st == NULL || o.failed)
        rc = err_nomem(e, sizeof *st + o.cap);
    if (rc == BC_OK)
        rc = sess_state_get(o.at, o.n, st, e);
    if (rc == BC_OK)
        rc = sess_state_apply(f, st, seqcache_count(s->cache), e);
    free(st);
    free(o.at);
    return rc;
}

static int cache_share(struct session *s, struct session *f, struct err *e)
{
    struct seqcache *cache;
    int rc = seqcache_fork(s->cache, &f->owner, &cache, e);
    if (rc < 0)
        return rc;
    seqcache_close(&f->cache); /* it was empty */
    f->cache = cache;
    f->foreign = s->foreign;
    f->budget_bytes = s->budget_bytes; /* see sess_ceiling */
    return BC_OK;
}

static int fork_make(struct engine *en, struct session *s, struct command *c, struct session **ret,
                     struct err *e)
{
    struct command open = {.type = CMD_OPEN, .conn = c->conn, .uid = c->uid};
    struct session *f;
    open.u.open.evict = s->ask;
    open.u.open.kv_type = kn_kv_type_find(s->kv_type)->name;
    open.u.open.positions = positions_name(s);
    open.u.open.name = c->u.fork.name;
    open.u.open.chat_template = sess_template(s);
    open.u.open.priority = s->priority;
    open.u.open.weight = s->weight;
    open.u.open.port = c->u.fork.port;
    memcpy(open.u.open.client, c->u.fork.client, sizeof open.u.open.client);
    int rc = sess_open(en, &open, s->m, &f, e);
    if (rc < 0)
        return rc;
    if ((rc = state_copy(s, f, e)) < 0 || (rc = cache_share(s, f, e)) < 0) {
        sess_close(en, &f);
        return rc;
    }
    share_update(en);
    queue_face(en, f);
    *ret = f;
    return BC_OK;
}

void fork_command(struct engine *en, struct command *c)
{
    struct session *s = NULL, *f = NULL;
    struct err e = {0};
    if (check(en, c, &s, &e) < 0 || fork_make(en, s, c, &f, &e) < 0) {
        report_error(en, c, &e);
        return;
    }
    struct report *r = report_new(REP_OPENED, 0);
    r->session = f->id;
    sess_info(en, f, &r->u.info);
    report_reply(en, c, r);
}
