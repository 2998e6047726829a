/* model_rig.h: a model on a backend with pages opened by hand, and sequences over scattered slots:
 * what the tests of daemon/model stand on. No cache, no policy: slots come from one shuffled list,
 * so that neighbours in a sequence never lie side by side. */
#ifndef BACKCAST_MODEL_RIG_H
#define BACKCAST_MODEL_RIG_H
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "gguf.h"
#include "model.h"

struct rig_options {
    const char *model;       /* path; or a name in the vectors' folder */
    const struct gguf *file; /* or a file that is open already */
    const char *backend, *isa;
    uint32_t threads, max_rows, max_out;
    enum kn_type kv_type;
    bool hidden;
    uint32_t n_pages;
};

struct rig {
    struct kn *kn;
    struct model *m;
    const struct model_info *info;
    struct kn_kv kv;
    uint32_t n_pages;
    uint32_t *free_slots, n_free;
};

/* One cached sequence. */
struct rseq {
    struct rig *rig;
    uint32_t n, cap;
    int32_t *ids, *positions;
    uint32_t *slots;
};

/* simt runs a GPU's threads one by one: once is enough, and under sanitizers the kernels' own tests are. */
static inline bool rig_skips(const char *backend)
{
#if defined(__SANITIZE_ADDRESS__)
    return strncmp(backend, "simt", 4) == 0;
#else
    return strcmp(backend, "simt-race") == 0;
#endif
}

/* Every backend and instruction set that this machine can run, each once. Returns false past the
 * end. */
static inline bool rig_backend(unsigned i, struct kn_options *ret)
{
    static const char *const isas[] = {NULL, "scalar", "avx2", "avx512-vnni", "avx512-bf16"};
    static char seen[32][80];
    unsigned n = 0;

    for (unsigned b = 0; kn_backend_name(b); b++)
        for (unsigned k = 0; !rig_skips(kn_backend_name(b)) && k < ARRAY_LEN(isas); k++) {
            struct kn_options o = {.backend = kn_backend_name(b), .isa = isas[k]};
            struct kn *kn;
            char name[80];
            bool old = false;
            if (kn_open(&kn, &o, NULL, 0))
                continue;
            snprintf(name, sizeof name, "%s/%s", kn->name, kn->isa);
            kn_close(&kn);
            for (unsigned j = 0; j < n; j++)
                old = old || strcmp(seen[j], name) == 0;
            if (old || n == ARRAY_LEN(seen))
                continue;
            strcpy(seen[n], name);
            if (n++ == i) {
                *ret = o;
                return true;
            }
        }
    return false;
}

/* The bits of a row depend on the rows beside it: other kernels for other numbers of rows. */
static inline bool rig_is_device(const struct kn_options *o)
{
    return strcmp(o->backend, "cuda") == 0 || strncmp(o->backend, "simt", 4) == 0;
}

static inline void rig_path(char *ret, size_t len, const char *model)
{
    snprintf(ret, len, model[0] == '/' ? "%s" : TEST_VECTORS "/%s", model);
}

static inline void rig_open(struct rig *r, const struct rig_options *o)
{
    struct kn_options ko = {.backend = o->backend, .isa = o->isa, .threads = o->threads};
    struct model_options mo = {.max_rows = o->max_rows, .max_out = o->max_out};
    struct gguf *own = NULL;
    struct err e = {0};
    char path[512] = "", why[160] = "";
    uint32_t seed = 12345;

    memset(r, 0, sizeof *r);
    if (kn_open(&r->kn, &ko, why, sizeof why))
        fail_msg("backend %s: %s", o->backend, why);
    if (!o->file) {
        rig_path(path, sizeof path, o->model);
        if (gguf_open(&own, path, &e))
            fail_msg("%s: %s: %s", path, e.field, e.text);
    }
    if (model_open(&r->m, r->kn, own ? own : o->file, &mo, NULL, NULL, &e))
        fail_msg("%s: %s: %s", path, e.field, e.text);
    gguf_close(&own); /* nothing of it is kept */
    r->info = model_info(r->m);
    model_kv_shape(r->m, o->kv_type, o->hidden, &r->kv);
    r->n_pages = o->n_pages;
    assert_int_equal(r->kn->ops->arena_open(r->kn, r->kv.stride, r->n_pages, &r->kv.base), 0);
    for (uint32_t p = 0; p < r->n_pages; p++)
        assert_int_equal(r->kn->ops->arena_commit(r->kn, r->kv.base, r->kv.stride, p), 0);
    r->n_free = r->n_pages * KN_PAGE_ROWS;
    r->free_slots = malloc(r->n_free * sizeof *r->free_slots);
    for (uint32_t i = 0; i < r->n_free; i++) {
        uint32_t j = (seed = seed * 1664525u + 1013904223u) % (i + 1);
        r->free_slots[i] = r->free_slots[j];
        r->free_slots[j] = i;
    }
}

static inline void rig_close(struct rig *r)
{
    for (uint32_t p = 0; p < r->n_pages; p++)
        r->kn->ops->arena_release(r->kn, r->kv.base, r->kv.stride, p);
    r->kn->ops->arena_close(r->kn, r->kv.base, r->kv.stride, r->n_pages);
    model_close(&r->m);
    assert_int_equal(r->kn->bytes_buffers, 0);
    assert_int_equal(r->kn->bytes_weights, 0);
    assert_int_equal(r->kn->bytes_arena, 0);
    kn_close(&r->kn);
    free(r->free_slots);
}

static inline void rseq_open(struct rseq *s, struct rig *r, uint32_t cap)
{
    *s = (struct rseq){.rig = r, .cap = cap};
    s->ids = malloc(cap * sizeof *s->ids);
    s->positions = malloc(cap * sizeof *s->positions);
    s->slots = malloc(cap * sizeof *s->slots);
}

static inline void rseq_close(struct rseq *s)
{
    for (uint32_t i = 0; i < s->n; i++)
        s->rig->free_slots[s->rig->n_free++] = s->slots[i];
    free(s->ids);
    free(s->positions);
    free(s->slots);
}

/* Appends n tokens at positions from `position`; the pass that fills their rows follows. */
static inline void rseq_push(struct rseq *s, const int32_t *ids, uint32_t n, int32_t position)
{
    assert_true(s->n + n <= s->cap && n <= s->rig->n_free);
    for (uint32_t i = 0; i < n; i++, s->n++) {
        s->ids[s->n] = ids[i];
        s->positions[s->n] = position + (int32_t)i;
        s->slots[s->n] = s->rig->free_slots[--s->rig->n_free];
    }
}

/* Keeps these cache indices (ascending). */
static inline void rseq_keep(struct rseq *s, const int32_t *keep, uint32_t n)
{
    uint32_t at = 0;

    for (uint32_t i = 0; i < s->n; i++)
        if (at < n && (uint32_t)keep[at] == i) {
            s->ids[at] = s->ids[i];
            s->positions[at] = s->positions[i];
            s->slots[at++] = s->slots[i];
        } else {
            s->rig->free_slots[s->rig->n_free++] = s->slots[i];
        }
    assert_int_equal(at, n);
    s->n = n;
}

static inline struct kn_seq rseq_view(const struct rseq *s)
{
    return (struct kn_seq){.kv = &s->rig->kv, .slots = s->slots, .n = s->n};
}

/* A batch under construction: rows of any sequences, in any order. */
struct rbatch {
    struct kn_seq seqs[8];
    uint32_t n_rows, n_seqs, n_want, cap;
    int32_t *ids, *positions;
    uint32_t *seq, *lo, *hi, *slots, *want;
};

static inline void rbatch_open(struct rbatch *b, uint32_t cap)
{
    memset(b, 0, sizeof *b);
    b->cap = cap;
    b->ids = malloc(7 * cap * sizeof *b->ids);
    b->positions = b->ids + cap;
    b->seq = (uint32_t *)(b->positions + cap);
    b->lo = b->seq + cap;
    b->hi = b->lo + cap;
    b->slots = b->hi + cap;
    b->want = b->slots + cap;
}

static inline void rbatch_close(struct rbatch *b)
{
    free(b->ids);
}

/* Row for cache index i of s, which is sequence number `k` of the batch. */
static inline void rbatch_row(struct rbatch *b, const struct rseq *s, uint32_t k, uint32_t i,
                              bool want)
{
    uint32_t r = b->n_rows++;

    assert_true(r < b->cap && k < ARRAY_LEN(b->seqs));
    b->seqs[k] = rseq_view(s);
    b->n_seqs = BC_MAX(b->n_seqs, k + 1);
    b->ids[r] = s->ids[i];
    b->positions[r] = s->positions[i];
    b->slots[r] = s->slots[i];
    b->seq[r] = k;
    b->lo[r] = 0;
    b->hi[r] = i + 1;
    if (want)
        b->want[b->n_want++] = r;
}

/* Runs the batch; logits [n_want][n_vocab]; queries (may be NULL): of the wanted rows. */
static inline void rbatch_run(struct rbatch *b, struct rig *r, float *logits, float *queries)
{
    struct err e = {0};
    struct kn_batch kb = {
        .n_rows = b->n_rows,
        .n_seqs = b->n_seqs,
        .ids = b->ids,
        .positions = b->positions,
        .seq = b->seq,
        .lo = b->lo,
        .hi = b->hi,
        .slots = b->slots,
        .seqs = b->seqs,
    };
    struct model_out out = {
        .rows = b->want,
        .n = logits ? b->n_want : 0,
        .logits = logits,
        .query_rows = b->want,
        .n_query = queries ? b->n_want : 0,
        .queries = queries,
    };

    assert_int_equal(model_forward(r->m, &kb, &out, &e), BC_OK);
    b->n_rows = b->n_seqs = b->n_want = 0;
}

/* Appends n tokens in chunks of `chunk`; logits [n][n_vocab] of all of them, or (last_only)
 * [1][n_vocab]. */
static inline void rseq_extend(struct rseq *s, const int32_t *ids, uint32_t n, int32_t position,
                               uint32_t chunk, float *logits, bool last_only)
{
    struct rbatch b;

    rbatch_open(&b, chunk);
    for (uint32_t done = 0; done < n;) {
        uint32_t m = BC_MIN(chunk, n - done), first = s->n;
        rseq_push(s, ids + done, m, position + (int32_t)done);
        for (uint32_t i = 0; i < m; i++)
            rbatch_row(&b, s, 0, first + i, !last_only || done + i + 1 == n);
        float *at = last_only ? (done + m == n ? logits : NULL)
                              : logits + (size_t)done * s->rig->info->n_vocab;
        rbatch_run(&b, s->rig, at, NULL);
        done += m;
    }
    rbatch_close(&b);
}

static inline void rseq_score(const struct rseq *s, uint32_t min_gap, bool fast, bool logprob,
                              float *ret)
{
    struct err e = {0};
    struct model_score job = {
        .seq = rseq_view(s),
        .ids = s->ids,
        .positions = s->positions,
        .min_gap = min_gap,
        .fast = fast,
        .logprob = logprob,
    };

    assert_int_equal(model_score_rows(s->rig->m, &job, 0, s->n, ret, &e), BC_OK);
}

/* The stored hidden rows of the whole sequence, [n][d_model]. */
static inline void rseq_hidden(const struct rseq *s, float *ret)
{
    const struct kn_ops *ops = s->rig->kn->ops;
    size_t bytes = (size_t)s->n * s->rig->info->d_model * sizeof *ret;
    struct kn_seq view = rseq_view(s);
    uint32_t *zeros = calloc(s->n, sizeof *zeros);
    struct kn_batch b = {
        .n_rows = s->n,
        .n_seqs = 1,
        .ids = s->ids,
        .positions = s->positions,
        .seq = zeros,
        .lo = zeros,
        .hi = zeros,
        .seqs = &view,
    };
    void *buf;

    assert_int_equal(ops->buf_alloc(s->rig->kn, bytes, &buf), 0);
    ops->batch_begin(s->rig->kn, &b);
    ops->hidden_read(s->rig->kn, &b, s->slots, buf);
    ops->download(s->rig->kn, ret, buf, bytes);
    ops->batch_end(s->rig->kn, &b);
    ops->buf_free(s->rig->kn, buf, bytes);
    free(zeros);
}

/* ---- golden files ------------------------------------------------------------------------------
 */

static inline struct gguf *golden_open(const char *file)
{
    struct gguf *g;
    struct err e = {0};
    char path[512];

    rig_path(path, sizeof path, file);
    if (gguf_open(&g, path, &e))
        fail_msg("%s: %s", path, e.text);
    return g;
}

static inline const void *golden_get(const struct gguf *g, const char *name, enum kn_type type,
                                     uint32_t *ret_n)
{
    const struct gguf_tensor *t = gguf_tensor_find(g, name);

    if (!t || t->type != type)
        fail_msg("golden tensor %s is missing or of another type", name);
    *ret_n = (uint32_t)(t->dims[0] * t->dims[1]);
    return t->data;
}

static inline const float *golden_f32(const struct gguf *g, const char *name, uint32_t *ret_n)
{
    return golden_get(g, name, KN_F32, ret_n);
}

static inline const int32_t *golden_i32(const struct gguf *g, const char *name, uint32_t *ret_n)
{
    return golden_get(g, name, KN_I32, ret_n);
}

/* Largest |a - b|; NaN anywhere gives infinity. */
static inline double max_diff(const float *a, const float *b, size_t n)
{
    double worst = 0;

    for (size_t i = 0; i < n; i++) {
        double d = fabs((double)a[i] - b[i]);
        worst = d <= worst ? worst : isnan(d) ? INFINITY : d;
    }
    return worst;
}

/* log softmax(logits)[id] */
static inline double logprob_of(const float *logits, uint32_t n_vocab, int32_t id)
{
    double max = -INFINITY, sum = 0;

    for (uint32_t v = 0; v < n_vocab; v++)
        max = fmax(max, logits[v]);
    for (uint32_t v = 0; v < n_vocab; v++)
        sum += exp(logits[v] - max);
    return logits[id] - max - log(sum);
}

static inline int32_t argmax_of(const float *logits, uint32_t n_vocab)
{
    uint32_t best = 0;

    for (uint32_t v = 1; v < n_vocab; v++)
        if (logits[v] > logits[best])
            best = v;
    return (int32_t)best;
}
#endif
