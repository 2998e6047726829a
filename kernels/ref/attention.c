/* attention.c: softmax over slots, in tiles of 64 cache indices, without a matrix of scores.
 *
 * A query sees the indices lo <= j < hi of its sequence. Tile t covers 64 t <= j < 64 t + 64; in
 * each tile that the range touches:
 *
 *      s_j = scale * q . k_j                        (ascending dims)
 *      m_t = max s_j      p_j = exp(s_j - m_t)      l_t = sum p_j       a_t = sum p_j v_j
 * (ascending j)
 *
 * and the tiles are merged in ascending order, always by the same formula:
 *
 *      m' = max(m, m_t)   c = exp(m - m')   c_t = exp(m_t - m')
 *      l  = l c + l_t c_t                   a = a c + a_t c_t               out = a / l
 *
 * Tile borders are fixed by cache index: not by lo, not by the other queries. Prefill, decode and
 * scoring therefore add up in the same order. A query that sees nothing gives zeros.
 *
 * Queries that share a KV head (neighbouring rows of one sequence, the heads of a group) go
 * together, so that a tile is expanded once for all of them. */
#include "ref.h"
#include "kn_hadamard.h"
#include "kn_kv_addr.h"
#include <math.h>

#define N_QUERIES 32 /* queries that share an expanded tile */
#define D_VECS (KN_HEAD_DIM_MAX / REF_LANES)
#define T_VECS (KN_TILE / REF_LANES)

/* One tile of one KV head as floats. Unused keys and the dims behind head_dim are zero. */
struct tile {
    uint32_t d, d_vecs;
    union ref_lanes k[KN_HEAD_DIM_MAX][T_VECS]; /* turned: [dim][64 keys] */
    union ref_lanes v[KN_TILE][D_VECS];         /* [64 values][dims] */
};

/* The keys and values of one layer and KV head of a sequence. */
struct stream {
    const struct kn_seq *s;
    uint32_t layer, head;
};

struct query {
    const float *q;
    float *out;
    uint32_t lo, hi;
    float m, l;
    union ref_lanes acc[D_VECS];
};

/* Expands the cache indices lo..hi, within one tile. want_v: values, too. */
static void tile_fill(struct tile *tile, const struct stream *from, uint32_t lo, uint32_t hi,
                      bool want_v)
{
    const struct kn_seq *s = from->s;
    float line[KN_HEAD_DIM_MAX];
    const struct kn_kv *kv = s->kv;
    tile->d = kv->head_dim;
    tile->d_vecs = (kv->head_dim + REF_LANES - 1) / REF_LANES;
    if (hi - lo < KN_TILE)
        memset(tile->k, 0, tile->d * sizeof tile->k[0]);
    if (want_v && tile->d % REF_LANES != 0)
        memset(tile->v, 0, sizeof tile->v);
    for (uint32_t j = lo; j < hi; j++) {
        uint32_t at = j % KN_TILE;
        ref_kv_widen(kn_kv_line_type(kv->type, KN_KV_K),
                     kn_kv_row(kv, s->slots[j], from->layer, KN_KV_K, from->head), tile->d, line);
        for (uint32_t i = 0; i < tile->d; i++)
            tile->k[i][at / REF_LANES].f[at % REF_LANES] = line[i];
        if (!want_v)
            continue;
        ref_kv_widen(kn_kv_line_type(kv->type, KN_KV_V),
                     kn_kv_row(kv, s->slots[j], from->layer, KN_KV_V, from->head), tile->d, line);
        memcpy(tile->v[at], line, tile->d * sizeof line[0]);
    }
}

static void tile_scores(const struct tile *tile, const float *q, float scale, float *s)
{
    for (int c = 0; c < T_VECS; c++) {
        ref_four a0 = {0}, a1 = {0}, a2 = {0}, a3 = {0};
        for (uint32_t i = 0; i < tile->d; i++) {
            const ref_four *k = tile->k[i][c].v;
            a0 += k[0] * q[i];
            a1 += k[1] * q[i];
            a2 += k[2] * q[i];
            a3 += k[3] * q[i];
        }
        union ref_lanes a = {{a0 * scale, a1 * scale, a2 * scale, a3 * scale}};
        memcpy(s + c * REF_LANES, &a, sizeof a);
    }
}

/* What a query makes of one tile: its weights p over lo <= j < hi, and the two factors of the merge. */
struct part {
    uint32_t lo, hi;
    float p[KN_TILE];
    float c, c_t;
};

/* acc = acc * c + c_t * (sum of p_j v_j), for sixteen dims. */
static void values_add(const struct tile *tile, uint32_t dims, const struct part *t,
                       union ref_lanes *acc)
{
    ref_four a0 = {0}, a1 = {0}, a2 = {0}, a3 = {0};
    for (uint32_t j = t->lo; j < t->hi; j++) {
        const ref_four *v = tile->v[j][dims].v;
        a0 += v[0] * t->p[j];
        a1 += v[1] * t->p[j];
        a2 += v[2] * t->p[j];
        a3 += v[3] * t->p[j];
    }
    acc->v[0] = acc->v[0] * t->c + a0 * t->c_t;
    acc->v[1] = acc->v[1] * t->c + a1 * t->c_t;
    acc->v[2] = acc->v[2] * t->c + a2 * t->c_t;
    acc->v[3] = acc->v[3] * t->c + a3 * t->c_t;
}

/* Merges the tile that starts at index `start` into the query's state. */
static void query_add(struct query *q, const struct tile *tile, uint32_t start, float scale)
{
    struct part t = {.lo = KN_MAX(q->lo, start) - start,
                     .hi = KN_MIN(q->hi, start + KN_TILE) - start};
    float m_t = -INFINITY, l_t = 0.0f;
    tile_scores(tile, q->q, scale, t.p);
    for (uint32_t j = t.lo; j < t.hi; j++)
        m_t = fmaxf(m_t, t.p[j]);
    for (uint32_t j = t.lo; j < t.hi; j++) {
        t.p[j] = expf(t.p[j] - m_t);
        l_t += t.p[j];
    }
    float m = fmaxf(q->m, m_t);
    t.c = expf(q->m - m);
    t.c_t = expf(m_t - m);
    for (uint32_t i = 0; i < tile->d_vecs; i++)
        values_add(tile, i, &t, &q->acc[i]);
    q->l = q->l * t.c + l_t * t.c_t;
    q->m = m;
}

static void query_finish(struct query *q, const struct kn_kv *kv)
{
    for (uint32_t i = 0; i < kv->head_dim; i++)
        q->out[i] = q->lo < q->hi ? q->acc[i / REF_LANES].f[i % REF_LANES] / q->l : 0.0f;
    if (q->lo < q->hi && kn_kv_hadamard(kv->type))
        kn_hadamard_off(q->out, kv->head_dim);
}

/* n queries over one stream. */
static void attend(const struct stream *from, struct query *q, uint32_t n, float scale)
{
    struct tile tile;
    uint32_t lo = UINT32_MAX, hi = 0;
    for (uint32_t i = 0; i < n; i++) {
        memset(q[i].acc, 0, sizeof q[i].acc);
        q[i].m = -INFINITY;
        q[i].l = 0.0f;
        if (q[i].lo == q[i].hi)
            continue;
        lo = KN_MIN(lo, q[i].lo);
        hi = KN_MAX(hi, q[i].hi);
    }
    for (uint32_t start = lo / KN_TILE * KN_TILE; start < hi; start += KN_TILE) {
        tile_fill(&tile, from, KN_MAX(lo, start), KN_MIN(hi, start + KN_TILE), true);
        for (uint32_t i = 0; i < n; i++)
            if (q[i].lo < start + KN_TILE && q[i].hi > start && q[i].lo < q[i].hi)
                query_add(&q[i], &tile, start, scale);
    }
    for (uint32_t i = 0; i < n; i++)
        query_finish(&q[i], from->s->kv);
}

/* One call of ref_attention. */
struct call {
    const struct kn_batch *b;
    uint32_t layer, n_heads;
    float scale;
    const float *q;
    float *out;
};

/* Rows first .. end - 1, all of one sequence. */
static void attend_rows(const struct call *c, uint32_t first, uint32_t end)
{
    const struct kn_seq *s = &c->b->seqs[c->b->seq[first]];
    uint32_t d = s->kv->head_dim, group = c->n_heads / s->kv->n_kv_heads, n = 0;
    struct query queries[N_QUERIES];
    for (uint32_t g = 0; g < s->kv->n_kv_heads; g++) {
        struct stream from = {s, c->layer, g};
        for (uint32_t i = 0; i < (end - first) * group; i++) {
            uint32_t r = first + i / group;
            size_t at = ((size_t)r * c->n_heads + g * group + i % group) * d;
            queries[n].q = c->q + at;
            queries[n].out = c->out + at;
            queries[n].lo = c->b->lo[r];
            queries[n].hi = c->b->hi[r];
            if (++n < N_QUERIES && i + 1 < (end - first) * group)
                continue;
            attend(&from, queries, n, c->scale);
            n = 0;
        }
    }
}

void ref_attention(struct kn *kn, const struct kn_batch *b, uint32_t layer, const float *q,
                   uint32_t n_heads, float scale, float *out)
{
    (void)kn;
    struct call c = {b, layer, n_heads, scale, q, out};
    for (uint32_t first = 0, end; first < b->n_rows; first = end) {
        const struct kn_kv *kv = b->seqs[b->seq[first]].kv;
        kn_assert(kv->head_dim <= KN_HEAD_DIM_MAX && n_heads % kv->n_kv_heads == 0);
        for (end = first + 1; end < b->n_rows && b->seq[end] == b->seq[first];)
            end++;
        attend_rows(&c, first, end);
    }
}

/* Two passes over the keys of each head: maximum and sum, then the weights, so that no score is
 * kept. */
void ref_attention_row(struct kn *kn, const struct kn_seq *s, uint32_t layer, const float *q,
                       uint32_t n_heads, float scale, float *ret)
{
    (void)kn;
    struct tile tile;
    uint32_t d = s->kv->head_dim, group = n_heads / s->kv->n_kv_heads;
    kn_assert(d <= KN_HEAD_DIM_MAX && n_heads % s->kv->n_kv_heads == 0);
    memset(ret, 0, s->n * sizeof *ret);
    for (uint32_t h = 0; h < n_heads; h++) {
        float m = -INFINITY, l = 0.0f, p[KN_TILE];
        struct stream from = {s, layer, h / group};
        for (int pass = 0; pass < 2; pass++)
            for (uint32_t start = 0; start < s->n; start += KN_TILE) {
                uint32_t n = KN_MIN((uint32_t)KN_TILE, s->n - start);
                tile_fill(&tile, &from, start, start + n, false);
                tile_scores(&tile, q + (size_t)h * d, scale, p);
                float old = m;
                for (uint32_t j = 0; pass == 0 && j < n; j++)
                    m = fmaxf(m, p[j]);
                l *= pass == 0 ? expf(old - m) : 1.0f;
                for (uint32_t j = 0; pass == 0 && j < n; j++)
                    l += expf(p[j] - m);
                for (uint32_t j = 0; pass == 1 && j < n; j++)
                    ret[start + j] += expf(p[j] - m) / l / (float)n_heads;
            }
    }
}
