/* cli.h: what every family of commands shares: the two tables (options, commands), exit codes, and
 * the link to a daemon.
 *
 *   argv -> args_parse (options table) -> struct args -> command's function -> exit code
 *
 * The tables in args.c and main.c are the whole of the command line: the parser, `backcast help` and
 * the man page's lists come from them. Text and results go to stdout, everything else to stderr.
 */
#ifndef BACKCAST_CLI_H
#define BACKCAST_CLI_H
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include "backcast.h"
#include "base.h"

enum cli_exit { CLI_FINE = 0, CLI_FAILED = 1, CLI_USAGE = 2, CLI_INTERRUPTED = 130 };

/* A size on the command line: bytes (64MiB) or tokens (512t); both zero: not given. */
struct size_arg {
    uint64_t bytes;
    uint32_t tokens;
};

/* Everything the options can say. Zeroed, then filled with the library's defaults. */
struct args {
    bool json, help;
    uint64_t given;          /* bit i: row i of the table of options stood on the command line */
    const char *socket;      /* NULL: the usual places, then a private daemon where allowed */
    const char *model;       /* name or path */
    const char *file;        /* -f: the prompt, or the text that goes before it */
    const char *system;      /* system message */
    const char *text_file;   /* demo: the long text */
    const char *html;        /* map: a file to write */
    const char *threads;     /* private daemon: its threads, as backcastd takes them */
    const char *isa;         /* private daemon: its isa */
    const char *activations; /* private daemon: bits of its activations */
    const char *kv_memory;   /* private daemon: its kv_memory */
    bool raw, quiet, no_start, force, link, special, plain, pieces, bos, keys, tensors;
    uint32_t interval, count;
    const char *only; /* bench: the figures whose key has this in it; NULL: all */
    uint32_t rounds;
    struct size_arg budget;
    struct backcast_session_options session;
    struct backcast_generate_options generate;
    const char *stops[8];
    char **rest; /* what is not an option */
    int n_rest;
};

/* Which options a command takes: bits of struct option_row.groups. */
enum option_group {
    OPT_ALL = 1,       /* --json, --help */
    OPT_LINK = 2,      /* --socket */
    OPT_MODEL = 4,     /* --model */
    OPT_SESSION = 8,   /* what a session is opened with */
    OPT_GENERATE = 16, /* how an answer is made */
    OPT_PROMPT = 32,   /* run and chat: --raw, --system */
    OPT_START = 64,    /* run and chat: --no-start */
    OPT_KEEP = 128,    /* --keep-tokens alone */
    OPT_PULL = 256,
    OPT_TOKENIZE = 512,
    OPT_DETOKENIZE = 1024,
    OPT_INSPECT = 2048,
    OPT_TOP = 4096,
    OPT_DEMO = 8192,
    OPT_FILE = 16384,
    OPT_BENCH = 32768,
    OPT_MAP = 65536,
    OPT_PRIVATE = 131072, /* what a private daemon is started with */
};

struct command_row {
    const char *name;
    unsigned groups;        /* enum option_group */
    int rest_min, rest_max; /* arguments that are not options; -1: any number */
    const char *usage;      /* after the name */
    const char *brief;      /* one line */
    const char *more;       /* a paragraph for `help NAME`; may be "" */
    int (*run)(struct args *a);
};

/* ---- args.c */

/* Parses argv after the command's name into *ret (which it sets up first). On a mistake it prints
 * one sentence to stderr and returns CLI_USAGE. */
int args_parse(const struct command_row *cmd, int argc, char **argv, struct args *ret);
/* The options of these groups that are in none of `without`, with their help. */
void args_print_options(FILE *f, unsigned groups, unsigned without);
/* The i-th option of a group that was given, by name; NULL: there are no more. */
const char *args_given(const struct args *a, unsigned group, unsigned i);
/* Whether an error's field (as the library calls it) is an option that was given. */
bool args_blame(const struct args *a, const char *field);
bool size_parse(const char *text, struct size_arg *ret); /* "512t", "64MiB", "1.5GiB", "4096" */
/* The session options with model, budget and name as a session needs them. A model that is a file
 * here becomes an absolute path (buf, of len bytes). */
const struct backcast_session_options *args_session(struct args *a, char *buf, size_t len);

/* ---- check.c */

/* What a private daemon would refuse, BC_EINVALID, and what it cannot give, BC_EUNSUPPORTED. */
int args_check(const struct args *a, struct err *e);

/* ---- main.c */
const struct command_row *command_find(const char *name);

/* ---- say.c: what people read, on stderr */

#define PLURAL(n) ((n) == 1 ? "" : "s")

void say(const char *fmt, ...) __attribute__((format(printf, 1, 2))); /* "backcast: ..." */
/* The library's sentence for the last failure on c, with code, field and amounts. */
void say_failure(const backcast *c, int err, const char *doing);
/* The same, and what the command ends with: CLI_USAGE where an option or a name has a value that it cannot have, else
 * CLI_FAILED. */
int say_refusal(const struct args *a, const backcast *c, int err, const char *doing);
void say_err(const struct err *e, const char *doing);
bool tty_out(void);
bool err_is_out(void); /* both streams go to one place, so each must end its lines for the other */
bool tty_err(void);
/* A model's text to stdout: as it is; on a terminal without control characters but newline and tab,
 * so that no answer can move the cursor or set a title. */
void text_put(const char *s, size_t len);
const char *paint(bool on, const char *sgr); /* escape sequence, or "" where colour is off */
/* "63.7 MiB" into buf (>= 24 bytes); returns buf. */
const char *bytes_text(uint64_t bytes, char *buf);
const char *micros_text(uint64_t micros, char *buf); /* "3.1 ms", >= 24 bytes */
/* One redrawn line on a terminal's stderr; nothing where stderr is none. */
void bar_draw(const char *what, uint64_t done, uint64_t total, const char *unit);
void bar_clear(void);

/* ---- sig.c: Ctrl-C */

/* From here the first SIGINT (or SIGTERM) is only counted, the second ends the program with 130. */
void interrupt_watch(void);
int interrupt_count(void);
void interrupt_reset(void);

/* ---- link.c: a daemon to talk to */

struct link {
    backcast *c;
    struct private_daemon *own; /* NULL: a daemon was listening */
};
/* Connects; where `may_start` and nobody listens, starts a private daemon and says so. Where somebody does, options of a private one
 * are refused. Prints its own sentence on failure. Returns a cli_exit. */
int link_open(struct link *ret, const struct args *a, bool may_start);
void link_close(struct link *l);
/* Entries of a listing; NULL: there is none. */
const struct backcast_session_stat *stats_session(const struct backcast_stats *st, uint64_t id);
/* This user's session of that name (*ret_others 0), else the last of the others', which an administrator sees, and how many there are. */
const struct backcast_session_stat *stats_named(const struct backcast_stats *st, const char *name,
                                                unsigned *ret_others);
const struct backcast_model_stat *stats_model(const struct backcast_stats *st, const char *name);
/* Asks for the listing: the entry of a session, until the next call on c; NULL: *ret_rc < 0, it failed; 0, it has none. */
const struct backcast_session_stat *session_look(backcast *c, uint64_t id, int *ret_rc);
/* A session by its name, else by its number ("#12" is always the number): its entry, until the next listing on c. NULL: there is none, or
 * the name is that of several users' sessions, none of them this one's; a sentence has said so. */
const struct backcast_session_stat *session_find(backcast *c, const char *text);
/* A command about one session, the first argument: connects, finds it (s: as session_find), acts. Returns a cli_exit. */
typedef int session_act(struct args *a, backcast *c, const struct backcast_session_stat *s);
int session_do(struct args *a, session_act *act);
struct tok;
/* The vocabulary of the session's model; NULL: this user cannot read its file. */
struct tok *session_tok(backcast *c, uint64_t id);

/* ---- cmd_list.c */
struct json;
void session_json(struct json *j, const struct backcast_session_stat *s); /* one object */

/* ---- the commands */
int cmd_run(struct args *a);
int cmd_chat(struct args *a);
int cmd_ls(struct args *a);
int cmd_stat(struct args *a);
int cmd_top(struct args *a);
int cmd_budget(struct args *a);
int cmd_prune(struct args *a);
int cmd_close(struct args *a);
int cmd_save(struct args *a);
int cmd_restore(struct args *a);
int cmd_saved(struct args *a);
int cmd_unsave(struct args *a);
int cmd_fork(struct args *a);
int cmd_scores(struct args *a);
int cmd_map(struct args *a);
int cmd_tokenize(struct args *a);
int cmd_detokenize(struct args *a);
int cmd_inspect(struct args *a);
int cmd_pull(struct args *a);
int cmd_models(struct args *a);
int cmd_doctor(struct args *a);
int cmd_demo(struct args *a);
int cmd_bench(struct args *a);
#endif
