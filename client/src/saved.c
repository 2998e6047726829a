/* saved.c: the files of saved sessions: listed, taken away. A listing comes in pieces of a frame each. */
#include <stdlib.h>
#include <string.h>
#include "lib.h"

#define SAVED_MAX (1u << 20) /* a daemon that lists for ever is not believed */

/* Adds one reply's files; their names go up, or the list would never end. */
static int list_add(backcast *c, const Backcast__SavedList *r, struct backcast_saved **list,
                    size_t *n)
{
    if (r->n_files == 0)
        return r->more ? fail(&c->fail, BACKCAST_EPROTOCOL, "", "an empty part of a listing") : 0;
    if (*n + r->n_files > SAVED_MAX)
        return fail(&c->fail, BACKCAST_EPROTOCOL, "", "a listing that does not end");
    struct backcast_saved *more = realloc(*list, (*n + r->n_files) * sizeof(*more));
    if (more == NULL)
        return fail(&c->fail, BACKCAST_ENOMEM, "", "out of memory");
    *list = more;
    for (size_t i = 0; i < r->n_files; i++) {
        struct backcast_saved *s = &more[*n];
        bytes_copy(s->name, sizeof(s->name), &r->files[i]->name);
        s->bytes = r->files[i]->bytes;
        s->unix_seconds = r->files[i]->unix_seconds;
        if (*n > 0 && strcmp(more[*n - 1].name, s->name) >= 0)
            return fail(&c->fail, BACKCAST_EPROTOCOL, "", "a listing that is not in order");
        ++*n;
    }
    return 0;
}

int backcast_saved(backcast *c, struct backcast_saved **ret, size_t *ret_n)
{
    struct backcast_saved *list = NULL;
    size_t n = 0;
    bool more = true;
    int rc = 0;

    fail_clear(c);
    while (rc == 0 && more) {
        Backcast__ListSaved m = BACKCAST__LIST_SAVED__INIT;
        ProtobufCMessage *reply = NULL;
        struct call call = {
            FRAME_LIST_SAVED, &m.base, FRAME_SAVED_LIST, CALL_MS, &reply, NULL, NULL};
        m.has_after = n > 0;
        m.after = bytes_of(n > 0 ? list[n - 1].name : "");
        if ((rc = conn_call(c, &call)) < 0)
            break;
        more = ((const Backcast__SavedList *)reply)->more;
        rc = list_add(c, (const Backcast__SavedList *)reply, &list, &n);
    }
    if (rc < 0) {
        free(list);
        return rc;
    }
    *ret = list;
    *ret_n = n;
    return 0;
}

int backcast_unsave(backcast *c, const char *name)
{
    Backcast__Unsave m = BACKCAST__UNSAVE__INIT;
    struct call call = {FRAME_UNSAVE, &m.base, FRAME_DONE, CALL_MS, NULL, NULL, NULL};

    fail_clear(c);
    m.has_name = true;
    m.name = bytes_of(name != NULL ? name : "");
    return conn_call(c, &call);
}
