/* raw_client.h: the client's side of the border with nothing in between: frames and rings by hand, so
 * that a test can do what no library does. Waits are bounded; failures are cmocka's.
 *
 *     struct raw *r = raw_connect(d->socket);
 *     raw_hello(r);
 *     struct raw_session *s = raw_open(r, NULL);
 *     raw_generate(s, "text", 4, NULL) ... raw_next(s, 5000) ...
 *     raw_session_free(&s); raw_close(&r);
 */
#ifndef BACKCAST_RAW_CLIENT_H
#define BACKCAST_RAW_CLIENT_H
#include "backcast.pb-c.h"
#include "frame.h"
#include "ring.h"

#define RAW_TIMEOUT_MS 20000

uint64_t raw_now_ms(void);

struct raw {
    int fd;
    uint32_t last_id;
    /* the last frame */
    struct frame_head h;
    uint8_t *payload; /* [FRAME_PAYLOAD_MAX] */
    int fds[FRAME_FDS_MAX];
    unsigned n_fds;
    ProtobufCMessage *m;        /* of the last reply: freed by the next one */
    Backcast__HelloReply hello; /* numbers only */
    int stats_fd;               /* -1: none */
};
struct raw *raw_connect(const char *socket);
void raw_close(struct raw **r);
void raw_bytes(struct raw *r, const void *bytes, size_t len);
/* Sends a message with the next id; returns the id. */
uint32_t raw_send(struct raw *r, enum frame_type type, const ProtobufCMessage *m);
uint32_t raw_send_flags(struct raw *r, unsigned type, unsigned flags, const void *payload,
                        size_t len);
/* 1: a frame (checked, unpacked to r->m); 0: none in time; -1: the daemon closed the connection. */
int raw_recv(struct raw *r, int timeout_ms);
/* Sends, and receives the reply to it; asserts its type. */
void *raw_call(struct raw *r, enum frame_type type, const ProtobufCMessage *m,
               enum frame_type want);
/* The same for a call that must fail: asserts code (positive) and field (NULL: any). */
void raw_call_fails(struct raw *r, enum frame_type type, const ProtobufCMessage *m, int code,
                    const char *field);
/* The last frame is ERROR(code, field). */
void raw_is_error(struct raw *r, int code, const char *field);
/* The last frame is of this type; an ERROR instead of it is shown. */
void raw_is(struct raw *r, enum frame_type want);
void raw_hello(struct raw *r);
/* The daemon has seen all frames so far, looked at the rings for them, and sleeps on those. */
void raw_settle(struct raw *r);
/* No session, no page and no ring; for dh_until. */
bool raw_nothing_is_left(void *raw);
/* Nothing but end of file comes any more (an ERROR before it is allowed). */
void raw_is_closed(struct raw *r);

struct raw_session {
    struct raw *r;
    uint64_t id, generation, size;
    uint8_t token[16];
    struct ring_region *c2d;
    const struct ring_region *d2c;
    int d2c_fd, c2d_fd, c2d_bell, d2c_bell;
    struct ring_writer w;
    struct ring_reader reader;
    uint64_t last_seq;
    /* the last record */
    struct record_head h;
    uint8_t *payload; /* [RING_BYTES_MAX / 4] */
    /* collected by raw_collect */
    int32_t *ids;
    size_t n_ids;
    char *text; /* NUL-terminated */
    size_t text_len;
    unsigned n_prunes, n_lost, n_logprobs, n_scores, n_progress;
    struct record_end end;
    char end_text[300];
};
/* m NULL: all defaults. */
struct raw_session *raw_open(struct raw *r, const Backcast__OpenSession *m);
/* From the reply SESSION_OPENED that r has just received. */
struct raw_session *raw_session_of(struct raw *r);
void raw_session_free(struct raw_session **s); /* unmaps; the daemon is not told */
void raw_ring(struct raw_session *s);          /* the c2d bell */
/* 1: a record in s->h, s->payload, its seq checked; 0: none in time. Bells as the protocol wants. */
int raw_next(struct raw_session *s, int timeout_ms);
/* A raw prompt inline; options of m (may be NULL) are kept. */
void raw_generate(struct raw_session *s, const char *text, size_t len, Backcast__Generate *m);
/* Reads to END, checking and collecting; asserts that it comes. */
void raw_collect(struct raw_session *s);
void raw_forget(struct raw_session *s); /* what was collected */
/* A prompt by ring, frame first; pieces of `piece` bytes. Returns the request's id, unanswered. */
uint32_t raw_upload(struct raw_session *s, const char *text, size_t len, size_t piece,
                    Backcast__Generate *m);
#endif
