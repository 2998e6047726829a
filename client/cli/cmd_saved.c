/* cmd_saved.c: saved, unsave: the files that `backcast save` has made. */
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "cli.h"
#include "json.h"

static void saved_print(const struct args *a, const struct backcast_saved *s)
{
    struct json j = json_start(stdout);
    char when[40] = "?", size[24];
    time_t t = (time_t)s->unix_seconds;
    struct tm tm;

    if (a->json) {
        json_open(&j, NULL, '{');
        json_text(&j, "name", s->name);
        json_uint(&j, "bytes", s->bytes);
        json_uint(&j, "unix_seconds", s->unix_seconds);
        json_shut(&j, '}');
        return;
    }
    if (localtime_r(&t, &tm) != NULL)
        strftime(when, sizeof(when), "%Y-%m-%d %H:%M:%S", &tm);
    printf("%-32s %10s  %s\n", s->name, bytes_text(s->bytes, size), when);
}

int cmd_saved(struct args *a)
{
    struct link l;
    struct backcast_saved *list = NULL;
    size_t n = 0;
    int rc = link_open(&l, a, false);

    if (rc != CLI_FINE)
        return rc;
    int err = backcast_saved(l.c, &list, &n);
    if (err < 0) {
        say_failure(l.c, err, "saved");
        rc = CLI_FAILED;
    }
    for (size_t i = 0; i < n; i++)
        saved_print(a, &list[i]);
    if (err == 0 && n == 0 && !a->json)
        say("no session is saved (backcast save SESSION NAME)");
    free(list);
    link_close(&l);
    return rc;
}

int cmd_unsave(struct args *a)
{
    struct link l;
    struct json j = json_start(stdout);
    int rc = link_open(&l, a, false);

    if (rc != CLI_FINE)
        return rc;
    int err = backcast_unsave(l.c, a->rest[0]);
    if (err < 0) {
        rc = say_refusal(a, l.c, err, "unsave");
    } else if (a->json) {
        json_open(&j, NULL, '{');
        json_text(&j, "unsaved", a->rest[0]);
        json_shut(&j, '}');
    } else {
        printf("the file %s is gone\n", a->rest[0]);
    }
    link_close(&l);
    return rc;
}
