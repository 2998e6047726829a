/* A row's result depends on nothing but itself: prompts cut at every chunk size, batches of many
 * sequences and rows left out at the last layer give bit-identical logits, on ref and on cpu, with
 * float and with quantised weights. And a pass allocates nothing. */
#include "model_rig.h"
#include "sanitized.h"
#include <malloc.h>

#define N_TOKENS 70

/* Float, quantised, biased, normed heads; every cache type. */
static const struct {
    const char *model;
    enum kn_type kv_type;
} models[] = {
    {"tiny-llama.gguf", KN_F32},      {"tiny-llama-rope3.gguf", KN_BF16},
    {"tiny-qwen2.gguf", KN_F16},      {"tiny-qwen3.gguf", KN_Q8_0},
    {"tiny-llama-q8_0.gguf", KN_F16}, {"tiny-llama-q4_0.gguf", KN_F32},
    {"tiny-llama-q4_1.gguf", KN_F16}, {"tiny-qwen3.gguf", KN_Q8_Q4},
};

static void open_model(struct rig *r, const struct kn_options *ko, unsigned k, uint32_t threads)
{
    struct rig_options o = {
        .model = models[k].model,
        .backend = ko->backend,
        .isa = ko->isa,
        .threads = threads,
        .max_rows = 160,
        .max_out = 160,
        .kv_type = models[k].kv_type,
        .hidden = true,
        .n_pages = 6,
    };
    rig_open(r, &o);
}

static void make_tokens(int32_t *ret, uint32_t n, uint32_t seed)
{
    for (uint32_t i = 0; i < n; i++)
        ret[i] = (int32_t)(3 + (seed = seed * 1664525u + 1013904223u) / 65536 % 285);
}

static void each_backend_and_model(void (*f)(const struct kn_options *ko, unsigned k))
{
    struct kn_options ko;

    for (unsigned i = 0; rig_backend(i, &ko); i++)
        for (unsigned k = 0; !rig_is_device(&ko) && k < ARRAY_LEN(models); k++)
            f(&ko, k);
}

/* ---- scores in pieces ---- */

static void pieces(const struct kn_options *ko, unsigned k)
{
    static const uint32_t sizes[] = {3, 50};
    int32_t tokens[N_TOKENS];
    float want[N_TOKENS], got[N_TOKENS], got_other[N_TOKENS];
    struct rig rig;
    struct rseq s;
    struct err e = {0};

    if (k % 4 != 0) /* a float model, a quantised one */
        return;
    make_tokens(tokens, N_TOKENS, 4);
    open_model(&rig, ko, k, 2);
    rseq_open(&s, &rig, N_TOKENS);
    float *logits = malloc((size_t)N_TOKENS * rig.info->n_vocab * sizeof *logits);
    rseq_extend(&s, tokens, N_TOKENS, 0, N_TOKENS, logits, false);
    size_t bytes = rig.info->rest_rows * rig.info->d_model * sizeof(float);
    struct model_rest rest = {.x = malloc(bytes)}, other = {.x = malloc(bytes)};
    for (unsigned c = 0; c < 2 * ARRAY_LEN(sizes); c++) {
        struct model_score job = {.seq = rseq_view(&s),
                                  .ids = s.ids,
                                  .positions = s.positions,
                                  .min_gap = c % 3,
                                  .logprob = c % 2};
        struct model_part part = {.job = job, .rest = &rest, .end = N_TOKENS, .scores = got};
        /* of the same job: it lags behind, is given up and begins again */
        struct model_part lag = {.job = job, .rest = &other, .end = N_TOKENS, .scores = got_other};
        rseq_score(&s, job.min_gap, false, job.logprob, want);
        for (uint32_t round = 1; part.next < N_TOKENS; round++) {
            assert_int_equal(model_score_some(rig.m, &part, 1, sizes[c / 2], &e), BC_OK);
            if (round % 7 == 0) {
                model_rest_close(&other);
                lag.next = 0;
            } else if (round % 2 == 0) {
                assert_int_equal(model_score_some(rig.m, &lag, 1, 1, &e), BC_OK);
            }
        }
        assert_int_equal(rest.n, 0);
        assert_memory_equal(got, want, sizeof want);
        while (lag.next < N_TOKENS)
            assert_int_equal(model_score_some(rig.m, &lag, 1, 9, &e), BC_OK);
        assert_memory_equal(got_other, want, sizeof want);
    }
    free(rest.x);
    free(other.x);
    free(logits);
    rseq_close(&s);
    rig_close(&rig);
}

static void a_score_may_rest_between_two_layers(void **state)
{
    (void)state;
    each_backend_and_model(pieces);
}

/* ---- chunks ------------------------------------------------------------------------------------
 */

static void chunks(const struct kn_options *ko, unsigned k)
{
    static const uint32_t sizes[] = {N_TOKENS, 7, 65, 1, 13, 64};
    float *first = NULL, score_first[N_TOKENS];
    int32_t tokens[N_TOKENS];

    make_tokens(tokens, N_TOKENS, 1);
    for (unsigned c = 0; c < (SANITIZED ? 3 : ARRAY_LEN(sizes)); c++) {
        struct rig rig;
        struct rseq s;
        float score[N_TOKENS];
        open_model(&rig, ko, k, 1 + c % 3); /* nor does the number of threads matter */
        rseq_open(&s, &rig, N_TOKENS);
        size_t bytes = (size_t)N_TOKENS * rig.info->n_vocab * sizeof(float);
        float *logits = malloc(bytes);
        rseq_extend(&s, tokens, N_TOKENS, 0, sizes[c], logits, false);
        rseq_score(&s, 0, c % 2, c & 2, score);
        rseq_score(&s, 2, true, true, score);
        if (first) {
            assert_memory_equal(logits, first, bytes);
            assert_memory_equal(score, score_first, sizeof score);
            free(logits);
        } else {
            first = logits;
            memcpy(score_first, score, sizeof score);
        }
        rseq_close(&s);
        rig_close(&rig);
    }
    free(first);
}

static void a_prompt_may_be_cut_anywhere(void **state)
{
    (void)state;
    each_backend_and_model(chunks);
}

/* ---- batches -----------------------------------------------------------------------------------
 */

#define N_SEQS 8

/* Sequence q has its own tokens and is 20 + 7 q long. Alone: in one chunk. */
static uint32_t length_of(unsigned q)
{
    return 20 + 7 * q;
}

static void run_alone(const struct kn_options *ko, unsigned k, float **ret)
{
    int32_t tokens[N_TOKENS];
    struct rig rig;

    open_model(&rig, ko, k, 2);
    for (unsigned q = 0; q < N_SEQS; q++) {
        struct rseq s;
        uint32_t n = BC_MIN(length_of(q), N_TOKENS);
        make_tokens(tokens, n, 100 + q);
        rseq_open(&s, &rig, n);
        ret[q] = malloc((size_t)n * rig.info->n_vocab * sizeof **ret);
        rseq_extend(&s, tokens, n, 0, n, ret[q], false);
        rseq_close(&s);
    }
    rig_close(&rig);
}

/* All eight sequences in one rig, and the batch of one step. */
struct crowd {
    struct rig rig;
    struct rseq s[N_SEQS];
    int32_t tokens[N_SEQS][N_TOKENS];
    struct rbatch b;
    struct {
        unsigned q;
        uint32_t i;
    } want[160];
};

static void crowd_open(struct crowd *c, const struct kn_options *ko, unsigned k)
{
    open_model(&c->rig, ko, k, 2);
    rbatch_open(&c->b, 160);
    for (unsigned q = 0; q < N_SEQS; q++) {
        rseq_open(&c->s[q], &c->rig, N_TOKENS);
        make_tokens(c->tokens[q], N_TOKENS, 100 + q);
    }
}

static void crowd_close(struct crowd *c)
{
    for (unsigned q = 0; q < N_SEQS; q++)
        rseq_close(&c->s[q]);
    rbatch_close(&c->b);
    rig_close(&c->rig);
}

/* Each unfinished sequence gives a piece of 1 to 19 tokens, rows interleaved; logits are wanted of
 * some rows only, so the last layer runs on those. Returns false when every sequence is at its end.
 */
static bool crowd_step(struct crowd *c, uint32_t step)
{
    uint32_t from[N_SEQS], n_want = 0;

    for (unsigned q = 0; q < N_SEQS; q++) {
        struct rseq *s = &c->s[q];
        uint32_t left = BC_MIN(length_of(q), N_TOKENS) - s->n;
        uint32_t piece = BC_MIN(left, (q + step) % 3 ? 1 : 5 + (step * 7 + q) % 15);
        from[q] = s->n;
        rseq_push(s, c->tokens[q] + s->n, piece, (int32_t)s->n);
    }
    for (uint32_t j = 0; j < 20; j++)
        for (unsigned q = 0; q < N_SEQS; q++) {
            bool wanted = (step + j + q) % 4 != 1;
            if (from[q] + j >= c->s[q].n)
                continue;
            if (wanted) {
                c->want[n_want].q = q;
                c->want[n_want++].i = from[q] + j;
            }
            rbatch_row(&c->b, &c->s[q], q, from[q] + j, wanted);
        }
    return c->b.n_rows > 0;
}

static void together(const struct kn_options *ko, unsigned k)
{
    struct crowd c;
    float *alone[N_SEQS];

    run_alone(ko, k, alone);
    crowd_open(&c, ko, k);
    uint32_t n_vocab = c.rig.info->n_vocab, n_checked = 0;
    float *logits = malloc((size_t)160 * n_vocab * sizeof *logits);
    float *queries =
        malloc((size_t)160 * c.rig.info->n_heads * c.rig.info->head_dim * sizeof *queries);
    for (uint32_t step = 0; crowd_step(&c, step); step++) {
        uint32_t n_want = c.b.n_want;
        rbatch_run(&c.b, &c.rig, logits, queries);
        for (uint32_t w = 0; w < n_want; w++, n_checked++)
            assert_memory_equal(logits + (size_t)w * n_vocab,
                                alone[c.want[w].q] + (size_t)c.want[w].i * n_vocab,
                                n_vocab * sizeof *logits);
    }
    assert_true(n_checked > 200); /* of 342 rows, three in four */
    for (unsigned q = 0; q < N_SEQS; q++)
        free(alone[q]);
    free(logits);
    free(queries);
    crowd_close(&c);
}

static void a_batch_of_eight_sequences_equals_their_solo_runs(void **state)
{
    (void)state;
    each_backend_and_model(together);
}

/* ---- wanted rows -------------------------------------------------------------------------------
 */

/* Queries of rows whose logits nobody wants, logits of rows whose query nobody wants, and both. */
static void wanted(const struct kn_options *ko, unsigned k)
{
    static const uint32_t logit_rows[] = {2, 9, 10}, query_rows[] = {19, 2, 5};
    uint32_t every[20], seq[20] = {0}, lo[20] = {0}, hi[20];
    int32_t tokens[20];
    struct rig rig;
    struct rseq s;
    struct err e = {0};

    open_model(&rig, ko, k, 2);
    rseq_open(&s, &rig, 20);
    make_tokens(tokens, 20, 5);
    rseq_push(&s, tokens, 20, 0);
    for (uint32_t i = 0; i < 20; i++) {
        every[i] = i;
        hi[i] = i + 1;
    }
    uint32_t n_vocab = rig.info->n_vocab, width = rig.info->n_heads * rig.info->head_dim;
    float *all_logits = malloc((size_t)20 * n_vocab * sizeof(float));
    float *all_queries = malloc((size_t)20 * width * sizeof(float));
    float *some_logits = malloc((size_t)3 * n_vocab * sizeof(float));
    float *some_queries = malloc((size_t)3 * width * sizeof(float));
    struct kn_seq view = rseq_view(&s);
    struct kn_batch b = {.n_rows = 20,
                         .n_seqs = 1,
                         .ids = s.ids,
                         .positions = s.positions,
                         .seq = seq,
                         .lo = lo,
                         .hi = hi,
                         .slots = s.slots,
                         .seqs = &view};
    struct model_out all = {.rows = every,
                            .n = 20,
                            .logits = all_logits,
                            .query_rows = every,
                            .n_query = 20,
                            .queries = all_queries};
    struct model_out some = {.rows = logit_rows,
                             .n = 3,
                             .logits = some_logits,
                             .query_rows = query_rows,
                             .n_query = 3,
                             .queries = some_queries};
    struct model_out none = {0};
    assert_int_equal(model_forward(rig.m, &b, &all, &e), BC_OK);
    assert_int_equal(model_forward(rig.m, &b, &some, &e), BC_OK);
    for (uint32_t i = 0; i < 3; i++) {
        assert_memory_equal(some_logits + (size_t)i * n_vocab,
                            all_logits + (size_t)logit_rows[i] * n_vocab, n_vocab * sizeof(float));
        assert_memory_equal(some_queries + (size_t)i * width,
                            all_queries + (size_t)query_rows[i] * width, width * sizeof(float));
    }
    some.n = 0;
    memset(some_queries, 0, (size_t)3 * width * sizeof(float));
    assert_int_equal(model_forward(rig.m, &b, &some, &e), BC_OK);
    assert_memory_equal(some_queries, all_queries + (size_t)19 * width, width * sizeof(float));
    assert_int_equal(model_forward(rig.m, &b, &none, &e), BC_OK);
    free(all_logits);
    free(all_queries);
    free(some_logits);
    free(some_queries);
    rseq_close(&s);
    rig_close(&rig);
}

static void rows_left_out_change_nothing(void **state)
{
    (void)state;
    each_backend_and_model(wanted);
}

/* ---- memory ------------------------------------------------------------------------------------
 */

/* True when a prompt and both scores leave the heap as it was. */
static bool heap_unchanged(struct rig *rig, const int32_t *tokens, float *logits)
{
    struct mallinfo2 before = mallinfo2();
    float score[60];
    struct rseq s;

    rseq_open(&s, rig, 60);
    rseq_extend(&s, tokens, 60, 0, 20, logits, true);
    rseq_score(&s, 0, false, true, score);
    rseq_score(&s, 0, true, false, score);
    rseq_close(&s);
    struct mallinfo2 after = mallinfo2();
    return after.uordblks == before.uordblks && after.hblkhd == before.hblkhd;
}

static void passes(const struct kn_options *ko, unsigned k)
{
    struct rig rig;
    int32_t tokens[60];
    unsigned rounds = 0;

    open_model(&rig, ko, k, 2);
    make_tokens(tokens, 60, 9);
    float *logits = malloc(rig.info->n_vocab * sizeof *logits);
    size_t buffers = rig.kn->bytes_buffers, weights = rig.kn->bytes_weights;
    /* a backend's threads may still be starting in the first rounds; a pass that keeps something does so in all */
    while (!heap_unchanged(&rig, tokens, logits))
        assert_true(++rounds < 20);
    assert_int_equal(rig.kn->bytes_buffers, buffers);
    assert_int_equal(rig.kn->bytes_weights, weights);
    free(logits);
    rig_close(&rig);
}

static void a_pass_leaves_no_memory_behind(void **state)
{
    (void)state;
    each_backend_and_model(passes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_prompt_may_be_cut_anywhere),
        cmocka_unit_test(a_score_may_rest_between_two_layers),
        cmocka_unit_test(a_batch_of_eight_sequences_equals_their_solo_runs),
        cmocka_unit_test(rows_left_out_change_nothing),
        cmocka_unit_test(a_pass_leaves_no_memory_behind),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
