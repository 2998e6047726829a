/* weights.c: matrices as they stand in the file, and their rows as floats. */
#include "ref.h"
#include <string.h>

int ref_weight_load(struct kn *kn, const struct kn_tensor *src, struct kn_weight **ret)
{
    const struct kn_type_info *info = kn_type_find(src->type);
    if (!info || src->type == KN_I32)
        return KN_EUNSUPPORTED;
    if (src->rows == 0 || src->cols == 0 || src->cols % info->block != 0)
        return KN_EINVALID;
    size_t row_bytes = (size_t)(src->cols / info->block) * info->bytes;
    if (src->bytes != row_bytes * src->rows)
        return KN_EINVALID;
    void *data;
    struct kn_weight *w = malloc(sizeof *w);
    if (!w)
        return KN_ENOMEM;
    if (posix_memalign(&data, 64, src->bytes) != 0) {
        free(w);
        return KN_ENOMEM;
    }
    memcpy(data, src->data, src->bytes);
    *w = (struct kn_weight){REF_WEIGHT_MAGIC, src->type,  src->rows, src->cols,
                            row_bytes,        src->bytes, data};
    kn->bytes_weights += w->bytes;
    *ret = w;
    return KN_OK;
}

void ref_weight_free(struct kn *kn, struct kn_weight **w)
{
    if (!*w)
        return;
    kn_assert((*w)->magic == REF_WEIGHT_MAGIC && kn->bytes_weights >= (*w)->bytes);
    kn->bytes_weights -= (*w)->bytes;
    (*w)->magic = 0;
    free((*w)->data);
    free(*w);
    *w = NULL;
}

size_t ref_weight_bytes(const struct kn_weight *w)
{
    kn_assert(w->magic == REF_WEIGHT_MAGIC);
    return w->bytes;
}

void ref_weight_expand(const struct kn_weight *w, uint32_t row, uint32_t first, uint32_t n,
                       float *ret)
{
    const struct kn_type_info *info = kn_type_find(w->type);
    const uint8_t *p = w->data + row * w->row_bytes + (size_t)(first / info->block) * info->bytes;
    kn_dequant(w->type, p, n, ret);
}

void ref_embed(struct kn *kn, const struct kn_weight *w, const struct kn_batch *b, float *out)
{
    (void)kn;
    kn_assert(w->magic == REF_WEIGHT_MAGIC);
    for (uint32_t r = 0; r < b->n_rows; r++) {
        kn_assert(b->ids[r] >= 0 && (uint32_t)b->ids[r] < w->rows);
        ref_weight_expand(w, (uint32_t)b->ids[r], 0, w->cols, out + (size_t)r * w->cols);
    }
}
