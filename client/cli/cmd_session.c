/* cmd_session.c: budget, prune, close, save, restore, fork, scores: calls about a session by its number or name. */
#include <stdlib.h>
#include <string.h>
#include "cli.h"
#include "gguf.h"
#include "json.h"
#include "watch.h"

/* What a session holds now: the answer to a call that changed it. */
static int after_print(const struct args *a, backcast *c, uint64_t id, const char *what)
{
    struct json j = json_start(stdout);
    char live[24], held[24];
    int rc;
    const struct backcast_session_stat *s = session_look(c, id, &rc);

    if (s == NULL) /* gone since */
        return rc < 0 ? say_refusal(a, c, rc, what) : CLI_FINE;
    if (!a->json) {
        printf("session %llu %s: %u tokens cached, budget %u, keep %u, %s live, %s held\n",
               (unsigned long long)id, what, s->tokens, s->budget_tokens, s->keep_tokens,
               bytes_text(s->bytes_live, live), bytes_text(s->bytes_held, held));
        return CLI_FINE;
    }
    json_open(&j, NULL, '{');
    json_uint(&j, "session", id);
    json_uint(&j, "tokens", s->tokens);
    json_uint(&j, "budget_tokens", s->budget_tokens);
    json_uint(&j, "budget_bytes", s->budget_bytes);
    json_uint(&j, "keep_tokens", s->keep_tokens);
    json_uint(&j, "bytes_live", s->bytes_live);
    json_uint(&j, "bytes_held", s->bytes_held);
    json_shut(&j, '}');
    return CLI_FINE;
}

static int budget_act(struct args *a, backcast *c, const struct backcast_session_stat *s)
{
    uint64_t id = s->id;
    int err =
        backcast_budget_by_id(c, id, a->budget.bytes, a->budget.tokens, a->session.keep_tokens);
    if (err < 0)
        return say_refusal(a, c, err, "budget");
    return after_print(a, c, id, "has a new budget");
}

int cmd_budget(struct args *a)
{
    if (!size_parse(a->rest[1], &a->budget)) {
        say("budget: '%s' is not a size: bytes (64MiB) or tokens (512t)", a->rest[1]);
        return CLI_USAGE;
    }
    return session_do(a, budget_act);
}

static uint32_t tokens_cached(backcast *c, uint64_t id)
{
    int rc;
    const struct backcast_session_stat *s = session_look(c, id, &rc);
    return s != NULL ? s->tokens : 0;
}

static int prune_act(struct args *a, backcast *c, const struct backcast_session_stat *s)
{
    uint64_t id = s->id;
    uint32_t before = s->tokens;
    int err = backcast_prune_by_id(c, id, a->session.keep_tokens);
    if (err < 0)
        return say_refusal(a, c, err, "prune");
    bool less = tokens_cached(c, id) < before;
    return after_print(a, c, id, less ? "is pruned" : "has nothing to prune");
}

int cmd_prune(struct args *a)
{
    return session_do(a, prune_act);
}

static int close_act(struct args *a, backcast *c, const struct backcast_session_stat *s)
{
    struct json j = json_start(stdout);
    uint64_t id = s->id;
    int err = backcast_close_by_id(c, id);
    if (err < 0)
        return say_refusal(a, c, err, "close");
    if (a->json) {
        json_open(&j, NULL, '{');
        json_uint(&j, "closed", id);
        json_shut(&j, '}');
    } else {
        printf("session %llu is closed\n", (unsigned long long)id);
    }
    return CLI_FINE;
}

int cmd_close(struct args *a)
{
    return session_do(a, close_act);
}

static int save_act(struct args *a, backcast *c, const struct backcast_session_stat *s)
{
    struct json j = json_start(stdout);
    uint64_t id = s->id;
    int err = backcast_save_by_id(c, id, a->rest[1]);
    if (err < 0)
        return say_refusal(a, c, err, "save");
    if (a->json) {
        json_open(&j, NULL, '{');
        json_uint(&j, "session", id);
        json_text(&j, "saved", a->rest[1]);
        json_shut(&j, '}');
    } else {
        printf("session %llu is saved as %s\n", (unsigned long long)id, a->rest[1]);
    }
    return CLI_FINE;
}

int cmd_save(struct args *a)
{
    return session_do(a, save_act);
}

int cmd_restore(struct args *a)
{
    struct link l;
    backcast_session *s;
    int rc = link_open(&l, a, false);

    if (rc != CLI_FINE)
        return rc;
    int err = backcast_session_restore(l.c, a->rest[0], &s);
    if (err < 0) {
        rc = say_refusal(a, l.c, err, "restore");
    } else {
        rc = after_print(a, l.c, backcast_session_id(s), "is back");
    }
    link_close(&l);
    return rc;
}

struct tok *session_tok(backcast *c, uint64_t id)
{
    struct backcast_stats st;
    struct gguf *g = NULL;
    struct tok *t = NULL;

    if (backcast_stats(c, &st) < 0)
        return NULL;
    const struct backcast_session_stat *s = stats_session(&st, id);
    if (s == NULL)
        return NULL;
    const struct backcast_model_stat *m = stats_model(&st, s->model);
    if (m != NULL && gguf_open(&g, m->path, NULL) == BC_OK) {
        tok_open(&t, g, NULL);
        gguf_close(&g);
    }
    return t;
}

static int fork_act(struct args *a, backcast *c, const struct backcast_session_stat *s)
{
    backcast_session *made;
    int err = backcast_fork_by_id(c, s->id, a->rest[1], &made);
    if (err < 0)
        return say_refusal(a, c, err, "fork");
    return after_print(a, c, backcast_session_id(made), "is made");
}

int cmd_fork(struct args *a)
{
    return session_do(a, fork_act);
}

static int scores_act(struct args *a, backcast *c, const struct backcast_session_stat *s)
{
    struct backcast_score *rows = NULL;
    uint64_t id = s->id;
    char policy[64];
    size_t n = 0;

    snprintf(policy, sizeof(policy), "%s", s->policy);
    struct tok *t = session_tok(c, id);
    int err = backcast_scores_by_id(c, id, &rows, &n);
    if (err == 0)
        scores_print(a, rows, n, t, policy);
    tok_close(&t);
    free(rows);
    return err < 0 ? say_refusal(a, c, err, "scores") : CLI_FINE;
}

int cmd_scores(struct args *a)
{
    return session_do(a, scores_act);
}
