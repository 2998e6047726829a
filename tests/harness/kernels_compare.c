/* kernels_compare.c: see the header. */
#include "kernels_compare.h"
#include <unistd.h>
#include "kn_hadamard.h"

/* ---- backends ---- */

/* Names that an open function may know; what the machine or the backend lacks is left out. */
static const char *const isas[] = {"scalar",      "avx2", "avx512",   "avx512-vnni",
                                   "avx512-bf16", "amx",  "amx-model"};

static bool have(const struct kc_set *set, const struct kn *kn)
{
    for (unsigned i = 0; i < set->n; i++)
        if (strcmp(set->kn[i]->name, kn->name) == 0 && strcmp(set->kn[i]->isa, kn->isa) == 0)
            return true;
    return false;
}

static void open_one(struct kc_set *set, const char *backend, const char *isa, uint32_t threads,
                     uint32_t activations)
{
    struct kn_options opt = {.backend = backend,
                             .isa = isa,
                             .threads = threads,
                             .activations = activations};
    struct kn *kn = NULL;
    char why[256];
    int code = kn_open(&kn, &opt, why, sizeof why);
    if (code == KN_EUNSUPPORTED && (isa || strcmp(backend, "cuda") == 0)) { /* no GPU here */
        assert_true(why[0] != '\0');
        assert_null(kn);
        return;
    }
    if (code != KN_OK)
        fail_msg("%s %s: %d %s", backend, isa ? isa : "-", code, why);
    assert_string_equal(kn->name, backend);
    if (have(set, kn)) {
        kn_close(&kn);
        return;
    }
    assert_true(set->n < KC_BACKENDS_MAX);
    set->kn[set->n++] = kn;
}

void kc_open(struct kc_set *set, uint32_t threads)
{
    set->n = 0;
    open_one(set, "ref", NULL, threads, 0);
    for (unsigned i = 0; kn_backend_name(i); i++) {
        if (strcmp(kn_backend_name(i), "simt-race") == 0)
            continue; /* the same again, slower: test_cuda_* has it */
        open_one(set, kn_backend_name(i), NULL, threads, 0);
        for (size_t j = 0; j < KC_LEN(isas); j++)
            open_one(set, kn_backend_name(i), isas[j], threads, 0);
    }
}

void kc_open_wide(struct kc_set *set, uint32_t threads)
{
    set->n = 0;
    open_one(set, "ref", NULL, threads, 0);
    for (size_t j = 0; j < KC_LEN(isas); j++)
        open_one(set, "cpu", isas[j], threads, KN_ACTIVATIONS_WIDE);
    for (unsigned i = 1; i < set->n; i++)
        assert_int_equal(set->kn[i]->activations, KN_ACTIVATIONS_WIDE);
}

void kc_close(struct kc_set *set)
{
    for (unsigned i = 0; i < set->n; i++) {
        struct kn *kn = set->kn[i];
        assert_int_equal(kn->ops->status(kn), KN_OK);
        assert_int_equal(kn->bytes_buffers + kn->bytes_weights + kn->bytes_arena, 0);
        kn_close(&set->kn[i]);
        assert_null(set->kn[i]);
    }
    set->n = 0;
}

struct kc_set kc_all;

int kc_all_open(void **state)
{
    (void)state;
    kc_open(&kc_all, 3);
    return 0;
}

int kc_all_close(void **state)
{
    (void)state;
    kc_close(&kc_all);
    return 0;
}

const char *kc_name(const struct kn *kn)
{
    static char names[2][64];
    static unsigned turn;
    char *name = names[turn++ % 2];
    snprintf(name, sizeof names[0], "%s %s a%u x%u", kn->name, kn->isa, kn->activations,
             kn->n_threads);
    return name;
}

bool kc_is_ref(const struct kn *kn)
{
    return strcmp(kn->name, "ref") == 0;
}
bool kc_is_int8(const struct kn *kn)
{
    return strcmp(kn->name, "cpu") == 0;
}

bool kc_is_bf16(const struct kn *kn)
{
    return strcmp(kn->name, "cpu") == 0 && kn->activations != KN_ACTIVATIONS_WIDE &&
           (strstr(kn->isa, "bf16") || strcmp(kn->isa, "amx-int8") == 0);
}

bool kc_is_device(const struct kn *kn)
{
    return strcmp(kn->name, "cuda") == 0 || strncmp(kn->name, "simt", 4) == 0;
}

/* ---- made-up data ---- */

uint32_t kc_bits(struct kc_rng *r)
{
    uint64_t z = r->state += 0x9e3779b97f4a7c15u; /* a counter through a mixer */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)(z >> 32);
}

uint32_t kc_below(struct kc_rng *r, uint32_t n)
{
    return (uint32_t)((uint64_t)kc_bits(r) * n >> 32);
}

float kc_normal(struct kc_rng *r)
{
    float sum = -6.0f; /* of twelve uniform values */
    for (int i = 0; i < 12; i++)
        sum += (float)(kc_bits(r) >> 8) * 0x1p-24f;
    return sum;
}

float *kc_floats(uint64_t seed, size_t n, float deviation)
{
    struct kc_rng r = {seed};
    float *x = malloc((n ? n : 1) * sizeof *x);
    assert_non_null(x);
    for (size_t i = 0; i < n; i++)
        x[i] = kc_normal(&r) * deviation;
    return x;
}

const enum kn_type kc_types[] = {KN_F32,  KN_F16,  KN_BF16, KN_Q8_0,   KN_Q4_0,
                                 KN_Q4_1, KN_Q5_0, KN_Q5_1, KN_Q2_K,   KN_Q3_K,
                                 KN_Q4_K, KN_Q5_K, KN_Q6_K, KN_IQ4_NL, KN_IQ4_XS};
const size_t kc_n_types = KC_LEN(kc_types);

/* Where the halves of a block lie: the scale, and the minimum or its scale (-1: none). */
static void halves_of(enum kn_type type, int *d, int *m)
{
    *d = 0;
    *m = -1;
    switch (type) {
    case KN_Q4_1:
    case KN_Q5_1:
    case KN_Q4_K:
    case KN_Q5_K:
        *m = 2;
        break;
    case KN_Q2_K:
        *d = 80;
        *m = 82;
        break;
    case KN_Q3_K:
        *d = 108;
        break;
    case KN_Q6_K:
        *d = 208;
        break;
    default:
        break;
    }
}

static void put_half(uint8_t *p, float f)
{
    uint16_t h = kn_f32_to_f16(f);
    memcpy(p, &h, 2);
}

static void fill_blocks(enum kn_type type, uint8_t *p, size_t n_blocks, struct kc_rng *r)
{
    const struct kn_type_info *info = kn_type_find(type);
    /* Q4_1 and Q5_1 hold the minimum itself: negative, so that values lie about zero. */
    bool min_direct = type == KN_Q4_1 || type == KN_Q5_1;
    int d, m;
    halves_of(type, &d, &m);
    for (size_t b = 0; b < n_blocks; b++, p += info->bytes) {
        for (uint32_t i = 0; i < info->bytes; i++)
            p[i] = (uint8_t)kc_bits(r);
        float scale = 0.001f + (float)kc_below(r, 1000) * 2e-5f;
        put_half(p + d, kc_below(r, 50) == 0 ? 0.0f : kc_below(r, 8) == 0 ? -scale : scale);
        if (m >= 0)
            put_half(p + m, min_direct ? -scale * 7.0f : scale * 1.1f);
    }
}

struct kn_tensor kc_tensor(enum kn_type type, uint32_t rows, uint32_t cols, uint64_t seed)
{
    const struct kn_type_info *info = kn_type_find(type);
    struct kc_rng r = {seed * 1000 + type};
    size_t count = (size_t)rows * cols, blocks = count / info->block;
    uint8_t *data = malloc(blocks * info->bytes);
    assert_non_null(data);
    assert_int_equal(cols % info->block, 0);
    if (info->block > 1)
        fill_blocks(type, data, blocks, &r);
    for (size_t i = 0; info->block == 1 && i < count; i++) {
        float f = kc_normal(&r) * 0.1f;
        uint16_t h = type == KN_F16 ? kn_f32_to_f16(f) : kn_f32_to_bf16(f);
        memcpy(data + i * info->bytes, type == KN_F32 ? (void *)&f : (void *)&h, info->bytes);
    }
    return (struct kn_tensor){type, rows, cols, data, blocks * info->bytes};
}

void kc_tensor_free(struct kn_tensor *t)
{
    free((void *)t->data);
    t->data = NULL;
}

float *kc_tensor_values(const struct kn_tensor *t)
{
    size_t count = (size_t)t->rows * t->cols;
    float *x = malloc(count * sizeof *x);
    assert_non_null(x);
    kn_dequant(t->type, t->data, count, x);
    return x;
}

/* ---- device memory ---- */

void *kc_up(struct kn *kn, const void *host, size_t bytes)
{
    void *dev = NULL;
    assert_int_equal(kn->ops->buf_alloc(kn, bytes, &dev), KN_OK);
    assert_int_equal((uintptr_t)dev % 64, 0);
    if (host)
        kn->ops->upload(kn, dev, host, bytes);
    return dev;
}

void kc_drop(struct kn *kn, void *dev, size_t bytes)
{
    kn->ops->buf_free(kn, dev, bytes);
}

void kc_down(struct kn *kn, void *host, void *dev, size_t bytes)
{
    kn->ops->download(kn, host, dev, bytes);
    kc_drop(kn, dev, bytes);
}

struct kn_weight *kc_load(struct kn *kn, const struct kn_tensor *t)
{
    struct kn_weight *w = NULL;
    int code = kn->ops->weight_load(kn, t, &w);
    if (code != KN_OK)
        fail_msg("%s: weight_load of %s [%u][%u]: %d", kc_name(kn), kn_type_find(t->type)->name,
                 t->rows, t->cols, code);
    return w;
}

/* ---- ops ---- */

void kc_linear(struct kn *kn, const struct kn_weight *w, const struct kn_tensor *t, const float *x,
               uint32_t rows, float *out)
{
    size_t in_bytes = (size_t)rows * t->cols * sizeof *x;
    size_t out_bytes = (size_t)rows * t->rows * sizeof *out;
    float *dx = kc_up(kn, x, in_bytes), *dout = kc_up(kn, NULL, out_bytes);
    kn->ops->linear(kn, 1, &w, NULL, dx, rows, &dout, false);
    kc_down(kn, out, dout, out_bytes);
    kc_drop(kn, dx, in_bytes);
}

void kc_pool_open(struct kc_pool *p, struct kn *kn, struct kn_kv kv, uint32_t n_pages)
{
    size_t unit = (size_t)sysconf(_SC_PAGESIZE), bytes = kn_kv_page_bytes(&kv);
    kv.stride = (bytes + unit - 1) / unit * unit;
    *p = (struct kc_pool){kn, kv, n_pages};
    assert_int_equal(kn->ops->arena_open(kn, kv.stride, n_pages, &p->kv.base), KN_OK);
    uint16_t *garbage = malloc(bytes); /* -30000 as halves, finite as floats */
    assert_non_null(garbage);
    for (size_t i = 0; i < bytes / 2; i++)
        garbage[i] = 0xf753;
    for (uint32_t i = 0; i < n_pages; i++) {
        assert_int_equal(kn->ops->arena_commit(kn, p->kv.base, kv.stride, i), KN_OK);
        kn->ops->upload(kn, (uint8_t *)p->kv.base + i * kv.stride, garbage, bytes);
    }
    free(garbage);
}

bool kc_has_kv(const struct kn *kn, enum kn_type type, uint32_t head_dim)
{
    char why[160];
    return kn_kv_check(kn, type, head_dim, why, sizeof why) == KN_OK;
}

/* 32 values: the bytes -127 .. 127 times a half. */
static void stored_block(const float *x, float *ret)
{
    float top = kc_max_abs(x, 32);
    float scale = kn_f16_to_f32(kn_f32_to_f16(fminf(top / 127.0f, 65504.0f)));
    for (int i = 0; i < 32; i++) {
        float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
        ret[i] = scale * (float)lrintf(fminf(fmaxf(x[i] * inverse, -127.0f), 127.0f));
    }
}

void kc_stored(enum kn_type type, const float *x, size_t n, float *ret)
{
    bool bytes = type == KN_Q8_0 || type == KN_Q8_Q4;
    for (size_t i = 0; bytes && i < n; i += 32)
        stored_block(x + i, ret + i);
    for (size_t i = 0; !bytes && i < n; i++)
        ret[i] = type == KN_F16    ? kn_f16_to_f32(kn_f32_to_f16(x[i]))
                 : type == KN_BF16 ? kn_bf16_to_f32(kn_f32_to_bf16(x[i]))
                                   : x[i];
}

/* 32 values: -8 .. 7 times a half, which the farthest from 0 is -8 of. */
static void stored_codes(float *x)
{
    float far = 0.0f;
    for (int i = 0; i < 32; i++)
        if (fabsf(x[i]) > fabsf(far) || (fabsf(x[i]) == fabsf(far) && x[i] < far))
            far = x[i];
    float scale = kn_f16_to_f32(kn_f32_to_f16(fmaxf(fminf(far / -8.0f, 65504.0f), -65504.0f)));
    for (int i = 0; i < 32; i++) {
        float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
        x[i] = scale * (float)lrintf(fminf(fmaxf(x[i] * inverse, -8.0f), 7.0f));
    }
}

/* y = H x with H[i][k] = (-1)^(ones of i & k) / sqrt(n), in double precision; n: a power of two. */
static void hadamard(uint32_t n, const float *x, float *y)
{
    for (uint32_t i = 0; i < n; i++) {
        double sum = 0;
        for (uint32_t k = 0; k < n; k++)
            sum += (double)x[k] * ((__builtin_popcount(i & k) & 1) != 0 ? -1 : 1);
        y[i] = (float)(sum / sqrt((double)n));
    }
}

void kc_stored_values(enum kn_type type, uint32_t head_dim, const float *x, size_t n, float *ret)
{
    if (type != KN_Q8_Q4) {
        kc_stored(type, x, n, ret);
        return;
    }
    uint32_t block = head_dim & -head_dim;
    float sign[KN_HEAD_DIM_MAX], turned[KN_HEAD_DIM_MAX];
    for (size_t at = 0; at < n; at += head_dim) {
        for (uint32_t i = 0; i < head_dim; i++)
            sign[i] = 1.0f;
        kn_hadamard_sign(sign, head_dim);
        memcpy(turned, x + at, head_dim * sizeof *turned);
        kn_hadamard_on(turned,
                       head_dim); /* its own bits: rounding decides which code a value gets */
        for (uint32_t i = 0; i < head_dim; i += 32)
            stored_codes(turned + i);
        for (uint32_t i = 0; i < head_dim; i += block)
            hadamard(block, turned + i, ret + at + i);
        for (uint32_t i = 0; i < head_dim; i++)
            ret[at + i] *= sign[i];
    }
}

void kc_pool_close(struct kc_pool *p)
{
    p->kn->ops->arena_close(p->kn, p->kv.base, p->kv.stride, p->n_pages);
}

void kc_pool_write(struct kc_pool *p, const struct kn_seq *seq, uint32_t layer, struct kc_rows rows)
{
    struct kn *kn = p->kn;
    uint32_t n = rows.to - rows.from, width = p->kv.n_kv_heads * p->kv.head_dim;
    size_t bytes = (size_t)n * width * sizeof(float);
    size_t hidden_bytes = (size_t)n * p->kv.d_hidden * sizeof(float);
    uint32_t *zeros = calloc(n, sizeof *zeros);
    assert_non_null(zeros);
    struct kn_batch b = {.n_rows = n,
                         .n_seqs = 1,
                         .ids = (int32_t *)zeros,
                         .positions = (int32_t *)zeros,
                         .seq = zeros,
                         .lo = zeros,
                         .hi = zeros,
                         .slots = seq->slots + rows.from,
                         .seqs = seq};
    kn->ops->batch_begin(kn, &b);
    if (rows.k) {
        float *dk = kc_up(kn, rows.k + (size_t)rows.from * width, bytes);
        float *dv = kc_up(kn, rows.v + (size_t)rows.from * width, bytes);
        kn->ops->kv_write(kn, &b, layer, dk, dv);
        kc_drop(kn, dk, bytes);
        kc_drop(kn, dv, bytes);
    }
    if (rows.hidden) {
        float *dh = kc_up(kn, rows.hidden + (size_t)rows.from * p->kv.d_hidden, hidden_bytes);
        kn->ops->hidden_write(kn, &b, dh);
        kc_drop(kn, dh, hidden_bytes);
    }
    kn->ops->batch_end(kn, &b);
    free(zeros);
}

uint32_t *kc_slots(enum kc_slots how, uint32_t n, uint32_t n_pages, uint64_t seed)
{
    struct kc_rng r = {seed};
    uint32_t total = n_pages * KN_PAGE_ROWS, at = 0;
    uint32_t *all = malloc(total * sizeof *all), *slots = malloc((n ? n : 1) * sizeof *slots);
    assert_non_null(all);
    assert_non_null(slots);
    assert_true(n <= total);
    for (uint32_t i = 0; i < total; i++)
        all[i] = i;
    for (uint32_t i = total - 1; how == KC_SCATTERED && i > 0; i--) {
        uint32_t j = kc_below(&r, i + 1), t = all[i];
        all[i] = all[j];
        all[j] = t;
    }
    for (uint32_t i = 0; i < n; i++, at++) {
        uint32_t spare = total - at - (n - i); /* slots that may still be skipped */
        if (how == KC_PRUNED && spare > 0 && kc_below(&r, 3) == 0)
            at += 1 + kc_below(&r, KN_PAGE_ROWS < spare ? KN_PAGE_ROWS / 4 : 1);
        slots[i] = all[at];
    }
    free(all);
    return slots;
}

void kc_attention(struct kn *kn, const struct kn_batch *b, struct kc_queries q, float *out)
{
    size_t bytes = (size_t)b->n_rows * q.n_heads * b->seqs[0].kv->head_dim * sizeof *out;
    float *dq = kc_up(kn, q.q, bytes), *dout = kc_up(kn, NULL, bytes);
    kn->ops->batch_begin(kn, b);
    kn->ops->attention(kn, b, q.layer, dq, q.n_heads, q.scale, dout);
    kn->ops->batch_end(kn, b);
    kc_down(kn, out, dout, bytes);
    kc_drop(kn, dq, bytes);
}

/* ---- comparisons ---- */

void kc_near(const char *what, const float *got, const float *want, size_t n, float size, float tol)
{
    for (size_t i = 0; i < n; i++)
        if (!(fabsf(got[i] - want[i]) <= tol * size))
            fail_msg("%s: value %zu of %zu is %.9g, expected %.9g within %.3g", what, i, n,
                     (double)got[i], (double)want[i], (double)(tol * size));
}

void kc_same(const char *what, const float *got, const float *want, size_t n)
{
    if (memcmp(got, want, n * sizeof *got) == 0)
        return;
    for (size_t i = 0; i < n; i++)
        if (memcmp(got + i, want + i, sizeof *got) != 0)
            fail_msg("%s: value %zu of %zu is %a, expected %a to the bit", what, i, n,
                     (double)got[i], (double)want[i]);
}

void kc_alike(const struct kn *kn, const float *got, const float *want, size_t n, float tol)
{
    if (kc_is_device(kn))
        kc_near(kc_name(kn), got, want, n, kc_max_abs(want, n), tol);
    else
        kc_same(kc_name(kn), got, want, n);
}

float kc_max_abs(const float *x, size_t n)
{
    float m = 0.0f;
    for (size_t i = 0; i < n; i++)
        m = fmaxf(m, fabsf(x[i]));
    return m;
}
