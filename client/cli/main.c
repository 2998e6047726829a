/* main.c: the table of commands; help made from it; dispatch. */
#include <signal.h>
#include <string.h>
#include "cli.h"

static const struct command_row commands[] = {
    {"run",
     OPT_LINK | OPT_MODEL | OPT_SESSION | OPT_GENERATE | OPT_PROMPT | OPT_FILE | OPT_START |
         OPT_PRIVATE,
     0, -1, "[options] [TEXT...]", "one answer to a prompt: arguments, -f FILE, or standard input",
     "Where there is both, -f FILE (or what a pipe or a file brings on standard input) comes "
     "first,\n"
     "then an empty line, then the arguments. The answer goes to stdout; what was forgotten and "
     "the\n"
     "figures go to stderr. Where no daemon listens, a private one is started for the life of the\n"
     "command; where one does, options of a private one are an error. Ctrl-C cancels the answer, "
     "a\n"
     "second one ends the command. With --json: one event a line. A session of --name that is "
     "there\n"
     "gets the --budget and --keep-tokens that are given; what else it was opened with cannot\n"
     "change: another value is an error.",
     cmd_run},
    {"chat",
     OPT_LINK | OPT_MODEL | OPT_SESSION | OPT_GENERATE | OPT_PROMPT | OPT_START | OPT_PRIVATE, 0, 0,
     "[options]", "a conversation",
     "A line is a message; a backslash at its end goes on with the next line. /help lists the\n"
     "commands inside. With --name the conversation stays in the daemon and can be taken up "
     "again:\n"
     "what it said last is shown first, between two lines that say so (--json: \"replay\":true).\n"
     "It gets the --budget and --keep-tokens that are given; what else it was opened with cannot\n"
     "change: another value is an error.",
     cmd_chat},
    {"ls", OPT_LINK, 0, 0, "", "who holds what: the sessions", "", cmd_ls},
    {"stat", OPT_LINK, 0, 1, "[SESSION]", "the daemon, or one session, in full", "", cmd_stat},
    {"top", OPT_LINK | OPT_TOP, 0, 0, "[options]", "sessions, live", "", cmd_top},
    {"budget", OPT_LINK | OPT_KEEP, 2, 2, "SESSION SIZE", "a new budget; shrinking prunes at once",
     "SIZE is bytes (64MiB) or tokens (512t).", cmd_budget},
    {"prune", OPT_LINK | OPT_KEEP, 1, 1, "SESSION", "prune now", "", cmd_prune},
    {"close", OPT_LINK, 1, 1, "SESSION", "end a session and free its cache", "", cmd_close},
    {"save", OPT_LINK, 2, 2, "SESSION NAME", "keep a session at rest as a file of the daemon's",
     "NAME is of A-Z a-z 0-9 . _ - and outlives the daemon; a file of that name is replaced.",
     cmd_save},
    {"restore", OPT_LINK, 1, 1, "NAME", "a session out of such a file",
     "It is called NAME and goes on as if it had never left: backcast chat --name NAME.",
     cmd_restore},
    {"saved", OPT_LINK, 0, 0, "", "the files that save has made: name, size, time", "", cmd_saved},
    {"unsave", OPT_LINK, 1, 1, "NAME", "delete such a file", "", cmd_unsave},
    {"fork", OPT_LINK, 2, 2, "SESSION NAME", "a second session that is what one is now",
     "Both hold the same cache until they go on, each by itself: backcast chat --name NAME.",
     cmd_fork},
    {"scores", OPT_LINK, 1, 1, "SESSION", "each cached token with its surprise",
     "The session may be answering meanwhile; while it is pruned this is refused.", cmd_scores},
    {"map", OPT_LINK | OPT_MAP, 1, 1, "[options] SESSION",
     "the conversation, with what was forgotten struck out",
     "What is kept is shaded by surprise: the stronger, the less the tokens after it predict it.\n"
     "Without a terminal, forgotten text stands in [- -]. The session may be answering meanwhile;\n"
     "while it is pruned this is refused.",
     cmd_map},
    {"pull", OPT_PULL, 0, 1, "[options] [MODEL | FILE]",
     "fetch a model (the default one), or take in a GGUF file",
     "Models lie in $XDG_DATA_HOME/backcast/models, by default ~/.local/share/backcast/models.",
     cmd_pull},
    {"models", 0, 0, 0, "", "the models that lie here", "", cmd_models},
    {"inspect", OPT_INSPECT, 1, 1, "[options] FILE", "a GGUF's keys and tensors", "", cmd_inspect},
    {"tokenize", OPT_MODEL | OPT_FILE | OPT_TOKENIZE, 0, -1, "[options] [TEXT...]",
     "text to token ids", "Needs no daemon; a vocabulary-only GGUF is enough.", cmd_tokenize},
    {"detokenize", OPT_MODEL | OPT_FILE | OPT_DETOKENIZE, 0, -1, "[options] [ID...]",
     "token ids to text", "Ids as arguments or on standard input, with or without brackets.",
     cmd_detokenize},
    {"doctor", OPT_LINK | OPT_MODEL, 0, 0, "", "what is wrong with this set-up", "", cmd_doctor},
    {"demo", OPT_MODEL | OPT_PRIVATE | OPT_DEMO, 0, 0, "--text FILE",
     "three sessions at once, two of them pruned as they break their budgets",
     "Starts a private daemon, asks the built-in story's two questions about FILE in three "
     "sessions,\n"
     "and prints beside each pruned answer what was dropped and what the full cache says.",
     cmd_demo},
    {"bench", OPT_MODEL | OPT_PRIVATE | OPT_BENCH, 0, 0, "[options]",
     "how fast this machine runs a model",
     "Starts a private daemon and measures it through the library: prefill, decode, eight "
     "sessions\n"
     "together, and the four refreshes. Let nothing else run meanwhile. With --json: one object.",
     cmd_bench},
};

const struct command_row *command_find(const char *name)
{
    for (size_t i = 0; i < ARRAY_LEN(commands); i++)
        if (strcmp(commands[i].name, name) == 0)
            return &commands[i];
    return NULL;
}

static void help_all(FILE *f)
{
    fputs("backcast: sessions of a local language model, pruned by counter-causal surprise\n\n"
          "usage: backcast COMMAND [options] [arguments]\n\n",
          f);
    for (size_t i = 0; i < ARRAY_LEN(commands); i++)
        fprintf(f, "  %-11s %s\n", commands[i].name, commands[i].brief);
    fputs("\n  help COMMAND lists its options; --version\n\n"
          "exit codes: 0 fine, 1 refused or failed, 2 usage, 130 interrupted\n",
          f);
}

static void help_one(FILE *f, const struct command_row *c)
{
    static const struct {
        unsigned group;
        const char *title;
    } parts[] = {{OPT_SESSION, "the session"}, {OPT_GENERATE, "the answer"}};
    unsigned left = (c->groups | OPT_ALL) & ~(OPT_SESSION | OPT_GENERATE);

    fprintf(f, "backcast %s %s\n  %s\n\n", c->name, c->usage, c->brief);
    if (c->more[0] != '\0')
        fprintf(f, "%s\n\n", c->more);
    if (strstr(c->usage, "SESSION") != NULL)
        fputs("SESSION is a name, or else the number that `backcast ls` shows; '#12' is always the "
              "number.\n\n",
              f);
    fputs("options:\n", f);
    args_print_options(f, left, 0);
    for (size_t i = 0; i < ARRAY_LEN(parts); i++)
        if (c->groups & parts[i].group) {
            unsigned above = 0; /* an option of two parts stands in the first */
            for (size_t k = 0; k < i; k++)
                above |= c->groups & parts[k].group;
            fprintf(f, "\n%s:\n", parts[i].title);
            args_print_options(f, parts[i].group, above);
        }
}

static int help(int argc, char **argv)
{
    if (argc == 0) {
        help_all(stdout);
        return CLI_FINE;
    }
    const struct command_row *c = command_find(argv[0]);
    if (c == NULL) {
        say("there is no command '%s' (backcast help lists them)", argv[0]);
        return CLI_USAGE;
    }
    help_one(stdout, c);
    return CLI_FINE;
}

static int run(int argc, char **argv)
{
    struct args a;

    if (argc < 2) {
        help_all(stderr);
        return CLI_USAGE;
    }
    if (strcmp(argv[1], "help") == 0 || strcmp(argv[1], "--help") == 0 ||
        strcmp(argv[1], "-h") == 0)
        return help(argc - 2, argv + 2);
    if (strcmp(argv[1], "--version") == 0 || strcmp(argv[1], "version") == 0) {
        puts("backcast " BACKCAST_VERSION);
        return CLI_FINE;
    }
    const struct command_row *c = command_find(argv[1]);
    if (c == NULL) {
        say("there is no command '%s' (backcast help lists them)", argv[1]);
        return CLI_USAGE;
    }
    int rc = args_parse(c, argc - 2, argv + 2, &a);
    if (rc != CLI_FINE)
        return rc;
    if (a.help) {
        help_one(stdout, c);
        return CLI_FINE;
    }
    return c->run(&a);
}

int main(int argc, char **argv)
{
    int rc = run(argc, argv);

    if ((fflush(stdout) != 0 || ferror(stdout)) && rc == CLI_FINE) { /* now, or some time before */
        say("standard output could not be written");
        rc = CLI_FAILED;
    }
    return rc;
}
