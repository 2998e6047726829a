/* backend.h: inside the CUDA backend: one opened device, its memory, and the ops as it keeps them.
 *
 *      kn_ops entry          cuda_rmsnorm(...)     packs its arguments into a struct op
 *      op_submit             a decode pass: the op joins the pass's list (capture.cu)     anything else: op_run
 *      op_run                run_rmsnorm(c, op)    launches on the pass's stream, never waits
 *
 * A decode pass is a list of ops with the same arguments step after step (what differs lies in the batch's device memory),
 * so the list is looked up when the pass is flushed, and a CUDA graph of it is launched if there is one. Whatever needs
 * results on the host flushes first.
 *
 * One thread calls. Streams: a pass runs on the stream of its kind, and a pass waits for the one before it by an event,
 * because passes share their caller's work buffers; so `stream` is where everything goes until the next batch_begin.
 *
 * The first failed call ends it: `failed` keeps its code, kn.failed says which it was, ops do nothing from then on, results
 * on the host are zeros, and status() is KN_EDEVICE. Out of memory in a set-up call is KN_ENOMEM and not a failure. */
#ifndef BACKCAST_CUDA_BACKEND_H
#define BACKCAST_CUDA_BACKEND_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wshadow" /* struct kn_int8_format and the function of that name */
extern "C" {
#include "kn.h"
#include "kn_int8.h"
}
#pragma GCC diagnostic pop
#include "kn_assert.h"
#include "rt.h"

#define CUDA_WEIGHT_MAGIC 0x63756477u
#define GRANULE ((size_t)2 << 20) /* of mapped device memory */
#define RING_HALF ((size_t)1 << 20)
#define SIDE_BYTES ((size_t)1 << 20)
#define OPS_MAX 4096 /* of one pass: a model of 250 layers */
#define GRAPHS_MAX 48
#define BRIEF_OPS_MAX 32   /* of a score pass that becomes a graph: two layers */
#define DECODE_ROWS_MAX 32 /* rows of a pass that becomes a graph */
#define COUNTS_MAX 4096    /* blocks of attention that may be split */
/* Queries of a block of attention_many.cu where it takes two fragments a warp, and which cards have the memory for it. */
#define ATTN_QUERIES_PAIRED 128
#define ATTN_PAIRED_SM 90
#define ATTN_WIDE_LARGE_SM 80 /* attention_wide.cuh */
/* kn.rows_read: 2 bytes of a weight against 2 operations a row, 4.5 TB/s against 700 TFLOP/s. kn.slice_us: about a decode
 * pass over 7 billion halves. */
#define ROWS_READ 128
#define SLICE_US 5000

enum stream_kind { STREAM_DECODE, STREAM_PREFILL, STREAM_REFRESH, STREAM_COPY, STREAM_N };

/* ---- what kernels see of a batch ---- */

struct dev_seq {
    uint8_t *base; /* kn_kv's pages */
    size_t stride;
    const uint32_t *slots;
    uint32_t n, n_layers, n_kv_heads, head_dim, d_hidden;
    uint32_t type; /* enum kn_type */
};

/* Rows of one sequence that one block of attention takes together: few queries over halves (decode), many over halves, the
 * same over pages of bf16 or q8_0 (WIDE), and any number over f32. */
enum tile_class { TILE_FEW, TILE_MANY, TILE_FEW_WIDE, TILE_MANY_WIDE, TILE_FLOAT, TILE_N };
struct dev_tile {
    uint32_t row, n_rows, seq;
    uint32_t lo, hi; /* from the first index that a row sees to the last one */
    uint32_t all_lo,
        all_hi; /* what every row sees; UINT32_MAX and 0 if there is a row that sees nothing */
    uint32_t reserved;
};

struct dev_batch {
    const int32_t *ids, *positions;
    const uint32_t *seq, *lo, *hi, *slots; /* slots: NULL in a score pass */
    const struct dev_seq *seqs;
    const struct dev_tile *tiles; /* by class, long ones first */
    uint32_t n_rows, n_seqs;
    uint32_t n_tiles[TILE_N];
    uint32_t span; /* power of two >= every hi: what grids are sized by */
};

/* ---- weights: weights.cu ---- */

/* The planes of a quantised matrix (quant.cuh), or the rows of a float one. Plain data, passed to kernels by value. */
struct packed {
    const uint8_t *a, *b, *s;     /* codes, codes' upper bits, scales of a block */
    const uint32_t *super;        /* scale and minimum of a super-block, two halves */
    uint32_t rows, cols, kb, kbp; /* blocks of 32 in a row; padded to a multiple of 4 */
    uint32_t ld; /* float types: elements from row to row, a multiple of 16 bytes */
};

struct kn_weight {
    unsigned magic;
    enum kn_type type;
    uint32_t rows, cols;
    size_t bytes;
    void *mem; /* one allocation, all planes */
    struct packed p;
};

/* ---- ops ---- */

enum op_kind {
    OP_EMBED,
    OP_RMSNORM,
    OP_LINEAR,
    OP_ROPE,
    OP_KV_WRITE,
    OP_HIDDEN_WRITE,
    OP_HIDDEN_READ,
    OP_ATTENTION,
    OP_SWIGLU,
    OP_GATHER,
    OP_LOGIT,
    OP_N
};

struct op_embed {
    const struct kn_weight *w;
    float *out;
};
struct op_rmsnorm {
    float *out;
    const float *x, *gain;
    uint32_t rows, d;
    float eps;
};
struct op_linear {
    const struct kn_weight *w[KN_LINEAR_MAX];
    const float *bias[KN_LINEAR_MAX];
    float *outs[KN_LINEAR_MAX];
    const float *x;
    uint32_t n_w, rows;
    uint32_t add;
};
struct op_rope {
    struct kn_rope r;
    float *x;
};
struct op_kv_write {
    const float *k, *v;
    uint32_t layer;
    uint32_t n_heads, d; /* of the pages, if all sequences' are alike; else 0 */
};
struct op_hidden {
    float *x;
    const uint32_t *slots; /* device; hidden_read */
    uint32_t d;
};
struct op_attention {
    const float *q;
    float *out;
    uint32_t layer, n_heads, n_kv_heads, head_dim;
    float scale;
};
struct op_swiglu {
    float *out;
    const float *gate, *up;
    size_t n;
};
struct op_gather {
    float *out;
    const float *x;
    const uint32_t *rows; /* device */
    uint32_t n, d;
};
struct op_logit { /* to scratch.l */
    const struct kn_weight *w;
    const float *x;
    const int32_t *ids; /* device */
    uint32_t rows;
};

/* Compared and hashed as bytes: start from op_make, which zeroes the gaps. */
struct op {
    uint32_t kind, reserved;
    union {
        struct op_embed embed;
        struct op_rmsnorm rmsnorm;
        struct op_linear linear;
        struct op_rope rope;
        struct op_kv_write kv_write;
        struct op_hidden hidden;
        struct op_attention attention;
        struct op_swiglu swiglu;
        struct op_gather gather;
        struct op_logit logit;
    } u;
};

static inline struct op op_make(enum op_kind kind)
{
    struct op o;
    memset(&o, 0, sizeof o);
    o.kind = kind;
    return o;
}

/* ---- the device ---- */

/* The form in which a product wants its input of [rows][cols] floats. */
struct wanted {
    cudaDataType
        type; /* CUDA_R_16F, CUDA_R_16BF; CUDA_R_8I: as weights of this type take it; CUDA_R_32F: as it is */
    enum kn_type weight;
    uint32_t rows, cols, rows_pad;
};
#define WANTED_FLOATS                                                                              \
    {                                                                                              \
        CUDA_R_32F, KN_F32, 0, 0, 0                                                                \
    }

/* Ops that rope.cu runs in one launch: of queries and keys, and the keys' and values' way into pages. */
#define ROPES_MAX 2
struct rope_set {
    struct kn_rope r[ROPES_MAX];
    float *x[ROPES_MAX];
    struct op_kv_write kv; /* v NULL: none */
    uint32_t n;            /* 0: nothing waits */
};

/* What is known of the floats at x, because the op before has just made them. It lasts until the next op. */
struct input {
    const float *x;     /* NULL: nothing is known */
    const float *scale; /* device: the power of two that they are divided by as halves */
    const void *data;   /* where they are in this type (of `wanted`); then x may hold anything */
    cudaDataType type;  /* CUDA_R_32F: x holds them */
};

/* Floats at scratch.one: constants, and scales that a kernel leaves for a product. */
enum scalar {
    SCALAR_ONE,
    SCALAR_ZERO,
    SCALAR_TWO,
    SCALAR_NARROW,
    SCALAR_NORM,
    SCALAR_GATE,
    SCALAR_N
};
/* Words at scratch.words. Those of the gate are zero whenever its kernels begin. */
enum word { WORD_LARGEST, WORD_GATE, WORD_GATE_DONE, WORD_N };

/* One block of device memory, planned at open and shared by all ops (they follow each other on one stream). */
struct scratch {
    uint8_t *base;
    size_t bytes;
    uint8_t *x; /* activations in the form that a product wants; attention's partial results */
    size_t x_bytes;
    uint8_t *w; /* a slice of weights as halves; raw blocks while weights are loaded */
    size_t w_bytes;
    float *l; /* a slice of logits; split products */
    size_t l_bytes;
    uint8_t *blas; /* cuBLAS's work space */
    size_t blas_bytes;
    float *one;       /* device: what enum scalar says, for products that take it from there */
    uint32_t *words;  /* device: enum word */
    uint32_t *counts; /* COUNTS_MAX zeros: attention.cuh */
};

/* Pinned host memory in two halves: a half is written again when its copy is done. */
struct ring {
    uint8_t *host; /* 2 * RING_HALF */
    cudaEvent_t done[2];
    bool busy[2];
    unsigned turn;
    uint8_t *side; /* device, SIDE_BYTES: small host arrays for kernels */
    size_t side_at;
};

/* What batch_begin stages: pinned and device memory of the same layout (batch.cu). */
struct batch {
    uint8_t *host, *dev;
    size_t cap;
    cudaEvent_t copied;
    bool in_flight; /* the copy may not have read all of host yet */
    bool open, uploaded;
    const struct kn_batch *b;
    struct dev_batch view;
    size_t bytes, tiles_at;
    size_t side_at, side_used, side_sent, side_end; /* side arrays: used up to, copied up to */
    uint32_t n_heads, group, head_dim;              /* that tiles are made for */
    uint32_t queries[TILE_N];                       /* of a tile */
};

struct graph {
    uint64_t hash;
    struct op *ops; /* the list it was made of */
    uint32_t n_ops, seen;
    struct dev_batch view;
    cudaStream_t stream;
    cudaGraphExec_t exec; /* NULL: seen, not captured yet */
    uint64_t used;        /* the pass that used it last */
    struct input left;    /* what is known when it has run */
};

struct capture {
    bool on;       /* the open pass collects its ops */
    bool brief;    /* of them only a short list becomes a graph */
    bool disabled; /* capturing failed once, or the options say so */
    struct op *list;
    uint32_t n;
    struct graph graphs[GRAPHS_MAX];
    uint32_t n_graphs;
    uint64_t pass;
    uint64_t launched, captured; /* totals */
};

struct inject {
    char call[48]; /* the name of the call that fails; "" none */
    unsigned nth, seen, count;
    cudaError_t error;
    bool hang; /* it does not return instead */
};

struct arena; /* arena.cu */

/* Granules that no page uses, but kernels under way may: unmapped once an event that came later has passed. `open` has
 * no event yet, `closed` waits for its one. */
struct released {
    struct arena *arena;
    uint32_t granule, gen;
};
struct releases {
    struct released *open, *closed;
    uint32_t n_open, n_closed, cap; /* of both */
    cudaEvent_t event;
};

struct cuda {
    struct kn pub;
    int device, sm; /* 75, 80, 89, 90 ... */
    int n_sms;
    size_t smem_max; /* that a block can ask for */
    bool early;      /* launches may overlap the one in front */
    cudaError_t failed;
    struct inject inject;
    uint32_t *waits, nobodys; /* kn_options.waits, or &nobodys */
    struct rt_driver driver;
    cudaStream_t streams[STREAM_N], stream;
    cudaEvent_t handoff;
    cublasHandle_t blas;
    struct scratch scratch;
    struct ring ring;
    struct batch batch;
    struct capture capture;
    struct op held;        /* waits for the op that follows it (capture.cu); kind OP_N: none */
    struct rope_set ropes; /* wait for more of them */
    struct op source;      /* makes the held op's input, and runs with it; kind OP_N: none */
    struct wanted wanted;  /* while a held op runs: what the next one wants its result as */
    struct input input;
    struct arena *arenas;
    size_t n_pages; /* committed in all of them */
    struct releases releases;
};

static inline struct cuda *cuda_of(struct kn *kn)
{
    kn_assert(kn->magic == KN_MAGIC);
    return (struct cuda *)kn;
}

/* ---- calls ---- */

/* False after an error, which is noted and said if it is the first one. */
bool cuda_ok(struct cuda *c, cudaError_t e, const char *call);
bool cuda_blas_ok(struct cuda *c, cublasStatus_t s, const char *call);
/* What cudaEventQuery or cudaStreamQuery gave: true if all is done. */
bool is_done(struct cuda *c, cudaError_t e, const char *query);
/* Is this the call that has to fail? Then its error. */
cudaError_t cuda_injected(struct cuda *c, const char *call);

/* Around whatever may wait for the device: even a launch does, when the queue is full. */
static inline void wait_begin(struct cuda *c)
{
    __atomic_store_n(c->waits, *c->waits | 1, __ATOMIC_RELEASE);
}
static inline bool wait_end(struct cuda *c, bool ok)
{
    __atomic_store_n(c->waits, (*c->waits | 1) + 1, __ATOMIC_RELEASE);
    return ok;
}

/* TRY: one call of the runtime and its error. RUN: the same, and an error is a failure of the device; true if none. */
#define TRY(c, call, ...)                                                                          \
    (cuda_injected(c, #call) != cudaSuccess ? (c)->inject.error : call(__VA_ARGS__))
#define RUN(c, call, ...) (wait_begin(c), wait_end(c, cuda_ok(c, TRY(c, call, __VA_ARGS__), #call)))
#define RUN_BLAS(c, call, ...)                                                                     \
    (wait_begin(c), wait_end(c, cuda_injected(c, #call) != cudaSuccess                             \
                                    ? cuda_ok(c, (c)->inject.error, #call)                         \
                                    : cuda_blas_ok(c, call(__VA_ARGS__), #call)))
/* A launch on the pass's stream. What is wrong with it shows at once, what goes wrong in it at a later call. */
#define KERNEL_BY(c, how, kernel, grid, block, smem, ...)                                          \
    do {                                                                                           \
        if ((c)->failed == cudaSuccess) {                                                          \
            wait_begin(c);                                                                         \
            how(kernel, grid, block, smem, (c)->stream, __VA_ARGS__);                              \
            cudaError_t injected_ = cuda_injected(c, "launch");                                    \
            wait_end(c, true);                                                                     \
            cuda_ok(c, injected_ != cudaSuccess ? injected_ : cudaGetLastError(), #kernel);        \
        }                                                                                          \
    } while (0)
#define KERNEL(c, kernel, grid, block, smem, ...)                                                  \
    KERNEL_BY(c, LAUNCH, kernel, grid, block, smem, __VA_ARGS__)
/* For kernels that begin with early_wait (port.cuh). */
#define KERNEL_EARLY(c, kernel, grid, block, smem, ...)                                            \
    do {                                                                                           \
        if ((c)->early)                                                                            \
            KERNEL_BY(c, LAUNCH_EARLY, kernel, grid, block, smem, __VA_ARGS__);                    \
        else                                                                                       \
            KERNEL_BY(c, LAUNCH, kernel, grid, block, smem, __VA_ARGS__);                          \
    } while (0)

/* cuda.cu */
void cuda_close(struct kn *kn);
int cuda_status(struct kn *kn);
void cuda_sync(struct kn *kn);
void stream_use(struct cuda *c, enum stream_kind kind);
/* More shared memory than 48 KiB for a kernel. */
bool kernel_smem(struct cuda *c, const void *kernel, size_t bytes);

/* A kernel of each file: kernels_load. */
const void *weights_kernel(void);
const void *linear_kernel(void);
const void *gemv_kernel(void);
const void *vec_kernel(void);
const void *rope_kernel(void);
const void *kv_kernel(void);
const void *score_kernel(void);
const void *select_kernel(void);
const void *sample_kernel(void);

/* memory.cu */
int memory_open(struct cuda *c, size_t total);
void memory_close(struct cuda *c);
int device_alloc(struct cuda *c, size_t bytes, void **ret);
void device_free(struct cuda *c, void *p);
int cuda_buf_alloc(struct kn *kn, size_t bytes, void **ret);
void cuda_buf_free(struct kn *kn, void *buf, size_t bytes);
void cuda_upload(struct kn *kn, void *dst_device, const void *src_host, size_t bytes);
void cuda_download(struct kn *kn, void *dst_host, const void *src_device, size_t bytes);
/* Copies on stream s through the ring; src may change as soon as the call returns. */
void ring_upload(struct cuda *c, cudaStream_t s, void *dst, const void *src, size_t bytes);
/* A small host array (at most SIDE_MAX bytes) as device memory, good until SIDE_MAX more bytes were asked for. */
#define SIDE_MAX (SIDE_BYTES / 2)
const void *side_push(struct cuda *c, const void *src, size_t bytes);
/* Device to host on the pass's stream, and waits; zeros after a failure. Flushes nothing. */
void fetch(struct cuda *c, void *dst_host, const void *src_device, size_t bytes);

/* arena.cu */
int arenas_open(struct cuda *c);
int cuda_arena_open(struct kn *kn, size_t stride, uint32_t n_pages, void **ret_base);
int cuda_arena_commit(struct kn *kn, void *base, size_t stride, uint32_t page);
void cuda_arena_release(struct kn *kn, void *base, size_t stride, uint32_t page);
void cuda_arena_close(struct kn *kn, void *base, size_t stride, uint32_t n_pages);
/* Unmaps what was released and is not in use by then. wait: all of it. */
void arenas_collect(struct cuda *c, bool wait);
void arenas_close(struct cuda *c);

/* weights.cu */
int cuda_weight_load(struct kn *kn, const struct kn_tensor *src, struct kn_weight **ret);
void cuda_weight_free(struct kn *kn, struct kn_weight **w);
size_t cuda_weight_bytes(const struct kn_weight *w);
void cuda_embed(struct kn *kn, const struct kn_weight *w, const struct kn_batch *b, float *out);
void run_embed(struct cuda *c, const struct op *o);
/* Rows first .. first + n of w as halves (bf16 for BF16 on cards that multiply it), [n][ld], to out. */
void weight_to_half(struct cuda *c, const struct kn_weight *w, uint32_t first, uint32_t n,
                    uint32_t ld, void *out);

/* batch.cu */
int batch_open(struct cuda *c);
void batch_close(struct cuda *c);
/* Room for the slot lists of so many pages; KN_ENOMEM: as it was. */
int batch_reserve(struct cuda *c, size_t pages);
int cuda_batch_reserve(struct kn *kn, uint32_t n_rows, uint32_t n_seqs, uint64_t n_slots);
void cuda_batch_begin(struct kn *kn, const struct kn_batch *b);
void cuda_batch_end(struct kn *kn, const struct kn_batch *b);
/* The copy to the device, whole or what was added to the side since. */
void batch_upload(struct cuda *c);
/* Makes the tiles for these heads, if they are not. */
void batch_tiles(struct cuda *c, uint32_t n_heads, uint32_t n_kv_heads, uint32_t head_dim);
/* A host array that the pass's kernels read; NULL after a failure. */
const uint32_t *batch_side(struct cuda *c, const uint32_t *src, uint32_t n);

/* capture.cu */
int capture_open(struct cuda *c);
void capture_close(struct cuda *c);
void capture_begin(struct cuda *c, enum stream_kind kind);
void op_submit(struct cuda *c, const struct op *o);
void op_run(struct cuda *c, const struct op *o);
/* Runs the op that was held back. next: the one that follows it, NULL if none does. */
void held_run(struct cuda *c, const struct op *next);
void capture_flush(struct cuda *c);
/* Memory that graphs may point to goes away. */
void capture_reset(struct cuda *c);

/* linear.cu, linear_gemv.cu, linear_gemm.cu */
int linear_open(struct cuda *c);
void cuda_linear(struct kn *kn, uint32_t n_w, const struct kn_weight *const *w,
                 const float *const *bias, const float *x, uint32_t rows, float *const *outs,
                 bool add);
void run_linear(struct cuda *c, const struct op *o);
/* What this call would turn all n floats at x into (all of its input), if they are its input. */
struct wanted linear_wants(const struct cuda *c, const struct op_linear *l, const float *x,
                           size_t n);

/* vec.cu, rope.cu, kv.cu */
void cuda_rmsnorm(struct kn *kn, float *out, const float *x, const float *gain, uint32_t rows,
                  uint32_t d, float eps);
void cuda_swiglu(struct kn *kn, float *out, const float *gate, const float *up, size_t n);
void cuda_gather_rows(struct kn *kn, float *out, const float *x, const uint32_t *rows, uint32_t n,
                      uint32_t d);
void run_rmsnorm(struct cuda *c, const struct op *o);
void run_swiglu(struct cuda *c, const struct op *o);
void run_gather(struct cuda *c, const struct op *o);
void cuda_rope(struct kn *kn, const struct kn_batch *b, const struct kn_rope *r, float *x);
void run_rope(struct cuda *c, const struct op *o);
/* May o run in one launch with what is in the set, after it? */
bool rope_joins(const struct rope_set *set, const struct op *o);
void rope_join(struct rope_set *set, const struct op *o);
void rope_run(struct cuda *c, const struct rope_set *set);
void cuda_row_copy(struct kn *kn, const struct kn_kv *kv, uint32_t dst_slot, uint32_t src_slot);
void cuda_kv_write(struct kn *kn, const struct kn_batch *b, uint32_t layer, const float *k,
                   const float *v);
void cuda_hidden_write(struct kn *kn, const struct kn_batch *b, const float *x);
void cuda_hidden_read(struct kn *kn, const struct kn_batch *b, const uint32_t *row_slots,
                      float *out);
void cuda_keys_read(struct kn *kn, const struct kn_seq *s, uint32_t layer, uint32_t first,
                    uint32_t count, float *ret);
void cuda_kv_rotate(struct kn *kn, const struct kn_seq *s, const struct kn_rope *r,
                    const int32_t *from);
void run_kv_write(struct cuda *c, const struct op *o);
void run_hidden_write(struct cuda *c, const struct op *o);
void run_hidden_read(struct cuda *c, const struct op *o);
/* A pool as kernels see it; slots and n are 0. */
struct dev_seq dev_seq_of(const struct kn_kv *kv);

/* attention.cu, attention_f32.cu */
int attention_open(struct cuda *c);
void cuda_attention(struct kn *kn, const struct kn_batch *b, uint32_t layer, const float *q,
                    uint32_t n_heads, float scale, float *out);
void run_attention(struct cuda *c, const struct op *o);

/* score.cu, select.cu, sample.cu */
void run_logit(struct cuda *c, const struct op *o);
void cuda_row_logit(struct kn *kn, const struct kn_weight *w, const float *x, uint32_t rows,
                    const int32_t *ids, float *ret);
void cuda_row_lse(struct kn *kn, const struct kn_weight *w, const float *x, uint32_t rows,
                  float *ret);
void cuda_attention_row(struct kn *kn, const struct kn_seq *s, uint32_t layer, const float *q,
                        uint32_t n_heads, float scale, float *ret);
uint32_t cuda_select_keep(struct kn *kn, const float *value, const struct kn_select *s,
                          uint32_t *ret_keep);
void cuda_sample(struct kn *kn, const float *logits, uint32_t rows, uint32_t n_vocab,
                 const struct kn_sample *how, int32_t *ret);
#endif
