/* attn_body.h: attention over one tile of 64 cache indices, written once in the operations of
 * simd_*.h. attn_{scalar,avx2,avx512}.c include it after CPU_ISA and their simd header.
 *
 * For every query of the tile, over its visible part lo <= j < hi:
 *
 *      s_j = scale * sum over dims of q[i] kt[i][j]                                 lanes: keys j
 *      m = max s_j       p_j = exp(s_j - m)       l = sum p_j
 *      acc[i] = sum over j (ascending, one fma a step) of p_j v[j][i]               lanes: dims i
 *
 * and tiles are merged by one formula (merge). The sum over dims is one of CLASSES sums, added up ascending: class c has the
 * dims i with i / SIMD_KEYS % CLASSES == c, ascending, one fma a step (dots_turning wants it so). None of this looks at the other queries: several are
 * taken together only so that a loaded register of keys or values serves them all. */
#include <math.h>
#include <string.h>
#include "kernels.h"
#include "kn_kv_addr.h"

#define ATTN_NAME2(isa) attn_##isa
#define ATTN_NAME(isa) ATTN_NAME2(isa)
#define INLINE static inline __attribute__((always_inline))
#define VECS 4 /* registers beside each other: 4 x SIMD_QUERIES chains */
#define TILE KN_TILE
#define CLASSES (VF_N / SIMD_KEYS)
#define DOT_QUERIES 3 /* x 2 registers of keys x CLASSES */
#define DOT_VECS 2

/* ---- load
 * ------------------------------------------------------------------------------------------- */

/* Values d .. d + VF_N of a line of kn_kv_addr.h; `type` is known to the compiler. */
INLINE vf row_vec(enum kn_type type, const void *row, uint32_t d)
{
    if (type == KN_F32)
        return vf_load((const float *)row + d);
    if (type == KN_F16)
        return vf_load_half((const uint16_t *)row + d);
    if (type == KN_BF16)
        return vf_load_bf16((const uint16_t *)row + d);
    if (type == KN_Q4_0) {
        const uint8_t *four = (const uint8_t *)row + (size_t)(d / KN_KV_Q8) * KN_KV_Q4_BYTES;
        return vf_mul(vf_load_codes(four + 2 + d % 16, d / 16 % 2 * 4), vf_set1_half(four));
    }
    const uint8_t *block = (const uint8_t *)row + (size_t)(d / KN_KV_Q8) * KN_KV_Q8_BYTES;
    return vf_mul(vf_load_bytes((const int8_t *)block + 2 + d % KN_KV_Q8), vf_set1_half(block));
}

/* One value of a type without blocks. */
static float row_one(enum kn_type type, const void *row, uint32_t d)
{
    if (type == KN_F32)
        return ((const float *)row)[d];
    uint16_t h = ((const uint16_t *)row)[d];
    return type == KN_F16 ? kn_f16_to_f32(h) : kn_bf16_to_f32(h);
}

static inline const void *value_row(const struct attn_rows *r, uint32_t j)
{
    return (const uint8_t *)r->k[j] + r->to_v;
}

/* Dims d .. d + VF_N of row j; zeros where there is no row, and behind its end. */
static __attribute__((noinline)) vf row_part(enum kn_type type, const struct attn_rows *r,
                                             const void *row, uint32_t j, uint32_t d)
{
    float part[VF_N];
    if (j >= r->n)
        return vf_set1(0.0f);
    if (d + VF_N <= r->d)
        return row_vec(type, row, d);
    for (uint32_t i = 0; i < VF_N; i++)
        part[i] = d + i < r->d ? row_one(type, row, d + i) : 0.0f;
    return vf_load(part);
}

/* VF_N keys from j on, turned; n of them exist. `whole` and `type` are known to the compiler. */
INLINE void turn(enum kn_type type, bool whole, const struct attn_rows *r, uint32_t j, float *kt)
{
    for (uint32_t d = 0; d < r->d; d += VF_N) {
        vf t[VF_N];
#pragma GCC unroll 16
        for (uint32_t i = 0; i < VF_N; i++)
            t[i] = whole ? row_vec(type, r->k[j + i], d) : row_part(type, r, r->k[j + i], j + i, d);
        vf_transpose(t);
#pragma GCC unroll 16
        for (uint32_t i = 0; i < VF_N; i++)
            vf_store(kt + (size_t)(d + i) * TILE + j, t[i]);
    }
}

INLINE void load_type(enum kn_type k_type, enum kn_type v_type, const struct attn_rows *r,
                      float *kt, float *v)
{
    uint32_t d_pad = (r->d + 15) / 16 * 16;
    bool even = r->d % VF_N == 0;
    if (d_pad - r->d >= VF_N)
        memset(kt + (size_t)r->d * TILE, 0, (size_t)(d_pad - r->d) * TILE * sizeof *kt);
    for (uint32_t j = 0; j < TILE; j += VF_N)
        if (even && j + VF_N <= r->n)
            turn(k_type, true, r, j, kt);
        else
            turn(k_type, false, r, j, kt);
    for (uint32_t j = 0; v && j < TILE; j++, v += d_pad)
        for (uint32_t d = 0; d < d_pad; d += VF_N)
            vf_store(v + d, even && j < r->n && d < r->d
                                ? row_vec(v_type, value_row(r, j), d)
                                : row_part(v_type, r, value_row(r, j), j, d));
}

static void load(const struct attn_rows *r, float *kt, float *v)
{
    if (r->type == KN_F32)
        load_type(KN_F32, KN_F32, r, kt, v);
    else if (r->type == KN_F16)
        load_type(KN_F16, KN_F16, r, kt, v);
    else if (r->type == KN_BF16)
        load_type(KN_BF16, KN_BF16, r, kt, v);
    else if (r->type == KN_Q8_0)
        load_type(KN_Q8_0, KN_Q8_0, r, kt, v);
    else
        load_type(KN_Q8_0, KN_Q4_0, r, kt, v);
}

/* ---- scores
 * ----------------------------------------------------------------------------------------- */

/* n queries with DOT_VECS registers of keys at a time: every class has its own sums. Keys that none of them sees are left
 * out: neighbouring queries are heads of one row, so at the border of what it sees that is half of a tile. */
INLINE void dots(const struct attn_tile *t, uint32_t first, const uint32_t n)
{
    const float *q = t->q + (size_t)first * t->d_pad;
    uint32_t from = t->lo[first], end = t->hi[first];
    for (uint32_t i = first + 1; i < first + n; i++) {
        from = t->lo[i] < from ? t->lo[i] : from;
        end = t->hi[i] > end ? t->hi[i] : end;
    }
    for (uint32_t j = from / (DOT_VECS * VF_N) * (DOT_VECS * VF_N); j < end; j += DOT_VECS * VF_N) {
        vf acc[DOT_QUERIES][DOT_VECS][CLASSES];
#pragma GCC unroll 8
        for (uint32_t i = 0; i < n; i++)
#pragma GCC unroll 8
            for (int c = 0; c < DOT_VECS * CLASSES; c++)
                acc[i][c / CLASSES][c % CLASSES] = vf_set1(0.0f);
        for (uint32_t at = 0; at < t->d_pad; at += VF_N)
#pragma GCC unroll 1
            for (uint32_t d = at; d < at + SIMD_KEYS; d++)
#pragma GCC unroll 4
                for (uint32_t class = 0; class < CLASSES; class ++) {
                    const float *kt = t->kt + (size_t)(d + class * SIMD_KEYS) * TILE + j;
                    vf k[DOT_VECS];
#pragma GCC unroll 4
                    for (int c = 0; c < DOT_VECS; c++)
                        k[c] = vf_load(kt + c * VF_N);
#pragma GCC unroll 8
                    for (uint32_t i = 0; i < n; i++) {
                        vf x = vf_set1(q[i * t->d_pad + d + class * SIMD_KEYS]);
#pragma GCC unroll 4
                        for (int c = 0; c < DOT_VECS; c++)
                            acc[i][c][class] = vf_fma(x, k[c], acc[i][c][class]);
                    }
                }
#pragma GCC unroll 8
        for (uint32_t i = 0; i < n; i++)
#pragma GCC unroll 4
            for (int c = 0; c < DOT_VECS; c++) {
                vf sum = acc[i][c][0];
#pragma GCC unroll 4
                for (int class = 1; class < CLASSES; class ++)
                    sum = vf_add(sum, acc[i][c][class]);
                vf_store(t->s + (size_t)(first + i) * TILE + j + c * VF_N,
                         vf_mul(sum, vf_set1(t->scale)));
            }
    }
}

/* Asks memory for what is at value d of a line, if a new 64 bytes begin there; `type` is known to the compiler. The tile
 * after this one is asked for bit by bit between this one's arithmetic: all at once, the arithmetic would wait for the
 * last line. To the second level: the first is full of this tile. */
INLINE void ask(enum kn_type type, const void *line, uint32_t d)
{
    const uint32_t step = type == KN_F32 ? 16 : type == KN_Q8_0 ? 64 : type == KN_Q4_0 ? 128 : 32;
    if (d % step == 0)
        __builtin_prefetch((const char *)line + (size_t)d / step * 64, 0, 2);
}

/* A query for dots_turning: vector SIMD_KEYS c + i has dim VF_N c + SIMD_KEYS q + i in all lanes of quarter q. */
static void spread(const struct attn_tile *t)
{
    float *to = t->spread;
    for (uint32_t i = 0; i < t->n_q * t->d_pad; i += VF_N)
        for (int k = 0; k < SIMD_KEYS; k++, to += VF_N)
            vf_store(to, vf_spread(vf_load(t->q + i), k));
}

/* Keys straight from the pages, for so few queries that kt would be written to be read once: turned in registers, and only
 * within 128 bits, which is half the work. Four keys' dims 16 c .. 16 c + 15:
 *
 *     key 0   | 0 1 2 3 | 4 5 6 7 | ..                 key  | 0 1 2 3 | 0 1 2 3 | ..
 *     key 1   | 0 1 2 3 | 4 5 6 7 | ..   -- turn -->   dim  | 0 0 0 0 | 4 4 4 4 | ..   times q's | 0 0 0 0 | 4 4 4 4 | ..
 *     ..                                               dim  | 1 1 1 1 | 5 5 5 5 | ..
 *
 * A quarter of a register sums one class, and the classes are added last (fold). The same sums in the same order as dots.
 * n >= t->n_q; what lies beyond is computed and dropped. */
INLINE void dots_turning(enum kn_type type, const struct attn_tile *t, const uint32_t n)
{
    const uint32_t beside =
        n <= 4 ? CLASSES : (CLASSES + 1) / 2; /* sums at a time, for registers */
    spread(t);
    for (uint32_t j = 0; j < t->rows->n; j += VF_N) {
        vf acc[SIMD_TURN_MAX][CLASSES];
#pragma GCC unroll 4
        for (uint32_t g0 = 0; g0 < CLASSES; g0 += beside) {
#pragma GCC unroll 8
            for (uint32_t h = 0; h < n; h++)
#pragma GCC unroll 4
                for (uint32_t g = g0; g < g0 + beside; g++)
                    acc[h][g] = vf_set1(0.0f);
            for (uint32_t d = 0; d < t->d_pad; d += VF_N) {
                const float *q = t->spread + (size_t)d * SIMD_KEYS;
#pragma GCC unroll 4
                for (uint32_t g = g0; g < g0 + beside; g++) {
                    vf k[SIMD_KEYS];
#pragma GCC unroll 4
                    for (uint32_t i = 0; i < SIMD_KEYS; i++)
                        k[i] = row_vec(type, t->rows->k[j + g * SIMD_KEYS + i], d);
                    for (uint32_t i = 0; t->next && i < SIMD_KEYS; i++)
                        ask(type, t->next->k[j + g * SIMD_KEYS + i], d);
                    vf_turn(k);
#pragma GCC unroll 4
                    for (uint32_t i = 0; i < SIMD_KEYS; i++)
#pragma GCC unroll 8
                        for (uint32_t h = 0; h < n; h++)
                            acc[h][g] =
                                vf_fma(vf_load(q + (size_t)h * t->d_pad * SIMD_KEYS + i * VF_N),
                                       k[i], acc[h][g]);
                }
            }
        }
#pragma GCC unroll 8
        for (uint32_t h = 0; h < n; h++)
            if (h < t->n_q)
                vf_store(t->s + (size_t)h * TILE + j, vf_mul(vf_fold(acc[h]), vf_set1(t->scale)));
    }
}

INLINE void dots_type(enum kn_type type, const struct attn_tile *t)
{
    if (t->n_q == 1)
        dots_turning(type, t, 1);
    else if (t->n_q == 2)
        dots_turning(type, t, 2);
#if SIMD_TURN_MAX > 2
    else if (t->n_q == 3)
        dots_turning(type, t, 3);
    else if (t->n_q == 4)
        dots_turning(type, t, 4);
#endif
#if SIMD_TURN_MAX > 4
    else
        dots_turning(type, t, SIMD_TURN_MAX);
#endif
}

static void scores_turning(const struct attn_tile *t)
{
    if (t->rows->type == KN_F32)
        dots_type(KN_F32, t);
    else if (t->rows->type == KN_F16)
        dots_type(KN_F16, t);
    else if (t->rows->type == KN_BF16)
        dots_type(KN_BF16, t);
    else /* and the keys of KN_Q8_Q4 */
        dots_type(KN_Q8_0, t);
}

static void scores_turned(const struct attn_tile *t)
{
    uint32_t i = 0;
    for (; i + DOT_QUERIES <= t->n_q; i += DOT_QUERIES)
        dots(t, i, DOT_QUERIES);
    for (; i < t->n_q; i++)
        dots(t, i, 1);
}

/* The whole registers in which query i sees something. */
struct part {
    uint32_t from, end;
};

static inline struct part part_of(const struct attn_tile *t, uint32_t i)
{
    return (struct part){t->lo[i] / VF_N * VF_N, (t->hi[i] + VF_N - 1u) / VF_N * VF_N};
}

static void scores(const struct attn_tile *t)
{
    if (t->kt)
        scores_turned(t);
    else
        scores_turning(t);
    for (uint32_t i = 0; i < t->n_q; i++) {
        float *s = t->s + (size_t)i * TILE;
        struct part part = part_of(t, i);
        for (uint32_t j = part.from; j < t->lo[i]; j++)
            s[j] = -INFINITY;
        for (uint32_t j = t->hi[i]; j < part.end; j++)
            s[j] = -INFINITY;
        vf m = vf_set1(-INFINITY);
        for (uint32_t j = part.from; j < part.end; j += VF_N)
            m = vf_max(m, vf_load(s + j));
        t->m[i] = vf_top(m);
    }
}

static void weights(const struct attn_tile *t)
{
    for (uint32_t i = 0; i < t->n_q; i++) {
        float *s = t->s + (size_t)i * TILE;
        t->l[i] = 0.0f;
        if (t->lo[i] == t->hi[i])
            continue;
        struct part part = part_of(t, i);
        vf m = vf_set1(t->m[i]), sum = vf_set1(0.0f);
        for (uint32_t j = part.from; j < part.end; j += VF_N) {
            vf p = vf_exp(vf_sub(vf_load(s + j), m));
            sum = vf_add(sum, p);
            vf_store(s + j, p);
        }
        t->l[i] = vf_sum(sum);
    }
}

/* ---- values
 * ----------------------------------------------------------------------------------------- */

/* Where values come from: the expanded tile, or straight from the pages. */
enum source {
    FROM_F32 = KN_F32,
    FROM_F16 = KN_F16,
    FROM_BF16 = KN_BF16,
    FROM_Q8_0 = KN_Q8_0,
    FROM_Q4_0 = KN_Q4_0,
    FROM_TILE
};

INLINE vf value(enum source from, const struct attn_tile *t, uint32_t j, uint32_t d)
{
    if (from == FROM_TILE)
        return vf_load(t->v + (size_t)j * t->d_pad + d);
    return row_vec((enum kn_type)from, value_row(t->rows, j), d);
}

/* n queries that see the same lo <= j < hi; `vecs` registers of dims from d on. */
INLINE void mix(enum source from, const struct attn_tile *t, uint32_t first, const uint32_t n,
                uint32_t d, const int vecs)
{
    const float *p = t->s + (size_t)first * TILE;
    vf acc[SIMD_QUERIES][VECS];
#pragma GCC unroll 8
    for (uint32_t i = 0; i < n; i++)
#pragma GCC unroll 4
        for (int c = 0; c < vecs; c++)
            acc[i][c] = vf_set1(0.0f);
    for (uint32_t j = t->lo[first]; j < t->hi[first]; j++) {
        vf v[VECS];
#pragma GCC unroll 4
        for (int c = 0; c < vecs; c++)
            v[c] = value(from, t, j, d + (uint32_t)c * VF_N);
        if (from != FROM_TILE && first == 0 && t->next)
            for (int c = 0; c < vecs; c++)
                ask((enum kn_type)from, value_row(t->next, j), d + (uint32_t)c * VF_N);
#pragma GCC unroll 8
        for (uint32_t i = 0; i < n; i++) {
            vf x = vf_set1(p[i * TILE + j]);
#pragma GCC unroll 4
            for (int c = 0; c < vecs; c++)
                acc[i][c] = vf_fma(x, v[c], acc[i][c]);
        }
    }
#pragma GCC unroll 8
    for (uint32_t i = 0; i < n; i++)
#pragma GCC unroll 4
        for (int c = 0; c < vecs; c++)
            vf_store(t->acc + (size_t)(first + i) * t->d_pad + d + c * VF_N, acc[i][c]);
}

INLINE void mix_dims(enum source from, const struct attn_tile *t, uint32_t first, const uint32_t n)
{
    uint32_t d = 0;
    for (; d + VECS * VF_N <= t->d_pad; d += VECS * VF_N)
        mix(from, t, first, n, d, VECS);
    for (; d < t->d_pad; d += VF_N)
        mix(from, t, first, n, d, 1);
}

/* Queries from first on, at most SIMD_QUERIES, that see the same part of the tile. */
static uint32_t same_view(const struct attn_tile *t, uint32_t first)
{
    uint32_t n = 1;
    while (n < SIMD_QUERIES && first + n < t->n_q && t->lo[first + n] == t->lo[first] &&
           t->hi[first + n] == t->hi[first])
        n++;
    return n;
}

INLINE void values_from(enum source from, const struct attn_tile *t)
{
    for (uint32_t i = 0, n; i < t->n_q; i += n) {
        n = same_view(t, i);
        if (n == SIMD_QUERIES) {
            mix_dims(from, t, i, SIMD_QUERIES);
#if SIMD_QUERIES > 3
        } else if (n >= 3) {
            mix_dims(from, t, i, n = 3);
#endif
        } else if (n == 2) {
            mix_dims(from, t, i, 2);
        } else {
            mix_dims(from, t, i, 1);
        }
    }
}

static void values(const struct attn_tile *t)
{
    if (!t->rows)
        values_from(FROM_TILE, t);
    else if (t->rows->type == KN_F32)
        values_from(FROM_F32, t);
    else if (t->rows->type == KN_F16)
        values_from(FROM_F16, t);
    else if (t->rows->type == KN_BF16)
        values_from(FROM_BF16, t);
    else if (t->rows->type == KN_Q8_0)
        values_from(FROM_Q8_0, t);
    else
        values_from(FROM_Q4_0, t);
}

/* ---- merge
 * ------------------------------------------------------------------------------------------- */

static void merge(const struct attn_merge *g)
{
    float m[ATTN_Q_MAX], c[ATTN_Q_MAX], c_t[ATTN_Q_MAX], old[ATTN_Q_MAX] = {0},
                                                         m_t[ATTN_Q_MAX] = {0};
    memcpy(old, g->m, g->n_q * sizeof old[0]);
    memcpy(m_t, g->m_t, g->n_q * sizeof m_t[0]);
    for (uint32_t i = 0; i < g->n_q; i += VF_N) {
        vf a = vf_load(old + i), b = vf_load(m_t + i), top = vf_max(a, b);
        vf_store(m + i, top);
        vf_store(c + i, vf_exp(vf_sub(a, top)));
        vf_store(c_t + i, vf_exp(vf_sub(b, top)));
    }
    for (uint32_t i = 0; i < g->n_q; i++) {
        if (m_t[i] == -INFINITY) /* the tile shows it nothing */
            continue;
        float *acc = g->acc + (size_t)i * g->d_pad;
        const float *acc_t = g->acc_t + (size_t)i * g->d_pad;
        vf x = vf_set1(c[i]), y = vf_set1(c_t[i]);
        for (uint32_t d = 0; d < g->d_pad; d += VF_N)
            vf_store(acc + d, vf_fma(vf_load(acc_t + d), y, vf_mul(vf_load(acc + d), x)));
        g->l[i] = g->l[i] * c[i] + g->l_t[i] * c_t[i];
        g->m[i] = m[i];
    }
}

static void finish(float *out, const float *acc, float l, uint32_t d)
{
    uint32_t i = 0;
    for (; i + VF_N <= d; i += VF_N)
        vf_store(out + i, vf_div(vf_load(acc + i), vf_set1(l)));
    for (; i < d; i++)
        out[i] = acc[i] / l;
}

const struct attn_kernels ATTN_NAME(CPU_ISA) = {load,  scores, weights,      values,
                                                merge, finish, SIMD_TURN_MAX};
