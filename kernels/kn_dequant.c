/* kn_dequant.c: packed values to f32, the scalar truth of every format. The block formats are taken
 * apart by kn_int8_unpack, so that there is one description of their layouts; here w = D * (u -
 * zero) + M, two roundings. */
#include "kn_int8.h"
#include "kn_assert.h"
#include <string.h>

static void widen(enum kn_type type, const uint8_t *p, size_t count, float *ret)
{
    for (size_t i = 0; i < count; i++) {
        uint16_t h;
        memcpy(&h, p + 2 * i, 2);
        ret[i] = type == KN_F16 ? kn_f16_to_f32(h) : kn_bf16_to_f32(h);
    }
}

static void expand_block(const struct kn_int8_format *f, const struct kn_int8_block *b, float *ret)
{
    int half = KN_INT8_BLOCK / f->n_sub, zero = f->zero;
    for (int s = 0; s < f->n_sub; s++)
        for (int i = s * half; i < (s + 1) * half; i++)
            ret[i] = b->d[s] * (float)(b->u[i] - zero);
    if (!f->has_min)
        return;
    for (int s = 0; s < f->n_sub; s++)
        for (int i = s * half; i < (s + 1) * half; i++)
            ret[i] += b->m[s];
}

void kn_dequant(enum kn_type type, const void *packed, size_t count, float *ret)
{
    const struct kn_type_info *info = kn_type_find(type);
    kn_assert(info && type != KN_I32 && count % info->block == 0);
    if (type == KN_F32) {
        memcpy(ret, packed, count * sizeof *ret);
        return;
    }
    if (info->block == 1) {
        widen(type, packed, count, ret);
        return;
    }
    const struct kn_int8_format *f = kn_int8_format(type);
    const uint8_t *p = packed;
    uint32_t per = info->block / KN_INT8_BLOCK; /* 1 or 8 */
    for (size_t left = count / KN_INT8_BLOCK; left > 0;) {
        struct kn_int8_block b[8]; /* at a time */
        uint32_t n = (uint32_t)KN_MIN(left, (size_t)8);
        kn_int8_unpack(type, p, 0, n, b);
        for (uint32_t j = 0; j < n; j++, ret += KN_INT8_BLOCK)
            expand_block(f, &b[j], ret);
        p += n / per * info->bytes;
        left -= n;
    }
}
