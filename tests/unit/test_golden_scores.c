/* Counter-causal scores of the tiny models against an outside implementation's numbers: full and
 * fast, logit and log-probability, gaps 0 and 4, on a dense cache and on one with holes in its
 * positions; every backend and instruction set of this machine, f32 caches. Rows that see nothing
 * must be -INFINITY exactly (the goldens say -1e30), all others within TOLERANCE. */
#include "model_rig.h"

#define TOLERANCE 2e-3
#define ALWAYS_KEPT (-1e30f)

static const char *const archs[] = {"llama", "llama-rope3", "qwen2", "qwen3"};
static const uint32_t gaps[] = {0, 4};

static double compare(const float *got, const float *want, uint32_t n)
{
    double worst = 0;

    for (uint32_t i = 0; i < n; i++) {
        if (want[i] == ALWAYS_KEPT) {
            assert_true(got[i] == -INFINITY);
            continue;
        }
        double d = fabs((double)got[i] - want[i]);
        worst = d <= worst ? worst : isnan(d) ? INFINITY : d;
    }
    return worst;
}

/* All eight scores of one cache. */
static double check_scores(const struct rseq *s, const struct gguf *golden, const char *tag)
{
    float *got = malloc(s->n * sizeof *got);
    double worst = 0;

    for (unsigned k = 0; k < 8; k++) {
        bool fast = k & 1, logprob = k & 2;
        uint32_t gap = gaps[k >> 2], n;
        char name[64];
        snprintf(name, sizeof name, "%s.score.%s_%s.gap%u", tag, fast ? "fast" : "full",
                 logprob ? "logprob" : "logit", gap);
        const float *want = golden_f32(golden, name, &n);
        assert_int_equal(n, s->n);
        rseq_score(s, gap, fast, logprob, got);
        double d = compare(got, want, n);
        if (!(d <= TOLERANCE))
            fail_msg("%s of %s is off by %g", name, s->rig->info->name, d);
        worst = fmax(worst, d);
    }
    free(got);
    return worst;
}

static void open_arch(struct rig *r, const struct kn_options *ko, const char *arch,
                      uint32_t max_rows)
{
    char model[64];

    snprintf(model, sizeof model, "tiny-%s.gguf", arch);
    struct rig_options o = {
        .model = model,
        .backend = ko->backend,
        .isa = ko->isa,
        .threads = 2,
        .max_rows = max_rows,
        .max_out = 1,
        .kv_type = KN_F32,
        .hidden = true,
        .n_pages = 3,
    };
    rig_open(r, &o);
}

static void check_arch(const struct kn_options *ko, const char *arch)
{
    struct rig rig;
    struct rseq s;
    char name[64];
    uint32_t n, n_keep, n_more;

    snprintf(name, sizeof name, "golden-%s.gguf", arch);
    struct gguf *golden = golden_open(name);
    const int32_t *tokens = golden_i32(golden, "tokens", &n);
    const int32_t *keep = golden_i32(golden, "holed.keep", &n_keep);
    const int32_t *more = golden_i32(golden, "holed.more", &n_more);
    open_arch(&rig, ko, arch, 128);
    rseq_open(&s, &rig, 160);
    float *logits = malloc(rig.info->n_vocab * sizeof *logits);

    rseq_extend(&s, tokens, n, 0, 33, logits, true);
    double dense = check_scores(&s, golden, "dense");
    rseq_keep(&s, keep, n_keep);
    rseq_extend(&s, more, n_more, (int32_t)n, 33, logits, true);
    double holed = check_scores(&s, golden, "holed");
    print_message("%s/%s %s: off by at most %.2g (dense), %.2g (holed)\n", rig.kn->name,
                  rig.kn->isa, arch, dense, holed);
    free(logits);
    rseq_close(&s);
    rig_close(&rig);
    gguf_close(&golden);
}

static void scores_of_every_family_equal_the_goldens(void **state)
{
    struct kn_options ko;
    (void)state;

    for (unsigned i = 0; rig_backend(i, &ko); i++)
        for (unsigned a = 0; a < ARRAY_LEN(archs); a++)
            check_arch(&ko, archs[a]);
}

/* The same rows asked for in pieces of 1, 7, 30 and all, by models whose passes hold 5 rows or 128.
 */
static void a_refresh_may_be_cut_anywhere(void **state)
{
    static const uint32_t cuts[] = {1, 7, 30, 96};
    struct kn_options ko;
    struct err e = {0};
    (void)state;

    for (unsigned i = 0; rig_backend(i, &ko); i++)
        for (unsigned k = 0; k < 8; k++) {
            float whole[96], pieces[96], logits[384];
            bool fast = k & 1, logprob = k & 2;
            struct rig rig;
            struct rseq s;
            uint32_t n;
            struct gguf *golden = golden_open("golden-qwen2.gguf");
            const int32_t *tokens = golden_i32(golden, "tokens", &n);
            open_arch(&rig, &ko, "qwen2", k & 4 ? 5 : 128);
            rseq_open(&s, &rig, 160);
            rseq_extend(&s, tokens, n, 0, 5, logits, true);
            rseq_score(&s, 4, fast, logprob, whole);
            struct model_score job = {.seq = rseq_view(&s),
                                      .ids = s.ids,
                                      .positions = s.positions,
                                      .min_gap = 4,
                                      .fast = fast,
                                      .logprob = logprob};
            for (unsigned c = 0; c < ARRAY_LEN(cuts); c++) {
                for (uint32_t at = 0; at < n; at += cuts[c])
                    assert_int_equal(model_score_rows(rig.m, &job, at, BC_MIN(cuts[c], n - at),
                                                      pieces + at, &e),
                                     BC_OK);
                for (uint32_t r = 0; rig_is_device(&ko) && r < n; r++)
                    if (fabsf(pieces[r] - whole[r]) <= 1e-4f) /* -inf stays -inf */
                        pieces[r] = whole[r];
                assert_memory_equal(pieces, whole, sizeof whole);
            }
            rseq_close(&s);
            rig_close(&rig);
            gguf_close(&golden);
        }
}

/* Short sequences and wide gaps: nobody sees anything, or one row does. */
static void rows_that_see_nothing_score_minus_infinity(void **state)
{
    struct kn_options ko;
    (void)state;

    for (unsigned i = 0; rig_backend(i, &ko); i++) {
        static const int32_t tokens[] = {7, 9, 11};
        float got[3], logits[384];
        struct rig rig;
        struct rseq s;
        open_arch(&rig, &ko, "llama", 8);
        rseq_open(&s, &rig, 8);
        rseq_extend(&s, tokens, 3, 0, 3, logits, true);
        rseq_score(&s, 1, true, false, got);
        assert_true(isfinite(got[0]) && got[1] == -INFINITY && got[2] == -INFINITY);
        for (uint32_t gap = 2; gap < 5; gap++) {
            rseq_score(&s, gap, false, true, got);
            assert_true(got[0] == -INFINITY && got[1] == -INFINITY && got[2] == -INFINITY);
        }
        rseq_score(&s, UINT32_MAX, true, true, got);
        assert_true(got[0] == -INFINITY && got[1] == -INFINITY && got[2] == -INFINITY);
        rseq_close(&s);
        rig_close(&rig);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scores_of_every_family_equal_the_goldens),
        cmocka_unit_test(a_refresh_may_be_cut_anywhere),
        cmocka_unit_test(rows_that_see_nothing_score_minus_infinity),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
