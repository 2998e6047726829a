/* notify.c: what the daemon tells whoever started it. To the service manager by its notify socket,
 * if there is one; to the parent of a private daemon by lines on its descriptor: "STATUS=...",
 * "READY=1", "ERROR=...". Nobody listening is no error. */
#include <string.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>
#include "daemon.h"
#include "log.h"

#define LISTEN_NAME "control"

static void parent_line(int fd, const char *key, const char *text)
{
    char line[480];
    if (fd < 0)
        return;
    int n = snprintf(line, sizeof line, "%s=%.400s\n", key, text);
    (void)!send(fd, line, (size_t)n,
                MSG_DONTWAIT | MSG_NOSIGNAL); /* a pipe's end: not written to */
}

void notify_ready(int parent_fd, const char *status)
{
    sd_notifyf(0, "READY=1\nSTATUS=%s", status);
    parent_line(parent_fd, "STATUS", status);
    parent_line(parent_fd, "READY", "1");
}

void notify_loading(int parent_fd, const char *status)
{
    /* as long as it gets on, it may take its time */
    sd_notifyf(0, "STATUS=%s\nEXTEND_TIMEOUT_USEC=60000000", status);
    parent_line(parent_fd, "STATUS", status);
}

void notify_stopping(int parent_fd, uint64_t most_ms)
{
    uint64_t us = (most_ms + 1000) * 1000; /* and what closes after the engine */
    sd_notifyf(0, "STOPPING=1\nSTATUS=Stopping\nEXTEND_TIMEOUT_USEC=%llu", (unsigned long long)us);
    parent_line(parent_fd, "STATUS", "Stopping");
}

void notify_failed(int parent_fd, const char *why)
{
    sd_notifyf(0, "STATUS=%s", why);
    parent_line(parent_fd, "ERROR", why);
}

int notify_listen_fd(void)
{
    char **names = NULL;
    int control = -1;
    int n = sd_listen_fds_with_names(1, &names);
    for (int i = 0; i < n; i++) {
        int fd = SD_LISTEN_FDS_START + i;
        if (control < 0 && strcmp(names[i], LISTEN_NAME) == 0) {
            control = fd;
        } else {
            log_warn("daemon", "inherited descriptor %d is called \"%s\", not \"%s\": ignored", fd,
                     names[i], LISTEN_NAME);
            close(fd);
        }
        free(names[i]);
    }
    free(names);
    return control;
}
