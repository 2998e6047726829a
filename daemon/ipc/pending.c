/* pending.c: requests between a client's frame and the engine's answer. One list for all: its
 * length is bounded by the engine's inbox, and answers come in about the order of requests. */
#include "conn.h"
#include <stdlib.h>

struct pending *pending_find(struct server *s, uint64_t conn, uint32_t request_id)
{
    for (struct pending *p = s->pending; p != NULL; p = p->next)
        if (p->conn == conn && p->request_id == request_id)
            return p;
    return NULL;
}

int pending_add(struct conn *c, uint32_t request_id, uint16_t type, uint64_t bytes,
                struct pending **ret, struct err *e)
{
    struct server *s = c->server;
    if (pending_find(s, c->node.id, request_id) != NULL)
        return err_set(e, BC_EINVALID, "request_id", "request %u is under way already", request_id);
    struct pending *p = calloc(1, sizeof *p);
    if (p == NULL)
        return err_nomem(e, sizeof *p);
    int rc = quota_take(c->account, &s->opt.limits, QUOTA_REQUESTS, 1, e);
    if (rc == BC_OK && (rc = quota_take(c->account, &s->opt.limits, QUOTA_QUEUED, bytes, e)) < 0)
        quota_give(c->account, QUOTA_REQUESTS, 1);
    if (rc < 0) {
        free(p);
        return rc;
    }
    *p = (struct pending){.next = s->pending,
                          .conn = c->node.id,
                          .request_id = request_id,
                          .uid = c->uid,
                          .type = type,
                          .charged = bytes,
                          .account = c->account};
    s->pending = p;
    c->requests++;
    *ret = p;
    return BC_OK;
}

void pending_free(struct server *s, struct pending **pp, bool keep_request)
{
    struct pending *p = *pp;
    struct pending **at = &s->pending;
    while (*at != p) {
        bc_assert(*at != NULL);
        at = &(*at)->next;
    }
    *at = p->next;
    struct conn *c = conn_find(s, p->conn);
    if (c != NULL && --c->requests < CONN_REQUESTS_MAX / 2)
        conn_unpause(c, PAUSE_REQUESTS);
    quota_give(p->account, QUOTA_QUEUED, p->charged);
    if (!keep_request)
        quota_give(p->account, QUOTA_REQUESTS, 1);
    free(p);
    *pp = NULL;
}
