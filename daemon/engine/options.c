/* options.c: commands, ports and generate options as plain objects: made, checked, freed. */
#include "core.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define REPEAT_LAST_DEFAULT 64
#define TEMPERATURE_MAX 100
#define REPEAT_PENALTY_MAX 100

struct command *command_new(enum command_type type, uint64_t conn, uint32_t request_id)
{
    struct command *c = calloc(1, sizeof *c);
    if (c == NULL)
        return NULL;
    c->type = type;
    c->conn = conn;
    c->request_id = request_id;
    return c;
}

void command_free(struct command **pc)
{
    struct command *c = *pc;
    if (c == NULL)
        return;
    struct session_port **port = c->type == CMD_OPEN      ? &c->u.open.port
                                 : c->type == CMD_ATTACH  ? &c->u.attach.port
                                 : c->type == CMD_RESTORE ? &c->u.restore.port
                                 : c->type == CMD_FORK    ? &c->u.fork.port
                                                          : NULL;
    if (c->own.holds_port)
        port_drop(port);
    if (c->type == CMD_OPEN)
        free(c->u.open.strings);
    if (c->type == CMD_GENERATE) {
        free(c->u.generate.text);
        free(c->u.generate.ids);
    }
    if (c->type == CMD_LOAD || c->type == CMD_UNLOAD)
        free(c->u.load.path);
    free(c);
    *pc = NULL;
}

struct session_port *port_new(void)
{
    struct session_port *p = calloc(1, sizeof *p);
    if (p == NULL)
        return NULL;
    atomic_init(&p->refs, 1);
    atomic_init(&p->room, UINT32_MAX); /* until the loop has looked */
    return p;
}

struct session_port *port_share(struct session_port *p)
{
    if (p == NULL)
        return port_new();
    p->refs++;
    return p;
}

void port_drop(struct session_port **p)
{
    if (*p != NULL && --(*p)->refs == 0)
        free(*p);
    *p = NULL;
}

/* ---- generate options ---- */

void generate_options_init(struct generate_options *o)
{
    *o = (struct generate_options){
        .max_tokens = MAX_TOKENS_DEFAULT,
        .top_p = 1,
        .repeat_penalty = 1,
        .repeat_last = REPEAT_LAST_DEFAULT,
        .n_logprobs = -1,
    };
}

static int check_float(const char *field, float x, float low, float high, struct err *e)
{
    if (x >= low && x <= high) /* false for NaN */
        return BC_OK;
    return err_set(e, BC_EINVALID, field, "%s %g: must be %g to %g", field, (double)x, (double)low,
                   (double)high);
}

/* Length of the UTF-8 character at s[0..n); 0: none is there. */
static size_t utf8_len(const unsigned char *s, size_t n)
{
    size_t len = s[0] < 0x80 ? 1 : s[0] < 0xc2 ? 0 : s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : 4;
    if (len == 0 || s[0] > 0xf4 || len > n)
        return 0;
    for (size_t i = 1; i < len; i++)
        if ((s[i] & 0xc0) != 0x80)
            return 0;
    bool bad = (s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] > 0x9f) ||
               (s[0] == 0xf0 && s[1] < 0x90) || (s[0] == 0xf4 && s[1] > 0x8f);
    return len > 1 && bad ? 0 : len;
}

static int check_stops(const struct generate_options *o, struct err *e)
{
    if (o->n_stop > GENERATE_STOPS_MAX)
        return err_set(e, BC_EINVALID, "stop", "%u stop strings: at most %u", o->n_stop,
                       GENERATE_STOPS_MAX);
    for (uint32_t i = 0; i < o->n_stop; i++) {
        const unsigned char *s = (const unsigned char *)o->stop[i].bytes;
        size_t n = o->stop[i].len;
        if (n == 0 || n > GENERATE_STOP_BYTES_MAX)
            return err_set(e, BC_EINVALID, "stop", "stop string %u has %zu bytes: must be 1 to %u",
                           i + 1, n, GENERATE_STOP_BYTES_MAX);
        for (size_t at = 0, len; at < n; at += len)
            if ((len = utf8_len(s + at, n - at)) == 0)
                return err_set(e, BC_EINVALID, "stop", "stop string %u is not UTF-8 at byte %zu",
                               i + 1, at);
    }
    return BC_OK;
}

int generate_options_check(const struct generate_options *o, struct err *e)
{
    int rc;
    if ((rc = check_float("temperature", o->temperature, 0, TEMPERATURE_MAX, e)) < 0 ||
        (rc = check_float("top_p", o->top_p, 0, 1, e)) < 0 ||
        (rc = check_float("min_p", o->min_p, 0, 1, e)) < 0 ||
        (rc = check_float("repeat_penalty", o->repeat_penalty, 0.01f, REPEAT_PENALTY_MAX, e)) < 0)
        return rc;
    if (o->repeat_last > SAMPLER_REPEAT_MAX)
        return err_set(e, BC_EINVALID, "repeat_last", "repeat_last %u: at most %u tokens",
                       o->repeat_last, SAMPLER_REPEAT_MAX);
    if (o->n_logprobs < -1 || o->n_logprobs > GENERATE_LOGPROBS_MAX)
        return err_set(e, BC_EINVALID, "n_logprobs", "n_logprobs %d: must be 0 to %u, or -1: none",
                       o->n_logprobs, GENERATE_LOGPROBS_MAX);
    return check_stops(o, e);
}
