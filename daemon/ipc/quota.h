/* quota.h: what one user may take from the daemon: one account a uid, one tier.
 *
 * Every charge is given back by whoever took it: a connection, a session, a request, queued bytes,
 * ring memory. The sum of all charges is 0 when everybody has left (tests/unit/test_quota.c).
 * Owner: the loop's thread. */
#ifndef BACKCAST_QUOTA_H
#define BACKCAST_QUOTA_H
#include "ipc.h"
#include "ledger.h"
#include "statpage.h"

#define ACCOUNT_MAGIC 0x61636374u
#define ACCOUNTS_MAX 1024

enum quota_kind {
    QUOTA_CONNECTIONS,
    QUOTA_SESSIONS,
    QUOTA_REQUESTS,
    QUOTA_QUEUED, /* bytes of prompts and replies in the daemon */
    QUOTA_RINGS,  /* bytes of ring memory and of kept streams */
    N_QUOTAS
};

struct account {
    unsigned magic;
    uint32_t uid;
    struct account *next;
    uint64_t used[N_QUOTAS];
    uint64_t frame_credit;      /* millionths of a frame */
    uint64_t frame_us;          /* when it was last filled */
    uint64_t stats[N_STATS];    /* the counters that have a share per user */
    struct stats_out *page;     /* statsout.c; NULL: nobody asked yet */
    struct ledger_owner *owner; /* its bytes are booked here as well; NULL: nowhere */
};

struct accounts {
    struct account *first;
    size_t n;
    struct ledger *ledger; /* NULL: none */
};

/* The account of uid, made if need be; NULL: out of memory, or ACCOUNTS_MAX users are here. */
struct account *account_get(struct accounts *as, uint32_t uid);
void accounts_free(struct accounts *as); /* pages must be gone */

/* BC_EBUSY with the numbers, the field named after the limit. */
int quota_take(struct account *a, const struct server_limits *l, enum quota_kind kind, uint64_t n,
               struct err *e);
/* The same where nothing may be refused: an answer to a request that was not. */
void quota_add(struct account *a, enum quota_kind kind, uint64_t n);
void quota_give(struct account *a, enum quota_kind kind, uint64_t n);
/* One frame of the second's ration. False: come back later. */
bool quota_frame(struct account *a, const struct server_limits *l, uint64_t now_us);
#endif
