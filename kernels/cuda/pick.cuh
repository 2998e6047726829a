/* pick.cuh: orders and counts within a block, for selection and sampling. Blocks of PICK_THREADS. */
#ifndef BACKCAST_PICK_CUH
#define BACKCAST_PICK_CUH
#include "backend.h"
#include "port.cuh"

#define PICK_THREADS 1024
#define PICK_WARPS (PICK_THREADS / 32)

/* Bits that compare as the floats do; both zeros are equal, NaN is above all. */
DEV uint32_t order_bits(float f)
{
    uint32_t u = __float_as_uint(f + 0.0f);
    if (f != f)
        return 0xffffffffu;
    return u >> 31 ? ~u : u | 0x80000000u;
}

/* How many threads before this one have flag set, and (in *total) how many of the block. counts: PICK_WARPS words; free to
 * be written, and afterwards again. Every thread must come. */
DEV uint32_t block_rank(bool flag, uint32_t *counts, uint32_t *total)
{
    uint32_t votes = __ballot_sync(FULL_WARP, flag), warp = (uint32_t)warp_id(), before = 0,
             all = 0;
    if (lane_id() == 0)
        counts[warp] = (uint32_t)__popc(votes);
    __syncthreads();
    for (uint32_t i = 0; i < PICK_WARPS; i++) {
        if (i == warp)
            before = all;
        all += counts[i];
    }
    __syncthreads();
    *total = all;
    return before + (uint32_t)__popc(votes & ((1u << lane_id()) - 1u));
}

/* The sum over lanes 0 .. this one. */
template <class T> DEV T warp_prefix(T v)
{
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
        T other = __shfl_up_sync(FULL_WARP, v, o);
        v += lane_id() >= o ? other : (T)0;
    }
    return v;
}
#endif
