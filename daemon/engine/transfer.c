/* transfer.c: a cache on its way between pages and an image: see tier.h. Who travels, and what follows
 * from it, is decided in tier.c and save.c.
 *
 * A step copies at most TIER_STEP_BYTES, whatever is under way, and never waits for the disk thread.
 * Nothing of a session changes before every sum was found right: until then a way out has only read,
 * and a way back has only filled pages that nobody sees. */
#include "core.h"
#include "log.h"
#include <stdlib.h>
#include <string.h>

/* ---- images ---- */

struct image *image_new(enum image_kind kind)
{
    struct image *i = calloc(1, sizeof *i);
    if (i != NULL) {
        i->kind = kind;
        i->fd = -1;
    }
    return i;
}

struct image *image_named(const char *path)
{
    struct image *i = image_new(IMAGE_NAMED);
    if (i != NULL && (i->path = strdup(path)) == NULL) {
        free(i);
        return NULL;
    }
    return i;
}

/* Nobody wants it any more. Tasks that are out come before its end. */
void image_drop(struct engine *en, struct image **pi)
{
    struct image *i = *pi;
    *pi = NULL;
    i->drop = (struct disk_task){.what = DISK_DROP, .image = i};
    disk_push(en, &i->drop);
}

/* ---- a transfer's life ---- */

struct transfer *transfer_new(struct engine *en, struct session *s, bool out, enum transfer_why why)
{
    struct transfer *t = calloc(1, sizeof *t);
    if (t == NULL)
        return NULL;
    t->magic = TRANSFER_MAGIC;
    t->out = out;
    t->why = why;
    t->s = s;
    struct transfer **at = &en->tier.transfers;
    while (*at != NULL)
        at = &(*at)->next;
    *at = t;
    if (s != NULL)
        s->lodging.transfer = t;
    return t;
}

void transfer_free(struct engine *en, struct transfer **pt)
{
    struct transfer *t = *pt;
    MAGIC_OK(t, TRANSFER_MAGIC);
    bc_assert(t->n_out == 0 && t->asker == NULL);
    struct transfer **at = &en->tier.transfers;
    while (*at != t)
        at = &(*at)->next;
    *at = t->next;
    if (t->s != NULL)
        t->s->lodging.transfer = NULL;
    if (t->image != NULL && t->why != WHY_TIER)
        image_drop(en, &t->image);
    ledger_credit(ledger_daemon(en->ledger), LEDGER_host, t->booked);
    free(t->buffer);
    spill_free(&t->sp);
    t->magic = 0;
    free(t);
    *pt = NULL;
}

/* A task that nobody has, and whose block is done with; TRANSFER_TASKS: there is none. */
static unsigned task_free(const struct transfer *t)
{
    unsigned i = 0;
    while (i < TRANSFER_TASKS && (t->task[i].out || t->task[i].bytes != NULL))
        i++;
    return i;
}

static uint8_t *task_bytes(const struct transfer *t, unsigned i, uint32_t block)
{
    return t->image->flat != NULL ? t->image->flat + spill_block_at(t->sp, block)
                                  : t->buffer + i * t->block_bytes;
}

static void task_push(struct engine *en, struct transfer *t, unsigned i, struct disk_task k)
{
    k.t = t;
    k.image = t->image;
    k.out = true;
    t->task[i] = k;
    t->n_out++;
    en->worked = true;
    disk_push(en, &t->task[i]);
}

void transfer_begin(struct engine *en, struct transfer *t)
{
    task_push(en, t, 0, (struct disk_task){.what = t->out ? DISK_CREATE : DISK_OPEN});
}

/* Buffers for blocks that pass through; host images are their own. */
int transfer_buffer(struct engine *en, struct transfer *t, struct err *e)
{
    if (t->image->kind == IMAGE_HOST || spill_blocks(t->sp) == 0)
        return BC_OK;
    size_t block = spill_block_bytes(t->sp, 0), n = TRANSFER_TASKS * block;
    if ((t->buffer = malloc(n)) == NULL)
        return err_nomem(e, n);
    t->block_bytes = block;
    t->booked = n;
    ledger_charge(ledger_daemon(en->ledger), LEDGER_host, n);
    return BC_OK;
}

/* ---- out ---- */

/* What leaves s, as bytes to be; the pages are dense from now on. */
int transfer_describe(struct engine *en, struct transfer *t, struct err *e)
{
    struct session *s = t->s;
    struct bytes_out state = {0};
    const struct spill_origin from = {.model = s->m->info.identity,
                                      .arithmetic = models_arithmetic(s->m)};
    (void)en;
    seqcache_compact(s->cache);
    sess_state_put(s, &state);
    int rc = state.failed ? err_nomem(e, state.cap)
                          : spill_make(&t->sp, s->cache, &from, state.at, state.n, e);
    free(state.at);
    return rc;
}

/* Sends the next blocks as far as the step, the tasks and the blocks go. What a failed device gives
 * are zeros: they must not get a sum. */
static int out_blocks(struct engine *en, struct transfer *t, struct err *e)
{
    uint32_t n = spill_blocks(t->sp);
    unsigned i;
    while (t->n_sent < n && (i = task_free(t)) < TRANSFER_TASKS && en->tier.step_left > 0) {
        uint8_t *to = task_bytes(t, i, t->n_sent);
        struct kn *kn = t->s->m->kn;
        spill_block_copy(t->sp, t->n_sent, t->s->cache, to);
        if (kn->ops->status(kn) != KN_OK)
            return err_set(e, BC_EDEVICE, "", "device %s failed while a cache was copied: %s",
                           kn->name, kn->failed);
        en->tier.step_left -= BC_MIN(en->tier.step_left, spill_block_bytes(t->sp, t->n_sent));
        task_push(en, t, i,
                  (struct disk_task){.what = DISK_PUT, .block = t->n_sent++, .bytes = to});
    }
    if (t->n_sent == n)
        t->still = false;
    if (t->n_back == n) {
        t->phase = TRANSFER_FINISH;
        task_push(en, t, 0, (struct disk_task){.what = DISK_FINISH});
    }
    return BC_OK;
}

/* ---- back ---- */

int transfer_state(const struct transfer *t, struct sess_state **ret, struct err *e)
{
    struct sess_state *st = malloc(sizeof *st);
    size_t n;
    const void *bytes = spill_state(t->sp, &n);
    if (st == NULL)
        return err_nomem(e, sizeof *st);
    int rc = sess_state_get(bytes, n, st, e);
    if (rc < 0)
        free(st);
    else
        *ret = st;
    return rc;
}

/* A daemon before this one made the image: what may be held is what that session's budget was then; what
 * has changed since is done again afterwards. */
static int in_budget(struct transfer *t, struct err *e)
{
    struct sess_state *st;
    int rc = transfer_state(t, &st, e);
    if (rc < 0)
        return rc;
    t->s->budget_bytes = budget_bytes(&st->params, pool_page_bytes(t->s->pool));
    free(st);
    return BC_OK;
}

/* The head was read, and there is a session: does it fit? */
int transfer_fits(struct engine *en, struct transfer *t, struct err *e)
{
    struct session *s = t->s;
    uint64_t need = (uint64_t)spill_pages(t->sp) * pool_page_bytes(s->pool);
    int rc = spill_fits(t->sp, pool_kv(s->pool), s->m->info.identity, e);
    if (rc == BC_OK && s->replay_after != NULL)
        rc = in_budget(t, e);
    uint64_t rows = spill_rows(t->sp), all = (rows + KN_PAGE_ROWS - 1) / KN_PAGE_ROWS;
    if (s->budget_bytes != 0 && all * pool_page_bytes(s->pool) <= s->budget_bytes)
        s->budget_bytes = BC_MAX(s->budget_bytes, need); /* it shared pages: see sess_ceiling */
    if (rc == BC_OK && s->budget_bytes != 0 && need > s->budget_bytes)
        rc = err_amount(e, BC_EBUDGET, "budget_bytes", need, s->budget_bytes,
                        "%llu bytes of cache, and a budget of %llu", (unsigned long long)need,
                        (unsigned long long)s->budget_bytes);
    if (rc == BC_OK)
        rc = transfer_buffer(en, t, e);
    t->image->rows = spill_rows(t->sp);
    t->phase = TRANSFER_ROOM;
    return rc;
}

/* Pages for it, as soon as there are any. */
static int in_room(struct engine *en, struct transfer *t, struct err *e)
{
    struct session *s = t->s;
    int rc = pressure_pages(en, s, spill_pages(t->sp), e);
    if (rc < 0)
        return pressure_waits(en, s, e) ? BC_OK : rc;
    if ((rc = spill_place(t->sp, s->cache, e)) < 0)
        return rc;
    t->phase = TRANSFER_BLOCKS;
    en->worked = true;
    return BC_OK;
}

/* Checked blocks go into their pages, and the next ones are asked for. */
static void in_blocks(struct engine *en, struct transfer *t)
{
    for (unsigned i = 0; i < TRANSFER_TASKS; i++) {
        struct disk_task *k = &t->task[i];
        if (k->out || k->bytes == NULL || en->tier.step_left == 0)
            continue;
        spill_block_place(t->sp, k->block, t->s->cache, k->bytes);
        en->tier.step_left -= BC_MIN(en->tier.step_left, spill_block_bytes(t->sp, k->block));
        k->bytes = NULL;
        t->n_back++;
        en->worked = true;
    }
    for (unsigned i; t->n_sent < spill_blocks(t->sp) && (i = task_free(t)) < TRANSFER_TASKS;) {
        uint8_t *to = task_bytes(t, i, t->n_sent);
        task_push(en, t, i,
                  (struct disk_task){.what = DISK_GET, .block = t->n_sent++, .bytes = to});
    }
}

/* What the session was beside its cache: all of it for a new one, else what its policy had learnt. */
static int in_apply(struct transfer *t, struct err *e)
{
    struct sess_state *st;
    int rc = transfer_state(t, &st, e);
    if (rc < 0)
        return rc;
    if (spill_origin(t->sp).arithmetic != models_arithmetic(t->s->m))
        t->s->foreign = true;
    if (t->why == WHY_RESTORE || t->s->replay_after != NULL)
        rc = sess_state_apply(t->s, st, spill_rows(t->sp), e);
    else
        rc = sess_policy_apply(t->s, st, spill_rows(t->sp), e);
    free(st);
    return rc;
}

/* ---- the ends ---- */

/* The last byte is under its sum. */
static void out_done(struct engine *en, struct transfer *t)
{
    if (t->why == WHY_SAVE)
        save_done(en, t);
    else
        tier_left(en, t);
}

/* Every sum was right and every row is in its page. */
static int in_done(struct engine *en, struct transfer *t, struct err *e)
{
    int rc = in_apply(t, e);
    if (rc < 0)
        return rc;
    en->worked = true;
    if (t->why == WHY_RESTORE)
        restore_done(en, t);
    else
        tier_came(en, t);
    return BC_OK;
}

static void transfer_failed(struct engine *en, struct transfer *t)
{
    struct err e = t->err;
    if (t->why != WHY_RESTORE || e.code == BC_EIO || e.code == BC_ECORRUPT)
        log_warn("engine.tier", "%s: %s", t->image->path != NULL ? t->image->path : "spill",
                 e.text);
    if (t->why == WHY_SAVE)
        save_failed(en, t, &e);
    else if (t->why == WHY_RESTORE)
        restore_failed(en, t, &e);
    else
        tier_failed(en, t, &e);
}

void transfer_fail(struct transfer *t, int rc, const struct err *e)
{
    t->err = *e;
    t->err.code = rc;
}

void transfer_give_up(struct engine *en, struct transfer *t)
{
    if (t->s != NULL)
        t->s->lodging.transfer = NULL;
    t->s = NULL;
    t->given_up = true;
    t->still = false;
    en->worked = true; /* the next step frees it, or a later one when its tasks are back */
}

/* ---- the step ---- */

static void task_back(struct engine *en, struct disk_task *k)
{
    struct transfer *t = k->t;
    struct err e = {0};
    int rc = k->rc;
    MAGIC_OK(t, TRANSFER_MAGIC);
    bool block_came = k->what == DISK_GET && rc == BC_OK && !t->given_up;
    k->out = false;
    if (!block_came)
        k->bytes = NULL;
    t->n_out--;
    t->n_back += k->what == DISK_PUT;
    en->worked = true;
    if (rc < 0 && t->err.code == BC_OK)
        transfer_fail(t, rc, &k->err);
    if (t->given_up || t->err.code < 0)
        return;
    if (k->what == DISK_CREATE) {
        t->phase = TRANSFER_BLOCKS;
    } else if (k->what == DISK_OPEN) {
        rc = t->why == WHY_RESTORE ? restore_opened(en, t, &e) : transfer_fits(en, t, &e);
        if (rc < 0)
            transfer_fail(t, rc, &e);
    } else if (k->what == DISK_FINISH) {
        out_done(en, t);
    }
}

static void advance_out(struct engine *en, struct transfer *t)
{
    struct session *s = t->s;
    bool was = t->still;
    struct err e = {0};
    if (t->phase != TRANSFER_BLOCKS)
        return;
    int rc = out_blocks(en, t, &e);
    if (rc < 0) {
        transfer_fail(t, rc, &e);
        engine_fail(en, &e);
        return;
    }
    if (was && !t->still && t->why == WHY_SAVE) /* its pages may change again */
        tier_waiting_run(en, s);
}

static void advance_in(struct engine *en, struct transfer *t)
{
    struct err e = {0};
    int rc = BC_OK;
    if (t->phase == TRANSFER_ROOM)
        rc = in_room(en, t, &e);
    if (rc == BC_OK && t->phase == TRANSFER_BLOCKS) {
        in_blocks(en, t);
        if (t->n_back == spill_blocks(t->sp))
            rc = in_done(en, t, &e);
    }
    if (rc < 0)
        transfer_fail(t, rc, &e);
    en->worked |= rc < 0;
}

static void advance(struct engine *en, struct transfer *t)
{
    if (!t->given_up && t->err.code == BC_OK) {
        if (t->out)
            advance_out(en, t);
        else
            advance_in(en, t);
    } else if (t->n_out == 0 && t->given_up) {
        transfer_free(en, &t);
    } else if (t->n_out == 0) {
        transfer_failed(en, t);
        en->worked = true;
    }
}

void transfers_run(struct engine *en)
{
    struct disk_task *list = disk_done(en);
    while (list != NULL) {
        struct disk_task *k = list;
        list = k->next;
        if (k->t != NULL)
            task_back(en, k);
        else
            saved_back(en, k);
    }
    en->tier.step_left = TIER_STEP_BYTES;
    for (struct transfer *t = en->tier.transfers, *next; t != NULL; t = next) {
        next = t->next; /* commands that run meanwhile add at the end, and free nothing ahead */
        advance(en, t);
    }
}
