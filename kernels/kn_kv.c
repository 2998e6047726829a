/* kn_kv.c: what a row and a page of a pool cost, to the byte. kn_kv_addr.h draws the layout. */
#include "kn_kv_addr.h"
#include "kn_assert.h"

size_t kn_kv_row_bytes(const struct kn_kv *kv)
{
    kn_assert(kv->type == KN_F32 || kv->type == KN_F16);
    size_t values = (size_t)kv->n_layers * 2 * kv->n_kv_heads * kv->head_dim + kv->d_hidden;
    size_t scale = kv->d_hidden > 0 && kv->type == KN_F16 ? sizeof(float) : 0;
    return values * kn_kv_elem(kv) + scale;
}

size_t kn_kv_page_bytes(const struct kn_kv *kv)
{
    return KN_PAGE_ROWS * kn_kv_row_bytes(kv);
}
