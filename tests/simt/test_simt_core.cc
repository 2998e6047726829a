/* test_simt_core.cc: what the device side computes: collectives, tensor cores, ldmatrix, cp.async, atomics, numbers; the
 * same in every schedule. */
#include "test_simt.h"

static const enum simt::schedule schedules[] = {simt::SCHEDULE_FORWARD, simt::SCHEDULE_REVERSE,
                                                simt::SCHEDULE_RANDOM};

/* ---- warps ---- */

__global__ void shuffles(int *out, int width)
{
    int l = lane_id(), *o = out + (warp_id() * 32 + l) * 6;
    o[0] = __shfl_sync(FULL_WARP, 100 + l, 5, width);
    o[1] = __shfl_xor_sync(FULL_WARP, 100 + l, 3, width);
    o[2] = __shfl_up_sync(FULL_WARP, 100 + l, 2u, width);
    o[3] = __shfl_down_sync(FULL_WARP, 100 + l, 2u, width);
    double wide = __shfl_xor_sync(FULL_WARP, 0.5 + l, 1, width);
    o[4] = (int)(wide * 2);
    o[5] = __shfl_xor_sync(FULL_WARP, 100 + l, 16, width);
}

static void shuffles_follow_their_width(void **)
{
    for (enum simt::schedule s : schedules)
        for (int width : {32, 16, 8, 4}) {
            use_schedule(s);
            int *d = device_new<int>(64 * 6);
            LAUNCH(shuffles, dim3(1), dim3(64), 0, 0, d, width);
            std::vector<int> o = host_of(d, 64 * 6);
            for (int t = 0; t < 64; t++) {
                int l = t % 32, first = l / width * width, last = first + width - 1;
                int *r = &o[(size_t)t * 6];
                assert_int_equal(r[0], 100 + first + 5 % width);
                assert_int_equal(r[1], 100 + ((l ^ 3) <= last ? l ^ 3 : l));
                assert_int_equal(r[2], 100 + (l - 2 >= first ? l - 2 : l));
                assert_int_equal(r[3], 100 + (l + 2 <= last ? l + 2 : l));
                assert_int_equal(r[4], 1 + 2 * (l ^ 1));
                assert_int_equal(r[5], 100 + ((l ^ 16) <= last ? l ^ 16 : l));
            }
            CUDA(cudaFree(d));
        }
}

__global__ void votes(unsigned *out, unsigned long long *wide)
{
    int l = lane_id();
    unsigned *o = out + l * 12;
    o[0] = __ballot_sync(FULL_WARP, l % 3 == 0);
    o[1] = (unsigned)__any_sync(FULL_WARP, l == 31);
    o[2] = (unsigned)__all_sync(FULL_WARP, l < 31);
    o[3] = (unsigned)__all_sync(FULL_WARP, l < 32);
    o[4] = __match_any_sync(FULL_WARP, l / 5);
    o[5] = (unsigned)__reduce_add_sync(FULL_WARP, l - 10);
    o[6] = (unsigned)__reduce_max_sync(FULL_WARP, -l);
    o[7] = (unsigned)__reduce_min_sync(FULL_WARP, 7 - l);
    o[8] = __reduce_or_sync(FULL_WARP, 1u << l);
    /* two halves of a warp, each with its own mask, do not disturb one another */
    unsigned side = l < 16 ? 0x0000ffffu : 0xffff0000u;
    o[9] = __ballot_sync(side, l & 1);
    o[10] = (unsigned)__shfl_xor_sync(side, l, 1);
    __syncwarp(side);
    o[11] = (unsigned)warp_max(l * 7 % 32);
    wide[l] = (unsigned long long)warp_sum((double)l);
}

static void votes_and_reductions(void **)
{
    for (enum simt::schedule s : schedules) {
        use_schedule(s, 99);
        unsigned *d = device_new<unsigned>(32 * 12);
        unsigned long long *w = device_new<unsigned long long>(32);
        LAUNCH(votes, dim3(1), dim3(32), 0, 0, d, w);
        std::vector<unsigned> o = host_of(d, 32 * 12);
        for (unsigned l = 0; l < 32; l++) {
            unsigned *r = &o[l * 12], thirds = 0, fives = 0;
            for (unsigned i = 0; i < 32; i++) {
                thirds |= (unsigned)(i % 3 == 0) << i;
                fives |= (unsigned)(i / 5 == l / 5) << i;
            }
            assert_int_equal(r[0], thirds);
            assert_int_equal(r[1], 1);
            assert_int_equal(r[2], 0);
            assert_int_equal(r[3], 1);
            assert_int_equal(r[4], fives);
            assert_int_equal((int)r[5], 31 * 16 - 320);
            assert_int_equal((int)r[6], 0);
            assert_int_equal((int)r[7], 7 - 31);
            assert_int_equal(r[8], 0xffffffffu);
            assert_int_equal(r[9], l < 16 ? 0x0000aaaau : 0xaaaa0000u);
            assert_int_equal(r[10], l ^ 1u);
            assert_int_equal(r[11], 31);
        }
        assert_int_equal(host_of(w, 32)[17], 31 * 16);
        CUDA(cudaFree(d));
        CUDA(cudaFree(w));
    }
}

/* ---- barriers and shared memory ---- */

__global__ void scan(const int *x, int *out, int *counts, int n)
{
    DYN_SMEM(int, s); /* [2][n]: each step reads one half and writes the other */
    int t = (int)(threadIdx.x + threadIdx.y * blockDim.x), *from = s, *to = s + n;
    from[t] = x[blockIdx.x * (unsigned)n + (unsigned)t];
    for (int step = 1; step < n; step *= 2) {
        __syncthreads();
        to[t] = from[t] + (t >= step ? from[t - step] : 0);
        int *swap = from;
        from = to;
        to = swap;
    }
    out[blockIdx.x * (unsigned)n + (unsigned)t] = from[t];
    int odd = __syncthreads_count(t & 1), all = __syncthreads_and(t >= 0),
        none = __syncthreads_or(t < 0);
    counts[blockIdx.x * (unsigned)n + (unsigned)t] = odd * 10 + all * 2 + none;
}

static void barriers_order_a_block(void **)
{
    const int n = 192, blocks = 5;
    for (enum simt::schedule s : schedules) {
        use_schedule(s);
        std::vector<int> x(n * blocks);
        for (int i = 0; i < n * blocks; i++)
            x[(size_t)i] = i * 37 % 101;
        int *dx = device_of(x), *dout = device_new<int>(n * blocks),
            *dc = device_new<int>(n * blocks);
        LAUNCH(scan, dim3(blocks), dim3(64, 3), 2 * n * sizeof(int), 0, dx, dout, dc, n);
        std::vector<int> out = host_of(dout, n * blocks), counts = host_of(dc, n * blocks);
        for (int b = 0; b < blocks; b++) {
            int sum = 0;
            for (int t = 0; t < n; t++) {
                sum += x[(size_t)(b * n + t)];
                assert_int_equal(out[(size_t)(b * n + t)], sum);
                assert_int_equal(counts[(size_t)(b * n + t)], n / 2 * 10 + 2);
            }
        }
        CUDA(cudaFree(dx));
        CUDA(cudaFree(dout));
        CUDA(cudaFree(dc));
    }
}

/* ---- tensor cores, ldmatrix, cp.async ---- */

/* c (16 x 8 n) = a (16 x k) . b (8 n x k)^T, one warp; rows of k + 8 halves (or bf16) in shared memory. */
__global__ void half_product(const half_t *a, const half_t *b, float *c, int k, int n8, bool bf16)
{
    DYN_SMEM(half_t, sa);
    int ld = k + 8, l = lane_id();
    half_t *sb = sa + 16 * ld;
    for (int i = l; i < 16 * k / 8; i += 32)
        cpa16(sa + i * 8 / k * ld + i * 8 % k, a + i * 8, true);
    cpa_commit();
    for (int i = l; i < 8 * k / 8; i += 32)
        cpa16(sb + i * 8 / k * ld + i * 8 % k, b + (size_t)blockIdx.x * 8 * k + i * 8, true);
    cpa_commit();
    cpa_wait<0>();
    __syncwarp();
    float d[4] = {0, 0, 0, 0}, e[4] = {0, 0, 0, 0};
    for (int k0 = 0; k0 < k; k0 += 16) {
        uint32_t fa[4], fb[4];
        ldsm4(fa, sa + (l & 15) * ld + k0 + (l >> 4) * 8);
        ldsm2(fb, sb + (l & 7) * ld + k0 + (l >> 3 & 1) * 8);
        if (bf16) {
            mma_bf16(d, fa, fb);
            continue;
        }
        mma_f16(d, fa, fb);
        mma_f16_k8(e, fa, fb);
        mma_f16_k8(e, fa + 2, fb + 1);
    }
    int g = l >> 2, t = l & 3, col = (int)blockIdx.x * 8 + 2 * t;
    for (int i = 0; i < 4; i++) {
        size_t at = (size_t)(g + i / 2 * 8) * (n8 * 8) + (size_t)(col + i % 2);
        c[at] = bf16 || d[i] == e[i] ? d[i] : -1e30f;
    }
}

static void check_half_product(bool bf16)
{
    test_random r = {3};
    const int k = 48, n8 = 3;
    auto narrow = [bf16](float x) { return bf16 ? half_of(f2bf(x)) : f2h(x); };
    auto value = [bf16](half_t x) { return (double)(bf16 ? bf2f(half_bits(x)) : h2f(x)); };
    std::vector<half_t> a(16 * k), b(8 * n8 * k);
    for (half_t &x : a)
        x = narrow(r.unit());
    for (half_t &x : b)
        x = narrow(r.unit());
    for (enum simt::schedule s : schedules) {
        use_schedule(s);
        half_t *da = device_of(a), *db = device_of(b);
        float *dc = device_new<float>(16 * 8 * n8);
        LAUNCH(half_product, dim3(n8), dim3(32), 24 * (k + 8) * sizeof(half_t), 0, da, db, dc, k,
               n8, bf16);
        std::vector<float> c = host_of(dc, 16 * 8 * n8);
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 8 * n8; j++) {
                double sum = 0;
                for (int x = 0; x < k; x++)
                    sum += value(a[(size_t)(i * k + x)]) * value(b[(size_t)(j * k + x)]);
                assert_float_equal(c[(size_t)(i * 8 * n8 + j)], (float)sum, 1e-5f);
            }
        CUDA(cudaFree(da));
        CUDA(cudaFree(db));
        CUDA(cudaFree(dc));
    }
}

static void halves_are_multiplied(void **)
{
    check_half_product(false);
    check_half_product(true);
}

/* One 16 x 32 by 32 x 8 product of bytes. */
__global__ void byte_product(const int8_t *a, const int8_t *b, int *c)
{
    int l = lane_id(), g = l >> 2, t = l & 3;
    uint32_t fa[4], fb[2];
    for (int i = 0; i < 4; i++)
        fa[i] = *(const uint32_t *)(a + (g + i % 2 * 8) * 32 + i / 2 * 16 + 4 * t);
    for (int i = 0; i < 2; i++)
        fb[i] = *(const uint32_t *)(b + g * 32 + i * 16 + 4 * t);
    int d[4] = {1, 2, 3, 4};
    mma_s8(d, fa, fb);
    for (int i = 0; i < 4; i++)
        c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i] - (i + 1);
}

static void bytes_are_multiplied(void **)
{
    test_random r = {4};
    std::vector<int8_t> a(16 * 32), b(8 * 32);
    for (int8_t &x : a)
        x = (int8_t)r.bits();
    for (int8_t &x : b)
        x = (int8_t)r.bits();
    int8_t *da = device_of(a), *db = device_of(b);
    int *dc = device_new<int>(16 * 8);
    LAUNCH(byte_product, dim3(1), dim3(32), 0, 0, da, db, dc);
    std::vector<int> c = host_of(dc, 16 * 8);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 8; j++) {
            int sum = 0;
            for (int x = 0; x < 32; x++)
                sum += a[(size_t)(i * 32 + x)] * b[(size_t)(j * 32 + x)];
            assert_int_equal(c[(size_t)(i * 8 + j)], sum);
        }
    CUDA(cudaFree(da));
    CUDA(cudaFree(db));
    CUDA(cudaFree(dc));
}

/* Matrix m is 8 x 8 with element (row, col) = 64 m + 8 row + col. */
__global__ void matrices(uint32_t *out)
{
    DYN_SMEM(uint16_t, s);
    int l = lane_id();
    for (int i = l; i < 256; i += 32)
        s[i] = (uint16_t)i;
    __syncwarp();
    uint32_t r[4];
    ldsm4(r, s + l * 8);
    for (int m = 0; m < 4; m++)
        out[l * 12 + m] = r[m];
    ldsm4t(r, s + l * 8);
    for (int m = 0; m < 4; m++)
        out[l * 12 + 4 + m] = r[m];
    ldsm2(r, s + (l & 15) * 8);
    ldsm2t(r + 2, s + (l & 15) * 8);
    for (int m = 0; m < 4; m++)
        out[l * 12 + 8 + m] = r[m];
}

static void ldmatrix_layouts(void **)
{
    uint32_t *d = device_new<uint32_t>(32 * 12);
    LAUNCH(matrices, dim3(1), dim3(32), 512, 0, d);
    std::vector<uint32_t> o = host_of(d, 32 * 12);
    for (uint32_t l = 0; l < 32; l++)
        for (uint32_t m = 0; m < 4; m++) {
            uint32_t g = l / 4, t = l % 4;
            uint32_t plain = (64 * m + 8 * g + 2 * t) | (64 * m + 8 * g + 2 * t + 1) << 16;
            uint32_t trans = (64 * m + 16 * t + g) | (64 * m + 16 * t + 8 + g) << 16;
            assert_int_equal(o[l * 12 + m], plain);
            assert_int_equal(o[l * 12 + 4 + m], trans);
            if (m < 2) {
                assert_int_equal(o[l * 12 + 8 + m], plain);
                assert_int_equal(o[l * 12 + 10 + m], trans);
            }
        }
    CUDA(cudaFree(d));
}

/* What a thread sees of its copies: NaN until it has waited for just that group, zeros where !ok. */
__global__ void late_copies(const uint4 *src, uint32_t *out)
{
    DYN_SMEM(uint4, s);
    int t = (int)threadIdx.x;
    s[t * 3] = s[t * 3 + 1] = s[t * 3 + 2] = make_uint4(7, 7, 7, 7);
    for (int i = 0; i < 3; i++) {
        cpa16(&s[t * 3 + i], &src[i], i != 1);
        cpa_commit();
    }
    out[t * 6] = s[t * 3].x;
    cpa_wait<2>();
    out[t * 6 + 1] = s[t * 3].x;
    out[t * 6 + 2] = s[t * 3 + 1].x;
    cpa_wait<1>();
    out[t * 6 + 3] = s[t * 3 + 1].x;
    out[t * 6 + 4] = s[t * 3 + 2].x;
    cpa_wait<0>();
    out[t * 6 + 5] = s[t * 3 + 2].x;
}

static void copies_come_as_late_as_they_may(void **)
{
    uint4 *src = device_of(std::vector<uint4>{make_uint4(11, 0, 0, 0), make_uint4(12, 0, 0, 0),
                                              make_uint4(13, 0, 0, 0)});
    uint32_t *d = device_new<uint32_t>(32 * 6);
    LAUNCH(late_copies, dim3(1), dim3(32), 32 * 48, 0, src, d);
    std::vector<uint32_t> o = host_of(d, 32 * 6);
    const uint32_t want[] = {~0u, 11, ~0u, 0, ~0u, 13};
    for (size_t i = 0; i < o.size(); i++)
        assert_int_equal(o[i], want[i % 6]);
    CUDA(cudaFree(src));
    CUDA(cudaFree(d));
}

/* Copies of 4 and 8 bytes write just these. */
__global__ void small_copies(const uint32_t *src, uint32_t *out)
{
    DYN_SMEM(uint32_t, s);
    int t = (int)threadIdx.x;
    for (int i = 0; i < 4; i++)
        s[t * 4 + i] = 7;
    cpa_small<4>(&s[t * 4], &src[t]);
    cpa_small<8>(&s[t * 4 + 2], &src[32 + 2 * t]);
    cpa_commit();
    out[t * 5] = s[t * 4 + 3];
    cpa_wait<0>();
    for (int i = 0; i < 4; i++)
        out[t * 5 + 1 + i] = s[t * 4 + i];
}

static void small_copies_write_their_bytes(void **)
{
    std::vector<uint32_t> from(96);
    for (uint32_t i = 0; i < 96; i++)
        from[i] = 100 + i;
    uint32_t *src = device_of(from), *d = device_new<uint32_t>(32 * 5);
    LAUNCH(small_copies, dim3(1), dim3(32), 32 * 16, 0, src, d);
    std::vector<uint32_t> o = host_of(d, 32 * 5);
    for (uint32_t t = 0; t < 32; t++) {
        const uint32_t want[] = {~0u, 100 + t, 7, 132 + 2 * t, 133 + 2 * t};
        for (uint32_t i = 0; i < 5; i++)
            assert_int_equal(o[t * 5 + i], want[i]);
    }
    CUDA(cudaFree(src));
    CUDA(cudaFree(d));
}

/* ---- atomics ---- */

__global__ void atomics(int *i, unsigned *u, unsigned long long *u64, float *f)
{
    int t = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    atomicAdd(&i[0], t);
    atomicMax(&i[1], t * 7 % 1000);
    atomicMin(&i[2], -t);
    atomicAdd(&u[0], 1u);
    atomicOr(&u[1], 1u << t % 32);
    if (atomicCAS(&u[2], 0u, (unsigned)t + 1) == 0u)
        atomicExch(&u[3], (unsigned)t + 1);
    atomicInc(&u[4], 9u);
    atomicAdd(&u64[0], 1ull << 33);
    atomicMax(&u64[1], (unsigned long long)t << 32);
    atomicAdd(&f[0], 0.5f);
}

static void atomics_sum_up(void **)
{
    for (enum simt::schedule s : schedules) {
        use_schedule(s);
        int *i = device_of(std::vector<int>{0, 0, 0});
        unsigned *u = device_of(std::vector<unsigned>(5, 0u));
        unsigned long long *u64 = device_of(std::vector<unsigned long long>{0, 0});
        float *f = device_of(std::vector<float>{1.0f});
        LAUNCH(atomics, dim3(4), dim3(96), 0, 0, i, u, u64, f);
        const int n = 4 * 96;
        std::vector<int> hi = host_of(i, 3);
        std::vector<unsigned> hu = host_of(u, 5);
        std::vector<unsigned long long> hw = host_of(u64, 2);
        assert_int_equal(hi[0], n * (n - 1) / 2);
        assert_int_equal(hi[1], 995); /* 7 * 285 - 1000 */
        assert_int_equal(hi[2], -(n - 1));
        assert_int_equal(hu[0], n);
        assert_int_equal(hu[1], 0xffffffffu);
        assert_true(hu[2] >= 1 && hu[2] <= (unsigned)n && hu[2] == hu[3]);
        assert_int_equal(hu[4], n % 10);
        assert_true(hw[0] == (unsigned long long)n << 33);
        assert_true(hw[1] == (unsigned long long)(n - 1) << 32);
        assert_float_equal(host_of(f, 1)[0], 1.0f + 0.5f * n, 0.0f);
        CUDA(cudaFree(i));
        CUDA(cudaFree(u));
        CUDA(cudaFree(u64));
        CUDA(cudaFree(f));
    }
}

/* ---- launches ---- */

struct by_value {
    int a[40];
};
__global__ void takes_a_struct(by_value v, int *out, short narrowed)
{
    out[threadIdx.x] = v.a[threadIdx.x] + narrowed;
}
template <int A, int B> __global__ void templated(int *out)
{
    out[blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z)] =
        A * (int)blockIdx.x + B * (int)blockIdx.y;
}

static void launches_copy_their_arguments(void **)
{
    int *d = device_new<int>(40);
    by_value v = {};
    for (int i = 0; i < 40; i++)
        v.a[i] = i * i;
    LAUNCH(takes_a_struct, dim3(1), dim3(32), 0, 0, v, d, 65536 + 3);
    v.a[5] = -1; /* too late: the launch has its copy, though nothing has run yet */
    std::vector<int> o = host_of(d, 32);
    assert_int_equal(o[5], 25 + 3);
    LAUNCH((templated<3, 5>), dim3(2, 3, 4), dim3(32), 0, 0, d);
    o = host_of(d, 24);
    for (int i = 0; i < 24; i++)
        assert_int_equal(o[(size_t)i], 3 * (i % 2) + 5 * (i / 2 % 3));
    CUDA(cudaFree(d));
}

/* ---- numbers ---- */

static void halves_are_rounded_right(void **)
{
    for (uint32_t bits = 0; bits < 65536; bits++) {
        half_t h = half_of((uint16_t)bits);
        bool nan = (bits & 0x7fffu) > 0x7c00u;
        float f = h2f(h), g = simt::half_to_float((uint16_t)bits);
        assert_int_equal(__float_as_uint(f), __float_as_uint(g));
        assert_true(nan == (f != f));
        assert_int_equal(half_bits(f2h(f)) & (nan ? 0x7c00u : 0xffffu),
                         bits & (nan ? 0x7c00u : 0xffffu));
    }
    test_random r = {5};
    for (int i = 0; i < 1000000; i++) {
        float f = __uint_as_float(r.bits());
        assert_int_equal(half_bits(f2h(f)), simt::float_to_half(f));
    }
    assert_int_equal(f2bf(1.0f), 0x3f80);
    assert_int_equal(f2bf(__uint_as_float(0x3f808000)), 0x3f80); /* ties to even */
    assert_int_equal(f2bf(__uint_as_float(0x3f818000)), 0x3f82);
    assert_int_equal(f2bf(__uint_as_float(0x7f800001)), 0x7fc0);
    assert_float_equal(bf2f(0xc040), -3.0f, 0.0f);
    float2 two = unpack2(pack2(1.5f, -2.0f));
    assert_float_equal(two.x, 1.5f, 0.0f);
    assert_float_equal(two.y, -2.0f, 0.0f);
}

static void bit_functions(void **)
{
    assert_int_equal(__dp4a((int)0x01ff7f80, (int)0x02037f80, 1),
                     2 - 3 + 127 * 127 + 128 * 128 + 1);
    assert_int_equal(__dp4a(0x01ff7f80u, 0x02037f80u, 1u), 2 + 765 + 127 * 127 + 128 * 128 + 1);
    assert_int_equal(dp4a_us(0x01ff7f80u, (int)0x02ff7f80u, 1),
                     2 - 255 + 127 * 127 - 128 * 128 + 1);
    assert_int_equal(__byte_perm(0x33221100u, 0x77665544u, 0x7052u), 0x77005522u);
    assert_int_equal(__byte_perm(0x00008000u, 0, 0x9819u), 0xff0080ffu);
    assert_int_equal(__funnelshift_l(0x80000000u, 1u, 1u), 3u);
    assert_int_equal(__funnelshift_r(0x80000000u, 1u, 1u), 0xc0000000u);
    assert_int_equal(__vadd4(0x01ff807fu, 0x01018001u), 0x02000080u);
    assert_int_equal(__vsub4(0x01008010u, 0x0201ff20u), 0xffff81f0u);
    assert_int_equal(__vsubss4(0x80007f10u, 0x01018020u), 0x80ff7ff0u);
    assert_int_equal(__brev(0x00000005u), 0xa0000000u);
    assert_int_equal(__umulhi(0x80000000u, 6u), 3u);
    assert_int_equal(__clz(0), 32);
    assert_int_equal(__clz(1), 31);
    assert_int_equal(__ffs(8), 4);
    assert_int_equal(__popc(0xf0f0u), 8);
    assert_int_equal(__float2int_rn(2.5f), 2);
    assert_int_equal(__float2int_rn(-3.5f), -4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shuffles_follow_their_width),
        cmocka_unit_test(votes_and_reductions),
        cmocka_unit_test(barriers_order_a_block),
        cmocka_unit_test(halves_are_multiplied),
        cmocka_unit_test(bytes_are_multiplied),
        cmocka_unit_test(ldmatrix_layouts),
        cmocka_unit_test(copies_come_as_late_as_they_may),
        cmocka_unit_test(small_copies_write_their_bytes),
        cmocka_unit_test(atomics_sum_up),
        cmocka_unit_test(launches_copy_their_arguments),
        cmocka_unit_test(halves_are_rounded_right),
        cmocka_unit_test(bit_functions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
