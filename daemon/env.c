/* env.c: see env.h. */
#include "env.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool absolute(const char *s)
{
    return s != NULL && s[0] == '/';
}

bool env_dir(enum env_dir which, char *ret, size_t size)
{
    static const struct {
        const char *name, *below_home;
    } dirs[] = {{"XDG_RUNTIME_DIR", NULL},
                {"XDG_CONFIG_HOME", "/.config"},
                {"XDG_DATA_HOME", "/.local/share"},
                {"XDG_STATE_HOME", "/.local/state"},
                {"STATE_DIRECTORY", NULL}};
    const char *dir = getenv(dirs[which].name), *home = getenv("HOME"), *below = "";
    if (!absolute(dir)) {
        dir = home;
        below = dirs[which].below_home;
    }
    if (!absolute(dir) || below == NULL)
        return false;
    return (size_t)snprintf(ret, size, "%s%s", dir, below) < size;
}

/* The number after `key` in a file of "key value" lines, or the file's only number (key ""). */
static uint64_t number_in(const char *path, const char *key)
{
    char line[256];
    uint64_t found = UINT64_MAX;
    FILE *f = fopen(path, "re");
    while (f != NULL && found == UINT64_MAX && fgets(line, sizeof line, f) != NULL) {
        char *end;
        size_t n = strlen(key);
        if (strncmp(line, key, n) != 0)
            continue;
        uint64_t v = strtoull(line + n, &end, 10);
        if (end != line + n)
            found = v;
    }
    if (f != NULL)
        fclose(f);
    return found;
}

/* The process's own group in the unified hierarchy: the last line of /proc/self/cgroup,
 * "0::/path". */
static bool own_cgroup(char *ret, size_t size)
{
    char line[512];
    bool found = false;
    FILE *f = fopen("/proc/self/cgroup", "re");
    while (f != NULL && !found && fgets(line, sizeof line, f) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        if (strncmp(line, "0::/", 4) == 0)
            found = (size_t)snprintf(ret, size, "/sys/fs/cgroup/%s", line + 4) < size;
    }
    if (f != NULL)
        fclose(f);
    return found;
}

uint64_t env_memory(void)
{
    uint64_t kib = number_in("/proc/meminfo", "MemAvailable:");
    uint64_t bytes = kib != UINT64_MAX
                         ? kib * 1024
                         : (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE) / 2;
    char dir[600], path[640];
    if (!own_cgroup(dir, sizeof dir))
        return bytes;
    /* A limit anywhere above counts too. */
    for (char *end = dir + strlen(dir); end > dir + strlen("/sys/fs/cgroup");) {
        snprintf(path, sizeof path, "%s/memory.max", dir);
        uint64_t max = number_in(path, "");
        snprintf(path, sizeof path, "%s/memory.current", dir);
        uint64_t used = number_in(path, "");
        if (max != UINT64_MAX && used != UINT64_MAX)
            bytes = BC_MIN(bytes, max > used ? max - used : 0);
        while (end > dir && *--end != '/')
            ;
        *end = '\0';
    }
    return bytes;
}
