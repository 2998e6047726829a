/* cmd_bench.c: bench: what this machine does with a model, measured from where a user stands.
 *
 *   one private daemon, one connection; a figure is the median of the rounds, a round takes every figure once
 *
 *     prefill_N_tps      N tokens / (from the call to the first token)
 *     decode_N_tps       tokens a second behind N cached ones, one session alone; no N: an empty cache
 *     decode_8_tps       tokens a second of eight sessions together, while all eight answer
 *     refresh_F_S_N_ms   one refresh of N cached tokens, as the daemon's prune event says:
 *                        F full | fast (all layers, the last one), S logit | logprob
 *
 *   a session to be refreshed is read once; a round prunes it by one token, so that all N - 1 rows that have a
 *   future are scored, and puts one token back:
 *
 *     N cached --prune to N - 1: micros--> N - 1 cached --one more--> N cached
 *
 * Prompts are a text's own tokens, as the daemon tells them; no two begin alike, so that no session finds its
 * prefix in another's cache. Prefill and decode run under the default policy (its cache holds more than K
 * and V), with a budget that is not reached. */
#include <stdlib.h>
#include <string.h>
#include "cli.h"
#include "clock.h"
#include "json.h"
#include "private.h"

#define ROUNDS_MAX 100u
#define STEPS 64u           /* decoded tokens that are timed */
#define TOGETHER 8u         /* sessions */
#define STEPS_TOGETHER 48u  /* tokens of each */
#define PROMPT_TOGETHER 16u /* tokens */
#define LONGEST 2048u       /* cached tokens of a figure */
#define ROOM 256u           /* tokens of a budget beyond what is cached */
#define IDS_MAX 512u

static const char sample[] =
    "The harbour office opens at six, an hour before the first ferry. Whoever has the early turn "
    "lights the "
    "stove, reads the tide gauge and writes three figures into a green book: the height of the "
    "water, the "
    "wind, and the number of boats that lie at the north wall. Nobody remembers who asked for the "
    "third "
    "figure, but it has been written down every morning since the spring of 1931, and when a "
    "surveyor came "
    "to ask whether the wall should be mended it was the only record of how much the wall was "
    "used. He sat "
    "with the books for two days, drank a great deal of tea, and drew a curve that fell for forty "
    "years and "
    "then rose. The council paid for new stones. A copy of the curve hangs beside the stove today; "
    "the ink "
    "has gone brown, and somebody has added the years since with a pencil. Children who wait for "
    "the ferry "
    "are told that each point of it is a morning on which somebody counted.";

enum figure {
    PREFILL_512,
    PREFILL_2048,
    DECODE,
    DECODE_512,
    DECODE_2048,
    REFRESH, /* the first of eight: in the order of the variants below */
    DECODE_8 = REFRESH + 8,
    N_FIGURES
};

static const struct figure_row {
    const char *key, *unit, *what;
} figures[N_FIGURES] = {
    {"prefill_512_tps", "tokens/s", "prefill of 512 tokens"},
    {"prefill_2048_tps", "tokens/s", "prefill of 2,048 tokens"},
    {"decode_tps", "tokens/s", "decode, empty cache"},
    {"decode_512_tps", "tokens/s", "decode behind 512 tokens"},
    {"decode_2048_tps", "tokens/s", "decode behind 2,048 tokens"},
    {"refresh_full_logit_512_ms", "ms", "full refresh, logit, 512 tokens"},
    {"refresh_full_logit_2048_ms", "ms", "full refresh, logit, 2,048 tokens"},
    {"refresh_full_logprob_512_ms", "ms", "full refresh, logprob, 512 tokens"},
    {"refresh_full_logprob_2048_ms", "ms", "full refresh, logprob, 2,048 tokens"},
    {"refresh_fast_logit_512_ms", "ms", "fast refresh, logit, 512 tokens"},
    {"refresh_fast_logit_2048_ms", "ms", "fast refresh, logit, 2,048 tokens"},
    {"refresh_fast_logprob_512_ms", "ms", "fast refresh, logprob, 512 tokens"},
    {"refresh_fast_logprob_2048_ms", "ms", "fast refresh, logprob, 2,048 tokens"},
    {"decode_8_tps", "tokens/s", "8 sessions together"},
};

struct bench {
    const struct args *a;
    backcast *c;
    uint32_t rounds, prompts; /* prompts: made so far */
    int32_t ids[IDS_MAX];     /* the sample's */
    uint32_t n_ids;
    backcast_session *refreshed[8]; /* NULL: not measured */
    uint32_t n_samples[N_FIGURES];
    double samples[N_FIGURES][ROUNDS_MAX];
};

/* A request as it was seen from here. */
struct seen {
    uint64_t sent_us, first_us, end_us; /* first_us 0: no token came before the END */
    uint32_t n_first, tokens_out;       /* n_first: tokens of the first event */
    uint64_t prefill_us, decode_us;     /* the daemon's own account */
};

static bool wanted(const struct bench *b, enum figure f)
{
    return b->a->only == NULL || strstr(figures[f].key, b->a->only) != NULL;
}

static bool wanted_any(const struct bench *b)
{
    for (uint32_t f = 0; f < N_FIGURES; f++)
        if (wanted(b, (enum figure)f))
            return true;
    return false;
}

static void sample_add(struct bench *b, enum figure f, double v)
{
    if (wanted(b, f))
        b->samples[f][b->n_samples[f]++] = v;
}

static int failed(const struct bench *b, int rc, const char *doing)
{
    say_failure(b->c, rc, doing);
    return CLI_FAILED;
}

/* ---- requests */

/* The next event. CLI_FINE, or what the command ends with. */
static int event_next(const struct bench *b, struct backcast_event *ret)
{
    for (;;) {
        int rc = backcast_next(b->c, ret, 1000);
        if (interrupt_count() > 0)
            return CLI_INTERRUPTED;
        if (rc < 0)
            return failed(b, rc, "bench");
        if (rc == 0)
            continue;
        if (ret->type == BACKCAST_END && strcmp(ret->end.reason, "length") != 0) {
            say("bench: a request ended early: %s %s", ret->end.reason, ret->end.text);
            return CLI_FAILED;
        }
        return CLI_FINE;
    }
}

/* n tokens that no other prompt of this run begins with. Returns ids, which must have room for n. */
static const int32_t *prompt_make(struct bench *b, int32_t *ids, uint32_t n)
{
    uint32_t k = b->prompts++;
    for (uint32_t i = 0; i < n; i++)
        ids[i] = b->ids[(i + k) % b->n_ids];
    ids[0] = b->ids[k % b->n_ids];
    if (n > 1)
        ids[1] = b->ids[k / b->n_ids % b->n_ids];
    return ids;
}

static struct backcast_generate_options answer_of(uint32_t max_tokens)
{
    struct backcast_generate_options opt;
    backcast_generate_options_init(&opt);
    opt.max_tokens = max_tokens;
    opt.ignore_end = 1;
    return opt;
}

static int session_open(struct bench *b, const char *policy, const char *score, uint32_t tokens,
                        backcast_session **ret)
{
    struct backcast_session_options opt;

    backcast_session_options_init(&opt);
    opt.policy = policy;
    opt.score = score;
    opt.budget_tokens = tokens + ROOM;
    opt.recent_tokens = opt.frozen_tokens = 0;
    int rc = backcast_session_open(b->c, &opt, ret);
    return rc < 0 ? failed(b, rc, "session") : CLI_FINE;
}

/* A prompt of n tokens, an answer of max_tokens, to its END. */
static int ask(struct bench *b, backcast_session *s, uint32_t n, uint32_t max_tokens,
               struct seen *ret)
{
    struct backcast_generate_options opt = answer_of(max_tokens);
    struct backcast_event ev = {0};
    int32_t ids[LONGEST];

    prompt_make(b, ids, n);
    *ret = (struct seen){.sent_us = clock_us()};
    int rc = backcast_prompt_ids(s, ids, n, &opt);
    if (rc < 0)
        return failed(b, rc, "prompt");
    while (ev.type != BACKCAST_END) {
        rc = event_next(b, &ev);
        if (rc != CLI_FINE)
            return rc;
        if (ev.type == BACKCAST_TEXT && ret->first_us == 0) {
            ret->first_us = clock_us();
            ret->n_first = (uint32_t)ev.text.n_ids;
        }
    }
    ret->end_us = clock_us();
    ret->tokens_out = ev.end.tokens_out;
    ret->prefill_us = ev.end.prefill_micros;
    ret->decode_us = ev.end.decode_micros;
    return CLI_FINE;
}

/* The sample's tokens: the daemon names each with its log-probability. */
static int ids_learn(struct bench *b)
{
    struct backcast_generate_options opt = answer_of(0);
    struct backcast_event ev = {0};
    backcast_session *s = NULL;

    opt.n_logprobs = 0;
    opt.prompt_logprobs = 1;
    int rc = session_open(b, NULL, NULL, LONGEST, &s);
    if (rc != CLI_FINE)
        return rc;
    rc = backcast_prompt(s, sample, strlen(sample), &opt);
    if (rc < 0)
        return failed(b, rc, "sample");
    while (ev.type != BACKCAST_END) {
        rc = event_next(b, &ev);
        if (rc != CLI_FINE)
            return rc;
        if (ev.type == BACKCAST_LOGPROB && ev.logprob.prompt && b->n_ids < IDS_MAX)
            b->ids[b->n_ids++] = ev.logprob.id;
    }
    backcast_session_close(&s);
    if (b->n_ids < 2) {
        say("bench: the model reads the sample as %u tokens", b->n_ids);
        return CLI_FAILED;
    }
    return CLI_FINE;
}

/* ---- prefill and decode */

/* What came after the first event, a second. Where characters are cut across tokens the first event may be
 * late, or come at the END: then the daemon's own times stand. */
static double decode_rate(const struct seen *r)
{
    if (r->first_us == 0 || r->n_first != 1 || r->end_us <= r->first_us)
        return (double)(r->tokens_out - 1) * 1e6 / (double)BC_MAX(r->decode_us, 1);
    return (double)(r->tokens_out - 1) * 1e6 / (double)(r->end_us - r->first_us);
}

static double prefill_rate(const struct seen *r, uint32_t n)
{
    uint64_t us = r->first_us != 0 && r->n_first == 1 ? r->first_us - r->sent_us : r->prefill_us;
    return (double)n * 1e6 / (double)BC_MAX(us, 1);
}

/* One session reads n tokens and answers. prefill N_FIGURES: none. */
static int alone(struct bench *b, uint32_t n, enum figure prefill, enum figure decode)
{
    backcast_session *s = NULL;
    struct seen r;

    if (!wanted(b, decode) && (prefill == N_FIGURES || !wanted(b, prefill)))
        return CLI_FINE;
    int rc = session_open(b, NULL, NULL, n, &s);
    if (rc == CLI_FINE)
        rc = ask(b, s, n, wanted(b, decode) ? STEPS + 1 : 1, &r);
    if (rc != CLI_FINE)
        return rc;
    if (prefill != N_FIGURES)
        sample_add(b, prefill, prefill_rate(&r, n));
    if (wanted(b, decode))
        sample_add(b, decode, decode_rate(&r));
    backcast_session_close(&s);
    return CLI_FINE;
}

/* Eight at once. Tokens count from the event with which the last of them has begun to the first END. */
static int follow_together(struct bench *b, backcast_session *const *s)
{
    struct backcast_event ev;
    bool begun[TOGETHER] = {false};
    uint32_t n_begun = 0, n_ended = 0, tokens = 0, all = 0;
    uint64_t start = 0, stop = 0, decode_us = 1;

    while (n_ended < TOGETHER) {
        int rc = event_next(b, &ev);
        if (rc != CLI_FINE)
            return rc;
        uint64_t now = clock_us();
        if (ev.type == BACKCAST_TEXT) {
            if (n_begun == TOGETHER && n_ended == 0)
                tokens += (uint32_t)ev.text.n_ids;
            for (uint32_t i = 0; i < TOGETHER; i++)
                if (s[i] == ev.session && !begun[i]) {
                    begun[i] = true;
                    if (++n_begun == TOGETHER)
                        start = now;
                }
        } else if (ev.type == BACKCAST_END) {
            if (n_ended++ == 0)
                stop = now;
            all += ev.end.tokens_out - 1;
            decode_us = BC_MAX(decode_us, ev.end.decode_micros);
        }
    }
    if (start != 0 && stop > start && tokens >= TOGETHER * STEPS_TOGETHER / 2)
        sample_add(b, DECODE_8, tokens * 1e6 / (double)(stop - start));
    else /* see decode_rate */
        sample_add(b, DECODE_8, all * 1e6 / (double)decode_us);
    return CLI_FINE;
}

static int together(struct bench *b)
{
    backcast_session *s[TOGETHER] = {NULL};
    struct backcast_generate_options opt = answer_of(STEPS_TOGETHER + 1);
    int32_t ids[PROMPT_TOGETHER];
    int rc = CLI_FINE;

    if (!wanted(b, DECODE_8))
        return CLI_FINE;
    for (uint32_t i = 0; i < TOGETHER && rc == CLI_FINE; i++)
        rc = session_open(b, NULL, NULL, PROMPT_TOGETHER, &s[i]);
    for (uint32_t i = 0; i < TOGETHER && rc == CLI_FINE; i++) {
        int err =
            backcast_prompt_ids(s[i], prompt_make(b, ids, PROMPT_TOGETHER), PROMPT_TOGETHER, &opt);
        rc = err < 0 ? failed(b, err, "prompt") : CLI_FINE;
    }
    if (rc == CLI_FINE)
        rc = follow_together(b, s);
    for (uint32_t i = 0; i < TOGETHER; i++)
        backcast_session_close(&s[i]);
    return rc;
}

/* ---- refreshes */

static uint32_t refresh_tokens(uint32_t variant)
{
    return variant % 2 == 0 ? 512 : LONGEST;
}

/* Reads the prompts of the sessions that the rounds refresh. */
static int refresh_open(struct bench *b)
{
    struct seen r;
    int rc = CLI_FINE;

    for (uint32_t i = 0; i < 8 && rc == CLI_FINE; i++) {
        if (!wanted(b, (enum figure)(REFRESH + i)))
            continue;
        uint32_t n = refresh_tokens(i);
        rc = session_open(b, i < 4 ? "counter_causal" : "counter_causal_fast",
                          i % 4 < 2 ? "logit" : "logprob", n, &b->refreshed[i]);
        if (rc == CLI_FINE)
            rc = ask(b, b->refreshed[i], n, 0, &r);
    }
    return rc;
}

static int refresh(struct bench *b, uint32_t variant)
{
    backcast_session *s = b->refreshed[variant];
    struct backcast_event ev = {0};
    struct seen r;

    if (s == NULL)
        return CLI_FINE;
    int rc = backcast_session_prune(s, refresh_tokens(variant) - 1);
    if (rc < 0)
        return failed(b, rc, "prune");
    while (ev.type != BACKCAST_PRUNED) {
        rc = event_next(b, &ev);
        if (rc != CLI_FINE)
            return rc;
    }
    if (ev.pruned.tokens_before != refresh_tokens(variant)) {
        say("bench: %u tokens were refreshed in place of %u", ev.pruned.tokens_before,
            refresh_tokens(variant));
        return CLI_FAILED;
    }
    sample_add(b, (enum figure)(REFRESH + variant), (double)BC_MAX(ev.pruned.micros, 1) * 1e-3);
    return ask(b, s, 1, 0, &r);
}

/* ---- all of it */

static int round_run(struct bench *b)
{
    int rc = alone(b, 512, PREFILL_512, DECODE_512);

    if (rc == CLI_FINE)
        rc = alone(b, LONGEST, PREFILL_2048, DECODE_2048);
    if (rc == CLI_FINE)
        rc = alone(b, 1, N_FIGURES, DECODE);
    if (rc == CLI_FINE)
        rc = together(b);
    for (uint32_t i = 0; i < 8 && rc == CLI_FINE; i++)
        rc = refresh(b, i);
    return rc;
}

static int context_check(struct bench *b)
{
    struct backcast_session_info info;
    backcast_session *s = NULL;

    int rc = session_open(b, NULL, NULL, LONGEST, &s);
    if (rc != CLI_FINE)
        return rc;
    backcast_session_info(s, &info);
    if (info.context_tokens < LONGEST + ROOM) {
        say("bench: the model reads %u tokens at most; the figures need %u", info.context_tokens,
            LONGEST + ROOM);
        rc = CLI_FAILED;
    }
    backcast_session_close(&s);
    return rc;
}

static int bench_run(struct bench *b)
{
    struct seen r;
    backcast_session *s = NULL;

    int rc = context_check(b);
    if (rc == CLI_FINE)
        rc = ids_learn(b);
    if (rc == CLI_FINE) /* threads and memory are warm before anything counts */
        rc = session_open(b, NULL, NULL, 64, &s);
    if (rc == CLI_FINE)
        rc = ask(b, s, 64, 16, &r);
    backcast_session_close(&s);
    if (rc == CLI_FINE)
        rc = refresh_open(b);
    for (uint32_t i = 0; i < b->rounds && rc == CLI_FINE; i++) {
        if (!b->a->quiet)
            bar_draw("measuring", i, b->rounds, "rounds");
        rc = round_run(b);
    }
    bar_clear();
    return rc;
}

static int by_value(const void *x, const void *y)
{
    const double *a = x, *b = y;
    return (*a > *b) - (*a < *b);
}

static void report(struct bench *b)
{
    struct json j = json_start(stdout);

    if (b->a->json)
        json_open(&j, NULL, '{');
    for (uint32_t f = 0; f < N_FIGURES; f++) {
        uint32_t n = b->n_samples[f];
        if (n == 0)
            continue;
        qsort(b->samples[f], n, sizeof(double), by_value);
        double *v = b->samples[f], median = (v[(n - 1) / 2] + v[n / 2]) / 2;
        if (b->a->json)
            json_num(&j, figures[f].key, median);
        else
            printf("%-36s %10.2f %-8s  (%.2f .. %.2f)\n", figures[f].what, median, figures[f].unit,
                   v[0], v[n - 1]);
    }
    if (b->a->json)
        json_shut(&j, '}');
}

int cmd_bench(struct args *a)
{
    struct private_daemon *own = NULL;
    struct private_options opt = private_options(a);
    struct err e = {0};
    struct bench *b = NULL;
    int rc = CLI_FINE;

    if (a->rounds < 1 || a->rounds > ROUNDS_MAX) {
        say("--rounds: %u is not from 1 to %u", a->rounds, ROUNDS_MAX);
        return CLI_USAGE;
    }
    b = calloc(1, sizeof(*b));
    if (b == NULL) {
        say("out of memory");
        return CLI_FAILED;
    }
    b->a = a;
    b->rounds = a->rounds;
    if (!wanted_any(b)) {
        say("--only: no figure has '%s' in its key", a->only);
        free(b);
        return CLI_USAGE;
    }
    interrupt_watch();
    if (private_start(&own, &opt, &e) < 0)
        rc = private_failed(&e, "bench");
    if (rc == CLI_FINE && backcast_connect(&b->c, private_socket(own)) < 0) {
        say("bench: %s", backcast_last_error(NULL));
        rc = CLI_FAILED;
    }
    if (rc == CLI_FINE)
        rc = bench_run(b);
    if (rc == CLI_FINE)
        report(b);
    backcast_disconnect(&b->c);
    private_stop(&own);
    free(b);
    return rc;
}
