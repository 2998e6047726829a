/* pack.c: from a file's blocks to the layout that pack.h draws, and one row back. */
#include "pack.h"
#include "kn_assert.h"
#include <string.h>

static enum cpu_form form_of(const struct kn_int8_format *f)
{
    if (f->table)
        return FORM_TABLE;
    if (f->code_bits <= 4 && f->n_sub == 2)
        return f->has_min ? FORM_NIB_2_MIN : FORM_NIB_2;
    if (f->code_bits <= 4)
        return f->has_min ? FORM_NIB_MIN : FORM_NIB;
    if (f->n_sub == 2)
        return FORM_BYTE_2;
    return f->has_min ? FORM_BYTE_MIN : FORM_BYTE;
}

static size_t up64(size_t n)
{
    return (n + 63) / 64 * 64;
}

/* Bytes that the scales of one block (or super-block) take. */
static uint32_t scale_bytes(const struct kn_weight *w)
{
    uint32_t halves = (1u + w->format->has_min) * CPU_LANES * 2;
    return w->super ? halves + 8 * w->format->n_sub * (1u + w->format->has_min) * CPU_LANES
                    : halves;
}

int pack_plan(struct kn_weight *w, const struct kn_tensor *src, bool pairs)
{
    const struct kn_type_info *info = kn_type_find(src->type);
    if (!info || src->type == KN_I32)
        return KN_EUNSUPPORTED;
    if (src->rows == 0 || src->cols == 0 || src->cols % info->block != 0 ||
        src->bytes != (size_t)src->rows * (src->cols / info->block) * info->bytes)
        return KN_EINVALID;
    if (src->cols > CPU_COLS_MAX || src->rows > CPU_ROWS_MAX)
        return KN_EUNSUPPORTED;
    *w = (struct kn_weight){.magic = CPU_WEIGHT_MAGIC,
                            .type = src->type,
                            .rows = src->rows,
                            .cols = src->cols,
                            .n_groups = (src->rows - 1) / CPU_LANES + 1,
                            .format = kn_int8_format(src->type),
                            .pairs = pairs && src->type == KN_BF16};
    if (w->format) {
        size_t n_blocks = src->cols / KN_INT8_BLOCK;
        w->form = form_of(w->format);
        w->super = info->block > KN_INT8_BLOCK;
        w->scales_bytes = up64((w->super ? n_blocks / 8 : n_blocks) * scale_bytes(w));
        w->group_bytes = w->scales_bytes + n_blocks * (w->form >= FORM_BYTE ? 512 : 256);
    } else {
        w->group_bytes = (w->pairs ? (src->cols + 1) / 2 : src->cols) * pack_line(w);
    }
    uint32_t bundle = w->format ? 1 : CPU_FLOAT_GROUPS;
    w->bytes = w->group_bytes * ((w->n_groups + bundle - 1) / bundle * bundle);
    return KN_OK;
}

/* Codes of a FORM_TABLE weight are indices again. */
static void table_invert(const int8_t *table, uint8_t *u)
{
    uint8_t index[256];
    for (unsigned i = 0; i < 16; i++)
        index[(uint8_t)(table[i] + 128)] = (uint8_t)i;
    for (unsigned i = 0; i < KN_INT8_BLOCK; i++)
        u[i] = index[u[i]];
}

static void codes_put(const struct kn_weight *w, uint8_t *at, unsigned lane, const uint8_t *u)
{
    if (w->form >= FORM_BYTE) {
        for (unsigned c = 0; c < 8; c++)
            memcpy(at + c * 64 + lane * 4, u + c * 4, 4);
        return;
    }
    for (unsigned j = 0; j < 4; j++)
        for (unsigned i = 0; i < 4; i++)
            at[j * 64 + lane * 4 + i] = (uint8_t)(u[j * 4 + i] | u[16 + j * 4 + i] << 4);
}

static void half_put(uint8_t *at, unsigned lane, uint16_t half)
{
    memcpy(at + lane * 2, &half, 2);
}

/* Scales of block b of the row in `lane`. at: the group's scale region. */
static void scales_put(const struct kn_weight *w, uint8_t *at, uint32_t b, unsigned lane,
                       const struct kn_int8_block *k)
{
    bool has_min = w->format->has_min;
    unsigned n_sub = w->format->n_sub;
    at += (size_t)(w->super ? b / 8 : b) * scale_bytes(w);
    half_put(at, lane, k->half_d);
    at += CPU_LANES * 2;
    if (has_min) {
        half_put(at, lane, k->half_m);
        at += CPU_LANES * 2;
    }
    if (!w->super)
        return;
    at += (size_t)(b % 8) * n_sub * (1u + has_min) * CPU_LANES;
    for (unsigned s = 0; s < n_sub; s++) {
        at[s * CPU_LANES + lane] = (uint8_t)k->scale[s];
        if (has_min)
            at[(n_sub + s) * CPU_LANES + lane] = k->min[s];
    }
}

static void pack_row_q8(const struct kn_weight *w, const struct kn_tensor *src, uint32_t row)
{
    size_t row_bytes = src->bytes / src->rows;
    uint32_t n_blocks = w->cols / KN_INT8_BLOCK, lane = row % CPU_LANES;
    uint8_t *group = w->data + row / CPU_LANES * w->group_bytes;
    struct kn_int8_block k[8];
    for (uint32_t b = 0; b < n_blocks; b += 8) {
        uint32_t n = KN_MIN(8u, n_blocks - b);
        kn_int8_unpack(w->type, (const uint8_t *)src->data + row * row_bytes, b, n, k);
        for (uint32_t i = 0; i < n; i++) {
            if (w->form == FORM_TABLE)
                table_invert(w->format->table, k[i].u);
            codes_put(w, (uint8_t *)pack_codes(w, row / CPU_LANES, b + i), lane, k[i].u);
            scales_put(w, group, b + i, lane, &k[i]);
        }
    }
}

static void pack_group_floats(const struct kn_weight *w, const struct kn_tensor *src,
                              uint32_t group)
{
    size_t elem = w->type == KN_F32 ? 4 : 2, step = CPU_FLOAT_GROUPS * pack_line(w);
    size_t row_bytes = w->cols * elem, side = w->pairs ? 2 : 1;
    uint32_t first = group * CPU_LANES, n = KN_MIN((uint32_t)CPU_LANES, w->rows - first);
    const uint8_t *from = (const uint8_t *)src->data + first * row_bytes;
    uint8_t *to = (uint8_t *)pack_floats(w, group);
    for (size_t k = 0; k < w->cols; k++) {
        uint8_t *at = to + k / side * step + k % side * elem;
        for (uint32_t lane = 0; lane < n; lane++)
            if (elem == 4)
                memcpy(at + lane * 4, from + lane * row_bytes + k * 4, 4);
            else
                memcpy(at + lane * 2 * side, from + lane * row_bytes + k * 2, 2);
    }
}

void pack_groups(const struct kn_weight *w, const struct kn_tensor *src, uint32_t first,
                 uint32_t end)
{
    if (w->format)
        for (uint32_t row = first * CPU_LANES; row < KN_MIN(end * CPU_LANES, w->rows); row++)
            pack_row_q8(w, src, row);
    else
        for (uint32_t group = first; group < end; group++)
            pack_group_floats(w, src, group);
}

static void row_codes(const struct kn_weight *w, const uint8_t *at, unsigned lane, int *q)
{
    for (unsigned k = 0; k < KN_INT8_BLOCK; k++) {
        if (w->form >= FORM_BYTE) {
            q[k] = at[k / 4 * 64 + lane * 4 + k % 4] - w->format->zero;
            continue;
        }
        unsigned j = k % 16, u = at[j / 4 * 64 + lane * 4 + j % 4] >> (k / 16 * 4) & 15;
        q[k] = w->form == FORM_TABLE ? w->format->table[u] : (int)u - w->format->zero;
    }
}

/* D and M of both sub-blocks of block b. */
static void row_scales(const struct kn_weight *w, const uint8_t *at, uint32_t b, unsigned lane,
                       float *d, float *m)
{
    unsigned n_sub = w->format->n_sub, has_min = w->format->has_min;
    uint16_t half_d, half_m = 0;
    at += (size_t)(w->super ? b / 8 : b) * scale_bytes(w);
    memcpy(&half_d, at + lane * 2, 2);
    if (has_min)
        memcpy(&half_m, at + CPU_LANES * 2 + lane * 2, 2);
    at += (1 + has_min) * CPU_LANES * 2 + (size_t)(b % 8) * n_sub * (1 + has_min) * CPU_LANES;
    for (unsigned s = 0; s < n_sub; s++) {
        d[s] = kn_f16_to_f32(half_d);
        m[s] = kn_f16_to_f32(half_m);
        if (!w->super)
            continue;
        d[s] *= (float)(int8_t)at[s * CPU_LANES + lane];
        if (has_min)
            m[s] = -(m[s] * (float)at[(n_sub + s) * CPU_LANES + lane]);
    }
}

static void row_floats(const struct kn_weight *w, uint32_t row, float *out)
{
    const uint8_t *group = pack_floats(w, row / CPU_LANES);
    size_t lane = row % CPU_LANES, step = CPU_FLOAT_GROUPS * pack_line(w), side = w->pairs ? 2 : 1;
    for (size_t k = 0; k < w->cols; k++) {
        uint16_t h;
        if (w->type == KN_F32) {
            memcpy(out + k, group + k * step + lane * 4, 4);
            continue;
        }
        memcpy(&h, group + k / side * step + (lane * side + k % side) * 2, 2);
        out[k] = w->type == KN_F16 ? kn_f16_to_f32(h) : kn_bf16_to_f32(h);
    }
}

void pack_row(const struct kn_weight *w, uint32_t row, float *out)
{
    if (!w->format) {
        row_floats(w, row, out);
        return;
    }
    unsigned lane = row % CPU_LANES, len = KN_INT8_BLOCK / w->format->n_sub;
    for (uint32_t b = 0; b < w->cols / KN_INT8_BLOCK; b++, out += KN_INT8_BLOCK) {
        int q[KN_INT8_BLOCK];
        float d[2], m[2];
        row_codes(w, pack_codes(w, row / CPU_LANES, b), lane, q);
        row_scales(w, pack_group(w, row / CPU_LANES), b, lane, d, m);
        for (unsigned k = 0; k < KN_INT8_BLOCK; k++) {
            out[k] = d[k / len] * (float)q[k];
            if (w->format->has_min)
                out[k] += m[k / len];
        }
    }
}
