/* serve.h: what the benches of a whole daemon share: prompts that no two sessions begin alike, samples, medians, and
 * events of many sessions told apart. Failures end the program with a sentence. */
#ifndef BACKCAST_BENCH_SERVE_H
#define BACKCAST_BENCH_SERVE_H
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "backcast.h"
#include "base.h"
#include "clock.h"

#define SERVE_SESSIONS_MAX 32u
#define SERVE_SAMPLES_MAX 65536u

/* Values that a median or a quantile is wanted of. */
struct samples {
    uint32_t n;
    double v[SERVE_SAMPLES_MAX];
};

static inline void sample(struct samples *s, double v)
{
    if (s->n < SERVE_SAMPLES_MAX)
        s->v[s->n++] = v;
}

static inline int samples_order(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* q in 0..1; sorts. 0 without samples. */
static inline double samples_quantile(struct samples *s, double q)
{
    if (s->n == 0)
        return 0;
    qsort(s->v, s->n, sizeof(double), samples_order);
    return s->v[(uint32_t)(q * (s->n - 1) + 0.5)];
}

_Noreturn static inline void serve_die(const backcast *c, const char *what)
{
    fprintf(stderr, "%s: %s\n", what, backcast_last_error(c));
    exit(1);
}

/* n made-up ids: another beginning at each call. */
static inline void serve_prompt(int32_t *ids, uint32_t n)
{
    static uint32_t turn;
    uint32_t x = ++turn * 2654435761u;
    for (uint32_t i = 0; i < n; i++) {
        x = x * 1664525u + 1013904223u;
        ids[i] = (int32_t)(300 + (x >> 8) % 20000);
    }
}

static inline backcast_session *serve_open(backcast *c, const char *policy, uint32_t budget)
{
    struct backcast_session_options o;
    backcast_session *s;
    backcast_session_options_init(&o);
    o.policy = policy;
    o.budget_tokens = budget;
    if (backcast_session_open(c, &o, &s) < 0)
        serve_die(c, "session");
    return s;
}

static inline void serve_ask(backcast *c, backcast_session *s, uint32_t n_prompt, uint32_t n_new)
{
    struct backcast_generate_options o;
    int32_t ids[4096];
    backcast_generate_options_init(&o);
    o.max_tokens = n_new;
    o.ignore_end = 1;
    serve_prompt(ids, n_prompt);
    if (backcast_prompt_ids(s, ids, n_prompt, &o) < 0)
        serve_die(c, "prompt");
}

static inline void serve_next(backcast *c, struct backcast_event *ev)
{
    if (backcast_next(c, ev, 60000) <= 0)
        serve_die(c, "no event for a minute");
    if (ev->type == BACKCAST_END && strcmp(ev->end.reason, "length") != 0) {
        fprintf(stderr, "a request ended early: %s %s\n", ev->end.reason, ev->end.text);
        exit(1);
    }
}

static inline void serve_finish(backcast *c, backcast_session *s)
{
    struct backcast_event ev;
    do
        serve_next(c, &ev);
    while (ev.type != BACKCAST_END || ev.session != s);
}
#endif
