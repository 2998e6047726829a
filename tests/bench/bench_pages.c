/* bench_pages [--stride BYTES] [--pages 350] [--small]: what pages of keys and values cost that are committed, written and
 * released, and what of them stays with the system (kernels/ref/arena.c). The default stride is a page of the default
 * model. --small: with huge pages forbidden to this process.
 *
 *     pages,commit,us               of a page, written once, in order
 *     pages,commit,resident_mib     of this process, and huge_mib of it
 *     pages,KIND,us                 of a released page. odd: every second one; rest: then the others; order: all of them, one
 *                                   after the other, committed anew before
 *     pages,KIND,resident_mib       after it
 *     pages,KIND,system_mib         what the control group of this process uses more than before the first commit. Its other
 *                                   processes count too. Not printed where there is none that counts memory
 *
 * CSV: bench,case,figure,value */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>
#include "clock.h"
#include "kn.h"
#include "number.h"

struct pages {
    struct kn *kn;
    void *base;
    size_t stride;
    uint32_t n;
    double used_before; /* MiB; < 0: nobody counts */
};

/* MiB of the line that begins with `name` and says kB; 0: there is none. */
static double file_mib(const char *path, const char *name)
{
    char line[200];
    double kb = 0;
    FILE *f = fopen(path, "r");
    if (!f)
        return 0;
    while (fgets(line, sizeof line, f))
        if (strncmp(line, name, strlen(name)) == 0)
            kb = strtod(line + strlen(name), NULL);
    fclose(f);
    return kb / 1024;
}

/* What the control group uses, in MiB; -1: none counts memory. */
static double group_mib(void)
{
    char line[400], path[500];
    double bytes = -1;
    FILE *f = fopen("/proc/self/cgroup", "r"), *g = NULL;
    while (f && !g && fgets(line, sizeof line, f)) {
        char *at = strchr(line, ':');
        line[strcspn(line, "\n")] = '\0';
        if (at && strncmp(at, "::", 2) == 0)
            snprintf(path, sizeof path, "/sys/fs/cgroup%s/memory.current", at + 2);
        else if (at && strncmp(at, ":memory:", 8) == 0)
            snprintf(path, sizeof path, "/sys/fs/cgroup/memory%s/memory.usage_in_bytes", at + 8);
        else
            continue;
        g = fopen(path, "r");
    }
    if (g && fscanf(g, "%lf", &bytes) != 1)
        bytes = -1;
    if (g)
        fclose(g);
    if (f)
        fclose(f);
    return bytes < 0 ? -1 : bytes / 1048576;
}

static void memory_print(const struct pages *p, const char *what)
{
    printf("pages,%s,resident_mib,%.0f\npages,%s,huge_mib,%.0f\n", what,
           file_mib("/proc/self/smaps_rollup", "Rss:"), what,
           file_mib("/proc/self/smaps_rollup", "AnonHugePages:"));
    if (p->used_before >= 0)
        printf("pages,%s,system_mib,%.0f\n", what, rint(group_mib() - p->used_before) + 0.0);
}

static void commit_all(const struct pages *p, const char *print)
{
    uint64_t us = 0;
    for (uint32_t i = 0; i < p->n; i++) {
        uint64_t at = clock_us();
        if (p->kn->ops->arena_commit(p->kn, p->base, p->stride, i) != KN_OK) {
            fprintf(stderr, "bench_pages: no memory for page %u\n", i);
            exit(1);
        }
        memset((uint8_t *)p->base + i * p->stride, 1, p->stride);
        us += clock_us() - at;
    }
    if (!print)
        return;
    printf("pages,%s,us,%.1f\n", print, (double)us / p->n);
    memory_print(p, print);
}

static void release(const struct pages *p, const char *print, uint32_t first, uint32_t step)
{
    uint64_t at = clock_us();
    uint32_t n = 0;
    for (uint32_t i = first; i < p->n; i += step, n++)
        p->kn->ops->arena_release(p->kn, p->base, p->stride, i);
    printf("pages,%s,us,%.1f\n", print, (double)(clock_us() - at) / n);
    memory_print(p, print);
}

int main(int argc, char **argv)
{
    struct pages p = {.stride = 1474560, .n = 350};
    struct kn_options opt = {.backend = "ref", .threads = 1};
    char why[160] = "";
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--small") == 0)
            (void)prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
        else if (i + 1 < argc && strcmp(argv[i], "--stride") == 0)
            p.stride = number_take("--stride", argv[++i], 1, UINT32_MAX);
        else if (i + 1 < argc && strcmp(argv[i], "--pages") == 0)
            p.n = number_take("--pages", argv[++i], 2, UINT32_MAX);
        else
            p.n = 0;
    }
    if (p.n == 0 || p.stride % (size_t)sysconf(_SC_PAGESIZE) != 0) {
        fprintf(stderr, "usage: bench_pages [--stride BYTES] [--pages 2..] [--small]\n"
                        "BYTES: a multiple of the system's page\n");
        return 2;
    }
    if (kn_open(&p.kn, &opt, why, sizeof why) != KN_OK ||
        p.kn->ops->arena_open(p.kn, p.stride, p.n, &p.base) != KN_OK) {
        fprintf(stderr, "bench_pages: no arena of %u pages of %zu bytes %s\n", p.n, p.stride, why);
        return 1;
    }
    printf("bench,case,figure,value\n");
    p.used_before = group_mib();
    commit_all(&p, "commit");
    release(&p, "odd", 1, 2);
    release(&p, "rest", 0, 2);
    commit_all(&p, NULL);
    release(&p, "order", 0, 1);
    p.kn->ops->arena_close(p.kn, p.base, p.stride, p.n);
    kn_close(&p.kn);
    return 0;
}
