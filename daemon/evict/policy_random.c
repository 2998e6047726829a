/* policy_random.c: a control. Each token draws a number from (seed, its stream index, which is the
 * position that it was given) and the low ones stay. There is no generator state, so a token has the
 * same number in every refresh, also after a renumbering, and in every replay of the session. */
#include "policy.h"

/* splitmix64's finaliser: a bijection of 64 bits in which every input bit changes about half of the
 * output. */
static uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

#define GOLDEN 0x9e3779b97f4a7c15u /* 2^64 / golden ratio, odd */

static int score(struct evict *ev, struct model *m, const struct seqcache *s, float *ret_value,
                 struct err *e)
{
    (void)m, (void)e;
    const uint64_t *stream = seqcache_stream(s);
    uint64_t key = mix(ev->params.seed + GOLDEN);
    for (uint32_t i = 0; i < seqcache_count(s); i++) {
        uint64_t bits = mix(key + GOLDEN * stream[i]);
        ret_value[i] = (float)(bits >> 40) * 0x1p-24f; /* [0, 1), 24 bits: exact */
    }
    return 0;
}

const struct evict_policy policy_random = {
    .name = "random",
    .summary = "A control: keeps tokens by a seeded random number of their position.",
    .score = score,
};
