/* The stats page: what was written is read, a reader never sees half an update, and a page that
 * lies about its sizes is refused. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "statpage.h"

static struct statpage *page_new(uint32_t entries_max, size_t *ret_bytes)
{
    *ret_bytes = statpage_bytes(entries_max);
    struct statpage *p = aligned_alloc(4096, *ret_bytes);
    assert_non_null(p);
    memset(p, 0, *ret_bytes);
    statpage_init(p, 1000, entries_max);
    return p;
}

static void reads_what_was_written(void **state)
{
    (void)state;
    size_t bytes;
    struct statpage *p = page_new(4, &bytes);
    uint64_t counters[N_STATS];
    struct stat_entry in[5], out[5];
    memset(in, 0, sizeof in);
    for (unsigned i = 0; i < N_STATS; i++)
        counters[i] = i * 1000;
    for (unsigned i = 0; i < 5; i++) {
        in[i].session = 100 + i;
        in[i].bytes_live = UINT64_MAX - i;
        memcpy(in[i].state, "decode", 7);
    }
    statpage_write(p, 42, counters, in, 3);
    struct statpage_copy c;
    assert_int_equal(statpage_read(p, bytes, &c, out, 5, NULL), WIRE_OK);
    assert_int_equal(c.now_micros, 42);
    assert_int_equal(c.uid, 1000);
    assert_int_equal(c.n_entries, 3);
    assert_memory_equal(c.counters, counters, sizeof counters);
    assert_memory_equal(out, in, 3 * sizeof in[0]);
    statpage_write(p, 43, counters, in, 5); /* more than fit */
    assert_int_equal(statpage_read(p, bytes, &c, out, 2, NULL), WIRE_OK);
    assert_int_equal(c.n_entries, 4);
    free(p);
}

static void refuses_a_page_that_lies(void **state)
{
    (void)state;
    size_t bytes;
    struct statpage_copy c = {.uid = 7};
    struct stat_entry out[2];
    for (unsigned fault = 0; fault < 7; fault++) {
        struct statpage *p = page_new(4, &bytes);
        size_t mapped = bytes;
        const char *why = NULL;
        switch (fault) {
        case 0:
            atomic_store(&p->magic, 1);
            break;
        case 1:
            atomic_store(&p->abi, 2);
            break;
        case 2:
            atomic_store(&p->n_counters, 5000);
            break;
        case 3:
            atomic_store(&p->entry_bytes, 8);
            break;
        case 4:
            atomic_store(&p->entry_bytes, 401);
            break;
        case 5:
            atomic_store(&p->entries_max, 4000);
            break;
        case 6:
            mapped = 4096;
            break;
        }
        assert_int_equal(statpage_read(p, mapped, &c, out, 2, &why), WIRE_EPROTOCOL);
        assert_non_null(why);
        assert_int_equal(c.uid, 7);
        free(p);
    }
    struct statpage *p = page_new(4, &bytes);
    atomic_store(&p->sequence, 3); /* the writer died in the middle */
    assert_int_equal(statpage_read(p, bytes, &c, out, 2, NULL), WIRE_EBUSY);
    free(p);
}

static void *write_for_ever(void *arg)
{
    struct statpage *p = arg;
    uint64_t counters[N_STATS];
    struct stat_entry e[2];
    memset(e, 0, sizeof e);
    for (uint64_t i = 1; i <= 30000; i++) {
        for (unsigned k = 0; k < N_STATS; k++)
            counters[k] = i;
        e[0].prunes = e[1].session = i;
        statpage_write(p, i, counters, e, 2);
    }
    return NULL;
}

static void never_half_an_update(void **state)
{
    (void)state;
    size_t bytes;
    struct statpage *p = page_new(2, &bytes);
    pthread_t t;
    assert_int_equal(pthread_create(&t, NULL, write_for_ever, p), 0);
    uint64_t last = 0;
    while (last < 30000) {
        struct statpage_copy c;
        struct stat_entry e[2];
        if (statpage_read(p, bytes, &c, e, 2, NULL) != WIRE_OK)
            continue;
        assert_true(c.now_micros >= last);
        last = c.now_micros;
        for (unsigned k = 0; k < N_STATS; k++)
            assert_int_equal(c.counters[k], last);
        if (last > 0)
            assert_true(e[0].prunes == last && e[1].session == last);
    }
    pthread_join(t, NULL);
    free(p);
}

static void table_is_complete(void **state)
{
    (void)state;
    for (unsigned i = 0; i < N_STATS; i++) {
        assert_true(strlen(stat_info(i)->text) > 10);
        for (unsigned k = 0; k < i; k++)
            assert_string_not_equal(stat_info(i)->name, stat_info(k)->name);
    }
    assert_null(stat_info(N_STATS));
    assert_true(stat_info(STAT_kv_held)->per_user && !stat_info(STAT_steps)->per_user);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_what_was_written),
        cmocka_unit_test(refuses_a_page_that_lies),
        cmocka_unit_test(never_half_an_update),
        cmocka_unit_test(table_is_complete),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
