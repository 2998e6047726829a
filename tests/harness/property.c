/* property.c: see property.h. The upper part is a run, the lower one makes runs and shortens them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "core.h"
#include "daemon_harness.h"
#include "durable_test.h"
#include "faulty_disk.h"
#include "folders_test.h"
#include "ledger_test.h"
#include "log.h"
#include "property.h"

#define SEATS 64
#define PAGE 34304u /* of tiny-llama, f16, without hidden rows */
#define PAGES_MAX 60u
#define CONTEXT 320u         /* what the model was trained on, as they are told */
#define SCRATCH (32u * 301u) /* of the largest refresh: a budget of 300 tokens */
#define FROZEN_MAX 16u
#define FIRST_CONN 100u
#define SHRINK_SECONDS 60
#define PREFIX_KEEP_US 3000000u

/* ---- operations ---- */

enum op_kind {
    OP_SUBMIT,
    OP_OPEN,
    OP_CANCEL,
    OP_BUDGET,
    OP_PRUNE,
    OP_CLOSE,
    OP_GONE,
    OP_SAVE,
    OP_RESTORE,
    OP_FORK,
    OP_SCORES,
    OP_LIMITS,
    OP_LATER,
    OP_BURST,
    OP_STOP,
    N_OPS
};
static const char *const op_names[N_OPS] = {"submit", "open",   "cancel", "budget",  "prune",
                                            "close",  "gone",   "save",   "restore", "fork",
                                            "scores", "limits", "later",  "burst",   "stop"};
static const uint8_t op_weights[N_OPS] = {14, 8, 4, 4, 2, 2, 1, 3, 3, 9, 1, 2, 2, 1, 1};

struct op {
    enum op_kind kind;
    uint32_t seat, steps, r[6]; /* steps after it; what it means for this kind */
};

static uint64_t mixed(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static struct op op_make(uint64_t seed, uint32_t number)
{
    struct op o = {.kind = OP_SUBMIT};
    uint64_t x = mixed(seed * 0x9e3779b97f4a7c15u + number);
    uint32_t sum = 0, at;
    for (int i = 0; i < N_OPS; i++)
        sum += op_weights[i];
    at = (uint32_t)(x % sum);
    while (at >= op_weights[o.kind])
        at -= op_weights[o.kind++];
    o.seat = (uint32_t)(x >> 32) % SEATS;
    o.steps = (uint32_t)(x >> 40) % 4;
    for (unsigned i = 0; i < ARRAY_LEN(o.r); i++)
        o.r[i] = (uint32_t)mixed(x + i + 1);
    return o;
}

static void op_print(uint64_t seed, uint32_t number)
{
    struct op o = op_make(seed, number);
    fprintf(stderr, "  op %u: %s, seat %u, then %u steps (%u %u %u %u)\n", number, op_names[o.kind],
            o.seat, o.steps, o.r[0], o.r[1], o.r[2], o.r[3]);
}

/* ---- the world ---- */

struct seat {
    uint64_t session; /* 0: none */
    uint32_t opening; /* request; 0: none */
    bool detached;    /* its client went away */
    int32_t frozen[FROZEN_MAX];
    uint32_t n_frozen; /* seen so far */
};
struct world {
    struct eh *h;
    struct seat seats[SEATS];
    char dir[FOLDER_PATH];
    uint32_t done[N_OPS], opened, posted, answered;
    uint64_t shared; /* steps after which pages were shared */
    uint64_t turned; /* sessions that had been renumbered, summed over the steps */
    int32_t prompt[600];
    char model[FOLDER_PATH + 16];
    uint64_t stop_snapshots_us;
    struct {
        uint64_t spills, returns, saves, restores, steps, stops, recovered;
    } seen; /* by engines that have stopped */
};

static struct disk_io fast_disk;

static void options(struct engine_options *o, void *arg)
{
    const struct world *w = arg;
    fast_disk = disk_io_system;
    disk_unsynced(&fast_disk);
    o->state_dir = w->dir;
    o->io = &fast_disk;
    o->stop_snapshots_us = w->stop_snapshots_us;
    o->kv_memory = 40 * PAGE + SCRATCH;
    o->kv_memory_max = PAGES_MAX * PAGE + SCRATCH;
    o->session_budget = 3 * PAGE;
    o->host_tier = 12 * PAGE;
    o->disk_tier = 400 * PAGE;
    o->spill_after_us = 1000000;
    o->score_rows = 40;
    o->prefill_chunk = 32;
    o->max_sessions = SEATS;
    o->prefix_keep_us = PREFIX_KEEP_US;
}

static uint64_t conn_of(uint32_t seat)
{
    return FIRST_CONN + seat;
}

static uint32_t uid_of(uint32_t seat)
{
    return EH_UID + seat % 3;
}

static struct seat *seat_of(struct world *w, const struct session *s)
{
    for (uint32_t i = 0; i < SEATS; i++)
        if (w->seats[i].session == s->id)
            return &w->seats[i];
    return NULL;
}

/* ---- what must hold between two steps ---- */

static void frozen_is_there(struct world *w, const struct session *s)
{
    struct seat *p = seat_of(w, s);
    uint32_t n = BC_MIN(evict_params(s->ev)->frozen, FROZEN_MAX);
    if (p == NULL || s->lodging.place == PLACE_AWAY || s->lodging.place == PLACE_COMING)
        return;
    const uint64_t *stream = seqcache_stream(s->cache);
    const int32_t *ids = seqcache_ids(s->cache);
    n = BC_MIN(n, seqcache_count(s->cache));
    assert_true(n >= p->n_frozen);
    for (uint32_t i = 0; i < n; i++) {
        assert_int_equal(stream[i], i);
        assert_int_equal(seqcache_positions(s->cache)[i], i);
        if (i < p->n_frozen)
            assert_int_equal(ids[i], p->frozen[i]);
        p->frozen[i] = ids[i];
    }
    p->n_frozen = n;
}

static bool pages_shared(const struct engine *en)
{
    for (uint32_t i = 0; i < en->n_sessions; i++)
        if (seqcache_bytes_shared(en->list[i]->cache) > 0)
            return true;
    return false;
}

static void facts_hold(struct eh *h)
{
    struct world *w = h->arg;
    struct engine *en = h->en;
    ledger_agrees(h);
    for (uint32_t i = 0; i < en->n_sessions; i++) {
        const struct session *s = en->list[i];
        const struct evict_params *p = evict_params(s->ev);
        assert_true(s->budget_bytes == 0 || seqcache_bytes_held(s->cache) <= s->budget_bytes);
        assert_true(p->budget == 0 || s->prune.reason == PRUNE_SHRUNK || s->replay != NULL ||
                    s->replay_after != NULL || seqcache_count(s->cache) <= p->budget);
        uint32_t n = seqcache_count(s->cache);
        assert_true(n == 0 || seqcache_positions(s->cache)[n - 1] < (int32_t)CONTEXT);
        w->turned += s->position_zero > 0;
        frozen_is_there(w, s);
    }
    assert_true(models_held(en) <= en->page_budget);
    w->shared += pages_shared(en);
    assert_true(en->tier.host_bytes <= en->opt.host_tier);
    assert_true(en->tier.disk_bytes <= en->opt.disk_tier);
}

/* ---- one operation ---- */

static struct command *from(struct world *w, uint32_t seat, enum command_type type)
{
    struct command *c = eh_command(w->h, type, 0);
    c->session = w->seats[seat].session;
    c->conn = conn_of(seat);
    c->uid = uid_of(seat);
    return c;
}

static void post(struct world *w, struct command *c)
{
    w->posted += c->type != CMD_GONE && c->type != CMD_ROOM;
    eh_post(w->h, c);
}

static void do_open(struct world *w, const struct op *o)
{
    static const char *const policies[] = {
        "counter_causal_fast", "counter_causal", "h2o",     "tova",   "sliding_window",
        "key_similarity",      "knorm",          "keydiff", "random", "none"};
    static const char *const types[6] = {"f16", "f16", "f16", "f32", "bf16", "bf16"};
    char name[16];
    uint32_t budget = 40 + o->r[1] % 260;
    snprintf(name, sizeof name, "n%u", o->seat);
    struct eh_ask a = {.policy = policies[o->r[0] % ARRAY_LEN(policies)],
                       .budget_tokens = budget,
                       .frozen = o->r[2] % FROZEN_MAX,
                       .kv_type = types[o->r[3] % 6],
                       .trigger = o->r[3] % 7 == 0 ? "prefill_end" : NULL,
                       .positions = o->r[5] % 4 != 0 ? "rerotate" : NULL,
                       .name = o->r[4] % 3 == 0 ? name : NULL,
                       .durable = o->r[4] % 12 == 0,
                       .priority = (int32_t)(o->r[4] >> 8) % 5 - 2,
                       .weight = 1 + o->r[5] % 3,
                       .seed = o->r[5],
                       .conn = conn_of(o->seat),
                       .uid = uid_of(o->seat)};
    if (strcmp(a.policy, "none") == 0)
        a.trigger = a.positions = NULL;
    w->posted++;
    w->seats[o->seat].opening = eh_post_open(w->h, &a);
}

static void do_submit(struct world *w, const struct op *o)
{
    struct command *c = from(w, o->seat, CMD_GENERATE);
    bool common = o->r[5] % 2 == 0; /* a beginning that others have as well */
    uint32_t n = 1 + o->r[0] % (common ? 200 : 90);
    c->u.generate.kind = PROMPT_IDS;
    c->u.generate.opt = eh_greedy(o->r[1] % 24);
    c->u.generate.opt.temperature = o->r[2] % 2 == 0 ? 0 : 1;
    c->u.generate.opt.seed = o->r[3];
    c->u.generate.n_ids = n;
    c->u.generate.ids = malloc(n * sizeof(int32_t));
    assert_non_null(c->u.generate.ids);
    memcpy(c->u.generate.ids, w->prompt + (common ? 0 : o->r[4] % 500), n * sizeof(int32_t));
    post(w, c);
}

static void do_save(struct world *w, const struct op *o)
{
    struct command *c = from(w, o->seat, CMD_SAVE);
    snprintf(c->u.save.name, sizeof c->u.save.name, "f%u", o->r[0] % 6);
    post(w, c);
}

static void do_restore(struct world *w, const struct op *o)
{
    char name[16];
    snprintf(name, sizeof name, "f%u", o->r[0] % 6);
    w->posted++;
    w->seats[o->seat].opening = eh_post_restore_as(w->h, name, conn_of(o->seat), uid_of(o->seat));
}

/* Of a session of the same user in another seat; of none that there is, if there is none. */
static void do_fork(struct world *w, const struct op *o)
{
    uint64_t from = 0;
    for (uint32_t i = 0; i < SEATS && from == 0; i++) {
        uint32_t at = (o->r[0] + i) % SEATS;
        if (uid_of(at) == uid_of(o->seat))
            from = w->seats[at].session;
    }
    w->posted++;
    w->seats[o->seat].opening =
        eh_post_fork_as(w->h, from, NULL, conn_of(o->seat), uid_of(o->seat));
}

static void do_attach(struct world *w, uint32_t seat)
{
    struct command *c = from(w, seat, CMD_ATTACH);
    c->u.attach.port = eh_port(w->h, c->session);
    w->seats[seat].detached = false;
    post(w, c);
}

static void do_gone(struct world *w, uint32_t seat)
{
    const struct seat *p = &w->seats[seat];
    bool named = false;
    for (uint32_t i = 0; i < w->h->en->n_sessions; i++)
        if (w->h->en->list[i]->id == p->session)
            named = w->h->en->list[i]->name[0] != '\0';
    post(w, from(w, seat, CMD_GONE));
    if (named)
        w->seats[seat].detached = true;
    else
        w->seats[seat] = (struct seat){0};
}

static void do_amount(struct world *w, const struct op *o, enum command_type type)
{
    struct command *c = from(w, o->seat, type);
    if (type == CMD_BUDGET)
        c->u.budget.tokens = 30 + o->r[0] % 270;
    c->u.budget.keep = o->r[1] % 3 == 0 ? 0 : o->r[2] % 200;
    post(w, c);
}

static void do_limits(struct world *w, const struct op *o)
{
    struct command *c = from(w, o->seat, CMD_LIMITS);
    c->session = 0;
    c->admin = true;
    c->u.limits.kv_memory = (20 + o->r[0] % (PAGES_MAX - 20)) * (uint64_t)PAGE + SCRATCH;
    c->u.limits.session_budget = 3 * PAGE;
    c->u.limits.limits.uid_percent = o->r[1] % 2 == 0 ? 60 : 0;
    post(w, c);
}

/* A prompt for about half of the sessions at once. */
static void do_burst(struct world *w, const struct op *o)
{
    for (uint32_t i = 0; i < SEATS; i++) {
        const struct seat *p = &w->seats[i];
        if (p->session == 0 || p->opening != 0 || p->detached || o->r[0] >> i % 32 & 1)
            continue;
        struct op one = {.seat = i};
        for (unsigned k = 0; k < ARRAY_LEN(one.r); k++)
            one.r[k] = (uint32_t)mixed((uint64_t)o->r[k] << 8 | i);
        do_submit(w, &one);
    }
}

static struct session *session_of(const struct engine *en, uint64_t id)
{
    for (uint32_t i = 0; i < en->n_sessions && id != 0; i++)
        if (en->list[i]->id == id)
            return en->list[i];
    return NULL;
}

/* A durable session as it was before a stop. */
struct durable {
    uint64_t id, stream, tokens_in, tokens_out;
    uint32_t cached;
    bool rests; /* nothing was under way or waited */
};

static struct durable durable_of(struct engine *en, struct session *s)
{
    bool rests = s->req == NULL && !s->prune.active && s->replay == NULL &&
                 s->replay_after == NULL && s->lodging.waiting == NULL &&
                 s->lodging.place != PLACE_COMING && !queue_has_prompt(en, s);
    return (struct durable){s->id, s->stream, s->tokens_in, s->tokens_out, sess_tokens(s), rests};
}

static void same_as_before(const struct engine *en, const struct durable *d)
{
    const struct session *s = session_of(en, d->id);
    if (s == NULL || !d->rests)
        return;
    assert_int_equal(s->stream, d->stream);
    assert_int_equal(s->tokens_in, d->tokens_in);
    assert_int_equal(s->tokens_out, d->tokens_out);
    assert_int_equal(sess_tokens(s), d->cached);
}

static void world_open(struct world *w)
{
    w->h = eh_open(w->model, options, w);
    w->h->arg = w;
    w->h->on_step = facts_hold;
}

/* The engine and all that it counted go; what was posted and had no answer never gets one. */
static void world_stop(struct world *w)
{
    const struct engine *en = w->h->en;
    w->seen.spills += en->tier.spills;
    w->seen.returns += en->tier.returns;
    w->seen.saves += en->tier.saves;
    w->seen.restores += en->tier.restores;
    w->seen.steps += w->h->steps;
    w->h->on_step = NULL;
    eh_close(&w->h);
    w->posted = w->answered = 0;
}

static void openings_look(struct world *w)
{
    struct eh *h = w->h;
    for (uint32_t i = 0; i < SEATS; i++) {
        struct seat *p = &w->seats[i];
        for (uint32_t k = 0; p->opening != 0 && k < h->n_replies; k++) {
            const struct report *r = h->replies[k];
            if (r->request_id != p->opening)
                continue;
            *p = (struct seat){.session = r->type == REP_OPENED ? r->session : 0};
            w->opened += p->session != 0;
        }
    }
    for (uint32_t k = 0; k < h->n_replies; k++) {
        const struct report *r = h->replies[k];
        w->answered += r->request_id != 0; /* 0: nobody asked */
        for (uint32_t i = 0; i < SEATS && r->request_id == 0 && r->type == REP_CLOSED; i++)
            if (w->seats[i].session == r->session) /* it could not be rebuilt */
                w->seats[i] = (struct seat){0};
    }
    eh_tidy(h);
}

/* A clean stop amid everything, and the next engine: durable sessions are there, as they were, whether the time was enough for
 * snapshots or not. (One that has to be rebuilt later than the memory is full closes; its folder stays for the next start.) */
static void do_stop(struct world *w, const struct op *o)
{
    struct durable was[SEATS];
    uint32_t n = 0;
    eh_step(w->h); /* opens what was asked for, if it can */
    openings_look(w);
    for (uint32_t i = 0; i < SEATS; i++) {
        struct seat *p = &w->seats[i];
        struct session *s = session_of(w->h->en, p->session);
        if (s != NULL && s->keeper != NULL && p->opening == 0)
            was[n++] = durable_of(w->h->en, s);
        *p = (struct seat){0};
    }
    w->stop_snapshots_us = (uint64_t[]){0, 1, 1000000}[o->r[0] % 3];
    world_stop(w);
    world_open(w);
    eh_collect(w->h);
    for (uint32_t i = 0; i < n; i++)
        assert_non_null(session_of(w->h->en, was[i].id));
    for (uint32_t i = 0; i < w->h->en->n_sessions; i++) { /* its name says where it sat */
        const struct session *s = w->h->en->list[i];
        w->seats[atoi(s->name + 1)] = (struct seat){.session = s->id, .detached = true};
    }
    w->seen.stops++;
    w->seen.recovered += n;
    for (uint32_t i = 0; i < o->r[1] % 50; i++)
        eh_step(w->h);
    if (o->r[2] % 3 != 0)
        return;
    eh_run(w->h);
    for (uint32_t i = 0; i < n; i++)
        same_as_before(w->h->en, &was[i]);
}

/* What cannot be done here is something else that can. */
static void op_do(struct world *w, struct op o)
{
    struct seat *p = &w->seats[o.seat];
    if (o.kind == OP_BURST || o.kind == OP_STOP) {
        w->done[o.kind]++;
        (o.kind == OP_BURST ? do_burst : do_stop)(w, &o);
        return;
    }
    if (p->opening != 0)
        return;
    if (p->session == 0 && o.kind != OP_LIMITS && o.kind != OP_LATER && o.kind != OP_RESTORE &&
        o.kind != OP_FORK)
        o.kind = OP_OPEN;
    else if (p->session != 0 && (o.kind == OP_OPEN || o.kind == OP_RESTORE || o.kind == OP_FORK))
        o.kind = OP_SUBMIT;
    w->done[o.kind]++;
    if (p->detached && o.kind != OP_LIMITS && o.kind != OP_LATER && o.kind != OP_CLOSE) {
        do_attach(w, o.seat);
        return;
    }
    switch (o.kind) {
    case OP_SUBMIT:
        do_submit(w, &o);
        break;
    case OP_OPEN:
        do_open(w, &o);
        break;
    case OP_CANCEL:
        post(w, from(w, o.seat, CMD_CANCEL));
        break;
    case OP_BUDGET:
        do_amount(w, &o, CMD_BUDGET);
        break;
    case OP_PRUNE:
        do_amount(w, &o, CMD_PRUNE);
        break;
    case OP_CLOSE:
        post(w, from(w, o.seat, CMD_CLOSE));
        *p = (struct seat){0};
        break;
    case OP_GONE:
        do_gone(w, o.seat);
        break;
    case OP_SAVE:
        do_save(w, &o);
        break;
    case OP_RESTORE:
        do_restore(w, &o);
        break;
    case OP_FORK:
        do_fork(w, &o);
        break;
    case OP_SCORES:
        post(w, from(w, o.seat, CMD_SCORES));
        break;
    case OP_LIMITS:
        do_limits(w, &o);
        break;
    default:
        eh_pass(w->h, o.r[0] % 2000000);
    }
}

/* ---- a run ---- */

static void world_close(struct world *w)
{
    struct eh *h = w->h;
    struct ledger_owner *all = ledger_daemon(engine_ledger(h->en));
    static const enum ledger_kind nothing[] = {LEDGER_kv,      LEDGER_shared,  LEDGER_refresh,
                                               LEDGER_prompts, LEDGER_reports, LEDGER_host,
                                               LEDGER_journal};
    eh_run(h);
    openings_look(w);
    for (uint32_t i = 0; i < SEATS; i++)
        if (w->seats[i].session != 0)
            post(w, from(w, i, CMD_CLOSE));
    eh_run(h);
    openings_look(w);
    assert_int_equal(h->en->n_sessions, 0);
    for (int i = 0; i < 3; i++) { /* beginnings that nobody holds */
        eh_pass(h, PREFIX_KEEP_US);
        eh_run(h);
    }
    assert_int_equal(w->posted, w->answered); /* one answer each */
    for (unsigned i = 0; i < ARRAY_LEN(nothing); i++)
        assert_int_equal(ledger_all(all, nothing[i]), 0);
    assert_int_equal(models_held(h->en) + h->en->tier.host_bytes + h->en->tier.disk_bytes, 0);
    assert_int_equal(h->en->commands, 0);
    world_stop(w);
}

static struct inner { /* arguments of the run */
    uint64_t seed;
    uint32_t n_ops, *only; /* only NULL: all */
    int progress;          /* a file: the number of the operation under way */
    bool whole;            /* everything must have happened */
} inner;

static void run_told(const struct world *w)
{
    print_message(
        "seed %llu: %u operations, %llu steps, %u sessions; %llu left their pages, %llu came "
        "back, %llu saved, %llu restored, %llu recovered after %llu stops; pages were shared after "
        "%llu steps; %llu looks at a session that had been renumbered\n",
        (unsigned long long)inner.seed, inner.n_ops, (unsigned long long)w->seen.steps, w->opened,
        (unsigned long long)w->seen.spills, (unsigned long long)w->seen.returns,
        (unsigned long long)w->seen.saves, (unsigned long long)w->seen.restores,
        (unsigned long long)w->seen.recovered, (unsigned long long)w->seen.stops,
        (unsigned long long)w->shared, (unsigned long long)w->turned);
}

static void the_run(void **state)
{
    struct world w = {0};
    char model_dir[FOLDER_PATH];
    (void)state;
    folder_root_memory(w.dir, "property");
    folder_root_memory(model_dir, "model");
    snprintf(w.model, sizeof w.model, "%s/m.gguf", model_dir);
    dh_context_model(w.model, "tiny-llama.gguf", CONTEXT);
    prompt_fill(w.prompt, ARRAY_LEN(w.prompt), (uint32_t)inner.seed);
    world_open(&w);
    for (uint32_t i = 0; i < inner.n_ops; i++) {
        uint32_t number = inner.only != NULL ? inner.only[i] : i;
        if (inner.progress >= 0 && pwrite(inner.progress, &i, sizeof i, 0) != sizeof i)
            fail_msg("progress");
        struct op o = op_make(inner.seed, number);
        op_do(&w, o);
        for (uint32_t k = 0; k < o.steps; k++)
            eh_step(w.h);
        openings_look(&w);
    }
    world_close(&w);
    folder_drop(w.dir);
    folder_drop(model_dir);
    run_told(&w);
    for (int i = 0; i < N_OPS && inner.whole; i++)
        assert_true(w.done[i] > 0);
    if (inner.whole)
        assert_true(w.seen.spills > 0 && w.seen.returns > 0 && w.seen.saves > 0 &&
                    w.seen.restores > 0 && w.seen.recovered > 0 && w.shared > 100 &&
                    w.turned > 100);
}

/* ---- runs in processes of their own ---- */

struct runner {
    char dir[FOLDER_PATH], list[FOLDER_PATH + 16], progress[FOLDER_PATH + 16];
    uint64_t seed;
};

/* Its exit status; how far it came. */
static int run(struct runner *r, const uint32_t *only, uint32_t n, bool quiet, uint32_t *ret_at)
{
    char seed[24], count[12];
    int status = 0;
    snprintf(seed, sizeof seed, "%llu", (unsigned long long)r->seed);
    snprintf(count, sizeof count, "%u", n);
    if (only != NULL)
        file_store(r->list, only, n * sizeof *only);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        char *args[] = {"property", "--run",     seed,
                        count,      r->progress, only != NULL ? r->list : NULL,
                        NULL};
        int null = quiet ? open("/dev/null", O_WRONLY) : -1;
        if (null >= 0) {
            dup2(null, 1);
            dup2(null, 2);
        }
        execv("/proc/self/exe", args);
        _exit(99);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    uint32_t at = n > 0 ? n - 1 : 0;
    int fd = open(r->progress, O_RDONLY | O_CLOEXEC);
    if (fd >= 0 && pread(fd, &at, sizeof at, 0) != sizeof at)
        at = n - 1;
    if (fd >= 0)
        close(fd);
    if (ret_at != NULL)
        *ret_at = at;
    return status;
}

/* Leaves out what the failure does not need, in ever smaller pieces. */
static uint32_t shrink(struct runner *r, uint32_t *ops, uint32_t n)
{
    uint32_t *fewer = malloc(n * sizeof *fewer);
    time_t until = time(NULL) + SHRINK_SECONDS;
    assert_non_null(fewer);
    for (uint32_t piece = (n + 1) / 2; piece > 0; piece /= 2)
        for (uint32_t at = 0; at < n && time(NULL) < until;) {
            uint32_t cut = BC_MIN(piece, n - at), last;
            memcpy(fewer, ops, at * sizeof *ops);
            memcpy(fewer + at, ops + at + cut, (n - at - cut) * sizeof *ops);
            if (n - cut > 0 && run(r, fewer, n - cut, true, &last) != 0) {
                n = BC_MIN(n - cut, last + 1);
                memcpy(ops, fewer, n * sizeof *ops);
            } else {
                at += cut;
            }
        }
    free(fewer);
    return n;
}

static void failed(struct runner *r, uint32_t at)
{
    uint32_t n = at + 1, *ops = malloc(n * sizeof *ops);
    assert_non_null(ops);
    for (uint32_t i = 0; i < n; i++)
        ops[i] = i;
    fprintf(stderr, "seed %llu failed in operation %u; looking for the least that fails\n",
            (unsigned long long)r->seed, at);
    n = shrink(r, ops, n);
    for (uint32_t i = 0; i < n; i++)
        op_print(r->seed, ops[i]);
    run(r, ops, n, false, NULL);
    fprintf(stderr, "the whole run again: --seed %llu\n", (unsigned long long)r->seed);
    free(ops);
}

static int whole(uint64_t seed, uint32_t n_ops)
{
    struct runner r = {.seed = seed};
    uint32_t at;
    folder_root_memory(r.dir, "property");
    snprintf(r.list, sizeof r.list, "%s/list", r.dir);
    snprintf(r.progress, sizeof r.progress, "%s/progress", r.dir);
    int status = run(&r, NULL, n_ops, false, &at);
    if (status != 0)
        failed(&r, at);
    folder_drop(r.dir);
    return status == 0 ? 0 : 1;
}

int property_main(int argc, char **argv, uint64_t seed, uint32_t n_ops)
{
    inner.progress = -1;
    if (argc >= 5 && strcmp(argv[1], "--run") == 0) {
        const struct CMUnitTest tests[] = {cmocka_unit_test(the_run)};
        size_t bytes = 0;
        inner.seed = strtoull(argv[2], NULL, 10);
        inner.n_ops = (uint32_t)strtoul(argv[3], NULL, 10);
        inner.progress = open(argv[4], O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        inner.only = argc > 5 ? (uint32_t *)(void *)file_load(argv[5], &bytes) : NULL;
        inner.whole = inner.only == NULL && inner.n_ops >= 2000;
        log_setup("error", NULL);
        int rc = cmocka_run_group_tests(tests, NULL, NULL);
        free(inner.only);
        return rc;
    }
    if (seed == 0)
        seed = (uint64_t)time(NULL);
    for (int i = 1; i + 1 < argc; i += 2)
        if (strcmp(argv[i], "--seed") == 0)
            seed = strtoull(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--ops") == 0)
            n_ops = (uint32_t)strtoul(argv[i + 1], NULL, 10);
    return whole(seed, n_ops);
}
