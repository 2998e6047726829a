/* cmd_chat.c: chat: a conversation, with line editing and history on a terminal (libedit), line by
 * line from a pipe otherwise. Lines that begin with / are commands of the chat itself.
 *
 * History: $XDG_STATE_HOME/backcast/history (default ~/.local/state/backcast/history), 0600.
 */
#include <errno.h>
#include <histedit.h>
#include <limits.h>
#include <locale.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "cli.h"
#include "json.h"
#include "models.h"
#include "watch.h"

#define HISTORY_LINES 1000
#define MESSAGE_BYTES_MAX (16u << 20)
#define AGAIN_MS 15000 /* for a daemon that was restarted */

struct chat_ui {
    struct args *a;
    struct link link;
    struct watch w;
    backcast_session *s;
    bool tty, quit;
    bool more;   /* inside a message of several lines */
    bool broken; /* the last line was broken off by Ctrl-C */
    EditLine *el;
    History *hist;
    HistEvent he;
    char history_path[PATH_MAX];
    char *line; /* getline's */
    size_t line_cap;
    int exit;
};

/* ---- lines */

static char *prompt_text(EditLine *el)
{
    struct chat_ui *ui = NULL;
    static char first[] = "> ", next[] = ". ";
    el_get(el, EL_CLIENTDATA, &ui);
    return ui->more ? next : first;
}

static void history_open(struct chat_ui *ui)
{
    struct err e = {0};
    char dir[PATH_MAX - 16];

    if (xdg_dir("XDG_STATE_HOME", ".local/state", dir, sizeof(dir), &e) < 0 ||
        make_dirs(dir, &e) < 0) {
        say_err(&e, "no history is kept");
        return;
    }
    snprintf(ui->history_path, sizeof(ui->history_path), "%s/history", dir);
    history(ui->hist, &ui->he, H_LOAD, ui->history_path); /* missing: an empty one */
}

static int lines_open(struct chat_ui *ui)
{
    ui->tty = isatty(STDIN_FILENO) != 0 && tty_out();
    if (!ui->tty)
        return CLI_FINE;
    setlocale(LC_CTYPE, ""); /* libedit reads characters, not bytes */
    ui->el = el_init("backcast", stdin, stdout, stderr);
    ui->hist = history_init();
    if (ui->el == NULL || ui->hist == NULL) {
        say("chat: the line editor does not start");
        return CLI_FAILED;
    }
    history(ui->hist, &ui->he, H_SETSIZE, HISTORY_LINES);
    history(ui->hist, &ui->he, H_SETUNIQUE, 1);
    history_open(ui);
    el_set(ui->el, EL_CLIENTDATA, ui);
    el_set(ui->el, EL_PROMPT, prompt_text);
    el_set(ui->el, EL_EDITOR, "emacs");
    el_set(ui->el, EL_HIST, history, ui->hist);
    el_set(ui->el, EL_SIGNAL, 0);
    el_source(ui->el, NULL);
    return CLI_FINE;
}

static void lines_close(struct chat_ui *ui)
{
    if (ui->hist != NULL && ui->history_path[0] != '\0') {
        mode_t old = umask(077);
        history(ui->hist, &ui->he, H_SAVE, ui->history_path);
        umask(old);
    }
    if (ui->el != NULL)
        el_end(ui->el);
    if (ui->hist != NULL)
        history_end(ui->hist);
    free(ui->line);
}

/* The next line without its end; NULL: no more. *again: Ctrl-C emptied it. */
static const char *line_read(struct chat_ui *ui, bool *again)
{
    *again = false;
    if (ui->tty) {
        int n = 0;
        const char *s = el_gets(ui->el, &n);
        if (interrupt_count() > 0) {
            interrupt_reset();
            el_reset(ui->el);
            fputs("\n", stdout);
            if (ui->broken) { /* twice in a row */
                ui->quit = true;
                ui->exit = CLI_INTERRUPTED;
                return NULL;
            }
            fputs("(Ctrl-C again ends the chat)\n", stderr);
            ui->broken = *again = true;
            return "";
        }
        ui->broken = false;
        if (s == NULL || n <= 0)
            return NULL;
        if (s[0] != '\n')
            history(ui->hist, &ui->he, H_ENTER, s);
        free(ui->line);
        ui->line = strndup(s, strcspn(s, "\n"));
        return ui->line;
    }
    ssize_t n = getline(&ui->line, &ui->line_cap, stdin);
    if (n < 0)
        return NULL;
    if (n > 0 && ui->line[n - 1] == '\n')
        ui->line[n - 1] = '\0';
    return ui->line;
}

/* A message: a line, or several joined by a backslash at each end. Malloced; NULL: the end. */
static char *message_read(struct chat_ui *ui)
{
    char *all = NULL;
    size_t len = 0;

    ui->more = false;
    for (;;) {
        bool again;
        const char *line = line_read(ui, &again);
        if (again) {
            free(all);
            all = NULL;
            len = 0;
            ui->more = false;
            continue;
        }
        if (line == NULL)
            return all;
        size_t n = strlen(line);
        bool more = n > 0 && line[n - 1] == '\\';
        char *grown = len + n > MESSAGE_BYTES_MAX ? NULL : realloc(all, len + n + 2);
        if (grown == NULL) {
            free(all);
            say("chat: the message is too long");
            return NULL;
        }
        all = grown;
        memcpy(all + len, line, n + 1);
        len += n;
        if (!more)
            return all;
        all[len - 1] = '\n';
        ui->more = true;
    }
}

/* ---- commands inside */

static void do_budget(struct chat_ui *ui, const char *arg)
{
    struct backcast_session_info info;
    struct size_arg size;
    char b[24];

    if (arg[0] != '\0') {
        if (!size_parse(arg, &size)) {
            say("/budget: '%s' is not a size: bytes (64MiB) or tokens (512t)", arg);
            return;
        }
        int rc = backcast_session_budget(ui->s, size.bytes, size.tokens, 0);
        if (rc < 0) {
            say_failure(ui->w.c, rc, "/budget");
            return;
        }
        watch_drain(&ui->w);
    }
    backcast_session_info(ui->s, &info);
    if (ui->a->json) {
        struct json j = json_start(stdout);
        json_open(&j, NULL, '{');
        json_text(&j, "command", "budget");
        json_uint(&j, "budget_tokens", info.budget_tokens);
        json_uint(&j, "budget_bytes", info.budget_bytes);
        json_uint(&j, "keep_tokens", info.keep_tokens);
        json_shut(&j, '}');
        return;
    }
    fprintf(stderr, "budget %u tokens (%s), keep %u\n", info.budget_tokens,
            bytes_text(info.budget_bytes, b), info.keep_tokens);
}

static void do_prune(struct chat_ui *ui, const char *arg)
{
    char *end;
    unsigned long keep = strtoul(arg, &end, 10);
    uint64_t prunes = ui->w.prunes, dropped = ui->w.dropped;

    if (*end != '\0' || arg[0] == '-' || keep > UINT32_MAX) {
        say("/prune: '%s' is not a number of tokens", arg);
        return;
    }
    int rc = backcast_session_prune(ui->s, (uint32_t)keep);
    if (rc < 0) {
        say_failure(ui->w.c, rc, "/prune");
        return;
    }
    watch_drain(&ui->w);
    if (ui->a->json) {
        struct json j = json_start(stdout);
        json_open(&j, NULL, '{');
        json_text(&j, "command", "prune");
        json_uint(&j, "dropped", ui->w.dropped - dropped);
        json_shut(&j, '}');
    } else if (ui->w.prunes == prunes) {
        fputs("nothing to prune: as many tokens are cached as a prune leaves, or fewer\n", stderr);
    }
}

static void do_save(struct chat_ui *ui, const char *arg)
{
    if (arg[0] == '\0') {
        say("/save: a name is missing");
        return;
    }
    int rc = backcast_session_save(ui->s, arg);
    if (rc < 0)
        say_failure(ui->w.c, rc, "/save");
    else if (ui->a->json) {
        struct json j = json_start(stdout);
        json_open(&j, NULL, '{');
        json_text(&j, "command", "save");
        json_text(&j, "saved", arg);
        json_shut(&j, '}');
    } else {
        fprintf(stderr, "saved as %s\n", arg);
    }
}

static void forgotten_print(struct json *j, bool json, struct backcast_range r, const char *words)
{
    unsigned long long last = (unsigned long long)(r.first + r.count - 1);

    if (json) {
        json_open(j, NULL, '{');
        json_uint(j, "first", r.first);
        json_uint(j, "count", r.count);
        json_text(j, "text", words);
        json_shut(j, '}');
    } else if (words != NULL) {
        printf("%llu..%llu  %s\n", (unsigned long long)r.first, last, words);
    } else {
        printf("%llu..%llu\n", (unsigned long long)r.first, last);
    }
}

/* Every run of dropped tokens, with its words where they are known. */
static void do_forgotten(struct chat_ui *ui, const char *arg)
{
    const struct transcript *t = ui->w.t;
    uint64_t n = transcript_tokens(t), gone = 0;
    struct json j = json_start(stdout);
    char words[400];

    (void)arg;
    if (ui->a->json) {
        json_open(&j, NULL, '{');
        json_text(&j, "command", "forgotten");
        json_open(&j, "ranges", '[');
    }
    for (uint64_t i = 0; i < n; i++) {
        uint64_t first = i;
        while (i < n && transcript_dropped(t, i))
            i++;
        if (i == first)
            continue;
        struct backcast_range r = {first, i - first};
        gone += r.count;
        bool known = transcript_words(t, r, words, sizeof(words));
        forgotten_print(&j, ui->a->json, r, known ? words : NULL);
    }
    if (ui->a->json) {
        json_shut(&j, ']');
        json_uint(&j, "dropped", gone);
        json_uint(&j, "tokens", n);
        json_shut(&j, '}');
        return;
    }
    fprintf(stderr, "%llu of %llu tokens are forgotten\n", (unsigned long long)gone,
            (unsigned long long)n);
}

static void do_scores(struct chat_ui *ui, const char *arg)
{
    struct backcast_score *rows = NULL;
    struct backcast_session_info info;
    size_t n = 0;
    int rc = backcast_session_scores(ui->s, &rows, &n);

    (void)arg;
    if (rc < 0) {
        say_failure(ui->w.c, rc, "/scores");
        return;
    }
    backcast_session_info(ui->s, &info);
    scores_print(ui->a, rows, n, transcript_tok(ui->w.t), info.policy);
    free(rows);
}

static void do_stat(struct chat_ui *ui, const char *arg)
{
    char live[24], held[24], time[24];
    int rc;
    const struct backcast_session_stat *s = session_look(ui->w.c, backcast_session_id(ui->s), &rc);

    (void)arg;
    if (s == NULL) {
        if (rc < 0)
            say_failure(ui->w.c, rc, "/stat");
        else
            say("/stat: the daemon has closed the session");
        return;
    }
    if (ui->a->json) {
        struct json j = json_start(stdout);
        session_json(&j, s);
        return;
    }
    printf("session %llu, %s, policy %s: %u of %u tokens cached, %s live, %s held, %llu in, "
           "%llu out, %llu prune%s dropped %llu in %s\n",
           (unsigned long long)s->id, s->model, s->policy, s->tokens, s->budget_tokens,
           bytes_text(s->bytes_live, live), bytes_text(s->bytes_held, held),
           (unsigned long long)s->tokens_in, (unsigned long long)s->tokens_out,
           (unsigned long long)s->prunes, PLURAL(s->prunes), (unsigned long long)s->tokens_dropped,
           micros_text(s->prune_micros, time));
}

/* It has a place before the first message alone. False: a sentence has said why not. */
static bool system_fits(struct chat_ui *ui)
{
    int rc;
    const struct backcast_session_stat *s = session_look(ui->w.c, backcast_session_id(ui->s), &rc);

    if (s == NULL && rc < 0)
        say_failure(ui->w.c, rc, "/system");
    else if (s == NULL)
        say("/system: the daemon has closed the session");
    else if (ui->a->raw)
        say("/system: --raw has no system message: put it into the text");
    else if (session_has_messages(s))
        say("/system: it goes before the first message, and this session has messages: nothing is "
            "sent");
    else
        return true;
    return false;
}

static void do_system(struct chat_ui *ui, const char *arg)
{
    if (arg[0] == '\0') {
        say("/system: the text of the system message is missing");
        return;
    }
    if (!system_fits(ui))
        return;
    ui->w.silent = true;
    int rc = watch_send(&ui->w, "system", arg, strlen(arg), &ui->a->generate);
    ui->w.silent = false;
    if (rc != CLI_FINE)
        return;
    if (ui->a->json) {
        struct json j = json_start(stdout);
        json_open(&j, NULL, '{');
        json_text(&j, "command", "system");
        json_text(&j, "text", arg);
        json_shut(&j, '}');
    } else {
        fputs("the session has this system message\n", stderr);
    }
}

static void do_quit(struct chat_ui *ui, const char *arg)
{
    (void)arg;
    ui->quit = true;
}

static void do_help(struct chat_ui *ui, const char *arg);

static const struct inside {
    const char *name, *arg, *help;
    void (*run)(struct chat_ui *ui, const char *arg);
} insides[] = {
    {"/budget", "[SIZE]", "show or set the ceiling of the cache (512t, 64MiB)", do_budget},
    {"/forgotten", "", "what was dropped", do_forgotten},
    {"/scores", "", "each cached token with its surprise", do_scores},
    {"/prune", "[KEEP]", "prune now", do_prune},
    {"/stat", "", "this session's figures", do_stat},
    {"/save", "NAME", "keep the conversation as a file of the daemon's (backcast restore NAME)",
     do_save},
    {"/system", "TEXT", "the system message (before the first message)", do_system},
    {"/help", "", "this list", do_help},
    {"/quit", "", "end (so does Ctrl-D)", do_quit},
};

static void do_help(struct chat_ui *ui, const char *arg)
{
    struct json j = json_start(stdout);

    (void)arg;
    if (ui->a->json) {
        json_open(&j, NULL, '{');
        json_text(&j, "command", "help");
        json_open(&j, "commands", '[');
        for (size_t i = 0; i < ARRAY_LEN(insides); i++) {
            json_open(&j, NULL, '{');
            json_text(&j, "name", insides[i].name);
            json_text(&j, "argument", insides[i].arg);
            json_text(&j, "does", insides[i].help);
            json_shut(&j, '}');
        }
        json_shut(&j, ']');
        json_shut(&j, '}');
        return;
    }
    for (size_t i = 0; i < ARRAY_LEN(insides); i++)
        fprintf(stderr, "  %-11s %-7s %s\n", insides[i].name, insides[i].arg, insides[i].help);
    fputs("  A backslash at the end of a line goes on with the next line.\n", stderr);
}

static void inside_run(struct chat_ui *ui, const char *text)
{
    size_t n = strcspn(text, " \n");

    for (size_t i = 0; i < ARRAY_LEN(insides); i++)
        if (strncmp(insides[i].name, text, n) == 0 && insides[i].name[n] == '\0') {
            insides[i].run(ui, text + n + strspn(text + n, " \n"));
            return;
        }
    say("there is no %.*s (/help lists the commands)", (int)n, text);
}

/* ---- the conversation */

/* The daemon is gone, but the session is durable: it comes back with the next one. */
static int talk_again(struct chat_ui *ui)
{
    const char *name = ui->a->session.name;
    int rc = BACKCAST_ECLOSED;

    say("the daemon has gone: waiting %d s for the next one", AGAIN_MS / 1000);
    for (int ms = 0; ms < AGAIN_MS && interrupt_count() == 0; ms += 100) {
        rc = backcast_reconnect(ui->w.c);
        if (rc >= 0)
            break;
        poll(NULL, 0, 100);
    }
    if (rc > 0) {
        say("%s goes on", name);
        return watch_resume(&ui->w);
    }
    ui->quit = true;
    ui->exit = CLI_FAILED;
    if (rc == 0)
        say("the daemon that is there now does not know %s", name);
    else
        say("`backcast chat --name %s` goes on with it once a daemon is there", name);
    return CLI_FAILED;
}

static void message_send(struct chat_ui *ui, const char *text)
{
    struct watch *w = &ui->w;
    int rc = watch_send(w, ui->a->raw ? NULL : "user", text, strlen(text), &ui->a->generate);
    bool over = rc == CLI_FAILED && watch_is_over(w);

    if (over && w->durable) {
        rc = talk_again(ui);
        over = rc == CLI_FAILED && watch_is_over(w);
    }
    interrupt_reset();
    if ((rc == CLI_FAILED || rc == CLI_USAGE) && !ui->tty) /* nobody is there to try again */
        ui->exit = rc;
    if (over || (rc == CLI_FAILED && w->closed)) { /* there is nobody to talk to */
        ui->quit = true;
        ui->exit = CLI_FAILED;
    }
}

static void talk(struct chat_ui *ui)
{
    char *text;

    while (!ui->quit && (text = message_read(ui)) != NULL) {
        if (text[0] == '/')
            inside_run(ui, text);
        else if (text[0] != '\0')
            message_send(ui, text);
        free(text);
    }
    if (ui->tty && !ui->quit)
        putchar('\n');
}

static int chat_open_session(struct chat_ui *ui)
{
    bool old = false;
    int rc = session_begin(&ui->link, ui->a, &ui->s, &old);

    if (rc == CLI_FINE)
        rc = watch_open(&ui->w, &ui->link, ui->s, ui->a);
    if (rc != CLI_FINE)
        return rc;
    ui->w.lines = true;
    if (old) {
        if (!ui->a->quiet)
            say("going on with %s; what it said last:", ui->a->session.name);
        ui->w.replay = true;
        rc = watch_replay(&ui->w);
        rc = rc == CLI_INTERRUPTED ? rc : CLI_FINE; /* an old answer that failed is told, no more */
        ui->w.replay = false;
        if (!ui->a->quiet)
            say("that was what it said last");
    }
    if (rc == CLI_FINE && ui->a->system != NULL) {
        ui->w.silent = true;
        rc = watch_send(&ui->w, "system", ui->a->system, strlen(ui->a->system), &ui->a->generate);
        ui->w.silent = false;
    }
    return rc;
}

int cmd_chat(struct args *a)
{
    struct chat_ui ui = {.a = a};

    interrupt_watch();
    int rc = link_open(&ui.link, a, true);
    if (rc != CLI_FINE)
        return rc;
    rc = chat_open_session(&ui);
    if (rc == CLI_FINE && (rc = lines_open(&ui)) == CLI_FINE) {
        if (ui.tty && !a->quiet)
            fputs("/help lists the commands, Ctrl-D ends\n", stderr);
        talk(&ui);
        rc = ui.exit;
    }
    lines_close(&ui);
    watch_close(&ui.w);
    if (a->session.name == NULL)
        backcast_session_close(&ui.s);
    link_close(&ui.link);
    return rc;
}
