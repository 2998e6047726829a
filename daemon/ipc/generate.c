/* generate.c: Generate: a prompt, inline, as token ids, or announced and then sent by ring. */
#include "clock.h"
#include "dispatch.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int options_read(struct conn *c, const Backcast__Generate *m, struct generate_options *o,
                        struct err *e)
{
    const struct server_limits *l = &c->server->opt.limits;
    generate_options_init(o);
    o->max_tokens = m->has_max_tokens ? m->max_tokens : c->server->opt.defaults.max_tokens;
    int rc = field_range("max_tokens", o->max_tokens, 0, l->max_tokens, e);
    if (rc < 0 || (rc = field_range("stop", m->n_stop, 0, GENERATE_STOPS_MAX, e)) < 0)
        return rc;
    if (m->has_temperature)
        o->temperature = m->temperature;
    if (m->has_top_p)
        o->top_p = m->top_p;
    if (m->has_min_p)
        o->min_p = m->min_p;
    if (m->has_top_k)
        o->top_k = m->top_k;
    if (m->has_repeat_penalty)
        o->repeat_penalty = m->repeat_penalty;
    if (m->has_repeat_last)
        o->repeat_last = m->repeat_last;
    if (m->has_seed)
        o->seed = m->seed;
    for (size_t i = 0; i < m->n_stop; i++) {
        if ((rc = field_range("stop", m->stop[i].len, 1, GENERATE_STOP_BYTES_MAX, e)) < 0)
            return rc;
        o->stop[i].len = (uint16_t)m->stop[i].len;
        memcpy(o->stop[i].bytes, m->stop[i].data, m->stop[i].len);
        o->n_stop++;
    }
    if (m->has_n_logprobs &&
        (rc = field_range("n_logprobs", m->n_logprobs, 0, GENERATE_LOGPROBS_MAX, e)) < 0)
        return rc;
    o->n_logprobs = m->has_n_logprobs ? (int32_t)m->n_logprobs : -1;
    o->prompt_logprobs = m->prompt_logprobs;
    o->ignore_end = m->ignore_end;
    return generate_options_check(o, e); /* ranges of the sampler's numbers, NaN among them */
}

/* What carries the prompt must be what its kind needs, and only that. */
static int carrier_check(const Backcast__Generate *m, struct err *e)
{
    int rc = field_range("kind", m->kind, PROMPT_CHAT, PROMPT_IDS, e);
    if (rc < 0)
        return rc;
    if (m->kind == PROMPT_IDS) {
        if (m->has_text || m->ring_bytes != 0)
            return err_set(e, BC_EINVALID, m->has_text ? "text" : "ring_bytes",
                           "a prompt of token ids carries ids alone");
        return m->n_ids > 0 ? BC_OK : err_set(e, BC_EINVALID, "ids", "ids is empty");
    }
    if (m->n_ids > 0)
        return err_set(e, BC_EINVALID, "ids", "ids belong to kind 2 (token ids), not %u", m->kind);
    if (m->has_text && m->ring_bytes != 0)
        return err_set(e, BC_EINVALID, "ring_bytes", "text and ring_bytes are both given");
    if (!m->has_text && m->ring_bytes == 0)
        return err_set(e, BC_EINVALID, "text", "neither text nor ring_bytes is given");
    if ((rc = field_range("text", m->text.len, 0, TEXT_INLINE_MAX, e)) < 0)
        return rc;
    return field_range("ring_bytes", m->ring_bytes, 0, UPLOAD_BYTES_MAX, e);
}

static int prompt_copy(struct command *cmd, const Backcast__Generate *m, struct err *e)
{
    cmd->u.generate.kind = (enum prompt_kind)m->kind;
    if (m->kind == PROMPT_IDS) {
        size_t bytes = m->n_ids * sizeof *m->ids;
        if ((cmd->u.generate.ids = malloc(bytes)) == NULL)
            return err_nomem(e, bytes);
        memcpy(cmd->u.generate.ids, m->ids, bytes);
        cmd->u.generate.n_ids = m->n_ids;
        return BC_OK;
    }
    size_t len = m->ring_bytes != 0 ? m->ring_bytes : m->text.len;
    if ((cmd->u.generate.text = malloc(len + 1)) == NULL)
        return err_nomem(e, len + 1);
    cmd->u.generate.len = len;
    cmd->u.generate.text[len] = '\0';
    if (m->ring_bytes == 0 && len > 0)
        memcpy(cmd->u.generate.text, m->text.data, len);
    return BC_OK;
}

static int upload_begin(struct conn *c, struct stream *st, struct command **cmd,
                        const Backcast__Generate *m, struct err *e)
{
    struct pending *p;
    int rc = pending_add(c, (*cmd)->request_id, FRAME_GENERATE, m->ring_bytes, &p, e);
    if (rc < 0)
        return rc;
    p->stream = st;
    st->upload = (struct upload){.command = *cmd,
                                 .pending = p,
                                 .total = m->ring_bytes,
                                 .first_seq = m->ring_seq,
                                 .progress_us = clock_us()};
    *cmd = NULL;
    st->in_due = true;
    server_run(c->server, st);
    return BC_OK;
}

int dispatch_generate(struct conn *c, uint32_t id, const ProtobufCMessage *pm, struct err *e)
{
    const Backcast__Generate *m = (const Backcast__Generate *)pm;
    struct stream *st;
    struct command *cmd = NULL;
    int rc = own_stream(c, m->has_session, m->session, &st, e);
    if (rc < 0 || (rc = carrier_check(m, e)) < 0)
        return rc;
    if (st->busy || st->upload.command != NULL)
        return err_set(e, BC_EBUSY, "session",
                       "session %llu has a request under way: one at a time",
                       (unsigned long long)m->session);
    if ((rc = request_new(c, id, CMD_GENERATE, m->session, &cmd, e)) < 0)
        return rc;
    char *role = cmd->u.generate.role;
    memcpy(role, "user", 5);
    if (m->has_role && m->role.len > 0)
        rc = field_text("role", &m->role, role, sizeof cmd->u.generate.role, e);
    if (rc < 0 || (rc = options_read(c, m, &cmd->u.generate.opt, e)) < 0 ||
        (rc = prompt_copy(cmd, m, e)) < 0)
        goto fail;
    if (m->ring_bytes != 0) {
        if ((rc = upload_begin(c, st, &cmd, m, e)) < 0)
            goto fail;
        return BC_OK;
    }
    uint64_t bytes = m->text.len + m->n_ids * sizeof *m->ids;
    return request_post(c, &cmd, FRAME_GENERATE, bytes, st, e);
fail:
    command_free(&cmd);
    return rc;
}
