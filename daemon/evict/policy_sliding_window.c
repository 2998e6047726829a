/* policy_sliding_window.c: the newest stay. With frozen > 0 this is StreamingLLM: the frozen tokens
 * are its attention sinks. */
#include "policy.h"

static int score(struct evict *ev, struct model *m, const struct seqcache *s, float *ret_value,
                 struct err *e)
{
    (void)ev, (void)m, (void)e;
    uint32_t n = seqcache_count(s);
    for (uint32_t i = 0; i < n; i++)
        ret_value[i] = (float)(n - i); /* exact below 2^24 tokens */
    return 0;
}

const struct evict_policy policy_sliding_window = {
    .name = "sliding_window",
    .summary = "Keeps the newest tokens, and the frozen ones as attention sinks (StreamingLLM).",
    .score = score,
};
