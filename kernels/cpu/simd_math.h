/* simd_math.h: exp over vf, the same steps in every instruction set. Included by simd_*.h.
 *
 *   n = round(x / ln 2), r = x - n ln 2 (|r| <= 0.35), exp(x) = 2^n (1 + r + r^2 q(r))
 *
 * q: degree 4, fitted for least relative error (3e-9). In all below 1.5 ulp; results
 * below the smallest normal float lose precision gracefully, exp(-inf) is 0, large x give inf, NaN
 * stays NaN. */
#ifndef BACKCAST_SIMD_MATH_H
#define BACKCAST_SIMD_MATH_H

static inline vf vf_exp(vf x)
{
    x = vf_max(vf_set1(-105.0f), vf_min(vf_set1(89.0f), x));
    vf n = vf_round(vf_mul(x, vf_set1(0x1.715476p+0f)));
    vf r = vf_fma(n, vf_set1(-0x1.62e400p-1f), x);
    r = vf_fma(n, vf_set1(-0x1.7f7d1cp-20f), r);
    vf q = vf_set1(0x1.6a2434p-10f);
    q = vf_fma(q, r, vf_set1(0x1.1239e2p-7f));
    q = vf_fma(q, r, vf_set1(0x1.5558f2p-5f));
    q = vf_fma(q, r, vf_set1(0x1.555492p-3f));
    q = vf_fma(q, r, vf_set1(0x1.fffffcp-2f));
    q = vf_fma(vf_mul(q, r), r, r);
    return vf_scale2(vf_add(q, vf_set1(1.0f)), n);
}
#endif
