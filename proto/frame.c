/* frame.c: see frame.h. Headers are read byte by byte, so alignment and byte order never matter. */
#include "frame.h"
#include "backcast.pb-c.h"
#include <string.h>

static void le32_put(uint8_t *p, uint32_t v)
{
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
    p[2] = (uint8_t)(v >> 16);
    p[3] = (uint8_t)(v >> 24);
}

static uint32_t le32_get(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static int refuse(int code, const char **why, const char *text)
{
    if (why != NULL)
        *why = text;
    return code;
}

void frame_put(const struct frame_head *h, uint8_t bytes[FRAME_HEAD_BYTES])
{
    le32_put(bytes, h->len);
    bytes[4] = (uint8_t)h->type;
    bytes[5] = (uint8_t)(h->type >> 8);
    bytes[6] = FRAME_PROTO;
    bytes[7] = h->flags;
    le32_put(bytes + 8, h->request_id);
    le32_put(bytes + 12, 0);
}

int frame_get(const uint8_t bytes[FRAME_HEAD_BYTES], enum frame_side from, uint32_t payload_max,
              struct frame_head *ret, const char **why)
{
    struct frame_head h = {
        .len = le32_get(bytes),
        .type = (uint16_t)(bytes[4] | bytes[5] << 8),
        .flags = bytes[7],
        .request_id = le32_get(bytes + 8),
    };
    unsigned allowed =
        from == FRAME_SIDE_DAEMON ? FRAME_REPLY | FRAME_CRITICAL | FRAME_HAS_FDS : FRAME_CRITICAL;
    if (bytes[6] != FRAME_PROTO)
        return refuse(WIRE_EPROTOCOL, why, "frame header: unknown layout (proto)");
    if ((h.flags & ~allowed) != 0)
        return refuse(WIRE_EPROTOCOL, why, "frame header: a flag that this side may not set");
    if (le32_get(bytes + 12) != 0)
        return refuse(WIRE_EPROTOCOL, why, "frame header: the last word is not zero");
    if (h.len > payload_max)
        return refuse(WIRE_EPROTOCOL, why, "frame header: payload longer than the agreed limit");
    if (from == FRAME_SIDE_CLIENT && h.request_id == 0)
        return refuse(WIRE_EPROTOCOL, why, "frame header: a request with id 0");
    *ret = h;
    return WIRE_OK;
}

static const struct {
    uint16_t type;
    uint16_t side;
    const char *name;
    const ProtobufCMessageDescriptor *desc;
} frames[] = {
#define FRAME(name, number, side, msg)                                                             \
    {number, FRAME_SIDE_##side, #name, &backcast__##msg##__descriptor},
#include "frames.tbl"
#undef FRAME
};
#define N_FRAMES (sizeof frames / sizeof frames[0])

static int frame_find(unsigned type)
{
    for (size_t i = 0; i < N_FRAMES; i++)
        if (frames[i].type == type)
            return (int)i;
    return -1;
}

const char *frame_name(unsigned type)
{
    int i = frame_find(type);
    return i < 0 ? NULL : frames[i].name;
}

bool frame_known(unsigned type, enum frame_side side)
{
    int i = frame_find(type);
    return i >= 0 && frames[i].side == side;
}

const ProtobufCMessageDescriptor *frame_descriptor(unsigned type)
{
    int i = frame_find(type);
    return i < 0 ? NULL : frames[i].desc;
}

/* ---- the walk */

struct walk {
    const uint8_t *pos, *end;
};

/* A varint of at most 10 bytes that fits 64 bits. */
static bool walk_varint(struct walk *w, uint64_t *ret)
{
    uint64_t v = 0;
    for (unsigned i = 0; i < 10; i++) {
        if (w->pos == w->end)
            return false;
        uint8_t b = *w->pos++;
        if (i == 9 && b > 1)
            return false;
        v |= (uint64_t)(b & 0x7f) << (7 * i);
        if ((b & 0x80) == 0) {
            *ret = v;
            return true;
        }
    }
    return false;
}

static bool walk_skip(struct walk *w, uint64_t n)
{
    if (n > (uint64_t)(w->end - w->pos))
        return false;
    w->pos += n;
    return true;
}

static const ProtobufCMessageDescriptor *sub_message(const ProtobufCMessageDescriptor *desc,
                                                     uint32_t number)
{
    const ProtobufCFieldDescriptor *f =
        desc != NULL ? protobuf_c_message_descriptor_get_field(desc, number) : NULL;
    return f != NULL && f->type == PROTOBUF_C_TYPE_MESSAGE ? f->descriptor : NULL;
}

static int scan_level(const ProtobufCMessageDescriptor *desc, struct walk w, uint32_t depth,
                      const struct frame_limits *limits, uint32_t *fields, const char **why)
{
    if (depth > limits->depth_max)
        return refuse(WIRE_EPROTOCOL, why, "message nested too deep");
    while (w.pos != w.end) {
        uint64_t key, n;
        if (!walk_varint(&w, &key) || key > UINT32_MAX || (key >> 3) == 0)
            return refuse(WIRE_EPROTOCOL, why, "message with a malformed field key");
        if (++*fields > limits->fields_max)
            return refuse(WIRE_EPROTOCOL, why, "message with too many fields");
        bool inside = true;
        switch (key & 7) {
        case 0:
            inside = walk_varint(&w, &n);
            break;
        case 1:
            inside = walk_skip(&w, 8);
            break;
        case 5:
            inside = walk_skip(&w, 4);
            break;
        case 2: {
            inside = walk_varint(&w, &n) && n <= (uint64_t)(w.end - w.pos);
            if (!inside)
                break;
            const ProtobufCMessageDescriptor *sub = sub_message(desc, (uint32_t)(key >> 3));
            struct walk in = {w.pos, w.pos + n};
            w.pos += n;
            if (sub != NULL) {
                int rc = scan_level(sub, in, depth + 1, limits, fields, why);
                if (rc < 0)
                    return rc;
            }
            break;
        }
        default:
            return refuse(WIRE_EPROTOCOL, why, "message with a group or an unknown wire type");
        }
        if (!inside)
            return refuse(WIRE_EPROTOCOL, why, "message with a field that runs past its end");
    }
    return WIRE_OK;
}

int frame_scan(const ProtobufCMessageDescriptor *desc, const uint8_t *bytes, size_t len,
               const struct frame_limits *limits, const char **why)
{
    uint32_t fields = 0;
    static const uint8_t none;
    struct walk w = {len > 0 ? bytes : &none, len > 0 ? bytes + len : &none};
    return scan_level(desc, w, 1, limits, &fields, why);
}

/* ---- unpacking into a fixed block */

static void *arena_alloc(void *data, size_t size)
{
    struct frame_arena *a = data;
    size_t n = (size + 15) & ~(size_t)15;
    if (n < size || n > a->size - a->used) {
        a->full = true;
        return NULL;
    }
    void *p = a->base + a->used;
    a->used += n;
    return p;
}

static void arena_free(void *data, void *p)
{
    (void)data; /* the whole block is reused by the next message */
    (void)p;
}

int frame_unpack(const struct frame_head *h, const uint8_t *payload,
                 const struct frame_limits *limits, struct frame_arena *arena,
                 ProtobufCMessage **ret, const char **why)
{
    const ProtobufCMessageDescriptor *desc = frame_descriptor(h->type);
    if (desc == NULL)
        return refuse(WIRE_EUNKNOWN, why, "unknown message type");
    int rc = frame_scan(desc, payload, h->len, limits, why);
    if (rc < 0)
        return rc;
    ProtobufCAllocator alloc = {arena_alloc, arena_free, arena};
    arena->used = 0;
    arena->full = false;
    ProtobufCMessage *m = protobuf_c_message_unpack(desc, &alloc, h->len, payload);
    if (m == NULL) {
        /* What passed the scan fails for want of room, or for a known field of another wire type.
         */
        return arena->full
                   ? refuse(WIRE_ENOMEM, why, "message needs more memory than a request may take")
                   : refuse(WIRE_EPROTOCOL, why, "message with a field of the wrong wire type");
    }
    *ret = m;
    return WIRE_OK;
}
