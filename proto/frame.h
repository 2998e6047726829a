/* frame.h: the 16-byte header in front of every control message, its limits, and safe unpacking of
 * what follows. No I/O here: callers read and write bytes.
 *
 *   0         4       6     7      8             12
 *   | u32 len | type  |proto|flags | u32 request | u32 zero | payload: len bytes of protobuf
 *
 * All little-endian. len counts the payload alone. A request carries an id of the client's choice
 * (not 0); its reply carries the same id and FRAME_REPLY. A frame of the daemon with id 0 is an
 * ERROR about the connection itself, after which it closes. FRAME_CRITICAL: the receiver must
 * answer with an error if it does not know the type (without it, an unknown type is ignored).
 * FRAME_HAS_FDS: file descriptors ride on the header's first byte; only the daemon sends them. Any
 * other bit, another proto, or a nonzero last word is a violation: the connection ends.
 */
#ifndef BACKCAST_FRAME_H
#define BACKCAST_FRAME_H
#include "wire.h"
#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FRAME_HEAD_BYTES 16u
#define FRAME_PROTO 1u                /* layout of the header; messages are versioned by Hello */
#define FRAME_PAYLOAD_MIN_MAX 4096u   /* smallest max_frame that a side may ask for */
#define FRAME_PAYLOAD_HELLO_MAX 4096u /* until Hello has been answered */
#define FRAME_PAYLOAD_MAX 65536u
#define FRAME_FDS_MAX 4u

#define PROTOCOL_VERSION_MIN 1u
#define PROTOCOL_VERSION_MAX 1u
#define FEATURE_STATS_PAGE (1ull << 0) /* HelloReply brings the stats page's fd (statpage.h) */
#define FEATURE_ATTACH (1ull << 1)     /* named sessions outlive their connection: Attach */
#define FEATURE_SCORES_FD (1ull << 2)  /* ScoresReply with a memfd for sessions of others */
#define FEATURE_DROPPED (1ull << 3)    /* Scores.dropped */
#define FEATURE_POSITIONS (1ull << 4)  /* OpenSession.positions, REROTATED records */
#define FEATURES_ALL                                                                               \
    (FEATURE_STATS_PAGE | FEATURE_ATTACH | FEATURE_SCORES_FD | FEATURE_DROPPED | FEATURE_POSITIONS)

enum frame_flag { FRAME_REPLY = 1, FRAME_CRITICAL = 2, FRAME_HAS_FDS = 4 };

enum frame_side { FRAME_SIDE_CLIENT, FRAME_SIDE_DAEMON };

enum frame_type {
#define FRAME(name, number, side, msg) FRAME_##name = number,
#include "frames.tbl"
#undef FRAME
};

struct frame_head {
    uint32_t len;
    uint16_t type;
    uint8_t flags;
    uint32_t request_id;
};

/* Writes the 16 bytes. */
void frame_put(const struct frame_head *h, uint8_t bytes[FRAME_HEAD_BYTES]);
/* Reads and checks 16 bytes sent by `from`. WIRE_OK (the type may still be unknown), or
 * WIRE_EPROTOCOL: *ret untouched, *why (may be NULL) a static sentence. */
int frame_get(const uint8_t bytes[FRAME_HEAD_BYTES], enum frame_side from, uint32_t payload_max,
              struct frame_head *ret, const char **why);

const char *frame_name(unsigned type); /* "OPEN_SESSION"; NULL: unknown */
/* True if `type` is a message that `side` sends. */
bool frame_known(unsigned type, enum frame_side side);

/* ---- payloads: protobuf from a peer that may lie
 *
 * Unknown fields, empty sub-messages and recursion make protobuf-c allocate many times what
 * arrived; so bytes are walked first (frame_scan) and unpacked from a block of fixed size. */

struct frame_limits {
    uint32_t fields_max; /* fields of the message and of all messages inside it */
    uint32_t depth_max;  /* the message itself counts 1 */
};
#define FRAME_FIELDS_MAX 256u /* of a request */
#define FRAME_DEPTH_MAX 3u
#define FRAME_REPLY_FIELDS_MAX 16384u /* of a reply: listings */

/* Walks the bytes by their varints: lengths inside, wire types 0, 1, 2 and 5 only (no groups),
 * field numbers >= 1, limits kept. Sub-messages are found with the descriptor. A packed array is
 * one field. */
int frame_scan(const ProtobufCMessageDescriptor *desc, const uint8_t *bytes, size_t len,
               const struct frame_limits *limits, const char **why);

/* A block that one message at a time is unpacked into: nothing is freed, the next unpack starts
 * over. */
struct frame_arena {
    uint8_t *base; /* the caller's, 16-byte aligned */
    size_t size, used;
    bool full; /* the last unpack ran out of it */
};
#define FRAME_ARENA_BYTES (1u << 20)

const ProtobufCMessageDescriptor *frame_descriptor(unsigned type); /* NULL: unknown type */
/* Scans and unpacks the message of a frame. *ret lives in the arena until the next call. WIRE_EPROTOCOL: malformed;
 * WIRE_ENOMEM: the arena is too small for it. */
int frame_unpack(const struct frame_head *h, const uint8_t *payload,
                 const struct frame_limits *limits, struct frame_arena *arena,
                 ProtobufCMessage **ret, const char **why);
#endif
