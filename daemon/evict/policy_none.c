/* policy_none.c: nothing is ever evicted. With a budget, a prompt that does not fit is refused and
 * generation ends when it is used up. */
#include "policy.h"

const struct evict_policy policy_none = {
    .name = "none",
    .summary = "Nothing is evicted; a budget, if there is one, ends the generation.",
};
