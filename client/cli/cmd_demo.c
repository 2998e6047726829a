/* cmd_demo.c: demo: what the daemon is for, on one screen.
 *
 *   one private daemon, one connection, three sessions, all at work at the same time:
 *     768     counter_causal_fast, a budget of 768 tokens    \  the same long text, the same
 *     1536    counter_causal_fast, a budget of 1536 tokens    > questions; the text is far longer
 *     full    policy none: a cache that holds everything     /  than the two budgets
 *
 * Two questions: the first comes with the text, the second without it, so what was pruned was
 * pruned before anybody knew that it would be asked for. Beside each pruned answer stand the policy,
 * what was dropped, and the answer with the full cache: a small model's mistakes are its own.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "cli.h"
#include "clock.h"
#include "input.h"
#include "json.h"
#include "models.h"
#include "private.h"
#include "watch.h"

#define N_SESSIONS 3
#define N_QUESTIONS 2
#define ANSWER_TOKENS 48
#define EXAMPLES 3 /* of what was forgotten, a question */
#define ANSWER_BYTES_MAX 8192

static const char *const questions[N_QUESTIONS] = {
    "Who was the last miller?",
    "Who was the treasurer?",
};

struct turn { /* one question to one session */
    char answer[ANSWER_BYTES_MAX];
    size_t len;
    char examples[EXAMPLES][160];
    uint64_t example_tokens[EXAMPLES];
    uint32_t tokens_in, tokens_out, steps, prunes; /* steps: end_steps */
    uint64_t dropped, prune_micros, prefill_micros, decode_micros;
    char reason[16];
};

struct player {
    const char *tag, *sgr;
    uint32_t budget; /* tokens */
    backcast_session *s;
    struct transcript *t;
    struct turn turns[N_QUESTIONS];
    struct turn *now; /* NULL: not at work */
    uint32_t read, to_read, quarter;
    char line[256]; /* of the answer, not shown yet */
    size_t line_len;
    uint64_t live_before, live_after, held_before, held_after; /* of the last prune */
    uint32_t cached;
};

struct demo {
    struct args *a;
    backcast *c;
    struct player p[N_SESSIONS];
    uint64_t drawn_us;
};

/* ---- the screen while they work: whole lines with a tag, and one line of progress */

static void line_show(struct demo *d, struct player *p, size_t n)
{
    bar_clear();
    if (!d->a->json) {
        printf("%s%5s |%s ", paint(tty_out(), p->sgr), p->tag, paint(tty_out(), "\033[0m"));
        text_put(p->line, n);
        putchar('\n');
    }
    fflush(stdout);
    while (n < p->line_len && p->line[n] == ' ')
        n++;
    memmove(p->line, p->line + n, p->line_len - n);
    p->line_len -= n;
}

/* Text into lines of at most 84 bytes, cut at spaces. */
static void text_show(struct demo *d, struct player *p, const char *s, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (s[i] == '\n') {
            if (p->line_len > 0)
                line_show(d, p, p->line_len);
            continue;
        }
        p->line[p->line_len++] = s[i];
        if (p->line_len < 84)
            continue;
        size_t cut = p->line_len;
        while (cut > 0 && p->line[cut - 1] != ' ')
            cut--;
        line_show(d, p, cut > 0 ? cut : p->line_len);
    }
}

static void progress_show(struct demo *d)
{
    uint64_t now = clock_us();
    uint64_t done = 0, total = 0;

    for (size_t i = 0; i < N_SESSIONS; i++) {
        struct player *p = &d->p[i];
        done += p->read;
        total += p->to_read;
        if (tty_err() || d->a->quiet || p->to_read < 512)
            continue;
        uint32_t quarter = p->read * 4 / p->to_read;
        if (quarter > p->quarter)
            fprintf(stderr, "%5s | %u of %u tokens read, %u prunes so far\n", p->tag, p->read,
                    p->to_read, p->now != NULL ? p->now->prunes : 0);
        p->quarter = BC_MAX(quarter, p->quarter);
    }
    if (now - d->drawn_us > 50000 && done < total && !d->a->quiet) {
        bar_draw("reading", done, total, "tokens");
        d->drawn_us = now;
    }
}

/* ---- events */

/* Keeps the longest runs of what was dropped, with their words. */
static void example_keep(struct player *p, struct backcast_range r)
{
    char words[160];
    size_t least = 0;

    for (size_t i = 1; i < EXAMPLES; i++)
        if (p->now->example_tokens[i] < p->now->example_tokens[least])
            least = i;
    if (r.count <= p->now->example_tokens[least] ||
        !transcript_words(p->t, r, words, sizeof(words)))
        return;
    memcpy(p->now->examples[least], words, sizeof(words));
    p->now->example_tokens[least] = r.count;
}

static void pruned_seen(struct player *p, const struct backcast_event *ev)
{
    p->now->prunes++;
    p->now->prune_micros += ev->pruned.micros;
    for (size_t i = 0; i < ev->pruned.n_dropped; i++) {
        p->now->dropped += ev->pruned.dropped[i].count;
        example_keep(p, ev->pruned.dropped[i]);
    }
    p->live_before = ev->pruned.live_before;
    p->live_after = ev->pruned.live_after;
    p->held_before = ev->pruned.held_before;
    p->held_after = ev->pruned.held_after;
}

static int end_seen(struct demo *d, struct player *p, const struct backcast_event *ev)
{
    if (p->line_len > 0)
        line_show(d, p, p->line_len);
    p->now->tokens_in = ev->end.tokens_in;
    p->now->tokens_out = ev->end.tokens_out;
    p->now->steps = end_steps(ev);
    p->now->prefill_micros = ev->end.prefill_micros;
    p->now->decode_micros = ev->end.decode_micros;
    snprintf(p->now->reason, sizeof(p->now->reason), "%s", ev->end.reason);
    p->cached = ev->end.tokens_cached;
    p->now = NULL;
    if (strcmp(ev->end.reason, "stop") == 0 || strcmp(ev->end.reason, "length") == 0)
        return CLI_FINE;
    say("session %s ended early: %s %s", p->tag, ev->end.reason, ev->end.text);
    return strcmp(ev->end.reason, "cancelled") == 0 ? CLI_INTERRUPTED : CLI_FAILED;
}

static int event_seen(struct demo *d, const struct backcast_event *ev)
{
    struct player *p = NULL;

    for (size_t i = 0; i < N_SESSIONS; i++)
        if (d->p[i].s == ev->session)
            p = &d->p[i];
    if (p == NULL || p->now == NULL)
        return CLI_FINE;
    transcript_event(p->t, ev);
    if (ev->type == BACKCAST_TEXT) {
        size_t n = BC_MIN(ev->text.len, sizeof(p->now->answer) - 1 - p->now->len);
        memcpy(p->now->answer + p->now->len, ev->text.text, n);
        p->now->len += n;
        p->read = p->to_read;
        text_show(d, p, ev->text.text, ev->text.len);
    } else if (ev->type == BACKCAST_PROGRESS) {
        p->read = ev->progress.done;
        p->to_read = ev->progress.total;
        progress_show(d);
    } else if (ev->type == BACKCAST_PRUNED) {
        pruned_seen(p, ev);
    } else if (ev->type == BACKCAST_END) {
        return end_seen(d, p, ev);
    }
    return CLI_FINE;
}

/* Until every session has ended its answer. */
static int follow_all(struct demo *d)
{
    struct backcast_event ev;
    bool cancelled = false;
    int worst = CLI_FINE;

    for (;;) {
        bool busy = false;
        for (size_t i = 0; i < N_SESSIONS; i++)
            busy |= d->p[i].now != NULL;
        if (!busy) {
            bar_clear();
            return worst;
        }
        int rc = backcast_next(d->c, &ev, 1000);
        if (rc < 0) {
            say_failure(d->c, rc, "demo");
            return CLI_FAILED;
        }
        if (interrupt_count() > 0 && !cancelled) {
            cancelled = true;
            for (size_t i = 0; i < N_SESSIONS; i++)
                backcast_cancel(d->p[i].s);
        }
        if (rc == 0)
            continue;
        rc = event_seen(d, &ev);
        worst = BC_MAX(worst, rc);
    }
}

static int ask_all(struct demo *d, unsigned q, const char *text, size_t len)
{
    struct backcast_generate_options opt;

    backcast_generate_options_init(&opt);
    opt.max_tokens = ANSWER_TOKENS;
    for (size_t i = 0; i < N_SESSIONS; i++) {
        struct player *p = &d->p[i];
        int rc = backcast_chat(p->s, "user", text, len, &opt);
        if (rc < 0) {
            say_failure(d->c, rc, p->tag);
            return CLI_FAILED;
        }
        transcript_turn(p->t, "user", text, len, true);
        p->now = &p->turns[q];
        p->read = p->to_read = p->quarter = 0;
    }
    return follow_all(d);
}

/* ---- what came of it */

static void answer_print(const struct player *p, const struct turn *t)
{
    if (p->budget > 0) {
        printf("\n%s%5s%s  budget %u tokens, counter_causal_fast: %u prunes, %llu tokens dropped\n",
               paint(tty_out(), p->sgr), p->tag, paint(tty_out(), "\033[0m"), p->budget, t->prunes,
               (unsigned long long)t->dropped);
        for (size_t i = 0; i < EXAMPLES; i++)
            if (t->example_tokens[i] > 0)
                printf("       forgotten: \"%s\"\n", t->examples[i]);
    } else {
        printf("\n%s%5s%s  policy none, nothing dropped\n", paint(tty_out(), p->sgr), p->tag,
               paint(tty_out(), "\033[0m"));
    }
    fputs("       answer: ", stdout);
    text_put(t->answer, t->len);
    putchar('\n');
}

static void answers_print(const struct demo *d)
{
    for (unsigned q = 0; q < N_QUESTIONS; q++) {
        printf("\n%sQuestion %u: %s%s\n", paint(tty_out(), "\033[1m"), q + 1, questions[q],
               paint(tty_out(), "\033[0m"));
        for (size_t i = 0; i < N_SESSIONS; i++)
            answer_print(&d->p[i], &d->p[i].turns[q]);
    }
}

struct sums {
    uint64_t in, out, steps, prunes, dropped, prune_us, prefill_us, decode_us;
};

static struct sums sums_of(const struct player *p)
{
    struct sums s = {0};
    for (unsigned q = 0; q < N_QUESTIONS; q++) {
        const struct turn *t = &p->turns[q];
        s.in += t->tokens_in;
        s.out += t->tokens_out;
        s.steps += t->steps;
        s.prunes += t->prunes;
        s.dropped += t->dropped;
        s.prune_us += t->prune_micros;
        s.prefill_us += t->prefill_micros;
        s.decode_us += t->decode_micros;
    }
    return s;
}

static void report_print(const struct demo *d)
{
    char b[24], c[24], h[24];

    printf("\n%-6s %9s %10s %11s %10s %10s %23s %10s %8s %8s\n", "", "tokens in", "tokens out",
           "pruned", "refreshes", "cached", "bytes before -> after", "held", "ms/refr.",
           "tokens/s");
    for (size_t i = 0; i < N_SESSIONS; i++) {
        const struct player *p = &d->p[i];
        struct sums s = sums_of(p);
        char change[64] = "-", ms[24] = "-";
        if (s.prunes > 0) {
            snprintf(change, sizeof(change), "%s -> %s", bytes_text(p->live_before, b),
                     bytes_text(p->live_after, c));
            snprintf(ms, sizeof(ms), "%.1f", (double)s.prune_us / 1e3 / (double)s.prunes);
        }
        printf("%-6s %9llu %10llu %11llu %10llu %10u %23s %10s %8s %8.1f\n", p->tag,
               (unsigned long long)s.in, (unsigned long long)s.out, (unsigned long long)s.dropped,
               (unsigned long long)s.prunes, p->cached, change, bytes_text(p->held_after, h), ms,
               s.decode_us > 0 ? (double)s.steps * 1e6 / (double)s.decode_us : 0.0);
    }
    puts("bytes before -> after: live rows at the last refresh; held: pages of the cache now");
}

static void report_json(const struct demo *d)
{
    for (size_t i = 0; i < N_SESSIONS; i++) {
        const struct player *p = &d->p[i];
        struct sums s = sums_of(p);
        struct json j = json_start(stdout);
        json_open(&j, NULL, '{');
        json_text(&j, "session", p->tag);
        json_uint(&j, "budget_tokens", p->budget);
        json_uint(&j, "tokens_in", s.in);
        json_uint(&j, "tokens_out", s.out);
        json_uint(&j, "pruned", s.dropped);
        json_uint(&j, "refreshes", s.prunes);
        json_uint(&j, "cached", p->cached);
        json_uint(&j, "live_before", p->live_before);
        json_uint(&j, "live_after", p->live_after);
        json_uint(&j, "held", p->held_after);
        json_uint(&j, "prune_micros", s.prune_us);
        json_uint(&j, "prefill_micros", s.prefill_us);
        json_uint(&j, "decode_micros", s.decode_us);
        json_open(&j, "answers", '[');
        for (unsigned q = 0; q < N_QUESTIONS; q++)
            json_bytes(&j, NULL, p->turns[q].answer, p->turns[q].len);
        json_shut(&j, ']');
        json_shut(&j, '}');
    }
}

/* ---- from start to end */

/* What each session's pages take, as the daemon says. */
static void held_fill(struct demo *d)
{
    struct backcast_stats st;

    if (backcast_stats(d->c, &st) < 0)
        return;
    for (size_t i = 0; i < N_SESSIONS; i++) {
        const struct backcast_session_stat *s = stats_session(&st, backcast_session_id(d->p[i].s));
        if (s != NULL)
            d->p[i].held_after = s->bytes_held;
    }
}

static int sessions_open(struct demo *d, const char *model)
{
    static const struct {
        const char *tag, *sgr, *policy;
        uint32_t budget;
    } rows[N_SESSIONS] = {{"768", "\033[36m", "counter_causal_fast", 768},
                          {"1536", "\033[33m", "counter_causal_fast", 1536},
                          {"full", "\033[35m", "none", 0}};

    for (size_t i = 0; i < N_SESSIONS; i++) {
        struct backcast_session_options opt;
        struct backcast_session_info info;
        struct player *p = &d->p[i];
        backcast_session_options_init(&opt);
        opt.policy = rows[i].policy;
        opt.budget_tokens = rows[i].budget != 0 ? rows[i].budget : 8192;
        p->tag = rows[i].tag;
        p->sgr = rows[i].sgr;
        p->budget = rows[i].budget;
        int rc = backcast_session_open(d->c, &opt, &p->s);
        if (rc < 0) {
            say_failure(d->c, rc, p->tag);
            return CLI_FAILED;
        }
        backcast_session_info(p->s, &info);
        p->t = transcript_open(model, info.chat_template);
        if (p->t == NULL)
            return CLI_FAILED;
    }
    return CLI_FINE;
}

static int demo_run(struct demo *d, const char *text, size_t len)
{
    size_t n = len + strlen(questions[0]) + 32;
    char *first = malloc(n);
    int rc = CLI_FAILED;

    if (first == NULL) {
        say("out of memory");
        return rc;
    }
    int k = snprintf(first, n, "%s\n\nQuestion: %s", text, questions[0]);
    say("three sessions read a text of %zu bytes and answer; budgets 768 and 1536 tokens, and a "
        "full cache",
        len);
    rc = ask_all(d, 0, first, (size_t)k);
    free(first);
    if (rc == CLI_FINE) {
        say("the second question, to the same caches");
        rc = ask_all(d, 1, questions[1], strlen(questions[1]));
    }
    if (rc != CLI_FINE)
        return rc;
    held_fill(d);
    if (d->a->json) {
        report_json(d);
    } else {
        answers_print(d);
        report_print(d);
    }
    return CLI_FINE;
}

int cmd_demo(struct args *a)
{
    struct demo *d = calloc(1, sizeof(*d));
    struct private_daemon *own = NULL;
    struct private_options opt = private_options(a);
    struct err e = {0};
    char *text = NULL, model[4096];
    size_t len = 0;

    if (d == NULL || a->text_file == NULL) {
        say(d == NULL ? "out of memory" : "demo: --text FILE is missing");
        free(d);
        return d == NULL ? CLI_FAILED : CLI_USAGE;
    }
    interrupt_watch();
    d->a = a;
    int rc = input_read(a->text_file, &text, &len);
    if (rc == CLI_FINE &&
        (model_find(a->model, model, sizeof(model), &e) < 0 || private_start(&own, &opt, &e) < 0))
        rc = private_failed(&e, "demo");
    if (rc == CLI_FINE && backcast_connect(&d->c, private_socket(own)) < 0) {
        say("demo: %s", backcast_last_error(NULL));
        rc = CLI_FAILED;
    }
    if (rc == CLI_FINE) {
        say("private daemon: %s, %s", private_program(own), model);
        rc = sessions_open(d, model);
    }
    if (rc == CLI_FINE)
        rc = demo_run(d, text, len);
    for (size_t i = 0; i < N_SESSIONS; i++)
        transcript_close(&d->p[i].t);
    backcast_disconnect(&d->c);
    private_stop(&own);
    free(text);
    free(d);
    return rc;
}
