/* sampler.c: see sampler.h. A pick touches each logit a few times; only where a nucleus must be
 * cut does it order candidates, the likeliest of them, by a heap that is popped until the nucleus is full (usually
 * after a few dozen), never by a sort of the vocabulary. */
#include "sampler.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

int sampler_open(struct sampler *s, uint32_t n_vocab, struct err *e)
{
    bc_assert(n_vocab > 0);
    struct sampler fresh = {.n_vocab = n_vocab};
    fresh.bytes = (size_t)n_vocab * (sizeof *s->logit + sizeof *s->weight + sizeof *s->heap);
    fresh.logit = calloc(n_vocab, sizeof *s->logit);
    fresh.weight = calloc(n_vocab, sizeof *s->weight);
    fresh.heap = calloc(n_vocab, sizeof *s->heap);
    if (fresh.logit == NULL || fresh.weight == NULL || fresh.heap == NULL) {
        sampler_close(&fresh);
        return err_nomem(e, fresh.bytes);
    }
    *s = fresh;
    return BC_OK;
}

void sampler_close(struct sampler *s)
{
    free(s->logit);
    free(s->weight);
    free(s->heap);
    s->logit = NULL;
    s->weight = NULL;
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

/* Of eight neighbours each, so that the compiler may take them side by side. */
#define LARGEST_LANES 8
#define LARGEST_PIECE 64

/* The greatest of a piece, but for NaN; -inf if there is no other. */
static float piece_max(const float *x)
{
    float max[LARGEST_LANES], all = -INFINITY;
    for (int lane = 0; lane < LARGEST_LANES; lane++)
        max[lane] = -INFINITY;
    for (int i = 0; i < LARGEST_PIECE; i += LARGEST_LANES)
        for (int lane = 0; lane < LARGEST_LANES; lane++)
            max[lane] = x[i + lane] > max[lane] ? x[i + lane] : max[lane];
    for (int lane = 0; lane < LARGEST_LANES; lane++)
        all = max[lane] > all ? max[lane] : all;
    return all;
}

/* The lowest index of the largest value, NaN counted as -inf; 0 if all are. Only pieces that hold a larger one than those
 * before them are looked through, a dozen of a vocabulary. */
static uint32_t largest(const float *x, uint32_t n)
{
    uint32_t best = 0;
    float max = -INFINITY;
    for (uint32_t from = 0; from < n; from += LARGEST_PIECE) {
        uint32_t end = BC_MIN(from + LARGEST_PIECE, n);
        if (end - from == LARGEST_PIECE && !(piece_max(x + from) > max))
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
    for (uint32_t i = 0; i < s->n_vocab; i++)
        s->logit[i] = clean(logits[i]);
    if (opt->repeat_penalty != 1)
        for (uint32_t i = 0; i < n_recent; i++) {
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

/* Lists the candidates whose logit is at least `least`, and their weights' sum; returns how many. */
static uint32_t heap_fill(struct sampler *s, float least, double *ret_sum)
{
    uint32_t n = 0;
    double sum = 0;
    for (uint32_t i = 0; i < s->n_vocab; i++)
        if (s->logit[i] >= least && s->weight[i] > 0) {
            s->heap[n++] = i;
            sum += s->weight[i];
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
            c.sum += s->weight[id];
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
    uint32_t best = prepare(s, opt, logits, recent, n_recent), last = best, n = 0;
    float max = s->logit[best];
    if (opt->temperature == 0 || isinf(max))
        return (int32_t)best;
    double total = 0;
    for (uint32_t i = 0; i < s->n_vocab; i++) {
        double w = exp(((double)s->logit[i] - (double)max) / (double)opt->temperature);
        bool candidate = w > 0 && w >= (double)opt->min_p; /* the largest weight is 1 */
        s->weight[i] = candidate ? w : 0;
        total += s->weight[i];
        last = candidate ? i : last;
        n += candidate;
    }
    bc_assert(n > 0);
    double at = sampler_uniform(opt->seed, stream), sum = 0;
    if (opt->top_k == 0 && opt->top_p >= 1) {
        for (uint32_t i = 0; i < s->n_vocab; i++)
            if ((sum += s->weight[i]) > at * total)
                return (int32_t)i;
        return (int32_t)last;
    }
    struct nucleus c = pop_nucleus(s, opt, max, n, total);
    bc_assert(c.popped > 0);
    for (uint32_t i = 0; i < c.popped; i++)
        if ((sum += s->weight[s->heap[c.n - 1 - i]]) > at * c.sum)
            return (int32_t)s->heap[c.n - 1 - i];
    return (int32_t)s->heap[c.n - c.popped];
}

/* ---- log-probabilities ---- */

float sampler_logprob(const float *logits, uint32_t n_vocab, int32_t id, uint32_t n_top,
                      struct report_top *ret_top)
{
    bc_assert(id >= 0 && (uint32_t)id < n_vocab && n_top <= n_vocab);
    float max = -INFINITY;
    for (uint32_t i = 0; i < n_vocab; i++)
        max = logits[i] > max ? logits[i] : max;
    if (isinf(max))
        max = 0; /* nothing can be said: the sum below is 0 or infinite */
    double sum = 0;
    uint32_t n = 0;
    for (uint32_t i = 0; i < n_vocab; i++) {
        float l = clean(logits[i]);
        sum += exp((double)l - (double)max);
        if (n_top == 0 || (n == n_top && !(l > ret_top[n - 1].logprob)))
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
