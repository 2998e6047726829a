/* policy_list.c: the policies of this build. To add one: a file policy_NAME.c that defines
 * policy_NAME, and a line here. */
#include "evict.h"
#include <string.h>

#define POLICIES(X)                                                                                \
    X(counter_causal_fast)                                                                         \
    X(counter_causal)                                                                              \
    X(sliding_window)                                                                              \
    X(h2o)                                                                                         \
    X(tova)                                                                                        \
    X(key_similarity)                                                                              \
    X(knorm)                                                                                       \
    X(keydiff)                                                                                     \
    X(random)                                                                                      \
    X(none)

#define DECLARE(name) extern const struct evict_policy policy_##name;
POLICIES(DECLARE)

#define ADDRESS(name) &policy_##name,
static const struct evict_policy *const policies[] = {POLICIES(ADDRESS)};

static const struct {
    const char *alias, *name;
} aliases[] = {{"streaming_llm", "sliding_window"}};

const struct evict_policy *evict_policy_at(unsigned i)
{
    return i < ARRAY_LEN(policies) ? policies[i] : NULL;
}

const struct evict_policy *evict_policy_find(const char *name)
{
    for (size_t i = 0; i < ARRAY_LEN(aliases); i++)
        if (strcmp(name, aliases[i].alias) == 0)
            name = aliases[i].name;
    for (size_t i = 0; i < ARRAY_LEN(policies); i++)
        if (strcmp(name, policies[i]->name) == 0)
            return policies[i];
    return NULL;
}

bool evict_policy_prunes(const struct evict_policy *p)
{
    return p->score != NULL || p->score_rows != NULL || p->walker != NULL;
}
