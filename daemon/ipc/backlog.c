/* backlog.c: see backlog.h. A look-up walks from the oldest record, or from where the last one
 * ended: a replay takes one step a record. */
#include "backlog.h"
#include <stdlib.h>
#include <string.h>

int backlog_open(struct backlog *b, struct err *e)
{
    uint8_t *bytes = malloc(BACKLOG_BYTES);
    if (bytes == NULL)
        return err_nomem(e, BACKLOG_BYTES);
    *b = (struct backlog){.bytes = bytes};
    return BC_OK;
}

void backlog_close(struct backlog *b)
{
    if (b->bytes != NULL)
        memset(b->bytes, 0, BACKLOG_BYTES); /* text of one user stays in no other's memory */
    free(b->bytes);
    *b = (struct backlog){0};
}

static void circle_put(struct backlog *b, size_t at, const void *from, size_t n)
{
    if (n == 0)
        return;
    at %= BACKLOG_BYTES;
    size_t first = BC_MIN(n, BACKLOG_BYTES - at);
    memcpy(b->bytes + at, from, first);
    memcpy(b->bytes, (const uint8_t *)from + first, n - first);
}

static void circle_get(const struct backlog *b, size_t at, void *to, size_t n)
{
    at %= BACKLOG_BYTES;
    size_t first = BC_MIN(n, BACKLOG_BYTES - at);
    memcpy(to, b->bytes + at, first);
    memcpy((uint8_t *)to + first, b->bytes, n - first);
}

static void drop_oldest(struct backlog *b)
{
    struct record_head h;
    circle_get(b, b->at, &h, sizeof h);
    b->at = (b->at + sizeof h + h.len) % BACKLOG_BYTES;
    b->used -= sizeof h + h.len;
    if (b->cursor_seq == b->first_seq)
        b->cursor_seq = 0;
    b->first_seq++;
    b->n--;
}

void backlog_add(struct backlog *b, const struct record_head *h, const struct ring_part *parts,
                 unsigned n_parts)
{
    size_t need = sizeof *h + h->len;
    while (b->n > 0 && need > BACKLOG_BYTES - b->used)
        drop_oldest(b);
    if (b->n == 0) {
        b->at = b->used = 0;
        b->cursor_seq = 0;
        b->first_seq = h->seq;
    }
    bc_assert(h->seq == b->first_seq + b->n);
    if (need > BACKLOG_BYTES) {
        b->first_seq = h->seq + 1;
        return;
    }
    size_t at = b->at + b->used;
    circle_put(b, at, h, sizeof *h);
    at += sizeof *h;
    for (unsigned i = 0; i < n_parts; i++) {
        circle_put(b, at, parts[i].bytes, parts[i].len);
        at += parts[i].len;
    }
    b->used += need;
    b->n++;
}

bool backlog_get(struct backlog *b, uint64_t seq, struct record_head *ret, void *payload,
                 size_t cap)
{
    if (seq < b->first_seq || seq - b->first_seq >= b->n)
        return false;
    bool near = b->cursor_seq != 0 && b->cursor_seq <= seq;
    uint64_t i = near ? b->cursor_seq : b->first_seq;
    size_t at = near ? b->cursor_at : b->at;
    struct record_head h;
    for (circle_get(b, at, &h, sizeof h); i < seq; i++) {
        at += sizeof h + h.len;
        circle_get(b, at, &h, sizeof h);
    }
    bc_assert(h.seq == seq);
    b->cursor_seq = seq;
    b->cursor_at = at % BACKLOG_BYTES;
    if (h.len > cap)
        return false;
    circle_get(b, at + sizeof h, payload, h.len);
    *ret = h;
    return true;
}
