/* request.c: how a request begins and how it ends. Everything that can be refused is refused in
 * request_accept, before a byte of the session has changed.
 *
 * What must hold when a request has ended: every token that was delivered is in the cache or is the
 * session's pending one; stream indices have no hole; nothing is reserved.
 */
#include "core.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- beginning ---- */

static int check_ids(const struct session *s, const struct command *c, uint64_t n, struct err *e)
{
    const char *field = c->u.generate.kind == PROMPT_IDS ? "ids" : "text";
    uint32_t n_vocab = s->m->sampler.n_vocab, context = s->m->info.context_train;
    bool goes_on =
        s->has_pending && !(c->u.generate.kind == PROMPT_CHAT && tok_is_end(s->m->tok, s->pending));
    if (c->u.generate.n_ids == 0 && !goes_on)
        return err_set(e, BC_EINVALID, field,
                       "the prompt is empty and there is no cut answer to go on with");
    for (size_t i = 0; i < c->u.generate.n_ids; i++)
        if (c->u.generate.ids[i] < 0 || (uint32_t)c->u.generate.ids[i] >= n_vocab)
            return err_set(e, BC_EINVALID, field, "token %d at place %zu: must be 0 to %u",
                           c->u.generate.ids[i], i, n_vocab - 1);
    if (!s->rerotate && context > 0 && s->stream + n > context)
        return err_amount(e, BC_ECONTEXT, field, s->stream + n, context,
                          "the prompt ends at token %" PRIu64
                          ", the model was trained on texts of %u",
                          s->stream + n, context);
    return BC_OK;
}

/* A cache that must hold the whole prompt at once: policy none, or trigger prefill_end. */
static int check_whole(const struct session *s, const struct evict_params *p, uint64_t n,
                       struct err *e)
{
    uint64_t rows = seqcache_count(s->cache) + n, page = pool_page_bytes(s->pool);
    if (p->budget == 0 || rows <= p->budget)
        return BC_OK;
    /* in tokens: in whole pages the two may look the same */
    return err_amount(e, BC_EBUDGET, "budget_tokens", rows, p->budget,
                      "%" PRIu64 " tokens (%" PRIu64
                      " bytes) would be cached, the budget is %u tokens, and %s",
                      rows, (rows + KN_PAGE_ROWS - 1) / KN_PAGE_ROWS * page, p->budget,
                      evict_policy_prunes(p->policy) ? "trigger prefill_end prunes only after the "
                                                       "whole prompt is in"
                                                     : "policy none never prunes");
}

/* The pages of a prompt that is pruned only when all of it is in; without a place for them now, when
 * others have given what it takes; and in the pass, too, where rows must leave pages of others so that
 * the prompt stays under the session's ceiling. */
static int reserve_whole(struct engine *en, struct session *s, const struct evict_params *p,
                         uint32_t n, struct err *e)
{
    uint64_t pages = seqcache_pages(s->cache) + (uint64_t)seqcache_pages_needed(s->cache, n);
    bool tight = s->budget_bytes > 0 && pages * pool_page_bytes(s->pool) > s->budget_bytes;
    if (p->trigger != EVICT_ON_PREFILL_END || tight || !pressure_fits(en, s, n))
        return BC_OK;
    return seqcache_reserve(s->cache, n, e);
}

/* Makes sure of the memory: reserved for a prompt that must be whole, looked at for others. match:
 * rows that others hold. */
static int take_memory(struct engine *en, struct session *s, const struct evict_params *p,
                       uint32_t n, uint32_t match, struct err *e)
{
    bool whole = p->trigger == EVICT_ON_PREFILL_END || !evict_policy_prunes(p->policy);
    int rc = whole ? check_whole(s, p, n, e) : BC_OK;
    if (rc == BC_OK)
        rc = pressure_admits(en, s, p, n - match, e);
    if (rc == BC_OK && match == 0)
        rc = reserve_whole(en, s, p, n, e);
    return rc;
}

static uint64_t request_bytes(const struct request *q)
{
    return sizeof *q + q->n * sizeof *q->ids + q->out.cap;
}

/* The request itself, its ids led by the token that the last one left pending. */
static struct request *request_new(struct session *s, const struct command *c, struct err *e)
{
    uint32_t lead = s->has_pending, n = lead + (uint32_t)c->u.generate.n_ids;
    struct request *q = calloc(1, sizeof *q);
    int32_t *ids = malloc(n * sizeof *ids);
    if (q == NULL || ids == NULL) {
        free(q);
        free(ids);
        err_nomem(e, sizeof *q + n * sizeof *ids);
        return NULL;
    }
    *q = (struct request){
        .kind = REQUEST_GENERATE,
        .phase = REQUEST_PREFILL,
        .conn = c->conn,
        .request_id = c->request_id,
        .prompt = c->u.generate.kind,
        .opt = c->u.generate.opt,
        .ids = ids,
        .n = n,
        .lead = lead,
        .max_tokens = c->u.generate.opt.max_tokens,
        .chat_before = s->chat_state,
        .chat_after = c->u.generate.chat_after,
        .frozen_was_auto = s->frozen_auto,
        .stream_start = s->stream,
        .start_us = engine_now(s->m->en),
        .progress_us = engine_now(s->m->en),
        .end_id = -1,
    };
    if (lead > 0)
        ids[0] = s->pending;
    if (c->u.generate.n_ids > 0)
        memcpy(ids + lead, c->u.generate.ids, c->u.generate.n_ids * sizeof *ids);
    /* an answer opens a text of its own; what a raw prompt is followed by goes on with it */
    if (deliver_open(&q->out, s->m->tok, &q->opt, q->prompt == PROMPT_CHAT, e) < 0) {
        free(ids);
        free(q);
        return NULL;
    }
    ledger_charge(&s->owner, LEDGER_prompts, request_bytes(q));
    return q;
}

static void request_free(struct session *s, struct request **q)
{
    if ((*q)->kind == REQUEST_GENERATE)
        ledger_credit(&s->owner, LEDGER_prompts, request_bytes(*q));
    deliver_close(&(*q)->out);
    free((*q)->ids);
    free(*q);
    *q = NULL;
}

int request_accept(struct engine *en, struct session *s, struct command *c, struct err *e)
{
    uint64_t n = s->has_pending + (uint64_t)c->u.generate.n_ids;
    struct evict_params p = *evict_params(s->ev);
    int rc = check_ids(s, c, n, e);
    if (rc < 0)
        return rc;
    if (n >= UINT32_MAX)
        return err_set(e, BC_EINVALID, "text", "a prompt of %" PRIu64 " tokens", n);
    if (s->frozen_auto) { /* the system message; whatever else comes first has none */
        p.frozen = c->u.generate.kind == PROMPT_CHAT ? (uint32_t)c->u.generate.n_system : 0;
        if ((rc = evict_check(&p, e)) < 0) {
            evict_advise(&s->ask, &p, pool_page_bytes(s->pool), e);
            return rc;
        }
    }
    struct request *q = request_new(s, c, e);
    if (q == NULL)
        return BC_ENOMEM;
    uint32_t match = sharing_match(s, q);
    if ((rc = take_memory(en, s, &p, (uint32_t)n, match, e)) < 0) {
        request_free(s, &q);
        return rc;
    }
    if (s->frozen_auto) {
        bc_assert(!s->prune.active); /* nothing is cached yet */
        rc = evict_set_params(s->ev, &p, e);
        bc_assert(rc == BC_OK); /* checked above */
        s->frozen_auto = false;
        s->ask.frozen = p.frozen;
    }
    s->req = q;
    s->last_use_us = q->start_us;
    durable_request(s, q);
    if (match > 0) {
        sharing_adopt(s);
        reserve_whole(en, s, &p, q->n - q->done,
                      NULL); /* a no is repeated where rows are granted */
    }
    return BC_OK;
}

/* ---- ending ---- */

/* A prompt that was cut left fewer tokens than it meant to freeze, or none. */
static void frozen_mend(struct session *s, const struct request *q)
{
    struct evict_params p = *evict_params(s->ev);
    uint32_t count = seqcache_count(s->cache);
    if (!q->frozen_was_auto || q->done == q->n || (q->done > 0 && p.frozen <= count))
        return;
    s->frozen_auto = q->done == 0;
    p.frozen = s->frozen_auto ? EVICT_FROZEN_AUTO : count;
    s->ask.frozen = p.frozen;
    int rc = evict_set_params(s->ev, &p, NULL);
    bc_assert(rc == BC_OK); /* fewer are frozen than before */
}

static enum chat_state chat_now(const struct request *q)
{
    if (q->done == 0)
        return q->chat_before;
    if (q->done < q->n)
        return CHAT_OPEN; /* cut in the middle: a turn that must be closed */
    if (q->end_id >= 0)
        return CHAT_ENDED;
    return q->tokens_out > 0 ? CHAT_OPEN : q->chat_after;
}

static struct report *end_make(struct session *s, const struct request *q,
                               enum record_end_reason reason, const struct err *e)
{
    struct report *r = report_new(REP_END, 0);
    uint64_t now = engine_now(s->m->en);
    r->request_id = q->request_id;
    r->u.end.reason = reason;
    r->u.end.code = e != NULL ? (uint32_t)-e->code : 0;
    r->u.end.tokens_in = q->done > q->lead ? q->done - q->lead : 0;
    r->u.end.tokens_out = q->tokens_out;
    r->u.end.tokens_adopted = q->adopted;
    r->u.end.tokens_cached = seqcache_count(s->cache);
    r->u.end.budget = sess_budget(s);
    r->u.end.prunes = (uint32_t)(s->prunes - s->prunes_at_end);
    r->u.end.tokens_dropped = s->dropped - s->dropped_at_end;
    r->u.end.dropped_why = s->dropped_why;
    r->u.end.end_id = q->end_id >= 0 ? (uint32_t)q->end_id : UINT32_MAX;
    r->u.end.prefill_us = request_prefill_us(q, now);
    r->u.end.decode_us = request_decode_us(q, now);
    r->u.end.chat = s->chat_state;
    if (q->kind == REQUEST_SCORES)
        r->u.end.tokens_in = r->u.end.tokens_out = 0;
    if (e != NULL)
        snprintf(r->u.end.text, sizeof r->u.end.text, "%.*s", (int)sizeof r->u.end.text - 1,
                 e->text);
    s->prunes_at_end = s->prunes;
    s->dropped_at_end = s->dropped;
    s->dropped_why = 0;
    return r;
}

void request_rows_in(struct session *s, struct request *q, uint32_t n)
{
    if (q->done == 0) /* the pending token, if there was one, went in */
        s->has_pending = false;
    s->tokens_in += q->done == 0 ? n - q->lead : n;
    q->done += n;
}

void request_adopt(struct session *s, const struct request *q)
{
    ledger_charge(&s->owner, LEDGER_prompts, request_bytes(q));
}

void request_forget(struct engine *en, struct session *s)
{
    struct request *q = s->req;
    bool for_others = s->prune.reason == PRUNE_PRESSURE && !s->prune.self;
    if (s->prune.active && !s->prune.reply && !for_others)
        prune_abort(s);
    if (q->kind == REQUEST_SCORES)
        scores_abort(s);
    s->req = NULL;
    request_free(s, &q);
    queue_face(en, s);
}

/* told: its client hears of it. */
static void request_close(struct engine *en, struct session *s, enum record_end_reason reason,
                          const struct err *e, bool told)
{
    struct request *q = s->req;
    bc_assert(q != NULL && q->kind != REQUEST_REPLAY);
    bool for_others = s->prune.reason == PRUNE_PRESSURE && !s->prune.self;
    if (s->prune.active && !s->prune.reply && !for_others)
        prune_abort(s); /* it was pruned for what will not come any more */
    if (q->kind == REQUEST_SCORES)
        scores_abort(s);
    if (q->kind == REQUEST_GENERATE) {
        const char *text;
        size_t len;
        deliver_flush(&q->out, &text, &len);
        if (told && len > 0 && !q->stop_string)
            report_tokens(en, s, s->stream + s->has_pending, NULL, 0, text, len);
        s->chat_state = chat_now(q);
        frozen_mend(s, q);
        if (q->done < q->n && evict_params(s->ev)->trigger == EVICT_ON_PREFILL_END)
            seqcache_compact(s->cache); /* gives back what was reserved */
    }
    sharing_offer(s);
    s->last_use_us = engine_now(en);
    struct report *r = end_make(s, q, reason, e);
    durable_end(s, r);
    if (told)
        report_stream(en, s, r);
    else
        report_free(&r);
    s->req = NULL;
    request_free(s, &q);
    queue_face(en, s);
}

void request_end(struct engine *en, struct session *s, enum record_end_reason reason,
                 const struct err *e)
{
    request_close(en, s, reason, e, true);
}

void request_drop(struct engine *en, struct session *s)
{
    request_close(en, s, END_ERROR, NULL, false);
}

void request_finish(struct engine *en, struct session *s, enum record_end_reason reason)
{
    if (s->prune.active && s->prune.reason == PRUNE_PREFILL_END) {
        s->req->phase = REQUEST_ENDING;
        s->req->end_reason = reason;
    } else {
        request_end(en, s, reason, NULL);
    }
}
