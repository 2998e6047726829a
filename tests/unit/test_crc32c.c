/* CRC-32C against published values (RFC 3720, appendix B.4), against its definition bit by bit, and
 * in pieces; and the byte buffers that stand beside it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include "base.h"
#include "bytes.h"
#include "crc32c.h"

static uint32_t by_definition(const uint8_t *p, size_t n)
{
    uint32_t sum = ~0u;
    for (size_t i = 0; i < n; i++) {
        sum ^= p[i];
        for (int bit = 0; bit < 8; bit++)
            sum = sum >> 1 ^ (sum & 1 ? 0x82f63b78u : 0);
    }
    return ~sum;
}

static void published_values(void **state)
{
    (void)state;
    uint8_t b[32];
    assert_int_equal(crc32c(0, "123456789", 9), 0xe3069283u);
    memset(b, 0, sizeof b);
    assert_int_equal(crc32c(0, b, 32), 0x8a9136aau);
    memset(b, 0xff, sizeof b);
    assert_int_equal(crc32c(0, b, 32), 0x62a8ab43u);
    for (int i = 0; i < 32; i++)
        b[i] = (uint8_t)i;
    assert_int_equal(crc32c(0, b, 32), 0x46dd794eu);
    assert_int_equal(crc32c_plain(0, b, 32), 0x46dd794eu);
    assert_int_equal(crc32c(0, b, 0), 0);
}

static void every_length_and_every_cut(void **state)
{
    (void)state;
    enum { N = 3 * 3 * 2048 + 100 };
    uint8_t *b = malloc(N);
    assert_non_null(b);
    uint32_t x = 1;
    for (size_t i = 0; i < N; i++)
        b[i] = (uint8_t)((x = x * 1664525u + 1013904223u) >> 24);
    for (size_t n = 0; n < 300; n++) {
        assert_int_equal(crc32c(0, b + n % 8, n), by_definition(b + n % 8, n));
        assert_int_equal(crc32c_plain(0, b + n % 8, n), by_definition(b + n % 8, n));
    }
    uint32_t all = by_definition(b, N);
    assert_int_equal(crc32c(0, b, N), all);
    assert_int_equal(crc32c_plain(0, b, N), all);
    for (int i = 0; i < 500; i++) {
        x = x * 1664525u + 1013904223u;
        size_t cut = (x >> 8) % N;
        assert_int_equal(crc32c(crc32c(0, b, cut), b + cut, N - cut), all);
        assert_int_equal(crc32c_plain(crc32c(0, b, cut), b + cut, N - cut), all);
    }
    free(b);
}

static void buffers_write_and_read_back(void **state)
{
    (void)state;
    struct bytes_out o = {0};
    char text[8];
    bytes_put_u32(&o, 7);
    bytes_put_u64(&o, 1ull << 40);
    bytes_put_text(&o, "seven");
    bytes_put_f32(&o, 0.5f);
    bytes_put_zeros(&o, 1000);
    bytes_put_text(&o, "");
    assert_false(o.failed);
    struct bytes_in in = {.at = o.at, .n = o.n};
    assert_int_equal(bytes_get_u32(&in), 7);
    assert_true(bytes_get_u64(&in) == 1ull << 40);
    bytes_get_text(&in, text, sizeof text);
    assert_string_equal(text, "seven");
    assert_true(bytes_get_f32(&in) == 0.5f);
    assert_non_null(bytes_take(&in, 1000));
    bytes_get_text(&in, text, sizeof text);
    assert_string_equal(text, "");
    assert_false(in.failed);
    assert_int_equal(in.n, 0);
    assert_int_equal(bytes_get_u32(&in), 0); /* past the end: zeros from now on */
    assert_true(in.failed);

    /* too long for its place, a NUL inside, a length beyond the end */
    in = (struct bytes_in){.at = o.at + 12, .n = o.n - 12};
    bytes_get_text(&in, text, 5);
    assert_true(in.failed);
    assert_string_equal(text, "");
    uint8_t nul[] = {2, 0, 0, 0, 'a', 0}, lie[] = {255, 255, 255, 255, 'a'};
    in = (struct bytes_in){.at = nul, .n = sizeof nul};
    bytes_get_text(&in, text, sizeof text);
    assert_true(in.failed);
    in = (struct bytes_in){.at = lie, .n = sizeof lie};
    bytes_get_text(&in, text, sizeof text);
    assert_true(in.failed);
    free(o.at);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(published_values),
        cmocka_unit_test(every_length_and_every_cut),
        cmocka_unit_test(buffers_write_and_read_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
