/* kernels_compare.h: for tests of kernels: every backend at every instruction set that opens here,
 * made-up weights of every type, ops called with host arrays, and comparisons that name the place
 * that differs.
 *
 * A truth is computed once (by ref, by the integer rule, or by a formula in the test) and every
 * backend of the set is held against it:
 *
 *      kc_open(&set, 3);                       ref stands first
 *      for (i < set.n) kc_near(kc_name(set.kn[i]), got, want, ...)
 *
 * All memory that these functions return is the caller's (free). Failures are cmocka's. */
#ifndef BACKCAST_KERNELS_COMPARE_H
#define BACKCAST_KERNELS_COMPARE_H
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "kn.h"
#include "kn_int8.h"

#define KC_BACKENDS_MAX 16
#define KC_LEN(a) (sizeof(a) / sizeof((a)[0]))

/* ---- backends ---- */
struct kc_set {
    struct kn *kn[KC_BACKENDS_MAX]; /* [0] is ref */
    unsigned n;
};
void kc_open(struct kc_set *set, uint32_t threads);
/* ref, and every cpu backend with 16-bit activations. */
void kc_open_wide(struct kc_set *set, uint32_t threads);
void kc_close(struct kc_set *set);
/* A test program's one set, of three threads: setup and teardown of its group. */
extern struct kc_set kc_all;
int kc_all_open(void **state);
int kc_all_close(void **state);
/* "cpu avx2 a8 x3": valid until the call after the next */
const char *kc_name(const struct kn *kn);
bool kc_is_ref(const struct kn *kn);
/* Quantised weights follow kn_int8.h to the bit. */
bool kc_is_int8(const struct kn *kn);
/* BF16 weights meet activations rounded to bf16, by the rule of kernels/cpu/matmul_bf16.h to the bit. */
bool kc_is_bf16(const struct kn *kn);
/* A GPU, or its sources on the shim. The order of its sums depends on how many rows a call has, and wherever inputs are
 * halves (f16 pools, products of many rows) they are rounded to them: KC_HALVES of the largest value. */
bool kc_is_device(const struct kn *kn);
#define KC_HALVES 2e-3f

/* ---- made-up data, the same on every machine ---- */
struct kc_rng {
    uint64_t state;
};
uint32_t kc_bits(struct kc_rng *r);
uint32_t kc_below(struct kc_rng *r, uint32_t n);
float kc_normal(struct kc_rng *r);                          /* mean 0, deviation 1, within +-6 */
float *kc_floats(uint64_t seed, size_t n, float deviation); /* n normal values */

extern const enum kn_type kc_types[]; /* every type that a matrix can have */
extern const size_t kc_n_types;
/* Random codes with scales of ordinary size; values of deviation about 0.02 to 0.5. data is
 * malloc'ed. */
struct kn_tensor kc_tensor(enum kn_type type, uint32_t rows, uint32_t cols, uint64_t seed);
void kc_tensor_free(struct kn_tensor *t);
float *kc_tensor_values(const struct kn_tensor *t); /* expanded by kn_dequant */

/* ---- device memory ---- */
void *kc_up(struct kn *kn, const void *host,
            size_t bytes); /* allocates and uploads; host may be NULL */
void kc_drop(struct kn *kn, void *dev, size_t bytes);
void kc_down(struct kn *kn, void *host, void *dev, size_t bytes); /* downloads and frees */
struct kn_weight *kc_load(struct kn *kn, const struct kn_tensor *t);

/* ---- ops with host arrays ---- */
/* One weight (of this shape), no bias: out [rows][t->rows]. */
void kc_linear(struct kn *kn, const struct kn_weight *w, const struct kn_tensor *t, const float *x,
               uint32_t rows, float *out);

/* A pool of committed pages and one set of sequences over it. */
struct kc_pool {
    struct kn *kn;
    struct kn_kv kv;
    uint32_t n_pages;
};
/* kv: shape and type; base and stride are filled in. Every slot starts as large finite garbage. */
void kc_pool_open(struct kc_pool *p, struct kn *kn, struct kn_kv kv, uint32_t n_pages);
void kc_pool_close(struct kc_pool *p);
/* Writes tokens from..to of seq to its slots. k, v [to][n_kv_heads][head_dim] and hidden [to][d_hidden]: from token 0
 * on; k NULL: no keys and values; hidden NULL: no hidden rows. */
struct kc_rows {
    uint32_t from, to;
    const float *k, *v, *hidden;
};
void kc_pool_write(struct kc_pool *p, const struct kn_seq *seq, uint32_t layer,
                   struct kc_rows rows);
/* What n floats are once they were stored as keys of that type (n a multiple of its block), by a formula of its own; and as
 * values of heads of that size: q8_q4's are turned before, and here turned back. */
void kc_stored(enum kn_type type, const float *x, size_t n, float *ret);
void kc_stored_values(enum kn_type type, uint32_t head_dim, const float *x, size_t n, float *ret);
/* Whether pages of that type and head size exist on this backend. */
bool kc_has_kv(const struct kn *kn, enum kn_type type, uint32_t head_dim);
/* Slot lists. KC_SCATTERED: n of the pool's slots in no order; KC_PRUNED: ascending with holes. */
enum kc_slots { KC_DENSE, KC_PRUNED, KC_SCATTERED };
uint32_t *kc_slots(enum kc_slots how, uint32_t n, uint32_t n_pages, uint64_t seed);
/* out and q: [n_rows][n_heads][head_dim] of a batch. */
struct kc_queries {
    uint32_t layer, n_heads;
    float scale;
    const float *q;
};
void kc_attention(struct kn *kn, const struct kn_batch *b, struct kc_queries q, float *out);

/* ---- comparisons ---- */
/* |got - want| <= tol * size for every value; size: what the values are made of (see each test). */
void kc_near(const char *what, const float *got, const float *want, size_t n, float size,
             float tol);
void kc_same(const char *what, const float *got, const float *want,
             size_t n); /* same bits; -0 is not 0 */
/* The same bits from a CPU, values within tol of the largest from a device. */
void kc_alike(const struct kn *kn, const float *got, const float *want, size_t n, float tol);
float kc_max_abs(const float *x, size_t n);
#endif
