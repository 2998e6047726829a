/* cmd_list.c: ls, stat, top: who holds what. */
#include <poll.h>
#include <string.h>
#include <unistd.h>
#include "cli.h"
#include "json.h"

void session_json(struct json *j, const struct backcast_session_stat *s)
{
    json_open(j, NULL, '{');
    json_uint(j, "session", s->id);
    json_text(j, "name", s->name);
    json_uint(j, "uid", s->uid);
    json_text(j, "model", s->model);
    json_text(j, "policy", s->policy);
    json_text(j, "kv_type", s->kv_type);
    if (s->positions[0] != '\0')
        json_text(j, "positions", s->positions);
    json_text(j, "state", s->state);
    if (s->tier[0] != '\0') {
        json_text(j, "tier", s->tier);
        json_bool(j, "durable", s->durable != 0);
    }
    json_text(j, "client", s->client);
    if (s->score[0] != '\0') {
        json_text(j, "score", s->score);
        json_uint(j, "span", s->span);
        json_num(j, "span_quantile", (double)s->span_quantile);
        json_uint(j, "min_gap", s->min_gap);
        json_text(j, "trigger", s->trigger);
        json_text(j, "chat_template", s->chat_template);
        json_int(j, "priority", s->priority);
        json_uint(j, "weight", s->weight);
    }
    json_uint(j, "tokens", s->tokens);
    json_uint(j, "budget_tokens", s->budget_tokens);
    json_uint(j, "budget_bytes", s->budget_bytes);
    json_uint(j, "keep_tokens", s->keep_tokens);
    json_uint(j, "frozen_tokens", s->frozen_tokens);
    json_uint(j, "recent_tokens", s->recent_tokens);
    json_uint(j, "bytes_live", s->bytes_live);
    json_uint(j, "bytes_held", s->bytes_held);
    json_uint(j, "bytes_shared", s->bytes_shared);
    json_uint(j, "bytes_other", s->bytes_other);
    json_uint(j, "bytes_guaranteed", s->bytes_guaranteed);
    json_uint(j, "prunes", s->prunes);
    json_uint(j, "prune_micros", s->prune_micros);
    json_uint(j, "tokens_dropped", s->tokens_dropped);
    json_uint(j, "rows_moved", s->rows_moved);
    json_uint(j, "tokens_in", s->tokens_in);
    json_uint(j, "tokens_out", s->tokens_out);
    json_uint(j, "idle_micros", s->idle_micros);
    json_shut(j, '}');
}

static void ledger_json(struct json *j, const struct backcast_stats *st)
{
    json_open(j, "ledger", '{');
    for (size_t i = 0; i < st->n_ledger; i++)
        json_uint(j, st->ledger[i].name, st->ledger[i].bytes);
    json_uint(j, "booked", st->bytes_booked);
    json_uint(j, "resident", st->bytes_resident);
    json_shut(j, '}');
}

static void daemon_json(struct json *j, const struct backcast_stats *st)
{
    json_open(j, "daemon", '{');
    json_text(j, "version", st->version);
    json_uint(j, "kv_held", st->kv_held);
    json_uint(j, "kv_memory", st->kv_memory);
    json_uint(j, "bytes_weights", st->bytes_weights);
    json_uint(j, "bytes_scratch", st->bytes_scratch);
    json_uint(j, "bytes_rings", st->bytes_rings);
    json_uint(j, "uptime_micros", st->uptime_micros);
    json_uint(j, "steps", st->steps);
    json_uint(j, "sessions", st->n_sessions_all);
    json_uint(j, "connections", st->n_connections);
    json_shut(j, '}');
    ledger_json(j, st);
    json_open(j, "models", '[');
    for (size_t i = 0; i < st->n_models; i++) {
        const struct backcast_model_stat *m = &st->models[i];
        json_open(j, NULL, '{');
        json_text(j, "name", m->name);
        json_text(j, "family", m->family);
        json_text(j, "path", m->path);
        json_text(j, "backend", m->backend);
        json_text(j, "chat_template", m->chat_template);
        json_uint(j, "bytes_weights", m->bytes_weights);
        json_uint(j, "bytes_scratch", m->bytes_scratch);
        json_uint(j, "bytes_text", m->bytes_text);
        json_uint(j, "context_tokens", m->context_tokens);
        json_uint(j, "sessions", m->sessions);
        json_shut(j, '}');
    }
    json_shut(j, ']');
}

static void sessions_json(const struct backcast_stats *st, bool with_daemon)
{
    struct json j = json_start(stdout);

    json_open(&j, NULL, '{');
    if (with_daemon)
        daemon_json(&j, st);
    json_open(&j, "sessions", '[');
    for (size_t i = 0; i < st->n_sessions; i++)
        session_json(&j, &st->sessions[i]);
    json_shut(&j, ']');
    json_shut(&j, '}');
}

static const char *or_dash(const char *text)
{
    return text[0] != '\0' ? text : "-";
}

static const char *durable_text(const struct backcast_session_stat *s)
{
    return s->tier[0] == '\0' ? "-" : s->durable ? "yes" : "no"; /* an older daemon tells neither */
}

static void sessions_table(FILE *f, const struct backcast_stats *st)
{
    char held[24], shared[24], other[24], idle[24], tokens[32];
    int name = 4, model = 5; /* as wide as the widest of them */

    for (size_t i = 0; i < st->n_sessions; i++) {
        name = BC_MAX(name, (int)strlen(st->sessions[i].name));
        model = BC_MAX(model, (int)strlen(st->sessions[i].model));
    }
    fprintf(f, "%-6s %-*s %-9s %-6s %-7s %-*s %-19s %13s %10s %10s %10s %7s %8s %9s %s\n", "ID",
            name, "NAME", "STATE", "TIER", "DURABLE", model, "MODEL", "POLICY", "TOKENS", "HELD",
            "SHARED", "OTHER", "PRUNES", "DROPPED", "IDLE", "CLIENT");
    for (size_t i = 0; i < st->n_sessions; i++) {
        const struct backcast_session_stat *s = &st->sessions[i];
        if (s->budget_tokens > 0)
            snprintf(tokens, sizeof(tokens), "%u/%u", s->tokens, s->budget_tokens);
        else
            snprintf(tokens, sizeof(tokens), "%u", s->tokens);
        fprintf(f,
                "%-6llu %-*s %-9s %-6s %-7s %-*s %-19.19s %13s %10s %10s %10s %7llu %8llu %9s %s\n",
                (unsigned long long)s->id, name, or_dash(s->name), s->state, or_dash(s->tier),
                durable_text(s), model, s->model, s->policy, tokens,
                bytes_text(s->bytes_held, held), bytes_text(s->bytes_shared, shared),
                bytes_text(s->bytes_other, other), (unsigned long long)s->prunes,
                (unsigned long long)s->tokens_dropped, micros_text(s->idle_micros, idle),
                or_dash(s->client));
    }
}

static void daemon_line(FILE *f, const struct backcast_stats *st)
{
    char kv[24], all[24], w[24], up[24];
    fprintf(f,
            "backcastd %s, up %s: %u session%s, %u connection%s, caches %s of %s, weights %s, "
            "%llu steps\n",
            st->version, micros_text(st->uptime_micros, up), st->n_sessions_all,
            PLURAL(st->n_sessions_all), st->n_connections, PLURAL(st->n_connections),
            bytes_text(st->kv_held, kv), bytes_text(st->kv_memory, all),
            bytes_text(st->bytes_weights, w), (unsigned long long)st->steps);
}

/* Who holds what, in all: every kind that is not empty, the sum, and what the system says. */
static void ledger_line(FILE *f, const struct backcast_stats *st)
{
    char b[24], r[24];
    fputs("memory", f);
    for (size_t i = 0; i < st->n_ledger; i++)
        if (st->ledger[i].bytes > 0)
            fprintf(f, "%s %s %s", i > 0 ? "," : ":", st->ledger[i].name,
                    bytes_text(st->ledger[i].bytes, b));
    fprintf(f, "; booked %s, resident %s\n", bytes_text(st->bytes_booked, b),
            bytes_text(st->bytes_resident, r));
}

int cmd_ls(struct args *a)
{
    struct link l;
    struct backcast_stats st;
    int rc = link_open(&l, a, false);

    if (rc != CLI_FINE)
        return rc;
    rc = backcast_stats(l.c, &st);
    if (rc < 0)
        say_failure(l.c, rc, "ls");
    else if (a->json)
        sessions_json(&st, false);
    else {
        sessions_table(stdout, &st);
        ledger_line(stdout, &st);
    }
    link_close(&l);
    return rc < 0 ? CLI_FAILED : CLI_FINE;
}

/* ---- stat */

static void session_print(const struct backcast_session_stat *s)
{
    char b[24], c[24], t[24];

    printf("session        %llu\nname           %s\nuid            %u\nclient         %s\n"
           "state          %s\ndurable        %s\ntier           %s\nmodel          %s\n"
           "policy         %s\nkv type        %s\npositions      %s\n",
           (unsigned long long)s->id, or_dash(s->name), s->uid,
           s->client[0] != '\0' ? s->client : "- (nobody is attached)", s->state, durable_text(s),
           or_dash(s->tier), s->model, s->policy, s->kv_type, or_dash(s->positions));
    if (s->score[0] != '\0')
        printf(
            "opened with    score %s, span %u, quantile %g, min gap %u, trigger %s, template %s, "
            "priority %d, weight %u\n",
            s->score, s->span, (double)s->span_quantile, s->min_gap, s->trigger, s->chat_template,
            s->priority, s->weight);
    printf("tokens         %u cached", s->tokens);
    if (s->budget_tokens > 0)
        printf(", budget %u, keep %u, frozen %u, recent %u", s->budget_tokens, s->keep_tokens,
               s->frozen_tokens, s->recent_tokens);
    printf("\nbytes          %s live, %s held", bytes_text(s->bytes_live, b),
           bytes_text(s->bytes_held, c));
    if (s->bytes_shared > 0)
        printf(" (%s of it shared)", bytes_text(s->bytes_shared, t));
    printf(", %s beside them", bytes_text(s->bytes_other, t));
    if (s->budget_bytes > 0)
        printf(", budget %s", bytes_text(s->budget_bytes, t));
    printf("\nguaranteed     %s", bytes_text(s->bytes_guaranteed, b));
    printf("\nsince opened   %llu tokens in, %llu out\n", (unsigned long long)s->tokens_in,
           (unsigned long long)s->tokens_out);
    printf("prunes         %llu, %llu tokens dropped, %s in all, %llu rows moved\n",
           (unsigned long long)s->prunes, (unsigned long long)s->tokens_dropped,
           micros_text(s->prune_micros, b), (unsigned long long)s->rows_moved);
    printf("idle           %s\n", micros_text(s->idle_micros, b));
}

static void models_print(const struct backcast_stats *st)
{
    char w[24], s[24];
    for (size_t i = 0; i < st->n_models; i++) {
        const struct backcast_model_stat *m = &st->models[i];
        printf("model %s: %s, %s, %s weights, %s scratch, context %u, %u session%s, template %s\n"
               "      %s\n",
               m->name, m->family, m->backend, bytes_text(m->bytes_weights, w),
               bytes_text(m->bytes_scratch, s), m->context_tokens, m->sessions, PLURAL(m->sessions),
               m->chat_template, m->path);
    }
}

static int stat_act(struct args *a, backcast *c, const struct backcast_session_stat *s)
{
    struct json j = json_start(stdout);

    (void)c;
    if (a->json)
        session_json(&j, s);
    else
        session_print(s);
    return CLI_FINE;
}

int cmd_stat(struct args *a)
{
    struct link l;
    struct backcast_stats st;

    if (a->n_rest > 0)
        return session_do(a, stat_act);
    int rc = link_open(&l, a, false);
    if (rc != CLI_FINE)
        return rc;
    if ((rc = backcast_stats(l.c, &st)) < 0) {
        say_failure(l.c, rc, "stat");
        rc = CLI_FAILED;
    } else if (a->json) {
        sessions_json(&st, true);
    } else {
        daemon_line(stdout, &st);
        ledger_line(stdout, &st);
        models_print(&st);
        sessions_table(stdout, &st);
    }
    link_close(&l);
    return rc;
}

/* ---- top */

static uint64_t tokens_out(const struct backcast_stats *st)
{
    uint64_t n = 0;
    for (size_t i = 0; i < st->n_sessions; i++)
        n += st->sessions[i].tokens_out;
    return n;
}

/* The stats page costs the daemon nothing; where it shares none, ask. */
static int look(backcast *c, struct backcast_stats *ret)
{
    int rc = backcast_stats_page(c, ret);
    return rc == 0 ? 0 : backcast_stats(c, ret);
}

int cmd_top(struct args *a)
{
    struct link l;
    struct backcast_stats st;
    uint64_t before = 0, up = 0;
    int rc = link_open(&l, a, false);

    if (rc != CLI_FINE)
        return rc;
    interrupt_watch();
    for (uint32_t n = 0; interrupt_count() == 0 && (a->count == 0 || n < a->count); n++) {
        if (n > 0)
            poll(NULL, 0, (int)BC_MIN(a->interval, 3600000u));
        if (interrupt_count() > 0)
            break;
        rc = look(l.c, &st);
        if (rc < 0) {
            say_failure(l.c, rc, "top");
            break;
        }
        if (a->json) {
            sessions_json(&st, true);
            continue;
        }
        uint64_t out = tokens_out(&st);
        double s = (double)(st.uptime_micros - up) / 1e6;
        fputs(paint(tty_out(), "\033[H\033[J"), stdout);
        daemon_line(stdout, &st);
        ledger_line(stdout, &st);
        if (n > 0 && s > 0 && out >= before)
            printf("%.1f tokens/s out\n", (double)(out - before) / s);
        sessions_table(stdout, &st);
        fflush(stdout);
        before = out;
        up = st.uptime_micros;
    }
    link_close(&l);
    return rc < 0 ? CLI_FAILED : CLI_FINE;
}
