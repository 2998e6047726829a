/* session.c: sessions: their options, their shared memory, and the requests about them that are
 * answered at once.
 *
 * Regions are mapped only if they are memfds sealed against shrinking (a later fault would be our
 * death) and of the stated size; the daemon's is mapped read-only.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include "lib.h"

void backcast_session_options_init(struct backcast_session_options *opt)
{
    *opt = (struct backcast_session_options){
        .size = sizeof(*opt),
        .span = BACKCAST_DEFAULT,
        .span_quantile = -1,
        .min_gap = BACKCAST_DEFAULT,
        .recent_tokens = BACKCAST_RECENT_AUTO,
        .frozen_tokens = BACKCAST_FROZEN_AUTO,
    };
}

/* ---- shared memory and bells */

void session_unmap(backcast_session *s)
{
    size_t bytes = RING_REGION_BYTES(s->ring_size);

    if (s->d2c != NULL)
        munmap(s->d2c, bytes);
    if (s->c2d != NULL)
        munmap(s->c2d, bytes);
    s->d2c = s->c2d = NULL;
    conn_unwatch(s->c, &s->bell_in);
    if (s->bell_out >= 0)
        close(s->bell_out);
    s->bell_out = -1;
}

static int region_map(backcast *c, int fd, int prot, size_t *bytes, struct ring_region **ret)
{
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);

    if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW) ||
        fstat(fd, &st) < 0 || st.st_size < (off_t)RING_REGION_BYTES(RING_BYTES_MIN) ||
        st.st_size > (off_t)RING_REGION_BYTES(RING_BYTES_MAX))
        return fail(&c->fail, BACKCAST_EPROTOCOL, "",
                    "a ring's memory is not sealed, or of a size that no ring has");
    void *p = mmap(NULL, (size_t)st.st_size, prot, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED)
        return fail(&c->fail, BACKCAST_ENOMEM, "", "mmap of a ring: %s", strerror(errno));
    *bytes = (size_t)st.st_size;
    *ret = p;
    return 0;
}

/* Maps the regions and sets up both ends of ours. fds: d2c, c2d, bell out, bell in; always closed or
 * kept. */
static int rings_open(backcast_session *s, int *fds, int n_fds, uint64_t generation)
{
    backcast *c = s->c;
    struct ring_region *d2c = NULL, *c2d = NULL;
    size_t bytes[2] = {0, 0};
    uint64_t size = 0;
    const char *why = "";
    int rc = 0;

    if (n_fds != 4)
        rc = fail(&c->fail, BACKCAST_EPROTOCOL, "", "a session came with %d descriptors, not 4",
                  n_fds);
    if (rc == 0)
        rc = region_map(c, fds[0], PROT_READ, &bytes[0], &d2c);
    if (rc == 0)
        rc = region_map(c, fds[1], PROT_READ | PROT_WRITE, &bytes[1], &c2d);
    if (rc == 0 && bytes[0] != bytes[1])
        rc = fail(&c->fail, BACKCAST_EPROTOCOL, "", "a session's two rings differ in size");
    if (rc == 0 && ring_region_check(d2c, bytes[0], s->id, generation, &size, &why) < 0)
        rc = fail(&c->fail, BACKCAST_EPROTOCOL, "", "%s", why);
    if (rc == 0 && RING_PAYLOAD_MAX(size) > c->record_cap) {
        unsigned char *more = realloc(c->record, RING_PAYLOAD_MAX(size));
        if (more == NULL) {
            rc = fail(&c->fail, BACKCAST_ENOMEM, "", "out of memory");
        } else {
            c->record = more;
            c->record_cap = RING_PAYLOAD_MAX(size);
        }
    }
    if (rc == 0)
        rc = conn_watch(c, fds[3], s);
    if (rc < 0) {
        if (d2c != NULL)
            munmap(d2c, bytes[0]);
        if (c2d != NULL)
            munmap(c2d, bytes[1]);
        fds_close(fds, &n_fds);
        return rc;
    }
    close(fds[0]);
    close(fds[1]);
    s->bell_out = fds[2];
    s->bell_in = fds[3];
    s->d2c = d2c;
    s->c2d = c2d;
    s->ring_size = size;
    s->generation = generation;
    ring_region_init(c2d, size, generation, s->id);
    ring_writer_init(&s->out, c2d, d2c, size);
    ring_reader_init(&s->in, c2d, d2c, size);
    if (ring_reader_sleep(&s->in) != 0) /* from now on every record rings */
        stream_kick(c);
    return 0;
}

void session_ring_bell(backcast_session *s)
{
    uint64_t one = 1;
    if (s->bell_out >= 0 && write(s->bell_out, &one, sizeof(one)) < 0)
        return; /* full: it is ringing already */
}

void session_drain_bell(backcast_session *s)
{
    char buf[64];
    ssize_t n;

    if (s->bell_in < 0)
        return;
    do {
        n = recv(s->bell_in, buf, sizeof(buf), MSG_DONTWAIT);
    } while (n == sizeof(buf) || (n < 0 && errno == EINTR));
    if (n == 0) /* the daemon has let go of it: it would be readable for ever */
        conn_unwatch(s->c, &s->bell_in);
}

/* ---- life */

int session_check(backcast_session *s)
{
    backcast *c = s->c;

    fail_clear(c);
    if (c->lost != 0)
        return conn_check(c);
    if (s->dead != 0)
        return fail(&c->fail, s->dead, "session", "session %llu is over: %s",
                    (unsigned long long)s->id, s->dead_text);
    return 0;
}

void session_kill(backcast_session *s, int code, const char *text)
{
    if (s->dead != 0)
        return;
    s->dead = code;
    snprintf(s->dead_text, sizeof(s->dead_text), "%s", text);
    s->end_owed = s->busy;
    session_unmap(s);
    stream_kick(s->c);
}

void session_free(backcast_session *s)
{
    backcast *c = s->c;

    for (backcast_session **p = &c->sessions; *p != NULL; p = &(*p)->next)
        if (*p == s) {
            *p = s->next;
            c->n_sessions--;
            break;
        }
    if (c->turn == s)
        c->turn = s->next;
    session_unmap(s);
    stream_drop_pending(s);
    free(s->ranges);
    s->magic = 0;
    free(s);
}

static backcast_session *session_new(backcast *c)
{
    backcast_session *s, **last = &c->sessions;

    if (c->n_sessions >= SESSIONS_MAX) {
        fail(&c->fail, BACKCAST_EBUSY, "session", "%u sessions are the most of one connection",
             SESSIONS_MAX);
        return NULL;
    }
    s = calloc(1, sizeof(*s));
    if (s == NULL) {
        fail(&c->fail, BACKCAST_ENOMEM, "", "out of memory");
        return NULL;
    }
    s->magic = SESSION_MAGIC;
    s->c = c;
    s->bell_in = s->bell_out = -1;
    s->pending_tail = &s->pending;
    while (*last != NULL)
        last = &(*last)->next;
    *last = s;
    c->n_sessions++;
    return s;
}

/* Fills s from SESSION_OPENED and maps its rings. */
static int session_fill(backcast_session *s, const Backcast__SessionOpened *r, int *fds, int n_fds)
{
    if (!r->has_session || !r->has_token || r->token.len != sizeof(s->token) ||
        r->name.len >= sizeof(s->name)) {
        fds_close(fds, &n_fds);
        return fail(&s->c->fail, BACKCAST_EPROTOCOL, "", "SESSION_OPENED lacks number or token");
    }
    s->id = r->session;
    memcpy(s->token, r->token.data, sizeof(s->token));
    bytes_copy(s->model, sizeof(s->model), &r->model);
    bytes_copy(s->policy, sizeof(s->policy), &r->policy);
    bytes_copy(s->name, sizeof(s->name), &r->name);
    bytes_copy(s->chat_template, sizeof(s->chat_template), &r->chat_template);
    bytes_copy(s->positions, sizeof(s->positions), &r->positions);
    s->info = (struct backcast_session_info){
        .id = r->session,
        .budget_bytes = r->budget_bytes,
        .page_bytes = r->page_bytes,
        .replay_seq = r->last_seq,
        .budget_tokens = r->budget_tokens,
        .keep_tokens = r->keep_tokens,
        .recent_tokens = r->recent_tokens,
        .frozen_tokens = r->frozen_tokens,
        .bytes_per_token = r->bytes_per_token,
        .context_tokens = r->context_tokens,
        .model = s->model,
        .policy = s->policy,
        .name = s->name[0] != '\0' ? s->name : NULL,
        .chat_template = s->chat_template,
        .positions = s->positions,
    };
    return rings_open(s, fds, n_fds, r->generation);
}

/* Sends an opening request and fills s from its answer. */
static int session_begin(backcast_session *s, unsigned type, const ProtobufCMessage *m)
{
    ProtobufCMessage *reply = NULL;
    int fds[FRAME_FDS_MAX], n_fds = 0;
    struct call call = {type, m, FRAME_SESSION_OPENED, OPEN_MS, &reply, fds, &n_fds};
    int rc = conn_call(s->c, &call);

    return rc < 0 ? rc : session_fill(s, (const Backcast__SessionOpened *)reply, fds, n_fds);
}

/* A session that did not exist before. */
static int session_make(backcast *c, unsigned type, const ProtobufCMessage *m,
                        backcast_session **ret)
{
    backcast_session *s = session_new(c);
    if (s == NULL)
        return c->fail.code;
    int rc = session_begin(s, type, m);
    if (rc < 0) {
        struct failure f = c->fail;
        if (s->id != 0) /* the daemon has opened it, only we could not use it */
            backcast_session_close(&s);
        else
            session_free(s);
        c->fail = f;
        return rc;
    }
    *ret = s;
    return 0;
}

static void text_set(protobuf_c_boolean *has, ProtobufCBinaryData *to, const char *s)
{
    if (s == NULL)
        return;
    *has = true;
    *to = bytes_of(s);
}

/* Copies what of the caller's options this library knows; fields that an older caller lacks keep
 * their defaults. */
static int options_take(backcast *c, const struct backcast_session_options *opt,
                        struct backcast_session_options *ret)
{
    backcast_session_options_init(ret);
    if (opt == NULL)
        return 0;
    if (opt->size < sizeof(opt->size) + sizeof(opt->model) || opt->size > sizeof(*ret))
        return fail(&c->fail, BACKCAST_EINVALID, "size",
                    "session options of %zu bytes: use backcast_session_options_init", opt->size);
    memcpy(ret, opt, opt->size);
    return 0;
}

int backcast_session_open(backcast *c, const struct backcast_session_options *opt,
                          backcast_session **ret)
{
    struct backcast_session_options o;
    Backcast__OpenSession m = BACKCAST__OPEN_SESSION__INIT;
    int rc;

    fail_clear(c);
    if ((rc = conn_check(c)) < 0 || (rc = options_take(c, opt, &o)) < 0)
        return rc;
    if (o.positions != NULL && strcmp(o.positions, "keep") != 0 &&
        !(c->features & FEATURE_POSITIONS)) /* it would end, and nobody was told */
        return fail(&c->fail, BACKCAST_EUNSUPPORTED, "positions",
                    "this daemon does not know positions \"%.20s\"", o.positions);
    text_set(&m.has_model, &m.model, o.model);
    text_set(&m.has_policy, &m.policy, o.policy);
    text_set(&m.has_score, &m.score, o.score);
    text_set(&m.has_trigger, &m.trigger, o.trigger);
    text_set(&m.has_kv_type, &m.kv_type, o.kv_type);
    text_set(&m.has_positions, &m.positions, o.positions);
    text_set(&m.has_name, &m.name, o.name);
    text_set(&m.has_chat_template, &m.chat_template, o.chat_template);
    m.has_budget_bytes = o.budget_bytes != 0;
    m.budget_bytes = o.budget_bytes;
    m.has_budget_tokens = o.budget_tokens != 0;
    m.budget_tokens = o.budget_tokens;
    m.has_keep_tokens = o.keep_tokens != 0;
    m.keep_tokens = o.keep_tokens;
    m.has_span = o.span != BACKCAST_DEFAULT;
    m.span = o.span;
    m.has_span_quantile = o.span_quantile != -1;
    m.span_quantile = o.span_quantile;
    m.has_min_gap = o.min_gap != BACKCAST_DEFAULT;
    m.min_gap = o.min_gap;
    m.has_frozen_tokens = o.frozen_tokens != BACKCAST_FROZEN_AUTO;
    m.frozen_tokens = o.frozen_tokens;
    m.has_recent_tokens = o.recent_tokens != BACKCAST_RECENT_AUTO;
    m.recent_tokens = o.recent_tokens;
    m.has_priority = o.priority != 0;
    m.priority = o.priority;
    m.has_weight = o.weight != 0;
    m.weight = o.weight;
    m.has_seed = o.seed != 0;
    m.seed = o.seed;
    m.has_durable = o.durable != 0;
    m.durable = o.durable != 0;
    m.has_ring_bytes = o.ring_bytes != 0;
    m.ring_bytes = o.ring_bytes;
    return session_make(c, FRAME_OPEN_SESSION, &m.base, ret);
}

int backcast_session_attach(backcast *c, const char *name, backcast_session **ret)
{
    Backcast__Attach m = BACKCAST__ATTACH__INIT;
    int rc;

    fail_clear(c);
    if ((rc = conn_check(c)) < 0)
        return rc;
    if (!(c->features & FEATURE_ATTACH))
        return fail(&c->fail, BACKCAST_EUNSUPPORTED, "name", "this daemon keeps no named sessions");
    m.has_name = m.has_last_seq = true;
    m.name = bytes_of(name);
    backcast_session *s = session_new(c);
    if (s == NULL)
        return c->fail.code;
    rc = session_begin(s, FRAME_ATTACH, &m.base);
    if (rc < 0) {
        session_free(s);
        return rc;
    }
    s->others_seq = s->info.replay_seq;
    *ret = s;
    return 0;
}

int session_attach_again(backcast_session *s)
{
    Backcast__Attach m = BACKCAST__ATTACH__INIT;

    session_unmap(s);
    m.has_session = m.has_token = m.has_last_seq = true;
    m.session = s->id;
    m.token = (ProtobufCBinaryData){sizeof(s->token), s->token};
    m.last_seq = s->last_seq;
    s->others_seq = 0; /* what is replayed now ends requests of our own */
    uint64_t deadline = now_ms() + ATTACH_MS;
    int rc;
    while ((rc = session_begin(s, FRAME_ATTACH, &m.base)) == BACKCAST_EBUSY &&
           now_ms() < deadline) /* the daemon has not seen the end of our old connection yet */
        nanosleep(&(struct timespec){0, 10 * 1000 * 1000}, NULL);
    if (rc < 0 && s->c->lost == 0) { /* else nothing is known: the next connection asks again */
        char text[sizeof(s->dead_text)];
        snprintf(text, sizeof(text), "%.150s", s->c->fail.text);
        session_kill(s, rc, text);
    }
    return rc;
}

void backcast_session_close(backcast_session **ps)
{
    backcast_session *s = *ps;
    Backcast__Close m = BACKCAST__CLOSE__INIT;

    if (s == NULL)
        return;
    *ps = NULL;
    if (s->c->lost == 0) {
        struct call call = {FRAME_CLOSE, &m.base, FRAME_CLOSED, CALL_MS, NULL, NULL, NULL};
        m.has_session = true;
        m.session = s->id;
        conn_call(s->c, &call); /* refused: the daemon does not know it any more */
    }
    session_free(s);
}

uint64_t backcast_session_id(const backcast_session *s)
{
    return s->id;
}

int backcast_session_info(const backcast_session *s, struct backcast_session_info *ret)
{
    *ret = s->info;
    return 0;
}

/* ---- requests */

int backcast_session_budget(backcast_session *s, uint64_t bytes, uint32_t tokens,
                            uint32_t keep_tokens)
{
    Backcast__SetBudget m = BACKCAST__SET_BUDGET__INIT;
    ProtobufCMessage *reply = NULL;
    struct call call = {FRAME_SET_BUDGET, &m.base, FRAME_BUDGET_SET, CALL_MS, &reply, NULL, NULL};
    int rc = session_check(s);

    if (rc < 0)
        return rc;
    m.has_session = true;
    m.session = s->id;
    m.has_budget_bytes = bytes != 0;
    m.budget_bytes = bytes;
    m.has_budget_tokens = tokens != 0;
    m.budget_tokens = tokens;
    m.has_keep_tokens = keep_tokens != 0;
    m.keep_tokens = keep_tokens;
    if ((rc = conn_call(s->c, &call)) < 0)
        return rc;
    const Backcast__BudgetSet *r = (const Backcast__BudgetSet *)reply;
    s->info.budget_bytes = r->budget_bytes;
    s->info.budget_tokens = r->budget_tokens;
    s->info.keep_tokens = r->keep_tokens;
    return 0;
}

int backcast_session_prune(backcast_session *s, uint32_t keep_tokens)
{
    Backcast__Prune m = BACKCAST__PRUNE__INIT;
    struct call call = {FRAME_PRUNE, &m.base, FRAME_PRUNED, CALL_MS, NULL, NULL, NULL};
    int rc = session_check(s);

    if (rc < 0)
        return rc;
    m.has_session = true;
    m.session = s->id;
    m.has_keep_tokens = keep_tokens != 0;
    m.keep_tokens = keep_tokens;
    return conn_call(s->c, &call);
}

int backcast_session_fork(backcast_session *s, backcast_session **ret)
{
    int rc = session_check(s);
    return rc < 0 ? rc : backcast_fork_by_id(s->c, s->id, NULL, ret);
}

int backcast_fork_by_id(backcast *c, uint64_t id, const char *name, backcast_session **ret)
{
    Backcast__Fork m = BACKCAST__FORK__INIT;

    fail_clear(c);
    int rc = conn_check(c);
    if (rc < 0)
        return rc;
    m.has_session = true;
    m.session = id;
    text_set(&m.has_name, &m.name, name);
    return session_make(c, FRAME_FORK, &m.base, ret);
}

int backcast_session_save(backcast_session *s, const char *name)
{
    int rc = session_check(s);
    return rc < 0 ? rc : backcast_save_by_id(s->c, s->id, name);
}

int backcast_session_restore(backcast *c, const char *name, backcast_session **ret)
{
    Backcast__Restore m = BACKCAST__RESTORE__INIT;

    fail_clear(c);
    int rc = conn_check(c);
    if (rc < 0)
        return rc;
    text_set(&m.has_name, &m.name, name);
    return session_make(c, FRAME_RESTORE, &m.base, ret);
}
