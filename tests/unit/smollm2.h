/* smollm2.h: the default model against an outside implementation that computed in float32 with the same 4-bit weights:
 * next-token log-probabilities of 512 tokens, scores and the sets that they keep, on a dense cache and on one with
 * holes. Two programs use it, since one backend takes minutes: test_golden_smollm2_{ref,cpu}_model.c.
 *
 * The model is where BACKCAST_TEST_MODEL says, or where `backcast pull` puts it; without it the program is skipped. */
#ifndef BACKCAST_SMOLLM2_H
#define BACKCAST_SMOLLM2_H
#include "evict.h"
#include "model_rig.h"
#include <unistd.h>

#define SMOLLM2_FILE "SmolLM2-135M-Instruct.Q4_1.gguf"
#define SKIPPED 77

/* What a backend owes: mean |difference| of logprob_next, smallest overlap of a kept set, largest difference of a hidden
 * row's share in its own norm. */
struct smollm2_limits {
    double logprob, overlap;
    uint32_t greedy; /* tokens of gen.none that must come out; 0: not run */
};

struct smollm2 {
    const char *backend, *isa;
    struct smollm2_limits limits;
    struct rig rig;
    struct rseq seq;
    struct gguf *golden;
    float *logits; /* [64][n_vocab] */
    double worst_overlap;
};

static inline bool smollm2_find(char *ret, size_t len)
{
    const char *named = getenv("BACKCAST_TEST_MODEL"), *data = getenv("XDG_DATA_HOME"),
               *home = getenv("HOME");

    if (named)
        snprintf(ret, len, "%s", named);
    else if (data && data[0] == '/')
        snprintf(ret, len, "%s/backcast/models/" SMOLLM2_FILE, data);
    else
        snprintf(ret, len, "%s/.local/share/backcast/models/" SMOLLM2_FILE, home ? home : "");
    return access(ret, R_OK) == 0;
}

static inline void smollm2_open(struct smollm2 *w)
{
    char path[512];

    assert_true(smollm2_find(path, sizeof path));
    struct rig_options o = {
        .model = path,
        .backend = w->backend,
        .isa = w->isa,
        .max_rows = 512,
        .max_out = 64,
        .kv_type = KN_F32,
        .hidden = true,
        .n_pages = 10,
    };
    rig_open(&w->rig, &o);
    rseq_open(&w->seq, &w->rig, 640);
    w->golden = golden_open("golden-smollm2.gguf");
    w->logits = malloc((size_t)64 * w->rig.info->n_vocab * sizeof *w->logits);
    w->worst_overlap = 1;
}

static inline void smollm2_close(struct smollm2 *w)
{
    free(w->logits);
    gguf_close(&w->golden);
    rseq_close(&w->seq);
    rig_close(&w->rig);
}

/* The first 512 tokens, 64 at a time, each predicting the next. */
static inline void smollm2_prompt(struct smollm2 *w)
{
    uint32_t n, n_next, n_vocab = w->rig.info->n_vocab;
    const int32_t *tokens = golden_i32(w->golden, "tokens", &n);
    const float *next = golden_f32(w->golden, "logprob_next", &n_next);
    double sum = 0, worst = 0;

    assert_int_equal(n_next, n - 1);
    for (uint32_t at = 0; at < n; at += 64) {
        rseq_extend(&w->seq, tokens + at, BC_MIN(64, n - at), (int32_t)at, 64, w->logits, false);
        for (uint32_t i = at; i < BC_MIN(at + 64, n_next); i++) {
            const float *row = w->logits + (size_t)(i - at) * n_vocab;
            double d = fabs(logprob_of(row, n_vocab, tokens[i + 1]) - next[i]);
            sum += d;
            worst = fmax(worst, d);
        }
    }
    print_message("%s/%s logprob_next: off by %.4f on average (%.2f allowed), %.3f at most\n",
                  w->backend, w->rig.kn->isa, sum / n_next, w->limits.logprob, worst);
    assert_true(sum / n_next <= w->limits.logprob);
}

/* Share of the golden's kept indices that we keep too. */
static inline double overlap(const uint32_t *got, uint32_t n_got, const int32_t *want, uint32_t n)
{
    uint32_t both = 0;

    assert_int_equal(n_got, n);
    for (uint32_t i = 0, j = 0; i < n_got && j < n;) {
        if (got[i] == (uint32_t)want[j]) {
            both++;
            i++;
            j++;
        } else if (got[i] < (uint32_t)want[j]) {
            i++;
        } else {
            j++;
        }
    }
    return (double)both / n;
}

/* One golden kept set: half of the tokens stay. */
static inline void smollm2_kept(struct smollm2 *w, const char *name, const float *value,
                                uint32_t frozen, uint32_t recent)
{
    uint32_t n = w->seq.n, n_want;
    const int32_t *want = golden_i32(w->golden, name, &n_want);
    uint32_t *scratch = malloc(n * sizeof *scratch), *keep = malloc(n * sizeof *keep);

    uint32_t n_keep = select_keep(value, n, n / 2, frozen, recent, scratch, keep);
    double o = overlap(keep, n_keep, want, n_want);
    w->worst_overlap = fmin(w->worst_overlap, o);
    if (o < w->limits.overlap)
        fail_msg("%s %s: overlap %.4f (%.2f wanted)", w->backend, name, o, w->limits.overlap);
    free(scratch);
    free(keep);
}

/* fast_logit pooled over spans. */
static inline void smollm2_spans(struct smollm2 *w, const char *tag, uint32_t gap,
                                 const float *score)
{
    static const struct {
        uint32_t span;
        double quantile;
    } spans[] = {{5, 0.25}, {15, 0.25}, {15, 0.0}};
    float *value = malloc(w->seq.n * sizeof *value);
    char name[96];

    for (unsigned k = 0; k < ARRAY_LEN(spans); k++) {
        snprintf(name, sizeof name, "%s.keep.fast_logit.gap%u.span%u.quantile%d", tag, gap,
                 spans[k].span, (int)(100 * spans[k].quantile));
        select_span(score, w->seq.n, spans[k].span, spans[k].quantile, value);
        smollm2_kept(w, name, value, 0, 0);
    }
    free(value);
}

/* The four scores at both gaps, and every set that they keep. */
static inline void smollm2_scores(struct smollm2 *w, const char *tag)
{
    float *score = malloc(w->seq.n * sizeof *score);
    double off = 0;
    char name[96];

    for (unsigned k = 0; k < 8; k++) {
        bool fast = k & 1, logprob = k & 2;
        uint32_t gap = k & 4, n;
        const char *what = fast ? (logprob ? "fast_logprob" : "fast_logit")
                                : (logprob ? "full_logprob" : "full_logit");
        rseq_score(&w->seq, gap, fast, logprob, score);
        snprintf(name, sizeof name, "%s.score.%s.gap%u", tag, what, gap);
        const float *want = golden_f32(w->golden, name, &n);
        assert_int_equal(n, w->seq.n);
        for (uint32_t i = 0; i + gap + 1 < n; i++)
            off += fabs((double)score[i] - want[i]) / (8.0 * n);
        for (uint32_t i = n - gap - 1; i < n; i++)
            assert_true(score[i] == -INFINITY);
        snprintf(name, sizeof name, "%s.keep.%s.gap%u.frozen0.recent0", tag, what, gap);
        smollm2_kept(w, name, score, 0, 0);
        snprintf(name, sizeof name, "%s.keep.%s.gap%u.frozen4.recent8", tag, what, gap);
        smollm2_kept(w, name, score, 4, 8);
        if (k % 4 == 1)
            smollm2_spans(w, tag, gap, score);
    }
    print_message("%s %s: scores off by %.4f on average; smallest overlap so far %.4f\n",
                  w->backend, tag, off, w->worst_overlap);
    free(score);
}

/* Half the cache goes, 128 tokens more come. */
static inline void smollm2_holed(struct smollm2 *w)
{
    uint32_t n_keep, n_more, n, n_vocab = w->rig.info->n_vocab;
    const int32_t *keep = golden_i32(w->golden, "holed.keep", &n_keep);
    const int32_t *more = golden_i32(w->golden, "holed.more", &n_more);
    const float *want = golden_f32(w->golden, "holed.logits_last", &n);
    int32_t position = w->seq.positions[w->seq.n - 1] + 1;

    rseq_keep(&w->seq, keep, n_keep);
    rseq_extend(&w->seq, more, n_more, position, 64, w->logits, true);
    double d = max_diff(w->logits, want, n_vocab);
    int32_t top = argmax_of(want, n_vocab);
    print_message("%s holed.logits_last: off by at most %.3f; log-probability of the likeliest "
                  "token %.3f, golden %.3f\n",
                  w->backend, d, logprob_of(w->logits, n_vocab, top),
                  logprob_of(want, n_vocab, top));
    assert_true(fabs(logprob_of(w->logits, n_vocab, top) - logprob_of(want, n_vocab, top)) <
                5 * w->limits.logprob);
}

/* Greedy text with a full cache. */
static inline void smollm2_greedy(struct smollm2 *w)
{
    uint32_t n, n_want;
    const int32_t *prompt = golden_i32(w->golden, "gen.prompt", &n);
    const int32_t *want = golden_i32(w->golden, "gen.none", &n_want);
    uint32_t same = 0, stop = BC_MIN(w->limits.greedy, n_want);
    struct rseq s;

    rseq_open(&s, &w->rig, n + stop);
    rseq_extend(&s, prompt, n, 0, 32, w->logits, true);
    while (same < stop) {
        int32_t id = argmax_of(w->logits, w->rig.info->n_vocab);
        if (id != want[same++])
            fail_msg("%s greedy text: token %u is %d, golden %d", w->backend, same - 1, id,
                     want[same - 1]);
        rseq_extend(&s, &id, 1, (int32_t)s.n, 1, w->logits, true);
    }
    print_message("%s greedy text: %u tokens equal the golden's\n", w->backend, same);
    rseq_close(&s);
}

static inline void smollm2_run(struct smollm2 *w)
{
    smollm2_open(w);
    smollm2_prompt(w);
    smollm2_scores(w, "dense");
    smollm2_holed(w);
    smollm2_scores(w, "holed");
    if (w->limits.greedy)
        smollm2_greedy(w);
    smollm2_close(w);
}
#endif
