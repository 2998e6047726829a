/* fake_daemon.h: the daemon's end of the wire in a thread, for tests of libbackcast: it says what the
 * test wants, true or not.
 *
 *     struct fake *f = fake_start(script, arg);      listens in a folder of its own
 *     backcast_connect(&c, fake_path(f));
 *     ...                                            meanwhile script(f, arg) runs in the thread:
 *     fake_stop(&f);                                    fake_accept, fake_request, fake_reply ...
 *
 * The script's functions fail the test (a message and abort) on anything unexpected from the library.
 */
#ifndef BACKCAST_FAKE_DAEMON_H
#define BACKCAST_FAKE_DAEMON_H
#include "backcast.pb-c.h"
#include "frame.h"
#include "ring.h"

/* For scripts: cmocka's assertions belong to the test's own thread. */
#define FAKE_REQUIRE(x) ((x) ? (void)0 : fake_give_up(__FILE__, __LINE__, #x))
_Noreturn void fake_give_up(const char *file, int line, const char *what);

struct fake;
struct fake *fake_start(void (*script)(struct fake *f, void *arg), void *arg);
void fake_stop(struct fake **f); /* joins the thread, closes and removes everything */
const char *fake_path(const struct fake *f);

/* ---- for scripts */
void fake_accept(struct fake *f); /* the next connection; the one before is closed */
void fake_hang_up(struct fake *f);
/* The next request, which must be of this type. Lives until the next one. */
const ProtobufCMessage *fake_request(struct fake *f, unsigned type);
void fake_reply(struct fake *f, unsigned type, const ProtobufCMessage *m);
void fake_reply_fds(struct fake *f, unsigned type, const ProtobufCMessage *m, const int *fds,
                    int n);
void fake_error(struct fake *f, int code, const char *field, const char *text);
/* Any bytes, with fds on the first one. */
void fake_send(struct fake *f, const void *bytes, size_t len, const int *fds, int n);
uint32_t fake_request_id(const struct fake *f); /* of the last request */
void fake_hello(struct fake *f);                /* accept, Hello and a plain answer */

/* A session's memory, as the daemon makes it. */
struct fake_session {
    uint64_t id, generation, size;
    uint64_t last_seq; /* said in the answer: what was made before */
    int fds[4]; /* d2c, c2d, c2d bell (eventfd), d2c bell (the client's end); closed when sent */
    int bell;   /* the daemon's end of d2c's bell */
    int c2d_bell;
    struct ring_region *d2c, *c2d;
    struct ring_writer out;
    struct ring_reader in;
};
void fake_session_make(struct fake_session *s, uint64_t id, uint64_t size);
void fake_session_free(struct fake_session *s);
/* Answers the OPEN_SESSION or ATTACH at hand with it. */
void fake_session_reply(struct fake *f, struct fake_session *s);
void fake_opened(struct fake *f, struct fake_session *s, uint64_t id); /* request, make, reply */
/* One record, published, with its bell. */
void fake_record(struct fake_session *s, unsigned type, unsigned flags, const void *payload,
                 size_t len);
void fake_record_2(struct fake_session *s, unsigned type, unsigned flags, const void *fixed,
                   size_t fixed_len, const void *more, size_t more_len);
void fake_text(struct fake_session *s, const char *text);
void fake_end(struct fake_session *s, uint32_t reason);
/* Steps of test and script in turn: each side waits until the other has said the number. */
void fake_say(struct fake *f, int step);
void fake_wait(struct fake *f, int step);
#endif
