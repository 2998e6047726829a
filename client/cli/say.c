/* say.c: sentences, sizes and progress bars for people, on stderr; colour only on a terminal. */
#include <stdarg.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>
#include "cli.h"

void say(const char *fmt, ...)
{
    va_list ap;
    bar_clear();
    fflush(stdout);
    fputs("backcast: ", stderr);
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fputc('\n', stderr);
}

void say_failure(const backcast *c, int err, const char *doing)
{
    const char *text = backcast_last_error(c), *field = backcast_last_error_field(c);
    uint64_t needed = 0, available = 0;
    char n[24], m[24];

    backcast_last_error_amounts(c, &needed, &available);
    say("%s: %s%s%s%s", doing, text[0] != '\0' ? text : backcast_strerror(err),
        field[0] != '\0' ? " [" : "", field, field[0] != '\0' ? "]" : "");
    if ((err == BACKCAST_EBUDGET || err == BACKCAST_EBUSY) && needed > 65536)
        say("needed %s, available %s", bytes_text(needed, n), bytes_text(available, m));
}

int say_refusal(const struct args *a, const backcast *c, int err, const char *doing)
{
    const char *field = backcast_last_error_field(c);
    bool name = strcmp(field, "name") == 0, model = strcmp(field, "model") == 0;
    bool value = (err == BACKCAST_EINVALID && (name || args_blame(a, field))) ||
                 (err == BACKCAST_EUNKNOWN && !name && !model && args_blame(a, field));

    say_failure(c, err, doing);
    return value ? CLI_USAGE : CLI_FAILED;
}

void say_err(const struct err *e, const char *doing)
{
    say("%s: %s%s%s%s", doing, e->text[0] != '\0' ? e->text : err_brief(e->code),
        e->field[0] != '\0' ? " [" : "", e->field, e->field[0] != '\0' ? "]" : "");
}

bool tty_out(void)
{
    return isatty(STDOUT_FILENO) != 0;
}

bool err_is_out(void)
{
    struct stat out, err;
    return fstat(STDOUT_FILENO, &out) == 0 && fstat(STDERR_FILENO, &err) == 0 &&
           out.st_dev == err.st_dev && out.st_ino == err.st_ino;
}

bool tty_err(void)
{
    return isatty(STDERR_FILENO) != 0;
}

void text_put(const char *s, size_t len)
{
    bool on_tty = tty_out();
    size_t from = 0;

    for (size_t i = 0; on_tty && i < len; i++) {
        unsigned char b = (unsigned char)s[i];
        bool c1 = b == 0xc2 && i + 1 < len && (unsigned char)s[i + 1] >= 0x80 &&
                  (unsigned char)s[i + 1] < 0xa0;
        if (!c1 && ((b >= 0x20 && b != 0x7f) || b == '\n' || b == '\t'))
            continue;
        fwrite(s + from, 1, i - from, stdout);
        putchar('?');
        i += c1;
        from = i + 1;
    }
    if (from < len)
        fwrite(s + from, 1, len - from, stdout);
}

const char *paint(bool on, const char *sgr)
{
    return on ? sgr : "";
}

const char *bytes_text(uint64_t bytes, char *buf)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double v = (double)bytes;
    size_t u = 0;

    while (v >= 1024 && u + 1 < ARRAY_LEN(units)) {
        v /= 1024;
        u++;
    }
    snprintf(buf, 24, u == 0 ? "%.0f %s" : "%.1f %s", v, units[u]);
    return buf;
}

const char *micros_text(uint64_t micros, char *buf)
{
    if (micros < 1000)
        snprintf(buf, 24, "%u us", (unsigned)micros);
    else if (micros < 1000000)
        snprintf(buf, 24, "%.1f ms", (double)micros / 1e3);
    else
        snprintf(buf, 24, "%.2f s", (double)micros / 1e6);
    return buf;
}

static bool bar_shown; /* a bar stands on the terminal's last line */

void bar_draw(const char *what, uint64_t done, uint64_t total, const char *unit)
{
    struct winsize w = {0};
    char bar[64];

    if (!tty_err() || total == 0)
        return;
    if (done > total)
        done = total;
    int cols = ioctl(STDERR_FILENO, TIOCGWINSZ, &w) == 0 && w.ws_col > 0 ? w.ws_col : 80;
    int width = BC_MIN(40, cols - 44);
    if (width < 4)
        return;
    int full = (int)((double)done / (double)total * width);
    memset(bar, '.', (size_t)width);
    memset(bar, '#', (size_t)full);
    bar[width] = '\0';
    fflush(stdout);
    fprintf(stderr, "\r\033[K%-16.16s [%s] %llu/%llu %.8s", what, bar, (unsigned long long)done,
            (unsigned long long)total, unit);
    fflush(stderr);
    bar_shown = true;
}

void bar_clear(void)
{
    if (!bar_shown)
        return;
    fputs("\r\033[K", stderr);
    fflush(stderr);
    bar_shown = false;
}
