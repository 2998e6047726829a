/* check.c: options that a private daemon would refuse, found before it is started. It is of this same
 * version, so it knows no more names than stand here; one that listens is asked instead. */
#include <string.h>
#include "cli.h"

#define SPAN_MAX 255u
#define TEMPERATURE_MAX 100.0f

static const char *const policies[] = {"counter_causal_fast",
                                       "counter_causal",
                                       "sliding_window",
                                       "key_similarity",
                                       "h2o",
                                       "tova",
                                       "knorm",
                                       "keydiff",
                                       "random",
                                       "none",
                                       NULL};
static const char *const scores[] = {"logit", "logprob", NULL};
static const char *const triggers[] = {"budget", "prefill_end", NULL};
static const char *const positions[] = {"keep", "rerotate", NULL};
static const char *const kv_types[] = {"f16", "f32", "bf16", "q8_0", "q8_q4", NULL};

static int one_of(const char *option, const char *given, const char *const *known, struct err *e)
{
    char list[200] = "";

    if (given == NULL)
        return BC_OK;
    for (size_t i = 0; known[i] != NULL; i++) {
        size_t n = strlen(list);
        if (strcmp(known[i], given) == 0)
            return BC_OK;
        snprintf(list + n, sizeof(list) - n, "%s%s", i > 0 ? ", " : "", known[i]);
    }
    return err_set(e, BC_EINVALID, option, "--%s %.40s: known are %s", option, given, list);
}

static int in_range(const char *option, float v, float least, float most, struct err *e)
{
    if (v >= least && v <= most)
        return BC_OK;
    return err_set(e, BC_EINVALID, option, "--%s %g: must be %g to %g", option, (double)v,
                   (double)least, (double)most);
}

static int session_check(const struct args *a, struct err *e)
{
    const struct backcast_session_options *o = &a->session;
    int rc;

    if (o->durable && o->name == NULL)
        return err_set(e, BC_EINVALID, "durable", "--durable needs --name");
    if (o->durable)
        return err_set(e, BC_EUNSUPPORTED, "durable",
                       "--durable needs a running backcastd: a private one keeps nothing");
    if ((rc = one_of("policy", o->policy, policies, e)) < 0 ||
        (rc = one_of("score", o->score, scores, e)) < 0 ||
        (rc = one_of("trigger", o->trigger, triggers, e)) < 0 ||
        (rc = one_of("positions", o->positions, positions, e)) < 0 ||
        (rc = one_of("kv-type", o->kv_type, kv_types, e)) < 0)
        return rc;
    if (o->span != BACKCAST_DEFAULT && (o->span % 2 == 0 || o->span > SPAN_MAX))
        return err_set(e, BC_EINVALID, "span", "--span %u: must be odd, 1 to %u", o->span,
                       SPAN_MAX);
    if (o->span_quantile != -1)
        return in_range("span-quantile", o->span_quantile, 0, 1, e);
    return BC_OK;
}

int args_check(const struct args *a, struct err *e)
{
    const struct backcast_generate_options *g = &a->generate;
    int rc = session_check(a, e);

    if (rc < 0 || (rc = in_range("temperature", g->temperature, 0, TEMPERATURE_MAX, e)) < 0 ||
        (rc = in_range("top-p", g->top_p, 0, 1, e)) < 0)
        return rc;
    return in_range("min-p", g->min_p, 0, 1, e);
}
