/* sampler.c: see sampler.h. A pick touches each logit a few times; only where a nucleus must be
 * cut does it order candidates, the likeliest of them, by a heap that is popped until the nucleus is full (usually
 * after a few dozen), never by a sort of the vocabulary. */
#include "sampler.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define LANES 4   /* side by side, whatever the compiler makes of it */
#define PIECE 64u /* of a vocabulary: what is looked at as one */

typedef float floats __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t ints __attribute__((vector_size(LANES * sizeof(int32_t))));

int sampler_open(struct sampler *s, uint32_t n_vocab, struct err *e)
{
    bc_assert(n_vocab > 0);
    struct sampler fresh = {.n_vocab = n_vocab, .n_pieces = (n_vocab + PIECE - 1) / PIECE};
    size_t n = (size_t)fresh.n_pieces * PIECE;
    fresh.bytes = n * (sizeof *s->logit + sizeof *s->weight + sizeof *s->heap) +
                  fresh.n_pieces * sizeof *s->piece;
    fresh.logit = calloc(n, sizeof *s->logit);
    fresh.weight = calloc(n, sizeof *s->weight);
    fresh.piece = calloc(fresh.n_pieces, sizeof *s->piece);
    fresh.heap = calloc(n, sizeof *s->heap);
    if (fresh.logit == NULL || fresh.weight == NULL || fresh.piece == NULL || fresh.heap == NULL) {
        sampler_close(&fresh);
        return err_nomem(e, fresh.bytes);
    }
    for (size_t i = n_vocab; i < n; i++)
        fresh.logit[i] = -INFINITY;
    *s = fresh;
    return BC_OK;
}

void sampler_close(struct sampler *s)
{
    free(s->logit);
    free(s->weight);
    free(s->piece);
    free(s->heap);
    s->logit = NULL;
    s->weight = NULL;
    s->piece = NULL;
    s->heap = NULL;
    s->bytes = 0;
}

/* A 64-bit finaliser (each input bit flips each output bit with probability near 1/2). */
static uint64_t mix(uint64_t x)
{
    x ^= x >> 32;
    x *= 0xe9846af9b1a615dull;
    x ^= x >> 32;
    x *= 0xe9846af9b1a615dull;
    x ^= x >> 28;
    return x;
}

double sampler_uniform(uint64_t seed, uint64_t stream)
{
    /* two rounds: neighbouring seeds and neighbouring indices must not meet on a diagonal */
    uint64_t h = mix(mix(seed + 0x9e3779b97f4a7c15ull) ^ (stream * 0xd1342543de82ef95ull + 1));
    return (double)(h >> 11) * 0x1p-53;
}

/* ---- candidates ---- */

static float clean(float x)
{
    return isnan(x) ? -INFINITY : x;
}

static floats load(const float *x)
{
    floats v;
    memcpy(&v, x, sizeof v);
    return v;
}

static floats same(float x)
{
    return (floats){x, x, x, x};
}

/* Lanes where the mask has none become 0. */
static floats where(ints mask, floats x)
{
    return (floats)((ints)x & mask);
}

/* exp of what is <= 0: 2^n exp(r), |r| <= ln(2) / 2, by Taylor's series up to r^7 (the next term is below 2^-27). 0 below
 * EXP_LEAST and for NaN; 1 for 0. */
#define EXP_LEAST (-87.0f)
#define EXP_ROUND 0x1.8p23f /* added: the sum's low bits are the nearest integer */
static inline __attribute__((always_inline)) floats exp_lanes(floats x)
{
    ints live = x > same(EXP_LEAST);
    x = where(live, x);
    floats t = x * (float)M_LOG2E + same(EXP_ROUND), n = t - same(EXP_ROUND);
    floats r = x - n * 0x1.62ep-1f - n * 0x1.0bfbe8p-15f; /* ln 2 as 12 bits, and the rest */
    floats y = r * (1.0f / 5040) + 1.0f / 720;
    y = y * r + 1.0f / 120;
    y = y * r + 1.0f / 24;
    y = y * r + 1.0f / 6;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    return where(live, y * (floats)(((ints)t - (ints)same(EXP_ROUND) + 127) << 23));
}

/* The greatest of a piece, but for NaN; -inf if there is no other. Of eight neighbours each, so that the compiler takes them side
 * by side. */
static float piece_max(const float *x)
{
    float max[2 * LANES], all = -INFINITY;
    for (int lane = 0; lane < 2 * LANES; lane++)
        max[lane] = -INFINITY;
    for (uint32_t i = 0; i < PIECE; i += 2 * LANES)
        for (int lane = 0; lane < 2 * LANES; lane++)
            max[lane] = x[i + (uint32_t)lane] > max[lane] ? x[i + (uint32_t)lane] : max[lane];
    for (int lane = 0; lane < 2 * LANES; lane++)
        all = max[lane] > all ? max[lane] : all;
    return all;
}

/* The lowest index of the largest value, NaN counted as -inf; 0 if all are. Only pieces that hold a larger one than those
 * before them are looked through, a dozen of a vocabulary. */
static uint32_t largest(const float *x, uint32_t n)
{
    uint32_t best = 0;
    float max = -INFINITY;
    for (uint32_t from = 0; from < n; from += PIECE) {
        uint32_t end = BC_MIN(from + PIECE, n);
        if (end - from == PIECE && !(piece_max(x + from) > max))
            continue;
        for (uint32_t i = from; i < end; i++)
            if (x[i] > max) {
                max = x[i];
                best = i;
            }
    }
    return best;
}

/* Copies the logits, penalises what was said lately, and finds the lowest id of the largest one. */
static uint32_t prepare(struct sampler *s, const struct generate_options *opt, const float *logits,
                        const int32_t *recent, uint32_t n_recent)
{
    uint32_t i = 0;
    for (; i + LANES <= s->n_vocab; i += LANES) {
        floats v = load(logits + i);
        ints good = v == v;
        v = (floats)(((ints)v & good) | ((ints)same(-INFINITY) & ~good));
        memcpy(s->logit + i, &v, sizeof v);
    }
    for (; i < s->n_vocab; i++)
        s->logit[i] = clean(logits[i]);
    if (opt->repeat_penalty != 1)
        for (i = 0; i < n_recent; i++) {
            uint32_t id = (uint32_t)recent[i];
            bc_assert(id < s->n_vocab);
            float l = clean(logits[id]);
            if (s->logit[id] == l) /* else it was penalised already */
                s->logit[id] = l > 0 ? l / opt->repeat_penalty : l * opt->repeat_penalty;
        }
    return largest(s->logit, s->n_vocab);
}

static bool goes_before(const struct sampler *s, uint32_t a, uint32_t b)
{
    return s->logit[a] != s->logit[b] ? s->logit[a] > s->logit[b] : a < b;
}

static void sift_down(struct sampler *s, uint32_t at, uint32_t n)
{
    uint32_t id = s->heap[at];
    for (uint32_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && goes_before(s, s->heap[child + 1], s->heap[child]))
            child++;
        if (!goes_before(s, s->heap[child], id))
            break;
        s->heap[at] = s->heap[child];
    }
    s->heap[at] = id;
}

/* Weights of all candidates, sums of pieces, and of all. The largest weight is 1. */
static double weigh(struct sampler *s, const struct generate_options *opt, float max,
                    uint32_t *ret_candidates)
{
    const floats least = same(opt->min_p), t = same(opt->temperature);
    double total = 0;
    ints minus_n = {0};
    for (uint32_t p = 0; p < s->n_pieces; p++) {
        floats sum = {0};
        for (uint32_t i = p * PIECE; i < (p + 1) * PIECE; i += LANES) {
            floats w = exp_lanes((load(s->logit + i) - max) / t);
            ints candidate = (w > 0) & (w >= least);
            w = where(candidate, w);
            minus_n += candidate;
            sum += w;
            memcpy(s->weight + i, &w, sizeof w);
        }
        total += s->piece[p] = (double)((sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
    *ret_candidates = (uint32_t) - (minus_n[0] + minus_n[1] + minus_n[2] + minus_n[3]);
    return total;
}

/* The first whose weight and those of all before it are more than `enough`; the last one, if rounding leaves none. */
static uint32_t draw_of_all(const struct sampler *s, double enough)
{
    double sum = 0;
    uint32_t last = s->n_vocab;
    for (uint32_t p = 0; p < s->n_pieces; sum += s->piece[p++]) {
        double at = sum;
        for (uint32_t i = p * PIECE; sum + s->piece[p] > enough && i < (p + 1) * PIECE; i++)
            if (s->weight[i] > 0 && (at += (double)s->weight[i]) > enough)
                return i;
    }
    while (s->weight[--last] == 0)
        ;
    return last;
}

/* Lists the candidates whose logit is at least `least`, and their weights' sum; returns how many. */
static uint32_t heap_fill(struct sampler *s, float least, double *ret_sum)
{
    uint32_t n = 0;
    double sum = 0;
    for (uint32_t i = 0; i < s->n_vocab; i++)
        if (s->logit[i] >= least && s->weight[i] > 0) {
            s->heap[n++] = i;
            sum += (double)s->weight[i];
        }
    *ret_sum = sum;
    return n;
}

/* What a pick may choose from: the ids behind the end of the heap, in descending order from heap[n - 1] on. */
struct nucleus {
    uint32_t n, popped;
    double sum; /* of their weights */
};

/* Pops into the tail of the heap until there are `most`, or `enough` weight. Nearly always those are a few of the likeliest: a heap of
 * the whole vocabulary would take longer than all weights. So it begins with those that have 2^-8 of the largest one's weight, and takes more
 * only where they do not suffice; the order, and so the result, is the same. */
static struct nucleus pop_nucleus(struct sampler *s, const struct generate_options *opt, float max,
                                  uint32_t n_candidates, double total)
{
    static const float least[] = {-8, -24, -INFINITY}; /* powers of two */
    uint32_t most = opt->top_k > 0 ? BC_MIN(opt->top_k, n_candidates) : n_candidates;
    double enough = opt->top_p < 1 ? (double)opt->top_p * total : INFINITY;
    struct nucleus c = {0};
    for (uint32_t k = 0; k < ARRAY_LEN(least); k++) {
        double sum;
        c = (struct nucleus){0};
        c.n = heap_fill(s, max + least[k] * (float)M_LN2 * opt->temperature, &sum);
        if (c.n < most && sum < enough && k + 1 < ARRAY_LEN(least))
            continue;
        for (uint32_t i = c.n / 2; i-- > 0;)
            sift_down(s, i, c.n);
        while (c.popped < BC_MIN(most, c.n) && (c.popped == 0 || c.sum < enough)) {
            uint32_t last = c.n - 1 - c.popped, id = s->heap[0];
            s->heap[0] = s->heap[last];
            s->heap[last] = id;
            sift_down(s, 0, last);
            c.sum += (double)s->weight[id];
            c.popped++;
        }
        if (c.popped == most || c.sum >= enough)
            break;
    }
    return c;
}

int32_t sampler_pick(struct sampler *s, const struct generate_options *opt, const float *logits,
                     const int32_t *recent, uint32_t n_recent, uint64_t stream)
{
    if (opt->temperature == 0 && opt->repeat_penalty == 1)
        return (int32_t)largest(logits, s->n_vocab);
    uint32_t best = prepare(s, opt, logits, recent, n_recent), n;
    float max = s->logit[best];
    if (opt->temperature == 0 || isinf(max))
        return (int32_t)best;
    double total = weigh(s, opt, max, &n), at = sampler_uniform(opt->seed, stream), sum = 0;
    bc_assert(n > 0);
    if (opt->top_k == 0 && opt->top_p >= 1)
        return (int32_t)draw_of_all(s, at * total);
    struct nucleus c = pop_nucleus(s, opt, max, n, total);
    bc_assert(c.popped > 0);
    for (uint32_t i = 0; i < c.popped; i++)
        if ((sum += (double)s->weight[s->heap[c.n - 1 - i]]) > at * c.sum)
            return (int32_t)s->heap[c.n - 1 - i];
    return (int32_t)s->heap[c.n - c.popped];
}

/* ---- log-probabilities ---- */

/* Sum of exp(logit - max), NaN as -inf; a piece in floats, pieces in doubles. NaN if max is below one of them, infinite. */
static double exp_sum(const float *logits, uint32_t n, float max)
{
    double all = 0;
    uint32_t i = 0;
    while (i + LANES <= n) {
        floats sum = {0};
        for (uint32_t end = BC_MIN(i + PIECE, n); i + LANES <= end; i += LANES)
            sum += exp_lanes(load(logits + i) - max);
        all += (double)((sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
    for (; i < n; i++)
        all += (double)exp_lanes(same(logits[i] - max))[0];
    return all;
}

float sampler_logprob(const float *logits, uint32_t n_vocab, int32_t id, uint32_t n_top,
                      struct report_top *ret_top)
{
    bc_assert(id >= 0 && (uint32_t)id < n_vocab && n_top <= n_vocab);
    float max = logits[largest(logits, n_vocab)];
    if (isinf(max) || isnan(max))
        max = 0; /* nothing can be said: the sum below is 0 or infinite */
    double sum = exp_sum(logits, n_vocab, max);
    uint32_t n = 0;
    for (uint32_t i = 0; n_top > 0 && i < n_vocab; i++) {
        float l = clean(logits[i]);
        if (n == n_top && !(l > ret_top[n - 1].logprob))
            continue;
        uint32_t at = n < n_top ? n++ : n - 1;
        for (; at > 0 && l > ret_top[at - 1].logprob; at--)
            ret_top[at] = ret_top[at - 1];
        ret_top[at] = (struct report_top){.id = (int32_t)i, .logprob = l};
    }
    double lse = (double)max + log(sum);
    if (!isfinite(lse)) { /* logits of a broken model: nothing is probable */
        for (uint32_t i = 0; i < n; i++)
            ret_top[i].logprob = -INFINITY;
        return -INFINITY;
    }
    for (uint32_t i = 0; i < n; i++)
        ret_top[i].logprob = (float)((double)ret_top[i].logprob - lse);
    return (float)((double)clean(logits[id]) - lse);
}
