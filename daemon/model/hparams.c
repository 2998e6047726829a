/* hparams.c: reads and checks the numbers of a model. See hparams.h.
 *
 * Order of the checks: presence, range, then the relations between numbers. What a file may ask for
 * and we cannot do (experts, other rotary scalings) is refused here, by name, before any weight is
 * touched. */
#include "hparams.h"
#include "kn.h"
#include "log.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

/* One file and its prefix; ok stays false after the first failure, so that a list of reads is a
 * list. */
struct reader {
    const struct gguf *g;
    const char *family;
    char key[96];
    int rc;
    struct err *e;
};

static const char *key_of(struct reader *r, const char *name)
{
    snprintf(r->key, sizeof r->key, "%s.%s", r->family, name);
    return r->key;
}

static void fail_missing(struct reader *r)
{
    r->rc = err_set(r->e, BC_ECORRUPT, r->key, "key %s is missing", r->key);
}

/* A number in lo..hi. fallback 0: the key must be there. */
static uint32_t read_u32(struct reader *r, const char *name, uint32_t lo, uint32_t hi,
                         uint32_t fallback)
{
    uint32_t v = fallback;

    if (r->rc)
        return fallback;
    int rc = gguf_get_u32(r->g, key_of(r, name), &v, r->e);
    if (rc == BC_ENOTFOUND && fallback == 0) {
        fail_missing(r);
        return 0;
    }
    if (rc != BC_OK && rc != BC_ENOTFOUND) {
        r->rc = rc;
        return fallback;
    }
    if (v < lo || v > hi)
        r->rc =
            err_set(r->e, BC_ECORRUPT, r->key, "key %s is %u: must be %u to %u", r->key, v, lo, hi);
    return v;
}

/* A finite number in lo..hi. fallback < 0: the key must be there. */
static float read_f32(struct reader *r, const char *name, float lo, float hi, float fallback)
{
    float v = fallback;

    if (r->rc)
        return fallback;
    int rc = gguf_get_f32(r->g, key_of(r, name), &v, r->e);
    if (rc == BC_ENOTFOUND && fallback < 0) {
        fail_missing(r);
        return 0;
    }
    if (rc != BC_OK && rc != BC_ENOTFOUND) {
        r->rc = rc;
        return fallback;
    }
    if (!(v >= lo && v <= hi)) /* NaN fails too */
        r->rc = err_set(r->e, BC_ECORRUPT, r->key, "key %s is %g: must be %g to %g", r->key,
                        (double)v, (double)lo, (double)hi);
    return v;
}

/* rope.scaling.type none or linear; the older rope.scale_linear means the latter. */
static float read_rope_factor(struct reader *r)
{
    struct gguf_str type;

    if (r->rc)
        return 1;
    float attn = read_f32(r, "rope.scaling.attn_factor", -INFINITY, INFINITY, 1);
    if (r->rc == BC_OK && attn != 1)
        r->rc = err_set(r->e, BC_EUNSUPPORTED, r->key, "key %s is %g: only 1 is supported", r->key,
                        (double)attn);
    if (r->rc)
        return 1;
    int rc = gguf_get_str(r->g, key_of(r, "rope.scaling.type"), &type, r->e);
    if (rc == BC_ENOTFOUND)
        return read_f32(r, "rope.scale_linear", 1e-6f, 1e6f, 1);
    if (rc) {
        r->rc = rc;
        return 1;
    }
    if (type.len == 4 && memcmp(type.s, "none", 4) == 0)
        return 1;
    if (type.len == 6 && memcmp(type.s, "linear", 6) == 0)
        return read_f32(r, "rope.scaling.factor", 1e-6f, 1e6f, -1);
    r->rc = err_set(r->e, BC_EUNSUPPORTED, r->key,
                    "rotary scaling \"%.*s\" in key %s is not supported (none and linear are)",
                    (int)BC_MIN(type.len, 32), type.s, r->key);
    return 1;
}

static void check_heads(struct reader *r, const struct hparams *hp, bool head_dim_given)
{
    if (r->rc)
        return;
    if (hp->n_heads % hp->n_kv_heads)
        r->rc = err_set(r->e, BC_ECORRUPT, key_of(r, "attention.head_count_kv"),
                        "%u heads do not divide among the %u of key %s", hp->n_heads,
                        hp->n_kv_heads, r->key);
    else if (!head_dim_given && hp->d_model % hp->n_heads)
        r->rc = err_set(r->e, BC_ECORRUPT, key_of(r, "embedding_length"),
                        "key %s is %u: no multiple of %u heads", r->key, hp->d_model, hp->n_heads);
    else if (hp->head_dim < 2 || hp->head_dim > KN_HEAD_DIM_MAX || hp->head_dim % 2)
        r->rc =
            err_set(r->e, BC_EUNSUPPORTED, key_of(r, "attention.key_length"),
                    "heads of %u dimensions (key %s, or embedding / heads): must be even, 2 to %d",
                    hp->head_dim, r->key, KN_HEAD_DIM_MAX);
}

/* Things that a family's file may carry, and that would change the results. */
static void refuse_unsupported(struct reader *r, const struct hparams *hp)
{
    uint32_t v = read_u32(r, "attention.value_length", 1, UINT32_MAX, hp->head_dim);
    if (r->rc == BC_OK && v != hp->head_dim)
        r->rc = err_set(r->e, BC_EUNSUPPORTED, r->key, "key %s is %u, keys have %u: must be equal",
                        r->key, v, hp->head_dim);
    if (r->rc == BC_OK && gguf_has(r->g, key_of(r, "expert_count"))) {
        v = 0;
        r->rc = gguf_get_u32(r->g, r->key, &v, r->e);
        if (r->rc == BC_OK && v != 0)
            r->rc = err_set(r->e, BC_EUNSUPPORTED, r->key,
                            "key %s is %u: mixtures of experts are not supported", r->key, v);
    }
}

/* Attention limited to a window equals full attention for positions inside it: the model serves
 * those. */
static void limit_to_window(struct reader *r, struct hparams *hp)
{
    uint32_t window = 0;

    if (r->rc || !gguf_has(r->g, key_of(r, "attention.sliding_window")))
        return;
    r->rc = gguf_get_u32(r->g, r->key, &window, r->e);
    if (r->rc == BC_OK && window > 0 && window < hp->context_train) {
        log_info("model", "%s: context %u cut to the attention window of %u", r->key,
                 hp->context_train, window);
        hp->context_train = window;
    }
}

/* The vocabulary's size is that of the embedding; whatever else states it must agree. */
static void read_vocab(struct reader *r, struct hparams *hp)
{
    static const char embd[] = "token_embd.weight", tokens[] = "tokenizer.ggml.tokens";
    enum gguf_kind kind;
    size_t n;

    if (r->rc)
        return;
    const struct gguf_tensor *t = gguf_tensor_find(r->g, embd);
    if (!t) {
        r->rc = err_set(r->e, BC_ECORRUPT, embd, "tensor %s is missing", embd);
        return;
    }
    if (t->n_dims != 2 || t->dims[1] < 1 || t->dims[1] > VOCAB_MAX) {
        r->rc = err_set(r->e, BC_ECORRUPT, embd,
                        "tensor %s has %u dimensions and %llu rows: must be 2 and 1 to %u", embd,
                        t->n_dims, (unsigned long long)t->dims[1], VOCAB_MAX);
        return;
    }
    hp->n_vocab = (uint32_t)t->dims[1];
    uint32_t stated = read_u32(r, "vocab_size", 1, UINT32_MAX, hp->n_vocab);
    if (r->rc == BC_OK && stated != hp->n_vocab)
        r->rc = err_set(r->e, BC_ECORRUPT, r->key, "key %s is %u, but %s has %u rows", r->key,
                        stated, embd, hp->n_vocab);
    if (r->rc || !gguf_has(r->g, tokens))
        return;
    r->rc = gguf_array(r->g, tokens, &kind, &n, r->e);
    if (r->rc == BC_OK && n != hp->n_vocab)
        r->rc = err_set(r->e, BC_ECORRUPT, tokens, "%s has %zu tokens, but %s has %u rows", tokens,
                        n, embd, hp->n_vocab);
}

int hparams_read(const struct gguf *g, const char *family, struct hparams *ret, struct err *e)
{
    struct reader r = {.g = g, .family = family, .e = e};
    struct hparams hp = {0};

    hp.n_layers = read_u32(&r, "block_count", 1, LAYERS_MAX, 0);
    hp.context_train = read_u32(&r, "context_length", 1, INT32_MAX, 0);
    hp.context_train = BC_MIN(hp.context_train, CONTEXT_MAX);
    hp.d_model = read_u32(&r, "embedding_length", 1, D_MODEL_MAX, 0);
    hp.n_ff = read_u32(&r, "feed_forward_length", 1, FF_MAX, 0);
    hp.n_heads = read_u32(&r, "attention.head_count", 1, HEADS_MAX, 0);
    hp.n_kv_heads = read_u32(&r, "attention.head_count_kv", 1, HEADS_MAX, hp.n_heads);
    hp.norm_eps = read_f32(&r, "attention.layer_norm_rms_epsilon", 0, 1, -1);
    if (r.rc)
        return r.rc;
    bool given = gguf_has(g, key_of(&r, "attention.key_length"));
    hp.head_dim =
        read_u32(&r, "attention.key_length", 1, UINT32_MAX, BC_MAX(hp.d_model / hp.n_heads, 1));
    check_heads(&r, &hp, given);
    hp.n_rot = read_u32(&r, "rope.dimension_count", 2, hp.head_dim, hp.head_dim);
    if (r.rc == BC_OK && hp.n_rot % 2)
        r.rc = err_set(e, BC_ECORRUPT, r.key, "key %s is %u: must be even", r.key, hp.n_rot);
    hp.rope_base = read_f32(&r, "rope.freq_base", 1, 1e12f, 10000);
    hp.rope_factor = read_rope_factor(&r);
    refuse_unsupported(&r, &hp);
    limit_to_window(&r, &hp);
    read_vocab(&r, &hp);
    if (r.rc)
        return r.rc;
    *ret = hp;
    return BC_OK;
}

void hparams_frequencies(const struct hparams *hp, float *ret)
{
    for (uint32_t i = 0; i < hp->n_rot / 2; i++)
        ret[i] = (float)(pow(hp->rope_base, -2.0 * i / hp->n_rot) / hp->rope_factor);
}
