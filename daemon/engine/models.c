/* models.c: the models that are loaded, each with a backend of its own, and how a name becomes one.
 *
 *   name --> loaded? --> READY: at once
 *     |         '-- no --> entry in LOADING, queued for the loader thread; who asked waits in it
 *     '-- unknown: BC_EUNKNOWN "model"            |
 *                                                 '--> READY or FAILED: the waiting ones are answered
 *
 * A name is a configured one, a loaded model's own (its file's, without ".gguf"), or a path (it has a
 * '/' or ends in ".gguf"; of a name that another model has, the path is the name).
 * Entries are keyed by canonical path. While it is LOADING an entry's model fields belong to the
 * loader; the queue's lock hands them back. When all ENGINE_MODELS_MAX places are taken, the model
 * without sessions that was used longest ago makes room.
 */
#include "core.h"
#include "clock.h"
#include "log.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WHY_LEN 320 /* of every backend that auto tried; as long as err.text */

/* ---- names ---- */

static bool looks_like_path(const char *name)
{
    size_t n = strlen(name);
    return strchr(name, '/') != NULL || (n > 5 && strcmp(name + n - 5, ".gguf") == 0);
}

static int unknown_model(const struct engine *en, const char *name, struct err *e)
{
    char known[200] = "";
    for (const struct model_ref *m = en->models; m != NULL; m = m->next)
        if (models_known(m)) {
            size_t n = strlen(known);
            snprintf(known + n, sizeof known - n, "%s%s", n > 0 ? ", " : "", m->name);
        }
    for (size_t i = 0; i < en->n_paths; i++) {
        size_t n = strlen(known);
        snprintf(known + n, sizeof known - n, "%s%s", n > 0 ? ", " : "", en->paths[i].name);
    }
    return err_set(e, BC_EUNKNOWN, "model",
                   "no model is called \"%.40s\" (known: %s; or a path to a GGUF file)", name,
                   known);
}

static bool name_taken(const struct engine *en, const char *name, const char *path)
{
    for (const struct model_ref *m = en->models; m != NULL; m = m->next)
        if (strcmp(m->name, name) == 0)
            return true;
    for (size_t i = 0; i < en->n_paths; i++)
        if (strcmp(en->paths[i].name, name) == 0 && strcmp(en->paths[i].path, path) != 0)
            return true;
    return false;
}

/* "/a/NAME.gguf" is called NAME, as people and the models folder call it; what the file says of itself
 * (general.name) finds nothing. */
static void name_of_path(const struct engine *en, const char *path, char *ret, size_t size)
{
    const char *slash = strrchr(path, '/'), *base = slash != NULL ? slash + 1 : path;
    size_t n = strlen(base);
    if (n > 5 && strcmp(base + n - 5, ".gguf") == 0)
        n -= 5;
    snprintf(ret, size, "%.*s", (int)BC_MIN(n, size - 1), base);
    if (name_taken(en, ret, path) && strlen(path) < size)
        memcpy(ret, path, strlen(path) + 1);
}

/* ref_room has made a place. */
static struct device_watch *watch_take(struct engine *en)
{
    uint32_t i = 0;
    while (en->watch->places[i].taken)
        i++;
    bc_assert(i < ENGINE_MODELS_MAX);
    en->watch->places[i].taken = true;
    return &en->watch->places[i];
}

static struct model_ref *ref_new(struct engine *en, char *path, const char *name,
                                 const char *chat_template)
{
    struct model_ref *m = calloc(1, sizeof *m);
    if (m == NULL)
        return NULL;
    m->magic = MODEL_REF_MAGIC;
    m->en = en;
    m->watch = watch_take(en);
    m->path = path;
    if (name != NULL)
        snprintf(m->name, sizeof m->name, "%s", name);
    else
        name_of_path(en, path, m->name, sizeof m->name);
    snprintf(m->chat_template, sizeof m->chat_template, "%s",
             chat_template != NULL ? chat_template : "");
    m->last_use_us = engine_now(en);
    ledger_owner_open(&m->owner, LEDGER_MODEL, ledger_daemon(en->ledger));
    m->next = en->models;
    en->models = m;
    return m;
}

static bool ref_idle(struct engine *en, struct model_ref *m)
{
    pthread_mutex_lock(&en->lock);
    bool idle = models_known(m) && m->sessions == 0 && m->prompts == 0;
    pthread_mutex_unlock(&en->lock);
    return idle;
}

/* Makes a place for one more entry. */
static int ref_room(struct engine *en, struct err *e)
{
    uint32_t n = 0;
    struct model_ref *oldest = NULL;
    for (struct model_ref *m = en->models; m != NULL; m = m->next, n++)
        if (m != en->default_model && ref_idle(en, m) &&
            (oldest == NULL || m->last_use_us < oldest->last_use_us))
            oldest = m;
    if (n < ENGINE_MODELS_MAX)
        return BC_OK;
    if (oldest == NULL)
        return err_amount(e, BC_EBUSY, "model", n + 1, n, "%u models are loaded and in use", n);
    models_drop(en, &oldest);
    return BC_OK;
}

static void load_push(struct engine *en, struct model_ref *m)
{
    pthread_mutex_lock(&en->lock);
    en->loads[en->n_loads++] = m;
    pthread_cond_signal(&en->loads_cond);
    pthread_mutex_unlock(&en->lock);
}

void models_wake(struct engine *en, struct model_ref *m)
{
    if (m->state != MODEL_ASLEEP)
        return;
    m->state = MODEL_LOADING;
    m->again = true;
    load_push(en, m);
}

static int find_path(struct engine *en, const char *path, const char *name,
                     const char *chat_template, struct model_ref **ret, struct err *e)
{
    char *full = realpath(path, NULL);
    if (full == NULL)
        return err_set(e, errno == ENOENT || errno == ENOTDIR ? BC_ENOTFOUND : BC_EIO, "model",
                       "%.200s: %s", path, strerror(errno));
    for (struct model_ref *m = en->models; m != NULL; m = m->next)
        if (m->state != MODEL_FAILED && strcmp(m->path, full) == 0) {
            free(full);
            *ret = m;
            models_wake(en, m);
            return BC_OK;
        }
    int rc = ref_room(en, e);
    struct model_ref *m = rc == BC_OK ? ref_new(en, full, name, chat_template) : NULL;
    if (m == NULL) {
        free(full);
        return rc != BC_OK ? rc : err_nomem(e, sizeof *m);
    }
    load_push(en, m);
    *ret = m;
    return BC_OK;
}

int models_find(struct engine *en, const char *name, struct model_ref **ret, struct err *e)
{
    if (name == NULL || name[0] == '\0') {
        if (en->default_model == NULL)
            return err_set(e, BC_EUNKNOWN, "model", "no model was named and there is no default");
        *ret = en->default_model;
        models_wake(en, *ret);
        return BC_OK;
    }
    for (struct model_ref *m = en->models; m != NULL; m = m->next)
        if ((models_known(m) || m->again) && strcmp(m->name, name) == 0) {
            *ret = m;
            models_wake(en, m);
            return BC_OK;
        }
    for (size_t i = 0; i < en->n_paths; i++)
        if (strcmp(en->paths[i].name, name) == 0)
            return find_path(en, en->paths[i].path, name, en->paths[i].chat_template, ret, e);
    if (!looks_like_path(name))
        return unknown_model(en, name, e);
    return find_path(en, name, NULL, NULL, ret, e);
}

int models_default(struct engine *en, const char *path, const char *name, struct model_ref **ret,
                   struct err *e)
{
    const char *chat_template = NULL;
    for (size_t i = 0; i < en->n_paths; i++)
        if (strcmp(en->paths[i].path, path) == 0)
            chat_template = en->paths[i].chat_template;
    return find_path(en, path, name, chat_template, ret, e);
}

/* ---- loading ---- */

static void batch_free(struct batch *b)
{
    free(b->entries);
    free(b->ids);
    free(b->seqs);
    free(b->out_rows);
    free(b->logits);
    free(b->how);
    free(b->tokens);
    free(b->queries);
    *b = (struct batch){0};
}

/* Space for what the backend's own picks need. */
static int picks_alloc(struct batch *b, struct err *e)
{
    size_t n = (size_t)b->outs_max * (1 + SAMPLER_REPEAT_MAX);
    b->how = calloc(b->outs_max, sizeof *b->how);
    b->tokens = calloc(n, sizeof *b->tokens);
    b->bytes += b->outs_max * sizeof *b->how + n * sizeof *b->tokens;
    if (b->how == NULL || b->tokens == NULL)
        return err_nomem(e, n * sizeof *b->tokens);
    b->recent = b->tokens + b->outs_max;
    return BC_OK;
}

static int batch_alloc(struct batch *b, const struct model_info *mi, struct err *e)
{
    size_t rows = mi->max_rows, outs = mi->max_out;
    *b = (struct batch){.rows_max = mi->max_rows,
                        .outs_max = mi->max_out,
                        .n_vocab = mi->n_vocab,
                        .query_len = mi->n_heads * mi->head_dim};
    size_t n_words = rows * 6 + outs + rows;
    b->bytes = rows * (sizeof *b->entries + sizeof *b->seqs) + n_words * sizeof(uint32_t) +
               outs * b->n_vocab * sizeof(float);
    b->entries = calloc(rows, sizeof *b->entries);
    b->seqs = calloc(rows, sizeof *b->seqs);
    b->ids = calloc(rows * 6, sizeof(uint32_t));
    b->out_rows = calloc(outs + rows, sizeof(uint32_t));
    b->logits = calloc(outs * b->n_vocab, sizeof(float));
    if (b->entries == NULL || b->seqs == NULL || b->ids == NULL || b->out_rows == NULL ||
        b->logits == NULL)
        return err_nomem(e, b->bytes);
    b->positions = b->ids + rows;
    b->seq = (uint32_t *)(b->ids + 2 * rows);
    b->lo = b->seq + rows;
    b->hi = b->lo + rows;
    b->slots = b->hi + rows;
    b->query_rows = b->out_rows + outs;
    return BC_OK;
}

/* All work space that exists because the model is loaded: its own, the backend's, a pass's arrays,
 * the tables of its pools. */
static void book_scratch(struct model_ref *m)
{
    uint64_t model = m->model != NULL ? model_info(m->model)->bytes_scratch : 0;
    uint64_t bytes = model + m->kn->bytes_scratch + m->batch.bytes + m->sampler.bytes;
    for (unsigned i = 0; i < MODEL_POOLS; i++)
        if (m->pools[i] != NULL)
            bytes += pool_table_bytes(m->pools[i]);
    ledger_set(&m->owner, LEDGER_scratch, bytes);
}

int models_query_space(struct model_ref *m, struct err *e)
{
    struct batch *b = &m->batch;
    size_t n = (size_t)b->rows_max * b->query_len;
    if (b->queries != NULL)
        return BC_OK;
    if ((b->queries = calloc(n, sizeof(float))) == NULL)
        return err_nomem(e, n * sizeof(float));
    b->bytes += n * sizeof(float);
    book_scratch(m);
    return BC_OK;
}

static int open_chats(struct model_ref *m, const struct gguf *g, struct err *e)
{
    const char *name = m->chat_template[0] != '\0' ? m->chat_template : NULL;
    int rc = chat_open(&m->chat, g, m->tok, name, e);
    if (rc < 0)
        return rc;
    for (unsigned i = 0; chat_names(i) != NULL && i < MODEL_CHATS_MAX; i++) {
        struct err ignored; /* a template that this vocabulary cannot say: refused when asked for */
        if (chat_open(&m->chat_by_name[i], g, m->tok, chat_names(i), &ignored) < 0)
            m->chat_by_name[i] = NULL;
    }
    return BC_OK;
}

/* What goes when the model sleeps: weights, and the arrays of a pass. */
static void weights_free(struct model_ref *m)
{
    sampler_close(&m->sampler);
    batch_free(&m->batch);
    if (m->model != NULL)
        model_close(&m->model);
}

static int backend_code(int kn_code)
{
    return kn_code == KN_ENOMEM ? BC_ENOMEM : kn_code == KN_EDEVICE ? BC_EDEVICE : BC_EUNSUPPORTED;
}

const char *models_kernels(const struct model_ref *m, char ret[MODELS_KERNELS_LEN])
{
    int n = snprintf(ret, MODELS_KERNELS_LEN, "%s %s", m->kn->name, m->kn->isa);
    if (m->kn->activations != KN_ACTIVATIONS_FLOAT && n > 0 && n < MODELS_KERNELS_LEN)
        snprintf(ret + n, (size_t)(MODELS_KERNELS_LEN - n), ", %u-bit activations",
                 m->kn->activations);
    return ret;
}

/* What stays: vocabulary and backend. */
static int load_lasting(struct model_ref *m, const struct gguf *g, struct err *e)
{
    const struct engine_options *opt = &m->en->opt;
    struct kn_options ko = {.backend = opt->backend,
                            .isa = opt->isa,
                            .threads = opt->threads,
                            .pin = opt->pin,
                            .activations = opt->activations,
                            .inject = opt->inject,
                            .waits = &m->watch->waits};
    char why[WHY_LEN] = "";
    int rc = tok_open(&m->tok, g, e);
    if (rc < 0)
        return rc;
    rc = kn_open(&m->kn, &ko, why, sizeof why);
    if (rc < 0)
        return err_set(e, backend_code(rc), "backend", "backend %s: %s",
                       opt->backend != NULL ? opt->backend : "auto", why);
    char kernels[MODELS_KERNELS_LEN];
    if (why[0] != '\0')
        log_info("engine.models", "%s runs the kernels: %s", models_kernels(m, kernels), why);
    return BC_OK;
}

static int load_parts(struct model_ref *m, const struct gguf *g,
                      void (*progress)(void *, uint64_t, uint64_t), void *arg, struct err *e)
{
    const struct engine_options *opt = &m->en->opt;
    struct model_options mo = {.max_rows = opt->max_rows, .max_out = BC_MIN(64u, opt->max_rows)};
    int rc = m->again ? BC_OK : load_lasting(m, g, e);
    if (rc < 0 || (rc = model_open(&m->model, m->kn, g, &mo, progress, arg, e)) < 0)
        return rc;
    const struct model_info *mi = model_info(m->model);
    if (m->again && mi->identity != m->info.identity)
        return err_set(e, BC_ESTATE, "model",
                       "the file of model %s has changed since its sessions were opened", m->name);
    if (tok_n_vocab(m->tok) > mi->n_vocab)
        return err_set(e, BC_ECORRUPT, "tokenizer.ggml.tokens",
                       "the vocabulary has %u entries, the model only %u", tok_n_vocab(m->tok),
                       mi->n_vocab);
    if ((!m->again && (rc = open_chats(m, g, e)) < 0) || (rc = batch_alloc(&m->batch, mi, e)) < 0)
        return rc;
    /* rows of the head beyond the vocabulary are padding that a backend would not know */
    if (m->kn->ops->sample != NULL && tok_n_vocab(m->tok) == mi->n_vocab &&
        (rc = picks_alloc(&m->batch, e)) < 0)
        return rc;
    /* rows of the head beyond the vocabulary are padding: they are never picked */
    return sampler_open(&m->sampler, tok_n_vocab(m->tok), e);
}

/* Where a model has what is of such pages. */
static unsigned kind_of(enum kn_type kv, bool hidden)
{
    unsigned type = 0;
    while (kn_kv_type_at(type)->type != kv)
        type++;
    bc_assert(2 * type + 1 < MODEL_POOLS);
    return 2 * type + hidden;
}

static int kv_type_check(const struct model_ref *m, const struct kn_kv_type *t, struct err *e)
{
    char why[160];
    if (kn_kv_check(m->kn, t->type, m->info.head_dim, why, sizeof why) == KN_OK)
        return BC_OK;
    return err_set(e, BC_EUNSUPPORTED, "kv_type", "kv_type %s: %s", t->name, why);
}

static void pages_measure(struct model_ref *m)
{
    const struct kn_kv_type *t;
    for (unsigned i = 0; (t = kn_kv_type_at(i)) != NULL; i++)
        for (unsigned hidden = 0; hidden < 2 && kv_type_check(m, t, NULL) == BC_OK; hidden++) {
            struct kn_kv shape;
            model_kv_shape(m->model, t->type, hidden != 0, &shape);
            m->pages[kind_of(t->type, hidden != 0)] =
                shape.stride + (uint64_t)KN_PAGE_ROWS * POOL_INDEX_BYTES;
        }
}

void models_load(struct model_ref *m, void (*progress)(void *, uint64_t, uint64_t), void *arg)
{
    MAGIC_OK(m, MODEL_REF_MAGIC);
    bc_assert(m->state == MODEL_LOADING);
    struct gguf *g = NULL;
    char kernels[MODELS_KERNELS_LEN];
    uint64_t start = clock_us();
    m->err = (struct err){0};
    int rc = gguf_open(&g, m->path, &m->err);
    if (rc == BC_OK && (rc = load_parts(m, g, progress, arg, &m->err)) == BC_ENOTFOUND)
        rc = BC_ECORRUPT; /* a key is missing: the file is there */
    gguf_close(&g);
    if (rc < 0) {
        m->err.code = rc;
        if (m->err.field[0] == '\0' || strcmp(m->err.field, "path") == 0)
            snprintf(m->err.field, sizeof m->err.field, "model"); /* what the client called it */
        err_of_file(&m->err, m->path);
        log_warn("engine.models", "%s", m->err.text);
        if (m->again)
            weights_free(m); /* it sleeps on */
        return;
    }
    m->err = (struct err){0}; /* keys that are looked for and may be absent leave their traces */
    const struct model_info *mi = model_info(m->model);
    if (!m->again) {
        m->info = *mi;
        pages_measure(m);
    }
    ledger_set(&m->owner, LEDGER_weights, mi->bytes_weights);
    ledger_set(&m->owner, LEDGER_text, tok_bytes(m->tok));
    book_scratch(m);
    log_info("engine.models", "%s: %s, %u layers, %zu bytes of weights on %s, %llu ms", m->name,
             mi->family, mi->n_layers, mi->bytes_weights, models_kernels(m, kernels),
             (unsigned long long)(clock_us() - start) / 1000);
}

void models_wait(struct model_ref *m, struct command **pc)
{
    struct command **at = &m->waiting;
    while (*at != NULL)
        at = &(*at)->next;
    *at = *pc;
    *pc = NULL;
}

static void answer_waiting(struct engine *en, struct model_ref *m)
{
    struct command *list = m->waiting;
    m->waiting = NULL;
    while (list != NULL) {
        struct command *c = list;
        list = c->next;
        c->next = NULL;
        if (c->type == CMD_RESTORE) {
            restore_go_on(en, &c, m);
        } else if (m->state == MODEL_FAILED) {
            report_error(en, c, &m->err);
            queue_command_done(en, &c);
        } else if (c->type == CMD_OPEN) {
            command_open(en, &c, m);
        } else {
            report_reply(en, c, report_new(REP_DONE, 0));
            queue_command_done(en, &c);
        }
    }
}

/* Sessions whose policy looks at queries have been opened before the sleep. */
static void query_space_again(struct engine *en, struct model_ref *m)
{
    int rc = BC_OK;
    for (uint32_t i = 0; i < en->n_sessions && rc == BC_OK; i++)
        if (en->list[i]->m == m && evict_params(en->list[i]->ev)->policy->needs_query)
            rc = models_query_space(m, &m->err);
    if (rc < 0) {
        m->err.code = rc;
        weights_free(m);
    }
}

void models_take_loaded(struct engine *en)
{
    struct model_ref *done[ENGINE_MODELS_MAX];
    pthread_mutex_lock(&en->lock);
    uint32_t n = en->n_loaded;
    memcpy(done, en->loaded, n * sizeof done[0]);
    en->n_loaded = 0;
    pthread_mutex_unlock(&en->lock);
    for (uint32_t i = 0; i < n; i++) {
        struct model_ref *m = done[i];
        bool again = m->again;
        m->again = false;
        if (m->err.code == BC_EDEVICE)
            engine_fail(en, &m->err);
        if (again && m->err.code == BC_OK)
            query_space_again(en, m);
        m->state = m->err.code == BC_OK ? MODEL_READY : MODEL_FAILED;
        m->last_use_us = engine_now(en);
        if (m->state == MODEL_READY && !again)
            models_memory_check(en, m);
        answer_waiting(en, m);
        if (again)
            tier_model_back(en, m);
        if (m->state == MODEL_FAILED && again)
            m->state = MODEL_ASLEEP; /* the next use tries again */
        else if (m->state == MODEL_FAILED)
            models_drop(en, &m);
        en->worked = true;
    }
}

bool models_known(const struct model_ref *m)
{
    return m->state == MODEL_READY || m->state == MODEL_ASLEEP;
}

void models_sleep(struct engine *en, struct model_ref *m)
{
    bc_assert(m->state == MODEL_READY && m->waiting == NULL);
    sharing_forget(en, m);
    for (unsigned i = 0; i < MODEL_POOLS; i++)
        bc_assert(m->pools[i] == NULL || pool_pages_out(m->pools[i]) == 0);
    m->state = MODEL_ASLEEP;
    weights_free(m);
    ledger_set(&m->owner, LEDGER_weights, 0);
    book_scratch(m);
    log_info("engine.models", "%s: nobody uses it: its weights are freed until somebody does",
             m->name);
    en->worked = true;
}

/* ---- what a session takes from a model ---- */

int models_page(const struct model_ref *m, enum kn_type kv, bool hidden, uint64_t *ret,
                struct err *e)
{
    int rc = kv_type_check(m, kn_kv_type_find(kv), e);
    if (rc == BC_OK)
        *ret = m->pages[kind_of(kv, hidden)];
    return rc;
}

/* The type of keys and values whose page, without hidden rows, is the smallest, and its bytes; NULL: the model has none. */
static const struct kn_kv_type *smallest_type(const struct model_ref *m, uint64_t *ret)
{
    const struct kn_kv_type *t, *smallest = NULL;
    uint64_t page;
    for (unsigned i = 0; (t = kn_kv_type_at(i)) != NULL; i++)
        if (models_page(m, t->type, false, &page, NULL) == BC_OK &&
            (smallest == NULL || page < *ret)) {
            *ret = page;
            smallest = t;
        }
    return smallest;
}

int models_memory_least(const struct model_ref *m, uint64_t kv_memory, struct err *e)
{
    uint64_t least = 0;
    const struct kn_kv_type *smallest = smallest_type(m, &least);
    if (smallest == NULL || kv_memory >= least)
        return BC_OK;
    return err_amount(e, BC_EBUDGET, "kv_memory", least, kv_memory,
                      "kv_memory %llu holds not one page of %s's caches (%llu bytes, kv_type %s: "
                      "the smallest): no session of it can be opened",
                      (unsigned long long)kv_memory, m->name, (unsigned long long)least,
                      smallest->name);
}

void models_memory_check(const struct engine *en, const struct model_ref *m)
{
    const struct evict_policy *usual = evict_policy_find(EVICT_POLICY_DEFAULT);
    uint64_t page = 0, least = 0;
    const struct kn_kv_type *t = kn_kv_type_at(0), *smallest = smallest_type(m, &least);
    struct err e;
    if (models_memory_least(m, en->kv_memory, &e) < 0)
        log_error("engine.models", "%s", e.text);
    else if (models_page(m, t->type, usual->needs_hidden, &page, NULL) == BC_OK &&
             en->kv_memory < page)
        log_warn("engine.models",
                 "%s: kv_memory %llu holds not one page of kv_type %s and policy %s (%llu bytes): "
                 "such sessions cannot be opened; those of kv_type %s and policy none can "
                 "(%llu bytes)",
                 m->name, (unsigned long long)en->kv_memory, t->name, usual->name,
                 (unsigned long long)page, smallest->name, (unsigned long long)least);
}

int models_pool(struct engine *en, struct model_ref *m, enum kn_type kv,
                const struct evict_policy *policy, struct pool **ret, struct err *e)
{
    bool hidden = policy->needs_hidden;
    uint64_t page = 0;
    int rc = models_page(m, kv, hidden, &page, e);
    if (rc < 0)
        return rc;
    if (en->kv_memory < page)
        return err_amount(e, BC_EBUDGET, "kv_memory", page, en->kv_memory,
                          "kv_memory %llu holds not one page of kv_type %s and policy %s (%llu "
                          "bytes)",
                          (unsigned long long)en->kv_memory, kn_kv_type_find(kv)->name,
                          policy->name, (unsigned long long)page);
    struct pool **at = &m->pools[kind_of(kv, hidden)];
    if (*at == NULL) {
        struct kn_kv shape;
        /* addresses for as much as kv_memory may ever become; memory comes with the pages */
        uint64_t n = BC_MIN(en->opt.kv_memory_max / page, (uint64_t)POOL_PAGES_MAX);
        model_kv_shape(m->model, kv, hidden, &shape);
        if ((rc = pool_open(at, m->kn, &shape, (uint32_t)n, e)) < 0)
            return rc;
        book_scratch(m);
    }
    *ret = *at;
    return BC_OK;
}

int models_chat(struct model_ref *m, const char *name, struct chat **ret, struct err *e)
{
    if (name == NULL || name[0] == '\0') {
        *ret = m->chat;
        return BC_OK;
    }
    for (unsigned i = 0; chat_names(i) != NULL && i < MODEL_CHATS_MAX; i++)
        if (strcmp(chat_names(i), name) == 0) {
            if (m->chat_by_name[i] == NULL)
                return err_set(e, BC_EUNSUPPORTED, "chat_template",
                               "model %s lacks the special tokens of template %s", m->name, name);
            *ret = m->chat_by_name[i];
            return BC_OK;
        }
    return err_set(e, BC_EUNKNOWN, "chat_template", "no chat template is called \"%.40s\"", name);
}

struct model_ref *models_ready(struct model_ref *m)
{
    while (m != NULL && m->state != MODEL_READY)
        m = m->next;
    return m;
}

uint64_t models_held(const struct engine *en)
{
    uint64_t held = 0;
    for (const struct model_ref *m = en->models; m != NULL; m = m->next)
        if (m->state == MODEL_READY)
            for (unsigned i = 0; i < MODEL_POOLS; i++)
                if (m->pools[i] != NULL)
                    held += pool_bytes_held(m->pools[i]);
    return held;
}

/* ---- unloading ---- */

void models_drop(struct engine *en, struct model_ref **pm)
{
    struct model_ref *m = *pm;
    MAGIC_OK(m, MODEL_REF_MAGIC);
    bc_assert(m->sessions == 0 && m->waiting == NULL);
    sharing_forget(en, m);
    struct model_ref **at = &en->models;
    while (*at != m)
        at = &(*at)->next;
    *at = m->next;
    if (en->default_model == m)
        en->default_model = NULL;
    for (unsigned i = 0; i < MODEL_POOLS; i++)
        if (m->pools[i] != NULL)
            pool_close(&m->pools[i]);
    for (unsigned i = 0; i < MODEL_CHATS_MAX; i++)
        if (m->chat_by_name[i] != NULL)
            chat_close(&m->chat_by_name[i]);
    if (m->chat != NULL)
        chat_close(&m->chat);
    weights_free(m);
    if (m->tok != NULL)
        tok_close(&m->tok);
    if (m->kn != NULL)
        kn_close(&m->kn);
    for (unsigned i = 0; i < N_LEDGER; i++)
        ledger_set(&m->owner, (enum ledger_kind)i, 0);
    ledger_owner_close(&m->owner);
    m->watch->taken = false;
    free(m->path);
    m->magic = 0;
    free(m);
    *pm = NULL;
}

int models_unload(struct engine *en, const char *name, struct err *e)
{
    char *full = name != NULL && looks_like_path(name) ? realpath(name, NULL) : NULL;
    struct model_ref *found = NULL;
    for (struct model_ref *m = en->models; m != NULL; m = m->next)
        if (models_known(m) && ((full != NULL && strcmp(m->path, full) == 0) ||
                                (name != NULL && strcmp(m->name, name) == 0)))
            found = m;
    free(full);
    if (found == NULL)
        return err_set(e, BC_EUNKNOWN, "model", "no loaded model is called \"%.200s\"",
                       name != NULL ? name : "");
    if (found == en->default_model)
        return err_set(e, BC_EBUSY, "model", "model %s is the daemon's default", found->name);
    if (!ref_idle(en, found))
        return err_set(e, BC_EBUSY, "model", "model %s is in use by %u sessions", found->name,
                       found->sessions);
    log_info("engine.models", "%s: unloaded", found->name);
    models_drop(en, &found);
    return BC_OK;
}

void models_close(struct engine *en)
{
    while (en->models != NULL) {
        struct model_ref *m = en->models;
        models_drop(en, &m);
    }
}
