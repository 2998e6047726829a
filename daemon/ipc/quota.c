/* quota.c: see quota.h. The frame ration is a bucket of one second's frames that fills steadily. */
#include "quota.h"
#include <stdlib.h>

static const char *const kind_names[N_QUOTAS] = {
    [QUOTA_CONNECTIONS] = "connections", [QUOTA_SESSIONS] = "sessions",
    [QUOTA_REQUESTS] = "requests",       [QUOTA_QUEUED] = "queued_bytes",
    [QUOTA_RINGS] = "ring_bytes",
};

static uint64_t limit_of(const struct server_limits *l, enum quota_kind kind)
{
    switch (kind) {
    case QUOTA_CONNECTIONS:
        return l->connections;
    case QUOTA_SESSIONS:
        return l->sessions;
    case QUOTA_REQUESTS:
        return l->requests;
    case QUOTA_QUEUED:
        return l->queued_bytes;
    default:
        return l->ring_bytes;
    }
}

static bool account_idle(const struct account *a)
{
    for (unsigned i = 0; i < N_QUOTAS; i++)
        if (a->used[i] != 0)
            return false;
    return a->page == NULL;
}

static void account_free(struct accounts *as, struct account *a)
{
    if (a->owner != NULL)
        ledger_uid_put(as->ledger, &a->owner);
    free(a);
}

struct account *account_get(struct accounts *as, uint32_t uid)
{
    struct account **idle = NULL;
    for (struct account **at = &as->first; *at != NULL; at = &(*at)->next) {
        if ((*at)->uid == uid)
            return *at;
        if (account_idle(*at))
            idle = at;
    }
    if (as->n == ACCOUNTS_MAX) {
        if (idle == NULL)
            return NULL;
        struct account *gone = *idle; /* a user who left makes room for one who came */
        *idle = gone->next;
        account_free(as, gone);
        as->n--;
    }
    struct account *a = calloc(1, sizeof *a);
    if (a == NULL)
        return NULL;
    if (as->ledger != NULL && (a->owner = ledger_uid_get(as->ledger, uid)) == NULL) {
        free(a);
        return NULL;
    }
    a->magic = ACCOUNT_MAGIC;
    a->uid = uid;
    a->next = as->first;
    as->first = a;
    as->n++;
    return a;
}

void accounts_free(struct accounts *as)
{
    while (as->first != NULL) {
        struct account *a = as->first;
        MAGIC_OK(a, ACCOUNT_MAGIC);
        bc_assert(account_idle(a));
        as->first = a->next;
        account_free(as, a);
    }
    as->n = 0;
}

int quota_take(struct account *a, const struct server_limits *l, enum quota_kind kind, uint64_t n,
               struct err *e)
{
    MAGIC_OK(a, ACCOUNT_MAGIC);
    uint64_t max = limit_of(l, kind), used = a->used[kind];
    if (used > max || n > max - used)
        return err_amount(e, BC_EBUSY, kind_names[kind], n, used > max ? 0 : max - used,
                          "uid %u has %llu of %llu %s: no more than that", a->uid,
                          (unsigned long long)used, (unsigned long long)max, kind_names[kind]);
    quota_add(a, kind, n);
    return BC_OK;
}

/* Kinds that are bytes have a place in the ledger. */
static bool ledger_kind_of(enum quota_kind kind, enum ledger_kind *ret)
{
    *ret = kind == QUOTA_RINGS ? LEDGER_rings : LEDGER_queued;
    return kind == QUOTA_RINGS || kind == QUOTA_QUEUED;
}

void quota_add(struct account *a, enum quota_kind kind, uint64_t n)
{
    MAGIC_OK(a, ACCOUNT_MAGIC);
    enum ledger_kind book;
    if (ledger_kind_of(kind, &book))
        ledger_charge(a->owner, book, n);
    a->used[kind] += n;
}

void quota_give(struct account *a, enum quota_kind kind, uint64_t n)
{
    MAGIC_OK(a, ACCOUNT_MAGIC);
    enum ledger_kind book;
    bc_assert(a->used[kind] >= n);
    if (ledger_kind_of(kind, &book))
        ledger_credit(a->owner, book, n);
    a->used[kind] -= n;
}

bool quota_frame(struct account *a, const struct server_limits *l, uint64_t now_us)
{
    const uint64_t one = 1000000, full = l->frames_per_second * one;
    uint64_t passed = BC_MIN(now_us - a->frame_us, one);
    a->frame_credit =
        a->frame_us == 0 ? full : BC_MIN(full, a->frame_credit + passed * l->frames_per_second);
    a->frame_us = now_us;
    if (a->frame_credit < one)
        return false;
    a->frame_credit -= one;
    return true;
}
