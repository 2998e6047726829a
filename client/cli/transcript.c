/* transcript.c: see transcript.h. */
#include <stdlib.h>
#include <string.h>
#include "transcript.h"

#define UNKNOWN_ID (-1)

struct transcript {
    unsigned magic;
    struct tok *tok;   /* NULL: no words */
    struct chat *chat; /* NULL: raw prompts only */
    enum chat_state state, after;
    int32_t end_id; /* sampled end token that opens the next turn; -1: none */
    int32_t *ids;   /* by stream index; UNKNOWN_ID */
    uint8_t *gone;  /* 1: dropped */
    size_t n, cap;
    size_t base;  /* where the present turn begins */
    bool guessed; /* ids from base on are ours, no TEXT event has confirmed their number yet */
    uint32_t out; /* ids that TEXT events brought in this turn */
};
#define TRANSCRIPT_MAGIC 0x42637472u

struct transcript *transcript_open(const char *model, const char *chat_template)
{
    struct transcript *t = calloc(1, sizeof(*t));
    struct gguf *g = NULL;

    if (t == NULL)
        return NULL;
    t->magic = TRANSCRIPT_MAGIC;
    t->end_id = -1;
    if (model == NULL || gguf_open(&g, model, NULL) < 0)
        return t;
    if (tok_open(&t->tok, g, NULL) == BC_OK)
        chat_open(&t->chat, g, t->tok,
                  chat_template != NULL && chat_template[0] != '\0' ? chat_template : NULL, NULL);
    gguf_close(&g);
    return t;
}

void transcript_close(struct transcript **pt)
{
    struct transcript *t = *pt;

    if (t == NULL)
        return;
    *pt = NULL;
    chat_close(&t->chat);
    tok_close(&t->tok);
    free(t->ids);
    free(t->gone);
    free(t);
}

bool transcript_has_words(const struct transcript *t)
{
    return t != NULL && t->tok != NULL;
}

struct tok *transcript_tok(struct transcript *t)
{
    return t->tok;
}

uint64_t transcript_tokens(const struct transcript *t)
{
    return t->n;
}

bool transcript_dropped(const struct transcript *t, uint64_t stream)
{
    return stream < t->n && t->gone[stream] != 0;
}

/* Makes the stream known up to index n; new ids are unknown. */
static bool grow(struct transcript *t, size_t n)
{
    if (n > t->cap) {
        size_t cap = BC_MAX(n, t->cap * 2 + 1024);
        int32_t *ids = realloc(t->ids, cap * sizeof(*ids));
        if (ids != NULL)
            t->ids = ids;
        uint8_t *gone = realloc(t->gone, cap);
        if (gone != NULL)
            t->gone = gone;
        if (ids == NULL || gone == NULL)
            return false;
        t->cap = cap;
    }
    for (; t->n < n; t->n++) {
        t->ids[t->n] = UNKNOWN_ID;
        t->gone[t->n] = 0;
    }
    return true;
}

static void append(struct transcript *t, const int32_t *ids, size_t n)
{
    size_t at = t->n;
    if (n > 0 && grow(t, at + n))
        memcpy(t->ids + at, ids, n * sizeof(*ids));
}

void transcript_turn(struct transcript *t, const char *role, const char *text, size_t len,
                     bool answer)
{
    struct chat_turn turn = {0};
    int32_t *ids = NULL;
    size_t n = 0;

    t->base = t->n;
    t->out = 0;
    t->guessed = true;
    t->after = role != NULL ? t->state : CHAT_USER;
    if (t->tok == NULL)
        return;
    if (t->end_id >= 0) {
        append(t, &t->end_id, 1);
        t->end_id = -1;
    }
    if (role != NULL) {
        if (len > 0 && t->chat != NULL &&
            chat_render(t->chat, t->state, role, text, len, answer, &turn, NULL) == BC_OK) {
            append(t, turn.ids, turn.n);
            t->after = turn.state;
            chat_turn_free(&turn);
        }
        return;
    }
    struct tok_flags flags = {.parse_special = true, .no_prefix = t->base > 0};
    int32_t bos = tok_bos(t->tok);
    if (len == 0 || tok_encode(t->tok, text, len, flags, &ids, &n, NULL) < 0)
        return;
    if (t->base == 0 && tok_adds_bos(t->tok) && bos >= 0 && (n == 0 || ids[0] != bos))
        append(t, &bos, 1);
    append(t, ids, n);
    free(ids);
}

/* The answer begins at `first`: if our prompt ends elsewhere, none of its words can be trusted. */
static void confirm(struct transcript *t, uint64_t first)
{
    if (!t->guessed)
        return;
    t->guessed = false;
    if (t->n == first)
        return;
    size_t have = BC_MIN(t->n, (size_t)first);
    for (size_t i = BC_MIN(t->base, have); i < have; i++)
        t->ids[i] = UNKNOWN_ID;
    t->n = have;
    grow(t, first);
}

static void text_seen(struct transcript *t, const struct backcast_event *ev)
{
    if (ev->text.n_ids == 0 || ev->text.first_stream > (1u << 30))
        return;
    confirm(t, ev->text.first_stream);
    size_t end = (size_t)ev->text.first_stream + ev->text.n_ids;
    if (!grow(t, end))
        return;
    memcpy(t->ids + ev->text.first_stream, ev->text.ids, ev->text.n_ids * sizeof(*t->ids));
    t->out += (uint32_t)ev->text.n_ids;
}

static void pruned_seen(struct transcript *t, const struct backcast_event *ev)
{
    for (size_t i = 0; i < ev->pruned.n_dropped; i++) {
        struct backcast_range r = ev->pruned.dropped[i];
        if (r.first > (1u << 30) || r.count > (1u << 30))
            continue;
        size_t end = (size_t)(r.first + r.count);
        if (end > t->n && !grow(t, end))
            continue;
        memset(t->gone + r.first, 1, (size_t)r.count);
    }
}

void transcript_event(struct transcript *t, const struct backcast_event *ev)
{
    if (ev->type == BACKCAST_TEXT) {
        text_seen(t, ev);
    } else if (ev->type == BACKCAST_PRUNED) {
        pruned_seen(t, ev);
    } else if (ev->type == BACKCAST_LOST) {
        t->guessed = true; /* the next TEXT says where we are; what lies between stays unknown */
        t->base = t->n;
    } else if (ev->type == BACKCAST_END && strcmp(ev->end.reason, "scores") != 0) {
        t->end_id = ev->end.end_id;
        t->state = ev->end.end_id >= 0 ? CHAT_ENDED : t->out > 0 ? CHAT_OPEN : t->after;
        if (t->guessed && t->base + ev->end.tokens_in < t->n) /* cut short while it was read */
            t->n = t->base + ev->end.tokens_in;
        t->guessed = false;
    }
}

/* ---- words */

/* Ids a..b as text; returns the bytes that all of them need, writes at most len. */
static size_t words_put(const struct transcript *t, size_t a, size_t b, char *buf, size_t len)
{
    size_t at = 0;

    for (size_t i = a; i < b; i++) {
        static const char unknown[] = "?";
        struct gguf_str p = {unknown, 1};
        if (t->ids[i] >= 0 && (uint32_t)t->ids[i] < tok_n_vocab(t->tok))
            p = tok_piece(t->tok, t->ids[i]);
        for (size_t k = 0; k < p.len; k++, at++)
            if (at < len)
                buf[at] = p.s[k];
    }
    return at;
}

static bool known(const struct transcript *t, size_t a, size_t b)
{
    for (size_t i = a; i < b; i++)
        if (t->ids[i] == UNKNOWN_ID)
            return false;
    return true;
}

static void clean(char *s, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if ((unsigned char)s[i] < 0x20 || s[i] == 0x7f)
            s[i] = ' ';
}

/* Moves a cut at `at` back to where a UTF-8 character begins. */
static size_t char_start(const char *s, size_t at)
{
    while (at > 0 && ((unsigned char)s[at] & 0xc0) == 0x80)
        at--;
    return at;
}

bool transcript_words(const struct transcript *t, struct backcast_range r, char *buf, size_t len)
{
    if (!transcript_has_words(t) || r.first + r.count > t->n ||
        !known(t, (size_t)r.first, (size_t)(r.first + r.count)))
        return false;
    size_t a = (size_t)r.first, b = a + (size_t)r.count;
    size_t need = words_put(t, a, b, NULL, 0);
    char *all = malloc(need + 1);
    if (all == NULL)
        return false;
    words_put(t, a, b, all, need);
    all[need] = '\0';
    clean(all, need);
    if (need < len) {
        memcpy(buf, all, need + 1);
    } else {
        size_t room = len - 6, head = char_start(all, room / 2);
        size_t tail = char_start(all, need - room / 2);
        memcpy(buf, all, head);
        memcpy(buf + head, " ... ", 5);
        size_t rest = BC_MIN(need - tail, len - head - 6);
        memcpy(buf + head + 5, all + need - rest, rest);
        buf[head + 5 + rest] = '\0';
    }
    free(all);
    return true;
}
