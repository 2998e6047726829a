/* cmd_text.c: tokenize and detokenize: a model's vocabulary at hand, no daemon needed.
 *
 * tokenize prints ids as one JSON array, detokenize takes such an array (or bare numbers) and prints
 * the bytes. A vocabulary-only GGUF is enough. */
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include "cli.h"
#include "input.h"
#include "json.h"
#include "models.h"
#include "tok.h"

static int vocab_open(const struct args *a, struct tok **ret, const char *doing)
{
    char path[PATH_MAX];
    struct gguf *g = NULL;
    struct err e = {0};

    if (model_find(a->model, path, sizeof(path), &e) < 0 || model_file_open(&g, path, &e) < 0) {
        say_err(&e, doing);
        return CLI_FAILED;
    }
    int rc = tok_open(ret, g, &e);
    gguf_close(&g);
    if (rc < 0) {
        err_of_file(&e, path);
        say_err(&e, doing);
        return CLI_FAILED;
    }
    return CLI_FINE;
}

static void ids_print(const struct args *a, const struct tok *t, const int32_t *ids, size_t n)
{
    struct json j = json_start(stdout);

    if (a->pieces && !a->json) {
        for (size_t i = 0; i < n; i++) {
            struct gguf_str p = tok_piece(t, ids[i]);
            printf("%d\t", ids[i]);
            for (size_t k = 0; k < p.len; k++) {
                unsigned char b = (unsigned char)p.s[k];
                if (b < 0x20 || b == 0x7f || b == '\\')
                    printf("\\x%02x", b);
                else
                    putchar(b);
            }
            putchar('\n');
        }
        return;
    }
    if (a->json)
        json_open(&j, NULL, '{');
    json_open(&j, a->json ? "ids" : NULL, '[');
    for (size_t i = 0; i < n; i++)
        json_int(&j, NULL, ids[i]);
    json_shut(&j, ']');
    if (!a->json)
        return;
    json_uint(&j, "count", n);
    if (a->pieces) {
        json_open(&j, "pieces", '[');
        for (size_t i = 0; i < n; i++) {
            struct gguf_str p = tok_piece(t, ids[i]);
            json_bytes(&j, NULL, p.s, p.len);
        }
        json_shut(&j, ']');
    }
    json_shut(&j, '}');
}

int cmd_tokenize(struct args *a)
{
    struct tok *t = NULL;
    struct err e = {0};
    char *text = NULL;
    int32_t *ids = NULL;
    size_t len = 0, n = 0;

    int rc = input_text(a, &text, &len);
    if (rc == CLI_FINE)
        rc = vocab_open(a, &t, "tokenize");
    if (rc == CLI_FINE) {
        struct tok_flags flags = {.parse_special = !a->plain};
        if (tok_encode(t, text, len, flags, &ids, &n, &e) < 0) {
            say_err(&e, "tokenize");
            rc = CLI_FAILED;
        }
    }
    if (rc == CLI_FINE && a->bos && tok_adds_bos(t) && tok_bos(t) >= 0) {
        int32_t *more = realloc(ids, (n + 1) * sizeof(*ids));
        if (more == NULL) {
            say("tokenize: out of memory");
            rc = CLI_FAILED;
        } else {
            ids = more;
            memmove(ids + 1, ids, n * sizeof(*ids));
            ids[0] = tok_bos(t);
            n++;
        }
    }
    if (rc == CLI_FINE)
        ids_print(a, t, ids, n);
    free(ids);
    free(text);
    tok_close(&t);
    return rc;
}

/* Numbers, with brackets, commas and white space between them. */
static int ids_parse(const char *text, size_t len, uint32_t n_vocab, int32_t **ret, size_t *ret_n)
{
    int32_t *ids = malloc((len / 2 + 2) * sizeof(*ids));
    size_t n = 0;

    if (ids == NULL) {
        say("detokenize: out of memory");
        return CLI_FAILED;
    }
    for (size_t i = 0; i < len;) {
        uint64_t v = 0;
        size_t start = i;
        if (strchr("[], \t\r\n", text[i]) != NULL && text[i] != '\0') {
            i++;
            continue;
        }
        for (; i < len && text[i] >= '0' && text[i] <= '9' && v <= INT32_MAX; i++)
            v = v * 10 + (uint64_t)(text[i] - '0');
        if (i == start) {
            say("detokenize: '%c' at byte %zu is no token id", text[i], i);
            free(ids);
            return CLI_USAGE;
        }
        if (v >= n_vocab) {
            say("detokenize: id %llu is past the vocabulary's %u tokens", (unsigned long long)v,
                n_vocab);
            free(ids);
            return CLI_FAILED;
        }
        ids[n++] = (int32_t)v;
    }
    *ret = ids;
    *ret_n = n;
    return CLI_FINE;
}

static int text_print(const struct args *a, const struct tok *t, const int32_t *ids, size_t n)
{
    size_t cap = tok_piece_max(t) + 16, len = 0, room = 0;
    char *out = NULL;
    struct detok d;

    if (!size_mul(cap, n + 1, &room) || (out = malloc(room)) == NULL) {
        say("detokenize: out of memory");
        return CLI_FAILED;
    }
    detok_start(&d, t, true);
    for (size_t i = 0; i < n; i++)
        len += detok_push(&d, t, ids[i], a->special, out + len, room - len);
    len += detok_flush(&d, out + len, room - len);
    if (a->json) {
        struct json j = json_start(stdout);
        json_open(&j, NULL, '{');
        json_bytes(&j, "text", out, len);
        json_uint(&j, "bytes", len);
        json_shut(&j, '}');
    } else {
        text_put(out, len);
        if (tty_out())
            putchar('\n');
    }
    free(out);
    return CLI_FINE;
}

int cmd_detokenize(struct args *a)
{
    struct tok *t = NULL;
    char *text = NULL;
    int32_t *ids = NULL;
    size_t len = 0, n = 0;

    int rc = input_text(a, &text, &len);
    if (rc == CLI_FINE)
        rc = vocab_open(a, &t, "detokenize");
    if (rc == CLI_FINE)
        rc = ids_parse(text, len, tok_n_vocab(t), &ids, &n);
    if (rc == CLI_USAGE && (a->file != NULL || a->n_rest == 0))
        rc = CLI_FAILED; /* of a text that was read, not of the command line */
    if (rc == CLI_FINE)
        rc = text_print(a, t, ids, n);
    free(ids);
    free(text);
    tok_close(&t);
    return rc;
}
