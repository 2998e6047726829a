/* The number of threads changes no bit, and a backend may be opened, used and closed any number of
 * times: the same small layer at 1, 2, 3, 5 and 8 threads, at every instruction set. Runs under
 * ThreadSanitizer, too, in part. */
#include "kernels_compare.h"
#include "sanitized.h"
#include <dirent.h>
#include <sched.h>
#include <time.h>

enum { D_MODEL = 256, N_HEADS = 6, N_KV = 2, D = 32, FF = 512, VOCAB = 777, ROWS = 70 };

static const uint32_t thread_counts[] = {1, 3, 2, 5, 8};

struct layer {
    struct kn_tensor q, k, v, o, gate, up, down, embed;
    float *gain;
};

/* Gains after which queries and keys have deviation 1, whatever the scales of the type: with larger ones attention
 * is a choice of one key and the gate a switch, and what is compared is who wins a tie. */
static float *gains(const struct kn_tensor *q)
{
    size_t n = (size_t)q->rows * q->cols;
    float *values = kc_tensor_values(q);
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += (double)values[i] * (double)values[i];
    free(values);
    return kc_floats(9, D_MODEL, (float)(1 / sqrt(sum / (double)n * D_MODEL)));
}

static struct layer layer_make(enum kn_type type)
{
    struct layer l = {
        .q = kc_tensor(type, N_HEADS * D, D_MODEL, 1),
        .k = kc_tensor(type, N_KV * D, D_MODEL, 2),
        .v = kc_tensor(type, N_KV * D, D_MODEL, 3),
        .o = kc_tensor(kn_type_find(type)->block > 32 ? KN_Q8_0 : type, D_MODEL, N_HEADS * D, 4),
        .gate = kc_tensor(type, FF, D_MODEL, 5),
        .up = kc_tensor(type, FF, D_MODEL, 6),
        .down = kc_tensor(type, D_MODEL, FF, 7),
        .embed = kc_tensor(KN_Q8_0, VOCAB, D_MODEL, 8),
    };
    l.gain = gains(&l.q);
    return l;
}

static void layer_free(struct layer *l)
{
    struct kn_tensor *all[] = {&l->q, &l->k, &l->v, &l->o, &l->gate, &l->up, &l->down, &l->embed};
    for (size_t i = 0; i < KC_LEN(all); i++)
        kc_tensor_free(all[i]);
    free(l->gain);
}

/* Device memory of one run. */
struct scratch {
    float *x, *h, *q, *k, *v, *a, *gate, *up, *gain, *inv_freq;
};

static float *floats_up(struct kn *kn, size_t n)
{
    return kc_up(kn, NULL, n * sizeof(float));
}

static struct scratch scratch_make(struct kn *kn, const struct layer *l)
{
    float inv_freq[D / 2];
    for (int i = 0; i < D / 2; i++)
        inv_freq[i] = powf(10000.0f, -2.0f * (float)i / D);
    return (struct scratch){
        .x = floats_up(kn, ROWS * D_MODEL),
        .h = floats_up(kn, ROWS * D_MODEL),
        .q = floats_up(kn, ROWS * N_HEADS * D),
        .k = floats_up(kn, ROWS * N_KV * D),
        .v = floats_up(kn, ROWS * N_KV * D),
        .a = floats_up(kn, ROWS * N_HEADS * D),
        .gate = floats_up(kn, ROWS * FF),
        .up = floats_up(kn, ROWS * FF),
        .gain = kc_up(kn, l->gain, D_MODEL * sizeof(float)),
        .inv_freq = kc_up(kn, inv_freq, sizeof inv_freq),
    };
}

static void scratch_free(struct kn *kn, struct scratch *s)
{
    kc_drop(kn, s->x, ROWS * D_MODEL * sizeof(float));
    kc_drop(kn, s->h, ROWS * D_MODEL * sizeof(float));
    kc_drop(kn, s->q, ROWS * N_HEADS * D * sizeof(float));
    kc_drop(kn, s->k, ROWS * N_KV * D * sizeof(float));
    kc_drop(kn, s->v, ROWS * N_KV * D * sizeof(float));
    kc_drop(kn, s->a, ROWS * N_HEADS * D * sizeof(float));
    kc_drop(kn, s->gate, ROWS * FF * sizeof(float));
    kc_drop(kn, s->up, ROWS * FF * sizeof(float));
    kc_drop(kn, s->gain, D_MODEL * sizeof(float));
    kc_drop(kn, s->inv_freq, D / 2 * sizeof(float));
}

struct result {
    float x[ROWS * D_MODEL], logit[ROWS], lse[ROWS], newest[ROWS];
};

/* The loaded weights, in the order of struct layer. */
enum { WQ, WK, WV, WO, WGATE, WUP, WDOWN, WEMBED, N_WEIGHTS };

static void pass(struct kn *kn, const struct kn_batch *b, struct kn_weight *const *weights,
                 struct scratch *s, struct result *ret)
{
    const struct kn_ops *ops = kn->ops;
    const struct kn_weight *const *w = (const struct kn_weight *const *)weights;
    const struct kn_weight *qkv[] = {w[WQ], w[WK], w[WV]}, *mlp[] = {w[WGATE], w[WUP]};
    struct kn_rope rope = {KN_ROPE_HALVES, N_HEADS, D, D, s->inv_freq, NULL, 0.0f};
    ops->batch_begin(kn, b);
    ops->embed(kn, w[WEMBED], b, s->x);
    ops->rmsnorm(kn, s->h, s->x, s->gain, ROWS, D_MODEL, 1e-5f);
    ops->linear(kn, 3, qkv, NULL, s->h, ROWS, (float *[]){s->q, s->k, s->v}, false);
    ops->rope(kn, b, &rope, s->q);
    rope.n_heads = N_KV;
    ops->rope(kn, b, &rope, s->k);
    ops->kv_write(kn, b, 0, s->k, s->v);
    ops->hidden_write(kn, b, s->x);
    ops->attention(kn, b, 0, s->q, N_HEADS, 0.17f, s->a);
    ops->linear(kn, 1, &w[WO], NULL, s->a, ROWS, &s->x, true);
    ops->rmsnorm(kn, s->h, s->x, s->gain, ROWS, D_MODEL, 1e-5f);
    ops->linear(kn, 2, mlp, NULL, s->h, ROWS, (float *[]){s->gate, s->up}, false);
    ops->swiglu(kn, s->gate, s->gate, s->up, (size_t)ROWS * FF);
    ops->linear(kn, 1, &w[WDOWN], NULL, s->gate, ROWS, &s->x, true);
    ops->row_logit(kn, w[WEMBED], s->x, ROWS, b->ids, ret->logit);
    ops->row_lse(kn, w[WEMBED], s->x, ROWS, ret->lse);
    ops->download(kn, ret->x, s->x, sizeof ret->x);
    float q[N_HEADS * D];
    ops->download(kn, q, s->q, sizeof q);
    ops->attention_row(kn, &b->seqs[0], 0, q, N_HEADS, 0.17f, ret->newest);
    ops->batch_end(kn, b);
}

static void run(struct kn *kn, const struct layer *l, struct result *ret)
{
    uint32_t *slots = kc_slots(KC_SCATTERED, ROWS, 2, 3), lo[ROWS], hi[ROWS], seq[ROWS];
    int32_t ids[ROWS], positions[ROWS];
    const struct kn_tensor *t[] = {&l->q,    &l->k,  &l->v,    &l->o,
                                   &l->gate, &l->up, &l->down, &l->embed};
    struct kn_weight *w[N_WEIGHTS];
    struct kc_pool pool;
    kc_pool_open(&pool, kn,
                 (struct kn_kv){.n_layers = 1,
                                .n_kv_heads = N_KV,
                                .head_dim = D,
                                .d_hidden = D_MODEL,
                                .type = KN_F16},
                 2);
    struct kn_seq s = {&pool.kv, slots, ROWS};
    for (uint32_t r = 0; r < ROWS; r++) {
        ids[r] = (int32_t)(r * 31 % VOCAB);
        positions[r] = (int32_t)r * 3;
        seq[r] = lo[r] = 0;
        hi[r] = r + 1;
    }
    struct kn_batch b = {ROWS, 1, ids, positions, seq, lo, hi, slots, &s};
    for (int i = 0; i < N_WEIGHTS; i++)
        w[i] = kc_load(kn, t[i]);
    struct scratch scratch = scratch_make(kn, l);
    pass(kn, &b, w, &scratch, ret);
    scratch_free(kn, &scratch);
    for (int i = 0; i < N_WEIGHTS; i++)
        kn->ops->weight_free(kn, &w[i]);
    kc_pool_close(&pool);
    free(slots);
}

static void same_result(const char *what, const struct result *got, const struct result *want)
{
    kc_same(what, got->x, want->x, ROWS * D_MODEL);
    kc_same(what, got->logit, want->logit, ROWS);
    kc_same(what, got->lse, want->lse, ROWS);
    kc_same(what, got->newest, want->newest, ROWS);
}

/* first[i]: what backend i of the set gave at one thread. */
static void bits_do_not_depend_on_threads(void **state)
{
    (void)state;
    static const enum kn_type types[] = {KN_Q4_1, KN_F32, KN_Q4_K, KN_BF16};
    const size_t n_types = SANITIZED ? 2 : KC_LEN(types);
    const size_t n_counts = SANITIZED ? 2 : KC_LEN(thread_counts);
    static struct result first[KC_BACKENDS_MAX], got;
    for (size_t t = 0; t < n_types; t++) {
        struct layer l = layer_make(types[t]);
        for (size_t c = 0; c < n_counts; c++) {
            struct kc_set set;
            kc_open(&set, thread_counts[c]);
            for (unsigned i = 0; i < set.n; i++) {
                if (c > 0 && kc_is_device(set.kn[i]))
                    continue; /* it has none */
                struct result *ret = c == 0 ? &first[i] : &got;
                run(set.kn[i], &l, ret);
                assert_true(isfinite(ret->x[0]) && kc_max_abs(ret->x, ROWS * D_MODEL) > 0.0f);
                if (c > 0)
                    same_result(kc_name(set.kn[i]), &got, &first[i]);
            }
            for (unsigned i = 0; i < set.n; i++) { /* and again with warm threads */
                if (c > 0 && kc_is_device(set.kn[i]))
                    continue;
                run(set.kn[i], &l, &got);
                same_result(kc_name(set.kn[i]), &got, &first[i]);
            }
            kc_close(&set);
        }
        layer_free(&l);
    }
}

/* Every backend's whole layer is near ref's: float weights closely, 8-bit activations within their
 * rounding. */
static void layers_agree_with_ref(void **state)
{
    (void)state;
    static const enum kn_type types[] = {KN_Q8_0, KN_F32, KN_F16, KN_Q6_K};
    static struct result want, got;
    struct kc_set set;
    kc_open(&set, 2);
    for (size_t t = 0; t < (SANITIZED ? 2 : KC_LEN(types)); t++) {
        struct layer l = layer_make(types[t]);
        run(set.kn[0], &l, &want);
        float size = kc_max_abs(want.x, ROWS * D_MODEL);
        float tol = kn_int8_format(types[t]) ? 0.03f : 1e-4f;
        for (unsigned i = 0; i < set.n; i++) {
            run(set.kn[i], &l, &got);
            float rounded =
                types[t] == KN_F32 ? KC_HALVES : 0.03f; /* halves in attention and in products */
            kc_near(kc_name(set.kn[i]), got.x, want.x, ROWS * D_MODEL, size,
                    kc_is_device(set.kn[i]) ? fmaxf(tol, rounded) : tol);
        }
        layer_free(&l);
    }
    kc_close(&set);
}

/* Threads named kn-worker, and the cores that each may use; returns how many threads. */
static unsigned workers_seen(cpu_set_t *sets, unsigned most)
{
    char path[300], name[32] = "";
    unsigned n = 0;
    DIR *tasks = opendir("/proc/self/task");
    assert_non_null(tasks);
    for (struct dirent *e; (e = readdir(tasks)) != NULL;) {
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", e->d_name);
        FILE *f = e->d_name[0] != '.' ? fopen(path, "r") : NULL;
        if (!f)
            continue;
        bool worker = fgets(name, sizeof name, f) && strcmp(name, "kn-worker\n") == 0;
        fclose(f);
        if (!worker)
            continue;
        assert_true(n < most);
        if (sched_getaffinity(atoi(e->d_name), sizeof *sets, &sets[n]) == 0)
            n++; /* else it has just ended */
    }
    closedir(tasks);
    return n;
}

/* Asked for, every worker has one core, no two the same while there are enough; the caller keeps what it had. */
static void pinned_workers_keep_to_a_core(void **state)
{
    (void)state;
    enum { THREADS = 4, MOST = 64 };
    cpu_set_t before, after, sets[MOST], used;
    char why[200];
    assert_int_equal(sched_getaffinity(0, sizeof before, &before), 0);
    unsigned cores = (unsigned)CPU_COUNT(&before);
    if (cores < 2)
        skip();
    for (int pin = 0; pin < 2; pin++) {
        struct kn_options opt = {.backend = "cpu", .threads = THREADS, .pin = pin};
        struct kn *kn;
        if (kn_open(&kn, &opt, why, sizeof why) != KN_OK)
            fail_msg("%s", why);
        while (workers_seen(sets, MOST) != THREADS - 1)
            sched_yield(); /* joined threads of other backends vanish a moment later */
        CPU_ZERO(&used);
        for (int i = 0; i < THREADS - 1; i++) {
            assert_int_equal(CPU_COUNT(&sets[i]), pin ? 1u : cores);
            CPU_OR(&used, &used, &sets[i]);
        }
        if (pin)
            assert_int_equal(CPU_COUNT(&used), cores < THREADS - 1 ? cores : THREADS - 1);
        assert_int_equal(sched_getaffinity(0, sizeof after, &after), 0);
        assert_true(CPU_EQUAL(&before, &after));
        kn_close(&kn);
    }
}

static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Threads that wait for work sleep after a moment: 300 ms of nothing cost a few milliseconds at most. */
static void idle_threads_sleep(void **state)
{
    (void)state;
    static struct result got;
    struct layer l = layer_make(KN_Q8_0);
    struct kc_set set;
    kc_open(&set, 8);
    for (unsigned i = 0; i < set.n; i++)
        run(set.kn[i], &l, &got);
    nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
    double before = cpu_seconds();
    nanosleep(&(struct timespec){.tv_nsec = 300000000}, NULL);
    double spent = cpu_seconds() - before;
    if (spent > 0.01)
        fail_msg("%u idle backends of 8 threads used %.1f ms in 300 ms", set.n, spent * 1e3);
    kc_close(&set);
    layer_free(&l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bits_do_not_depend_on_threads),
        cmocka_unit_test(idle_threads_sleep),
        cmocka_unit_test(pinned_workers_keep_to_a_core),
        cmocka_unit_test(layers_agree_with_ref),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
