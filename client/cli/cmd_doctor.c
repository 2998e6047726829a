/* cmd_doctor.c: doctor: what is wrong with this set-up, one line a check: ok, note or BAD. Exit 1 if
 * one is BAD: something that keeps `backcast run` from working. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>
#include <stdarg.h>
#include "cli.h"
#include "gguf.h"
#include "json.h"
#include "models.h"
#include "private.h"

enum verdict { OK, NOTE, BAD };

struct doctor {
    bool json;
    struct json j;
    int bad;
};

static void check(struct doctor *d, enum verdict v, const char *what, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

static void check(struct doctor *d, enum verdict v, const char *what, const char *fmt, ...)
{
    static const char *const names[] = {"ok", "note", "BAD"}, *const sgr[] = {"32", "33", "31"};
    char text[600], on[16];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    d->bad += v == BAD;
    if (d->json) {
        json_open(&d->j, NULL, '{');
        json_text(&d->j, "check", what);
        json_text(&d->j, "verdict", names[v]);
        json_text(&d->j, "text", text);
        json_shut(&d->j, '}');
        return;
    }
    snprintf(on, sizeof(on), "\033[%sm", sgr[v]);
    printf("%s%-4s%s  %-10s %s\n", paint(tty_out(), on), names[v], paint(tty_out(), "\033[0m"),
           what, text);
}

static void check_daemon(struct doctor *d, const struct args *a)
{
    char program[PATH_MAX];
    backcast *c = NULL;
    struct backcast_stats st;
    struct err e = {0};
    int rc = backcast_connect(&c, a->socket);

    if (rc == 0) {
        if (backcast_stats(c, &st) == 0)
            check(d, OK, "daemon", "%s, %zu model%s, %u session%s", backcast_daemon_version(c),
                  st.n_models, PLURAL(st.n_models), st.n_sessions_all, PLURAL(st.n_sessions_all));
        else
            check(d, BAD, "daemon", "%s does not answer: %s", backcast_daemon_version(c),
                  backcast_last_error(c));
        backcast_disconnect(&c);
    } else if (rc == BACKCAST_ENOTFOUND) {
        check(d, NOTE, "daemon", "%s; run and chat start a private one", backcast_last_error(NULL));
    } else {
        check(d, BAD, "daemon", "%s", backcast_last_error(NULL));
    }
    if (private_find(program, sizeof(program), &e) < 0)
        check(d, rc == 0 ? NOTE : BAD, "backcastd", "%s", e.text);
    else
        check(d, OK, "backcastd", "%s", program);
}

static uint64_t check_model(struct doctor *d, const struct args *a)
{
    char path[PATH_MAX], name[NAME_MAX + 1], size[24];
    struct gguf *g = NULL;
    struct err e = {0};

    if (model_find(a->model, path, sizeof(path), &e) < 0) {
        check(d, BAD, "model", "%s", e.text);
        return 0;
    }
    if (model_file_open(&g, path, &e) < 0) {
        check(d, BAD, "model", "%s", e.text);
        return 0;
    }
    uint64_t bytes = gguf_file_bytes(g);
    model_name(path, name, sizeof(name));
    check(d, OK, "model", "%s, %s, %s", name, path, bytes_text(bytes, size));
    gguf_close(&g);
    return bytes;
}

static void check_memory(struct doctor *d, uint64_t model)
{
    char line[128], have[24], want[24];
    unsigned long long kib = 0;
    FILE *f = fopen("/proc/meminfo", "re");

    while (f != NULL && fgets(line, sizeof(line), f) != NULL)
        if (sscanf(line, "MemAvailable: %llu", &kib) == 1)
            break;
    if (f != NULL)
        fclose(f);
    uint64_t bytes = (uint64_t)kib * 1024, need = model + (256u << 20);
    check(d,
          kib == 0       ? NOTE
          : bytes < need ? BAD
                         : OK,
          "memory", "%s available, %s wanted", bytes_text(bytes, have), bytes_text(need, want));
}

static void check_cpu(struct doctor *d)
{
    char text[200] = "";
    static const char *const names[] = {"avx2",        "avx512f",  "avx512_vnni",
                                        "avx512_bf16", "amx_int8", "amx_bf16"};
    char *line = NULL;
    size_t cap = 0;
    bool avx2 = false;
    FILE *f = fopen("/proc/cpuinfo", "re");

    while (f != NULL && getline(&line, &cap, f) > 0) {
        if (strncmp(line, "flags", 5) != 0)
            continue;
        line[strcspn(line, "\n")] = ' '; /* the last word, too, ends with one */
        for (size_t i = 0; i < ARRAY_LEN(names); i++) {
            char word[32];
            snprintf(word, sizeof(word), " %s ", names[i]);
            if (strstr(line, word) == NULL)
                continue;
            avx2 |= i == 0;
            snprintf(text + strlen(text), sizeof(text) - strlen(text), " %s", names[i]);
        }
        break;
    }
    free(line);
    if (f != NULL)
        fclose(f);
    check(d, avx2 ? OK : NOTE, "processor", "%ld cores,%s%s", sysconf(_SC_NPROCESSORS_ONLN),
          text[0] != '\0' ? text : " none of AVX2, AVX-512, AMX",
          avx2 ? "" : ": only the scalar kernels work here, and they are slow");
}

static void check_kernel(struct doctor *d)
{
    struct utsname u;
    int fd = memfd_create("doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    bool seals = fd >= 0 && ftruncate(fd, 4096) == 0 &&
                 fcntl(fd, F_ADD_SEALS,
                       F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) == 0;
    if (fd >= 0)
        close(fd);
    uname(&u);
    check(d, seals ? OK : BAD, "kernel", "%s %s%s", u.sysname, u.release,
          seals ? "" : ": sealed shared memory (Linux 5.1) is missing");
}

static void check_folders(struct doctor *d)
{
    const char *run = getenv("XDG_RUNTIME_DIR");
    struct stat st;

    if (run == NULL || run[0] != '/')
        check(d, NOTE, "runtime", "XDG_RUNTIME_DIR is not set: only /run/backcast is looked at");
    else if (stat(run, &st) < 0 || !S_ISDIR(st.st_mode))
        check(d, NOTE, "runtime", "XDG_RUNTIME_DIR %s: %s", run,
              errno != 0 ? strerror(errno) : "no folder");
    else if (st.st_uid != getuid() || (st.st_mode & 077) != 0)
        check(d, NOTE, "runtime", "XDG_RUNTIME_DIR %s is open to others", run);
    else
        check(d, OK, "runtime", "%s", run);
}

int cmd_doctor(struct args *a)
{
    struct doctor d = {.json = a->json, .j = json_start(stdout)};

    if (d.json) {
        json_open(&d.j, NULL, '{');
        json_open(&d.j, "checks", '[');
    }
    check_daemon(&d, a);
    uint64_t model = check_model(&d, a);
    check_memory(&d, model);
    check_cpu(&d);
    check_kernel(&d);
    check_folders(&d);
    if (d.json) {
        json_shut(&d.j, ']');
        json_int(&d.j, "bad", d.bad);
        json_shut(&d.j, '}');
    }
    return d.bad > 0 ? CLI_FAILED : CLI_FINE;
}
