/* ledger.c: see ledger.h. Numbers are relaxed atomics: each is exact, and a reader that wants them to
 * agree with each other reads when nothing is under way (tests) or lives with an instant's
 * difference (listings). The list of users is under a lock; it is walked when somebody comes or goes.
 */
#include "ledger.h"
#include <pthread.h>
#include <stdlib.h>

#define LEDGER_MAGIC 0x6c656467u
#define OWNER_MAGIC 0x6f776e72u

struct uid_owner {
    struct ledger_owner owner; /* first: ledger_uid_put takes its address */
    struct uid_owner *next;
    uint32_t uid, holders;
};

struct ledger {
    unsigned magic;
    struct ledger_owner daemon;
    pthread_mutex_t lock;
    struct uid_owner *uids;
};

static const struct {
    const char *name, *text;
} kinds[N_LEDGER] = {
#define LEDGER(name, text) {#name, text},
#include "ledger.tbl"
#undef LEDGER
};

const char *ledger_name(unsigned kind)
{
    return kind < N_LEDGER ? kinds[kind].name : NULL;
}

const char *ledger_text(unsigned kind)
{
    return kind < N_LEDGER ? kinds[kind].text : NULL;
}

/* ---- owners ---- */

void ledger_owner_open(struct ledger_owner *o, enum ledger_rank rank, struct ledger_owner *up)
{
    if (up != NULL) {
        MAGIC_OK(up, OWNER_MAGIC);
        atomic_fetch_add_explicit(&up->below, 1, memory_order_relaxed);
    }
    o->magic = OWNER_MAGIC;
    o->rank = rank;
    o->up = up;
    atomic_init(&o->below, 0);
    for (unsigned i = 0; i < N_LEDGER; i++) {
        atomic_init(&o->own[i], 0);
        atomic_init(&o->all[i], 0);
    }
}

void ledger_owner_close(struct ledger_owner *o)
{
    MAGIC_OK(o, OWNER_MAGIC);
    bc_assert(atomic_load(&o->below) == 0);
    for (unsigned i = 0; i < N_LEDGER; i++)
        bc_assert(atomic_load(&o->own[i]) == 0 && atomic_load(&o->all[i]) == 0);
    if (o->up != NULL)
        atomic_fetch_sub_explicit(&o->up->below, 1, memory_order_relaxed);
    o->magic = 0;
}

int ledger_open(struct ledger **ret, struct err *e)
{
    struct ledger *l = calloc(1, sizeof *l);
    if (l == NULL)
        return err_nomem(e, sizeof *l);
    l->magic = LEDGER_MAGIC;
    pthread_mutex_init(&l->lock, NULL);
    ledger_owner_open(&l->daemon, LEDGER_DAEMON, NULL);
    *ret = l;
    return BC_OK;
}

void ledger_close(struct ledger **pl)
{
    struct ledger *l = *pl;
    if (l == NULL)
        return;
    MAGIC_OK(l, LEDGER_MAGIC);
    bc_assert(l->uids == NULL);
    ledger_owner_close(&l->daemon);
    pthread_mutex_destroy(&l->lock);
    l->magic = 0;
    free(l);
    *pl = NULL;
}

struct ledger_owner *ledger_daemon(struct ledger *l)
{
    MAGIC_OK(l, LEDGER_MAGIC);
    return &l->daemon;
}

struct ledger_owner *ledger_uid_get(struct ledger *l, uint32_t uid)
{
    MAGIC_OK(l, LEDGER_MAGIC);
    pthread_mutex_lock(&l->lock);
    struct uid_owner *u = l->uids;
    while (u != NULL && u->uid != uid)
        u = u->next;
    if (u == NULL && (u = calloc(1, sizeof *u)) != NULL) {
        ledger_owner_open(&u->owner, LEDGER_UID, &l->daemon);
        u->uid = uid;
        u->next = l->uids;
        l->uids = u;
    }
    if (u != NULL)
        u->holders++;
    pthread_mutex_unlock(&l->lock);
    return u != NULL ? &u->owner : NULL;
}

void ledger_uid_put(struct ledger *l, struct ledger_owner **po)
{
    MAGIC_OK(l, LEDGER_MAGIC);
    struct uid_owner *u = (struct uid_owner *)*po;
    if (u == NULL)
        return;
    MAGIC_OK(&u->owner, OWNER_MAGIC);
    pthread_mutex_lock(&l->lock);
    bc_assert(u->holders > 0);
    if (--u->holders == 0) {
        struct uid_owner **at = &l->uids;
        while (*at != u)
            at = &(*at)->next;
        *at = u->next;
        ledger_owner_close(&u->owner);
        free(u);
    }
    pthread_mutex_unlock(&l->lock);
    *po = NULL;
}

/* ---- charges ---- */

void ledger_charge(struct ledger_owner *o, enum ledger_kind kind, uint64_t bytes)
{
    if (o == NULL || bytes == 0)
        return;
    MAGIC_OK(o, OWNER_MAGIC);
    atomic_fetch_add_explicit(&o->own[kind], bytes, memory_order_relaxed);
    for (; o != NULL; o = o->up)
        atomic_fetch_add_explicit(&o->all[kind], bytes, memory_order_relaxed);
}

void ledger_credit(struct ledger_owner *o, enum ledger_kind kind, uint64_t bytes)
{
    if (o == NULL || bytes == 0)
        return;
    MAGIC_OK(o, OWNER_MAGIC);
    uint64_t had = atomic_fetch_sub_explicit(&o->own[kind], bytes, memory_order_relaxed);
    bc_assert(had >= bytes);
    for (; o != NULL; o = o->up)
        atomic_fetch_sub_explicit(&o->all[kind], bytes, memory_order_relaxed);
}

void ledger_set(struct ledger_owner *o, enum ledger_kind kind, uint64_t bytes)
{
    if (o == NULL)
        return;
    uint64_t had = ledger_own(o, kind);
    if (bytes >= had)
        ledger_charge(o, kind, bytes - had);
    else
        ledger_credit(o, kind, had - bytes);
}

uint64_t ledger_own(const struct ledger_owner *o, enum ledger_kind kind)
{
    return atomic_load_explicit(&o->own[kind], memory_order_relaxed);
}

uint64_t ledger_all(const struct ledger_owner *o, enum ledger_kind kind)
{
    return atomic_load_explicit(&o->all[kind], memory_order_relaxed);
}

uint64_t ledger_sum(const struct ledger_owner *o)
{
    uint64_t sum = 0;
    for (unsigned i = 0; i < N_LEDGER; i++)
        sum += ledger_all(o, (enum ledger_kind)i);
    return sum;
}
