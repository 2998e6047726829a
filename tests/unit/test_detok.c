/* Ids back to text: byte-exact, whole characters at a time, for any bytes. */
#include "utf8.h"
#include "vocab_build.h"

#define VOCAB(name) TEST_VECTORS "/vocab/" name
static const struct tok_flags PLAIN = {0};

/* Streams ids; every chunk but the flush must hold only whole characters if text is UTF-8. */
static char *stream(const struct tok *t, const int32_t *ids, size_t n, bool at_start, bool utf8,
                    size_t *ret_n)
{
    struct detok d;
    size_t cap = 64 + n * tok_piece_max(t), at = 0;
    char *buf = malloc(cap);
    assert_non_null(buf);
    detok_start(&d, t, at_start);
    for (size_t i = 0; i < n; i++) {
        size_t k = detok_push(&d, t, ids[i], false, buf + at, cap - at);
        if (utf8)
            assert_int_equal(utf8_valid((uint8_t *)buf + at, k), k);
        assert_true(d.n_wait <= 3);
        at += k;
    }
    at += detok_flush(&d, buf + at, cap - at);
    *ret_n = at;
    return buf;
}

static void round_trip(const struct tok *t, const char *text, size_t len, bool utf8)
{
    int32_t *ids;
    size_t n, back;
    struct err e = {0};
    if (tok_encode(t, text, len, PLAIN, &ids, &n, &e) != BC_OK)
        fail_msg("%s", e.text);
    char *s = stream(t, ids, n, true, utf8, &back);
    if (back != len || memcmp(s, text, len) != 0)
        fail_msg("\"%.*s\" came back as \"%.*s\"", (int)len, text, (int)back, s);
    free(s);
    free(ids);
}

/* Random bytes of four tempers: any, ASCII, characters, characters with damage. */
static size_t random_text(uint64_t *seed, char *ret, size_t cap, bool *utf8)
{
    unsigned temper = rnd(seed) % 4;
    size_t len = rnd(seed) % cap, n = 0;
    *utf8 = temper == 1 || temper == 2;
    while (n + 4 < len) {
        uint32_t r = rnd(seed);
        if (temper == 0) {
            ret[n++] = (char)(r >> 8);
        } else if (temper == 1) {
            ret[n++] = "aAbt  \t\n.,'1290<|>_im"[r % 21];
        } else if (temper == 3 && r % 9 == 0) {
            ret[n++] = (char)(0x80 | (r >> 8 & 0x7f));
        } else {
            static const char *const chars[] = {"e",
                                                " ",
                                                "\xc3\xa9",
                                                "\xe4\xb8\xad",
                                                "\xf0\x9f\x9a\x80",
                                                "\xe2\x80\x8d",
                                                "7",
                                                "\xed\x9f\xbf",
                                                "\n",
                                                "\xf4\x8f\xbf\xbf"};
            const char *c = chars[r % ARRAY_LEN(chars)];
            memcpy(ret + n, c, strlen(c));
            n += strlen(c);
        }
    }
    return n;
}

static void test_bpe_any_bytes(void **state)
{
    (void)state;
    static const char *const vocabs[] = {TEST_VECTORS "/tiny-llama.gguf",
                                         VOCAB("ggml-vocab-gpt-2.gguf"),
                                         VOCAB("ggml-vocab-qwen2.gguf")};
    for (size_t v = 0; v < ARRAY_LEN(vocabs); v++) {
        struct tok *t = vocab_load(vocabs[v]);
        uint64_t seed = 42 + v;
        char text[700], bytes[256];
        for (unsigned i = 0; i < 3000; i++) {
            bool utf8;
            size_t n = random_text(&seed, text, i % 20 == 0 ? sizeof text : 60, &utf8);
            round_trip(t, text, n, utf8);
        }
        for (unsigned b = 0; b < 256; b++) {
            bytes[b] = (char)b;
            round_trip(t, bytes + b, 1, b < 128);
        }
        round_trip(t, bytes, 256, false);
        tok_close(&t);
    }
}

static void test_spm_utf8(void **state)
{
    (void)state;
    struct tok *t = vocab_load(VOCAB("ggml-vocab-llama-spm.gguf"));
    uint64_t seed = 7;
    char text[300];
    for (unsigned i = 0; i < 3000; i++) {
        bool utf8;
        size_t n = random_text(&seed, text, sizeof text, &utf8);
        round_trip(t, text, n, utf8);
    }
    round_trip(t, "  two spaces", 12, true);
    tok_close(&t);
}

/* Bytes 0xf5.. have no tokens there, their stand-ins are tokens for those letters. */
static void test_stand_ins(void **state)
{
    (void)state;
    struct tok *t = vocab_load(VOCAB("ggml-vocab-deepseek-coder.gguf"));
    uint64_t seed = 5;
    char text[300];
    assert_int_equal(t->byte_id[0xf5], -1);
    for (unsigned i = 0; i < 3000; i++) {
        bool utf8;
        size_t n = random_text(&seed, text, sizeof text, &utf8);
        if (utf8)
            round_trip(t, text, n, true);
    }
    round_trip(t, "\xc3\xb5", 2, true);
    tok_close(&t);
}

static void push(struct detok *d, const struct tok *t, int32_t id, bool special, const char *want)
{
    char buf[8 + 64];
    size_t n = detok_push(d, t, id, special, buf, sizeof buf);
    if (n != strlen(want) || memcmp(buf, want, n) != 0)
        fail_msg("id %d gave \"%.*s\", not \"%s\"", id, (int)n, buf, want);
}

/* In the byte vocabulary id and byte are the same. */
static void test_waiting(void **state)
{
    (void)state;
    static const struct vocab_piece p[] = {{"<end>", TYPE_CONTROL}, {"<u>", TYPE_USER}};
    static const char *const no_merges[] = {NULL};
    struct file f;
    struct detok d;
    char buf[8];
    vocab_bpe(&f, "gpt-2", p, ARRAY_LEN(p), no_merges);
    struct tok *t = vocab_open(&f);
    detok_start(&d, t, true);
    push(&d, t, 0xf0, false, "");
    push(&d, t, 0x9f, false, "");
    push(&d, t, 0x9a, false, "");
    push(&d, t, 0x80, false, "\xf0\x9f\x9a\x80");
    push(&d, t, 0xe4, false, "");
    push(&d, t, 'x', false, "\xe4x"); /* could not go on: out as it is */
    push(&d, t, 0x80, false, "\x80"); /* starts nothing */
    push(&d, t, 0xe0, false, "");
    push(&d, t, 0x80, false, "\xe0\x80"); /* overlong: never a character */
    push(&d, t, 0xed, false, "");
    push(&d, t, 0xa0, false, "\xed\xa0"); /* a surrogate */
    push(&d, t, 0xf4, false, "");
    push(&d, t, 0x90, false, "\xf4\x90"); /* above U+10FFFF */
    push(&d, t, 0xe4, false, "");
    push(&d, t, 256, false, "\xe4"); /* a special token ends what waits, and prints as nothing */
    push(&d, t, 256, true, "<end>");
    push(&d, t, 257, false, "<u>");
    push(&d, t, 0xe4, false, "");
    push(&d, t, 0xb8, false, "");
    assert_int_equal(detok_flush(&d, buf, sizeof buf), 2);
    assert_memory_equal(buf, "\xe4\xb8", 2);
    assert_int_equal(detok_flush(&d, buf, sizeof buf), 0);
    push(&d, t, 'y', false, "y");
    tok_close(&t);
}

static void test_strip_space(void **state)
{
    (void)state;
    static const struct vocab_piece p[] = {{"\xe2\x96\x81hi", TYPE_NORMAL},
                                           {"\xe2\x96\x81\xe2\x96\x81", TYPE_NORMAL}};
    struct file f;
    struct detok d;
    vocab_spm(&f, p, ARRAY_LEN(p));
    struct tok *t = vocab_open(&f);
    detok_start(&d, t, true);
    push(&d, t, 1, false, ""); /* BOS does not use the space up */
    push(&d, t, 259, false, "hi");
    push(&d, t, 259, false, " hi");
    detok_start(&d, t, true);
    push(&d, t, 260, false, " ");
    push(&d, t, 259, false, " hi");
    detok_start(&d, t, false);
    push(&d, t, 259, false, " hi");
    tok_close(&t);
    vocab_spm(&f, p, ARRAY_LEN(p));
    key_bool(&f, "tokenizer.ggml.add_space_prefix", false);
    t = vocab_open(&f);
    detok_start(&d, t, true);
    push(&d, t, 259, false, " hi");
    tok_close(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bpe_any_bytes), cmocka_unit_test(test_stand_ins),
        cmocka_unit_test(test_spm_utf8),      cmocka_unit_test(test_waiting),
        cmocka_unit_test(test_strip_space),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
