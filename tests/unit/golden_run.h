/* golden_run.h: greedy generation under a budget with the real cache, policies and model: the loop
 * that the engine runs for one session, as small as it can be. Also a reader of the list of cases
 * in a golden file. */
#ifndef BACKCAST_GOLDEN_RUN_H
#define BACKCAST_GOLDEN_RUN_H
#include "evict.h"
#include "model_rig.h"

#define RUN_ROWS_MAX 128 /* rows of a pass */
#define RUN_TOKENS_MAX 256
#define RUN_PRUNES_MAX 24
#define RUN_PAGES 4

/* One model on one backend, with a pool without and one with hidden rows. */
struct bench {
    struct kn *kn;
    struct model *model;
    const struct model_info *info;
    struct pool *pool[2]; /* [needs_hidden] */
    struct gguf *golden;
    char label[96];
};

static inline void bench_open(struct bench *b, const struct kn_options *ko, const char *arch,
                              const char *golden_prefix)
{
    struct kn_options one_thread = *ko; /* results do not depend on their number */
    struct model_options mo = {.max_rows = RUN_ROWS_MAX, .max_out = 4};
    struct gguf *g;
    struct err e = {0};
    char path[512], why[160] = "";
    memset(b, 0, sizeof *b);
    one_thread.threads = 1;
    if (kn_open(&b->kn, &one_thread, why, sizeof why))
        fail_msg("backend %s: %s", ko->backend, why);
    snprintf(path, sizeof path, TEST_VECTORS "/tiny-%s.gguf", arch);
    if (gguf_open(&g, path, &e) || model_open(&b->model, b->kn, g, &mo, NULL, NULL, &e))
        fail_msg("%s: %s: %s", path, e.field, e.text);
    gguf_close(&g);
    b->info = model_info(b->model);
    for (int hidden = 0; hidden < 2; hidden++) {
        struct kn_kv shape;
        model_kv_shape(b->model, KN_F32, hidden == 1, &shape);
        if (pool_open(&b->pool[hidden], b->kn, &shape, RUN_PAGES, &e))
            fail_msg("%s", e.text);
    }
    snprintf(path, sizeof path, "%s-%s.gguf", golden_prefix, arch);
    b->golden = golden_open(path);
    snprintf(b->label, sizeof b->label, "%s/%s %s", b->kn->name, b->kn->isa, arch);
}

static inline void bench_close(struct bench *b)
{
    gguf_close(&b->golden);
    for (int hidden = 0; hidden < 2; hidden++) {
        assert_int_equal(pool_bytes_held(b->pool[hidden]), 0);
        pool_close(&b->pool[hidden]);
    }
    model_close(&b->model);
    assert_int_equal(b->kn->bytes_arena, 0);
    kn_close(&b->kn);
}

static inline bool bench_is_gpu(const struct bench *b)
{
    return strncmp(b->kn->name, "simt", 4) == 0;
}

/* cpu without vector instructions imitates their arithmetic and takes twenty times as long, and simt runs a GPU's threads
 * one by one: fewer cuts of the same cases are tried there. */
static inline bool bench_is_slow(const struct bench *b)
{
    return (strcmp(b->kn->name, "cpu") == 0 && strcmp(b->kn->isa, "scalar") == 0) ||
           bench_is_gpu(b);
}

/* ---- one session -------------------------------------------------------------------------------
 */

struct session {
    struct bench *bench;
    struct evict *ev;
    struct seqcache *cache;
    uint64_t next;       /* stream index, and position, of the next token */
    float *logits;       /* of the newest token, [n_vocab] */
    float *query;        /* its last-layer query */
    uint32_t score_rows; /* of one evict_run call; 0: all at once */
    bool look;           /* ask for the scores before every prune, which must change nothing */
    uint32_t n_prunes;
    struct {
        uint32_t n, keep[RUN_TOKENS_MAX];
    } prune[RUN_PRUNES_MAX];
};

static inline void session_open(struct session *s, struct bench *b, const struct evict_params *p)
{
    struct err e = {0};
    memset(s, 0, sizeof *s);
    s->bench = b;
    if (evict_open(&s->ev, p, &e) || seqcache_open(&s->cache, b->pool[p->policy->needs_hidden], &e))
        fail_msg("%s: %s", e.field, e.text);
    s->logits = calloc(b->info->n_vocab, sizeof *s->logits);
    s->query = calloc((size_t)b->info->n_heads * b->info->head_dim, sizeof *s->query);
}

static inline void session_close(struct session *s)
{
    assert_int_equal(seqcache_rows_moved(s->cache), 0);
    evict_close(&s->ev);
    seqcache_close(&s->cache);
    free(s->logits);
    free(s->query);
}

/* Appends n tokens and runs the pass that writes their K and V. */
static inline void session_extend(struct session *s, const int32_t *ids, uint32_t n)
{
    const struct bench *b = s->bench;
    uint32_t before = seqcache_count(s->cache), last = n - 1;
    uint32_t seq[RUN_ROWS_MAX] = {0}, lo[RUN_ROWS_MAX] = {0}, hi[RUN_ROWS_MAX];
    struct err e = {0};
    assert_true(n > 0 && n <= RUN_ROWS_MAX);
    if (seqcache_reserve(s->cache, n, &e))
        fail_msg("%s", e.text);
    seqcache_append(s->cache, n, ids, (int32_t)s->next, s->next);
    s->next += n;
    for (uint32_t i = 0; i < n; i++)
        hi[i] = before + i + 1;
    struct kn_seq view = seqcache_view(s->cache);
    struct kn_batch batch = {.n_rows = n,
                             .n_seqs = 1,
                             .ids = ids,
                             .positions = seqcache_positions(s->cache) + before,
                             .seq = seq,
                             .lo = lo,
                             .hi = hi,
                             .slots = view.slots + before,
                             .seqs = &view};
    struct model_out out = {.rows = &last,
                            .n = 1,
                            .logits = s->logits,
                            .query_rows = &last,
                            .n_query = 1,
                            .queries = s->query};
    if (model_forward(b->model, &batch, &out, &e))
        fail_msg("%s", e.text);
    evict_note_query(s->ev, s->query, b->info->n_heads * b->info->head_dim);
    const struct evict_params *p = evict_params(s->ev);
    if (p->budget > 0) {
        size_t page_bytes = pool_page_bytes(seqcache_pool(s->cache));
        assert_true(seqcache_count(s->cache) <= p->budget);
        assert_true(seqcache_bytes_held(s->cache) <= budget_bytes(p, page_bytes));
    }
}

/* The record must say what the cache did. */
static inline void check_record(const struct session *s, const struct evict_record *r,
                                const uint64_t *stream_before, uint64_t held_before)
{
    size_t row_bytes = pool_row_bytes(seqcache_pool(s->cache)), n_range = 0, at = 0;
    uint32_t k = 0;
    assert_ptr_equal(r->policy, evict_params(s->ev)->policy);
    assert_int_equal(r->tokens_after, seqcache_count(s->cache));
    assert_int_equal(r->live_before, r->tokens_before * row_bytes);
    assert_int_equal(r->live_after, r->tokens_after * row_bytes);
    assert_int_equal(r->held_before, held_before);
    assert_int_equal(r->held_after, held_before); /* no page changes hands */
    for (uint32_t i = 0; i < r->tokens_before; i++) {
        if (k < r->tokens_after && r->keep[k] == i) {
            assert_int_equal(seqcache_stream(s->cache)[k++], stream_before[i]);
            continue;
        }
        assert_true(n_range < r->n_dropped);
        assert_int_equal(r->dropped[n_range].first + at, stream_before[i]);
        if (++at == r->dropped[n_range].count) {
            n_range++;
            at = 0;
        }
    }
    assert_int_equal(k, r->tokens_after);
    assert_int_equal(n_range, r->n_dropped);
}

static inline void session_prune(struct session *s)
{
    const struct evict_params *p = evict_params(s->ev);
    uint64_t before[RUN_TOKENS_MAX], held = seqcache_bytes_held(s->cache);
    uint32_t n = seqcache_count(s->cache);
    struct evict_run run = {.ev = s->ev, .cache = s->cache, .keep = p->keep};
    struct evict_record record;
    struct err e = {0};
    assert_true(n <= RUN_TOKENS_MAX && s->n_prunes < RUN_PRUNES_MAX);
    memcpy(before, seqcache_stream(s->cache), n * sizeof *before);
    if (s->look) {
        float value[RUN_TOKENS_MAX];
        assert_int_equal(evict_scores(s->ev, s->bench->model, s->cache, value, &e), 0);
    }
    do {
        assert_int_equal(seqcache_count(s->cache), n);
        evict_run(&run, 1, s->bench->model, s->score_rows);
        if (run.answer == EVICT_FAILED)
            fail_msg("%s: %s: %s", s->bench->label, run.err.field, run.err.text);
    } while (run.answer == EVICT_WORKING);
    record = run.record;
    assert_int_equal(record.tokens_before, n);
    check_record(s, &record, before, held);
    s->prune[s->n_prunes].n = record.tokens_after;
    memcpy(s->prune[s->n_prunes].keep, record.keep, record.tokens_after * sizeof *record.keep);
    s->n_prunes++;
}

/* Feeds tokens in chunks of at most `chunk`: prunes when the cache is full and something waits. */
static inline void session_feed(struct session *s, const int32_t *ids, uint32_t n, uint32_t chunk)
{
    while (n > 0) {
        uint32_t room = budget_room(evict_params(s->ev), seqcache_count(s->cache));
        if (room == 0) {
            session_prune(s);
            continue;
        }
        uint32_t m = BC_MIN(BC_MIN(chunk, n), room);
        session_extend(s, ids, m);
        ids += m;
        n -= m;
    }
}

/* The whole of a generation: ret [n_new]. */
static inline void session_generate(struct session *s, const int32_t *prompt, uint32_t n_prompt,
                                    uint32_t chunk, uint32_t n_new, int32_t *ret)
{
    session_feed(s, prompt, n_prompt, chunk);
    if (evict_params(s->ev)->trigger == EVICT_ON_PREFILL_END)
        session_prune(s);
    for (uint32_t i = 0; i < n_new; i++) {
        ret[i] = argmax_of(s->logits, s->bench->info->n_vocab);
        if (i + 1 < n_new)
            session_feed(s, &ret[i], 1, chunk);
    }
}

/* ---- the list of cases -------------------------------------------------------------------------
 */

/* One JSON object of the list, as text. */
struct gcase {
    const char *text;
    size_t len;
    char name[96];
};

/* The value of a field as text up to a comma or brace; NULL: the case has none. */
static inline const char *gcase_field(const struct gcase *c, const char *field)
{
    char key[64];
    int n = snprintf(key, sizeof key, "\"%s\": ", field);
    const char *at = memmem(c->text, c->len, key, (size_t)n);
    return at != NULL ? at + n : NULL;
}

static inline double gcase_number(const struct gcase *c, const char *field, double otherwise)
{
    const char *at = gcase_field(c, field);
    return at != NULL ? strtod(at, NULL) : otherwise;
}

static inline bool gcase_is(const struct gcase *c, const char *field, const char *value)
{
    const char *at = gcase_field(c, field);
    return at != NULL && strncmp(at, value, strlen(value)) == 0;
}

/* Steps to the next case; start with *at = 0. False at the end. */
static inline bool gcase_next(const struct gguf *g, size_t *at, struct gcase *ret)
{
    struct gguf_str s;
    struct err e = {0};
    if (gguf_get_str(g, "golden.cases", &s, &e))
        fail_msg("golden.cases: %s", e.text);
    const char *open = memchr(s.s + *at, '{', s.len - *at);
    if (open == NULL)
        return false;
    const char *close = memchr(open, '}', s.len - (size_t)(open - s.s));
    assert_non_null(close);
    *at = (size_t)(close + 1 - s.s);
    ret->text = open;
    ret->len = (size_t)(close + 1 - open);
    const char *name = gcase_field(ret, "name");
    assert_non_null(name);
    size_t len = strcspn(++name, "\"");
    assert_true(len < sizeof ret->name);
    memcpy(ret->name, name, len);
    ret->name[len] = '\0';
    return true;
}

/* Compares a kept set with the golden of that name. */
static inline void check_kept(const struct bench *b, const char *name, const uint32_t *keep,
                              uint32_t n)
{
    uint32_t n_golden;
    const int32_t *golden = golden_i32(b->golden, name, &n_golden);
    assert_int_equal(n, n_golden);
    for (uint32_t i = 0; i < n; i++)
        if (keep[i] != (uint32_t)golden[i])
            fail_msg("%s %s: entry %u is %u, not %d", b->label, name, i, keep[i], golden[i]);
}
#endif
