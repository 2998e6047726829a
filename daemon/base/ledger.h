/* ledger.h: who holds which bytes. Every allocation of size is booked where it is made, to an owner
 * and a kind (ledger.tbl), and taken off where it is freed.
 *
 *     daemon --+-- model   weights, scratch, text
 *              +-- uid ----+-- session   kv, state, refresh, prompts
 *              |           '-- (itself)  shared pages, rings, queued
 *              '-- (itself) reports, border
 *
 * An owner knows two numbers of each kind: its own, and its own with everybody's below it. Both move
 * in one call, so the daemon's total is always the sum of all charges. Charges are atomic: the loop,
 * the engine and the loader book into the same owners. An owner that goes must have given back
 * everything, which is asserted: a leak is found when a session closes, not when memory is gone.
 *
 * Nothing here allocates for others or refuses anything: budgets are the engine's (pressure.c).
 */
#ifndef BACKCAST_LEDGER_H
#define BACKCAST_LEDGER_H
#include <stdatomic.h>
#include "base.h"

enum ledger_kind {
#define LEDGER(name, text) LEDGER_##name,
#include "ledger.tbl"
#undef LEDGER
    N_LEDGER
};
const char *ledger_name(unsigned kind); /* "kv"; NULL past the end */
const char *ledger_text(unsigned kind);

enum ledger_rank { LEDGER_DAEMON, LEDGER_MODEL, LEDGER_UID, LEDGER_SESSION };

/* Lies inside the object that it books for. */
struct ledger_owner {
    unsigned magic;
    enum ledger_rank rank;
    struct ledger_owner *up; /* NULL: the daemon */
    _Atomic uint32_t below;  /* owners whose `up` this is */
    _Atomic uint64_t own[N_LEDGER], all[N_LEDGER];
};

struct ledger;
int ledger_open(struct ledger **ret, struct err *e);
void ledger_close(struct ledger **l); /* every owner is gone, every charge is back: asserted */
struct ledger_owner *ledger_daemon(struct ledger *l);

void ledger_owner_open(struct ledger_owner *o, enum ledger_rank rank, struct ledger_owner *up);
void ledger_owner_close(struct ledger_owner *o); /* asserts that nothing is booked */
/* The owner of a user, made when it is first asked for and gone with the last `put`. NULL: no
 * memory. Any thread. */
struct ledger_owner *ledger_uid_get(struct ledger *l, uint32_t uid);
void ledger_uid_put(struct ledger *l, struct ledger_owner **o);

/* o NULL: not booked (objects that tests use alone). More than was charged is never taken off:
 * asserted. */
void ledger_charge(struct ledger_owner *o, enum ledger_kind kind, uint64_t bytes);
void ledger_credit(struct ledger_owner *o, enum ledger_kind kind, uint64_t bytes);

/* Books the difference to what o has booked of this kind itself: for a kind that one place keeps. */
void ledger_set(struct ledger_owner *o, enum ledger_kind kind, uint64_t bytes);

uint64_t ledger_own(const struct ledger_owner *o, enum ledger_kind kind);
uint64_t ledger_all(const struct ledger_owner *o, enum ledger_kind kind);
uint64_t ledger_sum(const struct ledger_owner *o); /* all kinds, with everybody below */
#endif
