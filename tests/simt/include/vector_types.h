/* vector_types.h: CUDA's small vectors, with CUDA's alignments (a misaligned one is a bug that the shim reports). */
#pragma once

#define SIMT_VECTOR2(T, name)                                                                      \
    struct alignas(2 * sizeof(T)) name {                                                           \
        T x, y;                                                                                    \
    };                                                                                             \
    static inline name make_##name(T x, T y)                                                       \
    {                                                                                              \
        return name{x, y};                                                                         \
    }
#define SIMT_VECTOR4(T, name)                                                                      \
    struct alignas(4 * sizeof(T)) name {                                                           \
        T x, y, z, w;                                                                              \
    };                                                                                             \
    static inline name make_##name(T x, T y, T z, T w)                                             \
    {                                                                                              \
        return name{x, y, z, w};                                                                   \
    }

SIMT_VECTOR2(signed char, char2)
SIMT_VECTOR4(signed char, char4)
SIMT_VECTOR2(unsigned char, uchar2)
SIMT_VECTOR4(unsigned char, uchar4)
SIMT_VECTOR2(short, short2)
SIMT_VECTOR4(short, short4)
SIMT_VECTOR2(unsigned short, ushort2)
SIMT_VECTOR4(unsigned short, ushort4)
SIMT_VECTOR2(int, int2)
SIMT_VECTOR4(int, int4)
SIMT_VECTOR2(unsigned, uint2)
SIMT_VECTOR4(unsigned, uint4)
SIMT_VECTOR2(float, float2)
SIMT_VECTOR4(float, float4)
SIMT_VECTOR2(double, double2)
SIMT_VECTOR2(unsigned long long, ulonglong2)

#undef SIMT_VECTOR4
#undef SIMT_VECTOR2

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
