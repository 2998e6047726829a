/* inflow.c: records of a client: long prompts and cancels.
 *
 * A prompt over 16 KiB: the Generate frame announces its length and the seq of its first record,
 * the PROMPT records follow at once, without waiting for an answer. So records can be found before
 * the frame that announced them: the socket is read first (what the client sent before it wrote
 * the record is there by then). Records of a prompt that was refused meanwhile come before the
 * announced seq and are dropped. Nothing for 5 s: the request ends with TIMEOUT. */
#include "clock.h"
#include "stream.h"
#include <string.h>

void upload_fail(struct stream *st, const struct err *e)
{
    struct upload *u = &st->upload;
    if (u->command == NULL)
        return;
    struct pending *p = u->pending;
    uint32_t request_id = p->request_id;
    command_free(&u->command);
    pending_free(st->server, &p, false);
    *u = (struct upload){0};
    if (e != NULL && st->conn != NULL)
        conn_error(st->conn, request_id, e);
}

static void upload_done(struct stream *st)
{
    struct upload *u = &st->upload;
    struct err e;
    if (engine_post(st->server->en, &u->command, &e) < 0) {
        upload_fail(st, &e);
        return;
    }
    *u = (struct upload){0}; /* the engine's answer finds the pending request */
    stream_asked(st);
}

static bool take_prompt(struct stream *st, const struct record_head *h, const uint8_t *payload)
{
    struct upload *u = &st->upload;
    struct record_prompt rec;
    if (h->len <= sizeof rec)
        return false;
    memcpy(&rec, payload, sizeof rec);
    if (u->command == NULL || h->seq < u->first_seq)
        return true; /* of a request that was refused or has ended */
    uint64_t n = h->len - sizeof rec;
    if (rec.offset != u->done || rec.total != u->total || n > u->total - u->done)
        return false;
    memcpy(u->command->u.generate.text + u->done, payload + sizeof rec, n);
    u->done += n;
    u->progress_us = clock_us();
    if (u->done == u->total)
        upload_done(st);
    return true;
}

static bool take_record(struct stream *st, const struct record_head *h, const uint8_t *payload)
{
    struct err e;
    if (h->seq != ++st->in_seq)
        return false;
    switch (h->type) {
    case RECORD_PROMPT:
        return take_prompt(st, h, payload);
    case RECORD_CANCEL:
        if (st->upload.command != NULL) {
            err_set(&e, BC_ECANCELLED, "", "cancelled before the prompt was complete");
            upload_fail(st, &e);
        } else if (st->cancellable) { /* one a request: a flood would fill the engine's inbox */
            st->cancel_due = stream_cancel(st, END_CANCELLED, &e) < 0; /* the sweep tries again */
            st->cancellable = st->cancel_due;
        }
        return true;
    default:
        return true; /* of a newer client: it asked no question */
    }
}

/* Nothing left: sleep until the bell. True: something came meanwhile. */
static bool go_to_sleep(struct stream *st)
{
    int rc = ring_reader_sleep(&st->r);
    if (rc < 0)
        stream_violation(st, "the client's ring cursor lies");
    st->asleep = rc == 0;
    return rc > 0;
}

/* Whether there still is a client: what is called below may end the stream or its connection. */
static bool inflow_open(const struct stream *st)
{
    return !st->dead && st->shm.d2c != NULL && st->conn != NULL;
}

/* Whether the next record may be taken: nothing is announced, and the socket was last read when the ring ended at *heard, so what
 * lies behind may belong to a frame that has come since. Reads the socket, which may end the stream or pause the connection. */
static bool inflow_hear(struct stream *st, uint64_t *heard)
{
    if (st->upload.command != NULL || st->r.head < *heard || ring_reader_ready(&st->r) <= 0)
        return true; /* an end of the ring or a lie: ring_reader_take says which */
    *heard = st->r.tail;
    st->held = !conn_drain(st->conn); /* conn_resume looks again */
    return !st->held;
}

bool inflow_run(struct stream *st)
{
    struct server *s = st->server;
    size_t bytes = 0;
    if (!inflow_open(st))
        return false;
    uint64_t heard = st->r.head;
    st->held = false;
    st->asleep = false;
    for (unsigned n = 0; n < STREAM_TURN_RECORDS && bytes < STREAM_TURN_BYTES; n++) {
        struct record_head h;
        if (!inflow_open(st) || !inflow_hear(st, &heard) || !inflow_open(st))
            break;
        int rc = ring_reader_take(&st->r, &h, s->record, RECORD_COPY_BYTES);
        if (rc == 0) {
            if (ring_reader_release(&st->r))
                shm_ring_bell(&st->shm);
            return go_to_sleep(st);
        }
        if (rc < 0 || !take_record(st, &h, s->record)) {
            stream_violation(st, rc < 0 ? "the client's ring cursor or record header lies"
                                        : "a record of the client that does not fit its request");
            return false;
        }
        bytes += sizeof h + h.len;
    }
    if (!st->dead && st->shm.d2c != NULL && ring_reader_release(&st->r))
        shm_ring_bell(&st->shm);
    return !st->held && inflow_open(st);
}

void inflow_sweep(struct stream *st, uint64_t now_us)
{
    struct err e;
    if (st->upload.command == NULL || now_us - st->upload.progress_us < UPLOAD_STALL_US)
        return;
    err_set(&e, BC_ETIMEOUT, "ring_bytes", "no record of the prompt for 5 s: %llu of %llu bytes",
            (unsigned long long)st->upload.done, (unsigned long long)st->upload.total);
    upload_fail(st, &e);
}
