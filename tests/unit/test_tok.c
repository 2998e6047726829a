/* The tokeniser against ids from elsewhere, and its own rules.
 *
 * vocab/NAME.gguf.inp holds texts between lines of __ggml_vocab_test__, .out the ids of each, a
 * line a text; both are llama.cpp's. tokenizer-smollm2.json holds texts and ids with special tokens
 * parsed.
 */
#include "vocab_build.h"

#define VOCAB(name) TEST_VECTORS "/vocab/" name
static const struct tok_flags PLAIN = {0}, SPECIAL = {.parse_special = true};
static const char *const no_merges[] = {NULL};

/* ---- outside truths ------------------------------ */

static size_t read_ids(const char *line, int32_t *ret, size_t cap)
{
    size_t n = 0;
    char *end;
    for (const char *p = line; *p != '\n' && *p != 0; p = end) {
        long v = strtol(p, &end, 10);
        if (end == p)
            break;
        assert_true(n < cap);
        ret[n++] = (int32_t)v;
    }
    return n;
}

static void run_cases(const char *path)
{
    char name[600];
    size_t n, cases = 0;
    static const char sep[] = "\n__ggml_vocab_test__\n";
    struct tok *t = vocab_load(path);
    snprintf(name, sizeof name, "%s.inp", path);
    char *in = (char *)slurp(name, &n), *end;
    snprintf(name, sizeof name, "%s.out", path);
    char *out = (char *)slurp(name, &n), *line = out;
    for (char *s = in; (end = strstr(s, sep)) != NULL; s = end + sizeof sep - 1) {
        int32_t want[1024];
        size_t n_want = read_ids(line, want, ARRAY_LEN(want));
        expect_ids(t, s, (size_t)(end - s), PLAIN, want, n_want);
        line = strchr(line, '\n');
        assert_non_null(line);
        line++;
        cases++;
    }
    assert_int_equal(cases, 46);
    assert_string_equal(line, "");
    free(in);
    free(out);
    tok_close(&t);
}

static void test_gpt2(void **state)
{
    (void)state, run_cases(VOCAB("ggml-vocab-gpt-2.gguf"));
}
static void test_qwen2(void **state)
{
    (void)state, run_cases(VOCAB("ggml-vocab-qwen2.gguf"));
}
static void test_llama_spm(void **state)
{
    (void)state, run_cases(VOCAB("ggml-vocab-llama-spm.gguf"));
}
static void test_deepseek_coder(void **state)
{
    (void)state;
    run_cases(VOCAB("ggml-vocab-deepseek-coder.gguf"));
}

static size_t put_utf8(char *p, unsigned c)
{
    if (c < 0x80)
        return p[0] = (char)c, 1;
    if (c < 0x800)
        return p[0] = (char)(0xc0 | c >> 6), p[1] = (char)(0x80 | (c & 63)), 2;
    if (c < 0x10000) {
        p[0] = (char)(0xe0 | c >> 12);
        p[1] = (char)(0x80 | (c >> 6 & 63));
        p[2] = (char)(0x80 | (c & 63));
        return 3;
    }
    p[0] = (char)(0xf0 | c >> 18);
    p[1] = (char)(0x80 | (c >> 12 & 63));
    p[2] = (char)(0x80 | (c >> 6 & 63));
    p[3] = (char)(0x80 | (c & 63));
    return 4;
}

static unsigned hex4(const char *p)
{
    char buf[5] = {p[0], p[1], p[2], p[3], 0};
    return (unsigned)strtoul(buf, NULL, 16);
}

/* A JSON string that starts behind its quote, decoded; returns where it ends (behind the quote). */
static const char *json_string(const char *p, char *ret, size_t *ret_n)
{
    char *out = ret;
    for (; *p != '"'; p++) {
        if (*p != '\\') {
            *out++ = *p;
            continue;
        }
        p++;
        if (*p != 'u') {
            *out++ = (char)(*p == 'n' ? '\n' : *p == 't' ? '\t' : *p == 'r' ? '\r' : *p);
            continue;
        }
        unsigned c = hex4(p + 1);
        p += 4;
        if (c >= 0xd800 && c < 0xdc00) {
            c = 0x10000 + ((c - 0xd800) << 10) + (hex4(p + 3) - 0xdc00);
            p += 6;
        }
        out += put_utf8(out, c);
    }
    *ret_n = (size_t)(out - ret);
    return p + 1;
}

static void test_smollm2(void **state)
{
    (void)state;
    size_t n, cases = 0;
    struct tok *t = vocab_load(VOCAB("smollm2.gguf"));
    char *json = (char *)slurp(TEST_VECTORS "/tokenizer-smollm2.json", &n);
    for (const char *p = json; (p = strstr(p, "\"text\": \"")) != NULL; cases++) {
        char text[4096];
        int32_t want[512];
        size_t len, n_want = 0;
        p = json_string(p + 9, text, &len);
        p = strchr(strstr(p, "\"ids\""), '[') + 1;
        for (; *p != ']'; p++) {
            char *end;
            long v = strtol(p, &end, 10);
            if (end == p)
                continue;
            want[n_want++] = (int32_t)v;
            p = end - 1;
        }
        expect_ids(t, text, len, SPECIAL, want, n_want);
    }
    assert_int_equal(cases, 33);
    free(json);
    tok_close(&t);
}

/* ---- facts about a vocabulary ------------------------------ */

static void test_facts(void **state)
{
    (void)state;
    struct tok *t = vocab_load(VOCAB("smollm2.gguf"));
    assert_int_equal(tok_n_vocab(t), 49152);
    assert_string_equal(tok_family(t), "bpe");
    assert_string_equal(tok_splitter(t), "smollm");
    assert_int_equal(tok_bos(t), 1);
    assert_int_equal(tok_eos(t), 2);
    assert_false(tok_adds_bos(t));
    assert_true(tok_is_end(t, 2) && tok_is_end(t, 0));
    assert_false(tok_is_end(t, 1) || tok_is_end(t, 19556));
    assert_true(tok_is_special(t, 1) && !tok_is_special(t, 19556));
    assert_int_equal(tok_find(t, "<|im_end|>", 10), 2);
    assert_int_equal(tok_find(t, "\xc4\xa0world", 7), 905); /* as stored: U+0120 is the space */
    assert_int_equal(tok_find(t, " world", 6), -1);
    assert_int_equal(tok_find(t, "", 0), -1);
    struct gguf_str s = tok_piece(t, 905);
    assert_int_equal(s.len, 6);
    assert_memory_equal(s.s, " world", 6);
    s = tok_piece(t, 1);
    assert_memory_equal(s.s, "<|im_start|>", s.len);
    assert_true(tok_bytes(t) > 1000000 && tok_bytes(t) < 8000000);
    tok_close(&t);
    assert_null(t);
    tok_close(&t);

    t = vocab_load(VOCAB("ggml-vocab-llama-spm.gguf"));
    assert_string_equal(tok_family(t), "spm");
    assert_string_equal(tok_splitter(t), "spm");
    assert_true(tok_adds_bos(t));
    assert_true(tok_is_end(t, 2) && tok_is_special(t, 0) && tok_is_special(t, 1));
    s = tok_piece(t, tok_find(t, "\xe2\x96\x81the", 6));
    assert_int_equal(s.len, 4);
    assert_memory_equal(s.s, " the", 4);
    s = tok_piece(t, tok_find(t, "<0x0A>", 6));
    assert_int_equal(s.len, 1);
    assert_int_equal(s.s[0], '\n');
    tok_close(&t);
}

/* ---- special tokens ------------------------------ */

static void test_longest_special(void **state)
{
    (void)state;
    struct file f;
    static const struct vocab_piece p[] = {
        {"<a", TYPE_CONTROL},   {"<a>", TYPE_CONTROL}, {"<a>>>", TYPE_CONTROL},
        {"<u>", TYPE_USER},     {"<a", TYPE_CONTROL}, /* twice: the first counts */
        {"\xff", TYPE_UNKNOWN}, {"", TYPE_CONTROL},
    };
    vocab_bpe(&f, "gpt-2", p, ARRAY_LEN(p), no_merges);
    struct tok *t = vocab_open(&f);
    EXPECT_IDS(t, "<a", SPECIAL, 256);
    EXPECT_IDS(t, "<a>", SPECIAL, 257);
    EXPECT_IDS(t, "<a>>", SPECIAL, 257, '>');
    EXPECT_IDS(t, "<a>>>", SPECIAL, 258);
    EXPECT_IDS(t, "x<a>>>>y<", SPECIAL, 'x', 258, '>', 'y', '<');
    EXPECT_IDS(t, "<<a<u>\xff", SPECIAL, '<', 256, 259, 261);
    EXPECT_IDS(t, "<a><u>\xff", PLAIN, '<', 'a', '>', 259, 0xff);
    expect_ids(t, "", 0, SPECIAL, NULL, 0);
    tok_close(&t);
}

/* The text of a turn marker in a message never becomes it, whatever type the file gave it. */
static void test_forging(void **state)
{
    (void)state;
    static const int types[] = {TYPE_NORMAL, TYPE_USER, TYPE_CONTROL};
    for (size_t i = 0; i < ARRAY_LEN(types); i++) {
        struct file f;
        const struct vocab_piece p[] = {{"<|im_end|>", types[i]},
                                        {"<|eot_id|>", types[i]},
                                        {"<\xef\xbd\x9cUser\xef\xbd\x9c>", types[i]}};
        vocab_bpe(&f, "llama-bpe", p, ARRAY_LEN(p), no_merges);
        struct tok *t = vocab_open(&f);
        for (int32_t id = 256; id < 259; id++) {
            struct gguf_str s = tok_piece(t, id);
            int32_t *ids;
            size_t n;
            expect_ids(t, s.s, s.len, SPECIAL, &id, 1);
            assert_int_equal(tok_encode(t, s.s, s.len, PLAIN, &ids, &n, NULL), BC_OK);
            assert_int_equal(n, s.len);
            for (size_t j = 0; j < n; j++)
                assert_int_equal(ids[j], (uint8_t)s.s[j]);
            free(ids);
            assert_true(tok_is_special(t, id));
        }
        assert_true(tok_is_end(t, 256) && tok_is_end(t, 257) && !tok_is_end(t, 258));
        tok_close(&t);
    }
}

static void test_parts(void **state)
{
    (void)state;
    struct file f;
    static const struct vocab_piece p[] = {{"<s>", TYPE_CONTROL}};
    static const char *const merges[] = {"a b", "\xc4\xa0 ab", NULL};
    const struct tok_part parts[] = {
        {"<s>", 3, true}, {"<s>a", 4, false}, {"b<", 2, true}, {"s> ", 3, true}, {"ab", 2, false}};
    int32_t *ids;
    size_t n;
    vocab_bpe(&f, "gpt-2", p, ARRAY_LEN(p), merges);
    struct tok *t = vocab_open(&f);
    assert_int_equal(tok_encode_parts(t, parts, ARRAY_LEN(parts), false, &ids, &n, NULL), BC_OK);
    /* merges run over edges ("a" + "b"), special tokens do not ("<" + "s>") */
    static const int32_t want[] = {256, '<', 's', '>', 257, '<', 's', '>', 258};
    assert_int_equal(n, ARRAY_LEN(want));
    assert_memory_equal(ids, want, sizeof want);
    free(ids);
    assert_int_equal(tok_encode_parts(t, NULL, 0, false, &ids, &n, NULL), BC_OK);
    assert_int_equal(n, 0);
    free(ids);
    tok_close(&t);
}

/* ---- merging ------------------------------ */

static void test_merge_order(void **state)
{
    (void)state;
    struct file f;
    static const char *const merges[] = {"b c", "a b", "bc d", "a bc", NULL}; /* ids 256.. */
    vocab_bpe(&f, "gpt-2", NULL, 0, merges);
    struct tok *t = vocab_open(&f);
    EXPECT_IDS(t, "abc", PLAIN, 259);       /* bc first, then a+bc; not ab+c */
    EXPECT_IDS(t, "abcd", PLAIN, 'a', 258); /* bc, then bc+d before a+bc */
    EXPECT_IDS(t, "abab", PLAIN, 257, 257);
    EXPECT_IDS(t, "bcbcd", PLAIN, 256, 258);
    tok_close(&t);
    static const char *const leftmost[] = {"a a", NULL};
    vocab_bpe(&f, "gpt-2", NULL, 0, leftmost);
    t = vocab_open(&f);
    EXPECT_IDS(t, "aaa", PLAIN, 256, 'a');
    EXPECT_IDS(t, "aaaa", PLAIN, 256, 256);
    tok_close(&t);
}

static void test_whole_words(void **state)
{
    (void)state;
    struct file f;
    static const struct vocab_piece p[] = {{"\xc4\xa0word", TYPE_NORMAL}, {"ctl", TYPE_CONTROL}};
    vocab_bpe(&f, "llama-bpe", p, ARRAY_LEN(p), no_merges);
    struct tok *t = vocab_open(&f);
    EXPECT_IDS(t, " word", PLAIN, 256);
    EXPECT_IDS(t, "word", PLAIN, 'w', 'o', 'r', 'd');
    EXPECT_IDS(t, "ctl", PLAIN, 'c', 't', 'l'); /* a control token is no word */
    assert_false(tok_adds_bos(t));              /* there is no BOS to add */
    tok_close(&t);
    vocab_bpe(&f, "gpt-2", p, ARRAY_LEN(p), no_merges);
    t = vocab_open(&f);
    EXPECT_IDS(t, " word", PLAIN, ' ', 'w', 'o', 'r', 'd');
    tok_close(&t);
}

static void test_missing_bytes(void **state)
{
    (void)state;
    struct tok *t = vocab_load(VOCAB("smollm2.gguf"));
    int32_t *want, *ids;
    size_t n_want, n;
    assert_int_equal(t->byte_id[4], -1);
    assert_int_equal(tok_encode(t, "\xef\xbf\xbd", 3, PLAIN, &want, &n_want, NULL), BC_OK);
    expect_ids(t, "\x04", 1, PLAIN, want, n_want);
    expect_ids(t, "\xf5", 1, PLAIN, want, n_want);
    assert_int_equal(tok_encode(t,
                                "a\xf5"
                                "b",
                                3, PLAIN, &ids, &n, NULL),
                     BC_OK);
    assert_int_equal(n, 2 + n_want);
    free(ids);
    free(want);
    tok_close(&t);
}

/* ---- SentencePiece ------------------------------ */

static void test_spm_rules(void **state)
{
    (void)state;
    struct file f;
    static const struct vocab_piece p[] = {
        {"\xe2\x96\x81"
         "ab",
         TYPE_NORMAL},
        {"ab", TYPE_NORMAL},
        {"\xe2\x96\x81", TYPE_NORMAL},
        {"a", TYPE_NORMAL},
        {"b", TYPE_NORMAL},
        {"<s", TYPE_NORMAL},
        {"<", TYPE_NORMAL},
        {"s", TYPE_NORMAL},
        {">", TYPE_NORMAL},
        {"bc", TYPE_NORMAL},
        {"c", TYPE_NORMAL},
    };
    enum { AB_ = 259, AB, SP, A, B, LTS, LT, S, GT, BC, C };
    const struct tok_flags no_prefix = {.no_prefix = true};
    vocab_spm(&f, p, ARRAY_LEN(p));
    struct tok *t = vocab_open(&f);
    assert_true(t->spm_words);
    EXPECT_IDS(t, "ab", PLAIN, AB_);
    EXPECT_IDS(t, "ab", no_prefix, AB);
    EXPECT_IDS(t, "ab ab", PLAIN, AB_, AB_);
    EXPECT_IDS(t, " ab", PLAIN, SP, AB_);
    EXPECT_IDS(t, "abc", no_prefix, AB, C);   /* ab scores higher than bc */
    EXPECT_IDS(t, "<s>", PLAIN, SP, LTS, GT); /* spelling a control token does not make one */
    EXPECT_IDS(t, "<s>", SPECIAL, 1);
    EXPECT_IDS(t, "<s>ab", SPECIAL, 1, AB_);
    EXPECT_IDS(t, "a<0x41>", no_prefix, A, LT, 3 + '0', 3 + 'x', 3 + '4', 3 + '1', GT);
    EXPECT_IDS(t, "\xc3\xa9z\xff", no_prefix, 3 + 0xc3, 3 + 0xa9, 3 + 'z', 3 + 0xff);
    EXPECT_IDS(t,
               "ab\xe2\x96\x81"
               "ab",
               PLAIN, AB_, AB_); /* U+2581 itself reads as a space */
    expect_ids(t, "", 0, PLAIN, NULL, 0);
    tok_close(&t);

    vocab_spm(&f, p, ARRAY_LEN(p));
    key_bool(&f, "tokenizer.ggml.add_space_prefix", false);
    t = vocab_open(&f);
    EXPECT_IDS(t, "ab", PLAIN, AB);
    tok_close(&t);
}

static void test_spm_crossing(void **state)
{
    (void)state;
    struct file f;
    static const struct vocab_piece p[] = {{"a\xe2\x96\x81"
                                            "a",
                                            TYPE_NORMAL},
                                           {"a\xe2\x96\x81", TYPE_NORMAL},
                                           {"\xe2\x96\x81", TYPE_NORMAL},
                                           {"a", TYPE_NORMAL}};
    const struct tok_flags no_prefix = {.no_prefix = true};
    vocab_spm(&f, p, ARRAY_LEN(p));
    struct tok *t = vocab_open(&f);
    assert_false(t->spm_words);
    EXPECT_IDS(t, "a a", no_prefix, 259); /* a piece that crosses a space is found */
    tok_close(&t);

    t = vocab_load(VOCAB("ggml-vocab-llama-spm.gguf")); /* cut into words or not: the same ids */
    size_t len, n, n2;
    char *text = (char *)slurp(TEST_VECTORS "/generate/passage.txt", &len);
    int32_t *ids, *ids2;
    assert_true(t->spm_words);
    assert_int_equal(tok_encode(t, text, len, PLAIN, &ids, &n, NULL), BC_OK);
    t->spm_words = false;
    assert_int_equal(tok_encode(t, text, len, PLAIN, &ids2, &n2, NULL), BC_OK);
    assert_int_equal(n, n2);
    assert_memory_equal(ids, ids2, n * sizeof *ids);
    free(ids);
    free(ids2);
    free(text);
    tok_close(&t);
}

/* ---- long texts, cache, interpreter ------------------------------ */

static void round_trip(const struct tok *t, const char *text, size_t len)
{
    int32_t *ids;
    size_t n, back;
    struct err e = {0};
    if (tok_encode(t, text, len, PLAIN, &ids, &n, &e) != BC_OK)
        fail_msg("%s", e.text);
    char *s = pieces_text(t, ids, n, &back);
    assert_int_equal(back, len);
    assert_memory_equal(s, text, len);
    free(s);
    free(ids);
}

/* Anything worse than n log n would not end here: a million squared is 10^12. */
static void test_long(void **state)
{
    (void)state;
    static const char *const merges[] = {"a a", "aa aa", "\xc4\xa0 \xc4\xa0", NULL};
    static const char *const splitters[] = {"gpt-2",        "qwen2",       "tekken",
                                            "deepseek-llm", "deepseek-v3", "smollm"};
    size_t len = TOK_WORD_MAX + (1u << 18);
    char *text = malloc(len);
    assert_non_null(text);
    for (size_t i = 0; i < ARRAY_LEN(splitters); i++) {
        struct file f;
        vocab_bpe(&f, splitters[i], NULL, 0, merges);
        struct tok *t = vocab_open(&f);
        memset(text, 'a', len); /* one word */
        round_trip(t, text, len);
        memset(text, ' ', len); /* one run of space, then a word */
        text[len - 1] = 'x';
        round_trip(t, text, len);
        for (size_t j = 0; j < len; j++)
            text[j] = "\xc3\xa9"[j % 2]; /* cut between characters */
        round_trip(t, text, len);
        memset(text, 0xff, len);
        round_trip(t, text, len);
        tok_close(&t);
    }
    free(text);
}

static void test_too_long(void **state)
{
    (void)state;
    struct tok *t = vocab_load(TEST_VECTORS "/tiny-llama.gguf");
    int32_t *ids = NULL;
    size_t n = 7;
    struct err e = {0};
    const struct tok_part parts[] = {{"a", SIZE_MAX, false}, {"a", 2, false}};
    assert_int_equal(tok_encode(t, "a", TOK_TEXT_MAX + 1ul, PLAIN, &ids, &n, &e), BC_EINVALID);
    assert_string_equal(e.field, "text");
    assert_int_equal(tok_encode_parts(t, parts, 2, false, &ids, &n, &e), BC_EINVALID);
    assert_true(ids == NULL && n == 7);
    tok_close(&t);
}

/* A long text goes through the cache, a short one does not; the interpreter stands in for machine
 * code. */
static void test_cache_and_interpreter(void **state)
{
    (void)state;
    static const char *const vocabs[] = {VOCAB("ggml-vocab-gpt-2.gguf"),
                                         VOCAB("ggml-vocab-qwen2.gguf"),
                                         VOCAB("ggml-vocab-deepseek-coder.gguf")};
    static const char text[] =
        " It's 12345 caf\xc3\xa9s, don't   \t\n\n you think? \xe4\xb8\xad\xe6\x96\x87 x=f(y)\xff;";
    enum { TIMES = 40 };
    size_t len = sizeof text - 1;
    char *many = malloc(len * TIMES);
    assert_non_null(many);
    for (size_t i = 0; i < TIMES; i++)
        memcpy(many + i * len, text, len);
    for (size_t v = 0; v < ARRAY_LEN(vocabs); v++) {
        struct tok *t = vocab_load(vocabs[v]);
        int32_t *one, *all;
        size_t n_one, n_all;
        assert_int_equal(tok_encode(t, text, len, PLAIN, &one, &n_one, NULL), BC_OK);
        assert_int_equal(tok_encode(t, many, len * TIMES, PLAIN, &all, &n_all, NULL), BC_OK);
        assert_int_equal(n_all, n_one * TIMES);
        for (size_t i = 0; i < n_all; i++)
            assert_int_equal(all[i], one[i % n_one]);
        memset(t->jit, 0, sizeof t->jit);
        expect_ids(t, many, len * TIMES, PLAIN, all, n_all);
        free(one);
        free(all);
        tok_close(&t);
    }
    free(many);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gpt2),
        cmocka_unit_test(test_qwen2),
        cmocka_unit_test(test_llama_spm),
        cmocka_unit_test(test_deepseek_coder),
        cmocka_unit_test(test_smollm2),
        cmocka_unit_test(test_facts),
        cmocka_unit_test(test_longest_special),
        cmocka_unit_test(test_forging),
        cmocka_unit_test(test_parts),
        cmocka_unit_test(test_merge_order),
        cmocka_unit_test(test_whole_words),
        cmocka_unit_test(test_missing_bytes),
        cmocka_unit_test(test_spm_rules),
        cmocka_unit_test(test_spm_crossing),
        cmocka_unit_test(test_long),
        cmocka_unit_test(test_too_long),
        cmocka_unit_test(test_cache_and_interpreter),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
