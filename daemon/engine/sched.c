/* sched.c: who runs in this pass: every decode first, then prompt chunks in fair turns; and the
 * pass.
 *
 *   rows of a pass   | decodes, one row each | prompt chunk | prompt chunk | ...
 *                    '-- at most 7/8 while a prompt waits --'
 *
 * Turns go to the uid that was served longest ago, and among its sessions to the one that was
 * served longest ago; decodes and prompts keep separate turns. So a prompt of a hundred thousand
 * tokens delays a decode by one chunk a pass, and another prompt by one chunk a session; a user with a hundred sessions gets no more turns than a user with one. Parked sessions (whose
 * client does not read) and those whose cache is being refreshed are passed over.
 */
#include "core.h"
#include <string.h>

/* ---- picking ---- */

static bool runnable(const struct session *s, enum turn_kind kind)
{
    const struct request *q = s->req;
    return q != NULL && q->kind != REQUEST_SCORES &&
           q->phase == (kind == TURN_DECODE ? REQUEST_DECODE : REQUEST_PREFILL) &&
           !s->prune.active && !s->scoring.active && !sess_parked(s);
}

static uint32_t collect(struct engine *en, const struct model_ref *m, enum turn_kind kind)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < en->n_sessions; i++)
        if (en->list[i]->m == m && runnable(en->list[i], kind))
            en->cand[n++] = en->list[i];
    return n;
}

static bool turn_before(const struct session *a, const struct session *b, enum turn_kind kind)
{
    if (a->turns->turn[kind] != b->turns->turn[kind])
        return a->turns->turn[kind] < b->turns->turn[kind];
    if (a->turn[kind] != b->turn[kind])
        return a->turn[kind] < b->turn[kind];
    return a->id < b->id;
}

/* The candidate whose turn it is; it leaves the list and its turn is taken. */
static struct session *turn_next(struct engine *en, uint32_t *n, enum turn_kind kind)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < *n; i++)
        if (turn_before(en->cand[i], en->cand[best], kind))
            best = i;
    struct session *s = en->cand[best];
    en->cand[best] = en->cand[--*n];
    s->turn[kind] = s->turns->turn[kind] = ++en->tick;
    return s;
}

static struct batch_entry *entry_add(struct batch *b, struct session *s, uint32_t n)
{
    bc_assert(n > 0 && b->n_entries < b->rows_max);
    struct batch_entry *x = &b->entries[b->n_entries++];
    *x = (struct batch_entry){.s = s,
                              .n = n,
                              .query = BATCH_NONE,
                              .decode = s->req->phase == REQUEST_DECODE,
                              .picked = -1};
    s->pick_n = n;
    return x;
}

static void pick_decodes(struct engine *en, struct model_ref *m, uint32_t *rows, uint32_t *outs,
                         bool prompts)
{
    uint32_t n = collect(en, m, TURN_DECODE);
    /* a share is left for prompts, or they would starve behind enough decodes */
    uint32_t most = BC_MIN(prompts ? *rows - BC_MAX(*rows / 8, 1) : *rows,
                           prompts ? *outs - BC_MAX(*outs / 8, 1) : *outs);
    for (; n > 0 && most > 0; most--) {
        entry_add(&m->batch, turn_next(en, &n, TURN_DECODE), 1);
        --*rows;
        --*outs;
    }
}

/* Rows of s's prompt that this pass may take; *outs is what its logits will need. */
static uint32_t chunk(const struct engine *en, const struct session *s, uint32_t rows,
                      uint32_t outs, uint32_t *ret_outs)
{
    const struct request *q = s->req;
    uint32_t left = q->n - q->done, n = BC_MIN(BC_MIN(en->opt.prefill_chunk, left), rows);
    uint32_t room = budget_room(evict_params(s->ev), seqcache_count(s->cache));
    if (room > 0) /* 0: it will be pruned first */
        n = BC_MIN(n, room);
    if (q->opt.prompt_logprobs) {
        n = BC_MIN(n, outs);
        *ret_outs = n;
    } else if (n == left && q->max_tokens > 0) {
        *ret_outs = 1;
        if (outs == 0) {
            n--; /* its last row waits for a pass that has logits to spare */
            *ret_outs = 0;
        }
    } else {
        *ret_outs = 0;
    }
    return n;
}

static void pick_prompts(struct engine *en, struct model_ref *m, uint32_t *rows, uint32_t *outs)
{
    uint32_t n = collect(en, m, TURN_PREFILL);
    while (n > 0 && *rows > 0) {
        struct session *s = turn_next(en, &n, TURN_PREFILL);
        sharing_adopt(s); /* what a neighbour has evaluated since */
        uint32_t used, take = chunk(en, s, *rows, *outs, &used);
        if (take == 0)
            continue;
        entry_add(&m->batch, s, take);
        *rows -= take;
        *outs -= used;
    }
}

void sched_pick(struct engine *en)
{
    for (struct model_ref *m = models_ready(en->models); m != NULL; m = models_ready(m->next)) {
        struct batch *b = &m->batch;
        b->n_entries = b->n_rows = b->n_outs = b->n_queries = 0;
        b->n_slots = 0;
        if (m->sessions == 0)
            continue;
        uint32_t rows = b->rows_max, outs = b->outs_max;
        pick_decodes(en, m, &rows, &outs, collect(en, m, TURN_PREFILL) > 0);
        if (b->n_entries > 0) /* who waits for a next word waits for one chunk at most */
            rows = BC_MIN(rows, en->opt.prefill_chunk);
        pick_prompts(en, m, &rows, &outs);
    }
}

/* ---- the pass ---- */

/* Which rows of an entry need logits: a decode's, a prompt's last, all for prompt_logprobs. */
static uint32_t outs_of(const struct batch_entry *x)
{
    const struct request *q = x->s->req;
    if (x->decode)
        return 1;
    if (q->opt.prompt_logprobs)
        return x->n;
    return q->done + x->n == q->n && q->max_tokens > 0;
}

/* Appends the entry's rows to its cache and writes them into the batch's arrays. */
static void entry_fill(struct batch *b, struct batch_entry *x, uint32_t seq)
{
    struct session *s = x->s;
    struct request *q = s->req;
    uint32_t first = seqcache_count(s->cache), row = b->n_rows;
    const int32_t *ids = x->decode ? &s->pending : q->ids + q->done;
    x->n_out = outs_of(x);
    x->first_out = b->n_outs;
    bc_assert(row + x->n <= b->rows_max && x->first_out + x->n_out <= b->outs_max);
    memcpy(b->ids + row, ids, x->n * sizeof *ids);
    if (positions_due(s))
        positions_renumber(s, x);
    sess_append(s, b->ids + row, x->n);
    const uint32_t *slots = seqcache_slots(s->cache);
    const int32_t *positions = seqcache_positions(s->cache);
    for (uint32_t i = 0; i < x->n; i++) {
        b->positions[row + i] = positions[first + i];
        b->slots[row + i] = slots[first + i];
        b->seq[row + i] = seq;
        b->lo[row + i] = 0;
        b->hi[row + i] = first + i + 1;
    }
    for (uint32_t i = 0; i < x->n_out; i++)
        b->out_rows[b->n_outs++] = row + x->n - x->n_out + i;
    if (evict_params(s->ev)->policy->needs_query) {
        x->query = b->n_queries;
        b->query_rows[b->n_queries++] = row + x->n - 1;
    }
    b->seqs[seq] = seqcache_view(s->cache);
    b->n_rows += x->n;
    if (x->decode) /* the pending token went in */
        s->has_pending = false;
    if (!x->decode)
        request_rows_in(s, q, x->n);
}

static int pass(struct model_ref *m, struct err *e)
{
    struct batch *b = &m->batch;
    uint32_t n_seqs = 0;
    for (uint32_t i = 0; i < b->n_entries; i++) {
        if (b->entries[i].n > 0)
            entry_fill(b, &b->entries[i], n_seqs++);
        b->entries[i].s->pick_n = 0; /* its slots are taken */
    }
    if (b->n_rows == 0)
        return BC_OK;
    sample_prepare(b);
    struct kn_batch rows = {.n_rows = b->n_rows,
                            .n_seqs = n_seqs,
                            .ids = b->ids,
                            .positions = b->positions,
                            .seq = b->seq,
                            .lo = b->lo,
                            .hi = b->hi,
                            .slots = b->slots,
                            .seqs = b->seqs};
    struct model_out out = {.rows = b->out_rows,
                            .n = b->n_outs,
                            .logits = b->wants_logits ? b->logits : NULL,
                            .how = b->how,
                            .tokens = b->tokens,
                            .query_rows = b->query_rows,
                            .n_query = b->n_queries,
                            .queries = b->queries};
    int rc = model_forward(m->model, &rows, &out, e);
    if (rc < 0)
        return rc;
    for (uint32_t i = 0; i < b->n_entries; i++) {
        const struct batch_entry *x = &b->entries[i];
        if (x->query != BATCH_NONE)
            evict_note_query(x->s->ev, b->queries + (size_t)x->query * b->query_len, b->query_len);
    }
    return BC_OK;
}

void batch_forward(struct engine *en)
{
    uint64_t start = engine_now(en);
    uint32_t rows = 0, decodes = 0;
    for (struct model_ref *m = models_ready(en->models); m != NULL && !en->failed;
         m = models_ready(m->next)) {
        struct err e = {0};
        if (m->batch.n_entries == 0)
            continue;
        if (pass(m, &e) < 0)
            engine_fail(en, &e);
        if (m->batch.n_rows > 0)
            en->worked = true;
        rows += m->batch.n_rows;
        for (uint32_t i = 0; i < m->batch.n_entries; i++)
            decodes += m->batch.entries[i].decode ? m->batch.entries[i].n : 0;
    }
    if (rows > 0 && rows == decodes) { /* nobody's prompt: how long a next word takes */
        uint64_t us = engine_now(en) - start, old = en->decode_us;
        /* one that was put off its core says little of the next ones */
        en->decode_us = old == 0 ? us : (7 * old + BC_MIN(us, 2 * old)) / 8;
    }
}
