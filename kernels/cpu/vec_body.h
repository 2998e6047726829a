/* vec_body.h: row by row operations, written once in the operations of simd_*.h.
 * vec_{scalar,avx2,avx512}.c include it after CPU_ISA and their simd header.
 *
 * An element's value never depends on where it stands: the last, incomplete vector of a run is
 * padded and takes the same path. Sums over a row have one order, given by the row's length alone.
 */
#include <math.h>
#include <string.h>
#include "kernels.h"
#include "kn_hadamard.h"
#include "kn_kv_addr.h"

#define VEC_NAME2(isa) vec_##isa
#define VEC_NAME(isa) VEC_NAME2(isa)

/* A vector of which only the first n < VF_N values exist. */
static inline vf load_some(const float *p, size_t n, float fill)
{
    float part[VF_N];
    for (size_t i = 0; i < VF_N; i++)
        part[i] = i < n ? p[i] : fill;
    return vf_load(part);
}

static inline void store_some(float *p, size_t n, vf v)
{
    float part[VF_N];
    vf_store(part, v);
    memcpy(p, part, n * sizeof *p);
}

static void put(const struct put_job *p)
{
    for (uint32_t r = 0; r < p->n_rows; r++) {
        const float *acc = p->acc + r * p->acc_stride;
        float *out = p->out + r * p->out_stride;
        for (uint32_t i = 0; i < p->n; i += VF_N) {
            uint32_t n = p->n - i; /* acc is padded, out and bias are not */
            vf t = vf_load(acc + i);
            if (p->bias)
                t = vf_add(t, n >= VF_N ? vf_load(p->bias + i) : load_some(p->bias + i, n, 0.0f));
            if (p->add)
                t = vf_add(n >= VF_N ? vf_load(out + i) : load_some(out + i, n, 0.0f), t);
            if (n >= VF_N)
                vf_store(out + i, t);
            else
                store_some(out + i, n, t);
        }
    }
}

static void rmsnorm(float *out, const float *x, const float *gain, uint32_t d, float eps)
{
    vf sum[4] = {vf_set1(0.0f), vf_set1(0.0f), vf_set1(0.0f), vf_set1(0.0f)};
    uint32_t i = 0, whole = d / VF_N * VF_N;
    for (; i < whole; i += VF_N) {
        vf v = vf_load(x + i);
        sum[i / VF_N % 4] = vf_fma(v, v, sum[i / VF_N % 4]);
    }
    if (i < d) {
        vf v = load_some(x + i, d - i, 0.0f);
        sum[0] = vf_fma(v, v, sum[0]);
    }
    float mean = vf_sum(vf_add(vf_add(sum[0], sum[1]), vf_add(sum[2], sum[3]))) / (float)d;
    vf inverse = vf_set1(1.0f / sqrtf(mean + eps));
    for (i = 0; i < whole; i += VF_N)
        vf_store(out + i, vf_mul(vf_mul(vf_load(x + i), inverse), vf_load(gain + i)));
    if (i < d)
        store_some(out + i, d - i,
                   vf_mul(vf_mul(load_some(x + i, d - i, 0.0f), inverse),
                          load_some(gain + i, d - i, 0.0f)));
}

#if VF_N > 1
/* Pairs lie side by side: x times | cos cos | cos cos | .., and its neighbour in the pair times | -sin sin | -sin sin | .. The
 * same two products and their sum as below. Returns the values that are done. */
static uint32_t rope_pairs(const struct rope_row *r, const float *cos, const float *sin, float *x)
{
    uint32_t i = 0;
    for (; i + VF_N <= r->n_rot; i += VF_N) {
        vf v = vf_load(x + i);
        vf_store(x + i, vf_add(vf_mul(v, vf_load(cos + i)), vf_mul(vf_swap(v), vf_load(sin + i))));
    }
    return i;
}

static void rope_spread(const struct rope_row *r, float *cos, float *sin)
{
    for (uint32_t i = 0; i < r->n_rot; i++) {
        cos[i] = r->cos[i / 2];
        sin[i] = i % 2 ? r->sin[i / 2] : -r->sin[i / 2];
    }
}
#endif

static void rope(const struct rope_row *r, float *x)
{
    uint32_t half = r->n_rot / 2;
#if VF_N > 1
    float cos[KN_HEAD_DIM_MAX], sin[KN_HEAD_DIM_MAX];
    if (r->style == KN_ROPE_PAIRS)
        rope_spread(r, cos, sin);
#endif
    for (uint32_t h = 0; h < r->n_heads; h++, x += r->head_dim) {
        if (r->norm)
            rmsnorm(x, x, r->norm, r->head_dim, r->norm_eps);
        if (r->style == KN_ROPE_PAIRS) {
            uint32_t done = 0;
#if VF_N > 1
            done = rope_pairs(r, cos, sin, x);
#endif
            for (uint32_t i = done / 2; i < half; i++) {
                float a = x[2 * i], b = x[2 * i + 1];
                x[2 * i] = a * r->cos[i] - b * r->sin[i];
                x[2 * i + 1] = a * r->sin[i] + b * r->cos[i];
            }
            continue;
        }
        for (uint32_t i = 0; i < half; i++) {
            float a = x[i], b = x[i + half];
            x[i] = a * r->cos[i] - b * r->sin[i];
            x[i + half] = a * r->sin[i] + b * r->cos[i];
        }
    }
}

static inline vf silu_mul(vf g, vf u)
{
    vf e = vf_exp(vf_sub(vf_set1(0.0f), g));
    return vf_mul(vf_div(g, vf_add(vf_set1(1.0f), e)), u);
}

static void swiglu(float *out, const float *gate, const float *up, size_t n)
{
    size_t i = 0;
    for (; i + VF_N <= n; i += VF_N)
        vf_store(out + i, silu_mul(vf_load(gate + i), vf_load(up + i)));
    if (i < n)
        store_some(out + i, n - i,
                   silu_mul(load_some(gate + i, n - i, 0.0f), load_some(up + i, n - i, 0.0f)));
}

static void lse_add(const struct lse_tile *t)
{
    uint32_t whole = t->n / VF_N * VF_N;
    for (uint32_t r = 0; r < t->n_rows; r++) {
        const float *x = t->x + r * t->x_stride;
        float *max = t->max + (size_t)r * CPU_LANES, *sum = t->sum + (size_t)r * CPU_LANES;
        vf was = vf_load(max), top = was, rest = was;
        for (uint32_t i = 0; i < whole; i += VF_N)
            top = vf_max(top, vf_load(x + i));
        if (whole < t->n) {
            rest = load_some(x + whole, t->n - whole, -INFINITY);
            top = vf_max(top, rest);
        }
        vf s = vf_mul(vf_load(sum), vf_exp(vf_sub(was, top)));
        for (uint32_t i = 0; i < whole; i += VF_N)
            s = vf_add(s, vf_exp(vf_sub(vf_load(x + i), top)));
        if (whole < t->n)
            s = vf_add(s, vf_exp(vf_sub(rest, top)));
        vf_store(max, top);
        vf_store(sum, s);
    }
}

static void lse_row(const float *max, const float *sum, float *ret_max, float *ret_sum)
{
    vf m = vf_load(max);
    *ret_max = vf_top(m);
    *ret_sum = vf_sum(vf_mul(vf_load(sum), vf_exp(vf_sub(m, vf_set1(*ret_max)))));
}

static void widen(float *out, const uint16_t *h, size_t n, float scale)
{
    size_t i = 0;
    for (; i + VF_N <= n; i += VF_N)
        vf_store(out + i, vf_mul(vf_load_half(h + i), vf_set1(scale)));
    for (; i < n; i++)
        out[i] = kn_f16_to_f32(h[i]) * scale;
}

static void narrow(uint16_t *out, const float *x, size_t n, float scale)
{
    size_t i = 0;
    for (; i + VF_N <= n; i += VF_N)
        vf_store_half(out + i, vf_mul(vf_load(x + i), vf_set1(scale)));
    for (; i < n; i++)
        out[i] = kn_f32_to_f16(x[i] * scale);
}

/* ---- lines of keys and values: kn_kv_addr.h
 * ----------------------------------------------------------------------------------------------- */

static void q8_get(float *out, const uint8_t *block, size_t n)
{
    for (size_t i = 0; i < n; i += KN_KV_Q8, block += KN_KV_Q8_BYTES) {
        vf scale = vf_set1_half(block);
        for (uint32_t k = 0; k < KN_KV_Q8; k += VF_N)
            vf_store(out + i + k, vf_mul(vf_load_bytes((const int8_t *)block + 2 + k), scale));
    }
}

static void line_get(enum kn_type type, float *out, const void *line, size_t n)
{
    const uint16_t *h = line;
    size_t i = 0;
    if (type == KN_F32) {
        memcpy(out, line, n * sizeof *out);
    } else if (type == KN_F16) {
        widen(out, h, n, 1.0f);
    } else if (type == KN_Q8_0) {
        q8_get(out, line, n);
    } else {
        for (; i + VF_N <= n; i += VF_N)
            vf_store(out + i, vf_load_bf16(h + i));
        for (; i < n; i++)
            out[i] = kn_bf16_to_f32(h[i]);
    }
}

/* The bytes of kn_kv_q8_put. */
static void q8_put(uint8_t *block, const float *x, size_t n)
{
    vf most = vf_set1(127.0f), least = vf_set1(-127.0f);
    for (size_t i = 0; i < n; i += KN_KV_Q8, x += KN_KV_Q8, block += KN_KV_Q8_BYTES) {
        vf top = vf_set1(0.0f);
        for (uint32_t k = 0; k < KN_KV_Q8; k += VF_N)
            top = vf_max(top, vf_abs(vf_load(x + k)));
        uint16_t scale = kn_kv_q8_scale(vf_top(top));
        vf inverse = vf_set1(kn_kv_q8_inverse(scale));
        memcpy(block, &scale, sizeof scale);
        for (uint32_t k = 0; k < KN_KV_Q8; k += VF_N) {
            vf q = vf_round(vf_mul(vf_load(x + k), inverse));
            vf_store_bytes((int8_t *)block + 2 + k, vf_max(vf_min(q, most), least));
        }
    }
}

/* The bytes of kn_kv_q4_put. */
static void q4_put(uint8_t *block, const float *x, size_t n)
{
    vf zero = vf_set1(0.0f), eight = vf_set1(8.0f), top = vf_set1(15.0f);
    for (size_t i = 0; i < n; i += KN_KV_Q8, x += KN_KV_Q8, block += KN_KV_Q4_BYTES) {
        int8_t code[KN_KV_Q8];
        vf most = zero, least_neg = zero;
        for (uint32_t k = 0; k < KN_KV_Q8; k += VF_N) {
            most = vf_max(most, vf_load(x + k));
            least_neg = vf_max(least_neg, vf_sub(zero, vf_load(x + k)));
        }
        uint16_t scale = kn_kv_q4_scale(-vf_top(least_neg), vf_top(most));
        vf inverse = vf_set1(kn_kv_q8_inverse(scale));
        memcpy(block, &scale, sizeof scale);
        for (uint32_t k = 0; k < KN_KV_Q8; k += VF_N) {
            vf q = vf_add(vf_round(vf_mul(vf_load(x + k), inverse)), eight);
            vf_store_bytes(code + k, vf_min(vf_max(q, zero), top));
        }
        for (uint32_t k = 0; k < KN_KV_Q8 / 2; k++)
            block[2 + k] = (uint8_t)(code[k] | code[k + KN_KV_Q8 / 2] << 4);
    }
}

static void line_put(enum kn_type type, void *line, const float *x, size_t n)
{
    uint16_t *h = line;
    size_t i = 0;
    if (type == KN_F32) {
        memcpy(line, x, n * sizeof *x);
    } else if (type == KN_F16) {
        narrow(line, x, n, 1.0f);
    } else if (type == KN_Q8_0) {
        q8_put(line, x, n);
    } else if (type == KN_Q4_0) {
        q4_put(line, x, n);
    } else {
        for (; i + VF_N <= n; i += VF_N)
            vf_store_bf16(h + i, vf_load(x + i));
        for (; i < n; i++)
            h[i] = kn_f32_to_bf16(x[i]);
    }
}

static void hadamard_on(float *x, uint32_t n)
{
    kn_hadamard_on(x, n);
}

static void hadamard_off(float *x, uint32_t n)
{
    kn_hadamard_off(x, n);
}

static float max_abs(const float *x, size_t n)
{
    vf top = vf_set1(0.0f);
    for (size_t i = 0; i < n; i += VF_N)
        top = vf_max(top, vf_abs(i + VF_N <= n ? vf_load(x + i) : load_some(x + i, n - i, 0.0f)));
    return vf_top(top);
}

const struct vec_kernels VEC_NAME(CPU_ISA) = {put,         rmsnorm,      rope,   swiglu,   lse_add,
                                              lse_row,     widen,        narrow, line_get, line_put,
                                              hadamard_on, hadamard_off, max_abs};
