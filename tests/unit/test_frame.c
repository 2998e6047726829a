/* Frame headers and the walk over protobuf bytes: what is valid, what is refused, and that nothing
 * that a peer sends makes unpacking use more than its block. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "backcast.pb-c.h"
#include "frame.h"

static const struct frame_limits limits = {FRAME_FIELDS_MAX, FRAME_DEPTH_MAX};

static _Alignas(16) uint8_t block[FRAME_ARENA_BYTES];

static struct frame_arena arena_new(size_t size)
{
    return (struct frame_arena){.base = block, .size = size};
}

static void header_has_the_drawn_bytes(void **state)
{
    (void)state;
    struct frame_head h = {.len = 0x01020304,
                           .type = FRAME_SESSION_OPENED,
                           .flags = FRAME_REPLY | FRAME_HAS_FDS,
                           .request_id = 0xa1b2c3d4};
    static const uint8_t want[16] = {4, 3, 2, 1, 17, 0, 1, 5, 0xd4, 0xc3, 0xb2, 0xa1, 0, 0, 0, 0};
    uint8_t bytes[16];
    frame_put(&h, bytes);
    assert_memory_equal(bytes, want, 16);
    struct frame_head back;
    assert_int_equal(frame_get(bytes, FRAME_SIDE_DAEMON, UINT32_MAX, &back, NULL), WIRE_OK);
    assert_int_equal(back.len, h.len);
    assert_int_equal(back.type, h.type);
    assert_int_equal(back.flags, h.flags);
    assert_int_equal(back.request_id, h.request_id);
}

/* Every value of every header byte, from both sides: accepted exactly where the rules say so. */
static void header_every_byte_value(void **state)
{
    (void)state;
    struct frame_head h = {.len = 8, .type = FRAME_STAT, .request_id = 7};
    uint8_t good[16];
    frame_put(&h, good);
    for (unsigned side = 0; side < 2; side++) {
        for (unsigned at = 0; at < 16; at++) {
            for (unsigned v = 0; v < 256; v++) {
                uint8_t bytes[16];
                memcpy(bytes, good, 16);
                bytes[at] = (uint8_t)v;
                bool want = true;
                if (at < 4)
                    want = (at == 0 ? v : 8 + (v << (8 * at))) <= FRAME_PAYLOAD_MAX;
                else if (at == 6)
                    want = v == FRAME_PROTO;
                else if (at == 7)
                    want = (v & ~(side == FRAME_SIDE_DAEMON ? 7u : 2u)) == 0;
                else if (at == 8 && side == FRAME_SIDE_CLIENT)
                    want = v != 0;
                else if (at >= 12)
                    want = v == 0;
                struct frame_head ret = {.len = 99};
                const char *why = NULL;
                int rc = frame_get(bytes, (enum frame_side)side, FRAME_PAYLOAD_MAX, &ret, &why);
                assert_int_equal(rc, want ? WIRE_OK : WIRE_EPROTOCOL);
                if (!want) {
                    assert_non_null(why);
                    assert_int_equal(ret.len, 99); /* untouched */
                }
            }
        }
    }
}

static void names_and_sides(void **state)
{
    (void)state;
    assert_string_equal(frame_name(FRAME_GENERATE), "GENERATE");
    assert_null(frame_name(0));
    assert_null(frame_name(65535));
    assert_true(frame_known(FRAME_GENERATE, FRAME_SIDE_CLIENT));
    assert_false(frame_known(FRAME_GENERATE, FRAME_SIDE_DAEMON));
    assert_true(frame_known(FRAME_ERROR, FRAME_SIDE_DAEMON));
    assert_null(frame_descriptor(3000));
}

static int unpack(unsigned type, const uint8_t *bytes, size_t len, struct frame_arena *a,
                  ProtobufCMessage **ret, const char **why)
{
    struct frame_head h = {.len = (uint32_t)len, .type = (uint16_t)type};
    return frame_unpack(&h, bytes, &limits, a, ret, why);
}

static int scan(const void *bytes, size_t len)
{
    const char *why = NULL;
    int rc = frame_scan(&backcast__generate__descriptor, bytes, len, &limits, &why);
    assert_true(rc == WIRE_OK || why != NULL);
    return rc;
}

static void scan_refuses_malformed_bytes(void **state)
{
    (void)state;
    assert_int_equal(scan("", 0), WIRE_OK);
    assert_int_equal(scan("\x08\x01", 2), WIRE_OK);
    assert_int_equal(scan("\x08", 1), WIRE_EPROTOCOL);      /* key without a value */
    assert_int_equal(scan("\x08\x80", 2), WIRE_EPROTOCOL);  /* varint cut */
    assert_int_equal(scan("\x80", 1), WIRE_EPROTOCOL);      /* key cut */
    assert_int_equal(scan("\x00\x01", 2), WIRE_EPROTOCOL);  /* field 0 */
    assert_int_equal(scan("\x0b\x0c", 2), WIRE_EPROTOCOL);  /* group */
    assert_int_equal(scan("\x0c", 1), WIRE_EPROTOCOL);      /* end of group */
    assert_int_equal(scan("\x0e\x00", 2), WIRE_EPROTOCOL);  /* wire type 6 */
    assert_int_equal(scan("\x0f\x00", 2), WIRE_EPROTOCOL);  /* wire type 7 */
    assert_int_equal(scan("\x0a\x02x", 3), WIRE_EPROTOCOL); /* length past the end */
    assert_int_equal(scan("\x0a\x01x", 3), WIRE_OK);
    assert_int_equal(scan("\x09\1\2\3\4\5\6\7", 8), WIRE_EPROTOCOL); /* fixed64 cut */
    assert_int_equal(scan("\x0d\1\2\3", 4), WIRE_EPROTOCOL);         /* fixed32 cut */
    /* a varint of ten bytes is the longest, and it must fit 64 bits */
    assert_int_equal(scan("\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", 11), WIRE_OK);
    assert_int_equal(scan("\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02", 11), WIRE_EPROTOCOL);
    assert_int_equal(scan("\x08\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01", 12), WIRE_EPROTOCOL);
    /* a key beyond 32 bits; a length of 2^63 */
    assert_int_equal(scan("\x80\x80\x80\x80\x10\x00", 6), WIRE_EPROTOCOL);
    assert_int_equal(scan("\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", 10), WIRE_EPROTOCOL);
}

static void scan_counts_fields_and_depth(void **state)
{
    (void)state;
    uint8_t many[2 * 257];
    for (unsigned i = 0; i < sizeof many; i += 2) {
        many[i] = 0x08;
        many[i + 1] = 1;
    }
    assert_int_equal(scan(many, 2 * 256), WIRE_OK);
    assert_int_equal(scan(many, 2 * 257), WIRE_EPROTOCOL);
    /* StatReply { sessions { } }: two levels; fields inside count too */
    static const uint8_t nested[] = {0x0a, 2, 0x08, 1};
    struct frame_limits l = {2, 2};
    const ProtobufCMessageDescriptor *d = &backcast__stat_reply__descriptor;
    assert_int_equal(frame_scan(d, nested, sizeof nested, &l, NULL), WIRE_OK);
    l.fields_max = 1;
    assert_int_equal(frame_scan(d, nested, sizeof nested, &l, NULL), WIRE_EPROTOCOL);
    l = (struct frame_limits){2, 1};
    assert_int_equal(frame_scan(d, nested, sizeof nested, &l, NULL), WIRE_EPROTOCOL);
    /* the inner bytes of an unknown field are no message */
    static const uint8_t opaque[] = {0xfa, 0x3f, 2, 0x0b, 0x0b};
    l = (struct frame_limits){2, 1};
    assert_int_equal(frame_scan(d, opaque, sizeof opaque, &l, NULL), WIRE_OK);
}

static size_t pack_generate(uint8_t *to)
{
    Backcast__Generate g = BACKCAST__GENERATE__INIT;
    static int32_t ids[300];
    ProtobufCBinaryData stops[2] = {{3, (uint8_t *)"abc"}, {1, (uint8_t *)"\0"}};
    for (int i = 0; i < 300; i++)
        ids[i] = i * 7 - 5;
    g.has_session = 1;
    g.session = 77;
    g.has_kind = 1;
    g.kind = 2;
    g.ids = ids;
    g.n_ids = 300;
    g.has_temperature = 1;
    g.temperature = 0.75f;
    g.stop = stops;
    g.n_stop = 2;
    return backcast__generate__pack(&g, to);
}

static void unpack_gives_what_was_packed(void **state)
{
    (void)state;
    uint8_t bytes[4096];
    size_t len = pack_generate(bytes);
    struct frame_arena a = arena_new(sizeof block);
    ProtobufCMessage *m = NULL;
    assert_int_equal(unpack(FRAME_GENERATE, bytes, len, &a, &m, NULL), WIRE_OK);
    Backcast__Generate *g = (Backcast__Generate *)m;
    assert_int_equal(g->session, 77);
    assert_int_equal(g->n_ids, 300);
    assert_int_equal(g->ids[299], 299 * 7 - 5);
    assert_int_equal(g->n_stop, 2);
    assert_int_equal(g->stop[1].len, 1);
    assert_false(g->has_seed);
    /* the block is reused, not grown */
    size_t used = a.used;
    assert_int_equal(unpack(FRAME_GENERATE, bytes, len, &a, &m, NULL), WIRE_OK);
    assert_int_equal(a.used, used);
}

static void unpack_is_bounded(void **state)
{
    (void)state;
    uint8_t bytes[4096];
    const char *why = NULL;
    size_t len = pack_generate(bytes);
    ProtobufCMessage *m = NULL;
    for (size_t size = 0; size < 2048; size += 48) {
        struct frame_arena a = arena_new(size);
        int rc = unpack(FRAME_GENERATE, bytes, len, &a, &m, &why);
        assert_true(rc == WIRE_OK || rc == WIRE_ENOMEM);
        assert_true(a.used <= size);
    }
    /* the largest frame full of ids fits the block of the daemon */
    static uint8_t big[FRAME_PAYLOAD_MAX];
    big[0] = 0x32; /* field 6, length-delimited */
    unsigned n = sizeof big - 4;
    big[1] = (uint8_t)(n | 0x80);
    big[2] = (uint8_t)(n >> 7 | 0x80);
    big[3] = (uint8_t)(n >> 14);
    memset(big + 4, 1, n);
    struct frame_arena a = arena_new(sizeof block);
    assert_int_equal(unpack(FRAME_GENERATE, big, sizeof big, &a, &m, &why), WIRE_OK);
    assert_int_equal(((Backcast__Generate *)m)->n_ids, n);
    /* unknown fields and empty messages by the thousand: the classic amplifiers */
    for (size_t i = 0; i + 1 < sizeof big; i += 2) {
        big[i] = 0x0a;
        big[i + 1] = 0;
    }
    assert_int_equal(unpack(FRAME_STAT_REPLY, big, sizeof big, &a, &m, &why), WIRE_EPROTOCOL);
    assert_int_equal(unpack(9999, big, 0, &a, &m, &why), WIRE_EUNKNOWN);
    /* a known field with another wire type passes the walk and fails in unpacking */
    assert_int_equal(unpack(FRAME_STAT, (const uint8_t *)"\x0a\x00", 2, &a, &m, &why),
                     WIRE_EPROTOCOL);
}

static uint32_t rng_state = 12345;
static uint32_t rng(void)
{
    rng_state = rng_state * 1664525u + 1013904223u;
    return rng_state >> 8;
}

/* Mutated messages of every type: a verdict each time, within the block. */
static void unpack_survives_mutations(void **state)
{
    (void)state;
    uint8_t good[4096], bytes[4096];
    size_t len = pack_generate(good);
    unsigned verdicts[2] = {0, 0};
    for (unsigned i = 0; i < 60000; i++) {
        memcpy(bytes, good, len);
        size_t n = len - (rng() % 4 == 0 ? rng() % len : 0);
        for (unsigned k = rng() % 6; k > 0; k--)
            bytes[rng() % n] = (uint8_t)rng();
        struct frame_arena a = arena_new(65536);
        ProtobufCMessage *m = NULL;
        unsigned type = rng() % 98;
        if (frame_descriptor(type) == NULL)
            type = FRAME_GENERATE;
        int rc = unpack(type, bytes, n, &a, &m, NULL);
        assert_true(rc == WIRE_OK || rc == WIRE_EPROTOCOL || rc == WIRE_ENOMEM);
        assert_true(a.used <= a.size);
        verdicts[rc == WIRE_OK]++;
        if (rc == WIRE_OK)
            assert_non_null(m);
    }
    assert_true(verdicts[0] > 1000 && verdicts[1] > 1000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(header_has_the_drawn_bytes),
        cmocka_unit_test(header_every_byte_value),
        cmocka_unit_test(names_and_sides),
        cmocka_unit_test(scan_refuses_malformed_bytes),
        cmocka_unit_test(scan_counts_fields_and_depth),
        cmocka_unit_test(unpack_gives_what_was_packed),
        cmocka_unit_test(unpack_is_bounded),
        cmocka_unit_test(unpack_survives_mutations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
