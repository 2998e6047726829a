/* fake_daemon.c: see fake_daemon.h. */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <fcntl.h>
#include "fake_daemon.h"

#define REQUIRE FAKE_REQUIRE

struct fake {
    char dir[64], path[96];
    int listener, conn;
    pthread_t thread;
    void (*script)(struct fake *f, void *arg);
    void *arg;
    uint8_t payload[FRAME_PAYLOAD_MAX];
    struct frame_head head;
    struct frame_arena arena;
    pthread_mutex_t lock;
    pthread_cond_t moved;
    int step;
};

void fake_give_up(const char *file, int line, const char *what)
{
    fprintf(stderr, "%s:%d: %s (errno: %s)\n", file, line, what, strerror(errno));
    abort();
}

static void *thread_run(void *arg)
{
    struct fake *f = arg;
    f->script(f, f->arg);
    return NULL;
}

struct fake *fake_start(void (*script)(struct fake *f, void *arg), void *arg)
{
    struct fake *f = calloc(1, sizeof(*f));
    struct sockaddr_un a = {.sun_family = AF_UNIX};

    REQUIRE(f != NULL);
    snprintf(f->dir, sizeof(f->dir), "/tmp/bc-fake-XXXXXX");
    REQUIRE(mkdtemp(f->dir) != NULL);
    snprintf(f->path, sizeof(f->path), "%s/s", f->dir);
    snprintf(a.sun_path, sizeof(a.sun_path), "%s", f->path);
    f->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    REQUIRE(f->listener >= 0 && bind(f->listener, (struct sockaddr *)&a, sizeof(a)) == 0 &&
            listen(f->listener, 8) == 0);
    f->conn = -1;
    f->script = script;
    f->arg = arg;
    f->arena.size = FRAME_ARENA_BYTES;
    f->arena.base = malloc(f->arena.size);
    pthread_mutex_init(&f->lock, NULL);
    pthread_cond_init(&f->moved, NULL);
    REQUIRE(f->arena.base != NULL && pthread_create(&f->thread, NULL, thread_run, f) == 0);
    return f;
}

void fake_stop(struct fake **pf)
{
    struct fake *f = *pf;
    *pf = NULL;
    pthread_join(f->thread, NULL);
    fake_hang_up(f);
    if (f->listener >= 0)
        close(f->listener);
    unlink(f->path);
    rmdir(f->dir);
    pthread_mutex_destroy(&f->lock);
    pthread_cond_destroy(&f->moved);
    free(f->arena.base);
    free(f);
}

const char *fake_path(const struct fake *f)
{
    return f->path;
}

void fake_hang_up(struct fake *f)
{
    if (f->conn >= 0)
        close(f->conn);
    f->conn = -1;
}

void fake_accept(struct fake *f)
{
    fake_hang_up(f);
    f->conn = accept4(f->listener, NULL, NULL, SOCK_CLOEXEC);
    REQUIRE(f->conn >= 0);
}

static void receive_all(struct fake *f, uint8_t *to, size_t len)
{
    while (len > 0) {
        ssize_t n = recv(f->conn, to, len, 0);
        REQUIRE(n > 0);
        to += n;
        len -= (size_t)n;
    }
}

const ProtobufCMessage *fake_request(struct fake *f, unsigned type)
{
    static const struct frame_limits limits = {FRAME_FIELDS_MAX, FRAME_DEPTH_MAX};
    uint8_t head[FRAME_HEAD_BYTES];
    ProtobufCMessage *m = NULL;
    const char *why = "";

    receive_all(f, head, sizeof(head));
    REQUIRE(frame_get(head, FRAME_SIDE_CLIENT, FRAME_PAYLOAD_MAX, &f->head, &why) == 0);
    receive_all(f, f->payload, f->head.len);
    if (f->head.type != type)
        fprintf(stderr, "wanted %s, got %s\n", frame_name(type), frame_name(f->head.type));
    REQUIRE(f->head.type == type);
    REQUIRE(frame_unpack(&f->head, f->payload, &limits, &f->arena, &m, &why) == 0);
    return m;
}

uint32_t fake_request_id(const struct fake *f)
{
    return f->head.request_id;
}

void fake_send(struct fake *f, const void *bytes, size_t len, const int *fds, int n)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int) * 32)];
    } control;
    struct iovec v = {(void *)(uintptr_t)bytes, len};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1};

    if (n > 0) {
        memset(&control, 0, sizeof(control));
        m.msg_control = control.bytes;
        m.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)n);
        struct cmsghdr *k = CMSG_FIRSTHDR(&m);
        k->cmsg_level = SOL_SOCKET;
        k->cmsg_type = SCM_RIGHTS;
        k->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)n);
        memcpy(CMSG_DATA(k), fds, sizeof(int) * (size_t)n);
    }
    ssize_t sent = sendmsg(f->conn, &m, MSG_NOSIGNAL);
    REQUIRE(sent == (ssize_t)len || errno == EPIPE);
}

void fake_reply_fds(struct fake *f, unsigned type, const ProtobufCMessage *m, const int *fds, int n)
{
    static uint8_t bytes[FRAME_HEAD_BYTES + FRAME_PAYLOAD_MAX];
    struct frame_head h = {.len = (uint32_t)protobuf_c_message_get_packed_size(m),
                           .type = (uint16_t)type,
                           .flags = (uint8_t)(FRAME_REPLY | (n > 0 ? FRAME_HAS_FDS : 0)),
                           .request_id = f->head.request_id};
    REQUIRE(h.len <= FRAME_PAYLOAD_MAX);
    frame_put(&h, bytes);
    protobuf_c_message_pack(m, bytes + FRAME_HEAD_BYTES);
    fake_send(f, bytes, FRAME_HEAD_BYTES + h.len, fds, n);
}

void fake_reply(struct fake *f, unsigned type, const ProtobufCMessage *m)
{
    fake_reply_fds(f, type, m, NULL, 0);
}

static ProtobufCBinaryData bytes_of(const char *s)
{
    return (ProtobufCBinaryData){strlen(s), (uint8_t *)(uintptr_t)s};
}

void fake_error(struct fake *f, int code, const char *field, const char *text)
{
    Backcast__Error m = BACKCAST__ERROR__INIT;
    m.has_code = m.has_field = m.has_text = m.has_needed = m.has_available = true;
    m.code = code;
    m.field = bytes_of(field);
    m.text = bytes_of(text);
    m.needed = 7;
    m.available = 5;
    fake_reply(f, FRAME_ERROR, &m.base);
}

void fake_hello(struct fake *f)
{
    Backcast__HelloReply m = BACKCAST__HELLO_REPLY__INIT;
    ProtobufCBinaryData models[2] = {bytes_of("second"), bytes_of("first")};

    fake_accept(f);
    fake_request(f, FRAME_HELLO);
    m.has_version = m.has_features = m.has_daemon = m.has_default_model = true;
    m.version = 1;
    m.features = FEATURE_ATTACH | FEATURE_SCORES_FD;
    m.daemon = bytes_of("fake 1");
    m.default_model = bytes_of("first");
    m.n_models = 2;
    m.models = models;
    fake_reply(f, FRAME_HELLO_REPLY, &m.base);
}

/* ---- sessions */

static int region_make(uint64_t size, struct ring_region **ret)
{
    int fd = memfd_create("fake", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    REQUIRE(fd >= 0 && ftruncate(fd, (off_t)RING_REGION_BYTES(size)) == 0);
    *ret = mmap(NULL, RING_REGION_BYTES(size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    REQUIRE(*ret != MAP_FAILED);
    REQUIRE(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
    return fd;
}

void fake_session_make(struct fake_session *s, uint64_t id, uint64_t size)
{
    int pair[2];

    *s = (struct fake_session){.id = id, .generation = 100 + id, .size = size};
    s->fds[0] = region_make(size, &s->d2c);
    s->fds[1] = region_make(size, &s->c2d);
    s->fds[2] = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    s->fds[3] = pair[1];
    s->bell = pair[0];
    s->c2d_bell = dup(s->fds[2]);
    ring_region_init(s->d2c, size, s->generation, id);
    ring_writer_init(&s->out, s->d2c, s->c2d, size);
    ring_reader_init(&s->in, s->d2c, s->c2d, size);
}

void fake_session_free(struct fake_session *s)
{
    if (s->d2c == NULL)
        return;
    munmap(s->d2c, RING_REGION_BYTES(s->size));
    munmap(s->c2d, RING_REGION_BYTES(s->size));
    close(s->bell);
    close(s->c2d_bell);
    s->d2c = NULL;
}

void fake_session_reply(struct fake *f, struct fake_session *s)
{
    Backcast__SessionOpened m = BACKCAST__SESSION_OPENED__INIT;
    uint8_t token[16] = {1, 2, 3};

    m.has_session = m.has_token = m.has_budget_bytes = m.has_budget_tokens = true;
    m.has_generation = m.has_name = m.has_model = m.has_last_seq = true;
    m.last_seq = s->last_seq;
    m.session = s->id;
    m.token = (ProtobufCBinaryData){sizeof(token), token};
    m.budget_bytes = 1 << 20;
    m.budget_tokens = 64;
    m.generation = s->generation;
    m.model = bytes_of("first");
    m.name = bytes_of(s->id == 9 ? "nine" : "");
    fake_reply_fds(f, FRAME_SESSION_OPENED, &m.base, s->fds, 4);
    for (int i = 0; i < 4; i++)
        close(s->fds[i]);
}

void fake_opened(struct fake *f, struct fake_session *s, uint64_t id)
{
    fake_request(f, FRAME_OPEN_SESSION);
    fake_session_make(s, id, RING_BYTES_DEFAULT);
    fake_session_reply(f, s);
}

void fake_record_2(struct fake_session *s, unsigned type, unsigned flags, const void *fixed,
                   size_t fixed_len, const void *more, size_t more_len)
{
    const struct ring_part parts[] = {{fixed, fixed_len}, {more, more_len}};
    REQUIRE(ring_writer_put(&s->out, type, (uint16_t)flags, parts, 2) == 1);
    if (ring_writer_publish(&s->out))
        REQUIRE(send(s->bell, "!", 1, MSG_NOSIGNAL | MSG_DONTWAIT) == 1 || errno == EAGAIN ||
                errno == EPIPE);
}

void fake_record(struct fake_session *s, unsigned type, unsigned flags, const void *payload,
                 size_t len)
{
    fake_record_2(s, type, flags, payload, len, NULL, 0);
}

void fake_text(struct fake_session *s, const char *text)
{
    struct {
        struct record_tokens t;
        int32_t ids[2];
    } r = {{40, 2, (uint32_t)strlen(text)}, {11, 12}};
    fake_record_2(s, RECORD_TOKENS, 0, &r, sizeof(r), text, strlen(text));
}

void fake_end(struct fake_session *s, uint32_t reason)
{
    struct record_end e = {.reason = reason,
                           .tokens_in = 3,
                           .tokens_out = 2,
                           .tokens_cached = 5,
                           .end_id = UINT32_MAX};
    fake_record(s, RECORD_END, 0, &e, sizeof(e));
}

/* ---- steps */

void fake_say(struct fake *f, int step)
{
    pthread_mutex_lock(&f->lock);
    f->step = step;
    pthread_cond_broadcast(&f->moved);
    pthread_mutex_unlock(&f->lock);
}

void fake_wait(struct fake *f, int step)
{
    pthread_mutex_lock(&f->lock);
    while (f->step < step)
        pthread_cond_wait(&f->moved, &f->lock);
    pthread_mutex_unlock(&f->lock);
}
