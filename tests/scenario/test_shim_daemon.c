/* test_shim_daemon.c: the whole daemon on the GPU's backend, run on a CPU by the shim: texts under every policy
 * against the goldens, half-precision caches by what they keep, sessions that move between it and the CPU, and every way in
 * which a GPU lets a daemon down: it is not there, it is full, it dies. More of the same: test_shim_daemon_long.c. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <sys/wait.h>
#include "folders_test.h"
#include "kn.h"
#include "shim_daemon.h"

#define LOG_MAX 8192
#define EXIT_DEVICE 70

static void ids_make(int32_t *ids, size_t n, uint32_t seed)
{
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        ids[i] = 3 + (int32_t)(seed >> 16) % 280;
    }
}

/* Is there a real one? */
static bool has_gpu(void)
{
    struct kn_options o = {.backend = "cuda"};
    struct kn *kn = NULL;
    bool there = kn_open(&kn, &o, NULL, 0) == KN_OK;
    if (there)
        kn_close(&kn);
    return there;
}

static void texts_are_the_goldens(void **state)
{
    (void)state;
    shim_goldens("llama", "gen");
}

/* The device picks the tokens: by seed and stream alone, with log-probabilities or without, alone or not. */
static void picked_tokens_depend_on_nobody(void **state)
{
    (void)state;
    enum { N = 3 };
    int32_t ids[40];
    struct shim_answer alone;
    struct answer together[N] = {{0}};
    backcast_session *s[N];
    struct backcast_event ev;
    struct backcast_session_options so = answer_budget("none", 0);
    struct backcast_generate_options go = answer_options(8);
    unsigned left = N;
    so.kv_type = "f32";
    go.temperature = 2;
    go.top_k = 50;
    go.seed = 7;
    go.repeat_penalty = 1.3f;
    ids_make(ids, 40, 11);
    struct dh *d = shim_start("simt", "tiny-llama.gguf", NULL);
    backcast *c = dh_connect(d);
    shim_ask_how(c, &so, ids, 40, &go, &alone);
    assert_int_equal(alone.a.n_ids, 8);
    for (unsigned i = 0; i < N; i++) {
        go.n_logprobs = i == 1 ? 2 : -1;
        go.seed = i == 2 ? 8 : 7;
        assert_int_equal(backcast_session_open(c, &so, &s[i]), 0);
        assert_int_equal(backcast_prompt_ids(s[i], ids, 40, &go), 0);
    }
    while (left > 0 && backcast_next(c, &ev, 120000) == 1) {
        for (unsigned i = 0; i < N; i++)
            if (ev.session == s[i])
                answer_event(&together[i], &ev);
        left -= ev.type == BACKCAST_END;
    }
    assert_true(answer_equal(&alone.a, &together[0]));
    assert_true(answer_equal(&alone.a, &together[1]));
    assert_false(answer_equal(&alone.a, &together[2]));
    assert_int_equal(together[1].logprobs, 8);
    for (unsigned i = 0; i < N; i++)
        answer_free(&together[i]);
    answer_free(&alone.a);
    backcast_disconnect(&c);
    dh_stop(&d);
}

/* ---- half precision ---- */

static double overlap(const struct shim_answer *a, const struct shim_answer *b)
{
    uint32_t same = 0, k = 0;
    assert_true(a->n_first > 0);
    assert_int_equal(a->n_first, b->n_first);
    for (uint32_t i = 0; i < a->n_first; i++) {
        while (k < b->n_first && b->first[k] < a->first[i])
            k++;
        same += k < b->n_first && b->first[k] == a->first[i];
    }
    return (double)same / a->n_first;
}

/* One model, on the device and on the CPU. */
struct pair {
    struct dh *d[2];
    backcast *c[2];
};

static void pair_start(struct pair *p, const char *model)
{
    static const char *const backends[] = {"simt", "cpu"};
    for (int k = 0; k < 2; k++) {
        p->d[k] = shim_start(backends[k], model, NULL);
        p->c[k] = dh_connect(p->d[k]);
    }
}

static void pair_stop(struct pair *p)
{
    for (int k = 0; k < 2; k++) {
        backcast_disconnect(&p->c[k]);
        dh_stop(&p->d[k]);
    }
}

/* A prompt of 96 rows goes through half-precision products on the device, through integers on the CPU. Kept sets differ where
 * two scores lie within that error of each other: four rows of 48 at most. */
static void pair_keeps(const struct pair *p, const char *policy, const char *kv_type)
{
    static struct shim_answer a[2];
    int32_t ids[96];
    struct backcast_session_options so = answer_budget(policy, 64);
    so.kv_type = kv_type;
    so.keep_tokens = 48;
    so.frozen_tokens = 2;
    so.recent_tokens = 6;
    ids_make(ids, 96, 5);
    for (int k = 0; k < 2; k++) {
        shim_ask(p->c[k], &so, ids, 96, 8, &a[k]);
        assert_string_equal(a[k].a.reason, "length");
        assert_int_equal(a[k].a.n_ids, 8);
    }
    double part = overlap(&a[0], &a[1]);
    if (part < 44.0 / 48)
        fail_msg("%s, %s: %.1f %% of the kept rows are the same", kv_type, policy, 100 * part);
    for (int k = 0; k < 2; k++)
        answer_free(&a[k].a);
}

static void halves_keep_what_the_cpu_keeps(void **state)
{
    (void)state;
    static const char *const policies[] = {"counter_causal", "counter_causal_fast", "tova", "h2o"};
    struct pair p;
    pair_start(&p, "tiny-llama-q4_1.gguf");
    for (size_t i = 0; i < ARRAY_LEN(policies); i++)
        pair_keeps(&p, policies[i], "f16");
    pair_stop(&p);
}

/* Pages of bf16 and q8_0 hold the same bytes here as on the CPU, but for what products in halves change. */
static void other_kv_types_keep_what_the_cpu_keeps(void **state)
{
    (void)state;
    static const struct {
        const char *model, *kv_type; /* heads of q8_0 must have 32 values */
    } cases[] = {{"tiny-llama-q4_1.gguf", "bf16"}, {"tiny-qwen3.gguf", "q8_0"}};
    static struct shim_answer a[2];
    int32_t ids[40];
    ids_make(ids, 40, 5);
    for (size_t m = 0; m < ARRAY_LEN(cases); m++) {
        struct backcast_session_options whole = answer_budget("none", 0);
        struct pair p;
        whole.kv_type = cases[m].kv_type;
        pair_start(&p, cases[m].model);
        pair_keeps(&p, "counter_causal", cases[m].kv_type);
        pair_keeps(&p, "counter_causal_fast", cases[m].kv_type);
        for (int k = 0; k < 2; k++)
            shim_ask(p.c[k], &whole, ids, 40, 8, &a[k]);
        assert_true(answer_equal(&a[0].a, &a[1].a));
        for (int k = 0; k < 2; k++)
            answer_free(&a[k].a);
        pair_stop(&p);
    }
}

/* ---- from one backend to the other ---- */

enum { MOVED_IN = 60, MOVED_OUT = 12 };

static void moved_ask(backcast *c, backcast_session *s, uint32_t turn, struct answer *ret)
{
    struct backcast_generate_options go = answer_options(MOVED_OUT);
    int32_t ids[MOVED_IN];
    ids_make(ids, MOVED_IN, 21 + turn);
    if (backcast_prompt_ids(s, ids, MOVED_IN, &go) != 0)
        fail_msg("%s", backcast_last_error(c));
    answer_read(c, s, ret);
    assert_int_equal(ret->n_ids, MOVED_OUT);
}

static struct dh *moved_start(const char *backend, const char *model, const char *state_arg)
{
    const char *const more[] = {state_arg, NULL};
    return shim_start(backend, model, more);
}

/* A session that is saved on one backend and goes on on the other prunes and says what it would have said where it was: pages
 * have the same bytes, and caches of f32 leave no room for another text. */
static void moves(const char *from, const char *to, const char *state_arg,
                  const struct backcast_session_options *so, const char *model)
{
    struct answer a[3] = {{0}};
    struct backcast_session_info info;
    backcast_session *s;
    struct dh *d = moved_start(from, model, state_arg);
    backcast *c = dh_connect(d);
    assert_int_equal(backcast_session_open(c, so, &s), 0);
    moved_ask(c, s, 0, &a[0]);
    assert_true(a[0].prunes > 0);
    assert_int_equal(backcast_session_save(s, "moved"), 0);
    moved_ask(c, s, 1, &a[1]);
    backcast_disconnect(&c);
    dh_stop(&d);

    d = moved_start(to, model, state_arg);
    c = dh_connect(d);
    if (backcast_session_restore(c, "moved", &s) != 0)
        fail_msg("%s to %s, %s: %s", from, to, so->kv_type, backcast_last_error(c));
    backcast_session_info(s, &info);
    assert_string_equal(info.policy, so->policy);
    moved_ask(c, s, 1, &a[2]);
    assert_int_equal(a[2].first_stream, a[1].first_stream);
    assert_int_equal(a[2].prunes, a[1].prunes);
    assert_int_equal(a[2].dropped, a[1].dropped);
    if (!answer_equal(&a[1], &a[2]))
        fail_msg("%s to %s, %s, %s: another text", from, to, so->kv_type, so->policy);
    assert_int_equal(backcast_unsave(c, "moved"), 0);
    backcast_disconnect(&c);
    dh_stop(&d);
    for (int i = 0; i < 3; i++)
        answer_free(&a[i]);
}

static void a_saved_session_goes_on_on_the_other_backend(void **state)
{
    (void)state;
    char dir[FOLDER_PATH], arg[FOLDER_PATH + 16];
    struct backcast_session_options so = answer_budget("counter_causal_fast", 48);
    folder_root(dir, "moved");
    snprintf(arg, sizeof arg, "--state-dir=%s", dir);
    so.kv_type = "f32";
    so.keep_tokens = 40;
    moves("cpu", "simt", arg, &so, "tiny-llama.gguf");
    so.policy = "h2o"; /* has learnt something that goes along */
    moves("simt", "cpu", arg, &so, "tiny-llama.gguf");
    folder_drop(dir);
}

/* ---- no GPU ---- */

static void a_gpu_that_is_not_there_is_an_error(void **state)
{
    (void)state;
    static const char *const args[] = {"--backend=cuda", "--model", TEST_VECTORS "/tiny-llama.gguf",
                                       NULL};
    char log[LOG_MAX];
    if (has_gpu())
        skip();
    assert_int_equal(dh_start_fails(args, log, sizeof log), 1);
    if (strstr(log, "error: daemon: ") == NULL ||
        strstr(log, "backend cuda: no usable GPU: ") == NULL)
        fail_msg("%s", log);
}

static void auto_says_why_it_is_not_the_gpu(void **state)
{
    (void)state;
    struct dh *d = shim_start("auto", "tiny-llama.gguf", NULL);
    if (has_gpu())
        assert_true(dh_log_has(d, " of weights on cuda sm_"));
    else
        assert_true(dh_log_has(d, " runs the kernels: cuda: no usable GPU: "));
    dh_stop(&d);
}

/* ---- a GPU that is full ---- */

/* The first page of a second pool has no memory, once: that request alone ends, with the reason. */
static void a_full_device_is_one_requests_error(void **state)
{
    (void)state;
    static const char *const args[] = {"--inject=cuMemCreate:2:2:4", NULL};
    static struct shim_answer a;
    int32_t ids[40];
    struct backcast_session_options plain = answer_budget("sliding_window", 128),
                                    hidden = answer_budget("counter_causal_fast", 128);
    ids_make(ids, 40, 9);
    struct dh *d = shim_start("simt", "tiny-llama.gguf", args);
    backcast *c = dh_connect(d);
    for (int round = 0; round < 3; round++) {
        shim_ask(c, round == 1 ? &hidden : &plain, ids, 40, 3, &a);
        if (round == 1) {
            assert_int_equal(a.a.code, BACKCAST_ENOMEM);
            shim_says(a.a.error, "the memory of device %s is full");
        } else {
            assert_string_equal(a.a.reason, "length");
            assert_int_equal(a.a.n_ids, 3);
        }
        answer_free(&a.a);
    }
    shim_ask(c, &hidden, ids, 40, 3, &a); /* there is memory again */
    assert_string_equal(a.a.reason, "length");
    answer_free(&a.a);
    backcast_disconnect(&c);
    dh_stop(&d);
}

/* ---- a GPU that dies ---- */

static unsigned log_errors(const struct dh *d)
{
    char line[1200];
    unsigned n = 0;
    FILE *f = fopen(d->log, "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f) != NULL)
        n += strncmp(line, "error: ", 7) == 0;
    fclose(f);
    return n;
}

/* The requests under way end with the reason, one line says it, and the process is gone with code 70. */
static void a_dead_device_ends_the_process(void **state)
{
    (void)state;
    static const char *const injects[] = {"--inject=launch:260", "--inject=cudaMemcpyAsync:80",
                                          "--inject=cudaStreamQuery:9:700"};
    static const char *const says[] = {"(719)", "cudaMemcpyAsync: ", "cudaStreamQuery: "};
    for (size_t i = 0; i < ARRAY_LEN(injects); i++) {
        const char *args[] = {injects[i], NULL};
        static struct shim_answer a;
        int32_t ids[40];
        struct backcast_session_options so = answer_budget("counter_causal", 64);
        ids_make(ids, 40, 9);
        struct dh *d = shim_start("simt", "tiny-llama.gguf", args);
        backcast *c = dh_connect(d);
        shim_ask(c, &so, ids, 40, 4000, &a);
        assert_string_equal(a.a.reason, "error");
        assert_int_equal(a.a.code, BACKCAST_EDEVICE);
        shim_says(a.a.error, "device %s failed");
        answer_free(&a.a);
        int status = dh_wait(d, 20000);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), EXIT_DEVICE);
        assert_true(dh_log_has(d, "error: daemon: the device failed: "));
        assert_true(dh_log_has(d, says[i]));
        assert_int_equal(log_errors(d), 1);
        backcast_disconnect(&c);
        dh_free(&d);
    }
}

/* A call that never returns: nobody can be told, but the process does not stay. Until then the loop goes on: it answers others. */
static void a_hung_device_ends_the_process(void **state)
{
    (void)state;
    static const char *const injects[] = {"--inject=launch:260:hang",
                                          "--inject=cudaEventSynchronize:200:hang"};
    for (size_t i = 0; i < ARRAY_LEN(injects); i++) {
        const char *args[] = {injects[i], "--device-timeout=2", NULL};
        int32_t ids[40];
        struct backcast_session_options so = answer_budget("counter_causal", 64);
        struct backcast_generate_options go = answer_options(4000);
        struct backcast_event ev;
        backcast_session *s;
        ids_make(ids, 40, 9);
        struct dh *d = shim_start("simt", "tiny-llama.gguf", args);
        backcast *c = dh_connect(d);
        assert_int_equal(backcast_session_open(c, &so, &s), 0);
        assert_int_equal(backcast_prompt_ids(s, ids, 40, &go), 0);
        while (backcast_next(c, &ev, 60000) == 1 && ev.type != BACKCAST_END)
            ;
        int status = dh_wait(d, 60000);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), EXIT_DEVICE);
        assert_true(dh_log_has(d, "error: daemon: the device failed: no answer for 2 s"));
        assert_int_equal(log_errors(d), 1);
        backcast_disconnect(&c);
        dh_free(&d);
    }
}

static void a_device_that_dies_while_weights_load(void **state)
{
    (void)state;
    const char *const args[] = {shim_arg(), "--inject=cudaMemcpyAsync:7", "--model",
                                TEST_VECTORS "/tiny-llama.gguf", NULL};
    char log[LOG_MAX];
    int code = dh_start_fails(args, log, sizeof log);
    assert_int_equal(code, EXIT_DEVICE);
    shim_says(log, "device %s failed while tensor ");
}

static void a_device_that_hangs_while_weights_load(void **state)
{
    (void)state;
    const char *const args[] = {shim_arg(), "--inject=cudaMemcpyAsync:7:hang", "--device-timeout=2",
                                "--model",  TEST_VECTORS "/tiny-llama.gguf",   NULL};
    char log[LOG_MAX];
    assert_int_equal(dh_start_fails(args, log, sizeof log), EXIT_DEVICE);
    if (strstr(log, "error: daemon: the device failed: no answer for 2 s") == NULL)
        fail_msg("%s", log);
}

static void an_injection_that_says_nothing_is_refused(void **state)
{
    (void)state;
    const char *const args[] = {shim_arg(), "--inject=launch", "--model",
                                TEST_VECTORS "/tiny-llama.gguf", NULL};
    char log[LOG_MAX];
    assert_int_equal(dh_start_fails(args, log, sizeof log), 1);
    if (strstr(log, "inject \"launch\": must be ") == NULL)
        fail_msg("%s", log);
}

int main(int argc, char **argv)
{
    shim_use(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_gpu_that_is_not_there_is_an_error),
        cmocka_unit_test(auto_says_why_it_is_not_the_gpu),
    };
    const struct CMUnitTest on_shim[] = {
        cmocka_unit_test(texts_are_the_goldens),
        cmocka_unit_test(picked_tokens_depend_on_nobody),
        cmocka_unit_test(halves_keep_what_the_cpu_keeps),
        cmocka_unit_test(other_kv_types_keep_what_the_cpu_keeps),
        cmocka_unit_test(a_saved_session_goes_on_on_the_other_backend),
        cmocka_unit_test(a_full_device_is_one_requests_error),
        cmocka_unit_test(a_dead_device_ends_the_process),
        cmocka_unit_test(a_hung_device_ends_the_process),
        cmocka_unit_test(a_device_that_dies_while_weights_load),
        cmocka_unit_test(a_device_that_hangs_while_weights_load),
        cmocka_unit_test(an_injection_that_says_nothing_is_refused),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return failed + (shim_there() ? cmocka_run_group_tests(on_shim, NULL, NULL) : 0);
}
