/* ref.h: inside the ref backend: plain C, one thread, f32 maths over expanded weights. It is the
 * truth that the fast backends are compared with, and the slow path when something looks wrong
 * (--backend ref).
 *
 * The ops keep no state of their own: all they touch in the handle is struct kn's counters and its
 * table. So another backend whose device memory is ordinary memory may start from this table and
 * replace op by op. */
#ifndef BACKCAST_REF_H
#define BACKCAST_REF_H
#include "kn.h"
#include "kn_assert.h"

struct kn_weight {
    unsigned magic;
    enum kn_type type;
    uint32_t rows, cols;
    size_t row_bytes, bytes;
    uint8_t *data; /* as in the file; 64-byte aligned */
};
#define REF_WEIGHT_MAGIC 0x72657777u

/* Sixteen floats side by side. Lanes are outputs, keys or dims: never the axis of a sum, so every sum keeps its
 * ascending order. The loops that matter hold them as four vectors of four, which fit the registers of any x86-64 (one
 * vector of sixteen would be kept in memory). */
#define REF_LANES 16
typedef float ref_four __attribute__((vector_size(16)));
union ref_lanes {
    ref_four v[4];
    float f[REF_LANES];
};

/* memory.c, arena.c */
int ref_buf_alloc(struct kn *kn, size_t bytes, void **ret);
void ref_buf_free(struct kn *kn, void *buf, size_t bytes);
void ref_upload(struct kn *kn, void *dst_device, const void *src_host, size_t bytes);
void ref_download(struct kn *kn, void *dst_host, const void *src_device, size_t bytes);
int ref_arena_open(struct kn *kn, size_t stride, uint32_t n_pages, void **ret_base);
int ref_arena_commit(struct kn *kn, void *base, size_t stride, uint32_t page);
void ref_arena_release(struct kn *kn, void *base, size_t stride, uint32_t page);
void ref_arena_close(struct kn *kn, void *base, size_t stride, uint32_t n_pages);

/* weights.c */
int ref_weight_load(struct kn *kn, const struct kn_tensor *src, struct kn_weight **ret);
void ref_weight_free(struct kn *kn, struct kn_weight **w);
size_t ref_weight_bytes(const struct kn_weight *w);
/* Values first .. first + n of row `row`, as floats. first and n: multiples of the type's block. */
void ref_weight_expand(const struct kn_weight *w, uint32_t row, uint32_t first, uint32_t n,
                       float *ret);
void ref_embed(struct kn *kn, const struct kn_weight *w, const struct kn_batch *b, float *out);

/* linear.c */
#define REF_TILE_ROWS 64
/* acc[r][i] = x[r] . row (first + i) of w, r < rows <= REF_TILE_ROWS, i < n <= REF_LANES. x:
 * [rows][w->cols]. */
void ref_linear_tile(const struct kn_weight *w, uint32_t first, uint32_t n, const float *x,
                     uint32_t rows, union ref_lanes *acc);
void ref_linear(struct kn *kn, uint32_t n_w, const struct kn_weight *const *w,
                const float *const *bias, const float *x, uint32_t rows, float *const *outs,
                bool add);

/* vec.c */
void ref_rmsnorm(struct kn *kn, float *out, const float *x, const float *gain, uint32_t rows,
                 uint32_t d, float eps);
void ref_swiglu(struct kn *kn, float *out, const float *gate, const float *up, size_t n);
void ref_gather_rows(struct kn *kn, float *out, const float *x, const uint32_t *rows, uint32_t n,
                     uint32_t d);
void ref_rope(struct kn *kn, const struct kn_batch *b, const struct kn_rope *r, float *x);
/* Turns the leading n_rot values of one head, x [head_dim]. cos, sin: [n_rot / 2] */
void ref_rope_head(const struct kn_rope *r, const float *cos, const float *sin, float *x);

/* kv.c */
void ref_batch_begin(struct kn *kn, const struct kn_batch *b);
void ref_batch_end(struct kn *kn, const struct kn_batch *b);
void ref_row_copy(struct kn *kn, const struct kn_kv *kv, uint32_t dst_slot, uint32_t src_slot);
void ref_kv_write(struct kn *kn, const struct kn_batch *b, uint32_t layer, const float *k,
                  const float *v);
void ref_hidden_write(struct kn *kn, const struct kn_batch *b, const float *x);
void ref_hidden_read(struct kn *kn, const struct kn_batch *b, const uint32_t *row_slots,
                     float *out);
void ref_keys_read(struct kn *kn, const struct kn_seq *s, uint32_t layer, uint32_t first,
                   uint32_t count, float *ret);
void ref_kv_rotate(struct kn *kn, const struct kn_seq *s, const struct kn_rope *r,
                   const int32_t *from);
/* Elements of a pool (f32 or f16) to and from floats. */
void ref_kv_widen(enum kn_type type, const void *src, uint32_t n, float *ret);
void ref_kv_narrow(enum kn_type type, const float *src, uint32_t n, void *ret);

/* attention.c */
void ref_attention(struct kn *kn, const struct kn_batch *b, uint32_t layer, const float *q,
                   uint32_t n_heads, float scale, float *out);
void ref_attention_row(struct kn *kn, const struct kn_seq *s, uint32_t layer, const float *q,
                       uint32_t n_heads, float scale, float *ret);

/* head.c */
void ref_row_logit(struct kn *kn, const struct kn_weight *w, const float *x, uint32_t rows,
                   const int32_t *ids, float *ret);
void ref_row_lse(struct kn *kn, const struct kn_weight *w, const float *x, uint32_t rows,
                 float *ret);

/* ref.c */
void ref_close(struct kn *kn);
int ref_status(struct kn *kn);
void ref_sync(struct kn *kn);
extern const struct kn_ops ref_ops;
#endif
