/* cpu.h: inside the cpu backend: the handle, its scratch, and the ops that the files provide.
 *
 * Compute ops cannot fail, so all scratch is taken when the backend opens; a call that needs more
 * goes in pieces that fit. */
#ifndef BACKCAST_CPU_H
#define BACKCAST_CPU_H
#include "kernels.h"
#include "kn_assert.h"
#include "slab.h"
#include "workers.h"

#define STAGE_ROWS 256 /* rows staged at a time, at most */
#define ACC_ROWS 64    /* rows and outputs that a thread sums up before it writes them */
#define ACC_COLS (CPU_FLOAT_GROUPS * CPU_LANES)
#define ROWS_READ 4      /* kn.rows_read */
#define LSE_ROWS 256     /* rows of a row_lse piece */
#define LSE_SLICE 512    /* vocabulary rows that are summed together: fixed, see row_lse */
#define LSE_TILE 128     /* of them, whose logits exist at a time */
#define LSE_SLICES 256   /* slices of one parallel loop */
#define ATTN_BLOCKS 1024 /* row blocks of one parallel loop */
#define ATTN_PART_FLOATS (1u << 20)  /* parts of split attention */
#define ATTN_STATE_FLOATS (1u << 18) /* their running states */
#define ROPE_TABLES 2
#define ROPE_TABLE_FLOATS (1u << 18)
#define ROPE_PLACES 4096                            /* of a table, at most */
#define STAGE_BLOCKS (CPU_COLS_MAX / KN_INT8_BLOCK) /* of 16 rows, staged at a time */
#define STAGE_FLOAT_BYTES ((size_t)CPU_COLS_MAX * CPU_ROWS * sizeof(float))

/* Rows of x, ready for the kernels: row r is row r % CPU_ROWS of row block r / CPU_ROWS. */
struct stage {
    uint32_t rows, cols, n_blocks;
    void *q8;        /* [row blocks][n_blocks] of struct act_block or act_wide */
    float *floats;   /* [row blocks][cols][CPU_ROWS] */
    uint32_t *pairs; /* [row blocks][(cols + 1) / 2][CPU_ROWS]; NULL: BF16 weights take floats */
};

/* What one thread needs; 64-byte aligned. */
struct cpu_scratch {
    float d[CPU_K_BLOCKS * 2 * CPU_LANES], m[CPU_K_BLOCKS * 2 * CPU_LANES];
    float acc[ACC_ROWS * ACC_COLS];
    float logits[LSE_ROWS * LSE_TILE];
    float lse_max[LSE_ROWS * CPU_LANES], lse_sum[LSE_ROWS * CPU_LANES];
    float kt[KN_HEAD_DIM_MAX * KN_TILE], v[KN_TILE * KN_HEAD_DIM_MAX];
    float q[ATTN_Q_MAX * KN_HEAD_DIM_MAX], a[ATTN_Q_MAX * KN_HEAD_DIM_MAX];
    float a_span[ATTN_Q_MAX * KN_HEAD_DIM_MAX], a_t[ATTN_Q_MAX * KN_HEAD_DIM_MAX];
    float s[ATTN_Q_MAX * KN_TILE];
    float m_run[ATTN_Q_MAX], l_run[ATTN_Q_MAX], m_span[ATTN_Q_MAX], l_span[ATTN_Q_MAX],
        m_t[ATTN_Q_MAX], l_t[ATTN_Q_MAX];
    uint8_t lo[ATTN_Q_MAX], hi[ATTN_Q_MAX];
    struct attn_rows
        rows[2]; /* of the tile that is looked at, rows[now], and if `more`, of the one after it */
    unsigned now;
    bool more;
};

/* Neighbouring rows of one sequence: they share tiles. */
struct attn_block {
    uint32_t row, n_rows;
    uint32_t first_tile, end_tile; /* that any row sees */
};

/* cos and sin of positions for one set of frequencies. A position has one place; what was made for a pass stays for later ones
 * that are at the same positions. */
struct rope_table {
    const struct kn_batch *batch; /* whose positions have their places; NULL: none's */
    float inv_freq[KN_HEAD_DIM_MAX / 2];
    uint32_t n_rot, n_places; /* n_places 0: empty */
    uint32_t now;             /* number of the fill */
    uint32_t *since;          /* [n_places] the fill that last had it; 0: none */
    int32_t *positions;       /* [n_places] */
    uint32_t *todo;           /* [n_places] */
    float *cs;                /* [n_places][2][n_rot / 2] */
};

struct kn_cpu {
    struct kn kn; /* first */
    unsigned magic;
    const struct matmul_kernels *mat;
    const struct attn_kernels *attn;
    const struct vec_kernels *vec;
    bool wide; /* activations of 16 bits: blocks are of struct act_wide */
    struct team *team;
    struct slab_set slabs;
    struct cpu_scratch *scratch; /* [n_threads] */
    struct tile_room *tiles;     /* [n_threads], or NULL */
    struct stage stage;
    float *lse;        /* [2][LSE_SLICES][LSE_ROWS] */
    float *attn_part;  /* [ATTN_PART_FLOATS] */
    float *attn_state; /* [ATTN_STATE_FLOATS] */
    struct attn_block *attn_blocks;
    struct rope_table rope[ROPE_TABLES];
    unsigned rope_next;
    void *room; /* all of the above in one piece */
    size_t room_bytes;
};
#define CPU_MAGIC 0x6b6e6370u

/* Block b of row block `block` of the stage. */
static inline void *cpu_staged(const struct kn_cpu *c, uint32_t block, uint32_t b)
{
    size_t bytes = c->wide ? sizeof(struct act_wide) : sizeof(struct act_block);
    return (uint8_t *)c->stage.q8 + ((size_t)block * c->stage.n_blocks + b) * bytes;
}

static inline struct kn_cpu *cpu_of(struct kn *kn)
{
    struct kn_cpu *c = (struct kn_cpu *)kn;
    kn_assert(kn && kn->magic == KN_MAGIC && c->magic == CPU_MAGIC);
    return c;
}
#endif
