/* The kept stream: the newest records, whole, in order, whatever their lengths; compared with all of
 * them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "backlog.h"

static uint8_t byte_of(uint64_t seq, size_t i)
{
    return (uint8_t)(seq * 13 + i * 7);
}

static void add(struct backlog *b, uint64_t seq, uint32_t len)
{
    uint8_t *bytes = malloc(len + 1);
    struct record_head h = {.len = len, .type = RECORD_TOKENS, .flags = 1, .seq = seq};
    for (uint32_t i = 0; i < len; i++)
        bytes[i] = byte_of(seq, i);
    struct ring_part parts[3] = {{bytes, len / 2}, {NULL, 0}, {bytes + len / 2, len - len / 2}};
    backlog_add(b, &h, parts, 3);
    free(bytes);
}

static void check(struct backlog *b, uint64_t seq, uint32_t len)
{
    static uint8_t got[BACKLOG_BYTES];
    struct record_head h;
    assert_true(backlog_get(b, seq, &h, got, sizeof got));
    assert_true(h.seq == seq && h.len == len && h.type == RECORD_TOKENS && h.flags == 1);
    for (uint32_t i = 0; i < len; i++)
        assert_int_equal(got[i], byte_of(seq, i));
}

static void keeps_the_newest(void **state)
{
    (void)state;
    struct backlog b;
    struct err e;
    enum { N = 6000 };
    static uint32_t lens[N + 1];
    uint32_t x = 5;
    assert_int_equal(backlog_open(&b, &e), BC_OK);
    for (uint64_t seq = 1; seq <= N; seq++) {
        x = x * 1664525u + 1013904223u;
        lens[seq] = (x >> 8) % ((x >> 20) % 50 == 0 ? 60000 : 300);
        add(&b, seq, lens[seq]);
        size_t used = 0;
        uint64_t oldest = seq; /* as many as fit, from the newest down */
        for (uint64_t k = seq; k > 0; k--) {
            used += 16 + lens[k];
            if (used > BACKLOG_BYTES)
                break;
            oldest = k;
        }
        assert_true(b.first_seq == oldest && b.n == seq - oldest + 1);
        if (seq % 500 == 0) {
            struct record_head h;
            assert_false(backlog_get(&b, oldest - 1, &h, NULL, 0));
            assert_false(backlog_get(&b, seq + 1, &h, NULL, 0));
            for (uint64_t k = oldest; k <= seq; k++)
                check(&b, k, lens[k]);
            check(&b, oldest, lens[oldest]); /* back again */
        }
        if (seq % 7 == 0)
            check(&b, oldest + (x >> 9) % b.n, lens[oldest + (x >> 9) % b.n]);
    }
    backlog_close(&b);
    assert_null(b.bytes);
}

static void a_record_longer_than_all_is_lost_and_no_more(void **state)
{
    (void)state;
    struct backlog b;
    struct err e;
    struct record_head h;
    assert_int_equal(backlog_open(&b, &e), BC_OK);
    add(&b, 1, 10);
    add(&b, 2, BACKLOG_BYTES);
    assert_false(backlog_get(&b, 1, &h, NULL, 0));
    assert_false(backlog_get(&b, 2, &h, NULL, 0));
    add(&b, 3, BACKLOG_BYTES - 16);
    check(&b, 3, BACKLOG_BYTES - 16);
    add(&b, 4, 0);
    assert_false(backlog_get(&b, 3, &h, NULL, 0));
    check(&b, 4, 0);
    uint8_t small[4];
    add(&b, 5, 100);
    assert_false(backlog_get(&b, 5, &h, small, sizeof small)); /* no room for it */
    backlog_close(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keeps_the_newest),
        cmocka_unit_test(a_record_longer_than_all_is_lost_and_no_more),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
