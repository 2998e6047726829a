/* journal.h: a file that only grows: records with a number and a sum each, so that after any end of
 * the process, and of the machine, what stands in it is known. Format and files; no threads, no
 * session.
 *
 *   0    "BCJRNL\n" 0, u32 version, u32 zero                                     16 bytes
 *   16   | u32 len | u16 type | u16 zero | u64 seq | u64 synced | payload | u32 sum |   a record
 *        | ...
 *
 * seq counts 1, 2, 3 ...; sum is the CRC-32C of all bytes of the record before it; synced is the seq
 * up to which the file was on the disk for certain when the record was made. So a damaged place tells
 * what it is: if a whole record behind it says that the place had been synced, the file is broken;
 * if none does, it is a tail that never got there, and is cut.
 *
 * Writing never trusts a file that has failed. After a failed write or sync the file is abandoned: a
 * new one is made of the part that was synced, checked as it is copied, and of the records since,
 * which are kept in memory until they are synced. Only if that fails too is the error told, and the
 * records are still owed: the next put tries again. Owner: one thread. */
#ifndef BACKCAST_JOURNAL_H
#define BACKCAST_JOURNAL_H
#include "bytes.h"
#include "disk_io.h"

#define JOURNAL_VERSION 1u
#define JOURNAL_START 16u       /* bytes before the first record */
#define JOURNAL_FRAME_BYTES 28u /* of a record beside its payload */
#define JOURNAL_PAYLOAD_MAX (80u << 20)
#define JOURNAL_OWED_MAX (256u << 20) /* bytes kept in memory */
#define JOURNAL_TYPE_MAX 255u

/* ---- frames: records to be, one after another in a buffer; put fills in numbers and sums */
size_t journal_frame(struct bytes_out *o,
                     uint16_t type); /* begins one; give the answer to its end */
void journal_frame_end(struct bytes_out *o, size_t frame);

/* ---- writing */
struct journal;
/* A new file with these frames, on the disk when this returns, or not there. BC_EBUSY: a file of that
 * name exists. The folder must exist. */
int journal_create(struct journal **ret, const struct disk_io *io, const char *path,
                   const struct bytes_out *frames, struct err *e);
/* Goes on behind the last good record of a file that was read; what lies behind it is cut off. */
struct journal_scan;
int journal_open(struct journal **ret, const struct disk_io *io, const char *path,
                 const struct journal_scan *at, struct err *e);
/* Closes the file as it is. */
void journal_close(struct journal **j);
/* Adds the frames: handed to the system when this returns BC_OK. Otherwise they are owed. */
int journal_put(struct journal *j, const struct bytes_out *frames, struct err *e);
/* Everything put so far is on the disk. */
int journal_sync(struct journal *j, struct err *e);
uint64_t journal_seq(const struct journal *j); /* of the last record put */
uint32_t journal_sum(const struct journal *j); /* its sum */
bool journal_dirty(const struct journal *j);   /* something is not synced */
size_t journal_owed(const struct journal *j);  /* bytes kept in memory until they are synced */

/* ---- reading */
enum journal_state {
    JOURNAL_WHOLE,
    JOURNAL_TORN,   /* its end never reached the disk: good up to `end` */
    JOURNAL_BROKEN, /* what had been synced is damaged: `why` and `end` say where */
};
struct journal_scan {
    enum journal_state state;
    uint64_t end, seq; /* behind the last good record; its number */
    uint32_t sum;      /* and its sum */
    uint64_t synced;   /* the largest that a good record tells */
    char why[160];
};
struct journal_record {
    uint16_t type;
    uint64_t seq;
    uint32_t sum;
    const uint8_t *payload; /* valid during the call */
    size_t n;
};
/* Calls on_record for every good record in order, until it answers < 0, which is then the answer.
 * The state of the file is no error: BC_ENOTFOUND, BC_EIO, BC_ENOMEM, BC_EVERSION are. */
int journal_read(const struct disk_io *io, const char *path, struct journal_scan *ret,
                 int (*on_record)(void *arg, const struct journal_record *r, struct err *e),
                 void *arg, struct err *e);
#endif
