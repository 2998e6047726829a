/* chat.c: renders one turn of a conversation as ids, by a row of chat_templates.c.
 *
 *   what state leaves open | system message | user turn                    | answer
 *   reply_close            | system_open    | user_open  TEXT  user_close  | answer_open
 *   or after_end           |  TEXT close    |                              |
 *
 * The texts between are parsed for special tokens, TEXT never is, and all of it is encoded as one
 * text. Only a default system message is encoded by itself, because the caller must know where it
 * ends; a special token or a newline stands there.
 */
#include "chat_internal.h"
#include <stdlib.h>
#include <string.h>

#define CHAT_MAGIC 0xc4a70001u
#define PARTS_MAX 8u

enum slot {
    SYSTEM_OPEN,
    SYSTEM_CLOSE,
    USER_OPEN,
    USER_CLOSE,
    ANSWER_OPEN,
    REPLY_OPEN,
    REPLY_CLOSE,
    AFTER_END,
    N_SLOTS,
};

struct chat {
    unsigned magic;
    const struct tok *t;
    const struct chat_template *tmpl; /* NULL: none that we know */
    bool has_text;                    /* the file has a template, known or not */
    bool starts_with_bos;
    bool trims;
    char *texts[N_SLOTS]; /* with {bos}, {eos} and <think> filled in */
    char *fallback;       /* default system message; NULL: none */
};

/* s with "{bos}" and "{eos}" replaced, and tail appended. */
static char *fill(const struct tok *t, const char *s, const char *tail)
{
    struct gguf_str bos = {"", 0}, eos = {"", 0};
    if (tok_bos(t) >= 0)
        bos = tok_piece(t, tok_bos(t));
    if (tok_eos(t) >= 0)
        eos = tok_piece(t, tok_eos(t));
    char *ret = malloc(strlen(s) + strlen(tail) + bos.len + eos.len + 1), *out = ret;
    if (ret == NULL)
        return NULL;
    while (*s != 0) { /* each stands in a text at most once */
        bool b = strncmp(s, "{bos}", 5) == 0, e = strncmp(s, "{eos}", 5) == 0;
        struct gguf_str with = b ? bos : e ? eos : (struct gguf_str){s, 1};
        memcpy(out, with.s, with.len);
        out += with.len;
        s += b || e ? 5 : 1;
    }
    strcpy(out, tail);
    return ret;
}

static int fill_all(struct chat *c, struct gguf_str text, struct err *e)
{
    const struct chat_template *m = c->tmpl;
    const char *texts[N_SLOTS] = {
        [SYSTEM_OPEN] = m->system_open, [SYSTEM_CLOSE] = m->system_close,
        [USER_OPEN] = m->user_open,     [USER_CLOSE] = m->user_close,
        [ANSWER_OPEN] = m->answer_open, [REPLY_OPEN] = m->reply_open,
        [REPLY_CLOSE] = m->reply_close, [AFTER_END] = m->after_end,
    };
    bool think = m->think != NULL && chat_contains(text.s, text.len, m->think);
    for (unsigned i = 0; i < N_SLOTS; i++) {
        c->texts[i] = fill(c->t, texts[i], i == ANSWER_OPEN && think ? "<think>\n" : "");
        if (c->texts[i] == NULL)
            return err_nomem(e, strlen(texts[i]));
    }
    int rc = BC_OK;
    if (m->fallback != NULL)
        rc = chat_literal(text.s, text.len, m->fallback, "<|im_end|>", &c->fallback);
    else if ((m->flags & TEMPLATE_ALWAYS) != 0 && (c->fallback = strdup("")) == NULL)
        rc = BC_ENOMEM;
    if (rc != BC_OK)
        return err_nomem(e, text.len);
    c->starts_with_bos =
        tok_bos(c->t) >= 0 && (tok_adds_bos(c->t) || chat_contains(text.s, text.len, "bos_token"));
    c->trims = (m->flags & TEMPLATE_TRIMS) != 0;
    return BC_OK;
}

static const struct chat_template *by_name(const char *name)
{
    const struct chat_template *m;
    for (unsigned i = 0; (m = chat_template_at(i)) != NULL; i++)
        if (strcmp(m->name, name) == 0)
            return m;
    return NULL;
}

int chat_open(struct chat **ret, const struct gguf *g, const struct tok *t, const char *name,
              struct err *e)
{
    struct gguf_str text = {"", 0};
    int rc = gguf_get_str(g, "tokenizer.chat_template", &text, e);
    if (rc != BC_OK && rc != BC_ENOTFOUND)
        return rc;
    if (name != NULL && by_name(name) == NULL)
        return err_set(e, BC_EUNKNOWN, "chat_template", "no chat template is called \"%s\"", name);
    struct chat *c = calloc(1, sizeof *c);
    if (c == NULL)
        return err_nomem(e, sizeof *c);
    c->magic = CHAT_MAGIC;
    c->t = t;
    c->has_text = rc == BC_OK;
    c->tmpl = name != NULL ? by_name(name) : chat_template_match(text.s, text.len);
    rc = c->tmpl != NULL ? fill_all(c, text, e) : BC_OK;
    if (rc != BC_OK) {
        chat_close(&c);
        return rc;
    }
    *ret = c;
    return BC_OK;
}

void chat_close(struct chat **cp)
{
    struct chat *c = *cp;
    if (c == NULL)
        return;
    MAGIC_OK(c, CHAT_MAGIC);
    for (unsigned i = 0; i < N_SLOTS; i++)
        free(c->texts[i]);
    free(c->fallback);
    c->magic = 0;
    free(c);
    *cp = NULL;
}

const char *chat_name(const struct chat *c)
{
    return c != NULL && c->tmpl != NULL ? c->tmpl->name : "none";
}

const char *chat_names(unsigned i)
{
    const struct chat_template *m = chat_template_at(i);
    return m != NULL ? m->name : NULL;
}

/* A turn while its parts are gathered. */
struct turn {
    const struct chat *c;
    struct tok_part parts[PARTS_MAX];
    size_t n_parts;
    int32_t *ids; /* of a default system message */
    size_t n;
};

static void part_text(struct turn *w, enum slot slot)
{
    const char *s = w->c->texts[slot];
    bc_assert(w->n_parts < PARTS_MAX);
    w->parts[w->n_parts++] = (struct tok_part){s, strlen(s), true};
}

/* Bytes of white space at s (0: none): Unicode's, as Jinja's trim sees it. */
static size_t space_at(const uint8_t *s, size_t n)
{
    if ((s[0] >= 0x09 && s[0] <= 0x0d) || (s[0] >= 0x1c && s[0] <= 0x20))
        return 1;
    if (n >= 2 && s[0] == 0xc2 && (s[1] == 0x85 || s[1] == 0xa0))
        return 2;
    if (n < 3)
        return 0;
    unsigned c = (unsigned)s[0] << 16 | (unsigned)s[1] << 8 | s[2];
    bool space = c == 0xe19a80 || (c >= 0xe28080 && c <= 0xe2808a) || c == 0xe280a8 ||
                 c == 0xe280a9 || c == 0xe280af || c == 0xe2819f || c == 0xe38080;
    return space ? 3 : 0;
}

static void part_message(struct turn *w, const char *s, size_t len)
{
    const uint8_t *p = (const uint8_t *)s;
    size_t k;
    if (w->c->trims) {
        while (len > 0 && (k = space_at(p, len)) > 0) {
            p += k;
            len -= k;
        }
        for (bool more = true; more;) {
            more = false;
            for (k = 1; k <= 3 && k <= len && !more; k++)
                more = space_at(p + len - k, k) == k;
            if (more)
                len -= k - 1;
        }
    }
    bc_assert(w->n_parts < PARTS_MAX);
    w->parts[w->n_parts++] = (struct tok_part){(const char *)p, len, false};
}

static int check_role(const struct chat *c, enum chat_state state, const char *role, struct err *e)
{
    unsigned flags = c->tmpl->flags;
    if (strcmp(role, "user") == 0)
        return BC_OK;
    if (strcmp(role, "system") == 0) {
        if (state == CHAT_FRESH || (flags & TEMPLATE_LATE_SYSTEM) != 0)
            return BC_OK;
        return err_set(e, BC_EINVALID, "role",
                       "template %s has no place for a system message after the start",
                       c->tmpl->name);
    }
    if (strcmp(role, "assistant") == 0) {
        if (state == CHAT_USER || (flags & TEMPLATE_ALTERNATES) == 0)
            return BC_OK;
        return err_set(e, BC_EINVALID, "role",
                       "template %s takes an assistant message only after a user message",
                       c->tmpl->name);
    }
    return err_set(e, BC_EINVALID, "role",
                   "role \"%s\" is not \"system\", \"user\" or \"assistant\"", role);
}

/* The default system message, encoded into w->ids. */
static int add_fallback(struct turn *w, struct err *e)
{
    const struct chat *c = w->c;
    if (c->fallback == NULL)
        return BC_OK;
    struct tok_part parts[3] = {
        {c->texts[SYSTEM_OPEN], strlen(c->texts[SYSTEM_OPEN]), true},
        {c->fallback, strlen(c->fallback), false},
        {c->texts[SYSTEM_CLOSE], strlen(c->texts[SYSTEM_CLOSE]), true},
    };
    return tok_encode_parts(c->t, parts, ARRAY_LEN(parts), false, &w->ids, &w->n, e);
}

/* Joins BOS (bos >= 0), w's own ids and the n ids of the turn. */
static int finish(struct turn *w, int32_t bos, const int32_t *ids, size_t n, struct chat_turn *ret,
                  struct err *e)
{
    const int32_t *first = w->n > 0 ? w->ids : ids;
    size_t n_bos =
        bos >= 0 && !(w->n + n > 0 && first[0] == bos); /* the template may have its own */
    size_t total = n_bos + w->n + n;
    int32_t *all = malloc((total + 1) * sizeof *all);
    if (all == NULL)
        return err_nomem(e, (total + 1) * sizeof *all);
    if (n_bos > 0)
        all[0] = bos;
    if (w->n > 0)
        memcpy(all + n_bos, w->ids, w->n * sizeof *all);
    if (n > 0)
        memcpy(all + n_bos + w->n, ids, n * sizeof *all);
    ret->ids = all;
    ret->n = total;
    ret->n_system = w->n > 0 ? n_bos + w->n : 0;
    return BC_OK;
}

static void add_turn(struct turn *w, enum chat_state state, const char *role, const char *text,
                     size_t len, bool answer)
{
    bool folded = state == CHAT_SYSTEM && (w->c->tmpl->flags & TEMPLATE_FOLDS) != 0;
    if (state == CHAT_OPEN || state == CHAT_ENDED)
        part_text(w, state == CHAT_OPEN ? REPLY_CLOSE : AFTER_END);
    if (role[0] == 's') {
        part_text(w, SYSTEM_OPEN);
        part_message(w, text, len);
        part_text(w, SYSTEM_CLOSE);
    } else if (role[0] == 'a') {
        part_text(w, REPLY_OPEN);
        part_message(w, text, len);
        return; /* left open: the next turn closes it, or the model goes on */
    } else {
        if (!folded)
            part_text(w, USER_OPEN);
        part_message(w, text, len);
        part_text(w, USER_CLOSE);
    }
    if (answer)
        part_text(w, ANSWER_OPEN);
}

static enum chat_state state_after(const struct chat *c, const char *role, bool answer)
{
    if (role[0] == 'a' || (answer && c->texts[ANSWER_OPEN][0] != 0))
        return CHAT_OPEN; /* even if the model then says nothing */
    return role[0] == 's' ? CHAT_SYSTEM : CHAT_USER;
}

int chat_render(const struct chat *c, enum chat_state state, const char *role, const char *text,
                size_t len, bool answer, struct chat_turn *ret, struct err *e)
{
    if (c == NULL || c->tmpl == NULL)
        return err_set(
            e, BC_EUNSUPPORTED, "chat_template",
            c != NULL && c->has_text
                ? "the model's chat template is not one that is known: use a raw prompt, or name a "
                  "template"
                : "the model has no chat template: use a raw prompt, or name a template");
    MAGIC_OK(c, CHAT_MAGIC);
    bc_assert(role != NULL && (text != NULL || len == 0));
    struct turn w = {.c = c};
    struct chat_turn turn = {0};
    int32_t *ids = NULL;
    size_t n = 0;
    int rc = check_role(c, state, role, e);
    if (rc == BC_OK && state == CHAT_FRESH && role[0] != 's')
        rc = add_fallback(&w, e);
    if (rc != BC_OK)
        return rc;
    add_turn(&w, state, role, text, len, answer);
    /* a space prefix belongs to a text's start and behind special tokens, not into running text */
    bool continued = w.n > 0 || (state != CHAT_FRESH && state != CHAT_ENDED);
    rc = tok_encode_parts(c->t, w.parts, w.n_parts, continued, &ids, &n, e);
    if (rc == BC_OK)
        rc = finish(&w, state == CHAT_FRESH && c->starts_with_bos ? tok_bos(c->t) : -1, ids, n,
                    &turn, e);
    if (rc == BC_OK) {
        if (role[0] == 's' && state == CHAT_FRESH)
            turn.n_system = turn.n;
        turn.state = state_after(c, role, answer);
        *ret = turn;
    }
    free(ids);
    free(w.ids);
    return rc;
}

void chat_turn_free(struct chat_turn *t)
{
    free(t->ids);
    memset(t, 0, sizeof *t);
}
