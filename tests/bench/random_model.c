/* random_model SHAPE f16|q4_0 PATH: a model file of random weights, to measure with where no model is at hand.
 *
 *   qwen2.5-7b   28 layers of 3584, 28 heads over 4, MLP 18944, vocabulary 152064, head of its own; 15.2 GB f16, 4.3 GB q4_0
 *   tiny         the same family, a thousandth of the work
 *
 * Its tokens are the 256 bytes and "w259", "w260" ..., so that a daemon can serve it. One block of random bytes is
 * written over and over: 9 MiB, which no cache of a GPU compresses away. */
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ALIGN 32u
#define BLOCK_BYTES (18u * 32768 * 16) /* whole blocks of either type */

enum gguf_value { VALUE_U32 = 4, VALUE_I32 = 5, VALUE_F32 = 6, VALUE_STRING = 8, VALUE_ARRAY = 9 };
enum token_type { TOKEN_NORMAL = 1, TOKEN_UNKNOWN = 2, TOKEN_CONTROL = 3, TOKEN_BYTE = 6 };
#define FIRST_BYTE 3u
#define FIRST_WORD (FIRST_BYTE + 256)
enum tensor_type { TYPE_F32 = 0, TYPE_F16 = 1, TYPE_Q4_0 = 2 };

static const struct shape {
    const char *name;
    uint32_t layers, d, heads, kv_heads, head_dim, ff, vocab;
} shapes[] = {{"qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, 152064},
              {"tiny", 2, 128, 4, 2, 32, 256, 1024}};

struct tensor {
    char name[64];
    uint32_t rows, cols; /* rows 0: a vector */
    enum tensor_type type;
    uint64_t offset;
};

struct writer {
    FILE *out;
    const struct shape *s;
    struct tensor *list;
    uint32_t n, cap;
    uint64_t data; /* bytes so far, aligned */
    uint8_t *weights, *norms;
};

static void die(const char *what)
{
    fprintf(stderr, "random_model: %s: %s\n", what, strerror(errno));
    exit(1);
}

static uint64_t tensor_bytes(const struct tensor *t)
{
    uint64_t n = (uint64_t)t->cols * (t->rows ? t->rows : 1);
    return t->type == TYPE_F32 ? 4 * n : t->type == TYPE_F16 ? 2 * n : n / 32 * 18;
}

static void add(struct writer *w, const char *name, uint32_t rows, uint32_t cols,
                enum tensor_type type)
{
    if (w->n == w->cap) {
        w->cap = w->cap ? 2 * w->cap : 64;
        w->list = realloc(w->list, w->cap * sizeof *w->list);
        if (!w->list)
            die("memory");
    }
    struct tensor *t = &w->list[w->n++];
    *t = (struct tensor){.rows = rows, .cols = cols, .type = type, .offset = w->data};
    snprintf(t->name, sizeof t->name, "%s", name);
    w->data += (tensor_bytes(t) + ALIGN - 1) / ALIGN * ALIGN;
}

static void add_layer(struct writer *w, uint32_t l, enum tensor_type type)
{
    const struct shape *s = w->s;
    uint32_t q = s->heads * s->head_dim, kv = s->kv_heads * s->head_dim, d = s->d;
    const struct {
        const char *name;
        uint32_t rows, cols;
    } parts[] = {{"attn_norm.weight", 0, d},  {"attn_q.weight", q, d},
                 {"attn_q.bias", 0, q},       {"attn_k.weight", kv, d},
                 {"attn_k.bias", 0, kv},      {"attn_v.weight", kv, d},
                 {"attn_v.bias", 0, kv},      {"attn_output.weight", d, q},
                 {"ffn_norm.weight", 0, d},   {"ffn_gate.weight", s->ff, d},
                 {"ffn_up.weight", s->ff, d}, {"ffn_down.weight", d, s->ff}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        char name[64];
        snprintf(name, sizeof name, "blk.%u.%s", l, parts[i].name);
        add(w, name, parts[i].rows, parts[i].cols, parts[i].rows ? type : TYPE_F32);
    }
}

/* ---- bytes ---- */

static void put(struct writer *w, const void *p, size_t n)
{
    if (fwrite(p, 1, n, w->out) != n)
        die("writing");
}

static void put32(struct writer *w, uint32_t v)
{
    put(w, &v, sizeof v);
}

static void put64(struct writer *w, uint64_t v)
{
    put(w, &v, sizeof v);
}

static void put_text(struct writer *w, const char *s)
{
    put64(w, strlen(s));
    put(w, s, strlen(s));
}

static void key_u32(struct writer *w, const char *name, uint32_t v)
{
    put_text(w, name);
    put32(w, VALUE_U32);
    put32(w, v);
}

static void key_f32(struct writer *w, const char *name, float v)
{
    put_text(w, name);
    put32(w, VALUE_F32);
    put(w, &v, sizeof v);
}

static void key_text(struct writer *w, const char *name, const char *v)
{
    put_text(w, name);
    put32(w, VALUE_STRING);
    put_text(w, v);
}

static void key_array(struct writer *w, const char *name, uint32_t type)
{
    put_text(w, name);
    put32(w, VALUE_ARRAY);
    put32(w, type);
    put64(w, w->s->vocab);
}

static void tokens_write(struct writer *w)
{
    static const char *const special[FIRST_BYTE] = {"<unk>", "<s>", "</s>"};
    key_text(w, "tokenizer.ggml.model", "llama");
    key_array(w, "tokenizer.ggml.tokens", VALUE_STRING);
    for (uint32_t i = 0; i < w->s->vocab; i++) {
        char text[16];
        if (i < FIRST_BYTE)
            snprintf(text, sizeof text, "%s", special[i]);
        else if (i < FIRST_WORD)
            snprintf(text, sizeof text, "<0x%02X>", i - FIRST_BYTE);
        else
            snprintf(text, sizeof text, "w%u", i);
        put_text(w, text);
    }
    key_array(w, "tokenizer.ggml.scores", VALUE_F32);
    for (uint32_t i = 0; i < w->s->vocab; i++) {
        float score = -(float)i;
        put(w, &score, 4);
    }
    key_array(w, "tokenizer.ggml.token_type", VALUE_I32);
    for (uint32_t i = 0; i < w->s->vocab; i++)
        put32(w, i == 0           ? TOKEN_UNKNOWN
                 : i < FIRST_BYTE ? TOKEN_CONTROL
                 : i < FIRST_WORD ? TOKEN_BYTE
                                  : TOKEN_NORMAL);
    key_u32(w, "tokenizer.ggml.bos_token_id", 1);
    key_u32(w, "tokenizer.ggml.eos_token_id", 2);
}

static void head_write(struct writer *w)
{
    const struct shape *s = w->s;
    put(w, "GGUF", 4);
    put32(w, 3);
    put64(w, w->n);
    put64(w, 17);
    key_text(w, "general.architecture", "qwen2");
    key_text(w, "general.name", s->name);
    key_u32(w, "general.alignment", ALIGN);
    key_u32(w, "qwen2.block_count", s->layers);
    key_u32(w, "qwen2.context_length", 131072);
    key_u32(w, "qwen2.embedding_length", s->d);
    key_u32(w, "qwen2.feed_forward_length", s->ff);
    key_u32(w, "qwen2.attention.head_count", s->heads);
    key_u32(w, "qwen2.attention.head_count_kv", s->kv_heads);
    key_f32(w, "qwen2.attention.layer_norm_rms_epsilon", 1e-6f);
    key_f32(w, "qwen2.rope.freq_base", 1e6f);
    tokens_write(w);
    for (uint32_t i = 0; i < w->n; i++) {
        const struct tensor *t = &w->list[i];
        put_text(w, t->name);
        put32(w, t->rows ? 2 : 1);
        put64(w, t->cols);
        if (t->rows)
            put64(w, t->rows);
        put32(w, t->type);
        put64(w, t->offset);
    }
}

/* ---- values ---- */

static uint64_t next(uint64_t *x)
{
    *x ^= *x << 13;
    *x ^= *x >> 7;
    *x ^= *x << 17;
    return *x;
}

/* Halves within 2^-6 .. 2^-5 of either sign, or blocks of a scale and 32 codes: sums neither vanish nor overflow. */
static void weights_fill(struct writer *w, enum tensor_type type)
{
    uint64_t x = 0x2545f4914f6cdd1du;
    w->weights = malloc(BLOCK_BYTES);
    w->norms = malloc(BLOCK_BYTES);
    if (!w->weights || !w->norms)
        die("memory");
    for (uint32_t i = 0; i < BLOCK_BYTES; i += 2) {
        uint16_t bits = (uint16_t)next(&x);
        if (type == TYPE_F16)
            bits = (uint16_t)((bits & 0x83ff) | 0x2400);
        else if (i % 18 == 0)
            bits = (uint16_t)((bits & 0x3ff) | 0x1800); /* a scale of 2^-9 .. 2^-8 */
        memcpy(w->weights + i, &bits, 2);
    }
    for (uint32_t i = 0; i < BLOCK_BYTES; i += 4) { /* around 1 for norms; biases do not mind */
        float v = 0.75f + 0.5f * (float)(next(&x) >> 40) / 16777216.0f;
        memcpy(w->norms + i, &v, 4);
    }
}

static void data_write(struct writer *w)
{
    static const uint8_t zeros[ALIGN];
    long at = ftell(w->out);
    if (at < 0)
        die("writing");
    put(w, zeros, (ALIGN - (size_t)at % ALIGN) % ALIGN);
    for (uint32_t i = 0; i < w->n; i++) {
        const struct tensor *t = &w->list[i];
        const uint8_t *from = t->type == TYPE_F32 ? w->norms : w->weights;
        uint64_t bytes = tensor_bytes(t);
        for (uint64_t done = 0; done < bytes; done += BLOCK_BYTES)
            put(w, from, bytes - done < BLOCK_BYTES ? (size_t)(bytes - done) : BLOCK_BYTES);
        put(w, zeros, (size_t)((ALIGN - bytes % ALIGN) % ALIGN));
    }
}

int main(int argc, char **argv)
{
    struct writer w = {0};
    bool half = argc == 4 && strcmp(argv[2], "f16") == 0;
    enum tensor_type type = half ? TYPE_F16 : TYPE_Q4_0;
    for (size_t i = 0; argc == 4 && i < sizeof shapes / sizeof *shapes; i++)
        if (strcmp(argv[1], shapes[i].name) == 0)
            w.s = &shapes[i];
    if (!w.s || (!half && strcmp(argv[2], "q4_0") != 0)) {
        fprintf(stderr, "usage: random_model qwen2.5-7b|tiny f16|q4_0 PATH\n");
        return 2;
    }
    if (!(w.out = fopen(argv[3], "wb")))
        die(argv[3]);
    add(&w, "token_embd.weight", w.s->vocab, w.s->d, type);
    for (uint32_t l = 0; l < w.s->layers; l++)
        add_layer(&w, l, type);
    add(&w, "output_norm.weight", 0, w.s->d, TYPE_F32);
    add(&w, "output.weight", w.s->vocab, w.s->d, type);
    weights_fill(&w, type);
    head_write(&w);
    data_write(&w);
    if (fclose(w.out) != 0)
        die(argv[3]);
    free(w.list);
    free(w.weights);
    free(w.norms);
    return 0;
}
