/* ring.c: see ring.h. The protocol in four functions: ring_writer_publish, ring_reader_sleep,
 * ring_reader_release, ring_writer_wait; the rest is placing and checking.
 *
 * Invariants of a writer: head <= published <= tail <= head + size; all 16-aligned. Of a reader:
 * released <= head <= tail <= head + size. They hold whatever the peer stores, because only checked
 * copies of its words enter them. */
#include "ring.h"
#include <string.h>

#define RECORD_ALIGN 16u
#define NO_RECORD UINT64_MAX

static uint64_t padded(uint64_t len)
{
    return (sizeof(struct record_head) + len + RECORD_ALIGN - 1) & ~(uint64_t)(RECORD_ALIGN - 1);
}

/* The peer may write at any time: what follows must not be fetched again from its memory. */
static inline void fetched_once(void)
{
    __asm__ volatile("" ::: "memory");
}

bool ring_size_ok(uint64_t size)
{
    return size >= RING_BYTES_MIN && size <= RING_BYTES_MAX && (size & (size - 1)) == 0;
}

void ring_region_init(struct ring_region *own, uint64_t size, uint64_t generation, uint64_t session)
{
    atomic_store(&own->abi, RING_ABI);
    atomic_store(&own->log2size, (uint32_t)__builtin_ctzll(size));
    atomic_store(&own->generation, generation);
    atomic_store(&own->session, session);
    atomic_store(&own->magic, RING_MAGIC);
}

static int refuse(const char **why, const char *text)
{
    if (why != NULL)
        *why = text;
    return WIRE_EPROTOCOL;
}

int ring_region_check(const struct ring_region *peer, size_t region_bytes, uint64_t session,
                      uint64_t generation, uint64_t *ret_size, const char **why)
{
    if (region_bytes < RING_REGION_BYTES(RING_BYTES_MIN))
        return refuse(why, "ring region: too small");
    uint64_t size = region_bytes - RING_DATA_OFFSET;
    if (!ring_size_ok(size))
        return refuse(why, "ring region: size is no power of two in the stated range");
    if (atomic_load(&peer->magic) != RING_MAGIC || atomic_load(&peer->abi) != RING_ABI)
        return refuse(why, "ring region: wrong magic or layout version");
    if (atomic_load(&peer->log2size) != (uint32_t)__builtin_ctzll(size))
        return refuse(why, "ring region: header and file disagree about the size");
    if (atomic_load(&peer->session) != session || atomic_load(&peer->generation) != generation)
        return refuse(why, "ring region: of another session or generation");
    *ret_size = size;
    return WIRE_OK;
}

/* ---- writer */

void ring_writer_init(struct ring_writer *w, struct ring_region *own,
                      const struct ring_region *peer, uint64_t size)
{
    *w = (struct ring_writer){.own = own, .peer = peer, .size = size, .begun = NO_RECORD};
}

/* One load of the peer's head, checked. */
static int writer_look(struct ring_writer *w, memory_order order)
{
    uint64_t h = atomic_load_explicit(&w->peer->head, order);
    if (h < w->head || h > w->published || h % RECORD_ALIGN != 0)
        return WIRE_EPROTOCOL;
    w->head = h;
    return WIRE_OK;
}

/* Bytes that a record of len takes at the present tail: a gap to the end of the area may come
 * first. */
static uint64_t writer_need(const struct ring_writer *w, uint32_t len)
{
    uint64_t rest = w->size - (w->tail & (w->size - 1));
    return padded(len) > rest ? rest + padded(len) : padded(len);
}

static bool writer_fits(const struct ring_writer *w, uint32_t len)
{
    return writer_need(w, len) <= w->size - (w->tail - w->head);
}

int ring_writer_begin(struct ring_writer *w, uint32_t len, void **ret_payload)
{
    if (len > RING_PAYLOAD_MAX(w->size) || w->begun != NO_RECORD)
        return WIRE_EINVALID;
    if (!writer_fits(w, len)) {
        int rc = writer_look(w, memory_order_acquire);
        if (rc < 0)
            return rc;
        if (!writer_fits(w, len))
            return 0;
    }
    uint64_t offset = w->tail & (w->size - 1);
    uint64_t rest = w->size - offset;
    if (padded(len) > rest) {
        struct record_head pad = {.len = (uint32_t)(rest - sizeof pad), .type = RECORD_PAD};
        memcpy(w->own->data + offset, &pad, sizeof pad);
        w->tail += rest;
        offset = 0;
    }
    w->begun = offset;
    w->begun_len = len;
    *ret_payload = w->own->data + offset + sizeof(struct record_head);
    return 1;
}

void ring_writer_end(struct ring_writer *w, enum record_type type, uint16_t flags)
{
    struct record_head h = {.len = w->begun_len,
                            .type = (uint16_t)type,
                            .flags = flags,
                            .seq = ++w->seq};
    unsigned char *at = w->own->data + w->begun;
    memcpy(at, &h, sizeof h);
    uint64_t end = sizeof h + h.len;
    memset(at + end, 0, padded(h.len) - end); /* no old bytes of the ring leave with the padding */
    w->tail += padded(h.len);
    w->begun = NO_RECORD;
}

int ring_writer_put(struct ring_writer *w, enum record_type type, uint16_t flags,
                    const struct ring_part *parts, unsigned n_parts)
{
    uint64_t len = 0;
    for (unsigned i = 0; i < n_parts; i++)
        len += parts[i].len;
    if (len > RING_PAYLOAD_MAX(w->size))
        return WIRE_EINVALID;
    void *payload;
    int rc = ring_writer_begin(w, (uint32_t)len, &payload);
    if (rc <= 0)
        return rc;
    unsigned char *at = payload;
    for (unsigned i = 0; i < n_parts; i++) {
        if (parts[i].len > 0)
            memcpy(at, parts[i].bytes, parts[i].len);
        at += parts[i].len;
    }
    ring_writer_end(w, type, flags);
    return 1;
}

bool ring_writer_publish(struct ring_writer *w)
{
    if (w->published == w->tail)
        return false;
    w->published = w->tail;
    atomic_store_explicit(&w->own->tail, w->tail, memory_order_seq_cst);
    uint32_t asked = atomic_load_explicit(&w->peer->need_data, memory_order_seq_cst);
    if (asked == w->rung)
        return false;
    w->rung = asked;
    return true;
}

int ring_writer_room(struct ring_writer *w, uint64_t *ret)
{
    int rc = writer_look(w, memory_order_acquire);
    if (rc < 0)
        return rc;
    *ret = w->size - (w->tail - w->head);
    return WIRE_OK;
}

int ring_writer_wait(struct ring_writer *w, uint32_t len)
{
    atomic_store_explicit(&w->own->need_room, ++w->room_epoch, memory_order_seq_cst);
    int rc = writer_look(w, memory_order_seq_cst);
    if (rc < 0)
        return rc;
    return writer_fits(w, len);
}

/* ---- reader */

void ring_reader_init(struct ring_reader *r, struct ring_region *own,
                      const struct ring_region *peer, uint64_t size)
{
    *r = (struct ring_reader){.own = own, .peer = peer, .size = size};
}

static int reader_look(struct ring_reader *r, memory_order order)
{
    uint64_t t = atomic_load_explicit(&r->peer->tail, order);
    if (t < r->tail || t - r->head > r->size || t % RECORD_ALIGN != 0)
        return WIRE_EPROTOCOL;
    r->tail = t;
    return WIRE_OK;
}

/* The header at the head, copied and checked against what is published and the end of the area. */
static int reader_head(const struct ring_reader *r, struct record_head *ret)
{
    uint64_t offset = r->head & (r->size - 1);
    struct record_head h;
    memcpy(&h, r->peer->data + offset, sizeof h);
    fetched_once();
    uint64_t bytes = padded(h.len), rest = r->size - offset;
    if (bytes > r->tail - r->head || bytes > rest || bytes > r->size / 4)
        return WIRE_EPROTOCOL;
    if (h.type == RECORD_PAD && (bytes != rest || h.seq != 0 || h.flags != 0))
        return WIRE_EPROTOCOL;
    *ret = h;
    return WIRE_OK;
}

int ring_reader_take(struct ring_reader *r, struct record_head *ret, void *buf, size_t cap)
{
    struct record_head h;
    for (;;) {
        if (r->head == r->tail) {
            int rc = reader_look(r, memory_order_acquire);
            if (rc < 0)
                return rc;
            if (r->head == r->tail)
                return 0;
        }
        int rc = reader_head(r, &h);
        if (rc < 0)
            return rc;
        if (h.type != RECORD_PAD)
            break;
        r->head += padded(h.len); /* now at offset 0, where no PAD can stand: at most one a call */
    }
    if (h.len > cap)
        return WIRE_EPROTOCOL;
    if (h.len > 0)
        memcpy(buf, r->peer->data + (r->head & (r->size - 1)) + sizeof h, h.len);
    fetched_once();
    r->head += padded(h.len);
    *ret = h;
    return 1;
}

bool ring_reader_release(struct ring_reader *r)
{
    if (r->released == r->head)
        return false;
    r->released = r->head;
    atomic_store_explicit(&r->own->head, r->head, memory_order_seq_cst);
    uint32_t asked = atomic_load_explicit(&r->peer->need_room, memory_order_seq_cst);
    if (asked == r->rung)
        return false;
    r->rung = asked;
    return true;
}

int ring_reader_sleep(struct ring_reader *r)
{
    atomic_store_explicit(&r->own->need_data, ++r->data_epoch, memory_order_seq_cst);
    int rc = reader_look(r, memory_order_seq_cst);
    return rc < 0 ? rc : r->head != r->tail;
}

int ring_reader_ready(struct ring_reader *r)
{
    int rc = reader_look(r, memory_order_acquire);
    return rc < 0 ? rc : r->head != r->tail;
}
