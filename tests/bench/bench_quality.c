/* bench_quality MODEL TEXT... [--tokens 8192] [--prompts 20] [--first W] [--windows N] [--threads N]
 *               [--activations 8|16] [--kv-type f16] [--kv-types 1] [--positions CONTEXT [--budget 512] [--policy NAME]]
 *
 * What the fast arithmetic costs in quality: the cpu backend as the daemon runs it (8-bit activations or 16, f16 cache) beside
 * ref (f32 throughout) over the same tokens, in windows of 1,024, and over the same questions. ref takes minutes: --first
 * and --windows do a part. --kv-types 1: the cpu backend alone, with every type of keys and values beside f32; no answers.
 * --positions CONTEXT: the tokens as one text under a budget, with positions kept and with the cache renumbered as if the
 * model had been trained on CONTEXT tokens. Lines: bench,case,figure,value. At the end perplexities and the count of equal answers. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "core.h"
#include "quality.h"

struct options {
    const char *model, *kv_type, *policy, *files[16];
    uint32_t n_files, tokens, prompts, first, windows, threads, kv_types, positions, budget,
        activations;
};

static bool parse(struct options *o, int argc, char **argv)
{
    *o = (struct options){.tokens = 8192,
                          .prompts = QUALITY_PROMPTS,
                          .windows = 1000,
                          .threads = 2,
                          .activations = KN_ACTIVATIONS,
                          .budget = 512,
                          .policy = "counter_causal_fast",
                          .kv_type = "f16"};
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i];
        if (a[0] != '-' && o->model == NULL)
            o->model = a;
        else if (a[0] != '-' && o->n_files < 15)
            o->files[o->n_files++] = a;
        else if (a[0] != '-' || i + 1 == argc)
            return false;
        else {
            uint32_t n = (uint32_t)strtoul(argv[++i], NULL, 10);
            if (strcmp(a, "--kv-type") == 0)
                o->kv_type = argv[i];
            else if (strcmp(a, "--policy") == 0)
                o->policy = argv[i];
            else if (strcmp(a, "--positions") == 0)
                o->positions = n;
            else if (strcmp(a, "--budget") == 0)
                o->budget = n;
            else if (strcmp(a, "--tokens") == 0)
                o->tokens = n;
            else if (strcmp(a, "--prompts") == 0)
                o->prompts = BC_MIN(n, QUALITY_PROMPTS);
            else if (strcmp(a, "--first") == 0)
                o->first = n;
            else if (strcmp(a, "--windows") == 0)
                o->windows = n;
            else if (strcmp(a, "--threads") == 0)
                o->threads = n;
            else if (strcmp(a, "--activations") == 0)
                o->activations = n;
            else if (strcmp(a, "--kv-types") == 0)
                o->kv_types = n;
            else
                return false;
        }
    }
    return o->model != NULL && o->n_files > 0 && o->tokens >= 2;
}

/* Perplexity with each type of keys and values, on the cpu backend. */
static void kv_types_run(const struct options *o, const int32_t *ids, uint32_t n)
{
    static const char *const types[] = {"f32", "f16", "bf16", "q8_0", "q8_q4"};
    const struct quality_how how = {"cpu", "f32", o->threads, o->activations};
    struct eh *h = quality_open(o->model, &how);
    double first = 0;

    for (size_t k = 0; k < ARRAY_LEN(types); k++) {
        double nll = 0;
        uint32_t scored = 0;
        for (uint32_t w = 0; w < o->windows && w * QUALITY_WINDOW + 1 < n; w++) {
            uint32_t len = BC_MIN(QUALITY_WINDOW, n - w * QUALITY_WINDOW);
            nll += quality_nll(h, types[k], ids + (size_t)w * QUALITY_WINDOW, len);
            scored += len - 1;
        }
        double p = exp(nll / scored);
        first = k == 0 ? p : first;
        printf("quality,%s,perplexity,%.4f\nquality,%s,beside_f32_percent,%+.3f\n", types[k], p,
               types[k], 100 * (p / first - 1));
        fflush(stdout);
    }
    eh_close(&h);
}

/* log p of tokens 1 .. n - 1 of one text in a session under the budget, into ret[1 .. n - 1]. */
static void stream_logprobs(struct eh *h, const struct options *o, const char *positions,
                            const int32_t *ids, uint32_t n, double *ret)
{
    struct generate_options g = eh_greedy(0);
    g.n_logprobs = 0;
    g.prompt_logprobs = true;
    uint64_t s = eh_session(h, &(struct eh_ask){.policy = o->policy,
                                                .kv_type = o->kv_type,
                                                .positions = positions,
                                                .frozen = EVICT_FROZEN_AUTO,
                                                .budget_tokens = o->budget});
    eh_ids(h, s, ids, n, &g);
    eh_run_to_end(h, s);
    const struct eh_stream *st = eh_stream(h, s);
    if (st->n_logprobs != n - 1) /* keep: the text is longer than the model's own context */
        fail_msg("%s: %u of %u tokens: give --tokens less", positions, st->n_logprobs + 1, n);
    for (uint32_t i = 0; i < n - 1; i++)
        ret[i + 1] = (double)st->logprobs[i].u.logprob.logprob;
    printf("quality,%s,prunes,%u\nquality,%s,renumberings,%u\n", positions, st->n_prunes, positions,
           st->n_rerotated);
    eh_close_session(h, s);
}

static double mean(const double *v, uint32_t first, uint32_t end)
{
    double sum = 0;
    for (uint32_t i = first; i < end; i++)
        sum += v[i];
    return sum / (end - first);
}

/* What renumbering costs: the same tokens, before the first one and behind it. The model's trained context is what the
 * engine reads in the file; here it is told otherwise, for the second session. */
static void positions_run(const struct options *o, const int32_t *ids, uint32_t n)
{
    static const char *const names[] = {"keep", "rerotate"};
    const struct quality_how how = {"cpu", o->kv_type, o->threads, o->activations};
    struct eh *h = quality_open(o->model, &how);
    double *p[2], squares = 0;

    for (int k = 0; k < 2; k++) {
        assert_non_null(p[k] = calloc(n, sizeof(double)));
        if (k == 1)
            h->en->default_model->info.context_train = o->positions;
        stream_logprobs(h, o, names[k], ids, n, p[k]);
        printf("quality,%s,perplexity_before,%.4f\nquality,%s,perplexity_behind,%.4f\n", names[k],
               exp(-mean(p[k], 1, o->positions)), names[k], exp(-mean(p[k], o->positions, n)));
        fflush(stdout);
    }
    for (uint32_t i = 0; i < n; i++)
        p[0][i] -= p[1][i];
    double m = mean(p[0], o->positions, n);
    for (uint32_t i = o->positions; i < n; i++)
        squares += (p[0][i] - m) * (p[0][i] - m);
    printf(
        "# %u tokens; behind the first renumbering keep is better by %.4f +- %.4f nats a token\n",
        n, m, sqrt(squares) / (n - o->positions));
    free(p[0]);
    free(p[1]);
    eh_close(&h);
}

int main(int argc, char **argv)
{
    struct options o;
    int32_t *ids;
    double nll[2] = {0, 0};
    uint32_t n_scored = 0, equal = 0;

    if (!parse(&o, argc, argv)) {
        fprintf(stderr,
                "usage: bench_quality MODEL.gguf TEXT... [--tokens N] [--prompts N] [--first W] "
                "[--windows N] [--threads N] [--activations 8|16] [--kv-type TYPE] [--kv-types 1] "
                "[--positions CONTEXT [--budget N] [--policy NAME]]\n");
        return 2;
    }
    const struct quality_how how[2] = {{"ref", "f32", 1, 0},
                                       {"cpu", o.kv_type, o.threads, o.activations}};
    struct eh *h[2];
    uint32_t n = quality_tokens(o.model, o.files, o.tokens, &ids);
    if (o.positions >= n) {
        fprintf(stderr, "bench_quality: --positions %u: the text has %u tokens\n", o.positions, n);
        return 2;
    }
    if (o.kv_types != 0 || o.positions > 1) {
        if (o.positions > 1)
            positions_run(&o, ids, n);
        else
            kv_types_run(&o, ids, n);
        free(ids);
        return 0;
    }
    for (int k = 0; k < 2; k++)
        h[k] = quality_open(o.model, &how[k]);
    for (uint32_t w = o.first; w < o.first + o.windows && w * QUALITY_WINDOW + 1 < n; w++) {
        uint32_t len = BC_MIN(QUALITY_WINDOW, n - w * QUALITY_WINDOW);
        n_scored += len - 1;
        printf("quality,window %u,tokens,%u\n", w, len - 1);
        for (int k = 0; k < 2; k++) {
            double v = quality_nll(h[k], how[k].kv_type, ids + (size_t)w * QUALITY_WINDOW, len);
            nll[k] += v;
            printf("quality,window %u,nll_%s_%s,%.6f\n", w, how[k].backend, how[k].kv_type, v);
        }
        fflush(stdout);
    }
    for (uint32_t i = 0; i < o.prompts; i++) {
        struct quality_answer a[2];
        for (int k = 0; k < 2; k++)
            quality_answer(h[k], how[k].kv_type, i, &a[k]);
        uint32_t same = quality_common(&a[0], &a[1]);
        equal += quality_equal(&a[0], &a[1]);
        printf("quality,question %u,same_tokens,%u\nquality,question %u,of_tokens,%u\n", i, same, i,
               a[0].n);
        if (same < a[0].n) /* how nearly ref itself would have said something else */
            printf("quality,question %u,lead_nats,%.4f\n", i, (double)a[0].lead[same]);
        fflush(stdout);
    }
    if (n_scored > 0) {
        double p[2] = {exp(nll[0] / n_scored), exp(nll[1] / n_scored)};
        printf("# perplexity of %u tokens: ref %.4f, cpu %.4f: %+.3f %%\n", n_scored, p[0], p[1],
               100 * (p[1] / p[0] - 1));
    }
    if (o.prompts > 0)
        printf("# the same first %u tokens on %u of %u questions\n", QUALITY_ANSWER, equal,
               o.prompts);
    for (int k = 0; k < 2; k++)
        eh_close(&h[k]);
    free(ids);
    return 0;
}
