/* prompt.c: asking for an answer.
 *
 * A prompt of at most 16 KiB travels inside GENERATE. A longer one is announced there by its length
 * and follows as PROMPT records through the c2d ring:
 *
 *     GENERATE{ring_bytes} -> socket      PROMPT{offset, total} bytes -> ring, bell
 *                                         ... no room: wait for the bell, or for a refusal ...
 *     <- ACCEPTED or ERROR
 *
 * The answer may come before the last record is written (a refusal): what is left is not sent, and
 * what was written is known by its sequence numbers, which are below the next prompt's ring_seq.
 */
#include <errno.h>
#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include "lib.h"

#define STOPS_MAX 8
#define STOP_BYTES_MAX 256
#define IDS_MAX (PROMPT_INLINE_MAX) /* token ids travel inside GENERATE, 5 bytes each at most */

void backcast_generate_options_init(struct backcast_generate_options *opt)
{
    *opt = (struct backcast_generate_options){
        .size = sizeof(*opt),
        .max_tokens = BACKCAST_DEFAULT,
        .top_p = 1,
        .repeat_penalty = 1,
        .repeat_last = 64,
        .n_logprobs = -1,
    };
}

static int options_take(backcast *c, const struct backcast_generate_options *opt,
                        struct backcast_generate_options *ret)
{
    backcast_generate_options_init(ret);
    if (opt == NULL)
        return 0;
    if (opt->size < sizeof(opt->size) + sizeof(opt->max_tokens) || opt->size > sizeof(*ret))
        return fail(&c->fail, BACKCAST_EINVALID, "size",
                    "generate options of %zu bytes: use backcast_generate_options_init", opt->size);
    memcpy(ret, opt, opt->size);
    return 0;
}

/* stop: room for STOPS_MAX. Values are the daemon's to judge; here only what the wire cannot say. */
static int options_put(backcast *c, const struct backcast_generate_options *o,
                       ProtobufCBinaryData *stop, Backcast__Generate *m)
{
    if (o->n_stop > STOPS_MAX)
        return fail(&c->fail, BACKCAST_EINVALID, "stop", "%zu stop texts, %d at most", o->n_stop,
                    STOPS_MAX);
    for (size_t i = 0; i < o->n_stop; i++) {
        stop[i] = bytes_of(o->stop[i]);
        if (stop[i].len == 0 || stop[i].len > STOP_BYTES_MAX)
            return fail(&c->fail, BACKCAST_EINVALID, "stop",
                        "stop text %zu has %zu bytes, not 1 to %d", i, stop[i].len, STOP_BYTES_MAX);
    }
    m->n_stop = o->n_stop;
    m->stop = stop;
    m->has_max_tokens = o->max_tokens != BACKCAST_DEFAULT;
    m->has_temperature = m->has_top_p = m->has_min_p = m->has_top_k = true;
    m->has_repeat_penalty = m->has_repeat_last = m->has_seed = true;
    m->max_tokens = o->max_tokens;
    m->temperature = o->temperature;
    m->top_p = o->top_p;
    m->min_p = o->min_p;
    m->top_k = o->top_k;
    m->repeat_penalty = o->repeat_penalty;
    m->repeat_last = o->repeat_last;
    m->seed = o->seed;
    m->has_n_logprobs = o->n_logprobs >= 0;
    m->n_logprobs = (uint32_t)o->n_logprobs;
    m->has_prompt_logprobs = o->prompt_logprobs != 0;
    m->prompt_logprobs = o->prompt_logprobs != 0;
    m->has_ignore_end = o->ignore_end != 0;
    m->ignore_end = o->ignore_end != 0;
    return 0;
}

/* Writes what fits of text[*at..] and rings. 1: all is written; 0: the ring is full; < 0: a lie. */
static int upload_some(backcast_session *s, const char *text, size_t len, size_t *at)
{
    struct record_prompt head = {.total = len};
    int rc = 1;

    while (*at < len && rc == 1) {
        size_t room = RING_PAYLOAD_MAX(s->ring_size) - sizeof(head);
        size_t n = len - *at < room ? len - *at : room;
        head.offset = *at;
        const struct ring_part parts[] = {{&head, sizeof(head)}, {text + *at, n}};
        rc = ring_writer_put(&s->out, RECORD_PROMPT, 0, parts, 2);
        if (rc == 1)
            *at += n;
    }
    if (ring_writer_publish(&s->out))
        session_ring_bell(s);
    return rc;
}

/* Waits until the ring has room, the answer is there, or the deadline passes. */
static int upload_wait(backcast_session *s, uint64_t deadline)
{
    backcast *c = s->c;
    int rc = ring_writer_wait(&s->out, RING_PAYLOAD_MAX(s->ring_size));

    if (rc != 0)
        return rc;
    uint64_t now = now_ms();
    if (now >= deadline)
        return fail(&c->fail, BACKCAST_ETIMEOUT, "", "the daemon reads no prompt for %u s",
                    CALL_MS / 1000);
    struct pollfd p[2] = {{.fd = c->sock, .events = POLLIN}, {.fd = s->bell_in, .events = POLLIN}};
    int ms = deadline - now < RING_RECHECK_MS ? (int)(deadline - now) : RING_RECHECK_MS;
    if (poll(p, 2, ms) < 0 && errno != EINTR)
        return conn_lose(c, BACKCAST_EIO, "poll: %s", strerror(errno));
    if (p[1].revents != 0) {
        session_drain_bell(s);
        stream_kick(c); /* it may have been about records for the reader */
    }
    return 0;
}

/* The prompt through the ring, and GENERATE's answer. */
static int upload(backcast_session *s, const char *text, size_t len, uint32_t id,
                  const struct call *call)
{
    backcast *c = s->c;
    uint64_t deadline = now_ms() + CALL_MS;
    struct call look = *call;
    size_t at = 0, before = 0;

    look.timeout_ms = 0;
    for (;;) {
        int rc = upload_some(s, text, len, &at);
        if (rc == 1)
            return conn_answer(c, id, call);
        if (rc == 0 && s->d2c != NULL && atomic_load(&s->d2c->state) == RING_CLOSED)
            rc = BACKCAST_ECLOSED;
        if (rc == 0) {
            int answer = conn_answer(c, id, &look);
            if (answer != BACKCAST_ETIMEOUT)
                return answer;
            rc = upload_wait(s, deadline);
        }
        if (c->lost != 0)
            return c->lost;
        if (rc < 0 && rc != BACKCAST_ETIMEOUT) {
            session_kill(s, rc, "its prompt ring is broken or was closed");
            return fail(&c->fail, rc, "session", "session %llu is over: %s",
                        (unsigned long long)s->id, s->dead_text);
        }
        if (rc < 0)
            return rc;
        if (at != before)
            deadline = now_ms() + CALL_MS;
        before = at;
    }
}

static int generate(backcast_session *s, Backcast__Generate *m, const char *text, size_t len,
                    const struct backcast_generate_options *opt)
{
    backcast *c = s->c;
    struct backcast_generate_options o;
    ProtobufCBinaryData stop[STOPS_MAX];
    struct call call = {FRAME_GENERATE, &m->base, FRAME_ACCEPTED, CALL_MS, NULL, NULL, NULL};
    uint32_t id = 0;
    int rc = session_check(s);

    if (rc == 0 && s->busy)
        rc = fail(&c->fail, BACKCAST_EBUSY, "session",
                  "session %llu is busy with a request: read until its END, or cancel it",
                  (unsigned long long)s->id);
    if (rc == 0)
        rc = options_take(c, opt, &o);
    if (rc == 0)
        rc = options_put(c, &o, stop, m);
    if (rc < 0)
        return rc;
    m->has_session = m->has_kind = true;
    m->session = s->id;
    if (m->n_ids == 0 && len <= PROMPT_INLINE_MAX) {
        m->has_text = true;
        m->text = (ProtobufCBinaryData){len, (uint8_t *)(uintptr_t)text};
        rc = conn_call(c, &call);
    } else if (m->n_ids == 0) {
        m->has_ring_bytes = m->has_ring_seq = true;
        m->ring_bytes = len;
        m->ring_seq =
            s->out.seq + 1; /* what is left in the ring of a refused one is not this one */
        rc = conn_send(c, FRAME_GENERATE, &m->base, &id);
        if (rc == 0)
            rc = upload(s, text, len, id, &call);
    } else {
        rc = conn_call(c, &call);
    }
    if (rc == 0)
        s->busy = true;
    return rc;
}

int backcast_chat(backcast_session *s, const char *role, const char *text, size_t len,
                  const struct backcast_generate_options *opt)
{
    Backcast__Generate m = BACKCAST__GENERATE__INIT;

    m.kind = 0;
    m.has_role = role != NULL;
    if (role != NULL)
        m.role = bytes_of(role);
    return generate(s, &m, text, len, opt);
}

int backcast_prompt(backcast_session *s, const char *text, size_t len,
                    const struct backcast_generate_options *opt)
{
    Backcast__Generate m = BACKCAST__GENERATE__INIT;
    m.kind = 1;
    return generate(s, &m, text, len, opt);
}

int backcast_prompt_ids(backcast_session *s, const int32_t *ids, size_t n,
                        const struct backcast_generate_options *opt)
{
    Backcast__Generate m = BACKCAST__GENERATE__INIT;

    if (n == 0 || n > IDS_MAX) {
        int rc = session_check(s);
        return rc < 0 ? rc
                      : fail(&s->c->fail, BACKCAST_EINVALID, "ids", "%zu token ids, not 1 to %u", n,
                             IDS_MAX);
    }
    m.kind = 2;
    m.ids = (int32_t *)(uintptr_t)ids;
    m.n_ids = n;
    return generate(s, &m, NULL, 0, opt);
}

int backcast_cancel(backcast_session *s)
{
    Backcast__Cancel m = BACKCAST__CANCEL__INIT;
    int rc = session_check(s);

    m.has_session = true;
    m.session = s->id;
    return rc < 0 ? rc : conn_send(s->c, FRAME_CANCEL, &m.base, NULL); /* DONE is dropped later */
}
