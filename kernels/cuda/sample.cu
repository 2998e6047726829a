/* sample.cu: a token for each row of logits, on the device; four bytes a row leave it.
 *
 * One block a row, as the engine's sampler has it (daemon/engine/sampler.c), but without an order of the vocabulary:
 *
 *      v       NaN counts as -inf; penalties once for each recent token; (max, lowest id) is the greedy pick
 *      w       exp((v - max) / temperature); candidates have w > 0 and w >= min_p
 *      cut     ordered by v descending, id ascending, a candidate stays while fewer than top_k stand before it and their
 *              weights (in units of 2^-40: whole numbers, so the order of adding does not matter) are less than top_p of all.
 *              The last one that stays is found a byte of its bits at a time
 *      draw    the largest of v / temperature + Gumbel noise: candidates win with probability w / sum
 *
 * One block has one multiprocessor's way to memory: eight loads of a thread are under way before the first is used.
 *
 * Noise is Philox4x32-10 of key (seed) and counter (id / 4, stream): a token depends on its row, seed and stream alone. */
#include "pick.cuh"

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
    u64 enough, mass_before; /* of walk_find */
    uint32_t count_before, bin;
};
#define NO_BIN 256u

/* ---- noise ---- */

/* Ten rounds of Philox 4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"). */
DEV void philox(uint32_t *ctr, uint32_t key0, uint32_t key1)
{
    for (int i = 0; i < 10; i++) {
        uint32_t hi0 = __umulhi(0xd2511f53u, ctr[0]), lo0 = 0xd2511f53u * ctr[0];
        uint32_t hi1 = __umulhi(0xcd9e8d57u, ctr[2]), lo1 = 0xcd9e8d57u * ctr[2];
        uint32_t c1 = ctr[1], c3 = ctr[3];
        ctr[0] = hi1 ^ c1 ^ key0;
        ctr[1] = lo1;
        ctr[2] = hi0 ^ c3 ^ key1;
        ctr[3] = lo0;
        key0 += 0x9e3779b9u;
        key1 += 0xbb67ae85u;
    }
}

/* Four draws of Gumbel's distribution for ids 4 i .. 4 i + 3: -log of an exponential variable, which is precise where it is
 * small, that is where the noise is large. */
DEV void gumbel(const struct row_how &how, uint32_t i, float *ret)
{
    uint32_t ctr[4] = {i, how.stream[0], how.stream[1], 0};
    philox(ctr, how.seed[0], how.seed[1]);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        float u = fminf(((float)ctr[k] + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
        ret[k] = -logf(-log1pf(-u));
    }
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

/* What the draw may take: bits above `bits`, and the first `equal` ids with just these. */
struct cut {
    uint32_t bits, equal;
};

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
    u64 enough = top_p >= 0.0f ? (u64)((double)top_p * (double)all) : sh->enough;
    uint32_t count_at = sh->count_before + count_to - count;
    u64 mass_at = sh->mass_before + mass_to - mass;
    uint32_t ends = __ballot_sync(FULL_WARP, count_at + count >= most || mass_at + mass >= enough);
    __syncwarp();
    if (lane == 0) {
        sh->enough = enough;
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

DEV struct cut cut_find(const struct weights &w, const struct row_how &how, const float *v,
                        uint32_t n, struct sample_smem *sh)
{
    struct cut c = {0, 0};
    uint32_t most = how.top_k > 0 ? how.top_k : 0xffffffffu;
    if (threadIdx.x == 0) {
        sh->enough = ~0ull;
        sh->mass_before = 0;
        sh->count_before = 0;
    }
    for (int shift = 24; shift >= 0; shift -= 8) {
        histogram(w, v, n, c.bits, shift, sh);
        if (warp_id() == 0)
            walk_find(sh, most, shift == 24 && how.top_p < 1.0f ? how.top_p : -1.0f);
        __syncthreads();
        uint32_t bin = sh->bin;
        if (bin == NO_BIN)
            return (struct cut){0, 0xffffffffu}; /* all of them */
        c.bits |= bin << shift;
        c.equal = sh->count[bin];
        if (shift == 0) { /* all of this bin weigh the same */
            uint32_t before = sh->count_before;
            u64 each = c.equal ? mass_in(sh, (int)bin) / c.equal : 0, fit = c.equal;
            if (sh->enough != ~0ull && each > 0)
                fit = (sh->enough - sh->mass_before + each - 1) / each;
            c.equal = (uint32_t)min(fit, (u64)min(most - before, c.equal));
            c.equal = before == 0 ? max(c.equal, 1u) : c.equal;
            if (c.equal == sh->count[bin])
                c.equal = 0xffffffffu; /* nobody need count them */
        }
        __syncthreads();
    }
    return c;
}

/* How many of the equal values at the cut stand before this thread's four, of which `mine` are some: bit by bit. */
DEV uint32_t equal_before(uint32_t mine, uint32_t *seen, struct sample_smem *sh)
{
    uint32_t before = *seen, total;
    for (uint32_t bit = 0; bit < 3; bit++) {
        before += block_rank(mine >> bit & 1u, sh->ranks, &total) << bit;
        *seen += total << bit;
    }
    return before;
}

/* The candidate with the most noise. The equal ones at the cut are counted in the order of ids. */
DEV u64 draw(const struct sample_args &a, const struct row_how &how, const struct weights &w,
             const float *v, struct cut c, struct sample_smem *sh)
{
    u64 best = 0;
    uint32_t seen = 0;
    for (uint32_t start = 0; start < a.n; start += 4 * PICK_THREADS) {
        uint32_t first = start + 4 * threadIdx.x, mine = 0, before = 0, in = 0;
        float x[4], noise[4];
#pragma unroll
        for (uint32_t k = 0; k < 4; k++)
            x[k] = first + k < a.n ? v[first + k] : -INFINITY;
        for (uint32_t k = 0; k < 4; k++)
            mine += first + k < a.n && order_bits(x[k]) == c.bits;
        if (c.equal != 0xffffffffu)
            before = equal_before(mine, &seen, sh);
        for (uint32_t k = 0; k < 4 && first + k < a.n; k++) {
            uint32_t bits = order_bits(x[k]);
            bool stays = bits > c.bits || (bits == c.bits && before++ < c.equal);
            in |= (uint32_t)(stays && mass_of(w, x[k]) > 0) << k;
        }
        if (in == 0)
            continue;
        gumbel(how, first / 4, noise);
        for (uint32_t k = 0; k < 4; k++) {
            u64 b = best_of(x[k] * w.inverse_t + noise[k], first + k);
            best = in >> k & 1u && b > best ? b : best;
        }
    }
    return block_best(best, sh->best);
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
        struct weights w = {max, 1.0f / how.temperature, how.min_p};
        struct cut c = {0, 0xffffffffu};
        if (how.top_k > 0 || how.top_p < 1.0f)
            c = cut_find(w, how, v, a.n, sh);
        id = best_id(draw(a, how, w, v, c, sh));
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
