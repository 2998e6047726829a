/* sample.cu: a token for each row of logits, on the device; four bytes a row leave it.
 *
 * One block a row, as the engine's sampler has it (daemon/engine/sampler.c), but without an order of the vocabulary:
 *
 *      v       NaN counts as -inf; penalties once for each recent token; (max, lowest id) is the greedy pick
 *      w       exp((v - max) / temperature); candidates have w > 0 and w >= min_p
 *      cut     ordered by v descending, id ascending, a candidate stays while fewer than top_k stand before it and their
 *              weights are less than top_p of all. The last one that stays is found a byte of its bits at a time
 *      draw    the first candidate, in that order (without a cut: by id), up to which the weights are more than u times those
 *              of all that stay; u is the sampler's, a hash of (seed, stream). Where it lies is found as the cut was
 *
 * So a token depends on its row, seed and stream alone, and is the sampler's own unless u falls on a rounding: weights are whole
 * numbers here (in units of 2^-40, so the order of adding does not matter), made of single precision.
 *
 * One block has one multiprocessor's way to memory: eight loads of a thread are under way before the first is used. */
#include "pick.cuh"
#include <float.h>

struct row_how {
    float temperature, top_p, min_p, penalty;
    uint32_t top_k, n_recent, recent_at; /* into the list of all rows' recent tokens */
    uint32_t seed[2], stream[2];
};

struct sample_args {
    const float *logits; /* [rows][n] */
    float *v;            /* the same, ours */
    const struct row_how *how;
    const int32_t *recent;
    int32_t *ret;
    uint32_t n;
};

typedef unsigned long long u64;

/* Shared memory of a block. */
struct sample_smem {
    u64 best[PICK_WARPS];
    uint32_t mass[2][256]; /* lower words, upper words */
    uint32_t count[256];
    uint32_t ranks[PICK_WARPS];
    u64 enough, mass_before, all; /* of walk_find */
    uint32_t count_before, bin;
    uint32_t id;
};
#define NO_BIN 256u

/* ---- chance ---- */

DEV u64 mix(u64 x)
{
    x ^= x >> 32;
    x *= 0xe9846af9b1a615dull;
    x ^= x >> 32;
    x *= 0xe9846af9b1a615dull;
    x ^= x >> 28;
    return x;
}

/* u * mass, less than mass; u is sampler_uniform of (seed, stream). */
DEV u64 part_of(const struct row_how &how, u64 mass)
{
    u64 seed = (u64)how.seed[1] << 32 | how.seed[0],
        stream = (u64)how.stream[1] << 32 | how.stream[0];
    u64 h = mix(mix(seed + 0x9e3779b97f4a7c15ull) ^ (stream * 0xd1342543de82ef95ull + 1));
    u64 part = (u64)((double)(h >> 11) * 0x1p-53 * (double)mass);
    return part < mass ? part : mass - 1;
}

/* ---- reductions ---- */

DEV u64 best_of(float score, uint32_t id) /* the larger score, then the lower id */
{
    return (u64)order_bits(score) << 32 | (0xffffffffu - id);
}
DEV uint32_t best_id(u64 best)
{
    return 0xffffffffu - (uint32_t)best;
}

DEV u64 block_best(u64 best, u64 *part)
{
    best = warp_max(best);
    __syncthreads();
    if (lane_id() == 0)
        part[warp_id()] = best;
    __syncthreads();
    for (int i = 0; i < PICK_WARPS; i++)
        best = part[i] > best ? part[i] : best;
    return best;
}

/* ---- the steps ---- */

#define AHEAD 8

/* This thread's values i, i + PICK_THREADS ... of a row; those behind the end are NaN. */
DEV void values_load(const float *row, uint32_t n, uint32_t i, float *ret)
{
#pragma unroll
    for (uint32_t k = 0; k < AHEAD; k++)
        ret[k] = i + k * PICK_THREADS < n ? row[i + k * PICK_THREADS] : NAN;
}

DEV float clean(float x)
{
    return x == x ? x : -INFINITY;
}

DEV u64 row_best(const float *row, uint32_t n)
{
    u64 best = 0;
    for (uint32_t i = threadIdx.x; i < n; i += AHEAD * PICK_THREADS) {
        float x[AHEAD];
        values_load(row, n, i, x);
#pragma unroll
        for (uint32_t k = 0; k < AHEAD; k++) {
            u64 b = i + k * PICK_THREADS < n ? best_of(clean(x[k]), i + k * PICK_THREADS) : 0;
            best = b > best ? b : best;
        }
    }
    return best;
}

/* Fills v and returns the largest. */
DEV u64 row_prepare(const struct sample_args &a, const struct row_how &how, const float *logits,
                    float *v, struct sample_smem *sh)
{
    for (uint32_t i = threadIdx.x; i < a.n; i += AHEAD * PICK_THREADS) {
        float x[AHEAD];
        values_load(logits, a.n, i, x);
#pragma unroll
        for (uint32_t k = 0; k < AHEAD; k++)
            if (i + k * PICK_THREADS < a.n)
                v[i + k * PICK_THREADS] = clean(x[k]);
    }
    __syncthreads();
    if (how.penalty != 1.0f)
        for (uint32_t i = threadIdx.x; i < how.n_recent; i += PICK_THREADS) {
            uint32_t id = (uint32_t)a.recent[how.recent_at + i];
            float l = clean(logits[id]);
            /* from the logit as it was: said twice, penalised once */
            atomicExch(&v[id], l > 0.0f ? l / how.penalty : l * how.penalty);
        }
    __syncthreads();
    return block_best(row_best(v, a.n), sh->best);
}

struct weights {
    float max, inverse_t, min_p;
};

/* The weight of a value in units of 2^-40; 0: no candidate. */
DEV u64 mass_of(const struct weights &w, float v)
{
    float x = expf((v - w.max) * w.inverse_t);
    return x >= w.min_p ? (u64)(x * 0x1p40f) : 0;
}

/* Counts and masses of the candidates' next byte, among those whose upper bytes are `prefix`'s. Words of 32 bits are added,
 * and what the lower one carries: shared memory has no addition of 64, and would be asked again and again where many values
 * share a byte. */
DEV void histogram(const struct weights &w, const float *v, uint32_t n, uint32_t prefix, int shift,
                   struct sample_smem *sh)
{
    for (uint32_t i = threadIdx.x; i < 256; i += PICK_THREADS)
        sh->count[i] = sh->mass[0][i] = sh->mass[1][i] = 0;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < n; i += AHEAD * PICK_THREADS) {
        float x[AHEAD];
        values_load(v, n, i, x);
#pragma unroll
        for (uint32_t k = 0; k < AHEAD; k++) {
            uint32_t bits = order_bits(x[k]), bin = bits >> shift & 255u;
            if (i + k * PICK_THREADS >= n || (shift < 24 && (bits ^ prefix) >> (shift + 8) != 0))
                continue;
            u64 m = mass_of(w, x[k]);
            if (m == 0)
                continue;
            uint32_t low = (uint32_t)m, high = (uint32_t)(m >> 32);
            atomicAdd(&sh->count[bin], 1u);
            high += atomicAdd(&sh->mass[0][bin], low) + low < low;
            if (high > 0)
                atomicAdd(&sh->mass[1][bin], high);
        }
    }
    __syncthreads();
}

DEV u64 mass_in(const struct sample_smem *sh, int bin)
{
    return (u64)sh->mass[1][bin] << 32 | sh->mass[0][bin];
}

/* Walks the bins from the top: which is the first after which there are `most` candidates or `enough` mass? Its number (or
 * NO_BIN) to sh->bin, counts and mass of the bins above it added to sh's. One warp; a lane has eight bins. top_p >= 0: `enough`
 * is that part of all mass. */
DEV void walk_find(struct sample_smem *sh, uint32_t most, float top_p)
{
    int lane = lane_id(), first = 255 - 8 * lane; /* and downwards */
    uint32_t count = 0;
    u64 mass = 0;
    for (int i = 0; i < 8; i++) {
        count += sh->count[first - i];
        mass += mass_in(sh, first - i);
    }
    uint32_t count_to = warp_prefix(count);
    u64 mass_to = warp_prefix(mass), all = __shfl_sync(FULL_WARP, mass_to, 31);
    u64 enough = top_p >= 0.0f ? max((u64)((double)top_p * (double)all), (u64)1) : sh->enough;
    uint32_t count_at = sh->count_before + count_to - count;
    u64 mass_at = sh->mass_before + mass_to - mass;
    uint32_t ends = __ballot_sync(FULL_WARP, count_at + count >= most || mass_at + mass >= enough);
    __syncwarp();
    if (lane == 0) {
        sh->enough = enough;
        sh->all = sh->mass_before + all;
        sh->bin = NO_BIN;
    }
    __syncwarp();
    if (lane != __ffs((int)ends) - 1)
        return;
    int bin = first;
    while (count_at + sh->count[bin] < most && mass_at + mass_in(sh, bin) < enough) {
        count_at += sh->count[bin];
        mass_at += mass_in(sh, bin);
        bin--;
    }
    sh->bin = (uint32_t)bin;
    sh->count_before = count_at;
    sh->mass_before = mass_at;
}

/* The value (its order_bits) at which, from the top, there are `most` candidates or `enough` mass; 0 if there never are: then
 * sh->all is the mass of all. sh has count and mass of what lies above it, value_count and value_mass those of its own.
 * top_p >= 0: `enough` is that part of all. */
DEV uint32_t value_find(const struct weights &w, const float *v, uint32_t n, uint32_t most,
                        u64 enough, float top_p, struct sample_smem *sh)
{
    uint32_t bits = 0;
    __syncthreads(); /* what was found before has been read */
    if (threadIdx.x == 0) {
        sh->enough = enough;
        sh->mass_before = 0;
        sh->count_before = 0;
    }
    for (int shift = 24; shift >= 0; shift -= 8) {
        histogram(w, v, n, bits, shift, sh);
        if (warp_id() == 0)
            walk_find(sh, most, shift == 24 ? top_p : -1.0f);
        __syncthreads();
        if (sh->bin == NO_BIN)
            return 0;
        bits |= sh->bin << shift;
        if (shift > 0)
            __syncthreads();
    }
    return bits;
}
DEV uint32_t value_count(const struct sample_smem *sh, uint32_t bits)
{
    return sh->count[bits & 255u];
}
DEV u64 value_mass(const struct sample_smem *sh, uint32_t bits) /* of one of them */
{
    return mass_in(sh, (int)(bits & 255u)) / value_count(sh, bits);
}

/* The mass of the candidates that top_k and top_p leave. */
DEV u64 cut_mass(const struct weights &w, const struct row_how &how, const float *v, uint32_t n,
                 struct sample_smem *sh)
{
    uint32_t most = how.top_k > 0 ? how.top_k : 0xffffffffu;
    uint32_t bits = value_find(w, v, n, most, ~0ull, how.top_p < 1.0f ? how.top_p : -1.0f, sh);
    if (bits == 0)
        return sh->all;
    uint32_t count = value_count(sh, bits), before = sh->count_before;
    u64 each = value_mass(sh, bits), above = sh->mass_before, fit = count;
    if (sh->enough != ~0ull)
        fit = sh->enough > above ? (sh->enough - above + each - 1) / each : 0;
    fit = min(fit, (u64)min(most - before, count));
    return above + each * (before == 0 ? max(fit, (u64)1) : fit);
}

/* The id of the kth (from 0) value with these bits. */
DEV uint32_t id_of(const float *v, uint32_t n, uint32_t bits, uint32_t k, struct sample_smem *sh)
{
    uint32_t seen = 0, total;
    for (uint32_t start = 0; start < n && seen <= k; start += PICK_THREADS) {
        uint32_t i = start + threadIdx.x;
        bool is = i < n && order_bits(v[i]) == bits;
        uint32_t rank = seen + block_rank(is, sh->ranks, &total);
        if (is && rank == k)
            sh->id = i;
        seen += total;
    }
    __syncthreads();
    return sh->id;
}

/* The same where there is one. */
DEV uint32_t only_id_of(const float *v, uint32_t n, uint32_t bits, struct sample_smem *sh)
{
    for (uint32_t i = threadIdx.x; i < n; i += AHEAD * PICK_THREADS) {
        float x[AHEAD];
        values_load(v, n, i, x);
#pragma unroll
        for (uint32_t k = 0; k < AHEAD; k++)
            if (i + k * PICK_THREADS < n && order_bits(x[k]) == bits)
                sh->id = i + k * PICK_THREADS;
    }
    __syncthreads();
    return sh->id;
}

/* Of what the cuts leave, from the top. */
DEV uint32_t draw_ordered(const struct weights &w, const struct row_how &how, const float *v,
                          uint32_t n, struct sample_smem *sh)
{
    u64 part = part_of(how, cut_mass(w, how, v, n, sh));
    uint32_t bits = value_find(w, v, n, 0xffffffffu, part + 1, -1.0f, sh);
    u64 k = (part - sh->mass_before) / value_mass(sh, bits);
    return value_count(sh, bits) == 1 ? only_id_of(v, n, bits, sh)
                                      : id_of(v, n, bits, (uint32_t)k, sh);
}

/* Values i, i + 32 ... of a stretch that ends before `end`. */
DEV void stretch_load(const float *v, uint32_t end, uint32_t i, float *ret)
{
#pragma unroll
    for (uint32_t k = 0; k < AHEAD; k++)
        ret[k] = i + k * 32 < end ? v[i + k * 32] : -INFINITY;
}

/* Of all candidates, by id: a stretch of ids a warp. */
DEV uint32_t draw_by_id(const struct weights &w, const struct row_how &how, const float *v,
                        uint32_t n, struct sample_smem *sh)
{
    uint32_t len = (n + 32 * PICK_WARPS - 1) / (32 * PICK_WARPS) * 32, lane = (uint32_t)lane_id();
    uint32_t first = min(n, (uint32_t)warp_id() * len), end = min(n, first + len);
    u64 mass = 0, before = 0, all = 0;
    float x[AHEAD];
    for (uint32_t i = first + lane; i < end; i += AHEAD * 32) {
        stretch_load(v, end, i, x);
#pragma unroll
        for (uint32_t k = 0; k < AHEAD; k++)
            mass += mass_of(w, x[k]);
    }
    mass = warp_sum(mass);
    __syncthreads();
    if (lane == 0)
        sh->best[warp_id()] = mass;
    __syncthreads();
    for (int i = 0; i < PICK_WARPS; i++) {
        before += i < warp_id() ? sh->best[i] : 0;
        all += sh->best[i];
    }
    u64 part = part_of(how, all);
    bool here = part >= before && part - before < mass; /* all lanes of one warp */
    for (uint32_t start = first; here && start < end; start += AHEAD * 32) {
        stretch_load(v, end, start + lane, x);
#pragma unroll
        for (uint32_t k = 0; here && k < AHEAD; k++) {
            u64 to = warp_prefix(mass_of(w, x[k]));
            uint32_t over = __ballot_sync(FULL_WARP, before + to > part);
            if (over != 0 && (int)lane == __ffs((int)over) - 1)
                sh->id = start + k * 32 + lane;
            here = over == 0;
            before += __shfl_sync(FULL_WARP, to, 31);
        }
    }
    __syncthreads();
    return sh->id;
}

__global__ void __launch_bounds__(PICK_THREADS, 1) sample_rows(struct sample_args a)
{
    DYN_SMEM(struct sample_smem, sh);
    const struct row_how how = a.how[blockIdx.x];
    float *v = a.v + (size_t)blockIdx.x * a.n;
    u64 best = row_prepare(a, how, a.logits + (size_t)blockIdx.x * a.n, v, sh);
    uint32_t id = best_id(best);
    float max = v[id];
    if (how.temperature > 0.0f && max - max == 0.0f) { /* finite */
        /* finite also where the temperature is subnormal: the largest value's weight is exp(0 * it) */
        struct weights w = {max, fminf(1.0f / how.temperature, FLT_MAX), how.min_p};
        id = how.top_k > 0 || how.top_p < 1.0f ? draw_ordered(w, how, v, a.n, sh)
                                               : draw_by_id(w, how, v, a.n, sh);
    }
    if (threadIdx.x == 0)
        a.ret[blockIdx.x] = (int32_t)id;
}

const void *sample_kernel(void)
{
    return (const void *)sample_rows;
}

/* ---- the host's side ---- */

/* As many rows as the scratch holds at a time. How they are picked and their recent tokens come in one copy: with two, the ring
 * would be full, and the host would wait for the pass before it could ask for the tokens. */
static uint32_t rows_stage(struct cuda *c, const struct kn_sample *how, uint32_t rows,
                           uint32_t n_vocab, struct sample_args *a)
{
    size_t row_most = sizeof(struct row_how) + KN_RECENT_MAX * sizeof(int32_t), n_recent = 0;
    uint32_t n = (uint32_t)KN_MIN(c->scratch.w_bytes / 2 / row_most,
                                  c->scratch.x_bytes / (n_vocab * sizeof(float)));
    n = KN_MIN(n, rows);
    kn_assert(n > 0);
    struct row_how *list = (struct row_how *)calloc(n, row_most);
    kn_assert(list);
    int32_t *recent = (int32_t *)(list + n);
    for (uint32_t r = 0; r < n; r++) {
        const struct kn_sample *h = &how[r];
        kn_assert(h->n_recent <= KN_RECENT_MAX);
        list[r] = (struct row_how){h->temperature,
                                   h->top_p,
                                   h->min_p,
                                   h->repeat_penalty,
                                   h->top_k,
                                   h->n_recent,
                                   (uint32_t)n_recent,
                                   {(uint32_t)h->seed, (uint32_t)(h->seed >> 32)},
                                   {(uint32_t)h->stream, (uint32_t)(h->stream >> 32)}};
        for (uint32_t i = 0; i < h->n_recent; i++) {
            kn_assert(h->recent[i] >= 0 && (uint32_t)h->recent[i] < n_vocab);
            recent[n_recent++] = h->recent[i];
        }
    }
    ring_upload(c, c->stream, c->scratch.w, list, n * sizeof *list + n_recent * sizeof *recent);
    a->how = (const struct row_how *)c->scratch.w;
    a->recent = (const int32_t *)(a->how + n);
    a->ret = (int32_t *)(c->scratch.w + c->scratch.w_bytes / 2);
    a->v = (float *)c->scratch.x;
    a->n = n_vocab;
    free(list);
    return n;
}

void cuda_sample(struct kn *kn, const float *logits, uint32_t rows, uint32_t n_vocab,
                 const struct kn_sample *how, int32_t *ret)
{
    struct cuda *c = cuda_of(kn);
    struct sample_args a;
    capture_flush(c);
    for (uint32_t at = 0, n; at < rows; at += n) {
        n = rows_stage(c, how + at, rows - at, n_vocab, &a);
        a.logits = logits + (size_t)at * n_vocab;
        KERNEL(c, sample_rows, dim3(n), dim3(PICK_THREADS), sizeof(struct sample_smem), a);
        fetch(c, ret + at, a.ret, n * sizeof *ret);
    }
}
