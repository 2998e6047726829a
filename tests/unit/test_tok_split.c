/* Splitters: the words that each one makes, by hand from its expressions. "|" parts expected words.
 */
#include "vocab_build.h"

struct words {
    char buf[1024];
    size_t n;
};

static int add_word(void *arg, const char *s, size_t n)
{
    struct words *w = arg;
    assert_true(n > 0 && w->n + n + 1 < sizeof w->buf);
    if (w->n > 0)
        w->buf[w->n++] = '|';
    memcpy(w->buf + w->n, s, n);
    w->n += n;
    w->buf[w->n] = 0;
    return BC_OK;
}

static void words_once(const struct tok *t, const char *text, const char *want)
{
    struct split *s = NULL;
    struct words w = {.n = 0};
    struct err e = {0};
    assert_int_equal(split_open(&s, t, &e), BC_OK);
    if (split_text(s, text, strlen(text), add_word, &w, &e) != BC_OK)
        fail_msg("%s", e.text);
    if (strcmp(w.buf, want) != 0)
        fail_msg("%s: \"%s\"\n got    \"%s\"\n wanted \"%s\"", tok_splitter(t), text, w.buf, want);
    split_close(&s);
}

/* With machine code where there is some, and with the interpreter. */
static void words(const char *pre, const char *text, const char *want)
{
    static const char *const no_merges[] = {NULL};
    struct file f;
    vocab_bpe(&f, pre, NULL, 0, no_merges);
    struct tok *t = vocab_open(&f);
    words_once(t, text, want);
    memset(t->jit, 0, sizeof t->jit);
    words_once(t, text, want);
    tok_close(&t);
}

#define TEXT "Hello world 123456 it's   ok\n\n  x\t!"

static void test_gpt2_family(void **state)
{
    (void)state;
    words("gpt-2", TEXT, "Hello| world| 123456| it|'s|  | ok|\n\n | x|\t|!");
    words("smollm", TEXT, "Hello| world| |1|2|3|4|5|6| it|'s|  | ok|\n\n | x|\t|!");
    words("falcon", TEXT, "Hello| world| |123|456| it|'|s|  | ok|\n\n | x|\t|!");
    words("default", TEXT, "Hello| world| |123|456| it|'|s|  | ok|\n\n | x|\t|!");
    words("falcon", "a`b 1234", "a|`|b| |123|4");
    words("default", "1234\xd9\xa1\xd9\xa2",
          "123|4\xd9\xa1\xd9\xa2"); /* Arabic digits stay with the rest */
    words("gpt-2", "'S 'll IT'S", "'|S| '|ll| IT|'|S");
    words("gpt-2", "'ll", "'ll");
}

static void test_cl100k_family(void **state)
{
    (void)state;
    words("llama-bpe", TEXT, "Hello| world| |123|456| it|'s|  | ok|\n\n| | x|\t|!");
    words("dbrx", TEXT, "Hello| world| |123|456| it|'s|  | ok|\n\n| | x|\t|!");
    words("qwen2", TEXT, "Hello| world| |1|2|3|4|5|6| it|'s|  | ok|\n\n| | x|\t|!");
    words("minicpm5", "a1234567b", "a|123|456|7|b");
    words("llama-bpe", "IT'S we'Ve\r\n(x);\n\ny \n z", "IT|'S| we|'Ve|\r\n|(x|);\n\n|y| \n| z");
    words("seed-coder", "!\nx12", "!|\n|x|1|2");
    words("qwen2", "!\nx", "!\n|x");
    words("qwen35",
          "e\xcc\x81"
          "a\xcc\x81!",
          "e\xcc\x81"
          "a\xcc\x81|!");
    words("qwen2",
          "e\xcc\x81"
          "a",
          "e|\xcc\x81"
          "a");
}

static void test_o200k_family(void **state)
{
    (void)state;
    words("tekken", "HelloWorld ABCdef 123's/\n", "Hello|World| ABCdef| |1|2|3|'s|/\n");
    words("gpt-4o", "it's OK12345 don'T//x", "it's| OK|123|45| don'T|//|x");
    words("tekken", "it's", "it|'s");
}

static void test_deepseek_family(void **state)
{
    (void)state;
    words("deepseek-v3", "don't 12345 \xe4\xb8\xad\xe6\x96\x87\xe3\x81\x8b ok!x\n",
          "don|'t| |123|45| |\xe4\xb8\xad\xe6\x96\x87\xe3\x81\x8b| ok|!x|\n");
    words("deepseek-coder", "ab  cd, 12\n\xe4\xb8\xad\xe6\x96\x87x",
          "ab| | cd|,| |1|2|\n|\xe4\xb8\xad\xe6\x96\x87|x");
    words("deepseek-llm", "ab  cd, 12\n\xe4\xb8\xad\xe6\x96\x87x",
          "ab| | cd|,| |12|\n|\xe4\xb8\xad\xe6\x96\x87|x");
    words("deepseek-llm", "1  ", "1|  "); /* digits and closing space part */
    words("deepseek-llm", "\xd0\xb6\xd7\x90",
          "\xd0\xb6|\xd7\x90"); /* Cyrillic has case, Hebrew does not */
}

static void test_white_space(void **state)
{
    (void)state;
    /* U+180E is no white space, U+3000 and U+0085 are */
    words("gpt-2",
          " \xe1\xa0\x8e"
          "b",
          " \xe1\xa0\x8e|b");
    words("gpt-2",
          "a\xe3\x80\x80\xc2\x85"
          "b",
          "a|\xe3\x80\x80|\xc2\x85|b");
    words("gpt-2", "   ", "   ");
    words("gpt-2", "a ", "a| ");
    words("llama-bpe", "\n\n\n", "\n\n\n");
}

static void test_names(void **state)
{
    (void)state;
    static const char *const pairs[][2] = {
        {"llama3", "llama-bpe"},
        {"llama-v3", "llama-bpe"},
        {"falcon3", "llama-bpe"},
        {"pixtral", "llama-bpe"},
        {"smaug-bpe", "dbrx"},
        {"deepseek-r1-qwen", "qwen2"},
        {"starcoder", "smollm"},
        {"refact", "smollm"},
        {"command-r", "smollm"},
        {"codeshell", "smollm"},
        {"phi-2", "gpt-2"},
        {"mpt", "gpt-2"},
        {"olmo", "gpt-2"},
        {"megrez", "qwen2"},
        {"default", "default"},
        {"llama4", "gpt-4o"},
        {"tekken", "tekken"},
        {"smollm", "smollm"},
        {"deepseek-v3", "deepseek-v3"},
    };
    for (size_t i = 0; i < ARRAY_LEN(pairs); i++) {
        const struct splitter *s = splitter_find(pairs[i][0], strlen(pairs[i][0]));
        assert_non_null(s);
        assert_string_equal(s->name, pairs[i][1]);
    }
    static const char *const unknown[] = {"",     "gpt",     "gpt-22",   "GPT-2",
                                          "bert", "kimi-k2", "llama-spm"};
    for (size_t i = 0; i < ARRAY_LEN(unknown); i++)
        assert_null(splitter_find(unknown[i], strlen(unknown[i])));
}

/* A word's error stops the walk and comes back. */
static int fail_third(void *arg, const char *s, size_t n)
{
    (void)s, (void)n;
    return ++*(int *)arg == 3 ? BC_ENOMEM : BC_OK;
}

static void test_stop(void **state)
{
    (void)state;
    static const char *const no_merges[] = {NULL};
    struct file f;
    struct split *s = NULL;
    int calls = 0;
    vocab_bpe(&f, "smollm", NULL, 0, no_merges);
    struct tok *t = vocab_open(&f);
    assert_int_equal(split_open(&s, t, NULL), BC_OK);
    assert_int_equal(split_text(s, "a b 1 2 c", 9, fail_third, &calls, NULL), BC_ENOMEM);
    assert_int_equal(calls, 3);
    split_close(&s);
    tok_close(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gpt2_family),  cmocka_unit_test(test_cl100k_family),
        cmocka_unit_test(test_o200k_family), cmocka_unit_test(test_deepseek_family),
        cmocka_unit_test(test_white_space),  cmocka_unit_test(test_names),
        cmocka_unit_test(test_stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
