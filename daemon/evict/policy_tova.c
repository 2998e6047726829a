/* policy_tova.c: keep what the newest token attends to in the last layer (Oren et al.,
 * "Transformers are Multi-State RNNs", arXiv 2401.06104).
 *
 * The attention of the newest token over the cache is one row; its query was kept when it was
 * appended (evict_note_query), so the row is computed when it is wanted, over the cache as it is
 * then. Before the first prune after an append that is the row of the pass itself; if a prune came
 * in between, it is the same query over the tokens that are left. */
#include "policy.h"
#include <math.h>

static int score(struct evict *ev, struct model *m, const struct seqcache *s, float *ret_value,
                 struct err *e)
{
    const struct model_info *info = model_info(m);
    struct kn *kn = model_kn(m);
    struct kn_seq seq = seqcache_view(s);
    if (ev->query_len != info->n_heads * info->head_dim)
        return err_set(e, BC_ESTATE, "policy",
                       "policy tova: the newest token's query is not at hand (%u of %u values)",
                       ev->query_len, info->n_heads * info->head_dim);
    kn->ops->attention_row(kn, &seq, info->n_layers - 1, ev->query, info->n_heads,
                           1.0f / sqrtf((float)info->head_dim), ret_value);
    for (uint32_t i = 0; i < seq.n; i++)
        ret_value[i] = -ret_value[i];
    return 0;
}

const struct evict_policy policy_tova = {
    .name = "tova",
    .summary = "Keeps what the newest token attends to in the last layer.",
    .needs_query = true,
    .score = score,
};
