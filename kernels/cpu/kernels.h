/* kernels.h: what an instruction set must bring, and the shapes in which the rest of the backend
 * hands it work. A table per family and set (scalar, avx2, avx512); cpu.c picks when it opens.
 *
 * All of them read the same packed weights (pack.h) and staged activations, and do the same
 * arithmetic for quantised weights (kn_int8.h). Float sums may be ordered differently from set to
 * set, never from call to call. */
#ifndef BACKCAST_CPU_KERNELS_H
#define BACKCAST_CPU_KERNELS_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "kn.h"
#include "kn_int8.h"

#define CPU_LANES 16            /* outputs of a group: neighbours in a vector */
#define CPU_ROWS_MAX (1u << 24) /* rows of a weight */
#define CPU_COLS_MAX 65536u     /* columns of a weight: staging room is sized by it */
#define CPU_ROWS 16             /* rows of x that are staged together */
#define CPU_K_BLOCKS 64         /* 32-blocks that one q8 call takes at most */
#define CPU_K_BYTES 16384       /* of four groups of float weights that one call takes at most */
#define CPU_AHEAD_ROWS 4        /* rows from which q8_tile.ahead is asked for */
#define CPU_FLOAT_GROUPS 4      /* groups that are taken side by side, at most */

/* 32 columns of CPU_ROWS staged rows, quantised by rule 1 of kn_int8.h. A row block of x is an
 * array of these, one a 32-block. asum_neg is -(sum of a): shifted left it is the start of an int32
 * dot product over codes with a zero point. The [2] members are the same for 16-halves; they are
 * filled only for formats with two sub-blocks. */
struct act_block {
    int8_t a[CPU_ROWS][KN_INT8_BLOCK];
    float da[CPU_ROWS], sa[CPU_ROWS];
    int32_t asum_neg[CPU_ROWS];
    float sa_half[2][CPU_ROWS];
    int32_t asum_neg_half[2][CPU_ROWS];
};

/* The same with activations of 16 bits: the act_block holds their high bytes, and scales and sums of the
 * whole codes; behind it lie the low bytes. */
struct act_wide {
    struct act_block high;
    int8_t low[CPU_ROWS][KN_INT8_BLOCK];
};

/* A row's scale and what follows from it and the sums of its two halves. */
static inline void act_row_set(struct act_block *t, uint32_t row, float da, const int32_t sum[2],
                               bool halves)
{
    int32_t all = sum[0] + sum[1];
    t->da[row] = da;
    t->sa[row] = da * (float)all;
    t->asum_neg[row] = -all;
    for (int s = 0; halves && s < 2; s++) {
        t->sa_half[s][row] = da * (float)sum[s];
        t->asum_neg_half[s][row] = -sum[s];
    }
}

/* How codes lie in a group and what the inner loop does with them. Formats with a minimum have
 * zero point 0, the others have none. */
enum cpu_form {
    FORM_NIB,       /* 4-bit codes:                          Q4_0 */
    FORM_NIB_MIN,   /* with an offset a block:               Q4_1 Q4_K */
    FORM_NIB_2,     /* two sub-blocks of 16:                 Q3_K */
    FORM_NIB_2_MIN, /*                                       Q2_K */
    FORM_TABLE,     /* 4-bit codes into a table of bytes:    IQ4_NL IQ4_XS */
    FORM_BYTE,      /* 8-bit codes:                          Q8_0 Q5_0 */
    FORM_BYTE_MIN,  /*                                       Q5_1 Q5_K */
    FORM_BYTE_2,    /*                                       Q6_K */
};

/* What AMX's eight tiles look like to LDTILECFG. */
#define TILES 8
#define TILE_ROWS 16
#define TILE_BYTES 64
#define CPU_TILE_ROWS_MIN 8 /* rows of a row block from which a tile beats 16 outputs a row */
struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16]; /* of a row */
    uint8_t rows[16];
};

/* The tiles of amx-model. */
struct tile_model {
    struct tile_config config;
    uint8_t data[TILES][TILE_ROWS][TILE_BYTES];
    uint64_t n_dots; /* products since the configuration, for tests */
};

/* One thread's room for products by tiles. */
struct tile_room {
    _Alignas(64) int32_t sums[2][CPU_ROWS][CPU_LANES];
    uint8_t codes[CPU_K_BLOCKS * 512]; /* 4-bit codes as bytes: those at codes_of */
    const uint8_t *codes_of;
    uint32_t n_blocks;
    bool on; /* between begin and end */
    struct tile_model model;
};

/* acc[r][lane] continues over n_blocks blocks: rule 3 of kn_int8.h for n_rows rows and 16 outputs.
 */
struct q8_tile {
    enum cpu_form form;
    uint8_t zero;
    const int8_t *table;  /* [16], FORM_TABLE only */
    const uint8_t *codes; /* of the first block; 64-byte aligned */
    const float *d, *m;   /* [n_blocks][n_sub][16]; m only for *_MIN */
    uint32_t n_blocks;
    const void *x; /* [n_blocks] of struct act_block, or if `wide` of struct act_wide */
    bool wide;
    uint32_t row, n_rows;    /* rows of x's row block; row + n_rows <= CPU_ROWS */
    const uint8_t *ahead;    /* read later: to be asked for meanwhile */
    size_t ahead_step;       /* bytes of it a block; 0: none */
    float *acc;              /* of row `row` */
    size_t acc_stride;       /* floats from a row to the next */
    struct tile_room *tiles; /* the thread's, or NULL */
};

/* The same over float weights: ascending k, one fma a step. With matmul_kernels.pairs a BF16 weight is [n_k][16][2], n_k
 * counts pairs of columns, and `pairs` stands in for x: two bf16 each, the lower column in the lower half. */
struct float_tile {
    enum kn_type type;
    const void *w;            /* [n_k][16] of group 0 */
    size_t step, group_bytes; /* from one k, one group to the next: group_bytes < step */
    uint32_t n_groups;        /* of one bundle (pack.h) */
    uint32_t n_k;
    const float *x; /* [n_k][CPU_ROWS], at the first row */
    const uint32_t *pairs;
    uint32_t n_rows;
    float *acc; /* [n_groups] of [n_rows][16] */
    size_t acc_stride, acc_group;
};

/* Where the scales of a group's blocks lie; see pack.h. */
struct scale_src {
    const uint8_t *p; /* the group's scale region */
    bool super; /* small integers a block and halves a super-block of 8; else halves a block */
    bool has_min;
    unsigned n_sub;
    uint32_t first, n_blocks; /* first: multiple of 8 */
};

/* Where one tile's rows lie: n of them, lines of [d] values; the rest of the 64 are zeros. k[n..] are k[n - 1].
 * A key's value is to_v bytes behind it. */
struct attn_rows {
    enum kn_type type;
    uint32_t d, n;
    size_t to_v;
    const void *k[KN_TILE];
};

/* Queries that share one tile of keys and values. */
#define ATTN_Q_MAX 64
struct attn_tile {
    uint32_t d_pad;               /* head_dim rounded up to 16 */
    const float *kt;              /* [d_pad][64]: keys, turned; NULL: from rows, n_q <= turn_max */
    const float *v;               /* [64][d_pad] */
    const struct attn_rows *rows; /* not NULL: values are read from here, not from v; d == d_pad */
    const struct attn_rows
        *next; /* not NULL: memory is asked for these on the way; only with rows */
    uint32_t n_q;
    const float *q; /* [n_q][d_pad] */
    float *spread;  /* [n_q][d_pad][4] scratch, where kt is NULL */
    float scale;
    const uint8_t *lo, *hi; /* [n_q] the visible part of the tile, lo < hi, or lo == hi: none */
    float *s;               /* [n_q][64] scratch: scores, then weights */
    float *m, *l;           /* [n_q] of this tile; m = -inf, l = 0 where nothing is visible */
    float *acc;             /* [n_q][d_pad] */
};

/* (m, l, acc) <- merged with (m_t, l_t, acc_t); n_q <= ATTN_Q_MAX states. */
struct attn_merge {
    uint32_t n_q, d_pad;
    float *m, *l, *acc;
    const float *m_t, *l_t, *acc_t;
};

/* cos and sin [n_rot / 2] of one row's position. */
struct rope_row {
    enum kn_rope_style style;
    uint32_t n_heads, head_dim, n_rot;
    const float *norm, *cos, *sin;
    float norm_eps;
};

/* The tables: one of each family an instruction set; cpu.c chooses. */
struct matmul_kernels {
    const char
        *name; /* "scalar", "avx2", "avx512-vnni", "avx512-vnni-bf16", "amx-int8", "amx-model" */
    void (*q8)(const struct q8_tile *t);
    void (*floats)(const struct float_tile *t);
    void (*scales)(const struct scale_src *s, float *d, float *m);
    /* Row `row` of the row block at blocks; halves: fill the [2] members, too. */
    void (*quantise)(const float *x, uint32_t n_blocks, struct act_block *blocks, uint32_t row,
                     bool halves);
    void (*quantise_wide)(const float *x, uint32_t n_blocks, struct act_wide *blocks, uint32_t row,
                          bool halves);
    /* Not NULL: BF16 weights are multiplied as bf16. Rounds a row of x to it, pair k to to[k * CPU_ROWS]; an odd last
     * column has a 0 beside it. */
    void (*pairs)(const float *x, uint32_t cols, uint32_t *to);
    /* NULL but for tiles: a thread takes them before a run of products, and gives them back. */
    void (*begin)(struct tile_room *room);
    void (*end)(struct tile_room *room);
};

struct attn_kernels {
    /* Both tiles are padded with zeros to d_pad; v NULL: keys only. */
    void (*load)(const struct attn_rows *r, float *kt, float *v);
    void (*scores)(const struct attn_tile *t);  /* s scaled, outside of lo..hi -inf; m */
    void (*weights)(const struct attn_tile *t); /* s = exp(s - m), l */
    void (*values)(const struct attn_tile *t);  /* acc */
    void (*merge)(const struct attn_merge *m);
    void (*finish)(float *out, const float *acc, float l, uint32_t d); /* acc / l */
    uint32_t turn_max; /* queries up to which scores turns keys on its way */
};

/* Finished sums to their place: out (+)= acc (+ bias), n_rows of n. */
struct put_job {
    float *out;
    const float *acc, *bias; /* bias [n] or NULL */
    size_t out_stride, acc_stride;
    uint32_t n_rows, n;
    bool add;
};

/* A tile of logits joins the log-sum-exp of its rows: a lane has the greatest of its columns and the sum of exp(x - max). */
struct lse_tile {
    const float *x; /* [n_rows] of n <= x_stride */
    size_t x_stride;
    uint32_t n_rows, n;
    float *max, *sum; /* [n_rows][CPU_LANES], at first -FLT_MAX and 0 */
};

struct vec_kernels {
    void (*put)(const struct put_job *p);
    void (*rmsnorm)(float *out, const float *x, const float *gain, uint32_t d, float eps);
    void (*rope)(const struct rope_row *r, float *x);
    void (*swiglu)(float *out, const float *gate, const float *up, size_t n);
    void (*lse_add)(const struct lse_tile *t);
    void (*lse_row)(const float *max, const float *sum, float *ret_max,
                    float *ret_sum);                                      /* all lanes */
    void (*widen)(float *out, const uint16_t *h, size_t n, float scale);  /* halves, times it */
    void (*narrow)(uint16_t *out, const float *x, size_t n, float scale); /* x * scale to halves */
    /* n values out of a key's line in a page; into a key's or a value's (KN_Q4_0: values alone). */
    void (*line_get)(enum kn_type type, float *out, const void *line, size_t n);
    void (*line_put)(enum kn_type type, void *line, const float *x, size_t n);
    void (*hadamard_on)(float *x, uint32_t n); /* kn_hadamard.h */
    void (*hadamard_off)(float *x, uint32_t n);
    float (*max_abs)(const float *x, size_t n);
};

extern const struct matmul_kernels matmul_scalar, matmul_avx2, matmul_avx512, matmul_avx512bf16,
    matmul_amx, matmul_amx_model;
extern const struct attn_kernels attn_scalar, attn_avx2, attn_avx512;
extern const struct vec_kernels vec_scalar, vec_avx2, vec_avx512;
#endif
