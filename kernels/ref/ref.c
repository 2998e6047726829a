/* ref.c: the ref backend's table and its opening. */
#include "kn_backends.h"
#include "ref.h"
#include <string.h>

const struct kn_ops ref_ops = {
    .close = ref_close,
    .status = ref_status,
    .sync = ref_sync,
    .buf_alloc = ref_buf_alloc,
    .buf_free = ref_buf_free,
    .upload = ref_upload,
    .download = ref_download,
    .arena_open = ref_arena_open,
    .arena_commit = ref_arena_commit,
    .arena_release = ref_arena_release,
    .arena_close = ref_arena_close,
    .row_copy = ref_row_copy,
    .weight_load = ref_weight_load,
    .weight_free = ref_weight_free,
    .weight_bytes = ref_weight_bytes,
    .batch_begin = ref_batch_begin,
    .batch_end = ref_batch_end,
    .embed = ref_embed,
    .rmsnorm = ref_rmsnorm,
    .linear = ref_linear,
    .rope = ref_rope,
    .kv_write = ref_kv_write,
    .hidden_write = ref_hidden_write,
    .hidden_read = ref_hidden_read,
    .attention = ref_attention,
    .swiglu = ref_swiglu,
    .gather_rows = ref_gather_rows,
    .row_logit = ref_row_logit,
    .row_lse = ref_row_lse,
    .keys_read = ref_keys_read,
    .kv_rotate = ref_kv_rotate,
    .attention_row = ref_attention_row,
};

int kn_ref_open(struct kn **ret, const struct kn_options *opt, char *why, size_t why_len)
{
    if (opt->isa && strcmp(opt->isa, "scalar") != 0) {
        snprintf(why, why_len, "backend \"ref\" has no isa \"%.40s\", only \"scalar\"", opt->isa);
        return KN_EUNSUPPORTED;
    }
    struct kn *kn = calloc(1, sizeof *kn);
    if (!kn) {
        snprintf(why, why_len, "no memory for the handle of backend \"ref\"");
        return KN_ENOMEM;
    }
    kn->magic = KN_MAGIC;
    kn->ops = &ref_ops;
    kn->name = "ref";
    kn->n_threads = 1;
    kn->activations = KN_ACTIVATIONS_FLOAT; /* never rounded, whatever was asked for */
    kn->kv_types = 1u << KN_BF16 | 1u << KN_Q8_0 | 1u << KN_Q8_Q4;
    strcpy(kn->isa, "scalar");
    *ret = kn;
    return KN_OK;
}

void ref_close(struct kn *kn)
{
    kn_assert(kn->bytes_buffers == 0 && kn->bytes_weights == 0 && kn->bytes_arena == 0);
    kn->magic = 0;
    free(kn);
}

int ref_status(struct kn *kn)
{
    (void)kn;
    return KN_OK;
}

void ref_sync(struct kn *kn)
{
    (void)kn;
}
