/* hello.c: the smallest useful program: one question, its answer as it comes.
 *
 *     hello [SOCKET [QUESTION]]
 *
 * Built by hand, after an install:
 *     cc hello.c -o hello $(pkg-config --cflags --libs libbackcast)
 */
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <backcast.h>

int main(int argc, char **argv)
{
    const char *question = argc > 2 ? argv[2] : "Why is the sky blue?";
    backcast *c = NULL;
    backcast_session *s = NULL;
    struct backcast_event ev = {0};

    int rc = backcast_connect(&c, argc > 1 && argv[1][0] != '\0' ? argv[1] : NULL);
    if (rc == 0)
        rc = backcast_session_open(c, NULL, &s);
    if (rc == 0)
        rc = backcast_chat(s, "user", question, strlen(question), NULL);
    while (rc == 0 && backcast_next(c, &ev, -1) > 0 && ev.type != BACKCAST_END)
        if (ev.type == BACKCAST_TEXT)
            fwrite(ev.text.text, 1, ev.text.len, stdout);
    /* An answer has its end, and the end has a reason: "stop" (the model was done) and "length"
     * (max_tokens) are whole answers; "error", "retry" (the daemon stops) and the rest are not. */
    bool whole = ev.type == BACKCAST_END &&
                 (strcmp(ev.end.reason, "stop") == 0 || strcmp(ev.end.reason, "length") == 0);
    if (whole)
        putchar('\n');
    else if (ev.type == BACKCAST_END)
        fprintf(stderr, "\nhello: the answer ended early: %s %s\n", ev.end.reason, ev.end.text);
    else
        fprintf(stderr, "hello: %s\n", backcast_last_error(c));
    backcast_disconnect(&c);
    return whole ? 0 : 1;
}
