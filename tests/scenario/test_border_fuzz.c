/* Requests made at random from the messages' own descriptors: every type, every field, values at every edge, wrong wire types,
 * lengths that lie, frames cut short. The daemon answers what it can with whole frames, ends what it must, and serves an
 * honest client in between; at the end nothing is left. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <cmocka.h>
#include "daemon_harness.h"
#include "raw_client.h"
#include "sanitized.h"

#define FRAMES (SANITIZED ? 3000u : 6000u)
#define BYTES_MAX 2000u

struct fuzz {
    struct dh *d;
    struct raw *r;
    uint32_t x;
    uint8_t bytes[BYTES_MAX + 64];
    size_t n;
    unsigned sent, answers, opened, lives;
};

static uint32_t below(struct fuzz *f, uint32_t n)
{
    f->x = f->x * 1664525u + 1013904223u;
    return (uint32_t)(((uint64_t)f->x * n) >> 32);
}

/* ---- a message */

static void put(struct fuzz *f, const void *bytes, size_t n)
{
    if (f->n + n > BYTES_MAX)
        return;
    memcpy(f->bytes + f->n, bytes, n);
    f->n += n;
}

static void put_varint(struct fuzz *f, uint64_t v)
{
    uint8_t b[10];
    size_t n = 0;
    for (; v >= 0x80; v >>= 7)
        b[n++] = (uint8_t)(v | 0x80);
    b[n++] = (uint8_t)v;
    put(f, b, n);
}

static uint64_t number(struct fuzz *f)
{
    static const uint64_t edges[] = {0,          1,          2,         3,     4,     5,
                                     7,          8,          15,        16,    31,    48,
                                     63,         64,         65,        100,   127,   128,
                                     200,        255,        256,       257,   300,   500,
                                     1024,       4096,       16384,     65535, 65536, 1ull << 20,
                                     1ull << 31, UINT32_MAX, 1ull << 32};
    if (below(f, 12) == 0)
        return UINT64_MAX - below(f, 3);
    return edges[below(f, sizeof edges / sizeof *edges)];
}

static void put_text(struct fuzz *f)
{
    static const char *const texts[] = {"",
                                        "a",
                                        "none",
                                        "h2o",
                                        "random",
                                        "f32",
                                        "logprob",
                                        "prefill_end",
                                        "user",
                                        "system",
                                        "../x",
                                        "one",
                                        "two",
                                        "three",
                                        "/proc/self/mem",
                                        "/dev/zero",
                                        "\xff\xfe\n",
                                        "oak",
                                        "keydiff",
                                        "the tide turns",
                                        TEST_VECTORS "/tiny-qwen2.gguf"};
    uint8_t junk[64];
    size_t n = below(f, sizeof junk);
    const char *t = texts[below(f, sizeof texts / sizeof *texts)];
    for (size_t i = 0; i < n; i++)
        junk[i] = (uint8_t)below(f, 256);
    bool text = below(f, 5) > 0;
    n = text ? strlen(t) : n;
    put_varint(f, below(f, 60) == 0 ? number(f) : n); /* some lie */
    put(f, text ? (const void *)t : junk, n);
}

static void put_value(struct fuzz *f, const ProtobufCFieldDescriptor *field, unsigned depth);

static void put_message(struct fuzz *f, const ProtobufCMessageDescriptor *m, unsigned depth)
{
    bool open = m == frame_descriptor(FRAME_OPEN_SESSION);
    for (unsigned i = 0; i < m->n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &m->fields[i];
        /* few at a time: most values are refused, and one refusal hides the others */
        if (below(f, 100) >= (open ? 6u : field->id <= 3 ? 75u : 15u))
            continue;
        unsigned times = field->label == PROTOBUF_C_LABEL_REPEATED ? below(f, 12) : 1;
        for (; times > 0; times--)
            put_value(f, field, depth);
    }
}

static void put_nested(struct fuzz *f, const ProtobufCFieldDescriptor *field, unsigned depth)
{
    size_t at = f->n;
    if (depth < 4)
        put_message(f, field->descriptor, depth + 1);
    uint8_t inner[BYTES_MAX];
    size_t n = f->n - at;
    memcpy(inner, f->bytes + at, n);
    f->n = at;
    put_varint(f, n);
    put(f, inner, n);
}

static void put_value(struct fuzz *f, const ProtobufCFieldDescriptor *field, unsigned depth)
{
    bool bytes = field->type == PROTOBUF_C_TYPE_BYTES || field->type == PROTOBUF_C_TYPE_STRING;
    bool message = field->type == PROTOBUF_C_TYPE_MESSAGE;
    unsigned wire = bytes || message ? 2 : field->type == PROTOBUF_C_TYPE_FLOAT ? 5 : 0;
    float x = (float)(int32_t)(below(f, 9) - 2) * 0.3f;
    if (below(f, 60) == 0)
        wire = below(f, 8); /* another one than the message's */
    put_varint(f, (uint64_t)field->id << 3 | wire);
    if (message && wire == 2)
        put_nested(f, field, depth);
    else if (wire == 2)
        put_text(f);
    else if (wire == 5)
        put(f, &x, 4);
    else if (wire == 0 && strcmp(field->name, "session") == 0)
        put_varint(f, f->opened + 1 - below(f, 6)); /* they count up: often one that is there */
    else
        put_varint(f, number(f));
}

/* ---- a life */

static void life_begin(struct fuzz *f)
{
    f->r = raw_connect(f->d->socket);
    raw_hello(f->r);
    f->lives++;
}

/* Takes what came. False: the daemon has ended the connection. */
static bool drain(struct fuzz *f, int wait_ms)
{
    int rc;
    while ((rc = raw_recv(f->r, wait_ms)) == 1) {
        f->answers++;
        f->opened += f->r->h.type == FRAME_SESSION_OPENED;
    }
    return rc == 0;
}

static void frame_send(struct fuzz *f)
{
    static const enum frame_type types[] = {
        FRAME_OPEN_SESSION, FRAME_OPEN_SESSION, FRAME_GENERATE, FRAME_GENERATE,   FRAME_GENERATE,
        FRAME_ATTACH,       FRAME_CLOSE,        FRAME_CANCEL,   FRAME_SET_BUDGET, FRAME_PRUNE,
        FRAME_SCORES,       FRAME_FORK,         FRAME_SAVE,     FRAME_RESTORE,    FRAME_STAT,
        FRAME_LOAD_MODEL,   FRAME_UNLOAD_MODEL, FRAME_HELLO};
    enum frame_type type = types[below(f, sizeof types / sizeof *types)];
    struct frame_head h = {.type = (uint16_t)type, .request_id = ++f->r->last_id};
    uint8_t head[FRAME_HEAD_BYTES];
    f->n = 0;
    put_message(f, frame_descriptor(type), 0);
    h.len = (uint32_t)f->n;
    if (below(f, 200) == 0)
        h.len += below(f, 60); /* the next frame begins inside this one */
    frame_put(&h, head);
    size_t n = below(f, 300) == 0 ? below(f, (uint32_t)f->n + 1) : f->n;
    /* the daemon may have ended it meanwhile */
    (void)!send(f->r->fd, head, sizeof head, MSG_NOSIGNAL | MSG_DONTWAIT);
    (void)!send(f->r->fd, f->bytes, n, MSG_NOSIGNAL | MSG_DONTWAIT);
    f->sent++;
}

static void honest_client(const struct dh *d)
{
    struct raw *r = raw_connect(d->socket);
    raw_hello(r);
    Backcast__Generate g = BACKCAST__GENERATE__INIT;
    g.has_max_tokens = g.has_ignore_end = 1;
    g.max_tokens = 5;
    g.ignore_end = 1;
    Backcast__OpenSession m = BACKCAST__OPEN_SESSION__INIT;
    m.has_budget_tokens = 1;
    m.budget_tokens = 64;
    struct raw_session *s = raw_open(r, &m);
    raw_generate(s, "the cat", 7, &g);
    raw_collect(s);
    assert_int_equal(s->n_ids, 5);
    raw_session_free(&s);
    raw_close(&r);
}

/* Named sessions outlive their connections. */
static void close_named(struct raw *r)
{
    Backcast__Stat m = BACKCAST__STAT__INIT;
    const Backcast__StatReply *reply = raw_call(r, FRAME_STAT, &m.base, FRAME_STAT_REPLY);
    uint64_t ids[64];
    size_t n = 0;
    for (; n < reply->n_sessions && n < 64; n++)
        ids[n] = reply->sessions[n]->session;
    for (size_t i = 0; i < n; i++) {
        Backcast__Close c = BACKCAST__CLOSE__INIT;
        c.has_session = 1;
        c.session = ids[i];
        raw_send(r, FRAME_CLOSE, &c.base);
        assert_int_equal(raw_recv(r, RAW_TIMEOUT_MS), 1); /* closed, or gone meanwhile */
    }
}

static void random_requests_harm_nobody(void **state)
{
    (void)state;
    const char *const args[] = {"--max-frames-per-second=100000", "--kv-memory=256MiB", NULL};
    struct fuzz f = {.d = dh_start("tiny-llama.gguf", args), .x = 2026};
    unsigned ended = 0;
    life_begin(&f);
    while (f.sent < FRAMES) {
        for (unsigned i = 1 + below(&f, 12); i > 0; i--)
            frame_send(&f);
        bool open = drain(&f, (int)below(&f, 4));
        ended += !open;
        if (!open || below(&f, 15) == 0) {
            raw_close(&f.r);
            life_begin(&f);
        }
        if (f.sent % 500 < 6)
            honest_client(f.d);
    }
    raw_close(&f.r);
    print_message("%u requests in %u lives, %u ended by the daemon; %u answers, %u sessions\n",
                  f.sent, f.lives, ended, f.answers, f.opened);
    assert_true(f.answers > f.sent / 4 && f.opened > 50 && ended > 10);
    struct raw *r = raw_connect(f.d->socket);
    raw_hello(r);
    close_named(r);
    assert_true(dh_until(raw_nothing_is_left, r, DH_PATIENCE_MS));
    raw_close(&r);
    honest_client(f.d);
    dh_stop(&f.d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(random_requests_harm_nobody)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
