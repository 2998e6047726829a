/* statsout.c: the stats pages: one a user, one of everybody for administrators.
 *
 * The loop's own counters are at hand; what the engine knows of sessions comes with a STAT report
 * that the loop asks for itself (connection 0), a few times a second while steps go on and once a
 * second otherwise, and only while somebody is connected. Pages are made when first asked for. */
#include "backcast.pb-c.h"
#include "clock.h"
#include "conn.h"
#include "shm.h"
#include "statpage.h"
#include <fcntl.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#define STATS_BUSY_US 250000u
#define STATS_IDLE_US 1000000u

struct stats_out {
    struct statpage *page;
    size_t bytes;
    uint32_t entries_max;
    int fd;
    struct ledger_owner *owner; /* who pays */
};

static int page_new(uint32_t uid, uint32_t entries_max, struct stats_out **ret, struct err *e)
{
    struct stats_out *o = calloc(1, sizeof *o);
    if (o == NULL)
        return err_nomem(e, sizeof *o);
    void *map;
    o->entries_max = entries_max;
    o->bytes = statpage_bytes(entries_max);
    int rc = shm_page(o->bytes, &map, &o->fd, e);
    if (rc < 0) {
        free(o);
        return rc;
    }
    o->page = map;
    statpage_init(o->page, uid, entries_max);
    *ret = o;
    return BC_OK;
}

static void page_close(struct stats_out **po)
{
    if (*po == NULL)
        return;
    ledger_credit((*po)->owner, LEDGER_border, (*po)->bytes);
    munmap((*po)->page, (*po)->bytes);
    close((*po)->fd);
    free(*po);
    *po = NULL;
}

int statsout_fd(struct server *s, struct account *a, bool admin, int *ret_fd, uint64_t *ret_bytes,
                struct err *e)
{
    struct stats_out **at = admin ? &s->page : &a->page;
    if (*at == NULL) {
        uint64_t max = admin ? STATPAGE_ENTRIES_MAX : s->opt.limits.sessions;
        int rc = page_new(admin ? UINT32_MAX : a->uid,
                          (uint32_t)BC_MIN(max, (uint64_t)STATPAGE_ENTRIES_MAX), at, e);
        if (rc < 0)
            return rc;
        (*at)->owner = admin ? server_owner(s) : a->owner;
        ledger_charge((*at)->owner, LEDGER_border, (*at)->bytes);
    }
    int fd = fcntl((*at)->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return err_set(e, BC_EBUSY, "", "dup: %s", strerror(errno));
    s->stats_us = 0; /* the newcomer gets fresh numbers with the next turn */
    *ret_fd = fd;
    *ret_bytes = (*at)->bytes;
    return BC_OK;
}

/* ---- asking */

static bool any_page(const struct server *s)
{
    for (const struct account *a = s->accounts.first; a != NULL; a = a->next)
        if (a->page != NULL)
            return true;
    return s->page != NULL;
}

void statsout_sweep(struct server *s, uint64_t now_us)
{
    if (s->en == NULL || s->stats_asked || s->draining || s->conns.n == 0 || !any_page(s))
        return;
    struct engine_counts n;
    engine_totals(s->en, &n);
    uint64_t passed = now_us - s->stats_us;
    if (passed < (n.steps != s->stats_steps ? STATS_BUSY_US : STATS_IDLE_US))
        return;
    struct command *cmd = command_new(CMD_STAT, 0, 0);
    struct err e;
    if (cmd == NULL)
        return;
    cmd->admin = true;
    if (engine_post(s->en, &cmd, &e) < 0) {
        command_free(&cmd);
        return;
    }
    s->stats_asked = true;
    s->stats_us = now_us;
    s->stats_steps = n.steps;
}

/* ---- writing */

static void text_set(char *to, size_t size, const char *from)
{
    size_t n = BC_MIN(strlen(from), size - 1);
    memcpy(to, from, n);
    memset(to + n, 0, size - n);
}

static uint32_t entry_flags(const struct report_session *i)
{
    uint32_t tier = strcmp(i->tier, "memory") == 0 ? STAT_ENTRY_MEMORY
                    : strcmp(i->tier, "host") == 0 ? STAT_ENTRY_HOST
                                                   : STAT_ENTRY_DISK;
    return tier | (i->durable ? STAT_ENTRY_DURABLE : 0);
}

static void entry_fill(struct stat_entry *t, const struct report_session *i)
{
    *t = (struct stat_entry){.session = i->id,
                             .uid = i->uid,
                             .attached = i->attached,
                             .tokens = i->tokens,
                             .budget_tokens = i->budget,
                             .keep_tokens = i->keep,
                             .frozen_tokens = i->frozen,
                             .recent_tokens = i->recent,
                             .flags = entry_flags(i),
                             .bytes_live = i->live,
                             .bytes_held = i->held,
                             .bytes_shared = i->shared,
                             .bytes_other = i->other,
                             .bytes_guaranteed = i->guaranteed,
                             .budget_bytes = i->budget_bytes,
                             .prunes = i->prunes,
                             .tokens_dropped = i->dropped,
                             .tokens_in = i->tokens_in,
                             .tokens_out = i->tokens_out,
                             .prune_micros = i->prune_micros,
                             .rows_moved = i->rows_moved,
                             .last_use_micros = i->last_use_us};
    text_set(t->state, sizeof t->state, i->state);
    text_set(t->name, sizeof t->name, i->name);
    text_set(t->model, sizeof t->model, i->model);
    text_set(t->policy, sizeof t->policy, i->policy);
    text_set(t->client, sizeof t->client, i->client);
    text_set(t->kv_type, sizeof t->kv_type, i->kv_type);
}

uint64_t statsout_ledger(const struct server *s, const struct account *a, uint64_t ret[N_LEDGER])
{
    const struct ledger_owner *all = server_owner(s), *mine = a != NULL ? a->owner : all;
    uint64_t sum = 0;
    for (unsigned i = 0; i < N_LEDGER; i++) {
        bool common = i == LEDGER_weights || i == LEDGER_scratch || i == LEDGER_text;
        const struct ledger_owner *o = common ? all : mine;
        ret[i] = o != NULL ? ledger_all(o, (enum ledger_kind)i) : 0;
        sum += ret[i];
    }
    return sum;
}

uint64_t statsout_resident(void)
{
    unsigned long long size = 0, pages = 0;
    FILE *f = fopen("/proc/self/statm", "re");
    if (f == NULL)
        return 0;
    if (fscanf(f, "%llu %llu", &size, &pages) != 2)
        pages = 0;
    fclose(f);
    return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

static void ledger_fill(const struct server *s, const struct account *a, uint64_t n[N_STATS])
{
    uint64_t b[N_LEDGER];
    n[STAT_booked] = statsout_ledger(s, a, b);
    n[STAT_kv_held] = b[LEDGER_kv] + b[LEDGER_shared];
    n[STAT_kv_shared] = b[LEDGER_shared];
    n[STAT_weights] = b[LEDGER_weights];
    n[STAT_scratch] = b[LEDGER_scratch];
    n[STAT_text] = b[LEDGER_text];
    n[STAT_state] = b[LEDGER_state];
    n[STAT_refresh] = b[LEDGER_refresh];
    n[STAT_prompts] = b[LEDGER_prompts];
    n[STAT_reports] = b[LEDGER_reports];
    n[STAT_rings] = b[LEDGER_rings];
    n[STAT_queued] = b[LEDGER_queued];
    n[STAT_border] = b[LEDGER_border];
    n[STAT_journal] = b[LEDGER_journal];
    n[STAT_host] = b[LEDGER_host];
}

static void charges_add(uint64_t n[N_STATS], const struct account *a)
{
    n[STAT_connections] += a->used[QUOTA_CONNECTIONS];
    n[STAT_sessions] += a->used[QUOTA_SESSIONS];
    n[STAT_requests] += a->used[QUOTA_REQUESTS];
}

/* a NULL: everybody. */
static void page_write(struct server *s, struct stats_out *o, const struct account *a,
                       const struct report *r, struct stat_entry *entries)
{
    uint64_t n[N_STATS], now = clock_us(), resident = statsout_resident();
    uint32_t k = 0;
    for (unsigned i = 0; i < N_STATS; i++)
        n[i] = a != NULL && stat_info(i)->per_user ? a->stats[i] : s->totals[i];
    for (const struct account *each = s->accounts.first; each != NULL; each = each->next)
        if (a == NULL || a == each)
            charges_add(n, each);
    for (uint32_t i = 0; i < r->u.stat.n_sessions; i++) {
        const struct report_session *info = &r->u.stat.sessions[i];
        if (a != NULL && info->uid != a->uid)
            continue;
        n[STAT_kv_live] += info->live;
        if (k < o->entries_max)
            entry_fill(&entries[k++], info);
    }
    n[STAT_uptime_micros] = now - s->start_us;
    n[STAT_kv_memory] = r->u.stat.kv_memory;
    ledger_fill(s, a, n);
    n[STAT_resident] = resident;
    n[STAT_steps] = r->u.stat.steps;
    statpage_write(o->page, now, n, entries, k);
}

void statsout_publish(struct server *s, const struct report *r)
{
    s->stats_asked = false;
    uint32_t n = BC_MIN(r->u.stat.n_sessions, STATPAGE_ENTRIES_MAX);
    struct stat_entry *entries = malloc((n + 1) * sizeof *entries);
    if (entries == NULL)
        return; /* the page stays as it was: its clock shows it */
    if (s->page != NULL)
        page_write(s, s->page, NULL, r, entries);
    for (struct account *a = s->accounts.first; a != NULL; a = a->next)
        if (a->page != NULL)
            page_write(s, a->page, a, r, entries);
    free(entries);
}

void statsout_close(struct server *s)
{
    page_close(&s->page);
    for (struct account *a = s->accounts.first; a != NULL; a = a->next)
        page_close(&a->page);
}
