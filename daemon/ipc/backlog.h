/* backlog.h: the last BACKLOG_BYTES of a named session's stream, record by record, so that a client
 * that attaches again gets what it missed. Owner: the loop's thread.
 *
 *     bytes  [ ... | head payload | head payload | ... ]   a circle; the oldest make room
 *              ^at                                ^at + used
 */
#ifndef BACKCAST_IPC_BACKLOG_H
#define BACKCAST_IPC_BACKLOG_H
#include "base.h"
#include "records.h"
#include "ring.h"

#define BACKLOG_BYTES (256u << 10)

struct backlog {
    uint8_t *bytes; /* [BACKLOG_BYTES]; NULL: the session has no name */
    size_t at, used;
    uint64_t first_seq, n; /* of the oldest record; how many */
    uint64_t cursor_seq;   /* the record at cursor_at: where the last look-up ended; 0: none */
    size_t cursor_at;
};
int backlog_open(struct backlog *b, struct err *e);
void backlog_close(struct backlog *b);
/* Records come with ascending seq, without gaps. One longer than all is kept as lost. */
void backlog_add(struct backlog *b, const struct record_head *h, const struct ring_part *parts,
                 unsigned n_parts);
/* Copies record seq out; false: not kept (any more). payload: [RECORD max of the ring]. */
bool backlog_get(struct backlog *b, uint64_t seq, struct record_head *ret, void *payload,
                 size_t cap);
#endif
