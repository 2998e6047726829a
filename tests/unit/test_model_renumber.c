/* model_renumber: a cache that was filled at positions 300, 301 ... and is renumbered is the cache of the same tokens at 0, 1 ...:
 * a rotation is relative, so a model does not see where a text begins. So keys of every layer, hidden rows and the logits of the
 * next token must be those of a fresh run, within 1e-4 of the largest key and 2e-3 of a logit (f32 caches). For every family: pairs,
 * halves, heads that are normed first, frequencies that the file divides. With gaps in between, keys of layer 0 (which come from the token
 * alone) are those of a fresh run. */
#include "model_rig.h"

#define N 60
#define AWAY 300

static const char *const files[] = {"tiny-llama.gguf", "tiny-llama-rope3.gguf", "tiny-qwen2.gguf",
                                    "tiny-qwen3.gguf"};

static void ids_fill(int32_t *ids, uint32_t n)
{
    uint32_t x = 5;
    for (uint32_t i = 0; i < n; i++) {
        x = x * 1664525u + 1013904223u;
        ids[i] = (int32_t)(3 + (x >> 8) % 280);
    }
}

static float *keys_of(const struct rseq *s, uint32_t layer)
{
    struct kn_seq view = rseq_view(s);
    float *ret =
        malloc((size_t)s->n * s->rig->info->n_kv_heads * s->rig->info->head_dim * sizeof *ret);
    s->rig->kn->ops->keys_read(s->rig->kn, &view, layer, 0, s->n, ret);
    return ret;
}

static void keys_alike(const struct rseq *a, const struct rseq *b, uint32_t layer, const char *what)
{
    size_t n = (size_t)a->n * a->rig->info->n_kv_heads * a->rig->info->head_dim;
    float *x = keys_of(a, layer), *y = keys_of(b, layer);
    double top = 0, off = max_diff(x, y, n);
    for (size_t i = 0; i < n; i++)
        top = fmax(top, fabs((double)y[i]));
    if (!(off <= 1e-4 * top))
        fail_msg("%s: keys of layer %u differ by %g, the largest is %g", what, layer, off, top);
    free(x);
    free(y);
}

static void renumber(struct rseq *s)
{
    struct kn_seq view = rseq_view(s);
    struct err e = {0};
    assert_int_equal(model_renumber(s->rig->m, &view, s->positions, &e), BC_OK);
    for (uint32_t i = 0; i < s->n; i++)
        s->positions[i] = (int32_t)i;
}

static void far_run_is_a_fresh_one(struct rig *r, const char *what)
{
    int32_t ids[N + 1];
    uint32_t n_vocab = r->info->n_vocab;
    float *a = malloc(n_vocab * sizeof *a), *b = malloc(n_vocab * sizeof *b);
    struct rseq far, fresh;
    ids_fill(ids, N + 1);
    rseq_open(&far, r, N + 1);
    rseq_open(&fresh, r, N + 1);
    rseq_extend(&far, ids, N, AWAY, 16, a, true);
    rseq_extend(&fresh, ids, N, 0, 16, b, true);
    renumber(&far);
    for (uint32_t l = 0; l < r->info->n_layers; l++)
        keys_alike(&far, &fresh, l, what);
    rseq_extend(&far, ids + N, 1, N, 1, a, true);
    rseq_extend(&fresh, ids + N, 1, N, 1, b, true);
    if (max_diff(a, b, n_vocab) > 2e-3)
        fail_msg("%s: logits differ by %g", what, max_diff(a, b, n_vocab));
    float *x = malloc(far.n * sizeof *x), *y = malloc(far.n * sizeof *y);
    rseq_score(&far, 0, true, false, x); /* queries of stored hidden rows, at the new positions */
    rseq_score(&fresh, 0, true, false, y);
    for (uint32_t i = 0; i + 1 < far.n; i++)
        if (fabs((double)x[i] - (double)y[i]) > 2e-3)
            fail_msg("%s: the score of token %u is %g, fresh %g", what, i, (double)x[i],
                     (double)y[i]);
    rseq_close(&far);
    rseq_close(&fresh);
    free(a);
    free(b);
    free(x);
    free(y);
}

/* Every third token of a long run stays; renumbered, its first layer's keys are those of a run of these tokens. */
static void gaps_close(struct rig *r, const char *what)
{
    int32_t ids[N], kept[N], keep[N];
    uint32_t n = 0;
    float *logits = malloc(r->info->n_vocab * sizeof *logits);
    struct rseq far, fresh;
    ids_fill(ids, N);
    rseq_open(&far, r, N);
    rseq_open(&fresh, r, N);
    rseq_extend(&far, ids, N, 0, 16, logits, true);
    for (uint32_t i = 0; i < N; i++)
        if (i < 4 || i % 3 == 0) {
            keep[n] = (int32_t)i;
            kept[n++] = ids[i];
        }
    rseq_keep(&far, keep, n);
    renumber(&far);
    rseq_extend(&fresh, kept, n, 0, 16, logits, true);
    keys_alike(&far, &fresh, 0, what);
    rseq_close(&far);
    rseq_close(&fresh);
    free(logits);
}

static void a_renumbered_cache_is_that_of_a_fresh_run(void **state)
{
    (void)state;
    struct kn_options o;
    for (unsigned b = 0; rig_backend(b, &o); b++)
        for (size_t f = 0; f < ARRAY_LEN(files); f++) {
            struct rig r;
            char what[128];
            rig_open(&r, &(struct rig_options){.model = files[f],
                                               .backend = o.backend,
                                               .isa = o.isa,
                                               .threads = 2,
                                               .max_rows = 16,
                                               .kv_type = KN_F32,
                                               .hidden = true,
                                               .n_pages = 4});
            snprintf(what, sizeof what, "%s on %s %s", files[f], r.kn->name, r.kn->isa);
            if (r.kn->ops->kv_rotate != NULL) {
                far_run_is_a_fresh_one(&r, what);
                gaps_close(&r, what);
            }
            rig_close(&r);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_renumbered_cache_is_that_of_a_fresh_run),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
