/* golden_forms.c: see golden_forms.h. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <cmocka.h>
#include "golden_forms.h"

static const struct golden_form forms[] = {
    {"sliding_window", "sliding_window", "logit", 1, 0, 0.25f},
    {"key_similarity", "key_similarity", "logit", 1, 0, 0.25f},
    {"h2o", "h2o", "logit", 1, 0, 0.25f},
    {"tova", "tova", "logit", 1, 0, 0.25f},
    {"counter_causal", "counter_causal", "logit", 1, 0, 0.25f},
    {"counter_causal_fast", "counter_causal_fast", "logit", 1, 0, 0.25f},
    {"counter_causal_logprob", "counter_causal", "logprob", 1, 0, 0.25f},
    {"counter_causal_fast_logprob", "counter_causal_fast", "logprob", 1, 0, 0.25f},
    {"counter_causal_span5", "counter_causal", "logprob", 5, 0, 0.25f},
    {"counter_causal_fast_span5", "counter_causal_fast", "logit", 5, 0, 0.25f},
    {"counter_causal_gap4", "counter_causal", "logit", 1, 4, 0.25f},
    {"counter_causal_fast_gap4", "counter_causal_fast", "logit", 1, 4, 0.25f},
    {"counter_causal_logprob_gap4_span15", "counter_causal", "logprob", 15, 4, 0.25f},
    {"counter_causal_fast_gap4_span15_min", "counter_causal_fast", "logit", 15, 4, 0.0f},
    {"counter_causal_fast_span15", "counter_causal_fast", "logit", 15, 0, 0.25f},
    {"knorm", "knorm", "logit", 1, 0, 0.25f},
    {"keydiff", "keydiff", "logit", 1, 0, 0.25f},
    {"random", "random", "logit", 1, 0, 0.25f},
};

const struct golden_form *golden_form_of(const char *case_name)
{
    const char *suffix = strchr(case_name, '.');
    for (size_t i = 0; suffix != NULL && i < sizeof forms / sizeof forms[0]; i++)
        if (strcmp(suffix + 1, forms[i].suffix) == 0)
            return &forms[i];
    fail_msg("no form named %s", case_name);
    return NULL;
}
