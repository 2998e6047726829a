/* saved.c: the files of saved sessions: which a user has, and one that goes.
 *
 *   command --> task --> disk thread: the folder is read, or the file unlinked and the folder synced
 *     ^                     |
 *     '--- answered <-------'   a listing comes in pieces: names behind `after`, REPORT_SAVED_MAX at most
 */
#include "core.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SUFFIX ".bcs"

struct saved_task {
    struct disk_task task; /* first: the disk thread's pointer is ours */
    struct saved_task *next;
    struct command *asker;  /* NULL: it was told that the daemon stops */
    struct report *listing; /* LIST: what was found */
    char after[65];
    char path[DISK_PATH_MAX]; /* LIST: the folder */
};

/* ---- the disk thread ---- */

/* "NAME.bcs" -> NAME; false: no save of ours. */
static bool name_of_file(const char *file, char ret[65])
{
    size_t n = strlen(file), s = strlen(SUFFIX);
    if (n <= s || n - s > 64 || strcmp(file + n - s, SUFFIX) != 0)
        return false;
    memcpy(ret, file, n - s);
    ret[n - s] = '\0';
    return folders_name_ok(ret);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct report_saved *)a)->name, ((const struct report_saved *)b)->name);
}

/* Keeps the first of all names that come: list is full of smaller ones, or has room. */
static void keep_first(struct report *r, const struct report_saved *f)
{
    struct report_saved *list = r->u.saved.files;
    uint32_t n = r->u.saved.n, at = n;
    while (at > 0 && by_name(f, &list[at - 1]) < 0)
        at--;
    r->u.saved.more |= n == REPORT_SAVED_MAX;
    if (at == REPORT_SAVED_MAX)
        return;
    uint32_t behind = BC_MIN(n, REPORT_SAVED_MAX - 1) - at;
    memmove(&list[at + 1], &list[at], behind * sizeof *list);
    list[at] = *f;
    r->u.saved.n = BC_MIN(n + 1, REPORT_SAVED_MAX);
}

static int run_list(struct saved_task *t, struct err *e)
{
    DIR *dir = opendir(t->path);
    struct dirent *ent;
    if (dir == NULL) /* nobody has saved anything yet */
        return errno == ENOENT ? BC_OK : disk_failed(e, "reading", t->path);
    while ((ent = readdir(dir)) != NULL) {
        struct report_saved f = {0};
        struct stat st;
        if (!name_of_file(ent->d_name, f.name) || strcmp(f.name, t->after) <= 0 ||
            fstatat(dirfd(dir), ent->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0 || !S_ISREG(st.st_mode))
            continue;
        f.bytes = (uint64_t)st.st_size;
        f.unix_seconds = (uint64_t)BC_MAX(st.st_mtime, 0);
        keep_first(t->listing, &f);
    }
    closedir(dir);
    return BC_OK;
}

static int run_unlink(const struct disk_io *io, const char *path, struct err *e)
{
    char folder[DISK_PATH_MAX];
    if (io->unlink(io->arg, path) < 0)
        return errno == ENOENT ? err_set(e, BC_ENOTFOUND, "name", "no session is saved as that")
                               : disk_failed(e, "removing", path);
    snprintf(folder, sizeof folder, "%.*s", (int)(strrchr(path, '/') - path), path);
    return io->sync_folder(io->arg, folder) < 0 ? disk_failed(e, "syncing", folder) : BC_OK;
}

void saved_run(const struct engine *en, struct disk_task *k)
{
    struct saved_task *t = (struct saved_task *)k;
    k->rc = k->what == DISK_LIST ? run_list(t, &k->err) : run_unlink(en->opt.io, t->path, &k->err);
}

/* ---- the engine ---- */

static int task_new(const struct engine *en, const struct command *c, struct saved_task **ret,
                    struct err *e)
{
    bool list = c->type == CMD_SAVED;
    struct saved_task *t = calloc(1, sizeof *t);
    if (t == NULL)
        return err_nomem(e, sizeof *t);
    int rc = save_path(en, c->uid, list ? "x" : c->u.save.name, t->path, sizeof t->path, e);
    if (rc == BC_OK && !list && save_under_way(en, t->path))
        rc = err_set(e, BC_EBUSY, "name", "a save of this name is under way");
    if (rc < 0) {
        free(t);
        return rc;
    }
    t->task.what = list ? DISK_LIST : DISK_UNLINK;
    if (list) {
        *strrchr(t->path, '/') = '\0';
        memcpy(t->after, c->u.save.name, sizeof t->after);
        t->listing = report_new(REP_SAVED, REPORT_SAVED_MAX * sizeof(struct report_saved));
        t->listing->u.saved.files = (struct report_saved *)(t->listing + 1);
    }
    *ret = t;
    return BC_OK;
}

void saved_command(struct engine *en, struct command **pc)
{
    struct command *c = *pc;
    struct saved_task *t = NULL;
    struct err e = {0};
    if (task_new(en, c, &t, &e) < 0) {
        report_error(en, c, &e);
        return;
    }
    t->asker = c;
    t->next = en->tier.saved;
    en->tier.saved = t;
    *pc = NULL;
    disk_push(en, &t->task);
}

void saved_back(struct engine *en, struct disk_task *k)
{
    struct saved_task *t = (struct saved_task *)k;
    struct saved_task **at = &en->tier.saved;
    while (*at != t)
        at = &(*at)->next;
    *at = t->next;
    if (t->asker != NULL) {
        if (k->rc < 0) {
            report_error(en, t->asker, &k->err);
        } else if (t->listing != NULL) {
            report_reply(en, t->asker, t->listing);
            t->listing = NULL;
        } else {
            report_reply(en, t->asker, report_new(REP_DONE, 0));
        }
        queue_command_done(en, &t->asker);
        en->worked = true;
    }
    if (t->listing != NULL)
        report_free(&t->listing);
    free(t);
}

void saved_refuse_all(struct engine *en, const struct err *e)
{
    for (struct saved_task *t = en->tier.saved; t != NULL; t = t->next)
        if (t->asker != NULL) {
            report_error(en, t->asker, e);
            queue_command_done(en, &t->asker);
        }
}
