/* kv.c: rows into pages and out of them. kn_kv_addr.h has the layout. */
#include "ref.h"
#include "kn_hadamard.h"
#include "kn_kv_addr.h"
#include "kn_turn.h"

void ref_kv_widen(enum kn_type type, const void *src, uint32_t n, float *ret)
{
    if (type == KN_F32) {
        memcpy(ret, src, n * sizeof *ret);
        return;
    }
    kn_dequant(type, src, n, ret);
}

void ref_kv_narrow(enum kn_type type, const float *src, uint32_t n, void *ret)
{
    if (type == KN_F32) {
        memcpy(ret, src, n * sizeof *src);
        return;
    }
    if (type == KN_Q8_0) {
        uint8_t *block = ret;
        for (uint32_t i = 0; i < n; i += KN_KV_Q8, block += KN_KV_Q8_BYTES)
            kn_kv_q8_put(src + i, block);
        return;
    }
    if (type == KN_Q4_0) {
        uint8_t *block = ret;
        for (uint32_t i = 0; i < n; i += KN_KV_Q8, block += KN_KV_Q4_BYTES)
            kn_kv_q4_put(src + i, block);
        return;
    }
    uint16_t *h = ret;
    for (uint32_t i = 0; i < n; i++)
        h[i] = type == KN_F16 ? kn_f32_to_f16(src[i]) : kn_f32_to_bf16(src[i]);
}

/* Nothing is staged: host memory is device memory. A good place to see that the batch is what kn.h
 * says. */
void ref_batch_begin(struct kn *kn, const struct kn_batch *b)
{
    (void)kn;
    for (uint32_t r = 0; r < b->n_rows; r++) {
        kn_assert(b->seq[r] < b->n_seqs && b->lo[r] <= b->hi[r]);
        kn_assert(b->lo[r] == b->hi[r] || b->hi[r] <= b->seqs[b->seq[r]].n);
    }
}

void ref_batch_end(struct kn *kn, const struct kn_batch *b)
{
    (void)kn;
    (void)b;
}

void ref_row_copy(struct kn *kn, const struct kn_kv *kv, uint32_t dst_slot, uint32_t src_slot)
{
    (void)kn;
    size_t key = kn_kv_line_bytes(kv, KN_KV_K), value = kn_kv_line_bytes(kv, KN_KV_V);
    if (dst_slot == src_slot)
        return;
    for (uint32_t layer = 0; layer < kv->n_layers; layer++)
        for (uint32_t head = 0; head < kv->n_kv_heads; head++) {
            memcpy(kn_kv_row(kv, dst_slot, layer, KN_KV_K, head),
                   kn_kv_row(kv, src_slot, layer, KN_KV_K, head), key);
            memcpy(kn_kv_row(kv, dst_slot, layer, KN_KV_V, head),
                   kn_kv_row(kv, src_slot, layer, KN_KV_V, head), value);
        }
    if (kv->d_hidden == 0)
        return;
    memcpy(kn_kv_hidden(kv, dst_slot), kn_kv_hidden(kv, src_slot), kn_kv_hidden_bytes(kv));
    if (kn_kv_hidden_scaled(kv))
        *kn_kv_hidden_scale(kv, dst_slot) = *kn_kv_hidden_scale(kv, src_slot);
}

static void value_put(const struct kn_kv *kv, const float *v, void *line)
{
    float turned[KN_HEAD_DIM_MAX];
    kn_assert(kv->head_dim <= KN_HEAD_DIM_MAX);
    if (kn_kv_hadamard(kv->type)) {
        memcpy(turned, v, kv->head_dim * sizeof *v);
        kn_hadamard_on(turned, kv->head_dim);
        v = turned;
    }
    ref_kv_narrow(kn_kv_line_type(kv->type, KN_KV_V), v, kv->head_dim, line);
}

void ref_kv_write(struct kn *kn, const struct kn_batch *b, uint32_t layer, const float *k,
                  const float *v)
{
    (void)kn;
    kn_assert(b->slots);
    for (uint32_t r = 0; r < b->n_rows; r++) {
        const struct kn_kv *kv = b->seqs[b->seq[r]].kv;
        uint32_t d = kv->head_dim;
        for (uint32_t h = 0; h < kv->n_kv_heads; h++) {
            size_t at = ((size_t)r * kv->n_kv_heads + h) * d;
            ref_kv_narrow(kn_kv_line_type(kv->type, KN_KV_K), k + at, d,
                          kn_kv_row(kv, b->slots[r], layer, KN_KV_K, h));
            value_put(kv, v + at, kn_kv_row(kv, b->slots[r], layer, KN_KV_V, h));
        }
    }
}

static void hidden_put(const struct kn_kv *kv, uint32_t slot, const float *x)
{
    if (kv->type == KN_F32) {
        memcpy(kn_kv_hidden(kv, slot), x, kv->d_hidden * sizeof *x);
        return;
    }
    float max_abs = 0.0f;
    for (uint32_t i = 0; i < kv->d_hidden; i++)
        max_abs = fmaxf(max_abs, fabsf(x[i]));
    float scale = kn_kv_scale_for(max_abs), inverse = 1.0f / scale; /* powers of two: exact */
    uint16_t *h = kn_kv_hidden(kv, slot);
    for (uint32_t i = 0; i < kv->d_hidden; i++)
        h[i] = kn_f32_to_f16(x[i] * inverse);
    *kn_kv_hidden_scale(kv, slot) = scale;
}

void ref_hidden_write(struct kn *kn, const struct kn_batch *b, const float *x)
{
    (void)kn;
    kn_assert(b->slots);
    uint32_t d = 0; /* one model a batch: every pool that stores hidden rows has its width */
    for (uint32_t i = 0; i < b->n_seqs; i++)
        d = KN_MAX(d, b->seqs[i].kv->d_hidden);
    for (uint32_t r = 0; r < b->n_rows; r++) {
        const struct kn_kv *kv = b->seqs[b->seq[r]].kv;
        if (kv->d_hidden > 0)
            hidden_put(kv, b->slots[r], x + (size_t)r * d);
    }
}

void ref_hidden_read(struct kn *kn, const struct kn_batch *b, const uint32_t *row_slots, float *out)
{
    (void)kn;
    for (uint32_t r = 0; r < b->n_rows; r++) {
        const struct kn_kv *kv = b->seqs[b->seq[r]].kv;
        kn_assert(kv->d_hidden > 0);
        bool scaled = kn_kv_hidden_scaled(kv);
        ref_kv_widen(scaled ? KN_F16 : KN_F32, kn_kv_hidden(kv, row_slots[r]), kv->d_hidden, out);
        float scale = scaled ? *kn_kv_hidden_scale(kv, row_slots[r]) : 1.0f;
        for (uint32_t i = 0; i < kv->d_hidden; i++)
            out[i] *= scale;
        out += kv->d_hidden;
    }
}

void ref_keys_read(struct kn *kn, const struct kn_seq *s, uint32_t layer, uint32_t first,
                   uint32_t count, float *ret)
{
    (void)kn;
    const struct kn_kv *kv = s->kv;
    kn_assert(first <= s->n && count <= s->n - first && layer < kv->n_layers);
    for (uint32_t i = first; i < first + count; i++)
        for (uint32_t h = 0; h < kv->n_kv_heads; h++, ret += kv->head_dim)
            ref_kv_widen(kn_kv_line_type(kv->type, KN_KV_K),
                         kn_kv_row(kv, s->slots[i], layer, KN_KV_K, h), kv->head_dim, ret);
}

void ref_kv_rotate(struct kn *kn, const struct kn_seq *s, const struct kn_rope *r,
                   const int32_t *from)
{
    (void)kn;
    const struct kn_kv *kv = s->kv;
    enum kn_type type = kn_kv_line_type(kv->type, KN_KV_K);
    float cos[KN_HEAD_DIM_MAX / 2], sin[KN_HEAD_DIM_MAX / 2], key[KN_HEAD_DIM_MAX];
    kn_assert(r->norm == NULL && r->n_heads == kv->n_kv_heads && r->head_dim == kv->head_dim);
    for (uint32_t i = 0; i < s->n; i++) {
        if (from[i] == (int32_t)i)
            continue;
        kn_turn_angles(r, from[i], (int32_t)i, cos, sin);
        for (uint32_t layer = 0; layer < kv->n_layers; layer++)
            for (uint32_t h = 0; h < kv->n_kv_heads; h++) {
                void *line = kn_kv_row(kv, s->slots[i], layer, KN_KV_K, h);
                ref_kv_widen(type, line, kv->head_dim, key);
                ref_rope_head(r, cos, sin, key);
                ref_kv_narrow(type, key, kv->head_dim, line);
            }
    }
}
