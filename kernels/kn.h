/* kn.h: the maths of Backcast, behind one table of operations per backend (ref, cpu; later cuda).
 *
 * A backend knows tensors, slots and rows; it knows nothing of sessions, models or policies. The
 * layers above it call kn->ops->... and never ask which backend runs.
 *
 *   struct kn          one opened backend: its threads, its memory counters
 *   device pointer     memory from buf_alloc or arena_open. On ref and cpu it is ordinary memory;
 * on a GPU it is not readable by the host. Arguments marked HOST are always host memory. kn_weight
 * a matrix [rows][cols] in the backend's own layout (quantised types stay quantised) kn_kv the K/V
 * pages of a pool, plain data; kn_seq a slot list over it; kn_batch the rows of a step
 *
 * Thread rule: one thread (the engine's) calls into one kn at a time. Calls may be asynchronous on
 * a GPU; `download`, `sync` and every op with a HOST result wait.
 *
 * Row rule (CPU backends): a row's result depends on that row, its weights and its visible cache
 * alone: not on the other rows of the call, on the number of threads, nor on where a prompt was
 * cut. Fixed reduction order: one f32 accumulator an output, ascending k (or ascending 32-blocks,
 * int32 exact inside a block); attention in tiles of KN_TILE cache indices, each giving (max, sum,
 * acc), merged in ascending order.
 *
 * Return codes: 0, or one of enum kn_code; only set-up calls and allocations can fail. Compute ops
 * return void on purpose: a device error is sticky and is read with `status` once a step.
 */
#ifndef BACKCAST_KN_H
#define BACKCAST_KN_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "kn_quant.h"

enum kn_code { KN_OK = 0, KN_ENOMEM = -1, KN_EUNSUPPORTED = -2, KN_EDEVICE = -3, KN_EINVALID = -4 };

#define KN_PAGE_ROWS 64 /* rows (tokens) of a page; slot = page * 64 + row */
#define KN_TILE 64      /* cache indices of an attention tile */
#define KN_LINEAR_MAX 3 /* weights that share one input in a linear call */
#define KN_HEAD_DIM_MAX 256

struct kn;
struct kn_weight;

/* A matrix as it stands in a file. HOST memory, valid during weight_load only. cols is the row
 * length (GGUF's ne[0], the k of x.W^T) and a multiple of the type's block. */
struct kn_tensor {
    enum kn_type type;
    uint32_t rows, cols;
    const void *data;
    size_t bytes;
};

/* The pages of one pool. A page is [layer][K | V][kv head][64 rows][head_dim] of `type` (KN_Q8_Q4:
 * [layer][kv head][64 rows][K | V], for lines of two lengths), then, if d_hidden > 0, 64 hidden rows of [d_hidden] f32 (f32 KV) or f16, and in the f16 case one f32 scale
 * a row, [64]. stride: bytes from one page to the next (>= kn_page_bytes; page-aligned). Keys hold
 * their rotary embedding.
 *
 * A key or value of head_dim = d floats as it is stored:
 *   KN_F32   4 d bytes, exact             KN_F16, KN_BF16   2 d bytes, nearest even
 *   KN_Q8_0  34 bytes per 32 values (d % 32 == 0): a half and 32 signed bytes, as kn_kv_addr.h has it
 *   KN_Q8_Q4 keys like KN_Q8_0; values turned by kn_hadamard.h, then 18 bytes per 32 (Q4_0 of GGUF) */
struct kn_kv {
    void *base; /* device */
    size_t stride;
    uint32_t n_layers, n_kv_heads, head_dim, d_hidden;
    enum kn_type type; /* one that the backend has: kn_kv_check */
};
size_t kn_kv_row_bytes(
    const struct kn_kv *kv); /* K and V of one token, all layers, plus hidden row (and scale) */
size_t kn_kv_page_bytes(const struct kn_kv *kv); /* KN_PAGE_ROWS of them: no padding */

struct kn_kv_type {
    enum kn_type type;
    const char *name; /* "q8_0" */
    uint32_t block;   /* head_dim must be a multiple of it */
};
/* The types of keys and values, f16 first; NULL past the end. */
const struct kn_kv_type *kn_kv_type_at(unsigned i);
const struct kn_kv_type *kn_kv_type_find(uint32_t type);
const struct kn_kv_type *kn_kv_type_named(const char *name);
/* Whether this backend takes pages of that type with heads of that size: KN_OK, or KN_EUNSUPPORTED
 * and a sentence in why (>= 160 bytes). */
int kn_kv_check(const struct kn *kn, enum kn_type type, uint32_t head_dim, char *why,
                size_t why_len);

/* One sequence in cache order: slots[i] is where cached token i lies. n counts the rows that this
 * batch appends. */
struct kn_seq {
    const struct kn_kv *kv;
    const uint32_t *slots; /* HOST [n] */
    uint32_t n;
};

/* The rows of one pass: any mix of sequences. Everything HOST, unchanged from batch_begin to
 * batch_end. Row r belongs to seqs[seq[r]] and sees its cache indices lo[r] <= j < hi[r] (lo == hi:
 * nothing; the attention of such a row is zeros). Prefill and decode: [0, own index + 1). Score:
 * [own index + 1 + g, n). */
struct kn_batch {
    uint32_t n_rows, n_seqs;
    const int32_t *ids;            /* [n_rows] */
    const int32_t *positions;      /* [n_rows] for RoPE */
    const uint32_t *seq, *lo, *hi; /* [n_rows] */
    const uint32_t
        *slots; /* [n_rows] where kv_write and hidden_write put the row; NULL in a score pass */
    const struct kn_seq *seqs;
};

enum kn_rope_style {
    KN_ROPE_PAIRS /* (2i, 2i+1): llama */,
    KN_ROPE_HALVES /* (i, i + D/2): qwen */
};

struct kn_rope {
    enum kn_rope_style style;
    uint32_t n_heads, head_dim, n_rot; /* n_rot <= head_dim, even: leading dims that rotate */
    const float
        *inv_freq;     /* device [n_rot / 2]: angle = position * inv_freq[i] (computed in f32 as the
                          product of two floats, sin/cos accurate to 1 ulp for positions < 2^20) */
    const float *norm; /* device [head_dim] or NULL: RMSNorm per head before the rotation (qwen3) */
    float norm_eps;
};

/* select_keep: which rows of a cache stay. Rows 0 .. frozen - 1 and the last `recent` stay whatever their value; of the
 * others the `keep - frozen - recent` with the lowest values, ties to the earlier row; NaN counts as the highest value. */
struct kn_select {
    uint32_t n, keep, frozen, recent; /* frozen + recent <= keep */
};

/* How to pick a token from a row of logits. The text depends on (seed, stream) alone, not on the other rows. */
struct kn_sample {
    float temperature;  /* 0: the largest logit, the lowest id of equals */
    float top_p, min_p; /* 1 and 0: no cut. min_p: of the largest probability */
    uint32_t top_k;     /* 0: no cut */
    float
        repeat_penalty; /* 1: none; logits of `recent` are divided (if positive) or multiplied by it */
    uint32_t n_recent;     /* at most KN_RECENT_MAX */
    const int32_t *recent; /* HOST */
    uint64_t seed, stream; /* stream: the index of the token to pick in its session's life */
};
#define KN_RECENT_MAX 4096

struct kn_ops {
    /* ---- life
     * ------------------------------------------------------------------------------------ */
    void (*close)(struct kn *kn);
    int (*status)(struct kn *kn); /* KN_OK, or KN_EDEVICE once the device has failed (sticky) */
    void (*sync)(struct kn *kn);

    /* ---- memory
     * ---------------------------------------------------------------------------------- */
    int (*buf_alloc)(struct kn *kn, size_t bytes, void **ret); /* device, 64-byte aligned, zeroed */
    void (*buf_free)(struct kn *kn, void *buf, size_t bytes);
    void (*upload)(struct kn *kn, void *dst_device, const void *src_host, size_t bytes);
    void (*download)(struct kn *kn, void *dst_host, const void *src_device, size_t bytes);
    /* One reserved range of n_pages * stride bytes; nothing is committed. Committed pages read as
     * zero. */
    int (*arena_open)(struct kn *kn, size_t stride, uint32_t n_pages, void **ret_base);
    int (*arena_commit)(struct kn *kn, void *base, size_t stride, uint32_t page);
    void (*arena_release)(struct kn *kn, void *base, size_t stride, uint32_t page);
    void (*arena_close)(struct kn *kn, void *base, size_t stride, uint32_t n_pages);
    /* Copies one row (all layers, K, V, hidden) from slot to slot of one pool: seqcache_compact. */
    void (*row_copy)(struct kn *kn, const struct kn_kv *kv, uint32_t dst_slot, uint32_t src_slot);

    /* ---- weights
     * --------------------------------------------------------------------------------- */
    /* KN_EUNSUPPORTED: type or shape that the backend cannot run. The copy belongs to the caller.
     */
    int (*weight_load)(struct kn *kn, const struct kn_tensor *src, struct kn_weight **ret);
    void (*weight_free)(struct kn *kn, struct kn_weight **w);
    size_t (*weight_bytes)(const struct kn_weight *w);

    /* ---- a pass
     * ---------------------------------------------------------------------------------- */
    void (*batch_begin)(struct kn *kn,
                        const struct kn_batch *b); /* stages ids, positions, slot lists */
    void (*batch_end)(struct kn *kn, const struct kn_batch *b);

    /* out[r] = row ids[r] of w, expanded to f32. out: [n_rows][cols]. ids in range (the caller
     * checked). */
    void (*embed)(struct kn *kn, const struct kn_weight *w, const struct kn_batch *b, float *out);
    /* out = x / sqrt(mean(x^2) + eps) * gain. x, out: [rows][d], may be the same; gain [d].
     * Of this, swiglu and attention: if the very next call is a linear that takes out as its x, out may
     * hold anything after it. */
    void (*rmsnorm)(struct kn *kn, float *out, const float *x, const float *gain, uint32_t rows,
                    uint32_t d, float eps);
    /* outs[i] (+)= x . w[i]^T (+ bias[i]), i < n_w <= KN_LINEAR_MAX, all with the same cols. x:
     * [rows][cols], outs[i]: [rows][w[i] rows]. add: outs[i] is added to (residual). bias or
     * bias[i] may be NULL. */
    void (*linear)(struct kn *kn, uint32_t n_w, const struct kn_weight *const *w,
                   const float *const *bias, const float *x, uint32_t rows, float *const *outs,
                   bool add);
    /* (norm and) rotary embedding in place. x: [n_rows][n_heads][head_dim], at the batch's
     * positions. */
    void (*rope)(struct kn *kn, const struct kn_batch *b, const struct kn_rope *r, float *x);
    /* Stores k, v [n_rows][n_kv_heads][head_dim] of one layer at the batch's slots. */
    void (*kv_write)(struct kn *kn, const struct kn_batch *b, uint32_t layer, const float *k,
                     const float *v);
    /* Stores x [n_rows][d] as the hidden rows of those sequences whose kv has d_hidden > 0. */
    void (*hidden_write)(struct kn *kn, const struct kn_batch *b, const float *x);
    /* out [n_rows][d] = the stored hidden rows at row_slots (HOST [n_rows]) of the batch's
     * sequences. */
    void (*hidden_read)(struct kn *kn, const struct kn_batch *b, const uint32_t *row_slots,
                        float *out);
    /* out [n_rows][n_heads][head_dim] = softmax(q.k * scale) v over each row's visible indices;
     * query head h uses KV head h / (n_heads / n_kv_heads). No n x n matrix. */
    void (*attention)(struct kn *kn, const struct kn_batch *b, uint32_t layer, const float *q,
                      uint32_t n_heads, float scale, float *out);
    /* out = silu(gate) * up, [n] each; out may be gate. What rmsnorm says of out holds here, too. */
    void (*swiglu)(struct kn *kn, float *out, const float *gate, const float *up, size_t n);
    /* x[i] of chosen rows: out [n][d] = x [rows[i]][d]. rows HOST. */
    void (*gather_rows)(struct kn *kn, float *out, const float *x, const uint32_t *rows, uint32_t n,
                        uint32_t d);

    /* ---- scores
     * ---------------------------------------------------------------------------------- */
    /* ret[r] (HOST) = x[r] . row ids[r] of w, one dot product a row: x [rows][cols], ids HOST. */
    void (*row_logit)(struct kn *kn, const struct kn_weight *w, const float *x, uint32_t rows,
                      const int32_t *ids, float *ret);
    /* ret[r] (HOST) = log(sum over all rows v of w of exp(x[r] . w[v])), vocabulary slice by slice,
     * online. */
    void (*row_lse)(struct kn *kn, const struct kn_weight *w, const float *x, uint32_t rows,
                    float *ret);

    /* ---- what the baseline policies look at
     * -------------------------------------------------------- */
    /* ret (HOST) [count][n_kv_heads][head_dim] f32 = stored keys of cache indices first.. of one
     * layer. */
    void (*keys_read)(struct kn *kn, const struct kn_seq *s, uint32_t layer, uint32_t first,
                      uint32_t count, float *ret);
    /* Renumbering: the stored key of cache index i, which was rotated to position from[i] (HOST [s->n]), is turned to position
     * i, in all layers; keys that are there already keep their bits. r: as `rope` had it for these keys, norm NULL, n_heads
     * the KV heads. A key becomes what it would be had it been rotated to i, but for the rounding of what was stored.
     * OPTIONAL: NULL where a backend cannot. */
    void (*kv_rotate)(struct kn *kn, const struct kn_seq *s, const struct kn_rope *r,
                      const int32_t *from);
    /* ret (HOST) [s->n] = softmax weights of one query q (HOST [n_heads][head_dim], rotated) over
     * the whole sequence at one layer, mean over the query heads. */
    void (*attention_row)(struct kn *kn, const struct kn_seq *s, uint32_t layer, const float *q,
                          uint32_t n_heads, float scale, float *ret);

    /* ---- OPTIONAL: NULL where a backend has no better way than the caller's own code on downloaded values (ref, cpu)
     * -------------------------------------------------------- */
    /* Room for what a pass of so many rows brings along, slots: of all its sequences' lists together. Between passes;
     * KN_ENOMEM: as it was. A pass that was not announced may fail for want of it, and the device with it. */
    int (*batch_reserve)(struct kn *kn, uint32_t n_rows, uint32_t n_seqs, uint64_t n_slots);
    /* ret_keep (HOST) [s->keep], ascending; returns how many: min(n, keep). value: device [n]. */
    uint32_t (*select_keep)(struct kn *kn, const float *value, const struct kn_select *s,
                            uint32_t *ret_keep);
    /* ret (HOST) [rows]: a token for each row of logits (device [rows][n_vocab]), how[r] (HOST) says how. The engine's own
     * sampler's tokens, unless its number falls where weights are rounded. */
    void (*sample)(struct kn *kn, const float *logits, uint32_t rows, uint32_t n_vocab,
                   const struct kn_sample *how, int32_t *ret);
};

#define KN_MAGIC 0x6b6e3031u

/* Bits of an activation where weights are quantised (kn_int8.h): the usual ones; for answers as of unrounded ones; unrounded. */
#define KN_ACTIVATIONS 8
#define KN_ACTIVATIONS_WIDE 16
#define KN_ACTIVATIONS_FLOAT 32

/* Backends embed this as their first member. Counters are exact and include what the threads hold.
 */
struct kn {
    unsigned magic;
    const struct kn_ops *ops;
    const char *name; /* "ref", "cpu" */
    char isa[32]; /* "scalar", "avx2", "avx512-vnni": what the ops run on; part of the arithmetic's
                     identity */
    uint32_t n_threads;
    /* Bits to which products of quantised weights round their inputs; part of the arithmetic's identity, too. */
    uint32_t activations;
    uint32_t kv_types; /* bit 1u << enum kn_type for each type of kn_kv beside f32 and f16, which
                          every backend takes */
    /* For whoever cuts work into pieces. A product of n rows takes about as long as n + rows_read rows of a large one:
     * the weights are read once. */
    uint32_t rows_read;
    /* A piece that a decode pass waits behind lasts no longer; 0: no wish of the backend's own, whose passes are long. */
    uint32_t slice_us;
    char failed[160]; /* once status is KN_EDEVICE: the first call that failed, and how */
    size_t bytes_buffers, bytes_weights, bytes_arena; /* committed now */
    /* Regions of arenas that are entries of their own in the process's memory map (ref/arena.c). */
    uint32_t n_moved;
    size_t
        bytes_scratch; /* the backend's own work space, all its threads together; the same from open to close */
};

struct kn_options {
    const char *backend; /* "auto", "ref", "cpu", "cuda" */
    const char *isa;  /* NULL: the best one; else force "avx2", "scalar" ... (KN_EUNSUPPORTED if the
                         machine lacks it) */
    uint32_t threads; /* 0: one per online core of the affinity mask, at most 64 */
    /* 0 or KN_ACTIVATIONS; KN_ACTIVATIONS_WIDE (KN_EUNSUPPORTED if the backend cannot): those of BF16 weights stay floats,
     * too. Ref rounds none, and takes either. */
    uint32_t activations;
    bool pin; /* cpu: each thread but the caller's keeps to one core of the affinity mask */
    const char *
        inject; /* NULL; for tests of a device's failures (cuda): "CALL:NTH[:ERROR[:COUNT]]", the nth such call of
                   the runtime, or "launch", and COUNT - 1 more after it fail with this error; "CALL:NTH:hang": it never returns */
    uint32_t *
        waits; /* NULL, or the caller's: a backend with a device makes it odd while a call may wait for that, from the thread
                  that called; it goes up with every such call. For __atomic loads of another thread, who can tell a device that hangs */
};

/* registry.c. why (>= 160 bytes, may be NULL) says in a sentence why a backend was refused; after KN_OK it is empty or
 * says why a better backend or instruction set was passed over. */
int kn_open(struct kn **ret, const struct kn_options *opt, char *why, size_t why_len);
void kn_close(struct kn **kn);
/* The backends of this build, in order of preference; NULL past the end. */
const char *kn_backend_name(unsigned i);
/* What option isa of the cpu backend may be called, whether this machine has it or not, best first; NULL past the end. */
const char *kn_isa_name(unsigned i);
/* Whether a backend runs on something of that name on some machine: one of these, its full name (kn.isa), a GPU's. */
bool kn_isa_known(const char *isa);
#endif
