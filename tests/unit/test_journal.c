/* The journal: what was put and said to be safe is read back after the process ends anywhere, after
 * the power goes anywhere, and whatever call of the system fails; damage is told from a tail that was
 * lost; nothing that was refused is ever taken for safe. */
#include "journal.h"
#include "sim_disk.h"

#define PATH "/s/journal"

/* ---- what a journal should hold ---- */

struct truth {
    uint32_t made, put,
        synced; /* records: framed; handed over; safe. Payloads follow from the number */
};

static size_t payload_of(uint32_t k, uint8_t *ret)
{
    size_t n = (k * 37) % 300;
    for (size_t i = 0; i < n; i++)
        ret[i] = (uint8_t)(k * 31 + i * 7);
    return n;
}

static void frames_make(struct bytes_out *o, uint32_t first, uint32_t n)
{
    uint8_t bytes[300];
    o->n = 0;
    for (uint32_t i = 0; i < n; i++) {
        size_t at = journal_frame(o, (uint16_t)(1 + (first + i) % 200));
        bytes_put(o, bytes, payload_of(first + i, bytes));
        journal_frame_end(o, at);
    }
    assert_false(o->failed);
}

struct seen {
    uint32_t n;
};

static int check_record(void *arg, const struct journal_record *r, struct err *e)
{
    struct seen *s = arg;
    uint8_t bytes[300];
    (void)e;
    assert_int_equal(r->seq, s->n + 1);
    assert_int_equal(r->type, 1 + s->n % 200);
    assert_int_equal(r->n, payload_of(s->n, bytes));
    assert_memory_equal(r->payload, bytes, r->n);
    s->n++;
    return BC_OK;
}

/* Reads it: every record is the one that was made; how many there are. */
static uint32_t read_back(struct sim_disk *d, struct journal_scan *ret)
{
    struct seen s = {0};
    struct err e = {0};
    int rc = journal_read(&d->io, PATH, ret, check_record, &s, &e);
    if (rc < 0)
        fail_msg("%s", e.text);
    assert_int_equal(ret->seq, s.n);
    return s.n;
}

/* ---- one after another ---- */

static void records_come_back(void **state)
{
    (void)state;
    struct sim_disk d;
    struct journal *j;
    struct journal_scan scan;
    struct bytes_out o = {0};
    struct err e;
    sim_make(&d);
    frames_make(&o, 0, 1);
    assert_int_equal(journal_create(&j, &d.io, PATH, &o, &e), BC_OK);
    assert_false(journal_dirty(j)); /* made is safe */
    for (uint32_t k = 1; k < 50; k += 3) {
        frames_make(&o, k, 3);
        assert_int_equal(journal_put(j, &o, &e), BC_OK);
        assert_true(journal_dirty(j));
        assert_int_equal(journal_seq(j), k + 3);
        if (k % 2 == 0)
            assert_int_equal(journal_sync(j, &e), BC_OK);
        assert_int_equal(journal_owed(j) == 0, k % 2 == 0);
    }
    journal_close(&j);
    assert_int_equal(read_back(&d, &scan), 52);
    assert_int_equal(scan.state, JOURNAL_WHOLE);
    assert_int_equal(journal_create(&j, &d.io, PATH, &o, &e), BC_EBUSY);

    /* it goes on where it ended */
    assert_int_equal(journal_open(&j, &d.io, PATH, &scan, &e), BC_OK);
    frames_make(&o, 52, 4);
    assert_int_equal(journal_put(j, &o, &e), BC_OK);
    assert_int_equal(journal_sync(j, &e), BC_OK);
    journal_close(&j);
    assert_int_equal(read_back(&d, &scan), 56);
    free(o.at);
    sim_free(&d);
}

static void what_is_no_journal_is_said_to_be_none(void **state)
{
    (void)state;
    struct sim_disk d;
    struct journal_scan scan;
    struct seen s = {0};
    struct err e;
    sim_make(&d);
    assert_int_equal(journal_read(&d.io, PATH, &scan, check_record, &s, &e), BC_ENOTFOUND);
    int fd = d.io.open(&d, PATH, O_RDWR | O_CREAT, 0600);
    read_back(&d, &scan); /* empty */
    assert_int_equal(scan.state, JOURNAL_BROKEN);
    assert_int_equal(d.io.pwrite(&d, fd, "BCJRNL\n\0\2\0\0\0\0\0\0\0", 16, 0), 16);
    assert_int_equal(journal_read(&d.io, PATH, &scan, check_record, &s, &e), BC_EVERSION);
    assert_int_equal(d.io.pwrite(&d, fd, "BCJRNL\n\0\1\0\0\0\0\0\0\0", 16, 0), 16);
    assert_int_equal(read_back(&d, &scan), 0);
    assert_int_equal(scan.state, JOURNAL_WHOLE);
    d.io.close(&d, fd);
    sim_free(&d);
}

/* ---- damage ---- */

/* 40 records, synced after the 20th, written on to the 40th. */
static void sample(struct sim_disk *d, struct bytes_out *o)
{
    struct journal *j;
    struct err e;
    sim_make(d);
    frames_make(o, 0, 1);
    assert_int_equal(journal_create(&j, &d->io, PATH, o, &e), BC_OK);
    frames_make(o, 1, 19);
    assert_int_equal(journal_put(j, o, &e), BC_OK);
    assert_int_equal(journal_sync(j, &e), BC_OK);
    frames_make(o, 20, 20);
    assert_int_equal(journal_put(j, o, &e), BC_OK);
    journal_close(&j);
}

static void every_flipped_byte_is_damage_or_a_lost_tail(void **state)
{
    (void)state;
    struct sim_disk d;
    struct journal_scan scan;
    struct bytes_out o = {0};
    sample(&d, &o);
    struct sim_file *f = &d.files[*sim_find(d.now, PATH)];
    uint32_t broken = 0, torn = 0;
    for (size_t at = 16; at < f->n_now; at++) {
        f->now[at] ^= 1u << at % 8;
        uint32_t n = read_back(&d, &scan);
        f->now[at] ^= 1u << at % 8;
        /* records 21 to 40 say that 20 were safe */
        if (n < 20)
            assert_int_equal(scan.state, JOURNAL_BROKEN);
        else
            assert_int_equal(scan.state, JOURNAL_TORN);
        assert_true(n < 40);
        broken += scan.state == JOURNAL_BROKEN;
        torn += scan.state == JOURNAL_TORN;
    }
    assert_true(broken > 1000 && torn > 1000);
    size_t whole = f->n_now;
    for (size_t n = 16; n < whole; n += 7) { /* cut anywhere: what is there is there */
        f->n_now = n;
        assert_true(read_back(&d, &scan) < 40);
        assert_true(scan.state != JOURNAL_BROKEN);
        assert_true(scan.end <= n);
    }
    f->n_now = whole;
    for (size_t at = 0; at < 16; at++) {
        struct seen s = {0};
        struct err e;
        f->now[at] ^= 0x20;
        int rc = journal_read(&d.io, PATH, &scan, check_record, &s, &e);
        assert_true(rc == BC_EVERSION || (rc == BC_OK && scan.state == JOURNAL_BROKEN));
        f->now[at] ^= 0x20;
    }
    free(o.at);
    sim_free(&d);
}

static void a_lost_tail_is_cut_and_the_journal_goes_on(void **state)
{
    (void)state;
    struct sim_disk d;
    struct journal *j;
    struct journal_scan scan;
    struct bytes_out o = {0};
    struct err e;
    for (int k = 0; k < 40; k++) {
        sample(&d, &o);
        d.random = (uint32_t)k + 1;
        struct sim_file *f = &d.files[*sim_find(d.now, PATH)];
        f->now[f->n_now - 1 - sim_below(&d, 900)] ^= 4; /* somewhere in the last records */
        uint32_t n = read_back(&d, &scan);
        assert_int_equal(scan.state, JOURNAL_TORN);
        assert_int_equal(journal_open(&j, &d.io, PATH, &scan, &e), BC_OK);
        frames_make(&o, n, 5);
        assert_int_equal(journal_put(j, &o, &e), BC_OK);
        journal_close(&j);
        assert_int_equal(read_back(&d, &scan), n + 5);
        assert_int_equal(scan.state, JOURNAL_WHOLE);
        sim_free(&d);
    }
    free(o.at);
}

/* ---- a life with faults, against what was answered ---- */

struct life {
    struct sim_disk d;
    struct journal *j;
    struct truth t;
    struct bytes_out o;
};

static bool life_begin(struct life *l)
{
    struct err e;
    frames_make(&l->o, 0, 1);
    l->t = (struct truth){.made = 1};
    if (journal_create(&l->j, &l->d.io, PATH, &l->o, &e) < 0)
        return false;
    l->t.put = l->t.synced = 1;
    return true;
}

/* A few puts and syncs. What is answered is noted; what fails is owed. */
static void life_go(struct life *l, int steps)
{
    struct err e;
    for (int i = 0; i < steps; i++) {
        uint32_t n = 1 + sim_below(&l->d, 4);
        frames_make(&l->o, l->t.made, n);
        l->t.made += n;
        if (journal_put(l->j, &l->o, &e) == BC_OK)
            l->t.put = l->t.made;
        else
            assert_int_equal(e.code, BC_EIO);
        if (sim_below(&l->d, 3) == 0 && journal_sync(l->j, &e) == BC_OK)
            l->t.put = l->t.synced = l->t.made;
    }
}

static void life_end(struct life *l)
{
    journal_close(&l->j);
    free(l->o.at);
    sim_free(&l->d);
}

/* Every changing call fails once, and with a few after it, in each of the ways in which it can. */
static void a_failed_call_is_an_error_or_heals(void **state)
{
    (void)state;
    static const int whys[] = {EIO, ENOSPC, EDQUOT};
    for (long run = 0; run < 6; run += 5)
        for (size_t w = 0; w < ARRAY_LEN(whys); w++)
            for (long at = 0;; at++) {
                struct life l = {0};
                struct journal_scan scan;
                sim_make(&l.d);
                l.d.fail_at = at;
                l.d.fail_run = run;
                l.d.why = whys[w];
                if (!life_begin(&l)) {
                    /* refused: and no journal is there, or the next start would find a session that
                     * nobody was given */
                    sim_restart(&l.d);
                    assert_true(sim_find(l.d.now, PATH) == NULL || run > 0);
                    life_end(&l);
                    continue;
                }
                life_go(&l, 15);
                bool reached = l.d.ops > at;
                /* kill -9: all that was answered is there */
                journal_close(&l.j);
                sim_restart(&l.d);
                uint32_t n = read_back(&l.d, &scan);
                assert_true(scan.state != JOURNAL_BROKEN);
                assert_true(n >= l.t.put && n <= l.t.made);
                life_end(&l);
                if (!reached)
                    break;
            }
}

/* A sync that fails leaves nothing to trust: the power goes right after the answer to the next one. */
static void after_a_failed_sync_the_file_is_another(void **state)
{
    (void)state;
    for (uint32_t seed = 1; seed < 400; seed++) {
        struct life l = {0};
        struct journal_scan scan;
        struct err e;
        sim_make(&l.d);
        assert_true(life_begin(&l));
        l.d.random = seed;
        life_go(&l, 3);
        frames_make(&l.o, l.t.made, 3);
        l.t.made += 3;
        assert_int_equal(journal_put(l.j, &l.o, &e), BC_OK);
        l.d.fail_at = l.d.ops; /* the sync */
        int before = *sim_find(l.d.now, PATH);
        assert_int_equal(journal_sync(l.j, &e), BC_OK); /* healed: by a new file */
        assert_true(*sim_find(l.d.now, PATH) != before);
        l.t.synced = l.t.made;
        life_go(&l, (int)seed % 4);
        journal_close(&l.j);
        sim_power_loss(&l.d);
        uint32_t n = read_back(&l.d, &scan);
        assert_true(scan.state != JOURNAL_BROKEN);
        assert_true(n >= l.t.synced && n <= l.t.made);
        life_end(&l);
    }
}

/* The process ends at every call. */
static void killed_at_every_call(void **state)
{
    (void)state;
    for (long at = 0;; at++) {
        struct life l = {0};
        struct journal_scan scan;
        struct seen s = {0};
        struct err e;
        sim_make(&l.d);
        l.d.random = (uint32_t)at + 99;
        l.d.kill_at = at;
        bool made = life_begin(&l);
        if (made)
            life_go(&l, 12);
        bool reached = l.d.ops > at;
        journal_close(&l.j);
        sim_restart(&l.d);
        int rc = journal_read(&l.d.io, PATH, &scan, check_record, &s, &e);
        if (made) {
            assert_int_equal(rc, BC_OK);
            assert_true(scan.state != JOURNAL_BROKEN);
            assert_true(s.n >= l.t.put && s.n <= l.t.made);
        } else {
            assert_true(rc == BC_ENOTFOUND || scan.state == JOURNAL_WHOLE);
        }
        life_end(&l);
        if (!reached)
            break;
    }
}

/* The power goes at every call, with any part of what was not synced; the journal goes on, and the
 * power goes again. */
static void power_lost_at_every_call(void **state)
{
    (void)state;
    for (long at = 3;; at++) {
        bool reached = false;
        for (uint32_t seed = 1; seed <= 25; seed++) {
            struct life l = {0};
            struct journal_scan scan;
            struct err e;
            sim_make(&l.d);
            l.d.kill_at = -1;
            l.d.random = seed;
            assert_true(life_begin(&l));
            long start = l.d.ops;
            l.d.kill_at = start + at - 3;
            life_go(&l, 10);
            reached |= l.d.ops > l.d.kill_at;
            journal_close(&l.j);
            sim_power_loss(&l.d);
            uint32_t n = read_back(&l.d, &scan);
            assert_true(scan.state != JOURNAL_BROKEN);
            assert_true(n >= l.t.synced && n <= l.t.made);
            /* again, from there */
            assert_int_equal(journal_open(&l.j, &l.d.io, PATH, &scan, &e), BC_OK);
            l.t = (struct truth){n, n, n};
            life_go(&l, 4);
            journal_close(&l.j);
            sim_power_loss(&l.d);
            n = read_back(&l.d, &scan);
            assert_true(scan.state != JOURNAL_BROKEN);
            assert_true(n >= l.t.synced && n <= l.t.made);
            life_end(&l);
        }
        if (!reached)
            break;
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(records_come_back),
        cmocka_unit_test(what_is_no_journal_is_said_to_be_none),
        cmocka_unit_test(every_flipped_byte_is_damage_or_a_lost_tail),
        cmocka_unit_test(a_lost_tail_is_cut_and_the_journal_goes_on),
        cmocka_unit_test(a_failed_call_is_an_error_or_heals),
        cmocka_unit_test(after_a_failed_sync_the_file_is_another),
        cmocka_unit_test(killed_at_every_call),
        cmocka_unit_test(power_lost_at_every_call),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
