/* folders.c: see folders.h. */
#include "folders.h"
#include "disk_io.h"
#include "filelock.h"
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Makes one folder whose parent is there; nothing if it is there already. */
static int make_one(const char *path, struct err *e)
{
    char above[DISK_PATH_MAX];
    if (mkdir(path, 0700) < 0) {
        struct stat st;
        if (errno == EEXIST && stat(path, &st) == 0 && S_ISDIR(st.st_mode))
            return BC_OK;
        return disk_failed(e, "making", path);
    }
    snprintf(above, sizeof above, "%s", path);
    char *slash = strrchr(above, '/');
    if (slash == above)
        slash++;
    *slash = '\0';
    if (disk_io_system.sync_folder(NULL, above) < 0)
        return disk_failed(e, "syncing", above);
    return BC_OK;
}

int folders_make(const char *path, struct err *e)
{
    char part[DISK_PATH_MAX];
    if (path[0] != '/' || strlen(path) >= sizeof part)
        return err_set(e, BC_EINVALID, "state_dir",
                       "%.150s: must be a whole path of up to %u bytes", path, DISK_PATH_MAX - 1);
    for (const char *at = strchr(path + 1, '/'); at != NULL; at = strchr(at + 1, '/')) {
        snprintf(part, sizeof part, "%.*s", (int)(at - path), path);
        int rc = make_one(part, e);
        if (rc < 0)
            return rc;
    }
    return BC_OK;
}

int folders_lock(const char *state_dir, int *ret_fd, struct err *e)
{
    char path[DISK_PATH_MAX + 8];
    snprintf(path, sizeof path, "%s/lock", state_dir);
    int rc = folders_make(path, e);
    if (rc < 0)
        return rc;
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0)
        return disk_failed(e, "opening", path);
    if (!filelock_take(fd)) {
        rc = errno == EWOULDBLOCK ? err_set(e, BC_EBUSY, "state_dir",
                                            "another daemon keeps its state in %.150s", state_dir)
                                  : disk_failed(e, "locking", path);
        close(fd);
        return rc;
    }
    *ret_fd = fd;
    return BC_OK;
}

bool folders_name_ok(const char *name)
{
    size_t n = strlen(name);
    for (size_t i = 0; i < n; i++)
        if (!isalnum((unsigned char)name[i]) && strchr("._-", name[i]) == NULL)
            return false;
    return n >= 1 && n <= 64;
}
