/* Quantised weights: the tiny llama in Q8_0, Q4_0 and Q4_1.
 *
 * The truth is the float file with the numbers that the blocks stand for written into it. ref computes on expanded weights,
 * so both files must give it the same bits. Fast backends round activations to 8 bits where weights are quantised: their
 * logits may lie this far from the truth (root mean square over 96 tokens, as a share of the logits' own; these models are
 * random, with weights so large that they amplify whatever is put in). */
#include "gguf_bytes.h"
#include "model_rig.h"

#define N_TOKENS 96
#define ROUNDED_ACTIVATIONS 0.15

static const char *const files[] = {"tiny-llama-q8_0.gguf", "tiny-llama-q4_0.gguf",
                                    "tiny-llama-q4_1.gguf"};

/* Logits [96][384] of the golden's tokens. Caller frees. */
static float *logits_of(const struct kn_options *ko, const struct gguf *file, const int32_t *tokens)
{
    struct rig_options o = {
        .file = file,
        .backend = ko->backend,
        .isa = ko->isa,
        .threads = 2,
        .max_rows = 32,
        .max_out = 32,
        .kv_type = KN_F32,
        .n_pages = 2,
    };
    struct rig rig;
    struct rseq s;

    rig_open(&rig, &o);
    rseq_open(&s, &rig, N_TOKENS);
    float *logits = malloc((size_t)N_TOKENS * rig.info->n_vocab * sizeof *logits);
    rseq_extend(&s, tokens, N_TOKENS, 0, 32, logits, false);
    rseq_close(&s);
    rig_close(&rig);
    return logits;
}

/* The float file f, parsed, with the values of `quantised` in it. */
static struct gguf *expanded(struct bytes *f, const struct gguf *quantised)
{
    struct gguf *g;
    struct err e = {0};
    unsigned n_changed = 0;

    assert_int_equal(gguf_parse(&g, f->b, f->n, &e), BC_OK);
    assert_int_equal(gguf_n_tensors(g), gguf_n_tensors(quantised));
    for (size_t i = 0; i < gguf_n_tensors(g); i++) {
        const struct gguf_tensor *to = gguf_tensor_at(g, i), *from;
        char name[64];
        snprintf(name, sizeof name, "%.*s", (int)to->name.len, to->name.s);
        from = gguf_tensor_find(quantised, name);
        assert_true(from && to->type == KN_F32 && from->dims[0] == to->dims[0]);
        kn_dequant(from->type, from->data, to->bytes / sizeof(float),
                   (float *)(f->b + ((const uint8_t *)to->data - f->b)));
        n_changed += from->type != KN_F32;
    }
    assert_int_equal(n_changed, 4 * 7 + 1);
    return g;
}

static double distance(const float *a, const float *b, size_t n)
{
    double diff = 0, size = 0;

    for (size_t i = 0; i < n; i++) {
        diff += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        size += (double)b[i] * b[i];
    }
    return sqrt(diff / size);
}

static void quantised_models_equal_their_expanded_selves(void **state)
{
    static const struct kn_options ref = {.backend = "ref"};
    struct gguf *golden = golden_open("golden-llama.gguf");
    struct kn_options ko;
    uint32_t n_tokens;
    (void)state;

    const int32_t *tokens = golden_i32(golden, "tokens", &n_tokens);
    const size_t n = N_TOKENS * 384;
    assert_int_equal(n_tokens, N_TOKENS);
    for (unsigned k = 0; k < ARRAY_LEN(files); k++) {
        struct bytes f = file_read("tiny-llama.gguf");
        struct gguf *quantised = golden_open(files[k]), *floats = expanded(&f, quantised);
        float *truth = logits_of(&ref, floats, tokens);
        for (unsigned i = 0; rig_backend(i, &ko); i++) {
            float *got = logits_of(&ko, quantised, tokens);
            double d = distance(got, truth, n);
            print_message("%s/%s %s: %.4f from the truth\n", ko.backend, ko.isa ? ko.isa : "best",
                          files[k], d);
            if (strcmp(ko.backend, "ref") == 0)
                assert_memory_equal(got, truth, n * sizeof *got);
            assert_true(d < ROUNDED_ACTIVATIONS);
            free(got);
        }
        free(truth);
        gguf_close(&floats);
        gguf_close(&quantised);
        free(f.b);
    }
    gguf_close(&golden);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(quantised_models_equal_their_expanded_selves),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
