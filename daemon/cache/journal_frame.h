/* journal_frame.h: the fixed bytes of a journal, for journal.c and journal_read.c. */
#ifndef BACKCAST_JOURNAL_FRAME_H
#define BACKCAST_JOURNAL_FRAME_H
#include <stdint.h>

#define FILE_MAGIC "BCJRNL\n"

struct file_head {
    char magic[8];
    uint32_t version, zero;
};
struct frame_head {
    uint32_t len;
    uint16_t type, zero;
    uint64_t seq, synced;
};
_Static_assert(sizeof(struct file_head) == 16 && sizeof(struct frame_head) == 24, "as documented");
#endif
