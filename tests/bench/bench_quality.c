/* bench_quality MODEL TEXT... [--tokens 8192] [--prompts 20] [--first W] [--windows N] [--threads N]
 *               [--kv-type f16] [--kv-types 1]
 *
 * What the fast arithmetic costs in quality: the cpu backend as the daemon runs it (8-bit activations, f16 cache) beside
 * ref (f32 throughout) over the same tokens, in windows of 1,024, and over the same questions. ref takes minutes: --first
 * and --windows do a part. --kv-types 1: the cpu backend alone, with every type of keys and values beside f32; no answers. Lines:
 * bench,case,figure,value. At the end perplexities and the count of equal answers. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "quality.h"

struct options {
    const char *model, *kv_type, *files[16];
    uint32_t n_files, tokens, prompts, first, windows, threads, kv_types;
};

static bool parse(struct options *o, int argc, char **argv)
{
    *o = (struct options){.tokens = 8192,
                          .prompts = QUALITY_PROMPTS,
                          .windows = 1000,
                          .threads = 2,
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
    static const char *const types[] = {"f32", "f16", "bf16", "q8_0"};
    const struct quality_how how = {"cpu", "f32", o->threads};
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

int main(int argc, char **argv)
{
    struct options o;
    int32_t *ids;
    double nll[2] = {0, 0};
    uint32_t n_scored = 0, equal = 0;

    if (!parse(&o, argc, argv)) {
        fprintf(stderr,
                "usage: bench_quality MODEL.gguf TEXT... [--tokens N] [--prompts N] [--first W] "
                "[--windows N] [--threads N] [--kv-type TYPE] [--kv-types 1]\n");
        return 2;
    }
    const struct quality_how how[2] = {{"ref", "f32", 1}, {"cpu", o.kv_type, o.threads}};
    struct eh *h[2];
    uint32_t n = quality_tokens(o.model, o.files, o.tokens, &ids);
    if (o.kv_types != 0) {
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
