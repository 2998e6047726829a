/* open.c: how a connection begins, ends, and begins again. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#include "lib.h"

/* A connected socket, or a negative code. A full backlog is tried again until CALL_MS are over. */
static int socket_connect(const char *path, struct failure *f)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    uint64_t deadline = now_ms() + CALL_MS;

    if (strlen(path) >= sizeof(a.sun_path))
        return fail(f, BACKCAST_EINVALID, "socket_path", "%s: longer than %zu bytes", path,
                    sizeof(a.sun_path) - 1);
    memcpy(a.sun_path, path, strlen(path) + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return fail(f, BACKCAST_EIO, "", "socket: %s", strerror(errno));
    while (connect(fd, (struct sockaddr *)&a, sizeof(a)) < 0) {
        int e = errno;
        if ((e == EAGAIN || e == EINTR) && now_ms() < deadline) {
            struct timespec nap = {0, 10 * 1000 * 1000};
            nanosleep(&nap, NULL);
            continue;
        }
        close(fd);
        int code = e == ENOENT || e == ECONNREFUSED || e == ENOTDIR ? BACKCAST_ENOTFOUND
                   : e == EACCES || e == EPERM                      ? BACKCAST_EPERMISSION
                   : e == EAGAIN                                    ? BACKCAST_EBUSY
                                                                    : BACKCAST_EIO;
        if (code == BACKCAST_ENOTFOUND)
            return fail(f, code, "socket_path", "no daemon listens at %s", path);
        return fail(f, code, "socket_path", "%s: %s", path, strerror(e));
    }
    return fd;
}

/* The user's daemon, else the system's. *ret_path is malloced. */
static int socket_find(const char *socket_path, char **ret_path, struct failure *f)
{
    const char *run = getenv("XDG_RUNTIME_DIR");
    char path[256];
    int fd = BACKCAST_ENOTFOUND;

    if (socket_path != NULL) {
        snprintf(path, sizeof(path), "%s", socket_path);
        fd = socket_connect(socket_path, f);
    } else {
        if (run != NULL && run[0] == '/' &&
            snprintf(path, sizeof(path), "%s/backcast/backcast.sock", run) < (int)sizeof(path))
            fd = socket_connect(path, f);
        if (fd == BACKCAST_ENOTFOUND) {
            snprintf(path, sizeof(path), "/run/backcast/backcast.sock");
            fd = socket_connect(path, f);
            if (fd == BACKCAST_ENOTFOUND)
                fail(f, fd, "socket_path",
                     "no daemon listens at $XDG_RUNTIME_DIR/backcast/backcast.sock or at %s", path);
        }
    }
    if (fd < 0)
        return fd;
    *ret_path = strdup(path);
    if (*ret_path == NULL) {
        close(fd);
        return fail(f, BACKCAST_ENOMEM, "", "out of memory");
    }
    return fd;
}

static void models_forget(backcast *c)
{
    for (unsigned i = 0; i < c->n_models; i++)
        free(c->models[i]);
    c->n_models = 0;
    free(c->version);
    c->version = NULL;
}

static void page_forget(backcast *c)
{
    if (c->page != NULL)
        munmap(c->page, c->page_bytes);
    c->page = NULL;
}

static char *bytes_dup(const ProtobufCBinaryData *b)
{
    return strndup(b->data != NULL ? (const char *)b->data : "", b->len);
}

/* Keeps what the daemon said about itself: version and models, the default one first. */
static int hello_keep(backcast *c, const Backcast__HelloReply *r)
{
    models_forget(c);
    c->version = bytes_dup(&r->daemon);
    if (c->version == NULL)
        return fail(&c->fail, BACKCAST_ENOMEM, "", "out of memory");
    for (size_t i = 0; i <= r->n_models && c->n_models < MODELS_MAX; i++) {
        const ProtobufCBinaryData *name = i == 0 ? &r->default_model : &r->models[i - 1];
        bool again = i > 0 && name->len == r->default_model.len && name->len > 0 &&
                     memcmp(name->data, r->default_model.data, name->len) == 0;
        if (name->len == 0 || again)
            continue;
        if ((c->models[c->n_models] = bytes_dup(name)) == NULL)
            return fail(&c->fail, BACKCAST_ENOMEM, "", "out of memory");
        c->n_models++;
    }
    return 0;
}

/* Maps the stats page that came with Hello's answer; closes the fd in any case. */
static int page_keep(backcast *c, const Backcast__HelloReply *r, int *fds, int n_fds)
{
    struct stat st;
    int rc = 0;

    page_forget(c);
    if (n_fds == 1) {
        int seals = fcntl(fds[0], F_GET_SEALS);
        if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fds[0], &st) < 0 ||
            st.st_size > STATS_PAGE_MAX || st.st_size < (off_t)sizeof(struct statpage) ||
            r->stats_bytes != (uint64_t)st.st_size) {
            rc = conn_lose(c, BACKCAST_EPROTOCOL, "the stats page is not as announced");
        } else {
            void *p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fds[0], 0);
            if (p != MAP_FAILED) { /* without it, backcast_stats_page says so */
                c->page = p;
                c->page_bytes = (size_t)st.st_size;
            }
        }
    } else if (n_fds > 1) {
        rc = conn_lose(c, BACKCAST_EPROTOCOL, "Hello's answer came with %d descriptors", n_fds);
    }
    fds_close(fds, &n_fds);
    return rc;
}

static int hello(backcast *c)
{
    Backcast__Hello m = BACKCAST__HELLO__INIT;
    ProtobufCMessage *reply = NULL;
    int fds[FRAME_FDS_MAX], n_fds = 0;
    struct call call = {FRAME_HELLO, &m.base, FRAME_HELLO_REPLY, CALL_MS, &reply, fds, &n_fds};

    m.has_min_version = m.has_max_version = m.has_features = m.has_max_frame = m.has_client = true;
    m.min_version = PROTOCOL_VERSION_MIN;
    m.max_version = PROTOCOL_VERSION_MAX;
    m.features = FEATURES_ALL;
    m.max_frame = FRAME_PAYLOAD_MAX;
    m.client = bytes_of(program_invocation_short_name);
    if (m.client.len > 63)
        m.client.len = 63;
    c->send_max = FRAME_PAYLOAD_HELLO_MAX;
    int rc = conn_call(c, &call);
    if (rc < 0)
        return rc;
    const Backcast__HelloReply *r = (const Backcast__HelloReply *)reply;
    rc = page_keep(c, r, fds, n_fds);
    if (rc < 0)
        return rc;
    if (!r->has_version || r->version < PROTOCOL_VERSION_MIN || r->version > PROTOCOL_VERSION_MAX)
        return conn_lose(c, BACKCAST_EVERSION, "the daemon chose protocol version %u, %u at most",
                         r->version, PROTOCOL_VERSION_MAX);
    if (r->has_max_frame && r->max_frame < FRAME_PAYLOAD_MIN_MAX)
        return conn_lose(c, BACKCAST_EPROTOCOL, "max_frame is %u, %u at least", r->max_frame,
                         FRAME_PAYLOAD_MIN_MAX);
    c->send_max =
        r->has_max_frame && r->max_frame < FRAME_PAYLOAD_MAX ? r->max_frame : FRAME_PAYLOAD_MAX;
    c->features = r->features & m.features;
    return hello_keep(c, r);
}

int conn_watch(backcast *c, int fd, void *who)
{
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = who};
    if (epoll_ctl(c->epoll, EPOLL_CTL_ADD, fd, &e) < 0)
        return fail(&c->fail, BACKCAST_EIO, "", "epoll: %s", strerror(errno));
    return 0;
}

void conn_unwatch(backcast *c, int *fd)
{
    if (*fd < 0)
        return;
    epoll_ctl(c->epoll, EPOLL_CTL_DEL, *fd, NULL); /* a fork may hold a copy that would stay */
    close(*fd);
    *fd = -1;
}

/* Takes a connected socket and says Hello on it. */
static int conn_begin(backcast *c, int fd)
{
    c->sock = fd;
    c->lost = 0;
    int rc = conn_watch(c, fd, c);
    if (rc == 0)
        rc = hello(c);
    if (rc < 0 && c->lost == 0) {
        struct failure f = c->fail;
        conn_lose(c, rc, "%s", f.text);
        c->fail = f;
    }
    return rc;
}

int backcast_connect(backcast **ret, const char *socket_path)
{
    struct failure *f = fail_of_thread();
    backcast *c = calloc(1, sizeof(*c));
    int fd, rc = BACKCAST_ENOMEM;

    *f = (struct failure){0};
    if (c == NULL)
        return fail(f, rc, "", "out of memory");
    c->magic = CONN_MAGIC;
    c->sock = c->epoll = c->kick = -1;
    c->arena.size = FRAME_ARENA_BYTES;
    c->arena.base = malloc(c->arena.size);
    c->in.payload = malloc(FRAME_PAYLOAD_MAX);
    c->epoll = epoll_create1(EPOLL_CLOEXEC);
    c->kick = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (c->arena.base == NULL || c->in.payload == NULL) {
        fail(f, rc, "", "out of memory");
    } else if (c->epoll < 0 || c->kick < 0) {
        rc = fail(f, BACKCAST_EIO, "", "epoll, eventfd: %s", strerror(errno));
    } else if ((rc = conn_watch(c, c->kick, &c->kick)) < 0) {
        *f = c->fail;
    } else if ((fd = rc = socket_find(socket_path, &c->path, f)) >= 0) {
        rc = conn_begin(c, fd);
        if (rc < 0)
            *f = c->fail;
    }
    if (rc < 0) {
        backcast_disconnect(&c);
        return rc;
    }
    *ret = c;
    return 0;
}

void backcast_disconnect(backcast **pc)
{
    backcast *c = *pc;

    if (c == NULL)
        return;
    *pc = NULL;
    while (c->sessions != NULL)
        session_free(c->sessions);
    fds_close(c->in.fds, &c->in.n_fds);
    int *own[] = {&c->sock, &c->epoll, &c->kick};
    for (size_t i = 0; i < sizeof(own) / sizeof(*own); i++)
        if (*own[i] >= 0)
            close(*own[i]);
    models_forget(c);
    page_forget(c);
    stats_free(&c->stats);
    free(c->path);
    free(c->record);
    free(c->in.payload);
    free(c->arena.base);
    c->magic = 0;
    free(c);
}

int backcast_reconnect(backcast *c)
{
    int n = 0;

    fail_clear(c);
    conn_unwatch(c, &c->sock); /* if it seemed alive: the caller knows better */
    c->lost = BACKCAST_ECLOSED;
    fds_close(c->in.fds, &c->in.n_fds);
    c->in.have = 0;
    c->in.head_ok = false;
    int fd = socket_connect(c->path, &c->fail);
    if (fd < 0)
        return fd;
    int rc = conn_begin(c, fd);
    if (rc < 0)
        return rc;
    for (backcast_session *s = c->sessions; s != NULL; s = s->next) {
        if (s->dead != 0 && s->dead != BACKCAST_ECLOSED)
            continue;
        if (s->name[0] == '\0') {
            session_kill(s, BACKCAST_ECLOSED, "it had no name and went with its connection");
            continue;
        }
        s->dead = 0; /* a daemon that stops closes the rings first: it may know the name again */
        s->end_owed = false; /* and its request: the end comes from there, or is owed again */
        rc = session_attach_again(s);
        if (c->lost != 0)
            return c->lost;
        n += rc == 0;
    }
    fail_clear(c);
    return n;
}

int backcast_fd(const backcast *c)
{
    return c->epoll;
}

const char *backcast_daemon_version(const backcast *c)
{
    return c->version != NULL ? c->version : "";
}

const char *backcast_model_name(const backcast *c, unsigned i)
{
    return i < c->n_models ? c->models[i] : NULL;
}
