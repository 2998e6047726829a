/* Damaged model files: cut at 200 places, and 2,000 files with one changed byte in their header. Each is refused with an
 * error that says what, or opens; what opens must run a forward and both score passes (of numbers that mean nothing), and give
 * every byte back. The sanitizer builds watch. */
#include "gguf_bytes.h"
#include "model_rig.h"

static uint32_t seed = 99;

static uint32_t draw(uint32_t n)
{
    seed = seed * 1664525u + 1013904223u;
    return (uint32_t)(((uint64_t)seed * n) >> 32);
}

/* Runs every kind of pass over four tokens. */
static void run(struct model *m)
{
    static const uint32_t seq[4], lo[4], hi[4] = {1, 2, 3, 4}, slots[4] = {3, 1, 0, 2},
                                         rows[] = {3};
    const struct model_info *info = model_info(m);
    struct kn *kn = model_kn(m);
    struct kn_kv kv;
    struct err e = {0};
    int32_t ids[4], positions[4] = {0, 1, 2, 3};
    float scores[4];

    for (uint32_t i = 0; i < 4; i++)
        ids[i] = (int32_t)((i * 77) % info->n_vocab);
    model_kv_shape(m, KN_F16, true, &kv);
    assert_int_equal(kn->ops->arena_open(kn, kv.stride, 1, &kv.base), 0);
    assert_int_equal(kn->ops->arena_commit(kn, kv.base, kv.stride, 0), 0);
    float *logits = malloc(info->n_vocab * sizeof *logits);
    struct kn_seq s = {&kv, slots, 4};
    struct kn_batch b = {.n_rows = 4,
                         .n_seqs = 1,
                         .ids = ids,
                         .positions = positions,
                         .seq = seq,
                         .lo = lo,
                         .hi = hi,
                         .slots = slots,
                         .seqs = &s};
    struct model_out out = {.rows = rows, .n = 1, .logits = logits};
    assert_int_equal(model_forward(m, &b, &out, &e), BC_OK);
    for (unsigned k = 0; k < 4; k++) {
        struct model_score job = {
            .seq = s, .ids = ids, .positions = positions, .fast = k & 1, .logprob = k & 2};
        assert_int_equal(model_score_rows(m, &job, 0, 4, scores, &e), BC_OK);
        assert_true(scores[3] == -INFINITY);
    }
    free(logits);
    kn->ops->arena_release(kn, kv.base, kv.stride, 0);
    kn->ops->arena_close(kn, kv.base, kv.stride, 1);
}

/* Returns whether it opened. */
static bool try_file(struct kn *kn, const struct bytes *f, size_t n)
{
    struct model_options o = {.max_rows = 4, .max_out = 1};
    struct gguf *g = NULL;
    struct model *m = NULL;
    struct err e = {0};

    int rc = gguf_parse(&g, f->b, n, &e);
    if (rc == BC_OK)
        rc = model_open(&m, kn, g, &o, NULL, NULL, &e);
    gguf_close(&g);
    if (rc == BC_OK) {
        run(m);
        model_close(&m);
    } else {
        assert_int_equal(rc, e.code);
        assert_true(e.text[0] != '\0');
        assert_null(m);
    }
    assert_int_equal(kn->bytes_buffers + kn->bytes_weights + kn->bytes_arena, 0);
    return rc == BC_OK;
}

static void damaged_files_are_refused_or_run(void **state)
{
    static const char *const names[] = {"tiny-llama-q4_0.gguf", "tiny-qwen2.gguf"};
    struct kn_options ko = {.backend = "auto"};
    unsigned n_opened = 0, n_changed = 0;
    struct kn *kn;
    (void)state;

    assert_int_equal(kn_open(&kn, &ko, NULL, 0), KN_OK);
    for (unsigned k = 0; k < ARRAY_LEN(names); k++) {
        struct bytes f = file_read(names[k]);
        struct gguf *g = golden_open(names[k]);
        size_t header = f.n;
        for (size_t i = 0; i < gguf_n_tensors(g); i++)
            header -= gguf_tensor_at(g, i)->bytes;
        gguf_close(&g);
        assert_true(try_file(kn, &f, f.n));
        for (unsigned i = 0; i < 100; i++)
            assert_false(try_file(kn, &f, draw((uint32_t)f.n)));
        for (unsigned i = 0; i < 1000; i++, n_changed++) {
            uint8_t *at = f.b + draw((uint32_t)header), old = *at;
            *at ^= (uint8_t)(1 + draw(255));
            n_opened += try_file(kn, &f, f.n);
            *at = old;
        }
        free(f.b);
    }
    print_message("of %u files with one wrong byte %u opened\n", n_changed, n_opened);
    assert_true(n_opened > 0 && n_opened < n_changed);
    kn_close(&kn);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(damaged_files_are_refused_or_run),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
