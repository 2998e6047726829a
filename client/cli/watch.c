/* watch.c: see watch.h. A prune while text streams to a terminal is told after the text, so that the
 * answer stays one piece; while the prompt is read it is told at once. */
#include <stdlib.h>
#include <string.h>
#include "json.h"
#include "watch.h"

#define DRAIN_MS 30 /* a reply and the record that goes with it take two ways */
#define HELD_BYTES_MAX (1u << 20)

int watch_open(struct watch *w, const struct link *l, backcast_session *s, const struct args *a)
{
    struct backcast_session_info info;
    struct backcast_stats st;
    const char *path = NULL;

    *w = (struct watch){.c = l->c, .s = s, .a = a, .durable = a->session.durable != 0};
    backcast_session_info(s, &info);
    if (backcast_stats(l->c, &st) == 0) {
        const struct backcast_model_stat *m = stats_model(&st, info.model);
        const struct backcast_session_stat *now = stats_session(&st, info.id);
        path = m != NULL ? m->path : NULL;
        w->durable |= now != NULL && now->durable;
    }
    w->t = transcript_open(path, info.chat_template);
    if (w->t == NULL) {
        say("out of memory");
        return CLI_FAILED;
    }
    return CLI_FINE;
}

void watch_close(struct watch *w)
{
    transcript_close(&w->t);
    free(w->held);
    w->held = NULL;
}

/* ---- showing */

static void line_end(struct watch *w)
{
    if (w->line_open && (w->lines || tty_out() || (!w->a->quiet && err_is_out())))
        putchar('\n');
    w->line_open = false;
    fflush(stdout);
}

static void tell(struct watch *w, const char *line)
{
    if (w->texted && (tty_out() || err_is_out())) { /* after the answer */
        size_t n = strlen(line) + 1;
        char *more =
            w->held_len + n > HELD_BYTES_MAX ? NULL : realloc(w->held, w->held_len + n + 1);
        if (more != NULL) {
            w->held = more;
            memcpy(w->held + w->held_len, line, n - 1);
            w->held_len += n;
            w->held[w->held_len - 1] = '\n';
            w->held[w->held_len] = '\0';
        }
        return;
    }
    bar_clear();
    fprintf(stderr, "%s%s%s\n", paint(tty_err(), "\033[2m"), line, paint(tty_err(), "\033[0m"));
}

static void held_tell(struct watch *w)
{
    if (w->held_len > 0)
        fprintf(stderr, "%s%s%s", paint(tty_err(), "\033[2m"), w->held,
                paint(tty_err(), "\033[0m"));
    w->held_len = 0;
}

void prune_text(const struct transcript *t, const struct backcast_event *ev, char *buf, size_t len)
{
    char time[24], words[200];
    uint64_t n = 0;
    size_t at, longest = 0;

    for (size_t i = 0; i < ev->pruned.n_dropped; i++) {
        n += ev->pruned.dropped[i].count;
        if (ev->pruned.dropped[i].count > ev->pruned.dropped[longest].count)
            longest = i;
    }
    snprintf(buf, len, "forgot %llu of %u tokens in %s (%s, %s)", (unsigned long long)n,
             ev->pruned.tokens_before, micros_text(ev->pruned.micros, time), ev->pruned.policy,
             ev->pruned.reason);
    at = strlen(buf);
    if (ev->pruned.n_dropped == 0 || at + 1 >= len)
        return;
    const struct backcast_range *r = &ev->pruned.dropped[longest];
    if (t != NULL && transcript_words(t, *r, words, 100))
        snprintf(buf + at, len - at, ", the longest piece \"%s\"", words);
    else
        snprintf(buf + at, len - at, ", the longest piece tokens %llu..%llu",
                 (unsigned long long)r->first, (unsigned long long)(r->first + r->count - 1));
    if (ev->pruned.n_dropped == 1) { /* it is all of it */
        char *most = strstr(buf + at, "the longest piece ");
        memmove(most, most + 18, strlen(most + 18) + 1);
    }
}

void rerotated_text(const struct backcast_event *ev, char *buf, size_t len)
{
    char time[24];

    snprintf(buf, len,
             "positions: %u would be the first beyond the trained context, so the %u cached tokens "
             "were renumbered in %s",
             ev->rerotated.position, ev->rerotated.tokens, micros_text(ev->rerotated.micros, time));
}

uint32_t end_steps(const struct backcast_event *ev)
{
    uint32_t sampled = ev->end.tokens_out + (ev->end.end_id >= 0);
    return sampled > 0 ? sampled - 1 : 0;
}

static void end_tell(struct watch *w, const struct backcast_event *ev)
{
    char line[400], in[64] = "", out[24] = "", cap[32] = "";

    uint32_t evaluated = ev->end.tokens_in - ev->end.tokens_adopted, steps = end_steps(ev);
    if (ev->end.prefill_micros > 0 && evaluated > 0)
        snprintf(in, sizeof(in), " (%.0f/s)", evaluated * 1e6 / (double)ev->end.prefill_micros);
    if (ev->end.tokens_adopted > 0)
        snprintf(in + strlen(in), sizeof(in) - strlen(in), " (%u shared)", ev->end.tokens_adopted);
    if (ev->end.decode_micros > 0 && steps > 0)
        snprintf(out, sizeof(out), " (%.1f/s)", steps * 1e6 / (double)ev->end.decode_micros);
    if (ev->end.budget_tokens > 0)
        snprintf(cap, sizeof(cap), " of %u", ev->end.budget_tokens);
    int n =
        snprintf(line, sizeof(line), "%s: %u tokens in%s, %u out%s, %u%s cached", ev->end.reason,
                 ev->end.tokens_in, in, ev->end.tokens_out, out, ev->end.tokens_cached, cap);
    if (ev->end.prunes > 0)
        snprintf(line + n, sizeof(line) - (size_t)n, ", %u prune%s dropped %llu (%s)",
                 ev->end.prunes, PLURAL(ev->end.prunes), (unsigned long long)ev->end.tokens_dropped,
                 ev->end.dropped_why);
    tell(w, line);
}

static void pruned_json(struct json *j, const struct backcast_event *ev)
{
    json_text(j, "policy", ev->pruned.policy);
    json_text(j, "reason", ev->pruned.reason);
    json_uint(j, "tokens_before", ev->pruned.tokens_before);
    json_uint(j, "tokens_after", ev->pruned.tokens_after);
    json_uint(j, "live_before", ev->pruned.live_before);
    json_uint(j, "live_after", ev->pruned.live_after);
    json_uint(j, "held_before", ev->pruned.held_before);
    json_uint(j, "held_after", ev->pruned.held_after);
    json_uint(j, "micros", ev->pruned.micros);
    json_open(j, "dropped", '[');
    for (size_t i = 0; i < ev->pruned.n_dropped; i++) {
        json_open(j, NULL, '[');
        json_uint(j, NULL, ev->pruned.dropped[i].first);
        json_uint(j, NULL, ev->pruned.dropped[i].count);
        json_shut(j, ']');
    }
    json_shut(j, ']');
}

void event_json(FILE *f, const struct backcast_event *ev, bool replay)
{
    static const char *const names[] = {
        [BACKCAST_TEXT] = "text",         [BACKCAST_LOGPROB] = "logprob",
        [BACKCAST_PROGRESS] = "progress", [BACKCAST_PRUNED] = "pruned",
        [BACKCAST_SCORES] = "scores",     [BACKCAST_LOST] = "lost",
        [BACKCAST_END] = "end",           [BACKCAST_REROTATED] = "rerotated"};
    struct json j = json_start(f);

    json_open(&j, NULL, '{');
    json_text(&j, "event", names[ev->type]);
    json_uint(&j, "seq", ev->seq);
    if (replay)
        json_bool(&j, "replay", true);
    if (ev->type == BACKCAST_TEXT) {
        json_bytes(&j, "text", ev->text.text, ev->text.len);
        json_uint(&j, "first", ev->text.first_stream);
        json_open(&j, "ids", '[');
        for (size_t i = 0; i < ev->text.n_ids; i++)
            json_int(&j, NULL, ev->text.ids[i]);
        json_shut(&j, ']');
    } else if (ev->type == BACKCAST_LOGPROB) {
        json_uint(&j, "stream", ev->logprob.stream);
        json_int(&j, "id", ev->logprob.id);
        json_num(&j, "logprob", (double)ev->logprob.logprob);
        json_bool(&j, "prompt", ev->logprob.prompt != 0);
        json_open(&j, "top", '[');
        for (size_t i = 0; i < ev->logprob.n_top; i++) {
            json_open(&j, NULL, '{');
            json_int(&j, "id", ev->logprob.top[i].id);
            json_num(&j, "logprob", (double)ev->logprob.top[i].logprob);
            json_shut(&j, '}');
        }
        json_shut(&j, ']');
    } else if (ev->type == BACKCAST_PROGRESS) {
        json_uint(&j, "done", ev->progress.done);
        json_uint(&j, "total", ev->progress.total);
    } else if (ev->type == BACKCAST_PRUNED) {
        pruned_json(&j, ev);
    } else if (ev->type == BACKCAST_REROTATED) {
        json_uint(&j, "stream", ev->rerotated.stream);
        json_uint(&j, "position", ev->rerotated.position);
        json_uint(&j, "tokens", ev->rerotated.tokens);
        json_uint(&j, "micros", ev->rerotated.micros);
    } else if (ev->type == BACKCAST_LOST) {
        json_uint(&j, "first_seq", ev->lost.first_seq);
        json_uint(&j, "count", ev->lost.count);
    } else if (ev->type == BACKCAST_END) {
        json_text(&j, "reason", ev->end.reason);
        json_text(&j, "text", ev->end.text);
        json_int(&j, "code", ev->end.code);
        json_uint(&j, "tokens_in", ev->end.tokens_in);
        json_uint(&j, "tokens_out", ev->end.tokens_out);
        json_uint(&j, "tokens_cached", ev->end.tokens_cached);
        json_uint(&j, "tokens_adopted", ev->end.tokens_adopted);
        json_uint(&j, "budget_tokens", ev->end.budget_tokens);
        json_uint(&j, "prunes", ev->end.prunes);
        json_uint(&j, "tokens_dropped", ev->end.tokens_dropped);
        json_text(&j, "dropped_why", ev->end.dropped_why);
        json_uint(&j, "prefill_micros", ev->end.prefill_micros);
        json_uint(&j, "decode_micros", ev->end.decode_micros);
    }
    json_shut(&j, '}');
}

static void show_text(struct watch *w, const struct backcast_event *ev)
{
    bar_clear();
    if (ev->text.len == 0)
        return;
    text_put(ev->text.text, ev->text.len);
    fflush(stdout);
    w->line_open = ev->text.text[ev->text.len - 1] != '\n';
    w->texted = true;
}

static void show(struct watch *w, const struct backcast_event *ev)
{
    char line[600];

    transcript_event(w->t, ev);
    w->under_way = ev->type == BACKCAST_END ? false
                   : ev->type == BACKCAST_PRUNED || ev->type == BACKCAST_LOST
                       ? w->under_way
                       : true; /* the others come while an answer is made */
    if (w->mute)
        return;
    if (ev->type == BACKCAST_PRUNED && !w->replay) {
        w->prunes++;
        w->prune_micros += ev->pruned.micros;
        for (size_t i = 0; i < ev->pruned.n_dropped; i++)
            w->dropped += ev->pruned.dropped[i].count;
    }
    if (w->a->json && !w->silent) {
        event_json(stdout, ev, w->replay);
        return;
    }
    if (ev->type == BACKCAST_TEXT) {
        show_text(w, ev);
    } else if (ev->type == BACKCAST_END && w->replay) {
        line_end(w); /* its figures were of another budget, and of another day */
        w->texted = false;
    } else if (w->replay) {
        return;
    } else if (ev->type == BACKCAST_PROGRESS && !w->a->quiet && ev->progress.total >= 256) {
        bar_draw("reading", ev->progress.done, ev->progress.total, "tokens");
    } else if (ev->type == BACKCAST_PRUNED && !w->a->quiet) {
        prune_text(w->t, ev, line, sizeof(line));
        tell(w, line);
    } else if (ev->type == BACKCAST_REROTATED && !w->a->quiet) {
        rerotated_text(ev, line, sizeof(line));
        tell(w, line);
    } else if (ev->type == BACKCAST_END) {
        bar_clear();
        if (w->silent && strcmp(ev->end.reason, "length") == 0)
            return;
        line_end(w);
        held_tell(w);
        w->texted = false;
        if (!w->a->quiet && !w->silent && ev->end.code != BACKCAST_ECLOSED) /* no figures came */
            end_tell(w, ev);
    }
}

/* Why an answer is not whole, where the END has no sentence of its own. */
static const char *early_text(const struct backcast_event *ev)
{
    static const char *const rows[][2] = {{"cancelled", "not by this command"},
                                          {"stalled", "nobody has read it for too long"},
                                          {"context", "the model's trained context is full"},
                                          {"retry", "the daemon is stopping"}};

    for (size_t i = 0; ev->end.text[0] == '\0' && i < ARRAY_LEN(rows); i++)
        if (strcmp(ev->end.reason, rows[i][0]) == 0)
            return rows[i][1];
    return ev->end.text;
}

/* What an END means for the command. */
static int end_exit(struct watch *w, const struct backcast_event *ev)
{
    const char *text = early_text(ev);

    w->closed = ev->end.code == BACKCAST_ECLOSED;
    if (strcmp(ev->end.reason, "cancelled") == 0 && w->cancelled)
        return CLI_INTERRUPTED;
    if (strcmp(ev->end.reason, "stop") == 0 || strcmp(ev->end.reason, "length") == 0)
        return CLI_FINE;
    if (w->closed)
        say("the answer broke off: the daemon has closed the session");
    else
        say("the answer ended early: %s%s%s", ev->end.reason, text[0] != '\0' ? ": " : "", text);
    return CLI_FAILED;
}

static int follow(struct watch *w)
{
    struct backcast_event ev;

    for (;;) {
        int rc = backcast_next(w->c, &ev, 1000); /* a signal may come right before it waits */
        if (rc < 0) {
            line_end(w);
            say_failure(w->c, rc, "answer");
            return CLI_FAILED;
        }
        if (interrupt_count() > 0 && !w->cancelled) {
            w->cancelled = true;
            backcast_cancel(w->s);
        }
        if (rc == 0)
            continue;
        show(w, &ev);
        if (ev.type == BACKCAST_END && ev.session == w->s)
            return end_exit(w, &ev);
    }
}

int watch_send(struct watch *w, const char *role, const char *text, size_t len,
               const struct backcast_generate_options *opt)
{
    bool answer = role == NULL || strcmp(role, "user") == 0;
    int rc = role != NULL ? backcast_chat(w->s, role, text, len, opt)
                          : backcast_prompt(w->s, text, len, opt);

    w->cancelled = w->texted = w->line_open = false;
    w->closed = rc == BACKCAST_ECLOSED || (rc == BACKCAST_EUNKNOWN &&
                                           strcmp(backcast_last_error_field(w->c), "session") == 0);
    w->taken = rc >= 0;
    if (rc < 0)
        return say_refusal(w->a, w->c, rc, "prompt");
    transcript_turn(w->t, role, text, len, answer && opt->max_tokens > 0);
    return follow(w);
}

bool watch_is_over(struct watch *w)
{
    struct backcast_event ev;
    struct backcast_stats st;
    int rc;

    while ((rc = backcast_next(w->c, &ev, 0)) == 1)
        show(w, &ev);
    return rc < 0 || (w->closed && backcast_stats(w->c, &st) < 0);
}

void watch_drain(struct watch *w)
{
    struct backcast_event ev;
    while (backcast_next(w->c, &ev, DRAIN_MS) == 1)
        show(w, &ev);
}

int watch_replay(struct watch *w)
{
    struct backcast_session_info info;
    struct backcast_event ev = {0};

    backcast_session_info(w->s, &info);
    while (ev.seq < info.replay_seq && backcast_next(w->c, &ev, 5000) == 1)
        show(w, &ev);
    return w->under_way && ev.seq >= info.replay_seq ? follow(w) : CLI_FINE;
}

/* A request that the daemon had not accepted when it ended is known to nobody: its session is idle,
 * and no END will come. */
static bool session_is_idle(struct watch *w)
{
    int rc;
    const struct backcast_session_stat *s = session_look(w->c, backcast_session_id(w->s), &rc);

    return s != NULL && strcmp(s->state, "idle") == 0;
}

int watch_resume(struct watch *w)
{
    struct backcast_event ev;
    bool was_idle = false;
    int rc;

    while ((rc = backcast_next(w->c, &ev, 1000)) == 0 && interrupt_count() == 0) {
        bool idle = session_is_idle(w);
        if (idle && was_idle) { /* and what came in between would have been an event */
            say("the message was not taken: send it again");
            return CLI_FINE;
        }
        was_idle = idle;
    }
    if (rc == 1) {
        show(w, &ev);
        if (ev.type == BACKCAST_END)
            return end_exit(w, &ev);
    }
    return follow(w);
}

/* ---- scores */

struct ranked {
    float score;
    uint32_t row;
};

static int by_score(const void *a, const void *b)
{
    const struct ranked *x = a, *y = b;
    return x->score < y->score   ? -1
           : x->score > y->score ? 1
                                 : (x->row > y->row) - (x->row < y->row);
}

/* rank[i]: 1 for the lowest score. */
static uint32_t *ranks(const struct backcast_score *rows, size_t n)
{
    struct ranked *r = calloc(n + 1, sizeof(*r));
    uint32_t *ret = calloc(n + 1, sizeof(*ret));

    if (r == NULL || ret == NULL) {
        free(r);
        free(ret);
        return NULL;
    }
    for (size_t i = 0; i < n; i++)
        r[i] = (struct ranked){rows[i].score, (uint32_t)i};
    qsort(r, n, sizeof(*r), by_score);
    for (size_t i = 0; i < n; i++)
        ret[r[i].row] = (uint32_t)i + 1;
    free(r);
    return ret;
}

static void score_row(const struct args *a, struct json *j, const struct backcast_score *r,
                      uint32_t rank, struct gguf_str p)
{
    if (a->json) {
        json_open(j, NULL, '{');
        json_uint(j, "stream", r->stream);
        json_int(j, "position", r->position);
        json_int(j, "id", r->id);
        json_num(j, "score", (double)r->score);
        json_uint(j, "rank", rank);
        json_bool(j, "frozen", (r->flags & 1) != 0);
        json_bool(j, "recent", (r->flags & 2) != 0);
        json_bytes(j, "text", p.s, p.len);
        json_shut(j, '}');
        return;
    }
    printf("%8llu %8d %8d %12.4f %6u %c%c  ", (unsigned long long)r->stream, r->position, r->id,
           (double)r->score, rank, r->flags & 1 ? 'F' : ' ', r->flags & 2 ? 'R' : ' ');
    for (size_t k = 0; k < p.len; k++) {
        unsigned char b = (unsigned char)p.s[k];
        if (b == '\n')
            fputs("\\n", stdout);
        else
            putchar(b < 0x20 || b == 0x7f ? '?' : b);
    }
    putchar('\n');
}

void scores_print(const struct args *a, const struct backcast_score *rows, size_t n,
                  struct tok *tok, const char *policy)
{
    uint32_t *rank = ranks(rows, n);
    struct json j = json_start(stdout);

    if (a->json) {
        json_open(&j, NULL, '{');
        json_text(&j, "policy", policy);
        json_open(&j, "tokens", '[');
    } else {
        printf("%8s %8s %8s %12s %6s %2s  %s\n", "stream", "position", "id", "score", "rank", "",
               "token");
    }
    for (size_t i = 0; i < n; i++) {
        struct gguf_str p = {"", 0};
        if (tok != NULL && rows[i].id >= 0 && (uint32_t)rows[i].id < tok_n_vocab(tok))
            p = tok_piece(tok, rows[i].id);
        score_row(a, &j, &rows[i], rank != NULL ? rank[i] : 0, p);
    }
    if (a->json) {
        json_shut(&j, ']');
        json_shut(&j, '}');
    } else if (!a->quiet) {
        fprintf(stderr,
                "%zu tokens, policy %s. For the counter-causal policies a low score is a surprise: "
                "what came later does not predict the token, so it stays. F frozen, R recent.\n",
                n, policy);
    }
    free(rank);
}
