/* report.c: making reports. They collect in engine.made during a step and go out together.
 *
 * A report that cannot be allocated would leave a hole in a stream that promises order, and there
 * is nobody to tell: the daemon is built to be restarted, so it stops here with a sentence.
 */
#include "core.h"
#include "pieces.h"
#include <stdlib.h>
#include <string.h>

struct report *report_new(enum report_type type, size_t extra)
{
    struct report *r = calloc(1, sizeof *r + extra);
    if (r == NULL)
        bc_panic(__FILE__, __LINE__, "out of memory for a report");
    r->type = type;
    r->bytes = sizeof *r + extra;
    return r;
}

void report_free(struct report **r)
{
    if ((*r)->type == REP_RECOVERED)
        port_drop(&(*r)->u.recovered.port);
    free(*r);
    *r = NULL;
}

void report_push(struct engine *en, struct report *r)
{
    struct keeper *k = en->keeping.telling ? NULL : keeper_of(en, r->session);
    ledger_charge(ledger_daemon(en->ledger), LEDGER_reports, r->bytes);
    if (k != NULL) { /* a durable session's: not before its journal has been written */
        keeper_report(k, r);
        return;
    }
    *en->made_tail = r;
    en->made_tail = &r->next;
    en->n_made++;
}

void report_stream(struct engine *en, struct session *s, struct report *r)
{
    r->conn = s->conn;
    r->session = s->id;
    s->port->queued++;
    if (s->keeper != NULL && !en->keeping.telling)
        s->keeper->seq += report_records(r);
    report_push(en, r);
}

void report_reply(struct engine *en, const struct command *c, struct report *r)
{
    r->conn = c->conn;
    r->request_id = c->request_id;
    if (r->session == 0)
        r->session = c->session;
    report_push(en, r);
}

/* Pieces of a TOKENS report, as outflow.c cuts them: ids first, the text from the last ids on. */
static uint32_t records_of_tokens(const struct report *r)
{
    uint32_t max = piece_payload_max(true, 0) - (uint32_t)sizeof(struct record_tokens);
    uint32_t ids = r->u.tokens.n_ids, len = r->u.tokens.text_len, part = 0, at = 0, n = 0;
    do {
        uint32_t take = BC_MIN(ids - part, max / 4);
        part += take;
        if (part == ids)
            at += piece_text(r->u.tokens.text + at, len - at, max - take * 4);
        n++;
    } while (part < ids || at < len);
    return n;
}

static uint32_t records_of_rows(uint32_t rows, size_t head, size_t row)
{
    uint32_t max = (piece_payload_max(true, 0) - (uint32_t)head) / (uint32_t)row;
    return rows > 0 ? (rows + max - 1) / max : 1;
}

uint32_t report_records(const struct report *r)
{
    switch (r->type) {
    case REP_TOKENS:
        return records_of_tokens(r);
    case REP_PRUNED:
        return records_of_rows(r->u.pruned.n_ranges, sizeof(struct record_pruned),
                               sizeof(struct evict_range));
    case REP_SCORES:
        return records_of_rows(r->u.scores.n, sizeof(struct record_scores),
                               sizeof(struct record_score));
    case REP_LOST:
        return (uint32_t)r->u.lost.count;
    default:
        bc_assert(r->type > REP_TOKENS);
        return 1;
    }
}

void report_error(struct engine *en, const struct command *c, const struct err *e)
{
    struct report *r = report_new(REP_ERROR, 0);
    r->u.error = *e;
    report_reply(en, c, r);
}

struct report *report_of_tokens(uint64_t first, const int32_t *ids, uint32_t n, const char *text,
                                size_t len)
{
    struct report *r = report_new(REP_TOKENS, n * sizeof *ids + len);
    r->u.tokens.first_stream = first;
    r->u.tokens.n_ids = n;
    r->u.tokens.text_len = (uint32_t)len;
    r->u.tokens.ids = (int32_t *)(r + 1);
    r->u.tokens.text = (char *)(r->u.tokens.ids + n);
    if (n > 0)
        memcpy(r->u.tokens.ids, ids, n * sizeof *ids);
    if (len > 0)
        memcpy(r->u.tokens.text, text, len);
    return r;
}

struct report *report_of_progress(const struct request *q)
{
    struct report *r = report_new(REP_PROGRESS, 0);
    r->u.progress.done = q->done > q->lead ? q->done - q->lead : 0;
    r->u.progress.total = q->n - q->lead;
    return r;
}

void report_tokens(struct engine *en, struct session *s, uint64_t first, const int32_t *ids,
                   uint32_t n, const char *text, size_t len)
{
    report_stream(en, s, report_of_tokens(first, ids, n, text, len));
}

void report_progress(struct engine *en, struct session *s)
{
    s->req->progress_us = engine_now(en);
    report_stream(en, s, report_of_progress(s->req));
}
