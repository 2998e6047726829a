/* output.c: after the pass: the next tokens, and what the clients get to see of it.
 *
 *   sample_batch    logits -> picked id, for each entry that reached the end of its prompt; or the backend has picked
 *                   (sample_prepare tells it how, before the pass), and logits come only for log-probabilities
 *   deliver_batch   PROGRESS, LOGPROB, TOKENS; stop rules; the end
 *
 * What ends an answer, in this order: an end token (it becomes the pending token and enters the
 * cache with the next turn), a stop string (its tokens stay in the cache), max_tokens, the trained
 * context. A full budget is found by pressure.c when the next token wants in.
 */
#include "core.h"
#include <string.h>

/* ---- step 5 ---- */

/* The newest n tokens of the stream; how many there are. */
static uint32_t recent_tokens(const struct session *s, uint32_t n, int32_t *ret)
{
    n = (uint32_t)BC_MIN(BC_MIN((uint64_t)n, s->stream), (uint64_t)SAMPLER_REPEAT_MAX);
    for (uint32_t i = 0; i < n; i++)
        ret[i] = s->recent[(s->stream - 1 - i) % s->n_recent];
    return n;
}

static const float *entry_logits(const struct batch *b, const struct batch_entry *x, uint32_t out)
{
    return b->logits + (size_t)(x->first_out + out) * b->n_vocab;
}

/* Whether the entry's last row picks a token. */
static bool picks(const struct batch_entry *x)
{
    const struct request *q = x->s->req;
    return x->n > 0 && x->n_out > 0 && q->max_tokens > 0 && (x->decode || q->done == q->n);
}

/* How x's last row is picked by the backend. */
static void pick_fill(struct batch *b, const struct batch_entry *x, uint32_t out)
{
    const struct generate_options *opt = &x->s->req->opt;
    int32_t *recent = b->recent + (size_t)out * SAMPLER_REPEAT_MAX;
    bool penalty = opt->repeat_penalty != 1;
    b->how[out] = (struct kn_sample){
        .temperature = opt->temperature,
        .top_p = opt->top_p,
        .min_p = opt->min_p,
        .top_k = opt->top_k,
        .repeat_penalty = opt->repeat_penalty,
        .n_recent = penalty ? recent_tokens(x->s, opt->repeat_last, recent) : 0,
        .recent = recent,
        .seed = opt->seed,
        .stream = x->s->stream,
    };
}

void sample_prepare(struct batch *b)
{
    b->wants_logits = b->how == NULL;
    for (uint32_t i = 0; i < b->n_entries; i++) {
        const struct batch_entry *x = &b->entries[i];
        if (x->n == 0 || x->n_out == 0)
            continue;
        const struct generate_options *opt = &x->s->req->opt;
        b->wants_logits |= opt->prompt_logprobs || opt->n_logprobs >= 0;
        for (uint32_t k = 0; b->how != NULL && k < x->n_out; k++) /* rows that nobody picks from */
            b->how[x->first_out + k] = (struct kn_sample){.top_p = 1, .repeat_penalty = 1};
        if (b->how != NULL && picks(x))
            pick_fill(b, x, x->first_out + x->n_out - 1);
    }
}

void sample_batch(struct engine *en)
{
    int32_t recent[SAMPLER_REPEAT_MAX];
    for (struct model_ref *m = models_ready(en->models); m != NULL && !en->failed;
         m = models_ready(m->next))
        for (uint32_t i = 0; i < m->batch.n_entries; i++) {
            struct batch_entry *x = &m->batch.entries[i];
            if (!picks(x))
                continue;
            const struct session *s = x->s;
            const struct generate_options *opt = &s->req->opt;
            if (m->batch.how != NULL) {
                x->picked = m->batch.tokens[x->first_out + x->n_out - 1];
                continue;
            }
            uint32_t n = opt->repeat_penalty != 1 ? recent_tokens(s, opt->repeat_last, recent) : 0;
            x->picked = sampler_pick(&m->sampler, opt, entry_logits(&m->batch, x, x->n_out - 1),
                                     recent, n, s->stream);
        }
}

/* ---- step 6 ---- */

static void report_logprob(struct engine *en, struct session *s, const float *logits,
                           uint64_t stream, int32_t id, bool prompt)
{
    int32_t wanted = s->req->opt.n_logprobs;
    uint32_t n_vocab = s->m->sampler.n_vocab;
    uint32_t n = wanted > 0 ? BC_MIN((uint32_t)wanted, n_vocab) : 0;
    struct report *r = report_new(REP_LOGPROB, 0);
    r->u.logprob.stream = stream;
    r->u.logprob.id = id;
    r->u.logprob.prompt = prompt;
    r->u.logprob.n_top = n;
    r->u.logprob.logprob = sampler_logprob(logits, n_vocab, id, n, r->u.logprob.top);
    report_stream(en, s, r);
}

/* Row i of the chunk predicts the prompt's next token, where there is one. */
static void deliver_prompt_logprobs(struct engine *en, const struct batch *b,
                                    const struct batch_entry *x)
{
    struct session *s = x->s;
    const struct request *q = s->req;
    uint32_t first = q->done - x->n;
    for (uint32_t i = 0; i < x->n_out && first + i + 1 < q->n; i++)
        report_logprob(en, s, entry_logits(b, x, i), s->stream - x->n + i + 1,
                       q->ids[first + i + 1], true);
}

/* A chunk of prompt is in; true: it was the last one. */
static bool deliver_prompt(struct engine *en, const struct batch *b, const struct batch_entry *x)
{
    struct session *s = x->s;
    struct request *q = s->req;
    const struct evict_params *p = evict_params(s->ev);
    if (q->opt.prompt_logprobs)
        deliver_prompt_logprobs(en, b, x);
    report_progress(en, s);
    if (q->done < q->n)
        return false;
    q->decode_us = engine_now(en);
    q->phase = REQUEST_DECODE;
    if (p->trigger == EVICT_ON_PREFILL_END && q->n > q->lead && /* a prompt, no continuation */
        seqcache_count(s->cache) > p->keep)
        prune_start(en, s, PRUNE_PREFILL_END, p->keep);
    return true;
}

static void deliver_token(struct engine *en, const struct batch *b, const struct batch_entry *x)
{
    struct session *s = x->s;
    struct request *q = s->req;
    uint32_t context = s->m->info.context_train;
    const char *text;
    size_t len;
    s->pending = x->picked;
    s->has_pending = true;
    if (!q->opt.ignore_end && tok_is_end(s->m->tok, x->picked)) {
        q->end_id = x->picked;
        request_finish(en, s, END_STOP);
        return;
    }
    q->tokens_out++;
    s->tokens_out++;
    if (q->opt.n_logprobs >= 0)
        report_logprob(en, s, entry_logits(b, x, x->n_out - 1), s->stream, x->picked, false);
    q->stop_string = deliver_push(&q->out, x->picked, &text, &len);
    report_tokens(en, s, s->stream, &x->picked, 1, text, len);
    if (q->stop_string)
        request_finish(en, s, END_STOP);
    else if (q->tokens_out >= q->max_tokens)
        request_finish(en, s, END_LENGTH);
    else if (!s->rerotate && context > 0 && s->stream >= context)
        request_finish(en, s, END_CONTEXT);
}

/* A prompt that waits for its turn, or for a long refresh, must not look like a dead daemon. */
static void remind(struct engine *en)
{
    uint64_t now = engine_now(en);
    for (uint32_t i = 0; i < en->n_sessions; i++) {
        struct session *s = en->list[i];
        const struct request *q = s->req;
        if (q != NULL && q->kind == REQUEST_GENERATE && q->phase == REQUEST_PREFILL &&
            now > q->progress_us + PROGRESS_US && !sess_parked(s))
            report_progress(en, s);
    }
}

void deliver_batch(struct engine *en)
{
    for (struct model_ref *m = models_ready(en->models); m != NULL && !en->failed;
         m = models_ready(m->next))
        for (uint32_t i = 0; i < m->batch.n_entries; i++) {
            const struct batch_entry *x = &m->batch.entries[i];
            struct session *s = x->s;
            if (x->n == 0)
                continue;
            s->last_use_us = engine_now(en);
            if (!x->decode)
                sharing_offer(s);
            if (s->req->kind == REQUEST_REPLAY) {
                if (s->req->done == s->req->n)
                    replay_next(en, s);
                continue;
            }
            durable_step(s, x->n, x->picked);
            if (x->renumbered)
                positions_report(en, s, x);
            if (!x->decode && !deliver_prompt(en, &m->batch, x))
                continue;
            if (s->req->max_tokens == 0)
                request_finish(en, s, END_LENGTH);
            else
                deliver_token(en, &m->batch, x);
        }
    remind(en);
}
