/* golden_forms.h: what the names of the goldens' cases mean; budget and the like stand in the file. */
#ifndef BACKCAST_GOLDEN_FORMS_H
#define BACKCAST_GOLDEN_FORMS_H
#include <stdint.h>

struct golden_form {
    const char *suffix; /* behind the group: gen.SUFFIX */
    const char *policy, *score;
    uint32_t span, min_gap;
    float quantile;
};
/* Fails the test for a name that means nothing. */
const struct golden_form *golden_form_of(const char *case_name);
#endif
