/* kn_hadamard.h: the turn of a value's dims that goes before storing it in 4 bits, for backends whose device memory is
 * ordinary memory.
 *
 *   on(x)  = H S x          S: fixed signs; H: Hadamard's matrix over sqrt(n), for each n neighbours, n the largest power
 *   off(x) = S H x          of two that divides the length (64: 64; 96: three of 32; 128: 128). H H = S S = 1
 *
 * Four bits share one scale among 32 dims, so one dim much larger than the others takes all the levels. Turned, every dim is
 * a sum of n with signs, nearly Gaussian whatever the dims were, and the error is spread evenly. The signs keep a vector that
 * looks like one of H's rows (equal dims do) from becoming a single large dim.
 *
 * A weighted sum of turned values is the turned sum, so attention turns back its result, not the values. Sums and
 * differences are made in one fixed order and nothing is fused: every backend has the same bits. */
#ifndef BACKCAST_KN_HADAMARD_H
#define BACKCAST_KN_HADAMARD_H
#include <math.h>
#include <stdint.h>

static inline void kn_hadamard_sign(float *x, uint32_t n)
{
    static const uint32_t bits[8] = {0x9e3779b9, 0x243f6a88, 0xb7e15162, 0x85a308d3,
                                     0x8aed2a6a, 0x13198a2e, 0xbf715880, 0x03707344};
    for (uint32_t i = 0; i < n; i++) {
        union {
            float f;
            uint32_t u;
        } v = {x[i]};
        v.u ^= bits[i / 32 % 8] >> i % 32 << 31;
        x[i] = v.f;
    }
}

static inline void kn_hadamard(float *x, uint32_t len)
{
    uint32_t n = len & -len;
    float norm = 1.0f / sqrtf((float)n);
    for (uint32_t s = 1; s < n; s *= 2)
        for (uint32_t i = 0; i < len; i += 2 * s)
            for (uint32_t k = i; k < i + s; k++) {
                float a = x[k], b = x[k + s];
                x[k] = a + b;
                x[k + s] = a - b;
            }
    for (uint32_t i = 0; i < len; i++)
        x[i] *= norm;
}

static inline void kn_hadamard_on(float *x, uint32_t len)
{
    kn_hadamard_sign(x, len);
    kn_hadamard(x, len);
}

static inline void kn_hadamard_off(float *x, uint32_t len)
{
    kn_hadamard(x, len);
    kn_hadamard_sign(x, len);
}
#endif
