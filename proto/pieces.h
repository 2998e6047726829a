/* pieces.h: how long a record may be, and where a text is cut that is longer. The daemon's loop cuts
 * by these rules, and its engine counts by them: for a session with a name they depend on nothing but
 * the text, so that the number of a record is known before it is made. */
#ifndef BACKCAST_PIECES_H
#define BACKCAST_PIECES_H
#include <stdbool.h>
#include "ring.h"

#define PIECE_MAX 65520u

/* Payload bytes of a record. kept: of a stream that is kept for later rings, whose size nobody knows
 * yet: it must fit the smallest. */
static inline uint32_t piece_payload_max(bool kept, uint64_t ring_size)
{
    uint64_t max = RING_PAYLOAD_MAX(kept ? RING_BYTES_MIN : ring_size);
    return max < PIECE_MAX ? (uint32_t)max : PIECE_MAX;
}

/* Longest piece of a text that ends between characters and fits. */
static inline uint32_t piece_text(const char *text, uint32_t len, uint32_t max)
{
    if (len <= max)
        return len;
    uint32_t n = max;
    while (n > 0 && max - n < 3 && ((unsigned char)text[n] & 0xc0) == 0x80)
        n--;
    return n > 0 && ((unsigned char)text[n] & 0xc0) != 0x80 ? n : max;
}
#endif
