/* kn_quant.h: tensor types of GGUF files: names, block lengths and sizes. Layouts only, no maths.
 * The numbers are GGUF's own (they stand in files). Backends and the file reader share this table.
 */
#ifndef BACKCAST_KN_QUANT_H
#define BACKCAST_KN_QUANT_H
#include <stddef.h>
#include <stdint.h>

enum kn_type {
    KN_F32 = 0,
    KN_F16 = 1,
    KN_Q4_0 = 2,
    KN_Q4_1 = 3,
    KN_Q5_0 = 6,
    KN_Q5_1 = 7,
    KN_Q8_0 = 8,
    KN_Q2_K = 10,
    KN_Q3_K = 11,
    KN_Q4_K = 12,
    KN_Q5_K = 13,
    KN_Q6_K = 14,
    KN_IQ4_NL = 20,
    KN_IQ4_XS = 23,
    KN_I32 = 26, /* in golden files only: no arithmetic */
    KN_BF16 = 30,
    KN_Q8_Q4 = 31, /* pages alone: keys as Q8_0, values as Q4_0. No tensor is of it */
};

struct kn_type_info {
    enum kn_type type;
    const char *name; /* "Q4_1" */
    uint32_t block;   /* values in a block: 1, 32 or 256 */
    uint32_t bytes;   /* bytes of a block */
};

/* NULL: a type that no kernel knows. */
const struct kn_type_info *kn_type_find(uint32_t type);
const struct kn_type_info *kn_type_named(const char *name);

/* Expands `count` values (a multiple of the block) of packed type to f32: the scalar truth of every
 * format, used by ref, by loaders of small tensors, and by tests. type must be a known float or
 * block type. */
void kn_dequant(enum kn_type type, const void *packed, size_t count, float *ret);

/* IEEE half and bfloat16, round to nearest even; NaN stays NaN. */
float kn_f16_to_f32(uint16_t h);
uint16_t kn_f32_to_f16(float f);
float kn_bf16_to_f32(uint16_t h);
uint16_t kn_f32_to_bf16(float f);
#endif
