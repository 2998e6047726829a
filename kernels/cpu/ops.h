/* ops.h: the ops that the files of this folder put into the table. kn.h says what they do. */
#ifndef BACKCAST_CPU_OPS_H
#define BACKCAST_CPU_OPS_H
#include "kn.h"

/* linear.c */
void cpu_linear(struct kn *kn, uint32_t n_w, const struct kn_weight *const *w,
                const float *const *bias, const float *x, uint32_t rows, float *const *outs,
                bool add);
/* head.c */
int cpu_weight_load(struct kn *kn, const struct kn_tensor *src, struct kn_weight **ret);
void cpu_weight_free(struct kn *kn, struct kn_weight **w);
size_t cpu_weight_bytes(const struct kn_weight *w);
void cpu_embed(struct kn *kn, const struct kn_weight *w, const struct kn_batch *b, float *out);
void cpu_row_logit(struct kn *kn, const struct kn_weight *w, const float *x, uint32_t rows,
                   const int32_t *ids, float *ret);
void cpu_row_lse(struct kn *kn, const struct kn_weight *w, const float *x, uint32_t rows,
                 float *ret);
/* attn.c */
void cpu_attention(struct kn *kn, const struct kn_batch *b, uint32_t layer, const float *q,
                   uint32_t n_heads, float scale, float *out);
void cpu_attention_row(struct kn *kn, const struct kn_seq *s, uint32_t layer, const float *q,
                       uint32_t n_heads, float scale, float *ret);
/* rows.c */
void cpu_batch_begin(struct kn *kn, const struct kn_batch *b);
void cpu_batch_end(struct kn *kn, const struct kn_batch *b);
void cpu_rmsnorm(struct kn *kn, float *out, const float *x, const float *gain, uint32_t rows,
                 uint32_t d, float eps);
void cpu_rope(struct kn *kn, const struct kn_batch *b, const struct kn_rope *r, float *x);
void cpu_swiglu(struct kn *kn, float *out, const float *gate, const float *up, size_t n);
void cpu_kv_write(struct kn *kn, const struct kn_batch *b, uint32_t layer, const float *k,
                  const float *v);
void cpu_hidden_write(struct kn *kn, const struct kn_batch *b, const float *x);
void cpu_hidden_read(struct kn *kn, const struct kn_batch *b, const uint32_t *row_slots,
                     float *out);
void cpu_keys_read(struct kn *kn, const struct kn_seq *s, uint32_t layer, uint32_t first,
                   uint32_t count, float *ret);
void cpu_kv_rotate(struct kn *kn, const struct kn_seq *s, const struct kn_rope *r,
                   const int32_t *from);
#endif
