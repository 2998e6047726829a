/* statpage.h: the stats page: counters and sessions in a sealed memfd that clients map read-only,
 * so that watching the daemon costs it nothing. Comes with HelloReply (FEATURE_STATS_PAGE).
 *
 *   0x0000   head     magic abi sizes (constant) | uid | sequence | count
 *   0x0080   counters [n_counters] u64, in the order of stats.tbl
 *   0x1000   entries  [entries_max] of entry_bytes, the first n_entries are valid
 *
 * One page a user: its own sessions and, beside the daemon's totals, its own share; administrators
 * get a page of all sessions. A page is written by the daemon alone, a few times a second while
 * something happens.
 *
 * Sequence lock: `sequence` is odd while the page is being written. A reader loads it (acquire),
 * copies with acquire word loads, loads it again: equal and even = a consistent copy. statpage_read
 * does that and gives up after STATPAGE_TRIES.
 *
 * Page layouts grow only at the end of each part, and the head says how big the parts are, so an
 * old reader reads a newer page.
 */
#ifndef BACKCAST_STATPAGE_H
#define BACKCAST_STATPAGE_H
#include "wire.h"
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define STATPAGE_MAGIC 0x31746174536b6342ull /* "BckStat1" */
#define STATPAGE_ABI 1u
#define STATPAGE_COUNTERS_OFFSET 128u
#define STATPAGE_ENTRIES_OFFSET 4096u
#define STATPAGE_TRIES 64
#define STATPAGE_ENTRIES_MAX 4096u

enum stat_kind { STAT_COUNTER, STAT_GAUGE };
enum stat_unit { STAT_COUNT, STAT_BYTES, STAT_MICROS, STAT_TOKENS };
enum stat_id {
#define STAT(name, kind, unit, text) STAT_##name,
#include "stats.tbl"
#undef STAT
    N_STATS
};
_Static_assert(STATPAGE_COUNTERS_OFFSET + 8 * N_STATS <= STATPAGE_ENTRIES_OFFSET, "counters fit");

struct stat_info {
    const char *name, *text;
    enum stat_kind kind;
    enum stat_unit unit;
    bool per_user; /* a user's page has that user's share */
};
const struct stat_info *stat_info(unsigned id); /* NULL past the end */

/* One session. Names are NUL-terminated. */
enum stat_entry_flag {
    STAT_ENTRY_MEMORY = 1, /* where its cache lies: one of the three */
    STAT_ENTRY_HOST = 2,
    STAT_ENTRY_DISK = 4,
    STAT_ENTRY_DURABLE = 8,
};
struct stat_entry {
    uint64_t session;
    uint32_t uid;
    int32_t attached; /* 1: a client holds it */
    uint32_t tokens, budget_tokens, keep_tokens, frozen_tokens, recent_tokens;
    uint32_t flags; /* enum stat_entry_flag; 0: an older daemon, which does not tell */
    uint64_t bytes_live, bytes_held, budget_bytes;
    uint64_t prunes, tokens_dropped, tokens_in, tokens_out, prune_micros;
    uint64_t last_use_micros; /* CLOCK_MONOTONIC of the last use */
    char state[16];
    char name[72];
    char model[96];
    char policy[32];
    char client[64];
    char kv_type[8];
    uint64_t bytes_shared, bytes_other, bytes_guaranteed; /* of bytes_held; beside; at least */
    uint64_t rows_moved; /* K and V copied to give pages back; a prune copies none */
};
_Static_assert(sizeof(struct stat_entry) == 432 && sizeof(struct stat_entry) % 8 == 0,
               "wire layout");

struct statpage {
    _Atomic uint64_t magic;
    _Atomic uint32_t abi, n_counters;
    _Atomic uint32_t entry_bytes, entries_max;
    _Atomic uint32_t uid; /* whose; UINT32_MAX: everybody's */
    _Atomic uint32_t zero;
    _Alignas(64) _Atomic uint64_t sequence;
    _Atomic uint64_t now_micros; /* CLOCK_MONOTONIC of this state */
    _Atomic uint64_t n_entries;
    _Alignas(64) _Atomic uint64_t words[];
};
_Static_assert(offsetof(struct statpage, sequence) == 0x40 &&
                   offsetof(struct statpage, words) == STATPAGE_COUNTERS_OFFSET,
               "wire layout");

size_t statpage_bytes(uint32_t entries_max); /* of the memfd, a multiple of 4096 */
void statpage_init(struct statpage *p, uint32_t uid, uint32_t entries_max);
/* Writer: entries beyond entries_max are left out. */
void statpage_write(struct statpage *p, uint64_t now_micros, const uint64_t counters[N_STATS],
                    const struct stat_entry *entries, uint32_t n_entries);

struct statpage_copy {
    uint64_t now_micros;
    uint32_t uid;
    uint64_t counters[N_STATS]; /* 0 for those that an older daemon does not have */
    uint32_t n_entries;         /* valid entries on the page: may exceed what was copied */
};
/* Reader: checks the head against the mapped bytes, then copies counters and up to max entries.
 * WIRE_EPROTOCOL: not such a page; WIRE_EBUSY: the writer was at it all the time (or died). */
int statpage_read(const struct statpage *p, size_t mapped_bytes, struct statpage_copy *ret,
                  struct stat_entry *entries, uint32_t max, const char **why);
#endif
