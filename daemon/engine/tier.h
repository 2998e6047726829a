/* tier.h: where a session's cache is, and its way between pages, host memory and files.
 *
 *            idle too long, or pages are wanted              its last block is under its sum
 *    HERE -------------------------------------> LEAVING ------------------------------------> AWAY
 *      ^ ^        a command wants it: given up      |                                           |
 *      | '------------------------------------------'                    a command wants it     |
 *      '------------------------------- COMING <------------------------------------------------'
 *                 every sum was right             bytes are checked, then go into fresh pages
 *
 * Two threads share the work. The engine's copies blocks between pages and memory, a few a step, so
 * that neighbours go on; the disk thread makes sums, writes and reads. They hand tasks to and fro;
 * whoever holds a task holds its buffer.
 *
 *    engine:  copy block 3 | copy block 4 |  (two are under way: wait)  | copy block 5 ...
 *    disk:         sum, write block 3     | sum, write block 4          | ...
 *
 * A save is the same way out without leaving; a restore the way back into a session that is new. */
#ifndef BACKCAST_ENGINE_TIER_H
#define BACKCAST_ENGINE_TIER_H
#include "disk_io.h"
#include "engine.h"
#include "spill.h"

#define STATE_DIR_MAX 3800 /* what is below it must fit in DISK_PATH_MAX */
#define TRANSFER_MAGIC 0x7472616eu
#define TRANSFER_TASKS 4           /* blocks of one transfer that are under way */
#define TIER_STEP_BYTES (2u << 20) /* copied in a step, all transfers together */

struct transfer;

enum place { PLACE_HERE, PLACE_LEAVING, PLACE_AWAY, PLACE_COMING };

enum disk_what {
    DISK_CREATE, /* a place for the bytes */
    DISK_PUT,    /* a block: sum, write */
    DISK_FINISH, /* the head; a named file gets its name */
    DISK_OPEN,   /* the head, checked */
    DISK_GET,    /* a block: read, check */
    DISK_DROP,   /* an image nobody wants; not answered */
    DISK_LIST,   /* saved.c: files of a folder */
    DISK_UNLINK, /* saved.c: a file goes */
};
struct disk_task {
    struct disk_task *next;
    enum disk_what what;
    struct transfer *t; /* NULL: DROP, LIST, UNLINK */
    struct image *image;
    uint32_t block;
    uint8_t *bytes; /* the block's; set until the engine is done with it */
    bool out;       /* the disk thread has it */
    int rc;
    struct err err;
};

/* Where bytes lie. Its tasks run in order, so it may be dropped while some are out. */
enum image_kind { IMAGE_HOST, IMAGE_UNNAMED, IMAGE_NAMED };
struct image {
    enum image_kind kind;
    uint64_t bytes;
    uint32_t rows;
    uint8_t *flat; /* HOST: mmapped */
    int fd;        /* else; -1: not open */
    char *path;    /* NAMED */
    bool begun;    /* NAMED: there is a temporary file */
    struct disk_task drop;
};

enum transfer_phase {
    TRANSFER_BEGIN,
    TRANSFER_MODEL,
    TRANSFER_ROOM,
    TRANSFER_BLOCKS,
    TRANSFER_FINISH
};
enum transfer_why { WHY_TIER, WHY_SAVE, WHY_RESTORE };
struct transfer {
    unsigned magic;
    struct transfer *next; /* engine.tier.transfers */
    bool out;              /* from pages; false: to pages */
    enum transfer_why why;
    enum transfer_phase phase;
    struct session *s;     /* NULL: not made yet, not needed any more, or given up */
    struct command *asker; /* SAVE, RESTORE: who waits for the answer; NULL: it waits for a model */
    bool given_up;         /* goes when its tasks are back */
    bool still;            /* the session's pages must stay as they are */
    struct image *image;   /* TIER: the session's, else its own */
    struct spill *sp;
    uint32_t n_sent, n_back, n_out; /* blocks on their way, blocks done, tasks out */
    struct disk_task task[TRANSFER_TASKS];
    uint8_t *buffer; /* [TRANSFER_TASKS] blocks; host images need none */
    size_t block_bytes, booked;
    struct err err; /* code < 0: it has failed */
};

/* A session's part. */
struct lodging {
    enum place place;
    struct transfer *transfer; /* under way: leaving, coming, or copied for a save */
    struct image *image;       /* LEAVING, AWAY, COMING; AWAY and NULL: put off (replay.c) */
    struct command *waiting, **waiting_tail; /* for the cache, oldest first */
};

/* The engine's part. */
struct tiers {
    struct transfer *transfers;
    struct saved_task *saved;                /* under way: saved.c */
    uint64_t host_bytes, disk_bytes;         /* of images */
    uint64_t step_left;                      /* bytes that this step may still copy */
    uint64_t next_us, retry_us;              /* when to look for idle sessions; not before */
    struct command *starved, **starved_tail; /* wait for pages that are about to come free */
    bool freed;                              /* some have come free */
    uint64_t spills, returns, saves, restores;
    /* under engine.lock */
    struct disk_task *queue, **queue_tail, *done, **done_tail;
};
#endif
