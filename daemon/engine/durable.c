/* durable.c: a durable session's records, where they are made. Every function here is called where the
 * session changes, before the reports of the change; sessions that are not durable pass through. */
#include "core.h"
#include "log.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

/* ---- beginning ---- */

int durable_check(const struct engine *en, const struct command *c, struct err *e)
{
    const char *name = c->u.open.name;
    if (!c->u.open.durable)
        return BC_OK;
    if (en->opt.state_dir == NULL)
        return err_set(e, BC_EUNSUPPORTED, "state_dir",
                       "this daemon has no state folder: no session can be durable");
    if (name == NULL || name[0] == '\0')
        return err_set(e, BC_EINVALID, "name",
                       "a durable session needs a name: it outlives the "
                       "connection");
    return BC_OK;
}

int durable_begin(struct engine *en, struct session *s, const struct command *c, struct err *e)
{
    struct keeper *k = keeper_new(en, s);
    if (k == NULL)
        return err_nomem(e, sizeof *k);
    size_t frame = keeper_frame(k, DURABLE_CREATE);
    bytes_put_u64(&k->frames, models_arithmetic(s->m));
    bytes_put_u64(&k->frames, s->m->info.identity);
    bytes_put_u64(&k->frames, s->id);
    bytes_put(&k->frames, c->u.open.token, DURABLE_TOKEN_BYTES);
    sess_state_put(s, &k->frames);
    keeper_frame_end(k, frame);
    k->create = true;
    return BC_OK;
}

/* The journal could not be made: its client was told so, and never heard of the session. */
void durable_refused(struct engine *en, struct session *s)
{
    if (s->req != NULL)
        request_forget(en, s);
    keeper_leave(en, s, true);
    sess_close(en, &s);
}

/* ---- requests ---- */

void durable_request(struct session *s, const struct request *q)
{
    struct keeper *k = s->keeper;
    const struct generate_options *o = &q->opt;
    if (k == NULL)
        return;
    struct bytes_out *f = &k->frames;
    size_t frame = keeper_frame(k, DURABLE_REQUEST);
    bytes_put_u32(f, q->prompt);
    bytes_put_u32(f, q->chat_after);
    bytes_put_u32(f, q->frozen_was_auto);
    bytes_put_u32(f, evict_params(s->ev)->frozen);
    bytes_put_u32(f, q->max_tokens);
    bytes_put_f32(f, o->temperature);
    bytes_put_f32(f, o->top_p);
    bytes_put_f32(f, o->min_p);
    bytes_put_f32(f, o->repeat_penalty);
    bytes_put_u32(f, o->top_k);
    bytes_put_u32(f, o->repeat_last);
    bytes_put_u64(f, o->seed);
    bytes_put_u32(f, (uint32_t)o->n_logprobs);
    bytes_put_u32(f, o->prompt_logprobs);
    bytes_put_u32(f, o->ignore_end);
    bytes_put_u32(f, o->n_stop);
    for (uint32_t i = 0; i < o->n_stop; i++) {
        bytes_put_u32(f, o->stop[i].len);
        bytes_put(f, o->stop[i].bytes, o->stop[i].len);
    }
    bytes_put_u32(f, q->lead);
    bytes_put_u32(f, q->n);
    bytes_put(f, q->ids, q->n * sizeof *q->ids);
    keeper_frame_end(k, frame);
}

void durable_step(struct session *s, uint32_t n, int32_t sampled)
{
    struct keeper *k = s->keeper;
    const struct request *q = s->req;
    if (k == NULL)
        return;
    uint64_t now = engine_now(s->m->en);
    k->rows += n;
    size_t frame = keeper_frame(k, DURABLE_STEP);
    bytes_put_u32(&k->frames, n);
    bytes_put_u32(&k->frames, (uint32_t)sampled);
    bytes_put_u64(&k->frames,
                  q->decode_us != 0 ? request_decode_us(q, now) : request_prefill_us(q, now));
    keeper_frame_end(k, frame);
}

void durable_evict(struct session *s, const struct evict_record *rec, uint32_t reason,
                   uint64_t held_after)
{
    struct keeper *k = s->keeper;
    if (k == NULL)
        return;
    struct bytes_out *f = &k->frames;
    size_t frame = keeper_frame(k, DURABLE_EVICT);
    bytes_put_u32(f, reason);
    bytes_put_u32(f, rec->tokens_before);
    bytes_put_u32(f, rec->tokens_after);
    bytes_put_u64(f, rec->live_before);
    bytes_put_u64(f, rec->live_after);
    bytes_put_u64(f, rec->held_before);
    bytes_put_u64(f, held_after);
    bytes_put_u64(f, rec->micros);
    bytes_put_u32(f, (uint32_t)rec->n_dropped);
    bytes_put(f, rec->dropped, rec->n_dropped * sizeof *rec->dropped);
    if (rec->policy->kept != NULL) /* what it has learnt is not asked for again */
        evict_state_put(s->ev, f);
    keeper_frame_end(k, frame);
}

void durable_end(struct session *s, const struct report *r)
{
    struct keeper *k = s->keeper;
    if (k == NULL)
        return;
    struct bytes_out *f = &k->frames;
    const uint64_t counts[7] = {s->tokens_in,    s->tokens_out,    s->prunes,        s->dropped,
                                s->prune_micros, s->prunes_at_end, s->dropped_at_end};
    size_t frame = keeper_frame(k, DURABLE_END);
    bytes_put_u32(f, r->u.end.reason);
    bytes_put_u32(f, r->u.end.code);
    bytes_put_u32(f, r->u.end.tokens_in);
    bytes_put_u32(f, r->u.end.tokens_out);
    bytes_put_u32(f, r->u.end.tokens_cached);
    bytes_put_u32(f, r->u.end.prunes);
    bytes_put_u64(f, r->u.end.tokens_dropped);
    bytes_put_u64(f, r->u.end.prefill_us);
    bytes_put_u64(f, r->u.end.decode_us);
    bytes_put_u32(f, r->u.end.end_id);
    bytes_put_text(f, r->u.end.text);
    bytes_put_u32(f, s->chat_state);
    bytes_put_u32(f, s->frozen_auto);
    bytes_put_u32(f, evict_params(s->ev)->frozen);
    for (size_t i = 0; i < ARRAY_LEN(counts); i++)
        bytes_put_u64(f, counts[i]);
    bytes_put_u32(f, r->u.end.tokens_adopted);
    keeper_frame_end(k, frame);
}

void durable_params(struct session *s)
{
    struct keeper *k = s->keeper;
    if (k == NULL)
        return;
    size_t frame = keeper_frame(k, DURABLE_PARAMS);
    evict_request_put(&s->ask, &k->frames);
    evict_params_put(evict_params(s->ev), &k->frames);
    keeper_frame_end(k, frame);
}

/* ---- snapshots ---- */

void durable_mark(struct session *s)
{
    if (getrandom(&s->snapshot_mark, sizeof s->snapshot_mark, GRND_NONBLOCK) !=
        sizeof s->snapshot_mark)
        s->snapshot_mark = s->stream * 0x9e3779b97f4a7c15u + s->id + 1; /* no secret, only a mark */
    s->snapshot_mark |= 1;
}

void durable_snapshot(struct session *s)
{
    struct keeper *k = s->keeper;
    size_t frame = keeper_frame(k, DURABLE_SNAPSHOT);
    bytes_put_u64(&k->frames, s->snapshot_mark);
    keeper_frame_end(k, frame);
    k->rows = 0;
}

void durable_note(struct session *s, enum durable_type type)
{
    if (s->keeper != NULL)
        keeper_frame_end(s->keeper, keeper_frame(s->keeper, (uint16_t)type));
}
