/* sampler.h: from one row of logits to the next token id. Pure functions; no RNG state.
 *
 *   logits -> repetition penalty -> (temperature 0: argmax)
 *          -> softmax at the temperature -> min_p -> top_k and top_p in descending order -> draw
 *
 * The draw is a hash of (seed, stream index of the token to come), so a token does not depend on
 * who shares the pass, nor on how often the session was cut and continued. Weights are floats (exp to
 * 2^-21 of itself); they are summed by pieces of 64, and pieces in double, in one fixed order that is the
 * same on every processor. Ties go to the lowest id; NaN counts as minus infinity.
 */
#ifndef BACKCAST_SAMPLER_H
#define BACKCAST_SAMPLER_H
#include "engine.h"

#define SAMPLER_REPEAT_MAX 1024 /* repeat_last: tokens looked back, at most */

/* Work space of one pick, of n_vocab entries up to whole pieces; made with the model. */
struct sampler {
    uint32_t n_vocab, n_pieces;
    float *logit;  /* after the penalty; behind the vocabulary -inf */
    float *weight; /* exp((logit - max) / temperature); 0: not to be picked */
    double *piece; /* sum of the weights of a piece */
    uint32_t *heap;
    size_t bytes;
};
int sampler_open(struct sampler *s, uint32_t n_vocab, struct err *e);
void sampler_close(struct sampler *s);

/* recent: the newest n_recent tokens of the stream, in any order (the penalty looks at which, not
 * how often). stream: the index that the picked token will have. */
int32_t sampler_pick(struct sampler *s, const struct generate_options *opt, const float *logits,
                     const int32_t *recent, uint32_t n_recent, uint64_t stream);
/* [0, 1): 53 bits of a hash of (seed, stream). */
double sampler_uniform(uint64_t seed, uint64_t stream);

/* Natural log-probability of id under the raw logits, and the n_top most probable ids, descending. */
float sampler_logprob(const float *logits, uint32_t n_vocab, int32_t id, uint32_t n_top,
                      struct report_top *ret_top);
#endif
