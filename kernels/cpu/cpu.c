/* cpu.c: opening and closing the backend, and its table: ref's ops where memory is all that matters (its
 * ops keep no state), ours for everything else. Ours run on the best instruction set that the machine has,
 * or on the one asked for. All scratch is one mapping, whose pages exist once they are touched. */
#include "cpu.h"
#include "amx.h"
#include "isa.h"
#include "kn_backends.h"
#include "ops.h"
#include "ref.h" /* for its ops alone: its kn_weight is not ours */
#include <sched.h>
#include <string.h>
#include <sys/mman.h>

struct isa_choice {
    const char *option; /* as kn_options.isa has it */
    const struct matmul_kernels *mat;
    const struct attn_kernels *attn;
    const struct vec_kernels *vec;
    bool by_name_only; /* for tests */
};

/* Best first. */
static const struct isa_choice choices[] = {
    {"amx", &matmul_amx, &attn_avx512, &vec_avx512, false},
    {"avx512-bf16", &matmul_avx512bf16, &attn_avx512, &vec_avx512, false},
    {"avx512", &matmul_avx512, &attn_avx512, &vec_avx512, false},
    {"avx2", &matmul_avx2, &attn_avx2, &vec_avx2, false},
    {"scalar", &matmul_scalar, &attn_scalar, &vec_scalar, false},
    {"amx-model", &matmul_amx_model, &attn_avx512, &vec_avx512, true},
};
#define N_CHOICES (sizeof choices / sizeof choices[0])

/* why: more than "the machine lacks it", if there is more to say. */
static bool choice_runs(const struct isa_choice *i, char *why, size_t why_len)
{
    struct cpuid_features f = cpuid_read();
    if (i->mat == &matmul_scalar)
        return true;
    if (i->mat == &matmul_avx2)
        return f.avx2;
    if (i->mat == &matmul_avx512)
        return f.avx512;
    if (i->mat == &matmul_avx512bf16)
        return f.avx512_bf16;
    if (i->mat == &matmul_amx && (!f.amx || !amx_permit(why, why_len)))
        return false;
    return f.avx512 && amx_proves(i->mat, why, why_len);
}

/* The full name ("avx512-vnni") is as good as the option. */
static const struct isa_choice *choice_named(const char *isa)
{
    for (size_t i = 0; i < N_CHOICES; i++)
        if (strcmp(isa, choices[i].option) == 0 || strcmp(isa, choices[i].mat->name) == 0)
            return &choices[i];
    return NULL;
}

const char *kn_cpu_isa_name(unsigned i)
{
    for (size_t k = 0; k < N_CHOICES; k++)
        if (!choices[k].by_name_only && i-- == 0)
            return choices[k].option;
    return NULL;
}

bool kn_cpu_isa_known(const char *isa)
{
    return choice_named(isa) != NULL;
}

/* isa "X": the reason; this machine has avx512, avx2, scalar */
static void refuse(const char *isa, const char *reason, char *why, size_t why_len)
{
    char scrap[160];
    const char *sep = "";
    int n = snprintf(why, why_len, "isa \"%.40s\": %s; this machine has ", isa, reason);
    for (size_t i = 0; i < N_CHOICES && n > 0 && (size_t)n < why_len; i++) {
        if (choices[i].by_name_only || !choice_runs(&choices[i], scrap, sizeof scrap))
            continue;
        n += snprintf(why + n, why_len - (size_t)n, "%s%s", sep, choices[i].option);
        sep = ", ";
    }
}

/* NULL: why. A better set that was passed over although the processor has it leaves its reason in why, too. */
static const struct isa_choice *choose(const char *isa, char *why, size_t why_len)
{
    char reason[96] = "";
    if (isa) {
        const struct isa_choice *c = choice_named(isa);
        if (!c)
            snprintf(reason, sizeof reason, "there is no such one");
        else if (choice_runs(c, reason, sizeof reason))
            return c;
        refuse(isa, reason[0] ? reason : "the processor lacks it", why, why_len);
        return NULL;
    }
    for (size_t i = 0;; i++)
        if (choice_runs(&choices[i], why, why_len)) /* the plain one does */
            return &choices[i];
}

static uint32_t threads_default(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0)
        return 1;
    return (uint32_t)KN_MAX(1, KN_MIN(CPU_COUNT(&set), TEAM_THREADS_MAX));
}

/* Hands out 64-byte aligned pieces; with base NULL it only adds up. */
struct carver {
    uint8_t *base;
    size_t used;
};

static void *carve(struct carver *k, size_t bytes)
{
    void *p = k->base ? k->base + k->used : NULL;
    k->used += (bytes + 63) / 64 * 64;
    return p;
}

static void room_carve(struct kn_cpu *c, struct carver *k)
{
    c->scratch = carve(k, c->kn.n_threads * sizeof *c->scratch);
    if (c->mat->begin)
        c->tiles = carve(k, c->kn.n_threads * sizeof *c->tiles);
    c->stage.q8 =
        carve(k, STAGE_BLOCKS * (c->wide ? sizeof(struct act_wide) : sizeof(struct act_block)));
    c->stage.floats = carve(k, STAGE_FLOAT_BYTES);
    if (c->mat->pairs && !c->wide) /* with 16 bits none is rounded */
        c->stage.pairs = carve(k, STAGE_FLOAT_BYTES / 2);
    c->lse = carve(k, 2 * LSE_SLICES * LSE_ROWS * sizeof(float));
    c->attn_part = carve(k, ATTN_PART_FLOATS * sizeof(float));
    c->attn_state = carve(k, ATTN_STATE_FLOATS * sizeof(float));
    c->attn_blocks = carve(k, ATTN_BLOCKS * sizeof *c->attn_blocks);
    for (unsigned i = 0; i < ROPE_TABLES; i++) {
        struct rope_table *t = &c->rope[i];
        t->since = carve(k, ROPE_PLACES * sizeof *t->since);
        t->positions = carve(k, ROPE_PLACES * sizeof *t->positions);
        t->todo = carve(k, ROPE_PLACES * sizeof *t->todo);
        t->cs = carve(k, ROPE_TABLE_FLOATS * sizeof *t->cs);
    }
}

static int room_open(struct kn_cpu *c)
{
    struct carver k = {NULL, 0};
    room_carve(c, &k);
    c->room_bytes = k.used;
    c->room = mmap(NULL, c->room_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (c->room == MAP_FAILED)
        return KN_ENOMEM;
    k = (struct carver){c->room, 0};
    room_carve(c, &k);
    c->kn.bytes_scratch = c->room_bytes;
    return KN_OK;
}

static void cpu_close(struct kn *kn)
{
    struct kn_cpu *c = cpu_of(kn);
    kn_assert(kn->bytes_buffers == 0 && kn->bytes_weights == 0 && kn->bytes_arena == 0);
    team_close(&c->team);
    munmap(c->room, c->room_bytes);
    kn->magic = 0;
    c->magic = 0;
    free(c);
}

static const struct kn_ops cpu_ops = {
    .close = cpu_close,
    .status = ref_status,
    .sync = ref_sync,
    .buf_alloc = ref_buf_alloc,
    .buf_free = ref_buf_free,
    .upload = ref_upload,
    .download = ref_download,
    .arena_open = ref_arena_open,
    .arena_commit = ref_arena_commit,
    .arena_release = ref_arena_release,
    .arena_close = ref_arena_close,
    .row_copy = ref_row_copy,
    .weight_load = cpu_weight_load,
    .weight_free = cpu_weight_free,
    .weight_bytes = cpu_weight_bytes,
    .batch_begin = cpu_batch_begin,
    .batch_end = cpu_batch_end,
    .embed = cpu_embed,
    .rmsnorm = cpu_rmsnorm,
    .linear = cpu_linear,
    .rope = cpu_rope,
    .kv_write = cpu_kv_write,
    .hidden_write = cpu_hidden_write,
    .hidden_read = cpu_hidden_read,
    .attention = cpu_attention,
    .swiglu = cpu_swiglu,
    .gather_rows = ref_gather_rows,
    .row_logit = cpu_row_logit,
    .row_lse = cpu_row_lse,
    .keys_read = cpu_keys_read,
    .kv_rotate = cpu_kv_rotate,
    .attention_row = cpu_attention_row,
};

int kn_cpu_open(struct kn **ret, const struct kn_options *opt, char *why, size_t why_len)
{
    const struct isa_choice *isa = choose(opt->isa, why, why_len);
    if (!isa)
        return KN_EUNSUPPORTED;
    if (opt->threads > TEAM_THREADS_MAX) {
        snprintf(why, why_len, "threads: %u, but at most %d", opt->threads, TEAM_THREADS_MAX);
        return KN_EINVALID;
    }
    struct kn_cpu *c = calloc(1, sizeof *c);
    if (!c)
        goto no_memory;
    c->wide = opt->activations == KN_ACTIVATIONS_WIDE;
    c->kn = (struct kn){.magic = KN_MAGIC, .ops = &cpu_ops, .name = "cpu"};
    c->kn.n_threads = opt->threads ? opt->threads : threads_default();
    c->kn.rows_read = ROWS_READ;
    c->kn.kv_types = 1u << KN_BF16 | 1u << KN_Q8_0 | 1u << KN_Q8_Q4;
    c->magic = CPU_MAGIC;
    c->mat = isa->mat;
    c->attn = isa->attn;
    c->vec = isa->vec;
    c->kn.activations = c->wide ? KN_ACTIVATIONS_WIDE : KN_ACTIVATIONS;
    strcpy(c->kn.isa, isa->mat->name);
    if (room_open(c) != KN_OK)
        goto no_room;
    if (team_open(&c->team, c->kn.n_threads, opt->pin) != 0)
        goto no_team;
    *ret = &c->kn;
    return KN_OK;
no_team:
    munmap(c->room, c->room_bytes);
no_room:
    free(c);
no_memory:
    snprintf(why, why_len, "no memory or no threads for backend \"cpu\"");
    return KN_ENOMEM;
}
