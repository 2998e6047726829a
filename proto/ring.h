/* ring.h: a pair of one-writer one-reader byte rings in shared memory, split so that a page has one
 * writer. Both ends' code; the peer is hostile.
 *
 * Two regions a session, both made by the daemon (sealed memfds): it writes `d2c` and the client
 * can only read it; the client writes `c2d` and the daemon maps it read-only. Each region holds its
 * owner's data AND its owner's cursors for both directions, so nobody can corrupt anybody's cursor:
 *
 *            d2c: written by the daemon                    c2d: written by the client
 *   0x000    magic abi log2size generation session         magic abi log2size (never trusted)
 *   0x040    tail       bytes put into this data area      tail
 *   0x080    head       bytes taken out of the OTHER one   head
 *   0x0c0    need_data  "I sleep until data comes": epoch  need_data
 *   0x100    need_room  "I wait for room": epoch           need_room
 *   0x140    state error                                   state error
 *   0x1000   data, 2^log2size bytes                        data
 *
 * A writer needs its own region and the peer's `head`, `need_data`; a reader needs the peer's
 * `tail` and data, its own `head` and `need_data`:
 *
 *     daemon    ring_writer { own = d2c, peer = c2d }    ring_reader { own = d2c, peer = c2d }
 *     client    ring_writer { own = c2d, peer = d2c }    ring_reader { own = c2d, peer = d2c }
 *
 * Cursors count bytes from 0 and never wrap (u64); offset = cursor & (size - 1). Every end keeps
 * its cursors in private memory and only publishes them; every word of the peer is loaded once and
 * checked (never backward, never beyond the size, 16-aligned): a lie is WIRE_EPROTOCOL, and then
 * the ring is finished. Records are published whole (records.h has their layout).
 *
 * Waking. All stores and loads of the wake-up words are seq_cst operations:
 *
 *   publish   write records; own.tail = t;
 *             w = peer.need_data; if (w != rung) rung = w, ring the bell
 *   sleep     own.need_data = ++epoch;
 *             if (peer.tail != head) go on; else wait for the bell, 1 s at most
 *   consume   t = peer.tail, check, copy out; own.head = head;
 *             w = peer.need_room; if (w != rung) rung = w, ring the bell
 *   no room   own.need_room = ++epoch;
 *             h = peer.head, check; still full: wait for the bell, 1 s at most
 *
 * In every order of these operations either the sleeper sees the data or the publisher sees the new
 * epoch, so at most one bell a sleep is needed and none is lost (tests/unit/test_ring_orders.c walks
 * every interleaving). A peer that lies about it costs itself at most the 1 s recheck.
 *
 * Bells are the caller's: functions that return `true` say "ring it now". One bell a direction
 * serves both "data came" and "room came": C rings the c2d eventfd (write 8 bytes), D rings the d2c
 * socketpair (one byte, MSG_DONTWAIT; the client reads it empty before it consumes).
 *
 * Threads: a ring_writer or ring_reader belongs to one thread. Nothing here blocks or allocates.
 */
#ifndef BACKCAST_RING_H
#define BACKCAST_RING_H
#include "records.h"
#include "wire.h"
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define RING_MAGIC 0x31676e6952636142ull /* "BacRing1" */
#define RING_ABI 1u
#define RING_DATA_OFFSET 4096u
#define RING_BYTES_MIN 4096u
#define RING_BYTES_DEFAULT 65536u
#define RING_BYTES_MAX (4u << 20)
#define RING_RECHECK_MS 1000 /* no wait is longer */

enum ring_state {
    RING_OPEN = 0,
    RING_DRAINING = 1, /* the daemon stops: what is in the ring is the last */
    RING_CLOSED = 2,   /* nobody reads or writes any more; error: errors.tbl, 0: in good order */
};

struct ring_region {
    _Atomic uint64_t magic;
    _Atomic uint32_t abi, log2size;
    _Atomic uint64_t generation, session;
    _Alignas(64) _Atomic uint64_t tail;
    _Alignas(64) _Atomic uint64_t head;
    _Alignas(64) _Atomic uint32_t need_data;
    _Alignas(64) _Atomic uint32_t need_room;
    _Alignas(64) _Atomic uint32_t state;
    _Atomic uint32_t error;
    _Alignas(4096) unsigned char data[];
};
_Static_assert(offsetof(struct ring_region, log2size) == 0x00c &&
                   offsetof(struct ring_region, generation) == 0x010 &&
                   offsetof(struct ring_region, session) == 0x018 &&
                   offsetof(struct ring_region, tail) == 0x040 &&
                   offsetof(struct ring_region, head) == 0x080 &&
                   offsetof(struct ring_region, need_data) == 0x0c0 &&
                   offsetof(struct ring_region, need_room) == 0x100 &&
                   offsetof(struct ring_region, state) == 0x140 &&
                   offsetof(struct ring_region, error) == 0x144 &&
                   offsetof(struct ring_region, data) == RING_DATA_OFFSET,
               "wire layout");
_Static_assert(ATOMIC_LONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2,
               "shared words are lock-free");

/* Bytes of a region's memfd for a data area of `size` bytes. */
#define RING_REGION_BYTES(size) ((size_t)(size) + RING_DATA_OFFSET)
/* Largest payload of a record: header, payload and padding take at most a quarter of the area. */
#define RING_PAYLOAD_MAX(size) ((uint32_t)((size) / 4 - sizeof(struct record_head)))

/* True for a power of two in RING_BYTES_MIN..RING_BYTES_MAX. */
bool ring_size_ok(uint64_t size);
/* The owner fills the constant words of a region of zeroes. The client does it for c2d, with the
 * size, generation and session that d2c's header and SessionOpened gave it. */
void ring_region_init(struct ring_region *own, uint64_t size, uint64_t generation,
                      uint64_t session);
/* The client checks d2c's header against the bytes that fstat gives. c2d has the same size. */
int ring_region_check(const struct ring_region *peer, size_t region_bytes, uint64_t session,
                      uint64_t generation, uint64_t *ret_size, const char **why);

/* ---- writer */

struct ring_writer {
    struct ring_region *own;
    const struct ring_region *peer;
    uint64_t size;
    uint64_t tail;      /* written, not all of it published yet */
    uint64_t published; /* what own->tail says */
    uint64_t head;      /* the peer's, as last read and checked */
    uint64_t seq;       /* of the last record; set it before the first one to go on from there */
    uint64_t begun;     /* offset of the record being written; UINT64_MAX: none */
    uint32_t begun_len;
    uint32_t rung;       /* the epoch of peer->need_data that has been answered */
    uint32_t room_epoch; /* own->need_room */
};
/* size: of both data areas (ring_size_ok); the regions must be fresh. */
void ring_writer_init(struct ring_writer *w, struct ring_region *own,
                      const struct ring_region *peer, uint64_t size);

/* Room for a record with len bytes of payload: 1, and *ret_payload is where its bytes go, in the
 * ring; 0: none now; WIRE_EPROTOCOL: the peer lies; WIRE_EINVALID: len > RING_PAYLOAD_MAX. */
int ring_writer_begin(struct ring_writer *w, uint32_t len, void **ret_payload);
/* Ends the record begun, with the next seq. Not seen by the peer before ring_writer_publish. */
void ring_writer_end(struct ring_writer *w, enum record_type type, uint16_t flags);
/* begin, copy a fixed part and a variable part (may be NULL, 0), end. Returns as ring_writer_begin.
 */
struct ring_part {
    const void *bytes;
    size_t len;
};
int ring_writer_put(struct ring_writer *w, enum record_type type, uint16_t flags,
                    const struct ring_part *parts, unsigned n_parts);
/* Shows all ended records to the peer. True: ring the bell. */
bool ring_writer_publish(struct ring_writer *w);
/* Free bytes now (headers, padding and the gap at the end of the area come off them). */
int ring_writer_room(struct ring_writer *w, uint64_t *ret);
/* No room for a record of len: says so to the peer. 1: there is room after all, try again; 0: wait
 * for the bell (RING_RECHECK_MS at most); < 0: the peer lies. Publishes nothing. */
int ring_writer_wait(struct ring_writer *w, uint32_t len);

/* ---- reader */

struct ring_reader {
    struct ring_region *own;
    const struct ring_region *peer;
    uint64_t size;
    uint64_t head;       /* consumed, not all of it released yet */
    uint64_t released;   /* what own->head says */
    uint64_t tail;       /* the peer's, as last read and checked */
    uint32_t rung;       /* the epoch of peer->need_room that has been answered */
    uint32_t data_epoch; /* own->need_data */
};
void ring_reader_init(struct ring_reader *r, struct ring_region *own,
                      const struct ring_region *peer, uint64_t size);

/* Copies the next record out: header to *ret, payload to buf. 1: a record; 0: none now;
 * WIRE_EPROTOCOL: cursor or header lies (or the payload is longer than cap). PAD records are
 * swallowed. Parse the copy only: the peer may rewrite the original at any time. */
int ring_reader_take(struct ring_reader *r, struct record_head *ret, void *buf, size_t cap);
/* Gives the bytes taken so far back to the writer. True: ring the bell. */
bool ring_reader_release(struct ring_reader *r);
/* Nothing taken: says that this end sleeps. 1: data came meanwhile, go on taking; 0: wait for the
 * bell (RING_RECHECK_MS at most); < 0: the peer lies. */
int ring_reader_sleep(struct ring_reader *r);
/* True if published data lies there. A sweep that finds some in a ring without a bell has found a
 * missed wake-up. Does not move anything. */
int ring_reader_ready(struct ring_reader *r);
#endif
