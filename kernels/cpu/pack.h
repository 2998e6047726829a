/* pack.h: weights as the kernels want them, made once at weight_load.
 *
 * Outputs (rows of the matrix) go in groups of 16: the lanes of one AVX-512 register, or of two
 * AVX2 ones. A group holds all its columns; the rows of the last group that do not exist are zeros.
 *
 *   quantised:  group = [ scales ][ codes of block 0 | block 1 | ... ]      block = 32 columns
 *               (in the order of use: memory is read once, straight on)
 *
 *     codes of a block, 8-bit form (512 bytes): 8 chunks of 64 bytes; a chunk is 4 columns of 16
 * outputs
 *
 *        chunk c:   o0: k4c k4c+1 k4c+2 k4c+3 | o1: ... | ... | o15: ...        one byte a code
 *
 *     4-bit form (256 bytes): 4 lines of 64 bytes; line j has chunk j in its low nibbles and chunk
 * j + 4 in its high ones, so that low and high halves of a block are its two 16-sub-blocks
 *
 *     scales, formats of 32 values (halves):   block:        d[16] (m[16])
 *     scales, formats of 256 values:           super-block:  d[16] (dmin[16])          halves
 *                                              then 8 times  scale[n_sub][16] (min[n_sub][16])
 * bytes
 *
 *   float:      bundle = [k][4 groups][16] in the file's own type
 *   bf16 pairs: bundle = [k / 2][4 groups][16][2], an odd last column with a 0 beside it
 *
 *     Four groups side by side, because one row needs several chains of sums, and memory is fastest as one stream.
 *
 * Bits a weight: Q4_0 4.5, Q4_1 5, Q8_0 8.5, Q4_K 4.625, IQ4_XS 4.31 (as in the file, or a hair
 * more); Q5_* about 9, Q6_K 9.06 (bytes instead of 5 or 6 bits); Q2_K, Q3_K about 5. */
#ifndef BACKCAST_CPU_PACK_H
#define BACKCAST_CPU_PACK_H
#include "kernels.h"
#include "slab.h"

#define CPU_WEIGHT_MAGIC 0x6b6e7077u

struct kn_weight {
    unsigned magic;
    enum kn_type type;
    uint32_t rows, cols, n_groups;
    const struct kn_int8_format *format; /* NULL: float type */
    enum cpu_form form;
    bool super;          /* scales of a 256-format */
    bool pairs;          /* bf16, two columns side by side */
    size_t scales_bytes; /* of a group, rounded up to 64: codes start there; 0 for float types */
    size_t group_bytes;  /* multiple of 64; of floats: a fourth of a bundle */
    size_t bytes;
    uint8_t *data;
    struct slab *slab; /* that data lies in */
};

/* Bytes that a step of k takes in a group of floats. */
static inline size_t pack_line(const struct kn_weight *w)
{
    return w->type == KN_F32 || w->pairs ? 4 * CPU_LANES : 2 * CPU_LANES;
}

/* Step 0 of a group of floats. */
static inline const uint8_t *pack_floats(const struct kn_weight *w, uint32_t group)
{
    size_t bundle = group / CPU_FLOAT_GROUPS * CPU_FLOAT_GROUPS * w->group_bytes;
    return w->data + bundle + group % CPU_FLOAT_GROUPS * pack_line(w);
}

/* Of a quantised weight. */
static inline const uint8_t *pack_group(const struct kn_weight *w, uint32_t group)
{
    return w->data + group * w->group_bytes;
}

/* Codes of block `block` of a quantised group. */
static inline const uint8_t *pack_codes(const struct kn_weight *w, uint32_t group, uint32_t block)
{
    return pack_group(w, group) + w->scales_bytes +
           (size_t)block * (w->form >= FORM_BYTE ? 512 : 256);
}

/* Scales of blocks first .. first + n of one group. */
static inline struct scale_src pack_scales(const struct kn_weight *w, uint32_t group,
                                           uint32_t first, uint32_t n)
{
    return (struct scale_src){pack_group(w, group), w->super, w->format->has_min,
                              w->format->n_sub,     first,    n};
}
/* Fills the shape of w from type, rows, cols. pairs: how BF16 shall lie. KN_EINVALID: they contradict each other; KN_EUNSUPPORTED:
 * no kernel for it. */
int pack_plan(struct kn_weight *w, const struct kn_tensor *src, bool pairs);
/* Packs groups first .. end - 1 into w->data (zeroed). */
void pack_groups(const struct kn_weight *w, const struct kn_tensor *src, uint32_t first,
                 uint32_t end);
/* One row back as floats, exactly as kn_dequant gives them. out: [cols]. */
void pack_row(const struct kn_weight *w, uint32_t row, float *out);
#endif
