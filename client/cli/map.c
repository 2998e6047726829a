/* map.c: see map.h. */
#include "map.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "json.h"
#include "tok.h"

#define DROPPED 4u /* flag of a row */
#define HELD 3u    /* frozen, recent */

/* ---- what there is to draw */

static struct gguf_str piece(const struct map *m, size_t row)
{
    int32_t id = m->rows[row].id;
    if (id >= 0 && (uint32_t)id < tok_n_vocab(m->tok))
        return tok_piece(m->tok, id);
    return (struct gguf_str){"?", 1};
}

static bool text_make(struct map *m)
{
    size_t len = 0;

    for (size_t i = 0; i < m->n; i++)
        len += piece(m, i).len;
    m->text = malloc(len + 1);
    m->ends = calloc(m->n + 1, sizeof(*m->ends));
    m->level = calloc(m->n + 1, 1);
    if (m->text == NULL || m->ends == NULL || m->level == NULL)
        return false;
    len = 0;
    for (size_t i = 0; i < m->n; i++) {
        struct gguf_str p = piece(m, i);
        if (p.len > 0)
            memcpy(m->text + len, p.s, p.len);
        len += p.len;
        m->ends[i] = len;
    }
    return true;
}

struct ranked {
    float score;
    size_t row;
};

static int by_score(const void *a, const void *b)
{
    const struct ranked *x = a, *y = b;
    return x->score < y->score   ? -1
           : x->score > y->score ? 1
                                 : (x->row > y->row) - (x->row < y->row);
}

/* Equal parts of the rows that a prune would judge: the lowest scores stay, and are level MAP_LEVELS. */
static bool levels_make(struct map *m)
{
    struct ranked *r = calloc(m->n + 1, sizeof(*r));
    size_t n = 0;

    if (r == NULL)
        return false;
    for (size_t i = 0; i < m->n && strcmp(m->policy, "none") != 0; i++)
        if (!(m->rows[i].flags & (DROPPED | HELD)) && isfinite(m->rows[i].score))
            r[n++] = (struct ranked){m->rows[i].score, i};
    qsort(r, n, sizeof(*r), by_score);
    for (size_t i = 0; i < n; i++)
        m->level[r[i].row] = (unsigned char)(MAP_LEVELS - i * MAP_LEVELS / n);
    free(r);
    return true;
}

int map_open(struct map *ret, const struct backcast_score *rows, size_t n, struct tok *tok,
             const char *name, const char *policy)
{
    struct map m = {.rows = rows, .n = n, .tok = tok, .name = name, .policy = policy};

    for (size_t i = 0; i < n; i++)
        m.n_dropped += (rows[i].flags & DROPPED) != 0;
    if (!text_make(&m) || !levels_make(&m)) {
        map_close(&m);
        return -1;
    }
    *ret = m;
    return 0;
}

void map_close(struct map *m)
{
    free(m->text);
    free(m->ends);
    free(m->level);
    m->text = NULL;
    m->ends = NULL;
    m->level = NULL;
}

/* Where the characters that begin in row's token end. */
static size_t chars_end(const struct map *m, size_t row, size_t from)
{
    size_t all = m->n > 0 ? m->ends[m->n - 1] : 0;
    while (from < m->ends[row]) {
        size_t n = utf8_length(m->text + from, all - from);
        from += n > 0 ? n : 1;
    }
    return from;
}

/* Tokens between row and the one before it that nobody knows any more. */
static uint64_t gap(const struct map *m, size_t row)
{
    uint64_t next = row > 0 ? m->rows[row - 1].stream + 1 : 0;
    return m->rows[row].stream > next ? m->rows[row].stream - next : 0;
}

/* A character that is no text: it could move a cursor, or stands for nothing on a page. */
static bool is_control(const char *s, size_t n)
{
    unsigned char b = (unsigned char)s[0];
    if (n == 2 && b == 0xc2 && (unsigned char)s[1] < 0xa0)
        return true;
    return n == 1 && (b < 0x20 || b == 0x7f) && b != '\n' && b != '\t';
}

/* ---- on a terminal */

static void plain(FILE *f, const char *s, size_t len)
{
    for (size_t i = 0, n; i < len; i += n) {
        n = utf8_length(s + i, len - i);
        if (n == 0 || is_control(s + i, n))
            putc('?', f);
        else
            fwrite(s + i, 1, n, f);
        n = n > 0 ? n : 1;
    }
}

/* Of row's text; -1: dropped. */
static int style_of(const struct map *m, size_t row)
{
    return m->rows[row].flags & DROPPED ? -1 : m->level[row];
}

static void style_print(FILE *f, int style, bool on, bool color)
{
    static const char *const shades[MAP_LEVELS + 1] = {"",
                                                       "\033[38;5;16;48;5;230m",
                                                       "\033[38;5;16;48;5;229m",
                                                       "\033[38;5;16;48;5;222m",
                                                       "\033[38;5;16;48;5;215m",
                                                       "\033[38;5;16;48;5;208m"};
    if (!color && style < 0)
        fputs(on ? "[-" : "-]", f);
    else if (color && !on)
        fputs("\033[0m", f);
    else if (color)
        fputs(style < 0 ? "\033[2;9m" : shades[style], f);
}

void map_print(FILE *f, const struct map *m, bool color)
{
    int style = 0;
    size_t at = 0;

    for (size_t i = 0; i < m->n; i++) {
        size_t end = chars_end(m, i, at);
        uint64_t lost = gap(m, i);
        if ((end > at && style_of(m, i) != style) || lost > 0) {
            style_print(f, style, false, color);
            if (lost > 0)
                fprintf(f, "[... %llu forgotten tokens ...]", (unsigned long long)lost);
            style = style_of(m, i);
            style_print(f, style, true, color);
        }
        plain(f, m->text + at, end - at);
        at = end;
    }
    style_print(f, style, false, color);
    putc('\n', f);
}

/* ---- as a page */

static void escaped(FILE *f, const char *s, size_t len)
{
    for (size_t i = 0, n; i < len; i += n) {
        n = utf8_length(s + i, len - i);
        if (n == 0 || is_control(s + i, n))
            fputs("&#xFFFD;", f);
        else if (s[i] == '<')
            fputs("&lt;", f);
        else if (s[i] == '>')
            fputs("&gt;", f);
        else if (s[i] == '&')
            fputs("&amp;", f);
        else if (s[i] == '"')
            fputs("&quot;", f);
        else if (s[i] == '\'')
            fputs("&#39;", f);
        else
            fwrite(s + i, 1, n, f);
        n = n > 0 ? n : 1;
    }
}

static const char page_head[] =
    "<!DOCTYPE html>\n"
    "<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src "
    "'unsafe-inline'\">\n"
    "<meta name=\"viewport\" content=\"width=device-width\">\n";
static const char page_style[] =
    "<style>\n"
    "body{margin:2em auto;max-width:60em;padding:0 1em;background:#fff;color:#111;"
    "font:16px/1.6 system-ui,sans-serif}\n"
    "pre{white-space:pre-wrap;overflow-wrap:anywhere;font:15px/1.7 ui-monospace,monospace}\n"
    "del{color:#999;text-decoration:line-through}\n"
    ".g{color:#999;font-style:italic}\n"
    ".h{border-bottom:2px solid #48f}\n"
    ".s1{background:#fff8d9}.s2{background:#ffeeb0}.s3{background:#ffdc80}.s4{background:#ffc050}"
    ".s5{background:#ff9d2e}\n"
    "</style></head><body>\n";

static void row_html(FILE *f, const struct map *m, size_t row, size_t from, size_t end)
{
    const struct backcast_score *r = &m->rows[row];
    const char *tag = r->flags & DROPPED ? "del" : "span";

    fprintf(f, "<%s title=\"%llu", tag, (unsigned long long)r->stream);
    if (!(r->flags & DROPPED) && isfinite(r->score) && strcmp(m->policy, "none") != 0)
        fprintf(f, ": %.4f", (double)r->score);
    fputs(r->flags & 1 ? ", frozen" : r->flags & 2 ? ", recent" : "", f);
    if (r->flags & HELD)
        fputs("\" class=\"h", f);
    else if (m->level[row] > 0)
        fprintf(f, "\" class=\"s%d", m->level[row]);
    fputs("\">", f);
    escaped(f, m->text + from, end - from);
    fprintf(f, "</%s>", tag);
}

void map_html(FILE *f, const struct map *m)
{
    size_t at = 0;

    fputs(page_head, f);
    fputs("<title>", f);
    escaped(f, m->name, strlen(m->name));
    fputs("</title>\n", f);
    fputs(page_style, f);
    fputs("<h1>", f);
    escaped(f, m->name, strlen(m->name));
    fprintf(f, "</h1>\n<p>%zu tokens cached, %zu dropped by policy ", m->n - m->n_dropped,
            m->n_dropped);
    escaped(f, m->policy, strlen(m->policy));
    fputs(". <del>Dropped</del>; <span class=\"h\">never dropped</span>; kept, the less expected "
          "by what came later the stronger: <span class=\"s1\">little</span> <span "
          "class=\"s2\">&#183;</span> <span class=\"s3\">&#183;</span> <span "
          "class=\"s4\">&#183;</span> <span class=\"s5\">much</span>.</p>\n<pre>",
          f);
    for (size_t i = 0; i < m->n; i++) {
        size_t end = chars_end(m, i, at);
        uint64_t lost = gap(m, i);
        if (lost > 0)
            fprintf(f, "<span class=\"g\">[%llu forgotten tokens]</span>",
                    (unsigned long long)lost);
        if (end > at)
            row_html(f, m, i, at, end);
        at = end;
    }
    fputs("</pre>\n</body></html>\n", f);
}
