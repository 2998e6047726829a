/* input.c: see input.h. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "input.h"

int input_read(const char *path, char **ret, size_t *ret_len)
{
    bool std = strcmp(path, "-") == 0;
    int fd = std ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
    size_t len = 0, room = 65536;
    char *buf = malloc(room + 1);
    const char *why = NULL;

    if (fd < 0) {
        say("%s: %s", path, strerror(errno));
        free(buf);
        return CLI_FAILED;
    }
    while (buf != NULL && why == NULL) {
        ssize_t n = read(fd, buf + len, room - len);
        if (n < 0 && errno == EINTR && interrupt_count() == 0)
            continue;
        if (n < 0)
            why = strerror(errno);
        if (n <= 0)
            break;
        len += (size_t)n;
        if (len > INPUT_BYTES_MAX)
            why = "longer than 64 MiB";
        if (len == room) {
            char *more = realloc(buf, (room *= 2) + 1);
            if (more == NULL)
                free(buf);
            buf = more;
        }
    }
    if (!std)
        close(fd);
    if (buf == NULL || why != NULL) {
        say("%s: %s", std ? "standard input" : path, buf == NULL ? "out of memory" : why);
        free(buf);
        return CLI_FAILED;
    }
    buf[len] = '\0';
    *ret = buf;
    *ret_len = len;
    return CLI_FINE;
}

bool input_is_piped(void)
{
    struct stat st;
    return fstat(STDIN_FILENO, &st) == 0 && (S_ISFIFO(st.st_mode) || S_ISREG(st.st_mode));
}

int input_text(const struct args *a, char **ret, size_t *ret_len)
{
    char *text = NULL;
    size_t len = 0, more = 0;

    if (a->file == NULL && a->n_rest == 0) {
        if (isatty(STDIN_FILENO)) {
            say("no text: give it as an argument, with -f FILE, or on standard input");
            return CLI_USAGE;
        }
        return input_read("-", ret, ret_len);
    }
    if (a->file != NULL) {
        int rc = input_read(a->file, &text, &len);
        if (rc != CLI_FINE)
            return rc;
    }
    for (int i = 0; i < a->n_rest; i++)
        more += strlen(a->rest[i]) + 2;
    char *all = realloc(text, len + more + 1);
    if (all == NULL) {
        free(text);
        say("out of memory");
        return CLI_FAILED;
    }
    if (len > 0 && a->n_rest > 0) {
        while (len > 0 && all[len - 1] == '\n')
            len--;
        memcpy(all + len, "\n\n", 2);
        len += 2;
    }
    for (int i = 0; i < a->n_rest; i++) {
        size_t n = strlen(a->rest[i]);
        if (i > 0)
            all[len++] = ' ';
        memcpy(all + len, a->rest[i], n);
        len += n;
    }
    all[len] = '\0';
    *ret = all;
    *ret_len = len;
    return CLI_FINE;
}
