/* quant.cuh: quantised matrices on the device: planes, and how a kernel reads a block of 32 values.
 *
 * A GGUF block mixes scales and codes at odd addresses. Here every part has a plane of its own, row by row, so that
 * neighbouring lanes read neighbouring 16 bytes:
 *
 *      a      codes' lower bits: 2, 4 or 8 of them.  4 bits: 16 bytes a block; 2 bits: 8; 8 bits: two planes of 16
 *      b      codes' upper bits: none, 1 (4 bytes a block) or 2 (8 bytes)
 *      s      scales of a block: half d [, half m], or (super) two bytes: see scales()
 *      super  half d, half dmin of 256 values
 *
 * Rows of a: kb blocks; of b and s: kbp = kb padded to 4 with zeros (whole 16 bytes of upper bits for a tensor core tile).
 *
 * The order of codes inside a block follows the tensor core (m16n8k32: lane t of a quad holds k = 4t..4t+3 and
 * 4t+16..4t+19). A "quad" q = 2t + h is the four codes 16h + 4t .. 16h + 4t + 3, a byte each; planes with b bits pack
 * 8 / b quads in a word, shifted by b:
 *
 *      4 bits: word t = quad (t,0) | quad (t,1) << 4          2 bits: word t/2, shifts 0,2,4,6 for (t even: h 0,1; odd: 0,1)
 *      1 bit:  quad q at shift q                              8 bits: plane h, word t
 *
 * Codes are unsigned except for 8 bits and the tables, which are signed bytes; value = D * (code - ZERO) + M. */
#ifndef BACKCAST_QUANT_CUH
#define BACKCAST_QUANT_CUH
#include "backend.h"
#include "port.cuh"

template <int A, int B, int ZERO_, int N_SUB_, bool MIN_, bool TABLE_, bool SUPER_>
struct layout_of {
    static constexpr int A_BITS = A, B_BITS = B, ZERO = ZERO_, N_SUB = N_SUB_;
    static constexpr bool MIN = MIN_, TABLE = TABLE_, SUPER = SUPER_;
    static constexpr int S_BYTES = SUPER_ || MIN_ ? 4 - 2 * SUPER_ : 2; /* of a block in plane s */
    static constexpr int A_BYTES = A == 8 ? 16 : 4 * A;                 /* in (each) plane a */
    static constexpr int A_PLANES = A == 8 ? 2 : 1;
};
template <int TYPE> struct quant; /*      bits    zero sub  min    table  super */
template <> struct quant<KN_Q8_0> : layout_of<8, 0, 0, 1, false, false, false> {
};
template <> struct quant<KN_Q4_0> : layout_of<4, 0, 8, 1, false, false, false> {
};
template <> struct quant<KN_Q4_1> : layout_of<4, 0, 0, 1, true, false, false> {
};
template <> struct quant<KN_Q5_0> : layout_of<4, 1, 16, 1, false, false, false> {
};
template <> struct quant<KN_Q5_1> : layout_of<4, 1, 0, 1, true, false, false> {
};
template <> struct quant<KN_IQ4_NL> : layout_of<4, 0, 0, 1, false, true, false> {
};
template <> struct quant<KN_IQ4_XS> : layout_of<4, 0, 0, 1, false, true, true> {
};
template <> struct quant<KN_Q4_K> : layout_of<4, 0, 0, 1, true, false, true> {
};
template <> struct quant<KN_Q5_K> : layout_of<4, 1, 0, 1, true, false, true> {
};
template <> struct quant<KN_Q2_K> : layout_of<2, 0, 0, 2, true, false, true> {
};
template <> struct quant<KN_Q3_K> : layout_of<2, 1, 4, 2, false, false, true> {
};
template <> struct quant<KN_Q6_K> : layout_of<4, 2, 32, 2, false, false, true> {
};

/* Calls f(quant<type>()) for a quantised type: a switch over types becomes one over templates. */
#define QUANT_SWITCH(type, F)                                                                      \
    switch (type) {                                                                                \
    case KN_Q8_0:                                                                                  \
        F(KN_Q8_0);                                                                                \
        break;                                                                                     \
    case KN_Q4_0:                                                                                  \
        F(KN_Q4_0);                                                                                \
        break;                                                                                     \
    case KN_Q4_1:                                                                                  \
        F(KN_Q4_1);                                                                                \
        break;                                                                                     \
    case KN_Q5_0:                                                                                  \
        F(KN_Q5_0);                                                                                \
        break;                                                                                     \
    case KN_Q5_1:                                                                                  \
        F(KN_Q5_1);                                                                                \
        break;                                                                                     \
    case KN_IQ4_NL:                                                                                \
        F(KN_IQ4_NL);                                                                              \
        break;                                                                                     \
    case KN_IQ4_XS:                                                                                \
        F(KN_IQ4_XS);                                                                              \
        break;                                                                                     \
    case KN_Q4_K:                                                                                  \
        F(KN_Q4_K);                                                                                \
        break;                                                                                     \
    case KN_Q5_K:                                                                                  \
        F(KN_Q5_K);                                                                                \
        break;                                                                                     \
    case KN_Q2_K:                                                                                  \
        F(KN_Q2_K);                                                                                \
        break;                                                                                     \
    case KN_Q3_K:                                                                                  \
        F(KN_Q3_K);                                                                                \
        break;                                                                                     \
    case KN_Q6_K:                                                                                  \
        F(KN_Q6_K);                                                                                \
        break;                                                                                     \
    default:                                                                                       \
        break;                                                                                     \
    }

/* A block's words as they lie in the planes. */
template <class Q> struct block_words {
    uint32_t a[Q::A_BITS], b[Q::B_BITS ? Q::B_BITS : 1];
};

DEV size_t block_index(const struct packed &p, uint32_t row, uint32_t blk)
{
    return (size_t)row * p.kb + blk;
}
DEV size_t padded_index(const struct packed &p, uint32_t row, uint32_t blk)
{
    return (size_t)row * p.kbp + blk;
}

/* One row's part of each plane: what a loop over its blocks keeps. upper: from plane a to the second one of 8 bits. */
struct packed_row {
    const uint8_t *a, *b, *s;
    const uint32_t *super;
    size_t upper;
};

template <class Q> DEV packed_row row_of(const struct packed &p, uint32_t row)
{
    packed_row r;
    r.a = p.a + block_index(p, row, 0) * Q::A_BYTES;
    r.b = p.b + padded_index(p, row, 0) * (4 * Q::B_BITS);
    r.s = p.s + padded_index(p, row, 0) * Q::S_BYTES;
    r.super = p.super + (size_t)row * (Q::SUPER ? p.kb / 8 : 0);
    r.upper = (size_t)p.rows * p.kb * 16;
    return r;
}

template <class Q> DEV void block_load(const packed_row &row, uint32_t blk, block_words<Q> *ret)
{
    if (Q::A_BITS == 2) {
        uint2 v = *(const uint2 *)(row.a + (size_t)blk * 8);
        ret->a[0] = v.x;
        ret->a[1] = v.y;
    } else {
#pragma unroll
        for (int h = 0; h < Q::A_PLANES; h++) {
            uint4 v = ld_stream16(row.a + (h ? row.upper : 0) + (size_t)blk * 16);
            ret->a[4 * h % Q::A_BITS] = v.x;
            ret->a[(4 * h + 1) % Q::A_BITS] = v.y;
            ret->a[(4 * h + 2) % Q::A_BITS] = v.z;
            ret->a[(4 * h + 3) % Q::A_BITS] = v.w;
        }
    }
    if (Q::B_BITS == 1)
        ret->b[0] = *(const uint32_t *)(row.b + (size_t)blk * 4);
    if (Q::B_BITS == 2) {
        uint2 v = *(const uint2 *)(row.b + (size_t)blk * 8);
        ret->b[0] = v.x;
        ret->b[Q::B_BITS == 2 ? 1 : 0] = v.y;
    }
}

template <class Q>
DEV void block_load(const struct packed &p, uint32_t row, uint32_t blk, block_words<Q> *ret)
{
    block_load<Q>(row_of<Q>(p, row), blk, ret);
}

/* Four indices 0..15, a byte each, to the table's signed bytes. Values -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69
 * 89 113, lowest index in the lowest byte. */
DEV uint32_t table_lookup(uint32_t idx)
{
    uint32_t x = (idx | idx >> 4) & 0x00ff00ffu, pick = (x | x >> 8) & 0xffffu; /* a nibble each */
    uint32_t low = __byte_perm(0xbfad9881u, 0xf6eaddcfu, pick & 0x7777u);
    uint32_t high = __byte_perm(0x26190d01u, 0x71594535u, pick & 0x7777u);
    uint32_t upper = (idx >> 3 & 0x01010101u) * 0xffu;
    return (high & upper) | (low & ~upper);
}

/* Quad (t, h) of words wa (the one of plane a that holds it) and wb. */
template <class Q> DEV uint32_t quad_of(uint32_t wa, uint32_t wb, int t, int h)
{
    uint32_t v = wa;
    if (Q::A_BITS == 4)
        v = wa >> 4 * h & 0x0f0f0f0fu;
    if (Q::A_BITS == 2)
        v = wa >> (4 * (t & 1) + 2 * h) & 0x03030303u;
    if (Q::B_BITS == 1)
        v |= (wb >> (2 * t + h) & 0x01010101u) << Q::A_BITS;
    if (Q::B_BITS == 2)
        v |= (wb >> (4 * (t & 1) + 2 * h) & 0x03030303u) << Q::A_BITS;
    return Q::TABLE ? table_lookup(v) : v;
}
/* Which words: of plane a (counting the second plane of 8 bits on), of plane b. */
template <class Q> DEV int quad_word_a(int t, int h)
{
    return Q::A_BITS == 8 ? 4 * h + t : Q::A_BITS == 4 ? t : t >> 1;
}
template <class Q> DEV int quad_word_b(int t)
{
    return Q::B_BITS == 2 ? t >> 1 : 0;
}
template <class Q> DEV uint32_t quad_in(const block_words<Q> &w, int t, int h)
{
    return quad_of<Q>(w.a[quad_word_a<Q>(t, h)], w.b[quad_word_b<Q>(t)], t, h);
}

/* D and M of a block; exact (kn_int8.h). s: the block's bytes of plane s; super: its super-block's word. */
template <class Q> DEV void scales_of(uint32_t s, uint32_t super, float *d, float *m)
{
    m[0] = m[1] = 0.0f;
    if (!Q::SUPER) {
        float2 v = unpack2(s);
        d[0] = d[1] = v.x;
        if (Q::MIN)
            m[0] = m[1] = v.y;
        return;
    }
    float2 v = unpack2(super);
    if (Q::N_SUB == 1 && Q::MIN) { /* bytes: scale, min */
        d[0] = d[1] = v.x * (float)(s & 255u);
        m[0] = m[1] = -(v.y * (float)(s >> 8 & 255u));
    } else if (Q::MIN) { /* a byte a half: scale | min << 4 */
        d[0] = v.x * (float)(s & 15u);
        d[1] = v.x * (float)(s >> 8 & 15u);
        m[0] = -(v.y * (float)(s >> 4 & 15u));
        m[1] = -(v.y * (float)(s >> 12 & 15u));
    } else { /* signed bytes: the scales of the halves */
        d[0] = v.x * (float)(int8_t)(s & 255u);
        d[1] = v.x * (float)(int8_t)(s >> 8 & 255u);
    }
}

template <class Q>
DEV void scales_words(const packed_row &row, uint32_t blk, uint32_t *s, uint32_t *super)
{
    *s = Q::S_BYTES == 4 ? *(const uint32_t *)(row.s + (size_t)blk * 4)
                         : *(const uint16_t *)(row.s + (size_t)blk * 2);
    *super = Q::SUPER ? row.super[blk / 8] : 0;
}

template <class Q>
DEV void scales_load(const struct packed &p, uint32_t row, uint32_t blk, float *d, float *m)
{
    uint32_t s, super;
    scales_words<Q>(row_of<Q>(p, row), blk, &s, &super);
    scales_of<Q>(s, super, d, m);
}

/* A byte of a quad, minus the zero point, as a float: the byte becomes the lowest of 2^23's mantissa. Exact, and cheaper
 * than a conversion, of which a multiprocessor makes 16 a clock. */
template <class Q> DEV float code_value(uint32_t quad, int i)
{
    constexpr bool SIGNED = Q::TABLE || Q::A_BITS == 8;
    uint32_t bits = __byte_perm(SIGNED ? quad ^ 0x80808080u : quad, 0x4b000000u, 0x7650u + i);
    return __fadd_rn(__uint_as_float(bits), -(8388608.0f + (SIGNED ? 128 : Q::ZERO)));
}

/* The four values of quad (t, h), exactly as kn_dequant has them: a product, then a sum. */
template <class Q> DEV float4 values_of(uint32_t quad, float d, float m)
{
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[i] = __fmul_rn(d, code_value<Q>(quad, i));
        if (Q::MIN)
            v[i] = __fadd_rn(v[i], m);
    }
    return make_float4(v[0], v[1], v[2], v[3]);
}
#endif
