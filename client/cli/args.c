/* args.c: the table of options and the parser that follows it.
 *
 * A row says everything about an option: its names, the commands' groups that take it, where its
 * value goes in struct args, and its help. Options have the names of the C API's fields with dashes
 * in the place of underscores. `--name value`, `--name=value` and any unambiguous beginning of a
 * name are understood; `--` ends the options.
 */
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include "cli.h"
#include "models.h"

enum option_kind {
    KIND_FLAG,
    KIND_FLAG_INT, /* the library's: an int */
    KIND_STRING,
    KIND_U32,
    KIND_COUNT,    /* 1 or more */
    KIND_U32_AUTO, /* or "auto": UINT32_MAX */
    KIND_INT,
    KIND_FLOAT,
    KIND_SIZE,
    KIND_STOP,
    KIND_SEED, /* the session's and the sampler's */
};

struct option_row {
    const char *name;
    char letter; /* 0: none */
    enum option_kind kind;
    unsigned groups;
    size_t offset;
    const char *arg; /* its argument in the help; NULL: a flag */
    const char *help;
};

#define AT(field) offsetof(struct args, field)
static const struct option_row options[] = {
    {"socket", 0, KIND_STRING, OPT_LINK, AT(socket), "PATH",
     "the daemon's socket (default: $XDG_RUNTIME_DIR/backcast/backcast.sock, then "
     "/run/backcast/backcast.sock)"},
    {"model", 'm', KIND_STRING, OPT_MODEL, AT(model), "MODEL", "a model's name or a GGUF file"},
    {"file", 'f', KIND_STRING, OPT_FILE, AT(file), "FILE",
     "read the text from FILE (-: standard input)"},
    {"raw", 0, KIND_FLAG, OPT_PROMPT, AT(raw), NULL, "no chat template: continue the text"},
    {"system", 0, KIND_STRING, OPT_PROMPT, AT(system), "TEXT",
     "the system message; of a session that has no message yet"},
    {"quiet", 'q', KIND_FLAG, OPT_PROMPT | OPT_DEMO | OPT_BENCH, AT(quiet), NULL,
     "no prune events, no figures at the end"},
    {"budget", 'b', KIND_SIZE, OPT_SESSION, AT(budget), "SIZE",
     "hard ceiling of the session's cache: bytes (64MiB) or tokens (512t)"},
    {"keep-tokens", 'k', KIND_U32, OPT_SESSION | OPT_KEEP, AT(session.keep_tokens), "N",
     "tokens that a prune leaves (default: 3/4 of the budget)"},
    {"policy", 'p', KIND_STRING, OPT_SESSION, AT(session.policy), "NAME",
     "counter_causal_fast (default), counter_causal, sliding_window, key_similarity, h2o, tova, "
     "knorm, keydiff, random, none"},
    {"score", 0, KIND_STRING, OPT_SESSION, AT(session.score), "NAME", "logit (default), logprob"},
    {"span", 0, KIND_U32, OPT_SESSION, AT(session.span), "N",
     "neighbours that share a score, odd (default 15; 1: each token alone)"},
    {"span-quantile", 0, KIND_FLOAT, OPT_SESSION, AT(session.span_quantile), "Q",
     "which of their scores (default 0.25)"},
    {"min-gap", 0, KIND_U32, OPT_SESSION, AT(session.min_gap), "N",
     "a token is judged by what comes more than N tokens later (default 0)"},
    {"recent-tokens", 0, KIND_U32_AUTO, OPT_SESSION, AT(session.recent_tokens), "N",
     "newest tokens that are never dropped (default: auto)"},
    {"frozen-tokens", 0, KIND_U32_AUTO, OPT_SESSION, AT(session.frozen_tokens), "N",
     "first tokens that are never dropped (default: auto, the system message)"},
    {"trigger", 0, KIND_STRING, OPT_SESSION, AT(session.trigger), "NAME",
     "budget (default), prefill_end"},
    {"kv-type", 0, KIND_STRING, OPT_SESSION, AT(session.kv_type), "TYPE",
     "f16 (default), f32, bf16, q8_0, q8_q4 (keys in 8 bits, values in 4)"},
    {"positions", 0, KIND_STRING, OPT_SESSION, AT(session.positions), "NAME",
     "at the end of the trained context: keep (default), the session ends; rerotate, what is "
     "cached is renumbered and it goes on"},
    {"name", 'n', KIND_STRING, OPT_SESSION, AT(session.name), "NAME",
     "a session that outlives the command and can be attached to again"},
    {"chat-template", 0, KIND_STRING, OPT_SESSION, AT(session.chat_template), "NAME",
     "in the place of the file's own"},
    {"priority", 0, KIND_INT, OPT_SESSION, AT(session.priority), "N", "-100..100 (default 0)"},
    {"durable", 0, KIND_FLAG_INT, OPT_SESSION, AT(session.durable), NULL,
     "with --name: the session outlives the daemon, however that ends"},
    {"weight", 0, KIND_U32, OPT_SESSION, AT(session.weight), "N",
     "1..1000 (default 1): its part of the memory that is guaranteed"},
    {"ring-bytes", 0, KIND_U32, OPT_SESSION, AT(session.ring_bytes), "N",
     "shared memory each way, a power of two (default 65536)"},
    {"seed", 's', KIND_SEED, OPT_SESSION | OPT_GENERATE, 0, "N",
     "of the sampler and policy random"},
    {"max-tokens", 'N', KIND_U32, OPT_GENERATE, AT(generate.max_tokens), "N",
     "longest answer (default 512; 0: read the prompt only)"},
    {"temperature", 't', KIND_FLOAT, OPT_GENERATE, AT(generate.temperature), "T",
     "0 (default): always the likeliest token"},
    {"top-k", 0, KIND_U32, OPT_GENERATE, AT(generate.top_k), "N", "0 (default): off"},
    {"top-p", 0, KIND_FLOAT, OPT_GENERATE, AT(generate.top_p), "P", "1 (default): off"},
    {"min-p", 0, KIND_FLOAT, OPT_GENERATE, AT(generate.min_p), "P", "0 (default): off"},
    {"repeat-penalty", 0, KIND_FLOAT, OPT_GENERATE, AT(generate.repeat_penalty), "F",
     "1 (default): off"},
    {"repeat-last", 0, KIND_U32, OPT_GENERATE, AT(generate.repeat_last), "N",
     "tokens that the penalty looks back (default 64)"},
    {"stop", 0, KIND_STOP, OPT_GENERATE, 0, "TEXT", "end the answer at TEXT (up to 8 times)"},
    {"n-logprobs", 0, KIND_INT, OPT_GENERATE, AT(generate.n_logprobs), "N",
     "with --json: log-probabilities, and N alternatives a token"},
    {"prompt-logprobs", 0, KIND_FLAG_INT, OPT_GENERATE, AT(generate.prompt_logprobs), NULL,
     "with --json: of the prompt's tokens too"},
    {"ignore-end", 0, KIND_FLAG_INT, OPT_GENERATE, AT(generate.ignore_end), NULL,
     "go on past the model's end token"},
    {"no-start", 0, KIND_FLAG, OPT_START, AT(no_start), NULL,
     "fail where no daemon listens, in place of starting a private one"},
    {"threads", 0, KIND_STRING, OPT_PRIVATE, AT(threads), "N", "of a private daemon"},
    {"isa", 0, KIND_STRING, OPT_PRIVATE, AT(isa), "NAME",
     "of a private daemon: the instruction set of its kernels"},
    {"activations", 0, KIND_STRING, OPT_PRIVATE, AT(activations), "BITS",
     "of a private daemon: 8, or 16 for answers as without rounding"},
    {"kv-memory", 0, KIND_STRING, OPT_PRIVATE, AT(kv_memory), "SIZE",
     "of a private daemon: bytes of all caches together"},
    {"force", 0, KIND_FLAG, OPT_PULL, AT(force), NULL, "fetch even if it is there"},
    {"link", 0, KIND_FLAG, OPT_PULL, AT(link), NULL, "a file: link to it, do not copy it"},
    {"plain", 0, KIND_FLAG, OPT_TOKENIZE, AT(plain), NULL,
     "the text of special tokens is ordinary text"},
    {"pieces", 0, KIND_FLAG, OPT_TOKENIZE, AT(pieces), NULL, "one token a line, with its text"},
    {"bos", 0, KIND_FLAG, OPT_TOKENIZE, AT(bos), NULL,
     "put the begin token in front, if the file asks for one"},
    {"special", 0, KIND_FLAG, OPT_DETOKENIZE, AT(special), NULL, "print special tokens too"},
    {"keys", 0, KIND_FLAG, OPT_INSPECT, AT(keys), NULL, "the keys only"},
    {"tensors", 0, KIND_FLAG, OPT_INSPECT, AT(tensors), NULL, "the tensors only"},
    {"html", 0, KIND_STRING, OPT_MAP, AT(html), "FILE",
     "write one HTML file that needs no other (-: standard output)"},
    {"interval", 'i', KIND_U32, OPT_TOP, AT(interval), "MS",
     "between two looks (default 1000); the daemon renews its figures every 250 ms while it works, "
     "every second at rest"},
    {"count", 'c', KIND_COUNT, OPT_TOP, AT(count), "N",
     "looks, 1 or more, then stop (default: until Ctrl-C)"},
    {"rounds", 'r', KIND_COUNT, OPT_BENCH, AT(rounds), "N",
     "a figure is the median of N measurements (default 5)"},
    {"only", 0, KIND_STRING, OPT_BENCH, AT(only), "TEXT",
     "the figures whose JSON key has TEXT in it"},
    {"text", 0, KIND_STRING, OPT_DEMO, AT(text_file), "FILE",
     "the long text that the demonstration reads"},
    {"json", 'j', KIND_FLAG, OPT_ALL, AT(json), NULL, "for machines: JSON, an object a line"},
    {"help", 'h', KIND_FLAG, OPT_ALL, AT(help), NULL, "this help"},
};
#undef AT
_Static_assert(ARRAY_LEN(options) <= 64, "struct args.given has a bit for each");

/* Whole numbers that any daemon takes, where they are fewer than those of the type. */
#define TOKENS_MAX 16777216
static const struct option_range {
    const char *name;
    int64_t least, most;
    const char *note; /* said after the range */
} ranges[] = {
    {"keep-tokens", 0, TOKENS_MAX, ""},
    {"span", 1, 255, ""},
    {"min-gap", 0, TOKENS_MAX, ""},
    {"recent-tokens", 0, TOKENS_MAX, ""},
    {"frozen-tokens", 0, TOKENS_MAX, ""},
    {"priority", -100, 100, ""},
    {"weight", 1, 1000, ""},
    {"max-tokens", 0, TOKENS_MAX,
     ", and no more than its daemon's limit: 1048576 unless that is set"},
    {"repeat-last", 0, 1024, ""},
    {"n-logprobs", -1, 20, ""},
    {"interval", 0, 3600000, ""},
};
#undef TOKENS_MAX

bool size_parse(const char *text, struct size_arg *ret)
{
    static const struct {
        const char *name;
        double scale; /* 0: tokens */
    } units[] = {{"", 1},
                 {"b", 1},
                 {"kib", 1024.0},
                 {"k", 1024.0},
                 {"mib", 1048576.0},
                 {"m", 1048576.0},
                 {"gib", 1073741824.0},
                 {"g", 1073741824.0},
                 {"t", 0},
                 {"tokens", 0}};
    char *end;

    if (text[0] < '0' || text[0] > '9')
        return false;
    errno = 0;
    double v = strtod(text, &end);
    if (errno != 0 || !isfinite(v) || strpbrk(text, "xX") != NULL)
        return false;
    for (size_t i = 0; i < ARRAY_LEN(units); i++) {
        if (strcasecmp(end, units[i].name) != 0)
            continue;
        double n = units[i].scale == 0 ? v : v * units[i].scale;
        if (n < 1 || n > (units[i].scale == 0 ? (double)(UINT32_MAX - 1) : 1e18) || n != floor(n))
            return false;
        *ret = (struct size_arg){units[i].scale == 0 ? 0 : (uint64_t)n,
                                 units[i].scale == 0 ? (uint32_t)n : 0};
        return true;
    }
    return false;
}

static bool number_parse(const char *text, uint64_t max, uint64_t *ret)
{
    char *end;
    if (text[0] < '0' || text[0] > '9')
        return false;
    errno = 0;
    unsigned long long v = strtoull(text, &end, 10);
    if (errno != 0 || *end != '\0' || v > max)
        return false;
    *ret = v;
    return true;
}

static bool int_parse(const char *text, int64_t least, int64_t most, int *ret)
{
    char *end;
    errno = 0;
    long v = strtol(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || v < least || v > most)
        return false;
    *ret = (int)v;
    return true;
}

static bool float_parse(const char *text, float *ret)
{
    char *end;
    errno = 0;
    float v = strtof(text, &end);
    if (errno != 0 || end == text || *end != '\0' || !isfinite(v))
        return false;
    *ret = v;
    return true;
}

/* The whole numbers that a row takes. */
static struct option_range option_range(const struct option_row *o)
{
    for (size_t i = 0; i < ARRAY_LEN(ranges); i++)
        if (strcmp(ranges[i].name, o->name) == 0)
            return ranges[i];
    if (o->kind == KIND_INT)
        return (struct option_range){o->name, INT_MIN, INT_MAX, ""};
    return (struct option_range){o->name, o->kind == KIND_COUNT, UINT32_MAX - 1, ""};
}

/* Puts text where the row says; false: it is no value of this kind. */
static bool option_set(const struct option_row *o, const char *text, struct args *a)
{
    char *at = (char *)a + o->offset;
    const struct option_range r = option_range(o);
    uint64_t n = 0;
    float f;

    switch (o->kind) {
    case KIND_FLAG:
        *(bool *)at = true;
        return true;
    case KIND_FLAG_INT:
        *(int *)at = 1;
        return true;
    case KIND_STRING:
        *(const char **)at = text;
        return true;
    case KIND_U32_AUTO:
        if (strcmp(text, "auto") == 0) {
            *(uint32_t *)at = UINT32_MAX;
            return true;
        }
        /* fall through */
    case KIND_U32:
    case KIND_COUNT:
        if (!number_parse(text, (uint64_t)r.most, &n) || n < (uint64_t)r.least)
            return false;
        *(uint32_t *)at = (uint32_t)n;
        return true;
    case KIND_INT:
        return int_parse(text, r.least, r.most, (int *)at);
    case KIND_FLOAT:
        if (!float_parse(text, &f))
            return false;
        *(float *)at = f;
        return true;
    case KIND_SIZE:
        return size_parse(text, (struct size_arg *)at);
    case KIND_SEED:
        if (!number_parse(text, UINT64_MAX, &n))
            return false;
        a->session.seed = a->generate.seed = n;
        return true;
    case KIND_STOP:
        if (a->generate.n_stop == ARRAY_LEN(a->stops))
            return false;
        a->stops[a->generate.n_stop++] = text;
        return true;
    }
    return false;
}

/* What a value of the row is, into buf; returns buf. */
static const char *value_text(const struct option_row *o, char *buf, size_t len)
{
    const struct option_range r = option_range(o);

    switch (o->kind) {
    case KIND_SIZE:
        snprintf(buf, len, "a size: bytes (64MiB) or tokens (512t)");
        break;
    case KIND_FLOAT:
        snprintf(buf, len, "a number");
        break;
    case KIND_STOP:
        snprintf(buf, len, "one of at most 8 stop texts");
        break;
    case KIND_SEED:
        snprintf(buf, len, "a whole number, 0 to %" PRIu64, UINT64_MAX);
        break;
    default:
        snprintf(buf, len, "a whole number, %" PRId64 " to %" PRId64 "%s%s", r.least, r.most,
                 o->kind == KIND_U32_AUTO ? ", or auto" : "", r.note);
    }
    return buf;
}

/* The row of a long name or of its unambiguous beginning, among the command's options. */
static const struct option_row *option_find(const struct command_row *cmd, const char *name,
                                            size_t len)
{
    const struct option_row *found = NULL;
    int n = 0;

    for (size_t i = 0; i < ARRAY_LEN(options); i++) {
        if (!(options[i].groups & (cmd->groups | OPT_ALL)) ||
            strncmp(options[i].name, name, len) != 0)
            continue;
        if (options[i].name[len] == '\0')
            return &options[i];
        found = &options[i];
        n++;
    }
    if (n > 1)
        say("--%.*s is the beginning of several options", (int)len, name);
    else if (n == 0)
        say("%s has no option --%.*s (backcast help %s)", cmd->name, (int)len, name, cmd->name);
    return n == 1 ? found : NULL;
}

static const struct option_row *letter_find(const struct command_row *cmd, char letter)
{
    for (size_t i = 0; i < ARRAY_LEN(options); i++)
        if ((options[i].groups & (cmd->groups | OPT_ALL)) && options[i].letter == letter)
            return &options[i];
    say("%s has no option -%c (backcast help %s)", cmd->name, letter, cmd->name);
    return NULL;
}

/* One option at argv[*i] (moved past its value). */
static int option_take(const struct command_row *cmd, int argc, char **argv, int *i, struct args *a)
{
    const char *word = argv[*i], *value = NULL;
    const struct option_row *o;

    if (word[1] == '-') {
        const char *eq = strchr(word, '=');
        size_t len = eq != NULL ? (size_t)(eq - word) - 2 : strlen(word) - 2;
        o = option_find(cmd, word + 2, len);
        value = eq != NULL ? eq + 1 : NULL;
    } else {
        o = letter_find(cmd, word[1]);
        value = word[2] != '\0' ? word + 2 : NULL;
    }
    if (o == NULL)
        return CLI_USAGE;
    if (o->arg == NULL && value != NULL) {
        say("--%s takes no value (given: %s)", o->name, value);
        return CLI_USAGE;
    }
    if (o->arg != NULL && value == NULL) {
        if (*i + 1 >= argc) {
            say("--%s needs a value: %s", o->name, o->arg);
            return CLI_USAGE;
        }
        value = argv[++*i];
    }
    if (!option_set(o, value, a)) {
        char text[160];
        say("--%s: '%s' is not %s", o->name, value, value_text(o, text, sizeof(text)));
        return CLI_USAGE;
    }
    a->given |= UINT64_C(1) << (o - options);
    return CLI_FINE;
}

int args_parse(const struct command_row *cmd, int argc, char **argv, struct args *ret)
{
    bool open = true; /* options are still looked for */

    memset(ret, 0, sizeof(*ret));
    backcast_session_options_init(&ret->session);
    backcast_generate_options_init(&ret->generate);
    ret->interval = 1000;
    ret->rounds = 5;
    ret->rest = argv;
    for (int i = 0; i < argc; i++) {
        if (open && strcmp(argv[i], "--") == 0) {
            open = false;
        } else if (open && argv[i][0] == '-' && argv[i][1] != '\0') {
            int rc = option_take(cmd, argc, argv, &i, ret);
            if (rc != CLI_FINE)
                return rc;
        } else {
            ret->rest[ret->n_rest++] = argv[i]; /* never overtakes i */
        }
    }
    ret->generate.stop = ret->stops;
    if (ret->help)
        return CLI_FINE;
    if (ret->n_rest < cmd->rest_min || (cmd->rest_max >= 0 && ret->n_rest > cmd->rest_max)) {
        say("%s: %s. Usage: backcast %s %s", cmd->name,
            ret->n_rest < cmd->rest_min ? "an argument is missing" : "too many arguments",
            cmd->name, cmd->usage);
        return CLI_USAGE;
    }
    if (ret->raw && ret->system != NULL) {
        say("--raw has no system message: put it into the text");
        return CLI_USAGE;
    }
    if (!ret->json && (ret->generate.n_logprobs >= 0 || ret->generate.prompt_logprobs)) {
        say("--%s is printed with --json alone",
            ret->generate.n_logprobs >= 0 ? "n-logprobs" : "prompt-logprobs");
        return CLI_USAGE;
    }
    return CLI_FINE;
}

const char *args_given(const struct args *a, unsigned group, unsigned i)
{
    for (size_t k = 0; k < ARRAY_LEN(options); k++)
        if ((options[k].groups & group) != 0 && (a->given >> k & 1) != 0 && i-- == 0)
            return options[k].name;
    return NULL;
}

bool args_blame(const struct args *a, const char *field)
{
    static const char *const others[][2] = {{"budget_bytes", "budget"},
                                            {"budget_tokens", "budget"},
                                            {"socket_path", "socket"}};
    char word[64];
    const char *name;

    if (strncmp(field, "budget_", 7) == 0 && (a->budget.bytes != 0 || a->budget.tokens != 0))
        return true; /* of `budget`, too, where it is no option */
    snprintf(word, sizeof(word), "%s", field);
    for (char *p = word; (p = strchr(p, '_')) != NULL;)
        *p = '-';
    for (size_t i = 0; i < ARRAY_LEN(others); i++)
        if (strcmp(field, others[i][0]) == 0)
            snprintf(word, sizeof(word), "%s", others[i][1]);
    for (unsigned i = 0; (name = args_given(a, ~0u, i)) != NULL; i++)
        if (strcmp(name, word) == 0)
            return true;
    return false;
}

void args_print_options(FILE *f, unsigned groups, unsigned without)
{
    for (size_t i = 0; i < ARRAY_LEN(options); i++) {
        const struct option_row *o = &options[i];
        char left[48], letter[8] = "    ";
        if (!(o->groups & groups) || (o->groups & without) != 0)
            continue;
        if (o->letter != 0)
            snprintf(letter, sizeof(letter), "-%c, ", o->letter);
        snprintf(left, sizeof(left), "%s--%s%s%s", letter, o->name, o->arg != NULL ? " " : "",
                 o->arg != NULL ? o->arg : "");
        fprintf(f, "  %-28s %s\n", left, o->help);
    }
}

const struct backcast_session_options *args_session(struct args *a, char *buf, size_t len)
{
    char real[PATH_MAX];

    a->session.model = a->model;
    const struct catalogue_row *row = a->model != NULL ? catalogue_find(a->model) : NULL;
    if (a->model != NULL && realpath(a->model, real) != NULL && strlen(real) < len) {
        memcpy(buf, real, strlen(real) + 1);
        a->session.model = buf;
    } else if (row != NULL && strlen(row->file) - strlen(".gguf") < len) {
        snprintf(buf, len, "%.*s", (int)(strlen(row->file) - strlen(".gguf")), row->file);
        a->session.model = buf; /* the daemon knows files, not the catalogue */
    }
    a->session.budget_bytes = a->budget.bytes;
    a->session.budget_tokens = a->budget.tokens;
    return &a->session;
}
