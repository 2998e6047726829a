/* test_cli_parts.c: the parts of the command that need no daemon: sums, sizes, options, JSON, and the
 * transcript that turns dropped ranges into words. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <math.h>
#include <unistd.h>
#include "cli.h"
#include "json.h"
#include "map.h"
#include "sha256.h"
#include "tok.h"
#include "transcript.h"
#include "watch.h"

/* ---- SHA-256: the examples of FIPS 180-2, cut at every place */

static void sum_of(const char *text, size_t len, size_t cut, char hex[65])
{
    struct sha256 s;
    sha256_start(&s);
    sha256_add(&s, text, cut);
    sha256_add(&s, text + cut, len - cut);
    sha256_hex(&s, hex);
}

static void sha256_matches_the_standard(void **state)
{
    (void)state;
    static const struct {
        const char *text, *hex;
    } cases[] = {
        {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
        {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
         "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
        {"abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmn"
         "hijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu",
         "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1"},
    };
    char hex[65];

    for (size_t i = 0; i < ARRAY_LEN(cases); i++)
        for (size_t cut = 0; cut <= strlen(cases[i].text); cut++) {
            sum_of(cases[i].text, strlen(cases[i].text), cut, hex);
            assert_string_equal(hex, cases[i].hex);
        }
    struct sha256 s;
    sha256_start(&s);
    for (int i = 0; i < 1000000; i++)
        sha256_add(&s, "a", 1);
    sha256_hex(&s, hex);
    assert_string_equal(hex, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

/* ---- sizes and options */

static void sizes_are_bytes_or_tokens(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        uint64_t bytes;
        uint32_t tokens;
    } good[] = {{"512t", 0, 512},     {"1tokens", 0, 1},         {"64MiB", 64u << 20, 0},
                {"4096", 4096, 0},    {"1.5GiB", 1610612736, 0}, {"2k", 2048, 0},
                {"0.5MiB", 524288, 0}};
    static const char *const bad[] = {
        "",   "t",   "0",   "0t",      "-1",           "1.5t",    "12x",         "0x10",
        "1e", "nan", "inf", "1 MiB x", "99999999999t", "1e30GiB", "1.0000001kib"};
    struct size_arg s;

    for (size_t i = 0; i < ARRAY_LEN(good); i++) {
        if (!size_parse(good[i].text, &s) || s.bytes != good[i].bytes || s.tokens != good[i].tokens)
            fail_msg("%s: %llu bytes, %u tokens", good[i].text, (unsigned long long)s.bytes,
                     s.tokens);
    }
    for (size_t i = 0; i < ARRAY_LEN(bad); i++)
        if (size_parse(bad[i], &s))
            fail_msg("'%s' is taken for a size", bad[i]);
}

static int nothing(struct args *a)
{
    (void)a;
    return CLI_FINE;
}

static const struct command_row row = {"run", OPT_LINK | OPT_SESSION | OPT_GENERATE | OPT_PROMPT,
                                       0,     2,
                                       "",    "",
                                       "",    nothing};

static int parse(struct args *a, int n, const char **words)
{
    static char *argv[32];
    for (int i = 0; i < n; i++)
        argv[i] = (char *)(uintptr_t)words[i];
    return args_parse(&row, n, argv, a);
}
#define PARSE(a, ...)                                                                              \
    parse(a, (int)(sizeof((const char *[]){__VA_ARGS__}) / sizeof(char *)),                        \
          (const char *[]){__VA_ARGS__})

static void options_have_the_names_of_the_library(void **state)
{
    (void)state;
    struct args a;

    assert_int_equal(PARSE(&a, "--budget=512t", "one", "--span-quantile", "0.5", "-k", "300",
                           "--frozen-tokens", "auto", "-N9", "--stop", "a", "--stop", "b", "-j",
                           "--", "--two"),
                     CLI_FINE);
    assert_int_equal(a.budget.tokens, 512);
    assert_true(a.session.span_quantile == 0.5f);
    assert_int_equal(a.session.keep_tokens, 300);
    assert_int_equal(a.session.frozen_tokens, BACKCAST_FROZEN_AUTO);
    assert_int_equal(a.generate.max_tokens, 9);
    assert_int_equal(a.generate.n_stop, 2);
    assert_string_equal(a.generate.stop[1], "b");
    assert_true(a.json);
    assert_int_equal(a.n_rest, 2);
    assert_string_equal(a.rest[1], "--two");
    assert_int_equal(PARSE(&a, "--temp", "0.7", "--seed", "5", "--ignore-end"), CLI_FINE);
    assert_true(a.generate.temperature == 0.7f && a.generate.ignore_end == 1);
    assert_true(a.session.seed == 5 && a.generate.seed == 5);
    assert_int_equal(a.session.span, BACKCAST_DEFAULT); /* the daemon's */
}

static void wrong_options_are_usage(void **state)
{
    (void)state;
    struct args a;

    assert_int_equal(PARSE(&a, "--nonesuch"), CLI_USAGE);
    assert_int_equal(PARSE(&a, "--top", "1"), CLI_USAGE); /* top-k or top-p? */
    assert_int_equal(PARSE(&a, "--span"), CLI_USAGE);
    assert_int_equal(PARSE(&a, "--span", "-3"), CLI_USAGE);
    assert_int_equal(PARSE(&a, "--span", "3x"), CLI_USAGE);
    assert_int_equal(PARSE(&a, "--span", "99999999999"), CLI_USAGE);
    assert_int_equal(PARSE(&a, "--temperature", "warm"), CLI_USAGE);
    assert_int_equal(PARSE(&a, "--temperature", "nan"), CLI_USAGE);
    assert_int_equal(PARSE(&a, "--json=1"), CLI_USAGE);
    assert_int_equal(PARSE(&a, "--interval", "3"), CLI_USAGE); /* another command's */
    assert_int_equal(PARSE(&a, "-x"), CLI_USAGE);
    assert_int_equal(PARSE(&a, "1", "2", "3"), CLI_USAGE);
    assert_int_equal(PARSE(&a, "--stop", "1", "--stop", "2", "--stop", "3", "--stop", "4", "--stop",
                           "5", "--stop", "6", "--stop", "7", "--stop", "8", "--stop", "9"),
                     CLI_USAGE);
}

/* ---- JSON */

/* The file stands before the sentence, once; of a path that is too long its end, and the sentence whole. */
static void errors_are_of_a_file(void **state)
{
    (void)state;
    struct err e = {0};
    char path[400];

    err_set(&e, BC_ECORRUPT, "magic", "not a GGUF file");
    err_of_file(&e, "/a/b.gguf");
    err_of_file(&e, "/a/b.gguf");
    assert_string_equal(e.text, "/a/b.gguf: not a GGUF file");
    memset(path, 'x', sizeof path);
    snprintf(path + 380, 20, "/end.gguf");
    err_set(&e, BC_ECORRUPT, "magic", "not a GGUF file");
    err_of_file(&e, path);
    assert_int_equal(strncmp(e.text, "...xxx", 6), 0);
    assert_int_equal(strlen(e.text), sizeof e.text - 1);
    assert_string_equal(strstr(e.text, "/end"), "/end.gguf: not a GGUF file");
    memset(e.text, 'y', sizeof e.text - 1); /* no room: it stays as it is */
    err_of_file(&e, path);
    assert_int_equal(strspn(e.text, "y"), sizeof e.text - 1);
}

static void json_escapes_every_byte(void **state)
{
    (void)state;
    char *out = NULL;
    size_t len = 0;
    FILE *f = open_memstream(&out, &len);
    struct json j = json_start(f);

    json_open(&j, NULL, '{');
    json_bytes(&j, "a\"b",
               "\x01\n\\\"\x7f"
               "\xc3\xa9"
               "\xff"
               "\xc0\x80"
               "\xed\xa0\x80"
               "\xe2\x82",
               15);
    json_open(&j, "n", '[');
    json_int(&j, NULL, -5);
    json_num(&j, NULL, (double)NAN);
    json_num(&j, NULL, 0.5);
    json_uint(&j, NULL, UINT64_MAX);
    json_shut(&j, ']');
    json_text(&j, "z", NULL);
    json_shut(&j, '}');
    fclose(f);
    assert_string_equal(out, "{\"a\\\"b\":\"\\u0001\\n\\\\\\\"\\u007f\xc3\xa9\\ufffd\\ufffd\\ufffd"
                             "\\ufffd\\ufffd\\ufffd\\ufffd\\ufffd\",\"n\":[-5,null,0.5,"
                             "18446744073709551615],\"z\":null}\n");
    free(out);
    assert_int_equal(utf8_length("\xf0\x9f\x98\x80", 4), 4);
    assert_int_equal(utf8_length("\xf0\x9f\x98\x80", 3), 0);
    assert_int_equal(utf8_length("\xf4\x90\x80\x80", 4), 0); /* past U+10FFFF */
    assert_int_equal(utf8_length("\xe0\x80\x80", 3), 0);     /* overlong */
}

/* ---- transcript */

static void text_event(struct transcript *t, uint64_t first, const int32_t *ids, size_t n)
{
    struct backcast_event ev = {.type = BACKCAST_TEXT};
    ev.text.ids = ids;
    ev.text.n_ids = n;
    ev.text.first_stream = first;
    transcript_event(t, &ev);
}

static void pruned_event(struct transcript *t, uint64_t first, uint64_t count)
{
    struct backcast_range r = {first, count};
    struct backcast_event ev = {.type = BACKCAST_PRUNED};
    ev.pruned.dropped = &r;
    ev.pruned.n_dropped = 1;
    transcript_event(t, &ev);
}

static void end_event(struct transcript *t, int32_t end_id, uint32_t in)
{
    struct backcast_event ev = {.type = BACKCAST_END};
    ev.end.reason = "stop";
    ev.end.end_id = end_id;
    ev.end.tokens_in = in;
    transcript_event(t, &ev);
}

static void transcript_knows_the_words_of_ranges(void **state)
{
    (void)state;
    static const char prompt[] = "The cat sat on the mat.";
    struct transcript *t = transcript_open(TEST_VECTORS "/tiny-llama.gguf", NULL);
    char words[100];
    int32_t answer[2];

    assert_true(transcript_has_words(t));
    struct tok *k = transcript_tok(t);
    answer[0] = tok_find(k, "a", 1);
    answer[1] = tok_find(k, "b", 1);
    assert_true(answer[0] >= 0 && answer[1] >= 0);
    transcript_turn(t, NULL, prompt, strlen(prompt), true);
    uint64_t n = transcript_tokens(t);
    assert_true(n > 4);
    pruned_event(t, 1, 2); /* while it is read: before any TEXT says that our count is right */
    text_event(t, n, answer, 2);
    end_event(t, tok_eos(k), (uint32_t)n);
    assert_int_equal(transcript_tokens(t), n + 2);
    assert_true(transcript_dropped(t, 1) && transcript_dropped(t, 2));
    assert_false(transcript_dropped(t, 0) || transcript_dropped(t, 3));
    size_t bos = tok_adds_bos(k) ? 1 : 0;
    assert_true(transcript_words(t, (struct backcast_range){bos, n - bos}, words, sizeof(words)));
    assert_string_equal(words, prompt);
    assert_true(transcript_words(t, (struct backcast_range){n, 2}, words, sizeof(words)));
    assert_string_equal(words, "ab");
    assert_false(transcript_words(t, (struct backcast_range){n, 3}, words, sizeof(words)));
    /* a long range is cut in its middle */
    char small[64], text[400];
    memset(text, 'x', sizeof(text));
    transcript_turn(t, NULL, text, sizeof(text), true);
    n = transcript_tokens(t);
    assert_true(transcript_words(t, (struct backcast_range){0, n}, small, sizeof(small)));
    assert_true(strlen(small) < sizeof(small));
    assert_non_null(strstr(small, " ... "));
    transcript_close(&t);
}

static void transcript_trusts_the_stream_more_than_itself(void **state)
{
    (void)state;
    struct transcript *t = transcript_open(TEST_VECTORS "/tiny-llama.gguf", NULL);
    char words[100];
    int32_t id;

    id = tok_find(transcript_tok(t), "a", 1);
    transcript_turn(t, NULL, "hello", 5, true);
    text_event(t, 40, &id, 1); /* the prompt had more tokens than we think */
    assert_int_equal(transcript_tokens(t), 41);
    assert_false(transcript_words(t, (struct backcast_range){0, 2}, words, sizeof(words)));
    assert_true(transcript_words(t, (struct backcast_range){40, 1}, words, sizeof(words)));
    end_event(t, -1, 40);
    pruned_event(t, 0, 1u << 31); /* absurd: not followed */
    assert_false(transcript_dropped(t, 0));
    transcript_close(&t);

    t = transcript_open("/nonexistent.gguf", NULL);
    assert_non_null(t);
    assert_false(transcript_has_words(t));
    transcript_turn(t, "user", "hello", 5, true);
    pruned_event(t, 3, 4);
    assert_true(transcript_dropped(t, 4));
    assert_false(transcript_words(t, (struct backcast_range){3, 4}, words, sizeof(words)));
    transcript_close(&t);
}

/* ---- listings */

static void a_name_is_this_users_first(void **state)
{
    (void)state;
    uint32_t me = geteuid();
    const struct backcast_session_stat sessions[] = {{.id = 1, .uid = me + 1, .name = "theirs"},
                                                     {.id = 2, .uid = me + 2, .name = "theirs"},
                                                     {.id = 3, .uid = me + 1, .name = "both"},
                                                     {.id = 4, .uid = me, .name = "both"},
                                                     {.id = 5, .uid = me + 2, .name = "both"},
                                                     {.id = 6, .uid = me + 1, .name = "one"}};
    static const struct {
        const char *name;
        uint64_t id;
        unsigned others;
    } rows[] = {{"theirs", 2, 2}, {"both", 4, 0}, {"one", 6, 1}, {"none", 0, 0}};
    struct backcast_stats st = {.sessions = sessions, .n_sessions = ARRAY_LEN(sessions)};

    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        unsigned others = 7;
        const struct backcast_session_stat *s = stats_named(&st, rows[i].name, &others);
        assert_int_equal(s != NULL ? s->id : 0, rows[i].id);
        assert_int_equal(others, rows[i].others);
    }
    assert_ptr_equal(stats_session(&st, 5), &sessions[4]);
    assert_null(stats_session(&st, 0));
}

/* ---- what an END says of speed */

static void steps_are_what_came_after_the_prompt(void **state)
{
    (void)state;
    static const struct {
        uint32_t out, steps;
        int32_t end_id;
    } rows[] = {{0, 0, -1}, {0, 0, 2}, {1, 0, -1}, {1, 1, 2}, {40, 39, -1}, {40, 40, 0}};

    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        struct backcast_event ev = {.type = BACKCAST_END};
        ev.end.tokens_out = rows[i].out;
        ev.end.end_id = rows[i].end_id;
        assert_int_equal(end_steps(&ev), rows[i].steps);
    }
}

/* ---- the map */

/* Rows of a text: every third dropped, from `hole` on as if older ids were gone. */
static size_t map_rows(struct tok *tok, const char *text, struct backcast_score *rows, size_t max)
{
    int32_t *ids = NULL;
    size_t n = 0;
    assert_int_equal(tok_encode(tok, text, strlen(text), (struct tok_flags){0}, &ids, &n, NULL), 0);
    assert_true(n > 8 && n <= max);
    for (size_t i = 0; i < n; i++)
        rows[i] = (struct backcast_score){.stream = i,
                                          .id = ids[i],
                                          .score = (float)((i * 7) % 11),
                                          .flags = i == 0       ? 1
                                                   : i + 1 == n ? 2
                                                   : i % 3 == 2 ? 4
                                                                : 0};
    free(ids);
    return n;
}

static char *map_drawn(const struct map *m, int how, size_t *len)
{
    char *text = NULL;
    FILE *f = open_memstream(&text, len);
    assert_non_null(f);
    if (how == 2)
        map_html(f, m);
    else
        map_print(f, m, how == 1);
    assert_int_equal(fclose(f), 0);
    return text;
}

static size_t times(const char *text, const char *what)
{
    size_t n = 0;
    for (const char *at = text; (at = strstr(at, what)) != NULL; at++)
        n++;
    return n;
}

static void a_map_shows_text_and_nothing_else(void **state)
{
    (void)state;
    static const char text[] =
        "the mill <script>alert('1')</script> & \"quotes\" \033[2J\x07 \xc3\xa9t\xc3\xa9 "
        "\xe2\x82\xac \xff <b onclick=x>\nend of it";
    struct transcript *t = transcript_open(TEST_VECTORS "/tiny-llama.gguf", NULL);
    struct backcast_score rows[200];
    struct map m;
    size_t len, dropped = 0;
    size_t n = map_rows(transcript_tok(t), text, rows, ARRAY_LEN(rows));

    rows[n - 1].stream += 40; /* 40 in between are not known any more */
    for (size_t i = 0; i < n; i++)
        dropped += rows[i].flags == 4;
    assert_int_equal(map_open(&m, rows, n, transcript_tok(t), "<script>name</script>",
                              "counter_causal"),
                     0);
    assert_int_equal(m.n_dropped, dropped);
    unsigned seen = 0;
    for (size_t i = 0; i < n; i++) {
        assert_true((m.level[i] > 0) == (rows[i].flags == 0));
        assert_true(m.level[i] <= MAP_LEVELS);
        seen |= 1u << m.level[i];
        for (size_t k = 0; k < n; k++) /* the lower the score, the stronger */
            assert_true(rows[i].flags != 0 || rows[k].flags != 0 ||
                        !(rows[i].score < rows[k].score) || m.level[i] >= m.level[k]);
    }
    assert_int_equal(seen, (2u << MAP_LEVELS) - 1);

    char *page = map_drawn(&m, 2, &len);
    assert_int_equal(strlen(page), len); /* no NUL */
    assert_null(strstr(page, "<script"));
    assert_null(strstr(page, "<b "));
    assert_null(strchr(page, '\033'));
    assert_null(strchr(page, '\x07'));
    assert_non_null(strstr(page, "&lt;script&gt;name&lt;/script&gt;"));
    assert_non_null(strstr(page, "[40 forgotten tokens]"));
    assert_int_equal(times(page, "<del>"), 1); /* the legend */
    assert_true(times(page, "<del ") > 0 && times(page, "<del ") <= dropped);
    assert_int_equal(times(page, "<span"), times(page, "</span>"));
    assert_int_equal(times(page, "<del"), times(page, "</del>"));
    assert_int_equal(times(page, "http"), 1); /* http-equiv: it loads nothing */
    for (size_t at = 0; at < len;) {
        size_t k = utf8_length(page + at, len - at);
        assert_true(k > 0);
        at += k;
    }
    free(page);

    char *plain = map_drawn(&m, 0, &len);
    assert_null(strchr(plain, '\033'));
    assert_non_null(strstr(plain, "[-"));
    assert_int_equal(times(plain, "[-"), times(plain, "-]"));
    assert_non_null(strstr(plain, "[... 40 forgotten tokens ...]"));
    free(plain);
    char *color = map_drawn(&m, 1, &len);
    assert_null(strstr(color, "\033[2J")); /* the text's own */
    assert_non_null(strstr(color, "\033[2;9m"));
    assert_int_equal(times(color, "\033[") % 2, 0);
    free(color);
    map_close(&m);
    transcript_close(&t);
}

static void a_map_without_scores_or_rows_can_be_drawn(void **state)
{
    (void)state;
    struct transcript *t = transcript_open(TEST_VECTORS "/tiny-llama.gguf", NULL);
    struct backcast_score rows[200];
    struct map m;
    size_t len, n = map_rows(transcript_tok(t), "the mill stands on the north bank", rows, 200);

    assert_int_equal(map_open(&m, rows, n, transcript_tok(t), "x", "none"), 0);
    for (size_t i = 0; i < n; i++)
        assert_int_equal(m.level[i], 0);
    map_close(&m);
    assert_int_equal(map_open(&m, rows, 0, transcript_tok(t), "x", "h2o"), 0);
    char *page = map_drawn(&m, 2, &len);
    assert_non_null(strstr(page, "<pre></pre>"));
    free(page);
    map_close(&m);
    transcript_close(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sha256_matches_the_standard),
        cmocka_unit_test(sizes_are_bytes_or_tokens),
        cmocka_unit_test(options_have_the_names_of_the_library),
        cmocka_unit_test(wrong_options_are_usage),
        cmocka_unit_test(errors_are_of_a_file),
        cmocka_unit_test(json_escapes_every_byte),
        cmocka_unit_test(transcript_knows_the_words_of_ranges),
        cmocka_unit_test(transcript_trusts_the_stream_more_than_itself),
        cmocka_unit_test(a_name_is_this_users_first),
        cmocka_unit_test(steps_are_what_came_after_the_prompt),
        cmocka_unit_test(a_map_shows_text_and_nothing_else),
        cmocka_unit_test(a_map_without_scores_or_rows_can_be_drawn),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
