/* keeper.h: a durable session's journal while the session lives, and the thread that writes it.
 *
 *   engine:  a step's frames and reports --item--> [queue] --> keeper thread: write --> outbox --> loop
 *                                                                  |            '-- refused --> engine
 *                                                                  '-- at most KEEPER_SYNC_US later: sync
 *
 * So nothing that a client sees of a durable session is unknown to the next daemon: its reports wait
 * for their frames to be written, its openings, saves and ends of life for the disk. Reports of other
 * sessions do not pass here.
 *
 * A write or sync that fails, and cannot be healed by a new file (journal.h), refuses the item: what
 * would have been an acknowledgement becomes an error, text is withheld, an END says why, and so it
 * stays until the engine has ended the request that was under way. The frames are owed: the next item
 * tries again. */
#ifndef BACKCAST_ENGINE_KEEPER_H
#define BACKCAST_ENGINE_KEEPER_H
#include "engine.h"
#include "journal.h"

#define KEEPER_MAGIC 0x6b656570u
#define KEEPER_FLIGHT_MAX (4u << 20) /* bytes not written yet: then the session is parked */
#define KEEPER_SYNC_US 30000u
#define KEEPER_LEFTOVERS_MAX 256

struct keeper {
    unsigned magic;
    struct keeper *next; /* engine.keeping.leaving: its session is gone */
    uint64_t session;
    char *folder;            /* STATE_DIR/durable/KEY */
    _Atomic uint64_t flight; /* bytes handed over and not written */
    /* the engine's */
    uint64_t seq;            /* records that the session's stream has, with all reports so far */
    struct bytes_out frames; /* of this step */
    size_t seq_at;           /* in frames: where the last one tells seq; SIZE_MAX: there is none */
    struct report *made, **made_tail;
    uint64_t made_bytes;
    bool create, remove, sync; /* what the next item does */
    bool reset;                /* the engine has dealt with a refusal: try again */
    bool despite;              /* reports made now go out even so */
    uint64_t items, accepted;  /* made; the one that tells of the last request's acceptance */
    uint64_t rows; /* that went into the cache since the last snapshot: a start does them again */
    /* the thread's */
    struct journal *journal;
    bool failing;
    uint64_t last; /* number of the last item */
    bool dead;     /* the last ACCEPTED was refused: this request, until a reset */
    uint32_t dead_request;
    uint64_t dead_conn;
    uint64_t dirty_us; /* 0: all is synced */
    struct keeper *next_dirty;
};

struct keep_item {
    struct keep_item *next;
    struct keeper *k;
    uint64_t session, number;
    bool create, remove, sync, reset, last; /* last: the keeper ends with it */
    struct bytes_out frames;
    struct report *reports;
    uint64_t bytes;
    /* refused: what went with it */
    struct err err;
    uint32_t lost_reports; /* of the stream */
    uint64_t lost_records;
    bool refused; /* an ACCEPTED among them became an error */
};

struct keeping {
    struct keeper *leaving;                /* engine thread */
    uint32_t n;                            /* durable sessions */
    struct keeper *dirty;                  /* keeper thread */
    char *leftovers[KEEPER_LEFTOVERS_MAX]; /* keeper thread: folders that could not be removed */
    uint32_t n_leftovers;
    bool telling; /* reports of the past: they pass the keeper by */
    /* under engine.lock */
    struct keep_item *queue, **queue_tail, *back, **back_tail;
    bool stopping, drained;
};
#endif
