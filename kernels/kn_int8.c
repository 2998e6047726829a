/* kn_int8.c: the integer rule's two conversions in plain C: packed weight formats to codes, scales
 * and offsets; a row of floats to 8-bit blocks. kn_int8.h states the arithmetic.
 *
 * The block formats as they lie in a file (bytes; d, m, dmin are halves, little-endian):
 *
 *   Q4_0    d  q[16]                      value i: low nibble of q[i] (i < 16), high nibble of q[i
 * - 16] Q4_1    d  m  q[16] Q5_0    d  h[4]  q[16]                bit i of h is bit 4 of value i
 *   Q5_1    d  m  h[4]  q[16]
 *   Q8_0    d  q[32]
 *   IQ4_NL  d  q[16]                      nibbles index a table
 *   IQ4_XS  d  scale_hi[2]  scale_lo[4]  q[8][16]
 *   Q2_K    scale[16]  q[64]  d  dmin     scale: low nibble scale, high nibble min, of 16 values
 * each Q3_K    h[32]  q[64]  scale[12]  d    h: bit 2 of the codes, block j in bit j of each byte
 *   Q4_K    d  dmin  scale[12]  q[128]    scale: 8 x 6-bit scales and mins, see k_scale
 *   Q5_K    d  dmin  scale[12]  h[32]  q[128]
 *   Q6_K    ql[128]  qh[64]  scale[16]  d */
#include "kn_int8.h"
#include "kn_assert.h"
#include <math.h>
#include <string.h>

static const int8_t iq4_table[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                     1,    13,   25,  38,  53,  69,  89,  113};

static const struct kn_int8_format formats[] = {
    {KN_Q8_0, 8, 128, 1, false, NULL},        {KN_Q4_0, 4, 8, 1, false, NULL},
    {KN_Q4_1, 4, 0, 1, true, NULL},           {KN_Q5_0, 5, 16, 1, false, NULL},
    {KN_Q5_1, 5, 0, 1, true, NULL},           {KN_Q2_K, 2, 0, 2, true, NULL},
    {KN_Q3_K, 3, 4, 2, false, NULL},          {KN_Q4_K, 4, 0, 1, true, NULL},
    {KN_Q5_K, 5, 0, 1, true, NULL},           {KN_Q6_K, 6, 32, 2, false, NULL},
    {KN_IQ4_NL, 4, 128, 1, false, iq4_table}, {KN_IQ4_XS, 4, 128, 1, false, iq4_table},
};

const struct kn_int8_format *kn_int8_format(enum kn_type type)
{
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++)
        if (formats[i].type == type)
            return &formats[i];
    return NULL;
}

static uint16_t half_bits(const uint8_t *p)
{
    uint16_t h;
    memcpy(&h, p, 2);
    return h;
}

/* D and M of sub-block h of a 256-format: a half at p times a small integer. */
static void scaled(struct kn_int8_block *ret, unsigned h, const uint8_t *p, int scale)
{
    ret->half_d = half_bits(p);
    ret->scale[h] = (int8_t)scale;
    ret->d[h] = kn_f16_to_f32(ret->half_d) * (float)scale;
}

static void offset(struct kn_int8_block *ret, unsigned h, const uint8_t *p, unsigned min)
{
    ret->half_m = half_bits(p);
    ret->min[h] = (uint8_t)min;
    ret->m[h] = -(kn_f16_to_f32(ret->half_m) * (float)min);
}

/* M of a 32-format is the half itself. */
static void plain_offset(struct kn_int8_block *ret, const uint8_t *p)
{
    ret->half_m = half_bits(p);
    ret->m[0] = kn_f16_to_f32(ret->half_m);
}

static void nibbles(const uint8_t *q, uint8_t *u)
{
    for (int i = 0; i < 16; i++) {
        u[i] = q[i] & 15;
        u[i + 16] = q[i] >> 4;
    }
}

/* Value i gets bit i of a little-endian 32-bit word as its bit 4. */
static void fifth_bits(const uint8_t *h, uint8_t *u)
{
    for (int i = 0; i < 32; i++)
        u[i] |= (uint8_t)(((h[i / 8] >> (i % 8)) & 1) << 4);
}

static void table_codes(uint8_t *u)
{
    for (int i = 0; i < 32; i++)
        u[i] = (uint8_t)(iq4_table[u[i]] + 128);
}

/* The 32-value formats: block b is the b-th of the row. */
static void unpack_small(enum kn_type type, const uint8_t *p, struct kn_int8_block *ret)
{
    scaled(ret, 0, p, 1);
    switch (type) {
    case KN_Q8_0:
        for (int i = 0; i < 32; i++)
            ret->u[i] = (uint8_t)(p[2 + i] ^ 0x80); /* two's complement byte + 128 */
        break;
    case KN_Q4_0:
        nibbles(p + 2, ret->u);
        break;
    case KN_Q4_1:
        plain_offset(ret, p + 2);
        nibbles(p + 4, ret->u);
        break;
    case KN_Q5_0:
        nibbles(p + 6, ret->u);
        fifth_bits(p + 2, ret->u);
        break;
    case KN_Q5_1:
        plain_offset(ret, p + 2);
        nibbles(p + 8, ret->u);
        fifth_bits(p + 4, ret->u);
        break;
    default: /* IQ4_NL */
        nibbles(p + 2, ret->u);
        table_codes(ret->u);
    }
}

/* 6-bit scale and min j (0..7) of Q4_K and Q5_K, out of 12 bytes:
 *   bytes 0..3   scales 0..3 in bits 0..5; bits 6..7 are the top bits of scales 4..7
 *   bytes 4..7   mins   0..3 in bits 0..5; bits 6..7 are the top bits of mins   4..7
 *   bytes 8..11  low nibble of scale 4..7, high nibble: of min 4..7 */
static void k_scale(const uint8_t *s, unsigned j, unsigned *scale, unsigned *min)
{
    if (j < 4) {
        *scale = s[j] & 63u;
        *min = s[j + 4] & 63u;
    } else {
        *scale = (s[j + 4] & 15u) | (unsigned)(s[j - 4] >> 6) << 4;
        *min = (unsigned)(s[j + 4] >> 4) | (unsigned)(s[j] >> 6) << 4;
    }
}

/* j: which of the super-block's eight 32-blocks. In Q4_K and Q5_K blocks 2t and 2t + 1 are the low
 * and high nibbles of the same 32 bytes. */
static void unpack_q45k(bool five, const uint8_t *p, unsigned j, struct kn_int8_block *ret)
{
    unsigned scale, min;
    k_scale(p + 4, j, &scale, &min);
    scaled(ret, 0, p, (int)scale);
    offset(ret, 0, p + 2, min);
    const uint8_t *q = p + (five ? 48 : 16) + 32 * (j / 2);
    for (int i = 0; i < 32; i++)
        ret->u[i] = j % 2 ? q[i] >> 4 : q[i] & 15;
    if (five)
        for (int i = 0; i < 32; i++)
            ret->u[i] |= (uint8_t)(((p[16 + i] >> j) & 1) << 4);
}

/* Q2_K and Q3_K: blocks 4t .. 4t + 3 are bits 0-1, 2-3, 4-5, 6-7 of the same 32 bytes. */
static void unpack_q2k(const uint8_t *p, unsigned j, struct kn_int8_block *ret)
{
    const uint8_t *q = p + 16 + 32 * (j / 4);
    for (int i = 0; i < 32; i++)
        ret->u[i] = (q[i] >> (2 * (j % 4))) & 3;
    for (unsigned h = 0; h < 2; h++) {
        scaled(ret, h, p + 80, p[2 * j + h] & 15);
        offset(ret, h, p + 82, p[2 * j + h] >> 4);
    }
}

/* 6-bit scale k (0..15) of Q3_K: low nibbles in bytes 0..7 (k and k + 8 share one), top two bits in
 * bytes 8..11. */
static int q3k_scale(const uint8_t *s, unsigned k)
{
    unsigned low = k < 8 ? s[k] & 15u : (unsigned)(s[k - 8] >> 4);
    unsigned high = (s[8 + k % 4] >> (2 * (k / 4))) & 3u;
    return (int)(low | high << 4) - 32;
}

static void unpack_q3k(const uint8_t *p, unsigned j, struct kn_int8_block *ret)
{
    const uint8_t *q = p + 32 + 32 * (j / 4);
    for (int i = 0; i < 32; i++)
        ret->u[i] = (uint8_t)(((q[i] >> (2 * (j % 4))) & 3) | ((p[i] >> j) & 1) << 2);
    for (unsigned h = 0; h < 2; h++)
        scaled(ret, h, p + 108, q3k_scale(p + 96, 2 * j + h));
}

/* Q6_K, half t = j / 4 (128 values), part = j % 4: low four bits from ql (parts 0, 1: low nibbles
 * of its two 32-byte runs; 2, 3: their high nibbles), top two from qh. */
static void unpack_q6k(const uint8_t *p, unsigned j, struct kn_int8_block *ret)
{
    unsigned part = j % 4;
    const uint8_t *ql = p + 64 * (j / 4) + 32 * (part % 2), *qh = p + 128 + 32 * (j / 4);
    for (int i = 0; i < 32; i++) {
        unsigned low = part < 2 ? ql[i] & 15u : (unsigned)(ql[i] >> 4);
        ret->u[i] = (uint8_t)(low | ((qh[i] >> (2 * part)) & 3u) << 4);
    }
    for (unsigned h = 0; h < 2; h++)
        scaled(ret, h, p + 208, (int8_t)p[192 + 2 * j + h]);
}

static void unpack_iq4xs(const uint8_t *p, unsigned j, struct kn_int8_block *ret)
{
    unsigned high = p[2 + j / 4], low = p[4 + j / 2];
    int scale = (int)(((low >> (4 * (j % 2))) & 15u) | ((high >> (2 * (j % 4))) & 3u) << 4) - 32;
    scaled(ret, 0, p, scale);
    nibbles(p + 8 + 16 * j, ret->u);
    table_codes(ret->u);
}

static void unpack_one(enum kn_type type, const uint8_t *p, unsigned j, struct kn_int8_block *ret)
{
    switch (type) {
    case KN_Q2_K:
        unpack_q2k(p, j, ret);
        break;
    case KN_Q3_K:
        unpack_q3k(p, j, ret);
        break;
    case KN_Q4_K:
    case KN_Q5_K:
        unpack_q45k(type == KN_Q5_K, p, j, ret);
        break;
    case KN_Q6_K:
        unpack_q6k(p, j, ret);
        break;
    case KN_IQ4_XS:
        unpack_iq4xs(p, j, ret);
        break;
    default:
        unpack_small(type, p, ret);
    }
}

void kn_int8_unpack(enum kn_type type, const void *row, uint32_t first, uint32_t n,
                    struct kn_int8_block *ret)
{
    const struct kn_type_info *info = kn_type_find(type);
    kn_assert(info && kn_int8_format(type));
    uint32_t per = info->block / KN_INT8_BLOCK; /* 32-blocks of a file block: 1 or 8 */
    for (uint32_t i = 0; i < n; i++) {
        uint32_t b = first + i;
        memset(&ret[i], 0, sizeof ret[i]);
        unpack_one(type, (const uint8_t *)row + (size_t)(b / per) * info->bytes, b % per, &ret[i]);
    }
}

/* One 32-block: its codes for the largest code `max`. Returns da. */
static float block_codes(const float *x, int max, int *a)
{
    float amax = 0.0f;
    for (int i = 0; i < KN_INT8_BLOCK; i++)
        amax = fmaxf(amax, fabsf(x[i]));
    bool zeros = amax < KN_INT8_AMAX_MIN;
    float inverse = zeros ? 0.0f : (float)max / amax;
    for (int i = 0; i < KN_INT8_BLOCK; i++)
        a[i] = (int)lrintf(x[i] * inverse);
    return zeros ? 0.0f : amax / (float)max;
}

void kn_int8_quantise(const float *x, uint32_t cols, int8_t *a, float *da, int16_t *asum)
{
    int q[KN_INT8_BLOCK];
    kn_assert(cols % KN_INT8_BLOCK == 0);
    for (uint32_t b = 0; b < cols / KN_INT8_BLOCK; b++, x += KN_INT8_BLOCK, a += KN_INT8_BLOCK) {
        int sum[2] = {0, 0};
        da[b] = block_codes(x, KN_INT8_MAX, q);
        for (int i = 0; i < KN_INT8_BLOCK; i++) {
            a[i] = (int8_t)q[i];
            sum[i / 16] += q[i];
        }
        asum[2 * b] = (int16_t)sum[0];
        asum[2 * b + 1] = (int16_t)sum[1];
    }
}

void kn_int16_quantise(const float *x, uint32_t cols, int16_t *a, float *da, int32_t *asum)
{
    int q[KN_INT8_BLOCK];
    kn_assert(cols % KN_INT8_BLOCK == 0);
    for (uint32_t b = 0; b < cols / KN_INT8_BLOCK; b++, x += KN_INT8_BLOCK, a += KN_INT8_BLOCK) {
        da[b] = block_codes(x, KN_INT16_MAX, q);
        asum[2 * b] = asum[2 * b + 1] = 0;
        for (uint32_t i = 0; i < KN_INT8_BLOCK; i++) {
            a[i] = (int16_t)q[i];
            asum[2 * b + i / 16] += q[i];
        }
    }
}
