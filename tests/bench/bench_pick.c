/* bench_pick [--vocab 49152] [--rounds 40]: what it takes to pick a token out of one row of made-up logits (normal, three
 * nats wide, one of them well above the others), and to tell its log-probability. One thread, the best of the rounds.
 *
 *     pick,largest,us        temperature 0
 *     pick,all,us            temperature 0.8
 *     pick,top_p,us          the same, with top_p 0.95
 *     pick,top_k,us          with top_k 40
 *     pick,logprob,us        log-probability of a token; logprob 5: and the five likeliest
 *
 * CSV: bench,case,figure,value */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "clock.h"
#include "number.h"
#include "sampler.h"

struct pick {
    const char *name;
    float temperature, top_p;
    uint32_t top_k;
};

static void logits_make(float *l, uint32_t n)
{
    uint32_t x = 1;
    for (uint32_t i = 0; i < n; i++) {
        float sum = 0; /* of twelve uniform numbers: variance 1 */
        for (int k = 0; k < 12; k++) {
            x = x * 1664525u + 1013904223u;
            sum += (float)(x >> 8) * 0x1p-24f;
        }
        l[i] = (sum - 6) * 3;
    }
    l[n / 3] = 22;
}

static double pick_us(struct sampler *s, const struct pick *p, const float *l, uint32_t rounds)
{
    struct generate_options o = {.repeat_penalty = 1};
    uint64_t best = UINT64_MAX;
    o.temperature = p->temperature;
    o.top_p = p->top_p;
    o.top_k = p->top_k;
    for (uint32_t i = 0; i < rounds; i++) {
        uint64_t at = clock_ns();
        int32_t id = sampler_pick(s, &o, l, NULL, 0, i);
        at = clock_ns() - at;
        if (id < 0 || (uint32_t)id >= s->n_vocab)
            abort();
        best = at < best ? at : best;
    }
    return (double)best * 1e-3;
}

static double logprob_us(const struct sampler *s, const float *l, uint32_t top, uint32_t rounds)
{
    struct report_top t[5];
    uint64_t best = UINT64_MAX;
    for (uint32_t i = 0; i < rounds; i++) {
        uint64_t at = clock_ns();
        float lp = sampler_logprob(l, s->n_vocab, (int32_t)(i % s->n_vocab), top, t);
        at = clock_ns() - at;
        if (!(lp <= 0))
            abort();
        best = at < best ? at : best;
    }
    return (double)best * 1e-3;
}

int main(int argc, char **argv)
{
    static const struct pick picks[] = {{"largest", 0, 1, 0},
                                        {"all", 0.8f, 1, 0},
                                        {"top_p", 0.8f, 0.95f, 0},
                                        {"top_k", 0.8f, 1, 40}};
    uint32_t vocab = 49152, rounds = 40;
    struct sampler s;
    struct err e = {0};
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 < argc && strcmp(argv[i], "--vocab") == 0) {
            vocab = number_take("--vocab", argv[i + 1], 64, 1u << 24);
        } else if (i + 1 < argc && strcmp(argv[i], "--rounds") == 0) {
            rounds = number_take("--rounds", argv[i + 1], 1, 1000000);
        } else {
            fprintf(stderr, "usage: bench_pick [--vocab 64..16777216] [--rounds 1..1000000]\n");
            return 2;
        }
    }
    float *l = malloc(vocab * sizeof *l);
    if (l == NULL || sampler_open(&s, vocab, &e) < 0) {
        fprintf(stderr, "bench_pick: %s\n", l == NULL ? "no memory" : e.text);
        free(l);
        return 1;
    }
    logits_make(l, vocab);
    printf("bench,case,figure,value\n");
    for (size_t i = 0; i < ARRAY_LEN(picks); i++)
        printf("pick,%s,us,%.1f\n", picks[i].name, pick_us(&s, &picks[i], l, rounds));
    printf("pick,logprob,us,%.1f\n", logprob_us(&s, l, 0, rounds));
    printf("pick,logprob 5,us,%.1f\n", logprob_us(&s, l, 5, rounds));
    sampler_close(&s);
    free(l);
    return 0;
}
