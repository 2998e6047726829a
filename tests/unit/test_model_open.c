/* Opening a model: what it says of itself, exact byte counts, and every way in which a file can be
 * wrong. Wrong files are made from right ones by changing bytes: keys and tensors are renamed,
 * numbers overwritten. Each error must carry the right code, name the key or tensor, and leave no
 * memory behind. */
#include "gguf_bytes.h"
#include "model_rig.h"

static struct kn *ref_open(void)
{
    struct kn_options o = {.backend = "ref"};
    struct kn *kn;

    assert_int_equal(kn_open(&kn, &o, NULL, 0), KN_OK);
    return kn;
}

/* The file must be refused with this code and this name; f is freed. */
static void refused(struct bytes *f, int code, const char *field, const char *word)
{
    struct kn *kn = ref_open();
    struct err e = {0};
    struct gguf *g;
    struct model *m = NULL;

    if (gguf_parse(&g, f->b, f->n, &e))
        fail_msg("the reader refused it first: %s: %s", e.field, e.text);
    int rc = model_open(&m, kn, g, NULL, NULL, NULL, &e);
    if (rc != code || e.code != code || strcmp(e.field, field) != 0 || !strstr(e.text, field) ||
        !strstr(e.text, word))
        fail_msg("got %s at \"%s\": %s (wanted %s at \"%s\", saying \"%s\")", err_name(rc), e.field,
                 e.text, err_name(code), field, word);
    assert_null(m);
    assert_int_equal(kn->bytes_buffers, 0);
    assert_int_equal(kn->bytes_weights, 0);
    gguf_close(&g);
    kn_close(&kn);
    free(f->b);
}

/* ---- right files -------------------------------------------------------------------------------
 */

struct steps {
    uint64_t last, total;
    unsigned n;
};

static void step(void *arg, uint64_t done, uint64_t total)
{
    struct steps *s = arg;

    assert_true(done > s->last && done <= total && (s->n == 0 || total == s->total));
    *s = (struct steps){done, total, s->n + 1};
}

static void a_model_says_what_it_is(void **state)
{
    struct kn *kn = ref_open();
    struct err e = {0};
    struct gguf *g = golden_open("tiny-qwen3.gguf");
    struct steps steps = {0};
    struct model *m;
    struct kn_kv kv;
    (void)state;

    struct model_options o = {.max_rows = 10, .max_out = 3};
    assert_int_equal(model_open(&m, kn, g, &o, step, &steps, &e), BC_OK);
    const struct model_info *i = model_info(m);
    assert_string_equal(i->family, "qwen3");
    assert_string_equal(i->name, "tiny-qwen3");
    assert_int_equal(i->n_layers, 4);
    assert_int_equal(i->d_model, 64);
    assert_int_equal(i->n_heads, 4);
    assert_int_equal(i->n_kv_heads, 2);
    assert_int_equal(i->head_dim, 32);
    assert_int_equal(i->n_ff, 160);
    assert_int_equal(i->n_vocab, 384);
    assert_int_equal(i->context_train, 1024);
    assert_int_equal(i->max_rows, 10);
    assert_int_equal(i->max_out, 3);
    assert_true(i->identity == gguf_identity(g));
    uint64_t layer = 64 * 128 * 2 + 64 * 64 * 2 + 64 * 160 * 3 + 64 * 2 + 32 * 2;
    assert_int_equal(i->n_params, 384 * 64 + 64 + 4 * layer);
    assert_int_equal(steps.n, gguf_n_tensors(g));
    assert_true(steps.last == steps.total);
    assert_ptr_equal(model_kn(m), kn);
    model_kv_shape(m, KN_F16, true, &kv);
    assert_true(kv.base == NULL && kv.n_layers == 4 && kv.n_kv_heads == 2 && kv.head_dim == 32);
    assert_true(kv.d_hidden == 64 && kv.type == KN_F16 && kv.stride % 4096 == 0);
    assert_true(kv.stride >= kn_kv_page_bytes(&kv) && kv.stride < kn_kv_page_bytes(&kv) + 4096);
    model_kv_shape(m, KN_F32, false, &kv);
    assert_true(kv.d_hidden == 0 && kv.type == KN_F32);
    model_close(&m);
    assert_null(m);
    gguf_close(&g);
    kn_close(&kn);
}

/* Scratch: a row has x, h and what rests between two layers (64 each), q, att (128 each), k, v (64 each), gate, up (160
 * each), nine host words; an output row its logits. Weights and vectors are the rest of what the backend
 * counts. */
static void bytes_are_counted_exactly(void **state)
{
    struct kn *kn = ref_open();
    struct err e = {0};
    struct gguf *g = golden_open("tiny-qwen3.gguf");
    struct model *m;
    (void)state;

    struct model_options o = {.max_rows = 10, .max_out = 3};
    assert_int_equal(model_open(&m, kn, g, &o, NULL, NULL, &e), BC_OK);
    const struct model_info *i = model_info(m);
    size_t device = 4 * (10 * (3 * 64 + 2 * 128 + 2 * 64 + 2 * 160) + 3 * 384), host = 10 * 10 * 4;
    assert_int_equal(i->bytes_scratch, device + host);
    assert_int_equal(i->bytes_weights + device, kn->bytes_weights + kn->bytes_buffers);
    model_close(&m);
    assert_int_equal(kn->bytes_buffers + kn->bytes_weights, 0);
    gguf_close(&g);
    kn_close(&kn);
}

static void options_out_of_range_are_refused(void **state)
{
    struct kn *kn = ref_open();
    struct err e = {0};
    struct gguf *g = golden_open("tiny-llama.gguf");
    struct model *m = NULL;
    (void)state;

    struct model_options rows = {.max_rows = 1u << 30}, out = {.max_rows = 8, .max_out = 9};
    assert_int_equal(model_open(&m, kn, g, &rows, NULL, NULL, &e), BC_EINVALID);
    assert_string_equal(e.field, "max_rows");
    assert_int_equal(model_open(&m, kn, g, &out, NULL, NULL, &e), BC_EINVALID);
    assert_string_equal(e.field, "max_out");
    assert_null(m);
    assert_int_equal(kn->bytes_buffers + kn->bytes_weights, 0);
    gguf_close(&g);
    kn_close(&kn);
}

/* ---- keys that change a model ------------------------------------------------------------------ */

static struct model *open_bytes(struct kn *kn, struct bytes *f)
{
    struct model_options o = {.max_rows = 8, .max_out = 1};
    struct err e = {0};
    struct gguf *g;
    struct model *m;

    if (gguf_parse(&g, f->b, f->n, &e) || model_open(&m, kn, g, &o, NULL, NULL, &e))
        fail_msg("%s: %s", e.field, e.text);
    gguf_close(&g);
    free(f->b);
    return m;
}

/* Logits [384] of the last of 8 tokens whose positions are `spacing` apart. */
static void logits_spaced(struct model *m, int32_t spacing, float *ret)
{
    static const int32_t ids[8] = {5, 80, 17, 200, 33, 5, 80, 41};
    static const uint32_t seq[8], lo[8], hi[8] = {1, 2, 3, 4, 5, 6, 7, 8}, last[] = {7};
    static const uint32_t slots[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    int32_t positions[8];
    struct kn *kn = model_kn(m);
    struct kn_kv kv;
    struct err e = {0};

    for (int32_t i = 0; i < 8; i++)
        positions[i] = i * spacing;
    model_kv_shape(m, KN_F32, false, &kv);
    assert_int_equal(kn->ops->arena_open(kn, kv.stride, 1, &kv.base), 0);
    assert_int_equal(kn->ops->arena_commit(kn, kv.base, kv.stride, 0), 0);
    struct kn_seq s = {&kv, slots, 8};
    struct kn_batch b = {.n_rows = 8,
                         .n_seqs = 1,
                         .ids = ids,
                         .positions = positions,
                         .seq = seq,
                         .lo = lo,
                         .hi = hi,
                         .slots = slots,
                         .seqs = &s};
    struct model_out out = {.rows = last, .n = 1, .logits = ret};
    assert_int_equal(model_forward(m, &b, &out, &e), BC_OK);
    kn->ops->arena_release(kn, kv.base, kv.stride, 0);
    kn->ops->arena_close(kn, kv.base, kv.stride, 1);
}

/* With positions scaled by 1/2, tokens two apart look as tokens one apart do: exactly, halves
 * being exact. */
static void linear_rope_scaling_divides_positions(void **state)
{
    float plain[384], scaled[384], older[384], near[384];
    struct kn *kn = ref_open();
    (void)state;

    struct bytes f = file_read("tiny-qwen3.gguf");
    struct model *m = open_bytes(kn, &f);
    logits_spaced(m, 1, plain);
    logits_spaced(m, 2, near);
    model_close(&m);
    f = file_read("tiny-qwen3.gguf");
    add_str(&f, "qwen3.rope.scaling.type", "linear");
    add_f32(&f, "qwen3.rope.scaling.factor", 2);
    m = open_bytes(kn, &f);
    logits_spaced(m, 2, scaled);
    model_close(&m);
    f = file_read("tiny-qwen3.gguf");
    add_f32(&f, "qwen3.rope.scale_linear", 2);
    m = open_bytes(kn, &f);
    logits_spaced(m, 2, older);
    model_close(&m);
    assert_memory_equal(scaled, plain, sizeof plain);
    assert_memory_equal(older, plain, sizeof plain);
    assert_memory_not_equal(near, plain, sizeof plain);
    kn_close(&kn);
}

/* Keys that may be left out, and what stands in for them. */
static void optional_keys_have_defaults(void **state)
{
    static const char *const optional[] = {
        "llama.attention.key_length", "llama.attention.value_length",
        "llama.rope.dimension_count", "llama.rope.freq_base", /* 10000, as this file has it */
        "llama.vocab_size",
    };
    float whole[384], less[384];
    struct kn *kn = ref_open();
    char other[64];
    (void)state;

    struct bytes f = file_read("tiny-llama.gguf");
    struct model *m = open_bytes(kn, &f);
    logits_spaced(m, 3, whole);
    model_close(&m);
    f = file_read("tiny-llama.gguf");
    for (unsigned k = 0; k < ARRAY_LEN(optional); k++) {
        snprintf(other, sizeof other, "%s", optional[k]);
        other[strlen(other) - 1] = '_';
        rename_to(&f, optional[k], other);
    }
    add_str(&f, "llama.rope.scaling.type", "none");
    add_f32(&f, "llama.rope.scaling.attn_factor", 1);
    add_u32(&f, "llama.expert_count", 0);
    m = open_bytes(kn, &f);
    logits_spaced(m, 3, less);
    assert_memory_equal(less, whole, sizeof whole);
    model_close(&m);
    kn_close(&kn);
}

static void an_attention_window_limits_the_context(void **state)
{
    static const uint32_t windows[] = {100, 0, 5000}, contexts[] = {100, 1024, 1024};
    struct kn *kn = ref_open();
    (void)state;

    for (unsigned k = 0; k < ARRAY_LEN(windows); k++) {
        struct bytes f = file_read("tiny-llama.gguf");
        add_u32(&f, "llama.attention.sliding_window", windows[k]);
        struct model *m = open_bytes(kn, &f);
        assert_int_equal(model_info(m)->context_train, contexts[k]);
        model_close(&m);
    }
    kn_close(&kn);
}

/* ---- wrong files -------------------------------------------------------------------------------
 */

static void a_missing_key_is_named(void **state)
{
    static const char *const required[] = {
        "qwen3.block_count",          "qwen3.context_length",
        "qwen3.embedding_length",     "qwen3.feed_forward_length",
        "qwen3.attention.head_count", "qwen3.attention.layer_norm_rms_epsilon",
    };
    struct bytes f;
    char other[64];
    (void)state;

    for (unsigned k = 0; k < ARRAY_LEN(required); k++) {
        f = file_read("tiny-qwen3.gguf");
        snprintf(other, sizeof other, "%s", required[k]);
        other[strlen(other) - 1] = '_';
        rename_to(&f, required[k], other);
        refused(&f, BC_ECORRUPT, required[k], "missing");
    }
    f = file_read("tiny-llama.gguf");
    rename_to(&f, "general.architecture", "general.architecturE");
    refused(&f, BC_ECORRUPT, "general.architecture", "missing");
    f = file_read("tiny-llama.gguf");
    memcpy(find_string(&f, "general.architecture") + 20 + 4 + 8, "gemma", 5);
    struct kn *kn = ref_open();
    struct err e = {0};
    struct gguf *g;
    struct model *m;
    assert_int_equal(gguf_parse(&g, f.b, f.n, &e), BC_OK);
    assert_int_equal(model_open(&m, kn, g, NULL, NULL, NULL, &e), BC_EUNSUPPORTED);
    assert_string_equal(e.field, "general.architecture");
    assert_non_null(strstr(e.text, "gemma"));
    assert_non_null(strstr(e.text, "llama, qwen2, qwen3"));
    gguf_close(&g);
    kn_close(&kn);
    free(f.b);
}

static void a_number_out_of_range_is_named(void **state)
{
    static const struct {
        const char *key;
        uint32_t value;
    } cases[] = {
        {"llama.block_count", 0},
        {"llama.block_count", 513},
        {"llama.context_length", 0},
        {"llama.context_length", 0x80000000u},
        {"llama.embedding_length", 0},
        {"llama.embedding_length", 65537},
        {"llama.feed_forward_length", 0},
        {"llama.feed_forward_length", UINT32_MAX},
        {"llama.attention.head_count", 0},
        {"llama.attention.head_count", 1025},
        {"llama.attention.head_count_kv", 0},
        {"llama.attention.head_count_kv", 3}, /* does not divide 4 */
        {"llama.attention.head_count_kv", 8}, /* nor this */
        {"llama.attention.key_length", 0},
        {"llama.rope.dimension_count", 0},
        {"llama.rope.dimension_count", 7},
        {"llama.rope.dimension_count", 18}, /* more than the head has */
        {"llama.vocab_size", 383},
    };
    static const float floats[] = {-1, 2, NAN, INFINITY};
    (void)state;

    for (unsigned k = 0; k < ARRAY_LEN(cases); k++) {
        struct bytes f = file_read("tiny-llama.gguf");
        set_u32(&f, cases[k].key, cases[k].value);
        refused(&f, BC_ECORRUPT, cases[k].key, "");
    }
    for (unsigned k = 0; k < ARRAY_LEN(floats); k++) {
        struct bytes f = file_read("tiny-llama.gguf");
        set_f32(&f, "llama.attention.layer_norm_rms_epsilon", floats[k]);
        refused(&f, BC_ECORRUPT, "llama.attention.layer_norm_rms_epsilon", "");
        if (floats[k] == 2) /* a fine base */
            continue;
        f = file_read("tiny-llama.gguf");
        set_f32(&f, "llama.rope.freq_base", floats[k]);
        refused(&f, BC_ECORRUPT, "llama.rope.freq_base", "");
    }
}

/* Well-formed things that would change the results. */
static void what_cannot_be_done_is_refused(void **state)
{
    struct bytes f;
    (void)state;

    f = file_read("tiny-llama.gguf"); /* heads of more dimensions than the kernels have room for */
    set_u32(&f, "llama.attention.key_length", 258);
    refused(&f, BC_EUNSUPPORTED, "llama.attention.key_length", "258");
    f = file_read("tiny-llama.gguf"); /* odd ones */
    set_u32(&f, "llama.attention.key_length", 17);
    refused(&f, BC_EUNSUPPORTED, "llama.attention.key_length", "17");
    f = file_read("tiny-llama.gguf");
    set_u32(&f, "llama.attention.value_length", 32);
    refused(&f, BC_EUNSUPPORTED, "llama.attention.value_length", "32");
    f = file_read("tiny-qwen2.gguf");
    set_u32(&f, "qwen2.rope.dimension_count", 8);
    refused(&f, BC_EUNSUPPORTED, "qwen2.rope.dimension_count", "8");
    f = file_read("tiny-qwen3.gguf");
    set_u32(&f, "qwen3.rope.dimension_count", 16);
    refused(&f, BC_EUNSUPPORTED, "qwen3.rope.dimension_count", "16");
    f = file_read("tiny-llama.gguf");
    add_u32(&f, "llama.expert_count", 8);
    refused(&f, BC_EUNSUPPORTED, "llama.expert_count", "8");
    f = file_read("tiny-llama.gguf");
    add_str(&f, "llama.rope.scaling.type", "yarn");
    refused(&f, BC_EUNSUPPORTED, "llama.rope.scaling.type", "yarn");
    f = file_read("tiny-llama.gguf");
    add_str(&f, "llama.rope.scaling.type", "linear");
    refused(&f, BC_ECORRUPT, "llama.rope.scaling.factor", "missing");
    f = file_read("tiny-llama.gguf");
    add_str(&f, "llama.rope.scaling.type", "linear");
    add_f32(&f, "llama.rope.scaling.factor", 0);
    refused(&f, BC_ECORRUPT, "llama.rope.scaling.factor", "0");
    f = file_read("tiny-llama.gguf");
    add_u32(&f, "llama.rope.scaling.type", 1);
    refused(&f, BC_ECORRUPT, "llama.rope.scaling.type", "");
    f = file_read("tiny-llama.gguf");
    add_f32(&f, "llama.rope.scaling.attn_factor", 1.5f);
    refused(&f, BC_EUNSUPPORTED, "llama.rope.scaling.attn_factor", "1.5");
    f = file_read("tiny-qwen2.gguf"); /* a bias that this family does not have */
    rename_to(&f, "blk.2.attn_q.bias", "blk.9.attn_q.bias");
    refused(&f, BC_ECORRUPT, "blk.2.attn_q.bias", "missing");
}

/* The q/k norms of qwen3 under llama's name: tensors that would be ignored. */
static void a_tensor_without_use_is_refused(void **state)
{
    struct bytes f = file_read("tiny-llama-rope3.gguf");
    (void)state;

    rename_to(&f, "rope_freqs.weight", "rope_freqz.weight");
    refused(&f, BC_EUNSUPPORTED, "rope_freqz.weight", "no place");
}

static void a_missing_or_misshapen_tensor_is_named(void **state)
{
    static const char *const names[] = {
        "token_embd.weight",        "output_norm.weight",    "blk.0.attn_norm.weight",
        "blk.1.attn_q.weight",      "blk.2.attn_k.weight",   "blk.3.attn_v.weight",
        "blk.0.attn_output.weight", "blk.1.ffn_norm.weight", "blk.2.ffn_gate.weight",
        "blk.3.ffn_up.weight",      "blk.0.ffn_down.weight", "blk.1.attn_q_norm.weight",
        "blk.2.attn_k_norm.weight",
    };
    char other[64];
    (void)state;

    for (unsigned k = 0; k < ARRAY_LEN(names); k++) {
        struct bytes f = file_read("tiny-qwen3.gguf");
        snprintf(other, sizeof other, "%s", names[k]);
        other[strlen(other) - 1] = 'T';
        rename_to(&f, names[k], other);
        refused(&f, BC_ECORRUPT, names[k], "missing");
        f = file_read("tiny-qwen3.gguf");
        set_dim(&f, names[k], 0, 16); /* fewer bytes, so the reader does not mind */
        refused(&f, BC_ECORRUPT, names[k], "16");
    }
    struct bytes f = file_read("tiny-qwen3.gguf"); /* the vocabulary's two sizes */
    set_dim(&f, "token_embd.weight", 1, 383);
    rename_to(&f, "qwen3.vocab_size", "qwen3.vocab_sizE");
    refused(&f, BC_ECORRUPT, "tokenizer.ggml.tokens", "383");
    f = file_read("tiny-llama-rope3.gguf"); /* an untied head of another size */
    set_dim(&f, "output.weight", 1, 100);
    refused(&f, BC_ECORRUPT, "output.weight", "100");
    f = file_read("tiny-llama-rope3.gguf"); /* divisors that are none */
    set_dim(&f, "rope_freqs.weight", 0, 4);
    refused(&f, BC_ECORRUPT, "rope_freqs.weight", "4");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_model_says_what_it_is),
        cmocka_unit_test(bytes_are_counted_exactly),
        cmocka_unit_test(options_out_of_range_are_refused),
        cmocka_unit_test(linear_rope_scaling_divides_positions),
        cmocka_unit_test(optional_keys_have_defaults),
        cmocka_unit_test(an_attention_window_limits_the_context),
        cmocka_unit_test(a_missing_key_is_named),
        cmocka_unit_test(a_number_out_of_range_is_named),
        cmocka_unit_test(what_cannot_be_done_is_refused),
        cmocka_unit_test(a_tensor_without_use_is_refused),
        cmocka_unit_test(a_missing_or_misshapen_tensor_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
