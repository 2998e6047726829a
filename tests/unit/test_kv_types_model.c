/* What a cache of fewer bytes costs the default model: the same 192 tokens cached as f32, f16, bf16, q8_0 and q8_q4. Held against f32:
 * how far the log-probability of the next token moves, on average and in sum, and which tokens the counter-causal scores keep.
 *
 * Most of the difference is not the cache's: activations are rounded to 8 bits before every product, and the smallest change
 * of an input tips some of them over. So all types lie equally far from f32; that q8_0 lies no farther is what is tested.
 * q8_q4 lies twice as far, and would keep fewer of the same tokens without the turn of its values: 0.13 and 0.82 were seen. */
#include "smollm2.h"

enum { N = 192, CHUNK = 96 };

/* What one type gave. */
struct outcome {
    double logprob[N];
    uint32_t keep[2][N / 2]; /* fast logit, full logit: half of the tokens, spans of 15 */
    size_t row_bytes;
};

static void keep_half(const float *score, uint32_t *ret)
{
    float pooled[N];
    uint32_t scratch[N];

    select_span(score, N, 15, 0.25, pooled);
    assert_int_equal(select_keep(pooled, N, N / 2, 4, 16, scratch, ret), N / 2);
}

static void run(const char *path, const int32_t *tokens, enum kn_type type, struct outcome *ret)
{
    struct rig rig;
    struct rseq s;
    struct rig_options o = {.model = path,
                            .backend = "cpu",
                            .max_rows = CHUNK,
                            .max_out = CHUNK,
                            .kv_type = type,
                            .hidden = true,
                            .n_pages = N / KN_PAGE_ROWS};
    float score[N];

    rig_open(&rig, &o);
    rseq_open(&s, &rig, N);
    uint32_t n_vocab = rig.info->n_vocab;
    float *logits = malloc((size_t)N * n_vocab * sizeof *logits);
    assert_non_null(logits);
    rseq_extend(&s, tokens, N, 0, CHUNK, logits, false);
    for (uint32_t i = 0; i + 1 < N; i++)
        ret->logprob[i] = logprob_of(logits + (size_t)i * n_vocab, n_vocab, tokens[i + 1]);
    rseq_score(&s, 0, true, false, score);
    keep_half(score, ret->keep[0]);
    rseq_score(&s, 0, false, false, score);
    keep_half(score, ret->keep[1]);
    ret->row_bytes = kn_kv_row_bytes(&rig.kv);
    free(logits);
    rseq_close(&s);
    rig_close(&rig);
}

static void a_smaller_cache_keeps_nearly_the_same_tokens(void **state)
{
    (void)state;
    static const struct {
        enum kn_type type;
        size_t row_bytes; /* 30 layers, 3 heads of 64, hidden rows of 576 */
        double off_max, overlap_min;
    } kinds[] = {{KN_F16, 23040 + 1156, 0.12, 0.9},
                 {KN_BF16, 23040 + 1156, 0.12, 0.9},
                 {KN_Q8_0, 12240 + 1156, 0.12, 0.9},
                 {KN_Q8_Q4, 9360 + 1156, 0.15, 0.87}};
    const double drift_max = 0.03;
    static struct outcome want, got;
    struct gguf *golden = golden_open("golden-smollm2.gguf");
    uint32_t n, fails = 0;
    const int32_t *tokens = golden_i32(golden, "tokens", &n);
    char path[512];

    assert_true(n >= N && smollm2_find(path, sizeof path));
    run(path, tokens, KN_F32, &want);
    assert_int_equal(want.row_bytes, 46080 + 2304);
    for (unsigned k = 0; k < ARRAY_LEN(kinds); k++) {
        double off = 0, drift = 0, worst = 1;
        run(path, tokens, kinds[k].type, &got);
        assert_int_equal(got.row_bytes, kinds[k].row_bytes);
        for (uint32_t i = 0; i + 1 < N; i++) {
            off += fabs(got.logprob[i] - want.logprob[i]) / (N - 1);
            drift += (got.logprob[i] - want.logprob[i]) / (N - 1);
        }
        for (unsigned j = 0; j < 2; j++)
            worst = fmin(worst, overlap(got.keep[j], N / 2, (int32_t *)want.keep[j], N / 2));
        print_message(
            "%s: log-probabilities off by %.4f on average (%.2f allowed), by %+.4f in sum "
            "(%.2f), overlap %.4f (%.2f wanted)\n",
            kn_kv_type_find(kinds[k].type)->name, off, kinds[k].off_max, drift, drift_max, worst,
            kinds[k].overlap_min);
        fails += off > kinds[k].off_max || fabs(drift) > drift_max || worst < kinds[k].overlap_min;
    }
    gguf_close(&golden);
    assert_int_equal(fails, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_smaller_cache_keeps_nearly_the_same_tokens),
    };
    char path[512];

    if (!smollm2_find(path, sizeof path)) {
        printf("skipped: no default model at %s (backcast pull fetches it)\n", path);
        return SKIPPED;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
