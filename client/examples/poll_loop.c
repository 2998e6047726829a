/* poll_loop.c: an event loop of the program's own, with poll(2): two sessions answer at the same time,
 * and every now and then the loop does something else.
 *
 *     poll_loop [SOCKET [QUESTION QUESTION]]
 *
 * The rule: when backcast_fd() is readable, call backcast_next(c, &ev, 0) until it returns 0.
 */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <backcast.h>

#define N 2

struct answer {
    backcast_session *session;
    char text[16384];
    size_t len;
    int ended, whole;
};

static int fail(const backcast *c, const char *doing)
{
    fprintf(stderr, "poll_loop: %s: %s\n", doing, backcast_last_error(c));
    return 1;
}

static void take(struct answer *a, const struct backcast_event *ev)
{
    for (int i = 0; i < N; i++) {
        if (a[i].session != ev->session)
            continue;
        if (ev->type == BACKCAST_TEXT && a[i].len + ev->text.len < sizeof(a[i].text)) {
            memcpy(a[i].text + a[i].len, ev->text.text, ev->text.len);
            a[i].len += ev->text.len;
        } else if (ev->type == BACKCAST_END) {
            a[i].ended = 1;
            a[i].whole =
                strcmp(ev->end.reason, "stop") == 0 || strcmp(ev->end.reason, "length") == 0;
            if (!a[i].whole)
                fprintf(stderr, "poll_loop: answer %d ended early: %s %s\n", i + 1, ev->end.reason,
                        ev->end.text);
        }
    }
}

int main(int argc, char **argv)
{
    const char *questions[N] = {"Name three rivers.", "What is a tide?"};
    static struct answer a[N];
    struct backcast_generate_options opt;
    struct backcast_event ev;
    backcast *c = NULL;
    int rc, ticks = 0;

    if (backcast_connect(&c, argc > 1 && argv[1][0] != '\0' ? argv[1] : NULL) < 0)
        return fail(NULL, "connect");
    backcast_generate_options_init(&opt);
    opt.max_tokens = 48;
    for (int i = 0; i < N; i++) {
        const char *q = argc > i + 2 ? argv[i + 2] : questions[i];
        if (backcast_session_open(c, NULL, &a[i].session) < 0 ||
            backcast_chat(a[i].session, "user", q, strlen(q), &opt) < 0) {
            rc = fail(c, "ask");
            backcast_disconnect(&c);
            return rc;
        }
    }
    while (!(a[0].ended && a[1].ended)) {
        struct pollfd p = {.fd = backcast_fd(c), .events = POLLIN};
        int n = poll(&p, 1, 250);
        if (n == 0) {
            ticks++; /* the loop's other work */
            continue;
        }
        while ((rc = backcast_next(c, &ev, 0)) > 0)
            take(a, &ev);
        if (rc < 0) {
            rc = fail(c, "answer");
            backcast_disconnect(&c);
            return rc;
        }
    }
    for (int i = 0; i < N; i++)
        printf("[%d] %.*s\n", i + 1, (int)a[i].len, a[i].text);
    fprintf(stderr, "poll_loop: the loop ran idle %d times\n", ticks);
    backcast_disconnect(&c);
    return a[0].whole && a[1].whole ? 0 : 1;
}
