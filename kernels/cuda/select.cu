/* select.cu: the rows of a cache that stay: exactly select_keep of the eviction code.
 *
 * One block. Values become bits that compare as they do. The n_chosen-th lowest of the unprotected ones is found a byte at a
 * time from the top (a histogram of those that share the bytes found so far); then the rows are gone through in cache order,
 * 1024 at a time: lower ones stay, of equal ones the first that still fit, protected ones always, and ranks within the block
 * give each its place. */
#include "pick.cuh"

struct select_args {
    const float *value;
    uint32_t n, frozen, recent,
        chosen; /* chosen: unprotected rows that stay, fewer than there are */
    uint32_t *keep;
};

/* The bin that holds the left-th of all counted (there are as many), to found[0]; how many of it are wanted, to found[1].
 * One warp; a lane has eight bins. */
DEV void bin_find(const uint32_t *hist, uint32_t left, uint32_t *found)
{
    uint32_t lane = (uint32_t)lane_id(), sum = 0;
    for (uint32_t i = 0; i < 8; i++)
        sum += hist[lane * 8 + i];
    uint32_t before = warp_prefix(sum) - sum;
    if (left <= before || left > before + sum)
        return;
    left -= before;
    uint32_t bin = lane * 8;
    while (left > hist[bin])
        left -= hist[bin++];
    found[0] = bin;
    found[1] = left;
}

/* The bits of the chosen-th lowest value, and in *equal how many of those equal to it stay. */
DEV uint32_t threshold_find(const struct select_args &a, uint32_t *hist, uint32_t *equal)
{
    uint32_t prefix = 0, left = a.chosen, *found = hist + 256;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (uint32_t i = threadIdx.x; i < 256; i += PICK_THREADS)
            hist[i] = 0;
        __syncthreads();
        for (uint32_t i = a.frozen + threadIdx.x; i < a.n - a.recent; i += PICK_THREADS) {
            uint32_t bits = order_bits(a.value[i]);
            if (shift == 24 || (bits ^ prefix) >> (shift + 8) == 0)
                atomicAdd(&hist[bits >> shift & 255u], 1u);
        }
        __syncthreads();
        if (warp_id() == 0)
            bin_find(hist, left, found);
        __syncthreads();
        prefix |= found[0] << shift;
        left = found[1];
        __syncthreads();
    }
    *equal = left;
    return prefix;
}

__global__ void __launch_bounds__(PICK_THREADS) select_rows(struct select_args a)
{
    DYN_SMEM(uint32_t, shared); /* a histogram of 256 and two results, or PICK_WARPS counts */
    uint32_t equal = 0, threshold = 0, seen = 0, kept = 0, n;
    if (a.chosen > 0)
        threshold = threshold_find(a, shared, &equal);
    for (uint32_t start = 0; start < a.n; start += PICK_THREADS) {
        uint32_t i = start + threadIdx.x;
        bool real = i < a.n, safe = real && (i < a.frozen || i >= a.n - a.recent);
        uint32_t bits = real && !safe && a.chosen > 0 ? order_bits(a.value[i]) : 0xffffffffu;
        bool open = real && !safe && a.chosen > 0;
        bool is_equal = open && bits == threshold;
        uint32_t rank = seen + block_rank(is_equal, shared, &n);
        seen += n;
        bool stays = safe || (open && bits < threshold) || (is_equal && rank < equal);
        uint32_t place = kept + block_rank(stays, shared, &n);
        kept += n;
        if (stays)
            a.keep[place] = i;
    }
}

const void *select_kernel(void)
{
    return (const void *)select_rows;
}

uint32_t cuda_select_keep(struct kn *kn, const float *value, const struct kn_select *s,
                          uint32_t *ret_keep)
{
    struct cuda *c = cuda_of(kn);
    capture_flush(c);
    if (s->n <= s->keep) {
        for (uint32_t i = 0; i < s->n; i++)
            ret_keep[i] = i;
        return s->n;
    }
    kn_assert((uint64_t)s->frozen + s->recent <= s->keep);
    kn_assert(s->keep * sizeof(uint32_t) <= c->scratch.x_bytes);
    struct select_args a = {value,
                            s->n,
                            s->frozen,
                            s->recent,
                            s->keep - s->frozen - s->recent,
                            (uint32_t *)c->scratch.x};
    KERNEL(c, select_rows, dim3(1), dim3(PICK_THREADS), 258 * sizeof(uint32_t), a);
    fetch(c, ret_keep, a.keep, s->keep * sizeof(uint32_t));
    return s->keep;
}
