/* Logits, hidden rows and last-layer attention of the tiny models against an outside
 * implementation's numbers, on every backend and instruction set of this machine, with f32 caches.
 * Then a cache with holes in its positions goes on, against the same. */
#include "model_rig.h"

#define TOLERANCE 2e-3 /* logits; hidden rows likewise */

static const char *const archs[] = {"llama", "llama-rope3", "qwen2", "qwen3"};

struct world {
    struct rig rig;
    struct rseq seq;
    struct gguf *golden;
    const int32_t *tokens;
    uint32_t n;
};

static void world_open(struct world *w, const struct kn_options *ko, const char *arch)
{
    char model[64], golden[64];

    snprintf(model, sizeof model, "tiny-%s.gguf", arch);
    snprintf(golden, sizeof golden, "golden-%s.gguf", arch);
    struct rig_options o = {
        .model = model,
        .backend = ko->backend,
        .isa = ko->isa,
        .threads = 2,
        .max_rows = 128,
        .max_out = 128,
        .kv_type = KN_F32,
        .hidden = true,
        .n_pages = 3,
    };
    rig_open(&w->rig, &o);
    rseq_open(&w->seq, &w->rig, 160);
    w->golden = golden_open(golden);
    w->tokens = golden_i32(w->golden, "tokens", &w->n);
}

static void world_close(struct world *w)
{
    rseq_close(&w->seq);
    gguf_close(&w->golden);
    rig_close(&w->rig);
}

static void check(struct world *w, const char *arch, const char *what, const float *got, uint32_t n,
                  double tolerance)
{
    uint32_t n_golden;
    const float *want = golden_f32(w->golden, what, &n_golden);

    assert_int_equal(n, n_golden);
    double d = max_diff(got, want, n);
    print_message("%s/%s %s %s: off by at most %.2g\n", w->rig.kn->name, w->rig.kn->isa, arch, what,
                  d);
    if (!(d <= tolerance))
        fail_msg("%s %s %s is off by %g (%g allowed)", w->rig.kn->name, arch, what, d, tolerance);
}

/* The newest token's last-layer query, seen again through attention_row. */
static void check_last_attention(struct world *w, const char *arch)
{
    const struct model_info *info = w->rig.info;
    float *query = malloc((size_t)info->n_heads * info->head_dim * sizeof *query);
    float *attention = malloc(w->seq.n * sizeof *attention);
    struct kn_seq view;
    struct rbatch b;

    /* the last token once more: the same K and V go to the same slot */
    rbatch_open(&b, 1);
    rbatch_row(&b, &w->seq, 0, w->seq.n - 1, true);
    rbatch_run(&b, &w->rig, NULL, query);
    view = rseq_view(&w->seq);
    w->rig.kn->ops->attention_row(w->rig.kn, &view, info->n_layers - 1, query, info->n_heads,
                                  1.0f / sqrtf((float)info->head_dim), attention);
    check(w, arch, "last_attention", attention, w->seq.n, 1e-4);
    rbatch_close(&b);
    free(query);
    free(attention);
}

static void check_dense(struct world *w, const char *arch)
{
    const struct model_info *info = w->rig.info;
    float *logits = malloc((size_t)w->n * info->n_vocab * sizeof *logits);
    float *hidden = malloc((size_t)w->n * info->d_model * sizeof *hidden);

    rseq_extend(&w->seq, w->tokens, w->n, 0, w->n, logits, false);
    rseq_hidden(&w->seq, hidden);
    check(w, arch, "logits", logits, w->n * info->n_vocab, TOLERANCE);
    check(w, arch, "hidden", hidden, w->n * info->d_model, TOLERANCE);
    check_last_attention(w, arch);
    free(hidden);
    free(logits);
}

static void check_holed(struct world *w, const char *arch)
{
    uint32_t n_keep, n_more;
    const int32_t *keep = golden_i32(w->golden, "holed.keep", &n_keep);
    const int32_t *more = golden_i32(w->golden, "holed.more", &n_more);
    float *logits = malloc(w->rig.info->n_vocab * sizeof *logits);

    rseq_keep(&w->seq, keep, n_keep);
    rseq_extend(&w->seq, more, n_more, (int32_t)w->n, 11, logits, true);
    check(w, arch, "holed.logits_last", logits, w->rig.info->n_vocab, TOLERANCE);
    free(logits);
}

static void logits_of_every_family_equal_the_goldens(void **state)
{
    struct kn_options ko;
    (void)state;

    for (unsigned i = 0; rig_backend(i, &ko); i++)
        for (unsigned a = 0; a < ARRAY_LEN(archs); a++) {
            struct world w;
            world_open(&w, &ko, archs[a]);
            check_dense(&w, archs[a]);
            check_holed(&w, archs[a]);
            world_close(&w);
        }
}

/* Half-precision caches are the default; they may not lose more than halves do. */
static void logits_with_a_half_precision_cache_stay_close(void **state)
{
    struct kn_options ko;
    (void)state;

    for (unsigned i = 0; rig_backend(i, &ko); i++)
        for (unsigned a = 0; a < ARRAY_LEN(archs); a++) {
            struct world w;
            world_open(&w, &ko, archs[a]);
            struct rig_options o = {.model = "",
                                    .backend = ko.backend,
                                    .isa = ko.isa,
                                    .threads = 2,
                                    .max_rows = 128,
                                    .max_out = 128,
                                    .kv_type = KN_F16,
                                    .hidden = true,
                                    .n_pages = 3};
            char model[64];
            struct rig half;
            struct rseq seq;
            snprintf(model, sizeof model, "tiny-%s.gguf", archs[a]);
            o.model = model;
            rig_open(&half, &o);
            rseq_open(&seq, &half, 160);
            size_t n = (size_t)w.n * half.info->n_vocab;
            uint32_t n_golden;
            float *logits = malloc(n * sizeof *logits);
            rseq_extend(&seq, w.tokens, w.n, 0, 50, logits, false);
            double d = max_diff(logits, golden_f32(w.golden, "logits", &n_golden), n);
            print_message("%s %s with f16: off by at most %.2g\n", half.kn->name, archs[a], d);
            assert_true(d < 0.1);
            free(logits);
            rseq_close(&seq);
            rig_close(&half);
            world_close(&w);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_of_every_family_equal_the_goldens),
        cmocka_unit_test(logits_with_a_half_precision_cache_stay_close),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
