/* Delivery: whole characters only, stop strings across token boundaries, and nothing of a stop
 * string ever shown. The vocabulary is a tiny model's: id 3 + b is the byte b. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "deliver.h"

static struct tok *T;

static int setup(void **state)
{
    (void)state;
    struct gguf *g;
    struct err e = {0};
    if (gguf_open(&g, TEST_VECTORS "/tiny-llama.gguf", &e) < 0 || tok_open(&T, g, &e) < 0)
        fail_msg("%s", e.text);
    gguf_close(&g);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    tok_close(&T);
    return 0;
}

static struct generate_options stops(const char *const *s)
{
    struct generate_options o;
    generate_options_init(&o);
    for (; *s != NULL; s++) {
        o.stop[o.n_stop].len = (uint16_t)strlen(*s);
        memcpy(o.stop[o.n_stop++].bytes, *s, strlen(*s));
    }
    return o;
}

/* All that is shown of the ids, and how many were taken before a stop string was complete. */
struct shown {
    char text[4096];
    size_t len;
    size_t taken;
    bool stopped;
};

static void show(const int32_t *ids, size_t n, const struct generate_options *o, struct shown *r)
{
    struct deliver d;
    struct err e = {0};
    const char *text;
    size_t len;
    memset(r, 0, sizeof *r);
    assert_int_equal(deliver_open(&d, T, o, false, &e), 0);
    while (r->taken < n && !r->stopped) {
        r->stopped = deliver_push(&d, ids[r->taken++], &text, &len);
        assert_true(r->len + len < sizeof r->text);
        memcpy(r->text + r->len, text, len);
        r->len += len;
    }
    if (!r->stopped) {
        deliver_flush(&d, &text, &len);
        memcpy(r->text + r->len, text, len);
        r->len += len;
    }
    deliver_close(&d);
}

static size_t bytes_to_ids(const char *text, size_t n, int32_t *ret)
{
    for (size_t i = 0; i < n; i++)
        ret[i] = 3 + (uint8_t)text[i];
    return n;
}

static void check(const char *text, const char *const *stop, const char *visible, size_t taken)
{
    int32_t ids[512] = {0};
    struct generate_options o = stops(stop);
    struct shown r;
    size_t n = bytes_to_ids(text, strlen(text), ids);
    show(ids, n, &o, &r);
    if (strcmp(r.text, visible) != 0)
        fail_msg("\"%s\": \"%s\" is shown, not \"%s\"", text, r.text, visible);
    assert_int_equal(r.taken, taken);
    assert_int_equal(r.stopped, taken < n || strlen(visible) < strlen(text));
}

#define STOPS(...)                                                                                 \
    (const char *const[])                                                                          \
    {                                                                                              \
        __VA_ARGS__, NULL                                                                          \
    }

static void stop_strings_are_found_across_tokens(void **state)
{
    (void)state;
    check("one two three", STOPS("two"), "one ", 7);
    check("one tw", STOPS("two"), "one tw", 6); /* held back, then it was none */
    check("aab", STOPS("ab"), "a", 3);
    check("aaaaab", STOPS("aab"), "aaa", 6);
    check("abcabd", STOPS("abd"), "abc", 6);
    check("xabc", STOPS("abc", "b"), "xa", 3); /* the shorter one is complete first */
    check("xabc", STOPS("bc", "xab"), "", 3);
    check("no such thing", STOPS("zebra"), "no such thing", 13);
    check("\xc3\xa9t\xc3\xa9", STOPS("t\xc3\xa9"), "\xc3\xa9", 5);
}

static void one_token_may_hold_the_whole_stop_string(void **state)
{
    (void)state;
    int32_t *ids;
    size_t n;
    struct err e = {0};
    struct shown r;
    struct generate_options o = stops(STOPS("in"));
    const char *text = "the ring and the thing"; /* "ing" is a token */
    assert_int_equal(tok_encode(T, text, strlen(text), (struct tok_flags){0}, &ids, &n, &e), 0);
    assert_true(n < strlen(text));
    show(ids, n, &o, &r);
    assert_true(r.stopped);
    assert_string_equal(r.text, "the r");
    free(ids);
}

/* Three letters, short stop strings: collisions at every place. The answer is found by hand. */
static void any_text_and_any_stop_strings(void **state)
{
    (void)state;
    uint32_t x = 1;
    uint32_t stopped = 0;
#define RANDOM(n) ((x = x * 1664525u + 1013904223u) >> 16) % (n)
    for (int round = 0; round < 20000; round++) {
        char text[41] = "", stop[3][8] = {"", "", ""};
        const char *list[4] = {NULL};
        size_t n = 1 + RANDOM(40), n_stops = 1 + RANDOM(3);
        for (size_t i = 0; i < n; i++)
            text[i] = (char)('a' + RANDOM(3));
        for (size_t k = 0; k < n_stops; k++) {
            size_t len = 1 + RANDOM(6);
            for (size_t i = 0; i < len; i++)
                stop[k][i] = (char)('a' + RANDOM(3));
            list[k] = stop[k];
        }
        size_t taken = n, visible = n;
        for (size_t m = 1; m <= n && taken == n && visible == n; m++)
            for (size_t k = 0; k < n_stops; k++) {
                const char *hit = memmem(text, m, stop[k], strlen(stop[k]));
                if (hit != NULL && (size_t)(hit - text) < visible) {
                    visible = (size_t)(hit - text);
                    taken = m;
                }
            }
        stopped += visible < n;
        text[n] = '\0';
        char expected[41];
        snprintf(expected, sizeof expected, "%.*s", (int)visible, text);
        check(text, list, expected, taken);
    }
    assert_true(stopped > 5000 && stopped < 19500);
}

/* Each piece that is shown is whole characters, and together they are the bytes. */
static void characters_are_never_cut(void **state)
{
    (void)state;
    const char *text = "gr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\x98\x80!";
    int32_t ids[64] = {0};
    size_t n = bytes_to_ids(text, strlen(text), ids), len, total = 0;
    struct generate_options o = stops(STOPS("\xf0\x9f\x98\x81")); /* begins like the smile */
    struct deliver d;
    struct err e = {0};
    const char *piece;
    char all[64];
    assert_int_equal(deliver_open(&d, T, &o, false, &e), 0);
    for (size_t i = 0; i < n; i++) {
        assert_false(deliver_push(&d, ids[i], &piece, &len));
        if (len > 0) {
            assert_true(((uint8_t)piece[0] & 0xc0) != 0x80);
            assert_true((uint8_t)piece[len - 1] < 0x80 || len > 1);
        }
        memcpy(all + total, piece, len);
        total += len;
    }
    deliver_flush(&d, &piece, &len);
    assert_int_equal(len, 0);
    assert_int_equal(total, strlen(text));
    assert_memory_equal(all, text, total);
    /* an unfinished character at the end is not lost */
    assert_false(deliver_push(&d, 3 + 0xe2, &piece, &len));
    assert_int_equal(len, 0);
    assert_false(deliver_push(&d, 3 + 0x82, &piece, &len));
    assert_int_equal(len, 0);
    deliver_flush(&d, &piece, &len);
    assert_int_equal(len, 2);
    assert_memory_equal(piece, "\xe2\x82", 2);
    deliver_close(&d);
}

static void special_tokens_show_as_nothing(void **state)
{
    (void)state;
    int32_t ids[] = {3 + 'a', 1, 2, 3 + 'b'};
    struct generate_options o = stops(STOPS("zz"));
    struct shown r;
    show(ids, 4, &o, &r);
    assert_string_equal(r.text, "ab");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stop_strings_are_found_across_tokens),
        cmocka_unit_test(one_token_may_hold_the_whole_stop_string),
        cmocka_unit_test(any_text_and_any_stop_strings),
        cmocka_unit_test(characters_are_never_cut),
        cmocka_unit_test(special_tokens_show_as_nothing),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
