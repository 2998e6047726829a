/* Vocabularies that lie: each is refused with a reason; damaged files give an error or a vocabulary
 * that works. */
#include "chat.h"
#include "vocab_build.h"

#define TINY TEST_VECTORS "/tiny-llama.gguf"
#define KEY(name) "tokenizer.ggml." name
static const char *const no_merges[] = {NULL};

static void refuse(struct file *f, int code, const char *field, const char *fragment)
{
    struct gguf *g = NULL;
    struct tok *t = NULL;
    struct err e = {0};
    head_done(f);
    if (gguf_parse(&g, f->b, f->n, &e) != BC_OK)
        fail_msg("%s", e.text);
    int rc = tok_open(&t, g, &e);
    if (rc != code || strcmp(e.field, field) != 0 || strstr(e.text, fragment) == NULL)
        fail_msg("wanted %s, \"%s\", \"...%s...\"; got %s, \"%s\", \"%s\"", err_name(code), field,
                 fragment, err_name(rc), e.field, e.text);
    assert_null(t);
    gguf_close(&g);
}

static void start(struct file *f, const char *model, const char *pre)
{
    head(f, 3, 0, 0);
    key_str(f, KEY("model"), model);
    if (pre != NULL)
        key_str(f, KEY("pre"), pre);
}

static void strings(struct file *f, const char *key, size_t n, const char *const *s)
{
    key_array(f, key, GGUF_STRING, n);
    for (size_t i = 0; i < n; i++)
        put_str(f, s[i]);
}

static void test_model_and_pre(void **state)
{
    (void)state;
    struct file f;
    head(&f, 3, 0, 0);
    refuse(&f, BC_ENOTFOUND, KEY("model"), "no key");
    start(&f, "bert", NULL);
    refuse(&f, BC_EUNSUPPORTED, KEY("model"), "\"bert\"");
    start(&f, "gpt2x", NULL);
    refuse(&f, BC_EUNSUPPORTED, KEY("model"), "\"gpt2x\"");
    start(&f, "gpt2", "kimi-k2");
    refuse(&f, BC_EUNSUPPORTED, KEY("pre"), "\"kimi-k2\"");
    head(&f, 3, 0, 0);
    key32(&f, KEY("model"), GGUF_U32, 3);
    refuse(&f, BC_ECORRUPT, KEY("model"), "not a string");
    start(&f, "gpt2", NULL);
    key32(&f, KEY("pre"), GGUF_U32, 3);
    refuse(&f, BC_ECORRUPT, KEY("pre"), "not a string");
}

static void test_tokens(void **state)
{
    (void)state;
    struct file f;
    static const char *const one[] = {"a"};
    start(&f, "gpt2", "gpt-2");
    refuse(&f, BC_ENOTFOUND, KEY("tokens"), "no key");
    start(&f, "gpt2", "gpt-2");
    key_str(&f, KEY("tokens"), "a");
    refuse(&f, BC_ECORRUPT, KEY("tokens"), "not an array of strings");
    start(&f, "gpt2", "gpt-2");
    key_array(&f, KEY("tokens"), GGUF_U32, 1);
    put32(&f, 1);
    refuse(&f, BC_ECORRUPT, KEY("tokens"), "not an array of strings");
    start(&f, "gpt2", "gpt-2");
    key_array(&f, KEY("tokens"), GGUF_STRING, 0);
    refuse(&f, BC_ECORRUPT, KEY("tokens"), "0 entries");
    start(&f, "gpt2", "gpt-2");
    char longest[4098];
    memset(longest, 'x', sizeof longest);
    key_array(&f, KEY("tokens"), GGUF_STRING, 1);
    put_strn(&f, longest, 4097);
    refuse(&f, BC_ECORRUPT, KEY("tokens"), "4097 bytes");
    start(&f, "gpt2", "gpt-2"); /* bytes are missing, and no unknown token */
    strings(&f, KEY("tokens"), 1, one);
    strings(&f, KEY("merges"), 0, one);
    refuse(&f, BC_ECORRUPT, KEY("tokens"), "no token for byte 0x00");
}

static void test_types(void **state)
{
    (void)state;
    struct file f;
    static const char *const two[] = {"a", "b"};
    start(&f, "gpt2", "gpt-2");
    strings(&f, KEY("tokens"), 2, two);
    key_array(&f, KEY("token_type"), GGUF_I32, 1);
    put32(&f, 1);
    refuse(&f, BC_ECORRUPT, KEY("token_type"), "2 values");
    start(&f, "gpt2", "gpt-2");
    strings(&f, KEY("tokens"), 2, two);
    key_array(&f, KEY("token_type"), GGUF_F32, 2);
    put64(&f, 0);
    refuse(&f, BC_ECORRUPT, KEY("token_type"), "integers");
    start(&f, "gpt2", "gpt-2");
    strings(&f, KEY("tokens"), 2, two);
    strings(&f, KEY("token_type"), 2, two);
    refuse(&f, BC_ECORRUPT, KEY("token_type"), "integers");
    static const uint32_t bad[] = {7, 255, UINT32_MAX, 0x80000000};
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        start(&f, "gpt2", "gpt-2");
        strings(&f, KEY("tokens"), 2, two);
        key_array(&f, KEY("token_type"), GGUF_I32, 2);
        put32(&f, 0);
        put32(&f, bad[i]);
        refuse(&f, BC_ECORRUPT, KEY("token_type"), "entry 1");
    }
}

static void test_ids(void **state)
{
    (void)state;
    static const char *const keys[] = {KEY("bos_token_id"), KEY("eos_token_id"),
                                       KEY("eot_token_id"), KEY("eom_token_id"),
                                       KEY("unknown_token_id")};
    struct file f;
    for (size_t i = 0; i < ARRAY_LEN(keys); i++) {
        vocab_bpe(&f, "gpt-2", NULL, 0, no_merges);
        key32(&f, keys[i], GGUF_U32, 256);
        refuse(&f, BC_ECORRUPT, keys[i], "256 tokens");
        vocab_bpe(&f, "gpt-2", NULL, 0, no_merges);
        key32(&f, keys[i], GGUF_I32, UINT32_MAX);
        refuse(&f, BC_ECORRUPT, keys[i], "outside");
        vocab_bpe(&f, "gpt-2", NULL, 0, no_merges);
        key_str(&f, keys[i], "1");
        refuse(&f, BC_ECORRUPT, keys[i], "not an integer");
        vocab_bpe(&f, "gpt-2", NULL, 0, no_merges);
        key32(&f, keys[i], GGUF_U32, 255);
        struct tok *t = vocab_open(&f);
        assert_int_equal(tok_is_end(t, 255), i >= 1 && i <= 3);
        tok_close(&t);
    }
    vocab_bpe(&f, "gpt-2", NULL, 0, no_merges);
    key32(&f, KEY("add_bos_token"), GGUF_U32, 1);
    refuse(&f, BC_ECORRUPT, KEY("add_bos_token"), "not a bool");
    vocab_bpe(&f, "gpt-2", NULL, 0, no_merges);
    key_bool(&f, KEY("add_bos_token"), true); /* there is no BOS to add */
    struct tok *t = vocab_open(&f);
    assert_false(tok_adds_bos(t));
    tok_close(&t);
}

static void test_merges(void **state)
{
    (void)state;
    struct file f;
    static const char *const one[] = {"a"};
    start(&f, "gpt2", "gpt-2");
    strings(&f, KEY("tokens"), 1, one);
    refuse(&f, BC_ECORRUPT, KEY("merges"), "no key");
    start(&f, "gpt2", "gpt-2");
    strings(&f, KEY("tokens"), 1, one);
    key_array(&f, KEY("merges"), GGUF_I32, 1);
    put32(&f, 1);
    refuse(&f, BC_ECORRUPT, KEY("merges"), "not an array of strings");
    static const char *const bad[] = {"", "a", " ", "ab", "a b", "a ", " a", "aa a"};
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        start(&f, "gpt2", "gpt-2");
        strings(&f, KEY("tokens"), 1, one);
        strings(&f, KEY("merges"), 1, &bad[i]);
        refuse(&f, BC_ECORRUPT, KEY("merges"), "entry 0");
    }
    static const struct vocab_piece control[] = {{"ab", TYPE_CONTROL}};
    static const char *const ab[] = {"a b", NULL};
    vocab_bpe(&f, "gpt-2", control, 1, no_merges);
    f.n_keys--; /* the empty list of merges is the last key: write another */
    f.n -= 8 + strlen(KEY("merges")) + 4 + 4 + 8;
    strings(&f, KEY("merges"), 1, ab);
    refuse(&f, BC_ECORRUPT, KEY("merges"), "lacks"); /* merges cannot spell a control token */
}

static void spm(struct file *f, size_t n, const char *const *pieces, const uint32_t *types)
{
    start(f, "llama", NULL);
    strings(f, KEY("tokens"), n, pieces);
    key_array(f, KEY("token_type"), GGUF_I32, n);
    for (size_t i = 0; i < n; i++)
        put32(f, types[i]);
}

static void test_spm(void **state)
{
    (void)state;
    struct file f;
    static const char *const one[] = {"a"};
    static const uint32_t normal[] = {TYPE_NORMAL}, byte[] = {TYPE_BYTE};
    spm(&f, 1, one, normal);
    refuse(&f, BC_ECORRUPT, KEY("scores"), "not there");
    spm(&f, 1, one, normal);
    key_array(&f, KEY("scores"), GGUF_I32, 1);
    put32(&f, 0);
    refuse(&f, BC_ECORRUPT, KEY("scores"), "f32");
    spm(&f, 1, one, normal);
    key_array(&f, KEY("scores"), GGUF_F32, 2);
    put64(&f, 0);
    refuse(&f, BC_ECORRUPT, KEY("scores"), "1 values");
    static const uint32_t bad[] = {0x7fc00000, 0x7f800000, 0xff800000};
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        spm(&f, 1, one, normal);
        key_array(&f, KEY("scores"), GGUF_F32, 1);
        put32(&f, bad[i]);
        refuse(&f, BC_ECORRUPT, KEY("scores"), "not finite");
    }
    spm(&f, 1, one, normal);
    key_array(&f, KEY("scores"), GGUF_F32, 1);
    put32(&f, 0);
    refuse(&f, BC_ECORRUPT, KEY("tokens"), "no token for byte");
    static const char *const bytes[] = {"<0x-1>",  "<0x1>", "<0xGG>", "<0x00",
                                        "<0x000>", "0x00",  "",       "<0x0a>"};
    for (size_t i = 0; i < ARRAY_LEN(bytes); i++) {
        spm(&f, 1, &bytes[i], byte);
        refuse(&f, BC_ECORRUPT, KEY("tokens"), "byte token");
    }
    spm(&f, 1, one, normal); /* with an unknown token, missing bytes are no fault */
    key_array(&f, KEY("scores"), GGUF_F32, 1);
    put32(&f, 0);
    key32(&f, KEY("unknown_token_id"), GGUF_U32, 0);
    struct tok *t = vocab_open(&f);
    EXPECT_IDS(t, "b\xff", ((struct tok_flags){.no_prefix = true}), 0, 0);
    tok_close(&t);
}

/* Whatever parses must also tokenise, print and converse without a fault. */
static bool use(const uint8_t *b, size_t n)
{
    struct gguf *g = NULL;
    struct tok *t = NULL;
    struct chat *c = NULL;
    struct chat_turn turn;
    int32_t *ids;
    size_t n_ids;
    struct err e = {0};
    static const char text[] = "<|im_start|>user\nhe said: the 12th\xff\xc3\xa9<|im_end|>";
    if (gguf_parse(&g, b, n, &e) != BC_OK)
        return false;
    bool ok = tok_open(&t, g, &e) == BC_OK;
    assert_true(ok || e.text[0] != 0);
    if (ok && tok_encode(t, text, sizeof text - 1, (struct tok_flags){true, false}, &ids, &n_ids,
                         &e) == BC_OK) {
        for (size_t i = 0; i < n_ids; i++)
            assert_true(ids[i] >= 0 && (uint32_t)ids[i] < tok_n_vocab(t));
        free(ids);
    }
    if (ok && chat_open(&c, g, t, NULL, &e) == BC_OK &&
        chat_render(c, CHAT_FRESH, "user", text, sizeof text - 1, true, &turn, &e) == BC_OK)
        chat_turn_free(&turn);
    chat_close(&c);
    tok_close(&t);
    gguf_close(&g);
    return ok;
}

static void test_damage(void **state)
{
    (void)state;
    size_t n, header = 12000, opened = 0;
    uint8_t *b = slurp(TINY, &n);
    uint64_t seed = 99;
    assert_true(use(b, n));
    for (size_t i = 0; i < 200; i++)
        assert_false(use(b, i < 150 ? i * 97 : n - 1 - i));
    for (size_t i = 0; i < 2000; i++) {
        size_t at = rnd(&seed) % header;
        uint8_t was = b[at];
        b[at] = i % 2 == 0 ? (uint8_t)rnd(&seed) : (uint8_t)(was ^ 1u << rnd(&seed) % 8);
        opened += use(b, n);
        b[at] = was;
    }
    free(b);
    assert_true(opened > 100 && opened < 1990); /* both ways are taken */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model_and_pre), cmocka_unit_test(test_tokens),
        cmocka_unit_test(test_types),         cmocka_unit_test(test_ids),
        cmocka_unit_test(test_merges),        cmocka_unit_test(test_spm),
        cmocka_unit_test(test_damage),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
