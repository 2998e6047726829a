/* cmd_map.c: map: a session's conversation with what was forgotten struck out, on the terminal or as a
 * page. The daemon tells ids and scores; the words come from the model's file. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "cli.h"
#include "json.h"
#include "map.h"
#include "tok.h"

static int page_write(const struct map *m, const char *path)
{
    FILE *f = strcmp(path, "-") == 0 ? stdout : fopen(path, "we");

    if (f == NULL) {
        say("map: %s: %s", path, strerror(errno));
        return CLI_FAILED;
    }
    map_html(f, m);
    bool bad = ferror(f) != 0;
    if (f == stdout)
        return CLI_FINE; /* main looks at it */
    if (fclose(f) != 0 || bad) {
        say("map: %s: it could not be written", path);
        unlink(path);
        return CLI_FAILED;
    }
    return CLI_FINE;
}

static void map_json(const struct map *m, uint64_t id)
{
    struct json j = json_start(stdout);

    json_open(&j, NULL, '{');
    json_uint(&j, "session", id);
    json_text(&j, "policy", m->policy);
    json_uint(&j, "dropped", m->n_dropped);
    json_open(&j, "tokens", '[');
    for (size_t i = 0; i < m->n; i++) {
        const struct backcast_score *r = &m->rows[i];
        size_t from = i > 0 ? m->ends[i - 1] : 0;
        json_open(&j, NULL, '{');
        json_uint(&j, "stream", r->stream);
        json_int(&j, "id", r->id);
        json_num(&j, "score", (double)r->score);
        json_uint(&j, "level", m->level[i]);
        json_bool(&j, "dropped", (r->flags & 4) != 0);
        json_bool(&j, "frozen", (r->flags & 1) != 0);
        json_bool(&j, "recent", (r->flags & 2) != 0);
        json_bytes(&j, "text", m->text + from, m->ends[i] - from);
        json_shut(&j, '}');
    }
    json_shut(&j, ']');
    json_shut(&j, '}');
}

static int map_show(const struct args *a, const struct map *m, uint64_t id)
{
    if (a->html != NULL)
        return page_write(m, a->html);
    if (a->json) {
        map_json(m, id);
        return CLI_FINE;
    }
    map_print(stdout, m, tty_out());
    fprintf(stderr, "%zu tokens cached, %zu dropped, policy %s\n", m->n - m->n_dropped,
            m->n_dropped, m->policy);
    return CLI_FINE;
}

static int map_act(struct args *a, backcast *c, const struct backcast_session_stat *s)
{
    struct map m;
    struct backcast_score *rows = NULL;
    uint64_t id = s->id;
    char policy[64];
    size_t n = 0;
    int rc = CLI_FAILED;

    snprintf(policy, sizeof(policy), "%s", s->policy);
    struct tok *t = session_tok(c, id);
    int err = t != NULL ? backcast_map_by_id(c, id, &rows, &n) : 0;

    if (t == NULL) {
        say("map: the words of session %s are not known: its model's file cannot be read here",
            a->rest[0]);
    } else if (err < 0) {
        rc = say_refusal(a, c, err, "map");
    } else if (map_open(&m, rows, n, t, a->rest[0], policy) < 0) {
        say("map: out of memory");
    } else {
        rc = map_show(a, &m, id);
        map_close(&m);
    }
    tok_close(&t);
    free(rows);
    return rc;
}

int cmd_map(struct args *a)
{
    return session_do(a, map_act);
}
