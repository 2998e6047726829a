/* The rings, both ends: order and content over every size, what a hostile peer can store and what
 * it gets for it, two threads with real bells (run under ThreadSanitizer too), two processes. */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>
#include "ring.h"

#define SIZE 4096u

struct pair {
    struct ring_region *a, *b; /* a: the writer's region, b: the reader's */
    struct ring_writer w;
    struct ring_reader r;
    size_t bytes;
};

/* Each region is followed by a page that may not be touched. */
static struct ring_region *region_new(size_t bytes)
{
    char *p = mmap(NULL, bytes + 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(p != MAP_FAILED);
    assert_int_equal(mprotect(p + bytes, 4096, PROT_NONE), 0);
    return (struct ring_region *)(void *)p;
}

static struct pair pair_new(uint64_t size)
{
    struct pair p = {.bytes = RING_REGION_BYTES(size)};
    p.a = region_new(p.bytes);
    p.b = region_new(p.bytes);
    ring_region_init(p.a, size, 1, 9);
    ring_writer_init(&p.w, p.a, p.b, size);
    ring_reader_init(&p.r, p.b, p.a, size);
    return p;
}

static void pair_free(struct pair *p)
{
    munmap(p->a, p->bytes + 4096);
    munmap(p->b, p->bytes + 4096);
}

static uint8_t pattern(uint64_t seq, uint32_t i)
{
    return (uint8_t)(seq * 31 + i * 7 + (i >> 8));
}

static void fill(uint8_t *to, uint64_t seq, uint32_t len)
{
    for (uint32_t i = 0; i < len; i++)
        to[i] = pattern(seq, i);
}

static bool filled(const uint8_t *p, uint64_t seq, uint32_t len)
{
    for (uint32_t i = 0; i < len; i++)
        if (p[i] != pattern(seq, i))
            return false;
    return true;
}

static int put(struct ring_writer *w, uint32_t len)
{
    uint8_t payload[RING_BYTES_MAX / 4096];
    assert_true(len <= sizeof payload);
    fill(payload, w->seq + 1, len);
    struct ring_part parts[2] = {{payload, len / 3}, {payload + len / 3, len - len / 3}};
    return ring_writer_put(w, RECORD_TOKENS, 0, parts, 2);
}

static void region_header_is_checked(void **state)
{
    (void)state;
    struct pair p = pair_new(SIZE);
    uint64_t size = 0;
    const char *why;
    assert_int_equal(ring_region_check(p.a, p.bytes, 9, 1, &size, &why), WIRE_OK);
    assert_int_equal(size, SIZE);
    assert_int_equal(ring_region_check(p.a, p.bytes, 8, 1, &size, &why), WIRE_EPROTOCOL);
    assert_int_equal(ring_region_check(p.a, p.bytes, 9, 2, &size, &why), WIRE_EPROTOCOL);
    assert_int_equal(ring_region_check(p.a, p.bytes - 1, 9, 1, &size, &why), WIRE_EPROTOCOL);
    assert_int_equal(ring_region_check(p.a, 2 * p.bytes, 9, 1, &size, &why), WIRE_EPROTOCOL);
    atomic_store(&p.a->log2size, 13);
    assert_int_equal(ring_region_check(p.a, p.bytes, 9, 1, &size, &why), WIRE_EPROTOCOL);
    atomic_store(&p.a->log2size, 12);
    atomic_store(&p.a->abi, 2);
    assert_int_equal(ring_region_check(p.a, p.bytes, 9, 1, &size, &why), WIRE_EPROTOCOL);
    assert_false(ring_size_ok(0));
    assert_false(ring_size_ok(2048));
    assert_false(ring_size_ok(5000));
    assert_false(ring_size_ok(8u << 20));
    assert_true(ring_size_ok(4096) && ring_size_ok(4u << 20));
    pair_free(&p);
}

static void record_has_the_drawn_bytes(void **state)
{
    (void)state;
    struct pair p = pair_new(SIZE);
    p.w.seq = 0x0102030405060707ull;
    struct ring_part part = {"abc", 3};
    assert_int_equal(ring_writer_put(&p.w, RECORD_END, RECORD_FLAG_MORE, &part, 1), 1);
    assert_int_equal(atomic_load(&p.a->tail), 0); /* not before publish */
    ring_writer_publish(&p.w);
    assert_int_equal(atomic_load(&p.a->tail), 32);
    static const uint8_t want[32] = {3, 0, 0, 0, 7, 0, 1, 0, 8, 7, 6, 5, 4, 3, 2, 1, 'a', 'b', 'c'};
    assert_memory_equal(p.a->data, want, 32);
    pair_free(&p);
}

/* Every payload length, through every offset of the ring, with the padding record at its end. */
static void every_length_arrives_whole_and_in_order(void **state)
{
    (void)state;
    struct pair p = pair_new(SIZE);
    uint8_t got[SIZE];
    struct record_head h;
    for (uint64_t seq = 1; seq <= 4 * RING_PAYLOAD_MAX(SIZE); seq++) {
        uint32_t len = (uint32_t)(seq % (RING_PAYLOAD_MAX(SIZE) + 1));
        assert_int_equal(put(&p.w, len), 1);
        ring_writer_publish(&p.w);
        assert_int_equal(ring_reader_take(&p.r, &h, got, sizeof got), 1);
        assert_int_equal(h.len, len);
        assert_int_equal(h.seq, seq);
        assert_true(filled(got, seq, len));
        assert_int_equal(ring_reader_take(&p.r, &h, got, sizeof got), 0);
        ring_reader_release(&p.r);
    }
    assert_int_equal(put(&p.w, RING_PAYLOAD_MAX(SIZE)), 1);
    struct ring_part long_part = {got, RING_PAYLOAD_MAX(SIZE) + 1};
    assert_int_equal(ring_writer_put(&p.w, RECORD_TOKENS, 0, &long_part, 1), WIRE_EINVALID);
    pair_free(&p);
}

static void full_ring_takes_no_more_and_loses_nothing(void **state)
{
    (void)state;
    struct pair p = pair_new(SIZE);
    uint8_t got[SIZE];
    struct record_head h;
    uint64_t next = 1, room;
    for (unsigned round = 0; round < 500; round++) {
        uint32_t len = round * 13 % RING_PAYLOAD_MAX(SIZE);
        while (put(&p.w, len) == 1)
            ;
        assert_int_equal(ring_writer_wait(&p.w, len), 0);
        ring_writer_publish(&p.w);
        assert_int_equal(ring_writer_room(&p.w, &room), WIRE_OK);
        assert_true(room <= 2 * (len + 32));
        unsigned take = 1 + round % 7;
        while (take-- > 0 && ring_reader_take(&p.r, &h, got, sizeof got) == 1) {
            assert_int_equal(h.seq, next);
            assert_true(filled(got, next++, h.len));
        }
        ring_reader_release(&p.r);
    }
    while (ring_reader_take(&p.r, &h, got, sizeof got) == 1)
        assert_int_equal(h.seq, next++);
    assert_int_equal(next - 1, p.w.seq);
    pair_free(&p);
}

static void one_bell_a_sleep(void **state)
{
    (void)state;
    struct pair p = pair_new(SIZE);
    uint8_t got[SIZE];
    struct record_head h;
    put(&p.w, 10);
    assert_false(ring_writer_publish(&p.w)); /* nobody said that it sleeps */
    assert_int_equal(ring_reader_sleep(&p.r), 1);
    assert_int_equal(ring_reader_take(&p.r, &h, got, sizeof got), 1);
    assert_int_equal(ring_reader_sleep(&p.r), 0);
    put(&p.w, 10);
    assert_true(ring_writer_publish(&p.w));
    assert_false(ring_writer_publish(&p.w)); /* nothing new */
    put(&p.w, 10);
    assert_false(ring_writer_publish(&p.w)); /* rung already */
    assert_int_equal(ring_reader_ready(&p.r), 1);
    while (ring_reader_take(&p.r, &h, got, sizeof got) == 1)
        ;
    assert_false(ring_reader_release(&p.r)); /* nobody waits for room */
    while (put(&p.w, 900) == 1)
        ;
    ring_writer_publish(&p.w);
    assert_int_equal(ring_writer_wait(&p.w, 900), 0);
    assert_int_equal(ring_reader_take(&p.r, &h, got, sizeof got), 1);
    assert_true(ring_reader_release(&p.r));
    assert_int_equal(ring_writer_wait(&p.w, 900), 1);
    pair_free(&p);
}

/* ---- lies */

static void lies_of_a_writer_end_the_ring(void **state)
{
    (void)state;
    static const uint64_t tails[] = {1,          8,
                                     15,         17,
                                     16 + SIZE,  SIZE + 16,
                                     UINT64_MAX, UINT64_MAX - 15,
                                     1ull << 63, (1ull << 32) + 16,
                                     SIZE * 2};
    for (unsigned i = 0; i < sizeof tails / sizeof tails[0]; i++) {
        struct pair p = pair_new(SIZE);
        uint8_t got[SIZE];
        struct record_head h;
        atomic_store(&p.a->tail, tails[i]);
        assert_int_equal(ring_reader_take(&p.r, &h, got, sizeof got), WIRE_EPROTOCOL);
        assert_int_equal(ring_reader_sleep(&p.r), WIRE_EPROTOCOL);
        assert_int_equal(ring_reader_ready(&p.r), WIRE_EPROTOCOL);
        pair_free(&p);
    }
    struct pair p = pair_new(SIZE);
    uint8_t got[SIZE];
    struct record_head h;
    put(&p.w, 100);
    put(&p.w, 100);
    ring_writer_publish(&p.w);
    assert_int_equal(ring_reader_take(&p.r, &h, got, sizeof got), 1);
    atomic_store(&p.a->tail, 128);                                    /* backward */
    assert_int_equal(ring_reader_take(&p.r, &h, got, sizeof got), 1); /* known to be there */
    assert_int_equal(ring_reader_take(&p.r, &h, got, sizeof got), WIRE_EPROTOCOL);
    pair_free(&p);
}

static void lies_of_a_reader_end_the_ring(void **state)
{
    (void)state;
    static const uint64_t heads[] = {1, 8, 136, 144, 256, UINT64_MAX, UINT64_MAX - 15, 1ull << 63};
    for (unsigned i = 0; i < sizeof heads / sizeof heads[0]; i++) {
        struct pair p = pair_new(SIZE);
        uint64_t room = 77;
        put(&p.w, 100); /* 128 bytes published, 128 more not */
        ring_writer_publish(&p.w);
        put(&p.w, 100);
        atomic_store(&p.b->head, heads[i]);
        assert_int_equal(ring_writer_room(&p.w, &room), WIRE_EPROTOCOL);
        assert_int_equal(room, 77);
        assert_int_equal(ring_writer_wait(&p.w, 900), WIRE_EPROTOCOL);
        while (put(&p.w, 900) == 1)
            ;
        assert_int_equal(put(&p.w, 900), WIRE_EPROTOCOL);
        pair_free(&p);
    }
    struct pair p = pair_new(SIZE);
    uint64_t room;
    put(&p.w, 100);
    ring_writer_publish(&p.w);
    atomic_store(&p.b->head, 128);
    assert_int_equal(ring_writer_room(&p.w, &room), WIRE_OK);
    atomic_store(&p.b->head, 112); /* backward */
    assert_int_equal(ring_writer_room(&p.w, &room), WIRE_EPROTOCOL);
    pair_free(&p);
}

static void lies_in_a_header_end_the_ring(void **state)
{
    (void)state;
    static const struct record_head lies[] = {
        {.len = UINT32_MAX, .type = RECORD_TOKENS},
        {.len = UINT32_MAX - 15, .type = RECORD_TOKENS},
        {.len = SIZE, .type = RECORD_TOKENS},
        {.len = RING_PAYLOAD_MAX(SIZE) + 1, .type = RECORD_TOKENS},
        {.len = 113, .type = RECORD_TOKENS},    /* past what is published */
        {.len = 100, .type = RECORD_PAD},       /* padding that does not end the area */
        {.len = SIZE - 16, .type = RECORD_PAD}, /* longer than any gap */
    };
    for (unsigned i = 0; i < sizeof lies / sizeof lies[0]; i++) {
        struct pair p = pair_new(SIZE);
        uint8_t got[SIZE];
        struct record_head h = {.len = 5};
        put(&p.w, 100);
        ring_writer_publish(&p.w);
        memcpy(p.a->data, &lies[i], sizeof lies[i]);
        if (i == 3 || i == 6)
            atomic_store(&p.a->tail, SIZE);
        assert_int_equal(ring_reader_take(&p.r, &h, got, sizeof got), WIRE_EPROTOCOL);
        assert_int_equal(h.len, 5);
        pair_free(&p);
    }
    /* a record over the end of the area, and one longer than the reader's buffer */
    struct pair p = pair_new(SIZE);
    uint8_t got[64];
    struct record_head h;
    put(&p.w, 100);
    ring_writer_publish(&p.w);
    assert_int_equal(ring_reader_take(&p.r, &h, got, sizeof got), WIRE_EPROTOCOL);
    p.r.head = p.r.tail = SIZE - 32;
    h = (struct record_head){.len = 100, .type = RECORD_TOKENS};
    memcpy(p.a->data + SIZE - 32, &h, sizeof h);
    atomic_store(&p.a->tail, SIZE + 512);
    assert_int_equal(ring_reader_take(&p.r, &h, got, sizeof got), WIRE_EPROTOCOL);
    pair_free(&p);
}

static uint32_t rng_next(uint32_t *s)
{
    *s = *s * 1664525u + 1013904223u;
    return *s >> 7;
}

/* Random cursors and random bytes: the reader takes only what lies inside, or gives up. */
static void random_rings_never_lead_outside(void **state)
{
    (void)state;
    uint32_t s = 4711;
    unsigned taken = 0, refused = 0;
    struct pair p = pair_new(SIZE);
    for (unsigned i = 0; i < 20000; i++) {
        ring_reader_init(&p.r, p.b, p.a, SIZE);
        p.r.head = p.r.tail = (uint64_t)(rng_next(&s) % 1024) * 16;
        atomic_store(&p.a->tail, p.r.head + (uint64_t)(rng_next(&s) % 300) * 16);
        for (unsigned k = 0; k < SIZE; k += 16) {
            struct record_head h = {.len =
                                        rng_next(&s) % (rng_next(&s) % 8 == 0 ? UINT32_MAX : 128),
                                    .type = (uint16_t)(rng_next(&s) % 3)};
            memcpy(p.a->data + k, &h, sizeof h);
        }
        uint8_t *got = malloc(RING_PAYLOAD_MAX(SIZE)); /* its end is watched by ASan */
        struct record_head h;
        int rc;
        while ((rc = ring_reader_take(&p.r, &h, got, RING_PAYLOAD_MAX(SIZE))) == 1)
            taken++;
        refused += rc < 0;
        free(got);
    }
    assert_true(taken > 1000 && refused > 1000);
    pair_free(&p);
}

/* A peer process that rewrites cursors, headers and payload all the time. */
static void hammered_ring_never_leads_outside(void **state)
{
    (void)state;
    struct pair p = pair_new(SIZE);
    pid_t child = fork();
    if (child == 0) {
        uint32_t s = 99;
        for (;;) {
            uint64_t *words = (uint64_t *)(void *)p.a->data;
            for (unsigned k = 0; k < SIZE / 8; k += 2) {
                words[k] = (uint64_t)(rng_next(&s) % 2) << 32 | (rng_next(&s) % 1200);
                words[k + 1] = 0;
            }
            atomic_store(&p.a->tail, (uint64_t)(rng_next(&s) % 64) * 16);
        }
    }
    assert_true(child > 0);
    unsigned taken = 0, refused = 0;
    uint8_t *got = malloc(RING_PAYLOAD_MAX(SIZE));
    for (unsigned i = 0; i < 200000 || ((taken == 0 || refused == 0) && i < 200000000); i++) {
        struct record_head h;
        ring_reader_init(&p.r, p.b, p.a, SIZE);
        int rc;
        while ((rc = ring_reader_take(&p.r, &h, got, RING_PAYLOAD_MAX(SIZE))) == 1) {
            assert_true(h.len <= RING_PAYLOAD_MAX(SIZE));
            taken++;
        }
        refused += rc < 0;
    }
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    assert_true(taken > 0 && refused > 0);
    free(got);
    pair_free(&p);
}

/* ---- two threads, two processes, real bells */

struct flow {
    struct pair p;
    int data_bell, room_bell; /* eventfds */
    uint64_t records;
    unsigned missed; /* waits that ran into the 1 s recheck and then found something */
    uint32_t seed;
};

static bool bell_wait(int fd)
{
    struct pollfd pf = {.fd = fd, .events = POLLIN};
    int n;
    while ((n = poll(&pf, 1, RING_RECHECK_MS)) < 0 && errno == EINTR)
        ;
    uint64_t v;
    return n == 1 && read(fd, &v, sizeof v) == sizeof v;
}

static void bell_ring(int fd)
{
    uint64_t one = 1;
    if (write(fd, &one, sizeof one) != sizeof one)
        abort();
}

static int flow_write(struct flow *f)
{
    uint8_t payload[RING_PAYLOAD_MAX(SIZE)];
    uint32_t s = f->seed;
    while (f->p.w.seq < f->records) {
        uint32_t len = rng_next(&s) % 4 == 0 ? rng_next(&s) % sizeof payload : rng_next(&s) % 40;
        fill(payload, f->p.w.seq + 1, len);
        struct ring_part part = {payload, len};
        int rc = ring_writer_put(&f->p.w, RECORD_TOKENS, 0, &part, 1);
        while (rc == 0) {
            if (ring_writer_publish(&f->p.w))
                bell_ring(f->data_bell);
            int room = ring_writer_wait(&f->p.w, len);
            if (room == 0 && !bell_wait(f->room_bell))
                f->missed++;
            rc = room < 0 ? room : ring_writer_put(&f->p.w, RECORD_TOKENS, 0, &part, 1);
        }
        if (rc < 0)
            return rc;
        if (rng_next(&s) % 3 != 0 && ring_writer_publish(&f->p.w))
            bell_ring(f->data_bell);
    }
    if (ring_writer_publish(&f->p.w))
        bell_ring(f->data_bell);
    return 0;
}

static void *flow_write_thread(void *arg)
{
    return (void *)(intptr_t)flow_write(arg);
}

/* Reads until `records` have come; returns the number of sleeps that no bell ended. */
static unsigned flow_read(struct flow *f, uint64_t records)
{
    uint8_t got[RING_PAYLOAD_MAX(SIZE)];
    unsigned missed = 0;
    for (uint64_t seq = 0; seq < records;) {
        struct record_head h;
        int rc = ring_reader_take(&f->p.r, &h, got, sizeof got);
        if (rc == 1) {
            assert_int_equal(h.seq, ++seq);
            assert_true(filled(got, seq, h.len));
            if (seq % 5 != 0)
                continue;
        }
        assert_true(rc >= 0);
        if (ring_reader_release(&f->p.r))
            bell_ring(f->room_bell);
        if (rc == 0 && ring_reader_sleep(&f->p.r) == 0 && !bell_wait(f->data_bell) &&
            ring_reader_ready(&f->p.r) != 0)
            missed++;
    }
    if (ring_reader_release(&f->p.r))
        bell_ring(f->room_bell);
    return missed;
}

static struct flow flow_new(uint64_t records)
{
    struct flow f = {.p = pair_new(SIZE), .records = records, .seed = 5};
    f.data_bell = eventfd(0, EFD_NONBLOCK);
    f.room_bell = eventfd(0, EFD_NONBLOCK);
    assert_true(f.data_bell >= 0 && f.room_bell >= 0);
    return f;
}

static void flow_free(struct flow *f)
{
    close(f->data_bell);
    close(f->room_bell);
    pair_free(&f->p);
}

static void two_threads_lose_nothing_and_no_wake_up(void **state)
{
    (void)state;
    struct flow f = flow_new(300000);
    pthread_t t;
    assert_int_equal(pthread_create(&t, NULL, flow_write_thread, &f), 0);
    unsigned missed = flow_read(&f, f.records);
    void *rc;
    pthread_join(t, &rc);
    assert_int_equal((intptr_t)rc, 0);
    assert_int_equal(missed + f.missed, 0);
    flow_free(&f);
}

static void two_processes_lose_nothing_and_no_wake_up(void **state)
{
    (void)state;
    struct flow f = flow_new(200000);
    pid_t child = fork();
    if (child == 0)
        _exit(flow_write(&f) == 0 && f.missed == 0 ? 0 : 1);
    assert_true(child > 0);
    assert_int_equal(flow_read(&f, f.records), 0);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    flow_free(&f);
}

/* A writer killed at any instant leaves whole records and nothing else. */
static void killed_writer_leaves_whole_records(void **state)
{
    (void)state;
    for (unsigned round = 0; round < 30; round++) {
        struct flow f = flow_new(UINT64_MAX);
        f.seed = round;
        pid_t child = fork();
        if (child == 0)
            _exit(flow_write(&f) != 0);
        assert_true(child > 0);
        (void)flow_read(&f, 200 + round * 97);
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        uint8_t got[RING_PAYLOAD_MAX(SIZE)];
        struct record_head h;
        uint64_t seq = 200 + round * 97;
        int rc;
        while ((rc = ring_reader_take(&f.p.r, &h, got, sizeof got)) == 1) {
            assert_int_equal(h.seq, ++seq);
            assert_true(filled(got, seq, h.len));
        }
        assert_int_equal(rc, 0);
        flow_free(&f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(region_header_is_checked),
        cmocka_unit_test(record_has_the_drawn_bytes),
        cmocka_unit_test(every_length_arrives_whole_and_in_order),
        cmocka_unit_test(full_ring_takes_no_more_and_loses_nothing),
        cmocka_unit_test(one_bell_a_sleep),
        cmocka_unit_test(lies_of_a_writer_end_the_ring),
        cmocka_unit_test(lies_of_a_reader_end_the_ring),
        cmocka_unit_test(lies_in_a_header_end_the_ring),
        cmocka_unit_test(random_rings_never_lead_outside),
        cmocka_unit_test(hammered_ring_never_leads_outside),
        cmocka_unit_test(two_threads_lose_nothing_and_no_wake_up),
        cmocka_unit_test(two_processes_lose_nothing_and_no_wake_up),
        cmocka_unit_test(killed_writer_leaves_whole_records),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
