/* kn_kv.c: the types of keys and values; what a row and a page of a pool cost, to the byte.
 * kn_kv_addr.h draws the layout. */
#include "kn_kv_addr.h"
#include "kn_assert.h"
#include <stdio.h>

static const struct kn_kv_type types[] = {{KN_F16, "f16", 1},
                                          {KN_F32, "f32", 1},
                                          {KN_BF16, "bf16", 1},
                                          {KN_Q8_0, "q8_0", 32},
                                          {KN_Q8_Q4, "q8_q4", 32}};

enum { N_TYPES = sizeof types / sizeof types[0] };

const struct kn_kv_type *kn_kv_type_at(unsigned i)
{
    return i < N_TYPES ? &types[i] : NULL;
}

const struct kn_kv_type *kn_kv_type_find(uint32_t type)
{
    for (unsigned i = 0; i < N_TYPES; i++)
        if ((uint32_t)types[i].type == type)
            return &types[i];
    return NULL;
}

const struct kn_kv_type *kn_kv_type_named(const char *name)
{
    for (unsigned i = 0; i < N_TYPES; i++)
        if (strcmp(types[i].name, name) == 0)
            return &types[i];
    return NULL;
}

int kn_kv_check(const struct kn *kn, enum kn_type type, uint32_t head_dim, char *why,
                size_t why_len)
{
    const struct kn_kv_type *t = kn_kv_type_find(type);
    kn_assert(t);
    bool has = type == KN_F32 || type == KN_F16 || (kn->kv_types >> type & 1) != 0;
    if (has && head_dim % t->block == 0)
        return KN_OK;
    if (!has)
        snprintf(why, why_len, "backend \"%s\" has no keys and values of type %s", kn->name,
                 t->name);
    else
        snprintf(why, why_len, "type %s needs heads of a multiple of %u values; these have %u",
                 t->name, t->block, head_dim);
    return KN_EUNSUPPORTED;
}

size_t kn_kv_row_bytes(const struct kn_kv *kv)
{
    const struct kn_kv_type *t = kn_kv_type_find(kv->type);
    kn_assert(t && kv->head_dim % t->block == 0);
    size_t both = kn_kv_line_bytes(kv, KN_KV_K) + kn_kv_line_bytes(kv, KN_KV_V);
    size_t lines = (size_t)kv->n_layers * kv->n_kv_heads * both;
    if (kv->d_hidden == 0)
        return lines;
    return lines + kn_kv_hidden_bytes(kv) + (kn_kv_hidden_scaled(kv) ? sizeof(float) : 0);
}

size_t kn_kv_page_bytes(const struct kn_kv *kv)
{
    return KN_PAGE_ROWS * kn_kv_row_bytes(kv);
}
