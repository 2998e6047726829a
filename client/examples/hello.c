/* hello.c: the smallest useful program: one question, its answer as it comes.
 *
 *     hello [SOCKET [QUESTION]]
 */
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
    if (ev.type == BACKCAST_END)
        putchar('\n');
    else
        fprintf(stderr, "hello: %s\n", backcast_last_error(c));
    backcast_disconnect(&c);
    return ev.type != BACKCAST_END;
}
