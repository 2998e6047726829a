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
    u64 mass[256];
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

/* Fills v and returns the largest. */
DEV u64 row_prepare(const struct sample_args &a, const struct row_how &how, const float *logits,
                    float *v, struct sample_smem *sh)
{
    for (uint32_t i = threadIdx.x; i < a.n; i += PICK_THREADS)
        v[i] = logits[i] == logits[i] ? logits[i] : -INFINITY;
    __syncthreads();
    if (how.penalty != 1.0f)
        for (uint32_t i = threadIdx.x; i < how.n_recent; i += PICK_THREADS) {
            uint32_t id = (uint32_t)a.recent[how.recent_at + i];
            float l = logits[id] == logits[id] ? logits[id] : -INFINITY;
            /* from the logit as it was: said twice, penalised once */
            atomicExch(&v[id], l > 0.0f ? l / how.penalty : l * how.penalty);
        }
    __syncthreads();
    u64 best = 0;
    for (uint32_t i = threadIdx.x; i < a.n; i += PICK_THREADS) {
        u64 b = best_of(v[i], i);
        best = b > best ? b : best;
    }
    return block_best(best, sh->best);
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

/* Counts and masses of the candidates' next byte, among those whose upper bytes are `prefix`'s. */
DEV void histogram(const struct weights &w, const float *v, uint32_t n, uint32_t prefix, int shift,
                   struct sample_smem *sh)
{
    for (uint32_t i = threadIdx.x; i < 256; i += PICK_THREADS) {
        sh->count[i] = 0;
        sh->mass[i] = 0;
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < n; i += PICK_THREADS) {
        u64 m = mass_of(w, v[i]);
        uint32_t bits = order_bits(v[i]);
        if (m == 0 || (shift < 24 && (bits ^ prefix) >> (shift + 8) != 0))
            continue;
        atomicAdd(&sh->count[bits >> shift & 255u], 1u);
        atomicAdd(&sh->mass[bits >> shift & 255u], m);
    }
    __syncthreads();
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
        mass += sh->mass[first - i];
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
    while (count_at + sh->count[bin] < most && mass_at + sh->mass[bin] < enough) {
        count_at += sh->count[bin];
        mass_at += sh->mass[bin];
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
            u64 each = c.equal ? sh->mass[bin] / c.equal : 0, fit = c.equal;
            if (sh->enough != ~0ull && each > 0)
                fit = (sh->enough - sh->mass_before + each - 1) / each;
            c.equal = (uint32_t)min(fit, (u64)min(most - before, c.equal));
            c.equal = before == 0 ? max(c.equal, 1u) : c.equal;
        }
        __syncthreads();
    }
    return c;
}

/* The candidate with the most noise. The equal ones at the cut are counted in the order of ids. */
DEV u64 draw(const struct sample_args &a, const struct row_how &how, const struct weights &w,
             const float *v, struct cut c, struct sample_smem *sh)
{
    u64 best = 0;
    uint32_t seen = 0, total;
    for (uint32_t start = 0; start < a.n; start += 4 * PICK_THREADS) {
        uint32_t first = start + 4 * threadIdx.x;
        float noise[4];
        gumbel(how, first / 4, noise);
        uint32_t mine = 0, before;
        for (uint32_t k = 0; k < 4; k++)
            mine += first + k < a.n && order_bits(v[first + k]) == c.bits;
        if (c.equal != 0xffffffffu) { /* ranks of up to four a thread: bit by bit */
            before = seen;
            for (uint32_t bit = 0; bit < 3; bit++) {
                before += block_rank(mine >> bit & 1u, sh->ranks, &total) << bit;
                seen += total << bit;
            }
        } else {
            before = 0;
        }
        for (uint32_t k = 0; k < 4 && first + k < a.n; k++) {
            float x = v[first + k];
            uint32_t bits = order_bits(x);
            bool in = bits > c.bits || (bits == c.bits && before++ < c.equal);
            if (!in || mass_of(w, x) == 0)
                continue;
            u64 b = best_of(x * w.inverse_t + noise[k], first + k);
            best = b > best ? b : best;
        }
    }
    return block_best(best, sh->best);
}

__global__ void __launch_bounds__(PICK_THREADS) sample_rows(struct sample_args a)
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

/* As many rows as the scratch holds at a time; their recent tokens stand before them in l. */
static uint32_t rows_stage(struct cuda *c, const struct kn_sample *how, uint32_t rows,
                           uint32_t n_vocab, struct sample_args *a)
{
    size_t most = c->scratch.l_bytes / (KN_RECENT_MAX * sizeof(int32_t)), n_recent = 0;
    uint32_t n = (uint32_t)KN_MIN(most, c->scratch.x_bytes / (n_vocab * sizeof(float)));
    n = KN_MIN(n, rows);
    kn_assert(n > 0);
    struct row_how *list = (struct row_how *)calloc(n, sizeof *list);
    int32_t *recent = (int32_t *)malloc((size_t)n * KN_RECENT_MAX * sizeof *recent);
    kn_assert(list && recent);
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
    ring_upload(c, c->stream, c->scratch.w, list, n * sizeof *list);
    ring_upload(c, c->stream, c->scratch.l, recent, n_recent * sizeof *recent);
    a->how = (const struct row_how *)c->scratch.w;
    a->recent = (const int32_t *)c->scratch.l;
    a->ret = (int32_t *)(c->scratch.w + c->scratch.w_bytes / 2);
    a->v = (float *)c->scratch.x;
    a->n = n_vocab;
    free(list);
    free(recent);
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
