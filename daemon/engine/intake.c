/* intake.c: the two threads beside the engine's: text to token ids, and files to models.
 *
 *   intake   prompt --> chat_render | tok_encode --> ids, or a verdict --> the engine's inbox
 *   loader   path   --> models_load --> READY or FAILED --> models_take_loaded
 *
 * Both are slow (a long prompt: milliseconds a megabyte; a model: seconds), neither may hold up a
 * pass, and a load may not hold up a prompt. They touch immutable things (tok, chat) and what they
 * were handed. When the engine is stepped by hand the same work runs inside the step.
 *
 * A prompt knows whether it opens the session's stream: BOS stands at stream index 0 only. Special
 * tokens are parsed in raw prompts, never in chat text (chat_render sees to that).
 */
#include "core.h"
#include <stdlib.h>
#include <string.h>

static int encode_raw(struct command *c, struct err *e)
{
    const struct tok *t = c->own.m->tok;
    struct tok_flags flags = {.parse_special = true, .no_prefix = !c->own.fresh};
    int32_t *ids = NULL, bos = tok_bos(t);
    size_t n = 0;
    c->u.generate.chat_after = CHAT_USER; /* what stands there is the caller's own business */
    if (c->u.generate.len == 0)
        return BC_OK;
    int rc = tok_encode(t, c->u.generate.text, c->u.generate.len, flags, &ids, &n, e);
    if (rc < 0)
        return rc;
    if (c->own.fresh && tok_adds_bos(t) && bos >= 0 && (n == 0 || ids[0] != bos)) {
        int32_t *longer = malloc((n + 1) * sizeof *longer);
        if (longer == NULL) {
            free(ids);
            return err_nomem(e, (n + 1) * sizeof *longer);
        }
        longer[0] = bos;
        if (n > 0)
            memcpy(longer + 1, ids, n * sizeof *ids);
        free(ids);
        ids = longer;
        n++;
    }
    c->u.generate.ids = ids;
    c->u.generate.n_ids = n;
    return BC_OK;
}

/* A user's turn asks for an answer, an assistant's text is the beginning of one, a system message is
 * put down and nothing more. An empty user text goes on with an answer that was cut: nothing to
 * render. */
static int encode_chat(struct command *c, struct err *e)
{
    const char *role = c->u.generate.role[0] != '\0' ? c->u.generate.role : "user";
    bool user = strcmp(role, "user") == 0, answer = user && c->u.generate.opt.max_tokens > 0;
    c->u.generate.chat_after = c->u.generate.chat;
    if (strcmp(role, "system") == 0)
        c->u.generate.opt.max_tokens = 0;
    if (user && c->u.generate.len == 0)
        return BC_OK;
    if (strcmp(role, "assistant") == 0 && c->u.generate.len == 0)
        return err_set(e, BC_EINVALID, "text", "the assistant's text is empty");
    struct chat_turn turn;
    int rc = chat_render(c->own.chat, c->u.generate.chat, role,
                         c->u.generate.text != NULL ? c->u.generate.text : "", c->u.generate.len,
                         answer, &turn, e);
    if (rc < 0)
        return rc;
    c->u.generate.ids = turn.ids; /* taken over: chat_turn_free is free() of it */
    c->u.generate.n_ids = turn.n;
    c->u.generate.n_system = turn.n_system;
    c->u.generate.chat_after = turn.state;
    return BC_OK;
}

/* A text that cannot fit however it is cut into tokens is not cut: that takes seconds for some
 * megabytes of one letter, and the next user's prompt waits behind it. */
static int check_length(const struct command *c, struct err *e)
{
    uint64_t context = c->own.m->info.context_train;
    size_t piece = tok_bytes_max(c->own.m->tok);
    if (c->u.generate.kind == PROMPT_IDS || context == 0 || c->u.generate.len / piece <= context)
        return BC_OK;
    return err_amount(e, BC_ECONTEXT, "text", c->u.generate.len / piece, context,
                      "%zu bytes of prompt: the model was trained on texts of %llu tokens, each "
                      "of %zu bytes at most%s",
                      c->u.generate.len, (unsigned long long)context, piece,
                      c->own.endless ? "; what is longer must come in parts" : "");
}

static void intake_run(struct engine *en, struct command *c)
{
    struct err *e = &c->u.generate.err;
    int rc = generate_options_check(&c->u.generate.opt, e);
    if (rc == BC_OK)
        rc = check_length(c, e);
    if (c->u.generate.opt.max_tokens == UINT32_MAX)
        c->u.generate.opt.max_tokens = en->opt.max_tokens_default;
    if (rc == BC_OK && c->u.generate.kind == PROMPT_CHAT)
        rc = encode_chat(c, e);
    else if (rc == BC_OK && c->u.generate.kind == PROMPT_RAW)
        rc = encode_raw(c, e);
    else
        c->u.generate.chat_after = CHAT_USER;
    c->u.generate.failed = rc;
    free(c->u.generate.text);
    c->u.generate.text = NULL;
    queue_to_engine(en, c);
}

/* The next prompt. wait: until there is one; NULL: none, or the engine stops. */
static struct command *intake_take(struct engine *en, bool wait)
{
    pthread_mutex_lock(&en->lock);
    while (wait && en->intake == NULL && !en->stopping)
        pthread_cond_wait(&en->intake_cond, &en->lock);
    struct command *c = wait && en->stopping ? NULL : en->intake;
    if (c != NULL) {
        if ((en->intake = c->next) == NULL)
            en->intake_tail = &en->intake;
        c->next = NULL;
    }
    pthread_mutex_unlock(&en->lock);
    return c;
}

void *intake_main(void *arg)
{
    struct engine *en = arg;
    for (struct command *c; (c = intake_take(en, true)) != NULL;)
        intake_run(en, c);
    return NULL;
}

void intake_drain(struct engine *en)
{
    for (struct command *c; (c = intake_take(en, false)) != NULL;)
        intake_run(en, c);
}

/* ---- models ---- */

static void load_progress(void *arg, uint64_t done, uint64_t total)
{
    struct model_ref *m = arg;
    const struct engine_options *opt = &m->en->opt;
    if (opt->progress != NULL)
        opt->progress(opt->progress_arg, m->name, done, total);
}

static struct model_ref *loads_take(struct engine *en, bool wait)
{
    pthread_mutex_lock(&en->lock);
    while (wait && en->n_loads == 0 && !en->stopping)
        pthread_cond_wait(&en->loads_cond, &en->lock);
    struct model_ref *m = NULL;
    if (en->n_loads > 0 && !(wait && en->stopping)) {
        m = en->loads[0];
        memmove(en->loads, en->loads + 1, --en->n_loads * sizeof en->loads[0]);
    }
    pthread_mutex_unlock(&en->lock);
    return m;
}

static void loads_run(struct engine *en, struct model_ref *m)
{
    models_load(m, load_progress, m);
    pthread_mutex_lock(&en->lock);
    en->loaded[en->n_loaded++] = m;
    pthread_cond_signal(&en->engine_cond);
    pthread_mutex_unlock(&en->lock);
}

void *loads_main(void *arg)
{
    struct engine *en = arg;
    for (struct model_ref *m; (m = loads_take(en, true)) != NULL;)
        loads_run(en, m);
    return NULL;
}

void loads_drain(struct engine *en)
{
    for (struct model_ref *m; (m = loads_take(en, false)) != NULL;)
        loads_run(en, m);
}
