/* Attention and everything that touches pages, over a table of shapes, against formulas in double
 * precision.
 *
 *   attention, attention_row   5e-6 of the largest value that takes part (f16 pools: after rounding
 * to halves) kv_write, keys_read, hidden rows, row_copy   exact
 *
 * Slots outside a sequence hold large garbage, so that a row that looks beyond its range is seen at
 * once. The row rule: a row's bits do not change with its batch, nor with where a prompt was cut.
 */
#include "kernels_attention.h"
#include "kn_kv_addr.h"
#include "sanitized.h"

static const enum kn_type kv_types[] = {KN_F32, KN_F16, KN_BF16, KN_Q8_0, KN_Q8_Q4};

/* Whether a type has heads of that size. */
static bool fits(enum kn_type type, uint32_t head_dim)
{
    return head_dim % kn_kv_type_find(type)->block == 0;
}

/* A few rows alone and as stretches: the bits of the whole batch. */
static void check_rows_stand_alone(const struct kca_world *w, struct kn *kn,
                                   const struct kn_seq *seq, const float *all, float *scratch)
{
    if (kc_is_device(kn))
        return;
    static const uint32_t lengths[] = {1, 2, 3, 5, 8, 17};
    size_t width = (size_t)w->n_heads * w->s.d;
    for (size_t i = 0; i < KC_LEN(lengths); i++) {
        uint32_t n = lengths[i], first = (w->n_rows * (uint32_t)i) / 7;
        if (first + n > w->n_rows)
            continue;
        struct kn_batch b = kca_batch(w, seq, first, n);
        kc_attention(kn, &b, (struct kc_queries){1, w->n_heads, w->scale, w->q + first * width},
                     scratch);
        kc_same(kc_name(kn), scratch, all + first * width, n * width);
    }
}

static void check_world(const struct kca_world *w)
{
    size_t width = (size_t)w->n_heads * w->s.d, n_out = width * w->n_rows;
    double *want = malloc(n_out * sizeof *want), *p = malloc(w->s.n * sizeof *p);
    float *got = malloc(n_out * sizeof *got), *scratch = malloc(n_out * sizeof *scratch);
    assert_true(want && p && got && scratch);
    for (uint32_t r = 0; r < w->n_rows; r++)
        for (uint32_t h = 0; h < w->n_heads; h++)
            kca_attend(w, r, h, p, want + r * width + h * w->s.d);
    double tol = 5e-6 * (double)kc_max_abs(w->v, (size_t)w->s.n * w->s.n_kv * w->s.d);
    tol *= fmax(1.0, (double)(w->s.deviation * w->s.deviation));
    double halves = (double)(KC_HALVES * kc_max_abs(w->v, (size_t)w->s.n * w->s.n_kv * w->s.d));
    for (unsigned i = 0; i < kc_all.n; i++) {
        struct kn *kn = kc_all.kn[i];
        struct kc_pool pool;
        struct kn_seq seq;
        if (!kc_has_kv(kn, w->s.type, w->s.d))
            continue;
        if (kc_is_device(kn) && w->s.type != KN_F32 && w->s.type != KN_F16)
            continue; /* test_cuda_kv has them, with less of the shim's time */
        kca_pool(w, &pool, kn, &seq);
        bool rounds = kc_is_device(kn) && w->s.type != KN_F32;
        struct kn_batch b = kca_batch(w, &seq, 0, w->n_rows);
        kc_attention(kn, &b, (struct kc_queries){1, w->n_heads, w->scale, w->q}, got);
        for (size_t k = 0; k < n_out; k++) {
            size_t row = k / width;
            bool blind = w->lo[row] == w->hi[row];
            if (!(fabs((double)got[k] - want[k]) <= (blind ? 0 : rounds ? halves : tol)))
                fail_msg("%s: d %u, kv heads %u, group %u, n %u: row %zu [%u, %u) value %zu is "
                         "%.9g, expected %.9g",
                         kc_name(kn), w->s.d, w->s.n_kv, w->s.group, w->s.n, row, w->lo[row],
                         w->hi[row], k % width, (double)got[k], want[k]);
        }
        check_rows_stand_alone(w, kn, &seq, got, scratch);
        kc_pool_close(&pool);
    }
    free(want);
    free(p);
    free(got);
    free(scratch);
}

/* Views first, first + step ... of the caches of a shape. */
static void some_views(struct kca_shape s, unsigned first, unsigned step)
{
    struct kca_world w = kca_make(s);
    for (unsigned view = KCA_PREFILL + first; view <= KCA_WINDOWS; view += step) {
        kca_look(&w, (enum kca_view)view);
        check_world(&w);
    }
    kca_free(&w);
}

static void every_view(struct kca_shape s)
{
    some_views(s, 0, 1);
}

static void attention_at_every_length(void **state)
{
    (void)state;
    static const uint32_t lengths[] = {1, 2, 63, 64, 65, 130};
    for (size_t i = 0; i < KC_LEN(lengths); i++)
        for (size_t t = 0; t < KC_LEN(kv_types); t++)
            for (enum kc_slots how = KC_DENSE; how <= KC_SCATTERED; how++)
                if (!SANITIZED || (i + t) % 3 == (size_t)how) /* each length with each */
                    every_view((struct kca_shape){32, 2, 2, lengths[i], kv_types[t], how, 1.0f});
}

static void attention_at_every_head_size(void **state)
{
    (void)state;
    static const uint32_t dims[] = {8, 16, 32, 64, 72, 80, 96, 128, 256};
    for (size_t i = 0; i < KC_LEN(dims); i++)
        for (size_t t = 0; t < KC_LEN(kv_types); t++)
            if (fits(kv_types[t], dims[i]))
                some_views((struct kca_shape){dims[i], 1, 3, 70, kv_types[t], KC_PRUNED, 1.0f},
                           SANITIZED ? (i + t) % 2 : 0, SANITIZED ? 2 : 1);
}

static void attention_at_every_group(void **state)
{
    (void)state;
    for (uint32_t group = 1; group <= 8; group++)
        every_view((struct kca_shape){16, 1 + group % 3, group, 67, KN_F16, KC_SCATTERED, 1.0f});
    every_view((struct kca_shape){16, 1, 37, 66, KN_F32, KC_DENSE, 1.0f});
    every_view((struct kca_shape){32, 1, 37, 66, KN_Q8_0, KC_DENSE, 1.0f});
    every_view((struct kca_shape){64, 1, 37, 66, KN_Q8_Q4, KC_DENSE, 1.0f});
}

static void attention_over_a_long_cache(void **state)
{
    (void)state;
    static const enum kn_type types[] = {KN_F16, KN_Q8_0, KN_Q8_Q4};
    for (size_t t = 0; t < KC_LEN(types); t++) {
        struct kca_world w = kca_make(
            (struct kca_shape){64, 3, 3, SANITIZED ? 300 : 700, types[t], KC_PRUNED, 1.0f});
        kca_look(&w, t == 0 ? KCA_PREFILL : KCA_SCORE_GAP);
        check_world(&w);
        kca_free(&w);
    }
}

/* Scores of hundreds: one key takes all, and the maximum moves from tile to tile. */
static void attention_when_it_is_sharp(void **state)
{
    (void)state;
    every_view((struct kca_shape){64, 1, 2, 200, KN_F32, KC_DENSE, 8.0f});
}

/* Rows of several sequences, mixed in any order, each with its own slots over one pool. */
static void rows_of_many_sequences_share_a_batch(void **state)
{
    (void)state;
    enum { SEQS = 5, D = 64, H = 6, N_KV = 2, N_MAX = 133 };
    static const uint32_t lengths[SEQS] = {1, 64, 133, 20, 65};
    uint32_t total = 0, rows = 0;
    for (int s = 0; s < SEQS; s++)
        total += lengths[s];
    uint32_t *slots = kc_slots(KC_SCATTERED, total, 6, 4);
    float *k = kc_floats(1, (size_t)N_MAX * N_KV * D, 1.0f);
    float *v = kc_floats(2, (size_t)N_MAX * N_KV * D, 1.0f);
    uint32_t seq[64], lo[64], hi[64];
    int32_t zeros[64] = {0};
    struct kc_rng r = {8};
    for (; rows < 64; rows++) {
        seq[rows] = rows < 40 ? kc_below(&r, SEQS) : rows / 8 % SEQS;
        uint32_t n = lengths[seq[rows]];
        lo[rows] = kc_below(&r, n);
        hi[rows] = lo[rows] + kc_below(&r, n - lo[rows] + 1);
    }
    float *q = kc_floats(3, (size_t)rows * H * D, 1.0f), all[64 * H * D], one[H * D];
    for (unsigned i = 0; i < kc_all.n; i++) {
        struct kn *kn = kc_all.kn[i];
        struct kc_pool pool;
        struct kn_seq seqs[SEQS];
        kc_pool_open(
            &pool, kn,
            (struct kn_kv){.n_layers = 1, .n_kv_heads = N_KV, .head_dim = D, .type = KN_F16}, 6);
        for (uint32_t s = 0, at = 0; s < SEQS; at += lengths[s++]) {
            seqs[s] = (struct kn_seq){&pool.kv, slots + at, lengths[s]};
            kc_pool_write(&pool, &seqs[s], 0, (struct kc_rows){0, lengths[s], k, v, NULL});
        }
        struct kn_batch b = {rows, SEQS, zeros, zeros, seq, lo, hi, NULL, seqs};
        kc_attention(kn, &b, (struct kc_queries){0, H, 0.125f, q}, all);
        for (uint32_t row = 0; row < rows; row++) {
            uint32_t zero = 0;
            struct kn_batch alone = {1,        1,        zeros, zeros,          &zero,
                                     lo + row, hi + row, NULL,  &seqs[seq[row]]};
            kc_attention(kn, &alone, (struct kc_queries){0, H, 0.125f, q + (size_t)row * H * D},
                         one);
            kc_alike(kn, one, all + (size_t)row * H * D, H * D, KC_HALVES);
        }
        kc_pool_close(&pool);
    }
    free(slots);
    free(k);
    free(v);
    free(q);
}

/* A prompt written and attended in chunks of any size gives the bits of one pass. */
static void cuts_of_a_prompt(enum kn_type type)
{
    static const uint32_t chunks[] = {1, 7, 13, 64, 70, 150};
    struct kca_world w = kca_make((struct kca_shape){32, 2, 4, 150, type, KC_PRUNED, 1.0f});
    size_t width = (size_t)w.n_heads * w.s.d;
    float *first = malloc(width * w.s.n * sizeof *first),
          *got = malloc(width * w.s.n * sizeof *got);
    assert_true(first && got);
    kca_look(&w, KCA_PREFILL);
    for (unsigned i = 0; i < kc_all.n; i++)
        for (size_t c = 0; c < KC_LEN(chunks) && kc_has_kv(kc_all.kn[i], type, 32); c++) {
            struct kn *kn = kc_all.kn[i];
            struct kc_pool pool;
            struct kn_kv kv = {.n_layers = 2, .n_kv_heads = 2, .head_dim = 32, .type = type};
            kc_pool_open(&pool, kn, kv, w.n_pages);
            for (uint32_t at = 0; at < w.s.n; at += chunks[c]) {
                uint32_t end = at + chunks[c] < w.s.n ? at + chunks[c] : w.s.n;
                struct kn_seq seq = {&pool.kv, w.slots, end};
                kc_pool_write(&pool, &seq, 1, (struct kc_rows){at, end, w.k, w.v, NULL});
                struct kn_batch b = kca_batch(&w, &seq, at, end - at);
                kc_attention(kn, &b, (struct kc_queries){1, w.n_heads, w.scale, w.q + at * width},
                             got + at * width);
            }
            if (c == 0)
                memcpy(first, got, width * w.s.n * sizeof *first);
            kc_alike(kn, got, first, width * w.s.n, KC_HALVES);
            kc_pool_close(&pool);
        }
    free(first);
    free(got);
    kca_free(&w);
}

static void where_a_prompt_is_cut_does_not_matter(void **state)
{
    (void)state;
    for (size_t t = 0; t < KC_LEN(kv_types); t++)
        cuts_of_a_prompt(kv_types[t]);
}

static void attention_row_is_the_mean_of_softmaxes(void **state)
{
    (void)state;
    static const uint32_t lengths[] = {1, 63, 64, 65, 300};
    for (size_t c = 0; c < KC_LEN(lengths) * KC_LEN(kv_types); c++) {
        uint32_t n = lengths[c / KC_LEN(kv_types)];
        enum kn_type type = kv_types[c % KC_LEN(kv_types)];
        uint32_t d = fits(type, 48) ? 48 : 64;
        struct kca_world w = kca_make((struct kca_shape){d, 2, 3, n, type, KC_SCATTERED, 2.0f});
        double *p = malloc(n * sizeof *p), *want = calloc(n, sizeof *want), *out = p;
        float *got = malloc(n * sizeof *got), sum;
        double ignored[64];
        assert_true(p && want && got);
        w.lo[0] = 0;
        w.hi[0] = n;
        for (uint32_t h = 0; h < w.n_heads; h++) {
            double total = 0;
            kca_attend(&w, 0, h, out, ignored);
            for (uint32_t j = 0; j < n; j++)
                total += p[j];
            for (uint32_t j = 0; j < n; j++)
                want[j] += p[j] / total / w.n_heads;
        }
        for (unsigned i = 0; i < kc_all.n; i++) {
            struct kn *kn = kc_all.kn[i];
            struct kc_pool pool;
            struct kn_seq seq;
            if (!kc_has_kv(kn, type, d))
                continue;
            kca_pool(&w, &pool, kn, &seq);
            kn->ops->attention_row(kn, &seq, 1, w.q, w.n_heads, w.scale, got);
            sum = 0.0f;
            for (uint32_t j = 0; j < n; j++) {
                sum += got[j];
                if (!(fabs((double)got[j] - want[j]) <= 5e-6))
                    fail_msg("%s: n %u: weight %u is %.9g, expected %.9g", kc_name(kn), n, j,
                             (double)got[j], want[j]);
            }
            assert_true(fabsf(sum - 1.0f) < 1e-5f);
            kc_pool_close(&pool);
        }
        free(p);
        free(want);
        free(got);
        kca_free(&w);
    }
}

/* ---- rows in, rows out ---- */

static void keys_come_back_rounded_once(void **state)
{
    (void)state;
    enum { D = 96, N_KV = 3, N = 70 };
    for (size_t type = 0; type < KC_LEN(kv_types); type++) {
        enum kn_type t = kv_types[type];
        uint32_t *slots = kc_slots(KC_SCATTERED, N, 3, 1);
        float *k = kc_floats(1, (size_t)N * N_KV * D, 1.0f), got[N * N_KV * D];
        float *v = kc_floats(2, (size_t)N * N_KV * D, 1.0f), *want = malloc(sizeof got);
        assert_non_null(want);
        for (int i = 0; i < 40; i++)
            k[i] = ldexpf(1.7f, i - 30) * (i % 2 ? 1 : -1); /* subnormal halves among them */
        for (int i = 64; i < 96; i++) {
            k[i] = 0.0f;                                       /* a block of zeros */
            k[i + 32] = ldexpf(1.0f + (float)i / 128.0f, -20); /* its scale a subnormal half */
            k[i + 64] = 1e30f;                                 /* beyond every half */
        }
        kc_stored(t, k, N * N_KV * D, want);
        for (unsigned i = 0; i < kc_all.n; i++) {
            struct kn *kn = kc_all.kn[i];
            struct kc_pool pool;
            if (!kc_has_kv(kn, t, D))
                continue;
            kc_pool_open(
                &pool, kn,
                (struct kn_kv){.n_layers = 3, .n_kv_heads = N_KV, .head_dim = D, .type = t}, 3);
            struct kn_seq seq = {&pool.kv, slots, N};
            for (uint32_t layer = 0; layer < 3; layer++) /* the middle layer last: others stay */
                kc_pool_write(&pool, &seq, (layer + 2) % 3,
                              (struct kc_rows){0, N, layer == 2 ? k : v, v, NULL});
            kn->ops->keys_read(kn, &seq, 1, 0, N, got);
            kc_same(kc_name(kn), got, want, N * N_KV * D);
            kn->ops->keys_read(kn, &seq, 1, 63, 5, got);
            kc_same(kc_name(kn), got, want + (size_t)63 * N_KV * D, 5 * N_KV * D);
            kn->ops->keys_read(kn, &seq, 1, N, 0, got);
            kc_pool_close(&pool);
        }
        free(slots);
        free(k);
        free(v);
        free(want);
    }
}

static void read_hidden(struct kn *kn, const struct kn_seq *seq, const uint32_t *slots, uint32_t n,
                        float *got)
{
    uint32_t zeros[64] = {0}, d = seq->kv->d_hidden;
    struct kn_batch b = {n, 1, (int32_t *)zeros, (int32_t *)zeros, zeros, zeros, zeros, NULL, seq};
    float *out = kc_up(kn, NULL, (size_t)n * d * sizeof *got);
    kn->ops->batch_begin(kn, &b);
    kn->ops->hidden_read(kn, &b, slots, out);
    kn->ops->batch_end(kn, &b);
    kc_down(kn, got, out, (size_t)n * d * sizeof *got);
}

/* Rows of zeros, tiny rows and rows beyond the largest half survive; f16 rounds once, relative to
 * the row. */
static void hidden_rows_come_back(void **state)
{
    (void)state;
    enum { D = 65, N = 9 };
    static const float sizes[N] = {1.0f, 0.0f, 1e-30f, 2e5f, 1e30f, 3.0f, 1e-3f, 6e4f, 40.0f};
    uint32_t *slots = kc_slots(KC_SCATTERED, N, 2, 1);
    float *x = kc_floats(5, (size_t)N * D, 1.0f), got[N * D], want[N * D];
    for (size_t t = 0; t < KC_LEN(kv_types); t++) {
        bool halves = kv_types[t] != KN_F32;
        for (uint32_t r = 0; r < N; r++) {
            float *row = x + r * D, max_abs = 0.0f;
            for (int i = 0; i < D; i++)
                row[i] = sizes[r] == 0.0f ? 0.0f : (row[i] == 0.0f ? 0.5f : row[i]) * sizes[r];
            max_abs = kc_max_abs(row, D);
            float scale = kn_kv_scale_for(max_abs);
            for (int i = 0; i < D; i++) {
                want[r * D + (uint32_t)i] = row[i];
                if (!halves)
                    continue;
                want[r * D + (uint32_t)i] = kn_f16_to_f32(kn_f32_to_f16(row[i] / scale)) * scale;
                assert_true(fabsf(want[r * D + (uint32_t)i] - row[i]) <= max_abs * 0x1p-11f);
            }
        }
        for (unsigned i = 0; i < kc_all.n; i++) {
            struct kn *kn = kc_all.kn[i];
            struct kc_pool pool;
            if (!kc_has_kv(kn, kv_types[t], 32))
                continue;
            kc_pool_open(&pool, kn,
                         (struct kn_kv){.n_layers = 1,
                                        .n_kv_heads = 1,
                                        .head_dim = 32,
                                        .d_hidden = D,
                                        .type = kv_types[t]},
                         2);
            struct kn_seq seq = {&pool.kv, slots, N};
            kc_pool_write(&pool, &seq, 0, (struct kc_rows){0, N, NULL, NULL, x});
            read_hidden(kn, &seq, slots, N, got);
            kc_same(kc_name(kn), got, want, N * D);
            read_hidden(kn, &seq, slots + 4, 2, got);
            kc_same(kc_name(kn), got, want + 4 * D, 2 * D);
            kc_pool_close(&pool);
        }
        free(x);
        x = kc_floats(6, (size_t)N * D, 1.0f);
    }
    free(x);
    free(slots);
}

/* A moved row is the same row in every layer, and its neighbours stay. */
static void a_row_moves_whole(void **state)
{
    (void)state;
    enum { D = 32, N_KV = 2, W = D * N_KV, H = 24, LAYERS = 3, N = 4 };
    uint32_t slots[N] = {3, 70, 5, 64}, moved[N] = {3, 129, 5, 0};
    float *k = kc_floats(1, LAYERS * N * W, 1.0f), *v = kc_floats(2, LAYERS * N * W, 1.0f);
    float *x = kc_floats(3, N * H, 1.0f);
    for (size_t t = 0; t < KC_LEN(kv_types); t++)
        for (unsigned i = 0; i < kc_all.n; i++) {
            struct kn *kn = kc_all.kn[i];
            struct kc_pool pool;
            float before[N * W], after[N * W], h0[N * H], h1[N * H], q[W], p0[N], p1[N];
            if (!kc_has_kv(kn, kv_types[t], D))
                continue;
            kc_pool_open(&pool, kn,
                         (struct kn_kv){.n_layers = LAYERS,
                                        .n_kv_heads = N_KV,
                                        .head_dim = D,
                                        .d_hidden = H,
                                        .type = kv_types[t]},
                         3);
            struct kn_seq seq = {&pool.kv, slots, N}, to = {&pool.kv, moved, N};
            for (uint32_t l = 0; l < LAYERS; l++)
                kc_pool_write(&pool, &seq, l,
                              (struct kc_rows){0, N, k + l * N * W, v + l * N * W, x});
            kn->ops->row_copy(kn, &pool.kv, 129, 70);
            kn->ops->row_copy(kn, &pool.kv, 0, 64);
            kn->ops->row_copy(kn, &pool.kv, 5, 5);
            read_hidden(kn, &seq, slots, N, h0);
            read_hidden(kn, &to, moved, N, h1);
            kc_same(kc_name(kn), h1, h0, N * H);
            uint32_t lo = 0, hi = N, zero = 0;
            for (uint32_t l = 0; l < LAYERS; l++) {
                kn->ops->keys_read(kn, &seq, l, 0, N, before);
                kn->ops->keys_read(kn, &to, l, 0, N, after);
                kc_same(kc_name(kn), after, before, N * W);
                for (int c = 0; c < W; c++)
                    q[c] = (float)(c % 5) - 2.0f;
                kn->ops->attention_row(kn, &seq, l, q, N_KV, 1.0f, p0);
                kn->ops->attention_row(kn, &to, l, q, N_KV, 1.0f, p1);
                kc_same(kc_name(kn), p1, p0, N);
                struct kn_batch b = {1,    1,   (int32_t *)&zero, (int32_t *)&zero, &zero, &lo, &hi,
                                     NULL, &seq};
                kc_attention(kn, &b, (struct kc_queries){l, N_KV, 1.0f, q},
                             before); /* values moved, too */
                b.seqs = &to;
                kc_attention(kn, &b, (struct kc_queries){l, N_KV, 1.0f, q}, after);
                kc_same(kc_name(kn), after, before, W);
            }
            kc_pool_close(&pool);
        }
    free(k);
    free(v);
    free(x);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(attention_at_every_length),
        cmocka_unit_test(attention_at_every_head_size),
        cmocka_unit_test(attention_at_every_group),
        cmocka_unit_test(attention_over_a_long_cache),
        cmocka_unit_test(attention_when_it_is_sharp),
        cmocka_unit_test(rows_of_many_sequences_share_a_batch),
        cmocka_unit_test(where_a_prompt_is_cut_does_not_matter),
        cmocka_unit_test(attention_row_is_the_mean_of_softmaxes),
        cmocka_unit_test(keys_come_back_rounded_once),
        cmocka_unit_test(hidden_rows_come_back),
        cmocka_unit_test(a_row_moves_whole),
    };
    return cmocka_run_group_tests(tests, kc_all_open, kc_all_close);
}
